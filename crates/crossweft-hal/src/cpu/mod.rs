//! The CPU device.

mod grid;
mod idle;
mod isa;
mod memory;
mod stream;

pub use grid::{Grid, HostBlock, Interrupted, Schedule};
pub use idle::{Bell, Context, Supervisor};
pub use isa::{isa, reducer};
pub use memory::SharedMemory;
pub use stream::{Arguments, Kernel, KernelError, Stream};

/// Cores this process may run on.
#[must_use]
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
