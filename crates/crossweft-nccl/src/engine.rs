//! What a communicator's calls run on: its prepared collectives, an exchange for messages between pairs of
//! ranks, and one-sided puts and signals.
//!
//! A collective is prepared when it is first called, and again when a call is larger than what it was
//! prepared for; sizes double, so that happens a few times at most. Preparing is collective. All ranks make
//! the same calls, so they come to it together. The rest is prepared with the communicator, for no call of it is
//! made by all ranks.
//!
//! On the host a call is run when it has been prepared, on the calling thread. On a GPU all calls of a group are prepared
//! first, and then launched on their streams.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_collective::{
    Collective, CollectiveError, CollectiveOptions, Communicator, DataType, Exchange,
    ExchangeOptions, OneSided, PreparedCollective, ReduceOp, Request, Scalar, Selector,
};

use crate::call::{Buffers, Call, CollectiveCall, OneSidedCall, Reduction};
use crate::delegate::{Delegate, Message};
use crate::lane::{Copies, Lane, Watch};
use crate::notes::Notes;
use crate::pointer::{Destination, Factor, Source};
use crate::status::Error;
use crate::window::{Window, Zone};

/// What small calls are prepared for: growing from there costs less than preparing often.
const LEAST: u64 = 64 << 10;

/// How long launches that were told to end may take before what they use is left to them for good.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What a call needs to have been prepared: what to compute, whether inputs are multiplied first, and the windows
/// that buffers lie in.
type Key = (Collective, DataType, ReduceOp, bool, Option<(u64, u64)>);

/// What calls of one rank run on.
#[derive(Debug)]
pub(crate) struct Engine {
    communicator: Communicator,
    notes: Arc<Notes>,
    messaging: Arc<Messaging>,
    delegate: Option<Delegate>,
    prepared: HashMap<Key, Ready>,
    /// What was recorded into graphs, which may run for as long as the communicator is there, and was then replaced.
    kept: Vec<PreparedCollective>,
    /// On a GPU.
    lane: Option<Lane>,
}

/// What sends, receives, puts and signals run on.
#[derive(Debug)]
pub(crate) struct Messaging {
    exchange: Exchange,
    one_sided: OneSided,
}

impl Messaging {
    /// Whether everything on a GPU that has ended, ended well.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        self.exchange.check()?;
        Ok(self.one_sided.check()?)
    }

    /// Ends all waits on a GPU, and later ones.
    pub(crate) fn end_waits(&self) {
        self.exchange.end_waits();
        self.one_sided.end_waits();
    }
}

/// What is no collective of a group.
#[derive(Debug, Default)]
struct Others {
    sends: Vec<(u32, Source, u64)>,
    receives: Vec<(u32, Destination, u64)>,
    one_sided: Vec<(OneSidedCall, u64)>,
}

impl Others {
    /// Keeps what is no collective.
    fn sort(&mut self, call: Call) -> Option<CollectiveCall> {
        match call {
            Call::Collective(call) => return Some(call),
            Call::Send(peer, data, stream) => self.sends.push((peer, data, stream)),
            Call::Receive(peer, data, stream) => self.receives.push((peer, data, stream)),
            Call::OneSided(call, stream) => self.one_sided.push((call, stream)),
        }
        None
    }

    fn has_messages(&self) -> bool {
        !self.sends.is_empty() || !self.receives.is_empty()
    }
}

/// Whether something is received where `data` lies.
fn overwrites(receives: &[(u32, Destination, u64)], data: &Source) -> bool {
    receives.iter().any(|(_, to, _)| to.overlaps(data))
}

impl Launches {
    fn has_messages(&self) -> bool {
        !self.sends.is_empty() || !self.receives.is_empty()
    }

    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.collectives.is_empty() && !self.has_messages() && self.one_sided.is_empty()
    }
}

