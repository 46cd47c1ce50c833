//! Sends and receives of any pattern: what arrives, and what callers hear when something is wrong.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Done, Footprint, Ranks};
use crossweft_collective::{
    Algorithm, AllReduceOptions, Blocks, CollectiveError, CollectiveOptions, Communicator,
    CommunicatorOptions, Counts, DataType, Exchange, ExchangeError, ExchangeOptions, ReduceOp,
    SymmetricBuffer, run_in_threads,
};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions, UniqueId};
use crossweft_verify::{Pattern, fill, reference_all_reduce};

/// Payload of a slot of the usual rings.
const SLOT: usize = (16 << 10) + 32;

fn job<T: Send>(
    ranks: u32,
    seconds: u64,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Result<Vec<T>, CollectiveError> {
    let timeout = Duration::from_secs(seconds);
    run_in_threads(ranks, CommunicatorOptions { timeout }, rank_main)
}

fn usual(communicator: &Communicator) -> Result<Exchange, CollectiveError> {
    communicator.exchange(&ExchangeOptions::default())
}

/// Rings that are full at once: two slots of 96 bytes of payload.
fn tiny() -> ExchangeOptions {
    ExchangeOptions::default().rings(2, 128)
}

/// The bytes of a message that no other has.
fn content(seed: u64, from: u32, to: u32, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed ^ u64::from(from) << 40 ^ u64::from(to) << 20);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_ne_bytes());
    words.take(bytes).collect()
}

/// splitmix64: the same numbers on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

