//! `crossweft bench`: measures a collective and checks its results.
//!
//! * [`options`]: the command line.
//! * [`measure`]: what each rank does, on the buffers of [`memory`], by plans, [`messages`] or [`fused`] calls.
//! * [`report`]: tables and JSON; [`printer`] prints them.
//! * [`plot`]: a picture of the same.
//! * [`moe`]: the same for dispatch and combine of a mixture of experts.
//! * [`primitives`]: what they are made of, between two GPUs.

mod fused;
mod measure;
mod memory;
mod messages;
mod moe;
mod options;
mod plot;
mod primitives;
mod printer;
mod report;

use clap::Subcommand;
use crossweft_collective::Collective;
use options::{Bench, Kind};

use crate::exit::Exit;
use crate::job::{self, JobError};
use crate::values::Operation;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Every rank's output is the reduction of all inputs.
    AllReduce(options::Reducing),
    /// Every rank's output is all inputs, in rank order.
    AllGather(options::Common),
    /// Each rank's output is its block of the reduction of all inputs.
    ReduceScatter(options::Reducing),
    /// Each rank's output is its block of every input, in rank order.
    AllToAll(options::Common),
    /// Every rank's output is the root's input.
    Broadcast(options::Rooted),
    /// The root's output is the reduction of all inputs.
    Reduce(options::RootedReducing),
    /// The root's output is all inputs, in rank order.
    Gather(options::Rooted),
    /// Each rank's output is its block of the root's input.
    Scatter(options::Rooted),
    /// Every rank sends to the next and receives from the one before, as messages.
    SendRecv(options::Common),
    /// As all-to-all, but as messages, whose sizes need not be alike; here they are.
    AllToAllV(options::Common),
    /// As all-gather, but as messages.
    AllGatherV(options::Common),
    /// As gather, but as messages.
    GatherV(options::Rooted),
    /// As scatter, but as messages.
    ScatterV(options::Rooted),
    /// As reduce-scatter, but as messages, of private buffers.
    ReduceScatterV(options::PrivateReducing),
    /// An all-reduce of tokens with residual addition, RMS normalisation, and quantisation if it is asked for.
    AllReduceRmsNorm(options::Normalising),
    /// Dispatch and combine of a mixture of experts.
    Moe(moe::Moe),
    /// What all of them are made of, between two GPUs: flags, signals, packets, copies, proxies, launches.
    Primitives(primitives::Options),
}

impl Command {
    /// Runs a benchmark: the whole job, or one rank of it.
    pub(crate) fn run(self) -> Exit {
        let copies = |collective, common| Bench {
            collective,
            op: None,
            kind: Kind::Plans,
            common,
        };
        let messages = |collective, common| Bench {
            kind: Kind::Messages,
            ..copies(collective, common)
        };
        let reduces = |collective, op, common| Bench {
            op: Some(op),
            ..copies(collective, common)
        };
        let options = match self {
            Self::AllReduce(o) => reduces(Collective::AllReduce, o.op, o.common),
            Self::ReduceScatter(o) => reduces(Collective::ReduceScatter, o.op, o.common),
            Self::AllGather(common) => copies(Collective::AllGather, common),
            Self::AllToAll(common) => copies(Collective::AllToAll, common),
            Self::Broadcast(o) => copies(Collective::Broadcast { root: o.root }, o.common),
            Self::Gather(o) => copies(Collective::Gather { root: o.root }, o.common),
            Self::Scatter(o) => copies(Collective::Scatter { root: o.root }, o.common),
            Self::SendRecv(common) => messages(Collective::SendRecv, common),
            Self::AllToAllV(common) => messages(Collective::AllToAll, common),
            Self::AllGatherV(common) => messages(Collective::AllGather, common),
            Self::GatherV(o) => messages(Collective::Gather { root: o.root }, o.common),
            Self::ScatterV(o) => messages(Collective::Scatter { root: o.root }, o.common),
            Self::ReduceScatterV(options::PrivateReducing { of: o }) => Bench {
                op: Some(o.op),
                ..messages(Collective::ReduceScatter, o.common)
            },
            Self::AllReduceRmsNorm(o) => Bench {
                op: Some(Operation::SUM),
                kind: Kind::Fused(o.norm),
                ..copies(Collective::AllReduce, o.common)
            },
            Self::Reduce(o) => reduces(Collective::Reduce { root: o.root }, o.op, o.common),
            Self::Moe(options) => return moe::run(&options),
            Self::Primitives(options) => return primitives::run(&options),
        };
        run(&options)
    }
}

/// Of a collective.
fn run(options: &Bench) -> Exit {
    // Here, because a rank that is bound sees a single core.
    let machine = crate::doctor::machine_name();
    let result = options.check().map_err(JobError::Usage).and_then(|()| {
        let devices = options
            .common
            .device
            .find(options.common.ranks().1)
            .map_err(JobError::Usage)?;
        options.check_on(&devices).map_err(JobError::Usage)?;
        job::run(&options.job(devices), |communicator, started_as| {
            measure::run(options, communicator, started_as, &machine)
        })
    });
    result.unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}
