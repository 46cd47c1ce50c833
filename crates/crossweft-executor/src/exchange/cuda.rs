//! Exchanges on a CUDA device: tables that kernels read, and their launches.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::KernelGuard;
use crossweft_device::exchange::{Exchange as Program, Fault, Transfer, Transfers};
use crossweft_device::{DataType, Memory as _, Raw, ReduceOp};
use crossweft_hal::HalError;
use crossweft_hal::cpu::Interrupted;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, CudaError, DeviceMemory, Event, Kernel, Module,
    PinnedMemory, Shape, Stream,
};
use crossweft_kernels::{
    ExchangeLaunch, MAX_CHAINS, MAX_MESSAGES, MAX_REGISTERS, MAX_THREADS, Message, MessagesLaunch,
    Module as KernelModule, exchange_module, messages_module,
};

use super::layout::Layout;
use super::{ExchangeError, INLINE, Request, call_words};
use crate::cuda::ended;
use crate::turn::{Taken, Turn};

/// Thread blocks of a launch of chains, at most.
const MOST_BLOCKS: u32 = 128;
/// Threads of a block that has a transfer of its own: two blocks find room on a multiprocessor.
const SINGLE_THREADS: u32 = 256;
/// From so many blocks on they have all the threads they can, if they fit: a little is gained with large messages, and lost with
/// small ones.
const FEW_BLOCKS: u32 = 64;
/// Launches that may be under way before the host waits for the first.
const IN_FLIGHT: usize = 16;
/// Transfers that a table has room for at first.
const ROOM: usize = 1024;
/// How long a launch that was stopped may take to end.
const END_GRACE: Duration = Duration::from_secs(30);

/// What launches the transfers of an exchange.
#[derive(Debug)]
pub(super) struct Launcher {
    context: Arc<Context>,
    /// Without reductions.
    plain: Kernel,
    /// Without reductions, for groups whose transfers may each have a thread block.
    single: Kernel,
    /// With reductions of a type.
    reducing: Vec<(DataType, Kernel)>,
    guard: KernelGuard,
    faults: PinnedMemory,
    /// Thread blocks that may be resident at once, for this rank: of launches of chains, and of those of single transfers.
    blocks: u32,
    single_blocks: u32,
    /// Of the latter, with [`MAX_THREADS`].
    wide_blocks: u32,
    desk: Turn<Desk>,
    limit: Duration,
}

/// Where launches are put together.
#[derive(Debug)]
pub(super) struct Desk {
    layout: Layout,
    /// What is laid out, if each transfer may have a thread block of its own.
    messages: Vec<Message>,
    is_single: bool,
    /// The first [`IN_FLIGHT`] are used by turns; those behind them are of launches that were recorded, which find them
    /// there for as long as the exchange is.
    tables: Vec<Table>,
    turn: usize,
    /// Memory for tables of launches that are recorded, as far as it is used.
    kept: Option<(Arc<PinnedMemory>, u64)>,
    /// Tables that were too small: freeing their memory would wait for kernels, which may be waiting for this launch.
    outgrown: Vec<Table>,
    /// The stream of the last launch that was not recorded, by its number if the driver can tell, and its table.
    last: Option<(Option<u64>, usize)>,
}

/// The transfers of a launch, in memory that the device reads.
#[derive(Debug)]
struct Table {
    memory: Arc<PinnedMemory>,
    offset: u64,
    room: usize,
    /// The group.
    requests: Vec<Request>,
    /// When the launch has ended; none of a recorded one.
    end: Option<Event>,
}

/// Why there is no launch.
pub(super) enum Unlaunched {
    Hal(HalError),
    /// There is no kernel for reductions of the type.
    Unprepared(DataType),
}

impl From<CudaError> for Unlaunched {
    fn from(error: CudaError) -> Self {
        Self::Hal(error.into())
    }
}

const SIZE: u64 = size_of::<Transfer>() as u64;

impl Table {
    fn new(context: &Arc<Context>, room: usize) -> Result<Self, CudaError> {
        let memory = PinnedMemory::allocate(context, room as u64 * SIZE)?;
        Ok(Self {
            memory: Arc::new(memory),
            offset: 0,
            room,
            requests: Vec::with_capacity(INLINE),
            end: Some(Event::new(context)?),
        })
    }

