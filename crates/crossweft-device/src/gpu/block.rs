//! A thread of a GPU's thread block.

use core::marker::PhantomData;

use super::machine::{
    barrier_max, block_x, claim, exchange, opaque, ready, thread, threads, time_ns, vote_any,
    warp_sync,
};
use super::{GpuContext, StatusRecord, WARP};
use crate::block::Block;
use crate::memory::{Memory, Raw};
use crate::packet::is_of_other_size;
use crate::wait::{Site, Stopped, WaitKind, Waiting};

/// Looks at a condition between two looks at the clock and the host: 0.5 to 1 ms. The abort word
/// lies across the bus, and every waiting warp reads it.
const PATIENCE: u32 = 1024;

/// What the threads of a block share about their launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockState {
    /// When waits end; 0 until one of them has lasted.
    end: u64,
    /// See [`GpuContext::limit_ns`].
    limit: u64,
    /// See [`GpuContext::abort`].
    abort: u64,
    /// See [`GpuContext::status`].
    status: u64,
    /// Whose kernel it is.
    rank: u32,
    reserved: u32,
}

/// Shared memory that a kernel has set aside.
pub trait Shared {
    /// Where the block's state is.
    fn state() -> *mut BlockState;
}

/// A thread of a GPU's thread block. It holds nothing itself: what is passed by reference from
/// function to function would lie in local memory.
#[derive(Clone, Copy, Debug)]
pub struct GpuBlock<S>(PhantomData<S>);

impl<S: Shared> GpuBlock<S> {
    /// Of a thread block of `rank`. All threads of the block call it.
    ///
    /// # Safety
    /// The context's addresses must be valid, and `S` give memory that nothing else uses.
    #[inline(always)]
    #[must_use]
    pub unsafe fn begin(context: &GpuContext, rank: u32) -> Self {
        // SAFETY: the caller's promise.
        let this = unsafe { Self::open(context, rank) };
        let _ = barrier_max::<0>(0);
        this
    }

    /// [`begin`](Self::begin) for a kernel that has a barrier to come before anybody waits.
    ///
    /// # Safety
    /// As there, and the block must meet at a barrier before it uses this.
    #[inline(always)]
    #[must_use]
    pub unsafe fn open(context: &GpuContext, rank: u32) -> Self {
        if thread() == 0 {
            let state = BlockState {
                end: 0,
                limit: context.limit_ns,
                abort: context.abort,
                status: context.status,
                rank,
                reserved: 0,
            };
            // SAFETY: the caller's promise; nobody else uses it before a barrier.
            unsafe {
                S::state().write(state);
                ready();
            }
        }
        Self(PhantomData)
    }

    /// When waits end. The clock, which takes a quarter of a microsecond to read, starts when the
    /// first wait has lasted: the first thread that comes here decides for all.
    ///
    /// # Safety
    /// As for [`begin`](Self::begin).
    unsafe fn end(now: u64) -> u64 {
        // SAFETY: the caller's promise; behind the barrier, `end` is only accessed here.
        unsafe {
            let state = S::state();
            let mine = match (*state).limit {
                0 => u64::MAX,
                limit => now.saturating_add(limit),
            };
            match claim((&raw mut (*state).end) as u64, mine) {
                0 => mine,
                end => end,
            }
        }
    }

    /// Leaves a record of the first wait that ended badly.
    #[inline(always)]
    fn report(stopped: Stopped, waiting: Waiting) {
        // SAFETY: `begin` was promised shared memory and a valid record; the first to claim it
        // writes it alone.
        unsafe {
            let (status, rank) = ((*S::state()).status, (*S::state()).rank);
            if status == 0 || Raw.fetch_add(status, 1) != 0 {
                return;
            }
            let record = status as *mut StatusRecord;
            (&raw mut (*record).rank).write(rank);
            (&raw mut (*record).block).write(block_x());
            (&raw mut (*record).thread).write(thread());
            (&raw mut (*record).waiting).write(waiting);
            Raw.store_release((&raw mut (*record).stopped) as u64, stopped as u64);
        }
    }

