//! Launching on a CUDA device: the kernel of a data type, and the words that it and the host share.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossweft_device::program::{Launch, Program};
use crossweft_device::{DataType, ReduceOp, Site, Stopped, WaitKind, Waiting};
use crossweft_hal::HalError;
use crossweft_hal::cpu::Interrupted;
use crossweft_hal::cuda::{
    Argument, Cache, CompileOptions, Context, CudaError, Kernel, Module, PinnedMemory, Shape,
    Stream,
};
use crossweft_kernels::{GpuContext, MAX_THREADS, MIN_SM, PlanLaunch, plan_entry, plan_module};

/// A plan's kernel, ready to be launched.
#[derive(Debug)]
pub(crate) struct CudaLauncher {
    kernel: Kernel,
    op: ReduceOp,
    /// Threads of a block.
    threads: u32,
    /// Of launches that the caller waits for.
    stream: Stream,
    control: Control,
}

/// Why a plan cannot be launched on a device.
#[derive(Debug)]
pub(crate) enum Unfit {
    Hal(HalError),
    /// Not all blocks of all ranks of the device can be resident at once.
    Residency {
        resident: u32,
    },
}

impl From<CudaError> for Unfit {
    fn from(error: CudaError) -> Self {
        Self::Hal(error.into())
    }
}

impl CudaLauncher {
    /// Loads the kernel and finds out how many threads its blocks can have, so that `blocks` blocks of
    /// each of `sharers` ranks are resident at once: they wait for each other.
    pub(crate) fn new(
        context: &Arc<Context>,
        (dtype, op): (DataType, ReduceOp),
        (blocks, sharers): (u32, u32),
        threads: Option<u32>,
    ) -> Result<Self, Unfit> {
        let device = context.device().properties()?;
        let sm = device.compute.0 * 10 + device.compute.1;
        let incapable = || CudaError::Incapable {
            device: context.ordinal(),
            what: "run plans",
            reason: format!(
                "its compute capability is {sm}, kernels for {dtype} need at least {MIN_SM}"
            ),
        };
        let module = plan_module(dtype, sm).ok_or_else(incapable)?;
        let entry = plan_entry(dtype).ok_or_else(incapable)?;
        let cache = Cache::from_environment();
        // The driver compiles functions for any block size, then finds that they do not fit the
        // kernel's.
        let options = CompileOptions {
            max_registers: Some(REGISTERS / MAX_THREADS / 8 * 8),
            ..CompileOptions::default()
        };
        let loaded = Module::load(context, module.name, module.ptx, &options, &cache)?;
        let kernel = loaded.kernel(entry)?;
        let most = threads.unwrap_or(MAX_THREADS).clamp(32, MAX_THREADS) / 32 * 32;
        let mut fits = 0;
        let mut threads = most;
        loop {
            fits = kernel.max_resident_blocks(threads, 0)?.max(fits);
            if u64::from(fits) >= u64::from(blocks) * u64::from(sharers) {
                break;
            }
            if threads == 32 {
                return Err(Unfit::Residency { resident: fits });
            }
            threads = (threads / 2).max(32) / 32 * 32;
        }
        Ok(Self {
            kernel,
            op,
            threads,
            stream: Stream::new(context)?,
            control: Control::new(context)?,
        })
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// The stream of launches that the caller waits for.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    fn parameter(&self, program: &Program, launch: &Launch, limit: Duration) -> PlanLaunch {
        PlanLaunch {
            program: *program,
            launch: *launch,
            context: GpuContext {
                limit_ns: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).max(1),
                ..self.control.context()
            },
            op: self.op,
            reserved: 0,
        }
    }

    /// Launches in the order of `stream`, which may be recording a graph. Waits on the device end
    /// `limit` after the kernel has begun.
    ///
    /// # Safety
    /// The program was prepared for this device; the buffers must be valid and the program's tables
    /// live until the kernel has ended; launches of a program must follow one another.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        program: &Program,
        launch: &Launch,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let plan = self.parameter(program, launch, limit);
        let shape = Shape::linear(program.block_count, self.threads);
        let nowhere = 0_u64;
        let arguments = [Argument::from(&plan), Argument::from(&nowhere)];
        // SAFETY: these are the kernel's parameters; the rest is the caller's promise.
        unsafe { self.kernel.launch(stream, &shape, &arguments) }
    }

    /// Waits until `stream` is idle. `failed` says whether the job has failed, which ends the
    /// kernel's waits.
    pub(crate) fn wait(
        &self,
        stream: &Stream,
        limit: Duration,
        failed: impl Fn() -> bool,
    ) -> Result<(), CudaError> {
        // The kernel ends itself at its limit; only one that cannot even begin outlasts that.
        let deadline = Instant::now() + limit + BEGIN_LIMIT;
        loop {
            let look_again = Instant::now() + LOOK;
            match stream.synchronize(look_again.min(deadline)) {
                Err(CudaError::Deadline { .. }) if look_again < deadline => {
                    if failed() {
                        self.control.abort();
                    }
                }
                other => return other,
            }
        }
    }

    /// What ended a kernel's wait, if one was ended since the plan was prepared.
    pub(crate) fn interrupted(&self) -> Option<Interrupted> {
        self.control.interrupted()
    }
}

/// Registers of a multiprocessor, on every device that kernels run on.
const REGISTERS: u32 = 1 << 16;
/// How often a host thread that waits for a kernel looks after the job.
const LOOK: Duration = Duration::from_millis(5);
/// How long a kernel may take to begin, behind others on the device.
const BEGIN_LIMIT: Duration = Duration::from_secs(30);

/// Pinned words that host and kernel share: the abort word, and behind it, on a cache line of its own,
/// the status record.
#[derive(Debug)]
struct Control(PinnedMemory);

/// Bytes to the status record.
const RECORD: u64 = 64;

impl Control {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        PinnedMemory::allocate(context, 4096).map(Self)
    }

    fn context(&self) -> GpuContext {
        GpuContext {
            limit_ns: 0,
            abort: self.0.device_address(),
            status: self.0.device_address() + RECORD,
        }
    }

    fn abort(&self) {
        if let Some(word) = self.0.words().first() {
            word.store(1, Ordering::Release);
        }
    }

    fn interrupted(&self) -> Option<Interrupted> {
        let word = |index: usize| {
            let word = self.0.words().get(RECORD as usize / 8 + index);
            word.map_or(0, |word| word.load(Ordering::Acquire))
        };
        let (low, high) = (|w: u64| w as u32, |w: u64| (w >> 32) as u32);
        // In the order of `StatusRecord`: claims, stopped, rank and block, thread, then the wait.
        let stopped = match word(1) {
            0 => return None,
            2 => Stopped::Deadline,
            3 => Stopped::Mismatch,
            _ => Stopped::Aborted,
        };
        let site = Site {
            kind: WaitKind::from_number(low(word(4))),
            peer: high(word(4)),
            channel: low(word(5)),
            op: high(word(5)),
        };
        Some(Interrupted {
            stopped,
            waiting: Waiting {
                site,
                spins: low(word(6)),
                expected: word(7),
                seen: word(8),
            },
            block: high(word(2)),
        })
    }
}
