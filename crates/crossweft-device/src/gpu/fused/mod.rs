//! Plans in one piece: what the executor does with a plan of a known form, with nothing to look up and little
//! code, which is most of what a small message costs.
//!
//! Places, packets, signals, the epoch and the order of reductions are the plan's, so ranks that run these
//! and ranks that run the executor can meet.

#![allow(
    clippy::cast_possible_truncation,
    reason = "words are taken apart into bytes"
)]

pub mod one_shot;
pub mod two_shot;

use super::packets::word;
use crate::executor::STOPPED_EPOCH;
use crate::wait::Stopped;

use super::wide::{PIECE, Piece, load1, load16, store1, store16};

/// The tables of a launch, wherever they are: in a kernel's parameter they cannot be indexed as arrays.
pub trait Tables {
    /// Where the part for target `k` goes.
    fn target(&self, k: u32) -> u64;
    /// Where the part of source `k` is.
    fn source(&self, k: u32) -> u64;
    /// The rank that source `k` is.
    fn peer(&self, k: u32) -> u32;
}

/// Whether a launch that found this epoch is to do anything.
#[inline(always)]
fn begins(epoch: u64) -> Result<(), Stopped> {
    match epoch {
        STOPPED_EPOCH => Err(Stopped::Aborted),
        _ => Ok(()),
    }
}

/// The first `left` bytes of a piece, or all of it; the rest is zero.
///
/// # Safety
/// The address must be aligned to a piece and valid for them.
#[inline(always)]
unsafe fn load(addr: u64, left: u64) -> Piece {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= PIECE {
            return load16(addr);
        }
        let (mut low, mut high, mut k) = (0_u64, 0_u64, left);
        while k > 0 {
            k -= 1;
            high = high << 8 | low >> 56;
            low = low << 8 | u64::from(load1(addr + k));
        }
        Piece {
            a: low as u32,
            b: (low >> 32) as u32,
            c: high as u32,
            d: (high >> 32) as u32,
        }
    }
}

/// The other way round.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn store(addr: u64, piece: Piece, left: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= PIECE {
            store16(addr, piece);
            return;
        }
        let Piece { a, b, c, d } = piece;
        let (mut low, mut high, mut k) = (word(a, b), word(c, d), 0);
        while k < left {
            store1(addr + k, low as u8);
            low = low >> 8 | high << 56;
            high >>= 8;
            k += 1;
        }
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
