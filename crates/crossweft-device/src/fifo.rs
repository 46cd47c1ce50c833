//! The fifo of triggers: how a kernel asks a proxy thread to do something for it.
//!
//! Any thread pushes, one proxy pops in order. A trigger is four words, 32 bytes, with whole 64-bit
//! offsets and sizes:
//!
//! ```text
//! word 0   63: lap   62..60: kind   59..40: channel   39..20: destination memory   19..0: source memory
//! word 1   destination offset, bytes
//! word 2   source offset, bytes
//! word 3   size, bytes
//! ```
//!
//! Word 0 is stored last, with release, and its lap bit alternates from lap to lap, so slots need
//! no clearing and one word tells the proxy that a trigger is complete. The proxy publishes in
//! `tail` how many triggers it has *handled*: that frees their slots and answers a flush.

use crate::block::Block;
use crate::memory::Memory;
use crate::wait::{Site, Stopped, WaitKind, reached, wait_for};

/// Bytes of a trigger in the ring.
pub const TRIGGER_BYTES: u64 = 32;
/// Channel and memory ids are below this.
pub const MAX_ID: u32 = 1 << 20;

/// What a trigger asks for. Kinds combine as bits, so that one trigger can put, signal and flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TriggerKind(u8);

impl TriggerKind {
    /// Copy `size` bytes from the source to the destination memory.
    pub const PUT: Self = Self(1);
    /// Signal the channel's peer, after the puts before it have arrived.
    pub const SIGNAL: Self = Self(2);
    /// Answer only when everything before has arrived.
    pub const FLUSH: Self = Self(4);

    /// Both.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is asked for.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One request to a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// What to do.
    pub kind: TriggerKind,
    /// The channel (below [`MAX_ID`]).
    pub channel: u32,
    /// The peer's registered memory (below [`MAX_ID`]).
    pub dst_memory: u32,
    /// This rank's registered memory (below [`MAX_ID`]).
    pub src_memory: u32,
    /// Bytes into the destination memory.
    pub dst_offset: u64,
    /// Bytes into the source memory.
    pub src_offset: u64,
    /// Bytes to move.
    pub size: u64,
}

const ID_MASK: u64 = MAX_ID as u64 - 1;

impl Trigger {
    #[inline(always)]
    const fn head_word(&self, lap: u64) -> u64 {
        (lap & 1) << 63
            | (self.kind.0 as u64 & 7) << 60
            | (self.channel as u64 & ID_MASK) << 40
            | (self.dst_memory as u64 & ID_MASK) << 20
            | (self.src_memory as u64 & ID_MASK)
    }
}

/// Addresses of a fifo, in the address space of whoever holds the handle.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Fifo {
    /// The ring: `capacity` triggers, zeroed when the fifo was made.
    pub ring: u64,
    /// Triggers pushed so far.
    pub head: u64,
    /// Triggers handled so far; written by the proxy.
    pub tail: u64,
    /// Slots; a power of two.
    pub capacity: u32,
    /// The fifo's number, for messages.
    pub id: u32,
}

impl Fifo {
    /// Lap of a position: odd on the first lap, so that zeroed memory reads as empty.
    #[inline(always)]
    const fn lap(&self, position: u64) -> u64 {
        (position / self.capacity as u64 + 1) & 1
    }

    #[inline(always)]
    const fn slot(&self, position: u64) -> u64 {
        self.ring + position % self.capacity as u64 * TRIGGER_BYTES
    }

    /// Pushes a trigger and returns its position; waits while the fifo is full. What this thread
    /// wrote before is visible to the proxy when it handles the trigger.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends the wait for space. The position stays taken, so the
    /// fifo is of no further use: only an aborted job does this.
    ///
    /// # Safety
    /// The handle's addresses must be valid.
    #[inline(always)]
    pub unsafe fn push<B: Block>(
        &self,
        block: &B,
        op: u32,
        trigger: &Trigger,
    ) -> Result<u64, Stopped> {
        let memory = block.memory();
        // SAFETY: the caller's promise; the slot is ours once the tail has come within one lap.
        unsafe {
            let position = memory.fetch_add(self.head, 1);
            let needed = position
                .wrapping_add(1)
                .saturating_sub(u64::from(self.capacity));
            self.wait_tail(block, op, WaitKind::FifoSpace, needed)?;
            let slot = self.slot(position);
            memory.store(slot + 8, trigger.dst_offset);
            memory.store(slot + 16, trigger.src_offset);
            memory.store(slot + 24, trigger.size);
            memory.store_release(slot, trigger.head_word(self.lap(position)));
            Ok(position)
        }
    }

    /// Waits until the trigger at `position` has been handled.
    ///
    /// # Errors
    /// [`Stopped`] when the wait hook ends the wait.
    ///
    /// # Safety
    /// The handle's addresses must be valid.
    #[inline(always)]
    pub unsafe fn wait_handled<B: Block>(
        &self,
        block: &B,
        op: u32,
        position: u64,
    ) -> Result<(), Stopped> {
        // SAFETY: the caller's promise.
        unsafe { self.wait_tail(block, op, WaitKind::FifoDone, position.wrapping_add(1)) }
    }

    #[inline(always)]
    unsafe fn wait_tail<B: Block>(
        &self,
        block: &B,
        op: u32,
        kind: WaitKind,
        needed: u64,
    ) -> Result<(), Stopped> {
        let memory = block.memory();
        let site = Site {
            kind,
            peer: u32::MAX,
            channel: self.id,
            op,
        };
        wait_for(
            block,
            site,
            needed,
            // SAFETY: the caller promises valid addresses.
            || unsafe { memory.load_acquire(self.tail) },
            |tail| reached(tail, needed),
        )?;
        Ok(())
    }

    /// The proxy's side: the trigger at `position`, if it is complete. Positions are asked for in
    /// order, from 0.
    ///
    /// # Safety
    /// The handle's addresses must be valid, and one thread alone may pop.
    pub unsafe fn poll<M: Memory>(&self, memory: &M, position: u64) -> Option<Trigger> {
        let slot = self.slot(position);
        // SAFETY: the caller's promise; the acquire load makes the other words visible.
        unsafe {
            let head = memory.load_acquire(slot);
            if head >> 63 != self.lap(position) {
                return None;
            }
            Some(Trigger {
                kind: TriggerKind((head >> 60 & 7) as u8),
                channel: (head >> 40 & ID_MASK) as u32,
                dst_memory: (head >> 20 & ID_MASK) as u32,
                src_memory: (head & ID_MASK) as u32,
                dst_offset: memory.load(slot + 8),
                src_offset: memory.load(slot + 16),
                size: memory.load(slot + 24),
            })
        }
    }

    /// The proxy's side: all triggers before `count` have been handled.
    ///
    /// # Safety
    /// As for [`poll`](Self::poll).
    pub unsafe fn publish_handled<M: Memory>(&self, memory: &M, count: u64) {
        // SAFETY: the caller's promise.
        unsafe { memory.store_release(self.tail, count) };
    }
}
