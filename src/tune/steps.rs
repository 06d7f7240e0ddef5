//! What the threads of a replay do: `planner.rs` finds it, and `replay.rs` does it.

/// What a thread does next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    Begin {
        request: u32,
    },
    End {
        request: u32,
    },
    Allocate {
        request: u32,
        block: u32,
        bytes: u64,
        zeroed: bool,
    },
    /// Bytes that the strategy does not make: an account only.
    Charge {
        request: u32,
        block: u32,
        bytes: u64,
    },
    Resize {
        /// Whose it is.
        request: u32,
        block: u32,
        before: u64,
        bytes: u64,
    },
    /// Of what was charged.
    Recharge {
        block: u32,
        bytes: u64,
    },
    Free {
        block: u32,
    },
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) act: Act,
    /// Its waits: from here to those of the next step.
    pub(super) waits: u32,
    /// Whether another thread waits for it.
    pub(super) is_awaited: bool,
}

/// Waits until a thread is as far as that (`progress.rs` says what it counts).
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    pub(super) thread: u32,
    pub(super) done: u64,
}

/// A thread begins, or has ended before those begin that follow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub(super) lane: u32,
    pub(super) is_end: bool,
}

#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) steps: Vec<Step>,
    pub(super) waits: Vec<Wait>,
}
