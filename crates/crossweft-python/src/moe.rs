//! Mixtures of experts: groups, handles, and how many tokens came. What outputs look like is `crossweft.moe`'s.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use crossweft_device::moe::{Geometry, Sizes};
use crossweft_hal::cuda::Stream;
use crossweft_moe::{
    Counts, DataType, DispatchOutput, Experts, ExpertsMut, Format, Group, GroupOptions, Handle,
    Layout, MoeError, OutputShape, Routing, ScaleType, Tokens, Weights,
};
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::error::Exception;
use crate::moe_cuda::Site;
use crate::own::Own;
use crate::plan;
use crate::tensor::Tensor;
use crate::wait::interruptible;

/// A tensor at `site` of one of these types; of the first, if its own says nothing.
fn tensor(
    site: Site,
    object: &Bound<'_, PyAny>,
    what: &str,
    dtypes: &[DataType],
) -> PyResult<Tensor> {
    let tensor = Tensor::new(object, what, None, None)?;
    site.check(&tensor, what)?;
    if dtypes.contains(&tensor.dtype) {
        return Ok(tensor);
    }
    let Some(&first) = dtypes.first() else {
        return Ok(tensor);
    };
    // All libraries have it, so integers are meant as numbers.
    if first == DataType::F32 && tensor.dtype != DataType::U8 {
        return Err(Exception::tensor(format!(
            "the {what} has elements of {}, not f32",
            tensor.dtype
        )));
    }
    // Bytes, and integers for what a library has no type for.
    Tensor::new(object, what, Some(first), None)
}

fn written(
    site: Site,
    object: &Bound<'_, PyAny>,
    what: &str,
    dtypes: &[DataType],
) -> PyResult<Tensor> {
    tensor(site, object, what, dtypes)?.writable(what)
}

const IDS: [DataType; 2] = [DataType::I32, DataType::I64];
const F32: [DataType; 1] = [DataType::F32];
const I32: [DataType; 1] = [DataType::I32];

fn scales_of(scale_type: ScaleType) -> &'static [DataType] {
    match scale_type {
        ScaleType::F32 => &[DataType::F32],
        _ => &[DataType::U8, DataType::I32],
    }
}

fn scale_type(name: &str) -> PyResult<(ScaleType, bool)> {
    match name {
        "f32" => Ok((ScaleType::F32, false)),
        "f32_powers_of_two" => Ok((ScaleType::F32, true)),
        "ue8m0" => Ok((ScaleType::Ue8m0, true)),
        name => Err(Exception::usage(format!(
            "there are no scales `{name}`; give \"f32\", \"f32_powers_of_two\" or \"ue8m0\""
        ))),
    }
}

/// Of no scales, that of plain tokens.
fn format(scales: Option<&str>) -> PyResult<Format> {
    Ok(match scales {
        None => Format::Plain,
        Some(name) => Format::F8E4M3(scale_type(name)?.0),
    })
}

fn layout(name: &str, alignment: u32) -> PyResult<Layout> {
    match name {
        "expert_major" => Ok(Layout::ExpertMajor),
        "expert_packed" => Ok(Layout::ExpertPacked { alignment }),
        "rank_major" => Ok(Layout::RankMajor),
        "flat" => Ok(Layout::Flat),
        name => Err(Exception::usage(format!(
            "there is no layout `{name}`; give \"expert_major\", \"expert_packed\", \"rank_major\" or \"flat\""
        ))),
    }
}

/// Where tokens go, as Python gives it.
pub(crate) struct Routed {
    pub(crate) experts: Tensor,
    pub(crate) top_k: u32,
    pub(crate) weights: Option<Tensor>,
}

impl Routed {
    fn new(
        site: Site,
        experts: &Bound<'_, PyAny>,
        top_k: u32,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let weights = weights.map(|weights| tensor(site, weights, "weights", &F32));
        Ok(Self {
            experts: tensor(site, experts, "experts", &IDS)?,
            top_k,
            weights: weights.transpose()?,
        })
    }

    /// How many tokens it is of.
    pub(crate) fn tokens(&self) -> u64 {
        let size = self.experts.dtype.size() as u64 * u64::from(self.top_k);
        self.experts.bytes.checked_div(size).unwrap_or_default()
    }

