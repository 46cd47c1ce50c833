//! A one-shot reduction in one piece, for messages of more than a few packets: the same with [lines] instead
//! of packets. All ranks take the same of the two; buffers may lie anywhere.

use core::hint::cold_path;

use super::{Tables, begins, counted, depart, load_part, min, store_part};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::gpu::OneShot;
use crate::gpu::lines::{self, LANES, PAIR, PAIR_PAYLOAD};
use crate::gpu::packets::word;
use crate::gpu::reduce::{Combine, GpuElement, Sum};
use crate::gpu::wide::{PIECE, Piece, load16, store16};
use crate::packet::flag_of;
use crate::wait::{Site, Stopped, WaitKind};

/// Runs thread block `index` of a launch that found `epoch`; `launch` without its tables, which are in `tables`.
/// Threads return as soon as they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// `block` may be one that is ready behind a barrier, of whole warps. All addresses must be valid, packet memory aligned to a
/// pair of lines, shares multiples of [`PAIR_PAYLOAD`]; as for [`run_block`](crate::executor::run_block).
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
    let thread = block.thread();
    let lane = thread % LANES;
    let begin = min(step * u64::from(index), bytes);
    let end = min(begin + step, bytes);
    let aligned = (input | output).is_multiple_of(PIECE);
    // What the warp's first lane has, and how much further this one's pair is: a warp goes through its rounds together.
    let of_warp = |thread: u32| u64::from(thread / 32 * 32 / LANES) * PAIR_PAYLOAD;
    let first = begin + of_warp(thread);
    let ahead = u64::from(thread % 32 / LANES);
    let stride = u64::from(block.threads() / LANES) * PAIR_PAYLOAD;
    let line = (first / PAIR_PAYLOAD + ahead) * PAIR;
    // Each lane has two pieces of a pair, but the last.
    let (near, far) = (
        ahead * PAIR_PAYLOAD + u64::from(lane) * PIECE,
        ahead * PAIR_PAYLOAD + u64::from(LANES + lane) * PIECE,
    );
    let has_far = lane != LANES - 1;
    // SAFETY: the caller's promise; no piece reaches beyond the end.
    unsafe {
        // Whether all of this lane's pair, in the round that begins at `at`, is there and aligned; and how much of the
        // piece at `place` is there.
        let is_whole = |at: u64| aligned && at + (ahead + 1) * PAIR_PAYLOAD <= end;
        let part = |at: u64, place: u64| match place == far && !has_far {
            true => 0,
            false => min(end.saturating_sub(at + place), PIECE),
        };
        let own = |at: u64| {
            let mut pieces = [Piece::default(); 2];
            if is_whole(at) {
                pieces[0] = load16(input + at + near);
                if has_far {
                    pieces[1] = load16(input + at + far);
                }
            } else if at + ahead * PAIR_PAYLOAD < end {
                cold_path();
                let load = |place| load_part::<B>(input + at + place, part(at, place));
                pieces = [Piece::of(load(near)), Piece::of(load(far))];
            }
            pieces
        };
        // The first pieces are on their way while the epoch is.
        let mut next = own(first);
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut mine = begins(epoch);
        let (mut at, mut to) = (first, half + line);
        while at < end && mine.is_ok() {
            let pieces = next;
            let this = (lane, at + ahead * PAIR_PAYLOAD < end);
            at += stride;
            next = own(at);
            let mut k = 0;
            while k < targets {
                lines::store(block, this, tables.target(k) + to, pieces, flag);
                k += 1;
            }
            to += stride / PAIR_PAYLOAD * PAIR;
        }
        // What waits need to know is there behind this barrier, which takes less time than the lines.
        mine = block.sync(mine);
        let arrived = counted(block, counters, epoch, mine);
        let (mut at, mut from) = (first, half + line);
        while at < end && mine.is_ok() {
            let this = (lane, at + ahead * PAIR_PAYLOAD < end);
            let ours = own(at);
            let fetch = |k: u32| match tables.source(k) {
                0 => ours,
                source => lines::fetch(block, this, source + from),
            };
            let zero = E::unpack(Piece::default());
            let mut lanes = (zero, zero);
            let mut next = fetch(0);
            let mut k = 0;
            while k < sources {
                let mut seen = next;
                if k + 1 < sources {
                    // On its way while this one is looked at.
                    next = fetch(k + 1);
                }
                let source = tables.source(k);
                if source != 0 {
                    let site = Site {
                        kind: WaitKind::Packet,
                        peer: tables.peer(k),
                        channel: k,
                        op: op_index,
                    };
                    mine = lines::arrival(block, this, source + from, &mut seen, (flag, site));
                    if mine.is_err() {
                        break;
                    }
                }
                let now = (E::unpack(seen[0]), E::unpack(seen[1]));
                lanes = if k == 0 {
                    now
                } else {
                    (
                        combine.combine::<E>(lanes.0, now.0),
                        combine.combine::<E>(lanes.1, now.1),
                    )
                };
                k += 1;
            }
            if mine.is_ok() {
                if DIVIDES && divisor != 0 {
                    cold_path();
                    let divide = |lanes| E::map(lanes, |acc| E::div(acc, divisor));
                    lanes = (divide(lanes.0), divide(lanes.1));
                }
                let results = [E::pack(lanes.0), E::pack(lanes.1)];
                if is_whole(at) {
                    store16(output + at + near, results[0]);
                    if has_far {
                        store16(output + at + far, results[1]);
                    }
                } else {
                    cold_path();
                    let store = |place, Piece { a, b, c, d }| {
                        let (low, high) = (word(a, b), word(c, d));
                        store_part::<B>(output + at + place, low, high, part(at, place));
                    };
                    store(near, results[0]);
                    store(far, results[1]);
                }
            }
            at += stride;
            from += stride / PAIR_PAYLOAD * PAIR;
        }
        depart(block, counters, (index, epoch), mine, arrived)
    }
}
