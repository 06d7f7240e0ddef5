//! `Phases`: large blocks are made in one phase and freed in the next, as they were, whatever thread is faster.
//!
//! Without that a thread could free its blocks before another one makes those that were alive beside them, and the peak
//! of the resident memory would be a part of the recorded one. Within a phase threads do not wait for each other. The
//! first step of a phase waits for the last steps of all threads in the one before, and all others of its phase wait
//! for the first: there are at most twice as many waits as steps.

use std::collections::HashMap;

/// The last step of something: on which lane, and which of its steps.
pub(super) type Last = (u32, usize);

#[derive(Debug, Default)]
pub(super) struct Phases {
    /// Whether blocks are made in this phase.
    is_making: bool,
    first: Option<Last>,
    /// The last step of each thread in it.
    last: HashMap<u32, usize>,
}

impl Phases {
    /// What the next step comes after. It begins a new phase where it is of the other kind; `add` follows.
    pub(super) fn before(&mut self, is_made: bool) -> Vec<Last> {
        if self.first.is_some() && is_made == self.is_making {
            return self.first.into_iter().collect();
        }
        self.is_making = is_made;
        self.first = None;
        self.last.drain().collect()
    }

    /// Adds that step.
    pub(super) fn add(&mut self, (lane, step): Last) {
        self.first.get_or_insert((lane, step));
        self.last.insert(lane, step);
    }
}

#[cfg(test)]
mod tests {
    use super::Phases;

    #[test]
    fn the_first_of_a_phase_waits_for_all_and_the_others_for_the_first() {
        let mut phases = Phases::default();
        let mut step = |is_made, last| {
            let mut before = phases.before(is_made);
            before.sort_unstable();
            phases.add(last);
            before
        };
        assert_eq!(step(true, (0, 0)), []);
        assert_eq!(step(true, (1, 0)), [(0, 0)]);
        assert_eq!(step(true, (0, 1)), [(0, 0)]);
        assert_eq!(step(false, (2, 0)), [(0, 1), (1, 0)]);
        assert_eq!(step(false, (0, 2)), [(2, 0)]);
        assert_eq!(step(true, (1, 1)), [(0, 2), (2, 0)]);
    }
}
