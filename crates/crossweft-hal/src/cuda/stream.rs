//! Streams and events: order, time, and waits that end.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::context::{Context, Given};
use super::driver::Driver;
use super::error::CudaError;
use super::sys::{self, CuEvent, CuStream};

/// An ordered queue of work on a device.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: CuStream,
    owned: Owned,
}

/// Makes a stream as [`Stream::for_copies`] does, in the current context.
pub(super) fn copies(driver: &Driver, raw: &mut CuStream) -> Result<(), CudaError> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: valid places for the answers.
    unsafe {
        driver.cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)?;
        driver.cuStreamCreateWithPriority(raw, sys::STREAM_NON_BLOCKING, greatest)
    }
}

/// Whether a stream was made here, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owned {
    No,
    /// Nor gone before what is launched on it.
    Lasting,
    Kernels,
    Copies,
}

impl Stream {
    /// A stream of one's own that does not wait for the legacy default stream. Work still queued
    /// when it is dropped runs to its end.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let idle = || {
            let mut given = context
                .streams
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            given.idle.pop()
        };
        let raw = match idle() {
            Some(raw) => raw,
            None => {
                let mut raw = CuStream::NULL;
                context.run(|driver| {
                    // SAFETY: a valid place for the answer.
                    unsafe { driver.cuStreamCreate(&raw mut raw, sys::STREAM_NON_BLOCKING) }
                })?;
                raw
            }
        };
        Ok(Self {
            context: Arc::clone(context),
            raw,
            owned: Owned::Kernels,
        })
    }

    /// As [`new`](Self::new), of the highest priority and for copies alone. Such streams have hardware queues
    /// of their own: a copy that a kernel waits for does not stand behind that kernel.
    ///
    /// # Errors
    /// As there.
    pub fn for_copies(context: &Arc<Context>) -> Result<Self, CudaError> {
        let mut raw = CuStream::NULL;
        context.run(|driver| copies(driver, &mut raw))?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            owned: Owned::Copies,
        })
    }

    /// Somebody else's stream, such as PyTorch's `stream.cuda_stream`, by its raw handle; 0 is the
    /// legacy default stream. It is not destroyed when this is dropped.
    ///
    /// # Safety
    /// The stream must belong to the primary context of this device and outlive this.
    #[must_use]
    pub unsafe fn from_raw(context: &Arc<Context>, raw: u64) -> Self {
        Self {
            context: Arc::clone(context),
            raw: CuStream(std::ptr::with_exposed_provenance_mut(raw as usize)),
            owned: Owned::No,
        }
    }

    /// [`from_raw`](Self::from_raw) of a stream that is there for longer than this: what launches on it can come back to
    /// it, [once more](Self::again), to wait for what is under way.
    ///
    /// # Safety
    /// As there; and the stream must outlive all that launches on it, which says so if it comes back to it.
    #[must_use]
    pub unsafe fn lasting(context: &Arc<Context>, raw: u64) -> Self {
        // SAFETY: the caller's promise.
        let mut stream = unsafe { Self::from_raw(context, raw) };
        stream.owned = Owned::Lasting;
        stream
    }

    /// The same stream once more, if it [lasts](Self::lasting).
    #[must_use]
    pub fn again(&self) -> Option<Self> {
        (self.owned == Owned::Lasting).then(|| Self {
            context: Arc::clone(&self.context),
            raw: self.raw,
            owned: self.owned,
        })
    }

    /// The raw handle, for other libraries.
    #[must_use]
    pub fn raw(&self) -> u64 {
        self.raw.0.expose_provenance() as u64
    }

    pub(super) fn handle(&self) -> CuStream {
        self.raw
    }

    /// The context that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A number that no other stream of the process has or ever had, though handles are used again; `None` if the driver
    /// cannot tell (before CUDA 12.0).
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn id(&self) -> Result<Option<u64>, CudaError> {
        let mut id = 0;
        let asked = self.context.run(|driver| {
            // SAFETY: a valid place for the answer; the stream lives.
            unsafe { driver.cuStreamGetId(self.raw, &raw mut id) }
        });
        match asked {
            Ok(()) => Ok(Some(id)),
            Err(CudaError::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether what is submitted is being recorded into a graph instead of run. Then only launches,
    /// asynchronous copies and events are possible.
    ///
    /// # Errors
    /// [`CudaError::Call`], also while a capture has been spoilt.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        self.context.run(|driver| self.capturing(driver))
    }

    fn capturing(&self, driver: &Driver) -> Result<bool, CudaError> {
        let mut status = sys::CAPTURE_NONE;
        // SAFETY: a valid place for the answer; the stream lives.
        unsafe { driver.cuStreamIsCapturing(self.raw, &raw mut status)? };
        Ok(status != sys::CAPTURE_NONE)
    }

    /// The number of the capture that this stream takes part in, if it does: no other capture of the process has it.
    ///
    /// # Errors
    /// [`CudaError::Call`], also if the capture was spoilt.
    pub fn capture(&self) -> Result<Option<u64>, CudaError> {
        let (mut status, mut id) = (sys::CAPTURE_NONE, 0);
        self.context.run(|driver| {
            // SAFETY: valid places for two answers, none for those that are optional; the stream lives.
            unsafe {
                driver.cuStreamGetCaptureInfo_v2(
                    self.raw,
                    &raw mut status,
                    &raw mut id,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                )
            }
        })?;
        match status {
            sys::CAPTURE_NONE => Ok(None),
            sys::CAPTURE_ACTIVE => Ok(Some(id)),
            _ => Err(CudaError::Capturing {
                what: "adding to a capture that something forbidden has spoilt",
            }),
        }
    }

    /// Whether all work submitted so far has ended. Does not block.
    ///
    /// # Errors
    /// [`CudaError::Capturing`]; [`CudaError::ContextLost`] if the work broke the context.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.context.run(|driver| {
            // Asking about a stream that is captured would spoil the capture.
            if self.capturing(driver)? {
                return Err(CudaError::Capturing {
                    what: "asking whether work has ended",
                });
            }
            // SAFETY: the stream lives.
            ended(unsafe { driver.cuStreamQuery(self.raw) })
        })
    }

    /// Blocks until all work submitted so far has ended, at most until `deadline`.
    ///
    /// # Errors
    /// [`CudaError::Deadline`], after which the work is still running; and as for
    /// [`is_idle`](Self::is_idle).
    pub fn synchronize(&self, deadline: Instant) -> Result<(), CudaError> {
        poll("work", &self.context, deadline, || self.is_idle())
    }

    /// Makes work submitted from now on wait, on the device, for what `event` recorded.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.context.run(|driver| {
            // SAFETY: both live.
            unsafe { driver.cuStreamWaitEvent(self.raw, event.raw, 0) }
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if matches!(self.owned, Owned::No | Owned::Lasting) {
            return;
        }
        // One that still works is for others when it has ended; one that is spoilt is not.
        let state = match self.owned {
            Owned::Kernels => self.is_idle().ok(),
            _ => None,
        };
        if let Some(is_idle) = state {
            let mut given = self
                .context
                .streams
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let Given { idle, busy } = &mut *given;
            // The driver was just asked of this one, so it may be asked of others.
            busy.retain(|&raw| {
                // SAFETY: made in `new`, and not destroyed.
                let ended = |driver: &Driver| ended(unsafe { driver.cuStreamQuery(raw) });
                let has_ended = matches!(self.context.run(ended), Ok(true));
                if has_ended {
                    idle.push(raw);
                }
                !has_ended
            });
            if is_idle {
                idle.push(self.raw);
            } else {
                busy.push(self.raw);
            }
            return;
        }
        self.context.release("a stream", |driver| {
            // SAFETY: made in `new`, and nobody has it any more.
            unsafe { driver.cuStreamDestroy_v2(self.raw) }
        });
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: CuEvent,
}

