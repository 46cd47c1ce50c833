//! Preparing plans, and the safe ways to launch them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crossweft_channel::{
    CallLine, ChannelError, Endpoint, ImageBuilder, KernelGuard, RegisteredMemory,
};
use crossweft_device::program::Program;
use crossweft_device::reduce::HostReducer;
use crossweft_device::{DataType, ReduceOp};
use crossweft_hal::cpu::{Grid, Schedule, reducer};
use crossweft_hal::cuda::{self, CudaError, Stream};
use crossweft_hal::{Device, HalError, Memory};
use crossweft_plan::{Buffer, Collective, InPlace, Plan};

use crate::ExecutorError;
use crate::common::{Common, Room};
use crate::cuda::{CudaLauncher, Unfit};
use crate::fused::{Form, Fused, has_lines};
use crate::kernels::{Entry, PlanKernels, compile_together};
use crate::launch::RawBuffers;
use crate::pre_multiply::{PreMultiplier, Scalar};
use crate::tables::{Channels, Draft, Memories, Scratch, Tables};
use crate::turn::Turn;

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

/// What a plan is prepared for. Ranks must agree on all of it but the schedule and the scalar.
#[derive(Clone, Debug)]
pub struct Options {
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation.
    pub op: ReduceOp,
    /// What this rank's input is multiplied by before a sum, at first; `None` for a plain reduction. Ranks agree
    /// on whether there is one, each has its own.
    pub pre_multiply: Option<Scalar>,
    /// Largest message in bytes.
    pub max_bytes: u64,
    /// Where the buffers will be.
    pub buffers: Buffers,
    /// The order in which thread blocks run on a CPU.
    pub schedule: Schedule,
    /// Threads of a block on a GPU, at most; `None` for as many as kernels allow for.
    pub threads: Option<u32>,
    /// Whether a GPU may run a plan of a form that it has an own kernel for with that, as usual, or is to
    /// use the executor for it too, for tests and measurements.
    pub fused: bool,
    /// Whether one shots of large messages may go in lines instead of packets where the machine keeps them, as usual.
    pub lines: bool,
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
            pre_multiply: None,
            max_bytes,
            buffers,
            schedule,
            threads: None,
            fused: true,
            lines: true,
            first_epoch: 1,
        }
    }
}

/// What runs the thread blocks.
#[derive(Debug)]
pub(crate) enum Machine {
    Cpu { grid: Grid, reducer: HostReducer },
    Cuda(Box<CudaLauncher>),
}

fn machine(
    endpoint: &Endpoint,
    plan: &Plan,
    memories: &Memories<'_>,
    options: &Options,
) -> Result<Machine, ExecutorError> {
    let hal = |source: HalError| ExecutorError::Hal {
        plan: plan.name.clone(),
        source,
    };
    let Options { dtype, op, .. } = *options;
    let rank = endpoint.rank();
    match endpoint.device() {
        Device::Cuda(context) => {
            // Ranks of one device may have different numbers of blocks.
            let most = plan.ranks.iter().map(|rank| rank.blocks.len()).max();
            let most = most.unwrap_or(0) as u32;
            let sharers = endpoint.sharers();
            let operands = most_operands(plan);
            let channel = |source| ExecutorError::Channel {
                plan: plan.name.clone(),
                source,
            };
            let lines = takes_lines(endpoint, plan, options);
            let fused = match options.fused {
                true => Fused::of(plan, rank, memories, lines).map_err(channel)?,
                false => None,
            };
            CudaLauncher::new(
                context,
                (dtype, op),
                (most, sharers),
                operands,
                options.threads,
                fused,
            )
            .map(|launcher| Machine::Cuda(Box::new(launcher)))
            .map_err(|unfit| match unfit {
                Unfit::Hal(error) => hal(error),
                Unfit::Operands { most } => ExecutorError::Operands {
                    plan: plan.name.clone(),
                    operands,
                    most,
                },
                Unfit::Residency { resident } => ExecutorError::Residency {
                    plan: plan.name.clone(),
                    blocks: most,
                    sharers,
                    resident,
                },
            })
        }
        _ => Ok(Machine::Cpu {
            grid: Grid::new(
                plan.ranks[rank as usize].blocks.len() as u32,
                options.schedule,
            )
            .map_err(hal)?,
            reducer: reducer(dtype, op),
        }),
    }
}

