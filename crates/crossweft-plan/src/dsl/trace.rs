//! What a program is while it is recorded and compiled: instructions in program order.

use crate::place::Raw;
use crate::plan::{Buffer, ChannelKind};

/// An instruction of one thread block.
#[derive(Clone, Debug)]
pub(super) struct Instr {
    pub(super) rank: u32,
    /// The thread block, as the user numbers it.
    pub(super) block: u32,
    /// What it does: data, or an operation without data; never a loop. Numbers of channels, semaphores and
    /// switches are those of the [`Trace`].
    pub(super) raw: Raw,
    /// Index of the user's line.
    pub(super) source: u32,
    /// The loop that it is in, as an index of [`Trace::loops`].
    pub(super) in_loop: Option<u32>,
}

/// One end of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct End {
    /// Where it is.
    pub(super) rank: u32,
    /// Where it leads.
    pub(super) peer: u32,
    pub(super) kind: ChannelKind,
    /// Which of the channels of this kind between the two it is; the other end has the same number.
    pub(super) ordinal: u32,
}

/// A semaphore among the thread blocks of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counter {
    pub(super) rank: u32,
    pub(super) initial: u32,
}

/// Ranks whose buffers are reached at once.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) ranks: Vec<u32>,
    pub(super) buffer: Buffer,
}

/// Instructions that are repeated, piece by piece of their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    pub(super) unit_bytes: u64,
    pub(super) chunks: u32,
}

/// A recorded program.
#[derive(Clone, Debug, Default)]
pub(super) struct Trace {
    /// In program order.
    pub(super) instrs: Vec<Instr>,
    pub(super) ends: Vec<End>,
    pub(super) semaphores: Vec<Counter>,
    pub(super) groups: Vec<Group>,
    pub(super) loops: Vec<Pieces>,
    /// Barriers of all ranks.
    pub(super) barriers: u32,
}
