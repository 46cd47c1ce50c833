//! Launching on a CUDA device: the kernel of a data type.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::KernelGuard;
use crossweft_device::extent::chunk_bytes;
use crossweft_device::program::{Launch, Program};
use crossweft_device::{DataType, ReduceOp};
use crossweft_hal::cpu::Interrupted;
use crossweft_hal::cuda::{Argument, Context, CudaError, Event, GraphExec, Kernel, Shape, Stream};
use crossweft_hal::{Device, HalError, Memory};
use crossweft_kernels::{MAX_OPERANDS, MAX_THREADS, OneShot, PlanLaunch};
use crossweft_net::LONGEST_TIMEOUT;

use crate::ExecutorError;
use crate::fused::{Fused, Parameter};
use crate::kernels::PlanKernels;
use crate::launch::RawBuffers;
use crate::prepared::{Machine, Prepared};

/// A plan's kernel, ready to be launched.
#[derive(Debug)]
pub(crate) struct CudaLauncher {
    kernel: Kernel,
    /// What runs the plan in one piece, if it is such a plan.
    fused: Option<InOnePiece>,
    op: ReduceOp,
    /// Threads of a block.
    threads: u32,
    guard: Arc<KernelGuard>,
    /// What nobody else may wait for. Launches follow one another, so with the last all have ended.
    last: Mutex<Option<Last>>,
}

/// Where the last launch was put whose end the caller need not wait for, or that did not end in time.
#[derive(Debug)]
struct Last {
    stream: Stream,
    /// The stream's number, if the driver can tell.
    id: Option<u64>,
    /// How long the kernel's waits may take.
    limit: Duration,
}

/// How a plan is run in one piece.
#[derive(Debug)]
struct InOnePiece {
    fused: Fused,
    kernel: Kernel,
    /// Threads of a block, at most.
    threads: u32,
    /// Whether launches begin while what is ahead of them ends.
    is_early: bool,
}

/// Why a plan cannot be launched on a device.
#[derive(Debug)]
pub(crate) enum Unfit {
    Hal(HalError),
    /// Not all blocks of all ranks of the device can be resident at once.
    Residency {
        resident: u32,
    },
    /// An operation has more operands than a kernel has room for.
    Operands {
        most: u32,
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
        operands: usize,
        threads: Option<u32>,
        fused: Option<Fused>,
    ) -> Result<Self, Unfit> {
        if operands > MAX_OPERANDS as usize {
            return Err(Unfit::Operands { most: MAX_OPERANDS });
        }
        let kernels = PlanKernels::new(context, dtype)?;
        let kernel = kernels.executor().load(context)?;
        let most = threads.unwrap_or(MAX_THREADS).clamp(32, MAX_THREADS) / 32 * 32;
        let needed = u64::from(blocks) * u64::from(sharers);
        let threads = resident_threads(&kernel, most, needed)?;
        let fused = match fused {
            None => None,
            Some(fused) => {
                let entry = kernels.fused(fused.form());
                let kernel = entry.load(context)?;
                let threads = resident_threads(&kernel, most, needed)?;
                Some(InOnePiece {
                    fused,
                    kernel,
                    threads,
                    // A launch that has begun early takes room that other ranks of the device may wait for.
                    is_early: sharers == 1 && entry.may_begin_early(),
                })
            }
        };
        Ok(Self {
            kernel,
            fused,
            op,
            threads,
            guard: Arc::new(KernelGuard::new(context)?),
            last: Mutex::new(None),
        })
    }

    /// What ends its launches' waits.
    pub(crate) fn guard(&self) -> Arc<KernelGuard> {
        Arc::clone(&self.guard)
    }

    /// Whether it sends lines, which the executor does not.
    fn sends_lines(&self) -> bool {
        let fused = self.fused.as_ref();
        fused.is_some_and(|piece| piece.fused.sends_lines())
    }

    /// What its launch in one piece would have for a parameter, if it is a one-shot plan that sends packets, and the
    /// buffers are aligned.
    pub(crate) fn one_shot(
        &self,
        program: &Program,
        launch: &Launch,
        limit: Duration,
    ) -> Option<OneShot> {
        let InOnePiece { fused, .. } = self.fused.as_ref()?;
        let context = self.guard.context(limit);
        match fused.launch(program, launch, context, self.op)? {
            Parameter::OneShot(parameter) if !fused.sends_lines() => Some(parameter),
            _ => None,
        }
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        self.threads
    }

    /// A stream for a launch that the caller waits for. Borrowed from the context for that time: a stream of
    /// each plan's own would soon be more than the device has queues, and ranks that share the device would
    /// wait behind each other.
    pub(crate) fn stream(&self) -> Result<Stream, CudaError> {
        Stream::new(self.kernel.context())
    }

