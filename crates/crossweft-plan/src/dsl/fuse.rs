//! Operator fusion: neighbours in a thread block become one operation where one can do both.
//!
//! | neighbours | become |
//! |---|---|
//! | signals, waits, flushes, acquires, releases of the same kind | one for several channels or semaphores |
//! | a put and the signal or the flush of its port channel | a put that signals, flushes |
//! | moves of one source | one move to several destinations |
//! | moves of chunks that follow one another to such | one move of more chunks |
//! | reductions that go on from one another's result | one reduction of all sources |
//! | a reduction and moves of its result (copies, puts, packets) | one reduction to several destinations |
//! | a switch's reduction and the broadcast of its result | one reduction from all members to all |
//! | a barrier of the block next to what implies one | the latter |
//!
//! An operand keeps its own rank and buffer throughout, so that operands of different buffers can share an
//! operation. Neighbours are only merged once synchronisation is in place: whatever must come between two of them,
//! seen from elsewhere, has its signal or wait there.

use std::collections::{BTreeMap, HashMap};

use super::program::Program;
use super::trace::{Instr, Trace};
use crate::place::{Data, Kind, Raw};
use crate::plan::{Buffer, ChannelKind, Op, Operand};

/// Merges neighbours until there are none left that can be.
pub(super) fn fuse(program: &mut Program) {
    let instrs = std::mem::take(&mut program.trace.instrs);
    let readers = readers(&instrs);
    let mut blocks: BTreeMap<(u32, u32), Vec<Instr>> = BTreeMap::new();
    for instr in instrs {
        let block = blocks.entry((instr.rank, instr.block)).or_default();
        block.push(instr);
    }
    let fusion = Fusion {
        trace: &program.trace,
        readers,
    };
    for block in blocks.values_mut() {
        while fusion.pass(block) {}
    }
    program.trace.instrs = blocks.into_values().flatten().collect();
}

struct Fusion<'a> {
    trace: &'a Trace,
    /// How many operands read each chunk of scratch memory.
    readers: HashMap<Operand, u32>,
}

fn readers(instrs: &[Instr]) -> HashMap<Operand, u32> {
    let mut readers = HashMap::new();
    for instr in instrs {
        let Raw::Data(data) = &instr.raw else {
            continue;
        };
        for from in data
            .from
            .iter()
            .filter(|from| from.buffer == Buffer::Scratch)
        {
            for chunk in chunks(from, data.count) {
                *readers.entry(chunk).or_default() += 1;
            }
        }
    }
    readers
}

fn chunks(operand: &Operand, count: u32) -> impl Iterator<Item = Operand> + use<> {
    let operand = *operand;
    (0..count).map(move |k| Operand {
        index: operand.index + k,
        ..operand
    })
}

