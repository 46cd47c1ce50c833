//! Collectives on a CUDA device, ranks sharing it: the same bits as on the CPU, graphs, faults. Every test
//! says so and does nothing where there is no device. Run with `CUDA_DEVICE_MAX_CONNECTIONS=32`.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossweft_collective::{
    Algorithm, AllReduceOptions, Collective, CollectiveError, Communicator, CommunicatorOptions,
    DataType, DeviceKind, Place, ReduceOp, Request, Scalar, Selection, TuneOptions, TuningTable,
    run_in_threads, run_in_threads_on, tune,
};
use crossweft_executor::{Buffers, Options, Prepared, Together};
use crossweft_hal::cuda::{Cache, Context, Driver};
use crossweft_hal::{Device, Memory};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};
use crossweft_verify::{Pattern, fill};

const LIMIT: Duration = Duration::from_secs(20);

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

fn options(seconds: u64) -> CommunicatorOptions {
    CommunicatorOptions {
        timeout: Duration::from_secs(seconds),
    }
}

fn on<T: Send>(
    device: &Device,
    ranks: u32,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    run_in_threads_on(|_| Ok(device.clone()), ranks, options(20), rank_main).unwrap()
}

/// Odd, around packet words, vectors and chunks, and large enough for every thread of several blocks.
const COUNTS: [usize; 9] = [1, 2, 3, 17, 63, 513, 1025, 4099, 40_001];

/// Bytes that a thread moves at once.
const PIECE: u64 = 16;

/// The results of one rank: all counts, patterns, in place and not, one behind another. Of a pre-multiplied sum the
/// scalar is given by value out of place, in the device's memory in place.
fn results(
    communicator: &Communicator,
    algorithm: Algorithm,
    (dtype, op, multiplies): (DataType, ReduceOp, bool),
    blocks: u32,
    counts: &[usize],
) -> Result<Vec<u8>, CollectiveError> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let size = dtype.size();
    let largest = (counts.iter().max().unwrap() * size) as u64;
    // With whole pieces in front of and behind a message.
    let memory = largest + 4 * PIECE;
    let (input, output) = (
        communicator.allocate(memory)?,
        communicator.allocate(memory)?,
    );
    // Prepared for large messages, one shots of some operations go in lines, others in packets.
    let max = match op {
        ReduceOp::Sum | ReduceOp::Min => largest.max(200 << 10),
        _ => largest,
    };
    let mut options = AllReduceOptions::new(dtype, op, max)
        .algorithm(algorithm)
        .blocks(blocks, crossweft_collective::Schedule::default());
    let scalar = communicator.device().allocate(8)?;
    if multiplies {
        let value = f64::from(2 + rank);
        options = options.pre_multiplied(Scalar::new(dtype, value).unwrap());
        let bits = crossweft_device::scale::element_bits(dtype, value).unwrap();
        scalar.write(0, &bits.to_le_bytes())?;
    }
    let out_of_place = communicator.all_reduce(options.clone().symmetric(&input, &output))?;
    let in_place = communicator.all_reduce(options.symmetric(&input, &input))?;
    if multiplies {
        // SAFETY: the memory is of the rank's device, and kept until the calls have ended.
        in_place.set_scalar(unsafe { Scalar::at(scalar.addr()) })?;
    }
    let mut all = Vec::new();
    for (turn, &count) in counts.iter().enumerate() {
        // Aligned to an element and no more, then as allocations are.
        let places = [size as u64, 2 * PIECE];
        for (pattern, shift) in [Pattern::Exact, Pattern::Random].into_iter().zip(places) {
            let bytes = count * size;
            let mut data = vec![0; bytes];
            let seed = 7 + turn as u64;
            fill(pattern, dtype, op, seed, rank, world_size, &mut data);
            input.write(shift, &data)?;
            let (front, end) = (shift as usize, shift as usize + bytes);
            output.write(0, &vec![0xa5; end + PIECE as usize])?;
            communicator.barrier()?;
            out_of_place.run_symmetric(shift, shift, bytes as u64)?;
            let mut padded = vec![0; end + PIECE as usize];
            output.read(0, &mut padded)?;
            let result = &padded[front..end];
            let untouched = |part: &[u8]| part.iter().all(|&b| b == 0xa5);
            assert!(untouched(&padded[..front]), "wrote before");
            assert!(untouched(&padded[end..]), "wrote behind");
            let mut here = vec![0; bytes];
            input.read(shift, &mut here)?;
            assert_eq!(here, data, "the input changed");
            communicator.barrier()?;
            in_place.run_symmetric(shift, shift, bytes as u64)?;
            input.read(shift, &mut here)?;
            assert_eq!(here, result, "in place gives other bits");
            communicator.barrier()?;
            all.extend_from_slice(result);
        }
    }
    Ok(all)
}

