//! Plans, and what the checker says of them.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossweft_collective::{Algorithm, CommunicatorOptions, Schedule, run_plan_in_threads};
use crossweft_device::{DataType, ReduceOp};
use crossweft_executor::Options;
use crossweft_plan::check;
use crossweft_plan::cost::{self, Topology};
use crossweft_plan::dsl::Sources;
use crossweft_plan::{InPlace, Plan as CorePlan, json, mscclpp, show};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::communicator::{Communicator, PreparedPlan};
use crate::error::{self, Exception};
use crate::tensor::Tensor;
use crate::wait::interruptible;

/// A fault of a plan, and where it shows.
#[pyclass(frozen, get_all, module = "crossweft")]
#[derive(Clone, Debug)]
pub(crate) struct Diagnostic {
    code: &'static str,
    message: String,
    rank: Option<u32>,
    thread_block: Option<u32>,
    op: Option<u32>,
    pub(crate) file: Option<String>,
    pub(crate) line: Option<u32>,
    pub(crate) other_file: Option<String>,
    pub(crate) other_line: Option<u32>,
    pub(crate) text: String,
}

impl From<check::Diagnostic> for Diagnostic {
    fn from(found: check::Diagnostic) -> Self {
        Self {
            text: found.to_string(),
            code: found.code.name(),
            message: found.message,
            rank: found.rank,
            thread_block: found.thread_block,
            op: found.op,
            file: None,
            line: None,
            other_file: None,
            other_line: None,
        }
    }
}

#[pymethods]
impl Diagnostic {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("<Diagnostic {}>", self.text)
    }
}

/// What the checker says of a plan.
#[pyclass(frozen, get_all, module = "crossweft")]
#[derive(Debug)]
pub(crate) struct Report {
    plan: String,
    diagnostics: Vec<Diagnostic>,
}

#[pymethods]
impl Report {
    #[getter]
    fn ok(&self) -> bool {
        self.diagnostics.is_empty()
    }

    fn __bool__(&self) -> bool {
        self.ok()
    }

    fn __str__(&self) -> String {
        if self.ok() {
            return format!("plan `{}` is correct", self.plan);
        }
        let mut text = format!("plan `{}` is not correct:", self.plan);
        for diagnostic in &self.diagnostics {
            text += "\n  ";
            text += &diagnostic.text;
        }
        text
    }

    fn __repr__(&self) -> String {
        format!("<Report: {self}>", self = self.__str__())
    }
}

impl Report {
    pub(crate) fn new(plan: &str, diagnostics: Vec<Diagnostic>) -> Self {
        Self {
            plan: plan.to_owned(),
            diagnostics,
        }
    }

    /// The exception with all of it.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        let raise = || -> PyResult<PyErr> {
            let class = error::class(py, "CheckError")?;
            let value = class.call1((self.__str__(), self.diagnostics.clone()))?;
            Ok(PyErr::from_value(value))
        };
        raise().unwrap_or_else(|error| error)
    }
}

/// A communication plan.
#[pyclass(frozen, module = "crossweft")]
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) core: Arc<CorePlan>,
    warnings: Vec<String>,
    /// The lines of the program that it was compiled from.
    sources: Option<Arc<Sources>>,
    hash: OnceLock<String>,
    faults: OnceLock<Vec<check::Diagnostic>>,
}

impl Plan {
    /// A plan that was compiled, and so checked.
    pub(crate) fn compiled(core: CorePlan, sources: Arc<Sources>) -> Self {
        Self {
            sources: Some(sources),
            faults: OnceLock::from(Vec::new()),
            ..Self::new(core, Vec::new())
        }
    }

    fn new(core: CorePlan, warnings: Vec<String>) -> Self {
        Self {
            core: Arc::new(core),
            warnings,
            sources: None,
            hash: OnceLock::new(),
            faults: OnceLock::new(),
        }
    }

    fn import(text: &[u8]) -> PyResult<Self> {
        let mscclpp::Imported { plan, warnings } =
            mscclpp::import(text).map_err(|error| error::plan(&error))?;
        Ok(Self::new(plan, warnings))
    }

    fn read(text: &[u8]) -> PyResult<Self> {
        let plan = CorePlan::from_json(text).map_err(|error| error::plan(&error))?;
        Ok(Self::new(plan, Vec::new()))
    }

