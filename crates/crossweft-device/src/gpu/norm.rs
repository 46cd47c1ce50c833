//! RMS normalisation of tokens by the threads of a block ([`crate::norm`]), eight elements of a thread at a time.
//!
//! A thread has a column, so there are no more threads than [`COLUMNS`]; with fewer, which are enough for short tokens,
//! the columns that are missing are zero. The same bits as the host's.

#![allow(
    clippy::cast_possible_truncation,
    reason = "words are taken apart into halves and bytes"
)]

use core::hint::cold_path;

use super::Quantisation;
use super::fused::{load_part, store_part};
use super::packets::word;
use super::reduce::GpuElement;
use super::wide::{PIECE, Piece, load16, prefetch, store1, store8, store16};
use crate::block::Block;
use crate::element::{Bf16, Element, F8E4M3, F16};
use crate::gpu::Norm;
use crate::memory::Memory;
use crate::norm::{COLUMNS, GROUP, LANES, factor, group_scale, token_scale};
use crate::wait::Stopped;

#[cfg(target_arch = "nvptx64")]
use super::nvptx::sqrt;

/// Threads of a block, at most: whole warps.
pub const MOST_THREADS: u32 = COLUMNS as u32;

/// Bytes that [`token`] shares between the threads of a block, as many again for the next token.
pub const SLOT_BYTES: usize = MOST_THREADS as usize / 32 * (LANES + 1) * 4;

/// The number of threads for tokens of `hidden` elements.
#[must_use]
pub const fn threads_of(hidden: u32) -> u32 {
    let needed = hidden.div_ceil(LANES as u32).next_multiple_of(32);
    if needed < MOST_THREADS {
        needed
    } else {
        MOST_THREADS
    }
}

/// Eight accumulators.
pub type Eight = (f32, f32, f32, f32, f32, f32, f32, f32);

/// Elements that tokens may have, eight at a time.
pub trait NormElement: Element<Acc = f32> {
    /// Eight of them.
    type Packed: Copy + Default;
    /// Bytes of that.
    const BYTES: u64 = (LANES * size_of::<Self>()) as u64;

    /// To accumulators.
    fn unpack(packed: Self::Packed) -> Eight;
    /// From accumulators, rounded.
    fn pack(eight: Eight) -> Self::Packed;
    /// Reads them in pieces: from which address each.
    fn read(addr: u64, piece: impl Fn(u64) -> Piece) -> Self::Packed;
    /// Writes them in pieces.
    fn write(addr: u64, packed: Self::Packed, piece: impl Fn(u64, Piece));
}

macro_rules! halves {
    ($($t:ty;)*) => { $(
        impl NormElement for $t {
            type Packed = Piece;

            #[inline(always)]
            fn unpack(packed: Piece) -> Eight {
                <$t as GpuElement>::unpack(packed)
            }

            #[inline(always)]
            fn pack(eight: Eight) -> Piece {
                <$t as GpuElement>::pack(eight)
            }

            #[inline(always)]
            fn read(addr: u64, piece: impl Fn(u64) -> Piece) -> Piece {
                piece(addr)
            }

            #[inline(always)]
            fn write(addr: u64, packed: Piece, piece: impl Fn(u64, Piece)) {
                piece(addr, packed);
            }
        }
    )* };
}

halves! { Bf16; F16; }

impl NormElement for f32 {
    type Packed = (Piece, Piece);

    #[inline(always)]
    fn unpack((low, high): (Piece, Piece)) -> Eight {
        let (a, b, c, d) = <f32 as GpuElement>::unpack(low);
        let (e, f, g, h) = <f32 as GpuElement>::unpack(high);
        (a, b, c, d, e, f, g, h)
    }

    #[inline(always)]
    fn pack((a, b, c, d, e, f, g, h): Eight) -> (Piece, Piece) {
        let pack = <f32 as GpuElement>::pack;
        (pack((a, b, c, d)), pack((e, f, g, h)))
    }

    #[inline(always)]
    fn read(addr: u64, piece: impl Fn(u64) -> Piece) -> (Piece, Piece) {
        (piece(addr), piece(addr + PIECE))
    }

