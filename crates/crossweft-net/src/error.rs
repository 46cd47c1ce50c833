//! Everything that can go wrong, in words that name ranks and say what to do next.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::liveness::Failure;
use crate::message::MAX_WORLD_SIZE;
use crate::root::RefuseReason;

/// Why a call of this crate failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// A rank gave up and said why, with [`Group::abort`](crate::Group::abort).
    #[error("rank {by} aborted the job during {during}: {reason}; see the log of rank {by}")]
    Aborted {
        /// The rank that gave up.
        by: u32,
        /// What it said.
        reason: String,
        /// What this rank was doing.
        during: String,
    },

    /// This rank already left the group.
    #[error("this rank has left the group, so {during} is not possible; join a new group")]
    Closed {
        /// What was asked for.
        during: String,
    },

    /// The key of an offered file descriptor is in use.
    #[error("a file descriptor is already offered under key {key}; withdraw it first")]
    FdKeyInUse {
        /// The key.
        key: u64,
    },

    /// The id file cannot be used.
    #[error("id file {}: {reason}", path.display())]
    IdFile {
        /// The value of `CROSSWEFT_ID_FILE`.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },

    /// Text that is no bind address.
    #[error(
        "cannot listen on {bind:?}: {reason}; give `loopback`, an interface name or an IP address"
    )]
    InvalidBind {
        /// What was given.
        bind: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A rank outside its world, or a world of a size that cannot be.
    #[error("{}", out_of_world(*rank, *world_size))]
    InvalidRank {
        /// The rank.
        rank: u32,
        /// The world size.
        world_size: u32,
    },

    /// Bytes or text that are no unique id.
    #[error("not a crossweft unique id: {reason}; copy it whole from where it was created")]
    InvalidUniqueId {
        /// What is wrong with it.
        reason: String,
    },

    /// A system call failed.
    #[error("{what} failed: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },

    /// The launcher's environment is incomplete or contradicts itself.
    #[error("environment variable {variable}: {reason}")]
    Launch {
        /// The variable.
        variable: String,
        /// What is wrong and what to do.
        reason: String,
    },

    /// Ranks called different collective operations.
    #[error(
        "collective operation {sequence} differs: rank {rank} called {operation} but rank {other_rank} called {other_operation}; every rank must make the same calls in the same order"
    )]
    Mismatch {
        /// Which operation of the group, counted from 0.
        sequence: u64,
        /// A rank.
        rank: u32,
        /// What it called.
        operation: Operation,
        /// Another rank.
        other_rank: u32,
        /// What that one called.
        other_operation: Operation,
    },

    /// The launcher does not say how to find the other ranks.
    #[error(
        "{launcher} does not tell the ranks a secret and they are not known to share one host; set CROSSWEFT_UNIQUE_ID, or CROSSWEFT_ID_FILE to a path that all ranks share"
    )]
    NoUniqueId {
        /// Who started the ranks.
        launcher: String,
    },

    /// The rendezvous ended without a single rank.
    #[error("no rank joined within {after:.1?}; {turned_away}")]
    NobodyJoined {
        /// How long the rendezvous waited.
        after: Duration,
        /// Who came and did not get in.
        turned_away: Box<TurnedAway>,
    },

    /// A file descriptor was asked of a rank on another host.
    #[error("rank {rank} is on another host, so it cannot hand over a file descriptor")]
    NotSameHost {
        /// That rank.
        rank: u32,
    },

    /// A payload is too long for the bootstrap.
    #[error(
        "a payload of {length} bytes is too long for the bootstrap (limit {limit}); send it over a channel"
    )]
    PayloadTooLarge {
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },

    /// A rank vanished without saying goodbye.
    #[error("rank {rank} died during {during}: {reason}; see the log of rank {rank}")]
    PeerDied {
        /// The rank.
        rank: u32,
        /// How that was noticed.
        reason: String,
        /// What this rank was doing.
        during: String,
    },

    /// A rank said goodbye before an operation that needs it.
    #[error(
        "rank {rank} has left the group{}, so {during} cannot complete; every rank must take part",
        because(why.as_deref())
    )]
    PeerLeft {
        /// The rank.
        rank: u32,
        /// What it had failed at before it left.
        why: Option<String>,
        /// What this rank was doing.
        during: String,
    },

    /// Another end spoke, but not this protocol.
    #[error(
        "{address} does not speak the crossweft protocol as expected: {reason}; is it another version?"
    )]
    Protocol {
        /// Who.
        address: String,
        /// What it sent.
        reason: String,
    },

    /// Some ranks never came.
    #[error(
        "{} of {world_size} ranks did not join within {after:.1?}: {} ({joined} joined); \
         {turned_away}",
        missing.len(), RankList(missing)
    )]
    RanksMissing {
        /// Those that never came.
        missing: Vec<u32>,
        /// How many came.
        joined: u32,
        /// How many there should be.
        world_size: u32,
        /// How long was waited.
        after: Duration,
        /// Who came and did not get in.
        turned_away: Box<TurnedAway>,
    },

    /// The rendezvous refused this rank.
    #[error("the rendezvous refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: u32,
        /// Why.
        reason: RefuseReason,
    },

    /// The rendezvous went away, or was never there.
    #[error(
        "lost the rendezvous at {address}: {reason}; is the process that created the unique id still running, and did it still wait for ranks?"
    )]
    RootLost {
        /// Where it was expected.
        address: SocketAddr,
        /// What happened.
        reason: String,
    },

    /// A deadline passed.
    #[error(
        "{what} did not complete in time; missing: {}{}",
        RankList(missing),
        Silent(silent)
    )]
    Timeout {
        /// What was being done.
        what: String,
        /// The ranks that had not taken part, as far as this rank knows.
        missing: Vec<u32>,
        /// Those that had not been heard for a while either; the others may be waiting for them.
        silent: Box<[u32]>,
    },

    /// Too many operations were begun and not finished.
    #[error(
        "{pending} collective operations have timed out without completing; abort or rejoin instead of retrying"
    )]
    TooManyPending {
        /// How many.
        pending: usize,
    },

    /// A rank cannot be reached where it listens.
    #[error(
        "rank {rank} listens on {address}, which is out of reach from another host; give every rank a bind address or interface of the network between the hosts"
    )]
    Unreachable {
        /// That rank.
        rank: u32,
        /// Where it listens.
        address: IpAddr,
    },

    /// The other end does not know the secret.
    #[error(
        "{address} did not prove the secret of this unique id; is it left over from another job?"
    )]
    WrongSecret {
        /// Who.
        address: String,
    },
}

