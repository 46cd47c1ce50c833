//! One rank's end of a job.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::identity;
use std::fmt::Display;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crossweft_hal::cpu::{Bell, Context, SharedMemory, Supervisor, cores};
use crossweft_hal::cuda::{self, CudaError};
use crossweft_hal::{Device, Memory};
use crossweft_net::Group;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::board::{Board, Call};
use crate::registered::Registry;
use crate::{ChannelError, RegisteredMemory};

/// The bootstrap group together with the memory through which ranks of a host wake each other.
#[derive(Debug)]
pub struct Endpoint {
    group: Arc<Group>,
    device: Device,
    /// Ranks that compute on the same device as this one, itself included.
    sharers: u32,
    /// See [`waiting_blocks`](Self::waiting_blocks).
    waiting_blocks: u32,
    /// See [`keeps_lines`](Self::keeps_lines).
    keeps_lines: bool,
    registry: Arc<Registry>,
    next_key: AtomicU64,
    next_number: AtomicU32,
    /// Whom the proxy of each fifo is busy with, by the fifo's number.
    proxies: Mutex<BTreeMap<u32, Arc<BusyWith>>>,
    bells: Bells,
    board: Board,
    /// Cores that the ranks of this host may use, all together.
    cores: usize,
    interrupt: OnceLock<Interrupt>,
}

/// What a host program may have to say while a launch of its own waits.
struct Interrupt(Box<dyn Fn() -> Option<String> + Send + Sync>);

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interrupt").finish_non_exhaustive()
    }
}

/// Where a rank's board begins in its control memory.
const BOARD: u64 = 2 * Bell::BYTES;

/// The rank that a proxy is doing something for, which may take as long as that rank likes.
#[derive(Debug, Default)]
pub(crate) struct BusyWith(AtomicU32);

impl BusyWith {
    /// Does something that needs `rank`.
    pub(crate) fn during<T>(&self, rank: u32, act: impl FnOnce() -> T) -> T {
        // 0 stands for nobody.
        self.0.store(rank.saturating_add(1), Ordering::Relaxed);
        let result = act();
        self.0.store(0, Ordering::Relaxed);
        result
    }

    fn rank(&self) -> Option<u32> {
        self.0.load(Ordering::Relaxed).checked_sub(1)
    }
}

#[derive(Debug)]
struct Bells {
    all: Vec<Bell>,
    own: Bell,
    /// What the bells and boards lie in, by rank, where it is mapped.
    memory: Vec<Option<Memory>>,
}

impl Endpoint {
    /// Sets up this rank's end. Collective; blocks until every rank has called it, at most until
    /// `deadline`.
    ///
    /// # Errors
    /// [`ChannelError`]: a peer died or was late, or there is no memory.
    pub fn new(group: Arc<Group>, deadline: Instant) -> Result<Arc<Self>, ChannelError> {
        Self::on(Device::Cpu, group, deadline)
    }

    /// Sets up the end of a rank that computes on `device`, of the same kind as all others'.
    /// Collective; blocks as [`new`](Self::new).
    ///
    /// # Errors
    /// [`ChannelError::Mismatch`] if ranks use devices of different kinds; otherwise as for
    /// [`new`](Self::new).
    pub fn on(
        device: Device,
        group: Arc<Group>,
        deadline: Instant,
    ) -> Result<Arc<Self>, ChannelError> {
        let what = "setting up the endpoints";
        let Surroundings {
            sharers,
            waiting_blocks,
            cores,
            keeps_lines,
        } = look_around(&group, &device, what, deadline)?;
        // The first bell is this rank's, the second stands in for ranks that cannot be woken.
        let memory = share_on_host(&group, 0, BOARD + Board::SIZE, what, deadline)?;
        let own_rank = group.rank() as usize;
        let addr = |memory: &Option<Memory>| memory.as_ref().map(Memory::addr);
        let control = addr(&memory[own_rank]).unwrap_or_default();
        // SAFETY: both lie in this rank's memory (two bells long, page-aligned, zeroed), which the endpoint
        // keeps mapped for as long as it hands out bells.
        let (own, nobody) = unsafe { (Bell::at(control), Bell::at(control + Bell::BYTES)) };
        // A proxy thread wakes the kernels of its own rank.
        let all = memory
            .iter()
            .map(|memory| match addr(memory) {
                // SAFETY: as above, in the mapping of the rank's memory.
                Some(addr) => unsafe { Bell::at(addr) },
                None => nobody,
            })
            .collect();
        let bells = Bells { all, own, memory };
        Ok(Arc::new(Self {
            group,
            device,
            sharers,
            waiting_blocks,
            keeps_lines,
            registry: Arc::default(),
            next_key: AtomicU64::new(1),
            next_number: AtomicU32::new(0),
            proxies: Mutex::default(),
            bells,
            board: Board::new(),
            cores,
            interrupt: OnceLock::new(),
        }))
    }

