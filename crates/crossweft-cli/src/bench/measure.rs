//! What each rank of a benchmark does.
//!
//! For each size: check the result on exact and on random inputs, then time calls. Before each
//! timed call the input is written anew (clean inputs would flatter zero copy), then a tiny
//! all-reduce lines the ranks up. A call takes as long as it takes the slowest rank.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use crossweft_collective::{
    AllReduceOptions, CollectiveError, Communicator, DataType, ReduceOp, SymmetricBuffer,
};
use crossweft_hal as hal;
use crossweft_verify::{Pattern, check_all_reduce, fill, fingerprint};
use indicatif::{ProgressBar, ProgressStyle};

use super::options::{AllReduce, Buffers};
use super::report::{Header, Report, Row};
use crate::{Format, print_line};

/// Runs the benchmark as one rank. Rank 0 prints. Returns the number of wrong elements, the same on
/// every rank.
pub(crate) fn run(
    options: &AllReduce,
    communicator: &Communicator,
    started_as: &str,
    machine: &str,
) -> Result<u64, CollectiveError> {
    let sizes = options.sizes();
    let max = sizes.iter().copied().max().unwrap_or(0);
    let memory = Memory::new(options, communicator, max)?;
    let mut prepare = AllReduceOptions::new(options.dtype, options.op, max);
    prepare.algorithm = options.algorithm;
    prepare.blocks = options.blocks;
    if let Memory::Symmetric { input, output } = &memory {
        prepare = prepare.symmetric(input, output);
    }
    let all_reduce = communicator.all_reduce(prepare)?;
    let gate = communicator.all_reduce(AllReduceOptions::new(DataType::U64, ReduceOp::Sum, 8))?;

    let header = Header::new(
        options,
        communicator,
        (started_as, machine),
        all_reduce.selector().to_string(),
    );
    let mut printer = Printer::new(options, communicator.rank(), header, sizes.len());
    let mut bench = Bench {
        options,
        communicator,
        memory,
        all_reduce,
        gate,
        gate_memory: match communicator.device() {
            hal::Device::Cpu => None,
            device => Some(device.allocate(8)?),
        },
    };
    let mut all_wrong = 0;
    for bytes in sizes {
        printer.begin(bytes);
        let row = bench.size(bytes)?;
        all_wrong += row.wrong;
        printer.row(row);
    }
    printer.end();
    Ok(all_wrong)
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
    fn new(
        options: &AllReduce,
        communicator: &Communicator,
        bytes: u64,
    ) -> Result<Self, CollectiveError> {
        match options.buffers {
            Buffers::Symmetric => {
                let input = communicator.allocate(bytes)?;
                let output = if options.in_place {
                    input.clone()
                } else {
                    communicator.allocate(bytes)?
                };
                Ok(Self::Symmetric { input, output })
            }
            Buffers::Private if !matches!(communicator.device(), hal::Device::Cpu) => {
                let allocate = || communicator.device().allocate(bytes).map(Box::new);
                Ok(Self::Device {
                    input: allocate()?,
                    output: match options.in_place {
                        true => None,
                        false => Some(allocate()?),
                    },
                })
            }
            Buffers::Private => {
                let bytes = bytes as usize;
                let output = if options.in_place {
                    Vec::new()
                } else {
                    vec![0; bytes]
                };
                Ok(Self::Private {
                    input: vec![0; bytes],
                    output,
                })
            }
        }
    }

    /// Writes the input, and something else into the output.
    fn write(&mut self, data: &[u8], in_place: bool) -> Result<(), CollectiveError> {
        let n = data.len();
        match self {
            Self::Symmetric { input, .. } => input.write(0, data),
            Self::Private { input, .. } => {
                input[..n].copy_from_slice(data);
                Ok(())
            }
            Self::Device { input, .. } => Ok(input.write(0, data)?),
        }?;
        // A result left over from an earlier call must not pass for a new one.
        match self {
            _ if in_place => Ok(()),
            Self::Symmetric { output, .. } => output.write(0, &vec![0xa5; n]),
            Self::Private { output, .. } => {
                output[..n].fill(0xa5);
                Ok(())
            }
            Self::Device { output, .. } => {
                output
                    .iter()
                    .try_for_each(|output| output.write(0, &vec![0xa5; n]))?;
                Ok(())
            }
        }
    }

    fn read(&self, bytes: usize, in_place: bool) -> Result<Vec<u8>, CollectiveError> {
        let mut result = vec![0; bytes];
        match self {
            Self::Symmetric { output, .. } => output.read(0, &mut result)?,
            Self::Private { input, .. } if in_place => result.copy_from_slice(&input[..bytes]),
            Self::Private { output, .. } => result.copy_from_slice(&output[..bytes]),
            Self::Device { input, output } => {
                output.as_ref().unwrap_or(input).read(0, &mut result)?;
            }
        }
        Ok(result)
    }
}

struct Bench<'a> {
    options: &'a AllReduce,
    communicator: &'a Communicator,
    memory: Memory,
    all_reduce: crossweft_collective::AllReduce,
    /// A tiny all-reduce that lines the ranks up.
    gate: crossweft_collective::AllReduce,
    /// What it works on, on a GPU.
    gate_memory: Option<hal::Memory>,
}

