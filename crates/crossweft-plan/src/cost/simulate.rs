//! The simulation: events in order of time, one queue.
//!
//! What takes time beside its thread block is a [`Transfer`]: it is over when all its parts are, each an event
//! of its own, because how long a link takes depends on who comes after.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use crossweft_device::extent::{GRANULE, chunk_bytes};
use crossweft_device::packet::{PAYLOAD, WORD};

use super::shared::{Shared, Time};
use super::{Edge, Hop, Reason, Step, Timeline, Topology};
use crate::check::compile::{Action, Compiled, Data, Geometry, Place, Slots, Steps};
use crate::plan::{Chunks, InPlace, Op, Plan};

fn ps(us: f64) -> Time {
    (us * 1e6).round() as Time
}

fn us(time: Time) -> f64 {
    time as f64 / 1e6
}

/// Time of `bytes` at `gbps` GB/s.
fn transfer(bytes: u64, gbps: f64) -> Time {
    (bytes as f64 * 1000.0 / gbps).round() as Time
}

/// Steps of one execution, before any is found to have nothing to do.
pub(super) fn steps(plan: &Plan, bytes: u64) -> u64 {
    let chunk = chunk_bytes(bytes, plan.chunks);
    let of = |op: &Op| match op {
        Op::Loop {
            unit_bytes,
            chunks,
            ops,
        } => {
            let pieces = (chunk * u64::from(*chunks)).div_ceil(*unit_bytes);
            pieces.saturating_mul(ops.len() as u64)
        }
        _ => 1,
    };
    let blocks = plan.ranks.iter().flat_map(|rank| &rank.blocks);
    blocks.flatten().map(of).fold(0, u64::saturating_add)
}

/// Microseconds that one execution of so many steps cannot pass, whatever waits for what: all of it one behind the other.
pub(super) fn longest_us(plan: &Plan, topology: &Topology, bytes: u64, steps: u64) -> f64 {
    let Topology {
        node,
        network,
        memory,
        costs,
        ..
    } = topology;
    let cache = memory.cache.map(|cache| cache.block_gbps);
    let slowest = [
        node.gbps,
        network.gbps,
        memory.block_gbps,
        memory.block_packet_gbps,
        memory.rank_gbps,
        cache.unwrap_or(memory.block_gbps),
    ];
    let slowest = slowest.into_iter().fold(f64::INFINITY, f64::min);
    let chunk = chunk_bytes(bytes, plan.chunks) as f64;
    let of = |(_, op): (u32, &Op)| {
        let (from, to) = op.operands();
        let Chunks { count, slice, .. } = op.chunks()?;
        let bytes = chunk * f64::from(count) / f64::from(slice.1) + GRANULE as f64;
        Some(bytes * (from.len() + to.len()) as f64)
    };
    let moved: f64 = plan.all_ops().filter_map(of).sum();
    // By its thread block, and over the links of two ranks.
    let moving = 3.0 * memory.packet_bytes * moved / slowest / 1000.0;
    let each = [
        2.0 * node.latency_us,
        2.0 * network.latency_us,
        costs.op_us,
        costs.signal_us,
        costs.wait_us,
        costs.packet_us,
        costs.semaphore_us,
        costs.barrier_us,
        costs.proxy_us,
    ];
    let each: f64 = each.into_iter().sum();
    costs.launch_us + moving + each * steps as f64
}

/// Something on which another thing waited, and when it let go.
#[derive(Clone, Copy, Debug)]
struct Cause {
    step: usize,
    reason: Reason,
    at: Time,
}

/// What is known of a step.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    start: Time,
    ready: Time,
    end: Option<Time>,
    /// Why it was not ready earlier; `None` at the launch.
    ready_after: Option<Cause>,
    /// Why it was not over earlier, if that was another step.
    over_after: Option<Cause>,
    /// Whether a link or memory was the last to be done with it.
    link_bound: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A block looks at its next step.
    Look(usize),
    /// A counter is one higher.
    Arrival {
        counter: usize,
        step: usize,
        sent: Time,
        by_port: bool,
    },
    /// A transfer's thread block has done its part.
    Own(usize),
    /// A transfer has read the last packets of another one.
    Read { transfer: usize, writer: usize },
    /// A proxy begins with a transfer.
    Begin(usize),
    /// A shared resource is done with something, if nothing has changed since.
    Served { resource: usize, version: u64 },
}

