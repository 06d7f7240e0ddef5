//! `Info`: what the requests of each name did.

use super::values::Quantiles;
use super::walk::{Before, class_of};
use super::{EVENTS_AT_ONCE, Values, Walk, named, rooms};
use crate::error::Error;
use crate::recording::{Event, Full, Pages, Recording, Room, What};
use crate::strategy::account::MAX_DEPTH;
use crate::tune::ended::Ended;
use std::collections::HashMap;
use std::sync::Arc;

/// What the requests of one name did.
#[derive(Debug, Default)]
pub(crate) struct Row {
    name: u32,
    pub(crate) requests: u64,
    /// How many had each handler, in the order in which these came.
    handlers: Vec<(u32, u64)>,
    peaks: Values,
    nanoseconds: Values,
    lifetimes: Values,
    /// Blocks by size.
    classes: Vec<(u8, u64)>,
    pub(crate) blocks: u64,
    pub(crate) total_bytes: u64,
    pub(crate) zeroed: u64,
    pub(crate) resizes: u64,
    pub(crate) moved: u64,
    /// By their limits, as `stats.refused` counts; a budget's where it was asked for.
    pub(crate) refused: u64,
    /// Where it was asked for, as metrics count.
    pub(crate) refused_allocations: u64,
    /// That ended, and whose peaks and sums have others' blocks too.
    pub(crate) with_others: u64,
    pub(crate) escaped: i64,
    pub(crate) escaped_bytes: u64,
    pub(crate) freed_elsewhere: u64,
}

impl Row {
    pub(crate) fn ended(&self) -> u64 {
        self.peaks.count
    }

    pub(crate) fn peak_bytes(&self) -> Option<Quantiles> {
        self.peaks.quantiles()
    }

    pub(crate) fn nanoseconds(&self) -> Option<Quantiles> {
        self.nanoseconds.quantiles()
    }

    pub(crate) fn lifetimes(&self) -> Option<Quantiles> {
        self.lifetimes.quantiles()
    }

    /// How many blocks were freed.
    #[cfg(ctxalloc_fuzz)]
    pub(crate) fn lifetimes_count(&self) -> u64 {
        self.lifetimes.count
    }

    /// How many blocks there are up to each power of two, the smallest first.
    pub(crate) fn classes(&self) -> &[(u8, u64)] {
        &self.classes
    }
}

/// Of each request: its row, and the request around it.
#[derive(Clone, Copy, Default)]
struct Its {
    row: u32,
    parent: u32,
}

/// Of a request that has not ended, or whose last step is not over.
struct Open {
    began_ns: u64,
    /// Its blocks and those of the requests inside of it, and until its end their bytes.
    alive: i64,
    alive_bytes: u64,
    /// When it ended, and the bytes of these that were alive then.
    ended: Option<(u64, u64)>,
}

/// What one takes in a map that has just grown.
const OPEN_BYTES: usize = 4 * (size_of::<(u64, Open)>() + 1);
/// What a handler takes in a row's list, and beside the first with its place in a map.
const HANDLER_BYTES: usize = 32;
const NEXT_HANDLER_BYTES: usize = 100;
const CLASS_BYTES: usize = 32;
/// What one that has ended takes until it is settled, with its thread.
const ENDED_BYTES: usize = 100;

/// What a recording says by name of request.
pub(crate) struct Info {
    recording: Arc<Recording>,
    walk: Walk,
    room: Room,
    rows: Vec<Row>,
    /// By name, and one more; 0: it has none.
    row_of: Vec<u32>,
    /// Where in a row's list a handler is, of those behind the first.
    handler_of: HashMap<(u32, u32), u32>,
    its: Pages<Its>,
    open: HashMap<u64, Open>,
    max_open: usize,
    ended: Ended,
    pub(crate) events: u64,
    first_ns: u64,
    last_ns: u64,
}

impl Info {
    pub(crate) fn new(recording: &Arc<Recording>) -> Self {
        let (mut room, blocks) = rooms(recording, 3);
        let row_of = vec![0; recording.names().len()];
        room.0 = room.0.saturating_sub(size_of_val(row_of.as_slice()));
        Self {
            recording: Arc::clone(recording),
            walk: Walk::new(recording, blocks),
            room,
            rows: Vec::new(),
            row_of,
            handler_of: HashMap::new(),
            its: Pages::default(),
            open: HashMap::new(),
            max_open: 0,
            ended: Ended::default(),
            events: 0,
            first_ns: 0,
            last_ns: 0,
        }
    }

    /// From the first event to the last one.
    pub(crate) fn span_ns(&self) -> u64 {
        self.last_ns - self.first_ns
    }

    /// By name, in the order in which these came first.
    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    pub(crate) fn name(&self, row: &Row) -> &str {
        named(&self.recording, row.name)
    }

