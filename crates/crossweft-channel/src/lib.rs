//! Channels, the host side: what must exist before a kernel can `put`, `signal` and `wait`.
//!
//! * [`Endpoint`]: one rank's end of a job, on which everything else is made.
//! * [`RegisteredMemory`]: one memory a rank, mapped by the others.
//! * [`SemaphorePool`]: signals between this rank and its peers, a semaphore a channel.
//! * [`MemoryChannel`]: the kernel writes a peer's memory itself.
//! * [`PortChannel`]: a proxy thread ([`ProxyService`]) does it, over mapped memory or TCP.
//! * [`SwitchChannel`]: reduce from, and broadcast to, the memory of a whole group.
//! * [`Guard`]: what ends a wait (abort, a dead peer, the caller's deadline) and says why;
//!   [`KernelGuard`]: the same for kernels on a CUDA device.
//! * [`Ledger`]: what ranks say of their calls, compared as they make them.
//!
//! Making things is collective and may block, up to a deadline; using them is local. The owners made
//! here hand out `repr(C)` handles, which kernels use through `crossweft-device`; a handle is valid for
//! as long as its owner.
//!
//! Inside: `shared` is the only module that touches shared memory, but for the bells in `endpoint`;
//! `board` is what ranks note there of
//! their calls; `transport` is how a proxy reaches a peer, `tcp` and `frame` are the way over a network, `ids`
//! numbers what triggers name.
#![deny(missing_docs)]

mod board;
mod endpoint;
mod error;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
mod guard;
mod ids;
mod kernel_guard;
mod ledger;
mod memory_channel;
mod port;
mod registered;
mod semaphore;
mod shared;
mod switch;
mod tcp;
mod transport;

pub use endpoint::{CallLine, Endpoint};
pub use error::ChannelError;
pub use guard::{Guard, StopCause};
pub use kernel_guard::KernelGuard;
pub use ledger::{Difference, Ledger};
pub use memory_channel::MemoryChannel;
pub use port::{Carrier, Flow, PortChannel, ProxyOptions, ProxyService};
pub use registered::RegisteredMemory;
pub use semaphore::SemaphorePool;
pub use shared::{Image, ImageBuilder};
pub use switch::SwitchChannel;
pub use transport::TransportChoice;
