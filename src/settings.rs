//! What pools keep and for how long, where nobody says otherwise: set once, by the environment or by [`configure`]. A
//! leaf: imports no layer.

use crate::error::Error;
use crate::trace;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// What [`configure`] sets. `None` leaves a setting as the environment or the default has it.
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
    /// How long memory that nobody uses is kept for its next user. Ten seconds, unless `CTXALLOC_DECAY_SECONDS` or this
    /// says otherwise.
    pub decay: Option<Duration>,
    /// How many bytes of large blocks that nobody uses are kept at most. An eighth of the machine's memory, at least 64
    /// MiB, unless `CTXALLOC_WARM_BYTES` or this says otherwise.
    pub warm_bytes: Option<usize>,
}

/// Seconds, as a decimal number.
pub(crate) const DECAY_SECONDS: &str = "CTXALLOC_DECAY_SECONDS";
/// Bytes, as a whole number.
pub(crate) const WARM_BYTES: &str = "CTXALLOC_WARM_BYTES";

const DECAY: Duration = Duration::from_secs(10);
/// About 136 years, as far as `u64` nanoseconds reach twice; more is no different.
const LONGEST: Duration = Duration::from_secs(1 << 32);

/// In nanoseconds.
static DECAY_NOW: AtomicU64 = AtomicU64::new(0);
/// [`UNSET`]: what the machine has decides.
static WARM_NOW: AtomicU64 = AtomicU64::new(UNSET);
const UNSET: u64 = u64::MAX;

/// How far the settings are.
static STAGE: AtomicU8 = AtomicU8::new(NEW);
/// The environment was not read.
const NEW: u8 = 0;
/// It was.
const READ: u8 = 1;
/// A pool has used them: they are as they are.
const USED: u8 = 2;

/// Sets what the built-in pools, and all others that are made with default options, keep and for how long. Call it at the
/// start of the program; the last call counts.
///
/// # Errors
/// [`Error::SettingsInUse`] once one of these pools has handed out memory; [`Error::BadSetting`] where a variable of the
/// environment has a value that it cannot have. Nothing is set then.
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

/// Whether the environment's values are such as can be used.
///
/// # Errors
/// [`Error::BadSetting`] for the first that is not. The default is used in its place.
pub fn check_environment() -> Result<(), Error> {
    read();
    from_environment().map(|_| ())
}

/// How long memory that nobody uses is kept.
pub(crate) fn decay() -> Duration {
    read();
    Duration::from_nanos(DECAY_NOW.load(Ordering::Relaxed))
}

/// How many bytes of large blocks are kept; nothing where nobody said.
pub(crate) fn warm_bytes() -> Option<usize> {
    read();
    match WARM_NOW.load(Ordering::Relaxed) {
        UNSET => None,
        bytes => Some(usize::try_from(bytes).unwrap_or(usize::MAX)),
    }
}

/// From now on it is too late to change them.
#[inline]
pub(crate) fn fix() {
    if STAGE.load(Ordering::Relaxed) != USED {
        read();
        STAGE.store(USED, Ordering::Relaxed);
    }
}

/// Reads the environment, once. Threads that do so at the same time find the same.
fn read() {
    if STAGE.load(Ordering::Acquire) != NEW {
        return;
    }
    let settings = from_environment().unwrap_or_else(|error| {
        trace::bad_setting(&error);
        Settings::default()
    });
    // Only what is as it was at the start: another thread may be a step ahead, and have configured.
    let decay = nanoseconds(settings.decay.unwrap_or(DECAY));
    let _ = DECAY_NOW.compare_exchange(0, decay, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(bytes) = settings.warm_bytes {
        let bytes = (bytes as u64).min(UNSET - 1);
        let _ = WARM_NOW.compare_exchange(UNSET, bytes, Ordering::Relaxed, Ordering::Relaxed);
    }
    // Release pairs with the Acquire above: who finds the stage finds the values.
    let _ = STAGE.compare_exchange(NEW, READ, Ordering::Release, Ordering::Relaxed);
}

/// At least one: zero stands for "not read yet".
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
    wanted: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, Error> {
    let Some(value) = std::env::var_os(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let parsed = value.to_str().and_then(|text| parse(text.trim()));
    let bad = || Error::BadSetting { name, value: value.to_string_lossy().into_owned(), wanted };
    parsed.map(Some).ok_or_else(bad)
}

fn parse_seconds(text: &str) -> Option<Duration> {
    let seconds: f64 = text.parse().ok().filter(|seconds: &f64| *seconds >= 0.0 && seconds.is_finite())?;
    Some(Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST).min(LONGEST))
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
