//! The CPU device.

mod cores;
mod grid;
mod idle;
mod isa;
mod memory;
mod norm;
mod room;
mod stream;

pub use cores::{bind_to_core, cores};
pub use grid::{Grid, HostBlock, Interrupted, Schedule};
pub use idle::{Bell, Context, Supervisor};
pub use isa::{isa, reducer, rows, scaler};
pub use memory::SharedMemory;
pub use norm::Norm;
pub use room::available_memory;
pub use stream::{Arguments, Kernel, KernelError, Stream};
