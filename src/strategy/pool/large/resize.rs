//! Large blocks that are resized in place.
//!
//! What a block grows by is taken right behind it, where that is free, and what it shrinks by is given back. One that
//! has to move to grow will probably grow again, so it goes where much room is behind it, and the memory of what it
//! leaves goes to the system: there it would wait for a block that has been that small before.

use super::{Large, MAX_PAGES, Store};
use crate::source::Pages;
use crate::strategy::pool::clock::now;
use crate::strategy::pool::extents::Run;
use crate::strategy::pool::geometry::PAGE;
use crate::strategy::pool::region::Region;
use crate::survived::survived;
use crate::unattributed::unattributed;
use std::cmp::Ordering;
use std::ptr::NonNull;

/// A block that shrinks by less than one part in this many keeps its pages.
const WORTH_GIVING_BACK: usize = 8;

/// From so many bytes on the memory of a block goes to the system when it moves to grow: both would be there otherwise,
/// for as long as the pool keeps it. Smaller ones stay warm for the next block.
pub(in super::super) const LEFT_FROM: usize = 16 << 20;

/// The most room that is mapped behind a block that grows, in pages: 1 GiB of addresses.
const MAX_ROOM_PAGES: usize = (1 << 30) / PAGE;

/// What came of a block that was to grow where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Growth {
    Done,
    /// What is behind it is in use.
    NoRoom,
    /// The source did not commit what is behind it. Whether something was given back then.
    Refused(bool),
}

impl Large {
    /// Resizes a live block, which `record` has, in place. False where it has to move; it is as it was.
    pub(in super::super) fn resize<P: Pages + ?Sized>(
        &self,
        source: &P,
        record: &Region,
        block: NonNull<u8>,
        size_bytes: usize,
    ) -> bool {
        let _unattributed = unattributed();
        let address = block.addr().get();
        let run = Run { first: address / PAGE, pages: record.large_pages_at(address) };
        let pages = size_bytes.div_ceil(PAGE);
        if pages > MAX_PAGES {
            return false;
        }
        let pages = pages.next_multiple_of(self.grain_pages);
        let grow = || self.grow(source, record, block, run, pages);
        match pages.cmp(&run.pages) {
            // If the source refuses, unused memory can go to make room.
            Ordering::Greater => match grow() {
                Growth::Refused(gave_back) if self.trim(source) > 0 || gave_back => grow() == Growth::Done,
                growth => growth == Growth::Done,
            },
            Ordering::Less if run.pages - pages >= run.pages / WORTH_GIVING_BACK => {
                self.shrink(source, record, block, run, pages);
                true
            }
            _ => true,
        }
    }

    fn grow<P: Pages + ?Sized>(
        &self,
        source: &P,
        record: &Region,
        block: NonNull<u8>,
        run: Run,
        pages: usize,
    ) -> Growth {
        let taken = self.with(|store| {
            store.join_recent();
            let more = store.extents.take_behind(run, pages - run.pages)?;
            let place = store.extents.place(more);
            let (dirty_pages, dirty) = store.extents.clean(more);
            store.lend(more);
            store.growing.goes_on(run.first + run.pages, more.first + more.pages);
            Some((more, place, dirty_pages == more.pages, dirty))
        });
        let Some((more, place, is_fit, dirty)) = taken else { return Growth::NoRoom };
        // Outside the lock, as for a new block.
        // SAFETY: these pages lie in the source's mapping, and they were taken out of the free ones.
        if !is_fit && !unsafe { source.commit(place, more.bytes()) } {
            // SAFETY: the same pages; nobody needs their contents.
            let emptied = unsafe { source.discard(place, more.bytes()) };
            self.with(|store| {
                store.growing.goes_on(more.first + more.pages, more.first);
                store.take_back_uncommitted(more, emptied, &dirty);
            });
            return Growth::Refused(emptied && !dirty.is_empty());
        }
        record.assign_large(block.addr().get(), pages);
        Growth::Done
    }

    fn shrink<P: Pages + ?Sized>(&self, source: &P, record: &Region, block: NonNull<u8>, run: Run, pages: usize) {
        let rest = Run { first: run.first + pages, pages: run.pages - pages };
        record.assign_large(block.addr().get(), pages);
        // It comes back as a block would.
        let place = self.with(|store| {
            let place = store.extents.place(rest);
            store.extents.record(rest).assign_large(place.addr().get(), rest.pages);
            place
        });
        // A panic of the source would tell the caller that the block is as it was.
        survived(|| self.release_at(source, place, rest, now()));
    }

