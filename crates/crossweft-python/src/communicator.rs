//! Communicators, and what is prepared on them.

use std::collections::HashMap;
use std::mem::{forget, take};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crossweft_channel::Endpoint;
use crossweft_collective::{
    AllReduceRmsNorm, Collective, CollectiveOptions, Communicator as Core, CommunicatorOptions,
    DataType, Devices, Exchange, ExchangeOptions, Explanation, Place as Buffers,
    PreparedCollective, ReduceOp, Request, Scalar, collective_named,
};
use crossweft_executor::{ExecutorError, Options, RawBuffers, Stage, Staged};
use crossweft_hal::{Device, HalError, cuda};
use crossweft_moe::MoeError;
use crossweft_net::launch::Job;
use crossweft_net::{Bind, Cancel, NetError, Rendezvous, RendezvousOptions, UniqueId as CoreId};
use crossweft_plan::Plan as CorePlan;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{self, Exception};
use crate::exchange::{self, Call, Layout, Message, MessageGroup, Way};
use crate::own::Own;
use crate::plan::{self, Plan};
use crate::pool::{self, Places, Pool};
use crate::rms_norm;
use crate::slow::Slow;
use crate::tensor::{Place, Tensor};
use crate::wait::{Signals, detached, interruptible};
use crate::watch::{Launches, Watch};

fn net(error: &NetError) -> PyErr {
    error::net(error).into()
}

/// What a rank needs to join a job; whoever made it hosts the rendezvous.
#[pyclass(frozen, module = "crossweft")]
#[derive(Debug)]
pub(crate) struct UniqueId {
    id: CoreId,
    /// In the process that made it.
    _rendezvous: Option<Own<Rendezvous>>,
}

#[pymethods]
impl UniqueId {
    /// Starts a rendezvous on `bind` and makes its id.
    #[new]
    #[pyo3(signature = (*, bind = "loopback", port = 0, timeout = 600.0))]
    fn new(bind: &str, port: u16, timeout: f64) -> PyResult<Self> {
        let options = RendezvousOptions {
            bind: bind.parse::<Bind>().map_err(|error| net(&error))?,
            port,
            timeout: plan::duration(timeout)?,
        };
        let rendezvous = Rendezvous::start(&options).map_err(|error| net(&error))?;
        Ok(Self {
            id: rendezvous.unique_id(),
            _rendezvous: Some(Own::new(rendezvous)),
        })
    }

    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        let bytes = bytes.try_into().map_err(|_| {
            Exception::usage(format!("a unique id has 128 bytes, not {}", bytes.len()))
        })?;
        Ok(Self {
            id: CoreId::from_bytes(bytes).map_err(|error| net(&error))?,
            _rendezvous: None,
        })
    }

    #[staticmethod]
    fn from_text(text: &str) -> PyResult<Self> {
        Ok(Self {
            id: text.parse().map_err(|error: NetError| net(&error))?,
            _rendezvous: None,
        })
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.id.to_bytes())
    }

    fn __str__(&self) -> String {
        self.id.to_string()
    }

    fn __repr__(&self) -> String {
        // Without the secret: it ends up in logs.
        format!("<UniqueId at {}>", self.id.address())
    }

    fn __reduce__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let make = py.get_type::<Self>().getattr("from_bytes")?;
        Ok((make, (self.__bytes__(py),)))
    }
}

/// One rank of a job.
#[pyclass(frozen, module = "crossweft")]
#[derive(Debug)]
pub(crate) struct Communicator(Own<Rank>);

impl Deref for Communicator {
    type Target = Rank;

    fn deref(&self) -> &Rank {
        &self.0
    }
}

/// It, with what it has prepared.
#[derive(Debug)]
pub(crate) struct Rank {
    core: Core,
    signals: Signals,
    plans: Mutex<HashMap<PlanKey, Arc<Staged>>>,
    /// Those that larger ones have replaced: a GPU may still be working on their last launch.
    replaced: Mutex<Vec<Arc<Staged>>>,
    replaced_collectives: Mutex<Vec<Arc<Prepared>>>,
    collectives: Mutex<HashMap<CollectiveKey, Arc<Prepared>>>,
    rms_norms: Mutex<HashMap<rms_norm::Key, Arc<AllReduceRmsNorm>>>,
    replaced_rms_norms: Mutex<Vec<Arc<AllReduceRmsNorm>>>,
    exchange: Mutex<Option<Arc<Exchange>>>,
    /// Symmetric memory that tensors may lie in.
    pool: OnceLock<Arc<Pool>>,
    /// Of launches on streams, where there are any.
    watch: Option<Watch>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.get() {
            pool.abandon();
        }
        // They wait for their launches, while what is looked after still is.
        let this = &*self;
        detached(|| {
            drop((
                lock(&this.exchange).take(),
                take(&mut *lock(&this.plans)),
                take(&mut *lock(&this.replaced)),
                take(&mut *lock(&this.collectives)),
                take(&mut *lock(&this.replaced_collectives)),
                take(&mut *lock(&this.rms_norms)),
                take(&mut *lock(&this.replaced_rms_norms)),
            ));
        });
    }
}

/// What a plan is prepared for, apart from the size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    plan: String,
    dtype: DataType,
    op: ReduceOp,
    /// Whether it takes host buffers on a device that cannot reach them.
    staged: bool,
}

/// What a collective is prepared for, apart from the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CollectiveKey {
    collective: Collective,
    dtype: DataType,
    op: ReduceOp,
    /// Whether inputs are multiplied by a scalar.
    multiplies: bool,
    /// Whether calls are in place, where there are plans that could then be chosen.
    in_place: Option<bool>,
    /// Whether tensors lie in the pool.
    symmetric: bool,
}

/// How a collective reduces.
struct Reduction<'a, 'py> {
    op: &'a str,
    /// What this rank's input is multiplied by: a number, or a tensor of one element.
    scale: Option<&'a Bound<'py, PyAny>>,
}

#[derive(Debug)]
struct Prepared {
    call: PreparedCollective,
    max_bytes: u64,
}

impl Launches for Prepared {
    fn end_waits(&self) {
        self.call.end_waits();
    }
}

impl Launches for AllReduceRmsNorm {
    fn end_waits(&self) {
        AllReduceRmsNorm::end_waits(self);
    }
}

