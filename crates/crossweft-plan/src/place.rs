//! Operations on chunks of whole buffers, and how they are placed in a message.
//!
//! A front end names chunks of the input, the output and scratch memory, however many. A plan's
//! operations each handle chunks of one block of the message that follow one another, and scratch slots
//! are sized by the chunk that lies in them: [`place_all`] splits operations accordingly.

use std::collections::HashMap;

use crate::plan::{Buffer, Chunks, Collective, Op, Operand};
use crate::validate::limits;

/// An operation before its chunks are placed in a message.
#[derive(Clone, Debug)]
pub(crate) enum Raw {
    Data(Data),
    Loop {
        unit_bytes: u64,
        chunks: u32,
        ops: Vec<Raw>,
    },
    Other(Op),
}

#[derive(Clone, Debug)]
pub(crate) struct Data {
    pub(crate) kind: Kind,
    pub(crate) from: Vec<Operand>,
    pub(crate) to: Vec<Operand>,
    /// Chunks of each operand.
    pub(crate) count: u32,
    pub(crate) slice: (u32, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Move {
        switch: Option<u32>,
    },
    Reduce {
        switch: Option<u32>,
        last: bool,
    },
    Put {
        channel: u32,
        signal: bool,
        flush: bool,
    },
}

impl Data {
    fn operands(&self) -> impl Iterator<Item = &Operand> {
        self.from.iter().chain(&self.to)
    }
}

fn in_message(operand: &Operand) -> bool {
    matches!(operand.buffer, Buffer::Input | Buffer::Output)
}
/// Where the scratch slots that the file does not know of begin, until they are numbered.
pub(crate) const SPARE: u32 = limits::CHUNKS;

fn all_data(raw: &[Vec<Vec<Raw>>]) -> impl Iterator<Item = &Data> {
    raw.iter().flatten().flatten().flat_map(|raw| {
        let inner = match raw {
            Raw::Loop { ops, .. } => &ops[..],
            raw => std::slice::from_ref(raw),
        };
        inner.iter().filter_map(|raw| match raw {
            Raw::Data(data) => Some(data),
            _ => None,
        })
    })
}

/// How many slots there are, after numbering them from the first one in use.
struct Slots {
    plain: u32,
    packets: u32,
}

impl Slots {
    fn renumber(raw: &mut [Vec<Vec<Raw>>], spare: &[u32]) -> Self {
        // First and end of those in use.
        let mut plain = (u32::MAX, 0);
        let mut packets = (u32::MAX, 0);
        for data in all_data(raw) {
            for operand in data.operands() {
                let range = match operand.buffer {
                    Buffer::Scratch if operand.index < SPARE => &mut plain,
                    Buffer::Packets => &mut packets,
                    _ => continue,
                };
                range.0 = range.0.min(operand.index);
                range.1 = range.1.max(operand.index + data.count);
            }
        }
        let length = |(first, end): (u32, u32)| end.saturating_sub(first);
        let known = length(plain);
        let renumber = |operand: &mut Operand| match operand.buffer {
            Buffer::Scratch if operand.index >= SPARE => {
                operand.index = operand.index - SPARE + known
            }
            Buffer::Scratch => operand.index -= plain.0,
            Buffer::Packets => operand.index -= packets.0,
            _ => {}
        };
        for raw in raw.iter_mut().flatten().flatten() {
            let inner = match raw {
                Raw::Loop { ops, .. } => &mut ops[..],
                raw => std::slice::from_mut(raw),
            };
            for raw in inner {
                if let Raw::Data(data) = raw {
                    data.from.iter_mut().chain(&mut data.to).for_each(renumber);
                }
            }
        }
        let spare = spare.iter().copied().max().unwrap_or(0);
        Self {
            plain: known.saturating_add(spare),
            packets: length(packets),
        }
    }
}

/// Which chunk of the message lies in which scratch slot, as far as the operations tell: slots that
/// one of them handles together hold the same chunk.
struct Classes {
    chunks: u32,
    numbers: HashMap<Operand, usize>,
    /// The class's parent and, at its root, its chunk.
    classes: Vec<(usize, Option<u32>)>,
    /// Whether some slot would hold two different chunks.
    conflict: bool,
}

impl Classes {
    fn new(chunks: u32) -> Self {
        Self {
            chunks,
            numbers: HashMap::new(),
            classes: Vec::new(),
            conflict: false,
        }
    }

