//! The plan executor: one thread block's walk through its operations.
//!
//! Every block reads the epoch, does its operations, and leaves; the last one to leave advances
//! the epoch. Launches of one program must follow one another (a stream sees to that); the epoch
//! lives in device memory, so a launch can be replayed as it is.

use crate::block::Block;
use crate::channel::copy;
use crate::extent::{Extent, chunk_bytes};
use crate::memory::Memory;
use crate::packet::{self, PAYLOAD, WORD};
use crate::program::{
    BlockOps, COUNTER_STRIDE, Launch, Op, OpKind, Operand, Program, SPACES, Space,
};
use crate::reduce::{Location, Reducer, Sources};
use crate::semaphore::Semaphore;
use crate::wait::{Site, Stopped, WaitKind, reached, wait_for};

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
    memory.fence();
    // SAFETY: the caller promises a prepared program.
    let (epoch, ops) = unsafe {
        (
            memory.load(program.counters),
            read_entry::<B, BlockOps>(block, program.blocks, index),
        )
    };
    let execution = Execution {
        block,
        program,
        launch,
        epoch,
        chunk: chunk_bytes(launch.bytes, program.chunks),
    };
    let mut i = 0;
    while i < ops.count {
        // SAFETY: as above; `i` is below the block's count.
        unsafe {
            let op = read_entry::<B, Op>(block, program.ops, ops.first + i);
            execution.step(reducer, &op, i)?;
        }
        block.checkpoint();
        i += 1;
    }
    block.sync(Ok(()))?;
    // SAFETY: as above.
    unsafe { execution.leave() };
    Ok(())
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

struct Execution<'a, B> {
    block: &'a B,
    program: &'a Program,
    launch: &'a Launch,
    epoch: u64,
    chunk: u64,
}

