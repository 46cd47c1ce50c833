//! Making communicators: by unique ids, and of other communicators.
//!
//! Ranks of a communicator find each other again by its name and by how many were derived from it so far, not over
//! its connections: those are gone when a rank was lost or the communicator was revoked.

use std::collections::BTreeMap;

use crossweft_net::launch::join_by_name;
use crossweft_net::{Group, Rendezvous, UniqueId};

use crate::comm::Comm;
use crate::settings;
use crate::status::Error;

/// `NCCL_SPLIT_NOCOLOR`.
pub(crate) const NO_COLOR: i32 = -1;

/// `ncclGetUniqueId`: where the ranks of one communicator will find each other. Listens in this process until all
/// have, or until the time is over.
pub(crate) fn unique_id() -> Result<UniqueId, Error> {
    let rendezvous = Rendezvous::start(&Comm::rendezvous_options(settings::timeout()?))?;
    let id = rendezvous.unique_id();
    rendezvous.detach();
    Ok(id)
}

/// Whom a communicator was derived for, and how often so far: the same on all ranks that take part. Attempts in which
/// they did not all meet do not count, for not all ranks need have made them.
#[derive(Debug, Default)]
pub(crate) struct Derived(BTreeMap<Vec<u32>, u64>);

impl Derived {
    /// How often all but `excluded` have met.
    fn count(&self, excluded: &[u32]) -> u64 {
        self.0.get(excluded).copied().unwrap_or(0)
    }

    /// They have met once more.
    fn add(&mut self, excluded: &[u32]) {
        *self.0.entry(excluded.to_vec()).or_default() += 1;
    }
}

/// A new group of the ranks of `parent` but `excluded`, in their order.
fn regroup(parent: &Comm, child: &Comm, excluded: &[u32]) -> Result<Group, Error> {
    let communicator = parent.communicator()?;
    let count = parent.derived().count(excluded);
    let tag: u128 = u128::from_be_bytes(communicator.endpoint().group().tag());
    let name = format!("nccl {tag:032x} without {excluded:?} number {count}");
    let gone = |rank: u32| excluded.iter().filter(|&&other| other < rank).count();
    let index = |rank: u32| rank - u32::try_from(gone(rank)).unwrap_or(rank);
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let group = join_by_name(
        &name,
        (index(rank), index(world_size)),
        &child.join_options(),
        &Comm::rendezvous_options(child.timeout()),
    )?;
    parent.derived().add(excluded);
    Ok(group)
}

/// `ncclCommShrink`: `child` becomes the communicator of all ranks of `parent` but `excluded`.
pub(crate) fn shrink(parent: &Comm, child: &Comm, excluded: &[u32]) -> Result<(), Error> {
    child.complete(regroup(parent, child, excluded)?)
}

/// `ncclCommSplit`: `child` becomes the communicator of the ranks of the same `color`, ordered by `key` and
/// rank; it stays nothing if that is no color.
pub(crate) fn split(parent: &Comm, child: &Comm, (color, key): (i32, i32)) -> Result<(), Error> {
    let group = regroup(parent, child, &[])?;
    let deadline = std::time::Instant::now() + child.timeout();
    let mut said = color.to_le_bytes().to_vec();
    said.extend(key.to_le_bytes());
    let said = group.all_gather(&said, deadline)?;
    let own = group.rank();
    let mut members: Vec<(i32, u32)> = (0..)
        .zip(&said)
        .filter_map(|(rank, said)| {
            let (color_bytes, key_bytes) = said.split_first_chunk::<4>()?;
            let key = i32::from_le_bytes(key_bytes.try_into().ok()?);
            (i32::from_le_bytes(*color_bytes) == color).then_some((key, rank))
        })
        .collect();
    members.sort_unstable();
    // The first of each color is where the others find each other.
    let leads = color != NO_COLOR && members.first().is_some_and(|&(_, rank)| rank == own);
    let id = match leads {
        true => unique_id()?.to_bytes().to_vec(),
        false => Vec::new(),
    };
    let ids = group.all_gather(&id, deadline)?;
    group.leave();
    if color == NO_COLOR {
        return Ok(());
    }
    let rank = members.iter().position(|&(_, rank)| rank == own);
    let lead = members.first().map(|&(_, rank)| &ids[rank as usize]);
    let id = lead.and_then(|id| <&[u8; 128]>::try_from(id.as_slice()).ok());
    let (Some(rank), Some(id)) = (rank, id) else {
        return Err(Error::internal("this rank is not among those of its color"));
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    child.join(
        &UniqueId::from_bytes(id)?,
        count(rank),
        count(members.len()),
    )
}

/// `ncclCommGrow` on a rank of `parent`, one of which has the `id` that new ranks were given: `child` becomes the
/// communicator of `world_size` ranks.
pub(crate) fn grow(
    parent: &Comm,
    child: &Comm,
    id: Option<UniqueId>,
    world_size: u32,
) -> Result<(), Error> {
    let communicator = parent.communicator()?;
    let own = id.map(|id| id.to_bytes().to_vec()).unwrap_or_default();
    let ids = communicator.all_gather_bytes(&own)?;
    let mut given = ids
        .iter()
        .filter_map(|id| <&[u8; 128]>::try_from(id.as_slice()).ok());
    let (Some(id), None) = (given.next(), given.next()) else {
        return Err(Error::usage(
            "exactly one rank of the communicator must pass the unique id to ncclCommGrow: the one that has \
             called ncclCommGetUniqueId",
        ));
    };
    child.join(&UniqueId::from_bytes(id)?, communicator.rank(), world_size)
}
