//! The command line of `bench all-reduce`.

use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use crossweft_collective::{Algorithm, DataType, ReduceOp};

use crate::Format;
use crate::doctor::DEFAULT_RANKS;

/// Options of `bench all-reduce`.
#[derive(Clone, Debug, Args)]
pub(crate) struct AllReduce {
    /// The device to run on; this version has the CPU device.
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
    /// Timed calls of each size; by default fewer for larger sizes.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iters: Option<u32>,
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

/// Devices by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The best there is.
    Auto,
    /// The CPU device.
    Cpu,
    /// NVIDIA GPUs: not in this version.
    #[value(hide = true)]
    Cuda,
}

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Buffers {
    /// Memory that all ranks can reach.
    Symmetric,
    /// Memory of each rank's own.
    Private,
}

/// A number of bytes, as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let upper = text.trim().to_ascii_uppercase();
        let stripped = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B'));
        let number = stripped.unwrap_or(&upper);
        let (digits, shift) = match number.strip_suffix(['K', 'M', 'G']) {
            Some(digits) if number.ends_with('K') => (digits, 10),
            Some(digits) if number.ends_with('M') => (digits, 20),
            Some(digits) => (digits, 30),
            None => (number, 0),
        };
        let value: u64 = digits
            .parse()
            .map_err(|_| "give a number of bytes, such as 8, 64K or 16M".to_owned())?;
        match value.checked_mul(1 << shift) {
            Some(bytes) if bytes <= LARGEST => Ok(Self(bytes)),
            _ => Err("the largest size is 16G".to_owned()),
        }
    }
}

/// More than the memory of a usual machine; a slip of the finger rather than a wish.
const LARGEST: u64 = 16 << 30;

fn names<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str) -> String {
    all.iter()
        .map(|&item| name(item))
        .collect::<Vec<_>>()
        .join(", ")
}

fn dtype(text: &str) -> Result<DataType, String> {
    // What nccl-tests and torch call them.
    let name = match text {
        "float" | "float32" => "f32",
        "double" | "float64" => "f64",
        "half" | "float16" => "f16",
        "bfloat16" => "bf16",
        "int8" => "i8",
        "uint8" => "u8",
        "int32" => "i32",
        "uint32" => "u32",
        "int64" => "i64",
        "uint64" => "u64",
        "f8e4m3fn" | "float8_e4m3fn" => "f8e4m3",
        "float8_e5m2" => "f8e5m2",
        name => name,
    };
    DataType::from_name(name)
        .ok_or_else(|| format!("the types are {}", names(&DataType::ALL, DataType::name)))
}

fn op(text: &str) -> Result<ReduceOp, String> {
    ReduceOp::from_name(text).ok_or_else(|| {
        format!(
            "the operations are {}",
            names(&ReduceOp::ALL, ReduceOp::name)
        )
    })
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
        if self.device == Device::Cuda {
            return Err("this version has no CUDA device; use --device cpu".to_owned());
        }
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

    /// Ranks to start where no launcher has started them.
    pub(crate) fn ranks_to_start(&self) -> u32 {
        self.ranks.unwrap_or(DEFAULT_RANKS)
    }

    /// The longest any call may take.
    pub(crate) fn time_limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let cases = [
            ("8", 8),
            ("64K", 65_536),
            ("1m", 1 << 20),
            ("2GiB", 2 << 30),
            ("3kb", 3072),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in [
            "",
            "K",
            "-1",
            "1.5M",
            "17G",
            "99999999999999999999",
            "8X",
            "0x10",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
