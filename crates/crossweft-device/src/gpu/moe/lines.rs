//! Rows as lines ([`crate::gpu::lines`]): data and flags in one, so a receiver needs neither a flag of its own nor the
//! sender a fence, and a row can be laid out while the next one is on its way.
//!
//! A row is pairs of lines: first what it says of itself (*meta*), then its elements in *segments* of [`SEGMENT_PAIRS`], of
//! each of which a warp moves one. Where elements have scales, a segment has whole groups of them, and their scales behind
//! them. Every line is flagged with the call's [epoch](crate::moe::epoch_of), in a place that depends on nothing, so that
//! nothing that was sent before is ever taken for it. Nothing but lines is ever written there.
#![allow(
    clippy::cast_possible_truncation,
    reason = "what a segment has is counted in 32 bits"
)]

use crate::block::Block;
use crate::gpu::lines::{self, LANES, PAIR};
use crate::gpu::packets::{load_bytes, store_bytes, word};
use crate::gpu::wide::{PIECE, Piece, load16};
use crate::memory::Memory;
use crate::moe::{GROUP, Phase, align, site};
use crate::wait::{Stopped, WaitKind};

/// Pieces of a pair.
pub(super) const PAIR_PIECES: u32 = 15;
/// Pairs of a segment.
pub const SEGMENT_PAIRS: u32 = 8;
/// Bytes of elements of a segment without scales.
pub const SEGMENT_BYTES: u64 = SEGMENT_PAIRS as u64 * PAIR_PIECES as u64 * PIECE;
/// Groups of a segment whose elements, of a byte each, have scales.
pub const SEGMENT_GROUPS: u64 = 14;

/// Pairs that a warp reaches at a time.
const AT_ONCE: u32 = crate::gpu::WARP / LANES;

const _: () = assert!(SEGMENT_PAIRS == 2 * AT_ONCE, "a lane has two pairs");
const _: () = assert!(SEGMENT_GROUPS * (GROUP + 4) <= SEGMENT_BYTES);

/// Pairs of what a row says of itself, of so many bytes.
#[inline(always)]
pub(super) const fn meta_pairs(meta_bytes: u64) -> u32 {
    pairs(meta_bytes.div_ceil(PIECE) as u32)
}

const fn pairs(pieces: u32) -> u32 {
    pieces.div_ceil(PAIR_PIECES)
}

/// Bytes from one row to the next: room for `payload_bytes` of elements, or for half as many elements of a byte with scales,
/// and for what it says of itself.
#[must_use]
pub const fn row_bytes(payload_bytes: u64, meta_bytes: u64) -> u64 {
    (pairs(payload_bytes.div_ceil(PIECE) as u32) + meta_pairs(meta_bytes)) as u64 * PAIR
}

/// How the elements of a row are divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segments {
    /// Bytes of elements, and of scales, of all but the last.
    bytes: u64,
    scale_bytes: u64,
    /// Bytes of a row's.
    row: u64,
    row_scales: u64,
    /// Segments of a row.
    pub(super) each: u32,
}

/// The elements and scales of one of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// Where they are among the row's, and their bytes.
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) scales_at: u64,
    pub(super) scale_bytes: u64,
}

impl Segments {
    /// Of `row` bytes of elements and `row_scales` of scales: 0; or 4 for each group; or 1, and up to 3 behind the last
    /// one, which are the last segment's.
    #[inline(always)]
    pub(super) const fn of(row: u64, row_scales: u64) -> Self {
        let (bytes, scale_bytes) = match row_scales {
            0 => (SEGMENT_BYTES, 0),
            _ => {
                let words = 4 * row.div_ceil(GROUP);
                let each = if row_scales == words { 4 } else { 1 };
                (SEGMENT_GROUPS * GROUP, SEGMENT_GROUPS * each)
            }
        };
        Self {
            bytes,
            scale_bytes,
            row,
            row_scales,
            // Divided by what is known.
            each: match row_scales {
                0 => row.div_ceil(SEGMENT_BYTES),
                _ => row.div_ceil(SEGMENT_GROUPS * GROUP),
            } as u32,
        }
    }

