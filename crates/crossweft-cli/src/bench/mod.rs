//! `crossweft bench`: measures a collective and checks its results.
//!
//! * [`options`]: the command line.
//! * [`measure`]: what each rank does.
//! * [`report`]: tables and JSON.

mod measure;
mod options;
mod report;

use clap::Subcommand;

use crate::exit::Exit;
use crate::job::{self, JobError};

/// The collectives that can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Collective {
    /// Every rank's output is the reduction of all inputs.
    AllReduce(options::AllReduce),
}

/// Runs a benchmark: the whole job, or one rank of it.
pub(crate) fn run(collective: &Collective) -> Exit {
    let Collective::AllReduce(options) = collective;
    // Here, because a rank that is bound sees a single core.
    let machine = crate::doctor::machine_name();
    let result = options.check().map_err(JobError::Usage).and_then(|()| {
        let devices = options
            .device
            .find(options.ranks())
            .map_err(JobError::Usage)?;
        job::run(&options.job(devices), |communicator, started_as| {
            measure::run(options, communicator, started_as, &machine)
        })
    });
    result.unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}
