//! What this layer is told by the one that knows Python: who is selected on a thread, and whose code runs there.

use super::python::Python;
use super::shared::Thread;
use crate::handler::Handler;
use crate::handler::requests::Payer;
use crate::strategy::account::Weight;

/// See above. Functions, since this layer imports none of that one.
pub(crate) struct Binding {
    /// The handler of the request that is selected on this thread. It allocates nothing, waits for nobody, and runs no
    /// code of the user's.
    pub(crate) selected: fn(&mut Thread) -> Option<Handler>,
    /// The same where Python asks for a small object, which it does with the GIL only.
    pub(crate) selected_for_object: fn(&mut Thread) -> Option<Handler>,
    /// Called when this thread was given a block beyond a limit of this request's: a small one, or any other.
    /// As `selected`.
    pub(crate) overdrawn: fn(&mut Thread, Payer, bool),
    /// Whether the request that is selected on this thread is told of a small one in its own code, as soon as that goes
    /// on. As `selected`.
    pub(crate) tells_soon: fn() -> bool,
    /// Whose code runs on this thread, for a request that was begun within so many calls that import a module. As
    /// `selected`, but it may allocate.
    pub(crate) runs: fn(usize) -> Runs,
    /// Whether `runs` has said [`Runs::Imports`] so shortly before that it need not be asked for so many bytes more.
    pub(crate) still_imports: fn(usize) -> bool,
    /// Called while this thread owes what `overdrawn` could not set ([`OWED`]). As `selected`.
    pub(crate) owes: fn(&mut Thread),
    /// Whether a trace, profile or monitoring function runs on this thread. As `selected`.
    pub(crate) is_observing: fn() -> bool,
    /// Whether an exception is set on this thread. As `selected`.
    pub(crate) is_raising: fn() -> bool,
    /// Whether `selected` has to be asked now and then, and not only when a block is to be charged: it may know only
    /// what it found the last time.
    pub(crate) remembers: bool,
    /// Where Python's loop is. `None`: nobody is refused.
    pub(crate) python: Option<Python>,
    /// Whether this thread is in code of Python's which would lose somebody's work where it is refused a block, a small
    /// one or another. As `selected`, but it may allocate.
    pub(crate) loses_work: fn(bool) -> bool,
    /// Whether a tool's hooks stand before ours, as tracemalloc's. A block of native memory may then be its own, made
    /// under its lock, which it takes for each object: no object may be made meanwhile, so nobody is asked what runs.
    pub(crate) is_behind_a_tool: fn() -> bool,
    pub(crate) profile: Profile,
}

/// Whose code runs on a thread, for what a refusal would leave half done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// The request's own, which may be refused all.
    Own,
    /// Others', as the standard library's: a small block is not refused to it.
    Others,
    /// What enters or leaves a block would leave a lock locked, and a loop that reads for a server end its connection.
    /// Of what the collector calls, or what frees an object, nobody is told.
    AtEnds,
    /// Whoever's, while a module is imported, which would stay half made for all that come later. Or a function of a
    /// tool that observes, which CPython would remove.
    Imports,
}

/// Who is told of each charged block while [`profile`] says so. They allocate what is nobody's only, and wait for no
/// thread that makes or frees blocks while it has what they wait for.
pub(crate) struct Profile {
    /// A block was made here, which stands for so many, with this handler selected. The last one: may it look where?
    pub(crate) made: fn(usize, Weight, u64, Handler, bool),
    /// Before it is given back.
    pub(crate) freed: fn(usize),
    /// It was resized, and moved from the one address to the other.
    pub(crate) resized: fn(usize, usize, Weight),
}
