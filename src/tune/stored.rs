//! A plan as a file, for the process that replays it. Reading a recording and planning it free large blocks, and glibc
//! learns from each of them to map fewer blocks: in a process that did so, the C heap keeps memory warm that it would
//! give back in the service. Here nothing large is freed: each list is made at once, as long as it gets, and the file's
//! bytes are never given back.
//!
//! Written and read by the same version, on the same machine: words of eight bytes, and their checksum at the end.

use super::plan::{Facts, Plan, Planned, ReadFrom};
use super::steps::{Act, Lane, Step, Turn, Wait};
use crate::error::Error;
use crate::recording::Sums;
use crc32fast::Hasher;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

const MAGIC: u64 = u64::from_le_bytes(*b"ctxplan6");

impl Plan {
    /// Writes it to a file, for [`read`](Self::read) in another process.
    ///
    /// # Errors
    /// [`Error::Replay`]: it cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let fail =
            |error| failed(path, &error, "see that its folder has room; TMPDIR names another one for `ctxalloc`");
        let mut words = Words { file: BufWriter::new(File::create(path).map_err(fail)?), sum: Hasher::new() };
        self.put(&mut words).and_then(|()| words.end()).map_err(fail)
    }

    fn put(&self, words: &mut Words) -> io::Result<()> {
        words.number(MAGIC)?;
        words.put(self.names.len())?;
        for name in &self.names {
            words.put(name.len())?;
            words.bytes(name.as_bytes())?;
        }
        words.put(self.requests.len())?;
        for planned in &self.requests {
            let Planned { number, parent, route, sums, has_ended, is_uncompared, is_used_later, is_counted } = planned;
            words.put(parent.map_or(0, |parent| parent as usize + 1))?;
            words.put(*route as usize)?;
            for number in [sums.peak_bytes, sums.total_bytes, sums.blocks, sums.live_bytes, sums.refused] {
                words.number(number)?;
            }
            let flags = [*has_ended, *is_uncompared, *is_used_later, *is_counted].map(usize::from);
            words.put(flags[0] | flags[1] << 1 | flags[2] << 2 | flags[3] << 3)?;
            words.number(*number)?;
        }
        words.put(self.lanes.len())?;
        for Lane { steps, waits } in &self.lanes {
            words.put(steps.len())?;
            steps.iter().try_for_each(|step| words.step(step))?;
            words.put(waits.len())?;
            for wait in waits {
                words.put(wait.thread as usize)?;
                words.number(wait.done)?;
            }
        }
        words.put(self.turns.len())?;
        self.turns.iter().try_for_each(|turn| words.pair(turn.lane, u32::from(turn.is_end)))?;
        words.put(self.main.map_or(0, |lane| lane as usize + 1))?;
        words.put(self.blocks)?;
        words.number(self.middle)
    }

    /// A plan that [`write`](Self::write) wrote. Its facts are known where it was made.
    ///
    /// # Errors
    /// [`Error::Replay`]: it cannot be read, or is none of this version.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|error| failed(path, &error, "replay the recording"))?;
        let plan = bytes.split_last_chunk::<8>().and_then(|(rest, checksum)| {
            let is_whole = u64::from_le_bytes(*checksum) == u64::from(crc32fast::hash(rest));
            if is_whole { Rest(rest).plan() } else { None }
        });
        plan.map(|plan| Self { _file: ReadFrom(bytes), ..plan })
            .ok_or_else(|| failed(path, &"this is no plan, or one of another version", "replay the recording"))
    }
}

#[cold]
fn failed(path: &Path, reason: &dyn std::fmt::Display, advice: &'static str) -> Error {
    Error::Replay { what: format!("{}: {reason}", path.display()), advice }
}

/// The file, a piece at a time, and the checksum so far.
struct Words {
    file: BufWriter<File>,
    sum: Hasher,
}

