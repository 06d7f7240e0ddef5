//! `Run`: what one process recorded, as its frames come.

use super::encoded::{Process, Used, read_events};
use super::event::{Told, What};
use super::pages::Pages;
use super::room::{Full, Room};
use super::texts::NumberedNames;

/// What one process recorded, in its own numbers.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The place of what its file has of it first.
    pub(super) at: u64,
    /// `None`: what it said of itself cannot be read.
    pub(super) process: Option<Process>,
    pub(super) names: NumberedNames,
    pub(super) handlers: NumberedNames,
    /// The number that was given last, and those of all that have none of their own.
    pub(super) last_name: Option<u64>,
    pub(super) other_name: Option<u64>,
    pub(super) other_handler: Option<u64>,
    pub(super) is_closed: bool,
    /// What it had used at first and at last. Its files come in any order. Apart: most processes of a file that was
    /// made to be large say nothing.
    used: Option<Box<(Used, Used)>>,
    /// The highest number that it gave to a request, if it says so.
    pub(super) highest_told: u64,
    pub(super) highest: Highest,
    /// Behind how many gaps its frames are now.
    pub(super) gaps: u32,
    /// When each request began, and one more: kept from the first gap on.
    pub(super) begun: Option<Pages<u64>>,
}

/// What is noted of what a process has used, with what an allocator adds.
const USED_BYTES: usize = size_of::<(Used, Used)>() + 16;

/// The highest numbers, and the last time.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Highest {
    pub(super) request: u64,
    pub(super) block: u64,
    pub(super) thread: u32,
    pub(super) at_ns: u64,
}

/// A body that has events and nothing else.
pub(super) struct Sound {
    highest: Highest,
    pub(super) first_ns: Option<u64>,
    pub(super) events: usize,
}

/// What a body has. `None`: something that is no event.
pub(super) fn sound(body: &[u8]) -> Option<Sound> {
    let mut found = Sound { highest: Highest::default(), first_ns: None, events: 0 };
    let Sound { highest, first_ns, events } = &mut found;
    let are_events = read_events(body, |told| {
        let (at_ns, thread) = told.at();
        first_ns.get_or_insert(at_ns);
        (highest.at_ns, highest.thread) = (at_ns, highest.thread.max(thread));
        let Told::Event(event) = told else { return };
        *events += 1;
        highest.request = highest.request.max(event.request);
        if let What::Allocate { block, .. } | What::Resize { block, .. } | What::Free { block } = event.what {
            highest.block = highest.block.max(block);
        }
    });
    are_events.then_some(found)
}

impl Run {
    pub(super) fn new(at: u64, process: Option<Process>) -> Self {
        Self { at, process, ..Self::default() }
    }

    /// Notes that something follows which cannot be read. True: it is its first gap, and all that is before it is to be
    /// told to [`note_begun`](Self::note_begun).
    pub(super) fn note_gap(&mut self) -> bool {
        self.gaps = self.gaps.saturating_add(1).min(u32::MAX >> 2);
        let is_first = self.begun.is_none();
        self.begun.get_or_insert_default();
        is_first
    }

    /// What its requests have before the next event that can be read.
    pub(super) fn note_begun(&mut self, told: &Told, room: &mut Room) -> Result<(), Full> {
        match (&mut self.begun, begins(told)) {
            (Some(begun), Some((request, at_ns))) if begun.get(request) == 0 => {
                begun.set(request, at_ns.saturating_add(1), room)
            }
            _ => Ok(()),
        }
    }

    /// What it has used at some time.
    pub(super) fn note_used(&mut self, now: Used, room: &mut Room) -> Result<(), Full> {
        if self.used.is_none() {
            room.take(USED_BYTES)?;
        }
        self.highest_told = self.highest_told.max(now.highest);
        let (first, last) = &mut **self.used.get_or_insert_with(|| Box::new((now, now)));
        if now.processor_ns < first.processor_ns {
            *first = now;
        }
        if now.processor_ns >= last.processor_ns {
            *last = now;
        }
        Ok(())
    }

    /// What of its processor time falls to the requests that it recorded: nothing, if those are none. `None`: it does
    /// not say.
    pub(super) fn processor_ns(&self) -> Option<u64> {
        let before = self.process.as_ref().and_then(|process| process.requests_before).unwrap_or(0);
        match self.used.as_deref() {
            Some(_) if self.highest.request <= before => Some(0),
            used => used.and_then(|(first, last)| last.for_chosen_since(first)),
        }
    }

    /// Adds a body.
    pub(super) fn add(&mut self, body: &[u8], found: &Sound, room: &mut Room) -> Result<(), Full> {
        let (all, new) = (&mut self.highest, &found.highest);
        all.request = all.request.max(new.request);
        all.block = all.block.max(new.block);
        all.thread = all.thread.max(new.thread);
        all.at_ns = all.at_ns.max(new.at_ns);
        let mut done = Ok(());
        if self.begun.is_some() {
            read_events(body, |told| done = done.and_then(|()| self.note_begun(&told, room)));
        }
        done
    }

    /// Whether a body has a request with the number of another one of this process: so it is another process's.
    pub(super) fn is_anothers(&self, body: &[u8]) -> bool {
        let Some(begun) = &self.begun else { return false };
        let mut is_anothers = false;
        read_events(body, |told| {
            if let Some((request, at_ns)) = begins(&told) {
                is_anothers |= ![0, at_ns.saturating_add(1)].contains(&begun.get(request));
            }
        });
        is_anothers
    }
}

fn begins(told: &Told) -> Option<(u64, u64)> {
    match told {
        Told::Event(event) if matches!(event.what, What::Begin { .. }) => Some((event.request, event.at_ns)),
        _ => None,
    }
}
