//! What a plain release build does, as cargo builds a user's program: `make test-rust` runs this so.
//!
//! - The optimizer knows how long a block is that it saw made. To `GlobalScoped`, a read of the word before the block
//!   must not look impossible: all code behind that was left out once, from here on.
//! - Nothing checks for overflow: what a debug build reports at once goes on here, inside of sections too.
#![allow(unsafe_code, reason = "blocks of strategies are released")]

use ctxalloc::strategy::{
    Aligned, Arena, Budget, Budgeted, Faulty, Pool, SharedMemory, Strategy, Tracked, Zeroing, conformance,
};
use ctxalloc::{GlobalScoped, task};
use std::alloc::System;
use std::sync::{Arc, Barrier};
use std::thread;

#[global_allocator]
static GLOBAL: GlobalScoped<System> = GlobalScoped::new(System);

const TASKS: usize = 64;

fn main() {
    the_optimizer_leaves_nothing_out();
    every_strategy_keeps_its_promises_without_checks_for_overflow();
    zero_bytes_leave_no_section_behind();
    println!("test optimized ... ok");
}

fn every_strategy_keeps_its_promises_without_checks_for_overflow() {
    conformance::check(ctxalloc::strategy::System);
    conformance::check(Aligned::new(4096).expect("in range"));
    conformance::check(Pool::new());
    conformance::check(Pool::shared().clone());
    conformance::check(Arena::over(&Pool::new()));
    conformance::check(Budgeted::new(Pool::new(), Budget::new("all", None)));
    conformance::check(Faulty::every(Pool::new(), u64::MAX).expect("in range"));
    conformance::check(Tracked::new(Pool::new()).expect("not tracked"));
    conformance::check(Zeroing::new(Arena::over(&Pool::new())));
    #[cfg(target_os = "linux")]
    conformance::check(SharedMemory);
}

/// `allocate(0)` once panicked inside of a thread's own section, and left it marked the wrong way around: from then on
/// `trim` freed the cache under the thread that used it. An arena of two threads kept its lock for ever.
fn zero_bytes_leave_no_section_behind() {
    let arena = Arena::over(&Pool::new());
    let strategies: [&dyn Strategy; 2] = [Pool::shared(), &arena];
    thread::scope(|scope| {
        for number in 0..4 {
            scope.spawn(move || {
                for round in 0..20_000_usize {
                    let strategy = strategies[round % 2];
                    let sizes = [0, 1, 64, (round * 97) % 5000];
                    let blocks = sizes.map(|size| strategy.allocate(size).expect("memory"));
                    for (block, size) in blocks.into_iter().zip(sizes) {
                        // SAFETY: a live block of that many bytes, of this strategy, which nobody else has.
                        unsafe {
                            block.write_bytes(number, size);
                            strategy.release(block);
                        }
                    }
                    if round % 1000 == 0 {
                        strategy.trim();
                    }
                }
            });
        }
    });
    let nobody = thread::spawn(|| Pool::shared().allocate(0).is_some()).join();
    assert!(nobody.expect("no panic"), "a new thread is served");
}

fn the_optimizer_leaves_nothing_out() {
    let runtime = tokio::runtime::Builder::new_multi_thread().build().expect("a runtime");
    let ended = runtime.block_on(async {
        tokio::spawn(async {
            let barrier = Arc::new(Barrier::new(TASKS));
            let mut tasks = Vec::new();
            for _ in 0..TASKS {
                let barrier = Arc::clone(&barrier);
                tasks.push(task::spawn_blocking(move || {
                    let block = vec![1_u8; 60_000];
                    barrier.wait();
                    drop(block);
                }));
            }
            for task in tasks {
                task.await.expect("no panic");
            }
        })
        .await
    });
    ended.expect("no panic");
}
