//! The bodies of messages: postcard, and after it the payload bytes of a round as they are.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{NetError, Operation, TurnedAway};
use crate::frame::Kind;
use crate::host::HostId;
use crate::root::RefuseReason;

/// The longest payload of one rank in an all-gather.
pub(crate) const MAX_PAYLOAD: usize = 16 << 20;
/// The longest message between ranks: a payload of a rank and what describes it.
pub(crate) const MAX_MESSAGE: usize = MAX_PAYLOAD + (1 << 20);
/// The longest message to or from the rendezvous: a table of 65536 ranks.
pub(crate) const MAX_TABLE: usize = 8 << 20;
/// The largest world, so that sizes from the network are never trusted with more.
pub(crate) const MAX_WORLD_SIZE: u32 = 1 << 16;

/// What a joiner says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) version: u16,
    /// The version of the crate: what the layers above say to each other goes with it.
    pub(crate) build: String,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) member: Member,
}

/// What the others need to know about a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) listen: SocketAddr,
    pub(crate) host: HostId,
    pub(crate) pid: u32,
    /// Distinguishes the file-descriptor sockets of ranks, also of one that restarts.
    pub(crate) fd_socket: [u8; 8],
}

/// What the rendezvous answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It still waits for some.
    Waiting(Missing),
    /// Everybody is here, in rank order.
    Table(Vec<Member>),
    Refuse(RefuseReason),
    Missing(Missing),
    /// A rank was lost: after the table went out, or before it and for good.
    Broken(u32),
    /// A rank was told to give up, while the ranks were joining.
    Aborted {
        by: u32,
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Missing {
    pub(crate) missing: Vec<u32>,
    pub(crate) joined: u32,
    pub(crate) world_size: u32,
    pub(crate) after_ms: u64,
    pub(crate) turned_away: TurnedAway,
}

impl Missing {
    pub(crate) fn into_error(self) -> NetError {
        NetError::RanksMissing {
            missing: self.missing,
            joined: self.joined,
            world_size: self.world_size,
            after: Duration::from_millis(self.after_ms),
            turned_away: Box::new(self.turned_away),
        }
    }
}

impl Answer {
    pub(crate) fn encode(&self) -> (Kind, Vec<u8>) {
        match self {
            Self::Waiting(missing) => (Kind::Waiting, to_vec(missing)),
            Self::Table(members) => (Kind::Table, to_vec(members)),
            Self::Refuse(reason) => (Kind::Refuse, to_vec(reason)),
            Self::Missing(missing) => (Kind::Missing, to_vec(missing)),
            Self::Broken(rank) => (Kind::Broken, to_vec(rank)),
            Self::Aborted { by, reason } => (Kind::Abort, to_vec(&(by, reason))),
        }
    }

    pub(crate) fn decode(kind: Kind, body: &[u8]) -> Result<Self, String> {
        match kind {
            Kind::Waiting => from_slice(body).map(Self::Waiting),
            Kind::Table => from_slice(body).map(Self::Table),
            Kind::Refuse => from_slice(body).map(Self::Refuse),
            Kind::Missing => from_slice(body).map(Self::Missing),
            Kind::Broken => from_slice(body).map(Self::Broken),
            Kind::Abort => from_slice(body).map(|(by, reason)| Self::Aborted { by, reason }),
            kind => Err(format!(
                "a {kind:?} message was not expected from a rendezvous"
            )),
        }
    }
}

/// What ranks say to their neighbours in the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Control(Control),
    Round(Round),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Control {
    /// Everything is well.
    Heartbeat,
    /// Ranks known to have entered an operation, one bit each.
    Progress { sequence: u64, seen: Vec<u8> },
    /// Two ranks called different operations.
    Mismatch {
        sequence: u64,
        first: (u32, Operation),
        second: (u32, Operation),
    },
    /// A rank vanished.
    Died { rank: u32, reason: String },
    /// A rank gave up.
    Aborted { by: u32, reason: String },
    /// A rank said goodbye, having completed all operations before `completed`. From the rank
    /// itself it is the last message on the connection.
    Left {
        rank: u32,
        completed: u64,
        /// What it had failed at, if it left because of that.
        why: Option<String>,
    },
    /// A rank is not heard any more, or is heard again: see `Mesh::turns`.
    Silence { rank: u32, turn: u32 },
}

impl Control {
    /// The rank that it is about, where there is one.
    pub(crate) fn subject(&self) -> Option<u32> {
        match *self {
            Self::Heartbeat | Self::Progress { .. } => None,
            Self::Mismatch { first, second, .. } => Some(first.0.max(second.0)),
            Self::Died { rank, .. } | Self::Left { rank, .. } | Self::Silence { rank, .. } => {
                Some(rank)
            }
            Self::Aborted { by, .. } => Some(by),
        }
    }
}

/// Blocks of one round of an operation; a round with long blocks comes in several of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) sequence: u64,
    pub(crate) operation: Operation,
    pub(crate) round: u32,
    pub(crate) blocks: Vec<Arc<[u8]>>,
}

