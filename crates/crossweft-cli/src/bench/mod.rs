//! `crossweft bench`: measures a collective and checks its results.
//!
//! * [`options`]: the command line.
//! * [`measure`]: what each rank does.
//! * [`report`]: tables and JSON.
//! * [`plot`]: a picture of the same.

mod measure;
mod options;
mod plot;
mod report;

use clap::Subcommand;
use crossweft_collective::Collective;
use options::Bench;

use crate::exit::Exit;
use crate::job::{self, JobError};

/// The collectives that can be measured.
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
}

impl Command {
    /// What is to be measured, and how.
    pub(crate) fn options(self) -> Bench {
        let copies = |collective, common| Bench {
            collective,
            op: None,
            messages: false,
            common,
        };
        let messages = |collective, common| Bench {
            messages: true,
            ..copies(collective, common)
        };
        let reduces = |collective, op, common| Bench {
            collective,
            op: Some(op),
            messages: false,
            common,
        };
        match self {
            Self::AllReduce(o) => reduces(Collective::AllReduce, o.op, o.common),
            Self::ReduceScatter(o) => reduces(Collective::ReduceScatter, o.op, o.common),
            Self::AllGather(common) => copies(Collective::AllGather, common),
            Self::AllToAll(common) => copies(Collective::AllToAll, common),
            Self::Broadcast(o) => copies(Collective::Broadcast { root: o.root }, o.common),
            Self::Gather(o) => copies(Collective::Gather { root: o.root }, o.common),
            Self::Scatter(o) => copies(Collective::Scatter { root: o.root }, o.common),
            Self::SendRecv(common) => messages(Collective::SendRecv, common),
            Self::AllToAllV(common) => messages(Collective::AllToAll, common),
            Self::Reduce(o) => reduces(Collective::Reduce { root: o.root }, o.op, o.common),
        }
    }
}

/// Runs a benchmark: the whole job, or one rank of it.
pub(crate) fn run(options: &Bench) -> Exit {
    // Here, because a rank that is bound sees a single core.
    let machine = crate::doctor::machine_name();
    let result = options.check().map_err(JobError::Usage).and_then(|()| {
        let devices = options
            .common
            .device
            .find(options.common.ranks())
            .map_err(JobError::Usage)?;
        job::run(&options.common.job(devices), |communicator, started_as| {
            measure::run(options, communicator, started_as, &machine)
        })
    });
    result.unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}
