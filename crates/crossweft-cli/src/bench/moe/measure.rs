//! What each rank does.
//!
//! For each number of tokens and layout: check a whole pass against the dense reference, then time calls. Before each timed
//! call the tokens are written anew, then a tiny all-reduce lines the ranks up. A call takes as long as it takes the slowest
//! rank.

use std::sync::Arc;
use std::time::Instant;

use crossweft_channel::ChannelError;
use crossweft_collective::{
    CollectiveError, CollectiveOptions, Communicator, DataType, PreparedCollective, ReduceOp,
    SymmetricBuffer,
};
use crossweft_hal::Device;
use crossweft_moe::{
    DispatchOutput, Experts, ExpertsMut, Group, GroupOptions, Handle, Layout, MoeError,
    OutputShape, Routing, Tokens, Weights,
};
use indicatif::ProgressBar;

use super::super::measure::gather;
use super::super::printer::progress;
use super::batch::{Arrived, Batch, Computed, Recorded, Route, Shape, Wrong};
use super::cuda;
use super::options::{Moe, Name, Phase, Routing as Where, Travel};
use super::report::{Header, Report, Row};
use crate::{Format, complain, print_line};

/// Runs the benchmark as one rank. Rank 0 prints. Returns how much was wrong, the same on every rank.
pub(crate) fn run(
    options: &Moe,
    recorded: Option<&Recorded>,
    communicator: &Communicator,
    (started_as, machine): (&str, &str),
) -> Result<u64, CollectiveError> {
    let shape = Shape {
        ranks: communicator.world_size(),
        experts: options.experts,
        hidden: options.hidden,
        top_k: options.top_k(recorded),
        dtype: options.dtype,
        seed: options.seed,
    };
    let route = match (&options.routing, recorded) {
        (Where::Zipf(exponent), _) => Route::Zipf(*exponent),
        (Where::File(_), Some(recorded)) => Route::Recorded(recorded),
        (Where::File(_), None) => return Err(usage(communicator, "no routing was read")),
    };
    let header = Header {
        version: env!("CARGO_PKG_VERSION"),
        device: communicator.device().name(),
        ranks: shape.ranks,
        started_as: started_as.to_owned(),
        machine: machine.to_owned(),
        hidden: shape.hidden,
        experts: shape.experts,
        top_k: shape.top_k,
        dtype: shape.dtype.name(),
        travel: options.travel.name(),
        routing: options.routing.words(),
        seed: options.seed,
        blocks: options.blocks(communicator.device()),
        clock: clock(communicator.device()),
    };
    let steps = options.tokens.0.len() * options.layout.len();
    let lost = |reason| usage(communicator, reason);
    let mut printer = Printer::new(options, communicator.rank(), header, steps).map_err(lost)?;
    let gate = communicator.all_reduce(CollectiveOptions::new(DataType::U64, ReduceOp::Sum, 8))?;
    let bench = Bench {
        options,
        communicator,
        gate,
    };
    let mut all_wrong = 0;
    for &tokens in &options.tokens.0 {
        let batch = Batch::new(shape, route, tokens);
        for &name in &options.layout {
            printer.begin(name, tokens);
            let rows = bench.size(&batch, name)?;
            all_wrong += rows.first().map_or(0, |row| row.wrong);
            printer.rows(rows).map_err(lost)?;
        }
    }
    printer.end(options).map_err(lost)?;
    Ok(all_wrong)
}

fn usage(communicator: &Communicator, reason: impl Into<String>) -> CollectiveError {
    CollectiveError::Usage {
        rank: communicator.rank(),
        reason: reason.into(),
    }
}

struct Bench<'a> {
    options: &'a Moe,
    communicator: &'a Communicator,
    /// A tiny all-reduce that lines the ranks up.
    gate: PreparedCollective,
}

