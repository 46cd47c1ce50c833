//! Port channels: a proxy thread moves the data that a kernel asks it to.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossweft_device::channel;
use crossweft_device::fifo::{Fifo, Trigger, TriggerKind};
use crossweft_hal::Device;

use crate::endpoint::BusyWith;
use crate::ids::Ids;
use crate::shared::{self, FifoMemory, Place, Popper};
use crate::tcp::{Receiver, Sockets, TcpLink, fail_job};
use crate::transport::{CopyEngine, Mapped, Transport, TransportChoice};
use crate::{ChannelError, Endpoint, RegisteredMemory, SemaphorePool};

/// How a proxy service works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyOptions {
    /// Triggers that may wait for the proxy; a power of two, at most 2^20. 512 by default.
    pub fifo_capacity: u32,
    /// Which way to take to the peers; the same on all ranks.
    pub transport: TransportChoice,
}

impl Default for ProxyOptions {
    fn default() -> Self {
        Self {
            fifo_capacity: 512,
            transport: TransportChoice::Auto,
        }
    }
}

const MAX_FIFO: u32 = 1 << 20;
/// How long a service that is dropped waits for what is under way, on each side.
const LINGER: Duration = Duration::from_secs(1);

/// What a proxy does after a trigger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Goes on with the next.
    Continue,
    /// Ends; later triggers are not handled.
    Stop,
}

/// A proxy thread with its fifo, and the memories and channels that triggers name.
///
/// Everything pushed before the service is dropped is still carried out. An error of the proxy
/// fails the job, which ends the waits of all kernels with its words.
#[derive(Debug)]
pub struct ProxyService {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    receiver: Option<Receiver>,
    /// Where the peers' receivers listen, in rank order.
    listening: Vec<Option<SocketAddr>>,
    transport: TransportChoice,
    /// Held while a link is made, so that there is one a peer.
    connecting: Mutex<()>,
}

/// What the service, its channels and its thread share.
#[derive(Debug)]
struct Shared {
    endpoint: Arc<Endpoint>,
    fifo: Arc<FifoMemory>,
    tables: Mutex<Tables>,
    /// Sockets of links.
    sockets: Arc<Sockets>,
    /// The peer that the proxy is doing something for.
    busy: Arc<BusyWith>,
    closing: AtomicBool,
}

#[derive(Debug)]
struct Tables {
    memories: Ids<Window>,
    channels: Ids<Route>,
    /// Channels that were dropped, and how many triggers had been pushed by then: until those are
    /// handled, they are still carried out.
    retired: Vec<(u32, u64)>,
    links: BTreeMap<u32, Link>,
}

impl Tables {
    /// Frees the ids of dropped channels that are not needed any more.
    fn reclaim(&mut self, fifo: &FifoMemory) {
        let Self {
            channels, retired, ..
        } = self;
        retired.retain(|&(channel, pushed)| {
            let needed = !fifo.has_handled(pushed);
            if !needed {
                // Each is retired once, so the id is known.
                let _ = channels.remove(channel);
            }
            needed
        });
    }
}

type Link = Arc<Mutex<dyn Transport>>;

/// What a memory id stands for: this rank's part as a source, the peer's as a destination.
#[derive(Clone, Debug)]
struct Window {
    memory: Arc<RegisteredMemory>,
    offset: u64,
    bytes: u64,
}

impl Window {
    /// Where `bytes` bytes at `offset` lie in `rank`'s part, if they do.
    fn place(&self, rank: u32, offset: u64, bytes: u64) -> Option<Place<'_>> {
        shared::contains(self.bytes, offset, bytes).then(|| Place {
            memory: &self.memory,
            rank,
            offset: self.offset + offset,
        })
    }
}

/// What a channel id stands for.
#[derive(Clone, Debug)]
struct Route {
    peer: u32,
    link: Link,
    /// Where the peer's counter lies.
    counters: Arc<RegisteredMemory>,
    counter: u64,
}

