//! All-reduce against the independent reference: every algorithm, type, operation and number of
//! ranks, odd sizes, in place and out of place, many blocks in seeded order. Ranks are threads.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use crossweft_collective::{
    Algorithm, AllReduceOptions, CollectiveError, Communicator, CommunicatorOptions, DataType,
    ReduceOp, Schedule, run_in_threads,
};
use crossweft_verify::{Pattern, check_all_reduce, fill, fingerprint};

const SEED: u64 = 0x5eed;

fn job<T: Send>(
    ranks: u32,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(60),
    };
    run_in_threads(ranks, options, rank_main).unwrap()
}

/// Longer than any clock counts.
#[test]
fn a_timeout_may_have_any_length() {
    let options = CommunicatorOptions {
        timeout: Duration::MAX,
    };
    let sums = run_in_threads(2, options, |communicator| {
        let options = AllReduceOptions::new(DataType::U8, ReduceOp::Sum, 1);
        let mut sum = [1 + communicator.rank() as u8];
        communicator.all_reduce(options)?.run_in_place(&mut sum)?;
        Ok(sum)
    });
    assert_eq!(sums.unwrap(), [[3], [3]]);
}

/// Where the buffers are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Private,
    Symmetric,
}

/// One prepared all-reduce, called for each of `counts` elements with both patterns, in place and
/// out of place. Returns the fingerprint of all results.
fn exercise(
    communicator: &Communicator,
    algorithm: Option<Algorithm>,
    (dtype, op): (DataType, ReduceOp),
    place: Place,
    (blocks, schedule): (u32, Schedule),
    counts: &[usize],
) -> Result<u64, CollectiveError> {
    let (rank, world_size) = (communicator.rank(), communicator.world_size());
    let size = dtype.size();
    let max = counts.iter().max().unwrap() * size;
    // Element-aligned, but no more than that: one element into the buffer.
    let shift = size;
    let (input, output) = (
        communicator.allocate((max + shift) as u64)?,
        communicator.allocate((max + 2 * shift) as u64)?,
    );
    let mut options = AllReduceOptions::new(dtype, op, max as u64).blocks(blocks, schedule);
    options.algorithm = algorithm;
    if place == Place::Symmetric {
        options = options.symmetric(&input, &output);
    }
    let out_of_place = communicator.all_reduce(options.clone())?;
    if place == Place::Symmetric {
        options = options.symmetric(&input, &input);
    }
    let in_place = communicator.all_reduce(options)?;

    let mut all = Vec::new();
    for (turn, &count) in counts.iter().enumerate() {
        for pattern in [Pattern::Exact, Pattern::Random] {
            let bytes = count * size;
            let seed = SEED + turn as u64;
            let mut data = vec![0; bytes];
            fill(pattern, dtype, op, seed, rank, world_size, &mut data);
            let mut results = [vec![0xa5; bytes], data.clone()];
            match place {
                Place::Private => {
                    let mut padded = vec![0xa5; bytes + 2 * shift];
                    out_of_place.run(&data, &mut padded[shift..shift + bytes])?;
                    assert!(padded[..shift].iter().all(|&b| b == 0xa5), "wrote before");
                    assert!(
                        padded[shift + bytes..].iter().all(|&b| b == 0xa5),
                        "wrote behind"
                    );
                    results[0].copy_from_slice(&padded[shift..shift + bytes]);
                    in_place.run_in_place(&mut results[1])?;
                }
                Place::Symmetric => {
                    // The barriers keep one rank's next write from another's late read.
                    input.write(shift as u64, &data)?;
                    output.write(0, &vec![0xa5; bytes + 2 * shift])?;
                    communicator.barrier()?;
                    out_of_place.run_symmetric(shift as u64, shift as u64, bytes as u64)?;
                    let mut padded = vec![0; bytes + 2 * shift];
                    output.read(0, &mut padded)?;
                    assert!(padded[..shift].iter().all(|&b| b == 0xa5), "wrote before");
                    assert!(
                        padded[shift + bytes..].iter().all(|&b| b == 0xa5),
                        "wrote behind"
                    );
                    results[0].copy_from_slice(&padded[shift..shift + bytes]);
                    let mut unchanged = vec![0; bytes];
                    input.read(shift as u64, &mut unchanged)?;
                    assert_eq!(fingerprint(&unchanged), fingerprint(&data), "input changed");
                    in_place.run_symmetric(shift as u64, shift as u64, bytes as u64)?;
                    input.read(shift as u64, &mut results[1])?;
                    communicator.barrier()?;
                }
            }
            for (result, how) in results.iter().zip(["out of place", "in place"]) {
                let found = check_all_reduce(pattern, dtype, op, seed, world_size, result);
                assert_eq!(
                    found.wrong, 0,
                    "{algorithm:?} {dtype} {op} {place:?} {how} {blocks} blocks, rank {rank} of \
                     {world_size}, {count} elements, {pattern:?}: {:?}",
                    found.first
                );
            }
            assert_eq!(results[0], results[1], "in place gives other bits");
            all.extend_from_slice(&results[0]);
        }
    }
    Ok(fingerprint(&all))
}

/// Odd, around packet words, granules, chunks, tiles, and large enough for full tiles.
const COUNTS: [usize; 12] = [0, 1, 2, 3, 7, 16, 17, 63, 513, 1025, 4099, 0];

fn same_everywhere(fingerprints: &[u64]) {
    assert!(
        fingerprints.iter().all(|f| *f == fingerprints[0]),
        "ranks have different bits"
    );
}