impl Fusion<'_> {
    /// Whether anything was merged.
    fn pass(&self, block: &mut Vec<Instr>) -> bool {
        let before = block.len();
        let mut merged: Vec<Instr> = Vec::with_capacity(before);
        for instr in block.drain(..) {
            if let Some(last) = merged.last_mut()
                && last.in_loop == instr.in_loop
                && let Some(raw) = self.merge(&last.raw, &instr.raw)
                // A loop's turns each handle a piece of an instruction's data: of more chunks, other pieces.
                && (last.in_loop.is_none() || chunk_count(&raw) == chunk_count(&last.raw))
            {
                last.raw = raw;
            } else {
                merged.push(instr);
            }
        }
        *block = merged;
        block.len() < before
    }

    /// What does both, one after the other.
    fn merge(&self, a: &Raw, b: &Raw) -> Option<Raw> {
        match (a, b) {
            (Raw::Other(a), Raw::Other(Op::Sync)) if syncs_behind(a) => Some(Raw::Other(a.clone())),
            (Raw::Data(a), Raw::Other(Op::Sync)) if is_put(a) => Some(Raw::Data(a.clone())),
            (Raw::Other(Op::Sync), Raw::Other(b)) if syncs_before(b) => Some(Raw::Other(b.clone())),
            (Raw::Other(Op::Sync), Raw::Data(b)) if is_put(b) => Some(Raw::Data(b.clone())),
            (Raw::Other(a), Raw::Other(b)) => self.merge_ids(a, b).map(Raw::Other),
            (Raw::Data(a), Raw::Other(b)) => merge_request(a, b).map(Raw::Data),
            (Raw::Data(a), Raw::Data(b)) => self.merge_data(a, b).map(Raw::Data),
            _ => None,
        }
    }

    fn merge_ids(&self, a: &Op, b: &Op) -> Option<Op> {
        match (a, b) {
            (
                Op::Signal {
                    channels: a,
                    relaxed,
                },
                Op::Signal {
                    channels: b,
                    relaxed: other,
                },
            ) if relaxed == other => Some(Op::Signal {
                channels: self.union_of_channels(a, b)?,
                relaxed: *relaxed,
            }),
            (
                Op::Wait {
                    channels: a,
                    relaxed,
                },
                Op::Wait {
                    channels: b,
                    relaxed: other,
                },
            ) if relaxed == other => Some(Op::Wait {
                channels: self.union_of_channels(a, b)?,
                relaxed: *relaxed,
            }),
            (Op::Flush { channels: a }, Op::Flush { channels: b }) => Some(Op::Flush {
                channels: self.union_of_channels(a, b)?,
            }),
            (Op::Acquire { semaphores: a }, Op::Acquire { semaphores: b }) => Some(Op::Acquire {
                semaphores: union(a, b)?,
            }),
            (Op::Release { semaphores: a }, Op::Release { semaphores: b }) => Some(Op::Release {
                semaphores: union(a, b)?,
            }),
            _ => None,
        }
    }

    fn union_of_channels(&self, a: &[u32], b: &[u32]) -> Option<Vec<u32>> {
        let kind = |id: &u32| self.trace.ends[*id as usize].kind;
        let kinds: Vec<ChannelKind> = a.iter().chain(b).map(kind).collect();
        kinds
            .windows(2)
            .all(|pair| pair[0] == pair[1])
            .then_some(())?;
        union(a, b)
    }

    fn merge_data(&self, a: &Data, b: &Data) -> Option<Data> {
        if let Some(data) = follow_on(a, b) {
            return Some(data);
        }
        if (a.count, a.slice) != (b.count, b.slice) {
            return None;
        }
        match (a.kind, b.kind) {
            (Kind::Move { switch: None }, Kind::Move { switch: None }) => {
                let same = a.from == b.from && apart(&a.to, &a.from, a.count);
                (same && apart(&b.to, &a.to, a.count)).then(|| Data {
                    to: [&a.to[..], &b.to].concat(),
                    ..a.clone()
                })
            }
            (Kind::Reduce { last, .. }, Kind::Move { switch }) => {
                let result = b.from[0];
                if !a.to.contains(&result) || !apart(&b.to, &a.to, a.count) {
                    return None;
                }
                if !exact_or_apart(&b.to, &a.from, a.count) {
                    return None;
                }
                let is_dead = switch.is_some() && a.to.len() == 1 && self.is_dead(&result, a);
                let kept = if is_dead { &[][..] } else { &a.to };
                let hint = switch.filter(|_| self.is_of_switch(a, b));
                // Without the switch, its members are written one by one: as before.
                Some(Data {
                    kind: Kind::Reduce { switch: hint, last },
                    to: [kept, &b.to].concat(),
                    ..a.clone()
                })
            }
            (Kind::Reduce { last: false, .. }, Kind::Reduce { last, .. }) => {
                let [result] = a.to[..] else { return None };
                let others: Vec<Operand> =
                    b.from.iter().copied().filter(|o| *o != result).collect();
                let goes_on = b.to == a.to && others.len() + 1 == b.from.len();
                // It would wait for packets that may only come in answer to what it does first.
                let answers = a.to.iter().any(|to| to.buffer == Buffer::Packets);
                if !goes_on || answers || !apart(&others, &a.to, a.count) {
                    return None;
                }
                // Packets in front, as all reductions have them.
                let all = a.from.iter().chain(&others).copied();
                let (packets, rest): (Vec<_>, Vec<_>) =
                    all.partition(|from| from.buffer == Buffer::Packets);
                Some(Data {
                    kind: Kind::Reduce { switch: None, last },
                    from: [packets, rest].concat(),
                    ..a.clone()
                })
            }
            _ => None,
        }
    }

    /// Whether a reduction comes from the switch that its result goes to.
    fn is_of_switch(&self, a: &Data, b: &Data) -> bool {
        match (a.kind, b.kind) {
            (
                Kind::Reduce {
                    switch: Some(a), ..
                },
                Kind::Move { switch: Some(b) },
            ) => {
                let (a, b) = (
                    &self.trace.groups[a as usize],
                    &self.trace.groups[b as usize],
                );
                (&a.ranks, a.buffer) == (&b.ranks, b.buffer)
            }
            _ => false,
        }
    }

    /// Whether nobody but the next instruction reads the result.
    fn is_dead(&self, result: &Operand, data: &Data) -> bool {
        result.buffer == Buffer::Scratch
            && chunks(result, data.count).all(|chunk| self.readers.get(&chunk) == Some(&1))
    }
}

