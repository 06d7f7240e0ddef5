//! `Walk`: the events of a recording, and with each that changes a block what that was before. Of the blocks it keeps
//! only so many: where more are alive it looks ahead which are needed next, and goes back for these.

use crate::error::Error;
use crate::recording::{Event, Full, Reading, Recording, What};
use std::collections::HashMap;
use std::sync::Arc;

/// A block before the event that changes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Before {
    pub(super) bytes: u64,
    /// When it was made.
    pub(super) at_ns: u64,
    /// Which allocation or resize gave it its size, from 1 on; 0: that is not known yet.
    pub(super) made: u64,
    /// That made it.
    pub(super) thread: u32,
    /// [`class_of`] the bytes that it was made with.
    pub(super) class: u8,
}

/// What a block takes in a map, for each place of that. Seven eighths of them may be full, and half of these are: a map
/// that blocks come to and go from would grow otherwise.
const BLOCK_BYTES: usize = size_of::<(u64, Before)>() + 1;

/// What a walk takes that keeps so many blocks: its map has room for a power of two.
pub(super) fn bytes_for(blocks: u64) -> usize {
    let buckets = usize::try_from(blocks).unwrap_or(usize::MAX).min(usize::MAX / 64) / 7 * 16 + 32;
    buckets.next_power_of_two().saturating_mul(BLOCK_BYTES)
}

/// The power of two up to which a block is, as a logarithm.
pub(super) fn class_of(bytes: u64) -> u8 {
    (u64::BITS - bytes.saturating_sub(1).leading_zeros()) as u8
}

pub(super) struct Walk {
    recording: Arc<Recording>,
    reading: Reading,
    /// How many events, and how many allocations and resizes, are behind us.
    seen: u64,
    made: u64,
    known: HashMap<u64, Before>,
    /// How many it may have: its memory is there from the beginning.
    capacity: usize,
    /// What is made is not kept any more unless it is known to be needed.
    is_full: bool,
}

impl Walk {
    /// Keeps what fits into so many bytes.
    pub(super) fn new(recording: &Arc<Recording>, bytes: usize) -> Self {
        let buckets = bytes / BLOCK_BYTES;
        let buckets = if buckets.is_power_of_two() { buckets } else { buckets.next_power_of_two() / 2 };
        Self::keeping(recording, (buckets / 16 * 7).max(1))
    }

    pub(super) fn keeping(recording: &Arc<Recording>, capacity: usize) -> Self {
        let known = HashMap::with_capacity(2 * capacity);
        Self {
            recording: Arc::clone(recording),
            reading: Reading::default(),
            seen: 0,
            made: 0,
            known,
            capacity,
            is_full: false,
        }
    }

    /// Begins anew.
    pub(super) fn again(&mut self) {
        self.known.clear();
        (self.reading, self.seen, self.made, self.is_full) = (Reading::default(), 0, 0, false);
    }

    /// What would take too much memory at the event that was read last.
    #[cold]
    pub(super) fn full(&self, Full(reason): Full) -> Error {
        let place = self.recording.place_of(&self.reading);
        let (file, offset) = place.map_or_else(Default::default, |(file, offset)| (file.display().to_string(), offset));
        Error::BadRecording { file, offset, reason }
    }

    /// The next event, and the block that it resizes or frees.
    ///
    /// # Errors
    /// Those of [`Recording::events`].
    pub(super) fn next(&mut self) -> Result<Option<(Event, Before)>, Error> {
        let Some(event) = self.recording.next_event(&mut self.reading)? else { return Ok(None) };
        self.seen += 1;
        if let What::Resize { block, .. } | What::Free { block } = event.what
            && self.known.get(&block).is_none_or(|before| before.made == 0)
        {
            self.go_back_for(block)?;
        }
        let before = self.note(&event);
        Ok(Some((event, before)))
    }

    /// What the event does to the blocks that are known.
    fn note(&mut self, event: &Event) -> Before {
        match event.what {
            What::Allocate { block, bytes, .. } => {
                self.made += 1;
                let made =
                    Before { bytes, at_ns: event.at_ns, made: self.made, thread: event.thread, class: class_of(bytes) };
                if let Some(known) = self.known.get_mut(&block) {
                    *known = made;
                } else if !self.is_full && self.known.len() < self.capacity {
                    self.known.insert(block, made);
                } else {
                    self.is_full = true;
                }
                Before::default()
            }
            What::Resize { block, bytes, .. } => {
                self.made += 1;
                let Some(known) = self.known.get_mut(&block) else { return Before::default() };
                let before = *known;
                (known.bytes, known.made) = (bytes, self.made);
                before
            }
            What::Free { block } => self.known.remove(&block).unwrap_or_default(),
            _ => Before::default(),
        }
    }

    /// Finds this block, and those that are resized or freed next, as they were before the event that was read last.
    #[cold]
    fn go_back_for(&mut self, block: u64) -> Result<(), Error> {
        let (seen, made) = (self.seen, self.made);
        self.known.clear();
        self.known.insert(block, Before::default());
        self.is_full = true;
        while self.known.len() < self.capacity
            && let Some(event) = self.recording.next_event(&mut self.reading)?
        {
            if let What::Resize { block, .. } | What::Free { block } = event.what {
                self.known.entry(block).or_default();
            }
        }
        (self.reading, self.seen, self.made) = (Reading::default(), 0, 0);
        while self.seen + 1 < seen {
            let Some(event) = self.recording.next_event(&mut self.reading)? else { break };
            self.seen += 1;
            // One that is freed here is needed no more, nor is there another one of its number.
            self.note(&event);
        }
        // The one that was read last, which is told now.
        self.recording.next_event(&mut self.reading)?;
        (self.seen, self.made) = (seen, made);
        Ok(())
    }
}
