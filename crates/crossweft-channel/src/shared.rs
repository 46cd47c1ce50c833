//! The one module that touches shared memory: private lines, bounded copies, signals, the popping
//! end of a fifo. What it hands out is safe to use: ranges are checked here.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crossweft_device::fifo::{Fifo, TRIGGER_BYTES, Trigger};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::wait::reached;
use crossweft_device::{Block, Memory as _, Raw, Stopped, Waiting};
use crossweft_hal::cpu::{Grid, HostBlock, Schedule, SharedMemory, Supervisor};
use crossweft_hal::cuda::{Context, CudaError, Event, PinnedMemory, Stream};
use crossweft_hal::{Device, HalError, Memory};

use crate::{ChannelError, Endpoint, RegisteredMemory};

/// Bytes of a cache line: what keeps two counters from disturbing each other.
pub(crate) const LINE: u64 = 64;

/// One cache line of words.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Line([AtomicU64; LINE as usize / 8]);

/// Zeroed cache lines, private to this rank, that device code reaches by address.
#[derive(Debug)]
pub(crate) struct Lines(Box<[Line]>);

impl Lines {
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| Line::default()).collect())
    }

    /// Address of line `index`. Everything up to the last line can be reached from it.
    pub(crate) fn addr(&self, index: usize) -> u64 {
        self.0.as_ptr().expose_provenance() as u64 + index as u64 * LINE
    }
}

/// Tables and counters of this rank alone, where its device code reaches them by address. They never
/// move; nothing but device code touches them once they are made.
#[derive(Debug)]
pub struct Image(Home);

#[derive(Debug)]
enum Home {
    Host(Lines),
    Device(Memory),
}

impl Image {
    /// Address of the byte at `offset`, as returned by [`ImageBuilder::put`].
    #[must_use]
    pub fn addr(&self, offset: u64) -> u64 {
        offset
            + match &self.0 {
                Home::Host(lines) => lines.addr(0),
                Home::Device(memory) => memory.addr(),
            }
    }
}

/// What an [`Image`] will hold.
#[derive(Debug, Default)]
pub struct ImageBuilder {
    bytes: Vec<u8>,
}

impl ImageBuilder {
    /// Adds a table, on a cache line of its own; returns its offset.
    pub fn put<T: Copy>(&mut self, entries: &[T]) -> u64 {
        let bytes = size_of_val(entries);
        let offset = self.zeros(bytes.div_ceil(LINE as usize));
        // SAFETY: the room was just made. Padding is copied as what it is, and never looked at.
        unsafe {
            let to = self.bytes.as_mut_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(entries.as_ptr().cast(), to, bytes);
        }
        offset
    }

    /// Adds `lines` zeroed cache lines; returns their offset.
    pub fn zeros(&mut self, lines: usize) -> u64 {
        let offset = self.bytes.len();
        self.bytes.resize(offset + lines * LINE as usize, 0);
        offset as u64
    }

    /// Puts it onto `device`; `what` says what for, in messages.
    ///
    /// # Errors
    /// [`ChannelError::Memory`].
    pub fn finish(self, device: &Device, what: &str) -> Result<Image, ChannelError> {
        match device {
            Device::Cpu => {
                let lines = Lines::new(self.bytes.len() / LINE as usize);
                // SAFETY: the lines are as long, and nobody else has them yet.
                unsafe {
                    let to = lines.addr(0) as *mut u8;
                    std::ptr::copy_nonoverlapping(self.bytes.as_ptr(), to, self.bytes.len());
                }
                Ok(Image(Home::Host(lines)))
            }
            device => {
                let memory = device
                    .allocate(self.bytes.len() as u64)
                    .and_then(|memory| memory.write(0, &self.bytes).map(|()| memory));
                let memory = memory.map_err(ChannelError::memory(what))?;
                Ok(Image(Home::Device(memory)))
            }
        }
    }
}

/// A place in one rank's part of a registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) memory: &'a RegisteredMemory,
    pub(crate) rank: u32,
    pub(crate) offset: u64,
}