    /// How many requests of a row had each handler.
    pub(crate) fn handlers<'a>(&'a self, row: &'a Row) -> impl Iterator<Item = (&'a str, u64)> {
        let name = |handler: u32| self.recording.handlers().get(handler as usize).map_or("?", String::as_str);
        row.handlers.iter().map(move |&(handler, count)| (name(handler), count))
    }

    /// Reads some events. False: that was all.
    ///
    /// # Errors
    /// Those of [`Recording::events`]. [`Error::BadRecording`]: it would take more memory than the files have bytes.
    pub(crate) fn read(&mut self) -> Result<bool, Error> {
        for _ in 0..EVENTS_AT_ONCE {
            let Some((event, before)) = self.walk.next()? else {
                self.ended.rest().for_each(|request| self.settle(request));
                return Ok(false);
            };
            if self.events == 0 {
                self.first_ns = event.at_ns;
            }
            (self.events, self.last_ns) = (self.events + 1, event.at_ns);
            self.add(&event, before).map_err(|full| self.walk.full(full))?;
        }
        Ok(true)
    }

    /// The step that ended this request is over: what is left of it has escaped.
    fn settle(&mut self, request: u64) {
        self.room.give(ENDED_BYTES);
        let Some(Open { alive, ended, .. }) = self.open.remove(&request) else { return };
        let Some(row) = self.rows.get_mut(self.its.get(request).row as usize) else { return };
        row.escaped += alive;
        row.escaped_bytes = row.escaped_bytes.saturating_add(ended.map_or(0, |(_, bytes)| bytes));
    }

    fn add(&mut self, event: &Event, before: Before) -> Result<(), Full> {
        self.ended.settled_by(event.thread, &event.what).into_iter().for_each(|request| self.settle(request));
        if let What::Begin { name, handler, parent } = event.what {
            return self.begin(event, name, handler, parent);
        }
        let at = self.its.get(event.request).row;
        let Some(row) = self.rows.get_mut(at as usize) else { return Ok(()) };
        match event.what {
            What::Begin { .. } => {}
            What::Allocate { bytes, zeroed, .. } => {
                row.blocks += 1;
                row.total_bytes = row.total_bytes.saturating_add(bytes);
                row.zeroed += u64::from(zeroed);
                let class = class_of(bytes);
                match row.classes.binary_search_by_key(&class, |&(class, _)| class) {
                    Ok(found) => row.classes[found].1 += 1,
                    Err(place) => {
                        self.room.take(CLASS_BYTES)?;
                        row.classes.reserve_exact(1);
                        row.classes.insert(place, (class, 1));
                    }
                }
                self.count(event.request, 1, (0, bytes), None)?;
            }
            What::Resize { bytes, moved, .. } => {
                row.resizes += 1;
                row.moved += u64::from(moved);
                row.total_bytes = row.total_bytes.saturating_add(bytes.saturating_sub(before.bytes));
                self.count(event.request, 0, (before.bytes, bytes), None)?;
            }
            What::Free { .. } => {
                row.freed_elsewhere += u64::from(before.thread != event.thread);
                row.lifetimes.push(event.at_ns.saturating_sub(before.at_ns), &mut self.room)?;
                self.count(event.request, -1, (before.bytes, 0), Some(before))?;
            }
            What::Refused { by, .. } => {
                row.refused_allocations += 1;
                let limited = if by == 0 { at } else { self.its.get(by).row };
                if let Some(row) = self.rows.get_mut(limited as usize) {
                    row.refused += 1;
                }
            }
            What::End { sums, .. } => {
                let open = self.open.get_mut(&event.request).filter(|open| open.ended.is_none());
                let Some(open) = open else { return Ok(()) };
                row.peaks.push(sums.peak_bytes, &mut self.room)?;
                row.nanoseconds.push(event.at_ns.saturating_sub(open.began_ns), &mut self.room)?;
                row.with_others += u64::from(sums.includes_others);
                let live_bytes = if sums.includes_others { open.alive_bytes } else { sums.live_bytes };
                open.ended = Some((event.at_ns, live_bytes));
                self.room.take(ENDED_BYTES)?;
                self.ended.push(event.thread, event.request);
            }
        }
        Ok(())
    }

    fn begin(&mut self, event: &Event, name: u32, handler: u32, parent: u64) -> Result<(), Full> {
        let Some(at) = self.row_of.get_mut(name as usize) else { return Ok(()) };
        if *at == 0 {
            self.room.push(&mut self.rows, Row { name, ..Row::default() })?;
            *at = self.rows.len() as u32;
        }
        let at = *at - 1;
        let row = &mut self.rows[at as usize];
        row.requests += 1;
        match row.handlers.first_mut() {
            None => {
                self.room.take(HANDLER_BYTES)?;
                row.handlers.reserve_exact(1);
                row.handlers.push((handler, 1));
            }
            Some((first, count)) if *first == handler => *count += 1,
            _ => match self.handler_of.get(&(at, handler)) {
                Some(&place) => row.handlers[place as usize].1 += 1,
                None => {
                    self.room.take(NEXT_HANDLER_BYTES)?;
                    self.handler_of.insert((at, handler), row.handlers.len() as u32);
                    row.handlers.push((handler, 1));
                }
            },
        }
        let parent = u32::try_from(parent).unwrap_or(0);
        self.its.set(event.request, Its { row: at, parent }, &mut self.room)?;
        if self.open.len() == self.max_open {
            self.room.take(OPEN_BYTES)?;
            self.max_open += 1;
        }
        self.open.insert(event.request, Open { began_ns: event.at_ns, alive: 0, alive_bytes: 0, ended: None });
        Ok(())
    }

    /// Counts blocks in a request and in those around it, whose bytes they are too: so many less, and so many more.
    fn count(
        &mut self,
        request: u64,
        blocks: i64,
        (less, more): (u64, u64),
        freed: Option<Before>,
    ) -> Result<(), Full> {
        let mut next = request;
        for _ in 0..=MAX_DEPTH {
            if next == 0 {
                return Ok(());
            }
            match self.open.get_mut(&next) {
                Some(Open { alive, alive_bytes, ended: None, .. }) => {
                    (*alive, *alive_bytes) = (*alive + blocks, alive_bytes.saturating_add(more).saturating_sub(less));
                }
                // What was made after the end is in no number.
                Some(Open { alive, ended: Some((end_ns, bytes)), .. }) => {
                    if let Some(block) = freed.filter(|block| block.at_ns <= *end_ns) {
                        (*alive, *bytes) = (*alive + blocks, bytes.saturating_sub(block.bytes));
                    }
                }
                None => {}
            }
            next = u64::from(self.its.get(next).parent);
        }
        Err(Full("its requests are nested deeper than those of any program"))
    }
}
