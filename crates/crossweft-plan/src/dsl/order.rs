//! Dependencies: which instructions touch the same memory, which of those are in order already, and which edges
//! are missing.
//!
//! The program is run once on vector clocks, in program order as far as its own synchronisation allows. What a
//! thread knows after an instruction is what came before it through the order of its block, signals and waits,
//! semaphores, barriers and flushes; these are the rules of the [checker](crate::check), applied to one execution.
//! Where an instruction conflicts with an earlier one that its block does not know of, an [`Edge`] is missing:
//! it is noted, and known from then on. An edge ends at the instruction being looked at and begins at one that has
//! been run, so that edges close no cycle, and none of them follows from others.
//!
//! A packet orders its own payload only. But a load is over, and what was loaded can be overwritten, for whoever
//! has seen a packet that holds what it loaded.
//!
//! Executions follow one another, too, and ranks run ahead freely:
//!
//! * A rank's input and output are the caller's between its executions. Whoever else touches them must know that
//!   the execution has begun there, and that rank must know at its end that this is over.
//! * Scratch memory is used again by the next execution (by the one after it, if there are two halves, as there
//!   always are of packets). What was its last use must be known by its first use then, through some rank that
//!   knows of the one at its end and of which the other knows that it has begun.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;

use rustc_hash::FxHashSet;

use super::cells::Cells;
use super::program::Program;
use super::trace::End;
use crate::place::{Data, Kind, Raw};
use crate::plan::{ChannelKind, Op};

/// An order that the program lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Edge {
    pub(super) from: From,
    pub(super) to: To,
    /// Whether it may not be needed, because something else serves as well. (Where input and output may be one memory
    /// or two, packets may hold what was loaded in the one case and not in the other.)
    pub(super) choice: bool,
}

/// Where an edge begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum From {
    /// The beginning of an execution of a rank, in one of its thread blocks.
    Begin { rank: u32, block: u32 },
    /// Behind an instruction.
    After(usize),
}

/// Where an edge ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum To {
    /// Before an instruction.
    Before(usize),
    /// The end of an execution of a rank, in one of its thread blocks.
    End {
        rank: u32,
        block: u32,
        /// The instruction because of which.
        because: usize,
    },
}

/// What a program lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) edges: Vec<Edge>,
    /// Puts over port channels whose end somebody must know of: they need a flush.
    pub(super) flushes: BTreeSet<usize>,
}

/// What is missing for everything to be in order. Nothing, if the program does not get to its end: the checker
/// says why.
pub(super) fn missing(program: &Program, cells: &Cells) -> Missing {
    let mut missing = Missing::default();
    let mut demands = HashSet::new();
    loop {
        let mut run = Run::new(program, cells, &missing.flushes, &demands);
        if !run.run() {
            return Missing::default();
        }
        run.ends();
        let before = (missing.flushes.len(), demands.len());
        let more = run.next_executions();
        let (mut flushes, edges) = (run.flushes, run.edges);
        demands.extend(more);
        missing.flushes.append(&mut flushes);
        if before == (missing.flushes.len(), demands.len()) {
            missing.edges = edges;
            return missing;
        }
    }
}

/// The instructions on data in an order in which they can run; `None` if there is none.
pub(super) fn sequence(program: &Program, cells: &Cells) -> Option<Vec<usize>> {
    let (flushes, demands) = (BTreeSet::new(), HashSet::new());
    let mut run = Run::new(program, cells, &flushes, &demands);
    let all = run.run();
    let sequence = run.accesses.iter().map(|access| access.instr);
    all.then(|| sequence.collect())
}

/// What a thread knows at some point: of each thread, up to which of its events.
#[derive(Clone, Debug)]
struct Known {
    others: Rc<[u32]>,
    thread: usize,
    time: u32,
}

impl Known {
    fn includes(&self, thread: usize, time: u32) -> bool {
        (thread == self.thread && time <= self.time) || self.others[thread] >= time
    }

    fn learn(&mut self, other: &Self) {
        if Rc::ptr_eq(&self.others, &other.others) {
            if !self.includes(other.thread, other.time) {
                Rc::make_mut(&mut self.others)[other.thread] = other.time;
            }
            return;
        }
        let mine = Rc::make_mut(&mut self.others);
        for (mine, theirs) in mine.iter_mut().zip(&*other.others) {
            *mine = (*mine).max(*theirs);
        }
        mine[other.thread] = mine[other.thread].max(other.time);
    }
}

