//! Dispatch and combine ([`crate::moe`]) on a GPU: rows by all threads of a block, sixteen bytes a thread, and what a
//! launch is told.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_lossless,
    reason = "bytes are put into words"
)]

pub mod combine;
pub mod dispatch;
pub mod lines;

use core::marker::PhantomData;

use super::copy::copy_part;
use super::reduce::GpuElement;
use super::wide::{PIECE, Piece, load16, store1, store4, store8, store16};
use super::{GpuContext, WARP};
use crate::block::Block;
use crate::element::{Element, F8E4M3};
use crate::memory::Memory;
use crate::moe::dispatch::Quantise;
use crate::moe::rows::{Rows, Term, exponent_up};
use crate::moe::{
    COMPLETED, GROUP, Group, MAX_RANKS, MAX_TOP_K, ROWS_FLAG, Routes, SENT, address_of, is_masked,
};

/// Bytes of shared memory that a [`GpuRows`] needs for each warp: a [`Term`] a thread.
pub const WARP_TABLE_BYTES: usize = WARP as usize * size_of::<Term>();

const _: () = assert!(MAX_TOP_K == WARP, "a thread looks one term up");

/// Bytes of shared memory of a thread block, for each warp, in which it makes and reads what a row says of itself, and
/// keeps how many come from each rank, and where a token's rows to each are.
pub const META_BYTES: usize = lines::META_BYTES + (4 + 8) * MAX_RANKS as usize;
/// Bytes in which a block marks where few tokens go.
pub const MARKS_BYTES: usize = 16 * 1024;
/// Bytes for what a block has counted.
pub const TABLES_BYTES: usize = 8 * 1024;

/// A thread block's shared memory, where rows are lines. All addresses are aligned to 16.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Address of [`WARP_TABLE_BYTES`] for each warp.
    pub terms: u64,
    /// Address of [`META_BYTES`] for each warp.
    pub metas: u64,
    /// Address of [`MARKS_BYTES`].
    pub marks: u64,
    /// Address of [`TABLES_BYTES`], see [`moved`](Self::moved).
    pub tables: u64,
}

impl Shared {
    /// Where this thread's warp has a row's meta.
    #[inline(always)]
    fn meta<B: Block>(&self, block: &B) -> u64 {
        self.metas + u64::from(block.warp()) * META_BYTES as u64
    }

    /// Where this thread's warp has how many rows come from each rank.
    #[inline(always)]
    fn received<B: Block>(&self, block: &B) -> u64 {
        self.meta(block) + lines::META_BYTES as u64
    }

    /// Where this thread's warp has where a token's rows are.
    #[inline(always)]
    fn targets<B: Block>(&self, block: &B) -> u64 {
        self.received(block) + 4 * u64::from(MAX_RANKS)
    }

    /// How far from the first's the tables are, modulo 2^64, that thread block `index` of so many counts in
    /// ([`Routes::moved`]): here, if there is room.
    #[inline(always)]
    #[must_use]
    pub fn moved(&self, routes: &Routes, index: u32, blocks: u32) -> u64 {
        if routes.stride <= TABLES_BYTES as u64 {
            return self.tables.wrapping_sub(routes.received);
        }
        // The last one has those that the host looks at.
        u64::from(blocks - 1 - index) * routes.stride
    }
}

const _: () = assert!(TABLES_BYTES >= 4 * MAX_RANKS as usize);

/// The numbers of the calls that a launch is to send and to complete, as it has found them.
#[derive(Clone, Copy, Debug)]
pub struct Calls {
    sent: u64,
    completed: u64,
}

impl Calls {
    /// # Safety
    /// The group must be prepared.
    #[inline(always)]
    #[must_use]
    pub unsafe fn read<M: Memory>(memory: &M, group: &Group) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                sent: memory.load(group.state + SENT),
                completed: memory.load(group.state + COMPLETED),
            }
        }
    }
}

/// The warps of a block that do something.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Whether this thread's does.
    takes_part: bool,
    /// Which of them it is.
    warp: u32,
    warps: u32,
}

impl Part {
    /// This thread's warp's first item, and how many further the next one is: among those of all blocks, or of its own.
    #[inline(always)]
    const fn spread(self, all: bool, index: u32, blocks: u32) -> (u32, u32) {
        match all {
            true => (self.warp * blocks + index, self.warps * blocks),
            false => (self.warp, self.warps),
        }
    }

