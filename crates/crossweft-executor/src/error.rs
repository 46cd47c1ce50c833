use crossweft_channel::{ChannelError, StopCause};
use crossweft_device::ReduceOp;
use crossweft_hal::HalError;

/// What can go wrong with preparing or launching a plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// Channels or registered memory could not be made.
    #[error("preparing plan `{plan}`: {source}")]
    Channel {
        /// The plan's name.
        plan: String,
        /// What failed.
        source: ChannelError,
    },
    /// The device refused something.
    #[error("preparing plan `{plan}`: {source}")]
    Hal {
        /// The plan's name.
        plan: String,
        /// What failed.
        source: HalError,
    },
    /// The plan is for another number of ranks.
    #[error("plan `{plan}` is for {ranks} ranks, the job has {world_size}")]
    WorldSize {
        /// The plan's name.
        plan: String,
        /// Ranks of the plan.
        ranks: u32,
        /// Ranks of the job.
        world_size: u32,
    },
    /// The plan is for another reduce operation.
    #[error("plan `{plan}` computes {planned}, not {asked}")]
    ReduceOp {
        /// The plan's name.
        plan: String,
        /// The plan's operation.
        planned: ReduceOp,
        /// The caller's.
        asked: ReduceOp,
    },
    /// Inputs were to be multiplied before something that is no sum.
    #[error("plan `{plan}`: inputs are multiplied before a sum only, not before {asked}")]
    PreMultiplied {
        /// The plan's name.
        plan: String,
        /// The caller's operation.
        asked: ReduceOp,
    },
    /// The plan reaches into peers' buffers, which were not given as registered memory.
    #[error(
        "plan `{plan}` lets ranks reach into each other's {buffer}; prepare it with registered \
         memory, or choose a plan that stages"
    )]
    NeedsRegistered {
        /// The plan's name.
        plan: String,
        /// `input` or `output`.
        buffer: &'static str,
    },
    /// The sizes that the plan was prepared for would need more memory than can be addressed.
    #[error(
        "plan `{plan}` cannot be prepared for messages of {bytes} bytes: its scratch memory would be too large"
    )]
    Scratch {
        /// The plan's name.
        plan: String,
        /// The size asked for.
        bytes: u64,
    },
    /// Blocks of the plan wait for each other, and not all of them fit onto the device at once.
    #[error(
        "plan `{plan}` has up to {blocks} thread blocks a rank and {sharers} ranks on this device, \
         which holds {resident} such blocks at a time; use a plan with fewer blocks, or more devices"
    )]
    Residency {
        /// The plan's name.
        plan: String,
        /// Thread blocks of a rank.
        blocks: u32,
        /// Ranks on the device.
        sharers: u32,
        /// Blocks that it can hold.
        resident: u32,
    },
    /// An operation has more operands than a kernel has room for.
    #[error(
        "plan `{plan}` has an operation with {operands} operands, kernels have room for {most}; split \
         it, or use the CPU device"
    )]
    Operands {
        /// The plan's name.
        plan: String,
        /// Operands of the operation.
        operands: usize,
        /// The most there may be.
        most: u32,
    },
    /// The device failed while a plan ran. The plan cannot be launched again.
    #[error("plan `{plan}` on rank {rank}: {source}")]
    Device {
        /// The plan's name.
        plan: String,
        /// This rank.
        rank: u32,
        /// What failed.
        source: HalError,
    },
    /// A launch does not fit what was prepared.
    #[error("launching plan `{plan}` on rank {rank}: {reason}")]
    Usage {
        /// The plan's name.
        plan: String,
        /// This rank.
        rank: u32,
        /// What does not fit.
        reason: String,
    },
    /// A launch was ended while it waited. The plan cannot be launched again.
    #[error(
        "rank {rank}, plan `{plan}`, thread block {block}, op {op}: stopped while waiting for \
         {waited_for}: {cause}"
    )]
    Interrupted {
        /// The plan's name.
        plan: String,
        /// This rank.
        rank: u32,
        /// The thread block.
        block: u32,
        /// The operation: its index and name.
        op: String,
        /// What for, from whom, and what was seen instead.
        waited_for: String,
        /// Why it ended.
        cause: Box<StopCause>,
    },
    /// An earlier launch was ended, so this plan's counters are out of step with its peers'.
    #[error(
        "plan `{plan}` cannot be launched again on rank {rank}, because an earlier launch failed: \
         make a new communicator to go on"
    )]
    Poisoned {
        /// The plan's name.
        plan: String,
        /// This rank.
        rank: u32,
    },
}
