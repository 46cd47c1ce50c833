//! Algorithms for switches that reduce from, and broadcast to, the memories of a group at once: all ranks' inputs are
//! one group, all outputs another.
//!
//! A plan names the group at each such operation. What has no multicast, today everything, does the same peer by
//! peer, with the same bits: sources are reduced in rank order. So these plans are right anywhere, and fast only where a
//! switch takes one message in place of `n - 1`: each rank then reads and writes a share of `1/n` once, whatever the
//! number of ranks. The selector chooses none of them.
//!
//! As in two-shot plans, the first handshake says that inputs are ready and outputs free, the second that inputs were
//! read and outputs are complete.

use crossweft_plan::{Buffer, Builder, Chunks, Collective, Op, Operand, Plan, PlanError, Switch};

use crate::algorithm::{connect_all, input, output, scratch};

/// The plan `name` of an all-reduce, a reduce-scatter or an all-gather, for `ranks` ranks, two at least, with `blocks`
/// thread blocks each.
pub(crate) fn plan(
    name: &str,
    collective: Collective,
    ranks: u32,
    blocks: u32,
) -> Result<Plan, PlanError> {
    // Each rank has a chunk of an all-reduce, and a block of the others.
    let chunks = match collective {
        Collective::AllReduce => ranks,
        _ => 1,
    };
    let mut b = Builder::new(name, collective, ranks, blocks, chunks);
    if collective == Collective::AllReduce {
        b = b.scratch(1, false);
    }
    let channels = connect_all(&mut b, ranks, blocks);
    for rank in 0..ranks {
        let mut group = |buffer| {
            let ranks = (0..ranks).collect();
            b.switch(rank, Switch { ranks, buffer })
        };
        let ops = match collective {
            Collective::AllReduce => {
                let (inputs, outputs) = (group(Buffer::Input), group(Buffer::Output));
                // What has come off the switch, before it goes back.
                let sum = scratch(rank, 0);
                vec![
                    reduce(ranks, inputs, rank, sum),
                    broadcast(ranks, outputs, sum, rank),
                ]
            }
            Collective::ReduceScatter => {
                vec![reduce(ranks, group(Buffer::Input), rank, output(rank, 0))]
            }
            _ => vec![broadcast(
                ranks,
                group(Buffer::Output),
                input(rank, 0),
                rank,
            )],
        };
        for block in 0..blocks {
            let all = &channels[rank as usize][block as usize];
            let first = if chunks == 1 { 0 } else { rank };
            let part = Chunks::new(first, 1).sliced(block, blocks);
            let mut at = b.at(rank, block);
            at.signal(all).wait(all);
            for op in &ops {
                at.op(op(part));
            }
            at.signal(all).wait(all);
        }
    }
    b.finish()
}

/// An operation on a part of a message.
type OnPart = Box<dyn Fn(Chunks) -> Op>;

/// Reduces part `index` of all inputs, by switch `switch` of the rank.
fn reduce(ranks: u32, switch: u32, index: u32, to: Operand) -> OnPart {
    Box::new(move |chunks| Op::Reduce {
        chunks,
        from: (0..ranks).map(|q| input(q, index)).collect(),
        to: vec![to],
        last: true,
        switch: Some(switch),
    })
}

/// Copies to part `index` of all outputs, by switch `switch` of the rank.
fn broadcast(ranks: u32, switch: u32, from: Operand, index: u32) -> OnPart {
    Box::new(move |chunks| Op::Move {
        chunks,
        from,
        to: (0..ranks).map(|q| output(q, index)).collect(),
        switch: Some(switch),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Place, Selector};

    /// The collectives that have it.
    const COLLECTIVES: [Collective; 3] = [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
    ];

    #[test]
    fn every_operation_on_data_goes_over_a_switch_to_the_whole_group() {
        for collective in COLLECTIVES {
            for ranks in [4, 7, 16] {
                let plan = Algorithm::Switch.plan_of(collective, ranks, 2).unwrap();
                let everyone: Vec<u32> = (0..ranks).collect();
                let mut seen = 0;
                for (rank, op) in plan.all_ops() {
                    let (from, to) = op.operands();
                    let (Op::Reduce { switch, .. } | Op::Move { switch, .. }) = op else {
                        continue;
                    };
                    let switch = &plan.ranks[rank as usize].switches[switch.unwrap() as usize];
                    assert_eq!(switch.ranks, everyone);
                    let of_group = match op {
                        Op::Reduce { .. } => from,
                        _ => to,
                    };
                    assert!(of_group.iter().map(|o| o.rank).eq(everyone.iter().copied()));
                    assert!(of_group.iter().all(|o| o.buffer == switch.buffer));
                    seen += 1;
                }
                let each = if collective == Collective::AllReduce {
                    2
                } else {
                    1
                };
                assert_eq!(seen, each * 2 * ranks);
            }
        }
    }

    #[test]
    fn the_selector_never_chooses_it() {
        for collective in COLLECTIVES {
            for place in [Place::Private, Place::Symmetric, Place::OneSymmetric] {
                for ranks in [1, 2, 4, 8, 16] {
                    for select in [Selector::new, Selector::for_gpus] {
                        let selector = select(collective, ranks, place, 1 << 30);
                        let mut choices = selector.choices().iter();
                        assert!(choices.all(|c| c.algorithm != Algorithm::Switch));
                    }
                }
            }
        }
    }
}
