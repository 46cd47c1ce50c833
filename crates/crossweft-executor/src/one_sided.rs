//! Puts into peers' registered memory and signals to peers, from the host: what needs no call of the peer.
//!
//! A put is written before a signal that follows it is counted, so whoever has waited for the signal
//! sees the data ([`crossweft_device::semaphore`]). On a GPU all of it may go in the order of a stream: puts are copies, and
//! signals and waits a kernel of one thread block.
#![allow(unsafe_code)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "addresses have 64 bits (checked in crossweft-device)"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, Guard, KernelGuard, RegisteredMemory, SemaphorePool};
use crossweft_device::Site;
use crossweft_device::semaphore::Semaphore;
use crossweft_hal::cpu::{Grid, Interrupted, Schedule};
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, Event, Kernel, Module, Shape, Stream,
};
use crossweft_hal::{Device, HalError};
use crossweft_kernels::{MAX_REGISTERS, SignalLaunch, signal_module};
use crossweft_net::LONGEST_TIMEOUT;

use crate::cuda::ended;
use crate::exchange::{ExchangeError, Region};
use crate::turn::Turn;

/// How long a launch that was stopped may take to end.
const END_GRACE: Duration = Duration::from_secs(30);

/// One semaphore between every two ranks, and of each rank with itself.
#[derive(Debug)]
pub struct OneSided {
    endpoint: Arc<Endpoint>,
    machine: Machine,
    semaphores: Arc<SemaphorePool>,
    limit: Duration,
}

#[derive(Debug)]
enum Machine {
    Cpu(Turn<Grid>),
    Cuda(Arc<Launcher>),
}

/// What signals and waits on a GPU.
#[derive(Debug)]
struct Launcher {
    context: Arc<Context>,
    kernel: Kernel,
    guard: KernelGuard,
    has_failed: AtomicBool,
    /// For waits of the host, which follow one another.
    waiting: Turn<()>,
    used: Turn<Used>,
    limit: Duration,
}

/// What is under way.
#[derive(Debug, Default)]
struct Used {
    streams: Vec<UsedStream>,
    /// What recorded puts are to.
    recorded: Vec<Arc<RegisteredMemory>>,
}

/// The end of what was submitted to a stream, and what is put into until then.
#[derive(Debug)]
struct UsedStream {
    /// Its number, which is never another stream's; its handle, if the driver cannot tell that.
    number: u64,
    end: Event,
    memories: Vec<Arc<RegisteredMemory>>,
}

