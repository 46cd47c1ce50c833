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
use crossweft_hal::cpu::{Arguments, Interrupted, Kernel, KernelError, Stream};

use crate::ExecutorError;
use crate::prepared::Prepared;

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

    /// Launches on registered memory, after its ranges were checked.
    pub(crate) fn launch_registered(
        &self,
        buffers: &RawBuffers,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        self.check_bytes(buffers.bytes)?;
        // SAFETY: the ranges lie in registered memory, which `self` keeps mapped. That nobody else
        // uses them meanwhile is part of what a collective call means; it is only ever accessed by
        // raw copies, so a caller who breaks it gets wrong numbers and nothing worse.
        unsafe { self.launch(buffers, limit) }
    }

    /// # Safety
    /// As for [`launch_on`](Self::launch_on), until this returns.
    unsafe fn launch(&self, buffers: &RawBuffers, limit: Duration) -> Result<(), ExecutorError> {
        // Rank-invariant: every rank was given the same size.
        if buffers.bytes == 0 {
            return Ok(());
        }
        let RawBuffers {
            input,
            output,
            input_offset,
            output_offset,
            bytes,
        } = *buffers;
        let launch = Launch {
            input,
            output,
            input_offset,
            output_offset,
            bytes,
        };
        let guard = Guard::new(&self.endpoint, limit).of_call(&self.call);
        // Launches of one plan follow one another, whichever threads they come from.
        let Some(mut grid) = self.grid.take(limit) else {
            return Err(self.usage(format!("another launch of it still runs after {limit:?}")));
        };
        if self.poisoned.load(Ordering::Relaxed) {
            let (plan, rank) = (self.name.clone(), self.program.rank);
            return Err(ExecutorError::Poisoned { plan, rank });
        }
        self.call.begin(&self.endpoint, bytes);
        let result = grid.launch(&self.endpoint.context(&guard), &|block, index| {
            // SAFETY: the program was prepared for this process, its tables live in `self`, the
            // grid runs each block once and launches follow one another; the caller vouches for
            // the buffers.
            unsafe { run_block(block, &self.reducer, &self.program, &launch, index) }
        });
        // A failed call stays on the board: the peers are still to read it.
        match result {
            Ok(()) => {
                self.call.end(&self.endpoint);
                Ok(())
            }
            Err(interrupted) => {
                self.poisoned.store(true, Ordering::Relaxed);
                Err(self.explain(&interrupted, &guard))
            }
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
