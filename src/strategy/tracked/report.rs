//! Live blocks grouped by where they were made.

use super::blocks::{LiveBlock, Place};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Live blocks in groups, the largest first: by place in the program if that is known, else by the thread's name. Its
/// [`Display`](fmt::Display) text has one line per group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The number of all blocks.
    pub blocks: usize,
    /// Their sizes in bytes, added up.
    pub bytes: usize,
    /// The groups.
    pub groups: Vec<Group>,
}

/// Blocks that were made at one place, or by threads of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The place, if it is known.
    pub place: Option<Arc<Place>>,
    /// The name of the threads that made them.
    pub thread_name: String,
    /// The number of blocks in the group.
    pub blocks: usize,
    /// Their sizes in bytes, added up.
    pub bytes: usize,
    /// The age of the oldest.
    pub oldest: Duration,
}

impl Report {
    /// Groups the blocks of a listing.
    #[must_use]
    pub fn of(blocks: &[LiveBlock]) -> Self {
        let mut groups: HashMap<Result<&Place, &str>, Group> = HashMap::new();
        for block in blocks {
            let key = block.place.as_deref().ok_or(block.thread.name.as_str());
            let group = groups.entry(key).or_insert_with(|| Group {
                place: block.place.clone(),
                thread_name: block.thread.name.clone(),
                blocks: 0,
                bytes: 0,
                oldest: Duration::ZERO,
            });
            group.blocks += 1;
            group.bytes += block.size_bytes;
            group.oldest = group.oldest.max(block.age);
        }
        let mut groups: Vec<Group> = groups.into_values().collect();
        groups.sort_by(|one, other| other.bytes.cmp(&one.bytes).then(other.oldest.cmp(&one.oldest)));
        Self { blocks: blocks.len(), bytes: blocks.iter().map(|block| block.size_bytes).sum(), groups }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count| if count == 1 { "" } else { "s" };
        write!(f, "{} live block{}, {} bytes", self.blocks, plural(self.blocks), self.bytes)?;
        for Group { place, thread_name, blocks, bytes, oldest } in &self.groups {
            let oldest = oldest.as_secs_f64();
            write!(f, "\n  {bytes} bytes in {blocks} block{}, oldest {oldest:.1} s: ", plural(*blocks))?;
            match place {
                Some(place) => write!(f, "{place}")?,
                None => write!(f, "thread '{thread_name}'")?,
            }
        }
        Ok(())
    }
}