#[derive(Serialize, Deserialize)]
struct RoundHeader {
    sequence: u64,
    operation: Operation,
    round: u32,
    lengths: Vec<u32>,
}

impl Message {
    pub(crate) fn encode(&self) -> (Kind, Vec<u8>) {
        match self {
            Self::Control(control) => (Kind::Control, to_vec(control)),
            Self::Round(round) => {
                let mut body = to_vec(&RoundHeader {
                    sequence: round.sequence,
                    operation: round.operation,
                    round: round.round,
                    // Blocks are at most MAX_PAYLOAD long.
                    lengths: round
                        .blocks
                        .iter()
                        .map(|block| u32::try_from(block.len()).unwrap_or(u32::MAX))
                        .collect(),
                });
                round
                    .blocks
                    .iter()
                    .for_each(|block| body.extend_from_slice(block));
                (Kind::Round, body)
            }
        }
    }

    pub(crate) fn decode(kind: Kind, body: &[u8]) -> Result<Self, String> {
        match kind {
            Kind::Control => from_slice(body).map(Self::Control),
            Kind::Round => {
                let (header, mut rest) = postcard::take_from_bytes::<RoundHeader>(body)
                    .map_err(|error| format!("a round could not be read: {error}"))?;
                // An empty block takes one byte here and many in memory.
                if header.lengths.len() > MAX_WORLD_SIZE as usize {
                    return Err("a round has more blocks than there can be ranks".to_owned());
                }
                let mut blocks = Vec::with_capacity(header.lengths.len());
                for length in header.lengths {
                    let (block, later) = rest
                        .split_at_checked(length as usize)
                        .ok_or("a round is shorter than it says")?;
                    blocks.push(block.into());
                    rest = later;
                }
                if !rest.is_empty() {
                    return Err("a round is longer than it says".to_owned());
                }
                let RoundHeader {
                    sequence,
                    operation,
                    round,
                    ..
                } = header;
                Ok(Self::Round(Round {
                    sequence,
                    operation,
                    round,
                    blocks,
                }))
            }
            kind => Err(format!("a {kind:?} message was not expected from a rank")),
        }
    }
}

pub(crate) fn to_vec<T: Serialize>(value: &T) -> Vec<u8> {
    // The types above are plain data, for which serialising into memory cannot fail.
    postcard::to_allocvec(value).unwrap_or_default()
}

pub(crate) fn from_slice<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, String> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err("a message has bytes left over".to_owned()),
        Err(error) => Err(format!("a message could not be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rounds_round_trip(
            sequence: u64,
            round: u32,
            blocks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..9),
        ) {
            let blocks = blocks.into_iter().map(Into::into).collect();
            let operation = Operation::AllGather;
            let message = Message::Round(Round { sequence, operation, round, blocks });
            let (kind, body) = message.encode();
            prop_assert_eq!(Message::decode(kind, &body).unwrap(), message);
            prop_assert!(Message::decode(kind, &body[..body.len() - 1]).is_err());
        }

        #[test]
        fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            for kind in [Kind::Round, Kind::Control, Kind::Hello, Kind::Table, Kind::Missing] {
                let _ = Message::decode(kind, &noise);
                let _ = Answer::decode(kind, &noise);
                let _ = from_slice::<Hello>(&noise);
            }
        }
    }
}
