//! Jumps backward that CPython's compiler leaves out of the table of a block's handlers, inside of that block.
//!
//! CPython makes pending calls there. What one raises leaves the block without `except`, `finally` and `__exit__`, as a
//! signal handler's exception does. The second jump of a loop that ends with an `if` is such a one, since 3.13; before,
//! an exception at a jump was looked up just before the place that it leads to, where a `NOP` may be.

use super::breaking_off::{Step, back_from, numbers};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// What tells such a jump from others.
pub(super) struct Gaps {
    jump_backward: Option<u8>,
    extended_arg: Option<u8>,
    /// Whether the handler is looked up at the jump itself, which has room for a cache then; else in front of where it
    /// leads.
    is_looked_up_here: bool,
}

impl Gaps {
    pub(super) fn found(py: Python<'_>) -> PyResult<Self> {
        let number = numbers(py)?;
        Ok(Self {
            jump_backward: number("JUMP_BACKWARD")?,
            extended_arg: number("EXTENDED_ARG")?,
            is_looked_up_here: py.version_info() >= (3, 13),
        })
    }

    /// Whether an exception that a pending call raises now would leave a block that this frame is in, and not meet its
    /// handlers.
    pub(super) fn have(&self, frame: &Bound<'_, PyAny>) -> PyResult<bool> {
        let code = frame.getattr("f_code")?;
        let table = code.getattr("co_exceptiontable")?.cast_into::<PyBytes>()?;
        if table.as_bytes().is_empty() {
            return Ok(false);
        }
        let steps = code.getattr("co_code")?.cast_into::<PyBytes>()?;
        let byte: usize = frame.getattr("f_lasti")?.extract()?;
        let Some(back) = self.steps_back(back_from(steps.as_bytes(), byte)) else { return Ok(false) };
        let at = byte / 2; // two bytes each
        let target = (at + 1 + usize::from(self.is_looked_up_here)).saturating_sub(back);
        let looked_up = if self.is_looked_up_here { at } else { target.saturating_sub(1) };
        let is_covered = |at: usize| covered(table.as_bytes()).any(|(start, end)| (start..end).contains(&at));
        // Outside of a block what is around it has no handler either.
        Ok(!is_covered(looked_up) && [at, at.saturating_sub(1), target].into_iter().any(is_covered))
    }

    /// How far the first of these instructions, behind which those before it come, jumps back, if it does.
    fn steps_back(&self, mut steps: impl Iterator<Item = Step>) -> Option<usize> {
        let (_, low) = steps.next().filter(|&(kind, _)| kind == self.jump_backward)?;
        let higher = steps.take_while(|&(kind, _)| kind == self.extended_arg).map(|(_, byte)| byte);
        let bytes = std::iter::once(low).chain(higher).enumerate();
        Some(bytes.map(|(place, byte)| usize::from(byte) << (8 * place.min(3))).sum())
    }
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
    use super::{Gaps, back_from, covered};

    #[test]
    fn a_table_is_read_as_cpython_writes_it() {
        // From 3 to 7, and from 100 to 5000.
        let table = [0x83, 4, 9, 1, 0x80 | 0x41, 36, 0x40 | 1, 0x40 | 12, 36, 0x40 | 2, 5, 3];
        assert_eq!(covered(&table).collect::<Vec<_>>(), [(3, 7), (100, 100 + 4096 + 12 * 64 + 36)]);
    }

    #[test]
    fn a_long_jump_is_in_two_instructions() {
        let code = [9, 0, 144, 1, 140, 4, 9, 0];
        let gaps = Gaps { jump_backward: Some(140), extended_arg: Some(144), is_looked_up_here: true };
        assert_eq!(gaps.steps_back(back_from(&code, 4)), Some(260));
        assert_eq!(gaps.steps_back(back_from(&code, 6)), None);
    }
}
