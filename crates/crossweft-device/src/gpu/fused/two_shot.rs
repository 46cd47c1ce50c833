//! A two-shot reduction in one piece: meet the others, reduce this rank's chunk of all inputs into all
//! outputs, meet again.

use super::{Tables, begins, hear, load, min, say, store};
use crate::block::Block;
use crate::dtype::ReduceOp;
use crate::executor::{advance, arrive};
use crate::gpu::TwoShot;
use crate::gpu::reduce::{Combine, GpuElement, Sum};
use crate::gpu::wide::{PIECE, Piece, load16, store16};
use crate::memory::Memory;
use crate::semaphore::Semaphore;
use crate::wait::Stopped;

/// Runs thread block `index` of a launch that found `epoch`; `launch` without its tables, which are in `tables`.
/// Threads return as soon as they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`] when the wait hook ends a wait, as for
/// [`run_block`](crate::executor::run_block).
///
/// # Safety
/// `block` may be one that is ready behind a barrier. All addresses must be valid, buffers aligned to a
/// [`Piece`]; a block has a thread for each other rank; as for
/// [`run_block`](crate::executor::run_block).
#[inline(always)]
pub unsafe fn run<B: Block, E: GpuElement>(
    block: &B,
    launch: &TwoShot,
    tables: &impl Tables,
    (index, epoch): (u32, u64),
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise. The usual operation has a text of its own, without the others'.
    unsafe {
        let memory = block.memory();
        let mut semaphore = Semaphore::default();
        let mut taken = 0;
        if block.thread() < launch.peers {
            let entry = index * launch.peers + block.thread();
            let size = size_of::<Semaphore>() as u64;
            semaphore = memory.read(launch.semaphores + u64::from(entry) * size);
            // On its way while the signal is.
            taken = memory.load(semaphore.expected);
        }
        let meets = block.thread() < launch.peers;
        let mine = begins(epoch);
        if mine.is_ok() && meets {
            say(block, &semaphore, (epoch, launch.bytes));
            semaphore.signal(block);
        }
        // What waits need to know is there behind this barrier.
        block.sync(mine)?;
        let arrived = arrive(block, &launch.counters);
        let mut heard = Ok(());
        if meets {
            let first = (launch.first_wait, taken + 1);
            heard = hear(block, &semaphore, (epoch, launch.bytes), first);
        }
        block.sync(heard)?;
        match launch.op {
            ReduceOp::Sum => {
                reduce::<B, E, _, true>(block, launch, tables, index, Sum);
            }
            other => reduce::<B, E, _, false>(block, launch, tables, index, other),
        }
        block.sync(Ok(()))?;
        // What call this is was said and heard at the beginning.
        if meets {
            semaphore.signal(block);
            let load = |addr| block.memory().load_acquire(addr);
            semaphore.wait_until(block, launch.second_wait, taken + 2, load)?;
        }
        advance(block, &launch.counters, epoch, arrived);
        Ok(())
    }
}

