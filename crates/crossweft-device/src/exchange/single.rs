//! A thread block that has one transfer to do, from beginning to end.
//!
//! What [`run_block`](super::run_block) does on streams for any number of chains, without what it takes to go round them:
//! a small message costs fewer trips to memory, and of a large one slots are handed over while the next is filled. The first
//! warp of a block is its *clerk*: it watches flags and counts, and stores them; the others copy. Words and their order are the
//! same, so one side may do this and the other that.
//!
//! Every transfer of the launch must have a thread block of its own, all of which run at once, and a stream of its own.

use core::mem::offset_of;

use super::{
    BYTES, Direction, Engine, Envelope, Exchange, HEADER, IN_LINES, Incoming, KIND, LINES_BITS,
    NO_MEMORY, Outgoing, PLACE, STATUS, TAKEN, Transfer, Transfers, is_abandoned, min,
};
use crate::block::Block;
use crate::channel::copy_by;
use crate::gpu::lines;
use crate::memory::Memory;
use crate::packet::flag_of;
use crate::wait::{Site, Stopped, WaitKind, Waiting, reached};

/// Bytes by which the clerk tells the other threads of a block what it has seen: two words, by turns.
pub const BOARD: u64 = 16;

/// What the clerk says as long as no message is there: no place where one is offered.
const NOTHING: u64 = u64::MAX;

/// Looks at a word in vain between two looks at what the peer says of itself.
const PATIENCE: u32 = 32;

/// Does one transfer, as thread block `index`. `board` is memory of the block, of [`BOARD`] bytes. Returns as
/// [`run_block`](super::run_block) does.
///
/// # Errors
/// [`Stopped`], as there; also if the launch has been [abandoned](super::abandon) before, or the transfer is a reduction.
///
/// # Safety
/// As there, and for the other transfers of the launch see above.
#[inline(always)]
pub unsafe fn run_single<B: Block>(
    block: &B,
    exchange: &Exchange,
    transfers: &Transfers,
    index: u32,
    transfer: &Transfer,
    board: u64,
) -> Result<(), Stopped> {
    let single = Single {
        engine: Engine {
            block,
            exchange,
            transfers,
            chains: 0,
            index,
            count: 0,
            cursor: 0,
        },
        transfer,
        board,
    };
    // SAFETY: the caller's promise.
    unsafe {
        match transfer.direction {
            Direction::Send if single.engine.takes_lines(transfer) => single.send_lines(),
            Direction::Send => single.send(),
            Direction::Receive => single.receive(),
            Direction::Copy => {
                let Transfer {
                    address,
                    place,
                    bytes,
                    ..
                } = *transfer;
                let all = (block.thread(), block.threads());
                copy_by(block, all, address, place, bytes);
                Ok(())
            }
            Direction::Reduce => Err(Stopped::Mismatch),
        }
    }
}

struct Single<'a, B> {
    engine: Engine<'a, B>,
    transfer: &'a Transfer,
    board: u64,
}