/// Whether all ranks send lines instead of packets.
fn takes_lines(endpoint: &Endpoint, plan: &Plan, options: &Options) -> bool {
    options.lines && endpoint.keeps_lines() && has_lines(plan, options.max_bytes)
}

/// The kernels that any rank needs for some plans.
fn kernels(
    endpoint: &Endpoint,
    context: &cuda::Context,
    plans: &[(&Plan, Options)],
) -> Result<Vec<Entry>, CudaError> {
    let mut all = Vec::new();
    for (plan, options) in plans {
        let kernels = PlanKernels::new(context, options.dtype)?;
        all.push(kernels.executor());
        if options.fused {
            let forms = Form::all(plan, takes_lines(endpoint, plan, options));
            all.extend(forms.map(|form| kernels.fused(form)));
        }
    }
    Ok(all)
}

/// The most operands that any reduction has.
fn most_operands(plan: &Plan) -> usize {
    let ops = plan.ranks.iter().flat_map(|r| r.blocks.iter().flatten());
    ops.flat_map(crossweft_plan::Op::flatten)
        .filter(|op| matches!(op, crossweft_plan::Op::Reduce { .. }))
        .map(|op| {
            let (from, to) = op.operands();
            from.len() + to.len()
        })
        .max()
        .unwrap_or(0)
}

/// A plan that is ready to be launched by this rank.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) name: String,
    pub(crate) op_names: Vec<Vec<&'static str>>,
    pub(crate) program: Program,
    pub(crate) machine: Turn<Machine>,
    /// What ends the waits of launches on a GPU, also while one has its turn.
    guard: Option<Arc<KernelGuard>>,
    pub(crate) call: CallLine,
    pub(crate) poisoned: AtomicBool,
    pub(crate) pre_multiplier: Option<PreMultiplier>,
    options: Options,
    shape: Shape,
    // What the program points to; there until this is dropped.
    tables: Option<Tables>,
    scratch: Option<Scratch>,
}