fn is_put(data: &Data) -> bool {
    matches!(data.kind, Kind::Put { .. })
}

/// Whether the threads of the block meet at its end.
pub(super) fn syncs_behind(op: &Op) -> bool {
    matches!(
        op,
        Op::Wait { .. } | Op::Acquire { .. } | Op::Flush { .. } | Op::Barrier { .. } | Op::Sync
    )
}

/// Whether the threads of the block meet at its beginning.
pub(super) fn syncs_before(op: &Op) -> bool {
    matches!(
        op,
        Op::Signal { .. } | Op::Release { .. } | Op::Flush { .. } | Op::Barrier { .. } | Op::Sync
    )
}

/// Both; `None` if something is in both, which an operation cannot do twice.
fn union(a: &[u32], b: &[u32]) -> Option<Vec<u32>> {
    let apart = b.iter().all(|id| !a.contains(id));
    apart.then(|| [a, b].concat())
}

/// A put, and a signal or flush of its channel.
fn merge_request(a: &Data, b: &Op) -> Option<Data> {
    let Kind::Put {
        channel,
        signal,
        flush,
    } = a.kind
    else {
        return None;
    };
    let kind = match b {
        Op::Signal { channels, .. } if !signal && !flush && channels[..] == [channel] => {
            Kind::Put {
                channel,
                signal: true,
                flush,
            }
        }
        Op::Flush { channels } if channels[..] == [channel] => Kind::Put {
            channel,
            signal,
            flush: true,
        },
        _ => return None,
    };
    Some(Data { kind, ..a.clone() })
}

/// Chunks that an instruction on data handles.
fn chunk_count(raw: &Raw) -> Option<u32> {
    match raw {
        Raw::Data(data) => Some(data.count),
        _ => None,
    }
}

/// Moves of chunks that follow one another.
fn follow_on(a: &Data, b: &Data) -> Option<Data> {
    let whole = a.slice == (0, 1) && b.slice == (0, 1);
    let kinds = (a.kind, b.kind);
    if !whole || kinds != (Kind::Move { switch: None }, Kind::Move { switch: None }) {
        return None;
    }
    let follows = |(x, y): (&Operand, &Operand)| {
        let behind = Operand {
            index: x.index + a.count,
            ..*x
        };
        behind == *y
    };
    // Packets of one may only come in answer to the other.
    let received = a.from[0].buffer == Buffer::Packets;
    let all = a.to.len() == b.to.len() && a.to.iter().zip(&b.to).all(follows);
    let (count, more) = (a.count, b.count);
    let merged = Data {
        count: count + more,
        ..a.clone()
    };
    // What is moved later must not be what was moved first, or the order would be lost.
    let independent = apart(&merged.to, &merged.from, merged.count);
    (!received && all && follows((&a.from[0], &b.from[0])) && independent).then_some(merged)
}

/// Whether operands of `count` chunks do not overlap.
fn apart(some: &[Operand], others: &[Operand], count: u32) -> bool {
    some.iter()
        .all(|a| others.iter().all(|b| distance(a, b) >= count))
}

fn exact_or_apart(some: &[Operand], others: &[Operand], count: u32) -> bool {
    let fits = |distance| distance == 0 || distance >= count;
    some.iter()
        .all(|a| others.iter().all(|b| fits(distance(a, b))))
}

/// Chunks from the one to the other; as many as there can be if they are in different buffers.
fn distance(a: &Operand, b: &Operand) -> u32 {
    if (a.rank, a.buffer) == (b.rank, b.buffer) {
        a.index.abs_diff(b.index)
    } else {
        u32::MAX
    }
}
