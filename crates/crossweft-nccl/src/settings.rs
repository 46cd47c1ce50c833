//! What the environment says.

use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::time::Duration;

use crossweft_net::LONGEST_TIMEOUT;

use crate::delegate::Rules;
use crate::status::Error;

/// What `ncclGetVersion` says unless told otherwise: what PyTorch 2.15 was made for.
const VERSION: i32 = 23007;
/// How long `crossweft run` may take to read what it is told.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest any wait may take unless told otherwise.
const TIMEOUT: Duration = Duration::from_secs(600);

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The version that `ncclGetVersion` says: `CROSSWEFT_NCCL_VERSION`, as NCCL codes it.
pub(crate) fn version() -> Result<i32, Error> {
    let Some(text) = variable("CROSSWEFT_NCCL_VERSION") else {
        return Ok(VERSION);
    };
    let code = text
        .parse()
        .ok()
        .filter(|code| (20000..30000).contains(code));
    code.ok_or_else(|| {
        Error::usage(format!(
            "CROSSWEFT_NCCL_VERSION is `{text}`; it must be a version as NCCL codes it, such as {VERSION}"
        ))
    })
}

/// The longest any wait may take: `CROSSWEFT_TIMEOUT`, in seconds.
pub(crate) fn timeout() -> Result<Duration, Error> {
    let Some(text) = variable("CROSSWEFT_TIMEOUT") else {
        return Ok(TIMEOUT);
    };
    let seconds: Option<f64> = text.parse().ok();
    let limit = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
    let limit = limit.filter(|limit| !limit.is_zero());
    limit
        .map(|limit| limit.min(LONGEST_TIMEOUT))
        .ok_or_else(|| {
            Error::usage(format!(
                "CROSSWEFT_TIMEOUT is `{text}`; it must be a number of seconds above 0"
            ))
        })
}

/// Whether the environment overrides a communicator's `blocking`: `NCCL_COMM_BLOCKING`.
pub(crate) fn blocking() -> Option<bool> {
    match variable("NCCL_COMM_BLOCKING")?.as_str() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// Whether buffers are looked at before calls on a GPU: `NCCL_CHECK_POINTERS`.
pub(crate) fn checks_pointers() -> bool {
    variable("NCCL_CHECK_POINTERS").is_some_and(|value| value != "0")
}

/// What is delegated, and to which library: `CROSSWEFT_NCCL_DELEGATE`, `CROSSWEFT_NCCL_LIB`. `None` if nothing is.
pub(crate) fn delegation() -> Result<Option<(PathBuf, Rules)>, Error> {
    let Some(text) = variable("CROSSWEFT_NCCL_DELEGATE") else {
        return Ok(None);
    };
    let rules = Rules::parse(&text)?;
    let Some(library) = std::env::var_os("CROSSWEFT_NCCL_LIB").filter(|path| !path.is_empty())
    else {
        return Err(Error::usage(
            "CROSSWEFT_NCCL_DELEGATE says what another library is to do, but CROSSWEFT_NCCL_LIB does not name it; set \
             it to the path of a libnccl.so.2",
        ));
    };
    Ok(Some((library.into(), rules)))
}

/// Says something on standard error, whatever `NCCL_DEBUG` is.
pub(crate) fn say(text: &str) {
    // Who has closed it does not want to read it.
    let _ = writeln!(std::io::stderr(), "crossweft: NCCL INFO {text}");
}

/// Whether errors are printed where they happen: `NCCL_DEBUG` is `WARN` or says more.
pub(crate) fn prints_errors() -> bool {
    matches!(
        level().as_deref(),
        Some("WARN" | "INFO" | "ABORT" | "TRACE")
    )
}

/// Says something on standard error if `NCCL_DEBUG` is `INFO` or says more.
pub(crate) fn inform(text: impl FnOnce() -> String) {
    if matches!(level().as_deref(), Some("INFO" | "TRACE")) {
        say(&text());
    }
}

fn level() -> Option<String> {
    Some(variable("NCCL_DEBUG")?.to_ascii_uppercase())
}

/// Tells `crossweft run`, if that has started this process, that the library is used.
pub(crate) fn report() {
    let Some(name) = variable("CROSSWEFT_RUN_REPORT") else {
        return;
    };
    // Nobody needs to listen.
    let _ = report_to(&name);
}

fn report_to(name: &str) -> std::io::Result<usize> {
    let address = SocketAddr::from_abstract_name(name.as_bytes())?;
    let pid = std::process::id().to_string();
    let socket = UnixDatagram::unbound()?;
    // A queue has room for few; whoever asked for reports reads them soon.
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.send_to_addr(pid.as_bytes(), &address)
}

/// What computes, and whose memory pointers are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Processor {
    /// The host.
    Cpu,
    /// A GPU.
    Cuda,
    /// A GPU if there is one, else the host.
    Auto,
}

/// What the program has said that its pointers are: `CROSSWEFT_DEVICE`. A GPU's unless it says something else, for that is
/// what programs for NCCL have.
pub(crate) fn processor() -> Result<Processor, Error> {
    match variable("CROSSWEFT_DEVICE").as_deref() {
        Some("cpu") => Ok(Processor::Cpu),
        None | Some("cuda") => Ok(Processor::Cuda),
        Some("auto") => Ok(Processor::Auto),
        Some(other) => Err(Error::usage(format!(
            "CROSSWEFT_DEVICE is `{other}`; it must be cpu, cuda or auto"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_report_is_lost_when_many_come_at_once() {
        let name = format!("crossweft-test-reports-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let reports = UnixDatagram::bind_addr(&address).unwrap();
        // More than a queue holds where the system leaves it at its default of 10.
        let count = 32;
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| (0..count).try_for_each(|_| report_to(&name).map(drop)));
            std::thread::sleep(Duration::from_millis(50));
            reports
                .set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
            for _ in 0..count {
                reports.recv(&mut [0; 16]).unwrap();
            }
            sender.join().unwrap().unwrap();
        });
    }
}