const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::OneShot,
    Algorithm::TwoShot,
    Algorithm::TwoShotStaged,
    Algorithm::Ring,
    Algorithm::Switch,
];

/// The device's bits against the CPU's, on every rank.
fn same_bits(device: &Device, ranks: u32, types: &[DataType], blocks: u32, counts: &[usize]) {
    for &dtype in types {
        let plain = ReduceOp::ALL.map(|op| (op, false));
        for (op, multiplies) in plain.into_iter().chain([(ReduceOp::Sum, true)]) {
            for algorithm in ALGORITHMS {
                let kind = (dtype, op, multiplies);
                let rank_main = |communicator: &Communicator| {
                    results(communicator, algorithm, kind, blocks, counts)
                };
                let cpu = run_in_threads(ranks, options(60), rank_main).unwrap();
                let gpu = on(device, ranks, rank_main);
                for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
                    let differ = cpu.iter().zip(gpu).position(|(a, b)| a != b);
                    assert_eq!(
                        differ, None,
                        "{algorithm} {kind:?}, rank {rank} of {ranks}, {blocks} blocks"
                    );
                    assert_eq!(cpu.len(), gpu.len());
                }
            }
        }
    }
}

#[test]
fn two_ranks_every_type_and_operation_have_the_cpu_s_bits() {
    let device = device!();
    same_bits(&device, 2, &DataType::ALL, 3, &COUNTS[..8]);
}

#[test]
fn four_and_eight_ranks_have_the_cpu_s_bits() {
    let device = device!();
    let types = [DataType::F32, DataType::F16, DataType::Bf16, DataType::I32];
    same_bits(&device, 4, &types, 4, &COUNTS);
    same_bits(&device, 8, &types, 2, &COUNTS[4..]);
}

/// An all-reduce of whole numbers, whose result after `n` calls in place is known.
fn doubling(
    communicator: &Communicator,
    bytes: u64,
    algorithm: Algorithm,
    blocks: u32,
) -> Result<
    (
        crossweft_collective::AllReduce,
        crossweft_collective::SymmetricBuffer,
    ),
    CollectiveError,
> {
    let buffer = communicator.allocate(bytes)?;
    let options = AllReduceOptions::new(DataType::U32, ReduceOp::Sum, bytes)
        .symmetric(&buffer, &buffer)
        .algorithm(algorithm)
        .blocks(blocks, crossweft_collective::Schedule::default());
    Ok((communicator.all_reduce(options)?, buffer))
}

/// A second communicator of the same ranks.
fn another(first: &Communicator, device: &Device) -> Result<Communicator, CollectiveError> {
    let rendezvous = match first.rank() {
        0 => Some(Rendezvous::start(&RendezvousOptions::default())?),
        _ => None,
    };
    let id = rendezvous.as_ref().map(|r| r.unique_id().to_string());
    let ids = first.all_gather_bytes(id.unwrap_or_default().as_bytes())?;
    let id = String::from_utf8_lossy(&ids[0]).parse().unwrap();
    let join = JoinOptions::default();
    let group = Group::join(&id, first.rank(), first.world_size(), &join)?;
    Communicator::on(device.clone(), Arc::new(group), options(20))
}

