//! Plans that a GPU runs in one piece, by a kernel with little else in it. The same packets, signals and
//! places as the executor's, so each rank, and each launch, may take either; but not with lines instead of
//! packets, which all take or none.

use crossweft_channel::ChannelError;
use crossweft_device::ReduceOp;
use crossweft_device::executor::Counters;
use crossweft_device::extent::{Extent, GRANULE, chunk_bytes};
use crossweft_device::gpu::fused::hop::{HEARS, HEARS_END, TELLS, TELLS_END};
use crossweft_device::gpu::lines::{LANES, PAIR as LINES, PAIR_PAYLOAD as LINES_PAYLOAD};
use crossweft_device::packet::{PAYLOAD, WORD};
use crossweft_device::program::{Launch, Program, Space};
use crossweft_device::semaphore::Semaphore;
use crossweft_kernels::{
    Entries, GpuContext, HOP_DIRECT, HOP_PACKETS, Hop, MAX_FUSED, MAX_MOVES, OneShot,
    OneShotScatter, TwoShot,
};
use crossweft_plan::{Buffer, ChannelKind, Op, Operand, Plan, RankProgram};

use crate::tables::Memories;

/// A rank's part of such a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fused {
    form: Form,
    /// Where the results go, this rank's packets, or what is moved; in the plan's order.
    targets: Vec<Place>,
    /// What is reduced, or moved; in the plan's order.
    sources: Vec<Place>,
    /// What goes to each target, where that differs.
    origins: Vec<Place>,
    meeting: Meeting,
    /// This rank's packet memory; 0 if there is none.
    packets: u64,
}

/// What a rank does in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The whole input to everybody, in packets; all are reduced.
    OneShot,
    /// The same with lines.
    OneShotLines,
    /// Another block to everybody.
    OneShotScatter,
    /// Everybody's chunk of the same place is reduced, to everybody.
    TwoShot,
    /// Everybody's block of the same place is reduced, for this rank.
    Gathered,
    /// Blocks in packets.
    HopPackets,
    /// Blocks straight from buffer to buffer.
    HopDirect,
}

/// Which of a hop's meetings take place, on how many channels a thread block, and what is between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Meeting {
    /// Bits of [`crossweft_device::gpu::fused::hop`].
    meets: u32,
    channels: u32,
    /// Moves of the first part; the others are of the second.
    first: u32,
    /// Indices of operations, for messages.
    first_wait: u32,
    second_wait: u32,
    op_index: u32,
}

/// The largest message that a plan must be for, in bytes, to take lines: below, packets are faster. (Memory that is laid out
/// for packets is large enough for lines from 4 KiB on.)
pub const LINES_FROM: u64 = 192 << 10;

/// Whether all ranks of a plan for messages of up to `max_bytes` take lines instead of packets where the machine keeps
/// them.
#[must_use]
pub fn has_lines(plan: &Plan, max_bytes: u64) -> bool {
    // Slots of one chunk, behind nothing else, are aligned and large enough.
    let packets_alone = plan.chunks == 1 && plan.scratch_bytes(max_bytes) == Some((0, 0));
    let mut ranks = 0..plan.ranks.len() as u32;
    // Of one input for all: lines that scatter have no kernel.
    let is_whole = |rank| one_shot(plan, rank).is_some_and(|found| found.form == Form::OneShot);
    max_bytes >= LINES_FROM && packets_alone && ranks.all(is_whole)
}

/// The form in which a GPU runs `rank`'s part of `plan` in one piece, by a kernel of its own instead of the
/// executor's: `one-shot`, `two-shot` or `one-hop`; `None` if it has no such form.
#[must_use]
pub fn fused_form(plan: &Plan, rank: u32) -> Option<&'static str> {
    form(plan, rank).map(|found| match found.form {
        Form::OneShot | Form::OneShotLines | Form::OneShotScatter => "one-shot",
        Form::TwoShot | Form::Gathered => "two-shot",
        Form::HopPackets | Form::HopDirect => "one-hop",
    })
}

impl Form {
    pub(crate) const ALL: [Self; 7] = [
        Self::OneShot,
        Self::OneShotLines,
        Self::OneShotScatter,
        Self::TwoShot,
        Self::Gathered,
        Self::HopPackets,
        Self::HopDirect,
    ];

