//! What a program is for, and how it is compiled.

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;

use crate::plan::{Collective, InPlace};

/// What a program computes, and how it is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Name for people.
    pub name: String,
    /// What it computes.
    pub collective: Collective,
    /// World size.
    pub ranks: u32,
    /// Chunks per unit of the collective: an all-reduce has `ranks * chunk_factor` chunks of input and
    /// of output, everything else `chunk_factor` chunks in each block of input and output.
    pub chunk_factor: u32,
    /// Chunks of input and of output, for collectives whose shape the plan says.
    pub shape: (u32, u32),
    /// The reduce operation it is for; `None` if the caller chooses.
    pub reduce_op: Option<ReduceOp>,
    /// How packets are stored.
    pub packet: PacketType,
    /// How input and output may lie.
    pub in_place: InPlace,
    /// How often the whole program is there, side by side, on parts of the data.
    pub instances: u32,
    /// Which parts of the data each instance handles.
    pub replication: Replication,
    /// Whether neighbouring instructions are merged into one operation where one can do both.
    pub fuse: bool,
    /// Whether synchronisation is inserted where the data needs it and the program has none.
    pub auto_sync: bool,
    /// Whether inserted synchronisation that may not be needed, because something else serves as well, is dropped
    /// where the checker can do without. It costs runs of the checker, so that it is left out for more than
    /// [`MINIMISED_RANKS`] ranks.
    pub minimise: bool,
    /// Whether there are two halves of scratch memory, used in turn.
    pub double_scratch: bool,
    /// Sizes of a message (one block of input or output) in bytes that it is meant for, inclusive.
    pub message_bytes: (u64, u64),
}

/// Most ranks for which [`Options::minimise`] does anything.
pub const MINIMISED_RANKS: u32 = 16;

/// Which parts of the data each instance of a program handles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Replication {
    /// Chunks are cut into as many as there are instances; of the chunks of an instruction, each instance
    /// has as many as the instruction says, one instance's behind the other's.
    #[default]
    Interleaved,
    /// Chunks stay as they are; each instance has a slice of every instruction's data.
    None,
}

impl Options {
    /// Options for a program called `name` over `ranks` ranks: one chunk a unit, sums, out of place, one
    /// instance, all passes.
    #[must_use]
    pub fn new(name: &str, collective: Collective, ranks: u32) -> Self {
        Self {
            name: name.to_owned(),
            collective,
            ranks,
            chunk_factor: 1,
            shape: (1, 1),
            reduce_op: Some(ReduceOp::Sum),
            packet: PacketType::Ll16,
            in_place: InPlace::Forbidden,
            instances: 1,
            replication: Replication::default(),
            fuse: true,
            auto_sync: true,
            minimise: true,
            double_scratch: false,
            message_bytes: (0, u64::MAX),
        }
    }
}

/// How the buffers are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Chunks of a message.
    pub(super) chunks: u32,
    /// Blocks of input and output, each of one message.
    pub(super) blocks: (u32, u32),
}

impl Shape {
    /// `None` if there is no such number of chunks.
    pub(super) fn of(options: &Options) -> Option<Self> {
        let Options {
            collective,
            ranks,
            chunk_factor,
            shape,
            ..
        } = options;
        let shape = match collective.blocks(*ranks) {
            Some(blocks) => Self {
                chunks: match collective {
                    Collective::AllReduce => chunk_factor.checked_mul(*ranks)?,
                    _ => *chunk_factor,
                },
                blocks,
            },
            None => Self {
                chunks: 1,
                blocks: *shape,
            },
        };
        let (input, output) = shape.blocks;
        shape.chunks.checked_mul(input.max(output))?;
        Some(shape)
    }
}
