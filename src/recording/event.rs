//! What a recording consists of: events of requests, each with its time, its thread and its request.

/// Something that happened in a recorded request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// When: nanoseconds since the recording began, by a clock that only goes forward.
    pub at_ns: u64,
    /// On which thread, numbered within the recording.
    pub thread: u32,
    /// In which request, numbered within the recording from 1 on. Of a [`Free`](What::Free) the request whose the block
    /// is, whatever the thread that frees it works for.
    pub request: u64,
    /// What happened.
    pub what: What,
}

impl Event {
    /// An event, for recordings that are made by hand.
    #[must_use]
    pub fn new(at_ns: u64, thread: u32, request: u64, what: What) -> Self {
        Self { at_ns, thread, request, what }
    }
}

/// What a body of a file tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Told {
    Event(Event),
    /// A thread that had events has ended; it may free blocks even then.
    ThreadEnd {
        at_ns: u64,
        thread: u32,
    },
}

impl Told {
    /// When, and on which thread.
    pub(super) fn at(&self) -> (u64, u32) {
        match *self {
            Self::Event(Event { at_ns, thread, .. }) | Self::ThreadEnd { at_ns, thread } => (at_ns, thread),
        }
    }
}

/// What may happen in a recorded request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// The request begins.
    Begin {
        /// Its name: an index into [`Recording::names`](super::Recording::names).
        name: u32,
        /// The handler or strategy that its blocks come from: an index into
        /// [`Recording::handlers`](super::Recording::handlers).
        handler: u32,
        /// The recorded request that it is inside of, whose account it is charged to besides; 0 where there is none.
        parent: u64,
    },
    /// A block is made.
    Allocate {
        /// Its number, which no other block of the recording has.
        block: u64,
        /// How many bytes were asked for.
        bytes: u64,
        /// The alignment that its handler promises, in bytes; 0 for bytes that its handler did not make: memory of a
        /// device, of another library (a charge), or what a whole request counts beside arrays.
        align: u32,
        /// Whether its bytes were to be zero.
        zeroed: bool,
    },
    /// A block gets another size; it keeps its number.
    Resize {
        /// Its number.
        block: u64,
        /// Its size from now on.
        bytes: u64,
        /// Whether it has another address now.
        moved: bool,
    },
    /// A block is given back; after the end of its request, if it escaped, and on any thread.
    Free {
        /// Its number.
        block: u64,
    },
    /// The request was refused memory.
    Refused {
        /// How many bytes were asked for.
        bytes: u64,
        /// The request whose limit refused: itself, or a recorded one around it. 0: a budget's limit, or its own end.
        by: u64,
    },
    /// The request ends.
    End {
        /// What its own account says.
        sums: Sums,
        /// How many page faults the whole process had from its beginning on: the program had no more for it. `None`:
        /// the system does not say, or an older version recorded it.
        page_faults: Option<u64>,
        /// What the whole process spent on processors from its beginning on, in the program and in the kernel, in
        /// nanoseconds: the request did not need more. `None`: as for page faults.
        processor_ns: Option<u64>,
    },
}

/// What a request's account says at its end, with that of the requests inside of it: the sums of its events are these,
/// unless it [includes others](Self::includes_others).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sums {
    /// The most bytes that were alive at one time.
    pub peak_bytes: u64,
    /// How many bytes were asked for altogether: each block's size, and what it grew by.
    pub total_bytes: u64,
    /// How many blocks were made.
    pub blocks: u64,
    /// How many bytes are alive at the end: they escaped.
    pub live_bytes: u64,
    /// How often it asked for memory and was refused, whosever limit that was: as metrics count it, and not as `stats`.
    pub refused: u64,
    /// Whether it may have been charged for more than the recording has of it and of those inside of it: for a request
    /// whose budget it was, or for what was charged to its budget by itself.
    pub includes_others: bool,
}
