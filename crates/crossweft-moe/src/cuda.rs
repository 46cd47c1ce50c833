//! Dispatch and combine on a CUDA device: kernels in the order of a stream.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::KernelGuard;
use crossweft_device::gpu::GpuContext;
use crossweft_device::moe::combine::{self, Weighting};
use crossweft_device::moe::dispatch::{self, Choices, Quantise};
use crossweft_device::moe::{COMPLETED, Call, Phase, SENT};
use crossweft_device::{DataType, Stopped};
use crossweft_hal::HalError;
use crossweft_hal::cpu::Interrupted;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, Kernel, Module, Shape, Stream,
};
use crossweft_kernels::moe::{CombineLaunch, DispatchLaunch, steps};
use crossweft_kernels::{MAX_REGISTERS, MAX_THREADS, MIN_SM, mangled, moe_module, named};

use crate::MoeError;
use crate::group::{Desk, Group, combine_call, dispatch_call, phase_of};
use crate::handle::{Counts, Handle, State};
use crate::launch::PassTables;
use crate::layout::{Format, Layout, ScaleType};
use crate::watch::Watch;

/// A group's kernels, and what ends their waits.
#[derive(Debug)]
pub(crate) struct Launcher {
    dispatch: Kernel,
    combine: Kernel,
    shape: Shape,
    guard: KernelGuard,
}

/// Why a group cannot be on a device.
#[derive(Debug)]
pub(crate) enum Unfit {
    Hal(CudaError),
    Usage(String),
}

impl From<CudaError> for Unfit {
    fn from(error: CudaError) -> Self {
        Self::Hal(error)
    }
}

impl Launcher {
    /// Loads the kernels and finds out how many threads their blocks can have, so that `blocks` blocks of each of
    /// `sharers` ranks are resident at once: they wait for each other. With rows as lines, or not.
    pub(crate) fn new(
        context: &Arc<Context>,
        (dtype, lines): (DataType, bool),
        (blocks, sharers): (u32, u32),
    ) -> Result<Self, Unfit> {
        let sm = context.device().sm()?;
        let incapable = || CudaError::Incapable {
            device: context.ordinal(),
            what: "dispatch and combine",
            reason: format!(
                "its compute capability is {sm}, kernels for {dtype} need at least {MIN_SM}"
            ),
        };
        let (module, entries) = moe_module(dtype, lines, sm).ok_or_else(incapable)?;
        let options = CompileOptions {
            max_registers: Some(MAX_REGISTERS),
            ..CompileOptions::default()
        };
        let loaded = Module::shared(context, module.name, named(module), &options)?;
        let (dispatch, combine) = (
            loaded.kernel(&mangled(entries.dispatch))?,
            loaded.kernel(&mangled(entries.combine))?,
        );
        let needed = u64::from(blocks) * u64::from(sharers);
        let threads = Kernel::resident_threads(&[&dispatch, &combine], MAX_THREADS, needed)?;
        let threads = threads.map_err(|resident| {
            Unfit::Usage(format!(
                "{blocks} thread blocks for each of {sharers} ranks on one device, which holds {resident} at once; \
                 use fewer"
            ))
        })?;
        Ok(Self {
            dispatch,
            combine,
            shape: Shape::linear(blocks, threads),
            guard: KernelGuard::new(context)?,
        })
    }
}

/// What rows and tokens are moved in, so what they must be aligned to.
const PIECE: u64 = 16;
/// An f32 or an i32, which kernels read and write as one.
const WORD: u64 = 4;

/// What experts are read and written as.
const fn expert_bytes(wide: bool) -> u64 {
    match wide {
        true => 8,
        false => WORD,
    }
}

/// The address, or why it cannot be: a misaligned access ends the context, and with it all that the process has on the device.
fn aligned(unit: u64, name: &str, address: u64) -> Result<u64, String> {
    match address.is_multiple_of(unit) {
        true => Ok(address),
        false => Err(format!(
            "{name} is at {address:#x}; it must be at a multiple of {unit}"
        )),
    }
}

