//! Semaphores between this rank and its peers, made all at once.

use std::sync::Arc;
use std::time::Instant;

use crossweft_device::semaphore::Semaphore;
use crossweft_hal::HalError;

use crate::shared::{LINE, contains};
use crate::{ChannelError, Endpoint, RegisteredMemory};

/// One semaphore for each of this rank's channels, in the order in which they were listed.
///
/// The `k`-th channel that rank `a` lists with rank `b` is paired with the `k`-th that `b` lists with
/// `a`, whatever stands between them, so no order of listing can deadlock or cross two pairs.
/// Device handles are valid for as long as the pool.
#[derive(Debug)]
pub struct SemaphorePool {
    memory: Arc<RegisteredMemory>,
    /// Where the counters that peers add to begin, a cache line each, in channel order.
    inbound: u64,
    /// Where the numbers of waits done begin, a cache line each, which are this rank's alone.
    expected: u64,
    channels: Vec<Pairing>,
}

/// The other end of a channel.
#[derive(Clone, Copy, Debug)]
struct Pairing {
    peer: u32,
    /// The channel's index in the peer's list.
    index: u64,
}

impl SemaphorePool {
    /// Makes the semaphores of all channels of all ranks. Collective; `channels` names the peer of
    /// each of this rank's channels.
    ///
    /// # Errors
    /// [`ChannelError::Mismatch`] on every rank if two ranks list a different number of channels with
    /// each other, [`ChannelError::NoSuchRank`] on every rank if one lists a rank that does not
    /// exist; otherwise a failure of the bootstrap or of memory.
    pub fn new(
        endpoint: &Arc<Endpoint>,
        channels: &[u32],
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let what = "creating semaphores";
        let lists = endpoint.exchange(&channels.to_vec(), what, deadline)?;
        check(&lists, endpoint.rank(), what)?;
        let memory = endpoint.allocate_registered(Self::bytes(&lists), what, deadline)?;
        Self::within(&memory, 0, &lists, endpoint.rank())
    }

    /// Bytes of registered memory that the semaphores of all ranks' channels take on each of them.
    #[must_use]
    pub fn bytes(lists: &[Vec<u32>]) -> u64 {
        // Registered memory has one size on all ranks.
        2 * LINE * lists.iter().map(Vec::len).max().unwrap_or(0) as u64
    }

    /// The semaphores of this rank, in [`bytes`](Self::bytes) zeroed bytes of `memory` from `offset` on, a multiple of 64:
    /// for what has more in one memory. Local; `lists` has the peers of every rank's channels, the same on every rank.
    ///
    /// # Errors
    /// [`ChannelError::Mismatch`] and [`ChannelError::NoSuchRank`] as for [`new`](Self::new); [`ChannelError::Memory`] if
    /// `memory` is too small.
    pub fn within(
        memory: &Arc<RegisteredMemory>,
        offset: u64,
        lists: &[Vec<u32>],
        rank: u32,
    ) -> Result<Self, ChannelError> {
        let what = "creating semaphores";
        check(lists, rank, what)?;
        let (bytes, size) = (Self::bytes(lists), memory.bytes());
        if !contains(size, offset, bytes) || !offset.is_multiple_of(LINE) {
            return Err(ChannelError::memory(what)(HalError::OutOfRange {
                offset,
                bytes,
                size,
            }));
        }
        Ok(Self {
            memory: Arc::clone(memory),
            inbound: offset,
            expected: offset + bytes / 2,
            channels: pair(lists, rank),
        })
    }

    /// Number of channels of this rank.
    #[must_use]
    pub fn len(&self) -> usize {
        self.channels.len()
    }