    fn address(&self) -> u64 {
        self.memory.device_address() + self.offset
    }

    /// Writes what is laid out.
    fn write(&self, layout: &Layout) {
        let mut to = self.memory.host_address() + self.offset;
        for transfer in layout.chains.iter().chain(&layout.followers) {
            // SAFETY: the table has room for them, which was seen to, and no launch reads it: it has ended, or was never
            // launched.
            unsafe { Raw.write(to, *transfer) };
            to += SIZE;
        }
    }
}

impl Launcher {
    /// Loads the kernels and finds out how many blocks each of `sharers` ranks may have, no more than `waiting` if so few do.
    pub(super) fn new(
        context: &Arc<Context>,
        layout: Layout,
        (sharers, waiting): (u32, u32),
        reduces: &[DataType],
        limit: Duration,
    ) -> Result<Self, CudaError> {
        let sm = context.device().sm()?;
        let plain = kernel(context, "exchanges", exchange_module(None, sm))?;
        let single = kernel(context, "exchanges", messages_module(sm))?;
        let mut resident = plain.max_resident_blocks(MAX_THREADS, 0)?;
        let resident_single = single.max_resident_blocks(SINGLE_THREADS, 0)?;
        let resident_wide = single.max_resident_blocks(MAX_THREADS, 0)?;
        let mut reducing: Vec<(DataType, Kernel)> = Vec::new();
        for &dtype in reduces {
            if reducing.iter().all(|(known, _)| *known != dtype) {
                let what = format!("reductions of {dtype}");
                let kernel = kernel(context, &what, exchange_module(Some(dtype), sm))?;
                resident = resident.min(kernel.max_resident_blocks(MAX_THREADS, 0)?);
                reducing.push((dtype, kernel));
            }
        }
        let most = layout.most_chains();
        let each = |resident: u32| resident / sharers.max(1);
        let enough = waiting.max(most.div_ceil(MAX_CHAINS));
        let blocks = each(resident).min(MOST_BLOCKS).min(enough);
        if most > blocks * MAX_CHAINS {
            return Err(CudaError::Incapable {
                device: context.ordinal(),
                what: "run exchanges",
                reason: format!(
                    "{sharers} ranks on it have room for {blocks} thread blocks each, of {MAX_CHAINS} chains; there \
                     may be {most}: ask for fewer lanes"
                ),
            });
        }
        let faults = u64::from(blocks.max(resident_single)) * size_of::<Fault>() as u64;
        let room = ROOM.max(most as usize);
        let tables = (0..IN_FLIGHT).map(|_| Table::new(context, room));
        let desk = Desk {
            layout,
            messages: Vec::with_capacity(MAX_MESSAGES),
            is_single: false,
            tables: tables.collect::<Result<_, _>>()?,
            turn: 0,
            kept: None,
            outgrown: Vec::new(),
            last: None,
        };
        Ok(Self {
            context: Arc::clone(context),
            plain,
            single,
            reducing,
            guard: KernelGuard::new(context)?,
            single_blocks: each(resident_single).min(waiting),
            wide_blocks: each(resident_wide).min(waiting),
            faults: PinnedMemory::allocate(context, faults)?,
            blocks,
            desk: Turn::new(desk),
            limit,
        })
    }

    /// Whether a memory is of the device.
    pub(super) fn has(&self, memory: &DeviceMemory) -> bool {
        memory.context().ordinal() == self.context.ordinal()
    }

    /// Address of the faults, for the device.
    pub(super) fn faults(&self) -> u64 {
        self.faults.device_address()
    }

    /// What did not match, as a thread block has said it.
    pub(super) fn fault(&self, block: u32) -> Fault {
        let block = u64::from(block.min(self.blocks.max(self.single_blocks) - 1));
        // SAFETY: one for each block; it was written before the record that names the block.
        unsafe { Raw.read(self.faults.host_address() + block * size_of::<Fault>() as u64) }
    }

