use std::path::PathBuf;

use crossweft_channel::{ChannelError, StopCause};
use crossweft_executor::{ExchangeError, ExecutorError};
use crossweft_hal::HalError;
use crossweft_net::NetError;
use crossweft_plan::PlanError;

use crate::Algorithm;
use crate::registry::RegistryError;

/// What can go wrong with a collective.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The bootstrap failed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// Channels or registered memory failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A plan could not be prepared or launched.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// Sends and receives could not be prepared, or have failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The device failed.
    #[error(transparent)]
    Hal(#[from] HalError),
    /// An algorithm cannot be laid out for this job.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The algorithm asked for needs registered memory.
    #[error(
        "algorithm `{algorithm}` needs symmetric memory; allocate buffers with \
         Communicator::allocate, or choose another algorithm"
    )]
    NeedsSymmetric {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// A plan that was to be chosen among others cannot be.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Ranks would take different algorithms for the same call.
    #[error(transparent)]
    SelectorsDiffer(Box<SelectorDifference>),
    /// A plan is registered on one rank and not on another.
    #[error(
        "rank {has} has registered plan {plan}, rank {has_not} has not; give every rank the same plans: \
         CROSSWEFT_PLANS"
    )]
    PlansDiffer {
        /// The rank that has it.
        has: u32,
        /// Its name, and where it came from.
        plan: String,
        /// The rank that has not.
        has_not: u32,
    },
    /// One rank is to sum in rank order and another is not.
    #[error(
        "rank {rank} {} to sum in rank order, rank 0 {}; give every rank the same CROSSWEFT_DETERMINISTIC",
        if *value { "is" } else { "is not" }, if *value { "is not" } else { "is" }
    )]
    DeterminismDiffers {
        /// That rank, compared with rank 0.
        rank: u32,
        /// Whether it is.
        value: bool,
    },
    /// A tuning table cannot be written.
    #[error("the tuning table cannot be written into {}: {source}; set CROSSWEFT_CACHE_DIR", folder.display())]
    Store {
        /// Where to.
        folder: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A call does not fit what was prepared.
    #[error("rank {rank}: {reason}")]
    Usage {
        /// This rank.
        rank: u32,
        /// What does not fit.
        reason: String,
    },
    /// A rank's thread panicked.
    #[error("the thread of rank {rank} panicked")]
    Panicked {
        /// The rank.
        rank: u32,
    },
}

/// What two ranks would take for the same call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: rank {rank} would take {choice} for {}..{} B ({chosen_by}), rank {other_rank} {other_choice} \
     ({other_chosen_by}); give every rank the same tuning table and plans: CROSSWEFT_CACHE_DIR, \
     CROSSWEFT_TUNING, CROSSWEFT_PLANS", sizes.0, sizes.1
)]
#[non_exhaustive]
pub struct SelectorDifference {
    /// The collective, and where its buffers lie.
    pub what: String,
    /// For which sizes of a message in bytes, inclusive: the first that differ.
    pub sizes: (u64, u64),
    /// The first rank whose choice is not that of the other.
    pub rank: u32,
    /// What it would take.
    pub choice: String,
    /// Where it has that from.
    pub chosen_by: String,
    /// The rank that it is compared with.
    pub other_rank: u32,
    /// What that one would take.
    pub other_choice: String,
    /// Where that one has it from.
    pub other_chosen_by: String,
}

impl CollectiveError {
    /// Whether a peer was lost, or a deadline passed: the job is over, but nobody did wrong here.
    #[must_use]
    pub fn is_lost_peer_or_timeout(&self) -> bool {
        match self {
            Self::Executor(ExecutorError::Channel { source, .. })
            | Self::Exchange(ExchangeError::Channel { source })
            | Self::Channel(source) => match source {
                ChannelError::Bootstrap { source, .. } => lost_or_late(source),
                ChannelError::Stopped { .. } => true,
                _ => false,
            },
            Self::Net(source) => lost_or_late(source),
            Self::Executor(ExecutorError::Interrupted { cause, .. })
            | Self::Exchange(ExchangeError::Interrupted { cause, .. }) => {
                !matches!(**cause, StopCause::Mismatch { .. })
            }
            Self::Executor(error) => matches!(error, ExecutorError::Poisoned { .. }),
            Self::Exchange(error) => matches!(
                error,
                ExchangeError::Poisoned { .. } | ExchangeError::PeerGaveUp { .. }
            ),
            _ => false,
        }
    }
}

fn lost_or_late(error: &NetError) -> bool {
    matches!(
        error,
        NetError::Aborted { .. }
            | NetError::PeerDied { .. }
            | NetError::PeerLeft { .. }
            | NetError::NobodyJoined { .. }
            | NetError::RanksMissing { .. }
            | NetError::RootLost { .. }
            | NetError::Timeout { .. }
    )
}
