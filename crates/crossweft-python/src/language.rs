//! Programs of `crossweft.language`, recorded by `crossweft_plan::dsl` with the line of the caller.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossweft_device::packet::PacketType;
use crossweft_plan::dsl::{self, Error, Fault, Options, Replication, Source};
use crossweft_plan::{Buffer, Collective, InPlace};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::error::{self, Exception};
use crate::plan::{self, Diagnostic, Plan, Report};

/// Modules of the package itself, whose frames are not the user's.
const OWN: &str = "crossweft.";

/// The line of the innermost caller outside of the package.
fn caller(py: Python<'_>) -> PyResult<Source> {
    let get = py.import("sys")?.getattr("_getframe")?;
    let mut frame = get.call0()?;
    loop {
        let globals = frame.getattr("f_globals")?;
        let module = globals.cast::<PyDict>()?.get_item("__name__")?;
        let is_own = match module
            .as_ref()
            .and_then(|name| name.cast::<PyString>().ok())
        {
            Some(name) => name.to_str()?.starts_with(OWN),
            None => false,
        };
        let back = frame.getattr("f_back")?;
        if !is_own || back.is_none() {
            let file = frame.getattr("f_code")?.getattr("co_filename")?;
            let line: Option<u32> = frame.getattr("f_lineno")?.extract()?;
            return Ok(Source::new(file.extract::<&str>()?, line.unwrap_or(0)));
        }
        frame = back;
    }
}

/// File and line of the innermost caller outside of the package.
#[pyfunction]
#[pyo3(name = "caller")]
pub(crate) fn caller_of_package(py: Python<'_>) -> PyResult<(String, u32)> {
    caller(py).map(|source| (source.file.to_string(), source.line))
}

/// The exception for a program that is refused.
fn refused(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::Misuse { at, .. } => Exception::new("ProgramError", error.to_string())
            .text("file", &*at.file)
            .number("line", at.line)
            .into(),
        Error::Plan(source) => error::plan(source).into(),
        Error::Faults { program, faults } => {
            let faults = faults.iter().map(diagnostic).collect();
            Report::new(program, faults).raise(py)
        }
        _ => Exception::new("ProgramError", error.to_string()).into(),
    }
}

fn diagnostic(fault: &Fault) -> Diagnostic {
    let mut found = Diagnostic::from(fault.diagnostic.clone());
    found.text = fault.to_string();
    if let Some(at) = &fault.at {
        found.file = Some(at.file.to_string());
        found.line = Some(at.line);
    }
    if let Some(other) = &fault.other {
        found.other_file = Some(other.file.to_string());
        found.other_line = Some(other.line);
    }
    found
}

/// Chunks of a buffer that follow one another.
#[pyclass(frozen, eq, hash, module = "crossweft.language")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Chunk(dsl::Chunk);

#[pymethods]
impl Chunk {
    #[getter]
    fn rank(&self) -> u32 {
        self.0.memory().rank()
    }

    /// `i`, `o` or `s`.
    #[getter]
    fn buffer(&self) -> &'static str {
        letter(self.0.memory().buffer())
    }

    #[getter]
    fn index(&self) -> u32 {
        self.0.range().start
    }

    #[getter]
    fn size(&self) -> u32 {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        let (rank, buffer, range) = (self.rank(), self.buffer(), self.0.range());
        format!(
            "<Chunk {buffer}[{}:{}] of rank {rank}>",
            range.start, range.end
        )
    }
}

fn letter(buffer: Buffer) -> &'static str {
    match buffer {
        Buffer::Input => "i",
        Buffer::Output => "o",
        _ => "s",
    }
}

fn buffer(letter: &str) -> PyResult<Buffer> {
    match letter {
        "i" => Ok(Buffer::Input),
        "o" => Ok(Buffer::Output),
        "s" => Ok(Buffer::Scratch),
        other => Err(Exception::usage(format!(
            "there is no buffer `{other}`; there are i, o and s"
        ))),
    }
}