    /// Those that send and those that receive: all, one after the other, or some each.
    #[inline(always)]
    fn of<B: Block>(block: &B, splits: bool) -> (Self, Self) {
        let (warp, warps) = (block.warp(), block.warps());
        if !splits {
            let all = Self {
                takes_part: true,
                warp,
                warps,
            };
            return (all, all);
        }
        let senders = warps / 2;
        let sender = Self {
            takes_part: warp < senders,
            warp,
            warps: senders,
        };
        let receiver = Self {
            takes_part: warp >= senders,
            warp: warp.wrapping_sub(senders),
            warps: warps - senders,
        };
        (sender, receiver)
    }
}

/// Segments that a warp does one after the other: of few tokens one, so that all warps have some, of many several, so that
/// one is on its way while the other is stored.
#[inline(always)]
const fn span(few: bool) -> u32 {
    if few { 1 } else { 4 }
}

#[inline(always)]
const fn least(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

/// The credit of this thread's peer, if it has one. Relaxed, because nothing that follows must wait for it: what is written
/// once it is enough depends on it.
///
/// # Safety
/// The group must be prepared. So for all of these.
#[inline(always)]
unsafe fn credit_of<B: Block>(block: &B, group: &Group) -> u64 {
    match block.thread() < group.geometry.ranks {
        // SAFETY: the caller's promise.
        true => unsafe {
            let at = group.own + group.geometry.credit(block.thread());
            block.memory().load(at)
        },
        false => 0,
    }
}

/// The first peer that thread block `index` has something to say to, of every so many: the last blocks, which have fewer
/// tokens.
#[inline(always)]
const fn speaks_to(index: u32, blocks: u32) -> u32 {
    blocks - 1 - index
}

/// Block: the first one tells every rank, even those masked, which calls this rank has read: those of launches before this
/// one, which have ended.
#[inline(always)]
unsafe fn give_credits<B: Block>(block: &B, group: &Group, calls: Calls, index: u32) {
    let (memory, peer) = (block.memory(), block.thread());
    if index == 0 && peer < group.geometry.ranks {
        // SAFETY: the caller's promise; the word is for this rank to write.
        unsafe {
            let at = address_of(memory, group, peer) + group.geometry.credit(group.rank);
            memory.store(at, calls.completed);
        }
    }
}

/// Whether a block whose first thread has found that so many were counted before it is the last of this launch; all other
/// threads have found 0. Every block is counted once a call that is sent.
#[inline(always)]
const fn is_last(group: &Group, calls: Calls, so_far: u64) -> bool {
    so_far + 1 == (calls.sent + 1) * group.blocks as u64
}

/// Block: the last one counts a call as sent, and tells so whoever looks for what is missing: rows need no flag.
#[inline(always)]
unsafe fn tell<B: Block>(block: &B, group: &Group, calls: Calls, so_far: u64) {
    if block.thread() != 0 || !is_last(group, calls, so_far) {
        return;
    }
    let call = calls.sent;
    let memory = block.memory();
    // SAFETY: the caller's promise; the words are for this rank to write.
    unsafe {
        memory.store(group.state + SENT, call + 1);
        let mut peer = 0;
        while peer < group.geometry.ranks {
            if !is_masked(memory, group, peer) {
                let at = group.geometry.flag(call, group.rank, ROWS_FLAG);
                memory.store(address_of(memory, group, peer) + at, call + 1);
            }
            peer += 1;
        }
    }
}

/// What a launch does, one after another; any of them may be left out.
pub mod steps {
    /// Takes where tokens go from [`Choices`](crate::moe::dispatch::Choices).
    pub const ROUTE: u32 = 1;
    /// Sends weights that are given when combining.
    pub const WEIGHTS: u32 = 2;
    /// Sends.
    pub const SEND: u32 = 4;
    /// Waits for counts.
    pub const COUNT: u32 = 8;
    /// Waits for rows, and lays them out or sums them. Completes the call.
    pub const RECEIVE: u32 = 16;
}

/// The one parameter of the kernels that dispatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DispatchLaunch {
    /// The group.
    pub group: Group,
    /// The pass.
    pub routes: Routes,
    /// For [`steps::ROUTE`].
    pub choices: crate::moe::dispatch::Choices,
    /// For [`steps::SEND`]; its call also for [`steps::COUNT`].
    pub input: crate::moe::dispatch::Input,
    /// For [`steps::RECEIVE`].
    pub output: crate::moe::dispatch::Output,
    /// How waits end.
    pub context: GpuContext,
    /// What to do.
    pub steps: u32,
    /// Not used.
    pub reserved: u32,
}

/// The one parameter of the kernels that combine.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CombineLaunch {
    /// The group.
    pub group: Group,
    /// The pass.
    pub routes: Routes,
    /// For all steps.
    pub input: crate::moe::combine::Input,
    /// Address of the sums, for [`steps::RECEIVE`].
    pub output: u64,
    /// How waits end.
    pub context: GpuContext,
    /// What to do.
    pub steps: u32,
    /// Not used.
    pub reserved: u32,
}

