//! Handing a prepared plan to the device code: the one place where that is done, and the only
//! `unsafe` of this crate.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossweft_channel::Guard;
use crossweft_device::Site;
use crossweft_device::executor::run_block;
use crossweft_device::program::Launch;
use crossweft_hal::HalError;
use crossweft_hal::cpu::{Arguments, Interrupted, Kernel, KernelError, Stream};
use crossweft_hal::cuda::{self, CudaError};

use crate::ExecutorError;
use crate::cuda::CudaLauncher;
use crate::prepared::{Machine, Prepared};

/// Buffers of a launch, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBuffers {
    /// Address of the input.
    pub input: u64,
    /// Address of the output: the input's, or no overlap with it.
    pub output: u64,
    /// Bytes from the registered base to the input; 0 for private buffers.
    pub input_offset: u64,
    /// Bytes from the registered base to the output; 0 for private buffers.
    pub output_offset: u64,
    /// Bytes of a message: one block of input or output.
    pub bytes: u64,
}

impl RawBuffers {
    pub(crate) fn launch(&self) -> Launch {
        let Self {
            input,
            output,
            input_offset,
            output_offset,
            bytes,
        } = *self;
        Launch {
            input,
            output,
            input_offset,
            output_offset,
            bytes,
        }
    }
}

impl Prepared {
    /// Launches on `stream`. An inline stream runs it now; on a worker stream this returns at once
    /// and errors show up in [`Stream::synchronize`].
    ///
    /// # Errors
    /// [`ExecutorError`] behind the stream's error type, as for [`run`](Self::run).
    ///
    /// # Safety
    /// The buffers must be valid for their blocks of `bytes` bytes, lie where the plan was prepared for, and stay
    /// untouched by others until the launch has ended, which the stream tells.
    pub unsafe fn launch_on(
        self: &Arc<Self>,
        stream: &Stream,
        buffers: &RawBuffers,
        limit: Duration,
    ) -> Result<(), KernelError> {
        self.check_bytes(buffers.bytes)
            .map_err(|e| Arc::new(e) as KernelError)?;
        let RawBuffers {
            input,
            output,
            input_offset,
            output_offset,
            bytes,
        } = *buffers;
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: these are what the kernel takes; the caller vouches for the buffers.
        unsafe {
            stream.launch(
                self,
                &[
                    input,
                    output,
                    input_offset,
                    output_offset,
                    bytes,
                    limit,
                    0,
                    0,
                ],
            )
        }
    }

    /// Launches on buffers that the caller's borrows vouch for.
    pub(crate) fn launch_borrowed(
        &self,
        buffers: &RawBuffers,
        limit: Duration,
        _borrows: (&[u8], &mut [u8]),
    ) -> Result<(), ExecutorError> {
        self.check_bytes(buffers.bytes)?;
        // SAFETY: the borrows last until the launch has ended.
        unsafe { self.launch(buffers, limit) }
    }

    /// Launches on memories whose ranges and sizes were checked.
    pub(crate) fn launch_checked(
        &self,
        buffers: &RawBuffers,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        // SAFETY: the ranges lie in registered memory, which `self` keeps mapped, or in memories that
        // the caller keeps until this returns. That nobody else uses them meanwhile is part of what
        // a collective call means; they are only ever accessed by raw copies, so a caller who breaks
        // it gets wrong numbers and nothing worse.
        unsafe { self.launch(buffers, limit) }
    }

    /// # Safety
    /// As for [`launch_on`](Self::launch_on), until this returns, or, after an error that says so, until the device has come
    /// to its end.
    unsafe fn launch(&self, buffers: &RawBuffers, limit: Duration) -> Result<(), ExecutorError> {
        // Rank-invariant: every rank was given the same size.
        if buffers.bytes == 0 {
            return Ok(());
        }
        let launch = buffers.launch();
        self.in_turn(buffers.bytes, limit, |machine, guard| match machine {
            Machine::Cpu { grid, reducer } => {
                let launch = match &self.pre_multiplier {
                    None => launch,
                    // SAFETY: the caller vouches for the buffers; this has the turn.
                    Some(multiplier) => unsafe { multiplier.multiply(&launch) },
                };
                let context = self.endpoint.context(guard);
                // SAFETY: the program was prepared for this process, its tables live in `self`, the
                // grid runs each block once and launches follow one another; the caller vouches
                // for the buffers.
                let result = grid.launch(&context, &|block, index| unsafe {
                    run_block(block, reducer, &self.program, &launch, index)
                });
                result.map_err(|interrupted| self.explain(&interrupted, guard))
            }
            Machine::Cuda(launcher) => {
                // SAFETY: as above, on the device; this returns when the kernel has ended, or it is kept from what is freed
                // with the plan, and the error tells the caller to keep the buffers.
                self.launch_and_wait(launcher, limit, guard, |stream| unsafe {
                    self.enqueue(launcher, stream, &launch, limit)
                })
            }
        })
    }

