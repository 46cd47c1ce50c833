//! What ends a wait, and the words for it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossweft_device::packet::{epoch_part, is_of_other_size};
use crossweft_device::{Site, Stopped, WaitKind, Waiting};
use crossweft_hal::cpu::Supervisor;
use crossweft_net::{PeerState, RankList};

use crate::board::Call;
use crate::{CallLine, Endpoint};

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
        /// What it had failed at before it left.
        why: Option<String>,
    },
    /// The caller's deadline passed; everybody seems to be alive.
    Deadline {
        /// The time that was allowed.
        limit: Duration,
        /// What the rank that was waited for was calling, where that is known.
        peer: Option<String>,
    },
    /// The rank that was waited for makes another call than this one.
    Mismatch {
        /// That rank.
        rank: u32,
        /// Whether it is in this call too, with a message of another size: then it finds that out by itself.
        same_call: bool,
        /// Its call.
        theirs: String,
        /// This rank's call.
        ours: String,
    },
    /// An earlier launch of the same plan failed, so its counters are out of step.
    Poisoned,
}

impl fmt::Display for StopCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failure(failure) => f.write_str(failure),
            Self::PeerLeft { rank, why: None } => write!(f, "rank {rank} has left the job"),
            Self::PeerLeft {
                rank,
                why: Some(why),
            } => write!(f, "rank {rank} has left the job ({why})"),
            Self::Deadline { limit, peer: None } => write!(
                f,
                "the deadline of {limit:?} passed; a rank is late, stopped, or made other calls"
            ),
            Self::Deadline {
                limit,
                peer: Some(peer),
            } => write!(f, "the deadline of {limit:?} passed; {peer}"),
            Self::Mismatch {
                rank, theirs, ours, ..
            } => write!(
                f,
                "ranks make different calls: rank {rank} {theirs}, this rank {ours}; every rank must \
                 make the same calls in the same order"
            ),
            Self::Poisoned => {
                f.write_str("an earlier launch failed; make a new communicator to go on")
            }
        }
    }
}

/// How long a rank that has left may still be waited for: what it sent before may be on its way.
const LEFT_GRACE: Duration = Duration::from_secs(1);
/// How long to wait before looking at what others call, which takes cache lines from them.
const LOOK_GRACE: Duration = Duration::from_millis(1);
/// How long two ranks may wait for each other in different calls: another thread of theirs may be
/// about to make the call that is missing.
const CROSSED_GRACE: Duration = Duration::from_secs(5);
/// How long it may take until a rank that has fallen silent is known to be.
const NOTICE_GRACE: Duration = Duration::from_millis(300);
/// How often the host program is asked whether to go on waiting.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// Supervises the waits of one launch.
#[derive(Debug)]
pub struct Guard<'a> {
    endpoint: &'a Endpoint,
    call: Option<&'a CallLine>,
    /// When the launch was first found waiting: reading the clock costs as much as a tenth of the
    /// smallest call, which never gets here.
    started: OnceLock<Instant>,
    limit: Duration,
    reported: AtomicBool,
    /// How many times the host program should have been asked whether to go on.
    asked: AtomicU64,
    /// A call that a peer was first found in, instead of this one.
    crossed: Mutex<Option<(Call, Instant)>>,
    /// When this launch first waited for ranks that have left.
    left: Mutex<BTreeMap<u32, Instant>>,
}

impl<'a> Guard<'a> {
    /// Allows a launch that starts now to take `limit`, give or take some microseconds.
    #[must_use]
    pub fn new(endpoint: &'a Endpoint, limit: Duration) -> Self {
        Self {
            endpoint,
            call: None,
            started: OnceLock::new(),
            limit,
            reported: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            crossed: Mutex::default(),
            left: Mutex::default(),
        }
    }

    /// The launch is one of the calls that `call` notes, so it can be compared with what peers call.
    #[must_use]
    pub fn of_call(mut self, call: &'a CallLine) -> Self {
        self.call = Some(call);
        self
    }

