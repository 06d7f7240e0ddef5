//! What of a recording's files cannot be read: told, and passed over.

/// So many are told one by one: a file of a gigabyte may have a hundred million.
const MAX_GAPS: usize = 1000;

/// A part of a recording's file that cannot be read. What follows it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gap {
    /// The file.
    pub file: String,
    /// Where it begins, in bytes from the file's beginning.
    pub offset: u64,
    /// How many bytes it has; of a file that cannot be opened, 0.
    pub bytes: u64,
    /// In how many places these are: 1. Where there were more than a thousand gaps, the last one has all that remained,
    /// of its file and of those after it.
    pub places: u64,
    /// What is wrong there.
    pub reason: String,
}

/// The gaps, of which there may be many.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    found: Vec<Gap>,
}

impl Gaps {
    pub(super) fn add(&mut self, file: &str, offset: u64, bytes: u64, reason: &str) {
        let is_full = self.found.len() == MAX_GAPS;
        match self.found.last_mut() {
            // What stands side by side is one.
            Some(last) if last.places == 1 && last.file == file && last.offset + last.bytes == offset => {
                last.bytes += bytes;
            }
            Some(last) if is_full => {
                last.bytes += bytes;
                last.places += 1;
            }
            _ => {
                let (file, reason) = (file.to_owned(), reason.to_owned());
                self.found.push(Gap { file, offset, bytes, places: 1, reason });
            }
        }
    }

    pub(super) fn into_vec(self) -> Vec<Gap> {
        self.found
    }
}
