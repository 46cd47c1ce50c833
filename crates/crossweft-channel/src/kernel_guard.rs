//! What ends the waits of a kernel on a CUDA device, and says why.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossweft_device::gpu::GpuContext;
use crossweft_device::{Site, Stopped, WaitKind, Waiting};
use crossweft_hal::cpu::Interrupted;
use crossweft_hal::cuda::{Context, CudaError, PinnedMemory, Stream};
use crossweft_net::LONGEST_TIMEOUT;

use crate::{ChannelError, Endpoint, Guard};

/// How often a host thread that waits for a kernel looks after the job.
const LOOK: Duration = Duration::from_millis(5);
/// How long a kernel may take to begin, behind others on the device.
const BEGIN_LIMIT: Duration = Duration::from_secs(30);

/// The words that a kernel and the host share: one by which the host ends the kernel's waits, and
/// a record in which the kernel describes the first wait that ended badly.
///
/// One for each rank that launches on the device, for as long as its launches follow one another.
/// After a launch that was stopped it stays as it is, unless it is [`reset`](Self::reset): make new channels, and a new
/// one of these.
#[derive(Debug)]
pub struct KernelGuard(PinnedMemory);

/// Bytes to the status record, which has a cache line of its own.
const RECORD: u64 = 64;

impl KernelGuard {
    /// Allocates the words. Local; part of preparing.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Call`].
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        PinnedMemory::allocate(context, 4096).map(Self)
    }

    /// What to pass to the kernel, whose waits then end `limit` after it began. May be captured in
    /// a graph: each replay has the whole time.
    #[must_use]
    pub fn context(&self, limit: Duration) -> GpuContext {
        GpuContext {
            limit_ns: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).max(1),
            abort: self.0.device_address(),
            status: self.0.device_address() + RECORD,
        }
    }

    /// Ends the waits of all kernels that were launched with this, within about a millisecond, and those
    /// of kernels launched later.
    pub fn abort(&self) {
        if let Some(word) = self.0.words().first() {
            word.store(1, Ordering::Release);
        }
    }

    /// The wait that a kernel ended without its condition, if one did.
    #[must_use]
    pub fn interrupted(&self) -> Option<Interrupted> {
        let word = |index: usize| {
            let word = self.0.words().get(RECORD as usize / 8 + index);
            word.map_or(0, |word| word.load(Ordering::Acquire))
        };
        let (low, high) = (|w: u64| w as u32, |w: u64| (w >> 32) as u32);
        // In the order of `StatusRecord`: claims, stopped, rank and block, thread, then the wait.
        let stopped = match word(1) {
            0 => return None,
            2 => Stopped::Deadline,
            3 => Stopped::Mismatch,
            _ => Stopped::Aborted,
        };
        let site = Site {
            kind: WaitKind::from_number(low(word(4))),
            peer: high(word(4)),
            channel: low(word(5)),
            op: high(word(5)),
        };
        Some(Interrupted {
            stopped,
            waiting: Waiting {
                site,
                spins: low(word(6)),
                expected: word(7),
                seen: word(8),
            },
            block: high(word(2)),
        })
    }

    /// Forgets what has ended, so that kernels that are launched from here on wait again. None that was launched with this
    /// may be under way.
    pub fn reset(&self) {
        for word in self.0.words() {
            word.store(0, Ordering::Release);
        }
    }

    /// Blocks until `stream` is idle. `failed` says whether the job has failed, which ends the
    /// kernels' waits; `limit` is the one that they were launched with.
    ///
    /// # Errors
    /// As [`Stream::synchronize`]. After [`CudaError::Deadline`] kernels may still be to begin, behind others on the device:
    /// their waits have been [ended](Self::abort), but they use their buffers, which must be kept until the stream has come
    /// to its end, as must this. A wait that was ended is no error here; see [`interrupted`](Self::interrupted).
    pub fn wait(
        &self,
        stream: &Stream,
        limit: Duration,
        failed: impl Fn() -> bool,
    ) -> Result<(), CudaError> {
        // The kernel ends itself at its limit; only one that cannot even begin outlasts that.
        let start = Instant::now();
        let deadline = start + limit.min(LONGEST_TIMEOUT) + BEGIN_LIMIT;
        loop {
            let look_again = Instant::now() + LOOK;
            match stream.synchronize(look_again.min(deadline)) {
                Err(CudaError::Deadline { .. }) if look_again < deadline => {
                    if failed() {
                        self.abort();
                    }
                }
                mut other => {
                    if let Err(CudaError::Deadline { waited, .. }) = &mut other {
                        *waited = start.elapsed();
                        // Nobody waits for it any more.
                        self.abort();
                    }
                    return other;
                }
            }
        }
    }

    /// Blocks until `stream` is idle and says what went wrong in its kernels. If the job fails
    /// meanwhile, their waits are ended.
    ///
    /// # Errors
    /// [`ChannelError::Stopped`] with what a kernel waited for in vain, and why;
    /// [`ChannelError::Memory`] if the device failed.
    pub fn finish(
        &self,
        endpoint: &Endpoint,
        stream: &Stream,
        limit: Duration,
    ) -> Result<(), ChannelError> {
        self.wait(stream, limit, || endpoint.group().liveness().stopped())
            .map_err(|e| ChannelError::memory("waiting for a kernel")(e.into()))?;
        match self.interrupted() {
            None => Ok(()),
            Some(Interrupted {
                stopped, waiting, ..
            }) => Err(ChannelError::Stopped {
                rank: endpoint.rank(),
                what: Guard::describe(&waiting),
                cause: Guard::new(endpoint, limit).cause(stopped, &waiting),
            }),
        }
    }
}
