//! Pre-multiplied sums against the independent reference: every collective that reduces, algorithm, type and number
//! of ranks, each rank with a scalar of its own, by value and in memory.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use crossweft_collective::{
    Algorithm, Collective, CollectiveError, CollectiveOptions, Communicator, CommunicatorOptions,
    DataType, PreparedCollective, ReduceOp, Scalar, Schedule, run_in_threads,
};
use crossweft_verify::{Pattern, PreMultiplied, fingerprint};

fn job<T: Send>(
    ranks: u32,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(60),
    };
    run_in_threads(ranks, options, rank_main).unwrap()
}

/// The scalar of every rank in call `turn`: of small whole multiples of a half, or whole numbers.
fn scalars(dtype: DataType, ranks: u32, turn: u32) -> Vec<f64> {
    let all = match dtype.is_float() {
        true => [2.0, -0.5, 1.0, 1.5, -1.0],
        false => [2.0, 1.0, 3.0, 5.0, 0.0],
    };
    (0..ranks)
        .map(|rank| all[((rank + turn) % 5) as usize])
        .collect()
}

/// The collectives that reduce.
fn reducing(ranks: u32) -> [Collective; 3] {
    let root = ranks / 2;
    [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::Reduce { root },
    ]
}

/// One call out of place and one in place; returns the fingerprint of the result.
fn call(
    communicator: &Communicator,
    call: &PreparedCollective,
    sums: &PreMultiplied<'_>,
    elements: usize,
) -> Result<u64, CollectiveError> {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let collective = call.collective();
    let (i, o) = collective.blocks(ranks).unwrap();
    let bytes = elements * sums.dtype.size();
    let mut input = vec![0; bytes * i as usize];
    sums.fill(rank, &mut input);
    let before = fingerprint(&input);
    let mut output = vec![0xa5; bytes * o as usize];
    call.run(&input, &mut output)?;
    assert_eq!(fingerprint(&input), before, "the input changed");
    let mut both = input.clone();
    call.run_in_place(&mut both)?;

    let (block, own) = match collective {
        Collective::ReduceScatter => (rank, rank as usize * bytes),
        _ => (0, 0),
    };
    let comes_here = collective.root().is_none_or(|root| root == rank);
    if comes_here {
        for result in [&output[..], &both[own..own + bytes]] {
            let found = sums.check(block, result);
            let algorithm = &call.explain(bytes as u64).algorithm;
            assert_eq!(
                found.wrong, 0,
                "{collective:?} {algorithm} {sums:?}, rank {rank} of {ranks}, {elements} elements: {:?}",
                found.first
            );
        }
        assert_eq!(output, both[own..own + bytes], "in place gives other bits");
    } else {
        assert!(
            output.iter().all(|&byte| byte == 0xa5),
            "the output of another rank changed"
        );
        assert_eq!(both, input, "the input of another rank changed");
    }
    Ok(fingerprint(&output))
}

const COUNTS: [usize; 5] = [0, 1, 7, 513, 1030];

