"""Takes each guard of the tower layer and of `GlobalScoped` out, one at a time, in a copy of the tree.

A test must notice. At the end it names the tests that no mutant turned red: those hold
nothing. `mutants.py NAME...` runs some mutants.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).resolve().parents[2]
PLACE: Final = TREE / "target" / "mutants-rust"
SECONDS: Final = 120

BODY: Final = "src/tower/body.rs"
FUTURE: Final = "src/tower/future.rs"
LAYER: Final = "src/tower/layer.rs"
PROBLEM: Final = "src/tower/problem.rs"
SERVING: Final = "src/tower/serving.rs"
RECORD: Final = "src/handler/heap/record.rs"
TALLY: Final = "src/handler/heap/tally.rs"
SELECTED: Final = "src/handler/selected.rs"
SCOPED: Final = "src/memory/global_scoped.rs"
TRAMPOLINE: Final = "src/handler/trampoline.rs"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard that is taken out: text that is there exactly once, and what takes its place."""

    name: str
    path: str
    old: str
    new: str
    under_load: bool = False
    """Whether the load test runs too, which takes longer than all others."""

    @property
    def binary(self) -> str:
        """The test binary that should notice."""
        return "tower" if self.path.startswith("src/tower") else "heap"

    def applied(self, tree: Path = PLACE) -> str:
        """The mutated file's text. RuntimeError where the tree does not have what the mutant replaces."""
        text = (tree / self.path).read_text()
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.path} has the text of {self.name!r} {text.count(self.old)} times: adapt it")
        return text.replace(self.old, self.new)


