//! Reductions by all threads of a block: sixteen bytes of every source at a time.
//!
//! The same bits as the host's: accumulators, order, rounding and NaNs are [`Element`]'s.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_lossless,
    reason = "elements are taken out of, and put into, 32-bit registers"
)]

use core::hint::cold_path;
use core::marker::PhantomData;

use super::packets::{flag_in, load_bytes, load_pair, store_bytes, store_pair, word};
use super::wide::{
    PIECE, Piece, load2, load4, load8, load16, opaque, store2, store4, store8, store16,
};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::element::{Bf16, Element, F8E4M3, F8E5M2, F16};
use crate::memory::Memory;
use crate::packet::{PAYLOAD, WORD};
use crate::reduce::{Location, Reducer, Sources};
use crate::wait::Stopped;

/// Operands (sources and destinations together) that a reduction may have on a GPU: they are looked
/// up once, into memory that the block's threads share.
pub const MAX_OPERANDS: u32 = 128;

/// Bytes of shared memory that a [`GpuReducer`] needs.
pub const TABLE_BYTES: usize = MAX_OPERANDS as usize * size_of::<Location>();

/// How two elements become one. Either known when the kernel is compiled, or a [`ReduceOp`] that
/// all threads read from the launch: a branch for sixteen bytes, which memory hides.
pub trait Combine: Copy {
    /// Lane by lane.
    fn combine<E: GpuElement>(self, a: E::Lanes, b: E::Lanes) -> E::Lanes;
}

impl Combine for ReduceOp {
    #[inline(always)]
    fn combine<E: GpuElement>(self, a: E::Lanes, b: E::Lanes) -> E::Lanes {
        match self {
            Self::Sum | Self::Avg => E::zip(a, b, E::add),
            Self::Prod => E::zip(a, b, E::mul),
            Self::Min => E::zip(a, b, E::min),
            Self::Max => E::zip(a, b, E::max),
        }
    }
}

macro_rules! fixed {
    ($($name:ident, $f:ident;)*) => { $(
        #[doc = concat!("[`ReduceOp::", stringify!($name), "`], known when the kernel is compiled.")]
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name;

        impl Combine for $name {
            #[inline(always)]
            fn combine<E: GpuElement>(self, a: E::Lanes, b: E::Lanes) -> E::Lanes {
                E::zip(a, b, E::$f)
            }
        }
    )* };
}

fixed! { Sum, add; Prod, mul; Min, min; Max, max; }

/// An element, as sixteen bytes hold several. Everything is spelled out, lane by lane: a loop over
/// an array would put it into local memory.
pub trait GpuElement: Element {
    /// The accumulators of sixteen bytes.
    type Lanes: Copy;

    /// To accumulators.
    fn unpack(piece: Piece) -> Self::Lanes;
    /// From accumulators, rounded.
    fn pack(lanes: Self::Lanes) -> Piece;
    /// Lane by lane.
    fn zip(
        a: Self::Lanes,
        b: Self::Lanes,
        f: impl Fn(Self::Acc, Self::Acc) -> Self::Acc,
    ) -> Self::Lanes;
    /// Lane by lane.
    fn map(a: Self::Lanes, f: impl Fn(Self::Acc) -> Self::Acc) -> Self::Lanes;
    /// One lane after the other.
    fn fold<T>(a: Self::Lanes, start: T, f: impl Fn(T, Self::Acc) -> T) -> T;
}

macro_rules! elements {
    ($($t:ty, $from:expr, $to:expr, $kind:ident;)*) => { $( $kind!($t, $from, $to); )* };
}

macro_rules! lanes {
    ($t:ty, $($lane:tt)*) => {
        #[inline(always)]
        fn zip(
            a: Self::Lanes,
            b: Self::Lanes,
            f: impl Fn(Self::Acc, Self::Acc) -> Self::Acc,
        ) -> Self::Lanes {
            ($(f(a.$lane, b.$lane),)*)
        }

        #[inline(always)]
        fn map(a: Self::Lanes, f: impl Fn(Self::Acc) -> Self::Acc) -> Self::Lanes {
            ($(f(a.$lane),)*)
        }

        #[inline(always)]
        fn fold<T>(a: Self::Lanes, start: T, f: impl Fn(T, Self::Acc) -> T) -> T {
            let all = start;
            $(let all = f(all, a.$lane);)*
            all
        }
    };
}

