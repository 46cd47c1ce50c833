//! Numbers: thread blocks, channels, semaphores, switches and barriers as the plan counts them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::compile::Lines;
use super::trace::Trace;
use crate::place::{Data, Kind, Raw};
use crate::plan::{Buffer, Channel, ChannelKind, Op, Operand, RankProgram, Switch};

/// What [`assign`] makes of a trace: each rank's resources, and its thread blocks' instructions.
pub(super) struct Assigned {
    /// Without operations.
    pub(super) programs: Vec<RankProgram>,
    /// By rank and thread block.
    pub(super) raw: Vec<Vec<Vec<Raw>>>,
    /// The line of each of them.
    pub(super) sources: Vec<Vec<Vec<Lines>>>,
}

/// Numbers what is in use, in the order of the user's numbers, and leaves out the rest.
pub(super) fn assign(trace: &Trace, ranks: u32) -> Assigned {
    let mut numbers = Numbers::new(trace, ranks);
    let mut blocks: Vec<BTreeMap<u32, Block>> = vec![BTreeMap::new(); ranks as usize];
    for instr in &trace.instrs {
        let raw = numbers.raw(trace, instr.rank, &instr.raw);
        let block = blocks[instr.rank as usize].entry(instr.block).or_default();
        block.push(trace, raw, instr.source, instr.in_loop);
    }
    let (mut raw, mut sources) = (Vec::new(), Vec::new());
    for mut blocks in blocks {
        if blocks.is_empty() {
            blocks.insert(0, Block::default());
        }
        let (ops, lines) = blocks
            .into_values()
            .map(|block| (block.raw, block.sources))
            .unzip();
        raw.push(ops);
        sources.push(lines);
    }
    Assigned {
        programs: numbers.programs,
        raw,
        sources,
    }
}

#[derive(Clone, Debug, Default)]
struct Block {
    raw: Vec<Raw>,
    sources: Vec<Lines>,
    /// The loop that the last one is.
    in_loop: Option<u32>,
}

impl Block {
    fn push(&mut self, trace: &Trace, raw: Raw, source: u32, in_loop: Option<u32>) {
        let Some(id) = in_loop else {
            self.raw.push(raw);
            self.sources.push(Lines {
                own: source,
                inner: Vec::new(),
            });
            self.in_loop = None;
            return;
        };
        if let (Some(Raw::Loop { ops, .. }), Some(lines)) =
            (self.raw.last_mut(), self.sources.last_mut())
            && self.in_loop == Some(id)
        {
            ops.push(raw);
            lines.inner.push(source);
            return;
        }
        let pieces = trace.loops[id as usize];
        self.raw.push(Raw::Loop {
            unit_bytes: pieces.unit_bytes,
            chunks: pieces.chunks,
            ops: vec![raw],
        });
        self.sources.push(Lines {
            own: source,
            inner: vec![source],
        });
        self.in_loop = in_loop;
    }
}

struct Numbers {
    programs: Vec<RankProgram>,
    /// By channel of the trace: its number on its rank.
    channels: HashMap<u32, u32>,
    semaphores: Vec<u32>,
    /// By rank, group and buffer.
    switches: HashMap<(u32, u32, Buffer), u32>,
    /// By barrier of the trace.
    barriers: HashMap<u32, u32>,
}

impl Numbers {
    fn new(trace: &Trace, ranks: u32) -> Self {
        let mut programs = vec![RankProgram::default(); ranks as usize];
        let mut semaphores = Vec::with_capacity(trace.semaphores.len());
        for semaphore in &trace.semaphores {
            let of_rank = &mut programs[semaphore.rank as usize].semaphores;
            semaphores.push(of_rank.len() as u32);
            of_rank.push(semaphore.initial);
        }
        let channels = channels(trace, &mut programs);
        Self {
            programs,
            channels,
            semaphores,
            switches: HashMap::new(),
            barriers: barriers(trace),
        }
    }

    fn raw(&mut self, trace: &Trace, rank: u32, raw: &Raw) -> Raw {
        let channels = |ids: &[u32]| ids.iter().map(|id| self.channels[id]).collect();
        let semaphores = |ids: &[u32]| ids.iter().map(|id| self.semaphores[*id as usize]).collect();
        Raw::Other(match raw {
            Raw::Data(data) => return Raw::Data(self.data(trace, rank, data)),
            Raw::Other(Op::Signal {
                channels: ids,
                relaxed,
            }) => Op::Signal {
                channels: channels(ids),
                relaxed: *relaxed,
            },
            Raw::Other(Op::Wait {
                channels: ids,
                relaxed,
            }) => Op::Wait {
                channels: channels(ids),
                relaxed: *relaxed,
            },
            Raw::Other(Op::Flush { channels: ids }) => Op::Flush {
                channels: channels(ids),
            },
            Raw::Other(Op::Acquire { semaphores: ids }) => Op::Acquire {
                semaphores: semaphores(ids),
            },
            Raw::Other(Op::Release { semaphores: ids }) => Op::Release {
                semaphores: semaphores(ids),
            },
            Raw::Other(Op::Barrier { id, blocks }) => Op::Barrier {
                id: self.barriers[id],
                blocks: *blocks,
            },
            other => return other.clone(),
        })
    }