/// A buffer of a rank, or a piece of its scratch memory.
#[pyclass(frozen, module = "crossweft.language")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory(dsl::Memory);

#[pymethods]
impl Memory {
    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// Chunks `first` to `end`, which the instruction that uses them checks.
    fn chunks(&self, first: u32, end: u32) -> Chunk {
        Chunk(self.0.chunks(first..end))
    }
}

/// The end of a channel.
#[pyclass(frozen, module = "crossweft.language")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel(dsl::Channel);

/// Ranks whose buffers are reached at once.
#[pyclass(frozen, module = "crossweft.language")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switch(dsl::Switch);

/// A counter among thread blocks.
#[pyclass(frozen, module = "crossweft.language")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Semaphore(dsl::Semaphore);

/// A program over all ranks.
#[pyclass(frozen, module = "crossweft.language")]
#[derive(Debug)]
pub(crate) struct Program(Mutex<dsl::Program>);

/// Names of collectives, as MSCCL++ plans have them, and of those that it lacks.
fn collective(name: &str, root: u32) -> PyResult<Collective> {
    Ok(match name {
        "allreduce" => Collective::AllReduce,
        "allgather" => Collective::AllGather,
        "reducescatter" => Collective::ReduceScatter,
        "alltoall" => Collective::AllToAll,
        "sendrecv" => Collective::SendRecv,
        "broadcast" => Collective::Broadcast { root },
        "reduce" => Collective::Reduce { root },
        "gather" => Collective::Gather { root },
        "scatter" => Collective::Scatter { root },
        "custom" => Collective::Custom,
        "test" => Collective::Test,
        other => {
            return Err(Exception::usage(format!(
                "there is no collective `{other}`"
            )));
        }
    })
}

/// What a program is for, and how it is compiled, from keywords.
fn options(
    name: &str,
    collective: &str,
    ranks: u32,
    words: &Bound<'_, PyDict>,
) -> PyResult<Options> {
    let root = words
        .get_item("root")?
        .map_or(Ok(0), |root| root.extract())?;
    let collective = self::collective(collective, root)?;
    let mut options = Options::new(name, collective, ranks);
    // Sizes as MSCCL++ counts them: of the larger buffer, which may be several messages.
    let mut sizes: Option<(u64, u64)> = None;
    for (key, value) in words {
        match key.extract::<&str>()? {
            "root" => {}
            "chunk_factor" => options.chunk_factor = value.extract()?,
            "shape" => options.shape = value.extract()?,
            "in_place" => {
                options.in_place = match value.extract()? {
                    Some(true) => InPlace::Required,
                    Some(false) => InPlace::Forbidden,
                    None => InPlace::Any,
                }
            }
            "instances" => options.instances = value.extract()?,
            "interleaved" => {
                options.replication = if value.extract()? {
                    Replication::Interleaved
                } else {
                    Replication::None
                }
            }
            "reduce_op" => {
                let op: Option<String> = value.extract()?;
                options.reduce_op = op.map(|op| plan::reduce_op(&op)).transpose()?;
            }
            "packet_bytes" => {
                options.packet = match value.extract()? {
                    8 => PacketType::Ll8,
                    16 => PacketType::Ll16,
                    other => {
                        return Err(Exception::usage(format!(
                            "packets have 8 or 16 bytes, not {other}"
                        )));
                    }
                }
            }
            "fuse" => options.fuse = value.extract()?,
            "auto_sync" => options.auto_sync = value.extract()?,
            "minimise" => options.minimise = value.extract()?,
            "double_scratch" => options.double_scratch = value.extract()?,
            "sizes" => sizes = Some(value.extract()?),
            other => {
                return Err(PyTypeError::new_err(format!(
                    "there is no option `{other}`"
                )));
            }
        }
    }
    if let Some((least, most)) = sizes {
        let (input, output) = collective.blocks(ranks).unwrap_or((1, 1));
        let blocks = u64::from(input.max(output).max(1));
        options.message_bytes = (least.div_ceil(blocks), most / blocks);
    }
    Ok(options)
}

