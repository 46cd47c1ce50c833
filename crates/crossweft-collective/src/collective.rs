//! Collectives that are ready to be called: a choice of algorithms, and their prepared plans.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_device::{DataType, ReduceOp};
use crossweft_executor::{Buffers, ExecutorError, Options, Prepared, Recorded, Scalar, Schedule};
use crossweft_hal as hal;
use crossweft_plan::Collective;

use crate::algorithm::Algorithm;
use crate::candidate::{Candidate, DeviceKind, Refusal, Request};
use crate::communicator::{Communicator, SymmetricBuffer};
use crate::error::CollectiveError;
use crate::explain::Explanation;
use crate::selection::{Selection, agree_on_choices};
use crate::selector::{Choice, Place, Selector};

/// Where the caller's buffers will be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Memory {
    /// Anywhere in the process: messages are staged.
    Private,
    /// In symmetric memory, from [`Communicator::allocate`]; both may be the same.
    Symmetric {
        /// What inputs lie in.
        input: SymmetricBuffer,
        /// What outputs lie in.
        output: SymmetricBuffer,
    },
}

/// What a collective is prepared for. The same on every rank, except for the schedule and the scalar.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CollectiveOptions {
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation; of no account where nothing is reduced.
    pub op: ReduceOp,
    /// What this rank's input is multiplied by before the sum, at first
    /// ([`set_scalar`](PreparedCollective::set_scalar) changes it); `None` for a plain reduction. Ranks agree on
    /// whether there is one, each has its own.
    pub pre_multiply: Option<Scalar>,
    /// Largest message in bytes: one block of input or output, of which there are as many as
    /// [`Collective::blocks`] says.
    pub max_bytes: u64,
    /// Where buffers will be.
    pub memory: Memory,
    /// One algorithm for every size; `None` leaves the choice to the selector.
    pub algorithm: Option<Algorithm>,
    /// Thread blocks of each rank; `None` leaves that to the selector.
    pub blocks: Option<u32>,
    /// Whether all calls will be in place, or none: some plans of the user's can only be chosen where that is known.
    pub in_place: Option<bool>,
    /// Whether sums must have the same bits whatever the size and the choice: see
    /// [`deterministic`](Self::deterministic).
    pub deterministic: bool,
    /// In which order thread blocks run.
    pub schedule: Schedule,
    /// Whether a GPU may run a plan by a kernel of its own, as usual, or is to use the executor for all, for tests and
    /// measurements.
    pub fused: bool,
}

/// What an all-reduce is prepared for.
pub type AllReduceOptions = CollectiveOptions;

impl CollectiveOptions {
    /// For collectives that reduce nothing: [`new`](Self::new) without an operation.
    #[must_use]
    pub fn copies(dtype: DataType, max_bytes: u64) -> Self {
        Self::new(dtype, ReduceOp::Sum, max_bytes)
    }

    /// Private buffers, algorithms as the selector chooses.
    #[must_use]
    pub fn new(dtype: DataType, op: ReduceOp, max_bytes: u64) -> Self {
        Self {
            dtype,
            op,
            pre_multiply: None,
            max_bytes,
            memory: Memory::Private,
            algorithm: None,
            blocks: None,
            in_place: None,
            deterministic: false,
            schedule: Schedule::default(),
            fused: true,
        }
    }

    /// A pre-multiplied sum: every element of this rank's input times `scalar`, rounded to the element type, before it
    /// is added to the others'. What NCCL calls `ncclRedOpCreatePreMulSum`. The input itself stays as it is.
    #[must_use]
    pub fn pre_multiplied(mut self, scalar: Scalar) -> Self {
        self.pre_multiply = Some(scalar);
        self
    }

    /// Buffers in symmetric memory.
    #[must_use]
    pub fn symmetric(mut self, input: &SymmetricBuffer, output: &SymmetricBuffer) -> Self {
        self.memory = Memory::Symmetric {
            input: input.clone(),
            output: output.clone(),
        };
        self
    }

    /// All calls will be in place, or none will.
    #[must_use]
    pub fn in_place(mut self, in_place: bool) -> Self {
        self.in_place = Some(in_place);
        self
    }

    /// Reduces every element at once, in rank order, rounded once to its type, whatever the size and whatever was
    /// measured: the same inputs give the same bits on every machine and in messages of every size. Results are the
    /// same on all ranks, and from call to call, without it too. Also for all of a communicator where
    /// [`CROSSWEFT_DETERMINISTIC`](crate::DETERMINISTIC_VARIABLE) is 1.
    #[must_use]
    pub fn deterministic(mut self) -> Self {
        self.deterministic = true;
        self
    }

