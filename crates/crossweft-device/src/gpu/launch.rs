//! What a launch passes to a kernel, and what a kernel that had to stop leaves behind.

use crate::channel::{MemoryChannel, PortChannel};
use crate::dtype::ReduceOp;
use crate::exchange::{Direction, Envelope, Exchange, NONE, State, Transfer, Transfers};
use crate::executor::Counters;
use crate::extent::Extent;
use crate::program::{Launch, Program};
use crate::semaphore::Semaphore;
use crate::wait::Waiting;

/// How a kernel's waits end. Addresses are the device's; 0 if there is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuContext {
    /// How long a block of the kernel may wait, in nanoseconds from when its first wait has lasted (about
    /// a millisecond); 0 for no limit. Relative, so that a captured launch can be replayed at any time.
    pub limit_ns: u64,
    /// A word in pinned host memory: 0 while all is well.
    pub abort: u64,
    /// A [`StatusRecord`] in pinned host memory, or none. One for each rank.
    pub status: u64,
}

/// The first wait that ended without its condition. All zero before the launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusRecord {
    /// How many threads had to stop: whoever finds 0 here writes the rest.
    pub claims: u64,
    /// Not 0 when the rest is complete (stored with release, at system scope): the number of a
    /// [`Stopped`](crate::Stopped).
    pub stopped: u64,
    /// The rank whose kernel stopped.
    pub rank: u32,
    /// Which of its thread blocks.
    pub block: u32,
    /// Which thread of that.
    pub thread: u32,
    /// Not used.
    pub reserved: u32,
    /// What it waited for.
    pub waiting: Waiting,
}

/// The one parameter of a plan's kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlanLaunch {
    /// The prepared plan; addresses are the device's.
    pub program: Program,
    /// What differs from launch to launch.
    pub launch: Launch,
    /// [`chunk_bytes`](crate::extent::chunk_bytes) of the message: a division that the host does.
    pub chunk: u64,
    /// How waits end.
    pub context: GpuContext,
    /// How the plan reduces.
    pub op: ReduceOp,
    /// Not used.
    pub reserved: u32,
}

/// Ranks that a [`OneShot`] and a [`TwoShot`] have room for.
pub const MAX_FUSED: usize = 16;

/// The one parameter of the kernel that runs a one-shot plan in one piece ([`super::fused::one_shot`]). Addresses are
/// the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OneShot {
    /// This rank's input, aligned to 16 bytes.
    pub input: u64,
    /// This rank's output, aligned to 16 bytes.
    pub output: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
    /// Bytes of a thread block's part, a multiple of 16.
    pub step: u64,
    /// What the launch begins and ends with.
    pub counters: Counters,
    /// How waits end.
    pub context: GpuContext,
    /// How to reduce.
    pub op: ReduceOp,
    /// What an average divides by; 0 for other operations.
    pub divisor: u32,
    /// Ranks that are sent packets, at most [`MAX_FUSED`].
    pub targets: u32,
    /// What is reduced, at most [`MAX_FUSED`].
    pub sources: u32,
    /// Index of the reduction in the plan, for messages.
    pub op_index: u32,
    /// This rank, for messages.
    pub rank: u32,
    /// Where this rank's packets go, in the first half.
    pub target: [u64; MAX_FUSED],
    /// Where those of each source come, in the first half; 0 for this rank's input.
    pub source: [u64; MAX_FUSED],
    /// Which rank each source is, for messages.
    pub peer: [u32; MAX_FUSED],
}

/// The same where each target gets a block of the input of its own; the launch's `input` is this rank's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OneShotScatter {
    /// The rest.
    pub launch: OneShot,
    /// What each target gets, aligned to 16 bytes.
    pub origin: [u64; MAX_FUSED],
}

/// Moves that a [`Hop`] has room for: to all other ranks, and from all.
pub const MAX_MOVES: usize = 2 * MAX_FUSED;

