//! What each rank of a benchmark does.
//!
//! For each size: check the result on exact and on random inputs, then time calls. Before each
//! timed call the input is written anew (clean inputs would flatter zero copy), then a tiny
//! all-reduce lines the ranks up. A call takes as long as it takes the slowest rank.

use std::io::IsTerminal;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossweft_collective::{
    Blocks, Collective, CollectiveError, CollectiveOptions, Communicator, DataType, Exchange,
    ExchangeOptions, PreparedCollective, ReduceOp, SymmetricBuffer,
};
use crossweft_hal as hal;
use crossweft_verify::{Pattern, fingerprint};
use indicatif::{ProgressBar, ProgressStyle};

use super::options::Bench as Options;
use super::plot;
use super::report::{Header, Report, Row};
use crate::values::Buffers;
use crate::verdict::TestData;
use crate::{Format, print_line};

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
    let memory = Memory::new(options, communicator, &shape.spans(max))?;
    // Where nothing is reduced, it does not matter.
    let op = options.op.map_or(ReduceOp::Sum, |operation| operation.op);
    let calls = if options.messages {
        let mut prepare = ExchangeOptions::default();
        if let Memory::Symmetric { input, .. } = &memory {
            prepare = prepare.symmetric(input);
        }
        vec![Call::Messages(communicator.exchange(&prepare)?)]
    } else {
        let mut prepare = CollectiveOptions::new(options.common.dtype, op, max);
        prepare.pre_multiply = options.scalar().map_err(usage)?;
        prepare.blocks = options.common.blocks;
        prepare.in_place = Some(options.common.in_place);
        if let Memory::Symmetric { input, output } = &memory {
            prepare = prepare.symmetric(input, output);
        }
        let mut calls = Vec::new();
        for algorithm in options.algorithms().map_err(usage)? {
            let mut prepare = prepare.clone();
            prepare.algorithm = algorithm;
            let call = communicator.collective(options.collective, prepare)?;
            calls.push(Call::Plans(call));
        }
        calls
    };
    let gate = communicator.all_reduce(CollectiveOptions::new(DataType::U64, ReduceOp::Sum, 8))?;

    let chosen = match calls.as_slice() {
        [call] => call.chosen(),
        several => format!("{} algorithms, in turn at each size", several.len()),
    };
    let header = Header::new(options, communicator, (started_as, machine), chosen);
    let rows = sizes.len() * calls.len();
    let mut printer = Printer::new(options, communicator.rank(), header, rows);
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
            printer.row(row);
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
}

impl Call {
    fn chosen(&self) -> String {
        match self {
            Self::Plans(call) => call.selector().to_string(),
            Self::Messages(_) => "messages of any size (through slots, or read by their receiver \
                                  where large and in symmetric memory)"
                .to_owned(),
        }
    }

    fn algorithm(&self, message: u64) -> String {
        match self {
            Self::Plans(call) => call.explain(message).algorithm.to_string(),
            Self::Messages(_) => "messages".to_owned(),
        }
    }
}

/// Of how many messages input and output are, and how they lie in one buffer.
struct Shape {
    in_place: bool,
    input: u64,
    output: u64,
    /// In place, the message that the input, or the output, begins with.
    first: (u64, u64),
}

/// Where input and output of one call lie, in bytes of the input's buffer and of the output's.
struct Spans {
    input: Range<usize>,
    output: Range<usize>,
    /// The larger of both.
    larger: usize,
}

impl Shape {
    fn new(options: &Options, rank: u32, world_size: u32) -> Self {
        let (input, output, _) = options.blocks(world_size);
        let in_place = options.common.in_place;
        let own = |is_own| match in_place && is_own {
            true => u64::from(rank),
            false => 0,
        };
        let (own_input, own_output) = options.collective.is_own_block();
        Self {
            in_place,
            input,
            output,
            first: (own(own_input), own(own_output)),
        }
    }

    fn spans(&self, message: u64) -> Spans {
        let range = |first: u64, blocks: u64| {
            (first * message) as usize..((first + blocks) * message) as usize
        };
        Spans {
            input: range(self.first.0, self.input),
            output: range(self.first.1, self.output),
            larger: (self.input.max(self.output) * message) as usize,
        }
    }
}