/// Where a rank's tokens go, in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceRouting {
    /// Address of the experts of each token, of all ranks' experts: `[tokens, top-k]`, -1 for none.
    pub experts: u64,
    /// Whether they are i64, not i32.
    pub wide: bool,
    /// Address of what the experts' results are multiplied by: f32 `[tokens, top-k]`. 0: 1, or they are given when
    /// combining.
    pub weights: u64,
    /// Number of tokens.
    pub tokens: u32,
    /// Experts of each token.
    pub top_k: u32,
}

impl DeviceRouting {
    /// Of i32 experts, with weights of 1.
    #[must_use]
    pub const fn new(experts: u64, tokens: u32, top_k: u32) -> Self {
        Self {
            experts,
            wide: false,
            weights: 0,
            tokens,
            top_k,
        }
    }
}

/// The tokens of a dispatch, in device memory; those of elements are multiples of 16. See [`Tokens`](crate::Tokens).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceTokens {
    /// In the group's type.
    Plain(u64),
    /// In [`DataType::F8E4M3`]; the hidden size must be a multiple of 16.
    Quantised {
        /// Address of `[tokens, hidden]`.
        elements: u64,
        /// Address of `[tokens, scales]`, see [`Format::scale_bytes`].
        scales: u64,
        /// What they are.
        scale_type: ScaleType,
    },
    /// In the group's type, to be quantised on the way.
    Quantise {
        /// Address of `[tokens, hidden]`.
        elements: u64,
        /// What scales arrive.
        scale_type: ScaleType,
        /// Whether scales are rounded up to powers of two.
        powers_of_two: bool,
    },
}

impl DeviceTokens {
    /// How they travel.
    #[must_use]
    pub const fn format(&self) -> Format {
        match self {
            Self::Plain(_) => Format::Plain,
            Self::Quantised { scale_type, .. } | Self::Quantise { scale_type, .. } => {
                Format::F8E4M3(*scale_type)
            }
        }
    }
}

/// Where a dispatch lays out what is received, in device memory; 0 for what is not wanted. See
/// [`DispatchOutput`](crate::DispatchOutput).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOutput {
    /// Address of `[rows, hidden]`, a multiple of 16.
    pub tokens: u64,
    /// Rows that there is room for: as many as can come ([`Handle::output_shape`]), or, once
    /// [`Handle::wait_for_counts_on`] has told them, as many as do.
    pub rows: u64,
    /// Whether the caller knows that no more rows come than there is room for, without having waited for counts. If more
    /// come, nothing is laid out, and the call fails as one that does not match.
    pub bounded: bool,
    /// Address of `[rows, scales]`, of quantised tokens.
    pub scales: u64,
    /// Address of `[rows, top-k]` local experts, where rows are not grouped by expert.
    pub experts: u64,
    /// Whether those are i64, not i32.
    pub wide: bool,
    /// Address of f32 weights, `[rows, top-k]` or `[rows]`.
    pub weights: u64,
    /// Address of i32 `[rows]`: which of its source's tokens a row is.
    pub sources: u64,
}

impl DeviceOutput {
    /// Only tokens are wanted, for which there are so many rows.
    #[must_use]
    pub fn new(tokens: u64, rows: u64) -> Self {
        Self {
            tokens,
            rows,
            ..Self::default()
        }
    }
}

/// The weights of a combine. See [`Weights`](crate::Weights).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceWeights {
    /// All 1. The only ones for rows that are not grouped by expert.
    One,
    /// Those of the dispatch.
    Dispatched,
    /// These, of this rank's tokens: address of f32 `[tokens, top-k]`.
    Given(u64),
}

/// Where the counts of a handle's last dispatch are, in device memory. Addresses stay the same for as long as the
/// handle lives; strides are the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceCounts {
    /// Address of `u32 [ranks]`: tokens from each rank.
    pub per_source: u64,
    /// Address of `u32 [ranks][most experts]`: rows from each rank for each local expert.
    pub per_source_and_expert: u64,
    /// Address of `u32 [ranks][most experts]`: the first of those, where rows are grouped by expert.
    pub begins: u64,
    /// Address of `u32 [local experts + 1]`: the first row of each expert, where rows are grouped by expert, and rows in
    /// all.
    pub offsets: u64,
    /// The most experts of any rank.
    pub most_experts: u32,
}