    /// The forms of all ranks' parts of `plan` that have one.
    pub(crate) fn all(plan: &Plan, lines: bool) -> impl Iterator<Item = Self> {
        let ranks = 0..plan.ranks.len() as u32;
        let forms = ranks.filter_map(|rank| form(plan, rank));
        forms.map(move |found| found.form.sending(lines))
    }

    /// The same, of a plan whose ranks all send lines.
    fn sending(self, lines: bool) -> Self {
        if lines { Self::OneShotLines } else { self }
    }

    /// The kernel, and whether it is one of the module for all data types, or of the reduced one's.
    pub(crate) fn entry(self, entries: &Entries) -> (&'static str, bool) {
        match self {
            Self::OneShot => (entries.one_shot, false),
            Self::OneShotLines => (entries.one_shot_lines, false),
            Self::OneShotScatter => (entries.one_shot_scatter, false),
            Self::TwoShot | Self::Gathered => (entries.two_shot, false),
            Self::HopPackets => (HOP_PACKETS, true),
            Self::HopDirect => (HOP_DIRECT, true),
        }
    }
}

/// A rank's part of a plan that has a form.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    form: Form,
    targets: Vec<Operand>,
    sources: Vec<Operand>,
    origins: Vec<Operand>,
    meeting: Meeting,
}

impl Found {
    fn new(form: Form, targets: &[Operand], sources: &[Operand]) -> Self {
        Self {
            form,
            targets: targets.to_vec(),
            sources: sources.to_vec(),
            origins: Vec::new(),
            meeting: Meeting::default(),
        }
    }
}

/// The form of `rank`'s part of `plan`, if it has one.
fn form(plan: &Plan, rank: u32) -> Option<Found> {
    one_shot(plan, rank)
        .or_else(|| two_shot(plan, rank))
        .or_else(|| hop(plan, rank))
}

/// A place that a launch knows the address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    space: Space,
    /// Whose it is.
    rank: u32,
    /// Who sends to it, or reads from it.
    peer: u32,
    /// Where the buffer is, as mapped here; 0 if it is private.
    base: u64,
    /// The slot, or the chunk.
    index: u32,
}

/// The parameter of a kernel that runs a plan in one piece.
#[derive(Debug)]
pub(crate) enum Parameter {
    OneShot(OneShot),
    OneShotScatter(OneShotScatter),
    TwoShot(TwoShot),
    Hop(Hop),
}

impl Parameter {
    /// Bytes of a thread block's share.
    fn step(&self) -> u64 {
        match self {
            Self::OneShot(launch) => launch.step,
            Self::OneShotScatter(scatter) => scatter.launch.step,
            Self::TwoShot(launch) => launch.step,
            Self::Hop(launch) => launch.step,
        }
    }
}

impl Fused {
    /// `rank`'s part of `plan`, if it has such a form; with `lines`, if it [has](has_lines) them.
    pub(crate) fn of(
        plan: &Plan,
        rank: u32,
        memories: &Memories<'_>,
        lines: bool,
    ) -> Result<Option<Self>, ChannelError> {
        let Some(found) = form(plan, rank) else {
            return Ok(None);
        };
        let form = found.form.sending(lines);
        let place = |operand: &Operand| -> Result<Place, ChannelError> {
            let space = operand.buffer.into();
            let peer = match space {
                Space::Packets if operand.rank == rank => plan.packet_sender(rank, operand.index),
                _ => None,
            };
            Ok(Place {
                space,
                rank: operand.rank,
                peer: peer.unwrap_or(operand.rank),
                base: memories.base(operand.rank, space)?,
                index: operand.index,
            })
        };
        let places = |operands: &[Operand]| -> Result<Vec<Place>, ChannelError> {
            operands.iter().map(place).collect()
        };
        Ok(Some(Self {
            form,
            targets: places(&found.targets)?,
            sources: places(&found.sources)?,
            origins: places(&found.origins)?,
            meeting: found.meeting,
            packets: memories.base(rank, Space::Packets)?,
        }))
    }

    /// What is done.
    pub(crate) fn form(&self) -> Form {
        self.form
    }

    /// Threads of a block that have something to do: those without would only be waited for.
    pub(crate) fn threads(&self, parameter: &Parameter) -> u64 {
        match self.form {
            Form::OneShotLines => parameter.step() / LINES_PAYLOAD * u64::from(LANES),
            Form::HopPackets | Form::HopDirect => {
                let pieces = parameter.step().div_ceil(GRANULE);
                pieces.max(self.meeting.channels.into())
            }
            _ => parameter.step().div_ceil(GRANULE),
        }
    }

