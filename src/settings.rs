//! The process's settings: by default, how much unused memory pools keep and for how long. Set by the environment or by
//! [`configure`], and fixed once used. A leaf: imports no layer.

use crate::error::Error;
use crate::sync::Made;
use crate::trace;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// The argument of [`configure`]. `None` leaves a setting as the environment or the default has it.
///
/// ```
/// let mut settings = ctxalloc::Settings::default();
/// settings.decay = Some(std::time::Duration::from_secs(2));
/// settings.warm_bytes = Some(256 << 20);
/// ctxalloc::configure(settings)?;
/// # Ok::<(), ctxalloc::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// How long unused memory is kept for its next user. By default ten seconds, or `CTXALLOC_DECAY_SECONDS`.
    pub decay: Option<Duration>,
    /// The most bytes of unused large blocks that are kept. By default an eighth of the machine's memory, but at least
    /// 64 MiB, or `CTXALLOC_WARM_BYTES`.
    pub warm_bytes: Option<usize>,
}

/// Seconds, as a decimal number.
pub(crate) const DECAY_SECONDS: &str = "CTXALLOC_DECAY_SECONDS";
/// Bytes, as a whole number.
pub(crate) const WARM_BYTES: &str = "CTXALLOC_WARM_BYTES";
/// A file.
const RECORD: &str = "CTXALLOC_RECORD";
/// A whole number.
const RECORD_ONE_IN: &str = "CTXALLOC_RECORD_ONE_IN";
/// A directory.
const METRICS_DIR: &str = "CTXALLOC_METRICS_DIR";

const DECAY: Duration = Duration::from_secs(10);
/// About 136 years: a longer decay is no different, and twice this fits into nanoseconds as `u64`.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// In nanoseconds.
static DECAY_NOW: AtomicU64 = AtomicU64::new(0);
/// [`UNSET`] if the machine's memory decides.
static WARM_NOW: AtomicU64 = AtomicU64::new(UNSET);
const UNSET: u64 = u64::MAX;

/// The stage of the settings: NEW, then READ, then USED. Never goes back.
static STAGE: AtomicU8 = AtomicU8::new(NEW);
/// The environment was not read yet.
const NEW: u8 = 0;
/// The environment was read; `configure` may still change the settings. Set by `read`, after it stored the values.
const READ: u8 = 1;
/// A pool has used the settings, so they cannot change any more. Set by `fix`.
const USED: u8 = 2;

/// Sets how much unused memory the built-in pools, and others with default options, keep and for how long. Call it at
/// the start of the program; the last call counts.
///
/// # Errors
/// [`Error::SettingsInUse`] once one of these pools has handed out memory; [`Error::BadSetting`] if an environment
/// variable has an invalid value. Nothing is set then.
pub fn configure(settings: Settings) -> Result<(), Error> {
    check_environment()?;
    if STAGE.load(Ordering::Relaxed) == USED {
        return Err(Error::SettingsInUse);
    }
    if let Some(decay) = settings.decay {
        DECAY_NOW.store(nanoseconds(decay), Ordering::Relaxed);
    }
    if let Some(warm_bytes) = settings.warm_bytes {
        WARM_NOW.store((warm_bytes as u64).min(UNSET - 1), Ordering::Relaxed);
    }
    Ok(())
}

/// Checks the environment variables of ctxalloc.
///
/// # Errors
/// [`Error::BadSetting`] for the first one with an invalid value. Its default is used instead.
pub fn check_environment() -> Result<(), Error> {
    read();
    started_in();
    from_environment()?;
    record_one_in()?;
    let expected = "a directory that exists";
    variable(METRICS_DIR, expected, |text| Path::new(text).is_dir().then_some(())).map(|_| ())
}

/// The directory in which several processes share their counters, if there is one.
pub(crate) fn metrics_dir() -> Option<PathBuf> {
    let named = std::env::var_os(METRICS_DIR).filter(|value| !value.is_empty()).map(PathBuf::from)?;
    if named.is_absolute() {
        return Some(named);
    }
    // Servers change their directory after they have begun.
    Some(started_in().map_or_else(|| named.clone(), |folder| folder.join(&named)))
}

