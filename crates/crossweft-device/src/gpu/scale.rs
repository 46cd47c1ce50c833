//! Pre-multiplication by all threads of a grid ([`crate::scale`]): sixteen bytes at a time where the addresses
//! allow it.

use super::reduce::GpuElement;
use super::wide::{PIECE, load16, store16};

/// The part of `thread`, of `threads` in the whole grid, in multiplying the elements of `bytes` bytes at `src` by
/// `scalar`, to `dst`.
///
/// # Safety
/// The addresses must be valid for the bytes, and aligned to an element; `dst` may be `src`, or must not overlap
/// it. Nobody may write `src`, or access `dst`, meanwhile.
#[inline(always)]
pub unsafe fn scale<E: GpuElement>(
    (thread, threads): (u64, u64),
    dst: u64,
    src: u64,
    bytes: u64,
    scalar: E,
) {
    let factor = scalar.load();
    let aligned = (dst | src).is_multiple_of(PIECE);
    let whole = if aligned { bytes / PIECE * PIECE } else { 0 };
    // SAFETY: every access lies before `bytes` and is aligned.
    unsafe {
        let mut at = thread * PIECE;
        while at < whole {
            let lanes = E::unpack(load16(src + at));
            store16(dst + at, E::pack(E::map(lanes, |x| E::mul(x, factor))));
            at += threads * PIECE;
        }
        let size = size_of::<E>() as u64;
        let mut at = whole + thread * size;
        while at < bytes {
            let x = ((src + at) as *const E).read();
            ((dst + at) as *mut E).write(E::store(E::mul(x.load(), factor)));
            at += threads * size;
        }
    }
}
