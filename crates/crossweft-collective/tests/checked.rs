//! The checker against the built-in algorithms: all are accepted, and of mutated ones those that an
//! independent interpreter can make fail are refused.

use std::collections::BTreeMap;
use std::time::Instant;

use crossweft_collective::Algorithm;
use crossweft_plan::check::{Options, Sizes, check};
use crossweft_plan::{Buffer, Op, Operand, Plan};

fn accepted(plan: &Plan) -> bool {
    check(plan, &Options::default()).is_empty()
}

#[test]
fn every_algorithm_is_accepted() {
    for algorithm in Algorithm::ALL {
        for ranks in 1..=16 {
            for blocks in [1, 2] {
                let plan = algorithm.plan(ranks, blocks).unwrap();
                let found = check(&plan, &Options::default());
                assert!(found.is_empty(), "{algorithm}, {ranks} ranks: {}", found[0]);
            }
        }
        for (ranks, blocks) in [(8, 8), (32, 2), (64, 1)] {
            let plan = algorithm.plan(ranks, blocks).unwrap();
            let start = Instant::now();
            let found = check(&plan, &Options::default());
            let ops = plan.ranks.iter().flat_map(|r| &r.blocks).map(Vec::len);
            println!(
                "{algorithm}: {ranks} ranks, {blocks} blocks, {} ops: {:?}",
                ops.sum::<usize>(),
                start.elapsed()
            );
            assert!(found.is_empty(), "{algorithm}, {ranks} ranks: {}", found[0]);
        }
    }
}

/// The interpreter shares nothing with the checker: it moves numbers, under random schedules, a
/// granule and an operand at a time, and looks at the results.
mod interpreter {
    use super::*;

    /// `xorshift64*`
    pub(super) struct Random(pub(super) u64);

    impl Random {
        pub(super) fn next(&mut self) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }

