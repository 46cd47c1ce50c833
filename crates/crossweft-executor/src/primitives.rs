//! Primitives between two ranks, for whoever measures them: what a flag, a signal, packets and copies take.
//!
//! Nothing of a plan is in it: kernels (`kernels/src/bench.rs`) send something to and fro a number of times, or copy it, and say
//! how long that took by the device's clock. What has come is compared with what was sent.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::{
    Endpoint, Guard, KernelGuard, MemoryChannel, PortChannel, ProxyOptions, ProxyService,
    RegisteredMemory, SemaphorePool,
};
use crossweft_device::channel::PortChannel as PortHandle;
use crossweft_device::gpu::bulk::{ALIGNMENT, BUFFERS};
use crossweft_device::gpu::lines;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, Event, Kernel, Module, Shape, Stream,
};
use crossweft_hal::{Device, HalError, Memory};
use crossweft_kernels::{
    ECHO_WARMUP, EchoLaunch, MAX_REGISTERS, MAX_THREADS, bench, bench_module, channel,
    channel_module,
};

use crate::error::ExecutorError;
use crate::exchange::ExchangeError;
use crate::prepared::Prepared;

/// What goes from one rank to the other and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Echo {
    /// A word, without order.
    Relaxed,
    /// A word, stored with release and looked at with acquire.
    Acquire,
    /// Data, put by a thread block; then a signal, for which the other waits.
    PutSignalWait,
    /// Packets, of which each is stored by itself: 4 bytes of data in 8.
    Packets8,
    /// Packets in pairs: 8 bytes of data in a store of 16.
    Packets16,
    /// Lines: 120 bytes of data in 128 that a warp stores. Only where the machine keeps them whole.
    Lines,
    /// Data that one rank gets from the other's memory, without its help. There is no way back.
    Get,
    /// Data with a signal, by a proxy and its copy engine.
    Port,
}

impl Echo {
    const fn entry(self) -> &'static str {
        match self {
            Self::Relaxed => bench::ECHO_RELAXED,
            Self::Acquire => bench::ECHO_ACQUIRE,
            Self::PutSignalWait => bench::ECHO_PUT,
            Self::Packets8 => bench::ECHO_PACKETS8,
            Self::Packets16 => bench::ECHO_PACKETS16,
            Self::Lines => bench::ECHO_LINES,
            Self::Get => bench::ECHO_GET,
            Self::Port => bench::ECHO_PORT,
        }
    }

    const fn is_packets(self) -> bool {
        matches!(self, Self::Packets8 | Self::Packets16 | Self::Lines)
    }

    const fn has_data(self) -> bool {
        !matches!(self, Self::Relaxed | Self::Acquire)
    }
}

/// How a rank moves data that the other takes no part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mover {
    /// Threads load here and store there.
    Put,
    /// Threads load there and store here.
    Get,
    /// The multiprocessors' copy engines load here and store there.
    BulkPut,
}

/// The most data that goes at once, in bytes.
pub const MOST: u64 = 128 << 20;
/// The most in packets.
pub const MOST_PACKETS: u64 = 64 << 10;

/// Bytes before data, which begins with a rank's flag.
const DATA: u64 = 4096;
/// Where packets come, each kind in its own place: what was one kind's flag is another's data.
const PACKETS: u64 = DATA + 2 * MOST;
/// Room for packets of one kind.
const PACKETS_ROOM: u64 = 2 * MOST_PACKETS;
/// Bytes of data that are compared.
const COMPARED: u64 = 1 << 20;
/// Bytes of a buffer of bulk copies.
const BULK_BUFFER: u64 = 16 << 10;

/// One rank's end.
#[derive(Debug)]
pub struct Primitives {
    endpoint: Arc<Endpoint>,
    context: Arc<Context>,
    stream: Stream,
    timer: [Event; 2],
    guard: KernelGuard,
    module: Arc<Module>,
    copy: Kernel,
    bulk: Option<Kernel>,
    /// The nanoseconds that a kernel leaves.
    out: Memory,
    memory: Arc<RegisteredMemory>,
    channel: MemoryChannel,
    port: PortChannel,
    _proxy: ProxyService,
    flag: Cell<u32>,
    limit: Duration,
}

