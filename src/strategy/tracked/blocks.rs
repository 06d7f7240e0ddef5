//! What a listing says of a live block, and what users can add about its maker.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// A live block of a [`Tracked`](super::Tracked) strategy, as it was when it was listed.
///
/// Two are equal if they are the same block, even if its age or size has changed. So the difference of two lists is
/// what was allocated or released in between.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LiveBlock {
    /// The address of its first byte; 0 while it is being resized, since it may be moving.
    pub address: usize,
    /// Its size in bytes, as requested.
    pub size_bytes: usize,
    /// The time since it was allocated, by the system's coarse clock: accurate to a few milliseconds.
    pub age: Duration,
    /// The thread that made it.
    pub thread: Thread,
    /// The task that made it, if the [attribution](Attribution) names one.
    pub task: Option<Box<str>>,
    /// Where in the program it was made, if the [attribution](Attribution) says so.
    pub place: Option<Arc<Place>>,
    pub(super) number: u64,
}

impl PartialEq for LiveBlock {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for LiveBlock {}

impl Hash for LiveBlock {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

impl LiveBlock {
    /// A number that no other block of this process has. Numbers repeat only after 2^32 blocks of one list.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// A thread as the system knows it. It may have ended since.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Thread {
    /// The system's number for it: `gettid()`, Python's `threading.get_native_id()`.
    pub id: u32,
    /// The system's name for it when it first allocated: on Linux at most 15 bytes, the program's unless somebody
    /// (Rust's `std`, tokio, Python from 3.14 on) gave it one.
    pub name: String,
}

/// Who made a block, besides the thread: see [`Tracked::with_attribution`](super::Tracked::with_attribution).
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum Attribution {
    /// The thread is all that is known.
    #[default]
    Unknown,
    /// The number of a task, like tokio's. Costs no memory; up to 63 bits are kept.
    Task(u64),
    /// A task's name, a place in the program, or both. It is dropped when the block is released, on whichever thread
    /// that is.
    Origin(Arc<Origin>),
}

impl From<Option<u64>> for Attribution {
    fn from(task: Option<u64>) -> Self {
        task.map_or(Self::Unknown, Self::Task)
    }
}

/// Where a block comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Origin {
    /// The task's name.
    pub task: Option<Box<str>>,
    /// The place in the program.
    pub place: Option<Arc<Place>>,
}

impl Origin {
    /// A task's name, a place, or both.
    #[must_use]
    pub const fn new(task: Option<Box<str>>, place: Option<Arc<Place>>) -> Self {
        Self { task, place }
    }
}

/// A place in a program: a stack of calls, the innermost first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Place {
    /// The calls.
    pub frames: Box<[Frame]>,
}

impl Place {
    /// These calls, the innermost first.
    #[must_use]
    pub fn new(frames: impl Into<Box<[Frame]>>) -> Self {
        Self { frames: frames.into() }
    }
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Frame {
    /// The source file.
    pub file: Arc<str>,
    /// The line in it, from 1 on.
    pub line: u32,
    /// The function's name.
    pub function: Arc<str>,
}

impl Frame {
    /// The call of `function` at this line (from 1 on) of a source file.
    #[must_use]
    pub fn new(file: impl Into<Arc<str>>, line: u32, function: impl Into<Arc<str>>) -> Self {
        Self { file: file.into(), line, function: function.into() }
    }
}

/// In one line: `load (pictures.py:31) < handle (service.py:10)`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, frame) in self.frames.iter().enumerate() {
            let file = frame.file.rsplit('/').next().unwrap_or_default();
            let before = if number > 0 { " < " } else { "" };
            write!(f, "{before}{} ({file}:{})", frame.function, frame.line)?;
        }
        Ok(())
    }
}

/// How many blocks are alive, and how large they are together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Totals {
    /// The number of live blocks.
    pub blocks: usize,
    /// Their sizes in bytes, as requested, added up.
    pub bytes: usize,
}
