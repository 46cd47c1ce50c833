//! Exchanges: sends and receives of any pattern, prepared once for all pairs of ranks.
//!
//! What is prepared knows nothing of messages: a group of [`Messages`] brings peers, sizes and buffers along
//! and is launched like a plan. [`crossweft_device::exchange`] says how messages travel.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use crossweft_channel::{
    ChannelError, Endpoint, Guard, Image, ImageBuilder, RegisteredMemory, StopCause,
};
use crossweft_device::exchange::{
    Direction, Envelope, Exchange as Program, Fault, GAVE_UP, Incoming, LINE, Mapped, NO_MEMORY,
    NONE, Outgoing, State, Streams, Transfer, Transfers, give_up, run_block, withdraw,
};
use crossweft_device::reduce::HostReducer;
use crossweft_device::{DataType, Memory as _, Raw, ReduceOp, Stopped, WaitKind};
use crossweft_hal::cpu::{Grid, Interrupted, Schedule, reducer};
use crossweft_hal::{Device, HalError};
use smallvec::SmallVec;

use crate::turn::Turn;

/// What an exchange is prepared for. Ranks must agree on all of it but the limit.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ExchangeOptions {
    /// Slots of each pair's ring: a power of two. As many small messages of a pair, or pieces of a large one,
    /// may be under way.
    pub slots: u32,
    /// Bytes of a slot: a multiple of 64, at least 128. Each rank has a ring for every rank.
    pub slot_bytes: u64,
    /// Registered memories from which receivers copy large messages themselves, which saves one copy.
    pub memories: Vec<Arc<RegisteredMemory>>,
    /// The longest a launch may take, waits for peers included.
    pub limit: Duration,
}

impl ExchangeOptions {
    /// The usual rings: 16 slots of 16 KiB for each pair.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self {
            slots: 16,
            // Not a power of two: first lines of slots would compete for the same sets of a cache.
            slot_bytes: (16 << 10) + LINE,
            memories: Vec::new(),
            limit,
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
}