    /// What distinguishes it from other plans.
    pub(crate) fn key(&self) -> &str {
        self.hash.get_or_init(|| self.core.content_hash())
    }

    fn faults(&self, py: Python<'_>) -> &[check::Diagnostic] {
        // Whoever comes second waits for it without holding the interpreter.
        py.detach(|| {
            self.faults
                .get_or_init(|| check::check(&self.core, &check::Options::default()))
        })
    }

    fn report(&self, py: Python<'_>) -> Report {
        let faults = self.faults(py).iter().cloned();
        Report::new(&self.core.name, faults.map(Diagnostic::from).collect())
    }

    /// Fails unless the checker accepts it.
    pub(crate) fn accepted(&self, py: Python<'_>) -> PyResult<()> {
        if self.faults(py).is_empty() {
            return Ok(());
        }
        Err(self.report(py).raise(py))
    }

    /// The line of every operation, in words.
    fn lines(&self, sources: &Sources) -> HashMap<(u32, u32, u32), String> {
        let mut lines = HashMap::new();
        for (rank, program) in (0..).zip(&self.core.ranks) {
            for (block, ops) in (0..).zip(&program.blocks) {
                for (op, _) in (0..).zip(ops) {
                    if let Some(source) = sources.get(rank, block, op, None) {
                        lines.insert((rank, block, op), source.to_string());
                    }
                }
            }
        }
        lines
    }

    /// The operation of a call: the caller's, the plan's, or sum.
    pub(crate) fn reduce_op_of(&self, op: Option<&str>) -> PyResult<ReduceOp> {
        match op {
            Some(name) => reduce_op(name),
            None => Ok(self.core.reduce_op.unwrap_or(ReduceOp::Sum)),
        }
    }
}

/// A reduce operation by name.
pub(crate) fn reduce_op(name: &str) -> PyResult<ReduceOp> {
    ReduceOp::from_name(name).ok_or_else(|| {
        let names = ReduceOp::ALL.map(ReduceOp::name).join(", ");
        Exception::usage(format!(
            "there is no reduce operation `{name}`; there are {names}"
        ))
    })
}

/// An element type by name: a word, or anything whose last word is one, such as `torch.bfloat16`, numpy's
/// `dtype('float32')` or `numpy.float32`.
pub(crate) fn dtype(object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<DataType>> {
    let Some(object) = object else {
        return Ok(None);
    };
    let name: String = match object.cast::<PyString>() {
        Ok(name) => name.to_string(),
        Err(_) => match object
            .getattr("name")
            .or_else(|_| object.getattr("__name__"))
        {
            Ok(name) => name.extract()?,
            Err(_) => object.str()?.to_string(),
        },
    };
    let word = name.rsplit('.').next().unwrap_or(&name);
    DataType::from_common_name(word).map(Some).ok_or_else(|| {
        let names = DataType::ALL.map(DataType::name).join(", ");
        Exception::usage(format!(
            "there is no element type `{name}`; there are {names}"
        ))
    })
}

/// The text of a plan: `str` or `bytes`.
fn text_of(text: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    match text.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes().to_vec()),
        Err(_) => Ok(text.extract::<String>()?.into_bytes()),
    }
}

#[pymethods]
impl Plan {
    #[staticmethod]
    fn from_json(text: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::read(&text_of(text)?)
    }

    #[staticmethod]
    fn from_mscclpp(text: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::import(&text_of(text)?)
    }

    /// A plan file of either format.
    #[staticmethod]
    fn from_file(path: PathBuf) -> PyResult<Self> {
        let mut text = Vec::new();
        // Whatever the file claims to be: no more than a plan may have.
        std::fs::File::open(&path)
            .and_then(|file| file.take(json::MAX_BYTES as u64 + 1).read_to_end(&mut text))
            .map_err(|error| os_error(&error, &path))?;
        if mscclpp::is_mscclpp(&text) {
            Self::import(&text)
        } else {
            Self::read(&text)
        }
    }

