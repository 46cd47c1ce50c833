//! Messages between pairs of ranks, and collectives with blocks of any size.

use std::sync::{Mutex, PoisonError};

use crossweft_collective::{Blocks, CollectiveError, DataType, Exchange, ReduceOp, Region};
use crossweft_hal::cuda;
use pyo3::prelude::*;

use crate::communicator::Communicator;
use crate::error::Exception;
use crate::plan;
use crate::tensor::{Place, Tensor};

/// A tensor of a message.
fn tensor(
    object: &Bound<'_, PyAny>,
    what: &str,
    dtype: Option<&Bound<'_, PyAny>>,
) -> PyResult<Tensor> {
    Tensor::new(object, what, plan::dtype(dtype)?, None)
}

/// The stream in whose order a call on these tensors runs: none on the host. They must be where the communicator computes.
fn stream_of<'a>(
    communicator: &Communicator,
    tensors: impl Iterator<Item = &'a Tensor>,
    stream: Option<u64>,
) -> PyResult<Option<cuda::Stream>> {
    let (mut handle, mut on_host) = (stream, false);
    for tensor in tensors {
        on_host |= !communicator.computes_on(tensor.place)? || tensor.place == Place::Host;
        handle = handle.or(tensor.stream);
    }
    match (on_host, communicator.is_on_gpu()) {
        (true, true) => Err(Exception::tensor(
            "a tensor is on the host; messages of a communicator on a GPU are of its memory, so copy it there",
        )),
        (_, true) => communicator.stream(handle.unwrap_or(0)).map(Some),
        (_, false) => match stream {
            None => Ok(None),
            Some(_) => Err(Exception::usage(
                "a stream was given, but the tensors are on the host",
            )),
        },
    }
}

/// The memory of a tensor on the device.
fn region(tensor: &Tensor) -> Region {
    // SAFETY: device memory of the tensor, contiguous; libraries keep what is used on their streams, whose order the call
    // is in.
    unsafe { Region::new(tensor.address, tensor.bytes) }
}

/// A send or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Send,
    Receive,
}

/// One that was asked for.
pub(crate) struct Message {
    way: Way,
    peer: u32,
    tensor: Tensor,
}

impl Message {
    pub(crate) fn new(
        way: Way,
        object: &Bound<'_, PyAny>,
        peer: u32,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let tensor = match way {
            Way::Send => tensor(object, "tensor to send", dtype)?,
            Way::Receive => {
                let what = "tensor to receive into";
                tensor(object, what, dtype)?.writable(what)?
            }
        };
        Ok(Self { way, peer, tensor })
    }
}

/// Does sends and receives together.
pub(crate) fn run(
    py: Python<'_>,
    communicator: &Communicator,
    messages: &mut [Message],
    stream: Option<u64>,
) -> PyResult<()> {
    for (index, message) in messages.iter().enumerate() {
        let overlaps =
            |(other, m): (usize, &Message)| other != index && m.tensor.overlaps(&message.tensor);
        if message.way == Way::Receive && messages.iter().enumerate().any(overlaps) {
            return Err(Exception::tensor(
                "a tensor to receive into overlaps another one of the group",
            ));
        }
    }
    let stream = stream_of(communicator, messages.iter().map(|m| &m.tensor), stream)?;
    let exchange = communicator.exchange(py)?;
    let done = py.detach(|| {
        let mut group = exchange.group();
        if let Some(stream) = stream {
            for Message { way, peer, tensor } in messages {
                match way {
                    Way::Send => group.send_region(*peer, tensor.dtype, region(tensor)),
                    Way::Receive => group.recv_region(*peer, tensor.dtype, region(tensor)),
                };
            }
            return group.run_on(&stream);
        }
        for Message { way, peer, tensor } in messages {
            let dtype = tensor.dtype;
            match way {
                // SAFETY: nobody else uses them until the call has ended, or gets what comes of it; those that
                // are written overlap no other.
                Way::Send => group.send_typed(*peer, dtype, unsafe { tensor.read() }),
                // SAFETY: as above.
                Way::Receive => group.recv_typed(*peer, dtype, unsafe { tensor.write() }),
            };
        }
        group.run()
    });
    done.map_err(|error| communicator.failed(&error))
}

/// A group of sends and receives that are done together.
#[pyclass(frozen, module = "crossweft")]
pub(crate) struct MessageGroup {
    communicator: Py<Communicator>,
    messages: Mutex<Vec<Message>>,
}

impl MessageGroup {
    pub(crate) fn new(communicator: Py<Communicator>) -> Self {
        Self {
            communicator,
            messages: Mutex::default(),
        }
    }

    fn push(&self, message: Message) {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.push(message);
    }

    fn take(&self) -> Vec<Message> {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *messages)
    }
}

#[pymethods]
impl MessageGroup {
    /// Adds a message to `peer`.
    #[pyo3(signature = (tensor, peer, *, dtype = None))]
    fn send(
        &self,
        tensor: &Bound<'_, PyAny>,
        peer: u32,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.push(Message::new(Way::Send, tensor, peer, dtype)?);
        Ok(())
    }

    /// Adds a message from `peer`.
    #[pyo3(signature = (tensor, peer, *, dtype = None))]
    fn recv(
        &self,
        tensor: &Bound<'_, PyAny>,
        peer: u32,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.push(Message::new(Way::Receive, tensor, peer, dtype)?);
        Ok(())
    }

