//! `crossweft tune`: measures all candidates on this machine.

use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};
use crossweft_collective::{
    CollectiveError, Communicator, DataType, Progress, ReduceOp, Request, TuneOptions, Tuned, tune,
};
use crossweft_hal::cuda::Cache;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::exit::Exit;
use crate::job::{self, JobError, JobOptions};
use crate::values::{Buffers, Device, Name, Size, dtype, op, plan_file};
use crate::{Format, print_line};

/// Options of `tune`.
#[derive(Debug, Args)]
pub(crate) struct Tune {
    /// The collectives to tune.
    #[arg(value_enum, default_values_t = [Name::AllReduce])]
    collectives: Vec<Name>,
    /// The device to run on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Number of ranks to start; under a launcher (torchrun, mpirun, srun) it gives the number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Option<u32>,
    /// Start the ranks as threads of this process instead of processes.
    #[arg(long)]
    threads: bool,
    /// Largest size in bytes, of the larger of input and output; K, M and G are powers of 1024. Larger ones are left
    /// to the shipped rule.
    #[arg(long, value_name = "BYTES", default_value = "8M")]
    max: Size,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DataType,
    /// Reduce operation.
    #[arg(long, default_value = "sum", value_parser = op)]
    op: ReduceOp,
    /// Where buffers lie; by default both are measured.
    #[arg(long, value_enum)]
    buffers: Option<Buffers>,
    /// Seconds that each collective may take, about.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.8)]
    budget: f64,
    /// A plan to choose from beside the built-in algorithms, of crossweft or of MSCCL++; may be repeated.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(plan_file))]
    plan: Vec<PathBuf>,
    /// Leave it to the system which cores the ranks run on, instead of binding each to one.
    #[arg(long)]
    no_bind: bool,
    /// Seconds that any call may take before it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// For people, or for programs.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Runs the tuner: the whole job, or one rank of it.
pub(crate) fn run(options: &Tune) -> Exit {
    let result = options.job().and_then(|job| {
        job::run(&job, |communicator, started_as| {
            options.tune(communicator, started_as)
        })
    });
    result.unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}

impl Tune {
    fn job(&self) -> Result<JobOptions, JobError> {
        if !(0.0..=3600.0).contains(&self.budget) {
            let reason = format!("--budget {}: give 0 to 3600 seconds", self.budget);
            return Err(JobError::Usage(reason));
        }
        let (_, local) = job::ranks(self.ranks, self.threads);
        let devices = self.device.find(local).map_err(JobError::Usage)?;
        let timeout = Duration::from_secs(self.timeout);
        let mut job = JobOptions::new(self.ranks, self.threads, devices, timeout, !self.no_bind);
        // Buffers of one collective at a time; scratch memory is bounded.
        let buffers = |one: &TuneOptions| {
            let (i, o) = one.collective.blocks(job.ranks).unwrap_or((1, 1));
            one.max_bytes.saturating_mul(u64::from(i) + u64::from(o))
        };
        job.memory = self
            .options(job.ranks)
            .iter()
            .map(buffers)
            .max()
            .unwrap_or(0);
        Ok(job)
    }

    /// What is measured, with `ranks` ranks.
    fn options(&self, ranks: u32) -> Vec<TuneOptions> {
        let places = match self.buffers {
            Some(buffers) => vec![buffers],
            None => vec![Buffers::Symmetric, Buffers::Private],
        };
        let of = |name: &Name| {
            let collective = name.collective(0);
            let (i, o) = collective.blocks(ranks).unwrap_or((1, 1));
            let budget = Duration::from_secs_f64(self.budget / places.len() as f64);
            let one = |buffers: &Buffers| TuneOptions {
                collective,
                dtype: self.dtype,
                op: self.op,
                place: buffers.place(false),
                max_bytes: self.max.0 / u64::from(i.max(o)),
                budget,
            };
            places.iter().map(one).collect::<Vec<_>>()
        };
        self.collectives.iter().flat_map(of).collect()
    }