/// What a launch of a dispatch has besides its tables.
struct Dispatch {
    choices: Choices,
    input: dispatch::Input,
    output: dispatch::Output,
}

impl Group {
    /// A handle for passes on a CUDA device, each of whose dispatches says where its tokens go. Local; allocates.
    ///
    /// # Errors
    /// [`MoeError::Usage`]: the group is not on a CUDA device, or a layout that cannot be.
    pub fn handle_on_device(self: &Arc<Self>, layout: Layout) -> Result<Handle, MoeError> {
        self.launcher()?;
        self.output_shape(layout, Format::Plain, self.options().top_k)?;
        let geometry = self.tables().geometry();
        let blocks = self.options().blocks;
        let mut pass = PassTables::new(self.endpoint(), geometry, (layout, blocks))?;
        // Room is asked for before the first dispatch says how many experts tokens have.
        let most = (0, geometry.top_k);
        pass.resize(geometry, most)
            .map_err(|reason| self.usage(reason))?;
        Ok(Handle::new(Arc::clone(self), layout, pass))
    }

    /// Whether every launch that has ended, ended well; does not block for those that have not. Ask after the stream has
    /// come to its end.
    ///
    /// # Errors
    /// As for [`Handle::dispatch`](Handle::dispatch): what went wrong first. The group cannot be used after that.
    pub fn check(&self) -> Result<(), MoeError> {
        let launcher = self.launcher()?;
        let Some(interrupted) = launcher.guard.interrupted() else {
            return Ok(());
        };
        let Ok(mut desk) = self.desk() else {
            return Err(MoeError::Poisoned {
                rank: self.rank(),
                reason: "an earlier call failed",
            });
        };
        Err(self.fail(&mut desk, &interrupted, &self.watch()))
    }

    /// What went wrong in a launch. The group cannot be used after that.
    #[cold]
    fn fail(&self, desk: &mut Desk, interrupted: &Interrupted, watch: &Watch<'_>) -> MoeError {
        desk.has_failed = true;
        let tables = self.tables();
        let (sent, completed) = (tables.state(SENT), tables.state(COMPLETED));
        let number = match phase_of(interrupted) {
            Phase::Choices => {
                let (choice, expert) = (interrupted.waiting.spins, interrupted.waiting.seen);
                let most = self.options().experts;
                return self.usage(format!(
                    "expert {} (choice {choice} of all tokens'); there are {most}, and -1 is for none",
                    expert.cast_signed()
                ));
            }
            Phase::Counts | Phase::Rows if sent > completed => completed,
            // Other thread blocks may have counted the call as completed since.
            Phase::Counts | Phase::Rows if tables.announced(sent, self.rank()).is_none() => {
                sent.saturating_sub(1)
            }
            _ => sent,
        };
        // What it has told itself is what it calls.
        let own = tables.announced(number, self.rank());
        let call = Call {
            signature: own.unwrap_or(desk.signature),
        };
        self.explain(interrupted, (number, call), watch)
    }

    /// Which steps are launched together: all of them, but with [`masking`](crate::GroupOptions::masking) those that send
    /// before those that wait for what was sent, so that the latter can be repeated alone.
    fn together(&self, steps: u32) -> impl Iterator<Item = u32> {
        let sending = steps::ROUTE | steps::WEIGHTS | steps::SEND;
        let parts = match self.options().masking {
            true => [steps & sending, steps & !sending],
            false => [steps, 0],
        };
        parts.into_iter().filter(|&part| part != 0)
    }