/// A counter: what has arrived and was not taken.
#[derive(Debug, Default)]
struct Counter {
    /// Of what a semaphore has at first: what was not taken.
    initial: u32,
    /// The step that sent it, when, and whether by a proxy.
    arrived: VecDeque<Signal>,
    /// Blocks that wait, each with the step that does.
    waiting: Vec<(usize, usize)>,
}

#[derive(Clone, Copy, Debug)]
struct Signal {
    step: usize,
    sent: Time,
    arrived: Time,
    by_port: bool,
}

/// Packets that were written, or are being.
#[derive(Clone, Copy, Debug)]
struct Packets {
    end: u64,
    writer: usize,
    /// When the first can be read.
    first: Time,
}

/// Data on its way.
#[derive(Debug)]
struct Transfer {
    block: usize,
    step: usize,
    /// When its writer, or whoever asked for it, let go.
    sent: Time,
    /// Parts that are not done.
    open: usize,
    /// What each shared resource takes for it, alone.
    demands: Vec<(usize, Time)>,
    /// Added at the end.
    latency: Time,
    /// The port that it goes through, and whom that signals.
    port: Option<(usize, Option<usize>)>,
    /// When its last packets have left.
    left: Option<Time>,
    /// Those who read its packets.
    readers: Vec<usize>,
}

/// A thread block's requests to a proxy on one channel: they arrive in order.
#[derive(Debug, Default)]
struct Port {
    /// Transfers, and when they would arrive.
    under_way: VecDeque<(usize, Option<Time>)>,
    /// When the last one has arrived.
    arrived: Time,
    /// When that is known here.
    known: Time,
    step: usize,
    /// Blocks that wait until nothing is under way.
    flushing: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    latency: Time,
    gbps: f64,
    /// Index of its first resource among a rank's.
    resource: usize,
}

/// Resources of a rank: its memory, then out and in of each kind of link.
const RESOURCES: usize = 5;
const MEMORY: usize = 0;
const NODE: usize = 1;
const NETWORK: usize = 3;

/// Topology constants in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Costs {
    launch: Time,
    op: Time,
    signal: Time,
    wait: Time,
    packet: Time,
    semaphore: Time,
    barrier: Time,
    proxy: Time,
}

struct Simulation<'a> {
    topology: &'a Topology,
    nodes: &'a [u32],
    costs: Costs,
    block_gbps: f64,
    compiled: &'a Compiled,
    program: &'a [Steps],
    rank_of: Vec<u32>,
    /// Index of each block's first step.
    first_step: Vec<usize>,
    /// The step that each block is at.
    at: Vec<usize>,
    records: Vec<Record>,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    scheduled: u64,
    counters: Vec<Counter>,
    packets: BTreeMap<u64, Packets>,
    /// By rank: blocks that wait for packets.
    readers: Vec<Vec<usize>>,
    transfers: Vec<Transfer>,
    resources: Vec<Shared>,
    ports: Vec<Port>,
    /// By rank: when its proxy has done all requests.
    proxies: Vec<Time>,
    /// By block: the put that it has asked for and waits for.
    asked: Vec<Option<usize>>,
    barriers: Vec<Vec<usize>>,
    edges: Vec<Edge>,
}

pub(super) fn simulate(plan: &Plan, topology: &Topology, nodes: &[u32], bytes: u64) -> Timeline {
    let geometry = Geometry {
        messages: vec![bytes.div_ceil(GRANULE)],
        pieces: units(plan),
        aliased: plan.in_place == InPlace::Required,
        slots: Slots::Packed,
    };
    let compiled = Compiled::new(plan, &geometry);
    let mut simulation = Simulation::new(plan, topology, nodes, bytes, &compiled);
    simulation.run();
    simulation.timeline(bytes)
}

