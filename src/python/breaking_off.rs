//! Where a request's code may end with an exception that tells of its limit: what lies around it must not be left half
//! done.
//!
//! Only the request's own code is broken off, and not what enters or leaves a `with` block, whose function may have any
//! name: the instruction of its caller says it.

use super::asyncio::losing::is_own;
use super::imported::Imported;
use super::tracked::{Running, count_calls, find_running};
use crate::whole::Runs;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// CPython's instructions by what they do; `None`: this version has none of that name.
struct Instructions {
    before_with: Option<u8>,
    before_async_with: Option<u8>,
    with_except_start: Option<u8>,
    load_special: Option<u8>,
    load_const: Option<u8>,
    precall: Option<u8>,
    call: Option<u8>,
    get_awaitable: Option<u8>,
    send: Option<u8>,
}

/// Knows where that is.
pub(super) struct BreakingOff {
    instructions: Instructions,
    /// Our package's: its code, as asyncio's, is nobody's own.
    folder: String,
}

/// An instruction and its argument.
pub(super) type Step = (Option<u8>, u8);

/// The number of the instruction that has this name, if this version has one.
pub(super) fn numbers(py: Python<'_>) -> PyResult<impl Fn(&str) -> PyResult<Option<u8>>> {
    let numbers = py.import("opcode")?.getattr("opmap")?.cast_into::<PyDict>()?;
    Ok(move |name: &str| numbers.get_item(name)?.map(|number| number.extract()).transpose())
}

impl Instructions {
    fn found(py: Python<'_>) -> PyResult<Self> {
        let number = numbers(py)?;
        Ok(Self {
            before_with: number("BEFORE_WITH")?,
            before_async_with: number("BEFORE_ASYNC_WITH")?,
            with_except_start: number("WITH_EXCEPT_START")?,
            load_special: number("LOAD_SPECIAL")?,
            load_const: number("LOAD_CONST")?,
            precall: number("PRECALL")?,
            call: number("CALL")?,
            get_awaitable: number("GET_AWAITABLE")?,
            send: number("SEND")?,
        })
    }

    /// Whether the instruction calls what enters or leaves a block: `with`'s own ones, the call with three times the
    /// same constant, which is None, and the `await` of what `async with` called.
    fn enters_or_leaves(&self, code: &[u8], at: usize) -> bool {
        let mut back = back_from(code, at).filter(|&(kind, _)| kind != self.precall); // half of a call, in 3.11
        let Some((kind, _)) = back.next() else { return false };
        if [self.before_with, self.before_async_with, self.with_except_start].contains(&kind) {
            return true;
        }
        if kind == self.call {
            let [first, second, third] = [back.next(), back.next(), back.next()];
            let calls_exit = first == second && second == third;
            return first.is_some_and(|(kind, _)| {
                kind == self.load_special && kind.is_some() || calls_exit && kind == self.load_const
            });
        }
        // `GET_AWAITABLE`, `LOAD_CONST None`, `SEND`: 1 is what entered, 2 what left.
        kind == self.send && matches!(back.nth(1), Some((kind, 1 | 2)) if kind == self.get_awaitable)
    }

    /// Whether the result of a call is awaited next.
    fn awaits_next(&self, code: &[u8], at: usize) -> bool {
        let next = code.chunks_exact(2).skip(at / 2 + 1).map(|step| Some(step[0])).find(|&kind| kind != Some(0));
        next.is_some_and(|kind| kind == self.get_awaitable)
    }
}

/// The instruction that runs, and those before it, the nearest first. Two bytes each, the first one its kind; 0 is room
/// for a cache, which belongs to the one before.
pub(super) fn back_from(code: &[u8], at: usize) -> impl Iterator<Item = Step> {
    let until = (at + 2).min(code.len());
    let steps = code[..until].chunks_exact(2).rev().map(|step| (Some(step[0]), step[1]));
    steps.filter(|&(kind, _)| kind != Some(0))
}

/// Whether asyncio's loop reads from a socket here, in the Context of the request that had reading go on. An exception
/// would end the connection, and the client have no answer.
fn reads_for_a_server(file: &str, name: &str) -> bool {
    name.starts_with("_read_ready") && file.ends_with("asyncio/selector_events.py")
}

/// How many calls that import a module this thread runs; it counts no more than so many.
fn imports(py: Python<'_>, up_to: usize) -> usize {
    /// What finds a module that is not there yet, and what reloads one.
    const FUNCTIONS: [&str; 2] = ["_find_and_load", "_exec"];
    count_calls(py, "<frozen importlib._bootstrap>", &FUNCTIONS, up_to)
}

/// The imports that whatever begins here is begun within.
pub(super) fn imports_around(py: Python<'_>) -> usize {
    static LOCKS: Imported = Imported::new("_frozen_importlib", "_module_locks");
    // Empty unless some thread imports.
    let is_empty = LOCKS.get(py).and_then(|locks| locks.is_empty()).unwrap_or(false);
    if is_empty { 0 } else { imports(py, usize::MAX) }
}

impl BreakingOff {
    /// `folder`: our package's.
    pub(super) fn prepared(py: Python<'_>, folder: String) -> PyResult<Self> {
        Ok(Self { instructions: Instructions::found(py)?, folder })
    }

    /// Whose code runs on this thread: its own may end here with an exception. What enters or leaves a block must not,
    /// nor the standard library's: a lock would stay locked. Nor may a module that is imported: C's are made once, and
    /// what others have registered by then they register again. Nor may a server's, which the loop calls to read. Nor
    /// what was called and is about to be awaited: nobody would wait for the tasks of a group. It may be called inside
    /// of an allocation.
    ///
    /// `around`: how many [imports](imports_around) are not the request's own.
    pub(super) fn runs(&self, py: Python<'_>, around: usize) -> Runs {
        if imports(py, around + 1) > around {
            return Runs::Imports;
        }
        let mut innermost = None;
        let at_ends = |running: Running<'_>| {
            innermost.get_or_insert_with(|| self.of_one(&running));
            self.is_at_ends(&running).then_some(Runs::AtEnds)
        };
        find_running(py, at_ends).or(innermost).unwrap_or(Runs::Others)
    }

    fn is_at_ends(&self, running: &Running<'_>) -> bool {
        const AT_ENDS: [&str; 5] = ["__enter__", "__aenter__", "__exit__", "__aexit__", "__del__"];
        let name = running.function.rsplit('.').next().unwrap_or(running.function);
        AT_ENDS.contains(&name)
            || self.instructions.enters_or_leaves(running.code, running.at)
            || reads_for_a_server(running.file, name)
    }

    /// Whose code a call is, whatever is around it.
    fn of_one(&self, &Running { file, function, code, at }: &Running<'_>) -> Runs {
        if !file.starts_with(&self.folder) && is_own(file, function) && !self.instructions.awaits_next(code, at) {
            Runs::Own
        } else {
            Runs::Others
        }
    }
}
