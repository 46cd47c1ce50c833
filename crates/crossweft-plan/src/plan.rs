//! The representation of plans.

use crossweft_device::extent::{GRANULE, chunk_bytes};
use crossweft_device::packet::{PAYLOAD, PacketType, WORD};
use crossweft_device::{ReduceOp, program::Space};
use serde::{Deserialize, Serialize};

pub use crate::collective::{Collective, Content, InputBlock};
use crate::cuts;

/// Of the largest line that a device writes as a whole.
const CACHE_LINE: u64 = 128;

/// Whether a plan works on one buffer or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InPlace {
    /// Input and output may be the same memory, or two.
    Any,
    /// They are one: where a block of output belongs to this rank's input, it is the same memory.
    Required,
    /// They must not overlap.
    Forbidden,
}

/// A communication plan for a fixed number of ranks and any message size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Plan {
    /// Name for people.
    pub name: String,
    /// What it computes.
    pub collective: Collective,
    /// The reduce operation it is for; `None` if the caller chooses.
    pub reduce_op: Option<ReduceOp>,
    /// How packets are stored.
    pub packet: PacketType,
    /// Whether input and output are one buffer.
    pub in_place: InPlace,
    /// Chunks a message (one block of input or output) is cut into.
    pub chunks: u32,
    /// Whether chunks must all be of one size, although no operation alone tells
    /// ([`needs_equal_chunks`](Self::needs_equal_chunks)): some slot holds now one chunk, now another.
    pub equal_chunks: bool,
    /// Blocks of the input, each of one message.
    pub input_blocks: u32,
    /// Blocks of the output, each of one message.
    pub output_blocks: u32,
    /// By rank and block of its output, the blocks of inputs whose reduction it must hold, where the collective is
    /// [`Collective::Custom`]; none for whatever need not hold anything. Empty for all other collectives.
    pub outputs: Vec<Vec<Vec<InputBlock>>>,
    /// Sizes of a message in bytes that the plan is meant for, inclusive.
    pub message_bytes: (u64, u64),
    /// Slots of plain scratch memory, each of one chunk.
    pub scratch_slots: u32,
    /// Whether the plan counts on two halves of scratch memory, used in turn, as with packets.
    pub double_scratch: bool,
    /// Slots of packet memory, each of one chunk's packets; always there twice.
    pub packet_slots: u32,
    /// What each rank does, in rank order.
    pub ranks: Vec<RankProgram>,
}

/// One rank's part of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RankProgram {
    /// Channels to peers. Of each kind, the k-th channel from a to b is the k-th from b to a.
    pub channels: Vec<Channel>,
    /// Groups of ranks whose buffers are reached at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub switches: Vec<Switch>,
    /// Initial values of the semaphores among this rank's thread blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub semaphores: Vec<u32>,
    /// The operations of each thread block.
    pub blocks: Vec<Vec<Op>>,
}

/// One end of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// The rank at the other end.
    pub peer: u32,
    /// Who moves the data.
    #[serde(default)]
    pub kind: ChannelKind,
}

/// Who moves the data of a channel.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ChannelKind {
    /// The kernel itself, in memory that both ends can address.
    #[default]
    Memory,
    /// A proxy thread, at the kernel's request.
    Port,
}

impl ChannelKind {
    /// The name, as in the file format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Port => "port",
        }
    }
}

/// A group of ranks whose buffers can be reached at once where the hardware has multicast.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// The members.
    pub ranks: Vec<u32>,
    /// Which of their buffers.
    pub buffer: Buffer,
}

/// Which part of the message an operation handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunks {
    /// First chunk.
    pub first: u32,
    /// Number of chunks.
    pub count: u32,
    /// `(index, of)`: only this slice of them, so that thread blocks can share the work.
    #[serde(default = "whole")]
    pub slice: (u32, u32),
}

fn whole() -> (u32, u32) {
    (0, 1)
}

impl Chunks {
    /// All of `count` chunks from `first`.
    #[must_use]
    pub const fn new(first: u32, count: u32) -> Self {
        Self {
            first,
            count,
            slice: (0, 1),
        }
    }