    /// Launches some steps of call `number`, and with [`masking`](crate::GroupOptions::masking) waits for their end and
    /// launches them again as long as ranks are missing that are to be left out.
    fn run(
        &self,
        stream: &Stream,
        desk: &mut Desk,
        number: u64,
        launch: impl Fn(GpuContext) -> Result<(), CudaError>,
    ) -> Result<(), MoeError> {
        let guard = &self.launcher()?.guard;
        let limit = self.options().timeout;
        let launch = |limit| launch(guard.context(limit)).map_err(HalError::from);
        if !self.options().masking {
            return Ok(launch(limit)?);
        }
        let watch = self.watch();
        // Read while no launch is under way, as is who is left out.
        let sent = self.tables().state(SENT);
        loop {
            let masked = self.masked();
            let awaited = || (0..).zip(&masked).filter(|(_, masked)| !**masked);
            let is_other = |rank: u32| rank != self.rank();
            let begun = Instant::now();
            launch(limit.saturating_sub(watch.waited()).max(LAST_CHANCE))?;
            let failed = || {
                guard.interrupted().is_some()
                    || watch.is_stopped()
                    || begun.elapsed() > LAST_CHANCE
                        && awaited().any(|(rank, _)| is_other(rank) && watch.leaves_out(rank))
            };
            guard
                .wait(stream, WAIT_LIMIT, failed)
                .map_err(HalError::from)?;
            let Some(interrupted) = guard.interrupted() else {
                return Ok(());
            };
            // Somebody is gone, but what it had to send has come, and now others are waited for.
            let for_nothing = interrupted.stopped == Stopped::Aborted
                && watch.may_leave_out()
                && watch.waited() < limit;
            if !self.leave_out(&interrupted, number, &watch) && !for_nothing {
                return Err(self.fail(desk, &interrupted, &watch));
            }
            guard.reset();
            self.tables()
                .clear_on_device(sent)
                .map_err(HalError::from)?;
        }
    }

    /// Blocks until `stream` has come to its end, at most for the time that its calls may take; then as
    /// [`check`](Self::check). If the job fails meanwhile, the waits of its kernels are ended.
    ///
    /// # Errors
    /// As for [`check`](Self::check); [`MoeError::Hal`] if the device failed.
    pub fn wait(&self, stream: &Stream) -> Result<(), MoeError> {
        let launcher = self.launcher()?;
        let watch = self.watch();
        let failed = || {
            // Blocks of a launch that was stopped wait for each other.
            launcher.guard.interrupted().is_some() || watch.is_stopped()
        };
        let waited = launcher.guard.wait(stream, WAIT_LIMIT, failed);
        waited.map_err(HalError::from)?;
        self.check()
    }
}

/// How long a launch has when its call has taken as long as it may, or a rank is gone: for what has come already.
const LAST_CHANCE: Duration = Duration::from_millis(100);

/// How long a stream may take to come to its end; its kernels have deadlines of their own.
const WAIT_LIMIT: Duration = Duration::from_secs(3600);

impl Handle {
    /// Sends this rank's tokens and lays out what is received, in one launch in the order of `stream`, which may be
    /// recording a graph; returns at once. All ranks must call it. What goes wrong on the device shows up in
    /// [`Group::check`].
    ///
    /// # Errors
    /// [`MoeError::Usage`], [`MoeError::Poisoned`], [`MoeError::Hal`].
    ///
    /// # Safety
    /// All addresses must be device memory of the shapes that are said, which nobody else uses in ways that conflict
    /// until the launch has ended, and the handle be kept until then, and as long as any graph that it was recorded
    /// into. Calls of a group must follow one another, whatever streams and handles they are of.
    pub unsafe fn dispatch_on(
        &mut self,
        stream: &Stream,
        routing: &DeviceRouting,
        tokens: DeviceTokens,
        output: &DeviceOutput,
    ) -> Result<(), MoeError> {
        let format = tokens.format();
        self.taking(routing, |this, choices| {
            let what = Dispatch {
                choices,
                input: this.input(tokens)?,
                output: this.output(format, output)?,
            };
            let all = steps::ROUTE | steps::SEND | steps::COUNT | steps::RECEIVE;
            // SAFETY: the caller's promise.
            unsafe { this.launch_dispatch(stream, &what, format, all) }
        })
    }

    /// The next dispatch is of another routing; until then there is nothing to combine.
    ///
    /// # Errors
    /// [`MoeError::Usage`] if a call was sent and not completed.
    pub fn route_on_device(&mut self) -> Result<(), MoeError> {
        self.can_dispatch()?;
        self.state = State::Routed;
        self.is_counted = false;
        Ok(())
    }

