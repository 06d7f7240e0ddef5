//! Guard's reports, written to a buffer of fixed size: they are also written in signal handlers, which must not
//! allocate or wait for a lock.

use super::record::{Damage, Record, Side, Thread};
use std::fmt::{self, Display, Write};

/// What went wrong.
#[derive(Debug)]
pub(super) enum Finding<'a> {
    /// An access to an unreadable page of a Guard.
    #[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
    Fault { access: &'static str, address: usize, record: &'a Record },
    /// A faulting address that could not be looked up, because the records were locked.
    #[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
    Unknown { address: usize },
    /// Bytes around a block were overwritten.
    Damaged { damage: Damage, record: &'a Record },
    /// A freed block was freed or resized again.
    Freed { operation: &'static str, record: &'a Record },
    /// A block of another Guard.
    Elsewhere { operation: &'static str, record: &'a Record },
    /// An address inside of a block, or near one, at which none starts.
    Inside { operation: &'static str, address: usize, record: &'a Record },
    /// An address that belongs to no Guard.
    Foreign { operation: &'static str, address: usize },
}

impl Display for Finding<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Fault { access, address, record } => {
                write!(f, "{access} {} {}, at {address:#x}", Place::of(address, record), Block(record))
            }
            Self::Unknown { address } => {
                write!(f, "fault at {address:#x}; the records were busy, so whose memory it is cannot be said")
            }
            Self::Damaged { damage: Damage { side, nearest, farthest }, record } => {
                let side = match side {
                    Side::Before => "before the start",
                    Side::Behind => "past the end",
                };
                write!(
                    f,
                    "overwritten: from {nearest} to {farthest} bytes {side} of {}, seen when freed",
                    Block(record)
                )
            }
            Self::Freed { operation: "free", record } => write!(f, "double free of {}", Block(record)),
            Self::Freed { operation, record } => write!(f, "{operation} of {}", Block(record)),
            Self::Elsewhere { operation, record } => {
                write!(f, "{operation} of {}, which another Guard made", Block(record))
            }
            Self::Inside { operation, address, record } => {
                write!(f, "{operation} of {address:#x}, which is {} {}", Place::of(address, record), Block(record))
            }
            Self::Foreign { operation, address } => {
                write!(f, "{operation} of {address:#x}, which is in no block of a Guard")
            }
        }
    }
}

impl<'a> Finding<'a> {
    fn record(&self) -> Option<&'a Record> {
        match *self {
            Self::Fault { record, .. }
            | Self::Damaged { record, .. }
            | Self::Freed { record, .. }
            | Self::Elsewhere { record, .. }
            | Self::Inside { record, .. } => Some(record),
            Self::Unknown { .. } | Self::Foreign { .. } => None,
        }
    }

    /// Writes the whole report, of several lines.
    pub(super) fn write_to(&self, by: Thread, text: &mut Text) {
        // A Text takes what fits and never fails.
        let _ = writeln!(text, "ctxalloc Guard: {self}, by {by}");
        if let Some(record) = self.record() {
            let _ = writeln!(text, "ctxalloc Guard:   allocated by {}", record.made_by);
            if let Some(thread) = record.freed_by {
                let _ = writeln!(text, "ctxalloc Guard:   freed by {thread}");
            }
            let _ = writeln!(text, "ctxalloc Guard:   under {}", record.owner.text);
        }
    }
}

/// Where an address lies relative to a block.
enum Place {
    Before(usize),
    At(usize),
    Behind(usize),
}

impl Place {
    fn of(address: usize, record: &Record) -> Self {
        let start = record.start.addr().get();
        match address.checked_sub(start) {
            None => Self::Before(start - address),
            Some(offset) if offset < record.size_bytes => Self::At(offset),
            Some(offset) => Self::Behind(offset - record.size_bytes + 1),
        }
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (distance, direction) = match *self {
            Self::At(offset) => return write!(f, "at offset {offset} of"),
            Self::Before(distance) => (distance, "before the start"),
            Self::Behind(distance) => (distance, "past the end"),
        };
        write!(f, "{distance} {} {direction} of", if distance == 1 { "byte" } else { "bytes" })
    }
}

struct Block<'a>(&'a Record);

impl Display for Block<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Record { start, size_bytes, freed_by, .. }) = self;
        let state = if freed_by.is_some() { "freed" } else { "live" };
        write!(f, "a {state} block of {size_bytes} bytes at {:#x}", start.addr())
    }
}

impl Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread {} '", self.id)?;
        let name = self.name.split(|&byte| byte == 0).next().unwrap_or_default();
        for chunk in name.utf8_chunks() {
            f.write_str(chunk.valid())?;
        }
        f.write_str("'")
    }
}

/// A text of at most 1024 bytes; more is cut off.
pub(super) struct Text {
    bytes: [u8; 1024],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.length..];
        let fits = (0..=room.len().min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        room[..fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.length += fits;
        Ok(())
    }
}

impl Text {
    pub(super) const fn new() -> Self {
        Self { bytes: [0; 1024], length: 0 }
    }

    #[cfg_attr(windows, allow(dead_code, reason = "for signal handlers"))]
    pub(super) fn clear(&mut self) {
        self.length = 0;
    }

    pub(super) fn as_str(&self) -> &str {
        // `write_str` stores whole characters only.
        std::str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }

    /// Writes it to standard error, without buffers or locks.
    pub(super) fn print(&self) {
        let mut rest = &self.bytes[..self.length];
        while !rest.is_empty() {
            match crate::os::print_error(rest) {
                Some(written) if written > 0 => rest = &rest[written.min(rest.len())..],
                _ => return,
            }
        }
    }
}