/// The buffers under test.
enum Memory {
    Symmetric {
        input: SymmetricBuffer,
        output: SymmetricBuffer,
    },
    Private {
        input: Vec<u8>,
        output: Vec<u8>,
    },
    /// Private, on a GPU; in place both are one.
    Device {
        input: Box<hal::Memory>,
        output: Option<Box<hal::Memory>>,
    },
}

impl Memory {
    /// For what lies there at most.
    fn new(
        options: &Options,
        communicator: &Communicator,
        spans: &Spans,
    ) -> Result<Self, CollectiveError> {
        let in_place = options.common.in_place;
        let input = if in_place {
            spans.larger
        } else {
            spans.input.len()
        };
        let output = spans.output.len();
        match options.common.buffers {
            Buffers::Symmetric => {
                let input = communicator.allocate(input as u64)?;
                let output = if in_place {
                    input.clone()
                } else {
                    communicator.allocate(output as u64)?
                };
                Ok(Self::Symmetric { input, output })
            }
            Buffers::Private if !matches!(communicator.device(), hal::Device::Cpu) => {
                let allocate = |bytes: usize| {
                    let memory = communicator.device().allocate(bytes as u64);
                    memory.map(Box::new)
                };
                Ok(Self::Device {
                    input: allocate(input)?,
                    output: match in_place {
                        true => None,
                        false => Some(allocate(output)?),
                    },
                })
            }
            Buffers::Private => {
                let output = if in_place {
                    Vec::new()
                } else {
                    vec![0; output]
                };
                Ok(Self::Private {
                    input: vec![0; input],
                    output,
                })
            }
        }
    }

    /// Writes into the buffer that the input lies in.
    fn write_input(&mut self, offset: usize, data: &[u8]) -> Result<(), CollectiveError> {
        match self {
            Self::Symmetric { input, .. } => input.write(offset as u64, data),
            Self::Private { input, .. } => {
                input[offset..offset + data.len()].copy_from_slice(data);
                Ok(())
            }
            Self::Device { input, .. } => Ok(input.write(offset as u64, data)?),
        }
    }

    /// Writes the input, and something else to where the output comes: a result left over from an earlier call must
    /// not pass for a new one.
    fn write(&mut self, data: &[u8], spans: &Spans, in_place: bool) -> Result<(), CollectiveError> {
        let n = if in_place {
            spans.larger
        } else {
            spans.output.len()
        };
        let junk = vec![0xa5; n];
        match self {
            _ if in_place => self.write_input(0, &junk)?,
            Self::Symmetric { output, .. } => output.write(0, &junk)?,
            Self::Private { output, .. } => output[..n].copy_from_slice(&junk),
            Self::Device { output, .. } => output
                .iter()
                .try_for_each(|output| output.write(0, &junk))?,
        }
        self.write_input(spans.input.start, data)
    }