    fn parameter(&self, program: &Program, launch: &Launch, limit: Duration) -> PlanLaunch {
        PlanLaunch {
            program: *program,
            launch: *launch,
            chunk: chunk_bytes(launch.bytes, program.chunks),
            context: self.guard.context(limit),
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
        if let Some(piece) = &self.fused {
            let InOnePiece { fused, kernel, .. } = piece;
            let context = self.guard.context(limit);
            if let Some(parameter) = fused.launch(program, launch, context, self.op) {
                let threads = fused.threads(&parameter);
                let threads = threads.next_multiple_of(32).clamp(32, piece.threads.into()) as u32;
                let shape = Shape::linear(program.block_count, threads);
                let parameter = match &parameter {
                    Parameter::OneShot(parameter) => Argument::from(parameter),
                    Parameter::OneShotScatter(parameter) => Argument::from(parameter),
                    Parameter::TwoShot(parameter) => Argument::from(parameter),
                    Parameter::Hop(parameter) => Argument::from(parameter),
                };
                // SAFETY: this is the kernel's parameter; the rest is the caller's promise.
                return unsafe {
                    match piece.is_early {
                        true => kernel.launch_early(stream, &shape, &[parameter]),
                        false => kernel.launch(stream, &shape, &[parameter]),
                    }
                };
            }
        }
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
        self.guard.wait(stream, limit, failed)
    }

    /// Notes that something is about to be launched on `stream`, if that is there for long enough to come back to it.
    pub(crate) fn note(&self, stream: &Stream, limit: Duration) -> Result<(), CudaError> {
        // What is recorded runs when its graph does, on whatever stream.
        if let Some(stream) = stream.again()
            && !stream.is_capturing()?
        {
            let id = stream.id()?;
            self.keep(Last { stream, id, limit });
        }
        Ok(())
    }

    fn keep(&self, last: Last) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    /// Keeps a stream on which something did not end in time.
    pub(crate) fn give_up(&self, stream: Stream, limit: Duration) {
        let id = None;
        self.keep(Last { stream, id, limit });
    }

    /// Blocks until what was noted has ended, and no longer than it can take; `failed` as in [`wait`](Self::wait).
    pub(crate) fn finish(&self, failed: impl Fn() -> bool) -> Result<(), CudaError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Last { stream, id, limit }) = &*last else {
            return Ok(());
        };
        let context = stream.context();
        let wait = || {
            // Its handle may be another's by now, and every thread's own default stream has the same.
            if id.is_some() && stream.id()? != *id {
                return Err(CudaError::Incapable {
                    device: context.ordinal(),
                    what: "wait for a launch",
                    reason:
                        "its stream is gone; keep streams for longer than what launches on them"
                            .to_owned(),
                });
            }
            self.wait(stream, *limit, failed)
        };
        ended(context, wait)?;
        *last = None;
        Ok(())
    }

    /// What ended a kernel's wait, if one was ended since the plan was prepared.
    pub(crate) fn interrupted(&self) -> Option<Interrupted> {
        self.guard.interrupted()
    }
}

/// Waits for launches whose memory is to be freed, also while somebody captures, which they have nothing to do with.
pub(crate) fn ended(
    context: &Context,
    wait: impl FnOnce() -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    match context.driver().aside_from_captures(wait).flatten() {
        // Of a lost context nothing runs any more.
        Err(CudaError::ContextLost { .. }) => Ok(()),
        waited => waited,
    }
}

/// How many threads, at most `most`, the blocks of `kernel` can have so that `needed` blocks are resident at
/// once.
fn resident_threads(kernel: &Kernel, most: u32, needed: u64) -> Result<u32, Unfit> {
    Kernel::resident_threads(&[kernel], most, needed)?
        .map_err(|resident| Unfit::Residency { resident })
}

/// Calls in a CUDA graph: one that lines the ranks up, and then those that are timed, one behind another.
///
/// It has no stream between replays: ranks that share a device would soon have more than there are hardware queues, and
/// wait behind each other.
#[derive(Debug)]
pub(crate) struct Replays {
    context: Arc<Context>,
    graph: GraphExec,
    start: Event,
    end: Event,
    calls: u32,
}

