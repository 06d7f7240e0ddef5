//! `Place`: where a region is. A static of this process; or a file in the directory that `CTXALLOC_METRICS_DIR` names,
//! one for each process that counts there.
//!
//! A process holds a lock on its file (`flock`), which the system releases when the process ends. The next process
//! takes the file over and adds to its counts: there are only as many files as processes ran at the same time, and sums
//! never fall.
#![allow(unsafe_code, reason = "maps files")]

use super::region::Region;
use crate::error::Error;
use crate::os;
use std::fs::{File, OpenOptions, TryLockError, read_dir};
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

/// The number is the layout's: see `VERSION` in `region`.
const PREFIX: &str = "ctxalloc-metrics-3-";
/// How many processes may count in one directory.
const MAX_FILES: usize = 4096;

/// A region, for as long as this lives.
#[derive(Debug)]
pub(super) enum Place {
    Static(&'static Region),
    Mapped(Mapping),
}

/// A mapped file. The lock on it, if it has one, lives as long.
#[derive(Debug)]
pub(super) struct Mapping {
    region: NonNull<Region>,
    file: File,
}

// SAFETY: the region consists of atomics, and any thread may unmap it.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `Mapping::of` mapped so many bytes here, and no reference outlives this value.
        unsafe { os::unmap(self.region.cast(), size_of::<Region>()) };
    }
}

impl Place {
    /// This process's own.
    pub(super) fn here() -> Self {
        static HERE: Region = Region::empty();
        Self::Static(&HERE)
    }

    pub(super) fn region(&self) -> &Region {
        match self {
            Self::Static(region) => region,
            Self::Mapped(mapping) => mapping.region(),
        }
    }

    /// Whether these bytes of the region have memory now.
    pub(super) fn grow(&self, bytes: Range<usize>) -> bool {
        match self {
            Self::Static(_) => true,
            Self::Mapped(mapping) => fill(&mapping.file, bytes).is_ok(),
        }
    }
}

impl Mapping {
    /// Takes a file that no process has, or a new one.
    ///
    /// # Errors
    /// [`Error::Metrics`].
    pub(super) fn take(folder: &Path, pid: u32, started: u64) -> Result<Self, Error> {
        let fail = |error: &io::Error| failed(folder, error);
        for number in 0..MAX_FILES {
            let path = folder.join(format!("{PREFIX}{number}"));
            let mut options = OpenOptions::new();
            os::only_for_its_owner(options.read(true).write(true).create(true).truncate(false));
            let file = options.open(path).map_err(|error| fail(&error))?;
            if !file.metadata().map_err(|error| fail(&error))?.is_file() {
                continue; // another program's: a FIFO would be written to until somebody reads it
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(error)) => return Err(fail(&error)),
            }
            let length = file.metadata().map_err(|error| fail(&error))?.len();
            if length == 0 {
                file.set_len(size_of::<Region>() as u64).map_err(|error| fail(&error))?;
            } else if length != size_of::<Region>() as u64 {
                continue; // another program's
            }
            let mapping = Self::of(file, true).map_err(|error| fail(&error))?;
            if mapping.region().is_blank() {
                fill(&mapping.file, 0..Region::BASE_BYTES).map_err(|error| fail(&error))?;
            }
            if mapping.region().take(pid, started) {
                return Ok(mapping);
            }
        }
        Err(fail(&io::Error::other(format!("{MAX_FILES} processes count there already"))))
    }

    /// All files of the directory, to be read.
    ///
    /// # Errors
    /// [`Error::Metrics`].
    pub(super) fn all(folder: &Path) -> Result<Vec<Self>, Error> {
        let fail = |error: &io::Error| failed(folder, error);
        let mut found = Vec::new();
        for entry in read_dir(folder).map_err(|error| fail(&error))? {
            let entry = entry.map_err(|error| fail(&error))?;
            if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
                continue;
            }
            let mut options = OpenOptions::new();
            let file = os::without_waiting(options.read(true)).open(entry.path()).map_err(|error| fail(&error))?;
            // One that is shorter was just made, and its process has counted nothing.
            let metadata = file.metadata().map_err(|error| fail(&error))?;
            if metadata.is_file() && metadata.len() == size_of::<Region>() as u64 {
                let mapping = Self::of(file, false).map_err(|error| fail(&error))?;
                if mapping.region().is_one() {
                    found.push(mapping);
                }
            }
        }
        Ok(found)
    }

    /// Maps a file that is as long as a region.
    fn of(file: File, is_writable: bool) -> io::Result<Self> {
        let region = os::map_file(&file, size_of::<Region>(), is_writable)?.cast();
        Ok(Self { region, file })
    }

    pub(super) fn region(&self) -> &Region {
        // SAFETY: mapped, of this size and page-aligned, until `self` is dropped. Any bytes are a Region: it has
        // nothing but atomic integers. Readers map it without the right to write, and only load.
        unsafe { self.region.as_ref() }
    }
}

/// Writes zeros where a file is a hole. A hole has no memory: on a full file system, whoever counts into it ends by
/// SIGBUS. Allocates nothing.
fn fill(mut file: &File, bytes: Range<usize>) -> io::Result<()> {
    const ZEROS: [u8; 8192] = [0; 8192];
    file.seek(SeekFrom::Start(bytes.start as u64))?;
    for begun in bytes.clone().step_by(ZEROS.len()) {
        file.write_all(&ZEROS[..ZEROS.len().min(bytes.end - begun)])?;
    }
    Ok(())
}

#[cold]
fn failed(folder: &Path, error: &io::Error) -> Error {
    Error::Metrics { folder: folder.display().to_string(), reason: error.to_string() }
}