/// What is still to be launched of a group's calls, one thing after another.
#[derive(Debug)]
pub(crate) struct Launches {
    collectives: VecDeque<CollectiveCall>,
    /// What the messages overwrite before it is sent.
    copies: Copies,
    sends: Vec<(u32, Source, u64)>,
    receives: Vec<(u32, Destination, u64)>,
    one_sided: VecDeque<(OneSidedCall, u64)>,
}

/// A collective that is prepared.
#[derive(Debug)]
struct Ready {
    /// The largest message.
    capacity: u64,
    call: PreparedCollective,
    /// Whether it was recorded into a graph.
    recorded: bool,
}

impl Engine {
    /// Prepares what is needed from the beginning. Collective; blocks.
    pub(crate) fn new(
        communicator: &Communicator,
        notes: Arc<Notes>,
        delegate: Option<Delegate>,
    ) -> Result<Self, Error> {
        let messaging = Arc::new(Messaging {
            exchange: communicator.exchange(&ExchangeOptions::default())?,
            one_sided: communicator.one_sided()?,
        });
        let lane = Lane::new(communicator, &messaging, &notes);
        let (endpoint, what) = (communicator.endpoint(), "initialising the communicator");
        let deadline = Instant::now() + communicator.timeout();
        let lane = endpoint.settle(lane, what, deadline, Error::from)?;
        Ok(Self {
            communicator: communicator.clone(),
            notes,
            delegate,
            messaging,
            prepared: HashMap::new(),
            kept: Vec::new(),
            lane,
        })
    }

    /// Who looks after launches on a GPU.
    pub(crate) fn watch(&self) -> Option<Arc<Watch>> {
        self.lane.as_ref().map(Lane::watch)
    }

    /// Whether calls can be launched as they are, on a GPU, without waiting for the other ranks on the host.
    pub(crate) fn is_prepared(&self, calls: &[Call]) -> bool {
        calls.iter().all(|call| match call {
            Call::Collective(call) => {
                self.is_delegated(call) || self.ready(&key(call), call.bytes).is_some()
            }
            _ => true,
        })
    }

    fn is_delegated(&self, call: &CollectiveCall) -> bool {
        let delegate = self.delegate.as_ref();
        delegate.is_some_and(|delegate| delegate.rule(call.collective, call.bytes).is_some())
    }

    /// Prepares calls that are to be launched on a GPU. Collective; blocks.
    pub(crate) fn prepare_all(&mut self, calls: &[Call]) -> Result<(), Error> {
        for call in calls {
            if let Call::Collective(call) = call
                && !self.is_delegated(call)
            {
                self.prepare(call)?;
            }
        }
        Ok(())
    }

    /// Calls that were prepared, to be launched on their streams: collectives in their order, then all sends and receives
    /// together, then what is one-sided, in its order. Before any of a group is launched: more room waits for what runs, which
    /// then is not this group's. That may wait for ranks whose calls the thread makes after these.
    pub(crate) fn begin(&mut self, calls: Vec<Call>) -> Result<Launches, Error> {
        let mut others = Others::default();
        let sorted = calls.into_iter().filter_map(|call| others.sort(call));
        let collectives = sorted.collect();
        let copies = self.copies(&others)?;
        Ok(Launches {
            collectives,
            copies,
            sends: others.sends,
            receives: others.receives,
            one_sided: others.one_sided.into(),
        })
    }

    /// Launches what is next; says whether there is more. Returns at once.
    pub(crate) fn launch_next(&mut self, launches: &mut Launches) -> Result<bool, Error> {
        if let Some(call) = launches.collectives.pop_front() {
            self.launch_one(&call)?;
        } else if launches.has_messages() {
            self.launch_messages(launches)?;
            launches.sends.clear();
            launches.receives.clear();
        } else if let Some((call, stream)) = launches.one_sided.pop_front() {
            self.launch_one_sided(&call, stream)?;
        }
        Ok(!launches.is_empty())
    }

