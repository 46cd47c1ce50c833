//! Host memory that the device reaches: pinned, and mapped into its addresses.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::context::Context;
use super::error::CudaError;
use super::sys;
use crate::cpu::SharedMemory;

/// Pinned host memory, mapped for every device of the process. No kernel, copy or other thread may be using it when it is
/// dropped: it is then the next one's.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Arc<Context>,
    host: *mut c_void,
    device: u64,
    bytes: u64,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    Allocated(Pinned),
    /// Registered; what must outlive that is held here.
    Registered {
        _memory: Option<Arc<SharedMemory>>,
    },
}

/// Pinned memory that the driver has allocated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    host: *mut c_void,
    device: u64,
    /// A power of two, a page at least.
    bytes: u64,
}

// SAFETY: as for `PinnedMemory`.
unsafe impl Send for Pinned {}
// SAFETY: as for `PinnedMemory`.
unsafe impl Sync for Pinned {}

/// The least that is allocated.
const PAGE: u64 = 4096;

impl Pinned {
    /// One that was given back, or a new one; holds anything.
    fn take(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let bytes = bytes.max(PAGE).checked_next_power_of_two().unwrap_or(bytes);
        let mut idle = idle(context);
        if let Some(found) = idle.iter().position(|pinned| pinned.bytes == bytes) {
            return Ok(idle.swap_remove(found));
        }
        drop(idle);
        match Self::allocate(context, bytes) {
            Err(CudaError::OutOfMemory { .. }) if Self::free_idle(context) => {
                Self::allocate(context, bytes)
            }
            allocated => allocated,
        }
    }

    fn allocate(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let mut host = std::ptr::null_mut();
        let flags = sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP;
        context
            .run(|driver| {
                // SAFETY: a valid place for the answer.
                unsafe { driver.cuMemHostAlloc(&raw mut host, bytes as usize, flags) }
            })
            .map_err(|error| error.asking_for(bytes))?;
        let mut pinned = Self {
            host,
            device: 0,
            bytes,
        };
        match device_address_in(context, host) {
            Ok(device) => pinned.device = device,
            Err(error) => {
                pinned.free(context);
                return Err(error);
            }
        }
        Ok(pinned)
    }

    /// For the next who asks for as much.
    fn give_back(self, context: &Context) {
        idle(context).push(self);
    }

    /// Frees for good all that nobody has; says whether there was any.
    pub(super) fn free_idle(context: &Context) -> bool {
        let all = std::mem::take(&mut *idle(context));
        let was_any = !all.is_empty();
        all.into_iter().for_each(|pinned| pinned.free(context));
        was_any
    }

    /// Frees it for good, which waits for running kernels.
    fn free(self, context: &Context) {
        context.release("pinned memory", |driver| {
            // SAFETY: allocated by us, once, and nobody has it.
            unsafe { driver.cuMemFreeHost(self.host) }
        });
    }
}

fn idle(context: &Context) -> MutexGuard<'_, Vec<Pinned>> {
    let idle = context.idle_pinned.lock();
    idle.unwrap_or_else(PoisonError::into_inner)
}

/// Address for kernels on the context's device of memory that is pinned.
fn device_address_in(context: &Context, host: *mut c_void) -> Result<u64, CudaError> {
    let mut device = 0;
    context.run(|driver| {
        // SAFETY: a valid place for the answer; the memory is pinned.
        unsafe { driver.cuMemHostGetDevicePointer_v2(&raw mut device, host, 0) }
    })?;
    Ok(device)
}

// SAFETY: the memory belongs to the process, not to a thread, and is only touched by address.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates zeroed pinned memory of this process, which is kept for the next who asks for as much when this is dropped.
    /// May wait for running kernels where there is none left, so it is part of preparing.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::Call`].
    pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let bytes = bytes.max(1);
        let pinned = Pinned::take(context, bytes)?;
        // SAFETY: at least of this size, and nobody else's.
        unsafe { std::ptr::write_bytes(pinned.host.cast::<u8>(), 0, bytes as usize) };
        Ok(Self {
            context: Arc::clone(context),
            host: pinned.host,
            device: pinned.device,
            bytes,
            origin: Origin::Allocated(pinned),
        })
    }

    /// Pins and maps shared memory, the whole of it, and keeps it mapped here. A mapping can be
    /// pinned once at a time.
    ///
    /// # Errors
    /// [`CudaError::Call`], also if it is pinned already; [`CudaError::OutOfMemory`].
    pub fn register(context: &Arc<Context>, memory: Arc<SharedMemory>) -> Result<Self, CudaError> {
        let (address, bytes) = (memory.addr(), memory.bytes());
        // SAFETY: the mapping is held for as long as it is registered.
        unsafe { Self::register_with(context, address, bytes, Some(memory)) }
    }

    /// Pins and maps any host memory.
    ///
    /// # Errors
    /// As for [`register`](Self::register).
    ///
    /// # Safety
    /// The range must be mapped memory at a multiple of 8, and stay that until this is dropped.
    /// Nobody may use it through references but to atomics.
    pub unsafe fn register_range(
        context: &Arc<Context>,
        address: u64,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        // SAFETY: the caller's promise.
        unsafe { Self::register_with(context, address, bytes, None) }
    }

    /// # Safety
    /// As for [`register_range`](Self::register_range).
    unsafe fn register_with(
        context: &Arc<Context>,
        address: u64,
        bytes: u64,
        memory: Option<Arc<SharedMemory>>,
    ) -> Result<Self, CudaError> {
        let host: *mut c_void = std::ptr::with_exposed_provenance_mut(address as usize);
        let flags = sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP;
        context
            .run(|driver| {
                // SAFETY: the caller's promise.
                unsafe { driver.cuMemHostRegister_v2(host, bytes as usize, flags) }
            })
            .map_err(|error| error.asking_for(bytes))?;
        let mut pinned = Self {
            context: Arc::clone(context),
            host,
            device: 0,
            bytes,
            origin: Origin::Registered { _memory: memory },
        };
        pinned.device = pinned.device_address_in(context)?;
        Ok(pinned)
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn host_address(&self) -> u64 {
        self.host.expose_provenance() as u64
    }

    /// Address of the first byte for kernels on the device of the context that it was made with.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.device
    }

    /// Address of the first byte for kernels on another device.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn device_address_in(&self, context: &Context) -> Result<u64, CudaError> {
        device_address_in(context, self.host)
    }

    /// The memory as words of 8 bytes, for what host and device tell each other; a rest that fills
    /// no word is left out.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped and initialised for as long as this lives, and aligned (to a page, or as
        // `register_range` asks); atomics may be shared with whoever else writes here.
        unsafe { std::slice::from_raw_parts(self.host.cast(), self.bytes as usize / 8) }
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        match self.origin {
            Origin::Allocated(pinned) => pinned.give_back(&self.context),
            Origin::Registered { .. } => self.context.release("pinned memory", |driver| {
                // SAFETY: pinned by us, once; owners see to it that nobody uses it. It is still mapped: it is let go after
                // this.
                unsafe { driver.cuMemHostUnregister(self.host) }
            }),
        }
    }
}
