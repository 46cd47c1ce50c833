//! Ranges of a memory, handed out and taken back.

use std::collections::BTreeMap;

/// Hands out ranges of a memory by their offsets. The same calls in the same order give the same offsets, so that ranks
/// which make them on a [`SymmetricBuffer`](crate::SymmetricBuffer) have the same ranges of it.
#[derive(Debug)]
pub struct Heap {
    /// Free ranges, by where they begin: never empty, never side by side.
    free: BTreeMap<u64, u64>,
    /// What was handed out.
    used: BTreeMap<u64, u64>,
}

impl Heap {
    /// What ranges are aligned to, and their sizes rounded up to, in bytes.
    pub const ALIGNMENT: u64 = 512;

    /// Of a memory of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let whole = bytes / Self::ALIGNMENT * Self::ALIGNMENT;
        Self {
            free: (whole > 0).then_some((0, whole)).into_iter().collect(),
            used: BTreeMap::new(),
        }
    }

    /// The offset of `bytes` bytes, one at least: the first place where they fit. `None` if there is none.
    pub fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.max(1).checked_next_multiple_of(Self::ALIGNMENT)?;
        let (&offset, &room) = self.free.iter().find(|&(_, &room)| room >= bytes)?;
        self.free.remove(&offset);
        if room > bytes {
            self.free.insert(offset + bytes, room - bytes);
        }
        self.used.insert(offset, bytes);
        Some(offset)
    }

    /// Takes back what [`allocate`](Self::allocate) handed out at `offset`; says whether there is such a thing.
    pub fn release(&mut self, offset: u64) -> bool {
        let Some(mut bytes) = self.used.remove(&offset) else {
            return false;
        };
        let mut begin = offset;
        if let Some((&before, &room)) = self.free.range(..offset).next_back()
            && before + room == offset
        {
            self.free.remove(&before);
            (begin, bytes) = (before, room + bytes);
        }
        if let Some(room) = self.free.remove(&(begin + bytes)) {
            bytes += room;
        }
        self.free.insert(begin, bytes);
        true
    }

    /// Bytes that are handed out.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = Heap::ALIGNMENT;

    #[test]
    fn what_comes_back_is_handed_out_again() {
        let mut heap = Heap::new(10 * UNIT + 1);
        let offsets = [3 * UNIT, 1, UNIT + 1].map(|bytes| heap.allocate(bytes).unwrap());
        assert_eq!(offsets, [0, 3 * UNIT, 4 * UNIT]);
        assert_eq!(heap.used(), 6 * UNIT);
        assert_eq!(heap.allocate(5 * UNIT), None);
        assert!(heap.release(0) && !heap.release(0) && !heap.release(1));
        assert_eq!(heap.allocate(2 * UNIT), Some(0), "the first place");
        // Neighbours on both sides become one.
        for offset in [0, 4 * UNIT, 3 * UNIT] {
            assert!(heap.release(offset));
        }
        assert_eq!(heap.used(), 0);
        assert_eq!(heap.allocate(10 * UNIT), Some(0));
        assert_eq!(heap.allocate(1), None);
        assert_eq!(Heap::new(UNIT - 1).allocate(1), None);
        assert_eq!(Heap::new(u64::MAX).allocate(u64::MAX), None);
    }

    #[test]
    fn ranges_never_meet() {
        let mut heap = Heap::new(64 * UNIT);
        let mut held: Vec<(u64, u64)> = Vec::new();
        let mut seed = 1_u64;
        for _ in 0..2000 {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let number = seed >> 33;
            if number.is_multiple_of(3) && !held.is_empty() {
                let (offset, _) = held.swap_remove(number as usize % held.len());
                assert!(heap.release(offset));
            } else if let Some(offset) = heap.allocate(number % (9 * UNIT)) {
                let bytes = (number % (9 * UNIT)).max(1);
                assert!(offset.is_multiple_of(UNIT) && offset + bytes <= 64 * UNIT);
                let apart = |&(o, b): &(u64, u64)| o + b <= offset || offset + bytes <= o;
                assert!(held.iter().all(apart));
                held.push((offset, bytes));
            }
        }
        held.iter()
            .for_each(|&(offset, _)| assert!(heap.release(offset)));
        assert_eq!(heap.allocate(64 * UNIT), Some(0));
    }
}
