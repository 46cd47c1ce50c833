//! What a communicator has on a GPU: the order of its launches, and a thread that looks after them.
//!
//! A launch returns at once, and waits on the device for the other ranks. Launches of one communicator follow one another
//! whatever streams they are on, for each waits for the others' of the same number. What goes wrong meanwhile is for
//! the watch to find: it ends the waits of launches when the job has failed, and tells the job when one was ended.
#![allow(unsafe_code)]

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossweft_channel::Endpoint;
use crossweft_collective::{CollectiveError, Communicator, PreparedCollective};
use crossweft_executor::{Prepared, RawBuffers, Region};
use crossweft_hal::Device;
use crossweft_hal::cuda::{Context, CudaError, DeviceMemory, Event, MemoryOptions, Stream};
use crossweft_net::PeerState;

use crate::call::{Buffers, CollectiveCall, Reduction};
use crate::engine::Messaging;
use crate::notes::{Apart, Notes, PATIENCE, Seen};
use crate::pointer::Source;
use crate::settings;
use crate::status::Error;

/// Copies begin at multiples of this.
const ALIGNMENT: u64 = 256;
/// How often the watch looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long what waits for ranks that have left may go on: what they sent before may be on its way.
const LEFT_GRACE: Duration = Duration::from_millis(500);

/// The launches of one rank's communicator.
#[derive(Debug)]
pub(crate) struct Lane {
    context: Arc<Context>,
    limit: Duration,
    /// The launches that run.
    run: Arc<Running>,
    /// The stream of the last of them, by its number, which is never another stream's.
    on: Option<u64>,
    /// Behind the last launch that was recorded, and the number of that capture.
    recorded: (Event, Option<u64>),
    /// Where launches that run copy to, one after another.
    aside: Option<DeviceMemory>,
    /// Where recorded ones do.
    kept: Vec<DeviceMemory>,
    /// The [`signature`] of the collectives that were launched and not recorded.
    calls: u64,
    notes: Arc<Notes>,
    watch: Arc<Watch>,
    /// Ends the watch's thread when it is dropped.
    watching: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The launches of a communicator that run.
#[derive(Debug)]
struct Running {
    /// Behind the last of them.
    end: Event,
    /// Whether there was one.
    any: AtomicBool,
}

impl Running {
    fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether all have ended, as far as can be told.
    fn have_ended(&self) -> bool {
        !self.any() || self.end.is_reached().unwrap_or(true)
    }
}

/// What the watch knows.
#[derive(Debug)]
pub(crate) struct Watch {
    run: Arc<Running>,
    notes: Arc<Notes>,
    /// Of the messages since nothing ran last.
    peers: Mutex<Vec<u32>>,
    plans: Mutex<Vec<Weak<Prepared>>>,
    messaging: Weak<Messaging>,
    /// Why this rank has ended waits by itself.
    reason: OnceLock<Error>,
    /// What went wrong first on the device.
    failure: OnceLock<Error>,
}

/// What the watch suspects, and since when.
#[derive(Debug, Default)]
struct Suspicion {
    left: Option<Instant>,
    refused: Seen,
    /// A rank in another call than this one.
    differs: Option<(Apart, Instant)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call of a list.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    fn plans(&self) -> Vec<Arc<Prepared>> {
        let mut plans = lock(&self.plans);
        plans.retain(|plan| plan.strong_count() > 0);
        plans.iter().filter_map(Weak::upgrade).collect()
    }

    fn stop(&self) {
        self.plans().iter().for_each(|plan| plan.end_waits());
        if let Some(messaging) = self.messaging.upgrade() {
            messaging.end_waits();
        }
    }

    /// What has ended badly, if anything did.
    fn found(&self) -> Option<CollectiveError> {
        let of_plans = self.plans().iter().find_map(|plan| plan.check().err());
        let of_messages = || self.messaging.upgrade()?.check().err();
        of_plans.map(CollectiveError::from).or_else(of_messages)
    }

