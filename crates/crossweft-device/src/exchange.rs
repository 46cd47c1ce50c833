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

use core::mem::offset_of;

use crate::block::Block;
use crate::channel::copy;
use crate::memory::Memory;
use crate::reduce::{Location, Reducer, Sources};
use crate::wait::{Site, Stopped, WaitKind, Waiting, reached};

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

/// The two streams with one peer.
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
    /// place, in rank order. Alone in its chain; the messages must not be offered.
    Reduce = 2,
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

/// One send or receive of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// This rank's buffer.
    pub address: u64,
    /// What is sent, or must come.
    pub envelope: Envelope,
    /// Send: where the buffer lies in `memory`. Reduce: address of this rank's own part. Receive: set by
    /// device code.
    pub place: u64,
    /// Bytes done. Of an offered send: the slots that are sent then.
    pub done: u64,
    /// The other rank. Reduce: the one that is looked for next.
    pub peer: u32,
    /// What to do.
    pub direction: Direction,
    /// Send: the registered memory from which it may be offered, or [`NO_MEMORY`].
    pub memory: u32,
    /// Index of the next transfer of its chain, or [`NONE`].
    pub next: u32,
    /// Index among the calls of the group, for messages.
    pub op: u32,
    /// How far it is; [`State::New`] at first.
    pub state: State,
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
    /// Address of a [`Streams`] for each rank, in rank order.
    pub streams: u64,
    /// Address of a [`Mapped`] for each registered memory and rank.
    pub mapped: u64,
    /// Address of a [`Fault`], which says why an exchange ended with [`Stopped::Mismatch`].
    pub fault: u64,
    /// For thread blocks of several threads: address of [`BOARD`] bytes for each block.
    pub boards: u64,
    /// Bytes of a slot: a multiple of [`LINE`].
    pub slot_bytes: u64,
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

/// The transfers of one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Transfers {
    /// Address of all [`Transfer`]s.
    pub transfers: u64,
    /// Address of a `u32` for each chain: its first transfer. Device code changes it.
    pub chains: u64,
    /// Number of chains.
    pub count: u32,
    /// Thread blocks that share them.
    pub blocks: u32,
}

/// What all threads of a block do next.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    kind: ActionKind,
    /// The place of the chain.
    chain: u32,
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
    /// Copy a part of an offered message.
    Pull,
    /// Reduce a slot of every other rank.
    Reduce,
}

/// Bytes by which threads of a block tell each other what to do: of two turns.
pub const BOARD: u64 = 2 * size_of::<Action>() as u64;

/// Does all transfers of thread block `index`'s share of the chains. Returns when they are done: buffers of sends
/// may then be changed, though a small message may not have been received yet.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a message was not what was asked for. The exchange must not be
/// used again then.
///
/// # Safety
/// Everything that the tables point to must be valid, and nobody else may use it. Buffers must be valid
/// for their transfers, and must not overlap, but for an own part and its destination. Launches of a rank must follow
/// one another. All threads of the block must call this.
#[inline]
pub unsafe fn run_block<B: Block, R: Reducer>(
    block: &B,
    reducer: &R,
    exchange: &Exchange,
    transfers: &Transfers,
    index: u32,
) -> Result<(), Stopped> {
    let share =
        |k: u32| (u64::from(transfers.count) * u64::from(k) / u64::from(transfers.blocks)) as u32;
    let (begin, end) = (share(index), share(index + 1));
    let mut engine = Engine {
        block,
        exchange,
        transfers: transfers.transfers,
        chains: transfers.chains + u64::from(begin) * 4,
        count: end - begin,
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
            let action = engine.agree(mine, index, turn)?;
            turn ^= 1;
            match action.kind {
                ActionKind::End => return Ok(()),
                ActionKind::Reduce => engine.reduce(reducer, &action)?,
                _ => copy(block, action.dst, action.src, action.bytes),
            }
            block.sync(Ok(()))?;
            if block.thread() == 0 {
                engine.finish(&action);
            }
        }
    }
}

/// Tells all receivers that what this rank offers is offered no longer: before buffers of a launch that has failed are
/// given back, which must come after a fence.
///
/// # Safety
/// The exchange must be prepared, and none of its launches under way on this rank.
pub unsafe fn withdraw<M: Memory>(memory: &M, exchange: &Exchange) {
    // SAFETY: the caller's promise.
    unsafe { report(memory, exchange, WITHDRAWN, 1) };
}

