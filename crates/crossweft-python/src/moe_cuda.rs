//! Mixtures of experts on tensors of a CUDA device: what tensors are there, and launches in the order of their streams.

use crossweft_hal::Device;
use crossweft_hal::cuda::Stream;
use crossweft_moe::{
    DataType, DeviceOutput, DeviceRouting, DeviceTokens, DeviceWeights, Format, Handle, MoeError,
    OutputShape,
};
use pyo3::prelude::*;

use crate::error::Exception;
use crate::moe::{Given, Made, MoeHandle, Pass, Received, Routed, Sent};
use crate::tensor::{Place, Tensor};
use crate::wait::detached;

/// Where the tensors of a group are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    Host,
    /// On the device of that ordinal.
    Cuda(u32),
}

impl Site {
    pub(crate) fn of(device: &Device) -> Self {
        match device {
            Device::Cuda(context) => Self::Cuda(context.ordinal()),
            _ => Self::Host,
        }
    }

    /// Fails unless a tensor is here.
    pub(crate) fn check(self, tensor: &Tensor, what: &str) -> PyResult<()> {
        match (self, tensor.place) {
            (Self::Host, Place::Host) | (Self::Cuda(_), Place::Cuda(None)) => Ok(()),
            (Self::Cuda(ordinal), Place::Cuda(Some(there))) if there == ordinal => Ok(()),
            (Self::Host, place) => Err(Exception::tensor(format!(
                "the {what} is on {place}; the group is on the CPU, so copy it to the host"
            ))),
            (Self::Cuda(ordinal), place) => Err(Exception::tensor(format!(
                "the {what} is on {place}; the group is on cuda:{ordinal}, so copy it there"
            ))),
        }
    }
}

/// `what` must have `needed` bytes, or more where that is said.
fn expect(what: &str, tensor: &Tensor, needed: u64, or_more: bool) -> PyResult<()> {
    let bytes = tensor.bytes;
    if bytes == needed || or_more && bytes > needed {
        return Ok(());
    }
    let at_least = if or_more { " at least" } else { "" };
    Err(Exception::usage(format!(
        "the {what} has {bytes} bytes; it must have {needed}{at_least}"
    )))
}

/// Where tokens go.
fn routing(routed: &Routed) -> PyResult<DeviceRouting> {
    let tokens = routed.tokens();
    let choices = tokens * u64::from(routed.top_k);
    let size = routed.experts.dtype.size() as u64;
    expect("experts", &routed.experts, size * choices, false)?;
    if let Some(weights) = &routed.weights {
        expect("weights", weights, 4 * choices, false)?;
    }
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    let mut routing = DeviceRouting::new(routed.experts.address, tokens, routed.top_k);
    routing.wide = routed.experts.dtype == DataType::I64;
    routing.weights = routed.weights.as_ref().map_or(0, |weights| weights.address);
    Ok(routing)
}

/// What is sent of a pass of `count` tokens of a hidden size and type.
fn sent(sent: &Sent, count: u64, (hidden, dtype): (u32, DataType)) -> PyResult<DeviceTokens> {
    let format = sent.format();
    let elements = sent.tokens.address;
    let bytes = match sent.scales {
        Some(_) => format.token_bytes(hidden, dtype),
        None => Format::Plain.token_bytes(hidden, dtype),
    };
    expect("tokens", &sent.tokens, count * bytes, false)?;
    Ok(match (&sent.scales, sent.scale_type) {
        (_, None) => DeviceTokens::Plain(elements),
        (Some(scales), Some((scale_type, _))) => {
            expect("scales", scales, count * format.scale_bytes(hidden), false)?;
            DeviceTokens::Quantised {
                elements,
                scales: scales.address,
                scale_type,
            }
        }
        (None, Some((scale_type, powers_of_two))) => DeviceTokens::Quantise {
            elements,
            scale_type,
            powers_of_two,
        },
    })
}

/// Where rows are laid out: as many as there is room for tokens.
fn output(received: &Received, shape: &OutputShape, bounded: bool) -> PyResult<DeviceOutput> {
    let rows = received.tokens.bytes / shape.row_bytes.max(1);
    let shape = shape.with_rows(rows.min(shape.rows));
    let address = |tensor: &Option<Tensor>, what: &str, needed: u64| match tensor {
        None => Ok(0),
        Some(tensor) => expect(what, tensor, needed, true).map(|()| tensor.address),
    };
    let mut output = DeviceOutput::new(received.tokens.address, rows);
    output.bounded = bounded;
    output.scales = address(&received.scales, "room for scales", shape.scale_bytes())?;
    if let Some(experts) = &received.experts {
        output.wide = experts.dtype == DataType::I64;
        let needed = experts.dtype.size() as u64 * shape.experts();
        output.experts = address(&received.experts, "room for experts", needed)?;
    }
    output.weights = address(&received.weights, "room for weights", 4 * shape.weights())?;
    output.sources = address(&received.sources, "room for sources", 4 * shape.rows)?;
    Ok(output)
}

