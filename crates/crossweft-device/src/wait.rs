//! Waiting: one loop, one hook, and the words that describe what was waited for.

use crate::block::Block;

/// Why a wait ended without its condition. The host knows the rest.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// The job was aborted, or a peer died.
    Aborted = 1,
    /// The caller's deadline passed.
    Deadline = 2,
    /// A peer makes another call than this rank.
    Mismatch = 3,
}

/// What kind of thing is waited for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WaitKind {
    /// A semaphore's counter to reach a value.
    #[default]
    Semaphore = 0,
    /// A packet's flag to equal the epoch's.
    Packet = 1,
    /// Space in a fifo.
    FifoSpace = 2,
    /// A proxy to have handled a trigger.
    FifoDone = 3,
    /// The other thread blocks of this rank at a barrier.
    Barrier = 4,
    /// Another thread block of this rank to release a semaphore.
    Acquire = 5,
    /// A peer's message to have this rank's size: `expected` and `seen` are bytes.
    Size = 6,
    /// A message in a stream: `expected` and `seen` are the flag of its next slot.
    Message = 7,
    /// A peer to take what was sent to it: `expected` and `seen` count slots of the stream.
    Taken = 8,
    /// A message to be what was asked for; the exchange's [`Fault`](crate::exchange::Fault) says more.
    Envelope = 9,
    /// A rank whose exchange has failed.
    Failed = 10,
}

impl WaitKind {
    /// The kind of a number that a kernel left behind.
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Packet,
            2 => Self::FifoSpace,
            3 => Self::FifoDone,
            4 => Self::Barrier,
            5 => Self::Acquire,
            6 => Self::Size,
            7 => Self::Message,
            8 => Self::Taken,
            9 => Self::Envelope,
            10 => Self::Failed,
            _ => Self::Semaphore,
        }
    }

    /// The words for an error message.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Semaphore => "a signal",
            Self::Packet => "a packet",
            Self::FifoSpace => "space in the fifo",
            Self::FifoDone => "the proxy",
            Self::Barrier => "the other thread blocks",
            Self::Acquire => "another thread block",
            Self::Size => "a call of the same size",
            Self::Message => "a message",
            Self::Taken => "a message to be received",
            Self::Envelope => "a message of the same size and type",
            Self::Failed => "an exchange that has failed",
        }
    }
}

/// Where in a program a wait stands.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Site {
    /// What is waited for.
    pub kind: WaitKind,
    /// The rank that must act.
    pub peer: u32,
    /// Number of the channel, fifo or barrier; the operand for packets.
    pub channel: u32,
    /// Index of the operation in its thread block; [`Site::NO_OP`] outside a plan.
    pub op: u32,
}

impl Site {
    /// `op` of a wait that belongs to no plan.
    pub const NO_OP: u32 = u32::MAX;
}

/// A wait in progress, as the hook sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Where.
    pub site: Site,
    /// How often the condition was looked at before; 0 at the first pause of a wait.
    pub spins: u32,
    /// The value that would end the wait (for counters: the least one).
    pub expected: u64,
    /// The value last seen.
    pub seen: u64,
}

/// Looks at `load` until `done` holds, pausing in between through the block's wait hook. Returns
/// the value that satisfied it.
///
/// # Errors
/// [`Stopped`] when the hook ends the wait.
#[inline(always)]
pub fn wait_for<B: Block>(
    block: &B,
    site: Site,
    expected: u64,
    mut load: impl FnMut() -> u64,
    mut done: impl FnMut(u64) -> bool,
) -> Result<u64, Stopped> {
    let seen = load();
    if done(seen) {
        return Ok(seen);
    }
    let mut waiting = Waiting {
        site,
        spins: 0,
        expected,
        seen,
    };
    loop {
        block.pause(&waiting)?;
        waiting.spins = waiting.spins.saturating_add(1);
        waiting.seen = load();
        if done(waiting.seen) {
            return Ok(waiting.seen);
        }
    }
}

/// Whether a counter that only grows has reached `target`; right across the wrap of 64 bits.
#[inline(always)]
#[must_use]
pub const fn reached(counter: u64, target: u64) -> bool {
    counter.wrapping_sub(target) <= u64::MAX / 2
}