/// # Safety
/// of all methods: that of [`run_single`].
impl<B: Block> Single<'_, B> {
    #[inline(always)]
    fn is_clerk(&self) -> bool {
        self.engine.block.thread() == 0
    }

    /// Copies by all threads but the clerk's warp, where there are others.
    #[inline(always)]
    unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) {
        let block = self.engine.block;
        let (thread, threads) = (block.thread(), block.threads());
        let clerks = match block.lanes() {
            lanes if lanes < threads => lanes,
            _ => 0,
        };
        if thread >= clerks {
            // SAFETY: the caller's promise.
            unsafe { copy_by(block, (thread - clerks, threads - clerks), dst, src, bytes) }
        }
    }

    /// Brings the threads of the block together; what the clerk has seen.
    #[inline(always)]
    unsafe fn meet(&self, turn: &mut u64, mine: Result<u64, Stopped>) -> Result<u64, Stopped> {
        let (block, memory) = (self.engine.block, self.engine.block.memory());
        let word = self.board + *turn;
        // Whoever writes the next but one has met those who read this one.
        *turn ^= BOARD / 2;
        // SAFETY: the block's own words; written by one thread, read after a barrier.
        unsafe {
            if let (true, Ok(seen)) = (self.is_clerk(), mine) {
                memory.write(word, seen);
            }
            block.sync(mine.map(drop))?;
            Ok(memory.read(word))
        }
    }

    #[inline(always)]
    unsafe fn send(&self) -> Result<(), Stopped> {
        let (exchange, transfer) = (self.engine.exchange, self.transfer);
        let memory = self.engine.block.memory();
        let Transfer {
            lane, peer, bytes, ..
        } = *transfer;
        let (room, slots) = (self.engine.room(), u64::from(exchange.slots));
        // SAFETY: the stream's words; a free slot is the sender's alone.
        unsafe {
            let (at, stream) = self.engine.outgoing(lane, peer);
            let is_offer = transfer.memory != NO_MEMORY && bytes > room;
            let (mut sent, mut taken, mut turn, mut done) = (stream.sent, stream.taken, 0, 0);
            let mut is_first = true;
            loop {
                if sent.wrapping_sub(taken) >= slots {
                    let mine = match self.is_clerk() {
                        true => self.wait_taken(&stream, (sent + 1).wrapping_sub(slots)),
                        false => Ok(0),
                    };
                    taken = self.meet(&mut turn, mine)?;
                }
                let slot = self.engine.slot(stream.ring, sent);
                let piece = match is_offer {
                    true => 0,
                    false => min(room, bytes - done),
                };
                self.copy(slot + HEADER, transfer.address + done, piece);
                let mut mine = Ok(taken);
                if self.is_clerk() {
                    if is_first {
                        mine = self.begin(&stream, slot, is_offer).map(|()| taken);
                    } else if mine.is_ok() {
                        mine = Ok(memory.load_acquire(stream.reports + TAKEN));
                    }
                }
                taken = self.meet(&mut turn, mine)?;
                sent += 1;
                if self.is_clerk() {
                    memory.store_release(slot, sent);
                    self.engine.block.wake(peer);
                }
                done += piece;
                is_first = false;
                if is_offer || done == bytes {
                    break;
                }
            }
            if is_offer {
                let mine = match self.is_clerk() {
                    true => self.wait_taken(&stream, sent),
                    false => Ok(0),
                };
                taken = self.meet(&mut turn, mine)?;
            }
            if self.is_clerk() {
                memory.write(at + offset_of!(Outgoing, sent) as u64, sent);
                memory.write(at + offset_of!(Outgoing, taken) as u64, taken);
            }
            Ok(())
        }
    }

    /// Sends a small message in lines: nothing waits for its payload to have arrived.
    #[inline(always)]
    unsafe fn send_lines(&self) -> Result<(), Stopped> {
        let Single {
            engine, transfer, ..
        } = self;
        let memory = engine.block.memory();
        let Envelope { bytes, kind } = transfer.envelope;
        let slots = u64::from(engine.exchange.slots);
        // SAFETY: the stream's words; a free slot is the sender's alone, which only acquiring the count of those taken says.
        unsafe {
            let (at, stream) = engine.outgoing(transfer.lane, transfer.peer);
            let own = memory.load(engine.exchange.own + STATUS);
            let status = memory.load(stream.reports + STATUS);
            let Outgoing {
                sent, mut taken, ..
            } = stream;
            if sent.wrapping_sub(taken) >= slots {
                let mine = match self.is_clerk() {
                    true => self.wait_taken(&stream, (sent + 1).wrapping_sub(slots)),
                    false => Ok(0),
                };
                taken = self.meet(&mut 0, mine)?;
            }
            let slot = engine.slot(stream.ring, sent);
            let flag = flag_of(sent + 1, bytes);
            lines::copy_to_lines(
                engine.block,
                engine.lines_of(slot),
                transfer.address,
                bytes,
                flag,
            );
            let mut mine = Ok(());
            if self.is_clerk() {
                mine = match (own, status) {
                    (0, 0) => Ok(()),
                    (0, _) => engine.heed(transfer.op, transfer.peer),
                    _ => Err(Stopped::Aborted),
                };
                if mine.is_ok() {
                    let header = IN_LINES | kind << LINES_BITS | bytes;
                    // Others do not store both together: the flag follows.
                    #[cfg(not(target_arch = "nvptx64"))]
                    {
                        memory.store(slot + BYTES, header);
                        memory.store_release(slot, sent + 1);
                    }
                    #[cfg(target_arch = "nvptx64")]
                    memory.store_pair(slot, [sent + 1, header]);
                    engine.block.wake(transfer.peer);
                }
            }
            // All have read what is counted on now.
            engine.block.sync(mine)?;
            if self.is_clerk() {
                memory.write(at + offset_of!(Outgoing, sent) as u64, sent + 1);
                memory.write(at + offset_of!(Outgoing, taken) as u64, taken);
            }
            Ok(())
        }
    }

    /// Writes a message's header, if nothing is wrong with this rank or the peer.
    #[inline(always)]
    unsafe fn begin(&self, stream: &Outgoing, slot: u64, is_offer: bool) -> Result<(), Stopped> {
        let memory = self.engine.block.memory();
        let transfer = self.transfer;
        let Envelope { bytes, kind } = transfer.envelope;
        let place = match is_offer {
            true => u64::from(transfer.memory) + 1,
            false => 0,
        };
        // SAFETY: the caller's promise: a free slot.
        unsafe {
            let own = memory.load(self.engine.exchange.own + STATUS);
            self.engine.begin(transfer, stream)?;
            memory.write(slot + BYTES, bytes);
            memory.write(slot + KIND, kind | place << 32);
            memory.write(slot + PLACE, transfer.place);
            match own {
                0 => Ok(()),
                _ => Err(Stopped::Aborted),
            }
        }
    }

    #[inline(always)]
    unsafe fn receive(&self) -> Result<(), Stopped> {
        let transfer = self.transfer;
        let (block, memory) = (self.engine.block, self.engine.block.memory());
        let Transfer {
            lane,
            peer,
            bytes,
            address,
            ..
        } = *transfer;
        let room = self.engine.room();
        // SAFETY: the stream's words; a slot with its flag is the receiver's alone.
        unsafe {
            let (at, stream) = self.engine.incoming(lane, peer);
            let (mut received, mut told, mut turn, mut done) = (stream.received, stream.told, 0, 0);
            let offered = self.wait_first(&stream, &mut turn)?;
            if offered == IN_LINES {
                received += 1;
                if self.is_clerk() {
                    told = self.give_back(&stream, received, told);
                }
            } else if offered != 0 {
                self.copy(address, offered, bytes);
                self.meet(&mut turn, Ok(0))?;
                let mine = match self.is_clerk() {
                    true => self.engine.check_offer(transfer).map(|()| 0),
                    false => Ok(0),
                };
                // Others need not know how that ended.
                let _ = mine?;
                if self.is_clerk() {
                    received += 1;
                    told = received;
                    memory.store_release(stream.reports + TAKEN, received);
                    block.wake(peer);
                }
            } else {
                loop {
                    let slot = self.engine.slot(stream.ring, received);
                    let piece = min(room, bytes - done);
                    self.copy(address + done, slot + HEADER, piece);
                    done += piece;
                    let is_last = done == bytes;
                    let mut mine = Ok(0);
                    if self.is_clerk() && !is_last {
                        let next = self.engine.slot(stream.ring, received + 1);
                        mine = Ok(memory.load_acquire(next));
                    }
                    let mut seen = self.meet(&mut turn, mine)?;
                    received += 1;
                    if self.is_clerk() {
                        told = self.give_back(&stream, received, told);
                    }
                    if is_last {
                        break;
                    }
                    while seen != received + 1 {
                        let mine = match self.is_clerk() {
                            true => self.wait_message(&stream, received),
                            false => Ok(0),
                        };
                        seen = self.meet(&mut turn, mine)?;
                    }
                }
            }
            if self.is_clerk() {
                memory.write(at + offset_of!(Incoming, received) as u64, received);
                memory.write(at + offset_of!(Incoming, told) as u64, told);
            }
            Ok(())
        }
    }

    /// After `received` slots, of which the peer was `told`: tells it, by the half ring. Returns how many it knows of then.
    #[inline(always)]
    unsafe fn give_back(&self, stream: &Incoming, received: u64, told: u64) -> u64 {
        let Engine {
            block, exchange, ..
        } = self.engine;
        // SAFETY: the stream's words.
        unsafe {
            self.engine.scrub(stream, received);
            if received - told < u64::from(exchange.slots / 2) {
                return told;
            }
            block
                .memory()
                .store_release(stream.reports + TAKEN, received);
            block.wake(self.transfer.peer);
        }
        received
    }

    /// Block: waits for a message's first slot and opens it. Returns what [`Engine::open`] says; [`IN_LINES`] when they have been
    /// copied.
    #[inline(always)]
    unsafe fn wait_first(&self, stream: &Incoming, turn: &mut u64) -> Result<u64, Stopped> {
        let Single {
            engine, transfer, ..
        } = self;
        let (block, memory) = (engine.block, engine.block.memory());
        let (slot, flag) = (
            engine.slot(stream.ring, stream.received),
            stream.received + 1,
        );
        let site = self.site(WaitKind::Message);
        let mut vigil = Vigil::new(site, flag);
        // SAFETY: the caller's promise; the flag is only ever accessed as a word.
        unsafe {
            // On its way while the slot is looked at.
            let own = memory.load(engine.exchange.own + STATUS);
            let (takes_lines, mut is_done) = (engine.takes_lines(transfer), false);
            let (from, lines_flag) = (engine.lines_of(slot), flag_of(flag, transfer.bytes));
            loop {
                let mut mine = Ok(NOTHING);
                if self.is_clerk() {
                    vigil.seen(memory.load_acquire(slot));
                }
                // What may have come in lines is looked at meanwhile, and not after the header was.
                if takes_lines && !is_done {
                    let (dst, bytes) = (transfer.address, transfer.bytes);
                    is_done = lines::copy_if_there(block, dst, from, bytes, lines_flag);
                }
                if self.is_clerk() {
                    mine = match vigil.waiting.seen == flag {
                        true if own != 0 => Err(Stopped::Aborted),
                        true => engine.open(transfer, transfer.peer, slot),
                        false => vigil.pause(engine).map(|()| NOTHING),
                    };
                }
                match self.meet(turn, mine)? {
                    NOTHING => {}
                    IN_LINES => break,
                    other => return Ok(other),
                }
            }
            let mut mine = Ok(());
            if !is_done {
                let (dst, bytes) = (transfer.address, transfer.bytes);
                mine = lines::copy_from_lines(block, site, dst, from, bytes, lines_flag);
            }
            block.sync(mine)?;
            Ok(IN_LINES)
        }
    }

    /// Waits for the slot that comes after `received` others: its flag.
    #[inline(always)]
    unsafe fn wait_message(&self, stream: &Incoming, received: u64) -> Result<u64, Stopped> {
        let slot = self.engine.slot(stream.ring, received);
        let flag = received + 1;
        let site = self.site(WaitKind::Message);
        // SAFETY: the flag is only ever accessed as a word.
        unsafe { self.wait(slot, site, flag, |seen| seen == flag) }
    }

    /// Waits until the peer has taken so many slots: how many it has.
    #[inline(always)]
    unsafe fn wait_taken(&self, stream: &Outgoing, slots: u64) -> Result<u64, Stopped> {
        let site = self.site(WaitKind::Taken);
        // SAFETY: the count is only ever accessed as a word.
        unsafe {
            self.wait(stream.reports + TAKEN, site, slots, |seen| {
                reached(seen, slots)
            })
        }
    }

    #[inline(always)]
    fn site(&self, kind: WaitKind) -> Site {
        let Transfer { peer, op, .. } = *self.transfer;
        self.engine.transfers.site(kind, peer, op)
    }

    /// Waits for a word, or until the peer, or another block, says that nothing more will come.
    #[inline(always)]
    unsafe fn wait(
        &self,
        word: u64,
        site: Site,
        expected: u64,
        done: impl Fn(u64) -> bool,
    ) -> Result<u64, Stopped> {
        let mut vigil = Vigil::new(site, expected);
        loop {
            // SAFETY: the caller's promise.
            let seen = unsafe { self.engine.block.memory().load_acquire(word) };
            if done(seen) {
                return Ok(seen);
            }
            vigil.seen(seen);
            // SAFETY: as above.
            unsafe { vigil.pause(&self.engine)? };
        }
    }
}

