//! Messages between pairs of ranks, and collectives whose blocks have any size: what no plan can know
//! beforehand.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crossweft_device::{DataType, ReduceOp};
use crossweft_executor as executor;
use crossweft_executor::{Destination, Kind, Messages, Purpose, Region, Source};
use crossweft_hal::{Memory, cuda};

use smallvec::SmallVec;

use crate::communicator::{Communicator, SymmetricBuffer};
use crate::error::CollectiveError;

/// Something of each rank, without an allocation for up to 16.
type PerRank<T> = SmallVec<[T; 16]>;

/// What an exchange is prepared for. The same on every rank.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ExchangeOptions {
    /// Slots of each ring, a power of two, and their bytes, a multiple of 64 and at least 128; `None` for what is usual
    /// on the ranks' devices. As many small messages of a pair, or pieces of a large one, may be under way.
    pub rings: Option<(u32, u64)>,
    /// Rings that each rank has for every rank; `None` for what is usual. Large messages are spread over them.
    pub lanes: Option<u32>,
    /// Symmetric memories from which receivers copy large messages themselves, which saves one copy.
    pub memories: Vec<SymmetricBuffer>,
    /// Element types of reduce-scatters on a GPU, whose kernels are loaded with the exchange; of at most 127 ranks.
    pub reduces: Vec<DataType>,
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
        self.rings = Some((slots, slot_bytes));
        self
    }

    /// `lanes` rings for each pair of ranks.
    #[must_use]
    pub fn lanes(mut self, lanes: u32) -> Self {
        self.lanes = Some(lanes);
        self
    }

    /// Elements of `dtype` are reduced too, on a GPU. The CPU reduces all types.
    #[must_use]
    pub fn reducing(mut self, dtype: DataType) -> Self {
        self.reduces.push(dtype);
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
        length: u64,
    ) -> Result<PerRank<Range<u64>>, String> {
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
            let bytes = |elements: u64| elements.checked_mul(size);
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

    /// Sends elements of `dtype` in memory of this rank's device to `peer`. What lies in a symmetric buffer that the exchange
    /// was prepared with is read by the receiver itself if the message is large.
    pub fn send_region(&mut self, peer: u32, dtype: DataType, region: Region) -> &mut Self {
        let source = Source::Region(region);
        self.0.send(peer, message(dtype), source);
        self
    }

    /// Receives elements of `dtype` into memory of this rank's device.
    pub fn recv_region(&mut self, peer: u32, dtype: DataType, region: Region) -> &mut Self {
        let destination = Destination::Region(region);
        self.0.receive(peer, message(dtype), destination);
        self
    }

    /// Sends a range of bytes of a memory of this rank's device to `peer`.
    pub fn send_memory(
        &mut self,
        peer: u32,
        dtype: DataType,
        memory: &'a Memory,
        range: Range<u64>,
    ) -> &mut Self {
        let source = Source::Memory(memory, range);
        self.0.send(peer, message(dtype), source);
        self
    }

    /// Receives into a range of bytes of a memory of this rank's device.
    pub fn recv_memory(
        &mut self,
        peer: u32,
        dtype: DataType,
        memory: &'a Memory,
        range: Range<u64>,
    ) -> &mut Self {
        let destination = Destination::Memory(memory, range);
        self.0.receive(peer, message(dtype), destination);
        self
    }

    /// Does all of it in the order of a stream of this rank's GPU, which may be recording a graph; returns at once. What
    /// goes wrong on the device shows up in [`Exchange::check`]. Replays of a graph must not run while other groups of the
    /// exchange do, and not outlive it.
    ///
    /// # Errors
    /// [`CollectiveError::Exchange`]: the ranks are on the CPU, memory is neither given by address nor a symmetric buffer that
    /// the exchange was prepared with, an earlier group has failed, or the device refused something.
    pub fn run_on(&mut self, stream: &cuda::Stream) -> Result<(), CollectiveError> {
        Ok(self.0.run_on(stream)?)
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
        let (endpoint, timeout) = (communicator.endpoint(), communicator.timeout());
        let mut inner = executor::ExchangeOptions::usual(endpoint, timeout);
        if let Some(rings) = options.rings {
            (inner.slots, inner.slot_bytes) = rings;
        }
        inner.lanes = options.lanes.unwrap_or(inner.lanes);
        inner.reduces.clone_from(&options.reduces);
        let memories = options.memories.iter().map(SymmetricBuffer::registered);
        inner.memories = memories.collect();
        let deadline = std::time::Instant::now() + communicator.timeout();
        let inner = executor::Exchange::prepare(endpoint, inner, deadline)?;
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

    /// Whether every group and collective that has ended, ended well; does not block. On a GPU, ask after the stream has
    /// come to its end.
    ///
    /// # Errors
    /// [`CollectiveError::Exchange`]: what ended the first that ended badly.
    pub fn check(&self) -> Result<(), CollectiveError> {
        Ok(self.inner.check()?)
    }

    /// Ends the waits of all that was launched on a GPU, and will be, within about a millisecond: for who has heard of a
    /// failure while nobody waits for the stream.
    pub fn end_waits(&self) {
        self.inner.end_waits();
    }

    /// The collectives on buffers anywhere, in the order of a stream of this rank's GPU, or, without one, until they have
    /// ended.
    #[must_use]
    pub fn calls<'a>(&'a self, stream: Option<&'a cuda::Stream>) -> Calls<'a> {
        Calls {
            exchange: &self.inner,
            stream,
        }
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
        self.here()
            .all_to_all_v(dtype, (input, sent), (output, received))
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
        self.here().all_gather_v(dtype, input, (output, blocks))
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
        self.here().all_gather_v_in_place(dtype, (data, blocks))
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
        self.here().gather_v(root, dtype, input, output)
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
        self.here().scatter_v(root, dtype, input, output)
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
        self.here()
            .reduce_scatter_v(dtype, op, (input, blocks), output)
    }

    fn here(&self) -> Calls<'_> {
        self.calls(None)
    }
}