type Of<E> = <E as Element>::Acc;

macro_rules! bytes8 {
    ($t:ty, $from:expr, $to:expr) => {
        impl GpuElement for $t {
            type Lanes = (Of<$t>, Of<$t>);

            #[inline(always)]
            fn unpack(p: Piece) -> Self::Lanes {
                let of = |low: u32, high: u32| <$t>::load($from(low as u64 | (high as u64) << 32));
                (of(p.a, p.b), of(p.c, p.d))
            }

            #[inline(always)]
            fn pack(l: Self::Lanes) -> Piece {
                let (x, y): (u64, u64) = ($to(<$t>::store(l.0)), $to(<$t>::store(l.1)));
                Piece {
                    a: x as u32,
                    b: (x >> 32) as u32,
                    c: y as u32,
                    d: (y >> 32) as u32,
                }
            }

            lanes!($t, 0 1);
        }
    };
}

macro_rules! bytes4 {
    ($t:ty, $from:expr, $to:expr) => {
        impl GpuElement for $t {
            type Lanes = (Of<$t>, Of<$t>, Of<$t>, Of<$t>);

            #[inline(always)]
            fn unpack(p: Piece) -> Self::Lanes {
                let of = |bits: u32| <$t>::load($from(bits));
                (of(p.a), of(p.b), of(p.c), of(p.d))
            }

            #[inline(always)]
            fn pack(l: Self::Lanes) -> Piece {
                let bits = |acc| -> u32 { $to(<$t>::store(acc)) };
                Piece {
                    a: bits(l.0),
                    b: bits(l.1),
                    c: bits(l.2),
                    d: bits(l.3),
                }
            }

            lanes!($t, 0 1 2 3);
        }
    };
}

macro_rules! bytes2 {
    ($t:ty, $from:expr, $to:expr) => {
        impl GpuElement for $t {
            type Lanes = Eight<$t>;

            #[inline(always)]
            fn unpack(p: Piece) -> Self::Lanes {
                let low = |word: u32| <$t>::load($from(word as u16));
                let high = |word: u32| <$t>::load($from((word >> 16) as u16));
                (
                    low(p.a),
                    high(p.a),
                    low(p.b),
                    high(p.b),
                    low(p.c),
                    high(p.c),
                    low(p.d),
                    high(p.d),
                )
            }

            #[inline(always)]
            fn pack(l: Self::Lanes) -> Piece {
                if !<$t>::are_odd(l) {
                    return Piece {
                        a: <$t>::pack_two(l.0, l.1),
                        b: <$t>::pack_two(l.2, l.3),
                        c: <$t>::pack_two(l.4, l.5),
                        d: <$t>::pack_two(l.6, l.7),
                    };
                }
                cold_path();
                let bits = |acc| -> u16 { $to(<$t>::store(acc)) };
                let two = |x, y| bits(x) as u32 | (bits(y) as u32) << 16;
                Piece {
                    a: two(l.0, l.1),
                    b: two(l.2, l.3),
                    c: two(l.4, l.5),
                    d: two(l.6, l.7),
                }
            }

            lanes!($t, 0 1 2 3 4 5 6 7);
        }
    };
}

/// 16-bit elements that one instruction packs two of, where the machine has it.
trait Halves: Element {
    /// Whether some of eight must be packed one by one.
    fn are_odd(lanes: Eight<Self>) -> bool;
    /// Packs two that need not.
    fn pack_two(low: Self::Acc, high: Self::Acc) -> u32;
}

type Eight<E> = (Of<E>, Of<E>, Of<E>, Of<E>, Of<E>, Of<E>, Of<E>, Of<E>);