impl Launches for Exchange {
    fn end_waits(&self) {
        Exchange::end_waits(self);
    }
}

impl Launches for Staged {
    fn end_waits(&self) {
        Staged::end_waits(self);
    }
}

fn devices(name: &str, local_size: u32) -> PyResult<Devices> {
    let found = |devices: Result<Devices, cuda::CudaError>| {
        devices.map_err(|error| {
            Exception::new("DeviceError", format!("{error}; or use device=\"cpu\"")).into()
        })
    };
    match name {
        "cpu" => Ok(Devices::Cpu),
        "auto" => Ok(Devices::best(local_size)),
        "cuda" => found(Devices::cuda()),
        name => match name.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) => found(Devices::cuda_device(ordinal)),
            _ => Err(Exception::usage(format!(
                "there is no device `{name}`; give \"cpu\", \"cuda\", \"cuda:0\" and so on, or \"auto\""
            ))),
        },
    }
}

/// Room for the size that is asked for, and for somewhat larger ones.
fn room(bytes: u64) -> u64 {
    bytes
        .max(1 << 16)
        .checked_next_power_of_two()
        .unwrap_or(bytes)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Communicator {
    fn join(
        py: Python<'_>,
        join: impl FnOnce(Cancel) -> Result<Core, crossweft_collective::CollectiveError> + Send,
    ) -> PyResult<Self> {
        let cancel = Cancel::new().map_err(|error| net(&error))?;
        let given = cancel.clone();
        let core = interruptible(py, move || join(given), |reason| cancel.cancel(reason))?
            .map_err(|error| error::of_call(&error, None))?;
        let signals = Signals::default();
        let asked = signals.clone();
        core.interrupt_when(move || asked.ask());
        let watch = match core.device() {
            Device::Cuda(_) => Some(Watch::start(core.endpoint())?),
            _ => None,
        };
        Ok(Self(Own::new(Rank {
            core,
            signals,
            plans: Mutex::default(),
            replaced: Mutex::default(),
            replaced_collectives: Mutex::default(),
            collectives: Mutex::default(),
            rms_norms: Mutex::default(),
            replaced_rms_norms: Mutex::default(),
            exchange: Mutex::default(),
            pool: OnceLock::new(),
            watch,
        })))
    }

    /// Does something collective that is not a launch. Streams may be being captured meanwhile.
    fn together<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Core) -> Result<T, crossweft_collective::CollectiveError> + Send,
    ) -> PyResult<T> {
        self.here()?;
        let work = || match self.core.device() {
            // On the thread that does it.
            Device::Cuda(context) => {
                let relaxed = context.driver().aside_from_captures(|| work(&self.core));
                relaxed.unwrap_or_else(|error| Err(HalError::from(error).into()))
            }
            _ => work(&self.core),
        };
        let done = interruptible(py, work, |reason| self.core.abort(reason))?;
        done.map_err(|error| self.failed(&error))
    }

    /// Prepares something together with the others, and says so where it takes long.
    fn preparing<T: Send>(
        &self,
        py: Python<'_>,
        what: &str,
        work: impl FnOnce(&Core) -> Result<T, crossweft_collective::CollectiveError> + Send,
    ) -> PyResult<T> {
        let is_told = self.rank() == 0 && self.is_on_gpu();
        let told = is_told.then(|| Slow::new(format!("{what} on {}", self.device())));
        let done = self.together(py, work)?;
        if let Some(told) = told {
            told.done();
        }
        Ok(done)
    }

    fn watch<T: Launches + 'static>(&self, one: &Arc<T>) {
        if let Some(watch) = &self.watch {
            let one: Arc<dyn Launches> = Arc::<T>::clone(one);
            watch.add(Arc::downgrade(&one));
        }
    }

    /// The streams between all pairs. Collective if they are not there yet.
    pub(crate) fn exchange(&self, py: Python<'_>) -> PyResult<Exchange> {
        self.exchange_for(py, &ExchangeOptions::default())
    }

    fn exchange_for(&self, py: Python<'_>, options: &ExchangeOptions) -> PyResult<Exchange> {
        if let Some(found) = &*lock(&self.exchange) {
            return Ok(Exchange::clone(found));
        }
        let made = Arc::new(self.together(py, |core| core.exchange(options))?);
        self.watch(&made);
        Ok(Exchange::clone(lock(&self.exchange).get_or_insert(made)))
    }

    pub(crate) fn failed(&self, error: &crossweft_collective::CollectiveError) -> PyErr {
        self.signals.or(error::of_call(error, Some(&self.core)))
    }

    pub(crate) fn failed_moe(&self, error: &MoeError) -> PyErr {
        self.signals.or(error::of_moe(error, &self.core))
    }

    /// Refuses to be used by a process that was forked from the one that has joined.
    pub(crate) fn here(&self) -> PyResult<()> {
        self.0.here()
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        self.core.endpoint()
    }

    /// Ends the job.
    pub(crate) fn abort_because(&self, reason: &str) {
        self.core.abort(reason);
    }

    /// The plan, prepared for messages of `bytes` bytes at least. Collective if it is not there yet.
    fn prepared(
        &self,
        py: Python<'_>,
        plan: &Plan,
        (dtype, op, staged): (DataType, ReduceOp, bool),
        bytes: u64,
    ) -> PyResult<Arc<Staged>> {
        let key = PlanKey {
            plan: plan.key().to_owned(),
            dtype,
            op,
            staged,
        };
        if let Some(found) = lock(&self.plans).get(&key)
            && found.max_bytes() >= bytes
        {
            return Ok(Arc::clone(found));
        }
        plan.accepted(py)?;
        let prepared = self.prepare_plan(py, plan, (dtype, op, staged), room(bytes))?;
        let replaced = lock(&self.plans).insert(key, Arc::clone(&prepared));
        lock(&self.replaced).extend(replaced);
        Ok(prepared)
    }

    fn prepare_plan(
        &self,
        py: Python<'_>,
        plan: &Plan,
        (dtype, op, staged): (DataType, ReduceOp, bool),
        max_bytes: u64,
    ) -> PyResult<Arc<Staged>> {
        let options = Options::new(dtype, op, max_bytes);
        let stage = if staged {
            Stage::Always
        } else {
            Stage::WhereNeeded
        };
        let what = format!("preparing plan `{}` for {dtype}", plan.core.name);
        let prepared =
            self.preparing(py, &what, |core| core.prepare(&plan.core, options, stage))?;
        let prepared = Arc::new(prepared);
        self.watch(&prepared);
        Ok(prepared)
    }

    /// Prepares a collective if that has not been done, and calls it. `output` of none is in place.
    fn collective<'py>(
        &self,
        (collective, reduction): (Collective, Option<Reduction<'_, 'py>>),
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = input.py();
        // Where nothing is reduced, it does not matter.
        let op = reduction.as_ref().map(|reduction| reduction.op);
        let op = op.map_or(Ok(ReduceOp::Sum), plan::reduce_op)?;
        let scale = reduction.and_then(|reduction| reduction.scale);
        let mut operands = Operands::new(input, output, plan::dtype(dtype)?, stream)?;
        if !self.computes_on(operands.place())? {
            return Err(Exception::usage(format!(
                "the tensor is on the host, but this communicator computes on {}; copy the tensor there, or \
                 make a communicator of the CPU device",
                self.device()
            )));
        }
        let blocks = collective.blocks(self.core.world_size()).unwrap_or((1, 1));
        let bytes = self.message(collective, blocks, &operands)?;
        let dtype = operands.input.dtype;
        let scale = scale.map(|scale| Scale::new(scale, dtype, operands.place(), stream));
        let scale = scale.transpose()?;
        let has_plans = !self.core.selection().registry().plans().is_empty();
        let places = self.places(&operands)?;
        let key = CollectiveKey {
            collective,
            dtype,
            op,
            multiplies: scale.is_some(),
            in_place: has_plans.then_some(operands.output.is_none()),
            symmetric: places.is_some(),
        };
        let prepared = self.prepared_collective(py, (key, scale.as_ref()), bytes)?;
        self.launch_collective(py, &prepared.call, (&mut operands, places), bytes, stream)?;
        Ok(output.unwrap_or(input).clone())
    }

    /// Where operands lie in the pool, if there is one and both do: the same on every rank.
    fn places(&self, operands: &Operands) -> PyResult<Places> {
        let Some(pool) = self.pool.get() else {
            return Ok(None);
        };
        let offset = |tensor: &Tensor| pool.offset(tensor.address, tensor.bytes);
        let output = operands.output.as_ref().unwrap_or(&operands.input);
        let places = offset(&operands.input).zip(offset(output));
        let Some(other) = pool.note(places) else {
            return Ok(places);
        };
        let ours = places.map_or_else(|| "not both in the pool".to_owned(), Pool::describe);
        let message = format!(
            "rank {} has the tensors of this call {}, rank {} {ours}: ranks must allocate the same tensors from the pool, \
             and free them, in the same order",
            other.rank,
            Pool::describe(other.theirs),
            self.rank()
        );
        // The others may be in the call already.
        self.core.abort(&message);
        let mismatch = Exception::new("Mismatch", message).number("rank", self.rank());
        Err(mismatch.number("peer", other.rank).into())
    }

    /// Bytes of a message of tensors that must be as large as the collective says. One that it has no use for
    /// on this rank may be empty.
    fn message(
        &self,
        collective: Collective,
        (i, o): (u32, u32),
        operands: &Operands,
    ) -> PyResult<u64> {
        let input = operands.input.bytes;
        let Some(output) = &operands.output else {
            let blocks = u64::from(i.max(o));
            return match input.is_multiple_of(blocks) {
                true => Ok(input / blocks),
                false => Err(Exception::tensor(format!(
                    "the tensor has {input} bytes, which are no {blocks} blocks of one size"
                ))),
            };
        };
        let output = output.bytes;
        let is_root = collective.root() == Some(self.core.rank());
        let (needs_input, needs_output) = match collective {
            Collective::Broadcast { .. } | Collective::Scatter { .. } => (is_root, true),
            Collective::Reduce { .. } | Collective::Gather { .. } => (true, is_root),
            _ => (true, true),
        };
        let (i, o) = (u64::from(i), u64::from(o));
        let message = if needs_input { input / i } else { output / o };
        let fits = |bytes: u64, blocks: u64, is_needed: bool| {
            bytes == message * blocks || bytes == 0 && !is_needed
        };
        match fits(input, i, needs_input) && fits(output, o, needs_output) {
            true => Ok(message),
            false if (i, o) == (1, 1) => Err(Exception::tensor(format!(
                "the input has {input} bytes, the output {output}"
            ))),
            false => Err(Exception::tensor(format!(
                "the input has {input} bytes, the output {output}; they must be {i} and {o} blocks of one size"
            ))),
        }
    }

    /// A collective for messages of `bytes` bytes at least. Collective if it is not there yet.
    fn prepared_collective(
        &self,
        py: Python<'_>,
        (key, scale): (CollectiveKey, Option<&Scale>),
        bytes: u64,
    ) -> PyResult<Arc<Prepared>> {
        if let Some(found) = lock(&self.collectives).get(&key)
            && found.max_bytes >= bytes
        {
            if let Some(scale) = scale {
                let set = found.call.set_scalar(scale.scalar);
                set.map_err(|error| self.failed(&error))?;
            }
            return Ok(Arc::clone(found));
        }
        let max_bytes = room(bytes);
        let CollectiveKey {
            collective,
            dtype,
            op,
            in_place,
            symmetric,
            ..
        } = key;
        let mut options = CollectiveOptions::new(dtype, op, max_bytes);
        options.pre_multiply = scale.map(|scale| scale.scalar);
        options.in_place = in_place;
        if let Some(pool) = self.pool.get().filter(|_| symmetric) {
            options = options.symmetric(pool.buffer(), pool.buffer());
        }
        let what = format!("preparing {} of {dtype}", collective.name());
        let call = self.preparing(py, &what, |core| core.collective(collective, options))?;
        let prepared = Arc::new(Prepared { call, max_bytes });
        self.watch(&prepared);
        let replaced = lock(&self.collectives).insert(key, Arc::clone(&prepared));
        lock(&self.replaced_collectives).extend(replaced);
        Ok(prepared)
    }

    /// An all-reduce with normalisation of `tokens` tokens at least. Collective if it is not there yet.
    fn prepared_rms_norm(
        &self,
        py: Python<'_>,
        (key, tokens): (rms_norm::Key, usize),
    ) -> PyResult<Arc<AllReduceRmsNorm>> {
        if let Some(found) = lock(&self.rms_norms).get(&key)
            && found.options().max_tokens >= tokens
        {
            return Ok(Arc::clone(found));
        }
        let max_tokens = tokens.checked_next_power_of_two().unwrap_or(tokens);
        let options = key.options(max_tokens);
        let what = format!("preparing all-reduce and RMS norm of {}", options.dtype);
        let made = self.preparing(py, &what, |core| core.all_reduce_rms_norm(options))?;
        let made = Arc::new(made);
        self.watch(&made);
        let replaced = lock(&self.rms_norms).insert(key, Arc::clone(&made));
        lock(&self.replaced_rms_norms).extend(replaced);
        Ok(made)
    }

    /// Calls it on tensors whose messages have `bytes` bytes.
    fn launch_collective(
        &self,
        py: Python<'_>,
        call: &PreparedCollective,
        (operands, places): (&mut Operands, Places),
        bytes: u64,
        stream: Option<u64>,
    ) -> PyResult<()> {
        if operands.place() == Place::Host {
            refuse_stream(stream)?;
            let run = || match &mut operands.output {
                // SAFETY: nobody else uses them until the call has ended, or gets what comes of it; they do
                // not overlap.
                Some(output) => unsafe { call.run(operands.input.read(), output.write()) },
                // SAFETY: as above.
                None => unsafe { call.run_in_place(operands.input.write()) },
            };
            return py.detach(run).map_err(|error| self.failed(&error));
        }
        let stream = self.stream(stream.or(operands.input.stream).unwrap_or(0))?;
        let (input, output) = operands.addresses();
        let (prepared, piece) = call.select(bytes).map_err(|error| self.failed(&error))?;
        // In place, the smaller one is a block of the larger.
        let (own_input, own_output) = match operands.output {
            None => prepared.in_place_offsets(bytes),
            Some(_) => (0, 0),
        };
        let (input, output) = (input + own_input, output + own_output);
        // Peers reach registered memory by where it begins.
        let offsets = |done| places.map_or((0, 0), |(input, output)| (input + done, output + done));
        let launch = || {
            let mut done = 0;
            while done < bytes {
                let (input_offset, output_offset) = offsets(done);
                let buffers = RawBuffers {
                    input: input + done,
                    output: output + done,
                    input_offset,
                    output_offset,
                    bytes: (bytes - done).min(piece as u64),
                };
                // SAFETY: device memory of the tensors, contiguous, checked not to overlap; libraries keep
                // what is used on their streams, and what is prepared is kept by `self`, which waits for the stream before
                // it goes. The stream orders it.
                unsafe { prepared.launch_on_cuda(&stream, &buffers, self.limit()) }?;
                done += buffers.bytes;
            }
            Ok(())
        };
        py.detach(launch)
            .map_err(|error: ExecutorError| self.failed(&error.into()))
    }

    pub(crate) fn is_on_gpu(&self) -> bool {
        matches!(self.core.device(), Device::Cuda(_))
    }

    /// Whether `place` is where this rank computes; memory elsewhere that it can reach by copying is not.
    pub(crate) fn computes_on(&self, place: Place) -> PyResult<bool> {
        self.here()?;
        match (self.core.device(), place) {
            (Device::Cpu, Place::Host) => Ok(true),
            (Device::Cuda(_), Place::Host) => Ok(false),
            (Device::Cuda(context), Place::Cuda(ordinal))
                if ordinal.is_none_or(|ordinal| ordinal == context.device().ordinal()) =>
            {
                Ok(true)
            }
            (device, place) => Err(Exception::tensor(format!(
                "the tensor is on {place}, but this communicator computes on {}; make one with \
                 device=\"cuda\" that has the tensor's device, or copy the tensor to the host",
                describe(device)
            ))),
        }
    }

    pub(crate) fn limit(&self) -> Duration {
        self.core.timeout()
    }

    pub(crate) fn stream(&self, handle: u64) -> PyResult<cuda::Stream> {
        match self.core.device() {
            // SAFETY: what the tensor's library, or the caller, calls a stream of this device, and the driver refuses what is
            // none. Libraries keep theirs for good; callers are asked to keep theirs as long as the communicator.
            Device::Cuda(context) => Ok(unsafe { cuda::Stream::lasting(context, handle) }),
            _ => Err(Exception::usage(
                "a stream was given, but the communicator is on the CPU",
            )),
        }
    }

    /// Runs what is prepared on these tensors.
    fn launch(
        &self,
        py: Python<'_>,
        staged: &Staged,
        operands: &mut Operands,
        blocks: (u32, u32),
        stream: Option<u64>,
    ) -> PyResult<()> {
        let limit = self.limit();
        if operands.place() != Place::Host {
            let handle = stream.or(operands.input.stream).unwrap_or(0);
            let stream = self.stream(handle)?;
            let (input, output) = operands.addresses();
            let bytes = operands.message(blocks);
            // SAFETY: device memory of the tensors, contiguous, checked not to overlap; libraries keep what
            // is used on their streams. The launch is ordered by the stream, as everything of theirs is.
            let launched = py
                .detach(|| unsafe { staged.launch_on_cuda(&stream, input, output, bytes, limit) });
            return launched.map_err(|error| self.failed(&error.into()));
        }
        refuse_stream(stream)?;
        let run = || match &mut operands.output {
            // SAFETY: nobody else uses them until the call has ended, or gets what comes of it; they do not
            // overlap.
            Some(output) => unsafe { staged.run(operands.input.read(), output.write(), limit) },
            // SAFETY: as above.
            None => unsafe { staged.run_in_place(operands.input.write(), limit) },
        };
        py.detach(run).map_err(|error| self.failed(&error.into()))
    }
}

