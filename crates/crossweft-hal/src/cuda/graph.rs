//! Graphs: work captured once, launched often.

use std::sync::Arc;

use super::context::Context;
use super::error::CudaError;
use super::stream::Stream;
use super::sys::{self, CuGraph, CuGraphExec};

/// A capture under way on a stream. Dropping it without [`end`](Self::end) throws away what was
/// captured and frees the stream.
#[derive(Debug)]
#[must_use = "what is submitted to the stream is recorded until the capture ends"]
pub struct Capture<'a> {
    stream: Option<&'a Stream>,
}

impl Stream {
    /// Records what is submitted to this stream from now on, instead of running it. Other threads
    /// are not restricted meanwhile. The calling thread must also end it.
    ///
    /// # Errors
    /// [`CudaError::Call`] if it is being captured, or is the legacy default stream.
    pub fn begin_capture(&self) -> Result<Capture<'_>, CudaError> {
        self.context().run(|driver| {
            // SAFETY: the stream lives.
            unsafe { driver.cuStreamBeginCapture_v2(self.handle(), sys::CAPTURE_THREAD_LOCAL) }
        })?;
        Ok(Capture { stream: Some(self) })
    }
}

impl Capture<'_> {
    /// Ends the capture.
    ///
    /// # Errors
    /// [`CudaError::Call`] if something forbidden spoilt the capture.
    pub fn end(mut self) -> Result<Graph, CudaError> {
        match self.stream.take() {
            Some(stream) => end(stream),
            // The stream is only ever taken here and when dropped.
            None => Err(CudaError::Capturing {
                what: "ending a capture twice",
            }),
        }
    }
}

fn end(stream: &Stream) -> Result<Graph, CudaError> {
    let mut raw = CuGraph::NULL;
    stream.context().run(|driver| {
        // SAFETY: a valid place for the answer; the stream lives.
        unsafe { driver.cuStreamEndCapture(stream.handle(), &raw mut raw) }
    })?;
    Ok(Graph {
        context: Arc::clone(stream.context()),
        raw,
    })
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // A spoilt capture is an error and frees the stream all the same.
            drop(end(stream));
        }
    }
}

/// Captured work.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    raw: CuGraph,
}

impl Graph {
    /// Number of nodes: kernels, copies, and what else was captured.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn nodes(&self) -> Result<u64, CudaError> {
        let mut count = 0;
        self.context.run(|driver| {
            // SAFETY: no place for nodes asks for their number only.
            unsafe { driver.cuGraphGetNodes(self.raw, std::ptr::null_mut(), &raw mut count) }
        })?;
        Ok(count as u64)
    }

    /// Makes it ready for launching. Allocates; takes about 10 us a node.
    ///
    /// # Errors
    /// [`CudaError::Call`], [`CudaError::OutOfMemory`].
    pub fn instantiate(&self) -> Result<GraphExec, CudaError> {
        let mut raw = CuGraphExec::NULL;
        self.context.run(|driver| {
            // SAFETY: a valid place for the answer; the graph lives.
            unsafe { driver.cuGraphInstantiateWithFlags(&raw mut raw, self.raw, 0) }
        })?;
        Ok(GraphExec {
            context: Arc::clone(&self.context),
            raw,
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.context.release("a graph", |driver| {
            // SAFETY: it came from a capture, and nobody has it any more.
            unsafe { driver.cuGraphDestroy(self.raw) }
        });
    }
}

/// A graph that can be launched, any number of times. Launches of one follow one another, whatever
/// streams they are on.
#[derive(Debug)]
pub struct GraphExec {
    context: Arc<Context>,
    raw: CuGraphExec,
}

impl GraphExec {
    /// Sends it to the device ahead of its first launch, in `stream`'s order.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.run(|driver| {
            // SAFETY: both live.
            unsafe { driver.cuGraphUpload(self.raw, stream.handle()) }
        })
    }

    /// Runs the captured work, in `stream`'s order. Does not block.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// The memory and kernels that the captured work uses must be valid until it has ended.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.run(|driver| {
            // SAFETY: both live; the caller vouches for the rest.
            unsafe { driver.cuGraphLaunch(self.raw, stream.handle()) }
        })
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        self.context.release("a graph", |driver| {
            // SAFETY: made in `instantiate`, and nobody has it any more.
            unsafe { driver.cuGraphExecDestroy(self.raw) }
        });
    }
}
