//! The simulation: every thread block of every rank, one schedule, vector clocks.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use rustc_hash::FxHashSet as HashSet;

use super::clock::{Clock, Stamp};
use super::compile::{Action, Compiled, Data, Geometry, Site, chunk_of};
use super::value::Value;
use super::{Code, Diagnostic, Options, Place};
use crate::plan::{Buffer, Collective, Content, Op, Operand, Plan};

/// A granule of memory.
#[derive(Clone, Debug, Default)]
struct Cell {
    value: Value,
    write: Stamp,
    /// Those since the last write that no other one follows.
    reads: Vec<Stamp>,
    /// Packets: the epoch of the flag.
    flag: u32,
    /// Packets: which rank wrote it.
    writer: u32,
    /// Packets: an earlier write had the same flag, so the flag alone does not tell them apart.
    again: bool,
    /// The loads whose values went into this one: they are over once it has been seen.
    loads: Option<Loads>,
}

/// Loads of cells.
type Loads = Rc<[(usize, Stamp)]>;

/// A signal that was sent.
#[derive(Clone, Debug)]
struct Signal {
    stamp: Stamp,
    execution: u32,
    /// What the sender knew.
    sender: Rc<[u32]>,
    /// What its taker learns; relaxed signals teach nothing, or what was before the execution.
    payload: Option<Rc<[u32]>>,
}

/// A signal's payload, and what its sender's execution began with.
type Queued = (Option<Rc<[u32]>>, Option<Rc<[u32]>>);

/// A counter that is signalled and waited for.
#[derive(Debug, Default)]
struct Counter {
    arrived: u64,
    taken: u64,
    /// One block signals: the payloads of signals that were not taken yet, and of the last taken. What a semaphore has at
    /// first is taken before, and tells nothing.
    queue: VecDeque<Queued>,
    newest: Option<Rc<[u32]>>,
    /// Several blocks signal: all of them.
    signals: Vec<Signal>,
    /// Takes by several blocks, and whether there was enough for all others too.
    takes: Vec<(Stamp, bool)>,
}

#[derive(Debug, Default)]
struct Barrier {
    arrived: Vec<usize>,
    rounds: u64,
}

#[derive(Debug, Default)]
struct Block {
    at: usize,
    /// The barrier round it waits for the end of.
    meeting: Option<u64>,
    /// The packet cell that was not there when it last looked.
    stuck: Option<usize>,
    /// Loads that are over, because their values came back in packets.
    over: HashSet<(usize, Stamp)>,
    /// Signals of this execution, by counter with several signallers.
    sent: BTreeMap<usize, u64>,
    taken: BTreeMap<usize, u64>,
}

pub(super) struct Run<'a> {
    plan: &'a Plan,
    compiled: &'a Compiled,
    geometry: &'a Geometry,
    max: usize,
    relaxed_starts: bool,
    note: &'a str,
    rank_of: Vec<u32>,
    clocks: Vec<Clock>,
    /// By port: the pusher's time at its last request.
    pushed: Vec<u32>,
    cells: Vec<Cell>,
    counters: Vec<Counter>,
    barriers: Vec<Barrier>,
    blocks: Vec<Block>,
    execution: Vec<u32>,
    /// By rank and execution: what it knew at the beginning.
    starts: Vec<Vec<Rc<[u32]>>>,
    /// By rank: whether its blocks write to others' memory, other than packets.
    reaches: Vec<bool>,
    /// By rank and execution: its beginning.
    begun: Vec<Vec<Stamp>>,
    /// By rank: whose packets of which execution it has read since the last fence.
    read_from: Vec<BTreeMap<u32, u32>>,
    /// Packets that a block has read, by block, cell and execution, where proxies may be asked to put
    /// them on.
    seen_packets: HashSet<(usize, usize, u32)>,
    has_ports: bool,
    /// By rank, of the last executions: the loads that are over.
    known_over: Vec<VecDeque<HashSet<(usize, Stamp)>>>,
    /// By rank and execution: the proxies' loads that were known to be over at the beginning.
    starts_over: Vec<Vec<Vec<(usize, Stamp)>>>,
    diagnostics: Vec<Diagnostic>,
    seen: HashSet<(Code, u32, u32)>,
    totals: Vec<Vec<Value>>,
}

