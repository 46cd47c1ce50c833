//! The plan executor: one thread block's walk through its operations.
//!
//! Every block reads the epoch, does its operations, and leaves; the last one to leave advances
//! the epoch. Launches of one program must follow one another (a stream sees to that); the epoch
//! lives in device memory, so a launch can be replayed as it is.

use crate::block::Block;
use crate::channel::{PortChannel, copy};
use crate::extent::{Extent, chunk_bytes};
use crate::fifo::{Trigger, TriggerKind};
use crate::memory::Memory;
use crate::packet::{self, PAYLOAD, WORD};
use crate::program::{
    BASES_AT, BlockOps, COUNTER_STRIDE, Launch, Op, OpKind, Operand, Program, SPACES, Space, flags,
};
use crate::reduce::{Location, Reducer, Sources};
use crate::semaphore::{Semaphore, TAGS};
use crate::wait::{Site, Stopped, WaitKind, Waiting, reached, wait_for};

/// Runs thread block `index` of a launch of `program`.
///
/// # Errors
/// [`Stopped`] when the wait hook ends a wait. The program's counters are then out of step with its
/// peers', so it must not be launched again.
///
/// # Safety
/// `program` must have been prepared for this address space, and `launch` must name buffers of its
/// size; each block below `block_count` runs exactly once a launch, one launch after another.
pub unsafe fn run_block<B: Block, R: Reducer>(
    block: &B,
    reducer: &R,
    program: &Program,
    launch: &Launch,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    // Slots of this half were read two executions ago; what this one sends must not overtake that.
    memory.fence_launch();
    let start = Start {
        tables: program.tables + u64::from(index) * program.stride,
        // SAFETY: the caller promises a prepared program.
        epoch: unsafe { memory.load(program.counters) },
        chunk: chunk_bytes(launch.bytes, program.chunks),
    };
    let call = Execution {
        block,
        program,
        launch,
        start: &start,
    };
    // SAFETY: as above.
    unsafe { call.run(reducer, index) }
}

/// What a thread block has found out when it begins.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// Its tables: those of the program, or a copy of them.
    pub tables: u64,
    /// The rank's epoch.
    pub epoch: u64,
    /// [`chunk_bytes`] of the message.
    pub chunk: u64,
}

/// Entry `index` of a table that never changes.
///
/// # Safety
/// The entry must exist.
#[inline(always)]
unsafe fn read_entry<B: Block, T: Copy>(block: &B, table: u64, index: u32) -> T {
    // SAFETY: the caller's promise.
    unsafe {
        block
            .memory()
            .read(table + u64::from(index) * size_of::<T>() as u64)
    }
}

/// One thread block's part of a launch. References, of which a GPU needs no registers: all lies where the
/// threads of the block share it.
#[derive(Debug)]
pub struct Execution<'a, B> {
    /// The thread block.
    pub block: &'a B,
    /// The plan.
    pub program: &'a Program,
    /// The launch.
    pub launch: &'a Launch,
    /// What the block has found out.
    pub start: &'a Start,
}

/// The part of its data that an operation handles this time, in bytes from its beginning.
#[derive(Clone, Copy)]
struct Window {
    begin: u64,
    bytes: u64,
}

const ALL: Window = Window {
    begin: 0,
    bytes: u64::MAX,
};

