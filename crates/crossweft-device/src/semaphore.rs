//! Semaphores between two ranks: a counter that the peer adds to and this rank waits on.
//!
//! Memory order: `signal` releases everything its block did before it, `wait` acquires it.
//! `relaxed_signal` and `relaxed_wait` order execution only. Semantics as MSCCL++'s
//! `MemoryDevice2DeviceSemaphore` (arXiv 2504.09014).

use crate::block::Block;
use crate::memory::Memory;
use crate::wait::{Site, Stopped, WaitKind, reached, wait_for};

/// One rank's end of a semaphore pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Semaphore {
    /// Address of the counter that the peer adds to; two words for [`TAGS`] follow it.
    pub inbound: u64,
    /// Address of the peer's `inbound`, in this address space; 0 if a proxy signals instead.
    pub outbound: u64,
    /// Address of the count of waits done here. Only the waiting side touches it.
    pub expected: u64,
    /// The peer's rank.
    pub peer: u32,
    /// The channel's number, for messages.
    pub channel: u32,
}

/// Bytes from a semaphore's counter to two words in which a plan's signals leave what call they belong
/// to. They share the counter's cache line, so looking at them costs nothing.
pub const TAGS: u64 = 8;

impl Semaphore {
    /// Adds one to the peer's counter, after everything this thread did before.
    ///
    /// # Safety
    /// The handle's addresses must be valid. Called by one thread of a block, after a block barrier
    /// if other threads' writes are to be covered.
    #[inline(always)]
    pub unsafe fn signal<B: Block>(&self, block: &B) {
        // SAFETY: the caller's promise.
        unsafe { block.memory().add_release(self.outbound, 1) };
        block.wake(self.peer);
    }

    /// Adds one to the peer's counter; orders execution, not memory.
    ///
    /// # Safety
    /// As for [`signal`](Self::signal).
    #[inline(always)]
    pub unsafe fn relaxed_signal<B: Block>(&self, block: &B) {
        // SAFETY: the caller's promise.
        unsafe { block.memory().add(self.outbound, 1) };
        block.wake(self.peer);
    }

    /// Takes one signal if it has arrived; does not block.
    ///
    /// # Safety
    /// The handle's addresses must be valid, and one thread at a time may poll or wait.
    #[inline(always)]
    pub unsafe fn poll<B: Block>(&self, block: &B) -> bool {
        let memory = block.memory();
        // SAFETY: the caller's promise.
        unsafe {
            let target = memory.load(self.expected).wrapping_add(1);
            if !reached(memory.load_acquire(self.inbound), target) {
                return false;
            }
            memory.store(self.expected, target);
        }
        true
    }

    /// Waits for one signal, and for what its sender did before it.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends the wait; the signal is then not taken.
    ///
    /// # Safety
    /// As for [`poll`](Self::poll).
    #[inline(always)]
    pub unsafe fn wait<B: Block>(&self, block: &B, op: u32) -> Result<(), Stopped> {
        let memory = block.memory();
        // SAFETY: the caller's promise.
        unsafe { self.wait_with(block, op, |addr| memory.load_acquire(addr)) }
    }

    /// Waits for one signal; orders execution, not memory.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    ///
    /// # Safety
    /// As for [`poll`](Self::poll).
    #[inline(always)]
    pub unsafe fn relaxed_wait<B: Block>(&self, block: &B, op: u32) -> Result<(), Stopped> {
        let memory = block.memory();
        // SAFETY: the caller's promise.
        unsafe { self.wait_with(block, op, |addr| memory.load(addr)) }
    }

    #[inline(always)]
    unsafe fn wait_with<B: Block>(
        &self,
        block: &B,
        op: u32,
        load: impl Fn(u64) -> u64,
    ) -> Result<(), Stopped> {
        // SAFETY: the caller of `wait` promises valid addresses.
        unsafe {
            let target = block.memory().load(self.expected).wrapping_add(1);
            self.wait_until(block, op, target, load)
        }
    }

    /// [`wait`](Self::wait) for whoever knows already how many signals there will be then.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there; `target` must be one more than the signals taken so far.
    #[inline(always)]
    pub(crate) unsafe fn wait_until<B: Block>(
        &self,
        block: &B,
        op: u32,
        target: u64,
        mut load: impl FnMut(u64) -> u64,
    ) -> Result<(), Stopped> {
        let site = Site {
            kind: WaitKind::Semaphore,
            peer: self.peer,
            channel: self.channel,
            op,
        };
        wait_for(
            block,
            site,
            target,
            || load(self.inbound),
            |seen| reached(seen, target),
        )?;
        // SAFETY: the caller's promise; only the waiting side writes `expected`.
        unsafe { block.memory().store(self.expected, target) };
        Ok(())
    }
}
