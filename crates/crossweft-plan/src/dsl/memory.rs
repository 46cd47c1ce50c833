//! Where data is: buffers of ranks, and chunks of them.

use std::ops::Range;

use crate::plan::Buffer;

/// A buffer of a rank: its input, its output, or a piece of its scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Memory {
    pub(super) rank: u32,
    pub(super) buffer: Buffer,
    /// Where it begins in what it is part of.
    pub(super) first: u32,
    pub(super) chunks: u32,
}

impl Memory {
    /// The rank whose it is.
    #[must_use]
    pub const fn rank(self) -> u32 {
        self.rank
    }

    /// What it is part of.
    #[must_use]
    pub const fn buffer(self) -> Buffer {
        self.buffer
    }

    /// Its size in chunks.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.chunks
    }

    /// Whether it has no chunks.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.chunks == 0
    }

    /// Some of its chunks. Whether they exist is checked by whatever uses them.
    #[must_use]
    pub const fn chunks(self, range: Range<u32>) -> Chunk {
        Chunk {
            of: self,
            first: range.start,
            end: range.end,
        }
    }

    /// One of its chunks.
    #[must_use]
    pub const fn chunk(self, index: u32) -> Chunk {
        self.chunks(index..index.saturating_add(1))
    }

    /// All of its chunks.
    #[must_use]
    pub const fn all(self) -> Chunk {
        self.chunks(0..self.chunks)
    }
}

/// Chunks of a buffer that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    pub(super) of: Memory,
    pub(super) first: u32,
    pub(super) end: u32,
}

impl Chunk {
    /// The buffer that they are in.
    #[must_use]
    pub const fn memory(self) -> Memory {
        self.of
    }

    /// Their indices in it.
    #[must_use]
    pub const fn range(self) -> Range<u32> {
        self.first..self.end
    }

    /// How many they are.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.end.saturating_sub(self.first)
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}
