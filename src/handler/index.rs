//! An append-only hash index of entries. Looking up takes no lock; adding happens under the table's lock.
//!
//! Entries are never removed and never change, so a chain can be walked while others add to its front:
//! the load of a bucket's head (Acquire) pairs with the store that published the entry (Release).

use super::entry::Entry;
use crate::sync::{AtomicPtr, Ordering};
use std::ptr::null_mut;

/// One for loom: addresses differ from run to run, and a model must not.
const BUCKETS: usize = if cfg!(ctxalloc_loom) { 1 } else { 1024 };

/// Laid out for C: part of the table that copies of this crate share.
#[repr(C)]
pub(super) struct Index {
    heads: [AtomicPtr<Entry>; BUCKETS],
}

impl Index {
    pub(super) fn new() -> Self {
        Self { heads: std::array::from_fn(|_| AtomicPtr::new(null_mut())) }
    }

    /// The entry among those with this hash that `is_it` accepts; `next` names the chain this index uses.
    pub(super) fn find(
        &self,
        hash: u64,
        next: impl Fn(&Entry) -> &AtomicPtr<Entry>,
        is_it: impl Fn(&Entry) -> bool,
    ) -> Option<&'static Entry> {
        // Acquire pairs with the Release in `add`: the entry's fields are visible.
        let mut pointer = self.bucket(hash).load(Ordering::Acquire);
        loop {
            // SAFETY: only `add` puts pointers here, of entries that live for ever.
            let entry: &'static Entry = unsafe { pointer.as_ref() }?;
            if is_it(entry) {
                return Some(entry);
            }
            // Relaxed: whoever published the newest entry held the lock, hence saw all that stands behind it, and
            // the head's Release and Acquire hand all of that on.
            pointer = next(entry).load(Ordering::Relaxed);
        }
    }

    /// Publishes an entry. Only one thread at a time (the table's lock), each entry once.
    pub(super) fn add(&self, hash: u64, next: impl Fn(&Entry) -> &AtomicPtr<Entry>, entry: &'static Entry) {
        let bucket = self.bucket(hash);
        // Relaxed: the lock orders writers among themselves, and nobody else knows the entry yet.
        next(entry).store(bucket.load(Ordering::Relaxed), Ordering::Relaxed);
        // Release pairs with the Acquire in `find`.
        bucket.store(std::ptr::from_ref(entry).cast_mut(), Ordering::Release);
    }

    fn bucket(&self, hash: u64) -> &AtomicPtr<Entry> {
        // The high half: both hashes below end in a multiplication, which mixes upwards.
        &self.heads[(hash >> 32) as usize % BUCKETS]
    }
}

/// FNV-1a, then mixed upwards. Part of the table's layout: copies of this crate must agree.
pub(super) fn hash_name(name: &str) -> u64 {
    let fnv = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    fnv.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Fibonacci hashing of an address. Part of the table's layout: copies of this crate must agree.
pub(super) fn hash_address(address: usize) -> u64 {
    (address as u64 >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
