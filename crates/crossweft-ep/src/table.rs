//! What handles stand for.
//!
//! A C caller holds nothing but handles, so what they stand for is kept here, in the one place of the crate that all
//! threads share. Handles are numbers that are never used twice, so that one which was destroyed, or never made, is found
//! out; they look like no address of any process, so that nobody can read through them. Descriptors of
//! `ncclEpTensorAlloc` are real memory, which callers write to; they are remembered by address.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::group::Group;
use crate::pass::Pass;
use crate::pointer::Address;
use crate::status::Error;

/// Not canonical on any machine there is.
const FIRST: u64 = 0x4357_4550_0000_0000;

static TABLE: Mutex<Table> = Mutex::new(Table {
    next: FIRST,
    groups: BTreeMap::new(),
    passes: BTreeMap::new(),
    tensors: BTreeSet::new(),
});

#[derive(Debug)]
struct Table {
    next: u64,
    groups: BTreeMap<Address, Arc<Group>>,
    passes: BTreeMap<Address, Arc<Mutex<Pass>>>,
    tensors: BTreeSet<Address>,
}

fn table() -> MutexGuard<'static, Table> {
    // Each change is one insertion or removal.
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn number(&mut self) -> Address {
        self.next += 1;
        Address(self.next)
    }
}

fn unknown(what: &str, handle: Address) -> Error {
    Error::argument(match handle {
        Address::NULL => format!("{what} is NULL"),
        _ => format!("{what} is none: it was destroyed before, or never made"),
    })
}

pub(crate) fn insert_group(group: Arc<Group>) -> Address {
    let mut table = table();
    let handle = table.number();
    table.groups.insert(handle, group);
    handle
}

pub(crate) fn group(handle: Address) -> Result<Arc<Group>, Error> {
    let group = table().groups.get(&handle).cloned();
    group.ok_or_else(|| unknown("ep_group", handle))
}

/// Takes a group's handle away, unless it has handles of passes.
pub(crate) fn remove_group(handle: Address) -> Result<Arc<Group>, Error> {
    let mut table = table();
    let group = table.groups.get(&handle);
    let group = group.ok_or_else(|| unknown("ep_group", handle))?;
    group.is_of_this_process()?;
    // One for the table; each pass has one.
    if Arc::strong_count(group) > 1 {
        return Err(Error::usage(
            "the group is in use: destroy its handles first, and let calls end",
        ));
    }
    table
        .groups
        .remove(&handle)
        .ok_or_else(|| unknown("ep_group", handle))
}

pub(crate) fn insert_pass(pass: Pass) -> Address {
    let mut table = table();
    let handle = table.number();
    table.passes.insert(handle, Arc::new(Mutex::new(pass)));
    handle
}

/// Does something with a pass, alone.
pub(crate) fn with_pass<T>(
    handle: Address,
    act: impl FnOnce(&mut Pass) -> Result<T, Error>,
) -> Result<T, Error> {
    let pass = table().passes.get(&handle).cloned();
    let pass = pass.ok_or_else(|| unknown("handle", handle))?;
    let mut pass = match pass.try_lock() {
        Ok(pass) => pass,
        // A call panicked; what it left is as after a failed one.
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => {
            return Err(Error::usage("another thread is in a call of this handle"));
        }
    };
    act(&mut pass)
}

/// Takes a pass's handle away.
pub(crate) fn remove_pass(handle: Address) -> Result<Arc<Mutex<Pass>>, Error> {
    let pass = table().passes.remove(&handle);
    pass.ok_or_else(|| unknown("handle", handle))
}

pub(crate) fn insert_tensor(tensor: Address) {
    table().tensors.insert(tensor);
}

/// Forgets a tensor; whether there was one, and it can be freed.
pub(crate) fn remove_tensor(tensor: Address) -> Result<(), Error> {
    match table().tensors.remove(&tensor) {
        true => Ok(()),
        false => Err(Error::argument(
            "tensor is not from ncclEpTensorAlloc, or was destroyed before",
        )),
    }
}
