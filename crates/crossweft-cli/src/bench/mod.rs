//! `crossweft bench`: measures a collective and checks its results.
//!
//! * [`options`]: the command line.
//! * [`job`]: where the ranks come from: spawned, threads, or a launcher's.
//! * [`measure`]: what each rank does.
//! * [`report`]: tables and JSON.

mod job;
mod measure;
mod options;
mod report;

use clap::Subcommand;

use crate::exit::Exit;

/// The collectives that can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Collective {
    /// Every rank's output is the reduction of all inputs.
    AllReduce(options::AllReduce),
}

/// Runs a benchmark: the whole job, or one rank of it.
pub(crate) fn run(collective: &Collective) -> Exit {
    let Collective::AllReduce(options) = collective;
    job::run(options).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.exit()
    })
}