/// After a launch that has ended because it took too long, or lost a peer that left: tells all peers that nothing more
/// will come from this rank.
///
/// # Safety
/// As for [`withdraw`].
pub unsafe fn give_up<M: Memory>(memory: &M, exchange: &Exchange) {
    // SAFETY: the caller's promise.
    unsafe { report(memory, exchange, STATUS, GAVE_UP) };
}

/// Stores a word of every line on which this rank reports.
unsafe fn report<M: Memory>(memory: &M, exchange: &Exchange, word: u64, value: u64) {
    let size = size_of::<Streams>() as u64;
    for peer in 0..u64::from(exchange.ranks) {
        // SAFETY: the table has an entry for each rank, whose line is this rank's to write.
        unsafe {
            let streams: Streams = memory.read(exchange.streams + peer * size);
            memory.store_release(streams.incoming.reports + word, value);
        }
    }
}

impl Action {
    const END: Self = Self {
        kind: ActionKind::End,
        chain: 0,
        transfer: 0,
        dst: 0,
        src: 0,
        bytes: 0,
    };
}

struct Engine<'a, B> {
    block: &'a B,
    exchange: &'a Exchange,
    transfers: u64,
    /// The chains under way come first.
    chains: u64,
    count: u32,
    cursor: u32,
}

