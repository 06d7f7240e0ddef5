//! `GlobalScoped` as the optimizer of a plain release build sees it, which knows how long a block is that it saw made.
//! A read of the word before the block must not look impossible to it: all code behind that was left out once, from
//! here on. `make test-rust` builds this as cargo builds a user's program.

use ctxalloc::{GlobalScoped, task};
use std::alloc::System;
use std::sync::{Arc, Barrier};

#[global_allocator]
static GLOBAL: GlobalScoped<System> = GlobalScoped::new(System);

const TASKS: usize = 64;

fn main() {
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
    println!("test optimized ... ok");
}