MUTANTS: Final = (
    # readiness
    Mutant("poll_ready does not ask", LAYER, "self.inner.poll_ready(cx)", "{ let _ = cx; Poll::Ready(Ok(())) }"),
    Mutant("poll_ready asks a clone", LAYER, "self.inner.poll_ready(cx)", "self.inner.clone().poll_ready(cx)"),
    Mutant(
        "a clone is called, not the ready one",
        LAYER,
        "context.run(|| inner.call(request))",
        "let mut clone = inner.clone();\n        context.run(|| clone.call(request))",
    ),
    # the request is selected
    Mutant(
        "the service is called outside",
        LAYER,
        "context.run(|| inner.call(request))",
        "let _ = &mut context;\n        inner.call(request)",
    ),
    Mutant(
        "the future is polled outside",
        FUTURE,
        """            context.run(|| {
                let inner = this""",
        """            let _ = &context;
            None.unwrap_or_else(|| {
                let inner = this""",
    ),
    Mutant(
        "the future is dropped after its poll's context",
        FUTURE,
        "                this.inner.set(None); // destructors of the future run in its request\n",
        "",
    ),
    Mutant(
        "a dropped future goes after its request",
        FUTURE,
        "            context.run(|| this.inner.set(None));\n            let outcome",
        "            let _ = &mut context;\n            let outcome",
    ),
    Mutant("the body is polled outside", BODY, "inside.context.run(|| inner.poll_frame(cx))", "inner.poll_frame(cx)"),
    Mutant(
        "a dropped body goes after its request",
        BODY,
        "            inside.context.run(|| this.inner.set(None));\n            inside.drop_early();",
        "            let _ = &mut inside;\n            inside.drop_early();",
    ),
    Mutant(
        "a body that is over goes after its request",
        BODY,
        "            inside.context.run(|| this.inner.set(None)); // before",
        "            let _ = &mut inside; // not before",
    ),
    Mutant(
        "a body that panicked goes after its request",
        BODY,
        "survived(|| context.run(|| this.inner.set(None)));",
        "let _ = &mut context;",
    ),
    Mutant("no handle in the extensions", LAYER, "    parts.extensions.insert(serving.request().handle());\n", ""),
    Mutant(
        "an inner layer is a root",
        LAYER,
        "let mut terms = if is_inside { request() }",
        "let mut terms = if false && is_inside { request() }",
    ),
    Mutant(
        "whatever is selected is around",
        LAYER,
        "let mut terms = if is_inside { request() }",
        "let mut terms = if is_inside || true { request() }",
    ),
    Mutant(
        "terms of none are terms",
        LAYER,
        "terms = choose(parts, terms)?;",
        "terms = choose(parts, terms).unwrap_or_else(|| request().root());",
    ),
    Mutant(
        "terms that cannot be kept are none",
        LAYER,
        "Begun::Failed(unbegun) => return ResponseFuture::unbegun(unbegun),",
        "Begun::Failed(_) => return ResponseFuture::plain(inner.call(Request::from_parts(parts, body))),",
    ),
    Mutant("the terms are not asked", LAYER, "terms = choose(parts, terms)?;", "let _ = choose;"),
    # where it ends
    Mutant("HEAD is as GET", LAYER, "is_head = parts.method == Method::HEAD", "is_head = false"),
    Mutant(
        "every status has a body",
        FUTURE,
        "let is_asked_for = !is_head && has_body(parts.status);",
        "let _ = has_body;\n                let is_asked_for = !is_head;",
    ),
    Mutant(
        "content-length is not looked at",
        BODY,
        "(inner.size_hint().exact().or(length), inner.is_end_stream())",
        "(inner.size_hint().exact(), inner.is_end_stream() && length.is_none_or(|_| true))",
    ),
    Mutant("a body's own length is not looked at", BODY, "(inner.size_hint().exact().or(length), ", "(length, "),
    Mutant(
        "bytes that were taken are not counted",
        BODY,
        "*left = left.saturating_sub(bytes::Buf::remaining(data) as u64);",
        "let _ = (left, data);",
    ),
    Mutant(
        "an unfinished body is complete",
        BODY,
        "matches!(self.left, Left::Nothing | Left::Bytes(0))",
        "matches!(self.left, Left::Nothing | Left::Bytes(_))",
    ),
    Mutant(
        "a body that nobody polls is awaited",
        BODY,
        "        if is_over {",
        "        if is_over && false {",
    ),
    Mutant(
        "a body that says that it is over is not believed",
        BODY,
        "frame.is_trailers() || this.inner.as_ref().as_pin_ref().is_some_and(|inner| inner.is_end_stream())",
        "frame.is_trailers()",
    ),
    Mutant("trailers are no end", BODY, "frame.is_trailers() || ", ""),
    Mutant(
        "the end of a body is none",
        BODY,
        "            None => Some(Outcome::Completed),\n        };\n        if let",
        "            None => None,\n        };\n        if let",
    ),
    Mutant(
        "a body's error is an end like others",
        BODY,
        "Some(Err(_)) => Some(Outcome::Failed),",
        "Some(Err(_)) => Some(Outcome::Completed),",
    ),
    Mutant("a body's panic is an error", BODY, "serving.end(Outcome::Panicked)", "serving.end(Outcome::Failed)"),
    Mutant(
        "a service's error is an end like others",
        FUTURE,
        "serving.end(Outcome::Failed)",
        "serving.end(Outcome::Completed)",
    ),
    Mutant("a service's panic is an error", FUTURE, "serving.end(Outcome::Panicked)", "serving.end(Outcome::Failed)"),
    Mutant(
        "a panic of the call is a hang-up",
        SERVING,
        "!self.is_known && std::thread::panicking()",
        "false && std::thread::panicking()",
    ),
    Mutant(
        "a hang-up is not reported",
        FUTURE,
        "            serving.end(outcome);\n        }\n    }",
        "            let _ = outcome;\n            std::mem::forget(serving);\n        }\n    }",
        under_load=True,
    ),
    Mutant(
        "an end is reported twice",
        SERVING,
        "if survived(|| on_end(&ended)).is_none()",
        "on_end(&ended);\n        if survived(|| on_end(&ended)).is_none()",
    ),
    Mutant(
        "a panic of on_end passes",
        SERVING,
        "if survived(|| on_end(&ended)).is_none()",
        "if { on_end(&ended); false }",
    ),
    # refusals
    Mutant(
        "an answer of the layer's own where it should not",
        SERVING,
        ".filter(|_| self.options.answers)",
        "",
    ),
    Mutant(
        "a refusal that was coped with is one",
        "src/tower/serving.rs",
        "let last = if returned.is_none() { self.request().last_refusal() }",
        "let last = if returned.is_none() && self.request().stats().refused > 0 "
        '{ Some(Error::OutOfMemory { handler: "x".into(), requested_bytes: 1 }) }',
    ),
    Mutant(
        "what the service returned is not answered",
        FUTURE,
        "Some(error) => serving.answer_to(Some(error)),",
        "Some(_) => None,",
    ),
    Mutant("a 500 is an answer", PROBLEM, "status == StatusCode::INTERNAL_SERVER_ERROR || ", ""),
    Mutant(
        "an error after a refusal is an error",
        FUTURE,
        "Some(Err(_)) => serving.answer_to(None),",
        "Some(Err(_)) => None,",
    ),
    Mutant(
        "the limit of the heap is not looked at",
        FUTURE,
        "let exceeded = serving.request().heap_exceeded();",
        "let exceeded = None::<Error>;",
    ),
    Mutant(
        "what exceeds the heap goes after its request",
        FUTURE,
        """                drop(answer);
                this.inner.set(None);
""",
        "                std::mem::forget(answer);\n",
    ),
    Mutant("gRPC is HTTP", FUTURE, "    if is_grpc {\n", "    if is_grpc && false {\n"),
    Mutant(
        "an internal error of gRPC is an answer",
        PROBLEM,
        '(is_grpc && matches!(grpc_status(headers), Some("2" | "13")))',
        '(is_grpc && grpc_status(headers) == Some("99"))',
    ),
    Mutant("every error of gRPC is unexplained", PROBLEM, 'Some("2" | "13")', "Some(_)"),
    Mutant(
        "a method's own refusal is an answer",
        SERVING,
        "contains(&parts.status) || (self.is_grpc && problem::is_exhausted(&parts.headers))",
        "contains(&parts.status)",
    ),
    Mutant(
        "a service's own refusal is an answer",
        SERVING,
        "self.options.refused_statuses.contains(&parts.status) || (self.is_grpc",
        "(self.is_grpc",
    ),
    Mutant("a busy service is a refusal", FUTURE, "&& serving.is_refused())", ")"),
    Mutant(
        "an inner layer's refusal is an answer",
        FUTURE,
        "response.extensions_mut().insert(Refused);\n            serving.status",
        "serving.status",
    ),
    Mutant(
        "trailers tell of no refusal",
        BODY,
        "is_over.then_some(if is_refused {",
        "is_over.then_some(if is_refused && false {",
    ),
    Mutant(
        "no retry-after",
        PROBLEM,
        "headers.insert(RETRY_AFTER, retry_after_seconds.into());",
        "let _ = (RETRY_AFTER, retry_after_seconds);",
    ),
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
CLONE: Final = (
    "    S: Service<Request<A>, Response = Response<B>>,\n    S::Future: Future",
    "    S: Clone + Service<Request<A>, Response = Response<B>>,\n    S::Future: Future",
)


def prepare() -> None:
    """Copies the tree, and what cargo has built of it."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        to = PLACE / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (TREE / name).is_symlink():
            to.unlink(missing_ok=True)
            to.symlink_to((TREE / name).readlink())
        elif not to.exists() or to.read_bytes() != (TREE / name).read_bytes():
            shutil.copyfile(TREE / name, to)
    if not (PLACE / "target").exists() and (TREE / "target" / "debug").exists():
        shutil.copytree(TREE / "target" / "debug", PLACE / "target" / "debug", copy_function=shutil.copy2)


def run(binary: str, under_load: bool) -> tuple[set[str], set[str]] | str:
    """The tests that failed, and all of them; or why there are none."""
    command = ["cargo", "test", "--quiet", "--locked", "--features", "axum,rayon", "--test", binary]
    built = subprocess.run([*command, "--no-run"], cwd=PLACE, check=False, capture_output=True, text=True)
    if built.returncode:
        return "it does not compile:\n" + built.stderr[-2000:]
    ran = subprocess.run(
        [
            "timeout",
            str(SECONDS),
            *command,
            "--",
            "--test-threads=2",
            "--format=pretty",
            *([] if under_load else ["--skip", "load::"]),
        ],
        cwd=PLACE,
        check=False,
        capture_output=True,
        text=True,
    )
    outcomes = dict(re.findall(r"^test (\S+) \.\.\. .*?(ok|FAILED)$", ran.stdout, re.MULTILINE | re.DOTALL))
    failed = {f"{binary}::{name}" for name, how in outcomes.items() if how == "FAILED"}
    failed |= {f"{binary}::{name}" for name in re.findall(r"^---- (\S+) stdout", ran.stdout, re.MULTILINE)}
    if ran.returncode and not failed:
        begun = set(re.findall(r"^test (\S+) \.\.\. ", ran.stdout, re.MULTILINE)) - set(outcomes)
        failed = {f"{binary}::{name}" for name in begun} or {f"{binary}: exit status {ran.returncode}"}
    return failed, {f"{binary}::{name}" for name in outcomes}


def main() -> int:
    """Run them all, or those that are named."""
    chosen = [mutant for mutant in MUTANTS if len(sys.argv) == 1 or mutant.name in sys.argv[1:]]
    prepare()
    everything: set[str] = set()
    for binary in sorted({mutant.binary for mutant in chosen}):
        sound = run(binary, True)
        if isinstance(sound, str) or sound[0]:
            print(f"without any mutant, {binary}: {sound}")
            return 1
        everything |= sound[1]
    red: set[str] = set()
    survivors = []
    for mutant in chosen:
        sound_text = (PLACE / mutant.path).read_text()
        text = mutant.applied()
        if "clone()" in mutant.new:
            text = text.replace(*CLONE)
        (PLACE / mutant.path).write_text(text)
        seen = run(mutant.binary, mutant.under_load)
        (PLACE / mutant.path).write_text(sound_text)
        if isinstance(seen, str):
            print(f"BROKEN    {mutant.name}: {seen}", flush=True)
            survivors.append(mutant.name)
            continue
        failed, _ = seen
        red |= failed
        print(f"{'noticed ' if failed else 'SURVIVED'}  {mutant.name}: {', '.join(sorted(failed))}", flush=True)
        if not failed:
            survivors.append(mutant.name)
    never = ", ".join(sorted(everything - red)) or "none"
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed; never red: {never}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
