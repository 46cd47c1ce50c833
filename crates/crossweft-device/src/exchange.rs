//! Messages between pairs of ranks: any pattern of sends and receives, progressed together.
//!
//! Every ordered pair of ranks has a *stream*: a ring of slots in the receiver's memory, written by the
//! sender and read by the receiver, each in order. A slot's first word is its flag, one more than the number
//! of slots sent before it in all; it is stored last, so a small message crosses in one cache line. The
//! receiver returns slots on a line of the sender's memory.
//!
//! ```text
//! slot:  u64 flag   u64 bytes   u64 kind and memory   u64 place   payload..
//!                   of the whole message, in its first slot
//! line:  u64 slots taken   u64 status   u64 [4] a refused message: as sent, as wanted   u64 withdrawn
//! ```
//!
//! Where the machine keeps lines whole ([`gpu::lines`](crate::gpu::lines)), a small message may have its payload in lines at the end of
//! its slot, each with a flag of its own, and its header in one store of 16 bytes: nothing of it waits for something else to have
//! arrived. That place holds nothing but lines, and is cleared by the receiver before flags come again.
//!
//! ```text
//! slot:  u64 flag   u64 bytes, kind and IN_LINES   ..   lines
//! ```
//!
//! A message takes as many slots as its payload needs, at least one. One whose sender's buffer can be
//! reached by the receiver may be *offered* instead: its only slot says where it lies, the receiver copies it
//! from there and then returns the slot, which completes the send. A sender whose launch has failed before
//! [withdraws](withdraw) its offers, for it gives the buffer back; the receiver looks for that after the copy. A rank that
//! has waited too long [gives up](give_up): whoever waits for it hears that nothing more will come.
//!
//! Messages of a pair match in order. The transfers of a launch to, or from, one peer form a *chain*, of which
//! one at a time is under way; [`run_block`] goes round the chains and does what can be done, so nothing
//! depends on the order in which a group was put together. A message that is not what its receiver
//! asked for ends the exchange on both sides, and on all ranks that wait for either.
//!
//! Where one thread block is not enough for a message, a pair has several *lanes*: streams of their own, each with its
//! own chains, to which both sides give the same part of a large message ([`Lanes`]). A small one takes the first.

mod single;

use core::mem::offset_of;

use crate::block::Block;
use crate::channel::copy;
use crate::extent::Extent;
use crate::gpu::lines;
use crate::memory::Memory;
use crate::packet;
use crate::reduce::{Location, Reducer, Sources};
use crate::wait::{Site, Stopped, WaitKind, Waiting, reached};

pub use single::{BOARD as SINGLE_BOARD, run_single};

/// Bytes of a slot before its payload.
pub const HEADER: u64 = 32;
/// Bytes of the line on which a receiver reports to a sender.
pub const LINE: u64 = 64;

// Words of a slot.
const BYTES: u64 = 8;
const KIND: u64 = 16;
const PLACE: u64 = 24;

// Words of a line.
const TAKEN: u64 = 0;
const STATUS: u64 = 8;
const SENT: u64 = 16;
const WANTED: u64 = 32;
const WITHDRAWN: u64 = 48;

/// Status of a rank whose exchange has failed.
const FAILED: u64 = 1;
/// Status towards the sender of the message that made it fail.
const REFUSED: u64 = 2;
/// Status of a rank whose launch was ended by something else: it waited too long, or lost a peer.
pub const GAVE_UP: u64 = 3;

/// Set in the second word of a slot whose payload lies in lines; below it are the message's kind and, in so many bits, its size.
const IN_LINES: u64 = 1 << 63;
const LINES_BITS: u32 = 16;
/// Bytes at the end of a slot for lines, where there are any.
pub const LINES_BYTES: u64 = 32 * lines::PAIR;
/// The most that such a message has: one round of the block's threads.
const LINES_PAYLOAD: u64 = LINES_BYTES / lines::PAIR * lines::PAIR_PAYLOAD;

/// Slots after which flags of lines may come again; each slot's are cleared once in as many.
const LINES_LAP: u64 = 1 << 18;

const _: () = assert!(LINES_PAYLOAD < 1 << LINES_BITS);

/// Bytes of an offered message that are copied before others get their turn.
const PULL: u64 = 1 << 20;

/// What a message is: both sides must say the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Envelope {
    /// Bytes of the message.
    pub bytes: u64,
    /// What it holds and belongs to, as the host numbers that; below 2^32.
    pub kind: u64,
}

/// A message that was not what its receiver asked for.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Fault {
    /// Who sent it.
    pub sender: u32,
    /// Who was to receive it.
    pub receiver: u32,
    /// What was sent.
    pub sent: Envelope,
    /// What was to be received.
    pub wanted: Envelope,
}

/// The stream to a peer, as its sender keeps it: addresses, then counters that only whoever sends touches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Outgoing {
    /// The ring in the peer's memory.
    pub ring: u64,
    /// The line in this rank's memory, on which the peer reports.
    pub reports: u64,
    /// Slots sent.
    pub sent: u64,
    /// Slots that the peer is known to have taken.
    pub taken: u64,
}

/// The stream from a peer, as its receiver keeps it: addresses, then counters that only whoever receives
/// touches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Incoming {
    /// The ring in this rank's memory.
    pub ring: u64,
    /// The line in the peer's memory, on which this rank reports.
    pub reports: u64,
    /// Slots received.
    pub received: u64,
    /// Slots received that the peer was told of.
    pub told: u64,
}