/// The one parameter of the kernels that run a plan of one hop in one piece ([`super::fused::hop`]). Addresses are
/// the device's, those of buffers aligned to 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Hop {
    /// Size of a block in bytes.
    pub bytes: u64,
    /// Bytes of a thread block's part, a multiple of 16.
    pub step: u64,
    /// What the launch begins and ends with.
    pub counters: Counters,
    /// How waits end.
    pub context: GpuContext,
    /// This rank's semaphores, block after block, `channels` each.
    pub semaphores: u64,
    /// Ranks that a thread block meets.
    pub channels: u32,
    /// Who tells whom what: bits of [`super::fused::hop`].
    pub meets: u32,
    /// Moves before the second meeting, or those that send packets.
    pub first: u32,
    /// Moves after it, or those that take what has come; together at most [`MAX_MOVES`].
    pub second: u32,
    /// Index in the plan of the first wait, for messages.
    pub first_wait: u32,
    /// Of the second.
    pub second_wait: u32,
    /// Of the first move that takes packets.
    pub op_index: u32,
    /// This rank.
    pub rank: u32,
    /// Where each move goes; packets in the first half.
    pub target: [u64; MAX_MOVES],
    /// Where it is from; packets in the first half.
    pub source: [u64; MAX_MOVES],
    /// Whose that is.
    pub peer: [u32; MAX_MOVES],
}

/// The one parameter of the kernel that runs a two-shot plan in one piece ([`super::fused::two_shot`]).
/// Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TwoShot {
    /// Where this rank's chunk of the message begins, in bytes, a multiple of 16.
    pub begin: u64,
    /// Where it ends.
    pub end: u64,
    /// Bytes of a thread block's part, a multiple of 16.
    pub step: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
    /// What the launch begins and ends with.
    pub counters: Counters,
    /// How waits end.
    pub context: GpuContext,
    /// This rank's semaphores with every other, block after block.
    pub semaphores: u64,
    /// How to reduce.
    pub op: ReduceOp,
    /// What an average divides by; 0 for other operations.
    pub divisor: u32,
    /// Inputs that are reduced, at most [`MAX_FUSED`].
    pub sources: u32,
    /// Outputs that get the result, at most [`MAX_FUSED`].
    pub targets: u32,
    /// Other ranks.
    pub peers: u32,
    /// This rank, for messages.
    pub rank: u32,
    /// Index of the first wait in the plan, for messages.
    pub first_wait: u32,
    /// Of the second.
    pub second_wait: u32,
    /// The outputs, aligned to 16 bytes.
    pub target: [u64; MAX_FUSED],
    /// The inputs, aligned to 16 bytes.
    pub source: [u64; MAX_FUSED],
}

/// The one parameter of a kernel that multiplies elements by a scalar ([`super::scale`]). Addresses are the
/// device's, aligned to an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Where the products go: `src`, or no overlap with it.
    pub dst: u64,
    /// The elements.
    pub src: u64,
    /// Their size in bytes, a whole number of elements.
    pub bytes: u64,
    /// Where the scalar is; 0 if it is in `value`.
    pub scalar: u64,
    /// The scalar's bits, in the low bytes.
    pub value: u64,
}

/// The one parameter of a kernel that does the transfers of a launch ([`crate::exchange`]). Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExchangeLaunch {
    /// The prepared exchange.
    pub exchange: Exchange,
    /// What is sent and received: a block has at most [`MAX_CHAINS`] chains.
    pub transfers: Transfers,
    /// How waits end.
    pub context: GpuContext,
    /// How to reduce, where there is something to reduce.
    pub op: ReduceOp,
    /// Not used.
    pub reserved: u32,
}

/// One send, receive or copy of a [`MessagesLaunch`]: a message on all of its lanes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Message {
    /// Where it lies in this rank's buffer.
    pub address: u64,
    /// As [`Transfer::place`].
    pub place: u64,
    /// What is sent, or must come.
    pub envelope: Envelope,
    /// The other rank.
    pub peer: u32,
    /// What to do, but for reductions.
    pub direction: Direction,
    /// As [`Transfer::memory`].
    pub memory: u32,
    /// The first of its thread blocks, of which there is one for each lane.
    pub first: u32,
    /// Lanes.
    pub lanes: u32,
    /// Index among the calls of the group, for messages.
    pub op: u32,
}

