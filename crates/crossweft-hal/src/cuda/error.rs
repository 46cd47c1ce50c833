//! What can go wrong with the driver, in words that say what to do next.

use std::io;
use std::time::Duration;

use super::driver::Version;

/// Why something could not be done with a CUDA device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error(
        "no CUDA driver: {reason}; install the NVIDIA driver, or start the container with --gpus \
         all; the CPU device works without"
    )]
    NoDriver {
        /// The library that was tried.
        library: String,
        /// What the loader said, which names the library.
        reason: String,
    },
    /// The driver is there, and no device that this process may use.
    #[error(
        "the CUDA driver {driver} sees no device; check nvidia-smi, CUDA_VISIBLE_DEVICES and what \
         the container may use"
    )]
    NoDevice {
        /// What the driver supports.
        driver: Version,
    },
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}; there are {count}, counted from 0")]
    UnknownDevice {
        /// What was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The driver is too old.
    #[error("the driver supports CUDA {found}, crossweft needs {needed}; update the NVIDIA driver")]
    TooOld {
        /// What the driver supports.
        found: Version,
        /// The least that is needed.
        needed: Version,
    },
    /// The driver's library lacks a symbol.
    #[error(
        "the driver (CUDA {driver}) has no {symbol}; update the NVIDIA driver to use what needs it"
    )]
    Unsupported {
        /// The symbol.
        symbol: &'static str,
        /// What the driver supports.
        driver: Version,
    },
    /// The device, or its driver, cannot do it.
    #[error("CUDA device {device} cannot {what}: {reason}")]
    Incapable {
        /// The device.
        device: u32,
        /// What was asked for.
        what: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// NVLink multicast is off, so its symbols are not even looked up.
    #[error("{symbol} needs NVLink multicast, which is off: {reason}")]
    MulticastOff {
        /// The symbol that would have been looked up.
        symbol: &'static str,
        /// Why it is off, and how to turn it on.
        reason: String,
    },
    /// The driver refused a call.
    #[error("{call} failed on {}: {name} ({code}); {advice}", on(*.device))]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The device, where one was involved.
        device: Option<u32>,
        /// The driver's code.
        code: u32,
        /// The code's name.
        name: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// An earlier kernel or the hardware broke the context; nothing on this device works again in
    /// this process.
    #[error(
        "{call} on {}: {name} ({code}): the context is lost, probably by an earlier kernel; \
         start a new process, and look for the kernel with compute-sanitizer",
        on(*.device)
    )]
    ContextLost {
        /// The driver's function that reported it.
        call: &'static str,
        /// The device, where one was involved.
        device: Option<u32>,
        /// The driver's code.
        code: u32,
        /// The code's name.
        name: &'static str,
    },
    /// There is not enough memory.
    #[error(
        "{call} on {}: out of memory{}; use smaller buffers, or free what other processes hold \
         (nvidia-smi shows them)",
        on(*.device),
        .bytes.map_or(String::new(), |bytes| format!(" for {bytes} bytes"))
    )]
    OutOfMemory {
        /// The driver's function.
        call: &'static str,
        /// The device, where one was involved.
        device: Option<u32>,
        /// Bytes asked for, where known.
        bytes: Option<u64>,
    },
    /// What was waited for did not end in time. It is still running, or still to begin, and will use its buffers; the
    /// context is whole.
    #[error(
        "{what} on CUDA device {device} did not end within {} ms and is still running or queued: keep its buffers \
         until the stream, or the device, has come to its end; a kernel may be waiting for a peer that is late or gone",
        .waited.as_millis()
    )]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// The device.
        device: u32,
        /// How long.
        waited: Duration,
    },
    /// The driver could not compile PTX.
    #[error("{module} cannot be compiled for CUDA device {device} ({name}): {log}")]
    Compile {
        /// The module's name.
        module: String,
        /// The device.
        device: u32,
        /// The code's name.
        name: &'static str,
        /// The compiler's words.
        log: String,
    },
    /// A kernel is not in its module.
    #[error("{module} has no kernel {kernel}; was its PTX built from another version?")]
    UnknownKernel {
        /// The module's name.
        module: String,
        /// The kernel.
        kernel: String,
    },
    /// Memory cannot be shared in the way asked for.
    #[error("memory at {address:#x} cannot be {what}: {reason}")]
    NotShareable {
        /// First address.
        address: u64,
        /// "exported" or "imported".
        what: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// A range lies outside its memory.
    #[error("bytes {offset}..{offset}+{bytes} lie outside a memory of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// Size of the memory.
        size: u64,
    },
    /// A stream that is being captured can only be recorded to.
    #[error(
        "{what} is not possible on a stream that is being captured into a graph; do it before the \
         capture begins"
    )]
    Capturing {
        /// What was asked for.
        what: &'static str,
    },
    /// The operating system refused something.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn on(device: Option<u32>) -> String {
    device.map_or("the CUDA driver".to_owned(), |device| {
        format!("CUDA device {device}")
    })
}

