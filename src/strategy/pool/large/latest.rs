//! Blocks that lie where another one lay shortly before, of whatever size.
//!
//! A block of its own size's latest is in the processor's caches if the program uses one size again and again. One that
//! uses many in turn, as a request does that reads a body, decodes a picture and scales it, has each size's block in
//! memory that the others have displaced since. malloc takes them all from the end of its heap; so does this.

use super::{Large, PAGE, Recent, Run, Store, Taking};
use crate::source::Pages;
use std::ptr::NonNull;

/// The largest block that came back of which another one may get a part: more are in no processor's cache.
const MAX_CUT: usize = (2 << 20) / PAGE;

impl Large {
    /// A block of any size: a part of what came back latest, if that is large enough; else as any other one. `None`
    /// also where another thread has the lock.
    pub(in super::super) fn allocate_latest<P: Pages + ?Sized>(
        &self,
        source: &P,
        size_bytes: usize,
        zeroed: bool,
    ) -> Option<NonNull<u8>> {
        let pages = self.pages_of(size_bytes);
        let latest = self.store.try_with(|store| {
            self.take_what_came(store);
            let taken = store.take_latest(pages);
            self.open_parked(store);
            taken
        })?;
        let Some((block, run)) = latest else {
            return self.allocate_any(source, size_bytes, if zeroed { Taking::Zeroed } else { Taking::AsItIs });
        };
        // SAFETY: a new block in committed pages of the source; nobody else has it or needs its contents.
        if zeroed && !unsafe { source.clear(block, size_bytes) } {
            self.with(|store| store.take_back(run));
            return None;
        }
        Some(block)
    }
}

impl Store {
    /// Takes the first `pages` of the latest of the recent blocks that has as many and is not too large to be cut.
    fn take_latest(&mut self, pages: usize) -> Option<(NonNull<u8>, Run)> {
        let fits = |Recent { run, .. }: &Recent| run.pages == pages || (pages..=MAX_CUT).contains(&run.pages);
        let Recent { block, run, since } = self.recent.remove(self.recent.iter().rposition(fits)?);
        self.recent_bytes -= run.bytes();
        let own = Run { pages, ..run };
        if run.pages > pages {
            self.extents.give(Run { first: run.first + pages, pages: run.pages - pages }, since);
            self.extents.record(own).assign_large(block.addr().get(), pages);
        }
        self.lend(own);
        Some((block, own))
    }
}

#[cfg(test)]
mod tests {
    use super::{Large, MAX_CUT, PAGE, Taking};
    use crate::source::PrivatePages;
    use crate::strategy::PoolOptions;
    use crate::strategy::pool::options::Retention;
    use std::ptr::NonNull;

    const KIB: usize = 1 << 10;

    fn latest(large: &Large, size_bytes: usize, zeroed: bool) -> NonNull<u8> {
        large.allocate_latest(&PrivatePages, size_bytes, zeroed).expect("memory, and no other thread")
    }

    #[test]
    fn blocks_of_other_sizes_lie_where_the_last_one_lay() {
        let large = Large::new(1, Retention::new(PoolOptions::default()));
        let first = latest(&large, 1024 * KIB, false);
        // SAFETY: a live block of so many bytes, which nobody else has.
        unsafe { first.write_bytes(1, 1024 * KIB) };
        large.release(&PrivatePages, first);
        let second = latest(&large, 100 * KIB, false);
        assert_eq!(second, first, "the beginning of what came back");
        let third = latest(&large, 300 * KIB, true);
        let offset = third.addr().get() - first.addr().get();
        assert_eq!(offset, 128 * KIB, "what is left of it, behind the second one's pages");
        // SAFETY: a live block of so many bytes, which was cleared.
        assert!(unsafe { std::slice::from_raw_parts(third.as_ptr(), 300 * KIB) }.iter().all(|&byte| byte == 0));
        large.release(&PrivatePages, second);
        large.release(&PrivatePages, third);
        let fourth = latest(&large, 200 * KIB, true);
        assert_eq!(fourth, third, "the latest");
        // SAFETY: a live block of so many bytes, which was cleared.
        assert!(unsafe { std::slice::from_raw_parts(fourth.as_ptr(), 200 * KIB) }.iter().all(|&byte| byte == 0));
        large.release(&PrivatePages, fourth);
        assert_eq!(large.kept().in_use, 0);
        large.close(&PrivatePages);
    }

    #[test]
    fn what_is_in_no_cache_is_not_cut() {
        let large = Large::new(1, Retention::new(PoolOptions::default()));
        let first = large.allocate(&PrivatePages, (MAX_CUT + 1) * PAGE, Taking::AsItIs).expect("memory");
        large.release(&PrivatePages, first);
        assert!(large.with(|store| store.take_latest(MAX_CUT)).is_none());
        let second = latest(&large, (MAX_CUT + 1) * PAGE, false);
        assert_eq!(second, first, "as it is");
        large.release(&PrivatePages, second);
        assert_eq!(large.kept().in_use, 0);
        large.close(&PrivatePages);
    }
}
