//! Anonymous mappings of libraries, for who chooses that they count: `mmap`, `munmap` and `mremap` of `mappings.c`.
//!
//! A mapping is charged as a block of `malloc` is, and never refused: few libraries look. It may be given back in
//! parts, so its owner has *pieces*, which a table has by their addresses.

use super::decide::selected;
use super::decider::{DECIDER, Decider, busy};
use super::nobodys;
use super::python::{enclosing, file_of};
use super::shared::{AttachMappings, Mappings, Thread};
use super::walk::Answer;
use crate::handler::Handler;
use crate::handler::requests::{Beyond, Charged, Payer, charge};
use crate::source::pages::page_bytes;
use crate::strategy::account::{Force, Weight};
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

static OURS: Mappings = Mappings { mapped, lift, settle };

static ALL: Made<All> = Made::new();

struct All {
    table: Arc<State>,
    /// The libraries whose mappings are not looked at, by where they begin: this one, whose arrays and placed blocks
    /// are charged, and the next allocator's.
    files: [usize; 2],
    /// Python's function that maps for its small objects, which are samples.
    arenas: usize,
}

struct State(Locked<Table>);

impl HeldAcrossFork for State {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

/// Begins to charge them, for ever. `next`: a function of the next allocator. `arenas`: Python's for its small objects.
pub(super) fn begin(attach: AttachMappings, next: *const c_void, arenas: *const c_void) {
    let files = [file_of(begin as *const c_void), file_of(next)];
    ALL.get_or_make(|| All {
        table: held_across_fork(State(Locked::new(Table::default()))),
        files,
        arenas: arenas.addr(),
    });
    // SAFETY: functions of `mappings.c`'s types, for ever.
    unsafe { attach(&raw const OURS) };
}

/// A charge, and in how many pieces its mapping is left.
struct Owner {
    /// 0: nobody. Who lets it grow pays for the growth.
    payer: usize,
    bytes: usize,
    pieces: usize,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    start: usize,
    end: usize,
    owner: usize,
}

/// What a charge is to change to.
struct Change {
    payer: usize,
    before: usize,
    /// `None`: it is over.
    after: Option<usize>,
}

#[derive(Default)]
struct Table {
    /// By their addresses; none overlaps another one.
    pieces: Vec<Piece>,
    /// By the numbers that pieces have.
    owners: Vec<Option<Owner>>,
    /// Pieces that the system is asked to change now, with the number that whoever asks has for them.
    lifted: Vec<(usize, Piece)>,
    /// The last of these numbers.
    number: usize,
}

impl Table {
    /// False: there is no memory for it.
    fn add(&mut self, payer: usize, start: usize, end: usize) -> bool {
        let free = self.owners.iter().position(Option::is_none);
        if self.pieces.try_reserve(1).is_err() || free.is_none() && self.owners.try_reserve(1).is_err() {
            return false;
        }
        let owner = free.unwrap_or_else(|| {
            self.owners.push(None);
            self.owners.len() - 1
        });
        self.owners[owner] = Some(Owner { payer, bytes: end - start, pieces: 1 });
        self.insert(Piece { start, end, owner });
        true
    }

    /// Room for it is reserved.
    fn insert(&mut self, piece: Piece) {
        let at = self.pieces.partition_point(|other| other.start < piece.start);
        self.pieces.insert(at, piece);
    }

    /// The first piece with some of these addresses.
    fn first_in(&self, start: usize, end: usize) -> Option<usize> {
        let at = self.pieces.partition_point(|piece| piece.end <= start);
        self.pieces.get(at).is_some_and(|piece| piece.start < end).then_some(at)
    }

    /// Takes out the part of the first piece that has some of these addresses. What is left of it on both sides stays;
    /// where there is no memory to note the one behind, it is taken, too.
    fn cut(&mut self, start: usize, end: usize) -> Option<Piece> {
        let at = self.first_in(start, end)?;
        let Piece { start: first, end: last, owner } = self.pieces.remove(at);
        let has_room = self.pieces.try_reserve(2).is_ok();
        let cut = Piece { start: first.max(start), end: if has_room { last.min(end) } else { last }, owner };
        for left in [Piece { start: first, end: cut.start, owner }, Piece { start: cut.end, end: last, owner }] {
            if left.start < left.end {
                self.insert(left);
                self.owner(owner).pieces += 1;
            }
        }
        Some(cut)
    }

