//! The algorithms, written as plans over all ranks at once: here the reductions, in [`one_hop`] all else.
//!
//! Why none of them needs a barrier at its end is said at each: a rank may run ahead into the next
//! call, but only as far as its peers' data lets it.

use crossweft_plan::{Buffer, Builder, Chunks, Collective, Operand, Plan, PlanError};

use crate::one_hop::{self, Way};
use crate::switch_algorithms;

/// An algorithm. Which collectives it is for, [`of`](Self::of) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Everybody sends as packets to everybody who needs it, and reduces for itself. One hop: the
    /// least latency, but in an all-reduce each rank receives `n - 1` messages.
    OneShot,
    /// Each rank reduces one part of everybody's input and writes it to every output that is to have
    /// it, in place, with no copies. Needs registered memory.
    TwoShot,
    /// The same in two steps through scratch memory, for private buffers.
    TwoShotStaged,
    /// Parts travel around a ring, reduced on the way, then once more complete. Each rank only
    /// talks to its neighbours.
    Ring,
    /// Blocks go from inputs to outputs, with no copies between: who needs them reads them, where they can be reached in
    /// place. Needs registered memory.
    Direct,
    /// The same, but written by who has them, which links between GPUs are faster at. Needs registered memory.
    Push,
    /// Blocks go through scratch memory, where whoever needs them reads them, for private buffers.
    Staged,
    /// The same in parts, one behind the other, so that large messages need scratch memory for little of them:
    /// four parts of sixteen.
    Pipelined,
    /// Each rank reduces its share of all inputs, or broadcasts it to all outputs, over a switch; peer by peer where
    /// there is no multicast. Needs registered memory. Only on demand.
    Switch,
}

/// Parts of a message that is [`Pipelined`](Algorithm::Pipelined).
const PARTS: u32 = 16;

impl Algorithm {
    /// Those of all-reduce.
    pub const ALL: [Self; 5] = [
        Self::OneShot,
        Self::TwoShot,
        Self::TwoShotStaged,
        Self::Ring,
        Self::Switch,
    ];

