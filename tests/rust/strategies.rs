//! Random operations from many threads against a model, for each strategy. A new strategy is one line in `EACH`. The
//! suite for its promises one by one is `strategy::conformance`, which each strategy's own file runs. What was
//! forgotten of a new one is told here too.

use crate::layers::{sources, src};
#[cfg(not(miri))]
use crate::support::c_heap;
use crate::support::{Marked, Odd, rounds};
#[cfg(not(miri))]
use ctxalloc::source::{HugePages, LockedPages};
use ctxalloc::strategy::{
    Aligned, Arena, Budget, Budgeted, Fallback, Faulty, LiveBlock, Pool, Strategy, System, Tracked, Zeroing,
    conformance,
};
#[cfg(not(miri))]
use ctxalloc::strategy::{CallbackFunctions, Callbacks, Guard, GuardOptions, PoolOptions, SharedMemory};
use proptest::prelude::{Just, ProptestConfig, any, prop, prop_assert, prop_oneof, proptest};
use proptest::strategy::Strategy as Generator;
use std::fs;
use std::panic;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;

type Make = fn() -> Arc<dyn Strategy>;

/// The strategies under test, each with what makes it.
const EACH: &[(&str, Make)] = &[
    ("System", || Arc::new(System)),
    ("Aligned(16)", || Arc::new(Aligned::new(16).expect("in range"))),
    ("Aligned(64)", || Arc::new(Aligned::CACHE_LINE)),
    ("Aligned(4096)", || Arc::new(Aligned::new(4096).expect("in range"))),
    ("Aligned(2 MiB)", || Arc::new(Aligned::new(2 << 20).expect("in range"))),
    ("Pool", || Arc::new(Pool::new())),
    ("Arena", || Arc::new(Arena::over(&Pool::new()))),
    ("Budgeted", || Arc::new(Budgeted::new(System, Budget::new("all", None)))),
    ("Fallback, each in turn", || Arc::new(Fallback::new(Faulty::every(System, 2).expect("a count"), Pool::new()))),
    ("Faulty, not failing", || Arc::new(Faulty::every(Aligned::CACHE_LINE, u64::MAX).expect("in range"))),
    ("Tracked", || Arc::new(Tracked::new(Pool::new()).expect("not tracked"))),
    #[cfg(feature = "tracing")]
    ("Traced", || Arc::new(ctxalloc::strategy::Traced::new(Pool::new()))),
    ("Zeroing", || Arc::new(Zeroing::new(Pool::new()))),
    #[cfg(not(miri))]
    ("Guard", || Arc::new(Guard::new(GuardOptions::default()).expect("in range"))),
    #[cfg(not(miri))]
    ("HugePages", || Arc::new(Pool::over(HugePages::transparent(), PoolOptions::default()))),
    #[cfg(not(miri))]
    ("SharedMemory", || Arc::new(SharedMemory)),
    #[cfg(not(miri))]
    ("Locked while there is room, then System", || {
        Arc::new(Fallback::new(Pool::over(LockedPages::untried(), PoolOptions::default()), System))
    }),
    #[cfg(not(miri))]
    ("Callbacks, to the C heap", || Arc::new(callbacks(16))),
    #[cfg(not(miri))]
    ("Tracked, Guard", || {
        Arc::new(Tracked::new(Guard::new(GuardOptions::default()).expect("in range")).expect("fits"))
    }),
    ("the tests' Marked", || Arc::new(Marked::new())),
    ("the tests' Odd", || Arc::new(Odd)),
];

/// The C heap by way of function pointers, as C code would hand it over.
#[cfg(not(miri))]
fn callbacks(align: usize) -> Callbacks {
    let mut functions = CallbackFunctions::new(std::ptr::null_mut());
    functions.malloc = Some(c_heap::malloc);
    functions.calloc = Some(c_heap::calloc);
    functions.realloc = Some(c_heap::realloc);
    functions.free = Some(c_heap::free);
    // SAFETY: C's own functions keep C's contract; no context is needed.
    unsafe { Callbacks::new(functions, align) }.expect("all four are there")
}

