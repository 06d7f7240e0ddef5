//! What each word does in Rust. start.rs has those that start a line, and stream.rs what makes a stream.
//!
//! Every word is a future that gives its outcome. A synchronous body is one whose futures never suspend
//! (`frame.is_sync`): there `scope` can be used, and waiting blocks the thread.

use crate::hold::{Hold, Stretch, of_reset};
use crate::line::{Boom, Child, of_panic, of_task};
use crate::run::{Body, Cleanup, Frame, Hub, Mode, Owning};
use crate::suspend::{block_on, yield_now};
use crate::trace::{numbered, outcome, wanted};
use crate::{start, stream};
use ctxalloc::{Buffer, Context, Token, WithHandler, default_handler, reset, scope, set};
use futures::FutureExt;
use futures::future::{Either, join, select};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// `kind` of `spawn`, and `flavour` of `scoped`.
pub(crate) const CARRYING: i64 = 0;
pub(crate) const PLAIN: i64 = 1;
pub(crate) const IN_CONTEXT: i64 = 2;
pub(crate) const WITH_HANDLER: i64 = 3;

/// The first body of a node, begun in the trace.
pub(crate) fn inner(frame: &Frame, node: usize) -> Body {
    let frame = frame.clone();
    Box::pin(async move {
        frame.begin(node);
        run(&frame, node, 0).await;
    })
}

/// One body of a node.
pub(crate) fn run(frame: &Frame, node: usize, body: usize) -> Body {
    let frame = frame.clone();
    Box::pin(async move {
        for &step in &frame.node(node).bodies[body] {
            step_of(&frame, step).await;
        }
    })
}

/// The first body of a node as a synchronous function.
pub(crate) fn call_inner(frame: &Frame, node: usize) {
    frame.begin(node);
    call(frame, node, 0);
}

/// One body of a node as a synchronous function.
pub(crate) fn call(frame: &Frame, node: usize, body: usize) {
    let mut steps = run(&Frame { is_sync: true, ..frame.clone() }, node, body);
    let poll = steps.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
    assert!(poll.is_ready(), "a synchronous body suspended: language.py should not allow that");
}