impl Program {
    fn lock(&self) -> MutexGuard<'_, dsl::Program> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records something at the caller's line.
    fn record<T>(
        &self,
        py: Python<'_>,
        record: impl FnOnce(&mut dsl::Program) -> Result<T, Error>,
    ) -> PyResult<T> {
        let source = caller(py)?;
        record(self.lock().at(source)).map_err(|error| refused(py, &error))
    }
}

/// Chunks as the core has them.
fn chunks(chunks: &[Bound<'_, Chunk>]) -> Vec<dsl::Chunk> {
    chunks.iter().map(|chunk| chunk.get().0).collect()
}

#[pymethods]
impl Program {
    #[new]
    #[pyo3(signature = (name, collective, ranks, **words))]
    fn new(
        py: Python<'_>,
        name: &str,
        collective: &str,
        ranks: u32,
        words: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let none = PyDict::new(py);
        let options = options(name, collective, ranks, words.unwrap_or(&none))?;
        let program = dsl::Program::new(options).map_err(|error| refused(py, &error))?;
        Ok(Self(Mutex::new(program)))
    }

    fn input(&self, py: Python<'_>, rank: u32) -> PyResult<Memory> {
        self.record(py, |p| p.input(rank)).map(Memory)
    }

    fn output(&self, py: Python<'_>, rank: u32) -> PyResult<Memory> {
        self.record(py, |p| p.output(rank)).map(Memory)
    }

    fn scratch(&self, py: Python<'_>, rank: u32, chunks: u32) -> PyResult<Memory> {
        self.record(py, |p| p.scratch(rank, chunks)).map(Memory)
    }

    fn expect(
        &self,
        py: Python<'_>,
        output: &Chunk,
        inputs: Vec<Bound<'_, Chunk>>,
    ) -> PyResult<()> {
        self.record(py, |p| p.expect(output.0, &chunks(&inputs)))
    }

    fn memory_channel(&self, py: Python<'_>, destination: u32, source: u32) -> PyResult<Channel> {
        self.record(py, |p| p.memory_channel(destination, source))
            .map(Channel)
    }

    fn port_channel(&self, py: Python<'_>, destination: u32, source: u32) -> PyResult<Channel> {
        self.record(py, |p| p.port_channel(destination, source))
            .map(Channel)
    }

    fn switch_channel(&self, py: Python<'_>, ranks: Vec<u32>, letter: &str) -> PyResult<Switch> {
        let buffer = buffer(letter)?;
        self.record(py, |p| p.switch_channel(&ranks, buffer))
            .map(Switch)
    }

    fn semaphore(&self, py: Python<'_>, rank: u32, initial: u32) -> PyResult<Semaphore> {
        self.record(py, |p| p.semaphore(rank, initial))
            .map(Semaphore)
    }

    fn copy(&self, py: Python<'_>, dst: &Chunk, src: &Chunk, blocks: Vec<u32>) -> PyResult<()> {
        self.record(py, |p| p.copy(dst.0, src.0, blocks))
    }

    fn copy_packets(
        &self,
        py: Python<'_>,
        dst: &Chunk,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.copy_packets(dst.0, src.0, blocks))
    }

    fn unpack_packets(
        &self,
        py: Python<'_>,
        dst: &Chunk,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.unpack_packets(dst.0, src.0, blocks))
    }

    fn reduce(
        &self,
        py: Python<'_>,
        dst: &Chunk,
        src: &Chunk,
        others: Vec<Bound<'_, Chunk>>,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.reduce(dst.0, src.0, &chunks(&others), blocks))
    }

    fn reduce_packets(
        &self,
        py: Python<'_>,
        dst: &Chunk,
        src: &Chunk,
        others: Vec<Bound<'_, Chunk>>,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| {
            p.reduce_packets(dst.0, src.0, &chunks(&others), blocks)
        })
    }

    fn barrier(&self, py: Python<'_>, rank: u32, blocks: Vec<u32>) -> PyResult<()> {
        self.record(py, |p| p.barrier(rank, blocks))
    }

    fn acquire(&self, py: Python<'_>, semaphore: &Semaphore, block: u32) -> PyResult<()> {
        self.record(py, |p| p.acquire(semaphore.0, block))
    }

    fn release(&self, py: Python<'_>, semaphore: &Semaphore, block: u32) -> PyResult<()> {
        self.record(py, |p| p.release(semaphore.0, block))
    }

    fn signal(&self, py: Python<'_>, channel: &Channel, block: u32, relaxed: bool) -> PyResult<()> {
        self.record(py, |p| {
            if relaxed {
                p.relaxed_signal(channel.0, block)
            } else {
                p.signal(channel.0, block)
            }
        })
    }

    fn wait(&self, py: Python<'_>, channel: &Channel, block: u32, relaxed: bool) -> PyResult<()> {
        self.record(py, |p| {
            if relaxed {
                p.relaxed_wait(channel.0, block)
            } else {
                p.wait(channel.0, block)
            }
        })
    }

    fn flush(&self, py: Python<'_>, channel: &Channel, block: u32) -> PyResult<()> {
        self.record(py, |p| p.flush(channel.0, block))
    }

    fn get(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.get(channel.0, dst.0, src.0, blocks))
    }

    fn put(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.put(channel.0, dst.0, src.0, blocks))
    }

    fn put_with_signal(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        block: u32,
    ) -> PyResult<()> {
        self.record(py, |p| p.put_with_signal(channel.0, dst.0, src.0, block))
    }

    fn put_with_signal_and_flush(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        block: u32,
    ) -> PyResult<()> {
        self.record(py, |p| {
            p.put_with_signal_and_flush(channel.0, dst.0, src.0, block)
        })
    }

    fn put_packets(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.put_packets(channel.0, dst.0, src.0, blocks))
    }

    fn read_put_packets(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| p.read_put_packets(channel.0, dst.0, src.0, blocks))
    }

    fn read_reduce(
        &self,
        py: Python<'_>,
        channel: &Channel,
        dst: &Chunk,
        src: &Chunk,
        others: Vec<Bound<'_, Chunk>>,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| {
            p.read_reduce(channel.0, dst.0, src.0, &chunks(&others), blocks)
        })
    }

    fn switch_reduce(
        &self,
        py: Python<'_>,
        switch: &Switch,
        rank: u32,
        first: u32,
        dst: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| {
            p.switch_reduce(switch.0, rank, first, dst.0, blocks)
        })
    }

    fn switch_broadcast(
        &self,
        py: Python<'_>,
        switch: &Switch,
        rank: u32,
        first: u32,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| {
            p.switch_broadcast(switch.0, rank, first, src.0, blocks)
        })
    }

    fn switch_broadcast_packets(
        &self,
        py: Python<'_>,
        switch: &Switch,
        rank: u32,
        first: u32,
        src: &Chunk,
        blocks: Vec<u32>,
    ) -> PyResult<()> {
        self.record(py, |p| {
            p.switch_broadcast_packets(switch.0, rank, first, src.0, blocks)
        })
    }

    fn begin_loop(&self, py: Python<'_>, unit_bytes: u64, chunks: u32) -> PyResult<()> {
        self.record(py, |p| p.begin_loop(unit_bytes, chunks))
    }

    fn end_loop(&self, py: Python<'_>) -> PyResult<()> {
        self.record(py, dsl::Program::end_loop)
    }

    fn compile(&self, py: Python<'_>) -> PyResult<Plan> {
        let compiled = py.detach(|| self.lock().compile());
        let dsl::Compiled { plan, sources, .. } = compiled.map_err(|error| refused(py, &error))?;
        Ok(Plan::compiled(plan, Arc::new(sources)))
    }
}
