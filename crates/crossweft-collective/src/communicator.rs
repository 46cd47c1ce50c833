//! A rank's handle on the job.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, RegisteredMemory};
use crossweft_device::DataType;
use crossweft_executor::{OneSided, Options, Stage, Staged};
use crossweft_hal::{Device, Memory};
use crossweft_net::launch::Job;
use crossweft_net::{Cancel, Group, JoinOptions, LONGEST_TIMEOUT, RendezvousOptions, UniqueId};
use crossweft_plan::{Collective, Plan};

use crate::collective::{CollectiveOptions, PreparedCollective};
use crate::devices::Devices;
use crate::error::CollectiveError;
use crate::exchange::{Exchange, ExchangeOptions};
use crate::registry::{Registry, RegistryError};
use crate::rms_norm::{AllReduceRmsNorm, RmsNormOptions};
use crate::selection::Selection;

/// How a communicator behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommunicatorOptions {
    /// The longest any call may take, waits for peers included; more than a hundred years are a hundred. Dead peers are
    /// noticed long before; this is for live ones that never come.
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
    selection: Arc<Mutex<Arc<Selection>>>,
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
    /// `device`. Several ranks may share a GPU. What algorithms are chosen by is what the environment says
    /// ([`Selection::from_environment`]). Collective; blocks until all ranks have come.
    ///
    /// # Errors
    /// As for [`new`](Self::new); also if ranks use devices of different kinds, or their environments say different things.
    pub fn on(
        device: Device,
        group: Arc<Group>,
        options: CommunicatorOptions,
    ) -> Result<Self, CollectiveError> {
        let timeout = options.timeout.min(LONGEST_TIMEOUT);
        let options = CommunicatorOptions { timeout };
        let deadline = Instant::now() + timeout;
        let endpoint = Endpoint::on(device, group, deadline)?;
        let selection = Selection::of_job(&endpoint, deadline)?;
        Ok(Self {
            endpoint,
            options,
            selection: Arc::new(Mutex::new(Arc::new(selection))),
        })
    }

    /// What algorithms are chosen by.
    #[must_use]
    pub fn selection(&self) -> Arc<Selection> {
        let selection = self.selection.lock();
        Arc::clone(&selection.unwrap_or_else(PoisonError::into_inner))
    }

    /// Has algorithms of what is prepared from now on chosen by `selection`, the same on every rank. Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError::SelectorsDiffer`], [`CollectiveError::PlansDiffer`] if it is not the same; a peer died or was late.
    pub fn select_by(&self, selection: Selection) -> Result<(), CollectiveError> {
        selection.agree(&self.endpoint, self.deadline())?;
        let mut current = self
            .selection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(selection);
        Ok(())
    }

    /// Registers a plan beside the built-in algorithms, of which `origin` says where it came from: what is prepared from now on may
    /// choose it. Every rank must register it. Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError::Registry`] if it cannot be chosen, [`CollectiveError::PlansDiffer`] if ranks register different
    /// plans; a peer died or was late.
    pub fn register(&self, plan: Plan, origin: &str) -> Result<(), CollectiveError> {
        self.extend(|registry| registry.register(plan, origin).map(drop))
    }

    /// [`register`](Self::register) the plan of a file, of crossweft or of MSCCL++.
    ///
    /// # Errors
    /// As there; also if it cannot be read.
    pub fn register_file(&self, path: &Path) -> Result<(), CollectiveError> {
        self.extend(|registry| registry.register_file(path).map(drop))
    }

    fn extend(
        &self,
        register: impl FnOnce(&mut Registry) -> Result<(), RegistryError>,
    ) -> Result<(), CollectiveError> {
        let mut selection = Selection::clone(&self.selection());
        let registered = register(selection.registry_mut()).map_err(CollectiveError::from);
        let (what, deadline) = ("registering a plan", self.deadline());
        self.endpoint
            .settle(registered, what, deadline, CollectiveError::from)?;
        self.select_by(selection)
    }

    /// Joins the job that a launcher has started this process for. Collective; blocks until all ranks have
    /// come. `cancel` ends that from another thread.
    ///
    /// # Errors
    /// As for [`on`](Self::on).
    pub fn from_job(
        job: &Job,
        devices: &Devices,
        options: CommunicatorOptions,
        cancel: Option<Cancel>,
    ) -> Result<Self, CollectiveError> {
        let rendezvous = RendezvousOptions {
            timeout: options.timeout,
            ..RendezvousOptions::default()
        };
        let group = job.join(&join_options(options, cancel), &rendezvous)?;
        Self::on(devices.of(job.local_rank)?, Arc::new(group), options)
    }

    /// Joins as `rank` of `world_size` the job whose rendezvous `id` names. Collective; blocks until all
    /// ranks have come. `cancel` ends that from another thread.
    ///
    /// # Errors
    /// As for [`on`](Self::on).
    pub fn from_unique_id(
        id: &UniqueId,
        (rank, world_size): (u32, u32),
        devices: &Devices,
        options: CommunicatorOptions,
        cancel: Option<Cancel>,
    ) -> Result<Self, CollectiveError> {
        let group = Group::join(id, rank, world_size, &join_options(options, cancel))?;
        let device = devices.of(group.local_rank())?;
        Self::on(device, Arc::new(group), options)
    }

    /// Has `reason` asked some times a second while a launch of this rank waits, on the thread that waits; the
    /// job is aborted with what it says first. For host programs with signals of their own. Local; the first
    /// one given stays.
    pub fn interrupt_when(&self, reason: impl Fn() -> Option<String> + Send + Sync + 'static) {
        self.endpoint.interrupt_when(reason);
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
        let memory = self
            .endpoint
            .allocate_registered(bytes, what, self.deadline())?;
        Ok(SymmetricBuffer { memory, bytes })
    }

    /// Makes `memory` of every rank, all of one size, known to all ranks. Collective; blocks.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    pub fn register_memory(&self, memory: Memory) -> Result<SymmetricBuffer, CollectiveError> {
        let bytes = memory.bytes();
        let what = "registering memory";
        let memory = self.endpoint.register(memory, what, self.deadline())?;
        Ok(SymmetricBuffer { memory, bytes })
    }

    /// Prepares an all-reduce: every rank's output is the reduction of all inputs. Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError`]: ranks disagree, the options do not fit together, no memory, or a peer
    /// died.
    pub fn all_reduce(
        &self,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::AllReduce, options)
    }

    /// Prepares an all-gather: block `r` of every output is rank `r`'s input. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &self,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::AllGather, options)
    }

    /// Prepares a reduce-scatter: rank `r`'s output is the reduction of block `r` of all inputs. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        &self,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::ReduceScatter, options)
    }

    /// Prepares an all-to-all: block `q` of rank `r`'s output is block `r` of rank `q`'s input. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn all_to_all(
        &self,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::AllToAll, options)
    }

    /// Prepares a broadcast: every rank's output is the root's input. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn broadcast(
        &self,
        root: u32,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::Broadcast { root }, options)
    }

    /// Prepares a reduce: the root's output is the reduction of all inputs; the others' is left as it is. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn reduce(
        &self,
        root: u32,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::Reduce { root }, options)
    }

    /// Prepares a gather: block `r` of the root's output is rank `r`'s input; the others' output is
    /// left as it is. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn gather(
        &self,
        root: u32,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::Gather { root }, options)
    }

    /// Prepares a scatter: rank `r`'s output is block `r` of the root's input. Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn scatter(
        &self,
        root: u32,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        self.collective(Collective::Scatter { root }, options)
    }

    /// Prepares an all-reduce of tokens with what follows it in a transformer: residual addition, RMS normalisation, and
    /// quantisation if a call asks for it. Collective; blocks.
    ///
    /// The numbers are those of the steps one after another, with the same bits on every device:
    ///
    /// 1. The sum of all ranks' inputs in f32, in rank order, rounded to the element type: what
    ///    [`all_reduce`](Self::all_reduce) gives with [sums in rank order](CollectiveOptions::deterministic).
    /// 2. That plus the residual in f32, rounded to the element type. It replaces the residual. This is what vLLM's
    ///    `fused_add_rms_norm` keeps; its norm, and this one, begins with the rounded value.
    /// 3. `x * (1 / sqrt(mean(x * x) + epsilon)) * weight`, from left to right in f32, rounded once to the element type
    ///    (vLLM also rounds before it multiplies by the weight). The mean is of squares in f32, summed in [one order](crossweft_device::norm).
    /// 4. Quantised: what step 3 has rounded, divided by the [scale](crate::Scales) in f32, rounded to
    ///    [`F8E4M3`](crossweft_device::DataType::F8E4M3), which saturates.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_rms_norm(
        &self,
        options: RmsNormOptions,
    ) -> Result<AllReduceRmsNorm, CollectiveError> {
        AllReduceRmsNorm::prepare(self, options)
    }

    /// Prepares any collective that has [algorithms](crate::Algorithm::of). Collective; blocks.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce); also if there is no algorithm for it, or no such root.
    pub fn collective(
        &self,
        collective: Collective,
        options: CollectiveOptions,
    ) -> Result<PreparedCollective, CollectiveError> {
        PreparedCollective::prepare(self, collective, options)
    }

    /// Compiles the kernels of some element types, each rank of a host a part of them, so that preparing collectives does not.
    /// That is for the first start on a machine with GPUs, whose driver keeps what was compiled. Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError`]: ranks ask for different types, a peer died, or a device has no kernels for one.
    pub fn compile(&self, dtypes: &[DataType]) -> Result<(), CollectiveError> {
        Ok(crossweft_executor::compile(
            &self.endpoint,
            dtypes,
            self.deadline(),
        )?)
    }

    /// Prepares sends and receives between all pairs of ranks, and collectives with blocks of any size.
    /// Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError`]: ranks disagree, the options cannot be, no memory, or a peer died or runs on another host.
    pub fn exchange(&self, options: &ExchangeOptions) -> Result<Exchange, CollectiveError> {
        Exchange::prepare(self, options)
    }

    /// Prepares puts into symmetric memory and signals, from the host or in the order of a stream. Collective; blocks.
    ///
    /// # Errors
    /// As for [`exchange`](Self::exchange).
    pub fn one_sided(&self) -> Result<OneSided, CollectiveError> {
        let (limit, deadline) = (self.options.timeout, self.deadline());
        Ok(OneSided::prepare(&self.endpoint, limit, deadline)?)
    }

    /// Prepares any plan, for buffers anywhere. Collective; blocks.
    ///
    /// # Errors
    /// [`CollectiveError`]: ranks disagree, the plan does not fit the job, no memory, or a peer died.
    pub fn prepare(
        &self,
        plan: &Plan,
        options: Options,
        stage: Stage,
    ) -> Result<Staged, CollectiveError> {
        let deadline = self.deadline();
        Ok(Staged::prepare(
            &self.endpoint,
            plan,
            options,
            stage,
            deadline,
        )?)
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

    /// Whether `peer` may still do its part in what this rank is `doing`. Local, does not block.
    ///
    /// # Errors
    /// [`CollectiveError::Net`]: a rank died or ended the job, or that one has left.
    pub fn check_peer(&self, peer: u32, doing: &str) -> Result<(), CollectiveError> {
        Ok(self.endpoint.group().check_peer(peer, doing)?)
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

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }
}

/// How a rank joins.
pub(crate) fn join_options(options: CommunicatorOptions, cancel: Option<Cancel>) -> JoinOptions {
    JoinOptions {
        timeout: options.timeout,
        cancel,
        ..JoinOptions::default()
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

    pub(crate) fn memory(&self) -> &RegisteredMemory {
        &self.memory
    }

    /// The registered memory itself, for plans that are prepared by hand.
    #[must_use]
    pub fn registered(&self) -> Arc<RegisteredMemory> {
        Arc::clone(&self.memory)
    }
}
