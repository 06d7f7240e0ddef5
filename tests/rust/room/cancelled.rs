//! A wait for room that is dropped at any of its await points: each test repeats one program for k = 0, 1, 2, ...,
//! polls the future k times and drops it then, until it is ready before that.
//!
//! Between two polls the world goes on by a step: others come, leave, and give back what the subject waits for.

use super::{ready, reason, soon, until};
use ctxalloc::metrics::waits;
use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Error, NoRoom, Request, request};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

/// Counts how often it is woken. Who holds one is seen by its strong count.
#[derive(Default)]
struct Counting(AtomicUsize);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Ready when it is polled a second time.
fn a_moment() -> impl Future<Output = ()> {
    let mut is_over = false;
    std::future::poll_fn(move |_| if std::mem::replace(&mut is_over, true) { Poll::Ready(()) } else { Poll::Pending })
}

/// What is beside the subject: a budget of 1000 of which 600 are held, and one that comes to stand behind it.
struct World {
    budget: Budget,
    held: Option<Request>,
    before: Option<Admitting>,
    behind: Option<Admitting>,
    steps: usize,
}

const STEPS: usize = 5;

impl World {
    fn new() -> Self {
        let budget = Budget::new("waited for", Some(1000));
        let held = ready(&mut request().root().budget(&budget).reserve_bytes(600).admit()).unwrap();
        Self { budget, held: Some(held), before: None, behind: None, steps: 0 }
    }

    fn wanting(&self, bytes: usize) -> Admitting {
        request().root().budget(&self.budget).reserve_bytes(bytes).admit()
    }

    /// One step: each changes what the subject's next poll may find.
    fn go_on(&mut self) {
        match self.steps {
            1 => self.behind = Some(self.wanting(400)), // there is room for it, and it does not pass the subject
            2 => self.before = Some(self.wanting(0)),
            3 => drop(self.before.take()), // the queue is looked at once more, for nothing
            4 => {
                let waited = self.budget.waiting();
                drop(self.held.take());
                until("the room is given", || waited == 0 || self.budget.waiting() < waited);
            }
            _ => {}
        }
        self.steps += 1;
    }

    /// After the subject's end, at whatever point: the other gets its turn, and nothing is left.
    fn check(mut self) {
        // Before anything else happens: there is room for it, also beside what is held.
        if let Some(mut behind) = self.behind.take() {
            drop(soon(&mut behind).expect("its turn was passed on"));
        }
        while self.steps < STEPS {
            self.go_on();
        }
        if let Some(mut behind) = self.behind.take() {
            drop(soon(&mut behind).expect("nobody is before it"));
        }
        let budget = &self.budget;
        until("everything is as before", || {
            (budget.in_use_bytes(), budget.reserved_bytes(), budget.waiting()) == (0, 0, 0)
        });
        assert!(waits(usize::MAX).iter().all(|one| one.budget_id != budget.id()), "it is listed no more");
        // Nobody of its name waits any more, so one may, and a second one may not.
        let all = ready(&mut self.wanting(1000)).unwrap();
        let again = || named(budget).reserve_bytes(1).max_waiting(1).admit();
        let one = again();
        assert_eq!((reason(ready(&mut again())), budget.waiting()), (NoRoom::QueueIsFull, 1));
        drop((all, one));
    }
}

/// Named as its test: those of a name are counted in the whole process.
fn named(budget: &Budget) -> ctxalloc::request::Builder {
    let of_test = thread::current();
    request().root().name(of_test.name().unwrap_or("a test")).budget(budget)
}

type Subject = Pin<Box<dyn Future<Output = Result<(), Error>>>>;

/// Polls what `subject` makes k times and drops it, for each k; with one waker, or with another one at each poll.
fn drop_at_each_point(subject: impl Fn(Budget) -> Subject) {
    for changes in [false, true] {
        let mut polls = 0;
        while !poll_and_drop(&subject, polls, changes) {
            polls += 1;
        }
        assert!(polls > STEPS, "it waited on its way: {polls}");
    }
}

