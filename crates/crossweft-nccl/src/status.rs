//! What a call returns: NCCL's result codes, and the text behind an error.

use crossweft_channel::{ChannelError, StopCause};
use crossweft_collective::{CollectiveError, ExchangeError};
use crossweft_executor::ExecutorError;
use crossweft_hal::HalError;
use crossweft_net::{Failure, NetError};
use crossweft_plan::PlanError;

/// `ncclResult_t`, as numbers of the ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// All is well.
    Success = 0,
    /// A CUDA call failed.
    UnhandledCudaError = 1,
    /// A call of the operating system failed.
    SystemError = 2,
    /// A bug of this library.
    InternalError = 3,
    /// An argument that cannot be.
    InvalidArgument = 4,
    /// A call that is not possible here or now, or not supported.
    InvalidUsage = 5,
    /// A peer was lost, gave up, or did not come in time.
    RemoteError = 6,
    /// A non-blocking communicator is still at it.
    InProgress = 7,
    /// Only what NCCL's device barriers return.
    Timeout = 8,
}

impl Status {
    /// The number that C sees.
    #[must_use]
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// What a number of another library's means; what is none is its bug.
    pub(crate) const fn of_code(code: i32) -> Self {
        match code {
            0 => Self::Success,
            1 => Self::UnhandledCudaError,
            2 => Self::SystemError,
            4 => Self::InvalidArgument,
            5 => Self::InvalidUsage,
            6 => Self::RemoteError,
            7 => Self::InProgress,
            8 => Self::Timeout,
            _ => Self::InternalError,
        }
    }

    /// The words of `ncclGetErrorString` for a number.
    #[must_use]
    pub const fn describe(code: i32) -> &'static std::ffi::CStr {
        match code {
            0 => c"success",
            1 => c"a CUDA call failed; ncclGetLastError says which",
            2 => c"a system call failed; ncclGetLastError says which",
            3 => c"a bug in crossweft; ncclGetLastError has the details to report",
            4 => c"invalid argument; ncclGetLastError says which",
            5 => c"invalid usage; ncclGetLastError says why and what to do",
            6 => c"a peer was lost, gave up or did not come; ncclGetLastError names it",
            7 => c"in progress; ask ncclCommGetAsyncError",
            8 => c"timeout",
            _ => c"not a result code",
        }
    }
}

/// A failed call: its code, and what `ncclGetLastError` says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Error {
    pub(crate) status: Status,
    pub(crate) text: String,
    /// Whether the other ranks find it out by themselves.
    pub(crate) shared: bool,
    /// Whether the call came before the one before had ended: nothing was to be done yet, and it is made once more.
    pub(crate) early: bool,
}

impl Error {
    fn new(status: Status, text: impl Into<String>) -> Self {
        Self {
            status,
            text: text.into(),
            shared: status == Status::RemoteError,
            early: false,
        }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, text)
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(Status::InvalidUsage, text)
    }

    /// Of a call on a communicator that is still busy with the one before.
    pub(crate) fn early(text: impl Into<String>) -> Self {
        Self {
            early: true,
            ..Self::argument(text)
        }
    }

    pub(crate) fn internal(text: impl Into<String>) -> Self {
        Self::new(Status::InternalError, text)
    }

    pub(crate) fn cuda(text: impl Into<String>) -> Self {
        Self::new(Status::UnhandledCudaError, text)
    }

    pub(crate) fn system(text: impl Into<String>) -> Self {
        Self::new(Status::SystemError, text)
    }

    /// Of a call that took too long here, which other ranks do not know.
    pub(crate) fn late(text: impl Into<String>) -> Self {
        let new = Self::new(Status::RemoteError, text);
        Self {
            shared: false,
            ..new
        }
    }

    /// Of a call that ranks have made differently, which all of them find out by themselves.
    pub(crate) fn differs(text: impl Into<String>) -> Self {
        let new = Self::usage(text);
        Self {
            shared: true,
            ..new
        }
    }

    /// Of a call that this library does not offer; `instead` says what to do.
    pub(crate) fn unsupported(what: &str, instead: &str) -> Self {
        Self::usage(format!("{what} is not supported by crossweft; {instead}"))
    }

    /// What a failed group means to this rank.
    pub(crate) fn of_failure(failure: &Failure) -> Self {
        Self::new(Status::RemoteError, failure.to_string())
    }
}

impl From<NetError> for Error {
    fn from(error: NetError) -> Self {
        Self::new(net(&error), error.to_string())
    }
}

impl From<HalError> for Error {
    fn from(error: HalError) -> Self {
        Self::new(hal(&error), error.to_string())
    }
}

impl From<ChannelError> for Error {
    fn from(error: ChannelError) -> Self {
        Self::new(channel(&error), error.to_string())
    }
}

impl From<CollectiveError> for Error {
    fn from(error: CollectiveError) -> Self {
        let new = Self::new(collective(&error), error.to_string());
        Self {
            shared: new.shared || is_shared(&error),
            ..new
        }
    }
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Self::internal(error.to_string())
    }
}

