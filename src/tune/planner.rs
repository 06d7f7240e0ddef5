//! `Planner`: finds what each thread of a recording does, and which steps of other threads it waits for first.
//!
//! What is kept of the recorded order, and nothing else:
//! - each thread's own order, and that a thread begins after those that had ended before it (`lives.rs`);
//! - the order of all beginnings and ends of requests, so that they overlap as they did;
//! - large blocks that are freed after others were made, and made after others were freed: as much is alive at one time
//!   as was (`phases.rs`);
//! - the order within an outermost request, requests inside of it included: its account's peak depends on it;
//! - a resize or free after what the block was used for before.
//!
//! All of these point backward in the recording, so nobody waits for ever.

use super::lives::Lives;
use super::model::Account;
use super::phases::{Last, Phases};
use super::plan::{Facts, Plan, Planned, ReadFrom, plainly};
use super::steps::{Act, Lane, Step, Wait};
use super::summary::EVENTS_AT_ONCE;
use crate::error::Error;
use crate::recording::{Event, MAIN, Reading, Recording, Sums, What};
use crate::strategy::account::MAX_DEPTH;
use std::collections::{HashMap, HashSet};

/// The most threads of a replay at one time.
const MAX_THREADS: usize = 1024;

fn contradicts(what: String) -> Error {
    Error::Replay { what: format!("the recording contradicts itself: {what}"), advice: "record anew" }
}

/// From so many bytes on a block is large: much of the resident memory, and so in the order of `phases.rs`.
const LARGE_BYTES: u64 = 64 << 10;

struct OpenRequest {
    index: u32,
    /// How many are around it.
    depth: usize,
    /// The outermost request around it, by its number in `roots`.
    root: usize,
    account: Account,
    /// The thread that made its first block; `None` before, and `Some(None)` once there are several.
    maker: Option<Option<u32>>,
    has_inner: bool,
    parent: Option<u64>,
    has_ended: bool,
}

struct LiveBlock {
    index: u32,
    request: u64,
    bytes: u64,
    thread: u32,
    last: Last,
    /// And not only charged.
    is_made: bool,
}

/// A plan as it is made.
pub(crate) struct Planner<'a> {
    recording: &'a Recording,
    reading: Reading,
    route: Option<&'a str>,
    on_one_thread: bool,
    lanes: Vec<Lane>,
    lane_of: HashMap<u32, u32>,
    lives: Lives,
    /// How far each lane knows others to be.
    known: Vec<HashMap<u32, u64>>,
    requests: HashMap<u64, OpenRequest>,
    planned: Vec<Planned>,
    /// Requests of other routes.
    others: HashSet<u64>,
    /// The last step of each outermost request.
    roots: Vec<Option<Last>>,
    blocks: HashMap<u64, LiveBlock>,
    made: u32,
    /// The last beginning or end.
    turn: Option<Last>,
    phases: Phases,
    live_bytes: u64,
    facts: Facts,
}

impl Plan {
    /// The requests of a recording: all, or those of the name `route` with what is inside of them: outermost ones, or
    /// where a program was recorded, those directly inside of that. With `on_one_thread`
    /// all steps are on one thread in the order of the recording: it is the same at each replay, and shows nothing of
    /// what threads cost each other.
    ///
    /// # Errors
    /// [`Error::Replay`] where the recording contradicts itself, or has more than 1024 threads at one time; those of
    /// [`Recording::events`].
    pub fn new(recording: &Recording, route: Option<&str>, on_one_thread: bool) -> Result<Self, Error> {
        let mut planner = Planner::new(recording, route, on_one_thread)?;
        while planner.read()? {}
        Ok(planner.finish())
    }
}

impl<'a> Planner<'a> {
    /// For [`Plan::new`].
    ///
    /// # Errors
    /// Those of [`Recording::events`].
    pub(crate) fn new(recording: &'a Recording, route: Option<&'a str>, on_one_thread: bool) -> Result<Self, Error> {
        Ok(Self {
            recording,
            reading: Reading::default(),
            route,
            on_one_thread,
            lanes: Vec::new(),
            lane_of: HashMap::new(),
            lives: if on_one_thread { Lives::default() } else { Lives::of(recording)? },
            known: Vec::new(),
            requests: HashMap::new(),
            planned: Vec::new(),
            others: HashSet::new(),
            roots: Vec::new(),
            blocks: HashMap::new(),
            made: 0,
            turn: None,
            phases: Phases::default(),
            live_bytes: 0,
            facts: Facts::default(),
        })
    }

