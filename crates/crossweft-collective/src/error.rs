use crossweft_channel::{ChannelError, StopCause};
use crossweft_executor::{ExchangeError, ExecutorError};
use crossweft_hal::HalError;
use crossweft_net::NetError;
use crossweft_plan::PlanError;

use crate::Algorithm;

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
            Self::Exchange(error) => matches!(error, ExchangeError::Poisoned { .. }),
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