    /// Whether this rank has no channels.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.channels.is_empty()
    }

    /// The device handle of this rank's channel `index`. Its `outbound` is 0 if the peer's memory
    /// cannot be mapped here; only a proxy can then signal the peer.
    ///
    /// # Panics
    /// If there is no such channel, as with a slice.
    #[must_use]
    pub fn handle(&self, index: usize) -> Semaphore {
        let Pairing { peer, index: there } = self.channels[index];
        let (own, line) = (self.memory.local().addr(), index as u64 * LINE);
        let inbound_there = self.inbound + there * LINE;
        Semaphore {
            inbound: own + self.inbound + line,
            outbound: self
                .memory
                .addr(peer)
                .map_or(0, |base| base + inbound_there),
            expected: own + self.expected + line,
            peer,
            channel: u32::try_from(index).unwrap_or(u32::MAX),
        }
    }

    /// The peer of channel `index`, and the place of the counter that it waits on.
    pub(crate) fn outbound(&self, index: usize) -> (u32, &Arc<RegisteredMemory>, u64) {
        let Pairing { peer, index: there } = self.channels[index];
        (peer, &self.memory, self.inbound + there * LINE)
    }
}

/// Whether the lists of all ranks fit together; the same on every rank, but for the pair that is
/// named: one with `own_rank`, where there is one.
fn check(lists: &[Vec<u32>], own_rank: u32, what: &str) -> Result<(), ChannelError> {
    let world_size = u32::try_from(lists.len()).unwrap_or(u32::MAX);
    for (rank, list) in (0..).zip(lists) {
        if let Some(&peer) = list.iter().find(|&&peer| peer >= world_size) {
            return Err(ChannelError::NoSuchRank {
                rank,
                peer,
                world_size,
            });
        }
    }
    let count = |from: u32, to: u32| {
        let list = &lists[from as usize];
        list.iter().filter(|&&peer| peer == to).count()
    };
    let own_first = std::iter::once(own_rank).chain((0..world_size).filter(|&r| r != own_rank));
    for a in own_first {
        for b in 0..world_size {
            let (ours, theirs) = (count(a, b), count(b, a));
            if ours != theirs {
                return Err(ChannelError::Mismatch {
                    what: what.to_owned(),
                    rank: b,
                    theirs: format!("{theirs} channels with rank {a}"),
                    own_rank: a,
                    ours: format!("{ours} channels with rank {b}"),
                });
            }
        }
    }
    Ok(())
}

/// The other ends of `own_rank`'s channels, from lists that fit together.
fn pair(lists: &[Vec<u32>], own_rank: u32) -> Vec<Pairing> {
    // For each peer, where it lists a channel with this rank, in its order.
    let mut ends: Vec<_> = lists
        .iter()
        .map(|list| {
            (0..)
                .zip(list)
                .filter(|&(_, &peer)| peer == own_rank)
                .map(|(index, _)| index)
        })
        .collect();
    lists[own_rank as usize]
        .iter()
        .filter_map(|&peer| {
            let index = ends[peer as usize].next()?;
            Some(Pairing { peer, index })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kth_pairs_with_the_kth_in_any_order() {
        let lists = [vec![1, 2, 1], vec![2, 0, 0], vec![0, 1]];
        check(&lists, 0, "t").unwrap();
        let ends = |rank: u32| -> Vec<_> {
            let pairs = pair(&lists, rank);
            pairs.iter().map(|p| (p.peer, p.index)).collect()
        };
        assert_eq!(ends(0), [(1, 1), (2, 0), (1, 2)]);
        assert_eq!(ends(1), [(2, 1), (0, 0), (0, 2)]);
        assert_eq!(ends(2), [(0, 1), (1, 0)]);
    }

    #[test]
    fn a_missing_end_is_named_by_all() {
        let lists = [vec![1, 1], vec![0], vec![]];
        for (rank, words) in [
            (0, "rank 1 says 1 channels with rank 0, rank 0 says 2"),
            (1, "rank 0 says 2 channels with rank 1, rank 1 says 1"),
            (2, "rank 1 says 1 channels with rank 0, rank 0 says 2"),
        ] {
            let error = check(&lists, rank, "t").unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let error = check(&[vec![7]], 0, "t").unwrap_err().to_string();
        assert!(error.contains("rank 7"), "{error}");
    }
}