/// How large messages are spread over the lanes of a pair. All ranks have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// Lanes of each pair, at least one.
    pub count: u32,
    /// Bytes of a message for each lane that it takes beyond the first.
    pub step: u64,
}

impl Lanes {
    /// One for each pair.
    pub const ONE: Self = Self {
        count: 1,
        step: u64::MAX,
    };

    /// How many lanes a message of `bytes` bytes takes.
    #[must_use]
    pub const fn of(self, bytes: u64) -> u32 {
        // Most are small, and divisions take long.
        if self.count == 1 || bytes < self.step {
            return 1;
        }
        let lanes = 1 + bytes / self.step;
        if lanes < self.count as u64 {
            lanes as u32
        } else {
            self.count
        }
    }

    /// The part of a message of `bytes` bytes that takes lane `lane`, one of [`of`](Self::of).
    #[must_use]
    pub const fn part(self, bytes: u64, lane: u32) -> Extent {
        let whole = Extent {
            begin: 0,
            end: bytes,
        };
        whole.slice(lane, self.of(bytes))
    }
}

/// The two streams with one peer on one lane.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Streams {
    /// To the peer.
    pub outgoing: Outgoing,
    /// From the peer.
    pub incoming: Incoming,
}

/// What a transfer does.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Direction {
    /// Sends a message.
    #[default]
    Send = 0,
    /// Receives a message.
    Receive = 1,
    /// Receives a message from every other rank and reduces them, with this rank's own part in its
    /// place, in rank order. The messages must not be offered, and no other receive may be in the launch.
    Reduce = 2,
    /// Copies what lies here already.
    Copy = 3,
}

/// How far a transfer is.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum State {
    /// Nothing was done.
    #[default]
    New = 0,
    /// Its first slot is done.
    Begun = 1,
    /// Send: offered, and not yet taken. Receive: being copied from the sender's memory.
    Offered = 2,
}

/// One send or receive of a launch: a message's part on one lane.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Transfer {
    /// Where the part lies in this rank's buffer.
    pub address: u64,
    /// What is sent, or must come: the whole message.
    pub envelope: Envelope,
    /// Bytes of the part.
    pub bytes: u64,
    /// Send: where the part lies in `memory`. Reduce: address of this rank's own. Copy: where it is copied from.
    /// Receive: set by device code.
    pub place: u64,
    /// Bytes done. Of an offered send: the slots that are sent then.
    pub done: u64,
    /// The other rank. Reduce: the one that is looked for next.
    pub peer: u32,
    /// What to do.
    pub direction: Direction,
    /// Send: the registered memory from which it may be offered, or [`NO_MEMORY`].
    pub memory: u32,
    /// The lane.
    pub lane: u32,
    /// Index of the next transfer of its chain among the [followers](Transfers::followers), or [`NONE`].
    pub next: u32,
    /// Index among the calls of the group, for messages.
    pub op: u32,
    /// How far it is; [`State::New`] at first.
    pub state: State,
    /// Not used.
    pub reserved: u32,
}

/// No transfer follows.
pub const NONE: u32 = u32::MAX;
/// A message that is not offered.
pub const NO_MEMORY: u32 = u32::MAX;

/// A registered memory of one rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Mapped {
    /// Where it is mapped here.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// One rank's prepared exchange.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// Address of a [`Streams`] for each lane and rank, in the order of lanes and then of ranks. Those of one pair share
    /// the first lane's line for all but the number of slots taken.
    pub streams: u64,
    /// Address of a [`Mapped`] for each registered memory and rank.
    pub mapped: u64,
    /// Address of a [`Fault`] for each thread block, which says why an exchange ended with [`Stopped::Mismatch`].
    pub faults: u64,
    /// Address of the line of this rank's own stream to itself, on the first lane.
    pub own: u64,
    /// Bytes of a slot: a multiple of [`LINE`]; of a line of lines, if it has some, and rings are then aligned to those.
    pub slot_bytes: u64,
    /// Of those, at its end, for the lines of a small message: [`LINES_BYTES`] or 0.
    pub lines: u64,
    /// Slots of a ring: a power of two.
    pub slots: u32,
    /// This rank.
    pub rank: u32,
    /// World size.
    pub ranks: u32,
    /// Bytes of an element, where there is something to reduce.
    pub element: u32,
    /// Registered memories.
    pub memories: u32,
}

/// The transfers of one launch, which only reads them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Transfers {
    /// Address of the first [`Transfer`] of each chain.
    pub chains: u64,
    /// Address of all that follow another one.
    pub followers: u64,
    /// Number of chains.
    pub count: u32,
    /// Thread blocks that share them.
    pub blocks: u32,
    /// A number of the launch, for messages.
    pub launch: u32,
    /// Not used.
    pub reserved: u32,
}

impl Transfers {
    #[inline(always)]
    const fn site(&self, kind: WaitKind, peer: u32, op: u32) -> Site {
        Site {
            kind,
            peer,
            channel: self.launch,
            op,
        }
    }

    /// The chains of thread block `index`: the first, and how many.
    #[inline(always)]
    #[must_use]
    pub const fn share(&self, index: u32) -> (u32, u32) {
        let begin = self.count * index / self.blocks;
        let end = self.count * (index + 1) / self.blocks;
        (begin, end - begin)
    }
}

/// What the threads of a block share, for as long as it runs.
#[derive(Clone, Copy, Debug)]
pub struct Desk {
    /// Address of the transfers that are under way, at first the first of each of the block's chains. Device code changes
    /// them.
    pub chains: u64,
    /// For a block of several threads: address of [`BOARD`] bytes.
    pub board: u64,
}