impl Event {
    /// An event for order only, the cheapest.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with_flags(context, sys::EVENT_DISABLE_TIMING)
    }

    /// An event that also takes the time.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn with_timing(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::with_flags(context, 0)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Self, CudaError> {
        let mut raw = CuEvent::NULL;
        context.run(|driver| {
            // SAFETY: a valid place for the answer.
            unsafe { driver.cuEventCreate(&raw mut raw, flags) }
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Marks the point behind all work submitted to `stream` so far.
    ///
    /// # Errors
    /// [`CudaError::Call`], also if the stream is another device's.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.run(|driver| {
            // SAFETY: both live.
            unsafe { driver.cuEventRecord(self.raw, stream.raw) }
        })
    }

    /// Adds a node to the graph that `stream` records, which marks the point there at each replay.
    ///
    /// # Errors
    /// [`CudaError::Call`], also if the stream records nothing.
    pub fn record_in_graph(&self, stream: &Stream) -> Result<(), CudaError> {
        self.context.run(|driver| {
            // SAFETY: both live; whoever replays the graph keeps the event, as it does all else.
            unsafe {
                driver.cuEventRecordWithFlags(self.raw, stream.raw, sys::EVENT_RECORD_EXTERNAL)
            }
        })
    }

    /// Whether the point last recorded was reached; also if none was. Does not block.
    ///
    /// # Errors
    /// [`CudaError::Call`] if it was recorded during a capture; [`CudaError::ContextLost`].
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        self.context.run(|driver| {
            // SAFETY: the event lives.
            ended(unsafe { driver.cuEventQuery(self.raw) })
        })
    }

    /// Blocks until the point last recorded was reached, at most until `deadline`.
    ///
    /// # Errors
    /// [`CudaError::Deadline`], and as for [`is_reached`](Self::is_reached).
    pub fn synchronize(&self, deadline: Instant) -> Result<(), CudaError> {
        poll("an event", &self.context, deadline, || self.is_reached())
    }

    /// The time on the device from `start` to this. Both must take the time and have been reached.
    /// About 0.5 us fine.
    ///
    /// # Errors
    /// [`CudaError::Call`] if one was not made by [`with_timing`](Self::with_timing), or was not
    /// recorded or reached.
    pub fn since(&self, start: &Self) -> Result<Duration, CudaError> {
        let mut milliseconds = 0.0;
        self.context.run(|driver| {
            // SAFETY: a valid place for the answer; both live.
            unsafe { driver.cuEventElapsedTime(&raw mut milliseconds, start.raw, self.raw) }
        })?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1000.0))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.release("an event", |driver| {
            // SAFETY: made in `with_flags`, and nobody has it any more.
            unsafe { driver.cuEventDestroy_v2(self.raw) }
        });
    }
}

/// What a query means.
pub(super) fn ended(answer: Result<(), CudaError>) -> Result<bool, CudaError> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.is_code(sys::NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}

/// How long to ask without a pause: longer than a small collective takes.
const SPIN: Duration = Duration::from_micros(100);
/// The longest pause between questions.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Asks until it is done, ever less often. The driver's own waits have no deadline.
pub(super) fn poll(
    what: &'static str,
    context: &Context,
    deadline: Instant,
    mut is_done: impl FnMut() -> Result<bool, CudaError>,
) -> Result<(), CudaError> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(10);
    while !is_done()? {
        let now = Instant::now();
        if now >= deadline {
            return Err(CudaError::Deadline {
                what,
                device: context.ordinal(),
                waited: now - start,
            });
        }
        if now - start < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
    Ok(())
}
