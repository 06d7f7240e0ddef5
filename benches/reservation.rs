//! What a reservation costs a request that need not wait, and while ten thousand others wait for another budget.
//!
//! Without arguments: the least of many short rounds that take turns. For callgrind, which counts instructions:
//! `valgrind --tool=callgrind target/release/deps/reservation-* 10000 with 0`, once more with 30000, and the
//! difference by 20,000.

use ctxalloc::metrics::waits;
use ctxalloc::{request, strategy::Budget};
use std::hint::black_box;
use std::time::Instant;

fn requests(count: usize, tenant: &Budget, reserves: bool) {
    for _ in 0..count {
        let terms = request().budget(tenant).limit_bytes(100_000);
        let terms = if reserves { terms.reserve_bytes(1000) } else { terms };
        drop(black_box(terms.begin().expect("there is room")));
    }
}

/// Runs `work` while so many wait for a budget of their own.
fn beside<R>(waiters: usize, work: impl FnOnce() -> R) -> R {
    let full = Budget::new("full", Some(1));
    full.set_max_waiting(waiters);
    let _held = full.charge(1).expect("it is empty");
    let waiting: Vec<_> = (0..waiters).map(|_| request().root().budget(&full).reserve_bytes(1).admit()).collect();
    assert_eq!((full.waiting(), waits(1).len()), (waiters, waiters.min(1)));
    let answer = work();
    drop(waiting);
    answer
}

fn main() {
    let tenant = Budget::new("process", Some(1 << 40)).child("tenant", Some(1 << 30));
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    if let [count, variant, waiters] = &given[..] {
        let count = count.parse().expect("how many requests");
        beside(waiters.parse().expect("how many wait"), || requests(count, &tenant, variant == "with"));
        return;
    }
    const COUNT: usize = 20_000;
    for waiters in [0, 10_000] {
        let [without, with] = beside(waiters, || {
            let mut least = [f64::MAX; 2];
            for _ in 0..100 {
                for (reserves, least) in [false, true].into_iter().zip(&mut least) {
                    let began = Instant::now();
                    requests(COUNT, &tenant, reserves);
                    *least = least.min(began.elapsed().as_nanos() as f64 / COUNT as f64);
                }
            }
            least
        });
        println!(
            "{waiters:>6} wait: {without:6.1} ns without, {with:6.1} ns with a reservation: {:+.1} ns",
            with - without
        );
    }
}