    /// The part of a message that this rank reduces.
    fn part(&self, program: &Program, bytes: u64) -> Extent {
        let chunk = chunk_bytes(bytes, program.chunks);
        match self.form {
            Form::TwoShot => Extent::of_chunks(bytes, chunk, program.rank, 1),
            _ => Extent::of_chunks(bytes, chunk, 0, program.chunks),
        }
    }

    /// Whether it sends lines, so that the executor cannot stand in for it.
    pub(crate) fn sends_lines(&self) -> bool {
        self.form == Form::OneShotLines
    }

    /// The kernel's parameter; `None` if this launch is not for it, whose buffers must be aligned. With lines, any
    /// launch is.
    pub(crate) fn launch(
        &self,
        program: &Program,
        launch: &Launch,
        context: GpuContext,
        op: ReduceOp,
    ) -> Option<Parameter> {
        let bytes = launch.bytes;
        let chunk = chunk_bytes(bytes, program.chunks);
        let lines = self.sends_lines();
        let slot = match lines {
            true => bytes.div_ceil(LINES_PAYLOAD) * LINES,
            false => chunk * (WORD / PAYLOAD),
        };
        // A chunk of a message is part of what all take; else buffers are of whole blocks.
        let block = match self.form {
            Form::TwoShot => 0,
            _ => bytes,
        };
        let at = |place: &Place| {
            let of_block = block * u64::from(place.index);
            match (place.space, place.rank == program.rank) {
                (Space::Input, true) => launch.input + of_block,
                (Space::Input, false) => place.base + launch.input_offset + of_block,
                (Space::Output, true) => launch.output + of_block,
                (Space::Output, false) => place.base + launch.output_offset + of_block,
                _ => place.base + slot * u64::from(place.index),
            }
        };
        let aligned = |place: &Place| at(place).is_multiple_of(GRANULE);
        let mut places = self
            .targets
            .iter()
            .chain(&self.sources)
            .chain(&self.origins);
        if !lines && !places.all(aligned) {
            return None;
        }
        let counters = Counters {
            epoch: program.counters,
            packets: self.packets,
            packets_half: program.packets_half,
            blocks: program.block_count.into(),
        };
        let divisor = if op == ReduceOp::Avg {
            program.ranks
        } else {
            0
        };
        let (targets, sources) = (self.targets.len() as u32, self.sources.len() as u32);
        let (rank, part) = (program.rank, self.part(program, bytes));
        let step = match lines {
            true => {
                let pairs = part.len().div_ceil(LINES_PAYLOAD);
                pairs.div_ceil(program.block_count.into()) * LINES_PAYLOAD
            }
            false => part.slice(0, program.block_count).len(),
        };
        Some(match self.form {
            Form::OneShot | Form::OneShotLines | Form::OneShotScatter => {
                let mut peer = [rank; MAX_FUSED];
                let (target, mut source) = (table(&self.targets, at), table(&self.sources, at));
                let mut input = launch.input;
                for (k, place) in self.sources.iter().enumerate() {
                    peer[k] = place.peer;
                    if place.space == Space::Input {
                        input = at(place);
                        source[k] = 0;
                    }
                }
                // What is sent is not always reduced here as well.
                let is_skew = |addr: u64| !addr.is_multiple_of(GRANULE);
                if !lines && (is_skew(input) || is_skew(launch.output)) {
                    return None;
                }
                let launch = OneShot {
                    input,
                    output: launch.output,
                    bytes,
                    step,
                    counters,
                    context,
                    op,
                    divisor,
                    targets,
                    sources,
                    // Behind what is sent.
                    op_index: self.meeting.op_index,
                    rank,
                    target,
                    source,
                    peer,
                };
                if self.form != Form::OneShotScatter {
                    return Some(Parameter::OneShot(launch));
                }
                let origin = table(&self.origins, at);
                Parameter::OneShotScatter(OneShotScatter { launch, origin })
            }
            Form::HopPackets | Form::HopDirect => {
                let mut peer = [rank; MAX_MOVES];
                for (peer, place) in peer.iter_mut().zip(&self.sources) {
                    *peer = place.peer;
                }
                let Meeting {
                    meets,
                    channels,
                    first,
                    first_wait,
                    second_wait,
                    op_index,
                } = self.meeting;
                Parameter::Hop(Hop {
                    bytes,
                    step,
                    counters,
                    context,
                    semaphores: program.semaphores,
                    channels,
                    meets,
                    first,
                    second: sources - first,
                    first_wait,
                    second_wait,
                    op_index,
                    rank,
                    target: table(&self.targets, at),
                    source: table(&self.sources, at),
                    peer,
                })
            }
            Form::TwoShot | Form::Gathered => {
                let Extent { begin, end } = part;
                Parameter::TwoShot(TwoShot {
                    begin,
                    end,
                    step,
                    bytes,
                    counters,
                    context,
                    semaphores: program.semaphores,
                    op,
                    divisor,
                    sources,
                    targets,
                    peers: program.ranks - 1,
                    rank,
                    first_wait: 1,
                    second_wait: 4,
                    target: table(&self.targets, at),
                    source: table(&self.sources, at),
                })
            }
        })
    }
}

