//! What may be chosen, and for what: built-in algorithms and plans of the user's, with what they ask for.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crossweft_device::extent::{GRANULE, chunk_bytes};
use crossweft_device::{DataType, ReduceOp};
use crossweft_executor::LINES_FROM;
use crossweft_hal as hal;
use crossweft_plan::{Collective, InPlace, Plan, PlanError};
use serde::{Deserialize, Serialize};

use crate::algorithm::Algorithm;
use crate::selector::{GPU_PIECE, PIECE, Place, piece_of};

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's processors.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

impl DeviceKind {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl From<&hal::Device> for DeviceKind {
    fn from(device: &hal::Device) -> Self {
        match device {
            hal::Device::Cuda(_) => Self::Cuda,
            _ => Self::Cpu,
        }
    }
}

/// What a collective is asked for: all that a choice depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The collective.
    pub collective: Collective,
    /// Number of ranks.
    pub world_size: u32,
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation; of no account where nothing is reduced.
    pub op: ReduceOp,
    /// Where buffers lie.
    pub place: Place,
    /// Whether all calls are in place, or none; not known: either.
    pub in_place: Option<bool>,
    /// What ranks compute on.
    pub device: DeviceKind,
    /// Largest message in bytes.
    pub max_bytes: u64,
    /// Thread blocks of a rank at most, of what is not a plan of the user's
    /// ([`waiting_blocks`](crossweft_channel::Endpoint::waiting_blocks)).
    pub most_blocks: u32,
    /// Whether sums must be the same whatever the size and the choice: in rank order, rounded once.
    pub deterministic: bool,
}

impl Request {
    /// Whether it matters in which order elements are reduced.
    fn has_order(&self) -> bool {
        let depends = matches!(self.op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg);
        self.collective.reduces() && self.dtype.is_float() && depends
    }

    /// Whether calls are in place for certain, or never; `None` if both may be.
    pub(crate) fn certainly_in_place(&self) -> Option<bool> {
        match self.place {
            // Two memories are never one buffer.
            Place::Symmetric => Some(false),
            _ => self.in_place,
        }
    }

    /// The largest part of a message that goes through scratch memory in one launch.
    pub(crate) fn piece(&self) -> u64 {
        match self.device {
            DeviceKind::Cpu => PIECE,
            DeviceKind::Cuda => GPU_PIECE,
        }
    }

    /// In words, but for the size.
    #[must_use]
    pub fn describe(&self) -> String {
        let Self {
            collective,
            world_size,
            dtype,
            op,
            place,
            device,
            ..
        } = self;
        let op = match collective.reduces() {
            true => format!(" {op}"),
            false => String::new(),
        };
        let (name, device) = (collective.name(), device.name());
        format!("{name} of {world_size} ranks on {device}, {dtype}{op}, {place}")
    }
}

/// The collectives that are called by name, with this root where they have one.
#[must_use]
pub const fn collectives(root: u32) -> [Collective; 8] {
    [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Broadcast { root },
        Collective::Reduce { root },
        Collective::Gather { root },
        Collective::Scatter { root },
    ]
}

/// The collective that is called by that name, with this root where it has one.
#[must_use]
pub fn collective_named(name: &str, root: u32) -> Option<Collective> {
    let mut all = collectives(root).into_iter();
    all.find(|collective| collective.name() == name)
}

/// An algorithm that may be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Candidate {
    /// One of ours.
    BuiltIn(Algorithm),
    /// A plan of the user's.
    Plan(Arc<UserPlan>),
}

impl From<Algorithm> for Candidate {
    fn from(algorithm: Algorithm) -> Self {
        Self::BuiltIn(algorithm)
    }
}

impl PartialEq<Algorithm> for Candidate {
    fn eq(&self, other: &Algorithm) -> bool {
        self.built_in() == Some(*other)
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Scratch memory that a candidate may ask for on each rank, packets included.
pub(crate) const SCRATCH_MAX: u64 = 64 << 20;

impl Candidate {
    /// The name in tables and messages.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::BuiltIn(algorithm) => algorithm.name(),
            Self::Plan(plan) => &plan.plan.name,
        }
    }

