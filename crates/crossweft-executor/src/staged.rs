//! Prepared plans on buffers anywhere: messages go through registered memory where they must.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::{ChannelError, Endpoint, RegisteredMemory};
use crossweft_hal::cuda;
use crossweft_plan::{InPlace, Plan};

use crate::ExecutorError;
use crate::launch::RawBuffers;
use crate::prepared::{Buffers, Options, Prepared};

/// When messages go through registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Where the plan asks for it.
    #[default]
    WhereNeeded,
    /// In any case, so that a plan on a GPU takes host buffers too.
    Always,
}

/// A prepared plan that is called on buffers anywhere in the process.
///
/// Where ranks reach into each other's buffers, or the plan only works in place, messages are copied
/// through registered memory. No barrier is needed around that: the checker accepts a plan only if its
/// inputs may be written, and its outputs read, as soon as this rank's part is over.
#[derive(Debug)]
pub struct Staged {
    prepared: Arc<Prepared>,
    staging: Option<Staging>,
    /// Blocks of input and output.
    blocks: (u64, u64),
}

/// Registered memory for the largest message.
#[derive(Debug)]
struct Staging {
    input: Arc<RegisteredMemory>,
    output: Arc<RegisteredMemory>,
    /// Whether both are the same.
    in_place: bool,
}

impl Staging {
    /// Collective.
    fn new(
        endpoint: &Endpoint,
        plan: &Plan,
        max_bytes: u64,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let what = format!("allocating staging memory of plan `{}`", plan.name);
        let allocate = |blocks: u32| {
            // Memory of no bytes cannot be shared.
            let bytes = max_bytes.saturating_mul(blocks.into()).max(1);
            endpoint.allocate_registered(bytes, &what, deadline)
        };
        let in_place = plan.in_place == InPlace::Required;
        let (input, output) = (plan.input_blocks, plan.output_blocks);
        let (input, output) = if in_place {
            let memory = allocate(input.max(output))?;
            (Arc::clone(&memory), memory)
        } else {
            (allocate(input)?, allocate(output)?)
        };
        Ok(Self {
            input,
            output,
            in_place,
        })
    }

    /// Where a message's input and output begin.
    fn offsets(&self, prepared: &Prepared, bytes: u64) -> (u64, u64) {
        if self.in_place {
            prepared.in_place_offsets(bytes)
        } else {
            (0, 0)
        }
    }
}