/// Addresses of places, as many as a kernel has room for.
fn table<const ROOM: usize>(places: &[Place], at: impl Fn(&Place) -> u64) -> [u64; ROOM] {
    let mut table = [0; ROOM];
    for (entry, place) in table.iter_mut().zip(places) {
        *entry = at(place);
    }
    table
}

/// The semaphores of a thread block are read as an array.
const _: () = assert!(size_of::<Semaphore>() == 32);

/// What all thread blocks of a rank do alike, with slices of their own: what `of` makes of each one's operations.
fn alike<T: PartialEq>(
    program: &RankProgram,
    of: impl Fn(&[Op], (u32, u32), std::ops::Range<u32>) -> Option<T>,
) -> Option<T> {
    let count = program.blocks.len() as u32;
    let links = program.channels.len() as u32;
    // The kernel finds a block's channels by its number.
    let channels = links / count.max(1);
    let by_memory = |channel: &crossweft_plan::Channel| channel.kind == ChannelKind::Memory;
    if channels * count != links || !program.channels.iter().all(by_memory) {
        return None;
    }
    let mut found = None;
    for (index, ops) in (0..).zip(&program.blocks) {
        let own = index * channels..(index + 1) * channels;
        let this = of(ops, (index, count), own)?;
        match &found {
            Some(same) if *same != this => return None,
            _ => found = Some(this),
        }
    }
    found
}

/// Whether these are the channels of that range, each once, in any order.
fn are(channels: &[u32], own: &std::ops::Range<u32>) -> bool {
    let mut sorted = channels.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(own.clone())
}

/// A plan whose blocks, on this rank, send their slices of the whole input to others' packet memory, or of a block of
/// it to each, and then reduce it with what came into this rank's, to the output.
fn one_shot(plan: &Plan, rank: u32) -> Option<Found> {
    let own = |o: &Operand| (o.buffer, o.rank) == (Buffer::Input, rank);
    let from_here = |o: &Operand| own(o) || (o.buffer, o.rank) == (Buffer::Packets, rank);
    alike(plan.ranks.get(rank as usize)?, |ops, slice, _| {
        let (last, sends) = ops.split_last()?;
        let Op::Reduce {
            chunks,
            from,
            to: outputs,
            last: true,
            ..
        } = last
        else {
            return None;
        };
        let part = (chunks.first, chunks.count, chunks.slice);
        let fits = part == (0, plan.chunks, slice)
            && *outputs == [Operand::new(rank, Buffer::Output, 0)]
            && !from.is_empty()
            && from.len() <= MAX_FUSED
            && from.iter().all(from_here)
            && from.iter().filter(|o| own(o)).count() <= 1;
        if !fits {
            return None;
        }
        let (mut targets, mut origins) = (Vec::new(), Vec::new());
        for send in sends {
            let Op::Move {
                chunks: sent,
                from: input,
                to,
                ..
            } = send
            else {
                return None;
            };
            let packets = to.iter().all(|o| o.buffer == Buffer::Packets);
            if sent != chunks || !own(input) || !packets {
                return None;
            }
            targets.extend_from_slice(to);
            origins.extend(to.iter().map(|_| *input));
        }
        let mut found = Found::new(Form::OneShot, &targets, from);
        found.meeting.op_index = sends.len() as u32;
        // All that is sent, and this rank's own part of the result, is the same block.
        let mine = from.iter().find(|o| own(o)).into_iter();
        let whole = Operand::new(rank, Buffer::Input, 0);
        if !origins.iter().chain(mine).all(|o| *o == whole) {
            if plan.chunks != 1 {
                return None;
            }
            found.form = Form::OneShotScatter;
            found.origins = origins;
        }
        // One rank alone, or one that only takes, has other kernels.
        (!targets.is_empty() && targets.len() <= MAX_FUSED).then_some(found)
    })
}