    /// Has `body` launch a call of `bytes` bytes and wait for it, when the launches before it have ended.
    pub(crate) fn in_turn(
        &self,
        bytes: u64,
        limit: Duration,
        body: impl FnOnce(&mut Machine, &Guard<'_>) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        let guard = Guard::new(&self.endpoint, limit).of_call(&self.call);
        // Launches of one plan follow one another, whichever threads they come from.
        let Some(mut machine) = self.machine.take(limit) else {
            return Err(self.usage(format!("another launch of it still runs after {limit:?}")));
        };
        self.check_whole()?;
        self.call.begin(&self.endpoint, bytes);
        let result = body(&mut machine, &guard);
        // A failed call stays on the board: the peers are still to read it.
        match result {
            Ok(()) => self.call.end(&self.endpoint),
            Err(_) => self.poisoned.store(true, Ordering::Relaxed),
        }
        result
    }

    /// Whether no launch has failed.
    pub(crate) fn check_whole(&self) -> Result<(), ExecutorError> {
        if self.poisoned.load(Ordering::Relaxed) {
            let (plan, rank) = (self.name.clone(), self.program.rank);
            return Err(ExecutorError::Poisoned { plan, rank });
        }
        Ok(())
    }

    /// Has `enqueue` launch on a stream, and waits for that.
    pub(crate) fn launch_and_wait(
        &self,
        launcher: &CudaLauncher,
        limit: Duration,
        guard: &Guard<'_>,
        enqueue: impl FnOnce(&cuda::Stream) -> Result<(), CudaError>,
    ) -> Result<(), ExecutorError> {
        let stream = launcher.stream().map_err(|error| self.device(error))?;
        let failed = || {
            self.endpoint.group().liveness().stopped()
                || guard.finds_other_size()
                || guard.is_interrupted()
        };
        let ended = enqueue(&stream).and_then(|()| launcher.wait(&stream, limit, failed));
        if let Err(error) = ended {
            launcher.give_up(stream, limit);
            return Err(self.device(error));
        }
        match launcher.interrupted() {
            None => Ok(()),
            Some(interrupted) => Err(self.explain(&interrupted, guard)),
        }
    }

    /// Launches in the order of `stream`, which may be recording a graph.
    ///
    /// # Safety
    /// As for [`CudaLauncher::launch`].
    pub(crate) unsafe fn enqueue(
        &self,
        launcher: &CudaLauncher,
        stream: &cuda::Stream,
        launch: &Launch,
        limit: Duration,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            let launch = self.multiplied(stream, launch)?;
            launcher.launch(stream, &self.program, &launch, limit)
        }
    }

    /// The launch that is left when the input has been multiplied, on `stream`.
    ///
    /// # Safety
    /// As for [`CudaLauncher::launch`].
    pub(crate) unsafe fn multiplied(
        &self,
        stream: &cuda::Stream,
        launch: &Launch,
    ) -> Result<Launch, CudaError> {
        match &self.pre_multiplier {
            None => Ok(*launch),
            // SAFETY: the caller's promise.
            Some(multiplier) => unsafe { multiplier.multiply_on(stream, launch) },
        }
    }

    pub(crate) fn device(&self, error: CudaError) -> ExecutorError {
        self.hal(error.into())
    }

    pub(crate) fn hal(&self, source: HalError) -> ExecutorError {
        ExecutorError::Device {
            plan: self.name.clone(),
            rank: self.program.rank,
            source,
        }
    }

    /// Launches on a CUDA stream, which may be recording a graph; returns at once. What goes wrong on
    /// the device shows up in [`check`](Self::check). Waits there end `limit` after the kernel began.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if the size does not fit or the plan is not on a CUDA device;
    /// [`ExecutorError::Interrupted`] if an earlier launch is known to have ended badly; [`ExecutorError::Poisoned`],
    /// [`ExecutorError::Device`].
    ///
    /// # Safety
    /// As for [`launch_on`](Self::launch_on); this must be kept until the launch, and any graph that
    /// it was recorded into, is done with, but for a launch on a [lasting](cuda::Stream::lasting) stream: for that it waits
    /// itself when it is dropped. Launches of one plan must follow one another.
    pub unsafe fn launch_on_cuda(
        &self,
        stream: &cuda::Stream,
        buffers: &RawBuffers,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        self.check_bytes(buffers.bytes)?;
        if buffers.bytes == 0 {
            return Ok(());
        }
        let launch = buffers.launch();
        // SAFETY: the caller's promise.
        self.with_cuda(stream, limit, |launcher| unsafe {
            self.enqueue(launcher, stream, &launch, limit)
        })
    }

