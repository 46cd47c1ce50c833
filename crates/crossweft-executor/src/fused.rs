//! Plans that a GPU runs in one piece, by a kernel with little else in it: one hop of packets, then a
//! reduction. The same packets in the same places as the executor's, so each rank, and each launch, may
//! take either.

use crossweft_channel::ChannelError;
use crossweft_device::ReduceOp;
use crossweft_device::executor::Counters;
use crossweft_device::extent::{Extent, GRANULE, chunk_bytes};
use crossweft_device::packet::{PAYLOAD, WORD};
use crossweft_device::program::{Launch, Program, Space};
use crossweft_kernels::{FusedLaunch, GpuContext, MAX_FUSED};
use crossweft_plan::{Buffer, Op, Operand, Plan};

use crate::tables::Memories;

/// What such a plan is made of, as one rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fused {
    /// Where this rank's packets go, in the plan's order.
    targets: Vec<Slot>,
    /// What is reduced, in the plan's order; `None` is this rank's input.
    sources: Vec<Option<Slot>>,
    /// This rank's packet memory.
    packets: u64,
    /// Index of the reduction.
    op_index: u32,
}

/// A slot of packet memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    /// Where the first slot is, as mapped here.
    base: u64,
    index: u32,
    /// Who sends to it, or reads from it.
    peer: u32,
}

impl Fused {
    /// `rank`'s part of `plan`, if it has this form.
    pub(crate) fn of(
        plan: &Plan,
        rank: u32,
        memories: &Memories<'_>,
    ) -> Result<Option<Self>, ChannelError> {
        let Some((to, from)) = one_shot(plan, rank) else {
            return Ok(None);
        };
        let slot = |operand: &Operand, peer| -> Result<Slot, ChannelError> {
            Ok(Slot {
                base: memories.base(operand.rank, Space::Packets)?,
                index: operand.index,
                peer,
            })
        };
        let targets = to.iter().map(|operand| slot(operand, operand.rank));
        let sources = from.iter().map(|operand| match operand.buffer {
            Buffer::Packets => {
                let sender = plan.packet_sender(rank, operand.index);
                slot(operand, sender.unwrap_or(rank)).map(Some)
            }
            _ => Ok(None),
        });
        Ok(Some(Self {
            targets: targets.collect::<Result<_, _>>()?,
            sources: sources.collect::<Result<_, _>>()?,
            packets: memories.base(rank, Space::Packets)?,
            op_index: 1,
        }))
    }

    /// Bytes of a thread block's part of a message.
    pub(crate) fn step(program: &Program, bytes: u64) -> u64 {
        let all = Extent {
            begin: 0,
            end: bytes,
        };
        all.slice(0, program.block_count).len()
    }

    /// The kernel's parameter; `None` if this launch is not for it, whose buffers must be aligned.
    pub(crate) fn launch(
        &self,
        program: &Program,
        launch: &Launch,
        context: GpuContext,
        op: ReduceOp,
    ) -> Option<FusedLaunch> {
        let Launch {
            input,
            output,
            bytes,
            ..
        } = *launch;
        if !(input | output).is_multiple_of(GRANULE) {
            return None;
        }
        let chunk = chunk_bytes(bytes, program.chunks);
        let at = |slot: &Slot| slot.base + chunk * u64::from(slot.index) * (WORD / PAYLOAD);
        let mut parameter = FusedLaunch {
            input,
            output,
            bytes,
            step: Self::step(program, bytes),
            counters: Counters {
                epoch: program.counters,
                packets: self.packets,
                packets_half: program.packets_half,
                blocks: program.block_count.into(),
            },
            context,
            op,
            divisor: if op == ReduceOp::Avg {
                program.ranks
            } else {
                0
            },
            targets: self.targets.len() as u32,
            sources: self.sources.len() as u32,
            op_index: self.op_index,
            rank: program.rank,
            target: [0; MAX_FUSED],
            source: [0; MAX_FUSED],
            peer: [program.rank; MAX_FUSED],
        };
        for (place, slot) in parameter.target.iter_mut().zip(&self.targets) {
            *place = at(slot);
        }
        let places = parameter.source.iter_mut().zip(&mut parameter.peer);
        for ((place, peer), source) in places.zip(&self.sources) {
            if let Some(slot) = source {
                (*place, *peer) = (at(slot), slot.peer);
            }
        }
        Some(parameter)
    }
}

/// The targets and sources of a plan whose blocks, on this rank, send their slices of the whole input to
/// others' packet memory and then reduce it with what came into this rank's, to the output.
fn one_shot(plan: &Plan, rank: u32) -> Option<(&[Operand], &[Operand])> {
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
}
