//! `plan run`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use crossweft_collective::{CollectiveError, Communicator, DataType, ReduceOp, Schedule};
use crossweft_device::extent::GRANULE;
use crossweft_executor::{Options, Stage};
use crossweft_plan::check::{self, Diagnostic};
use crossweft_plan::{Collective, Op, Plan};
use crossweft_verify::Pattern;
use serde::Serialize;

use super::source::{STANDARD, Source, SourceError};
use crate::exit::Exit;
use crate::job::{self, JobError, JobOptions, Start};
use crate::values::{Device, Size, dtype, op};
use crate::verdict::TestData;
use crate::{Format, print_line};

/// Options of `plan run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The plan file, of crossweft or of MSCCL++; `-` is standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Bytes of a message: one block of input or output; K, M and G are powers of 1024. By default
    /// a size that the plan takes.
    #[arg(long, value_name = "BYTES")]
    size: Option<Size>,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DataType,
    /// Reduce operation; by default the plan's, or sum.
    #[arg(long, value_parser = op)]
    op: Option<ReduceOp>,
    /// The device to run on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Start the ranks as threads of this process; the default, unless a launcher has started them.
    #[arg(long)]
    threads: bool,
    /// Start the ranks as processes.
    #[arg(long, conflicts_with = "threads")]
    processes: bool,
    /// Seed of the order in which thread blocks run, and of the test data; by default they take
    /// turns.
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds that any call may take before it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Do not check the plan first.
    #[arg(long, hide = true, overrides_with = "unchecked")]
    unchecked: bool,
    /// For people, or for programs.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Why a plan was not run to its end.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Source(#[from] SourceError),
    #[error("{file} is refused: {first}{more}; `crossweft plan check` says all")]
    Refused {
        file: String,
        first: Box<Diagnostic>,
        more: String,
    },
    #[error("{0}")]
    Job(Box<JobError>),
}

impl From<JobError> for RunError {
    fn from(error: JobError) -> Self {
        Self::Job(Box::new(error))
    }
}

impl RunError {
    fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::Source(_) => Exit::Usage,
            Self::Refused { .. } => Exit::Wrong,
            Self::Job(error) => error.exit(),
        }
    }
}

pub(super) fn run(options: &Run) -> Exit {
    try_run(options).unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}

fn try_run(options: &Run) -> Result<Exit, RunError> {
    if options.processes && options.file.as_os_str() == STANDARD {
        let reason = "processes cannot share standard input; name a file, or use --threads";
        return Err(RunError::Usage(reason.to_owned()));
    }
    let source = Source::read(&options.file)?;
    if !options.unchecked {
        source.warn(&options.file);
        let found = check::check(&source.plan, &check::Options::default());
        let more = match found.len() {
            0 | 1 => String::new(),
            n => format!(", and {} more", n - 1),
        };
        if let Some(first) = found.into_iter().next() {
            return Err(RunError::Refused {
                file: options.file.display().to_string(),
                first: Box::new(first),
                more,
            });
        }
    }
    let task = Task::new(options, source.plan).map_err(RunError::Usage)?;
    let job = JobOptions {
        start: match (options.threads, options.processes) {
            (true, _) => Start::Threads,
            (_, true) => Start::Processes,
            _ => Start::ThreadsOrLauncher,
        },
        ranks: task.plan.world_size(),
        refuse: |ranks, job| {
            (ranks != job.world_size).then(|| {
                format!(
                    "the plan is for {ranks} ranks, but {} started {}",
                    job.launcher, job.world_size
                )
            })
        },
        timeout: Duration::from_secs(options.timeout),
        bind: false,
        devices: options
            .device
            .find(task.plan.world_size())
            .map_err(RunError::Usage)?,
        memory: memory(&task.plan, task.bytes),
        // Checked here, once for all.
        arguments: &["--unchecked"],
    };
    Ok(job::run(&job, |communicator, _| task.rank(communicator))?)
}

/// Bytes that a rank takes: its buffers, and the memory that the plan goes through.
fn memory(plan: &Plan, bytes: u64) -> u64 {
    let blocks = u64::from(plan.input_blocks) + u64::from(plan.output_blocks);
    let parts = [
        bytes.checked_mul(blocks),
        plan.scratch_bytes(bytes).map(|(_, all)| all),
        plan.packet_bytes(bytes).map(|(_, all)| all),
    ];
    let all = |sum: u64, part: Option<u64>| sum.checked_add(part?);
    parts.into_iter().try_fold(0, all).unwrap_or(u64::MAX)
}

/// What every rank does.
struct Task<'a> {
    options: &'a Run,
    plan: Plan,
    op: ReduceOp,
    bytes: u64,
}

/// The result.
#[derive(Debug, Serialize)]
struct Report<'a> {
    ok: bool,
    plan: &'a str,
    collective: Collective,
    ranks: u32,
    bytes: u64,
    dtype: &'static str,
    op: &'static str,
    /// Wrong elements over all ranks and runs.
    wrong: u64,
    post_condition: &'static str,
    /// What sizes must be multiples of.
    multiple_of: u64,
    /// Sizes that the plan is meant for.
    message_bytes: (u64, u64),
}

/// Message size where none is asked for, if the plan takes it.
const DEFAULT_BYTES: u64 = 64 << 10;
/// The most that loops with large pieces make of it.
const MOST_BYTES: u64 = 64 << 20;