    /// Sends this rank's tokens, in the order of `stream`; returns at once. The tokens may be changed when the launch
    /// has ended; no multiprocessor is held until [`dispatch_complete_on`](Self::dispatch_complete_on).
    ///
    /// # Errors
    /// As for [`dispatch_on`](Self::dispatch_on).
    ///
    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    pub unsafe fn dispatch_send_on(
        &mut self,
        stream: &Stream,
        routing: &DeviceRouting,
        tokens: DeviceTokens,
    ) -> Result<(), MoeError> {
        self.taking(routing, |this, choices| {
            let what = Dispatch {
                choices,
                input: this.input(tokens)?,
                output: dispatch::Output::default(),
            };
            let all = steps::ROUTE | steps::SEND;
            // SAFETY: the caller's promise.
            unsafe { this.launch_dispatch(stream, &what, tokens.format(), all) }
        })
    }

    /// Waits until it is known how many rows the dispatch that was sent will bring. Blocks until `stream` has come to
    /// its end.
    ///
    /// # Errors
    /// As for [`Group::wait`].
    pub fn wait_for_counts_on(&mut self, stream: &Stream) -> Result<&Counts, MoeError> {
        let (_, format) = self.sent_dispatch()?;
        let what = Dispatch {
            choices: Choices::default(),
            input: self.nothing(format),
            output: dispatch::Output::default(),
        };
        // SAFETY: counts touch nothing but tables, and this waits for the launch.
        unsafe { self.launch_dispatch(stream, &what, format, steps::COUNT)? };
        self.counts_on(stream)
    }

    /// Lays out what the dispatch that was sent brings, in the order of `stream`; returns at once.
    ///
    /// # Errors
    /// As for [`dispatch_on`](Self::dispatch_on).
    ///
    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    pub unsafe fn dispatch_complete_on(
        &mut self,
        stream: &Stream,
        output: &DeviceOutput,
    ) -> Result<(), MoeError> {
        let (_, format) = self.sent_dispatch()?;
        let what = Dispatch {
            choices: Choices::default(),
            input: self.nothing(format),
            output: self.output(format, output)?,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch_dispatch(stream, &what, format, steps::COUNT | steps::RECEIVE) }
    }

    /// Sums what the experts made of the tokens and brings the sums back, as [`combine`](Self::combine), in one launch
    /// in the order of `stream`, which may be recording a graph; returns at once. `rows` is the address of what was laid
    /// out, in the group's type, and `output` that of this rank's tokens, `[tokens, hidden]`; both multiples of 16.
    ///
    /// # Errors
    /// As for [`dispatch_on`](Self::dispatch_on).
    ///
    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    pub unsafe fn combine_on(
        &mut self,
        stream: &Stream,
        rows: u64,
        weights: DeviceWeights,
        output: u64,
    ) -> Result<(), MoeError> {
        self.can_combine()?;
        let input = self.summing(rows, weights)?;
        let output = self.aligned("the memory of combined tokens", output)?;
        let all = steps::SEND | steps::RECEIVE;
        // SAFETY: the caller's promise.
        unsafe { self.launch_combine(stream, &input, output, all) }
    }

