//! Making, changing and ending communicators.

use std::sync::Arc;

use crossweft_net::UniqueId;

use super::{asking, calls, grouped, on, signed, success, unsigned};
use crate::comm::{Comm, Phase};
use crate::config::Config;
use crate::devices::Place;
use crate::pointer::{Address, In, Out, Versioned};
use crate::status::{Error, Status};
use crate::{derive, group, settings, table};

/// `ncclUniqueId`, which C passes by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Id([u8; 128]);

impl Id {
    fn parse(&self) -> Result<UniqueId, Error> {
        Ok(UniqueId::from_bytes(&self.0)?)
    }
}

fn ranks(count: i32, rank: i32) -> Result<(u32, u32), Error> {
    match (u32::try_from(count), u32::try_from(rank)) {
        (Ok(count), Ok(rank)) if rank < count => Ok((count, rank)),
        _ if count < 1 => Err(Error::argument(format!(
            "nranks is {count}; a communicator has 1 rank at least"
        ))),
        _ => Err(Error::argument(format!(
            "rank {rank} of {count} does not exist; ranks count from 0"
        ))),
    }
}

/// Joins by `id`, now or with the group; `place` gets the handle before that.
fn join(
    place: &Out<Address>,
    (count, rank): (i32, i32),
    id: &Id,
    config: Config,
) -> Result<Status, Error> {
    let (count, rank) = ranks(count, rank)?;
    let id = id.parse()?;
    let comm = Comm::new(config, Place::current()?)?;
    let own = Arc::clone(&comm);
    publish(place, "comm", &comm, || {
        group::manage(&comm, Some(Arc::clone(&comm)), move || {
            own.join(&id, rank, count)
        })
    })
}

/// Gives `made` a handle at `place` while `act` makes it; takes it away if that fails at once.
fn publish(
    place: &Out<Address>,
    name: &str,
    made: &Arc<Comm>,
    act: impl FnOnce() -> Result<Status, Error>,
) -> Result<Status, Error> {
    place.check(name)?;
    let handle = table::insert(made);
    place.set(name, handle)?;
    act().inspect_err(|_| {
        // It was there a moment ago.
        let _ = table::remove(handle);
        let _ = place.set(name, Address::of(0));
    })
}

/// For a communicator that is to be made: until it is, there is none at `place`.
fn making(
    place: &Out<Address>,
    name: &str,
    act: impl FnOnce() -> Result<Status, Error>,
) -> Result<Status, Error> {
    grouped(|| {
        place.set(name, Address::of(0))?;
        act()
    })
}

/// Changes a communicator now, or in its turn when the group ends.
fn or_with_group(
    comm: &Arc<Comm>,
    change: fn(&Comm) -> Result<(), Error>,
) -> Result<Status, Error> {
    if !group::is_open() {
        comm.idle()?;
        return change(comm).map(success);
    }
    let own = Arc::clone(comm);
    group::manage(comm, None, move || change(&own))
}

fn default_config() -> Versioned {
    Versioned::null()
}

