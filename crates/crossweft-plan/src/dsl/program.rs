//! Recording: one call an instruction, all ranks in one program.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::panic::Location;

use super::error::{Error, Misuse, Source, buffer_name};
use super::memory::{Chunk, Memory};
use super::options::{Options, Shape};
use super::trace::{Counter, End, Group, Instr, Pieces, Trace};
use crate::place::{Data, Kind, Raw, SPARE, in_larger_buffer};
use crate::plan::{Buffer, ChannelKind, Collective, InPlace, InputBlock, Op, Operand};
use crate::validate::limits;

/// The end of a channel from one rank to another. The k-th channel from a to b ends where the k-th of the same
/// kind from b to a begins: signals sent with the one are waited for with the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Channel(u32);

/// A group of ranks whose buffers are reached at once where the hardware has multicast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Switch(u32);

/// A counter among the thread blocks of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Semaphore(u32);

/// Who executes an instruction: one thread block of the rank, or a group that shares its data in equal
/// slices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Blocks(Vec<u32>);

impl From<u32> for Blocks {
    fn from(block: u32) -> Self {
        Self(vec![block])
    }
}

impl From<&[u32]> for Blocks {
    fn from(group: &[u32]) -> Self {
        Self(group.to_vec())
    }
}

impl From<Vec<u32>> for Blocks {
    fn from(group: Vec<u32>) -> Self {
        Self(group)
    }
}

impl From<Range<u32>> for Blocks {
    fn from(group: Range<u32>) -> Self {
        Self(group.collect())
    }
}

/// A program over all ranks: instructions in the order in which they would have to run one after the other.
/// See the [module](super).
#[derive(Clone, Debug)]
pub struct Program {
    pub(super) options: Options,
    pub(super) shape: Shape,
    pub(super) trace: Trace,
    pub(super) sources: Vec<Source>,
    source_ids: HashMap<Source, u32>,
    /// Where the next instruction is, if its caller has said so.
    next_source: Option<Source>,
    /// By rank.
    pub(super) scratch: Vec<u32>,
    /// What a custom collective's outputs must hold.
    pub(super) outputs: Vec<Vec<Vec<InputBlock>>>,
    /// By rank: scratch slots from [`SPARE`] that are in use.
    pub(super) spare: Vec<u32>,
    pub(super) ordinals: HashMap<(u32, u32, ChannelKind), u32>,
    current_loop: Option<u32>,
}

/// Chunks of output of all ranks, of which a custom program says what they hold.
const MOST_STATED: u64 = 1 << 22;

type Done = Result<(), Error>;

/// An operand, with what to call it in messages.
type Named = (&'static str, Chunk, Role);

/// What an operand must be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Bytes, anywhere.
    Bytes,
    /// Packets, in scratch memory.
    Packets,
}

impl Program {
    /// An empty program.
    ///
    /// # Errors
    /// [`Error::Options`]: no ranks, no chunks, no instances, or too many of them.
    pub fn new(options: Options) -> Result<Self, Error> {
        let refuse = |reason: String| Err(Error::Options { reason });
        let ranks = options.ranks;
        if ranks == 0 || ranks as usize > limits::RANKS {
            return refuse(format!(
                "{ranks} ranks; 1 to {} are supported",
                limits::RANKS
            ));
        }
        let instances = options.instances;
        if instances == 0 || instances > limits::SLICES {
            return refuse(format!(
                "{instances} instances; 1 to {} are supported",
                limits::SLICES
            ));
        }
        let shape = Shape::of(&options).filter(|shape| {
            let (input, output) = shape.blocks;
            let chunks = shape.chunks.checked_mul(input.max(output).max(1));
            let chunks = chunks.and_then(|chunks| chunks.checked_mul(instances));
            shape.chunks > 0 && chunks.is_some_and(|chunks| chunks <= limits::CHUNKS)
        });
        let Some(shape) = shape else {
            return refuse(format!(
                "a chunk factor of {} with {ranks} ranks and {instances} instances; chunks are at least 1 and \
                 at most {} in each buffer",
                options.chunk_factor,
                limits::CHUNKS
            ));
        };
        if let Some(root) = options.collective.root().filter(|root| *root >= ranks) {
            return refuse(format!("the root is rank {root}, of {ranks} ranks"));
        }
        // Each is said for itself, and the checker would not take more.
        let stated = u64::from(shape.blocks.1) * u64::from(ranks);
        if options.collective == Collective::Custom && stated > MOST_STATED {
            return refuse(format!(
                "{} chunks of output on each of {ranks} ranks; a custom program may have {MOST_STATED} in all",
                shape.blocks.1
            ));
        }
        let outputs = match options.collective {
            Collective::Custom => vec![vec![Vec::new(); shape.blocks.1 as usize]; ranks as usize],
            _ => Vec::new(),
        };
        Ok(Self {
            options,
            shape,
            outputs,
            trace: Trace::default(),
            sources: Vec::new(),
            source_ids: HashMap::new(),
            next_source: None,
            scratch: vec![0; ranks as usize],
            spare: vec![0; ranks as usize],
            ordinals: HashMap::new(),
            current_loop: None,
        })
    }

