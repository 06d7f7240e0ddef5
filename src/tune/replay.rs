//! The replay itself: the plan's threads make, touch, resize and free real blocks under a strategy.

use super::choice::Choice;
use super::measure::{Moment, forget_peak, peak_resident_bytes, resident_bytes};
use super::plan::{Plan, Planned, plainly};
use super::progress::Progress;
use super::steps::{Act, Lane, Step, Turn};
use crate::counters::UNNAMED;
use crate::error::Error;
use crate::handler::{Handler, Held};
use crate::memory::Block;
use crate::recording::Sums;
use crate::request::{ExternalCharge, Request, request};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

/// What a replay took. Memory is what it added to what the process had before; `None` where the system does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replayed {
    /// From the first step to the last one.
    pub time: Duration,
    /// The processor time of all threads, in the program and in the kernel.
    pub cpu: Duration,
    /// Until half of the requests of routes were over.
    pub cpu_first_half: Duration,
    /// Page faults.
    pub faults: u64,
    /// Until half of the requests of routes were over.
    pub faults_first_half: u64,
    /// The most resident memory.
    pub peak_resident_bytes: Option<u64>,
    /// The resident memory after the last step, with what the recording never frees.
    pub resident_bytes_after: Option<u64>,
    /// The requests whose account was compared with that of the recording, and was the same.
    pub compared: u64,
}

/// Replays a plan under a strategy, as fast as it goes. The process should do nothing else meanwhile, and should be
/// fresh: an earlier replay leaves warm memory behind. Nothing of the recording's limits is applied: what was refused
/// is left out.
///
/// # Errors
/// [`Error::Replay`] if a request's account differs from the recording's, or the strategy has no memory.
pub fn replay(plan: &Plan, choice: &Choice) -> Result<Replayed, Error> {
    replay_routes(plan, choice, &HashMap::new())
}

/// As [`replay`], with a strategy of its own for each of these routes, by the name of its requests, and
/// `choice` for all others: what they take of one process together.
///
/// # Errors
/// As [`replay`].
pub fn replay_routes(plan: &Plan, choice: &Choice, routes: &HashMap<String, Choice>) -> Result<Replayed, Error> {
    let stage = Stage::new(plan, choice, routes);
    let (gate, main_begins) = (Progress::default(), Progress::default());
    let (before, resident) = thread::scope(|threads| {
        let Some(main) = plan.main else { return stage.direct(threads, &gate, &main_begins) };
        let director = builder().spawn_scoped(threads, || {
            let directed = catch_unwind(AssertUnwindSafe(|| stage.direct(threads, &gate, &main_begins)));
            main_begins.publish(1); // whatever happened: the main thread waits
            gate.publish(1);
            directed.unwrap_or_else(|panicked| resume_unwind(panicked))
        });
        match director {
            Ok(director) => {
                main_begins.wait(1);
                gate.wait(1);
                stage.run(main as usize);
                director.join().unwrap_or_else(|panicked| resume_unwind(panicked))
            }
            Err(error) => {
                stage.fail(&format!("a thread could not be started: {error}"));
                (Moment::now(), None)
            }
        }
    });
    let after = Moment::now();
    let (peak, left) = (peak_resident_bytes(), resident_bytes());
    if let Some(what) = lock(&stage.failure).take() {
        return Err(Error::Replay { what, advice: "leave this strategy out" });
    }
    let middle = lock(&stage.middle).unwrap_or(after);
    let added = |bytes: Option<u64>| Some(bytes?.saturating_sub(resident?));
    Ok(Replayed {
        time: after.at - before.at,
        cpu: after.cpu.saturating_sub(before.cpu),
        cpu_first_half: middle.cpu.saturating_sub(before.cpu),
        faults: after.faults - before.faults,
        faults_first_half: middle.faults.saturating_sub(before.faults),
        peak_resident_bytes: added(peak),
        resident_bytes_after: added(left),
        compared: stage.compared.into_inner(),
    })
}

/// Of each thread, which calls nothing deep.
const STACK_BYTES: usize = 256 << 10;

fn builder() -> thread::Builder {
    thread::Builder::new().name("ctxalloc-replay".into()).stack_size(STACK_BYTES)
}

/// A request from its beginning on. Its handler stays known: its blocks are what keeps it valid after the end.
#[derive(Default)]
struct Place {
    request: Option<Request>,
    handler: Option<Handler>,
    /// Keeps its memory where something is made in it after its end, as what did that kept it.
    held: Option<Held>,
}

/// What a recorded block is in a replay.
enum Kept {
    Block(Block),
    /// Its drop gives it back.
    Charge(ExternalCharge),
}