    /// The algorithm, if it is one of ours.
    #[must_use]
    pub const fn built_in(&self) -> Option<Algorithm> {
        match self {
            Self::BuiltIn(algorithm) => Some(*algorithm),
            Self::Plan(_) => None,
        }
    }

    /// The plan, of a built-in algorithm with `blocks` thread blocks each rank.
    ///
    /// # Errors
    /// As for [`Algorithm::plan_of`].
    pub fn plan(
        &self,
        collective: Collective,
        ranks: u32,
        blocks: u32,
    ) -> Result<Cow<'_, Plan>, PlanError> {
        match self {
            Self::BuiltIn(algorithm) => {
                algorithm.plan_of(collective, ranks, blocks).map(Cow::Owned)
            }
            Self::Plan(plan) => Ok(Cow::Borrowed(&plan.plan)),
        }
    }

    /// Numbers of thread blocks that are worth a try.
    pub(crate) fn blocks(&self, request: &Request) -> Vec<u32> {
        let blocks: &[u32] = match (self, request.device) {
            (Self::Plan(plan), _) => return vec![plan.blocks()],
            (_, DeviceKind::Cpu) => &[1],
            (Self::BuiltIn(Algorithm::OneShot), _) => &[1, 4, 16, 64, 128],
            _ => &[16, 32, 64, 128],
        };
        let mut blocks: Vec<u32> = blocks
            .iter()
            .map(|b| *b.min(&request.most_blocks))
            .collect();
        blocks.dedup();
        blocks
    }

    /// The smallest message that it is worth a try for: parts are signalled one by one.
    pub(crate) fn worth_from(&self, device: DeviceKind) -> u64 {
        match (self.built_in(), device) {
            (Some(Algorithm::Pipelined), DeviceKind::Cuda) => 4 << 20,
            _ => 0,
        }
    }

    /// From which size on messages travel in another form than smaller ones, for which it is then prepared apart.
    pub(crate) fn form_changes(&self, request: &Request) -> Option<u64> {
        let has_lines = request.device == DeviceKind::Cuda
            && request.collective == Collective::AllReduce
            && request.world_size > 1
            && self.built_in() == Some(Algorithm::OneShot);
        has_lines.then_some(LINES_FROM)
    }

    /// Whether a message of `bytes` bytes can be given to it, larger ones aside.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        match self {
            Self::BuiltIn(_) => true,
            Self::Plan(plan) => plan.constraints.takes(bytes).is_ok(),
        }
    }

    /// Whether each element is reduced at once, in rank order, as far as is known.
    pub(crate) const fn is_in_rank_order(&self) -> bool {
        match self {
            // A switch has its own order, and a ring rounds at every rank.
            Self::BuiltIn(algorithm) => !matches!(algorithm, Algorithm::Ring | Algorithm::Switch),
            Self::Plan(_) => false,
        }
    }

    /// Why it cannot be chosen, if it cannot, whatever the size.
    #[must_use]
    pub fn refusal(&self, request: &Request) -> Option<Refusal> {
        if request.deterministic && request.has_order() && !self.is_in_rank_order() {
            return Some(Refusal::NotInRankOrder);
        }
        match self {
            Self::Plan(plan) => plan.constraints.refusal(request),
            Self::BuiltIn(algorithm)
                if algorithm.needs_registered() && request.place == Place::Private =>
            {
                Some(Refusal::NeedsRegistered)
            }
            // Emulated, peer by peer, it only does what others do with less.
            Self::BuiltIn(Algorithm::Switch) => Some(Refusal::NoMulticast),
            Self::BuiltIn(algorithm)
                if algorithm.overwrites(request.collective)
                    && request.certainly_in_place() != Some(false) =>
            {
                Some(Refusal::Overwrites)
            }
            Self::BuiltIn(_) => None,
        }
    }

    /// The largest part of a message of up to `up_to` bytes that it handles in one launch.
    pub(crate) fn piece(&self, request: &Request, up_to: u64) -> u64 {
        let (collective, ranks) = (request.collective, request.world_size);
        match self {
            Self::BuiltIn(algorithm) => {
                piece_of(*algorithm, collective, ranks, up_to, request.piece())
            }
            Self::Plan(_) => up_to,
        }
    }

    /// The largest message that it takes, at most `request.max_bytes`: scratch memory is bounded. None if it takes
    /// none.
    pub(crate) fn most_bytes(&self, plan: &Plan, request: &Request) -> Result<u64, Refusal> {
        let max = request.max_bytes.min(plan.message_bytes.1);
        // Both kinds of slots are there twice; packets are twice their payload.
        let per_chunk = 2 * u64::from(plan.scratch_slots) + 4 * u64::from(plan.packet_slots);
        let piece = self.piece(request, max).min(max);
        let most = match SCRATCH_MAX.checked_div(per_chunk) {
            None => max,
            Some(chunk) if chunk_of(piece, plan) <= chunk => max,
            Some(chunk) => (chunk / GRANULE * GRANULE)
                .saturating_mul(plan.chunks.into())
                .min(max),
        };
        let least = plan.message_bytes.0.max(1);
        if most < least && max >= least {
            return Err(Refusal::Scratch {
                bytes: chunk_of(least, plan).saturating_mul(per_chunk),
            });
        }
        Ok(most)
    }
}