fn assert_words(error: &impl ToString, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{text}` does not contain `{word}`");
    }
}

// ---- what arrives ----

#[test]
fn a_ring_of_any_size_of_message_and_any_number_of_ranks() {
    for ranks in 1..=8 {
        job(ranks, 60, |communicator| {
            let exchange = usual(communicator)?;
            let rank = communicator.rank();
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let around = [0, 1, 31, 32, 33, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT];
            for bytes in around.into_iter().chain([3_000_017]) {
                let sent = content(1, rank, next, bytes);
                let mut got = vec![0xa5; bytes];
                exchange
                    .group()
                    .recv(before, &mut got)
                    .send(next, &sent)
                    .run()?;
                assert!(got == content(1, before, rank, bytes), "{bytes} bytes");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn calls_that_block_match_in_order() {
    job(2, 60, |communicator| {
        let exchange = usual(communicator)?;
        for round in 0..200 {
            let mut word = [0; 8];
            if communicator.rank() == 0 {
                exchange.send(1, &u64::to_ne_bytes(round))?;
                exchange.recv(1, &mut word)?;
            } else {
                exchange.recv(0, &mut word)?;
                exchange.send(0, &(u64::from_ne_bytes(word) + 1).to_ne_bytes())?;
            }
            assert_eq!(
                u64::from_ne_bytes(word),
                round + u64::from(communicator.rank() == 0)
            );
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn one_rank_sends_ahead_as_far_as_there_are_slots() {
    job(2, 60, |communicator| {
        let exchange = usual(communicator)?;
        if communicator.rank() == 0 {
            for i in 0..16 {
                exchange.send(1, &[i; 100])?;
            }
        }
        communicator.barrier()?;
        if communicator.rank() == 1 {
            for i in 0..16 {
                let mut got = [0; 100];
                exchange.recv(0, &mut got)?;
                assert_eq!(got, [i; 100]);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn messages_to_oneself() {
    job(2, 60, |communicator| {
        let rank = communicator.rank();
        for options in [ExchangeOptions::default(), tiny()] {
            let exchange = communicator.exchange(&options)?;
            for bytes in [0, 8, 500, 1_000_003] {
                let sent = [1, 2].map(|seed| content(seed, rank, rank, bytes));
                let mut got = [vec![0; bytes], vec![0; bytes]];
                let [first, second] = &mut got;
                let mut group = exchange.group();
                group.send(rank, &sent[0]).send(rank, &sent[1]);
                group.recv(rank, first).recv(rank, second).run()?;
                assert!(got == sent);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn messages_and_blocks_in_memory_of_the_device() {
    job(2, 60, |communicator| {
        let exchange = usual(communicator)?;
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let memory = communicator.device().allocate(4096)?;
        memory.write(0, &content(5, rank, 0, 1000))?;
        let mut group = exchange.group();
        group
            .send_memory(peer, DataType::U8, &memory, 0..1000)
            .recv_memory(peer, DataType::U8, &memory, 1000..2000)
            .run()?;
        let mut got = vec![0; 1000];
        memory.read(1000, &mut got)?;
        assert_eq!(got, content(5, peer, 0, 1000));
        // Blocks of 400 and 600 bytes of either input, to places in the other order.
        let counts = [[400, 600][rank as usize]; 2];
        let (sent, at) = ([400, 600], [counts[0], 0]);
        exchange.calls(None).all_to_all_v(
            DataType::U8,
            ((&memory, 0..1000), Blocks::packed(&sent)),
            ((&memory, 2000..4096), Blocks::at(&counts, &at)),
        )?;
        let block = if rank == 0 { 0..400 } else { 400..1000 };
        got.truncate(block.len());
        for from in 0..2 {
            memory.read(2000 + at[from as usize], &mut got)?;
            assert_eq!(got, content(5, from, 0, 1000)[block.clone()]);
        }
        let error = exchange
            .group()
            .send_memory(peer, DataType::U8, &memory, 4000..5000)
            .run();
        assert_words(&error.unwrap_err(), &["bytes 4000..5000 lie outside"]);
        Ok(())
    })
    .unwrap();
}

// ---- random groups ----

/// A message of a random group, as all ranks know it.
#[derive(Clone, Copy)]
struct Planned {
    from: u32,
    to: u32,
    dtype: DataType,
    bytes: usize,
    seed: u64,
}

/// Random groups that all ranks draw alike.
struct Groups<'a> {
    exchange: Exchange,
    buffer: &'a SymmetricBuffer,
    most: u64,
    ranks: u32,
    rank: u32,
    messages: u64,
}

impl Groups<'_> {
    fn run(&mut self, seed: u64) -> Result<(), CollectiveError> {
        let mut random = Random(seed);
        let count = random.below(4 * u64::from(self.ranks)) + 1;
        let planned: Vec<_> = (0..count)
            .map(|i| {
                let dtype = DataType::ALL[random.below(14) as usize];
                let limit = match random.below(100) {
                    0..=9 => 1,
                    10..=69 => 64,
                    70..=96 => 4096,
                    _ => self.most,
                };
                let size = dtype.size();
                Planned {
                    from: random.below(self.ranks.into()) as u32,
                    to: random.below(self.ranks.into()) as u32,
                    dtype,
                    bytes: random.below(limit) as usize / size * size,
                    seed: seed.wrapping_mul(31).wrapping_add(i),
                }
            })
            .collect();
        self.messages += count;
        // Each rank puts its part together in an order of its own, but for those of one pair.
        let mut own: BTreeMap<(bool, u32), Vec<Planned>> = BTreeMap::new();
        let mut order = Vec::new();
        for message in planned {
            for (is_send, rank, peer) in [
                (true, message.from, message.to),
                (false, message.to, message.from),
            ] {
                if rank == self.rank {
                    own.entry((is_send, peer)).or_default().push(message);
                    order.push((is_send, peer));
                }
            }
        }
        let mut shuffle = Random(seed ^ u64::from(self.rank + 1) << 32);
        shuffle.shuffle(&mut order);
        let mut next: BTreeMap<_, usize> = BTreeMap::new();
        let order: Vec<_> = order
            .into_iter()
            .map(|chain| {
                let at = next.entry(chain).or_default();
                *at += 1;
                (chain.0, own[&chain][*at - 1])
            })
            .collect();
        // A part of them in symmetric memory, one after another.
        let mut used = 0;
        let mut place = |bytes: usize| {
            let start = used;
            let fits = used + bytes as u64 <= self.buffer.bytes();
            (fits && shuffle.below(2) == 0).then(|| {
                used += bytes as u64;
                start..used
            })
        };
        let of = |m: &Planned| content(m.seed, m.from, m.to, m.bytes);
        let mut sends = Vec::new();
        let mut receives = Vec::new();
        let mut places = Vec::new();
        for (is_send, message) in &order {
            let range = place(message.bytes);
            if *is_send {
                let data = of(message);
                if let Some(range) = &range {
                    self.buffer.write(range.start, &data)?;
                }
                sends.push(data);
            } else {
                receives.push(vec![0xa5; message.bytes]);
            }
            places.push(range);
        }
        let (mut to_send, mut to_receive) = (sends.iter(), receives.iter_mut());
        let mut group = self.exchange.group();
        for ((is_send, m), range) in order.iter().zip(&places) {
            match (is_send, range.clone()) {
                (true, Some(range)) => {
                    to_send.next().unwrap();
                    group.send_symmetric(m.to, m.dtype, self.buffer, range)
                }
                (true, None) => group.send_typed(m.to, m.dtype, to_send.next().unwrap()),
                (false, Some(range)) => {
                    to_receive.next().unwrap();
                    group.recv_symmetric(m.from, m.dtype, self.buffer, range)
                }
                (false, None) => group.recv_typed(m.from, m.dtype, to_receive.next().unwrap()),
            };
        }
        group.run()?;
        drop(group);
        let mut got = receives.into_iter();
        for ((is_send, message), range) in order.iter().zip(places) {
            if !is_send {
                let mut got = got.next().unwrap();
                if let Some(range) = range {
                    self.buffer.read(range.start, &mut got)?;
                }
                let Planned { from, to, .. } = message;
                assert!(
                    got == of(message),
                    "group {seed}: a message of {} bytes from {from} to {to} is wrong",
                    got.len()
                );
            }
        }
        Ok(())
    }
}

impl<'a> Groups<'a> {
    /// Of two exchanges, one with rings that are always full.
    fn both(
        communicator: &Communicator,
        buffer: &'a SymmetricBuffer,
        most: u64,
    ) -> Result<[Self; 2], CollectiveError> {
        let of = |options: ExchangeOptions| {
            Ok::<_, CollectiveError>(Self {
                exchange: communicator.exchange(&options)?,
                buffer,
                most,
                ranks: communicator.world_size(),
                rank: communicator.rank(),
                messages: 0,
            })
        };
        let usual = ExchangeOptions::default().symmetric(buffer);
        Ok([of(usual)?, of(tiny())?])
    }
}

/// `groups` random groups of each of two exchanges.
fn random_groups(
    communicator: &Communicator,
    groups: u64,
    most: u64,
) -> Result<u64, CollectiveError> {
    let buffer = communicator.allocate(1 << 20)?;
    let mut both = Groups::both(communicator, &buffer, most)?;
    for seed in 0..groups {
        both[0].run(seed)?;
        both[1].run(seed)?;
    }
    Ok(both[0].messages + both[1].messages)
}

#[test]
fn random_groups_of_one_to_eight_ranks() {
    for ranks in 1..=8 {
        job(ranks, 120, |communicator| {
            random_groups(communicator, 60, 300_000)
        })
        .unwrap();
    }
}

#[test]
fn tens_of_thousands_of_groups() {
    let messages = job(3, 300, |communicator| {
        random_groups(communicator, 10_000, 20_000)
    })
    .unwrap();
    println!("{} messages", messages[0]);
}

/// The communicator of a rank that [`Ranks`] started, which is told the id.
fn joined(rank: u32, ranks: u32, seconds: u64) -> Communicator {
    let id: UniqueId = std::io::stdin()
        .lines()
        .next()
        .unwrap()
        .unwrap()
        .parse()
        .unwrap();
    let group = Group::join(&id, rank, ranks, &JoinOptions::default()).unwrap();
    let timeout = Duration::from_secs(seconds);
    Communicator::new(Arc::new(group), CommunicatorOptions { timeout }).unwrap()
}

/// Starts the test `name` as processes and tells them the id of a job.
fn processes(name: &str, ranks: u32) {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let mut all = Ranks::start(name, ranks);
    all.tell(&rendezvous.unique_id().to_string());
    rendezvous.wait().unwrap();
    all.wait();
}

#[test]
fn random_groups_between_processes_leave_nothing_behind() {
    const RANKS: u32 = 4;
    let Some(rank) = common::rank() else {
        return processes(
            "random_groups_between_processes_leave_nothing_behind",
            RANKS,
        );
    };
    let communicator = joined(rank, RANKS, 120);
    let buffer = communicator.allocate(1 << 20).unwrap();
    let mut both = Groups::both(&communicator, &buffer, 100_000).unwrap();
    let mut run = |seeds: std::ops::Range<u64>| {
        for seed in seeds {
            both[0].run(seed).unwrap();
            both[1].run(seed).unwrap();
        }
        Footprint::now()
    };
    let warm = run(0..300);
    let end = run(300..1500);
    // Nobody ends a connection before.
    communicator.barrier().unwrap();
    end.assert_flat(&warm, 4096);
}

// ---- collectives with blocks of any size ----

/// Elements of each rank's block: some empty, some large.
fn counts(random: &mut Random, ranks: u32) -> Vec<u64> {
    let count = |random: &mut Random| match random.below(10) {
        0..=2 => 0,
        3..=8 => random.below(300),
        _ => random.below(50_000),
    };
    (0..ranks).map(|_| count(random)).collect()
}

/// Places for blocks, in random order and with gaps; and the elements of it all.
fn scattered(random: &mut Random, counts: &[u64]) -> (Vec<u64>, u64) {
    let mut order: Vec<_> = (0..counts.len()).collect();
    random.shuffle(&mut order);
    let (mut at, mut end) = (vec![0; counts.len()], 0);
    for rank in order {
        at[rank] = end + random.below(3);
        end = at[rank] + counts[rank];
    }
    (at, end)
}

fn bytes(elements: u64, dtype: DataType) -> usize {
    elements as usize * dtype.size()
}

/// Writes, or compares, block by block.
fn each_block<'a>(
    dtype: DataType,
    counts: &'a [u64],
    at: &'a [u64],
) -> impl Iterator<Item = (u32, std::ops::Range<usize>)> + 'a {
    (0..)
        .zip(counts.iter().zip(at))
        .map(move |(rank, (&count, &at))| (rank, bytes(at, dtype)..bytes(at + count, dtype)))
}

#[test]
fn all_to_all_v_moves_every_block_to_its_place_and_touches_nothing_else() {
    for ranks in 1..=5 {
        job(ranks, 60, |communicator| {
            let exchange = usual(communicator)?;
            let rank = communicator.rank();
            for seed in 0..20 {
                let mut random = Random(seed);
                let dtype = DataType::ALL[random.below(14) as usize];
                // From each rank to each; the same on all.
                let matrix: Vec<_> = (0..ranks).map(|_| counts(&mut random, ranks)).collect();
                let sent = &matrix[rank as usize];
                let received: Vec<_> = matrix.iter().map(|row| row[rank as usize]).collect();
                let (sent_at, length) = scattered(&mut random, sent);
                let mut input = vec![0; bytes(length, dtype)];
                for (to, range) in each_block(dtype, sent, &sent_at) {
                    let block = content(seed, rank, to, range.len());
                    input[range].copy_from_slice(&block);
                }
                let (at, length) = scattered(&mut random, &received);
                let mut output = vec![0xa5; bytes(length, dtype)];
                let mut expected = output.clone();
                for (from, range) in each_block(dtype, &received, &at) {
                    let block = content(seed, from, rank, range.len());
                    expected[range].copy_from_slice(&block);
                }
                exchange.all_to_all_v(
                    dtype,
                    (&input, Blocks::at(sent, &sent_at)),
                    (&mut output, Blocks::at(&received, &at)),
                )?;
                assert!(output == expected, "seed {seed} of {ranks} ranks");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// Counts and displacements that no list of the host ever holds: the output of one call is where the next one looks.
#[test]
fn blocks_are_where_memory_says_when_the_call_begins() {
    for ranks in [1, 2, 5] {
        job(ranks, 60, |communicator| {
            let exchange = usual(communicator)?;
            let rank = communicator.rank();
            let table = 8 * u64::from(ranks);
            let sent = communicator.allocate(table)?;
            let received = communicator.allocate(table + 8)?;
            let swap = CollectiveOptions::copies(DataType::U64, 8).symmetric(&sent, &received);
            let swap = communicator.all_to_all(swap)?;
            let device = communicator.device();
            let starts = device.allocate(2 * table + 24)?;
            let count = |round: u64, from: u32, to: u32| {
                (round * 7 + u64::from(from) * 3 + u64::from(to) * 5) % 11
            };
            let (packed, scattered) = (
                Blocks::packed(Counts::symmetric(&sent, 0)),
                // Backwards, with a gap behind each.
                Blocks::at(
                    Counts::symmetric(&received, 0),
                    Counts::in_memory(&starts, 24),
                ),
            );
            for round in 0..20 {
                for peer in 0..ranks {
                    let here = u64::from(peer) * 8;
                    sent.write(here, &count(round, rank, peer).to_ne_bytes())?;
                    let start = u64::from(ranks - 1 - peer) * 12;
                    starts.write(24 + here, &start.to_ne_bytes())?;
                }
                swap.run_symmetric(0, 0, 8)?;
                let blocks = (0..ranks)
                    .map(|peer| content(round, rank, peer, count(round, rank, peer) as usize * 2));
                let input: Vec<u8> = blocks.flatten().collect();
                let mut output = vec![0xa5; ranks as usize * 24];
                exchange.all_to_all_v(DataType::F16, (&input, packed), (&mut output, scattered))?;
                for (peer, got) in (0..ranks).rev().zip(output.chunks(24)) {
                    let bytes = count(round, peer, rank) as usize * 2;
                    assert!(got[..bytes] == content(round, peer, rank, bytes));
                    assert!(got[bytes..].iter().all(|byte| *byte == 0xa5));
                }
            }
            // Beyond their memory, and blocks beyond the buffer.
            let mut output = vec![0; 64];
            let beyond = Blocks::packed(Counts::symmetric(&received, 9));
            let error = exchange.all_gather_v(DataType::U8, &[], (&mut output, beyond));
            assert_words(
                &error.unwrap_err(),
                &["all-gather-v: counts", "at byte 9 lie outside"],
            );
            received.write(0, &65_u64.to_ne_bytes())?;
            let beyond = Blocks::packed(Counts::symmetric(&received, 0));
            let error = exchange.all_gather_v(DataType::U8, &[], (&mut output, beyond));
            assert_words(
                &error.unwrap_err(),
                &["the block of rank 0, 65 elements", "outside"],
            );
            communicator.barrier()
        })
        .unwrap();
    }
}

#[test]
fn gathers_and_scatters_of_any_counts() {
    for ranks in 1..=4 {
        job(ranks, 60, |communicator| {
            let exchange = usual(communicator)?;
            let rank = communicator.rank();
            for seed in 0..20 {
                let mut random = Random(seed);
                let dtype = DataType::ALL[random.below(14) as usize];
                let counts = counts(&mut random, ranks);
                let (at, length) = scattered(&mut random, &counts);
                let root = random.below(ranks.into()) as u32;
                let blocks = Blocks::at(&counts, &at);
                let own = bytes(counts[rank as usize], dtype);
                let input = content(seed, rank, 0, own);
                let mut all = vec![0xa5; bytes(length, dtype)];
                let mut expected = all.clone();
                for (from, range) in each_block(dtype, &counts, &at) {
                    let block = content(seed, from, 0, range.len());
                    expected[range].copy_from_slice(&block);
                }
                exchange.all_gather_v(dtype, &input, (&mut all, blocks))?;
                assert!(all == expected, "all-gather-v, seed {seed}");

                all.fill(0xa5);
                let (_, range) = each_block(dtype, &counts, &at).nth(rank as usize).unwrap();
                all[range].copy_from_slice(&input);
                exchange.all_gather_v_in_place(dtype, (&mut all, blocks))?;
                assert!(all == expected, "all-gather-v in place, seed {seed}");

                all.fill(0xa5);
                let output = (rank == root).then_some((&mut all[..], blocks));
                exchange.gather_v(root, dtype, &input, output)?;
                let is_right = match rank == root {
                    true => all == expected,
                    false => all.iter().all(|&byte| byte == 0xa5),
                };
                assert!(is_right, "gather-v, seed {seed}");

                let mut output = vec![0; own];
                let from = (rank == root).then_some((&expected[..], blocks));
                exchange.scatter_v(root, dtype, from, &mut output)?;
                assert!(output == input, "scatter-v, seed {seed}");

                // And without gaps.
                let packed: Vec<_> = (0..ranks)
                    .flat_map(|from| content(seed, from, 0, bytes(counts[from as usize], dtype)))
                    .collect();
                let mut all = vec![0; packed.len()];
                exchange.all_gather_v(dtype, &input, (&mut all, Blocks::packed(&counts)))?;
                assert!(all == packed);
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_block_of_no_elements_may_lie_inside_another() {
    let outputs = job(3, 60, |communicator| {
        let exchange = usual(communicator)?;
        let counts = [2_u64, 0, 1];
        let own = counts[communicator.rank() as usize] as usize;
        let input = vec![communicator.rank() as u8 + 1; own];
        let mut output = [0; 3];
        let blocks = Blocks::at(&counts, &[0, 1, 2]);
        exchange.all_gather_v(DataType::U8, &input, (&mut output, blocks))?;
        Ok(output)
    })
    .unwrap();
    assert_eq!(outputs, [[1, 1, 3]; 3]);
}

#[test]
fn reduce_scatter_v_is_the_exact_reduction_in_rank_order() {
    for ranks in 1..=5 {
        job(ranks, 60, |communicator| {
            let rank = communicator.rank();
            for options in [ExchangeOptions::default(), tiny()] {
                let exchange = communicator.exchange(&options)?;
                for (seed, dtype) in (0..).zip(DataType::ALL) {
                    let op = ReduceOp::ALL[seed as usize % 5];
                    let mut random = Random(seed);
                    let counts = counts(&mut random, ranks);
                    let length: u64 = counts.iter().sum();
                    let mut input = vec![0; bytes(length, dtype)];
                    fill(Pattern::Exact, dtype, op, seed, rank, ranks, &mut input);
                    let mut output = vec![0xa5; bytes(counts[rank as usize], dtype)];
                    let mut expected = output.clone();
                    let first = counts[..rank as usize].iter().sum();
                    reference_all_reduce(
                        Pattern::Exact,
                        dtype,
                        op,
                        seed,
                        ranks,
                        first,
                        &mut expected,
                    );
                    let blocks = Blocks::packed(&counts);
                    exchange.reduce_scatter_v(dtype, op, (&input, blocks), &mut output)?;
                    assert!(output == expected, "{dtype} {op} of {ranks} ranks");
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn reduce_scatter_v_has_the_bits_of_an_all_reduce_in_rank_order() {
    const RANKS: u32 = 4;
    let counts = [1000, 0, 33_333, 7];
    job(RANKS, 60, |communicator| {
        let exchange = usual(communicator)?;
        let rank = communicator.rank() as usize;
        for dtype in [DataType::F32, DataType::Bf16, DataType::F16, DataType::F64] {
            let length = bytes(counts.iter().sum(), dtype);
            let (op, seed) = (ReduceOp::Sum, 3);
            let mut input = vec![0; length];
            let pattern = Pattern::Random;
            fill(pattern, dtype, op, seed, rank as u32, RANKS, &mut input);
            let mut all = input.clone();
            // Every rank reduces everything, in rank order.
            let options =
                AllReduceOptions::new(dtype, op, length as u64).algorithm(Algorithm::OneShot);
            communicator.all_reduce(options)?.run_in_place(&mut all)?;
            let mut output = vec![0; bytes(counts[rank], dtype)];
            let blocks = Blocks::packed(&counts);
            exchange.reduce_scatter_v(dtype, op, (&input, blocks), &mut output)?;
            let first = bytes(counts[..rank].iter().sum(), dtype);
            assert!(output == all[first..first + output.len()], "{dtype}");
        }
        Ok(())
    })
    .unwrap();
}

// ---- what is refused ----

#[test]
fn bad_calls_are_refused_and_change_nothing() {
    job(2, 30, |communicator| {
        let exchange = usual(communicator)?;
        let rank = communicator.rank();
        let own = format!("rank {rank}");
        let buffer = communicator.allocate(4096)?;
        let mut data = [0; 8];
        let refused = |result: Result<(), CollectiveError>, words: &str| {
            let error = result.unwrap_err();
            let is_usage = matches!(
                error,
                CollectiveError::Usage { .. }
                    | CollectiveError::Exchange(ExchangeError::Usage { .. })
            );
            assert!(is_usage, "{error}");
            assert_words(&error, &[words, &own]);
        };
        refused(exchange.send(2, &[0]), "there is no rank 2 in a world of 2");
        let group = &mut exchange.group();
        // Nor is what was right in the same group.
        group.send(1 - rank, &[9; 100]);
        refused(
            group.recv_typed(0, DataType::F32, &mut data[..6]).run(),
            "6 bytes are no whole number of f32",
        );
        let outside = exchange
            .group()
            .send_symmetric(0, DataType::U8, &buffer, 4090..4097)
            .run();
        refused(outside, "bytes 4090..4097 lie outside");
        let call = |counts: &[u64], at: &[u64]| {
            exchange.all_gather_v(
                DataType::F32,
                &[0; 4],
                (&mut [0; 16], Blocks::at(counts, at)),
            )
        };
        refused(call(&[1], &[0]), "1 counts; there are 2 ranks");
        refused(call(&[1, 1], &[0]), "1 displacements; there are 2 ranks");
        refused(
            call(&[1, 2], &[0, 3]),
            "the block of rank 1, 2 elements of f32 at 3",
        );
        refused(call(&[1, u64::MAX], &[0, 2]), "the block of rank 1");
        refused(call(&[2, 2], &[1, 2]), "the block of rank 1 overlaps");
        refused(call(&[2, 2], &[0, 2]), "own block has 4 bytes");
        refused(
            exchange.gather_v(rank, DataType::U8, &[], None),
            "the root gave no output",
        );
        for (slots, slot_bytes, words) in [
            (3, 128, "3 slots; it must be a power of two"),
            (
                2,
                64,
                "slots of 64 bytes; it must be a multiple of 64, at least 128",
            ),
            (2, 200, "slots of 200 bytes"),
        ] {
            let options = ExchangeOptions::default().rings(slots, slot_bytes);
            refused(communicator.exchange(&options).map(drop), words);
        }
        for lanes in [0, 4097, u32::MAX] {
            let options = ExchangeOptions::default().rings(1, 128).lanes(lanes);
            let words = format!("{lanes} lanes of 1 slots of 128 bytes cannot be");
            refused(communicator.exchange(&options).map(drop), &words);
        }
        let differing = ExchangeOptions::default().rings(2 << rank, 128);
        let error = communicator.exchange(&differing).unwrap_err();
        assert_words(&error, &["ranks disagree", "2 slots", "4 slots"]);
        // As large as each other, in another order: messages would come out of the wrong one.
        let other = communicator.allocate(buffer.bytes())?;
        let (first, second) = [(&buffer, &other), (&other, &buffer)][rank as usize];
        let options = ExchangeOptions::default()
            .symmetric(first)
            .symmetric(second);
        let error = communicator.exchange(&options).unwrap_err();
        assert_words(&error, &["ranks disagree", "memories"]);
        // And all is as good as new.
        exchange
            .group()
            .send(1 - rank, &[7; 8])
            .recv(1 - rank, &mut data)
            .run()?;
        assert_eq!(data, [7; 8]);
        Ok(())
    })
    .unwrap();
}

/// What the ranks of a job say. Nobody may wait for the deadline.
fn errors(
    ranks: u32,
    rank_main: impl Fn(&Communicator, &Exchange) -> Result<(), CollectiveError> + Sync,
) -> Vec<CollectiveError> {
    let started = Instant::now();
    let errors = job(ranks, 120, |communicator| {
        let exchange = usual(communicator)?;
        let error = rank_main(communicator, &exchange).unwrap_err();
        let again = exchange.send(communicator.rank(), &[]).unwrap_err();
        assert_words(&again, &["cannot be used again"]);
        Ok(error)
    });
    assert!(started.elapsed() < Duration::from_secs(60));
    errors.unwrap()
}

/// That `error` is a mismatch of these sizes, seen by `rank`.
fn assert_mismatch(error: &CollectiveError, own: u32, from_to: [u32; 2], sizes: [u64; 2]) {
    match error {
        CollectiveError::Exchange(ExchangeError::Mismatch {
            rank,
            peer,
            sender,
            receiver,
            sent_bytes,
            wanted_bytes,
            ..
        }) => {
            let other = from_to[0] + from_to[1] - own;
            assert_eq!((*rank, *peer), (own, other));
            assert_eq!([*sender, *receiver], from_to);
            assert_eq!([*sent_bytes, *wanted_bytes], sizes);
        }
        other => panic!("{other}"),
    }
    let [from, to] = from_to.map(|rank| format!("rank {rank}"));
    let [sent, wanted] = sizes.map(|bytes| format!("{bytes} bytes"));
    assert_words(error, &[&from, &to, &sent, &wanted]);
    assert!(!error.is_lost_peer_or_timeout());
}

#[test]
fn another_size_is_named_on_both_sides_and_third_ranks_do_not_wait() {
    let huge = 40 * SLOT;
    for (sent, wanted) in [
        (8, 16),
        (16, 8),
        (0, 1),
        (huge, 8),
        (8, huge),
        (huge, huge - 1),
    ] {
        let errors = errors(3, |communicator, exchange| {
            let mut got = vec![0; wanted];
            match communicator.rank() {
                // A small message is on its way when its sender hears of it.
                0 => exchange
                    .group()
                    .send(1, &vec![1; sent])
                    .recv(1, &mut got)
                    .run(),
                1 => exchange.group().recv(0, &mut got).send(0, &[]).run(),
                _ => exchange.recv(1, &mut got),
            }
        });
        let sizes = [sent as u64, wanted as u64];
        // Rank 0 may have got the empty message before it heard of its own.
        assert_mismatch(&errors[1], 1, [0, 1], sizes);
        match &errors[0] {
            CollectiveError::Exchange(ExchangeError::Mismatch { sender: 1, .. }) => {
                assert_mismatch(&errors[0], 0, [1, 0], [0, wanted as u64]);
            }
            error => assert_mismatch(error, 0, [0, 1], sizes),
        }
        assert_words(&errors[2], &["the exchange has failed on rank 1"]);
        assert!(matches!(
            errors[2],
            CollectiveError::Exchange(ExchangeError::PeerFailed {
                rank: 2,
                peer: 1,
                ..
            })
        ));
    }
}

#[test]
fn a_sender_that_has_gone_on_hears_of_it_when_it_sends_again() {
    let errors = errors(2, |communicator, exchange| {
        if communicator.rank() == 1 {
            communicator.barrier()?;
            let error = exchange.recv(0, &mut [0; 12]);
            communicator.barrier()?;
            return error;
        }
        exchange.send(1, &[0; 24])?;
        communicator.barrier()?;
        communicator.barrier()?;
        exchange.send(1, &[0; 12])
    });
    assert_mismatch(&errors[0], 0, [0, 1], [24, 12]);
    assert_mismatch(&errors[1], 1, [0, 1], [24, 12]);
}

#[test]
fn another_type_or_call_is_named_on_both_sides() {
    let data = vec![0; 2 << 20];
    let data = &data[..];
    let all = errors(2, |communicator, exchange| match communicator.rank() {
        0 => exchange.group().send_typed(1, DataType::F32, data).run(),
        _ => exchange.recv(0, &mut data.to_vec()),
    });
    for (rank, error) in (0..).zip(&all) {
        assert_mismatch(error, rank, [0, 1], [data.len() as u64; 2]);
        assert_words(error, &["bytes of f32, which asked", "bytes of u8;"]);
    }
    let count = [1 << 20, 1 << 20];
    let (blocks, input) = (Blocks::packed(&count), &data[..2 << 20]);
    let all = errors(2, |communicator, exchange| {
        let (mut output, own) = (vec![0; 1 << 20], &data[..1 << 20]);
        let op = match communicator.rank() {
            0 => return exchange.all_gather_v(DataType::I8, own, (&mut input.to_vec(), blocks)),
            _ => ReduceOp::Max,
        };
        exchange.reduce_scatter_v(DataType::I8, op, (input, blocks), &mut output)
    });
    for error in &all {
        assert_words(
            error,
            &[
                "of i8 of an all-gather-v",
                "of i8 of a reduce-scatter-v (max)",
            ],
        );
    }
    let all = errors(2, |communicator, exchange| {
        let op = ReduceOp::ALL[communicator.rank() as usize];
        let mut output = vec![0; 1 << 20];
        exchange.reduce_scatter_v(DataType::I8, op, (input, blocks), &mut output)
    });
    for error in &all {
        assert_words(
            error,
            &["reduce-scatter-v (sum)", "reduce-scatter-v (prod)"],
        );
    }
}

// ---- what ends waits ----

#[test]
fn a_message_that_never_comes_is_named_at_the_deadline() {
    let has_failed = Done::default();
    let errors = job(2, 2, |communicator| {
        let exchange = usual(communicator)?;
        if communicator.rank() == 1 {
            has_failed.wait();
            return Ok(None);
        }
        let error = exchange
            .group()
            .send(1, &[0; 64])
            .recv(1, &mut [0; 64])
            .run();
        has_failed.set();
        Ok(Some(error.unwrap_err()))
    })
    .unwrap();
    let error = errors[0].as_ref().unwrap();
    assert_words(
        error,
        &[
            "rank 0: receive 1 of the group, 64 bytes of u8 from rank 1",
            "a message from rank 1 (expected 1, seen 0)",
            "2s",
        ],
    );
    assert!(error.is_lost_peer_or_timeout());
}

#[test]
fn a_message_that_is_never_received_is_named_at_the_deadline() {
    for is_offered in [false, true] {
        let has_failed = Done::default();
        let errors = job(2, 2, |communicator| {
            let buffer = communicator.allocate(1 << 20)?;
            let options = ExchangeOptions::default().symmetric(&buffer);
            let exchange = communicator.exchange(&options)?;
            if communicator.rank() == 1 {
                has_failed.wait();
                return Ok(None);
            }
            let (mut group, data) = (exchange.group(), vec![0; 1 << 20]);
            let error = match is_offered {
                true => group.send_symmetric(1, DataType::U8, &buffer, 0..1 << 20),
                false => group.send(1, &data),
            }
            .run();
            has_failed.set();
            Ok(Some(error.unwrap_err()))
        })
        .unwrap();
        assert_words(
            errors[0].as_ref().unwrap(),
            &[
                "rank 0: send 0 of the group, 1048576 bytes of u8 to rank 1",
                "a message to be received by rank 1 (expected 1, seen 0)",
            ],
        );
    }
}

#[test]
fn a_message_whose_sender_gave_up_is_not_received_from_a_buffer_that_is_in_use_again() {
    let has_failed = Done::default();
    let errors = job(2, 2, |communicator| {
        let buffer = communicator.allocate(1 << 20)?;
        let options = ExchangeOptions::default().symmetric(&buffer);
        let exchange = communicator.exchange(&options)?;
        let error = if communicator.rank() == 0 {
            let mut group = exchange.group();
            group.send_symmetric(1, DataType::U8, &buffer, 0..1 << 20);
            let error = group.run().unwrap_err();
            buffer.write(0, &[1; 1 << 20])?;
            has_failed.set();
            error
        } else {
            has_failed.wait();
            exchange.recv(0, &mut vec![0; 1 << 20]).unwrap_err()
        };
        communicator.barrier()?;
        Ok(error)
    })
    .unwrap();
    assert!(errors[0].is_lost_peer_or_timeout());
    let words = "rank 0 has given up the exchange, and says why";
    assert_words(&errors[1], &["rank 1: receive 0 of the group", words]);
    assert!(errors[1].is_lost_peer_or_timeout());
}

#[test]
fn peers_of_a_rank_that_gave_up_do_not_wait_for_their_own_deadline() {
    use crossweft_executor::{Destination, Kind, Purpose, Source};
    const LONG: u64 = 120;
    let kind = Kind {
        dtype: DataType::U8,
        purpose: Purpose::Message,
    };
    let started = Instant::now();
    let errors = job(4, LONG, |communicator| {
        let rank = communicator.rank();
        let limit = Duration::from_secs(if rank == 0 { 1 } else { LONG });
        let options = crossweft_executor::ExchangeOptions::new(limit);
        let deadline = Instant::now() + Duration::from_secs(LONG);
        let exchange =
            crossweft_executor::Exchange::prepare(communicator.endpoint(), options, deadline)?;
        let mut messages = exchange.messages();
        let (mut got, large) = ([0; 8], vec![0; 40 * SLOT]);
        let error = match rank {
            // Rank 3 sends nothing.
            0 => messages
                .receive(3, kind, Destination::Slice(&mut got))
                .run(),
            1 => messages
                .receive(0, kind, Destination::Slice(&mut got))
                .run(),
            // More than slots hold, to one that waits for another.
            2 => messages.send(1, kind, Source::Slice(&large)).run(),
            _ => Ok(()),
        };
        communicator.barrier()?;
        Ok(error.err().map(CollectiveError::from))
    })
    .unwrap();
    assert!(started.elapsed() < Duration::from_secs(LONG / 2));
    let error = |rank: usize| errors[rank].as_ref().unwrap();
    assert_words(error(0), &["rank 0", "a message from rank 3", "1s"]);
    assert_words(error(1), &["rank 1", "rank 0 has given up the exchange"]);
    assert_words(error(2), &["rank 2", "rank 1 has given up the exchange"]);
    assert!((0..3).all(|rank| error(rank).is_lost_peer_or_timeout()));
    assert!(matches!(
        error(2),
        CollectiveError::Exchange(ExchangeError::PeerGaveUp {
            rank: 2,
            peer: 1,
            ..
        })
    ));
}

#[test]
fn an_abort_ends_waits_on_every_rank() {
    let errors = job(4, 60, |communicator| {
        let exchange = usual(communicator)?;
        let mut got = vec![0; 64];
        let result = match communicator.rank() {
            3 => {
                std::thread::sleep(Duration::from_millis(300));
                communicator.abort("out of patience");
                return Ok(None);
            }
            0 => exchange.recv(1, &mut got),
            1 => exchange.send(2, &vec![0; 1 << 20]),
            _ => exchange.group().recv(0, &mut got).send(3, &[0; 8]).run(),
        };
        Ok(Some(result.unwrap_err()))
    });
    for (rank, error) in errors.unwrap()[..3].iter().enumerate() {
        let (error, own) = (error.as_ref().unwrap(), format!("rank {rank}"));
        assert_words(error, &[&own, "rank 3 aborted", "out of patience"]);
    }
}

#[test]
fn a_rank_that_leaves_is_named_but_what_it_sent_counts() {
    let errors = job(2, 60, |communicator| {
        let exchange = usual(communicator)?;
        if communicator.rank() == 1 {
            exchange.send(0, b"farewell")?;
            communicator.leave();
            return Ok(None);
        }
        let mut got = [0; 8];
        std::thread::sleep(Duration::from_millis(300));
        exchange.recv(1, &mut got)?;
        assert_eq!(&got, b"farewell");
        Ok(Some(exchange.recv(1, &mut got).unwrap_err()))
    })
    .unwrap();
    assert_words(
        errors[0].as_ref().unwrap(),
        &["a message from rank 1", "rank 1 has left"],
    );
}

#[test]
fn an_interrupt_of_the_host_program_ends_a_wait() {
    let errors = job(2, 60, |communicator| {
        let exchange = usual(communicator)?;
        if communicator.rank() == 0 {
            let started = Instant::now();
            communicator.interrupt_when(move || {
                (started.elapsed() > Duration::from_millis(200)).then(|| "enough".to_owned())
            });
        }
        let peer = 1 - communicator.rank();
        Ok(exchange.recv(peer, &mut [0; 8]).unwrap_err())
    })
    .unwrap();
    for error in errors {
        assert_words(&error, &["rank 0 aborted", "enough"]);
    }
}

#[test]
fn a_process_that_dies_is_named_by_all_that_wait() {
    const RANKS: u32 = 3;
    let Some(rank) = common::rank() else {
        let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
        let mut all = Ranks::start("a_process_that_dies_is_named_by_all_that_wait", RANKS);
        all.tell(&rendezvous.unique_id().to_string());
        rendezvous.wait().unwrap();
        all.lose(1);
        return all.wait();
    };
    let communicator = joined(rank, RANKS, 60);
    let exchange = usual(&communicator).unwrap();
    let data = vec![1; 1 << 20];
    let result = match rank {
        // In the middle of a message, as far as the slots go.
        1 => {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                std::process::abort();
            });
            exchange.send(0, &data)
        }
        0 => exchange.recv(2, &mut data.clone()),
        _ => exchange.recv(1, &mut data.clone()),
    };
    if rank != 1 {
        assert_words(&result.unwrap_err(), &["rank 1"]);
    }
}
