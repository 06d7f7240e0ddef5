//! The operating system: what this crate asks of it that the standard library does not offer. A leaf: imports no layer.
//!
//! One file for each system, which has every function of this table; a port to another system is one more such file.
//! `control_groups` reads files, which other systems do not have. What only a source needs (huge pages, NUMA nodes,
//! files of memory) is in that source. Miri's pages are in `source::pages`.
//!
//! | function | Linux | macOS | Windows |
//! | --- | --- | --- | --- |
//! | `page_bytes`, `physical_bytes` | sysconf | sysconf | GetSystemInfo, GlobalMemoryStatusEx |
//! | `map`, `unmap` | mmap, munmap | mmap, munmap | VirtualAlloc, VirtualFree: `unmap` takes whole mappings only |
//! | `discard` | MADV_DONTNEED | a new mapping in the same place | no |
//! | `forbid` | MADV_GUARD_INSTALL, mprotect | mprotect, after `discard` | VirtualProtect |
//! | `lock`, `unlock` | mlock, munlock | mlock, munlock | no: an error |
//! | `prefer_huge` | MADV_HUGEPAGE | no | no |
//! | `clock` | CLOCK_MONOTONIC_COARSE | CLOCK_MONOTONIC_RAW_APPROX | GetTickCount64 |
//! | `thread_number`, `thread_name` | gettid, PR_GET_NAME | pthread_threadid_np, pthread_getname_np | GetCurrentThreadId, no name |
//! | `at_fork` | pthread_atfork | pthread_atfork | nothing forks |
//! | `start_thread`, `join_thread` | pthread_create | pthread_create | no: pools give memory back when they are used |
//! | `sleep_while`, `wake_sleeper` | futex | a condition variable | no |
//! | `wipe` | explicit_bzero | memset_s | volatile writes |
//! | `can_write` | a byte through a pipe and back | the same | VirtualQuery |
//! | `map_file`, `only_for_its_owner`, `without_waiting` | mmap, O_NOFOLLOW, mode 0600, O_NONBLOCK | the same | no: an error |
//! | `read_at` | pread | pread | ReadFile at a place |
//! | `process_started` | /proc/PID/stat | proc_pidinfo | no |
//! | `used` | getrusage | getrusage | no |
//! | `resident_bytes` | /proc/self/statm | no | no |
//! | `resident_within` | mincore | no | no |
//! | `print_error` | write | write | write |
//!
//! Functions with `extern "C"` callbacks are called by the system. What may be called in a signal handler says so.
#![allow(unsafe_code, reason = "calls the system")]
#![cfg_attr(
    any(miri, ctxalloc_loom),
    allow(dead_code, reason = "neither forks, nor starts threads of its own, nor maps pages")
)]

pub(crate) mod control_groups;
#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "macos")]
mod macos;
#[cfg(any(all(unix, not(target_os = "linux")), test))]
mod sleeper;
#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(target_os = "macos")]
pub(crate) use macos::*;
#[cfg(unix)]
pub(crate) use unix::*;
#[cfg(windows)]
pub(crate) use windows::*;

#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
compile_error!("ctxalloc knows Linux and macOS, and Windows in part: another system needs a file in src/os");

use crate::error::Error;

/// The error of what this system does not have: `call` is what it would take, and `advice` what to use instead.
#[cfg_attr(target_os = "linux", allow(dead_code, reason = "Linux has everything"))]
pub(crate) fn lacks(call: &'static str, advice: &'static str) -> Error {
    Error::SystemRefused { call, reason: format!("{} does not have it", std::env::consts::OS), advice }
}
