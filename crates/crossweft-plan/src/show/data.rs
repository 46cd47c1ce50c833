//! What the page's script reads.

use std::collections::HashMap;

use serde::Serialize;

use super::Options;
use crate::check::Diagnostic;
use crate::cost::{Reason, Timeline, Topology};
use crate::plan::{Buffer, ChannelKind, Op, Operand, Plan};
use crate::{InPlace, plan};

/// All but the timelines.
#[derive(Serialize)]
struct Head<'a> {
    name: &'a str,
    collective: &'static str,
    ranks: u32,
    chunks: u32,
    /// More about it, in words.
    facts: Vec<String>,
    machine: &'a str,
    topology: String,
    /// Of the launch and of each operation, ns.
    launch: u64,
    op: u64,
    faults: Vec<Fault<'a>>,
    /// By rank: `(peer, whether it is a port)`.
    channels: Vec<Vec<(u32, u8)>>,
    /// `(rank, block, operations)`, in the order of the operations.
    lanes: Vec<(u32, u32, usize)>,
    ops: Vec<OpData>,
    sources: Vec<&'a str>,
    /// `(bytes, ns)`.
    sweep: Vec<(u64, Option<u64>)>,
}

#[derive(Serialize)]
struct Fault<'a> {
    rank: Option<u32>,
    block: Option<u32>,
    op: Option<u32>,
    code: &'static str,
    message: &'a str,
}

/// `(rank, buffer, index)`.
type Place = (u32, u8, u32);

/// An operation, one of a loop's with the loop.
#[derive(Default, Serialize)]
struct OpData {
    /// Name.
    n: &'static str,
    /// Index in the block.
    o: u32,
    /// Index in the loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    i: Option<u32>,
    /// First chunk, number, slice, of how many.
    #[serde(skip_serializing_if = "Option::is_none")]
    c: Option<(u32, u32, u32, u32)>,
    /// Read from.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    f: Vec<Place>,
    /// Written to.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    t: Vec<Place>,
    /// Channels or semaphores.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    h: Vec<u32>,
    /// Barrier and its blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    b: Option<(u32, u32)>,
    /// Loop: bytes of a piece, chunks.
    #[serde(skip_serializing_if = "Option::is_none")]
    l: Option<(u64, u32)>,
    /// What else is to be said of it.
    #[serde(skip_serializing_if = "str::is_empty")]
    x: &'static str,
    /// Index of its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<usize>,
}

/// One size. Times are ns.
#[derive(Serialize)]
struct TimelineData<'a> {
    bytes: u64,
    total: Option<u64>,
    /// When the last that is over at all is over.
    end: u64,
    /// The operation of each step; nothing if as in the timeline before.
    ops: Option<&'a [usize]>,
    /// Of each step, until it was ready and from then to its end; -1 twice if it has none.
    spans: Vec<i64>,
    /// Bytes of each step.
    moved: Vec<u64>,
    /// The steps that links or memory limit.
    bound: Vec<usize>,
    /// From step, to step, kind; nothing if as in the timeline before.
    edges: Option<&'a [usize]>,
    /// Step, reason, from, to.
    path: Vec<u64>,
}