impl OneSided {
    /// Makes the semaphores. Collective; blocks until all ranks have called it, at most until `deadline`. Later
    /// waits may take `limit`.
    ///
    /// # Errors
    /// [`ExchangeError`]: one died or was late or runs on another host, or there is no memory.
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        limit: Duration,
        deadline: Instant,
    ) -> Result<Self, ExchangeError> {
        let (what, limit) = ("preparing signals", limit.min(LONGEST_TIMEOUT));
        let peers: Vec<u32> = (0..endpoint.world_size()).collect();
        let semaphores = SemaphorePool::new(endpoint, &peers, deadline)?;
        let rank = endpoint.rank();
        if let Some(peer) = peers.iter().find(|&&peer| !endpoint.is_mappable(peer)) {
            let reason = format!("rank {peer} runs on another host");
            return Err(ExchangeError::Usage { rank, reason });
        }
        let ready = match endpoint.device() {
            // Waits of the host borrow a stream; each rank holds one until all have come, as for plans.
            Device::Cuda(context) => Launcher::new(context, limit)
                .and_then(|launcher| Ok((Stream::new(context)?, launcher)))
                .map(|(stream, launcher)| (Machine::Cuda(Arc::new(launcher)), Some(stream)))
                .map_err(HalError::from),
            _ => {
                Grid::new(1, Schedule::default()).map(|grid| (Machine::Cpu(Turn::new(grid)), None))
            }
        };
        let ready = ready.map_err(ExchangeError::from);
        let (machine, _stream) = endpoint.settle(ready, what, deadline, ExchangeError::from)?;
        Ok(Self {
            endpoint: Arc::clone(endpoint),
            machine,
            semaphores: Arc::new(semaphores),
            limit,
        })
    }

    /// Copies `data` of the host to byte `offset` of `peer`'s part of `memory`. Local. It is there for `peer` when it has
    /// waited for a signal that follows.
    ///
    /// # Errors
    /// [`ExchangeError::Usage`] if it does not fit; [`ExchangeError::Channel`] if the memory is not mapped;
    /// [`ExchangeError::Hal`].
    pub fn put(
        &self,
        memory: &RegisteredMemory,
        peer: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), ExchangeError> {
        let to = self.target(memory, peer, offset, data.len() as u64)?;
        match &self.machine {
            Machine::Cpu(_) => {
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
                // SAFETY: the range lies in the mapping, which `memory` keeps, and is only touched by raw copies; `data`
                // is a borrowed slice, but may be the same memory under its own or another address, which `copy`
                // allows for.
                unsafe { std::ptr::copy(data.as_ptr(), to, data.len()) };
            }
            Machine::Cuda(launcher) => {
                // SAFETY: the range lies in the mapping, which `memory` keeps until this returns.
                unsafe { launcher.context.write(to, data) }.map_err(HalError::from)?;
            }
        }
        Ok(())
    }

    /// Where `bytes` bytes at `offset` of `peer`'s part of a memory are mapped.
    fn target(
        &self,
        memory: &RegisteredMemory,
        peer: u32,
        offset: u64,
        bytes: u64,
    ) -> Result<u64, ExchangeError> {
        let to = memory.addr(peer)?;
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > memory.bytes()) {
            return Err(self.usage(format!(
                "{bytes} bytes at {offset} lie outside a memory of {} bytes",
                memory.bytes()
            )));
        }
        Ok(to + offset)
    }

    /// Copies memory of this rank's GPU to byte `offset` of `peer`'s part of `memory`, in the order of a stream, which may be
    /// recording a graph; returns at once. It is there for `peer` when it has waited for a signal that follows in the stream.
    ///
    /// # Errors
    /// As for [`put`](Self::put); [`ExchangeError::Usage`] if ranks are on the CPU.
    pub fn put_on(
        &self,
        stream: &Stream,
        memory: &Arc<RegisteredMemory>,
        peer: u32,
        offset: u64,
        data: Region,
    ) -> Result<(), ExchangeError> {
        let launcher = self.launcher()?;
        let to = self.target(memory, peer, offset, data.bytes())?;
        // SAFETY: the target lies in the mapping, which is kept until the copy has ended; the source was promised.
        let put = || unsafe { stream.copy(to, data.address(), data.bytes()) };
        self.submit(launcher, stream, Some(memory), put)
    }

    /// Signals `peer`, which may be this rank. Local.
    ///
    /// # Errors
    /// [`ExchangeError::Usage`] if there is no such rank; [`ExchangeError::Hal`], [`ExchangeError::Poisoned`].
    pub fn signal(&self, peer: u32) -> Result<(), ExchangeError> {
        self.act(peer, (0, 1))
    }

    /// Waits for `count` signals of `peer`, and for what it has put before each.
    ///
    /// # Errors
    /// [`ExchangeError::Interrupted`]: the peer died or left, the job was aborted, or it took too long. Then, on a GPU,
    /// [`ExchangeError::Poisoned`] from all later calls.
    pub fn wait(&self, peer: u32, count: u32) -> Result<(), ExchangeError> {
        self.act(peer, (count, 0))
    }

    /// [`signal`](Self::signal) in the order of a stream of this rank's GPU, which may be recording a graph; returns at once.
    ///
    /// # Errors
    /// [`ExchangeError::Usage`], also if ranks are on the CPU; [`ExchangeError::Hal`], [`ExchangeError::Poisoned`].
    pub fn signal_on(&self, stream: &Stream, peer: u32) -> Result<(), ExchangeError> {
        self.act_on(stream, peer, (0, 1))
    }

    /// [`wait`](Self::wait) in the order of a stream of this rank's GPU, which may be recording a graph; returns at once. What
    /// goes wrong on the device shows up in [`check`](Self::check). Waits for one peer must follow one another.
    ///
    /// # Errors
    /// As for [`signal_on`](Self::signal_on).
    pub fn wait_on(&self, stream: &Stream, peer: u32, count: u32) -> Result<(), ExchangeError> {
        self.act_on(stream, peer, (count, 0))
    }

    /// Whether every wait on a stream that has ended, ended well; does not block.
    ///
    /// # Errors
    /// [`ExchangeError::Interrupted`] with the first that did not.
    pub fn check(&self) -> Result<(), ExchangeError> {
        let Machine::Cuda(launcher) = &self.machine else {
            return Ok(());
        };
        match launcher.guard.interrupted() {
            None => Ok(()),
            Some(interrupted) => {
                launcher.has_failed.store(true, Ordering::Relaxed);
                let guard = Guard::new(&self.endpoint, self.limit);
                Err(self.explain(&interrupted, &guard))
            }
        }
    }

    /// Ends all waits on a GPU, also those that are yet to begin, within about a millisecond.
    pub fn end_waits(&self) {
        if let Machine::Cuda(launcher) = &self.machine {
            launcher.guard.abort();
        }
    }

    /// Waits for signals, then signals; until that is done.
    fn act(&self, peer: u32, (waits, signals): (u32, u32)) -> Result<(), ExchangeError> {
        let semaphore = self.semaphore(peer)?;
        let guard = Guard::new(&self.endpoint, self.limit);
        let late = || self.usage(format!("another wait still runs after {:?}", self.limit));
        match &self.machine {
            Machine::Cpu(grid) => {
                let mut grid = grid.take(self.limit).ok_or_else(late)?;
                let context = self.endpoint.context(&guard);
                let result = grid.launch(&context, &|block, _| {
                    // SAFETY: the pool keeps the semaphore's memory; a block of the host is one thread, and launches
                    // take turns, so one thread waits at a time.
                    unsafe {
                        for _ in 0..waits {
                            semaphore.wait(block, Site::NO_OP)?;
                        }
                        for _ in 0..signals {
                            semaphore.signal(block);
                        }
                    }
                    Ok(())
                });
                result.map_err(|interrupted| self.explain(&interrupted, &guard))
            }
            Machine::Cuda(launcher) => {
                let _turn = match waits {
                    0 => None,
                    _ => Some(launcher.waiting.take(self.limit).ok_or_else(late)?),
                };
                let stream = Stream::new(&launcher.context).map_err(HalError::from)?;
                self.act_on(&stream, peer, (waits, signals))?;
                let failed =
                    || self.endpoint.group().liveness().stopped() || guard.is_interrupted();
                let waited = launcher.guard.wait(&stream, self.limit, failed);
                self.check()?;
                waited.map_err(|error| HalError::from(error).into())
            }
        }
    }

    fn act_on(
        &self,
        stream: &Stream,
        peer: u32,
        (waits, signals): (u32, u32),
    ) -> Result<(), ExchangeError> {
        let launcher = self.launcher()?;
        let launch = SignalLaunch {
            semaphore: self.semaphore(peer)?,
            context: launcher.guard.context(self.limit),
            waits,
            signals,
            rank: self.endpoint.rank(),
            reserved: 0,
        };
        let shape = Shape::linear(1, 32);
        // SAFETY: this is the kernel's parameter; the pool keeps the semaphore's memory, and this waits for launches when
        // it is dropped.
        let act = || unsafe {
            launcher
                .kernel
                .launch(stream, &shape, &[Argument::from(&launch)])
        };
        self.submit(launcher, stream, None, act)
    }

    /// Submits something to a stream and notes it.
    fn submit(
        &self,
        launcher: &Launcher,
        stream: &Stream,
        memory: Option<&Arc<RegisteredMemory>>,
        submit: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), ExchangeError> {
        if launcher.has_failed.load(Ordering::Relaxed) {
            let rank = self.endpoint.rank();
            return Err(ExchangeError::Poisoned { rank });
        }
        let Some(mut used) = launcher.used.take(self.limit) else {
            return Err(self.usage(format!(
                "another call has not returned after {:?}",
                self.limit
            )));
        };
        let noted = used.note(launcher, stream, memory, submit);
        noted.map_err(|error| HalError::from(error).into())
    }

    fn launcher(&self) -> Result<&Launcher, ExchangeError> {
        match &self.machine {
            Machine::Cuda(launcher) => Ok(launcher),
            Machine::Cpu(_) => {
                Err(self.usage("it was prepared for the cpu, which has no such streams".to_owned()))
            }
        }
    }

    fn semaphore(&self, peer: u32) -> Result<Semaphore, ExchangeError> {
        let world_size = self.endpoint.world_size();
        if peer >= world_size {
            return Err(self.usage(format!(
                "there is no rank {peer} in a world of {world_size}"
            )));
        }
        Ok(self.semaphores.handle(peer as usize))
    }

    fn explain(&self, interrupted: &Interrupted, guard: &Guard<'_>) -> ExchangeError {
        let Interrupted {
            stopped, waiting, ..
        } = interrupted;
        ExchangeError::Interrupted {
            rank: self.endpoint.rank(),
            call: format!("waiting for signals of rank {}", waiting.site.peer),
            waited_for: Guard::describe(waiting),
            cause: Box::new(guard.cause(*stopped, waiting)),
        }
    }

    fn usage(&self, reason: String) -> ExchangeError {
        let rank = self.endpoint.rank();
        ExchangeError::Usage { rank, reason }
    }
}