/// The beginning of an execution, in every thread.
const BEGIN: u32 = 1;

/// An instruction's access to memory.
#[derive(Clone, Debug)]
struct Access {
    instr: usize,
    /// A block, or a proxy on behalf of one.
    rank: u32,
    /// Knows all that the instruction knows, and the instruction.
    known: Known,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    first_write: Option<u32>,
    write: Option<u32>,
    /// Since then; those that another one follows are left out.
    reads: Vec<u32>,
    /// Of packets: the rank that wrote them, and whether that was not the first time, so that there being
    /// packets does not tell which.
    writer: u32,
    again: bool,
    /// Whether what was written has something in it however short the message, as far as is known.
    filled: bool,
    /// How often it will be written.
    writes_left: u32,
    /// The loads whose values went into this one.
    loads: Option<Rc<[Load]>>,
}

/// A load: its cell, and the access.
type Load = (usize, u32);

/// The cells that an instruction touches, by operand.
struct Touched {
    from: Vec<Range<usize>>,
    to: Vec<Range<usize>>,
    /// By a proxy.
    is_put: bool,
}

impl Touched {
    fn new(cells: &Cells, data: &Data) -> Self {
        Self {
            from: data.from.iter().map(|from| cells.of(from, data)).collect(),
            to: data.to.iter().map(|to| cells.of(to, data)).collect(),
            is_put: matches!(data.kind, Kind::Put { .. }),
        }
    }
}

/// Signals of one direction of a channel, or releases of a semaphore.
#[derive(Clone, Debug, Default)]
struct Counter {
    signallers: HashSet<(u32, u32)>,
    takers: HashSet<(u32, u32)>,
    total: usize,
    initial: usize,
    sent: Vec<Known>,
    taken: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Name {
    /// From, to, kind, ordinal.
    Channel(u32, u32, ChannelKind, u32),
    Semaphore(u32),
}

/// What a block waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reason {
    Counter(usize),
    Packet(usize),
}

/// What has become of an instruction that was tried.
enum Step {
    Done,
    Blocked(Reason),
    /// The others have not come to the barrier yet.
    Meeting,
}

#[derive(Clone, Debug)]
struct Thread {
    rank: u32,
    block: u32,
    /// Its instructions, and the next of them; a proxy has none.
    instrs: Vec<usize>,
    next: usize,
    known: Known,
}

struct Run<'a> {
    program: &'a Program,
    cells: &'a Cells,
    flushed: &'a BTreeSet<usize>,
    demands: &'a HashSet<(usize, u32)>,
    threads: Vec<Thread>,
    blocks: HashMap<(u32, u32), usize>,
    /// By block and channel.
    proxies: HashMap<(usize, u32), usize>,
    /// By rank: its blocks.
    of_rank: Vec<Vec<usize>>,
    counters: Vec<Counter>,
    counter_ids: HashMap<Name, usize>,
    barriers: HashMap<u32, Vec<usize>>,
    memory: Vec<Cell>,
    accesses: Vec<Access>,
    parked: HashMap<Reason, Vec<usize>>,
    ready: BinaryHeap<Reverse<(usize, usize)>>,
    /// Which rank has read packets of which.
    heard: HashSet<(u32, u32)>,
    /// By rank: whether it writes to others' memory, other than packets.
    reaches: Vec<bool>,
    /// By block: loads that are over, because packets have come that hold what was loaded.
    over: Vec<FxHashSet<Load>>,
    edges: Vec<Edge>,
    flushes: BTreeSet<usize>,
}

