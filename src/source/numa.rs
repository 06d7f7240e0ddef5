//! Pages on chosen NUMA nodes, the parts of a machine that memory is attached to.
#![allow(unsafe_code, reason = "mbind is a system call without a C function")]

use super::{Pages, PrivatePages, pages};
use crate::error::Error;
use crate::os;
#[cfg(all(target_os = "linux", not(miri)))]
use std::ffi::c_long;
use std::ffi::c_ulong;
use std::fmt;
use std::fs;
use std::io;
use std::ptr::NonNull;

/// Which node's memory a page gets when it is first touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NumaPolicy {
    /// Memory of the given nodes only. If they have none left, the kernel ends a process (OOM), as it does without a
    /// policy when the whole machine has none left.
    Bind,
    /// Memory of the given node as long as it has some, then of others.
    Preferred,
    /// Memory of the given nodes in turn, page by page: for data that threads on all of them read.
    Interleave,
}

impl NumaPolicy {
    /// Its name in Python and in messages: `bind`, `preferred`, `interleave`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bind => "bind",
            Self::Preferred => "preferred",
            Self::Interleave => "interleave",
        }
    }

    /// `MPOL_PREFERRED`, `MPOL_BIND`, `MPOL_INTERLEAVE` of linux/mempolicy.h.
    #[cfg(all(target_os = "linux", not(miri)))]
    const fn mode(self) -> c_long {
        match self {
            Self::Preferred => 1,
            Self::Bind => 2,
            Self::Interleave => 3,
        }
    }
}

/// The most nodes that a kernel can be built for (CONFIG_NODES_SHIFT is at most 10).
const MAX_NODES: usize = 1024;
const WORD_BITS: usize = c_ulong::BITS as usize;
type Mask = [c_ulong; MAX_NODES / WORD_BITS];

/// Pages for a pool, on NUMA nodes of the user's choice.
///
/// The policy belongs to the mapping. It holds whichever thread touches a page, on whichever node that runs, and for
/// memory that the pool reuses. Pages shared with a child of `fork` keep it.
#[derive(Clone, Copy)]
pub struct NumaPages {
    mask: Mask,
    policy: NumaPolicy,
}

impl NumaPages {
    /// Pages on these nodes. Maps one page to try whether that is possible. An empty list means all nodes, which only
    /// [`NumaPolicy::Interleave`] allows.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`] for a node that is not online; [`Error::BadOption`] if the policy does not allow this
    /// number of nodes; [`Error::SystemRefused`] if the system refuses, as it does in some containers, and except on
    /// Linux.
    pub fn new(nodes: &[usize], policy: NumaPolicy) -> Result<Self, Error> {
        if cfg!(not(target_os = "linux")) {
            return Err(os::lacks("mbind", "use Pool"));
        }
        let online_text = online_text();
        let online = read_list(&online_text);
        if let Some(&node) = nodes.iter().find(|node| !online.contains(node)) {
            return Err(Error::NoSuchNode { node, online: online_text });
        }
        let fits = match policy {
            NumaPolicy::Preferred => nodes.len() == 1,
            NumaPolicy::Bind => !nodes.is_empty(),
            NumaPolicy::Interleave => true,
        };
        if !fits {
            let expected = match policy {
                NumaPolicy::Preferred => "exactly one node for the policy 'preferred'",
                _ => "one node or more; only the policy 'interleave' takes all by default",
            };
            return Err(Error::BadOption { option: "node", value: format!("{nodes:?}"), expected });
        }
        let mut mask = Mask::default();
        for &node in if nodes.is_empty() { &online } else { nodes } {
            mask[node / WORD_BITS] |= 1 << (node % WORD_BITS);
        }
        let source = Self { mask, policy };
        source.try_out()?;
        Ok(source)
    }

    fn try_out(&self) -> Result<(), Error> {
        let page = pages::page_bytes();
        let failed = || refused(&io::Error::last_os_error());
        let trial = pages::map(page, page).map_err(|_| failed())?;
        // SAFETY: this mapping was just made, and nobody else has it.
        let outcome = unsafe {
            let outcome = self.bind(trial, page);
            pages::unmap(trial, page);
            outcome
        };
        outcome.map_err(|error| refused(&error))
    }