        pub(super) fn below(&mut self, n: usize) -> usize {
            ((self.next() >> 33) as usize) % n
        }
    }

    /// What an average's division is here: a last reduction multiplies.
    const LAST: u64 = 0x9e37_79b9_7f4a_7c15;
    /// Granules of a chunk: two slices of it, and two of those.
    const CHUNK: usize = 4;
    const EXECUTIONS: usize = 3;

    #[derive(Clone, Copy, Default)]
    struct Word {
        value: u64,
        flag: usize,
    }

    #[derive(Clone, Default)]
    struct Process {
        op: usize,
        granule: usize,
        /// 0: reads; k: writes to destination k - 1.
        part: usize,
        value: u64,
    }

    struct Machine<'a> {
        plan: &'a Plan,
        in_place: bool,
        /// By rank, buffer and half.
        memory: Vec<[[Vec<Word>; 2]; 4]>,
        /// Signals not yet taken, by the rank and channel that waits.
        signals: BTreeMap<(u32, u32), u64>,
        processes: Vec<Vec<Process>>,
        execution: Vec<usize>,
        random: Random,
    }

    fn content(execution: usize, rank: usize, at: usize) -> u64 {
        let mut random = Random((execution as u64 + 1) << 40 | (rank as u64 + 1) << 20 | at as u64);
        (0..4).map(|_| random.next()).fold(0, u64::wrapping_add)
    }

    /// What goes wrong with an all-reduce plan under some of the schedules, if anything.
    pub(super) fn failure(plan: &Plan, seeds: std::ops::Range<u64>) -> Option<&'static str> {
        seeds.into_iter().find_map(|seed| {
            [false, true]
                .into_iter()
                .find_map(|in_place| Machine::new(plan, in_place, seed).run().err())
        })
    }

    impl<'a> Machine<'a> {
        fn new(plan: &'a Plan, in_place: bool, seed: u64) -> Self {
            let message = plan.chunks as usize * CHUNK;
            let room = |slots: u32| vec![Word::default(); slots as usize * CHUNK];
            let memory = [
                [vec![Word::default(); message], Vec::new()],
                [vec![Word::default(); message], Vec::new()],
                [room(plan.scratch_slots), room(plan.scratch_slots)],
                [room(plan.packet_slots), room(plan.packet_slots)],
            ];
            let ranks = plan.ranks.len();
            let mut random = Random(seed.wrapping_mul(0x1234_5678_9abc_def1) | 1);
            random.next();
            Self {
                plan,
                in_place,
                memory: vec![memory; ranks],
                signals: BTreeMap::new(),
                processes: plan
                    .ranks
                    .iter()
                    .map(|r| vec![Process::default(); r.blocks.len()])
                    .collect(),
                execution: vec![0; ranks],
                random,
            }
        }

        fn run(mut self) -> Result<(), &'static str> {
            let ranks = self.plan.ranks.len();
            let mut all: Vec<(usize, Option<usize>)> = Vec::new();
            for rank in 0..ranks {
                self.fill(rank);
                all.push((rank, None));
                all.extend((0..self.processes[rank].len()).map(|block| (rank, Some(block))));
            }
            // Priorities that change now and then: some ranks run far ahead, some lag behind.
            for k in (1..all.len()).rev() {
                let other = self.random.below(k + 1);
                all.swap(k, other);
            }
            let change = [3, 20, 100, 1000][self.random.below(4)];
            loop {
                if self.execution.iter().all(|done| *done == EXECUTIONS) {
                    return Ok(());
                }
                let mut moved = false;
                for k in 0..all.len() {
                    let (rank, block) = all[k];
                    moved = match block {
                        None => self.turn(rank)?,
                        Some(block) => self.step(rank, block),
                    };
                    if moved {
                        if self.random.below(change) == 0 {
                            let process = all.remove(k);
                            let to = self.random.below(all.len() + 1);
                            all.insert(to, process);
                        }
                        break;
                    }
                }
                if !moved {
                    return Err("hangs");
                }
            }
        }

        fn fill(&mut self, rank: usize) {
            let execution = self.execution[rank];
            for at in 0..self.memory[rank][0][0].len() {
                let junk = self.random.next();
                self.memory[rank][0][0][at].value = junk;
                self.memory[rank][1][0][at].value = junk ^ 1;
                let input = usize::from(self.in_place);
                if execution < EXECUTIONS {
                    self.memory[rank][input][0][at].value = content(execution, rank, at);
                }
            }
        }

        /// The caller's turn, if the rank is done.
        fn turn(&mut self, rank: usize) -> Result<bool, &'static str> {
            let execution = self.execution[rank];
            let done = (0..)
                .zip(&self.processes[rank])
                .all(|(block, process): (usize, _)| {
                    process.op == self.plan.ranks[rank].blocks[block].len()
                });
            if !done || execution == EXECUTIONS {
                return Ok(false);
            }
            let ranks = self.plan.ranks.len();
            for (at, word) in self.memory[rank][1][0].iter().enumerate() {
                let sum = (0..ranks).fold(0u64, |sum, rank| {
                    sum.wrapping_add(content(execution, rank, at))
                });
                if word.value != sum.wrapping_mul(LAST) {
                    return Err("wrong result");
                }
            }
            self.execution[rank] += 1;
            self.fill(rank);
            if execution + 1 < EXECUTIONS {
                self.processes[rank].fill(Process::default());
            }
            Ok(true)
        }

        fn word(&mut self, operand: Operand, execution: usize, offset: usize) -> &mut Word {
            let (space, half) = match operand.buffer {
                Buffer::Input => (usize::from(self.in_place), 0),
                Buffer::Output => (1, 0),
                Buffer::Scratch => (2, execution % 2 * usize::from(self.plan.double_scratch)),
                _ => (3, execution % 2),
            };
            let at = operand.index as usize * CHUNK + offset;
            &mut self.memory[operand.rank as usize][space][half][at]
        }

        /// Does a bit of a block's work; `false` if it has to wait.
        fn step(&mut self, rank: usize, block: usize) -> bool {
            let (plan, execution) = (self.plan, self.execution[rank]);
            let mut process = self.processes[rank][block].clone();
            let Some(op) = plan.ranks[rank].blocks[block].get(process.op) else {
                return false;
            };
            match op {
                Op::Move { chunks, .. } | Op::Reduce { chunks, .. } => {
                    let (from, to) = op.operands();
                    let all = chunks.count as usize * CHUNK;
                    let (slice, of) = (chunks.slice.0 as usize, chunks.slice.1 as usize);
                    let share = all.div_ceil(of);
                    let (begin, end) = ((share * slice).min(all), (share * (slice + 1)).min(all));
                    let at = begin + process.granule;
                    if at >= end {
                        (process.op, process.granule) = (process.op + 1, 0);
                    } else if process.part == 0 {
                        process.value = 0;
                        for operand in from {
                            let packets = operand.buffer == Buffer::Packets;
                            let word = *self.word(*operand, execution, at);
                            if packets && word.flag != execution + 1 {
                                return false;
                            }
                            process.value = process.value.wrapping_add(word.value);
                        }
                        if matches!(op, Op::Reduce { last: true, .. }) {
                            process.value = process.value.wrapping_mul(LAST);
                        }
                        process.part = 1;
                    } else {
                        let (value, flag) = (process.value, execution + 1);
                        *self.word(to[process.part - 1], execution, at) = Word { value, flag };
                        process.part += 1;
                        if process.part > to.len() {
                            (process.part, process.granule) = (0, process.granule + 1);
                        }
                    }
                }
                Op::Signal { channels, .. } => {
                    let id = channels[process.part];
                    let end = other_end(plan, rank as u32, id);
                    *self.signals.entry(end).or_default() += 1;
                    process.part += 1;
                    if process.part == channels.len() {
                        (process.part, process.op) = (0, process.op + 1);
                    }
                }
                Op::Wait { channels, .. } => {
                    let end = (rank as u32, channels[process.part]);
                    match self.signals.get_mut(&end) {
                        Some(count) if *count > 0 => *count -= 1,
                        _ => return false,
                    }
                    process.part += 1;
                    if process.part == channels.len() {
                        (process.part, process.op) = (0, process.op + 1);
                    }
                }
                Op::Sync => process.op += 1,
                op => panic!("no {} in these plans", op.name()),
            }
            self.processes[rank][block] = process;
            true
        }
    }
}

