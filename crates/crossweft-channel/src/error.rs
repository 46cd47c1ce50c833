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
    /// No number is free.
    #[error(
        "all {limit} {kind} ids of this proxy service are in use; remove some, or use a second service"
    )]
    TooMany {
        /// What is numbered.
        kind: &'static str,
        /// How many there can be.
        limit: u32,
    },
    /// A number that stands for nothing.
    #[error("{kind} id {id} is unknown to this proxy service; it was removed, or never added")]
    UnknownId {
        /// What is numbered.
        kind: &'static str,
        /// The number.
        id: u32,
    },
    /// An option with a value that cannot be.
    #[error("{option} is {value} on rank {rank}; it must be {must_be}")]
    InvalidOption {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// Where it was given.
        rank: u32,
        /// What it can be.
        must_be: &'static str,
    },
    /// A put that goes beyond its memory.
    #[error(
        "a put on channel {channel} goes beyond its {side} memory: bytes {offset}..{offset}+{bytes} of          memory id {memory}, which has {size} bytes"
    )]
    OutOfRange {
        /// The channel's id.
        channel: u32,
        /// `source` or `destination`.
        side: &'static str,
        /// The memory's id.
        memory: u32,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// Size of the memory.
        size: u64,
    },
    /// The data connection with a peer cannot be made or was lost.
    #[error("rank {rank} has no data connection with rank {peer} any more: {reason}")]
    Disconnected {
        /// This rank.
        rank: u32,
        /// The peer.
        peer: u32,
        /// What happened.
        reason: String,
    },
    /// A peer's proxy asked for something that cannot be done.
    #[error("rank {peer}'s proxy sent rank {rank} {request}")]
    BadRequest {
        /// This rank.
        rank: u32,
        /// The peer.
        peer: u32,
        /// What it asked for, and what is wrong with it.
        request: String,
    },
    /// A custom handler gave up.
    #[error("the proxy's handler failed: {reason}")]
    Handler {
        /// What it says.
        reason: String,
    },
    /// The operating system refused a thread or a socket.
    #[error("while {what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// What it said.
        source: std::io::Error,
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

    /// For `map_err` on system calls.
    pub(crate) fn system(what: &str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System {
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