impl Shared {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// With the ranks that they lead to.
    fn links(&self) -> Vec<(u32, Link)> {
        let tables = self.tables();
        let links = tables.links.iter();
        links
            .map(|(&peer, link)| (peer, Arc::clone(link)))
            .collect()
    }

    /// Does something over a link, which may last until the peer takes part.
    fn over<T>(&self, peer: u32, link: &Link, act: impl FnOnce(&mut dyn Transport) -> T) -> T {
        self.busy.during(peer, || act(&mut *lock(link)))
    }

    fn close_links(&self) {
        self.links().iter().for_each(|(_, link)| lock(link).close());
    }
}

fn lock(link: &Link) -> MutexGuard<'_, dyn Transport + 'static> {
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProxyService {
    /// A service whose proxy does what triggers ask for. Collective.
    ///
    /// # Errors
    /// [`ChannelError::InvalidOption`] or [`ChannelError::Mismatch`] on every rank if the options
    /// cannot be or differ; otherwise a failure of the bootstrap or of the operating system.
    pub fn new(
        endpoint: &Arc<Endpoint>,
        options: &ProxyOptions,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        Self::with_handler(endpoint, options, deadline, |trigger, carrier| {
            carrier.carry(trigger).map(|()| Flow::Continue)
        })
    }

    /// A service whose proxy calls `handler` with every trigger, in order. Collective. The handler
    /// may leave triggers to the [`Carrier`]; an error of it fails the job.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_handler(
        endpoint: &Arc<Endpoint>,
        options: &ProxyOptions,
        deadline: Instant,
        handler: impl FnMut(&Trigger, &mut Carrier) -> Result<Flow, ChannelError> + Send + 'static,
    ) -> Result<Self, ChannelError> {
        let what = "starting a proxy service";
        let ProxyOptions {
            fifo_capacity,
            transport,
        } = *options;
        let ranks = 0..endpoint.world_size();
        let needs_tcp =
            transport == TransportChoice::Tcp || ranks.clone().any(|r| !endpoint.is_mappable(r));
        if needs_tcp && !matches!(endpoint.device(), Device::Cpu) {
            return Err(ChannelError::InvalidOption {
                option: "the transport",
                value: "TCP".to_owned(),
                rank: endpoint.rank(),
                must_be: "mapped memory: ranks on GPUs must be on one host",
            });
        }
        let (receiver, port) = match needs_tcp {
            true => {
                Receiver::start(endpoint).map(|(receiver, port)| (Some(receiver), Some(port)))?
            }
            false => (None, None),
        };
        let all = endpoint.exchange(&(fifo_capacity, transport, port), what, deadline)?;
        let mut listening = Vec::new();
        for (rank, &(capacity, theirs, port)) in ranks.zip(&all) {
            if !capacity.is_power_of_two() || capacity > MAX_FIFO {
                return Err(ChannelError::InvalidOption {
                    option: "fifo_capacity",
                    value: capacity.to_string(),
                    rank,
                    must_be: "a power of two, at most 1048576",
                });
            }
            if theirs != transport {
                return Err(ChannelError::Mismatch {
                    what: what.to_owned(),
                    rank,
                    theirs: format!("transport {theirs:?}"),
                    own_rank: endpoint.rank(),
                    ours: format!("transport {transport:?}"),
                });
            }
            let address = endpoint.group().peer_address(rank);
            listening.push(port.map(|port| SocketAddr::new(address, port)));
        }
        let (fifo, popper) = FifoMemory::new(endpoint.device(), fifo_capacity, endpoint.number())?;
        let shared = Arc::new(Shared {
            endpoint: Arc::clone(endpoint),
            fifo,
            tables: Mutex::new(Tables {
                memories: Ids::new("memory"),
                channels: Ids::new("channel"),
                retired: Vec::new(),
                links: BTreeMap::new(),
            }),
            sockets: Arc::default(),
            busy: Arc::default(),
            closing: AtomicBool::new(false),
        });
        let carrier = Carrier {
            shared: Arc::clone(&shared),
        };
        endpoint.note_proxy(shared.fifo.handle().id, &shared.busy);
        let thread = std::thread::Builder::new()
            .name(format!("crossweft-proxy-{}", endpoint.rank()))
            .spawn(move || carrier.run(popper, handler))
            .map_err(ChannelError::system(what))?;
        Ok(Self {
            shared,
            thread: Some(thread),
            receiver,
            listening,
            transport,
            connecting: Mutex::default(),
        })
    }

    /// Gives `memory` an id: as a source it means this rank's part, as a destination the peer's.
    /// Local.
    ///
    /// # Errors
    /// [`ChannelError::TooMany`].
    pub fn add_memory(&self, memory: &Arc<RegisteredMemory>) -> Result<u32, ChannelError> {
        self.add_range(memory, 0, memory.bytes())
    }

    /// Gives a part of `memory` an id; offsets in triggers count from its first byte. Local.
    ///
    /// # Errors
    /// [`ChannelError::TooMany`], or [`ChannelError::Memory`] if there is no such part.
    pub fn add_range(
        &self,
        memory: &Arc<RegisteredMemory>,
        offset: u64,
        bytes: u64,
    ) -> Result<u32, ChannelError> {
        let size = memory.bytes();
        if !shared::contains(size, offset, bytes) {
            let error = crossweft_hal::HalError::OutOfRange {
                offset,
                bytes,
                size,
            };
            return Err(ChannelError::memory("adding memory to a proxy service")(
                error,
            ));
        }
        self.shared.tables().memories.insert(Window {
            memory: Arc::clone(memory),
            offset,
            bytes,
        })
    }

    /// Frees a memory's id for reuse. Triggers that name it must have been handled (flush first).
    ///
    /// # Errors
    /// [`ChannelError::UnknownId`].
    pub fn remove_memory(&self, id: u32) -> Result<(), ChannelError> {
        // The table is unlocked before the memory is unmapped.
        let window = self.shared.tables().memories.remove(id)?;
        drop(window);
        Ok(())
    }

    /// A port channel with the semaphore of channel `index` of `semaphores`, between two memories
    /// that were added. Local; connects to the peer's service if need be.
    ///
    /// # Errors
    /// [`ChannelError::UnknownId`], [`ChannelError::TooMany`], or the peer cannot be reached.
    ///
    /// # Panics
    /// As [`SemaphorePool::handle`].
    pub fn channel(
        &self,
        semaphores: &Arc<SemaphorePool>,
        index: usize,
        dst_memory: u32,
        src_memory: u32,
        deadline: Instant,
    ) -> Result<PortChannel, ChannelError> {
        let (peer, counters, counter) = semaphores.outbound(index);
        let link = self.link(peer, deadline)?;
        let mut tables = self.shared.tables();
        tables.memories.get(dst_memory)?;
        tables.memories.get(src_memory)?;
        tables.reclaim(&self.shared.fifo);
        let channel = tables.channels.insert(Route {
            peer,
            link,
            counters: Arc::clone(counters),
            counter,
        })?;
        drop(tables);
        let mut semaphore = semaphores.handle(index);
        semaphore.outbound = 0; // the proxy signals
        Ok(PortChannel {
            handle: channel::PortChannel {
                semaphore,
                fifo: self.fifo(),
                channel,
                dst_memory,
                src_memory,
            },
            shared: Arc::clone(&self.shared),
            _semaphores: Arc::clone(semaphores),
        })
    }

    /// What the proxy carries triggers out with.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn carrier(&self) -> Carrier {
        Carrier {
            shared: Arc::clone(&self.shared),
        }
    }

    /// The fifo, for kernels that push triggers of their own.
    #[must_use]
    pub fn fifo(&self) -> Fifo {
        self.shared.fifo.handle()
    }

    /// The link to `peer`, made at first use.
    fn link(&self, peer: u32, deadline: Instant) -> Result<Link, ChannelError> {
        let _one_at_a_time = self.connecting.lock();
        if let Some(link) = self.shared.tables().links.get(&peer) {
            return Ok(Arc::clone(link));
        }
        let endpoint = &self.shared.endpoint;
        let address = self.listening.get(peer as usize).copied().flatten();
        let link: Link = match address {
            Some(address)
                if self.transport == TransportChoice::Tcp || !endpoint.is_mappable(peer) =>
            {
                let sockets = &self.shared.sockets;
                Arc::new(Mutex::new(TcpLink::connect(
                    endpoint, peer, address, sockets, deadline,
                )?))
            }
            _ => match endpoint.device() {
                Device::Cuda(context) => Arc::new(Mutex::new(CopyEngine::new(context)?)),
                _ => Arc::new(Mutex::new(Mapped::new(endpoint))),
            },
        };
        let mut tables = self.shared.tables();
        tables.links.insert(peer, Arc::clone(&link));
        Ok(link)
    }
}