impl<'a> Run<'a> {
    fn new(
        program: &'a Program,
        cells: &'a Cells,
        flushed: &'a BTreeSet<usize>,
        demands: &'a HashSet<(usize, u32)>,
    ) -> Self {
        let ranks = program.options.ranks;
        let mut blocks: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut proxied: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
        for instr in &program.trace.instrs {
            blocks.insert((instr.rank, instr.block));
            for channel in port_channels(program, &instr.raw) {
                proxied.insert((instr.rank, instr.block, channel));
            }
        }
        for rank in 0..ranks {
            if blocks.range((rank, 0)..=(rank, u32::MAX)).next().is_none() {
                blocks.insert((rank, 0));
            }
        }
        let size = blocks.len() + proxied.len();
        let owners = blocks.iter().map(|(rank, block)| (*rank, *block));
        let owners: Vec<(u32, u32)> = owners
            .chain(proxied.iter().map(|(rank, block, _)| (*rank, *block)))
            .collect();
        let beginnings: Vec<Rc<[u32]>> = (0..ranks)
            .map(|rank| {
                owners
                    .iter()
                    .map(|owner| u32::from(owner.0 == rank))
                    .collect()
            })
            .collect();
        let threads = owners
            .iter()
            .enumerate()
            .map(|(thread, &(rank, block))| Thread {
                rank,
                block,
                instrs: Vec::new(),
                next: 0,
                known: Known {
                    others: Rc::clone(&beginnings[rank as usize]),
                    thread,
                    time: BEGIN,
                },
            });
        let mut run = Self {
            program,
            cells,
            flushed,
            demands,
            threads: threads.collect(),
            blocks: HashMap::with_capacity(size),
            proxies: HashMap::new(),
            of_rank: vec![Vec::new(); ranks as usize],
            counters: Vec::new(),
            counter_ids: HashMap::new(),
            barriers: HashMap::new(),
            memory: vec![Cell::default(); cells.len(ranks)],
            accesses: Vec::new(),
            parked: HashMap::new(),
            ready: BinaryHeap::new(),
            heard: HashSet::new(),
            reaches: vec![false; ranks as usize],
            over: vec![FxHashSet::default(); blocks.len()],
            edges: Vec::new(),
            flushes: BTreeSet::new(),
        };
        for (thread, &(rank, block)) in blocks.iter().enumerate() {
            run.blocks.insert((rank, block), thread);
            run.of_rank[rank as usize].push(thread);
        }
        for (proxy, &(rank, block, channel)) in (blocks.len()..).zip(&proxied) {
            run.proxies
                .insert((run.blocks[&(rank, block)], channel), proxy);
        }
        for (index, instr) in program.trace.instrs.iter().enumerate() {
            if let Raw::Data(data) = &instr.raw {
                for cell in data.to.iter().flat_map(|to| cells.of(to, data)) {
                    run.memory[cell].writes_left += 1;
                    let is_remote = cells.owner(cell).0 != instr.rank && !cells.is_packet(cell);
                    run.reaches[instr.rank as usize] |= is_remote;
                }
            }
            let thread = run.blocks[&(instr.rank, instr.block)];
            run.threads[thread].instrs.push(index);
            run.count(instr.rank, instr.block, &instr.raw);
        }
        for thread in 0..blocks.len() {
            run.make_ready(thread);
        }
        run
    }

    /// Notes who signals and who waits.
    fn count(&mut self, rank: u32, block: u32, raw: &Raw) {
        let (sent, taken) = names(self.program, raw);
        for name in sent {
            let id = self.counter(name);
            self.counters[id].signallers.insert((rank, block));
            self.counters[id].total += 1;
        }
        for name in taken {
            let id = self.counter(name);
            self.counters[id].takers.insert((rank, block));
        }
    }

    fn counter(&mut self, name: Name) -> usize {
        let next = self.counters.len();
        let id = *self.counter_ids.entry(name).or_insert(next);
        if id == next {
            let initial = match name {
                Name::Semaphore(id) => self.program.trace.semaphores[id as usize].initial as usize,
                Name::Channel(..) => 0,
            };
            self.counters.push(Counter {
                initial,
                ..Counter::default()
            });
        }
        id
    }

    fn make_ready(&mut self, thread: usize) {
        let of = &self.threads[thread];
        if let Some(index) = of.instrs.get(of.next) {
            self.ready.push(Reverse((*index, thread)));
        }
    }

    fn wake(&mut self, reason: Reason) {
        for thread in self.parked.remove(&reason).unwrap_or_default() {
            self.make_ready(thread);
        }
    }

    /// Whether all blocks came to their end.
    fn run(&mut self) -> bool {
        while let Some(Reverse((index, thread))) = self.ready.pop() {
            match self.step(thread, index) {
                Step::Done => {
                    self.threads[thread].next += 1;
                    self.make_ready(thread);
                }
                Step::Blocked(reason) => self.parked.entry(reason).or_default().push(thread),
                Step::Meeting => {}
            }
        }
        self.threads
            .iter()
            .all(|thread| thread.next == thread.instrs.len())
    }

