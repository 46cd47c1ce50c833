//! What is simulated: where every granule of every buffer lies in one array of cells, and each
//! thread block's operations with loops unrolled and operands resolved to cells.

use std::collections::HashMap;

use crossweft_device::extent::{Extent, GRANULE, chunk_bytes};

use super::{Code, Diagnostic};
use crate::plan::{Buffer, ChannelKind, Chunks, Op, Operand, Plan};
use crate::validate::ordinals;

/// Sizes of the messages, in granules, and of the pieces of loops.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    /// One message of each execution.
    pub(crate) messages: Vec<u64>,
    /// By a loop's bytes of a piece, the piece that is modelled.
    pub(crate) pieces: HashMap<u64, u64>,
    /// Whether input and output are the same memory.
    pub(crate) aliased: bool,
    /// Where slots lie.
    pub(crate) slots: Slots,
}

/// Where slots lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slots {
    /// At multiples of the message's chunk.
    Packed,
    /// So, in two halves in turn, whether the plan asks for them or not.
    Halves,
    /// Where they do for the largest message.
    Fixed,
}

/// Where the buffers of the ranks lie among the cells.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Cells of a rank.
    rank_cells: u64,
    input: u64,
    output: u64,
    scratch: u64,
    /// Cells of one half; the scratch memory's is 0 if there is one only.
    scratch_half: u64,
    packets: u64,
    packets_half: u64,
    aliased: bool,
    input_cells: u64,
    output_cells: u64,
    /// Messages to add, by rank, to `input` or `output` where they are one memory.
    input_shift: u64,
    output_shift: u64,
    /// Granules from slot to slot, if that is the same for all messages.
    stride: Option<u64>,
}

impl Layout {
    pub(crate) fn new(plan: &Plan, geometry: &Geometry) -> Self {
        let largest = geometry.messages.iter().copied().max().unwrap_or(1);
        let chunk = chunk_of(plan, largest);
        let input_cells = largest * u64::from(plan.input_blocks);
        let output_cells = largest * u64::from(plan.output_blocks);
        let scratch_half = chunk * u64::from(plan.scratch_slots);
        let packets_half = chunk * u64::from(plan.packet_slots);
        let aliased = geometry.aliased;
        let (input, output) = (0, if aliased { 0 } else { input_cells });
        let scratch = if aliased {
            input_cells.max(output_cells)
        } else {
            output + output_cells
        };
        let has_halves = plan.double_scratch || geometry.slots == Slots::Halves;
        let halves = if has_halves { 2 } else { 1 };
        let packets = scratch + halves * scratch_half;
        let own = plan.collective.is_own_block();
        let shift = |is_own: bool| u64::from(aliased && is_own);
        let (input_shift, output_shift) = (shift(own.0), shift(own.1));
        Self {
            rank_cells: packets + 2 * packets_half,
            input,
            output,
            scratch,
            scratch_half: if has_halves { scratch_half } else { 0 },
            packets,
            packets_half,
            aliased,
            input_cells,
            output_cells,
            input_shift,
            output_shift,
            stride: (geometry.slots == Slots::Fixed).then_some(chunk),
        }
    }

    pub(crate) fn cells(&self, ranks: usize) -> u64 {
        self.rank_cells * ranks as u64
    }

    /// Cells of a rank's input and output: everything that is the caller's.
    pub(crate) fn caller(&self, rank: u32) -> std::ops::Range<usize> {
        let base = self.rank_cells * u64::from(rank);
        base as usize..(base + self.scratch) as usize
    }

    /// First cell of a rank's input or output.
    pub(crate) fn input(&self, rank: u32, message: u64) -> usize {
        let rank = u64::from(rank);
        (self.rank_cells * rank + self.input + self.input_shift * rank * message) as usize
    }

    pub(crate) fn output(&self, rank: u32, message: u64) -> usize {
        let rank = u64::from(rank);
        (self.rank_cells * rank + self.output + self.output_shift * rank * message) as usize
    }

    fn place(&self, rank: u32, buffer: Buffer, offset: u64, message: u64) -> Place {
        let base = self.rank_cells * u64::from(rank);
        let (base, half) = match buffer {
            Buffer::Input => (self.input(rank, message) as u64, 0),
            Buffer::Output => (self.output(rank, message) as u64, 0),
            Buffer::Scratch => (base + self.scratch, self.scratch_half),
            Buffer::Packets => (base + self.packets, self.packets_half),
        };
        Place {
            base: base + offset,
            half,
            packets: buffer == Buffer::Packets,
        }
    }