    #[inline(always)]
    fn write(addr: u64, (low, high): (Piece, Piece), piece: impl Fn(u64, Piece)) {
        piece(addr, low);
        piece(addr + PIECE, high);
    }
}

#[inline(always)]
fn zip(a: Eight, b: Eight, f: impl Fn(f32, f32) -> f32) -> Eight {
    (
        f(a.0, b.0),
        f(a.1, b.1),
        f(a.2, b.2),
        f(a.3, b.3),
        f(a.4, b.4),
        f(a.5, b.5),
        f(a.6, b.6),
        f(a.7, b.7),
    )
}

/// # Safety
/// The address must be valid for eight elements and aligned to one, or, if `aligned`, to a [`Piece`].
#[inline(always)]
unsafe fn load<B: Block, E: NormElement>(addr: u64, aligned: bool) -> E::Packed {
    // SAFETY: the caller's promise.
    E::read(addr, |at| unsafe {
        if aligned {
            return load16(at);
        }
        cold_path();
        Piece::of(load_part::<B>(at, PIECE))
    })
}

/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn store<B: Block, E: NormElement>(addr: u64, packed: E::Packed, aligned: bool) {
    // SAFETY: the caller's promise.
    E::write(addr, packed, |at, piece| unsafe {
        if aligned {
            return store16(at, piece);
        }
        cold_path();
        let Piece { a, b, c, d } = piece;
        store_part::<B>(at, word(a, b), word(c, d), PIECE);
    });
}

/// Block: a token.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Its number.
    pub token: u32,
    /// [`SLOT_BYTES`] bytes that the block's threads share, aligned to 4: other ones than the token before had.
    pub slots: u64,
    /// Room for a token, aligned to a [`Piece`], that the block's threads can use as they please: memory that they
    /// share; 0 to use the output.
    pub stage: u64,
}