/// What the threads share.
struct Stage<'a> {
    plan: &'a Plan,
    /// By the plan's names.
    choices: Vec<&'a Choice>,
    /// Of names that the recording does not have.
    choice: &'a Choice,
    progress: Vec<Progress>,
    places: Vec<Mutex<Place>>,
    blocks: Vec<Mutex<Option<Kept>>>,
    ended: AtomicU64,
    compared: AtomicU64,
    middle: Mutex<Option<Moment>>,
    has_failed: AtomicBool,
    failure: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Stage<'a> {
    fn new(plan: &'a Plan, choice: &'a Choice, routes: &'a HashMap<String, Choice>) -> Self {
        Self {
            plan,
            choices: plan.names.iter().map(|name| routes.get(name).unwrap_or(choice)).collect(),
            choice,
            progress: plan.lanes.iter().map(|_| Progress::default()).collect(),
            places: plan.requests.iter().map(|_| Mutex::default()).collect(),
            blocks: (0..plan.blocks).map(|_| Mutex::default()).collect(),
            ended: AtomicU64::new(0),
            compared: AtomicU64::new(0),
            middle: Mutex::default(),
            has_failed: AtomicBool::new(false),
            failure: Mutex::default(),
        }
    }

    fn fail(&self, what: &str) {
        lock(&self.failure).get_or_insert_with(|| what.to_owned());
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Begins the threads and awaits their ends, in the recorded order: whatever a thread waits for before its end is
    /// the work of threads that began before. Returns the moment at which the gate was opened, and the resident memory
    /// then. `main_begins` when the plan's main thread does, on which others than this one run.
    fn direct<'scope>(
        &'scope self,
        threads: &'scope Scope<'scope, '_>,
        gate: &'scope Progress,
        main_begins: &Progress,
    ) -> (Moment, Option<u64>) {
        let mut running: Vec<_> = self.plan.lanes.iter().map(|_| None).collect();
        let mut take = |turns: &[Turn]| {
            for &Turn { lane, is_end } in turns {
                let is_main = self.plan.main == Some(lane);
                let lane = lane as usize;
                match is_end {
                    false if is_main => main_begins.publish(1),
                    false => running[lane] = self.start(threads, gate, lane),
                    true if is_main => self.progress[lane].wait(u64::MAX),
                    true => {
                        if let Some(Err(panicked)) = running[lane].take().map(ScopedJoinHandle::join) {
                            resume_unwind(panicked);
                        }
                    }
                }
            }
        };
        let first_end = self.plan.turns.iter().position(|turn| turn.is_end).unwrap_or(self.plan.turns.len());
        let (first, others) = self.plan.turns.split_at(first_end);
        take(first);
        let resident = forget_peak().then(resident_bytes).flatten();
        let before = Moment::now();
        gate.publish(1);
        take(others);
        (before, resident)
    }

    /// Starts one of the threads, which waits until the gate is open.
    fn start<'scope>(
        &'scope self,
        threads: &'scope Scope<'scope, '_>,
        gate: &'scope Progress,
        lane: usize,
    ) -> Option<ScopedJoinHandle<'scope, ()>> {
        let work = move || {
            gate.wait(1);
            self.run(lane);
        };
        match builder().spawn_scoped(threads, work) {
            Ok(running) => Some(running),
            Err(error) => {
                self.fail(&format!("thread {lane} could not be started: {error}"));
                self.progress[lane].publish(u64::MAX); // nobody waits for it
                None
            }
        }
    }

    /// One thread's steps.
    fn run(&self, number: usize) {
        let Lane { steps, waits } = &self.plan.lanes[number];
        let mut last = None;
        for (at, &Step { act, waits: first, is_awaited }) in steps.iter().enumerate() {
            let end = steps.get(at + 1).map_or(waits.len(), |next| next.waits as usize);
            for wait in &waits[first as usize..end] {
                self.progress[wait.thread as usize].wait(wait.done);
            }
            if self.has_failed.load(Ordering::Relaxed) {
                break;
            }
            let halfway = || {
                if is_awaited {
                    self.progress[number].publish(2 * at as u64 + 1);
                }
            };
            if let Err(what) = self.step(act, &mut last, halfway) {
                self.fail(&self.of_request(act, what));
                break;
            }
            if is_awaited {
                self.progress[number].publish(2 * at as u64 + 2);
            }
        }
        self.progress[number].publish(u64::MAX); // after a failure nobody waits for this thread
    }

    /// One step. `halfway` is called when the account has changed, before pages are touched.
    fn step(&self, act: Act, last: &mut Option<(u32, Handler)>, halfway: impl FnOnce()) -> Result<(), String> {
        match act {
            Act::Begin { request } => self.begin(request),
            Act::End { request } => self.end(request),
            Act::Allocate { request, block, bytes, zeroed } => {
                let handler = match *last {
                    Some((seen, handler)) if seen == request => handler,
                    _ => lock(&self.places[request as usize]).handler.ok_or("a request has no handler")?,
                };
                *last = Some((request, handler));
                let size = usize::try_from(bytes).map_err(|error| error.to_string())?;
                let made = if zeroed { Block::zeroed(handler, size) } else { Block::uninitialised(handler, size) };
                let mut made = made.map_err(|error| refused(self.choice_of(request), bytes, &error))?;
                halfway();
                made.touch(0);
                *lock(&self.blocks[block as usize]) = Some(Kept::Block(made));
                Ok(())
            }
            Act::Charge { request, block, bytes } => {
                let handle = lock(&self.places[request as usize]).request.as_ref().map(Request::handle);
                let size = usize::try_from(bytes).map_err(|error| error.to_string())?;
                let charge = handle.ok_or("a request is over")?.charge(size);
                let charge = charge.map_err(|error| error.to_string())?;
                *lock(&self.blocks[block as usize]) = Some(Kept::Charge(charge));
                Ok(())
            }
            Act::Resize { request, block, before, bytes } => {
                let mut held = lock(&self.blocks[block as usize]);
                let Some(Kept::Block(found)) = held.as_mut() else { return Err("a block is not there".into()) };
                let size = usize::try_from(bytes).map_err(|error| error.to_string())?;
                found.resize_uninitialised(size).map_err(|error| refused(self.choice_of(request), bytes, &error))?;
                halfway();
                found.touch(usize::try_from(before.min(bytes)).unwrap_or(size));
                Ok(())
            }
            Act::Recharge { block, bytes } => {
                let mut held = lock(&self.blocks[block as usize]);
                let Some(Kept::Charge(found)) = held.as_mut() else { return Err("a charge is not there".into()) };
                let size = usize::try_from(bytes).map_err(|error| error.to_string())?;
                found.resize(size).map_err(|error| error.to_string())
            }
            Act::Free { block } => {
                let held = lock(&self.blocks[block as usize]).take();
                drop(held.ok_or("a block is not there")?);
                Ok(())
            }
        }
    }

    /// What failed, with the request of the recording that it is of.
    #[cold]
    fn of_request(&self, act: Act, what: String) -> String {
        let request = match act {
            Act::Begin { request } | Act::End { request } | Act::Allocate { request, .. } => request,
            Act::Charge { request, .. } | Act::Resize { request, .. } => request,
            Act::Recharge { .. } | Act::Free { .. } => return what,
        };
        let Planned { number, route, .. } = &self.plan.requests[request as usize];
        let route = self.plan.names.get(*route as usize).map_or("", String::as_str);
        format!("request {number}, of {:?}: {what}", if route.is_empty() { UNNAMED } else { route })
    }

    fn choice_of(&self, request: u32) -> &'a Choice {
        self.choices.get(self.plan.requests[request as usize].route as usize).copied().unwrap_or(self.choice)
    }

    fn begin(&self, number: u32) -> Result<(), String> {
        let choice = self.choice_of(number);
        let begin = |terms| choice.apply(terms).begin().map_err(|error| error.to_string());
        let begun = match self.plan.requests[number as usize].parent {
            None => begin(request().root()),
            Some(parent) => {
                let around = lock(&self.places[parent as usize]);
                around.request.as_ref().ok_or("the request around is over")?.run(|| begin(request()))
            }
        }?;
        let mut place = lock(&self.places[number as usize]);
        place.held = self.plan.requests[number as usize].is_used_later.then(|| Held::on(begun.handler()));
        (place.handler, place.request) = (Some(begun.handler()), Some(begun));
        Ok(())
    }

    fn end(&self, number: u32) -> Result<(), String> {
        let ending = lock(&self.places[number as usize]).request.take().ok_or("a request ends that did not begin")?;
        let stats = ending.end().stats;
        let Planned { sums, is_uncompared, is_counted, .. } = &self.plan.requests[number as usize];
        let found = stats.as_recorded();
        if !is_same(&found, sums) {
            return Err(format!("its account says {}, and the recording {}", plainly(&found), plainly(sums)));
        }
        self.compared.fetch_add(u64::from(!is_uncompared), Ordering::Relaxed);
        if *is_counted && self.ended.fetch_add(1, Ordering::Relaxed) + 1 == self.plan.middle {
            *lock(&self.middle) = Some(Moment::now());
        }
        Ok(())
    }
}

fn refused(choice: &Choice, bytes: u64, error: &Error) -> String {
    format!("strategy {} gave no {bytes} bytes: {error}", choice.name())
}

/// Whether they agree in all that a replay does: nothing is refused in one.
fn is_same(one: &Sums, other: &Sums) -> bool {
    Sums { refused: 0, ..*one } == Sums { refused: 0, ..*other }
}