impl Words {
    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.file.write_all(bytes)
    }

    fn end(mut self) -> io::Result<()> {
        let checksum = u64::from(self.sum.finalize());
        self.file.write_all(&checksum.to_le_bytes())?;
        self.file.flush()
    }

    fn number(&mut self, number: u64) -> io::Result<()> {
        self.bytes(&number.to_le_bytes())
    }

    fn put(&mut self, number: usize) -> io::Result<()> {
        self.number(number as u64)
    }

    fn pair(&mut self, low: u32, high: u32) -> io::Result<()> {
        self.number(u64::from(low) | u64::from(high) << 32)
    }

    fn step(&mut self, step: &Step) -> io::Result<()> {
        let (kind, request, block, bytes, before) = match step.act {
            Act::Begin { request } => (0, request, 0, 0, 0),
            Act::End { request } => (1, request, 0, 0, 0),
            Act::Allocate { request, block, bytes, zeroed } => (2, request, block, bytes, u64::from(zeroed)),
            Act::Charge { request, block, bytes } => (3, request, block, bytes, 0),
            Act::Resize { request, block, before, bytes } => (4, request, block, bytes, before),
            Act::Recharge { block, bytes } => (5, 0, block, bytes, 0),
            Act::Free { block } => (6, 0, block, 0, 0),
        };
        self.pair(kind | u32::from(step.is_awaited) << 8, step.waits)?;
        self.pair(request, block)?;
        self.number(bytes)?;
        self.number(before)
    }
}

struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn number(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn pair(&mut self) -> Option<(u32, u32)> {
        self.number().map(|number| (number as u32, (number >> 32) as u32))
    }

    /// How many follow, of so many bytes each at least.
    fn count(&mut self, bytes: usize) -> Option<usize> {
        usize::try_from(self.number()?).ok().filter(|&count| count <= self.0.len() / bytes)
    }

    fn list<T>(&mut self, bytes: usize, mut each: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.count(bytes)?;
        let mut found = Vec::with_capacity(count);
        for _ in 0..count {
            found.push(each(self)?);
        }
        Some(found)
    }

    fn plan(mut self) -> Option<Plan> {
        if self.number()? != MAGIC {
            return None;
        }
        let names = self.list(8, Self::name)?;
        let requests = self.list(72, Self::request)?;
        let lanes =
            self.list(16, |rest| Some(Lane { steps: rest.list(32, Self::step)?, waits: rest.list(16, Self::wait)? }))?;
        let turns = self.list(8, Self::turn)?;
        let main = self.number()?.checked_sub(1).map(|lane| lane as u32);
        let (blocks, middle) = (usize::try_from(self.number()?).ok()?, self.number()?);
        Some(Plan {
            lanes,
            turns,
            main,
            requests,
            names,
            blocks,
            middle,
            facts: Facts::default(),
            _file: ReadFrom::default(),
        })
    }

    fn name(&mut self) -> Option<String> {
        let length = self.count(1)?;
        let (name, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        String::from_utf8(name.to_vec()).ok()
    }

    fn request(&mut self) -> Option<Planned> {
        let (parent, route) = (self.number()?, self.number()?);
        let sums = Sums {
            peak_bytes: self.number()?,
            total_bytes: self.number()?,
            blocks: self.number()?,
            live_bytes: self.number()?,
            refused: self.number()?,
            includes_others: false, // its sums are those of its events then
        };
        let flags = self.number()?;
        let parent = parent.checked_sub(1).map(|parent| parent as u32);
        let [has_ended, is_uncompared, is_used_later, is_counted] = [1, 2, 4, 8].map(|bit| flags & bit != 0);
        let (number, route) = (self.number()?, route as u32);
        Some(Planned { number, parent, route, sums, has_ended, is_uncompared, is_used_later, is_counted })
    }

    fn step(&mut self) -> Option<Step> {
        let ((kind, waits), (request, block), bytes, before) =
            (self.pair()?, self.pair()?, self.number()?, self.number()?);
        let act = match kind & 0xff {
            0 => Act::Begin { request },
            1 => Act::End { request },
            2 => Act::Allocate { request, block, bytes, zeroed: before != 0 },
            3 => Act::Charge { request, block, bytes },
            4 => Act::Resize { request, block, before, bytes },
            5 => Act::Recharge { block, bytes },
            6 => Act::Free { block },
            _ => return None,
        };
        Some(Step { act, waits, is_awaited: kind & 0x100 != 0 })
    }

    fn turn(&mut self) -> Option<Turn> {
        self.pair().map(|(lane, is_end)| Turn { lane, is_end: is_end != 0 })
    }

    fn wait(&mut self) -> Option<Wait> {
        Some(Wait { thread: self.number()? as u32, done: self.number()? })
    }
}