/// The rank and channel at the other end.
fn other_end(plan: &Plan, rank: u32, id: u32) -> (u32, u32) {
    let channels = &plan.ranks[rank as usize].channels;
    let peer = channels[id as usize].peer;
    let nth = channels[..id as usize]
        .iter()
        .filter(|c| c.peer == peer)
        .count();
    let mut theirs = (0..).zip(&plan.ranks[peer as usize].channels);
    let end = theirs.by_ref().filter(|(_, c)| c.peer == rank).nth(nth);
    (peer, end.expect("channels have two ends").0)
}

type At = (usize, usize, usize);

fn places(plan: &Plan) -> Vec<At> {
    let mut places = Vec::new();
    for (r, rank) in plan.ranks.iter().enumerate() {
        for (b, block) in rank.blocks.iter().enumerate() {
            places.extend((0..block.len()).map(|o| (r, b, o)));
        }
    }
    places
}

fn ids(op: &mut Op) -> Option<&mut Vec<u32>> {
    match op {
        Op::Signal { channels, .. } | Op::Wait { channels, .. } => Some(channels),
        _ => None,
    }
}

/// All operands of an op, to be changed.
fn operands(op: &mut Op) -> Vec<&mut Operand> {
    match op {
        Op::Move { from, to, .. } => std::iter::once(from).chain(to).collect(),
        Op::Reduce { from, to, .. } => from.iter_mut().chain(to).collect(),
        _ => Vec::new(),
    }
}

