//! Probes: values that report in which context they are destroyed, and threads that run code in their last moments.

use ctxalloc::{Handler, current};
use std::cell::RefCell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ThreadId};

/// Reports the handler and the thread of its destruction.
#[derive(Debug)]
pub(crate) struct DropProbe(Sender<(Handler, ThreadId)>);

impl Drop for DropProbe {
    fn drop(&mut self) {
        // Nobody may be listening any more.
        let _heard = self.0.send((current(), thread::current().id()));
    }
}

/// What became of a [`DropProbe`].
pub(crate) struct Dropped(Receiver<(Handler, ThreadId)>);

impl Dropped {
    /// Waits until it was dropped: where, and on which thread.
    pub(crate) fn wait(&self) -> (Handler, ThreadId) {
        // The bound is a watchdog: a value that is kept for ever fails the test instead of hanging it.
        self.0.recv_timeout(std::time::Duration::from_secs(60)).expect("it is dropped once")
    }

    /// Waits until it was dropped: where.
    pub(crate) fn handler(&self) -> Handler {
        self.wait().0
    }

    /// Whether it still lives.
    pub(crate) fn not_yet(&self) -> bool {
        self.0.try_recv().is_err()
    }
}

pub(crate) fn drop_probe() -> (DropProbe, Dropped) {
    let (sender, receiver) = channel();
    (DropProbe(sender), Dropped(receiver))
}

/// Runs `last` in a thread-local destructor of a new thread, after `first` ran in the thread; returns what `last` did.
///
/// `hook_first` says whether the destructor is registered before or after `first`: thread-locals are destroyed in no
/// promised order, and both have to work.
pub(crate) fn in_a_dying_thread<T: Send + 'static>(
    hook_first: bool,
    first: impl FnOnce() + Send + 'static,
    last: impl FnOnce() -> T + Send + 'static,
) -> T {
    struct Last(Option<Box<dyn FnOnce()>>);
    impl Drop for Last {
        fn drop(&mut self) {
            if let Some(work) = self.0.take() {
                work();
            }
        }
    }
    thread_local! {
        static LAST: RefCell<Last> = const { RefCell::new(Last(None)) };
    }
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let hook = move || {
            LAST.with_borrow_mut(|place| {
                place.0 = Some(Box::new(move || {
                    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(last));
                    drop(sender.send(outcome));
                }));
            });
        };
        if hook_first {
            hook();
            first();
        } else {
            first();
            hook();
        }
    })
    .join()
    .expect("the thread's own work");
    receiver.recv().expect("the destructor ran").expect("the destructor's work")
}