/// Host tensors are on no stream.
fn refuse_stream(stream: Option<u64>) -> PyResult<()> {
    match stream {
        None => Ok(()),
        Some(_) => Err(Exception::usage(
            "a stream was given, but the tensors are on the host",
        )),
    }
}

fn describe(device: &Device) -> String {
    match device {
        Device::Cuda(context) => format!("cuda:{}", context.device().ordinal()),
        device => device.name().to_owned(),
    }
}

/// What an input is multiplied by.
struct Scale {
    scalar: Scalar,
    /// Where it is, unless it is known by value.
    _tensor: Option<Tensor>,
}

impl Scale {
    /// A number, or a tensor of one element of `dtype` on the device of the input, which is at `place`.
    fn new(
        scale: &Bound<'_, PyAny>,
        dtype: DataType,
        place: Place,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        // Tensors have numbers as well, and would wait for their device to tell.
        if !scale.hasattr("__dlpack__")?
            && let Ok(value) = scale.extract::<f64>()
        {
            let scalar = Scalar::new(dtype, value);
            let scalar = scalar
                .ok_or_else(|| Exception::usage(format!("scale: {dtype} has no number {value}")))?;
            return Ok(Self {
                scalar,
                _tensor: None,
            });
        }
        let tensor = Tensor::new(scale, "scale", Some(dtype), stream)?;
        if tensor.bytes != dtype.size() as u64 {
            return Err(Exception::tensor(format!(
                "scale has {} bytes; give a number, or one element of {dtype}",
                tensor.bytes
            )));
        }
        if tensor.place == Place::Host {
            let mut word = [0; 8];
            // SAFETY: nobody else writes it during the call.
            word[..dtype.size()].copy_from_slice(unsafe { tensor.read() });
            return Ok(Self {
                scalar: Scalar::from_bits(u64::from_le_bytes(word)),
                _tensor: None,
            });
        }
        if tensor.place != place {
            return Err(Exception::tensor(format!(
                "the tensors are on {place}, scale is on {}",
                tensor.place
            )));
        }
        // SAFETY: device memory of one element, which its library keeps for what is on its stream.
        let scalar = unsafe { Scalar::at(tensor.address) };
        Ok(Self {
            scalar,
            _tensor: Some(tensor),
        })
    }
}