calls! {
    /// Needs no GPU: a launcher may ask for it that sees none, or that has still to make its ranks by forking.
    fn ncclGetUniqueId(id: Out<Id>) {
        id.check("uniqueId")?;
        settings::processor()?;
        id.set("uniqueId", Id(derive::unique_id()?.to_bytes())).map(success)
    }

    fn ncclCommInitRank(comm: Out<Address>, count: i32, id: Id, rank: i32) {
        making(&comm, "comm", || join(&comm, (count, rank), &id, Config::read(&default_config(), None)?))
    }

    fn ncclCommInitRankConfig(comm: Out<Address>, count: i32, id: Id, rank: i32, config: Versioned) {
        making(&comm, "comm", || join(&comm, (count, rank), &id, Config::read(&config, None)?))
    }

    /// One unique id is enough to find each other; NCCL takes several so that more processes share that work.
    fn ncclCommInitRankScalable(
        comm: Out<Address>,
        count: i32,
        rank: i32,
        id_count: i32,
        ids: In<Id>,
        config: Versioned,
    ) {
        making(&comm, "newcomm", || {
            if id_count < 1 || id_count > count {
                return Err(Error::argument(format!(
                    "nId is {id_count}; there must be 1 to {count} unique ids"
                )));
            }
            let ids = ids.read("commIds", 1)?;
            let first = ids.first().ok_or_else(|| Error::argument("commIds is empty"))?;
            join(&comm, (count, rank), first, Config::read(&config, None)?)
        })
    }

    /// Ranks of one process, all made by this thread.
    fn ncclCommInitAll(comms: Out<Address>, count: i32, devices: In<i32>) {
        grouped(|| {
            comms.check("comm")?;
            let n = unsigned("ndev", count)?;
            if n == 0 {
                return Err(Error::argument("ndev is 0"));
            }
            let devices: Vec<i32> = match devices.is_null() {
                true => (0..count).collect(),
                false => devices.read("devlist", n as usize)?,
            };
            if let Some(device) = devices.iter().find(|&&device| device < 0) {
                return Err(Error::argument(format!("devlist names device {device}")));
            }
            (0..n as usize).try_for_each(|rank| comms.at(rank).set("comm", Address::of(0)))?;
            let config = Config::read(&default_config(), None)?;
            let made: Vec<_> = devices
                .iter()
                .map(|&device| Comm::new(config.clone(), Place::numbered(device)?))
                .collect::<Result<_, _>>()?;
            // Until all have joined, or cannot.
            let rendezvous = Arc::new(derive::rendezvous()?);
            group::start();
            let mut handles = Vec::new();
            let begun = (0..n).zip(&made).try_for_each(|(rank, comm)| {
                let handle = table::insert(comm);
                handles.push(handle);
                comms.at(rank as usize).set("comm", handle)?;
                let (own, rendezvous) = (Arc::clone(comm), Arc::clone(&rendezvous));
                let join = move || own.join(&rendezvous.unique_id(), rank, n);
                group::manage(comm, Some(Arc::clone(comm)), join).map(drop)
            });
            if let Err(error) = &begun {
                group::fail(error);
            }
            let ended = group::end();
            begun.and(ended).inspect_err(|_| {
                for (rank, handle) in handles.into_iter().enumerate() {
                    // Both were there a moment ago.
                    let _ = table::remove(handle).map(|comm| comm.abort());
                    let _ = comms.at(rank).set("comm", Address::of(0));
                }
            })
        })
    }

    fn ncclCommCount(comm: Address, count: Out<i32>) {
        on(comm, |comm| count.set("count", signed(comm.world_size()?))).map(success)
    }

    fn ncclCommCuDevice(comm: Address, device: Out<i32>) {
        on(comm, |comm| device.set("device", comm.device()?)).map(success)
    }

    fn ncclCommUserRank(comm: Address, rank: Out<i32>) {
        on(comm, |comm| rank.set("rank", signed(comm.rank()?))).map(success)
    }

    /// Waits until what was called has ended; then the communicator leaves the others.
    fn ncclCommFinalize(comm: Address) {
        if comm == Address::of(0) {
            return Ok(Status::Success);
        }
        grouped(|| on(comm, |comm| {
            if comm.phase() == Phase::Finalized {
                // The code that NCCL has for it.
                return Err(Error::argument("the communicator was finalised before: only ncclCommDestroy can follow"));
            }
            comm.is_of_this_process()?;
            comm.usable()?;
            let own = Arc::clone(comm);
            group::manage(comm, None, move || own.finalize())
        }))
    }

    /// Of NULL, as NCCL has it, there is nothing to destroy. In a group the communicator ends with that, but its handle
    /// now.
    fn ncclCommDestroy(comm: Address) {
        if comm != Address::of(0) {
            group::leave(table::remove(comm)?);
        }
        Ok(Status::Success)
    }

    fn ncclCommAbort(comm: Address) {
        if comm != Address::of(0) {
            table::remove(comm)?.abort();
        }
        Ok(Status::Success)
    }

    fn ncclCommRevoke(comm: Address, flags: i32) {
        on(comm, |comm| {
            if flags != 0 {
                return Err(Error::argument(format!(
                    "revokeFlags is {flags}; it must be NCCL_REVOKE_DEFAULT"
                )));
            }
            match comm.phase() {
                Phase::Finalized => Err(Error::argument("the communicator was finalised: there is nothing to revoke")),
                _ => comm.revoke(),
            }
        })
        .map(success)
    }

    fn ncclCommSplit(comm: Address, color: i32, key: i32, new: Out<Address>, config: Versioned) {
        making(&new, "newcomm", || on(comm, |parent| {
            let child = asking(parent, || {
                parent.derivable()?;
                if color < 0 && color != derive::NO_COLOR {
                    return Err(Error::argument(format!(
                        "color is {color}; it must be NCCL_SPLIT_NOCOLOR or not negative"
                    )));
                }
                Comm::new(Config::read(&config, Some(parent.config()))?, parent.place().inherited())
            })?;
            let (own, made) = (Arc::clone(parent), Arc::clone(&child));
            let act = move || own.deriving(&made, || derive::split(&own, &made, (color, key)));
            if color == derive::NO_COLOR {
                return group::manage(parent, None, act);
            }
            publish(&new, "newcomm", &child, || group::manage(parent, Some(Arc::clone(&child)), act))
        }))
    }

    fn ncclCommShrink(
        comm: Address,
        excluded: In<i32>,
        excluded_count: i32,
        new: Out<Address>,
        config: Versioned,
        flags: i32,
    ) {
        making(&new, "newcomm", || on(comm, |parent| {
            let (child, gone) = asking(parent, || {
                let count = unsigned("excludeRanksCount", excluded_count)? as usize;
                if count == 0 {
                    return Err(Error::argument("excludeRanksCount is 0: there is nothing to shrink"));
                }
                if !matches!(flags, 0 | 1) {
                    return Err(Error::argument(format!(
                        "shrinkFlags is {flags}; it must be NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT"
                    )));
                }
                let (rank, world_size) = match flags {
                    // It may be one that has failed, or is still in a call that will not end.
                    1 => (parent.rank()?, parent.world_size()?),
                    _ => {
                        let communicator = parent.derivable()?;
                        (communicator.rank(), communicator.world_size())
                    }
                };
                let mut gone = Vec::new();
                for other in excluded.read("excludeRanksList", count)? {
                    match u32::try_from(other) {
                        Ok(other) if other == rank => {
                            return Err(Error::argument(format!(
                                "excludeRanksList has rank {rank}, which calls this; only ranks that stay do"
                            )));
                        }
                        Ok(other) if other < world_size => gone.push(other),
                        _ => {
                            return Err(Error::argument(format!(
                                "excludeRanksList has {other}, in a communicator of {world_size} ranks"
                            )));
                        }
                    }
                }
                gone.sort_unstable();
                gone.dedup();
                let child = Comm::new(Config::read(&config, Some(parent.config()))?, parent.place().inherited())?;
                Ok((child, gone))
            })?;
            if flags == 1 {
                parent.stop("ncclCommShrink was called with NCCL_SHRINK_ABORT");
            }
            let (own, made) = (Arc::clone(parent), Arc::clone(&child));
            publish(&new, "newcomm", &child, || {
                group::manage(parent, Some(Arc::clone(&child)), move || own.deriving(&made, || derive::shrink(&own, &made, &gone)))
            })
        }))
    }

    /// For new ranks, which join by `ncclCommGrow`.
    fn ncclCommGetUniqueId(comm: Address, id: Out<Id>) {
        on(comm, |comm| {
            id.check("uniqueId")?;
            comm.usable()?;
            id.set("uniqueId", Id(derive::unique_id()?.to_bytes()))
        })
        .map(success)
    }

    fn ncclCommGrow(
        comm: Address,
        count: i32,
        id: In<Id>,
        rank: i32,
        new: Out<Address>,
        config: Versioned,
    ) {
        making(&new, "newcomm", || {
            let id = match id.is_null() {
                true => None,
                false => id.read("uniqueId", 1)?.first().copied(),
            };
            if comm == Address::of(0) {
                let id = id.ok_or_else(|| Error::argument("uniqueId is NULL, but new ranks need one"))?;
                return join(&new, (count, rank), &id, Config::read(&config, None)?);
            }
            on(comm, |parent| {
                let (child, id, count) = asking(parent, || {
                    let communicator = parent.usable()?;
                    let count = unsigned("nRanks", count)?;
                    if rank != -1 {
                        return Err(Error::argument(format!(
                            "rank is {rank}; ranks of the communicator keep theirs, and pass -1"
                        )));
                    }
                    if count <= communicator.world_size() {
                        return Err(Error::argument(format!(
                            "nRanks is {count}, but the communicator has {} already",
                            communicator.world_size()
                        )));
                    }
                    let id = id.map(|id| id.parse()).transpose()?;
                    let child = Comm::new(Config::read(&config, Some(parent.config()))?, parent.place().inherited())?;
                    Ok((child, id, count))
                })?;
                let (own, made) = (Arc::clone(parent), Arc::clone(&child));
                publish(&new, "newcomm", &child, || {
                    group::manage(parent, Some(Arc::clone(&child)), move || {
                        own.deriving(&made, || derive::grow(&own, &made, id, count))
                    })
                })
            })
        })
    }

    /// Gives the communicator's scratch memory back. To be called on every rank, as NCCL's.
    fn ncclCommSuspend(comm: Address, flags: i32) {
        grouped(|| on(comm, |comm| {
            if flags != 1 {
                return Err(Error::argument(format!("flags is {flags}; it must be NCCL_SUSPEND_MEM")));
            }
            or_with_group(comm, Comm::suspend)
        }))
    }

    fn ncclCommResume(comm: Address) {
        grouped(|| on(comm, |comm| or_with_group(comm, Comm::resume)))
    }

    fn ncclCommMemStats(comm: Address, stat: i32, value: Out<u64>) {
        on(comm, |comm| value.set("value", comm.memory(stat)?)).map(success)
    }
}