    #[inline(always)]
    pub(super) const fn segment(&self, index: u32) -> Segment {
        let (at, scales_at) = (index as u64 * self.bytes, index as u64 * self.scale_bytes);
        Segment {
            at,
            bytes: least(self.row - at, self.bytes),
            scales_at,
            scale_bytes: match index + 1 < self.each {
                true => self.scale_bytes,
                false => self.row_scales - scales_at,
            },
        }
    }

    /// Where in a row it is, behind so many pairs.
    #[inline(always)]
    pub(super) const fn place(meta_pairs: u32, index: u32) -> u64 {
        (meta_pairs + index * SEGMENT_PAIRS) as u64 * PAIR
    }
}

#[inline(always)]
const fn least(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}

impl Segment {
    /// Pieces of elements.
    #[inline(always)]
    pub(super) const fn element_pieces(&self) -> u32 {
        (self.bytes / PIECE) as u32
    }

    /// Pieces of all.
    #[inline(always)]
    pub(super) const fn pieces(&self) -> u32 {
        self.element_pieces() + self.scale_bytes.div_ceil(PIECE) as u32
    }

    /// Piece `index`, of elements and scales that lie there; scales may lie anywhere.
    ///
    /// # Safety
    /// They must be there.
    #[inline(always)]
    pub(super) unsafe fn load<B: Block>(&self, elements: u64, scales: u64, index: u32) -> Piece {
        let own = self.element_pieces();
        if index < own {
            // SAFETY: the caller's promise.
            return unsafe { load16(elements + u64::from(index) * PIECE) };
        }
        if index >= self.pieces() {
            return Piece::default();
        }
        let at = u64::from(index - own) * PIECE;
        // SAFETY: the caller's promise.
        Piece::of(unsafe { load_scales::<B>(scales + at, self.scale_bytes - at) })
    }
}

/// Up to a piece of scales, which may lie anywhere, of which `left` bytes are there. Functions of their own: only few
/// calls have any. Generic, so that they are compiled with the kernel that calls them.
///
/// # Safety
/// They must be there.
#[cold]
#[inline(never)]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "compiled with the kernel that calls it"
)]
unsafe fn load_scales<B: Block>(addr: u64, left: u64) -> u128 {
    let word = |k: u64| {
        // SAFETY: the caller's promise; no byte beyond the last is read.
        let word = unsafe { load_bytes(addr + k, left.saturating_sub(k)) };
        u128::from(word) << (8 * k)
    };
    word(0) | word(4) | word(8) | word(12)
}

/// The other way round.
///
/// # Safety
/// As for [`load_scales`].
#[inline(always)]
pub(super) unsafe fn store_scales<B: Block>(addr: u64, piece: Piece, left: u64) {
    let Piece { a, b, c, d } = piece;
    // SAFETY: the caller's promise.
    unsafe { store_words::<B>(addr, word(a, b), word(c, d), left) };
}

/// # Safety
/// As for [`load_scales`].
#[cold]
#[inline(never)]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "compiled with the kernel that calls it"
)]
unsafe fn store_words<B: Block>(addr: u64, low: u64, high: u64, left: u64) {
    let words = u128::from(high) << 64 | u128::from(low);
    let mut k = 0;
    while k < PIECE {
        // SAFETY: the caller's promise; no byte beyond the last is written.
        unsafe { store_bytes(addr + k, (words >> (8 * k)) as u32, left.saturating_sub(k)) };
        k += 4;
    }
}

/// What a lane has of up to [`SEGMENT_PAIRS`] pairs of lines. Each by name, because an array of arrays would lie in local
/// memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) first: [Piece; 2],
    pub(super) second: [Piece; 2],
}

/// Which pieces a lane has of so many, two of each of its pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mine {
    lane: u32,
    pair: u32,
    /// Pieces in all.
    pieces: u32,
}

