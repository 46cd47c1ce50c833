//! What a communicator's calls run on: its prepared collectives, an exchange for messages between pairs of
//! ranks, and one-sided puts and signals.
//!
//! A collective is prepared when it is first called, and again when a call is larger than what it was
//! prepared for; sizes double, so that happens a few times at most. Preparing is collective. All ranks make
//! the same calls, so they come to it together. The rest is prepared with the communicator, for no call of it is
//! made by all ranks.

use std::collections::HashMap;
use std::sync::Arc;

use crossweft_collective::{
    Collective, CollectiveError, CollectiveOptions, Communicator, DataType, Exchange,
    ExchangeOptions, OneSided, PreparedCollective, ReduceOp, Request, Scalar, Selector,
};

use crate::call::{Buffers, Call, CollectiveCall, Reduction};
use crate::delegate::{Delegate, Message};
use crate::notes::Notes;
use crate::pointer::{Destination, Source};
use crate::status::Error;
use crate::window::{Window, Zone};

/// What small calls are prepared for: growing from there costs less than preparing often.
const LEAST: u64 = 64 << 10;

/// What a call needs to have been prepared: what to compute, whether inputs are multiplied first, and the windows
/// that buffers lie in.
type Key = (Collective, DataType, ReduceOp, bool, Option<(u64, u64)>);

/// What calls of one rank run on.
#[derive(Debug)]
pub(crate) struct Engine {
    communicator: Communicator,
    notes: Arc<Notes>,
    exchange: Exchange,
    one_sided: OneSided,
    delegate: Option<Delegate>,
    /// With the largest message of each.
    prepared: HashMap<Key, (u64, PreparedCollective)>,
}

impl Engine {
    /// Prepares what is needed from the beginning. Collective; blocks.
    pub(crate) fn new(
        communicator: &Communicator,
        notes: Arc<Notes>,
        delegate: Option<Delegate>,
    ) -> Result<Self, CollectiveError> {
        Ok(Self {
            communicator: communicator.clone(),
            notes,
            delegate,
            exchange: communicator.exchange(&ExchangeOptions::default())?,
            one_sided: communicator.one_sided()?,
            prepared: HashMap::new(),
        })
    }

    /// Runs calls that belong together; blocks until this rank's part is done. Collectives come first, in their order, then
    /// all sends and receives together, then what is one-sided, in its order: whatever the order in which ranks
    /// have listed them, they do not wait for each other in a circle.
    pub(crate) fn run(&mut self, calls: Vec<Call>) -> Result<(), Error> {
        let (mut sends, mut receives, mut one_sided) = (Vec::new(), Vec::new(), Vec::new());
        for call in calls {
            match call {
                Call::Collective(call) => self.collective(call)?,
                Call::Send(peer, data, stream) => sends.push((peer, data, stream)),
                Call::Receive(peer, data, stream) => receives.push((peer, data, stream)),
                call @ (Call::Put(..) | Call::Signal(_) | Call::Wait(..)) => one_sided.push(call),
            }
        }
        if !sends.is_empty() || !receives.is_empty() {
            self.messages(&sends, receives)?;
        }
        one_sided
            .into_iter()
            .try_for_each(|call| self.one_sided(call))
    }