    /// What went wrong first in a launch that had returned, if anything did.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// Looks once.
    fn look(&self, endpoint: &Endpoint, suspicion: &mut Suspicion) {
        let group = endpoint.group();
        if group.liveness().stopped() {
            self.stop();
        }
        if self.failure.get().is_some() {
            return;
        }
        if self.waits_in_vain(endpoint, suspicion) {
            // What has got all it needs goes on all the same.
            self.stop();
        }
        if let Some(error) = self.found() {
            let error = match self.reason.get() {
                // What it says itself is that its wait was ended.
                Some(reason) => reason.clone(),
                None => Error::from(error),
            };
            let (shared, text) = (error.shared, error.text.clone());
            // Nobody else sets it. First, for who asks meanwhile is told this rather than that the job has failed.
            let _ = self.failure.set(error);
            if !shared {
                group.abort(&text);
            }
        }
    }
}

impl Watch {
    /// Whether whatever still waits does so for ranks that will never come, or, as far as can be known, not soon.
    ///
    /// Of those that have left in good order, all launches have ended. So when all others have, nobody will come. When some
    /// have, and had made fewer collective calls than this rank, the calls since can never be made by all. Of messages that
    /// cannot be said: what was sent lies ready for launches that are still to begin, and others may be waited for.
    fn waits_in_vain(&self, endpoint: &Endpoint, suspicion: &mut Suspicion) -> bool {
        let (own, liveness) = (endpoint.rank(), endpoint.group().liveness());
        let mut others = (0..endpoint.world_size()).filter(|&rank| rank != own);
        let has_left = |rank: u32| liveness.peer(rank) == PeerState::Left;
        let behind = |rank: u32| self.notes.launches_of(rank) < self.notes.launches_of(own);
        let runs = || !self.run.have_ended();
        let nobody = endpoint.world_size() > 1 && others.clone().all(has_left);
        let missing = others.find(|&rank| has_left(rank) && behind(rank));
        if nobody || missing.is_some_and(|_| runs()) {
            let since = suspicion.left.get_or_insert_with(Instant::now);
            if since.elapsed() > LEFT_GRACE {
                if let Some(rank) = missing {
                    let (theirs, ours) =
                        (self.notes.launches_of(rank), self.notes.launches_of(own));
                    self.reason.get_or_init(|| {
                        Error::late(format!(
                            "rank {rank} has left the job after {theirs} of {ours} collective calls"
                        ))
                    });
                }
                return true;
            }
        } else {
            suspicion.left = None;
        }
        let peers = lock(&self.peers);
        let is_waited_for = |rank| behind(rank) || peers.contains(&rank);
        let refused = self.notes.look(&mut suspicion.refused, is_waited_for);
        let refused = refused.map(Error::late);
        let reason = refused.or_else(|| self.differs(suspicion));
        match reason.filter(|_| runs()) {
            Some(reason) => {
                self.reason.get_or_init(|| reason);
                true
            }
            None => false,
        }
    }

    /// Whether another rank's calls have long been others than this one's. Kernels see that by themselves where both calls take
    /// the same plan; where they take two, each waits in its own.
    fn differs(&self, suspicion: &mut Suspicion) -> Option<Error> {
        let Some(found) = self.notes.in_another() else {
            suspicion.differs = None;
            return None;
        };
        let since = match suspicion.differs {
            Some((before, since)) if before == found => since,
            _ => suspicion.differs.insert((found, Instant::now())).1,
        };
        let Apart {
            rank,
            number,
            theirs,
            ours,
        } = found;
        (since.elapsed() > PATIENCE).then(|| {
            Error::usage(format!(
                "rank {rank} and this one make different collective calls, in number {number}, which has {theirs} bytes there and \
                 {ours} here, or before: give the same operation, count, type and root in the same order on every rank"
            ))
        })
    }
}

impl Lane {
    /// Of a communicator on a GPU; `None` on the host.
    pub(crate) fn new(
        communicator: &Communicator,
        messaging: &Arc<Messaging>,
        notes: &Arc<Notes>,
    ) -> Result<Option<Self>, Error> {
        let Device::Cuda(context) = communicator.device() else {
            return Ok(None);
        };
        let run = Arc::new(Running {
            end: Event::new(context)?,
            any: AtomicBool::new(false),
        });
        let watch = Arc::new(Watch {
            run: Arc::clone(&run),
            notes: Arc::clone(notes),
            peers: Mutex::default(),
            plans: Mutex::default(),
            messaging: Arc::downgrade(messaging),
            reason: OnceLock::new(),
            failure: OnceLock::new(),
        });
        let (sender, ends) = channel();
        let (own, endpoint) = (Arc::clone(&watch), Arc::clone(communicator.endpoint()));
        let thread = std::thread::Builder::new().name("crossweft-nccl".to_owned());
        let driver = Arc::clone(context.driver());
        let thread = thread.spawn(move || {
            // It may be the last to have what the program gave up meanwhile, and then frees that.
            if let Err(error) = driver.relax_capture_of_this_thread() {
                settings::inform(|| format!("a thread is not excepted from captures: {error}"));
            }
            let mut suspicion = Suspicion::default();
            while ends.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                own.look(&endpoint, &mut suspicion);
            }
        });
        let thread =
            thread.map_err(|error| Error::system(format!("cannot start a thread: {error}")))?;
        Ok(Some(Self {
            context: Arc::clone(context),
            limit: communicator.timeout(),
            run,
            on: None,
            recorded: (Event::new(context)?, None),
            aside: None,
            kept: Vec::new(),
            calls: 0,
            notes: Arc::clone(notes),
            watch,
            watching: Some((sender, thread)),
        }))
    }

