//! What the command's exit code says.

use std::process::ExitCode;

use crossweft_collective::CollectiveError;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// All is well.
    Ok,
    /// A result was wrong.
    Wrong,
    /// The command cannot be carried out as given, or on this machine.
    Usage,
    /// A peer was lost, or a deadline passed.
    Lost,
}

impl Exit {
    /// The number for the shell.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Wrong => 1,
            Self::Usage => 2,
            Self::Lost => 3,
        }
    }

    /// What a rank's exit code says.
    pub(crate) fn from_code(code: i32) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::Wrong,
            3 => Self::Lost,
            _ => Self::Usage,
        }
    }

    /// Of two inputs' ends, the graver: one that could not be judged says least.
    pub(crate) fn worse_input(self, other: Self) -> Self {
        if other.code() > self.code() {
            other
        } else {
            self
        }
    }

    /// Of two ranks' ends, the one that says more: a wrong result must not hide behind a rank that
    /// was lost because of it, and a bad argument is why a peer was lost.
    pub(crate) fn worse(self, other: Self) -> Self {
        let weight = |exit| match exit {
            Self::Ok => 0,
            Self::Lost => 1,
            Self::Usage => 2,
            Self::Wrong => 3,
        };
        if weight(other) > weight(self) {
            other
        } else {
            self
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

impl From<&CollectiveError> for Exit {
    fn from(error: &CollectiveError) -> Self {
        if error.is_lost_peer_or_timeout() {
            Self::Lost
        } else {
            Self::Usage
        }
    }
}