/// The JSON, and how many timelines are in it; `None` if there is no room for one.
pub(super) fn encode(
    plan: &Plan,
    found: &[Diagnostic],
    topology: &Topology,
    options: &Options,
    timelines: &[Timeline],
    sweep: &[(u64, Option<f64>)],
    room: usize,
) -> Option<(String, usize)> {
    let head = json(&head(plan, found, topology, options, sweep));
    let ids = ids(plan);
    // The object's end is opened again for the timelines.
    let mut text = head.strip_suffix('}')?.to_owned() + ",\"timelines\":[";
    const END: usize = 64;
    let mut before: (Vec<usize>, Vec<usize>) = Default::default();
    let mut drawn = 0;
    for timeline in timelines {
        let ops: Vec<usize> = (timeline.steps.iter())
            .map(|step| ids[&(step.rank, step.block, step.op, step.inner)])
            .collect();
        let edges: Vec<usize> = (timeline.edges.iter())
            .flat_map(|edge| [edge.from, edge.to, number(edge.kind)])
            .collect();
        let part = json(&TimelineData {
            bytes: timeline.message_bytes,
            total: timeline.total_us.map(ns),
            end: end(timeline),
            ops: (drawn == 0 || ops != before.0).then_some(&ops),
            spans: spans(timeline),
            moved: timeline.steps.iter().map(|step| step.bytes).collect(),
            bound: (0..timeline.steps.len())
                .filter(|step| timeline.steps[*step].link_bound)
                .collect(),
            edges: (drawn == 0 || edges != before.1).then_some(&edges),
            path: path(timeline),
        });
        if text.len() + part.len() + END > room {
            break;
        }
        if drawn > 0 {
            text.push(',');
        }
        text.push_str(&part);
        before = (ops, edges);
        drawn += 1;
    }
    text.push_str(&format!("],\"dropped\":{}}}", timelines.len() - drawn));
    (drawn > 0).then_some((text, drawn))
}

/// As JSON that may stand in a script element.
fn json(value: &impl Serialize) -> String {
    // Only maps with keys that are not strings cannot be written, and there are none.
    let text = serde_json::to_string(value).unwrap_or_default();
    text.replace('<', "\\u003c")
}

fn ns(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}

fn head<'a>(
    plan: &'a Plan,
    found: &'a [Diagnostic],
    topology: &'a Topology,
    options: &'a Options,
    sweep: &[(u64, Option<f64>)],
) -> Head<'a> {
    let mut sources = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    let mut lanes = Vec::new();
    let mut ops = Vec::new();
    for (rank, program) in (0..).zip(&plan.ranks) {
        for (block, of_block) in (0..).zip(&program.blocks) {
            let first = ops.len();
            for (index, op) in (0..).zip(of_block) {
                let source = options.sources.get(&(rank, block, index)).map(|source| {
                    *known.entry(source).or_insert_with(|| {
                        sources.push(source.as_str());
                        sources.len() - 1
                    })
                });
                let looped = match op {
                    Op::Loop {
                        unit_bytes, chunks, ..
                    } => Some((*unit_bytes, *chunks)),
                    _ => None,
                };
                for (inner, op) in (0..).zip(op.flatten()) {
                    ops.push(OpData {
                        n: op.name(),
                        o: index,
                        i: looped.map(|_| inner),
                        l: looped,
                        s: source,
                        ..describe(op)
                    });
                }
            }
            lanes.push((rank, block, ops.len() - first));
        }
    }
    Head {
        name: &plan.name,
        collective: plan.collective.name(),
        ranks: plan.world_size(),
        chunks: plan.chunks,
        facts: facts(plan),
        machine: &topology.name,
        topology: topology.to_json(),
        launch: ns(topology.costs.launch_us),
        op: ns(topology.costs.op_us),
        faults: found.iter().map(fault).collect(),
        channels: (plan.ranks.iter())
            .map(|program| {
                let end = |channel: &plan::Channel| {
                    (channel.peer, u8::from(channel.kind == ChannelKind::Port))
                };
                program.channels.iter().map(end).collect()
            })
            .collect(),
        lanes,
        ops,
        sources,
        sweep: sweep
            .iter()
            .map(|(bytes, us)| (*bytes, us.map(ns)))
            .collect(),
    }
}

fn facts(plan: &Plan) -> Vec<String> {
    let mut facts = vec![
        match plan.reduce_op {
            Some(op) => format!("reduces with {}", op.name()),
            None => "any reduce operation".to_owned(),
        },
        match plan.in_place {
            InPlace::Any => "in place or not".to_owned(),
            InPlace::Required => "in place".to_owned(),
            InPlace::Forbidden => "out of place".to_owned(),
        },
    ];
    for (slots, what) in [
        (plan.scratch_slots, "scratch slots"),
        (plan.packet_slots, "packet slots"),
    ] {
        if slots > 0 {
            facts.push(format!("{slots} {what}"));
        }
    }
    facts
}

