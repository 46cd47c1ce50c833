//! What handles stand for.
//!
//! A C caller holds nothing but handles, so what they stand for is kept here, in the one place of the crate
//! that all threads share. Handles are numbers that are never used twice, so that one which was destroyed, or
//! never made, is found out; they look like no address of any process, so that nobody can read through them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crossweft_hal::Memory;
use crossweft_hal::cuda::{self, Context, CudaError};

use crate::comm::Comm;
use crate::pointer::Address;
use crate::status::Error;
use crate::window::Window;

/// Not canonical on any machine there is.
const FIRST: u64 = 0x4357_0000_0000_0001;

/// How many windows there are, for calls to see that there are none.
static WINDOWS: AtomicUsize = AtomicUsize::new(0);

static TABLE: Mutex<Table> = Mutex::new(Table {
    next: FIRST,
    comms: BTreeMap::new(),
    allocations: BTreeMap::new(),
    windows: BTreeMap::new(),
    contexts: BTreeMap::new(),
});

#[derive(Debug)]
struct Table {
    next: u64,
    comms: BTreeMap<u64, Arc<Comm>>,
    /// Memory of `ncclMemAlloc`, by address.
    allocations: BTreeMap<u64, Arc<Memory>>,
    /// Windows, each with its communicator.
    windows: BTreeMap<u64, (Weak<Comm>, Arc<Window>)>,
    /// Contexts that something uses, by the numbers of their devices.
    contexts: BTreeMap<u32, Weak<Context>>,
}

fn table() -> MutexGuard<'static, Table> {
    // Each change is one insertion or removal.
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new handle.
pub(crate) fn number() -> u64 {
    let mut table = table();
    table.next += 1;
    table.next
}

/// A handle for `comm`.
pub(crate) fn insert(comm: &Arc<Comm>) -> Address {
    let number = number();
    table().comms.insert(number, Arc::clone(comm));
    Address::of(number)
}

fn unknown(handle: Address) -> Error {
    match handle.number() {
        0 => Error::argument("comm is NULL"),
        _ => Error::argument(
            "comm is not a communicator: it was destroyed or aborted before, or never made",
        ),
    }
}

/// The communicator behind a handle.
pub(crate) fn comm(handle: Address) -> Result<Arc<Comm>, Error> {
    let comm = table().comms.get(&handle.number()).cloned();
    comm.ok_or_else(|| unknown(handle))
}

/// Takes a communicator's handle away.
pub(crate) fn remove(handle: Address) -> Result<Arc<Comm>, Error> {
    let mut table = table();
    let comm = table.comms.get(&handle.number()).cloned();
    let comm = comm.ok_or_else(|| unknown(handle))?;
    comm.is_of_this_process()?;
    table.comms.remove(&handle.number());
    table.windows.retain(|_, (of, _)| !is(of, &comm));
    count_windows(&table);
    Ok(comm)
}

/// Calls on all communicators that there are which another library has done.
pub(crate) fn delegated() -> u64 {
    table().comms.values().map(|comm| comm.delegated()).sum()
}

fn is(of: &Weak<Comm>, comm: &Arc<Comm>) -> bool {
    std::ptr::eq(of.as_ptr(), Arc::as_ptr(comm))
}

fn count_windows(table: &Table) {
    // Whoever calls with buffers in a window knows that it was registered.
    WINDOWS.store(table.windows.len(), Ordering::Release);
}

/// A handle for a window of `comm`.
pub(crate) fn insert_window(comm: &Arc<Comm>, window: &Arc<Window>) -> Address {
    let entry = (Arc::downgrade(comm), Arc::clone(window));
    let mut table = table();
    table.windows.insert(window.number(), entry);
    count_windows(&table);
    Address::of(window.number())
}

fn no_window() -> Error {
    Error::argument("win is not a window of this communicator, or was deregistered before")
}

/// A window of any communicator.
pub(crate) fn window(handle: Address) -> Result<Arc<Window>, Error> {
    let table = table();
    let window = table.windows.get(&handle.number());
    window
        .map(|(_, window)| Arc::clone(window))
        .ok_or_else(no_window)
}

/// A window of `comm`.
pub(crate) fn window_of(comm: &Arc<Comm>, handle: Address) -> Result<Arc<Window>, Error> {
    let table = table();
    match table.windows.get(&handle.number()) {
        Some((of, window)) if is(of, comm) => Ok(Arc::clone(window)),
        _ => Err(no_window()),
    }
}

/// The window of `comm` that a range lies in and collectives may use, and where it lies there.
pub(crate) fn place_of(comm: &Arc<Comm>, range: &Range<u64>) -> Option<(Arc<Window>, u64)> {
    if WINDOWS.load(Ordering::Acquire) == 0 {
        return None;
    }
    let table = table();
    let mut own = table.windows.values().filter(|(of, _)| is(of, comm));
    own.find_map(|(_, window)| Some((Arc::clone(window), window.place_of(range)?)))
}

/// Takes a window's handle away.
pub(crate) fn remove_window(comm: &Arc<Comm>, handle: Address) {
    let mut table = table();
    if table
        .windows
        .get(&handle.number())
        .is_some_and(|(of, _)| is(of, comm))
    {
        table.windows.remove(&handle.number());
        count_windows(&table);
    }
}

/// Keeps memory of `ncclMemAlloc`; returns its address.
pub(crate) fn keep(memory: Memory) -> Address {
    let address = memory.addr();
    table().allocations.insert(address, Arc::new(memory));
    Address::of(address)
}

/// Gives memory of `ncclMemAlloc` back; windows on it keep theirs.
pub(crate) fn free(address: Address) -> Result<(), Error> {
    let memory = table().allocations.remove(&address.number());
    memory.map(drop).ok_or_else(|| {
        Error::argument("ptr is not from ncclMemAlloc, or was given to ncclMemFree before")
    })
}

/// The context of a device that whatever uses that device has in common; made by `retain` if nothing does so far.
pub(crate) fn context(
    device: &cuda::Device,
    retain: impl FnOnce() -> Result<Arc<Context>, CudaError>,
) -> Result<Arc<Context>, CudaError> {
    let found = |table: &Table| table.contexts.get(&device.ordinal())?.upgrade();
    if let Some(context) = found(&table()) {
        return Ok(context);
    }
    // Takes a while. Of two that come at once, the first one's stays.
    let made = retain()?;
    let mut table = table();
    Ok(found(&table).unwrap_or_else(|| {
        table
            .contexts
            .insert(device.ordinal(), Arc::downgrade(&made));
        made
    }))
}

/// The memory of `ncclMemAlloc` that a range lies in, and where in it.
pub(crate) fn allocation(address: u64, bytes: u64) -> Option<(Arc<Memory>, u64)> {
    let table = table();
    let (&base, memory) = table.allocations.range(..=address).next_back()?;
    let offset = address - base;
    let end = offset.checked_add(bytes)?;
    (end <= memory.bytes()).then(|| (Arc::clone(memory), offset))
}
