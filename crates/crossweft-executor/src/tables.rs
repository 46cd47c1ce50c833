//! A plan's program of one rank, laid out flat for device code.

use std::sync::Arc;
use std::time::Instant;

use crossweft_channel::{
    ChannelError, Endpoint, Image, ImageBuilder, PortChannel, ProxyOptions, ProxyService,
    RegisteredMemory, SemaphorePool,
};
use crossweft_device::channel::PortChannel as PortHandle;
use crossweft_device::program::{
    BASES_AT, BlockOps, COUNTER_STRIDE, Op, OpKind, Operand, Program, SPACES, Space, flags,
};
use crossweft_plan::{
    Buffer, ChannelKind, Op as PlanOp, Operand as PlanOperand, Plan, RankProgram,
};

/// What tables are aligned to.
const LINE: u64 = BASES_AT;

/// Owns what a [`Program`] points to. Nothing in it changes, except for the counters, which device
/// code alone touches.
#[derive(Debug)]
pub(crate) struct Tables {
    /// Other plans' may be in it, too.
    image: Arc<Image>,
    /// Where the tables are in the image.
    at: Offsets,
    barriers: u32,
    _channels: Channels,
}

#[derive(Debug)]
struct Offsets {
    tables: u64,
    stride: u64,
    semaphores: u64,
    ports: u64,
    memories: u64,
    counters: u64,
}

/// Where the buffers of every rank are.
pub(crate) struct Memories<'a> {
    pub(crate) input: Option<&'a Arc<RegisteredMemory>>,
    pub(crate) output: Option<&'a Arc<RegisteredMemory>>,
    pub(crate) scratch: Option<&'a Scratch>,
}

/// A plan's part of registered memory: plain scratch memory, with packet memory behind it.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    pub(crate) memory: Arc<RegisteredMemory>,
    /// Where plain memory begins, and packet memory, and where that ends.
    pub(crate) plain: u64,
    pub(crate) packets: u64,
    pub(crate) end: u64,
}

impl Memories<'_> {
    /// A buffer: its memory, and where in it it begins and ends at the latest; `None` if it is private to its rank.
    fn at(&self, space: Space) -> Option<(&Arc<RegisteredMemory>, u64, u64)> {
        let whole = |memory: &'_ Arc<RegisteredMemory>| memory.bytes();
        match (space, self.scratch) {
            (Space::Input, _) => self.input.map(|memory| (memory, 0, whole(memory))),
            (Space::Output, _) => self.output.map(|memory| (memory, 0, whole(memory))),
            (Space::Packets, Some(of)) => Some((&of.memory, of.packets, of.end)),
            (_, Some(of)) => Some((&of.memory, of.plain, of.end)),
            (_, None) => None,
        }
    }

    /// Address of a buffer, 0 if it is private to its rank.
    pub(crate) fn base(&self, rank: u32, space: Space) -> Result<u64, ChannelError> {
        match self.at(space) {
            Some((memory, begin, _)) => Ok(memory.addr(rank)? + begin),
            None => Ok(0),
        }
    }
}

/// The numbers of a program's channels in the order of their semaphores. Ends pair up by their order among those to a
/// peer, and plans count each kind by itself: all memory channels come first, on every rank.
fn order(program: &RankProgram) -> Vec<usize> {
    let (mut order, mut ports) = (Vec::new(), Vec::new());
    for (number, channel) in program.channels.iter().enumerate() {
        match channel.kind {
            ChannelKind::Port => ports.push(number),
            _ => order.push(number),
        }
    }
    order.append(&mut ports);
    order
}

/// The peers of a program's channels, in the order of their semaphores.
pub(crate) fn peers(program: &RankProgram) -> impl Iterator<Item = u32> {
    let order = order(program).into_iter();
    order.map(|number| program.channels[number].peer)
}

/// The channels of one rank.
#[derive(Debug)]
pub(crate) struct Channels {
    pool: Arc<SemaphorePool>,
    /// For each channel of the plan, which semaphore of the pool it has.
    semaphores: Vec<usize>,
    ports: Option<Ports>,
}

