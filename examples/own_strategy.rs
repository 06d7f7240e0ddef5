//! A strategy of your own: `Counted` wraps any other one and counts its blocks. Registered, it is a handler like any.
//!
//! `cargo run --example own_strategy` prints
//! ```text
//! counted: Counted { upstream: Aligned { align: 64 } }
//! inside the scope   2 blocks alive, 2 made
//! one escaped        1 block alive, 2 made
//! at the end         0 blocks alive, 2 made
//! ```

#![allow(unsafe_code, reason = "a strategy deals in raw blocks; what it must promise is in the docs of `Strategy`")]

use ctxalloc::strategy::{Aligned, LiveBlock, Strategy};
use ctxalloc::{Buffer, register, scope};
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Passes everything to `upstream` and counts the blocks.
struct Counted<S> {
    upstream: S,
    alive: AtomicUsize,
    made: AtomicUsize,
}

impl<S> Counted<S> {
    fn new(upstream: S) -> Self {
        Self { upstream, alive: AtomicUsize::new(0), made: AtomicUsize::new(0) }
    }

    fn count(&self, block: Option<NonNull<u8>>) -> Option<NonNull<u8>> {
        let block = block?;
        // Relaxed: numbers to look at; the blocks themselves are handed on by others.
        self.alive.fetch_add(1, Ordering::Relaxed);
        self.made.fetch_add(1, Ordering::Relaxed);
        Some(block)
    }

    fn report(&self) -> String {
        let (alive, made) = (self.alive.load(Ordering::Relaxed), self.made.load(Ordering::Relaxed));
        format!("{alive} {} alive, {made} made", if alive == 1 { "block" } else { "blocks" })
    }
}

// SAFETY: the blocks are the upstream's, passed on unchanged; counting cannot fail, unwind or touch them.
unsafe impl<S: Strategy> Strategy for Counted<S> {
    fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.count(self.upstream.allocate(size_bytes))
    }

    // Not the trait's default, which would write zeros where the upstream's memory is zero already.
    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.count(self.upstream.allocate_zeroed(size_bytes))
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promises are the same.
        unsafe { self.upstream.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are the same.
        unsafe { self.upstream.release(block) }
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }

    // What the upstream knows better than the trait's defaults, which are for strategies that wrap none.
    fn trim(&self) -> usize {
        self.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.upstream.live_blocks()
    }

    fn is_read_after_release(&self) -> bool {
        self.upstream.is_read_after_release()
    }
}

/// What users see of it: `repr(handler)` in Python, `Handler::description` in Rust.
impl<S: fmt::Debug> fmt::Debug for Counted<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counted").field("upstream", &self.upstream).finish()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&mut io::stdout())
}

fn run(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    // Shared, so that we can read the counters: `Arc<S>` is a strategy where `S` is.
    let counted = Arc::new(Counted::new(Aligned::new(64)?));
    let handler = register("counted", Arc::clone(&counted))?;
    writeln!(out, "{handler}: {}", handler.description())?;

    let escaped = scope(handler, || -> Result<Buffer, Box<dyn Error>> {
        let _gone_with_the_scope = Buffer::zeroed(1000)?;
        let escapes = Buffer::zeroed(2000)?;
        writeln!(out, "inside the scope   {}", counted.report())?;
        Ok(escapes)
    })?;
    writeln!(out, "one escaped        {}", counted.report())?;
    assert_eq!(escaped.handler(), handler);
    drop(escaped);
    writeln!(out, "at the end         {}", counted.report())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Aligned, Counted, run, said};
    use ctxalloc::strategy::{System, conformance};

    #[test]
    fn it_keeps_the_contract_of_strategies() {
        conformance::check(Counted::new(System));
        conformance::check(Counted::new(Aligned::CACHE_LINE));
        conformance::check_wrapper(Counted::new);
    }

    #[test]
    fn it_prints_what_its_first_lines_say() {
        said::check(include_str!("own_strategy.rs"), run);
    }
}

#[cfg(test)]
#[path = "../tests/examples/said.rs"]
mod said;
