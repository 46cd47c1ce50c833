//! The primary context of a device, which a process shares with everyone in it (PyTorch included).

use std::fmt;
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};

use super::copy::Staging;
use super::device::Device;
use super::driver::Driver;
use super::error::CudaError;
use super::module::Loaded;
use super::pinned::Pinned;
use super::sys::{CuContext, CuStream};

/// The primary context of a device, retained until the last user of it is dropped.
///
/// Nobody has to make it current: every call here does so for itself and leaves the caller's
/// thread as it was.
pub struct Context {
    device: Device,
    raw: CuContext,
    /// What copies of plain host memory go through; made when first needed.
    pub(super) staging: Mutex<Option<Staging>>,
    /// Streams that nobody has any more, with nothing left to do and others. The device's few hardware queues
    /// are given to streams in turn as they are made, so that a process that makes and destroys streams soon
    /// has two on one queue, where a kernel waits behind another that may be waiting for it.
    pub(super) streams: Mutex<Given>,
    /// Pinned memory that nobody has any more: the driver frees it, and finds more, only when no kernel runs, so that a rank
    /// that frees some would wait for kernels that wait for its next launch.
    pub(super) idle_pinned: Mutex<Vec<Pinned>>,
    /// Modules that several may use, and that are unloaded with this: the driver waits for all kernels before it unloads one,
    /// so that a rank that does would wait for kernels that wait for its next launch. There are as many as kernels.
    pub(super) modules: Mutex<Vec<Loaded>>,
}

/// Streams that were given back.
#[derive(Debug, Default)]
pub(super) struct Given {
    /// With nothing left to do.
    pub(super) idle: Vec<CuStream>,
    /// Still at work when they were last looked at.
    pub(super) busy: Vec<CuStream>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context")
            .field(&self.device.ordinal())
            .finish()
    }
}

impl Context {
    /// Retains the primary context of `device`. Blocks; the first in a process takes about 0.2 s.
    ///
    /// # Errors
    /// [`CudaError::Call`], [`CudaError::OutOfMemory`].
    pub fn retain(device: &Device) -> Result<Arc<Self>, CudaError> {
        let mut raw = CuContext::NULL;
        // SAFETY: a valid place for the answer.
        let retained = unsafe {
            device
                .driver()
                .cuDevicePrimaryCtxRetain(&raw mut raw, device.handle())
        };
        retained.map_err(|error| device.named(error))?;
        Ok(Arc::new(Self {
            device: device.clone(),
            raw,
            staging: Mutex::new(None),
            streams: Mutex::default(),
            idle_pinned: Mutex::new(Vec::new()),
            modules: Mutex::new(Vec::new()),
        }))
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<Driver> {
        self.device.driver()
    }

    /// The number of the device.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    pub(super) fn raw(&self) -> CuContext {
        self.raw
    }

    /// Runs `body` with this context current on the calling thread, for libraries that want that,
    /// and restores what was current before, also after a panic.
    ///
    /// # Errors
    /// [`CudaError::Call`] if it cannot be made current; `body` has not run then.
    pub fn with_current<T>(&self, body: impl FnOnce() -> T) -> Result<T, CudaError> {
        self.run(|_| Ok(body()))
    }

    /// Runs driver calls with this context current; their errors name the device.
    pub(super) fn run<T>(
        &self,
        calls: impl FnOnce(&Driver) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        /// Ends what was begun, also when `calls` panics.
        struct Pop<'a>(&'a Driver);
        impl Drop for Pop<'_> {
            fn drop(&mut self) {
                let mut popped = CuContext::NULL;
                // SAFETY: a valid place; pops what was pushed below.
                if let Err(error) = unsafe { self.0.cuCtxPopCurrent_v2(&raw mut popped) } {
                    tracing::warn!(%error, "the caller's CUDA context was not restored");
                }
            }
        }

        let driver: &Driver = self.device.driver();
        let entered = || {
            let mut current = CuContext::NULL;
            // SAFETY: a valid place for the answer.
            unsafe { driver.cuCtxGetCurrent(&raw mut current)? };
            // Usually it is current already, and asking is cheaper than pushing.
            if current == self.raw {
                return Ok(None);
            }
            // SAFETY: the context is retained for as long as this lives.
            unsafe { driver.cuCtxPushCurrent_v2(self.raw)? };
            Ok(Some(Pop(driver)))
        };
        let result = entered().and_then(|_pop| calls(driver));
        result.map_err(|error| self.device.named(error))
    }

    /// Runs driver calls that free something. There is nobody to tell of a failure, which is no
    /// news after a lost context or at the end of the process.
    pub(super) fn release(&self, what: &str, calls: impl FnOnce(&Driver) -> Result<(), CudaError>) {
        if let Err(error) = self.run(calls)
            && !error.is_code(super::sys::DEINITIALIZED)
        {
            tracing::debug!(%error, "{what} was not released");
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // What it holds refers to the context by its raw handle, so it goes first.
        let staging = self
            .staging
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = staging.take() {
            staging.free(self);
        }
        let given = self
            .streams
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let Given { idle, busy } = std::mem::take(given);
        for stream in idle.into_iter().chain(busy) {
            self.release("a stream", |driver| {
                // SAFETY: made by `Stream::new`, and nobody has it any more.
                unsafe { driver.cuStreamDestroy_v2(stream) }
            });
        }
        Pinned::free_idle(self);
        Loaded::unload_all(self);
        let device = &self.device;
        // SAFETY: retained once in `retain`, and nothing that needs it is left: all hold this.
        let released = unsafe {
            device
                .driver()
                .cuDevicePrimaryCtxRelease_v2(device.handle())
        };
        if let Err(error) = released {
            tracing::debug!(%error, "the primary context was not released");
        }
    }
}
