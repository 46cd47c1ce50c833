//! Messages between pairs of ranks, and collectives whose blocks have any size: what no plan can know
//! beforehand.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crossweft_device::{DataType, ReduceOp};
use crossweft_executor as executor;
use crossweft_executor::{Destination, Kind, Messages, Purpose, Source};
use crossweft_hal::Memory;

use smallvec::SmallVec;

use crate::communicator::{Communicator, SymmetricBuffer};
use crate::error::CollectiveError;

/// Something of each rank, without an allocation for up to 16.
type PerRank<T> = SmallVec<[T; 16]>;

/// What an exchange is prepared for. The same on every rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ExchangeOptions {
    /// Slots of each pair's ring: a power of two. As many small messages of a pair, or pieces of a large one,
    /// may be under way.
    pub slots: u32,
    /// Bytes of a slot: a multiple of 64, at least 128. Each rank has a ring for every rank.
    pub slot_bytes: u64,
    /// Symmetric memories from which receivers copy large messages themselves, which saves one copy.
    pub memories: Vec<SymmetricBuffer>,
}

impl Default for ExchangeOptions {
    /// The usual rings, no symmetric memory.
    fn default() -> Self {
        let usual = executor::ExchangeOptions::new(std::time::Duration::ZERO);
        Self {
            slots: usual.slots,
            slot_bytes: usual.slot_bytes,
            memories: Vec::new(),
        }
    }
}

impl ExchangeOptions {
    /// Large messages are sent from `buffer` too.
    #[must_use]
    pub fn symmetric(mut self, buffer: &SymmetricBuffer) -> Self {
        self.memories.push(buffer.clone());
        self
    }

    /// Rings of `slots` slots of `slot_bytes` bytes.
    #[must_use]
    pub fn rings(mut self, slots: u32, slot_bytes: u64) -> Self {
        (self.slots, self.slot_bytes) = (slots, slot_bytes);
        self
    }
}

/// A number of elements for each rank: a list, or memory in which a call looks when it begins. What computes the numbers
/// need not hand them to the host: they may be the output of the call before.
#[derive(Clone, Copy, Debug)]
pub struct Counts<'a>(Place<'a>);

#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    List(&'a [u64]),
    /// From a byte of a memory, of which so many may be looked at.
    Memory(&'a Memory, u64, u64),
}

impl<'a> Counts<'a> {
    /// 64-bit numbers in native byte order, one for each rank, from byte `offset` of memory of this rank's device. Nobody
    /// may write them until the call has ended.
    #[must_use]
    pub fn in_memory(memory: &'a Memory, offset: u64) -> Self {
        Self(Place::Memory(memory, offset, memory.bytes()))
    }

    /// The same, in this rank's part of a symmetric buffer.
    #[must_use]
    pub fn symmetric(buffer: &'a SymmetricBuffer, offset: u64) -> Self {
        Self(Place::Memory(
            buffer.memory().local(),
            offset,
            buffer.bytes(),
        ))
    }

    /// The numbers of `ranks` ranks, called `what`, each looked at once: somebody may change them all the same.
    fn read(self, what: &str, ranks: u32) -> Result<PerRank<u64>, String> {
        let ranks = ranks as usize;
        match self.0 {
            Place::List(list) if list.len() == ranks => Ok(list.into()),
            Place::List(list) => Err(format!("{} {what}; there are {ranks} ranks", list.len())),
            Place::Memory(memory, offset, bytes) => {
                let mut words = PerRank::from_elem([0; 8], ranks);
                let text = words.as_flattened_mut();
                if offset.saturating_add(text.len() as u64) > bytes {
                    return Err(format!(
                        "{what} of {ranks} ranks at byte {offset} lie outside a memory of {bytes} bytes"
                    ));
                }
                let read = memory.read(offset, text);
                read.map_err(|error| format!("{what} at byte {offset}: {error}"))?;
                Ok(words.into_iter().map(u64::from_ne_bytes).collect())
            }
        }
    }
}