    fn collective(&mut self, call: CollectiveCall) -> Result<(), Error> {
        let notes = Arc::clone(&self.notes);
        if let Some(delegate) = &mut self.delegate
            && let Some(rule) = delegate.rule(call.collective, call.bytes)
        {
            return notes.delegated(call.bytes, || delegate.collective(rule, &call));
        }
        let prepared = self.prepare(&call)?;
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

    fn prepare(&mut self, call: &CollectiveCall) -> Result<&PreparedCollective, Error> {
        let key = key(call);
        if self.ready(&key, call.bytes).is_none() {
            // First, so that the memory of both is not there at once.
            self.prepared.remove(&key);
            let options = options(call)?;
            let capacity = options.max_bytes;
            let prepared = self.notes.preparing(call.bytes, || {
                self.communicator.collective(call.collective, options)
            })?;
            self.prepared.insert(key, (capacity, prepared));
        }
        Ok(&self.prepared[&key].1)
    }

    /// What is prepared already, and large enough.
    fn ready(&self, key: &Key, bytes: u64) -> Option<&PreparedCollective> {
        let (capacity, prepared) = self.prepared.get(key)?;
        (*capacity >= bytes).then_some(prepared)
    }

    /// What the call would take. Local.
    pub(crate) fn selector(&self, call: &CollectiveCall) -> Result<Selector, Error> {
        let delegate = self.delegate.as_ref();
        if delegate.is_some_and(|delegate| delegate.rule(call.collective, call.bytes).is_some()) {
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
    ///
    /// # Errors
    /// Beside the exchange's: what is received in two places at once would be neither.
    fn messages(
        &mut self,
        sends: &[(u32, Source, u64)],
        receives: Vec<(u32, Destination, u64)>,
    ) -> Result<(), Error> {
        let mut ranges: Vec<_> = receives.iter().map(|(_, to, _)| to.range()).collect();
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable_by_key(|range| range.start);
        if !ranges.is_sorted_by(|before, after| before.end <= after.start) {
            return Err(Error::argument(
                "two receives of a group share bytes: give each a buffer of its own",
            ));
        }
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
        let mut group = self.exchange.group();
        for ((peer, data, stream), copy) in sends.iter().zip(&copies) {
            let data = copy.as_deref().unwrap_or(data.as_slice());
            match rule(data.len()) {
                None => {
                    group.send(*peer, data);
                }
                Some(rule) => delegated.push((rule, Message::send(*peer, data, *stream))),
            }
        }
        let (theirs, mut ours): (Vec<_>, Vec<_>) = receives
            .into_iter()
            .partition(|(_, data, _)| rule(data.len()).is_some());
        for (peer, data, _) in &mut ours {
            group.recv(*peer, data.as_slice_mut());
        }
        for (peer, mut data, stream) in theirs {
            if let Some(rule) = rule(data.len()) {
                delegated.push((rule, Message::receive(peer, data.as_slice_mut(), stream)));
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

    fn one_sided(&self, call: Call) -> Result<(), Error> {
        match call {
            Call::Put(peer, data, window, offset) => {
                let memory = window.memory()?.registered();
                let at = window.offset() + offset;
                let put = self.one_sided.put(&memory, peer, at, data.as_slice());
                put.and_then(|()| self.one_sided.signal(peer))
            }
            Call::Signal(peer) => self.one_sided.signal(peer),
            Call::Wait(peer, count) => {
                let wait = || self.one_sided.wait(peer, count);
                self.notes.waiting_for(vec![peer], wait)
            }
            Call::Collective(_) | Call::Send(..) | Call::Receive(..) => Ok(()),
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
        let all = self.prepared.values();
        all.map(|(_, prepared)| prepared.scratch_bytes()).sum()
    }

    /// Bytes of memory that are there as long as the communicator.
    pub(crate) fn lasting_bytes(&self) -> u64 {
        self.exchange.ring_bytes()
    }

    /// A window goes: so does what was prepared for it.
    pub(crate) fn forget(&mut self, window: &Window) {
        let number = window.number();
        let has = |windows: &(u64, u64)| windows.0 == number || windows.1 == number;
        self.prepared
            .retain(|key, _| !key.4.as_ref().is_some_and(has));
    }

    /// Gives memory back. What is called next is prepared anew.
    pub(crate) fn clear(&mut self) {
        self.prepared.clear();
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
        Reduction::PreMultiplied(factor) => {
            let scalar = Scalar::from_bits(factor.bits(call.dtype.size()));
            CollectiveOptions::new(call.dtype, ReduceOp::Sum, capacity).pre_multiplied(scalar)
        }
    };
    if let Some(zone) = &call.zone {
        options = options.symmetric(zone.input.memory()?, zone.output.memory()?);
    }
    Ok(options)
}