/// Block: adds the residual to a token, normalises and quantises it; with `ALIGNED`, buffers are. `reduced` brings the eight elements at an
/// offset in the token, in bytes, each of which one thread asks for, once.
///
/// # Errors
/// What `reduced` brings to any thread, on all.
///
/// # Safety
/// The launch must be as its fields say; the block has [`threads_of`] threads, all of which call it.
#[inline(always)]
pub unsafe fn token<B: Block, E: NormElement, const ALIGNED: bool>(
    block: &B,
    norm: &Norm,
    at: At,
    reduced: impl Fn(u64) -> Result<E::Packed, Stopped>,
) -> Result<(), Stopped> {
    let Norm {
        output,
        residual,
        weight,
        values,
        scales,
        hidden,
        epsilon,
        scale,
        quantisation,
        ..
    } = *norm;
    let At {
        token,
        slots,
        stage,
    } = at;
    let aligned = ALIGNED || norm.aligned != 0;
    let size = size_of::<E>() as u64;
    let bytes = u64::from(hidden) * size;
    let row = u64::from(token) * bytes;
    let thread = block.thread();
    let (first, stride) = (
        u64::from(thread) * E::BYTES,
        u64::from(block.threads()) * E::BYTES,
    );
    // SAFETY: the caller's promise: every eight lie in the token.
    unsafe {
        let keep = |at: u64, x: E::Packed| match stage {
            0 => store::<B, E>(output + row + at, x, aligned),
            stage => E::write(stage + at, x, |at, piece| write_near(at, piece)),
        };
        let kept = |at: u64| match stage {
            0 => load::<B, E>(output + row + at, aligned),
            stage => E::read(stage + at, |at| read_near(at)),
        };
        let mut sums: Eight = Default::default();
        let mut mine = Ok(());
        let mut at = first;
        while at < bytes {
            let mut x = match reduced(at) {
                Ok(x) => x,
                Err(stopped) => {
                    mine = Err(stopped);
                    break;
                }
            };
            if residual != 0 {
                let before = load::<B, E>(residual + row + at, aligned);
                x = E::pack(zip(E::unpack(x), E::unpack(before), |x, r| x + r));
                store::<B, E>(residual + row + at, x, aligned);
            }
            keep(at, x);
            sums = zip(sums, E::unpack(x), |sum, x| sum + x * x);
            at += stride;
        }
        let squares = sum::<B>(block, sums, slots, mine)?;
        let factor = factor(squares, hidden, epsilon, sqrt);
        let mut largest = 0;
        let mut at = first;
        while at < bytes {
            let (x, w) = (kept(at), load::<B, E>(weight + at, aligned));
            let y = E::pack(zip(E::unpack(x), E::unpack(w), |x, w| x * factor * w));
            store::<B, E>(output + row + at, y, aligned);
            if quantisation != Quantisation::None && stage != 0 {
                keep(at, y);
            }
            if quantisation == Quantisation::PerToken {
                let here = magnitude(E::unpack(y));
                largest = if here > largest { here } else { largest };
            }
            at += stride;
        }
        if quantisation == Quantisation::None {
            return Ok(());
        }
        let mut scale = scale;
        if quantisation == Quantisation::PerToken {
            scale = token_scale(f32::from_bits(most::<B>(block, largest, slots)?));
            if thread == 0 {
                let to = scales + 4 * u64::from(token);
                block.memory().write(to, scale);
            }
        }
        let of_group = GROUP as u32 / LANES as u32;
        // Threads of a warp go through their rounds together.
        let mut ahead = 0;
        while ahead < bytes {
            let at = ahead + first;
            let mut y = E::Packed::default();
            if at < bytes {
                y = kept(at);
            }
            if quantisation == Quantisation::PerGroup {
                let largest = widest::<B>(block, magnitude(E::unpack(y)), of_group);
                scale = group_scale(f32::from_bits(largest));
                if at < bytes && thread.is_multiple_of(of_group) {
                    let groups = u64::from(hidden.div_ceil(GROUP as u32));
                    let group = at / (GROUP as u64 * size);
                    let number = u64::from(token) * groups + group;
                    block.memory().write(scales + 4 * number, scale);
                }
            }
            if at < bytes {
                let to = values + (row + at) / size;
                store_f8(E::unpack(y), to, scale, aligned);
            }
            ahead += stride;
        }
    }
    Ok(())
}

/// Eight elements of a token that lies in the output, `at` bytes from its beginning.
///
/// # Safety
/// As for [`token`].
#[inline(always)]
pub unsafe fn reduced<B: Block, E: NormElement>(
    _block: &B,
    norm: &Norm,
    token: u32,
    at: u64,
) -> E::Packed {
    let row = u64::from(token) * u64::from(norm.hidden) * size_of::<E>() as u64;
    // SAFETY: the caller's promise.
    unsafe { load::<B, E>(norm.output + row + at, norm.aligned != 0) }
}

/// Block: has what a token is added to and weighed with brought near, while its sum is on its way.
///
/// # Safety
/// As for [`token`].
#[inline(always)]
pub unsafe fn fetch<B: Block, E: NormElement>(block: &B, norm: &Norm, token: u32) {
    let bytes = u64::from(norm.hidden) * size_of::<E>() as u64;
    let mut at = u64::from(block.thread()) * E::BYTES;
    while at < bytes {
        prefetch(norm.weight + at);
        if norm.residual != 0 {
            prefetch(norm.residual + u64::from(token) * bytes + at);
        }
        at += u64::from(block.threads()) * E::BYTES;
    }
}

/// The bits of the largest of eight magnitudes, which are in the order of the magnitudes; NaNs do not count.
#[inline(always)]
fn magnitude(eight: Eight) -> u32 {
    let larger = |most: f32, x: f32| {
        let x = x.abs();
        if x > most { x } else { most }
    };
    let (a, b, c, d, e, f, g, h) = eight;
    let (a, e) = (larger(larger(0.0, a), b), larger(larger(0.0, e), f));
    let (a, e) = (larger(larger(a, c), d), larger(larger(e, g), h));
    larger(a, e).to_bits()
}