    fn step(&mut self, thread: usize, index: usize) -> Step {
        let program = self.program;
        let raw = &program.trace.instrs[index].raw;
        match raw {
            Raw::Data(data) => {
                if let Some(cell) = self.packet_to_come(data) {
                    return Step::Blocked(Reason::Packet(cell));
                }
                self.data(thread, index, data);
            }
            Raw::Other(Op::Wait { .. } | Op::Acquire { .. }) => {
                let (_, names) = names(self.program, raw);
                let ids: Vec<usize> = names.into_iter().map(|name| self.counter(name)).collect();
                let mut wanted: HashMap<usize, usize> = HashMap::new();
                for &id in &ids {
                    let wanted = wanted.entry(id).or_default();
                    *wanted += 1;
                    let counter = &self.counters[id];
                    if counter.initial + counter.sent.len() < counter.taken + *wanted {
                        return Step::Blocked(Reason::Counter(id));
                    }
                }
                let relaxed = matches!(raw, Raw::Other(Op::Wait { relaxed: true, .. }));
                for id in ids {
                    self.take(thread, id, relaxed);
                }
                self.tick(thread);
            }
            Raw::Other(Op::Signal { channels, relaxed }) => {
                self.tick(thread);
                for channel in channels {
                    let end = program.trace.ends[*channel as usize];
                    let name = Name::Channel(end.rank, end.peer, end.kind, end.ordinal);
                    let known = match (end.kind, relaxed) {
                        (ChannelKind::Port, _) => {
                            let proxy = self.push(thread, *channel);
                            self.threads[proxy].known.clone()
                        }
                        (_, true) => self.beginning(end.rank),
                        (_, false) => self.threads[thread].known.clone(),
                    };
                    self.send(name, known);
                }
            }
            Raw::Other(Op::Release { semaphores }) => {
                self.tick(thread);
                for id in semaphores {
                    let known = self.threads[thread].known.clone();
                    self.send(Name::Semaphore(*id), known);
                }
            }
            Raw::Other(Op::Flush { channels }) => {
                for channel in channels {
                    self.push(thread, *channel);
                    self.flush(thread, *channel);
                }
                self.tick(thread);
            }
            Raw::Other(Op::Barrier { id, blocks }) => return self.meet(thread, *id, *blocks),
            Raw::Other(_) | Raw::Loop { .. } => {}
        }
        Step::Done
    }

    fn tick(&mut self, thread: usize) {
        self.threads[thread].known.time += 1;
    }

    /// What is known when a rank's execution begins.
    fn beginning(&self, rank: u32) -> Known {
        let thread = self.of_rank[rank as usize][0];
        let others = self
            .threads
            .iter()
            .map(|of| if of.rank == rank { BEGIN } else { 0 });
        Known {
            others: others.collect(),
            thread,
            time: BEGIN,
        }
    }

    fn has_begun(&self, known: &Known, rank: u32) -> bool {
        known.includes(self.of_rank[rank as usize][0], BEGIN)
    }

    fn send(&mut self, name: Name, known: Known) {
        let id = self.counter(name);
        self.counters[id].sent.push(known);
        self.wake(Reason::Counter(id));
    }

    fn take(&mut self, thread: usize, id: usize, relaxed: bool) {
        let counter = &mut self.counters[id];
        counter.taken += 1;
        let learned: &[Known] = match (counter.signallers.len(), counter.takers.len()) {
            // One after the other: the k-th is the k-th.
            (1, 1) => match counter.taken.checked_sub(counter.initial + 1) {
                Some(index) => &counter.sent[index..=index],
                None => &[],
            },
            // Which was the first is left to chance; only after the last it is certain what all of them tell.
            (_, 1) if counter.taken == counter.total && counter.initial == 0 => &counter.sent,
            _ => &[],
        };
        let mut learned = learned.to_vec();
        if relaxed {
            // Whatever it was, only that the sender has begun.
            let ranks = learned.iter().map(|known| self.threads[known.thread].rank);
            learned = ranks.map(|rank| self.beginning(rank)).collect();
        }
        for known in &learned {
            self.threads[thread].known.learn(known);
        }
    }

    fn meet(&mut self, thread: usize, id: u32, blocks: u32) -> Step {
        let arrived = self.barriers.entry(id).or_default();
        arrived.push(thread);
        if arrived.len() < blocks as usize {
            return Step::Meeting;
        }
        let arrived = std::mem::take(arrived);
        for &thread in &arrived {
            self.tick(thread);
        }
        let mut all = self.threads[thread].known.clone();
        for &other in &arrived {
            all.learn(&self.threads[other].known);
        }
        for &other in &arrived {
            self.threads[other].known.learn(&all);
            if other != thread {
                self.threads[other].next += 1;
                self.make_ready(other);
            }
        }
        Step::Done
    }