impl Place<'_> {
    /// The address of `bytes` bytes here.
    fn range(&self, bytes: u64, what: &str) -> Result<u64, ChannelError> {
        let memory = self.memory.of(self.rank)?;
        match contains(memory.bytes(), self.offset, bytes) {
            true => Ok(memory.addr() + self.offset),
            false => Err(self.out_of_range(bytes, what)),
        }
    }

    fn out_of_range(&self, bytes: u64, what: &str) -> ChannelError {
        ChannelError::memory(what)(HalError::OutOfRange {
            offset: self.offset,
            bytes,
            size: self.memory.bytes(),
        })
    }
}

/// Whether a memory of `size` bytes has bytes `offset..offset + bytes`.
pub(crate) fn contains(size: u64, offset: u64, bytes: u64) -> bool {
    offset.checked_add(bytes).is_some_and(|end| end <= size)
}

/// Copies `bytes` bytes between mapped places.
pub(crate) fn copy(dst: Place<'_>, src: Place<'_>, bytes: u64) -> Result<(), ChannelError> {
    let what = "copying to a peer";
    let (to, from) = (dst.range(bytes, what)?, src.range(bytes, what)?);
    // SAFETY: both ranges lie in mapped memory, which the places borrow; they may overlap. Whether
    // the bytes mean anything is up to the protocol: nothing but bytes is read or written.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
    Ok(())
}

/// A stream of a CUDA device's copy engines, between mapped places.
#[derive(Debug)]
pub(crate) struct CopyStream {
    stream: Stream,
    /// What each counter says when all signals sent so far have arrived, by the key of the memory that it lies in, which no
    /// other ever has, and its place there. Nobody else sends any meanwhile.
    sent: BTreeMap<(u64, u64), u64>,
    /// Marks what is to be waited for.
    flushed: Event,
}

impl CopyStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::for_copies(context)?,
            sent: BTreeMap::new(),
            flushed: Event::new(context)?,
        })
    }

    /// Starts copying `bytes` bytes.
    pub(crate) fn put(
        &mut self,
        dst: Place<'_>,
        src: Place<'_>,
        bytes: u64,
    ) -> Result<(), ChannelError> {
        let what = "copying to a peer";
        let (to, from) = (dst.range(bytes, what)?, src.range(bytes, what)?);
        // SAFETY: both ranges lie in mapped memory, which the channel's owner keeps until the proxy
        // has ended, and that flushes. What the bytes mean is up to the protocol.
        unsafe { self.stream.copy(to, from, bytes) }
            .map_err(|e| ChannelError::memory(what)(e.into()))
    }

    /// Adds one to a mapped counter, after the copies before.
    pub(crate) fn signal(&mut self, counter: Place<'_>) -> Result<(), ChannelError> {
        let what = "signalling a peer";
        let at = counter.range(8, what)?;
        if !at.is_multiple_of(8) {
            return Err(counter.out_of_range(8, what));
        }
        let named = (counter.memory.key(counter.rank), counter.offset);
        let count = match self.sent.entry(named) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                // Those of a service that was there before.
                let mut word = [0; 8];
                // SAFETY: a whole word of mapped memory, which the place borrows.
                let read = unsafe { self.stream.context().read(at, &mut word) };
                read.map_err(|e| ChannelError::memory(what)(e.into()))?;
                new.insert(u64::from_ne_bytes(word))
            }
        };
        *count += 1;
        let (low, high) = (*count as u32, (*count >> 32) as u32);
        // SAFETY: a whole aligned word of mapped memory, as for `put`. When the low half wraps,
        // the high one is written first: for a moment the counter is too large by less than 2^32,
        // which no wait can be that far behind.
        let sent = unsafe {
            let carried = match low {
                0 => self.stream.fill_words(at + 4, high, 1),
                _ => Ok(()),
            };
            carried.and_then(|()| self.stream.fill_words(at, low, 1))
        };
        sent.map_err(|e| ChannelError::memory(what)(e.into()))
    }

    /// Marks what was started so far.
    pub(crate) fn start_flush(&mut self) -> Result<(), ChannelError> {
        self.flushed
            .record(&self.stream)
            .map_err(|e| ChannelError::memory("flushing copies")(e.into()))
    }

    /// Waits for what was marked.
    pub(crate) fn finish_flush(&mut self) -> Result<(), ChannelError> {
        self.flushed
            .synchronize(Instant::now() + COPY_LIMIT)
            .map_err(|e| ChannelError::memory("flushing copies")(e.into()))
    }
}