/// # Safety
/// `to` must be valid for eight bytes, and aligned to them if `aligned`.
#[inline(always)]
unsafe fn store_f8((a, b, c, d, e, f, g, h): Eight, to: u64, scale: f32, aligned: bool) {
    let of = |x: f32| u32::from(F8E4M3::store(x / scale).0);
    let four = |a, b, c, d| of(a) | of(b) << 8 | of(c) << 16 | of(d) << 24;
    let all = word(four(a, b, c, d), four(e, f, g, h));
    // SAFETY: the caller's promise.
    unsafe {
        if aligned {
            store8(to, all);
            return;
        }
        cold_path();
        let mut k = 0;
        while k < 8 {
            store1(to + k, (all >> (8 * k)) as u8);
            k += 1;
        }
    }
}

/// Memory that threads of a block share has addresses of another kind than [`load16`] takes.
///
/// # Safety
/// The address must be valid for a piece and aligned to it.
#[inline(always)]
unsafe fn read_near(addr: u64) -> Piece {
    // SAFETY: the caller's promise.
    Piece::of(unsafe { (addr as *const u128).read() })
}

/// # Safety
/// As for [`read_near`].
#[inline(always)]
unsafe fn write_near(addr: u64, Piece { a, b, c, d }: Piece) {
    let all = u128::from(word(a, b)) | u128::from(word(c, d)) << 64;
    // SAFETY: the caller's promise.
    unsafe { (addr as *mut u128).write(all) };
}

/// Block: the sum of the squares of a token, of which each thread has its column's.
///
/// # Errors
/// What any thread brings.
///
/// # Safety
/// As for [`token`].
#[inline(always)]
unsafe fn sum<B: Block>(
    block: &B,
    (a, b, c, d, e, f, g, h): Eight,
    slots: u64,
    mine: Result<(), Stopped>,
) -> Result<f32, Stopped> {
    let thread = block.thread();
    let of_warp = in_warp::<B>(block, a, b, c, d, e, f, g, h);
    let place = |warp: u32, lane: u32| slots + 4 * u64::from(warp * LANES as u32 + lane);
    let memory = block.memory();
    // SAFETY: the slots have room for each warp's lanes.
    unsafe {
        if thread % 32 < LANES as u32 {
            memory.write(place(thread / 32, thread % 8), of_warp);
        }
        block.sync(mine)?;
        let (lane, four) = (thread % 8, thread % 32 / 8 * 4);
        let of = |warp: u32| match warp < block.threads() / 32 {
            true => memory.read::<f32>(place(warp, lane)),
            false => 0.0,
        };
        let (low, high) = (of(four) + of(four + 1), of(four + 2) + of(four + 3));
        Ok(across_warps::<B>(block, low + high))
    }
}

/// Warp: the sum of one lane of its threads' columns: the lane's number is the last three binary digits of the thread's,
/// read backwards.
///
/// A function of its own, and of numbers alone, as are the others that exchange: see
/// `barrier_max` for the reason.
#[inline(never)]
#[allow(
    clippy::too_many_arguments,
    clippy::many_single_char_names,
    reason = "a tuple would lie in memory of the thread's own"
)]
fn in_warp<B: Block>(
    block: &B,
    a: f32,
    b: f32,
    c: f32,
    d: f32,
    e: f32,
    f: f32,
    g: f32,
    h: f32,
) -> f32 {
    let thread = block.thread();
    // Of two lanes, one goes on here and the other at the neighbour.
    let halve = |first: f32, second: f32, mask: u32| {
        let here = thread & mask == 0;
        let (keep, give) = if here {
            (first, second)
        } else {
            (second, first)
        };
        keep + neighbour(block, give, mask)
    };
    let (a, b) = (halve(a, e, 1), halve(b, f, 1));
    let (c, d) = (halve(c, g, 1), halve(d, h, 1));
    let (a, b) = (halve(a, c, 2), halve(b, d, 2));
    let mut sum = halve(a, b, 4);
    sum += neighbour(block, sum, 8);
    sum + neighbour(block, sum, 16)
}

