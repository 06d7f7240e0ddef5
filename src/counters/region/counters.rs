//! What is counted in one series, by the one process that writes it.

use super::sequence::{RELAXED, add, write};
use super::{Buckets, Counters, HISTOGRAMS, MAX_NAME, PARTS, Sample, ZERO};
use std::sync::atomic::AtomicU16;

impl Counters {
    pub(super) const fn empty() -> Self {
        Self {
            version: ZERO,
            name_bytes: ZERO,
            name: [const { ZERO }; MAX_NAME / 8],
            requests: ZERO,
            refused_requests: ZERO,
            refused_allocations: ZERO,
            escaped_requests: ZERO,
            escaped_blocks: ZERO,
            escaped_bytes: ZERO,
            max_peak_bytes: ZERO,
            whole_requests: ZERO,
            whole_bytes: [const { ZERO }; 3],
            timed_out: ZERO,
            turned_away: ZERO,
            histograms: [const { Buckets::empty() }; HISTOGRAMS],
        }
    }

    pub(super) fn clear(&self) {
        let numbers = [
            &self.name_bytes,
            &self.requests,
            &self.refused_requests,
            &self.refused_allocations,
            &self.escaped_requests,
            &self.escaped_blocks,
            &self.escaped_bytes,
            &self.max_peak_bytes,
            &self.whole_requests,
            &self.timed_out,
            &self.turned_away,
        ];
        write(&self.version, || {
            numbers.into_iter().chain(&self.whole_bytes).for_each(|number| number.store(0, RELAXED));
            self.histograms.iter().for_each(Buckets::clear);
        });
    }

    pub(in crate::counters) fn set_name(&self, name: &[u8]) {
        debug_assert!(name.len() <= MAX_NAME);
        write(&self.version, || {
            for (word, bytes) in self.name.iter().zip(name.chunks(8)) {
                let mut padded = [0; 8];
                padded[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(padded), RELAXED);
            }
            self.name_bytes.store(name.len() as u64, RELAXED);
        });
    }

    pub(in crate::counters) fn is_named(&self, name: &[u8]) -> bool {
        self.name_bytes.load(RELAXED) == name.len() as u64
            && self
                .name
                .iter()
                .zip(name.chunks(8))
                .all(|(word, bytes)| word.load(RELAXED).to_le_bytes().starts_with(bytes))
    }

    /// The name and its length, which is 0 where there is none.
    pub(super) fn name(&self) -> ([u8; MAX_NAME], usize) {
        let mut name = [0; MAX_NAME];
        name.chunks_mut(8).zip(&self.name).for_each(|(to, word)| to.copy_from_slice(&word.load(RELAXED).to_le_bytes()));
        (name, (self.name_bytes.load(RELAXED) as usize).min(MAX_NAME))
    }

    /// Calls `work` with the name, if there is one.
    pub(in crate::counters) fn with_name<R>(&self, work: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (name, length) = self.name();
        (length > 0).then(|| work(&name[..length]))
    }

    /// All but the histograms.
    #[inline]
    pub(super) fn add(&self, sample: &Sample) {
        add(&self.requests, 1);
        if sample.peak_bytes > self.max_peak_bytes.load(RELAXED) {
            self.max_peak_bytes.store(sample.peak_bytes, RELAXED);
        }
        if sample.refused > 0 {
            add(&self.refused_requests, 1);
            add(&self.refused_allocations, sample.refused);
        }
        if let Some(parts) = sample.whole {
            add(&self.whole_requests, 1);
            self.whole_bytes.iter().zip(parts).for_each(|(sum, part)| add(sum, part));
        }
        if sample.escaped_blocks > 0 {
            self.add_escapes(sample.escaped_blocks, sample.escaped_bytes);
        }
    }

    pub(super) fn add_escapes(&self, blocks: u64, bytes: u64) {
        add(&self.escaped_requests, 1);
        add(&self.escaped_blocks, blocks);
        add(&self.escaped_bytes, bytes);
    }
}

impl Buckets {
    pub(super) const fn empty() -> Self {
        Self { sum: ZERO, beyond: ZERO, parts: [const { AtomicU16::new(0) }; PARTS] }
    }

    pub(super) fn clear(&self) {
        self.sum.store(0, RELAXED);
        self.beyond.store(0, RELAXED);
        self.parts.iter().for_each(|part| part.store(0, RELAXED));
    }
}