impl Staged {
    /// Prepares `plan`, as [`Prepared::prepare`] does. Collective; blocks. `options.buffers` does not count.
    ///
    /// # Errors
    /// As for [`Prepared::prepare`].
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        plan: &Plan,
        mut options: Options,
        stage: Stage,
        deadline: Instant,
    ) -> Result<Self, ExecutorError> {
        let is_needed = plan.reaches_into() != (false, false) || plan.in_place == InPlace::Required;
        let staging = if is_needed || stage == Stage::Always {
            let staging = Staging::new(endpoint, plan, options.max_bytes, deadline);
            Some(staging.map_err(|source| ExecutorError::Channel {
                plan: plan.name.clone(),
                source,
            })?)
        } else {
            None
        };
        options.buffers = match &staging {
            None => Buffers::Private,
            Some(Staging { input, output, .. }) => Buffers::Registered {
                input: Arc::clone(input),
                output: Arc::clone(output),
            },
        };
        let prepared = Prepared::prepare(endpoint, plan, options, deadline)?;
        Ok(Self {
            prepared,
            staging,
            blocks: (plan.input_blocks.into(), plan.output_blocks.into()),
        })
    }

    /// The largest message it was prepared for, in bytes.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.prepared.max_bytes()
    }

    /// Whether messages are copied through registered memory.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        self.staging.is_some()
    }

    /// Runs the plan on host buffers of the plan's blocks of one message, on the calling thread. Blocks until
    /// `output` is complete, at most for `limit`.
    ///
    /// # Errors
    /// As for [`Prepared::run`].
    pub fn run(
        &self,
        input: &[u8],
        output: &mut [u8],
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let Some(staging) = &self.staging else {
            return self.prepared.run(input, output, limit);
        };
        let bytes = self
            .prepared
            .message_bytes(input.len() as u64, output.len() as u64)?;
        self.stage(staging, bytes, input)?;
        self.run_staged(staging, bytes, output, limit)
    }

    /// [`run`](Self::run) on one buffer, the larger of input and output; the smaller one is this rank's
    /// block of it.
    ///
    /// # Errors
    /// As for [`Prepared::run`].
    pub fn run_in_place(&self, data: &mut [u8], limit: Duration) -> Result<(), ExecutorError> {
        let Some(staging) = &self.staging else {
            return self.prepared.run_in_place(data, limit);
        };
        let bytes = self.prepared.message_bytes_in_place(data.len() as u64)?;
        let (input, output) = self.ranges(bytes);
        self.stage(staging, bytes, &data[input])?;
        self.run_staged(staging, bytes, &mut data[output], limit)
    }

    /// Launches the plan on device memory, in the order of a CUDA stream, which may be recording a graph;
    /// returns at once. `input` and `output` are addresses; the same one means in place. What goes wrong on
    /// the device shows up in [`check`](Self::check). Waits there end `limit` after the kernel began.
    ///
    /// # Errors
    /// As for [`Prepared::launch_on_cuda`].
    ///
    /// # Safety
    /// Both must be device memory of the plan's blocks of `bytes` bytes, the same or without overlap, which
    /// nobody else uses until the launch has ended; this must be kept as for [`Prepared::launch_on_cuda`]. Launches of one
    /// plan must follow one another.
    pub unsafe fn launch_on_cuda(
        &self,
        stream: &cuda::Stream,
        input: u64,
        output: u64,
        bytes: u64,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let (own_input, own_output) = if input == output {
            self.prepared.in_place_offsets(bytes)
        } else {
            (0, 0)
        };
        let (input, output) = (input + own_input, output + own_output);
        let Some(staging) = &self.staging else {
            let buffers = RawBuffers {
                input,
                output,
                input_offset: 0,
                output_offset: 0,
                bytes,
            };
            // SAFETY: the caller's promise.
            return unsafe { self.prepared.launch_on_cuda(stream, &buffers, limit) };
        };
        let buffers = self.prepared.registered_buffers(0, 0, bytes)?;
        let (from, to) = staging.offsets(&self.prepared, bytes);
        let from = staging.input.local().addr() + from;
        let to = staging.output.local().addr() + to;
        let (input_bytes, output_bytes) = (bytes * self.blocks.0, bytes * self.blocks.1);
        let device = |error| self.prepared.device(error);
        // SAFETY: the caller's promise; the size was checked against what the staging memory has room for,
        // and launches, which follow one another, are all that uses it.
        unsafe {
            stream.copy(from, input, input_bytes).map_err(device)?;
            self.prepared.launch_on_cuda(stream, &buffers, limit)?;
            stream.copy(output, to, output_bytes).map_err(device)
        }
    }

    /// Whether every launch that has ended, ended well. Ask after the stream has come to its end.
    ///
    /// # Errors
    /// As for [`Prepared::check`].
    pub fn check(&self) -> Result<(), ExecutorError> {
        self.prepared.check()
    }

    /// Blocks until launches on [lasting](cuda::Stream::lasting) streams have ended, at most as long as their waits may
    /// take. It does so itself when it is dropped; this is for whoever must not wait there, and must keep it if this fails.
    ///
    /// # Errors
    /// [`ExecutorError::Device`] if they have not ended, or the stream is gone.
    pub fn finish(&self) -> Result<(), ExecutorError> {
        let finished = self.prepared.finish();
        finished.map_err(|error| self.prepared.device(error))
    }

    /// Ends the waits of all launches, as [`Prepared::end_waits`] does.
    pub fn end_waits(&self) {
        self.prepared.end_waits();
    }

    /// Where this rank's input and output lie in the one buffer of a run in place.
    fn ranges(&self, bytes: u64) -> (Range<usize>, Range<usize>) {
        let (input, output) = self.prepared.in_place_offsets(bytes);
        let range = |offset: u64, blocks: u64| offset as usize..(offset + bytes * blocks) as usize;
        (range(input, self.blocks.0), range(output, self.blocks.1))
    }

    /// Copies the input to where peers can reach it.
    fn stage(&self, staging: &Staging, bytes: u64, input: &[u8]) -> Result<(), ExecutorError> {
        // First of all: the staging memory has room for no more.
        self.prepared.check_bytes(bytes)?;
        let (from, _) = staging.offsets(&self.prepared, bytes);
        let written = staging.input.local().write(from, input);
        written.map_err(|error| self.prepared.hal(error))
    }

    fn run_staged(
        &self,
        staging: &Staging,
        bytes: u64,
        output: &mut [u8],
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        self.prepared.run_registered(0, 0, bytes, limit)?;
        let (_, to) = staging.offsets(&self.prepared, bytes);
        let read = staging.output.local().read(to, output);
        read.map_err(|error| self.prepared.hal(error))
    }
}