    fn launch_one_sided(&mut self, call: &OneSidedCall, stream: u64) -> Result<(), Error> {
        let Some(lane) = &mut self.lane else {
            return Err(Error::internal("puts are launched on the host"));
        };
        let one_sided = &self.messaging.one_sided;
        let in_order = lane.in_order(&[stream], |stream| {
            let done = match call {
                OneSidedCall::Put(peer, data, window, offset) => {
                    let memory = window.memory()?.registered();
                    let at = window.offset() + offset;
                    let put = one_sided.put_on(stream, &memory, *peer, at, data.region());
                    put.and_then(|()| one_sided.signal_on(stream, *peer))
                }
                OneSidedCall::Signal(peer) => one_sided.signal_on(stream, *peer),
                OneSidedCall::Wait(peer, count) => one_sided.wait_on(stream, *peer, *count),
            };
            Ok(done.map_err(CollectiveError::from)?)
        });
        in_order.map(|_| ())
    }

    /// Copies of what is sent from where something is received, on a GPU, and room for them.
    fn copies(&mut self, others: &Others) -> Result<Copies, Error> {
        let Some(lane) = &mut self.lane else {
            return Err(Error::internal("calls are launched on the host"));
        };
        let sent = others.sends.iter().map(|(_, data, _)| data);
        lane.copies(sent.filter(|data| overwrites(&others.receives, data)))
    }

    /// All sends and receives of a group, on a GPU, after copies of what they overwrite.
    fn launch_messages(&mut self, launches: &Launches) -> Result<(), Error> {
        let Some(lane) = &mut self.lane else {
            return Err(Error::internal("messages are launched on the host"));
        };
        let Launches {
            copies,
            sends,
            receives,
            ..
        } = launches;
        let delegate = self.delegate.as_ref();
        let rule = |bytes: usize| delegate?.rule(Collective::SendRecv, bytes as u64);
        let mut delegated = Vec::new();
        let mut streams = Vec::new();
        let mut group = self.messaging.exchange.group();
        let mut copied = copies.regions();
        for (peer, data, stream) in sends {
            let copy = match overwrites(receives, data) {
                true => copied.next(),
                false => None,
            };
            match rule(data.len()) {
                Some(rule) => {
                    let from = data.range().start;
                    delegated.push((rule, Message::send(*peer, from, data.len(), *stream)));
                }
                None => {
                    streams.push(*stream);
                    let region = copy.unwrap_or_else(|| data.region());
                    group.send_region(*peer, DataType::U8, region);
                }
            }
        }
        for (peer, data, stream) in receives {
            match rule(data.len()) {
                Some(rule) => delegated.push((rule, Message::receive(*peer, data, *stream))),
                None => {
                    group.recv_region(*peer, DataType::U8, data.region());
                    streams.push(*stream);
                }
            }
        }
        streams.dedup();
        if !streams.is_empty() {
            let peers = sends.iter().map(|(peer, ..)| *peer);
            lane.expect(peers.chain(receives.iter().map(|(peer, ..)| *peer)))?;
            let recorded = lane.in_order(&streams, |stream| {
                copies.make(stream)?;
                Ok(group.run_on(stream)?)
            })?;
            lane.made(copies, recorded);
        }
        match &mut self.delegate {
            Some(delegate) if !delegated.is_empty() => delegate.messages(&delegated),
            _ => Ok(()),
        }
    }

    fn launch_one(&mut self, call: &CollectiveCall) -> Result<(), Error> {
        if let Some(delegate) = &mut self.delegate
            && let Some(rule) = delegate.rule(call.collective, call.bytes)
        {
            if matches!(call.reduction, Reduction::PreMultiplied(Factor::Later(_))) {
                return Err(Error::unsupported(
                    "delegating a sum that is multiplied by a scalar in device memory",
                    "make the operation with ncclScalarHostImmediate, or take the rule out of CROSSWEFT_NCCL_DELEGATE",
                ));
            }
            return delegate.collective(rule, call);
        }
        match self.launch_prepared(call)? {
            true => Ok(()),
            false => Err(Error::internal(
                "a call is to be launched that is not prepared",
            )),
        }
    }

