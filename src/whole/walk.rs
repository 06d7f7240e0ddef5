//! Who asked for a block that a limit refuses: up the native stack to Python's loop. NULL goes only to libraries that
//! are known to survive it.

use super::functions::{Functions, What};
use super::loaded::{Loaded, has_function, loaded};
use super::python::{Python, each_return, enclosing, file_of};
use crate::sync::Made;
use std::ffi::c_void;
use std::ops::ControlFlow::{self, Break, Continue};

/// Packages whose libraries return an error where `malloc` returns NULL. Each is proved by a test
/// (`tests/whole/test_limits.py`, `tests/python/test_whole_limits.py`).
/// With each, from how many bytes on: Pillow checks its pictures, PyTorch its tensors, and neither all of its small
/// blocks. NumPy does not check the buffers by which it casts (128 KiB for complex numbers), OpenBLAS
/// (`numpy.libs`, `scipy.libs`) ends the process, and pandas does not check its hash tables.
const PACKAGES: &[(&str, usize)] = &[
    ("numpy", 1 << 20),
    ("PIL", 4 << 10),
    ("pillow.libs", 4 << 10),
    ("lxml", 0),
    ("sklearn", 0),
    ("scipy", 0),
    ("cv2", 0),
    ("opencv_python_headless.libs", 0),
    ("regex", 0),
    ("msgpack", 0),
    ("torch", 64 << 10),
];
/// The same of libraries that belong to no package, by the beginnings of their files' names.
const FILES: &[&str] = &["libz.so", "libsqlite3.so", "libexpat.so", "liblzma.so", "libbz2.so", "libffi.so"];
/// The preloaded library's file.
const OWN: &[u8] = b"libctxalloc_whole";

/// Pillow's functions that make a decoder or an encoder. Where the state of one (20 KiB for GIF) is refused, they free
/// pointers that they have not set yet.
const PILLOWS: &[u8] = b"PyImaging_";
const PILLOWS_END: &[u8] = b"coderNew";

/// The parser of XML, which is in Python's module or in a library of its own. `ParserCreate` uses its parser (1 KiB and
/// more) before it looks whether there is one; what calls the parser from C (`_elementtree`) looks first.
const EXPATS: &[&str] = &["pyexpat.", "libexpat.so"];
/// Blocks of the parser alone are refused from so many bytes on: its buffer for a long piece of text.
const EXPATS_FROM: usize = 4 << 10;

/// Libraries of these packages and folders that are none. What steps asyncio's tasks would lose a task whose next step
/// it cannot note, and a waiter that it cannot wake; what writes AVIF for Pillow goes on with what it has not got.
const OTHERS: &[&str] = &["_asyncio.", "libavif"];

/// Whether a library is Pillow's.
fn is_pillows(path: &[u8]) -> bool {
    path.windows(5).any(|window| window == b"/PIL/")
}

/// Whether this function is one that uses what it was refused.
fn forgets_to_look(function: &[u8]) -> bool {
    function.starts_with(PILLOWS) && function.ends_with(PILLOWS_END)
}

/// The name of a file without its folder.
fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
}

fn starts(file: &[u8], names: &[&str]) -> bool {
    names.iter().any(|name| file.starts_with(name.as_bytes()))
}

/// Whether the library in this file is one of them. Only what follows the folder of the packages counts: where that is,
/// anything may be in its path.
fn survives(path: &[u8], size_bytes: usize) -> bool {
    let parts = || path.rsplit(|&byte| byte == b'/');
    let (file, folder) = (file_name(path), parts().nth(1).unwrap_or_default());
    if starts(file, OTHERS) {
        return false;
    }
    if starts(file, FILES) || file.starts_with(OWN) || folder == b"lib-dynload" {
        return true;
    }
    // From the end: the part before that of the packages' folder is the package.
    let mut package = None;
    for part in parts() {
        if part == b"site-packages" || part == b"dist-packages" {
            return package.is_some_and(|package| {
                PACKAGES.iter().any(|&(name, from_bytes)| name.as_bytes() == package && size_bytes >= from_bytes)
            });
        }
        package = Some(part);
    }
    false
}

/// Frames that are looked at.
const MAX_FRAMES: u32 = 64;

