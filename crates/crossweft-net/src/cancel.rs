//! Ending a join from another thread.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use crate::error::NetError;
use crate::poll::Waker;

/// What [`Group::abort`](crate::Group::abort) is to the calls of a group, this is to joining one:
/// give a clone to [`JoinOptions::cancel`](crate::JoinOptions::cancel), and cancel from any thread.
#[derive(Debug, Clone)]
pub struct Cancel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    reason: OnceLock<String>,
    /// Readable for ever once there is a reason.
    event: Waker,
}

impl Cancel {
    /// Something to cancel with.
    pub fn new() -> Result<Self, NetError> {
        Ok(Self(Arc::new(Inner {
            reason: OnceLock::new(),
            event: Waker::new()?,
        })))
    }

    /// Makes joining fail, on this rank at once and on those that wait with it soon. The first
    /// reason stays. No effect on a group that has been joined; that has its own `abort`.
    pub fn cancel(&self, reason: &str) {
        if self.0.reason.set(reason.to_owned()).is_ok() {
            self.0.event.wake();
        }
    }

    /// The error of `rank`, which was joining, once there is a reason.
    pub(crate) fn check(this: Option<&Self>, rank: u32) -> Result<(), NetError> {
        match this.and_then(Self::reason) {
            None => Ok(()),
            Some(reason) => Err(NetError::Aborted {
                by: rank,
                reason: reason.to_owned(),
                during: "joining".to_owned(),
            }),
        }
    }

    /// The reason, once there is one.
    pub fn reason(&self) -> Option<&str> {
        self.0.reason.get().map(String::as_str)
    }
}

/// Equal if cancelling one cancels the other.
impl PartialEq for Cancel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cancel {}

impl AsFd for Cancel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}