    /// The plan of a built-in all-reduce.
    #[staticmethod]
    #[pyo3(signature = (algorithm, ranks, *, thread_blocks = 1))]
    fn all_reduce(algorithm: &str, ranks: u32, thread_blocks: u32) -> PyResult<Self> {
        let found = Algorithm::from_name(algorithm).ok_or_else(|| {
            let names = Algorithm::ALL.map(Algorithm::name).join(", ");
            Exception::usage(format!(
                "there is no algorithm `{algorithm}`; there are {names}"
            ))
        })?;
        let plan = found
            .plan(ranks, thread_blocks)
            .map_err(|error| error::plan(&error))?;
        Ok(Self::new(plan, Vec::new()))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.core.name
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.core.world_size()
    }

    #[getter]
    fn collective(&self) -> &'static str {
        self.core.collective.name()
    }

    #[getter]
    fn reduce_op(&self) -> Option<&'static str> {
        self.core.reduce_op.map(ReduceOp::name)
    }

    #[getter]
    fn in_place(&self) -> &'static str {
        match self.core.in_place {
            InPlace::Any => "any",
            InPlace::Required => "required",
            InPlace::Forbidden => "forbidden",
        }
    }

    #[getter]
    fn input_blocks(&self) -> u32 {
        self.core.input_blocks
    }

    #[getter]
    fn output_blocks(&self) -> u32 {
        self.core.output_blocks
    }

    #[getter]
    fn thread_blocks(&self) -> usize {
        let blocks = self.core.ranks.iter().map(|rank| rank.blocks.len());
        blocks.max().unwrap_or(0)
    }

    #[getter]
    fn operations(&self) -> usize {
        self.core.all_ops().count()
    }

    #[getter]
    fn message_bytes(&self) -> (u64, u64) {
        self.core.message_bytes
    }

    #[getter]
    fn message_multiple(&self) -> u64 {
        self.core.message_multiple()
    }

    #[getter]
    fn content_hash(&self) -> &str {
        self.key()
    }

    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Self>()
            .is_ok_and(|other| other.get().core == self.core)
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.key().hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let (collective, ranks) = (self.collective(), self.ranks());
        format!("<Plan `{}`: {collective} of {ranks} ranks>", self.core.name)
    }

    /// The line that an operation was compiled from.
    fn source(&self, rank: u32, thread_block: u32, op: u32) -> Option<(String, u32)> {
        let source = self.sources.as_ref()?.get(rank, thread_block, op, None)?;
        Some((source.file.to_string(), source.line))
    }

    fn to_json(&self) -> String {
        self.core.to_json()
    }

    fn to_mscclpp(&self) -> PyResult<String> {
        Ok(mscclpp::export(&self.core).map_err(|error| error::plan(&error))?)
    }

    /// The plan as a page.
    #[pyo3(signature = (*, topology = "h200", bytes = Vec::new()))]
    fn to_html(&self, py: Python<'_>, topology: &str, bytes: Vec<u64>) -> PyResult<String> {
        let topology = self::topology(topology)?;
        let mut options = show::Options::default();
        options.bytes = bytes;
        if let Some(sources) = &self.sources {
            options.sources = self.lines(sources);
        }
        let faults = self.faults(py);
        let page = py.detach(|| show::page(&self.core, faults, &topology, &options));
        match page {
            Ok(page) => Ok(page.html),
            Err(error) => Err(Exception::new("PlanError", error.to_string()).into()),
        }
    }

    /// Writes the page and returns its path.
    #[pyo3(signature = (path = None, *, topology = "h200", bytes = Vec::new()))]
    fn show(
        &self,
        py: Python<'_>,
        path: Option<PathBuf>,
        topology: &str,
        bytes: Vec<u64>,
    ) -> PyResult<String> {
        let html = self.to_html(py, topology, bytes)?;
        let path = match path {
            Some(path) => path,
            None => {
                let words = PyDict::new(py);
                words.set_item("suffix", ".html")?;
                words.set_item("prefix", "crossweft-")?;
                let make = py.import("tempfile")?.getattr("mkstemp")?;
                let (file, path): (i32, PathBuf) = make.call((), Some(&words))?.extract()?;
                py.import("os")?.getattr("close")?.call1((file,))?;
                path
            }
        };
        std::fs::write(&path, html).map_err(|error| os_error(&error, &path))?;
        Ok(path.display().to_string())
    }

    /// In a notebook: the page in a frame of its own.
    fn _repr_html_(&self, py: Python<'_>) -> PyResult<String> {
        let page = self.to_html(py, "h200", Vec::new())?;
        let page = page.replace('&', "&amp;").replace('"', "&quot;");
        Ok(format!(
            "<iframe sandbox=\"allow-scripts\" srcdoc=\"{page}\" style=\"width:100%;height:600px;border:0\"></iframe>"
        ))
    }

    /// Predicted microseconds of a message of `bytes` bytes.
    #[pyo3(signature = (bytes, *, topology = "h200"))]
    fn predict(&self, bytes: u64, topology: &str) -> PyResult<Option<f64>> {
        let topology = self::topology(topology)?;
        match cost::predict(&self.core, &topology, bytes) {
            Ok(timeline) => Ok(timeline.total_us),
            Err(error) => Err(Exception::new("PlanError", error.to_string()).into()),
        }
    }

    #[pyo3(signature = (*, raises = true))]
    fn check(&self, py: Python<'_>, raises: bool) -> PyResult<Report> {
        let report = self.report(py);
        if raises && !report.ok() {
            return Err(report.raise(py));
        }
        Ok(report)
    }

    #[pyo3(signature = (communicator, input, output = None, *, op = None, dtype = None, stream = None))]
    fn run<'py>(
        this: &Bound<'py, Self>,
        communicator: &Bound<'py, Communicator>,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        op: Option<&str>,
        dtype: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        communicator
            .get()
            .run(this, input, output, op, dtype, stream)
    }

    #[pyo3(signature = (communicator, *, dtype, max_bytes, op = None))]
    fn prepare(
        this: &Bound<'_, Self>,
        communicator: &Bound<'_, Communicator>,
        dtype: &Bound<'_, PyAny>,
        max_bytes: u64,
        op: Option<&str>,
    ) -> PyResult<PreparedPlan> {
        PreparedPlan::new(this, communicator, dtype, max_bytes, op)
    }

    /// Runs it once, all ranks as threads.
    #[pyo3(signature = (inputs, outputs = None, *, op = None, dtype = None, seed = None, timeout = 60.0))]
    fn run_local<'py>(
        this: &Bound<'py, Self>,
        inputs: Vec<Bound<'py, PyAny>>,
        outputs: Option<Vec<Bound<'py, PyAny>>>,
        op: Option<&str>,
        dtype: Option<&Bound<'py, PyAny>>,
        seed: Option<u64>,
        timeout: f64,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let py = this.py();
        let plan = this.get();
        plan.accepted(py)?;
        let outputs = match outputs {
            Some(outputs) => outputs,
            None => {
                let core = &plan.core;
                let helper = py.import("crossweft._like")?.getattr("outputs")?;
                let blocks = (core.input_blocks, core.output_blocks);
                helper.call1((inputs.clone(), blocks))?.extract()?
            }
        };
        let asked = self::dtype(dtype)?;
        let op = plan.reduce_op_of(op)?;
        let timeout = duration(timeout)?;
        let mut buffers = plan.buffers(&inputs, &outputs, asked)?;
        let dtype = buffers
            .first()
            .map_or(DataType::U8, |(input, _)| input.dtype);
        let mut options = Options::new(dtype, op, plan.message(&buffers));
        if let Some(seed) = seed {
            options.schedule = Schedule::Seeded(seed);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let asked_to_stop = Arc::clone(&stop);
        let interrupt = move || {
            let stop = asked_to_stop.load(Ordering::Relaxed);
            stop.then(|| "a signal interrupted it".to_owned())
        };
        let work = || {
            let pairs = buffers
                .iter_mut()
                // SAFETY: nobody else uses them until the plan has run, or gets what comes of it; they do
                // not overlap.
                .map(|(input, output)| unsafe { (input.read(), output.write()) })
                .collect();
            let job = CommunicatorOptions { timeout };
            run_plan_in_threads(&plan.core, &options, pairs, job, interrupt)
        };
        let result = interruptible(py, work, |_| stop.store(true, Ordering::Relaxed))?;
        result.map_err(|error| error::of_call(&error, None))?;
        Ok(outputs)
    }
}