impl<B: Block> Execution<'_, B> {
    /// # Safety
    /// `op` must be one of the program's.
    #[inline(always)]
    unsafe fn step<R: Reducer>(&self, reducer: &R, op: &Op, index: u32) -> Result<(), Stopped> {
        // SAFETY: the caller's promise, for all of them.
        unsafe {
            match op.kind {
                OpKind::Move => self.transfer(op, index),
                OpKind::Reduce => self.reduce(reducer, op, index),
                OpKind::Signal => self.signal(op),
                OpKind::Wait => self.wait(op, index),
                OpKind::Barrier => self.barrier(op, index),
                OpKind::Sync => self.block.sync(Ok(())),
            }
        }
    }

    fn extent(&self, op: &Op) -> Extent {
        Extent::of_chunks(self.launch.bytes, self.chunk, op.chunk, op.chunks)
            .slice(op.slice, op.slices)
    }

    /// Address of an operand's part that belongs to `extent`.
    ///
    /// # Safety
    /// The op and operand must be the program's.
    #[inline(always)]
    unsafe fn locate(&self, op: &Op, index: u32, operand: u32, extent: Extent) -> Location {
        let program = self.program;
        // SAFETY: the caller's promise.
        let Operand {
            space,
            rank,
            index: at,
            peer,
        } = unsafe { read_entry(self.block, program.operands, op.first_operand + operand) };
        // Where the operation's first chunk lies in its buffer, and this slice in the chunk.
        let start = self.chunk * u64::from(at);
        let inside = extent.begin - min(self.chunk * u64::from(op.chunk), self.launch.bytes);
        let offset = start + inside;
        let own = rank == program.rank;
        let base = || {
            let entry = program.bases + (u64::from(rank) * SPACES + space as u64) * 8;
            // SAFETY: the table has an entry for every rank and space, and never changes.
            unsafe { self.block.memory().read::<u64>(entry) }
        };
        match space {
            Space::Input if own => Location::raw(self.launch.input + offset),
            Space::Input => Location::raw(base() + self.launch.input_offset + offset),
            Space::Output if own => Location::raw(self.launch.output + offset),
            Space::Output => Location::raw(base() + self.launch.output_offset + offset),
            Space::Scratch => {
                Location::raw(base() + (self.epoch & 1) * program.scratch_half + offset)
            }
            Space::Packets => {
                let half = (self.epoch & 1) * program.packets_half;
                Location {
                    addr: base() + half + offset * (WORD / PAYLOAD),
                    packets: Some(Site {
                        kind: WaitKind::Packet,
                        peer,
                        channel: operand,
                        op: index,
                    }),
                }
            }
        }
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn transfer(&self, op: &Op, index: u32) -> Result<(), Stopped> {
        let extent = self.extent(op);
        if extent.is_empty() {
            return Ok(());
        }
        let (block, bytes, flag) = (self.block, extent.len(), packet::flag_of(self.epoch));
        // SAFETY: the caller's promise.
        let source = unsafe { self.locate(op, index, 0, extent) };
        let mut mine = Ok(());
        let mut k = 0;
        while k < op.destinations && mine.is_ok() {
            // SAFETY: the caller's promise; a checked plan excludes races on the ranges.
            unsafe {
                let destination = self.locate(op, index, 1 + k, extent);
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
    unsafe fn reduce<R: Reducer>(&self, reducer: &R, op: &Op, index: u32) -> Result<(), Stopped> {
        let extent = self.extent(op);
        if extent.is_empty() {
            return Ok(());
        }
        let sources = Sources {
            count: op.sources,
            // SAFETY: the caller's promise; the operand is below the op's count.
            at: |k| unsafe { self.locate(op, index, k, extent) },
        };
        let destinations = Sources {
            count: op.destinations,
            // SAFETY: as above.
            at: |k| unsafe { self.locate(op, index, op.sources + k, extent) },
        };
        let elements = extent.len() / u64::from(self.program.element);
        let divisor = if op.last != 0 { self.program.ranks } else { 0 };
        let flag = packet::flag_of(self.epoch);
        // SAFETY: the caller's promise; a checked plan excludes races on the ranges.
        let mine =
            unsafe { reducer.reduce(self.block, &sources, &destinations, elements, divisor, flag) };
        self.block.sync(mine)
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn signal(&self, op: &Op) -> Result<(), Stopped> {
        self.block.sync(Ok(()))?;
        let mut k = self.block.thread();
        while k < op.links {
            // SAFETY: the caller's promise.
            unsafe { self.semaphore(op, k).signal(self.block) };
            k += self.block.threads();
        }
        Ok(())
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn wait(&self, op: &Op, index: u32) -> Result<(), Stopped> {
        let mut mine = Ok(());
        let mut k = self.block.thread();
        while k < op.links && mine.is_ok() {
            // SAFETY: the caller's promise.
            mine = unsafe { self.semaphore(op, k).wait(self.block, index) };
            k += self.block.threads();
        }
        self.block.sync(mine)
    }

    /// # Safety
    /// `link` must be below the op's number of links.
    #[inline(always)]
    unsafe fn semaphore(&self, op: &Op, link: u32) -> Semaphore {
        // SAFETY: the caller's promise.
        unsafe {
            let id = read_entry::<B, u32>(self.block, self.program.links, op.first_link + link);
            read_entry(self.block, self.program.semaphores, id)
        }
    }

    /// # Safety
    /// `op` must be one of the program's, of this kind.
    unsafe fn barrier(&self, op: &Op, index: u32) -> Result<(), Stopped> {
        self.block.sync(Ok(()))?;
        let mut mine = Ok(());
        if self.block.thread() == 0 && op.links > 1 {
            let memory = self.block.memory();
            let counter = self.program.counters + (2 + u64::from(op.first_link)) * COUNTER_STRIDE;
            let blocks = u64::from(op.links);
            let site = Site {
                kind: WaitKind::Barrier,
                peer: self.program.rank,
                channel: op.first_link,
                op: index,
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

    /// # Safety
    /// This block must have done all its operations.
    unsafe fn leave(&self) {
        if self.block.thread() != 0 {
            return;
        }
        let (memory, program) = (self.block.memory(), self.program);
        let left = program.counters + COUNTER_STRIDE;
        // SAFETY: the program is prepared; the last block is alone with its rank's counters, and
        // with its packets of this epoch: they were all read, and the next writer of this half
        // sends for epoch + 2.
        unsafe {
            if memory.fetch_add(left, 1) + 1 != u64::from(program.block_count) {
                return;
            }
            memory.store(left, 0);
            if packet::is_scrub_epoch(self.epoch) {
                let entry =
                    program.bases + (u64::from(program.rank) * SPACES + Space::Packets as u64) * 8;
                let half = memory.read::<u64>(entry) + (self.epoch & 1) * program.packets_half;
                // Word by word: the peers' stores, seen through relaxed loads alone, are ordered
                // before atomic stores only.
                let mut at = 0;
                while at < program.packets_half {
                    memory.store(half + at, 0);
                    at += WORD;
                }
            }
            memory.store_release(program.counters, self.epoch + 1);
        }
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