/// How long copies that wait for nothing may take before something is broken.
const COPY_LIMIT: Duration = Duration::from_secs(30);

/// Adds one to a mapped counter, after everything this thread wrote before, and wakes its owner.
pub(crate) fn signal(endpoint: &Endpoint, counter: Place<'_>) -> Result<(), ChannelError> {
    let what = "signalling a peer";
    let outbound = counter.range(8, what)?;
    if !outbound.is_multiple_of(8) {
        return Err(counter.out_of_range(8, what));
    }
    let semaphore = Semaphore {
        outbound,
        peer: counter.rank,
        ..Semaphore::default()
    };
    // SAFETY: `outbound` is a whole aligned word of mapped memory, which the place borrows.
    on_block(endpoint, &|block| unsafe { semaphore.signal(block) })
}

/// Wakes `rank` if it sleeps.
pub(crate) fn wake(endpoint: &Endpoint, rank: u32) -> Result<(), ChannelError> {
    on_block(endpoint, &|block| block.wake(rank))
}

/// Runs device code that never waits on the calling thread.
fn on_block(endpoint: &Endpoint, body: &dyn Fn(&HostBlock<'_>)) -> Result<(), ChannelError> {
    struct Unsupervised;
    impl Supervisor for Unsupervised {
        fn check(&self, _: &Waiting, _: u32) -> Result<(), Stopped> {
            Ok(())
        }
    }
    // A grid of one block is a few words: no stack, no allocation.
    let mut grid = Grid::new(1, Schedule::RoundRobin)
        .map_err(ChannelError::memory("running device code on the host"))?;
    // It neither waits nor fails, so nothing can interrupt it.
    let _ = grid.launch(&endpoint.context(&Unsupervised), &|block, _| {
        body(block);
        Ok(())
    });
    Ok(())
}

/// Words of mapped memory from `offset` on, which must be 8-byte aligned.
pub(crate) fn words(memory: &SharedMemory, offset: u64) -> Words<'_> {
    Words { memory, offset }
}

/// Words that one rank writes and others read, each by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a> {
    memory: &'a SharedMemory,
    offset: u64,
}

impl Words<'_> {
    /// The address of word `index`, if it is one.
    fn addr(&self, index: u64) -> Option<u64> {
        let offset = self.offset + index * 8;
        let whole = offset.is_multiple_of(8) && contains(self.memory.bytes(), offset, 8);
        whole.then(|| self.memory.addr() + offset)
    }

    /// Word `index`; 0 outside of the memory.
    pub(crate) fn load(&self, index: u64) -> u64 {
        // SAFETY: a whole aligned word of mapped memory, which is borrowed; all accesses are atomic.
        self.addr(index)
            .map_or(0, |addr| unsafe { Raw.load_acquire(addr) })
    }

    /// Sets word `index`; nothing outside of the memory.
    pub(crate) fn store(&self, index: u64, value: u64) {
        if let Some(addr) = self.addr(index) {
            // SAFETY: as for `load`.
            unsafe { Raw.store_release(addr, value) };
        }
    }
}

/// The memory of a fifo, private to this rank.
#[derive(Debug)]
pub(crate) struct FifoMemory {
    home: FifoHome,
    capacity: u32,
    id: u32,
}

/// Head, tail and ring, a cache line each at least.
#[derive(Debug)]
enum FifoHome {
    Host(Lines),
    /// Tail and ring in pinned host memory, which the proxy polls. The head is the device's own: it
    /// is counted up there, and counting across the bus is slow.
    Cuda {
        head: Memory,
        rest: PinnedMemory,
    },
}

