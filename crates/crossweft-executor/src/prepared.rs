//! Preparing plans, and the safe ways to launch them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crossweft_channel::{ChannelError, Endpoint, RegisteredMemory, SemaphorePool};
use crossweft_device::program::Program;
use crossweft_device::reduce::HostReducer;
use crossweft_device::{DataType, ReduceOp};
use crossweft_hal::HalError;
use crossweft_hal::cpu::{Grid, Schedule, SharedMemory};
use crossweft_plan::Plan;

use crate::ExecutorError;
use crate::launch::RawBuffers;
use crate::tables::{Memories, Tables};

/// Where the caller's buffers will be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Buffers {
    /// Anywhere in this process; the plan must not reach into peers' buffers.
    Private,
    /// In registered memory; input and output may be the same memory.
    Registered {
        /// Memory that inputs lie in.
        input: Arc<RegisteredMemory>,
        /// Memory that outputs lie in.
        output: Arc<RegisteredMemory>,
    },
}

/// What a plan is prepared for. Ranks must agree on all of it but the schedule.
#[derive(Clone, Debug)]
pub struct Options {
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation.
    pub op: ReduceOp,
    /// Largest message in bytes.
    pub max_bytes: u64,
    /// Where the buffers will be.
    pub buffers: Buffers,
    /// The order in which thread blocks run.
    pub schedule: Schedule,
    /// The first epoch, at least 1. Anything but 1 is for tests of what happens near a wrap.
    pub first_epoch: u64,
}

impl Options {
    /// Private buffers, the usual schedule.
    #[must_use]
    pub fn new(dtype: DataType, op: ReduceOp, max_bytes: u64) -> Self {
        let (buffers, schedule) = (Buffers::Private, Schedule::default());
        Self {
            dtype,
            op,
            max_bytes,
            buffers,
            schedule,
            first_epoch: 1,
        }
    }
}

/// A plan that is ready to be launched by this rank.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) name: String,
    pub(crate) op_names: Vec<Vec<&'static str>>,
    pub(crate) reducer: HostReducer,
    pub(crate) program: Program,
    pub(crate) grid: Mutex<Grid>,
    pub(crate) poisoned: AtomicBool,
    options: Options,
    // What the program points to.
    _tables: Tables,
    _semaphores: SemaphorePool,
    _scratch: Option<Arc<RegisteredMemory>>,
}