    /// Sums what the experts made of the tokens and sends the sums back, in the order of `stream`; returns at once.
    ///
    /// # Errors
    /// As for [`dispatch_on`](Self::dispatch_on).
    ///
    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    pub unsafe fn combine_send_on(
        &mut self,
        stream: &Stream,
        rows: u64,
        weights: DeviceWeights,
    ) -> Result<(), MoeError> {
        self.can_combine()?;
        let input = self.summing(rows, weights)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_combine(stream, &input, 0, steps::SEND) }
    }

    /// Brings what the combine that was sent brings, in the order of `stream`; returns at once.
    ///
    /// # Errors
    /// As for [`dispatch_on`](Self::dispatch_on).
    ///
    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    pub unsafe fn combine_complete_on(
        &mut self,
        stream: &Stream,
        output: u64,
    ) -> Result<(), MoeError> {
        let (_, gives_weights) = self.sent_combine()?;
        let output = self.aligned("the memory of combined tokens", output)?;
        let input = self.sums(combine_call(gives_weights, self.pass.top_k()));
        // SAFETY: the caller's promise.
        unsafe { self.launch_combine(stream, &input, output, steps::RECEIVE) }
    }

    /// How many rows came with the last dispatch, and where they lie. Blocks until `stream` has come to its end.
    ///
    /// # Errors
    /// As for [`Group::wait`]; [`MoeError::Usage`] if nothing was dispatched yet.
    pub fn counts_on(&mut self, stream: &Stream) -> Result<&Counts, MoeError> {
        if self.state == State::Routed {
            return Err(self.out_of_order("no counts have come; dispatch before"));
        }
        self.group.wait(stream)?;
        self.take_counts()?;
        self.counts()
    }

    /// The most rows that the last dispatch on a device can have brought, so what a combine's input must have: as many as
    /// it had room for, or, where that is known, as many as came.
    #[must_use]
    pub fn most_rows(&self) -> u64 {
        self.counts().map_or(self.capacity, Counts::rows)
    }

    /// Where the counts of the last dispatch are on the device, for whatever follows it on its stream.
    #[must_use]
    pub fn device_counts(&self) -> DeviceCounts {
        let routes = self.pass.routes();
        DeviceCounts {
            per_source: routes.received,
            per_source_and_expert: routes.counts,
            begins: routes.begins,
            offsets: routes.offsets,
            most_experts: self.group.tables().geometry().most_experts(),
        }
    }

    fn aligned(&self, name: &str, address: u64) -> Result<u64, MoeError> {
        self.aligned_to(PIECE, name, address)
    }

    fn aligned_to(&self, unit: u64, name: &str, address: u64) -> Result<u64, MoeError> {
        aligned(unit, name, address).map_err(|reason| self.group.usage(reason))
    }

    /// Makes a call of a pass of so many tokens, as which it is combined then; after an error it is one of as many as
    /// before.
    fn taking(
        &mut self,
        routing: &DeviceRouting,
        call: impl FnOnce(&mut Self, Choices) -> Result<(), MoeError>,
    ) -> Result<(), MoeError> {
        self.can_dispatch()?;
        let &DeviceRouting {
            experts,
            wide,
            weights,
            tokens,
            top_k,
        } = routing;
        let group = Arc::clone(&self.group);
        let unit = expert_bytes(wide);
        let experts = self.aligned_to(unit, "the memory of tokens' experts", experts)?;
        let weights = self.aligned_to(WORD, "the memory of tokens' weights", weights)?;
        let geometry = group.tables().geometry();
        let before = (self.pass.tokens(), self.pass.top_k());
        let taken = self.pass.resize(geometry, (tokens, top_k));
        taken.map_err(|reason| group.usage(reason))?;
        let choices = Choices {
            experts,
            weights,
            wide: wide.into(),
            reserved: 0,
        };
        let done = call(self, choices);
        if done.is_err() {
            // That fitted before.
            let _ = self.pass.resize(geometry, before);
        }
        done
    }

    /// What a launch sends that sends nothing.
    fn nothing(&self, format: Format) -> dispatch::Input {
        dispatch::Input {
            call: dispatch_call(format, self.pass.top_k()),
            ..dispatch::Input::default()
        }
    }

    fn input(&self, tokens: DeviceTokens) -> Result<dispatch::Input, MoeError> {
        let (hidden, dtype) = self.sizes();
        let format = tokens.format();
        let (elements, scales, quantise) = match tokens {
            DeviceTokens::Plain(elements) => (elements, 0, Quantise::No),
            DeviceTokens::Quantised {
                elements, scales, ..
            } => (elements, scales, Quantise::No),
            DeviceTokens::Quantise {
                elements,
                scale_type,
                powers_of_two,
            } => (elements, 0, quantise_to(scale_type, powers_of_two)),
        };
        if format != Format::Plain && !hidden.is_multiple_of(16) {
            return Err(self.group.usage(format!(
                "a hidden size of {hidden} in f8e4m3; it must be a multiple of 16"
            )));
        }
        let payload_bytes = format.token_bytes(hidden, dtype);
        let token_bytes = match quantise {
            Quantise::No => payload_bytes,
            _ => Format::Plain.token_bytes(hidden, dtype),
        };
        Ok(dispatch::Input {
            tokens: self.aligned("the memory of tokens", elements)?,
            scales,
            hidden: hidden.into(),
            token_bytes,
            payload_bytes,
            scale_bytes: format.scale_bytes(hidden),
            quantise,
            call: dispatch_call(format, self.pass.top_k()),
        })
    }

    fn output(&self, format: Format, output: &DeviceOutput) -> Result<dispatch::Output, MoeError> {
        let &DeviceOutput {
            tokens,
            rows,
            bounded,
            scales,
            experts,
            wide,
            weights,
            sources,
        } = output;
        let shape = self.output_shape(format)?;
        match (self.counts(), self.state) {
            (Ok(counts), State::DispatchSent { .. }) if rows < counts.rows() => {
                return Err(MoeError::Capacity {
                    rank: self.group.rank(),
                    rows: counts.rows(),
                    room: rows,
                });
            }
            (Ok(_), State::DispatchSent { .. }) => {}
            // Nobody knows yet how many come, whatever came before.
            _ if rows < shape.rows && !bounded => {
                let most = shape.rows;
                return Err(self.group.usage(format!(
                    "the output has room for {rows} rows; up to {most} can come: give room for these, wait for counts \
                     before, or say that no more come (bounded)"
                )));
            }
            _ => {}
        }
        let wrong = match (scales, shape.scale_row_bytes) {
            (0, 1..) => Some("no room for the scales of quantised tokens"),
            (1.., 0) => Some("room for scales, which tokens that are not quantised do not have"),
            _ if experts != 0 && shape.experts_per_row == 0 => {
                Some("room for experts, which are known of rows that are grouped by them")
            }
            _ => None,
        };
        if let Some(reason) = wrong {
            return Err(self.group.usage(reason.to_owned()));
        }
        // Scales are copied from and to anywhere, but between experts there are words of zeros.
        let of_scales = match self.layout() {
            Layout::ExpertPacked { .. } => WORD,
            _ => 1,
        };
        let unit = expert_bytes(wide);
        Ok(dispatch::Output {
            tokens: self.aligned("the memory of rows", tokens)?,
            scales: self.aligned_to(of_scales, "the memory of rows' scales", scales)?,
            experts: self.aligned_to(unit, "the memory of rows' experts", experts)?,
            weights: self.aligned_to(WORD, "the memory of rows' weights", weights)?,
            sources: self.aligned_to(WORD, "the memory of rows' sources", sources)?,
            capacity: rows.min(shape.rows),
            payload_bytes: shape.row_bytes,
            scale_bytes: shape.scale_row_bytes,
            wide: wide.into(),
        })
    }

    fn sums(&self, call: Call) -> combine::Input {
        let (hidden, dtype) = self.sizes();
        combine::Input {
            hidden: hidden.into(),
            payload_bytes: Format::Plain.token_bytes(hidden, dtype),
            call,
            ..combine::Input::default()
        }
    }

    fn summing(&self, rows: u64, weights: DeviceWeights) -> Result<combine::Input, MoeError> {
        let (weighting, address) = match weights {
            DeviceWeights::One => (Weighting::One, 0),
            _ if !self.layout().is_by_expert() => {
                return Err(self.group.usage(
                    "weights for rows that are not grouped by expert; apply them before, and take none here"
                        .to_owned(),
                ));
            }
            DeviceWeights::Dispatched => (Weighting::Dispatched, 0),
            DeviceWeights::Given(address) => (Weighting::Given, address),
        };
        let call = combine_call(weighting == Weighting::Given, self.pass.top_k());
        Ok(combine::Input {
            rows: self.aligned("the memory of rows", rows)?,
            weights: address,
            weighting,
            ..self.sums(call)
        })
    }

    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    unsafe fn launch_dispatch(
        &mut self,
        stream: &Stream,
        what: &Dispatch,
        format: Format,
        steps: u32,
    ) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        let launcher = group.launcher()?;
        let mut desk = group.desk()?;
        let number = match steps & steps::SEND {
            0 => {
                let (number, _) = self.sent_dispatch()?;
                self.next_to_complete(&desk, number)?;
                number
            }
            _ => self.next_to_send(&desk, steps & steps::RECEIVE != 0)?,
        };
        let launch = DispatchLaunch {
            group: *group.tables().program(),
            routes: *self.pass.routes(),
            choices: what.choices,
            input: what.input,
            output: what.output,
            context: launcher.guard.context(Duration::ZERO),
            steps,
            reserved: 0,
        };
        desk.signature = what.input.call.signature;
        for steps in group.together(steps) {
            group.run(stream, &mut desk, number, |context| {
                let launch = DispatchLaunch {
                    context,
                    steps,
                    ..launch
                };
                let parameter = [Argument::from(&launch)];
                let (kernel, shape) = (&launcher.dispatch, &launcher.shape);
                // SAFETY: this is the kernel's parameter; the tables live in the group, which the handle keeps, and the
                // pass; the rest is the caller's promise.
                unsafe { kernel.launch(stream, shape, &parameter) }
            })?;
        }
        if steps & steps::SEND != 0 {
            desk.sent += 1;
            self.state = State::DispatchSent { number, format };
            self.is_counted = false;
        }
        if steps & steps::RECEIVE != 0 {
            desk.completed += 1;
            self.state = State::Dispatched;
            self.capacity = what.output.capacity;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`dispatch_on`](Self::dispatch_on).
    unsafe fn launch_combine(
        &mut self,
        stream: &Stream,
        input: &combine::Input,
        output: u64,
        steps: u32,
    ) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        let launcher = group.launcher()?;
        let mut desk = group.desk()?;
        let gives_weights = input.weighting == Weighting::Given;
        let number = match steps & steps::SEND {
            0 => {
                let (number, _) = self.sent_combine()?;
                self.next_to_complete(&desk, number)?;
                number
            }
            _ => self.next_to_send(&desk, steps & steps::RECEIVE != 0)?,
        };
        let weights = match gives_weights {
            true => steps::WEIGHTS,
            false => 0,
        };
        let launch = CombineLaunch {
            group: *group.tables().program(),
            routes: *self.pass.routes(),
            input: *input,
            output,
            context: launcher.guard.context(Duration::ZERO),
            steps,
            reserved: 0,
        };
        desk.signature = input.call.signature;
        for steps in group.together(steps | weights) {
            group.run(stream, &mut desk, number, |context| {
                let launch = CombineLaunch {
                    context,
                    steps,
                    ..launch
                };
                let parameter = [Argument::from(&launch)];
                let (kernel, shape) = (&launcher.combine, &launcher.shape);
                // SAFETY: as for a dispatch.
                unsafe { kernel.launch(stream, shape, &parameter) }
            })?;
        }
        if steps & steps::SEND != 0 {
            desk.sent += 1;
            self.state = State::CombineSent {
                number,
                gives_weights,
            };
        }
        if steps & steps::RECEIVE != 0 {
            desk.completed += 1;
            self.state = State::Dispatched;
        }
        Ok(())
    }
}

/// How tokens are quantised to scales of a type.
pub(crate) const fn quantise_to(scale_type: ScaleType, powers_of_two: bool) -> Quantise {
    match (scale_type, powers_of_two) {
        (ScaleType::Ue8m0, _) => Quantise::Exponents,
        (ScaleType::F32, true) => Quantise::PowersOfTwo,
        (ScaleType::F32, false) => Quantise::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_misaligned_is_named() {
        assert_eq!(aligned(expert_bytes(false), "experts", 0x1004), Ok(0x1004));
        let reason = aligned(expert_bytes(true), "experts", 0x1004).unwrap_err();
        assert_eq!(
            reason,
            "experts is at 0x1004; it must be at a multiple of 8"
        );
        // What is not wanted.
        assert_eq!(aligned(PIECE, "weights", 0), Ok(0));
    }
}
