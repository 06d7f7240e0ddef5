//! The words that start a line of execution, by each of the ways that ctxalloc and its neighbours have.

use crate::line::{Child, Ending, Line, Started};
use crate::run::{self, Frame, Hub, Mode, Owning, Worker};
use crate::trace::{numbered, outcome};
use crate::words::{self, CARRYING, IN_CONTEXT, PLAIN, WITH_HANDLER};
use ctxalloc::task::{self, JoinSet};
use ctxalloc::{Context, WithHandler};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// The line of a child with what it is given. The numbers are `label kind with gives...`.
fn new_line(frame: &Frame, node: usize, is_free: bool) -> Arc<Line> {
    let line = Line::new(is_free);
    frame.line.give(&frame.node(node).numbers[3..], &line);
    line
}

fn hub(frame: &Frame) -> &Arc<Hub> {
    frame.hub.as_ref().expect("language.py lets tasks and jobs start on a loop only")
}

pub(crate) fn spawn(frame: &Frame, node: usize) -> u8 {
    let [label, kind, with] = frame.number(node);
    let context = (kind == IN_CONTEXT).then(|| frame.line.store().contexts.remove(&with));
    if let Some(None) = context {
        return outcome::NOTHING_THERE;
    }
    let line = new_line(frame, node, false);
    let hub = hub(frame);
    hub.add(&line);
    let body = run::line(&frame.of_line(&line, Some(hub)), node);
    let is_local = hub.mode == Mode::Local;
    let started = match (kind, context.flatten()) {
        (CARRYING, _) if is_local => Started::Task(task::spawn_local(body)),
        (CARRYING, _) if hub.mode == Mode::Multi => Started::Task(task::spawn(body)),
        (CARRYING, _) => Started::Task(task::spawn_on(body, &Handle::current())),
        (PLAIN, _) => Started::Task(plain(is_local, body)),
        (IN_CONTEXT, Some(context)) => Started::Task(plain(is_local, body.in_context(context))),
        (WITH_HANDLER, _) => Started::Task(plain(is_local, body.with_handler(numbered(with)))),
        _ => set_of(is_local, body),
    };
    frame.line.store().children.insert(label, Child { line, hub: Some(hub.clone()), started });
    outcome::OK
}

/// Tokio's own way, which carries nothing.
fn plain(is_local: bool, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    if is_local { tokio::task::spawn_local(task) } else { tokio::spawn(task) }
}

fn set_of(is_local: bool, body: Owning) -> Started {
    let mut set = JoinSet::new();
    let abort = if is_local { set.spawn_local(body) } else { set.spawn(body) };
    Started::Set(set, abort)
}

/// A synchronous line, from its first step to its last.
fn sync_line(frame: Frame, node: usize) -> impl FnOnce() + Send + 'static {
    let ending = Ending(frame.line.clone());
    move || {
        let _ending = ending;
        words::call_inner(&frame, node);
    }
}

pub(crate) fn thread(frame: &Frame, node: usize) -> u8 {
    let [label, kind, with] = frame.number(node);
    let context = (kind == IN_CONTEXT).then(|| frame.line.store().contexts.remove(&with));
    if let Some(None) = context {
        return outcome::NOTHING_THERE;
    }
    let line = new_line(frame, node, true);
    frame.add_thread(&line);
    let body = sync_line(frame.of_line(&line, None), node);
    let handle = match (kind, context.flatten()) {
        (IN_CONTEXT, Some(context)) => std::thread::spawn(context.wrap(body)),
        (PLAIN, _) if !frame.threads_inherit() => std::thread::spawn(body),
        (CARRYING | PLAIN, _) => ctxalloc::thread::spawn(body),
        _ => {
            let builder = std::thread::Builder::new().name("wrapped".into());
            builder.spawn(Context::copy_current().wrap(body)).expect("the system can start a thread")
        }
    };
    frame.line.store().children.insert(label, Child { line, hub: None, started: Started::Thread(handle) });
    outcome::OK
}

pub(crate) fn job(frame: &Frame, node: usize) -> u8 {
    let [label, kind] = frame.number(node);
    let line = new_line(frame, node, true);
    let hub = hub(frame);
    hub.add(&line);
    let body = sync_line(frame.of_line(&line, None), node);
    let started = match kind {
        CARRYING => Started::Job(task::spawn_blocking(body)),
        PLAIN => Started::Job(tokio::task::spawn_blocking(body)),
        _ => {
            let mut set = JoinSet::new();
            set.spawn_blocking(body);
            Started::Jobs(set)
        }
    };
    frame.line.store().children.insert(label, Child { line, hub: Some(hub.clone()), started });
    outcome::OK
}

/// A job of a private worker.
pub(crate) struct Job {
    pub(crate) line: Arc<Line>,
    pub(crate) handle: JoinHandle<()>,
}

/// Hands a job to a private worker. The worker is gone from the line while it works: its job must not wait for it.
pub(crate) fn work(frame: &Frame, node: usize) -> (Job, Worker) {
    let [label, kind] = frame.number(node);
    let worker = frame.line.store().workers.remove(&label).unwrap_or_else(Worker::new);
    let line = new_line(frame, node, true);
    let body = sync_line(frame.of_line(&line, None), node);
    let handle = if kind == PLAIN {
        worker.handle().spawn_blocking(body)
    } else {
        task::spawn_blocking_on(body, worker.handle())
    };
    (Job { line, handle }, worker)
}

/// Takes back what the job had, and the worker.
pub(crate) fn take_back_worker(frame: &Frame, node: usize, line: &Line, worker: Worker) {
    let [label] = frame.number(node);
    frame.line.take_back(line);
    frame.line.store().workers.insert(label, worker);
}