#[test]
fn wrappers_keep_their_records_in_front_of_odd_blocks() {
    let faulty = Faulty::every(Odd, 2).expect("a count");
    let all: [Arc<dyn Strategy>; 3] = [
        Arc::new(Zeroing::new(Odd)),
        Arc::new(Budgeted::new(Odd, Budget::new("all", None))),
        Arc::new(Fallback::new(faulty, Odd)),
    ];
    for strategy in all {
        let block = strategy.allocate(100).expect("memory");
        // SAFETY: live, from this strategy; only the resized block is released.
        unsafe {
            let block = strategy.resize(block, 1000).expect("memory");
            strategy.release(block);
        }
    }
    let refused = Tracked::new(Odd).expect_err("its list runs through the records");
    assert!(refused.to_string().contains("aligned to 8 bytes or more"), "{refused}");
}

/// Guard with an exact end and Callbacks of which nothing is known align to nothing: records in front of their blocks
/// lie anywhere.
#[cfg(not(miri))]
#[test]
fn strategies_that_align_to_nothing_can_be_wrapped() {
    let exact = || {
        let mut options = GuardOptions::default();
        options.align = 1;
        Guard::new(options).expect("in range")
    };
    conformance::check(Zeroing::new(exact()));
    conformance::check(Budgeted::new(exact(), Budget::new("all", None)));
    conformance::check(Fallback::new(Faulty::every(exact(), 2).expect("a count"), callbacks(1)));
    conformance::check(Zeroing::new(callbacks(1)));
}

/// A wrapper that leaves a promise out, in turn each of them.
#[derive(Debug)]
struct Forgetful<S> {
    upstream: S,
    forgets: &'static str,
}

// SAFETY: the blocks are the upstream's; writing to one that is about to be released is allowed for memory of a host.
unsafe impl<S: Strategy> Strategy for Forgetful<S> {
    fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.upstream.allocate(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promises are the same.
        unsafe { self.upstream.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        if self.forgets == "wrote to a block" {
            // SAFETY: a live block of one byte or more.
            unsafe { block.write_bytes(0xDD, 1) };
        }
        // SAFETY: the caller's promises are the same.
        unsafe { self.upstream.release(block) }
    }

    fn trim(&self) -> usize {
        if self.forgets == "`trim`" { 0 } else { self.upstream.trim() }
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        if self.forgets == "`live_blocks`" { None } else { self.upstream.live_blocks() }
    }

    fn is_read_after_release(&self) -> bool {
        self.forgets != "`is_read_after_release`" && self.upstream.is_read_after_release()
    }
}

#[test]
fn a_wrapper_is_told_what_it_forgets() {
    conformance::check_wrapper(|upstream| Forgetful { upstream, forgets: "nothing" });
    for forgets in ["`trim`", "`live_blocks`", "`is_read_after_release`", "wrote to a block"] {
        let told = panic::catch_unwind(|| conformance::check_wrapper(|upstream| Forgetful { upstream, forgets }));
        let told = *told.expect_err(forgets).downcast::<String>().expect("a sentence");
        assert!(told.contains(forgets) && told.contains("Forgetful"), "{told}");
    }
}

/// The strategies that this crate has, each with the text of its file (or folder) and whether it wraps another one.
fn of_this_crate() -> Vec<(String, String, bool)> {
    let mut found = Vec::new();
    for path in sources(&src().join("strategy")) {
        let text = fs::read_to_string(&path).expect("a source");
        let heads = text.lines().filter(|line| line.starts_with("unsafe impl"));
        for (parameters, name) in heads.filter_map(|line| line.split_once(" Strategy for ")) {
            let name = name.split(|end: char| !end.is_alphanumeric()).next().expect("a name").to_owned();
            let folder = if path.ends_with("mod.rs") { path.parent() } else { None };
            let all = folder.map_or_else(|| vec![path.clone()], sources);
            let text = all.iter().map(|path| fs::read_to_string(path).expect("a source")).collect();
            found.push((name, text, parameters.contains(": Strategy")));
        }
    }
    found
}

/// What a new strategy needs besides its file: ARCHITECTURE.md, "Add a strategy".
#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn nothing_is_forgotten_of_any_strategy() {
    let root = src().parent().expect("the crate's folder").to_owned();
    let read = |path: &str| fs::read_to_string(root.join(path)).expect(path);
    let suite = read("tests/rust/strategies.rs");
    let (_, each) = suite.split_once("const EACH").expect("the list of all");
    let (each, _) = each.split_once("];").expect("its end");
    // One that needs a driver has the same checks where there is one.
    let (drivers, docs) = (read("tests/cuda/conformance.rs"), read("docs/strategies.md"));
    let has = |text: &str, name: &str| text.split(|end: char| !end.is_alphanumeric()).any(|word| word == name);
    let layer = read("src/strategy/mod.rs");
    let (_, public) = layer.split_once("\npub use ").expect("the list of what is public");
    let (public, _) = public.split_once("\nuse std::").expect("its end");
    let mut forgotten = Vec::new();
    for (name, text, wraps) in of_this_crate().iter().filter(|(name, ..)| has(public, name)) {
        let has_driver = has(&drivers, name);
        // `Tracked` takes no upstream that lists its blocks, as the check's does.
        let is_wrapper = *wraps && name != "Tracked";
        for (is_there, what) in [
            (text.contains("conformance::check(") || has_driver, "a test in its file that calls conformance::check"),
            (
                !is_wrapper || text.contains("conformance::check_wrapper("),
                "a test that calls conformance::check_wrapper",
            ),
            (has(each, name) || has_driver, "a line of `EACH` in tests/rust/strategies.rs"),
            (has(&docs, name), "a row in docs/strategies.md"),
        ] {
            if !is_there {
                forgotten.push(format!("{name} lacks {what}"));
            }
        }
    }
    assert!(forgotten.is_empty(), "{forgotten:#?}");
}