    /// Does all that was added, and empties the group.
    #[pyo3(signature = (*, stream = None))]
    fn run(&self, py: Python<'_>, stream: Option<u64>) -> PyResult<()> {
        run(py, self.communicator.get(), &mut self.take(), stream)
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// Runs it, unless an error ends the block.
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let mut messages = self.take();
        match error.is_none() {
            true => run(py, self.communicator.get(), &mut messages, None),
            false => Ok(()),
        }
    }
}

/// Counts and displacements as Python gives them.
pub(crate) struct Layout {
    pub(crate) counts: Vec<u64>,
    pub(crate) displacements: Option<Vec<u64>>,
}

/// Counts, or displacements: a host tensor of 64-bit integers, as they are now, or any sequence.
pub(crate) fn numbers(object: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let Some(tensor) = tensor(object, "counts", None)
        .ok()
        .filter(|t| t.place == Place::Host)
    else {
        return object.extract();
    };
    let is_signed = match tensor.dtype {
        DataType::I64 => true,
        DataType::U64 => false,
        _ => return object.extract(),
    };
    // SAFETY: nobody writes them while this runs.
    let words = unsafe { tensor.read() }.as_chunks().0;
    let numbers: Vec<u64> = words.iter().copied().map(u64::from_ne_bytes).collect();
    match numbers.iter().find(|n| is_signed && n.cast_signed() < 0) {
        None => Ok(numbers),
        Some(negative) => Err(Exception::tensor(format!(
            "a block of {} elements",
            negative.cast_signed()
        ))),
    }
}

/// [`numbers`], if there are any.
pub(crate) fn optional_numbers(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u64>>> {
    (!object.is_none()).then(|| numbers(object)).transpose()
}

impl Layout {
    fn blocks(&self) -> Blocks<'_> {
        match &self.displacements {
            Some(displacements) => Blocks::at(&self.counts, displacements),
            None => Blocks::packed(&self.counts),
        }
    }
}

/// Which collective, with what belongs to it alone.
pub(crate) enum Call {
    AllToAll {
        sent: Layout,
        received: Layout,
    },
    AllGather(Layout),
    /// Of a block of the output itself.
    AllGatherInPlace(Layout),
    ReduceScatter(Layout, ReduceOp),
}

/// Calls a collective with blocks of any size. In place, `input` is of no account.
pub(crate) fn collective<'py>(
    communicator: &Communicator,
    call: &Call,
    input: &Bound<'py, PyAny>,
    output: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
    stream: Option<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = input.py();
    let mut to = tensor(output, "output", dtype)?.writable("output")?;
    let mut from = match call {
        Call::AllGatherInPlace(_) => None,
        _ => Some(tensor(input, "input", dtype)?),
    };
    if let Some(from) = &from {
        if to.dtype != from.dtype {
            return Err(Exception::tensor(format!(
                "the input has elements of {}, the output of {}",
                from.dtype, to.dtype
            )));
        }
        if from.overlaps(&to) {
            return Err(Exception::tensor("input and output overlap"));
        }
    }
    let tensors = from.iter().chain([&to]);
    let stream = stream_of(communicator, tensors, stream)?;
    let exchange = communicator.exchange(py)?;
    let done = py.detach(|| match &stream {
        Some(stream) => launch_on(&exchange, stream, call, from.as_ref(), &to),
        None => launch(&exchange, call, from.as_mut(), &mut to),
    });
    done.map_err(|error| communicator.failed(&error))?;
    Ok(output.clone())
}

/// The same in the order of a stream.
fn launch_on(
    exchange: &Exchange,
    stream: &cuda::Stream,
    call: &Call,
    input: Option<&Tensor>,
    output: &Tensor,
) -> Result<(), CollectiveError> {
    let (dtype, calls) = (output.dtype, exchange.calls(Some(stream)));
    let (input, output) = (region(input.unwrap_or(output)), region(output));
    match call {
        Call::AllToAll { sent, received } => {
            let (sent, received) = (sent.blocks(), received.blocks());
            calls.all_to_all_v(dtype, (input, sent), (output, received))
        }
        Call::AllGather(layout) => calls.all_gather_v(dtype, input, (output, layout.blocks())),
        Call::AllGatherInPlace(layout) => {
            calls.all_gather_v_in_place(dtype, (output, layout.blocks()))
        }
        Call::ReduceScatter(layout, op) => {
            calls.reduce_scatter_v(dtype, *op, (input, layout.blocks()), output)
        }
    }
}

fn launch(
    exchange: &Exchange,
    call: &Call,
    input: Option<&mut Tensor>,
    output: &mut Tensor,
) -> Result<(), CollectiveError> {
    let dtype = output.dtype;
    // SAFETY: nobody else uses them until the call has ended; they do not overlap.
    let (input, output) = unsafe { (input.map_or(&[][..], |input| input.read()), output.write()) };
    match call {
        Call::AllToAll { sent, received } => {
            let (sent, received) = (sent.blocks(), received.blocks());
            exchange.all_to_all_v(dtype, (input, sent), (output, received))
        }
        Call::AllGather(layout) => exchange.all_gather_v(dtype, input, (output, layout.blocks())),
        Call::AllGatherInPlace(layout) => {
            exchange.all_gather_v_in_place(dtype, (output, layout.blocks()))
        }
        Call::ReduceScatter(layout, op) => {
            exchange.reduce_scatter_v(dtype, *op, (input, layout.blocks()), output)
        }
    }
}