/// Where a message goes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Destination<'a> {
    /// Memory of this process.
    Slice(&'a mut [u8]),
    /// A range of this rank's part of a registered memory. Nobody may access it until the launch has ended.
    Registered(&'a RegisteredMemory, Range<u64>),
}

/// A send or receive that was asked for.
#[derive(Clone, Copy, Debug)]
struct Request {
    direction: Direction,
    peer: u32,
    kind: Kind,
    address: u64,
    bytes: u64,
    /// For [`Transfer::memory`] and [`Transfer::place`].
    memory: u32,
    place: u64,
}

impl Request {
    /// `receive 2 of 64 bytes of f32 from rank 1`.
    fn words(&self, index: usize) -> String {
        let what = words(&self.envelope());
        let peer = self.peer;
        match self.direction {
            Direction::Send => format!("send {index} of the group, {what} to rank {peer}"),
            Direction::Reduce => format!("reduction {index} of the group, {what} from every rank"),
            _ => format!("receive {index} of the group, {what} from rank {peer}"),
        }
    }

    fn envelope(&self) -> Envelope {
        Envelope {
            bytes: self.bytes,
            kind: self.kind.number(),
        }
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
    buffers: PhantomData<&'a mut [u8]>,
}

impl<'a> Messages<'a> {
    /// Sends a message to `peer`, which may be this rank.
    pub fn send(&mut self, peer: u32, kind: Kind, source: Source<'a>) -> &mut Self {
        let exchange = self.exchange;
        let is_own = peer == exchange.endpoint.rank();
        let (address, bytes, memory, place) = match source {
            Source::Slice(data) => {
                let address = data.as_ptr().expose_provenance() as u64;
                (address, data.len() as u64, NO_MEMORY, 0)
            }
            Source::Registered(memory, range) => {
                let Some((address, bytes)) = self.locate(memory, &range) else {
                    return self;
                };
                let index = (0..)
                    .zip(&exchange.memories)
                    .find(|(_, known)| std::ptr::eq(Arc::as_ptr(known), memory));
                // A reduction looks for its messages in slots.
                let is_reduced = matches!(kind.purpose, Purpose::ReduceScatter(_));
                let index = index
                    .filter(|_| !is_own && !is_reduced)
                    .map_or(NO_MEMORY, |(index, _)| index);
                (address, bytes, index, range.start)
            }
        };
        self.push(Request {
            direction: Direction::Send,
            peer,
            kind,
            address,
            bytes,
            memory,
            place,
        })
    }

    /// Receives a message from `peer`, which may be this rank.
    pub fn receive(&mut self, peer: u32, kind: Kind, destination: Destination<'a>) -> &mut Self {
        let (address, bytes) = match destination {
            Destination::Slice(data) => {
                let address = data.as_mut_ptr().expose_provenance() as u64;
                (address, data.len() as u64)
            }
            Destination::Registered(memory, range) => match self.locate(memory, &range) {
                Some(located) => located,
                None => return self,
            },
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
        own: &'a [u8],
        output: &'a mut [u8],
    ) -> &mut Self {
        if own.len() != output.len() {
            let (own, output) = (own.len(), output.len());
            return self.refuse(format!("a reduction of {own} bytes into {output}"));
        }
        let purpose = Purpose::ReduceScatter(op);
        self.push(Request {
            direction: Direction::Reduce,
            peer: 0,
            kind: Kind { dtype, purpose },
            address: output.as_mut_ptr().expose_provenance() as u64,
            bytes: output.len() as u64,
            memory: NO_MEMORY,
            place: own.as_ptr().expose_provenance() as u64,
        })
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
        self.requests.clear();
        result
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
        let size = memory.bytes();
        if range.start > range.end || range.end > size {
            let Range { start, end } = range;
            self.refuse(format!(
                "bytes {start}..{end} lie outside a memory of {size} bytes"
            ));
            return None;
        }
        let address = memory.local().addr() + range.start;
        Some((address, range.end - range.start))
    }
}

/// Streams between all pairs of ranks, ready for groups of messages. Launches allocate nothing once there was
/// one of that many messages.
#[derive(Debug)]
pub struct Exchange {
    endpoint: Arc<Endpoint>,
    program: Program,
    desk: Turn<Desk>,
    poisoned: AtomicBool,
    limit: Duration,
    memories: Vec<Arc<RegisteredMemory>>,
    // What the program points to.
    image: Image,
    fault: u64,
    rings: Arc<RegisteredMemory>,
}

/// Where a launch's transfers are laid out.
#[derive(Debug)]
struct Desk {
    grid: Grid,
    transfers: Vec<Transfer>,
    chains: Vec<u32>,
    /// For each direction and peer the last transfer of its chain.
    last: Vec<u32>,
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
        let ExchangeOptions {
            slots,
            slot_bytes,
            memories,
            limit,
        } = options;
        let (rank, ranks) = (endpoint.rank(), endpoint.world_size());
        // By what all ranks call them: a message names the memory that it lies in by its place in this list.
        let named = memories
            .iter()
            .map(|memory| (memory.keys(), memory.bytes()));
        let named: Vec<_> = named
            .map(|(keys, bytes)| format!("{keys:?} of {bytes} bytes"))
            .collect();
        let named = named.join(", ");
        let statement = format!("{slots} slots of {slot_bytes} bytes, memories ({named})");
        endpoint.agree(&statement, what, deadline)?;
        let usage = |reason: String| ExchangeError::Usage { rank, reason };
        if !slots.is_power_of_two() {
            return Err(usage(format!("{slots} slots; it must be a power of two")));
        }
        if slot_bytes < 2 * LINE || !slot_bytes.is_multiple_of(LINE) {
            return Err(usage(format!(
                "slots of {slot_bytes} bytes; it must be a multiple of {LINE}, at least {}",
                2 * LINE
            )));
        }
        if !matches!(endpoint.device(), Device::Cpu) {
            let device = endpoint.device().name();
            return Err(usage(format!(
                "it is on {device}; exchanges run on the cpu"
            )));
        }
        let lines = u64::from(ranks) * LINE;
        let ring = u64::from(slots).checked_mul(slot_bytes);
        let bytes = ring
            .and_then(|ring| ring.checked_mul(ranks.into()))
            .and_then(|rings| rings.checked_add(lines));
        let (Some(ring), Some(bytes)) = (ring, bytes) else {
            return Err(usage(format!(
                "{slots} slots of {slot_bytes} bytes are too much"
            )));
        };
        let rings = endpoint.allocate_registered(bytes, what, deadline)?;
        let own = rings.local().addr();
        let streams = (0..ranks)
            .map(|peer| {
                let (here, there) = (u64::from(rank), u64::from(peer));
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
            let image = image.finish(endpoint.device(), what)?;
            let grid = Grid::new(1, Schedule::default())?;
            Ok(((streams, mapped, fault), image, grid))
        };
        // No rank sends to one that cannot receive.
        let ((streams, mapped, fault), image, grid) =
            endpoint.settle(prepared(), what, deadline, ExchangeError::from)?;
        let program = Program {
            streams: image.addr(streams),
            mapped: image.addr(mapped),
            fault: image.addr(fault),
            // Blocks have one thread here.
            boards: 0,
            slot_bytes,
            slots,
            rank,
            ranks,
            element: 1,
            memories: memories.len() as u32,
        };
        let desk = Desk {
            grid,
            transfers: Vec::with_capacity(INLINE),
            chains: Vec::with_capacity(INLINE),
            last: vec![NONE; 2 * ranks as usize],
        };
        Ok(Arc::new(Self {
            endpoint: Arc::clone(endpoint),
            program,
            desk: Turn::new(desk),
            poisoned: AtomicBool::new(false),
            limit,
            memories,
            image,
            fault,
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

    fn usage(&self, reason: String) -> ExchangeError {
        let rank = self.rank();
        ExchangeError::Usage { rank, reason }
    }

    /// Launches requests whose buffers the borrows vouch for.
    fn launch(
        &self,
        requests: &[Request],
        _borrows: PhantomData<&mut [u8]>,
    ) -> Result<(), ExchangeError> {
        let reduction = requests.iter().find(|r| r.direction == Direction::Reduce);
        if reduction.is_some()
            && requests
                .iter()
                .filter(|r| r.direction != Direction::Send)
                .count()
                > 1
        {
            return Err(self.usage("a reduction stands beside other receives".to_owned()));
        }
        let guard = Guard::new(&self.endpoint, self.limit);
        // Launches follow one another, whichever threads they come from.
        let Some(mut desk) = self.desk.take(self.limit) else {
            let limit = self.limit;
            return Err(self.usage(format!("another group of it still runs after {limit:?}")));
        };
        if self.poisoned.load(Ordering::Relaxed) {
            return Err(ExchangeError::Poisoned { rank: self.rank() });
        }
        desk.lay_out(requests, self.endpoint.world_size());
        let Desk {
            grid,
            transfers,
            chains,
            ..
        } = &mut *desk;
        let table = Transfers {
            transfers: transfers.as_mut_ptr().expose_provenance() as u64,
            chains: chains.as_mut_ptr().expose_provenance() as u64,
            count: chains.len() as u32,
            blocks: 1,
        };
        let mut program = self.program;
        let reducer = match reduction.map(|request| request.kind) {
            Some(Kind {
                dtype,
                purpose: Purpose::ReduceScatter(op),
            }) => {
                program.element = dtype.size() as u32;
                reducer(dtype, op)
            }
            _ => COPIES,
        };
        let context = self.endpoint.context(&guard);
        // SAFETY: the program was prepared for this process, what it points to lives in `self`, and whoever
        // has the desk is alone with it. The tables lie on the desk. Borrows vouch for slices until this
        // returns, and ranges of registered memory were checked; that nobody else uses them meanwhile is
        // part of what a call means: they are only accessed by raw copies.
        let result = grid.launch(&context, &|block, index| unsafe {
            run_block(block, &reducer, &program, &table, index)
        });
        result.map_err(|interrupted| {
            self.poisoned.store(true, Ordering::Relaxed);
            // SAFETY: the launch has ended, and whoever has the desk is alone with the program.
            unsafe { withdraw(&Raw, &self.program) };
            // Only then may the caller write to what was offered.
            fence(Ordering::SeqCst);
            let error = self.explain(&interrupted, requests, &guard);
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
        requests: &[Request],
        guard: &Guard<'_>,
    ) -> ExchangeError {
        let rank = self.rank();
        let Interrupted {
            stopped, waiting, ..
        } = *interrupted;
        let peer = waiting.site.peer;
        let index = waiting.site.op as usize;
        let call = requests
            .get(index)
            .map_or_else(|| "a group".to_owned(), |request| request.words(index));
        match (stopped, waiting.site.kind) {
            (Stopped::Mismatch, WaitKind::Envelope) => {
                // SAFETY: the image's record, which the launch that has ended wrote.
                let fault: Fault = unsafe { Raw.read(self.image.addr(self.fault)) };
                let Fault {
                    sender,
                    receiver,
                    sent,
                    wanted,
                } = fault;
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

impl Desk {
    /// Lays requests out as transfers, chained by direction and peer: sends first, for peers wait for them.
    fn lay_out(&mut self, requests: &[Request], ranks: u32) {
        self.transfers.clear();
        self.chains.clear();
        for (op, request) in (0..).zip(requests) {
            self.transfers.push(Transfer {
                address: request.address,
                envelope: request.envelope(),
                place: request.place,
                done: 0,
                peer: request.peer,
                direction: request.direction,
                memory: request.memory,
                next: NONE,
                op,
                state: State::New,
            });
        }
        let chain_of = |request: &Request| match request.direction {
            Direction::Send => request.peer,
            _ => ranks + request.peer,
        } as usize;
        for is_send in [true, false] {
            let requests = (0..).zip(requests);
            for (index, request) in
                requests.filter(|(_, r)| (r.direction == Direction::Send) == is_send)
            {
                let last = &mut self.last[chain_of(request)];
                match *last {
                    NONE => self.chains.push(index),
                    before => self.transfers[before as usize].next = index,
                }
                *last = index;
            }
        }
        for request in requests {
            self.last[chain_of(request)] = NONE;
        }
    }
}