    /// Reads some events. False: that was all.
    ///
    /// # Errors
    /// Those of [`Plan::new`].
    pub(crate) fn read(&mut self) -> Result<bool, Error> {
        for _ in 0..EVENTS_AT_ONCE {
            let Some(event) = self.recording.next_event(&mut self.reading)? else { return Ok(false) };
            self.lives.end_before(event.at_ns);
            self.add(&event).map_err(|error| match (error, self.recording.place_of(&self.reading)) {
                (Error::Replay { what, advice }, Some((file, offset))) => {
                    Error::Replay { what: format!("{what} ({}, at byte {offset})", file.display()), advice }
                }
                (error, _) => error,
            })?;
        }
        Ok(true)
    }

    fn lane(&mut self, thread: u32) -> Result<u32, Error> {
        let thread = if self.on_one_thread { MAIN } else { thread };
        if let Some(&lane) = self.lane_of.get(&thread) {
            return Ok(lane);
        }
        if self.lives.count() == MAX_THREADS {
            return Err(Error::Replay {
                what: format!("the recording has more than {MAX_THREADS} threads at one time"),
                advice: "replay it on one thread, or one route of it",
            });
        }
        let lane = self.lanes.len() as u32;
        self.lane_of.insert(thread, lane);
        self.lives.begin(lane, thread);
        self.lanes.push(Lane::default());
        self.known.push(HashMap::new());
        Ok(lane)
    }

    /// Adds a step that comes after `after`: for each whether all of it must be over, or its account's change only.
    fn push(&mut self, lane: u32, act: Act, after: [Option<(Last, bool)>; 2]) -> Last {
        let waits = self.lanes[lane as usize].waits.len() as u32;
        for (last, is_whole) in after.into_iter().flatten() {
            self.wait(lane, last, is_whole);
        }
        self.pushed(lane, act, waits)
    }

    /// As [`push`](Self::push), for a large block that is made or freed.
    fn push_large(&mut self, lane: u32, act: Act, after: [Option<(Last, bool)>; 2], is_made: bool) -> Last {
        let waits = self.lanes[lane as usize].waits.len() as u32;
        for (last, is_whole) in after.into_iter().flatten() {
            self.wait(lane, last, is_whole);
        }
        for last in self.phases.before(is_made) {
            self.wait(lane, last, true);
        }
        let last = self.pushed(lane, act, waits);
        self.phases.add(last);
        last
    }

    fn wait(&mut self, lane: u32, (other, step): Last, is_whole: bool) {
        let done = 2 * step as u64 + if is_whole { 2 } else { 1 };
        let known = self.known[lane as usize].entry(other).or_default();
        if other == lane || *known >= done {
            return;
        }
        *known = done;
        self.lanes[other as usize].steps[step].is_awaited = true;
        self.lanes[lane as usize].waits.push(Wait { thread: other, done });
    }

    fn pushed(&mut self, lane: u32, act: Act, waits: u32) -> Last {
        let steps = &mut self.lanes[lane as usize].steps;
        steps.push(Step { act, waits, is_awaited: false });
        self.facts.events += 1;
        (lane, steps.len() - 1)
    }

    /// The request and those around it, from the inside to the outside.
    fn for_each_around(&mut self, request: u64, mut change: impl FnMut(&mut Account)) {
        let mut next = Some(request);
        while let Some(found) = next.and_then(|id| self.requests.get_mut(&id)) {
            if !found.has_ended {
                change(&mut found.account);
            }
            next = found.parent;
        }
    }

    /// The request, or where it is over the nearest one around it that is not: what is made after its end is charged to
    /// that.
    fn nearest_open(&self, request: u64) -> Option<u64> {
        let mut next = Some(request);
        while let Some((id, found)) = next.and_then(|id| Some((id, self.requests.get(&id)?))) {
            if !found.has_ended {
                return Some(id);
            }
            next = found.parent;
        }
        None
    }

    fn add(&mut self, event: &Event) -> Result<(), Error> {
        if self.others.contains(&event.request) {
            return Ok(());
        }
        match event.what {
            What::Begin { name, parent, .. } => self.begin(event, name, parent),
            What::Allocate { block, bytes, align, zeroed } => {
                self.allocate(event, block, bytes, (align > 0).then_some(zeroed))
            }
            What::Resize { block, bytes, .. } => self.resize(event, block, bytes),
            What::Free { block } => self.free(event, block),
            What::Refused { .. } => {
                if let Some(found) = self.requests.get_mut(&event.request) {
                    found.account.refuse();
                }
                Ok(())
            }
            What::End { sums, .. } => self.end(event, sums),
        }
    }

