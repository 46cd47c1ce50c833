//! A kernel of one's own in Rust: two ranks exchange scaled vectors and add them, in one kernel
//! (`kernel.rs`). docs/custom-kernels.md explains it.
//!
//! ```console
//! cargo run --release -p custom-kernel-rust
//! cargo run --release -p custom-kernel-rust -- cuda
//! ```
//!
//! The first runs it on the CPU device, the second the same function, compiled to PTX, on one or two
//! GPUs. The ranks are threads of this process. Exit codes: 0 ok, 1 wrong or failed, 2 no GPU.

mod cpu;
mod cuda;
mod kernel;

use std::env;
use std::process::ExitCode;
use std::time::Instant;

use crossweft_channel::MemoryChannel;
use crossweft_collective::{CollectiveError, Communicator, CommunicatorOptions, run_in_threads_on};
use crossweft_device::channel;
use crossweft_hal::{Device, Memory};

use kernel::ExchangeAdd;

/// Numbers of each rank.
const COUNT: usize = 1_000_003;
/// Bytes of them.
const BYTES: u64 = (COUNT * size_of::<f32>()) as u64;
/// What the peer's numbers are multiplied with.
const FACTOR: f32 = 0.5;
/// Launches, one behind the other.
const ROUNDS: u64 = 10;
/// Thread blocks, each with a channel of its own.
const BLOCKS: u32 = 8;

fn main() -> ExitCode {
    let devices = match env::args().nth(1).as_deref() {
        None | Some("cpu") => Ok(vec![Device::Cpu]),
        Some("cuda") => cuda::devices(),
        Some(_) => {
            eprintln!("usage: custom-kernel-rust [cpu | cuda]");
            return ExitCode::from(2);
        }
    };
    let devices = match devices {
        Ok(devices) => devices,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let device = |rank: u32| Ok(devices[rank as usize % devices.len()].clone());
    match run_in_threads_on(device, 2, CommunicatorOptions::default(), run) {
        Ok(wrong) => {
            let (count, name) = (devices.len(), devices[0].name());
            println!("2 ranks on {count} {name} device(s), {ROUNDS} rounds of {COUNT} floats");
            println!("wrong results on each rank: {wrong:?}");
            ExitCode::from(u8::from(wrong != [0, 0]))
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// What a rank has prepared.
struct Rank<'a> {
    communicator: &'a Communicator,
    /// One for each block.
    channels: Vec<channel::MemoryChannel>,
    x: Memory,
    y: Memory,
    deadline: Instant,
}

/// What one rank does; returns how many results are wrong.
fn run(communicator: &Communicator) -> Result<usize, CollectiveError> {
    let rank = communicator.rank();
    let deadline = Instant::now() + communicator.timeout();
    // Prepare: everything that allocates, loads or exchanges. What is collective is so marked.
    // Collective: memory that the peer writes. Two halves, used in turn: who sends for round `r + 2`
    // has this rank's signal of `r + 1`, given after all of `r` was read.
    let arriving = communicator.allocate(2 * BYTES)?.registered();
    // Collective: a channel for each block, all to the peer.
    let peers = [1 - rank; BLOCKS as usize];
    let endpoint = communicator.endpoint();
    let made = MemoryChannel::connect(endpoint, &peers, &arriving, &arriving, deadline)?;
    let prepared = Rank {
        communicator,
        channels: made.iter().map(MemoryChannel::handle).collect(),
        x: communicator.device().allocate(BYTES)?,
        y: communicator.device().allocate(BYTES)?,
        deadline,
    };
    prepared.x.write(0, &to_bytes(&input(rank)))?;

    match communicator.device() {
        Device::Cuda(context) => cuda::run(&prepared, context)?,
        _ => cpu::run(&prepared)?,
    }

    let mut found = vec![0; BYTES as usize];
    prepared.y.read(0, &mut found)?;
    let (mine, theirs) = (input(rank), input(1 - rank));
    let expected = mine.iter().zip(&theirs).map(|(m, t)| m + FACTOR * t);
    let wrong = expected
        .zip(found.chunks_exact(size_of::<f32>()))
        .filter(|(expected, found)| expected.to_le_bytes() != **found)
        .count();
    // The peer's launches have ended as well before anything is unmapped.
    communicator.barrier()?;
    Ok(wrong)
}

impl Rank<'_> {
    /// What the blocks of a round's launch are given.
    fn launch(&self, round: u64) -> ExchangeAdd {
        ExchangeAdd {
            x: self.x.addr(),
            y: self.y.addr(),
            bytes: BYTES,
            half: round % 2 * BYTES,
            factor: FACTOR,
        }
    }
}

fn input(rank: u32) -> Vec<f32> {
    (0..COUNT)
        .map(|i| (i % 1000) as f32 + 0.1 * rank as f32)
        .collect()
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}
