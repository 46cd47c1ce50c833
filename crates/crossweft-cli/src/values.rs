//! Values on the command line, as people write them.

use std::fs;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use crossweft_collective::{Collective, DataType, Devices, Place, ReduceOp};

/// Devices by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The best there is.
    Auto,
    /// The CPU device.
    Cpu,
    /// NVIDIA GPUs; ranks beyond their number share them.
    Cuda,
}

impl Device {
    /// Finds what was asked for, for `ranks` ranks of this host.
    pub(crate) fn find(self, ranks: u32) -> Result<Devices, String> {
        match self {
            Self::Auto => Ok(Devices::best(ranks)),
            Self::Cpu => Ok(Devices::Cpu),
            Self::Cuda => Devices::cuda()
                .map_err(|error| format!("--device cuda: {error}; or use --device cpu")),
        }
    }
}

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Buffers {
    /// Memory that all ranks can reach.
    Symmetric,
    /// Memory of each rank's own.
    Private,
}

impl Buffers {
    /// The same, for the selector.
    pub(crate) fn place(self, in_place: bool) -> Place {
        match (self, in_place) {
            (Self::Private, _) => Place::Private,
            (Self::Symmetric, false) => Place::Symmetric,
            (Self::Symmetric, true) => Place::OneSymmetric,
        }
    }
}

/// Collectives by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
}

impl Name {
    /// The collective, with this root where it has one.
    pub(crate) fn collective(self, root: u32) -> Collective {
        match self {
            Self::AllReduce => Collective::AllReduce,
            Self::AllGather => Collective::AllGather,
            Self::ReduceScatter => Collective::ReduceScatter,
            Self::AllToAll => Collective::AllToAll,
            Self::Broadcast => Collective::Broadcast { root },
            Self::Reduce => Collective::Reduce { root },
            Self::Gather => Collective::Gather { root },
            Self::Scatter => Collective::Scatter { root },
        }
    }
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

/// The names of all, for messages.
pub(crate) fn names<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str) -> String {
    all.iter()
        .map(|&item| name(item))
        .collect::<Vec<_>>()
        .join(", ")
}

/// The path of a plan, which is there: ranks that open it would each say that it is not.
pub(crate) fn plan_file(path: PathBuf) -> Result<PathBuf, String> {
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => Err("it is a folder".to_owned()),
        Ok(_) => Ok(path),
        Err(error) => Err(error.to_string()),
    }
}

/// An element type.
pub(crate) fn dtype(text: &str) -> Result<DataType, String> {
    DataType::from_common_name(text)
        .ok_or_else(|| format!("the types are {}", names(&DataType::ALL, DataType::name)))
}

/// A reduce operation.
pub(crate) fn op(text: &str) -> Result<ReduceOp, String> {
    ReduceOp::from_name(text).ok_or_else(|| {
        format!(
            "the operations are {}",
            names(&ReduceOp::ALL, ReduceOp::name)
        )
    })
}

/// A reduce operation of a collective, or a sum of what was multiplied first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Operation {
    pub(crate) op: ReduceOp,
    /// What every rank's input is multiplied by.
    pub(crate) scalar: Option<f64>,
}

impl Operation {
    /// A plain sum.
    pub(crate) const SUM: Self = Self {
        op: ReduceOp::Sum,
        scalar: None,
    };

    /// The name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self.scalar {
            None => self.op.name(),
            Some(_) => "premul",
        }
    }
}

/// An operation, or `premul:SCALAR`.
pub(crate) fn operation(text: &str) -> Result<Operation, String> {
    let Some(scalar) = text.strip_prefix("premul:") else {
        let op = op(text).map_err(|all| format!("{all}, premul:SCALAR"))?;
        return Ok(Operation { op, scalar: None });
    };
    match scalar.parse() {
        Ok(scalar) if f64::is_finite(scalar) => Ok(Operation {
            op: ReduceOp::Sum,
            scalar: Some(scalar),
        }),
        _ => Err("give a number, as in premul:0.5".to_owned()),
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

    #[test]
    fn a_sum_may_multiply_first() {
        let found = operation("premul:-0.5").map(|o| (o.op, o.scalar, o.name()));
        assert_eq!(found, Ok((ReduceOp::Sum, Some(-0.5), "premul")));
        let found = operation("max").map(|o| (o.op, o.scalar, o.name()));
        assert_eq!(found, Ok((ReduceOp::Max, None, "max")));
        for text in [
            "premul",
            "premul:",
            "premul:x",
            "premul:inf",
            "premul:nan",
            "add",
        ] {
            assert!(operation(text).is_err(), "{text}");
        }
    }
}