impl Mine {
    #[inline(always)]
    pub(super) fn of<B: Block>(block: &B, pieces: u32) -> Self {
        let lane = block.lane();
        Self {
            lane: lane % LANES,
            pair: lane / LANES,
            pieces,
        }
    }

    /// The indices of its pieces in a pair. The last lane's second has no piece: flags are in its place.
    #[inline(always)]
    const fn indices(&self, pair: u32) -> [u32; 2] {
        let first = pair * PAIR_PIECES + self.lane;
        let second = if self.lane == LANES - 1 {
            u32::MAX
        } else {
            first + LANES
        };
        [first, second]
    }

    #[inline(always)]
    const fn is_active(&self, pair: u32) -> (u32, bool) {
        (self.lane, pair * PAIR_PIECES < self.pieces)
    }

    #[inline(always)]
    const fn pairs(&self) -> [u32; 2] {
        [self.pair, self.pair + AT_ONCE]
    }

    /// Its pieces, by a function of their indices.
    #[inline(always)]
    pub(super) fn load(&self, piece: impl Fn(u32) -> Piece) -> Held {
        let load = |pair: u32| {
            let [a, b] = self.indices(pair);
            let at = |index: u32| match index < self.pieces {
                true => piece(index),
                false => Piece::default(),
            };
            [at(a), at(b)]
        };
        let [first, second] = self.pairs();
        Held {
            first: load(first),
            second: load(second),
        }
    }

    /// Hands its pieces and their indices to a function.
    #[inline(always)]
    pub(super) fn each(&self, held: Held, store: impl Fn(u32, Piece)) {
        let hand = |pair: u32, [x, y]: [Piece; 2]| {
            let [a, b] = self.indices(pair);
            if a < self.pieces {
                store(a, x);
            }
            if b < self.pieces {
                store(b, y);
            }
        };
        let [first, second] = self.pairs();
        hand(first, held.first);
        hand(second, held.second);
    }

    /// Warp: writes lines at `to`.
    ///
    /// # Safety
    /// As for [`lines::store`].
    #[inline(always)]
    pub(super) unsafe fn store<B: Block>(&self, block: &B, to: u64, held: Held, flag: u32) {
        let [first, second] = self.pairs();
        let at = |pair: u32| to + u64::from(pair) * PAIR;
        // SAFETY: the caller's promise.
        unsafe {
            lines::store(block, self.is_active(first), at(first), held.first, flag);
            // All of the warp agree.
            if AT_ONCE * PAIR_PIECES < self.pieces {
                lines::store(block, self.is_active(second), at(second), held.second, flag);
            }
        }
    }

    /// Warp: asks for lines at `from`.
    ///
    /// # Safety
    /// As for [`lines::fetch`].
    #[inline(always)]
    pub(super) unsafe fn fetch<B: Block>(&self, block: &B, from: u64) -> Held {
        let [first, second] = self.pairs();
        let at = |pair: u32| from + u64::from(pair) * PAIR;
        // SAFETY: the caller's promise.
        unsafe {
            Held {
                first: lines::fetch(block, self.is_active(first), at(first)),
                second: lines::fetch(block, self.is_active(second), at(second)),
            }
        }
    }

    /// Warp: waits until what was asked for has come from `source`.
    ///
    /// # Errors
    /// What ends the wait of any of its threads, on all.
    ///
    /// # Safety
    /// As for [`lines::fetch`].
    #[inline(always)]
    pub(super) unsafe fn arrival<B: Block>(
        &self,
        block: &B,
        (from, source): (u64, u32),
        held: &mut Held,
        flag: u32,
    ) -> Result<(), Stopped> {
        let [first, second] = self.pairs();
        let at = |pair: u32| from + u64::from(pair) * PAIR;
        let what = (flag, site(WaitKind::Message, source, Phase::Rows));
        // SAFETY: the caller's promise.
        unsafe {
            lines::arrival(
                block,
                self.is_active(first),
                at(first),
                &mut held.first,
                what,
            )?;
            // All of the warp agree.
            if AT_ONCE * PAIR_PIECES < self.pieces {
                lines::arrival(
                    block,
                    self.is_active(second),
                    at(second),
                    &mut held.second,
                    what,
                )?;
            }
        }
        Ok(())
    }
}

