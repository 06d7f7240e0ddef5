//! `Few`: a list of which most have a handful of entries, and those without a heap block.
#![allow(unsafe_code, reason = "entries in place")]

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::{fmt, ptr, slice};

/// Up to `N` entries in place, and more of them in a block of the heap.
pub(super) struct Few<T, const N: usize> {
    /// The first `count` are there.
    near: [MaybeUninit<T>; N],
    count: usize,
    /// All of them, once they were more than `N`; then none is in `near`.
    far: Vec<T>,
}

impl<T, const N: usize> Few<T, N> {
    pub(super) const fn new() -> Self {
        Self { near: [const { MaybeUninit::uninit() }; N], count: 0, far: Vec::new() }
    }

    #[inline]
    pub(super) fn push(&mut self, entry: T) {
        if self.far.is_empty() && self.count < N {
            self.near[self.count].write(entry);
            self.count += 1;
        } else {
            self.push_far(entry);
        }
    }

    #[inline]
    pub(super) fn push_first(&mut self, entry: T) {
        self.push(entry);
        if self.len() > 1 {
            self.rotate_right(1);
        }
    }

    #[cold]
    fn push_far(&mut self, entry: T) {
        if self.far.is_empty() {
            self.far.reserve(2 * N + 1);
            let count = std::mem::take(&mut self.count);
            // SAFETY: the first `count` are there, and with `count` at 0 they are not there any more.
            self.far.extend(self.near[..count].iter().map(|entry| unsafe { entry.assume_init_read() }));
        }
        self.far.push(entry);
    }

    /// Takes out those that have the key of the entry before them.
    #[inline]
    pub(super) fn dedup_by_key<K: PartialEq>(&mut self, key: impl Fn(&mut T) -> K) {
        if !self.far.is_empty() {
            return self.far.dedup_by_key(key); // at least one is left
        }
        let mut at = 1;
        while at < self.count {
            if key(&mut self[at]) != key(&mut self[at - 1]) {
                at += 1;
                continue;
            }
            self[at..].rotate_left(1);
            self.count -= 1;
            // SAFETY: it was the last of those that are there, and is none of them any more.
            unsafe { self.near[self.count].assume_init_drop() };
        }
    }
}

impl<T, const N: usize> Deref for Few<T, N> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        if self.far.is_empty() {
            // SAFETY: the first `count` are there, in a row.
            unsafe { slice::from_raw_parts(self.near.as_ptr().cast(), self.count) }
        } else {
            &self.far
        }
    }
}

impl<T, const N: usize> DerefMut for Few<T, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        if self.far.is_empty() {
            // SAFETY: the first `count` are there, in a row, and nobody else has them.
            unsafe { slice::from_raw_parts_mut(self.near.as_mut_ptr().cast(), self.count) }
        } else {
            &mut self.far
        }
    }
}

impl<T, const N: usize> Extend<T> for Few<T, N> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, entries: I) {
        entries.into_iter().for_each(|entry| self.push(entry));
    }
}

impl<T, const N: usize> FromIterator<T> for Few<T, N> {
    #[inline]
    fn from_iter<I: IntoIterator<Item = T>>(entries: I) -> Self {
        let mut few = Self::new();
        few.extend(entries);
        few
    }
}

impl<T, const N: usize> Drop for Few<T, N> {
    #[inline]
    fn drop(&mut self) {
        let near = ptr::slice_from_raw_parts_mut(self.near.as_mut_ptr().cast::<T>(), self.count);
        // SAFETY: the first `count` are there, and are not used again.
        unsafe { ptr::drop_in_place(near) };
    }
}

impl<T: fmt::Debug, const N: usize> fmt::Debug for Few<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::Few;
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 256 }, ..ProptestConfig::default() })]

        #[test]
        fn few_are_as_a_vector(numbers in prop::collection::vec(0_usize..4, 0..9)) {
            let counted: [Arc<()>; 4] = Default::default();
            let (mut few, mut all) = (Few::<(usize, Arc<()>), 3>::new(), Vec::new());
            for number in numbers {
                few.push((number, Arc::clone(&counted[number])));
                all.push((number, Arc::clone(&counted[number])));
                prop_assert_eq!(&*few, &*all);
            }
            few.sort_by_key(|entry| entry.0);
            all.sort_by_key(|entry| entry.0);
            few.dedup_by_key(|entry| entry.0);
            all.dedup_by_key(|entry| entry.0);
            prop_assert_eq!(&*few, &*all);
            few.push_first((0, Arc::clone(&counted[0])));
            all.insert(0, (0, Arc::clone(&counted[0])));
            prop_assert_eq!(&*few, &*all);
            drop((few, all));
            prop_assert!(counted.iter().all(|counted| Arc::strong_count(counted) == 1), "each was dropped once");
        }
    }
}
