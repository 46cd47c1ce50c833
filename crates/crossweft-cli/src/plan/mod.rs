//! `crossweft plan`: checks, runs, draws and converts communication plans.
//!
//! * [`source`]: reading files of either format.
//! * [`check`]: what the checker says.
//! * [`run`](mod@run): a plan carried out, its result compared with the reference.
//! * [`show`]: a plan as a page to look at.
//! * [`convert`]: from one format to the other.

mod check;
mod convert;
mod run;
mod show;
mod source;

use clap::Subcommand;

use crate::exit::Exit;

/// What can be done with plans.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Say whether plans are sound: indices, pairing, races, deadlocks, results.
    Check(check::Check),
    /// Run a plan and compare its result with a reference.
    Run(run::Run),
    /// Draw a plan as a page, with what it waits for and how long it takes by a cost model.
    Show(show::Show),
    /// Write a plan in the other format.
    Convert(convert::Convert),
}

/// Runs one of the commands.
pub(crate) fn run(command: &Command) -> Exit {
    match command {
        Command::Check(check) => check::run(check),
        Command::Run(run) => run::run(run),
        Command::Show(show) => show::run(show),
        Command::Convert(convert) => convert::run(convert),
    }
}