impl<'a> From<&'a [u64]> for Counts<'a> {
    fn from(list: &'a [u64]) -> Self {
        Self(Place::List(list))
    }
}

impl<'a> From<&'a Vec<u64>> for Counts<'a> {
    fn from(list: &'a Vec<u64>) -> Self {
        Self(Place::List(list))
    }
}

impl<'a, const N: usize> From<&'a [u64; N]> for Counts<'a> {
    fn from(list: &'a [u64; N]) -> Self {
        Self(Place::List(list))
    }
}

/// Where the block of each rank lies in a buffer, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    counts: Counts<'a>,
    displacements: Option<Counts<'a>>,
}

impl<'a> Blocks<'a> {
    /// Blocks of `counts` elements, one after another.
    #[must_use]
    pub fn packed(counts: impl Into<Counts<'a>>) -> Self {
        Self {
            counts: counts.into(),
            displacements: None,
        }
    }

    /// Blocks of `counts` elements that begin at `displacements`, in elements from the beginning of the buffer.
    #[must_use]
    pub fn at(counts: impl Into<Counts<'a>>, displacements: impl Into<Counts<'a>>) -> Self {
        Self {
            counts: counts.into(),
            displacements: Some(displacements.into()),
        }
    }

    /// Bytes of each rank's block, as ranges of a buffer of `length` bytes.
    fn ranges(
        self,
        dtype: DataType,
        ranks: u32,
        length: usize,
    ) -> Result<PerRank<Range<usize>>, String> {
        let counts = self.counts.read("counts", ranks)?;
        let displacements = self.displacements;
        let displacements = displacements.map(|d| d.read("displacements", ranks));
        let displacements = displacements.transpose()?;
        let size = dtype.size() as u64;
        let mut packed = 0_u64;
        let range = |(rank, &count): (usize, &u64)| {
            let start = displacements.as_ref().map_or(packed, |starts| starts[rank]);
            let end = start.checked_add(count);
            packed = packed.saturating_add(count);
            let bytes = |elements: u64| usize::try_from(elements.checked_mul(size)?).ok();
            let range = bytes(start).zip(end.and_then(bytes));
            match range.filter(|&(_, end)| end <= length) {
                Some((start, end)) => Ok(start..end),
                None => Err(format!(
                    "the block of rank {rank}, {count} elements of {dtype} at {start}, lies outside a \
                     buffer of {length} bytes"
                )),
            }
        };
        counts.iter().enumerate().map(range).collect()
    }
}

/// Ready for messages of any size between any ranks. Made by [`Communicator::exchange`]; calls are local: they
/// wait for the peers' messages, and only for those.
///
/// Messages of one pair of ranks match in the order in which they are sent and received, whatever calls they
/// belong to; both sides must give the same size and type. A small message may be sent before its
/// receiver asks for it.
#[derive(Clone, Debug)]
pub struct Exchange {
    inner: Arc<executor::Exchange>,
}

/// A group of sends and receives, which [`run`](Self::run) does together: no order in which a group was put
/// together leads to a deadlock, and only that of the sends to one rank, and of the receives from one, matters.
#[derive(Debug)]
#[must_use = "nothing is sent before it is run"]
pub struct Group<'a>(Messages<'a>);

impl<'a> Group<'a> {
    /// Sends bytes to `peer`, which may be this rank.
    pub fn send(&mut self, peer: u32, data: &'a [u8]) -> &mut Self {
        self.send_typed(peer, DataType::U8, data)
    }

    /// Receives bytes from `peer`, which may be this rank.
    pub fn recv(&mut self, peer: u32, data: &'a mut [u8]) -> &mut Self {
        self.recv_typed(peer, DataType::U8, data)
    }

    /// Sends elements of `dtype` to `peer`.
    pub fn send_typed(&mut self, peer: u32, dtype: DataType, data: &'a [u8]) -> &mut Self {
        self.0.send(peer, message(dtype), Source::Slice(data));
        self
    }