    fn routing(&self) -> Routing<'_> {
        let experts = &self.experts;
        Routing {
            experts: match experts.dtype {
                // SAFETY: nobody writes it during the call, which copies what it needs.
                DataType::I64 => Experts::I64(unsafe { experts.read_as() }),
                // SAFETY: as above.
                _ => Experts::I32(unsafe { experts.read_as() }),
            },
            top_k: self.top_k,
            // SAFETY: as above.
            weights: self.weights.as_ref().map(|w| unsafe { w.read_as() }),
        }
    }
}

/// What a dispatch sends.
pub(crate) struct Sent {
    pub(crate) tokens: Tensor,
    pub(crate) scales: Option<Tensor>,
    /// Scales of quantised tokens, and whether they are powers of two.
    pub(crate) scale_type: Option<(ScaleType, bool)>,
}

impl Sent {
    fn new(
        (site, own): (Site, DataType),
        tokens: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        quantise: Option<&str>,
    ) -> PyResult<Self> {
        let scale_type = quantise.map(scale_type).transpose()?;
        let Some(given) = scales else {
            return Ok(Self {
                tokens: tensor(site, tokens, "tokens", &[own])?,
                scales: None,
                scale_type,
            });
        };
        if scale_type.is_some() {
            return Err(Exception::usage(
                "tokens with scales are quantised already; give scales, or say how to quantise",
            ));
        }
        let scales = tensor(site, given, "scales", &[])?;
        let scale_type = match scales.dtype {
            DataType::F32 => ScaleType::F32,
            DataType::U8 | DataType::I32 => ScaleType::Ue8m0,
            dtype => {
                return Err(Exception::tensor(format!(
                    "the scales have elements of {dtype}; they can be f32, or ue8m0 in u8 or i32"
                )));
            }
        };
        Ok(Self {
            tokens: tensor(site, tokens, "tokens", &[DataType::F8E4M3])?,
            scales: Some(scales),
            scale_type: Some((scale_type, false)),
        })
    }

    /// How they travel.
    pub(crate) fn format(&self) -> Format {
        let of = |(scale_type, _)| Format::F8E4M3(scale_type);
        self.scale_type.map_or(Format::Plain, of)
    }

    fn tokens(&self) -> Tokens<'_> {
        // SAFETY: nobody writes them during the call, which copies them.
        let elements = unsafe { self.tokens.read() };
        match (&self.scales, self.scale_type) {
            (_, None) => Tokens::Plain(elements),
            (Some(scales), Some((scale_type, _))) => Tokens::Quantised {
                elements,
                // SAFETY: as above.
                scales: unsafe { scales.read() },
                scale_type,
            },
            (None, Some((scale_type, powers_of_two))) => Tokens::Quantise {
                elements,
                scale_type,
                powers_of_two,
            },
        }
    }
}

/// Where a dispatch lays out what comes. Each overlaps no other.
pub(crate) struct Received {
    pub(crate) tokens: Tensor,
    pub(crate) scales: Option<Tensor>,
    pub(crate) experts: Option<Tensor>,
    pub(crate) weights: Option<Tensor>,
    pub(crate) sources: Option<Tensor>,
}

/// The same as objects, in that order.
type Outputs<'a, 'py> = (
    &'a Bound<'py, PyAny>,
    [Option<&'a Bound<'py, PyAny>>; 4], // scales, experts, weights, sources
);

impl Received {
    fn new(
        (site, own): (Site, DataType),
        format: Format,
        (tokens, others): Outputs<'_, '_>,
    ) -> PyResult<Self> {
        let (dtype, of_scales) = match format {
            Format::F8E4M3(scale_type) => (DataType::F8E4M3, scales_of(scale_type)),
            _ => (own, scales_of(ScaleType::F32)),
        };
        let all = [
            ("room for scales", of_scales),
            ("room for experts", &IDS),
            ("room for weights", &F32),
            ("room for sources", &I32),
        ];
        let mut made = Vec::with_capacity(all.len());
        for ((what, dtypes), object) in all.into_iter().zip(others) {
            let room = object.map(|object| written(site, object, what, dtypes));
            made.push((what, room.transpose()?));
        }
        let tokens = written(site, tokens, "room for tokens", &[dtype])?;
        let whats = made
            .iter()
            .filter_map(|(what, t)| Some((*what, t.as_ref()?)));
        let rooms: Vec<_> = std::iter::once(("room for tokens", &tokens))
            .chain(whats)
            .collect();
        for (index, (what, room)) in rooms.iter().enumerate() {
            for (other, with) in &rooms[index + 1..] {
                if room.overlaps(with) {
                    return Err(Exception::tensor(format!("{what} and {other} overlap")));
                }
            }
        }
        let mut made = made.into_iter().map(|(_, tensor)| tensor);
        let mut next = || made.next().flatten();
        Ok(Self {
            tokens,
            scales: next(),
            experts: next(),
            weights: next(),
            sources: next(),
        })
    }