/// Bytes of a chunk, however large a message may be: far more than any memory has, or as many as it is.
fn chunk_of(bytes: u64, plan: &Plan) -> u64 {
    chunk_bytes(bytes.min(1 << 62), plan.chunks)
}

/// A plan of the user's that was checked.
#[derive(Debug, PartialEq)]
pub struct UserPlan {
    plan: Plan,
    hash: String,
    origin: String,
    constraints: Constraints,
}

impl Eq for UserPlan {}

impl UserPlan {
    /// Of a plan that the checker accepts.
    pub(crate) fn new(plan: Plan, origin: &str) -> Self {
        Self {
            hash: plan.content_hash(),
            origin: origin.to_owned(),
            constraints: Constraints::of(&plan),
            plan,
        }
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What identifies it: [`Plan::content_hash`].
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Where it came from: a file, or a program.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// What it asks for.
    #[must_use]
    pub fn constraints(&self) -> &Constraints {
        &self.constraints
    }

    /// The most thread blocks that any rank has.
    pub(crate) fn blocks(&self) -> u32 {
        let blocks = self.plan.ranks.iter().map(|rank| rank.blocks.len());
        blocks.max().unwrap_or(0) as u32
    }
}

/// What a plan asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Constraints {
    /// The collective it computes.
    pub collective: Collective,
    /// The number of ranks.
    pub world_size: u32,
    /// The reduce operation, if it is for one.
    pub op: Option<ReduceOp>,
    /// Whether ranks reach into each other's buffers, which must be registered memory then.
    pub registered: bool,
    /// Whether calls are in place.
    pub in_place: InPlace,
    /// Sizes of a message in bytes, inclusive.
    pub message_bytes: (u64, u64),
    /// What sizes must be multiples of.
    pub multiple_of: u64,
    /// The most operands that a reduction has.
    pub operands: u32,
}

/// Operands of a reduction that kernels have room for.
const GPU_OPERANDS: u32 = 128;

impl Constraints {
    fn of(plan: &Plan) -> Self {
        let (input, output) = plan.reaches_into();
        let own = plan.collective.is_own_block();
        // In place, the smaller buffer lies elsewhere on every rank.
        let into_smaller = input && own.0 || output && own.1;
        let operands = plan.all_ops().map(|(_, op)| {
            let (from, to) = op.operands();
            from.len() + to.len()
        });
        Self {
            collective: plan.collective,
            world_size: plan.world_size(),
            op: plan.reduce_op,
            registered: input || output,
            in_place: match plan.in_place {
                InPlace::Any if into_smaller => InPlace::Forbidden,
                in_place => in_place,
            },
            message_bytes: plan.message_bytes,
            multiple_of: plan.message_multiple(),
            operands: operands.max().unwrap_or(0) as u32,
        }
    }