/// The tensors of a call.
struct Operands {
    input: Tensor,
    /// `None` if the call is in place.
    output: Option<Tensor>,
}

impl Operands {
    fn new(
        input: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        dtype: Option<DataType>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let input = Tensor::new(input, "input", dtype, stream)?;
        let Some(output) = output else {
            let input = input.writable("tensor of a call in place")?;
            return Ok(Self {
                input,
                output: None,
            });
        };
        let output = Tensor::new(output, "output", dtype, stream)?.writable("output")?;
        if output.dtype != input.dtype {
            return Err(Exception::tensor(format!(
                "the input has elements of {}, the output of {}",
                input.dtype, output.dtype
            )));
        }
        if output.place != input.place {
            return Err(Exception::tensor(format!(
                "the input is on {}, the output on {}",
                input.place, output.place
            )));
        }
        if (input.address, input.bytes) == (output.address, output.bytes) {
            return Ok(Self {
                input: output,
                output: None,
            });
        }
        if input.overlaps(&output) {
            return Err(Exception::tensor(
                "input and output overlap; give one tensor for a call in place",
            ));
        }
        Ok(Self {
            input,
            output: Some(output),
        })
    }

    fn place(&self) -> Place {
        self.input.place
    }

    fn addresses(&self) -> (u64, u64) {
        let output = self.output.as_ref().unwrap_or(&self.input);
        (self.input.address, output.address)
    }

