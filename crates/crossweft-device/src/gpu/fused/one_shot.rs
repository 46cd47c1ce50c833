//! A one-shot reduction in one piece: send this rank's input to everybody in packets, reduce what
//! everybody sent.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves, and a half into bytes"
)]

use core::hint::cold_path;

use super::{Tables, begins, counted, depart, late, load, min, read_packets, send_packets, store};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::gpu::OneShot;
use crate::gpu::packets::word;
use crate::gpu::reduce::{Combine, GpuElement, Sum};
use crate::gpu::wide::{PIECE, Piece};
use crate::packet::flag_of;
use crate::wait::{Site, Stopped, WaitKind, wait_for};

/// Runs thread block `index` of a launch that found `epoch`; `launch` without its tables, which are in `tables`.
/// With `SCATTER` each target gets a block of the input of its own, [`origin`](Tables::origin), and this rank's is the launch's
/// `input`; without, all get all of it. Threads return as soon as they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// `block` may be one that is ready behind a barrier. All addresses must be valid, buffers aligned to a [`Piece`]; as for
/// [`run_block`](crate::executor::run_block).
#[inline(always)]
pub unsafe fn run<B: Block, E: GpuElement, const SCATTER: bool>(
    block: &B,
    launch: &OneShot,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise. The usual operation has a text of its own, without the others'.
    unsafe {
        let at = (index, epoch);
        match launch.op {
            ReduceOp::Sum => run_with::<B, E, _, false, SCATTER>(block, launch, tables, at, Sum),
            other => run_with::<B, E, _, true, SCATTER>(block, launch, tables, at, other),
        }
    }
}

/// With `DIVIDES`, perhaps an average.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn run_with<
    B: Block,
    E: GpuElement,
    C: Combine,
    const DIVIDES: bool,
    const SCATTER: bool,
>(
    block: &B,
    launch: &OneShot,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
    combine: C,
) -> Result<(), Stopped> {
    let OneShot {
        input,
        output,
        bytes,
        step,
        ref counters,
        divisor,
        sources,
        targets,
        op_index,
        ..
    } = *launch;
    let begin = min(step * u64::from(index), bytes);
    let end = min(begin + step, bytes);
    let first = begin + u64::from(block.thread()) * PIECE;
    let stride = u64::from(block.threads()) * PIECE;
    // SAFETY: the caller's promise; every piece lies before `end`.
    unsafe {
        // The first piece is on its way while the epoch is.
        let origin = |k| if SCATTER { tables.origin(k) } else { input };
        let mut next = Piece::default();
        if first < end {
            next = load::<B>(origin(0) + first, end - first);
        }
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut mine = begins(epoch);
        let mut at = first;
        while at < end && mine.is_ok() {
            let mut piece = next;
            let here = at;
            at += stride;
            if !SCATTER && at < end {
                next = load::<B>(input + at, end - at);
            }
            let mut k = 0;
            while k < targets {
                if SCATTER {
                    piece = next;
                    // On its way while this one is sent.
                    if k + 1 < targets {
                        next = load::<B>(origin(k + 1) + here, end - here);
                    } else if at < end {
                        next = load::<B>(origin(0) + at, end - at);
                    }
                }
                send_packets(block, tables.target(k) + half, here, piece, flag);
                k += 1;
            }
        }
        // What waits need to know is there behind this barrier, which takes less time than the packets.
        mine = block.sync(mine);
        let is_last = counted(block, counters, epoch, mine);
        at = first;
        while at < end && mine.is_ok() {
            let left = end - at;
            let look = |k: u32| {
                let source = tables.source(k);
                if source == 0 {
                    let Piece { a, b, c, d } = load::<B>(input + at, left);
                    return [word(a, flag), word(b, flag), word(c, flag), word(d, flag)];
                }
                read_packets(block, source + half, at, left, flag)
            };
            let mut lanes = E::unpack(Piece::default());
            let mut k = 0;
            let mut next = look(0);
            while k < sources {
                let mut seen = next;
                if k + 1 < sources {
                    // On its way while this one is looked at.
                    next = look(k + 1);
                }
                if late(seen, flag).is_some() {
                    let site = Site {
                        kind: WaitKind::Packet,
                        peer: tables.peer(k),
                        channel: k,
                        op: op_index,
                    };
                    let again = || {
                        seen = look(k);
                        // Which is late matters to nobody but an error message.
                        late(seen, flag).unwrap_or(seen[0]).rotate_left(32)
                    };
                    let arrived = wait_for(block, site, u64::from(flag), again, |late| {
                        late as u32 == flag
                    });
                    if let Err(stopped) = arrived {
                        mine = Err(stopped);
                        break;
                    }
                }
                let [a, b, c, d] = seen.map(|word| word as u32);
                let lanes_of = E::unpack(Piece { a, b, c, d });
                lanes = if k == 0 {
                    lanes_of
                } else {
                    combine.combine::<E>(lanes, lanes_of)
                };
                k += 1;
            }
            if mine.is_ok() {
                if DIVIDES && divisor != 0 {
                    cold_path();
                    lanes = E::map(lanes, |acc| E::div(acc, divisor));
                }
                store::<B>(output + at, E::pack(lanes), end - at);
            }
            at += stride;
        }
        depart(block, counters, (index, epoch), mine, is_last)
    }
}
