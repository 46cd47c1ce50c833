//! How a proxy moves bytes and signals to one peer.

use std::fmt::Debug;
use std::sync::Arc;

use crossweft_hal::cuda::Context;
use serde::{Deserialize, Serialize};

use crate::shared::{self, CopyStream, Place};
use crate::{ChannelError, Endpoint};

/// Which way a proxy service takes to its peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TransportChoice {
    /// Mapped memory on the same host, TCP to other hosts.
    #[default]
    Auto,
    /// TCP to every peer.
    Tcp,
}

/// A one-way street to one peer. Requests arrive in order.
pub(crate) trait Transport: Debug + Send {
    /// Copies `bytes` bytes from this rank's memory to the peer's. Both ranges exist.
    fn put(&mut self, dst: Place<'_>, src: Place<'_>, bytes: u64) -> Result<(), ChannelError>;

    /// Adds one to a counter of the peer's, after the puts before.
    fn signal(&mut self, counter: Place<'_>) -> Result<(), ChannelError>;

    /// Asks to be told when everything before has arrived.
    fn start_flush(&mut self) -> Result<(), ChannelError>;

    /// Waits for what [`start_flush`](Self::start_flush) asked for.
    fn finish_flush(&mut self) -> Result<(), ChannelError>;

    /// Tells the peer that nothing more will come; also done when dropped.
    fn close(&mut self);
}

/// To a rank of this host whose CUDA memory is mapped: the copy engines write it.
#[derive(Debug)]
pub(crate) struct CopyEngine(CopyStream);

impl CopyEngine {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, ChannelError> {
        CopyStream::new(context)
            .map(Self)
            .map_err(|e| ChannelError::memory("making a stream for copies")(e.into()))
    }
}

impl Transport for CopyEngine {
    fn put(&mut self, dst: Place<'_>, src: Place<'_>, bytes: u64) -> Result<(), ChannelError> {
        self.0.put(dst, src, bytes)
    }

    fn signal(&mut self, counter: Place<'_>) -> Result<(), ChannelError> {
        self.0.signal(counter)
    }

    fn start_flush(&mut self) -> Result<(), ChannelError> {
        self.0.start_flush()
    }

    fn finish_flush(&mut self) -> Result<(), ChannelError> {
        self.0.finish_flush()
    }

    fn close(&mut self) {
        // Memory may be unmapped once the proxy has ended.
        if let Err(error) = self.start_flush().and_then(|()| self.finish_flush()) {
            tracing::warn!("copies under way were not waited for: {error}");
        }
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        self.close();
    }
}

/// To a rank of this host: the proxy itself writes the mapped memory.
#[derive(Debug)]
pub(crate) struct Mapped {
    endpoint: Arc<Endpoint>,
}

impl Mapped {
    pub(crate) fn new(endpoint: &Arc<Endpoint>) -> Self {
        Self {
            endpoint: Arc::clone(endpoint),
        }
    }
}

impl Transport for Mapped {
    fn put(&mut self, dst: Place<'_>, src: Place<'_>, bytes: u64) -> Result<(), ChannelError> {
        shared::copy(dst, src, bytes)
    }

    fn signal(&mut self, counter: Place<'_>) -> Result<(), ChannelError> {
        shared::signal(&self.endpoint, counter)
    }

    // A copy has arrived when it is done.

    fn start_flush(&mut self) -> Result<(), ChannelError> {
        Ok(())
    }

    fn finish_flush(&mut self) -> Result<(), ChannelError> {
        Ok(())
    }

    fn close(&mut self) {}
}