impl Primitives {
    /// Prepares everything. Collective, between two ranks on GPUs; blocks, at most until `deadline`. Each measurement may take
    /// `limit`.
    ///
    /// # Errors
    /// [`ExchangeError`]: there are not two ranks, or they are not on GPUs of one host, one died or was late, or there is no
    /// memory.
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        limit: Duration,
        deadline: Instant,
    ) -> Result<Self, ExchangeError> {
        let (rank, what) = (endpoint.rank(), "preparing to measure primitives");
        let usage = |reason: &str| ExchangeError::Usage {
            rank,
            reason: reason.to_owned(),
        };
        let Device::Cuda(context) = endpoint.device() else {
            return Err(usage("primitives are measured between GPUs"));
        };
        if endpoint.world_size() != 2 {
            return Err(usage("primitives are measured between two ranks"));
        }
        let peer = 1 - rank;
        let bytes = PACKETS + 3 * PACKETS_ROOM;
        let memory = endpoint.allocate_registered(bytes, what, deadline)?;
        let semaphores = Arc::new(SemaphorePool::new(endpoint, &[peer, peer], deadline)?);
        let channel = MemoryChannel::new(&semaphores, 0, &memory, &memory)?;
        let proxy = ProxyService::new(endpoint, &ProxyOptions::default(), deadline)?;
        let id = proxy.add_memory(&memory)?;
        let port = proxy.channel(&semaphores, 1, id, id, deadline)?;
        let ready = || -> Result<_, HalError> {
            let sm = context.device().sm()?;
            let load = |found: Option<&'static crossweft_kernels::Module>| {
                let module = found.ok_or_else(|| CudaError::Incapable {
                    device: context.ordinal(),
                    what: "measure primitives",
                    reason: format!("there are no kernels for compute capability {sm}"),
                })?;
                let options = CompileOptions {
                    max_registers: Some(MAX_REGISTERS),
                    ..CompileOptions::default()
                };
                Module::shared(context, module.name, module.ptx, &options)
            };
            let module = load(bench_module(sm))?;
            let copy = module.kernel(bench::COPY)?;
            // Older machines have no such engine.
            let bulk = match sm >= 90 {
                true => Some(load(channel_module(sm))?.kernel(channel::BULK_COPY)?),
                false => None,
            };
            if let Some(bulk) = &bulk {
                bulk.allow_shared_bytes(stage() as u32)?;
            }
            Ok((
                Stream::new(context)?,
                [Event::with_timing(context)?, Event::with_timing(context)?],
                KernelGuard::new(context)?,
                endpoint.device().allocate(4096)?,
                (module, copy, bulk),
            ))
        };
        let ready = ready().map_err(ExchangeError::from);
        let (stream, timer, guard, out, (module, copy, bulk)) =
            endpoint.settle(ready, what, deadline, ExchangeError::from)?;
        Ok(Self {
            endpoint: Arc::clone(endpoint),
            context: Arc::clone(context),
            stream,
            timer,
            guard,
            module,
            copy,
            bulk,
            out,
            memory,
            channel,
            port,
            _proxy: proxy,
            flag: Cell::new(1),
            limit,
        })
    }

    /// How long one way takes of `rounds` to and fro, after some that do not count, of `bytes` bytes by a block of `threads`
    /// threads. Collective; each rank gets what its rounds took, and rank 1 nothing of what rank 0 does alone.
    ///
    /// # Errors
    /// [`ExchangeError`]: sizes that cannot be, a wait that ended badly, or data that is not what was sent.
    pub fn one_way(
        &self,
        echo: Echo,
        bytes: u64,
        threads: u32,
        rounds: u32,
    ) -> Result<Duration, ExchangeError> {
        // Each time from another place, for caches know the one before.
        let places = match echo {
            Echo::Get => (MOST / stride(bytes)).min(u64::from(rounds) + u64::from(ECHO_WARMUP)),
            _ => 1,
        };
        self.in_bursts(echo, bytes, threads, (rounds, places as u32))
    }

    /// Gigabytes a second of `burst` puts by a proxy of `bytes` bytes, each with a signal, that follow one another; then the other
    /// side has its turn. Collective.
    ///
    /// # Errors
    /// As for [`one_way`](Self::one_way).
    pub fn port_bandwidth(&self, bytes: u64, burst: u32) -> Result<f64, ExchangeError> {
        let took = self.in_bursts(Echo::Port, bytes, 32, (2, burst.max(1)))?;
        Ok(bytes as f64 * f64::from(burst.max(1)) / took.as_secs_f64() / 1e9)
    }

    fn in_bursts(
        &self,
        echo: Echo,
        bytes: u64,
        threads: u32,
        (rounds, burst): (u32, u32),
    ) -> Result<Duration, ExchangeError> {
        let most = match echo.is_packets() {
            true => MOST_PACKETS,
            false => MOST,
        };
        if bytes > most || !bytes.is_multiple_of(16) || rounds == 0 {
            return Err(self.usage(format!(
                "{rounds} rounds of {bytes} bytes; at most {most} bytes, a multiple of 16, once at least"
            )));
        }
        if threads == 0 || threads > MAX_THREADS || !threads.is_multiple_of(32) {
            return Err(self.usage(format!(
                "{threads} threads; a multiple of 32, at most {MAX_THREADS}"
            )));
        }
        let rank = self.endpoint.rank();
        let kernel = self.module.kernel(echo.entry()).map_err(HalError::from)?;
        let landing = DATA + MOST;
        let compared = bytes.min(COMPARED);
        // What rank 0 sends in packets comes back from rank 1, who therefore has it from there.
        let places = match echo {
            Echo::Get => u64::from(burst),
            _ => 1,
        };
        let held = match echo {
            Echo::Get => stride(bytes) * places,
            _ => compared,
        };
        let own = pattern(echo, rank, held);
        let start = if echo.is_packets() { landing } else { DATA };
        self.memory
            .local()
            .write(landing, &vec![0; compared as usize])?;
        if !echo.is_packets() || rank == 0 {
            self.memory.local().write(start, &own)?;
        }
        let flag = self.flag.get();
        self.flag
            .set(flag.wrapping_add(rounds + ECHO_WARMUP).max(1));
        let launch = EchoLaunch {
            channel: self.channel.handle(),
            port: match echo {
                Echo::Port => self.port.handle(),
                _ => PortHandle::default(),
            },
            data: match echo {
                Echo::Packets8 => PACKETS,
                Echo::Packets16 => PACKETS + PACKETS_ROOM,
                Echo::Lines => PACKETS + 2 * PACKETS_ROOM,
                _ => DATA,
            },
            landing,
            bytes,
            out: self.out.addr(),
            rounds,
            flag,
            side: rank,
            burst,
            context: self.guard.context(self.limit),
        };
        self.meet()?;
        let is_idle = echo == Echo::Get && rank == 1;
        if !is_idle {
            let shape = Shape::linear(1, threads);
            // SAFETY: this is the kernel's parameter; what it points to is kept, and this waits for its end.
            unsafe { kernel.launch(&self.stream, &shape, &[Argument::from(&launch)]) }
                .map_err(HalError::from)?;
            self.finish()?;
        }
        self.meet()?;
        if echo.has_data() && !is_idle {
            let expected = match echo.is_packets() {
                true => pattern(echo, 0, compared),
                false => pattern(echo, 1 - rank, held),
            };
            let last = u64::from(rounds + ECHO_WARMUP - 1) % places * stride(bytes);
            let last = if echo == Echo::Get { last as usize } else { 0 };
            let expected = &expected[last..last + compared as usize];
            self.compare(self.memory.local(), landing, expected, echo)?;
        }
        if is_idle {
            return Ok(Duration::ZERO);
        }
        let mut took = [0; 8];
        self.out.read(0, &mut took)?;
        let ways = match echo {
            Echo::Get => rounds,
            _ => 2 * rounds,
        };
        Ok(Duration::from_nanos(u64::from_le_bytes(took)) / ways)
    }

    /// Gigabytes a second of `times` copies of `bytes` bytes by `blocks` thread blocks, one after another, which rank 0 makes
    /// alone; 0 of rank 1. Nothing where the machine has no such engine. Collective.
    ///
    /// # Errors
    /// As for [`one_way`](Self::one_way).
    pub fn bandwidth(
        &self,
        mover: Mover,
        bytes: u64,
        blocks: u32,
        times: u32,
    ) -> Result<Option<f64>, ExchangeError> {
        if bytes > MOST || bytes == 0 || blocks == 0 || times == 0 {
            return Err(self.usage(format!(
                "{times} copies of {bytes} bytes by {blocks} blocks; at most {MOST} bytes, one of each at least"
            )));
        }
        let (rank, landing) = (self.endpoint.rank(), DATA + MOST);
        let compared = bytes.min(COMPARED);
        let own = pattern(Echo::Get, rank, compared);
        self.memory.local().write(DATA, &own)?;
        self.memory
            .local()
            .write(landing, &vec![0; compared as usize])?;
        let (here, there) = (self.channel.handle().local, self.channel.handle().remote);
        let (dst, src) = match mover {
            Mover::Get => (here + landing, there + DATA),
            _ => (there + landing, here + DATA),
        };
        let shared = stage();
        let arguments: [Argument<'_>; 4] = [
            (&dst).into(),
            (&src).into(),
            (&bytes).into(),
            (&shared).into(),
        ];
        let (kernel, arguments, shared) = match (mover, &self.bulk) {
            (Mover::BulkPut, None) => return Ok(None),
            (Mover::BulkPut, Some(bulk)) => (bulk, &arguments[..], shared as u32),
            _ => (&self.copy, &arguments[..3], 0),
        };
        let shape = Shape {
            shared_bytes: shared,
            ..Shape::linear(blocks, MAX_THREADS)
        };
        self.meet()?;
        let mut speed = 0.0;
        if rank == 0 {
            let copies = |times: u32| -> Result<(), CudaError> {
                for _ in 0..times {
                    // SAFETY: these are the kernel's parameters; both ranges lie in mapped memory that is kept.
                    unsafe { kernel.launch(&self.stream, &shape, arguments)? };
                }
                Ok(())
            };
            let timed = || -> Result<Duration, CudaError> {
                copies(2)?;
                self.timer[0].record(&self.stream)?;
                copies(times)?;
                self.timer[1].record(&self.stream)?;
                self.timer[1].synchronize(Instant::now() + self.limit)?;
                self.timer[1].since(&self.timer[0])
            };
            let took = timed().map_err(HalError::from)?;
            speed = bytes as f64 * f64::from(times) / took.as_secs_f64() / 1e9;
        }
        self.meet()?;
        let is_target = rank == u32::from(mover != Mover::Get);
        if is_target {
            let expected = pattern(Echo::Get, 1 - rank, compared);
            self.compare(self.memory.local(), landing, &expected, Echo::Get)?;
        }
        Ok(Some(speed))
    }

    /// What it costs the host to launch a kernel that copies 16 bytes: the mean of `calls` launches. Local.
    ///
    /// # Errors
    /// As for [`one_way`](Self::one_way).
    pub fn launch_cost(&self, calls: u32) -> Result<Duration, ExchangeError> {
        let here = self.channel.handle().local;
        let (dst, src, bytes) = (here + DATA + MOST, here + DATA, 16_u64);
        let arguments: [Argument<'_>; 3] = [(&dst).into(), (&src).into(), (&bytes).into()];
        let shape = Shape::linear(1, 32);
        let launch = || {
            // SAFETY: as above.
            unsafe { self.copy.launch(&self.stream, &shape, &arguments) }
        };
        launch().map_err(HalError::from)?;
        self.finish()?;
        let started = Instant::now();
        for _ in 0..calls.max(1) {
            launch().map_err(HalError::from)?;
        }
        let took = started.elapsed() / calls.max(1);
        self.finish()?;
        Ok(took)
    }

    /// What it costs the host to launch a plan in the order of a stream: the mean of `calls` calls on `bytes` bytes from the
    /// beginning of its registered memory, input and output. All ranks of the plan call it.
    ///
    /// # Errors
    /// [`ExecutorError`], as for launches; buffers that overlap otherwise than the plan allows.
    pub fn call_cost(
        &self,
        plan: &Prepared,
        bytes: u64,
        calls: u32,
    ) -> Result<Duration, ExecutorError> {
        let buffers = plan.registered_buffers(0, 0, bytes)?;
        let call = || {
            // SAFETY: the plan's own memory, which it keeps; this waits for what it launches, so launches of others cannot
            // come between but from another thread, which the plan's turn keeps out of each.
            unsafe { plan.launch_on_cuda(&self.stream, &buffers, self.limit) }
        };
        let wait = || {
            let limit = Instant::now() + self.limit;
            let waited = self.stream.synchronize(limit);
            waited.map_err(|error| plan.device(error))?;
            plan.check()
        };
        call()?;
        wait()?;
        let started = Instant::now();
        for _ in 0..calls.max(1) {
            call()?;
        }
        let took = started.elapsed() / calls.max(1);
        wait()?;
        Ok(took)
    }

    /// Whether lines are kept whole between these ranks' GPUs.
    #[must_use]
    pub fn keeps_lines(&self) -> bool {
        self.endpoint.keeps_lines()
    }

    /// The device that this rank is on.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether both ranks are on one device.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.endpoint.sharers() > 1
    }

    fn meet(&self) -> Result<(), ExchangeError> {
        let deadline = Instant::now() + self.limit;
        let met = self
            .endpoint
            .exchange(&0_u8, "measuring primitives", deadline);
        met.map(drop).map_err(ExchangeError::from)
    }

    /// Waits for what was launched.
    fn finish(&self) -> Result<(), ExchangeError> {
        let failed = || self.endpoint.group().liveness().stopped();
        let waited = self.guard.wait(&self.stream, self.limit, failed);
        if let Some(interrupted) = self.guard.interrupted() {
            let guard = Guard::new(&self.endpoint, self.limit);
            return Err(ExchangeError::Interrupted {
                rank: self.endpoint.rank(),
                call: "measuring a primitive".to_owned(),
                waited_for: Guard::describe(&interrupted.waiting),
                cause: Box::new(guard.cause(interrupted.stopped, &interrupted.waiting)),
            });
        }
        waited.map_err(|error| HalError::from(error).into())
    }

    fn compare(
        &self,
        memory: &Memory,
        offset: u64,
        expected: &[u8],
        echo: Echo,
    ) -> Result<(), ExchangeError> {
        let mut got = vec![0; expected.len()];
        memory.read(offset, &mut got)?;
        match got == expected {
            true => Ok(()),
            false => Err(self.usage(format!(
                "what came by {echo:?} is not what was sent: this machine does not order it as crossweft needs"
            ))),
        }
    }

    fn usage(&self, reason: String) -> ExchangeError {
        let rank = self.endpoint.rank();
        ExchangeError::Usage { rank, reason }
    }
}

/// From one place to get data from to the next.
const fn stride(bytes: u64) -> u64 {
    match bytes {
        0 => lines::LINE,
        _ => bytes.next_multiple_of(lines::LINE),
    }
}

/// Shared memory of a block that makes bulk copies.
const fn stage() -> u64 {
    ALIGNMENT + BUFFERS * BULK_BUFFER
}

/// What rank `rank` sends: no byte as it lies there otherwise.
fn pattern(echo: Echo, rank: u32, bytes: u64) -> Vec<u8> {
    let seed = (echo as u64 + 1) * 2 + u64::from(rank);
    (0..bytes)
        .map(|i| ((i * 31 + seed * 97 + (i >> 8)) % 251) as u8 + 1)
        .collect()
}