    fn data(&mut self, trace: &Trace, rank: u32, data: &Data) -> Data {
        let mut data = data.clone();
        match &mut data.kind {
            Kind::Move { switch } => *switch = self.switch(trace, rank, *switch, &[&data.to]),
            Kind::Reduce { switch, .. } => {
                let sides: [&[Operand]; 2] = [&data.from, &data.to];
                *switch = self.switch(trace, rank, *switch, &sides);
            }
            Kind::Put { channel, .. } => *channel = self.channels[channel],
        }
        data
    }

    /// The rank's number of a switch, if it can do this: each side is all its members.
    fn switch(
        &mut self,
        trace: &Trace,
        rank: u32,
        switch: Option<u32>,
        sides: &[&[Operand]],
    ) -> Option<u32> {
        let id = switch?;
        let buffer = sides[0].first()?.buffer;
        let members = &trace.groups[id as usize].ranks;
        let is_all = |side: &&[Operand]| {
            let mut ranks: Vec<u32> = side.iter().map(|operand| operand.rank).collect();
            ranks.sort_unstable();
            ranks == *members
        };
        if !sides.iter().all(is_all) {
            return None;
        }
        let switches = &mut self.programs[rank as usize].switches;
        let number = self.switches.entry((rank, id, buffer)).or_insert_with(|| {
            switches.push(Switch {
                ranks: trace.groups[id as usize].ranks.clone(),
                buffer,
            });
            switches.len() as u32 - 1
        });
        Some(*number)
    }
}

/// Channels of which neither end is used need not be there; the others get their other end.
fn channels(trace: &Trace, programs: &mut [RankProgram]) -> HashMap<u32, u32> {
    let used: BTreeSet<u32> = trace.instrs.iter().flat_map(|i| used(&i.raw)).collect();
    // By lower rank, higher rank, kind and ordinal.
    let mut pairs: BTreeMap<(u32, u32, ChannelKind, u32), [Option<u32>; 2]> = BTreeMap::new();
    for id in used {
        let end = trace.ends[id as usize];
        let key = |a, b| (a, b, end.kind, end.ordinal);
        if end.rank < end.peer {
            pairs.entry(key(end.rank, end.peer)).or_default()[0] = Some(id);
        } else {
            pairs.entry(key(end.peer, end.rank)).or_default()[1] = Some(id);
        }
    }
    let mut numbers = HashMap::new();
    for ((a, b, kind, _), ids) in pairs {
        for ((rank, peer), id) in [(a, b), (b, a)].into_iter().zip(ids) {
            let channels = &mut programs[rank as usize].channels;
            if let Some(id) = id {
                numbers.insert(id, channels.len() as u32);
            }
            channels.push(Channel { peer, kind });
        }
    }
    numbers
}

/// Channels that an instruction uses.
fn used(raw: &Raw) -> Vec<u32> {
    match raw {
        Raw::Other(
            Op::Signal { channels, .. } | Op::Wait { channels, .. } | Op::Flush { channels },
        ) => channels.clone(),
        Raw::Data(Data {
            kind: Kind::Put { channel, .. },
            ..
        }) => vec![*channel],
        _ => Vec::new(),
    }
}

/// Barriers of the same thread blocks are one: they meet there once more.
fn barriers(trace: &Trace) -> HashMap<u32, u32> {
    let mut members: BTreeMap<u32, (u32, BTreeSet<u32>)> = BTreeMap::new();
    for instr in &trace.instrs {
        if let Raw::Other(Op::Barrier { id, .. }) = instr.raw {
            let (rank, blocks) = members.entry(id).or_default();
            *rank = instr.rank;
            blocks.insert(instr.block);
        }
    }
    let mut next: HashMap<u32, u32> = HashMap::new();
    let mut known: HashMap<(u32, BTreeSet<u32>), u32> = HashMap::new();
    let mut numbers = HashMap::new();
    for (id, (rank, blocks)) in members {
        let number = *known.entry((rank, blocks)).or_insert_with(|| {
            let next = next.entry(rank).or_default();
            *next += 1;
            *next - 1
        });
        numbers.insert(id, number);
    }
    numbers
}
