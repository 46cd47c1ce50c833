//! Passes on a CUDA device with memory and a stream of their own: safe to use, for programs that have none.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_hal::cuda::{CudaError, Event, GraphExec, Stream};
use crossweft_hal::{Device, HalError, Memory};

use crate::cuda::{DeviceOutput, DeviceRouting, DeviceTokens, DeviceWeights};
use crate::{Format, Group, Handle, Layout, MoeError, OutputShape, Routing, ScaleType};

/// A handle on a CUDA device, and memory for its tokens and rows.
#[derive(Debug)]
pub struct DevicePass {
    handle: Handle,
    stream: Stream,
    /// What tokens are quantised to on the way, if they are.
    scale_type: Option<ScaleType>,
    shape: OutputShape,
    routing: DeviceRouting,
    room: Room,
}

/// Memory for the largest pass.
#[derive(Debug)]
struct Room {
    experts: Memory,
    weights: Memory,
    tokens: Memory,
    received: Memory,
    scales: Memory,
    local_experts: Memory,
    received_weights: Memory,
    sources: Memory,
    made: Memory,
    combined: Memory,
}

/// What a dispatch has laid out, copied to the host; see [`DispatchOutput`](crate::DispatchOutput). Rows that nothing
/// was received for hold anything.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Received {
    /// `[rows, hidden]`.
    pub tokens: Vec<u8>,
    /// `[rows, scales]`.
    pub scales: Vec<u8>,
    /// `[rows, top-k]`, where rows are not grouped by expert.
    pub experts: Vec<i32>,
    /// `[rows, top-k]` or `[rows]`.
    pub weights: Vec<f32>,
    /// `[rows]`.
    pub sources: Vec<i32>,
}

/// What is recorded into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recorded {
    /// Dispatches.
    Dispatch,
    /// Combines.
    Combine,
    /// A combine after each dispatch.
    Both,
}

/// Bytes of an expert, a weight, a source.
const WORD: u64 = 4;

impl DevicePass {
    /// Makes one; allocates. Tokens are quantised on the way to scales of `scale_type`, if there is one. Local.
    ///
    /// # Errors
    /// As for [`Group::handle_on_device`]; [`MoeError::Hal`] if there is no memory.
    pub fn new(
        group: &Arc<Group>,
        layout: Layout,
        scale_type: Option<ScaleType>,
    ) -> Result<Self, MoeError> {
        let handle = group.handle_on_device(layout)?;
        let options = *group.options();
        let format = scale_type.map_or(Format::Plain, Format::F8E4M3);
        let shape = group.output_shape(layout, format, options.top_k)?;
        let device = group.endpoint().device();
        let Device::Cuda(context) = device else {
            return Err(group.usage("only passes on CUDA devices have memory there".to_owned()));
        };
        let stream = Stream::new(context).map_err(HalError::from)?;
        let row = Format::Plain.token_bytes(options.hidden, options.dtype);
        let choices = u64::from(options.max_tokens) * u64::from(options.top_k);
        let tokens = u64::from(options.max_tokens) * row;
        // Memory of no bytes cannot be.
        let room = |bytes: u64| device.allocate(bytes.max(1));
        let room = Room {
            experts: room(WORD * choices)?,
            weights: room(WORD * choices)?,
            tokens: room(tokens)?,
            received: room(shape.token_bytes())?,
            scales: room(shape.scale_bytes())?,
            local_experts: room(WORD * shape.experts())?,
            received_weights: room(WORD * shape.weights())?,
            sources: room(WORD * shape.rows)?,
            made: room(shape.rows * row)?,
            combined: room(tokens)?,
        };
        Ok(Self {
            handle,
            stream,
            scale_type,
            shape,
            routing: DeviceRouting::new(room.experts.addr(), 0, options.top_k),
            room,
        })
    }

    /// Its handle.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The room for rows.
    #[must_use]
    pub fn shape(&self) -> &OutputShape {
        &self.shape
    }

