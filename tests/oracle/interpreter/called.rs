//! The words of a synchronous body.

use crate::awaited;
use crate::hold::{Hold, Stretch, of_reset};
use crate::line::{Boom, Child, of_panic, of_task};
use crate::program::Word;
use crate::run::{Body, Frame, Hub, Mode};
use crate::start;
use crate::trace::{numbered, outcome, wanted};
use ctxalloc::{Buffer, Context, Token, WithHandler, default_handler, reset, scope, set};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// One body of a node, begun in the trace.
pub(crate) fn inner(frame: &Frame, node: usize, body: usize) {
    frame.begin(node);
    run(frame, node, body);
}

/// One body of a node.
pub(crate) fn run(frame: &Frame, node: usize, body: usize) {
    for &step in &frame.node(node).bodies[body] {
        call(frame, step);
    }
}

/// A step.
pub(crate) fn call(frame: &Frame, node: usize) {
    match frame.node(node).word {
        Word::Look => look(frame, node),
        Word::Set => {
            let [label, handler] = frame.number(node);
            let token = set(wanted(handler));
            frame.begin_seeing(node, token.old_handler().unwrap_or_else(default_handler));
            frame.line.store().tokens.insert(label, token);
            frame.end(node, outcome::OK);
        }
        Word::Reset => {
            let [label] = frame.number(node);
            let outcome = frame.line.store().tokens.get(&label).map_or(outcome::NOTHING_THERE, reset_once);
            frame.end(node, outcome);
        }
        Word::Enter => {
            let [label, handler] = frame.number(node);
            let hold = Hold::enter(&frame.line, label, handler, frame.pinned);
            frame.line.store().holds.push((label, hold));
            frame.end(node, outcome::OK);
        }
        Word::Leave => leave(frame, node),
        Word::With => with(frame, node),
        Word::Try => {
            let cleanup = Cleanup { frame: frame.clone(), node, is_due: true };
            inner(frame, node, 0);
            drop(cleanup);
            frame.end(node, outcome::OK);
        }
        Word::Catch => {
            let result = catch_unwind(AssertUnwindSafe(|| inner(frame, node, 0)));
            frame.end(node, result.map_or_else(|payload| of_panic(&*payload), |()| outcome::OK));
        }
        Word::Raise => {
            frame.end(node, outcome::OK);
            resume_unwind(Box::new(Boom)) // a panic without the hook's message
        }
        Word::Copy | Word::Fresh => {
            let [label] = frame.number(node);
            let is_copy = frame.node(node).word == Word::Copy;
            let context = if is_copy { Context::copy_current() } else { Context::new() };
            frame.line.store().contexts.insert(label, context);
            frame.end(node, outcome::OK);
        }
        Word::Clone => {
            let [label, of] = frame.number(node);
            let mut store = frame.line.store();
            let clone = store.contexts.get(&of).cloned();
            let outcome = if clone.is_some() { outcome::OK } else { outcome::NOTHING_THERE };
            store.contexts.extend(clone.map(|context| (label, context)));
            frame.end(node, outcome);
        }
        Word::Peek => {
            let [label] = frame.number(node);
            let handler = frame.line.store().contexts.get(&label).map(Context::handler);
            if let Some(handler) = handler {
                frame.begin_seeing(node, handler);
            }
            frame.end(node, if handler.is_some() { outcome::OK } else { outcome::NOTHING_THERE });
        }
        Word::Run => run_in(frame, node),
        Word::Spawn => start::spawn(frame, node),
        Word::Thread => start::thread(frame, node),
        Word::Job => start::job(frame, node),
        Word::Work => {
            let (job, worker) = start::work(frame, node);
            let outcome = of_task(block_on(job.handle));
            start::take_back_worker(frame, node, &job.line, worker);
            frame.end(node, outcome);
        }
        Word::Join => {
            let [label] = frame.number(node);
            let child = frame.line.store().children.remove(&label);
            let outcome = child.map_or(outcome::NOTHING_THERE, |child| {
                let line = child.line.clone();
                let outcome = child.outcome_by_blocking();
                frame.line.take_back(&line);
                outcome
            });
            frame.end(node, outcome);
        }
        Word::Loop => nested_loop(frame, node),
        Word::Drive => drive(frame, node),
        Word::Hop => hop(frame, node),
        word => panic!("{word:?} stands in a synchronous body: language.py should not allow that"),
    }
}

/// The outcome of `reset`, which must be what `is_used` says before and after.
fn reset_once(token: &Token) -> u8 {
    let was_used = token.is_used();
    let outcome = of_reset(reset(token));
    let as_it_says = match outcome {
        outcome::OK => !was_used && token.is_used(),
        outcome::USED => was_used && token.is_used(),
        _ => !was_used && !token.is_used(),
    };
    if as_it_says { outcome } else { outcome::STRANGE }
}

fn look(frame: &Frame, node: usize) {
    match frame.number(node) {
        [0] => frame.end(node, outcome::OK),
        _ => frame.end_seeing(node, Buffer::zeroed(8).expect("eight bytes").handler()),
    }
}