    /// Has `reason` asked some times a second while a launch of this rank waits, on the thread that
    /// waits; the job is aborted with what it says first. For host programs with signals of their own, such as
    /// an interpreter's. The first one given stays.
    pub fn interrupt_when(&self, reason: impl Fn() -> Option<String> + Send + Sync + 'static) {
        self.interrupt.get_or_init(|| Interrupt(Box::new(reason)));
    }

    /// Why launches of this rank should wait no longer, if the host program says so.
    pub(crate) fn interrupt(&self) -> Option<String> {
        (self.interrupt.get()?.0)()
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.group.world_size()
    }

    /// The bootstrap group.
    #[must_use]
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Whether `rank`'s memory can be mapped here.
    #[must_use]
    pub fn is_mappable(&self, rank: u32) -> bool {
        self.group.is_same_host(rank)
    }

    /// What launches on the CPU device need, with `supervisor` to end their waits.
    #[must_use]
    pub fn context<'a>(&'a self, supervisor: &'a dyn Supervisor) -> Context<'a> {
        Context {
            supervisor,
            bell: Some(self.bells.own),
            peers: &self.bells.all,
            spin: self.group.local_size() as usize <= self.cores,
        }
    }

    /// Makes `memory` of every rank known to all ranks, and maps that of the ranks on this host.
    /// Collective; `what` says what for, in messages.
    ///
    /// # Errors
    /// [`ChannelError`]; [`ChannelError::Mismatch`] if sizes differ between ranks.
    pub fn register(
        &self,
        memory: impl Into<Memory>,
        what: &str,
        deadline: Instant,
    ) -> Result<Arc<RegisteredMemory>, ChannelError> {
        let memory = memory.into();
        self.agree(&format!("{} bytes", memory.bytes()), what, deadline)?;
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let shared = share(&self.group, &self.device, (key, Ok(memory)), what, deadline);
        let registered = shared.map(|(memory, keys, peers)| {
            RegisteredMemory::new(self.rank(), memory, keys, peers, &self.registry)
        });
        let registered = settle(&self.group, registered, what, deadline, identity);
        self.group.withdraw_fd(key);
        registered
    }

    /// Makes host memory of `bytes` bytes on every rank, whatever it computes on: this rank's and those of the others on
    /// this host, in rank order. Collective.
    pub(crate) fn share_on_host(
        &self,
        bytes: u64,
        what: &str,
        deadline: Instant,
    ) -> Result<Vec<Option<Memory>>, ChannelError> {
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        share_on_host(&self.group, key, bytes, what, deadline)
    }

    /// A place to note the calls of a plan that all ranks have agreed on, `name`. Every rank asks in
    /// the same order, so each knows what the others' notes mean.
    #[must_use]
    pub fn call_line(&self, name: &str) -> CallLine {
        CallLine {
            number: self.board.number(name.to_owned()),
            begun: AtomicU64::new(0),
        }
    }

    /// The same for what is no plan, but what others may wait for as well; there are eight of these at most that no plan
    /// shares. `doing` says what a rank does that is in such a call, as in `prepares a collective`. Every rank asks in
    /// the same order.
    #[must_use]
    pub fn own_call_line(&self, doing: &str) -> CallLine {
        CallLine {
            number: self.board.own_number(doing.to_owned()),
            begun: AtomicU64::new(0),
        }
    }

    /// Whether plan `number` shares its line of the board with another.
    pub(crate) fn is_line_shared(&self, number: u32) -> bool {
        self.board.is_shared(number)
    }

    /// What a rank does that is in `call`, in words.
    pub(crate) fn describe_call(&self, call: Call) -> String {
        self.board.describe(call)
    }

    /// What `rank` noted last about plan `number`, if that can be read here.
    pub(crate) fn call(&self, rank: u32, number: u32) -> Option<Call> {
        Some(Board::call(self.control(rank)?, BOARD, number))
    }