    fn begin(&mut self, event: &Event, name: u32, parent: u64) -> Result<(), Error> {
        if self.requests.contains_key(&event.request) {
            return Err(contradicts(format!("request {} begins twice", event.request)));
        }
        // One around it that is over, or not in the recording, is none.
        let around = self.requests.get_mut(&parent).filter(|found| !found.has_ended).map(|found| {
            found.has_inner = true;
            (found.index, found.root, found.depth + 1)
        });
        let (is_program, is_in_program) = (self.recording.is_program(event.request), self.recording.is_program(parent));
        let route = around.filter(|_| !is_in_program).map_or(name, |(index, ..)| self.planned[index as usize].route);
        let is_other = |route| is_program || self.recording.names().get(name as usize).is_none_or(|name| name != route);
        let is_in_other = self.others.contains(&parent) && !is_in_program;
        if around.is_none() && (is_in_other || self.route.is_some_and(is_other)) {
            self.others.insert(event.request);
            return Ok(());
        }
        let is_counted = !is_program && (around.is_none() || is_in_program);
        let depth = around.map_or(0, |(.., depth)| depth);
        if depth > MAX_DEPTH {
            return Err(Error::Replay {
                what: format!("request {} is inside of {depth} others, and {MAX_DEPTH} is the most", event.request),
                advice: "record a program whose requests are not inside of so many",
            });
        }
        let root = around.map_or(self.roots.len(), |(_, root, _)| root);
        if around.is_none() {
            self.roots.push(None);
        }
        self.facts.requests += u64::from(is_counted);
        let index = self.planned.len() as u32;
        let has_ended = false;
        let is_uncompared = self.recording.is_torn(event.request);
        let sums = Sums::default();
        let number = event.request;
        let (outer, is_used_later) = (around.map(|(index, ..)| index), false);
        let planned =
            Planned { number, parent: outer, route, sums, has_ended, is_uncompared, is_used_later, is_counted };
        self.planned.push(planned);
        let lane = self.lane(event.thread)?;
        let after = [self.turn.map(|turn| (turn, true)), self.roots[root].map(|last| (last, false))];
        let last = self.push(lane, Act::Begin { request: index }, after);
        (self.turn, self.roots[root]) = (Some(last), Some(last));
        let parent = around.map(|_| parent);
        let open = OpenRequest {
            index,
            depth,
            root,
            account: Account::default(),
            maker: None,
            has_inner: false,
            parent,
            has_ended,
        };
        self.requests.insert(event.request, open);
        Ok(())
    }

    /// `made`: whether it is zeroed; `None` for what is charged only.
    fn allocate(&mut self, event: &Event, block: u64, bytes: u64, made: Option<bool>) -> Result<(), Error> {
        let bytes = bytes.max(1); // as the handler makes them
        let open = self.nearest_open(event.request);
        // After the end of all it is charged to nobody, and made in the memory of its own request.
        let charged = open.or(made.map(|_| event.request));
        let Some((charged, found)) = charged.and_then(|id| Some((id, self.requests.get_mut(&id)?))) else {
            self.facts.left_out += 1;
            return Ok(());
        };
        let (request, root) = (found.index, found.root);
        self.planned[request as usize].is_used_later |= open.is_none();
        match found.maker {
            None => found.maker = Some(Some(event.thread)),
            Some(Some(thread)) if thread != event.thread => found.maker = Some(None),
            Some(_) => {}
        }
        if self.blocks.contains_key(&block) {
            return Err(contradicts(format!("block {block} is made twice")));
        }
        self.for_each_around(charged, |account| account.allocate(bytes));
        self.facts.blocks += 1;
        if made.is_some() {
            self.grow(bytes);
        }
        let lane = self.lane(event.thread)?;
        let after = [self.roots[root].map(|last| (last, false)), None];
        let index = self.made;
        self.made += 1;
        let act = match made {
            Some(zeroed) => Act::Allocate { request, block: index, bytes, zeroed },
            None => Act::Charge { request, block: index, bytes },
        };
        let is_large = made.is_some() && bytes >= LARGE_BYTES;
        let last = if is_large { self.push_large(lane, act, after, true) } else { self.push(lane, act, after) };
        self.roots[root] = Some(last);
        let (request, thread, is_made) = (charged, event.thread, made.is_some());
        self.blocks.insert(block, LiveBlock { index, request, bytes, thread, last, is_made });
        Ok(())
    }

    fn grow(&mut self, bytes: u64) {
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        self.facts.peak_live_bytes = self.facts.peak_live_bytes.max(self.live_bytes);
    }

