//! The command line of `bench all-reduce`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use crossweft_collective::{Algorithm, DataType, Devices, ReduceOp};

use crate::Format;
use crate::doctor::DEFAULT_RANKS;
use crate::job::{JobOptions, Start};
use crate::values::{Device, Size, dtype, names, op};

/// Options of `bench all-reduce`.
#[derive(Clone, Debug, Args)]
pub(crate) struct AllReduce {
    /// The device to run on; `auto` takes GPUs if there is one for every rank.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,
    /// Number of ranks to start; under a launcher (torchrun, mpirun, srun) it gives the number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) ranks: Option<u32>,
    /// Start the ranks as threads of this process instead of processes.
    #[arg(long)]
    pub(crate) threads: bool,
    /// Smallest message in bytes; K, M and G are powers of 1024.
    #[arg(long, value_name = "BYTES", default_value = "8")]
    pub(crate) min: Size,
    /// Largest message in bytes.
    #[arg(long, value_name = "BYTES", default_value = "64M")]
    pub(crate) max: Size,
    /// Each size is this many times the one before.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    pub(crate) dtype: DataType,
    /// Reduce operation.
    #[arg(long, default_value = "sum", value_parser = op)]
    pub(crate) op: ReduceOp,
    /// Reduce into the input buffer.
    #[arg(long)]
    pub(crate) in_place: bool,
    /// Where buffers lie: in symmetric memory (zero copy), or private to each rank (staged).
    #[arg(long, value_enum, default_value_t = Buffers::Symmetric)]
    pub(crate) buffers: Buffers,
    /// Use one algorithm for every size instead of choosing by size.
    #[arg(long, value_parser = algorithm)]
    pub(crate) algorithm: Option<Algorithm>,
    /// Thread blocks of each rank, instead of as many as the selector thinks fit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) blocks: Option<u32>,
    /// Timed calls of each size; by default fewer for larger sizes.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iters: Option<u32>,
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

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Buffers {
    /// Memory that all ranks can reach.
    Symmetric,
    /// Memory of each rank's own.
    Private,
}

fn algorithm(text: &str) -> Result<Algorithm, String> {
    Algorithm::from_name(text).ok_or_else(|| {
        format!(
            "the algorithms are {}",
            names(&Algorithm::ALL, Algorithm::name)
        )
    })
}

impl AllReduce {
    /// What cannot be told from one option alone.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.min > self.max {
            let (min, max) = (self.min.0, self.max.0);
            return Err(format!("--min {min} is larger than --max {max}"));
        }
        if let Some(algorithm) = self.algorithm
            && algorithm.needs_registered()
            && self.buffers == Buffers::Private
        {
            return Err(format!("--algorithm {algorithm} needs --buffers symmetric"));
        }
        Ok(())
    }

    /// Ranks to start, where no launcher does.
    pub(crate) fn ranks(&self) -> u32 {
        self.ranks.unwrap_or(DEFAULT_RANKS)
    }

    /// The job that is to be run.
    pub(crate) fn job(&self, devices: Devices) -> JobOptions {
        JobOptions {
            devices,
            start: if self.threads {
                Start::Threads
            } else {
                Start::Processes
            },
            ranks: self.ranks(),
            refuse: match self.ranks {
                // Whatever number the launcher has.
                None => |_, _| None,
                Some(_) => |ranks, job| {
                    (ranks != job.world_size).then(|| {
                        format!(
                            "--ranks {ranks}, but {} started {}; leave --ranks out",
                            job.launcher, job.world_size
                        )
                    })
                },
            },
            timeout: Duration::from_secs(self.timeout),
            bind: !self.no_bind,
            arguments: &[],
        }
    }

    /// The sizes in bytes, each a whole number of elements, without repeats.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        let element = self.dtype.size() as u64;
        let mut sizes: Vec<u64> = Vec::new();
        let mut bytes = self.min.0;
        while bytes <= self.max.0 {
            let whole = bytes / element * element;
            if sizes.last() != Some(&whole) {
                sizes.push(whole);
            }
            // From 0 there is no multiple: one element comes next.
            bytes = if bytes == 0 {
                element
            } else {
                bytes.saturating_mul(self.factor)
            };
        }
        sizes
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
