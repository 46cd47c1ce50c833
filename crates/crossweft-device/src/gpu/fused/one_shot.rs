//! A one-shot reduction in one piece: send this rank's input to everybody in packets, reduce what
//! everybody sent.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves, and a half into bytes"
)]

use core::hint::cold_path;

use super::{Tables, begins, counted, depart, load, min, store};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::gpu::OneShot;
use crate::gpu::packets::{flag_in, word};
use crate::gpu::reduce::{Combine, GpuElement, Sum};
use crate::gpu::wide::{PIECE, Piece};
use crate::memory::Memory;
use crate::packet::{PAYLOAD, WORD, flag_of};
use crate::wait::{Site, Stopped, WaitKind, wait_for};

/// Runs thread block `index` of a launch that found `epoch`; `launch` without its tables, which are in `tables`.
/// Threads return as soon as they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// `block` may be one that is ready behind a barrier. All addresses must be valid, buffers aligned to a [`Piece`]; as for
/// [`run_block`](crate::executor::run_block).
#[inline(always)]
pub unsafe fn run<B: Block, E: GpuElement>(
    block: &B,
    launch: &OneShot,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise. The usual operation has a text of its own, without the others'.
    unsafe {
        let at = (index, epoch);
        match launch.op {
            ReduceOp::Sum => run_with::<B, E, _, false>(block, launch, tables, at, Sum),
            other => run_with::<B, E, _, true>(block, launch, tables, at, other),
        }
    }
}

/// With `DIVIDES`, perhaps an average.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn run_with<B: Block, E: GpuElement, C: Combine, const DIVIDES: bool>(
    block: &B,
    launch: &OneShot,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
    combine: C,
) -> Result<(), Stopped> {
    let memory = block.memory();
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
        let mut next = Piece::default();
        if first < end {
            next = load::<B>(input + first, end - first);
        }
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut mine = begins(epoch);
        let mut at = first;
        while at < end && mine.is_ok() {
            let Piece { a, b, c, d } = next;
            let here = at;
            at += stride;
            if at < end {
                next = load::<B>(input + at, end - at);
            }
            let mut k = 0;
            while k < targets {
                let to = tables.target(k) + half + here * (WORD / PAYLOAD);
                memory.store_pair(to, [word(a, flag), word(b, flag)]);
                memory.store_pair(to + 2 * WORD, [word(c, flag), word(d, flag)]);
                k += 1;
            }
        }
        // What waits need to know is there behind this barrier, which takes less time than the packets.
        mine = block.sync(mine);
        let is_last = counted(block, counters, epoch, mine);
        at = first;
        while at < end && mine.is_ok() {
            let whole = end - at >= PIECE;
            let none = word(0, flag);
            let look = |k: u32| {
                let source = tables.source(k);
                if source == 0 {
                    let Piece { a, b, c, d } = load::<B>(input + at, end - at);
                    return [word(a, flag), word(b, flag), word(c, flag), word(d, flag)];
                }
                let from = source + half + at * (WORD / PAYLOAD);
                let ([a, b], [c, d]) = (memory.load_pair(from), memory.load_pair(from + 2 * WORD));
                if whole {
                    return [a, b, c, d];
                }
                cold_path();
                // Words that the message does not reach have arrived.
                let words = (end - at).div_ceil(PAYLOAD);
                [
                    a,
                    if words > 1 { b } else { none },
                    if words > 2 { c } else { none },
                    if words > 3 { d } else { none },
                ]
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

/// A word that has not arrived, if there is one.
#[inline(always)]
fn late([a, b, c, d]: [u64; 4], flag: u32) -> Option<u64> {
    let arrived = |word| flag_in(word) == flag;
    match (arrived(a), arrived(b), arrived(c), arrived(d)) {
        (true, true, true, true) => None,
        (false, ..) => Some(a),
        (_, false, ..) => Some(b),
        (_, _, false, _) => Some(c),
        _ => Some(d),
    }
}