/// A `SUM`, as usual, takes more than a piece at a time, and divides nothing.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn reduce<B: Block, E: GpuElement, C: Combine, const SUM: bool>(
    block: &B,
    launch: &TwoShot,
    tables: &impl Tables,
    index: u32,
    combine: C,
) {
    let TwoShot {
        begin,
        end,
        step,
        divisor,
        sources,
        targets,
        ..
    } = *launch;
    let begin = min(begin + step * u64::from(index), end);
    let end = min(begin + step, end);
    let mut at = begin + u64::from(block.thread()) * PIECE;
    let stride = u64::from(block.threads()) * PIECE;
    let finish = |lanes| {
        E::pack(if SUM || divisor == 0 {
            lanes
        } else {
            E::map(lanes, |acc| E::div(acc, divisor))
        })
    };
    // SAFETY: the caller's promise; every piece lies before `end`, and is read from everybody before it is
    // written to anybody.
    unsafe {
        // Links are long: four pieces of two sources are on their way at once; of bytes, which are summed as words four times
        // their size, that is more than there are registers.
        while SUM && sources > 1 && size_of::<E>() > 1 && at + 3 * stride + PIECE <= end {
            let four = |k: u32| {
                let from = tables.source(k) + at;
                (two(from, stride), two(from + 2 * stride, stride))
            };
            let sum = |a, b| add4::<E, C>(combine, a, b);
            let (first, second) = (four(0), four(1));
            let mut lanes = sum(unpack4::<E>(first), second);
            let mut k = 2;
            while k + 1 < sources {
                let (now, next) = (four(k), four(k + 1));
                lanes = sum(sum(lanes, now), next);
                k += 2;
            }
            if k < sources {
                lanes = sum(lanes, four(k));
            }
            let ((l0, l1), (l2, l3)) = lanes;
            let (a, b, c, d) = (finish(l0), finish(l1), finish(l2), finish(l3));
            let mut k = 0;
            while k < targets {
                let to = tables.target(k) + at;
                store16(to, a);
                store16(to + stride, b);
                store16(to + 2 * stride, c);
                store16(to + 3 * stride, d);
                k += 1;
            }
            at += 4 * stride;
        }
        // Two, of what is left.
        while SUM && sources > 1 && at + stride + PIECE <= end {
            let of = |k: u32| two(tables.source(k) + at, stride);
            let (first, second) = (of(0), of(1));
            let mut lanes = add::<E, C>(combine, unpack::<E>(first), second);
            let mut k = 2;
            while k + 1 < sources {
                let (now, next) = (of(k), of(k + 1));
                lanes = add::<E, C>(combine, add::<E, C>(combine, lanes, now), next);
                k += 2;
            }
            if k < sources {
                lanes = add::<E, C>(combine, lanes, of(k));
            }
            let (a, b) = (finish(lanes.0), finish(lanes.1));
            let mut k = 0;
            while k < targets {
                let to = tables.target(k) + at;
                store16(to, a);
                store16(to + stride, b);
                k += 1;
            }
            at += 2 * stride;
        }
        while at < end {
            let mut next = load::<B>(tables.source(0) + at, end - at);
            let mut lanes = E::unpack(Piece::default());
            let mut k = 0;
            while k < sources {
                let now = next;
                if k + 1 < sources {
                    next = load::<B>(tables.source(k + 1) + at, end - at);
                }
                let now = E::unpack(now);
                lanes = if k == 0 {
                    now
                } else {
                    combine.combine::<E>(lanes, now)
                };
                k += 1;
            }
            let piece = finish(lanes);
            let mut k = 0;
            while k < targets {
                store::<B>(tables.target(k) + at, piece, end - at);
                k += 1;
            }
            at += stride;
        }
    }
}

/// # Safety
/// Both pieces must be aligned and valid.
#[inline(always)]
unsafe fn two(from: u64, stride: u64) -> (Piece, Piece) {
    // SAFETY: the caller's promise.
    unsafe { (load16(from), load16(from + stride)) }
}

type Two<T> = (T, T);

#[inline(always)]
fn unpack<E: GpuElement>((a, b): Two<Piece>) -> Two<E::Lanes> {
    (E::unpack(a), E::unpack(b))
}

#[inline(always)]
fn unpack4<E: GpuElement>((a, b): Two<Two<Piece>>) -> Two<Two<E::Lanes>> {
    (unpack::<E>(a), unpack::<E>(b))
}

/// Two pieces more of a sum.
#[inline(always)]
fn add<E: GpuElement, C: Combine>(
    combine: C,
    lanes: Two<E::Lanes>,
    pieces: Two<Piece>,
) -> Two<E::Lanes> {
    let now = unpack::<E>(pieces);
    (
        combine.combine::<E>(lanes.0, now.0),
        combine.combine::<E>(lanes.1, now.1),
    )
}

/// Four pieces more of a sum.
#[inline(always)]
fn add4<E: GpuElement, C: Combine>(
    combine: C,
    lanes: Two<Two<E::Lanes>>,
    pieces: Two<Two<Piece>>,
) -> Two<Two<E::Lanes>> {
    (
        add::<E, C>(combine, lanes.0, pieces.0),
        add::<E, C>(combine, lanes.1, pieces.1),
    )
}
