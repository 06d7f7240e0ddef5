//! `Run`: what one process recorded, as its frames come.

use super::encoded::{Process, read_events};
use super::event::{Event, What};
use std::collections::{BTreeMap, HashMap, HashSet};

/// What one process recorded, in its own numbers.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// `None`: what it said of itself cannot be read.
    pub(super) process: Option<Process>,
    pub(super) names: BTreeMap<u64, u32>,
    pub(super) handlers: BTreeMap<u64, u32>,
    /// The number that was given last, and those of all that have none of their own.
    pub(super) last_name: Option<u64>,
    pub(super) other_name: Option<u64>,
    pub(super) other_handler: Option<u64>,
    pub(super) events: Vec<Event>,
    pub(super) is_closed: bool,
    /// Requests that ended behind a gap that they had begun before: events of theirs may be missing.
    pub(super) torn: HashSet<u64>,
    /// When each request began, and behind how many gaps.
    begun: HashMap<u64, (u64, u32)>,
    gaps: u32,
}

impl Run {
    pub(super) fn new(process: Option<Process>) -> Self {
        Self { process, ..Self::default() }
    }

    /// What its requests have before the next event that can be read.
    pub(super) fn note_gap(&mut self) {
        self.gaps = self.gaps.saturating_add(1);
    }

    /// Adds the events of a body, all or none. False: something else is there.
    pub(super) fn add(&mut self, body: &[u8]) -> bool {
        let Self { events, torn, begun, gaps, .. } = self;
        let before = events.len();
        let are_events = read_events(body, |event| {
            match event.what {
                What::Begin { .. } => {
                    begun.entry(event.request).or_insert((event.at_ns, *gaps));
                }
                What::End { .. } if begun.get(&event.request).is_some_and(|&(_, behind)| behind != *gaps) => {
                    torn.insert(event.request);
                }
                _ => {}
            }
            events.push(event);
        });
        if !are_events {
            events.truncate(before);
        }
        are_events
    }

    /// Whether a body has a request with the number of another one of this process: so it is another process's.
    pub(super) fn is_anothers(&self, body: &[u8]) -> bool {
        let mut is_anothers = false;
        read_events(body, |event| {
            if let What::Begin { .. } = event.what {
                is_anothers |= self.begun.get(&event.request).is_some_and(|&(at_ns, _)| at_ns != event.at_ns);
            }
        });
        is_anothers
    }
}