    /// The calls that `rank` is in, of all plans but `number`; none if that cannot be read here.
    pub(crate) fn other_calls(&self, rank: u32, number: u32) -> impl Iterator<Item = Call> {
        let memory = self.control(rank).into_iter();
        memory.flat_map(move |memory| self.board.others(memory, BOARD, number))
    }

    fn control(&self, rank: u32) -> Option<&SharedMemory> {
        match self.bells.memory.get(rank as usize)?.as_ref()? {
            Memory::Cpu(memory) => Some(memory),
            _ => None,
        }
    }

    /// What this rank computes on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of ranks, this one included, that compute on the same device.
    #[must_use]
    pub fn sharers(&self) -> u32 {
        self.sharers
    }

    /// Thread blocks that each rank should have waiting for others at most, the same on every rank: any number where each rank
    /// has a GPU to itself. Where ranks share one, so few that whole multiprocessors stay free: what a rank that is behind
    /// has to run first (a kernel of other shape, of the user's, or of an earlier call) would else find no room beside
    /// blocks of others that wait for it.
    #[must_use]
    pub fn waiting_blocks(&self) -> u32 {
        self.waiting_blocks
    }

    /// Whether 128 bytes that one instruction of a warp writes arrive together in every rank's memory
    /// ([`crossweft_device::gpu::lines`]): all ranks are on GPUs that are the same or joined by NVLink. The same on
    /// every rank.
    #[must_use]
    pub fn keeps_lines(&self) -> bool {
        self.keeps_lines
    }

    /// Allocates memory on this rank's device that peers can map once it is
    /// [registered](Self::register). Local.
    ///
    /// # Errors
    /// [`ChannelError::Memory`].
    pub fn allocate(&self, bytes: u64, what: &str) -> Result<Memory, ChannelError> {
        self.device
            .allocate(bytes)
            .map_err(ChannelError::memory(what))
    }

    /// Allocates memory of one size on every rank and [registers](Self::register) it: if one rank has none, all know at
    /// once. Collective; blocks.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate) and [`register`](Self::register).
    pub fn allocate_registered(
        &self,
        bytes: u64,
        what: &str,
        deadline: Instant,
    ) -> Result<Arc<RegisteredMemory>, ChannelError> {
        let memory = self.settle(self.allocate(bytes, what), what, deadline, identity)?;
        self.register(memory, what, deadline)
    }

    /// Cores that the ranks of this host may use, all together: launchers often bind each to one.
    #[must_use]
    pub fn cores(&self) -> usize {
        self.cores
    }

    /// This rank's registered memories, by the keys that peers know them by.
    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// A number for messages, the same on every rank if all ask in the same order.
    pub(crate) fn number(&self) -> u32 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// The proxy of a fifo starts. Until [`forget_proxy`](Self::forget_proxy), waits on the fifo
    /// can tell whom it is busy with.
    pub(crate) fn note_proxy(&self, fifo: u32, busy: &Arc<BusyWith>) {
        self.proxies().insert(fifo, Arc::clone(busy));
    }

    /// It has ended.
    pub(crate) fn forget_proxy(&self, fifo: u32) {
        self.proxies().remove(&fifo);
    }

    /// The rank that the proxy of a fifo is busy with.
    pub(crate) fn proxy_is_busy_with(&self, fifo: u32) -> Option<u32> {
        self.proxies().get(&fifo)?.rank()
    }

