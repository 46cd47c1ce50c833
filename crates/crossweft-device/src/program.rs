//! A prepared plan, as device code reads it: flat `repr(C)` tables of one rank.
//!
//! ```text
//! Program -> blocks:     BlockOps  [block_count]        which operations a thread block runs
//!            ops:        Op        [..]                 in order, block after block
//!            operands:   Operand   [..]                 an op's sources, then its destinations
//!            links:      u32       [..]                 an op's semaphores
//!            semaphores: Semaphore [..]
//!            bases:      u64       [ranks][4]           where each rank's buffers are mapped here
//!            counters:   epoch, blocks left, barriers   a cache line each
//! ```
//!
//! Sizes are not in it: offsets follow from the message's size at each launch ([`crate::extent`]).

/// Which buffer an operand lies in.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Space {
    /// The caller's input.
    Input = 0,
    /// The caller's output.
    Output = 1,
    /// Plain scratch memory of the plan, in slots of one chunk.
    Scratch = 2,
    /// Scratch memory for packets, in slots of one chunk's packets.
    Packets = 3,
}

/// Buffers of a rank in the table of bases.
pub const SPACES: u64 = 4;

/// What an operation does.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpKind {
    /// Copies the source to every destination.
    Move = 0,
    /// Reduces the sources into every destination.
    Reduce = 1,
    /// Signals the linked semaphores, after everything this block did before.
    Signal = 2,
    /// Waits for the linked semaphores.
    Wait = 3,
    /// Barrier among thread blocks of this rank: `first_link` is its number, `links` its blocks.
    Barrier = 4,
    /// Barrier among the threads of this block.
    Sync = 5,
}

/// One operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// What to do.
    pub kind: OpKind,
    /// First chunk of the message that is moved, or reduced.
    pub chunk: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// Which slice of those chunks this operation does...
    pub slice: u32,
    /// ...of how many.
    pub slices: u32,
    /// First entry in the operands.
    pub first_operand: u32,
    /// Operands that are read.
    pub sources: u32,
    /// Operands that are written; they follow the sources.
    pub destinations: u32,
    /// First entry in the links.
    pub first_link: u32,
    /// Number of links.
    pub links: u32,
    /// Reductions: 1 if the result is final (an average then divides), 0 if partial.
    pub last: u32,
}

/// A place data comes from or goes to.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Which buffer.
    pub space: Space,
    /// Whose.
    pub rank: u32,
    /// The chunk or slot at which the operation's first chunk lies.
    pub index: u32,
    /// Packets: the rank at the other end (who sends what is read here, or reads what is sent).
    pub peer: u32,
}

/// The operations of one thread block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlockOps {
    /// First entry in the operations.
    pub first: u32,
    /// Number of operations.
    pub count: u32,
}

/// Bytes between counters that different threads write.
pub const COUNTER_STRIDE: u64 = 64;

/// One rank's prepared plan. Addresses are valid in the address space of whoever runs it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// `BlockOps` of each thread block.
    pub blocks: u64,
    /// All operations.
    pub ops: u64,
    /// All operands.
    pub operands: u64,
    /// All links.
    pub links: u64,
    /// All semaphores.
    pub semaphores: u64,
    /// Base addresses of every rank's buffers, as mapped here.
    pub bases: u64,
    /// Counters: the epoch, the number of blocks that left, then one per barrier.
    pub counters: u64,
    /// Bytes of one half of the scratch memory, if it is used in two halves in turn; else 0.
    pub scratch_half: u64,
    /// Bytes of one half of the packet memory; it always has two.
    pub packets_half: u64,
    /// This rank.
    pub rank: u32,
    /// World size.
    pub ranks: u32,
    /// Thread blocks.
    pub block_count: u32,
    /// Chunks a message is cut into.
    pub chunks: u32,
    /// Bytes of an element.
    pub element: u32,
}

/// What differs from launch to launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// This rank's input.
    pub input: u64,
    /// This rank's output.
    pub output: u64,
    /// Bytes from the registered base to the input; the same on every rank.
    pub input_offset: u64,
    /// Bytes from the registered base to the output; the same on every rank.
    pub output_offset: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
}