/// What all threads of a block do next.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    kind: ActionKind,
    /// The place of the chain.
    chain: u32,
    lane: u32,
    /// Of lines.
    flag: u32,
    /// Address of the transfer.
    transfer: u64,
    dst: u64,
    src: u64,
    bytes: u64,
}

#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum ActionKind {
    /// Everything is done.
    End,
    /// Fill a slot.
    Send,
    /// Send a slot that says where the message is.
    Offer,
    /// An offered message was taken.
    Taken,
    /// Empty a slot.
    Receive,
    /// Empty the lines of a slot.
    Unpack,
    /// Copy a part of an offered message.
    Pull,
    /// Reduce a slot of every other rank.
    Reduce,
    /// Copy a part of what lies here.
    Copy,
}

/// Bytes by which threads of a block tell each other what to do: of two turns.
pub const BOARD: u64 = 2 * size_of::<Action>() as u64;

/// Does all transfers of thread block `index`'s share of the chains, which lie on its `desk`. Returns when they are done:
/// buffers of sends may then be changed, though a small message may not have been received yet.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a message was not what was asked for. The exchange must not be
/// used again then.
///
/// # Safety
/// Everything that the tables point to must be valid, and nobody else may use it. Buffers must be valid
/// for their transfers, and must not overlap, but for an own part and its destination. Launches of a rank must follow
/// one another. All threads of the block must call this.
#[inline(always)]
pub unsafe fn run_block<B: Block, R: Reducer>(
    block: &B,
    reducer: &R,
    exchange: &Exchange,
    transfers: &Transfers,
    index: u32,
    desk: Desk,
) -> Result<(), Stopped> {
    let mut engine = Engine {
        block,
        exchange,
        transfers,
        chains: desk.chains,
        index,
        count: transfers.share(index).1,
        cursor: 0,
    };
    let mut turn = 0;
    loop {
        // SAFETY: the caller's promise; one thread looks, and all do what it found.
        unsafe {
            let mine = match block.thread() {
                0 => engine.next(),
                _ => Ok(Action::END),
            };
            let action = engine.agree(mine, desk.board + turn)?;
            // Two turns, so that one barrier is enough: whoever writes the next but one has met those
            // who read this one.
            turn ^= BOARD / 2;
            match action.kind {
                ActionKind::End => return Ok(()),
                ActionKind::Reduce => engine.reduce(reducer, &action)?,
                ActionKind::Unpack => {
                    let transfer: Transfer = block.memory().read(action.transfer);
                    let site = transfers.site(WaitKind::Message, transfer.peer, transfer.op);
                    let (dst, src, bytes) = (action.dst, action.src, action.bytes);
                    // Of all threads, at the barrier behind it.
                    let mine = lines::copy_from_lines(block, site, dst, src, bytes, action.flag);
                    block.sync(mine)?;
                }
                _ => copy(block, action.dst, action.src, action.bytes),
            }
            block.sync(Ok(()))?;
            if block.thread() == 0 {
                engine.finish(&action);
            }
        }
    }
}

/// Whether a launch of this rank has ended badly, which [`abandon`] has left behind.
///
/// # Safety
/// The exchange must be prepared.
#[inline(always)]
pub unsafe fn is_abandoned<M: Memory>(memory: &M, exchange: &Exchange) -> bool {
    // SAFETY: the caller's promise.
    unsafe { memory.load(exchange.own + STATUS) != 0 }
}

/// After `stopped` has ended a block's part of a launch: ends that of the others and the launches behind it, and does what
/// the host would do: [withdraws](withdraw) what was offered and, if the time was over, [gives up](give_up). By one thread.
///
/// # Safety
/// The exchange must be prepared.
#[cold]
pub unsafe fn abandon<M: Memory>(memory: &M, exchange: &Exchange, stopped: Stopped) {
    // SAFETY: the caller's promise. The own line is the last, for what it ends says nothing of why.
    unsafe {
        withdraw(memory, exchange);
        if stopped == Stopped::Deadline {
            give_up(memory, exchange);
        }
        memory.fence();
        memory.store_release(exchange.own + STATUS, FAILED);
    }
}

/// The lines on which `peer`, and this rank to `peer`, reports. Other blocks may be counting beside them.
#[inline(always)]
unsafe fn lines<M: Memory>(memory: &M, exchange: &Exchange, peer: u32) -> [u64; 2] {
    let streams = exchange.streams + u64::from(peer) * size_of::<Streams>() as u64;
    [
        offset_of!(Streams, outgoing) + offset_of!(Outgoing, reports),
        offset_of!(Streams, incoming) + offset_of!(Incoming, reports),
    ]
    // SAFETY: peers are ranks; these words never change.
    .map(|at| unsafe { memory.read(streams + at as u64) })
}

/// Tells all receivers that what this rank offers is offered no longer: before buffers of a launch that has failed are
/// given back, which must come after a fence.
///
/// # Safety
/// The exchange must be prepared, and none of its launches under way on this rank that may go on.
pub unsafe fn withdraw<M: Memory>(memory: &M, exchange: &Exchange) {
    let mut peer = 0;
    while peer < exchange.ranks {
        // SAFETY: the caller's promise. Acquired: a receiver that found nothing has copied before.
        unsafe {
            let [_, line] = lines(memory, exchange, peer);
            memory.fetch_add(line + WITHDRAWN, 1);
        }
        peer += 1;
    }
}