    fn read(&self, spans: &Spans, in_place: bool) -> Result<Vec<u8>, CollectiveError> {
        let place = spans.output.clone();
        let mut result = vec![0; place.len()];
        match self {
            Self::Symmetric { output, .. } => output.read(place.start as u64, &mut result)?,
            Self::Private { input, .. } if in_place => result.copy_from_slice(&input[place]),
            Self::Private { output, .. } => result.copy_from_slice(&output[place]),
            Self::Device { input, output } => {
                let memory = output.as_ref().unwrap_or(input);
                memory.read(place.start as u64, &mut result)?;
            }
        }
        Ok(result)
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

impl<'a> Bench<'a> {
    /// Measures messages such that the larger of input and output has `bytes` bytes.
    fn size(&mut self, bytes: u64) -> Result<Row, CollectiveError> {
        let world_size = self.communicator.world_size();
        let message = bytes / self.options.blocks(world_size).2;
        let mut wrong = 0;
        for pattern in [Pattern::Random, Pattern::Exact] {
            wrong += self.check(pattern, message)?;
        }
        let times = self.time(bytes, message)?;
        let (times, wrong) = self.gather(&times, wrong)?;
        let graph = self.time_in_graph(message)?;
        let (graph, _) = self.gather(&graph, 0)?;
        let algorithm = self.calls[self.current].algorithm(message);
        Ok(Row::new(
            self.options,
            world_size,
            bytes,
            algorithm,
            times,
            graph,
            wrong,
        ))
    }

    /// The device's time of a call among many that were recorded into a graph, for each replay, in
    /// microseconds; nothing on a CPU, or in private memory.
    fn time_in_graph(&self, message: u64) -> Result<Vec<f64>, CollectiveError> {
        const REPLAYS: usize = 11;
        let Call::Plans(call) = &self.calls[self.current] else {
            return Ok(Vec::new());
        };
        if matches!(self.communicator.device(), hal::Device::Cpu)
            || !matches!(self.memory, Memory::Symmetric { .. })
            || message == 0
        {
            return Ok(Vec::new());
        }
        let calls = if message < 1 << 20 { 100 } else { 20 };
        let recorded = call.record_symmetric(0, 0, message, calls)?;
        let limit = self.communicator.timeout();
        let mut times = Vec::new();
        for replay in 0..=REPLAYS {
            self.line_up()?;
            recorded.start(limit)?;
            let time = recorded.finish(limit)?;
            if replay > 0 {
                times.push(time.as_secs_f64() * 1e6);
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
    fn check(&mut self, pattern: Pattern, message: u64) -> Result<u64, CollectiveError> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        let (data, spans) = (self.data(pattern), self.shape.spans(message));
        let in_place = self.shape.in_place;
        let input = data.input(rank, spans.input.len());
        self.memory.write(&input, &spans, in_place)?;
        // Nobody may still be reading what is written above, nor write the output too early.
        self.line_up()?;
        self.call(message)?;
        let result = self.memory.read(&spans, in_place)?;
        let collective = self.options.collective;
        let content = |block| collective.content(world_size, rank, block);
        let wrong = data.check(rank, message, content, &result);
        let is_everywhere = matches!(
            collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast { .. }
        );
        if !is_everywhere {
            return Ok(wrong);
        }
        // The same bits on every rank.
        let bits = fingerprint(&result).to_le_bytes();
        let all = self.communicator.all_gather_bytes(&bits)?;
        let differ = all.iter().filter(|other| **other != all[0]).count() as u64;
        Ok(wrong + if rank == 0 { differ } else { 0 })
    }

    fn time(&mut self, bytes: u64, message: u64) -> Result<Vec<f64>, CollectiveError> {
        let iterations = self.options.common.iterations(bytes);
        let warm_up = (iterations / 10).clamp(1, 20);
        let spans = self.shape.spans(message);
        let rank = self.communicator.rank();
        let data = self.data(Pattern::Exact).input(rank, spans.input.len());
        let mut times = Vec::with_capacity(iterations);
        for i in 0..warm_up + iterations {
            // In place the output is there too; either way the input is dirty before each call.
            self.memory.write_input(spans.input.start, &data)?;
            self.line_up()?;
            let start = Instant::now();
            self.call(message)?;
            let time = start.elapsed();
            if i >= warm_up {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(times)
    }

    fn call(&mut self, message: u64) -> Result<(), CollectiveError> {
        let spans = self.shape.spans(message);
        let call = match &self.calls[self.current] {
            Call::Plans(call) => call,
            Call::Messages(exchange) => {
                let communicator = self.communicator;
                let ranks = (communicator.rank(), communicator.world_size());
                return messages(self.options, exchange, &mut self.memory, ranks, message);
            }
        };
        match &mut self.memory {
            Memory::Symmetric { .. } => call.run_symmetric(0, 0, message),
            Memory::Private { input, .. } if self.shape.in_place => {
                call.run_in_place(&mut input[..spans.larger])
            }
            Memory::Private { input, output } => {
                call.run(&input[spans.input], &mut output[spans.output])
            }
            Memory::Device { input, output } => {
                let output = output.as_ref().unwrap_or(input);
                call.run_at((input, 0), (output, 0), message)
            }
        }
    }

    fn line_up(&self) -> Result<(), CollectiveError> {
        match &self.gate_memory {
            None => self.gate.run_in_place(&mut [0; 8]),
            Some(memory) => self.gate.run_at((memory, 0), (memory, 0), 8),
        }
    }

    /// Each call's time on the slowest rank, and the wrong elements of all ranks.
    fn gather(&self, times: &[f64], wrong: u64) -> Result<(Vec<f64>, u64), CollectiveError> {
        let mut payload = wrong.to_le_bytes().to_vec();
        payload.extend(times.iter().flat_map(|time| time.to_le_bytes()));
        let mut slowest = vec![0.0_f64; times.len()];
        let mut all_wrong = 0;
        for rank in self.communicator.all_gather_bytes(&payload)? {
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
}

/// A ring of sends and receives, or an all-to-all of them.
fn messages(
    options: &Options,
    exchange: &Exchange,
    memory: &mut Memory,
    (rank, ranks): (u32, u32),
    message: u64,
) -> Result<(), CollectiveError> {
    let dtype = options.common.dtype;
    let block = |index: u64| index * message..(index + 1) * message;
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut group = exchange.group();
    match (options.collective, memory) {
        (Collective::SendRecv, Memory::Symmetric { input, output }) => group
            .send_symmetric(next, dtype, input, block(0))
            .recv_symmetric(before, dtype, output, block(0))
            .run(),
        (_, Memory::Symmetric { input, output }) => {
            for peer in (1..=ranks).map(|k| (rank + k) % ranks) {
                group.send_symmetric(peer, dtype, input, block(peer.into()));
                group.recv_symmetric(peer, dtype, output, block(peer.into()));
            }
            group.run()
        }
        (Collective::SendRecv, Memory::Private { input, output }) => group
            .send_typed(next, dtype, &input[..message as usize])
            .recv_typed(before, dtype, &mut output[..message as usize])
            .run(),
        (_, Memory::Private { input, output }) => {
            let counts = vec![message / dtype.size() as u64; ranks as usize];
            let blocks = Blocks::packed(&counts);
            exchange.all_to_all_v(dtype, (input, blocks), (output, blocks))
        }
        // An exchange is made on CPUs only.
        (_, Memory::Device { .. }) => Ok(()),
    }
}

/// Prints on rank 0: rows as they come, progress on a terminal.
struct Printer {
    active: bool,
    /// Whether rows are for programs, and come when all are there.
    is_json: bool,
    report: Report,
    plot: Option<PathBuf>,
    progress: ProgressBar,
}

impl Printer {
    fn new(options: &Options, rank: u32, header: Header, sizes: usize) -> Self {
        let active = rank == 0;
        let progress = if active && std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(sizes as u64);
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        } else {
            ProgressBar::hidden()
        };
        let is_json = matches!(options.common.format, Format::Json);
        if active && !is_json {
            print_line(&header.lines());
        }
        let rows = Vec::new();
        Self {
            active,
            is_json,
            report: Report { header, rows },
            plot: options.common.plot.clone(),
            progress,
        }
    }

    fn begin(&self, bytes: u64) {
        self.progress
            .set_message(format!("measuring {bytes} bytes"));
    }

    fn row(&mut self, row: Row) {
        self.progress.inc(1);
        if !self.active {
            return;
        }
        if !self.is_json {
            self.progress.suspend(|| print_line(&row.line()));
        }
        self.report.rows.push(row);
    }

    fn end(self) -> Result<(), String> {
        self.progress.finish_and_clear();
        if !self.active {
            return Ok(());
        }
        let Report { header, rows } = &self.report;
        if self.is_json {
            print_line(&serde_json::to_string_pretty(&self.report).unwrap_or_default());
        }
        match &self.plot {
            None => Ok(()),
            Some(path) => {
                plot::draw(path, header, rows)?;
                eprintln!("drawn: {}", path.display());
                Ok(())
            }
        }
    }
}