/// Which blocked operations may go on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Those whose outcome no other block can change.
    Certain,
    /// This one alone can.
    Only,
    /// Others can too.
    OneOf,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        compiled: &'a Compiled,
        geometry: &'a Geometry,
        options: &Options,
        note: &'a str,
    ) -> Self {
        let ranks = plan.ranks.len();
        let blocks = compiled.first_block[ranks];
        let threads = blocks + compiled.ports.len();
        let mut clocks = vec![Clock::new(threads); threads];
        for (thread, clock) in clocks.iter_mut().enumerate() {
            clock.tick(thread);
        }
        let mut rank_of = Vec::with_capacity(blocks);
        for (rank, program) in (0..).zip(&plan.ranks) {
            rank_of.resize(rank_of.len() + program.blocks.len(), rank);
        }
        let mut reaches = vec![false; ranks];
        for (rank, op) in plan.all_ops() {
            let (_, to) = op.operands();
            let is_remote = |to: &Operand| to.rank != rank && to.buffer != Buffer::Packets;
            reaches[rank as usize] |= !matches!(op, Op::Put { .. }) && to.iter().any(is_remote);
        }
        let counters = compiled.counters.iter().map(|info| Counter {
            arrived: info.initial.into(),
            ..Counter::default()
        });
        Self {
            plan,
            compiled,
            geometry,
            max: options.max_diagnostics,
            relaxed_starts: options.relaxed_starts,
            note,
            rank_of,
            clocks,
            pushed: vec![0; compiled.ports.len()],
            cells: vec![Cell::default(); compiled.layout.cells(ranks) as usize],
            counters: counters.collect(),
            barriers: std::iter::repeat_with(Barrier::default)
                .take(compiled.barriers)
                .collect(),
            blocks: std::iter::repeat_with(Block::default)
                .take(blocks)
                .collect(),
            execution: vec![0; ranks],
            starts: vec![Vec::new(); ranks],
            reaches,
            begun: vec![Vec::new(); ranks],
            read_from: vec![BTreeMap::new(); ranks],
            seen_packets: HashSet::default(),
            has_ports: plan.has_ports(),
            known_over: vec![VecDeque::new(); ranks],
            starts_over: vec![Vec::new(); ranks],
            diagnostics: Vec::new(),
            seen: HashSet::default(),
            totals: Vec::new(),
        }
    }

    pub(super) fn run(mut self) -> Vec<Diagnostic> {
        let executions = self.geometry.messages.len() as u32;
        for rank in 0..self.execution.len() {
            self.begin(rank as u32);
        }
        while self.diagnostics.len() < self.max {
            let mut progress = false;
            for rank in 0..self.execution.len() {
                while self.execution[rank] < executions {
                    let (first, end) = self.blocks_of(rank);
                    for block in first..end {
                        while self.step(block, Turn::Certain) {
                            progress = true;
                        }
                    }
                    if !(first..end).all(|block| self.is_done(block)) {
                        break;
                    }
                    self.end(rank as u32);
                    progress = true;
                }
            }
            if self.execution.iter().all(|done| *done == executions) {
                break;
            }
            if progress {
                continue;
            }
            let ready: Vec<usize> = (0..self.blocks.len())
                .filter(|block| self.is_ready(*block))
                .collect();
            match ready[..] {
                [] => {
                    self.deadlock();
                    break;
                }
                [only] => self.step(only, Turn::Only),
                [first, ..] => self.step(first, Turn::OneOf),
            };
        }
        self.diagnostics.truncate(self.max);
        self.diagnostics
    }

    fn blocks_of(&self, rank: usize) -> (usize, usize) {
        let first = &self.compiled.first_block;
        (first[rank], first[rank + 1])
    }

    fn steps(&self, block: usize) -> &'a [(u32, Action)] {
        let execution = self.execution[self.rank_of[block] as usize];
        match self.compiled.programs.get(execution as usize) {
            Some(program) => &program[block].steps,
            None => &[],
        }
    }

    fn is_done(&self, block: usize) -> bool {
        self.blocks[block].at >= self.steps(block).len()
    }

    fn epoch(&self, block: usize) -> u32 {
        self.execution[self.rank_of[block] as usize] + 1
    }

    // --- the beginning and end of an execution of a rank ---

    /// The caller has filled the input, and nobody may rely on the output any more.
    fn begin(&mut self, rank: u32) {
        let execution = self.execution[rank as usize];
        let (first, end) = self.blocks_of(rank as usize);
        let mut joined = Clock::new(self.clocks.len());
        for block in first..end {
            let times = self.clocks[block].share();
            joined.join(&times);
        }
        let mut over: HashSet<(usize, Stamp)> = (first..end)
            .flat_map(|block| std::mem::take(&mut self.blocks[block].over))
            .collect();
        let by_ports = over.iter().filter(|(_, load)| self.is_port(*load));
        let by_ports: Vec<(usize, Stamp)> = by_ports.copied().collect();
        // The fence at the beginning: what the packets that were read could carry over. Of the
        // proxies' loads, only this rank's own matter to it.
        for (from, execution) in std::mem::take(&mut self.read_from[rank as usize]) {
            let (from, execution) = (from as usize, execution as usize);
            joined.join(&self.starts[from][execution]);
            let theirs = self.starts_over[from][execution].iter().copied();
            over.extend(theirs.filter(|(_, load)| self.owner(*load) == rank));
        }
        self.starts_over[rank as usize].push(by_ports);
        let stamp = Stamp {
            thread: first as u32,
            time: joined.of(first),
            site: Stamp::CALLER,
        };
        // Whatever a block of the rank knew, all know now; slots are written again two later.
        let known = &mut self.known_over[rank as usize];
        known.push_back(over);
        if known.len() > 2 {
            known.pop_front();
        }
        let over = known[known.len() - 1].clone();
        for cell in self.compiled.layout.caller(rank) {
            self.caller_writes(rank, &joined, &over, stamp, cell);
        }
        self.begun[rank as usize].push(stamp);
        if let Some(message) = self.geometry.messages.get(execution as usize) {
            let input = self.compiled.layout.input(rank, *message);
            for at in 0..message * u64::from(self.plan.input_blocks) {
                self.cells[input + at as usize].value = Value::input(execution, rank, at);
            }
        }
        self.starts[rank as usize].push(joined.share());
        for block in first..end {
            self.clocks[block] = joined.clone();
            self.clocks[block].tick(block);
            self.blocks[block] = Block::default();
        }
    }

    fn caller_writes(
        &mut self,
        rank: u32,
        clock: &Clock,
        over: &HashSet<(usize, Stamp)>,
        stamp: Stamp,
        at: usize,
    ) {
        let cell = &mut self.cells[at];
        let (write, reads) = (cell.write, std::mem::take(&mut cell.reads));
        (cell.value, cell.write, cell.loads) = (Value::NONE, stamp, None);
        let late = std::iter::once(write)
            .chain(reads)
            .find(|access| !access.before(clock) && !over.contains(&(at, *access)));
        if let Some(other) = late {
            let what = self.compiled.layout.describe(at, self.chunk(rank));
            let done = if other == write { "written" } else { "read" };
            let reason = format!(
                "{what} may still be {done} here when rank {rank}'s execution is over, or before its \
                 next one began, while the caller uses it; let that rank wait for a signal that \
                 follows this (at its end), or this op for a signal of that rank (at its beginning)"
            );
            self.report_at(Code::Race, other, reason);
        }
    }

    /// The caller looks at the output.
    fn end(&mut self, rank: u32) {
        let execution = self.execution[rank as usize];
        let (first, end) = self.blocks_of(rank as usize);
        let mut joined = Clock::new(self.clocks.len());
        for block in first..end {
            let times = self.clocks[block].share();
            joined.join(&times);
        }
        let message = self.geometry.messages[execution as usize];
        let output = self.compiled.layout.output(rank, message);
        for at in 0..message * u64::from(self.plan.output_blocks) {
            let cell = &self.cells[output + at as usize];
            let value = cell.value;
            if !cell.write.before(&joined) {
                let what = self
                    .compiled
                    .layout
                    .describe(output + at as usize, self.chunk(rank));
                let reason = format!(
                    "{what} is written here, but rank {rank} does not wait for that before its \
                     execution is over; it needs to wait for a signal that follows this op"
                );
                self.report_at(Code::Race, cell.write, reason);
                continue;
            }
            if let Some(expected) = self.expected(execution, rank, at, message) {
                self.compare(rank, execution, at, message, value, expected);
            }
        }
        self.execution[rank as usize] += 1;
        self.begin(rank);
    }

    fn chunk(&self, rank: u32) -> u64 {
        let execution = self.execution[rank as usize] as usize;
        let messages = &self.geometry.messages;
        let message = messages.get(execution).or(messages.last());
        chunk_of(self.plan, message.copied().unwrap_or(1)).max(1)
    }

    // --- post-condition ---

    /// What must be in granule `at` of `rank`'s output.
    fn expected(&mut self, execution: u32, rank: u32, at: u64, message: u64) -> Option<Value> {
        let (block, inside) = ((at / message) as u32, at % message);
        let at = |block: u32| u64::from(block) * message + inside;
        match self.plan.content(rank, block) {
            Content::Any => None,
            Content::Reduction { block } => Some(self.total(execution, at(block))),
            Content::Inputs(inputs) => Some(inputs.iter().fold(Value::NONE, |sum, input| {
                sum.plus(Value::input(execution, input.rank, at(input.block)))
            })),
        }
    }

    /// The sum of everyone's granule `at`.
    fn total(&mut self, execution: u32, at: u64) -> Value {
        let ranks = self.plan.world_size();
        while self.totals.len() <= execution as usize {
            self.totals.push(Vec::new());
        }
        let known = &mut self.totals[execution as usize];
        while known.len() <= at as usize {
            let at = known.len() as u64;
            known.push((0..ranks).fold(Value::NONE, |sum, rank| {
                sum.plus(Value::input(execution, rank, at))
            }));
        }
        known[at as usize]
    }

    fn compare(
        &mut self,
        rank: u32,
        execution: u32,
        at: u64,
        message: u64,
        value: Value,
        expected: Value,
    ) {
        let reduces = self.plan.collective.reduces();
        let ranks = self.plan.world_size();
        // Of a custom collective, nothing is said about averages.
        let divides = self.divides() && self.plan.collective != Collective::Custom;
        let finished = !reduces || ranks == 1 || !divides || value.finished() == 1;
        let copied = reduces || !divides || value.finished() == 0;
        if value.same_inputs(expected) && finished && copied {
            return;
        }
        let cell = self.compiled.layout.output(rank, message) + at as usize;
        let site = self.cells[cell].write;
        let chunk = self.chunk(rank);
        let what = format!(
            "after execution {execution}, chunk {} of rank {rank}'s output",
            at / chunk
        );
        let reason = if value.is_none() {
            format!("{what} was not written; some op must write it")
        } else if value.same_inputs(expected) {
            let times = value.finished();
            format!(
                "{what} went through {times} reductions marked `last`, {} fits; an average would be \
                 divided that often",
                u32::from(reduces)
            )
        } else {
            let at = match self.plan.collective {
                Collective::ReduceScatter => u64::from(rank) * message + at,
                _ => at,
            };
            let wrong = self.explain(execution, at, value, expected, reduces);
            format!("{what} is not the {}: {wrong}", self.plan.collective.name())
        };
        self.report_at(Code::PostCondition, site, reason);
    }

    /// Says which contribution is missing, or there twice, if it is one.
    fn explain(
        &self,
        execution: u32,
        at: u64,
        value: Value,
        expected: Value,
        reduces: bool,
    ) -> String {
        if reduces {
            for rank in 0..self.plan.world_size() {
                let input = Value::input(execution, rank, at);
                if value.same_inputs(expected.minus(input)) {
                    return format!("rank {rank}'s input is missing");
                }
                if value.same_inputs(expected.plus(input)) {
                    return format!("rank {rank}'s input is in it twice");
                }
                for old in 0..execution {
                    let stale = Value::input(old, rank, at);
                    if value.same_inputs(expected.minus(input).plus(stale)) {
                        return format!("rank {rank}'s input is that of execution {old}");
                    }
                }
            }
        } else if value.count() == 1 {
            let inputs =
                self.geometry.messages[execution as usize] * u64::from(self.plan.input_blocks);
            let chunk = chunk_of(self.plan, self.geometry.messages[execution as usize]);
            for old in (0..=execution).rev() {
                for rank in 0..self.plan.world_size() {
                    for at in 0..inputs {
                        if value.same_inputs(Value::input(old, rank, at)) {
                            return format!(
                                "it holds chunk {} of rank {rank}'s input of execution {old}",
                                at / chunk
                            );
                        }
                    }
                }
            }
        }
        format!(
            "it is made of {} inputs, {} are right; the wrong ones are among them, or the wrong parts",
            value.count(),
            expected.count()
        )
    }

    /// Whether a `last` reduction may divide.
    fn divides(&self) -> bool {
        matches!(
            self.plan.reduce_op,
            None | Some(crossweft_device::ReduceOp::Avg)
        )
    }

    // --- steps ---

    /// Does the next step of a block, unless it has to wait.
    fn step(&mut self, block: usize, turn: Turn) -> bool {
        let Some((site, action)) = self.steps(block).get(self.blocks[block].at) else {
            return false;
        };
        let site = *site;
        match action {
            Action::Data { data, last } => {
                if !self.packets_are_there(block, data) {
                    return false;
                }
                self.move_data(block, site, data, *last);
            }
            Action::Put {
                port,
                data,
                inbox,
                flush,
            } => {
                self.push(block, *port);
                if let Some(data) = data {
                    self.put(block, *port, site, data);
                }
                if let Some(inbox) = inbox {
                    self.port_signal(block, *port, site, *inbox);
                }
                if *flush {
                    self.flush(block, *port);
                }
            }
            Action::Signal { inboxes, relaxed } => {
                let stamp = self.stamp(block, site);
                let sender = self.clocks[block].share();
                for (inbox, port) in inboxes {
                    if let Some(port) = port {
                        self.push(block, *port);
                        self.port_signal(block, *port, site, *inbox);
                        continue;
                    }
                    let payload = if *relaxed {
                        self.start(block)
                    } else {
                        Some(Rc::clone(&sender))
                    };
                    self.signal(*inbox, stamp, Rc::clone(&sender), payload);
                }
                self.clocks[block].tick(block);
            }
            Action::Wait { inboxes, relaxed } => {
                if !self.may_take(inboxes, turn) {
                    return false;
                }
                for inbox in inboxes {
                    self.take_signal(block, site, *inbox, *relaxed, turn);
                }
            }
            Action::Flush { ports } => {
                for port in ports {
                    self.push(block, *port);
                    self.flush(block, *port);
                }
            }
            Action::Acquire { semaphores } => {
                if !self.may_take(semaphores, turn) {
                    return false;
                }
                for semaphore in semaphores {
                    self.acquire(block, site, *semaphore, turn);
                }
            }
            Action::Release { semaphores } => {
                let stamp = self.stamp(block, site);
                let sender = self.clocks[block].share();
                for semaphore in semaphores {
                    let payload = Some(Rc::clone(&sender));
                    self.signal(*semaphore, stamp, Rc::clone(&sender), payload);
                }
                self.clocks[block].tick(block);
            }
            Action::Barrier { id, blocks } => {
                if !self.meet(block, *id, *blocks) {
                    return false;
                }
            }
        }
        self.blocks[block].at += 1;
        self.blocks[block].stuck = None;
        true
    }

    /// What a relaxed signal tells: that the execution has begun, if that is to be relied on.
    fn start(&self, block: usize) -> Option<Rc<[u32]>> {
        let rank = self.rank_of[block] as usize;
        let start = self.starts[rank].last().map(Rc::clone);
        start.filter(|_| self.relaxed_starts)
    }

    fn stamp(&self, thread: usize, site: u32) -> Stamp {
        Stamp {
            thread: thread as u32,
            time: self.clocks[thread].of(thread),
            site,
        }
    }

    /// Whether a block waits for something that is there, but whose order others may change.
    fn is_ready(&self, block: usize) -> bool {
        match self.steps(block).get(self.blocks[block].at) {
            Some((_, Action::Wait { inboxes: ids, .. } | Action::Acquire { semaphores: ids })) => {
                self.may_take(ids, Turn::Only)
            }
            _ => false,
        }
    }

    /// Whether several blocks signal or take.
    fn is_shared(&self, counter: usize) -> bool {
        let info = &self.compiled.counters[counter];
        info.signals.len() > 1 || info.waits.len() > 1
    }

    fn may_take(&self, ids: &[usize], turn: Turn) -> bool {
        ids.iter().all(|id| {
            let wanted = ids.iter().filter(|other| *other == id).count() as u64;
            let counter = &self.counters[*id];
            counter.arrived >= counter.taken + wanted
                && (turn != Turn::Certain || !self.is_shared(*id))
        })
    }

    fn signal(&mut self, id: usize, stamp: Stamp, sender: Rc<[u32]>, payload: Option<Rc<[u32]>>) {
        let shared = self.compiled.counters[id].signals.len() > 1;
        let counter = &mut self.counters[id];
        counter.arrived += 1;
        if !shared {
            let start = self.start(stamp.thread as usize);
            self.counters[id].queue.push_back((payload, start));
            return;
        }
        let block = stamp.thread as usize;
        let execution = self.execution[self.rank_of[block] as usize];
        counter.signals.push(Signal {
            stamp,
            execution,
            sender,
            payload,
        });
        *self.blocks[block].sent.entry(id).or_default() += 1;
    }

    fn take_signal(&mut self, block: usize, site: u32, id: usize, relaxed: bool, turn: Turn) {
        let stamp = self.stamp(block, site);
        if self.compiled.counters[id].waits.len() > 1 {
            let last = self.counters[id].takes.last().map(|(last, _)| *last);
            if let Some(last) = last.filter(|last| !last.before(&self.clocks[block])) {
                let info = &self.compiled.counters[id];
                let reason = format!(
                    "it waits on channel {} while {} does: which of them takes which signal is left \
                     to chance; order them, or give each block a channel of its own",
                    info.id,
                    self.name(last)
                );
                self.report_with(Code::Race, site, Some(last), reason);
            }
            self.counters[id].takes.push((stamp, true));
        }
        self.counters[id].taken += 1;
        let position = self.counters[id].taken;
        self.learn(block, id, position, relaxed, turn);
    }

    /// What the taker of the `position`-th signal knows from it, in whatever order they came.
    fn learn(&mut self, block: usize, id: usize, position: u64, relaxed: bool, turn: Turn) {
        let info = &self.compiled.counters[id];
        if info.signals.len() <= 1 {
            // Of those before, the last one that is not relaxed knew most.
            let counter = &mut self.counters[id];
            let mut begun = None;
            let sent = position.saturating_sub(info.initial.into());
            if info.waits.len() <= 1 || !info.semaphore {
                if sent > 0
                    && let Some((payload, start)) = counter.queue.pop_front()
                {
                    counter.newest = payload.or(counter.newest.take());
                    begun = start;
                }
            } else {
                // Several blocks acquire: signals are kept, each taker knows those up to its own.
                let newest = counter.queue.iter().take(sent as usize).rev();
                counter.newest = newest.filter_map(|(payload, _)| payload.clone()).next();
            }
            let payload = counter.newest.clone();
            let sender = info.signals.first().map(|(sender, _)| *sender);
            let payload = match (relaxed, sender) {
                (false, _) => payload,
                // The sender may be ahead by now; what it began with then is in what it sent.
                (true, Some(_)) if self.relaxed_starts => begun,
                _ => None,
            };
            if let Some(payload) = payload {
                self.clocks[block].join(&payload);
            }
            return;
        }
        if relaxed {
            return;
        }
        // This many signals have been sent by now, but which ones is not certain.
        let Some(sure) = (position as usize).checked_sub(info.initial as usize + 1) else {
            return;
        };
        let signals = &self.counters[id].signals;
        let mut learned = Clock::new(self.clocks.len());
        let mut candidates: Vec<Option<Rc<[u32]>>> = Vec::with_capacity(signals.len());
        for signal in signals {
            candidates.push(signal.payload.clone());
            let Some(payload) = &signal.payload else {
                continue;
            };
            // How many can have come before this one?
            let thread = signal.stamp.thread;
            let mut earlier = signals
                .iter()
                .filter(|other| {
                    let knows = other.sender[thread as usize] >= signal.stamp.time;
                    let later = other.stamp.time > signal.stamp.time;
                    other.stamp == signal.stamp
                        || !(if other.stamp.thread == thread {
                            later
                        } else {
                            knows
                        })
                })
                .count();
            if turn != Turn::Only {
                earlier += self.yet_to_come(id, signal);
            }
            if earlier <= sure + 1 {
                learned.join(payload);
            }
        }
        // Whichever they were, it knows what the least telling ones tell.
        if turn != Turn::Only {
            for (of, total) in &info.signals {
                let sent = self.blocks[*of].sent.get(&id).copied().unwrap_or(0);
                let least: Rc<[u32]> = self.clocks[*of].clone().share();
                candidates.extend((sent..*total).map(|_| Some(Rc::clone(&least))));
            }
        }
        let least: Vec<u32> = (0..self.clocks.len())
            .map(|thread| {
                let told = |candidate: &Option<Rc<[u32]>>| {
                    candidate.as_ref().map_or(0, |payload| payload[thread])
                };
                let mut told: Vec<u32> = candidates.iter().map(told).collect();
                *told.select_nth_unstable(sure).1
            })
            .collect();
        learned.join(&least);
        self.clocks[block].join(&learned.share());
    }

    /// Signals of the same execution that might still be sent, and might have been sent before.
    fn yet_to_come(&self, id: usize, signal: &Signal) -> usize {
        let pending = |(block, total): &(usize, u64)| {
            let rank = self.rank_of[*block] as usize;
            let same = self.execution[rank] == signal.execution;
            let knows = self.clocks[*block].of(signal.stamp.thread as usize) >= signal.stamp.time;
            if *block == signal.stamp.thread as usize || !same || knows {
                return 0;
            }
            total - self.blocks[*block].sent.get(&id).copied().unwrap_or(0)
        };
        let signals = &self.compiled.counters[id].signals;
        signals.iter().map(pending).sum::<u64>() as usize
    }

    fn acquire(&mut self, block: usize, site: u32, id: usize, turn: Turn) {
        let stamp = self.stamp(block, site);
        let info = &self.compiled.counters[id];
        if info.waits.len() <= 1 {
            self.counters[id].taken += 1;
            let position = self.counters[id].taken;
            self.learn(block, id, position, false, turn);
            return;
        }
        let to_come = info.waits.iter().map(|(of, total)| {
            let taken = self.blocks[*of].taken.get(&id).copied().unwrap_or(0);
            total - taken
        });
        let (to_come, counter) = (to_come.sum::<u64>(), &self.counters[id]);
        let enough = counter.arrived - counter.taken >= to_come;
        let clock = &self.clocks[block];
        let clash = counter
            .takes
            .iter()
            .find(|(other, plenty)| !(other.before(clock) || enough && *plenty))
            .map(|(other, _)| *other);
        let known = counter
            .takes
            .iter()
            .filter(|(other, _)| other.before(clock));
        let position = known.count() as u64 + 1;
        if let Some(other) = clash {
            let reason = format!(
                "it acquires semaphore {} while {} does, and there is not enough for both: which of \
                 them goes first is left to chance; order them, or give each block its own semaphore",
                info.id,
                self.name(other)
            );
            self.report_with(Code::Race, site, Some(other), reason);
        }
        let counter = &mut self.counters[id];
        counter.takes.push((stamp, enough));
        counter.taken += 1;
        *self.blocks[block].taken.entry(id).or_default() += 1;
        // Later takers must know of this one.
        self.learn(block, id, position, false, turn);
        self.clocks[block].tick(block);
    }

    fn meet(&mut self, block: usize, id: usize, blocks: usize) -> bool {
        let barrier = &mut self.barriers[id];
        let Some(round) = self.blocks[block].meeting else {
            self.blocks[block].meeting = Some(barrier.rounds);
            barrier.arrived.push(block);
            if barrier.arrived.len() < blocks {
                return false;
            }
            barrier.rounds += 1;
            let arrived = std::mem::take(&mut barrier.arrived);
            let mut joined = Clock::new(self.clocks.len());
            for block in &arrived {
                let times = self.clocks[*block].share();
                joined.join(&times);
            }
            for block in arrived {
                self.clocks[block] = joined.clone();
                self.clocks[block].tick(block);
            }
            self.blocks[block].meeting = None;
            return true;
        };
        if barrier.rounds == round {
            return false;
        }
        self.blocks[block].meeting = None;
        true
    }

    // --- ports ---

    fn is_port(&self, event: Stamp) -> bool {
        event.thread as usize >= self.blocks.len()
    }

    /// The rank that a thread belongs to.
    fn owner(&self, event: Stamp) -> u32 {
        let thread = event.thread as usize;
        let block = match thread.checked_sub(self.blocks.len()) {
            Some(port) => self.compiled.ports[port].block,
            None => thread,
        };
        self.rank_of[block]
    }

    fn port_thread(&self, port: usize) -> usize {
        self.blocks.len() + port
    }

    /// Hands a request to the proxy: it comes after what its sender knows, and after those requests
    /// on the channel that the sender knows of.
    fn push(&mut self, block: usize, port: usize) {
        let thread = self.port_thread(port);
        for sibling in &self.compiled.ports[port].siblings {
            let (owner, time) = (self.compiled.ports[*sibling].block, self.pushed[*sibling]);
            if time != 0 && self.clocks[block].of(owner) >= time {
                let sibling = self.port_thread(*sibling);
                let times = self.clocks[sibling].share();
                self.clocks[thread].join(&times);
            }
        }
        let times = self.clocks[block].share();
        self.clocks[thread].join(&times);
        self.pushed[port] = self.clocks[block].of(block);
        self.clocks[block].tick(block);
    }

    fn put(&mut self, block: usize, port: usize, site: u32, data: &Data) {
        let epoch = self.epoch(block);
        let thread = self.port_thread(port);
        let (from, to) = (data.from[0].at(epoch), data.to[0].at(epoch));
        let packets = data.to[0].packets;
        for at in 0..data.cells {
            if packets && self.cells[from + at].flag != epoch {
                let what = self.describe(block, from + at);
                let reason = format!(
                    "{what} is sent as it is, but holds no packets of this execution; they must have \
                     been written before"
                );
                self.report(Code::Uninitialised, site, reason);
            }
            let value = if packets && self.seen_packets.contains(&(block, from + at, epoch)) {
                // This block has seen the flag and asks afterwards: the proxy finds the same packet.
                let stamp = self.stamp(thread, site);
                let cell = &mut self.cells[from + at];
                remember(&mut cell.reads, stamp, &self.clocks[thread]);
                cell.value
            } else {
                self.read(thread, site, from + at)
            };
            let before = self.cells[from + at].loads.as_deref().unwrap_or_default();
            let loads = packets.then(|| {
                let mine = (from + at, self.stamp(thread, site));
                before.iter().copied().chain([mine]).collect()
            });
            self.write(thread, site, to + at, value, &[]);
            self.cells[to + at].loads = loads;
            if packets {
                self.mark(block, thread, site, to + at);
            }
        }
        if from != to && from.abs_diff(to) < data.cells {
            self.overlap(block, site, to);
        }
    }

    fn port_signal(&mut self, block: usize, port: usize, site: u32, inbox: usize) {
        let thread = self.port_thread(port);
        let payload = self.clocks[thread].share();
        // The pusher's clock has ticked since.
        let mut stamp = self.stamp(block, site);
        stamp.time = self.pushed[port];
        let sender = self.clocks[block].share();
        self.signal(inbox, stamp, sender, Some(payload));
        self.clocks[thread].tick(thread);
    }

    fn flush(&mut self, block: usize, port: usize) {
        let thread = self.port_thread(port);
        let times = self.clocks[thread].share();
        self.clocks[block].join(&times);
        self.clocks[thread].tick(thread);
    }

    // --- memory ---

    fn packets_are_there(&mut self, block: usize, data: &Data) -> bool {
        let epoch = self.epoch(block);
        if let Some(stuck) = self.blocks[block].stuck
            && self.cells[stuck].flag != epoch
        {
            return false;
        }
        for place in data.from.iter().filter(|place| place.packets) {
            let first = place.at(epoch);
            for at in first..first + data.cells {
                if self.cells[at].flag != epoch {
                    self.blocks[block].stuck = Some(at);
                    return false;
                }
            }
        }
        true
    }

    fn move_data(&mut self, block: usize, site: u32, data: &Data, last: Option<bool>) {
        let epoch = self.epoch(block);
        self.overlaps(block, site, data);
        let mut values = vec![Value::NONE; data.cells];
        // Only packets tell that a load is over.
        let tracked = self.plan.packet_slots > 0;
        let mut loads = vec![Vec::new(); if tracked { data.cells } else { 0 }];
        let mut over = vec![Vec::new(); loads.len()];
        for place in &data.from {
            let first = place.at(epoch);
            for (index, sum) in values.iter_mut().enumerate() {
                let at = first + index;
                let value = if place.packets {
                    self.read_packet(block, site, at)
                } else {
                    self.read(block, site, at)
                };
                *sum = sum.plus(value);
                if tracked {
                    let before = self.cells[at].loads.as_deref().unwrap_or_default();
                    loads[index].extend_from_slice(before);
                    if place.packets {
                        over[index].extend_from_slice(before);
                    } else {
                        loads[index].push((at, self.stamp(block, site)));
                    }
                }
            }
        }
        let loads: Vec<Loads> = loads.into_iter().map(Rc::from).collect();
        if last.is_some()
            && self.divides()
            && !matches!(self.plan.collective, Collective::Test | Collective::Custom)
            && values.iter().any(|value| value.finished() > 0)
        {
            let reason = "it reduces a result that went through a reduction marked `last`, so an average \
                          would be divided too early; mark only the final one";
            self.report(Code::PostCondition, site, reason.to_owned());
        }
        for place in &data.to {
            let first = place.at(epoch);
            for (index, value) in values.iter().enumerate() {
                let at = first + index;
                let value = if last == Some(true) {
                    value.finish()
                } else {
                    *value
                };
                let over = over.get(index).map_or(&[][..], Vec::as_slice);
                self.write(block, site, at, value, over);
                self.cells[at].loads = loads.get(index).cloned();
                if place.packets {
                    self.mark(block, block, site, at);
                }
            }
        }
        // What waits for packets ends with a sync: what follows comes after all of them. Of loads elsewhere, the rank
        // must know only if it writes there itself, or if they are a proxy's, for others.
        let rank = self.rank_of[block];
        let layout = &self.compiled.layout;
        let asks = |(cell, load): &(usize, Stamp)| {
            let is_own = layout.rank_of(*cell) == rank;
            is_own || self.reaches[rank as usize] || layout.is_packet(*cell) || self.is_port(*load)
        };
        let over: Vec<(usize, Stamp)> = over.into_iter().flatten().filter(asks).collect();
        self.blocks[block].over.extend(over);
    }

    /// Threads of a block work side by side: what one op reads or writes may only overlap exactly.
    fn overlaps(&mut self, block: usize, site: u32, data: &Data) {
        let epoch = self.epoch(block);
        for (index, to) in data.to.iter().enumerate() {
            let at = to.at(epoch);
            let others = data.from.iter().chain(&data.to[..index]);
            let shifted = |other: usize| other != at && other.abs_diff(at) < data.cells;
            if others.map(|place| place.at(epoch)).any(shifted) {
                self.overlap(block, site, at);
                return;
            }
        }
    }

    fn overlap(&mut self, block: usize, site: u32, at: usize) {
        let what = self.describe(block, at);
        let reason = format!(
            "what it writes from {what} on overlaps what it reads or writes elsewhere, shifted: the \
             order inside one op is not defined; move it in several ops, or elsewhere"
        );
        self.report(Code::Race, site, reason);
    }

    fn read(&mut self, thread: usize, site: u32, at: usize) -> Value {
        let stamp = self.stamp(thread, site);
        let clock = &self.clocks[thread];
        let cell = &mut self.cells[at];
        let (value, write) = (cell.value, cell.write);
        remember(&mut cell.reads, stamp, clock);
        if !write.before(clock) {
            self.race(site, at, "read", write, "written");
        } else if value.is_none() {
            let what = self.describe_at(site, at);
            let reason = if write.time == 0 {
                format!("{what} is read, but nothing was written there; write it before")
            } else {
                format!("{what} is read, but holds nothing of this execution; write it before")
            };
            self.report(Code::Uninitialised, site, reason);
        }
        value
    }

    fn read_packet(&mut self, block: usize, site: u32, at: usize) -> Value {
        let stamp = self.stamp(block, site);
        let clock = &self.clocks[block];
        let cell = &mut self.cells[at];
        let (value, write, writer) = (cell.value, cell.write, cell.writer);
        let guess = cell.again && !write.before(clock);
        remember(&mut cell.reads, stamp, clock);
        let rank = self.rank_of[block] as usize;
        let epoch = self.execution[self.rank_of[block] as usize];
        self.read_from[rank].insert(writer, epoch);
        if self.has_ports {
            self.seen_packets.insert((block, at, self.epoch(block)));
        }
        if guess {
            let what = self.describe_at(site, at);
            let reason = format!(
                "{what} is written twice in one execution, last by {}: the flag does not tell which \
                 packets these are; use another slot for each",
                self.name(write)
            );
            self.report_with(Code::Race, site, Some(write), reason);
        }
        value
    }

    /// `over`: loads that are known to be over, beside those that the clock and the block tell.
    fn write(
        &mut self,
        thread: usize,
        site: u32,
        at: usize,
        value: Value,
        over: &[(usize, Stamp)],
    ) {
        let stamp = self.stamp(thread, site);
        let clock = &self.clocks[thread];
        let cell = &mut self.cells[at];
        let write = cell.write;
        let reads = std::mem::take(&mut cell.reads);
        (cell.value, cell.write) = (value, stamp);
        // Whoever knows of a packet's read comes after its write: what was read was there.
        let was_read = !reads.is_empty() && self.compiled.layout.is_packet(at);
        if !was_read && !write.before(clock) {
            self.race(site, at, "written", write, "written");
        }
        let clock = &self.clocks[thread];
        let (block, known) = match self.blocks.get(thread) {
            Some(block) => {
                let rank = self.rank_of[thread] as usize;
                (Some(block), Some(&self.known_over[rank]))
            }
            None => (None, None),
        };
        let late = reads.into_iter().find(|read| {
            !read.before(clock)
                && !over.contains(&(at, *read))
                && !block.is_some_and(|block| block.over.contains(&(at, *read)))
                && !known.is_some_and(|known| known.iter().any(|k| k.contains(&(at, *read))))
        });
        if let Some(read) = late {
            self.race(site, at, "written", read, "read");
        }
    }

    /// What was written, by a block or a proxy on behalf of it, is a packet.
    fn mark(&mut self, block: usize, thread: usize, site: u32, at: usize) {
        let epoch = self.epoch(block);
        let writer = self.rank_of[block];
        let cell = &mut self.cells[at];
        cell.again = cell.flag == epoch;
        (cell.flag, cell.writer) = (epoch, writer);
        // At the end of an execution its half may be cleared, so that no flag ever comes again. What comes later
        // is cleared another time.
        let Some(cleared) = epoch.checked_sub(2).filter(|epoch| *epoch > 0) else {
            return;
        };
        let owner = self.compiled.layout.rank_of(at);
        let next = self.begun[owner as usize].get(cleared as usize);
        if !next.is_some_and(|next| next.before(&self.clocks[thread])) {
            let what = self.describe_at(site, at);
            let reason = format!(
                "{what} is written here, but rank {owner} may still be in its last execution but one, at whose end \
                 it may clear what it has received in that; send only after a packet or a signal that rank {owner} \
                 has sent since, in this execution or the one before"
            );
            self.report(Code::Race, site, reason);
        }
    }

    // --- reports ---

    fn race(&mut self, site: u32, at: usize, here: &str, other: Stamp, there: &str) {
        let what = self.describe_at(site, at);
        let (who, advice) = if other.site == Stamp::CALLER {
            let rank = self.owner(other);
            (
                format!("the caller of rank {rank}"),
                format!(
                    "wait for a signal that rank {rank} sends in this execution, and let it wait, \
                     before it ends, for one that follows this op"
                ),
            )
        } else {
            let mut name = self.name(other);
            if self.sites_equal(other.site, site) {
                name.push_str(" (this op, in another execution or iteration)");
            }
            (
                name,
                "signal after the one and wait before the other (across blocks of a rank: a barrier or \
                 a semaphore), or use different memory"
                    .to_owned(),
            )
        };
        let reason = format!("{what} is {here} here and {there} by {who}, in no order; {advice}");
        self.report_with(Code::Race, site, Some(other), reason);
    }

    fn sites_equal(&self, a: u32, b: u32) -> bool {
        a == b
    }

    fn describe(&self, block: usize, at: usize) -> String {
        let chunk = self.chunk(self.rank_of[block]);
        self.compiled.layout.describe(at, chunk)
    }

    fn describe_at(&self, site: u32, at: usize) -> String {
        let rank = self.compiled.sites[site as usize].rank;
        self.compiled.layout.describe(at, self.chunk(rank))
    }

    /// An event's place, unless it is the caller's.
    fn place(&self, stamp: Stamp) -> Option<Place> {
        let site = self.compiled.sites.get(stamp.site as usize)?;
        Some(Place {
            rank: site.rank,
            thread_block: site.block,
            op: site.op,
            inner: site.inner,
        })
    }

    /// An event's place in words.
    fn name(&self, stamp: Stamp) -> String {
        if stamp.site == Stamp::CALLER {
            return format!("the caller of rank {}", self.owner(stamp));
        }
        let site = &self.compiled.sites[stamp.site as usize];
        let Site {
            rank, block, op, ..
        } = site;
        match site.inner {
            None => format!("rank {rank}, thread block {block}, op {op} ({})", site.name),
            Some(inner) => format!(
                "rank {rank}, thread block {block}, op {op} (loop), its op {inner} ({})",
                site.name
            ),
        }
    }

    fn report_at(&mut self, code: Code, stamp: Stamp, reason: String) {
        if stamp.site != Stamp::CALLER && stamp.time != 0 {
            self.report(code, stamp.site, reason);
        } else if self
            .seen
            .insert((code, Stamp::CALLER, self.diagnostics.len() as u32))
        {
            self.diagnostics.push(Diagnostic {
                rank: (stamp.time != 0).then(|| self.owner(stamp)),
                thread_block: None,
                op: None,
                inner: None,
                other: None,
                code,
                message: format!("{reason}{}", self.note),
            });
        }
    }

    /// One report of a kind for each operation.
    fn report(&mut self, code: Code, site: u32, reason: String) {
        self.report_with(code, site, None, reason);
    }

    fn report_with(&mut self, code: Code, site: u32, other: Option<Stamp>, reason: String) {
        if self.diagnostics.len() >= self.max || !self.seen.insert((code, site, 0)) {
            return;
        }
        let site = &self.compiled.sites[site as usize];
        let inside = match site.inner {
            Some(inner) => format!("in its op {inner} ({}): ", site.name),
            None => String::new(),
        };
        self.diagnostics.push(Diagnostic {
            rank: Some(site.rank),
            thread_block: Some(site.block),
            op: Some(site.op),
            inner: site.inner,
            other: other.and_then(|other| self.place(other)),
            code,
            message: format!("{inside}{reason}{}", self.note),
        });
    }

    /// Nobody can go on.
    fn deadlock(&mut self) {
        for block in 0..self.blocks.len() {
            let Some((site, action)) = self.steps(block).get(self.blocks[block].at) else {
                continue;
            };
            let execution = self.execution[self.rank_of[block] as usize];
            let missing = |ids: &[usize]| {
                let id = ids.iter().find(|id| {
                    let wanted = ids.iter().filter(|other| other == id).count() as u64;
                    let counter = &self.counters[**id];
                    counter.arrived < counter.taken + wanted
                });
                let info = &self.compiled.counters[*id.unwrap_or(&ids[0])];
                let waiting = self.where_is(&info.signals.iter().map(|s| s.0).collect::<Vec<_>>());
                if info.semaphore {
                    format!("for a release of semaphore {}; {waiting}", info.id)
                } else {
                    format!(
                        "for a signal of rank {} on channel {}; {waiting}",
                        info.from, info.id
                    )
                }
            };
            let mut code = Code::Deadlock;
            let what = match action {
                Action::Wait { inboxes, .. } => missing(inboxes),
                Action::Acquire { semaphores } => missing(semaphores),
                Action::Barrier { id, blocks } => format!(
                    "for {} more thread blocks at the barrier",
                    blocks - self.barriers[*id].arrived.len().min(*blocks)
                ),
                _ => {
                    let at = self.blocks[block].stuck.unwrap_or(0);
                    let what = self.describe(block, at);
                    if self.cells[at].flag > execution + 1 {
                        code = Code::Race;
                        format!(
                            "for {what}, which {} has overwritten with packets of a later execution",
                            self.name(self.cells[at].write)
                        )
                    } else {
                        format!("for {what}, which nobody fills")
                    }
                }
            };
            let reason = format!(
                "in execution {execution} it waits for ever {what}; put what it waits for before \
                 whatever waits for this block"
            );
            self.report(code, *site, reason);
        }
    }

    /// Where blocks that were to signal are.
    fn where_is(&self, blocks: &[usize]) -> String {
        if blocks.is_empty() {
            return "no op does that".to_owned();
        }
        let parts: Vec<String> = blocks
            .iter()
            .take(4)
            .map(
                |block| match self.steps(*block).get(self.blocks[*block].at) {
                    Some((site, _)) => {
                        let stamp = Stamp {
                            thread: *block as u32,
                            time: 1,
                            site: *site,
                        };
                        format!("it would come from a block that is at {}", self.name(stamp))
                    }
                    None => "the block it would come from is at its end".to_owned(),
                },
            )
            .collect();
        parts.join(", or ")
    }
}

/// Adds a read and forgets those that it comes after.
fn remember(reads: &mut Vec<Stamp>, stamp: Stamp, clock: &Clock) {
    reads.retain(|read| !read.before(clock));
    reads.push(stamp);
}