    /// Who looks after it.
    pub(crate) fn watch(&self) -> Arc<Watch> {
        Arc::clone(&self.watch)
    }

    /// Looks after what may be launched from now on.
    pub(crate) fn add(&self, prepared: &PreparedCollective) {
        lock(&self.watch.plans).extend(prepared.plans().iter().map(Arc::downgrade));
    }

    /// Does what allocates, or waits for what runs, also while a stream is being captured, which it must not touch.
    pub(crate) fn relaxed<T>(&self, act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.context.driver().aside_from_captures(act)?
    }

    /// Blocks until everything that runs has ended, at most until `deadline`.
    pub(crate) fn settle(&self, deadline: Instant) -> Result<(), Error> {
        if !self.run.any() {
            return Ok(());
        }
        let wait = || Ok(self.run.end.synchronize(deadline)?);
        self.relaxed(wait).map_err(|error| {
            let text = format!("work that was called before does not end: {error}");
            Error { text, ..error }
        })
    }

    /// Ends what runs, and blocks until it has ended, at most until `deadline`.
    pub(crate) fn end(&self, deadline: Instant) -> Result<(), Error> {
        self.watch.stop();
        self.settle(deadline)
    }

    /// Copies that a launch is to make first, and room for them: what one launch makes the next overwrites. Blocks until what
    /// runs has ended, if there is not as much room yet.
    pub(crate) fn copies<'a>(
        &mut self,
        of: impl Iterator<Item = &'a Source>,
    ) -> Result<Copies, Error> {
        let (mut ranges, mut bytes) = (Vec::new(), 0);
        for source in of {
            ranges.push((source.range(), bytes));
            bytes += (source.len() as u64).next_multiple_of(ALIGNMENT);
        }
        let enough = |memory: &DeviceMemory| memory.bytes() >= bytes;
        if bytes > 0 && !self.aside.as_ref().is_some_and(enough) {
            self.settle(Instant::now() + self.limit)?;
            let before = self.aside.take();
            let allocate = || {
                drop(before);
                let bytes = bytes.checked_next_power_of_two().unwrap_or(bytes);
                Ok(DeviceMemory::allocate(
                    &self.context,
                    bytes,
                    &MemoryOptions::default(),
                )?)
            };
            self.aside = Some(self.relaxed(allocate)?);
        }
        let to = self.aside.as_ref().map_or(0, DeviceMemory::address);
        Ok(Copies { ranges, to })
    }

    /// A launch makes these copies. If it was recorded, their room is its own from now on.
    pub(crate) fn made(&mut self, copies: &Copies, recorded: bool) {
        if recorded && !copies.ranges.is_empty() {
            self.kept.extend(self.aside.take());
        }
    }

    /// All room for copies, for whoever sees to it that nothing runs any more.
    pub(crate) fn take_room(&mut self) -> Vec<DeviceMemory> {
        let mut room = std::mem::take(&mut self.kept);
        room.extend(self.aside.take());
        room
    }

    /// Launches a collective on its stream; says whether it was recorded into a graph instead. Returns at once.
    pub(crate) fn launch(
        &mut self,
        prepared: &PreparedCollective,
        call: &CollectiveCall,
    ) -> Result<bool, Error> {
        let limit = self.limit;
        let recorded = self.in_order(&[call.stream], |stream| {
            enqueue(prepared, call, stream, limit)
        })?;
        match recorded {
            true => self.notes.recorded(),
            false => {
                self.calls = signature(self.calls, call);
                self.notes.launched(call.bytes, self.calls);
            }
        }
        Ok(recorded)
    }

    /// Messages of these peers are about to be launched.
    pub(crate) fn expect(&self, of: impl Iterator<Item = u32>) -> Result<(), Error> {
        let ended = self.relaxed(|| Ok(self.run.have_ended()))?;
        let mut peers = lock(&self.watch.peers);
        if ended {
            peers.clear();
        }
        for peer in of {
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
        Ok(())
    }

    /// Has something submitted to the first of `streams`, of which there is one at least, behind what was submitted to all of
    /// them, and to the communicator; what follows on any of them waits for it. Says whether it was recorded into a graph.
    pub(crate) fn in_order(
        &mut self,
        streams: &[u64],
        submit: impl FnOnce(&Stream) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        // SAFETY: what the program says are streams of the communicator's device, which is the one that was current when
        // the communicator was made; they live as long as this call, and the driver refuses what is none.
        let raw = |&raw: &u64| unsafe { Stream::from_raw(&self.context, raw) };
        let Some((stream, others)) = streams.split_first() else {
            return Ok(false);
        };
        let stream = raw(stream);
        let others: Vec<Stream> = others.iter().map(raw).collect();
        let capture = stream.capture()?;
        let id = match capture {
            None => stream.id()?,
            Some(_) => None,
        };
        match capture {
            // What a stream has is in order anyway. Not by its handle: that may be a new stream's which was an old one's.
            None if self.run.any() && (id.is_none() || id != self.on) => {
                stream.wait(&self.run.end)?;
            }
            // Of another capture's launches this one can know nothing: when its graph runs is for the program to say.
            Some(_) if self.recorded.1 == capture => stream.wait(&self.recorded.0)?,
            _ => {}
        }
        for other in &others {
            let before = Event::new(&self.context)?;
            before.record(other)?;
            stream.wait(&before)?;
        }
        // Some of it may be under way also if it failed.
        let submitted = submit(&stream);
        let end = match capture {
            None => {
                self.run.any.store(true, Ordering::Relaxed);
                self.on = id;
                &self.run.end
            }
            Some(_) => {
                self.recorded.1 = capture;
                &self.recorded.0
            }
        };
        end.record(&stream)?;
        others.iter().try_for_each(|other| other.wait(end))?;
        submitted.map(|()| capture.is_some())
    }
}