impl NetError {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }

    /// For whoever does not know which of the missing are silent.
    pub(crate) fn timeout(what: impl Into<String>, missing: Vec<u32>) -> Self {
        Self::Timeout {
            what: what.into(),
            missing,
            silent: Box::default(),
        }
    }

    /// The error of whoever was doing `during` when `failure` became known.
    pub(crate) fn from_failure(failure: &Failure, during: impl Into<String>) -> Self {
        let during = during.into();
        match failure {
            Failure::Aborted { by, reason } => Self::Aborted {
                by: *by,
                reason: reason.clone(),
                during,
            },
            Failure::PeerDied { rank, reason } => Self::PeerDied {
                rank: *rank,
                reason: reason.clone(),
                during,
            },
        }
    }
}

/// Who came to a rendezvous and did not get in: often the ranks that are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TurnedAway {
    /// Ranks that proved the secret and were refused, the latest refusal of each.
    pub refused: Vec<(u32, RefuseReason)>,
    /// Connections that did not prove the secret.
    pub strangers: u64,
}

/// What is wrong, as far as one can tell from who was turned away, and what to do.
impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rank, reason) in &self.refused {
            write!(f, "rank {rank} was refused: {reason}; ")?;
        }
        match (self.strangers, self.refused.is_empty()) {
            (0, true) => f.write_str("were they started, and with the same unique id?"),
            (0, false) => f.write_str("see the logs of the ranks that were refused"),
            (1, _) => f.write_str(
                "1 connection did not prove the secret: was a rank given another unique id?",
            ),
            (n, _) => write!(
                f,
                "{n} connections did not prove the secret: were ranks given another unique id?"
            ),
        }
    }
}

/// What is wrong with a rank, or with the size of its world.
pub(crate) fn out_of_world(rank: u32, world_size: u32) -> String {
    match world_size {
        0 => "a world of 0 ranks has no room for any; its size must be 1 at least".to_owned(),
        1..=MAX_WORLD_SIZE => format!(
            "rank {rank} does not exist in a world of {world_size}; ranks count from 0 to {}",
            world_size - 1
        ),
        _ => format!("a world of {world_size} ranks is too large; it may have {MAX_WORLD_SIZE}"),
    }
}

fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(" ({why})"))
}

/// A collective operation of the bootstrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Operation {
    /// [`Group::all_gather`](crate::Group::all_gather)
    AllGather,
    /// [`Group::barrier`](crate::Group::barrier)
    Barrier,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllGather => "all_gather",
            Self::Barrier => "barrier",
        })
    }
}

/// Which of the missing are silent.
struct Silent<'a>(&'a [u32]);

impl fmt::Display for Silent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            silent => write!(f, " (not heard for long: {})", RankList(silent)),
        }
    }
}

/// Prints ranks as `[0, 3, 5]`, and no more of them than a person reads.
#[derive(Debug, Clone, Copy)]
pub struct RankList<'a>(pub &'a [u32]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        f.write_str("ranks [")?;
        for (index, rank) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{rank}", if index == 0 { "" } else { ", " })?;
        }
        if self.0.len() > SHOWN {
            write!(f, ", and {} more", self.0.len() - SHOWN)?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_that_a_rank_or_its_world_breaks_is_named() {
        let said = |rank, world_size| NetError::InvalidRank { rank, world_size }.to_string();
        assert!(
            said(3, 3).ends_with("rank 3 does not exist in a world of 3; ranks count from 0 to 2")
        );
        assert!(said(0, 0).contains("must be 1 at least"), "{}", said(0, 0));
        let large = said(0, 1 << 31);
        assert!(large.contains("it may have 65536"), "{large}");
        assert!(!large.contains("count from"), "{large}");
    }
}