    /// Bytes of the message, if all is as large as it should be; the executor finds out otherwise.
    fn message(&self, (input_blocks, output_blocks): (u32, u32)) -> u64 {
        let (bytes, blocks) = match &self.output {
            None => (self.input.bytes, input_blocks.max(output_blocks)),
            Some(_) if input_blocks > 0 => (self.input.bytes, input_blocks),
            Some(output) => (output.bytes, output_blocks),
        };
        bytes / u64::from(blocks.max(1))
    }
}

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (rank, world_size, unique_id, *, device = "cpu", timeout = 600.0))]
    fn new(
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        unique_id: &Bound<'_, UniqueId>,
        device: &str,
        timeout: f64,
    ) -> PyResult<Self> {
        let id = unique_id.get().id.clone();
        let timeout = plan::duration(timeout)?;
        // How many of the ranks share this host shows only once they have come together.
        let devices = devices(device, world_size)?;
        Self::join(py, move |cancel| {
            let options = CommunicatorOptions { timeout };
            Core::from_unique_id(&id, (rank, world_size), &devices, options, Some(cancel))
        })
    }

    #[staticmethod]
    #[pyo3(signature = (*, device = "cpu", timeout = 600.0))]
    fn from_env(py: Python<'_>, device: &str, timeout: f64) -> PyResult<Self> {
        let job =
            Job::detect(&|name: &str| std::env::var(name).ok()).map_err(|error| net(&error))?;
        let job = job.ok_or_else(|| {
            PyErr::from(Exception::new(
                "LaunchError",
                "no launcher has left its mark in the environment: start the ranks with torchrun, mpirun or \
                 srun, set CROSSWEFT_RANK, CROSSWEFT_WORLD_SIZE and CROSSWEFT_UNIQUE_ID, or give \
                 Communicator a unique id",
            ))
        })?;
        let timeout = plan::duration(timeout)?;
        let devices = devices(device, job.local_size)?;
        Self::join(py, move |cancel| {
            let options = CommunicatorOptions { timeout };
            Core::from_job(&job, &devices, options, Some(cancel))
        })
    }

    /// From a `torch.distributed` process group of any backend.
    #[staticmethod]
    #[pyo3(signature = (group = None, *, device = "cpu", timeout = 600.0, bind = None))]
    fn from_process_group<'py>(
        py: Python<'py>,
        group: Option<&Bound<'py, PyAny>>,
        device: &str,
        timeout: f64,
        bind: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let helper = py
            .import("crossweft._torch")?
            .getattr("from_process_group")?;
        helper.call1((group, device, timeout, bind))
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.core.rank()
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.core.world_size()
    }

    #[getter]
    fn device(&self) -> String {
        describe(self.core.device())
    }

    #[getter]
    fn timeout(&self) -> f64 {
        self.limit().as_secs_f64()
    }

    fn __repr__(&self) -> String {
        let (rank, size) = (self.rank(), self.world_size());
        format!("<Communicator: rank {rank} of {size} on {}>", self.device())
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// Leaves in good order; an error ends the job, or the others would wait for this rank.
    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if self.0.is_forked() {
            return Ok(());
        }
        if error.is_none() {
            self.core.leave();
        } else {
            let name = error.get_type().name()?;
            self.core.abort(&format!("{name}: {error}"));
        }
        Ok(())
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.together(py, Core::barrier)
    }

    fn all_gather_bytes<'py>(
        &self,
        py: Python<'py>,
        payload: &[u8],
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let all = self.together(py, |core| core.all_gather_bytes(payload))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Registers a plan beside the built-in algorithms.
    fn register(&self, py: Python<'_>, plan: &Plan) -> PyResult<()> {
        plan.accepted(py)?;
        let registered = CorePlan::clone(&plan.core);
        self.together(py, |core| core.register(registered, "Python"))?;
        // What is called next is chosen anew.
        let replaced = lock(&self.collectives)
            .drain()
            .map(|(_, old)| old)
            .collect::<Vec<_>>();
        lock(&self.replaced_collectives).extend(replaced);
        Ok(())
    }

    /// What a size takes, and why not something else.
    #[pyo3(signature = (
        collective, bytes, *, dtype = None, op = "sum", root = 0, in_place = None, symmetric = false
    ))]
    #[allow(clippy::too_many_arguments, reason = "Python's keywords")]
    fn explain<'py>(
        &self,
        py: Python<'py>,
        collective: &str,
        bytes: u64,
        dtype: Option<&Bound<'py, PyAny>>,
        op: &str,
        root: u32,
        in_place: Option<bool>,
        symmetric: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let found = collective_named(collective, root).ok_or_else(|| {
            Exception::usage(format!("there is no collective `{collective}` to call"))
        })?;
        let dtype = plan::dtype(dtype)?.unwrap_or(DataType::F32);
        let (i, o) = found.blocks(self.core.world_size()).unwrap_or((1, 1));
        let element = dtype.size() as u64;
        let message = bytes / u64::from(i.max(o)) / element * element;
        let mut options = CollectiveOptions::new(dtype, plan::reduce_op(op)?, message);
        options.in_place = in_place;
        let mut request = Request::new(&self.core, found, &options);
        if symmetric {
            request.place = Buffers::OneSymmetric;
        }
        let selection = self.core.selection();
        let explanation = py.detach(|| Explanation::new(&request, message, &selection));
        py.import("json")?
            .getattr("loads")?
            .call1((explanation.to_json(),))
    }

    /// Prepares what calls of up to `bytes` bytes, of the larger of input and output, need.
    #[pyo3(signature = (collective, bytes, *, dtype, op = "sum", root = 0))]
    fn prepare(
        &self,
        py: Python<'_>,
        collective: &str,
        bytes: u64,
        dtype: &Bound<'_, PyAny>,
        op: &str,
        root: u32,
    ) -> PyResult<()> {
        let found = collective_named(collective, root).ok_or_else(|| {
            Exception::usage(format!("there is no collective `{collective}` to call"))
        })?;
        let dtype = plan::dtype(Some(dtype))?.unwrap_or(DataType::F32);
        let (i, o) = found.blocks(self.core.world_size()).unwrap_or((1, 1));
        let has_plans = !self.core.selection().registry().plans().is_empty();
        let ways: &[_] = match has_plans {
            true => &[Some(true), Some(false)],
            false => &[None],
        };
        let places: &[_] = match self.pool.get() {
            Some(_) => &[false, true],
            None => &[false],
        };
        for &in_place in ways {
            for &symmetric in places {
                let key = CollectiveKey {
                    collective: found,
                    dtype,
                    op: plan::reduce_op(op)?,
                    multiplies: false,
                    in_place,
                    symmetric,
                };
                let message = bytes.div_ceil(u64::from(i.max(o)));
                self.prepared_collective(py, (key, None), message)?;
            }
        }
        Ok(())
    }

    /// Compiles the kernels of element types together with the other ranks.
    #[pyo3(name = "compile")]
    fn compile_kernels(&self, py: Python<'_>, dtypes: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let dtypes = dtypes.iter().map(|dtype| plan::dtype(Some(dtype)));
        let dtypes: Vec<DataType> = dtypes
            .filter_map(PyResult::transpose)
            .collect::<Result<_, _>>()?;
        let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        let what = format!("compiling kernels of {}", names.join(", "));
        self.preparing(py, &what, |core| core.compile(&dtypes))
    }

    /// Makes the pool of symmetric memory, of `bytes` bytes on every rank. Returns the names of the functions by which an
    /// allocator takes memory of it and gives it back.
    fn make_pool(&self, py: Python<'_>, bytes: u64) -> PyResult<(String, String)> {
        let context = pool::context(self.core.device()).ok_or_else(|| {
            Exception::usage(
                "a pool of symmetric memory is for torch's CUDA tensors, and this communicator is on the CPU",
            )
        })?;
        if self.pool.get().is_some() {
            return Err(Exception::usage("this communicator has a pool already"));
        }
        let made = self.together(py, |core| Pool::new(core, context, bytes))?;
        Ok(self.pool.get_or_init(|| made).functions())
    }

    /// The pool's address, its size and how much of it is in use, in bytes; none without a pool.
    #[getter]
    fn pool(&self) -> Option<(u64, u64, u64)> {
        let pool = self.pool.get()?;
        let (address, bytes) = pool.range();
        Some((address, bytes, pool.used()))
    }

    /// Raises what went wrong in launches on streams, once those have come to their end.
    fn check(&self) -> PyResult<()> {
        self.here()?;
        let collectives = lock(&self.collectives).values().cloned().collect();
        let replaced = lock(&self.replaced_collectives).clone();
        for prepared in Vec::<Arc<Prepared>>::into_iter(collectives).chain(replaced) {
            let checked = prepared.call.check();
            checked.map_err(|error| self.failed(&error))?;
        }
        let norms = lock(&self.rms_norms).values().cloned().collect();
        let replaced = lock(&self.replaced_rms_norms).clone();
        for norm in Vec::<Arc<AllReduceRmsNorm>>::into_iter(norms).chain(replaced) {
            norm.check().map_err(|error| self.failed(&error))?;
        }
        let plans = lock(&self.plans).values().cloned().collect();
        let replaced = lock(&self.replaced).clone();
        for staged in Vec::<Arc<Staged>>::into_iter(plans).chain(replaced) {
            let checked = staged.check();
            checked.map_err(|error| self.failed(&error.into()))?;
        }
        match &*lock(&self.exchange) {
            Some(exchange) => exchange.check().map_err(|error| self.failed(&error)),
            None => Ok(()),
        }
    }

    /// Raises why a rank will not do its part in what this one is doing, if it will not.
    fn check_peer(&self, peer: u32, doing: &str) -> PyResult<()> {
        self.here()?;
        let checked = self.core.check_peer(peer, doing);
        checked.map_err(|error| self.failed(&error))
    }

    fn abort(&self, reason: &str) -> PyResult<()> {
        self.here()?;
        self.core.abort(reason);
        Ok(())
    }

    fn leave(&self) -> PyResult<()> {
        self.here()?;
        self.core.leave();
        Ok(())
    }

    /// Reduces `input` of all ranks into `output`, or in place.
    #[pyo3(signature = (input, output = None, *, op = "sum", scale = None, dtype = None, stream = None))]
    fn all_reduce<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        op: &str,
        scale: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let what = (Collective::AllReduce, Some(Reduction { op, scale }));
        self.collective(what, input, output, dtype, stream)
    }

    /// Reduces tokens, adds them to the residual, normalises and quantises them.
    #[pyo3(signature = (
        input, weight, output, *, residual = None, epsilon = 1e-6, quantised = None, scale = None, per = "token",
        stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python method")]
    fn all_reduce_rms_norm<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        weight: &Bound<'py, PyAny>,
        output: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        epsilon: f32,
        quantised: Option<&Bound<'py, PyAny>>,
        scale: Option<&Bound<'py, PyAny>>,
        per: &str,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = input.py();
        let operands = rms_norm::Operands::new(input, weight, output, stream)?;
        let operands = operands.residual(residual)?;
        let mut operands = operands.quantised(quantised, scale, per)?.apart()?;
        if !self.computes_on(operands.place())? {
            return Err(Exception::usage(format!(
                "the tensors are on the host, but this communicator computes on {}; copy them there, or make a \
                 communicator of the CPU device",
                self.device()
            )));
        }
        let prepared = self.prepared_rms_norm(py, operands.key(epsilon))?;
        let done = match operands.place() {
            Place::Host => {
                refuse_stream(stream)?;
                py.detach(|| operands.run(&prepared))
            }
            Place::Cuda(_) => {
                let stream = self.stream(operands.stream())?;
                let buffers = operands.addresses(&prepared)?;
                let tokens = operands.tokens();
                let limit = self.limit();
                py.detach(|| rms_norm::launch(&prepared, (&buffers, tokens), &stream, limit))
            }
        };
        done.map_err(|error| self.failed(&error))?;
        Ok(output.clone())
    }

    /// Block `r` of every output is rank `r`'s input.
    #[pyo3(signature = (input, output = None, *, dtype = None, stream = None))]
    fn all_gather<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective((Collective::AllGather, None), input, output, dtype, stream)
    }

    /// Rank `r`'s output is the reduction of block `r` of all inputs.
    #[pyo3(signature = (input, output = None, *, op = "sum", scale = None, dtype = None, stream = None))]
    fn reduce_scatter<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        op: &str,
        scale: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective(
            (Collective::ReduceScatter, Some(Reduction { op, scale })),
            input,
            output,
            dtype,
            stream,
        )
    }

    /// Block `q` of rank `r`'s output is block `r` of rank `q`'s input.
    #[pyo3(signature = (input, output = None, *, dtype = None, stream = None))]
    fn all_to_all<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective((Collective::AllToAll, None), input, output, dtype, stream)
    }

    /// Every output is the root's input.
    #[pyo3(signature = (input, output = None, *, root = 0, dtype = None, stream = None))]
    fn broadcast<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        root: u32,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective(
            (Collective::Broadcast { root }, None),
            input,
            output,
            dtype,
            stream,
        )
    }

    /// The root's output is the reduction of all inputs.
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python method")]
    #[pyo3(signature = (input, output = None, *, root = 0, op = "sum", scale = None, dtype = None, stream = None))]
    fn reduce<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        root: u32,
        op: &str,
        scale: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective(
            (Collective::Reduce { root }, Some(Reduction { op, scale })),
            input,
            output,
            dtype,
            stream,
        )
    }

    /// Block `r` of the root's output is rank `r`'s input.
    #[pyo3(signature = (input, output = None, *, root = 0, dtype = None, stream = None))]
    fn gather<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        root: u32,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective(
            (Collective::Gather { root }, None),
            input,
            output,
            dtype,
            stream,
        )
    }

    /// Rank `r`'s output is block `r` of the root's input.
    #[pyo3(signature = (input, output = None, *, root = 0, dtype = None, stream = None))]
    fn scatter<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        root: u32,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.collective(
            (Collective::Scatter { root }, None),
            input,
            output,
            dtype,
            stream,
        )
    }

    /// Prepares what messages need, and reductions of these types on a GPU.
    #[pyo3(signature = (*, reduces = None))]
    fn prepare_messages(
        &self,
        py: Python<'_>,
        reduces: Option<Vec<Bound<'_, PyAny>>>,
    ) -> PyResult<()> {
        let mut options = ExchangeOptions::default();
        for dtype in reduces.iter().flatten() {
            if let Some(dtype) = plan::dtype(Some(dtype))? {
                options = options.reducing(dtype);
            }
        }
        self.exchange_for(py, &options).map(drop)
    }

    /// A group of sends and receives that are done together.
    fn group(this: Bound<'_, Self>) -> MessageGroup {
        MessageGroup::new(this.unbind())
    }

    /// Sends a message to `peer`.
    #[pyo3(signature = (tensor, peer, *, dtype = None, stream = None))]
    fn send(
        &self,
        tensor: &Bound<'_, PyAny>,
        peer: u32,
        dtype: Option<&Bound<'_, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let message = Message::new(Way::Send, tensor, peer, dtype)?;
        exchange::run(tensor.py(), self, &mut [message], stream)
    }

    /// Receives a message from `peer`.
    #[pyo3(signature = (tensor, peer, *, dtype = None, stream = None))]
    fn recv<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        peer: u32,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let message = Message::new(Way::Receive, tensor, peer, dtype)?;
        exchange::run(tensor.py(), self, &mut [message], stream)?;
        Ok(tensor.clone())
    }

    /// Block `r` of the input goes to rank `r`, block `r` of the output comes from there.
    #[pyo3(signature = (
        input, output, send_counts, recv_counts, *, send_displacements = None, recv_displacements = None,
        dtype = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's, by keyword")]
    fn all_to_all_v<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = exchange::numbers)] send_counts: Vec<u64>,
        #[pyo3(from_py_with = exchange::numbers)] recv_counts: Vec<u64>,
        #[pyo3(from_py_with = exchange::optional_numbers)] send_displacements: Option<Vec<u64>>,
        #[pyo3(from_py_with = exchange::optional_numbers)] recv_displacements: Option<Vec<u64>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let layout = |counts, displacements| Layout {
            counts,
            displacements,
        };
        let call = Call::AllToAll {
            sent: layout(send_counts, send_displacements),
            received: layout(recv_counts, recv_displacements),
        };
        exchange::collective(self, &call, input, output, dtype, stream)
    }

    /// Block `r` of every output is rank `r`'s input.
    #[pyo3(signature = (input, output, counts, *, displacements = None, dtype = None, stream = None))]
    fn all_gather_v<'py>(
        &self,
        input: Option<&Bound<'py, PyAny>>,
        output: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = exchange::numbers)] counts: Vec<u64>,
        #[pyo3(from_py_with = exchange::optional_numbers)] displacements: Option<Vec<u64>>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let layout = Layout {
            counts,
            displacements,
        };
        let call = match input {
            Some(_) => Call::AllGather(layout),
            None => Call::AllGatherInPlace(layout),
        };
        exchange::collective(self, &call, input.unwrap_or(output), output, dtype, stream)
    }

    /// Rank `r`'s output is the reduction of block `r` of all inputs.
    #[pyo3(signature = (
        input, output, counts, *, displacements = None, op = "sum", dtype = None, stream = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's, by keyword")]
    fn reduce_scatter_v<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = exchange::numbers)] counts: Vec<u64>,
        #[pyo3(from_py_with = exchange::optional_numbers)] displacements: Option<Vec<u64>>,
        op: &str,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let layout = Layout {
            counts,
            displacements,
        };
        let call = Call::ReduceScatter(layout, plan::reduce_op(op)?);
        exchange::collective(self, &call, input, output, dtype, stream)
    }

    /// Runs a plan, which is prepared when it is first seen.
    #[pyo3(signature = (plan, input, output = None, *, op = None, dtype = None, stream = None))]
    pub(crate) fn run<'py>(
        &self,
        plan: &Bound<'py, Plan>,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        op: Option<&str>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = input.py();
        let plan = plan.get();
        let op = plan.reduce_op_of(op)?;
        let mut operands = Operands::new(input, output, plan::dtype(dtype)?, stream)?;
        let staged = !self.computes_on(operands.place())?;
        let blocks = (plan.core.input_blocks, plan.core.output_blocks);
        let bytes = operands.message(blocks);
        let prepared = self.prepared(py, plan, (operands.input.dtype, op, staged), bytes)?;
        self.launch(py, &prepared, &mut operands, blocks, stream)?;
        Ok(output.unwrap_or(input).clone())
    }
}