impl Message {
    /// Its part on a lane.
    #[inline(always)]
    #[must_use]
    pub const fn transfer(&self, lane: u32) -> Transfer {
        let bytes = self.envelope.bytes;
        let part = match self.lanes {
            1 => Extent {
                begin: 0,
                end: bytes,
            },
            lanes => Extent {
                begin: 0,
                end: bytes,
            }
            .slice(lane, lanes),
        };
        Transfer {
            address: self.address + part.begin,
            envelope: self.envelope,
            bytes: part.len(),
            place: self.place + part.begin,
            done: 0,
            peer: self.peer,
            direction: self.direction,
            memory: self.memory,
            lane,
            next: NONE,
            op: self.op,
            state: State::New,
            reserved: 0,
        }
    }
}

/// Messages that a [`MessagesLaunch`] has room for.
pub const MAX_MESSAGES: usize = 16;

/// The one parameter of the kernel that gives every transfer of a launch a thread block
/// ([`run_single`](crate::exchange::run_single)). Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MessagesLaunch {
    /// The prepared exchange.
    pub exchange: Exchange,
    /// How waits end.
    pub context: GpuContext,
    /// A number of the launch, for messages.
    pub launch: u32,
    /// How many of `messages` there are.
    pub count: u32,
    /// What is sent, received and copied: no two in the same direction with the same peer.
    pub messages: [Message; MAX_MESSAGES],
}

/// Chains that a thread block of an [`ExchangeLaunch`] has room for.
pub const MAX_CHAINS: u32 = 64;

/// The one parameter of the kernel that signals a peer and waits for its signals. Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SignalLaunch {
    /// The semaphore with the peer.
    pub semaphore: Semaphore,
    /// How waits end.
    pub context: GpuContext,
    /// Signals that are waited for.
    pub waits: u32,
    /// Signals that are sent then.
    pub signals: u32,
    /// This rank, for messages.
    pub rank: u32,
    /// Not used.
    pub reserved: u32,
}

/// How normalised tokens are quantised.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quantisation {
    /// Not at all.
    #[default]
    None = 0,
    /// With one scale for all.
    Static = 1,
    /// With one for each token.
    PerToken = 2,
    /// With one for each group of a token ([`crate::norm::GROUP`]).
    PerGroup = 3,
}

/// What becomes of reduced tokens ([`super::norm`]), and the one parameter of the kernel that begins with tokens which have
/// been reduced. Addresses are the device's, aligned to an element at least.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Where the tokens go, normalised; and where they are, reduced, if another kernel has done that.
    pub output: u64,
    /// The residual stream, which is added to and replaced; 0 if there is none.
    pub residual: u64,
    /// One token's weights.
    pub weight: u64,
    /// Where quantised tokens go.
    pub values: u64,
    /// Where the scales go that quantisation finds.
    pub scales: u64,
    /// Tokens.
    pub tokens: u32,
    /// Elements of a token, a multiple of 8, at most 16384.
    pub hidden: u32,
    /// What is added to the mean square.
    pub epsilon: f32,
    /// The scale of [`Quantisation::Static`].
    pub scale: f32,
    /// Whether there is a quantised copy.
    pub quantisation: Quantisation,
    /// Not 0 if `output`, `residual` and `weight` are aligned to 16 bytes, and `values` to 8.
    pub aligned: u32,
}

/// The one parameter of the kernel that runs a one-shot plan and [`Norm`] in one piece
/// ([`super::fused::one_shot_norm`]). Everything is aligned. Thread blocks, which need not be as many as the plan's, take
/// whole tokens in turn; `step`, `output`, `op` and `divisor` of the plan's part do not count.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct OneShotNorm {
    /// The reduction.
    pub one_shot: OneShot,
    /// What follows it.
    pub norm: Norm,
}