    /// A live block, which `record` has, was moved to one that is larger, and nobody needs its contents: it keeps the
    /// least that a block has, which is to be released.
    pub(in super::super) fn leave<P: Pages + ?Sized>(&self, source: &P, record: &Region, block: NonNull<u8>) {
        let address = block.addr().get();
        let run = Run { first: address / PAGE, pages: record.large_pages_at(address) };
        debug_assert!(run.pages > self.grain_pages, "a block that is worth leaving");
        let _unattributed = unattributed();
        let rest = Run { first: run.first + self.grain_pages, pages: run.pages - self.grain_pages };
        // Outside the lock: the pages are still the block's. A panic would tell the caller that it was not moved.
        // SAFETY: these pages are the end of the block, whose contents nobody needs (the callers say so).
        let emptied = survived(|| unsafe { source.discard(block.add(self.grain_pages * PAGE), rest.bytes()) });
        record.assign_large(address, self.grain_pages);
        self.with(|store| store.take_back_uncommitted(rest, emptied == Some(true), &[rest]));
    }
}

impl Store {
    /// Takes a run of exactly `pages` with as much free room behind it, if that costs only addresses and can be had.
    pub(super) fn take_with_room<P: Pages + ?Sized>(&mut self, source: &P, pages: usize) -> Option<Run> {
        self.join_recent();
        let with_room = pages + pages.min(MAX_ROOM_PAGES);
        // The source is asked, by three system calls, only where more is to be mapped.
        let found = self.take_of_longest(pages, with_room).or_else(|| {
            let is_mapped = source.maps_lazily() && self.extents.grow(source, with_room);
            is_mapped.then(|| self.take_of_longest(pages, with_room)).flatten()
        });
        found.inspect(|run| self.growing.begins(run.first + run.pages))
    }

    /// At the start of the longest free run; or in its middle, if the one before it grows too.
    fn take_of_longest(&mut self, pages: usize, with_room: usize) -> Option<Run> {
        let longest = self.extents.longest().filter(|longest| longest.pages >= with_room)?;
        if !self.growing.has(longest.first) {
            return Some(self.extents.take_at(longest, longest.first, pages));
        }
        let half = longest.pages / 2 / self.extents.grain_pages() * self.extents.grain_pages();
        (half >= with_room).then(|| self.extents.take_at(longest, longest.first + half, pages))
    }
}

#[cfg(test)]
mod tests {
    use super::super::told::{Discards, Told};
    use super::super::{Large, Taking};
    use super::PAGE;
    use crate::source::{Pages, PrivatePages};
    use crate::strategy::PoolOptions;
    use crate::strategy::pool::options::Retention;
    use crate::strategy::pool::region;
    use std::ptr::NonNull;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    const MIB: usize = 1 << 20;

    fn large(grain_pages: usize) -> Large {
        // Under Miri a block takes seconds.
        let options = PoolOptions { decay: Duration::from_secs(100_000), ..PoolOptions::default() };
        Large::new(grain_pages, Retention::new(options))
    }

    fn resized(large: &Large, source: &impl Pages, block: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: every block here is live while it is resized.
        large.resize(source, unsafe { region::find(block.addr().get()) }, block, size_bytes)
    }

    #[test]
    fn a_block_grows_where_it_is_and_what_it_shrinks_by_comes_back() {
        let large = large(1);
        let block = large.allocate(&PrivatePages, MIB, Taking::ToGrow).expect("memory");
        let mut size_bytes = MIB;
        for grown in [2 * MIB, 3 * MIB, 4 * MIB] {
            // SAFETY: the block has so many bytes, and nobody else has it.
            unsafe { block.write_bytes(7, size_bytes) };
            assert!(resized(&large, &PrivatePages, block, grown), "{grown}");
            assert_eq!((large.kept().in_use, large.kept().warm), (grown, 0));
            size_bytes = grown;
        }
        // SAFETY: the block has so many bytes now, and nobody else has it.
        unsafe { block.write_bytes(7, size_bytes) };
        assert!(resized(&large, &PrivatePages, block, MIB));
        assert_eq!((large.kept().in_use, large.kept().warm), (MIB, 3 * MIB));
        assert!(resized(&large, &PrivatePages, block, MIB - MIB / 16), "too little to give back");
        assert_eq!(large.kept().in_use, MIB);
        let rest = large.allocate(&PrivatePages, 3 * MIB, Taking::AsItIs).expect("memory");
        // SAFETY: inside of what was one block of 4 MiB.
        assert_eq!(rest, unsafe { block.add(MIB) }, "what it shrank by serves the next block");
        assert!(!resized(&large, &PrivatePages, block, MIB + 1), "which is not taken from it");
        large.release(&PrivatePages, rest);
        assert!(resized(&large, &PrivatePages, block, MIB + 1), "until it came back");
        assert_eq!(large.kept().in_use, MIB + PAGE);
        // SAFETY: its first MiB was written, and it was resized in place.
        assert!((0..MIB).all(|at| unsafe { block.add(at).read() } == 7));
        large.release(&PrivatePages, block);
        assert_eq!(large.kept().in_use, 0);
        assert_eq!(large.trim(&PrivatePages), 4 * MIB);
        large.close(&PrivatePages);
    }