    /// Launches a collective on its stream, if it is prepared and this library's to do; says whether. Returns at once.
    pub(crate) fn launch_prepared(&mut self, call: &CollectiveCall) -> Result<bool, Error> {
        if self.is_delegated(call) {
            return Ok(false);
        }
        let ready = self.prepared.get_mut(&key(call));
        let ready = ready.filter(|ready| ready.capacity >= call.bytes);
        let (Some(ready), Some(lane)) = (ready, &mut self.lane) else {
            return Ok(false);
        };
        if let Reduction::PreMultiplied(factor) = call.reduction {
            ready.call.set_scalar(factor.scalar_on_device())?;
        }
        ready.recorded |= lane.launch(&ready.call, call)?;
        Ok(true)
    }

    /// Blocks until everything that was launched has ended, at most for as long as calls may take.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let deadline = Instant::now() + self.communicator.timeout();
        self.lane
            .as_ref()
            .map_or(Ok(()), |lane| lane.settle(deadline))
    }

    /// Runs calls that belong together; blocks until this rank's part is done. Collectives come first, in their order, then
    /// all sends and receives together, then what is one-sided, in its order: whatever the order in which ranks
    /// have listed them, they do not wait for each other in a circle.
    pub(crate) fn run(&mut self, calls: Vec<Call>) -> Result<(), Error> {
        let mut others = Others::default();
        for call in calls {
            if let Some(call) = others.sort(call) {
                self.collective(call)?;
            }
        }
        if others.has_messages() {
            self.messages(&others.sends, others.receives)?;
        }
        let mut one_sided = others.one_sided.into_iter();
        one_sided.try_for_each(|(call, _)| self.one_sided(call))
    }

    fn collective(&mut self, call: CollectiveCall) -> Result<(), Error> {
        let notes = Arc::clone(&self.notes);
        if let Some(delegate) = &mut self.delegate
            && let Some(rule) = delegate.rule(call.collective, call.bytes)
        {
            return notes.delegated(call.bytes, || delegate.collective(rule, &call));
        }
        self.prepare(&call)?;
        let prepared = &self.prepared[&key(&call)].call;
        if let Reduction::PreMultiplied(factor) = call.reduction {
            prepared.set_scalar(Scalar::from_bits(factor.bits(call.dtype.size())))?;
        }
        match (call.zone, call.buffers) {
            (Some(zone), _) => notes.between_windows(call.bytes, zone.offsets, || {
                let (input, output) = zone.offsets;
                prepared.run_symmetric(input, output, call.bytes)
            })?,
            (None, Buffers::Apart(input, mut output)) => {
                prepared.run(input.as_slice(), output.as_slice_mut())?;
            }
            (None, Buffers::InPlace(mut data)) => prepared.run_in_place(data.as_slice_mut())?,
        }
        Ok(())
    }

    /// Collective if it is not prepared yet.
    fn prepare(&mut self, call: &CollectiveCall) -> Result<(), Error> {
        let key = key(call);
        if self.ready(&key, call.bytes).is_some() {
            return Ok(());
        }
        // What runs on a GPU may wait for other ranks' launches, and those for what allocates here. All ranks do so before
        // any goes on.
        self.settle()?;
        // First, so that the memory of both is not there at once.
        let before = self.prepared.remove(&key);
        let options = options(call)?;
        let capacity = options.max_bytes;
        let prepare = || {
            let before = before.and_then(|before| before.recorded.then_some(before.call));
            let prepared = self.notes.preparing(call.bytes, || {
                self.communicator.collective(call.collective, options)
            })?;
            Ok((before, prepared))
        };
        let (before, prepared) = match &self.lane {
            None => prepare()?,
            Some(lane) => lane.relaxed(prepare)?,
        };
        self.kept.extend(before);
        if let Some(lane) = &self.lane {
            lane.add(&prepared);
        }
        let recorded = false;
        self.prepared.insert(
            key,
            Ready {
                capacity,
                call: prepared,
                recorded,
            },
        );
        Ok(())
    }

    /// What is prepared already, and large enough.
    fn ready(&self, key: &Key, bytes: u64) -> Option<&PreparedCollective> {
        let ready = self.prepared.get(key)?;
        (ready.capacity >= bytes).then_some(&ready.call)
    }

    /// What the call would take. Local.
    pub(crate) fn selector(&self, call: &CollectiveCall) -> Result<Selector, Error> {
        if self.is_delegated(call) {
            return Err(Error::unsupported(
                "the time of a call that is delegated",
                "ask the other library, or take its rule out of CROSSWEFT_NCCL_DELEGATE",
            ));
        }
        if let Some(prepared) = self.ready(&key(call), call.bytes) {
            return Ok(prepared.selector().clone());
        }
        let request = Request::new(&self.communicator, call.collective, &options(call)?);
        Ok(self.communicator.selection().select(&request))
    }

    /// All sends and receives of a group. What is sent from where something is received is copied first, so that two
    /// ranks can change places.
    fn messages(
        &mut self,
        sends: &[(u32, Source, u64)],
        receives: Vec<(u32, Destination, u64)>,
    ) -> Result<(), Error> {
        let copies: Vec<Option<Vec<u8>>> = sends
            .iter()
            .map(|(_, data, _)| {
                let overlaps = receives.iter().any(|(_, to, _)| to.overlaps(data));
                overlaps.then(|| data.as_slice().to_vec())
            })
            .collect();
        let rule = |bytes: usize| {
            let delegate = self.delegate.as_ref()?;
            delegate.rule(Collective::SendRecv, bytes as u64)
        };
        let peers = sends.iter().map(|(peer, ..)| *peer);
        let peers = peers
            .chain(receives.iter().map(|(peer, ..)| *peer))
            .collect();
        let mut delegated = Vec::new();
        let mut group = self.messaging.exchange.group();
        for ((peer, data, stream), copy) in sends.iter().zip(&copies) {
            let data = copy.as_deref().unwrap_or(data.as_slice());
            match rule(data.len()) {
                None => {
                    group.send(*peer, data);
                }
                Some(rule) => {
                    let from = data.as_ptr().expose_provenance() as u64;
                    delegated.push((rule, Message::send(*peer, from, data.len(), *stream)));
                }
            }
        }
        let (theirs, mut ours): (Vec<_>, Vec<_>) = receives
            .into_iter()
            .partition(|(_, data, _)| rule(data.len()).is_some());
        for (peer, data, _) in &mut ours {
            group.recv(*peer, data.as_slice_mut());
        }
        for (peer, data, stream) in theirs {
            if let Some(rule) = rule(data.len()) {
                delegated.push((rule, Message::receive(peer, &data, stream)));
            }
        }
        // All ranks do so, and none of these waits for one of the others.
        self.notes.waiting_for(peers, || group.run())?;
        match &mut self.delegate {
            Some(delegate) if !delegated.is_empty() => {
                let bytes = delegated
                    .iter()
                    .map(|(_, message)| message.bytes as u64)
                    .sum();
                self.notes
                    .delegated(bytes, || delegate.messages(&delegated))
            }
            _ => Ok(()),
        }
    }

    fn one_sided(&self, call: OneSidedCall) -> Result<(), Error> {
        let one_sided = &self.messaging.one_sided;
        match call {
            OneSidedCall::Put(peer, data, window, offset) => {
                let memory = window.memory()?.registered();
                let at = window.offset() + offset;
                let put = one_sided.put(&memory, peer, at, data.as_slice());
                put.and_then(|()| one_sided.signal(peer))
            }
            OneSidedCall::Signal(peer) => one_sided.signal(peer),
            OneSidedCall::Wait(peer, count) => {
                let wait = || one_sided.wait(peer, count);
                self.notes.waiting_for(vec![peer], wait)
            }
        }
        .map_err(|error| CollectiveError::from(error).into())
    }

    /// Ends the other library's communicator, in good order if there is any.
    pub(crate) fn leave(&mut self, in_order: bool) {
        if let Some(mut delegate) = self.delegate.take()
            && in_order
        {
            delegate.leave();
        }
    }

    /// Bytes of memory that can be given back, beside small tables.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        let prepared = self.prepared.values().map(|ready| &ready.call);
        let all = prepared.chain(&self.kept);
        all.map(PreparedCollective::scratch_bytes).sum()
    }

    /// Bytes of memory that are there as long as the communicator.
    pub(crate) fn lasting_bytes(&self) -> u64 {
        self.messaging.exchange.ring_bytes()
    }

    /// A window goes: so does what was prepared for it. Blocks until what runs has ended.
    pub(crate) fn forget(&mut self, window: &Window) -> Result<(), Error> {
        let number = window.number();
        let has = |windows: &(u64, u64)| windows.0 == number || windows.1 == number;
        self.discard(|key| key.4.as_ref().is_some_and(has))
    }

    /// Gives memory back. What is called next is prepared anew. Blocks until what runs has ended.
    pub(crate) fn clear(&mut self) -> Result<(), Error> {
        self.discard(|_| true)
    }

    /// Gives back the memory of what was prepared for some calls, unless graphs have it.
    fn discard(&mut self, goes: impl Fn(&Key) -> bool) -> Result<(), Error> {
        self.settle()?;
        let keys: Vec<Key> = self
            .prepared
            .keys()
            .filter(|key| goes(key))
            .copied()
            .collect();
        let gone = keys.iter().filter_map(|key| self.prepared.remove(key));
        let (recorded, gone): (Vec<_>, Vec<_>) = gone.partition(|ready| ready.recorded);
        self.kept
            .extend(recorded.into_iter().map(|ready| ready.call));
        let discard = || {
            drop(gone);
            Ok(())
        };
        match &self.lane {
            None => discard(),
            Some(lane) => lane.relaxed(discard),
        }
    }
}