    // --- proxies ---

    /// Hands a request to the proxy: it comes after what the block knows.
    fn push(&mut self, thread: usize, channel: u32) -> usize {
        let proxy = self.proxies[&(thread, channel)];
        let known = self.threads[thread].known.clone();
        self.threads[proxy].known.learn(&known);
        self.tick(proxy);
        proxy
    }

    fn flush(&mut self, thread: usize, channel: u32) {
        let proxy = self.proxies[&(thread, channel)];
        let known = self.threads[proxy].known.clone();
        self.threads[thread].known.learn(&known);
    }

    // --- memory ---

    fn packet_to_come(&self, data: &Data) -> Option<usize> {
        let cells = data.from.iter().flat_map(|from| self.cells.of(from, data));
        let mut packets = cells.filter(|cell| self.cells.is_packet(*cell));
        packets.find(|cell| self.memory[*cell].write.is_none())
    }

    fn data(&mut self, thread: usize, index: usize, data: &Data) {
        let (proxy, flush) = match data.kind {
            Kind::Put { channel, flush, .. } => {
                let flush = flush || self.flushed.contains(&index);
                (Some((self.proxies[&(thread, channel)], channel)), flush)
            }
            _ => (None, false),
        };
        let touched = Touched::new(self.cells, data);
        let over = self.over(&touched);
        let by = proxy.map(|(proxy, _)| proxy);
        self.order(thread, by, index, &touched, &over);
        // Whose access it is: what a proxy does, a block knows of once it has flushed.
        self.tick(thread);
        let known = match proxy {
            Some((_, channel)) => {
                let proxy = self.push(thread, channel);
                if flush {
                    self.flush(thread, channel);
                    self.threads[thread].known.clone()
                } else {
                    self.threads[proxy].known.clone()
                }
            }
            None => self.threads[thread].known.clone(),
        };
        let number = self.accesses.len() as u32;
        let rank = self.threads[thread].rank;
        self.touch(number, rank, &known, &touched);
        if by.is_none() {
            // Who writes nothing but packets on other ranks does not ask for loads there.
            let asks = |(cell, _): &Load| {
                let is_own = self.cells.owner(*cell).0 == rank;
                is_own || self.reaches[rank as usize] || self.cells.is_packet(*cell)
            };
            let over = over.into_iter().flatten().filter(asks);
            self.over[thread].extend(over);
        }
        self.accesses.push(Access {
            instr: index,
            rank,
            known,
        });
        if let Some((_, channel)) = proxy
            && let Kind::Put { signal: true, .. } = data.kind
        {
            let End {
                rank,
                peer,
                kind,
                ordinal,
            } = self.program.trace.ends[channel as usize];
            let known = self.threads[self.proxies[&(thread, channel)]].known.clone();
            self.send(Name::Channel(rank, peer, kind, ordinal), known);
        }
    }

    /// For each cell of an operand, the loads that are over since packets have come that hold what was loaded.
    fn over(&self, touched: &Touched) -> Vec<Vec<Load>> {
        let mut over = Vec::new();
        for from in &touched.from {
            for (k, cell) in from.clone().enumerate() {
                if let Some(loads) = &self.memory[cell].loads
                    && self.cells.is_packet(cell)
                {
                    over.resize(over.len().max(k + 1), Vec::new());
                    over[k].extend_from_slice(loads);
                }
            }
        }
        over
    }