impl Bench<'_> {
    fn size(&mut self, bytes: u64) -> Result<Row, CollectiveError> {
        let mut wrong = 0;
        for pattern in [Pattern::Random, Pattern::Exact] {
            wrong += self.check(pattern, bytes)?;
        }
        let times = self.time(bytes)?;
        let (times, wrong) = self.gather(&times, wrong)?;
        let graph = self.time_in_graph(bytes)?;
        let (graph, _) = self.gather(&graph, 0)?;
        let algorithm = self.all_reduce.explain(bytes).algorithm.name();
        let world_size = self.communicator.world_size();
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
    fn time_in_graph(&self, bytes: u64) -> Result<Vec<f64>, CollectiveError> {
        const REPLAYS: usize = 11;
        if matches!(self.communicator.device(), hal::Device::Cpu)
            || !matches!(self.memory, Memory::Symmetric { .. })
            || bytes == 0
        {
            return Ok(Vec::new());
        }
        let calls = if bytes < 1 << 20 { 100 } else { 20 };
        let recorded = self.all_reduce.record_symmetric(0, 0, bytes, calls)?;
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

    fn input(&self, pattern: Pattern, bytes: u64) -> Vec<u8> {
        let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
        let AllReduce {
            dtype, op, seed, ..
        } = *self.options;
        let mut data = vec![0; bytes as usize];
        fill(pattern, dtype, op, seed, rank, world_size, &mut data);
        data
    }

    /// One call; returns the number of wrong elements on this rank.
    fn check(&mut self, pattern: Pattern, bytes: u64) -> Result<u64, CollectiveError> {
        let in_place = self.options.in_place;
        self.memory.write(&self.input(pattern, bytes), in_place)?;
        // Nobody may still be reading what is written above, nor write the output too early.
        self.line_up()?;
        self.call(bytes)?;
        let result = self.memory.read(bytes as usize, in_place)?;
        let AllReduce {
            dtype, op, seed, ..
        } = *self.options;
        let world_size = self.communicator.world_size();
        let mismatches = check_all_reduce(pattern, dtype, op, seed, world_size, &result);
        if let Some(first) = mismatches.first {
            let rank = self.communicator.rank();
            crate::complain(&format!(
                "rank {rank}: {bytes} bytes, {pattern:?} inputs: {} wrong, first at element {}: \
                 {} instead of {}",
                mismatches.wrong, first.index, first.got, first.expected
            ));
        }
        // The same bits on every rank.
        let bits = fingerprint(&result).to_le_bytes();
        let all = self.communicator.all_gather_bytes(&bits)?;
        let differ = all.iter().filter(|other| **other != all[0]).count() as u64;
        Ok(mismatches.wrong
            + if self.communicator.rank() == 0 {
                differ
            } else {
                0
            })
    }

    fn time(&mut self, bytes: u64) -> Result<Vec<f64>, CollectiveError> {
        let iterations = self.options.iterations(bytes);
        let warm_up = (iterations / 10).clamp(1, 20);
        let data = self.input(Pattern::Exact, bytes);
        let mut times = Vec::with_capacity(iterations);
        for i in 0..warm_up + iterations {
            // In place the output is the input; either way it is dirty before each call.
            self.memory.write(&data, true)?;
            self.line_up()?;
            let start = Instant::now();
            self.call(bytes)?;
            let time = start.elapsed();
            if i >= warm_up {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(times)
    }

    fn call(&mut self, bytes: u64) -> Result<(), CollectiveError> {
        let n = bytes as usize;
        match &mut self.memory {
            Memory::Symmetric { .. } => self.all_reduce.run_symmetric(0, 0, bytes),
            Memory::Private { input, .. } if self.options.in_place => {
                self.all_reduce.run_in_place(&mut input[..n])
            }
            Memory::Private { input, output } => self.all_reduce.run(&input[..n], &mut output[..n]),
            Memory::Device { input, output } => {
                let output = output.as_ref().unwrap_or(input);
                self.all_reduce.run_at((input, 0), (output, 0), bytes)
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

/// Prints on rank 0: rows as they come, progress on a terminal.
struct Printer {
    active: bool,
    json: Option<Report>,
    progress: ProgressBar,
}

impl Printer {
    fn new(options: &AllReduce, rank: u32, header: Header, sizes: usize) -> Self {
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
        let json = match options.format {
            Format::Table => {
                if active {
                    print_line(&header.lines());
                }
                None
            }
            Format::Json => Some(Report {
                header,
                rows: Vec::new(),
            }),
        };
        Self {
            active,
            json,
            progress,
        }
    }

    fn begin(&self, bytes: u64) {
        self.progress
            .set_message(format!("measuring {bytes} bytes"));
    }

    fn row(&mut self, row: Row) {
        self.progress.inc(1);
        match &mut self.json {
            _ if !self.active => {}
            Some(report) => report.rows.push(row),
            None => self.progress.suspend(|| print_line(&row.line())),
        }
    }

    fn end(self) {
        self.progress.finish_and_clear();
        if let (true, Some(report)) = (self.active, self.json) {
            print_line(&serde_json::to_string_pretty(&report).unwrap_or_default());
        }
    }
}