    /// Whether a cell holds packets.
    pub(super) fn is_packet(&self, cell: usize) -> bool {
        cell as u64 % self.rank_cells >= self.packets
    }

    /// The rank whose memory a cell is.
    pub(crate) fn rank_of(&self, cell: usize) -> u32 {
        (cell as u64 / self.rank_cells.max(1)) as u32
    }

    /// A cell in words.
    pub(crate) fn describe(&self, cell: usize, chunk: u64) -> String {
        let stride = self.stride.unwrap_or(chunk);
        let (rank, at) = (cell as u64 / self.rank_cells, cell as u64 % self.rank_cells);
        if at >= self.packets {
            let slot = (at - self.packets) % self.packets_half / stride;
            return format!("packet slot {slot} of rank {rank}");
        }
        if at >= self.scratch {
            let at = at - self.scratch;
            let at = if self.scratch_half == 0 {
                at
            } else {
                at % self.scratch_half
            };
            return format!("scratch slot {} of rank {rank}", at / stride);
        }
        let (name, at, cells) = if self.aliased {
            ("input and output (one memory)", at, at + 1)
        } else if at < self.output {
            ("input", at, self.input_cells)
        } else {
            ("output", at - self.output, self.output_cells)
        };
        debug_assert!(at < cells);
        format!("chunk {} of the {name} of rank {rank}", at / chunk)
    }
}

/// Granules of a chunk.
pub(crate) fn chunk_of(plan: &Plan, message: u64) -> u64 {
    chunk_bytes(message * GRANULE, plan.chunks) / GRANULE
}

/// An operand's first cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    base: u64,
    /// Cells to the other half; 0 if there is none.
    half: u64,
    pub(crate) packets: bool,
}

impl Place {
    /// In execution `epoch`.
    pub(crate) fn at(self, epoch: u32) -> usize {
        (self.base + u64::from(epoch & 1) * self.half) as usize
    }
}

/// Data that moves.
#[derive(Clone, Debug)]
pub(crate) struct Data {
    pub(crate) cells: usize,
    pub(crate) from: Vec<Place>,
    pub(crate) to: Vec<Place>,
}

/// One step of a thread block.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// `last` is of a reduction; a copy has none.
    Data {
        data: Data,
        last: Option<bool>,
    },
    Put {
        port: usize,
        data: Option<Data>,
        /// Whom to signal.
        inbox: Option<usize>,
        flush: bool,
    },
    /// Inboxes, with the port that signals them if one does.
    Signal {
        inboxes: Vec<(usize, Option<usize>)>,
        relaxed: bool,
    },
    Wait {
        inboxes: Vec<usize>,
        relaxed: bool,
    },
    Flush {
        ports: Vec<usize>,
    },
    Acquire {
        semaphores: Vec<usize>,
    },
    Release {
        semaphores: Vec<usize>,
    },
    Barrier {
        id: usize,
        blocks: usize,
    },
}

/// An operation's place in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub(crate) rank: u32,
    pub(crate) block: u32,
    pub(crate) op: u32,
    /// In a loop: which of its operations.
    pub(crate) inner: Option<u32>,
    pub(crate) name: &'static str,
}

/// One thread block: its steps, each with its site.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps {
    pub(crate) steps: Vec<(u32, Action)>,
}

/// A counter that is signalled and waited for: one direction of a channel, or a semaphore.
#[derive(Clone, Debug)]
pub(crate) struct CounterInfo {
    /// The rank that waits.
    pub(crate) rank: u32,
    /// The channel's or semaphore's number there.
    pub(crate) id: u32,
    /// The rank that signals.
    pub(crate) from: u32,
    /// Whether it is a semaphore.
    pub(crate) semaphore: bool,
    /// Value at the beginning.
    pub(crate) initial: u32,
    /// Signals of an execution, by thread block.
    pub(crate) signals: Vec<(usize, u64)>,
    /// Waits of an execution, by thread block.
    pub(crate) waits: Vec<(usize, u64)>,
}