/// A plan whose blocks, on this rank, meet all others, reduce their slices of this rank's chunk of all inputs into all
/// outputs, or of one block of all inputs into this rank's, and meet again.
fn two_shot(plan: &Plan, rank: u32) -> Option<Found> {
    let ranks = plan.ranks.len() as u32;
    alike(plan.ranks.get(rank as usize)?, |ops, slice, own| {
        let [
            Op::Signal {
                channels: all,
                relaxed: false,
            },
            Op::Wait {
                channels: first,
                relaxed: false,
            },
            Op::Reduce {
                chunks,
                from,
                to,
                last: true,
                ..
            },
            Op::Signal {
                channels: again,
                relaxed: false,
            },
            Op::Wait {
                channels: second,
                relaxed: false,
            },
        ] = ops
        else {
            return None;
        };
        let meets = [all, first, again, second]
            .iter()
            .all(|channels| are(channels, &own));
        let part = (chunks.first, chunks.count, chunks.slice);
        let is = |o: &Operand, buffer| (o.buffer, o.index) == (buffer, rank);
        let fits = meets
            && own.len() as u32 == ranks - 1
            && from.iter().all(|o| is(o, Buffer::Input))
            && !from.is_empty()
            && from.len().max(to.len()) <= MAX_FUSED;
        let form = if plan.chunks == ranks && part == (rank, 1, slice) {
            to.iter()
                .all(|o| is(o, Buffer::Output))
                .then_some(Form::TwoShot)
        } else if plan.chunks == 1 && part == (0, 1, slice) {
            (*to == [Operand::new(rank, Buffer::Output, 0)]).then_some(Form::Gathered)
        } else {
            None
        };
        fits.then_some(())?;
        form.map(|form| Found::new(form, to, from))
    })
}

/// A plan whose blocks, on this rank, move slices of whole blocks and reduce nothing: straight between buffers, or send
/// packets and then take those that came.
fn hop(plan: &Plan, rank: u32) -> Option<Found> {
    if plan.chunks != 1 {
        return None;
    }
    let program = plan.ranks.get(rank as usize)?;
    let found = alike(program, |ops, slice, own| {
        let parser = || Parser {
            rank,
            slice,
            own: own.clone(),
            ops,
            at: 0,
        };
        parser().packets().or_else(|| parser().direct())
    })?;
    // Whoever only receives what others write has nothing to move.
    let does = !found.sources.is_empty() || found.meeting.meets != 0;
    let fits =
        does && found.sources.len() <= MAX_MOVES && found.meeting.channels < MAX_FUSED as u32;
    fits.then_some(found)
}

/// Goes through a thread block's operations.
struct Parser<'a> {
    rank: u32,
    slice: (u32, u32),
    /// The thread block's channels.
    own: std::ops::Range<u32>,
    ops: &'a [Op],
    /// Operations gone through.
    at: usize,
}