    /// Fails if what is sent lies where something is laid out.
    fn apart(self, sent: &Sent) -> PyResult<Self> {
        let rooms = [&self.scales, &self.experts, &self.weights, &self.sources];
        let rooms = rooms.into_iter().flatten().chain([&self.tokens]);
        let reads: Vec<_> = [&sent.tokens].into_iter().chain(&sent.scales).collect();
        for room in rooms {
            if reads.iter().any(|read| read.overlaps(room)) {
                return Err(Exception::tensor(
                    "what is sent and the room for what is received overlap",
                ));
            }
        }
        Ok(self)
    }

    fn output(&mut self) -> DispatchOutput<'_> {
        // SAFETY: nobody else uses any of them during the call; they overlap nothing.
        unsafe {
            DispatchOutput {
                tokens: self.tokens.write(),
                scales: self.scales.as_mut().map(|scales| scales.write()),
                experts: self.experts.as_mut().map(|experts| match experts.dtype {
                    DataType::I64 => ExpertsMut::I64(experts.write_as()),
                    _ => ExpertsMut::I32(experts.write_as()),
                }),
                weights: self.weights.as_mut().map(|weights| weights.write_as()),
                sources: self.sources.as_mut().map(|sources| sources.write_as()),
            }
        }
    }
}

/// What a combine is given.
pub(crate) struct Made {
    pub(crate) rows: Tensor,
    pub(crate) weights: Given,
}

pub(crate) enum Given {
    One,
    Dispatched,
    These(Tensor),
}

impl Made {
    fn new(
        (site, own): (Site, DataType),
        rows: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let weights = match weights {
            None => Given::One,
            Some(weights) => match weights.extract::<&str>() {
                Ok("dispatched") => Given::Dispatched,
                Ok(name) => {
                    return Err(Exception::usage(format!(
                        "there are no weights `{name}`; give \"dispatched\", a tensor, or none"
                    )));
                }
                Err(_) => Given::These(tensor(site, weights, "weights", &F32)?),
            },
        };
        let rows = tensor(site, rows, "rows", &[own])?;
        Ok(Self { rows, weights })
    }

    fn rows(&self) -> (&[u8], Weights<'_>) {
        // SAFETY: nobody writes it during the call.
        let rows = unsafe { self.rows.read() };
        let weights = match &self.weights {
            Given::One => Weights::One,
            Given::Dispatched => Weights::Dispatched,
            // SAFETY: as above.
            Given::These(weights) => Weights::Given(unsafe { weights.read_as() }),
        };
        (rows, weights)
    }
}

/// What all passes share.
#[pyclass(frozen, module = "crossweft")]
pub(crate) struct MoeGroup {
    communicator: Py<Communicator>,
    core: Own<Arc<Group>>,
}

impl MoeGroup {
    fn site(&self) -> Site {
        Site::of(self.communicator.get().endpoint().device())
    }

    fn failed(&self, error: &MoeError) -> PyErr {
        self.communicator.get().failed_moe(error)
    }
}

/// Rows, bytes of a row's elements and of its scales, experts of a row.
fn shape(shape: &OutputShape) -> (u64, u64, u64, u32) {
    let OutputShape {
        rows,
        row_bytes,
        scale_row_bytes,
        experts_per_row,
        ..
    } = *shape;
    (rows, row_bytes, scale_row_bytes, experts_per_row)
}