    /// Receives elements of `dtype` from `peer`.
    pub fn recv_typed(&mut self, peer: u32, dtype: DataType, data: &'a mut [u8]) -> &mut Self {
        self.0
            .receive(peer, message(dtype), Destination::Slice(data));
        self
    }

    /// Sends a range of bytes of this rank's part of a symmetric buffer. One that the exchange was prepared with
    /// is read by the receiver itself if the message is large.
    pub fn send_symmetric(
        &mut self,
        peer: u32,
        dtype: DataType,
        buffer: &'a SymmetricBuffer,
        range: Range<u64>,
    ) -> &mut Self {
        let source = Source::Registered(buffer.memory(), range);
        self.0.send(peer, message(dtype), source);
        self
    }

    /// Receives into a range of bytes of this rank's part of a symmetric buffer.
    pub fn recv_symmetric(
        &mut self,
        peer: u32,
        dtype: DataType,
        buffer: &'a SymmetricBuffer,
        range: Range<u64>,
    ) -> &mut Self {
        let destination = Destination::Registered(buffer.memory(), range);
        self.0.receive(peer, message(dtype), destination);
        self
    }

    /// Does all of it. Blocks until every receive is complete and the buffer of every send may be changed.
    ///
    /// # Errors
    /// [`CollectiveError::Exchange`]: a message does not match on its two sides, which both hear of it; a
    /// peer died or left, the job was aborted, or it took too long; or a send or receive cannot be, which
    /// changes nothing.
    pub fn run(&mut self) -> Result<(), CollectiveError> {
        Ok(self.0.run()?)
    }
}

const fn message(dtype: DataType) -> Kind {
    let purpose = Purpose::Message;
    Kind { dtype, purpose }
}

impl Exchange {
    pub(crate) fn prepare(
        communicator: &Communicator,
        options: &ExchangeOptions,
    ) -> Result<Self, CollectiveError> {
        let mut inner = executor::ExchangeOptions::new(communicator.timeout());
        (inner.slots, inner.slot_bytes) = (options.slots, options.slot_bytes);
        let memories = options.memories.iter().map(SymmetricBuffer::registered);
        inner.memories = memories.collect();
        let deadline = std::time::Instant::now() + communicator.timeout();
        let inner = executor::Exchange::prepare(communicator.endpoint(), inner, deadline)?;
        Ok(Self { inner })
    }