impl Prepared {
    /// Prepares `plan`. Collective; blocks until all ranks have called it with the same arguments,
    /// at most until `deadline`.
    ///
    /// # Errors
    /// [`ExecutorError`]: ranks disagree, one died or was late, the plan does not fit the job or
    /// the buffers, or there is no memory.
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        plan: &Plan,
        options: Options,
        deadline: Instant,
    ) -> Result<Arc<Self>, ExecutorError> {
        let name = || plan.name.clone();
        let channel = |source: ChannelError| ExecutorError::Channel {
            plan: name(),
            source,
        };
        let hal = |source: HalError| ExecutorError::Hal {
            plan: name(),
            source,
        };
        let too_large = || ExecutorError::Scratch {
            plan: name(),
            bytes: options.max_bytes,
        };

        let what = format!("preparing plan `{}`", plan.name);
        // First of all, so that every rank hears of a difference, whatever it then makes of it.
        endpoint
            .agree(&statement(plan, &options), &what, deadline)
            .map_err(channel)?;
        check_fit(plan, endpoint.world_size(), &options)?;

        let (scratch_half, scratch) = plan
            .scratch_bytes(options.max_bytes)
            .ok_or_else(too_large)?;
        let (packets_half, packets) = plan.packet_bytes(options.max_bytes).ok_or_else(too_large)?;
        let bytes = scratch.checked_add(packets).ok_or_else(too_large)?;
        let scratch_memory = if bytes == 0 {
            None
        } else {
            let memory = SharedMemory::create(bytes).map_err(hal)?;
            Some(
                endpoint
                    .register(memory, &what, deadline)
                    .map_err(channel)?,
            )
        };
        let rank = endpoint.rank();
        let own = &plan.ranks[rank as usize];
        let peers: Vec<u32> = own.channels.iter().map(|channel| channel.peer).collect();
        let semaphores = SemaphorePool::new(endpoint, &peers, deadline).map_err(channel)?;
        let (input, output) = match &options.buffers {
            Buffers::Private => (None, None),
            Buffers::Registered { input, output } => (Some(&**input), Some(&**output)),
        };
        let memories = Memories {
            input,
            output,
            scratch: scratch_memory.as_deref(),
            packets_offset: scratch,
        };
        let tables = Tables::new(plan, rank, &semaphores, &memories, options.first_epoch)
            .map_err(channel)?;
        let grid = Grid::new(own.blocks.len() as u32, options.schedule).map_err(hal)?;
        let halves = (scratch_half, packets_half);
        let element = options.dtype.size() as u32;
        Ok(Arc::new(Self {
            endpoint: Arc::clone(endpoint),
            name: name(),
            op_names: own
                .blocks
                .iter()
                .map(|ops| ops.iter().map(crossweft_plan::Op::name).collect())
                .collect(),
            reducer: HostReducer::new(options.dtype, options.op),
            program: tables.program(plan, rank, halves, element),
            grid: Mutex::new(grid),
            poisoned: AtomicBool::new(false),
            options,
            _tables: tables,
            _semaphores: semaphores,
            _scratch: scratch_memory,
        }))
    }

    /// The plan's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The largest message it was prepared for, in bytes.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.options.max_bytes
    }

    /// Runs the plan on private buffers of equal length, on the calling thread. Blocks until this
    /// rank's part is done, at most for `limit`.
    ///
    /// # Errors
    /// [`ExecutorError`]: [`Usage`](ExecutorError::Usage) leaves everything as it was; after
    /// [`Interrupted`](ExecutorError::Interrupted) the output is undefined and the plan poisoned.
    pub fn run(
        &self,
        input: &[u8],
        output: &mut [u8],
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        if input.len() != output.len() {
            let (input, output) = (input.len(), output.len());
            return Err(self.usage(format!("input has {input} bytes, output {output}")));
        }
        self.check_private()?;
        let buffers = RawBuffers::of(input.as_ptr(), output.as_mut_ptr(), input.len());
        self.launch_borrowed(&buffers, limit, (input, output))
    }

    /// [`run`](Self::run), with the output in the place of the input.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_in_place(&self, data: &mut [u8], limit: Duration) -> Result<(), ExecutorError> {
        self.check_private()?;
        let buffers = RawBuffers::of(data.as_ptr(), data.as_mut_ptr(), data.len());
        self.launch_borrowed(&buffers, limit, (&[], data))
    }

    /// Runs the plan on `bytes` bytes of registered memory, on the calling thread. Offsets must be
    /// the same on every rank; the two ranges must be the same or not overlap.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_registered(
        &self,
        input_offset: u64,
        output_offset: u64,
        bytes: u64,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let Buffers::Registered { input, output } = &self.options.buffers else {
            return Err(self.usage("it was prepared for private buffers".to_owned()));
        };
        for (what, memory, offset) in [
            ("input", input, input_offset),
            ("output", output, output_offset),
        ] {
            let end = offset.checked_add(bytes);
            if end.is_none_or(|end| end > memory.bytes()) {
                let size = memory.bytes();
                return Err(self.usage(format!(
                    "{what} {offset}..{offset}+{bytes} lies outside its memory of {size} bytes"
                )));
            }
        }
        let (from, to) = (
            input.local().addr() + input_offset,
            output.local().addr() + output_offset,
        );
        if from != to && from < to.saturating_add(bytes) && to < from.saturating_add(bytes) {
            return Err(self.usage("input and output overlap without being the same".to_owned()));
        }
        let buffers = RawBuffers {
            input: from,
            output: to,
            input_offset,
            output_offset,
            bytes,
        };
        self.launch_registered(&buffers, limit)
    }

    /// Whether the size fits what was prepared.
    pub(crate) fn check_bytes(&self, bytes: u64) -> Result<(), ExecutorError> {
        let max = self.options.max_bytes;
        if bytes > max {
            return Err(self.usage(format!("{bytes} bytes; it was prepared for up to {max}")));
        }
        let dtype = self.options.dtype;
        if !bytes.is_multiple_of(dtype.size() as u64) {
            return Err(self.usage(format!("{bytes} bytes are no whole number of {dtype}")));
        }
        Ok(())
    }

    fn check_private(&self) -> Result<(), ExecutorError> {
        match self.options.buffers {
            Buffers::Private => Ok(()),
            _ => Err(self.usage("it was prepared for registered memory".to_owned())),
        }
    }

    pub(crate) fn usage(&self, reason: String) -> ExecutorError {
        ExecutorError::Usage {
            plan: self.name.clone(),
            rank: self.program.rank,
            reason,
        }
    }
}

/// What all ranks must agree on, in words.
fn statement(plan: &Plan, options: &Options) -> String {
    let mut hasher = DefaultHasher::new();
    plan.to_json().hash(&mut hasher);
    let Options {
        dtype,
        op,
        max_bytes,
        buffers,
        first_epoch,
        ..
    } = options;
    let buffers = match buffers {
        Buffers::Private => "private buffers",
        Buffers::Registered { input, output } if Arc::ptr_eq(input, output) => {
            "one registered memory"
        }
        Buffers::Registered { .. } => "registered memories",
    };
    format!(
        "plan `{}` ({:016x}) for {dtype} {op}, up to {max_bytes} bytes in {buffers}, from epoch \
         {first_epoch}",
        plan.name,
        hasher.finish()
    )
}

fn check_fit(plan: &Plan, world_size: u32, options: &Options) -> Result<(), ExecutorError> {
    if plan.world_size() != world_size {
        return Err(ExecutorError::WorldSize {
            plan: plan.name.clone(),
            ranks: plan.world_size(),
            world_size,
        });
    }
    if let Some(planned) = plan.reduce_op.filter(|planned| *planned != options.op) {
        return Err(ExecutorError::ReduceOp {
            plan: plan.name.clone(),
            planned,
            asked: options.op,
        });
    }
    if matches!(options.buffers, Buffers::Private) {
        let buffer = match plan.reaches_into() {
            (true, _) => "input",
            (_, true) => "output",
            _ => return Ok(()),
        };
        return Err(ExecutorError::NeedsRegistered {
            plan: plan.name.clone(),
            buffer,
        });
    }
    Ok(())
}
