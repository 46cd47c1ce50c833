//! The cost model: how long a plan takes, and what it waits for.
//!
//! [`predict`] runs one execution of a plan for one message size as a deterministic discrete-event
//! simulation. It takes the operations as the checker compiles them (loops unrolled, chunks and slices
//! resolved to ranges of memory, channels to counters), so signals meet waits, packets their readers, and
//! thread blocks each other at barriers exactly as they do there. What things cost is said by a
//! [`Topology`]:
//!
//! * Every operation costs `op_us` before it begins.
//! * **Data**: its thread block reads all sources and writes all destinations at its own rate, whichever
//!   takes longer. Remote operands cross the links of both ranks, local ones their rank's memory; all
//!   transfers that use a link or memory at a time share it evenly, and an operation ends with the
//!   slowest of these. Packets are twice their payload. A remote *source* costs the latency both ways,
//!   once; a remote destination is written and forgotten.
//! * **Signal and wait**: `signal_us`, the link's latency, `wait_us`. **Packets** can be read from one
//!   latency after their writer begins, and have all been read `packet_us` after the last arrived.
//! * **Put**: handed over at once; the rank's proxy takes `proxy_us` for a request, then the data crosses
//!   the links, then the signal follows. **Flush** waits until it is known to have arrived.
//! * **Semaphores and barriers**: `semaphore_us`, `barrier_us`.
//!
//! Not modelled: caches (but see [`Cache`]), multicast (a switch's members count one by one), traffic of
//! other jobs, ranks that start at different times, and what an earlier execution left unfinished.

mod shared;
mod simulate;
mod topology;

use crate::plan::Plan;
use crate::validate::PlanError;
pub use topology::{Cache, Costs, Link, Memory, Nodes, Topology, TopologyError};

/// Largest message that is looked at.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 40;
/// Most steps that are simulated.
pub const MAX_STEPS: u64 = 1 << 20;
/// Longest time that is simulated, in microseconds: eleven days.
pub const MAX_US: f64 = 1e12;

/// Why there is no prediction.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
    /// The plan cannot be laid out ([`Plan::validate_layout`]).
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// The topology makes no sense, or is too small for the plan.
    #[error("{0}")]
    Topology(#[from] TopologyError),
    /// The plan does not take messages of that size.
    #[error("plan `{plan}` does not take messages of {bytes} bytes; {wanted}")]
    Size {
        /// The plan's name.
        plan: String,
        /// The size asked for.
        bytes: u64,
        /// What fits.
        wanted: String,
    },
    /// The plan has too many steps with that size.
    #[error(
        "plan `{plan}` has {steps} steps with messages of {bytes} bytes; {MAX_STEPS} can be simulated: \
         try a smaller size"
    )]
    TooLarge {
        /// The plan's name.
        plan: String,
        /// The size asked for.
        bytes: u64,
        /// Its steps: operations, each as often as loops repeat it.
        steps: u64,
    },
    /// It could take longer than is simulated.
    #[error(
        "plan `{plan}` could take {us:e} us with messages of {bytes} bytes on topology `{topology}`; {MAX_US:e} can \
         be simulated: try a smaller size, or look at the topology's rates"
    )]
    TooLong {
        /// The plan's name.
        plan: String,
        /// The size asked for.
        bytes: u64,
        /// The topology's name.
        topology: String,
        /// Microseconds, if everything happened one after the other.
        us: f64,
    },
}

/// One execution of a plan.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Timeline {
    /// Bytes of the message.
    pub message_bytes: u64,
    /// From the call until the last thread block's end; `None` if some wait for ever.
    pub total_us: Option<f64>,
    /// What the thread blocks did: rank by rank, block by block, in order. Operations with nothing to
    /// do for this size are not there.
    pub steps: Vec<Step>,
    /// What passed between thread blocks.
    pub edges: Vec<Edge>,
    /// What the end waited for: a chain of steps from the call to the end, without a gap. Up to the last
    /// step that was done, if some wait for ever.
    pub critical_path: Vec<Hop>,
}

/// An operation that was carried out, or waited for ever.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Step {
    /// The rank.
    pub rank: u32,
    /// The thread block.
    pub block: u32,
    /// The operation's index in its block; the loop's, if it is inside one.
    pub op: u32,
    /// Inside a loop: the index among its operations.
    pub inner: Option<u32>,
    /// The operation's name.
    pub name: &'static str,
    /// Bytes of one operand, of operations on data.
    pub bytes: u64,
    /// When its block came to it.
    pub start_us: f64,
    /// When what it needs was there.
    pub ready_us: f64,
    /// When it was over; `None` if it waits for ever, or its block never came to it.
    pub end_us: Option<f64>,
    /// Whether links or memory, which others may use as well, took longer than its thread block and what it
    /// waited for.
    pub link_bound: bool,
}

/// Something that passed from one step to another.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Edge {
    /// Index of the step that sent it.
    pub from: usize,
    /// Index of the step that received it.
    pub to: usize,
    /// What it was.
    pub kind: Reason,
    /// When it could be seen.
    pub arrived_us: f64,
}

/// Why one thing comes after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The execution begins.
    Launch,
    /// It is the next operation of the thread block.
    Order,
    /// A signal over a memory channel.
    Signal,
    /// Packets.
    Packets,
    /// A put over a port channel, its signal, or that it has arrived.
    Put,
    /// A semaphore.
    Semaphore,
    /// A barrier.
    Barrier,
}

impl Reason {
    /// The name in messages and on pages; it does not change.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Launch => "launch",
            Self::Order => "order",
            Self::Signal => "signal",
            Self::Packets => "packets",
            Self::Put => "put",
            Self::Semaphore => "semaphore",
            Self::Barrier => "barrier",
        }
    }
}

/// One part of a critical path.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Hop {
    /// Index of the step.
    pub step: usize,
    /// What it came after: the hop before it.
    pub reason: Reason,
    /// When the path came to it: what was under way from the step before is counted here.
    pub from_us: f64,
    /// When the path left it.
    pub to_us: f64,
}

/// Simulates one execution of `plan` with messages of `bytes` bytes.
///
/// # Errors
/// [`CostError`]: an unsound plan or topology, or a size that does not fit.
pub fn predict(plan: &Plan, topology: &Topology, bytes: u64) -> Result<Timeline, CostError> {
    plan.validate_layout()?;
    topology.validate()?;
    let nodes = topology.nodes_of(plan.world_size())?;
    let fits = takes(plan, bytes).map_err(|wanted| CostError::Size {
        plan: plan.name.clone(),
        bytes,
        wanted,
    });
    fits?;
    let steps = simulate::steps(plan, bytes);
    if steps > MAX_STEPS {
        return Err(CostError::TooLarge {
            plan: plan.name.clone(),
            bytes,
            steps,
        });
    }
    let us = simulate::longest_us(plan, topology, bytes, steps);
    if us > MAX_US {
        return Err(CostError::TooLong {
            plan: plan.name.clone(),
            bytes,
            topology: topology.name.clone(),
            us,
        });
    }
    Ok(simulate::simulate(plan, topology, &nodes, bytes))
}

/// Whether a plan can be given messages of that size, or what fits.
fn takes(plan: &Plan, bytes: u64) -> Result<(), String> {
    if bytes == 0 || bytes > MAX_MESSAGE_BYTES {
        return Err(format!("1 to {MAX_MESSAGE_BYTES} fit"));
    }
    let unit = plan.message_multiple();
    if bytes.is_multiple_of(unit) {
        Ok(())
    } else {
        Err(format!("it takes multiples of {unit} bytes"))
    }
}