    fn proxies(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<BusyWith>>> {
        self.proxies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Collects a value of every rank, in rank order. Collective.
    ///
    /// # Errors
    /// [`ChannelError`]: a peer died or was late, or sent something else.
    pub fn exchange<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        what: &str,
        deadline: Instant,
    ) -> Result<Vec<T>, ChannelError> {
        exchange(&self.group, value, what, deadline)
    }

    /// Returns when every rank has come to an outcome; all fail if one has failed, with its own error
    /// or, made an error by `wrap`, with [`ChannelError::PeerFailed`]. Collective.
    ///
    /// # Errors
    /// As said; and if a peer died or was late.
    pub fn settle<T, E: Display>(
        &self,
        outcome: Result<T, E>,
        what: &str,
        deadline: Instant,
        wrap: impl Fn(ChannelError) -> E,
    ) -> Result<T, E> {
        settle(&self.group, outcome, what, deadline, wrap)
    }

    /// Makes sure that every rank says the same. Collective.
    ///
    /// # Errors
    /// [`ChannelError::Mismatch`] with the first rank that says something else.
    pub fn agree(
        &self,
        statement: &str,
        what: &str,
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        self.agree_on_all(&[(what, statement.to_owned())], deadline)
    }

    /// [`agree`](Self::agree) on several statements at once, each with what it is said for. Collective.
    ///
    /// # Errors
    /// [`ChannelError::Mismatch`] with the first statement for which a rank says something else, and the first such rank.
    pub fn agree_on_all(
        &self,
        statements: &[(&str, String)],
        deadline: Instant,
    ) -> Result<(), ChannelError> {
        let Some((first, _)) = statements.first() else {
            return Ok(());
        };
        let own: Vec<&String> = statements.iter().map(|(_, ours)| ours).collect();
        let bytes = encode(&self.group, &own, first)?;
        let all = gather::<Vec<String>>(&self.group, &bytes, first, deadline)?;
        let most = all.iter().map(Vec::len).max().unwrap_or(0);
        for index in 0..most {
            let ours = own.get(index).copied();
            let mut others = (0..).zip(&all).map(|(rank, all)| (rank, all.get(index)));
            if let Some((rank, theirs)) = others.find(|(_, theirs)| *theirs != ours) {
                // A rank with fewer has said nothing.
                let words =
                    |said: Option<&String>| said.map_or("nothing", String::as_str).to_owned();
                let what = statements.get(index).map_or(*first, |(what, _)| *what);
                return Err(ChannelError::Mismatch {
                    what: what.to_owned(),
                    rank,
                    theirs: words(theirs),
                    own_rank: self.rank(),
                    ours: words(ours),
                });
            }
        }
        Ok(())
    }
}

/// Where a rank notes the calls it makes of one plan, for peers that wait in vain.
#[derive(Debug)]
pub struct CallLine {
    number: u32,
    begun: AtomicU64,
}

impl CallLine {
    /// Notes that a call with a message of `bytes` bytes begins.
    pub fn begin(&self, endpoint: &Endpoint, bytes: u64) {
        // Calls of one plan follow one another, so this needs no read-modify-write.
        let begun = self.begun.load(Ordering::Relaxed) + 1;
        self.begun.store(begun, Ordering::Relaxed);
        if let Some(own) = endpoint.control(endpoint.rank()) {
            Board::begin(own, BOARD, self.number, begun, bytes);
        }
    }

    /// Notes that one begins whose buffers lie at `places`, or of which these two numbers say something else, which must be the
    /// same on every rank.
    pub fn begin_at(&self, endpoint: &Endpoint, bytes: u64, places: (u64, u64)) {
        if let Some(own) = endpoint.control(endpoint.rank()) {
            Board::place(own, BOARD, self.number, self.begun() + 1, places);
        }
        self.begin(endpoint, bytes);
    }

    /// A rank whose buffers lay elsewhere in the call that this rank has made last, and where. Every rank must have begun
    /// that call, and none can have begun the one after the next.
    #[must_use]
    pub fn elsewhere(&self, endpoint: &Endpoint) -> Option<(u32, (u64, u64))> {
        let places = |rank| {
            let memory = endpoint.control(rank)?;
            Board::placed(memory, BOARD, self.number, self.begun())
        };
        let own = places(endpoint.rank())?;
        let mut others = (0..endpoint.world_size()).filter_map(|rank| Some((rank, places(rank)?)));
        others.find(|&(_, theirs)| theirs != own)
    }

    /// How many calls `rank` has begun, and whether it is in the last one; `None` if that cannot be read here.
    #[must_use]
    pub fn noted_by(&self, endpoint: &Endpoint, rank: u32) -> Option<(u64, bool)> {
        let call = endpoint.call(rank, self.number)?;
        Some((call.begun, call.running))
    }

    /// What [`begin_at`](Self::begin_at) noted for call number `begun` of `rank`; `None` if that is no more there, which holds for the
    /// last two, or cannot be read here. A rank that notes another call meanwhile can be caught between two words of it: only
    /// what is seen twice, for longer than that takes, is sure.
    #[must_use]
    pub fn noted_at(&self, endpoint: &Endpoint, rank: u32, begun: u64) -> Option<(u64, u64)> {
        Board::placed(endpoint.control(rank)?, BOARD, self.number, begun)
    }

    /// Notes that it has ended.
    pub fn end(&self, endpoint: &Endpoint) {
        if let Some(own) = endpoint.control(endpoint.rank()) {
            Board::end(own, BOARD, self.number, self.begun.load(Ordering::Relaxed));
        }
    }

