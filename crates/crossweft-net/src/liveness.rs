//! Who is still there, in a form that a spinning wait can ask at every turn.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::error::NetError;
use crate::poll::Waker;

/// What is known about the ranks of a group. The first failure wins and stays.
#[derive(Debug)]
pub struct Liveness {
    stopped: AtomicBool,
    failure: OnceLock<Failure>,
    peers: Vec<AtomicU64>,
    /// What ranks that left had failed at.
    reasons: Mutex<BTreeMap<u32, String>>,
    born: Instant,
    /// Readable for ever once the group has failed: ends a `poll` in any number of threads.
    stop_event: Waker,
    /// Wakes the network thread, which tells the other ranks of a local failure.
    network: Arc<Waker>,
    /// Keeps the order "failure is stored, then `stopped` is set" the same for all who fail.
    failing: Mutex<()>,
}

const ALIVE: u64 = 0;
const LEFT: u64 = 1;
const DEAD: u64 = 2;
/// From here on: silent, since so many milliseconds after `born`.
const SILENT: u64 = 3;

impl Liveness {
    pub(crate) fn new(world_size: u32, network: Arc<Waker>) -> Result<Self, NetError> {
        Ok(Self {
            stopped: AtomicBool::new(false),
            failure: OnceLock::new(),
            peers: (0..world_size).map(|_| AtomicU64::new(ALIVE)).collect(),
            reasons: Mutex::default(),
            born: Instant::now(),
            stop_event: Waker::new()?,
            network,
            failing: Mutex::new(()),
        })
    }

    /// Whether the group has failed; costs one relaxed load. Ask [`failure`](Self::failure) why.
    #[inline]
    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Why the group has failed, if it has.
    pub fn failure(&self) -> Option<Failure> {
        self.failure.get().cloned()
    }

    /// What is known about a rank.
    ///
    /// Death, goodbye and silence are noticed by a rank's neighbours, who tell everybody. A rank
    /// that does not exist is dead.
    pub fn peer(&self, rank: u32) -> PeerState {
        let Some(state) = self.peers.get(rank as usize) else {
            return PeerState::Dead;
        };
        match state.load(Ordering::Relaxed) {
            ALIVE => PeerState::Alive,
            LEFT => PeerState::Left,
            DEAD => PeerState::Dead,
            since => {
                let heard = self.born + Duration::from_millis(since - SILENT);
                PeerState::Silent {
                    since: heard.elapsed(),
                }
            }
        }
    }

    /// Stops the group because of something that this rank found out by other means, for example a
    /// broken data connection. All other ranks are told.
    pub fn fail_local(&self, failure: Failure) {
        self.fail(failure);
        self.network.wake();
    }

    pub(crate) fn fail(&self, failure: Failure) {
        let _guard = self.failing.lock();
        if let Failure::PeerDied { rank, .. } = &failure {
            self.set(*rank, DEAD);
        }
        if self.failure.set(failure).is_ok() {
            self.stopped.store(true, Ordering::Release);
            self.stop_event.wake();
        }
    }

    /// What a rank that left had failed at, if it said so.
    pub fn why_left(&self, rank: u32) -> Option<String> {
        self.reasons().get(&rank).cloned()
    }

    fn reasons(&self) -> MutexGuard<'_, BTreeMap<u32, String>> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn left(&self, rank: u32, why: Option<String>) {
        if let Some(why) = why {
            self.reasons().insert(rank, why);
        }
        self.set(rank, LEFT);
    }

    pub(crate) fn silent(&self, rank: u32, heard: Instant) {
        let since = heard.saturating_duration_since(self.born).as_millis();
        let since = u64::try_from(since).unwrap_or(u64::MAX - SILENT);
        self.set_unless_gone(rank, SILENT + since);
    }

    pub(crate) fn heard(&self, rank: u32) {
        self.set_unless_gone(rank, ALIVE);
    }

    /// The ranks that have been silent for a while.
    pub fn silent_ranks(&self) -> Vec<u32> {
        (0..)
            .zip(&self.peers)
            .filter(|(_, state)| state.load(Ordering::Relaxed) >= SILENT)
            .map(|(rank, _)| rank)
            .collect()
    }

    pub(crate) fn stop_event(&self) -> &Waker {
        &self.stop_event
    }

    /// Death and goodbye are for good.
    fn set_unless_gone(&self, rank: u32, state: u64) {
        if let Some(peer) = self.peers.get(rank as usize) {
            let change = |was| (was != LEFT && was != DEAD).then_some(state);
            // An error only says that it is gone.
            let _ = peer.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        }
    }

    fn set(&self, rank: u32, state: u64) {
        if let Some(peer) = self.peers.get(rank as usize) {
            peer.store(state, Ordering::Relaxed);
        }
    }
}

/// The state of another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// Nothing bad is known.
    Alive,
    /// It vanished without goodbye.
    Dead,
    /// It said goodbye.
    Left,
    /// Its host answers but it has sent nothing for so long; it may be compiling, or stopped.
    Silent {
        /// How long ago it was last heard.
        since: Duration,
    },
}

impl fmt::Display for PeerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alive => f.write_str("alive"),
            Self::Dead => f.write_str("dead"),
            Self::Left => f.write_str("gone, after a goodbye"),
            Self::Silent { since } => write!(f, "silent for {:.1} s", since.as_secs_f64()),
        }
    }
}

/// Why a group has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// A rank gave up and said so.
    Aborted {
        /// Which.
        by: u32,
        /// What it said.
        reason: String,
    },
    /// A rank vanished.
    PeerDied {
        /// Which.
        rank: u32,
        /// How that was noticed.
        reason: String,
    },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Aborted { by, reason } => {
                write!(
                    f,
                    "rank {by} aborted the job: {reason}; see the log of rank {by}"
                )
            }
            Self::PeerDied { rank, reason } => {
                write!(f, "rank {rank} died: {reason}; see the log of rank {rank}")
            }
        }
    }
}

impl std::error::Error for Failure {}