macro_rules! halves {
    ($($t:ty, $instruction:ident;)*) => { $(
        #[cfg(target_arch = "nvptx64")]
        impl Halves for $t {
            #[inline(always)]
            fn are_odd(lanes: Eight<Self>) -> bool {
                // What becomes of a NaN differs.
                super::nvptx::any_nan(lanes)
            }

            #[inline(always)]
            fn pack_two(low: f32, high: f32) -> u32 {
                super::nvptx::$instruction(low, high)
            }
        }
    )* };
}

halves! { F16, f16x2; Bf16, bf16x2; }

macro_rules! one_by_one {
    ($($t:ty;)*) => { $(
        impl Halves for $t {
            #[inline(always)]
            fn are_odd(_: Eight<Self>) -> bool {
                true
            }

            #[inline(always)]
            fn pack_two(_: Self::Acc, _: Self::Acc) -> u32 {
                0
            }
        }
    )* };
}

one_by_one! { i16; u16; }
#[cfg(not(target_arch = "nvptx64"))]
one_by_one! { F16; Bf16; }

macro_rules! bytes1 {
    ($t:ty, $from:expr, $to:expr) => {
        impl GpuElement for $t {
            // Nested, because a tuple of more than twelve is a poor citizen.
            type Lanes = (Quad<$t>, Quad<$t>, Quad<$t>, Quad<$t>);

            #[inline(always)]
            fn unpack(p: Piece) -> Self::Lanes {
                let of = |word: u32, k: u32| <$t>::load($from((word >> (8 * k)) as u8));
                let four = |w: u32| (of(w, 0), of(w, 1), of(w, 2), of(w, 3));
                (four(p.a), four(p.b), four(p.c), four(p.d))
            }

            #[inline(always)]
            fn pack(l: Self::Lanes) -> Piece {
                let bits = |acc| -> u8 { $to(<$t>::store(acc)) };
                let four = |q: Quad<$t>| {
                    bits(q.0) as u32
                        | (bits(q.1) as u32) << 8
                        | (bits(q.2) as u32) << 16
                        | (bits(q.3) as u32) << 24
                };
                Piece {
                    a: four(l.0),
                    b: four(l.1),
                    c: four(l.2),
                    d: four(l.3),
                }
            }

            #[inline(always)]
            fn zip(
                a: Self::Lanes,
                b: Self::Lanes,
                f: impl Fn(Self::Acc, Self::Acc) -> Self::Acc,
            ) -> Self::Lanes {
                let four =
                    |a: Quad<$t>, b: Quad<$t>| (f(a.0, b.0), f(a.1, b.1), f(a.2, b.2), f(a.3, b.3));
                (
                    four(a.0, b.0),
                    four(a.1, b.1),
                    four(a.2, b.2),
                    four(a.3, b.3),
                )
            }

            #[inline(always)]
            fn map(a: Self::Lanes, f: impl Fn(Self::Acc) -> Self::Acc) -> Self::Lanes {
                let four = |a: Quad<$t>| (f(a.0), f(a.1), f(a.2), f(a.3));
                (four(a.0), four(a.1), four(a.2), four(a.3))
            }

            #[inline(always)]
            fn fold<T>(a: Self::Lanes, start: T, f: impl Fn(T, Self::Acc) -> T) -> T {
                let four = |all, q: Quad<$t>| f(f(f(f(all, q.0), q.1), q.2), q.3);
                four(four(four(four(start, a.0), a.1), a.2), a.3)
            }
        }
    };
}

type Quad<E> = (Of<E>, Of<E>, Of<E>, Of<E>);