/// Whether ranks that disagree have all found that out.
fn is_shared(error: &CollectiveError) -> bool {
    match error {
        CollectiveError::Channel(error)
        | CollectiveError::Executor(ExecutorError::Channel { source: error, .. }) => {
            matches!(
                error,
                ChannelError::Mismatch { .. } | ChannelError::NotOnThisHost { .. }
            )
        }
        CollectiveError::Executor(ExecutorError::Interrupted { cause, .. }) => {
            matches!(
                **cause,
                StopCause::Mismatch {
                    same_call: true,
                    ..
                }
            )
        }
        CollectiveError::Exchange(error) => matches!(error, ExchangeError::Mismatch { .. }),
        CollectiveError::SelectorsDiffer(_) | CollectiveError::PlansDiffer { .. } => true,
        _ => false,
    }
}

fn net(error: &NetError) -> Status {
    match error {
        NetError::Aborted { .. }
        | NetError::PeerDied { .. }
        | NetError::PeerLeft { .. }
        | NetError::NobodyJoined { .. }
        | NetError::RanksMissing { .. }
        | NetError::RootLost { .. }
        | NetError::Unreachable { .. }
        | NetError::Timeout { .. } => Status::RemoteError,
        NetError::InvalidRank { .. } | NetError::InvalidUniqueId { .. } => Status::InvalidArgument,
        NetError::Io { .. } => Status::SystemError,
        NetError::FdKeyInUse { .. } => Status::InternalError,
        _ => Status::InvalidUsage,
    }
}

fn hal(error: &HalError) -> Status {
    match error {
        HalError::Cuda(_) => Status::UnhandledCudaError,
        HalError::OutOfRange { .. } => Status::InternalError,
        _ => Status::SystemError,
    }
}

fn channel(error: &ChannelError) -> Status {
    match error {
        ChannelError::Bootstrap { source, .. } => net(source),
        ChannelError::Memory { source, .. } => hal(source),
        ChannelError::Mismatch { .. } | ChannelError::NotOnThisHost { .. } => Status::InvalidUsage,
        ChannelError::PeerFailed { .. } | ChannelError::Disconnected { .. } => Status::RemoteError,
        ChannelError::Stopped { cause, .. } => stop(cause),
        ChannelError::System { .. } => Status::SystemError,
        _ => Status::InternalError,
    }
}

fn stop(cause: &StopCause) -> Status {
    match cause {
        StopCause::Mismatch { .. } => Status::InvalidUsage,
        _ => Status::RemoteError,
    }
}

fn executor(error: &ExecutorError) -> Status {
    match error {
        ExecutorError::Channel { source, .. } => channel(source),
        ExecutorError::Hal { source, .. } | ExecutorError::Device { source, .. } => hal(source),
        ExecutorError::Interrupted { cause, .. } => stop(cause),
        ExecutorError::Poisoned { .. } => Status::RemoteError,
        ExecutorError::Scratch { .. } | ExecutorError::Residency { .. } => Status::InvalidUsage,
        _ => Status::InternalError,
    }
}

fn exchange(error: &ExchangeError) -> Status {
    match error {
        ExchangeError::Channel { source } => channel(source),
        ExchangeError::Hal { source } => hal(source),
        ExchangeError::Usage { .. } | ExchangeError::Mismatch { .. } => Status::InvalidUsage,
        ExchangeError::Interrupted { cause, .. } => stop(cause),
        ExchangeError::PeerFailed { .. }
        | ExchangeError::PeerGaveUp { .. }
        | ExchangeError::Poisoned { .. } => Status::RemoteError,
        _ => Status::InternalError,
    }
}

fn collective(error: &CollectiveError) -> Status {
    match error {
        CollectiveError::Exchange(source) => exchange(source),
        CollectiveError::Net(source) => net(source),
        CollectiveError::Channel(source) => channel(source),
        CollectiveError::Executor(source) => executor(source),
        CollectiveError::Hal(source) => hal(source),
        CollectiveError::SelectorsDiffer(_) | CollectiveError::PlansDiffer { .. } => {
            Status::InvalidUsage
        }
        _ => Status::InternalError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_told_what_they_do_not_find_out_by_themselves() {
        let mismatch = |same_call| ExecutorError::Interrupted {
            plan: "ring".to_owned(),
            rank: 0,
            block: 0,
            op: String::new(),
            waited_for: String::new(),
            cause: Box::new(StopCause::Mismatch {
                rank: 1,
                same_call,
                theirs: String::new(),
                ours: String::new(),
            }),
        };
        let usage = ExchangeError::Usage {
            rank: 0,
            reason: String::new(),
        };
        let lost = NetError::PeerDied {
            rank: 1,
            during: String::new(),
            reason: String::new(),
        };
        for (error, status, shared) in [
            (
                CollectiveError::from(mismatch(true)),
                Status::InvalidUsage,
                true,
            ),
            (mismatch(false).into(), Status::InvalidUsage, false),
            (usage.into(), Status::InvalidUsage, false),
            (lost.into(), Status::RemoteError, true),
        ] {
            let error = Error::from(error);
            assert_eq!((error.status, error.shared), (status, shared), "{error}");
        }
        assert!(!Error::argument("sendbuff is NULL").shared);
        assert_eq!(
            Status::of_code(Status::RemoteError.code()),
            Status::RemoteError
        );
        assert_eq!(Status::of_code(99), Status::InternalError);
    }
}
