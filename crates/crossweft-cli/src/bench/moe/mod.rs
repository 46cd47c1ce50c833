//! `crossweft bench moe`: dispatch and combine of a mixture of experts.
//!
//! * [`options`]: the command line.
//! * [`batch`]: tokens and where they go, which every rank can make for itself, and what must come of them.
//! * [`measure`]: what each rank does.
//! * [`cuda`]: calls on a GPU, by its clock.
//! * [`report`]: tables, JSON and the picture.

mod batch;
mod cuda;
mod measure;
mod options;
mod report;

use crossweft_collective::CollectiveError;
pub(crate) use options::Moe;

use crate::exit::Exit;
use crate::job::{self, JobError};

/// Runs the benchmark: the whole job, or one rank of it.
pub(crate) fn run(options: &Moe) -> Exit {
    // Here, because a rank that is bound sees a single core.
    let machine = crate::doctor::machine_name();
    let result = options
        .check()
        .map_err(JobError::Usage)
        .and_then(|recorded| {
            let devices = options
                .device
                .find(job::ranks(options.ranks, options.threads).1)
                .map_err(JobError::Usage)?;
            job::run(
                &options.job(devices),
                |communicator, started_as| -> Result<u64, CollectiveError> {
                    let origin = (started_as, machine.as_str());
                    measure::run(options, recorded.as_ref(), communicator, origin)
                },
            )
        });
    result.unwrap_or_else(|error| {
        crate::complain(&format!("error: {error}"));
        error.exit()
    })
}