    #[test]
    fn blocks_of_huge_pages_stay_multiples_of_them() {
        let large = large(32);
        let block = large.allocate(&PrivatePages, 3 * MIB, Taking::AsItIs).expect("memory");
        assert_eq!(large.kept().in_use, 4 * MIB);
        assert!(resized(&large, &PrivatePages, block, 4 * MIB));
        assert!(resized(&large, &PrivatePages, block, MIB));
        assert_eq!(large.kept().in_use, 2 * MIB);
        assert!(resized(&large, &PrivatePages, block, 2 * MIB + 1));
        assert_eq!(large.kept().in_use, 4 * MIB);
        assert!(!resized(&large, &PrivatePages, block, 4 * MIB + 1), "no more was mapped than was asked for");
        large.release(&PrivatePages, block);
        large.close(&PrivatePages);
    }

    /// Four blocks in turn, each by a tenth.
    #[test]
    fn blocks_that_grow_together_move_seldom() {
        const END: usize = if cfg!(miri) { 2 * MIB } else { 64 * MIB };
        let large = large(1);
        let mut blocks = [(); 4].map(|()| large.allocate(&PrivatePages, MIB, Taking::AsItIs).expect("memory"));
        let (mut size_bytes, mut moves, mut steps) = (MIB, 0, 0);
        while size_bytes < END {
            size_bytes += size_bytes / 10;
            for block in &mut blocks {
                steps += 1;
                if !resized(&large, &PrivatePages, *block, size_bytes) {
                    moves += 1;
                    let moved = large.allocate(&PrivatePages, size_bytes, Taking::ToGrow).expect("memory");
                    large.release(&PrivatePages, std::mem::replace(block, moved));
                }
            }
        }
        assert!(moves * 3 <= steps, "{moves} moves in {steps} steps");
        blocks.into_iter().for_each(|block| large.release(&PrivatePages, block));
        large.close(&PrivatePages);
    }

    #[test]
    fn what_a_block_leaves_to_grow_goes_to_the_system() {
        for discards in [Discards::All, Discards::None, Discards::Panics] {
            let (large, source) = (large(1), Told { discards, ..Told::default() });
            let block = large.allocate(&source, 16 * MIB, Taking::AsItIs).expect("memory");
            // SAFETY: it is live, and has not been written to.
            large.leave(&source, unsafe { region::find(block.addr().get()) }, block);
            let gone = 16 * MIB - PAGE;
            assert_eq!(
                source.given_back_bytes.load(Ordering::Relaxed),
                if discards == Discards::All { gone } else { 0 }
            );
            let warm = if discards == Discards::All { 0 } else { gone };
            assert_eq!((large.kept().in_use, large.kept().warm), (PAGE, warm), "{discards:?}");
            let next = large.allocate(&source, gone, Taking::AsItIs).expect("memory");
            // SAFETY: inside of what was one block of 16 MiB.
            assert_eq!(next, unsafe { block.add(PAGE) }, "its place is free");
            assert!(resized(&large, &source, block, PAGE), "what is left is a block");
            [next, block].into_iter().for_each(|block| large.release(&PrivatePages, block));
            large.close(&PrivatePages);
        }
    }

    #[test]
    fn a_block_larger_than_any_stays_as_it_is() {
        let large = large(1);
        let block = large.allocate(&PrivatePages, MIB, Taking::AsItIs).expect("memory");
        for size_bytes in [1 << 47, isize::MAX as usize, usize::MAX] {
            assert!(!resized(&large, &PrivatePages, block, size_bytes));
            assert_eq!(large.kept().in_use, MIB);
        }
        large.release(&PrivatePages, block);
        large.close(&PrivatePages);
    }

