"""The guards of `GlobalScoped` and of a request's record of the heap, each with what takes its place."""

from __future__ import annotations

from typing import Final

from mutant import Mutant

RECORD: Final = "src/handler/heap/record.rs"
TALLY: Final = "src/handler/heap/tally.rs"
SELECTED: Final = "src/handler/selected.rs"
SCOPED: Final = "src/memory/global_scoped.rs"

MUTANTS: Final = (
    # GlobalScoped: whose a block is
    Mutant(
        "a free elsewhere is not credited",
        TALLY,
        "return owner.freed_elsewhere(bytes);\n        }\n        tally.freed",
        "return;\n        }\n        tally.freed",
    ),
    Mutant(
        "a free is credited to whoever is selected",
        SCOPED,
        "            heap::freed(owner, layout.size());\n        }\n        if self",
        "            let _ = owner;\n        }\n        if self",
    ),
    Mutant(
        "a tally stays when something else is selected",
        TALLY,
        "        tally.flush();\n        tally.owner.set(owner.map",
        "        tally.owner.set(owner.map",
    ),
    Mutant(
        "a selection is not reported",
        SELECTED,
        "heap::select(word.and_then(requests::heap_of));",
        "let _ = (heap::select, requests::heap_of, word);",
    ),
    Mutant("a thread's end is not reported", SELECTED, "let _ = LEAVER.try_with(|_| ());", "let _ = &LEAVER;"),
    Mutant(
        "the peak is that of the sums",
        RECORD,
        "before.saturating_add(done.high_bytes)",
        "before.saturating_add(done.high_bytes.min(done.live_bytes))",
    ),
    Mutant(
        "a tally without blocks is the next request's",
        TALLY,
        "self.made_bytes.get() | self.freed_blocks",
        "self.made_blocks.get() | self.freed_blocks",
    ),
    Mutant(
        "what upstream refused was live",
        TALLY,
        "        self.live_bytes.set(live);\n        self.made_bytes",
        "        self.live_bytes.set(live);\n        self.high_bytes.set(self.high_bytes.get().max(live));\n"
        "        self.made_bytes",
    ),
    Mutant(
        "a resize is not counted",
        SCOPED,
        "            && let Err(Refused) = heap::resized(owner, layout.size(), new_size)",
        "            && let Err(Refused) = heap::resized(owner, layout.size(), layout.size())",
    ),
    Mutant(
        "a resize elsewhere is not counted",
        TALLY,
        "(false, Some(growth)) => owner.grown_elsewhere(growth),",
        "(false, Some(_)) => Ok(()),",
    ),
    Mutant(
        "a block that was not made counts",
        SCOPED,
        "            heap::not_made(owner, layout.size());\n            return start;",
        "            return start;",
    ),
    Mutant(
        "a resize that failed counts", SCOPED, "heap::not_resized(owner, layout.size(), new_size);", "let _ = owner;"
    ),
    Mutant(
        "what is unattributed counts",
        TALLY,
        "if unattributed::is_paused() || ",
        "if ",
    ),
    Mutant(
        "what is unattributed stays so",
        "src/unattributed.rs",
        "IS_PAUSED.set(self.was_paused);",
        "let _ = self.was_paused;",
    ),
    Mutant(
        "what ctxalloc keeps once counts",
        "src/sync/made.rs",
        "let unattributed = unattributed(); //",
        "let unattributed = (); //",
    ),
    Mutant(
        "what requests are kept in counts",
        "src/handler/requests/prepared.rs",
        "let _unattributed = unattributed(); // the request's own",
        "let _ = unattributed(); //",
    ),
    Mutant(
        "numbers of this thread are late",
        "src/handler/heap.rs",
        "        tally::flush(self.0);\n",
        "",
    ),
    # records
    Mutant("a record begins with old numbers", RECORD, "        self.total_bytes.store(0, Ordering::Relaxed);\n", ""),
    Mutant(
        "a record is not recycled",
        RECORD,
        "if self.live_blocks.fetch_or(ENDED, Ordering::AcqRel) == 0 {",
        "if self.live_blocks.fetch_or(ENDED, Ordering::AcqRel) == 7 << 40 {",
    ),
    Mutant(
        "a record is recycled too early",
        RECORD,
        "if self.live_blocks.fetch_or(ENDED, Ordering::AcqRel) == 0 {",
        "if self.live_blocks.fetch_or(ENDED, Ordering::AcqRel) < ENDED {",
    ),
    Mutant("the last block does not recycle", RECORD, "== ENDED | 1 {", "== ENDED | 7 << 40 {"),
    Mutant(
        "the lock of records is not held across fork",
        RECORD,
        "held_across_fork(Pops(ForkLock::new()))",
        "{ let _ = held_across_fork::<Pops>; Arc::new(Pops(ForkLock::new())) }",
    ),
    # limits
    Mutant(
        "a limit refuses nothing",
        RECORD,
        "        self.refused.fetch_add(1, Ordering::Relaxed);\n        Err(Refused)",
        "        self.refused.fetch_add(1, Ordering::Relaxed);\n        Ok(())",
    ),
    Mutant(
        "a limit refuses always",
        RECORD,
        "if !self.refuses.load(Ordering::Relaxed) || panicking() {",
        "if panicking() {",
    ),
    Mutant("a panic is refused memory", RECORD, " || panicking() {", " || (panicking() && false) {"),
    Mutant(
        "a large block is its thread's", TALLY, " || bytes >= QUANTUM {\n            return", " {\n            return"
    ),
    Mutant(
        "what a thread frees is its own",
        TALLY,
        "if live <= -QUANTUM.cast_signed() {",
        "if live <= -QUANTUM.cast_signed() << 30 {",
    ),
    Mutant(
        "past a limit a thread is free",
        TALLY,
        "room.min(QUANTUM.cast_signed())",
        "room.clamp(bytes.cast_signed(), QUANTUM.cast_signed())",
    ),
    Mutant(
        "threads pass a limit together",
        RECORD,
        "bytes.cast_signed() <= self.room_beside(live)",
        "bytes > 0 || self.room_beside(live) > 0",
    ),
    Mutant("what exceeds a limit is not noted", RECORD, "        self.exceeded.fetch_add(1, Ordering::Relaxed);\n", ""),
    Mutant("the last request's ceiling holds for the next", TALLY, "        self.ceiling_bytes.set(isize::MIN);\n", ""),
    Mutant("a thread may take a MiB", TALLY, "QUANTUM: usize = 64 << 10", "QUANTUM: usize = 1 << 20"),
    Mutant(
        "a resize elsewhere has no limit",
        RECORD,
        "        self.grow(bytes)?;\n",
        "        self.live_bytes.fetch_add(bytes, Ordering::Relaxed);\n",
    ),
    # upstream
    Mutant(
        "upstream is entered twice",
        SCOPED,
        "self.may_call_back() && PLACE.get() != Place::Outside",
        "self.may_call_back() && false",
    ),
    Mutant("what upstream freed stays", SCOPED, "            self.0.free_later();\n", ""),
    Mutant(
        "what upstream made is upstream's",
        SCOPED,
        "Self::with_word(start, layout, REENTRANT)",
        "Self::with_word(start, layout, ptr::null())",
    ),
    Mutant(
        "what upstream resizes is resized by it",
        SCOPED,
        "if self.is_reentrant(owner) || self.is_inside() {",
        "if self.is_reentrant(owner) {",
    ),
    Mutant(
        "a block with a word is aligned to one",
        SCOPED,
        "layout.align().max(PLAIN_ALIGN)",
        "layout.align().max(WORD)",
    ),
    Mutant(
        "the exception of a panic is a request's",
        SCOPED,
        "&& thread::panicking();",
        "&& false;",
    ),
    Mutant("a plain block is freed later as another", SCOPED, "usize::from(is_plain))", "usize::from(false))"),
)
