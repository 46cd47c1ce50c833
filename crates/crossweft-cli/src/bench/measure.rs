//! What each rank of a benchmark does.
//!
//! For each size: check the result on exact and on random inputs, then time calls. Before each
//! timed call the input is written anew (clean inputs would flatter zero copy), then a tiny
//! all-reduce lines the ranks up. A call takes as long as it takes the slowest rank.

use std::time::{Duration, Instant};

use crossweft_collective::{
    Collective, CollectiveError, CollectiveOptions, Communicator, DataType, Exchange,
    ExchangeOptions, PreparedCollective, ReduceOp,
};
use crossweft_hal as hal;
use crossweft_verify::{Pattern, fingerprint};

use super::fused::Fused;
use super::memory::{Memory, Shape, Spans};
use super::messages::Exchanged;
use super::options::{Bench as Options, Kind, Timing};
use super::printer::Printer;
use super::report::{Header, Row, Times};
use crate::verdict::TestData;

/// Runs the benchmark as one rank. Rank 0 prints. Returns the number of wrong elements, the same on
/// every rank.
pub(crate) fn run(
    options: &Options,
    communicator: &Communicator,
    started_as: &str,
    machine: &str,
) -> Result<u64, CollectiveError> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let usage = |reason| CollectiveError::Usage { rank, reason };
    for plan in &options.common.plan {
        communicator.register_file(plan)?;
    }
    let sizes = options.sizes(world_size);
    let max = sizes.iter().copied().max().unwrap_or(0) / options.blocks(world_size).2;
    let shape = Shape::new(options, rank, world_size);
    let memory = Memory::new(options, communicator, &shape, max)?;
    // Where nothing is reduced, it does not matter.
    let op = options.op.map_or(ReduceOp::Sum, |operation| operation.op);
    let calls = calls(options, communicator, &memory, (&shape, max, op))?;
    let gate = communicator.all_reduce(CollectiveOptions::new(DataType::U64, ReduceOp::Sum, 8))?;

    let chosen = match calls.as_slice() {
        [call] => call.chosen(),
        several => format!("{} algorithms, in turn at each size", several.len()),
    };
    let header = Header::new(options, communicator, (started_as, machine), chosen);
    let rows = sizes.len() * calls.len();
    let mut printer = Printer::new(options, communicator.rank(), header, rows).map_err(usage)?;
    let scalar = options.op.and_then(|operation| operation.scalar);
    let scalars = scalar.map_or_else(Vec::new, |scalar| vec![scalar; world_size as usize]);
    let mut bench = Bench {
        options,
        communicator,
        memory,
        shape,
        op,
        scalars: &scalars,
        calls,
        current: 0,
        gate,
        gate_memory: match communicator.device() {
            hal::Device::Cpu => None,
            device => Some(device.allocate(8)?),
        },
    };
    let mut all_wrong = 0;
    for bytes in sizes {
        for current in 0..bench.calls.len() {
            bench.current = current;
            printer.begin(bytes);
            let row = bench.size(bytes)?;
            all_wrong += row.wrong;
            printer.row(row).map_err(usage)?;
        }
    }
    printer.end().map_err(usage)?;
    Ok(all_wrong)
}

/// What is measured.
enum Call {
    /// A plan for each size.
    Plans(PreparedCollective),
    /// Sends and receives.
    Messages(Exchange),
    /// An all-reduce with what follows it.
    Fused(Box<Fused>),
}

