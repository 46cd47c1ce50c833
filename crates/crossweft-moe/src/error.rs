use std::fmt;

use crossweft_channel::{ChannelError, StopCause};
use crossweft_hal::HalError;
use crossweft_net::RankList;

/// What can go wrong with dispatch and combine. After [`Mismatch`](Self::Mismatch) and
/// [`Interrupted`](Self::Interrupted) the group cannot be used again on this rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// Ranks disagree on a group, or its memory could not be made.
    #[error(transparent)]
    Channel {
        /// What failed.
        #[from]
        source: ChannelError,
    },
    /// The device refused something.
    #[error("preparing a mixture of experts: {source}")]
    Hal {
        /// What failed.
        #[from]
        source: HalError,
    },
    /// Arguments that cannot be, or a call out of order. Nothing was sent, and nothing has changed.
    #[error("mixture of experts on rank {rank}: {reason}")]
    Usage {
        /// This rank.
        rank: u32,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// More was received than the output has room for. Nothing has changed: complete the dispatch again with more
    /// room.
    #[error(
        "dispatch on rank {rank}: {rows} rows were received, the output has room for {room}; complete it \
         again with more"
    )]
    Capacity {
        /// This rank.
        rank: u32,
        /// Rows that there must be room for.
        rows: u64,
        /// Rows that there is room for.
        room: u64,
    },
    /// Another rank makes another call.
    #[error(
        "ranks make different calls: rank {peer} is in {theirs}, rank {rank} in {ours}; every rank must make \
         the same calls in the same order, with the same parameters"
    )]
    Mismatch {
        /// This rank.
        rank: u32,
        /// The other one.
        peer: u32,
        /// Its call, in words.
        theirs: String,
        /// This rank's, in words.
        ours: String,
    },
    /// A wait was ended.
    #[error(
        "rank {rank}, {call}: stopped while waiting for {waited_for} of {}: {cause}",
        Ranks(peers)
    )]
    Interrupted {
        /// This rank.
        rank: u32,
        /// The call, in words.
        call: String,
        /// What was waited for.
        waited_for: &'static str,
        /// The ranks that it was missing from.
        peers: Vec<u32>,
        /// Why it ended.
        cause: Box<StopCause>,
    },
    /// An earlier call has failed, or was never completed.
    #[error(
        "the group cannot be used again on rank {rank}, because {reason}: make a new communicator and group \
         to go on"
    )]
    Poisoned {
        /// This rank.
        rank: u32,
        /// What had happened.
        reason: &'static str,
    },
}

/// Ranks in words, be they none.
struct Ranks<'a>(&'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("this rank"),
            ranks => RankList(ranks).fmt(f),
        }
    }
}