/// Copies of what a launch overwrites before it is read.
#[derive(Debug)]
pub(crate) struct Copies {
    /// Each range of addresses, and how far from `to` its copy lies.
    ranges: Vec<(Range<u64>, u64)>,
    to: u64,
}

impl Copies {
    /// The copies, in the order in which they were asked for.
    pub(crate) fn regions(&self) -> impl Iterator<Item = Region> {
        self.ranges.iter().map(|(range, offset)| {
            let bytes = range.end - range.start;
            // SAFETY: room of the lane's, which only launches use that follow one another.
            unsafe { Region::new(self.to + offset, bytes) }
        })
    }

    /// Makes them, in the order of a stream.
    pub(crate) fn make(&self, stream: &Stream) -> Result<(), Error> {
        for (range, offset) in &self.ranges {
            // SAFETY: from a buffer of the program's, which is the call's until the stream has come to an end of it, to room
            // of the lane's.
            unsafe { stream.copy(self.to + offset, range.start, range.end - range.start) }?;
        }
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.watching.take() {
            drop(sender);
            // It does not panic, and nobody could be told.
            let _ = thread.join();
        }
    }
}

/// A number for a call and all `before` it, the same on all ranks that have made the same ones.
fn signature(before: u64, call: &CollectiveCall) -> u64 {
    let op = match call.reduction {
        Reduction::Plain(op) => Some(op),
        Reduction::PreMultiplied(_) => None,
    };
    let mut hasher = DefaultHasher::new();
    (before, call.collective, call.dtype, op, call.bytes).hash(&mut hasher);
    hasher.finish()
}

/// Launches a collective's plan, piece after piece.
fn enqueue(
    prepared: &PreparedCollective,
    call: &CollectiveCall,
    stream: &Stream,
    limit: Duration,
) -> Result<(), Error> {
    let (plan, piece) = prepared.select(call.bytes)?;
    let mut done = 0;
    while done < call.bytes {
        let bytes = (call.bytes - done).min(piece as u64);
        let buffers = buffers(plan, call, done, bytes)?;
        // SAFETY: the program's buffers, whose sizes and overlap were checked, and which it keeps until the stream has
        // come so far, or windows, which the plan keeps; the engine keeps the plan until what runs has ended, and for as
        // long as itself if this is recorded. Launches follow one another: see `Lane::in_order`.
        unsafe { plan.launch_on_cuda(stream, &buffers, limit) }.map_err(CollectiveError::from)?;
        done += bytes;
    }
    Ok(())
}

/// Where `bytes` bytes of a call's message lie, from byte `at` on.
fn buffers(
    plan: &Prepared,
    call: &CollectiveCall,
    at: u64,
    bytes: u64,
) -> Result<RawBuffers, Error> {
    if let Some(zone) = &call.zone {
        let (input, output) = zone.offsets;
        let buffers = plan.registered_buffers(input + at, output + at, bytes);
        return Ok(buffers.map_err(CollectiveError::from)?);
    }
    let (input, output) = match &call.buffers {
        Buffers::Apart(from, to) => (from.range().start, to.range().start),
        Buffers::InPlace(data) => {
            let (input, output) = plan.in_place_offsets(call.bytes);
            let start = data.range().start;
            (start + input, start + output)
        }
    };
    Ok(RawBuffers {
        input: input + at,
        output: output + at,
        input_offset: 0,
        output_offset: 0,
        bytes,
    })
}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Self {
        Self::cuda(error.to_string())
    }
}