#[pymethods]
impl MoeGroup {
    #[new]
    #[pyo3(signature = (
        communicator, *, experts, max_tokens, hidden, top_k, dtype = None, blocks = None, timeout = None, masking = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python class")]
    fn new(
        py: Python<'_>,
        communicator: Py<Communicator>,
        experts: u32,
        max_tokens: u32,
        hidden: u32,
        top_k: u32,
        dtype: Option<&Bound<'_, PyAny>>,
        blocks: Option<u32>,
        timeout: Option<f64>,
        masking: bool,
    ) -> PyResult<Self> {
        let job = communicator.get();
        let mut options = GroupOptions::new(experts, max_tokens, hidden, top_k);
        options.dtype = plan::dtype(dtype)?.unwrap_or(options.dtype);
        options.blocks = blocks.unwrap_or(match Site::of(job.endpoint().device()) {
            Site::Host => 1,
            Site::Cuda(_) => 16,
        });
        options.masking = masking;
        options.timeout = timeout.map_or(Ok(job.limit()), plan::duration)?;
        job.here()?;
        let (endpoint, deadline) = (job.endpoint(), Instant::now() + job.limit());
        let made = interruptible(
            py,
            || Group::new(endpoint, options, deadline),
            |reason| job.abort_because(reason),
        )?;
        let core = made.map_err(|error| job.failed_moe(&error))?;
        let core = Own::new(core);
        Ok(Self { communicator, core })
    }

    /// What the memory that peers write into takes on each rank.
    #[staticmethod]
    #[pyo3(signature = (ranks, *, experts, max_tokens, hidden, top_k, dtype = None))]
    fn registered_bytes(
        ranks: u32,
        experts: u32,
        max_tokens: u32,
        hidden: u32,
        top_k: u32,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let dtype = plan::dtype(dtype)?.unwrap_or(DataType::Bf16);
        // Larger than what any group can be; smaller than what bytes of could not be counted.
        let sizes = [ranks, experts, max_tokens, hidden, top_k];
        let most = [1 << 10, 1 << 16, 1 << 17, 1 << 20, 1 << 10];
        if sizes
            .iter()
            .zip(most)
            .any(|(&size, most)| size == 0 || size > most)
        {
            return Err(Exception::usage(format!(
                "there can be no group of {ranks} ranks, {experts} experts, {max_tokens} tokens of {hidden} elements, \
                 top-{top_k}"
            )));
        }
        let geometry = Geometry::new(Sizes {
            ranks,
            max_tokens,
            top_k,
            experts,
            payload_bytes: Format::Plain.token_bytes(hidden, dtype),
            // Which take no less.
            lines: true,
        });
        Ok(geometry.bytes())
    }

