//! Every collective but all-reduce against the independent reference: algorithms, types, operations, numbers of
//! ranks, roots, odd sizes, in place and out of place, many blocks in seeded order. Ranks are threads.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use crossweft_collective::{
    Algorithm, Collective, CollectiveError, CollectiveOptions, Communicator, CommunicatorOptions,
    DataType, PreparedCollective, ReduceOp, Schedule, run_in_threads,
};
use crossweft_verify::{
    Mismatches, Pattern, check_all_reduce, check_copies, check_reduce_scatter, fill, fingerprint,
};

const SEED: u64 = 0x5eed;
/// What outputs hold before, and what may not be touched.
const JUNK: u8 = 0xa5;

fn job<T: Send>(
    ranks: u32,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(60),
    };
    run_in_threads(ranks, options, rank_main).unwrap()
}

fn collectives(ranks: u32) -> Vec<Collective> {
    let mut all = vec![
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
    ];
    let mut roots = vec![0, ranks - 1];
    roots.dedup();
    for root in roots {
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
fn messages_that_no_memory_could_hold_are_refused() {
    job(2, |communicator| {
        let several = [
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllToAll,
            Collective::Scatter { root: 1 },
        ];
        for collective in several {
            let private = [Algorithm::OneShot, Algorithm::Staged, Algorithm::Pipelined];
            for algorithm in private.map(Some).into_iter().chain([None]) {
                let mut options = CollectiveOptions::copies(DataType::U8, u64::MAX);
                options.algorithm = algorithm;
                let error = communicator.collective(collective, options).unwrap_err();
                let words = "its scratch memory would be too large";
                assert!(error.to_string().contains(words), "{error}");
            }
        }
        Ok(())
    });
}

/// Where the buffers are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Private,
    Symmetric,
}

/// What is called.
#[derive(Clone, Copy, Debug)]
struct Case {
    collective: Collective,
    algorithm: Option<Algorithm>,
    kind: (DataType, ReduceOp),
    place: Place,
    blocks: (u32, Schedule),
}

impl Case {
    fn new(collective: Collective, kind: (DataType, ReduceOp), place: Place) -> Self {
        Self {
            collective,
            algorithm: None,
            kind,
            place,
            blocks: (1, Schedule::RoundRobin),
        }
    }
}

/// What is wrong with the output of a rank, said anew for each collective; `None` where it has none.
fn verdict(
    case: &Case,
    (rank, ranks): (u32, u32),
    (pattern, seed): (Pattern, u64),
    got: &[u8],
) -> Option<Mismatches> {
    let (dtype, op) = case.kind;
    let copies =
        |blocks: &[(u32, u32)]| Some(check_copies(pattern, dtype, op, seed, ranks, blocks, got));
    let each = |block: u32| (0..ranks).map(|q| (q, block)).collect::<Vec<_>>();
    match case.collective {
        Collective::AllGather => copies(&each(0)),
        Collective::Gather { root } if root == rank => copies(&each(0)),
        Collective::AllToAll => copies(&each(rank)),
        Collective::Broadcast { root } => copies(&[(root, 0)]),
        Collective::Scatter { root } => copies(&[(root, rank)]),
        Collective::ReduceScatter => Some(check_reduce_scatter(
            pattern, dtype, op, seed, rank, ranks, got,
        )),
        Collective::Reduce { root } if root == rank => {
            Some(check_all_reduce(pattern, dtype, op, seed, ranks, got))
        }
        _ => None,
    }
}

/// Prepares one collective and calls it for each of `counts` elements a block with both patterns, in place and
/// out of place. Returns the fingerprint of all results.
fn exercise(
    communicator: &Communicator,
    case: &Case,
    counts: &[usize],
) -> Result<u64, CollectiveError> {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let (dtype, op) = case.kind;
    let size = dtype.size();
    let (i, o) = case.collective.blocks(ranks).unwrap();
    let (i, o) = (i as usize, o as usize);
    let max = counts.iter().max().unwrap() * size;
    // Element-aligned, but no more than that: one element into the buffer.
    let shift = size;
    let (input, output) = (
        communicator.allocate((i.max(o) * max + 2 * shift) as u64)?,
        communicator.allocate((o * max + 2 * shift) as u64)?,
    );
    let mut options = CollectiveOptions::new(dtype, op, max as u64);
    options = options.blocks(case.blocks.0, case.blocks.1);
    options.algorithm = case.algorithm;
    if case.place == Place::Symmetric {
        options = options.symmetric(&input, &output);
    }
    let out_of_place = communicator.collective(case.collective, options.clone())?;
    if case.place == Place::Symmetric {
        options = options.symmetric(&input, &input);
    }
    let in_place = communicator.collective(case.collective, options)?;

    let mut all = Vec::new();
    for (turn, &count) in counts.iter().enumerate() {
        for pattern in [Pattern::Exact, Pattern::Random] {
            let bytes = count * size;
            let seed = SEED + turn as u64;
            let mut data = vec![0; i * bytes];
            fill(pattern, dtype, op, seed, rank, ranks, &mut data);
            let where_at =
                format!("{case:?}, rank {rank} of {ranks}, {count} elements a block, {pattern:?}");

            // Out of place, with junk around.
            let mut padded = vec![JUNK; o * bytes + 2 * shift];
            let own = shift..shift + o * bytes;
            match case.place {
                Place::Private => out_of_place.run(&data, &mut padded[own.clone()])?,
                Place::Symmetric => {
                    // The barriers keep one rank's next write from another's late read.
                    input.write(shift as u64, &data)?;
                    output.write(0, &padded)?;
                    communicator.barrier()?;
                    out_of_place.run_symmetric(shift as u64, shift as u64, bytes as u64)?;
                    output.read(0, &mut padded)?;
                    let mut unchanged = vec![0; data.len()];
                    input.read(shift as u64, &mut unchanged)?;
                    assert!(unchanged == data, "input changed: {where_at}");
                    communicator.barrier()?;
                }
            }
            let junk = |part: &[u8]| part.iter().all(|&b| b == JUNK);
            assert!(junk(&padded[..own.start]), "wrote before: {where_at}");
            assert!(junk(&padded[own.end..]), "wrote behind: {where_at}");
            let result = padded[own].to_vec();
            match verdict(case, (rank, ranks), (pattern, seed), &result) {
                Some(found) => assert_eq!(found.wrong, 0, "{where_at}: {:?}", found.first),
                None => assert!(junk(&result), "wrote an output: {where_at}"),
            }

            // In place: the larger buffer, with the smaller one as this rank's block of it.
            let offset = |is_own: bool| if is_own { rank as usize * bytes } else { 0 };
            let (own_input, own_output) = case.collective.is_own_block();
            let (from, to) = (offset(own_input), offset(own_output));
            let mut before = vec![JUNK; i.max(o) * bytes];
            before[from..from + data.len()].copy_from_slice(&data);
            let mut both = before.clone();
            let called = match case.place {
                Place::Private => in_place.run_in_place(&mut both),
                Place::Symmetric => {
                    input.write(shift as u64, &both)?;
                    communicator.barrier()?;
                    let called = in_place.run_symmetric(shift as u64, shift as u64, bytes as u64);
                    input.read(shift as u64, &mut both)?;
                    communicator.barrier()?;
                    called
                }
            };
            let overwrites = case
                .algorithm
                .is_some_and(|a| a.overwrites(case.collective));
            if overwrites && ranks > 1 && bytes > 0 {
                let text = called.unwrap_err().to_string();
                assert!(text.contains("cannot work in place"), "{text}");
            } else {
                called?;
                let is_result = verdict(case, (rank, ranks), (pattern, seed), &result).is_some();
                if is_result {
                    before[to..to + result.len()].copy_from_slice(&result);
                }
                assert!(both == before, "in place gives other bits: {where_at}");
            }
            all.extend_from_slice(&result);
        }
    }
    Ok(fingerprint(&all))
}

/// Whether all ranks have the same output.
fn is_everywhere(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllGather | Collective::Broadcast { .. }
    )
}