elements! {
    i8, |x: u8| x as i8, |x: i8| x as u8, bytes1;
    u8, |x: u8| x, |x: u8| x, bytes1;
    F8E4M3, F8E4M3, |x: F8E4M3| x.0, bytes1;
    F8E5M2, F8E5M2, |x: F8E5M2| x.0, bytes1;
    i16, |x: u16| x as i16, |x: i16| x as u16, bytes2;
    u16, |x: u16| x, |x: u16| x, bytes2;
    F16, F16, |x: F16| x.0, bytes2;
    Bf16, Bf16, |x: Bf16| x.0, bytes2;
    i32, |x: u32| x as i32, |x: i32| x as u32, bytes4;
    u32, |x: u32| x, |x: u32| x, bytes4;
    f32, f32::from_bits, f32::to_bits, bytes4;
    i64, |x: u64| x as i64, |x: i64| x as u64, bytes8;
    u64, |x: u64| x, |x: u64| x, bytes8;
    f64, f64::from_bits, f64::to_bits, bytes8;
}

/// A reduction on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuReducer<E, C> {
    combine: C,
    average: bool,
    table: u64,
    element: PhantomData<E>,
}

impl<E: GpuElement> GpuReducer<E, ReduceOp> {
    /// Of an operation that the launch names.
    ///
    /// # Safety
    /// `table` must be the address of [`TABLE_BYTES`] bytes that the block's threads share, aligned
    /// to 8, and used for nothing else.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new(op: ReduceOp, table: u64) -> Self {
        Self {
            combine: op,
            average: matches!(op, ReduceOp::Avg),
            table,
            element: PhantomData,
        }
    }
}

impl<E: GpuElement, C: Combine> GpuReducer<E, C> {
    /// Of an operation known when the kernel is compiled; `average` divides at the end.
    ///
    /// # Safety
    /// As for [`new`](GpuReducer::new).
    #[inline(always)]
    #[must_use]
    pub const unsafe fn fixed(combine: C, average: bool, table: u64) -> Self {
        Self {
            combine,
            average,
            table,
            element: PhantomData,
        }
    }
}

#[inline(always)]
const fn entry(table: u64, k: u32) -> *mut Location {
    (table + k as u64 * size_of::<Location>() as u64) as *mut Location
}

#[inline(always)]
fn finish<E: GpuElement>(lanes: E::Lanes, divisor: u32) -> Piece {
    E::pack(if divisor == 0 {
        lanes
    } else {
        E::map(lanes, |acc| E::div(acc, divisor))
    })
}

/// A reduction whose operands are in the table.
struct Listed<E, C> {
    combine: C,
    table: u64,
    element: PhantomData<E>,
}

impl<E: GpuElement, C: Combine> Listed<E, C> {
    /// # Safety
    /// Entry `k` must have been looked up.
    #[inline(always)]
    unsafe fn location(&self, k: u32) -> Location {
        // SAFETY: the caller's promise; nobody writes the table meanwhile.
        unsafe { entry(self.table, k).read() }
    }
}

/// A source's piece, and which of its packet words is the first that has not arrived.
type Read = (Piece, u32);

/// All have arrived.
const NONE_LATE: u32 = 4;

/// # Safety
/// The location must be aligned to a piece and valid for piece `i`.
#[inline(always)]
unsafe fn read_whole<M: Memory>(memory: &M, from: &Location, i: u64, flag: u32) -> Read {
    if from.packets.is_none() {
        // SAFETY: the caller's promise.
        return (unsafe { load16(from.addr + i * PIECE) }, NONE_LATE);
    }
    let offset = i * PIECE * (WORD / PAYLOAD);
    // SAFETY: the caller's promise: four words.
    let ([a, b], [c, d]) = unsafe {
        (
            load_pair(memory, from.addr + offset),
            load_pair(memory, from.addr + offset + 2 * WORD),
        )
    };
    let piece = Piece {
        a: a as u32,
        b: b as u32,
        c: c as u32,
        d: d as u32,
    };
    let arrived = |word| flag_in(word) == flag;
    let late = match (arrived(a), arrived(b), arrived(c), arrived(d)) {
        (false, ..) => 0,
        (_, false, ..) => 1,
        (_, _, false, _) => 2,
        (_, _, _, false) => 3,
        (true, true, true, true) => NONE_LATE,
    };
    (piece, late)
}

