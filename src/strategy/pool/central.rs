//! The central free lists: one for each size class and *shard*. Threads take small blocks from them and return surplus
//! ones to them, in batches.
//!
//! Each thread takes from one of a few shards. A block goes back to the shard that its span belongs to. So threads of
//! different shards that free what they allocated seldom meet at a lock, and their blocks share no cache line. A shard
//! that has no block left takes over a span from another shard that has several with room, before it takes a new one.
//!
//! Each span knows which of its blocks are free. A span whose last live block came back goes to the page heap at once.
//! Nothing here allocates; spans are taken from the page heap and given back outside the locks.

use super::classes;
use super::heap::PageHeap;
use super::region;
use super::span::{Span, Spans};
use crate::source::Pages;
use crate::sync::{ForkLock, Locked};
use std::ptr::NonNull;

/// How many shards there are. Each may keep a span of its own for each class in use.
const SHARDS: usize = 4;

/// All central free lists of a pool.
#[derive(Debug)]
pub(super) struct Central {
    shards: [Shard; SHARDS],
}

/// For each class the spans of this shard that have both a free block and a live one. When two lists of a class are
/// locked, that of the lower shard is locked first.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    with_room: [Locked<Spans>; classes::COUNT],
}

impl Central {
    pub(super) fn new() -> Self {
        let shard = || Shard { with_room: [(); classes::COUNT].map(|()| Locked::new(Spans::new())) };
        Self { shards: [(); SHARDS].map(|()| shard()) }
    }

    fn list(&self, shard: usize, class: usize) -> &Locked<Spans> {
        &self.shards[shard].with_room[class]
    }

    /// Fills `places` from the front with blocks of `class` for a thread with this number; returns how many. 0 means
    /// that there is no memory.
    pub(super) fn take<P: Pages>(
        &self,
        heap: &PageHeap<P>,
        thread: usize,
        class: usize,
        places: &mut [NonNull<u8>],
    ) -> usize {
        let shard = thread % SHARDS;
        let list = self.list(shard, class);
        let filled = list.with(|spans| fill(spans, places));
        if filled > 0 || places.is_empty() {
            // A part of a batch will do; a new span is taken only if there is no block at all.
            return filled;
        }
        if self.take_over_span(shard, class) {
            let filled = list.with(|spans| fill(spans, places));
            if filled > 0 {
                return filled;
            } // else another thread of this shard was faster
        }
        let Some(span) = heap.take(class) else { return 0 };
        span.set_shard(shard);
        list.with(|spans| {
            spans.push(span);
            fill(spans, places)
        })
    }

    /// Moves a span of `class` to this shard from another one that has several with room.
    fn take_over_span(&self, shard: usize, class: usize) -> bool {
        (1..SHARDS).map(|step| (shard + step) % SHARDS).any(|from| {
            let (lower, upper) = (from.min(shard), from.max(shard));
            self.list(lower, class).with(|lower_spans| {
                self.list(upper, class).with(|upper_spans| {
                    let (theirs, ours) =
                        if from == lower { (lower_spans, upper_spans) } else { (upper_spans, lower_spans) };
                    let Some(span) = theirs.iter().nth(1) else { return false };
                    theirs.remove(span);
                    span.set_shard(shard);
                    ours.push(span);
                    true
                })
            })
        })
    }

    /// Takes blocks of `class` back, which nobody else has; their order is lost. Returns whether a span went back to
    /// the heap.
    pub(super) fn give<P: Pages>(&self, heap: &PageHeap<P>, class: usize, blocks: &mut [NonNull<u8>]) -> bool {
        let mut left = blocks.len();
        let mut is_emptied = false;
        while let Some(&block) = blocks[..left].first() {
            // A guess: until its list is locked, the span may move to another shard.
            let shard = span_of(block).shard();
            let mut emptied = Spans::new();
            left = self.list(shard, class).with(|spans| give_to(spans, shard, &mut blocks[..left], &mut emptied));
            while let Some(span) = emptied.pop() {
                heap.give(span);
                is_emptied = true;
            }
        }
        is_emptied
    }

    pub(super) fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        self.shards.iter().flat_map(|shard| &shard.with_room).for_each(|list| visit(list.lock()));
    }
}

/// The span of a block that nobody else has, and that has not been given back to its span yet.
fn span_of(block: NonNull<u8>) -> &'static Span {
    // SAFETY: the span counts the block as live: only whoever has the block gives it back, and that is the caller.
    unsafe { region::span_of(block) }
}

fn fill(spans: &mut Spans, places: &mut [NonNull<u8>]) -> usize {
    let mut filled = 0;
    while filled < places.len()
        && let Some(span) = spans.first()
    {
        filled += span.take_some(&mut places[filled..]);
        if span.is_full() {
            spans.remove(span);
        }
    }
    filled
}

