//! The driver's library, loaded at run time.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::error::{CudaError, advice, is_sticky};
use super::library::Library;
use super::multicast::Multicast;
use super::sys::{self, Code, Table};

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver, initialised.
///
/// Loading it is the only way to reach any of its functions, and each function is looked up when
/// it is first called, so that a driver that lacks some is used for the rest. It is never unloaded:
/// it has threads of its own.
pub struct Driver {
    library: Library,
    table: Table,
    /// How often each name was looked up in the library.
    lookups: Mutex<BTreeMap<&'static str, u32>>,
    version: Version,
    build: String,
    multicast: Multicast,
}

/// The place of a symbol: empty until it was looked up, then what was found.
#[derive(Debug)]
pub(super) struct Slot<F>(OnceLock<Option<F>>);

impl<F> Default for Slot<F> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("build", &self.build)
            .field("multicast", &self.multicast)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// The name under which the driver installs its library. Not `libcuda.so`: that may be the
    /// toolkit's stub.
    pub const LIBRARY: &'static str = "libcuda.so.1";

    /// The least version of CUDA that the driver must support: the first with all symbols that have
    /// no substitute here (`cuGraphInstantiateWithFlags`, `cuDeviceGetUuid_v2`).
    pub const NEEDED: Version = Version {
        major: 11,
        minor: 4,
    };

    /// Loads and initialises the driver of this machine. Blocks for as long as the driver takes,
    /// about 0.1 to 1 s for the first in a process.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::TooOld`], [`CudaError::NoDevice`], or
    /// [`CudaError::Call`] if it cannot be initialised.
    pub fn open() -> Result<Arc<Self>, CudaError> {
        // SAFETY: on every system this name is the driver's, and nobody else's.
        unsafe { Self::load(Path::new(Self::LIBRARY), Multicast::from_environment()) }
    }

    /// As [`open`](Self::open), from a library of another name or place, and with another word on
    /// multicast.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    ///
    /// # Safety
    /// The library must be the driver, or stand in for it: its functions must be what their names
    /// say.
    pub unsafe fn load(library: &Path, multicast: Multicast) -> Result<Arc<Self>, CudaError> {
        // SAFETY: the caller vouches for the library.
        let loaded = unsafe { Library::load(library) };
        let loaded = loaded.map_err(|reason| CudaError::NoDriver {
            library: library.display().to_string(),
            reason,
        })?;
        let mut driver = Self {
            library: loaded,
            table: Table::default(),
            lookups: Mutex::default(),
            version: Version { major: 0, minor: 0 },
            build: kernel_driver(),
            multicast,
        };
        let mut version = 0;
        // SAFETY: a valid place for the answer; this may be called before initialisation.
        unsafe { driver.cuDriverGetVersion(&raw mut version)? };
        let version = u32::try_from(version).unwrap_or(0);
        driver.version = Version {
            major: version / 1000,
            minor: version % 1000 / 10,
        };
        if driver.version < Self::NEEDED {
            return Err(CudaError::TooOld {
                found: driver.version,
                needed: Self::NEEDED,
            });
        }
        // SAFETY: no arguments but flags, which must be 0.
        unsafe { driver.cuInit(0) }.map_err(|error| {
            if error.is_code(sys::NO_DEVICE) {
                CudaError::NoDevice {
                    driver: driver.version,
                }
            } else {
                error
            }
        })?;
        Ok(Arc::new(driver))
    }

    /// The version of CUDA that the driver supports.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The version of the kernel driver, such as `580.95.05`; empty where the kernel does not say.
    #[must_use]
    pub fn build(&self) -> &str {
        &self.build
    }

    /// Whether NVLink multicast may be used, and why.
    #[must_use]
    pub fn multicast(&self) -> &Multicast {
        &self.multicast
    }

    /// How often each symbol was looked up in the library so far.
    #[must_use]
    pub fn lookups(&self) -> BTreeMap<&'static str, u32> {
        self.locked_lookups().clone()
    }

    /// Lets the calling thread make calls that the driver otherwise forbids to every thread while
    /// any stream of the process is being captured in global mode, which is how frameworks capture.
    /// For threads of one's own that never touch the captured streams, such as a proxy: without it
    /// their queries would break other people's captures.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn relax_capture_of_this_thread(&self) -> Result<(), CudaError> {
        let mut mode = sys::CAPTURE_RELAXED;
        // SAFETY: a valid place, which holds a mode and receives the one before.
        unsafe { self.cuThreadExchangeStreamCaptureMode(&raw mut mode) }
    }

    /// Runs calls that the driver otherwise forbids while a stream is being captured, by this thread or in global mode by
    /// another, and that have nothing to do with what is captured: allocations, questions about events.
    ///
    /// # Errors
    /// [`CudaError::Call`] if the mode cannot be changed; `calls` have not run then.
    pub fn aside_from_captures<T>(&self, calls: impl FnOnce() -> T) -> Result<T, CudaError> {
        /// Puts the mode back, also when `calls` panics.
        struct Back<'a>(&'a Driver, i32);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                // SAFETY: a valid place, which holds a mode and receives the one before.
                let back = unsafe { self.0.cuThreadExchangeStreamCaptureMode(&raw mut self.1) };
                if let Err(error) = back {
                    tracing::warn!(%error, "the thread's capture mode was not restored");
                }
            }
        }

        let mut mode = sys::CAPTURE_RELAXED;
        // SAFETY: a valid place, which holds a mode and receives the one before.
        unsafe { self.cuThreadExchangeStreamCaptureMode(&raw mut mode)? };
        let _back = Back(self, mode);
        Ok(calls())
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// What `slot` holds, looked up in the library if this is the first time.
    ///
    /// # Safety
    /// `F` must be the type of the function called `name`.
    pub(super) unsafe fn symbol<F: Copy>(
        &self,
        slot: &Slot<F>,
        name: &'static str,
    ) -> Result<F, CudaError> {
        const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
        let missing = || CudaError::Unsupported {
            symbol: name,
            driver: self.version,
        };
        if let Some(found) = slot.0.get() {
            return found.ok_or_else(missing);
        }
        // The one rule about names: without permission, those of multicast do not reach the
        // library at all.
        if let Multicast::Off { reason } = &self.multicast
            && name.starts_with("cuMulticast")
        {
            return Err(CudaError::MulticastOff {
                symbol: name,
                reason: reason.clone(),
            });
        }
        let found = slot.0.get_or_init(|| {
            *self.locked_lookups().entry(name).or_default() += 1;
            let place = self.library.symbol(name)?;
            // SAFETY: both are a pointer (asserted above); the caller says that it is to a function
            // of this type, and the library is never unloaded.
            Some(unsafe { std::mem::transmute_copy::<NonNull<c_void>, F>(&place) })
        });
        found.ok_or_else(missing)
    }

    /// Whether the library has the symbol of a call that was answered so.
    pub(super) fn is_missing<T>(result: &Result<T, CudaError>) -> bool {
        matches!(result, Err(CudaError::Unsupported { .. }))
    }

    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        match code {
            sys::SUCCESS => Ok(()),
            sys::OUT_OF_MEMORY => Err(CudaError::OutOfMemory {
                call,
                device: None,
                bytes: None,
            }),
            code if is_sticky(code) => Err(CudaError::ContextLost {
                call,
                device: None,
                code,
                name: self.name_of(code),
            }),
            code => Err(CudaError::Call {
                call,
                device: None,
                code,
                name: self.name_of(code),
                advice: advice(code),
            }),
        }
    }

    fn name_of(&self, code: Code) -> &'static str {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the slot has the type of its name.
        let function = unsafe { self.symbol(&self.table.cuGetErrorName, "cuGetErrorName") };
        // Not through `check`, which would ask for the name of this function's own failure.
        // SAFETY: a valid place for the answer.
        let named = function.map(|function| unsafe { function(code, &raw mut name) });
        if named.is_ok_and(|code| code == sys::SUCCESS) && !name.is_null() {
            // SAFETY: the driver answered with a string of its own, and is never unloaded.
            unsafe { CStr::from_ptr::<'static>(name) }
                .to_str()
                .unwrap_or("an error with an odd name")
        } else {
            "an error without a name"
        }
    }

    fn locked_lookups(&self) -> MutexGuard<'_, BTreeMap<&'static str, u32>> {
        self.lookups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The version in the first line of what the kernel driver says of itself:
/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...`.
fn kernel_driver() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    let line = text.lines().next().unwrap_or_default();
    line.split_whitespace()
        .find(is_version)
        .unwrap_or_default()
        .to_owned()
}
