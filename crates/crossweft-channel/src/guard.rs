//! What ends a wait, and the words for it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossweft_device::{Site, Stopped, WaitKind, Waiting};
use crossweft_hal::cpu::Supervisor;
use crossweft_net::{Failure, PeerState};

use crate::Endpoint;

/// Why a wait ended without its condition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopCause {
    /// A peer died, or some rank aborted the job.
    Failure(String),
    /// The rank that was waited for left the job in good order.
    PeerLeft {
        /// That rank.
        rank: u32,
    },
    /// The caller's deadline passed; everybody seems to be alive.
    Deadline {
        /// The time that was allowed.
        limit: Duration,
    },
    /// An earlier launch of the same plan failed, so its counters are out of step.
    Poisoned,
}

impl fmt::Display for StopCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failure(failure) => f.write_str(failure),
            Self::PeerLeft { rank } => write!(f, "rank {rank} has left the job"),
            Self::Deadline { limit } => write!(
                f,
                "the deadline of {limit:?} passed; a rank is late, stopped, or made other calls"
            ),
            Self::Poisoned => {
                f.write_str("an earlier launch failed; make a new communicator to go on")
            }
        }
    }
}

/// How long a rank that has left may still be waited for: what it sent before may be on its way.
const LEFT_GRACE: Duration = Duration::from_secs(1);
/// After this a wait is reported, once.
const SILENCE: Duration = Duration::from_secs(30);

/// Supervises the waits of one launch.
#[derive(Debug)]
pub struct Guard<'a> {
    endpoint: &'a Endpoint,
    started: Instant,
    limit: Duration,
    reported: AtomicBool,
}

impl<'a> Guard<'a> {
    /// Allows a launch that starts now to take `limit`.
    #[must_use]
    pub fn new(endpoint: &'a Endpoint, limit: Duration) -> Self {
        Self {
            endpoint,
            started: Instant::now(),
            limit,
            reported: AtomicBool::new(false),
        }
    }

    /// The cause of an interruption, once it has happened.
    #[must_use]
    pub fn cause(&self, stopped: Stopped, waiting: &Waiting) -> StopCause {
        match (stopped, self.endpoint.group().liveness().failure()) {
            (_, Some(failure)) => StopCause::Failure(failure.to_string()),
            (Stopped::Deadline, None) => StopCause::Deadline { limit: self.limit },
            (_, None) => StopCause::PeerLeft {
                rank: waiting.site.peer,
            },
        }
    }

    /// The failure of the job, if there is one.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.endpoint.group().liveness().failure()
    }
}

/// What is waited for, in words: `a signal from rank 2 on channel 1 (expected 5, seen 4)`.
#[must_use]
fn describe(waiting: &Waiting) -> String {
    let Waiting {
        site:
            Site {
                kind,
                peer,
                channel,
                ..
            },
        expected,
        seen,
        ..
    } = *waiting;
    let (place, seen) = match kind {
        // A packet's word carries its flag in the low half as the wait loop sees it.
        WaitKind::Packet => (format!(" from rank {peer}"), seen & u64::from(u32::MAX)),
        WaitKind::Semaphore => (format!(" from rank {peer} on channel {channel}"), seen),
        WaitKind::Barrier => (format!(" at barrier {channel}"), seen),
        _ => (format!(" (fifo {channel})"), seen),
    };
    format!("{}{place} (expected {expected}, seen {seen})", kind.name())
}

impl Guard<'_> {
    /// What is waited for, in words.
    #[must_use]
    pub fn describe(waiting: &Waiting) -> String {
        describe(waiting)
    }

    #[cold]
    fn long_wait(&self, waiting: &Waiting, block: u32, waited: Duration) -> Result<(), Stopped> {
        let peer = waiting.site.peer;
        let state = (peer < self.endpoint.world_size())
            .then(|| self.endpoint.group().liveness().peer(peer));
        if waited > LEFT_GRACE && matches!(state, Some(PeerState::Left)) {
            return Err(Stopped::Aborted);
        }
        if waited > SILENCE && !self.reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "rank {} has waited {} s for {} in thread block {block}; that rank is {state:?}",
                self.endpoint.rank(),
                waited.as_secs(),
                describe(waiting),
            );
        }
        Ok(())
    }
}

impl Supervisor for Guard<'_> {
    fn check(&self, waiting: &Waiting, block: u32) -> Result<(), Stopped> {
        if self.endpoint.group().liveness().stopped() {
            return Err(Stopped::Aborted);
        }
        let waited = self.started.elapsed();
        if waited > self.limit {
            return Err(Stopped::Deadline);
        }
        if waited > LEFT_GRACE {
            self.long_wait(waiting, block, waited)
        } else {
            Ok(())
        }
    }
}