/// This thread's pieces of what lies at `from` as it is.
///
/// # Safety
/// It must be there, aligned to a piece.
#[inline(always)]
pub(super) unsafe fn plain(mine: Mine, from: u64) -> Held {
    mine.load(|piece| {
        // SAFETY: the caller's promise.
        unsafe { load16(from + u64::from(piece) * PIECE) }
    })
}

/// Warp: the meta of a row, from where a warp has made it to lines, or back. It has no more pairs than a warp reaches at a
/// time.
#[derive(Clone, Copy, Debug)]
pub(super) struct MetaLines {
    mine: Mine,
    /// Its bytes, in words, in memory that the warp shares.
    table: u64,
}

/// Bytes of the memory that a warp shares for a row's meta: whole pieces of the longest.
pub(super) const META_BYTES: usize = align(8 + 12 * crate::moe::MAX_TOP_K as u64, PIECE) as usize;

const _: () = assert!(META_BYTES as u64 <= AT_ONCE as u64 * PAIR_PIECES as u64 * PIECE);

impl MetaLines {
    #[inline(always)]
    pub(super) fn of<B: Block>(block: &B, table: u64, bytes: u64) -> Self {
        Self {
            mine: Mine::of(block, bytes.div_ceil(PIECE) as u32),
            table,
        }
    }

    /// Address of piece `index` in the table, if there is one.
    #[inline(always)]
    fn at(&self, index: u32) -> Option<u64> {
        (index < self.mine.pieces).then(|| self.table + u64::from(index) * PIECE)
    }

    /// # Safety
    /// As for [`lines::store`]; the table must have been written, and the warp have met since.
    #[inline(always)]
    pub(super) unsafe fn send<B: Block>(&self, block: &B, to: u64, flag: u32) {
        let memory = block.memory();
        let piece = |index: u32| {
            self.at(index).map_or_else(Piece::default, |at| {
                // SAFETY: the caller's promise; words, because that is what all machines read there.
                unsafe {
                    Piece {
                        a: memory.read(at),
                        b: memory.read(at + 4),
                        c: memory.read(at + 8),
                        d: memory.read(at + 12),
                    }
                }
            })
        };
        let pair = self.mine.pair;
        let pieces = self.mine.indices(pair).map(piece);
        let to = to + u64::from(pair) * PAIR;
        // SAFETY: the caller's promise.
        unsafe { lines::store(block, self.mine.is_active(pair), to, pieces, flag) };
    }

    /// Waits for it at `from`, from `source`, and puts it into the table, which the warp may read then.
    ///
    /// # Errors
    /// As for [`Mine::arrival`].
    ///
    /// # Safety
    /// As for [`lines::fetch`].
    #[inline(always)]
    pub(super) unsafe fn take<B: Block>(
        &self,
        block: &B,
        (from, source): (u64, u32),
        flag: u32,
    ) -> Result<(), Stopped> {
        let (memory, pair) = (block.memory(), self.mine.pair);
        let (this, at) = (self.mine.is_active(pair), from + u64::from(pair) * PAIR);
        let what = (flag, site(WaitKind::Message, source, Phase::Rows));
        // What was there before is not needed any more.
        block.warp_sync();
        // SAFETY: the caller's promise; there is room for whole pieces.
        unsafe {
            let mut pieces = lines::fetch(block, this, at);
            lines::arrival(block, this, at, &mut pieces, what)?;
            let [a, b] = self.mine.indices(pair);
            let keep = |index: u32, Piece { a, b, c, d }: Piece| {
                if let Some(at) = self.at(index) {
                    memory.write(at, a);
                    memory.write(at + 4, b);
                    memory.write(at + 8, c);
                    memory.write(at + 12, d);
                }
            };
            keep(a, pieces[0]);
            keep(b, pieces[1]);
        }
        block.warp_sync();
        Ok(())
    }
}