/// The one parameter of the kernels that measure how long something takes to reach a peer: two sides send it to and fro, one
/// thread block each. Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EchoLaunch {
    /// To the other side. The first word of each side's memory is its flag.
    pub channel: MemoryChannel,
    /// The same by a proxy, where that is measured.
    pub port: PortChannel,
    /// Where data lies in both sides' memory, or packets come.
    pub data: u64,
    /// Where data comes, or what packets bring, which is what they take along.
    pub landing: u64,
    /// Bytes that go to and fro.
    pub bytes: u64,
    /// Address of the nanoseconds that it took.
    pub out: u64,
    /// How often they go and come; before that, a few times more, which are not timed.
    pub rounds: u32,
    /// The flag of the first time; those behind it follow.
    pub flag: u32,
    /// 0 for who begins, else 1.
    pub side: u32,
    /// By a proxy: how often data goes, with a signal each time, before the other side has its turn. Got from the other side: so
    /// many places, a line's multiple apart, are taken by turns, for caches know the one before.
    pub burst: u32,
    /// How waits end.
    pub context: GpuContext,
}

/// Times that are not timed.
pub const ECHO_WARMUP: u32 = 16;

/// The parameter of the one-shot all-reduce among the kernels for tests. Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OneShotLaunch {
    /// This rank's input.
    pub input: u64,
    /// This rank's output.
    pub output: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
    /// Addresses (`u64` each) of every rank's packet memory, as mapped here, in rank order. Each
    /// has two halves of `ranks` slots of `slot` bytes, zeroed at first.
    pub packets: u64,
    /// Bytes of a slot: at least twice the message, a multiple of 16.
    pub slot: u64,
    /// Two counters, a cache line each: the epoch (1 at first), and blocks that left (0).
    pub counters: u64,
    /// This rank.
    pub rank: u32,
    /// World size, at most [`MAX_OPERANDS`](super::MAX_OPERANDS) - 1.
    pub ranks: u32,
    /// How waits end.
    pub context: GpuContext,
}

// The host writes what the kernel reads, so neither may find padding where the other has a field.
const _: () = assert!(size_of::<GpuContext>() == 24);
const _: () = assert!(size_of::<Scale>() == 40);
const _: () = assert!(size_of::<OneShotLaunch>() == 80);
const _: () = assert!(
    size_of::<ExchangeLaunch>()
        == size_of::<Exchange>() + size_of::<Transfers>() + size_of::<GpuContext>() + 8
);
const _: () =
    assert!(size_of::<SignalLaunch>() == size_of::<Semaphore>() + size_of::<GpuContext>() + 16);
// A kernel brings its chains in pieces of 16 bytes.
const _: () = assert!(size_of::<Transfer>() == 80);
const _: () = assert!(size_of::<Message>() == 56);
const _: () =
    assert!(size_of::<MessagesLaunch>() == size_of::<Exchange>() + 32 + 56 * MAX_MESSAGES);
const _: () = assert!(
    size_of::<EchoLaunch>() == size_of::<MemoryChannel>() + size_of::<PortChannel>() + 48 + 24
);
const _: () = assert!(size_of::<Norm>() == 64);
const _: () = assert!(size_of::<OneShotNorm>() == size_of::<OneShot>() + size_of::<Norm>());
const _: () = assert!(size_of::<Waiting>() == 40);
const _: () = assert!(size_of::<StatusRecord>() == 32 + size_of::<Waiting>());
const _: () = assert!(
    size_of::<PlanLaunch>()
        == size_of::<Program>() + size_of::<Launch>() + size_of::<GpuContext>() + 16
);
const _: () = assert!(size_of::<TwoShot>() == 128 + 2 * 8 * MAX_FUSED);
const _: () = assert!(size_of::<OneShot>() == 112 + 2 * 8 * MAX_FUSED + 4 * MAX_FUSED);
const _: () = assert!(size_of::<OneShotScatter>() == size_of::<OneShot>() + 8 * MAX_FUSED);
const _: () = assert!(size_of::<Hop>() == 112 + 2 * 8 * MAX_MOVES + 4 * MAX_MOVES);
// Kernel parameters end at 4 KiB.
const _: () = assert!(size_of::<PlanLaunch>() <= 4096);
