//! One run of one program: its trace, the loops that it runs on, and where a body stands (`Frame`).

use crate::line::{Ending, Line};
use crate::program::{Node, Program};
use crate::stream::Items;
use crate::trace::{Trace, outcome, seen};
use crate::words;
use ctxalloc::{Context, WithHandler};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::LocalSet;

/// A body on its way.
pub(crate) type Body = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How tasks are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// tokio's current_thread runtime.
    Current,
    /// tokio's multi_thread runtime.
    Multi,
    /// `spawn_local` on a `LocalSet`.
    Local,
}

/// What all lines of a program share.
pub(crate) struct Run {
    program: Program,
    trace: Trace,
    threads: Mutex<Vec<Arc<Line>>>,
    random: AtomicU64,
}

/// An event loop, and the lines that were started on it.
pub(crate) struct Hub {
    pub(crate) mode: Mode,
    lines: Mutex<Vec<Arc<Line>>>,
}

impl Hub {
    pub(crate) fn new(mode: Mode) -> Arc<Self> {
        Arc::new(Self { mode, lines: Mutex::default() })
    }

    pub(crate) fn add(&self, line: &Arc<Line>) {
        push(&self.lines, line);
    }

    /// Waits until nothing runs on the loop any more.
    pub(crate) async fn drain(&self) {
        drain(&self.lines).await;
    }
}

fn push(lines: &Mutex<Vec<Arc<Line>>>, line: &Arc<Line>) {
    lines.lock().unwrap_or_else(PoisonError::into_inner).push(line.clone());
}

async fn drain(lines: &Mutex<Vec<Arc<Line>>>) {
    loop {
        let Some(line) = lines.lock().unwrap_or_else(PoisonError::into_inner).pop() else { return };
        line.ended().await;
    }
}

/// Where a body runs.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) run: Arc<Run>,
    pub(crate) line: Arc<Line>,
    pub(crate) hub: Option<Arc<Hub>>,
    /// What `next` asks.
    pub(crate) items: Option<Items>,
    /// How `emit` says that there is an item.
    pub(crate) emitted: Option<Arc<AtomicBool>>,
    /// It is stepped by hand: a `yield` suspends exactly once, and nothing else does.
    pub(crate) by_hand: bool,
    /// It stays on one thread.
    pub(crate) pinned: bool,
    /// A thread of its own, which may block.
    pub(crate) blocks: bool,
    /// Nothing may suspend it.
    pub(crate) is_sync: bool,
}

impl Frame {
    /// A new line: a task of a loop, or a thread of its own.
    fn new(run: &Arc<Run>, line: &Arc<Line>, hub: Option<&Arc<Hub>>) -> Self {
        Self {
            run: run.clone(),
            line: line.clone(),
            hub: hub.cloned(),
            items: None,
            emitted: None,
            by_hand: false,
            pinned: hub.is_none_or(|hub| hub.mode != Mode::Multi),
            blocks: hub.is_none(),
            is_sync: false,
        }
    }

    pub(crate) fn of_line(&self, line: &Arc<Line>, hub: Option<&Arc<Hub>>) -> Self {
        Self::new(&self.run, line, hub)
    }

    /// The same, stepped by hand.
    pub(crate) fn by_hand(&self) -> Self {
        Self { by_hand: true, blocks: false, is_sync: false, items: None, emitted: None, ..self.clone() }
    }

    pub(crate) fn node(&self, node: usize) -> &Node {
        &self.run.program.nodes[node]
    }

    pub(crate) fn number<const N: usize>(&self, node: usize) -> [i64; N] {
        self.node(node).numbers.first_chunk().copied().expect("language.py gives every word its numbers")
    }

    pub(crate) fn begin(&self, node: usize) {
        self.run.trace.begin(node, outcome::OK, seen());
    }

    pub(crate) fn begin_seeing(&self, node: usize, handler: ctxalloc::Handler) {
        self.run.trace.begin(node, outcome::OK, handler);
    }