impl Replays {
    /// Of what `enqueue` launches on a stream, given a call's number; the one with number 0 is also the one that comes
    /// before.
    pub(crate) fn record<E: From<CudaError>>(
        context: &Arc<Context>,
        (calls, limit): (u32, Duration),
        enqueue: impl Fn(&Stream, u32) -> Result<(), E>,
    ) -> Result<Self, E> {
        let stream = Stream::new(context)?;
        let (start, end) = (Event::with_timing(context)?, Event::with_timing(context)?);
        let capture = stream.begin_capture()?;
        enqueue(&stream, 0)?;
        start.record_in_graph(&stream)?;
        for call in 0..calls {
            enqueue(&stream, call)?;
        }
        end.record_in_graph(&stream)?;
        let graph = capture.end()?.instantiate()?;
        graph.upload(&stream)?;
        stream.synchronize(Instant::now() + limit.min(LONGEST_TIMEOUT))?;
        Ok(Self {
            context: Arc::clone(context),
            graph,
            start,
            end,
            calls,
        })
    }

    /// Starts a replay, on the stream that it returns.
    ///
    /// # Safety
    /// What was recorded must be kept until the stream has come to its end.
    pub(crate) unsafe fn start(&self) -> Result<Stream, CudaError> {
        let stream = Stream::new(&self.context)?;
        // SAFETY: the caller's promise.
        unsafe { self.graph.launch(&stream)? };
        Ok(stream)
    }

    /// Starts one more, on the same stream.
    ///
    /// # Safety
    /// As for [`start`](Self::start).
    unsafe fn again(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.graph.launch(stream) }
    }

    /// How long a replay may take, where each launch of a call has `limit`.
    pub(crate) fn limit(&self, limit: Duration, launches: u32) -> Duration {
        limit.saturating_mul((self.calls + 1).saturating_mul(launches))
    }

    /// The device's time for one of the calls, when the replay has ended.
    pub(crate) fn time(&self) -> Result<Duration, CudaError> {
        Ok(self.end.since(&self.start)? / self.calls.max(1))
    }
}

/// Calls of a prepared plan, recorded into a CUDA graph; for measuring, and for whatever runs the same
/// calls again and again. Keeps the plan, and the memory that the calls work on.
#[derive(Debug)]
pub struct Recorded {
    plan: Arc<Prepared>,
    replays: Replays,
    /// Launches of a call.
    launches: u32,
    /// How long each may take.
    limit: Duration,
    /// Private memory, kept for the launches.
    memory: Option<[Arc<Memory>; 2]>,
}

/// A replay that has been started. To drop it is to wait for its end: it uses what is freed next.
#[derive(Debug)]
pub struct Replay<'a> {
    recorded: &'a Recorded,
    /// None when it has been waited for.
    stream: Option<Stream>,
}

impl Prepared {
    /// Records `calls` calls on messages of `bytes` bytes in registered memory, as
    /// [`run_registered`](Self::run_registered) makes them, each as one launch for every `piece` bytes. `places` has
    /// where input and output begin in their memories; if there are several, calls take them in turn. Local.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] as for [`run_registered`](Self::run_registered), if the plan is not on
    /// a CUDA device, or if there are no places; [`ExecutorError::Device`].
    pub fn record_registered(
        self: &Arc<Self>,
        places: &[(u64, u64)],
        (bytes, piece): (u64, u64),
        calls: u32,
        limit: Duration,
    ) -> Result<Recorded, ExecutorError> {
        let locate = |from, to, part| self.registered_buffers(from, to, part);
        self.record(places, (bytes, piece), locate, (calls, limit), None)
    }

    /// As [`record_registered`](Self::record_registered), in private memory of this rank's device, as
    /// [`run_at`](Self::run_at) makes calls there; input and output may be in the same memory.
    ///
    /// # Errors
    /// As there.
    pub fn record_at(
        self: &Arc<Self>,
        (input, output): (&Arc<Memory>, &Arc<Memory>),
        places: &[(u64, u64)],
        (bytes, piece): (u64, u64),
        calls: u32,
        limit: Duration,
    ) -> Result<Recorded, ExecutorError> {
        let memory = Some([Arc::clone(input), Arc::clone(output)]);
        let locate = |from, to, part| self.private_buffers((input, from), (output, to), part);
        self.record(places, (bytes, piece), locate, (calls, limit), memory)
    }