    /// Slice `index` of `of` of the same chunks.
    #[must_use]
    pub const fn sliced(self, index: u32, of: u32) -> Self {
        Self {
            slice: (index, of),
            ..self
        }
    }
}

/// A buffer of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Buffer {
    /// The caller's input, in chunks.
    Input,
    /// The caller's output, in chunks.
    Output,
    /// Scratch memory, in slots.
    Scratch,
    /// Packet memory, in slots.
    Packets,
}

impl From<Buffer> for Space {
    fn from(buffer: Buffer) -> Self {
        match buffer {
            Buffer::Input => Self::Input,
            Buffer::Output => Self::Output,
            Buffer::Scratch => Self::Scratch,
            Buffer::Packets => Self::Packets,
        }
    }
}

/// Where an operation reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operand {
    /// The rank whose buffer it is.
    pub rank: u32,
    /// Which buffer.
    pub buffer: Buffer,
    /// The chunk or slot where the operation's first chunk lies; more chunks follow it.
    pub index: u32,
}

impl Operand {
    /// Chunk or slot `index` of `rank`'s `buffer`.
    #[must_use]
    pub const fn new(rank: u32, buffer: Buffer, index: u32) -> Self {
        Self {
            rank,
            buffer,
            index,
        }
    }
}

/// An operation of a thread block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Op {
    /// Copies bytes to every destination; waits for packets, or makes them, where an operand is
    /// packet memory.
    Move {
        /// Which part of the message.
        chunks: Chunks,
        /// Where it is.
        from: Operand,
        /// Where it goes.
        to: Vec<Operand>,
        /// A switch of this rank whose members are exactly the destinations: a hint.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        switch: Option<u32>,
    },
    /// Reduces sources in the given order into every destination.
    Reduce {
        /// Which part of the message.
        chunks: Chunks,
        /// What is reduced.
        from: Vec<Operand>,
        /// Where the result goes.
        to: Vec<Operand>,
        /// Whether this is the final result, not a partial one. It matters for averages only, which
        /// divide here.
        last: bool,
        /// A switch of this rank whose members are exactly the sources, and the destinations too unless all of those
        /// are this rank's: a hint.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        switch: Option<u32>,
    },
    /// Signals the peers of these channels, after everything this block did before; on port channels
    /// after the puts before it.
    Signal {
        /// Channels of this rank.
        channels: Vec<u32>,
        /// Tells only that the sender's execution has begun, not what it did in it; memory channels
        /// only.
        #[serde(default, skip_serializing_if = "is_false")]
        relaxed: bool,
    },
    /// Waits for a signal on each of these channels.
    Wait {
        /// Channels of this rank.
        channels: Vec<u32>,
        /// Tells only that the sender's execution has begun, not what it did in it; memory channels
        /// only.
        #[serde(default, skip_serializing_if = "is_false")]
        relaxed: bool,
    },
    /// Asks the proxy for a copy to a peer over a port channel. Packets are copied as they are.
    Put {
        /// Which part of the message.
        chunks: Chunks,
        /// Where it is, on this rank.
        from: Operand,
        /// Where it goes, on the channel's peer; packets to packets, anything else to anything else.
        to: Operand,
        /// The port channel.
        channel: u32,
        /// Signals the peer when it has arrived.
        #[serde(default, skip_serializing_if = "is_false")]
        signal: bool,
        /// Waits until it has arrived.
        #[serde(default, skip_serializing_if = "is_false")]
        flush: bool,
    },
    /// Waits until everything put over these port channels has arrived.
    Flush {
        /// Port channels of this rank.
        channels: Vec<u32>,
    },
    /// Waits until each of these semaphores is above 0, and takes one from it.
    Acquire {
        /// Semaphores of this rank.
        semaphores: Vec<u32>,
    },
    /// Adds one to each of these semaphores, after everything this block did before.
    Release {
        /// Semaphores of this rank.
        semaphores: Vec<u32>,
    },
    /// Barrier among `blocks` thread blocks of this rank.
    Barrier {
        /// Which barrier.
        id: u32,
        /// How many blocks meet.
        blocks: u32,
    },
    /// Barrier among the threads of this block.
    Sync,
    /// Repeats operations on one piece of their data after the other: as many times as pieces of
    /// `unit_bytes` cover `chunks` chunks. Where an operation's own data ends earlier, nothing of it
    /// is left to do; operations without data are done every time. Loops do not nest, and contain no
    /// packets.
    Loop {
        /// Bytes of a piece: a multiple of 16.
        unit_bytes: u64,
        /// Chunks that give the number of pieces.
        chunks: u32,
        /// What is repeated.
        ops: Vec<Op>,
    },
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_false(value: &bool) -> bool {
    !value
}