/// Each loop's piece, in granules.
fn units(plan: &Plan) -> HashMap<u64, u64> {
    let ops = plan
        .ranks
        .iter()
        .flat_map(|rank| rank.blocks.iter().flatten());
    ops.filter_map(|op| match op {
        Op::Loop { unit_bytes, .. } => Some((*unit_bytes, unit_bytes / GRANULE)),
        _ => None,
    })
    .collect()
}

/// Whether the buffers of a node's ranks are larger than its cache.
fn outgrows(plan: &Plan, nodes: &[u32], bytes: u64, cache: u64) -> bool {
    let chunk = chunk_bytes(bytes, plan.chunks);
    let blocks = u64::from(plan.input_blocks) + u64::from(plan.output_blocks);
    let slots = u64::from(plan.scratch_slots) + u64::from(plan.packet_slots) * (WORD / PAYLOAD);
    let rank = bytes
        .saturating_mul(blocks)
        .saturating_add(chunk.saturating_mul(slots));
    let mut ranks: BTreeMap<u32, u64> = BTreeMap::new();
    for node in nodes {
        *ranks.entry(*node).or_default() += 1;
    }
    let largest = ranks.values().max().copied().unwrap_or(1);
    rank.saturating_mul(largest) > cache
}

impl<'a> Simulation<'a> {
    fn new(
        plan: &Plan,
        topology: &'a Topology,
        nodes: &'a [u32],
        bytes: u64,
        compiled: &'a Compiled,
    ) -> Self {
        let program = &compiled.programs[0];
        let mut first_step = vec![0];
        for block in program {
            first_step.push(first_step[first_step.len() - 1] + block.steps.len());
        }
        let mut rank_of = Vec::with_capacity(program.len());
        for (rank, of_rank) in (0..).zip(&plan.ranks) {
            rank_of.resize(rank_of.len() + of_rank.blocks.len(), rank);
        }
        let ranks = plan.ranks.len();
        let costs = &topology.costs;
        let memory = &topology.memory;
        let cache = memory.cache.as_ref();
        let beyond = cache.filter(|cache| outgrows(plan, nodes, bytes, cache.bytes));
        Self {
            topology,
            nodes,
            costs: Costs {
                launch: ps(costs.launch_us),
                op: ps(costs.op_us),
                signal: ps(costs.signal_us),
                wait: ps(costs.wait_us),
                packet: ps(costs.packet_us),
                semaphore: ps(costs.semaphore_us),
                barrier: ps(costs.barrier_us),
                proxy: ps(costs.proxy_us),
            },
            block_gbps: beyond.map_or(memory.block_gbps, |cache| cache.block_gbps),
            compiled,
            program,
            rank_of,
            at: first_step[..program.len()].to_vec(),
            records: vec![Record::default(); first_step[program.len()]],
            first_step,
            events: BinaryHeap::new(),
            scheduled: 0,
            counters: (compiled.counters.iter())
                .map(|info| Counter {
                    initial: info.initial,
                    ..Counter::default()
                })
                .collect(),
            packets: BTreeMap::new(),
            readers: vec![Vec::new(); ranks],
            transfers: Vec::new(),
            resources: vec![Shared::default(); ranks * RESOURCES],
            ports: compiled.ports.iter().map(|_| Port::default()).collect(),
            proxies: vec![0; ranks],
            asked: vec![None; program.len()],
            barriers: vec![Vec::new(); compiled.barriers],
            edges: Vec::new(),
        }
    }

