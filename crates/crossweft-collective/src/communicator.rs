//! A rank's handle on the job.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, RegisteredMemory};
use crossweft_hal::Device;
use crossweft_net::Group;

use crate::all_reduce::{AllReduce, AllReduceOptions};
use crate::error::CollectiveError;

/// How a communicator behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// The longest any call may take, waits for peers included. Dead peers are noticed long
    /// before; this is for live ones that never come.
    pub timeout: Duration,
}

impl Default for CommunicatorOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
        }
    }
}

/// One rank of a job. Calls marked collective must be made by every rank, in the same order.
#[derive(Clone, Debug)]
pub struct Communicator {
    endpoint: Arc<Endpoint>,
    options: CommunicatorOptions,
}

impl Communicator {
    /// Makes the communicator of a joined group. Collective; blocks until all ranks have come.
    ///
    /// # Errors
    /// [`CollectiveError`]: a peer died or was late, or there is no memory.
    pub fn new(group: Arc<Group>, options: CommunicatorOptions) -> Result<Self, CollectiveError> {
        Self::on(Device::Cpu, group, options)
    }

    /// Makes the communicator of a joined group whose ranks compute on devices of one kind, this one on
    /// `device`. Several ranks may share a GPU. Collective; blocks until all ranks have come.
    ///
    /// # Errors
    /// As for [`new`](Self::new); also if ranks use devices of different kinds.
    pub fn on(
        device: Device,
        group: Arc<Group>,
        options: CommunicatorOptions,
    ) -> Result<Self, CollectiveError> {
        let endpoint = Endpoint::on(device, group, Instant::now() + options.timeout)?;
        Ok(Self { endpoint, options })
    }

    /// What this rank computes on.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.endpoint.device()
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.endpoint.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.endpoint.world_size()
    }

    /// The longest any call may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.options.timeout
    }

    /// What channels are made on.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Allocates zeroed memory of the same size on every rank, which all ranks can reach.
    /// Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError`]: sizes differ, no memory, a peer died or runs on another host.
    pub fn allocate(&self, bytes: u64) -> Result<SymmetricBuffer, CollectiveError> {
        let what = "allocating symmetric memory";
        let memory = self.endpoint.allocate(bytes, what)?;
        let memory = self.endpoint.register(memory, what, self.deadline())?;
        Ok(SymmetricBuffer { memory, bytes })
    }

    /// Prepares an all-reduce. Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError`]: ranks disagree, the options do not fit together, no memory, or a peer
    /// died.
    pub fn all_reduce(&self, options: AllReduceOptions) -> Result<AllReduce, CollectiveError> {
        AllReduce::prepare(self, options)
    }

    /// Blocks until every rank has come here.
    ///
    /// # Errors
    /// [`CollectiveError::Net`]: a peer died, was late, or aborted.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        Ok(self.endpoint.group().barrier(self.deadline())?)
    }

    /// Collects `payload` of every rank, in rank order. Collective; blocks. For small data.
    ///
    /// # Errors
    /// As for [`barrier`](Self::barrier).
    pub fn all_gather_bytes(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        Ok(self.endpoint.group().all_gather(payload, self.deadline())?)
    }

    /// Ends the job: every wait on every rank ends with an error that gives `reason`. Local; may
    /// be called from any thread.
    pub fn abort(&self, reason: &str) {
        self.endpoint.group().abort(reason);
    }

    /// Leaves in good order. Local.
    pub fn leave(&self) {
        self.endpoint.group().leave();
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }
}

/// Memory of the same size on every rank. Collectives on it copy nothing they need not.
#[derive(Clone, Debug)]
pub struct SymmetricBuffer {
    memory: Arc<RegisteredMemory>,
    bytes: u64,
}

impl SymmetricBuffer {
    /// Size in bytes, as asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies `data` into this rank's memory at `offset`. Not while a collective uses that range.
    ///
    /// # Errors
    /// [`CollectiveError::Hal`] if it does not fit.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), CollectiveError> {
        Ok(self.memory.local().write(offset, data)?)
    }

    /// Copies from this rank's memory at `offset`. Not while a collective uses that range.
    ///
    /// # Errors
    /// [`CollectiveError::Hal`] if the range lies outside.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), CollectiveError> {
        Ok(self.memory.local().read(offset, data)?)
    }

    /// The registered memory itself, for plans that are prepared by hand.
    #[must_use]
    pub fn registered(&self) -> Arc<RegisteredMemory> {
        Arc::clone(&self.memory)
    }
}
