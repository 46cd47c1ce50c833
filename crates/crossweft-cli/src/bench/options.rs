//! The command line of `bench`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use crossweft_collective::{Algorithm, Collective, DataType, Devices, Scalar};
use rustix::fs::{Access, access};

use super::memory;
use crate::Format;
use crate::job::{self, JobOptions};
use crate::values::{Buffers, Device, Operation, Size, dtype, names, operation, plan_file};

/// What `--algorithm` calls all of them.
const ALL: &str = "all";

/// Options of every collective.
#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// The device to run on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,
    /// Number of ranks to start; under a launcher (torchrun, mpirun, srun) it gives the number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) ranks: Option<u32>,
    /// Start the ranks as threads of this process instead of processes.
    #[arg(long)]
    pub(crate) threads: bool,
    /// Smallest size in bytes, of the larger of input and output; K, M and G are powers of 1024.
    #[arg(long, value_name = "BYTES", default_value = "8")]
    pub(crate) min: Size,
    /// Largest size in bytes.
    #[arg(long, value_name = "BYTES", default_value = "64M")]
    pub(crate) max: Size,
    /// Each size is this many times the one before.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    pub(crate) dtype: DataType,
    /// One buffer for input and output: where one is a block of the other, it lies there.
    #[arg(long)]
    pub(crate) in_place: bool,
    /// Where buffers lie: in symmetric memory (zero copy), or private to each rank (staged).
    #[arg(long, value_enum, default_value_t = Buffers::Symmetric)]
    pub(crate) buffers: Buffers,
    /// Use one algorithm for every size instead of choosing by size; `all` measures each of them that the buffers allow.
    #[arg(long, value_name = "NAME")]
    pub(crate) algorithm: Option<String>,
    /// A plan to choose from beside the built-in algorithms, of crossweft or of MSCCL++; may be repeated.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(plan_file))]
    pub(crate) plan: Vec<PathBuf>,
    /// Thread blocks of each rank, instead of as many as the selector thinks fit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) blocks: Option<u32>,
    /// On GPUs: run every plan by the executor, also those that have a kernel of their own.
    #[arg(long)]
    pub(crate) executor: bool,
    /// Pairs of input and output that take turns, so that a call finds none of its own in a cache that holds fewer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) rotate: u32,
    /// One rank, another in each call, comes that much later than the others; time counts from when it comes.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub(crate) skew: u64,
    /// On GPUs: time calls one by one with the host's clock, and none in graphs.
    #[arg(long, group = "timing")]
    pub(crate) eager: bool,
    /// On GPUs: time calls in graphs of many alone, with the host's clock.
    #[arg(long, group = "timing")]
    pub(crate) graph: bool,
    /// On GPUs: time calls in graphs of many alone, with the device's clock.
    #[arg(long, group = "timing")]
    pub(crate) device_time: bool,
    /// Timed calls of each size; by default fewer for larger sizes.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iters: Option<u32>,
    /// Draw times and bandwidth by size, beside what the link could carry: an SVG file.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Leave it to the system which cores the ranks run on, instead of binding each to one.
    #[arg(long)]
    pub(crate) no_bind: bool,
    /// Seed of the test data.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Seconds that any call may take before it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
    /// For people, or for programs.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

/// Options of collectives that reduce.
#[derive(Clone, Debug, Args)]
pub(crate) struct Reducing {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Reduce operation; `premul:SCALAR` multiplies every rank's input by a number before the sum.
    #[arg(long, default_value = "sum", value_parser = operation)]
    pub(crate) op: Operation,
}

/// Options of collectives from or to one rank.
#[derive(Clone, Debug, Args)]
pub(crate) struct Rooted {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The root.
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub(crate) root: u32,
}

/// Options of a reduction to one rank.
#[derive(Clone, Debug, Args)]
pub(crate) struct RootedReducing {
    #[command(flatten)]
    pub(crate) common: Common,
    /// The root.
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub(crate) root: u32,
    /// Reduce operation; `premul:SCALAR` multiplies every rank's input by a number before the sum.
    #[arg(long, default_value = "sum", value_parser = operation)]
    pub(crate) op: Operation,
}