    fn join(&mut self, data: &Data) {
        if !data.operands().any(|operand| !in_message(operand)) {
            return;
        }
        for k in 0..data.count {
            let mut chunk = data
                .operands()
                .find(|o| in_message(o))
                .map(|o| (o.index + k) % self.chunks);
            let mut root = None;
            for operand in data.operands().filter(|o| !in_message(o)) {
                let number = self.number(*operand, k);
                let other = self.root(number);
                let Some(first) = root else {
                    root = Some(other);
                    continue;
                };
                if first != other {
                    let label = self.classes[other].1;
                    self.classes[other] = (first, None);
                    self.label(first, label);
                }
            }
            if let Some(root) = root {
                self.label(root, chunk.take());
            }
        }
    }

    fn label(&mut self, root: usize, chunk: Option<u32>) {
        match (self.classes[root].1, chunk) {
            (Some(known), Some(chunk)) => self.conflict |= known != chunk,
            (None, Some(chunk)) => self.classes[root].1 = Some(chunk),
            (_, None) => {}
        }
    }

    fn number(&mut self, operand: Operand, k: u32) -> usize {
        let slot = Operand {
            index: operand.index + k,
            ..operand
        };
        let classes = &mut self.classes;
        *self.numbers.entry(slot).or_insert_with(|| {
            classes.push((classes.len(), None));
            classes.len() - 1
        })
    }

    fn root(&mut self, mut number: usize) -> usize {
        while self.classes[number].0 != number {
            let parent = self.classes[number].0;
            self.classes[number].0 = self.classes[parent].0;
            number = parent;
        }
        number
    }

    /// The chunk of the message that the `k`-th chunk of an operation is.
    fn chunk(&mut self, data: &Data, k: u32) -> u32 {
        if let Some(operand) = data.operands().find(|o| in_message(o)) {
            return (operand.index + k) % self.chunks;
        }
        let Some(&operand) = data.operands().next() else {
            return 0;
        };
        let number = self.number(operand, k);
        let root = self.root(number);
        // If nothing tells, the largest chunk there is.
        self.classes[root].1.unwrap_or(0)
    }

    /// The parts of an operation that lie in one block each, and whose chunks follow one another:
    /// `(offset, first chunk, count)`.
    fn pieces(
        &mut self,
        data: &Data,
        single: bool,
    ) -> impl Iterator<Item = (u32, u32, u32)> + use<> {
        let mut pieces: Vec<(u32, u32, u32)> = Vec::new();
        for k in 0..data.count {
            let chunk = self.chunk(data, k);
            let crosses = data
                .operands()
                .any(|o| in_message(o) && (o.index + k).is_multiple_of(self.chunks));
            match pieces.last_mut() {
                Some((_, first, count)) if !single && !crosses && *first + *count == chunk => {
                    *count += 1;
                }
                _ => pieces.push((k, chunk, 1)),
            }
        }
        pieces.into_iter()
    }
}

/// Which of the given operations one is of: its index and, for a loop, those of its operations in it.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) index: u32,
    pub(crate) inner: Vec<u32>,
}

/// The operations of a thread block, or of a loop, with their chunks in place, and where they come from.
fn place(raw: &[Raw], classes: &mut Classes, split_slices: bool) -> (Vec<Op>, Vec<Origin>) {
    let mut ops = Vec::new();
    let mut origins = Vec::new();
    for (index, raw) in (0..).zip(raw) {
        let mut origin = Origin {
            index,
            inner: Vec::new(),
        };
        match raw {
            Raw::Other(op) => ops.push(op.clone()),
            Raw::Loop {
                unit_bytes,
                chunks,
                ops: inner,
            } => {
                let (inner, origins) = place(inner, classes, split_slices);
                origin.inner = origins.iter().map(|origin| origin.index).collect();
                ops.push(Op::Loop {
                    unit_bytes: *unit_bytes,
                    chunks: *chunks,
                    ops: inner,
                });
            }
            Raw::Data(data) => {
                let pieces = classes.pieces(data, split_slices && data.slice.1 > 1);
                let all: Vec<_> = pieces.collect();
                let last = all.len() - 1;
                for (number, (offset, first, count)) in all.into_iter().enumerate() {
                    ops.push(data.piece(offset, first, count, number == last));
                }
            }
        }
        origins.resize(ops.len(), origin);
    }
    (ops, origins)
}

