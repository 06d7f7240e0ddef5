//! The files of a recording: the one that is named, and those beside it.

use crate::error::Error;
use crate::os;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, read_dir};
use std::path::{Path, PathBuf};

/// A file that has the recording's name, or one made of it.
pub(super) struct Named {
    pub(super) path: PathBuf,
    /// Whether it is the one that was asked for. Others may be somebody else's.
    pub(super) is_asked_for: bool,
}

#[cold]
pub(super) fn no_recording(path: &Path, reason: &dyn std::fmt::Display) -> Error {
    Error::NoRecording { file: path.display().to_string(), reason: reason.to_string() }
}

/// The files of the recording of this name, those with older events before those with newer ones of the same process.
///
/// # Errors
/// [`Error::NoRecording`].
pub(super) fn files_of(path: &Path) -> Result<Vec<Named>, Error> {
    let name = path.file_name().ok_or_else(|| no_recording(path, &"this is no file's name"))?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let name = name.to_string_lossy();
    let mut found = BTreeMap::new();
    for entry in read_dir(folder).map_err(|error| no_recording(path, &error))? {
        let entry = entry.map_err(|error| no_recording(path, &error))?;
        let file_name = entry.file_name();
        let file_name = file_name.to_string_lossy();
        let Some(rest) = file_name.strip_prefix(&*name) else { continue };
        let (rest, is_newer) = rest.strip_suffix(".old").map_or((rest, true), |rest| (rest, false));
        let number = match rest.strip_prefix('.') {
            None if rest.is_empty() => Some(0),
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse::<u32>().ok(),
            _ => None,
        };
        if let Some(number) = number {
            let is_asked_for = rest.is_empty() && is_newer;
            found.insert((number, is_newer), Named { path: entry.path(), is_asked_for });
        }
    }
    if found.is_empty() {
        return Err(no_recording(path, &"there is no such file"));
    }
    Ok(found.into_values().collect())
}

/// Opens a file to read it. One that is no plain file would be waited for.
///
/// # Errors
/// [`Error::NoRecording`].
pub(super) fn opened(path: &Path) -> Result<File, Error> {
    let fail = |error| no_recording(path, &error);
    let mut options = OpenOptions::new();
    let file = os::without_waiting(options.read(true)).open(path).map_err(fail)?;
    if !file.metadata().map_err(fail)?.is_file() {
        return Err(no_recording(path, &"this is no plain file"));
    }
    Ok(file)
}
