//! Exchanges on a CUDA device, ranks sharing it: what arrives, in streams and graphs, and what callers hear when something
//! is wrong. Every test says so and does nothing where there is no device. Run with `CUDA_DEVICE_MAX_CONNECTIONS=32`.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_collective::{
    Blocks, CollectiveError, CollectiveOptions, Communicator, CommunicatorOptions, Counts,
    DataType, Exchange, ExchangeError, ExchangeOptions, ReduceOp, Region, SymmetricBuffer,
    run_in_threads, run_in_threads_on,
};
use crossweft_hal::cuda::{Context, Driver, Event, Stream};
use crossweft_hal::{Device, Memory};
use crossweft_verify::{Pattern, fill};

const LIMIT: Duration = Duration::from_secs(20);

/// Payload of a slot of the usual rings, and bytes from which a message takes a second lane.
const SLOT: usize = (64 << 10) + 96;
const LANE: usize = 32 << 10;
/// The most that goes in lines.
const LINES: usize = 32 * 240;

/// The first device, or a line that says why not.
fn device() -> Option<Device> {
    let found = Driver::open().and_then(|driver| driver.device(0));
    match found.and_then(|device| Context::retain(&device)) {
        Ok(context) => Some(Device::Cuda(context)),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

macro_rules! device {
    () => {
        match device() {
            Some(device) => device,
            None => return,
        }
    };
}

fn on<T: Send>(
    device: &Device,
    (ranks, seconds): (u32, u64),
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    let timeout = Duration::from_secs(seconds);
    let options = CommunicatorOptions { timeout };
    run_in_threads_on(|_| Ok(device.clone()), ranks, options, rank_main).unwrap()
}

fn stream(communicator: &Communicator) -> Stream {
    let Device::Cuda(context) = communicator.device() else {
        panic!("not on a GPU");
    };
    Stream::new(context).unwrap()
}

/// A stream, memory for messages, and an exchange: the others first, for making them waits for kernels that run, and those
/// of other ranks begin when all have prepared the exchange.
fn prepared(
    communicator: &Communicator,
    options: &ExchangeOptions,
) -> Result<(Stream, Arena, Exchange), CollectiveError> {
    let (stream, arena) = (stream(communicator), Arena::new(communicator)?);
    Ok((stream, arena, communicator.exchange(options)?))
}

fn usual(communicator: &Communicator) -> Result<(Stream, Arena, Exchange), CollectiveError> {
    prepared(communicator, &ExchangeOptions::default())
}

/// Rings that are full at once: two slots of 96 bytes of payload, and a lane.
fn tiny() -> ExchangeOptions {
    ExchangeOptions::default().rings(2, 128).lanes(1)
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
}

/// The bytes of a message that no other has.
fn content(seed: u64, from: u32, to: u32, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed ^ u64::from(from) << 40 ^ u64::from(to) << 20);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_ne_bytes());
    words.take(bytes).collect()
}