/// The collectives of an [`Exchange`], wherever buffers lie: in the host's memory where ranks compute on it, in memory of their
/// device, or at an address. In the order of a stream, they return at once; what goes wrong on the device then shows up in
/// [`Exchange::check`], and buffers must be given by address, for nobody else would keep them.
#[derive(Clone, Copy, Debug)]
pub struct Calls<'a> {
    exchange: &'a executor::Exchange,
    stream: Option<&'a cuda::Stream>,
}

impl Calls<'_> {
    /// [`Exchange::all_to_all_v`].
    ///
    /// # Errors
    /// As there; on a stream, as for [`Group::run_on`].
    pub fn all_to_all_v<'b>(
        &self,
        dtype: DataType,
        (input, sent): (impl Into<Input<'b>>, Blocks<'_>),
        (output, received): (impl Into<Output<'b>>, Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        self.all_to_all(dtype, (input.into(), sent), (output.into(), received))
    }

    /// [`Exchange::all_gather_v`].
    ///
    /// # Errors
    /// As there; on a stream, as for [`Group::run_on`].
    pub fn all_gather_v<'b>(
        &self,
        dtype: DataType,
        input: impl Into<Input<'b>>,
        (output, blocks): (impl Into<Output<'b>>, Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        self.all_gather(dtype, Some(input.into()), (output.into(), blocks))
    }

    /// [`Exchange::all_gather_v_in_place`].
    ///
    /// # Errors
    /// As there; on a stream, as for [`Group::run_on`].
    pub fn all_gather_v_in_place<'b>(
        &self,
        dtype: DataType,
        (data, blocks): (impl Into<Output<'b>>, Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        self.all_gather(dtype, None, (data.into(), blocks))
    }

    /// [`Exchange::gather_v`].
    ///
    /// # Errors
    /// As there; on a stream, as for [`Group::run_on`].
    pub fn gather_v<'b>(
        &self,
        root: u32,
        dtype: DataType,
        input: impl Into<Input<'b>>,
        output: Option<(impl Into<Output<'b>>, Blocks<'_>)>,
    ) -> Result<(), CollectiveError> {
        let output = output.map(|(output, blocks)| (output.into(), blocks));
        self.gather(root, dtype, input.into(), output)
    }

    /// [`Exchange::scatter_v`].
    ///
    /// # Errors
    /// As there; on a stream, as for [`Group::run_on`].
    pub fn scatter_v<'b>(
        &self,
        root: u32,
        dtype: DataType,
        input: Option<(impl Into<Input<'b>>, Blocks<'_>)>,
        output: impl Into<Output<'b>>,
    ) -> Result<(), CollectiveError> {
        let input = input.map(|(input, blocks)| (input.into(), blocks));
        self.scatter(root, dtype, input, output.into())
    }

    /// [`Exchange::reduce_scatter_v`]; on a GPU, of a type that the exchange was prepared to
    /// [reduce](ExchangeOptions::reducing).
    ///
    /// # Errors
    /// As there; on a stream, as for [`Group::run_on`].
    pub fn reduce_scatter_v<'b>(
        &self,
        dtype: DataType,
        op: ReduceOp,
        (input, blocks): (impl Into<Input<'b>>, Blocks<'_>),
        output: impl Into<Output<'b>>,
    ) -> Result<(), CollectiveError> {
        self.reduce_scatter(dtype, op, (input.into(), blocks), output.into())
    }

    fn all_to_all(
        &self,
        dtype: DataType,
        (input, sent): (Input<'_>, Blocks<'_>),
        (output, received): (Output<'_>, Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        let call = self.call("all-to-all-v", dtype, Purpose::AllToAll);
        let sent = call.blocks(input, sent)?;
        let mut messages = self.exchange.messages();
        for peer in self.peers() {
            messages.send(peer, call.kind, sent[peer as usize].source());
        }
        let own = call.receive_all(&mut messages, output, received)?;
        call.copy(&mut messages, sent[call.rank as usize], own)?;
        self.run(messages)
    }

    /// Of this rank's block of the output itself, if there is no input.
    fn all_gather(
        &self,
        dtype: DataType,
        input: Option<Input<'_>>,
        (output, blocks): (Output<'_>, Blocks<'_>),
    ) -> Result<(), CollectiveError> {
        let call = self.call("all-gather-v", dtype, Purpose::AllGather);
        let mut messages = self.exchange.messages();
        let own = call.receive_all(&mut messages, output, blocks)?;
        let input = match input {
            None => own.into_input(),
            Some(input) => {
                call.copy(&mut messages, input, own)?;
                input
            }
        };
        for peer in self.peers() {
            messages.send(peer, call.kind, input.source());
        }
        self.run(messages)
    }

    fn gather(
        &self,
        root: u32,
        dtype: DataType,
        input: Input<'_>,
        output: Option<(Output<'_>, Blocks<'_>)>,
    ) -> Result<(), CollectiveError> {
        let call = self.call("gather-v", dtype, Purpose::Gather);
        let mut messages = self.exchange.messages();
        if call.rank != root {
            messages.send(root, call.kind, input.source());
            return self.run(messages);
        }
        let Some((output, blocks)) = output else {
            return Err(call.usage("the root gave no output"));
        };
        let own = call.receive_all(&mut messages, output, blocks)?;
        call.copy(&mut messages, input, own)?;
        self.run(messages)
    }

    fn scatter(
        &self,
        root: u32,
        dtype: DataType,
        input: Option<(Input<'_>, Blocks<'_>)>,
        output: Output<'_>,
    ) -> Result<(), CollectiveError> {
        let call = self.call("scatter-v", dtype, Purpose::Scatter);
        let mut messages = self.exchange.messages();
        if call.rank != root {
            messages.receive(root, call.kind, output.destination());
            return self.run(messages);
        }
        let Some((input, blocks)) = input else {
            return Err(call.usage("the root gave no input"));
        };
        let blocks = call.blocks(input, blocks)?;
        for peer in self.peers() {
            messages.send(peer, call.kind, blocks[peer as usize].source());
        }
        call.copy(&mut messages, blocks[root as usize], output)?;
        self.run(messages)
    }

    fn reduce_scatter(
        &self,
        dtype: DataType,
        op: ReduceOp,
        (input, blocks): (Input<'_>, Blocks<'_>),
        output: Output<'_>,
    ) -> Result<(), CollectiveError> {
        let call = self.call("reduce-scatter-v", dtype, Purpose::ReduceScatter(op));
        let blocks = call.blocks(input, blocks)?;
        let mut messages = self.exchange.messages();
        for peer in self.peers() {
            messages.send(peer, call.kind, blocks[peer as usize].source());
        }
        let own = blocks[call.rank as usize];
        call.same_size(own, &output)?;
        messages.reduce(dtype, op, own.source(), output.destination());
        self.run(messages)
    }

    fn run(&self, mut messages: Messages<'_>) -> Result<(), CollectiveError> {
        match self.stream {
            None => messages.run()?,
            Some(stream) => messages.run_on(stream)?,
        }
        Ok(())
    }

    /// The other ranks, beginning with the one after this: so that not all send to the same one first.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.exchange.rank(), self.exchange.world_size());
        (1..ranks).map(move |k| (rank + k) % ranks)
    }

    fn call(&self, name: &'static str, dtype: DataType, purpose: Purpose) -> Call {
        Call {
            name,
            kind: Kind { dtype, purpose },
            rank: self.exchange.rank(),
            ranks: self.exchange.world_size(),
        }
    }
}

