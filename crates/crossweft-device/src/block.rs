//! The thread block, as device code sees it.

use crate::memory::Memory;
use crate::wait::{Stopped, Waiting};

/// One thread of a thread block together with its machine.
///
/// On a GPU a block is many threads; on the host it is one, and [`sync`](Self::sync) costs nothing.
pub trait Block {
    /// How this machine reaches memory that other ranks touch.
    type Memory: Memory;

    /// The machine's memory.
    fn memory(&self) -> &Self::Memory;

    /// Index of this thread in its block.
    fn thread(&self) -> u32;

    /// Threads in this block.
    fn threads(&self) -> u32;

    /// Block barrier that also agrees on the outcome: `Err` on every thread if any thread brought
    /// one. Orders the block's memory accesses before it against those after it.
    ///
    /// # Errors
    /// The [`Stopped`] that this or another thread of the block brought.
    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped>;

    /// The wait hook: called each time a condition was looked at and did not hold. It spins, yields
    /// or sleeps, and ends the wait when the job was aborted or its deadline has passed.
    ///
    /// # Errors
    /// [`Stopped`] if the wait must end without its condition.
    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped>;

    /// Ends the launch because a peer makes another call; what the wait found is in `waiting`.
    fn refuse(&self, waiting: &Waiting) -> Stopped;

    /// The counterpart of [`pause`](Self::pause): memory of rank `peer` was written that it may be
    /// waiting for. Only a hint; a sleeping waiter also looks again by itself.
    fn wake(&self, peer: u32);

    /// `x`, of which a compiler must not conclude which threads it holds on: barriers that follow stay
    /// one place for all of them.
    fn opaque(&self, x: bool) -> bool {
        x
    }

    /// Whether `x` holds on any thread of this one's warp: 32 threads side by side, all of which call it. A thread
    /// without others answers for itself.
    fn warp_any(&self, x: bool) -> bool {
        x
    }

    /// What `x` is on the thread of this one's warp whose index differs from this one's in the bits of `mask`, which is
    /// below 32. All threads of the warp call it. A thread without others has no such neighbour, and gets its own.
    fn warp_exchange(&self, x: u32, mask: u32) -> u32 {
        let _ = mask;
        x
    }

    /// Block: whether `x` holds on any thread of it.
    fn any(&self, x: bool) -> bool {
        x
    }

    /// Index of this thread's warp in its block: threads side by side that go on together.
    fn warp(&self) -> u32 {
        self.thread()
    }

    /// Warps in this block.
    fn warps(&self) -> u32 {
        self.threads()
    }

    /// Index of this thread in its warp.
    fn lane(&self) -> u32 {
        0
    }

    /// Threads in this warp.
    fn lanes(&self) -> u32 {
        1
    }

    /// Meets the other threads of this one's warp, and orders what they did before.
    fn warp_sync(&self) {}

    /// Called between operations, so that a scheduler can interleave blocks at will.
    fn checkpoint(&self) {}
}
