//! Copying by all threads of a block.

use core::hint::cold_path;

use super::wide::{
    PIECE, load1, load2, load4, load8, load16, store1, store2, store4, store8, store16,
};
use crate::block::Block;

/// Block: copies `bytes` bytes from `src` to `dst`, 16 bytes at a time where the two addresses
/// allow it, else by the widest access that both can take, four in flight.
///
/// # Safety
/// As for [`Memory::copy`](crate::memory::Memory::copy).
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub unsafe fn copy<B: Block>(block: &B, dst: u64, src: u64, bytes: u64) {
    // SAFETY: the caller's promise.
    unsafe { copy_part(block.thread(), block.threads(), dst, src, bytes) }
}

/// The part of a copy that is `thread`'s of `threads` threads. Generic, so that it is compiled with the kernel that calls it.
///
/// # Safety
/// As for [`copy`], all threads together.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub unsafe fn copy_by<T: Copy + Into<u64>>(thread: T, threads: T, dst: u64, src: u64, bytes: u64) {
    // SAFETY: the caller's promise.
    unsafe { copy_part(thread, threads, dst, src, bytes) }
}

/// The part of a copy that is `thread`'s.
///
/// # Safety
/// As for [`copy`], all threads together.
#[inline(always)]
pub(crate) unsafe fn copy_part<T: Copy + Into<u64>>(
    thread: T,
    threads: T,
    dst: u64,
    src: u64,
    bytes: u64,
) {
    // SAFETY: the caller's promise; whole pieces are aligned.
    unsafe {
        if (dst | src | bytes).is_multiple_of(PIECE) {
            if dst != src {
                body16(thread.into(), threads.into(), dst, src, bytes / PIECE);
            }
            return;
        }
        cold_path();
        copy_odd(thread, threads, dst, src, bytes);
    }
}

/// A copy whose ends are not aligned to a piece. Out of the way of those that are: fetching instructions is most of
/// what a small copy costs. Generic, so that it is compiled with the kernel that calls it.
///
/// # Safety
/// As for [`copy_part`].
#[cold]
#[cfg_attr(target_arch = "nvptx64", inline(never))]
unsafe fn copy_odd<T: Copy + Into<u64>>(thread: T, threads: T, dst: u64, src: u64, bytes: u64) {
    if dst == src {
        return;
    }
    let apart = dst ^ src;
    // Whole accesses begin where `dst` is aligned; `src` is then as well.
    let log_width = (apart | PIECE).trailing_zeros();
    let width = 1 << log_width;
    let head = min(dst.wrapping_neg() & (width - 1), bytes);
    let count = (bytes - head) >> log_width;
    let tail = head + count * width;
    let (thread, threads): (u64, u64) = (thread.into(), threads.into());
    // SAFETY: the three parts cover the caller's ranges once; whole accesses are aligned.
    unsafe {
        let (to, from) = (dst + head, src + head);
        match width {
            16 => body16(thread, threads, to, from, count),
            8 => body8(thread, threads, to, from, count),
            4 => body4(thread, threads, to, from, count),
            2 => body2(thread, threads, to, from, count),
            _ => body1(thread, threads, to, from, count),
        }
        // Less than an access at either end.
        let mut i = thread;
        while i < head + (bytes - tail) {
            let at = if i < head { i } else { tail + i - head };
            store1(dst + at, load1(src + at));
            i += threads;
        }
    }
}

macro_rules! bodies {
    ($($name:ident, $load:ident, $store:ident, $width:literal;)*) => { $(
        /// # Safety
        /// Both addresses must be aligned to the width and valid for `count` of it.
        #[inline(always)]
        unsafe fn $name(thread: u64, threads: u64, dst: u64, src: u64, count: u64) {
            let stride = threads * $width;
            let end = dst + count * $width;
            let mut to = dst + thread * $width;
            let mut from = src + thread * $width;
            // SAFETY: every access lies before `end`.
            unsafe {
                while to + 3 * stride < end {
                    let a = $load(from);
                    let b = $load(from + stride);
                    let c = $load(from + 2 * stride);
                    let d = $load(from + 3 * stride);
                    $store(to, a);
                    $store(to + stride, b);
                    $store(to + 2 * stride, c);
                    $store(to + 3 * stride, d);
                    to += 4 * stride;
                    from += 4 * stride;
                }
                while to < end {
                    $store(to, $load(from));
                    to += stride;
                    from += stride;
                }
            }
        }
    )* };
}

bodies! {
    body16, load16, store16, 16;
    body8, load8, store8, 8;
    body4, load4, store4, 4;
    body2, load2, store2, 2;
    body1, load1, store1, 1;
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
