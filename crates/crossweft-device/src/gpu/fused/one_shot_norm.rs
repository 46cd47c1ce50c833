//! A one-shot sum in one piece, and what becomes of its tokens ([`crate::gpu::norm`]): thread blocks take whole tokens, so
//! that what a token is divided by is known in the block that has it.
//!
//! Packets lie where [`one_shot`](super::one_shot) has them, so a rank that normalises in a kernel of its own can meet one
//! that runs this.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves"
)]

use super::{Tables, await_words, begins, counted, depart};
use crate::block::Block;
use crate::gpu::norm::{At, NormElement, SLOT_BYTES, fetch, token};
use crate::gpu::packets::word;
use crate::gpu::reduce::GpuElement;
use crate::gpu::wide::{PIECE, Piece, load16};
use crate::gpu::{OneShot, OneShotNorm};
use crate::memory::Memory;
use crate::packet::{PAYLOAD, WORD, flag_of};
use crate::wait::{Site, Stopped, WaitKind};

/// Memory that the threads of a block share.
#[derive(Clone, Copy, Debug)]
pub struct Near {
    /// Room for a token, aligned to a [`Piece`].
    pub stage: u64,
    /// Twice [`SLOT_BYTES`] bytes, aligned to 4.
    pub slots: u64,
}

/// Runs thread block `index` of a launch that found `epoch`; `launch` without its tables, which are in `tables`.
/// Threads return as soon as they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// As for [`one_shot::run`](super::one_shot::run) and [`token`]; `near` is used for nothing else.
#[inline(always)]
pub unsafe fn run<B: Block, E: NormElement<Packed = Piece> + GpuElement>(
    block: &B,
    launch: &OneShotNorm,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
    near: Near,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let OneShot {
        input,
        bytes,
        ref counters,
        sources,
        targets,
        op_index,
        ..
    } = launch.one_shot;
    let of_token = u64::from(launch.norm.hidden) * size_of::<E>() as u64;
    let begin = u64::from(index) * of_token;
    // To the block's next token.
    let step = counters.blocks * of_token;
    let first = u64::from(block.thread()) * PIECE;
    let stride = u64::from(block.threads()) * PIECE;
    // SAFETY: the caller's promise; every piece lies in a token, and tokens before the end.
    unsafe {
        if begin < bytes {
            fetch::<B, E>(block, &launch.norm, index);
        }
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut mine = begins(epoch);
        let mut row = begin;
        while row < bytes && mine.is_ok() {
            let mut at = first;
            while at < of_token {
                let Piece { a, b, c, d } = load16(input + row + at);
                let mut k = 0;
                while k < targets {
                    let to = tables.target(k) + half + (row + at) * (WORD / PAYLOAD);
                    memory.store_pair(to, [word(a, flag), word(b, flag)]);
                    memory.store_pair(to + 2 * WORD, [word(c, flag), word(d, flag)]);
                    k += 1;
                }
                at += stride;
            }
            row += step;
        }
        // What waits need to know is there behind this barrier, which takes less time than the packets.
        mine = block.sync(mine);
        let arrived = counted(block, counters, epoch, mine);
        let mut at = At {
            token: index,
            slots: near.slots,
            stage: near.stage,
        };
        row = begin;
        while row < bytes && mine.is_ok() {
            let summed = |at: u64| {
                let look = |k: u32| match tables.source(k) {
                    0 => {
                        let Piece { a, b, c, d } = load16(input + row + at);
                        [word(a, flag), word(b, flag), word(c, flag), word(d, flag)]
                    }
                    source => {
                        let from = source + half + (row + at) * (WORD / PAYLOAD);
                        let [a, b] = memory.load_pair(from);
                        let [c, d] = memory.load_pair(from + 2 * WORD);
                        [a, b, c, d]
                    }
                };
                let mut lanes = <E as GpuElement>::unpack(Piece::default());
                let mut next = look(0);
                let mut k = 0;
                while k < sources {
                    let words = next;
                    if k + 1 < sources {
                        // On its way while this one is looked at.
                        next = look(k + 1);
                    }
                    let site = || Site {
                        kind: WaitKind::Packet,
                        peer: tables.peer(k),
                        channel: k,
                        op: op_index,
                    };
                    let piece = await_words(block, flag, words, site, || look(k))?;
                    let now = <E as GpuElement>::unpack(piece);
                    lanes = match k {
                        0 => now,
                        _ => E::zip(lanes, now, |sum, x| sum + x),
                    };
                    k += 1;
                }
                Ok(<E as GpuElement>::pack(lanes))
            };
            mine = token::<B, E, true>(block, &launch.norm, at, summed);
            at.token += counters.blocks as u32;
            // The next token's threads may be there before the last of this one's has read what they share.
            at.slots = near.slots + (at.slots == near.slots) as u64 * SLOT_BYTES as u64;
            row += step;
        }
        depart(block, counters, (index, epoch), mine, arrived)
    }
}
