//! A one-shot reduction in one piece: send this rank's input to everybody in packets, reduce what
//! everybody sent.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves, and a half into bytes"
)]

use core::hint::cold_path;

use super::{
    Tables, await_words, begins, counted, depart, load_part, min, read_packets, send_packets,
    store_part,
};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::gpu::OneShot;
use crate::gpu::packets::word;
use crate::gpu::reduce::{Combine, GpuElement, Sum};
use crate::gpu::wide::{PIECE, Piece, load16, opaque, store16};
use crate::packet::flag_of;
use crate::wait::{Site, Stopped, WaitKind};

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
        targets,
        ..
    } = *launch;
    let begin = min(step * u64::from(index), bytes);
    let end = min(begin + step, bytes);
    // Behind the last whole piece. What is left, which few messages have, has code of its own, out of the way. Blocks that go to
    // different ranks are whole: they all lie aligned.
    let whole = if SCATTER {
        end
    } else {
        end - (end - begin) % PIECE
    };
    let first = begin + u64::from(block.thread()) * PIECE;
    let stride = u64::from(block.threads()) * PIECE;
    // SAFETY: the caller's promise; every piece lies before `end`.
    unsafe {
        // The first piece is on its way while the epoch is.
        let origin = |k| if SCATTER { tables.origin(k) } else { input };
        let mut next = Piece::default();
        if first < whole {
            next = load16(origin(0) + first);
        }
        let flag = flag_of(epoch, bytes);
        let half = (epoch & 1) * counters.packets_half;
        let mut mine = begins(epoch);
        let mut at = first;
        while at < whole && mine.is_ok() {
            let mut piece = next;
            let here = at;
            at += stride;
            if !SCATTER && at < whole {
                next = load16(input + at);
            }
            let mut k = 0;
            while k < targets {
                if SCATTER {
                    piece = next;
                    // On its way while this one is sent.
                    if k + 1 < targets {
                        next = load16(origin(k + 1) + here);
                    } else if at < whole {
                        next = load16(origin(0) + at);
                    }
                }
                send_packets(block, tables.target(k) + half, here, piece, flag);
                // Unrolled, it would be more code to fetch.
                k = opaque(k + 1);
            }
        }
        // The thread whose turn it is has what is left.
        if at < end && mine.is_ok() {
            cold_path();
            let piece = Piece::of(load_part::<B>(input + at, end - at));
            let mut k = 0;
            while k < targets {
                send_packets(block, tables.target(k) + half, at, piece, flag);
                k = opaque(k + 1);
            }
        }
        // What waits need to know is there behind this barrier, which takes less time than the packets.
        mine = block.sync(mine);
        let arrived = counted(block, counters, epoch, mine);
        at = first;
        let gather = Gather {
            input,
            end,
            half,
            flag,
            sources: launch.sources,
            op_index: launch.op_index,
            divisor: launch.divisor,
        };
        // Between two ranks one packet comes from elsewhere, so there is no other to ask for ahead.
        if launch.sources <= 2 {
            while at < whole && mine.is_ok() {
                match gather.piece::<B, E, C, DIVIDES, true, false>(block, tables, at, combine) {
                    Ok(piece) => store16(output + at, piece),
                    Err(stopped) => mine = Err(stopped),
                }
                at += stride;
            }
        }
        // Behind the other and not in one with it: code in its way costs it 5 %.
        while at < whole && mine.is_ok() {
            match gather.piece::<B, E, C, DIVIDES, true, true>(block, tables, at, combine) {
                Ok(piece) => store16(output + at, piece),
                Err(stopped) => mine = Err(stopped),
            }
            at += stride;
        }
        if at < end && mine.is_ok() {
            cold_path();
            match gather.piece::<B, E, C, DIVIDES, false, false>(block, tables, at, combine) {
                Ok(Piece { a, b, c, d }) => {
                    store_part::<B>(output + at, word(a, b), word(c, d), end - at);
                }
                Err(stopped) => mine = Err(stopped),
            }
        }
        depart(block, counters, (index, epoch), mine, arrived)
    }
}

/// What it takes to gather pieces, by value: a launch that is passed on by address would lie in memory of the thread's own.
#[derive(Clone, Copy)]
struct Gather {
    input: u64,
    end: u64,
    half: u64,
    flag: u32,
    sources: u32,
    op_index: u32,
    divisor: u32,
}

impl Gather {
    /// The piece at `at` of all sources, reduced. `WHOLE` if it lies before the end. With `AHEAD`, which is worth it from three
    /// sources on, the next one is asked for before one is looked at.
    ///
    /// # Errors
    /// As for [`run`].
    ///
    /// # Safety
    /// As for [`run`].
    #[inline(always)]
    unsafe fn piece<
        B: Block,
        E: GpuElement,
        C: Combine,
        const DIVIDES: bool,
        const WHOLE: bool,
        const AHEAD: bool,
    >(
        self,
        block: &B,
        tables: &impl Tables,
        at: u64,
        combine: C,
    ) -> Result<Piece, Stopped> {
        let Self {
            input,
            end,
            half,
            flag,
            sources,
            op_index,
            divisor,
        } = self;
        let left = if WHOLE { PIECE } else { end - at };
        // SAFETY: the caller's promise.
        let packets =
            move |source: u64| unsafe { read_packets(block, source + half, at, left, flag) };
        // SAFETY: as above.
        let own = move || unsafe {
            if WHOLE {
                load16(input + at)
            } else {
                Piece::of(load_part::<B>(input + at, left))
            }
        };
        // Its words, as packets have them.
        let look = move |k: u32| match tables.source(k) {
            0 => {
                let Piece { a, b, c, d } = own();
                [word(a, flag), word(b, flag), word(c, flag), word(d, flag)]
            }
            source => packets(source),
        };
        let mut lanes = E::unpack(Piece::default());
        let mut next = if AHEAD { look(0) } else { [0; 4] };
        let mut k = 0;
        while k < sources {
            let site = move || Site {
                kind: WaitKind::Packet,
                peer: tables.peer(k),
                channel: k,
                op: op_index,
            };
            let piece = if AHEAD {
                let words = next;
                if k + 1 < sources {
                    next = look(k + 1);
                }
                await_words(block, flag, words, site, move || look(k))?
            } else {
                match tables.source(k) {
                    0 => own(),
                    source => {
                        let look = move || packets(source);
                        await_words(block, flag, look(), site, look)?
                    }
                }
            };
            let now = E::unpack(piece);
            lanes = if k == 0 {
                now
            } else {
                combine.combine::<E>(lanes, now)
            };
            k += 1;
        }
        if DIVIDES && divisor != 0 {
            cold_path();
            lanes = E::map(lanes, |acc| E::div(acc, divisor));
        }
        Ok(E::pack(lanes))
    }
}