/// Options of a collective that reduces messages, on private buffers unless it is told otherwise.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("buffers", |arg| arg.default_value("private")))]
pub(crate) struct PrivateReducing {
    #[command(flatten)]
    pub(crate) of: Reducing,
}

/// Options of an all-reduce of tokens with normalisation.
#[derive(Clone, Debug, Args)]
#[command(
    mut_arg("min", |arg| arg.default_value("1").value_name("TOKENS").help("Smallest number of tokens; K is 1024")),
    mut_arg("max", |arg| arg.default_value("1K").value_name("TOKENS").help("Largest number of tokens")),
    mut_arg("dtype", |arg| arg.default_value("bf16").help("Element type: f32, f16 or bf16")),
    mut_arg("buffers", |arg| arg.default_value("private").help("Where buffers lie: private to each rank"))
)]
pub(crate) struct Normalising {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) norm: Norm,
}

/// What follows the all-reduce of tokens.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Norm {
    /// Elements of a token, a multiple of 8.
    #[arg(long, value_name = "ELEMENTS", default_value_t = 4096,
          value_parser = clap::value_parser!(u32).range(8..=16_384))]
    pub(crate) hidden: u32,
    /// What the normalised tokens are quantised with: one scale for all, one for each token, or one for 128 elements.
    #[arg(long, value_enum, default_value_t = Quantise::None)]
    pub(crate) quantise: Quantise,
}

/// Scales of quantised tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantise {
    /// Not quantised.
    None,
    /// One scale for all.
    Tensor,
    /// One for each token.
    Token,
    /// One for 128 elements.
    Group,
}

impl Quantise {
    /// The word on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tensor => "tensor",
            Self::Token => "token",
            Self::Group => "group",
        }
    }
}

/// What carries a collective out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// A plan for each size.
    Plans,
    /// Sends and receives.
    Messages,
    /// A plan, and what follows it on each rank.
    Fused(Norm),
}

/// What times are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    /// Calls by the host's clock, and where there are graphs, of those by the device's.
    Both,
    /// Calls by the host's clock.
    Eager,
    /// Calls in graphs, by the host's clock.
    Graph,
    /// Calls in graphs, by the device's clock.
    Device,
}

impl Timing {
    /// The word in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Both => "eager_and_device",
            Self::Eager => "eager",
            Self::Graph => "graph",
            Self::Device => "device",
        }
    }
}

/// What is measured, and how.
#[derive(Clone, Debug)]
pub(crate) struct Bench {
    pub(crate) collective: Collective,
    /// Where something is reduced.
    pub(crate) op: Option<Operation>,
    pub(crate) kind: Kind,
    pub(crate) common: Common,
}

impl Bench {
    /// The algorithms to measure: `None` is what the selector chooses.
    pub(crate) fn algorithms(&self) -> Result<Vec<Option<Algorithm>>, String> {
        let is_private = matches!(self.common.buffers, Buffers::Private);
        let fits = |algorithm: &&Algorithm| {
            let needs_other_buffers = is_private && algorithm.needs_registered();
            !needs_other_buffers && !self.overwrites(**algorithm)
        };
        match self.common.algorithm.as_deref() {
            Some(ALL) => {
                let those = Algorithm::of(self.collective).iter();
                Ok(those.filter(fits).map(|&a| Some(a)).collect())
            }
            _ => Ok(vec![self.algorithm()?]),
        }
    }

    /// The algorithm asked for, if there is one.
    fn algorithm(&self) -> Result<Option<Algorithm>, String> {
        let Some(name) = self.common.algorithm.as_ref().filter(|name| *name != ALL) else {
            return Ok(None);
        };
        let those = Algorithm::of(self.collective);
        let found = those.iter().find(|algorithm| algorithm.name() == name);
        match found {
            Some(algorithm) => Ok(Some(*algorithm)),
            None => Err(format!(
                "--algorithm {name}: of {} the algorithms are {}",
                self.collective.name(),
                names(those, Algorithm::name)
            )),
        }
    }

