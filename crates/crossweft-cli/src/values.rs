//! Values on the command line, as people write them.

use std::str::FromStr;

use clap::ValueEnum;
use crossweft_collective::{DataType, ReduceOp};
use crossweft_hal::{self as hal, HalError, cuda};

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

/// The devices that the ranks of this host compute on.
#[derive(Clone, Debug)]
pub(crate) enum Devices {
    /// Each on the host's processors.
    Cpu,
    /// In turn on these.
    Cuda(Vec<cuda::Device>),
}

impl Devices {
    /// Finds what was asked for. `Auto` means GPUs if there is one for each of `ranks` ranks.
    pub(crate) fn find(device: Device, ranks: u32) -> Result<Self, String> {
        if device == Device::Cpu {
            return Ok(Self::Cpu);
        }
        // Ranks of one process have their streams on hardware queues of their own: with fewer queues
        // than ranks, one kernel would wait behind another that waits for it.
        let found = cuda::Driver::open().and_then(|driver| driver.devices());
        match (device, found) {
            (Device::Auto, Ok(devices)) if devices.len() >= ranks as usize => {
                Ok(Self::Cuda(devices))
            }
            (Device::Auto, _) => Ok(Self::Cpu),
            (_, Ok(devices)) if !devices.is_empty() => Ok(Self::Cuda(devices)),
            (_, Ok(_)) => Err("there is no CUDA device; use --device cpu".to_owned()),
            (_, Err(error)) => Err(format!("--device cuda: {error}; or use --device cpu")),
        }
    }

    /// The device of the rank that is the `local`-th of this host.
    pub(crate) fn of(&self, local: u32) -> Result<hal::Device, HalError> {
        match self {
            Self::Cuda(devices) if !devices.is_empty() => {
                let device = &devices[local as usize % devices.len()];
                Ok(hal::Device::Cuda(cuda::Context::retain(device)?))
            }
            _ => Ok(hal::Device::Cpu),
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

/// An element type.
pub(crate) fn dtype(text: &str) -> Result<DataType, String> {
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

/// A reduce operation.
pub(crate) fn op(text: &str) -> Result<ReduceOp, String> {
    ReduceOp::from_name(text).ok_or_else(|| {
        format!(
            "the operations are {}",
            names(&ReduceOp::ALL, ReduceOp::name)
        )
    })
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