impl MoeHandle {
    /// Launches in the order of the stream that a tensor's library works on. What `prepare` makes of the tensors does it.
    fn launch<L>(
        &self,
        py: Python<'_>,
        of: &Tensor,
        prepare: impl FnOnce(&mut Pass) -> PyResult<L>,
    ) -> PyResult<()>
    where
        L: FnOnce(&mut Handle, &Stream) -> Result<(), MoeError> + Send,
    {
        let stream = self.stream(of.stream.unwrap_or(0))?;
        let mut pass = self.pass()?;
        let failed = |error: MoeError| self.failed(&error);
        // What launches before have come to.
        self.core().check().map_err(failed)?;
        let launch = prepare(&mut pass)?;
        let core = &mut pass.core;
        // With masking it waits for its launches.
        let done = match self.core().options().masking {
            true => py.detach(|| launch(core, &stream)),
            false => launch(core, &stream),
        };
        pass.stream = Some(stream);
        done.map_err(failed)
    }

    pub(crate) fn dispatch_on_device(
        &self,
        py: Python<'_>,
        tokens: &Sent,
        (room, bounded): (&Received, bool),
    ) -> PyResult<()> {
        self.launch(py, &tokens.tokens, |pass| {
            let shape = pass.shape(tokens.format());
            let shape = shape.map_err(|error| self.failed(&error))?;
            let (routing, output) = (routing(pass.routed()?)?, output(room, &shape, bounded)?);
            let sent = sent(tokens, pass.tokens, self.sizes())?;
            pass.format = tokens.format();
            Ok(move |core: &mut Handle, stream: &Stream| {
                // SAFETY: tensors of the device, large enough, which their library keeps for what is on its stream; the
                // handle waits for the stream before it goes.
                unsafe { core.dispatch_on(stream, &routing, sent, &output) }
            })
        })
    }

    pub(crate) fn dispatch_send_on_device(&self, py: Python<'_>, tokens: &Sent) -> PyResult<()> {
        self.launch(py, &tokens.tokens, |pass| {
            let routing = routing(pass.routed()?)?;
            let sent = sent(tokens, pass.tokens, self.sizes())?;
            pass.format = tokens.format();
            Ok(move |core: &mut Handle, stream: &Stream| {
                // SAFETY: as for a dispatch.
                unsafe { core.dispatch_send_on(stream, &routing, sent) }
            })
        })
    }

    pub(crate) fn dispatch_complete_on_device(
        &self,
        py: Python<'_>,
        room: &Received,
    ) -> PyResult<()> {
        self.launch(py, &room.tokens, |pass| {
            let shape = pass.shape(pass.format);
            let shape = shape.map_err(|error| self.failed(&error))?;
            let output = output(room, &shape, false)?;
            Ok(move |core: &mut Handle, stream: &Stream| {
                // SAFETY: as for a dispatch.
                unsafe { core.dispatch_complete_on(stream, &output) }
            })
        })
    }

    /// The rows of a combine, and their weights.
    fn rows(&self, pass: &Pass, made: &Made) -> PyResult<(u64, DeviceWeights)> {
        let (hidden, dtype) = self.sizes();
        let needed = pass.core.most_rows() * Format::Plain.token_bytes(hidden, dtype);
        expect("rows", &made.rows, needed, true)?;
        let weights = match &made.weights {
            Given::One => DeviceWeights::One,
            Given::Dispatched => DeviceWeights::Dispatched,
            Given::These(weights) => {
                let choices = pass.tokens * u64::from(pass.routed()?.top_k);
                expect("weights", weights, 4 * choices, false)?;
                DeviceWeights::Given(weights.address)
            }
        };
        Ok((made.rows.address, weights))
    }

    fn sums(&self, pass: &Pass, output: &Tensor) -> PyResult<u64> {
        let (hidden, dtype) = self.sizes();
        let needed = pass.tokens * Format::Plain.token_bytes(hidden, dtype);
        expect("output", output, needed, false).map(|()| output.address)
    }

    pub(crate) fn combine_on_device(
        &self,
        py: Python<'_>,
        made: &Made,
        output: &Tensor,
    ) -> PyResult<()> {
        self.launch(py, &made.rows, |pass| {
            let ((rows, weights), to) = (self.rows(pass, made)?, self.sums(pass, output)?);
            Ok(move |core: &mut Handle, stream: &Stream| {
                // SAFETY: as for a dispatch.
                unsafe { core.combine_on(stream, rows, weights, to) }
            })
        })
    }

    pub(crate) fn combine_send_on_device(&self, py: Python<'_>, made: &Made) -> PyResult<()> {
        self.launch(py, &made.rows, |pass| {
            let (rows, weights) = self.rows(pass, made)?;
            Ok(move |core: &mut Handle, stream: &Stream| {
                // SAFETY: as for a dispatch.
                unsafe { core.combine_send_on(stream, rows, weights) }
            })
        })
    }

    pub(crate) fn combine_complete_on_device(
        &self,
        py: Python<'_>,
        output: &Tensor,
    ) -> PyResult<()> {
        self.launch(py, output, |pass| {
            let to = self.sums(pass, output)?;
            Ok(move |core: &mut Handle, stream: &Stream| {
                // SAFETY: as for a dispatch.
                unsafe { core.combine_complete_on(stream, to) }
            })
        })
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        // Kernels that still run use its tables; each of them ends at its deadline. What went wrong is told by the next
        // call.
        if let Some(stream) = &self.stream {
            let group = self.core.group();
            detached(|| drop(group.wait(stream)));
        }
    }
}