/// Gives back the blocks whose spans belong to `shard`, whose list is `spans`. Moves the others to the front, and
/// returns how many they are. Spans without a live block move to `emptied`.
fn give_to(spans: &mut Spans, shard: usize, blocks: &mut [NonNull<u8>], emptied: &mut Spans) -> usize {
    let (mut at, mut others) = (0, 0);
    while let Some(&block) = blocks.get(at) {
        let span = span_of(block);
        if span.shard() != shard {
            blocks[others] = block;
            (at, others) = (at + 1, others + 1);
            continue;
        }
        if span.is_full() {
            spans.push(span);
        }
        at += span.give_run(&blocks[at..]);
        if span.live() == 0 {
            spans.remove(span);
            emptied.push(span);
        }
    }
    others
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::super::heap::PageHeap;
    use super::super::options::{PoolOptions, Retention};
    use super::{Central, SHARDS, span_of};
    use crate::source::PrivatePages;
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::ptr::NonNull;
    use std::sync::mpsc::channel;
    use std::thread;

    const CLASS: usize = 40; // 7 blocks a span

    fn heap() -> PageHeap<PrivatePages> {
        PageHeap::new(PrivatePages, Retention::new(PoolOptions::default()))
    }

    fn take(central: &Central, heap: &PageHeap<PrivatePages>, shard: usize, count: usize) -> Vec<NonNull<u8>> {
        let mut places = vec![NonNull::dangling(); count];
        let taken = central.take(heap, shard, CLASS, &mut places);
        places.truncate(taken);
        places
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 200 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn blocks_of_any_shards_are_distinct_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 0..SHARDS, 1..33_usize, any::<usize>()), 1..60)
        ) {
            let (central, heap) = (Central::new(), heap());
            let mut live: Vec<NonNull<u8>> = Vec::new();
            for (is_take, shard, count, which) in steps {
                if is_take {
                    let blocks = take(&central, &heap, shard, count);
                    prop_assert!(!blocks.is_empty());
                    prop_assert!(blocks.iter().all(|block| span_of(*block).shard() == shard));
                    live.extend(blocks);
                } else {
                    let mut blocks: Vec<_> = (0..count.min(live.len()))
                        .map(|number| live.swap_remove(which.wrapping_mul(number + 1) % live.len()))
                        .collect();
                    central.give(&heap, CLASS, &mut blocks);
                }
                let distinct: HashSet<_> = live.iter().collect();
                prop_assert_eq!(distinct.len(), live.len(), "a block was handed out twice");
            }
            central.give(&heap, CLASS, &mut live);
            heap.trim();
            prop_assert_eq!(heap.regions(), 0);
        }
    }

    #[test]
    fn a_shard_takes_over_spans_of_which_another_has_several() {
        let (central, heap) = (Central::new(), heap());
        let mut live: Vec<_> = (0..10).flat_map(|_| take(&central, &heap, 0, 100)).collect();
        let spans: HashSet<_> = live.iter().map(|block| span_of(*block).start()).collect();
        // One block of each span stays.
        let mut seen = HashSet::new();
        let (mut kept, mut given) = (Vec::new(), Vec::new());
        for block in live.drain(..) {
            if seen.insert(span_of(block).start()) { kept.push(block) } else { given.push(block) }
        }
        central.give(&heap, CLASS, &mut given);
        let in_use = heap.kept().in_use;
        for _ in 1..spans.len() {
            let blocks = take(&central, &heap, 1, 100);
            assert!(blocks.iter().all(|block| spans.contains(&span_of(*block).start())), "a span that was there");
            kept.extend(blocks);
        }
        assert_eq!(heap.kept().in_use, in_use);
        let fresh = take(&central, &heap, 1, 100);
        assert!(fresh.iter().all(|block| !spans.contains(&span_of(*block).start())), "the last one is left to shard 0");
        kept.extend(fresh);
        central.give(&heap, CLASS, &mut kept);
        heap.trim();
        assert_eq!(heap.regions(), 0);
    }

    /// Each thread frees what another one allocated, while spans change their shards.
    #[test]
    fn threads_of_all_shards_give_back_each_others_blocks() {
        let (central, heap) = (&Central::new(), &heap());
        let rounds = if cfg!(miri) { 12 } else { 3000 };
        thread::scope(|scope| {
            let (senders, receivers): (Vec<_>, Vec<_>) = (0..SHARDS).map(|_| channel::<Vec<usize>>()).unzip();
            for (shard, receiver) in receivers.into_iter().enumerate() {
                let senders = senders.clone();
                scope.spawn(move || {
                    let give_received = |addresses: Vec<usize>| {
                        let block =
                            |address: usize| NonNull::with_exposed_provenance(address.try_into().expect("not NULL"));
                        let mut blocks: Vec<_> = addresses.into_iter().map(block).collect();
                        central.give(heap, CLASS, &mut blocks);
                    };
                    for round in 0..rounds {
                        let mut blocks = take(central, heap, shard, 1 + (round * 7 + shard) % 12);
                        let to_send = blocks.split_off(blocks.len() / 3);
                        let to_send = to_send.iter().map(|block| block.expose_provenance().get()).collect();
                        senders[(shard + round) % SHARDS].send(to_send).expect("all listen");
                        central.give(heap, CLASS, &mut blocks);
                        receiver.try_iter().for_each(give_received);
                    }
                    drop(senders);
                    receiver.into_iter().for_each(give_received);
                });
            }
            drop(senders);
        });
        heap.trim();
        assert_eq!(heap.regions(), 0);
    }
}