    /// What ended the first launch that ended badly.
    pub(super) fn interrupted(&self) -> Option<Interrupted> {
        self.guard.interrupted()
    }

    pub(super) fn end_waits(&self) {
        self.guard.abort();
    }

    /// Blocks until the last launch has ended, and no longer than launches can take.
    pub(super) fn finish(&self) -> Result<(), CudaError> {
        let Some(desk) = self.desk.take(END_GRACE) else {
            return Ok(());
        };
        let last = desk.last.and_then(|(_, table)| desk.tables.get(table));
        let Some(end) = last.and_then(|table| table.end.as_ref()) else {
            return Ok(());
        };
        // Launches end themselves at their limit, one after another.
        let limit = self.limit.saturating_mul(IN_FLIGHT as u32) + END_GRACE;
        let wait = || end.synchronize(Instant::now() + limit);
        ended(&self.context, wait)
    }

    /// A stream for a launch that the caller waits for.
    pub(super) fn stream(&self) -> Result<Stream, CudaError> {
        Stream::new(&self.context)
    }

    pub(super) fn wait(
        &self,
        stream: &Stream,
        limit: Duration,
        failed: impl Fn() -> bool,
    ) -> Result<(), CudaError> {
        self.guard.wait(stream, limit, failed)
    }

    /// The turn to put a launch together.
    pub(super) fn desk(&self, limit: Duration) -> Option<Taken<'_, Desk>> {
        self.desk.take(limit)
    }

    /// Lays requests out, and finds a table that no launch reads any more: its number. What it was of is still
    /// [known](Self::call), until it is [named](Self::name) anew.
    pub(super) fn lay_out(
        &self,
        desk: &mut Desk,
        stream: &Stream,
        requests: &[Request],
    ) -> Result<usize, ExchangeError> {
        desk.is_single = desk
            .layout
            .single(requests, self.single_blocks, &mut desk.messages);
        let room = match desk.is_single {
            true => 0,
            false => {
                desk.layout.lay_out(requests);
                desk.layout.chains.len() + desk.layout.followers.len()
            }
        };
        let found = if stream.is_capturing().map_err(HalError::from)? {
            self.keep(desk, room)
        } else {
            self.next(desk, room)
        };
        Ok(found.map_err(HalError::from)?)
    }

    /// A table for a launch that is being recorded.
    fn keep(&self, desk: &mut Desk, room: usize) -> Result<usize, CudaError> {
        let bytes = room as u64 * SIZE;
        let (memory, offset) = match desk.kept.take() {
            Some((memory, used)) if used + bytes <= memory.bytes() => (memory, used),
            _ => {
                let most = bytes.max(ROOM as u64 * SIZE);
                let allocate = || PinnedMemory::allocate(&self.context, most);
                let memory = self.context.driver().aside_from_captures(allocate)??;
                (Arc::new(memory), 0)
            }
        };
        desk.kept = Some((Arc::clone(&memory), offset + bytes));
        desk.tables.push(Table {
            memory,
            offset,
            room,
            requests: Vec::new(),
            end: None,
        });
        Ok(desk.tables.len() - 1)
    }

    /// The next table, when its launch has ended.
    fn next(&self, desk: &mut Desk, room: usize) -> Result<usize, CudaError> {
        let number = desk.turn;
        desk.turn = (number + 1) % IN_FLIGHT;
        let table = &mut desk.tables[number];
        // Launches end themselves at their limit, one after another.
        let limit = self.limit.saturating_mul(IN_FLIGHT as u32) + END_GRACE;
        self.context.driver().aside_from_captures(|| {
            if let Some(end) = &table.end {
                end.synchronize(Instant::now() + limit)?;
            }
            if table.room < room {
                let larger = Table::new(&self.context, room.next_power_of_two())?;
                desk.outgrown.push(std::mem::replace(table, larger));
            }
            Ok(())
        })??;
        Ok(number)
    }

    /// Says what the launch by a table will be.
    pub(super) fn name(desk: &mut Desk, number: usize, requests: &[Request]) {
        let table = &mut desk.tables[number];
        table.requests.clear();
        table.requests.extend_from_slice(requests);
    }

    /// What a transfer of a launch is, in words.
    pub(super) fn call(desk: &Desk, launch: u32, op: u32) -> Option<String> {
        let request = desk
            .tables
            .get(launch as usize)?
            .requests
            .get(op as usize)?;
        let (envelope, peer) = (request.envelope(), request.peer);
        Some(call_words(request.direction, &envelope, peer, op))
    }

    /// Launches what is laid out, by table `number`, in the order of `stream`.
    ///
    /// # Safety
    /// The program was prepared for this device, and what it and the requests point to must be valid until the launch has
    /// ended.
    pub(super) unsafe fn launch(
        &self,
        desk: &mut Desk,
        stream: &Stream,
        program: &Program,
        number: usize,
        reduction: Option<(DataType, ReduceOp)>,
    ) -> Result<(), Unlaunched> {
        let kernel = match reduction {
            None => &self.plain,
            Some((dtype, _)) => {
                let found = self.reducing.iter().find(|(known, _)| *known == dtype);
                let (_, kernel) = found.ok_or(Unlaunched::Unprepared(dtype))?;
                kernel
            }
        };
        let Desk {
            layout,
            messages,
            is_single,
            tables,
            last,
            ..
        } = desk;
        // Launches follow one another, whatever streams they are on. Not by handles: one may be a new stream's that was an old
        // one's, and every thread's own default stream has the same.
        let on = match &tables[number].end {
            Some(_) => stream.id()?,
            None => None,
        };
        if let (Some(_), Some((before, table))) = (&tables[number].end, *last)
            && (on.is_none() || before != on)
            && let Some(end) = &tables[table].end
        {
            stream.wait(end)?;
        }
        let table = &tables[number];
        let context = self.guard.context(self.limit);
        if *is_single {
            let blocks = messages.last().map_or(0, |last| last.first + last.lanes);
            let mut launch = MessagesLaunch {
                exchange: *program,
                context,
                launch: number as u32,
                count: messages.len() as u32,
                messages: [Message::default(); MAX_MESSAGES],
            };
            launch.messages[..messages.len()].copy_from_slice(messages);
            let threads = match blocks {
                FEW_BLOCKS.. if blocks <= self.wide_blocks => MAX_THREADS,
                _ => SINGLE_THREADS,
            };
            let shape = Shape::linear(blocks, threads);
            // SAFETY: this is the kernel's parameter; the rest is the caller's promise.
            unsafe { (self.single).launch(stream, &shape, &[Argument::from(&launch)])? };
        } else {
            table.write(layout);
            let count = layout.chains.len() as u32;
            let blocks = count.min(self.blocks);
            let launch = ExchangeLaunch {
                exchange: *program,
                transfers: Transfers {
                    chains: table.address(),
                    followers: table.address() + u64::from(count) * SIZE,
                    count,
                    blocks,
                    launch: number as u32,
                    reserved: 0,
                },
                context,
                op: reduction.map_or(ReduceOp::Sum, |(_, op)| op),
                reserved: 0,
            };
            let shape = Shape::linear(blocks, MAX_THREADS);
            // SAFETY: this is the kernel's parameter; the table is kept as long as the launch, or this; the rest is the
            // caller's promise.
            unsafe { kernel.launch(stream, &shape, &[Argument::from(&launch)])? };
        }
        if let Some(end) = &table.end {
            end.record(stream)?;
            *last = Some((on, number));
        }
        Ok(())
    }
}

fn kernel(
    context: &Arc<Context>,
    what: &str,
    found: Option<(&'static KernelModule, &'static str)>,
) -> Result<Kernel, CudaError> {
    let Some((module, entry)) = found else {
        return Err(CudaError::Incapable {
            device: context.ordinal(),
            what: "run exchanges",
            reason: format!("there is no kernel for {what} for its compute capability"),
        });
    };
    let options = CompileOptions {
        max_registers: Some(MAX_REGISTERS),
        ..CompileOptions::default()
    };
    Module::shared(context, module.name, module.ptx, &options)?.kernel(entry)
}
