//! The names in a recording's files: each text once, and what numbers the processes give them.

use super::room::{Full, Room};
use std::collections::HashMap;

/// So many names have room beside those that have enough bytes in the files. A recorder tells 4096 names apart.
const NAMES: usize = 16 << 10;
const BYTES_FOR_EACH_NAME: u64 = 512;

/// What a text takes beside its bytes: its place in a map that has just grown.
const TEXT_BYTES: usize = 120;

/// Texts, each once, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Texts {
    numbers: HashMap<String, u32>,
}

impl Texts {
    /// Its number. `None`: there are too many for files of so many bytes.
    pub(super) fn number_of(&mut self, text: &str, bytes: u64, room: &mut Room) -> Result<Option<u32>, Full> {
        if let Some(&number) = self.numbers.get(text) {
            return Ok(Some(number));
        }
        let most = (bytes / BYTES_FOR_EACH_NAME + NAMES as u64).min(u64::from(u32::MAX - 1));
        let next = self.numbers.len() as u64;
        if next >= most {
            return Ok(None);
        }
        room.take(TEXT_BYTES + text.len())?;
        self.numbers.insert(text.to_owned(), next as u32);
        Ok(Some(next as u32))
    }

    pub(super) fn into_vec(self) -> Vec<String> {
        let mut texts: Vec<_> = self.numbers.into_iter().collect();
        texts.sort_unstable_by_key(|&(_, number)| number);
        texts.into_iter().map(|(text, _)| text).collect()
    }
}

/// By the number that a process gives a name, that of the recording. Recorders count from 0 on.
#[derive(Debug, Clone, Default)]
pub(super) struct NumberedNames(Vec<u32>);

impl NumberedNames {
    pub(super) fn get(&self, number: u64) -> Option<u32> {
        self.0.get(usize::try_from(number).ok()?).copied().filter(|&name| name != u32::MAX)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<u32>()
    }

    pub(super) fn set(&mut self, number: u64, name: u32, room: &mut Room) -> Result<(), Full> {
        while self.0.len() as u64 <= number {
            room.push(&mut self.0, u32::MAX)?;
        }
        self.0[number as usize] = name;
        Ok(())
    }
}