impl Bench<'_> {
    /// Measures one number of tokens in one layout: a row for each phase.
    fn size(&self, batch: &Batch, name: Name) -> Result<Vec<Row>, CollectiveError> {
        let rank = self.communicator.rank();
        let lift = |error| lift(rank, error);
        if !matches!(self.communicator.device(), Device::Cpu) {
            return cuda::size(self.options, self.communicator, batch, name);
        }
        let mut pass = Pass::new(self, batch, name).map_err(lift)?;
        let wrong = pass.check(self.options).map_err(lift)?;
        say(rank, batch, name, &wrong);
        let (_, wrong) = gather(self.communicator, &[], wrong.count)?;
        let mut measured = Vec::new();
        for &phase in &self.options.phase {
            let bytes = phase_bytes(batch, &pass.shape, phase);
            let iterations = self.options.iterations(bytes);
            let times = self.timed(iterations, &mut pass, Pass::renew, |pass| {
                pass.run(phase).map_err(lift)
            })?;
            let copies = self.copies(bytes, iterations)?;
            let (times, _) = gather(self.communicator, &times, 0)?;
            let (copies, _) = gather(self.communicator, &copies, 0)?;
            let allocated = pass.group.allocated_bytes() + pass.handle.allocated_bytes();
            let what = (phase, name, batch.tokens as u32);
            measured.push(Row::new(what, bytes, (times, copies), (allocated, wrong)));
        }
        Ok(measured)
    }

    /// The time of each call on this rank, in microseconds; `prepare` is not timed.
    fn timed<T>(
        &self,
        iterations: usize,
        state: &mut T,
        prepare: impl Fn(&mut T),
        call: impl Fn(&mut T) -> Result<(), CollectiveError>,
    ) -> Result<Vec<f64>, CollectiveError> {
        let warm_up = (iterations / 10).clamp(1, 20);
        let mut times = Vec::with_capacity(iterations);
        for i in 0..warm_up + iterations {
            prepare(state);
            self.gate.run_in_place(&mut [0; 8])?;
            let start = Instant::now();
            call(state)?;
            let time = start.elapsed();
            if i >= warm_up {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        Ok(times)
    }

    /// The same of copying so many bytes into shared memory, which no dispatch or combine can do without. Collective.
    fn copies(&self, bytes: u64, iterations: usize) -> Result<Vec<f64>, CollectiveError> {
        if bytes == 0 {
            return Ok(Vec::new());
        }
        let shared: SymmetricBuffer = self.communicator.allocate(bytes)?;
        let mut data = vec![1_u8; bytes as usize];
        self.timed(
            iterations,
            &mut data,
            |data| data.fill(2),
            |data| shared.write(0, data),
        )
    }
}

/// The group of a batch.
pub(super) fn group(
    options: &Moe,
    communicator: &Communicator,
    batch: &Batch,
) -> Result<Arc<Group>, MoeError> {
    let shape = &batch.shape;
    let most = batch.room() as u32;
    let mut of_group = GroupOptions::new(shape.experts, most, shape.hidden, shape.top_k);
    of_group.dtype = shape.dtype;
    of_group.blocks = options.blocks(communicator.device());
    of_group.timeout = communicator.timeout();
    let deadline = Instant::now() + communicator.timeout();
    Group::new(communicator.endpoint(), of_group, deadline)
}

/// Says what a rank has found wrong.
pub(super) fn say(rank: u32, batch: &Batch, name: Name, wrong: &Wrong) {
    if let Some(first) = &wrong.first {
        complain(&format!(
            "rank {rank}: {} tokens, {}: {} wrong, first: {first}",
            batch.tokens,
            name.name(),
            wrong.count
        ));
    }
}

/// Bytes of the rows that the busiest rank receives in a phase.
pub(super) fn phase_bytes(batch: &Batch, shape: &OutputShape, phase: Phase) -> u64 {
    let rows = (0..batch.shape.ranks).map(|rank| batch.rows_to(rank)).max();
    let rows = rows.unwrap_or(0) as u64;
    let dispatched = rows * (shape.row_bytes + shape.scale_row_bytes);
    let combined = rows * batch.shape.row_bytes() as u64;
    match phase {
        Phase::Dispatch => dispatched,
        Phase::Combine => combined,
        Phase::Both => dispatched + combined,
    }
}

/// How calls are timed on a device.
fn clock(device: &Device) -> &'static str {
    match device {
        Device::Cpu => "the host's, call by call",
        _ => "the device's, calls in graphs",
    }
}

/// One pass, again and again.
struct Pass<'a> {
    batch: &'a Batch,
    group: Arc<Group>,
    handle: Handle,
    layout: Layout,
    shape: OutputShape,
    travel: Travel,
    sent: Vec<u8>,
    tokens: Vec<u8>,
    scales: Vec<u8>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    sources: Vec<i32>,
    /// To combine.
    made: Computed,
    combined: Vec<u8>,
}

/// Memory that holds no right result.
fn dirty<T: Clone>(value: T, count: u64) -> Vec<T> {
    vec![value; count as usize]
}

impl<'a> Pass<'a> {
    fn new(bench: &Bench<'_>, batch: &'a Batch, name: Name) -> Result<Self, MoeError> {
        let (communicator, options) = (bench.communicator, bench.options);
        let shape = &batch.shape;
        let group = group(options, communicator, batch)?;
        let rank = communicator.rank();
        let routing = Routing {
            experts: Experts::I32(batch.experts(rank)),
            top_k: shape.top_k,
            weights: Some(batch.weights(rank)),
        };
        let layout = name.layout();
        let handle = group.handle(&routing, layout)?;
        let format = sending(options.travel, &[]).format();
        let room = handle.output_shape(format)?;
        let combined = batch.tokens * shape.row_bytes();
        Ok(Self {
            batch,
            group,
            handle,
            layout,
            shape: room,
            travel: options.travel,
            sent: batch.sent(rank),
            // Zeros, which are no right tokens: gaps then take no memory.
            tokens: dirty(0, room.token_bytes()),
            scales: dirty(0, room.scale_bytes()),
            experts: dirty(-7, room.experts()),
            weights: dirty(f32::NAN, room.weights()),
            sources: dirty(-7, room.rows),
            made: Computed::default(),
            combined: dirty(0xa5, combined as u64),
        })
    }