    pub(crate) fn end(&self, node: usize, outcome: u8) {
        self.run.trace.end(node, outcome, seen());
    }

    pub(crate) fn end_seeing(&self, node: usize, handler: ctxalloc::Handler) {
        self.run.trace.end(node, outcome::OK, handler);
    }

    pub(crate) fn add_thread(&self, line: &Arc<Line>) {
        push(&self.run.threads, line);
    }

    /// Whether plain threads start with a copy of their starter's context (Python's `thread_inherit_context`).
    pub(crate) fn threads_inherit(&self) -> bool {
        self.number::<1>(0) == [1]
    }

    /// A number below `limit` that no trace depends on.
    pub(crate) fn random(&self, limit: u64) -> u64 {
        // Relaxed: any mixture will do. (Weyl sequence through one round of a mixer.)
        let mut x = self.run.random.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (x ^ (x >> 31)) % limit
    }
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
            words::call(&Frame { blocks: false, ..self.frame.clone() }, self.node, 1);
        }
    }
}

/// A future that owns what is to end with it: `ending` of a task or a scoped future, `cleanup` of a producer.
///
/// That goes when the future is dropped, which is after its last poll: whoever drops it must do so in its context.
pub(crate) struct Owning {
    body: Body,
    last: Cleanup,
    _line: Option<Ending>,
}

impl Owning {
    /// The first body of a node; the second one ends it, where there is one.
    pub(crate) fn new(frame: &Frame, node: usize, line: Option<Ending>) -> Self {
        let last = Cleanup { frame: frame.clone(), node, is_due: false };
        Self { body: words::inner(frame, node), last, _line: line } // these go in this order
    }
}

impl Future for Owning {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<()> {
        self.last.is_due = true; // what was never started has nothing to end, as for a coroutine
        self.body.as_mut().poll(cx)
    }
}

/// A task from its first poll to its last.
pub(crate) fn line(frame: &Frame, node: usize) -> Owning {
    Owning::new(frame, node, Some(Ending(frame.line.clone())))
}

/// The runtimes, used for program after program.
pub(crate) struct Runtimes {
    current: Runtime,
    multi: Runtime,
}

impl Runtimes {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            current: Builder::new_current_thread().build()?,
            multi: Builder::new_multi_thread().worker_threads(3).build()?,
        })
    }

    /// The trace of a program.
    pub(crate) fn run(&self, program: Program, mode: Mode, seed: u64) -> String {
        let run = Arc::new(Run {
            trace: Trace::new(program.nodes.len()),
            program,
            threads: Mutex::default(),
            random: AtomicU64::new(seed),
        });
        let hub = Hub::new(mode);
        let frame = Frame::new(&run, &Line::new(true), Some(&hub));
        let main = line(&frame, 0).in_context(Context::new());
        let all = async move {
            if mode == Mode::Multi {
                drop(tokio::spawn(main).await); // `raise` may have ended it
            } else {
                drop(AssertUnwindSafe(main).catch_unwind().await);
            }
            hub.drain().await;
            drain(&run.threads).await;
            run.trace.text()
        };
        let mut text = match mode {
            Mode::Current => self.current.block_on(all),
            Mode::Multi => self.multi.block_on(all),
            Mode::Local => LocalSet::new().block_on(&self.current, all),
        };
        if seen() != ctxalloc::default_handler() {
            text.push_str("leaked"); // into the thread that polled
        }
        text
    }
}

/// A private thread that takes jobs one by one, and keeps its own context between them.
pub(crate) struct Worker(Option<Runtime>);

impl Worker {
    pub(crate) fn new() -> Self {
        const FOR_EVER: Duration = Duration::from_secs(1 << 40);
        let runtime = Builder::new_current_thread().max_blocking_threads(1).thread_keep_alive(FOR_EVER).build();
        Self(Some(runtime.expect("the system can make a runtime")))
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.0.as_ref().expect("there until it is dropped").handle()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background(); // the last job is over; a blocking wait is not allowed everywhere
        }
    }
}