/// Whether it was ready before it was dropped.
fn poll_and_drop(subject: impl Fn(Budget) -> Subject, polls: usize, changes: bool) -> bool {
    let mut world = World::new();
    let mut wakers = vec![Arc::new(Counting::default())];
    let mut future = subject(world.budget.clone());
    let mut answer = Poll::Pending;
    for number in 0..polls {
        if changes && number > 0 {
            wakers.push(Arc::new(Counting::default()));
        }
        let current = wakers.last().expect("there is one");
        answer = pin!(&mut future).poll(&mut Context::from_waker(&Waker::from(Arc::clone(current))));
        // One that is being woken just now is let go of in a moment.
        let old = &wakers[..wakers.len() - 1];
        until("only the last one can be woken", || old.iter().all(|old| Arc::strong_count(old) == 1));
        if answer.is_ready() {
            break;
        }
        world.go_on();
    }
    drop(future);
    world.check();
    until("nobody can wake it any more", || wakers.iter().all(|waker| Arc::strong_count(waker) == 1));
    let woken: usize = wakers.iter().map(|waker| waker.0.load(Ordering::SeqCst)).sum();
    assert!(woken <= 1, "once at most, when its turn had come: {woken}");
    match answer {
        Poll::Ready(answer) => answer.map(|()| assert_eq!(woken, 1)).expect("it had its turn"),
        Poll::Pending => return false,
    }
    true
}

/// Some work of a request that was admitted, with await points of its own.
async fn work(request: Request) -> Result<(), Error> {
    a_moment().await;
    let block = request
        .scope(async {
            let block = Buffer::zeroed(100)?;
            a_moment().await;
            Ok::<_, Error>(block)
        })
        .await?;
    a_moment().await;
    let report = request.end();
    a_moment().await;
    drop(block);
    assert_eq!(report.escaped_bytes, 100);
    Ok(())
}

#[test]
fn one_that_waits_leaves_nothing_wherever_it_is_dropped() {
    drop_at_each_point(|budget| {
        Box::pin(async move {
            a_moment().await;
            work(named(&budget).reserve_bytes(800).admit().await?).await
        })
    });
}

#[test]
fn one_that_waits_with_a_timeout_leaves_nothing_wherever_it_is_dropped() {
    drop_at_each_point(|budget| {
        Box::pin(async move {
            a_moment().await;
            let patient = named(&budget).reserve_bytes(800).timeout(Duration::from_secs(3600));
            work(patient.admit().await?).await
        })
    });
}

#[test]
fn one_that_waits_with_another_inside_leaves_nothing() {
    drop_at_each_point(|budget| {
        Box::pin(async move {
            a_moment().await;
            let outer = named(&budget).reserve_bytes(800).admit().await?;
            outer
                .scope(async {
                    a_moment().await;
                    work(request().reserve_bytes(300).admit().await?).await
                })
                .await
        })
    });
}

#[test]
#[cfg_attr(miri, ignore = "needs a runtime")]
fn one_that_waits_in_a_tokio_task_leaves_nothing_wherever_it_is_aborted() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for turns in 0.. {
        let mut world = World::new();
        let budget = world.budget.clone();
        let is_done = runtime.block_on(async {
            let task = tokio::spawn(async move {
                tokio::task::yield_now().await;
                let request = named(&budget).reserve_bytes(800).admit().await?;
                tokio::task::yield_now().await;
                let block = request.run(|| Buffer::zeroed(100))?;
                tokio::task::yield_now().await;
                drop(block);
                Ok::<_, Error>(())
            });
            for _ in 0..turns {
                tokio::task::yield_now().await; // each other task runs once, if it is woken
                world.go_on();
            }
            task.abort();
            match task.await {
                Ok(answer) => answer.map(|()| true).expect("it had its turn"),
                Err(error) => {
                    assert!(error.is_cancelled());
                    false
                }
            }
        });
        world.check();
        if is_done {
            assert!(turns > STEPS);
            break;
        }
    }
}