    /// Whether a rank is in this very call with a message of another size. For launches whose waits do
    /// not ask this guard.
    #[must_use]
    pub fn finds_other_size(&self) -> bool {
        self.other_size(&Waiting::default()).is_some()
    }

    /// Asks the host program, not too often, whether to wait on; aborts the job and returns true if it
    /// should not. For launches whose waits do not ask this guard.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        let waited = self.started.get_or_init(Instant::now).elapsed();
        let due = (waited.as_millis() / ASK_EVERY.as_millis()) as u64;
        if self.asked.load(Ordering::Relaxed) >= due {
            return false;
        }
        self.asked.store(due, Ordering::Relaxed);
        match self.endpoint.interrupt() {
            Some(reason) => {
                self.endpoint.group().abort(&reason);
                true
            }
            None => false,
        }
    }

    /// The cause of an interruption, once it has happened.
    #[must_use]
    pub fn cause(&self, stopped: Stopped, waiting: &Waiting) -> StopCause {
        match (stopped, self.endpoint.group().liveness().failure()) {
            (Stopped::Mismatch, _) => self.mismatch(waiting),
            (Stopped::Aborted, _) if self.other_size(waiting).is_some() => self.mismatch(waiting),
            (_, Some(failure)) => StopCause::Failure(failure.to_string()),
            (Stopped::Deadline, None) => {
                let cause = StopCause::Deadline {
                    limit: self.limit,
                    peer: self.suspects(waiting),
                };
                let waited_for = Self::describe(waiting);
                let why = format!("it had waited for {waited_for}: {cause}");
                self.endpoint.group().give_up(&why);
                cause
            }
            (_, None) if self.peer(waiting) == Some(PeerState::Left) => {
                let rank = waiting.site.peer;
                let why = self.endpoint.group().liveness().why_left(rank);
                StopCause::PeerLeft { rank, why }
            }
            // Nothing ended this one: it was not even begun.
            (_, None) => StopCause::Poisoned,
        }
    }

    /// The words for a peer's call that differs from this one.
    fn mismatch(&self, waiting: &Waiting) -> StopCause {
        let other_size = match waiting.site.kind {
            WaitKind::Size => Some((waiting.site.peer, waiting.seen, waiting.expected)),
            _ => self.other_size(waiting),
        };
        if let Some((rank, theirs, ours)) = other_size {
            return StopCause::Mismatch {
                rank,
                same_call: true,
                theirs: format!("has a message of {theirs} bytes"),
                ours: format!("one of {ours} bytes"),
            };
        }
        let (rank, own) = (waiting.site.peer, self.endpoint.rank());
        let number = self.call.map(CallLine::number);
        let any = || self.endpoint.other_calls(rank, number?).next();
        let theirs = self.crossing(rank).or_else(any);
        // What was launched on a stream is not noted as the plan's, but perhaps as whoever launched it calls it.
        let ours = number.and_then(|number| self.endpoint.call(own, number));
        let ours = ours.filter(|call| call.begun > 0);
        let also = || self.endpoint.other_calls(own, number?).next();
        let words = |call: Option<Call>| {
            call.map_or("makes another".to_owned(), |c| {
                self.endpoint.describe_call(c)
            })
        };
        StopCause::Mismatch {
            rank,
            same_call: false,
            theirs: words(theirs),
            ours: words(ours.or_else(also)),
        }
    }

    /// A rank that is in this very call with a message of another size; that size, and this rank's.
    /// All ranks take part in a call, so it need not be the one that is waited for.
    fn other_size(&self, waiting: &Waiting) -> Option<(u32, u64, u64)> {
        let number = self.call?.number();
        if self.endpoint.is_line_shared(number) {
            return None;
        }
        let ours = self.endpoint.call(self.endpoint.rank(), number)?;
        let peer = waiting.site.peer;
        std::iter::once(peer)
            .chain(0..self.endpoint.world_size())
            .find_map(|rank| {
                let theirs = self.endpoint.call(rank, number)?;
                let same = theirs.running && theirs.begun == ours.begun;
                (same && theirs.bytes != ours.bytes).then_some((rank, theirs.bytes, ours.bytes))
            })
    }

    /// Who may be why the deadline passed: the rank that is waited for may itself wait for another.
    fn suspects(&self, waiting: &Waiting) -> Option<String> {
        let silent = self.endpoint.group().liveness().silent_ranks();
        let silent = (!silent.is_empty()).then(|| {
            format!(
                "{} not heard for {:?} or longer",
                RankList(&silent),
                self.endpoint.group().silence_after()
            )
        });
        let words = self.peer_calls(waiting).into_iter();
        let words: Vec<_> = words.chain(self.proxy(waiting)).chain(silent).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }

    /// Whom the proxy that is waited for waits for itself.
    fn proxy(&self, waiting: &Waiting) -> Option<String> {
        let Site { kind, channel, .. } = waiting.site;
        if !matches!(kind, WaitKind::FifoSpace | WaitKind::FifoDone) {
            return None;
        }
        let rank = self.endpoint.proxy_is_busy_with(channel)?;
        let state = self.endpoint.group().liveness().peer(rank);
        Some(format!(
            "the proxy is busy with rank {rank}, which is {state}"
        ))
    }

    /// What the rank that is waited for is calling, where that is known.
    fn peer_calls(&self, waiting: &Waiting) -> Option<String> {
        let rank = waiting.site.peer;
        let call = self.call.filter(|_| rank != self.endpoint.rank())?;
        let theirs = self.endpoint.call(rank, call.number())?;
        let ours = call.begun();
        let mut words = match theirs {
            Call { begun, .. } if begun < ours => {
                format!(
                    "rank {rank} has not begun this call: it made {begun} of its kind, this is number {ours}"
                )
            }
            Call { begun, running, .. } if begun == ours && running => {
                format!("rank {rank} is in this call too, and is stopped or waits itself")
            }
            _ => format!("rank {rank} has ended this call"),
        };
        if let Some(other) = self.endpoint.other_calls(rank, call.number()).next() {
            words += "; it ";
            words += &self.endpoint.describe_call(other);
        }
        Some(words)
    }

    /// Whether the peer waits in another call while this rank waits for it here, and neither is in the
    /// other's: then nothing would ever change.
    #[cold]
    fn is_crossed(&self, waiting: &Waiting) -> bool {
        let Some(theirs) = self.crossing(waiting.site.peer) else {
            return false;
        };
        let now = Instant::now();
        let mut crossed = self.crossed.lock().unwrap_or_else(PoisonError::into_inner);
        let since = match *crossed {
            Some((other, since)) if other == theirs => since,
            _ => crossed.insert((theirs, now)).1,
        };
        // The other thread that may still be on its way here gets its time.
        now.duration_since(since) > CROSSED_GRACE
    }

    /// A call that `rank` is in and this one is not, if that one is not in this rank's. It may be in several, of which
    /// this rank is in some: a plan's, and what that is run for.
    fn crossing(&self, rank: u32) -> Option<Call> {
        let own = self.endpoint.rank();
        let call = self.call.filter(|_| rank != own)?;
        // What is noted in a line of two plans may be of the other.
        let begun = |rank, plan| {
            let noted = self.endpoint.call(rank, plan)?;
            (!self.endpoint.is_line_shared(plan)).then_some(noted.begun)
        };
        if begun(rank, call.number())? >= call.begun() {
            return None;
        }
        let mut others = self.endpoint.other_calls(rank, call.number());
        others.find(|theirs| begun(own, theirs.plan).is_some_and(|begun| begun < theirs.begun))
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
            WaitKind::Packet => (format!(" from rank {peer}"), epoch_of(seen)),
            WaitKind::Message => (format!(" from rank {peer}"), seen),
            WaitKind::Taken | WaitKind::Envelope => (format!(" by rank {peer}"), seen),
            WaitKind::Failed => (format!(" on rank {peer}"), seen),
            WaitKind::Semaphore => (format!(" from rank {peer} on channel {channel}"), seen),
            WaitKind::Barrier => (format!(" at barrier {channel}"), seen),
            WaitKind::Size => (format!(" by rank {peer} on channel {channel}"), seen),
            WaitKind::Acquire => (format!(" to release semaphore {channel}"), seen),
            _ => (format!(" (fifo {channel})"), seen),
        };
        let expected = match kind {
            WaitKind::Packet => epoch_of(expected),
            _ => expected,
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
            let state = self.peer(waiting);
            tracing::warn!(
                "rank {} has waited {} s for {} in thread block {block}{}",
                self.endpoint.rank(),
                waited.as_secs(),
                Self::describe(waiting),
                state
                    .map(|state| format!("that rank is {state}"))
                    .or_else(|| self.proxy(waiting))
                    .map_or_else(String::new, |words| format!("; {words}")),
            );
        }
    }
}

