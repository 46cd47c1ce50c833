//! Which bytes of a message an operation moves: chunks, and slices of them.
//!
//! A message of any size is cut into the plan's number of chunks. Every chunk has
//! [`chunk_bytes`] bytes, except that the message ends where it ends: the last chunks may be
//! shorter, or empty. Boundaries are multiples of [`GRANULE`], so every element type, packet word
//! and vector stays whole, and slot `i` of a scratch buffer lies at `i` chunks, whatever is in it.

/// Bytes that boundaries inside a message are multiples of.
pub const GRANULE: u64 = 16;

/// Bytes of a full chunk of a message of `bytes` bytes cut into `chunks` chunks.
#[inline(always)]
#[must_use]
pub const fn chunk_bytes(bytes: u64, chunks: u32) -> u64 {
    if chunks == 0 {
        return 0;
    }
    bytes.div_ceil(GRANULE).div_ceil(chunks as u64) * GRANULE
}

/// A range of a message, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

impl Extent {
    /// Chunks `[first, first + count)` of a message, as far as it reaches.
    #[inline(always)]
    #[must_use]
    pub const fn of_chunks(bytes: u64, chunk: u64, first: u32, count: u32) -> Self {
        let begin = chunk.saturating_mul(first as u64);
        let end = begin.saturating_add(chunk.saturating_mul(count as u64));
        Self {
            begin: min(begin, bytes),
            end: min(end, bytes),
        }
    }

    /// Slice `index` of `of` nearly equal ones. The slices of one extent cover it exactly.
    #[inline(always)]
    #[must_use]
    pub const fn slice(self, index: u32, of: u32) -> Self {
        if of <= 1 {
            return self;
        }
        let step = divide_up(self.len().div_ceil(GRANULE), of) * GRANULE;
        let begin = self.begin + step * index as u64;
        Self {
            begin: min(begin, self.end),
            end: min(begin + step, self.end),
        }
    }

    /// Length in bytes.
    #[inline(always)]
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end - self.begin
    }

    /// Whether there is nothing in it.
    #[inline(always)]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.begin == self.end
    }
}

/// `a.div_ceil(b)`, which on a GPU takes a fifth of the time for 32 bits.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "it fits")]
const fn divide_up(a: u64, b: u32) -> u64 {
    if a >> 32 == 0 {
        return (a as u32).div_ceil(b) as u64;
    }
    core::hint::cold_path();
    a.div_ceil(b as u64)
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_and_slices_cover_every_message_once() {
        for bytes in (0..200).chain([1 << 20, (1 << 20) + 1, (1 << 40) + 17]) {
            for chunks in 1..9 {
                let chunk = chunk_bytes(bytes, chunks);
                let mut at = 0;
                for c in 0..chunks {
                    let extent = Extent::of_chunks(bytes, chunk, c, 1);
                    assert_eq!(extent.begin, at.min(bytes));
                    for of in 1..5 {
                        let mut inner = extent.begin;
                        for s in 0..of {
                            let slice = extent.slice(s, of);
                            assert_eq!(slice.begin, inner);
                            assert!(slice.is_empty() || slice.begin.is_multiple_of(GRANULE));
                            inner = slice.end;
                        }
                        assert_eq!(inner, extent.end);
                    }
                    at = extent.end;
                }
                assert_eq!(at, bytes, "{bytes} bytes in {chunks} chunks");
            }
        }
    }

    #[test]
    fn short_divisions_are_the_long_ones() {
        for b in [1, 2, 3, 7, 64, 1000, u32::MAX] {
            let near = [0, 1, u64::from(b), (1 << 32) - u64::from(b), 1 << 32];
            for a in near.map(|a| [a.saturating_sub(1), a, a + 1]).concat() {
                assert_eq!(divide_up(a, b), a.div_ceil(u64::from(b)), "{a} / {b}");
            }
        }
    }

    #[test]
    fn chunk_sizes_match_the_mscclpp_formula_where_that_is_defined() {
        // off(S, i, N) = A * (i * q + min(i, r)) with r = 0, the only case their executor accepts.
        for (bytes, chunks) in [(64, 4), (1 << 20, 8), (48, 3)] {
            assert_eq!(chunk_bytes(bytes, chunks), bytes / u64::from(chunks));
        }
    }
}