#[test]
fn a_thousand_replays_of_two_communicators_on_two_streams() {
    let device = device!();
    on(&device, 2, |first| {
        // Two communicators, each with an all-reduce of its own stream, graph and epochs.
        let second = &another(first, &device)?;
        let (small, small_buffer) = doubling(first, 4096, Algorithm::OneShot, 2)?;
        let (large, large_buffer) = doubling(second, 1 << 20, Algorithm::TwoShot, 8)?;
        let (small_graph, large_graph) = (
            small.record_symmetric(&[(0, 0)], 4096, 9)?,
            large.record_symmetric(&[(0, 0)], 1 << 20, 9)?,
        );
        for buffer in [&small_buffer, &large_buffer] {
            buffer.write(0, &[1_u32.to_le_bytes(); 1024].concat())?;
        }
        first.barrier()?;
        // Back to back: each replay is one call and nine more.
        let (mut of_small, mut of_large) = (small_graph.start()?, large_graph.start()?);
        for _ in 1..100 {
            of_small.again()?;
            of_large.again()?;
        }
        of_small.finish(LIMIT)?;
        of_large.finish(LIMIT)?;
        first.barrier()?;
        // 2^1000 in 32 bits; three ranks would make it a number one can tell.
        for buffer in [&small_buffer, &large_buffer] {
            let mut word = [1; 4];
            buffer.read(0, &mut word)?;
            assert_eq!(u32::from_le_bytes(word), 0);
        }
        Ok(())
    });
    // With 3 ranks: 3^1000 modulo 2^32.
    let expected = (0..1000).fold(1_u32, |x, _| x.wrapping_mul(3));
    on(&device, 3, |communicator| {
        let (all_reduce, buffer) = doubling(communicator, 4096, Algorithm::OneShot, 4)?;
        let graph = all_reduce.record_symmetric(&[(0, 0)], 4096, 9)?;
        buffer.write(0, &[1_u32.to_le_bytes(); 1024].concat())?;
        communicator.barrier()?;
        let mut replay = graph.start()?;
        for _ in 1..100 {
            replay.again()?;
        }
        let time = replay.finish(LIMIT)?;
        let mut words = vec![0; 4096];
        buffer.read(0, &mut words)?;
        for word in words.chunks_exact(4) {
            assert_eq!(u32::from_le_bytes(word.try_into().unwrap()), expected);
        }
        if communicator.rank() == 0 {
            println!("3 ranks on one device, 4 KiB: {time:?} a call");
        }
        communicator.barrier()
    });
}

#[test]
fn a_rank_that_never_launches_is_named_and_a_fresh_communicator_works() {
    let device = device!();
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let started = Instant::now();
        let errors = run_in_threads_on(
            |_| Ok(device.clone()),
            3,
            options(2),
            |communicator| {
                let (all_reduce, _buffer) = doubling(communicator, 4096, algorithm, 2)?;
                all_reduce.run_symmetric(0, 0, 4096)?;
                if communicator.rank() == 1 {
                    std::thread::sleep(Duration::from_secs(4));
                    return Ok(String::new());
                }
                let error = all_reduce.run_symmetric(0, 0, 4096).unwrap_err();
                assert!(error.is_lost_peer_or_timeout());
                let again = all_reduce
                    .run_symmetric(0, 0, 4096)
                    .unwrap_err()
                    .to_string();
                assert!(again.contains("earlier launch failed"), "{again}");
                Ok(error.to_string())
            },
        )
        .unwrap();
        for rank in [0, 2] {
            let text = &errors[rank];
            for words in [
                &format!("rank {rank}, plan `{algorithm}`"),
                "op ",
                "rank 1",
                "expected 2, seen 1",
                "deadline of 2s",
            ] {
                // Rank 2 may have waited for rank 0, which waits for rank 1.
                let other = words == "rank 1" || words.starts_with("expected");
                assert!(text.contains(words) || other, "`{text}` lacks `{words}`");
            }
        }
        println!("{}", errors[0]);
        assert!(started.elapsed() < Duration::from_secs(30));
        // The same process, the same device.
        on(&device, 3, |communicator| {
            let (all_reduce, buffer) = doubling(communicator, 64, algorithm, 1)?;
            buffer.write(0, &[5, 0, 0, 0])?;
            communicator.barrier()?;
            all_reduce.run_symmetric(0, 0, 64)?;
            let mut word = [0; 4];
            buffer.read(0, &mut word)?;
            assert_eq!(word, [15, 0, 0, 0]);
            communicator.barrier()
        });
    }
}