/// Plans with one thing changed, that still have a sound structure; most of them are wrong.
fn mutants(plan: &Plan) -> Vec<(String, Plan)> {
    let mut all = Vec::new();
    let mut add = |what: String, change: &dyn Fn(&mut Plan)| {
        let mut mutant = plan.clone();
        change(&mut mutant);
        if mutant != *plan && mutant.validate().is_ok() {
            all.push((what, mutant));
        }
    };
    let ranks = plan.world_size();
    for at @ (r, b, o) in places(plan) {
        let op = &plan.ranks[r].blocks[b][o];
        let block = |p: &mut Plan, f: &dyn Fn(&mut Vec<Op>)| f(&mut p.ranks[r].blocks[b]);
        let change = |p: &mut Plan, f: &dyn Fn(&mut Op)| f(&mut p.ranks[r].blocks[b][o]);
        let name = |what: &str| format!("{what} {at:?} ({})", op.name());
        add(name("drop"), &|p| block(p, &|ops| drop(ops.remove(o))));
        add(name("twice"), &|p| {
            block(p, &|ops| ops.insert(o, ops[o].clone()));
        });
        if o + 1 < plan.ranks[r].blocks[b].len() {
            add(name("swap"), &|p| block(p, &|ops| ops.swap(o, o + 1)));
        }
        // To another block of the rank.
        let other = (b + 1) % plan.ranks[r].blocks.len();
        if other != b {
            add(name("elsewhere"), &|p| {
                let op = p.ranks[r].blocks[b].remove(o);
                let to = &mut p.ranks[r].blocks[other];
                to.insert(o.min(to.len()), op);
            });
        }
        let count = operands(&mut op.clone()).len();
        for k in 0..count {
            for by in [1, ranks - 1] {
                add(name("re-aim rank of"), &|p| {
                    change(p, &|op| {
                        let operand = &mut *operands(op)[k];
                        operand.rank = (operand.rank + by) % ranks;
                    });
                });
            }
            for by in [1, u32::MAX] {
                add(name("re-aim index of"), &|p| {
                    change(p, &|op| {
                        let operand = &mut *operands(op)[k];
                        operand.index = operand.index.wrapping_add(by);
                    });
                });
            }
            for buffer in [Buffer::Input, Buffer::Output, Buffer::Scratch] {
                add(name("re-aim buffer of"), &|p| {
                    change(p, &|op| operands(op)[k].buffer = buffer);
                });
            }
            add(name("drop an operand of"), &|p| {
                change(p, &|op| match op {
                    Op::Move { to, .. } if k > 0 => drop(to.remove(k - 1)),
                    Op::Reduce { from, .. } if k < from.len() => drop(from.remove(k)),
                    Op::Reduce { from, to, .. } => drop(to.remove(k - from.len())),
                    _ => {}
                });
            });
        }
        for by in [1, u32::MAX] {
            add(name("other chunk of"), &|p| {
                change(p, &|op| {
                    if let Op::Move { chunks, .. } | Op::Reduce { chunks, .. } = op {
                        chunks.first = chunks.first.wrapping_add(by);
                    }
                });
            });
        }
        add(name("other slice of"), &|p| {
            change(p, &|op| {
                if let Op::Move { chunks, .. } | Op::Reduce { chunks, .. } = op {
                    chunks.slice.0 = (chunks.slice.0 + 1) % chunks.slice.1;
                }
            });
        });
        add(name("not last, or last"), &|p| {
            change(p, &|op| {
                if let Op::Reduce { last, .. } = op {
                    *last = !*last;
                }
            });
        });
        let links = ids(&mut op.clone()).map_or(0, |ids| ids.len());
        for k in 0..links {
            for by in [1, u32::MAX] {
                add(name("other channel of"), &|p| {
                    change(p, &|op| {
                        let id = &mut ids(op).expect("it has channels")[k];
                        *id = id.wrapping_add(by);
                    });
                });
            }
        }
        // A signal and the wait for it.
        if let Op::Signal { channels, .. } = op {
            let before = |id: u32| {
                let ops = &plan.ranks[r].blocks[b][..o];
                let signals = ops.iter().filter_map(|op| match op {
                    Op::Signal { channels, .. } => Some(channels),
                    _ => None,
                });
                signals.flatten().filter(|c| **c == id).count()
            };
            for &id in channels {
                let (peer, theirs) = other_end(plan, r as u32, id);
                for relaxed in [false, true] {
                    let what = if relaxed { "relax" } else { "drop the pair of" };
                    add(name(what), &|p| {
                        let nth = before(id);
                        let waits = p.ranks[peer as usize].blocks.iter_mut().flatten();
                        let wait = waits
                            .filter(|op| {
                                matches!(op, Op::Wait { channels, .. } if channels.contains(&theirs))
                            })
                            .nth(nth);
                        let Some(wait) = wait else { return };
                        if relaxed {
                            let Op::Wait { relaxed, .. } = wait else {
                                return;
                            };
                            *relaxed = true;
                            return;
                        }
                        ids(wait)
                            .expect("it has channels")
                            .retain(|id| *id != theirs);
                        change(p, &|op| {
                            ids(op)
                                .expect("it has channels")
                                .retain(|other| *other != id)
                        });
                        for ops in p.ranks.iter_mut().flat_map(|r| &mut r.blocks) {
                            ops.retain_mut(|op| ids(op).is_none_or(|ids| !ids.is_empty()));
                        }
                    });
                }
            }
        }
    }
    all
}