    /// Whether the job or the time has ended, or the peer makes another call: 0, or the number of a
    /// [`Stopped`]. One function for all waits, out of their way, and of numbers alone.
    #[cold]
    #[inline(never)]
    fn look(
        kind: WaitKind,
        (peer, channel): (u32, u32),
        (op, spins): (u32, u32),
        expected: u64,
        seen: u64,
    ) -> u32 {
        // SAFETY: `begin` was promised shared memory, and the context's addresses.
        let (now, end, aborted) = unsafe {
            let now = time_ns();
            let abort = (*S::state()).abort;
            (now, Self::end(now), abort != 0 && Raw.load(abort) != 0)
        };
        let of_other_size =
            kind == WaitKind::Packet && is_of_other_size(expected as u32, seen as u32);
        let stopped = if of_other_size {
            Stopped::Mismatch
        } else if aborted {
            Stopped::Aborted
        } else if now >= end {
            Stopped::Deadline
        } else {
            return 0;
        };
        let site = Site {
            kind,
            peer,
            channel,
            op,
        };
        let waiting = Waiting {
            site,
            spins,
            expected,
            seen,
        };
        Self::report(stopped, waiting);
        stopped as u32
    }
}

const fn stopped(number: u32) -> Stopped {
    match number {
        3 => Stopped::Mismatch,
        2 => Stopped::Deadline,
        _ => Stopped::Aborted,
    }
}

impl<S: Shared> Block for GpuBlock<S> {
    type Memory = Raw;

    #[inline(always)]
    fn memory(&self) -> &Raw {
        &Raw
    }

    #[inline(always)]
    fn thread(&self) -> u32 {
        thread()
    }

    #[inline(always)]
    fn threads(&self) -> u32 {
        threads()
    }

    #[inline(always)]
    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        let mine = match mine {
            Ok(()) => 0,
            Err(stopped) => stopped as u32,
        };
        // Threads that did not wait know that they bring no error.
        match barrier_max::<0>(opaque(mine)) {
            0 => Ok(()),
            all => Err(stopped(all)),
        }
    }

    #[inline(always)]
    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        let Waiting {
            site,
            spins,
            expected,
            seen,
        } = *waiting;
        if spins % PATIENCE != PATIENCE - 1 {
            return Ok(());
        }
        let (where_, when) = ((site.peer, site.channel), (site.op, spins));
        match Self::look(site.kind, where_, when, expected, seen) {
            0 => Ok(()),
            number => Err(stopped(number)),
        }
    }

    #[inline(always)]
    fn refuse(&self, waiting: &Waiting) -> Stopped {
        Self::report(Stopped::Mismatch, *waiting);
        Stopped::Mismatch
    }

    #[inline(always)]
    fn wake(&self, _peer: u32) {}

    #[inline(always)]
    fn warp_any(&self, x: bool) -> bool {
        vote_any(x.into()) != 0
    }

    #[inline(always)]
    fn warp_exchange(&self, x: u32, mask: u32) -> u32 {
        exchange(x, mask)
    }

    #[inline(always)]
    fn any(&self, x: bool) -> bool {
        barrier_max::<0>(opaque(x.into())) != 0
    }

    #[inline(always)]
    fn warp(&self) -> u32 {
        thread() / WARP
    }

    #[inline(always)]
    fn warps(&self) -> u32 {
        threads() / WARP
    }

    #[inline(always)]
    fn lane(&self) -> u32 {
        thread() % WARP
    }

    #[inline(always)]
    fn lanes(&self) -> u32 {
        WARP
    }

    #[inline(always)]
    fn warp_sync(&self) {
        warp_sync();
    }

    #[inline(always)]
    fn opaque(&self, x: bool) -> bool {
        opaque(x.into()) != 0
    }
}