impl Plan {
    /// The tensors of all ranks, which must be on the host, of one type, and apart from each other.
    fn buffers(
        &self,
        inputs: &[Bound<'_, PyAny>],
        outputs: &[Bound<'_, PyAny>],
        dtype: Option<DataType>,
    ) -> PyResult<Vec<(Tensor, Tensor)>> {
        let ranks = self.core.ranks.len();
        if inputs.len() != ranks || outputs.len() != ranks {
            return Err(Exception::usage(format!(
                "{} inputs and {} outputs, but plan `{}` has {ranks} ranks, each of which needs one of \
                 either",
                inputs.len(),
                outputs.len(),
                self.core.name
            )));
        }
        let open = |object: &Bound<'_, PyAny>, what: &str| {
            let tensor = Tensor::new(object, what, dtype, None)?;
            tensor.on_host(what)?;
            Ok::<_, PyErr>(tensor)
        };
        let mut all: Vec<(Tensor, Tensor)> = Vec::new();
        for (rank, (input, output)) in inputs.iter().zip(outputs).enumerate() {
            let (input_name, output_name) = (
                format!("input of rank {rank}"),
                format!("output of rank {rank}"),
            );
            let input = open(input, &input_name)?;
            let output = open(output, &output_name)?.writable(&output_name)?;
            let first = all.first().map_or(input.dtype, |(first, _)| first.dtype);
            for (what, tensor) in [(&input_name, &input), (&output_name, &output)] {
                if tensor.dtype != first {
                    return Err(Exception::tensor(format!(
                        "the {what} has elements of {}, the input of rank 0 {first}",
                        tensor.dtype
                    )));
                }
            }
            all.push((input, output));
        }
        let message = self.message(&all);
        for (rank, (input, output)) in all.iter().enumerate() {
            for (what, tensor, blocks) in [
                ("input", input, self.core.input_blocks),
                ("output", output, self.core.output_blocks),
            ] {
                let bytes = message.saturating_mul(blocks.into());
                if tensor.bytes != bytes {
                    return Err(Exception::tensor(format!(
                        "the {what} of rank {rank} has {} bytes, but should have {bytes}: {blocks} times \
                         the message of {message} bytes that rank 0's tensors hold",
                        tensor.bytes
                    )));
                }
            }
        }
        for (at, (_, output)) in all.iter().enumerate() {
            let others = all.iter().enumerate().any(|(rank, (input, other))| {
                output.overlaps(input) || rank != at && output.overlaps(other)
            });
            if others {
                return Err(Exception::tensor(format!(
                    "the output of rank {at} overlaps another tensor; give every rank its own"
                )));
            }
        }
        Ok(all)
    }

    /// Bytes of the message that rank 0's tensors hold; the executor finds out if it is none.
    fn message(&self, buffers: &[(Tensor, Tensor)]) -> u64 {
        let (input, output) = (self.core.input_blocks, self.core.output_blocks);
        match buffers.first() {
            Some((tensor, _)) if input > 0 => tensor.bytes / u64::from(input),
            Some((_, tensor)) => tensor.bytes / u64::from(output.max(1)),
            None => 0,
        }
    }
}

/// A built-in topology by name, or one from a file.
fn topology(name: &str) -> PyResult<Topology> {
    if let Some(topology) = Topology::built_in(name) {
        return Ok(topology);
    }
    /// Far more than any topology has.
    const LARGEST: u64 = 1 << 20;
    let path = Path::new(name);
    let mut text = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(LARGEST).read_to_end(&mut text))
        .map_err(|error| os_error(&error, path))?;
    Topology::from_json(&text)
        .map_err(|error| Exception::usage(format!("topology {name}: {error}")))
}

fn os_error(error: &std::io::Error, path: &Path) -> PyErr {
    let name = path.display().to_string();
    PyOSError::new_err((error.raw_os_error(), error.to_string(), name))
}

/// The longest that anything may take: some thirty years, which no clock overflows.
const LONGEST: f64 = 1e9;

/// Seconds as a duration.
pub(crate) fn duration(seconds: f64) -> PyResult<Duration> {
    match (0.0..=LONGEST).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(Exception::usage(format!(
            "a timeout of {seconds} seconds; give 0 to {LONGEST}"
        ))),
    }
}