#[test]
fn another_size_and_an_abort_end_kernels_with_their_cause() {
    let device = device!();
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
        let errors = on(&device, 2, |communicator| {
            let (all_reduce, _buffer) = doubling(communicator, 4096, algorithm, 2)?;
            let bytes = if communicator.rank() == 0 { 1024 } else { 2048 };
            Ok(all_reduce
                .run_symmetric(0, 0, bytes)
                .unwrap_err()
                .to_string())
        });
        for (rank, text) in errors.iter().enumerate() {
            println!("{text}");
            assert!(text.contains(&format!("rank {rank}, plan")), "{text}");
            assert!(text.contains("different calls"), "{text}");
            assert!(
                text.contains("1024 bytes") && text.contains("2048 bytes"),
                "{text}"
            );
        }
    }
    let started = Instant::now();
    let errors = run_in_threads_on(
        |_| Ok(device.clone()),
        2,
        options(60),
        |communicator| {
            let (all_reduce, _buffer) = doubling(communicator, 4096, Algorithm::OneShot, 2)?;
            if communicator.rank() == 1 {
                std::thread::sleep(Duration::from_millis(300));
                communicator.abort("enough");
                return Ok(String::new());
            }
            Ok(all_reduce
                .run_symmetric(0, 0, 4096)
                .unwrap_err()
                .to_string())
        },
    )
    .unwrap();
    assert!(
        errors[0].contains("rank 1 aborted") && errors[0].contains("enough"),
        "{}",
        errors[0]
    );
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn private_memory_and_host_memory() {
    let device = device!();
    on(&device, 2, |communicator| {
        let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 1 << 20);
        let all_reduce = communicator.all_reduce(options)?;
        let refused = all_reduce
            .run_in_place(&mut [0; 8])
            .unwrap_err()
            .to_string();
        assert!(refused.contains("host memory"), "{refused}");
        let memory = communicator.device().allocate(1 << 20)?;
        for bytes in [8_u64, 4096, 100_000, 1 << 20] {
            let ones = 1.5_f32.to_le_bytes().repeat(bytes as usize / 4);
            memory.write(0, &ones)?;
            all_reduce.run_at((&memory, 0), (&memory, 0), bytes)?;
            let mut seen = vec![0; bytes as usize];
            memory.read(0, &mut seen)?;
            assert!(
                seen == 3_f32.to_le_bytes().repeat(bytes as usize / 4),
                "{bytes} bytes"
            );
        }
        communicator.barrier()
    });
}

/// Where no element lies aligned, as C's callers may have it; a kernel that faults would lose the context.
#[test]
fn pre_multiplied_sums_of_unaligned_buffers() {
    let device = device!();
    on(&device, 2, |communicator| {
        let scalar = Scalar::new(DataType::F32, 2.0).unwrap();
        let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 1 << 20);
        let all_reduce = communicator.all_reduce(options.pre_multiplied(scalar))?;
        let memory = communicator.device().allocate(2 << 20)?;
        for (from, to) in [(2, 1 << 20), (0, (1 << 20) + 1), (3, 3)] {
            for bytes in [4_u64, 60, 100_000] {
                memory.write(from, &1.5_f32.to_le_bytes().repeat(bytes as usize / 4))?;
                all_reduce.run_at((&memory, from), (&memory, to), bytes)?;
                let mut seen = vec![0; bytes as usize];
                memory.read(to, &mut seen)?;
                let expected = 6_f32.to_le_bytes().repeat(bytes as usize / 4);
                assert!(seen == expected, "{bytes} bytes from {from} to {to}");
            }
        }
        communicator.barrier()
    });
}