fn assert_words(error: &impl ToString, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{text}` does not contain `{word}`");
    }
}

/// Memory of the device for a test's messages, allocated at once: freeing some of it would wait for kernels, which may wait
/// for this rank.
struct Arena {
    memory: Arc<Memory>,
    used: Cell<u64>,
}

impl Arena {
    fn new(communicator: &Communicator) -> Result<Self, CollectiveError> {
        Ok(Self {
            memory: Arc::new(communicator.device().allocate(ARENA)?),
            used: Cell::new(0),
        })
    }

    /// Gives everything back.
    fn clear(&self) {
        self.used.set(0);
    }

    /// A place for one message, `shift` bytes behind one that is aligned, with bytes around it that must stay as they are.
    fn place(&self, bytes: usize, shift: u64) -> Result<Place, CollectiveError> {
        let start = self.used.get();
        let room = bytes as u64 + 256;
        self.used.set((start + room).next_multiple_of(256));
        self.memory.write(start, &vec![0xa5; room as usize])?;
        Ok(Place {
            memory: Arc::clone(&self.memory),
            start,
            shift: 64 + shift,
            bytes: bytes as u64,
        })
    }

    fn holding(&self, data: &[u8], shift: u64) -> Result<Place, CollectiveError> {
        let place = self.place(data.len(), shift)?;
        place.memory.write(place.start + place.shift, data)?;
        Ok(place)
    }
}

const ARENA: u64 = 192 << 20;

struct Place {
    memory: Arc<Memory>,
    start: u64,
    shift: u64,
    bytes: u64,
}

impl Place {
    fn region(&self) -> Region {
        // SAFETY: it lies in the memory; tests wait for launches before they touch or free it.
        unsafe { Region::new(self.memory.addr() + self.start + self.shift, self.bytes) }
    }

    fn read(&self) -> Result<Vec<u8>, CollectiveError> {
        let mut all = vec![0; self.bytes as usize + 256];
        self.memory.read(self.start, &mut all)?;
        let (front, end) = (self.shift as usize, (self.shift + self.bytes) as usize);
        let untouched = |part: &[u8]| part.iter().all(|&b| b == 0xa5);
        assert!(untouched(&all[..front]), "wrote before");
        assert!(untouched(&all[end..]), "wrote behind");
        Ok(all[front..end].to_vec())
    }
}

/// Sizes around everything at which something changes, and larger than all slots of a lane.
fn sizes() -> impl Iterator<Item = usize> {
    let around = [
        0,
        1,
        15,
        16,
        17,
        4099,
        LINES,
        LINES + 1,
        SLOT - 1,
        SLOT,
        SLOT + 1,
        LANE - 1,
        LANE,
    ];
    around.into_iter().chain([3 * LANE + 5, (9 << 20) + 17])
}

// ---- what arrives ----

#[test]
fn a_ring_of_any_size_of_message_waited_for_and_on_a_stream() {
    let device = device!();
    for ranks in [1, 2, 3, 4, 8] {
        on(&device, (ranks, 20), |communicator| {
            let (stream, arena, exchange) = usual(communicator)?;
            let rank = communicator.rank();
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            for (turn, bytes) in sizes().enumerate() {
                let sent = content(1, rank, next, bytes);
                // Aligned like each other, or not at all.
                for (from, to) in [(0, 0), (1, 8), (3, 3)] {
                    arena.clear();
                    let from = arena.holding(&sent, from)?;
                    let to = arena.place(bytes, to)?;
                    let mut group = exchange.group();
                    group
                        .recv_region(before, DataType::U8, to.region())
                        .send_region(next, DataType::U8, from.region());
                    if turn % 2 == 0 {
                        group.run()?;
                    } else {
                        group.run_on(&stream)?;
                        stream.synchronize(Instant::now() + LIMIT).unwrap();
                        exchange.check()?;
                    }
                    assert!(
                        to.read()? == content(1, before, rank, bytes),
                        "{bytes} bytes, {ranks} ranks"
                    );
                }
            }
            communicator.barrier()
        });
    }
}

#[test]
fn all_to_all_and_to_oneself_with_rings_that_are_always_full() {
    let device = device!();
    for ranks in [2, 3, 4, 8] {
        on(&device, (ranks, 20), |communicator| {
            let rank = communicator.rank();
            for (options, most) in [(ExchangeOptions::default(), 600_000), (tiny(), 3000)] {
                let (_stream, arena, exchange) = prepared(communicator, &options)?;
                for seed in 0..4 {
                    arena.clear();
                    let bytes = |from: u32, to: u32| {
                        let mut random = Random(seed << 32 ^ u64::from(from) << 8 ^ u64::from(to));
                        random.below(most) as usize
                    };
                    let places = |is_send: bool| {
                        let all = (0..ranks).map(|peer| {
                            let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
                            let data = content(seed, from, to, bytes(from, to));
                            match is_send {
                                true => arena.holding(&data, peer.into()),
                                false => arena.place(data.len(), peer.into()),
                            }
                        });
                        all.collect::<Result<Vec<_>, _>>()
                    };
                    let (sent, got) = (places(true)?, places(false)?);
                    let mut group = exchange.group();
                    for ((peer, sent), got) in (0..).zip(&sent).zip(&got) {
                        group
                            .send_region(peer, DataType::U8, sent.region())
                            .recv_region(peer, DataType::U8, got.region());
                    }
                    group.run()?;
                    for (peer, got) in (0..).zip(&got) {
                        let expected = content(seed, peer, rank, bytes(peer, rank));
                        assert!(got.read()? == expected, "from {peer} to {rank}");
                    }
                }
            }
            communicator.barrier()
        });
    }
}

/// One kernel at a time, as sanitizers run them.
#[test]
fn a_rank_sends_to_and_reduces_by_itself() {
    let device = device!();
    on(&device, (1, 60), |communicator| {
        for options in [ExchangeOptions::default(), tiny()] {
            let options = options.reducing(DataType::Bf16);
            let (stream, arena, exchange) = prepared(communicator, &options)?;
            // What goes through tiny slots takes long.
            let large = if options.lanes == Some(1) {
                1666
            } else {
                3 * LANE + 6
            };
            for bytes in [0, 2, 34, 998, large] {
                arena.clear();
                let sent = [content(1, 0, 0, bytes), content(2, 0, 0, bytes)];
                let from = [arena.holding(&sent[0], 0)?, arena.holding(&sent[1], 2)?];
                let to = [arena.place(bytes, 4)?, arena.place(bytes, 2)?];
                let (reduced, copied) = (arena.place(bytes, 0)?, arena.place(bytes, 6)?);
                let mut group = exchange.group();
                for (from, to) in from.iter().zip(&to) {
                    group
                        .send_region(0, DataType::U8, from.region())
                        .recv_region(0, DataType::U8, to.region());
                }
                group.run_on(&stream)?;
                let counts = [bytes as u64 / 2];
                let (calls, blocks) = (exchange.calls(Some(&stream)), Blocks::packed(&counts));
                let (input, output) = ((from[0].region(), blocks), reduced.region());
                calls.reduce_scatter_v(DataType::Bf16, ReduceOp::Max, input, output)?;
                calls.all_gather_v(DataType::Bf16, from[1].region(), (copied.region(), blocks))?;
                stream.synchronize(Instant::now() + LIMIT).unwrap();
                exchange.check()?;
                assert!(to[0].read()? == sent[0] && to[1].read()? == sent[1]);
                assert!(copied.read()? == sent[1]);
                // Of one: what it is, but for NaNs, which all become the same.
                let halves = |data: &[u8]| -> Vec<u16> {
                    let pairs = data.chunks_exact(2);
                    let halves = pairs.map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
                    let one = |half: u16| if half & 0x7fff > 0x7f80 { 0x7fff } else { half };
                    halves.map(one).collect()
                };
                assert!(
                    halves(&reduced.read()?) == halves(&sent[0]),
                    "{bytes} bytes"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn many_messages_to_one_peer_arrive_in_order() {
    let device = device!();
    on(&device, (2, 20), |communicator| {
        let (stream, arena, exchange) = usual(communicator)?;
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        // More than a table has room for at first, and more launches than may be under way.
        let (messages, launches) = (700, 40);
        let words: Vec<u8> = (0..messages)
            .flat_map(|i| (i + 1000 * rank).to_ne_bytes())
            .collect();
        let from = arena.holding(&words, 0)?;
        let to: Vec<_> = (0..launches)
            .map(|_| arena.place(words.len(), 0))
            .collect::<Result<_, _>>()?;
        for to in &to {
            let mut group = exchange.group();
            for i in 0..messages {
                let range = u64::from(i) * 4..u64::from(i) * 4 + 4;
                let part = |place: &Place| place.region().part(range.clone()).unwrap();
                group
                    .send_region(peer, DataType::U32, part(&from))
                    .recv_region(peer, DataType::U32, part(to));
            }
            group.run_on(&stream)?;
        }
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        exchange.check()?;
        let expected: Vec<u8> = (0..messages)
            .flat_map(|i| (i + 1000 * peer).to_ne_bytes())
            .collect();
        for to in &to {
            assert!(to.read()? == expected);
        }
        communicator.barrier()
    });
}

#[test]
fn sends_go_ahead_of_receives_and_streams_of_one_exchange_follow_one_another() {
    let device = device!();
    on(&device, (2, 20), |communicator| {
        let another = stream(communicator);
        let (stream, arena, exchange) = usual(communicator)?;
        let streams = [stream, another];
        let data: Vec<_> = (0..8).map(|i| content(i, 0, 1, 1000)).collect();
        if communicator.rank() == 0 {
            let from: Vec<_> = data
                .iter()
                .map(|data| arena.holding(data, 0))
                .collect::<Result<_, _>>()?;
            for (turn, from) in from.iter().enumerate() {
                let mut group = exchange.group();
                group.send_region(1, DataType::U8, from.region());
                group.run_on(&streams[turn % 2])?;
            }
            for stream in &streams {
                stream.synchronize(Instant::now() + LIMIT).unwrap();
            }
            exchange.check()?;
            communicator.barrier()?;
        } else {
            communicator.barrier()?;
            for data in &data {
                let to = arena.place(1000, 0)?;
                let mut group = exchange.group();
                group.recv_region(0, DataType::U8, to.region()).run()?;
                assert!(to.read()? == *data);
            }
        }
        communicator.barrier()
    });
}

/// A region of a symmetric buffer.
fn part(buffer: &SymmetricBuffer, offset: u64, bytes: u64) -> Region {
    // SAFETY: the buffer is kept, and tests wait for launches before they touch it.
    unsafe { Region::new(buffer.registered().local().addr() + offset, bytes) }
}

#[test]
fn large_messages_in_symmetric_memory_are_copied_by_their_receivers() {
    let device = device!();
    for ranks in [2, 4] {
        on(&device, (ranks, 20), |communicator| {
            let rank = communicator.rank();
            let bytes = (5 << 20) + 48;
            let buffer = communicator.allocate(bytes + 64)?;
            let options = ExchangeOptions::default().symmetric(&buffer);
            let (_stream, arena, exchange) = prepared(communicator, &options)?;
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let sent = content(3, rank, next, bytes as usize);
            buffer.write(16, &sent)?;
            let to = arena.place(bytes as usize, 0)?;
            for is_named in [false, true] {
                let mut group = exchange.group();
                match is_named {
                    true => group.send_symmetric(next, DataType::U8, &buffer, 16..16 + bytes),
                    false => group.send_region(next, DataType::U8, part(&buffer, 16, bytes)),
                };
                group.recv_region(before, DataType::U8, to.region()).run()?;
                assert!(to.read()? == content(3, before, rank, bytes as usize));
            }
            communicator.barrier()
        });
    }
}

#[test]
fn a_recorded_group_is_replayed_a_hundred_times() {
    let device = device!();
    for ranks in [2, 3] {
        on(&device, (ranks, 20), |communicator| {
            let (stream, arena, exchange) = usual(communicator)?;
            let rank = communicator.rank();
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            // A small one and one on several lanes, which go round once more with each replay.
            let sizes = [40, 3 * LANE + 24];
            let places = |seed: u64| {
                let place = |&bytes: &usize| {
                    let data = content(seed, rank, 0, bytes);
                    arena.holding(&data, 0)
                };
                sizes.iter().map(place).collect::<Result<Vec<_>, _>>()
            };
            let (here, there) = (places(7)?, places(8)?);
            let group = |from: &[Place], to: &[Place]| {
                let mut group = exchange.group();
                for (from, to) in from.iter().zip(to) {
                    group
                        .send_region(next, DataType::U8, from.region())
                        .recv_region(before, DataType::U8, to.region());
                }
                group.run_on(&stream)
            };
            let capture = stream.begin_capture().unwrap();
            group(&here, &there)?;
            group(&there, &here)?;
            let graph = capture.end().unwrap().instantiate().unwrap();
            let rounds: u32 = 100;
            for round in 0..rounds {
                // SAFETY: places, and the exchange, are kept until all have ended.
                unsafe { graph.launch(&stream) }.unwrap();
                // Between replays, another launch that is not recorded.
                if round % 10 == 0 {
                    group(&here, &there)?;
                }
            }
            stream.synchronize(Instant::now() + LIMIT).unwrap();
            exchange.check()?;
            // Each replay takes them on by two ranks.
            let whose = (rank + ranks - (2 * rounds) % ranks) % ranks;
            for (place, &bytes) in here.iter().zip(&sizes) {
                assert!(
                    place.read()? == content(7, whose, 0, bytes),
                    "{bytes} bytes"
                );
            }
            communicator.barrier()
        });
    }
}

// ---- collectives with blocks of any size ----

/// Elements of each rank's block: some empty, some large.
fn counts(random: &mut Random, ranks: u32) -> Vec<u64> {
    let count = |random: &mut Random| match random.below(10) {
        0..=3 => 0,
        4..=7 => random.below(300),
        _ => random.below(200_000),
    };
    (0..ranks).map(|_| count(random)).collect()
}

/// The same calls by ranks on a device and on the CPU; all that they leave.
fn collectives(
    communicator: &Communicator,
    (dtype, op): (DataType, ReduceOp),
    seeds: std::ops::Range<u64>,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let own_stream = match communicator.device() {
        Device::Cuda(_) => Some(stream(communicator)),
        _ => None,
    };
    let arena = Arena::new(communicator)?;
    let exchange = communicator.exchange(&ExchangeOptions::default().reducing(dtype))?;
    let size = dtype.size() as u64;
    let bytes = |elements: u64| (elements * size) as usize;
    let data = |seed: u64, elements: u64| {
        let mut data = vec![0; bytes(elements)];
        fill(Pattern::Random, dtype, op, seed, rank, ranks, &mut data);
        arena.holding(&data, size)
    };
    let mut all = Vec::new();
    for seed in seeds {
        arena.clear();
        let mut random = Random(seed);
        let own = rank as usize;
        let counts_of = counts(&mut random, ranks);
        // What each rank sends every other.
        let matrix: Vec<_> = (0..ranks).map(|_| counts(&mut random, ranks)).collect();
        let (sent, received) = (
            matrix[own].clone(),
            matrix.iter().map(|row| row[own]).collect::<Vec<_>>(),
        );
        let (sum, total) = (
            |counts: &[u64]| counts.iter().sum::<u64>(),
            counts_of.iter().sum::<u64>(),
        );
        let root = (seed % u64::from(ranks)) as u32;
        let (blocks, mine) = (Blocks::packed(&counts_of), counts_of[own]);
        let inputs = [
            data(seed, sum(&sent))?,
            data(seed + 1, mine)?,
            data(seed + 2, total)?,
            data(seed + 3, total)?,
        ];
        let outputs = [
            arena.place(bytes(sum(&received)), 2 * size)?,
            arena.place(bytes(total), size)?,
            arena.place(bytes(total), 0)?,
            arena.place(bytes(mine), 16)?,
            arena.place(bytes(mine), size)?,
        ];
        let [to_send, block, to_scatter, to_reduce] = inputs.each_ref().map(Place::region);
        let [received_all, gathered, at_root, scattered, reduced] =
            outputs.each_ref().map(Place::region);
        // Every other time without waiting in between.
        let stream = own_stream.as_ref().filter(|_| seed % 2 == 0);
        let calls = exchange.calls(stream);
        calls.all_to_all_v(
            dtype,
            (to_send, Blocks::packed(&sent)),
            (received_all, Blocks::packed(&received)),
        )?;
        calls.all_gather_v(dtype, block, (gathered, blocks))?;
        calls.all_gather_v_in_place(dtype, (to_scatter, blocks))?;
        calls.gather_v(root, dtype, block, Some((at_root, blocks)))?;
        calls.scatter_v(root, dtype, Some((to_scatter, blocks)), scattered)?;
        calls.reduce_scatter_v(dtype, op, (to_reduce, blocks), reduced)?;
        if let Some(stream) = stream {
            stream.synchronize(Instant::now() + LIMIT).unwrap();
        }
        exchange.check()?;
        for place in inputs.iter().chain(&outputs) {
            all.push(place.read()?);
        }
    }
    communicator.barrier()?;
    Ok(all)
}

#[test]
fn collectives_of_any_counts_leave_the_cpu_s_bytes() {
    let device = device!();
    let kinds = [
        (DataType::F32, ReduceOp::Sum),
        (DataType::Bf16, ReduceOp::Avg),
        (DataType::I8, ReduceOp::Max),
        (DataType::F64, ReduceOp::Prod),
        (DataType::F8E4M3, ReduceOp::Sum),
        (DataType::U64, ReduceOp::Min),
    ];
    for ranks in [2, 3, 4, 8] {
        for kind in kinds {
            // All types at two ranks.
            if ranks > 2 && !matches!(kind.0, DataType::F32 | DataType::Bf16) {
                continue;
            }
            let options = CommunicatorOptions {
                timeout: Duration::from_secs(60),
            };
            let rank_main = |communicator: &Communicator| collectives(communicator, kind, 0..6);
            let cpu = run_in_threads(ranks, options, rank_main).unwrap();
            let gpu = on(&device, (ranks, 20), rank_main);
            for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
                let differ = cpu.iter().zip(gpu).position(|(a, b)| a != b);
                assert_eq!(differ, None, "{kind:?}, rank {rank} of {ranks}");
            }
        }
    }
}

/// Counts that no list of the host ever holds: the output of one call is where the next one looks.
#[test]
fn blocks_are_where_memory_of_the_device_says() {
    let device = device!();
    for ranks in [2, 3] {
        on(&device, (ranks, 20), |communicator| {
            let (_stream, arena, exchange) = usual(communicator)?;
            let rank = communicator.rank();
            let table = 8 * u64::from(ranks);
            let sent = communicator.allocate(table)?;
            let received = communicator.allocate(table)?;
            let swap = CollectiveOptions::copies(DataType::U64, 8).symmetric(&sent, &received);
            let swap = communicator.all_to_all(swap)?;
            let count = |round: u64, from: u32, to: u32| {
                (round * 7 + u64::from(from) * 3 + u64::from(to) * 5) % 11
            };
            for round in 0..8 {
                arena.clear();
                for peer in 0..ranks {
                    let here = u64::from(peer) * 8;
                    sent.write(here, &count(round, rank, peer).to_ne_bytes())?;
                }
                communicator.barrier()?;
                swap.run_symmetric(0, 0, 8)?;
                let bytes = |from, to| count(round, from, to) as usize * 2;
                let message = |from, to| content(round, from, to, bytes(from, to));
                let input: Vec<u8> = (0..ranks).flat_map(|peer| message(rank, peer)).collect();
                let expected: Vec<u8> = (0..ranks).flat_map(|peer| message(peer, rank)).collect();
                let (from, to) = (arena.holding(&input, 0)?, arena.place(expected.len(), 0)?);
                exchange.calls(None).all_to_all_v(
                    DataType::F16,
                    (from.region(), Blocks::packed(Counts::symmetric(&sent, 0))),
                    (to.region(), Blocks::packed(Counts::symmetric(&received, 0))),
                )?;
                assert_eq!(
                    to.read()?,
                    expected,
                    "round {round}, rank {rank} of {ranks}"
                );
            }
            communicator.barrier()
        });
    }
}

// ---- what is refused, and what ends waits ----

#[test]
fn what_a_gpu_cannot_reach_is_refused_and_changes_nothing() {
    let device = device!();
    on(&device, (2, 20), |communicator| {
        let (stream, arena, exchange) = usual(communicator)?;
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let error = exchange.send(peer, &[0; 8]).unwrap_err();
        assert_words(&error, &["the host's memory", "ranks are on cuda"]);
        let other = communicator.allocate(64)?;
        let mut group = exchange.group();
        group.send_symmetric(peer, DataType::U8, &other, 0..64);
        let error = group.run_on(&stream).unwrap_err();
        assert_words(&error, &["only borrowed"]);
        let from = arena.holding(&[rank as u8; 64], 0)?;
        let to = arena.place(64, 0)?;
        let counts = [16_u64, 0];
        let error = exchange.calls(None).reduce_scatter_v(
            DataType::F32,
            ReduceOp::Sum,
            (from.region(), Blocks::packed(&counts)),
            match rank {
                0 => to.region(),
                _ => to.region().part(0..0).unwrap(),
            },
        );
        assert_words(&error.unwrap_err(), &["no kernel was loaded", "f32"]);
        let mut group = exchange.group();
        group
            .send_region(peer, DataType::U8, from.region())
            .recv_region(peer, DataType::U8, to.region())
            .run()?;
        assert_eq!(to.read()?, [peer as u8; 64]);
        let error = communicator
            .exchange(&ExchangeOptions::default().lanes(4000))
            .unwrap_err();
        assert_words(&error, &["fewer lanes"]);
        communicator.barrier()
    });
}

/// That `error` is a mismatch of these sizes, seen by `own`.
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
            assert_eq!((*rank, *peer), (own, from_to[0] + from_to[1] - own));
            assert_eq!([*sender, *receiver], from_to);
            assert_eq!([*sent_bytes, *wanted_bytes], sizes);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn another_size_is_named_on_both_sides_and_third_ranks_do_not_wait() {
    let device = device!();
    let huge = 40 * SLOT;
    for (sent, wanted) in [
        (8, 16),
        (16, 8),
        (0, 1),
        (huge, 8),
        (8, huge),
        (huge, huge - 1),
    ] {
        let started = Instant::now();
        let errors = on(&device, (3, 100), |communicator| {
            let (stream, arena, exchange) = usual(communicator)?;
            let from = arena.place(sent, 0)?;
            let to = arena.place(wanted, 0)?;
            let nothing = from.region().part(0..0).unwrap();
            let mut group = exchange.group();
            match communicator.rank() {
                0 => group
                    .send_region(1, DataType::U8, from.region())
                    .recv_region(1, DataType::U8, nothing),
                1 => group.recv_region(0, DataType::U8, to.region()).send_region(
                    2,
                    DataType::U8,
                    nothing,
                ),
                _ => group.recv_region(1, DataType::U8, to.region()),
            };
            group.run_on(&stream)?;
            // What follows in the stream does not wait either.
            let mut group = exchange.group();
            group.recv_region(1, DataType::U8, nothing);
            let follows = group.run_on(&stream);
            stream.synchronize(Instant::now() + LIMIT).unwrap();
            let error = exchange.check().unwrap_err();
            if let Err(early) = follows {
                assert_eq!(early.to_string(), error.to_string());
            }
            let mut group = exchange.group();
            group.send_region(1, DataType::U8, nothing);
            assert_words(&group.run().unwrap_err(), &["cannot be used again"]);
            communicator.barrier()?;
            Ok(error)
        });
        assert!(started.elapsed() < Duration::from_secs(60));
        let sizes = [sent as u64, wanted as u64];
        assert_mismatch(&errors[0], 0, [0, 1], sizes);
        assert_mismatch(&errors[1], 1, [0, 1], sizes);
        match &errors[2] {
            CollectiveError::Exchange(ExchangeError::PeerFailed { rank, peer, .. }) => {
                assert_eq!((*rank, *peer), (2, 1));
            }
            // The empty message to it may have been on its way.
            CollectiveError::Exchange(ExchangeError::Mismatch { sender, .. }) => {
                assert_eq!(*sender, 1);
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_deadline_and_peers_hear_of_it() {
    let device = device!();
    // Rank 0 waits for rank 2, which never comes; rank 1 for rank 0.
    let errors = on(&device, (3, 4), |communicator| {
        let options = ExchangeOptions::default().rings(8, 64 << 10).lanes(8);
        let (stream, arena, exchange) = prepared(communicator, &options)?;
        let rank = communicator.rank();
        if rank == 2 {
            std::thread::sleep(Duration::from_secs(9));
            return Ok(String::new());
        }
        let to = arena.place(64, 0)?;
        // More than all slots hold.
        let large = arena.place(80 * SLOT, 0)?;
        let mut group = exchange.group();
        match rank {
            0 => group.send_region(0, DataType::U8, to.region()).recv_region(
                2,
                DataType::F32,
                to.region(),
            ),
            _ => group.send_region(0, DataType::U8, large.region()),
        };
        if rank == 1 {
            // Later, so that its own deadline is not what ends it.
            std::thread::sleep(Duration::from_secs(1));
        }
        group.run_on(&stream)?;
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        let error = exchange.check().unwrap_err();
        assert!(error.is_lost_peer_or_timeout());
        Ok(error.to_string())
    });
    println!("{}\n{}", errors[0], errors[1]);
    assert_words(
        &errors[0],
        &[
            "rank 0: receive 1 of the group, 64 bytes of f32 from rank 2",
            "a message from rank 2 (expected 1, seen 0)",
            "deadline of 4s",
        ],
    );
    assert_words(&errors[1], &["rank 1", "rank 0 has given up the exchange"]);
    // The same process, the same device.
    on(&device, (2, 20), |communicator| {
        let (_stream, arena, exchange) = usual(communicator)?;
        let peer = 1 - communicator.rank();
        let from = arena.holding(&[communicator.rank() as u8; 8], 0)?;
        let to = arena.place(8, 0)?;
        let mut group = exchange.group();
        group
            .send_region(peer, DataType::U8, from.region())
            .recv_region(peer, DataType::U8, to.region())
            .run()?;
        assert_eq!(to.read()?, [peer as u8; 8]);
        communicator.barrier()
    });
}

#[test]
fn an_abort_ends_a_group_that_is_waited_for() {
    let device = device!();
    let errors = on(&device, (2, 60), |communicator| {
        let (_stream, arena, exchange) = usual(communicator)?;
        if communicator.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
            communicator.abort("enough");
            return Ok(String::new());
        }
        let to = arena.place(64, 0)?;
        let mut group = exchange.group();
        group.recv_region(1, DataType::U8, to.region());
        Ok(group.run().unwrap_err().to_string())
    });
    assert_words(&errors[0], &["rank 1 aborted", "enough"]);
    // On a stream nobody waits for, it is said to the kernels.
    let errors = on(&device, (2, 60), |communicator| {
        let (stream, arena, exchange) = usual(communicator)?;
        communicator.barrier()?;
        if communicator.rank() == 1 {
            communicator.barrier()?;
            return Ok(String::new());
        }
        let to = arena.place(64, 0)?;
        let mut group = exchange.group();
        group
            .recv_region(1, DataType::U8, to.region())
            .run_on(&stream)?;
        exchange.end_waits();
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        let error = exchange.check().unwrap_err();
        communicator.barrier()?;
        Ok(error.to_string())
    });
    assert_words(
        &errors[0],
        &["rank 0: receive 0 of the group", "a message from rank 1"],
    );
}

// ---- puts and signals ----

#[test]
fn what_was_put_before_a_signal_is_there_after_it() {
    let device = device!();
    on(&device, (3, 20), |communicator| {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let memory = communicator.allocate(8192)?;
        let (stream, arena) = (stream(communicator), Arena::new(communicator)?);
        let one_sided = communicator.one_sided()?;
        for round in 0..100 {
            arena.clear();
            let from = arena.holding(&content(round, rank, 0, 5000), round % 16)?;
            let target = memory.registered();
            // By turns in the order of the stream, and waited for.
            if round % 2 == 0 {
                one_sided.put_on(&stream, &target, next, 100, from.region())?;
                one_sided.signal_on(&stream, next)?;
                one_sided.wait_on(&stream, last, 1)?;
                stream.synchronize(Instant::now() + LIMIT).unwrap();
                one_sided.check()?;
            } else {
                one_sided.put(&target, next, 100, &content(round, rank, 0, 5000))?;
                one_sided.signal(next)?;
                one_sided.wait(last, 1)?;
            }
            let mut found = vec![0; 5000];
            memory.read(100, &mut found)?;
            assert!(found == content(round, last, 0, 5000), "round {round}");
            // Now the next round's may come.
            one_sided.signal(last)?;
            one_sided.wait(next, 1)?;
        }
        // Recorded: each replay puts, signals itself and the next rank, and waits for both.
        let from = arena.holding(&[rank as u8; 64], 0)?;
        let capture = stream.begin_capture().unwrap();
        one_sided.put_on(&stream, &memory.registered(), next, 0, from.region())?;
        one_sided.signal_on(&stream, next)?;
        one_sided.signal_on(&stream, rank)?;
        one_sided.wait_on(&stream, last, 1)?;
        one_sided.wait_on(&stream, rank, 1)?;
        let graph = capture.end().unwrap().instantiate().unwrap();
        for _ in 0..100 {
            // SAFETY: all that it uses is kept until all have ended.
            unsafe { graph.launch(&stream) }.unwrap();
        }
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        one_sided.check()?;
        let mut found = [0; 64];
        memory.read(0, &mut found)?;
        assert_eq!(found, [last as u8; 64]);
        let error = one_sided.put_on(&stream, &memory.registered(), 0, 1 << 40, from.region());
        assert_words(&error.unwrap_err(), &["lie outside"]);
        assert!(one_sided.signal_on(&stream, 3).is_err());
        communicator.barrier()
    });
}

#[test]
fn a_wait_for_a_rank_that_does_not_signal_ends_and_names_it() {
    let device = device!();
    let errors = on(&device, (2, 4), |communicator| {
        let stream = stream(communicator);
        let one_sided = communicator.one_sided()?;
        if communicator.rank() == 1 {
            std::thread::sleep(Duration::from_secs(8));
            return Ok(String::new());
        }
        one_sided.wait_on(&stream, 1, 1)?;
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        let error = one_sided.check().unwrap_err().to_string();
        let again = one_sided.wait(1, 1).unwrap_err();
        assert_words(&again, &["cannot be used again"]);
        Ok(error)
    });
    assert_words(
        &errors[0],
        &[
            "waiting for signals of rank 1",
            "a signal from rank 1",
            "deadline of 4s",
        ],
    );
}

/// The host has launched as many groups as it can ahead of the first, which nobody answers, and one more.
#[test]
fn what_failed_is_named_and_not_what_is_launched_next() {
    let device = device!();
    let errors = on(&device, (2, 3), |communicator| {
        let (stream, arena, exchange) = prepared(communicator, &tiny())?;
        if communicator.rank() == 1 {
            std::thread::sleep(Duration::from_secs(7));
            return Ok(String::new());
        }
        let (to, small) = (arena.place(64, 0)?, arena.place(8, 0)?);
        let mut group = exchange.group();
        group
            .recv_region(1, DataType::F32, to.region())
            .run_on(&stream)?;
        loop {
            let mut group = exchange.group();
            let sent = group
                .send_region(0, DataType::U8, small.region())
                .recv_region(0, DataType::U8, small.region())
                .run_on(&stream);
            if let Err(error) = sent {
                stream.synchronize(Instant::now() + LIMIT).unwrap();
                return Ok(error.to_string());
            }
        }
    });
    assert_words(
        &errors[0],
        &["receive 0 of the group, 64 bytes of f32 from rank 1"],
    );
}

/// As a garbage collector may, in the middle of somebody's capture.
#[test]
fn exchanges_and_signals_may_be_dropped_while_a_stream_is_captured() {
    let device = device!();
    on(&device, (2, 20), |communicator| {
        let captured = stream(communicator);
        let (stream, arena, exchange) = usual(communicator)?;
        let one_sided = communicator.one_sided()?;
        let peer = 1 - communicator.rank();
        let from = arena.holding(&[communicator.rank() as u8; 4096], 0)?;
        let to = arena.place(4096, 0)?;
        if communicator.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let mut group = exchange.group();
        group
            .send_region(peer, DataType::U8, from.region())
            .recv_region(peer, DataType::U8, to.region())
            .run_on(&stream)?;
        one_sided.signal_on(&stream, peer)?;
        one_sided.wait_on(&stream, peer, 1)?;
        let capture = captured.begin_capture().unwrap();
        drop((exchange, one_sided));
        // The capture is whole, and what was launched has ended.
        capture.end().unwrap();
        assert_eq!(to.read()?, [peer as u8; 4096]);
        communicator.barrier()
    });
}

/// What rank `rank` holds at bytes `range` of its memory.
fn held(rank: u32, range: std::ops::Range<u64>) -> Vec<u8> {
    range
        .map(|i| (i * 31 + (i >> 8) + 7 * u64::from(rank)) as u8)
        .collect()
}

/// What arrives is asserted, and what a message costs is printed, by the device's clock, between two devices if there are two.
#[test]
fn what_messages_cost() {
    let devices = match Driver::open().and_then(|driver| driver.devices()) {
        Ok(devices) if !devices.is_empty() => devices,
        Ok(_) => return println!("skipped: no device"),
        Err(error) => return println!("skipped: {error}"),
    };
    const MOST: u64 = 256 << 20;
    let of = |rank: u32| {
        let device = &devices[rank as usize % devices.len()];
        Ok(Device::Cuda(Context::retain(device).unwrap()))
    };
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(60),
    };
    println!("two ranks on {} device(s)", devices.len().min(2));
    let costs = |communicator: &Communicator| {
        let Device::Cuda(context) = communicator.device() else {
            panic!("not on a GPU");
        };
        let buffer = communicator.allocate(2 * MOST)?;
        let memory = communicator.device().allocate(2 * MOST)?;
        let timer = [(); 2].map(|()| Event::with_timing(context).unwrap());
        let stream = stream(communicator);
        let options = ExchangeOptions::default().symmetric(&buffer);
        let exchange = communicator.exchange(&options)?;
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        // SAFETY: all of it, which is kept until launches have ended.
        let private = unsafe { Region::new(memory.addr(), 2 * MOST) };
        let symmetric = part(&buffer, 0, 2 * MOST);
        let registered = buffer.registered();
        let shared = registered.local();
        for memory in [&memory, shared] {
            memory.write(0, &held(rank, 0..MOST))?;
        }
        for (what, whole, memory, most) in [
            ("private", private, &memory, MOST),
            ("symmetric", symmetric, shared, MOST),
            // Each rank copies its own block, too.
            ("all-to-all-v, private", private, &memory, MOST / 2),
        ] {
            let sizes = (3..=28).step_by(2).map(|log| 1 << log);
            for bytes in sizes.chain([MOST]).filter(|&bytes| bytes <= most) {
                let calls = if bytes > 1 << 22 { 10 } else { 100 };
                let all = MOST / most * bytes;
                let (from, to) = (whole.part(0..all), whole.part(MOST..MOST + all));
                let counts = [bytes; 2];
                let blocks = Blocks::packed(&counts);
                let calls_on = |calls: u32| {
                    for _ in 0..calls {
                        let (from, to) = (from.unwrap(), to.unwrap());
                        if most < MOST {
                            let calls = exchange.calls(Some(&stream));
                            calls.all_to_all_v(DataType::U8, (from, blocks), (to, blocks))?;
                            continue;
                        }
                        let mut group = exchange.group();
                        group.send_region(peer, DataType::U8, from);
                        group.recv_region(peer, DataType::U8, to).run_on(&stream)?;
                    }
                    Ok::<_, CollectiveError>(())
                };
                let wait = || {
                    stream.synchronize(Instant::now() + LIMIT).unwrap();
                    exchange.check()
                };
                if bytes == 2048 || bytes == 8192 || bytes == 2 << 20 || bytes == most {
                    memory.write(MOST, &vec![0; all as usize])?;
                    calls_on(2)?;
                    wait()?;
                    let mut got = vec![0; all as usize];
                    memory.read(MOST, &mut got)?;
                    let own = u64::from(rank) * bytes;
                    let expected = match most < MOST {
                        true => [0, 1].map(|from| held(from, own..own + bytes)).concat(),
                        false => held(peer, 0..bytes),
                    };
                    assert!(got == expected, "{what}, {bytes} bytes");
                }
                calls_on(2)?;
                wait()?;
                communicator.barrier()?;
                let started = Instant::now();
                calls_on(10)?;
                let issued = started.elapsed() / 10;
                wait()?;
                let capture = stream.begin_capture().unwrap();
                calls_on(calls)?;
                let graph = capture.end().unwrap().instantiate().unwrap();
                let mut times = Vec::new();
                for _ in 0..7 {
                    communicator.barrier()?;
                    // Lines the ranks up.
                    calls_on(2)?;
                    timer[0].record(&stream).unwrap();
                    // SAFETY: what it uses is kept until it has ended.
                    unsafe { graph.launch(&stream) }.unwrap();
                    timer[1].record(&stream).unwrap();
                    wait()?;
                    times.push(timer[1].since(&timer[0]).unwrap() / calls);
                }
                times.sort_unstable();
                if rank == 0 {
                    let each = times[times.len() / 2];
                    let speed = bytes as f64 / each.as_secs_f64() / 1e9;
                    println!(
                        "{what}, {bytes} bytes each way: {each:.2?} in a graph, {speed:.1} GB/s; issued in {issued:.1?}"
                    );
                }
            }
        }
        communicator.barrier()
    };
    run_in_threads_on(of, 2, options, costs).unwrap();
}