    /// Puts an instruction behind what it conflicts with.
    fn order(
        &mut self,
        thread: usize,
        proxy: Option<usize>,
        index: usize,
        touched: &Touched,
        over: &[Vec<Load>],
    ) {
        // By access: whether it may be over already.
        let mut before: BTreeMap<u32, bool> = BTreeMap::new();
        let aliased = self.cells.are_aliased();
        for (k, cell) in touched.to.iter().flat_map(|to| to.clone().enumerate()) {
            let cell_over = over.get(k).map_or(&[][..], Vec::as_slice);
            // A proxy is not told by packets.
            let is_over = |read: &u32| {
                let load = (cell, *read);
                proxy.is_none() && (cell_over.contains(&load) || self.over[thread].contains(&load))
            };
            let of = &self.memory[cell];
            for read in &of.reads {
                let is_over = is_over(read);
                if !is_over || aliased {
                    *before.entry(*read).or_insert(true) &= is_over;
                }
            }
        }
        // Whoever knows of a packet's read comes after its write.
        let was_read =
            |cell: usize| self.cells.is_packet(cell) && !self.memory[cell].reads.is_empty();
        let writes = touched.to.iter().cloned().flatten();
        let writes = writes.filter(|cell| !was_read(*cell));
        before.extend(writes.filter_map(|cell| Some((self.memory[cell].write?, false))));
        for cell in touched.from.iter().cloned().flatten() {
            // Whoever reads packets waits for them.
            if !self.cells.is_packet(cell) || self.memory[cell].again {
                before.extend(self.memory[cell].write.map(|write| (write, false)));
            }
        }
        // The latest first: it may know the others.
        for (number, choice) in before.into_iter().rev() {
            let access = &self.accesses[number as usize];
            let known = access.known.clone();
            let is_known = |of: usize| {
                let mine: &Known = &self.threads[of].known;
                mine.includes(known.thread, known.time)
            };
            if is_known(thread) || proxy.is_some_and(is_known) {
                continue;
            }
            if known.thread >= self.blocks.len() {
                self.flushes.insert(access.instr);
            }
            self.edges.push(Edge {
                from: From::After(access.instr),
                to: To::Before(index),
                choice,
            });
            self.threads[thread].known.learn(&known);
        }
        let rank = self.threads[thread].rank;
        let cells = touched.from.iter().chain(&touched.to).cloned().flatten();
        let mut owners: BTreeSet<(u32, bool)> = cells
            .map(|cell| self.cells.owner(cell))
            .filter(|(owner, is_caller)| *is_caller && *owner != rank)
            .map(|(owner, _)| (owner, false))
            .collect();
        let demanded = (0..self.program.options.ranks)
            .filter(|rank| !self.demands.is_empty() && self.demands.contains(&(index, *rank)));
        owners.extend(demanded.map(|rank| (rank, true)));
        for (owner, choice) in owners {
            if self.has_begun(&self.threads[thread].known, owner) {
                continue;
            }
            self.edges.push(Edge {
                from: From::Begin {
                    rank: owner,
                    block: self.block_like(owner, thread),
                },
                to: To::Before(index),
                choice,
            });
            let known = self.beginning(owner);
            self.threads[thread].known.learn(&known);
        }
    }

    /// The thread block of `rank` with the same number as `thread`, or else its first one.
    fn block_like(&self, rank: u32, thread: usize) -> u32 {
        let block = self.threads[thread].block;
        if self.blocks.contains_key(&(rank, block)) {
            block
        } else {
            self.threads[self.of_rank[rank as usize][0]].block
        }
    }

    fn touch(&mut self, number: u32, rank: u32, known: &Known, touched: &Touched) {
        // For each cell of an operand, the loads whose values go into the result: only packets tell of them.
        let tracked = self.cells.has_packets();
        let mut loads: Vec<Vec<Load>> = Vec::new();
        let mut filled: Vec<bool> = Vec::new();
        for (k, cell) in touched
            .from
            .iter()
            .flat_map(|from| from.clone().enumerate())
        {
            let is_packet = self.cells.is_packet(cell);
            let is_filled = self.cells.is_filled(cell) || self.memory[cell].filled;
            filled.resize(filled.len().max(k + 1), false);
            filled[k] |= is_filled;
            // Of packets that a shorter message may not have, the next execution cannot tell.
            if is_packet && is_filled {
                self.heard.insert((rank, self.memory[cell].writer));
            }
            if tracked {
                loads.resize(loads.len().max(k + 1), Vec::new());
                let before = self.memory[cell].loads.iter();
                loads[k].extend(before.flat_map(|loads| loads.iter()));
                // Nobody asks for loads of what is not written any more.
                let (owner, is_caller) = self.cells.owner(cell);
                let is_foreign = is_caller && (owner != rank || touched.is_put);
                let matters = is_foreign || self.memory[cell].writes_left > 0;
                if matters && (!is_packet || touched.is_put) {
                    loads[k].push((cell, number));
                }
            }
            let accesses = &self.accesses;
            let reads = &mut self.memory[cell].reads;
            reads.retain(|read| {
                let read = accesses.get(*read as usize).map(|access| &access.known);
                read.is_some_and(|read| !known.includes(read.thread, read.time))
            });
            reads.push(number);
        }
        let loads: Vec<Rc<[Load]>> = loads.into_iter().map(Rc::from).collect();
        for (k, cell) in touched.to.iter().flat_map(|to| to.clone().enumerate()) {
            let is_packet = self.cells.is_packet(cell);
            let of = &mut self.memory[cell];
            of.reads.clear();
            of.writes_left -= 1;
            of.again = of.write.is_some();
            of.write = Some(number);
            of.first_write.get_or_insert(number);
            of.writer = rank;
            of.filled = filled.get(k).copied().unwrap_or(false);
            // What a proxy puts is told of by packets only.
            of.loads = loads
                .get(k)
                .filter(|_| is_packet || !touched.is_put)
                .cloned();
            if is_packet {
                self.wake(Reason::Packet(cell));
            }
        }
    }

