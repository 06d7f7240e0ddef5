//! What is compared: two entries a step, each an outcome and the current handler, and the handlers' numbers.

use ctxalloc::strategy::System;
use ctxalloc::{Handler, current, default_handler, handler, register};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// The handlers that programs choose from, by number.
static HANDLERS: LazyLock<Vec<Handler>> = LazyLock::new(|| {
    let mut handlers = vec![default_handler()];
    for number in 1..5 {
        let name = format!("oracle{number}");
        handlers.push(handler(&name).unwrap_or_else(|| register(&name, System).expect("a new name")));
    }
    handlers
});

/// The handler with that number.
pub(crate) fn numbered(number: i64) -> Handler {
    HANDLERS[usize::try_from(number).expect("programs have no other handlers")]
}

/// What `set` takes: 0 is said as "none", which means the default.
pub(crate) fn wanted(number: i64) -> Option<Handler> {
    (number != 0).then(|| numbered(number))
}

/// The outcomes of steps, one letter each, as README.md lists them.
pub(crate) mod outcome {
    pub(crate) const OK: u8 = b'k';
    pub(crate) const USED: u8 = b'u';
    pub(crate) const FOREIGN: u8 = b'f';
    pub(crate) const NOTHING_THERE: u8 = b'n';
    pub(crate) const RAISED: u8 = b'p';
    pub(crate) const CANCELLED: u8 = b'c';
    pub(crate) const ENDED: u8 = b'e';
    pub(crate) const DROPPED: u8 = b'd';
    pub(crate) const FIRST: u8 = b'a';
    pub(crate) const SECOND: u8 = b'b';
    /// Something that no program does: a fault of the interpreter or of ctxalloc.
    pub(crate) const STRANGE: u8 = b'X';
}

/// The trace of one run. Written by all its threads, an entry by one of them.
pub(crate) struct Trace(Vec<AtomicU16>);

impl Trace {
    pub(crate) fn new(nodes: usize) -> Self {
        Self((0..2 * nodes).map(|_| AtomicU16::new(0)).collect())
    }

    /// A step's body begins.
    pub(crate) fn begin(&self, node: usize, outcome: u8, seen: Handler) {
        self.record(2 * node, outcome, seen);
    }

    /// A step ended.
    pub(crate) fn end(&self, node: usize, outcome: u8, seen: Handler) {
        self.record(2 * node + 1, outcome, seen);
    }

    fn record(&self, entry: usize, outcome: u8, seen: Handler) {
        let number = HANDLERS.iter().position(|&known| known == seen).map_or(b'9', |number| b'0' + number as u8);
        // Relaxed: whoever reads the trace has waited for the line that wrote it, under a mutex.
        let before = self.0[entry].swap(u16::from_be_bytes([outcome, number]), Ordering::Relaxed);
        if before != 0 {
            self.0[entry].store(u16::from_be_bytes(*b"!!"), Ordering::Relaxed); // a step that ran twice
        }
    }

    /// Two characters an entry.
    pub(crate) fn text(&self) -> String {
        let entries = self.0.iter().map(|entry| match entry.load(Ordering::Relaxed) {
            0 => *b"--",
            written => written.to_be_bytes(),
        });
        entries.flatten().map(char::from).collect()
    }
}

/// The running context's handler.
pub(crate) fn seen() -> Handler {
    current()
}
