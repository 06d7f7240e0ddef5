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
        assert!(sanitized || self.status.signal() == Some(signal), "{}", self.told());
    }

    #[track_caller]
    pub(crate) fn ended_with(&self, status: i32) {
        assert_eq!(self.status.code(), Some(status), "{}", self.told());
    }

    #[track_caller]
    pub(crate) fn ended_well(&self) {
        assert!(self.status.success(), "{}", self.told());
    }

    fn told(&self) -> String {
        format!("{} ended with {:?}:\n{}", self.test, self.status, self.said)
    }
}

/// Ends a child that hangs, which is then its fate.
pub(crate) fn killed_after(seconds: u32) {
    // SAFETY: sets a timer of this process, whose signal nobody handles.
    unsafe { libc::alarm(seconds) };
}