    /// Takes tokens, `[tokens, hidden]` in the group's type, and where they go. Blocks.
    ///
    /// # Errors
    /// [`MoeError::Usage`]: not as many tokens as are routed, or more than the group is for; [`MoeError::Hal`].
    pub fn load(&mut self, routing: &Routing<'_>, tokens: &[u8]) -> Result<(), MoeError> {
        let group = Arc::clone(self.handle.group());
        let options = group.options();
        let row = Format::Plain.token_bytes(options.hidden, options.dtype);
        let count = tokens.len() as u64 / row;
        let most = u64::from(options.max_tokens);
        let choices = count * u64::from(routing.top_k);
        if routing.experts.len() as u64 != choices
            || routing.weights.is_some_and(|w| w.len() as u64 != choices)
            || count > most
            || !(1..=options.top_k).contains(&routing.top_k)
        {
            return Err(group.usage(format!(
                "{count} tokens with {} experts and top-{}; the group is for {most} and top-{}",
                routing.experts.len(),
                routing.top_k,
                options.top_k
            )));
        }
        self.finish()?;
        let experts = (0..routing.experts.len()).map(|index| {
            // None of them is as large as that.
            i32::try_from(routing.experts.at(index)).unwrap_or(i32::MAX)
        });
        let experts: Vec<u8> = experts.flat_map(i32::to_ne_bytes).collect();
        self.room.experts.write(0, &experts)?;
        self.routing.weights = 0;
        if let Some(weights) = routing.weights {
            let weights: Vec<u8> = weights.iter().flat_map(|w| w.to_ne_bytes()).collect();
            self.room.weights.write(0, &weights)?;
            self.routing.weights = self.room.weights.addr();
        }
        self.room.tokens.write(0, tokens)?;
        self.routing.tokens = count as u32;
        self.routing.top_k = routing.top_k;
        Ok(())
    }

    /// Starts a dispatch of the tokens that were loaded; returns at once. All ranks must call it.
    ///
    /// # Errors
    /// As for [`Handle::dispatch_on`].
    pub fn dispatch(&mut self) -> Result<(), MoeError> {
        let (tokens, output) = (self.tokens(), self.output());
        // SAFETY: the memory is this one's, for the largest pass, and kept until the stream has come to its end.
        unsafe {
            self.handle
                .dispatch_on(&self.stream, &self.routing, tokens, &output)
        }
    }

    /// Starts a combine of the rows that experts made; returns at once. All ranks must call it.
    ///
    /// # Errors
    /// As for [`Handle::combine_on`].
    pub fn combine(&mut self) -> Result<(), MoeError> {
        let (made, combined) = (self.room.made.addr(), self.room.combined.addr());
        let weights = self.weights();
        // SAFETY: as for a dispatch.
        unsafe {
            self.handle
                .combine_on(&self.stream, made, weights, combined)
        }
    }

    /// Blocks until everything that was started has come to its end, and says how it ended.
    ///
    /// # Errors
    /// As for [`Group::check`].
    pub fn finish(&self) -> Result<(), MoeError> {
        self.handle.group().wait(&self.stream)
    }

    /// What the last dispatch has laid out. Blocks.
    ///
    /// # Errors
    /// As for [`finish`](Self::finish).
    pub fn received(&mut self) -> Result<Received, MoeError> {
        self.handle.counts_on(&self.stream)?;
        let read = |memory: &Memory, bytes: u64| -> Result<Vec<u8>, HalError> {
            let mut data = vec![0; bytes as usize];
            memory.read(0, &mut data)?;
            Ok(data)
        };
        let words = |memory: &Memory, count: u64| -> Result<Vec<[u8; 4]>, HalError> {
            let bytes = read(memory, WORD * count)?;
            Ok(bytes
                .chunks_exact(4)
                .map(|w| [w[0], w[1], w[2], w[3]])
                .collect())
        };
        let integers = |memory: &Memory, count: u64| -> Result<Vec<i32>, HalError> {
            Ok(words(memory, count)?
                .into_iter()
                .map(i32::from_ne_bytes)
                .collect())
        };
        let (room, shape) = (&self.room, &self.shape);
        let weights = words(&room.received_weights, shape.weights())?;
        Ok(Received {
            tokens: read(&room.received, shape.token_bytes())?,
            scales: read(&room.scales, shape.scale_bytes())?,
            experts: integers(&room.local_experts, shape.experts())?,
            weights: weights.into_iter().map(f32::from_ne_bytes).collect(),
            sources: integers(&room.sources, shape.rows)?,
        })
    }

    /// Takes what the experts made of the rows, from the first on, in the group's type. Blocks.
    ///
    /// # Errors
    /// [`MoeError::Hal`], also if there are more than there is room for.
    pub fn load_made(&mut self, rows: &[u8]) -> Result<(), MoeError> {
        self.finish()?;
        Ok(self.room.made.write(0, rows)?)
    }

    /// What the last combine brought: `[tokens, hidden]`. Blocks.
    ///
    /// # Errors
    /// As for [`finish`](Self::finish).
    pub fn combined(&self) -> Result<Vec<u8>, MoeError> {
        self.finish()?;
        let options = self.handle.group().options();
        let row = Format::Plain.token_bytes(options.hidden, options.dtype);
        let mut data = vec![0; self.routing.tokens as usize * row as usize];
        self.room.combined.read(0, &mut data)?;
        Ok(data)
    }