/// Prepares what is measured, for messages of up to `max` bytes.
fn calls(
    options: &Options,
    communicator: &Communicator,
    memory: &Memory,
    (shape, max, op): (&Shape, u64, ReduceOp),
) -> Result<Vec<Call>, CollectiveError> {
    let rank = communicator.rank();
    let usage = |reason| CollectiveError::Usage { rank, reason };
    let dtype = options.common.dtype;
    match options.kind {
        Kind::Messages => {
            let mut prepare = ExchangeOptions::default();
            if options.collective == Collective::ReduceScatter {
                prepare = prepare.reducing(dtype);
            }
            if let Memory::Symmetric { input, .. } = memory {
                prepare = prepare.symmetric(input);
            }
            Ok(vec![Call::Messages(communicator.exchange(&prepare)?)])
        }
        Kind::Fused(norm) => {
            let (_, all) = shape.bytes(max);
            let what = (dtype, norm, options.common.seed);
            let fused = Fused::prepare(communicator, what, (max, all))?;
            Ok(vec![Call::Fused(Box::new(fused))])
        }
        Kind::Plans => {
            let mut prepare = CollectiveOptions::new(dtype, op, max);
            prepare.pre_multiply = options.scalar().map_err(usage)?;
            prepare.blocks = options.common.blocks;
            prepare.fused = !options.common.executor;
            prepare.in_place = Some(options.common.in_place);
            if let Memory::Symmetric { input, output } = memory {
                prepare = prepare.symmetric(input, output);
            }
            let mut calls = Vec::new();
            for algorithm in options.algorithms().map_err(usage)? {
                let mut prepare = prepare.clone();
                prepare.algorithm = algorithm;
                let call = communicator.collective(options.collective, prepare)?;
                calls.push(Call::Plans(call));
            }
            Ok(calls)
        }
    }
}

impl Call {
    fn chosen(&self) -> String {
        match self {
            Self::Plans(call) => call.selector().to_string(),
            Self::Messages(_) => "messages of any size (through slots, or read by their receiver \
                                  where large and in symmetric memory)"
                .to_owned(),
            Self::Fused(call) => call.chosen(),
        }
    }

    fn algorithm(&self, message: u64) -> String {
        match self {
            Self::Plans(call) => call.explain(message).algorithm.to_string(),
            Self::Messages(_) => "messages".to_owned(),
            Self::Fused(call) => call.algorithm(message),
        }
    }
}

struct Bench<'a> {
    options: &'a Options,
    communicator: &'a Communicator,
    memory: Memory,
    shape: Shape,
    op: ReduceOp,
    /// What each rank's input is multiplied by; none if by nothing.
    scalars: &'a [f64],
    /// What is measured, at each size one after another.
    calls: Vec<Call>,
    /// Which of them now.
    current: usize,
    /// A tiny all-reduce that lines the ranks up.
    gate: PreparedCollective,
    /// What it works on, on a GPU.
    gate_memory: Option<hal::Memory>,
}

/// Calls in a graph: times by the host's clock and by the device's, in microseconds a call.
#[derive(Default)]
struct InGraph {
    host: Vec<f64>,
    device: Vec<f64>,
}

impl<'a> Bench<'a> {
    /// Measures messages such that the larger of input and output has `bytes` bytes.
    fn size(&mut self, bytes: u64) -> Result<Row, CollectiveError> {
        let world_size = self.communicator.world_size();
        let message = bytes / self.options.blocks(world_size).2;
        let mut wrong = 0;
        // The first and the last of the pairs that take turns.
        for (pattern, turn) in [(Pattern::Random, 0), (Pattern::Exact, self.shape.pairs - 1)] {
            wrong += self.check(pattern, message, turn)?;
        }
        let timing = self.options.timing();
        let calls = match timing {
            Timing::Both | Timing::Eager => self.time(bytes, message)?,
            Timing::Graph | Timing::Device => Vec::new(),
        };
        let (calls, wrong) = gather(self.communicator, &calls, wrong)?;
        let graph = match timing {
            Timing::Eager => InGraph::default(),
            _ => self.time_in_graph(message)?,
        };
        let (host, _) = gather(self.communicator, &graph.host, 0)?;
        let (device, _) = gather(self.communicator, &graph.device, 0)?;
        let times = match timing {
            Timing::Both | Timing::Eager => Times {
                calls,
                graph: device,
            },
            Timing::Graph => Times::of(host),
            Timing::Device => Times::of(device),
        };
        let algorithm = self.calls[self.current].algorithm(message);
        Ok(Row::new(
            self.options,
            world_size,
            bytes,
            algorithm,
            times,
            wrong,
        ))
    }

