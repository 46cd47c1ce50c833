//! The all-reduce algorithms, written as plans over all ranks at once.
//!
//! Why none of them needs a barrier at its end is said at each: a rank may run ahead into the next
//! call, but only as far as its peers' data lets it.

use crossweft_device::packet::PacketType;
use crossweft_plan::{Buffer, Builder, Chunks, Collective, Operand, Plan, PlanError};

/// An all-reduce algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Everybody sends everything to everybody as packets, and reduces for itself. One hop: the
    /// least latency, but each rank receives `n - 1` messages.
    OneShot,
    /// Each rank reduces one part of everybody's input and writes it to everybody's output, in
    /// place, with no copies. Needs registered memory.
    TwoShot,
    /// The same in two steps through scratch memory, for private buffers.
    TwoShotStaged,
    /// Parts travel around a ring, reduced on the way, then once more complete. Each rank only
    /// talks to its neighbours.
    Ring,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::OneShot,
        Self::TwoShot,
        Self::TwoShotStaged,
        Self::Ring,
    ];

    /// The name in tables and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::TwoShotStaged => "two-shot-staged",
            Self::Ring => "ring",
        }
    }

    /// The algorithm of that [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }

    /// Whether buffers must lie in registered memory.
    #[must_use]
    pub const fn needs_registered(self) -> bool {
        matches!(self, Self::TwoShot)
    }

    /// The plan for `ranks` ranks with `blocks` thread blocks each.
    ///
    /// # Errors
    /// [`PlanError`] if there are more ranks or blocks than a plan can hold, or none.
    pub fn plan(self, ranks: u32, blocks: u32) -> Result<Plan, PlanError> {
        match self {
            _ if ranks == 1 => copy(self.name(), blocks),
            Self::OneShot => one_shot(ranks, blocks),
            Self::TwoShot => two_shot(ranks, blocks),
            Self::TwoShotStaged => two_shot_staged(ranks, blocks),
            Self::Ring => ring(ranks, blocks),
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

fn input(rank: u32, chunk: u32) -> Operand {
    Operand::new(rank, Buffer::Input, chunk)
}

fn output(rank: u32, chunk: u32) -> Operand {
    Operand::new(rank, Buffer::Output, chunk)
}

fn scratch(rank: u32, slot: u32) -> Operand {
    Operand::new(rank, Buffer::Scratch, slot)
}

fn packets(rank: u32, slot: u32) -> Operand {
    Operand::new(rank, Buffer::Packets, slot)
}

/// The other ranks, beginning behind `rank`, so that not all start with the same one.
fn peers(rank: u32, ranks: u32) -> impl Iterator<Item = u32> + Clone {
    (1..ranks).map(move |step| (rank + step) % ranks)
}

/// Every rank, beginning with `rank` itself.
fn everyone(rank: u32, ranks: u32) -> impl Iterator<Item = u32> + Clone {
    (0..ranks).map(move |step| (rank + step) % ranks)
}

/// A rank alone: its input is the result.
fn copy(name: &str, blocks: u32) -> Result<Plan, PlanError> {
    let mut b = Builder::new(name, Collective::AllReduce, 1, blocks, 1);
    for block in 0..blocks {
        let part = Chunks::new(0, 1).sliced(block, blocks);
        b.at(0, block)
            .transfer(part, input(0, 0), vec![output(0, 0)]);
    }
    b.finish()
}

/// Packet slot `q` of each rank receives rank `q`'s input.
///
/// The packets' two halves are all the synchronisation: whoever sends for call e + 2 has received
/// all of call e + 1, so everyone has read call e.
fn one_shot(ranks: u32, blocks: u32) -> Result<Plan, PlanError> {
    let mut b = Builder::new("one-shot", Collective::AllReduce, ranks, blocks, 1)
        .packets(ranks, PacketType::Ll16);
    for rank in 0..ranks {
        for block in 0..blocks {
            let part = Chunks::new(0, 1).sliced(block, blocks);
            let to = peers(rank, ranks).map(|peer| packets(peer, rank)).collect();
            // In rank order on every rank: the same bits everywhere.
            let from = (0..ranks)
                .map(|q| {
                    if q == rank {
                        input(rank, 0)
                    } else {
                        packets(rank, q)
                    }
                })
                .collect();
            b.at(rank, block)
                .transfer(part, input(rank, 0), to)
                .reduce_last(part, from, vec![output(rank, 0)]);
        }
    }
    b.finish()
}

/// Channels between all pairs, for each block: `channels[rank][block]` lists the rank's own.
fn connect_all(b: &mut Builder, ranks: u32, blocks: u32) -> Vec<Vec<Vec<u32>>> {
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

/// Rank `r` reduces chunk `r` of all inputs into all outputs. The first handshake says that inputs
/// are ready (and outputs free), the second that they were read (and outputs are complete).
fn two_shot(ranks: u32, blocks: u32) -> Result<Plan, PlanError> {
    let mut b = Builder::new("two-shot", Collective::AllReduce, ranks, blocks, ranks);
    let channels = connect_all(&mut b, ranks, blocks);
    for rank in 0..ranks {
        for block in 0..blocks {
            let all = &channels[rank as usize][block as usize];
            let part = Chunks::new(rank, 1).sliced(block, blocks);
            let from = (0..ranks).map(|q| input(q, rank)).collect();
            // Its own copy first: the others are copied from it, out of the cache.
            let to = everyone(rank, ranks).map(|q| output(q, rank)).collect();
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
fn two_shot_staged(ranks: u32, blocks: u32) -> Result<Plan, PlanError> {
    let mut b = Builder::new(
        "two-shot-staged",
        Collective::AllReduce,
        ranks,
        blocks,
        ranks,
    )
    .scratch(2 * ranks, true);
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
            let to = std::iter::once(output(rank, rank))
                .chain(peers(rank, ranks).map(|peer| scratch(peer, ranks + rank)))
                .collect();
            ops.signal(all)
                .wait(all)
                .reduce_last(part(rank), from, to)
                .signal(all)
                .wait(all);
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
    use super::*;

    #[test]
    fn every_algorithm_is_a_sound_plan_for_every_number_of_ranks() {
        for algorithm in Algorithm::ALL {
            for ranks in 1..=16 {
                for blocks in [1, 3] {
                    let plan = algorithm.plan(ranks, blocks).unwrap();
                    assert_eq!(plan.world_size(), ranks);
                    let reaches = plan.reaches_into();
                    let expected = algorithm.needs_registered() && ranks > 1;
                    assert_eq!(reaches, (expected, expected), "{algorithm}");
                    assert_eq!(Plan::from_json(plan.to_json().as_bytes()).unwrap(), plan);
                }
            }
        }
    }

    #[test]
    fn names_are_read_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        }
        assert_eq!(Algorithm::from_name("two_shot"), None);
    }
}
