use std::io;

use crate::cuda::CudaError;

/// What can go wrong with hardware.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HalError {
    /// The operating system refused memory.
    #[error(
        "cannot allocate {bytes} bytes of shared memory ({call}: {source}); free some memory or \
         raise the limit of this process or container"
    )]
    Allocate {
        /// Bytes asked for.
        bytes: u64,
        /// The system call.
        call: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// Memory handed over by another process is not what was announced.
    #[error("shared memory from a peer is unusable: {reason}")]
    Import {
        /// What is wrong with it.
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
    /// Stacks or threads could not be made.
    #[error("cannot create {what}: {source}")]
    Resource {
        /// What was wanted.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A stream's worker thread is gone; it only ends with its stream, so a launch panicked.
    #[error("the stream's worker thread ended; a launch on it panicked")]
    StreamEnded,
    /// A CUDA device or its driver.
    #[error(transparent)]
    Cuda(Box<CudaError>),
}

impl From<CudaError> for HalError {
    fn from(error: CudaError) -> Self {
        // Boxed, because it is larger than all other variants, which the CPU device returns.
        Self::Cuda(Box::new(error))
    }
}
