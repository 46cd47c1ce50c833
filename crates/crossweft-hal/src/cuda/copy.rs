//! Copies: asynchronous ones by address on a stream, and blocking ones of plain host memory.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::context::Context;
use super::error::CudaError;
use super::stream::{Stream, copies, ended, poll};
use super::sys::{self, CuStream};

impl Stream {
    /// Copies between any two places that the device reaches, in this stream's order. Does not
    /// block for device and pinned memory; plain host memory is copied before it returns or while
    /// the stream runs, as the driver likes.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// Both ranges must be valid, and used by nobody in ways that conflict, until the copy has
    /// ended.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
        self.context().run(|driver| {
            // SAFETY: the caller's promise.
            unsafe { driver.cuMemcpyAsync(to, from, bytes as usize, self.handle()) }
        })
    }

    /// Copies between the memories of two devices, in this stream's order: over their link if
    /// there is one, else through the host. Does not block.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// As for [`copy`](Self::copy); each address must belong to the context beside it.
    pub unsafe fn copy_peer(
        &self,
        (to, to_context): (u64, &Context),
        (from, from_context): (u64, &Context),
        bytes: u64,
    ) -> Result<(), CudaError> {
        self.context().run(|driver| {
            // SAFETY: the caller's promise; the contexts live.
            unsafe {
                driver.cuMemcpyPeerAsync(
                    to,
                    to_context.raw(),
                    from,
                    from_context.raw(),
                    bytes as usize,
                    self.handle(),
                )
            }
        })
    }

    /// Sets bytes of device memory, in this stream's order. Does not block.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub unsafe fn fill(&self, to: u64, value: u8, bytes: u64) -> Result<(), CudaError> {
        self.context().run(|driver| {
            // SAFETY: the caller's promise.
            unsafe { driver.cuMemsetD8Async(to, value, bytes as usize, self.handle()) }
        })
    }

    /// Sets words of 4 bytes of device memory, in this stream's order. Does not block.
    ///
    /// # Errors
    /// [`CudaError::Call`], also for an address that is not a multiple of 4.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub unsafe fn fill_words(&self, to: u64, value: u32, words: u64) -> Result<(), CudaError> {
        self.context().run(|driver| {
            // SAFETY: the caller's promise.
            unsafe { driver.cuMemsetD32Async(to, value, words as usize, self.handle()) }
        })
    }
}

/// How long a blocking copy may take before something is wrong: copies wait for no kernel.
const LIMIT: Duration = Duration::from_secs(30);
/// Bytes that go through pinned memory at a time.
const STAGING_BYTES: usize = 1 << 20;

/// A stream and pinned memory for blocking copies.
///
/// The driver's own blocking copies run on the legacy default stream: they would wait for every
/// blocking stream of the process, without a deadline. And a copy that is given up may still be
/// running; then what it uses must stay, which a caller's slice cannot, so it is leaked here.
#[derive(Debug)]
pub(super) struct Staging {
    stream: CuStream,
    host: *mut u8,
}

// SAFETY: the pinned memory is owned and reached through this alone.
unsafe impl Send for Staging {}

impl Staging {
    fn new(context: &Context) -> Result<Self, CudaError> {
        context.run(|driver| {
            let mut host = std::ptr::null_mut();
            // SAFETY: valid places for the answers.
            unsafe {
                driver.cuMemHostAlloc(&raw mut host, STAGING_BYTES, sys::HOST_PORTABLE)?;
                let mut stream = CuStream::NULL;
                let made = copies(driver, &mut stream);
                if let Err(error) = made {
                    // The first failure is the one to tell.
                    let _ = driver.cuMemFreeHost(host);
                    return Err(error);
                }
                let host = host.cast();
                Ok(Self { stream, host })
            }
        })
    }

    pub(super) fn free(self, context: &Context) {
        context.release("the stream of copies", |driver| {
            // SAFETY: made in `new`; nothing runs on it, or this would have been leaked.
            unsafe {
                driver.cuStreamDestroy_v2(self.stream)?;
                driver.cuMemFreeHost(self.host.cast())
            }
        });
    }

    /// Blocks until what was submitted has ended.
    fn wait(&self, context: &Context) -> Result<(), CudaError> {
        poll("a copy", context, Instant::now() + LIMIT, || {
            // SAFETY: the stream lives.
            context.run(|driver| ended(unsafe { driver.cuStreamQuery(self.stream) }))
        })
    }
}

impl Context {
    /// Runs `work` with the staging area; if it fails, the area is leaked, because a copy may
    /// still be using it.
    fn staged(
        &self,
        work: impl FnOnce(&Staging) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut place = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = match place.take() {
            Some(staging) => staging,
            None => Staging::new(self)?,
        };
        work(&staging)?;
        *place = Some(staging);
        Ok(())
    }

    /// Copies `data` to device memory, ordered with no stream. Blocks, at most 30 s a MiB.
    ///
    /// # Errors
    /// [`CudaError::Call`], [`CudaError::Deadline`], [`CudaError::OutOfMemory`].
    ///
    /// # Safety
    /// The range must be device memory of this context, and nobody may use it meanwhile in ways
    /// that conflict.
    pub unsafe fn write(&self, to: u64, data: &[u8]) -> Result<(), CudaError> {
        self.staged(|staging| {
            for (index, chunk) in data.chunks(STAGING_BYTES).enumerate() {
                let to = to + (index * STAGING_BYTES) as u64;
                let from = staging.host.expose_provenance() as u64;
                // SAFETY: the staging area is ours, idle, and at least as long as a chunk.
                unsafe {
                    std::ptr::copy_nonoverlapping(chunk.as_ptr(), staging.host, chunk.len());
                }
                self.run(|driver| {
                    // SAFETY: the caller's promise for the target; the source stays.
                    unsafe { driver.cuMemcpyAsync(to, from, chunk.len(), staging.stream) }
                })?;
                staging.wait(self)?;
            }
            Ok(())
        })
    }

    /// Copies device memory into `data`, ordered with no stream. Blocks, at most 30 s a MiB.
    ///
    /// # Errors
    /// As for [`write`](Self::write); `data` is then partly written.
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    pub unsafe fn read(&self, from: u64, data: &mut [u8]) -> Result<(), CudaError> {
        self.staged(|staging| {
            for (index, chunk) in data.chunks_mut(STAGING_BYTES).enumerate() {
                let from = from + (index * STAGING_BYTES) as u64;
                let to = staging.host.expose_provenance() as u64;
                self.run(|driver| {
                    // SAFETY: the caller's promise for the source; the target stays.
                    unsafe { driver.cuMemcpyAsync(to, from, chunk.len(), staging.stream) }
                })?;
                staging.wait(self)?;
                // SAFETY: the copy into the staging area, which is as long, has ended.
                unsafe {
                    std::ptr::copy_nonoverlapping(staging.host, chunk.as_mut_ptr(), chunk.len());
                }
            }
            Ok(())
        })
    }

    /// Sets bytes of device memory, ordered with no stream. Blocks, at most 30 s.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    ///
    /// # Safety
    /// As for [`write`](Self::write).
    pub unsafe fn fill(&self, to: u64, value: u8, bytes: u64) -> Result<(), CudaError> {
        self.staged(|staging| {
            self.run(|driver| {
                // SAFETY: the caller's promise.
                unsafe { driver.cuMemsetD8Async(to, value, bytes as usize, staging.stream) }
            })?;
            staging.wait(self)
        })
    }
}