    /// The plan's number.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Calls begun so far.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }
}

/// What an endpoint learns about the ranks when it is made.
struct Surroundings {
    /// How many compute on the same device.
    sharers: u32,
    /// See [`Endpoint::waiting_blocks`].
    waiting_blocks: u32,
    /// Cores that those of this host may use between them.
    cores: usize,
    /// See [`Endpoint::keeps_lines`].
    keeps_lines: bool,
}

/// Looks who is there; all ranks must compute on devices of one kind.
fn look_around(
    group: &Group,
    device: &Device,
    what: &str,
    deadline: Instant,
) -> Result<Surroundings, ChannelError> {
    let (name, multiprocessors) = match device {
        Device::Cuda(context) => {
            let asked = |device: &cuda::Device| Ok((device.uuid()?, device.multiprocessors()?));
            let (uuid, multiprocessors) = asked(context.device())
                .map_err(|e: CudaError| ChannelError::memory(what)(e.into()))?;
            (uuid.to_string(), multiprocessors)
        }
        _ => (String::new(), 0),
    };
    let own = (device.name().to_owned(), name);
    let all: Vec<((String, String), Vec<u32>, u32)> = exchange(
        group,
        &(own.clone(), cores(), multiprocessors),
        what,
        deadline,
    )?;
    if let Some((rank, ((kind, _), ..))) =
        (0..).zip(&all).find(|(_, (theirs, ..))| theirs.0 != own.0)
    {
        return Err(ChannelError::Mismatch {
            what: what.to_owned(),
            rank,
            theirs: format!("its device is {kind}"),
            own_rank: group.rank(),
            ours: format!("its device is {}", own.0),
        });
    }
    let sharers_of = |one: &(String, String)| {
        let on_it = all.iter().filter(|(theirs, ..)| theirs == one);
        on_it.count() as u32
    };
    let sharers = sharers_of(&own);
    let least =
        all.iter().map(
            |(one, _, multiprocessors)| match (sharers_of(one), multiprocessors) {
                (1, _) | (_, 0) => u32::MAX,
                (sharers, all) => ((all - all / 4) / sharers).max(1),
            },
        );
    let waiting_blocks = least.min().unwrap_or(u32::MAX);
    let local = (0..)
        .zip(&all)
        .filter(|&(rank, _)| rank == group.rank() || group.is_same_host(rank));
    let cores: BTreeSet<u32> = local
        .flat_map(|(_, (_, cores, _))| cores.iter().copied())
        .collect();
    let keeps_lines = match device {
        Device::Cuda(context) => {
            let uuids = all.iter().map(|((_, uuid), ..)| uuid.as_str());
            // A peer that this process does not see is on the safe side too.
            let own = joined(context, uuids).unwrap_or(false);
            let all: Vec<bool> = exchange(group, &own, what, deadline)?;
            all.into_iter().all(|own| own)
        }
        _ => false,
    };
    Ok(Surroundings {
        sharers,
        waiting_blocks,
        cores: cores.len(),
        keeps_lines,
    })
}

/// Whether the devices of these UUIDs are this one or joined to it by NVLink, over which atomics go as such.
fn joined<'a>(
    context: &cuda::Context,
    uuids: impl Iterator<Item = &'a str>,
) -> Result<bool, CudaError> {
    let own = context.device();
    let mut joined = BTreeSet::new();
    for device in context.driver().devices()? {
        if own.peer(&device)?.native_atomics {
            joined.insert(device.uuid()?.to_string());
        }
    }
    Ok(uuids.into_iter().all(|uuid| joined.contains(uuid)))
}

fn exchange<T: Serialize + DeserializeOwned>(
    group: &Group,
    value: &T,
    what: &str,
    deadline: Instant,
) -> Result<Vec<T>, ChannelError> {
    let bytes = encode(group, value, what)?;
    gather(group, &bytes, what, deadline)
}

fn encode<T: Serialize>(group: &Group, value: &T, what: &str) -> Result<Vec<u8>, ChannelError> {
    postcard::to_allocvec(value).map_err(|error| garbled(group, group.rank(), what, &error))
}

/// Collects what every rank has encoded, in rank order.
fn gather<T: DeserializeOwned>(
    group: &Group,
    bytes: &[u8],
    what: &str,
    deadline: Instant,
) -> Result<Vec<T>, ChannelError> {
    let all = group
        .all_gather(bytes, deadline)
        .map_err(ChannelError::bootstrap(what))?;
    let decode = |(rank, bytes): (u32, Vec<u8>)| {
        postcard::from_bytes(&bytes).map_err(|error| garbled(group, rank, what, &error))
    };
    (0..).zip(all).map(decode).collect()
}

