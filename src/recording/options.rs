//! How much is recorded.

use crate::error::Error;

/// How much is recorded, and how much that may take.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Options {
    /// One request in so many is recorded, chosen at random, with all requests inside of it. By default 10.
    pub one_in: u32,
    /// Which part of one processor's time recording may take, 0.01 by default: where it takes more, fewer requests are
    /// recorded, and more again when it takes less. 1: it is not looked at.
    pub share: f64,
    /// The most bytes of this process's files, 256 MiB by default. At half of it the file is put aside (`FILE.old`),
    /// in place of the one that was put aside before. Names may take a quarter of a file. At least 65,536.
    pub max_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { one_in: 10, share: 0.01, max_bytes: 256 << 20 }
    }
}

/// The smallest value of [`Options::max_bytes`].
const MIN_BYTES: u64 = 64 << 10;

impl Options {
    pub(super) fn check(&self) -> Result<(), Error> {
        let bad = |option, value: String, expected| Err(Error::BadOption { option, value, expected });
        if self.one_in == 0 {
            return bad("one_in", self.one_in.to_string(), "1 or more: one request in so many is recorded");
        }
        if !(self.share > 0.0 && self.share <= 1.0) {
            return bad("share", self.share.to_string(), "a number above 0, and 1 at most");
        }
        if self.max_bytes < MIN_BYTES {
            return bad("max_bytes", self.max_bytes.to_string(), "65536 or more");
        }
        Ok(())
    }
}