    // --- ends of executions, and the next ones ---

    /// What a rank knows at the end of an execution.
    fn at_end(&self, rank: u32) -> Known {
        let blocks = &self.of_rank[rank as usize];
        let mut known = self.threads[blocks[0]].known.clone();
        for &block in blocks {
            known.learn(&self.threads[block].known);
        }
        known
    }

    /// Lets every rank know at its end that others are done with its input and output.
    fn ends(&mut self) {
        // What is last in each cell of a rank's input and output, by others or by proxies.
        let mut foreign: BTreeMap<(u32, u32), bool> = BTreeMap::new();
        let aliased = self.cells.are_aliased();
        for (index, cell) in self.memory.iter().enumerate() {
            let (owner, is_caller) = self.cells.owner(index);
            if !is_caller {
                continue;
            }
            let blocks = &self.of_rank[owner as usize];
            for read in &cell.reads {
                let load = (index, *read);
                let is_over = blocks.iter().any(|block| self.over[*block].contains(&load));
                if !is_over || aliased {
                    *foreign.entry((*read, owner)).or_insert(true) &= is_over;
                }
            }
            if let Some(write) = cell.write {
                foreign.insert((write, owner), false);
            }
        }
        // The latest first: it may know the others.
        let mut known: Vec<Known> = (0..self.program.options.ranks)
            .map(|rank| self.at_end(rank))
            .collect();
        for ((number, owner), choice) in foreign.into_iter().rev() {
            let access = &self.accesses[number as usize];
            let at_end = &mut known[owner as usize];
            if at_end.includes(access.known.thread, access.known.time) {
                continue;
            }
            let (instr, learned) = (access.instr, access.known.clone());
            at_end.learn(&learned);
            if learned.thread >= self.blocks.len() {
                self.flushes.insert(instr);
            }
            if access.rank == owner {
                continue;
            }
            let block = self.block_like(owner, learned.thread);
            self.edges.push(Edge {
                from: From::After(instr),
                to: To::End {
                    rank: owner,
                    block,
                    because: instr,
                },
                choice,
            });
            let thread = self.blocks[&(owner, block)];
            self.threads[thread].known.learn(&learned);
        }
    }