    /// Calls among many that were recorded into a graph, for each replay; nothing on a CPU, or where ranks are late.
    fn time_in_graph(&self, message: u64) -> Result<InGraph, CollectiveError> {
        if message == 0 || self.options.common.skew > 0 {
            return Ok(InGraph::default());
        }
        let place = |turn| {
            let (input, output) = self.shape.spans(message, turn).start;
            (input as u64, output as u64)
        };
        let places: Vec<_> = (0..self.shape.pairs).map(place).collect();
        let calls = if message < 1 << 20 { 100 } else { 20 };
        // Each pair is in it as often as the others.
        let calls = calls.max(places.len()) / places.len() * places.len();
        let calls = calls as u32;
        let on_cpu = matches!(self.communicator.device(), hal::Device::Cpu);
        let recorded = match (&self.calls[self.current], &self.memory) {
            (Call::Plans(call), Memory::Device { input, output }) => {
                let output = output.as_ref().unwrap_or(input);
                call.record_at((input, output), &places, message, calls)?
            }
            (Call::Plans(call), Memory::Symmetric { .. }) if !on_cpu => {
                call.record_symmetric(&places, message, calls)?
            }
            (Call::Fused(fused), Memory::Device { input, output }) if places.len() == 1 => {
                let (output, at) = (
                    output.as_ref().unwrap_or(input),
                    self.shape.spans(message, 0),
                );
                return match fused.record(input, output, at.output, calls)? {
                    None => Ok(InGraph::default()),
                    Some(recorded) => {
                        self.replay(calls, |limit| Ok(recorded.start()?.finish(limit)?))
                    }
                };
            }
            _ => return Ok(InGraph::default()),
        };
        self.replay(calls, |limit| Ok(recorded.start()?.finish(limit)?))
    }

    /// Replays a graph of so many calls, and one more.
    fn replay(
        &self,
        calls: u32,
        run: impl Fn(Duration) -> Result<Duration, CollectiveError>,
    ) -> Result<InGraph, CollectiveError> {
        const REPLAYS: usize = 11;
        let mut times = InGraph::default();
        let limit = self.communicator.timeout();
        for replay in 0..=REPLAYS {
            self.line_up()?;
            let started = Instant::now();
            let device = run(limit)?;
            if replay > 0 {
                let host = started.elapsed().as_secs_f64() / f64::from(calls + 1);
                times.host.push(host * 1e6);
                times.device.push(device.as_secs_f64() * 1e6);
            }
        }
        Ok(times)
    }

