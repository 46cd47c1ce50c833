//! What the environment says.

use std::time::Duration;

use crossweft_net::LONGEST_TIMEOUT;

use crate::status::Error;

/// The longest a call may take unless a group's `timeout_ns` or the environment says otherwise.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(100);

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The longest a call may take: `NCCL_EP_TIMEOUT_MS`, or else `nanoseconds` if that is not 0.
pub(crate) fn timeout(nanoseconds: u64) -> Result<Duration, Error> {
    let Some(text) = variable("NCCL_EP_TIMEOUT_MS") else {
        return Ok(match nanoseconds {
            0 => TIMEOUT,
            some => Duration::from_nanos(some).min(LONGEST_TIMEOUT),
        });
    };
    let limit = text.parse().ok().filter(|ms| *ms > 0);
    let limit = limit.map(|ms| Duration::from_millis(ms).min(LONGEST_TIMEOUT));
    limit.ok_or_else(|| {
        Error::usage(format!(
            "NCCL_EP_TIMEOUT_MS is `{text}`; it must be a whole number of milliseconds above 0"
        ))
    })
}

/// Whether errors are printed where they happen: `NCCL_DEBUG` is `WARN` or says more.
pub(crate) fn prints_errors() -> bool {
    let level = variable("NCCL_DEBUG").map(|level| level.to_ascii_uppercase());
    matches!(level.as_deref(), Some("WARN" | "INFO" | "ABORT" | "TRACE"))
}

/// Refuses to go on unless the program has said that its pointers are host memory.
pub(crate) fn check_device() -> Result<(), Error> {
    match variable("CROSSWEFT_DEVICE").as_deref() {
        Some("cpu") => Ok(()),
        _ => Err(Error::usage(
            "this library works on host memory only so far: set CROSSWEFT_DEVICE=cpu and pass host pointers, or \
             use NCCL EP",
        )),
    }
}