    /// What every rank's input is multiplied by before a sum, if it is.
    pub(crate) fn scalar(&self) -> Result<Option<Scalar>, String> {
        let Some(scalar) = self.op.and_then(|op| op.scalar) else {
            return Ok(None);
        };
        let dtype = self.common.dtype;
        let found = Scalar::new(dtype, scalar);
        let found =
            found.ok_or_else(|| format!("--op premul:{scalar}: {dtype} has no such number"))?;
        Ok(Some(found))
    }

    /// Whether blocks would overwrite each other, in place.
    fn overwrites(&self, algorithm: Algorithm) -> bool {
        self.common.in_place && algorithm.overwrites(self.collective)
    }

    /// What cannot be told from one option alone.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Common {
            min, max, buffers, ..
        } = self.common;
        let (ranks, _) = self.common.ranks();
        if min > max {
            let (min, max) = (min.0, max.0);
            return Err(format!("--min {min} is larger than --max {max}"));
        }
        if let Some(root) = self.collective.root().filter(|root| *root >= ranks) {
            return Err(format!("--root {root}, but there are {ranks} ranks"));
        }
        self.scalar()?;
        if let Some(plot) = &self.common.plot {
            check_plot(plot)?;
        }
        self.check_timing()?;
        match self.kind {
            Kind::Plans => {}
            Kind::Messages => return self.check_messages(),
            Kind::Fused(_) => return self.check_fused(),
        }
        let Some(algorithm) = self.algorithm()? else {
            return Ok(());
        };
        if algorithm.needs_registered() && buffers == Buffers::Private {
            return Err(format!("--algorithm {algorithm} needs --buffers symmetric"));
        }
        if self.overwrites(algorithm) {
            let reason = "blocks would overwrite each other";
            return Err(format!("--algorithm {algorithm}, but --in-place: {reason}"));
        }
        Ok(())
    }

    /// Whether these devices can do it.
    pub(crate) fn check_on(&self, devices: &Devices) -> Result<(), String> {
        let option = match self.timing() {
            _ if !matches!(devices, Devices::Cpu) => return Ok(()),
            Timing::Both if self.common.executor => {
                return Err(
                    "--executor is for GPUs: on the cpu every plan is run by it; leave it out"
                        .to_owned(),
                );
            }
            Timing::Both => return Ok(()),
            Timing::Eager => "--eager",
            Timing::Graph => "--graph",
            Timing::Device => "--device-time",
        };
        Err(format!(
            "{option} is for GPUs: on the cpu there are no graphs, and calls are timed one by one as they are; \
             leave it out"
        ))
    }

    /// What cannot be measured in graphs.
    fn check_timing(&self) -> Result<(), String> {
        if !matches!(self.timing(), Timing::Graph | Timing::Device) {
            return Ok(());
        }
        match self.kind {
            Kind::Messages => {
                Err("messages are timed one by one, not in graphs: --eager".to_owned())
            }
            Kind::Fused(_) if self.common.rotate > 1 => {
                Err("--rotate is for plans and for calls one by one: --eager".to_owned())
            }
            _ if self.common.skew > 0 => {
                Err("--skew is for calls one by one, not in graphs".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// What was asked to be timed.
    pub(crate) fn timing(&self) -> Timing {
        let Common {
            eager,
            graph,
            device_time,
            ..
        } = self.common;
        match (eager, graph, device_time) {
            (true, _, _) => Timing::Eager,
            (_, true, _) => Timing::Graph,
            (_, _, true) => Timing::Device,
            _ => Timing::Both,
        }
    }

    /// What means nothing to sends and receives.
    fn check_messages(&self) -> Result<(), String> {
        if let Some(option) = self.option_of_plans() {
            return Err(format!(
                "{option} is for plans; these are sends and receives"
            ));
        }
        if self.op.is_some_and(|op| op.scalar.is_some()) {
            return Err("--op premul is for plans; these are sends and receives".to_owned());
        }
        match (self.collective, self.common.buffers) {
            (Collective::ReduceScatter, Buffers::Symmetric) => {
                Err("messages are reduced from private buffers: --buffers private".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// What means nothing to tokens.
    fn check_fused(&self) -> Result<(), String> {
        match (self.option_of_plans(), self.common.buffers) {
            (Some(option), _) => Err(format!(
                "{option} is for plans alone; here one is followed by normalisation"
            )),
            (None, Buffers::Symmetric) => {
                Err("tokens are normalised in private buffers: --buffers private".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// One that was given and is for plans.
    fn option_of_plans(&self) -> Option<&'static str> {
        let Common {
            in_place,
            algorithm,
            blocks,
            executor,
            ..
        } = &self.common;
        match (in_place, algorithm, blocks, executor) {
            (true, ..) => Some("--in-place"),
            (_, Some(_), ..) => Some("--algorithm"),
            (_, _, Some(_), _) => Some("--blocks"),
            (.., true) => Some("--executor"),
            _ => None,
        }
    }

    /// Bytes of a token, where sizes are counted in tokens.
    pub(crate) fn token(&self) -> Option<u64> {
        match self.kind {
            Kind::Fused(norm) => Some(u64::from(norm.hidden) * self.common.dtype.size() as u64),
            _ => None,
        }
    }

    /// Blocks of input and of output, and of the larger of them, with `ranks` ranks.
    pub(crate) fn blocks(&self, ranks: u32) -> (u64, u64, u64) {
        let (input, output) = self.collective.blocks(ranks).unwrap_or((1, 1));
        (input.into(), output.into(), input.max(output).into())
    }

    /// The job that is to be run.
    pub(crate) fn job(&self, devices: Devices) -> JobOptions {
        let Common {
            ranks,
            threads,
            no_bind,
            ..
        } = self.common;
        let timeout = Duration::from_secs(self.common.timeout);
        let mut job = JobOptions::new(ranks, threads, devices, timeout, !no_bind);
        job.memory = memory::needed(self, job.ranks);
        job
    }

    /// The sizes in bytes of the larger of input and output, each a whole number of elements in each
    /// block, without repeats.
    pub(crate) fn sizes(&self, ranks: u32) -> Vec<u64> {
        let unit = match self.token() {
            Some(token) => token,
            None => self.common.dtype.size() as u64 * self.blocks(ranks).2,
        };
        let scale = self.token().unwrap_or(1);
        let mut sizes: Vec<u64> = Vec::new();
        let mut bytes = self.common.min.0.saturating_mul(scale);
        while bytes <= self.common.max.0.saturating_mul(scale) {
            let whole = bytes / unit * unit;
            if sizes.last() != Some(&whole) {
                sizes.push(whole);
            }
            // From 0 there is no multiple: one element comes next.
            bytes = if bytes == 0 {
                unit
            } else {
                bytes.saturating_mul(self.common.factor)
            };
        }
        sizes
    }
}

/// Whether a picture can be written there, before anything is measured for it.
pub(super) fn check_plot(plot: &Path) -> Result<(), String> {
    let folder = plot
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let wrong = if plot.is_dir() || plot.file_name().is_none() {
        "it is a folder; name a file"
    } else if !folder.is_dir() {
        "there is no such folder"
    } else if access(if plot.exists() { plot } else { folder }, Access::WRITE_OK).is_err() {
        "it cannot be written"
    } else {
        return Ok(());
    };
    Err(format!("--plot {}: {wrong}", plot.display()))
}

impl Common {
    /// Ranks of the job, and those of them on this host.
    pub(crate) fn ranks(&self) -> (u32, u32) {
        job::ranks(self.ranks, self.threads)
    }

    /// Timed calls of a size.
    pub(crate) fn iterations(&self, bytes: u64) -> usize {
        self.iters.map_or_else(
            || match bytes {
                0..=65_536 => 200,
                65_537..=1_048_576 => 50,
                1_048_577..=8_388_608 => 20,
                _ => 8,
            },
            |iters| iters as usize,
        )
    }
}