/// Part of a source that may be unaligned, or less than a piece: its first `valid` bytes, the rest
/// zero.
///
/// # Safety
/// The location must be valid for `valid` bytes after byte `at`.
#[inline(always)]
unsafe fn read_part<E, M: Memory>(
    memory: &M,
    from: &Location,
    at: u64,
    valid: u64,
    flag: u32,
) -> Read {
    if from.packets.is_some() {
        let offset = at * (WORD / PAYLOAD);
        let word = |k: u64| {
            if k * PAYLOAD < valid {
                // SAFETY: the caller's promise.
                unsafe { memory.load(from.addr + offset + k * WORD) }
            } else {
                word(0, flag)
            }
        };
        let (a, b, c, d) = (word(0), word(1), word(2), word(3));
        let arrived = |word| flag_in(word) == flag;
        let late = match (arrived(a), arrived(b), arrived(c), arrived(d)) {
            (false, ..) => 0,
            (_, false, ..) => 1,
            (_, _, false, _) => 2,
            (_, _, _, false) => 3,
            (true, true, true, true) => NONE_LATE,
        };
        let piece = Piece {
            a: a as u32,
            b: b as u32,
            c: c as u32,
            d: d as u32,
        };
        return (piece, late);
    }
    let addr = from.addr + at;
    let size = size_of::<E>() as u64;
    // SAFETY: the caller's promise; accesses are aligned, and none reaches beyond `valid`.
    let piece = unsafe {
        if size == 8 && addr.is_multiple_of(8) {
            let two = |k: u64| if k < valid { load8(addr + k) } else { 0 };
            let (x, y) = (two(0), two(8));
            Piece {
                a: x as u32,
                b: (x >> 32) as u32,
                c: y as u32,
                d: (y >> 32) as u32,
            }
        } else if size == 4 && addr.is_multiple_of(4) {
            let one = |k: u64| if k < valid { load4(addr + k) } else { 0 };
            let (a, b, c, d) = (one(0), one(4), one(8), one(12));
            Piece { a, b, c, d }
        } else if size == 2 && addr.is_multiple_of(2) {
            let half = |k: u64| {
                if k < valid {
                    u32::from(load2(addr + k))
                } else {
                    0
                }
            };
            let low = (half(0), half(4), half(8), half(12));
            let high = (half(2), half(6), half(10), half(14));
            Piece {
                a: low.0 | high.0 << 16,
                b: low.1 | high.1 << 16,
                c: low.2 | high.2 << 16,
                d: low.3 | high.3 << 16,
            }
        } else {
            let four = |k: u64| load_bytes(addr + k, valid.saturating_sub(k));
            let (a, b, c, d) = (four(0), four(4), four(8), four(12));
            Piece { a, b, c, d }
        }
    };
    (piece, NONE_LATE)
}

/// Stores the first `valid` bytes of a piece.
///
/// # Safety
/// The location must be valid for `valid` bytes after byte `at`, a multiple of a piece.
#[inline(always)]
unsafe fn write<E, M: Memory>(
    memory: &M,
    to: &Location,
    at: u64,
    valid: u64,
    piece: Piece,
    flag: u32,
) {
    let Piece { a, b, c, d } = piece;
    let addr = to.addr + at;
    let size = size_of::<E>() as u64;
    // SAFETY: the caller's promise; accesses are aligned, and none reaches beyond `valid`.
    unsafe {
        if to.packets.is_some() {
            let addr = to.addr + at * (WORD / PAYLOAD);
            if valid == PIECE {
                store_pair(memory, addr, [word(a, flag), word(b, flag)]);
                store_pair(memory, addr + 2 * WORD, [word(c, flag), word(d, flag)]);
                return;
            }
            let part = |k: u64, data: u32| {
                if k * PAYLOAD < valid {
                    let bits = 8 * (valid - k * PAYLOAD);
                    let mask = if bits < 32 { (1 << bits) - 1 } else { u32::MAX };
                    memory.store(addr + k * WORD, word(data & mask, flag));
                }
            };
            part(0, a);
            part(1, b);
            part(2, c);
            part(3, d);
        } else if valid == PIECE && addr.is_multiple_of(PIECE) {
            store16(addr, piece);
        } else if size == 8 && addr.is_multiple_of(8) {
            let two = |k: u64, low: u32, high: u32| {
                if k < valid {
                    store8(addr + k, word(low, high));
                }
            };
            two(0, a, b);
            two(8, c, d);
        } else if size == 4 && addr.is_multiple_of(4) {
            let one = |k: u64, data: u32| {
                if k < valid {
                    store4(addr + k, data);
                }
            };
            one(0, a);
            one(4, b);
            one(8, c);
            one(12, d);
        } else if size == 2 && addr.is_multiple_of(2) {
            let two = |k: u64, data: u32| {
                if k < valid {
                    store2(addr + k, data as u16);
                }
                if k + 2 < valid {
                    store2(addr + k + 2, (data >> 16) as u16);
                }
            };
            two(0, a);
            two(4, b);
            two(8, c);
            two(12, d);
        } else {
            let four = |k: u64, data: u32| store_bytes(addr + k, data, valid.saturating_sub(k));
            four(0, a);
            four(4, b);
            four(8, c);
            four(12, d);
        }
    }
}

