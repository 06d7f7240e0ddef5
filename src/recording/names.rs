//! `Names`: what a recording's requests and their handlers are called, by number. A file begins with all that are
//! known, so they may take a share of it only: those that come then are one name, `(other)`.

use super::encoded::{HANDLER, NAME, OTHERS, named};
use super::wire::HEAD_BYTES;
use std::collections::HashMap;

/// So many are told apart of requests, and as many of handlers, each of at most so many bytes.
const MAX_NAMES: usize = 4096;
const MAX_NAME_BYTES: usize = 256;
/// Their frames are at most this part of a file.
const SHARE: u64 = 4;
const OTHER: &str = "(other)";
/// At least what the frames of `(other)` take, for requests and for handlers.
const OTHER_BYTES: u64 = 2 * (2 * HEAD_BYTES as u64 + 24);

/// A name that has a number since now, for the file.
#[derive(Debug)]
pub(super) struct Name {
    kind: u8,
    number: u32,
    text: String,
    /// Whether it is the one of all that have no room.
    is_other: bool,
}

impl Name {
    /// The bodies that say so.
    pub(super) fn bodies(&self) -> impl Iterator<Item = Vec<u8>> {
        let other = self.is_other.then(|| vec![OTHERS, self.kind]);
        [named(self.kind, self.number, &self.text)].into_iter().chain(other)
    }

    fn file_bytes(&self) -> u64 {
        self.bodies().map(|body| (HEAD_BYTES + body.len()) as u64).sum()
    }
}

/// The names that a recording knows.
#[derive(Debug, Default)]
pub(super) struct Names {
    requests: OfAKind,
    handlers: OfAKind,
    /// What is left for their frames.
    room_bytes: u64,
}

#[derive(Debug, Default)]
struct OfAKind {
    numbers: HashMap<String, u32>,
    /// That of `(other)`, which no other name has.
    other: Option<u32>,
}

impl Names {
    /// None yet, for files of so many bytes.
    pub(super) fn new(file_bytes: u64) -> Self {
        Self { room_bytes: (file_bytes / SHARE).saturating_sub(OTHER_BYTES), ..Self::default() }
    }

    /// The number of a name, and what the file is to say where it has it since now.
    pub(super) fn number_of(&mut self, is_handler: bool, name: &str) -> (u32, Option<Name>) {
        let name = shortened(name);
        let (kind, of) = match is_handler {
            true => (HANDLER, &mut self.handlers),
            false => (NAME, &mut self.requests),
        };
        if let Some(&number) = of.numbers.get(name) {
            return (number, None);
        }
        let number = (of.numbers.len() + usize::from(of.other.is_some())) as u32;
        let told = Name { kind, number, text: name.to_owned(), is_other: false };
        let bytes = told.file_bytes();
        if of.numbers.len() < MAX_NAMES && bytes <= self.room_bytes {
            self.room_bytes -= bytes;
            of.numbers.insert(name.to_owned(), number);
            return (number, Some(told));
        }
        if let Some(other) = of.other {
            return (other, None);
        }
        of.other = Some(number);
        (number, Some(Name { text: OTHER.to_owned(), is_other: true, ..told }))
    }
}

fn shortened(name: &str) -> &str {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

#[cfg(test)]
mod tests {
    use super::{Name, Names, OTHER_BYTES};

    fn told(name: Option<&Name>) -> u64 {
        name.map_or(0, Name::file_bytes)
    }

    #[test]
    fn names_take_a_quarter_of_a_file_whatever_they_are() {
        for length in [0, 1, 20, 255, 256, 1000] {
            let mut names = Names::new(32 << 10);
            let (mut bytes, mut known, mut others) = (0, 0, 0);
            for at in 0..3000 {
                let name = format!("{at:04}{}", "\u{e9}".repeat(length / 2));
                for is_handler in [false, true] {
                    let (_, new) = names.number_of(is_handler, &name);
                    bytes += told(new.as_ref());
                    known += u32::from(new.as_ref().is_some_and(|new| !new.is_other));
                    others += u32::from(new.as_ref().is_some_and(|new| new.is_other));
                    assert!(names.number_of(is_handler, &name).1.is_none(), "it is told once");
                }
            }
            assert!(bytes <= 8 << 10 && bytes > 7 << 10, "{length}: {bytes}");
            assert!(known > 20 && others == 2, "{length}: {known}, {others}");
        }
    }

    #[test]
    fn a_request_that_is_called_other_is_not_taken_for_the_rest() {
        let mut names = Names::new(8 << 10);
        let own = names.number_of(false, "(other)");
        assert!(own.1.is_some_and(|name| !name.is_other));
        let rest = (0..200).map(|at| names.number_of(false, &format!("{at:200}"))).last();
        assert_ne!(rest.map(|(number, _)| number), Some(own.0));
        assert_eq!(names.number_of(false, "(other)").0, own.0);
    }

    #[test]
    fn the_room_for_other_is_enough() {
        let name = |kind| Name { kind, number: u32::MAX, text: super::OTHER.to_owned(), is_other: true };
        assert!(name(super::NAME).file_bytes() + name(super::HANDLER).file_bytes() <= OTHER_BYTES);
    }
}
