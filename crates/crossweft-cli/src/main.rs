//! The `crossweft` command.
//!
//! * [`bench`](mod@bench): measures a collective, or dispatch and combine, and checks the results.
//! * [`explain`]: what a size takes, and why not something else.
//! * [`tune`]: measures the candidates and keeps what was found.
//! * [`doctor`]: what this machine offers and what would be used.
//! * [`plan`]: checks, runs, draws and converts plans.
//! * [`matrix`]: tries every collective in every circumstance.
//! * [`run`](mod@run): a program with crossweft's library in NCCL's place.
//! * [`job`]: where the ranks of a job come from.
//!
//! Exit codes: 0 ok, 1 wrong result, 2 bad usage or input, 3 timeout or lost peer. Results go to
//! standard output, everything else to standard error.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use tracing_subscriber::EnvFilter;

mod bench;
mod doctor;
mod exit;
mod explain;
mod job;
mod matrix;
mod plan;
mod run;
mod tune;
mod values;
mod verdict;

use exit::Exit;

/// Communication between the GPUs, or the processes, of one job.
#[derive(Debug, Parser)]
#[command(name = "crossweft", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The variable that says what is logged.
const LOG: &str = "CROSSWEFT_LOG";

const EXIT_CODES: &str = "Exit codes: 0 ok, 1 wrong result, 2 bad usage or input, 3 timeout or \
lost peer.\nCROSSWEFT_LOG=info (or debug) prints what is happening to standard error.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure a collective and check its results.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Check, run, draw and convert communication plans, our own and those of MSCCL++.
    #[command(subcommand)]
    Plan(plan::Command),
    /// Try every collective with every algorithm, type, operation, size, place and world size up to 8, and compare the
    /// results with a reference and between ranks.
    Matrix(matrix::Options),
    /// Say which algorithm a size takes, with the times of all candidates, and why each was chosen or not.
    Explain(explain::Explain),
    /// Measure all candidates on this machine, and keep the times for later starts to choose by.
    Tune(tune::Tune),
    /// Run a program that uses NCCL with crossweft's library in NCCL's place, on GPUs or, where there is none, host memory.
    Run(run::Options),
    /// Say what this machine offers, what is missing, and what would be used.
    Doctor {
        /// For people, or for programs.
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// One JSON object.
    Json,
}

fn main() -> ExitCode {
    log();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, and belong on standard output.
            let code = if error.use_stderr() {
                Exit::Usage
            } else {
                Exit::Ok
            };
            let _ = error.print();
            return code.into();
        }
    };
    match cli.command {
        Command::Bench(command) => command.run().into(),
        Command::Matrix(options) => matrix::run(&options).into(),
        Command::Plan(command) => plan::run(&command).into(),
        Command::Explain(options) => explain::run(&options).into(),
        Command::Tune(options) => tune::run(&options).into(),
        Command::Run(options) => run::run(&options),
        Command::Doctor { format } => {
            let report = doctor::inspect(Path::new("/"));
            let text = match format {
                Format::Table => doctor::render(&report),
                Format::Json => serde_json::to_string_pretty(&report).unwrap_or_default() + "\n",
            };
            ended(print(&text)).into()
        }
    }
}

/// What is logged goes to standard error.
fn log() {
    let wanted = std::env::var(LOG).unwrap_or_default();
    // What is not set, or set to nothing, is as little as usual.
    let filter = match wanted.is_empty() {
        true => Ok("warn".into()),
        false => EnvFilter::try_new(&wanted),
    };
    let refused = filter.as_ref().err().map(ToString::to_string);
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    if let Some(why) = refused.filter(|_| std::env::var_os(job::PARENT).is_none()) {
        complain(&format!(
            "warning: {LOG}={wanted}: {why}; only warnings are logged"
        ));
    }
}

/// To standard error, in one piece: ranks share it.
pub(crate) fn complain(text: &str) {
    let _ = std::io::stderr()
        .lock()
        .write_all(format!("{text}\n").as_bytes());
}

/// To standard output; a reader that closed it early has seen enough.
///
/// # Errors
/// Why what there was to say is lost, as on a disk that is full.
pub(crate) fn print(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// As [`print()`], with the end of a line.
///
/// # Errors
/// As there.
pub(crate) fn print_line(text: &str) -> Result<(), String> {
    print(&format!("{text}\n"))
}

/// The end of a command that can fail in one way; says why it did.
pub(crate) fn ended(result: Result<(), impl std::fmt::Display>) -> Exit {
    match result {
        Ok(()) => Exit::Ok,
        Err(reason) => {
            complain(&format!("error: {reason}"));
            Exit::Usage
        }
    }
}