    fn run(&mut self) {
        for block in 0..self.program.len() {
            self.come_to_next(block, self.costs.launch, None);
        }
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            match event {
                Event::Look(block) => self.look(block, now),
                Event::Arrival {
                    counter,
                    step,
                    sent,
                    by_port,
                } => {
                    let signal = Signal {
                        step,
                        sent,
                        arrived: now,
                        by_port,
                    };
                    self.counters[counter].arrived.push_back(signal);
                    for (block, step) in std::mem::take(&mut self.counters[counter].waiting) {
                        // It may have waited for several, and be gone by now; or wait on.
                        if self.at[block] == step {
                            self.look(block, now);
                        }
                    }
                }
                Event::Own(transfer) => self.part_done(transfer, now, None, false),
                Event::Read { transfer, writer } => {
                    let writer = &self.transfers[writer];
                    // A proxy's work is no step's: it counts from when it was asked.
                    let left = writer.left.filter(|_| writer.port.is_none());
                    let cause = Cause {
                        step: writer.step,
                        reason: writer.reason(),
                        at: left.unwrap_or(writer.sent),
                    };
                    self.part_done(transfer, now, Some(cause), false);
                }
                Event::Begin(transfer) => self.begin(transfer, now),
                Event::Served { resource, version } => {
                    if self.resources[resource].version == version {
                        let done = self.resources[resource].done(now);
                        self.serve_next(resource);
                        for transfer in done {
                            self.part_done(transfer, now, None, true);
                        }
                    }
                }
            }
        }
    }

    fn schedule(&mut self, time: Time, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((time, self.scheduled, event)));
    }

    /// The block comes to the step it is at, if there is one.
    fn come_to_next(&mut self, block: usize, now: Time, after: Option<usize>) {
        let step = self.at[block];
        if step == self.first_step[block + 1] {
            return;
        }
        let record = &mut self.records[step];
        record.start = now;
        record.ready_after = after.map(|step| Cause {
            step,
            reason: Reason::Order,
            at: now,
        });
        self.schedule(now + self.costs.op, Event::Look(block));
    }

    /// The block's step is over at `end`; it was ready at `ready`.
    fn done(&mut self, block: usize, ready: Time, end: Time) {
        let step = self.at[block];
        let record = &mut self.records[step];
        record.ready = ready;
        record.end = Some(end);
        self.at[block] += 1;
        self.come_to_next(block, end, Some(step));
    }

    /// Begins the block's step if what it needs is there.
    fn look(&mut self, block: usize, now: Time) {
        let step = self.at[block];
        let action = &self.program[block].steps[step - self.first_step[block]].1;
        let rank = self.rank_of[block];
        match action {
            Action::Data { data, .. } => self.data(block, now, data),
            Action::Signal { inboxes, .. } => {
                let end = now + self.costs.signal;
                for (inbox, port) in inboxes {
                    match port {
                        Some(port) => self.put(block, now, *port, None, Some(*inbox)),
                        None => {
                            let to = self.compiled.counters[*inbox].rank;
                            let time = end + self.link(rank, to).latency;
                            self.send(*inbox, step, end, time, false);
                        }
                    }
                }
                self.done(block, now, end);
            }
            Action::Wait { inboxes, .. } => self.take(block, now, inboxes, self.costs.wait),
            Action::Acquire { semaphores } => self.take(block, now, semaphores, 0),
            Action::Release { semaphores } => {
                for id in semaphores {
                    self.send(*id, step, now, now + self.costs.semaphore, false);
                }
                self.done(block, now, now);
            }
            Action::Put {
                port,
                data,
                inbox,
                flush,
            } => {
                if self.asked[block] != Some(step) {
                    self.asked[block] = Some(step);
                    self.records[step].ready = now;
                    self.put(block, now, *port, data.as_ref(), *inbox);
                }
                let ready = self.records[step].ready;
                if !flush {
                    self.done(block, ready, now);
                } else if let Some(known) = self.flushed(block, &[*port]) {
                    self.done(block, ready, known.max(now));
                }
            }
            Action::Flush { ports } => {
                let Some(known) = self.flushed(block, ports) else {
                    return;
                };
                let last = ports.iter().map(|port| &self.ports[*port]);
                let last = last
                    .max_by_key(|port| port.known)
                    .map_or(step, |port| port.step);
                let looked = self.records[step].start + self.costs.op;
                if known > looked {
                    self.records[step].over_after = Some(Cause {
                        step: last,
                        reason: Reason::Put,
                        at: self.records[last].end.unwrap_or(looked),
                    });
                }
                let ready = known.max(looked);
                self.done(block, ready, ready + self.costs.wait);
            }
            Action::Barrier { id, blocks } => {
                self.barriers[*id].push(block);
                if self.barriers[*id].len() < *blocks {
                    return;
                }
                let end = now + self.costs.barrier;
                for other in std::mem::take(&mut self.barriers[*id]) {
                    let met = self.at[other];
                    if other != block {
                        let cause = Cause {
                            step,
                            reason: Reason::Barrier,
                            at: now,
                        };
                        self.records[met].ready_after = Some(cause);
                        self.edge(step, met, Reason::Barrier, end);
                    }
                    self.done(other, now, end);
                }
            }
        }
    }

    fn edge(&mut self, from: usize, to: usize, kind: Reason, arrived: Time) {
        self.edges.push(Edge {
            from,
            to,
            kind,
            arrived_us: us(arrived),
        });
    }

    // --- counters ---

    fn send(&mut self, counter: usize, step: usize, sent: Time, arrives: Time, by_port: bool) {
        let event = Event::Arrival {
            counter,
            step,
            sent,
            by_port,
        };
        self.schedule(arrives, event);
    }

    /// Takes one from each counter, or waits.
    fn take(&mut self, block: usize, now: Time, ids: &[usize], cost: Time) {
        let step = self.at[block];
        let missing = ids.iter().find(|id| {
            let wanted = ids.iter().filter(|other| other == id).count();
            let counter = &self.counters[**id];
            counter.arrived.len() + (counter.initial as usize) < wanted
        });
        if let Some(id) = missing {
            self.counters[*id].waiting.push((block, step));
            return;
        }
        let mut latest: Option<(Signal, Reason)> = None;
        for id in ids {
            let counter = &mut self.counters[*id];
            if let Some(left) = counter.initial.checked_sub(1) {
                counter.initial = left;
                continue;
            }
            let Some(signal) = counter.arrived.pop_front() else {
                continue;
            };
            let kind = match (self.compiled.counters[*id].semaphore, signal.by_port) {
                (true, _) => Reason::Semaphore,
                (false, true) => Reason::Put,
                (false, false) => Reason::Signal,
            };
            self.edge(signal.step, step, kind, signal.arrived);
            if latest.is_none_or(|(last, _)| signal.arrived > last.arrived) {
                latest = Some((signal, kind));
            }
        }
        let looked = self.records[step].start + self.costs.op;
        if let Some((signal, reason)) = latest.filter(|(signal, _)| signal.arrived > looked) {
            self.records[step].ready_after = Some(Cause {
                step: signal.step,
                reason,
                at: signal.sent,
            });
        }
        self.done(block, now, now + cost);
    }

    // --- data ---

    fn data(&mut self, block: usize, now: Time, data: &Data) {
        let (step, rank) = (self.at[block], self.rank_of[block]);
        let Some(seen) = self.packets_of(data) else {
            self.readers[rank as usize].push(block);
            return;
        };
        let first = seen.iter().max_by_key(|packets| packets.first).copied();
        if let Some(first) = first.filter(|packets| packets.first > now) {
            let writer = &self.transfers[first.writer];
            self.records[step].ready_after = Some(Cause {
                step: writer.step,
                reason: writer.reason(),
                at: writer.sent,
            });
            return self.schedule(first.first, Event::Look(block));
        }
        let payload = data.cells as u64 * GRANULE;
        let memory = &self.topology.memory;
        let time_of = |places: &[Place]| -> Time {
            let one = |place: &Place| match place.packets {
                true => transfer(payload, memory.block_packet_gbps),
                false => transfer(payload, self.block_gbps),
            };
            places.iter().map(one).sum()
        };
        let own = time_of(&data.from).max(time_of(&data.to));
        let mut round_trip = 0;
        let mut demands = Vec::new();
        for place in &data.from {
            let from = self.owner(place);
            round_trip = round_trip.max(2 * self.link(rank, from).latency);
            self.demand(
                &mut demands,
                from,
                rank,
                self.wire_bytes(payload, place.packets),
            );
        }
        for place in &data.to {
            let to = self.owner(place);
            self.demand(
                &mut demands,
                rank,
                to,
                self.wire_bytes(payload, place.packets),
            );
        }
        let mut writers: Vec<usize> = seen.iter().map(|packets| packets.writer).collect();
        writers.sort_unstable();
        writers.dedup();
        let id = self.transfers.len();
        self.records[step].ready = now;
        self.transfers.push(Transfer {
            block,
            step,
            sent: now,
            open: 1 + demands.len() + writers.len(),
            demands,
            latency: round_trip,
            port: None,
            left: None,
            readers: Vec::new(),
        });
        for place in data.to.iter().filter(|place| place.packets) {
            let latency = self.link(rank, self.owner(place)).latency;
            self.write_packets(place, data.cells, id, now + latency);
        }
        self.schedule(now + own, Event::Own(id));
        self.serve(id, now);
        for writer in writers {
            match self.transfers[writer].left {
                Some(left) => self.read(id, writer, left, now),
                None => self.transfers[writer].readers.push(id),
            }
        }
    }

    /// The last of the writer's packets have left at `left`.
    fn read(&mut self, transfer: usize, writer: usize, left: Time, now: Time) {
        let (from, to) = (&self.transfers[writer], &self.transfers[transfer]);
        let ranks = (self.rank_of[from.block], self.rank_of[to.block]);
        let last = left + self.link(ranks.0, ranks.1).latency;
        self.edge(from.step, to.step, from.reason(), last);
        let seen = now.max(last + self.costs.packet);
        self.schedule(seen, Event::Read { transfer, writer });
    }

    /// One part of a transfer is done; the step's end is told by the last.
    fn part_done(&mut self, id: usize, now: Time, after: Option<Cause>, link_bound: bool) {
        let transfer = &mut self.transfers[id];
        transfer.open -= 1;
        if transfer.open > 0 {
            return;
        }
        let (block, step) = (transfer.block, transfer.step);
        if transfer.port.is_some() {
            return self.arrive(id, now);
        }
        let end = now + transfer.latency;
        let record = &mut self.records[step];
        (record.over_after, record.link_bound) = (after, link_bound);
        let ready = record.ready;
        self.written(id, end, now);
        self.done(block, ready, end);
    }

    /// All packets of a transfer have left at `left`.
    fn written(&mut self, id: usize, left: Time, now: Time) {
        self.transfers[id].left = Some(left);
        for reader in std::mem::take(&mut self.transfers[id].readers) {
            self.read(reader, id, left, now);
        }
    }

    /// The packets that an operation reads, if all have been sent.
    fn packets_of(&self, data: &Data) -> Option<Vec<Packets>> {
        let mut seen = Vec::new();
        for place in data.from.iter().filter(|place| place.packets) {
            let begin = place.at(EPOCH) as u64;
            let end = begin + data.cells as u64;
            let mut at = begin;
            let before = self.packets.range(..=begin).next_back();
            let before = before.map_or(begin, |(start, _)| *start);
            for (start, packets) in self.packets.range(before..end) {
                if *start > at {
                    break;
                }
                if packets.end > at {
                    seen.push(*packets);
                    at = packets.end;
                }
            }
            if at < end {
                return None;
            }
        }
        Some(seen)
    }

    fn write_packets(&mut self, place: &Place, cells: usize, writer: usize, first: Time) {
        let begin = place.at(EPOCH) as u64;
        let end = begin + cells as u64;
        let packets = Packets { end, writer, first };
        self.packets.insert(begin, packets);
        let rank = self.owner(place) as usize;
        for reader in std::mem::take(&mut self.readers[rank]) {
            self.schedule(first, Event::Look(reader));
        }
    }

    // --- ports ---

    fn put(
        &mut self,
        block: usize,
        now: Time,
        port: usize,
        data: Option<&Data>,
        inbox: Option<usize>,
    ) {
        let (step, rank) = (self.at[block], self.rank_of[block]);
        let proxy = &mut self.proxies[rank as usize];
        let begin = now.max(*proxy) + self.costs.proxy;
        *proxy = begin;
        let id = self.transfers.len();
        let mut transfer = Transfer {
            block,
            step,
            sent: now,
            open: 1,
            demands: Vec::new(),
            latency: 0,
            port: Some((port, inbox)),
            left: None,
            readers: Vec::new(),
        };
        if let Some(inbox) = inbox {
            transfer.latency = self.link(rank, self.compiled.counters[inbox].rank).latency;
        }
        if let Some(data) = data {
            let place = &data.to[0];
            let to = self.owner(place);
            let latency = self.link(rank, to).latency;
            let bytes = self.wire_bytes(data.cells as u64 * GRANULE, place.packets);
            self.demand(&mut transfer.demands, rank, to, bytes);
            transfer.open += transfer.demands.len();
            transfer.latency = latency;
            if place.packets {
                self.write_packets(place, data.cells, id, begin + latency);
            }
        }
        self.transfers.push(transfer);
        self.ports[port].step = step;
        self.ports[port].under_way.push_back((id, None));
        self.schedule(begin, Event::Begin(id));
    }

    fn begin(&mut self, id: usize, now: Time) {
        self.serve(id, now);
        self.part_done(id, now, None, false);
    }

    /// A request's data has been sent: it arrives after those before it.
    fn arrive(&mut self, id: usize, now: Time) {
        let Some((port, _)) = self.transfers[id].port else {
            return;
        };
        let latency = self.transfers[id].latency;
        let mut requests = self.ports[port].under_way.iter_mut();
        if let Some(request) = requests.find(|(other, _)| *other == id) {
            request.1 = Some(now + latency);
        }
        while let Some((id, Some(time))) = self.ports[port].under_way.front().copied() {
            let Transfer {
                step,
                sent,
                latency,
                ..
            } = self.transfers[id];
            let state = &mut self.ports[port];
            state.under_way.pop_front();
            state.arrived = state.arrived.max(time);
            state.known = state.known.max(state.arrived + latency);
            let arrived = state.arrived;
            self.written(id, arrived - latency, now);
            if let Some((_, Some(inbox))) = self.transfers[id].port {
                self.send(inbox, step, sent, arrived, true);
            }
        }
        if self.ports[port].under_way.is_empty() {
            for block in std::mem::take(&mut self.ports[port].flushing) {
                self.look(block, now);
            }
        }
    }

    /// When the block knows that all it has put has arrived; otherwise it is told later.
    fn flushed(&mut self, block: usize, ports: &[usize]) -> Option<Time> {
        let busy = |port: &&usize| !self.ports[**port].under_way.is_empty();
        if let Some(port) = ports.iter().find(busy) {
            self.ports[*port].flushing.push(block);
            return None;
        }
        let known = ports.iter().map(|port| self.ports[*port].known).max();
        Some(known.unwrap_or(0))
    }

    // --- links ---

    fn owner(&self, place: &Place) -> u32 {
        self.compiled.layout.rank_of(place.at(EPOCH))
    }

    fn link(&self, from: u32, to: u32) -> Link {
        if from == to {
            return Link {
                latency: 0,
                gbps: self.topology.memory.rank_gbps,
                resource: MEMORY,
            };
        }
        let near = self.nodes[from as usize] == self.nodes[to as usize];
        let (link, resource) = match near {
            true => (&self.topology.node, NODE),
            false => (&self.topology.network, NETWORK),
        };
        Link {
            latency: ps(link.latency_us),
            gbps: link.gbps,
            resource,
        }
    }

    /// Bytes that cross a link for so many.
    fn wire_bytes(&self, payload: u64, packets: bool) -> u64 {
        match packets {
            true => (payload as f64 * self.topology.memory.packet_bytes).round() as u64,
            false => payload,
        }
    }

    /// What moving data from one rank to another, or in a rank, asks of links and memory.
    fn demand(&self, demands: &mut Vec<(usize, Time)>, from: u32, to: u32, bytes: u64) {
        let link = self.link(from, to);
        let time = transfer(bytes, link.gbps);
        let out = from as usize * RESOURCES + link.resource;
        let enter = to as usize * RESOURCES + link.resource + 1;
        let crossed = if from == to {
            &[out][..]
        } else {
            &[out, enter]
        };
        for resource in crossed.iter().filter(|_| time > 0) {
            match demands.iter_mut().find(|(other, _)| other == resource) {
                Some((_, sum)) => *sum += time,
                None => demands.push((*resource, time)),
            }
        }
    }

    /// Asks links and memory for what a transfer demands.
    fn serve(&mut self, id: usize, now: Time) {
        for index in 0..self.transfers[id].demands.len() {
            let (resource, work) = self.transfers[id].demands[index];
            self.resources[resource].add(now, work, id);
            self.serve_next(resource);
        }
    }

    fn serve_next(&mut self, resource: usize) {
        let shared = &self.resources[resource];
        if let Some(time) = shared.next() {
            let version = shared.version;
            self.schedule(time, Event::Served { resource, version });
        }
    }

    // --- the result ---

    fn timeline(self, bytes: u64) -> Timeline {
        let mut steps = Vec::with_capacity(self.records.len());
        for block in self.program.iter() {
            for (site, action) in &block.steps {
                let site = &self.compiled.sites[*site as usize];
                let record = &self.records[steps.len()];
                let cells = match action {
                    Action::Data { data, .. } => data.cells,
                    Action::Put { data, .. } => data.as_ref().map_or(0, |data| data.cells),
                    _ => 0,
                };
                steps.push(Step {
                    rank: site.rank,
                    block: site.block,
                    op: site.op,
                    inner: site.inner,
                    name: site.name,
                    bytes: cells as u64 * GRANULE,
                    start_us: us(record.start),
                    ready_us: us(record.ready.max(record.start)),
                    end_us: record.end.map(us),
                    link_bound: record.link_bound,
                });
            }
        }
        let ends = self.records.iter().filter_map(|record| record.end);
        let last = ends.max().unwrap_or(self.costs.launch);
        let complete = self.records.iter().all(|record| record.end.is_some());
        Timeline {
            message_bytes: bytes,
            total_us: complete.then_some(us(last)),
            critical_path: self.critical_path(last),
            steps,
            edges: self.edges,
        }
    }

    /// From the end back to the launch.
    fn critical_path(&self, last: Time) -> Vec<Hop> {
        let mut path = Vec::new();
        let end = |record: &Record| record.end == Some(last);
        let Some(mut step) = self.records.iter().position(end) else {
            return path;
        };
        let mut to = last;
        loop {
            let record = &self.records[step];
            // Where the path left it before it was over, only what came before that counts.
            let over = record.over_after.filter(|cause| cause.at < to);
            let cause = over.or(record.ready_after);
            let from = cause.map_or(0, |cause| cause.at.min(to));
            path.push(Hop {
                step,
                reason: cause.map_or(Reason::Launch, |cause| cause.reason),
                from_us: us(from),
                to_us: us(to),
            });
            let Some(cause) = cause else {
                break;
            };
            (step, to) = (cause.step, from);
        }
        path.reverse();
        path
    }
}

/// The first execution: which half of a slot it takes makes no difference.
const EPOCH: u32 = 1;

impl Transfer {
    fn reason(&self) -> Reason {
        if self.port.is_some() {
            Reason::Put
        } else {
            Reason::Packets
        }
    }
}