impl Drop for ProxyService {
    fn drop(&mut self) {
        let stopped = self.shared.endpoint.group().liveness().stopped();
        let linger = if stopped { Duration::ZERO } else { LINGER };
        self.shared.closing.store(true, Ordering::Release);
        let deadline = Instant::now() + linger;
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                // Those that were made after the proxy had stopped.
                self.shared.close_links();
            }
            // A peer that takes nothing would block the thread for ever.
            self.shared.sockets.shut_down();
            // A panic was already reported.
            let _ = thread.join();
        }
        let fifo = self.shared.fifo.handle().id;
        self.shared.endpoint.forget_proxy(fifo);
        if let Some(mut receiver) = self.receiver.take() {
            receiver.close(Instant::now() + linger);
        }
    }
}

/// A channel whose data a proxy moves. Its device handle is valid for as long as this; the proxy
/// serves it for as long as the service lives, also what was pushed just before this is dropped.
#[derive(Debug)]
pub struct PortChannel {
    handle: channel::PortChannel,
    shared: Arc<Shared>,
    _semaphores: Arc<SemaphorePool>,
}

impl PortChannel {
    /// What kernels use.
    #[must_use]
    pub fn handle(&self) -> channel::PortChannel {
        self.handle
    }
}

impl Drop for PortChannel {
    fn drop(&mut self) {
        let fifo = &self.shared.fifo;
        let mut tables = self.shared.tables();
        tables.retired.push((self.handle.channel, fifo.pushed()));
        tables.reclaim(fifo);
    }
}

