//! The command line of `bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use crossweft_collective::{Algorithm, Collective, DataType, Devices, Scalar};

use crate::Format;
use crate::doctor::DEFAULT_RANKS;
use crate::job::JobOptions;
use crate::values::{Buffers, Device, Operation, Size, dtype, names, operation};

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
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: Vec<PathBuf>,
    /// Thread blocks of each rank, instead of as many as the selector thinks fit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) blocks: Option<u32>,
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

/// What is measured, and how.
#[derive(Clone, Debug)]
pub(crate) struct Bench {
    pub(crate) collective: Collective,
    /// Where something is reduced.
    pub(crate) op: Option<Operation>,
    /// Whether as sends and receives, instead of a plan.
    pub(crate) messages: bool,
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
        let both = (self.collective, algorithm) == (Collective::AllToAll, Algorithm::Direct);
        self.common.in_place && both
    }

    /// What cannot be told from one option alone.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Common {
            min,
            max,
            ranks,
            buffers,
            ..
        } = self.common;
        if min > max {
            let (min, max) = (min.0, max.0);
            return Err(format!("--min {min} is larger than --max {max}"));
        }
        if let (Some(root), Some(ranks)) = (self.collective.root(), ranks)
            && root >= ranks
        {
            return Err(format!("--root {root}, but there are {ranks} ranks"));
        }
        self.scalar()?;
        if let Some(plot) = &self.common.plot {
            // Before anything is measured for it.
            let folder = plot
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty());
            if plot.file_name().is_none() || folder.is_some_and(|folder| !folder.is_dir()) {
                return Err(format!(
                    "--plot {}: there is no such folder",
                    plot.display()
                ));
            }
        }
        if self.messages {
            return self.check_messages();
        }
        let Some(algorithm) = self.algorithm()? else {
            return Ok(());
        };
        if algorithm.needs_registered() && buffers == Buffers::Private {
            return Err(format!("--algorithm {algorithm} needs --buffers symmetric"));
        }
        if self.overwrites(algorithm) {
            let reason = "blocks would overwrite each other";
            return Err(format!("--algorithm direct, but --in-place: {reason}"));
        }
        Ok(())
    }

    /// What means nothing to sends and receives.
    fn check_messages(&self) -> Result<(), String> {
        let Common {
            in_place,
            algorithm,
            blocks,
            ..
        } = &self.common;
        let option = match (in_place, algorithm, blocks) {
            (true, _, _) => "--in-place",
            (_, Some(_), _) => "--algorithm",
            (_, _, Some(_)) => "--blocks",
            _ => return Ok(()),
        };
        Err(format!(
            "{option} is for plans; these are sends and receives"
        ))
    }

    /// Blocks of input and of output, and of the larger of them, with `ranks` ranks.
    pub(crate) fn blocks(&self, ranks: u32) -> (u64, u64, u64) {
        let (input, output) = self.collective.blocks(ranks).unwrap_or((1, 1));
        (input.into(), output.into(), input.max(output).into())
    }

    /// The sizes in bytes of the larger of input and output, each a whole number of elements in each
    /// block, without repeats.
    pub(crate) fn sizes(&self, ranks: u32) -> Vec<u64> {
        let unit = self.common.dtype.size() as u64 * self.blocks(ranks).2;
        let mut sizes: Vec<u64> = Vec::new();
        let mut bytes = self.common.min.0;
        while bytes <= self.common.max.0 {
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

impl Common {
    /// Ranks to start, where no launcher does.
    pub(crate) fn ranks(&self) -> u32 {
        self.ranks.unwrap_or(DEFAULT_RANKS)
    }

    /// The job that is to be run.
    pub(crate) fn job(&self, devices: Devices) -> JobOptions {
        let timeout = Duration::from_secs(self.timeout);
        JobOptions::new(self.ranks, self.threads, devices, timeout, !self.no_bind)
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