impl<E: GpuElement, C: Combine> Listed<E, C> {
    /// Waits for packet word `late` after byte `at` of source `k`.
    ///
    /// # Safety
    /// The source must have been looked up.
    #[inline(always)]
    unsafe fn await_packet<B: Block>(
        &self,
        block: &B,
        k: u32,
        at: u64,
        late: u32,
        flag: u32,
    ) -> Result<(), Stopped> {
        // SAFETY: the caller's promise; late words lie in the source.
        unsafe {
            let from = self.location(k);
            if let Some(site) = from.packets {
                let word = from.addr + at * (WORD / PAYLOAD) + u64::from(late) * WORD;
                crate::packet::read_packet(block, site, word, flag)?;
            }
        }
        Ok(())
    }

    /// Whole piece `i` of all sources, combined, with four sources in flight; and whether that was
    /// possible, or one of them is not aligned to a piece.
    ///
    /// The lanes have a value on every way out: an unknown one would take registers from the
    /// beginning of the kernel on.
    ///
    /// # Safety
    /// `count` sources must have been looked up, and be valid for the piece.
    #[inline(always)]
    unsafe fn combine_whole<B: Block>(
        &self,
        block: &B,
        count: u32,
        i: u64,
        flag: u32,
    ) -> (E::Lanes, Result<bool, Stopped>) {
        let memory = block.memory();
        let nothing = (Piece::default(), NONE_LATE);
        let mut lanes = E::unpack(Piece::default());
        let mut k = 0;
        while k < count {
            let (has_b, has_c, has_d) = (k + 1 < count, k + 2 < count, k + 3 < count);
            // SAFETY: entries below `count` were looked up; the others stand for the first.
            let (a, b, c, d) = unsafe {
                (
                    self.location(k),
                    self.location(if has_b { k + 1 } else { k }),
                    self.location(if has_c { k + 2 } else { k }),
                    self.location(if has_d { k + 3 } else { k }),
                )
            };
            if !(is_wide(&a) && is_wide(&b) && is_wide(&c) && is_wide(&d)) {
                return (lanes, Ok(false));
            }
            let (a, b, c, d) = loop {
                // SAFETY: the locations are aligned, and valid for the piece.
                let (a, b, c, d) = unsafe {
                    let read = |has, from| {
                        if has {
                            read_whole(memory, from, i, flag)
                        } else {
                            nothing
                        }
                    };
                    (
                        read(true, &a),
                        read(has_b, &b),
                        read(has_c, &c),
                        read(has_d, &d),
                    )
                };
                let (late, source) = match (a.1, b.1, c.1, d.1) {
                    (NONE_LATE, NONE_LATE, NONE_LATE, NONE_LATE) => break (a.0, b.0, c.0, d.0),
                    (NONE_LATE, NONE_LATE, NONE_LATE, late) => (late, k + 3),
                    (NONE_LATE, NONE_LATE, late, _) => (late, k + 2),
                    (NONE_LATE, late, ..) => (late, k + 1),
                    (late, ..) => (late, k),
                };
                // SAFETY: as above.
                let arrived = unsafe { self.await_packet(block, source, i * PIECE, late, flag) };
                if let Err(stopped) = arrived {
                    return (lanes, Err(stopped));
                }
            };
            // One text for all four: they move up.
            let mut ahead = [a, b, c, d];
            let mut left = opaque(min(count - k, 4));
            while left > 0 {
                let [a, b, c, d] = ahead;
                let next = E::unpack(a);
                lanes = if k == 0 {
                    next
                } else {
                    self.combine.combine::<E>(lanes, next)
                };
                ahead = [b, c, d, d];
                left -= 1;
                k += 1;
            }
        }
        (lanes, Ok(true))
    }

