//! Exchanges: sends and receives of any pattern, prepared once for all pairs of ranks.
//!
//! What is prepared knows nothing of messages: a group of [`Messages`] brings peers, sizes and buffers along
//! and is launched like a plan, on a GPU by `cuda`. [`crossweft_device::exchange`] says how messages travel.
#![allow(unsafe_code)]

mod cuda;
mod layout;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use crossweft_channel::{
    ChannelError, Endpoint, Guard, Image, ImageBuilder, RegisteredMemory, StopCause,
};
use crossweft_device::exchange::{
    Desk, Direction, Envelope, Exchange as Program, Fault, GAVE_UP, Incoming, LINE, LINES_BYTES,
    Lanes, Mapped, NO_MEMORY, Outgoing, Streams, Transfers, give_up, run_block, withdraw,
};
use crossweft_device::gpu::lines;
use crossweft_device::memory::Memory as _;
use crossweft_device::reduce::HostReducer;
use crossweft_device::{DataType, Raw, ReduceOp, Stopped, WaitKind};
use crossweft_hal::cpu::{Grid, Interrupted, Schedule, reducer};
use crossweft_hal::{Device, HalError, Memory, cuda as hal};
use crossweft_kernels::{MAX_OPERANDS, Message};
use crossweft_net::LONGEST_TIMEOUT;
use smallvec::SmallVec;

use crate::turn::Turn;
use cuda::Launcher;
use layout::Layout;

/// What an exchange is prepared for. Ranks must agree on all of it but the limit.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ExchangeOptions {
    /// Slots of each pair's ring: a power of two. As many small messages of a pair, or pieces of a large one,
    /// may be under way.
    pub slots: u32,
    /// Bytes of a slot: a multiple of 64, at least 128. Each rank has a ring for every rank. On GPUs that keep lines whole, slots
    /// are 8 KiB larger than that, for small messages.
    pub slot_bytes: u64,
    /// Rings of each pair, up to 4096. A large message is spread over them, for as many thread blocks: one on the CPU.
    pub lanes: u32,
    /// Registered memories from which receivers copy large messages themselves, which saves one copy.
    pub memories: Vec<Arc<RegisteredMemory>>,
    /// Element types of reductions on a GPU, whose kernels are loaded now; of at most 127 ranks.
    pub reduces: Vec<DataType>,
    /// The longest a launch may take, waits for peers included.
    pub limit: Duration,
}

/// Bytes of a message for each lane that it takes beyond the first.
const LANE_STEP: u64 = 32 << 10;
/// Lanes of a pair on GPUs: a thread block of each is sent by, and one received by, on a device of some 130 multiprocessors.
const MOST_LANES: u32 = 64;
/// No device has thread blocks for more.
const LANES_LIMIT: u32 = 4096;
/// Fewer between more ranks, to which a rank's messages are spread as well: about so many rings of a rank.
const RINGS: u32 = 256;

impl ExchangeOptions {
    /// The usual rings of the CPU: 16 slots of 16 KiB for each pair.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self {
            slots: 16,
            // Not a power of two: first lines of slots would compete for the same sets of a cache.
            slot_bytes: (16 << 10) + LINE,
            lanes: 1,
            memories: Vec::new(),
            reduces: Vec::new(),
            limit,
        }
    }

    /// The usual rings of a job: on GPUs 64 lanes of 8 slots of 64 KiB for each pair, fewer lanes where there are more than
    /// four ranks.
    #[must_use]
    pub fn usual(endpoint: &Endpoint, limit: Duration) -> Self {
        let of_cpu = Self::new(limit);
        match endpoint.device() {
            Device::Cpu => of_cpu,
            _ => Self {
                slots: 8,
                slot_bytes: (64 << 10) + lines::LINE,
                lanes: (RINGS / endpoint.world_size().max(1)).clamp(8, MOST_LANES),
                ..of_cpu
            },
        }
    }

    fn lanes(&self) -> Lanes {
        Lanes {
            count: self.lanes,
            step: LANE_STEP,
        }
    }
}

/// What a message belongs to. Both sides must say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Purpose {
    /// A send and a receive.
    Message,
    /// An all-to-all of blocks of any size.
    AllToAll,
    /// An all-gather of blocks of any size.
    AllGather,
    /// A gather of blocks of any size.
    Gather,
    /// A scatter of blocks of any size.
    Scatter,
    /// A reduce-scatter of blocks of any size.
    ReduceScatter(ReduceOp),
}

impl Purpose {
    const fn number(self) -> u64 {
        match self {
            Self::Message => 0,
            Self::AllToAll => 1,
            Self::AllGather => 2,
            Self::Gather => 3,
            Self::Scatter => 4,
            Self::ReduceScatter(op) => 5 + op as u64,
        }
    }

    fn name(number: u64) -> String {
        let name = match number {
            0 => return String::new(),
            1 => "all-to-all-v",
            2 => "all-gather-v",
            3 => "gather-v",
            4 => "scatter-v",
            n => {
                let op = ReduceOp::ALL.into_iter().find(|&op| op as u64 + 5 == n);
                let op = op.map_or_else(|| "unknown".to_owned(), |op| op.to_string());
                return format!(" of a reduce-scatter-v ({op})");
            }
        };
        format!(" of a {name}").replace("a all", "an all")
    }
}