    #[getter]
    fn communicator(&self, py: Python<'_>) -> Py<Communicator> {
        self.communicator.clone_ref(py)
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
    fn experts(&self) -> u32 {
        self.core.options().experts
    }

    #[getter]
    fn max_tokens(&self) -> u32 {
        self.core.options().max_tokens
    }

    #[getter]
    fn hidden(&self) -> u32 {
        self.core.options().hidden
    }

    #[getter]
    fn top_k(&self) -> u32 {
        self.core.options().top_k
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.core.options().dtype.name()
    }

    #[getter]
    fn masking(&self) -> bool {
        self.core.options().masking
    }

    #[getter]
    fn allocated_bytes(&self) -> u64 {
        self.core.allocated_bytes()
    }

    /// The experts of a rank: the first, and one past the last.
    #[pyo3(signature = (rank = None))]
    fn expert_bounds(&self, rank: Option<u32>) -> PyResult<(u32, u32)> {
        let (rank, ranks) = (rank.unwrap_or(self.core.rank()), self.core.world_size());
        if rank >= ranks {
            return Err(Exception::usage(format!(
                "there is no rank {rank}; there are {ranks}"
            )));
        }
        let experts = self.core.local_experts(rank);
        Ok((experts.start, experts.end))
    }

    #[getter]
    fn masked(&self) -> Vec<bool> {
        self.core.masked()
    }

    /// Fails if a launch on a device that has ended, ended badly.
    fn check(&self) -> PyResult<()> {
        match self.site() {
            Site::Host => Ok(()),
            Site::Cuda(_) => self.core.check().map_err(|error| self.failed(&error)),
        }
    }

    fn set_masked(&self, rank: u32, masked: bool) -> PyResult<()> {
        let done = self.core.set_masked(rank, masked);
        done.map_err(|error| self.failed(&error))
    }

    /// A handle of a pass.
    #[pyo3(signature = (experts, top_k, weights = None, *, layout = "expert_major", alignment = 1))]
    fn handle(
        this: &Bound<'_, Self>,
        experts: &Bound<'_, PyAny>,
        top_k: u32,
        weights: Option<&Bound<'_, PyAny>>,
        layout: &str,
        alignment: u32,
    ) -> PyResult<MoeHandle> {
        let group = this.get();
        let routed = Routed::new(group.site(), experts, top_k, weights)?;
        let layout = self::layout(layout, alignment)?;
        let made = match group.site() {
            Site::Host => group.core.handle(&routed.routing(), layout),
            Site::Cuda(_) => group.core.handle_on_device(layout),
        };
        Ok(MoeHandle {
            pass: Mutex::new(Pass {
                core: made.map_err(|error| group.failed(&error))?,
                format: Format::Plain,
                tokens: routed.tokens(),
                routed: Some(routed),
                stream: None,
            }),
            group: this.clone().unbind(),
        })
    }

    /// The most room that a dispatch takes here.
    #[pyo3(signature = (layout, top_k, *, alignment = 1, scales = None))]
    fn output_shape(
        &self,
        layout: &str,
        top_k: u32,
        alignment: u32,
        scales: Option<&str>,
    ) -> PyResult<(u64, u64, u64, u32)> {
        let layout = self::layout(layout, alignment)?;
        let found = self.core.output_shape(layout, format(scales)?, top_k);
        found
            .map(|found| shape(&found))
            .map_err(|error| self.failed(&error))
    }
}

/// A pass, and how its tokens travel.
pub(crate) struct Pass {
    pub(crate) core: Handle,
    /// Of the last dispatch.
    pub(crate) format: Format,
    pub(crate) tokens: u64,
    /// Where its tokens go, which a dispatch on a device takes along.
    routed: Option<Routed>,
    /// Of the last launch on a device.
    pub(crate) stream: Option<Stream>,
}

impl Pass {
    /// The most room that a dispatch of this routing takes, which a handle on a device does not know before.
    pub(crate) fn shape(&self, format: Format) -> Result<OutputShape, MoeError> {
        match &self.routed {
            Some(routed) => {
                let group = self.core.group();
                group.output_shape(self.core.layout(), format, routed.top_k)
            }
            None => self.core.output_shape(format),
        }
    }

    /// Where its tokens go.
    pub(crate) fn routed(&self) -> PyResult<&Routed> {
        let routed = self.routed.as_ref();
        routed.ok_or_else(|| Exception::usage("the handle has no routing; give it one"))
    }
}

/// One forward pass.
#[pyclass(frozen, module = "crossweft")]
pub(crate) struct MoeHandle {
    group: Py<MoeGroup>,
    pass: Mutex<Pass>,
}

impl MoeHandle {
    /// The pass, alone: a thread that waited here for another one would hold the interpreter.
    pub(crate) fn pass(&self) -> PyResult<MutexGuard<'_, Pass>> {
        self.group.get().core.here()?;
        match self.pass.try_lock() {
            Ok(pass) => Ok(pass),
            Err(TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => Err(Exception::usage(
                "another thread is in a call of this handle; make its calls one after the other",
            )),
        }
    }

    fn site(&self) -> Site {
        self.group.get().site()
    }

    /// Where tensors are, and the group's type.
    fn own(&self) -> (Site, DataType) {
        (self.site(), self.core().options().dtype)
    }

    pub(crate) fn core(&self) -> &Arc<Group> {
        &self.group.get().core
    }

    pub(crate) fn failed(&self, error: &MoeError) -> PyErr {
        self.group.get().failed(error)
    }

    /// The hidden size and the group's type.
    pub(crate) fn sizes(&self) -> (u32, DataType) {
        let options = self.core().options();
        (options.hidden, options.dtype)
    }

    /// A stream of the group's device, by its handle.
    pub(crate) fn stream(&self, handle: u64) -> PyResult<Stream> {
        self.group.get().communicator.get().stream(handle)
    }

    /// Does a call without holding the interpreter.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Pass) -> Result<T, MoeError> + Send,
    ) -> PyResult<T> {
        let mut pass = self.pass()?;
        let alone = &mut *pass;
        let done = py.detach(|| work(alone));
        done.map_err(|error| self.group.get().failed(&error))
    }
}