fn garbled(group: &Group, rank: u32, what: &str, error: &postcard::Error) -> ChannelError {
    ChannelError::Mismatch {
        what: what.to_owned(),
        rank,
        theirs: format!("something of another call or step ({error})"),
        own_rank: group.rank(),
        ours: format!(
            "what belongs to {what}; calls that all ranks make together must come in the same order on each, so from \
             one thread at a time"
        ),
    }
}

/// Memory of this rank that others know, the keys of all ranks, and their memory as far as it is mapped.
type Shared = (Memory, Vec<u64>, Vec<Option<Memory>>);

/// Offers `memory`, if there is some, under `key` and maps what the ranks of this host offer. The offer must stand
/// until all have [settled](settle), which they must whatever comes of this.
fn share(
    group: &Group,
    device: &Device,
    (key, memory): (u64, Result<Memory, ChannelError>),
    what: &str,
    deadline: Instant,
) -> Result<Shared, ChannelError> {
    let offered = memory.and_then(|memory| {
        let exported = memory.export().map_err(ChannelError::memory(what))?;
        group
            .offer_fd(key, exported.as_fd())
            .map_err(ChannelError::bootstrap(what))?;
        Ok(memory)
    });
    // Offered before it is announced, so no request can come too early, whatever the order. A rank that has nothing to
    // offer says so here, as the others take part in this; why, they hear when all settle.
    let own = offered.as_ref().map(|memory| (key, memory.bytes())).ok();
    let announced: Vec<Option<(u64, u64)>> = exchange(group, &own, what, deadline)?;
    let mut memory = offered?;
    let map = |rank: u32, announced: Option<(u64, u64)>| {
        let Some((key, bytes)) =
            announced.filter(|_| rank != group.rank() && group.is_same_host(rank))
        else {
            return Ok(None);
        };
        // Kernels take all parts to be of this rank's size, and would write beyond a smaller one.
        if bytes != memory.bytes() {
            return Err(ChannelError::Mismatch {
                what: what.to_owned(),
                rank,
                theirs: format!("{bytes} bytes"),
                own_rank: group.rank(),
                ours: format!("{} bytes", memory.bytes()),
            });
        }
        let fd = group
            .fetch_fd(rank, key, deadline)
            .map_err(ChannelError::bootstrap(what))?;
        let mut mapped = device
            .import(fd, bytes)
            .map_err(ChannelError::memory(what))?;
        mapped.close_descriptor();
        Ok(Some(mapped))
    };
    let mapped: Result<_, _> = (0..)
        .zip(&announced)
        .map(|(rank, &announced)| map(rank, announced))
        .collect();
    memory.close_descriptor();
    let keys = announced
        .iter()
        .map(|announced| announced.map_or(0, |(key, _)| key));
    Ok((memory, keys.collect(), mapped?))
}

/// Host memory of every rank, as [`Endpoint::share_on_host`] makes it.
fn share_on_host(
    group: &Group,
    key: u64,
    bytes: u64,
    what: &str,
    deadline: Instant,
) -> Result<Vec<Option<Memory>>, ChannelError> {
    let own = SharedMemory::create(bytes).map(Memory::Cpu);
    let own = own.map_err(ChannelError::memory(what));
    let shared = share(group, &Device::Cpu, (key, own), what, deadline);
    let shared = settle(group, shared, what, deadline, identity);
    group.withdraw_fd(key);
    let (own, _, mut all) = shared?;
    all[group.rank() as usize] = Some(own);
    Ok(all)
}

/// Returns when every rank has come to an outcome; all fail if one has failed. Afterwards nobody
/// needs what this rank offered.
fn settle<T, E: Display>(
    group: &Group,
    outcome: Result<T, E>,
    what: &str,
    deadline: Instant,
    wrap: impl Fn(ChannelError) -> E,
) -> Result<T, E> {
    let reason = outcome.as_ref().err().map(ToString::to_string);
    let reasons = exchange(group, &reason, what, deadline);
    let outcome = outcome?;
    match (0..)
        .zip(reasons.map_err(&wrap)?)
        .find_map(|(r, reason)| Some((r, reason?)))
    {
        None => Ok(outcome),
        Some((rank, reason)) => Err(wrap(ChannelError::PeerFailed {
            what: what.to_owned(),
            rank,
            reason,
        })),
    }
}
