//! Symmetric memory that torch's allocator takes its memory from: `torch.cuda.memory.CUDAPluggableAllocator` calls the
//! functions that are exported here.
//!
//! Those are told a size, a device and a stream, but not whose memory is meant, so each pool has functions of its own,
//! by number: a slot of [`SLOTS`], which is theirs for as long as torch has memory of the pool.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::{Difference, Ledger};
use crossweft_collective::{CollectiveError, Communicator, Heap, SymmetricBuffer};
use crossweft_hal::{Device, cuda};

/// How long work may take that uses what torch gives back.
const LAST_USE: Duration = Duration::from_secs(30);
/// Pools that a process may have at the same time.
pub(crate) const MOST: usize = 8;

static SLOTS: [Mutex<Option<Arc<Pool>>>; MOST] = [const { Mutex::new(None) }; MOST];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A communicator's pool.
#[derive(Debug)]
pub(crate) struct Pool {
    slot: usize,
    buffer: SymmetricBuffer,
    address: u64,
    context: Arc<cuda::Context>,
    heap: Mutex<Heap>,
    ledger: Ledger,
    /// Whether the communicator is gone.
    is_abandoned: AtomicBool,
}

/// Where the tensors of a call lie: offsets in the pool, or none of both if not both lie there.
pub(crate) type Places = Option<(u64, u64)>;

impl Pool {
    /// Memory of `bytes` bytes on every rank, in a slot that is free. Collective; blocks.
    pub(crate) fn new(
        communicator: &Communicator,
        context: &Arc<cuda::Context>,
        bytes: u64,
    ) -> Result<Arc<Self>, CollectiveError> {
        let endpoint = communicator.endpoint();
        let deadline = Instant::now() + communicator.timeout();
        let buffer = communicator.allocate(bytes)?;
        let ledger = Ledger::new(endpoint, deadline)?;
        let free = SLOTS.iter().enumerate().map(|(at, slot)| (at, lock(slot)));
        let free = free.into_iter().find(|(_, slot)| slot.is_none());
        let made = free.map(|(slot, mut place)| {
            let pool = Arc::new(Self {
                slot,
                address: buffer.registered().local().addr(),
                heap: Mutex::new(Heap::new(buffer.registered().bytes())),
                buffer,
                context: Arc::clone(context),
                ledger,
                is_abandoned: AtomicBool::new(false),
            });
            *place = Some(Arc::clone(&pool));
            pool
        });
        let made = made.ok_or_else(|| CollectiveError::Usage {
            rank: communicator.rank(),
            reason: format!(
                "this process has {MOST} pools of memory already: drop communicators, and all tensors of their pools"
            ),
        });
        let own = made.as_ref().ok().map(Arc::clone);
        let what = "making a pool of symmetric memory";
        let settled = endpoint.settle(made, what, deadline, CollectiveError::from);
        // Where another rank has none, this one has none either.
        if let (Err(_), Some(own)) = (&settled, own) {
            own.leave_slot();
        }
        settled
    }

    /// The memory.
    pub(crate) fn buffer(&self) -> &SymmetricBuffer {
        &self.buffer
    }