impl<'a> Task<'a> {
    fn new(options: &'a Run, plan: Plan) -> Result<Self, String> {
        let op = options.op.or(plan.reduce_op).unwrap_or(ReduceOp::Sum);
        let multiple_of = multiple_of(&plan, options.dtype);
        let (least, most) = plan.message_bytes;
        let bytes = match options.size {
            Some(Size(bytes)) => {
                if !bytes.is_multiple_of(multiple_of) {
                    return Err(format!(
                        "--size {bytes}, but this plan takes multiples of {multiple_of} bytes of {}",
                        options.dtype
                    ));
                }
                if bytes < least || bytes > most {
                    return Err(format!(
                        "--size {bytes}, but this plan is for {least} to {most} bytes"
                    ));
                }
                bytes
            }
            None => {
                let wanted = default_bytes(&plan).max(least);
                let bytes = wanted.div_ceil(multiple_of).saturating_mul(multiple_of);
                let bytes = if bytes > most {
                    most / multiple_of * multiple_of
                } else {
                    bytes
                };
                if bytes < least || bytes == 0 {
                    return Err(format!(
                        "no size from {least} to {most} bytes is a multiple of {multiple_of}; \
                         choose another --dtype"
                    ));
                }
                bytes
            }
        };
        Ok(Self {
            options,
            plan,
            op,
            bytes,
        })
    }

    /// Runs the plan several times as one rank, and returns the wrong elements of all ranks.
    fn rank(&self, communicator: &Communicator) -> Result<u64, CollectiveError> {
        let Self {
            options, plan, op, ..
        } = self;
        let rank = communicator.rank();
        // On any device, with host buffers.
        let mut prepare = Options::new(options.dtype, *op, self.bytes);
        if let Some(seed) = options.seed {
            prepare.schedule = Schedule::Seeded(seed.wrapping_add(rank.into()));
        }
        let prepared = communicator.prepare(plan, prepare, Stage::Always)?;
        let limit = communicator.timeout();
        let mut output = vec![0; self.bytes as usize * plan.output_blocks as usize];
        let mut wrong = 0;
        // More than two, as what is double comes again then.
        let patterns = [Pattern::Exact, Pattern::Random, Pattern::Exact];
        for (turn, pattern) in (0..).zip(patterns) {
            let seed = options.seed.unwrap_or(1).wrapping_add(turn);
            let data = self.data(pattern, seed);
            let input = data.input(rank, self.bytes as usize * plan.input_blocks as usize);
            prepared.run(&input, &mut output, limit)?;
            let content = |block| plan.content(rank, block);
            wrong += data.check(rank, self.bytes, content, &output);
        }
        let all = communicator.all_gather_bytes(&wrong.to_le_bytes())?;
        let words = all
            .iter()
            .filter_map(|word| word.as_slice().try_into().ok());
        let wrong = words.map(u64::from_le_bytes).sum();
        if rank == 0 {
            let printed = self.report(wrong);
            printed.map_err(|reason| CollectiveError::Usage { rank, reason })?;
        }
        Ok(wrong)
    }

    fn data(&self, pattern: Pattern, seed: u64) -> TestData<'_> {
        TestData {
            pattern,
            dtype: self.options.dtype,
            op: self.op,
            scalars: &[],
            seed,
            ranks: self.plan.world_size(),
        }
    }

    fn report(&self, wrong: u64) -> Result<(), String> {
        let plan = &self.plan;
        let post_condition = match plan.collective {
            Collective::Test => "none (test plan)",
            Collective::Custom => "exact copies (custom reductions are not looked at)",
            _ => "exact result",
        };
        let report = Report {
            ok: wrong == 0,
            plan: &plan.name,
            collective: plan.collective,
            ranks: plan.world_size(),
            bytes: self.bytes,
            dtype: self.options.dtype.name(),
            op: self.op.name(),
            wrong,
            post_condition,
            multiple_of: multiple_of(plan, self.options.dtype),
            message_bytes: plan.message_bytes,
        };
        print_line(&match self.options.format {
            Format::Json => serde_json::to_string(&report).unwrap_or_default(),
            Format::Table => {
                let verdict = match wrong {
                    0 => "ok".to_owned(),
                    n => format!("{n} wrong elements"),
                };
                format!(
                    "`{}`: {} of {} ranks, {} bytes of {} a message, {}: {verdict}; post-condition: \
                     {post_condition}",
                    report.plan,
                    plan.collective.name(),
                    report.ranks,
                    report.bytes,
                    report.dtype,
                    report.op,
                )
            }
        })
    }
}

/// What sizes of messages must be multiples of.
fn multiple_of(plan: &Plan, dtype: DataType) -> u64 {
    plan.message_multiple().max(dtype.size() as u64)
}

/// A size that gives every loop several pieces.
fn default_bytes(plan: &Plan) -> u64 {
    let ops = plan
        .ranks
        .iter()
        .flat_map(|rank| rank.blocks.iter().flatten());
    let pieces = ops.filter_map(|op| match op {
        Op::Loop { unit_bytes, .. } => Some(*unit_bytes),
        _ => None,
    });
    let piece = pieces.max().unwrap_or(0);
    let chunk = piece.saturating_mul(2).saturating_add(GRANULE);
    let looped = match piece {
        0 => 0,
        _ => chunk.saturating_mul(plan.chunks.into()).min(MOST_BYTES),
    };
    looped.max(DEFAULT_BYTES)
}
