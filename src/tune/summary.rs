//! What a recording says of each route: how large its requests are, what their blocks are like, and when they come.

use super::ended::Ended;
use crate::error::Error;
use crate::recording::{Reading, Recording, What};
use std::collections::{BTreeMap, HashMap};

/// What a recording says of the requests of one name, with all that are inside of them. Requests are outermost ones
/// that were recorded to their end; where a program was recorded (`ctxalloc run --record`), those directly inside of
/// it, and it is none itself.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Route {
    /// Its name.
    pub name: String,
    /// How many requests there are.
    pub requests: u64,
    /// How many of them were refused memory. Their peaks say what they got, and are not among `peak_bytes`.
    pub refused_requests: u64,
    /// How often a limit refused, by the name of the request whose limit it was: the route's own, or that of one inside
    /// of it. Refusals by budgets are not among them.
    pub refused_by: BTreeMap<String, u64>,
    /// How often a budget's limit refused, or that of a request that began before the recording.
    pub refused_by_budgets: u64,
    /// The peak of each request, in bytes, in the order of their ends: also of what it made after its end, which its
    /// limit holds for too.
    pub peak_bytes: Vec<u64>,
    /// How long the requests took altogether, in nanoseconds.
    pub duration_ns: u64,
    /// How many page faults the process had while they were open, the sum of all; `None`: not all say so.
    pub page_faults: Option<u64>,
    /// What the process spent on processors while they were open, in nanoseconds, the sum of all; `None`: not all say
    /// so.
    pub open_processor_ns: Option<u64>,
    /// How many blocks they made.
    pub blocks: u64,
    /// How many bytes these had, with what they grew by.
    pub total_bytes: u64,
    /// How many bytes of them were to be zero.
    pub zeroed_bytes: u64,
    /// Blocks by size: `sizes[n]` have more than half of, and at most, `1 << n` bytes.
    pub sizes: BTreeMap<u32, u64>,
    /// How many resizes there were, and how many of them moved the block.
    pub resizes: u64,
    /// Of these, how many moved the block.
    pub moved: u64,
    /// Blocks that were freed by another thread than the one that made them.
    pub freed_elsewhere: u64,
    /// Blocks that outlived the request, and the step that ended it: they were alive when its thread did something
    /// else in a request. What it made after that has not escaped.
    pub escaped_blocks: u64,
    /// The bytes of these.
    pub escaped_bytes: u64,
    /// How long after the request's end they were freed, in nanoseconds; without those that never were.
    pub escaped_ns: Vec<u64>,
    /// Escaped blocks that lived on for longer than their request had taken, or to the end: what a service keeps.
    pub lasting_blocks: u64,
    /// The most requests at one time, in one process.
    pub max_concurrent: u64,
    /// The most bytes of all its requests, and of what escaped from them, at one time, in one process: each has pools
    /// of its own.
    pub peak_live_bytes: u64,
    /// The times without a request of it in a process, between two that had some there, in nanoseconds.
    pub gaps_ns: Vec<u64>,
    /// How long each request took during which the process had no other one open, in nanoseconds: without what it waits
    /// for where several run.
    pub alone_ns: Vec<u64>,
    /// What the process spent on processors meanwhile, in nanoseconds, where the recording says so.
    pub alone_processor_ns: Vec<u64>,
    /// How many requests had each handler, by the name that the recording has for it: `pool`, `System`, `Arena`.
    pub handlers: BTreeMap<String, u64>,
}

impl Route {
    /// With the next request's, before that is counted; `None` as soon as one does not say.
    fn sum(&self, sum: Option<u64>, more: Option<u64>) -> Option<u64> {
        if self.requests == 0 { more } else { Some(sum?.saturating_add(more?)) }
    }

    fn escape(&mut self, bytes: u64, is_lasting: bool) {
        self.escaped_blocks += 1;
        self.lasting_blocks += u64::from(is_lasting);
        self.escaped_bytes = self.escaped_bytes.saturating_add(bytes);
    }
}

/// Where a request is counted: its route, and what is there now in its process, of all routes and of its own.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    route: usize,
    now: [usize; 2],
}