    fn record(
        self: &Arc<Self>,
        places: &[(u64, u64)],
        (bytes, piece): (u64, u64),
        locate: impl Fn(u64, u64, u64) -> Result<RawBuffers, ExecutorError>,
        (calls, limit): (u32, Duration),
        memory: Option<[Arc<Memory>; 2]>,
    ) -> Result<Recorded, ExecutorError> {
        let Device::Cuda(context) = self.endpoint.device() else {
            return Err(self.usage("only plans on CUDA devices can be recorded".to_owned()));
        };
        let launches = |&(from, to): &(u64, u64)| -> Result<Vec<RawBuffers>, ExecutorError> {
            let starts = (0..bytes.max(1)).step_by(piece.max(1) as usize);
            let part = |at: u64| locate(from + at, to + at, (bytes - at).min(piece.max(1)));
            starts.map(part).collect()
        };
        let turns: Vec<_> = places.iter().map(launches).collect::<Result<_, _>>()?;
        let Some(first) = turns.first() else {
            return Err(self.usage("there is no place to record calls for".to_owned()));
        };
        let replays = Replays::record(context, (calls, limit), |stream, call| {
            turns[call as usize % turns.len()]
                .iter()
                .try_for_each(|buffers| {
                    self.with_launcher(|launcher| {
                        // SAFETY: as in `launch_checked`; the program's tables and the buffers live as long as
                        // `Recorded`, which keeps the plan and private memory.
                        unsafe { self.enqueue(launcher, stream, &buffers.launch(), limit) }
                    })
                })
        });
        Ok(Recorded {
            plan: Arc::clone(self),
            replays: replays.map_err(|error: CudaError| self.device(error))?,
            launches: first.len() as u32,
            limit,
            memory,
        })
    }

    /// The launcher, of a plan on a CUDA device.
    pub(crate) fn with_launcher<T>(
        &self,
        body: impl FnOnce(&CudaLauncher) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        match self.machine.take(TURN_LIMIT).as_deref() {
            Some(Machine::Cuda(launcher)) => body(launcher),
            _ => Err(CudaError::Capturing {
                what: "launching a plan that runs or is not on a CUDA device",
            }),
        }
    }
}

/// How long a launch waits for its turn.
const TURN_LIMIT: Duration = Duration::from_secs(1);

impl Recorded {
    /// Starts a replay: one call that lines the ranks up, then those that are timed. Returns at once.
    ///
    /// # Errors
    /// [`ExecutorError::Poisoned`], [`ExecutorError::Device`].
    pub fn start(&self) -> Result<Replay<'_>, ExecutorError> {
        self.plan.check_whole()?;
        let started = self.plan.with_launcher(|_| {
            // SAFETY: the buffers lie in registered memory, which the plan keeps mapped, as it does
            // its tables, or in private memory, which this keeps; launches follow one another.
            unsafe { self.replays.start() }
        });
        Ok(Replay {
            recorded: self,
            stream: Some(started.map_err(|error| self.plan.device(error))?),
        })
    }
}

impl Replay<'_> {
    /// Starts one more behind it. [`finish`](Self::finish) waits for all, and tells the time of the last.
    ///
    /// # Errors
    /// As for [`Recorded::start`].
    pub fn again(&mut self) -> Result<(), ExecutorError> {
        let Recorded { plan, replays, .. } = self.recorded;
        plan.check_whole()?;
        let Some(stream) = &self.stream else {
            return Err(plan.usage("the replay has ended".to_owned()));
        };
        // SAFETY: as in `Recorded::start`.
        let started = plan.with_launcher(|_| unsafe { replays.again(stream) });
        started.map_err(|error| plan.device(error))
    }

    /// Waits for the replay to end, `limit` for each launch; returns the device's time for one of its calls.
    ///
    /// # Errors
    /// [`ExecutorError::Interrupted`] if a wait on the device was ended; [`ExecutorError::Device`].
    pub fn finish(mut self, limit: Duration) -> Result<Duration, ExecutorError> {
        self.end(limit)?;
        let Recorded { plan, replays, .. } = self.recorded;
        plan.check()?;
        replays.time().map_err(|error| plan.device(error))
    }

    fn end(&mut self, limit: Duration) -> Result<(), ExecutorError> {
        let Some(stream) = self.stream.take() else {
            return Ok(());
        };
        let Recorded {
            plan,
            replays,
            launches,
            memory,
            ..
        } = self.recorded;
        let ended = plan.wait_for(stream, replays.limit(limit, *launches));
        // The plan keeps its own.
        ended.inspect_err(|_| std::mem::forget(memory.clone()))
    }
}

impl Drop for Replay<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end(self.recorded.limit) {
            tracing::warn!(%error, "a replay was dropped that does not end");
        }
    }
}

impl Prepared {
    /// Waits until a stream with launches of this plan among others has come to its end; one that does not is kept for when the
    /// plan is dropped.
    pub(crate) fn wait_for(&self, stream: Stream, limit: Duration) -> Result<(), ExecutorError> {
        let failed = || self.endpoint.group().liveness().stopped();
        let waited = self.with_launcher(|launcher| {
            let waited = launcher.wait(&stream, limit, failed);
            if waited.is_err() {
                launcher.give_up(stream, limit);
            }
            waited
        });
        waited.map_err(|error| self.device(error))
    }
}