    fn data(&self, pattern: Pattern) -> TestData<'a> {
        TestData {
            pattern,
            dtype: self.options.common.dtype,
            op: self.op,
            scalars: self.scalars,
            seed: self.options.common.seed,
            ranks: self.communicator.world_size(),
        }
    }

    /// One call; returns the number of wrong elements on this rank.
    fn check(
        &mut self,
        pattern: Pattern,
        message: u64,
        turn: usize,
    ) -> Result<u64, CollectiveError> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        let (data, spans) = (self.data(pattern), self.shape.spans(message, turn));
        let in_place = self.shape.in_place;
        let input = data.input(rank, spans.input.len());
        self.memory.write(&input, &spans, in_place)?;
        self.reset(&spans)?;
        // Nobody may still be reading what is written above, nor write the output too early.
        self.line_up()?;
        self.call(message, turn)?;
        let result = self.memory.read(&spans, in_place)?;
        let collective = self.options.collective;
        let content = |block| collective.content(world_size, rank, block);
        let mut bits = fingerprint(&result).to_le_bytes().to_vec();
        let wrong = match &mut self.calls[self.current] {
            Call::Fused(fused) => {
                fused.fetch(&spans.output)?;
                bits.extend(fused.fingerprint(&spans.output).to_le_bytes());
                let sums = fused.sums((pattern, data.seed), world_size, &input)?;
                let of_sums = data.check(rank, message, content, &sums);
                let rest = fused.check(&sums, &result, &spans.output);
                of_sums
                    + rest
                        .map(|one| data.tell(rank, message, one))
                        .iter()
                        .sum::<u64>()
            }
            _ => data.check(rank, message, content, &result),
        };
        let is_everywhere = matches!(
            collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast { .. }
        );
        if !is_everywhere {
            return Ok(wrong);
        }
        // The same bits on every rank.
        let all = self.communicator.all_gather_bytes(&bits)?;
        let differ = all.iter().filter(|other| **other != all[0]).count() as u64;
        Ok(wrong + if rank == 0 { differ } else { 0 })
    }

    /// What a call replaces beside its output is as it was.
    fn reset(&mut self, spans: &Spans) -> Result<(), CollectiveError> {
        match &mut self.calls[self.current] {
            Call::Fused(fused) => fused.reset(spans.output.clone()),
            _ => Ok(()),
        }
    }

    fn time(&mut self, bytes: u64, message: u64) -> Result<Vec<f64>, CollectiveError> {
        let iterations = self.options.common.iterations(bytes);
        let warm_up = (iterations / 10).clamp(1, 20);
        let (rank, ranks) = (self.communicator.rank(), self.communicator.world_size());
        let skew = Duration::from_micros(self.options.common.skew);
        let input = self.shape.spans(message, 0).input;
        let data = self.data(Pattern::Exact).input(rank, input.len());
        let mut times = Vec::with_capacity(iterations);
        for i in 0..warm_up + iterations {
            let turn = i % self.shape.pairs;
            if turn == 0 {
                // All at once: an input that was just written would be in the cache.
                for turn in 0..self.shape.pairs {
                    let spans = self.shape.spans(message, turn);
                    // In place the output is there too; either way the input is dirty before each call.
                    self.memory.write_input(spans.input.start, &data)?;
                    self.reset(&spans)?;
                }
            }
            self.line_up()?;
            let last_arrival = Instant::now() + skew;
            let is_late = i as u64 % u64::from(ranks) == u64::from(rank);
            while is_late && !skew.is_zero() && Instant::now() < last_arrival {
                std::hint::spin_loop();
            }
            self.call(message, turn)?;
            // Nothing where this rank needed none of what came last.
            let time = Instant::now().saturating_duration_since(last_arrival);
            if i >= warm_up {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(times)
    }

    fn call(&mut self, message: u64, turn: usize) -> Result<(), CollectiveError> {
        let spans = self.shape.spans(message, turn);
        let call = match &mut self.calls[self.current] {
            Call::Plans(call) => call,
            Call::Messages(exchange) => {
                let exchanged = Exchanged {
                    collective: self.options.collective,
                    dtype: self.options.common.dtype,
                    op: self.op,
                    rank: self.communicator.rank(),
                    ranks: self.communicator.world_size(),
                };
                return exchanged.run(exchange, &mut self.memory, spans, message);
            }
            Call::Fused(fused) => {
                return match &mut self.memory {
                    Memory::Private { input, output } => {
                        let at = spans.output;
                        fused.run(&input[spans.input], &mut output[at.clone()], at)
                    }
                    Memory::Device { input, output } => {
                        let output = output.as_ref().unwrap_or(input);
                        fused.run_at(input, output, spans.output)
                    }
                    // Refused with the options.
                    Memory::Symmetric { .. } => Ok(()),
                };
            }
        };
        let start = (spans.start.0 as u64, spans.start.1 as u64);
        match &mut self.memory {
            Memory::Symmetric { .. } => call.run_symmetric(start.0, start.1, message),
            Memory::Private { input, .. } if self.shape.in_place => {
                call.run_in_place(&mut input[spans.whole])
            }
            Memory::Private { input, output } => {
                call.run(&input[spans.input], &mut output[spans.output])
            }
            Memory::Device { input, output } => {
                let output = output.as_ref().unwrap_or(input);
                call.run_at((input, start.0), (output, start.1), message)
            }
        }
    }

    fn line_up(&self) -> Result<(), CollectiveError> {
        match &self.gate_memory {
            None => self.gate.run_in_place(&mut [0; 8]),
            Some(memory) => self.gate.run_at((memory, 0), (memory, 0), 8),
        }
    }
}

/// Each call's time on the slowest rank, and the wrong elements of all ranks.
pub(super) fn gather(
    communicator: &Communicator,
    times: &[f64],
    wrong: u64,
) -> Result<(Vec<f64>, u64), CollectiveError> {
    let mut payload = wrong.to_le_bytes().to_vec();
    payload.extend(times.iter().flat_map(|time| time.to_le_bytes()));
    let mut slowest = vec![0.0_f64; times.len()];
    let mut all_wrong = 0;
    for rank in communicator.all_gather_bytes(&payload)? {
        let mut words = rank.chunks_exact(8).map(|word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            bytes
        });
        all_wrong += words.next().map_or(0, u64::from_le_bytes);
        for (slowest, time) in slowest.iter_mut().zip(words.map(f64::from_le_bytes)) {
            *slowest = slowest.max(time);
        }
    }
    Ok((slowest, all_wrong))
}