    fn owner(&mut self, number: usize) -> &mut Owner {
        self.owners[number].as_mut().unwrap_or_else(|| super::decide::die("a mapping was charged to nobody"))
    }

    /// A piece that was cut is no more.
    fn forget(&mut self, cut: Piece) -> Change {
        self.forget_but(cut, 0)
    }

    /// The same, but for so many bytes, which are a piece.
    fn forget_but(&mut self, cut: Piece, kept_bytes: usize) -> Change {
        let owner = self.owner(cut.owner);
        let (payer, before) = (owner.payer, owner.bytes);
        owner.bytes = before - (cut.end - cut.start) + kept_bytes;
        owner.pieces -= usize::from(kept_bytes == 0);
        let after = (owner.pieces > 0).then_some(owner.bytes);
        if after.is_none() {
            self.owners[cut.owner] = None;
        }
        Change { payer, before, after }
    }

    /// Lifts the first piece with some of these addresses. The error: there is no memory to note it, and it is no more.
    fn lift(&mut self, number: usize, start: usize, end: usize) -> Option<Result<(), Change>> {
        let cut = self.cut(start, end)?;
        Some(match self.lifted.try_reserve(1) {
            Ok(()) => {
                self.lifted.push((number, cut));
                Ok(())
            }
            Err(_) => Err(self.forget(cut)),
        })
    }

    /// Puts one of those that were lifted with this number where it is now. `kept`: the addresses whose memory is at
    /// `to`.
    fn settle(&mut self, number: usize, kept: &Range<usize>, to: usize) -> Option<Change> {
        let at = self.lifted.iter().position(|&(its, _)| its == number)?;
        let (_, piece) = self.lifted.swap_remove(at);
        let (start, end) = (piece.start.max(kept.start), piece.end.min(kept.end));
        if start >= end || self.pieces.try_reserve(1).is_err() {
            return Some(self.forget(piece));
        }
        let moved = |address: usize| address - kept.start + to;
        self.insert(Piece { start: moved(start), end: moved(end), owner: piece.owner });
        Some(self.forget_but(piece, end - start))
    }
}

fn weight(bytes: usize) -> Weight {
    Weight { bytes, is_object: false, is_sample: false }
}

fn in_pages(size_bytes: usize) -> usize {
    size_bytes.checked_next_multiple_of(page_bytes()).unwrap_or(usize::MAX)
}

impl Decider {
    /// Does what the table said, without its lock: the end of a payer may do anything.
    fn change(Change { payer, before, after }: Change) {
        // SAFETY: the table had it from a payer whose charge for this mapping is not over.
        let Some(payer) = (unsafe { Payer::from_address(payer) }) else { return };
        // SAFETY: the mapping is charged with `before`, and the table has noted what comes after, which is less.
        unsafe {
            match after.map(weight) {
                None => payer.release(weight(before)),
                Some(after) => {
                    payer.reweigh(weight(before), after, Some(Force::Undo));
                }
            }
        }
    }

