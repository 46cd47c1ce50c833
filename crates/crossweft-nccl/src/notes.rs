//! What a rank notes for others that may wait for it in vain.
//!
//! Ranks in a collective look at what the rank is noted to do that they wait for; if that is none of what they wait for, and
//! stays so, they give up and say what it is. So a rank that has refused a call, or prepares one that the others had
//! prepared before, is found out in some seconds, not at the deadline.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::{CallLine, Endpoint};
use crossweft_collective::Communicator;

use crate::status::Error;

/// How long a refused call may be waited for: the program may be about to make it once more. Also, how long ranks may seem to
/// be in different calls.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// How often ranks that prepare look at the others.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// One rank's notes.
#[derive(Debug)]
pub(crate) struct Notes {
    endpoint: Arc<Endpoint>,
    refused: CallLine,
    preparing: CallLine,
    registering: CallLine,
    windows: CallLine,
    delegated: CallLine,
    launched: CallLine,
    recorded: CallLine,
    /// Whether the last call was refused.
    is_refused: Mutex<bool>,
    /// The same, to be seen without a lock.
    was_refused: AtomicBool,
    waiting: Mutex<Waiting>,
}

/// A rank and how many calls it had refused, and when that was first seen.
pub(crate) type Seen = Option<((u32, u64), Instant)>;

/// A rank that has made other collective calls than this one; see [`Notes::in_another`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Apart {
    pub(crate) rank: u32,
    pub(crate) number: u64,
    /// Bytes of its message, and of this rank's.
    pub(crate) theirs: u64,
    pub(crate) ours: u64,
}

/// For whose messages or signals a rank waits.
#[derive(Debug, Default)]
struct Waiting {
    peers: Vec<u32>,
    seen: Seen,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Notes {
    /// All ranks' notes; made in the same order as whatever else they note.
    pub(crate) fn new(communicator: &Communicator) -> Arc<Self> {
        let endpoint = communicator.endpoint();
        let notes = Arc::new(Self {
            endpoint: Arc::clone(endpoint),
            refused: endpoint
                .own_call_line("has refused a call, for the reason that it gave there"),
            preparing: endpoint.own_call_line("prepares a call, larger or other than those before"),
            registering: endpoint.own_call_line("registers a window"),
            windows: endpoint.own_call_line("is in a call between windows"),
            delegated: endpoint.own_call_line("is in a call that is delegated to another library"),
            launched: endpoint.own_call_line("has launched a collective"),
            recorded: endpoint.own_call_line("has recorded a collective"),
            is_refused: Mutex::default(),
            was_refused: AtomicBool::new(false),
            waiting: Mutex::default(),
        });
        let weak = Arc::downgrade(&notes);
        communicator.interrupt_when(move || weak.upgrade()?.gives_up());
        notes
    }

    /// A call that others may be in was refused here.
    pub(crate) fn refuse(&self) {
        let mut is_refused = lock(&self.is_refused);
        if !std::mem::replace(&mut *is_refused, true) {
            self.refused.begin(&self.endpoint, 0);
            self.was_refused.store(true, Ordering::Release);
        }
    }

    /// Another call is made.
    pub(crate) fn go_on(&self) {
        if !self.was_refused.load(Ordering::Acquire) {
            return;
        }
        let mut is_refused = lock(&self.is_refused);
        if std::mem::take(&mut *is_refused) {
            self.was_refused.store(false, Ordering::Release);
            self.refused.end(&self.endpoint);
        }
    }

    /// A collective with a message of `bytes` bytes was launched on a GPU, not recorded. `calls` is a number for it and all
    /// before it.
    pub(crate) fn launched(&self, bytes: u64, calls: u64) {
        self.launched
            .begin_at(&self.endpoint, bytes, (calls, bytes));
    }

    /// One was recorded into a graph.
    pub(crate) fn recorded(&self) {
        self.recorded.begin(&self.endpoint, 0);
        self.recorded.end(&self.endpoint);
    }

    /// How many collectives a rank has launched so.
    pub(crate) fn launches_of(&self, rank: u32) -> u64 {
        let noted = self.launched.noted_by(&self.endpoint, rank);
        noted.map_or(0, |(launches, _)| launches)
    }

    /// A rank whose collectives so far are not this one's, as far as both have launched them: the rank, how many those are, and the
    /// bytes of the last, there and here. Nothing is known of a rank that is more than one ahead or behind, on another
    /// host, or, as is this one, has recorded some: what a replay there meets here is nowhere noted.
    pub(crate) fn in_another(&self) -> Option<Apart> {
        let has_recorded = |rank| {
            let noted = self.recorded.noted_by(&self.endpoint, rank);
            noted.is_none_or(|(recorded, _)| recorded > 0)
        };
        let own = self.endpoint.rank();
        if has_recorded(own) {
            return None;
        }
        let launches = self.launches_of(own);
        (0..self.endpoint.world_size()).find_map(|rank| {
            let number = launches.min(self.launches_of(rank));
            let noted = |rank| self.launched.noted_at(&self.endpoint, rank, number);
            let ((theirs, bytes), (ours, own_bytes)) = (noted(rank)?, noted(own)?);
            let found = Apart {
                rank,
                number,
                theirs: bytes,
                ours: own_bytes,
            };
            (theirs != ours && !has_recorded(rank)).then_some(found)
        })
    }

    /// Prepares for a call with a message of `bytes` bytes, which all ranks do together; ends the wait for one that
    /// has refused that call.
    pub(crate) fn preparing<T, E>(
        &self,
        bytes: u64,
        prepare: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.preparing.begin(&self.endpoint, bytes);
        let result = self.with_all(&self.preparing, prepare);
        if result.is_ok() {
            self.preparing.end(&self.endpoint);
        }
        result
    }

    /// Registers a window, which all ranks do together; ends the wait for one that has refused that.
    pub(crate) fn registering<T>(&self, register: impl FnOnce() -> T) -> T {
        self.registering.begin(&self.endpoint, 0);
        let result = self.with_all(&self.registering, register);
        self.registering.end(&self.endpoint);
        result
    }

    /// Does what `line` notes that it has begun.
    fn with_all<T>(&self, line: &CallLine, act: impl FnOnce() -> T) -> T {
        let begun = |rank| {
            let noted = line.noted_by(&self.endpoint, rank);
            noted.map(|(begun, _)| begun)
        };
        let own = begun(self.endpoint.rank());
        let (done, ends) = channel();
        std::thread::scope(|scope| {
            let watch = std::thread::Builder::new().name("crossweft-nccl".to_owned());
            // Without it, the wait ends at the deadline.
            let _ = watch.spawn_scoped(scope, move || {
                let mut seen = None;
                while ends.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                    if let Some(reason) = self.look(&mut seen, |rank| begun(rank) < own) {
                        self.endpoint.group().abort(&reason);
                    }
                }
            });
            let result = act();
            drop::<Sender<()>>(done);
            result
        })
    }

