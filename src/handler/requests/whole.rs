//! Who pays for a native block or a Python object: the request that is selected, or the one around it, that counts the
//! whole of itself.

use super::slot::{Kept, Slot, at_struct};
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::held::Held;
use crate::handler::word::Handler;
use crate::strategy::account::{Force, Weight};
use crate::sync::Made;
use std::ptr::NonNull;

/// A request's slot, held by a block that is charged to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Payer(NonNull<Slot>);

/// What became of a charge.
#[derive(Debug)]
pub(crate) enum Charged {
    /// No request counts it.
    Nobody,
    /// A limit has no room.
    Refused,
    To(Payer),
}

/// The handler of the request whose struct this is, while somebody holds it.
#[inline]
pub(crate) fn handler_at(c_struct: NonNull<PyDataMem_Handler>) -> Option<Handler> {
    at_struct(c_struct.as_ptr())
}

/// How much small blocks may exceed a limit once it has refused, so that the refusal can be handled: a sixteenth of it,
/// and at least so much.
const MIN_RESERVE_BYTES: usize = 256 << 10;
/// The same where what enters or leaves a block asks: one sample of a list that grows may stand for all of that.
const MIN_RESERVE_AT_ENDS_BYTES: usize = 1 << 20;
/// How much all blocks may while a module is imported: what is broken off there, no later request can import.
const MIN_RESERVE_OF_IMPORTS_BYTES: usize = 256 << 20;

