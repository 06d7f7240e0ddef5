//! The files that a process records into.
//!
//! A process holds a lock on its file, which the system releases when the process ends: `FILE`, or `FILE.1`, `FILE.2`
//! and so on where others record below the same name. The next process takes a file over and appends to it, so there
//! are only as many files as processes recorded at one time. A file that has half of what it may have becomes
//! `FILE.old`, in place of the one before. Its name is never free meanwhile: another process would take it, and put its
//! own file in the place of `FILE.old`.

use super::encoded::{CLOSED, Process};
use super::frames::{Frames, Part};
use super::names::Name;
use super::own_file::OwnFile;
use super::shard::{FULL_BYTES, SHARDS};
use super::wire::{Found, HEAD_BYTES, MAGIC, frame, next_frame};
use crate::os;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// How many processes may record below one name.
const MAX_FILES: usize = 4096;

/// What a file is not put aside for: what a process says of itself, and a body of events.
const MIN_ROOM_BYTES: usize = 18 << 10;

/// How many bytes one file may have: there are two, of which one was put aside.
pub(super) const fn max_file_bytes(max_bytes: u64) -> u64 {
    max_bytes / 2
}

/// How long a body of events gets. Behind the one that has the newest there may come one of each other shard, whose
/// events are older: with all of them, and its names, a file is not full. So what is replaced is never the newest.
pub(super) fn full_bytes(max_bytes: u64) -> usize {
    let share = max_file_bytes(max_bytes) / (2 * SHARDS as u64);
    usize::try_from(share).map_or(FULL_BYTES, |share| share.min(FULL_BYTES))
}

/// Where this process records.
#[derive(Debug)]
pub(super) struct Output {
    base: PathBuf,
    path: PathBuf,
    file: OwnFile,
    length: u64,
    max_bytes: u64,
    process: Process,
    /// What each new file begins with.
    named: Vec<Name>,
    /// Whether it has said that its file was removed.
    has_told: bool,
}

impl Output {
    /// Takes a file that no process has, or a new one.
    pub(super) fn take(base: &Path, max_bytes: u64, process: Process) -> io::Result<Self> {
        let (path, file, length) = take_file(base)?;
        let (named, has_told) = (Vec::new(), false);
        let mut output = Self { base: base.to_owned(), path, file, length, max_bytes, process, named, has_told };
        if !output.has_room(MIN_ROOM_BYTES) {
            output.put_aside()?;
        }
        output.begin()?;
        Ok(output)
    }

    pub(super) fn base(&self) -> &Path {
        &self.base
    }

    fn begin(&mut self) -> io::Result<()> {
        if self.length == 0 {
            self.file.append(&MAGIC, 0)?;
            self.length = MAGIC.len() as u64;
        }
        self.write(&self.process.body())?;
        for name in std::mem::take(&mut self.named) {
            self.write_name(&name)?;
            self.named.push(name);
        }
        Ok(())
    }

    /// Gives a name, or a handler's, its number.
    pub(super) fn name(&mut self, name: Name) -> io::Result<()> {
        let bytes = name.bodies().map(|body| HEAD_BYTES + body.len()).sum();
        self.make_room(bytes)?;
        self.write_name(&name)?;
        self.named.push(name);
        Ok(())
    }

    fn write_name(&mut self, name: &Name) -> io::Result<()> {
        name.bodies().try_for_each(|body| self.write(&body))
    }

    /// Appends a frame; where the file is full, to the next one.
    pub(super) fn append(&mut self, body: &[u8]) -> io::Result<()> {
        self.make_room(HEAD_BYTES + body.len())?;
        self.write(body)
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.length + bytes as u64 <= max_file_bytes(self.max_bytes)
    }

    /// Goes on in the next file where this one has no room for so many bytes, or is not there any more.
    fn make_room(&mut self, bytes: usize) -> io::Result<()> {
        let is_there = self.file.is_at(&self.path);
        let has_gone = !is_there || self.file.ours()?.metadata()?.len() < self.length;
        if has_gone {
            self.tell_of_removal(if is_there { "emptied" } else { "removed or renamed" });
            if is_there {
                self.file.ours()?.set_len(0)?;
                self.length = 0;
            } else {
                (self.path, self.file, self.length) = take_file(&self.base)?;
            }
        }
        let has_room = match has_gone {
            true => self.length == 0 || self.has_room(self.begins_with() + MIN_ROOM_BYTES),
            false => self.has_room(bytes),
        };
        if !has_room {
            self.put_aside()?;
        }
        if has_gone || !has_room { self.begin() } else { Ok(()) }
    }

    /// Once: who removes files while somebody records into them may do so each day.
    #[cold]
    fn tell_of_removal(&mut self, what: &str) {
        if !std::mem::replace(&mut self.has_told, true) {
            let path = self.path.display();
            let said = format!("ctxalloc: the recording's file {path} was {what}; the recording begins it anew\n");
            os::print_error(said.as_bytes());
        }
    }

