use crossweft_hal::HalError;
use crossweft_net::NetError;

use crate::guard::StopCause;

/// What can go wrong with channels.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The bootstrap failed: a peer died, was late, or aborted.
    #[error("while {what}: {source}")]
    Bootstrap {
        /// What was being done.
        what: String,
        /// How it failed.
        source: NetError,
    },
    /// Memory could not be made or mapped.
    #[error("while {what}: {source}")]
    Memory {
        /// What was being done.
        what: String,
        /// How it failed.
        source: HalError,
    },
    /// Ranks disagree about what they are doing together.
    #[error(
        "ranks disagree while {what}: rank {rank} says {theirs}, rank {own_rank} says {ours}; every \
         rank must make the same calls with the same arguments"
    )]
    Mismatch {
        /// What was being done.
        what: String,
        /// The other rank.
        rank: u32,
        /// What it says.
        theirs: String,
        /// The rank it disagrees with: this one, unless it is no part of the quarrel.
        own_rank: u32,
        /// What that one says.
        ours: String,
    },
    /// Another rank failed in something that all do together.
    #[error("while {what}: rank {rank} failed: {reason}")]
    PeerFailed {
        /// What was being done.
        what: String,
        /// That rank.
        rank: u32,
        /// What it says.
        reason: String,
    },
    /// A channel with a rank that does not exist.
    #[error(
        "rank {rank} lists a channel with rank {peer}, which does not exist in a world of {world_size}"
    )]
    NoSuchRank {
        /// The rank that lists it.
        rank: u32,
        /// The rank it lists.
        peer: u32,
        /// Number of ranks.
        world_size: u32,
    },
    /// A peer's memory cannot be mapped because it runs on another host.
    #[error(
        "rank {rank} runs on another host than rank {own_rank}: its memory cannot be mapped here; use \
         a port channel, or start all ranks on one host"
    )]
    NotOnThisHost {
        /// The peer.
        rank: u32,
        /// This rank.
        own_rank: u32,
    },
    /// A wait ended without its condition.
    #[error("rank {rank} waited for {what}: {cause}")]
    Stopped {
        /// This rank.
        rank: u32,
        /// What for.
        what: String,
        /// Why it ended.
        cause: StopCause,
    },
}

impl ChannelError {
    /// For `map_err` on bootstrap calls.
    pub(crate) fn bootstrap(what: &str) -> impl Fn(NetError) -> Self {
        move |source| Self::Bootstrap {
            what: what.to_owned(),
            source,
        }
    }

    /// For `map_err` on hal calls.
    pub(crate) fn memory(what: &str) -> impl Fn(HalError) -> Self {
        move |source| Self::Memory {
            what: what.to_owned(),
            source,
        }
    }
}