#[derive(Debug)]
struct Ports {
    /// The port channels, with their numbers in the plan.
    channels: Vec<(usize, PortChannel)>,
    memories: [u32; SPACES as usize],
    // Dropped last: it carries out what the channels have been asked for.
    _service: ProxyService,
}

impl Channels {
    /// Makes what `program` needs, with the semaphores of `pool` from `first` on. Collective if `ports` says that any rank
    /// has port channels, else local.
    pub(crate) fn new(
        endpoint: &Arc<Endpoint>,
        program: &RankProgram,
        (pool, first): (&Arc<SemaphorePool>, usize),
        memories: &Memories<'_>,
        ports: bool,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let order = order(program);
        let mut semaphores = vec![0; order.len()];
        for (place, &number) in (first..).zip(&order) {
            semaphores[number] = place;
        }
        let ports = if ports {
            let service = ProxyService::new(endpoint, &ProxyOptions::default(), deadline)?;
            let mut ids = [0; SPACES as usize];
            for space in [Space::Input, Space::Output, Space::Scratch, Space::Packets] {
                if let Some((memory, begin, end)) = memories.at(space) {
                    ids[space as usize] = service.add_range(memory, begin, end - begin)?;
                }
            }
            // The triggers of a plan name their memories themselves.
            let any = ids[Space::Scratch as usize].max(ids[Space::Input as usize]);
            let is_port = |number: &usize| program.channels[*number].kind == ChannelKind::Port;
            let channels = order
                .into_iter()
                .filter(is_port)
                .map(|number| {
                    let place = semaphores[number];
                    Ok((number, service.channel(pool, place, any, any, deadline)?))
                })
                .collect::<Result<_, ChannelError>>()?;
            Some(Ports {
                channels,
                memories: ids,
                _service: service,
            })
        } else {
            None
        };
        Ok(Self {
            pool: Arc::clone(pool),
            semaphores,
            ports,
        })
    }
}

/// Tables that are laid out in an image which is not yet on the device.
#[derive(Debug)]
pub(crate) struct Draft {
    at: Offsets,
    barriers: u32,
    channels: Channels,
}

impl Draft {
    /// Appends the tables to `image`.
    pub(crate) fn new(
        image: &mut ImageBuilder,
        (plan, rank): (&Plan, u32),
        channels: Channels,
        memories: &Memories<'_>,
        first_epoch: u64,
    ) -> Result<Self, ChannelError> {
        let program = &plan.ranks[rank as usize];
        let mut blocks = Vec::new();
        for block in &program.blocks {
            let mut lowering = Lowering {
                plan,
                rank,
                memories,
                ops: Vec::new(),
                operands: Vec::new(),
                links: Vec::new(),
                bases: vec![0; plan.ranks.len() * SPACES as usize],
            };
            for (index, op) in (0..).zip(block) {
                lowering.op(program, index, op)?;
            }
            // The packet memory of this rank is cleared now and then, whoever reads it.
            lowering.bases[rank as usize * SPACES as usize + Space::Packets as usize] =
                memories.base(rank, Space::Packets)?;
            blocks.push(lowering);
        }
        let barriers = program.barriers();
        // A cache line each; what is there at first of a semaphore counts as released.
        const WORDS: usize = COUNTER_STRIDE as usize / 8;
        let count = 2 + barriers as usize + 2 * program.semaphores.len();
        let mut counters = vec![[0_u64; WORDS]; count];
        counters[0][0] = first_epoch;
        for (id, &initial) in program.semaphores.iter().enumerate() {
            // Tickets, then releases.
            counters[2 + barriers as usize + 2 * id + 1][0] = initial.into();
        }
        let mut ports = vec![PortHandle::default(); program.channels.len()];
        let mut port_memories = [0; SPACES as usize];
        if let Some(made) = &channels.ports {
            port_memories = made.memories;
            for (number, port) in &made.channels {
                ports[*number] = port.handle();
            }
        }
        let semaphores = channels
            .semaphores
            .iter()
            .map(|&place| channels.pool.handle(place));
        let semaphores: Vec<_> = semaphores.collect();
        let stride = blocks.iter().map(Lowering::bytes).max().unwrap_or(0);
        let tables = image.zeros(0);
        for block in blocks {
            block.put(image, stride);
        }
        let at = Offsets {
            tables,
            stride,
            semaphores: image.put(&semaphores),
            ports: image.put(&ports),
            memories: image.put(&port_memories),
            counters: image.put(&counters),
        };
        Ok(Self {
            at,
            barriers,
            channels,
        })
    }

