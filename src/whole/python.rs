//! Python's loop and some of its functions, as a native stack shows them: by where they begin.

use std::ffi::{c_int, c_void};

unsafe extern "C" {
    pub(super) fn _Unwind_Backtrace(
        visit: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        walk: *mut c_void,
    ) -> c_int;
    pub(super) fn _Unwind_GetIP(context: *mut c_void) -> usize;
    fn _Unwind_FindEnclosingFunction(return_address: *mut c_void) -> *mut c_void;
}

pub(super) const GO_ON: c_int = 0;
pub(super) const STOP: c_int = 4;

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
        let mut calling = Calling { python: *self, frames: 0, is_uncaught: false };
        // SAFETY: `visit_calling` is given the struct, which lives until this returns.
        unsafe { _Unwind_Backtrace(visit_calling, (&raw mut calling).cast()) };
        calling.is_uncaught
    }

    /// Where the functions begin that are between the loop and whoever calls this.
    pub(crate) fn functions_between(&self) -> Vec<usize> {
        let mut between = Between { python: *self, found: Vec::new() };
        // SAFETY: `visit_between` is given the struct, which lives until this returns.
        unsafe { _Unwind_Backtrace(visit_between, (&raw mut between).cast()) };
        between.found
    }

    /// Where the function begins that the loop has called, through which this is called; 0: it has called this.
    #[cold]
    pub(super) fn called_by_loop(&self) -> usize {
        let mut called = Called { python: *self, last: 0 };
        // SAFETY: `visit_called` is given the struct, which lives until this returns.
        unsafe { _Unwind_Backtrace(visit_called, (&raw mut called).cast()) };
        called.last
    }

    /// To be called by code that Python's loop runs for `evaluate`, a function (address and size) which calls nothing
    /// but the loop: the part that runs it is one of the loop.
    pub(crate) fn learn(&mut self, evaluate: (usize, usize)) {
        let mut callee = Callee { of: evaluate, last: 0, found: None };
        // SAFETY: `visit_callee` is given the struct, which lives until this returns.
        unsafe { _Unwind_Backtrace(visit_callee, (&raw mut callee).cast()) };
        let Some(ip) = callee.found.filter(|&ip| !self.runs(ip) && self.is_in_file(ip)) else { return };
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
    let mut info = empty();
    // SAFETY: any address may be asked for; a place for the answer.
    unsafe { libc::dladdr(address, &raw mut info) };
    info.dli_fbase.addr()
}

struct Between {
    python: Python,
    found: Vec<usize>,
}

extern "C" fn visit_between(context: *mut c_void, between: *mut c_void) -> c_int {
    // SAFETY: the struct of `functions_between`, which waits for the end; and the context that the unwinder gave.
    let (between, ip) = unsafe { (&mut *between.cast::<Between>(), _Unwind_GetIP(context)) };
    if between.python.runs(ip) {
        return STOP;
    }
    between.found.push(enclosing(ip));
    GO_ON
}

/// Frames that are looked at: who frees an object or collects is rarely as far away.
const MAX_CALLING: u32 = 256;

struct Calling {
    python: Python,
    frames: u32,
    is_uncaught: bool,
}

extern "C" fn visit_calling(context: *mut c_void, calling: *mut c_void) -> c_int {
    // SAFETY: the struct of `is_uncaught`, which waits for the end; and the context that the unwinder gave.
    let (calling, ip) = unsafe { (&mut *calling.cast::<Calling>(), _Unwind_GetIP(context)) };
    calling.frames += 1;
    calling.is_uncaught = calling.python.uncaught.contains(&enclosing(ip));
    if calling.is_uncaught || calling.frames > MAX_CALLING { STOP } else { GO_ON }
}

struct Called {
    python: Python,
    last: usize,
}

extern "C" fn visit_called(context: *mut c_void, called: *mut c_void) -> c_int {
    // SAFETY: the struct of `called_by_loop`, which waits for the end; and the context that the unwinder gave.
    let (called, ip) = unsafe { (&mut *called.cast::<Called>(), _Unwind_GetIP(context)) };
    if called.python.runs(ip) {
        return STOP;
    }
    called.last = enclosing(ip);
    GO_ON
}

struct Callee {
    of: (usize, usize),
    last: usize,
    found: Option<usize>,
}

extern "C" fn visit_callee(context: *mut c_void, callee: *mut c_void) -> c_int {
    // SAFETY: the struct of `learn`, which waits for the end; and the context that the unwinder gave.
    let (callee, ip) = unsafe { (&mut *callee.cast::<Callee>(), _Unwind_GetIP(context)) };
    if ip.wrapping_sub(callee.of.0) < callee.of.1 {
        callee.found = Some(callee.last);
        return STOP;
    }
    callee.last = ip;
    GO_ON
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

pub(super) fn empty() -> libc::Dl_info {
    use std::ptr::null_mut;
    libc::Dl_info { dli_fname: null_mut(), dli_fbase: null_mut(), dli_sname: null_mut(), dli_saddr: null_mut() }
}