/// What is sent, wherever it lies.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(Buffer<&'a [u8], &'a Memory>);

/// Where messages go, wherever it lies.
#[derive(Debug)]
pub struct Output<'a>(Buffer<&'a mut [u8], &'a Memory>);

#[derive(Clone, Copy, Debug)]
enum Buffer<S, M> {
    Slice(S),
    Region(Region),
    /// From a byte, so many.
    Memory(M, u64, u64),
}

impl<'a> From<&'a [u8]> for Input<'a> {
    fn from(data: &'a [u8]) -> Self {
        Self(Buffer::Slice(data))
    }
}

impl From<Region> for Input<'_> {
    fn from(region: Region) -> Self {
        Self(Buffer::Region(region))
    }
}

/// A range of bytes.
impl<'a> From<(&'a Memory, Range<u64>)> for Input<'a> {
    fn from((memory, range): (&'a Memory, Range<u64>)) -> Self {
        let bytes = range.end.saturating_sub(range.start);
        Self(Buffer::Memory(memory, range.start, bytes))
    }
}

impl<'a> From<&'a mut [u8]> for Output<'a> {
    fn from(data: &'a mut [u8]) -> Self {
        Self(Buffer::Slice(data))
    }
}

impl From<Region> for Output<'_> {
    fn from(region: Region) -> Self {
        Self(Buffer::Region(region))
    }
}