fn leave(frame: &Frame, node: usize) {
    let [label] = frame.number(node);
    let hold = {
        let holds = &mut frame.line.store().holds;
        holds.iter().position(|(held, _)| *held == label).map(|at| holds.remove(at).1)
    };
    frame.end(node, hold.map_or(outcome::NOTHING_THERE, Hold::leave));
}

fn with(frame: &Frame, node: usize) {
    let [flavour, handler] = frame.number(node);
    let outcome = if flavour == 2 {
        scope(numbered(handler), || inner(frame, node, 0));
        outcome::OK
    } else {
        let stretch = Stretch::enter(&frame.line, node, flavour, handler, true);
        inner(frame, node, 0);
        stretch.leave()
    };
    frame.end(node, outcome);
}

/// Runs the second body of a node, if it has one, when it goes: a destructor of the program's.
pub(crate) struct Cleanup {
    pub(crate) frame: Frame,
    pub(crate) node: usize,
    /// Whether the first body was begun.
    pub(crate) is_due: bool,
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if self.is_due && self.frame.node(self.node).bodies.len() > 1 {
            run(&Frame { blocks: false, ..self.frame.clone() }, self.node, 1);
        }
    }
}

fn run_in(frame: &Frame, node: usize) {
    let [label] = frame.number(node);
    let context = frame.line.store().contexts.remove(&label);
    let Some(mut context) = context else { return frame.end(node, outcome::NOTHING_THERE) };
    let result = catch_unwind(AssertUnwindSafe(|| context.run(|| inner(frame, node, 0))));
    frame.line.store().contexts.insert(label, context);
    result.unwrap_or_else(|payload| resume_unwind(payload));
    frame.end(node, outcome::OK);
}

/// A runtime of its own, on this thread, inside whatever scopes are open here.
fn nested_loop(frame: &Frame, node: usize) {
    let mode = if node.is_multiple_of(2) { Mode::Current } else { Mode::Local };
    let hub = Hub::new(mode);
    let runtime = Builder::new_current_thread().build().expect("the system can make a runtime");
    let local = LocalSet::new();
    let block_on = |body: Body| {
        if mode == Mode::Local {
            local.block_on(&runtime, body.in_current_handler());
        } else {
            runtime.block_on(body.in_current_handler());
        }
    };
    let result = catch_unwind(AssertUnwindSafe(|| {
        let frame = Frame { hub: Some(hub.clone()), blocks: false, pinned: true, ..frame.clone() };
        block_on(Box::pin(async move { awaited::inner(&frame, node, 0).await }));
    }));
    let children = std::mem::take(&mut frame.line.store().children);
    let (its_own, others) = children.into_iter().partition(|(_, child)| is_of(child, &hub));
    frame.line.store().children = others;
    BTreeMap::into_values(its_own).for_each(Child::orphan);
    block_on(Box::pin({
        let hub = hub.clone();
        async move { hub.drain().await }
    }));
    result.unwrap_or_else(|payload| resume_unwind(payload));
    frame.end(node, outcome::OK);
}

fn is_of(child: &Child, hub: &Arc<Hub>) -> bool {
    child.hub.as_ref().is_some_and(|its| Arc::ptr_eq(its, hub))
}

/// Runs a future to its end in the running context itself.
fn drive(frame: &Frame, node: usize) {
    let [flavour] = frame.number(node);
    let by_hand = frame.by_hand();
    let mut body: Body = Box::pin(async move { awaited::inner(&by_hand, node, 0).await });
    if frame.blocks && flavour == 1 {
        Builder::new_current_thread().build().expect("the system can make a runtime").block_on(body);
    } else {
        while body.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())).is_pending() {}
    }
    frame.end(node, outcome::OK);
}

/// Polls a future with a context of its own some times, here or on a thread for each, and drops it, here or there.
fn hop(frame: &Frame, node: usize) {
    let [polls, elsewhere, handler] = frame.number(node);
    let mut by_hand = frame.by_hand();
    if elsewhere != 0 {
        by_hand.hub = None;
        by_hand.pinned = false;
    }
    let body: Body = Box::pin(async move { awaited::inner(&by_hand, node, 0).await });
    let body = if handler < 0 { body.in_current_handler() } else { body.with_handler(numbered(handler)) };
    let mut body = Box::pin(body);
    for _ in 0..polls {
        let poll = || body.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
        if call_on(elsewhere & 1 != 0, poll) == Poll::Ready(()) {
            return frame.end(node, outcome::OK);
        }
    }
    call_on(elsewhere & 2 != 0, || drop(body));
    frame.end(node, outcome::DROPPED);
}

fn call_on<R: Send>(elsewhere: bool, work: impl FnOnce() -> R + Send) -> R {
    if !elsewhere {
        return work();
    }
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|payload| resume_unwind(payload))
}

/// Waits for a future on a thread that may block.
fn block_on<R>(future: impl Future<Output = R>) -> R {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}
