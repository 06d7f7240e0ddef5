//! Scopes that a program keeps open: guards where the line stays on one thread, tokens where it may move.
//!
//! A `Guard` is `!Send`, and a task's future must be `Send`. So guards are parked in a thread-local, and the line
//! knows where.

use crate::line::Line;
use crate::trace::{numbered, outcome, wanted};
use ctxalloc::{Error, Guard, Token, enter, reset, set};
use std::cell::RefCell;
use std::collections::HashMap;

thread_local! {
    static GUARDS: RefCell<HashMap<Place, Guard>> = RefCell::default();
}

/// Which line, and which of its guards.
type Place = (u64, i64);

/// An open scope.
pub(crate) enum Hold {
    Guard(Place),
    Token(Token),
}

/// The outcome of a reset.
pub(crate) fn of_reset(result: Result<(), Error>) -> u8 {
    match result {
        Ok(()) => outcome::OK,
        Err(Error::TokenUsed) => outcome::USED,
        Err(Error::TokenForeign) => outcome::FOREIGN,
        Err(_) => outcome::STRANGE,
    }
}

impl Hold {
    pub(crate) fn enter(line: &Line, label: i64, handler: i64, is_guard: bool) -> Self {
        if !is_guard {
            return Self::Token(set(wanted(handler)));
        }
        let place = (line.id, label);
        let guard = enter(numbered(handler));
        GUARDS.with_borrow_mut(|guards| guards.insert(place, guard));
        Self::Guard(place)
    }

    pub(crate) fn leave(self) -> u8 {
        match self {
            Self::Token(token) => of_reset(reset(&token)),
            Self::Guard(place) => match take(place) {
                Some(guard) => of_reset(guard.exit()),
                None => outcome::STRANGE, // language.py keeps `leave` on the line's thread
            },
        }
    }
}

fn take(place: Place) -> Option<Guard> {
    GUARDS.with_borrow_mut(|guards| guards.remove(&place))
}

/// Leaves what a line still holds, oldest first, by dropping it.
pub(crate) fn leave_all(holds: Vec<(i64, Hold)>) {
    for (_, hold) in holds {
        match hold {
            Hold::Guard(place) => drop(take(place)),
            Hold::Token(token) => drop(reset(&token)),
        }
    }
}

/// A scope around a stretch of a body; restores when it goes, whatever the reason.
pub(crate) struct Stretch(Option<Hold>);

impl Stretch {
    pub(crate) fn enter(line: &Line, node: usize, handler: i64, is_guard: bool) -> Self {
        let label = -1 - i64::try_from(node).expect("programs are small"); // no label of the program's
        Self(Some(Hold::enter(line, label, handler, is_guard)))
    }

    pub(crate) fn leave(mut self) -> u8 {
        self.0.take().map_or(outcome::STRANGE, Hold::leave)
    }
}

impl Drop for Stretch {
    fn drop(&mut self) {
        match self.0.take() {
            Some(Hold::Guard(place)) => drop(take(place)),
            Some(Hold::Token(token)) => drop(reset(&token)),
            None => {}
        }
    }
}