impl<B: Block> Execution<'_, B> {
    /// [`run_block`], of block `index`, which has begun.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there; `start` must be of this block and launch.
    #[inline(always)]
    pub unsafe fn run<R: Reducer>(&self, reducer: &R, index: u32) -> Result<(), Stopped> {
        let tables = self.start.tables;
        // SAFETY: the caller promises a prepared program.
        let BlockOps { count, ops_at } = unsafe { read_entry(self.block, tables, 0) };
        let mut i = 0;
        while i < count {
            // SAFETY: as above; `i` is below the block's count.
            i += unsafe { self.run_at(reducer, tables + u64::from(ops_at), i)? };
        }
        self.block.sync(Ok(()))?;
        // SAFETY: as above.
        unsafe { self.leave(index) }
    }

    /// Runs the operation at `at` of the block's `ops`, with those in its loop if it is one; returns how
    /// many entries that were.
    ///
    /// # Safety
    /// `at` must be one of the program's operations, not inside a loop.
    #[inline(always)]
    unsafe fn run_at<R: Reducer>(&self, reducer: &R, ops: u64, at: u32) -> Result<u32, Stopped> {
        // SAFETY: the caller's promise; a loop's operations follow it.
        unsafe {
            let op = read_entry::<B, Op>(self.block, ops, at);
            if op.kind != OpKind::Loop {
                self.step(reducer, &op, ALL)?;
                self.block.checkpoint();
                return Ok(1);
            }
            let total = self.start.chunk * u64::from(op.chunks);
            let mut begin = 0;
            while begin < total {
                let mut k = 1;
                while k <= op.links {
                    let inner = read_entry::<B, Op>(self.block, ops, at + k);
                    self.step(
                        reducer,
                        &inner,
                        Window {
                            begin,
                            bytes: op.unit,
                        },
                    )?;
                    self.block.checkpoint();
                    k += 1;
                }
                begin += op.unit;
            }
            Ok(1 + op.links)
        }
    }

    /// # Safety
    /// `op` must be one of the program's.
    #[inline(always)]
    unsafe fn step<R: Reducer>(&self, reducer: &R, op: &Op, window: Window) -> Result<(), Stopped> {
        // SAFETY: the caller's promise, for all of them.
        unsafe {
            match op.kind {
                OpKind::Move => self.transfer(op, window),
                OpKind::Reduce => self.reduce(reducer, op, window),
                OpKind::Signal | OpKind::RelaxedSignal => self.signal(op),
                OpKind::Wait | OpKind::RelaxedWait => self.wait(op),
                OpKind::Barrier => self.barrier(op),
                OpKind::Put => self.put(op, window),
                OpKind::PortSignal => self.request(op, TriggerKind::SIGNAL, false),
                OpKind::Flush => self.request(op, TriggerKind::FLUSH, true),
                OpKind::Acquire => self.acquire(op),
                OpKind::Release => self.release(op),
                OpKind::Sync | OpKind::Loop => self.block.sync(Ok(())),
            }
        }
    }

    fn extent(&self, op: &Op, window: Window) -> Extent {
        let all = Extent::of_chunks(self.launch.bytes, self.start.chunk, op.chunk, op.chunks)
            .slice(op.slice, op.slices);
        let begin = min(all.begin + window.begin, all.end);
        Extent {
            begin,
            end: min(begin.saturating_add(window.bytes), all.end),
        }
    }

    /// An operand, and where its part that belongs to `extent` begins: bytes from the beginning of
    /// the caller's buffer, or of this epoch's half of the plan's own.
    ///
    /// # Safety
    /// The op and operand must be the program's.
    #[inline(always)]
    unsafe fn offset(&self, op: &Op, operand: u32, extent: Extent) -> (Operand, u64) {
        // SAFETY: the caller's promise.
        let operand: Operand = unsafe {
            read_entry(
                self.block,
                self.start.tables + u64::from(op.operands_at),
                operand,
            )
        };
        // Where the operation's first chunk lies in its buffer, and this part in the chunk.
        let start = self.launch.bytes * u64::from(operand.block)
            + self.start.chunk * u64::from(operand.index);
        let inside = extent.begin - min(self.start.chunk * u64::from(op.chunk), self.launch.bytes);
        (operand, start + inside)
    }

    /// Bytes from the beginning of a buffer to this epoch's half of it.
    fn half(&self, space: Space) -> u64 {
        match space {
            Space::Scratch => (self.start.epoch & 1) * self.program.scratch_half,
            Space::Packets => (self.start.epoch & 1) * self.program.packets_half,
            _ => 0,
        }
    }

    /// Address of an operand's part that belongs to `extent`.
    ///
    /// # Safety
    /// The op and operand must be the program's.
    #[inline(always)]
    unsafe fn locate(&self, op: &Op, index: u32, extent: Extent) -> Location {
        let program = self.program;
        // SAFETY: the caller's promise.
        let (operand, offset) = unsafe { self.offset(op, index, extent) };
        let Operand {
            space, rank, peer, ..
        } = operand;
        let own = rank == program.rank;
        let base = || {
            let entry =
                self.start.tables + BASES_AT + (u64::from(rank) * SPACES + space as u64) * 8;
            // SAFETY: the table has an entry for every rank and space, and never changes.
            unsafe { self.block.memory().read::<u64>(entry) }
        };
        match space {
            Space::Input if own => Location::raw(self.launch.input + offset),
            Space::Input => Location::raw(base() + self.launch.input_offset + offset),
            Space::Output if own => Location::raw(self.launch.output + offset),
            Space::Output => Location::raw(base() + self.launch.output_offset + offset),
            Space::Scratch => Location::raw(base() + self.half(space) + offset),
            Space::Packets => Location {
                addr: base() + self.half(space) + offset * (WORD / PAYLOAD),
                packets: Some(Site {
                    kind: WaitKind::Packet,
                    peer,
                    channel: index,
                    op: op.index,
                }),
            },
        }
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn transfer(&self, op: &Op, window: Window) -> Result<(), Stopped> {
        let extent = self.extent(op, window);
        if extent.is_empty() {
            return Ok(());
        }
        let (block, bytes, flag) = (self.block, extent.len(), self.flag());
        // SAFETY: the caller's promise.
        let source = unsafe { self.locate(op, 0, extent) };
        let mut mine = Ok(());
        let mut k = 0;
        while k < op.destinations && mine.is_ok() {
            // SAFETY: the caller's promise; a checked plan excludes races on the ranges.
            unsafe {
                let destination = self.locate(op, 1 + k, extent);
                let (from, to) = (source.addr, destination.addr);
                match (source.packets, destination.packets) {
                    (None, None) => copy(block, to, from, bytes),
                    (None, Some(_)) => packet::copy_to_packets(block, to, from, bytes, flag),
                    (Some(site), None) => {
                        mine = packet::copy_from_packets(block, site, to, from, bytes, flag);
                    }
                    (Some(site), Some(_)) => {
                        mine = packet::forward_packets(block, site, to, from, bytes, flag);
                    }
                }
                if let Some(site) = destination.packets {
                    block.wake(site.peer);
                }
            }
            k += 1;
        }
        if source.packets.is_some() {
            block.sync(mine)
        } else {
            mine
        }
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn reduce<R: Reducer>(
        &self,
        reducer: &R,
        op: &Op,
        window: Window,
    ) -> Result<(), Stopped> {
        let extent = self.extent(op, window);
        if extent.is_empty() {
            return Ok(());
        }
        let sources = Sources {
            count: op.sources,
            // SAFETY: the caller's promise; the operand is below the op's count.
            at: |k| unsafe { self.locate(op, k, extent) },
        };
        let destinations = Sources {
            count: op.destinations,
            // SAFETY: as above.
            at: |k| unsafe { self.locate(op, op.sources + k, extent) },
        };
        // A power of two.
        let elements = extent.len() >> self.program.element.trailing_zeros();
        let divisor = if op.flags & flags::LAST != 0 {
            self.program.ranks
        } else {
            0
        };
        let flag = self.flag();
        // SAFETY: the caller's promise; a checked plan excludes races on the ranges.
        let mine =
            unsafe { reducer.reduce(self.block, &sources, &destinations, elements, divisor, flag) };
        self.block.sync(mine)
    }

    /// What this call's packets carry.
    fn flag(&self) -> u32 {
        packet::flag_of(self.start.epoch, self.launch.bytes)
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn signal(&self, op: &Op) -> Result<(), Stopped> {
        self.block.sync(Ok(()))?;
        let (tag, word) = tag(self.start.epoch, self.launch.bytes);
        let mut k = self.block.thread();
        while k < op.links {
            // SAFETY: the caller's promise.
            unsafe {
                let semaphore: Semaphore =
                    read_entry(self.block, self.program.semaphores, self.link(op, k));
                self.block.memory().store(semaphore.outbound + word, tag);
                match op.kind {
                    OpKind::RelaxedSignal => semaphore.relaxed_signal(self.block),
                    _ => semaphore.signal(self.block),
                }
            }
            k += self.block.threads();
        }
        Ok(())
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn wait(&self, op: &Op) -> Result<(), Stopped> {
        let mut mine = Ok(());
        let mut k = self.block.thread();
        while k < op.links && mine.is_ok() {
            // SAFETY: the caller's promise.
            mine = unsafe {
                let semaphore: Semaphore =
                    read_entry(self.block, self.program.semaphores, self.link(op, k));
                match op.kind {
                    OpKind::RelaxedWait => semaphore.relaxed_wait(self.block, op.index),
                    _ => semaphore.wait(self.block, op.index),
                }
                .and_then(|()| {
                    let call = (self.start.epoch, self.launch.bytes);
                    compare(self.block, &semaphore, call, op.index)
                })
            };
            k += self.block.threads();
        }
        if op.kind == OpKind::RelaxedWait {
            self.block.memory().fence_relaxed_wait();
        }
        self.block.sync(mine)
    }

    /// # Safety
    /// `k` must be below the op's number of links.
    #[inline(always)]
    unsafe fn link(&self, op: &Op, k: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { read_entry(self.block, self.start.tables + u64::from(op.links_at), k) }
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn put(&self, op: &Op, window: Window) -> Result<(), Stopped> {
        let extent = self.extent(op, window);
        let mut kind = TriggerKind::PUT;
        if op.flags & flags::SIGNAL != 0 {
            kind = kind.with(TriggerKind::SIGNAL);
        }
        let flush = op.flags & flags::FLUSH != 0;
        if flush {
            kind = kind.with(TriggerKind::FLUSH);
        }
        self.block.sync(Ok(()))?;
        let mut mine = Ok(());
        // Nothing to move may still be something to signal.
        if self.block.thread() == 0 && (!extent.is_empty() || kind != TriggerKind::PUT) {
            // SAFETY: the caller's promise.
            mine = unsafe {
                let (src, src_offset) = self.offset(op, 0, extent);
                let (dst, dst_offset) = self.offset(op, 1, extent);
                // Packets are copied as they are.
                let scale = if src.space == Space::Packets {
                    WORD / PAYLOAD
                } else {
                    1
                };
                let begin = |space| match space {
                    Space::Input => self.launch.input_offset,
                    Space::Output => self.launch.output_offset,
                    _ => self.half(space),
                };
                let memory = |space| read_entry(self.block, self.program.memories, space as u32);
                let port: PortChannel =
                    read_entry(self.block, self.program.ports, self.link(op, 0));
                // Whole words: the last one may be partly payload.
                let bytes = match scale {
                    1 => extent.len(),
                    _ => extent.len().div_ceil(PAYLOAD) * WORD,
                };
                let trigger = Trigger {
                    kind,
                    channel: port.channel,
                    dst_memory: memory(dst.space),
                    src_memory: memory(src.space),
                    dst_offset: begin(dst.space) + dst_offset * scale,
                    src_offset: begin(src.space) + src_offset * scale,
                    size: bytes,
                };
                // Packets that are cleared when this epoch ends must have been copied by then.
                let cleared =
                    src.space == Space::Packets && packet::is_scrub_epoch(self.start.epoch);
                self.push(&port, op, &trigger, flush || cleared)
            };
        }
        self.block.sync(mine)
    }

    /// Asks every linked port channel's proxy for something that moves no data.
    ///
    /// # Safety
    /// `op` must be one of the program's, of such a kind.
    unsafe fn request(&self, op: &Op, kind: TriggerKind, flush: bool) -> Result<(), Stopped> {
        self.block.sync(Ok(()))?;
        let mut mine = Ok(());
        let mut k = self.block.thread();
        while k < op.links && mine.is_ok() {
            // SAFETY: the caller's promise.
            mine = unsafe {
                let port: PortChannel =
                    read_entry(self.block, self.program.ports, self.link(op, k));
                let (dst_memory, src_memory) = (port.dst_memory, port.src_memory);
                let (channel, zero) = (port.channel, 0);
                let (dst_offset, src_offset, size) = (zero, zero, zero);
                let trigger = Trigger {
                    kind,
                    channel,
                    dst_memory,
                    src_memory,
                    dst_offset,
                    src_offset,
                    size,
                };
                self.push(&port, op, &trigger, flush)
            };
            k += self.block.threads();
        }
        self.block.sync(mine)
    }

    /// # Safety
    /// `port` must be one of the program's.
    unsafe fn push(
        &self,
        port: &PortChannel,
        op: &Op,
        trigger: &Trigger,
        flush: bool,
    ) -> Result<(), Stopped> {
        // SAFETY: the caller's promise.
        unsafe {
            let position = port.fifo.push(self.block, op.index, trigger)?;
            if flush {
                port.fifo.wait_handled(self.block, op.index, position)
            } else {
                Ok(())
            }
        }
    }

    /// Addresses of a semaphore among blocks: tickets given out, and releases.
    fn block_semaphore(&self, id: u32) -> (u64, u64) {
        let first = 2 + u64::from(self.program.barriers) + 2 * u64::from(id);
        let tickets = self.program.counters + first * COUNTER_STRIDE;
        (tickets, tickets + COUNTER_STRIDE)
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn acquire(&self, op: &Op) -> Result<(), Stopped> {
        let memory = self.block.memory();
        let mut mine = Ok(());
        let mut k = self.block.thread();
        while k < op.links && mine.is_ok() {
            // SAFETY: the caller's promise.
            mine = unsafe {
                let id = self.link(op, k);
                let (tickets, releases) = self.block_semaphore(id);
                // First come, first served: no compare-and-swap is needed.
                let target = memory.fetch_add(tickets, 1) + 1;
                let site = Site {
                    kind: WaitKind::Acquire,
                    peer: self.program.rank,
                    channel: id,
                    op: op.index,
                };
                let load = || memory.load_acquire(releases);
                wait_for(self.block, site, target, load, |seen| reached(seen, target)).map(drop)
            };
            k += self.block.threads();
        }
        self.block.sync(mine)
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn release(&self, op: &Op) -> Result<(), Stopped> {
        self.block.sync(Ok(()))?;
        let mut k = self.block.thread();
        while k < op.links {
            // SAFETY: the caller's promise.
            unsafe {
                let (_, releases) = self.block_semaphore(self.link(op, k));
                self.block.memory().add_release(releases, 1);
            }
            k += self.block.threads();
        }
        Ok(())
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn barrier(&self, op: &Op) -> Result<(), Stopped> {
        self.block.sync(Ok(()))?;
        let mut mine = Ok(());
        if self.block.thread() == 0 && op.links > 1 {
            let memory = self.block.memory();
            let counter = self.program.counters + (2 + u64::from(op.links_at)) * COUNTER_STRIDE;
            let blocks = u64::from(op.links);
            let site = Site {
                kind: WaitKind::Barrier,
                peer: self.program.rank,
                channel: op.links_at,
                op: op.index,
            };
            // SAFETY: the caller's promise.
            unsafe {
                let before = memory.fetch_add(counter, 1);
                // Every block arrives once a round, so rounds are whole multiples.
                let target = (before / blocks + 1) * blocks;
                mine = wait_for(
                    self.block,
                    site,
                    target,
                    || memory.load_acquire(counter),
                    |seen| reached(seen, target),
                )
                .map(drop);
            }
        }
        self.block.sync(mine)
    }

    /// Ends this block's part.
    ///
    /// # Safety
    /// This block, which is number `index`, must have done all its operations.
    unsafe fn leave(&self, index: u32) -> Result<(), Stopped> {
        let program = self.program;
        let own = (u64::from(program.rank) * SPACES + Space::Packets as u64) * 8;
        // SAFETY: the table has an entry for every rank and space, and never changes; the rest is the
        // caller's promise.
        unsafe {
            let counters = Counters {
                epoch: program.counters,
                packets: self.block.memory().read(self.start.tables + BASES_AT + own),
                packets_half: program.packets_half,
                blocks: program.block_count.into(),
            };
            leave(self.block, &counters, self.start.epoch, index)
        }
    }
}

/// What the signals of a call carry: the size, and enough of the epoch to tell it from others; and in which
/// of the semaphore's two words.
pub(crate) const fn tag(epoch: u64, bytes: u64) -> (u64, u64) {
    let tag = epoch << SIZE_BITS | bytes & SIZE_MASK;
    (tag, TAGS + (epoch & 1) * 8)
}

/// Looks whether the signal that operation `op` waited for came from a call of this size.
///
/// A peer that is already in the next call writes the other word. If it is further ahead, as it
/// can be where data flows one way, the epoch differs and nothing is concluded.
///
/// # Errors
/// [`Stopped::Mismatch`].
///
/// # Safety
/// `semaphore` must be valid.
#[inline(always)]
pub(crate) unsafe fn compare<B: Block>(
    block: &B,
    semaphore: &Semaphore,
    (epoch, bytes): (u64, u64),
    op: u32,
) -> Result<(), Stopped> {
    let (tag, word) = tag(epoch, bytes);
    // SAFETY: the caller's promise; tags lie behind the counter.
    let seen = unsafe { block.memory().load(semaphore.inbound + word) };
    // Proxies leave none.
    if seen == tag || seen == 0 || seen >> SIZE_BITS != tag >> SIZE_BITS {
        return Ok(());
    }
    let (peer, channel) = (semaphore.peer, semaphore.channel);
    let kind = WaitKind::Size;
    Err(block.refuse(&Waiting {
        site: Site {
            kind,
            peer,
            channel,
            op,
        },
        spins: 0,
        expected: bytes,
        seen: seen & SIZE_MASK,
    }))
}

/// The epoch of a rank whose launch was stopped. What was launched behind it, in a graph perhaps, ends at once:
/// each would wait until its own deadline otherwise.
pub const STOPPED_EPOCH: u64 = u64::MAX;

/// What a launch begins and ends with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Counters {
    /// Address of the epoch; the count of blocks that left is a [`COUNTER_STRIDE`] further.
    pub epoch: u64,
    /// This rank's packet memory: two halves.
    pub packets: u64,
    /// Bytes of one.
    pub packets_half: u64,
    /// Thread blocks.
    pub blocks: u64,
}

/// Block: ends this block's part; the last block to leave advances the epoch.
///
/// # Errors
/// [`Stopped`], if another thread brings it.
///
/// # Safety
/// This block, which is number `index`, must have done all its operations, and all its threads must have
/// met since.
pub(crate) unsafe fn leave<B: Block>(
    block: &B,
    counters: &Counters,
    epoch: u64,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let left = counters.epoch + COUNTER_STRIDE;
    if !packet::is_scrub_epoch(epoch) {
        // SAFETY: the caller's promise.
        unsafe {
            let arrived = arrive(block, counters);
            advance(block, counters, epoch, arrived);
        }
        return Ok(());
    }
    // What the others read must not be cleared before.
    let is_last = block.thread() == 0
        // SAFETY: the program is prepared.
        && (counters.blocks == 1 || counters.blocks == 1 + unsafe { memory.fetch_add(left, 1) });
    let is_last = block.opaque(is_last);
    let arrived = if is_last {
        counters.blocks - 1
    } else {
        NOT_LAST
    };
    let half = counters.packets + (epoch & 1) * counters.packets_half;
    // Where thread 0 tells the others. Not 0, and no other block's.
    let told = (left + 8, (epoch << 16 | u64::from(index)) + 1);
    // SAFETY: the caller's promise.
    unsafe {
        scrub(block, told, half, counters.packets_half, is_last)?;
        advance(block, counters, epoch, arrived);
    }
    Ok(())
}

/// What [`arrive`] says where there is nothing to say.
pub(crate) const NOT_LAST: u64 = u64::MAX;

/// Thread: counts this block among those of its launch that have read the epoch; how many had before it, on thread 0 of each
/// block, and [`NOT_LAST`] on the others: for [`advance`]. The answer takes a trip to memory, for which nobody waits who does
/// nothing with it before.
///
/// # Safety
/// All threads of this block must have met since they read the epoch; the program is prepared.
#[inline(always)]
pub(crate) unsafe fn arrive<B: Block>(block: &B, counters: &Counters) -> u64 {
    let left = counters.epoch + COUNTER_STRIDE;
    if block.thread() != 0 {
        return NOT_LAST;
    }
    // A block alone need not count. Counting is a locked instruction on some machines: it would
    // wait here until all that was sent has reached the peers.
    if counters.blocks == 1 {
        return 0;
    }
    // The thread is 0, which `ptxas` does not know: of a number that all threads add it makes one addition and a broadcast
    // of the answer, for which this warp would wait here.
    let one = 1 + u64::from(block.thread());
    // SAFETY: the caller's promise.
    unsafe { block.memory().fetch_add_local(left, one) }
}

/// Thread: advances the epoch, if all have read it and this is the last that did.
///
/// # Safety
/// `arrived` must be what [`arrive`] said, once.
#[inline(always)]
pub(crate) unsafe fn advance<B: Block>(block: &B, counters: &Counters, epoch: u64, arrived: u64) {
    // There is a block, at least this one.
    if arrived == counters.blocks.wrapping_sub(1) {
        let memory = block.memory();
        // SAFETY: the program is prepared, and nobody else of this launch counts any more. Relaxed, for
        // whoever launches next does so after this launch has ended. Raised, for a block that was stopped
        // may have left its mark: `STOPPED_EPOCH` is the largest.
        unsafe {
            memory.store(counters.epoch + COUNTER_STRIDE, 0);
            memory.raise(counters.epoch, epoch + 1);
        }
    }
}

/// Block: the last one clears this epoch's half of the packet memory. All blocks have read theirs, and
/// the next writer of this half sends for epoch + 2. `is_last` is the answer on thread 0.
///
/// A function of its own, for GPUs: inlined, the barriers in it would be doubled, once for each answer,
/// and threads of one block would meet at different ones.
///
/// # Safety
/// `half` must be the `bytes` bytes of this epoch's packets, `word` one that is the rank's alone, and `last`
/// no other block's in it.
#[cold]
#[inline(never)]
unsafe fn scrub<B: Block>(
    block: &B,
    (word, last): (u64, u64),
    half: u64,
    bytes: u64,
    is_last: bool,
) -> Result<(), Stopped> {
    let memory = block.memory();
    if is_last {
        // SAFETY: only the last block writes here.
        unsafe { memory.store(word, last) };
    }
    block.sync(Ok(()))?;
    // SAFETY: the caller's promise. Word by word: the peers' stores, seen through relaxed loads alone,
    // are ordered before atomic stores only.
    unsafe {
        if memory.load(word) == last {
            let mut at = u64::from(block.thread()) * WORD;
            while at < bytes {
                memory.store(half + at, 0);
                at += u64::from(block.threads()) * WORD;
            }
        }
    }
    block.sync(Ok(()))
}

/// Low bits of a signal's tag that hold the size of the message.
const SIZE_BITS: u32 = 48;
const SIZE_MASK: u64 = (1 << SIZE_BITS) - 1;

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
