//! Result codes, and the words behind them.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crossweft_channel::ChannelError;
use crossweft_moe::MoeError;
use crossweft_net::NetError;

use crate::settings;

/// What `ncclResult_t` says, as far as it is used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Status {
    System = 2,
    Internal = 3,
    Argument = 4,
    Usage = 5,
    Remote = 6,
}

/// A failed call: its code, and what `crossweftEpGetLastError` says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Error {
    pub(crate) status: Status,
    text: String,
}

impl Error {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(Status::Argument, text)
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(Status::Usage, text)
    }
}

impl From<NetError> for Error {
    fn from(error: NetError) -> Self {
        Self::new(Status::Remote, error.to_string())
    }
}

impl From<ChannelError> for Error {
    fn from(error: ChannelError) -> Self {
        Self::new(channel(&error), error.to_string())
    }
}

impl From<MoeError> for Error {
    fn from(error: MoeError) -> Self {
        let status = match &error {
            MoeError::Channel { source } => channel(source),
            MoeError::Hal { .. } => Status::System,
            MoeError::Usage { .. } | MoeError::Mismatch { .. } => Status::Usage,
            MoeError::Capacity { .. } => Status::Argument,
            MoeError::Interrupted { .. } | MoeError::Poisoned { .. } => Status::Remote,
            _ => Status::Internal,
        };
        Self::new(status, error.to_string())
    }
}

fn channel(error: &ChannelError) -> Status {
    match error {
        ChannelError::Mismatch { .. } | ChannelError::NotOnThisHost { .. } => Status::Usage,
        ChannelError::Bootstrap { .. }
        | ChannelError::PeerFailed { .. }
        | ChannelError::Disconnected { .. }
        | ChannelError::Stopped { .. } => Status::Remote,
        ChannelError::Memory { .. } | ChannelError::System { .. } => Status::System,
        _ => Status::Internal,
    }
}

thread_local! {
    /// The last error of this thread.
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Notes an error of a call on this thread. Cannot panic: whoever calls this has caught what can.
fn note(name: &str, error: &Error) -> Status {
    let text = format!("{name}: {error}");
    if settings::prints_errors() {
        // Who has closed it does not want to read it.
        let _ = writeln!(std::io::stderr(), "crossweft: NCCL EP WARN {text}");
    }
    let bytes: Vec<u8> = text.into_bytes().into_iter().filter(|&b| b != 0).collect();
    // Nobody asks a thread that is so far gone that it has no variables any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(bytes).unwrap_or_default());
    error.status
}

/// The last error of this thread. Valid until its next one.
pub(crate) fn last() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().as_ptr());
    last.unwrap_or(c"the thread has ended".as_ptr())
}

/// An exported function's result: success, or the code of an error, whose text is kept. A panic becomes an error.
pub(crate) fn result(name: &str, act: impl FnOnce() -> Result<(), Error>) -> i32 {
    let outcome = catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned());
        let words = words.unwrap_or_else(|| "no message".to_owned());
        Err(Error::new(
            Status::Internal,
            format!("a bug in crossweft, please report it: it panicked with `{words}`"),
        ))
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => note(name, &error) as i32,
    }
}