    fn charge_mapping(&self, thread: &mut Thread, handler: Handler, bytes: usize) -> Charged {
        match charge(handler, weight(bytes), Beyond::Refuse) {
            Charged::Refused => {
                self.charge_beyond(thread, handler, weight(bytes), || Answer::Grant).unwrap_or(Charged::Nobody)
            }
            charged => charged,
        }
    }
}

/// # Safety
/// - called by `mappings.c`: the thread is this one.
unsafe extern "C" fn mapped(
    thread: *mut Thread,
    start: usize,
    old_bytes: usize,
    size_bytes: usize,
    caller: *const c_void,
) {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let (Some(all), Some(decider)) = (ALL.get(), DECIDER.get()) else { return };
    if !thread.may_decide() || all.files.contains(&file_of(caller)) || enclosing(caller.addr()) == all.arenas {
        return;
    }
    let handler = selected(thread);
    let thread = busy(thread);
    let (start, end) = (start + in_pages(old_bytes), start + in_pages(size_bytes));
    let Some(bytes) = end.checked_sub(start).filter(|&bytes| bytes > 0) else { return };
    // What a function that we call has unmapped is nobody's business, and may be noted still.
    while let Some(change) = all.table.0.with(|table| table.cut(start, end).map(|cut| table.forget(cut))) {
        Decider::change(change);
    }
    let charged = handler.map_or(Charged::Nobody, |handler| decider.charge_mapping(thread.0, handler, bytes));
    let payer = if let Charged::To(payer) = charged { Some(payer) } else { None };
    if payer.is_none() {
        nobodys::add(thread.0, bytes, decider.binding.python.as_ref());
    }
    let is_noted = all.table.0.with(|table| table.add(payer.map_or(0, Payer::address), start, end));
    if let Some(payer) = payer.filter(|_| !is_noted) {
        // SAFETY: charged above, for this mapping.
        unsafe { payer.release(weight(bytes)) };
    }
}

/// # Safety
/// - called by `mappings.c`: the thread is this one.
unsafe extern "C" fn lift(thread: *mut Thread, start: usize, size_bytes: usize) -> usize {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let Some(all) = ALL.get().filter(|_| !thread.is_busy() && !thread.is_forking()) else { return 0 };
    let _busy = busy(thread);
    let end = start.saturating_add(in_pages(size_bytes));
    let number = all.table.0.with(|table| {
        table.number += 1;
        table.number
    });
    let mut lifted = 0;
    while let Some(done) = all.table.0.with(|table| table.lift(number, start, end)) {
        match done {
            Ok(()) => lifted = number,
            Err(change) => Decider::change(change),
        }
    }
    lifted
}

/// # Safety
/// - called by `mappings.c`: the thread is this one, and `lift` has returned `lifted` to it.
unsafe extern "C" fn settle(thread: *mut Thread, lifted: usize, from: usize, to: usize, kept_bytes: usize) {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let Some(all) = ALL.get() else { return };
    let _busy = busy(thread);
    let kept = from..from.saturating_add(in_pages(kept_bytes));
    while let Some(change) = all.table.0.with(|table| table.settle(lifted, &kept, to)) {
        Decider::change(change);
    }
}

#[cfg(test)]
mod tests {
    use super::{Change, Table};
    use crate::random::Random;

    /// Mapped, unmapped in parts, and moved at random, also over several mappings, or in vain; beside a model that has
    /// an owner for each page.
    #[test]
    fn each_owner_is_charged_the_pages_that_are_left_of_it() {
        const PAGES: usize = 400;
        let (mut table, mut random) = (Table::default(), Random::new(1));
        let (mut pages, mut charged) = ([0; PAGES], vec![0_usize]);
        let changed = |charged: &mut Vec<usize>, Change { payer, before, after }| {
            assert_eq!(charged[payer], before);
            charged[payer] = after.unwrap_or(0);
        };
        for step in 1..20_000 {
            let start = random.below(PAGES / 2 - 40);
            let (size, what) = (1 + random.below(30), random.below(4));
            let lifts = |table: &mut Table| while table.lift(step, start, start + size).is_some() {};
            // Nothing is left, or a part of it at a place that nobody has, or all where it was.
            let (kept, to) = match what {
                0 => (random.below(size + 1), PAGES / 2 + random.below(PAGES / 2 - 30)),
                1 => (size, start),
                _ => (0, start),
            };
            if what == 0 && pages[to..to + kept].iter().any(|&page| page > 0) {
                let clear = |table: &mut Table| table.cut(to, to + kept).map(|cut| table.forget(cut));
                while let Some(change) = clear(&mut table) {
                    changed(&mut charged, change);
                }
                pages[to..to + kept].fill(0);
            }
            lifts(&mut table);
            let before = pages[start..start + size].to_vec();
            pages[start..start + size].fill(0);
            pages[to..to + kept].copy_from_slice(&before[..kept]);
            while let Some(change) = table.settle(step, &(start..start + kept), to) {
                changed(&mut charged, change);
            }
            if what == 3 {
                charged.push(size);
                assert!(table.add(charged.len() - 1, start, start + size));
                pages[start..start + size].fill(charged.len() - 1);
            }
            if step % 10 == 0 {
                let mut found = vec![0; charged.len()];
                pages.iter().filter(|&&page| page > 0).for_each(|&page| found[page] += 1);
                assert_eq!(found, charged, "step {step}");
            }
        }
        let live = charged.iter().filter(|&&bytes| bytes > 0).count();
        assert_eq!(table.owners.iter().flatten().count(), live, "an owner without pieces is none");
        assert!(table.lifted.is_empty());
    }
}
