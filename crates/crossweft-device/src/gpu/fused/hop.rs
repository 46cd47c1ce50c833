//! Moves of one hop in one piece, for collectives that reduce nothing: every block goes from where it is to where
//! it belongs, in packets, or straight between buffers that others can reach. Bytes are bytes: these kernels are for all
//! data types.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves"
)]

use core::hint::cold_path;

use super::{
    Tables, await_words, begins, counted, depart, hear, load, min, read_packets, say, send_packets,
    store,
};
use crate::block::Block;
use crate::executor::{advance, arrive};
use crate::gpu::Hop;
use crate::gpu::packets::word;
use crate::gpu::wide::{PIECE, Piece, load16, store16};
use crate::memory::Memory;
use crate::packet::flag_of;
use crate::semaphore::Semaphore;
use crate::wait::{Site, Stopped, WaitKind};

/// Bits of [`Hop::meets`]: peers are told at the beginning that this rank has begun,
pub const TELLS: u32 = 1;
/// and that is waited for;
pub const HEARS: u32 = 2;
/// they are told at the end,
pub const TELLS_END: u32 = 4;
/// and that is waited for.
pub const HEARS_END: u32 = 8;

/// Runs thread block `index` of a launch that found `epoch`, in packets: [`first`](Hop::first) moves send this rank's blocks,
/// [`second`](Hop::second) take what has come, or this rank's own. `launch` is without its tables, which are in
/// `tables`. Threads return as soon as they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`] when the wait hook ends a wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// `block` may be one that is ready behind a barrier, and has a thread for each channel. All addresses must be valid,
/// buffers aligned to a [`Piece`]; as for [`run_block`](crate::executor::run_block).
#[inline(always)]
pub unsafe fn packets<B: Block>(
    block: &B,
    launch: &Hop,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
) -> Result<(), Stopped> {
    let Hop {
        bytes,
        step,
        ref counters,
        first: sends,
        second: takes,
        ..
    } = *launch;
    let begin = min(step * u64::from(index), bytes);
    let end = min(begin + step, bytes);
    let first = begin + u64::from(block.thread()) * PIECE;
    let stride = u64::from(block.threads()) * PIECE;
    // SAFETY: the caller's promise; every piece lies before `end`.
    unsafe {
        // The first piece is on its way while the epoch is.
        let mut next = Piece::default();
        if sends > 0 && first < end {
            next = load::<B>(tables.source(0) + first, end - first);
        }
        let meeting = Meeting::read(block, launch, index);
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut mine = begins(epoch);
        if mine.is_ok() && launch.meets & TELLS != 0 {
            meeting.tell(block, launch, epoch, 1);
        }
        let mut at = first;
        while at < end && mine.is_ok() {
            let mut k = 0;
            while k < sends {
                let piece = next;
                // On its way while this one is sent.
                if k + 1 < sends {
                    if tables.source(k + 1) != tables.source(k) {
                        next = load::<B>(tables.source(k + 1) + at, end - at);
                    }
                } else if at + stride < end {
                    let left = end - at - stride;
                    next = load::<B>(tables.source(0) + at + stride, left);
                }
                send_packets(block, tables.target(k) + half, at, piece, flag);
                k += 1;
            }
            at += stride;
        }
        // What waits need to know is there behind this barrier, which takes less time than the packets. In place, what
        // was sent may be written from here on.
        mine = block.sync(mine);
        let arrived = counted(block, counters, epoch, mine);
        // Whoever only sends is done.
        at = if takes > 0 { first } else { end };
        while at < end && mine.is_ok() {
            let left = end - at;
            let look = |k: u32| {
                let from = tables.source(k);
                if tables.peer(k) == launch.rank {
                    let Piece { a, b, c, d } = load::<B>(from + at, left);
                    return [word(a, flag), word(b, flag), word(c, flag), word(d, flag)];
                }
                read_packets(block, from + half, at, left, flag)
            };
            let mut k = sends;
            let mut next = look(k);
            while k < sends + takes {
                let words = next;
                let here = k;
                k += 1;
                if k < sends + takes {
                    // On its way while this one is looked at.
                    next = look(k);
                }
                let site = || Site {
                    kind: WaitKind::Packet,
                    peer: tables.peer(here),
                    channel: here,
                    op: launch.op_index + here - sends,
                };
                let piece = match await_words(block, flag, words, site, || look(here)) {
                    Ok(piece) => piece,
                    Err(stopped) => {
                        mine = Err(stopped);
                        break;
                    }
                };
                store::<B>(tables.target(here) + at, piece, left);
            }
            at += stride;
        }
        if mine.is_ok() && launch.meets & HEARS_END != 0 {
            cold_path();
            mine = meeting.hear(block, launch, epoch, launch.second_wait, 1);
        }
        depart(block, counters, (index, epoch), mine, arrived)
    }
}