impl Launcher {
    fn new(context: &Arc<Context>, limit: Duration) -> Result<Self, CudaError> {
        let sm = context.device().sm()?;
        let Some((module, entry)) = signal_module(sm) else {
            return Err(CudaError::Incapable {
                device: context.ordinal(),
                what: "signal",
                reason: format!("there is no kernel for compute capability {sm}"),
            });
        };
        let options = CompileOptions {
            max_registers: Some(MAX_REGISTERS),
            ..CompileOptions::default()
        };
        Ok(Self {
            context: Arc::clone(context),
            kernel: Module::shared(context, module.name, module.ptx, &options)?.kernel(entry)?,
            guard: KernelGuard::new(context)?,
            has_failed: AtomicBool::new(false),
            waiting: Turn::new(()),
            used: Turn::new(Used::default()),
            limit,
        })
    }
}

impl Used {
    /// Submits something to `stream`; keeps the memory that it puts into until it has ended.
    fn note(
        &mut self,
        launcher: &Launcher,
        stream: &Stream,
        memory: Option<&Arc<RegisteredMemory>>,
        submit: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let keep = |memories: &mut Vec<Arc<RegisteredMemory>>| {
            let new = memory.filter(|new| !memories.iter().any(|known| Arc::ptr_eq(known, new)));
            memories.extend(new.cloned());
        };
        if stream.is_capturing()? {
            keep(&mut self.recorded);
            return submit();
        }
        let number = stream.id()?.unwrap_or_else(|| stream.raw());
        let known = self.streams.iter().position(|used| used.number == number);
        let index = match known {
            Some(index) => index,
            None => {
                self.streams.push(UsedStream {
                    number,
                    end: Event::new(&launcher.context)?,
                    memories: Vec::new(),
                });
                self.streams.len() - 1
            }
        };
        let used = &mut self.streams[index];
        let is_reached = || used.end.is_reached();
        if launcher
            .context
            .driver()
            .aside_from_captures(is_reached)??
        {
            used.memories.clear();
        }
        keep(&mut used.memories);
        submit()?;
        used.end.record(stream)
    }
}

impl Launcher {
    /// Blocks until all that was submitted has ended, and no longer than it can take.
    fn finish(&self) -> Result<(), CudaError> {
        let Some(used) = self.used.take(END_GRACE) else {
            return Ok(());
        };
        let deadline = Instant::now() + self.limit + END_GRACE;
        let wait = || (used.streams.iter()).try_for_each(|used| used.end.synchronize(deadline));
        ended(&self.context, wait)
    }
}

impl Drop for OneSided {
    /// Waits for what nobody else may have waited for: memory is unmapped under kernels that use it, which ends the context.
    fn drop(&mut self) {
        let Machine::Cuda(launcher) = &self.machine else {
            return;
        };
        if let Err(error) = launcher.finish() {
            tracing::warn!(%error, "signals were dropped while a wait for them runs");
            // With it the context stays.
            std::mem::forget((Arc::clone(launcher), Arc::clone(&self.semaphores)));
        }
    }
}