/// What [`place_all`] makes of operations.
pub(crate) struct Placed {
    /// By rank and thread block.
    pub(crate) blocks: Vec<Vec<Vec<Op>>>,
    /// Where each of them comes from.
    pub(crate) origins: Vec<Vec<Vec<Origin>>>,
    pub(crate) scratch_slots: u32,
    pub(crate) packet_slots: u32,
    /// See [`Plan::equal_chunks`](crate::Plan::equal_chunks).
    pub(crate) equal_chunks: bool,
}

/// Places operations (by rank and thread block) in a message of `chunks` chunks. `spare` is how many
/// scratch slots from [`SPARE`] on each rank has in use.
pub(crate) fn place_all(mut raw: Vec<Vec<Vec<Raw>>>, spare: &[u32], chunks: u32) -> Placed {
    let slots = Slots::renumber(&mut raw, spare);
    let mut classes = Classes::new(chunks);
    for data in all_data(&raw) {
        classes.join(data);
    }
    // Slices are of an operation's own chunks. Where one of a group is split, all are: those
    // that hand its data on have the same slices only if they are split alike.
    let sliced = |data: &&Data| data.slice.1 > 1;
    let split_slices = all_data(&raw)
        .filter(sliced)
        .any(|data| classes.pieces(data, false).nth(1).is_some());
    let mut of_rank = |blocks: &Vec<Vec<Raw>>| {
        let of_block = |raw: &Vec<Raw>| place(raw, &mut classes, split_slices);
        blocks.iter().map(of_block).unzip()
    };
    let (blocks, origins) = raw.iter().map(&mut of_rank).unzip();
    Placed {
        blocks,
        origins,
        scratch_slots: slots.plain,
        packet_slots: slots.packets,
        equal_chunks: classes.conflict,
    }
}

/// In place, everything refers to the larger buffer (the input where both are of one size): where
/// chunk `index` of `rank`'s `buffer` lies.
pub(crate) fn in_larger_buffer(
    collective: Collective,
    chunks: u32,
    rank: u32,
    buffer: Buffer,
    index: u32,
) -> (Buffer, u32) {
    // A block of the larger buffer is the smaller one. This cannot pass the larger one's end, which
    // has as many blocks as there are ranks.
    match (collective.is_own_block(), buffer) {
        ((true, _), Buffer::Input) => (Buffer::Output, rank * chunks + index),
        ((_, true), Buffer::Output) => (Buffer::Input, rank * chunks + index),
        // The plan says how large they are; either can be the larger one.
        _ if matches!(collective, Collective::Custom | Collective::Test) => (buffer, index),
        ((false, false), Buffer::Output) => (Buffer::Input, index),
        _ => (buffer, index),
    }
}

impl Data {
    fn piece(&self, offset: u32, first: u32, count: u32, is_last: bool) -> Op {
        let (index, of) = self.slice;
        let chunks = Chunks::new(first, count).sliced(index, of);
        let at = |operand: &Operand| Operand {
            index: operand.index + offset,
            ..*operand
        };
        let all = |operands: &[Operand]| operands.iter().map(at).collect();
        match self.kind {
            Kind::Move { switch } => Op::Move {
                chunks,
                from: at(&self.from[0]),
                to: all(&self.to),
                switch,
            },
            Kind::Reduce { switch, last } => Op::Reduce {
                chunks,
                from: all(&self.from),
                to: all(&self.to),
                last,
                switch,
            },
            // One signal in all, behind everything.
            Kind::Put {
                channel,
                signal,
                flush,
            } => Op::Put {
                chunks,
                from: at(&self.from[0]),
                to: at(&self.to[0]),
                channel,
                signal: signal && is_last,
                flush: flush && is_last,
            },
        }
    }
}
