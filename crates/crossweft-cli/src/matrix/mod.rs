//! `crossweft matrix`: tries every collective in every circumstance, and compares the results with the reference and
//! between ranks.
//!
//! * [`case`](mod@case): what there is to try.
//! * [`pairwise`]: a few of all cases that hold every pair of circumstances.
//! * [`run`](mod@run): what each rank does.

mod case;
mod pairwise;
mod run;

use std::cell::Cell;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use case::{Case, Operation, RANKS, algorithm_name, algorithms};
use clap::Args;
use crossweft_collective::{CollectiveError, Communicator, DataType, Devices, collectives};
use indicatif::{ProgressBar, ProgressStyle};
use run::Runner;

use crate::exit::Exit;
use crate::job::{self, JobError, JobOptions, Start};
use crate::values::{Device, Size, dtype};

/// Which cases to try, and how.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// World sizes: a number, or the first and the last as in `2..4`.
    #[arg(long, value_name = "N[..M]", default_value = "1..8", value_parser = world_sizes)]
    ranks: (u32, u32),
    /// Only this collective.
    #[arg(long, value_name = "NAME", value_parser = collective)]
    collective: Option<&'static str>,
    /// Only this algorithm; `auto` is the selector's choice.
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    algorithm: Option<&'static str>,
    /// Only this element type.
    #[arg(long, value_parser = dtype)]
    dtype: Option<DataType>,
    /// Only this operation; `premul` is a pre-multiplied sum, `none` is where nothing is reduced.
    #[arg(long, value_name = "NAME", value_parser = operation)]
    op: Option<&'static str>,
    /// Only enough of these cases to hold every pair of circumstances.
    #[arg(long)]
    pairwise: bool,
    /// The device to run on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// On GPUs: every plan by the executor, also those that have a kernel of their own.
    #[arg(long)]
    executor: bool,
    /// Ranks are processes instead of threads.
    #[arg(long)]
    processes: bool,
    /// Only cases from this number on, as an earlier run has printed it.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    from: usize,
    /// At most so many cases.
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
    /// Bytes of the larger of input and output in large cases; K, M and G are powers of 1024.
    #[arg(long, value_name = "BYTES", default_value = "128K")]
    large: Size,
    /// Seconds that any call may take before it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

fn world_sizes(text: &str) -> Result<(u32, u32), String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 1 <= first && first <= last && last <= RANKS => Ok((first, last)),
        _ => Err(format!("give 1 to {RANKS}, or a range as in 2..4")),
    }
}

/// The one of `all` that has this name.
fn one_of(name: &str, all: &[&'static str]) -> Result<&'static str, String> {
    let found = all.iter().find(|&&one| one == name);
    found
        .copied()
        .ok_or_else(|| format!("there are {}", all.join(", ")))
}

fn collective(name: &str) -> Result<&'static str, String> {
    one_of(name, &collectives(0).map(|collective| collective.name()))
}

fn algorithm(name: &str) -> Result<&'static str, String> {
    let all: Vec<_> = algorithms().into_iter().map(algorithm_name).collect();
    one_of(name, &all)
}

fn operation(name: &str) -> Result<&'static str, String> {
    one_of(name, &Operation::ALL.map(Operation::name))
}

impl Options {
    /// The cases asked for, by world size.
    fn cases(&self) -> Vec<Case> {
        let is_meant = |case: &Case| {
            let config = &case.config;
            let algorithm = algorithm_name(config.algorithm);
            let op = config.operation.name();
            (self.ranks.0..=self.ranks.1).contains(&config.ranks)
                && self
                    .collective
                    .is_none_or(|name| name == config.collective.name())
                && self.algorithm.is_none_or(|name| name == algorithm)
                && self.dtype.is_none_or(|dtype| dtype == config.dtype)
                && self.op.is_none_or(|name| name == op)
        };
        let mut cases: Vec<Case> = case::all().into_iter().filter(is_meant).collect();
        if self.pairwise {
            let levels: Vec<_> = cases.iter().map(|case| case.levels).collect();
            let chosen = pairwise::covering(&levels);
            cases = chosen.into_iter().map(|index| cases[index]).collect();
        }
        let asked = cases.into_iter().filter(|case| case.number >= self.from);
        asked.take(self.limit.unwrap_or(usize::MAX)).collect()
    }

    fn job(&self, ranks: u32, devices: Devices) -> JobOptions {
        JobOptions {
            devices,
            start: match self.processes {
                true => Start::Processes,
                false => Start::Threads,
            },
            ranks,
            refuse: |_, _| None,
            timeout: Duration::from_secs(self.timeout),
            bind: true,
            // Two buffers, and what is in them for comparison.
            memory: self.large.0.saturating_mul(3),
            arguments: &[],
        }
    }
}

