//! Every error of ctxalloc, with the numbers that a user needs. A leaf: imports no layer.

mod messages;
mod no_room;

pub use no_room::NoRoom;

use messages::{asked_for, chosen, no_block, no_room, request_called, shown};
use no_room::no_reservation;
use std::borrow::Cow;

/// What failed, with which value, and what to do about it.
///
/// When one of these is returned, nothing has changed: not the table, not the selection, and no block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The handler returned NULL.
    #[error(
        "handler '{}' could not allocate {requested_bytes} bytes; \
         ask for less, free something, or select another handler",
        shown(.handler)
    )]
    #[non_exhaustive]
    OutOfMemory {
        /// The table name of the handler that refused.
        handler: Cow<'static, str>,
        /// How many bytes were requested.
        requested_bytes: usize,
    },

    /// A handler's name has no characters.
    #[error("a handler's name must not be empty; give it one to 126 bytes of UTF-8")]
    NameEmpty,

    /// A handler's name does not fit NEP 49's `char name[127]` with its terminating NUL.
    #[error(
        "the handler name '{}' is {length_bytes} bytes long; at most 126 fit NumPy's handler struct: shorten it",
        shown(.name)
    )]
    #[non_exhaustive]
    NameTooLong {
        /// The name as given.
        name: String,
        /// Its length in bytes of UTF-8.
        length_bytes: usize,
    },

    /// A handler's name contains a NUL byte, which would cut it short in C.
    #[error("the handler name {name:?} has a NUL at byte {position}, where C would cut it off: remove it")]
    #[non_exhaustive]
    NameHasNul {
        /// The name as given.
        name: String,
        /// Where the first NUL stands, in bytes from the start.
        position: usize,
    },

    /// A foreign handler's `name` is no UTF-8 or has no terminating NUL in its 127 bytes.
    #[error(
        "the foreign handler's name field is not a NUL-terminated UTF-8 string of at most 126 bytes: \
         adopt it under a name of your own"
    )]
    NameUnreadable,

    /// Another handler has the name, for ever: handlers are never removed.
    #[error("the handler name '{}' is taken; handlers live for ever, so choose another name", shown(.name))]
    #[non_exhaustive]
    NameTaken {
        /// The name as given.
        name: String,
    },

    /// The same handler struct is in the table already, under another name than the one asked for.
    #[error("this handler is in the table already as '{}'; use that one", shown(.name))]
    #[non_exhaustive]
    AlreadyAdopted {
        /// Its name in the table.
        name: Cow<'static, str>,
    },

    /// A handler struct lacks one of the four functions that NEP 49 requires.
    #[error("the handler '{}' has no {function} function; NEP 49 requires all four to be filled in", shown(.handler))]
    #[non_exhaustive]
    FunctionMissing {
        /// The handler's name, as far as it could be read.
        handler: String,
        /// `malloc`, `calloc`, `realloc` or `free`.
        function: &'static str,
    },

    /// A handler's own copy function failed.
    #[error(
        "handler '{}' could not copy {size_bytes} bytes: its {function} returned NULL; \
         what was copied to may have some of them",
        shown(.handler)
    )]
    #[non_exhaustive]
    CopyFailed {
        /// The handler's name in the table.
        handler: Cow<'static, str>,
        /// `host2obj`, `obj2host` or `obj2obj`.
        function: &'static str,
        /// How many bytes were to be copied.
        size_bytes: usize,
    },

    /// A struct from C has a version, or a size, that this crate does not know.
    #[error("{what} {version} is not known to this ctxalloc, which knows {known}; rebuild with its own header")]
    #[non_exhaustive]
    UnknownVersion {
        /// What was given: `a handler struct`.
        what: &'static str,
        /// The version or size as given.
        version: u64,
        /// The one that is known.
        known: u64,
    },

    /// A C function was given NULL for a required argument.
    #[error("{argument} is NULL; give a valid pointer")]
    #[non_exhaustive]
    NullArgument {
        /// The argument's name in the header.
        argument: &'static str,
    },

    /// A C function was given the address of a struct that is in no table.
    #[error(
        "the handler struct at {address:#x} is not registered; call ctxalloc_register() first, and pass what it returns"
    )]
    #[non_exhaustive]
    NotRegistered {
        /// The address as given.
        address: usize,
    },

    /// A C function was given an address that is in no block of `ctxalloc_new`, or too close to the block's end.
    #[error("{}", no_block(*.address, *.size_bytes))]
    #[non_exhaustive]
    NotABlock {
        /// The address as given.
        address: usize,
        /// How many bytes from there on were meant; 0 where the start of a block was.
        size_bytes: usize,
    },

    /// Two ranges of memory that must not overlap do.
    #[error("{size_bytes} bytes at {dst:#x} and at {src:#x} overlap; copy by way of another block")]
    #[non_exhaustive]
    Overlap {
        /// Where the copy would go.
        dst: usize,
        /// Where it would come from.
        src: usize,
        /// How many bytes.
        size_bytes: usize,
    },

    /// A draft's struct was set before with other contents.
    #[error(
        "the struct of '{}' at {address:#x} has changed since it was first set; \
         a handler is for ever, so give the new one a struct and a name of its own",
        shown(.handler)
    )]
    #[non_exhaustive]
    DraftChanged {
        /// The handler it is.
        handler: Cow<'static, str>,
        /// The struct's address.
        address: usize,
    },

    /// There are no functions left to give one more handler to code that uses a draft of NEP 49.
    #[error(
        "handler '{}' cannot be used by a struct without a context: all {max} sets of functions for those are in use by \
         other handlers; use ctxalloc_get_handler(), which has no such limit",
        shown(.handler)
    )]
    #[non_exhaustive]
    TooManyViews {
        /// The handler's name.
        handler: Cow<'static, str>,
        /// How many there are.
        max: usize,
    },

    /// The handler's memory cannot be read by the host, which the operation needs.
    #[error(
        "handler '{}' has memory of a device, which the host cannot read or write, so neither NumPy nor Rust's \
         containers can live in it; use 'usm_shared' or 'usm_host' there, and for device memory \
         ctxalloc.usm.empty(kind='device') or DeviceBuffer",
        shown(.handler)
    )]
    #[non_exhaustive]
    NotHostAccessible {
        /// The handler's name in the table.
        handler: Cow<'static, str>,
    },

    /// SYCL, or dpctl's library that calls it, failed.
    #[error("{what}; {advice}")]
    #[non_exhaustive]
    Sycl {
        /// What failed, with the values.
        what: String,
        /// What to do about it.
        advice: &'static str,
    },

    /// The CUDA driver failed, is missing, or sees no device.
    #[error("{what}; {advice}")]
    #[non_exhaustive]
    Cuda {
        /// What failed, with CUDA's name for it.
        what: String,
        /// CUDA's number (`CUresult`); 0 if the driver could not be loaded.
        code: i32,
        /// What to do about it.
        advice: &'static str,
    },

    /// No handler has that name.
    #[error("no handler is named '{}'; registered are: {}", shown(.name), shown(.known))]
    #[non_exhaustive]
    UnknownHandler {
        /// The name as given.
        name: String,
        /// All names in the table, separated by commas.
        known: String,
    },

    /// An alignment that is no power of two, or outside the strategy's range.
    #[error("align={align} is not possible; give a power of two from {min} to {max} bytes")]
    #[non_exhaustive]
    BadAlignment {
        /// The value as given, in bytes.
        align: usize,
        /// The smallest alignment possible, in bytes.
        min: usize,
        /// The largest alignment possible, in bytes.
        max: usize,
    },

    /// An option of a strategy that is out of its range.
    #[error("{option}={value} is not possible; give {expected}")]
    #[non_exhaustive]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// The value as given.
        value: String,
        /// What it may be.
        expected: &'static str,
    },

    /// An environment variable has an invalid value.
    #[error("the environment says {name}={value:?}, which is not possible; give {expected}, or remove the variable")]
    #[non_exhaustive]
    BadSetting {
        /// The variable's name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },

    /// [`configure`](crate::configure) was called after the settings were used.
    #[error(
        "a pool has handed out memory already by the settings that it found; configure before the first allocation, or set \
         CTXALLOC_DECAY_SECONDS and CTXALLOC_WARM_BYTES in the environment"
    )]
    SettingsInUse,

    /// A [`Budget`](crate::strategy::Budget) has no room.
    #[error("budget '{}' {}", shown(.budget), match .chosen_for {
        Some(chosen_for) => chosen(*.held_bytes, &shown(chosen_for)),
        None => no_room(*.limit_bytes, *.in_use_bytes, *.requested_bytes, *.guaranteed_bytes),
    })]
    #[non_exhaustive]
    BudgetExceeded {
        /// The name of the budget that refused; perhaps one above the one that was charged.
        budget: String,
        /// Its number, which tells it from others of that name ([`Budget::id`](crate::strategy::Budget::id)).
        budget_id: u64,
        /// Whether it is the own limit of a request: this one's, or that of a request inside or around. Nobody else
        /// uses it.
        of_request: bool,
        /// Its limit; `usize::MAX` where it has none, and the sum would be more than can be counted.
        limit_bytes: usize,
        /// How many bytes of it are in use.
        in_use_bytes: usize,
        /// How many of these the request itself holds, with the requests inside of it; 0 where no request asked.
        held_bytes: usize,
        /// How many more bytes were requested.
        requested_bytes: usize,
        /// For whom the request was chosen to make room in that budget, if that is why it was refused
        /// ([`Budget::set_victims_after`](crate::strategy::Budget::set_victims_after)).
        chosen_for: Option<String>,
        /// How much of its limit is guaranteed to others, and is never this one's, however little they use.
        guaranteed_bytes: usize,
    },

    /// A request could not begin: there was no room to reserve what it needs.
    #[error("{}", no_reservation(&shown(.budget), *.limit_bytes, *.requested_bytes, .reason))]
    NoRoom {
        /// The name of the budget that has no room.
        budget: String,
        /// Its number ([`Budget::id`](crate::strategy::Budget::id)).
        budget_id: u64,
        /// Whether it is the own limit of a request.
        of_request: bool,
        /// Its limit.
        limit_bytes: usize,
        /// How many bytes of it are in use or reserved.
        in_use_bytes: usize,
        /// How many bytes were to be reserved.
        requested_bytes: usize,
        /// Why it did not wait, or not longer.
        reason: NoRoom,
    },

    /// A budget was to guarantee more than its limit to those below it
    /// ([`Budget::guaranteed_child`](crate::strategy::Budget::guaranteed_child)).
    #[error(
        "budget '{}' cannot guarantee {requested_bytes} bytes more to budgets below it: {guaranteed_bytes} of its \
         {limit_bytes} are guaranteed already; guarantee less, or give it a higher limit",
        shown(.budget)
    )]
    #[non_exhaustive]
    GuaranteesExceedLimit {
        /// The name of the budget whose limit is too small.
        budget: String,
        /// Its number ([`Budget::id`](crate::strategy::Budget::id)).
        budget_id: u64,
        /// Its limit.
        limit_bytes: usize,
        /// How many bytes it guarantees already.
        guaranteed_bytes: usize,
        /// How many more it was to guarantee.
        requested_bytes: usize,
    },

    /// Memory was requested from a request that has ended, and that refuses this or no longer exists.
    #[error(
        "{} has ended and gives no more memory{}; begin another request, or keep this one until its work is done",
        request_called(.request),
        asked_for(*.requested_bytes)
    )]
    #[non_exhaustive]
    RequestEnded {
        /// Its name; empty where nothing is left that knows it.
        request: String,
        /// How many bytes were requested; 0 where it was to be selected.
        requested_bytes: usize,
    },

    /// A request would be charged to too many requests and budgets.
    #[error(
        "a request cannot be charged to {max} or more requests and budgets above it; let tasks that go on begin root requests \
         (`request().root()`, `ctxalloc.request(root=True)`), and make the chain of parents of its budget shorter"
    )]
    #[non_exhaustive]
    NestedTooDeep {
        /// How many there may be.
        max: usize,
    },

    /// No huge pages are set aside for MAP_HUGETLB, or all of them are in use.
    #[error(
        "no huge page of 2 MiB is free: /proc/sys/vm/nr_hugepages is {reserved_pages}, of which {free_pages} are free; \
         reserve some as root (sysctl vm.nr_hugepages=512 sets 1 GiB aside), or do without reserved=True"
    )]
    #[non_exhaustive]
    NoHugePages {
        /// How many the machine has set aside.
        reserved_pages: usize,
        /// How many of those are neither used nor promised.
        free_pages: usize,
    },

    /// Memory could not be locked: the process's limit is too low.
    #[error(
        "cannot lock {requested_bytes} bytes of memory: RLIMIT_MEMLOCK is {limit_bytes} bytes, of which {locked_bytes} are \
         locked already; raise it (`ulimit -l`, memlock in limits.conf, LimitMEMLOCK= in a systemd unit, \
         --ulimit memlock= for a container) or give the process CAP_IPC_LOCK"
    )]
    #[non_exhaustive]
    LockLimit {
        /// How many bytes were tried.
        requested_bytes: usize,
        /// The limit of the process.
        limit_bytes: usize,
        /// How many bytes of it are used.
        locked_bytes: usize,
    },

    /// A NUMA node that the machine does not have.
    #[error("node={node} is not possible; the nodes of this machine are {online} (/sys/devices/system/node/online)")]
    #[non_exhaustive]
    NoSuchNode {
        /// The node as given.
        node: usize,
        /// The nodes of the machine, as the system writes them: `0-1,4`.
        online: String,
    },

    /// The system refused a call that a strategy cannot do without.
    #[error("the system refused {call}: {reason}; {advice}")]
    #[non_exhaustive]
    SystemRefused {
        /// The call: `mbind`, `mlock`.
        call: &'static str,
        /// What the system said.
        reason: String,
        /// What to do about it.
        advice: &'static str,
    },

    /// A recording could not be [replayed](crate::tune::replay).
    #[error("{what}; {advice}")]
    #[non_exhaustive]
    Replay {
        /// What failed, with the values.
        what: String,
        /// What to do about it.
        advice: &'static str,
    },

    /// The directory that `CTXALLOC_METRICS_DIR` names cannot be used.
    #[error(
        "the counters cannot be shared in {folder:?}, which the environment names in CTXALLOC_METRICS_DIR: {reason}; name a \
         directory that the processes may read and write, or remove the variable"
    )]
    #[non_exhaustive]
    Metrics {
        /// The directory.
        folder: String,
        /// What the system said.
        reason: String,
    },

    /// A file is no recording, or a damaged one.
    #[error("{}: at byte {offset}: {reason}; give a file that `ctxalloc run --record` or CTXALLOC_RECORD wrote", shown(.file))]
    #[non_exhaustive]
    BadRecording {
        /// The file.
        file: String,
        /// Where, in bytes from its beginning.
        offset: u64,
        /// What is wrong there.
        reason: &'static str,
    },

    /// A recording cannot be written or read.
    #[error("no recording in {}: {reason}", shown(.file))]
    #[non_exhaustive]
    NoRecording {
        /// The file.
        file: String,
        /// What the system said, or what stands in the way.
        reason: String,
    },

    /// A [`Token`](crate::Token) was used for a second [`reset`](crate::reset) (PEP 567: `RuntimeError`).
    #[error("this token has been used once already; each set() gives a token for one reset()")]
    TokenUsed,

    /// A [`Token`](crate::Token) or [`Guard`](crate::Guard) was used outside of the context that made it
    /// (PEP 567: `ValueError`). It stays valid there.
    #[error(
        "this token was made in another context; reset it in the thread or task that called set(), \
         and do not carry guards across tasks"
    )]
    TokenForeign,

    /// Python cannot be called: there is no interpreter, or it is shutting down.
    #[error("Python is not running in this process, or is shutting down")]
    NoPython,
}

#[cfg(test)]
mod tests;