impl CudaError {
    /// The same error, with the device that it came from unless that is known already.
    pub(super) fn on_device(mut self, ordinal: u32) -> Self {
        if let Self::Call { device, .. }
        | Self::ContextLost { device, .. }
        | Self::OutOfMemory { device, .. } = &mut self
        {
            device.get_or_insert(ordinal);
        }
        self
    }

    /// The same error, with the number of bytes that there was no memory for.
    pub(super) fn asking_for(mut self, wanted: u64) -> Self {
        if let Self::OutOfMemory { bytes, .. } = &mut self {
            bytes.get_or_insert(wanted);
        }
        self
    }

    /// Whether the driver answered with this code.
    pub(super) fn is_code(&self, wanted: u32) -> bool {
        matches!(self, Self::Call { code, .. } if *code == wanted)
    }

    /// Whether no CUDA call of this process can succeed again on the device.
    #[must_use]
    pub fn is_context_lost(&self) -> bool {
        matches!(self, Self::ContextLost { .. })
    }
}

/// Codes after which a context stays broken: `cuda.h` says of each that the process must be
/// relaunched, or that it leaves the context in an inconsistent state.
pub(super) fn is_sticky(code: u32) -> bool {
    matches!(
        code,
        214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721
    )
}

/// What to do about a code.
pub(super) fn advice(code: u32) -> &'static str {
    match code {
        1 => "an argument was wrong, which is a defect of the caller",
        3 | 4 => "the driver is shutting down: end all work before the process exits",
        34 => "this libcuda is the toolkit's stub: put the driver's own first in the library path",
        36 | 803 | 804 => "kernel driver and libcuda differ: install one version of both",
        46 | 805..=810 => "the device is busy or its MPS server refuses: see nvidia-smi",
        101 => "see CUDA_VISIBLE_DEVICES and nvidia-smi",
        200 | 209 | 218 | 222 => "the kernels do not fit this device or driver: update the driver",
        201 | 400 => "a handle is stale, which is a defect of the caller",
        208 | 712 => "the memory is mapped or registered already: do it once and share the result",
        217 | 704 | 705 => "these devices cannot reach each other's memory: see the peer matrix",
        221 | 223 => "the just-in-time compiler is missing or disabled (CUDA_DISABLE_PTX_JIT)",
        304 => "the operating system refused: see dmesg, ulimit -l and ulimit -n",
        701 => "use fewer threads or less shared memory per block",
        720 => "use fewer blocks: all must be resident at once",
        800 => "permission is missing: for fabric handles, the IMEX channel device must be there",
        801 => "this device or driver cannot do it",
        802 => "the fabric manager is not ready: wait for it, or restart it",
        900..=908 => "not possible while a stream is being captured into a graph: do it before",
        _ => "see the driver's documentation, and dmesg for Xid lines",
    }
}