/// Tries what is asked for: the whole job, or one rank of it.
pub(crate) fn run(options: &Options) -> Exit {
    let start = Instant::now();
    let cases = options.cases();
    if cases.is_empty() {
        crate::complain("error: there are no such cases");
        return Exit::Usage;
    }
    let wrong = AtomicU64::new(0);
    let by_ranks: Vec<&[Case]> = cases
        .chunk_by(|a, b| a.config.ranks == b.config.ranks)
        .collect();
    let mut exit = Exit::Ok;
    let mut done = 0;
    let mut unfinished = None;
    for part in &by_ranks {
        let ranks = part[0].config.ranks;
        let devices = options.device.find(ranks).and_then(|devices| {
            match options.executor && matches!(devices, Devices::Cpu) {
                true => Err("--executor is for GPUs: on CPUs nothing else runs plans".to_owned()),
                false => Ok(devices),
            }
        });
        let devices = devices.map_err(JobError::Usage);
        let ended = devices.and_then(|devices| {
            job::run(&options.job(ranks, devices), |communicator, _| {
                // A spawned rank finds its job's cases by the number of ranks.
                let own = |part: &&&[Case]| part[0].config.ranks == communicator.world_size();
                match by_ranks.iter().find(own) {
                    Some(part) => rank_main(options, communicator, part, &wrong),
                    None => Ok(0),
                }
            })
        });
        let ended = ended.unwrap_or_else(|error: JobError| {
            crate::complain(&format!("error: {error}"));
            error.exit()
        });
        if options.processes && is_a_rank() {
            return ended;
        }
        exit = exit.worse(ended);
        if !matches!(ended, Exit::Ok | Exit::Wrong) {
            unfinished = Some(ranks);
            break;
        }
        done += part.len();
    }
    let (count, seconds) = (cases.len(), start.elapsed().as_secs_f64());
    let wrong = match options.processes {
        // Each rank has said what it found.
        true => (exit == Exit::Wrong).then(|| "some wrong".to_owned()),
        false => Some(wrong.load(Ordering::Relaxed))
            .filter(|&wrong| wrong > 0)
            .map(|wrong| format!("{wrong} wrong")),
    };
    let (first, last) = (
        part_ranks(&by_ranks, 0),
        part_ranks(&by_ranks, by_ranks.len() - 1),
    );
    let verdict = match unfinished {
        None => wrong.unwrap_or_else(|| "none wrong".to_owned()),
        // Nobody has judged what was not tried.
        Some(ranks) => format!("not ended: stopped among those of {ranks} ranks"),
    };
    exit.worse(crate::ended(crate::print_line(&format!(
        "matrix: {done} of {count} cases at {first} to {last} ranks, {verdict}, {seconds:.0} s"
    ))))
}

fn part_ranks(parts: &[&[Case]], index: usize) -> u32 {
    parts[index][0].config.ranks
}

/// Whether this process is one rank of a job.
fn is_a_rank() -> bool {
    std::env::var_os("CROSSWEFT_RANK").is_some()
}

/// Tries cases of one world size as one rank. Returns the number of wrong cases, the same on every rank.
fn rank_main(
    options: &Options,
    communicator: &Communicator,
    cases: &[Case],
    wrong: &AtomicU64,
) -> Result<u64, CollectiveError> {
    let runner = Runner::new(communicator, options.large.0, options.executor)?;
    let progress = Progress::new(communicator, cases);
    let mut all_wrong = 0;
    for group in cases.chunk_by(|a, b| a.config == b.config) {
        progress.at(&group[0]);
        let outcomes = runner.run(group).inspect_err(|_| {
            let (case, next) = (&group[0], group[group.len() - 1].number + 1);
            crate::complain(&format!("{case}: failed; --from {next} goes on behind it"));
        })?;
        all_wrong += outcomes.iter().filter(|outcome| outcome.wrong > 0).count() as u64;
        progress.done(group.len(), all_wrong);
    }
    progress.bar.finish_and_clear();
    if communicator.rank() == 0 {
        wrong.fetch_add(all_wrong, Ordering::Relaxed);
    }
    Ok(all_wrong)
}

/// What is going on, on standard error: a bar on a terminal, or a line now and then.
struct Progress {
    active: bool,
    bar: ProgressBar,
    ranks: u32,
    count: usize,
    done: Cell<usize>,
    said: Cell<Instant>,
}

/// Time between lines.
const BETWEEN: Duration = Duration::from_secs(10);

impl Progress {
    fn new(communicator: &Communicator, cases: &[Case]) -> Self {
        let active = communicator.rank() == 0;
        let bar = match active && std::io::stderr().is_terminal() {
            true => ProgressBar::new(cases.len() as u64),
            false => ProgressBar::hidden(),
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {eta} {prefix}{msg}")
        {
            bar.set_style(style);
        }
        Self {
            active,
            bar,
            ranks: communicator.world_size(),
            count: cases.len(),
            done: Cell::new(0),
            said: Cell::new(Instant::now()),
        }
    }

    fn at(&self, case: &Case) {
        self.bar.set_message(case.to_string());
        if self.active && self.bar.is_hidden() && self.said.get().elapsed() > BETWEEN {
            let (ranks, done, count) = (self.ranks, self.done.get(), self.count);
            crate::complain(&format!(
                "matrix: {ranks} ranks: {done} of {count}, at {case}"
            ));
            self.said.set(Instant::now());
        }
    }

    fn done(&self, cases: usize, wrong: u64) {
        self.done.set(self.done.get() + cases);
        self.bar.inc(cases as u64);
        if wrong > 0 {
            self.bar.set_prefix(format!("{wrong} wrong"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn world_sizes_are_a_number_or_a_range() {
        assert_eq!(world_sizes("3"), Ok((3, 3)));
        assert_eq!(world_sizes("2..8"), Ok((2, 8)));
        for text in ["0", "9", "4..2", "..", "1..9", "x"] {
            assert!(world_sizes(text).is_err(), "{text}");
        }
    }
}