    /// The options it was made with.
    #[must_use]
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// World size.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.options.ranks
    }

    /// Says where the next call is in the user's program. Without this, it is where it is called.
    pub fn at(&mut self, source: Source) -> &mut Self {
        self.next_source = Some(source);
        self
    }

    /// `rank`'s input.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`].
    #[track_caller]
    pub fn input(&mut self, rank: u32) -> Result<Memory, Error> {
        let chunks = self.shape.chunks * self.shape.blocks.0;
        self.memory(rank, Buffer::Input, chunks)
    }

    /// `rank`'s output.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`].
    #[track_caller]
    pub fn output(&mut self, rank: u32) -> Result<Memory, Error> {
        let chunks = self.shape.chunks * self.shape.blocks.1;
        self.memory(rank, Buffer::Output, chunks)
    }

    #[track_caller]
    fn memory(&mut self, rank: u32, buffer: Buffer, chunks: u32) -> Result<Memory, Error> {
        let source = self.source();
        self.rank(source, rank)?;
        Ok(Memory {
            rank,
            buffer,
            first: 0,
            chunks,
        })
    }

    /// `chunks` more chunks of scratch memory on `rank`. Packets that are put there have a place of their own.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`], [`Misuse::TooMany`].
    #[track_caller]
    pub fn scratch(&mut self, rank: u32, chunks: u32) -> Result<Memory, Error> {
        let source = self.source();
        self.rank(source, rank)?;
        let first = self.scratch[rank as usize];
        let all = u64::from(first) + u64::from(chunks);
        let limit = u64::from(limits::CHUNKS / self.options.instances);
        if all > limit {
            return self.misuse(
                source,
                Misuse::TooMany {
                    what: "chunks of scratch memory",
                    number: all,
                    limit,
                },
            );
        }
        self.scratch[rank as usize] = all as u32;
        Ok(Memory {
            rank,
            buffer: Buffer::Scratch,
            first,
            chunks,
        })
    }

    /// States what a custom program computes: in the end, each chunk of `output` must hold the reduction of
    /// the same chunk of each of `inputs`. What nothing is stated about may hold anything.
    ///
    /// # Errors
    /// [`Misuse::NotCustom`], [`Misuse::WrongBuffer`], and what is wrong with the chunks.
    #[track_caller]
    pub fn expect(&mut self, output: Chunk, inputs: &[Chunk]) -> Done {
        let source = self.source();
        if self.options.collective != Collective::Custom {
            let collective = self.options.collective.name();
            return self.misuse(source, Misuse::NotCustom { collective });
        }
        let named = [("output", output, Buffer::Output)].into_iter();
        let named = named.chain(inputs.iter().map(|input| ("input", *input, Buffer::Input)));
        for (role, chunk, wanted) in named {
            let (_, count) = self.operand(source, chunk.of.rank, (role, chunk, Role::Bytes))?;
            let (buffer, source_count) = (chunk.of.buffer, output.len());
            if buffer != wanted {
                let wanted = buffer_name(wanted);
                let misuse = Misuse::WrongBuffer {
                    role,
                    buffer,
                    wanted,
                };
                return self.misuse(source, misuse);
            }
            if count != source_count {
                let misuse = Misuse::Sizes {
                    role,
                    count,
                    source_count,
                };
                return self.misuse(source, misuse);
            }
        }
        for k in 0..output.len() {
            let held = &mut self.outputs[output.of.rank as usize][(output.first + k) as usize];
            *held = inputs
                .iter()
                .map(|input| InputBlock {
                    rank: input.of.rank,
                    block: input.first + k,
                })
                .collect();
        }
        Ok(())
    }

    // --- resources ---

    /// A memory channel from `source` to `destination`: the kernel itself moves the data.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`], [`Misuse::WrongRank`] if both are one.
    #[track_caller]
    pub fn memory_channel(&mut self, destination: u32, source: u32) -> Result<Channel, Error> {
        self.channel(ChannelKind::Memory, destination, source)
    }

    /// A port channel from `source` to `destination`: a proxy moves the data.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`], [`Misuse::WrongRank`] if both are one.
    #[track_caller]
    pub fn port_channel(&mut self, destination: u32, source: u32) -> Result<Channel, Error> {
        self.channel(ChannelKind::Port, destination, source)
    }

    #[track_caller]
    fn channel(&mut self, kind: ChannelKind, peer: u32, rank: u32) -> Result<Channel, Error> {
        let source = self.source();
        self.rank(source, rank)?;
        self.rank(source, peer)?;
        if rank == peer {
            return self.misuse(
                source,
                Misuse::WrongRank {
                    role: "channel's destination",
                    rank: peer,
                    wanted: (rank + 1) % self.options.ranks,
                },
            );
        }
        let ordinal = self.ordinals.entry((rank, peer, kind)).or_default();
        self.trace.ends.push(End {
            rank,
            peer,
            kind,
            ordinal: *ordinal,
        });
        *ordinal += 1;
        Ok(Channel(self.trace.ends.len() as u32 - 1))
    }

    /// A switch channel among `ranks`, of their inputs, outputs, or scratch memories.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`], [`Misuse::Empty`] without ranks, [`Misuse::WrongBuffer`] for
    /// [`Buffer::Packets`], which lie in scratch memory.
    #[track_caller]
    pub fn switch_channel(&mut self, ranks: &[u32], buffer: Buffer) -> Result<Switch, Error> {
        let source = self.source();
        if ranks.is_empty() {
            return self.misuse(
                source,
                Misuse::Empty {
                    role: "switch channel",
                },
            );
        }
        for rank in ranks {
            self.rank(source, *rank)?;
        }
        if buffer == Buffer::Packets {
            return self.misuse(
                source,
                Misuse::WrongBuffer {
                    role: "switch channel",
                    buffer,
                    wanted: "the input, the output or scratch memory",
                },
            );
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        self.trace.groups.push(Group {
            ranks: sorted,
            buffer,
        });
        Ok(Switch(self.trace.groups.len() as u32 - 1))
    }

    /// A semaphore of `rank` that begins at `initial`.
    ///
    /// # Errors
    /// [`Misuse::NoSuchRank`].
    #[track_caller]
    pub fn semaphore(&mut self, rank: u32, initial: u32) -> Result<Semaphore, Error> {
        let source = self.source();
        self.rank(source, rank)?;
        self.trace.semaphores.push(Counter { rank, initial });
        Ok(Semaphore(self.trace.semaphores.len() as u32 - 1))
    }

    // --- on one rank ---

    /// Copies `src` to `dst` on their rank.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn copy(&mut self, dst: Chunk, src: Chunk, blocks: impl Into<Blocks>) -> Done {
        let (dst, src) = (
            ("destination", dst, Role::Bytes),
            ("source", src, Role::Bytes),
        );
        self.local(MOVE, &[dst], &[src], blocks.into())
    }

    /// Copies `src` to `dst` on their rank, as packets.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn copy_packets(&mut self, dst: Chunk, src: Chunk, blocks: impl Into<Blocks>) -> Done {
        let (dst, src) = (
            ("destination", dst, Role::Packets),
            ("source", src, Role::Bytes),
        );
        self.local(MOVE, &[dst], &[src], blocks.into())
    }

    /// Waits for the packets in `src` and copies their data to `dst`, on their rank.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn unpack_packets(&mut self, dst: Chunk, src: Chunk, blocks: impl Into<Blocks>) -> Done {
        let (dst, src) = (
            ("destination", dst, Role::Bytes),
            ("source", src, Role::Packets),
        );
        self.local(MOVE, &[dst], &[src], blocks.into())
    }

    /// Reduces `src` and `others`, in this order, to `dst`, on their rank.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn reduce(
        &mut self,
        dst: Chunk,
        src: Chunk,
        others: &[Chunk],
        blocks: impl Into<Blocks>,
    ) -> Done {
        let mut from = vec![("source", src, Role::Bytes)];
        from.extend(
            others
                .iter()
                .map(|other| ("other source", *other, Role::Bytes)),
        );
        let dst = ("destination", dst, Role::Bytes);
        self.local(REDUCE, &[dst], &from, blocks.into())
    }

    /// Waits for the packets in `others`, and reduces them and then `src` to `dst`, on their rank.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn reduce_packets(
        &mut self,
        dst: Chunk,
        src: Chunk,
        others: &[Chunk],
        blocks: impl Into<Blocks>,
    ) -> Done {
        let mut from: Vec<Named> = others
            .iter()
            .map(|other| ("other source", *other, Role::Packets))
            .collect();
        from.push(("source", src, Role::Bytes));
        let dst = ("destination", dst, Role::Bytes);
        self.local(REDUCE, &[dst], &from, blocks.into())
    }

    /// Thread blocks of `rank` meet; of one, its threads do.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn barrier(&mut self, rank: u32, blocks: impl Into<Blocks>) -> Done {
        let source = self.source();
        self.rank(source, rank)?;
        let blocks = self.blocks(source, blocks.into())?;
        let op = match blocks[..] {
            [_] => Op::Sync,
            _ => {
                self.trace.barriers += 1;
                Op::Barrier {
                    id: self.trace.barriers - 1,
                    blocks: blocks.len() as u32,
                }
            }
        };
        for block in blocks {
            self.push(source, rank, block, Raw::Other(op.clone()));
        }
        Ok(())
    }

    /// Waits until `semaphore` is above 0, and takes one from it.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn acquire(&mut self, semaphore: Semaphore, block: u32) -> Done {
        let source = self.source();
        let rank = self.semaphore_rank(source, semaphore)?;
        let semaphores = vec![semaphore.0];
        self.one(source, rank, block, Op::Acquire { semaphores })
    }

    /// Adds one to `semaphore`, after everything the block did before.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn release(&mut self, semaphore: Semaphore, block: u32) -> Done {
        let source = self.source();
        let rank = self.semaphore_rank(source, semaphore)?;
        let semaphores = vec![semaphore.0];
        self.one(source, rank, block, Op::Release { semaphores })
    }

    // --- over channels ---

    /// Signals the channel's destination, after everything the block did before; over a port channel after its
    /// puts before.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn signal(&mut self, channel: Channel, block: u32) -> Done {
        let source = self.source();
        let end = self.end(source, channel)?;
        let channels = vec![channel.0];
        let relaxed = false;
        self.one(source, end.rank, block, Op::Signal { channels, relaxed })
    }

    /// Waits, on the channel's source, for a signal of its destination.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn wait(&mut self, channel: Channel, block: u32) -> Done {
        let source = self.source();
        let end = self.end(source, channel)?;
        let channels = vec![channel.0];
        let relaxed = false;
        self.one(source, end.rank, block, Op::Wait { channels, relaxed })
    }

    /// Signals that the execution has begun, not what was done in it. Memory channels only.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn relaxed_signal(&mut self, channel: Channel, block: u32) -> Done {
        let source = self.source();
        let end = self.kind(source, channel, ChannelKind::Memory, "signal relaxedly")?;
        let channels = vec![channel.0];
        let relaxed = true;
        self.one(source, end.rank, block, Op::Signal { channels, relaxed })
    }

    /// Waits for a relaxed signal. Memory channels only.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn relaxed_wait(&mut self, channel: Channel, block: u32) -> Done {
        let source = self.source();
        let end = self.kind(source, channel, ChannelKind::Memory, "wait relaxedly")?;
        let channels = vec![channel.0];
        let relaxed = true;
        self.one(source, end.rank, block, Op::Wait { channels, relaxed })
    }

    /// Waits until everything that the block has put over this port channel has arrived.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn flush(&mut self, channel: Channel, block: u32) -> Done {
        let source = self.source();
        let end = self.kind(source, channel, ChannelKind::Port, "flush")?;
        let channels = vec![channel.0];
        self.one(source, end.rank, block, Op::Flush { channels })
    }

    /// Copies `src` of the channel's destination to `dst` of its source. Memory channels only.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn get(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let end = self.kind(source, channel, ChannelKind::Memory, "get")?;
        let to = [(end.rank, ("destination", dst, Role::Bytes))];
        let from = [(end.peer, ("source", src, Role::Bytes))];
        self.data(source, end.rank, MOVE, &to, &from, blocks.into())
    }

    /// Copies `src` of the channel's source to `dst` of its destination.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn put(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let end = self.end(source, channel)?;
        let kind = match end.kind {
            ChannelKind::Memory => MOVE,
            ChannelKind::Port => port_put(channel, false, false),
        };
        let to = [(end.peer, ("destination", dst, Role::Bytes))];
        let from = [(end.rank, ("source", src, Role::Bytes))];
        self.data(source, end.rank, kind, &to, &from, blocks.into())
    }

    /// Puts, and signals the destination when the data has arrived. Port channels only.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn put_with_signal(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        block: u32,
    ) -> Done {
        self.put_signalling(channel, dst, src, block, false)
    }

    /// Puts, signals the destination when the data has arrived, and waits until then. Port channels only.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn put_with_signal_and_flush(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        block: u32,
    ) -> Done {
        self.put_signalling(channel, dst, src, block, true)
    }

    #[track_caller]
    fn put_signalling(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        block: u32,
        flush: bool,
    ) -> Done {
        let source = self.source();
        let end = self.kind(source, channel, ChannelKind::Port, "put with a signal")?;
        let to = [(end.peer, ("destination", dst, Role::Bytes))];
        let from = [(end.rank, ("source", src, Role::Bytes))];
        let kind = port_put(channel, true, flush);
        self.data(source, end.rank, kind, &to, &from, block.into())
    }

    /// Copies `src` of the channel's source to `dst` of its destination, as packets. Over a port channel, `src`
    /// must hold the packets already.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn put_packets(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let end = self.end(source, channel)?;
        let (kind, role) = match end.kind {
            ChannelKind::Memory => (MOVE, Role::Bytes),
            ChannelKind::Port => (port_put(channel, false, false), Role::Packets),
        };
        let to = [(end.peer, ("destination", dst, Role::Packets))];
        let from = [(end.rank, ("source", src, role))];
        self.data(source, end.rank, kind, &to, &from, blocks.into())
    }

    /// Waits for the packets in `src` of the channel's source and puts them to `dst` of its destination.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn read_put_packets(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let blocks = blocks.into();
        let end = self.end(source, channel)?;
        let to = [(end.peer, ("destination", dst, Role::Packets))];
        let from = [(end.rank, ("source", src, Role::Packets))];
        let kind = match end.kind {
            ChannelKind::Memory => MOVE,
            ChannelKind::Port => {
                // The proxy does not wait for packets: the block does, by unpacking them to where nobody looks.
                let (from, count) = self.operand(source, end.rank, from[0].1)?;
                let used = self.spare[end.rank as usize];
                let limit = limits::CHUNKS / self.options.instances;
                if used + count > limit {
                    let misuse = Misuse::TooMany {
                        what: "chunks of packets that proxies put on",
                        number: u64::from(used + count),
                        limit: limit.into(),
                    };
                    return self.misuse(source, misuse);
                }
                let aside = Operand::new(end.rank, Buffer::Scratch, SPARE + used);
                self.spare[end.rank as usize] += count;
                let unpacked = whole(MOVE, vec![from], vec![aside], count);
                self.emit(source, end.rank, unpacked, blocks.clone())?;
                port_put(channel, false, false)
            }
        };
        self.data(source, end.rank, kind, &to, &from, blocks)
    }

    /// Reduces `src` of the channel's source and then `others` of its destination to `dst` of its source. Memory
    /// channels only.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn read_reduce(
        &mut self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        others: &[Chunk],
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let end = self.kind(source, channel, ChannelKind::Memory, "reduce")?;
        let to = [(end.rank, ("destination", dst, Role::Bytes))];
        let mut from = vec![(end.rank, ("source", src, Role::Bytes))];
        let others = others
            .iter()
            .map(|other| (end.peer, ("other source", *other, Role::Bytes)));
        from.extend(others);
        self.data(source, end.rank, REDUCE, &to, &from, blocks.into())
    }

    // --- over switch channels ---

    /// On `rank`, reduces the chunks from `first` of all members' buffers to `dst`, as many as `dst` has.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn switch_reduce(
        &mut self,
        switch: Switch,
        rank: u32,
        first: u32,
        dst: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let members = self.members(source, switch, rank, first, dst.len())?;
        let (to, count) = self.operand(source, rank, ("destination", dst, Role::Bytes))?;
        let kind = Kind::Reduce {
            switch: Some(switch.0),
            last: false,
        };
        let data = whole(kind, members, vec![to], count);
        self.emit(source, rank, data, blocks.into())
    }

    /// Copies `src` of `rank` to the chunks from `first` of all members' buffers.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn switch_broadcast(
        &mut self,
        switch: Switch,
        rank: u32,
        first: u32,
        src: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let members = self.members(source, switch, rank, first, src.len())?;
        let (from, count) = self.operand(source, rank, ("source", src, Role::Bytes))?;
        let data = whole(store(switch), vec![from], members, count);
        self.emit(source, rank, data, blocks.into())
    }

    /// Waits for the packets in `src` of `rank` and copies them, as packets, to the chunks from `first` of all
    /// members' scratch memories.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    #[track_caller]
    pub fn switch_broadcast_packets(
        &mut self,
        switch: Switch,
        rank: u32,
        first: u32,
        src: Chunk,
        blocks: impl Into<Blocks>,
    ) -> Done {
        let source = self.source();
        let mut members = self.members(source, switch, rank, first, src.len())?;
        for member in &mut members {
            if member.buffer != Buffer::Scratch {
                return self.misuse(
                    source,
                    Misuse::WrongBuffer {
                        role: "switch channel",
                        buffer: member.buffer,
                        wanted: "scratch memory",
                    },
                );
            }
            member.buffer = Buffer::Packets;
        }
        let (from, count) = self.operand(source, rank, ("source", src, Role::Packets))?;
        let data = whole(store(switch), vec![from], members, count);
        self.emit(source, rank, data, blocks.into())
    }

    // --- loops ---

    /// What follows is repeated on one piece of its data after the other, as many times as pieces of
    /// `unit_bytes` cover `chunks` chunks, until [`end_loop`](Self::end_loop).
    ///
    /// # Errors
    /// [`Misuse::Loop`] inside another loop, or if `unit_bytes` is no multiple of 16, [`Misuse::TooMany`] chunks.
    #[track_caller]
    pub fn begin_loop(&mut self, unit_bytes: u64, chunks: u32) -> Done {
        let source = self.source();
        if self.current_loop.is_some() {
            let what = "loops do not nest; end the other one first";
            return self.misuse(source, Misuse::Loop { what });
        }
        if unit_bytes == 0 || !unit_bytes.is_multiple_of(crossweft_device::extent::GRANULE) {
            let what = "pieces must be of a multiple of 16 bytes";
            return self.misuse(source, Misuse::Loop { what });
        }
        if chunks == 0 || chunks > self.shape.chunks {
            return self.misuse(
                source,
                Misuse::TooMany {
                    what: "chunks of the message in a loop",
                    number: chunks.into(),
                    limit: self.shape.chunks.into(),
                },
            );
        }
        self.current_loop = Some(self.trace.loops.len() as u32);
        self.trace.loops.push(Pieces { unit_bytes, chunks });
        Ok(())
    }

    /// Ends the loop.
    ///
    /// # Errors
    /// [`Misuse::Loop`] if there is none.
    #[track_caller]
    pub fn end_loop(&mut self) -> Done {
        let source = self.source();
        if self.current_loop.take().is_none() {
            let what = "there is no loop to end here";
            return self.misuse(source, Misuse::Loop { what });
        }
        Ok(())
    }

    // --- checks ---

    /// The index of the current line.
    #[track_caller]
    fn source(&mut self) -> u32 {
        let caller = Location::caller();
        let source = match self.next_source.take() {
            Some(source) => source,
            None => Source::new(caller.file(), caller.line()),
        };
        let next = self.sources.len() as u32;
        let sources = &mut self.sources;
        *self.source_ids.entry(source).or_insert_with_key(|source| {
            sources.push(source.clone());
            next
        })
    }

    fn misuse<T>(&self, source: u32, misuse: Misuse) -> Result<T, Error> {
        Err(Error::Misuse {
            at: self.sources[source as usize].clone(),
            misuse,
        })
    }

    fn rank(&self, source: u32, rank: u32) -> Done {
        let ranks = self.options.ranks;
        if rank >= ranks {
            return self.misuse(source, Misuse::NoSuchRank { rank, ranks });
        }
        Ok(())
    }

    fn end(&self, source: u32, channel: Channel) -> Result<End, Error> {
        match self.trace.ends.get(channel.0 as usize) {
            Some(end) => Ok(*end),
            None => self.misuse(source, Misuse::Unknown { what: "channel" }),
        }
    }

    fn kind(
        &self,
        source: u32,
        channel: Channel,
        wanted: ChannelKind,
        what: &'static str,
    ) -> Result<End, Error> {
        let end = self.end(source, channel)?;
        if end.kind != wanted {
            return self.misuse(
                source,
                Misuse::ChannelKind {
                    kind: end.kind.name(),
                    what,
                    other: wanted.name(),
                },
            );
        }
        Ok(end)
    }

    fn semaphore_rank(&self, source: u32, semaphore: Semaphore) -> Result<u32, Error> {
        match self.trace.semaphores.get(semaphore.0 as usize) {
            Some(counter) => Ok(counter.rank),
            None => self.misuse(source, Misuse::Unknown { what: "semaphore" }),
        }
    }

    fn blocks(&self, source: u32, blocks: Blocks) -> Result<Vec<u32>, Error> {
        // With instances there are that many times as many.
        let limit = limits::BLOCKS as u32 / self.options.instances;
        let Blocks(blocks) = blocks;
        let distinct: HashSet<u32> = blocks.iter().copied().collect();
        if blocks.is_empty()
            || distinct.len() != blocks.len()
            || blocks.iter().any(|block| *block >= limit)
        {
            return self.misuse(source, Misuse::Blocks { blocks, limit });
        }
        Ok(blocks)
    }

    /// The operand that a chunk is, and its chunks.
    fn operand(&self, source: u32, wanted: u32, named: Named) -> Result<(Operand, u32), Error> {
        let (role, chunk, kind) = named;
        let Chunk { of, first, end } = chunk;
        let Memory {
            rank, mut buffer, ..
        } = of;
        self.rank(source, rank)?;
        if rank != wanted {
            return self.misuse(source, Misuse::WrongRank { role, rank, wanted });
        }
        let exists = match buffer {
            Buffer::Input => self.shape.chunks * self.shape.blocks.0,
            Buffer::Output => self.shape.chunks * self.shape.blocks.1,
            _ => self.scratch[rank as usize],
        };
        if of.first.saturating_add(of.chunks) > exists {
            return self.misuse(source, Misuse::Unknown { what: "buffer" });
        }
        if end > of.chunks || first > end {
            let have = of.chunks;
            return self.misuse(
                source,
                Misuse::OutOfRange {
                    rank,
                    buffer,
                    first,
                    end,
                    have,
                },
            );
        }
        if first == end {
            return self.misuse(source, Misuse::Empty { role });
        }
        if kind == Role::Packets {
            if buffer != Buffer::Scratch {
                return self.misuse(
                    source,
                    Misuse::WrongBuffer {
                        role,
                        buffer,
                        wanted: "scratch memory, as packets are",
                    },
                );
            }
            if self.current_loop.is_some() {
                let what = "packets cannot be sent or received in pieces; leave the loop first";
                return self.misuse(source, Misuse::Loop { what });
            }
            buffer = Buffer::Packets;
        }
        Ok((self.place(rank, buffer, of.first + first), end - first))
    }

    /// Where chunk `index` of a buffer is: in place, input and output are one buffer.
    fn place(&self, rank: u32, buffer: Buffer, index: u32) -> Operand {
        let (buffer, index) = if self.options.in_place == InPlace::Required {
            let (collective, chunks) = (self.options.collective, self.shape.chunks);
            in_larger_buffer(collective, chunks, rank, buffer, index)
        } else {
            (buffer, index)
        };
        Operand::new(rank, buffer, index)
    }

    /// The chunks from `first` of every member's buffer.
    fn members(
        &self,
        source: u32,
        switch: Switch,
        rank: u32,
        first: u32,
        count: u32,
    ) -> Result<Vec<Operand>, Error> {
        self.rank(source, rank)?;
        let Some(group) = self.trace.groups.get(switch.0 as usize) else {
            return self.misuse(
                source,
                Misuse::Unknown {
                    what: "switch channel",
                },
            );
        };
        if !group.ranks.contains(&rank) {
            let members = group.ranks.clone();
            return self.misuse(source, Misuse::NotAMember { rank, members });
        }
        let end = first.saturating_add(count);
        let mut members = Vec::with_capacity(group.ranks.len());
        for &rank in &group.ranks {
            let have = match group.buffer {
                Buffer::Input => self.shape.chunks * self.shape.blocks.0,
                Buffer::Output => self.shape.chunks * self.shape.blocks.1,
                _ => self.scratch[rank as usize],
            };
            if end > have {
                return self.misuse(
                    source,
                    Misuse::OutOfRange {
                        rank,
                        buffer: group.buffer,
                        first,
                        end,
                        have,
                    },
                );
            }
            members.push(self.place(rank, group.buffer, first));
        }
        Ok(members)
    }

    // --- instructions ---

    /// An instruction on chunks of one rank.
    #[track_caller]
    fn local(&mut self, kind: Kind, to: &[Named], from: &[Named], blocks: Blocks) -> Done {
        let source = self.source();
        // The first operand that was given says which rank it is.
        let rank = to[0].1.of.rank;
        let on_rank = |named: &[Named]| -> Vec<(u32, Named)> {
            named.iter().map(|named| (rank, *named)).collect()
        };
        self.data(source, rank, kind, &on_rank(to), &on_rank(from), blocks)
    }

    /// An instruction of `rank` on chunks, each with the rank that it must be of.
    fn data(
        &mut self,
        source: u32,
        rank: u32,
        kind: Kind,
        to: &[(u32, Named)],
        from: &[(u32, Named)],
        blocks: Blocks,
    ) -> Done {
        let resolve = |operands: &[(u32, Named)]| {
            let resolve = |(rank, named): &(u32, Named)| self.operand(source, *rank, *named);
            operands.iter().map(resolve).collect::<Result<Vec<_>, _>>()
        };
        let (sources, destinations) = (resolve(from)?, resolve(to)?);
        let count = sources[0].1;
        let named = from.iter().chain(to);
        for ((_, other), (_, (role, ..))) in sources.iter().chain(&destinations).zip(named) {
            if *other != count {
                return self.misuse(
                    source,
                    Misuse::Sizes {
                        role,
                        count: *other,
                        source_count: count,
                    },
                );
            }
        }
        let operands =
            |resolved: Vec<(Operand, u32)>| resolved.into_iter().map(|(o, _)| o).collect();
        let (from, to) = (operands(sources), operands(destinations));
        self.emit(source, rank, whole(kind, from, to, count), blocks)
    }

    /// Records an instruction on data, for each of its thread blocks.
    fn emit(&mut self, source: u32, rank: u32, mut data: Data, blocks: Blocks) -> Done {
        if let Kind::Move { switch: Some(_) } = data.kind {
            // What is there already need not be stored again.
            let from = data.from[0];
            data.to.retain(|member| *member != from);
            if data.to.is_empty() {
                return Ok(());
            }
        }
        let writable = self.options.in_place == InPlace::Required
            || self.options.collective == Collective::Test;
        if !writable && data.to.iter().any(|to| to.buffer == Buffer::Input) {
            return self.misuse(source, Misuse::WritesInput);
        }
        let blocks = self.blocks(source, blocks)?;
        let of = blocks.len() as u32;
        for (index, block) in (0..).zip(blocks) {
            let slice = (index, of);
            let data = Data {
                slice,
                ..data.clone()
            };
            self.push(source, rank, block, Raw::Data(data));
        }
        Ok(())
    }

    /// Records an instruction without data.
    fn one(&mut self, source: u32, rank: u32, block: u32, op: Op) -> Done {
        self.blocks(source, block.into())?;
        self.push(source, rank, block, Raw::Other(op));
        Ok(())
    }

    fn push(&mut self, source: u32, rank: u32, block: u32, raw: Raw) {
        self.trace.instrs.push(Instr {
            rank,
            block,
            raw,
            source,
            in_loop: self.current_loop,
        });
    }
}

const MOVE: Kind = Kind::Move { switch: None };
const REDUCE: Kind = Kind::Reduce {
    switch: None,
    last: false,
};

/// Data of an instruction, before thread blocks share it.
fn whole(kind: Kind, from: Vec<Operand>, to: Vec<Operand>, count: u32) -> Data {
    Data {
        kind,
        from,
        to,
        count,
        slice: (0, 1),
    }
}

const fn store(switch: Switch) -> Kind {
    Kind::Move {
        switch: Some(switch.0),
    }
}

const fn port_put(channel: Channel, signal: bool, flush: bool) -> Kind {
    Kind::Put {
        channel: channel.0,
        signal,
        flush,
    }
}
