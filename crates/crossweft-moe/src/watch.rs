//! What ends the waits of a call, and whether they are ended for good.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, Guard, StopCause};
use crossweft_device::{Stopped, Waiting};
use crossweft_hal::cpu::Supervisor;
use crossweft_net::{Failure, PeerState};

/// How long a rank that has left may still be waited for: what it sent before may be on its way.
const LEFT_GRACE: Duration = Duration::from_secs(1);
/// How long to wait before looking who is there.
const LOOK_GRACE: Duration = Duration::from_millis(1);

/// Supervises the launches of one call, which have one deadline together.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    endpoint: &'a Endpoint,
    guard: Guard<'a>,
    limit: Duration,
    /// Whether ranks that are gone or late may be left out.
    masking: bool,
    started: OnceLock<Instant>,
    /// When this call first waited for ranks that have left.
    left: Mutex<BTreeMap<u32, Instant>>,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(endpoint: &'a Endpoint, limit: Duration, masking: bool) -> Self {
        Self {
            endpoint,
            guard: Guard::new(endpoint, limit),
            limit,
            masking,
            started: OnceLock::new(),
            left: Mutex::default(),
        }
    }

    /// How long the call has taken, from when this was first asked.
    pub(crate) fn waited(&self) -> Duration {
        self.started.get_or_init(Instant::now).elapsed()
    }

    /// Whether a rank has gone for good, and what it sent before must have come.
    fn is_gone(&self, rank: u32) -> bool {
        match self.endpoint.group().liveness().peer(rank) {
            PeerState::Dead => true,
            PeerState::Left => {
                let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
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