fn exercise_all(ranks: u32, case: &Case, counts: &[usize]) {
    let results = job(ranks, |communicator| exercise(communicator, case, counts));
    if is_everywhere(case.collective) {
        let same = results.iter().all(|result| *result == results[0]);
        assert!(same, "ranks have different bits: {case:?}");
    }
}

/// Odd, around packet words, granules, chunks and tiles.
const COUNTS: [usize; 8] = [0, 1, 3, 17, 513, 64, 1027, 0];

fn every_collective(ranks: u32) {
    let mut pair = ranks as usize;
    for collective in collectives(ranks) {
        for &algorithm in Algorithm::of(collective) {
            for place in [Place::Private, Place::Symmetric] {
                if place == Place::Private && algorithm.needs_registered() {
                    continue;
                }
                // Of 14 types and 5 operations: neighbours differ in both.
                let kind = (DataType::ALL[pair % 14], ReduceOp::ALL[pair % 5]);
                pair += 1;
                let mut case = Case::new(collective, kind, place);
                case.algorithm = Some(algorithm);
                case.blocks = (1 + pair as u32 % 3, Schedule::Seeded(pair as u64));
                exercise_all(ranks, &case, &COUNTS);
            }
        }
    }
}

#[test]
fn one_rank() {
    every_collective(1);
}