impl Drop for Engine {
    /// Ends what still runs on a GPU, which uses what is dropped.
    fn drop(&mut self) {
        let Some(lane) = &mut self.lane else {
            return;
        };
        let prepared = (
            std::mem::take(&mut self.prepared),
            std::mem::take(&mut self.kept),
            lane.take_room(),
        );
        let ended = lane.settle(Instant::now());
        let ended = ended.or_else(|_| lane.end(Instant::now() + END_LIMIT));
        match ended {
            Ok(()) => {
                let discard = || {
                    drop(prepared);
                    Ok(())
                };
                // Where the driver does not allow for that it is of no use any more.
                let _ = lane.relaxed(discard);
            }
            Err(_) => std::mem::forget((prepared, Arc::clone(&self.messaging))),
        }
    }
}

fn key(call: &CollectiveCall) -> Key {
    let (op, multiplies) = match call.reduction {
        Reduction::Plain(op) => (op, false),
        Reduction::PreMultiplied(_) => (ReduceOp::Sum, true),
    };
    let windows = call.zone.as_ref().map(Zone::numbers);
    (call.collective, call.dtype, op, multiplies, windows)
}

/// What a call is prepared with.
fn options(call: &CollectiveCall) -> Result<CollectiveOptions, Error> {
    let capacity = call.bytes.checked_next_power_of_two();
    let capacity = capacity.unwrap_or(call.bytes).max(LEAST);
    let mut options = match call.reduction {
        Reduction::Plain(op) => CollectiveOptions::new(call.dtype, op, capacity),
        Reduction::PreMultiplied(_) => {
            // Each call sets its own, which may lie in memory that only the device reaches.
            let none = Scalar::from_bits(0);
            CollectiveOptions::new(call.dtype, ReduceOp::Sum, capacity).pre_multiplied(none)
        }
    };
    if let Some(zone) = &call.zone {
        options = options.symmetric(zone.input.memory()?, zone.output.memory()?);
    }
    Ok(options)
}