    /// Records `calls` calls into a graph. Local.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch) and [`combine`](Self::combine).
    pub fn record(mut self, what: Recorded, calls: u32) -> Result<RecordedPasses, MoeError> {
        let (tokens, output, weights) = (self.tokens(), self.output(), self.weights());
        let (made, combined) = (self.room.made.addr(), self.room.combined.addr());
        let stream = &self.stream;
        let capture = stream.begin_capture().map_err(HalError::from)?;
        for _ in 0..calls {
            // SAFETY: as for [`dispatch`](Self::dispatch), and kept until the graph is done with.
            unsafe {
                if what != Recorded::Combine {
                    self.handle
                        .dispatch_on(stream, &self.routing, tokens, &output)?;
                }
                if what != Recorded::Dispatch {
                    self.handle.combine_on(stream, made, weights, combined)?;
                }
            }
        }
        let ready = || -> Result<_, CudaError> {
            let graph = capture.end()?.instantiate()?;
            graph.upload(stream)?;
            let event = || Event::with_timing(stream.context());
            Ok((graph, event()?, event()?))
        };
        let (graph, start, end) = ready().map_err(HalError::from)?;
        Ok(RecordedPasses {
            pass: self,
            graph,
            start,
            end,
            calls,
        })
    }

    /// The device's time for a copy of `bytes` bytes, of `calls` one after another, within its memory; for comparison.
    /// Blocks.
    ///
    /// # Errors
    /// [`MoeError::Hal`].
    pub fn time_copy(&self, bytes: u64, calls: u32) -> Result<Duration, MoeError> {
        let device = self.handle.group().endpoint().device();
        let (from, to) = (
            device.allocate(bytes.max(1))?,
            device.allocate(bytes.max(1))?,
        );
        let stream = &self.stream;
        let timed = || -> Result<Duration, CudaError> {
            let (start, end) = (
                Event::with_timing(stream.context())?,
                Event::with_timing(stream.context())?,
            );
            start.record(stream)?;
            for _ in 0..calls {
                // SAFETY: both are as long, and this waits for the copies.
                unsafe { stream.copy(to.addr(), from.addr(), bytes)? };
            }
            end.record(stream)?;
            end.synchronize(Instant::now() + GRACE)?;
            end.since(&start)
        };
        Ok(timed().map_err(HalError::from)? / calls.max(1))
    }

    fn tokens(&self) -> DeviceTokens {
        let elements = self.room.tokens.addr();
        match self.scale_type {
            None => DeviceTokens::Plain(elements),
            Some(scale_type) => DeviceTokens::Quantise {
                elements,
                scale_type,
                powers_of_two: false,
            },
        }
    }

    fn output(&self) -> DeviceOutput {
        let room = &self.room;
        let mut output = DeviceOutput::new(room.received.addr(), self.shape.rows);
        if self.shape.scale_row_bytes > 0 {
            output.scales = room.scales.addr();
        }
        if self.shape.experts_per_row > 0 {
            output.experts = room.local_experts.addr();
        }
        output.weights = room.received_weights.addr();
        output.sources = room.sources.addr();
        output
    }

    fn weights(&self) -> DeviceWeights {
        match self.handle.layout().is_by_expert() {
            true => DeviceWeights::Dispatched,
            // What is for several experts was summed, with weights, by these.
            false => DeviceWeights::One,
        }
    }
}

impl Drop for DevicePass {
    fn drop(&mut self) {
        // Kernels that still run use the memory; each of them ends at its deadline.
        let limit = self.handle.group().options().timeout + GRACE;
        if let Err(error) = self.stream.synchronize(Instant::now() + limit) {
            tracing::warn!("memory of a pass is dropped while calls run: {error}");
        }
    }
}

/// How long a kernel may take beside its waits.
const GRACE: Duration = Duration::from_secs(30);

/// Calls of a pass that were recorded into a CUDA graph; for measuring.
#[derive(Debug)]
pub struct RecordedPasses {
    // Before the pass, whose memory it uses.
    graph: GraphExec,
    pass: DevicePass,
    start: Event,
    end: Event,
    calls: u32,
}

impl RecordedPasses {
    /// Starts a replay; returns at once. All ranks must call it.
    ///
    /// # Errors
    /// [`MoeError::Hal`].
    pub fn start(&self) -> Result<(), MoeError> {
        let stream = &self.pass.stream;
        let started = self.start.record(stream).and_then(|()| {
            // SAFETY: what was recorded uses the pass's memory, which nobody else has.
            unsafe { self.graph.launch(stream)? };
            self.end.record(stream)
        });
        Ok(started.map_err(HalError::from)?)
    }

    /// Waits for the replay to end; returns the device's time for one of its calls.
    ///
    /// # Errors
    /// As for [`DevicePass::finish`].
    pub fn finish(&self) -> Result<Duration, MoeError> {
        self.pass.finish()?;
        let time = self.end.since(&self.start).map_err(HalError::from)?;
        Ok(time / self.calls.max(1))
    }

    /// The pass again, without the graph.
    #[must_use]
    pub fn into_pass(self) -> DevicePass {
        self.pass
    }
}
