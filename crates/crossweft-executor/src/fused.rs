//! Plans that a GPU runs in one piece, by a kernel with little else in it. The same packets, signals and
//! places as the executor's, so each rank, and each launch, may take either; but not with lines instead of
//! packets, which all take or none.

use crossweft_channel::ChannelError;
use crossweft_device::ReduceOp;
use crossweft_device::executor::Counters;
use crossweft_device::extent::{Extent, GRANULE, chunk_bytes};
use crossweft_device::gpu::lines::{LANES, PAIR as LINES, PAIR_PAYLOAD as LINES_PAYLOAD};
use crossweft_device::packet::{PAYLOAD, WORD};
use crossweft_device::program::{Launch, Program, Space};
use crossweft_device::semaphore::Semaphore;
use crossweft_kernels::{Entries, GpuContext, MAX_FUSED, OneShot, TwoShot};
use crossweft_plan::{Buffer, ChannelKind, Op, Operand, Plan};

use crate::tables::Memories;

/// A rank's part of such a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fused {
    form: Form,
    /// Where the results go, or this rank's packets, in the plan's order.
    targets: Vec<Place>,
    /// What is reduced, in the plan's order.
    sources: Vec<Place>,
    /// This rank's packet memory; 0 if there is none.
    packets: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    OneShot,
    /// With lines.
    OneShotLines,
    TwoShot,
}

/// The largest message that a plan must be for, in bytes, to take lines: below, packets are faster. (Memory that is laid out
/// for packets is large enough for lines from 4 KiB on.)
const LINES_FROM: u64 = 192 << 10;

/// Whether all ranks of a plan for messages of up to `max_bytes` take lines instead of packets where the machine keeps
/// them.
pub(crate) fn has_lines(plan: &Plan, max_bytes: u64) -> bool {
    // Slots of one chunk, behind nothing else, are aligned and large enough.
    let packets_alone = plan.chunks == 1 && plan.scratch_bytes(max_bytes) == Some((0, 0));
    let ranks = 0..plan.ranks.len() as u32;
    max_bytes >= LINES_FROM
        && packets_alone
        && ranks.into_iter().all(|rank| one_shot(plan, rank).is_some())
}

/// The form in which a GPU runs `rank`'s part of `plan` in one piece, by a kernel of its own instead of the
/// executor's: `one-shot` or `two-shot`; `None` if it has no such form.
#[must_use]
pub fn fused_form(plan: &Plan, rank: u32) -> Option<&'static str> {
    form(plan, rank).map(|(form, _)| match form {
        Form::OneShot | Form::OneShotLines => "one-shot",
        Form::TwoShot => "two-shot",
    })
}

/// The form of `rank`'s part of `plan`, and its targets and sources.
fn form(plan: &Plan, rank: u32) -> Option<(Form, Operands<'_>)> {
    let of = |form| move |operands| (form, operands);
    one_shot(plan, rank)
        .map(of(Form::OneShot))
        .or_else(|| two_shot(plan, rank).map(of(Form::TwoShot)))
}

/// Targets and sources.
type Operands<'a> = (&'a [Operand], &'a [Operand]);

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
    TwoShot(TwoShot),
}

impl Parameter {
    /// Bytes of a thread block's share.
    fn step(&self) -> u64 {
        match self {
            Self::OneShot(launch) => launch.step,
            Self::TwoShot(launch) => launch.step,
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
        let Some((form, (to, from))) = form(plan, rank) else {
            return Ok(None);
        };
        let form = match lines {
            true => Form::OneShotLines,
            false => form,
        };
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
        Ok(Some(Self {
            form,
            targets: to.iter().map(place).collect::<Result<_, _>>()?,
            sources: from.iter().map(place).collect::<Result<_, _>>()?,
            packets: memories.base(rank, Space::Packets)?,
        }))
    }

    /// The kernel.
    pub(crate) fn entry(&self, entries: &Entries) -> &'static str {
        match self.form {
            Form::OneShot => entries.one_shot,
            Form::OneShotLines => entries.one_shot_lines,
            Form::TwoShot => entries.two_shot,
        }
    }

    /// Threads of a block that have something to do: those without would only be waited for.
    pub(crate) fn threads(&self, parameter: &Parameter) -> u64 {
        match self.form {
            Form::OneShotLines => parameter.step() / LINES_PAYLOAD * u64::from(LANES),
            _ => parameter.step().div_ceil(GRANULE),
        }
    }