const HEAD: usize = 0;
const TAIL: usize = 1;
const RING: usize = 2;

impl FifoMemory {
    /// A fifo of `capacity` slots, which must be a power of two, with its popping end.
    pub(crate) fn new(
        device: &Device,
        capacity: u32,
        id: u32,
    ) -> Result<(Arc<Self>, Popper), ChannelError> {
        let ring = (u64::from(capacity) * TRIGGER_BYTES).div_ceil(LINE);
        let lines = RING + ring as usize;
        let what = "making a fifo";
        let home = match device {
            Device::Cuda(context) => FifoHome::Cuda {
                rest: PinnedMemory::allocate(context, lines as u64 * LINE)
                    .map_err(|e| ChannelError::memory(what)(e.into()))?,
                head: device.allocate(LINE).map_err(ChannelError::memory(what))?,
            },
            _ => FifoHome::Host(Lines::new(lines)),
        };
        let fifo = Arc::new(Self { home, capacity, id });
        let popper = Popper {
            fifo: Arc::clone(&fifo),
            position: 0,
        };
        Ok((fifo, popper))
    }

    /// What kernels push with.
    pub(crate) fn handle(&self) -> Fifo {
        let (head, lines) = match &self.home {
            FifoHome::Host(lines) => (lines.addr(HEAD), lines.addr(0)),
            FifoHome::Cuda { head, rest } => (head.addr(), rest.device_address()),
        };
        self.at(head, lines)
    }

    /// What the proxy pops with; it does not use the head.
    fn proxy_handle(&self) -> Fifo {
        let lines = match &self.home {
            FifoHome::Host(lines) => lines.addr(0),
            FifoHome::Cuda { rest, .. } => rest.host_address(),
        };
        self.at(0, lines)
    }

    fn at(&self, head: u64, lines: u64) -> Fifo {
        Fifo {
            ring: lines + RING as u64 * LINE,
            head,
            tail: lines + TAIL as u64 * LINE,
            capacity: self.capacity,
            id: self.id,
        }
    }

    /// Triggers pushed so far; if the device does not say, as many as can have been.
    pub(crate) fn pushed(&self) -> u64 {
        match &self.home {
            // SAFETY: the lines are ours, and whole words.
            FifoHome::Host(lines) => unsafe { Raw.load_acquire(lines.addr(HEAD)) },
            FifoHome::Cuda { head, .. } => {
                let mut word = [0; 8];
                match head.read(0, &mut word) {
                    Ok(()) => u64::from_le_bytes(word),
                    Err(_) => self.handled().wrapping_add(self.capacity.into()),
                }
            }
        }
    }

    /// Triggers handled so far.
    fn handled(&self) -> u64 {
        // SAFETY: the memory is ours, and whole words.
        unsafe { Raw.load_acquire(self.proxy_handle().tail) }
    }

    /// Whether the first `count` triggers have been handled.
    pub(crate) fn has_handled(&self, count: u64) -> bool {
        reached(self.handled(), count)
    }
}

/// The popping end; there is one a fifo.
#[derive(Debug)]
pub(crate) struct Popper {
    fifo: Arc<FifoMemory>,
    position: u64,
}

impl Popper {
    /// The next trigger, if it is complete. The same one until it was [handled](Self::handled).
    pub(crate) fn poll(&mut self) -> Option<Trigger> {
        // SAFETY: the fifo's memory is held; there is one popper and it is borrowed exclusively.
        unsafe { self.fifo.proxy_handle().poll(&Raw, self.position) }
    }

    /// Frees the slot of the trigger last polled and tells who waits for it.
    pub(crate) fn handled(&mut self) {
        self.position = self.position.wrapping_add(1);
        // SAFETY: as in `poll`.
        unsafe {
            self.fifo
                .proxy_handle()
                .publish_handled(&Raw, self.position);
        }
    }
}