    /// A whole pass, in which everything is looked at.
    fn check(&mut self, options: &Moe) -> Result<Wrong, MoeError> {
        let rank = self.group.rank();
        self.dispatch()?;
        let scale_type = options.travel.scale_type();
        let arrived = Arrived {
            counts: self.handle.counts()?,
            tokens: &self.tokens,
            scales: &self.scales,
            scale_type,
            experts: &self.experts,
            weights: &self.weights,
            sources: &self.sources,
        };
        let (mut wrong, made) = self.batch.arrived(rank, self.layout, &arrived);
        self.made = made;
        self.combine()?;
        wrong.add_all(self.batch.combined(rank, scale_type, &self.combined));
        Ok(wrong)
    }

    /// Writes the tokens anew, as the layer before would, and the rows that experts made.
    fn renew(&mut self) {
        // The same values: what is measured is who has the cache lines.
        let renew = |bytes: &mut [u8]| {
            bytes.iter_mut().step_by(64).for_each(|byte| {
                *byte = std::hint::black_box(*byte);
            });
        };
        renew(&mut self.sent);
        let each = self.batch.shape.row_bytes();
        for row in &self.made.used {
            renew(&mut self.made.rows[row * each..][..each]);
        }
    }

    fn run(&mut self, phase: Phase) -> Result<(), MoeError> {
        match phase {
            Phase::Dispatch => self.dispatch(),
            Phase::Combine => self.combine(),
            Phase::Both => self.dispatch().and_then(|()| self.combine()),
        }
    }

    fn dispatch(&mut self) -> Result<(), MoeError> {
        let by_expert = self.layout.is_by_expert();
        let output = DispatchOutput {
            tokens: &mut self.tokens,
            scales: self.travel.scale_type().map(|_| self.scales.as_mut_slice()),
            experts: (!by_expert).then_some(ExpertsMut::I32(&mut self.experts)),
            weights: Some(&mut self.weights),
            sources: Some(&mut self.sources),
        };
        self.handle
            .dispatch(sending(self.travel, &self.sent), output)
    }

    fn combine(&mut self) -> Result<(), MoeError> {
        let weights = match self.layout.is_by_expert() {
            true => Weights::Dispatched,
            // What is for several experts was summed, with weights, by these.
            false => Weights::One,
        };
        self.handle
            .combine(&self.made.rows, weights, &mut self.combined)
    }
}

/// Tokens as they are to travel.
fn sending(travel: Travel, elements: &[u8]) -> Tokens<'_> {
    match travel.scale_type() {
        None => Tokens::Plain(elements),
        Some(scale_type) => Tokens::Quantise {
            elements,
            scale_type,
            powers_of_two: false,
        },
    }
}

/// The same error, as jobs tell them apart.
pub(super) fn lift(rank: u32, error: MoeError) -> CollectiveError {
    match error {
        MoeError::Channel { source } => source.into(),
        MoeError::Hal { source } => source.into(),
        MoeError::Interrupted {
            call,
            waited_for,
            peers,
            cause,
            ..
        } => {
            let what = format!("{waited_for} of ranks {peers:?} in {call}");
            let cause = *cause;
            ChannelError::Stopped { rank, what, cause }.into()
        }
        other => CollectiveError::Usage {
            rank,
            reason: other.to_string(),
        },
    }
}

/// Prints on rank 0: rows as they come, progress on a terminal.
struct Printer {
    active: bool,
    /// Whether rows are for programs, and come when all are there.
    is_json: bool,
    report: Report,
    progress: ProgressBar,
}

impl Printer {
    fn new(options: &Moe, rank: u32, header: Header, steps: usize) -> Result<Self, String> {
        let active = rank == 0;
        let is_json = matches!(options.format, Format::Json);
        if active && !is_json {
            print_line(&header.lines())?;
        }
        Ok(Self {
            active,
            is_json,
            report: Report {
                header,
                rows: Vec::new(),
            },
            progress: progress(active, steps),
        })
    }

    fn begin(&self, name: Name, tokens: u32) {
        let name = name.name();
        self.progress
            .set_message(format!("measuring {tokens} tokens, {name}"));
    }

    fn rows(&mut self, rows: Vec<Row>) -> Result<(), String> {
        self.progress.inc(1);
        if self.active && !self.is_json {
            let lines: Vec<String> = rows.iter().map(Row::line).collect();
            self.progress.suspend(|| print_line(&lines.join("\n")))?;
        }
        self.report.rows.extend(rows);
        Ok(())
    }

    fn end(self, options: &Moe) -> Result<(), String> {
        self.progress.finish_and_clear();
        if !self.active {
            return Ok(());
        }
        if self.is_json {
            print_line(&serde_json::to_string_pretty(&self.report).unwrap_or_default())?;
        }
        match &options.plot {
            None => Ok(()),
            Some(path) => {
                self.report.draw(path)?;
                complain(&format!("drawn: {}", path.display()));
                Ok(())
            }
        }
    }
}
