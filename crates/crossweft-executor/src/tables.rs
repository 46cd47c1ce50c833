//! A plan's program of one rank, laid out flat for device code.

use std::sync::atomic::AtomicU64;

use crossweft_channel::{ChannelError, RegisteredMemory, SemaphorePool};
use crossweft_device::program::{BlockOps, Op, OpKind, Operand, Program, SPACES, Space};
use crossweft_device::semaphore::Semaphore;
use crossweft_plan::{Op as PlanOp, Operand as PlanOperand, Plan};

/// A counter on a cache line of its own ([`crossweft_device::program::COUNTER_STRIDE`]).
#[derive(Debug, Default)]
#[repr(align(64))]
struct Counter(AtomicU64);

/// Owns what a [`Program`] points to. The boxes never move or change, except for the counters,
/// which device code alone touches.
#[derive(Debug)]
pub(crate) struct Tables {
    blocks: Box<[BlockOps]>,
    ops: Box<[Op]>,
    operands: Box<[Operand]>,
    links: Box<[u32]>,
    semaphores: Box<[Semaphore]>,
    bases: Box<[u64]>,
    counters: Box<[Counter]>,
}

/// Where the buffers of every rank are.
pub(crate) struct Memories<'a> {
    pub(crate) input: Option<&'a RegisteredMemory>,
    pub(crate) output: Option<&'a RegisteredMemory>,
    /// Plain scratch memory, with packet memory behind it.
    pub(crate) scratch: Option<&'a RegisteredMemory>,
    pub(crate) packets_offset: u64,
}

impl Memories<'_> {
    /// Address of a buffer, 0 if it is private to its rank.
    fn base(&self, rank: u32, space: Space) -> Result<u64, ChannelError> {
        let (memory, offset) = match space {
            Space::Input => (self.input, 0),
            Space::Output => (self.output, 0),
            Space::Packets => (self.scratch, self.packets_offset),
            _ => (self.scratch, 0),
        };
        memory.map_or(Ok(0), |memory| Ok(memory.addr(rank)? + offset))
    }
}

impl Tables {
    pub(crate) fn new(
        plan: &Plan,
        rank: u32,
        pool: &SemaphorePool,
        memories: &Memories<'_>,
        first_epoch: u64,
    ) -> Result<Self, ChannelError> {
        let program = &plan.ranks[rank as usize];
        let mut bases = vec![0; plan.ranks.len() * SPACES as usize];
        let (mut ops, mut operands, mut links) = (Vec::new(), Vec::new(), Vec::new());
        let mut blocks = Vec::new();
        for block in &program.blocks {
            blocks.push(BlockOps {
                first: ops.len() as u32,
                count: block.len() as u32,
            });
            for op in block {
                let (from, to) = op.operands();
                let (first_operand, first_link) = (operands.len() as u32, links.len() as u32);
                for operand in from {
                    // Packets are read where they arrive; their sender is who is waited for.
                    let sender = plan
                        .packet_sender(rank, operand.index)
                        .unwrap_or(operand.rank);
                    operands.push(lower(operand, sender));
                }
                operands.extend(to.iter().map(|operand| lower(operand, operand.rank)));
                for operand in from.iter().chain(to) {
                    let space = operand.buffer.into();
                    let at = operand.rank as usize * SPACES as usize + space as usize;
                    bases[at] = memories.base(operand.rank, space)?;
                }
                let mut lowered = Op {
                    kind: OpKind::Sync,
                    chunk: 0,
                    chunks: 0,
                    slice: 0,
                    slices: 1,
                    first_operand,
                    sources: from.len() as u32,
                    destinations: to.len() as u32,
                    first_link,
                    links: 0,
                    last: 0,
                };
                if let Some(chunks) = op.chunks() {
                    (lowered.chunk, lowered.chunks) = (chunks.first, chunks.count);
                    (lowered.slice, lowered.slices) = chunks.slice;
                }
                match op {
                    PlanOp::Move { .. } => lowered.kind = OpKind::Move,
                    PlanOp::Reduce { last, .. } => {
                        (lowered.kind, lowered.last) = (OpKind::Reduce, u32::from(*last));
                    }
                    PlanOp::Signal { channels } | PlanOp::Wait { channels } => {
                        let signal = matches!(op, PlanOp::Signal { .. });
                        lowered.kind = if signal { OpKind::Signal } else { OpKind::Wait };
                        links.extend_from_slice(channels);
                        lowered.links = channels.len() as u32;
                    }
                    PlanOp::Barrier { id, blocks } => {
                        lowered.kind = OpKind::Barrier;
                        (lowered.first_link, lowered.links) = (*id, *blocks);
                    }
                    // `Sync`, and what a newer plan crate may add must be lowered here first.
                    _ => lowered.kind = OpKind::Sync,
                }
                ops.push(lowered);
            }
        }
        // The packet memory of this rank is cleared now and then, whoever reads it.
        bases[rank as usize * SPACES as usize + Space::Packets as usize] =
            memories.base(rank, Space::Packets)?;
        let counters: Box<[Counter]> = (0..2 + program.barriers())
            .map(|_| Counter::default())
            .collect();
        counters[0]
            .0
            .store(first_epoch, std::sync::atomic::Ordering::Relaxed);
        Ok(Self {
            blocks: blocks.into(),
            ops: ops.into(),
            operands: operands.into(),
            links: links.into(),
            semaphores: (0..program.channels.len())
                .map(|i| pool.handle(i))
                .collect(),
            bases: bases.into(),
            counters,
        })
    }

    /// The program that points into these tables; valid for as long as they live.
    pub(crate) fn program(
        &self,
        plan: &Plan,
        rank: u32,
        halves: (u64, u64),
        element: u32,
    ) -> Program {
        Program {
            blocks: addr(&self.blocks),
            ops: addr(&self.ops),
            operands: addr(&self.operands),
            links: addr(&self.links),
            semaphores: addr(&self.semaphores),
            bases: addr(&self.bases),
            counters: addr(&self.counters),
            scratch_half: halves.0,
            packets_half: halves.1,
            rank,
            ranks: plan.world_size(),
            block_count: self.blocks.len() as u32,
            chunks: plan.chunks,
            element,
        }
    }
}

fn addr<T>(table: &[T]) -> u64 {
    table.as_ptr().expose_provenance() as u64
}

fn lower(operand: &PlanOperand, peer: u32) -> Operand {
    Operand {
        space: operand.buffer.into(),
        rank: operand.rank,
        index: operand.index,
        peer,
    }
}
