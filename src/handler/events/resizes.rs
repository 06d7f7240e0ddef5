//! Resizes that are under way while there is a hook, and the events that wait for them.
//!
//! A resize gives up the old address before it is done, and is reported when it is done. Another thread may get that
//! address in between; its event would come first, as if one block began inside of another. So that event is queued
//! behind the resize, and the thread that resized delivers it after its own. The other thread does not wait: it may
//! hold the GIL.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;

/// What a hook is called with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) inp: *mut c_void,
    pub(super) outp: *mut c_void,
    pub(super) size_bytes: usize,
}

/// One resize, from before the old address may be given up until all events that wait for it are delivered.
#[derive(Debug)]
struct Resize {
    old: usize,
    thread: usize,
    /// The process that began it: a child of `fork` lacks the thread that would end it.
    process: u32,
    waiting: VecDeque<Event>,
}

impl Resize {
    /// Whether an event must wait until this resize, and all events that wait for it, are delivered.
    fn holds(&self, event: &Event) -> bool {
        let touches = |address: usize| address != 0 && (event.inp.addr() == address || event.outp.addr() == address);
        touches(self.old) || self.waiting.iter().any(|one| touches(one.inp.addr()) || touches(one.outp.addr()))
    }
}

/// All of them, the oldest first. Few: as many as threads resize at this moment.
#[derive(Debug)]
pub(super) struct Resizes(Vec<Resize>);

/// The process's, touched only by the copy of this crate that made the table, under its lock.
pub(super) static RESIZES: UnderTheLock = UnderTheLock(UnsafeCell::new(Resizes(Vec::new())));

pub(super) struct UnderTheLock(UnsafeCell<Resizes>);

// SAFETY: only `get` reaches it, whose caller holds the table's lock; the events' pointers are only handed on to hooks,
// which may be called on any thread.
unsafe impl Sync for UnderTheLock {}

impl UnderTheLock {
    /// # Safety
    /// - the caller holds the table's lock while it has the reference, and has no other one.
    #[expect(clippy::mut_from_ref, reason = "the table's lock makes it unique")]
    pub(super) unsafe fn get(&self) -> &mut Resizes {
        // SAFETY: one thread at a time holds the table's lock, and the caller promises that it has no other reference.
        unsafe { &mut *self.0.get() }
    }
}

impl Resizes {
    pub(super) fn begin(&mut self, old: usize, thread: usize) {
        let process = std::process::id();
        self.0.retain(|resize| resize.process == process);
        self.0.push(Resize { old, thread, process, waiting: VecDeque::new() });
    }

    /// Returns the event if it may be delivered now. Else queues it behind another thread's resize, with all that waits
    /// for it.
    pub(super) fn turn(&mut self, event: Event, thread: usize) -> Option<Event> {
        let Some(mut other) = self.holder(&event, thread) else { return Some(event) };
        let mut behind = VecDeque::new();
        if let Some(own) = self.own(&event, thread) {
            behind = self.0.remove(own).waiting;
            other -= usize::from(own < other);
        }
        let waiting = &mut self.0[other].waiting;
        waiting.push_back(event);
        waiting.append(&mut behind);
        None
    }

    /// Returns the event to deliver after `event`: the next one that waited for it. If none is left, its resize is
    /// over.
    pub(super) fn after(&mut self, event: Event, thread: usize) -> Option<Event> {
        loop {
            let own = self.own(&event, thread)?;
            let Some(next) = self.0[own].waiting.pop_front() else {
                self.0.remove(own);
                return None;
            };
            match self.holder(&next, thread) {
                // It waited for two resizes, and still has to wait for the other one.
                Some(other) => self.0[other].waiting.push_back(next),
                None => return Some(next),
            }
        }
    }

    /// Forgets the resize that `event` ends, and what waits for it.
    pub(super) fn end(&mut self, event: Event, thread: usize) {
        if let Some(own) = self.own(&event, thread) {
            self.0.remove(own);
        }
    }