    /// Those of a collective; none of those that only plans have.
    #[must_use]
    pub const fn of(collective: Collective) -> &'static [Self] {
        match collective {
            Collective::AllReduce => &Self::ALL,
            Collective::Reduce { .. } => &[Self::OneShot, Self::TwoShot, Self::TwoShotStaged],
            Collective::AllGather | Collective::ReduceScatter => &[
                Self::OneShot,
                Self::Direct,
                Self::Staged,
                Self::Pipelined,
                Self::Switch,
            ],
            Collective::AllToAll | Collective::Broadcast { .. } => &[
                Self::OneShot,
                Self::Direct,
                Self::Push,
                Self::Staged,
                Self::Pipelined,
            ],
            Collective::Gather { .. } | Collective::Scatter { .. } => {
                &[Self::OneShot, Self::Direct, Self::Staged, Self::Pipelined]
            }
            _ => &[],
        }
    }

    /// The name in tables and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::TwoShotStaged => "two-shot-staged",
            Self::Ring => "ring",
            Self::Direct => "direct",
            Self::Push => "push",
            Self::Staged => "staged",
            Self::Pipelined => "pipelined",
            Self::Switch => "switch",
        }
    }

    /// All-reduce's algorithm of that [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }

    /// Whether buffers must lie in registered memory.
    #[must_use]
    pub const fn needs_registered(self) -> bool {
        matches!(
            self,
            Self::TwoShot | Self::Direct | Self::Push | Self::Switch
        )
    }

    /// Whether blocks of a collective would overwrite each other in place.
    #[must_use]
    pub const fn overwrites(self, collective: Collective) -> bool {
        matches!(
            (collective, self),
            (Collective::AllToAll, Self::Direct | Self::Push)
        )
    }

    /// All-reduce's plan for `ranks` ranks with `blocks` thread blocks each.
    ///
    /// # Errors
    /// As for [`plan_of`](Self::plan_of).
    pub fn plan(self, ranks: u32, blocks: u32) -> Result<Plan, PlanError> {
        self.plan_of(Collective::AllReduce, ranks, blocks)
    }

    /// The plan of a collective for `ranks` ranks with `blocks` thread blocks each.
    ///
    /// # Errors
    /// [`PlanError`] if there are more ranks or blocks than a plan can hold, or none, or the collective has no such
    /// algorithm.
    pub fn plan_of(
        self,
        collective: Collective,
        ranks: u32,
        blocks: u32,
    ) -> Result<Plan, PlanError> {
        let name = match collective {
            Collective::AllReduce => self.name().to_owned(),
            _ => format!("{} {self}", collective.name()),
        };
        let those = Self::of(collective);
        if !those.contains(&self) {
            let those: Vec<_> = those.iter().map(|algorithm| algorithm.name()).collect();
            let reason = format!("there is no such algorithm; there are {}", those.join(", "));
            return Err(PlanError::Plan { plan: name, reason });
        }
        // Numbers that cannot be, before any work is done for them.
        Builder::check_numbers(&name, ranks, blocks)?;
        Builder::new(&name, collective, ranks, blocks, 1).finish()?;
        let one_hop = |way| one_hop::plan(&name, collective, way, ranks, blocks);
        match self {
            Self::OneShot => one_hop(Way::Packets),
            Self::Direct => one_hop(Way::Direct),
            Self::Push => one_hop(Way::Push),
            Self::Staged => one_hop(Way::Staged(1)),
            Self::Pipelined => one_hop(Way::Staged(PARTS)),
            _ if ranks == 1 => copy(&name, collective, blocks),
            Self::TwoShot => two_shot(&name, collective, ranks, blocks),
            Self::TwoShotStaged => two_shot_staged(&name, collective, ranks, blocks),
            Self::Ring => ring(ranks, blocks),
            Self::Switch => switch_algorithms::plan(&name, collective, ranks, blocks),
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

pub(crate) fn input(rank: u32, chunk: u32) -> Operand {
    Operand::new(rank, Buffer::Input, chunk)
}

pub(crate) fn output(rank: u32, chunk: u32) -> Operand {
    Operand::new(rank, Buffer::Output, chunk)
}

pub(crate) fn scratch(rank: u32, slot: u32) -> Operand {
    Operand::new(rank, Buffer::Scratch, slot)
}

pub(crate) fn packets(rank: u32, slot: u32) -> Operand {
    Operand::new(rank, Buffer::Packets, slot)
}

/// The other ranks, beginning behind `rank`, so that not all start with the same one.
pub(crate) fn peers(rank: u32, ranks: u32) -> impl Iterator<Item = u32> + Clone {
    (1..ranks).map(move |step| (rank + step) % ranks)
}

/// Every rank, beginning with `rank` itself.
pub(crate) fn everyone(rank: u32, ranks: u32) -> impl Iterator<Item = u32> + Clone {
    (0..ranks).map(move |step| (rank + step) % ranks)
}

/// A rank alone: its input is the result.
fn copy(name: &str, collective: Collective, blocks: u32) -> Result<Plan, PlanError> {
    let mut b = Builder::new(name, collective, 1, blocks, 1);
    for block in 0..blocks {
        let part = Chunks::new(0, 1).sliced(block, blocks);
        b.at(0, block)
            .transfer(part, input(0, 0), vec![output(0, 0)]);
    }
    b.finish()
}

/// The ranks that get the results of a reduction, beginning with or behind `rank`.
fn receivers(collective: Collective, rank: u32, ranks: u32) -> impl Iterator<Item = u32> + Clone {
    everyone(rank, ranks).filter(move |r| collective.root().is_none_or(|root| root == *r))
}

/// Channels between all pairs, for each block: `channels[rank][block]` lists the rank's own.
pub(crate) fn connect_all(b: &mut Builder, ranks: u32, blocks: u32) -> Vec<Vec<Vec<u32>>> {
    let mut channels = vec![vec![Vec::new(); blocks as usize]; ranks as usize];
    for block in 0..blocks {
        for low in 0..ranks {
            for high in low + 1..ranks {
                let (of_low, of_high) = b.connect(low, high);
                channels[low as usize][block as usize].push(of_low);
                channels[high as usize][block as usize].push(of_high);
            }
        }
    }
    channels
}

/// Rank `r` reduces chunk `r` of all inputs into all outputs that count. The first handshake says that inputs
/// are ready (and outputs free), the second that they were read (and outputs are complete).
fn two_shot(
    name: &str,
    collective: Collective,
    ranks: u32,
    blocks: u32,
) -> Result<Plan, PlanError> {
    let mut b = Builder::new(name, collective, ranks, blocks, ranks);
    let channels = connect_all(&mut b, ranks, blocks);
    for rank in 0..ranks {
        for block in 0..blocks {
            let all = &channels[rank as usize][block as usize];
            let part = Chunks::new(rank, 1).sliced(block, blocks);
            let from = (0..ranks).map(|q| input(q, rank)).collect();
            // Its own copy first: the others are copied from it, out of the cache.
            let to = receivers(collective, rank, ranks)
                .map(|q| output(q, rank))
                .collect();
            b.at(rank, block)
                .signal(all)
                .wait(all)
                .reduce_last(part, from, to)
                .signal(all)
                .wait(all);
        }
    }
    b.finish()
}

/// Scratch slots `0..n` of rank `r` receive everyone's chunk `r`, slots `n..2n` the results.
///
/// The scratch memory's two halves are used in turn: whoever writes for call e + 2 has results of call
/// e + 1 from every rank, so all have done with call e. (One half would do if all messages had one
/// size; with another size slots lie elsewhere.)
fn two_shot_staged(
    name: &str,
    collective: Collective,
    ranks: u32,
    blocks: u32,
) -> Result<Plan, PlanError> {
    let mut b = Builder::new(name, collective, ranks, blocks, ranks).scratch(2 * ranks, true);
    let channels = connect_all(&mut b, ranks, blocks);
    for rank in 0..ranks {
        for block in 0..blocks {
            let all = &channels[rank as usize][block as usize];
            let part = |chunk| Chunks::new(chunk, 1).sliced(block, blocks);
            let mut ops = b.at(rank, block);
            for peer in peers(rank, ranks) {
                ops.transfer(part(peer), input(rank, peer), vec![scratch(peer, rank)]);
            }
            let from = (0..ranks)
                .map(|q| {
                    if q == rank {
                        input(rank, rank)
                    } else {
                        scratch(rank, q)
                    }
                })
                .collect();
            let to = receivers(collective, rank, ranks)
                .map(|q| match q == rank {
                    true => output(rank, rank),
                    false => scratch(q, ranks + rank),
                })
                .collect();
            ops.signal(all)
                .wait(all)
                .reduce_last(part(rank), from, to)
                .signal(all)
                .wait(all);
            if !receivers(collective, rank, ranks).any(|q| q == rank) {
                continue;
            }
            for peer in peers(rank, ranks) {
                ops.transfer(
                    part(peer),
                    scratch(rank, ranks + peer),
                    vec![output(rank, peer)],
                );
            }
        }
    }
    b.finish()
}

/// In step `s` of the first round rank `r` passes on chunk `r - s`, reduced so far; in the second
/// round the complete chunks follow. Each step has a scratch slot of its own.
///
/// Two halves are used in turn, as above: a rank that has finished call e + 1 has results that went
/// through every other rank, so all have done with call e.
fn ring(ranks: u32, blocks: u32) -> Result<Plan, PlanError> {
    let last = ranks - 1;
    let mut b =
        Builder::new("ring", Collective::AllReduce, ranks, blocks, ranks).scratch(2 * last, true);
    for block in 0..blocks {
        let (mut to_next, mut from_previous) = (vec![0; ranks as usize], vec![0; ranks as usize]);
        for rank in 0..ranks {
            let next = (rank + 1) % ranks;
            let (out, into) = b.connect(rank, next);
            (to_next[rank as usize], from_previous[next as usize]) = (out, into);
        }
        for rank in 0..ranks {
            let next = (rank + 1) % ranks;
            let (signal, wait) = ([to_next[rank as usize]], [from_previous[rank as usize]]);
            let chunk = |back: u32| (rank + 2 * ranks - back) % ranks;
            let part = |chunk| Chunks::new(chunk, 1).sliced(block, blocks);
            let mut ops = b.at(rank, block);
            ops.transfer(part(rank), input(rank, rank), vec![scratch(next, 0)])
                .signal(&signal);
            for step in 1..last {
                let c = chunk(step);
                let from = vec![scratch(rank, step - 1), input(rank, c)];
                ops.wait(&wait)
                    .reduce(part(c), from, vec![scratch(next, step)])
                    .signal(&signal);
            }
            let c = chunk(last);
            let from = vec![scratch(rank, last - 1), input(rank, c)];
            let to = vec![output(rank, c), scratch(next, last)];
            ops.wait(&wait)
                .reduce_last(part(c), from, to)
                .signal(&signal);
            for step in 1..last {
                let c = chunk(last + step);
                let from = scratch(rank, last + step - 1);
                let to = vec![output(rank, c), scratch(next, last + step)];
                ops.wait(&wait).transfer(part(c), from, to).signal(&signal);
            }
            let c = chunk(2 * last);
            let from = scratch(rank, 2 * last - 1);
            ops.wait(&wait)
                .transfer(part(c), from, vec![output(rank, c)]);
        }
    }
    b.finish()
}

#[cfg(test)]
mod tests {
    use crossweft_plan::Op;
    use crossweft_plan::check::{Code, Options, Sizes, check};

    use super::*;

    /// Each collective, those of one rank with several.
    fn collectives(ranks: u32) -> Vec<Collective> {
        let mut all = vec![
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllToAll,
        ];
        for root in [0, ranks / 2, ranks - 1] {
            all.extend([
                Collective::Broadcast { root },
                Collective::Reduce { root },
                Collective::Gather { root },
                Collective::Scatter { root },
            ]);
        }
        all
    }

    #[test]
    fn every_algorithm_is_a_sound_plan_for_every_number_of_ranks() {
        for ranks in 1..=16 {
            for collective in collectives(ranks) {
                for algorithm in Algorithm::of(collective) {
                    for blocks in [1, 3] {
                        let plan = algorithm.plan_of(collective, ranks, blocks).unwrap();
                        assert_eq!(plan.world_size(), ranks);
                        let (input, output) = plan.reaches_into();
                        let expected = algorithm.needs_registered() && ranks > 1;
                        assert_eq!(input || output, expected, "{}", plan.name);
                        assert_eq!(Plan::from_json(plan.to_json().as_bytes()).unwrap(), plan);
                        let found = check(&plan, &Options::default());
                        let n = ranks;
                        assert!(found.is_empty(), "{}, {n} ranks: {}", plan.name, found[0]);
                    }
                }
            }
        }
    }

    #[test]
    fn plans_are_sound_up_to_64_ranks() {
        for ranks in [17, 24, 31, 32, 48, 63, 64] {
            for collective in collectives(ranks) {
                for &algorithm in Algorithm::of(collective) {
                    let plan = algorithm.plan_of(collective, ranks, 1).unwrap();
                    let found = check(&plan, &Options::default());
                    assert!(
                        found.is_empty(),
                        "{}, {ranks} ranks: {}",
                        plan.name,
                        found[0]
                    );
                }
            }
        }
    }

    #[test]
    fn messages_of_different_sizes_follow_one_another() {
        for (ranks, blocks) in [(2, 1), (3, 2), (8, 1)] {
            for collective in collectives(ranks) {
                for algorithm in Algorithm::of(collective) {
                    let plan = algorithm.plan_of(collective, ranks, blocks).unwrap();
                    for sizes in [Sizes::Vary, Sizes::VaryPacked] {
                        let mut options = Options::default();
                        options.sizes = sizes;
                        let found = check(&plan, &options);
                        assert!(found.is_empty(), "{}, {sizes:?}: {}", plan.name, found[0]);
                    }
                }
            }
        }
    }

    #[test]
    fn without_word_of_its_receivers_a_root_laps_them() {
        for algorithm in [Algorithm::OneShot, Algorithm::Staged] {
            let mut plan = algorithm
                .plan_of(Collective::Broadcast { root: 0 }, 2, 1)
                .unwrap();
            assert!(matches!(
                plan.ranks[0].blocks[0].pop(),
                Some(Op::Wait { .. })
            ));
            assert!(matches!(
                plan.ranks[1].blocks[0].remove(0),
                Op::Signal { .. }
            ));
            let found = check(&plan, &Options::default());
            assert!(
                found.iter().any(|fault| fault.code == Code::Race),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_collective_has_its_own_algorithms_for_numbers_that_can_be() {
        let error = Algorithm::Ring.plan_of(Collective::AllGather, 2, 1);
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("there are one-shot, direct, staged"),
            "{text}"
        );
        assert!(Algorithm::Direct.plan(2, 1).is_err());
        for (collective, ranks, blocks, words) in [
            (Collective::Reduce { root: 3 }, 3, 1, "its root is rank 3"),
            (Collective::Gather { root: 0 }, 0, 1, "0 ranks"),
            (Collective::AllGather, 2, 0, "0 thread blocks"),
            // Tables of so many would not fit into any memory.
            (Collective::AllReduce, u32::MAX, 1, "4294967295 ranks"),
            (Collective::AllReduce, 2, u32::MAX, "4294967295 thread"),
        ] {
            for algorithm in Algorithm::of(collective) {
                let error = algorithm.plan_of(collective, ranks, blocks).unwrap_err();
                assert!(error.to_string().contains(words), "{error}");
            }
        }
        assert!(Algorithm::of(Collective::Test).is_empty());
    }

    #[test]
    fn names_are_read_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        }
        assert_eq!(Algorithm::from_name("two_shot"), None);
    }
}