    /// Has `body` launch something on `stream`, which does not wait for it.
    pub(crate) fn with_cuda<T>(
        &self,
        stream: &cuda::Stream,
        limit: Duration,
        body: impl FnOnce(&CudaLauncher) -> Result<T, CudaError>,
    ) -> Result<T, ExecutorError> {
        self.check_whole()?;
        let Some(machine) = self.machine.take(limit) else {
            return Err(self.usage(format!("another launch of it still runs after {limit:?}")));
        };
        let Machine::Cuda(launcher) = &*machine else {
            return Err(self.usage("it was prepared for the CPU device".to_owned()));
        };
        // Of an earlier launch, which nobody may have asked about.
        self.check_launched(launcher)?;
        // First, for something may be under way also if not all could be launched.
        let noted = launcher.note(stream, limit);
        noted
            .and_then(|()| body(launcher))
            .map_err(|error| self.device(error))
    }

    /// Blocks until what nobody else may wait for has ended.
    pub(crate) fn finish(&self) -> Result<(), CudaError> {
        let failed = || self.endpoint.group().liveness().stopped();
        let finished = match self.machine.take(Duration::from_secs(1)).as_deref() {
            Some(Machine::Cuda(launcher)) => launcher.finish(failed),
            _ => Ok(()),
        };
        if let Err(error) = &finished {
            tracing::warn!(
                %error, plan = self.name, rank = self.program.rank,
                "a plan goes while a launch of it may still run, so its memory is not given back"
            );
        }
        finished
    }

    /// Whether every launch that has ended, ended well; does not block. Ask after the stream has
    /// come to its end.
    ///
    /// # Errors
    /// [`ExecutorError::Interrupted`] with the first wait that was ended on the device.
    pub fn check(&self) -> Result<(), ExecutorError> {
        let Some(machine) = self.machine.take(Duration::from_secs(1)) else {
            return Ok(());
        };
        match &*machine {
            Machine::Cuda(launcher) => self.check_launched(launcher),
            Machine::Cpu { .. } => self.check_whole(),
        }
    }

    fn check_launched(&self, launcher: &CudaLauncher) -> Result<(), ExecutorError> {
        match launcher.interrupted() {
            None => Ok(()),
            Some(interrupted) => {
                self.poisoned.store(true, Ordering::Relaxed);
                let guard = Guard::new(&self.endpoint, Duration::ZERO).of_call(&self.call);
                Err(self.explain(&interrupted, &guard))
            }
        }
    }

    /// Threads of a block where that is a number to choose: on a GPU.
    #[must_use]
    pub fn threads(&self) -> Option<u32> {
        match &*self.machine.take(Duration::from_secs(1))? {
            Machine::Cuda(launcher) => Some(launcher.threads()),
            Machine::Cpu { .. } => None,
        }
    }

    fn explain(&self, interrupted: &Interrupted, guard: &Guard<'_>) -> ExecutorError {
        let Interrupted {
            stopped,
            waiting,
            block,
        } = *interrupted;
        let op = waiting.site.op;
        let name = self
            .op_names
            .get(block as usize)
            // Kernels of their own may have more blocks than the plan, all alike.
            .or(self.op_names.first())
            .and_then(|ops| ops.get(op as usize));
        let op = match name {
            Some(name) if op != Site::NO_OP => format!("{op} ({name})"),
            _ => "outside of any".to_owned(),
        };
        ExecutorError::Interrupted {
            plan: self.name.clone(),
            rank: self.program.rank,
            block,
            op,
            waited_for: Guard::describe(&waiting),
            cause: Box::new(guard.cause(stopped, &waiting)),
        }
    }
}

impl Kernel for Prepared {
    unsafe fn launch(&self, arguments: &Arguments) -> Result<(), KernelError> {
        let [input, output, input_offset, output_offset, bytes, limit, ..] = *arguments;
        let buffers = RawBuffers {
            input,
            output,
            input_offset,
            output_offset,
            bytes,
        };
        // SAFETY: the caller's promise, which `launch_on` passes on from its own.
        unsafe { self.launch(&buffers, Duration::from_nanos(limit)) }
            .map_err(|error| Arc::new(error) as KernelError)
    }
}