    /// The bytes of what a file begins with.
    fn begins_with(&self) -> usize {
        self.named.iter().flat_map(Name::bodies).map(|body| HEAD_BYTES + body.len()).sum()
    }

    /// Makes the file `FILE.old`, and begins a new one of its name.
    fn put_aside(&mut self) -> io::Result<()> {
        self.file.check()?;
        let (old, new) = (with_suffix(&self.path, ".old"), with_suffix(&self.path, ".new"));
        let file = new_file(&new)?;
        match fs::remove_file(&old) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if fs::hard_link(&self.path, &old).is_ok() {
            // At no time is there no file of this name.
            fs::rename(&new, &self.path)?;
        } else {
            // There are no links on this file system: another process may take the name in this moment.
            fs::rename(&self.path, &old)?;
            if let Err(error) = fs::rename(&new, &self.path) {
                let _ = fs::remove_file(&new);
                return Err(error);
            }
        }
        (self.file, self.length) = (OwnFile::new(file)?, 0);
        Ok(())
    }

    /// All or nothing.
    fn write(&mut self, body: &[u8]) -> io::Result<()> {
        let bytes = frame(body);
        self.file.append(&bytes, self.length)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Nothing follows.
    pub(super) fn close(&mut self) -> io::Result<()> {
        self.append(&[CLOSED])
    }
}

/// The file with the lowest number that no process has, locked, and its length.
fn take_file(base: &Path) -> io::Result<(PathBuf, OwnFile, u64)> {
    let mut number = 0;
    while number < MAX_FILES {
        let path = if number > 0 { with_suffix(base, &format!(".{number}")) } else { base.to_owned() };
        let file = for_its_owner().open(&path).map_err(|error| {
            let is_link = path.symlink_metadata().is_ok_and(|of| of.is_symlink());
            let reason = "this is a symbolic link; give the file that it leads to";
            if is_link { io::Error::new(ErrorKind::InvalidInput, reason) } else { error }
        })?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "this is no plain file"));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                number += 1;
                continue;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut file = OwnFile::new(file)?;
        if !file.is_at(&path) {
            continue; // it was put aside meanwhile: the next one has this name
        }
        let length = whole_bytes(file.ours()?)?;
        return Ok((path, file, length));
    }
    Err(io::Error::other(format!("{MAX_FILES} processes record there already")))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(suffix);
    path.into()
}

fn for_its_owner() -> OpenOptions {
    let mut options = OpenOptions::new();
    os::only_for_its_owner(options.read(true).append(true).create(true));
    options
}

/// An empty file of this name, locked: whoever is to get its place has the lock from the beginning. One that is there
/// was left by a process that was killed here.
fn new_file(path: &Path) -> io::Result<File> {
    let file = for_its_owner().open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "this is no plain file"));
    }
    file.lock()?;
    file.set_len(0)?;
    Ok(file)
}

/// The length of a file to be appended to: without the beginning of a frame that a process left which was killed.
fn whole_bytes(file: &mut File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let refuse = |reason| io::Error::new(ErrorKind::InvalidData, reason);
    let mut begin = [0; MAGIC.len()];
    let is_short = length < MAGIC.len() as u64;
    let begun = &mut begin[..length.min(MAGIC.len() as u64) as usize];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(begun)?;
    if !MAGIC.starts_with(begun) {
        return Err(refuse("it is there, and no recording of this version: give another name, or remove it"));
    }
    let mut end = if is_short { 0 } else { MAGIC.len() as u64 };
    while end < length && !is_short {
        let mut head = [0; HEAD_BYTES];
        let there = (length - end).min(HEAD_BYTES as u64) as usize;
        file.seek(SeekFrom::Start(end))?;
        file.read_exact(&mut head[..there])?;
        // The head alone: its body is not looked at.
        let body = match next_frame(&head[..there]) {
            Found::Body(_) => Some(0),
            Found::CutOff if there == HEAD_BYTES => Some(u32::from_le_bytes([head[0], head[1], head[2], head[3]])),
            _ => None,
        };
        match body.map(|bytes| end + HEAD_BYTES as u64 + u64::from(bytes)) {
            Some(next) if next <= length => end = next,
            _ => {
                end = whole_bytes_of_rest(file, end)?;
                break;
            }
        }
    }
    if end < length {
        file.set_len(end)?;
    }
    Ok(end)
}

/// How many bytes a file has without a frame at its end that is not complete; at `from` there is no frame. What
/// else cannot be read stays where it is: whole frames follow it, and readers pass it over and say so.
#[cold]
fn whole_bytes_of_rest(file: &File, from: u64) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let mut frames = Frames::new(file, length, from);
    while let Some(part) = frames.next()? {
        if let Part::CutOff { offset } = part {
            return Ok(offset);
        }
    }
    Ok(length)
}