fn every_type_and_algorithm(ranks: u32) {
    job(ranks, |communicator| {
        for collective in reducing(ranks) {
            for dtype in DataType::ALL {
                for &algorithm in Algorithm::of(collective) {
                    let max = (COUNTS[4] * dtype.size()) as u64;
                    let first = Scalar::new(dtype, 1.0).unwrap();
                    let mut options = CollectiveOptions::new(dtype, ReduceOp::Sum, max)
                        .pre_multiplied(first)
                        .algorithm(algorithm)
                        .blocks(1 + ranks % 3, Schedule::Seeded(ranks.into()));
                    if algorithm.needs_registered() {
                        symmetric(communicator, collective, options)?;
                        continue;
                    }
                    options.algorithm = Some(algorithm);
                    let prepared = communicator.collective(collective, options)?;
                    for (turn, elements) in (0..).zip(COUNTS) {
                        let scalars = scalars(dtype, ranks, turn);
                        let mine = scalars[communicator.rank() as usize];
                        prepared.set_scalar(Scalar::new(dtype, mine).unwrap())?;
                        for pattern in [Pattern::Exact, Pattern::Random] {
                            let sums = PreMultiplied {
                                pattern,
                                dtype,
                                seed: turn.into(),
                                scalars: &scalars,
                            };
                            let bits = call(communicator, &prepared, &sums, elements)?;
                            same_everywhere(communicator, collective, bits)?;
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

fn same_everywhere(
    communicator: &Communicator,
    collective: Collective,
    bits: u64,
) -> Result<(), CollectiveError> {
    let all = communicator.all_gather_bytes(&bits.to_le_bytes())?;
    let same = all.iter().all(|other| *other == all[0]);
    assert!(
        same || collective != Collective::AllReduce,
        "ranks have different bits"
    );
    Ok(())
}

/// Calls in symmetric memory, out of place and in place, the scalar at an address.
fn symmetric(
    communicator: &Communicator,
    collective: Collective,
    options: CollectiveOptions,
) -> Result<(), CollectiveError> {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let (dtype, size) = (options.dtype, options.dtype.size() as u64);
    let (i, o) = collective.blocks(ranks).unwrap();
    let shift = size;
    let room = options.max_bytes * u64::from(i.max(o)) + shift;
    let (input, output) = (communicator.allocate(room)?, communicator.allocate(room)?);
    // On the CPU, the device's memory is the host's.
    let scalar = communicator.device().allocate(8)?;
    let out_of_place =
        communicator.collective(collective, options.clone().symmetric(&input, &output))?;
    let in_place = communicator.collective(collective, options.symmetric(&input, &input))?;
    for (turn, elements) in (0..).zip(COUNTS) {
        let scalars = scalars(dtype, ranks, turn);
        let mine = crossweft_device::scale::element_bits(dtype, scalars[rank as usize]).unwrap();
        scalar.write(0, &mine.to_le_bytes())?;
        let sums = PreMultiplied {
            pattern: Pattern::Random,
            dtype,
            seed: turn.into(),
            scalars: &scalars,
        };
        let bytes = elements as u64 * size;
        let mut data = vec![0; bytes as usize * i as usize];
        sums.fill(rank, &mut data);
        for (call, memory) in [(&out_of_place, &output), (&in_place, &input)] {
            // SAFETY: the memory lives until the last call has ended.
            call.set_scalar(unsafe { Scalar::at(scalar.addr()) })?;
            input.write(shift, &data)?;
            communicator.barrier()?;
            call.run_symmetric(shift, shift, bytes)?;
            let own = match collective {
                Collective::ReduceScatter if std::ptr::eq(memory, &input) => rank,
                _ => 0,
            };
            let mut result = vec![0; bytes as usize * o as usize];
            memory.read(shift + u64::from(own) * bytes, &mut result)?;
            let block = if collective == Collective::ReduceScatter {
                rank
            } else {
                0
            };
            if collective.root().is_none_or(|root| root == rank) {
                let found = sums.check(block, &result);
                assert_eq!(found.wrong, 0, "{collective:?} {sums:?}: {:?}", found.first);
            }
            communicator.barrier()?;
        }
    }
    Ok(())
}

#[test]
fn one_rank() {
    every_type_and_algorithm(1);
}

#[test]
fn two_ranks() {
    every_type_and_algorithm(2);
}

#[test]
fn five_ranks() {
    every_type_and_algorithm(5);
}

#[test]
fn eight_ranks() {
    every_type_and_algorithm(8);
}

#[test]
fn messages_in_pieces() {
    // More than one piece of a staged message, by the selector's choice.
    job(2, |communicator| {
        let (dtype, elements) = (DataType::F32, 1_310_723);
        let scalars = [0.5, -3.0];
        let options = CollectiveOptions::new(dtype, ReduceOp::Sum, elements as u64 * 4)
            .pre_multiplied(Scalar::new(dtype, scalars[communicator.rank() as usize]).unwrap());
        let prepared = communicator.all_reduce(options)?;
        let sums = PreMultiplied {
            pattern: Pattern::Random,
            dtype,
            seed: 3,
            scalars: &scalars,
        };
        call(communicator, &prepared, &sums, elements).map(drop)
    });
}

#[test]
fn what_does_not_fit_is_said() {
    let one = Scalar::new(DataType::F32, 1.0).unwrap();
    job(2, |communicator| {
        let options = |op| CollectiveOptions::new(DataType::F32, op, 64);
        let error = communicator.all_gather(options(ReduceOp::Sum).pre_multiplied(one));
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("there is no sum to multiply inputs for"),
            "{error}"
        );
        let error = communicator.all_reduce(options(ReduceOp::Max).pre_multiplied(one));
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("inputs are multiplied before a sum only, not before max"),
            "{error}"
        );
        let plain = communicator.all_reduce(options(ReduceOp::Sum))?;
        let error = plain.set_scalar(one).unwrap_err().to_string();
        assert!(error.contains("not prepared to multiply"), "{error}");
        Ok(())
    });
    // One multiplies, the other does not.
    let mut errors = job(2, |communicator| {
        let mut options = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 64);
        if communicator.rank() == 1 {
            options = options.pre_multiplied(one);
        }
        Ok(communicator.all_reduce(options).unwrap_err().to_string())
    });
    let error = errors.remove(0);
    assert!(error.contains("up to 64 B, pre-multiplied"), "{error}");
}