    /// Always this algorithm.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// This many thread blocks, run in this order.
    #[must_use]
    pub fn blocks(mut self, blocks: u32, schedule: Schedule) -> Self {
        (self.blocks, self.schedule) = (Some(blocks), schedule);
        self
    }
}

impl Memory {
    /// Where buffers lie, for the selector.
    fn place(&self) -> Place {
        match self {
            Self::Private => Place::Private,
            Self::Symmetric { input, output }
                if Arc::ptr_eq(&input.registered(), &output.registered()) =>
            {
                Place::OneSymmetric
            }
            Self::Symmetric { .. } => Place::Symmetric,
        }
    }

    /// The same, for the executor.
    pub(crate) fn buffers(&self) -> Buffers {
        match self {
            Self::Private => Buffers::Private,
            Self::Symmetric { input, output } => Buffers::Registered {
                input: input.registered(),
                output: output.registered(),
            },
        }
    }
}

impl Request {
    /// What a communicator is asked for with these options.
    #[must_use]
    pub fn new(
        communicator: &Communicator,
        collective: Collective,
        options: &CollectiveOptions,
    ) -> Self {
        Self {
            collective,
            world_size: communicator.world_size(),
            dtype: options.dtype,
            op: options.op,
            place: options.memory.place(),
            in_place: options.in_place,
            device: DeviceKind::from(communicator.device()),
            max_bytes: options.max_bytes,
            most_blocks: communicator.endpoint().waiting_blocks(),
            deterministic: options.deterministic || communicator.selection().is_deterministic(),
        }
    }
}