    /// The nodes, in ascending order.
    pub fn nodes(&self) -> impl Iterator<Item = usize> {
        let mask = self.mask;
        (0..MAX_NODES).filter(move |node| mask[node / WORD_BITS] >> (node % WORD_BITS) & 1 == 1)
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> NumaPolicy {
        self.policy
    }

    /// Sets the policy of a mapping that was not touched yet.
    ///
    /// # Safety
    /// - `start` and `size_bytes` name whole pages of a mapping.
    #[cfg(all(target_os = "linux", not(miri)))]
    pub(super) unsafe fn bind(&self, start: NonNull<u8>, size_bytes: usize) -> io::Result<()> {
        // The kernel reads one bit less than it is told (mbind(2)).
        let bits = MAX_NODES + 1;
        let mode = self.policy.mode();
        // SAFETY: whole pages of a mapping (this function's contract). The kernel reads MAX_NODES bits of the mask,
        // which has as many.
        match unsafe { libc::syscall(libc::SYS_mbind, start.as_ptr(), size_bytes, mode, self.mask.as_ptr(), bits, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Miri has no nodes. On other systems [`new`](Self::new) has made no such source.
    #[cfg(not(all(target_os = "linux", not(miri))))]
    pub(super) unsafe fn bind(&self, _start: NonNull<u8>, _size_bytes: usize) -> io::Result<()> {
        Ok(())
    }
}

fn refused(error: &io::Error) -> Error {
    let advice = match error.raw_os_error() {
        Some(libc::EPERM | libc::ENOSYS) => {
            "a container's seccomp profile or a kernel without NUMA forbids it: allow it (docker run --cap-add SYS_NICE), \
             or use Pool"
        }
        Some(libc::EINVAL) => {
            "the process may not use these nodes: see Mems_allowed_list in /proc/self/status (cpuset), choose one of those"
        }
        _ => "use Pool where the memory's place does not matter",
    };
    Error::SystemRefused { call: "mbind", reason: error.to_string(), advice }
}

/// The nodes that are online, as the system writes them; `0` if it does not say.
fn online_text() -> String {
    let text = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    let text = text.trim();
    if text.is_empty() { "0".into() } else { text.into() }
}

/// The numbers in a list like `0-3,8`, without those from [`MAX_NODES`] up.
fn read_list(text: &str) -> Vec<usize> {
    let ranges = text.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    });
    ranges.flatten().filter(|&node| node < MAX_NODES).collect()
}

impl fmt::Debug for NumaPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.nodes().collect();
        f.debug_struct("NumaPages").field("nodes", &nodes).field("policy", &self.policy.name()).finish()
    }
}

// SAFETY: the pages of `PrivatePages`, which keep these promises; a policy changes no contents.
unsafe impl Pages for NumaPages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = PrivatePages.map(size_bytes, align)?;
        // SAFETY: this mapping was just made.
        if unsafe { self.bind(start, size_bytes) }.is_ok() {
            return Some(start);
        }
        // SAFETY: this mapping was just made, and nobody else has it.
        unsafe { PrivatePages.unmap(start, size_bytes) };
        None
    }

    fn maps_lazily(&self) -> bool {
        PrivatePages.maps_lazily()
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: a whole mapping of `map`, not used any more (this function's contract).
        unsafe { PrivatePages.unmap(start, size_bytes) }
    }

    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of `map` whose contents nobody needs (this function's contract).
        unsafe { PrivatePages.discard(start, size_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::{NumaPages, NumaPolicy, read_list};
    use crate::error::Error;

    #[test]
    fn lists_of_nodes_are_read_as_the_kernel_writes_them() {
        assert_eq!(read_list("0"), [0]);
        assert_eq!(read_list("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(read_list("1,3-4\n"), [1, 3, 4]);
        assert_eq!(read_list("5000"), [0_usize; 0]);
        assert_eq!(read_list("nonsense"), [0_usize; 0]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /sys")]
    fn a_node_that_is_not_there_is_refused_with_those_that_are() {
        let refused = NumaPages::new(&[1023], NumaPolicy::Bind).expect_err("no machine here has so many");
        let Error::NoSuchNode { node: 1023, online } = &refused else { panic!("{refused:?}") };
        assert!(online.starts_with('0'));
        assert!(refused.to_string().contains("/sys/devices/system/node/online"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /sys")]
    fn the_number_of_nodes_must_fit_the_policy() {
        for (nodes, policy) in
            [(&[][..], NumaPolicy::Bind), (&[], NumaPolicy::Preferred), (&[0, 0], NumaPolicy::Preferred)]
        {
            let refused = NumaPages::new(nodes, policy).expect_err("does not fit");
            assert!(matches!(refused, Error::BadOption { option: "node", .. }), "{refused:?}");
        }
    }
}