/// # Safety
/// of all methods: that of [`run_block`].
impl<B: Block> Engine<'_, B> {
    /// What thread 0 found, for all threads of the block.
    #[inline(always)]
    unsafe fn agree(
        &self,
        mine: Result<Action, Stopped>,
        index: u32,
        turn: u64,
    ) -> Result<Action, Stopped> {
        if self.block.threads() == 1 {
            return mine;
        }
        // Two turns, so that one barrier is enough: whoever writes the next but one has met those
        // who read this one.
        let board = self.exchange.boards + u64::from(index) * BOARD + turn * (BOARD / 2);
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
            // SAFETY: as above. Each in its turn, so that whoever supervises hears of all of them.
            let waiting = unsafe { self.look_around(spins % self.count, spins)? };
            if let Err(waiting) = waiting {
                self.block.pause(&waiting)?;
            }
            spins = spins.saturating_add(1);
        }
    }

    #[inline(always)]
    unsafe fn transfer(&self, chain: u32) -> (u64, Transfer) {
        let size = size_of::<Transfer>() as u64;
        // SAFETY: chains hold indices of transfers.
        unsafe {
            let index: u32 = self.block.memory().read(self.chains + u64::from(chain) * 4);
            let at = self.transfers + u64::from(index) * size;
            (at, self.block.memory().read(at))
        }
    }

    #[inline(always)]
    fn streams(&self, peer: u32) -> u64 {
        self.exchange.streams + u64::from(peer) * size_of::<Streams>() as u64
    }

    #[inline(always)]
    unsafe fn outgoing(&self, peer: u32) -> (u64, Outgoing) {
        let at = self.streams(peer) + offset_of!(Streams, outgoing) as u64;
        // SAFETY: peers are ranks.
        unsafe { (at, self.block.memory().read(at)) }
    }

    #[inline(always)]
    unsafe fn incoming(&self, peer: u32) -> (u64, Incoming) {
        let at = self.streams(peer) + offset_of!(Streams, incoming) as u64;
        // SAFETY: peers are ranks.
        unsafe { (at, self.block.memory().read(at)) }
    }

    /// The lines on which `peer`, and this rank to `peer`, reports. Other blocks may be counting beside them.
    #[inline(always)]
    unsafe fn lines(&self, peer: u32) -> [u64; 2] {
        let streams = self.streams(peer);
        [
            offset_of!(Streams, outgoing) + offset_of!(Outgoing, reports),
            offset_of!(Streams, incoming) + offset_of!(Incoming, reports),
        ]
        // SAFETY: peers are ranks; these words never change.
        .map(|at| unsafe { self.block.memory().read(streams + at as u64) })
    }

    /// The slot that is sent, or received, after `slots` others.
    #[inline(always)]
    fn slot(&self, ring: u64, slots: u64) -> u64 {
        ring + (slots & u64::from(self.exchange.slots - 1)) * self.exchange.slot_bytes
    }

    /// Bytes of payload in a slot.
    #[inline(always)]
    fn room(&self) -> u64 {
        self.exchange.slot_bytes - HEADER
    }

    /// What can be done for a chain, if anything.
    #[inline(always)]
    unsafe fn attempt(&self, chain: u32) -> Result<Option<Action>, Stopped> {
        // SAFETY: the caller's promise.
        unsafe {
            let (at, transfer) = self.transfer(chain);
            let action = Action {
                chain,
                transfer: at,
                ..Action::END
            };
            match transfer.direction {
                Direction::Send => self.attempt_send(&transfer, action),
                Direction::Receive => self.attempt_receive(&transfer, action),
                Direction::Reduce => self.attempt_reduce(&transfer, action),
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
            let (at, stream) = self.outgoing(transfer.peer);
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
            let is_offer = transfer.memory != NO_MEMORY && bytes > self.room();
            if transfer.state == State::New {
                if memory.load(stream.reports + STATUS) != 0 {
                    self.heed(transfer, transfer.peer)?;
                }
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
                    min(self.room(), bytes - transfer.done)
                },
                ..action
            }))
        }
    }

    #[inline(always)]
    unsafe fn attempt_receive(
        &self,
        transfer: &Transfer,
        action: Action,
    ) -> Result<Option<Action>, Stopped> {
        let memory = self.block.memory();
        let rest = transfer.envelope.bytes - transfer.done;
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
            let (_, stream) = self.incoming(transfer.peer);
            let Some(slot) = self.arrived(&stream) else {
                return Ok(None);
            };
            if transfer.state == State::New {
                let from = self.open(transfer, transfer.peer, slot)?;
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
                    let (_, stream) = self.incoming(peer);
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
            bytes: min(self.room(), transfer.envelope.bytes - transfer.done),
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

    /// Compares the message that begins in `slot` with what was asked for. Returns its address if it is
    /// offered, or 0.
    #[inline(always)]
    unsafe fn open(&self, transfer: &Transfer, peer: u32, slot: u64) -> Result<u64, Stopped> {
        let memory = self.block.memory();
        // SAFETY: the slot has arrived.
        let (bytes, kind) = unsafe {
            (
                memory.read::<u64>(slot + BYTES),
                memory.read::<u64>(slot + KIND),
            )
        };
        let sent = Envelope {
            bytes,
            kind: kind & u64::from(u32::MAX),
        };
        // SAFETY: the caller's promise.
        unsafe {
            if sent == transfer.envelope {
                match kind >> 32 {
                    0 => return Ok(0),
                    number => {
                        let place = memory.read(slot + PLACE);
                        if let Some(address) = self.offered(number - 1, peer, place, bytes) {
                            return Ok(address);
                        }
                    }
                }
            }
            Err(self.refuse(transfer, peer, sent))
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
        // SAFETY: the caller's promise.
        unsafe { self.tell_others(transfer.peer, GAVE_UP) };
        Err(self.block.refuse(&Waiting {
            site: site(WaitKind::Failed, transfer.peer, transfer.op),
            spins: 0,
            expected: 0,
            seen: GAVE_UP,
        }))
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
            let mut is_complete = done == transfer.envelope.bytes;
            match action.kind {
                ActionKind::End => return,
                ActionKind::Send => drop(self.publish(transfer.peer)),
                ActionKind::Offer => {
                    done = self.publish(transfer.peer);
                    (state, is_complete) = (State::Offered, false);
                }
                ActionKind::Taken => is_complete = true,
                ActionKind::Receive => self.take(transfer.peer, false),
                ActionKind::Pull => {
                    state = State::Offered;
                    // All was copied before, and then the offer still stood.
                    is_complete &= action.bytes == 0;
                    if is_complete {
                        self.take(transfer.peer, true);
                    }
                }
                ActionKind::Reduce => {
                    let mut peer = 0;
                    while peer < self.exchange.ranks {
                        if peer != self.exchange.rank {
                            self.take(peer, false);
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
            let chain = self.chains + u64::from(action.chain) * 4;
            let next = match transfer.next {
                NONE => {
                    self.count -= 1;
                    memory.read(self.chains + u64::from(self.count) * 4)
                }
                next => next,
            };
            memory.write(chain, next);
            self.cursor = action.chain;
        }
    }

    /// Hands a filled slot to `peer`. Returns the number of slots sent.
    #[inline(always)]
    unsafe fn publish(&self, peer: u32) -> u64 {
        let memory = self.block.memory();
        // SAFETY: the slot is the sender's until its flag is stored.
        unsafe {
            let (at, stream) = self.outgoing(peer);
            let sent = stream.sent + 1;
            memory.store_release(self.slot(stream.ring, stream.sent), sent);
            memory.write(at + offset_of!(Outgoing, sent) as u64, sent);
            self.block.wake(peer);
            sent
        }
    }

    /// A slot of `peer`'s was read. Returns slots by the half ring, for each time costs the sender a cache
    /// line; a sender that has no slots left has always been, or will be, given that many.
    #[inline(always)]
    unsafe fn take(&self, peer: u32, now: bool) {
        let memory = self.block.memory();
        // SAFETY: the stream's words.
        unsafe {
            let (at, stream) = self.incoming(peer);
            let received = stream.received + 1;
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
                    let (_, stream) = unsafe { self.incoming(rank) };
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
    /// rank sent. Returns what that chain waits for, or that it has just become possible to go on.
    #[inline(always)]
    unsafe fn look_around(&self, chain: u32, spins: u32) -> Result<Result<(), Waiting>, Stopped> {
        let memory = self.block.memory();
        // SAFETY: the caller's promise.
        unsafe {
            let (_, transfer) = self.transfer(chain);
            let peer = transfer.peer;
            let [reports, _] = self.lines(peer);
            // Acquired: what the peer sent before it failed is then seen.
            if memory.load_acquire(reports + STATUS) != 0 {
                if self.attempt(chain)?.is_some() {
                    return Ok(Ok(()));
                }
                // A reduction may have found the peer's message, and looks for another's now.
                let (_, transfer) = self.transfer(chain);
                if transfer.peer != peer {
                    return Ok(Ok(()));
                }
                self.heed(&transfer, peer)?;
            }
            let (kind, expected, seen) = match transfer.direction {
                Direction::Send => {
                    let expected = match transfer.state {
                        State::Offered => transfer.done,
                        _ => {
                            let (_, stream) = self.outgoing(peer);
                            (stream.sent + 1).wrapping_sub(self.exchange.slots.into())
                        }
                    };
                    (WaitKind::Taken, expected, memory.load(reports + TAKEN))
                }
                _ => {
                    let (_, stream) = self.incoming(peer);
                    let slot = self.slot(stream.ring, stream.received);
                    (WaitKind::Message, stream.received + 1, memory.load(slot))
                }
            };
            let site = site(kind, peer, transfer.op);
            Ok(Err(Waiting {
                site,
                spins,
                expected,
                seen,
            }))
        }
    }

    /// Ends the exchange if `peer` says that its own has ended badly.
    #[cold]
    #[inline(never)]
    unsafe fn heed(&self, transfer: &Transfer, peer: u32) -> Result<(), Stopped> {
        let memory = self.block.memory();
        // SAFETY: the caller's promise, here and below.
        let [reports, _] = unsafe { self.lines(peer) };
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
            sender: self.exchange.rank,
            receiver: peer,
            sent: envelope(SENT),
            wanted: envelope(WANTED),
        };
        // SAFETY: the caller's promise.
        unsafe {
            if kind == WaitKind::Envelope {
                memory.write(self.exchange.fault, fault);
            }
            self.tell_others(peer, reason);
        }
        let is_refused = kind == WaitKind::Envelope;
        Err(self.block.refuse(&Waiting {
            site: site(kind, peer, transfer.op),
            spins: 0,
            expected: if is_refused { fault.wanted.bytes } else { 0 },
            seen: if is_refused { fault.sent.bytes } else { reason },
        }))
    }

    /// Refuses a message of `peer`'s.
    #[cold]
    #[inline(never)]
    unsafe fn refuse(&self, transfer: &Transfer, peer: u32, sent: Envelope) -> Stopped {
        let memory = self.block.memory();
        let wanted = transfer.envelope;
        let fault = Fault {
            sender: peer,
            receiver: self.exchange.rank,
            sent,
            wanted,
        };
        // SAFETY: the caller's promise; the line is this rank's to write.
        unsafe {
            memory.write(self.exchange.fault, fault);
            let [_, line] = self.lines(peer);
            for (at, envelope) in [(SENT, sent), (WANTED, wanted)] {
                memory.store(line + at, envelope.bytes);
                memory.store(line + at + 8, envelope.kind);
            }
            memory.store_release(line + STATUS, REFUSED);
            self.block.wake(peer);
            self.tell_others(peer, FAILED);
        }
        self.block.refuse(&Waiting {
            site: site(WaitKind::Envelope, peer, transfer.op),
            spins: 0,
            expected: wanted.bytes,
            seen: sent.bytes,
        })
    }

    /// Tells all other ranks but `except` that nothing more will come from this one, and of which kind the reason is.
    unsafe fn tell_others(&self, except: u32, status: u64) {
        let mut peer = 0;
        while peer < self.exchange.ranks {
            if peer != except && peer != self.exchange.rank {
                // SAFETY: the line is this rank's to write.
                unsafe {
                    let [_, line] = self.lines(peer);
                    self.block.memory().store_release(line + STATUS, status);
                }
                self.block.wake(peer);
            }
            peer += 1;
        }
    }
}

const fn site(kind: WaitKind, peer: u32, op: u32) -> Site {
    Site {
        kind,
        peer,
        channel: 0,
        op,
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