/// The same straight between buffers: the ranks meet, [`first`](Hop::first) moves are made, they meet again,
/// [`second`](Hop::second) moves are made, of what must not be written before.
///
/// # Errors
/// As for [`packets`].
///
/// # Safety
/// As for [`packets`].
#[inline(always)]
pub unsafe fn direct<B: Block>(
    block: &B,
    launch: &Hop,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
) -> Result<(), Stopped> {
    let Hop {
        ref counters,
        meets,
        first,
        second,
        ..
    } = *launch;
    // SAFETY: the caller's promise.
    unsafe {
        let meeting = Meeting::read(block, launch, index);
        let mine = begins(epoch);
        let mut told = 0;
        if mine.is_ok() && meets & TELLS != 0 {
            told += 1;
            meeting.tell(block, launch, epoch, told);
        }
        // What waits need to know is there behind this barrier.
        block.sync(mine)?;
        let arrived = arrive(block, counters);
        let mut heard = 0;
        if meets & HEARS != 0 {
            heard += 1;
            block.sync(meeting.hear(block, launch, epoch, launch.first_wait, heard))?;
        }
        moves(block, launch, tables, index, (0, first));
        if meets & TELLS_END != 0 {
            block.sync(Ok(()))?;
            meeting.tell(block, launch, epoch, told + 1);
        }
        let mut mine = Ok(());
        if meets & HEARS_END != 0 {
            mine = meeting.hear(block, launch, epoch, launch.second_wait, heard + 1);
        }
        if second > 0 {
            block.sync(mine)?;
            moves(block, launch, tables, index, (first, first + second));
        }
        mine?;
        advance(block, counters, epoch, arrived);
    }
    Ok(())
}

/// This thread's semaphore of its block's, if it has one.
struct Meeting {
    semaphore: Semaphore,
    /// Signals taken before this launch.
    taken: u64,
}

impl Meeting {
    /// # Safety
    /// As for [`packets`].
    #[inline(always)]
    unsafe fn read<B: Block>(block: &B, launch: &Hop, index: u32) -> Self {
        let memory = block.memory();
        let mut this = Self {
            semaphore: Semaphore::default(),
            taken: 0,
        };
        if launch.meets != 0 && block.thread() < launch.channels {
            let entry = index * launch.channels + block.thread();
            let at = launch.semaphores + u64::from(entry) * size_of::<Semaphore>() as u64;
            // SAFETY: the caller's promise.
            unsafe {
                this.semaphore = memory.read(at);
                // On its way while the signal is.
                this.taken = memory.load(this.semaphore.expected);
            }
        }
        this
    }

    /// Signals; the `number`-th signal of this launch.
    ///
    /// # Safety
    /// As for [`packets`].
    #[inline(always)]
    unsafe fn tell<B: Block>(&self, block: &B, launch: &Hop, epoch: u64, number: u64) {
        if block.thread() < launch.channels {
            // SAFETY: the caller's promise.
            unsafe {
                // Once: it is still there at the second.
                if number == 1 {
                    say(block, &self.semaphore, (epoch, launch.bytes));
                }
                self.semaphore.signal(block);
            }
        }
    }

    /// Waits for the `number`-th signal of this launch.
    ///
    /// # Safety
    /// As for [`packets`].
    #[inline(always)]
    unsafe fn hear<B: Block>(
        &self,
        block: &B,
        launch: &Hop,
        epoch: u64,
        op: u32,
        number: u64,
    ) -> Result<(), Stopped> {
        if block.thread() >= launch.channels {
            return Ok(());
        }
        let (semaphore, wait) = (&self.semaphore, (op, self.taken + number));
        // SAFETY: the caller's promise.
        unsafe {
            if number == 1 {
                return hear(block, semaphore, (epoch, launch.bytes), wait);
            }
            let load = |addr| block.memory().load_acquire(addr);
            semaphore.wait_until(block, op, wait.1, load)
        }
    }
}

/// Moves `from` to `to` of the launch, this block's part of each.
///
/// # Safety
/// As for [`packets`].
#[inline(always)]
unsafe fn moves<B: Block>(
    block: &B,
    launch: &Hop,
    tables: &impl Tables,
    index: u32,
    (from, to): (u32, u32),
) {
    let begin = min(launch.step * u64::from(index), launch.bytes);
    let end = min(begin + launch.step, launch.bytes);
    let mut at = begin + u64::from(block.thread()) * PIECE;
    let stride = u64::from(block.threads()) * PIECE;
    // SAFETY: the caller's promise; every piece lies before `end`.
    unsafe {
        // Links are long: four pieces are on their way at once.
        while at + 3 * stride + PIECE <= end {
            let mut k = from;
            let mut pieces = [Piece::default(); 4];
            let mut last = 0;
            while k < to {
                let source = tables.source(k);
                if source != last {
                    last = source;
                    let of = source + at;
                    pieces = [
                        load16(of),
                        load16(of + stride),
                        load16(of + 2 * stride),
                        load16(of + 3 * stride),
                    ];
                }
                let to = tables.target(k) + at;
                let [a, b, c, d] = pieces;
                store16(to, a);
                store16(to + stride, b);
                store16(to + 2 * stride, c);
                store16(to + 3 * stride, d);
                k += 1;
            }
            at += 4 * stride;
        }
        while at < end {
            let mut k = from;
            let mut piece = Piece::default();
            let mut last = 0;
            while k < to {
                let source = tables.source(k);
                if source != last {
                    last = source;
                    piece = load::<B>(source + at, end - at);
                }
                store::<B>(tables.target(k) + at, piece, end - at);
                k += 1;
            }
            at += stride;
        }
    }
}
