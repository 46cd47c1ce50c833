//! Switch channels: a kernel reduces from, and broadcasts to, the memory of a whole group. Emulated
//! over mapped peer memory; nothing here knows of multicast.

use std::sync::Arc;
use std::time::Instant;

use crossweft_device::channel;
use crossweft_device::semaphore::Semaphore;

use crate::shared::{Image, ImageBuilder};
use crate::{ChannelError, Endpoint, RegisteredMemory, SemaphorePool};

/// A channel to a group of ranks of this host. Its device handle is valid for as long as this.
#[derive(Debug)]
pub struct SwitchChannel {
    handle: channel::SwitchChannel,
    /// What the handle points into.
    _keep: (Image, SemaphorePool, Arc<RegisteredMemory>),
}

impl SwitchChannel {
    /// A channel over `memory` of `members`, which are sorted and include this rank. Collective over
    /// all ranks: they split into groups, and one that needs no channel names itself alone.
    ///
    /// # Errors
    /// [`ChannelError::InvalidOption`] or [`ChannelError::Mismatch`], on every rank, if the lists of
    /// members are no such groups; [`ChannelError::NotOnThisHost`]; otherwise as
    /// [`SemaphorePool::new`].
    pub fn new(
        endpoint: &Arc<Endpoint>,
        memory: &Arc<RegisteredMemory>,
        members: &[u32],
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let what = "creating a switch channel";
        let groups = endpoint.exchange(&members.to_vec(), what, deadline)?;
        check(&groups, what)?;
        let rank = endpoint.rank();
        let others: Vec<u32> = members.iter().copied().filter(|&m| m != rank).collect();
        let pool = SemaphorePool::new(endpoint, &others, deadline)?;

        let bases = members.iter().map(|&member| memory.addr(member));
        let mut image = ImageBuilder::default();
        let bases = image.put(&bases.collect::<Result<Vec<_>, _>>()?);
        let mut channels = 0..others.len();
        let semaphore = |&member: &u32| match member == rank {
            true => Semaphore::default(),
            false => channels
                .next()
                .map_or_else(Semaphore::default, |k| pool.handle(k)),
        };
        let semaphores = image.put(&members.iter().map(semaphore).collect::<Vec<_>>());
        let image = image.finish(endpoint.device(), what)?;
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX); // at most the world size
        let index = members.iter().take_while(|&&m| m < rank).count();
        Ok(Self {
            handle: channel::SwitchChannel {
                members: image.addr(bases),
                semaphores: image.addr(semaphores),
                count: small(members.len()),
                index: small(index),
            },
            _keep: (image, pool, Arc::clone(memory)),
        })
    }

    /// What kernels use.
    #[must_use]
    pub fn handle(&self) -> channel::SwitchChannel {
        self.handle
    }
}

/// Whether every rank names a sorted group of which it is a member, and all members the same.
fn check(groups: &[Vec<u32>], what: &str) -> Result<(), ChannelError> {
    for (rank, group) in (0..).zip(groups) {
        let fits = group.is_sorted_by(|a, b| a < b)
            && group.contains(&rank)
            && group.iter().all(|&member| (member as usize) < groups.len());
        if !fits {
            return Err(ChannelError::InvalidOption {
                option: "the list of members",
                value: format!("{group:?}"),
                rank,
                must_be: "sorted ranks that exist, this one among them",
            });
        }
    }
    for (own_rank, group) in (0..).zip(groups) {
        for &rank in group {
            let theirs = &groups[rank as usize];
            if theirs != group {
                return Err(ChannelError::Mismatch {
                    what: what.to_owned(),
                    rank,
                    theirs: format!("the members are {theirs:?}"),
                    own_rank,
                    ours: format!("the members are {group:?}"),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_must_fit_together() {
        assert!(check(&[vec![0, 2], vec![1], vec![0, 2]], "t").is_ok());
        for bad in [
            [vec![0, 2], vec![1], vec![2]],
            [vec![2, 0], vec![1], vec![0, 2]],
            [vec![0, 1, 2], vec![0, 1], vec![0, 2]],
            [vec![0], vec![1], vec![2, 3]],
            [vec![0], vec![], vec![2]],
        ] {
            assert!(check(&bad, "t").is_err(), "{bad:?}");
        }
    }
}