#[test]
fn two_ranks() {
    every_collective(2);
}

#[test]
fn three_ranks() {
    every_collective(3);
}

#[test]
fn five_ranks() {
    every_collective(5);
}

#[test]
fn eight_ranks() {
    every_collective(8);
}

#[test]
fn reductions_of_every_type_and_operation() {
    for collective in [Collective::ReduceScatter, Collective::Reduce { root: 1 }] {
        for place in [Place::Private, Place::Symmetric] {
            job(3, |communicator| {
                for dtype in DataType::ALL {
                    for op in ReduceOp::ALL {
                        let mut case = Case::new(collective, (dtype, op), place);
                        for &algorithm in Algorithm::of(collective) {
                            if place == Place::Private && algorithm.needs_registered() {
                                continue;
                            }
                            case.algorithm = Some(algorithm);
                            exercise(communicator, &case, &[1, 37, 515])?;
                        }
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn the_selector_s_own_choice_from_packets_to_pieces() {
    // 5 MiB and a bit: more than one piece of a staged message, or more than goes through scratch memory at once.
    let counts = [1, 128, 129, 1_310_723, 5];
    for collective in [
        Collective::Broadcast { root: 1 },
        Collective::Reduce { root: 0 },
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
    ] {
        for place in [Place::Private, Place::Symmetric] {
            let case = Case::new(collective, (DataType::F32, ReduceOp::Sum), place);
            exercise_all(2, &case, &counts);
        }
    }
}

#[test]
fn every_reduction_gives_the_bits_of_the_all_reduce() {
    const RANKS: u32 = 5;
    const BLOCK: usize = 2 * 1001;
    let whole = BLOCK * RANKS as usize;
    let results = job(RANKS, |communicator| {
        let rank = communicator.rank();
        let (dtype, op) = (DataType::Bf16, ReduceOp::Sum);
        let mut data = vec![0; whole];
        fill(Pattern::Random, dtype, op, SEED, rank, RANKS, &mut data);
        let options = CollectiveOptions::new(dtype, op, whole as u64);
        let mut expected = vec![0; whole];
        communicator
            .all_reduce(options.clone())?
            .run(&data, &mut expected)?;
        let mut own = vec![0; BLOCK];
        communicator
            .reduce_scatter(options.clone())?
            .run(&data, &mut own)?;
        assert!(own == expected[rank as usize * BLOCK..][..BLOCK]);
        let mut gathered = vec![0; whole];
        communicator
            .all_gather(CollectiveOptions::copies(dtype, BLOCK as u64))?
            .run(&own, &mut gathered)?;
        assert!(gathered == expected);
        let reduce = communicator.reduce(3, options)?;
        if rank == 3 {
            reduce.run(&data, &mut gathered)?;
            assert!(gathered == expected);
        } else {
            // There is nothing to write here.
            reduce.run(&data, &mut [])?;
        }
        Ok(fingerprint(&expected))
    });
    assert!(results.iter().all(|result| *result == results[0]));
}

#[test]
fn buffers_of_no_use_may_be_empty_and_no_others() {
    job(3, |communicator| {
        let rank = communicator.rank();
        let options = || CollectiveOptions::copies(DataType::U8, 6 << 20);
        let refused = |result: Result<(), CollectiveError>, words: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, CollectiveError::Usage { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        };
        let (gather, scatter) = (
            communicator.gather(1, options())?,
            communicator.scatter(1, options())?,
        );
        for bytes in [3_usize, 5000] {
            let all: Vec<u8> = (0..3).flat_map(|r| vec![r + 1; bytes]).collect();
            let mine = vec![rank as u8 + 1; bytes];
            if rank == 1 {
                let mut got = vec![0; 3 * bytes];
                refused(gather.run(&mine, &mut []), "1 and 3 times the message");
                gather.run(&mine, &mut got)?;
                assert_eq!(got, all);
                let mut got = vec![0; bytes];
                refused(scatter.run(&[], &mut got), "scatter: input has 0 bytes");
                scatter.run(&all, &mut got)?;
                assert_eq!(got, mine);
            } else {
                gather.run(&mine, &mut [])?;
                refused(gather.run(&[], &mut vec![0; 3 * bytes]), "gather: input");
                let mut got = vec![0; bytes];
                scatter.run(&[], &mut got)?;
                assert_eq!(got, mine);
                refused(
                    scatter.run(&[], &mut []).and(scatter.run(&[1], &mut [])),
                    "1 bytes",
                );
            }
        }
        // In pieces, too.
        let broadcast = communicator.broadcast(2, options())?;
        let mut got = vec![0; 5 << 20];
        match rank {
            2 => broadcast.run_in_place(&mut vec![7; 5 << 20])?,
            _ => {
                broadcast.run(&[], &mut got)?;
                assert!(got.iter().all(|&b| b == 7));
            }
        }
        refused(
            broadcast.run_in_place(&mut vec![0; 7 << 20]),
            "prepared for up to",
        );
        Ok(())
    });
}

/// What block `block` of the input of `rank` holds in a turn.
fn value(turn: u32, rank: u32, block: u32) -> u32 {
    turn.wrapping_mul(97).wrapping_add(rank * 7 + block)
}

/// Calls it once on blocks of `size` elements, each of one value, and looks at the result.
fn turn(
    call: &PreparedCollective,
    (rank, ranks): (u32, u32),
    turn: u32,
    size: usize,
) -> Result<(), CollectiveError> {
    let collective = call.collective();
    let (i, o) = collective.blocks(ranks).unwrap();
    let block = |b| value(turn, rank, b).to_le_bytes().repeat(size);
    let data: Vec<u8> = (0..i).flat_map(block).collect();
    let mut got = vec![0; o as usize * size * 4];
    if (turn + rank).is_multiple_of(97) {
        std::thread::sleep(Duration::from_micros(200));
    }
    call.run(&data, &mut got)?;
    let sum = |block: u32| (0..ranks).fold(0, |s: u32, q| s.wrapping_add(value(turn, q, block)));
    let expected = |b: u32| match collective {
        Collective::AllGather | Collective::Gather { .. } => value(turn, b, 0),
        Collective::ReduceScatter => sum(rank),
        Collective::AllToAll => value(turn, b, rank),
        Collective::Broadcast { root } => value(turn, root, 0),
        Collective::AllReduce | Collective::Reduce { .. } => sum(0),
        Collective::Scatter { root } => value(turn, root, rank),
        other => panic!("{other:?}"),
    };
    let comes_here = match collective {
        Collective::Reduce { root } | Collective::Gather { root } => root == rank,
        _ => true,
    };
    let whole: Vec<u8> = (0..o)
        .flat_map(|b| expected(b).to_le_bytes().repeat(size))
        .collect();
    assert!(!comes_here || got == whole, "{collective:?} turn {turn}");
    Ok(())
}

#[test]
fn ranks_run_ahead_of_each_other() {
    // No barriers: each call's data must be its own, however far a rank gets.
    const RANKS: u32 = 4;
    job(RANKS, |communicator| {
        let rank = communicator.rank();
        for collective in collectives(RANKS) {
            for algorithm in [
                Algorithm::OneShot,
                Algorithm::Staged,
                Algorithm::Pipelined,
                Algorithm::TwoShotStaged,
            ] {
                if !Algorithm::of(collective).contains(&algorithm) {
                    continue;
                }
                let options = CollectiveOptions::new(DataType::U32, ReduceOp::Sum, 4096)
                    .algorithm(algorithm)
                    .blocks(2, Schedule::Seeded(rank.into()));
                let call = communicator.collective(collective, options)?;
                for number in 0..400_u32 {
                    // Sizes vary, so that slots lie elsewhere from call to call.
                    let size = 1 + (number * 389 % 1000) as usize;
                    turn(&call, (rank, RANKS), number, size)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn collectives_follow_one_another() {
    const RANKS: u32 = 3;
    job(RANKS, |communicator| {
        let options = || CollectiveOptions::new(DataType::U32, ReduceOp::Sum, 4096);
        let all = collectives(RANKS)
            .into_iter()
            .chain([Collective::AllReduce]);
        let calls = all
            .map(|collective| communicator.collective(collective, options()))
            .collect::<Result<Vec<_>, _>>()?;
        for number in 0..5000_u32 {
            let call = &calls[number as usize * 7919 % calls.len()];
            // The selector's choice, on both sides of its limit.
            let size = 1 + (number * 389 % 300) as usize;
            turn(call, (communicator.rank(), RANKS), number, size)?;
        }
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_said_before_anything_is_done() {
    job(2, |communicator| {
        let options = || CollectiveOptions::copies(DataType::F32, 64);
        let error = communicator.broadcast(2, options()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("broadcast: rank 2 is the root, but there are 2 ranks"),
            "{error}"
        );
        let error = communicator.all_gather(options().algorithm(Algorithm::Ring));
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("there are one-shot, direct, staged"),
            "{error}"
        );
        let error = communicator.scatter(0, options().algorithm(Algorithm::Direct));
        let error = error.unwrap_err();
        assert!(
            matches!(error, CollectiveError::NeedsSymmetric { .. }),
            "{error}"
        );
        let error = communicator.collective(Collective::Test, options());
        assert!(error.is_err());
        let all_gather = communicator.all_gather(options())?;
        for (input, output) in [(8, 8), (8, 20), (6, 12), (68, 136)] {
            let error = all_gather.run(&vec![0; input], &mut vec![0; output]);
            let error = error.unwrap_err();
            assert!(matches!(error, CollectiveError::Usage { .. }), "{error}");
            assert!(error.to_string().contains("all-gather: "), "{error}");
        }
        let error = all_gather
            .run_in_place(&mut [0; 9])
            .unwrap_err()
            .to_string();
        assert!(error.contains("9 bytes are no 2 messages"), "{error}");
        assert_eq!(all_gather.collective(), Collective::AllGather);
        assert_eq!(all_gather.explain(8).algorithm, Algorithm::OneShot);
        Ok(())
    });
}