    /// The first `valid` bytes of piece `i` of all sources, combined, one source after another.
    ///
    /// # Safety
    /// As for [`combine_whole`](Self::combine_whole), with at least one source.
    #[inline(always)]
    unsafe fn combine_part<B: Block>(
        &self,
        block: &B,
        count: u32,
        i: u64,
        valid: u64,
        flag: u32,
    ) -> (E::Lanes, Result<(), Stopped>) {
        let mut lanes = E::unpack(Piece::default());
        let mut k = 0;
        while k < count {
            let valid = u64::from(opaque(valid as u32));
            // SAFETY: the caller's promise.
            let from = unsafe { self.location(k) };
            let piece = loop {
                // SAFETY: the caller's promise.
                let arrived = unsafe {
                    match read_part::<E, _>(block.memory(), &from, i * PIECE, valid, flag) {
                        (piece, NONE_LATE) => break piece,
                        (_, late) => self.await_packet(block, k, i * PIECE, late, flag),
                    }
                };
                if let Err(stopped) = arrived {
                    return (lanes, Err(stopped));
                }
            };
            let next = E::unpack(piece);
            lanes = if k == 0 {
                next
            } else {
                self.combine.combine::<E>(lanes, next)
            };
            k += 1;
        }
        (lanes, Ok(()))
    }
}

/// Whether whole pieces are read in one access, or are packets.
#[inline(always)]
const fn is_wide(from: &Location) -> bool {
    from.packets.is_some() || from.addr.is_multiple_of(PIECE)
}

/// Sources and destinations together must not be more than [`MAX_OPERANDS`].
impl<E: GpuElement, C: Combine> Reducer for GpuReducer<E, C> {
    #[inline(always)]
    unsafe fn reduce<B: Block, S: Fn(u32) -> Location, D: Fn(u32) -> Location>(
        &self,
        block: &B,
        sources: &Sources<S>,
        destinations: &Sources<D>,
        elements: u64,
        divisor: u32,
        flag: u32,
    ) -> Result<(), Stopped> {
        let divisor = if self.average { divisor } else { 0 };
        let (count, targets) = (sources.count, destinations.count);
        let (combine, table) = (self.combine, self.table);
        let bytes = elements * size_of::<E>() as u64;
        if count == 2 && targets == 1 && bytes.is_multiple_of(PIECE) {
            let (a, b, to) = ((sources.at)(0), (sources.at)(1), (destinations.at)(0));
            let raw = a.packets.is_none() && b.packets.is_none() && to.packets.is_none();
            if raw && (a.addr | b.addr | to.addr).is_multiple_of(PIECE) {
                let pieces = bytes / PIECE;
                // SAFETY: the caller's promise.
                unsafe {
                    reduce_pair::<B, E, C>(
                        block, combine, to.addr, a.addr, b.addr, pieces, divisor,
                    );
                }
                return Ok(());
            }
        }
        // All operands are looked up at once, a thread each: one after another would take longer
        // than a small reduction itself. The barrier before it is for those still in the reduction
        // before.
        block.sync(Ok(()))?;
        let mut k = block.thread();
        while k < count + targets {
            let location = if k < count {
                (sources.at)(k)
            } else {
                (destinations.at)(k - count)
            };
            // SAFETY: within the table, which this thread has its own entries of.
            unsafe { entry(self.table, k).write(location) };
            k += block.threads();
        }
        block.sync(Ok(()))?;

        // SAFETY: all operands are in the table; the rest is the caller's promise.
        unsafe {
            reduce_listed::<B, E, C>(block, combine, table, count, targets, bytes, divisor, flag)
        }
    }
}