/// After a launch that has ended because it took too long, or lost a peer that left: tells all peers that nothing more
/// will come from this rank.
///
/// # Safety
/// As for [`withdraw`].
pub unsafe fn give_up<M: Memory>(memory: &M, exchange: &Exchange) {
    let mut peer = 0;
    while peer < exchange.ranks {
        // SAFETY: the caller's promise: the line is this rank's to write.
        unsafe {
            let [_, line] = lines(memory, exchange, peer);
            memory.store_release(line + STATUS, GAVE_UP);
        }
        peer += 1;
    }
}

impl Action {
    const END: Self = Self {
        kind: ActionKind::End,
        chain: 0,
        lane: 0,
        flag: 0,
        transfer: 0,
        dst: 0,
        src: 0,
        bytes: 0,
    };
}

struct Engine<'a, B> {
    block: &'a B,
    exchange: &'a Exchange,
    transfers: &'a Transfers,
    /// Those under way come first.
    chains: u64,
    /// The thread block.
    index: u32,
    count: u32,
    cursor: u32,
}

/// # Safety
/// of all methods: that of [`run_block`].
impl<B: Block> Engine<'_, B> {
    /// What thread 0 found, for all threads of the block, by way of `board`.
    #[inline(always)]
    unsafe fn agree(&self, mine: Result<Action, Stopped>, board: u64) -> Result<Action, Stopped> {
        if self.block.threads() == 1 {
            return mine;
        }
        // SAFETY: the block's own board; written by one thread, read after a barrier.
        unsafe {
            if let (0, Ok(action)) = (self.block.thread(), mine) {
                self.block.memory().write(board, action);
            }
            self.block.sync(mine.map(drop))?;
            Ok(self.block.memory().read(board))
        }
    }

    /// Goes round the chains until something can be done.
    #[inline(always)]
    unsafe fn next(&mut self) -> Result<Action, Stopped> {
        let mut spins: u32 = 0;
        // Whose peer was found to have failed: what that sent before is looked for once more.
        let mut failed = (NONE, NONE);
        loop {
            let mut looks = 0;
            while looks < self.count {
                if self.cursor >= self.count {
                    self.cursor = 0;
                }
                // SAFETY: the cursor is below the number of chains under way.
                if let Some(action) = unsafe { self.attempt(self.cursor)? } {
                    return Ok(action);
                }
                self.cursor += 1;
                looks += 1;
            }
            if self.count == 0 {
                return Ok(Action::END);
            }
            // Each in its turn, so that whoever supervises hears of all of them.
            let chain = match failed {
                (NONE, _) => spins % self.count,
                (chain, _) => chain,
            };
            // SAFETY: as above.
            match unsafe { self.look_around(chain, failed.1, spins)? } {
                Ok(peer) => failed = (chain, peer),
                Err(waiting) => {
                    failed = (NONE, NONE);
                    self.block.pause(&waiting)?;
                }
            }
            spins = spins.saturating_add(1);
        }
    }

    #[inline(always)]
    unsafe fn transfer(&self, chain: u32) -> (u64, Transfer) {
        let at = self.chains + u64::from(chain) * size_of::<Transfer>() as u64;
        // SAFETY: below the number of chains under way.
        unsafe { (at, self.block.memory().read(at)) }
    }

    #[inline(always)]
    fn streams(&self, lane: u32, peer: u32) -> u64 {
        let index = u64::from(lane * self.exchange.ranks + peer);
        self.exchange.streams + index * size_of::<Streams>() as u64
    }

    #[inline(always)]
    unsafe fn outgoing(&self, lane: u32, peer: u32) -> (u64, Outgoing) {
        let at = self.streams(lane, peer) + offset_of!(Streams, outgoing) as u64;
        // SAFETY: the table has an entry for each lane and rank.
        unsafe { (at, self.block.memory().read(at)) }
    }

    #[inline(always)]
    unsafe fn incoming(&self, lane: u32, peer: u32) -> (u64, Incoming) {
        let at = self.streams(lane, peer) + offset_of!(Streams, incoming) as u64;
        // SAFETY: as above.
        unsafe { (at, self.block.memory().read(at)) }
    }

    /// The lines on which `peer`, and this rank to `peer`, reports.
    #[inline(always)]
    unsafe fn lines(&self, peer: u32) -> [u64; 2] {
        // SAFETY: peers are ranks.
        unsafe { lines(self.block.memory(), self.exchange, peer) }
    }

    /// The slot that is sent, or received, after `slots` others.
    #[inline(always)]
    fn slot(&self, ring: u64, slots: u64) -> u64 {
        ring + (slots & u64::from(self.exchange.slots - 1)) * self.exchange.slot_bytes
    }

    /// Bytes of payload in a slot.
    #[inline(always)]
    fn room(&self) -> u64 {
        self.exchange.slot_bytes - self.exchange.lines - HEADER
    }

    /// What can be done for a chain, if anything.
    #[inline(always)]
    unsafe fn attempt(&self, chain: u32) -> Result<Option<Action>, Stopped> {
        // SAFETY: the caller's promise.
        unsafe {
            let (at, transfer) = self.transfer(chain);
            let action = Action {
                chain,
                lane: transfer.lane,
                transfer: at,
                ..Action::END
            };
            match transfer.direction {
                Direction::Send => self.attempt_send(&transfer, action),
                Direction::Receive => self.attempt_receive(&transfer, action),
                Direction::Reduce => self.attempt_reduce(&transfer, action),
                Direction::Copy => Ok(Some(Action {
                    kind: ActionKind::Copy,
                    dst: transfer.address + transfer.done,
                    src: transfer.place + transfer.done,
                    bytes: min(PULL, transfer.bytes - transfer.done),
                    ..action
                })),
            }
        }
    }

    #[inline(always)]
    unsafe fn attempt_send(
        &self,
        transfer: &Transfer,
        action: Action,
    ) -> Result<Option<Action>, Stopped> {
        let memory = self.block.memory();
        // SAFETY: the stream's words; a free slot is the sender's alone.
        unsafe {
            let (at, stream) = self.outgoing(transfer.lane, transfer.peer);
            if transfer.state == State::Offered {
                let taken = memory.load_acquire(stream.reports + TAKEN);
                let kind = ActionKind::Taken;
                return Ok(reached(taken, transfer.done).then_some(Action { kind, ..action }));
            }
            let slots = u64::from(self.exchange.slots);
            if stream.sent.wrapping_sub(stream.taken) >= slots {
                // Acquired: what was in the slot has been read.
                let taken = memory.load_acquire(stream.reports + TAKEN);
                if stream.sent.wrapping_sub(taken) >= slots {
                    return Ok(None);
                }
                memory.write(at + offset_of!(Outgoing, taken) as u64, taken);
            }
            let slot = self.slot(stream.ring, stream.sent);
            let Envelope { bytes, kind } = transfer.envelope;
            let is_offer = transfer.memory != NO_MEMORY && transfer.bytes > self.room();
            if transfer.state == State::New {
                self.begin(transfer, &stream)?;
                let place = u64::from(transfer.memory.wrapping_add(1));
                let place = if is_offer { place } else { 0 };
                memory.write(slot + BYTES, bytes);
                memory.write(slot + KIND, kind | place << 32);
                memory.write(slot + PLACE, transfer.place);
            }
            Ok(Some(Action {
                kind: if is_offer {
                    ActionKind::Offer
                } else {
                    ActionKind::Send
                },
                dst: slot + HEADER,
                src: transfer.address + transfer.done,
                bytes: if is_offer {
                    0
                } else {
                    min(self.room(), transfer.bytes - transfer.done)
                },
                ..action
            }))
        }
    }

    /// Before the first slot of a message: whether its receiver has failed.
    #[inline(always)]
    unsafe fn begin(&self, transfer: &Transfer, stream: &Outgoing) -> Result<(), Stopped> {
        // SAFETY: the caller's promise.
        unsafe {
            // The first lane's line, which is known already where that is this one.
            let reports = match transfer.lane {
                0 => stream.reports,
                _ => self.lines(transfer.peer)[0],
            };
            match self.block.memory().load(reports + STATUS) {
                0 => Ok(()),
                _ => self.heed(transfer.op, transfer.peer),
            }
        }
    }

    #[inline(always)]
    unsafe fn attempt_receive(
        &self,
        transfer: &Transfer,
        action: Action,
    ) -> Result<Option<Action>, Stopped> {
        let memory = self.block.memory();
        let rest = transfer.bytes - transfer.done;
        let dst = transfer.address + transfer.done;
        let pull = |place: u64| Action {
            kind: ActionKind::Pull,
            dst,
            src: place + transfer.done,
            bytes: min(PULL, rest),
            ..action
        };
        if transfer.state == State::Offered {
            if rest == 0 {
                // SAFETY: the caller's promise.
                unsafe { self.check_offer(transfer)? };
            }
            return Ok(Some(pull(transfer.place)));
        }
        // SAFETY: the stream's words; a slot with its flag is the receiver's alone.
        unsafe {
            let (_, stream) = self.incoming(transfer.lane, transfer.peer);
            let Some(slot) = self.arrived(&stream) else {
                return Ok(None);
            };
            if transfer.state == State::New {
                let from = self.open(transfer, transfer.peer, slot)?;
                if from == IN_LINES {
                    return Ok(Some(Action {
                        kind: ActionKind::Unpack,
                        dst,
                        src: self.lines_of(slot),
                        bytes: rest,
                        flag: packet::flag_of(stream.received + 1, rest),
                        ..action
                    }));
                }
                if from != 0 {
                    memory.write(action.transfer + offset_of!(Transfer, place) as u64, from);
                    memory.write(
                        action.transfer + offset_of!(Transfer, state) as u64,
                        State::Offered,
                    );
                    return Ok(Some(pull(from)));
                }
            }
            Ok(Some(Action {
                kind: ActionKind::Receive,
                dst,
                src: slot + HEADER,
                bytes: min(self.room(), rest),
                ..action
            }))
        }
    }

    #[inline(always)]
    unsafe fn attempt_reduce(
        &self,
        transfer: &Transfer,
        action: Action,
    ) -> Result<Option<Action>, Stopped> {
        let mut peer = transfer.peer;
        // SAFETY: as for `attempt_receive`, from every other rank.
        unsafe {
            while peer < self.exchange.ranks {
                if peer != self.exchange.rank {
                    let (_, stream) = self.incoming(transfer.lane, peer);
                    let Some(slot) = self.arrived(&stream) else {
                        break;
                    };
                    if transfer.state == State::New {
                        self.open(transfer, peer, slot)?;
                    }
                }
                peer += 1;
            }
            if peer != transfer.peer {
                let at = action.transfer + offset_of!(Transfer, peer) as u64;
                self.block.memory().write(at, peer);
            }
        }
        let is_ready = peer == self.exchange.ranks;
        Ok(is_ready.then(|| Action {
            kind: ActionKind::Reduce,
            dst: transfer.address + transfer.done,
            src: transfer.place + transfer.done,
            bytes: min(self.room(), transfer.bytes - transfer.done),
            ..action
        }))
    }

    /// The next slot of a peer's, if it is there.
    #[inline(always)]
    unsafe fn arrived(&self, stream: &Incoming) -> Option<u64> {
        let slot = self.slot(stream.ring, stream.received);
        // SAFETY: the flag is only ever accessed as a word.
        let flag = unsafe { self.block.memory().load_acquire(slot) };
        (flag == stream.received + 1).then_some(slot)
    }

    /// Whether a transfer's payload may go in lines.
    #[inline(always)]
    fn takes_lines(&self, transfer: &Transfer) -> bool {
        let bytes = transfer.envelope.bytes;
        self.exchange.lines != 0 && bytes <= LINES_PAYLOAD && transfer.bytes == bytes
    }

    /// The lines of a slot.
    #[inline(always)]
    fn lines_of(&self, slot: u64) -> u64 {
        slot + self.exchange.slot_bytes - self.exchange.lines
    }

    /// Compares the message that begins in `slot` with what was asked for. Returns its address if it is
    /// offered, [`IN_LINES`], or 0.
    #[inline(always)]
    unsafe fn open(&self, transfer: &Transfer, peer: u32, slot: u64) -> Result<u64, Stopped> {
        let memory = self.block.memory();
        // SAFETY: the slot has arrived.
        let bytes: u64 = unsafe { memory.read(slot + BYTES) };
        let is_in_lines = bytes & IN_LINES != 0;
        let (bytes, kind) = match is_in_lines {
            true => (
                bytes & ((1 << LINES_BITS) - 1),
                (bytes ^ IN_LINES) >> LINES_BITS,
            ),
            // SAFETY: as above.
            false => (bytes, unsafe { memory.read::<u64>(slot + KIND) }),
        };
        let sent = Envelope {
            bytes,
            kind: kind & u64::from(u32::MAX),
        };
        // SAFETY: the caller's promise.
        unsafe {
            if sent == transfer.envelope {
                match kind >> 32 {
                    0 if is_in_lines && self.takes_lines(transfer) => {
                        return Ok(IN_LINES);
                    }
                    0 if !is_in_lines => return Ok(0),
                    number if !is_in_lines => {
                        let place = memory.read(slot + PLACE);
                        if let Some(address) = self.offered(number - 1, peer, place, transfer.bytes)
                        {
                            return Ok(address);
                        }
                    }
                    _ => {}
                }
            }
            let (block, exchange, transfers) = (self.block, self.exchange, self.transfers);
            let (place, wanted) = ((self.index, transfer.op), transfer.envelope);
            Err(refuse(
                block, exchange, transfers, place, peer, sent, wanted,
            ))
        }
    }

    /// After the copy of an offered message: whether it still was what was sent.
    #[inline(always)]
    unsafe fn check_offer(&self, transfer: &Transfer) -> Result<(), Stopped> {
        // SAFETY: a word of the line on which the peer reports.
        let withdrawn = unsafe {
            let [reports, _] = self.lines(transfer.peer);
            // Released: the copy's loads come before. Who finds nothing has copied before the buffer was given back.
            self.block.memory().fetch_add(reports + WITHDRAWN, 0)
        };
        if withdrawn == 0 {
            return Ok(());
        }
        let (block, exchange, transfers) = (self.block, self.exchange, self.transfers);
        // SAFETY: the caller's promise.
        Err(unsafe { miss(block, exchange, transfers, transfer.op, transfer.peer) })
    }

    /// Where bytes at `place` of the registered memory `number` of `rank` are mapped here, if there are any:
    /// that is what a peer says.
    #[inline(always)]
    unsafe fn offered(&self, number: u64, rank: u32, place: u64, bytes: u64) -> Option<u64> {
        if number >= u64::from(self.exchange.memories) {
            return None;
        }
        let entry = number * u64::from(self.exchange.ranks) + u64::from(rank);
        let at = self.exchange.mapped + entry * size_of::<Mapped>() as u64;
        // SAFETY: the table has an entry for each memory and rank.
        let mapped: Mapped = unsafe { self.block.memory().read(at) };
        let end = place.checked_add(bytes)?;
        (end <= mapped.bytes).then_some(mapped.address + place)
    }

    /// After the threads of the block have done `action`.
    #[inline(always)]
    unsafe fn finish(&mut self, action: &Action) {
        let memory = self.block.memory();
        let at = action.transfer;
        // SAFETY: one thread; the tables are this rank's alone.
        unsafe {
            let transfer: Transfer = memory.read(at);
            let mut done = transfer.done + action.bytes;
            let mut state = State::Begun;
            let mut is_complete = done == transfer.bytes;
            match action.kind {
                ActionKind::End => return,
                ActionKind::Send => drop(self.publish(&transfer)),
                ActionKind::Offer => {
                    done = self.publish(&transfer);
                    (state, is_complete) = (State::Offered, false);
                }
                ActionKind::Taken => is_complete = true,
                ActionKind::Copy => {}
                ActionKind::Receive | ActionKind::Unpack => {
                    self.take(transfer.lane, transfer.peer, false);
                }
                ActionKind::Pull => {
                    state = State::Offered;
                    // All was copied before, and then the offer still stood.
                    is_complete &= action.bytes == 0;
                    if is_complete {
                        self.take(transfer.lane, transfer.peer, true);
                    }
                }
                ActionKind::Reduce => {
                    let mut peer = 0;
                    while peer < self.exchange.ranks {
                        if peer != self.exchange.rank {
                            self.take(transfer.lane, peer, false);
                        }
                        peer += 1;
                    }
                    memory.write(at + offset_of!(Transfer, peer) as u64, 0_u32);
                }
            }
            if !is_complete {
                memory.write(at + offset_of!(Transfer, done) as u64, done);
                memory.write(at + offset_of!(Transfer, state) as u64, state);
                self.cursor = action.chain + 1;
                return;
            }
            let size = size_of::<Transfer>() as u64;
            let next = match transfer.next {
                NONE => {
                    self.count -= 1;
                    self.chains + u64::from(self.count) * size
                }
                next => self.transfers.followers + u64::from(next) * size,
            };
            memory.write(at, memory.read::<Transfer>(next));
            self.cursor = action.chain;
        }
    }

    /// Hands a filled slot to its receiver. Returns the number of slots sent.
    #[inline(always)]
    unsafe fn publish(&self, transfer: &Transfer) -> u64 {
        let memory = self.block.memory();
        // SAFETY: the slot is the sender's until its flag is stored.
        unsafe {
            let (at, stream) = self.outgoing(transfer.lane, transfer.peer);
            let sent = stream.sent + 1;
            memory.store_release(self.slot(stream.ring, stream.sent), sent);
            memory.write(at + offset_of!(Outgoing, sent) as u64, sent);
            self.block.wake(transfer.peer);
            sent
        }
    }

    /// Clears the lines of the slot that is taken as the `received`-th, if it is time to: nobody else may touch it now.
    #[inline(always)]
    unsafe fn scrub(&self, stream: &Incoming, received: u64) {
        if self.exchange.lines != 0
            && received % LINES_LAP >= LINES_LAP - u64::from(self.exchange.slots)
        {
            let slot = self.slot(stream.ring, received - 1);
            // SAFETY: the caller's promise.
            unsafe {
                scrub(
                    self.block.memory(),
                    self.lines_of(slot),
                    self.exchange.lines,
                )
            };
        }
    }

    /// A slot of `peer`'s was read. Returns slots by the half ring, for each time costs the sender a cache
    /// line; a sender that has no slots left has always been, or will be, given that many.
    #[inline(always)]
    unsafe fn take(&self, lane: u32, peer: u32, now: bool) {
        let memory = self.block.memory();
        // SAFETY: the stream's words.
        unsafe {
            let (at, stream) = self.incoming(lane, peer);
            let received = stream.received + 1;
            self.scrub(&stream, received);
            memory.write(at + offset_of!(Incoming, received) as u64, received);
            if now || received - stream.told >= u64::from(self.exchange.slots / 2) {
                memory.store_release(stream.reports + TAKEN, received);
                memory.write(at + offset_of!(Incoming, told) as u64, received);
                self.block.wake(peer);
            }
        }
    }

    /// Reduces a slot of every other rank with this rank's own part.
    #[inline(always)]
    unsafe fn reduce<R: Reducer>(&self, reducer: &R, action: &Action) -> Result<(), Stopped> {
        let sources = Sources {
            count: self.exchange.ranks,
            at: |rank| {
                Location::raw(if rank == self.exchange.rank {
                    action.src
                } else {
                    // SAFETY: the slot has arrived.
                    let (_, stream) = unsafe { self.incoming(action.lane, rank) };
                    self.slot(stream.ring, stream.received) + HEADER
                })
            },
        };
        let destinations = Sources {
            count: 1,
            at: |_| Location::raw(action.dst),
        };
        let elements = action.bytes / u64::from(self.exchange.element);
        // SAFETY: slots hold whole elements; the caller vouches for the buffers.
        unsafe {
            reducer.reduce(
                self.block,
                &sources,
                &destinations,
                elements,
                self.exchange.ranks,
                0,
            )
        }
    }

    /// After a look in vain at every chain: whether the peer of one has failed, or has refused what this
    /// rank sent. Returns that peer if that is news, or what the chain waits for.
    #[inline(always)]
    unsafe fn look_around(
        &self,
        chain: u32,
        failed: u32,
        spins: u32,
    ) -> Result<Result<u32, Waiting>, Stopped> {
        let memory = self.block.memory();
        // SAFETY: the caller's promise.
        unsafe {
            let (_, transfer) = self.transfer(chain);
            let peer = transfer.peer;
            // Another block has said why.
            if self.transfers.blocks > 1 && is_abandoned(memory, self.exchange) {
                return Err(Stopped::Aborted);
            }
            let [reports, _] = self.lines(peer);
            // Acquired: what the peer sent before it failed is then seen.
            if memory.load_acquire(reports + STATUS) != 0 {
                // A reduction may have found that peer's message meanwhile, and looks for another's now.
                if failed != peer {
                    return Ok(Ok(peer));
                }
                self.heed(transfer.op, peer)?;
            }
            let (kind, expected, seen) = match transfer.direction {
                Direction::Send => {
                    let (_, stream) = self.outgoing(transfer.lane, peer);
                    let expected = match transfer.state {
                        State::Offered => transfer.done,
                        _ => (stream.sent + 1).wrapping_sub(self.exchange.slots.into()),
                    };
                    let seen = memory.load(stream.reports + TAKEN);
                    (WaitKind::Taken, expected, seen)
                }
                _ => {
                    let (_, stream) = self.incoming(transfer.lane, peer);
                    let slot = self.slot(stream.ring, stream.received);
                    (WaitKind::Message, stream.received + 1, memory.load(slot))
                }
            };
            Ok(Err(Waiting {
                site: self.transfers.site(kind, peer, transfer.op),
                spins,
                expected,
                seen,
            }))
        }
    }

    /// Ends the exchange if `peer` says that its own has ended badly.
    #[inline(always)]
    unsafe fn heed(&self, op: u32, peer: u32) -> Result<(), Stopped> {
        // SAFETY: the caller's promise.
        unsafe {
            heed(
                self.block,
                self.exchange,
                self.transfers,
                self.index,
                op,
                peer,
            )
        }
    }
}

