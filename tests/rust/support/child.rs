//! An ignored test of this binary, run in a process of its own: for what crashes, forks, or changes the whole process.
#![allow(dead_code, reason = "each test binary uses its own part of it")]

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

/// How the child ended, and what it wrote to standard error.
pub(crate) struct Fate {
    test: &'static str,
    status: ExitStatus,
    said: String,
}

/// Runs the ignored test of that name.
pub(crate) fn fate_of(test: &'static str) -> Fate {
    fate_in(test, &[] as &[(&str, &str)])
}

/// Runs the ignored test of that name with these environment variables.
pub(crate) fn fate_in(test: &'static str, environment: &[(&str, impl AsRef<OsStr>)]) -> Fate {
    let child = Command::new(std::env::current_exe().expect("this binary"))
        .args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .output()
        .expect("a process");
    let said = String::from_utf8_lossy(&child.stderr).into_owned();
    assert!(String::from_utf8_lossy(&child.stdout).contains("running 1 test"), "there is no test '{test}'");
    Fate { test, status: child.status, said }
}

impl Fate {
    #[track_caller]
    pub(crate) fn says(&self, text: &str) -> &Self {
        assert!(self.said.contains(text), "it did not say {text:?} but:\n{}", self.said);
        self
    }

    #[track_caller]
    pub(crate) fn says_once(&self, text: &str) -> &Self {
        assert_eq!(self.said.matches(text).count(), 1, "how often it said {text:?}:\n{}", self.said);
        self
    }

    #[track_caller]
    pub(crate) fn says_nothing_of(&self, text: &str) -> &Self {
        assert!(!self.said.contains(text), "it said {text:?}:\n{}", self.said);
        self
    }

    #[track_caller]
    pub(crate) fn ended_by(&self, signal: i32) {
        // A sanitizer that was there before us reports in its own way and exits.
        let sanitized = self.said.contains("Sanitizer:");
        assert!(sanitized || self.status.signal() == Some(signal), "{}", self.story());
    }

    #[track_caller]
    pub(crate) fn ended_with(&self, status: i32) {
        assert_eq!(self.status.code(), Some(status), "{}", self.story());
    }

    #[track_caller]
    pub(crate) fn ended_well(&self) {
        assert!(self.status.success(), "{}", self.story());
    }

    fn story(&self) -> String {
        format!("{} ended with {:?}:\n{}", self.test, self.status, self.said)
    }
}

/// Ends a child that hangs, which is then its fate.
#[allow(unsafe_code, reason = "alarm")]
pub(crate) fn killed_after(seconds: u32) {
    // SAFETY: sets a timer of this process, whose signal nobody handles.
    unsafe { libc::alarm(seconds) };
}

/// Forks; the child runs `work` and ends. Returns the child's wait status: zero where `work` said yes.
#[allow(unsafe_code, reason = "fork")]
pub(crate) fn fork_and(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child calls nothing but `work`, which uses the C heap (glibc makes it usable after fork) and this
    // crate (which is what is tested), and `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        // SAFETY: a timer of the child: one that waits for a lock for ever is killed.
        unsafe { libc::alarm(20) };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(if matches!(outcome, Ok(true)) { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: our child, and a place for its status.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid);
    status
}