impl Op {
    /// The operation's name, as in the file format.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Move { .. } => "move",
            Self::Reduce { .. } => "reduce",
            Self::Signal { .. } => "signal",
            Self::Wait { .. } => "wait",
            Self::Put { .. } => "put",
            Self::Flush { .. } => "flush",
            Self::Acquire { .. } => "acquire",
            Self::Release { .. } => "release",
            Self::Barrier { .. } => "barrier",
            Self::Sync => "sync",
            Self::Loop { .. } => "loop",
        }
    }

    /// Operands that are read, and those that are written.
    #[must_use]
    pub fn operands(&self) -> (&[Operand], &[Operand]) {
        match self {
            Self::Move { from, to, .. } => (std::slice::from_ref(from), to),
            Self::Reduce { from, to, .. } => (from, to),
            Self::Put { from, to, .. } => (std::slice::from_ref(from), std::slice::from_ref(to)),
            _ => (&[], &[]),
        }
    }

    /// The operations inside a loop; this one alone for all others.
    #[must_use]
    pub fn flatten(&self) -> &[Op] {
        match self {
            Self::Loop { ops, .. } => ops,
            op => std::slice::from_ref(op),
        }
    }

    /// The part of the message that is handled, for operations on data.
    #[must_use]
    pub const fn chunks(&self) -> Option<Chunks> {
        match self {
            Self::Move { chunks, .. } | Self::Reduce { chunks, .. } | Self::Put { chunks, .. } => {
                Some(*chunks)
            }
            _ => None,
        }
    }
}