/// Rows of f32, f16 or bf16 on a GPU. The same bits as the host's.
#[derive(Clone, Copy, Debug)]
pub struct GpuRows<E> {
    table: u64,
    element: PhantomData<E>,
}

impl<E> GpuRows<E> {
    /// # Safety
    /// `table` must be the address of [`WARP_TABLE_BYTES`] bytes for each warp of the block, which its threads share,
    /// aligned to 16 and used for nothing else.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new(table: u64) -> Self {
        Self {
            table,
            element: PhantomData,
        }
    }

    /// Where the table of this thread's warp is.
    #[inline(always)]
    fn of_warp<B: Block>(&self, block: &B) -> u64 {
        self.table + u64::from(block.warp()) * WARP_TABLE_BYTES as u64
    }

    /// Puts `mine` into this thread's place of its warp's table, which all of the warp may read then.
    ///
    /// # Safety
    /// All threads of the warp must call it; a place must have room.
    #[inline(always)]
    unsafe fn share<B: Block, T: Copy>(&self, block: &B, mine: T) -> *const T {
        let table = self.of_warp(block) as *mut T;
        // What was there before is not needed any more.
        block.warp_sync();
        // SAFETY: `new` was promised the table, of which this thread has a place.
        unsafe { table.add(block.lane() as usize).write(mine) };
        block.warp_sync();
        table
    }
}

/// The pieces that a thread moves at a time, side by side with those of its warp: a segment. Each by name, because an
/// array would lie in local memory.
macro_rules! pieces {
    ($($at:ident, $piece:ident, $number:literal;)*) => {
        /// Where a thread's pieces are, and whether they are.
        #[derive(Clone, Copy)]
        struct Places {
            $($at: u64,)*
            bytes: u64,
        }

        impl Places {
            #[inline(always)]
            fn of<B: Block>(block: &B, bytes: u64) -> Self {
                let lane = u64::from(block.lane()) * PIECE;
                Self {
                    $($at: lane + $number * u64::from(WARP) * PIECE,)*
                    bytes,
                }
            }
        }

        /// A value for each piece.
        #[derive(Clone, Copy)]
        struct Pieces<T> {
            $($piece: T,)*
        }

        impl<T: Copy> Pieces<T> {
            /// `f` of each place that is one; `nothing` of others.
            #[inline(always)]
            fn at(places: &Places, nothing: T, f: impl Fn(u64) -> T) -> Self {
                Self {
                    $($piece: if places.$at < places.bytes { f(places.$at) } else { nothing },)*
                }
            }

            #[inline(always)]
            fn each(self, places: &Places, f: impl Fn(u64, T)) {
                $(if places.$at < places.bytes {
                    f(places.$at, self.$piece);
                })*
            }

            #[inline(always)]
            fn zip<U: Copy>(self, other: Pieces<U>, f: impl Fn(T, U) -> T) -> Self {
                Self {
                    $($piece: f(self.$piece, other.$piece),)*
                }
            }
        }
    };
}

pieces! { at0, p0, 0; at1, p1, 1; at2, p2, 2; at3, p3, 3; }

/// Bytes of a segment.
const SEGMENT_BYTES: u64 = 4 * WARP as u64 * PIECE;
/// Bytes that a warp needs to quantise a segment, also one of lines: elements in a byte each, and f32 scales.
pub const STAGING_BYTES: u64 = lines::SEGMENT_GROUPS * (GROUP + 4);

const _: () = assert!(STAGING_BYTES >= SEGMENT_BYTES / 2 + SEGMENT_BYTES / 2 / GROUP * 4);

impl<E: GpuElement + Element<Acc = f32>> Rows for GpuRows<E> {
    const SEGMENT: u64 = SEGMENT_BYTES;

    #[inline(always)]
    unsafe fn sum<B: Block>(
        &self,
        block: &B,
        to: u64,
        (most, term): (u32, impl Fn(u32) -> Term),
        elements: u64,
    ) {
        let lane = block.lane();
        let mine = match lane < most {
            true => term(lane),
            false => Term::default(),
        };
        let places = Places::of(block, elements * size_of::<E>() as u64);
        let zero = E::map(E::unpack(Piece::default()), |_| 0.0);
        // SAFETY: the caller's promise; whole pieces, because rows are. All of the warp come here.
        unsafe {
            let terms = self.share(block, mine);
            let mut sum = Pieces::at(&places, zero, |_| zero);
            let (mut k, mut is_first) = (0, true);
            while k < most {
                let Term { address, weight } = terms.add(k as usize).read();
                if address != 0 {
                    let x = Pieces::at(&places, Piece::default(), |at| load16(address + at));
                    sum = sum.zip(x, |sum, x| {
                        let product = E::map(E::unpack(x), |x| weight * x);
                        match is_first {
                            true => product,
                            false => E::zip(sum, product, |sum, x| sum + x),
                        }
                    });
                    is_first = false;
                }
                k += 1;
            }
            sum.each(&places, |at, sum| store16(to + at, E::pack(sum)));
        }
    }