/// A thread block's use of a port channel: the requests of one block are handled in order.
#[derive(Clone, Debug)]
pub(crate) struct PortInfo {
    /// The block's index among all.
    pub(crate) block: usize,
    /// The other blocks' uses of the same channel.
    pub(crate) siblings: Vec<usize>,
}

/// Everything the simulation runs.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub(crate) layout: Layout,
    pub(crate) sites: Vec<Site>,
    /// By kind of execution (their messages may differ), then by block of all ranks.
    pub(crate) programs: Vec<Vec<Steps>>,
    /// First block of each rank; one more entry at the end.
    pub(crate) first_block: Vec<usize>,
    pub(crate) counters: Vec<CounterInfo>,
    pub(crate) ports: Vec<PortInfo>,
    pub(crate) barriers: usize,
}

impl Compiled {
    pub(crate) fn new(plan: &Plan, geometry: &Geometry) -> Self {
        let layout = Layout::new(plan, geometry);
        let mut first_block = vec![0];
        for program in &plan.ranks {
            first_block.push(first_block[first_block.len() - 1] + program.blocks.len());
        }
        let mut compiler = Compiler::new(plan, &layout, &first_block);
        let mut programs: Vec<Vec<Steps>> = Vec::new();
        for (execution, &message) in geometry.messages.iter().enumerate() {
            let same = geometry.messages[..execution]
                .iter()
                .position(|m| *m == message);
            programs.push(match same {
                Some(same) => programs[same].clone(),
                None => {
                    compiler.count = programs.is_empty();
                    compiler.program(message, &geometry.pieces)
                }
            });
        }
        let Compiler {
            sites,
            counters,
            mut ports,
            barriers,
            port_ids,
            ..
        } = compiler;
        for ((rank, channel, _), port) in &port_ids {
            ports[*port].siblings = port_ids
                .iter()
                .filter(|((r, c, _), p)| (r, c) == (rank, channel) && *p != port)
                .map(|(_, p)| *p)
                .collect();
        }
        Self {
            layout,
            sites,
            programs,
            first_block,
            counters,
            ports,
            barriers,
        }
    }
}

impl Compiled {
    /// Waits that name a channel twice: the block's threads would take its signals at once.
    pub(crate) fn twice(&self) -> Vec<Diagnostic> {
        let mut found: Vec<Diagnostic> = Vec::new();
        for (site, action) in self.programs[0].iter().flat_map(|block| &block.steps) {
            let Action::Wait { inboxes, .. } = action else {
                continue;
            };
            let mut sorted = inboxes.clone();
            sorted.sort_unstable();
            sorted.dedup();
            if sorted.len() == inboxes.len() {
                continue;
            }
            let site = &self.sites[*site as usize];
            let diagnostic = Diagnostic {
                rank: Some(site.rank),
                thread_block: Some(site.block),
                op: Some(site.op),
                inner: site.inner,
                other: None,
                code: Code::Race,
                message: "it waits twice on one channel: two threads of the block would count its \
                          signals at once; wait in two ops"
                    .to_owned(),
            };
            if found.last() != Some(&diagnostic) {
                found.push(diagnostic);
            }
        }
        found
    }
}

struct Compiler<'a> {
    plan: &'a Plan,
    layout: &'a Layout,
    first_block: &'a [usize],
    sites: Vec<Site>,
    site_ids: HashMap<Site, u32>,
    counters: Vec<CounterInfo>,
    /// By rank and channel: the counter that is waited for there.
    inboxes: Vec<Vec<usize>>,
    /// By rank and channel: the counter that is signalled from there.
    outboxes: Vec<Vec<usize>>,
    semaphores: Vec<Vec<usize>>,
    ports: Vec<PortInfo>,
    port_ids: HashMap<(u32, u32, u32), usize>,
    barriers: usize,
    /// Whether signals and waits are counted: in the first program only.
    count: bool,
}