#[derive(Debug, Clone)]
enum Step {
    Allocate {
        size_bytes: usize,
        zeroed: bool,
    },
    Resize {
        which: usize,
        size_bytes: usize,
    },
    Release {
        which: usize,
    },
    /// Hands a block to the next thread, which checks and keeps it.
    Pass {
        which: usize,
    },
}

fn size() -> impl Generator<Value = usize> {
    prop_oneof![
        4 => 1..200_usize,
        3 => 1..rounds(5000, 300),
        1 => Just(rounds(4096, 256)),
        1 => 1..rounds(300_000, 500),
    ]
}

fn step() -> impl Generator<Value = Step> {
    prop_oneof![
        4 => (size(), any::<bool>()).prop_map(|(size_bytes, zeroed)| Step::Allocate { size_bytes, zeroed }),
        3 => (any::<usize>(), size()).prop_map(|(which, size_bytes)| Step::Resize { which, size_bytes }),
        2 => any::<usize>().prop_map(|which| Step::Release { which }),
        2 => any::<usize>().prop_map(|which| Step::Pass { which }),
    ]
}

/// A live block, filled with a pattern of its own.
struct Block {
    start: NonNull<u8>,
    size_bytes: usize,
    seed: u64,
}

// SAFETY: plain memory with one owner; strategies allow any thread.
unsafe impl Send for Block {}

