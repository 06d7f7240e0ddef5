//! Which of a library's functions read, and which write: by the names in its file. Most of Arrow's have none that the
//! loader knows, so its file's own table is read, once, where it has one (a stripped library has none).

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

/// What a function's name says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Reads,
    /// Or it does both.
    Writes,
}

/// The functions of a library whose names say one of these.
#[derive(Debug)]
pub(super) struct Functions(Box<[Function]>);

#[derive(Debug, Clone, Copy)]
struct Function {
    /// Counted from where the library begins.
    start: usize,
    end: usize,
    what: What,
}

const HEADER: usize = 64;
const SECTION: usize = 64;
const SYMBOL: usize = 24;
const TABLE_OF_SYMBOLS: u64 = 2;
const FUNCTION: u8 = 2;
/// No library has a table as long as this.
const MAX_TABLE: u64 = 256 << 20;

/// The number in so many bytes from here on.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
}

fn part(file: &File, at: u64, bytes: u64) -> Option<Vec<u8>> {
    let mut part = vec![0; usize::try_from(bytes).ok().filter(|_| bytes <= MAX_TABLE)?];
    file.read_exact_at(&mut part, at).ok()?;
    Some(part)
}

fn what(name: &[u8]) -> Option<What> {
    let has = |parts: [&[u8]; 2]| parts.iter().any(|part| name.windows(part.len()).any(|window| window == *part));
    match (has([b"Read", b"Decod"]), has([b"Writ", b"Encod"])) {
        (_, true) => Some(What::Writes),
        (true, false) => Some(What::Reads),
        (false, false) => None,
    }
}

impl Functions {
    /// Those of the library in this file. `None`: it cannot be read, or says no names.
    pub(super) fn of(path: &[u8]) -> Option<Self> {
        let file = File::open(OsStr::from_bytes(path)).ok()?;
        let header = part(&file, 0, HEADER as u64)?;
        const OF_64_BITS_LOW_BYTE_FIRST: &[u8] = b"\x7fELF\x02\x01";
        if !header.starts_with(OF_64_BITS_LOW_BYTE_FIRST) || number(&header, 58, 2)? != SECTION as u64 {
            return None;
        }
        let sections = part(&file, number(&header, 40, 8)?, number(&header, 60, 2)? * SECTION as u64)?;
        let section = |at: u64| {
            let at = usize::try_from(at).ok()?;
            sections.get(at * SECTION..(at + 1) * SECTION)
        };
        let contents = |section: &[u8]| part(&file, number(section, 24, 8)?, number(section, 32, 8)?);
        let table = sections.chunks_exact(SECTION).find(|one| number(one, 4, 4) == Some(TABLE_OF_SYMBOLS))?;
        let (symbols, names) = (contents(table)?, contents(section(number(table, 40, 4)?)?)?);
        let function = |symbol: &[u8]| {
            let name = names.get(number(symbol, 0, 4)? as usize..)?;
            let name = &name[..name.iter().position(|&byte| byte == 0)?];
            let (start, bytes) = (number(symbol, 8, 8)? as usize, number(symbol, 16, 8)? as usize);
            let is_function = symbol.get(4)? & 15 == FUNCTION && bytes > 0;
            Some(Function { start, end: start.checked_add(bytes)?, what: what(name).filter(|_| is_function)? })
        };
        let mut functions: Vec<Function> = symbols.chunks_exact(SYMBOL).filter_map(function).collect();
        functions.sort_unstable_by_key(|function| function.start);
        Some(Self(functions.into()))
    }

    /// What the function does that a call returns to, so many bytes behind where the library begins.
    pub(super) fn what(&self, offset: usize) -> Option<What> {
        let before = self.0.partition_point(|function| function.start < offset);
        // A call may be a function's last instruction. Aliases begin together.
        let around = self.0[..before].iter().rev().take_while(|function| function.end >= offset);
        around.map(|function| function.what).max_by_key(|&what| what == What::Writes)
    }
}

#[cfg(test)]
mod tests {
    use super::{Functions, What, what};

    #[test]
    fn a_name_says_what_its_function_does() {
        assert_eq!(what(b"_ZN7parquet5arrow12_GLOBAL__N_114FileReaderImpl10ReadColumnEi"), Some(What::Reads));
        assert_eq!(what(b"_ZN7parquet16ColumnWriterImpl11AddDataPageEv"), Some(What::Writes));
        assert_eq!(what(b"_ZN7parquet14AllocateBufferEPN5arrow10MemoryPoolEl"), None);
        assert_eq!(what(b"_ZN7parquet7Encoder4ReadEv"), Some(What::Writes));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it reads this program's file")]
    fn the_functions_of_a_file_are_found_where_they_are() {
        // This program's own: it is not stripped.
        let path = std::env::current_exe().expect("a path");
        let functions = Functions::of(path.as_os_str().as_encoded_bytes()).expect("a table");
        assert!(functions.0.len() > 10, "{}", functions.0.len());
        assert!(functions.0.iter().any(|function| function.what == What::Reads));
        for function in functions.0.iter().take(1000) {
            assert!(functions.what(function.start + 1).is_some());
            assert!(functions.what(function.end).is_some());
        }
    }

    #[test]
    fn what_is_no_library_has_no_functions() {
        assert!(Functions::of(b"/dev/null").is_none());
        assert!(Functions::of(b"/proc/self/status").is_none());
        assert!(Functions::of(b"/nowhere").is_none());
    }
}
