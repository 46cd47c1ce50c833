//! Synchronisation across thread blocks and ranks: for each [`Edge`], a semaphore among the blocks of a rank, and
//! signals and waits between ranks.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::order::{Edge, From, Missing, To};
use super::program::Program;
use super::trace::{Counter, End, Instr, Trace};
use crate::place::{Data, Kind, Raw};
use crate::plan::{ChannelKind, Op};

/// Makes what is missing part of the program: signals right behind what is to be known, waits right before what
/// has to know it.
pub(super) fn insert(program: &mut Program, missing: &Missing) {
    let mut insertion = Insertion::new(program);
    for edge in &missing.edges {
        insertion.add(program, edge);
    }
    for &index in &missing.flushes {
        if let Raw::Data(Data {
            kind: Kind::Put { flush, .. },
            ..
        }) = &mut program.trace.instrs[index].raw
        {
            *flush = true;
        }
    }
    program.trace.instrs = insertion.apply(std::mem::take(&mut program.trace.instrs));
}

/// A thread block of a rank.
type Block = (u32, u32);

/// Which instruction of its loop, and of its block, is the first and which the last.
type LoopEnds = HashMap<(Block, u32), (usize, usize)>;

struct Insertion {
    loops: LoopEnds,
    kinds: Kinds,
    /// By the block that signals and the one that waits: the channel on either side.
    channels: HashMap<(Block, Block), (u32, u32)>,
    semaphores: HashMap<(Block, Block), u32>,
    first: BTreeMap<Block, Vec<Instr>>,
    before: HashMap<usize, Vec<Instr>>,
    after: HashMap<usize, Vec<Instr>>,
    last: BTreeMap<Block, Vec<Instr>>,
}

impl Insertion {
    fn new(program: &Program) -> Self {
        let mut loops = LoopEnds::new();
        for (index, instr) in program.trace.instrs.iter().enumerate() {
            if let Some(id) = instr.in_loop {
                let key = ((instr.rank, instr.block), id);
                loops.entry(key).or_insert((index, index)).1 = index;
            }
        }
        Self {
            loops,
            kinds: Kinds::new(&program.trace),
            channels: HashMap::new(),
            semaphores: HashMap::new(),
            first: BTreeMap::new(),
            before: HashMap::new(),
            after: HashMap::new(),
            last: BTreeMap::new(),
        }
    }

    fn add(&mut self, program: &mut Program, edge: &Edge) {
        let instr = |index: usize| &program.trace.instrs[index];
        let block = |index: usize| (instr(index).rank, instr(index).block);
        let from = match edge.from {
            From::Begin { rank, block } => (rank, block),
            From::After(index) => block(index),
        };
        let (to, because) = match edge.to {
            To::Before(index) => (block(index), index),
            To::End {
                rank,
                block,
                because,
            } => ((rank, block), because),
        };
        // Only in loops over the same pieces do both sides come round equally often.
        let pieces = |index: usize| {
            let in_loop = instr(index).in_loop;
            in_loop.map(|id| program.trace.loops[id as usize])
        };
        let (signals_in, waits_in) = match (edge.from, edge.to) {
            (From::After(from), To::Before(to)) if pieces(from) == pieces(to) => {
                (instr(from).in_loop, instr(to).in_loop)
            }
            _ => (None, None),
        };
        let here = match edge.from {
            From::Begin { .. } => instr(because).source,
            From::After(index) => instr(index).source,
        };
        let there = instr(because).source;
        let starts = matches!(edge.from, From::Begin { .. });
        let (signal, wait) = self.pair(program, from, to, starts);
        let make = |(rank, block): Block, op: Op, source: u32, in_loop: Option<u32>| Instr {
            rank,
            block,
            raw: Raw::Other(op),
            source,
            in_loop,
        };
        let signal = make(from, signal, here, signals_in);
        let wait = make(to, wait, there, waits_in);
        match edge.from {
            From::Begin { .. } => self.first.entry(from).or_default().push(signal),
            From::After(index) => {
                let index = self.outside(program, index, signals_in).1;
                self.after.entry(index).or_default().push(signal);
            }
        }
        match edge.to {
            To::Before(index) => {
                let index = self.outside(program, index, waits_in).0;
                self.before.entry(index).or_default().push(wait);
            }
            To::End { .. } => self.last.entry(to).or_default().push(wait),
        }
    }

