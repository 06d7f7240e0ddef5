//! `Pages`: a value for each number, in little memory where numbers lie side by side, as those of a recording do.

use super::room::{Full, Room};
use std::collections::HashMap;

const LENGTH: u64 = 64;

/// Numbers that lie apart as no recorder gives them would take more memory than they have in the file.
const SCATTERED: &str = "its numbers lie farther apart than those of any recording";

#[derive(Debug, Clone)]
pub(crate) struct Pages<T>(HashMap<u64, Box<[T; LENGTH as usize]>>);

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Copy + Default> Pages<T> {
    /// What a page takes, with its place in the map.
    const BYTES: usize = LENGTH as usize * size_of::<T>() + 64;

    /// The default where nothing was set.
    pub(crate) fn get(&self, number: u64) -> T {
        self.0.get(&(number / LENGTH)).map_or_else(T::default, |page| page[(number % LENGTH) as usize])
    }

    pub(crate) fn set(&mut self, number: u64, value: T, room: &mut Room) -> Result<(), Full> {
        let at = (number % LENGTH) as usize;
        if let Some(page) = self.0.get_mut(&(number / LENGTH)) {
            page[at] = value;
            return Ok(());
        }
        room.take_for(Self::BYTES, SCATTERED)?;
        let mut page = Box::new([T::default(); LENGTH as usize]);
        page[at] = value;
        self.0.insert(number / LENGTH, page);
        Ok(())
    }

    /// Gives its memory back.
    pub(crate) fn give_back(self, room: &mut Room) {
        room.give(self.0.len() * Self::BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::super::room::Room;
    use super::Pages;

    #[test]
    fn numbers_side_by_side_take_little_and_scattered_ones_are_refused() {
        let mut pages = Pages::<u32>::default();
        let mut room = Room(64_000);
        for number in 0..10_000 {
            assert_eq!(pages.get(number), 0);
            pages.set(number, number as u32 + 1, &mut room).expect("five bytes for each");
        }
        assert!((0..10_000).all(|number| pages.get(number) == number as u32 + 1));
        let apart = |number: u64| pages.set(u64::MAX - number * 64, 1, &mut room).is_err();
        assert!((0..100).any(apart));
        let full = room.0;
        pages.give_back(&mut room);
        assert!(room.0 > full + 50_000 && room.0 <= 64_000, "{}", room.0);
    }
}