/// Whether the packet that was found belongs to a call of another size.
fn is_other_size(waiting: &Waiting) -> bool {
    waiting.site.kind == WaitKind::Packet
        && is_of_other_size(flag(waiting.expected), flag(waiting.seen))
}

/// The flag of a packet's word, which carries it in the low half as the wait loop sees it.
fn flag(word: u64) -> u32 {
    (word & u64::from(u32::MAX)) as u32
}

/// What a flag says of the epoch.
fn epoch_of(word: u64) -> u64 {
    epoch_part(flag(word)).into()
}

impl Supervisor for Guard<'_> {
    fn check(&self, waiting: &Waiting, block: u32) -> Result<(), Stopped> {
        if self.endpoint.group().liveness().stopped() {
            return Err(Stopped::Aborted);
        }
        let waited = self.started.get_or_init(Instant::now).elapsed();
        if is_other_size(waiting) || waited > LOOK_GRACE && self.other_size(waiting).is_some() {
            return Err(Stopped::Mismatch);
        }
        if waited > self.limit {
            return Err(Stopped::Deadline);
        }
        if waited > ASK_EVERY && self.is_interrupted() {
            return Err(Stopped::Aborted);
        }
        if let Some(late) = waited.checked_sub(self.endpoint.group().silence_after()) {
            // A rank that stopped when this wait began is known to be silent just about now.
            let seems_alive = matches!(self.peer(waiting), Some(PeerState::Alive));
            if !seems_alive || late > NOTICE_GRACE {
                self.report(waiting, block, waited);
            }
        }
        if waited > CROSSED_GRACE && self.is_crossed(waiting) {
            return Err(Stopped::Mismatch);
        }
        match self.peer(waiting) {
            Some(PeerState::Left) => self.wait_for_left(waiting.site.peer),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};

    use super::*;
    use crate::endpoint::BusyWith;

    fn endpoint() -> Arc<Endpoint> {
        let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
        let options = JoinOptions::default();
        let group = Group::join(&rendezvous.unique_id(), 0, 1, &options).unwrap();
        Endpoint::new(Arc::new(group), Instant::now() + Duration::from_secs(30)).unwrap()
    }

    #[test]
    fn a_wait_for_a_proxy_names_the_rank_that_the_proxy_waits_for() {
        let endpoint = endpoint();
        let busy = Arc::new(BusyWith::default());
        endpoint.note_proxy(7, &busy);
        let guard = Guard::new(&endpoint, Duration::from_secs(2));
        let waiting = Waiting {
            site: Site {
                kind: WaitKind::FifoDone,
                peer: u32::MAX,
                channel: 7,
                op: Site::NO_OP,
            },
            ..Waiting::default()
        };
        let words = || guard.cause(Stopped::Deadline, &waiting).to_string();
        let stuck = busy.during(0, words);
        let expected = "the deadline of 2s passed; the proxy is busy with rank 0, which is alive";
        assert_eq!(stuck, expected);
        assert!(!words().contains("proxy"));
        endpoint.forget_proxy(7);
        assert!(!busy.during(0, words).contains("proxy"));
    }
}
