//! `Place`: where a region is. A static of this process; or a file in the directory that `CTXALLOC_METRICS_DIR` names, one for
//! each process that counts there.
//!
//! A process holds a lock on its file (`flock`), which the system releases when the process ends. The next process takes the
//! file over and counts on: there are as many files as there were processes at one time, and sums never go back.
#![allow(unsafe_code, reason = "mmap, flock")]

use super::region::Region;
use crate::error::Error;
use std::fs::{File, OpenOptions, read_dir};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

const PREFIX: &str = "ctxalloc-metrics-1-";
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
    _file: File,
}

// SAFETY: the region consists of atomics, and any thread may unmap it.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `Mapping::of` mapped so many bytes here, and no reference outlives this value.
        unsafe { libc::munmap(self.region.as_ptr().cast(), size_of::<Region>()) };
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
            options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let file = options.open(path).map_err(|error| fail(&error))?;
            // SAFETY: a call with a descriptor of ours.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::WouldBlock {
                    continue;
                }
                return Err(fail(&error));
            }
            let length = file.metadata().map_err(|error| fail(&error))?.len();
            if length == 0 {
                file.set_len(size_of::<Region>() as u64).map_err(|error| fail(&error))?;
            } else if length != size_of::<Region>() as u64 {
                continue; // another program's
            }
            let mapping = Self::of(file, libc::PROT_READ | libc::PROT_WRITE).map_err(|error| fail(&error))?;
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
            let file = File::open(entry.path()).map_err(|error| fail(&error))?;
            // One that is shorter was just made, and its process has counted nothing.
            if file.metadata().map_err(|error| fail(&error))?.len() == size_of::<Region>() as u64 {
                let mapping = Self::of(file, libc::PROT_READ).map_err(|error| fail(&error))?;
                if mapping.region().is_one() {
                    found.push(mapping);
                }
            }
        }
        Ok(found)
    }

    /// Maps a file that is as long as a region.
    fn of(file: File, protection: i32) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address that the system chooses.
        let start =
            unsafe { libc::mmap(null_mut(), size_of::<Region>(), protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match NonNull::new(start.cast()) {
            Some(region) if start != libc::MAP_FAILED => Ok(Self { region, _file: file }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(super) fn region(&self) -> &Region {
        // SAFETY: mapped, of this size and page-aligned, until `self` is dropped. Any bytes are a Region: it has nothing but
        // atomic integers. Readers map it without the right to write, and only load.
        unsafe { self.region.as_ref() }
    }
}

#[cold]
fn failed(folder: &Path, error: &io::Error) -> Error {
    Error::Metrics { folder: folder.display().to_string(), reason: error.to_string() }
}

/// When a process was started, as the system counts. None: there is no such process, or it cannot be asked.
pub(super) fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; the 22nd field is the 20th after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}
