//! `Room`: how much memory a reading may still take. Whatever it keeps is taken from here first.

/// What would need more memory than there is, and so comes from no recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full(pub(crate) &'static str);

/// So many bytes are left.
#[derive(Debug, Default, Clone)]
pub(crate) struct Room(pub(crate) usize);

impl Room {
    const REASON: &str = "to read on would take more memory than its bytes";

    /// For who reads again what has been read.
    pub(crate) fn unlimited() -> Self {
        Self(usize::MAX)
    }

    pub(crate) fn take(&mut self, bytes: usize) -> Result<(), Full> {
        self.take_for(bytes, Self::REASON)
    }

    pub(crate) fn take_for(&mut self, bytes: usize, reason: &'static str) -> Result<(), Full> {
        self.0 = self.0.checked_sub(bytes).ok_or(Full(reason))?;
        Ok(())
    }

    pub(crate) fn give(&mut self, bytes: usize) {
        self.0 = self.0.saturating_add(bytes);
    }

    /// Adds one to a list, which has little more memory than it needs.
    pub(crate) fn push<T>(&mut self, list: &mut Vec<T>, value: T) -> Result<(), Full> {
        if list.len() == list.capacity() {
            let more = list.len() / 32 + 16;
            self.take(more * size_of::<T>())?;
            list.reserve_exact(more);
        }
        list.push(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Full, Room};

    #[test]
    fn a_list_grows_while_there_is_room() {
        let (mut room, mut list) = (Room(8 * 1000), Vec::new());
        while room.push(&mut list, 1_u64).is_ok() {}
        assert!(list.capacity() <= 1000 && list.len() > 950, "{}", list.len());
        assert_eq!(room.take(room.0 + 1), Err(Full(Room::REASON)));
        room.give(100);
        assert_eq!(room.take(100), Ok(()));
    }
}
