//! Lines: packets of 128 bytes, of which 120 are payload, that a warp writes and reads whole.
//!
//! Fifteen sixteenths of what crosses a link is data, where packets of 8 bytes carry half. Links and memory keep the
//! 128 aligned bytes of one instruction of a warp together, which NVIDIA promises for nothing, but NCCL's protocol
//! LL128 rests on, for NVLink from compute capability 7.0 on; whoever uses lines makes sure of the machines
//! (`crossweft_channel::Endpoint::keeps_lines`).
//!
//! Lines come in pairs, written and read by eight lanes side by side: 256 bytes for 15 pieces of 16. Lane `l` has
//! piece `l` in the first and piece `8 + l` in the second line; the last one has the halves of piece 7, and a
//! line's flag behind each. Flags always lie in these places, so no data is ever taken for one, whatever sizes
//! calls have.

use super::packets::word;
use super::wide::Piece;
use crate::block::Block;
use crate::memory::Memory;

/// Bytes of a line.
pub const LINE: u64 = 128;
/// Bytes of two.
pub const PAIR: u64 = 2 * LINE;
/// Of which are payload.
pub const PAIR_PAYLOAD: u64 = PAIR - 16;
/// Threads that write and read a pair of lines.
pub const LANES: u32 = 8;

/// The lane that has the flags.
const LAST: u32 = LANES - 1;
/// Bytes of a piece.
const STEP: u64 = 16;

/// Two pieces of a lane, those in the first and in the second line.
pub(super) type Pieces = [Piece; 2];

/// Warp: writes a pair of lines at `to`, if this lane's is `active`.
///
/// # Safety
/// `to` must be valid for a pair of lines and aligned to one; lanes of a pair agree on everything.
#[inline(always)]
pub(super) unsafe fn store<B: Block>(
    block: &B,
    (lane, active): (u32, bool),
    to: u64,
    [a, b]: Pieces,
    flag: u32,
) {
    let (at, memory) = (to + u64::from(lane) * STEP, block.memory());
    let flags = word(flag, !flag);
    // One store by all lanes of a line: the values are chosen, not the instruction.
    let (first, second) = if lane == LAST {
        ([word(a.a, a.b), flags], [word(a.c, a.d), flags])
    } else {
        (words(a), words(b))
    };
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "nvptx64")]
        if active {
            memory.store_pair(at, first);
            memory.store_pair(at + LINE, second);
        }
        // Threads of the host do not write together: the flags follow when all have written.
        #[cfg(not(target_arch = "nvptx64"))]
        {
            if active && lane != LAST {
                memory.store_pair(at, first);
                memory.store_pair(at + LINE, second);
            }
            block.warp_any(false);
            if active && lane == LAST {
                memory.store(at, first[0]);
                memory.store_release(at + 8, flags);
                memory.store(at + LINE, second[0]);
                memory.store_release(at + LINE + 8, flags);
            }
        }
    }
}

/// Starts to read this lane's part of a pair of lines at `from`.
///
/// # Safety
/// As for [`store`], if the lane is active.
#[inline(always)]
pub(super) unsafe fn fetch<B: Block>(block: &B, (lane, active): (u32, bool), from: u64) -> Pieces {
    if !active {
        return [Piece::default(); 2];
    }
    let (at, memory) = (from + u64::from(lane) * STEP, block.memory());
    // SAFETY: the caller's promise.
    unsafe {
        let (first, second) = (memory.load_pair(at), memory.load_pair(at + LINE));
        [piece(first), piece(second)]
    }
}

/// Warp: whether what lanes [fetched](fetch) from `from` has not arrived yet: of this lane, and of any. If it
/// has, it is put in order.
///
/// # Safety
/// As for [`fetch`].
#[inline(always)]
pub(super) unsafe fn late<B: Block>(
    block: &B,
    (lane, active): (u32, bool),
    from: u64,
    fetched: &mut Pieces,
    flag: u32,
) -> (bool, bool) {
    // Threads of the host do not read together: data follows the flags, which the last lane looks at.
    #[cfg(not(target_arch = "nvptx64"))]
    if active && lane == LAST {
        let at = from + u64::from(lane) * STEP + 8;
        // SAFETY: the caller's promise.
        unsafe {
            let (first, second) = (
                block.memory().load_acquire(at),
                block.memory().load_acquire(at + LINE),
            );
            *fetched = [piece([0, first]), piece([0, second])];
        }
    }
    let has_flag = |piece: &Piece| piece.c == flag && piece.d == !flag;
    let mine = active && lane == LAST && !(has_flag(&fetched[0]) && has_flag(&fetched[1]));
    let any = block.warp_any(mine);
    if any {
        return (mine, true);
    }
    #[cfg(not(target_arch = "nvptx64"))]
    // SAFETY: the caller's promise.
    unsafe {
        *fetched = fetch(block, (lane, active), from);
    }
    let _ = from;
    if lane == LAST {
        let [first, second] = *fetched;
        fetched[0] = Piece {
            a: first.a,
            b: first.b,
            c: second.a,
            d: second.b,
        };
    }
    (false, false)
}

#[inline(always)]
const fn words(piece: Piece) -> [u64; 2] {
    [word(piece.a, piece.b), word(piece.c, piece.d)]
}

#[inline(always)]
#[allow(
    clippy::cast_possible_truncation,
    reason = "words are taken apart into their halves"
)]
const fn piece([low, high]: [u64; 2]) -> Piece {
    Piece {
        a: low as u32,
        b: (low >> 32) as u32,
        c: high as u32,
        d: (high >> 32) as u32,
    }
}