    /// Where one gets to by leaving the instruction's loop, unless that is `in_loop`: the instruction to be in front
    /// of, and the one to be behind.
    fn outside(&self, program: &Program, index: usize, in_loop: Option<u32>) -> (usize, usize) {
        let instr = &program.trace.instrs[index];
        match instr.in_loop {
            Some(id) if in_loop.is_none() => self.loops[&((instr.rank, instr.block), id)],
            _ => (index, index),
        }
    }

    /// The operations that tell `to` about `from`. `starts`: only that its execution has begun.
    fn pair(&mut self, program: &mut Program, from: Block, to: Block, starts: bool) -> (Op, Op) {
        if from.0 == to.0 {
            let semaphores = &mut program.trace.semaphores;
            let id = *self.semaphores.entry((from, to)).or_insert_with(|| {
                semaphores.push(Counter {
                    rank: from.0,
                    initial: 0,
                });
                semaphores.len() as u32 - 1
            });
            let semaphores = vec![id];
            return (
                Op::Release {
                    semaphores: semaphores.clone(),
                },
                Op::Acquire { semaphores },
            );
        }
        let kind = self.kinds.between(from.0, to.0);
        let (there, back) = match self.channels.get(&(from, to)) {
            Some(ends) => *ends,
            None => {
                // Beyond all that either side has, so that nothing of the user's is paired with it.
                let mut ordinal = 0;
                for key in [(from.0, to.0, kind), (to.0, from.0, kind)] {
                    ordinal = program
                        .ordinals
                        .get(&key)
                        .copied()
                        .unwrap_or(0)
                        .max(ordinal);
                }
                let mut end = |rank: u32, peer: u32| {
                    program.ordinals.insert((rank, peer, kind), ordinal + 1);
                    program.trace.ends.push(End {
                        rank,
                        peer,
                        kind,
                        ordinal,
                    });
                    program.trace.ends.len() as u32 - 1
                };
                let ends = (end(from.0, to.0), end(to.0, from.0));
                self.channels.insert((from, to), ends);
                self.channels.insert((to, from), (ends.1, ends.0));
                ends
            }
        };
        let relaxed = starts && kind == ChannelKind::Memory;
        (
            Op::Signal {
                channels: vec![there],
                relaxed,
            },
            Op::Wait {
                channels: vec![back],
                relaxed,
            },
        )
    }

    fn apply(mut self, instrs: Vec<Instr>) -> Vec<Instr> {
        let mut all = Vec::with_capacity(instrs.len());
        all.extend(std::mem::take(&mut self.first).into_values().flatten());
        for (index, instr) in instrs.into_iter().enumerate() {
            all.extend(self.before.remove(&index).unwrap_or_default());
            all.push(instr);
            all.extend(self.after.remove(&index).unwrap_or_default());
        }
        all.extend(self.last.into_values().flatten());
        all
    }
}

/// By which kind of channel ranks can signal each other.
struct Kinds {
    memory: HashSet<(u32, u32)>,
    port: HashSet<(u32, u32)>,
}

impl Kinds {
    fn new(trace: &Trace) -> Self {
        let (mut memory, mut port) = (HashSet::new(), HashSet::new());
        for end in &trace.ends {
            let pairs = match end.kind {
                ChannelKind::Memory => &mut memory,
                ChannelKind::Port => &mut port,
            };
            pairs.extend([(end.rank, end.peer), (end.peer, end.rank)]);
        }
        for instr in &trace.instrs {
            if let Raw::Data(data) = &instr.raw
                && !matches!(data.kind, Kind::Put { .. })
            {
                let ranks = data.from.iter().chain(&data.to).map(|o| o.rank);
                for peer in ranks.filter(|peer| *peer != instr.rank) {
                    memory.extend([(instr.rank, peer), (peer, instr.rank)]);
                }
            }
        }
        Self { memory, port }
    }

    /// A port channel only where the program has nothing else between the two: they may not reach each other's
    /// memory.
    fn between(&self, a: u32, b: u32) -> ChannelKind {
        if self.port.contains(&(a, b)) && !self.memory.contains(&(a, b)) {
            ChannelKind::Port
        } else {
            ChannelKind::Memory
        }
    }
}