    /// The tables, in the image that they were laid out in.
    pub(crate) fn on(self, image: &Arc<Image>) -> Tables {
        Tables {
            image: Arc::clone(image),
            at: self.at,
            barriers: self.barriers,
            _channels: self.channels,
        }
    }
}

impl Tables {
    /// The program that points into these tables; valid for as long as they live.
    pub(crate) fn program(
        &self,
        plan: &Plan,
        rank: u32,
        halves: (u64, u64),
        element: u32,
    ) -> Program {
        let addr = |offset| self.image.addr(offset);
        Program {
            tables: addr(self.at.tables),
            stride: self.at.stride,
            semaphores: addr(self.at.semaphores),
            ports: addr(self.at.ports),
            memories: addr(self.at.memories),
            counters: addr(self.at.counters),
            scratch_half: halves.0,
            packets_half: halves.1,
            rank,
            ranks: plan.world_size(),
            block_count: plan.ranks[rank as usize].blocks.len() as u32,
            barriers: self.barriers,
            chunks: plan.chunks,
            element,
        }
    }
}

/// A thread block's operations on their way into flat tables.
struct Lowering<'a> {
    plan: &'a Plan,
    rank: u32,
    memories: &'a Memories<'a>,
    ops: Vec<Op>,
    operands: Vec<Operand>,
    links: Vec<u32>,
    bases: Vec<u64>,
}

