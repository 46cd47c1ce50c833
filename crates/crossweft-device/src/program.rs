//! A prepared plan, as device code reads it: flat `repr(C)` tables of one rank.
//!
//! ```text
//! Program -> tables:     those of each thread block, `stride` bytes apart, so that a GPU brings them
//!                        close in one go:
//!                            BlockOps                   how many operations
//!                            u64       [ranks][4]       bases: where each rank's buffers are mapped here
//!                            Op        [..]             in order
//!                            Operand   [..]             an op's sources, then its destinations
//!                            u32       [..]             an op's channels, or semaphores among blocks
//!            semaphores: Semaphore   [channels]
//!            ports:      PortChannel [channels]         only entries of port channels are used
//!            memories:   u32         [4]                the proxy's ids of the four buffers
//!            counters:   a cache line each: epoch, blocks left, one a barrier, two a semaphore
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
    /// Barrier among thread blocks of this rank: `links_at` is its number, `links` its blocks.
    Barrier = 4,
    /// Barrier among the threads of this block.
    Sync = 5,
    /// As `Signal`, but says no more than that this execution has begun.
    RelaxedSignal = 6,
    /// As `Wait`, for such signals.
    RelaxedWait = 7,
    /// Asks the proxy of the linked port channel for a copy; `flags` says what else.
    Put = 8,
    /// Asks the proxies of the linked port channels to signal, after the puts before.
    PortSignal = 9,
    /// Waits until everything put over the linked port channels has arrived.
    Flush = 10,
    /// Takes one from each of the linked semaphores among blocks.
    Acquire = 11,
    /// Adds one to each of the linked semaphores among blocks.
    Release = 12,
    /// Repeats the next `links` operations for every piece of `unit` bytes of `chunks` chunks.
    Loop = 13,
}

/// Bits of [`Op::flags`].
pub mod flags {
    /// Reduce: the result is final, so an average divides.
    pub const LAST: u32 = 1;
    /// Put: signal the peer when it has arrived.
    pub const SIGNAL: u32 = 2;
    /// Put: wait until it has arrived.
    pub const FLUSH: u32 = 4;
}

/// One operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// What to do.
    pub kind: OpKind,
    /// Its index in the plan, for messages.
    pub index: u32,
    /// First chunk of the message that is moved, or reduced.
    pub chunk: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// Which slice of those chunks this operation does...
    pub slice: u32,
    /// ...of how many.
    pub slices: u32,
    /// Where its operands are: bytes from the beginning of the block's tables.
    pub operands_at: u32,
    /// Operands that are read.
    pub sources: u32,
    /// Operands that are written; they follow the sources.
    pub destinations: u32,
    /// Where its links are: bytes from the beginning of the block's tables. Of a barrier: its number.
    pub links_at: u32,
    /// Number of links.
    pub links: u32,
    /// See [`flags`].
    pub flags: u32,
    /// Bytes of a loop's piece.
    pub unit: u64,
}

/// A place data comes from or goes to. Whole words, so that a table of them is read by words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Which buffer.
    pub space: Space,
    /// Whose.
    pub rank: u32,
    /// Input and output: which block, each of one message.
    pub block: u32,
    /// The chunk of the block, or the slot, at which the operation's first chunk lies.
    pub index: u32,
    /// Packets: the rank at the other end (who sends what is read here, or reads what is sent).
    pub peer: u32,
}

/// The beginning of a thread block's tables.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockOps {
    /// Number of operations.
    pub count: u32,
    /// Where they are: bytes from the beginning of the tables.
    pub ops_at: u32,
}

/// Where the bases are: bytes from the beginning of a thread block's tables.
pub const BASES_AT: u64 = 64;

/// Bytes between counters that different threads write.
pub const COUNTER_STRIDE: u64 = 64;

/// One rank's prepared plan. Addresses are valid in the address space of whoever runs it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The tables of each thread block, one block's after another's.
    pub tables: u64,
    /// Bytes from the tables of one block to those of the next, a multiple of 16.
    pub stride: u64,
    /// The semaphore of each channel.
    pub semaphores: u64,
    /// The port channel of each channel that is one.
    pub ports: u64,
    /// The proxy's ids of this rank's, and its peers', buffers.
    pub memories: u64,
    /// Counters: the epoch, the number of blocks that left, one per barrier, two per semaphore among
    /// blocks (tickets given out, then releases).
    pub counters: u64,
    /// Bytes of one half of the scratch memory; it has two, used in turn.
    pub scratch_half: u64,
    /// Bytes of one half of the packet memory; it always has two.
    pub packets_half: u64,
    /// This rank.
    pub rank: u32,
    /// World size.
    pub ranks: u32,
    /// Thread blocks.
    pub block_count: u32,
    /// Barriers.
    pub barriers: u32,
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
    /// Size of the message, one block of input or output, in bytes.
    pub bytes: u64,
}