    fn resize(&mut self, event: &Event, block: u64, bytes: u64) -> Result<(), Error> {
        let bytes = bytes.max(1);
        let Some(found) = self.blocks.get_mut(&block) else {
            self.facts.left_out += 1;
            return Ok(());
        };
        let is_made = found.is_made;
        let before = std::mem::replace(&mut found.bytes, bytes);
        let (index, request, used) = (found.index, found.request, found.last);
        let (owner, root) = (self.requests[&request].index, self.requests[&request].root);
        let growth = bytes.saturating_sub(before);
        self.for_each_around(request, |account| account.grow(growth));
        self.for_each_around(request, |account| account.give_back(before.saturating_sub(bytes)));
        if is_made {
            self.grow(growth);
            self.live_bytes -= before.saturating_sub(bytes).min(self.live_bytes);
        }
        let lane = self.lane(event.thread)?;
        let after = [Some((used, true)), self.roots[root].map(|last| (last, false))];
        let act = match is_made {
            true => Act::Resize { request: owner, block: index, before, bytes },
            false => Act::Recharge { block: index, bytes },
        };
        let is_large = is_made && before.max(bytes) >= LARGE_BYTES;
        let last = if is_large { self.push_large(lane, act, after, growth > 0) } else { self.push(lane, act, after) };
        self.roots[root] = Some(last);
        if let Some(found) = self.blocks.get_mut(&block) {
            found.last = last;
        }
        Ok(())
    }

    fn free(&mut self, event: &Event, block: u64) -> Result<(), Error> {
        let Some(found) = self.blocks.remove(&block) else {
            self.facts.left_out += 1;
            return Ok(());
        };
        let root = self.requests[&found.request].root;
        self.for_each_around(found.request, |account| account.give_back(found.bytes));
        if found.is_made {
            self.live_bytes -= found.bytes.min(self.live_bytes);
        }
        self.facts.freed_elsewhere += u64::from(found.thread != event.thread);
        let lane = self.lane(event.thread)?;
        let after = [Some((found.last, true)), self.roots[root].map(|last| (last, false))];
        let act = Act::Free { block: found.index };
        let is_large = found.is_made && found.bytes >= LARGE_BYTES;
        let last = if is_large { self.push_large(lane, act, after, false) } else { self.push(lane, act, after) };
        self.roots[root] = Some(last);
        Ok(())
    }

    fn end(&mut self, event: &Event, recorded: Sums) -> Result<(), Error> {
        let Some(found) = self.requests.get_mut(&event.request) else {
            self.facts.left_out += 1;
            return Ok(());
        };
        if std::mem::replace(&mut found.has_ended, true) {
            return Err(contradicts(format!("request {} ends twice", event.request)));
        }
        let (index, root, sums) = (found.index, found.root, found.account.sums());
        let has_several_makers = found.maker == Some(None) || found.has_inner;
        let is_same = |sums: Sums| (sums.total_bytes, sums.blocks, sums.live_bytes);
        let peaks_differ = sums.peak_bytes != recorded.peak_bytes;
        let is_torn = self.planned[index as usize].is_uncompared;
        let is_uncompared = is_torn || recorded.includes_others;
        if !is_uncompared && (is_same(sums) != is_same(recorded) || (peaks_differ && !has_several_makers)) {
            let (made, said) = (plainly(&sums), plainly(&recorded));
            return Err(contradicts(format!(
                "request {}: its events make {made}, and its account said {said}",
                event.request
            )));
        }
        self.facts.torn += u64::from(is_torn);
        self.facts.with_others += u64::from(is_uncompared && !is_torn);
        self.facts.unordered_peaks += u64::from(peaks_differ && !is_uncompared);
        let planned = &mut self.planned[index as usize];
        (planned.sums, planned.has_ended, planned.is_uncompared) = (sums, true, is_uncompared);
        let lane = self.lane(event.thread)?;
        let after = [self.turn.map(|turn| (turn, true)), self.roots[root].map(|last| (last, false))];
        let last = self.push(lane, Act::End { request: index }, after);
        (self.turn, self.roots[root]) = (Some(last), Some(last));
        Ok(())
    }

    /// The plan, once all was read.
    pub(crate) fn finish(mut self) -> Plan {
        let is_outer = |one: &&Planned| one.parent.is_none() || one.is_counted;
        self.facts.unfinished = self.planned.iter().filter(is_outer).filter(|one| !one.has_ended).count() as u64;
        (self.facts.threads, self.facts.threads_at_once) = (self.lanes.len(), self.lives.most);
        self.facts.live_at_end_bytes = self.live_bytes;
        let middle = (self.facts.requests / 2).max(1);
        let names = self.recording.names().to_vec();
        let blocks = self.made as usize;
        let turns = self.lives.into_turns();
        let main = self.lane_of.get(&MAIN).copied();
        let (lanes, requests, facts, _file) = (self.lanes, self.planned, self.facts, ReadFrom::default());
        Plan { lanes, turns, main, requests, names, blocks, middle, facts, _file }
    }
}