/// A range of bytes.
impl<'a> From<(&'a Memory, Range<u64>)> for Output<'a> {
    fn from((memory, range): (&'a Memory, Range<u64>)) -> Self {
        let bytes = range.end.saturating_sub(range.start);
        Self(Buffer::Memory(memory, range.start, bytes))
    }
}

impl<'a> Input<'a> {
    const fn bytes(self) -> u64 {
        match self.0 {
            Buffer::Slice(data) => data.len() as u64,
            Buffer::Region(region) => region.bytes(),
            Buffer::Memory(_, _, bytes) => bytes,
        }
    }

    /// A range of it; nothing if that lies outside.
    fn part(self, range: &Range<u64>) -> Option<Self> {
        Some(Self(match self.0 {
            Buffer::Slice(data) => {
                Buffer::Slice(data.get(range.start as usize..range.end as usize)?)
            }
            Buffer::Region(region) => Buffer::Region(region.part(range.clone())?),
            Buffer::Memory(memory, start, bytes) => {
                let length = range.end.checked_sub(range.start)?;
                (range.end <= bytes).then_some(Buffer::Memory(
                    memory,
                    start + range.start,
                    length,
                ))?
            }
        }))
    }

    const fn source(self) -> Source<'a> {
        match self.0 {
            Buffer::Slice(data) => Source::Slice(data),
            Buffer::Region(region) => Source::Region(region),
            Buffer::Memory(memory, start, bytes) => Source::Memory(memory, start..start + bytes),
        }
    }
}

impl<'a> Output<'a> {
    const fn bytes(&self) -> u64 {
        match &self.0 {
            Buffer::Slice(data) => data.len() as u64,
            Buffer::Region(region) => region.bytes(),
            Buffer::Memory(_, _, bytes) => *bytes,
        }
    }

