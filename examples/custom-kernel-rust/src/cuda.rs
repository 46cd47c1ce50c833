//! Launching on a GPU: the same function, compiled to PTX as an entry of `kernels/src/bench.rs`.

use std::sync::Arc;

use crossweft_channel::{ImageBuilder, KernelGuard};
use crossweft_collective::CollectiveError;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, Driver, Module, Shape, Stream,
};
use crossweft_hal::{Device, HalError};
use crossweft_kernels::{MIN_SM, bench, bench_module};

use crate::{BLOCKS, ROUNDS, Rank};

/// Threads of a block.
const THREADS: u32 = 256;

/// The first one or two GPUs.
pub(crate) fn devices() -> Result<Vec<Device>, CudaError> {
    let devices = Driver::open()?.devices()?;
    let contexts = devices.iter().take(2).map(Context::retain);
    contexts.map(|context| context.map(Device::Cuda)).collect()
}

pub(crate) fn run(prepared: &Rank<'_>, context: &Arc<Context>) -> Result<(), CollectiveError> {
    let communicator = prepared.communicator;
    let (endpoint, limit) = (communicator.endpoint(), communicator.timeout());
    let (major, minor) = context.device().properties().map_err(hal)?.compute;
    let module = bench_module(major * 10 + minor).ok_or_else(|| CollectiveError::Usage {
        rank: communicator.rank(),
        reason: format!("the GPU's compute capability is below {MIN_SM}"),
    })?;
    let options = CompileOptions {
        max_registers: Some(crossweft_kernels::MAX_REGISTERS),
        ..CompileOptions::default()
    };
    let loaded = Module::load(context, module.name, module.ptx, &options).map_err(hal)?;
    let kernel = loaded.kernel(bench::EXCHANGE_ADD).map_err(hal)?;
    let stream = Stream::new(context).map_err(hal)?;
    let guard = KernelGuard::new(context).map_err(hal)?;
    // The channels' handles, where the device reads them.
    let mut image = ImageBuilder::default();
    let offset = image.put(&prepared.channels);
    let image = image.finish(communicator.device(), "preparing the example")?;
    let channels = image.addr(offset);
    // Nobody launches before all are ready: a kernel that waits may keep others from loading.
    endpoint
        .group()
        .barrier(prepared.deadline)
        .map_err(CollectiveError::from)?;

    // Execute: local, asynchronous, and could be captured in a graph.
    let (rank, until) = (communicator.rank(), guard.context(limit));
    for round in 0..ROUNDS {
        let launch = prepared.launch(round);
        let arguments: [Argument<'_>; 4] = [
            (&channels).into(),
            (&launch).into(),
            (&rank).into(),
            (&until).into(),
        ];
        // SAFETY: these are the kernel's parameters; channels and memory are kept until the stream
        // is idle, and nobody else uses them; the halves are used in turn.
        unsafe { kernel.launch(&stream, &Shape::linear(BLOCKS, THREADS), &arguments) }
            .map_err(hal)?;
    }
    // An error here names the rank, the peer, the channel and what was waited for.
    Ok(guard.finish(endpoint, &stream, limit)?)
}

fn hal(error: CudaError) -> CollectiveError {
    HalError::from(error).into()
}
