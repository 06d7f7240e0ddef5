//! A block of SYCL's memory, made and freed: by dpctl's C library, and by the pool over it. `make bench-usm`, which
//! names dpctl's library in CTXALLOC_DPCTL. Each figure is the least of nine runs on one thread.
#![allow(unsafe_code, reason = "blocks")]

use ctxalloc::source::{Queue, Runtime, UsmKind, UsmPages};
use ctxalloc::strategy::{Arena, Pool, PoolOptions, Strategy};
use std::hint::black_box;
use std::time::Instant;

/// Nanoseconds a call.
fn least(rounds: usize, mut work: impl FnMut()) -> f64 {
    let mut least = f64::MAX;
    for _ in 0..9 {
        let begun = Instant::now();
        for _ in 0..rounds {
            work();
        }
        least = least.min(begun.elapsed().as_nanos() as f64 / rounds as f64);
    }
    least
}

fn strategy(strategy: &impl Strategy, size_bytes: usize) -> f64 {
    least(20_000, || {
        let block = black_box(strategy.allocate(size_bytes)).expect("memory");
        // SAFETY: live, from this strategy.
        unsafe { strategy.release(block) };
    })
}

fn main() {
    let path = std::env::var_os("CTXALLOC_DPCTL").expect("CTXALLOC_DPCTL is dpctl's library: run `make bench-usm`");
    // SAFETY: dpctl's, says who runs this.
    let runtime = unsafe { Runtime::load(path.as_ref()) }.expect("dpctl's library");
    let queue = Queue::open(runtime, None).expect("a device");
    println!(
        "{:>8} {:>10} {:>12} {:>12} {:>12} {:>8}",
        "kind", "bytes", "SYCL (ns)", "Pool (ns)", "Arena (ns)", "times"
    );
    for kind in [UsmKind::Shared, UsmKind::Host] {
        let pool = Pool::over(UsmPages::new(&queue, kind).expect("such memory"), PoolOptions::default());
        let arena = Arena::over(&pool);
        for size_bytes in [64, 4096, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
            let sycl = least(1000, || {
                let block = black_box(queue.allocate(kind, size_bytes, 64)).expect("memory");
                // SAFETY: live, from this queue.
                unsafe { queue.release(block) }.expect("USM");
            });
            let (pooled, in_arena) = (strategy(&pool, size_bytes), strategy(&arena, size_bytes));
            let times = sycl / pooled;
            println!("{:>8} {size_bytes:>10} {sycl:>12.0} {pooled:>12.1} {in_arena:>12.1} {times:>8.0}", kind.name());
        }
    }
}
