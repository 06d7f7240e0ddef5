//! Python's loop and some of its functions, as a native stack shows them: by where they begin.

use super::loaded::{empty, loaded};
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow::{self, Break, Continue};

unsafe extern "C" {
    fn _Unwind_Backtrace(visit: extern "C" fn(*mut c_void, *mut c_void) -> c_int, with: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
    fn _Unwind_FindEnclosingFunction(return_address: *mut c_void) -> *mut c_void;
}

/// Gives `visit` where each call on this thread's native stack returns to, the innermost first, until it breaks off.
#[inline]
pub(super) fn each_return<F: FnMut(usize) -> ControlFlow<()>>(mut visit: F) {
    extern "C" fn one<F: FnMut(usize) -> ControlFlow<()>>(context: *mut c_void, visit: *mut c_void) -> c_int {
        const GO_ON: c_int = 0;
        const STOP: c_int = 4;
        // SAFETY: the closure of `each_return`, which waits for the end; and the context that the unwinder gave.
        let (visit, ip) = unsafe { (&mut *visit.cast::<F>(), _Unwind_GetIP(context)) };
        if visit(ip).is_break() { STOP } else { GO_ON }
    }
    // SAFETY: `one` is given the closure, which lives until this returns.
    unsafe { _Unwind_Backtrace(one::<F>, (&raw mut visit).cast()) };
}

/// Where Python's loop is, and the object file that it is in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Python {
    eval: usize,
    eval_bytes: usize,
    pub(crate) file: usize,
    /// Where other parts of the loop begin; the rest is 0. A compiler that knows what is seldom run puts that
    /// elsewhere, without a symbol (Debian's Python 3.14).
    parts: [usize; 8],
    /// Where the functions of its allocator of small objects begin; the rest is 0.
    pub(super) allocator: [usize; 6],
    /// Where functions begin, of its own or of its library, that go on after NULL as if nothing were, or lose
    /// somebody's work.
    pub(super) fragile: &'static [usize],
    /// Where functions begin that tell nobody of what Python code raises that they call.
    uncaught: &'static [usize],
}

impl Python {
    /// The one whose loop begins here.
    pub(crate) fn at(eval: *mut c_void) -> Option<Self> {
        let (size, file) = extent(eval)?;
        Some(Self {
            eval: eval.addr(),
            eval_bytes: size,
            file,
            parts: [0; 8],
            allocator: [0; 6],
            fragile: &[],
            uncaught: &[],
        })
    }

    /// The same, with the functions that make and resize small objects.
    pub(crate) fn with_allocator(self, functions: [*mut c_void; 6]) -> Self {
        Self { allocator: functions.map(|function| function.addr()), ..self }
    }

    /// The same, with functions that do not survive NULL: found once for the process, and never forgotten.
    pub(crate) fn with_fragile(self, functions: Vec<usize>) -> Self {
        Self { fragile: functions.leak(), ..self }
    }

    /// The same, with functions that tell nobody of what Python code raises that they call.
    pub(crate) fn with_uncaught(self, functions: Vec<usize>) -> Self {
        Self { uncaught: functions.leak(), ..self }
    }

    /// Whether the Python code that runs was called by one of those, through however many others of Python's.
    #[cold]
    pub(crate) fn is_uncaught(&self) -> bool {
        /// Frames that are looked at: who frees an object or collects is rarely as far away.
        const MAX_FRAMES: u32 = 256;
        let (mut frames, mut is_uncaught) = (0, false);
        each_return(|ip| {
            frames += 1;
            is_uncaught = self.uncaught.contains(&enclosing(ip));
            if is_uncaught || frames > MAX_FRAMES { Break(()) } else { Continue(()) }
        });
        is_uncaught
    }

    /// Where the functions begin that are between the loop and whoever calls this.
    pub(crate) fn functions_between(&self) -> Vec<usize> {
        let mut found = Vec::new();
        self.each_between(|ip| found.push(enclosing(ip)));
        found
    }

    /// Where the function begins that the loop has called, through which this is called; 0: it has called this.
    #[cold]
    pub(super) fn called_by_loop(&self) -> usize {
        let mut last = 0;
        self.each_between(|ip| last = enclosing(ip));
        last
    }

    /// The calls between the loop and whoever calls this.
    fn each_between(&self, mut see: impl FnMut(usize)) {
        each_return(|ip| {
            if self.runs(ip) {
                return Break(());
            }
            see(ip);
            Continue(())
        });
    }

    /// To be called by code that Python's loop runs for `evaluate`, a function (address and size) which calls nothing
    /// but the loop: the part that runs it is one of the loop.
    pub(crate) fn learn(&mut self, evaluate: (usize, usize)) {
        let (mut last, mut found) = (0, None);
        each_return(|ip| {
            if ip.wrapping_sub(evaluate.0) < evaluate.1 {
                found = Some(last);
                return Break(());
            }
            last = ip;
            Continue(())
        });
        let Some(ip) = found.filter(|&ip| !self.runs(ip) && self.is_in_file(ip)) else { return };
        if let Some(free) = self.parts.iter_mut().find(|part| **part == 0) {
            *free = enclosing(ip);
        }
    }

    fn is_in_file(&self, ip: usize) -> bool {
        file_of(std::ptr::without_provenance(ip)) == self.file
    }

    /// Whether a call that returns here was made by the loop.
    pub(super) fn runs(&self, ip: usize) -> bool {
        ip.wrapping_sub(self.eval) < self.eval_bytes
            || self.parts[0] != 0 && self.is_in_file(ip) && {
                let part = enclosing(ip);
                part != 0 && self.parts.contains(&part)
            }
    }
}

/// Where the part of a function begins that a call returns to; 0: nobody knows.
pub(super) fn enclosing(ip: usize) -> usize {
    // SAFETY: any address may be asked for.
    unsafe { _Unwind_FindEnclosingFunction(std::ptr::without_provenance_mut(ip)) }.addr()
}

/// The start of the object file with this address; 0: of none.
pub(crate) fn file_of(address: *const c_void) -> usize {
    loaded(address.addr()).map_or(0, |found| found.file)
}

/// How long the function is that begins here, and the start of the object file that it is in.
pub(crate) fn extent(function: *mut c_void) -> Option<(usize, usize)> {
    #[repr(C)]
    struct Symbol {
        name: u32,
        info: u8,
        other: u8,
        section: u16,
        value: usize,
        size: usize,
    }
    unsafe extern "C" {
        fn dladdr1(address: *const c_void, info: *mut libc::Dl_info, extra: *mut *mut c_void, flags: c_int) -> c_int;
    }
    const RTLD_DL_SYMENT: c_int = 1;
    let mut info = empty();
    let mut symbol = std::ptr::null_mut();
    // SAFETY: a place for what glibc tells of an address, and one for a pointer to its symbol.
    if unsafe { dladdr1(function, &raw mut info, &raw mut symbol, RTLD_DL_SYMENT) } == 0 || symbol.is_null() {
        return None;
    }
    // SAFETY: glibc gave a pointer to an `Elf64_Sym` of a library that is never unloaded: Python's.
    let size = unsafe { (*symbol.cast::<Symbol>()).size };
    Some((size, info.dli_fbase.addr()))
}