#[pymethods]
impl MoeHandle {
    #[getter]
    fn group(&self, py: Python<'_>) -> Py<MoeGroup> {
        self.group.clone_ref(py)
    }

    #[getter]
    fn allocated_bytes(&self) -> PyResult<u64> {
        Ok(self.pass()?.core.allocated_bytes())
    }

    /// Tokens of this rank.
    #[getter]
    fn tokens(&self) -> PyResult<u64> {
        Ok(self.pass()?.tokens)
    }

    /// Takes another pass's routing.
    #[pyo3(signature = (experts, top_k, weights = None))]
    fn route(
        &self,
        experts: &Bound<'_, PyAny>,
        top_k: u32,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let routed = Routed::new(self.site(), experts, top_k, weights)?;
        let mut pass = self.pass()?;
        let done = match self.site() {
            Site::Host => pass.core.route(&routed.routing()),
            Site::Cuda(_) => pass.core.route_on_device(),
        };
        done.map_err(|error| self.failed(&error))?;
        pass.tokens = routed.tokens();
        pass.routed = Some(routed);
        Ok(())
    }

    /// The most room that a dispatch takes.
    #[pyo3(signature = (*, scales = None))]
    fn output_shape(&self, scales: Option<&str>) -> PyResult<(u64, u64, u64, u32)> {
        let found = self.pass()?.shape(format(scales)?);
        found
            .map(|found| shape(&found))
            .map_err(|error| self.group.get().failed(&error))
    }

    /// How many rows the last dispatch brought.
    fn counts(&self, py: Python<'_>) -> PyResult<MoeCounts> {
        self.call(py, |pass| {
            // Of a pass on a device, they are copied once.
            let counts = match (&pass.stream, pass.core.counts().is_ok()) {
                (Some(stream), false) => pass.core.counts_on(stream),
                _ => pass.core.counts(),
            };
            counts.cloned().map(MoeCounts)
        })
    }

    /// Where the counts of the last dispatch are in device memory: rows of each rank for each local expert, and the
    /// first of those, `[ranks][most experts]` of u32; the most experts of any rank.
    fn device_counts(&self) -> PyResult<(u64, u64, u32)> {
        if self.site() == Site::Host {
            return Err(Exception::usage(
                "the group is on the CPU, which has no counts on a device; ask for counts()",
            ));
        }
        let counts = self.pass()?.core.device_counts();
        Ok((
            counts.per_source_and_expert,
            counts.begins,
            counts.most_experts,
        ))
    }

    /// Sends tokens and lays out what comes.
    #[pyo3(signature = (
        tokens, output, *, scales = None, quantise = None, output_scales = None, output_experts = None,
        output_weights = None, output_sources = None, bounded = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python method")]
    fn dispatch(
        &self,
        tokens: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        quantise: Option<&str>,
        output_scales: Option<&Bound<'_, PyAny>>,
        output_experts: Option<&Bound<'_, PyAny>>,
        output_weights: Option<&Bound<'_, PyAny>>,
        output_sources: Option<&Bound<'_, PyAny>>,
        bounded: bool,
    ) -> PyResult<()> {
        let sent = Sent::new(self.own(), tokens, scales, quantise)?;
        let format = sent.format();
        let others = [
            output_scales,
            output_experts,
            output_weights,
            output_sources,
        ];
        let received = Received::new(self.own(), format, (output, others))?;
        let mut received = received.apart(&sent)?;
        if self.site() != Site::Host {
            return self.dispatch_on_device(tokens.py(), &sent, (&received, bounded));
        }
        let (sending, output) = (sent.tokens(), received.output());
        self.call(tokens.py(), |pass| {
            let done = pass.core.dispatch(sending, output);
            if let Ok(()) | Err(MoeError::Capacity { .. }) = done {
                pass.format = format;
            }
            done
        })
    }