    /// Bytes of memory that it holds on this rank.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.inner.ring_bytes()
    }

    /// An empty group of sends and receives.
    #[inline]
    pub fn group(&self) -> Group<'_> {
        Group(self.inner.messages())
    }

    /// Sends bytes to `peer`. Blocks until `data` may be changed; a large message waits for its receiver.
    ///
    /// # Errors
    /// As for [`Group::run`].
    pub fn send(&self, peer: u32, data: &[u8]) -> Result<(), CollectiveError> {
        self.group().send(peer, data).run()
    }

    /// Receives bytes from `peer`. Blocks until they are here.
    ///
    /// # Errors
    /// As for [`Group::run`].
    pub fn recv(&self, peer: u32, data: &mut [u8]) -> Result<(), CollectiveError> {
        self.group().recv(peer, data).run()
    }

    /// Sends rank `r` block `r` of `input`, and receives block `r` of `output` from rank `r`. All ranks call it.
    ///
    /// # Errors
    /// As for [`Group::run`]; [`CollectiveError::Usage`], which changes nothing, if blocks do not fit their
    /// buffer or those of the output overlap.
    pub fn all_to_all_v(
        &self,
        dtype: DataType,
        (input, sent): (&[u8], Blocks<'_>),
        (output, received): (&mut [u8], Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        let call = self.call("all-to-all-v", dtype, Purpose::AllToAll);
        let sent = call.ranges(sent, input.len())?;
        let mut messages = self.inner.messages();
        for peer in self.peers() {
            let block = &input[sent[peer as usize].clone()];
            messages.send(peer, call.kind, Source::Slice(block));
        }
        let own = call.receive_all(&mut messages, output, received)?;
        call.copy(&input[sent[call.rank as usize].clone()], own, messages)
    }

    /// Block `r` of every rank's `output` becomes rank `r`'s `input`. All ranks call it, with the same counts.
    ///
    /// # Errors
    /// As for [`all_to_all_v`](Self::all_to_all_v); also if `input` has not the size of this rank's block.
    pub fn all_gather_v(
        &self,
        dtype: DataType,
        input: &[u8],
        (output, blocks): (&mut [u8], Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        let call = self.call("all-gather-v", dtype, Purpose::AllGather);
        let mut messages = self.inner.messages();
        for peer in self.peers() {
            messages.send(peer, call.kind, Source::Slice(input));
        }
        let own = call.receive_all(&mut messages, output, blocks)?;
        call.copy(input, own, messages)
    }

    /// [`all_gather_v`](Self::all_gather_v) of this rank's block of `data` itself.
    ///
    /// # Errors
    /// As there.
    pub fn all_gather_v_in_place(
        &self,
        dtype: DataType,
        (data, blocks): (&mut [u8], Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        let call = self.call("all-gather-v", dtype, Purpose::AllGather);
        let mut messages = self.inner.messages();
        let own: &[u8] = call.receive_all(&mut messages, data, blocks)?;
        for peer in self.peers() {
            messages.send(peer, call.kind, Source::Slice(own));
        }
        Ok(messages.run()?)
    }

    /// Block `r` of the root's `output` becomes rank `r`'s `input`. All ranks call it with one root; `output` is
    /// of account on the root only.
    ///
    /// # Errors
    /// As for [`all_to_all_v`](Self::all_to_all_v).
    pub fn gather_v(
        &self,
        root: u32,
        dtype: DataType,
        input: &[u8],
        output: Option<(&mut [u8], Blocks<'_>)>,
    ) -> Result<(), CollectiveError> {
        let call = self.call("gather-v", dtype, Purpose::Gather);
        let mut messages = self.inner.messages();
        if call.rank != root {
            messages.send(root, call.kind, Source::Slice(input));
            return Ok(messages.run()?);
        }
        let Some((output, blocks)) = output else {
            return Err(call.usage("the root gave no output"));
        };
        let own = call.receive_all(&mut messages, output, blocks)?;
        call.copy(input, own, messages)
    }

    /// Rank `r`'s `output` becomes block `r` of the root's `input`. All ranks call it with one root; `input` is of
    /// account on the root only.
    ///
    /// # Errors
    /// As for [`all_to_all_v`](Self::all_to_all_v).
    pub fn scatter_v(
        &self,
        root: u32,
        dtype: DataType,
        input: Option<(&[u8], Blocks<'_>)>,
        output: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let call = self.call("scatter-v", dtype, Purpose::Scatter);
        let mut messages = self.inner.messages();
        if call.rank != root {
            messages.receive(root, call.kind, Destination::Slice(output));
            return Ok(messages.run()?);
        }
        let Some((input, blocks)) = input else {
            return Err(call.usage("the root gave no input"));
        };
        let ranges = call.ranges(blocks, input.len())?;
        for peer in self.peers() {
            let block = &input[ranges[peer as usize].clone()];
            messages.send(peer, call.kind, Source::Slice(block));
        }
        call.copy(&input[ranges[root as usize].clone()], output, messages)
    }

    /// Rank `r`'s `output` becomes the reduction of block `r` of all ranks' `input`, in rank order: the same
    /// bits each time. All ranks call it, with the same counts.
    ///
    /// # Errors
    /// As for [`all_to_all_v`](Self::all_to_all_v); also if `output` has not the size of this rank's block.
    pub fn reduce_scatter_v(
        &self,
        dtype: DataType,
        op: ReduceOp,
        (input, blocks): (&[u8], Blocks<'_>),
        output: &mut [u8],
    ) -> Result<(), CollectiveError> {
        let call = self.call("reduce-scatter-v", dtype, Purpose::ReduceScatter(op));
        let ranges = call.ranges(blocks, input.len())?;
        let mut messages = self.inner.messages();
        for peer in self.peers() {
            let block = &input[ranges[peer as usize].clone()];
            messages.send(peer, call.kind, Source::Slice(block));
        }
        let own = &input[ranges[call.rank as usize].clone()];
        call.same_size(own, output)?;
        messages.reduce(dtype, op, own, output);
        Ok(messages.run()?)
    }

    /// The other ranks, beginning with the one after this: so that not all send to the same one first.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.inner.rank(), self.inner.world_size());
        (1..ranks).map(move |k| (rank + k) % ranks)
    }

    fn call(&self, name: &'static str, dtype: DataType, purpose: Purpose) -> Call {
        Call {
            name,
            kind: Kind { dtype, purpose },
            rank: self.inner.rank(),
            ranks: self.inner.world_size(),
        }
    }
}

/// A call of a collective, for its checks.
struct Call {
    name: &'static str,
    kind: Kind,
    rank: u32,
    ranks: u32,
}

impl Call {
    fn usage(&self, reason: impl Display) -> CollectiveError {
        CollectiveError::Usage {
            rank: self.rank,
            reason: format!("{}: {reason}", self.name),
        }
    }

    fn ranges(
        &self,
        blocks: Blocks<'_>,
        length: usize,
    ) -> Result<PerRank<Range<usize>>, CollectiveError> {
        let ranges = blocks.ranges(self.kind.dtype, self.ranks, length);
        ranges.map_err(|reason| self.usage(reason))
    }

    fn same_size(&self, input: &[u8], output: &[u8]) -> Result<(), CollectiveError> {
        match (input.len(), output.len()) {
            (input, output) if input != output => Err(self.usage(format!(
                "this rank's own block has {input} bytes in the input, {output} in the output"
            ))),
            _ => Ok(()),
        }
    }

    /// Adds a receive of every other rank's block of `data`; returns this rank's own.
    fn receive_all<'a>(
        &self,
        messages: &mut Messages<'a>,
        data: &'a mut [u8],
        blocks: Blocks<'_>,
    ) -> Result<&'a mut [u8], CollectiveError> {
        let mut own: &mut [u8] = &mut [];
        for (peer, block) in self.carve(data, blocks)? {
            if peer == self.rank {
                own = block;
            } else {
                messages.receive(peer, self.kind, Destination::Slice(block));
            }
        }
        Ok(own)
    }

    /// Runs `messages` and copies this rank's own block, which needs no message.
    fn copy(
        &self,
        from: &[u8],
        to: &mut [u8],
        mut messages: Messages<'_>,
    ) -> Result<(), CollectiveError> {
        self.same_size(from, to)?;
        messages.run()?;
        to.copy_from_slice(from);
        Ok(())
    }

    /// The blocks of `data` with their ranks, in the order in which they lie.
    fn carve<'a>(
        &self,
        data: &'a mut [u8],
        blocks: Blocks<'_>,
    ) -> Result<PerRank<(u32, &'a mut [u8])>, CollectiveError> {
        let ranges = self.ranges(blocks, data.len())?;
        let mut order: PerRank<_> = (0..self.ranks).zip(ranges).collect();
        order.sort_unstable_by_key(|(_, range)| (range.start, range.end));
        let mut rest = data;
        let mut begin = 0;
        let carved = order.into_iter().map(|(rank, range)| {
            // What has no elements may lie anywhere, inside another block too.
            if range.is_empty() {
                let none: &mut [u8] = &mut [];
                return Ok((rank, none));
            }
            let Some(skipped) = range.start.checked_sub(begin) else {
                return Err(self.usage(format!(
                    "the block of rank {rank} overlaps another one in the output"
                )));
            };
            begin = range.end;
            let (_, from) = std::mem::take(&mut rest).split_at_mut(skipped);
            let (block, after) = from.split_at_mut(range.len());
            rest = after;
            Ok((rank, block))
        });
        carved.collect()
    }
}