/// A plan that is ready to be called.
#[pyclass(frozen, module = "crossweft")]
#[derive(Debug)]
pub(crate) struct PreparedPlan {
    communicator: Py<Communicator>,
    staged: Own<Arc<Staged>>,
    dtype: DataType,
    takes_host: bool,
    blocks: (u32, u32),
}

impl Drop for PreparedPlan {
    fn drop(&mut self) {
        if self.staged.is_forked() {
            return;
        }
        // Not where it goes itself, which holds the interpreter.
        let staged = &*self.staged;
        detached(|| {
            if staged.finish().is_err() {
                forget(Arc::clone(staged));
            }
        });
    }
}

#[pymethods]
impl PreparedPlan {
    /// Prepares a plan for messages of up to `max_bytes` bytes.
    #[new]
    #[pyo3(signature = (plan, communicator, *, dtype, max_bytes, op = None))]
    pub(crate) fn new(
        plan: &Bound<'_, Plan>,
        communicator: &Bound<'_, Communicator>,
        dtype: &Bound<'_, PyAny>,
        max_bytes: u64,
        op: Option<&str>,
    ) -> PyResult<Self> {
        let py = plan.py();
        let plan = plan.get();
        let op = plan.reduce_op_of(op)?;
        let dtype = plan::dtype(Some(dtype))?.unwrap_or(DataType::U8);
        plan.accepted(py)?;
        let owner = communicator.get();
        let takes_host = matches!(owner.core.device(), Device::Cpu);
        let staged = owner.prepare_plan(py, plan, (dtype, op, false), max_bytes)?;
        Ok(Self {
            communicator: communicator.clone().unbind(),
            staged: Own::new(staged),
            dtype,
            takes_host,
            blocks: (plan.core.input_blocks, plan.core.output_blocks),
        })
    }

    #[getter]
    fn max_bytes(&self) -> u64 {
        self.staged.max_bytes()
    }

    #[getter]
    fn staged(&self) -> bool {
        self.staged.is_staged()
    }

    #[pyo3(signature = (input, output = None, *, stream = None))]
    fn run<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let owner = self.communicator.get();
        let mut operands = Operands::new(input, output, Some(self.dtype), stream)?;
        if (operands.place() == Place::Host) != self.takes_host {
            return Err(Exception::tensor(format!(
                "the tensors are on {}, but the plan is prepared for those on {}",
                operands.place(),
                owner.device()
            )));
        }
        owner.computes_on(operands.place())?;
        owner.launch(input.py(), &self.staged, &mut operands, self.blocks, stream)?;
        Ok(output.unwrap_or(input).clone())
    }

    /// Raises what went wrong on a GPU, once its stream has come to its end.
    fn check(&self) -> PyResult<()> {
        let owner = self.communicator.get();
        self.staged
            .check()
            .map_err(|error| owner.failed(&error.into()))
    }
}
