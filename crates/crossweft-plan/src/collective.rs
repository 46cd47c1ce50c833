//! What plans compute.

use serde::{Deserialize, Serialize};

/// What a plan computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Collective {
    /// Every rank's output is the reduction of all inputs.
    AllReduce,
    /// Block `r` of every output is rank `r`'s input.
    AllGather,
    /// Rank `r`'s output is the reduction of block `r` of all inputs.
    ReduceScatter,
    /// Block `q` of rank `r`'s output is block `r` of rank `q`'s input.
    AllToAll,
    /// Rank `r + 1`'s output is rank `r`'s input, around the ring.
    SendRecv,
    /// Every rank's output is the root's input.
    Broadcast {
        /// The root.
        root: u32,
    },
    /// The root's output is the reduction of all inputs; the others' is not looked at.
    Reduce {
        /// The root.
        root: u32,
    },
    /// Block `r` of the root's output is rank `r`'s input; the others' is not looked at.
    Gather {
        /// The root.
        root: u32,
    },
    /// Rank `r`'s output is block `r` of the root's input.
    Scatter {
        /// The root.
        root: u32,
    },
    /// What [`Plan::outputs`](crate::Plan::outputs) says.
    Custom,
    /// Anything: there is no statement of what the result is.
    Test,
}

/// One block of a rank's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputBlock {
    /// The rank.
    pub rank: u32,
    /// Which block.
    pub block: u32,
}

/// What a block of a rank's output must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing in particular.
    Any,
    /// The reduction of this block of all ranks' inputs.
    Reduction {
        /// Which block of the inputs.
        block: u32,
    },
    /// The reduction of these, each as often as it is there.
    Inputs(Vec<InputBlock>),
}

impl Collective {
    /// The name in messages and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::SendRecv => "send-recv",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::Custom => "custom",
            Self::Test => "test",
        }
    }

    /// The rank whose input goes out, or whose output comes in, if it is one's.
    #[must_use]
    pub const fn root(self) -> Option<u32> {
        match self {
            Self::Broadcast { root }
            | Self::Reduce { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// Blocks of input and output, each of one message, with `ranks` ranks; `None` if the plan says.
    #[must_use]
    pub const fn blocks(self, ranks: u32) -> Option<(u32, u32)> {
        match self {
            Self::AllReduce | Self::SendRecv | Self::Broadcast { .. } | Self::Reduce { .. } => {
                Some((1, 1))
            }
            Self::AllGather | Self::Gather { .. } => Some((1, ranks)),
            Self::ReduceScatter | Self::Scatter { .. } => Some((ranks, 1)),
            Self::AllToAll => Some((ranks, ranks)),
            Self::Custom | Self::Test => None,
        }
    }

    /// In place, whether a rank's input is its block of its output, and whether its output is its block of its
    /// input: `(input, output)`. Where neither is, both begin at one place.
    #[must_use]
    pub const fn is_own_block(self) -> (bool, bool) {
        match self {
            Self::AllGather | Self::Gather { .. } => (true, false),
            Self::ReduceScatter | Self::Scatter { .. } => (false, true),
            _ => (false, false),
        }
    }

    /// Whether results are reductions of all ranks' inputs.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::ReduceScatter | Self::Reduce { .. }
        )
    }

    /// What block `block` of `rank`'s output must hold, of `ranks` ranks. [`Content::Any`] too where the plan says.
    #[must_use]
    pub fn content(self, ranks: u32, rank: u32, block: u32) -> Content {
        let copy = |rank, block| Content::Inputs(vec![InputBlock { rank, block }]);
        match self {
            Self::AllReduce => Content::Reduction { block: 0 },
            Self::ReduceScatter => Content::Reduction { block: rank },
            Self::Reduce { root } if rank == root => Content::Reduction { block: 0 },
            Self::AllGather => copy(block, 0),
            Self::Gather { root } if rank == root => copy(block, 0),
            Self::AllToAll => copy(block, rank),
            Self::SendRecv => copy((rank + ranks - 1) % ranks, 0),
            Self::Broadcast { root } => copy(root, 0),
            Self::Scatter { root } => copy(root, rank),
            Self::Reduce { .. } | Self::Gather { .. } | Self::Custom | Self::Test => Content::Any,
        }
    }
}