    /// Why the plan cannot be chosen, if it cannot, whatever the size.
    #[must_use]
    pub fn refusal(&self, request: &Request) -> Option<Refusal> {
        let in_place = request.certainly_in_place();
        if self.collective != request.collective {
            return Some(Refusal::Collective {
                its: self.collective,
            });
        }
        if self.world_size != request.world_size {
            return Some(Refusal::WorldSize {
                its: self.world_size,
            });
        }
        if let Some(its) = self.op.filter(|op| *op != request.op) {
            return Some(Refusal::Op { its });
        }
        if self.registered && request.place == Place::Private {
            return Some(Refusal::NeedsRegistered);
        }
        match self.in_place {
            InPlace::Required if in_place != Some(true) => return Some(Refusal::OnlyInPlace),
            InPlace::Forbidden if in_place != Some(false) => return Some(Refusal::NotInPlace),
            _ => {}
        }
        let is_large = request.device == DeviceKind::Cuda && self.operands > GPU_OPERANDS;
        is_large.then_some(Refusal::Operands {
            its: self.operands,
            most: GPU_OPERANDS,
        })
    }

    /// Whether a message of `bytes` bytes can be given to it.
    ///
    /// # Errors
    /// The reason, if not.
    pub fn takes(&self, bytes: u64) -> Result<(), Refusal> {
        let (least, most) = self.message_bytes;
        if bytes < least || bytes > most {
            return Err(Refusal::Size { least, most });
        }
        match bytes.is_multiple_of(self.multiple_of) {
            true => Ok(()),
            false => Err(Refusal::Multiple {
                of: self.multiple_of,
            }),
        }
    }
}

/// Why a candidate cannot be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Buffers are private.
    NeedsRegistered,
    /// The links' switch does not reduce or broadcast: nothing here uses NVLink multicast yet.
    NoMulticast,
    /// In place, blocks would overwrite each other.
    Overwrites,
    /// Sums must be in rank order, and its are not, or nobody knows.
    NotInRankOrder,
    /// Calls may be out of place.
    OnlyInPlace,
    /// Calls may be in place.
    NotInPlace,
    /// It computes something else.
    Collective {
        /// What.
        its: Collective,
    },
    /// It is for another number of ranks.
    WorldSize {
        /// How many.
        its: u32,
    },
    /// It is for another reduce operation.
    Op {
        /// Which.
        its: ReduceOp,
    },
    /// It is for other sizes.
    Size {
        /// The smallest, in bytes.
        least: u64,
        /// The largest.
        most: u64,
    },
    /// Its chunks, or their slices, must be of one size.
    Multiple {
        /// What sizes must be multiples of, in bytes.
        of: u64,
    },
    /// It needs too much scratch memory.
    Scratch {
        /// How much, for the smallest message asked about.
        bytes: u64,
    },
    /// Kernels have room for fewer operands.
    Operands {
        /// How many it has in one operation.
        its: u32,
        /// The most there may be.
        most: u32,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeedsRegistered => f.write_str(
                "ranks reach into each other's buffers: it needs symmetric memory, these are private",
            ),
            Self::NoMulticast => f.write_str(
                "multicast is off: without a switch that reduces, others do the same with less",
            ),
            Self::Overwrites => f.write_str("in place, blocks would overwrite each other"),
            Self::NotInRankOrder => f.write_str(
                "sums must be in rank order, whatever the size, and its are in an order of its own",
            ),
            Self::OnlyInPlace => {
                f.write_str("it only works in place, and calls may be out of place")
            }
            Self::NotInPlace => f.write_str("it does not work in place, and calls may be in place"),
            Self::Collective { its } => match its.root() {
                Some(root) => write!(f, "it computes {} with root {root}", its.name()),
                None => write!(f, "it computes {}", its.name()),
            },
            Self::WorldSize { its } => write!(f, "it is for {its} ranks"),
            Self::Op { its } => write!(f, "it computes {its}"),
            Self::Size { least, most } if *most == u64::MAX => {
                write!(f, "it is for messages of at least {least} B")
            }
            Self::Size { least, most } => write!(f, "it is for messages of {least} to {most} B"),
            Self::Multiple { of } => write!(f, "it takes multiples of {of} B"),
            Self::Scratch { bytes } => write!(
                f,
                "it would need {bytes} B of scratch memory, the most is {SCRATCH_MAX}"
            ),
            Self::Operands { its, most } => write!(
                f,
                "it has an operation with {its} operands, kernels have room for {most}"
            ),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Private => "private buffers",
            Self::Symmetric => "symmetric buffers",
            Self::OneSymmetric => "one symmetric buffer",
        })
    }
}