impl Block {
    /// The pattern, eight bytes at a time: quick in a debug build.
    fn words(seed: u64) -> impl Iterator<Item = [u8; 8]> {
        (0_u64..).map(move |index| (seed ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes())
    }

    fn fill(&mut self) {
        // SAFETY: the block has that many bytes and one owner; written before they are read.
        unsafe { self.start.write_bytes(0, self.size_bytes) };
        // SAFETY: initialised above.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size_bytes) };
        let (whole, rest) = bytes.as_chunks_mut();
        let mut words = Self::words(self.seed);
        whole.iter_mut().zip(&mut words).for_each(|(chunk, word)| *chunk = word);
        words.take(1).for_each(|word| rest.copy_from_slice(&word[..rest.len()]));
    }

    fn first_are_kept(&self, length: usize) -> bool {
        // SAFETY: at least `length` bytes were filled.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), length) };
        let (whole, rest) = bytes.as_chunks();
        let mut words = Self::words(self.seed);
        whole.iter().zip(&mut words).all(|(chunk, word)| *chunk == word)
            && words.take(1).all(|word| *rest == word[..rest.len()])
    }
}

/// Runs one thread's steps; returns its own blocks and those it passes on.
fn play(strategy: &dyn Strategy, steps: Vec<Step>, mut live: Vec<Block>, thread: u64) -> (Vec<Block>, Vec<Block>) {
    let mut passed = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        let count = live.len().max(1);
        let seed = (thread << 32) | number as u64;
        match step {
            Step::Allocate { size_bytes, zeroed } => {
                let start = if zeroed { strategy.allocate_zeroed(size_bytes) } else { strategy.allocate(size_bytes) };
                let start = start.expect("some bytes");
                assert!(start.addr().get().is_multiple_of(strategy.alignment()));
                if zeroed {
                    // SAFETY: zeroed, says the strategy.
                    let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), size_bytes) };
                    // The first is zero, and each other one is as that before it: one comparison.
                    let is_zero = bytes[0] == 0 && bytes[1..] == bytes[..size_bytes - 1];
                    assert!(is_zero, "a zeroed block was dirty");
                }
                let mut block = Block { start, size_bytes, seed };
                block.fill();
                live.push(block);
            }
            Step::Resize { which, size_bytes } => {
                if let Some(block) = live.get_mut(which % count) {
                    // SAFETY: live, from this strategy; the old pointer is overwritten.
                    block.start = unsafe { strategy.resize(block.start, size_bytes) }.expect("some bytes");
                    assert!(block.start.addr().get().is_multiple_of(strategy.alignment()));
                    assert!(block.first_are_kept(block.size_bytes.min(size_bytes)), "a resize lost bytes");
                    (block.size_bytes, block.seed) = (size_bytes, seed);
                    block.fill();
                }
            }
            Step::Release { which } if !live.is_empty() => {
                let block = live.swap_remove(which % count);
                assert!(block.first_are_kept(block.size_bytes), "somebody wrote into a live block");
                // SAFETY: live, from this strategy.
                unsafe { strategy.release(block.start) };
            }
            Step::Pass { which } if !live.is_empty() => passed.push(live.swap_remove(which % count)),
            Step::Release { .. } | Step::Pass { .. } => {}
        }
    }
    (live, passed)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: rounds(12, 1) as u32, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn each_strategy_keeps_its_blocks_apart_under_many_threads(
        programs in prop::collection::vec(prop::collection::vec(step(), 1..rounds(60, 12)), rounds(8, 2)),
    ) {
        for (name, make) in EACH {
            let strategy = make();
            let mut live: Vec<Vec<Block>> = programs.iter().map(|_| Vec::new()).collect();
            // Twice, so that blocks passed on in the first round are resized and released elsewhere in the second.
            for _ in 0..2 {
                let outcomes: Vec<_> = thread::scope(|threads| {
                    let players: Vec<_> = programs
                        .iter()
                        .zip(live.drain(..).enumerate().collect::<Vec<_>>())
                        .map(|(steps, (number, blocks))| {
                            let (steps, strategy) = (steps.clone(), &*strategy);
                            threads.spawn(move || play(strategy, steps, blocks, number as u64))
                        })
                        .collect();
                    players.into_iter().map(thread::ScopedJoinHandle::join).collect()
                });
                let mut passed = Vec::new();
                for outcome in outcomes {
                    prop_assert!(outcome.is_ok(), "{} broke a promise", name);
                    let (kept, handed_over) = outcome.expect("checked above");
                    live.push(kept);
                    passed.push(handed_over);
                }
                passed.rotate_right(1);
                for (kept, received) in live.iter_mut().zip(passed) {
                    kept.extend(received);
                }
            }
            for block in live.into_iter().flatten() {
                prop_assert!(block.first_are_kept(block.size_bytes), "{}: a live block was overwritten", name);
                // SAFETY: live, from this strategy.
                unsafe { strategy.release(block.start) };
            }
        }
    }
}