/// What a message holds and belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Element type.
    pub dtype: DataType,
    /// What the message belongs to.
    pub purpose: Purpose,
}

/// Bits of a kind's number that hold the element type.
const DTYPE_BITS: u32 = 8;

impl Kind {
    const fn number(self) -> u64 {
        self.dtype as u64 | self.purpose.number() << DTYPE_BITS
    }
}

/// A message in words: `64 bytes of f32`.
fn words(envelope: &Envelope) -> String {
    let Envelope { bytes, kind } = *envelope;
    let dtype = DataType::ALL
        .into_iter()
        .find(|&dtype| dtype as u64 == kind & ((1 << DTYPE_BITS) - 1));
    let dtype = dtype.map_or("an unknown type", DataType::name);
    format!(
        "{bytes} bytes of {dtype}{}",
        Purpose::name(kind >> DTYPE_BITS)
    )
}

/// What can go wrong with an exchange. After anything but [`Usage`](Self::Usage) it cannot be used again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// Channels or registered memory could not be made.
    #[error(transparent)]
    Channel {
        /// What failed.
        #[from]
        source: ChannelError,
    },
    /// The device refused something.
    #[error("preparing an exchange: {source}")]
    Hal {
        /// What failed.
        #[from]
        source: HalError,
    },
    /// Options or a group that cannot be. Nothing was sent.
    #[error("exchange on rank {rank}: {reason}")]
    Usage {
        /// This rank.
        rank: u32,
        /// What is wrong.
        reason: String,
    },
    /// A message was not what its receiver asked for.
    #[error(
        "rank {rank}: messages do not match: rank {sender} sent rank {receiver} {sent}, which asked for \
         {wanted}; sends and receives of a pair match in order and must have the same size and type"
    )]
    Mismatch {
        /// This rank, one of the two.
        rank: u32,
        /// The other one.
        peer: u32,
        /// Who sent it.
        sender: u32,
        /// Who was to receive it.
        receiver: u32,
        /// Bytes that were sent.
        sent_bytes: u64,
        /// Bytes that were asked for.
        wanted_bytes: u64,
        /// What was sent, in words.
        sent: String,
        /// What was asked for, in words.
        wanted: String,
    },
    /// A rank that this one waits for has met messages that do not match.
    #[error("rank {rank}: {call}: the exchange has failed on rank {peer}, which says why")]
    PeerFailed {
        /// This rank.
        rank: u32,
        /// That rank.
        peer: u32,
        /// The send or receive that waited.
        call: String,
    },
    /// A rank that this one waits for has given up: it had waited too long itself, or lost a peer.
    #[error("rank {rank}: {call}: rank {peer} has given up the exchange, and says why")]
    PeerGaveUp {
        /// This rank.
        rank: u32,
        /// That rank.
        peer: u32,
        /// The send or receive that waited.
        call: String,
    },
    /// A wait was ended.
    #[error("rank {rank}: {call}: stopped while waiting for {waited_for}: {cause}")]
    Interrupted {
        /// This rank.
        rank: u32,
        /// The send or receive that waited.
        call: String,
        /// What for, from whom, and what was seen instead.
        waited_for: String,
        /// Why it ended.
        cause: Box<StopCause>,
    },
    /// An earlier launch has failed.
    #[error(
        "the exchange cannot be used again on rank {rank}, because an earlier call failed: make a new \
         communicator to go on"
    )]
    Poisoned {
        /// This rank.
        rank: u32,
    },
}

