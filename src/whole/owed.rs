//! What a thread owes the request that is selected on it: to be told of a block that it was given beyond a limit.

use super::binding::Runs;
use super::decider::Decider;
use super::shared::{Kind, NOT_RAISING, NOTED, OWED, PASS, RAISED, REFUSED, REFUSED_ONE, REFUSES, Thread, handler_of};
use super::walk::Answer;
use crate::handler::Handler;
use crate::handler::requests::{Payer, imports_around, is_untold, tell_by_null};
use std::ptr::null_mut;

/// So much is looked at block by block after one was granted, since its own code will most likely ask for one of these:
/// a look at one of Python's takes a microsecond, and at another a tenth. Then it is others' that runs, and for longer.
const LOOKED_AT: u64 = 1024;
const LOOK: u64 = 1;
const LOOK_AT_PYTHONS: u64 = 16;

impl Decider {
    /// What this thread owes, or has refused, before it decides about another block.
    #[cold]
    #[inline(never)]
    pub(super) fn look_what_is_owed(&self, thread: &mut Thread, selected: Option<Handler>) {
        if thread.raising == REFUSED_ONE {
            self.look_who_dropped(thread, selected);
        }
        if thread.raising == OWED {
            (self.binding.owes)(thread);
            Self::look_soon_if_owed(thread);
        }
    }

    /// A small block that is no sample is looked at for what the thread owes alone.
    #[cold]
    #[inline(never)]
    pub(super) fn look_at_no_sample(
        &self,
        thread: &mut Thread,
        kind: Kind,
        is_new: bool,
        selected: Option<Handler>,
        answer: impl FnOnce() -> Answer,
    ) -> (u32, *mut u8) {
        if thread.raising == REFUSES {
            thread.refused_in += if kind == Kind::Native { LOOK } else { LOOK_AT_PYTHONS };
            let may_be_refused = is_new && thread.resize == 0 && kind != Kind::Native;
            if may_be_refused && self.refuses_now(thread, selected, answer) {
                return (REFUSED, null_mut());
            }
            Self::look_soon_if_owed(thread);
        }
        (PASS, null_mut())
    }

    /// Whether the block is the first one that a request's own code asks for, since a small one was given to it where
    /// nothing may be refused.
    #[cold]
    fn refuses_now(&self, thread: &mut Thread, selected: Option<Handler>, answer: impl FnOnce() -> Answer) -> bool {
        let Some(handler) = selected.filter(|&handler| is_untold(handler)) else {
            thread.raising = NOT_RAISING; // others run, or somebody told it
            return false;
        };
        if (self.binding.is_observing)() {
            thread.look_soon(); // what is observed may ask for much less than what observes
            return false;
        }
        let runs_own = || matches!((self.binding.runs)(imports_around(handler)), Runs::Own);
        if answer().refuses() && runs_own() {
            thread.refused_in = self.called_by_loop();
            thread.raising = REFUSED_ONE;
            thread.look_soon();
            return true;
        }
        false
    }

    fn called_by_loop(&self) -> u64 {
        self.binding.python.map_or(0, |python| python.called_by_loop()) as u64
    }

    /// One block was refused, and this is the next one. Where the error goes on, that is of a traceback; where the same
    /// call goes on without an error, it has dropped that, and another block is to be refused.
    #[cold]
    fn look_who_dropped(&self, thread: &mut Thread, selected: Option<Handler>) {
        thread.raising = NOT_RAISING;
        let Some(handler) = selected.filter(|&handler| is_untold(handler)) else { return };
        if thread.refused_in != 0 && !(self.binding.is_raising)() && thread.refused_in == self.called_by_loop() {
            thread.refuse_its_own();
        } else {
            tell_by_null(handler);
        }
    }

    /// Whether a small block that Python asks for is rather granted than refused where this code runs: the request that
    /// is selected is told soon, or nobody could be told.
    pub(super) fn waits(&self, runs: Runs) -> bool {
        runs == Runs::Others || (self.binding.tells_soon)()
    }

    pub(super) fn overdrawn(&self, thread: &mut Thread, payer: Payer, is_small: bool) {
        (self.binding.overdrawn)(thread, payer, is_small);
        let is_told = || handler_of(thread.account).is_some() && (self.binding.tells_soon)();
        if matches!(thread.raising, NOT_RAISING | RAISED | REFUSES) && !is_told() {
            thread.refuse_its_own();
        }
        Self::look_soon_if_owed(thread);
    }

    /// The thread may have the GIL at its next block, whatever the size of that, or its own code may ask for it.
    pub(super) fn look_soon_if_owed(thread: &mut Thread) {
        match thread.raising {
            OWED => thread.look_soon(),
            REFUSES if thread.refused_in < LOOKED_AT => thread.look_soon(),
            REFUSES => thread.look_again(),
            _ => {}
        }
    }
}

/// The refusal of a block. Nothing is to come after it for what the request was given before.
pub(super) fn told_by_null(thread: &mut Thread) -> (u32, *mut u8) {
    if matches!(thread.raising, NOTED | REFUSES | REFUSED_ONE) {
        thread.raising = NOT_RAISING;
        if let Some(handler) = handler_of(thread.account) {
            tell_by_null(handler);
        }
    }
    (REFUSED, null_mut())
}