// What ends an exchange, out of the way of what does not; functions of numbers, so that no engine needs an address.

/// See [`Engine::heed`].
#[cold]
#[inline(never)]
unsafe fn heed<B: Block>(
    block: &B,
    exchange: &Exchange,
    transfers: &Transfers,
    index: u32,
    op: u32,
    peer: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    // SAFETY: the caller's promise, here and below.
    let [reports, _] = unsafe { lines(memory, exchange, peer) };
    // SAFETY: words of the line.
    let word = |at: u64| unsafe { memory.load(reports + at) };
    // SAFETY: as above. Acquired: the words before it are there.
    let status = unsafe { memory.load_acquire(reports + STATUS) };
    let (kind, reason) = match status {
        0 => return Ok(()),
        REFUSED => (WaitKind::Envelope, FAILED),
        GAVE_UP => (WaitKind::Failed, GAVE_UP),
        _ => (WaitKind::Failed, FAILED),
    };
    let envelope = |at| Envelope {
        bytes: word(at),
        kind: word(at + 8),
    };
    let fault = Fault {
        sender: exchange.rank,
        receiver: peer,
        sent: envelope(SENT),
        wanted: envelope(WANTED),
    };
    // SAFETY: the caller's promise.
    unsafe {
        if kind == WaitKind::Envelope {
            memory.write(own_fault(exchange, index), fault);
        }
        tell_others(block, exchange, peer, reason);
    }
    let is_refused = kind == WaitKind::Envelope;
    Err(block.refuse(&Waiting {
        site: transfers.site(kind, peer, op),
        spins: 0,
        expected: if is_refused { fault.wanted.bytes } else { 0 },
        seen: if is_refused { fault.sent.bytes } else { reason },
    }))
}