struct Walk {
    python: Python,
    /// Where our own frames begin, which decide: those up to the preloaded library's. Beyond it, Rust's code ends the
    /// process where it gets NULL.
    own_file: usize,
    is_beyond: bool,
    /// Whether it is asked which of Python's functions call.
    asks_for_allocator: bool,
    size_bytes: usize,
    frames: u32,
    survive: bool,
    /// Whether the parser of XML is one of them, and whether another library is.
    is_expats: bool,
    is_others: bool,
    is_allocators: bool,
    reached_python: bool,
}

fn visit(walk: &mut Walk, ip: usize) -> ControlFlow<()> {
    walk.frames += 1;
    if walk.frames > MAX_FRAMES {
        return Break(());
    }
    if walk.python.runs(ip) {
        walk.reached_python = true;
        return Break(());
    }
    let Some(library) = loaded(ip) else {
        walk.survive = false;
        return Break(());
    };
    let begin = enclosing(ip);
    let is_one_of = |functions: &[usize]| begin != 0 && functions.contains(&begin);
    if is_one_of(walk.python.fragile) {
        walk.survive = false;
        return Break(());
    }
    if library.file == walk.python.file {
        walk.is_allocators = walk.asks_for_allocator && is_one_of(&walk.python.allocator);
        return if walk.is_allocators { Break(()) } else { Continue(()) };
    }
    if !walk.is_beyond {
        walk.is_beyond = library.file != walk.own_file;
        if !walk.is_beyond {
            return Continue(());
        }
    }
    let path = library.path();
    let file = file_name(path);
    if !survives(path, walk.size_bytes) || is_pillows(path) && has_function(ip, forgets_to_look) {
        walk.survive = false;
        return Break(());
    }
    let is_expats = starts(file, EXPATS);
    walk.is_expats |= is_expats;
    walk.is_others |= !is_expats && !file.starts_with(OWN);
    Continue(())
}

/// Whether Python's loop has called us, and none of these functions (address and size) is between. Without a lock.
#[cold]
pub(crate) fn is_called_outside_of(python: Python, within: &[(usize, usize)]) -> bool {
    let (mut frames, mut is_within, mut reached_python) = (0, false, false);
    each_return(|ip| {
        frames += 1;
        reached_python = python.runs(ip);
        is_within = within.iter().any(|&(start, bytes)| ip.wrapping_sub(start) < bytes);
        if is_within || reached_python || frames > MAX_FRAMES { Break(()) } else { Continue(()) }
    });
    reached_python && !is_within
}

/// The library of Arrow's whose callers of a pool survive a refusal: the reader of CSV, for one, does not.
const ARROWS_SURVIVOR: &[u8] = b"libparquet.so";
/// Its functions, by their names. Those that write a file throw where no caller catches, or go on with what they have
/// not got; so who is not known to read is no survivor.
static ARROWS_FUNCTIONS: Made<Option<Functions>> = Made::new();

/// Whether Arrow's reader of Parquet is among the callers, on any thread, and its writer is not. Without a lock.
#[cold]
pub(super) fn is_called_by_a_reader() -> bool {
    let (mut frames, mut reads, mut writes) = (0, false, false);
    each_return(|ip| {
        frames += 1;
        if let Some(library) = loaded(ip).filter(|library| file_name(library.path()).starts_with(ARROWS_SURVIVOR)) {
            let functions = ARROWS_FUNCTIONS.get_or_make(|| Functions::of(library.path())).as_ref();
            let what = functions.and_then(|functions| functions.what(ip - library.file));
            reads |= what == Some(What::Reads);
            writes |= what == Some(What::Writes);
        }
        if writes || frames > MAX_FRAMES { Break(()) } else { Continue(()) }
    });
    reads && !writes
}

/// What is done about a block that a limit has no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Refuse,
    /// The same, and Python itself has asked: no library is between.
    RefusePython,
    /// The caller gets it, and the request is told.
    Grant,
    /// The caller gets it, and it is nobody's.
    Pass,
}

impl Answer {
    pub(super) fn refuse_if(survives: bool) -> Self {
        if survives { Self::Refuse } else { Self::Grant }
    }

    pub(super) fn refuses(self) -> bool {
        matches!(self, Self::Refuse | Self::RefusePython)
    }
}