#[derive(Default)]
struct Open {
    place: Place,
    name: u32,
    handler: u32,
    /// The outermost request around it, or itself.
    root: u64,
    began_ns: u64,
    ended_ns: Option<u64>,
    /// Whether the step that ended it is over.
    is_settled: bool,
    /// Whether it is a recorded program, whose route has no requests.
    is_program: bool,
    refused: bool,
    /// The bytes alive of it and of those inside of it, with what it was only charged for.
    live_bytes: u64,
    /// Where its peak is in those of all, and of its route.
    peaks: Option<[usize; 2]>,
}

impl Open {
    /// Whether what escaped from it lives for longer than it took itself, `now_ns` after it ended.
    fn is_lasting(&self, ended_ns: u64, now_ns: u64) -> bool {
        now_ns.saturating_sub(ended_ns) > ended_ns.saturating_sub(self.began_ns)
    }
}

struct Live {
    root: u64,
    bytes: u64,
    thread: u32,
    /// Made elsewhere, and charged: no strategy changes it.
    is_charge: bool,
    /// Made after the step that ended its request.
    is_late: bool,
}

#[derive(Default)]
struct Now {
    open: u64,
    live_bytes: u64,
    idle_since: Option<u64>,
    /// The open request, if no other one was open since it began.
    alone: Option<u64>,
}

/// What a recording says of each route, those with the most requests first, and of all together: the last one, without
/// a name.
///
/// # Errors
/// As [`Recording::events`]: a file cannot be read any more, or was changed.
pub fn routes(recording: &Recording) -> Result<Vec<Route>, Error> {
    let mut summary = Summary::new(recording);
    while summary.read()? {}
    let Summed { mut routes, whole, .. } = summary.finish();
    routes.push(whole);
    Ok(routes)
}

/// All that is said.
pub(crate) struct Summed {
    /// Those with the most requests first.
    pub(crate) routes: Vec<Route>,
    /// All together, with the programs.
    pub(crate) whole: Route,
    /// Programs that have routes inside of them: what they made themselves.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "is for `recommend`"))]
    pub(crate) programs: Vec<Route>,
}

/// So many events are read at a time, so that who asked can be interrupted: each may count for some thousand requests.
pub(super) const EVENTS_AT_ONCE: usize = 10_000;

/// [`routes`], bit by bit.
pub(crate) struct Summary<'a> {
    recording: &'a Recording,
    reading: Reading,
    reader: Reader,
}

impl<'a> Summary<'a> {
    pub(crate) fn new(recording: &'a Recording) -> Self {
        let reader = Reader { routes: vec![Route::default()], ..Reader::default() };
        Self { recording, reading: Reading::default(), reader }
    }

    /// Reads some events. False: that was all.
    ///
    /// # Errors
    /// As [`Recording::events`].
    pub(crate) fn read(&mut self) -> Result<bool, Error> {
        for _ in 0..EVENTS_AT_ONCE {
            let Some(event) = self.recording.next_event(&mut self.reading)? else { return Ok(false) };
            self.reader.read(event.at_ns, event.thread, event.request, event.what, self.recording);
        }
        Ok(true)
    }

    pub(crate) fn finish(self) -> Summed {
        let mut reader = self.reader;
        for live in reader.blocks.values() {
            let Some(open) = reader.requests.get(&live.root) else { continue };
            let Some(ended_ns) = open.ended_ns else { continue };
            if live.is_charge || live.is_late {
                continue;
            }
            for route in [0, open.place.route] {
                reader.routes[route].escape(live.bytes, open.is_lasting(ended_ns, reader.now_ns));
            }
        }
        let mut found = reader.routes;
        let whole = found.remove(0);
        let programs = reader.by_name.iter().filter(|&(&(_, is_program), _)| is_program);
        let programs = programs.map(|(_, &at)| std::mem::take(&mut found[at - 1])).collect();
        found.retain(|route| route.requests > 0);
        found.sort_by(|one, other| other.requests.cmp(&one.requests).then_with(|| one.name.cmp(&other.name)));
        Summed { routes: found, whole, programs }
    }
}

#[derive(Default)]
struct Reader {
    /// All together, then each.
    routes: Vec<Route>,
    /// What is there now, of each route in each process; of all routes together too.
    now: Vec<Now>,
    now_of: HashMap<(usize, u32), usize>,
    /// With whether it is a program's.
    by_name: HashMap<(u32, bool), usize>,
    requests: HashMap<u64, Open>,
    blocks: HashMap<u64, Live>,
    ended: Ended,
    /// The time of the last event.
    now_ns: u64,
}