/// Warp: the sum of everything: of four warps and one lane each thread has the sum.
#[inline(never)]
fn across_warps<B: Block>(block: &B, of_four: f32) -> f32 {
    const { assert!(MOST_THREADS == 4 * 4 * 32) };
    let mut sum = of_four;
    sum += neighbour(block, sum, 8);
    sum += neighbour(block, sum, 16);
    // Neighbouring lanes are four threads apart, see [`in_warp`].
    sum += neighbour(block, sum, 4);
    sum += neighbour(block, sum, 2);
    sum + neighbour(block, sum, 1)
}

#[inline(always)]
fn neighbour<B: Block>(block: &B, x: f32, mask: u32) -> f32 {
    f32::from_bits(block.warp_exchange(x.to_bits(), mask))
}

/// Warp: the largest number of so many neighbours, a power of two.
#[inline(never)]
fn widest<B: Block>(block: &B, mine: u32, neighbours: u32) -> u32 {
    let (mut most, mut mask) = (mine, 1);
    while mask < neighbours {
        let other = block.warp_exchange(most, mask);
        most = if other > most { other } else { most };
        mask *= 2;
    }
    most
}

/// Block: the largest number of all threads.
///
/// # Safety
/// As for [`token`], behind [`sum`].
#[inline(always)]
unsafe fn most<B: Block>(block: &B, mine: u32, slots: u64) -> Result<u32, Stopped> {
    let thread = block.thread();
    let warps = block.threads() / 32;
    let of_warp = widest::<B>(block, mine, 32);
    let memory = block.memory();
    let place = |warp: u32| slots + 4 * u64::from(MOST_THREADS / 32 * LANES as u32 + warp);
    // SAFETY: the slots have room for a number of each warp behind the lanes.
    unsafe {
        if thread.is_multiple_of(32) {
            memory.write(place(thread / 32), of_warp);
        }
        block.sync(Ok(()))?;
        let warp = thread % (MOST_THREADS / 32);
        let of_warp = match warp < warps {
            true => memory.read::<u32>(place(warp)),
            false => 0,
        };
        Ok(widest::<B>(block, of_warp, MOST_THREADS / 32))
    }
}

/// The square root, rounded to nearest, where there is no instruction that is known to round so.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn sqrt(x: f32) -> f32 {
    if x == 0.0 || x == f32::INFINITY {
        return x;
    }
    if x.is_nan() || x < 0.0 {
        return f32::NAN;
    }
    // A normal number of an even exponent.
    let (x, halved) = if x < f32::MIN_POSITIVE {
        (x * 16_777_216.0, 1.0 / 4096.0)
    } else {
        (x, 1.0)
    };
    let exponent = (x.to_bits() >> 23) as i32 - 150;
    let mantissa = u64::from(x.to_bits() & 0x7f_ffff | 0x80_0000);
    let odd = exponent & 1;
    let square = mantissa << (26 + odd);
    let root = square.isqrt();
    // One more bit says whether there is more: what is rounded away.
    let exact = root << 1 | u64::from(root * root != square);
    #[allow(clippy::cast_precision_loss, reason = "this is where it is rounded")]
    let rounded = exact as f32;
    rounded * f32::from_bits(((127 + (exponent - odd) / 2 - 14) as u32) << 23) * halved
}

#[cfg(test)]
mod tests {
    use super::*;
    extern crate std;

    #[test]
    fn square_roots_are_rounded_as_by_the_machine() {
        let mut bits = 1_u32;
        while bits < 0x7f80_0000 {
            let x = f32::from_bits(bits);
            let machine: f32 = std::primitive::f32::sqrt(x);
            assert_eq!(sqrt(x).to_bits(), machine.to_bits(), "{x:e}");
            bits += 4099;
        }
        for x in [
            0.0,
            1.0,
            4.0,
            2.0,
            f32::MAX,
            f32::MIN_POSITIVE,
            f32::INFINITY,
        ] {
            assert_eq!(sqrt(x).to_bits(), std::primitive::f32::sqrt(x).to_bits());
        }
        assert!(sqrt(f32::NAN).is_nan() && sqrt(-1.0).is_nan());
    }
}
