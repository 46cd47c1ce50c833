//! A kernel of one's own in Rust: two ranks exchange scaled vectors and add them, in one kernel
//! (`kernel.rs`). docs/custom-kernels.md explains it.
//!
//! ```console
//! cargo run --release -p custom-kernel-rust
//! ```
//!
//! runs it on the CPU device, with the ranks as threads of this process: no GPU is needed to write
//! and test a kernel.

mod kernel;

use std::process::ExitCode;
use std::time::Instant;

use crossweft_channel::{ChannelError, Guard, MemoryChannel};
use crossweft_collective::{CollectiveError, Communicator, CommunicatorOptions, run_in_threads};
use crossweft_hal::cpu::{Grid, Interrupted, Schedule};

use kernel::{ExchangeAdd, exchange_add};

/// Numbers of each rank.
const COUNT: usize = 1_000_003;
/// What the peer's numbers are multiplied with.
const FACTOR: f32 = 0.5;
/// Launches, one behind the other.
const ROUNDS: u64 = 10;
/// Thread blocks, each with a channel of its own.
const BLOCKS: u32 = 8;

fn main() -> ExitCode {
    match run_in_threads(2, CommunicatorOptions::default(), run) {
        Ok(wrong) => {
            println!("2 ranks on the CPU device, {ROUNDS} rounds of {COUNT} floats");
            println!("wrong results on each rank: {wrong:?}");
            ExitCode::from(u8::from(wrong != [0, 0]))
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// What one rank does; returns how many results are wrong.
fn run(communicator: &Communicator) -> Result<usize, CollectiveError> {
    let (rank, limit) = (communicator.rank(), communicator.timeout());
    let deadline = Instant::now() + limit;

    // Prepare: everything that allocates or exchanges. What is collective is so marked.
    let endpoint = communicator.endpoint();
    let bytes = (COUNT * size_of::<f32>()) as u64;
    // Collective: memory that the peer writes. Two halves, used in turn: who sends for round `r + 2`
    // has this rank's signal of `r + 1`, given after all of `r` was read.
    let arriving = communicator.allocate(2 * bytes)?.registered();
    // Collective: a channel for each block, all to the peer.
    let peers = vec![1 - rank; BLOCKS as usize];
    let made = MemoryChannel::connect(endpoint, &peers, &arriving, &arriving, deadline)?;
    let channels: Vec<_> = made.iter().map(MemoryChannel::handle).collect();
    let x = communicator.device().allocate(bytes)?;
    let y = communicator.device().allocate(bytes)?;
    x.write(0, &to_bytes(&input(rank)))?;
    let mut grid = Grid::new(BLOCKS, Schedule::RoundRobin)?;

    // Execute: local. It allocates nothing and exchanges nothing.
    for round in 0..ROUNDS {
        let launch = ExchangeAdd {
            x: x.addr(),
            y: y.addr(),
            bytes,
            half: round % 2 * bytes,
            factor: FACTOR,
        };
        let guard = Guard::new(endpoint, limit);
        grid.launch(&endpoint.context(&guard), &|block, index| {
            // SAFETY: the vectors are this rank's own; channels and memory live until the launch
            // has ended; the halves are used in turn.
            unsafe { exchange_add(block, &channels[index as usize], &launch, index, BLOCKS) }
        })
        .map_err(|interrupted| stopped(rank, &guard, &interrupted))?;
    }

    let mut found = vec![0; COUNT * size_of::<f32>()];
    y.read(0, &mut found)?;
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

/// The error of a launch whose wait was ended: it names the rank, the peer and the channel.
fn stopped(rank: u32, guard: &Guard<'_>, interrupted: &Interrupted) -> ChannelError {
    ChannelError::Stopped {
        rank,
        what: Guard::describe(&interrupted.waiting),
        cause: guard.cause(interrupted.stopped, &interrupted.waiting),
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