    /// The index of the resize on this thread that `event` ends: the innermost one.
    fn own(&self, event: &Event, thread: usize) -> Option<usize> {
        let is_own = |resize: &Resize| resize.thread == thread && resize.old == event.inp.addr();
        if self.0.is_empty() || event.inp.is_null() { None } else { self.0.iter().rposition(is_own) }
    }

    /// The index of another thread's resize for which the event has to wait.
    fn holder(&mut self, event: &Event, thread: usize) -> Option<usize> {
        if self.0.is_empty() {
            return None;
        }
        let process = std::process::id();
        self.0.retain(|resize| resize.process == process);
        self.0.iter().position(|resize| resize.thread != thread && resize.holds(event))
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, Resizes};
    use std::ptr::without_provenance_mut;

    fn event(inp: usize, outp: usize, size_bytes: usize) -> Event {
        Event { inp: without_provenance_mut(inp), outp: without_provenance_mut(outp), size_bytes }
    }

    /// All events that are delivered once `event` of a thread is.
    fn reported(resizes: &mut Resizes, event: Event, thread: usize) -> Vec<Event> {
        let mut events = Vec::new();
        let mut next = resizes.turn(event, thread);
        while let Some(now) = next {
            events.push(now);
            next = resizes.after(event, thread);
        }
        events
    }

    #[test]
    fn what_happens_at_an_address_that_a_resize_left_is_reported_after_it() {
        let mut resizes = Resizes(Vec::new());
        resizes.begin(10, 1);
        assert_eq!(reported(&mut resizes, event(0, 10, 7), 2), []);
        assert_eq!(reported(&mut resizes, event(0, 90, 7), 2), [event(0, 90, 7)], "elsewhere");
        assert_eq!(reported(&mut resizes, event(10, 0, 0), 2), []);
        let all = [event(10, 20, 5), event(0, 10, 7), event(10, 0, 0)];
        assert_eq!(reported(&mut resizes, event(10, 20, 5), 1), all);
        assert!(resizes.0.is_empty());
        assert_eq!(reported(&mut resizes, event(0, 10, 7), 2), [event(0, 10, 7)]);
    }

    #[test]
    fn a_resize_that_waits_for_another_takes_along_what_waits_for_it() {
        let mut resizes = Resizes(Vec::new());
        resizes.begin(10, 1);
        resizes.begin(30, 2);
        assert_eq!(reported(&mut resizes, event(0, 30, 1), 3), [], "for the second");
        assert_eq!(reported(&mut resizes, event(30, 10, 2), 2), [], "for the first, with that");
        assert_eq!(reported(&mut resizes, event(30, 0, 0), 3), [], "behind what waits there");
        let all = [event(10, 20, 5), event(30, 10, 2), event(0, 30, 1), event(30, 0, 0)];
        assert_eq!(reported(&mut resizes, event(10, 20, 5), 1), all);
        assert!(resizes.0.is_empty());
    }

    #[test]
    fn a_resize_inside_of_a_resize_of_the_same_block_is_reported_as_it_ends() {
        let mut resizes = Resizes(Vec::new());
        resizes.begin(10, 1);
        resizes.begin(10, 1);
        assert_eq!(reported(&mut resizes, event(10, 20, 5), 1), [event(10, 20, 5)]);
        assert_eq!(reported(&mut resizes, event(0, 10, 7), 2), [], "the outer one is under way");
        assert_eq!(reported(&mut resizes, event(10, 20, 5), 1), [event(10, 20, 5), event(0, 10, 7)]);
        assert!(resizes.0.is_empty());
    }

    #[test]
    fn a_resize_that_cannot_be_reported_holds_nothing_back() {
        let mut resizes = Resizes(Vec::new());
        resizes.begin(10, 1);
        assert_eq!(reported(&mut resizes, event(0, 10, 7), 2), []);
        resizes.end(event(10, 20, 5), 1);
        assert_eq!(reported(&mut resizes, event(10, 0, 0), 2), [event(10, 0, 0)]);
    }
}