    /// Runs what waits for messages or signals of `peers`, or for room to send them some.
    pub(crate) fn waiting_for<T>(&self, peers: Vec<u32>, run: impl FnOnce() -> T) -> T {
        let waiting = |peers| *lock(&self.waiting) = Waiting { peers, seen: None };
        waiting(peers);
        let result = run();
        waiting(Vec::new());
        result
    }

    /// Why this rank should not wait on for messages or signals, if so. Asked now and then while it waits.
    fn gives_up(&self) -> Option<String> {
        let Waiting { peers, seen } = &mut *lock(&self.waiting);
        self.look(seen, |rank| peers.contains(&rank))
    }

    /// Whether a rank that is waited for does not come because it has refused a call; it is seen to have for how long.
    pub(crate) fn look(
        &self,
        seen: &mut Seen,
        is_waited_for: impl Fn(u32) -> bool,
    ) -> Option<String> {
        let refused_by = |rank| self.refused.noted_by(&self.endpoint, rank);
        // What this rank has refused as well is nothing that it waits for.
        let own = refused_by(self.endpoint.rank()).map_or(0, |(refusals, _)| refusals);
        let refuser = (0..self.endpoint.world_size())
            .filter(|&rank| is_waited_for(rank))
            .find_map(|rank| match refused_by(rank)? {
                (refusals, true) if refusals > own => Some((rank, refusals)),
                _ => None,
            });
        let first = match (*seen, refuser) {
            (_, None) => {
                *seen = None;
                return None;
            }
            (Some((before, first)), Some(refuser)) if before == refuser => first,
            (_, Some(refuser)) => seen.insert((refuser, Instant::now())).1,
        };
        let (rank, _) = refuser?;
        (first.elapsed() > PATIENCE).then(|| {
            format!(
                "rank {rank} has refused a call that others wait for, for the reason that it gave there"
            )
        })
    }

    /// Runs what another library does of a call with a message of `bytes` bytes.
    pub(crate) fn delegated(
        &self,
        bytes: u64,
        run: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.delegated.begin(&self.endpoint, bytes);
        run()?;
        self.delegated.end(&self.endpoint);
        Ok(())
    }

    /// Runs a call between windows, on messages of `bytes` bytes at these offsets of the two. All ranks' results depend on
    /// all ranks' messages, so each can see afterwards whether theirs lay where it looked for them.
    pub(crate) fn between_windows<E>(
        &self,
        bytes: u64,
        offsets: (u64, u64),
        run: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), Error>
    where
        Error: From<E>,
    {
        self.windows.begin_at(&self.endpoint, bytes, offsets);
        run()?;
        let elsewhere = self.windows.elsewhere(&self.endpoint);
        self.windows.end(&self.endpoint);
        match elsewhere {
            None => Ok(()),
            // Whoever is told by others first may be stopped in a call that it would end, and hear less.
            Some((rank, theirs)) => Err(Error::differs(format!(
                "rank {rank} has its message at offset {} and its result at {} of the symmetric windows, this rank at {} \
                 and {}: give the same on every rank, or register without NCCL_WIN_COLL_SYMMETRIC",
                theirs.0, theirs.1, offsets.0, offsets.1
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use crossweft_collective::{CollectiveError, CommunicatorOptions, run_in_threads};

    use super::*;

    #[test]
    fn offsets_that_differ_are_found_by_all_and_stop_nobody() {
        let options = CommunicatorOptions {
            timeout: Duration::from_secs(60),
        };
        let errors = run_in_threads(3, options, |communicator| {
            let notes = Notes::new(communicator);
            let run = || communicator.barrier();
            let call = |offsets| notes.between_windows(64, offsets, run);
            assert_eq!(call((8, 16)), Ok(()));
            let odd = u64::from(communicator.rank() == 1) * 64;
            let error = call((8, 16 + odd)).unwrap_err();
            communicator.barrier()?;
            Ok::<_, CollectiveError>((error.shared, error.text))
        });
        let errors = errors.unwrap();
        for ((shared, text), other) in errors.iter().zip([1, 0, 1]) {
            assert!(shared);
            let words = format!("rank {other} has its message at offset 8 and its result at");
            assert!(text.contains(&words), "{text}");
        }
    }
}
