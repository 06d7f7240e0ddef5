//! Recordings: what requests asked of memory, and when, to be replayed and to take advice from. A leaf: imports no
//! layer.
//!
//! `event.rs` is the data; a recording is the events of all processes and threads in the order of time. The format of
//! the files is in docs/tune.md.

mod event;

pub use event::{Event, Sums, What};

/// What was recorded, in memory: at most some hundred bytes for each event.
#[derive(Debug, Clone, Default)]
pub struct Recording {
    names: Vec<String>,
    handlers: Vec<String>,
    events: Vec<Event>,
    is_cut_off: bool,
}

impl Recording {
    /// A recording of these events, which are sorted by time: for tests, and for loads that nobody recorded. Its
    /// requests were made with `default`, the handler of number 0.
    #[must_use]
    pub fn from_events(names: Vec<String>, mut events: Vec<Event>) -> Self {
        events.sort_by_key(|event| event.at_ns);
        Self { names, handlers: vec!["default".to_owned()], events, is_cut_off: false }
    }

    /// The names of requests, routes for example, that [`What::Begin`] refers to.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The names of handlers that [`What::Begin`] refers to.
    #[must_use]
    pub fn handlers(&self) -> &[String] {
        &self.handlers
    }

    /// All events, the oldest first; those of one request are in the order in which they happened.
    pub fn events(&self) -> impl Iterator<Item = &Event> + '_ {
        self.events.iter()
    }

    /// Whether a file ends in the middle of something: its process was killed, or the disk was full.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off
    }
}