impl Lowering<'_> {
    /// Bytes of the tables: each begins on a cache line of its own.
    fn bytes(&self) -> u64 {
        let lines = |bytes: usize| (bytes as u64).div_ceil(LINE) * LINE;
        lines(size_of::<BlockOps>())
            + lines(size_of_val(self.bases.as_slice()))
            + lines(size_of_val(self.ops.as_slice()))
            + lines(size_of_val(self.operands.as_slice()))
            + lines(size_of_val(self.links.as_slice()))
    }

    /// Appends the tables to `image`, and fills up to `stride` bytes.
    fn put(mut self, image: &mut ImageBuilder, stride: u64) {
        let lines = |bytes: usize| (bytes as u64).div_ceil(LINE) * LINE;
        let ops_at = BASES_AT + lines(size_of_val(self.bases.as_slice()));
        let operands_at = ops_at + lines(size_of_val(self.ops.as_slice()));
        let links_at = operands_at + lines(size_of_val(self.operands.as_slice()));
        // Until here they were entries.
        for op in &mut self.ops {
            op.operands_at = operands_at as u32 + op.operands_at * size_of::<Operand>() as u32;
            if op.kind != OpKind::Barrier {
                op.links_at = links_at as u32 + op.links_at * size_of::<u32>() as u32;
            }
        }
        let count = self.ops.len() as u32;
        let ops_at = ops_at as u32;
        let begin = image.put(&[BlockOps { count, ops_at }]);
        image.put(&self.bases);
        image.put(&self.ops);
        image.put(&self.operands);
        let end = image.put(&self.links) + lines(size_of_val(self.links.as_slice()));
        image.zeros(((stride - (end - begin)) / LINE) as usize);
    }

    fn op(&mut self, program: &RankProgram, index: u32, op: &PlanOp) -> Result<(), ChannelError> {
        match op {
            PlanOp::Loop {
                unit_bytes,
                chunks,
                ops,
            } => {
                let at = self.push(index, OpKind::Loop, op, &[])?;
                self.ops[at].chunks = *chunks;
                self.ops[at].unit = *unit_bytes;
                for op in ops {
                    self.op(program, index, op)?;
                }
                // A signal over both kinds of channels has become two operations.
                self.ops[at].links = (self.ops.len() - at - 1) as u32;
            }
            PlanOp::Move { .. } => {
                self.push(index, OpKind::Move, op, &[])?;
            }
            PlanOp::Reduce { last, .. } => {
                let at = self.push(index, OpKind::Reduce, op, &[])?;
                self.ops[at].flags = if *last { flags::LAST } else { 0 };
            }
            PlanOp::Signal { channels, relaxed } => {
                let (ports, direct): (Vec<u32>, Vec<u32>) = channels
                    .iter()
                    .partition(|&&id| program.channels[id as usize].kind == ChannelKind::Port);
                let kind = if *relaxed {
                    OpKind::RelaxedSignal
                } else {
                    OpKind::Signal
                };
                for (kind, links) in [(kind, direct), (OpKind::PortSignal, ports)] {
                    if !links.is_empty() {
                        self.push(index, kind, op, &links)?;
                    }
                }
            }
            PlanOp::Wait { channels, relaxed } => {
                let kind = if *relaxed {
                    OpKind::RelaxedWait
                } else {
                    OpKind::Wait
                };
                self.push(index, kind, op, channels)?;
            }
            PlanOp::Put {
                channel,
                signal,
                flush,
                ..
            } => {
                let at = self.push(index, OpKind::Put, op, &[*channel])?;
                self.ops[at].flags = (if *signal { flags::SIGNAL } else { 0 })
                    | if *flush { flags::FLUSH } else { 0 };
            }
            PlanOp::Flush { channels } => {
                self.push(index, OpKind::Flush, op, channels)?;
            }
            PlanOp::Acquire { semaphores } => {
                self.push(index, OpKind::Acquire, op, semaphores)?;
            }
            PlanOp::Release { semaphores } => {
                self.push(index, OpKind::Release, op, semaphores)?;
            }
            PlanOp::Barrier { id, blocks } => {
                let at = self.push(index, OpKind::Barrier, op, &[])?;
                (self.ops[at].links_at, self.ops[at].links) = (*id, *blocks);
            }
            // `Sync`. What a newer plan crate may add must be lowered here first.
            _ => {
                self.push(index, OpKind::Sync, op, &[])?;
            }
        }
        Ok(())
    }

    /// Appends an entry; returns its place.
    fn push(
        &mut self,
        index: u32,
        kind: OpKind,
        op: &PlanOp,
        links: &[u32],
    ) -> Result<usize, ChannelError> {
        let (from, to) = op.operands();
        let by_proxy = kind == OpKind::Put;
        let (operands_at, links_at) = (self.operands.len() as u32, self.links.len() as u32);
        for operand in from {
            // Packets are read where they arrive; their sender is who is waited for.
            let sender = match operand.buffer {
                Buffer::Packets => self.plan.packet_sender(self.rank, operand.index),
                _ => None,
            };
            self.operands
                .push(self.operand(operand, sender.unwrap_or(operand.rank)));
        }
        for operand in to {
            self.operands.push(self.operand(operand, operand.rank));
        }
        for operand in from.iter().chain(to) {
            let space: Space = operand.buffer.into();
            // A proxy reaches its peer its own way, wherever that is.
            if !by_proxy {
                let at = operand.rank as usize * SPACES as usize + space as usize;
                self.bases[at] = self.memories.base(operand.rank, space)?;
            }
        }
        self.links.extend_from_slice(links);
        let chunks = op.chunks();
        let (slice, slices) = chunks.map_or((0, 1), |chunks| chunks.slice);
        self.ops.push(Op {
            kind,
            index,
            chunk: chunks.map_or(0, |chunks| chunks.first),
            chunks: chunks.map_or(0, |chunks| chunks.count),
            slice,
            slices,
            operands_at,
            sources: from.len() as u32,
            destinations: to.len() as u32,
            links_at,
            links: links.len() as u32,
            flags: 0,
            unit: 0,
        });
        Ok(self.ops.len() - 1)
    }

    fn operand(&self, operand: &PlanOperand, peer: u32) -> Operand {
        let (block, index) = match operand.buffer {
            Buffer::Input | Buffer::Output => (
                operand.index / self.plan.chunks,
                operand.index % self.plan.chunks,
            ),
            _ => (0, operand.index),
        };
        Operand {
            space: operand.buffer.into(),
            rank: operand.rank,
            block,
            index,
            peer,
        }
    }
}