fn fault(diagnostic: &Diagnostic) -> Fault<'_> {
    Fault {
        rank: diagnostic.rank,
        block: diagnostic.thread_block,
        op: diagnostic.op,
        code: diagnostic.code.name(),
        message: &diagnostic.message,
    }
}

fn describe(op: &Op) -> OpData {
    let place = |operand: &Operand| {
        let buffer = match operand.buffer {
            Buffer::Input => 0,
            Buffer::Output => 1,
            Buffer::Scratch => 2,
            Buffer::Packets => 3,
        };
        (operand.rank, buffer, operand.index)
    };
    let (from, to) = op.operands();
    let data = OpData {
        c: op.chunks().map(|chunks| {
            let (slice, of) = chunks.slice;
            (chunks.first, chunks.count, slice, of)
        }),
        f: from.iter().map(place).collect(),
        t: to.iter().map(place).collect(),
        ..OpData::default()
    };
    match op {
        Op::Reduce { last: true, .. } => OpData { x: "last", ..data },
        Op::Signal { channels, relaxed } | Op::Wait { channels, relaxed } => OpData {
            h: channels.clone(),
            x: if *relaxed { "relaxed" } else { "" },
            ..data
        },
        Op::Put {
            channel,
            signal,
            flush,
            ..
        } => OpData {
            h: vec![*channel],
            x: match (signal, flush) {
                (true, true) => "with signal and flush",
                (true, false) => "with signal",
                (false, true) => "with flush",
                (false, false) => "",
            },
            ..data
        },
        Op::Flush { channels } => OpData {
            h: channels.clone(),
            ..data
        },
        Op::Acquire { semaphores } | Op::Release { semaphores } => OpData {
            h: semaphores.clone(),
            ..data
        },
        Op::Barrier { id, blocks } => OpData {
            b: Some((*id, *blocks)),
            ..data
        },
        _ => data,
    }
}

/// Rank, block, index, index in a loop.
type Id = (u32, u32, u32, Option<u32>);

/// The index of each operation among those of the head.
fn ids(plan: &Plan) -> HashMap<Id, usize> {
    let mut ids = HashMap::new();
    for (rank, program) in (0..).zip(&plan.ranks) {
        for (block, of_block) in (0..).zip(&program.blocks) {
            for (index, op) in (0..).zip(of_block) {
                for (inner, _) in (0..).zip(op.flatten()) {
                    let inner = matches!(op, Op::Loop { .. }).then_some(inner);
                    let next = ids.len();
                    ids.insert((rank, block, index, inner), next);
                }
            }
        }
    }
    ids
}

fn spans(timeline: &Timeline) -> Vec<i64> {
    let mut spans = Vec::with_capacity(2 * timeline.steps.len());
    for step in &timeline.steps {
        // Differences of rounded times, so that they add up.
        let (start, ready) = (ns(step.start_us), ns(step.ready_us));
        match step.end_us {
            Some(end) => {
                spans.extend([(ready - start) as i64, ns(end).saturating_sub(ready) as i64]);
            }
            None => spans.extend([-1, -1]),
        }
    }
    spans
}

fn end(timeline: &Timeline) -> u64 {
    let ends = timeline.steps.iter().map(|step| match step.end_us {
        Some(end) => ns(end),
        // Something to see of one that waits for ever.
        None => ns(step.start_us) + ns(step.start_us) / 4,
    });
    ends.max().unwrap_or(0)
}

fn path(timeline: &Timeline) -> Vec<u64> {
    let hops = timeline.critical_path.iter();
    hops.flat_map(|hop| {
        let reason = number(hop.reason) as u64;
        [hop.step as u64, reason, ns(hop.from_us), ns(hop.to_us)]
    })
    .collect()
}

/// The script's `KINDS` in its order.
fn number(reason: Reason) -> usize {
    match reason {
        Reason::Launch => 0,
        Reason::Order => 1,
        Reason::Signal => 2,
        Reason::Packets => 3,
        Reason::Put => 4,
        Reason::Semaphore => 5,
        Reason::Barrier => 6,
    }
}