    #[inline(always)]
    unsafe fn quantise<B: Block>(
        &self,
        block: &B,
        to: (u64, u64),
        from: u64,
        elements: u64,
        how: Quantise,
    ) {
        let lane = block.lane();
        let each = PIECE / size_of::<E>() as u64;
        // Threads side by side that have a group.
        let threads = (GROUP / each) as u32;
        let pieces = elements / each;
        // Who read what was there has to be done.
        block.warp_sync();
        let mut first = 0;
        while first < pieces {
            let piece = first + u64::from(lane);
            let is_there = piece < pieces;
            // SAFETY: the caller's promise, and that of `new`; all of the warp come here.
            unsafe {
                let x = match is_there {
                    true => E::unpack(load16(from + piece * PIECE)),
                    false => E::map(E::unpack(Piece::default()), |_| 0.0),
                };
                let largest = E::fold(
                    x,
                    0.0,
                    |most: f32, x: f32| {
                        if x.abs() > most { x.abs() } else { most }
                    },
                );
                let all = self.share(block, largest);
                let (mut other, mut most) = (lane / threads * threads, 1e-4_f32);
                let end = other + threads;
                while other < end {
                    let theirs = all.add(other as usize).read();
                    most = if theirs > most { theirs } else { most };
                    other += 1;
                }
                let exact = most / 448.0;
                let exponent = exponent_up(exact);
                let scale = match how {
                    Quantise::No | Quantise::F32 => exact,
                    _ => f32::from_bits(exponent << 23),
                };
                if is_there {
                    let byte = |x: f32| u64::from(F8E4M3::store(x / scale).0);
                    let (word, _) =
                        E::fold(x, (0, 0), |(word, at), x| (word | byte(x) << at, at + 8));
                    match each {
                        8 => store8(to.0 + 8 * piece, word),
                        _ => store4(to.0 + 4 * piece, word as u32),
                    }
                    let group = piece * each / GROUP;
                    match (piece * each).is_multiple_of(GROUP) {
                        true if how == Quantise::Exponents => store1(to.1 + group, exponent as u8),
                        true => store4(to.1 + 4 * group, scale.to_bits()),
                        false => {}
                    }
                }
            }
            first += u64::from(WARP);
        }
        if how == Quantise::Exponents && lane < 3 {
            // SAFETY: the caller's promise.
            unsafe { store1(to.1 + elements.div_ceil(GROUP) + u64::from(lane), 0) };
        }
        block.warp_sync();
    }

    #[inline(always)]
    unsafe fn scatter<B: Block>(
        &self,
        block: &B,
        (most, to): (u32, impl Fn(u32) -> u64),
        from: u64,
        bytes: u64,
    ) {
        let lane = block.lane();
        // SAFETY: the caller's promise; all of the warp come here.
        unsafe {
            if (bytes | from).is_multiple_of(PIECE) && bytes <= SEGMENT_BYTES {
                let places = Places::of(block, bytes);
                // On its way while addresses are looked up.
                let x = Pieces::at(&places, Piece::default(), |at| load16(from + at));
                let mine = if lane < most { to(lane) } else { 0 };
                let targets = self.share(block, mine);
                let mut k = 0;
                while k < most {
                    let address = targets.add(k as usize).read();
                    if address.is_multiple_of(PIECE) && address != 0 {
                        x.each(&places, |at, x| store16(address + at, x));
                    } else if address != 0 {
                        copy_part(lane, WARP, address, from, bytes);
                    }
                    k += 1;
                }
                return;
            }
            let mine = if lane < most { to(lane) } else { 0 };
            let targets = self.share(block, mine);
            let mut k = 0;
            while k < most {
                let address = targets.add(k as usize).read();
                if address != 0 {
                    copy_part(lane, WARP, address, from, bytes);
                }
                k += 1;
            }
        }
    }
}

// The host writes what the kernels read, so neither may find padding where the other has a field.
const _: () = assert!(size_of::<crate::moe::dispatch::Choices>() == 24);
const _: () = assert!(size_of::<Term>() == 16);
// Kernel parameters end at 4 KiB.
const _: () = assert!(size_of::<DispatchLaunch>() <= 4096);
const _: () = assert!(size_of::<CombineLaunch>() <= 4096);