/// Who pays while this request is selected: itself, or the one around it that counts the whole of itself.
#[inline]
fn paying(selected: &'static Slot) -> Option<&'static Slot> {
    let slot = match &selected.state().payer {
        Some(payer) => Slot::behind(payer.handler()),
        None => Some(selected),
    };
    slot.filter(|slot| slot.state().counts_whole())
}

/// What `read` finds in who pays while this handler's request is selected, which is held meanwhile. `None`: nobody
/// does.
#[inline(always)]
fn with_payer<R>(handler: Handler, read: impl FnOnce(&'static Slot) -> R) -> Option<R> {
    let held = Slot::held_behind(handler)?;
    Some(read(paying(held.slot())?))
}

/// The handler of the request that pays while this one is selected.
pub(crate) fn payer_of(handler: Handler) -> Option<Handler> {
    let held = Held::try_on(handler)?;
    match &Slot::behind(held.handler())?.state().payer {
        Some(payer) => Some(payer.handler()),
        None => Some(handler),
    }
}

/// Whether a limit has no room for so many bytes, which is remembered as a refusal. No other number changes: for blocks
/// that nobody can make.
pub(crate) fn is_refused(handler: Handler, bytes: usize) -> bool {
    with_payer(handler, |slot| has_no_room(slot, bytes)) == Some(true)
}

fn has_no_room(slot: &Slot, bytes: usize) -> bool {
    let chain = &slot.state().chain;
    let bytes = bytes.min(usize::MAX / 2); // more would be refused where there is no limit, too
    match chain.reserve(bytes, bytes, false) {
        Ok(()) => chain.cancel(bytes),
        Err(refused) => {
            chain.remember(refused);
            return true;
        }
    }
    false
}

/// What became of the charge of a block whose request has ended and that another one lets grow.
#[derive(Debug)]
pub(crate) enum Handed {
    /// No request counts it: the charge is as it was.
    Nobody,
    /// As it was, too: a limit has no room.
    Refused,
    To(Payer),
}

/// What is done where a limit has no room for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beyond {
    Refuse,
    /// It is charged, and the request is told.
    Told,
    /// The same of a small block, while what small ones may exceed a limit by has room; else it is refused.
    ToldInReserve,
    /// The same where what enters or leaves a block asks, which has more room.
    ToldAtEnds,
    /// The same of any block while a module is imported.
    ToldInImport,
    /// It is charged.
    Untold,
}

impl Beyond {
    /// How much an account may exceed a limit by for it; `None`: it is not asked.
    fn min_reserve_bytes(self) -> Option<usize> {
        match self {
            Self::Refuse | Self::ToldInReserve => Some(MIN_RESERVE_BYTES),
            Self::ToldAtEnds => Some(MIN_RESERVE_AT_ENDS_BYTES),
            Self::ToldInImport => Some(MIN_RESERVE_OF_IMPORTS_BYTES),
            Self::Told | Self::Untold => None,
        }
    }
}

/// Whether what this handler's request makes beside arrays is charged to a request.
pub(crate) fn is_counted(handler: Handler) -> bool {
    with_payer(handler, |_| ()).is_some()
}

/// Charges a block that is about to be made for `handler`: in the usual case without a lock and without a call.
#[inline(always)]
pub(crate) fn charge(handler: Handler, weight: Weight, beyond: Beyond) -> Charged {
    let charged = with_payer(handler, |slot| {
        let is_usual = beyond == Beyond::Refuse && slot.state().memory.noted().is_none();
        let is_charged = (is_usual && slot.state().chain.take_whole_shortly(weight, || slot.hold_again()))
            || slot.charges(weight, beyond);
        if is_charged { Charged::To(Payer(NonNull::from(slot))) } else { Charged::Refused }
    });
    charged.unwrap_or(Charged::Nobody)
}

impl Slot {
    /// For the one that pays, and is held.
    fn charges(&self, weight: Weight, beyond: Beyond) -> bool {
        let chain = &self.state().chain;
        let has_reserve = || beyond.min_reserve_bytes().is_none_or(|bytes| chain.has_reserve_for(weight.bytes, bytes));
        let take = || {
            let may_be_granted = beyond != Beyond::Refuse || (weight.is_sample && chain.refusals_so_far() > 0);
            let is_granted = may_be_granted && has_reserve();
            if is_granted {
                let is_told = !matches!(beyond, Beyond::Refuse | Beyond::Untold);
                chain.take_whole_anyway(weight, is_told, || self.hold_again());
                return true;
            }
            beyond == Beyond::Refuse && chain.take_whole(weight, || self.hold_again())
        };
        match self.state().memory.noted() {
            None => take(),
            Some(noted) => noted.weighed(weight.bytes, take, || chain.refused_last_by()),
        }
    }
}

/// The number of the request with this handler, which gets one now if it has none and its native memory is counted.
pub(crate) fn ticket_of(handler: Handler) -> Option<u32> {
    let held = Held::try_on(handler)?;
    let state = Slot::behind(held.handler())?.state();
    if !state.counts_whole() && state.payer.is_none() {
        return None;
    }
    state.ticket.number(handler)
}

/// Whether the request with this handler, or one around it, has not ended.
pub(crate) fn is_live(handler: Handler) -> bool {
    let Some(held) = Held::try_on(handler) else { return false };
    Slot::behind(held.handler()).is_some_and(|slot| {
        let chain = &slot.state().chain;
        !chain.has_ended() || chain.is_inside_of_a_live_one()
    })
}

/// Whether whoever pays while this request is selected may have so many bytes beyond a limit for an import.
pub(crate) fn may_import(handler: Handler, bytes: usize) -> bool {
    let has_reserve = |slot: &Slot| slot.state().chain.has_reserve_for(bytes, MIN_RESERVE_OF_IMPORTS_BYTES);
    with_payer(handler, has_reserve) == Some(true)
}

/// How many imports whoever pays while this request is selected was begun within: these are not its own.
pub(crate) fn imports_around(handler: Handler) -> usize {
    with_payer(handler, Slot::imports_around).unwrap_or(0)
}

static IMPORTS: Made<fn(usize) -> bool> = Made::new();

/// `imports`: whether a module is imported on this thread, within more calls than so many.
pub(crate) fn ask_for_imports(imports: fn(usize) -> bool) {
    IMPORTS.get_or_make(|| imports);
}

impl Slot {
    fn imports_around(&self) -> usize {
        self.state().chain.whole.as_ref().map_or(0, |parts| parts.imports_around())
    }

    /// An array that a limit has refused, for a module that is imported: as native blocks and objects beyond the limit.
    #[cold]
    #[inline(never)]
    pub(super) fn make_for_import(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let imports = IMPORTS.get()?;
        let around = paying(self.immortal())?.imports_around();
        let state = self.state();
        let may_have = || state.chain.has_reserve_for(size_bytes, MIN_RESERVE_OF_IMPORTS_BYTES);
        if state.chain.has_ended() || !imports(around) || !may_have() {
            return None;
        }
        // What the user's code does meanwhile may let go of whatever else holds the request.
        let _kept = Kept::on(self);
        let block = state.memory.allocate(size_bytes, zeroed)?;
        let charge = || state.chain.take_array_anyway(size_bytes, || self.hold_again());
        match state.memory.noted() {
            None => charge(),
            Some(noted) => noted.made(block.addr().get(), size_bytes, zeroed, charge),
        }
        Some(block)
    }
}

/// Whoever pays while this request is selected was refused a block: what it was given beyond the limit before needs no
/// telling.
pub(crate) fn tell_by_null(handler: Handler) {
    with_payer(handler, |slot| slot.state().chain.whole.iter().for_each(|parts| parts.note_told()));
}

/// Whether who pays while this request is selected was given a block beyond a limit, of which nobody was told.
pub(crate) fn is_untold(handler: Handler) -> bool {
    with_payer(handler, |slot| slot.state().chain.whole.iter().any(|parts| parts.is_untold())) == Some(true)
}

impl Payer {
    /// The slot's address, from which [`from_address`](Self::from_address) makes it again.
    pub(crate) fn address(self) -> usize {
        self.0.as_ptr().expose_provenance()
    }

    /// # Safety
    /// - `address` is one that [`address`](Self::address) returned, and the block that it was for is still charged.
    pub(crate) unsafe fn from_address(address: usize) -> Option<Self> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).map(Self)
    }

    fn slot(&self) -> &'static Slot {
        // SAFETY: made from a slot's reference, or from its exposed address. Slots are immortal.
        unsafe { self.0.as_ref() }
    }

    /// How many imports it was begun within.
    pub(crate) fn imports_around(self) -> usize {
        self.slot().imports_around()
    }

    /// Changes what its block weighs; false if a limit has no room.
    ///
    /// # Safety
    /// - a block that weighs `old` is charged to it.
    pub(crate) unsafe fn reweigh(self, old: Weight, new: Weight, force: Option<Force>) -> bool {
        let state = self.slot().state();
        match state.memory.noted() {
            None => state.chain.reweigh(old, new, force),
            Some(noted) => {
                let change = || state.chain.reweigh(old, new, force);
                noted.reweighed(old.bytes, new.bytes, change, || state.chain.refused_last_by())
            }
        }
    }

    /// Charges its block, which weighs `new` from now on, to whoever pays while `handler` is selected. An account that
    /// both are charged to changes by the difference.
    ///
    /// # Safety
    /// - a block that weighs `old` is charged to it, which is over after `To`.
    pub(crate) unsafe fn hand_over(self, handler: Handler, old: Weight, new: Weight, force: Option<Force>) -> Handed {
        let Some(held) = Slot::held_behind(handler) else { return Handed::Nobody };
        let Some(slot) = paying(held.slot()) else { return Handed::Nobody };
        if NonNull::from(slot) == self.0 {
            // SAFETY: a block that weighs `old` is charged to it (this function's contract), and stays so.
            return if unsafe { self.reweigh(old, new, force) } { Handed::To(self) } else { Handed::Refused };
        }
        let (before, after) = (self.slot(), slot.state());
        let noted_before = before.state().memory.noted().cloned(); // its state may be gone once it is changed
        let mut is_last = false;
        let mut change = || {
            let taken = after.chain.take_over(&before.state().chain, old, new, force, || slot.hold_again());
            is_last = taken == Some(true);
            taken.is_some()
        };
        let is_taken = match after.memory.noted() {
            None => change(),
            Some(noted) => noted.weighed(new.bytes, change, || after.chain.refused_last_by()),
        };
        if !is_taken {
            return Handed::Refused;
        }
        if let Some(noted) = noted_before {
            noted.lightened(old.bytes, || ());
        }
        if is_last {
            before.let_go(); // as in `release`
        }
        Handed::To(Self(NonNull::from(slot)))
    }

    /// Whether it pays while the request with this handler is selected.
    pub(crate) fn pays_for(self, handler: Handler) -> bool {
        with_payer(handler, |slot| NonNull::from(slot) == self.0) == Some(true)
    }

    /// Whether a block may have so many bytes beyond a limit that has refused. For one that is charged to it.
    pub(crate) fn is_in_reserve(self, bytes: usize, beyond: Beyond) -> bool {
        let chain = &self.slot().state().chain;
        let has_room = |min_bytes| chain.has_reserve_for(bytes, min_bytes);
        chain.refusals_so_far() > 0 && beyond.min_reserve_bytes().is_none_or(has_room)
    }

    /// Whether its request has not been told of a block that it was given beyond a limit. For a block just charged.
    pub(crate) fn is_untold(self) -> bool {
        self.slot().state().chain.whole.as_ref().is_some_and(|parts| parts.is_untold())
    }

    /// Whether its request has ended.
    ///
    /// # Safety
    /// - a block is charged to it.
    pub(crate) unsafe fn has_ended(self) -> bool {
        self.slot().state().chain.has_ended()
    }

    /// Whether a limit has no room for so many bytes more, which is remembered as a refusal. No other number changes.
    ///
    /// # Safety
    /// - a block is charged to it.
    pub(crate) unsafe fn is_refused(self, bytes: usize) -> bool {
        has_no_room(self.slot(), bytes)
    }

    /// Gives the charge of its block back.
    ///
    /// # Safety
    /// - a block of this weight is charged to it, which is over with this.
    pub(crate) unsafe fn release(self, weight: Weight) {
        let slot = self.slot();
        let state = slot.state();
        let is_last = match state.memory.noted() {
            None => state.chain.give_whole_back(weight),
            Some(noted) => noted.clone().lightened(weight.bytes, || state.chain.give_whole_back(weight)),
        };
        if is_last {
            slot.let_go(); // the hold of its blocks; the state may go with it
        }
    }
}
