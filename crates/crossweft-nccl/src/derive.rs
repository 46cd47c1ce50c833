//! Making communicators: by unique ids, and of other communicators.
//!
//! Ranks of a communicator find each other again by its name and by how many were derived from it so far, not over
//! its connections: those are gone when a rank was lost or the communicator was revoked.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crossweft_net::launch::join_by_name;
use crossweft_net::{Failure, Group, PeerState, Rendezvous, UniqueId};

use crate::comm::Comm;
use crate::settings;
use crate::status::Error;

/// `NCCL_SPLIT_NOCOLOR`.
pub(crate) const NO_COLOR: i32 = -1;

/// How long a communicator that others are derived of may have failed, or lost a rank in good order, before nobody is waited
/// for any more: a rank may leave as soon as it has all that it needs of what is derived, and may derive what it has revoked.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often that is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// `ncclGetUniqueId`: where the ranks of one communicator will find each other. Listens in this process until all
/// have, or until the time is over, which begins with the first that comes.
pub(crate) fn unique_id() -> Result<UniqueId, Error> {
    let rendezvous = rendezvous()?;
    let id = rendezvous.unique_id();
    rendezvous.detach();
    Ok(id)
}

/// The same for ranks that are about to come: nobody finds anybody once it is dropped.
pub(crate) fn rendezvous() -> Result<Rendezvous, Error> {
    Ok(Rendezvous::start(&Comm::rendezvous_options(
        settings::timeout()?,
    ))?)
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

/// Why one of the ranks of `parent` but `excluded` will not come, if so: at once if it died, when it has left for `patience`, and
/// otherwise after a while.
fn missing(
    parent: &Comm,
    excluded: &[u32],
    patience: Duration,
    since: &mut Option<Instant>,
) -> Option<String> {
    let communicator = parent.communicator().ok()?;
    let liveness = communicator.endpoint().group().liveness();
    let first = |state: PeerState| {
        (0..communicator.world_size())
            .filter(|rank| *rank != communicator.rank() && !excluded.contains(rank))
            .find(|&rank| liveness.peer(rank) == state)
    };
    let failure = liveness.failure().filter(|failure| match failure {
        Failure::Aborted { by: rank, .. } | Failure::PeerDied { rank, .. } => {
            !excluded.contains(rank)
        }
        _ => true,
    });
    if let Some(rank) = first(PeerState::Dead) {
        return Some(failure.map_or_else(|| format!("rank {rank} died"), |why| why.to_string()));
    }
    // What this rank has stopped itself, it goes on from.
    let failed = failure.filter(|_| !parent.is_stopped());
    let failed = failed.map(|why| why.to_string());
    let (why, patience) = match (first(PeerState::Left), failed) {
        (Some(rank), failed) => {
            let left = || format!("rank {rank} has left the communicator that another is made of");
            (failed.unwrap_or_else(left), patience)
        }
        (None, Some(failed)) => (failed, PATIENCE),
        (None, None) => {
            *since = None;
            return None;
        }
    };
    let since = since.get_or_insert_with(Instant::now);
    (since.elapsed() >= patience).then_some(why)
}

/// Does a part of making `child` with all ranks of `parent` but `excluded`; ends that if one of them will not come, has left for
/// `patience`, or has refused to.
fn with_all<T>(
    parent: &Comm,
    child: &Comm,
    excluded: &[u32],
    patience: Duration,
    make: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    let reason = OnceLock::new();
    let (made, ends) = channel();
    let result = std::thread::scope(|scope| {
        let watch = std::thread::Builder::new().name("crossweft-nccl".to_owned());
        let reason = &reason;
        // Without it, the wait ends at the deadline.
        let _ = watch.spawn_scoped(scope, move || {
            let (mut since, mut refused) = (None, None);
            let refusal =
                |seen: &mut _| parent.notes()?.look(seen, |rank| !excluded.contains(&rank));
            while ends.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                let why = missing(parent, excluded, patience, &mut since);
                if let Some(why) = why.or_else(|| refusal(&mut refused)) {
                    child.interrupt(&why);
                    // Nobody else sets it.
                    let _ = reason.set(why);
                    return;
                }
            }
        });
        let result = make();
        drop::<Sender<()>>(made);
        result
    });
    // What was done before it was ended counts: the others have seen it done.
    result.map_err(|error| reason.into_inner().map_or(error, Error::late))
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
    let join = || {
        let group = join_by_name(
            &name,
            (index(rank), index(world_size)),
            &child.join_options(),
            &Comm::rendezvous_options(child.timeout()),
        );
        Ok(group?)
    };
    // Whatever follows needs this rank: nobody has it all and has left.
    let group = with_all(parent, child, excluded, Duration::ZERO, join)?;
    parent.derived().add(excluded);
    Ok(group)
}

/// `ncclCommShrink`: `child` becomes the communicator of all ranks of `parent` but `excluded`.
pub(crate) fn shrink(parent: &Comm, child: &Comm, excluded: &[u32]) -> Result<(), Error> {
    let group = regroup(parent, child, excluded)?;
    with_all(parent, child, excluded, PATIENCE, || child.complete(group))
}

/// `ncclCommSplit`: `child` becomes the communicator of the ranks of the same `color`, ordered by `key` and
/// rank; it stays nothing if that is no color.
pub(crate) fn split(parent: &Comm, child: &Comm, (color, key): (i32, i32)) -> Result<(), Error> {
    let group = regroup(parent, child, &[])?;
    let deadline = Instant::now() + child.timeout();
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
    let rendezvous = leads.then(rendezvous).transpose()?;
    let id = rendezvous.as_ref().map(Rendezvous::unique_id);
    let id = id.map_or(Vec::new(), |id| id.to_bytes().to_vec());
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
    let id = UniqueId::from_bytes(id)?;
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    // Those of other colors may leave by now.
    let others: Vec<u32> = (0..group.world_size())
        .filter(|rank| !members.iter().any(|(_, member)| member == rank))
        .collect();
    with_all(parent, child, &others, PATIENCE, || {
        child.join(&id, count(rank), count(members.len()))
    })?;
    // Others may still be connecting to each other.
    rendezvous.into_iter().for_each(Rendezvous::detach);
    Ok(())
}

/// `ncclCommGrow` on a rank of `parent`, one of which has the `id` that new ranks were given: `child` becomes the
/// communicator of `world_size` ranks.
pub(crate) fn grow(
    parent: &Comm,
    child: &Comm,
    id: Option<UniqueId>,
    world_size: u32,
) -> Result<(), Error> {
    let rank = parent.rank()?;
    let own = id.map(|id| id.to_bytes().to_vec()).unwrap_or_default();
    let group = regroup(parent, child, &[])?;
    let ids = group.all_gather(&own, Instant::now() + child.timeout())?;
    group.leave();
    let mut given = ids
        .iter()
        .filter_map(|id| <&[u8; 128]>::try_from(id.as_slice()).ok());
    let (Some(id), None) = (given.next(), given.next()) else {
        return Err(Error::usage(
            "exactly one rank of the communicator must pass the unique id to ncclCommGrow: the one that has \
             called ncclCommGetUniqueId",
        ));
    };
    let id = UniqueId::from_bytes(id)?;
    with_all(parent, child, &[], PATIENCE, || {
        child.join(&id, rank, world_size)
    })
}