#[test]
fn harmful_mutants_are_refused() {
    let mut random = interpreter::Random(7);
    let start = Instant::now();
    let mut total = [0; 4];
    for (ranks, blocks, most) in [
        (2, 1, usize::MAX),
        (2, 2, usize::MAX),
        (3, 1, 700),
        (3, 2, 500),
        (4, 2, 400),
        (8, 1, 150),
    ] {
        for algorithm in Algorithm::ALL {
            let plan = algorithm.plan(ranks, blocks).unwrap();
            assert_eq!(interpreter::failure(&plan, 0..40), None, "{algorithm}");
            let mut mutants = mutants(&plan);
            while mutants.len() > most {
                let k = random.below(mutants.len());
                mutants.swap_remove(k);
            }
            let mut counts = [mutants.len(), 0, 0, 0];
            for (what, mutant) in mutants {
                let found = check(&mutant, &Options::default());
                // Those that are accepted must not fail, however often they are tried.
                let seeds = if found.is_empty() { 200 } else { 12 };
                let failure = interpreter::failure(&mutant, 0..seeds);
                counts[1] += usize::from(!found.is_empty());
                counts[2] += usize::from(failure.is_some());
                if found.is_empty() {
                    counts[3] += 1;
                    assert_eq!(
                        failure, None,
                        "{algorithm}, {ranks} ranks, {blocks} blocks: {what} was accepted"
                    );
                    if std::env::var_os("SHOW_MUTANTS").is_some() {
                        println!("    accepted: {what}");
                    }
                } else if failure.is_none() && std::env::var_os("SHOW_MUTANTS").is_some() {
                    println!("    unconfirmed: {what}: {}", found[0]);
                }
            }
            println!(
                "{algorithm}, {ranks} ranks, {blocks} blocks: {} mutants, {} caught, {} confirmed \
                 harmful, {} accepted",
                counts[0], counts[1], counts[2], counts[3]
            );
            for (sum, count) in total.iter_mut().zip(counts) {
                *sum += count;
            }
        }
    }
    println!(
        "all: {} mutants, {} caught, {} confirmed harmful, {} accepted; {:?}",
        total[0],
        total[1],
        total[2],
        total[3],
        start.elapsed()
    );
    assert!(total[2] > 1000);
}