pub(crate) fn of_channel(plan: &Plan, source: ChannelError) -> ExecutorError {
    ExecutorError::Channel {
        plan: plan.name.clone(),
        source,
    }
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
        let all = Self::prepare_all(endpoint, &[(plan, options)], deadline)?;
        // As many as were given.
        all.into_iter().next().ok_or_else(|| ExecutorError::Usage {
            plan: plan.name.clone(),
            rank: endpoint.rank(),
            reason: "it was not prepared".to_owned(),
        })
    }

    /// Prepares several plans as [`prepare`](Self::prepare) does one, in the time of about one: they share memory, and
    /// ranks meet once for all of them. Returns them in the same order.
    ///
    /// # Errors
    /// As for [`prepare`](Self::prepare), of the first plan with which something is wrong.
    pub fn prepare_all(
        endpoint: &Arc<Endpoint>,
        plans: &[(&Plan, Options)],
        deadline: Instant,
    ) -> Result<Vec<Arc<Self>>, ExecutorError> {
        let Some((first, _)) = plans.first() else {
            return Ok(Vec::new());
        };
        // What concerns all is said of the first.
        let channel = |source: ChannelError| of_channel(first, source);
        let named = |(plan, _): &(&Plan, Options)| format!("preparing plan `{}`", plan.name);
        let names: Vec<String> = plans.iter().map(named).collect();
        let what = names[0].as_str();
        // First of all, so that every rank hears of a difference, whatever it then makes of it.
        let statements = names.iter().zip(plans);
        let statements = statements.map(|(name, (plan, of))| (name.as_str(), statement(plan, of)));
        let statements: Vec<_> = statements.collect();
        endpoint
            .agree_on_all(&statements, deadline)
            .map_err(channel)?;
        // Every rank takes the next numbers, whether or not it can go on.
        let calls = plans.iter().map(|(plan, options)| {
            let (dtype, op) = (options.dtype, operation(options));
            endpoint.call_line(&format!("{}, {dtype} {op}", plan.name))
        });
        let calls: Vec<CallLine> = calls.collect();
        for (plan, options) in plans {
            check_fit(plan, endpoint.world_size(), options)?;
        }

        // Loaded until each launcher has those it needs.
        let _compiled = match endpoint.device() {
            Device::Cuda(context) => {
                let needed = kernels(endpoint, context, plans);
                compile_together((endpoint, context), needed, &first.name, deadline)?
            }
            _ => Vec::new(),
        };
        let rank = endpoint.rank();
        let rooms = plans.iter().map(|(plan, of)| Room::new(plan, of));
        let rooms = rooms.collect::<Result<Vec<_>, _>>()?;
        let common = Common::new(endpoint, plans, &rooms, what, deadline)?;
        let mut image = ImageBuilder::default();
        let mut drafts = Vec::new();
        for (index, (plan, options)) in plans.iter().enumerate() {
            let (input, output) = match &options.buffers {
                Buffers::Private => (None, None),
                Buffers::Registered { input, output } => (Some(input), Some(output)),
            };
            let shape = Shape::new(plan, rank);
            let multiplier =
                PreMultiplier::prepare(endpoint, plan, options, shape.uses_input(), deadline)?;
            let products = multiplier.as_ref().and_then(PreMultiplier::registered);
            let memories = Memories {
                input: products.or(input),
                output,
                scratch: common.scratch[index].as_ref(),
            };
            let own = &plan.ranks[rank as usize];
            let semaphores = (&common.semaphores, common.first[index]);
            let ports = plan.has_ports();
            let channels = Channels::new(endpoint, own, semaphores, &memories, ports, deadline);
            // What goes wrong with these and behind them does so on this rank alone: the others are told below.
            let draft = channels.and_then(|channels| {
                let place: (&Plan, u32) = (plan, rank);
                Draft::new(&mut image, place, channels, &memories, options.first_epoch)
            });
            let draft = draft.map_err(|source| of_channel(plan, source));
            let machine = machine(endpoint, plan, &memories, options);
            let made = draft.and_then(|draft| Ok((draft, machine?)));
            drafts.push(made.map(|(draft, machine)| (draft, machine, shape, multiplier)));
        }
        // Launches borrow a stream from their context. Each rank holds one until all have come, so that there are
        // as many as ranks: making one while kernels run may wait for them.
        let ready = || {
            let drafts = drafts.into_iter().collect::<Result<Vec<_>, _>>()?;
            let image = image.finish(endpoint.device(), "laying out a plan");
            let image = Arc::new(image.map_err(channel)?);
            let stream = match endpoint.device() {
                Device::Cuda(context) => Some(Stream::new(context)),
                _ => None,
            };
            let stream = stream.transpose().map_err(|error| ExecutorError::Hal {
                plan: first.name.clone(),
                source: error.into(),
            })?;
            Ok((drafts, image, stream))
        };
        // No rank launches what another cannot.
        let (drafts, image, _stream) = endpoint.settle(ready(), what, deadline, channel)?;
        let made = drafts.into_iter().zip(plans).zip(rooms).zip(calls);
        let all = made.zip(common.scratch).map(|(made, scratch)| {
            let (((draft, (plan, options)), room), call) = made;
            let (draft, machine, shape, pre_multiplier) = draft;
            let tables = draft.on(&image);
            let element = options.dtype.size() as u32;
            let blocks = plan.ranks[rank as usize].blocks.iter();
            Arc::new(Self {
                endpoint: Arc::clone(endpoint),
                name: plan.name.clone(),
                op_names: blocks
                    .map(|ops| ops.iter().map(crossweft_plan::Op::name).collect())
                    .collect(),
                program: tables.program(plan, rank, room.halves, element),
                guard: match &machine {
                    Machine::Cuda(launcher) => Some(launcher.guard()),
                    Machine::Cpu { .. } => None,
                },
                machine: Turn::new(machine),
                call,
                poisoned: AtomicBool::new(false),
                pre_multiplier,
                options: options.clone(),
                shape,
                tables: Some(tables),
                scratch,
            })
        });
        Ok(all.collect())
    }

    /// Sets what this rank's input is multiplied by in calls that begin from now on. Local: each rank may give
    /// another. What was recorded into a graph keeps its scalar, or its scalar's address.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if it was not prepared with a scalar.
    pub fn set_scalar(&self, scalar: Scalar) -> Result<(), ExecutorError> {
        match &self.pre_multiplier {
            Some(multiplier) => {
                multiplier.set(scalar);
                Ok(())
            }
            None => Err(self.usage("it was not prepared to multiply its input".to_owned())),
        }
    }

    /// Ends the waits of launches that run on a GPU, within about a millisecond, and those of later ones. Local; for
    /// whoever has [launched on a stream](Self::launch_on_cuda) and learns that the job has failed. Launches on the CPU
    /// device find that out by themselves.
    pub fn end_waits(&self) {
        if let Some(guard) = &self.guard {
            guard.abort();
        }
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

    /// Bytes of scratch memory that it holds on this rank.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        let scratch = self.scratch.as_ref();
        scratch.map_or(0, |scratch| scratch.end - scratch.plain)
    }

    /// Bytes of the message whose input has `input` bytes and whose output has `output`; a buffer of this rank that
    /// no operation touches may be empty. The largest that was prepared for, of a plan that has neither.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if they are not the plan's blocks of one message.
    pub fn message_bytes(&self, input: u64, output: u64) -> Result<u64, ExecutorError> {
        let Shape {
            input_blocks,
            output_blocks,
            ..
        } = self.shape;
        if (input_blocks, output_blocks, input, output) == (0, 0, 0, 0) {
            return Ok(self.options.max_bytes);
        }
        self.shape.message(input, output).ok_or_else(|| {
            self.usage(format!(
                "input has {input} bytes, output {output}; they must be {input_blocks} and \
                 {output_blocks} times the message"
            ))
        })
    }

    /// Bytes of the message whose input and output are one buffer of `length` bytes.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if it is no whole number of the plan's blocks.
    pub fn message_bytes_in_place(&self, length: u64) -> Result<u64, ExecutorError> {
        let blocks = u64::from(self.shape.input_blocks.max(self.shape.output_blocks).max(1));
        if !length.is_multiple_of(blocks) {
            return Err(self.usage(format!("{length} bytes are no {blocks} messages")));
        }
        Ok(length / blocks)
    }

    /// Where this rank's input and output of a message of `bytes` bytes begin in the one buffer of a run
    /// in place, in bytes.
    #[must_use]
    pub fn in_place_offsets(&self, bytes: u64) -> (u64, u64) {
        self.shape.in_place_offsets(bytes)
    }

    /// Runs the plan on private buffers, on the calling thread: `input` and `output` have as many
    /// bytes as the collective's blocks of one message. Blocks until this rank's part is done, at
    /// most for `limit`.
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
        let bytes = self.message_bytes(input.len() as u64, output.len() as u64)?;
        self.check_host()?;
        self.check_private()?;
        self.check_in_place(false)?;
        let buffers = RawBuffers {
            input: input.as_ptr().expose_provenance() as u64,
            output: output.as_mut_ptr().expose_provenance() as u64,
            input_offset: 0,
            output_offset: 0,
            bytes,
        };
        self.launch_borrowed(&buffers, limit, (input, output))
    }

    /// [`run`](Self::run) on one buffer, the larger of input and output; the smaller one is this
    /// rank's block of it.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_in_place(&self, data: &mut [u8], limit: Duration) -> Result<(), ExecutorError> {
        let bytes = self.message_bytes_in_place(data.len() as u64)?;
        self.check_host()?;
        self.check_private()?;
        self.check_in_place(true)?;
        let base = data.as_mut_ptr().expose_provenance() as u64;
        let (input_offset, output_offset) = self.shape.in_place_offsets(bytes);
        let buffers = RawBuffers {
            input: base + input_offset,
            output: base + output_offset,
            input_offset: 0,
            output_offset: 0,
            bytes,
        };
        self.launch_borrowed(&buffers, limit, (&[], data))
    }

    /// Runs the plan on messages of `bytes` bytes in registered memory, on the calling thread.
    /// Offsets must be the same on every rank; in place they are those of the one buffer, otherwise
    /// the ranges must not overlap.
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
        let buffers = self.registered_buffers(input_offset, output_offset, bytes)?;
        self.launch_checked(&buffers, limit)
    }

    /// The addresses of messages in registered memory, after the checks that
    /// [`run_registered`](Self::run_registered) makes.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`].
    pub fn registered_buffers(
        &self,
        input_offset: u64,
        output_offset: u64,
        bytes: u64,
    ) -> Result<RawBuffers, ExecutorError> {
        let Buffers::Registered { input, output } = &self.options.buffers else {
            return Err(self.usage("it was prepared for private buffers".to_owned()));
        };
        let buffers = self.locate(
            (input.local(), input_offset),
            (output.local(), output_offset),
            bytes,
        )?;
        Ok(RawBuffers {
            input_offset,
            output_offset,
            ..buffers
        })
    }

    /// Runs the plan on messages of `bytes` bytes in private memory of this rank's device, on the
    /// calling thread: `input` and `output` name a memory and an offset in it. The same memory and
    /// offset means in place; otherwise ranges must not overlap.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_at(
        &self,
        input: (&Memory, u64),
        output: (&Memory, u64),
        bytes: u64,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let buffers = self.private_buffers(input, output, bytes)?;
        self.launch_checked(&buffers, limit)
    }

    /// The addresses of messages in private memory of this rank's device, as [`run_at`](Self::run_at) takes them.
    pub(crate) fn private_buffers(
        &self,
        input: (&Memory, u64),
        output: (&Memory, u64),
        bytes: u64,
    ) -> Result<RawBuffers, ExecutorError> {
        self.check_private()?;
        self.locate(input, output, bytes)
    }

    /// The addresses of messages of `bytes` bytes at an offset of a memory each, if they are what the
    /// plan can work on.
    fn locate(
        &self,
        input: (&Memory, u64),
        output: (&Memory, u64),
        bytes: u64,
    ) -> Result<RawBuffers, ExecutorError> {
        let (mut input_blocks, mut output_blocks) =
            (self.shape.input_blocks, self.shape.output_blocks);
        let same = input.0.addr() == output.0.addr();
        let in_place = same && input.1 == output.1;
        if in_place {
            input_blocks = input_blocks.max(output_blocks);
            output_blocks = input_blocks;
        }
        for (what, (memory, offset), blocks) in [
            ("input", input, input_blocks),
            ("output", output, output_blocks),
        ] {
            self.check_device(what, memory)?;
            self.check_range(what, memory.bytes(), offset, blocks, bytes)?;
        }
        let overlap = |a: u64, a_blocks: u32, b: u64| {
            a <= b && b < a.saturating_add(bytes.saturating_mul(a_blocks.into()))
        };
        if same
            && !in_place
            && (overlap(input.1, input_blocks, output.1)
                || overlap(output.1, output_blocks, input.1))
        {
            return Err(self.usage("input and output overlap without being the same".to_owned()));
        }
        self.check_in_place(in_place)?;
        self.check_bytes(bytes)?;
        let (own_input, own_output) = match in_place {
            true => self.shape.in_place_offsets(bytes),
            false => (0, 0),
        };
        Ok(RawBuffers {
            input: input.0.addr() + input.1 + own_input,
            output: output.0.addr() + output.1 + own_output,
            input_offset: 0,
            output_offset: 0,
            bytes,
        })
    }

    pub(crate) fn check_range(
        &self,
        what: &str,
        size: u64,
        offset: u64,
        blocks: u32,
        bytes: u64,
    ) -> Result<(), ExecutorError> {
        let end = bytes
            .checked_mul(blocks.into())
            .and_then(|n| offset.checked_add(n));
        if end.is_none_or(|end| end > size) {
            return Err(self.usage(format!(
                "{what} of {blocks} times {bytes} bytes at {offset} lies outside its memory of \
                 {size} bytes"
            )));
        }
        Ok(())
    }

    /// Whether the size of a message fits what was prepared.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if not.
    pub fn check_bytes(&self, bytes: u64) -> Result<(), ExecutorError> {
        let max = self.options.max_bytes;
        if bytes > max {
            return Err(self.usage(format!("{bytes} bytes; it was prepared for up to {max}")));
        }
        let dtype = self.options.dtype;
        if !bytes.is_multiple_of(dtype.size() as u64) {
            return Err(self.usage(format!("{bytes} bytes are no whole number of {dtype}")));
        }
        let (least, most) = self.shape.message_bytes;
        if bytes < least || bytes > most {
            return Err(self.usage(format!("{bytes} bytes; the plan is for {least} to {most}")));
        }
        if !bytes.is_multiple_of(self.shape.multiple_of) {
            return Err(self.usage(format!(
                "{bytes} bytes; the plan takes multiples of {}: its chunks, or their slices, must be of one size",
                self.shape.multiple_of
            )));
        }
        Ok(())
    }

    fn check_in_place(&self, in_place: bool) -> Result<(), ExecutorError> {
        match (self.shape.in_place, in_place) {
            (InPlace::Forbidden, true) => {
                Err(self.usage("the plan cannot work in place".to_owned()))
            }
            (_, true) if self.shape.reaches_into_smaller => Err(self.usage(
                "ranks reach into each other's smaller buffer, which the plan cannot do in place"
                    .to_owned(),
            )),
            (InPlace::Required, false) => {
                Err(self.usage("the plan only works in place".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Whether `memory` is of the device that the plan runs on.
    pub(crate) fn check_device(&self, what: &str, memory: &Memory) -> Result<(), ExecutorError> {
        match (self.endpoint.device(), memory) {
            (Device::Cpu, Memory::Cpu(_)) => Ok(()),
            // Another GPU's faults under a kernel, which would lose the context.
            (Device::Cuda(context), Memory::Cuda(memory))
                if memory.context().ordinal() == context.ordinal() =>
            {
                Ok(())
            }
            (device, _) => Err(self.usage(format!(
                "the {what} is not memory of the device that the plan is on, {}",
                device.name()
            ))),
        }
    }

    /// Whether device code can reach host memory.
    fn check_host(&self) -> Result<(), ExecutorError> {
        match self.endpoint.device() {
            Device::Cpu => Ok(()),
            device => Err(self.usage(format!(
                "the buffers are host memory, the plan is on {}; give memory of that device",
                device.name()
            ))),
        }
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

impl Drop for Prepared {
    /// Waits for launches that nobody else may have waited for: memory is unmapped under kernels that use it, which ends the
    /// context.
    fn drop(&mut self) {
        if self.finish().is_ok() {
            return;
        }
        // With the guard's words, which are the kernel's too, the context stays.
        std::mem::forget((
            self.tables.take(),
            self.scratch.take(),
            self.pre_multiplier.take(),
            self.guard.take(),
            self.options.buffers.clone(),
        ));
    }
}

/// What a plan says about the buffers of a launch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rank: u32,
    collective: Collective,
    in_place: InPlace,
    input_blocks: u32,
    output_blocks: u32,
    message_bytes: (u64, u64),
    multiple_of: u64,
    /// In place, the smaller buffer lies elsewhere on every rank, so peers cannot reach into it.
    reaches_into_smaller: bool,
    /// Whether anybody reads this rank's input, or writes its output: `(input, output)`.
    uses: (bool, bool),
}

impl Shape {
    fn new(plan: &Plan, rank: u32) -> Self {
        let multiple_of = plan.message_multiple();
        let (input, output) = plan.reaches_into();
        let own = plan.collective.is_own_block();
        let reaches_into_smaller = input && own.0 || output && own.1;
        let uses = |buffer| {
            plan.all_ops().any(|(_, op)| {
                let (from, to) = op.operands();
                let mut operands = from.iter().chain(to);
                operands.any(|o| o.rank == rank && o.buffer == buffer)
            })
        };
        Self {
            rank,
            reaches_into_smaller,
            uses: (uses(Buffer::Input), uses(Buffer::Output)),
            collective: plan.collective,
            in_place: plan.in_place,
            input_blocks: plan.input_blocks,
            output_blocks: plan.output_blocks,
            message_bytes: plan.message_bytes,
            multiple_of,
        }
    }

    /// Whether anybody reads this rank's input, by either name.
    fn uses_input(&self) -> bool {
        self.uses.0 || self.in_place == InPlace::Required && self.uses.1
    }

    /// Bytes of the message of buffers of these sizes, if they fit together. One that nobody uses may be
    /// empty.
    fn message(&self, input: u64, output: u64) -> Option<u64> {
        let (i, o) = (u64::from(self.input_blocks), u64::from(self.output_blocks));
        let of_input = input.checked_div(i).filter(|_| input > 0 || self.uses.0);
        let bytes = of_input.or_else(|| output.checked_div(o))?;
        let fits = |length: u64, blocks: u64, is_used: bool| {
            length == bytes * blocks || length == 0 && !is_used
        };
        (fits(input, i, self.uses.0) && fits(output, o, self.uses.1)).then_some(bytes)
    }

    /// Where this rank's input and output begin in the one buffer.
    fn in_place_offsets(&self, bytes: u64) -> (u64, u64) {
        let own = bytes * u64::from(self.rank);
        let (input, output) = self.collective.is_own_block();
        (own * u64::from(input), own * u64::from(output))
    }
}

/// The operation, in words.
fn operation(options: &Options) -> String {
    match options.pre_multiply {
        None => options.op.name().to_owned(),
        Some(_) => format!("pre-multiplied {}", options.op),
    }
}

/// What all ranks must agree on, in words.
fn statement(plan: &Plan, options: &Options) -> String {
    let mut hasher = DefaultHasher::new();
    plan.hash(&mut hasher);
    let Options {
        dtype,
        max_bytes,
        buffers,
        first_epoch,
        fused,
        lines,
        ..
    } = options;
    let by = if *fused { "" } else { " by the executor" };
    let by = by.to_owned() + if *lines { "" } else { " in packets" };
    let op = operation(options);
    let buffers = match buffers {
        Buffers::Private => "private buffers".to_owned(),
        Buffers::Registered { input, output } => {
            // Where ranks reach into each other's buffers, all must mean the same memory.
            let (into_input, into_output) = plan.reaches_into();
            let name = |is_reached: bool, memory: &RegisteredMemory| match is_reached {
                true => format!("memory {:?}", memory.keys()),
                false => "registered memory".to_owned(),
            };
            let one = match Arc::ptr_eq(input, output) {
                true => " (the same)",
                false => "",
            };
            let (from, to) = (name(into_input, input), name(into_output, output));
            format!("{from} to {to}{one}")
        }
    };
    format!(
        "plan `{}` ({:016x}) for {dtype} {op}, up to {max_bytes} bytes in {buffers}, from epoch \
         {first_epoch}{by}",
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
    if options.pre_multiply.is_some() && options.op != ReduceOp::Sum {
        return Err(ExecutorError::PreMultiplied {
            plan: plan.name.clone(),
            asked: options.op,
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
