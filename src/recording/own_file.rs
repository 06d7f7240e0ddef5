//! `OwnFile`: the open file that a process records into, as long as its descriptor is ours. A program that closes all
//! descriptors (`os.closerange`) closes this one too, and its next file may have the same number.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

#[derive(Debug)]
pub(super) struct OwnFile {
    /// `None`: the descriptor is somebody else's, and is not closed by us.
    file: Option<File>,
    identity: Identity,
}

/// The device and the number of a file; nothing where the system has none.
pub(super) type Identity = Option<(u64, u64)>;

impl OwnFile {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let identity = identity_of(&file)?;
        Ok(Self { file: Some(file), identity })
    }

    /// The file; an error once its descriptor was closed or is another file's.
    pub(super) fn ours(&mut self) -> io::Result<&mut File> {
        let is_ours = self.file.as_ref().is_some_and(|file| identity_of(file).ok() == Some(self.identity));
        if !is_ours {
            std::mem::forget(self.file.take());
        }
        self.file.as_mut().ok_or_else(|| io::Error::other("the program closed its descriptor"))
    }

    /// Whether it can be written to.
    pub(super) fn check(&mut self) -> io::Result<()> {
        self.ours().map(drop)
    }

    /// Whether the file of this name is this one.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        is_at(self.identity, path)
    }

    /// All or nothing: where there is no room for all, what was written is taken back.
    pub(super) fn append(&mut self, bytes: &[u8], length: u64) -> io::Result<()> {
        let file = self.ours()?;
        file.write_all(bytes).inspect_err(|_| {
            let _ = file.set_len(length); // if that fails too, it is as after a crash
        })
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        let _ = self.ours(); // or it is not closed
    }
}

#[cfg(unix)]
pub(super) fn identity_of(file: &File) -> io::Result<Identity> {
    use std::os::unix::fs::MetadataExt;
    file.metadata().map(|of| Some((of.dev(), of.ino())))
}

#[cfg(unix)]
fn is_at(identity: Identity, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|of| (of.dev(), of.ino())) == identity
}

/// Programs close no descriptors there that are not theirs.
#[cfg(not(unix))]
pub(super) fn identity_of(_file: &File) -> io::Result<Identity> {
    Ok(None)
}

/// Nor can a file be removed there that is open.
#[cfg(not(unix))]
fn is_at(_identity: Identity, _path: &Path) -> bool {
    true
}