impl<'a> Compiler<'a> {
    fn new(plan: &'a Plan, layout: &'a Layout, first_block: &'a [usize]) -> Self {
        let mut counters = Vec::new();
        let mut add = |rank, id, from, initial: Option<u32>| {
            counters.push(CounterInfo {
                rank,
                id,
                from,
                semaphore: initial.is_some(),
                initial: initial.unwrap_or(0),
                signals: Vec::new(),
                waits: Vec::new(),
            });
            counters.len() - 1
        };
        let mut ends = HashMap::new();
        let mut inboxes = Vec::new();
        let mut semaphores = Vec::new();
        for (rank, program) in (0..).zip(&plan.ranks) {
            let ordinals = ordinals(program);
            inboxes.push(
                (0..)
                    .zip(&program.channels)
                    .map(|(id, channel)| {
                        let counter = add(rank, id, channel.peer, None);
                        let ordinal = ordinals[id as usize];
                        ends.insert((rank, channel.peer, channel.kind, ordinal), counter);
                        counter
                    })
                    .collect::<Vec<_>>(),
            );
            semaphores.push(
                (0..)
                    .zip(&program.semaphores)
                    .map(|(id, initial)| add(rank, id, rank, Some(*initial)))
                    .collect::<Vec<_>>(),
            );
        }
        let outboxes = (0..)
            .zip(&plan.ranks)
            .map(|(rank, program)| {
                let ordinals = ordinals(program);
                program
                    .channels
                    .iter()
                    .zip(ordinals)
                    .map(|(channel, ordinal)| ends[&(channel.peer, rank, channel.kind, ordinal)])
                    .collect()
            })
            .collect();
        Self {
            plan,
            layout,
            first_block,
            sites: Vec::new(),
            site_ids: HashMap::new(),
            counters,
            inboxes,
            outboxes,
            semaphores,
            ports: Vec::new(),
            port_ids: HashMap::new(),
            barriers: 0,
            count: true,
        }
    }

    fn program(&mut self, message: u64, pieces: &HashMap<u64, u64>) -> Vec<Steps> {
        let plan = self.plan;
        let mut all = Vec::new();
        let mut first_barrier = 0;
        for (rank, program) in (0..).zip(&plan.ranks) {
            for (block, ops) in (0..).zip(&program.blocks) {
                let mut out = Steps::default();
                for (index, op) in (0..).zip(ops) {
                    let mut site = Site {
                        rank,
                        block,
                        op: index,
                        inner: None,
                        name: op.name(),
                    };
                    let Op::Loop {
                        unit_bytes,
                        chunks,
                        ops,
                    } = op
                    else {
                        self.step(&mut out, site, op, message, ALL, first_barrier);
                        continue;
                    };
                    let piece = pieces.get(unit_bytes).copied().unwrap_or(1);
                    let total = chunk_of(plan, message) * u64::from(*chunks);
                    let mut begin = 0;
                    while begin < total {
                        for (inner, op) in (0..).zip(ops) {
                            (site.inner, site.name) = (Some(inner), op.name());
                            let window = (begin, begin + piece);
                            self.step(&mut out, site, op, message, window, first_barrier);
                        }
                        begin += piece;
                    }
                }
                all.push(out);
            }
            first_barrier += program.barriers() as usize;
        }
        self.barriers = first_barrier;
        all
    }

    fn port(&mut self, rank: u32, block: u32, channel: u32) -> usize {
        let next = self.ports.len();
        let index = *self.port_ids.entry((rank, channel, block)).or_insert(next);
        if index == next {
            self.ports.push(PortInfo {
                block: self.first_block[rank as usize] + block as usize,
                siblings: Vec::new(),
            });
        }
        index
    }