impl Plan {
    /// World size.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        // Validated: the number of ranks is far below 2^32.
        self.ranks.len() as u32
    }

    /// What block `block` of `rank`'s output must hold.
    #[must_use]
    pub fn content(&self, rank: u32, block: u32) -> Content {
        if self.collective != Collective::Custom {
            return self.collective.content(self.world_size(), rank, block);
        }
        let of_rank = self.outputs.get(rank as usize);
        match of_rank.and_then(|blocks| blocks.get(block as usize)) {
            Some(inputs) if !inputs.is_empty() => Content::Inputs(inputs.clone()),
            _ => Content::Any,
        }
    }

    /// Whether ranks, or proxies, reach into inputs and outputs: `(input, output)`. Such buffers must
    /// be registered memory.
    #[must_use]
    pub fn reaches_into(&self) -> (bool, bool) {
        let mut reached = (false, false);
        for (rank, op) in self.all_ops() {
            let (from, to) = op.operands();
            // A proxy reaches into its own rank's buffers as into registered memory.
            let by_proxy = matches!(op, Op::Put { .. });
            for operand in from.iter().chain(to).filter(|o| o.rank != rank || by_proxy) {
                reached.0 |= operand.buffer == Buffer::Input;
                reached.1 |= operand.buffer == Buffer::Output;
            }
        }
        reached
    }

    /// Whether any rank has port channels.
    #[must_use]
    pub fn has_ports(&self) -> bool {
        let mut channels = self.ranks.iter().flat_map(|program| &program.channels);
        channels.any(|channel| channel.kind == ChannelKind::Port)
    }

    /// Whether some data changes its place inside a block, so that chunks must all be of one size: the
    /// message then has to be a multiple of `chunks * 16` bytes.
    #[must_use]
    pub fn needs_equal_chunks(&self) -> bool {
        let moved = |(_, op): (u32, &Op)| {
            let (from, to) = op.operands();
            let blocks = |o: &&Operand| matches!(o.buffer, Buffer::Input | Buffer::Output);
            op.chunks().is_some_and(|chunks| {
                from.iter()
                    .chain(to)
                    .filter(blocks)
                    .any(|o| o.index % self.chunks != chunks.first)
            })
        };
        self.equal_chunks || self.all_ops().any(moved)
    }

    /// What the size of a message in bytes must be a multiple of, whatever the elements: 1 unless chunks [must be of one
    /// size](Self::needs_equal_chunks), or operations cut the same data into slices in different ways, which then must all
    /// be of whole granules (16 bytes).
    #[must_use]
    pub fn message_multiple(&self) -> u64 {
        match self.slice_granules() {
            None if !self.needs_equal_chunks() => 1,
            // A granule holds a whole number of elements of every type.
            granules => {
                let chunks = u64::from(self.chunks) * GRANULE;
                chunks.saturating_mul(granules.unwrap_or(1))
            }
        }
    }

    /// Granules that every chunk must be a multiple of, if data is cut in different ways.
    pub(crate) fn slice_granules(&self) -> Option<u64> {
        cuts::granules(self)
    }

    /// Chunks that have something in them, the first ones, however short a message is that `least` bytes at least fit.
    pub(crate) fn fewest_chunks(least: u64, chunks: u32) -> u64 {
        let (least, chunks) = (least.div_ceil(GRANULE).max(1), u64::from(chunks));
        // Of granules that are just too many for chunks of some size, larger ones hold more, and so there are fewer.
        let size = least.div_ceil(chunks);
        let larger = (size * chunks + 1).div_ceil(size + 1);
        least.div_ceil(size).min(larger)
    }

    /// The rank that sends the packets in slot `slot` of `rank`.
    #[must_use]
    pub fn packet_sender(&self, rank: u32, slot: u32) -> Option<u32> {
        self.all_ops().find_map(|(sender, op)| {
            let count = op.chunks()?.count;
            op.operands()
                .1
                .iter()
                .any(|o| {
                    o.buffer == Buffer::Packets
                        && o.rank == rank
                        && (o.index..o.index + count).contains(&slot)
                })
                .then_some(sender)
        })
    }

    /// Bytes of scratch memory that messages of up to `bytes` bytes need: `(one half, all)`.
    ///
    /// There are always two halves, used in turn, whether [`double_scratch`](Self::double_scratch) asks
    /// for them or not: slots lie at multiples of the chunk, so that a message of another size has
    /// them elsewhere, over slots of the message before that a slower rank may still read. Two
    /// messages later it has read them: whoever writes then has heard of it in the one between.
    #[must_use]
    pub fn scratch_bytes(&self, bytes: u64) -> Option<(u64, u64)> {
        let half = self.slots_bytes(bytes, self.scratch_slots)?;
        Some((half, half.checked_mul(2)?))
    }

    /// Bytes of packet memory that messages of up to `bytes` bytes need: `(one half, all)`, whole cache lines.
    #[must_use]
    pub fn packet_bytes(&self, bytes: u64) -> Option<(u64, u64)> {
        let payload = self.slots_bytes(bytes, self.packet_slots)?;
        let half = payload.checked_mul(WORD / PAYLOAD)?;
        let half = half.checked_next_multiple_of(CACHE_LINE)?;
        Some((half, half.checked_mul(2)?))
    }

    /// Bytes of so many slots, each of one chunk.
    fn slots_bytes(&self, bytes: u64, slots: u32) -> Option<u64> {
        if slots == 0 {
            return Some(0);
        }
        // A chunk is rounded up.
        bytes.checked_next_multiple_of(GRANULE)?;
        chunk_bytes(bytes, self.chunks).checked_mul(slots.into())
    }

    /// Every operation with its rank; those inside loops instead of the loops.
    pub fn all_ops(&self) -> impl Iterator<Item = (u32, &Op)> {
        (0..).zip(&self.ranks).flat_map(|(rank, program)| {
            let ops = program.blocks.iter().flatten().flat_map(Op::flatten);
            ops.map(move |op| (rank, op))
        })
    }
}
