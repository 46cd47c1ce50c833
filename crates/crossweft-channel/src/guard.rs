//! What ends a wait, and the words for it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossweft_device::{Site, Stopped, WaitKind, Waiting};
use crossweft_hal::cpu::Supervisor;
use crossweft_net::PeerState;

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
    /// When this launch first waited for ranks that have left.
    left: Mutex<BTreeMap<u32, Instant>>,
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
            left: Mutex::default(),
        }
    }

    /// The cause of an interruption, once it has happened.
    #[must_use]
    pub fn cause(&self, stopped: Stopped, waiting: &Waiting) -> StopCause {
        match (stopped, self.endpoint.group().liveness().failure()) {
            (_, Some(failure)) => StopCause::Failure(failure.to_string()),
            (Stopped::Deadline, None) => StopCause::Deadline { limit: self.limit },
            (_, None) if self.peer(waiting) == Some(PeerState::Left) => StopCause::PeerLeft {
                rank: waiting.site.peer,
            },
            // Nothing ended this one: it was not even begun.
            (_, None) => StopCause::Poisoned,
        }
    }

    /// The state of the rank that is waited for, if it is one.
    fn peer(&self, waiting: &Waiting) -> Option<PeerState> {
        let peer = waiting.site.peer;
        let is_rank = peer < self.endpoint.world_size();
        is_rank.then(|| self.endpoint.group().liveness().peer(peer))
    }
}

impl Guard<'_> {
    /// What is waited for, in words: `a signal from rank 2 on channel 1 (expected 5, seen 4)`.
    #[must_use]
    pub fn describe(waiting: &Waiting) -> String {
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
            WaitKind::Acquire => (format!(" to release semaphore {channel}"), seen),
            _ => (format!(" (fifo {channel})"), seen),
        };
        format!("{}{place} (expected {expected}, seen {seen})", kind.name())
    }

    /// `rank`, which is waited for, has left; ends the wait when that has been so for a while.
    #[cold]
    fn wait_for_left(&self, rank: u32) -> Result<(), Stopped> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let since = left.entry(rank).or_insert_with(Instant::now);
        match since.elapsed() > LEFT_GRACE {
            true => Err(Stopped::Aborted),
            false => Ok(()),
        }
    }

    #[cold]
    fn report(&self, waiting: &Waiting, block: u32, waited: Duration) {
        if !self.reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "rank {} has waited {} s for {} in thread block {block}; that rank is {:?}",
                self.endpoint.rank(),
                waited.as_secs(),
                Self::describe(waiting),
                self.peer(waiting),
            );
        }
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
        if waited > SILENCE {
            self.report(waiting, block, waited);
        }
        match self.peer(waiting) {
            Some(PeerState::Left) => self.wait_for_left(waiting.site.peer),
            _ => Ok(()),
        }
    }
}