    fn step(
        &mut self,
        out: &mut Steps,
        site: Site,
        op: &Op,
        message: u64,
        window: (u64, u64),
        first_barrier: usize,
    ) {
        let (rank, block) = (site.rank, site.block);
        let thread = self.first_block[rank as usize] + block as usize;
        let data = op.chunks().and_then(|chunks| {
            let (from, to) = op.operands();
            self.data(chunks, from, to, message, window)
        });
        let kind = |id: u32| self.plan.ranks[rank as usize].channels[id as usize].kind;
        let action = match op {
            Op::Move { .. } | Op::Reduce { .. } => {
                let Some(data) = data else { return };
                let last = match op {
                    Op::Reduce { last, .. } => Some(*last),
                    _ => None,
                };
                Action::Data { data, last }
            }
            Op::Put {
                channel,
                signal,
                flush,
                ..
            } => {
                let inbox = signal.then(|| self.outboxes[rank as usize][*channel as usize]);
                if let Some(inbox) = inbox {
                    self.signals(inbox, thread);
                }
                Action::Put {
                    port: self.port(rank, block, *channel),
                    data,
                    inbox,
                    flush: *flush,
                }
            }
            Op::Signal { channels, relaxed } => {
                let by_port: Vec<bool> = channels
                    .iter()
                    .map(|id| kind(*id) == ChannelKind::Port)
                    .collect();
                let mut inboxes = Vec::with_capacity(channels.len());
                for (id, by_port) in channels.iter().zip(by_port) {
                    let inbox = self.outboxes[rank as usize][*id as usize];
                    self.signals(inbox, thread);
                    inboxes.push((inbox, by_port.then(|| self.port(rank, block, *id))));
                }
                Action::Signal {
                    inboxes,
                    relaxed: *relaxed,
                }
            }
            Op::Wait { channels, relaxed } => {
                let inboxes: Vec<usize> = channels
                    .iter()
                    .map(|id| self.inboxes[rank as usize][*id as usize])
                    .collect();
                inboxes.iter().for_each(|inbox| self.waits(*inbox, thread));
                Action::Wait {
                    inboxes,
                    relaxed: *relaxed,
                }
            }
            Op::Flush { channels } => Action::Flush {
                ports: channels
                    .iter()
                    .map(|id| self.port(rank, block, *id))
                    .collect(),
            },
            Op::Acquire { semaphores } => {
                let semaphores: Vec<usize> = semaphores
                    .iter()
                    .map(|id| self.semaphores[rank as usize][*id as usize])
                    .collect();
                semaphores.iter().for_each(|id| self.waits(*id, thread));
                Action::Acquire { semaphores }
            }
            Op::Release { semaphores } => {
                let semaphores: Vec<usize> = semaphores
                    .iter()
                    .map(|id| self.semaphores[rank as usize][*id as usize])
                    .collect();
                semaphores.iter().for_each(|id| self.signals(*id, thread));
                Action::Release { semaphores }
            }
            Op::Barrier { id, blocks } => Action::Barrier {
                id: first_barrier + *id as usize,
                blocks: *blocks as usize,
            },
            Op::Sync | Op::Loop { .. } => return,
        };
        let next = self.sites.len() as u32;
        let id = *self.site_ids.entry(site).or_insert(next);
        if id == next {
            self.sites.push(site);
        }
        out.steps.push((id, action));
    }

    fn signals(&mut self, counter: usize, thread: usize) {
        if self.count {
            tally(&mut self.counters[counter].signals, thread);
        }
    }

    fn waits(&mut self, counter: usize, thread: usize) {
        if self.count {
            tally(&mut self.counters[counter].waits, thread);
        }
    }

    /// What an operation moves; `None` if there is nothing in its part of the message.
    fn data(
        &self,
        chunks: Chunks,
        from: &[Operand],
        to: &[Operand],
        message: u64,
        window: (u64, u64),
    ) -> Option<Data> {
        let chunk = chunk_of(self.plan, message);
        let whole = Extent::of_chunks(
            message * GRANULE,
            chunk * GRANULE,
            chunks.first,
            chunks.count,
        );
        let all = whole.slice(chunks.slice.0, chunks.slice.1);
        let (first, end) = (all.begin / GRANULE, all.end.div_ceil(GRANULE));
        let begin = (first + window.0).min(end);
        let cells = end.min(first.saturating_add(window.1)) - begin;
        if cells == 0 {
            return None;
        }
        let inside = begin - (chunk * u64::from(chunks.first)).min(message);
        let place = |operand: &Operand| {
            let (block, index) = match operand.buffer {
                Buffer::Input | Buffer::Output => (
                    operand.index / self.plan.chunks,
                    operand.index % self.plan.chunks,
                ),
                _ => (0, operand.index),
            };
            let stride = match operand.buffer {
                Buffer::Scratch | Buffer::Packets => self.layout.stride.unwrap_or(chunk),
                _ => chunk,
            };
            let offset = message * u64::from(block) + stride * u64::from(index) + inside;
            self.layout
                .place(operand.rank, operand.buffer, offset, message)
        };
        Some(Data {
            cells: cells as usize,
            from: from.iter().map(place).collect(),
            to: to.iter().map(place).collect(),
        })
    }
}

const ALL: (u64, u64) = (0, u64::MAX);

fn tally(counts: &mut Vec<(usize, u64)>, thread: usize) {
    match counts.iter_mut().find(|(of, _)| *of == thread) {
        Some((_, count)) => *count += 1,
        None => counts.push((thread, 1)),
    }
}