    /// The part of a message that this rank reduces.
    fn part(&self, program: &Program, bytes: u64) -> Extent {
        let chunk = chunk_bytes(bytes, program.chunks);
        match self.form {
            Form::OneShot | Form::OneShotLines => {
                Extent::of_chunks(bytes, chunk, 0, program.chunks)
            }
            Form::TwoShot => Extent::of_chunks(bytes, chunk, program.rank, 1),
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
        let at = |place: &Place| match (place.space, place.rank == program.rank) {
            (Space::Input, true) => launch.input,
            (Space::Input, false) => place.base + launch.input_offset,
            (Space::Output, true) => launch.output,
            (Space::Output, false) => place.base + launch.output_offset,
            _ => place.base + slot * u64::from(place.index),
        };
        let all = |places: &[Place]| {
            let mut table = [0; MAX_FUSED];
            for (entry, place) in table.iter_mut().zip(places) {
                *entry = at(place);
            }
            table
        };
        let (target, mut source) = (all(&self.targets), all(&self.sources));
        let aligned = |address: &u64| address.is_multiple_of(GRANULE);
        if !lines && !target.iter().chain(&source).all(aligned) {
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
            Form::OneShot | Form::OneShotLines => {
                let mut peer = [rank; MAX_FUSED];
                for (k, place) in self.sources.iter().enumerate() {
                    peer[k] = place.peer;
                    if place.space == Space::Input {
                        source[k] = 0;
                    }
                }
                if !lines && !aligned(&launch.output) {
                    return None;
                }
                Parameter::OneShot(OneShot {
                    input: launch.input,
                    output: launch.output,
                    bytes,
                    step,
                    counters,
                    context,
                    op,
                    divisor,
                    targets,
                    sources,
                    op_index: 1,
                    rank,
                    target,
                    source,
                    peer,
                })
            }
            Form::TwoShot => {
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
                    target,
                    source,
                })
            }
        })
    }
}

/// The semaphores of a two-shot plan are read as an array.
const _: () = assert!(size_of::<Semaphore>() == 32);

/// The targets and sources of a plan whose blocks, on this rank, send their slices of the whole input to
/// others' packet memory and then reduce it with what came into this rank's, to the output.
fn one_shot(plan: &Plan, rank: u32) -> Option<Operands<'_>> {
    let blocks = &plan.ranks.get(rank as usize)?.blocks;
    let mut found = None;
    for (index, ops) in (0..).zip(blocks) {
        let [
            Op::Move {
                chunks: sent,
                from: input,
                to,
                ..
            },
            Op::Reduce {
                chunks,
                from,
                to: outputs,
                last: true,
                ..
            },
        ] = ops.as_slice()
        else {
            return None;
        };
        let part = (chunks.first, chunks.count, chunks.slice);
        let whole = chunks == sent && part == (0, plan.chunks, (index, blocks.len() as u32));
        let own = Operand::new(rank, Buffer::Input, 0);
        let result = [Operand::new(rank, Buffer::Output, 0)];
        let from_here = |o: &Operand| *o == own || (o.buffer, o.rank) == (Buffer::Packets, rank);
        let fits = whole
            && *input == own
            && *outputs == result
            && to.iter().all(|o| o.buffer == Buffer::Packets)
            && from.iter().all(from_here)
            && !from.is_empty()
            && from.len().max(to.len()) <= MAX_FUSED;
        if !fits || found.is_some_and(|same| same != (to.as_slice(), from.as_slice())) {
            return None;
        }
        found = Some((to.as_slice(), from.as_slice()));
    }
    found
}

/// The targets and sources of a plan whose blocks, on this rank, meet all others, reduce their slices of this
/// rank's chunk of all inputs into all outputs, and meet again.
fn two_shot(plan: &Plan, rank: u32) -> Option<Operands<'_>> {
    let ranks = plan.ranks.len() as u32;
    let program = plan.ranks.get(rank as usize)?;
    let mut found = None;
    for (index, ops) in (0..).zip(&program.blocks) {
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
        ] = ops.as_slice()
        else {
            return None;
        };
        // The kernel finds a block's channels by its number.
        let own = index * (ranks - 1)..(index + 1) * (ranks - 1);
        let by_memory = |&id: &u32| {
            let channel = program.channels.get(id as usize);
            channel.is_some_and(|channel| channel.kind == ChannelKind::Memory)
        };
        let part = (chunks.first, chunks.count, chunks.slice);
        let is = |o: &Operand, buffer| (o.buffer, o.index) == (buffer, rank);
        let fits = all.iter().copied().eq(own)
            && all.iter().all(by_memory)
            && [first, again, second] == [all; 3]
            && plan.chunks == ranks
            && part == (rank, 1, (index, program.blocks.len() as u32))
            && from.iter().all(|o| is(o, Buffer::Input))
            && to.iter().all(|o| is(o, Buffer::Output))
            && !from.is_empty()
            && from.len().max(to.len()) <= MAX_FUSED;
        if !fits || found.is_some_and(|same| same != (to.as_slice(), from.as_slice())) {
            return None;
        }
        found = Some((to.as_slice(), from.as_slice()));
    }
    found
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
            let (to, from) = one_shot(&whole, rank).expect("a one-shot");
            assert_eq!(to, [Operand::new(1 - rank, Buffer::Packets, rank)]);
            // The plan's order is kept: here each rank's input first on rank 0, last on rank 1.
            let at = from.iter().position(|o| o.buffer == Buffer::Input);
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
            let (to, from) = two_shot(&whole, rank).expect("a two-shot");
            assert_eq!(to[1], Operand::new(1, Buffer::Output, rank));
            assert_eq!(from[0], Operand::new(0, Buffer::Input, rank));
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