/// Refuses a message of `peer`'s, which is not what call `op` asks for.
#[cold]
#[inline(never)]
unsafe fn refuse<B: Block>(
    block: &B,
    exchange: &Exchange,
    transfers: &Transfers,
    (index, op): (u32, u32),
    peer: u32,
    sent: Envelope,
    wanted: Envelope,
) -> Stopped {
    let memory = block.memory();
    // SAFETY: the caller's promise; the line is this rank's to write.
    unsafe {
        let fault = Fault {
            sender: peer,
            receiver: exchange.rank,
            sent,
            wanted,
        };
        memory.write(own_fault(exchange, index), fault);
        let [_, line] = lines(memory, exchange, peer);
        memory.store(line + SENT, sent.bytes);
        memory.store(line + SENT + 8, sent.kind);
        memory.store(line + WANTED, wanted.bytes);
        memory.store(line + WANTED + 8, wanted.kind);
        memory.store_release(line + STATUS, REFUSED);
        block.wake(peer);
        tell_others(block, exchange, peer, FAILED);
    }
    block.refuse(&Waiting {
        site: transfers.site(WaitKind::Envelope, peer, op),
        spins: 0,
        expected: wanted.bytes,
        seen: sent.bytes,
    })
}

/// Ends the exchange because the offer that a receive has copied was withdrawn by `peer`.
#[cold]
#[inline(never)]
unsafe fn miss<B: Block>(
    block: &B,
    exchange: &Exchange,
    transfers: &Transfers,
    op: u32,
    peer: u32,
) -> Stopped {
    // SAFETY: the caller's promise.
    unsafe { tell_others(block, exchange, peer, GAVE_UP) };
    block.refuse(&Waiting {
        site: transfers.site(WaitKind::Failed, peer, op),
        spins: 0,
        expected: 0,
        seen: GAVE_UP,
    })
}

/// Clears so many bytes of lines.
#[cold]
#[inline(never)]
unsafe fn scrub<M: Memory>(memory: &M, lines: u64, bytes: u64) {
    let mut at = 0;
    while at < bytes {
        // SAFETY: the caller's promise.
        unsafe { memory.store_pair(lines + at, [0, 0]) };
        at += 16;
    }
}

/// Where a thread block says what did not match.
#[inline(always)]
fn own_fault(exchange: &Exchange, index: u32) -> u64 {
    exchange.faults + u64::from(index) * size_of::<Fault>() as u64
}

/// Tells all other ranks but `except` that nothing more will come from this one, and of which kind the reason is.
#[inline(always)]
unsafe fn tell_others<B: Block>(block: &B, exchange: &Exchange, except: u32, status: u64) {
    let mut peer = 0;
    while peer < exchange.ranks {
        if peer != except && peer != exchange.rank {
            // SAFETY: the line is this rank's to write.
            unsafe {
                let [_, line] = lines(block.memory(), exchange, peer);
                block.memory().store_release(line + STATUS, status);
            }
            block.wake(peer);
        }
        peer += 1;
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
