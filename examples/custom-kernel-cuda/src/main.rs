//! A kernel of one's own in CUDA C++: two ranks exchange scaled vectors and add them, in one kernel
//! (`kernel.cu`). docs/custom-kernels.md explains it.
//!
//! ```console
//! nvcc -std=c++17 -arch=compute_80 -ptx -I include examples/custom-kernel-cuda/kernel.cu -o kernel.ptx
//! cargo run --release -p custom-kernel-cuda -- kernel.ptx
//! ```
//!
//! The ranks are threads of this process, each on a GPU of its own, or both on one. Exit codes: 0
//! ok, 1 wrong or failed, 2 no GPU or no PTX.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use std::{env, fs};

use crossweft_channel::{KernelGuard, MemoryChannel};
use crossweft_collective::{CollectiveError, Communicator, CommunicatorOptions, run_in_threads_on};
use crossweft_device::channel;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, Driver, Module, Shape, Stream,
};
use crossweft_hal::{Device, HalError};

/// Numbers of each rank.
const COUNT: usize = 1_000_003;
/// What the peer's numbers are multiplied with.
const FACTOR: f32 = 0.5;
/// Launches, one behind the other.
const ROUNDS: u64 = 10;
/// Thread blocks, each with a channel of its own. As in `kernel.cu`.
const BLOCKS: usize = 8;
/// As in `kernel.cu`.
const THREADS: u32 = 256;

fn main() -> ExitCode {
    let Some(path) = env::args().nth(1) else {
        eprintln!("usage: custom-kernel-cuda KERNEL.ptx (made of kernel.cu by `nvcc -ptx`)");
        return ExitCode::from(2);
    };
    let ptx = match fs::read_to_string(&path) {
        Ok(ptx) => ptx,
        Err(error) => {
            eprintln!("{path}: {error}; it is made of kernel.cu by `nvcc -ptx`");
            return ExitCode::from(2);
        }
    };
    let contexts = match contexts() {
        Ok(contexts) => contexts,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let device = |rank: u32| {
        let context = &contexts[rank as usize % contexts.len()];
        Ok(Device::Cuda(Arc::clone(context)))
    };
    let options = CommunicatorOptions::default();
    match run_in_threads_on(device, 2, options, |communicator| run(communicator, &ptx)) {
        Ok(wrong) => {
            let gpus = contexts.len();
            println!("2 ranks on {gpus} GPU(s), {ROUNDS} rounds of {COUNT} floats");
            println!("wrong results on each rank: {wrong:?}");
            ExitCode::from(u8::from(wrong != [0, 0]))
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The contexts of the first one or two GPUs.
fn contexts() -> Result<Vec<Arc<Context>>, CudaError> {
    let devices = Driver::open()?.devices()?;
    devices.iter().take(2).map(Context::retain).collect()
}

/// What one rank does; returns how many results are wrong.
fn run(communicator: &Communicator, ptx: &str) -> Result<usize, CollectiveError> {
    let Device::Cuda(context) = communicator.device() else {
        unreachable!("every rank was given a GPU");
    };
    let (rank, limit) = (communicator.rank(), communicator.timeout());
    let deadline = Instant::now() + limit;

    // Prepare: everything that allocates, loads or exchanges. What is collective is so marked.
    let endpoint = communicator.endpoint();
    // Collective: memory that the peer writes. Two halves, used in turn: who sends for round `r + 2`
    // has this rank's signal of `r + 1`, given after all of `r` was read.
    let arriving = communicator.allocate(2 * 4 * COUNT as u64)?.registered();
    // Collective: a channel for each block, all to the peer.
    let peers = [1 - rank; BLOCKS];
    let made = MemoryChannel::connect(endpoint, &peers, &arriving, &arriving, deadline)?;
    let mut channels = [channel::MemoryChannel::default(); BLOCKS];
    for (handle, channel) in channels.iter_mut().zip(&made) {
        *handle = channel.handle();
    }
    let options = CompileOptions::default();
    let module = Module::load(context, "kernel.cu", ptx, &options).map_err(hal)?;
    let kernel = module.kernel("exchange_add").map_err(hal)?;
    let stream = Stream::new(context).map_err(hal)?;
    let guard = KernelGuard::new(context).map_err(hal)?;
    let x = communicator.device().allocate(4 * COUNT as u64)?;
    let y = communicator.device().allocate(4 * COUNT as u64)?;
    x.write(0, &bytes(&input(rank)))?;
    // Nobody launches before all are ready: a kernel that waits may keep others from loading.
    communicator.barrier()?;

    // Execute: local, asynchronous, and could be captured in a graph.
    let (x_at, y_at, count) = (x.addr(), y.addr(), COUNT as u64);
    let until = guard.context(limit);
    for round in 0..ROUNDS {
        let half = round % 2 * count;
        let arguments: [Argument<'_>; 8] = [
            (&channels).into(),
            (&until).into(),
            (&rank).into(),
            (&x_at).into(),
            (&y_at).into(),
            (&FACTOR).into(),
            (&count).into(),
            (&half).into(),
        ];
        let shape = Shape::linear(BLOCKS as u32, THREADS);
        // SAFETY: these are the parameters of `exchange_add`; channels and memory are kept until
        // the stream is idle, and nobody else uses them.
        unsafe { kernel.launch(&stream, &shape, &arguments) }.map_err(hal)?;
    }
    // An error here names the rank, the peer, the channel and what was waited for.
    guard.finish(endpoint, &stream, limit)?;

    let mut found = vec![0; 4 * COUNT];
    y.read(0, &mut found)?;
    let (mine, theirs) = (input(rank), input(1 - rank));
    let expected = mine.iter().zip(&theirs).map(|(m, t)| m + FACTOR * t);
    let wrong = expected
        .zip(found.chunks_exact(4))
        .filter(|(expected, found)| expected.to_le_bytes() != **found)
        .count();
    // The peer's kernels have ended as well before anything is unmapped.
    communicator.barrier()?;
    Ok(wrong)
}

fn input(rank: u32) -> Vec<f32> {
    (0..COUNT)
        .map(|i| (i % 1000) as f32 + 0.1 * rank as f32)
        .collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn hal(error: CudaError) -> CollectiveError {
    HalError::from(error).into()
}
