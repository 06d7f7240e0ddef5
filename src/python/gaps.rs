//! Jumps backward that CPython's compiler leaves out of the table of a block's handlers, inside of that block.
//!
//! CPython makes pending calls there. What one raises leaves the block without `except`, `finally` and `__exit__`, as a
//! signal handler's exception does. The second jump of a loop that ends with an `if` is such a one, since 3.13; before,
//! an exception at a jump was looked up just before the place that it leads to, where a `NOP` may be.

use super::imported::Imported;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

static GET_FRAME: Imported = Imported::new("sys", "_getframe");

/// Whether an exception that is raised now, by a pending call, would leave a block that it is in without its handlers.
pub(super) fn is_in_one(py: Python<'_>) -> PyResult<bool> {
    let frame = GET_FRAME.get(py)?.call0()?;
    let code = frame.getattr("f_code")?;
    let table = code.getattr("co_exceptiontable")?.cast_into::<PyBytes>()?;
    if table.as_bytes().is_empty() {
        return Ok(false);
    }
    let at = frame.getattr("f_lasti")?.extract::<usize>()? / 2; // two bytes each
    let bytes = code.getattr("co_code")?.cast_into::<PyBytes>()?;
    let numbers = py.import("opcode")?.getattr("opmap")?.cast_into::<PyDict>()?;
    let number = |name| numbers.get_item(name)?.map(|number| number.extract::<u8>()).transpose();
    let steps: Vec<(u8, u8)> = bytes.as_bytes().chunks_exact(2).map(|step| (step[0], step[1])).collect();
    let Some(back) = steps_back(&steps, at, number("JUMP_BACKWARD")?, number("EXTENDED_ARG")?) else {
        return Ok(false);
    };
    let is_covered = |at: usize| covered(table.as_bytes()).any(|(start, end)| (start..end).contains(&at));
    let target = if py.version_info() < (3, 13) { at + 1 } else { at + 2 }.saturating_sub(back);
    let looked_up = if py.version_info() < (3, 13) { target.saturating_sub(1) } else { at };
    // Outside of a block what is around it has no handler either.
    Ok(!is_covered(looked_up) && [at, at.saturating_sub(1), target].into_iter().any(is_covered))
}

/// How far the instruction here jumps back, if it does.
fn steps_back(steps: &[(u8, u8)], at: usize, jump: Option<u8>, extended: Option<u8>) -> Option<usize> {
    let &(_, low) = steps.get(at).filter(|&&(kind, _)| Some(kind) == jump)?;
    let higher = steps[..at].iter().rev().take_while(|&&(kind, _)| Some(kind) == extended);
    let bytes = std::iter::once(low).chain(higher.map(|&(_, byte)| byte)).enumerate();
    Some(bytes.map(|(place, byte)| usize::from(byte) << (8 * place.min(3))).sum())
}

/// From where to where a handler is for, by instructions. In CPython's `Objects/exception_handling_notes.txt`: numbers
/// of six bits a byte, the highest first; 64 says that more follow, and 128 where an entry begins.
fn covered(table: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let mut bytes = table.iter().copied();
    let mut number = move || {
        let mut byte = bytes.next()?;
        let mut number = usize::from(byte & 63);
        while byte & 64 != 0 {
            byte = bytes.next()?;
            number = number << 6 | usize::from(byte & 63);
        }
        Some(number)
    };
    std::iter::from_fn(move || {
        let [start, length, _target, _depth] = [number()?, number()?, number()?, number()?];
        Some((start, start + length))
    })
}

#[cfg(test)]
mod tests {
    use super::{covered, steps_back};

    #[test]
    fn a_table_is_read_as_cpython_writes_it() {
        // From 3 to 7, and from 100 to 5000.
        let table = [0x83, 4, 9, 1, 0x80 | 0x41, 36, 0x40 | 1, 0x40 | 12, 36, 0x40 | 2, 5, 3];
        assert_eq!(covered(&table).collect::<Vec<_>>(), [(3, 7), (100, 100 + 4096 + 12 * 64 + 36)]);
    }

    #[test]
    fn a_long_jump_is_in_two_instructions() {
        let steps = [(9, 0), (144, 1), (140, 4), (9, 0)];
        assert_eq!(steps_back(&steps, 2, Some(140), Some(144)), Some(260));
        assert_eq!(steps_back(&steps, 3, Some(140), Some(144)), None);
    }
}