/// What is sent.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Source<'a> {
    /// Memory of this process.
    Slice(&'a [u8]),
    /// A range of this rank's part of a registered memory. Nobody may write it until the launch has ended.
    Registered(&'a RegisteredMemory, Range<u64>),
    /// Memory of this rank's device, by address.
    Region(Region),
    /// A range of a memory of this rank's device.
    Memory(&'a Memory, Range<u64>),
}

/// Memory of this rank's device, by address: buffers that others made, such as a framework's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    address: u64,
    bytes: u64,
}

impl Region {
    /// `bytes` bytes from `address`.
    ///
    /// # Safety
    /// For as long as launches that it is given to are under way, replays of a graph included, the memory must be valid
    /// for the rank's device, and nobody else may use it: what is sent may be read, what is received not even that.
    #[must_use]
    pub const unsafe fn new(address: u64, bytes: u64) -> Self {
        Self { address, bytes }
    }

    /// Its first byte.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// A range of its bytes; `None` if that does not lie in it.
    #[must_use]
    pub const fn part(self, range: Range<u64>) -> Option<Self> {
        if range.start > range.end || range.end > self.bytes {
            return None;
        }
        Some(Self {
            address: self.address + range.start,
            bytes: range.end - range.start,
        })
    }
}

/// Where a message goes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Destination<'a> {
    /// Memory of this process.
    Slice(&'a mut [u8]),
    /// A range of this rank's part of a registered memory. Nobody may access it until the launch has ended.
    Registered(&'a RegisteredMemory, Range<u64>),
    /// Memory of this rank's device, by address.
    Region(Region),
    /// A range of a memory of this rank's device.
    Memory(&'a Memory, Range<u64>),
}

/// A send or receive that was asked for.
#[derive(Clone, Copy, Debug)]
struct Request {
    direction: Direction,
    peer: u32,
    kind: Kind,
    address: u64,
    bytes: u64,
    /// For [`memory`](crossweft_device::exchange::Transfer::memory) and
    /// [`place`](crossweft_device::exchange::Transfer::place).
    memory: u32,
    place: u64,
}

impl Request {
    fn envelope(&self) -> Envelope {
        Envelope {
            bytes: self.bytes,
            kind: self.kind.number(),
        }
    }

    /// Call `op` of a group on so many lanes, whose thread blocks begin at `first`.
    fn message(&self, (first, lanes): (u32, u32), op: u32) -> Message {
        Message {
            address: self.address,
            place: self.place,
            envelope: self.envelope(),
            peer: self.peer,
            direction: self.direction,
            memory: self.memory,
            first,
            lanes,
            op,
        }
    }
}

/// `receive 2 of the group, 64 bytes of f32 from rank 1`.
fn call_words(direction: Direction, envelope: &Envelope, peer: u32, index: u32) -> String {
    let what = words(envelope);
    match direction {
        Direction::Send => format!("send {index} of the group, {what} to rank {peer}"),
        Direction::Reduce => format!("reduction {index} of the group, {what} from every rank"),
        Direction::Copy => format!("copy {index} of the group, {what}"),
        _ => format!("receive {index} of the group, {what} from rank {peer}"),
    }
}

/// For groups without a reduction: looking for the machine's instructions takes time.
const COPIES: HostReducer = HostReducer::new(DataType::U8, ReduceOp::Sum);

/// Requests of a group that take no allocation.
const INLINE: usize = 8;

/// A group of sends and receives, which [`run`](Self::run) does together: their order matters only among
/// those of one direction with one peer.
#[derive(Debug)]
#[must_use = "nothing is sent before it is run"]
pub struct Messages<'a> {
    exchange: &'a Exchange,
    requests: SmallVec<[Request; INLINE]>,
    /// What was wrong first.
    wrong: Option<String>,
    /// Whether all memory of the buffers is the exchange's too, or was promised to stay.
    are_kept: bool,
    buffers: PhantomData<&'a mut [u8]>,
}

/// What a message is sent from, or goes to.
struct Place {
    address: u64,
    bytes: u64,
    /// Where it lies in a memory of the exchange, by its number.
    offered: Option<(u32, u64)>,
}

impl<'a> Messages<'a> {
    /// Sends a message to `peer`, which may be this rank.
    pub fn send(&mut self, peer: u32, kind: Kind, source: Source<'a>) -> &mut Self {
        let Some(place) = self.source(&source) else {
            return self;
        };
        // A reduction looks for its messages in slots; and between GPUs, slots are written faster than memory is read.
        let is_slotted = peer == self.exchange.rank()
            || matches!(kind.purpose, Purpose::ReduceScatter(_))
            || !self.exchange.reads_well;
        let (memory, at) = match place.offered {
            Some(offered) if !is_slotted => offered,
            _ => (NO_MEMORY, 0),
        };
        self.push(Request {
            direction: Direction::Send,
            peer,
            kind,
            address: place.address,
            bytes: place.bytes,
            memory,
            place: at,
        })
    }

    /// Receives a message from `peer`, which may be this rank.
    pub fn receive(&mut self, peer: u32, kind: Kind, destination: Destination<'a>) -> &mut Self {
        let Some(Place { address, bytes, .. }) = self.destination(&destination) else {
            return self;
        };
        self.push(Request {
            direction: Direction::Receive,
            peer,
            kind,
            address,
            bytes,
            memory: NO_MEMORY,
            place: 0,
        })
    }

    /// Receives a message of every other rank and reduces them, with `own` in this rank's place, in rank
    /// order. No other receive may be in the group.
    pub fn reduce(
        &mut self,
        dtype: DataType,
        op: ReduceOp,
        own: Source<'a>,
        output: Destination<'a>,
    ) -> &mut Self {
        let purpose = Purpose::ReduceScatter(op);
        let kind = Kind { dtype, purpose };
        self.here(Direction::Reduce, kind, &own, &output)
    }

    /// Copies what this rank has itself, beside the messages.
    pub fn copy(&mut self, kind: Kind, from: Source<'a>, to: Destination<'a>) -> &mut Self {
        self.here(Direction::Copy, kind, &from, &to)
    }

    fn here(
        &mut self,
        direction: Direction,
        kind: Kind,
        own: &Source<'a>,
        output: &Destination<'a>,
    ) -> &mut Self {
        let (Some(own), Some(to)) = (self.source(own), self.destination(output)) else {
            return self;
        };
        if own.bytes != to.bytes {
            let what = match direction {
                Direction::Reduce => "reduction",
                _ => "copy",
            };
            return self.refuse(format!("a {what} of {} bytes into {}", own.bytes, to.bytes));
        }
        self.push(Request {
            direction,
            peer: 0,
            kind,
            address: to.address,
            bytes: to.bytes,
            memory: NO_MEMORY,
            place: own.address,
        })
    }

    /// Where a source lies, if it can be reached.
    fn source(&mut self, source: &Source<'_>) -> Option<Place> {
        match source {
            Source::Slice(data) => {
                self.slice(data.as_ptr().expose_provenance() as u64, data.len() as u64)
            }
            Source::Registered(memory, range) => self.registered(memory, range),
            Source::Region(region) => Some(self.region(*region)),
            Source::Memory(memory, range) => self.memory(memory, range),
        }
    }

    /// Where a destination lies, if it can be reached.
    fn destination(&mut self, destination: &Destination<'_>) -> Option<Place> {
        match destination {
            Destination::Slice(data) => {
                self.slice(data.as_ptr().expose_provenance() as u64, data.len() as u64)
            }
            Destination::Registered(memory, range) => self.registered(memory, range),
            Destination::Region(region) => Some(self.region(*region)),
            Destination::Memory(memory, range) => self.memory(memory, range),
        }
    }

    fn slice(&mut self, address: u64, bytes: u64) -> Option<Place> {
        if let Machine::Cuda(_) = self.exchange.machine {
            self.refuse("a message lies in the host's memory; ranks are on cuda".to_owned());
            return None;
        }
        Some(Place {
            address,
            bytes,
            offered: None,
        })
    }

    fn registered(&mut self, memory: &RegisteredMemory, range: &Range<u64>) -> Option<Place> {
        let known = (0..)
            .zip(&self.exchange.memories)
            .find(|(_, known)| std::ptr::eq(Arc::as_ptr(known), memory));
        let offered = known.map(|(index, _)| (index, range.start));
        self.are_kept &= offered.is_some();
        let (address, bytes) = self.locate(memory, range)?;
        Some(Place {
            address,
            bytes,
            offered,
        })
    }

    fn memory(&mut self, memory: &Memory, range: &Range<u64>) -> Option<Place> {
        let is_here = match (&self.exchange.machine, memory) {
            (Machine::Cpu(_), Memory::Cpu(_)) => true,
            (Machine::Cuda(launcher), Memory::Cuda(memory)) => launcher.has(memory),
            _ => false,
        };
        if !is_here {
            let device = self.exchange.endpoint.device().name();
            self.refuse(format!(
                "a message lies in memory that is not of this rank's {device} device"
            ));
            return None;
        }
        // Only for as long as the borrow.
        self.are_kept = false;
        let (address, bytes) = self.within(memory.addr(), memory.bytes(), range)?;
        Some(Place {
            address,
            bytes,
            offered: None,
        })
    }

    fn region(&self, region: Region) -> Place {
        let Region { address, bytes } = region;
        let memories = (0..).zip(&self.exchange.memories);
        let within = |(index, memory): (u32, &Arc<RegisteredMemory>)| {
            let at = address.checked_sub(memory.local().addr())?;
            let end = at.checked_add(bytes)?;
            (end <= memory.bytes()).then_some((index, at))
        };
        Place {
            address,
            bytes,
            offered: memories.filter_map(within).next(),
        }
    }

    /// Does all of it. Blocks until every receive is complete and the buffer of every send may be changed; a
    /// message may then still wait for its receiver in a slot. Leaves an empty group.
    ///
    /// # Errors
    /// [`ExchangeError`]; after anything but [`ExchangeError::Usage`] destinations are undefined.
    pub fn run(&mut self) -> Result<(), ExchangeError> {
        let (requests, wrong) = (&self.requests, self.wrong.take());
        let result = match wrong {
            Some(reason) => Err(self.exchange.usage(reason)),
            None => self.exchange.launch(requests, self.buffers),
        };
        self.clear();
        result
    }

    /// Launches all of it in the order of a stream of this rank's GPU, which may be recording a graph, and returns at
    /// once. What goes wrong on the device shows up in [`Exchange::check`]. Groups of one exchange follow one another,
    /// whatever streams they are on, but for those that are recorded: replays must not run at the same time as others.
    ///
    /// An exchange that is dropped waits for what it has launched, at most for its limit; graphs must not outlive it.
    ///
    /// # Errors
    /// [`ExchangeError::Usage`]: ranks are not on GPUs, or something lies in a borrowed memory, or in a registered one that
    /// the exchange was not prepared with, which nobody would keep; [`ExchangeError::Hal`], [`ExchangeError::Poisoned`], and what
    /// [`Exchange::check`] says.
    pub fn run_on(&mut self, stream: &hal::Stream) -> Result<(), ExchangeError> {
        let result = match (self.wrong.take(), &self.exchange.machine) {
            (Some(reason), _) => Err(self.exchange.usage(reason)),
            (None, Machine::Cpu(_)) => {
                let reason = "it was prepared for the cpu, which has no such streams";
                Err(self.exchange.usage(reason.to_owned()))
            }
            (None, Machine::Cuda(_)) if !self.are_kept => {
                let reason = "a message lies in memory that is only borrowed, and not the exchange's: give its address";
                Err(self.exchange.usage(reason.to_owned()))
            }
            (None, Machine::Cuda(launcher)) => {
                self.exchange.enqueue(launcher, stream, &self.requests)
            }
        };
        self.clear();
        result
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.are_kept = true;
    }

    fn push(&mut self, request: Request) -> &mut Self {
        let world_size = self.exchange.endpoint.world_size();
        let Request {
            peer, bytes, kind, ..
        } = request;
        if peer >= world_size {
            return self.refuse(format!(
                "there is no rank {peer} in a world of {world_size}"
            ));
        }
        let dtype = kind.dtype;
        if !bytes.is_multiple_of(dtype.size() as u64) {
            return self.refuse(format!("{bytes} bytes are no whole number of {dtype}"));
        }
        self.requests.push(request);
        self
    }

    #[cold]
    fn refuse(&mut self, reason: String) -> &mut Self {
        self.wrong.get_or_insert(reason);
        self
    }

    /// Address and size of a range of registered memory.
    fn locate(&mut self, memory: &RegisteredMemory, range: &Range<u64>) -> Option<(u64, u64)> {
        self.within(memory.local().addr(), memory.bytes(), range)
    }

    /// Address and size of a range of `size` bytes from `address`.
    fn within(&mut self, address: u64, size: u64, range: &Range<u64>) -> Option<(u64, u64)> {
        if range.start > range.end || range.end > size {
            let Range { start, end } = range;
            self.refuse(format!(
                "bytes {start}..{end} lie outside a memory of {size} bytes"
            ));
            return None;
        }
        Some((address + range.start, range.end - range.start))
    }
}

/// Streams between all pairs of ranks, ready for groups of messages. Launches allocate nothing once there was
/// one of that many messages.
#[derive(Debug)]
pub struct Exchange {
    endpoint: Arc<Endpoint>,
    program: Program,
    machine: Machine,
    /// Whether receivers had better copy large messages themselves: on CPUs, and where all share a GPU.
    reads_well: bool,
    poisoned: AtomicBool,
    limit: Duration,
    memories: Vec<Arc<RegisteredMemory>>,
    /// What the program points to; none when it is dropped.
    image: Option<Image>,
    rings: Arc<RegisteredMemory>,
}

impl Drop for Exchange {
    /// Waits for launches that nobody else may have waited for: memory is unmapped under kernels that use it, which ends the
    /// context.
    fn drop(&mut self) {
        let Machine::Cuda(launcher) = &self.machine else {
            return;
        };
        if let Err(error) = launcher.finish() {
            tracing::warn!(%error, "an exchange was dropped while its launches run");
            // With it the context stays.
            std::mem::forget((
                Arc::clone(launcher),
                Arc::clone(&self.rings),
                self.memories.clone(),
                self.image.take(),
            ));
        }
    }
}

/// Says why a GPU cannot reduce what so many ranks have, if it cannot: a thread block has one table of operands.
fn check_operands(ranks: u32) -> Result<(), String> {
    match ranks < MAX_OPERANDS {
        true => Ok(()),
        false => Err(format!(
            "reductions of {ranks} ranks on GPUs; there can be {} at most: name no types to reduce",
            MAX_OPERANDS - 1
        )),
    }
}

/// What runs launches.
#[derive(Debug)]
enum Machine {
    Cpu(Turn<(Grid, Layout)>),
    Cuda(Arc<Launcher>),
}

impl Exchange {
    /// Prepares the streams of all pairs. Collective; blocks until all ranks have called it, at most until
    /// `deadline`.
    ///
    /// # Errors
    /// [`ExchangeError`]: options that cannot be, ranks disagree, one died or was late or runs on
    /// another host, or there is no memory.
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        options: ExchangeOptions,
        deadline: Instant,
    ) -> Result<Arc<Self>, ExchangeError> {
        let what = "preparing an exchange";
        let every_lane = options.lanes();
        let ExchangeOptions {
            slots,
            slot_bytes,
            lanes,
            memories,
            reduces,
            limit,
        } = options;
        let limit = limit.min(LONGEST_TIMEOUT);
        let (rank, ranks) = (endpoint.rank(), endpoint.world_size());
        // By what all ranks call them: a message names the memory that it lies in by its place in this list.
        let named = memories
            .iter()
            .map(|memory| (memory.keys(), memory.bytes()));
        let named: Vec<_> = named
            .map(|(keys, bytes)| format!("{keys:?} of {bytes} bytes"))
            .collect();
        let named = named.join(", ");
        let device = endpoint.device();
        // All ranks load kernels, or refuse to, alike.
        let types: Vec<_> = reduces.iter().map(ToString::to_string).collect();
        let statement = format!(
            "{slots} slots of {slot_bytes} bytes on {lanes} lanes of {}, memories ({named}), reductions ({})",
            device.name(),
            types.join(", ")
        );
        endpoint.agree(&statement, what, deadline)?;
        let usage = |reason: String| ExchangeError::Usage { rank, reason };
        if !reduces.is_empty() && !matches!(device, Device::Cpu) {
            check_operands(ranks).map_err(usage)?;
        }
        if !slots.is_power_of_two() {
            return Err(usage(format!("{slots} slots; it must be a power of two")));
        }
        if slot_bytes < 2 * LINE || !slot_bytes.is_multiple_of(LINE) {
            return Err(usage(format!(
                "slots of {slot_bytes} bytes; it must be a multiple of {LINE}, at least {}",
                2 * LINE
            )));
        }
        let too_much = || {
            usage(format!(
                "{lanes} lanes of {slots} slots of {slot_bytes} bytes cannot be"
            ))
        };
        let pairs = lanes.checked_mul(ranks);
        let pairs = pairs.filter(|_| (1..=LANES_LIMIT).contains(&lanes));
        let pairs = pairs.ok_or_else(too_much)?;
        // Which are aligned to themselves, as are the rings then.
        let (of_lines, unit) = match endpoint.keeps_lines() {
            true => (LINES_BYTES, lines::LINE),
            false => (0, LINE),
        };
        let slot_bytes = slot_bytes
            .checked_add(of_lines)
            .and_then(|bytes| bytes.checked_next_multiple_of(unit));
        let slot_bytes = slot_bytes.ok_or_else(too_much)?;
        let lines = (u64::from(pairs) * LINE).next_multiple_of(unit);
        let ring = u64::from(slots).checked_mul(slot_bytes);
        let bytes = ring
            .and_then(|ring| ring.checked_mul(pairs.into()))
            .and_then(|rings| rings.checked_add(lines));
        let (Some(ring), Some(bytes)) = (ring, bytes) else {
            return Err(too_much());
        };
        let rings = endpoint.allocate_registered(bytes, what, deadline)?;
        let own = rings.local().addr();
        let streams = (0..lanes)
            .flat_map(|lane| (0..ranks).map(move |peer| (lane, peer)))
            .map(|(lane, peer)| {
                // Of the same lane, by the other rank.
                let here = u64::from(lane * ranks + rank);
                let there = u64::from(lane * ranks + peer);
                let base = rings.addr(peer)?;
                Ok(Streams {
                    outgoing: Outgoing {
                        ring: base + lines + here * ring,
                        reports: own + there * LINE,
                        ..Outgoing::default()
                    },
                    incoming: Incoming {
                        ring: own + lines + there * ring,
                        reports: base + here * LINE,
                        ..Incoming::default()
                    },
                })
            })
            .collect::<Result<Vec<_>, ChannelError>>();
        let map = |memory: &Arc<RegisteredMemory>, peer| {
            let (address, bytes) = (memory.addr(peer)?, memory.bytes());
            Ok(Mapped { address, bytes })
        };
        let mapped = memories
            .iter()
            .flat_map(|memory| (0..ranks).map(move |peer| map(memory, peer)))
            .collect::<Result<Vec<_>, ChannelError>>();
        let prepared = || {
            let (streams, mapped) = (streams?, mapped?);
            let mut image = ImageBuilder::default();
            let streams = image.put(&streams);
            let mapped = image.put(&mapped);
            let fault = image.put(&[Fault::default()]);
            let image = image.finish(device, what)?;
            let layout = Layout::new(ranks, every_lane);
            // Launches that are waited for borrow a stream; each rank holds one until all have come, as for plans.
            let (machine, stream) = match device {
                Device::Cuda(context) => {
                    let share = (endpoint.sharers(), endpoint.waiting_blocks());
                    let launcher = Launcher::new(context, layout, share, &reduces, limit)
                        .map_err(HalError::from)?;
                    let stream = launcher.stream().map_err(HalError::from)?;
                    (Machine::Cuda(Arc::new(launcher)), Some(stream))
                }
                _ => {
                    let grid = Grid::new(1, Schedule::default())?;
                    (Machine::Cpu(Turn::new((grid, layout))), None)
                }
            };
            Ok(((streams, mapped, fault), image, machine, stream))
        };
        // No rank sends to one that cannot receive.
        let ((streams, mapped, fault), image, machine, _stream) =
            endpoint.settle(prepared(), what, deadline, ExchangeError::from)?;
        let program = Program {
            streams: image.addr(streams),
            mapped: image.addr(mapped),
            faults: match &machine {
                Machine::Cpu(_) => image.addr(fault),
                Machine::Cuda(launcher) => launcher.faults(),
            },
            own: own + u64::from(rank) * LINE,
            slot_bytes,
            lines: of_lines,
            slots,
            rank,
            ranks,
            element: 1,
            memories: memories.len() as u32,
        };
        Ok(Arc::new(Self {
            endpoint: Arc::clone(endpoint),
            program,
            machine,
            reads_well: matches!(device, Device::Cpu) || endpoint.sharers() == ranks,
            poisoned: AtomicBool::new(false),
            limit,
            memories,
            image: Some(image),
            rings,
        }))
    }

    /// An empty group of messages.
    #[inline]
    pub fn messages(&self) -> Messages<'_> {
        Messages {
            exchange: self,
            requests: SmallVec::new(),
            wrong: None,
            are_kept: true,
            buffers: PhantomData,
        }
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.endpoint.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.endpoint.world_size()
    }

    /// Bytes of the rings that it holds on this rank.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.rings.bytes()
    }

    /// Whether every launch that has ended, ended well; does not block. On a GPU, ask after the stream has come to its
    /// end.
    ///
    /// # Errors
    /// On a GPU what ended the first launch that ended badly, as [`Messages::run`] would say it;
    /// [`ExchangeError::Poisoned`] on the CPU.
    pub fn check(&self) -> Result<(), ExchangeError> {
        match &self.machine {
            Machine::Cpu(_) => self.check_whole(),
            Machine::Cuda(launcher) => {
                let desk = launcher.desk(Duration::from_secs(1));
                self.check_on(launcher, desk.as_deref())
            }
        }
    }

    fn check_on(
        &self,
        launcher: &Launcher,
        desk: Option<&cuda::Desk>,
    ) -> Result<(), ExchangeError> {
        let Some(interrupted) = launcher.interrupted() else {
            return Ok(());
        };
        self.poisoned.store(true, Ordering::Relaxed);
        let guard = Guard::new(&self.endpoint, self.limit);
        let site = interrupted.waiting.site;
        let call = desk.and_then(|desk| Launcher::call(desk, site.channel, site.op));
        let fault = launcher.fault(interrupted.block);
        Err(self.explain(&interrupted, call, &fault, &guard))
    }

    /// Ends the waits of everything that was launched on a GPU, and of what will be, within about a millisecond: for who has
    /// heard of a failure while nobody waits for the stream.
    pub fn end_waits(&self) {
        if let Machine::Cuda(launcher) = &self.machine {
            launcher.end_waits();
        }
    }

    fn check_whole(&self) -> Result<(), ExchangeError> {
        match self.poisoned.load(Ordering::Relaxed) {
            true => Err(ExchangeError::Poisoned { rank: self.rank() }),
            false => Ok(()),
        }
    }

    fn usage(&self, reason: String) -> ExchangeError {
        let rank = self.rank();
        ExchangeError::Usage { rank, reason }
    }

    /// The type and operation of the reduction among the requests.
    fn reduction(
        &self,
        requests: &[Request],
    ) -> Result<Option<(DataType, ReduceOp)>, ExchangeError> {
        let reduction = requests.iter().find(|r| r.direction == Direction::Reduce);
        let receives = |r: &&Request| matches!(r.direction, Direction::Receive | Direction::Reduce);
        if reduction.is_some() && requests.iter().filter(receives).count() > 1 {
            return Err(self.usage("a reduction stands beside other receives".to_owned()));
        }
        Ok(match reduction.map(|request| request.kind) {
            Some(Kind {
                dtype,
                purpose: Purpose::ReduceScatter(op),
            }) => Some((dtype, op)),
            _ => None,
        })
    }

    /// Launches requests whose buffers the borrows vouch for, and waits for the end.
    fn launch(
        &self,
        requests: &[Request],
        borrows: PhantomData<&mut [u8]>,
    ) -> Result<(), ExchangeError> {
        match &self.machine {
            Machine::Cpu(machine) => self.launch_here(machine, requests, borrows),
            Machine::Cuda(launcher) => {
                let stream = launcher.stream().map_err(HalError::from)?;
                self.enqueue(launcher, &stream, requests)?;
                let guard = Guard::new(&self.endpoint, self.limit);
                let failed =
                    || self.endpoint.group().liveness().stopped() || guard.is_interrupted();
                let waited = launcher.wait(&stream, self.limit, failed);
                // What ended badly says more than what became of the stream.
                self.check()?;
                waited.map_err(|error| HalError::from(error).into())
            }
        }
    }

    /// Launches requests in the order of a stream.
    fn enqueue(
        &self,
        launcher: &Launcher,
        stream: &hal::Stream,
        requests: &[Request],
    ) -> Result<(), ExchangeError> {
        let reduction = self.reduction(requests)?;
        if requests.is_empty() {
            return Ok(());
        }
        self.check_whole()?;
        let Some(mut desk) = launcher.desk(self.limit) else {
            let limit = self.limit;
            return Err(self.usage(format!(
                "another group is still being launched after {limit:?}"
            )));
        };
        let table = launcher.lay_out(&mut desk, stream, requests)?;
        // What used the table before has ended, so what became of it is known; the words are still there.
        self.check_on(launcher, Some(&desk))?;
        Launcher::name(&mut desk, table, requests);
        let mut program = self.program;
        if let Some((dtype, _)) = reduction {
            program.element = dtype.size() as u32;
        }
        // SAFETY: the program was prepared for this device, and what it points to lives in `self`, which waits for its
        // launches when it is dropped. Requests were checked when they were made: ranges of registered memory that
        // is kept, or regions whose makers have promised the rest.
        let launched = unsafe { launcher.launch(&mut desk, stream, &program, table, reduction) };
        launched.map_err(|error| match error {
            cuda::Unlaunched::Hal(error) => error.into(),
            cuda::Unlaunched::Unprepared(dtype) => self.usage(format!(
                "a reduction of {dtype}, for which no kernel was loaded: name the type when the exchange is prepared"
            )),
        })
    }

    fn launch_here(
        &self,
        machine: &Turn<(Grid, Layout)>,
        requests: &[Request],
        _borrows: PhantomData<&mut [u8]>,
    ) -> Result<(), ExchangeError> {
        let reduction = self.reduction(requests)?;
        let guard = Guard::new(&self.endpoint, self.limit);
        // Launches follow one another, whichever threads they come from.
        let Some(mut machine) = machine.take(self.limit) else {
            let limit = self.limit;
            return Err(self.usage(format!("another group of it still runs after {limit:?}")));
        };
        self.check_whole()?;
        let (grid, layout) = &mut *machine;
        layout.lay_out(requests);
        let chains = layout.chains.as_mut_ptr().expose_provenance() as u64;
        let table = Transfers {
            chains,
            followers: layout.followers.as_ptr().expose_provenance() as u64,
            count: layout.chains.len() as u32,
            blocks: 1,
            launch: 0,
            reserved: 0,
        };
        // Laid out anew for each launch, so they may change where they are.
        let desk = Desk { chains, board: 0 };
        let mut program = self.program;
        let reducer = match reduction {
            Some((dtype, op)) => {
                program.element = dtype.size() as u32;
                reducer(dtype, op)
            }
            None => COPIES,
        };
        let context = self.endpoint.context(&guard);
        // SAFETY: the program was prepared for this process, what it points to lives in `self`, and whoever
        // has the turn is alone with it. The tables lie in the layout. Borrows vouch for slices until this
        // returns, and ranges of registered memory were checked; that nobody else uses them meanwhile is
        // part of what a call means: they are only accessed by raw copies.
        let result = grid.launch(&context, &|block, index| unsafe {
            run_block(block, &reducer, &program, &table, index, desk)
        });
        result.map_err(|interrupted| {
            self.poisoned.store(true, Ordering::Relaxed);
            // SAFETY: the launch has ended, and whoever has the turn is alone with the program.
            unsafe { withdraw(&Raw, &self.program) };
            // Only then may the caller write to what was offered.
            fence(Ordering::SeqCst);
            let index = interrupted.waiting.site.op;
            let call = requests.get(index as usize).map(|request| {
                call_words(request.direction, &request.envelope(), request.peer, index)
            });
            // SAFETY: the image's record, which the launch that has ended wrote.
            let fault: Fault = unsafe { Raw.read(self.program.faults) };
            let error = self.explain(&interrupted, call, &fault, &guard);
            // What ends the job everybody hears of, in better words.
            if let ExchangeError::Interrupted { cause, .. } = &error
                && !matches!(**cause, StopCause::Failure(_))
            {
                // SAFETY: as above.
                unsafe { give_up(&Raw, &self.program) };
            }
            error
        })
    }

    #[cold]
    fn explain(
        &self,
        interrupted: &Interrupted,
        call: Option<String>,
        fault: &Fault,
        guard: &Guard<'_>,
    ) -> ExchangeError {
        let rank = self.rank();
        let Interrupted {
            stopped, waiting, ..
        } = *interrupted;
        let peer = waiting.site.peer;
        let call = call.unwrap_or_else(|| "a group".to_owned());
        match (stopped, waiting.site.kind) {
            (Stopped::Mismatch, WaitKind::Envelope) => {
                let Fault {
                    sender,
                    receiver,
                    sent,
                    wanted,
                } = *fault;
                ExchangeError::Mismatch {
                    rank,
                    peer,
                    sender,
                    receiver,
                    sent_bytes: sent.bytes,
                    wanted_bytes: wanted.bytes,
                    sent: words(&sent),
                    wanted: words(&wanted),
                }
            }
            (Stopped::Mismatch, _) if waiting.seen == GAVE_UP => {
                ExchangeError::PeerGaveUp { rank, peer, call }
            }
            (Stopped::Mismatch, _) => ExchangeError::PeerFailed { rank, peer, call },
            _ => ExchangeError::Interrupted {
                rank,
                call,
                waited_for: Guard::describe(&waiting),
                cause: Box::new(guard.cause(stopped, &waiting)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_reduction_has_more_operands_than_a_table() {
        // One of each rank, and the output.
        assert_eq!(check_operands(MAX_OPERANDS - 1), Ok(()));
        let reason = check_operands(MAX_OPERANDS).unwrap_err();
        assert!(
            reason.contains("of 128 ranks") && reason.contains("127 at most"),
            "{reason}"
        );
    }
}