/// What a replay uses is freed behind it, with the plan, while the other rank has yet to begin.
#[test]
fn a_replay_that_is_dropped_is_waited_for() {
    let device = device!();
    on(&device, 2, |communicator| {
        for round in 0..3 {
            let (all_reduce, buffer) = doubling(communicator, 1 << 20, Algorithm::TwoShot, 8)?;
            let graph = all_reduce.record_symmetric(&[(0, 0)], 1 << 20, 9)?;
            buffer.write(0, &[1_u32.to_le_bytes(); 1024].concat())?;
            communicator.barrier()?;
            if communicator.rank() == 1 {
                std::thread::sleep(Duration::from_millis(300));
            }
            drop(graph.start()?);
            let mut words = vec![0; 4096];
            buffer.read(0, &mut words)?;
            let expected = [1024_u32.to_le_bytes(); 1024].concat();
            assert!(words == expected, "round {round}");
            drop((graph, all_reduce));
            communicator.barrier()?;
        }
        Ok(())
    });
}

/// Ranks of one device in one grid: what sanitizers run.
#[test]
fn together_in_one_cooperative_grid() {
    let device = device!();
    for (ranks, algorithm, blocks) in [
        (2, Algorithm::OneShot, 2),
        (4, Algorithm::TwoShot, 2),
        (3, Algorithm::TwoShotStaged, 3),
        (2, Algorithm::Ring, 1),
    ] {
        let bytes = 2056_u64;
        let made: Vec<(Arc<Prepared>, Arc<crossweft_channel::RegisteredMemory>)> =
            on(&device, ranks, |communicator| {
                let buffer = communicator.allocate(bytes)?;
                let data = (communicator.rank() + 1)
                    .to_le_bytes()
                    .repeat(bytes as usize / 4);
                buffer.write(0, &data)?;
                let mut options = Options::new(DataType::U32, ReduceOp::Sum, bytes);
                options.fused = false;
                options.buffers = Buffers::Registered {
                    input: buffer.registered(),
                    output: buffer.registered(),
                };
                let plan = algorithm.plan(ranks, blocks)?;
                let deadline = Instant::now() + LIMIT;
                let endpoint = communicator.endpoint();
                let prepared = Prepared::prepare(endpoint, &plan, options, deadline)?;
                Ok((prepared, buffer.registered()))
            });
        let plans = made.iter().map(|(plan, _)| Arc::clone(plan)).collect();
        let together = Together::new(plans).unwrap();
        let mut expected: u32 = (1..=ranks).sum();
        for _ in 0..3 {
            together.run_registered(0, 0, bytes, LIMIT).unwrap();
            for (_, memory) in &made {
                let mut seen = vec![0; bytes as usize];
                memory.local().read(0, &mut seen).unwrap();
                assert!(
                    seen == expected.to_le_bytes().repeat(bytes as usize / 4),
                    "{algorithm}"
                );
            }
            expected *= ranks;
        }
    }
}