impl Reader {
    fn read(&mut self, at_ns: u64, thread: u32, request: u64, what: What, recording: &Recording) {
        let names = recording.names();
        self.now_ns = at_ns;
        for request in self.ended.settled_by(thread, &what) {
            self.requests.entry(request).and_modify(|open| open.is_settled = true);
        }
        match what {
            What::Begin { name, handler, parent } => {
                let around = self.requests.get(&parent).filter(|open| open.ended_ns.is_none() && !open.is_program);
                let (is_inside, is_program) = (around.is_some(), recording.is_program(request));
                let (place, root) = match around {
                    Some(open) => (open.place, open.root),
                    None => (self.place_in(recording.process_of(request), (name, is_program), names), request),
                };
                let open = Open { place, name, handler, root, began_ns: at_ns, is_program, ..Open::default() };
                self.requests.insert(request, open);
                if is_program {
                    let handler = recording.handlers().get(handler as usize).cloned().unwrap_or_default();
                    *self.routes[place.route].handlers.entry(handler).or_default() += 1;
                } else if !is_inside {
                    self.on_each(place, |route, now| now.begin(route, at_ns));
                    let process = &mut self.now[place.now[0]];
                    process.alone = (process.open == 1).then_some(request);
                }
            }
            What::Allocate { block, bytes, zeroed, align } => {
                let Some((place, root)) = self.place(request) else { return };
                let (is_charge, is_late) = (align == 0, self.requests.get(&root).is_some_and(|open| open.is_settled));
                self.blocks.insert(block, Live { root, bytes, thread, is_charge, is_late });
                self.grow(root, bytes);
                if is_charge {
                    return;
                }
                let class = u64::BITS - bytes.saturating_sub(1).leading_zeros();
                self.on_each(place, |route, now| {
                    route.blocks += 1;
                    route.zeroed_bytes = route.zeroed_bytes.saturating_add(if zeroed { bytes } else { 0 });
                    *route.sizes.entry(class).or_default() += 1;
                    now.grow(route, bytes);
                });
            }
            What::Resize { block, bytes, moved } => {
                let Some(live) = self.blocks.get_mut(&block) else { return };
                let (before, root, is_charge) = (std::mem::replace(&mut live.bytes, bytes), live.root, live.is_charge);
                let Some((place, _)) = self.place(root) else { return };
                self.shrink(root, before);
                self.grow(root, bytes);
                if is_charge {
                    return;
                }
                self.on_each(place, |route, now| {
                    route.resizes += 1;
                    route.moved += u64::from(moved);
                    now.grow(route, bytes.saturating_sub(before));
                    now.live_bytes = now.live_bytes.saturating_sub(before.saturating_sub(bytes));
                });
            }
            What::Free { block } => {
                let Some(live) = self.blocks.remove(&block) else { return };
                let Some(open) = self.requests.get(&live.root) else { return };
                let (place, is_settled) = (open.place, open.is_settled);
                let ended = open.ended_ns.map(|ended| (ended, open.is_lasting(ended, at_ns)));
                self.shrink(live.root, live.bytes);
                if live.is_charge {
                    return;
                }
                self.on_each(place, |route, now| {
                    route.freed_elsewhere += u64::from(live.thread != thread);
                    now.live_bytes = now.live_bytes.saturating_sub(live.bytes);
                    if let Some((ended, is_lasting)) = ended.filter(|_| is_settled && !live.is_late) {
                        route.escape(live.bytes, is_lasting);
                        route.escaped_ns.push(at_ns.saturating_sub(ended));
                    }
                });
            }
            What::Refused { by, .. } => {
                let limited = self.requests.get(&by).and_then(|open| names.get(open.name as usize)).cloned();
                let asking = self.requests.get(&request).map(|open| (open.root, open.ended_ns.is_some()));
                let Some((root, has_ended)) = asking else { return };
                let Some(open) = self.requests.get_mut(&root) else { return };
                open.refused = true;
                let place = open.place;
                if by == 0 && !has_ended {
                    self.on_each(place, |route, _| route.refused_by_budgets += 1);
                }
                if let Some(name) = limited {
                    self.on_each(place, |route, _| *route.refused_by.entry(name.clone()).or_default() += 1);
                }
            }
            What::End { sums, page_faults, processor_ns } => {
                let Some(open) = self.requests.get_mut(&request) else { return };
                open.ended_ns = Some(at_ns);
                self.ended.push(thread, request);
                let (place, is_root) = (open.place, open.root == request && !open.is_program);
                let (duration_ns, refused) = (at_ns.saturating_sub(open.began_ns), open.refused || sums.refused > 0);
                if is_root {
                    open.peaks = (!refused).then(|| [0, place.route].map(|at| self.routes[at].peak_bytes.len()));
                    let handler = recording.handlers().get(open.handler as usize).map_or("", String::as_str);
                    let was_alone = self.now[place.now[0]].alone.take() == Some(request);
                    self.on_each(place, |route, now| {
                        now.end(at_ns);
                        route.page_faults = route.sum(route.page_faults, page_faults);
                        route.open_processor_ns = route.sum(route.open_processor_ns, processor_ns);
                        route.requests += 1;
                        *route.handlers.entry(handler.to_owned()).or_default() += 1;
                        route.duration_ns = route.duration_ns.saturating_add(duration_ns);
                        route.refused_requests += u64::from(refused);
                        if !refused {
                            route.peak_bytes.push(sums.peak_bytes);
                        }
                        if was_alone && !refused {
                            route.alone_ns.push(duration_ns);
                            route.alone_processor_ns.extend(processor_ns);
                        }
                    });
                }
            }
        }
    }