    /// Which instruction has to know of which rank's beginning, so that scratch memory can be used again.
    fn next_executions(&mut self) -> Vec<(usize, u32)> {
        let ranks = self.program.options.ranks;
        let at_end: Vec<Known> = (0..ranks).map(|rank| self.at_end(rank)).collect();
        // By rank, and rank whose beginning of one execution it knows when it begins the next one.
        let knows: Vec<Vec<bool>> = (0..ranks)
            .map(|rank| {
                let begun = |of: u32| self.has_begun(&at_end[rank as usize], of);
                let knows = |of: u32| begun(of) || self.heard.contains(&(rank, of));
                (0..ranks).map(knows).collect()
            })
            .collect();
        let mut pairs: BTreeSet<(Use, u32, bool)> = BTreeSet::new();
        // Of each rank's scratch memory, and packets, the last uses and the first writes: in a message of another size slots
        // lie over others, if in the half that was used two executions before.
        let mut regions: BTreeMap<(u32, bool), (BTreeSet<u32>, BTreeSet<u32>)> = BTreeMap::new();
        for (index, cell) in self.memory.iter().enumerate() {
            let (Some(first), Some(last)) = (cell.first_write, cell.write) else {
                continue;
            };
            let (owner, is_caller) = self.cells.owner(index);
            if is_caller {
                continue;
            }
            let is_packet = self.cells.is_packet(index);
            let halves = self.program.options.double_scratch || is_packet;
            let (lasts, firsts) = regions.entry((owner, is_packet)).or_default();
            firsts.insert(first);
            // Who knows of a read knows what was written. Blocks read packets before their execution ends.
            let by_proxy =
                |read: &u32| self.accesses[*read as usize].known.thread >= self.blocks.len();
            let reads = cell.reads.iter().copied();
            let reads = reads.filter(|read| !is_packet || by_proxy(read));
            let written = cell.reads.is_empty().then_some(last);
            for last in reads.chain(written) {
                lasts.insert(last);
                pairs.insert((Use::Access(last), first, halves));
            }
            if is_packet {
                pairs.insert((Use::End(owner), first, halves));
            }
        }
        for (lasts, firsts) in regions.values() {
            for first in firsts {
                pairs.extend(lasts.iter().map(|last| (Use::Access(*last), *first, true)));
            }
        }
        let mut demands = Vec::new();
        for (last, first, halves) in pairs {
            let first = &self.accesses[first as usize];
            let begun: Vec<u32> = (0..ranks)
                .filter(|rank| self.has_begun(&first.known, *rank))
                .collect();
            // Whether it comes after what a rank knew at the end of that execution.
            let follows = |rank: u32| {
                let between = |by: &u32| knows[*by as usize][rank as usize];
                begun.contains(&rank) || halves && begun.iter().any(between)
            };
            let is_known = match last {
                Use::End(rank) => follows(rank),
                Use::Access(last) => {
                    let Known { thread, time, .. } = self.accesses[last as usize].known;
                    let tells = |rank: u32| at_end[rank as usize].includes(thread, time);
                    (0..ranks).any(|rank| tells(rank) && follows(rank))
                }
            };
            if is_known {
                continue;
            }
            let rank = match last {
                Use::End(rank) => rank,
                Use::Access(last) => {
                    let last = &self.accesses[last as usize];
                    if last.known.thread >= self.blocks.len() {
                        self.flushes.insert(last.instr);
                    }
                    last.rank
                }
            };
            if rank != first.rank {
                demands.push((first.instr, rank));
            }
        }
        demands
    }
}

/// The last use of scratch memory in an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    Access(u32),
    /// The end of the execution of the rank that has it: packets may be cleared then.
    End(u32),
}

/// The port channels that an instruction hands requests to.
fn port_channels(program: &Program, raw: &Raw) -> Vec<u32> {
    let port = |id: &&u32| program.trace.ends[**id as usize].kind == ChannelKind::Port;
    match raw {
        Raw::Data(Data {
            kind: Kind::Put { channel, .. },
            ..
        }) => vec![*channel],
        Raw::Other(Op::Signal { channels, .. } | Op::Flush { channels }) => {
            channels.iter().filter(port).copied().collect()
        }
        _ => Vec::new(),
    }
}

/// The counters that an instruction raises, and those that it waits for.
pub(super) fn names(program: &Program, raw: &Raw) -> (Vec<Name>, Vec<Name>) {
    let end = |id: &u32| program.trace.ends[*id as usize];
    let out = |End {
                   rank,
                   peer,
                   kind,
                   ordinal,
               }| Name::Channel(rank, peer, kind, ordinal);
    let back = |End {
                    rank,
                    peer,
                    kind,
                    ordinal,
                }| Name::Channel(peer, rank, kind, ordinal);
    let semaphores = |ids: &[u32]| ids.iter().map(|id| Name::Semaphore(*id)).collect();
    match raw {
        Raw::Other(Op::Signal { channels, .. }) => {
            (channels.iter().map(end).map(out).collect(), Vec::new())
        }
        Raw::Other(Op::Wait { channels, .. }) => {
            (Vec::new(), channels.iter().map(end).map(back).collect())
        }
        Raw::Other(Op::Release { semaphores: ids }) => (semaphores(ids), Vec::new()),
        Raw::Other(Op::Acquire { semaphores: ids }) => (Vec::new(), semaphores(ids)),
        Raw::Data(Data {
            kind:
                Kind::Put {
                    channel,
                    signal: true,
                    ..
                },
            ..
        }) => (vec![out(end(channel))], Vec::new()),
        _ => (Vec::new(), Vec::new()),
    }
}
