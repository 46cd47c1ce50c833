//! Channels, the host side: what must exist before a kernel can `put`, `signal` and `wait`.
//!
//! * [`Endpoint`]: one rank's end of a job, on which everything else is made.
//! * [`RegisteredMemory`]: one memory a rank, mapped by the others.
//! * [`SemaphorePool`]: signals between this rank and its peers, a semaphore a channel.
//! * [`Guard`]: what ends a wait (abort, a dead peer, the caller's deadline) and says why.
//!
//! Making things is collective and may block, up to a deadline; using them is local.
#![deny(missing_docs)]

mod endpoint;
mod error;
mod guard;
mod registered;
mod semaphore;
mod shared;

pub use endpoint::Endpoint;
pub use error::ChannelError;
pub use guard::{Guard, StopCause};
pub use registered::RegisteredMemory;
pub use semaphore::SemaphorePool;