    /// Two parts, the first of so many bytes; nothing if it has not as many.
    fn split(self, first: u64) -> Option<(Self, Self)> {
        let (a, b) = match self.0 {
            Buffer::Slice(data) => {
                let (a, b) = data.split_at_mut_checked(first as usize)?;
                (Buffer::Slice(a), Buffer::Slice(b))
            }
            Buffer::Region(region) => {
                let rest = region.part(first..region.bytes())?;
                (Buffer::Region(region.part(0..first)?), Buffer::Region(rest))
            }
            Buffer::Memory(memory, start, bytes) => {
                let rest = bytes.checked_sub(first)?;
                (
                    Buffer::Memory(memory, start, first),
                    Buffer::Memory(memory, start + first, rest),
                )
            }
        };
        Some((Self(a), Self(b)))
    }

    fn into_input(self) -> Input<'a> {
        Input(match self.0 {
            Buffer::Slice(data) => Buffer::Slice(data),
            Buffer::Region(region) => Buffer::Region(region),
            Buffer::Memory(memory, start, bytes) => Buffer::Memory(memory, start, bytes),
        })
    }

    fn destination(self) -> Destination<'a> {
        match self.0 {
            Buffer::Slice(data) => Destination::Slice(data),
            Buffer::Region(region) => Destination::Region(region),
            Buffer::Memory(memory, start, bytes) => {
                Destination::Memory(memory, start..start + bytes)
            }
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
        length: u64,
    ) -> Result<PerRank<Range<u64>>, CollectiveError> {
        let ranges = blocks.ranges(self.kind.dtype, self.ranks, length);
        ranges.map_err(|reason| self.usage(reason))
    }

    /// The block of each rank.
    fn blocks<'a>(
        &self,
        input: Input<'a>,
        blocks: Blocks<'_>,
    ) -> Result<PerRank<Input<'a>>, CollectiveError> {
        let ranges = self.ranges(blocks, input.bytes())?;
        let outside = || self.usage("a block lies outside of the input");
        let part = |range| input.part(range).ok_or_else(outside);
        ranges.iter().map(part).collect()
    }

    fn same_size(&self, input: Input<'_>, output: &Output<'_>) -> Result<(), CollectiveError> {
        match (input.bytes(), output.bytes()) {
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
        data: Output<'a>,
        blocks: Blocks<'_>,
    ) -> Result<Output<'a>, CollectiveError> {
        let mut own = Output::from(&mut [][..]);
        for (peer, block) in self.carve(data, blocks)? {
            if peer == self.rank {
                own = block;
            } else {
                messages.receive(peer, self.kind, block.destination());
            }
        }
        Ok(own)
    }

    /// Adds a copy of this rank's own block, which needs no message.
    fn copy<'a>(
        &self,
        messages: &mut Messages<'a>,
        from: Input<'a>,
        to: Output<'a>,
    ) -> Result<(), CollectiveError> {
        self.same_size(from, &to)?;
        if from.bytes() > 0 {
            messages.copy(self.kind, from.source(), to.destination());
        }
        Ok(())
    }

    /// The blocks of `data` with their ranks, in the order in which they lie.
    fn carve<'a>(
        &self,
        data: Output<'a>,
        blocks: Blocks<'_>,
    ) -> Result<PerRank<(u32, Output<'a>)>, CollectiveError> {
        let ranges = self.ranges(blocks, data.bytes())?;
        let mut order: PerRank<_> = (0..self.ranks).zip(ranges).collect();
        order.sort_unstable_by_key(|(_, range)| (range.start, range.end));
        let mut carved = PerRank::new();
        let (mut rest, mut begin) = (data, 0);
        for (rank, range) in order {
            let overlaps = || {
                self.usage(format!(
                    "the block of rank {rank} overlaps another one in the output"
                ))
            };
            // What has no elements may lie anywhere, inside another block too.
            let (skipped, bytes) = match range.is_empty() {
                true => (0, 0),
                false => {
                    let skipped = range.start.checked_sub(begin).ok_or_else(overlaps)?;
                    begin = range.end;
                    (skipped, range.end - range.start)
                }
            };
            let (_, from) = rest.split(skipped).ok_or_else(overlaps)?;
            let (block, after) = from.split(bytes).ok_or_else(overlaps)?;
            carved.push((rank, block));
            rest = after;
        }
        Ok(carved)
    }
}
