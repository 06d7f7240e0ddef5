//! `Window`: some bytes of a file, of which the rest stays where it is.

use crate::os;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::panic::{RefUnwindSafe, UnwindSafe};

/// Where bytes are read from: a file, and bytes in tests.
pub(super) trait ReadAt: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Reads what there is from a place on, as much as comes at once. 0: there is nothing.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        os::read_at(self, into, offset)
    }
}

#[cfg(test)]
impl ReadAt for Vec<u8> {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = self.get(offset as usize..).unwrap_or_default();
        let bytes = rest.len().min(into.len());
        into[..bytes].copy_from_slice(&rest[..bytes]);
        Ok(bytes)
    }
}

/// Fills `into` with what is there from a place on.
///
/// # Errors
/// What the system says, and `UnexpectedEof`: there is less.
pub(super) fn read_exactly(source: &dyn ReadAt, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !into.is_empty() {
        match source.read_at(into, offset) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it became shorter while it was read")),
            Ok(bytes) => (into, offset) = (&mut into[bytes..], offset + bytes as u64),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What is known of a file of this length.
pub(super) struct Window<'a> {
    source: &'a dyn ReadAt,
    length: u64,
    /// Where `bytes` begin.
    begin: u64,
    bytes: Vec<u8>,
    capacity: usize,
}

impl<'a> Window<'a> {
    /// It never has more bytes than `capacity`, nor than the file.
    pub(super) fn new(source: &'a dyn ReadAt, length: u64, capacity: usize) -> Self {
        Self { source, length, begin: 0, bytes: Vec::new(), capacity }
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// So many bytes from a place on, or what the file has of them. At most `capacity`.
    pub(super) fn get(&mut self, at: u64, bytes: usize) -> io::Result<&[u8]> {
        let at = at.min(self.length);
        let bytes = usize::try_from(self.length - at).map_or(bytes, |rest| rest.min(bytes));
        if at < self.begin || at + bytes as u64 > self.begin + self.bytes.len() as u64 {
            self.load(at)?;
        }
        let from = (at - self.begin) as usize;
        Ok(&self.bytes[from..from + bytes])
    }

    /// Moves to this place.
    #[cold]
    fn load(&mut self, at: u64) -> io::Result<()> {
        let known = match at.checked_sub(self.begin).and_then(|from| usize::try_from(from).ok()) {
            Some(from) if from < self.bytes.len() => {
                self.bytes.copy_within(from.., 0);
                self.bytes.len() - from
            }
            _ => 0,
        };
        let size = usize::try_from(self.length - at).map_or(self.capacity, |rest| rest.min(self.capacity));
        self.bytes.reserve_exact(size.saturating_sub(self.bytes.len()));
        self.bytes.resize(size, 0);
        self.begin = at;
        read_exactly(self.source, &mut self.bytes[known..], at + known as u64).inspect_err(|_| self.bytes.clear())
    }
}

#[cfg(test)]
mod tests {
    use super::Window;

    #[test]
    fn a_window_has_the_files_bytes_wherever_it_is() {
        let file: Vec<u8> = (0..1000_u32).map(|at| (at * 7 / 3) as u8).collect();
        let mut window = Window::new(&file, 1000, 64);
        let mut at = 0;
        for step in 0..5000_usize {
            at = (at + step * 31) % 1010;
            let bytes = step % 65;
            let expected = &file[at.min(1000)..(at + bytes).min(1000)];
            assert_eq!(window.get(at as u64, bytes).expect("bytes"), expected, "{bytes} from {at}");
            assert!(window.bytes.capacity() <= 64);
        }
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error() {
        let file = vec![1; 100];
        let mut window = Window::new(&file, 200, 64);
        assert!(window.get(0, 64).is_ok() && window.get(90, 20).is_err());
        assert_eq!(window.get(10, 5).expect("bytes"), [1; 5]);
    }
}