impl Parser<'_> {
    fn packets(mut self) -> Option<Found> {
        let rank = self.rank;
        let mut found = Found::new(Form::HopPackets, &[], &[]);
        let tells = self.signal();
        let leaves = |o: &Operand| o.buffer == Buffer::Packets && o.rank != rank;
        let sends = self.moves(|from, to| {
            (from.buffer, from.rank) == (Buffer::Input, rank) && to.iter().all(leaves)
        });
        let op_index = self.at as u32;
        let takes = self.moves(|from, to| {
            from.rank == rank
                && matches!(from.buffer, Buffer::Input | Buffer::Packets)
                && matches!(to, [o] if (o.buffer, o.rank) == (Buffer::Output, rank))
        });
        let second_wait = self.at as u32;
        let hears = self.wait();
        found.meeting = Meeting {
            meets: (u32::from(tells) * TELLS) | (u32::from(hears) * HEARS_END),
            channels: self.own.len() as u32,
            first: sends.len() as u32,
            first_wait: 0,
            second_wait,
            op_index,
        };
        // Without packets there is no hop.
        let is_packet =
            |(from, to): &(Operand, Operand)| [from.buffer, to.buffer].contains(&Buffer::Packets);
        let any = sends.iter().chain(&takes).any(is_packet);
        (found.sources, found.targets) = sends.into_iter().chain(takes).unzip();
        (any && self.at == self.ops.len()).then_some(found)
    }

    fn direct(mut self) -> Option<Found> {
        let mut found = Found::new(Form::HopDirect, &[], &[]);
        let plain = |o: &Operand| matches!(o.buffer, Buffer::Input | Buffer::Output);
        let of_buffers = |from: &Operand, to: &[Operand]| plain(from) && to.iter().all(plain);
        let mut meets = u32::from(self.signal()) * TELLS;
        let first_wait = self.at as u32;
        meets |= u32::from(self.wait()) * HEARS;
        let first = self.moves(of_buffers);
        meets |= u32::from(self.signal()) * TELLS_END;
        let second_wait = self.at as u32;
        meets |= u32::from(self.wait()) * HEARS_END;
        let second = self.moves(of_buffers);
        found.meeting = Meeting {
            meets,
            channels: self.own.len() as u32,
            first: first.len() as u32,
            first_wait,
            second_wait,
            op_index: 0,
        };
        (found.sources, found.targets) = first.into_iter().chain(second).unzip();
        (self.at == self.ops.len()).then_some(found)
    }

    /// Goes past a signal to all the block's peers, if there is one.
    fn signal(&mut self) -> bool {
        let is_next = matches!(self.ops.get(self.at), Some(Op::Signal { channels, relaxed: false })
            if are(channels, &self.own));
        self.at += usize::from(is_next);
        is_next
    }

    /// Goes past a wait for all of them.
    fn wait(&mut self) -> bool {
        let is_next = matches!(self.ops.get(self.at), Some(Op::Wait { channels, relaxed: false })
            if are(channels, &self.own));
        self.at += usize::from(is_next);
        is_next
    }

    /// Goes past moves of the block's slice that are as `fits` says; returns from where to where, one by one.
    fn moves(&mut self, fits: impl Fn(&Operand, &[Operand]) -> bool) -> Vec<(Operand, Operand)> {
        let mut all = Vec::new();
        while let Some(Op::Move {
            chunks, from, to, ..
        }) = self.ops.get(self.at)
            && (chunks.first, chunks.count, chunks.slice) == (0, 1, self.slice)
            && fits(from, to)
        {
            all.extend(to.iter().map(|to| (*from, *to)));
            self.at += 1;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossweft_device::packet::PacketType;
    use crossweft_plan::{Builder, Chunks, Collective};

    /// Two ranks, two blocks each; `change` may spoil it.
    fn plan(change: impl Fn(&mut Vec<Op>)) -> Plan {
        let mut builder = Builder::new("one", Collective::AllReduce, 2, 2, 1);
        builder = builder.packets(2, PacketType::Ll16);
        for rank in 0..2 {
            let peer = 1 - rank;
            let input = Operand::new(rank, Buffer::Input, 0);
            for block in 0..2 {
                let chunks = Chunks::new(0, 1).sliced(block, 2);
                let came = Operand::new(rank, Buffer::Packets, peer);
                let mut sources = vec![input, came];
                sources.sort_by_key(|o| (o.buffer == Buffer::Packets) == (rank == 0));
                builder
                    .at(rank, block)
                    .transfer(
                        chunks,
                        input,
                        vec![Operand::new(peer, Buffer::Packets, rank)],
                    )
                    .reduce_last(chunks, sources, vec![Operand::new(rank, Buffer::Output, 0)]);
            }
        }
        let mut plan = builder.finish().expect("a sound plan");
        change(&mut plan.ranks[0].blocks[1]);
        plan
    }

    #[test]
    fn one_shots_are_recognised_and_nothing_else() {
        let whole = plan(|_| ());
        for rank in 0..2 {
            let found = one_shot(&whole, rank).expect("a one-shot");
            assert_eq!(found.form, Form::OneShot);
            assert_eq!(
                found.targets,
                [Operand::new(1 - rank, Buffer::Packets, rank)]
            );
            // The plan's order is kept: here each rank's input first on rank 0, last on rank 1.
            let at = found.sources.iter().position(|o| o.buffer == Buffer::Input);
            assert_eq!(at, Some(rank as usize), "rank {rank}");
        }
        assert_eq!(one_shot(&whole, 2), None);
        let spoilt: [fn(&mut Vec<Op>); 5] = [
            |ops| ops.truncate(1),
            |ops| ops.push(Op::Sync),
            |ops| ops.swap(0, 1),
            |ops| {
                if let Op::Reduce { last, .. } = &mut ops[1] {
                    *last = false;
                }
            },
            |ops| {
                if let Op::Move { chunks, .. } = &mut ops[0] {
                    chunks.slice = (0, 2);
                }
            },
        ];
        for (i, change) in spoilt.into_iter().enumerate() {
            assert_eq!(one_shot(&plan(change), 0), None, "change {i}");
        }
    }

    /// Everybody sends another block to each: packets, whatever the size.
    #[test]
    fn reduce_scatters_take_no_lines() {
        let mut builder = Builder::new("scatter", Collective::ReduceScatter, 2, 1, 1);
        builder = builder.packets(2, PacketType::Ll16);
        for rank in 0..2 {
            let (peer, chunks) = (1 - rank, Chunks::new(0, 1));
            let block = |block| Operand::new(rank, Buffer::Input, block);
            let came = Operand::new(rank, Buffer::Packets, peer);
            builder
                .at(rank, 0)
                .transfer(
                    chunks,
                    block(peer),
                    vec![Operand::new(peer, Buffer::Packets, rank)],
                )
                .reduce_last(
                    chunks,
                    vec![block(rank), came],
                    vec![Operand::new(rank, Buffer::Output, 0)],
                );
        }
        let scatter = builder.finish().expect("a sound plan");
        let found = one_shot(&scatter, 1).expect("a one-shot");
        assert_eq!(found.form, Form::OneShotScatter);
        assert_eq!(found.origins, [Operand::new(1, Buffer::Input, 0)]);
        assert!(!has_lines(&scatter, 1 << 20));
        assert!(has_lines(&plan(|_| ()), 1 << 20));
        assert!(!has_lines(&plan(|_| ()), 1 << 10));
    }

    /// Two ranks, two blocks each; `change` may spoil it.
    fn two_shot_plan(change: impl Fn(&mut Vec<Op>)) -> Plan {
        let mut builder = Builder::new("two", Collective::AllReduce, 2, 2, 2);
        for block in 0..2 {
            let (of_0, of_1) = builder.connect(0, 1);
            for (rank, channel) in [(0, of_0), (1, of_1)] {
                let every = |buffer| (0..2).map(|q| Operand::new(q, buffer, rank)).collect();
                let chunks = Chunks::new(rank, 1).sliced(block, 2);
                builder
                    .at(rank, block)
                    .signal(&[channel])
                    .wait(&[channel])
                    .reduce_last(chunks, every(Buffer::Input), every(Buffer::Output))
                    .signal(&[channel])
                    .wait(&[channel]);
            }
        }
        let mut plan = builder.finish().expect("a sound plan");
        change(&mut plan.ranks[1].blocks[1]);
        plan
    }

    #[test]
    fn two_shots_are_recognised_and_nothing_else() {
        let whole = two_shot_plan(|_| ());
        for rank in 0..2 {
            let found = two_shot(&whole, rank).expect("a two-shot");
            assert_eq!(found.form, Form::TwoShot);
            assert_eq!(found.targets[1], Operand::new(1, Buffer::Output, rank));
            assert_eq!(found.sources[0], Operand::new(0, Buffer::Input, rank));
            assert_eq!(one_shot(&whole, rank), None);
        }
        let spoilt: [fn(&mut Vec<Op>); 5] = [
            |ops| ops.truncate(4),
            |ops| ops.swap(1, 2),
            |ops| {
                // Another block's channel.
                if let Op::Wait { channels, .. } = &mut ops[1] {
                    channels[0] = 0;
                }
            },
            |ops| {
                if let Op::Signal { relaxed, .. } = &mut ops[3] {
                    *relaxed = true;
                }
            },
            |ops| {
                if let Op::Reduce { from, .. } = &mut ops[2] {
                    from[0].index = 0;
                }
            },
        ];
        for (i, change) in spoilt.into_iter().enumerate() {
            assert_eq!(two_shot(&two_shot_plan(change), 1), None, "change {i}");
        }
    }
}