    /// Address and size of this rank's part.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.address, self.buffer.registered().bytes())
    }

    /// Bytes that torch has.
    pub(crate) fn used(&self) -> u64 {
        lock(&self.heap).used()
    }

    /// The names of the functions that torch is to call.
    pub(crate) fn functions(&self) -> (String, String) {
        let of = |what| format!("crossweft_pool_{what}_{}", self.slot);
        (of("allocate"), of("release"))
    }

    /// Where `bytes` bytes at an address lie in it.
    pub(crate) fn offset(&self, address: u64, bytes: u64) -> Option<u64> {
        let (begin, size) = self.range();
        let offset = address.checked_sub(begin)?;
        let end = offset.checked_add(bytes)?;
        (end <= size).then_some(offset)
    }

    /// Notes where the tensors of this rank's next call lie, which must be the same on every rank.
    pub(crate) fn note(&self, places: Places) -> Option<Difference> {
        self.ledger.note(places.unwrap_or(ELSEWHERE))
    }

    /// What another rank has noted, in words.
    pub(crate) fn describe(places: (u64, u64)) -> String {
        match places {
            ELSEWHERE => "not both in the pool".to_owned(),
            (input, output) if input == output => format!("at {input} of the pool"),
            (input, output) => format!("at {input} and {output} of the pool"),
        }
    }

    /// The communicator is gone. What torch has stays, and ends with the last of it.
    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
        if self.used() == 0 {
            self.leave_slot();
        }
    }

    /// Makes room for another pool, if that has not been done.
    fn leave_slot(&self) {
        let mut place = lock(&SLOTS[self.slot]);
        place.take_if(|pool| std::ptr::eq(&raw const **pool, self));
    }

    fn allocate(&self, bytes: u64) -> Option<u64> {
        Some(self.address + lock(&self.heap).allocate(bytes)?)
    }

    /// Takes back what torch had at `address`, once what was put on `stream` is done with it, as `cudaFree` would.
    fn release(&self, address: u64, stream: u64) {
        let Some(offset) = address.checked_sub(self.address) else {
            return;
        };
        // SAFETY: torch's stream of this device, which lives during the call.
        let stream = unsafe { cuda::Stream::from_raw(&self.context, stream) };
        let idle = match stream.is_capturing() {
            Ok(false) => stream.synchronize(Instant::now() + LAST_USE).is_ok(),
            _ => false,
        };
        // What may still be used is nobody's any more.
        if idle {
            lock(&self.heap).release(offset);
        }
    }
}

/// Tensors that do not both lie in the pool.
const ELSEWHERE: (u64, u64) = (u64::MAX, u64::MAX);

/// The device that a pool can be on.
pub(crate) fn context(device: &Device) -> Option<&Arc<cuda::Context>> {
    match device {
        Device::Cuda(context) => Some(context),
        _ => None,
    }
}

fn allocate(slot: usize, bytes: isize) -> *mut c_void {
    let pool = lock(&SLOTS[slot]).clone();
    let bytes = u64::try_from(bytes).ok();
    let address = pool
        .zip(bytes)
        .and_then(|(pool, bytes)| pool.allocate(bytes));
    // Null is what torch takes for "out of memory".
    std::ptr::with_exposed_provenance_mut(address.unwrap_or(0) as usize)
}

fn release(slot: usize, memory: *mut c_void, stream: *mut c_void) {
    let Some(pool) = lock(&SLOTS[slot]).clone() else {
        return;
    };
    pool.release(
        memory.expose_provenance() as u64,
        stream.expose_provenance() as u64,
    );
    if pool.is_abandoned.load(Ordering::Acquire) && pool.used() == 0 {
        pool.leave_slot();
    }
}

macro_rules! functions {
    ($($slot:literal, $allocate:ident, $release:ident;)*) => {
        $(
            /// What torch allocates with.
            // SAFETY: nothing else has this name.
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $allocate(bytes: isize, _: c_int, _: *mut c_void) -> *mut c_void {
                allocate($slot, bytes)
            }

            /// What torch gives back with.
            // SAFETY: nothing else has this name.
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $release(memory: *mut c_void, _: isize, _: c_int, stream: *mut c_void) {
                release($slot, memory, stream);
            }
        )*
        const _: () = assert!([$($slot),*].len() == MOST);
    };
}

functions! {
    0, crossweft_pool_allocate_0, crossweft_pool_release_0;
    1, crossweft_pool_allocate_1, crossweft_pool_release_1;
    2, crossweft_pool_allocate_2, crossweft_pool_release_2;
    3, crossweft_pool_allocate_3, crossweft_pool_release_3;
    4, crossweft_pool_allocate_4, crossweft_pool_release_4;
    5, crossweft_pool_allocate_5, crossweft_pool_release_5;
    6, crossweft_pool_allocate_6, crossweft_pool_release_6;
    7, crossweft_pool_allocate_7, crossweft_pool_release_7;
}