/// Refused are callers who survive NULL for a block of this size, and all others up to Python's loop. A table of
/// Python's allocator is nobody's: all objects share it, and where it is refused that takes each small object from
/// malloc. `is_object`: it is a block of an object itself. Called without a lock: the unwinder may take the loader's.
#[cold]
pub(super) fn answer_to_callers(python: Python, size_bytes: usize, is_object: bool) -> Answer {
    let own_file = file_of((answer_to_callers as fn(Python, usize, bool) -> Answer) as *const c_void);
    let mut walk = Walk {
        python,
        own_file,
        is_beyond: false,
        asks_for_allocator: !is_object,
        size_bytes,
        frames: 0,
        survive: true,
        is_expats: false,
        is_others: false,
        is_allocators: false,
        reached_python: false,
    };
    each_return(|ip| visit(&mut walk, ip));
    if walk.is_allocators {
        return Answer::Pass;
    }
    let is_parsers_own = walk.is_expats && !walk.is_others && size_bytes < EXPATS_FROM;
    match Answer::refuse_if(walk.survive && walk.reached_python && !is_parsers_own) {
        Answer::Refuse if !walk.is_expats && !walk.is_others => Answer::RefusePython,
        answer => answer,
    }
}

/// The library that a thread belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Library(Loaded);

impl Library {
    /// Where it begins.
    pub(super) fn file(&self) -> usize {
        self.0.file
    }

    /// The name of its file, without the folder.
    pub(super) fn name(&self) -> &[u8] {
        file_name(self.0.path())
    }
}

/// What every thread begins in, whoever's it is.
const RUNTIMES: &[&str] =
    &["libc.so", "libpthread", "libstdc++", "ld-linux", "libctxalloc_whole", "libgcc_s", "libgomp"];

/// The library whose function this thread began with. Without a lock, as above.
#[cold]
pub(super) fn outermost() -> Option<Library> {
    const MAX_DEPTH: u32 = 4096;
    let (mut frames, mut found) = (0, None);
    each_return(|ip| {
        frames += 1;
        if frames > MAX_DEPTH {
            found = None;
            return Break(());
        }
        if let Some(library) = loaded(ip).map(Library) {
            let has = |part: &&str| library.name().windows(part.len()).any(|window| window == part.as_bytes());
            if !RUNTIMES.iter().any(has) {
                found = Some(library);
            }
        }
        Continue(())
    });
    found
}

#[cfg(test)]
mod tests {
    use super::survives;

    #[test]
    fn a_survivor_is_known_by_its_package_and_not_by_its_path() {
        for path in [
            "/usr/lib/python3/dist-packages/lxml/etree.cpython-311-x86_64-linux-gnu.so",
            "/usr/lib/python3.11/lib-dynload/_json.cpython-311-x86_64-linux-gnu.so",
            "/home/me/.cache/ctxalloc/libctxalloc_whole-0123456789abcdef.so",
            "/lib/x86_64-linux-gnu/libz.so.1",
        ] {
            assert!(survives(path.as_bytes(), 1), "{path}");
        }
        assert!(!survives(b"/usr/lib/python3.11/lib-dynload/_asyncio.cpython-311-x86_64-linux-gnu.so", 1));
        assert!(!survives(b"/usr/lib/python3.11/site-packages/pillow.libs/libavif-c6062d5f.so.16.4.2", 1 << 20));
        for (path, from_bytes) in [
            ("/usr/lib/python3/dist-packages/numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so", 1 << 20),
            ("/usr/lib/python3/dist-packages/PIL/_imaging.cpython-311-x86_64-linux-gnu.so", 4 << 10),
        ] {
            assert!(survives(path.as_bytes(), from_bytes) && !survives(path.as_bytes(), from_bytes - 1), "{path}");
        }
        for path in [
            "/srv/numpy/.venv/lib/python3.11/site-packages/orjson/orjson.cpython-311-x86_64-linux-gnu.so",
            "/srv/numpy/orjson.so",
            "/home/me/.venv/lib/python3.11/site-packages/numpy.libs/libscipy_openblas64_-3d91e0b8.so",
            "/home/me/.venv/lib/python3.11/site-packages/pandas/_libs/hashtable.cpython-311-x86_64-linux-gnu.so",
            "/home/me/ctxalloc/python/ctxalloc/_native.abi3.so",
            "/srv/pandas/site-packages/numpy/lib/python3.11/site-packages/orjson/orjson.so",
            "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
            "numpy",
            "",
        ] {
            assert!(!survives(path.as_bytes(), 1 << 20), "{path}");
        }
    }
}
