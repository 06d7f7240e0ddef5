//! `Prepared`: a request that could begin, and may have to wait for its reservation first.

use super::aside::Aside;
use super::begun::{Begun, Unseen};
use super::on_chosen::OnChosen;
use super::seen::{Seen, chain_of};
use super::slot::Slot;
use super::small;
use super::state::{AfterEnd, MIN_ALIGN, Memory, State};
use super::unseen::{self, Outside};
use crate::counters::{History, history_of};
use crate::error::Error;
use crate::handler::heap::HeapRecord;
use crate::handler::held::Held;
use crate::handler::word::Handler;
use crate::recording::{self, Choice};
use crate::strategy::account::Chain;
use crate::strategy::{Budget, Pool, Strategy, flush_recordings};
use crate::unattributed::{is_active, unattributed};
use std::sync::Arc;

/// What a request is begun with.
#[derive(Debug, Default)]
#[non_exhaustive]
pub(crate) struct Terms {
    /// For messages and metrics; a number of its own where there is none.
    pub name: Option<Arc<str>>,
    /// The most bytes that may be alive at one time.
    pub limit_bytes: Option<usize>,
    /// By how many bytes blocks of up to 1 KiB may together exceed each limit. The limit of a request around
    /// it that grants no overdraft is never exceeded.
    pub overdraft_bytes: usize,
    /// What the request is charged to besides.
    pub budget: Option<Budget>,
    /// Where its blocks come from: the shared pool where there is none.
    pub strategy: Option<Arc<dyn Strategy>>,
    /// The handler of the request around it, or any other handler, or none.
    pub outer: Option<Handler>,
    /// What becomes of work that goes on after it.
    pub after_end: AfterEnd,
    /// The most bytes of Rust's heap that may be alive at one time.
    pub heap_limit_bytes: Option<usize>,
    /// Whether more than that is refused.
    pub heap_refuses: bool,
    /// Whether to measure by how much the process grows beside its pools: two looks at the system, each some
    /// microseconds.
    pub measure_unseen: bool,
    /// Whether it counts and limits native memory and Python objects too. Whoever sets it has seen to it that these are
    /// reported (`src/whole`).
    pub is_whole: bool,
    /// Whether it will most likely be used on the thread that begins it: cheaper there, and dearer elsewhere.
    pub is_of_this_thread: bool,
    /// How many bytes of everything above are reserved for it from its beginning.
    pub reserve_bytes: Option<usize>,
    /// What is called when it is chosen to make room for others.
    pub on_chosen: Option<OnChosen>,
    /// Whether that is found out by what requests of its name needed lately. It has a limit then.
    pub reserves_by_history: bool,
    /// How many of its name may wait.
    pub max_waiting: Option<usize>,
    /// Whether metrics leave it out: it stands for one that got no reservation, and does nothing.
    pub is_uncounted: bool,
}

/// The overdraft of requests that are begun in Python, in bytes. NumPy crashes where the memory of some scalars is
/// refused (it does not check what `PyArray_FromScalar` returns), so only larger blocks may be refused.
#[cfg(feature = "python")]
pub(crate) const OVERDRAFT_BYTES: usize = 64 << 10;

/// A request's terms, checked, and its accounts, of which nobody else knows yet.
pub(crate) struct Prepared {
    terms: Terms,
    chain: Arc<Chain>,
    /// Whether it is inside of a request that has not ended.
    is_inside: bool,
    /// The request around it that counts native memory and objects of this one too.
    payer: Option<Held>,
    /// What the request around it is to a recording.
    around: Choice,
    /// What requests of its name needed, if that decides how much it reserves.
    history: Option<Arc<History>>,
}

impl Prepared {
    /// Checks the terms, and makes the accounts.
    ///
    /// # Errors
    /// [`Error::BadOption`] where the strategy aligns its blocks to less than 16 bytes, and where the history is to
    /// decide what it reserves, and it has no limit; [`Error::NestedTooDeep`].
    pub(crate) fn new(terms: Terms) -> Result<Self, Error> {
        Self::made(terms)
    }

    #[inline(always)]
    fn made(mut terms: Terms) -> Result<Self, Error> {
        if let Some(strategy) = &terms.strategy
            && strategy.alignment() < MIN_ALIGN
        {
            return Err(Error::BadOption {
                option: "strategy.alignment()",
                value: strategy.alignment().to_string(),
                expected: "a strategy whose blocks are aligned to 16 bytes or more, as a request's are",
            });
        }
        if let Some(limit_bytes) = terms.heap_limit_bytes
            && !is_active()
        {
            return Err(Error::BadOption {
                option: "heap_limit_bytes",
                value: limit_bytes.to_string(),
                expected: "a GlobalScoped as the program's #[global_allocator], which counts Rust's heap",
            });
        }
        let mut history = None;
        if terms.reserves_by_history {
            let Some(limit_bytes) = terms.limit_bytes else {
                let expected = "limit_bytes too: it is what is reserved until some of its name have ended";
                return Err(Error::BadOption { option: "reserve_bytes", value: "auto".to_owned(), expected });
            };
            history = history_of(terms.name.as_deref());
            let reserve = history.as_ref().map_or(limit_bytes, |history| history.reserve_bytes(limit_bytes));
            terms.reserve_bytes = Some(reserve);
        }
        // Held from here on: it may end meanwhile, and its strategy may be dropped with this.
        let outer = terms.outer.take().and_then(Held::try_on);
        let _unattributed = unattributed(); // the request's own records are charged to no request
        let around = outer.as_ref().and_then(|outer| chain_of(outer.handler()));
        let around = around.as_deref();
        let mut chain = Chain::of_request(
            terms.name.take(), // its account has it from here on
            terms.limit_bytes,
            terms.overdraft_bytes,
            terms.budget.as_ref().map(Budget::account),
            around,
            terms.is_of_this_thread,
            terms.reserve_bytes.is_some(),
        )?;
        chain.count_parts(around, terms.is_whole);
        if terms.reserves_by_history {
            // More than a budget has could never be had, and nothing would ever be learned.
            let most = chain.least_limit_above();
            terms.reserve_bytes = terms.reserve_bytes.map(|bytes| most.map_or(bytes, |most| bytes.min(most)));
        }
        let payer = if terms.is_whole { None } else { outer.as_ref().and_then(payer_around) };
        let recorded = outer.as_ref().map(choice_of).unwrap_or_default();
        let is_inside = around.is_some_and(|around| !around.has_ended());
        Ok(Self { terms, chain: Arc::new(chain), is_inside, payer, around: recorded, history })
    }

