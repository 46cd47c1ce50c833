//! What ends the waits of a call, and whether they are ended for good.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, Guard, StopCause};
use crossweft_device::{Site, Stopped, Waiting};
use crossweft_hal::cpu::Supervisor;
use crossweft_net::{Failure, PeerState};

/// How long a rank that has left may still be waited for: what it sent before may be on its way.
const LEFT_GRACE: Duration = Duration::from_secs(1);
/// How long to wait before looking who is there.
const LOOK_GRACE: Duration = Duration::from_millis(1);

/// Supervises the launches of one call, which have one deadline together; another one whenever ranks were left out.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    endpoint: &'a Endpoint,
    guard: Guard<'a>,
    limit: Duration,
    /// Whether ranks that are gone or late may be left out.
    masking: bool,
    /// When its time began.
    started: Mutex<Option<Instant>>,
    /// When this call first waited for ranks that have left.
    left: Mutex<BTreeMap<u32, Instant>>,
    /// Waits, by what for and for whom, that were ended and made again because that seemed to have come.
    again: Mutex<BTreeSet<(u32, u32)>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Watch<'a> {
    pub(crate) fn new(endpoint: &'a Endpoint, limit: Duration, masking: bool) -> Self {
        Self {
            endpoint,
            guard: Guard::new(endpoint, limit),
            limit,
            masking,
            started: Mutex::default(),
            left: Mutex::default(),
            again: Mutex::default(),
        }
    }

    /// How long the call has taken, from when this was first asked, or its time began [anew](Self::begin_anew).
    pub(crate) fn waited(&self) -> Duration {
        locked(&self.started)
            .get_or_insert_with(Instant::now)
            .elapsed()
    }

    /// Some ranks are left out: the others, who may have waited for the same ones and that long, have all of the time
    /// again, or they would be left out with them.
    pub(crate) fn begin_anew(&self) {
        *locked(&self.started) = Some(Instant::now());
    }

    /// Whether a wait that was ended may be made once more, because what it was for has come: a second time it has not,
    /// whatever was said. (Between GPUs that keep lines a rank says that its rows have been sent when its last thread
    /// block has begun, and may be gone before all rows are.)
    pub(crate) fn may_wait_again(&self, site: &Site) -> bool {
        locked(&self.again).insert((site.channel, site.peer))
    }

    /// Whether a rank has gone for good, and what it sent before must have come.
    fn is_gone(&self, rank: u32) -> bool {
        match self.endpoint.group().liveness().peer(rank) {
            PeerState::Dead => true,
            PeerState::Left => {
                let mut left = locked(&self.left);
                left.entry(rank).or_insert_with(Instant::now).elapsed() > LEFT_GRACE
            }
            _ => false,
        }
    }

    /// Whether somebody has ended the job.
    fn is_aborted(&self) -> bool {
        let failure = self.endpoint.group().liveness().failure();
        matches!(failure, Some(Failure::Aborted { .. }))
    }

    /// Whether the waits of a call that asks nobody are to be ended.
    pub(crate) fn is_stopped(&self) -> bool {
        let liveness = self.endpoint.group().liveness();
        match self.masking {
            true => self.is_aborted() || self.guard.is_interrupted(),
            false => liveness.stopped() || self.guard.is_interrupted(),
        }
    }

    /// Whether the call may go on without somebody.
    pub(crate) fn may_leave_out(&self) -> bool {
        self.masking && !self.is_aborted()
    }

    /// Whether `rank`, which a wait that was ended had missed, is to be left out.
    pub(crate) fn leaves_out(&self, rank: u32) -> bool {
        self.waited() > self.limit || self.is_gone(rank)
    }

    /// Why a wait was ended.
    pub(crate) fn cause(&self, stopped: Stopped, waiting: &Waiting) -> StopCause {
        self.guard.cause(stopped, waiting)
    }
}

impl Supervisor for Watch<'_> {
    fn check(&self, waiting: &Waiting, block: u32) -> Result<(), Stopped> {
        if !self.masking {
            return self.guard.check(waiting, block);
        }
        let waited = self.waited();
        if waited < LOOK_GRACE {
            return Ok(());
        }
        if self.is_aborted() || self.guard.is_interrupted() {
            return Err(Stopped::Aborted);
        }
        if waited > self.limit {
            return Err(Stopped::Deadline);
        }
        match self.is_gone(waiting.site.peer) {
            true => Err(Stopped::Aborted),
            false => Ok(()),
        }
    }
}
