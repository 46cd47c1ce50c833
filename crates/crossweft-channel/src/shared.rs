//! The one module that touches shared memory: private lines, bounded copies, signals, the popping
//! end of a fifo. What it hands out is safe to use: ranges are checked here.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crossweft_device::fifo::{Fifo, TRIGGER_BYTES, Trigger};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::wait::reached;
use crossweft_device::{Block, Memory, Raw, Stopped, Waiting};
use crossweft_hal::HalError;
use crossweft_hal::cpu::{Grid, HostBlock, Schedule, SharedMemory, Supervisor};

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
    /// Head, tail, and the ring.
    lines: Lines,
    capacity: u32,
    id: u32,
}

const HEAD: usize = 0;
const TAIL: usize = 1;
const RING: usize = 2;

impl FifoMemory {
    /// A fifo of `capacity` slots, which must be a power of two, with its popping end.
    pub(crate) fn new(capacity: u32, id: u32) -> (Arc<Self>, Popper) {
        let ring = (u64::from(capacity) * TRIGGER_BYTES).div_ceil(LINE);
        let fifo = Arc::new(Self {
            lines: Lines::new(RING + ring as usize),
            capacity,
            id,
        });
        let popper = Popper {
            fifo: Arc::clone(&fifo),
            position: 0,
        };
        (fifo, popper)
    }

    pub(crate) fn handle(&self) -> Fifo {
        Fifo {
            ring: self.lines.addr(RING),
            head: self.lines.addr(HEAD),
            tail: self.lines.addr(TAIL),
            capacity: self.capacity,
            id: self.id,
        }
    }

    /// Triggers pushed so far.
    pub(crate) fn pushed(&self) -> u64 {
        // SAFETY: the lines are ours, and whole words.
        unsafe { Raw.load_acquire(self.lines.addr(HEAD)) }
    }

    /// Whether the first `count` triggers have been handled.
    pub(crate) fn has_handled(&self, count: u64) -> bool {
        // SAFETY: as above.
        reached(unsafe { Raw.load_acquire(self.lines.addr(TAIL)) }, count)
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
        unsafe { self.fifo.handle().poll(&Raw, self.position) }
    }

    /// Frees the slot of the trigger last polled and tells who waits for it.
    pub(crate) fn handled(&mut self) {
        self.position = self.position.wrapping_add(1);
        // SAFETY: as in `poll`.
        unsafe { self.fifo.handle().publish_handled(&Raw, self.position) };
    }
}

/// A table that device code reads by address.
#[derive(Debug)]
pub(crate) struct Table<T>(Box<[T]>);

impl<T: Copy> Table<T> {
    pub(crate) fn new(entries: Vec<T>) -> Self {
        Self(entries.into_boxed_slice())
    }

    pub(crate) fn addr(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}