/// Carries out triggers: what a proxy does by default.
#[derive(Debug)]
pub struct Carrier {
    shared: Arc<Shared>,
}

impl Carrier {
    /// Does what `trigger` asks for, in the order put, signal, flush.
    ///
    /// # Errors
    /// [`ChannelError::UnknownId`], [`ChannelError::OutOfRange`], or the peer cannot be reached.
    pub fn carry(&mut self, trigger: &Trigger) -> Result<(), ChannelError> {
        let (put, signal) = (
            trigger.kind.has(TriggerKind::PUT),
            trigger.kind.has(TriggerKind::SIGNAL),
        );
        if put || signal {
            let route = self.shared.tables().channels.get(trigger.channel)?.clone();
            if put {
                self.put(&route, trigger)?;
            }
            if signal {
                let counter = Place {
                    memory: &route.counters,
                    rank: route.peer,
                    offset: route.counter,
                };
                let signal = |link: &mut dyn Transport| link.signal(counter);
                self.shared.over(route.peer, &route.link, signal)?;
            }
        }
        if trigger.kind.has(TriggerKind::FLUSH) {
            self.flush()?;
        }
        Ok(())
    }

    fn put(&self, route: &Route, trigger: &Trigger) -> Result<(), ChannelError> {
        let (dst, src) = {
            let tables = self.shared.tables();
            let window = |id| tables.memories.get(id).cloned();
            (window(trigger.dst_memory)?, window(trigger.src_memory)?)
        };
        let beyond = |side, memory, window: &Window, offset| ChannelError::OutOfRange {
            channel: trigger.channel,
            side,
            memory,
            offset,
            bytes: trigger.size,
            size: window.bytes,
        };
        let (to, from, bytes) = (trigger.dst_offset, trigger.src_offset, trigger.size);
        let own_rank = self.shared.endpoint.rank();
        let dst = dst
            .place(route.peer, to, bytes)
            .ok_or_else(|| beyond("destination", trigger.dst_memory, &dst, to))?;
        let src = src
            .place(own_rank, from, bytes)
            .ok_or_else(|| beyond("source", trigger.src_memory, &src, from))?;
        let put = |link: &mut dyn Transport| link.put(dst, src, bytes);
        self.shared.over(route.peer, &route.link, put)
    }