/// What ranks must ask for alike, in words.
fn asked(request: &Request, options: &CollectiveOptions) -> String {
    let root = request.collective.root();
    let parts = [
        root.map(|root| format!("root {root}")),
        Some(format!("up to {} B", request.max_bytes)),
        request.in_place.map(|in_place| match in_place {
            true => "in place".to_owned(),
            false => "out of place".to_owned(),
        }),
        options.algorithm.map(|name| format!("algorithm {name}")),
        options.blocks.map(|n| format!("{n} thread blocks")),
        options.pre_multiply.map(|_| "pre-multiplied".to_owned()),
        request
            .deterministic
            .then(|| "sums in rank order".to_owned()),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    format!("{}, {}", request.describe(), parts.join(", "))
}

/// A collective that is ready to be called. Calls are local: they wait for the peers' data, but
/// allocate nothing.
///
/// A *message* is one block: all of the input of an all-reduce or a broadcast, what one rank brings to
/// an all-gather or a gather, what one gets from a reduce-scatter or a scatter, what one rank sends to
/// one other in an all-to-all. Inputs and outputs are one message or as many as there are ranks, by rank.
///
/// In place, the larger of input and output is given, with the smaller one as this rank's block of it.
#[derive(Debug)]
pub struct PreparedCollective {
    communicator: Communicator,
    collective: Collective,
    dtype: DataType,
    request: Request,
    /// What it was chosen by: the communicator may have another one since.
    selection: Arc<Selection>,
    /// Whether the caller has chosen instead.
    is_forced: bool,
    selector: Selector,
    /// One for each of all the selector's choices.
    prepared: Vec<Arc<Prepared>>,
}

/// An all-reduce that is ready to be called.
pub type AllReduce = PreparedCollective;

impl PreparedCollective {
    pub(crate) fn prepare(
        communicator: &Communicator,
        collective: Collective,
        options: CollectiveOptions,
    ) -> Result<Self, CollectiveError> {
        let request = Request::new(communicator, collective, &options);
        let selection = communicator.selection();
        let deadline = Instant::now() + communicator.timeout();
        let chosen = Self::choose(communicator.rank(), &request, &options, &selection);
        let what = match &chosen {
            Ok((_, plan)) => format!("preparing plan `{plan}`"),
            Err(_) => format!("preparing {}", collective.name()),
        };
        let endpoint = communicator.endpoint();
        // First of all, so that every rank hears of a difference; what is chosen, or refused, follows from it.
        endpoint.agree(&asked(&request, &options), &what, deadline)?;
        let (selector, _) = chosen?;
        let (described, source) = (request.describe(), selection.source());
        agree_on_choices(endpoint, (&described, &what), &selector, source, deadline)?;
        if communicator.rank() == 0 {
            let mut least = 0;
            for choice in selector.choices() {
                let (up_to, algorithm, reason) = (choice.up_to, &choice.algorithm, &choice.reason);
                tracing::info!(
                    "{}: {least} to {up_to} B: {algorithm} ({reason})",
                    request.describe()
                );
                least = up_to.saturating_add(1);
            }
        }
        Self::with_selector(communicator, collective, options, (selector, selection))
    }

    /// The choices for a request, and the name of the first plan.
    fn choose(
        rank: u32,
        request: &Request,
        options: &CollectiveOptions,
        selection: &Selection,
    ) -> Result<(Selector, String), CollectiveError> {
        let Request {
            collective,
            world_size,
            place,
            max_bytes,
            ..
        } = *request;
        let usage = |reason: String| {
            let reason = format!("{}: {reason}", collective.name());
            Err(CollectiveError::Usage { rank, reason })
        };
        if let Some(root) = collective.root()
            && root >= world_size
        {
            return usage(format!(
                "rank {root} is the root, but there are {world_size} ranks"
            ));
        }
        if options.pre_multiply.is_some() && !collective.reduces() {
            return usage("there is no sum to multiply inputs for".to_owned());
        }
        let mut selector = match options.algorithm {
            Some(algorithm) if algorithm.needs_registered() && place == Place::Private => {
                return Err(CollectiveError::NeedsSymmetric { algorithm });
            }
            Some(algorithm) => {
                let candidate = Candidate::from(algorithm);
                if candidate.refusal(request) == Some(Refusal::NotInRankOrder) {
                    return usage(format!("{algorithm}: {}", Refusal::NotInRankOrder));
                }
                Selector::forced(algorithm, collective, world_size, max_bytes)
            }
            None => selection.select(request),
        };
        if let Some(blocks) = options.blocks {
            selector.with_blocks(blocks);
        }
        let first = &selector.choices()[0];
        let first = first.algorithm.plan(collective, world_size, first.blocks)?;
        let name = first.name.clone();
        Ok((selector, name))
    }

    /// Prepares what a selector may choose, which comes from a selection. Collective.
    pub(crate) fn with_selector(
        communicator: &Communicator,
        collective: Collective,
        options: CollectiveOptions,
        (selector, selection): (Selector, Arc<Selection>),
    ) -> Result<Self, CollectiveError> {
        let request = Request::new(communicator, collective, &options);
        let is_forced = options.algorithm.is_some();
        let CollectiveOptions {
            dtype,
            op,
            pre_multiply,
            memory,
            schedule,
            fused,
            ..
        } = options;
        let buffers = memory.buffers();
        let deadline = Instant::now() + communicator.timeout();
        let is_same = |a: &Choice, b: &Choice| {
            let form = |of: &Choice| {
                let changes = of.algorithm.form_changes(&request);
                changes.is_some_and(|at| of.piece >= at)
            };
            (&a.algorithm, a.blocks, form(a)) == (&b.algorithm, b.blocks, form(b))
        };
        let all = selector.all();
        // What is chosen for several ranges of sizes is prepared once.
        let firsts = all.iter().map(|choice| {
            let found = all.iter().position(|other| is_same(other, choice));
            found.unwrap_or_default()
        });
        let firsts: Vec<usize> = firsts.collect();
        let mut plans = Vec::new();
        for (index, choice) in all.iter().enumerate() {
            if firsts[index] == index {
                let alike = all.iter().filter(|other| is_same(other, choice));
                let piece = alike.map(|other| other.piece).max().unwrap_or(0);
                let ranks = communicator.world_size();
                let plan = choice.algorithm.plan(collective, ranks, choice.blocks)?;
                let mut options = Options::new(dtype, op, piece);
                (options.buffers, options.schedule) = (buffers.clone(), schedule);
                options.fused = fused;
                options.pre_multiply = pre_multiply;
                plans.push((index, plan, options));
            }
        }
        let each: Vec<_> = plans
            .iter()
            .map(|(_, plan, options)| (&**plan, options.clone()))
            .collect();
        let made = Prepared::prepare_all(communicator.endpoint(), &each, deadline)?;
        let made: HashMap<usize, Arc<Prepared>> =
            plans.iter().map(|(index, ..)| *index).zip(made).collect();
        let prepared = firsts
            .iter()
            .map(|index| Arc::clone(&made[index]))
            .collect();
        Ok(Self {
            communicator: communicator.clone(),
            collective,
            dtype,
            request,
            selection,
            is_forced,
            selector,
            prepared,
        })
    }

    /// Sets what this rank's input is multiplied by in calls that begin from now on. Local: each rank may give
    /// another, and none needs to know of the others'. What was recorded into a graph keeps its scalar, or its
    /// scalar's address.
    ///
    /// # Errors
    /// [`CollectiveError::Usage`] if it was not prepared [with a scalar](CollectiveOptions::pre_multiplied).
    pub fn set_scalar(&self, scalar: Scalar) -> Result<(), CollectiveError> {
        for prepared in &self.prepared {
            let set = prepared.set_scalar(scalar);
            set.map_err(|_| self.usage("it was not prepared to multiply its input".to_owned()))?;
        }
        Ok(())
    }

    /// What it computes.
    #[must_use]
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// Runs it on private buffers. Blocks until `output` is complete. A buffer that the collective has no use
    /// for on this rank, as the output of a reduction elsewhere, may be empty.
    ///
    /// # Errors
    /// [`CollectiveError`]; after anything but [`CollectiveError::Usage`] the output is undefined.
    pub fn run(&self, input: &[u8], output: &mut [u8]) -> Result<(), CollectiveError> {
        let lengths = (input.len() as u64, output.len() as u64);
        let bytes = self.prepared[0].message_bytes(lengths.0, lengths.1);
        let bytes = bytes.map_err(|_| {
            let blocks = match self.blocks() {
                (1, 1) => String::new(),
                (i, o) => format!("; they must be {i} and {o} times the message"),
            };
            let (input, output) = lengths;
            self.usage(format!("input has {input} bytes, output {output}{blocks}"))
        })?;
        let (prepared, piece) = self.select(bytes)?;
        let limit = self.communicator.timeout();
        if bytes == 0 {
            return Ok(());
        }
        if bytes <= piece as u64 {
            return Ok(prepared.run(input, output, limit)?);
        }
        // Only where input and output are one block each.
        for start in (0..bytes as usize).step_by(piece) {
            // An empty buffer, which is of no use here, has empty pieces.
            let part = |length: usize| start.min(length)..(start + piece).min(length);
            let (from, to) = (part(input.len()), part(output.len()));
            prepared.run(&input[from], &mut output[to], limit)?;
        }
        Ok(())
    }

    /// Runs it on one buffer, the larger of input and output; the smaller one is this rank's block of it.
    /// Blocks until it is complete.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_in_place(&self, data: &mut [u8]) -> Result<(), CollectiveError> {
        let (input_blocks, output_blocks) = self.blocks();
        let blocks = input_blocks.max(output_blocks) as usize;
        if !data.len().is_multiple_of(blocks) {
            let length = data.len();
            return Err(self.usage(format!("{length} bytes are no {blocks} messages")));
        }
        let (prepared, piece) = self.select((data.len() / blocks) as u64)?;
        for part in data.chunks_mut(piece.saturating_mul(blocks)) {
            prepared.run_in_place(part, self.communicator.timeout())?;
        }
        Ok(())
    }

    /// Bytes of scratch memory that it holds on this rank.
    #[must_use]
    pub fn scratch_bytes(&self) -> u64 {
        self.prepared.iter().map(|plan| plan.scratch_bytes()).sum()
    }

    fn blocks(&self) -> (u32, u32) {
        let blocks = self.collective.blocks(self.communicator.world_size());
        blocks.unwrap_or((1, 1))
    }

    /// Runs it on messages of `bytes` bytes in symmetric memory, from `input_offset` of the input to
    /// `output_offset` of the output: the same offsets on every rank, and the same range or ranges
    /// that do not overlap. In place they are those of the one buffer. Blocks until this rank's output is complete and its input was read.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_symmetric(
        &self,
        input_offset: u64,
        output_offset: u64,
        bytes: u64,
    ) -> Result<(), CollectiveError> {
        self.in_pieces(bytes, |prepared, at, part, limit| {
            prepared.run_registered(input_offset + at, output_offset + at, part, limit)
        })
    }

    /// Runs it on messages of `bytes` bytes in private memory of this rank's device, from an offset of one memory to an
    /// offset of another: the same range or ranges that do not overlap. Blocks until the output is
    /// complete.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_at(
        &self,
        input: (&hal::Memory, u64),
        output: (&hal::Memory, u64),
        bytes: u64,
    ) -> Result<(), CollectiveError> {
        self.in_pieces(bytes, |prepared, at, part, limit| {
            let (from, to) = ((input.0, input.1 + at), (output.0, output.1 + at));
            prepared.run_at(from, to, part, limit)
        })
    }

    /// Has the plan for a message of `bytes` bytes run its pieces, one after another: from where, and how many bytes.
    fn in_pieces(
        &self,
        bytes: u64,
        run: impl Fn(&Prepared, u64, u64, Duration) -> Result<(), ExecutorError>,
    ) -> Result<(), CollectiveError> {
        let (prepared, piece) = self.select(bytes)?;
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(piece as u64);
            run(prepared, done, part, self.communicator.timeout())?;
            done += part;
        }
        Ok(())
    }

    /// Records `calls` calls of [`run_symmetric`](Self::run_symmetric) into a CUDA graph. `places` has the offsets of
    /// input and output; if there are several, calls take them in turn.
    ///
    /// # Errors
    /// As for [`run_symmetric`](Self::run_symmetric); also if this rank is not on a CUDA device, or there are no places.
    pub fn record_symmetric(
        &self,
        places: &[(u64, u64)],
        bytes: u64,
        calls: u32,
    ) -> Result<Recorded, CollectiveError> {
        let (prepared, piece) = self.select(bytes)?;
        let limit = self.communicator.timeout();
        Ok(prepared.record_registered(places, (bytes, piece as u64), calls, limit)?)
    }

    /// Records `calls` calls of [`run_at`](Self::run_at) into a CUDA graph, which keeps the memory. `places` is as for
    /// [`record_symmetric`](Self::record_symmetric).
    ///
    /// # Errors
    /// As for [`run_at`](Self::run_at); also if this rank is not on a CUDA device, or there are no places.
    pub fn record_at(
        &self,
        memory: (&Arc<hal::Memory>, &Arc<hal::Memory>),
        places: &[(u64, u64)],
        bytes: u64,
        calls: u32,
    ) -> Result<Recorded, CollectiveError> {
        let (prepared, piece) = self.select(bytes)?;
        let limit = self.communicator.timeout();
        Ok(prepared.record_at(memory, places, (bytes, piece as u64), calls, limit)?)
    }

    /// Whether every launch on a CUDA stream that has ended, ended well. Ask after the stream has come to its end.
    ///
    /// # Errors
    /// [`CollectiveError::Executor`] with the first wait that was ended on the device.
    pub fn check(&self) -> Result<(), CollectiveError> {
        for prepared in &self.prepared {
            prepared.check()?;
        }
        Ok(())
    }

    /// What is chosen for a message of `bytes` bytes, and why.
    #[must_use]
    pub fn explain(&self, bytes: u64) -> &Choice {
        &self.selector.all()[self.selector.select(bytes)]
    }

    /// All candidates for a message of `bytes` bytes, with times where they are known, and why each was chosen or not.
    #[must_use]
    pub fn explain_all(&self, bytes: u64) -> Explanation {
        let explained = Explanation::of(&self.request, bytes, &self.selection, &self.selector);
        match self.is_forced {
            true => explained.forced(self.explain(bytes)),
            false => explained,
        }
    }

    /// All choices.
    #[must_use]
    pub fn selector(&self) -> &Selector {
        &self.selector
    }

    /// All that it may choose among, each prepared.
    #[must_use]
    pub fn plans(&self) -> &[Arc<Prepared>] {
        &self.prepared
    }

    /// The prepared plan for a message of `bytes` bytes, and how many bytes of it are handled at a time: for
    /// callers who launch it themselves, piece after piece, as on a CUDA stream.
    ///
    /// # Errors
    /// [`CollectiveError::Usage`] if the size does not fit.
    pub fn select(&self, bytes: u64) -> Result<(&Arc<Prepared>, usize), CollectiveError> {
        let index = self.selector.select(bytes);
        let choice = &self.selector.all()[index];
        if bytes > choice.up_to {
            let max = choice.up_to;
            return Err(self.usage(format!("{bytes} bytes; it was prepared for up to {max}")));
        }
        // Here, so that no piece of a message is reduced before a bad tail is found.
        if !bytes.is_multiple_of(self.dtype.size() as u64) {
            return Err(self.usage(format!(
                "{bytes} bytes are no whole number of {}",
                self.dtype
            )));
        }
        Ok((&self.prepared[index], (choice.piece as usize).max(1)))
    }

    /// Ends the waits of all launches on a CUDA device, as [`Prepared::end_waits`] does.
    pub fn end_waits(&self) {
        self.prepared.iter().for_each(|plan| plan.end_waits());
    }

    fn usage(&self, reason: String) -> CollectiveError {
        CollectiveError::Usage {
            rank: self.communicator.rank(),
            reason: format!("{}: {reason}", self.collective.name()),
        }
    }
}
