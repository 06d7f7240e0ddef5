//! Blocks of small classes that are cut as large ones are. Threads keep some, and may give them back while they have
//! the lock of the large ones: they allocate under that, and what allocates may empty caches.

use super::{Large, PAGE, Run, Store, Taking, classes, now, region, run_of};
use crate::source::Pages;
use crate::unattributed::unattributed;
use std::ptr::NonNull;

impl Large {
    /// Runs `work` on the store, alone, once what came back is in it.
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut Store) -> R) -> R {
        self.store.with(|store| {
            self.take_what_came(store);
            let result = work(store);
            self.open_parked(store);
            result
        })
    }

    /// Under the lock: what came back without it is in the store from then on.
    #[inline]
    pub(super) fn take_what_came(&self, store: &mut Store) {
        if let Some((block, pages)) = self.parked.take_any() {
            let _unattributed = unattributed();
            store.put(block, Run { first: block.addr().get() / PAGE, pages }, now());
        }
        self.take_given(store);
    }

    /// Under the lock, as it is let go.
    #[inline]
    pub(super) fn open_parked(&self, store: &Store) {
        self.parked.open(store.room_bytes(), store.look_again);
    }

    #[inline]
    fn take_given(&self, store: &mut Store) {
        if !self.given.is_empty() {
            self.take_all_given(store);
        }
    }

    #[cold]
    fn take_all_given(&self, store: &mut Store) {
        let _unattributed = unattributed();
        let now = now();
        for block in self.given.take_all() {
            store.put(block, run_of(block), now);
        }
    }

    /// A block of a small class, which [`give`](Self::give) takes back.
    pub(in super::super) fn allocate_of<P: Pages + ?Sized>(&self, source: &P, class: usize) -> Option<NonNull<u8>> {
        let block = self.allocate(source, classes::bytes(class), Taking::AsItIs)?;
        let address = block.addr().get();
        // SAFETY: the block was just made, so its region is in the map.
        unsafe { region::find(address) }.set_class(address, Some(class));
        Some(block)
    }

    /// Takes back blocks that [`allocate_of`](Self::allocate_of) made. Nothing goes to the system, and this thread may
    /// have the lock of these blocks: then they stay where the next one who has it finds them.
    pub(in super::super) fn give(&self, blocks: &[NonNull<u8>]) {
        self.push(blocks);
        self.store.try_with(|store| self.take_given(store));
    }

    /// As [`give`](Self::give), but this thread does not have the lock, and what is not expected to be needed goes to
    /// the system.
    pub(in super::super) fn release_given<P: Pages + ?Sized>(&self, source: &P, blocks: &[NonNull<u8>]) {
        let _unattributed = unattributed();
        self.push(blocks);
        self.release_with(source, now(), |_| {});
    }

    fn push(&self, blocks: &[NonNull<u8>]) {
        for &block in blocks {
            let address = block.addr().get();
            // SAFETY: the block is live, so its region is in the map.
            let region = unsafe { region::find(address) };
            region.set_class(address, None);
            self.given.push(address, region.link_at(address));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::told::Told;
    use super::super::{Large, PAGE, Taking};
    use super::{classes, region};
    use crate::strategy::PoolOptions;
    use crate::strategy::pool::options::Retention;
    use std::sync::atomic::Ordering;

    const KIB: usize = 1 << 10;

    #[test]
    fn what_came_back_serves_large_blocks() {
        let (large, source) = (Large::new(1, Retention::new(PoolOptions::default())), Told::default());
        let class = classes::ALIGNED.of(160 * KIB);
        assert!(classes::is_joined(class) && !classes::is_joined(classes::ALIGNED.of(128 * KIB)));
        let blocks: Vec<_> = (0..21).map(|_| large.allocate_of(&source, class).expect("memory")).collect();
        let class_of = |block: std::ptr::NonNull<u8>| {
            // SAFETY: a block of these, whose region is mapped until `close`.
            unsafe { region::find(block.addr().get()) }.class_at(block.addr().get())
        };
        assert!(blocks.iter().all(|&block| class_of(block) == Some(class)));
        let in_use = blocks.len() * 3 * PAGE;
        assert_eq!(large.kept().in_use, in_use);
        let mapped = source.mapped_bytes.load(Ordering::Relaxed);
        large.give(&blocks[..20]);
        assert_eq!((large.kept().in_use, large.kept().warm), (3 * PAGE, in_use - 3 * PAGE));
        let joined = large.allocate(&source, in_use - 3 * PAGE, Taking::AsItIs).expect("memory");
        assert_eq!(source.mapped_bytes.load(Ordering::Relaxed), mapped, "no more was needed");
        assert_eq!((class_of(joined), class_of(blocks[20])), (None, Some(class)));
        large.release_given(&source, &blocks[20..]);
        large.release(&source, joined);
        assert_eq!(large.kept().in_use, 0);
        large.close(&source);
    }

    /// As where the list of extents grows, by a block for which a thread's cache is swept.
    #[test]
    fn blocks_may_be_given_under_the_lock() {
        let (large, source) = (Large::new(1, Retention::new(PoolOptions::default())), Told::default());
        let blocks: Vec<_> =
            (0..5).map(|_| large.allocate_of(&source, classes::ALIGNED.of(200 * KIB)).expect("memory")).collect();
        large.store.with(|_| large.give(&blocks));
        assert_eq!((large.kept().in_use, large.kept().warm), (0, 5 * 4 * PAGE), "who comes next takes them");
        large.close(&source);
    }
}