    /// Where there is so much room for all: eight blocks in turn, each by a page.
    #[test]
    #[cfg_attr(miri, ignore = "its addresses would all be memory under Miri")]
    fn one_that_grows_leaves_those_before_it_their_room() {
        let large = large(1);
        let room = large.allocate(&PrivatePages, 1 << 30, Taking::AsItIs).expect("addresses");
        large.release(&PrivatePages, room);
        let mut blocks = [(); 8].map(|()| large.allocate(&PrivatePages, MIB, Taking::AsItIs).expect("memory"));
        let mut moves = 0;
        for size_bytes in (MIB..8 * MIB).step_by(PAGE) {
            for block in &mut blocks {
                if !resized(&large, &PrivatePages, *block, size_bytes) {
                    moves += 1;
                    let moved = large.allocate(&PrivatePages, size_bytes, Taking::ToGrow).expect("memory");
                    large.release(&PrivatePages, std::mem::replace(block, moved));
                }
            }
        }
        assert!(moves <= 8 * 2, "{moves} moves of eight blocks");
        blocks.into_iter().for_each(|block| large.release(&PrivatePages, block));
        large.close(&PrivatePages);
    }

    #[test]
    fn no_room_is_mapped_where_it_would_be_memory() {
        let (large, source) = (large(1), Told { is_lazy: false, ..Told::default() });
        let block = large.allocate(&source, 32 * MIB, Taking::ToGrow).expect("memory");
        assert_eq!(source.mapped_bytes.load(Ordering::Relaxed), 32 * MIB);
        large.release(&source, block);
        assert_eq!(source.asked.load(Ordering::Relaxed), 1);
        let small = large.allocate(&source, 4 * MIB, Taking::ToGrow).expect("memory");
        assert_eq!(source.asked.load(Ordering::Relaxed), 1, "there is room in what is mapped");
        large.release(&source, small);
        large.close(&source);
    }

    #[test]
    fn what_is_not_committed_is_not_the_blocks() {
        let (large, source) = (large(1), Told::that_commits(1));
        let block = large.allocate(&source, MIB, Taking::ToGrow).expect("memory");
        assert!(!resized(&large, &source, block, 2 * MIB));
        assert_eq!((large.kept().in_use, large.kept().warm), (MIB, 0));
        source.commits.store(1, Ordering::Relaxed);
        assert!(resized(&large, &source, block, 2 * MIB), "it is still free");
        assert!(resized(&large, &source, block, MIB));
        assert!(resized(&large, &source, block, 2 * MIB), "what came back is committed");
        large.release(&source, block);
        large.close(&source);
    }

    #[test]
    fn what_is_kept_goes_to_make_room_for_one_that_grows() {
        let (large, source) = (large(1), Told::default());
        let block = large.allocate(&source, MIB, Taking::ToGrow).expect("memory");
        let kept = large.allocate(&source, MIB / 2, Taking::AsItIs).expect("memory");
        // SAFETY: both are live. The other one lies right behind the block.
        assert_eq!(kept, unsafe { block.add(MIB) });
        large.release(&source, kept);
        // The first commit is refused, since what is kept is only a part of it; then that was given back.
        source.refusals.store(1, Ordering::Relaxed);
        assert!(resized(&large, &source, block, 2 * MIB));
        assert_eq!((large.kept().in_use, large.kept().warm), (2 * MIB, 0));
        large.release(&source, block);
        large.close(&source);
    }

    #[test]
    fn what_is_neither_committed_nor_discarded_is_committed_before_it_serves() {
        let source = Told { discards: Discards::None, ..Told::that_commits(2) };
        let large = large(1);
        let live = large.allocate(&source, MIB, Taking::AsItIs).expect("memory");
        let kept = large.allocate(&source, MIB, Taking::AsItIs).expect("memory");
        large.release(&source, kept);
        assert_eq!(large.allocate(&source, 2 * MIB, Taking::AsItIs), None);
        assert_eq!((large.kept().in_use, large.kept().warm), (MIB, MIB), "only what was committed before");
        let again = large.allocate(&source, MIB, Taking::AsItIs).expect("it is committed");
        assert_eq!(large.allocate(&source, MIB, Taking::AsItIs), None, "this is not");
        [again, live].into_iter().for_each(|block| large.release(&source, block));
        large.close(&source);
    }

    #[test]
    fn a_block_has_shrunk_although_the_source_panicked_at_what_came_back() {
        let options = PoolOptions { warm_bytes: 0, ..PoolOptions::default() };
        let large = Large::new(1, Retention::new(options));
        let bad = Told { discards: Discards::Panics, ..Told::default() };
        let block = large.allocate(&bad, 8 * MIB, Taking::AsItIs).expect("memory");
        assert!(resized(&large, &bad, block, MIB), "the caller knows how long it is");
        assert_eq!(large.kept().in_use, MIB);
        drop(large); // its pages stay mapped: the source panics at them
    }
}
