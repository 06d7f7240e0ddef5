//! What users see of a live block, and what they may tell of its maker.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// A live block of a [`Tracked`](super::Tracked) strategy, as it was when it was listed.
///
/// Equal to another one where both are the same block, though its age and size may have changed: the difference of two
/// lists is what was made, or released, in between.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LiveBlock {
    /// Where it starts; 0 while it is being resized, for it may be moving.
    pub address: usize,
    /// Its size in bytes, as asked for.
    pub size_bytes: usize,
    /// How long ago it was made, by the system's coarse clock: right to a few milliseconds.
    pub age: Duration,
    /// The thread that made it.
    pub thread: Thread,
    /// The task that made it, where that was [told](Told).
    pub task: Option<Box<str>>,
    /// Where in the program it was made, where that was [told](Told).
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
    /// A number that no other block of this process has or had (but for those made many billions earlier).
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// A thread as the system knows it; it may have ended since.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Thread {
    /// The system's number for it: `gettid()`, Python's `threading.get_native_id()`.
    pub id: u32,
    /// The system's name for it when it first allocated: on Linux at most 15 bytes, the program's unless somebody (Rust's
    /// `std`, tokio, Python from 3.14 on) gave it one.
    pub name: String,
}

/// What is told of a block's maker: see [`Tracked::telling`](super::Tracked::telling).
#[derive(Debug, Clone, Default)]
pub enum Told {
    /// Nothing.
    #[default]
    Nothing,
    /// The number of a task, like tokio's. Costs no memory; up to 63 bits are kept.
    Task(u64),
    /// More than that. It is kept until the block is released, and let go on whatever thread that happens.
    Origin(Arc<Origin>),
}

impl From<Option<u64>> for Told {
    fn from(task: Option<u64>) -> Self {
        task.map_or(Self::Nothing, Self::Task)
    }
}

/// Where a block comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    /// The task's name.
    pub task: Option<Box<str>>,
    /// The place in the program.
    pub place: Option<Arc<Place>>,
}

/// A place in a program: a stack of calls, the innermost first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// The calls.
    pub frames: Box<[Frame]>,
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The source file.
    pub file: Arc<str>,
    /// The line in it, from 1 on.
    pub line: u32,
    /// The function's name.
    pub function: Arc<str>,
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