/// Changes that make no difference.
fn harmless(plan: &Plan, blocks: u32) -> Vec<(String, Plan)> {
    let mut all = Vec::new();
    let mut add = |what: String, change: &dyn Fn(&mut Plan)| {
        let mut mutant = plan.clone();
        change(&mut mutant);
        mutant.validate().expect("it is as sound as before");
        all.push((what, mutant));
    };
    for at @ (r, b, o) in places(plan) {
        let op = &plan.ranks[r].blocks[b][o];
        let name = |what: &str| format!("{what} {at:?} ({})", op.name());
        add(name("sync before"), &|p| {
            p.ranks[r].blocks[b].insert(o, Op::Sync);
        });
        if let Op::Signal { channels, .. } | Op::Wait { channels, .. } = op {
            add(name("channels turned round"), &|p| {
                ids(&mut p.ranks[r].blocks[b][o])
                    .expect("it has channels")
                    .reverse();
            });
            if channels.len() > 1 {
                add(name("split"), &|p| {
                    let block = &mut p.ranks[r].blocks[b];
                    let mut second = block[o].clone();
                    ids(&mut second).expect("it has channels").remove(0);
                    ids(&mut block[o]).expect("it has channels").truncate(1);
                    block.insert(o + 1, second);
                });
            }
        }
        if let Op::Reduce { .. } = op {
            add(name("sources turned round"), &|p| {
                if let Op::Reduce { from, .. } = &mut p.ranks[r].blocks[b][o] {
                    from.reverse();
                }
            });
        }
        if blocks == 1 && matches!(op, Op::Move { .. } | Op::Reduce { .. }) {
            add(name("in two slices"), &|p| {
                let block = &mut p.ranks[r].blocks[b];
                let mut second = block[o].clone();
                for (index, op) in [&mut block[o], &mut second].into_iter().enumerate() {
                    if let Op::Move { chunks, .. } | Op::Reduce { chunks, .. } = op {
                        chunks.slice = (index as u32, 2);
                    }
                }
                block.insert(o + 1, second);
            });
        }
        // Moves side by side, between places of their own.
        if let (Op::Move { .. }, Some(Op::Move { .. })) = (op, plan.ranks[r].blocks[b].get(o + 1)) {
            add(name("swap"), &|p| p.ranks[r].blocks[b].swap(o, o + 1));
        }
        // One more signal at the end of one block, and one more wait at the end of its peer's.
        if let Op::Signal { channels, .. } = op {
            for &id in channels {
                let (peer, theirs) = other_end(plan, r as u32, id);
                add(name("one more signal"), &|p| {
                    let relaxed = false;
                    p.ranks[r].blocks[b].push(Op::Signal {
                        channels: vec![id],
                        relaxed,
                    });
                    p.ranks[peer as usize].blocks[b].push(Op::Wait {
                        channels: vec![theirs],
                        relaxed,
                    });
                });
            }
        }
    }
    // Every signal and every wait twice.
    add("all signals twice".to_owned(), &|p| {
        for ops in p.ranks.iter_mut().flat_map(|r| &mut r.blocks) {
            *ops = std::mem::take(ops)
                .into_iter()
                .flat_map(|mut op| {
                    let times = if ids(&mut op).is_some() { 2 } else { 1 };
                    std::iter::repeat_n(op, times)
                })
                .collect();
        }
    });
    all
}

#[test]
fn harmless_mutants_are_accepted() {
    let mut count = 0;
    for (ranks, blocks) in [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (8, 1)] {
        for algorithm in Algorithm::ALL {
            let plan = algorithm.plan(ranks, blocks).unwrap();
            for (index, (what, mutant)) in harmless(&plan, blocks).into_iter().enumerate() {
                if ranks == 8 && index % 5 != 0 {
                    continue;
                }
                count += 1;
                let found = check(&mutant, &Options::default());
                assert!(
                    found.is_empty(),
                    "{algorithm}, {ranks} ranks: {what}: {}",
                    found[0]
                );
                assert_eq!(interpreter::failure(&mutant, 0..3), None, "{what}");
            }
        }
    }
    println!("{count} harmless mutants");
    assert!(accepted(&Algorithm::Ring.plan(2, 1).unwrap()));
}

#[test]
fn messages_of_different_sizes_follow_one_another() {
    for algorithm in Algorithm::ALL {
        for (ranks, blocks) in [(2, 1), (3, 2), (4, 3), (8, 2)] {
            let plan = algorithm.plan(ranks, blocks).unwrap();
            let mut options = Options::default();
            for sizes in [Sizes::Same, Sizes::Vary, Sizes::VaryPacked] {
                options.sizes = sizes;
                let found = check(&plan, &options);
                assert!(
                    found.is_empty(),
                    "{algorithm}, {ranks} ranks, {sizes:?}: {}",
                    found[0]
                );
            }
        }
    }
}