    fn tune(&self, communicator: &Communicator, started_as: &str) -> Result<u64, CollectiveError> {
        for plan in &self.plan {
            communicator.register_file(plan)?;
        }
        let options = self.options(communicator.world_size());
        let bar = RefCell::new(None);
        let show = |progress: &Progress| {
            if communicator.rank() != 0 || !std::io::stderr().is_terminal() {
                return;
            }
            let name = options[progress.index].collective.name();
            let mut bar = bar.borrow_mut();
            let bar = bar.get_or_insert_with(|| new_bar(progress.sizes));
            bar.set_position(progress.done as u64);
            bar.set_message(format!("{name}, {} bytes", progress.bytes));
        };
        let tuned = tune(communicator, &options, &Cache::from_environment(), show);
        if let Some(bar) = bar.take() {
            bar.finish_and_clear();
        }
        let tuned = tuned?;
        if communicator.rank() == 0 {
            let printed = print_line(&match self.format {
                Format::Table => table(communicator, started_as, &options, &tuned),
                Format::Json => {
                    let value = report(communicator, started_as, &options, &tuned);
                    serde_json::to_string_pretty(&value).unwrap_or_default()
                }
            });
            printed.map_err(|reason| CollectiveError::Usage { rank: 0, reason })?;
        }
        Ok(0)
    }
}

fn new_bar(sizes: usize) -> ProgressBar {
    let bar = ProgressBar::new(sizes as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// What is asked of the selector that is told.
fn request(communicator: &Communicator, options: &TuneOptions) -> Request {
    Request {
        collective: options.collective,
        world_size: communicator.world_size(),
        dtype: options.dtype,
        op: options.op,
        place: options.place,
        in_place: Some(false),
        device: communicator.device().into(),
        max_bytes: options.max_bytes,
        most_blocks: communicator.endpoint().waiting_blocks(),
        deterministic: communicator.selection().is_deterministic(),
    }
}

fn table(
    communicator: &Communicator,
    started_as: &str,
    options: &[TuneOptions],
    tuned: &Tuned,
) -> String {
    let mut text = String::new();
    for (one, took) in options.iter().zip(&tuned.took) {
        let request = request(communicator, one);
        let what = request.describe();
        text += &format!(
            "{what} ({started_as}), measured in {:.2} s:\n",
            took.as_secs_f64()
        );
        for choice in communicator.selection().select(&request).choices() {
            let blocks = match choice.blocks {
                1 => String::new(),
                blocks => format!(", {blocks} thread blocks"),
            };
            let (up_to, algorithm, reason) = (choice.up_to, &choice.algorithm, &choice.reason);
            text += &format!("  up to {up_to:>10} B: {algorithm}{blocks} ({reason})\n");
        }
    }
    let (disturbed, timed) = tuned.disturbed;
    if disturbed * 10 > timed {
        text += &format!(
            "note: {disturbed} of {timed} times were twice as long as the shortest call: other work disturbs the \
             measurement, tune again when this machine is quiet\n"
        );
    }
    text + &match &tuned.path {
        Some(path) => format!("written: {}", path.display()),
        None => "not written: there is no cache folder, set CROSSWEFT_CACHE_DIR".to_owned(),
    }
}

fn report(
    communicator: &Communicator,
    started_as: &str,
    options: &[TuneOptions],
    tuned: &Tuned,
) -> Value {
    let of = |(one, took): (&TuneOptions, &Duration)| {
        let selector = communicator.selection().select(&request(communicator, one));
        let choice = |choice: &crossweft_collective::Choice| {
            json!({
                "up_to": choice.up_to,
                "algorithm": choice.algorithm.name(),
                "thread_blocks": choice.blocks,
                "reason": choice.reason,
            })
        };
        let choices: Vec<Value> = selector.choices().iter().map(choice).collect();
        json!({
            "collective": one.collective.name(),
            "place": one.place,
            "dtype": one.dtype.name(),
            "op": one.op.name(),
            "seconds": took.as_secs_f64(),
            "choices": choices,
        })
    };
    json!({
        "ranks": communicator.world_size(),
        "device": communicator.device().name(),
        "started_as": started_as,
        "path": tuned.path,
        "disturbed": tuned.disturbed,
        "tuned": options.iter().zip(&tuned.took).map(of).collect::<Vec<_>>(),
        "table": tuned.table,
    })
}
