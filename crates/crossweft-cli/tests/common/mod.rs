//! Starting the command under test.

use std::process::{Command, Stdio};

/// Whatever started the tests must not be taken for the launcher of the ranks.
const LAUNCHER_VARIABLES: [&str; 12] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_PROCID",
];

/// `crossweft` with these arguments, no input, no launcher around it, and nothing of what this machine was tuned to.
pub(crate) fn crossweft<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crossweft"));
    command.args(arguments).stdin(Stdio::null());
    for variable in LAUNCHER_VARIABLES {
        command.env_remove(variable);
    }
    command.env_remove("CROSSWEFT_PLANS");
    command.env("CROSSWEFT_TUNING", "off");
    command
}

/// What a process has printed.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