fn all_types_and_operations(ranks: u32) {
    let same = job(ranks, |communicator| {
        let mut all = Vec::new();
        for dtype in DataType::ALL {
            for op in ReduceOp::ALL {
                for (algorithm, place) in [
                    (Algorithm::OneShot, Place::Private),
                    (Algorithm::TwoShot, Place::Symmetric),
                    (Algorithm::TwoShotStaged, Place::Private),
                    (Algorithm::Ring, Place::Private),
                ] {
                    let once = (1, Schedule::RoundRobin);
                    let f = exercise(
                        communicator,
                        Some(algorithm),
                        (dtype, op),
                        place,
                        once,
                        &COUNTS[..10],
                    )?;
                    all.extend(f.to_le_bytes());
                }
            }
        }
        Ok(fingerprint(&all))
    });
    same_everywhere(&same);
}

#[test]
fn two_ranks_every_type_and_operation() {
    all_types_and_operations(2);
}

#[test]
fn three_ranks_every_type_and_operation() {
    all_types_and_operations(3);
}

#[test]
fn five_ranks_every_type_and_operation() {
    all_types_and_operations(5);
}

#[test]
fn eight_ranks_every_type_and_operation() {
    all_types_and_operations(8);
}

#[test]
fn every_algorithm_at_every_number_of_ranks() {
    for ranks in 1..=16 {
        let same = job(ranks, |communicator| {
            let mut all = Vec::new();
            for algorithm in Algorithm::ALL {
                for place in [Place::Private, Place::Symmetric] {
                    if place == Place::Private && algorithm.needs_registered() {
                        continue;
                    }
                    let kind = (DataType::Bf16, ReduceOp::Sum);
                    let blocks = (1 + ranks % 3, Schedule::Seeded(ranks.into()));
                    let f = exercise(communicator, Some(algorithm), kind, place, blocks, &COUNTS)?;
                    all.extend(f.to_le_bytes());
                }
            }
            Ok(fingerprint(&all))
        });
        same_everywhere(&same);
    }
}

#[test]
fn many_blocks_in_seeded_order() {
    for seed in 0..6 {
        let same = job(3, |communicator| {
            let mut all = Vec::new();
            for algorithm in Algorithm::ALL {
                let kind = (DataType::F32, ReduceOp::Avg);
                // Another order on every rank.
                let schedule = Schedule::Seeded(seed * 3 + u64::from(communicator.rank()));
                let blocks = (40, schedule);
                let place = Place::Symmetric;
                let f = exercise(communicator, Some(algorithm), kind, place, blocks, &COUNTS)?;
                all.extend(f.to_le_bytes());
            }
            Ok(fingerprint(&all))
        });
        same_everywhere(&same);
    }
}

#[test]
fn the_selector_s_own_choice_in_pieces() {
    // 5 MiB and a bit: more than one piece of a staged message.
    let counts = [1, 1000, 1_310_723, 5];
    let same = job(2, |communicator| {
        let mut all = Vec::new();
        for place in [Place::Private, Place::Symmetric] {
            let kind = (DataType::F32, ReduceOp::Sum);
            let once = (1, Schedule::RoundRobin);
            let f = exercise(communicator, None, kind, place, once, &counts)?;
            all.extend(f.to_le_bytes());
        }
        Ok(fingerprint(&all))
    });
    same_everywhere(&same);
}

#[test]
fn ranks_run_ahead_of_each_other() {
    // No barriers: each call's data must be its own, however far a rank gets.
    job(4, |communicator| {
        for algorithm in [
            Algorithm::OneShot,
            Algorithm::TwoShotStaged,
            Algorithm::Ring,
        ] {
            let options = AllReduceOptions::new(DataType::U32, ReduceOp::Sum, 4096);
            let all_reduce = communicator.all_reduce(options.algorithm(algorithm))?;
            for turn in 0..3000_u32 {
                // Sizes vary, so that slots lie elsewhere from call to call.
                let size = 1 + (turn * 389 % 1000) as usize;
                let mine = turn.wrapping_mul(7) + communicator.rank();
                let mut data = mine.to_le_bytes().repeat(size);
                if (turn + communicator.rank()).is_multiple_of(97) {
                    std::thread::sleep(Duration::from_micros(200));
                }
                all_reduce.run_in_place(&mut data)?;
                let expected = turn.wrapping_mul(28) + 6;
                assert_eq!(
                    data,
                    expected.to_le_bytes().repeat(size),
                    "{algorithm} turn {turn}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn two_communicators_in_one_process_do_not_mix() {
    let first = std::thread::spawn(|| {
        job(2, |c| exercise_simply(c, 1));
    });
    job(2, |c| exercise_simply(c, 1000));
    first.join().unwrap();
}

fn exercise_simply(communicator: &Communicator, value: i64) -> Result<(), CollectiveError> {
    let options = AllReduceOptions::new(DataType::I64, ReduceOp::Sum, 8);
    // Two plans of the same kind in use at once do not mix either.
    let (a, b) = (
        communicator.all_reduce(options.clone())?,
        communicator.all_reduce(options)?,
    );
    for turn in 0..500 {
        let (mut x, mut y) = ((value + turn).to_le_bytes(), (-value).to_le_bytes());
        a.run_in_place(&mut x)?;
        b.run_in_place(&mut y)?;
        assert_eq!(i64::from_le_bytes(x), 2 * (value + turn));
        assert_eq!(i64::from_le_bytes(y), -2 * value);
    }
    Ok(())
}