/// Block: reduces two aligned sources of `pieces` pieces into one such destination, four pieces of each in flight. Like
/// `reduce_listed`, a function of numbers alone.
///
/// # Safety
/// The addresses must be aligned to a piece, and valid for `pieces`.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub unsafe fn reduce_pair<B: Block, E: GpuElement, C: Combine>(
    block: &B,
    combine: C,
    dst: u64,
    a: u64,
    b: u64,
    pieces: u64,
    divisor: u32,
) {
    let add = |x, y| finish::<E>(combine.combine::<E>(E::unpack(x), E::unpack(y)), divisor);
    let threads = u64::from(block.threads());
    let mut i = u64::from(block.thread());
    let (one, two, three) = (threads * PIECE, 2 * threads * PIECE, 3 * threads * PIECE);
    while i < pieces {
        let (x, y, mut to) = (a + i * PIECE, b + i * PIECE, dst + i * PIECE);
        // SAFETY: every piece lies before `pieces`.
        unsafe {
            let (x0, y0) = (load16(x), load16(y));
            let (mut xs, mut ys, mut left) = ([x0; 4], [y0; 4], 1);
            if i + 3 * threads < pieces {
                (xs[1], xs[2], xs[3]) = (load16(x + one), load16(x + two), load16(x + three));
                (ys[1], ys[2], ys[3]) = (load16(y + one), load16(y + two), load16(y + three));
                left = 4;
            }
            i += u64::from(left) * threads;
            // One text for all four: they move up.
            left = opaque(left);
            while left > 0 {
                let ([x0, x1, x2, x3], [y0, y1, y2, y3]) = (xs, ys);
                store16(to, add(x0, y0));
                (xs, ys) = ([x1, x2, x3, x3], [y1, y2, y3, y3]);
                to += one;
                left -= 1;
            }
        }
    }
}

/// Block: reduces `bytes` bytes of the first `count` operands in the table into the `targets` after
/// them. One function of numbers alone: kernels call it, rather than hold it once for every place
/// that reduces, and nothing of it goes through local memory.
///
/// # Safety
/// As for [`Reducer::reduce`], with all operands looked up.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
#[allow(clippy::too_many_arguments, reason = "registers")]
unsafe fn reduce_listed<B: Block, E: GpuElement, C: Combine>(
    block: &B,
    combine: C,
    table: u64,
    count: u32,
    targets: u32,
    bytes: u64,
    divisor: u32,
    flag: u32,
) -> Result<(), Stopped> {
    let this = Listed::<E, C> {
        combine,
        table,
        element: PhantomData,
    };
    let (whole, rest) = (bytes / PIECE, bytes % PIECE);
    let mut i = u64::from(block.thread());
    while i * PIECE < bytes {
        let valid = if i < whole { PIECE } else { rest };
        // SAFETY: everything was looked up, and is valid for the elements. This thread reads a
        // piece of all sources before it writes it to a destination, so in place is fine.
        unsafe {
            let (mut lanes, mut outcome) = (E::unpack(Piece::default()), Ok(false));
            if valid == PIECE {
                (lanes, outcome) = this.combine_whole(block, count, i, flag);
            }
            if !outcome? {
                let part = this.combine_part(block, count, i, valid, flag);
                lanes = part.0;
                part.1?;
            }
            let piece = finish::<E>(lanes, divisor);
            let mut k = count;
            while k < count + targets {
                let to = this.location(k);
                let valid = u64::from(opaque(valid as u32));
                write::<E, _>(block.memory(), &to, i * PIECE, valid, piece.opaque(), flag);
                k += 1;
            }
        }
        i += u64::from(block.threads());
    }
    Ok(())
}

const fn min(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}