/// The file that the environment wants requests to be recorded in, and one in how many of them.
pub(crate) fn recording() -> Option<(PathBuf, Option<u32>)> {
    let named = std::env::var_os(RECORD).filter(|value| !value.is_empty()).map(PathBuf::from)?;
    let one_in = record_one_in().ok().flatten();
    match started_in() {
        Some(folder) => Some((folder.join(named), one_in)),
        None => Some((named, one_in)),
    }
}

fn record_one_in() -> Result<Option<u32>, Error> {
    let parse = |text: &str| text.parse().ok().filter(|&number| number > 0);
    variable(RECORD_ONE_IN, "a whole number from 1 up: one request in so many is recorded", parse)
}

/// The directory in which the process was when the environment was first looked at.
fn started_in() -> Option<&'static PathBuf> {
    static FOLDER: Made<Option<PathBuf>> = Made::new();
    FOLDER.get_or_make(|| std::env::current_dir().ok()).as_ref()
}

/// How long unused memory is kept.
pub(crate) fn decay() -> Duration {
    read();
    Duration::from_nanos(DECAY_NOW.load(Ordering::Relaxed))
}

/// The most bytes of unused large blocks that are kept; `None` if the machine's memory decides.
pub(crate) fn warm_bytes() -> Option<usize> {
    read();
    match WARM_NOW.load(Ordering::Relaxed) {
        UNSET => None,
        bytes => Some(usize::try_from(bytes).unwrap_or(usize::MAX)),
    }
}

/// Fixes the settings: from here on `configure` fails.
#[inline]
pub(crate) fn fix() {
    if STAGE.load(Ordering::Relaxed) != USED {
        read();
        STAGE.store(USED, Ordering::Relaxed);
    }
}

/// Reads the environment, once. Several threads may do so at the same time, and find the same values.
fn read() {
    if STAGE.load(Ordering::Acquire) != NEW {
        return;
    }
    let settings = from_environment().unwrap_or_else(|error| {
        trace::bad_setting(&error);
        Settings::default()
    });
    // Stored only over the initial values: another thread may have read the environment, and called `configure`,
    // already.
    let decay = nanoseconds(settings.decay.unwrap_or(DECAY));
    let _ = DECAY_NOW.compare_exchange(0, decay, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(bytes) = settings.warm_bytes {
        let bytes = (bytes as u64).min(UNSET - 1);
        let _ = WARM_NOW.compare_exchange(UNSET, bytes, Ordering::Relaxed, Ordering::Relaxed);
    }
    // Release pairs with the Acquire above: a thread that sees the stage sees the values.
    let _ = STAGE.compare_exchange(NEW, READ, Ordering::Release, Ordering::Relaxed);
}

/// At least 1, since 0 stands for "not read yet".
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.min(LONGEST).as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn from_environment() -> Result<Settings, Error> {
    Ok(Settings {
        decay: variable(DECAY_SECONDS, "seconds, a number from 0 up", parse_seconds)?,
        warm_bytes: variable(WARM_BYTES, "bytes, a whole number from 0 up", |text| text.parse().ok())?,
    })
}

fn variable<T>(
    name: &'static str,
    expected: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, Error> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let parsed = value.to_str().and_then(|text| parse(text.trim()));
    let bad = || Error::BadSetting { name, value: value.to_string_lossy().into_owned(), expected };
    parsed.map(Some).ok_or_else(bad)
}

fn parse_seconds(text: &str) -> Option<Duration> {
    seconds(text.parse().ok()?)
}

/// That many seconds, at most [`LONGEST`]; `None` if it is negative, infinite or no number.
pub(crate) fn seconds(seconds: f64) -> Option<Duration> {
    let is_time = seconds >= 0.0 && seconds.is_finite();
    is_time.then(|| Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST).min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::{LONGEST, parse_seconds};
    use std::time::Duration;

    #[test]
    fn seconds_are_numbers_from_zero_up() {
        assert_eq!(parse_seconds("0"), Some(Duration::ZERO));
        assert_eq!(parse_seconds("2.5"), Some(Duration::from_millis(2500)));
        assert_eq!(parse_seconds("1e300"), Some(LONGEST));
        for text in ["", "-1", "nan", "inf", "ten", "1s", "0x10"] {
            assert_eq!(parse_seconds(text), None, "{text}");
        }
    }
}
