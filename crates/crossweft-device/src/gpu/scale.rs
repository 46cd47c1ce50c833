//! Pre-multiplication by all threads of a grid ([`crate::scale`]): sixteen bytes at a time where the addresses
//! allow it, else an element, or bytes.

use super::fused::{load_part, store_part};
use super::packets::word;
use super::reduce::GpuElement;
use super::wide::{PIECE, Piece, load16, store16};

/// The part of `thread`, of `threads` in the whole grid, in multiplying the elements of `bytes` bytes at `src` by
/// `scalar`, to `dst`.
///
/// # Safety
/// The addresses must be valid for the bytes; `dst` may be `src`, or must not overlap it. Nobody may write `src`, or access
/// `dst`, meanwhile.
#[inline(always)]
pub unsafe fn scale<E: GpuElement>(
    (thread, threads): (u64, u64),
    dst: u64,
    src: u64,
    bytes: u64,
    scalar: E,
) {
    let factor = scalar.load();
    let multiply = |piece| E::pack(E::map(E::unpack(piece), |x| E::mul(x, factor)));
    let size = size_of::<E>() as u64;
    let aligned = (dst | src).is_multiple_of(PIECE);
    let whole = if aligned { bytes / PIECE * PIECE } else { 0 };
    // SAFETY: every access lies before `bytes` and is aligned.
    unsafe {
        let mut at = thread * PIECE;
        if !(dst | src).is_multiple_of(size) {
            while at < bytes {
                let left = if bytes - at < PIECE {
                    bytes - at
                } else {
                    PIECE
                };
                let Piece { a, b, c, d } = multiply(Piece::of(load_part::<E>(src + at, left)));
                store_part::<E>(dst + at, word(a, b), word(c, d), left);
                at += threads * PIECE;
            }
            return;
        }
        while at < whole {
            store16(dst + at, multiply(load16(src + at)));
            at += threads * PIECE;
        }
        let mut at = whole + thread * size;
        while at < bytes {
            let x = ((src + at) as *const E).read();
            ((dst + at) as *mut E).write(E::store(E::mul(x.load(), factor)));
            at += threads * size;
        }
    }
}