async fn step_of(frame: &Frame, node: usize) {
    let outcome = match frame.node(node).word.as_str() {
        // The selection of the running context.
        "look" => match frame.number(node) {
            [0] => outcome::OK,
            _ => return frame.end_seeing(node, Buffer::zeroed(8).expect("eight bytes").handler()),
        },
        "set" => {
            let [label, handler] = frame.number(node);
            let token = set(wanted(handler));
            frame.begin_seeing(node, token.old_handler().unwrap_or_else(default_handler));
            frame.line.store().tokens.insert(label, token);
            outcome::OK
        }
        "reset" => {
            let [label] = frame.number(node);
            frame.line.store().tokens.get(&label).map_or(outcome::NOTHING_THERE, reset_once)
        }
        "enter" => {
            let [label, handler] = frame.number(node);
            let hold = Hold::enter(&frame.line, label, handler, frame.pinned);
            frame.line.store().holds.push((label, hold));
            outcome::OK
        }
        "leave" => leave(frame, node),
        "with" => with(frame, node).await,
        // Ways out of a body.
        "try" => {
            let _cleanup = Cleanup { frame: frame.clone(), node, is_due: true };
            inner(frame, node).await;
            outcome::OK
        }
        "catch" => {
            let result = AssertUnwindSafe(inner(frame, node)).catch_unwind().await;
            result.map_or_else(|payload| of_panic(&*payload), |()| outcome::OK)
        }
        "raise" => {
            frame.end(node, outcome::OK);
            resume_unwind(Box::new(Boom)) // a panic without the hook's message
        }
        // Contexts as values.
        "copy" => keep(frame, node, Some(Context::copy_current())),
        "fresh" => keep(frame, node, Some(Context::new())),
        "clone" => {
            let [_, of] = frame.number(node);
            let clone = frame.line.store().contexts.get(&of).cloned();
            keep(frame, node, clone)
        }
        "peek" => {
            let [label] = frame.number(node);
            let handler = frame.line.store().contexts.get(&label).map(Context::handler);
            handler.map_or(outcome::NOTHING_THERE, |handler| {
                frame.begin_seeing(node, handler);
                outcome::OK
            })
        }
        "run" => run_in(frame, node),
        // Lines, and how they wait for each other.
        "spawn" => start::spawn(frame, node),
        "thread" => start::thread(frame, node),
        "job" => start::job(frame, node),
        "work" => {
            let (job, worker) = start::work(frame, node);
            let result = if frame.is_sync { block_on(job.handle) } else { job.handle.await };
            start::take_back_worker(frame, node, &job.line, worker);
            of_task(result)
        }
        "join" => {
            let [label] = frame.number(node);
            let child = frame.line.store().children.remove(&label);
            let Some(child) = child else { return frame.end(node, outcome::NOTHING_THERE) };
            let line = child.line.clone();
            line.set_free();
            let outcome = if frame.is_sync { child.outcome_by_blocking() } else { child.outcome().await };
            frame.line.take_back(&line);
            outcome
        }
        "gate" => {
            frame.begin(node);
            frame.line.pass_gate().await;
            outcome::OK
        }
        "open" => open(frame, node).await,
        "cancel" => cancel(frame, node).await,
        "yield" => {
            frame.begin(node);
            yield_now(frame).await;
            outcome::OK
        }
        "loop" => nested_loop(frame, node),
        // Futures driven by hand, in a context of their own, or in turns in one.
        "scoped" => scoped(frame, node).await,
        "drive" => drive(frame, node),
        "hop" => hop(frame, node),
        "both" => {
            frame.begin(node);
            let by_hand = frame.by_hand();
            join(run(&by_hand, node, 0), run(&by_hand, node, 1)).await;
            outcome::OK
        }
        "race" => {
            frame.begin(node);
            let by_hand = frame.by_hand();
            match select(run(&by_hand, node, 0), run(&by_hand, node, 1)).await {
                Either::Left(_) => outcome::FIRST,
                Either::Right(_) => outcome::SECOND,
            }
        }
        "stream" => stream::stream(frame, node).await,
        "emit" => stream::emit(frame, node).await,
        "next" => stream::next(frame, node).await,
        word => panic!("{word:?} is no word of language.py that stands in a body"),
    };
    frame.end(node, outcome);
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

fn leave(frame: &Frame, node: usize) -> u8 {
    let [label] = frame.number(node);
    let hold = {
        let holds = &mut frame.line.store().holds;
        holds.iter().position(|(held, _)| *held == label).map(|at| holds.remove(at).1)
    };
    hold.map_or(outcome::NOTHING_THERE, Hold::leave)
}

async fn with(frame: &Frame, node: usize) -> u8 {
    let [flavour, handler] = frame.number(node);
    if frame.is_sync && flavour == 2 {
        scope(numbered(handler), || call_inner(frame, node));
        return outcome::OK;
    }
    let stays = frame.pinned || frame.is_sync;
    let stretch = Stretch::enter(&frame.line, node, handler, stays && flavour == 1);
    inner(frame, node).await;
    stretch.leave()
}

fn keep(frame: &Frame, node: usize, context: Option<Context>) -> u8 {
    let [label] = frame.number(node);
    let outcome = if context.is_some() { outcome::OK } else { outcome::NOTHING_THERE };
    frame.line.store().contexts.extend(context.map(|context| (label, context)));
    outcome
}

fn run_in(frame: &Frame, node: usize) -> u8 {
    let [label] = frame.number(node);
    let context = frame.line.store().contexts.remove(&label); // gone while it runs
    let Some(mut context) = context else { return outcome::NOTHING_THERE };
    let result = catch_unwind(AssertUnwindSafe(|| context.run(|| call_inner(frame, node))));
    frame.line.store().contexts.insert(label, context);
    result.unwrap_or_else(|payload| resume_unwind(payload));
    outcome::OK
}

async fn open(frame: &Frame, node: usize) -> u8 {
    let [label] = frame.number(node);
    let line = {
        let store = frame.line.store();
        store.children.get(&label).filter(|child| child.is_task()).map(|child| child.line.clone())
    };
    match line {
        None => outcome::NOTHING_THERE,
        Some(line) if line.is_at_gate().await => {
            line.open();
            outcome::OK
        }
        Some(_) => outcome::ENDED,
    }
}

async fn cancel(frame: &Frame, node: usize) -> u8 {
    let [label, flavour] = frame.number(node);
    let child = {
        let children = &mut frame.line.store().children;
        let is_task = children.get(&label).is_some_and(Child::is_task);
        if is_task { children.remove(&label) } else { None }
    };
    let Some(child) = child else { return outcome::NOTHING_THERE };
    let line = child.line.clone();
    let outcome = if line.is_at_gate().await { child.cancel(flavour).await } else { child.outcome().await };
    frame.line.take_back(&line);
    outcome
}

/// A runtime of its own, on this thread, inside whatever scopes are open here.
fn nested_loop(frame: &Frame, node: usize) -> u8 {
    let mode = if node.is_multiple_of(2) { Mode::Current } else { Mode::Local };
    let hub = Hub::new(mode);
    let runtime = Builder::new_current_thread().build().expect("the system can make a runtime");
    let local = LocalSet::new();
    let run_there = |body: Body| {
        if mode == Mode::Local {
            local.block_on(&runtime, body.in_current_handler());
        } else {
            runtime.block_on(body.in_current_handler());
        }
    };
    let inside = Frame { hub: Some(hub.clone()), blocks: false, pinned: true, is_sync: false, ..frame.clone() };
    let result = catch_unwind(AssertUnwindSafe(|| run_there(inner(&inside, node))));
    let children = std::mem::take(&mut frame.line.store().children);
    let (its_own, others) = children.into_iter().partition(|(_, child)| is_of(child, &hub));
    frame.line.store().children = others;
    BTreeMap::into_values(its_own).for_each(Child::orphan);
    run_there(Box::pin(async move { hub.drain().await }));
    result.unwrap_or_else(|payload| resume_unwind(payload));
    outcome::OK
}

fn is_of(child: &Child, hub: &Arc<Hub>) -> bool {
    child.hub.as_ref().is_some_and(|its| Arc::ptr_eq(its, hub))
}

async fn scoped(frame: &Frame, node: usize) -> u8 {
    let [flavour, with] = frame.number(node);
    let body = Owning::new(frame, node, None);
    match flavour {
        IN_CONTEXT => {
            let context = frame.line.store().contexts.remove(&with);
            let Some(context) = context else { return outcome::NOTHING_THERE };
            body.in_context(context).await;
        }
        WITH_HANDLER => body.with_handler(numbered(with)).await,
        _ => body.in_current_handler().await,
    }
    outcome::OK
}

/// Runs a future to its end in the running context itself.
fn drive(frame: &Frame, node: usize) -> u8 {
    let [flavour] = frame.number(node);
    let mut body = inner(&frame.by_hand(), node);
    if frame.blocks && flavour == 1 {
        Builder::new_current_thread().build().expect("the system can make a runtime").block_on(body);
    } else {
        while body.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())).is_pending() {}
    }
    outcome::OK
}

/// Polls a future with a context of its own some times, here or on a thread for each, and drops it, here or there.
fn hop(frame: &Frame, node: usize) -> u8 {
    let [polls, elsewhere, handler] = frame.number(node);
    let mut by_hand = frame.by_hand();
    if elsewhere != 0 {
        by_hand = Frame { hub: None, pinned: false, ..by_hand };
    }
    let body = inner(&by_hand, node);
    let body = if handler < 0 { body.in_current_handler() } else { body.with_handler(numbered(handler)) };
    let mut body = Box::pin(body);
    for _ in 0..polls {
        let poll = || body.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
        if call_on(elsewhere & 1 != 0, poll) == Poll::Ready(()) {
            return outcome::OK;
        }
    }
    call_on(elsewhere & 2 != 0, || drop(body));
    outcome::DROPPED
}

fn call_on<R: Send>(elsewhere: bool, work: impl FnOnce() -> R + Send) -> R {
    if !elsewhere {
        return work();
    }
    thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|payload| resume_unwind(payload))
}