    /// Where requests of this name are counted.
    fn place_in(&mut self, process: u32, name: (u32, bool), names: &[String]) -> Place {
        let route = *self.by_name.entry(name).or_insert_with(|| {
            let name = names.get(name.0 as usize).cloned().unwrap_or_default();
            self.routes.push(Route { name, ..Route::default() });
            self.routes.len() - 1
        });
        let now = [0, route].map(|at| {
            *self.now_of.entry((at, process)).or_insert_with(|| {
                self.now.push(Now::default());
                self.now.len() - 1
            })
        });
        Place { route, now }
    }

    /// Where a request is counted, and the outermost one around it.
    fn place(&self, request: u64) -> Option<(Place, u64)> {
        self.requests.get(&request).map(|open| (open.place, open.root))
    }

    /// What is made after a request's end may be its peak.
    fn grow(&mut self, root: u64, bytes: u64) {
        let Some(open) = self.requests.get_mut(&root) else { return };
        open.live_bytes = open.live_bytes.saturating_add(bytes);
        for (at, place) in [0, open.place.route].into_iter().zip(open.peaks.into_iter().flatten()) {
            let peak = &mut self.routes[at].peak_bytes[place];
            *peak = (*peak).max(open.live_bytes);
        }
    }

    fn shrink(&mut self, root: u64, bytes: u64) {
        let Some(open) = self.requests.get_mut(&root) else { return };
        open.live_bytes = open.live_bytes.saturating_sub(bytes);
    }

    fn on_each(&mut self, place: Place, mut change: impl FnMut(&mut Route, &mut Now)) {
        for (route, now) in [0, place.route].into_iter().zip(place.now) {
            change(&mut self.routes[route], &mut self.now[now]);
        }
    }
}

impl Now {
    fn begin(&mut self, route: &mut Route, at_ns: u64) {
        self.open += 1;
        route.max_concurrent = route.max_concurrent.max(self.open);
        if let Some(since) = self.idle_since.take() {
            route.gaps_ns.push(at_ns.saturating_sub(since));
        }
    }

    fn end(&mut self, at_ns: u64) {
        self.open = self.open.saturating_sub(1);
        if self.open == 0 {
            self.idle_since = Some(at_ns);
        }
    }

    fn grow(&mut self, route: &mut Route, bytes: u64) {
        route.total_bytes = route.total_bytes.saturating_add(bytes);
        self.live_bytes = self.live_bytes.saturating_add(bytes);
        route.peak_live_bytes = route.peak_live_bytes.max(self.live_bytes);
    }
}