#[test]
fn a_plan_that_cannot_be_resident_is_refused_on_every_rank() {
    let device = device!();
    let refused = AtomicU32::new(0);
    on(&device, 2, |communicator| {
        let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 64)
            .algorithm(Algorithm::OneShot)
            .blocks(4000, crossweft_collective::Schedule::default());
        let error = communicator.all_reduce(options).unwrap_err().to_string();
        assert!(error.contains("thread blocks a rank"), "{error}");
        refused.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    assert_eq!(refused.load(Ordering::Relaxed), 2);
}

/// Not asserted, printed: what a call costs the host, and how long it takes to load the kernels.
#[test]
fn what_calls_cost() {
    let device = device!();
    for turn in ["first", "second"] {
        let started = Instant::now();
        on(&device, 1, |communicator| {
            let options = AllReduceOptions::new(DataType::I64, ReduceOp::Sum, 64);
            communicator.all_reduce(options).map(drop)
        });
        println!(
            "{turn} communicator and all-reduce of one rank: {:?}",
            started.elapsed()
        );
    }
    let memory: Memory = device.allocate(64).unwrap();
    drop(memory);
}

#[test]
fn tuning_measures_in_graphs_and_what_is_chosen_by_it_is_right() {
    let device = device!();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let of = |place| TuneOptions {
        collective: Collective::AllReduce,
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        place,
        max_bytes: 64 << 10,
        budget: Duration::from_millis(200),
    };
    let options = [of(Place::Symmetric), of(Place::Private)];
    let tables = on(&device, 2, |communicator| {
        let tuned = tune(communicator, &options, &cache, |_| ())?;
        let input = communicator.allocate(64 << 10)?;
        let output = communicator.allocate(64 << 10)?;
        let prepare = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 64 << 10);
        let all_reduce = communicator.all_reduce(prepare.symmetric(&input, &output))?;
        let value = (communicator.rank() as f32 + 1.0).to_le_bytes();
        for count in [1, 2048, 2560, 16_384] {
            input.write(0, &value.repeat(count))?;
            communicator.barrier()?;
            let bytes = count as u64 * 4;
            all_reduce.run_symmetric(0, 0, bytes)?;
            let mut result = vec![0; count * 4];
            output.read(0, &mut result)?;
            assert_eq!(result, 3.0_f32.to_le_bytes().repeat(count));
            let explained = all_reduce.explain_all(bytes);
            assert!(explained.chosen().unwrap().measured_us.is_some());
            communicator.barrier()?;
        }
        Ok(tuned.table)
    });
    for measurements in tables[0].measurements() {
        let blocks = |name: &str| {
            let those = measurements
                .candidates
                .iter()
                .filter(|one| one.name == name);
            those.map(|one| one.blocks).collect::<Vec<_>>()
        };
        assert!(
            blocks("one-shot").starts_with(&[1, 4, 16]),
            "{measurements:?}"
        );
        for row in &measurements.rows {
            assert!(row.us.iter().flatten().count() >= 4, "{row:?}");
            println!("{:?}: {} B: {:?}", measurements.place, row.bytes, row.us);
        }
    }
    let request = Request {
        collective: Collective::AllReduce,
        world_size: 2,
        dtype: DataType::F32,
        op: ReduceOp::Sum,
        place: Place::Symmetric,
        in_place: None,
        device: DeviceKind::Cuda,
        max_bytes: 64 << 10,
        most_blocks: u32::MAX,
        deterministic: false,
    };
    let chosen = on(&device, 2, |communicator| {
        let fingerprint = communicator.selection().fingerprint().clone();
        let variable = |name: &str| {
            (name == "CROSSWEFT_CACHE_DIR").then(|| folder.path().as_os_str().to_owned())
        };
        let selection = Selection::decide(fingerprint, 2, variable)?;
        Ok(selection.select(&request).to_string())
    });
    println!("{}", chosen[0]);
    assert!(chosen[0].contains("measured: "), "{}", chosen[0]);

    // A start with that table measures nothing, and chooses by it; one that differs on a rank is named on all.
    let text = tables[0].to_json();
    let mut other: serde_json::Value = serde_json::from_str(&text).unwrap();
    for measurements in other["measurements"].as_array_mut().unwrap() {
        let candidates = measurements["candidates"].as_array().unwrap();
        let is_it = |one: &serde_json::Value| one["name"] == "one-shot" && one["blocks"] == 16;
        let index = candidates.iter().position(is_it).unwrap();
        for row in measurements["rows"].as_array_mut().unwrap() {
            row["us"][index] = 0.001.into();
        }
    }
    let texts = [text, other.to_string()];
    let errors = on(&device, 2, |communicator| {
        let of = |text: &String| {
            let table = TuningTable::from_json(text.as_bytes()).unwrap();
            communicator.select_by(Selection::of_table(table))
        };
        of(&texts[0])?;
        assert_eq!(
            communicator.selection().select(&request).to_string(),
            chosen[0]
        );
        Ok(of(&texts[communicator.rank() as usize])
            .unwrap_err()
            .to_string())
    });
    for error in errors {
        assert!(error.starts_with("all-reduce, "), "{error}");
        assert!(
            error.contains("rank 1 would take one-shot of 16 thread blocks for 0.."),
            "{error}"
        );
        assert!(
            error.contains("give every rank the same tuning table"),
            "{error}"
        );
    }
}
