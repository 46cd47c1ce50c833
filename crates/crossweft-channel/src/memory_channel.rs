//! Memory channels: the kernel itself writes the peer's memory.

use std::sync::Arc;
use std::time::Instant;

use crossweft_device::channel;

use crate::{ChannelError, Endpoint, RegisteredMemory, SemaphorePool};

/// A channel to a peer of this host. Its device handle is valid for as long as this.
#[derive(Debug)]
pub struct MemoryChannel {
    handle: channel::MemoryChannel,
    /// What the handle points into.
    _keep: (Arc<SemaphorePool>, [Arc<RegisteredMemory>; 2]),
}

impl MemoryChannel {
    /// A channel with the semaphore of channel `index` of `semaphores`. Local.
    ///
    /// `put` copies from this rank's part of `local` to the peer's part of `remote`; the peer's
    /// packets arrive in this rank's part of `remote`. They may be the same memory.
    ///
    /// # Errors
    /// [`ChannelError::NotOnThisHost`].
    ///
    /// # Panics
    /// As [`SemaphorePool::handle`].
    pub fn new(
        semaphores: &Arc<SemaphorePool>,
        index: usize,
        remote: &Arc<RegisteredMemory>,
        local: &Arc<RegisteredMemory>,
    ) -> Result<Self, ChannelError> {
        let semaphore = semaphores.handle(index);
        Ok(Self {
            handle: channel::MemoryChannel {
                semaphore,
                remote: remote.addr(semaphore.peer)?,
                local: local.local().addr(),
                packets: remote.local().addr(),
            },
            _keep: (
                Arc::clone(semaphores),
                [Arc::clone(remote), Arc::clone(local)],
            ),
        })
    }

    /// Channels with each of `peers`, in that order, all over the same memories. Collective, as
    /// [`SemaphorePool::new`]: `peers` may name a rank several times, and come in any order.
    ///
    /// # Errors
    /// As [`SemaphorePool::new`] and [`new`](Self::new).
    pub fn connect(
        endpoint: &Arc<Endpoint>,
        peers: &[u32],
        remote: &Arc<RegisteredMemory>,
        local: &Arc<RegisteredMemory>,
        deadline: Instant,
    ) -> Result<Vec<Self>, ChannelError> {
        let semaphores = Arc::new(SemaphorePool::new(endpoint, peers, deadline)?);
        (0..peers.len())
            .map(|index| Self::new(&semaphores, index, remote, local))
            .collect()
    }

    /// What kernels use.
    #[must_use]
    pub fn handle(&self) -> channel::MemoryChannel {
        self.handle
    }
}