/// A clerk's wait for a word.
struct Vigil {
    waiting: Waiting,
    /// Whether the peer says that it has failed: what it sent before that is looked for once more.
    has_failed: bool,
}

impl Vigil {
    #[inline(always)]
    const fn new(site: Site, expected: u64) -> Self {
        Self {
            waiting: Waiting {
                site,
                spins: 0,
                expected,
                seen: 0,
            },
            has_failed: false,
        }
    }

    #[inline(always)]
    const fn seen(&mut self, word: u64) {
        self.waiting.seen = word;
    }

    /// After a look in vain: ends the wait if the peer, or another block, says that nothing more will come.
    ///
    /// # Safety
    /// That of [`run_single`].
    #[inline(always)]
    unsafe fn pause<B: Block>(&mut self, engine: &Engine<'_, B>) -> Result<(), Stopped> {
        let Site { peer, op, .. } = self.waiting.site;
        let spins = self.waiting.spins;
        self.waiting.spins = spins.saturating_add(1);
        if self.has_failed {
            // SAFETY: the caller's promise.
            unsafe { engine.heed(op, peer)? };
        }
        if spins % PATIENCE == PATIENCE - 1 {
            let memory = engine.block.memory();
            // SAFETY: as above.
            unsafe {
                // Another block has said why.
                if is_abandoned(memory, engine.exchange) {
                    return Err(Stopped::Aborted);
                }
                let [reports, _] = engine.lines(peer);
                // Acquired: what the peer sent before it failed is then seen.
                self.has_failed = memory.load_acquire(reports + STATUS) != 0;
            }
        }
        let waiting = Waiting {
            spins,
            ..self.waiting
        };
        engine.block.pause(&waiting)
    }
}
