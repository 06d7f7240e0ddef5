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
use std::sync::Arc;

static OURS: Mappings = Mappings { mapped, unmapped, lift, settle };

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
}

impl Table {
    /// False: there is no memory for it.
    fn add(&mut self, payer: Payer, start: usize, end: usize) -> bool {
        let free = self.owners.iter().position(Option::is_none);
        if self.pieces.try_reserve(1).is_err() || free.is_none() && self.owners.try_reserve(1).is_err() {
            return false;
        }
        let owner = free.unwrap_or_else(|| {
            self.owners.push(None);
            self.owners.len() - 1
        });
        self.owners[owner] = Some(Owner { payer: payer.address(), bytes: end - start, pieces: 1 });
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
        let owner = self.owner(cut.owner);
        let (payer, before) = (owner.payer, owner.bytes);
        owner.bytes -= cut.end - cut.start;
        owner.pieces -= 1;
        let after = (owner.pieces > 0).then_some(owner.bytes);
        if after.is_none() {
            self.owners[cut.owner] = None;
        }
        Change { payer, before, after }
    }

    /// A piece that was cut, of so many bytes, is here now. `None`: there is no memory for it, and it is forgotten.
    fn put(&mut self, owner: usize, old_bytes: usize, start: usize, end: usize) -> Change {
        if self.pieces.try_reserve(1).is_err() {
            return self.forget(Piece { start, end: start + old_bytes, owner });
        }
        self.insert(Piece { start, end, owner });
        let owner = self.owner(owner);
        let before = owner.bytes;
        owner.bytes = before - old_bytes + (end - start);
        Change { payer: owner.payer, before, after: Some(owner.bytes) }
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
    fn change(&self, thread: &mut Thread, Change { payer, before, after }: Change) {
        // SAFETY: the table had it from a payer whose charge for this mapping is not over.
        let Some(payer) = (unsafe { Payer::from_address(payer) }) else { return };
        // SAFETY: the mapping is charged with `before`, and the table has noted what comes after.
        unsafe {
            match after.map(weight) {
                None => payer.release(weight(before)),
                Some(after) if payer.reweigh(weight(before), after, None) => {}
                Some(after) => {
                    payer.reweigh(weight(before), after, Some(Force::Grant));
                    self.overdrawn(thread, payer, false);
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
unsafe extern "C" fn mapped(thread: *mut Thread, start: usize, size_bytes: usize, caller: *const c_void) {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let (Some(all), Some(decider)) = (ALL.get(), DECIDER.get()) else { return };
    if !thread.may_decide() || all.files.contains(&file_of(caller)) || enclosing(caller.addr()) == all.arenas {
        return;
    }
    let handler = selected(thread);
    let (thread, bytes) = (busy(thread), in_pages(size_bytes));
    // What a function that we call has unmapped is nobody's business, and may be noted still.
    while let Some(change) = all.table.0.with(|table| table.cut(start, start + bytes).map(|cut| table.forget(cut))) {
        decider.change(thread.0, change);
    }
    let charged = handler.map_or(Charged::Nobody, |handler| decider.charge_mapping(thread.0, handler, bytes));
    if let Charged::To(payer) = charged {
        if all.table.0.with(|table| table.add(payer, start, start + bytes)) {
            return;
        }
        // SAFETY: charged above, for this mapping.
        unsafe { payer.release(weight(bytes)) };
    }
    nobodys::add(thread.0, bytes, decider.binding.python.as_ref());
}

/// What of a thread's mappings may be in the table, if it is not at work itself.
fn of_others(thread: &mut Thread) -> Option<(&'static All, &'static Decider)> {
    if thread.is_busy() || thread.is_forking() {
        return None;
    }
    Some((ALL.get()?, DECIDER.get()?))
}

/// # Safety
/// - called by `mappings.c`: the thread is this one.
unsafe extern "C" fn unmapped(thread: *mut Thread, start: usize, size_bytes: usize) {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let Some((all, decider)) = of_others(thread) else { return };
    let thread = busy(thread);
    let end = start.saturating_add(in_pages(size_bytes));
    while let Some(change) = all.table.0.with(|table| table.cut(start, end).map(|cut| table.forget(cut))) {
        decider.change(thread.0, change);
    }
}

/// # Safety
/// - called by `mappings.c`: the thread is this one.
unsafe extern "C" fn lift(thread: *mut Thread, start: usize, size_bytes: usize) -> usize {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let Some((all, _)) = of_others(thread) else { return 0 };
    let _busy = busy(thread);
    let end = start.saturating_add(in_pages(size_bytes));
    all.table.0.with(|table| {
        // The system moves what is one mapping: more than one piece would be of several, and stay as they are.
        let is_one =
            table.first_in(start, end).is_some_and(|at| table.pieces[at].start <= start && table.pieces[at].end >= end);
        if is_one { table.cut(start, end).map_or(0, |cut| cut.owner + 1) } else { 0 }
    })
}

/// # Safety
/// - called by `mappings.c`: the thread is this one, and `lifted` is what `lift` returned for `old_bytes`.
unsafe extern "C" fn settle(thread: *mut Thread, lifted: usize, start: usize, size_bytes: usize, old_bytes: usize) {
    // SAFETY: this thread's own struct, which nobody else has; the functions below pass it on and do not keep it.
    let thread = unsafe { &mut *thread };
    let (Some(all), Some(decider)) = (ALL.get(), DECIDER.get()) else { return };
    let thread = busy(thread);
    let put = |table: &mut Table| table.put(lifted - 1, in_pages(old_bytes), start, start + in_pages(size_bytes));
    let change = all.table.0.with(put);
    decider.change(thread.0, change);
}

#[cfg(test)]
mod tests {
    use super::{Change, Payer, Table};
    use crate::random::Random;

    fn payer(number: usize) -> Payer {
        // SAFETY: no block is charged to it, and nobody asks it anything.
        unsafe { Payer::from_address(number * 16) }.expect("not 0")
    }

    /// Mapped, unmapped in parts, and moved at random, beside a model that has an owner for each page.
    #[test]
    fn each_owner_is_charged_the_pages_that_are_left_of_it() {
        const PAGES: usize = 200;
        let (mut table, mut random) = (Table::default(), Random::new(1));
        let (mut pages, mut charged) = ([0; PAGES], vec![0_usize]);
        let changed = |charged: &mut Vec<usize>, change: Change| {
            let number = change.payer / 16;
            assert_eq!(charged[number], change.before);
            charged[number] = change.after.unwrap_or(0);
        };
        for step in 0..20_000 {
            let start = random.below(PAGES - 40);
            let (end, what) = (start + 1 + random.below(20), random.below(3));
            if what > 0 {
                while let Some(cut) = table.cut(start, end) {
                    let change = table.forget(cut);
                    changed(&mut charged, change);
                }
                pages[start..end].fill(0);
            }
            if what == 1 {
                charged.push(end - start);
                assert!(table.add(payer(charged.len() - 1), start, end));
                pages[start..end].fill(charged.len() - 1);
            }
            if what == 0
                && let Some(cut) = table.cut(start, end)
            {
                // To a place that nobody has, of another size; or back, where there is none.
                let to = (0..PAGES - 1).find(|&at| pages[at..at + 2] == [0, 0]);
                let owner = pages[cut.start];
                let old = cut.end - cut.start;
                let (first, last) = to.map_or((cut.start, cut.end), |to| (to, to + 2));
                pages[cut.start..cut.end].fill(0);
                let change = table.put(cut.owner, old, first, last);
                changed(&mut charged, change);
                pages[first..last].fill(owner);
            }
            if step % 10 == 0 {
                for (number, &bytes) in charged.iter().enumerate().skip(1) {
                    assert_eq!(pages.iter().filter(|&&page| page == number).count(), bytes, "step {step}");
                }
            }
        }
        let live = charged.iter().filter(|&&bytes| bytes > 0).count();
        assert_eq!(table.owners.iter().flatten().count(), live, "an owner without pieces is none");
    }
}