    /// Sends tokens.
    #[pyo3(signature = (tokens, *, scales = None, quantise = None))]
    fn dispatch_send(
        &self,
        tokens: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        quantise: Option<&str>,
    ) -> PyResult<()> {
        let sent = Sent::new(self.own(), tokens, scales, quantise)?;
        if self.site() != Site::Host {
            return self.dispatch_send_on_device(tokens.py(), &sent);
        }
        let sending = sent.tokens();
        self.call(tokens.py(), |pass| {
            pass.core.dispatch_send(sending)?;
            pass.format = sending.format();
            Ok(())
        })
    }

    /// Waits until it is known how many rows come.
    fn wait_for_counts(&self, py: Python<'_>) -> PyResult<MoeCounts> {
        self.call(py, |pass| {
            let counts = match &pass.stream {
                None => pass.core.wait_for_counts(),
                Some(stream) => pass.core.wait_for_counts_on(stream),
            };
            counts.cloned().map(MoeCounts)
        })
    }

    /// Lays out what comes.
    #[pyo3(signature = (output, *, scales = None, experts = None, weights = None, sources = None))]
    fn dispatch_complete(
        &self,
        output: &Bound<'_, PyAny>,
        scales: Option<&Bound<'_, PyAny>>,
        experts: Option<&Bound<'_, PyAny>>,
        weights: Option<&Bound<'_, PyAny>>,
        sources: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let format = self.pass()?.format;
        let others = [scales, experts, weights, sources];
        let mut received = Received::new(self.own(), format, (output, others))?;
        if self.site() != Site::Host {
            return self.dispatch_complete_on_device(output.py(), &received);
        }
        let room = received.output();
        self.call(output.py(), |pass| pass.core.dispatch_complete(room))
    }

    /// Sums rows and brings the sums back.
    #[pyo3(signature = (rows, output, *, weights = None))]
    fn combine(
        &self,
        rows: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let made = Made::new(self.own(), rows, weights)?;
        let mut output = written(self.site(), output, "output", &[self.own().1])?;
        let overlaps = |given: &Given| matches!(given, Given::These(t) if t.overlaps(&output));
        if made.rows.overlaps(&output) || overlaps(&made.weights) {
            return Err(Exception::tensor("input and output of a combine overlap"));
        }
        if self.site() != Site::Host {
            return self.combine_on_device(rows.py(), &made, &output);
        }
        let (summed, weights) = made.rows();
        // SAFETY: nobody else uses it during the call; it overlaps nothing.
        let output = unsafe { output.write() };
        self.call(rows.py(), |pass| pass.core.combine(summed, weights, output))
    }

    /// Sums rows and sends the sums.
    #[pyo3(signature = (rows, *, weights = None))]
    fn combine_send(
        &self,
        rows: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let made = Made::new(self.own(), rows, weights)?;
        if self.site() != Site::Host {
            return self.combine_send_on_device(rows.py(), &made);
        }
        let (summed, weights) = made.rows();
        self.call(rows.py(), |pass| pass.core.combine_send(summed, weights))
    }

    /// Brings the sums back.
    fn combine_complete(&self, output: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut to = written(self.site(), output, "output", &[self.own().1])?;
        if self.site() != Site::Host {
            return self.combine_complete_on_device(output.py(), &to);
        }
        // SAFETY: nobody else uses it during the call.
        let summed = unsafe { to.write() };
        self.call(output.py(), |pass| pass.core.combine_complete(summed))
    }
}

/// How many rows came, and where they lie.
#[pyclass(frozen, module = "crossweft")]
pub(crate) struct MoeCounts(Counts);

#[pymethods]
impl MoeCounts {
    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    #[getter]
    fn per_expert(&self) -> Vec<u32> {
        self.0.per_expert().to_vec()
    }

    #[getter]
    fn per_source(&self) -> Vec<u32> {
        self.0.per_source().to_vec()
    }

    #[getter]
    fn expert_offsets(&self) -> Vec<u32> {
        self.0.expert_offsets().to_vec()
    }

    /// The rows of an expert's tokens of a rank: the first, and one past the last.
    fn bounds(&self, expert: u32, source: u32) -> PyResult<(u32, u32)> {
        let range = self.0.range(expert, source).ok_or_else(|| {
            let (experts, sources) = (self.0.per_expert().len(), self.0.per_source().len());
            Exception::usage(format!(
                "there are no tokens of rank {source} for local expert {expert}; there are {sources} ranks and \
                 {experts} local experts"
            ))
        })?;
        Ok((range.start, range.end))
    }
}