    /// Returns when everything before has arrived, at all peers.
    fn flush(&self) -> Result<(), ChannelError> {
        let links = self.shared.links();
        let all = |act: fn(&mut dyn Transport) -> Result<(), ChannelError>| {
            let mut links = links.iter();
            links.try_for_each(|(peer, link)| self.shared.over(*peer, link, act))
        };
        all(|link| link.start_flush())?;
        all(|link| link.finish_flush())
    }

    /// The life of a proxy thread.
    fn run(
        mut self,
        mut popper: Popper,
        mut handler: impl FnMut(&Trigger, &mut Self) -> Result<Flow, ChannelError>,
    ) {
        let shared = Arc::clone(&self.shared);
        let endpoint = &shared.endpoint;
        let _report = ReportPanic(&shared.endpoint);
        if let Device::Cuda(context) = endpoint.device() {
            // Copies and questions of this thread must not break graphs that others capture.
            let relaxed = context.driver().relax_capture_of_this_thread();
            if let Err(error) = relaxed {
                fail_job(
                    endpoint,
                    &ChannelError::memory("starting a proxy")(error.into()),
                );
            }
        }
        let mut idle = Idle::new(endpoint);
        while !endpoint.group().liveness().stopped() {
            // Looked at before the fifo: what was pushed before the service was dropped is handled.
            let closing = shared.closing.load(Ordering::Acquire);
            let Some(trigger) = popper.poll() else {
                if closing {
                    break;
                }
                idle.pause();
                continue;
            };
            idle.reset();
            let handled = handler(&trigger, &mut self).and_then(|flow| {
                popper.handled();
                shared::wake(endpoint, endpoint.rank())?;
                Ok(flow)
            });
            match handled {
                Ok(Flow::Continue) => {}
                Ok(Flow::Stop) => break,
                Err(error) => fail_job(endpoint, &error),
            }
        }
        shared.close_links();
    }
}

/// Fails the job if the thread panics: nobody would handle its triggers.
struct ReportPanic<'a>(&'a Endpoint);

impl Drop for ReportPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "it panicked".to_owned();
            fail_job(self.0, &ChannelError::Handler { reason });
        }
    }
}

/// What a proxy does with its core while there is nothing to do.
struct Idle {
    spins: u32,
    rounds: u32,
}

impl Idle {
    const YIELDS: u32 = 64;
    const FIRST_SLEEP: Duration = Duration::from_micros(20);
    /// The most that a trigger waits for a proxy that sleeps.
    const LONGEST_SLEEP: Duration = Duration::from_micros(500);

    /// Spins only if there is a core for every rank's kernel and proxy.
    fn new(endpoint: &Endpoint) -> Self {
        let threads = 2 * endpoint.group().local_size() as usize;
        Self {
            spins: if threads <= endpoint.cores() {
                4096
            } else {
                16
            },
            rounds: 0,
        }
    }

    fn reset(&mut self) {
        self.rounds = 0;
    }

    fn pause(&mut self) {
        match self.rounds.checked_sub(self.spins) {
            None => std::hint::spin_loop(),
            Some(round) if round < Self::YIELDS => std::thread::yield_now(),
            Some(round) => {
                let doublings = ((round - Self::YIELDS) / 16).min(8);
                let sleep = Self::FIRST_SLEEP * (1 << doublings);
                std::thread::sleep(sleep.min(Self::LONGEST_SLEEP));
            }
        }
        self.rounds = self.rounds.saturating_add(1);
    }
}
