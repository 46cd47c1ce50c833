//! A one-shot reduction in one piece: send this rank's input to everybody in packets, reduce what
//! everybody sent.
//!
//! It is what the executor does with a plan of these two operations, with nothing to look up and little
//! code, which is most of what a small message costs. Packets, their places, the epoch and the order of
//! the reduction are the plan's, so ranks that run it and ranks that run the executor can meet.

use super::FusedLaunch;
use super::packets::{flag_in, word};
use super::reduce::{Combine, GpuElement, Sum};
use super::wide::{PIECE, Piece, load16, store16};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::executor::leave;
use crate::memory::Memory;
use crate::packet::{PAYLOAD, WORD, flag_of};
use crate::wait::{Site, Stopped, WaitKind, wait_for};

/// The tables of a [`FusedLaunch`], wherever they are.
pub trait FusedTables {
    /// Where the packets for target `k` go, in the first half.
    fn target(&self, k: u32) -> u64;
    /// Where source `k` sends its packets, in the first half; 0 for this rank's input.
    fn source(&self, k: u32) -> u64;
    /// The rank that source `k` is.
    fn peer(&self, k: u32) -> u32;
}

/// Runs thread block `index` of a launch; `launch` without its tables, which are in `tables`.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// All addresses must be valid, buffers aligned to a [`Piece`], the size a multiple of one; as for
/// [`run_block`](crate::executor::run_block).
#[inline(always)]
pub unsafe fn run<B: Block, E: GpuElement>(
    block: &B,
    launch: &FusedLaunch,
    tables: &impl FusedTables,
    index: u32,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise. The usual operation has a text of its own, without the others'.
    unsafe {
        match launch.op {
            ReduceOp::Sum | ReduceOp::Avg => run_with::<B, E, _>(block, launch, tables, index, Sum),
            other => run_with::<B, E, _>(block, launch, tables, index, other),
        }
    }
}

/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn run_with<B: Block, E: GpuElement, C: Combine>(
    block: &B,
    launch: &FusedLaunch,
    tables: &impl FusedTables,
    index: u32,
    combine: C,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let FusedLaunch {
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
        let epoch = memory.load(counters.epoch);
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut at = first;
        while at < end {
            let Piece { a, b, c, d } = load16(input + at);
            let mut k = 0;
            while k < targets {
                let to = tables.target(k) + half + at * (WORD / PAYLOAD);
                memory.store_pair(to, [word(a, flag), word(b, flag)]);
                memory.store_pair(to + 2 * WORD, [word(c, flag), word(d, flag)]);
                k += 1;
            }
            at += stride;
        }
        let mut mine = Ok(());
        at = first;
        while at < end && mine.is_ok() {
            let load = |k: u32| {
                let source = tables.source(k);
                if source == 0 {
                    let Piece { a, b, c, d } = load16(input + at);
                    return [word(a, flag), word(b, flag), word(c, flag), word(d, flag)];
                }
                let from = source + half + at * (WORD / PAYLOAD);
                let ([a, b], [c, d]) = (memory.load_pair(from), memory.load_pair(from + 2 * WORD));
                [a, b, c, d]
            };
            let mut lanes = E::unpack(Piece::default());
            let mut k = 0;
            let mut next = load(0);
            while k < sources {
                let mut words = next;
                if k + 1 < sources {
                    // On its way while this one is looked at.
                    next = load(k + 1);
                }
                if late(words, flag).is_some() {
                    let site = Site {
                        kind: WaitKind::Packet,
                        peer: tables.peer(k),
                        channel: k,
                        op: op_index,
                    };
                    let look = || {
                        words = load(k);
                        // Which is late matters to nobody but an error message.
                        late(words, flag).unwrap_or(words[0]).rotate_left(32)
                    };
                    let arrived = wait_for(block, site, u64::from(flag), look, |seen| {
                        seen as u32 == flag
                    });
                    if let Err(stopped) = arrived {
                        mine = Err(stopped);
                        break;
                    }
                }
                let [a, b, c, d] = words.map(|word| word as u32);
                let lanes_of = E::unpack(Piece { a, b, c, d });
                lanes = if k == 0 {
                    lanes_of
                } else {
                    combine.combine::<E>(lanes, lanes_of)
                };
                k += 1;
            }
            if mine.is_ok() {
                if divisor != 0 {
                    lanes = E::map(lanes, |acc| E::div(acc, divisor));
                }
                store16(output + at, E::pack(lanes));
            }
            at += stride;
        }
        block.sync(mine)?;
        leave(block, counters, epoch, index)
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

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
