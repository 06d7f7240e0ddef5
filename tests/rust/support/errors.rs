//! Errors that are expected: no test can make one, since what their variants may have is not closed.
#![allow(dead_code, unused_macros, unused_imports, reason = "each test binary uses its own part of it")]

use ctxalloc::Error;

/// The error of what was refused, as text with all that it has.
#[track_caller]
pub(crate) fn refusal<T>(outcome: Result<T, Error>) -> String {
    format!("{:?}", outcome.err().expect("an error"))
}

/// The text of [`refusal`] for a variant with these fields, and no others.
macro_rules! error {
    ($variant:ident { $($field:ident: $value:expr),* $(,)? }) => {
        format!("{} {{ {} }}", stringify!($variant), [$(format!("{}: {:?}", stringify!($field), $value)),*].join(", "))
    };
}
pub(crate) use error;
