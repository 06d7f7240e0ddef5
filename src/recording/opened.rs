//! `Files`: the files of a recording that is read, as if they were one: a *place* is an offset in all of them, one
//! behind the other. Their bytes stay where they are.

use super::files::{no_recording, opened};
use super::own_file::{Identity, identity_of};
use super::window::{ReadAt, read_exactly};
use crate::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// So many files stay open. Others are opened each time that something of them is read: a process may have 256 open
/// files on some systems, and a recording has one of each worker.
const MAX_OPEN: usize = 128;

/// The highest place, and one more.
pub(super) const MAX_BYTES: u64 = 1 << 40;

pub(super) const CHANGED: &str = "it was changed while it was read";

#[derive(Default)]
pub(super) struct Files {
    all: Vec<Opened>,
}

struct Opened {
    path: PathBuf,
    /// `None`: it is opened when it is read.
    source: Option<Box<dyn ReadAt>>,
    identity: Identity,
    /// The place where it begins.
    begin: u64,
    length: u64,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files of {} bytes", self.all.len(), self.length())
    }
}

impl Files {
    /// Opens one more, and says how long it is.
    ///
    /// # Errors
    /// [`Error::NoRecording`].
    pub(super) fn open(&mut self, path: &Path) -> Result<u64, Error> {
        let fail = |error| no_recording(path, &error);
        let file = opened(path)?;
        let (length, identity) = (file.metadata().map_err(fail)?.len(), identity_of(&file).map_err(fail)?);
        if length >= MAX_BYTES - self.length() {
            return Err(no_recording(path, &"the files are longer than those of any recording"));
        }
        let source = (self.all.len() < MAX_OPEN).then_some(Box::new(file) as _);
        self.all.push(Opened { path: path.to_owned(), source, identity, begin: self.length(), length });
        Ok(length)
    }

    #[cfg(test)]
    pub(super) fn of_bytes(bytes: Vec<u8>) -> Self {
        let length = bytes.len() as u64;
        let source = Some(Box::new(bytes) as _);
        Self { all: vec![Opened { path: "file".into(), source, identity: None, begin: 0, length }] }
    }

    /// Of all files.
    pub(super) fn length(&self) -> u64 {
        self.all.last().map_or(0, |last| last.begin + last.length)
    }

    /// What memory the list of them takes, at most, with their names.
    pub(super) fn list_bytes(&self) -> usize {
        self.all.last().map_or(0, |last| 2 * size_of::<Opened>() + last.path.as_os_str().len())
    }

    /// What memory the list of them takes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.all.iter().map(|file| 2 * size_of::<Opened>() + file.path.as_os_str().len()).sum()
    }

    /// The file of a place, and the offset in it.
    pub(super) fn place_of(&self, place: u64) -> (&Path, u64) {
        let file = self.of(place);
        (&file.path, place - file.begin)
    }

    fn of(&self, place: u64) -> &Opened {
        let at = self.all.partition_point(|file| file.begin <= place).saturating_sub(1);
        &self.all[at]
    }

    /// Calls `work` with the file that was opened last.
    pub(super) fn with_last<R>(&self, work: impl FnOnce(&dyn ReadAt) -> io::Result<R>) -> io::Result<R> {
        let Some(last) = self.all.last() else { return Err(io::ErrorKind::NotFound.into()) };
        last.with(work)
    }

    /// Fills `into` with what follows this place in its file.
    ///
    /// # Errors
    /// [`Error::BadRecording`]: it has less. [`Error::NoRecording`]: what the system said.
    pub(super) fn read(&self, place: u64, into: &mut [u8]) -> Result<(), Error> {
        let file = self.of(place);
        let offset = place - file.begin;
        if offset + into.len() as u64 > file.length {
            return Err(self.bad(place, CHANGED));
        }
        file.with(|source| read_exactly(source, into, offset)).map_err(|error| self.failed(place, &error))
    }

    /// How many bytes the file of this place has from there on.
    pub(super) fn rest(&self, place: u64) -> u64 {
        let file = self.of(place);
        (file.begin + file.length).saturating_sub(place)
    }

    /// What is wrong at a place.
    #[cold]
    pub(super) fn bad(&self, place: u64, reason: &'static str) -> Error {
        let file = self.of(place);
        Error::BadRecording { file: file.path.display().to_string(), offset: place - file.begin, reason }
    }

    #[cold]
    pub(super) fn failed(&self, place: u64, error: &io::Error) -> Error {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return self.bad(place, CHANGED);
        }
        let file = self.of(place);
        no_recording(&file.path, &format_args!("byte {} cannot be read: {error}", place - file.begin))
    }
}

impl Opened {
    fn with<R>(&self, work: impl FnOnce(&dyn ReadAt) -> io::Result<R>) -> io::Result<R> {
        if let Some(source) = &self.source {
            return work(&**source);
        }
        let file = opened(&self.path).map_err(io::Error::other)?;
        if identity_of(&file)? != self.identity {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "another file has its name now"));
        }
        work(&file)
    }
}