    /// How many bytes it reserves.
    pub(crate) fn reserve_bytes(&self) -> Option<usize> {
        self.terms.reserve_bytes
    }

    /// How many of its name may wait.
    pub(crate) fn max_waiting(&self) -> Option<usize> {
        self.terms.max_waiting
    }

    pub(crate) fn chain(&self) -> &Arc<Chain> {
        &self.chain
    }

    /// Whether it is inside of a request that has not ended.
    pub(crate) fn is_inside(&self) -> bool {
        self.is_inside || self.chain.is_inside_of_a_live_one()
    }

    /// Begins the request. Its reservation, if it is to have one, was taken.
    #[must_use]
    pub(crate) fn begin(self) -> Begun {
        self.begun(false).0
    }

    /// [`new`](Self::new) and [`begin`](Self::begin) where nothing is reserved, and a second hold on the request for
    /// somebody else.
    ///
    /// # Errors
    /// As for `new`.
    #[cfg(feature = "python")]
    pub(crate) fn begin_now(terms: Terms) -> Result<(Begun, Option<Held>), Error> {
        Ok(Self::made(terms)?.begun(true))
    }

    #[inline(always)]
    fn begun(self, twice: bool) -> (Begun, Option<Held>) {
        let Self { terms, chain, is_inside, payer, around, history } = self;
        let _unattributed = unattributed(); // as above
        let unseen = terms.measure_unseen.then(|| Box::new(Unseen { before: Outside::before(), growth_bytes: None }));
        let is_counted = terms.is_whole || payer.is_some();
        let aside = |strategy| if is_counted { Arc::new(Aside(strategy)) as _ } else { strategy };
        let (handler, align) = match &terms.strategy {
            Some(strategy) => (Some(strategy), strategy.alignment()),
            None => (None, Pool::shared().alignment()),
        };
        let seen = Arc::clone(&chain);
        let (name, account) = (seen.own().given_name(), seen.own().number());
        let choice = recording::begin(name, || called(handler), align, &around, account, flush_recordings);
        if !matches!(choice, Choice::None) {
            // Those that it is charged to by a budget: to the recording it is not inside of them.
            seen.tell_others(|number| number == account || choice.is_inside(number));
        }
        let memory = Memory::new(terms.strategy.map(aside));
        let (memory, left_out_by) = match choice {
            Choice::Recorded(noted) => (memory.recorded(noted), 0),
            Choice::LeftOut(by) => (memory, by),
            Choice::None => (memory, 0),
        };
        let heap = HeapRecord::new(terms.heap_limit_bytes, terms.heap_refuses);
        let state = State {
            kept: small::kept(&memory, terms.after_end, &chain),
            // SAFETY: the two are dropped together, and nobody takes the chain out.
            own: unsafe { chain.own_again() },
            chain,
            memory,
            after_end: terms.after_end,
            heap,
            payer,
            #[cfg(ctxalloc_whole)]
            ticket: Default::default(),
            _budget: terms.budget,
            on_chosen: terms.on_chosen,
            left_out_by,
        };
        let (held, second) = Slot::begin(name, account, state, twice);
        unseen::count(is_inside);
        let seen = Seen { handler: held.handler(), chain: seen };
        let is_uncounted = terms.is_uncounted;
        (Begun { seen, held: Some(held), history, is_uncounted, unseen }, second)
    }
}

/// What a request is to a recording.
fn choice_of(outer: &Held) -> Choice {
    let Some(state) = Slot::behind(outer.handler()).map(Slot::state) else { return Choice::None };
    match (state.memory.noted(), state.left_out_by) {
        (Some(noted), _) => Choice::Recorded(noted.clone()),
        (None, 0) => Choice::None,
        // It is over, and so is all around it: what begins now is chosen by itself, as where this was recorded.
        (None, _) if state.chain.has_ended() && !state.chain.is_inside_of_a_live_one() => Choice::None,
        (None, by) => Choice::LeftOut(by),
    }
}

/// What a recording calls a strategy: its type, as its description begins, and of a pool its source, of `Aligned` its
/// alignment. Nothing else of the description: it may have addresses.
#[cold]
fn called(strategy: Option<&Arc<dyn Strategy>>) -> String {
    let Some(strategy) = strategy else { return "pool".to_owned() };
    let text = format!("{strategy:?}");
    let word = |text: &str| -> String {
        text.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
    };
    match text.split_once(' ') {
        Some(("Pool", rest)) => format!("Pool over {}", word(rest.trim_start_matches("{ source: "))),
        Some(("Aligned", rest)) => format!("Aligned {}", word(rest.trim_start_matches("{ align: "))),
        _ => word(&text),
    }
}

/// The request that pays for what is not arrays in a request inside of this one, which does not count that itself.
fn payer_around(outer: &Held) -> Option<Held> {
    let state = Slot::behind(outer.handler())?.state();
    if state.counts_whole() { Some(outer.clone()) } else { state.payer.clone() }
}