/// The launches of several virtual ranks of one device as one cooperative grid: all blocks are resident
/// at once, whatever queues the device has. What sanitizers and profilers, which run one kernel at a
/// time, need.
#[derive(Debug)]
pub struct Together {
    plans: Vec<Arc<Prepared>>,
    /// The parameters, one behind another.
    parameters: Memory,
    stream: Stream,
}

impl Together {
    /// Of the same plan, prepared by every rank. Local.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if the plans are not all of one CUDA device, or there is none;
    /// [`ExecutorError::Device`].
    pub fn new(plans: Vec<Arc<Prepared>>) -> Result<Self, ExecutorError> {
        let Some(first) = plans.first() else {
            return Err(ExecutorError::Usage {
                plan: String::new(),
                rank: 0,
                reason: "there are no ranks to launch together".to_owned(),
            });
        };
        let Device::Cuda(context) = first.endpoint.device() else {
            return Err(first.usage("only plans on CUDA devices can be launched together".into()));
        };
        let same = |plan: &Arc<Prepared>| match plan.endpoint.device() {
            Device::Cuda(other) => other.ordinal() == context.ordinal(),
            _ => false,
        };
        if !plans.iter().all(same) {
            return Err(first.usage("the ranks to launch together are on several devices".into()));
        }
        let bytes = (plans.len() * size_of::<PlanLaunch>()) as u64;
        let hal = |source: HalError| ExecutorError::Device {
            plan: first.name().to_owned(),
            rank: first.program.rank,
            source,
        };
        let parameters = first.endpoint.device().allocate(bytes).map_err(hal)?;
        let stream = Stream::new(context).map_err(|e| hal(e.into()))?;
        Ok(Self {
            plans,
            parameters,
            stream,
        })
    }

    /// One call of every rank, on messages in registered memory as
    /// [`Prepared::run_registered`] takes them. Blocks until all have ended.
    ///
    /// # Errors
    /// As for [`Prepared::run_registered`]; of the first rank that failed.
    pub fn run_registered(
        &self,
        input_offset: u64,
        output_offset: u64,
        bytes: u64,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let mut image = Vec::new();
        let (mut blocks, mut threads) = (0, MAX_THREADS);
        for plan in &self.plans {
            plan.check_whole()?;
            let sends_lines = plan.with_launcher(|launcher| Ok(launcher.sends_lines()));
            if sends_lines.map_err(|error| plan.device(error))? {
                return Err(
                    plan.usage("one grid runs the executor: prepare without `fused`".into())
                );
            }
            let buffers = plan.registered_buffers(input_offset, output_offset, bytes)?;
            let parameter = plan.with_launcher(|launcher| {
                threads = threads.min(launcher.threads);
                // SAFETY: the buffers lie in registered memory, which the plan keeps mapped; this waits for the
                // stream's end.
                let launch = unsafe { plan.multiplied(&self.stream, &buffers.launch())? };
                Ok(launcher.parameter(&plan.program, &launch, limit))
            });
            image.push(parameter.map_err(|error| plan.device(error))?);
            blocks = blocks.max(plan.program.block_count);
        }
        let Some(first) = self.plans.first() else {
            return Ok(());
        };
        let size = size_of_val(image.as_slice());
        // SAFETY: `PlanLaunch` is `repr(C)`; its padding, if any, is copied and never looked at.
        let words = unsafe { std::slice::from_raw_parts(image.as_ptr().cast::<u8>(), size) };
        let hal = |source: HalError| ExecutorError::Device {
            plan: first.name().to_owned(),
            rank: first.program.rank,
            source,
        };
        self.parameters.write(0, words).map_err(hal)?;
        let shape = Shape {
            grid: [blocks, self.plans.len() as u32, 1],
            ..Shape::linear(blocks, threads)
        };
        let address = self.parameters.addr();
        let launched = first.with_launcher(|launcher| {
            let arguments = [Argument::from(&image[0]), Argument::from(&address)];
            // SAFETY: these are the kernel's parameters; the plans were prepared for this device, their
            // tables and buffers live in them, and this waits for the kernel.
            unsafe {
                launcher
                    .kernel
                    .launch_cooperative(&self.stream, &shape, &arguments)?;
            }
            launcher.wait(&self.stream, limit, || false)
        });
        launched.map_err(|error| first.device(error))?;
        self.plans.iter().try_for_each(|plan| plan.check())
    }
}
