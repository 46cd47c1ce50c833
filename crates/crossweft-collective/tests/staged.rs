//! Plans on buffers anywhere: staged where they must be, and always; the host program's word that ends a wait.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossweft_channel::StopCause;
use crossweft_collective::{
    Algorithm, CollectiveError, CommunicatorOptions, DataType, ReduceOp, run_in_threads,
    run_plan_in_threads,
};
use crossweft_executor::{ExecutorError, Options, Scalar, Stage};
use crossweft_plan::{Buffer, Builder, Collective, InPlace, Op, Plan, dsl};
use crossweft_verify::{Pattern, PreMultiplied, check_all_reduce, fill};

const JOB: CommunicatorOptions = CommunicatorOptions {
    timeout: Duration::from_secs(60),
};

fn input(seed: u64, rank: u32, ranks: u32, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    let (dtype, op) = (DataType::F32, ReduceOp::Sum);
    fill(Pattern::Exact, dtype, op, seed, rank, ranks, &mut data);
    data
}

fn is_right(seed: u64, ranks: u32, got: &[u8]) -> bool {
    let (dtype, op) = (DataType::F32, ReduceOp::Sum);
    check_all_reduce(Pattern::Exact, dtype, op, seed, ranks, got).wrong == 0
}

#[test]
fn every_algorithm_takes_buffers_anywhere() {
    const RANKS: u32 = 3;
    for algorithm in Algorithm::ALL {
        let plan = algorithm.plan(RANKS, 2).unwrap();
        for stage in [Stage::WhereNeeded, Stage::Always] {
            run_in_threads(RANKS, JOB, |communicator| {
                let options = Options::new(DataType::F32, ReduceOp::Sum, 40_000);
                let prepared = communicator.prepare(&plan, options, stage)?;
                let staged = stage == Stage::Always || algorithm.needs_registered();
                assert_eq!(prepared.is_staged(), staged, "{algorithm}");
                let rank = communicator.rank();
                for (seed, bytes) in [(1, 4), (2, 40_000), (3, 1228)] {
                    let data = input(seed, rank, RANKS, bytes);
                    let mut output = vec![0xa5; bytes];
                    prepared.run(&data, &mut output, JOB.timeout)?;
                    assert!(is_right(seed, RANKS, &output), "{algorithm}, {bytes} bytes");
                    let mut data = data;
                    prepared.run_in_place(&mut data, JOB.timeout)?;
                    assert!(
                        is_right(seed, RANKS, &data),
                        "{algorithm}, {bytes} bytes in place"
                    );
                }
                let too_large = prepared.run_in_place(&mut vec![0; 40_004], JOB.timeout);
                assert!(matches!(too_large, Err(ExecutorError::Usage { .. })));
                Ok(())
            })
            .unwrap();
        }
    }
}

/// Ranks that only meet: neither input nor output.
#[test]
fn plans_that_move_nothing_run() {
    let mut builder = Builder::new("meet", Collective::Test, 2, 1, 1).blocks_of_message(0, 0);
    let (of_0, of_1) = builder.connect(0, 1);
    for (rank, channel) in [(0, of_0), (1, of_1)] {
        builder.at(rank, 0).signal(&[channel]).wait(&[channel]);
    }
    let plan = builder.finish().unwrap();
    for stage in [Stage::WhereNeeded, Stage::Always] {
        run_in_threads(2, JOB, |communicator| {
            let options = Options::new(DataType::F32, ReduceOp::Sum, 4096);
            let prepared = communicator.prepare(&plan, options, stage)?;
            for _ in 0..3 {
                prepared.run(&[], &mut [], JOB.timeout)?;
            }
            // A rank that does not come is waited for: something did run.
            if communicator.rank() == 0 {
                let alone = prepared.run(&[], &mut [], Duration::from_millis(50));
                assert!(matches!(alone, Err(ExecutorError::Interrupted { .. })));
            }
            Ok(())
        })
        .unwrap();
    }
}

/// An all-gather that works in place only.
fn all_gather(ranks: u32) -> Plan {
    let mut options = dsl::Options::new("in place", Collective::AllGather, ranks);
    options.in_place = InPlace::Required;
    let mut program = dsl::Program::new(options).unwrap();
    for rank in 0..ranks {
        let own = program.output(rank).unwrap().chunk(rank);
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            let channel = program.memory_channel(peer, rank).unwrap();
            let theirs = program.output(peer).unwrap().chunk(rank);
            program.put(channel, theirs, own, 0).unwrap();
        }
    }
    program.compile().unwrap().plan
}

#[test]
fn a_plan_in_place_takes_two_buffers_and_one() {
    let plan = all_gather(3);
    run_in_threads(3, JOB, |communicator| {
        let options = Options::new(DataType::U8, ReduceOp::Sum, 1 << 12);
        let prepared = communicator.prepare(&plan, options, Stage::WhereNeeded)?;
        let rank = communicator.rank() as usize;
        for bytes in [100_usize, 4096, 1] {
            let expected: Vec<u8> = (0..3).flat_map(|r| vec![r + 1; bytes]).collect();
            let mut output = vec![0; 3 * bytes];
            prepared.run(&vec![rank as u8 + 1; bytes], &mut output, JOB.timeout)?;
            assert_eq!(output, expected);
            let mut both = vec![0; 3 * bytes];
            both[rank * bytes..][..bytes].fill(rank as u8 + 1);
            prepared.run_in_place(&mut both, JOB.timeout)?;
            assert_eq!(both, expected);
            let odd = prepared.run_in_place(&mut vec![0; 3 * bytes + 1], JOB.timeout);
            assert!(matches!(odd, Err(ExecutorError::Usage { .. })));
        }
        Ok(())
    })
    .unwrap();
}

/// An all-reduce that works in place only, and calls inputs outputs.
fn all_reduce_in_place(ranks: u32) -> Plan {
    let mut plan = Algorithm::TwoShot.plan(ranks, 2).unwrap();
    plan.in_place = InPlace::Required;
    for op in plan
        .ranks
        .iter_mut()
        .flat_map(|r| r.blocks.iter_mut().flatten())
    {
        if let Op::Reduce { from, .. } = op {
            for operand in from {
                operand.buffer = Buffer::Output;
            }
        }
    }
    plan
}

#[test]
fn inputs_are_multiplied_before_any_plan() {
    let scalars = [2.0, -0.5, 3.0];
    let plans = [
        all_reduce_in_place(3),
        Algorithm::TwoShot.plan(3, 2).unwrap(),
        Algorithm::Ring.plan(3, 1).unwrap(),
    ];
    let sums = PreMultiplied {
        pattern: Pattern::Exact,
        dtype: DataType::F32,
        seed: 9,
        scalars: &scalars,
    };
    run_in_threads(3, JOB, |communicator| {
        let rank = communicator.rank();
        let mut options = Options::new(DataType::F32, ReduceOp::Sum, 4000);
        options.pre_multiply = Scalar::new(DataType::F32, scalars[rank as usize]);
        for (plan, stage) in plans
            .iter()
            .flat_map(|plan| [Stage::WhereNeeded, Stage::Always].map(|stage| (plan, stage)))
        {
            let prepared = communicator.prepare(plan, options.clone(), stage)?;
            for bytes in [4000, 4, 1228] {
                let mut data = vec![0; bytes];
                sums.fill(rank, &mut data);
                let (before, mut output) = (data.clone(), vec![0xa5; bytes]);
                prepared.run(&data, &mut output, JOB.timeout)?;
                assert_eq!(data, before);
                prepared.run_in_place(&mut data, JOB.timeout)?;
                for got in [&output, &data] {
                    let found = sums.check(0, got);
                    assert_eq!(found.wrong, 0, "{} {stage:?}: {:?}", plan.name, found.first);
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn one_plan_once_in_one_process() {
    let plan = Algorithm::Ring.plan(2, 1).unwrap();
    let inputs: Vec<_> = (0..2).map(|rank| input(7, rank, 2, 4000)).collect();
    let mut outputs = vec![vec![0; 4000]; 2];
    let options = Options::new(DataType::F32, ReduceOp::Sum, 4000);
    let pairs = inputs
        .iter()
        .zip(&mut outputs)
        .map(|(input, output)| (&input[..], &mut output[..]))
        .collect();
    run_plan_in_threads(&plan, &options, pairs, JOB, || None).unwrap();
    assert!(outputs.iter().all(|output| is_right(7, 2, output)));
    let none = run_plan_in_threads(&plan, &options, Vec::new(), JOB, || None);
    assert!(matches!(none, Err(CollectiveError::Usage { .. })));
}

#[test]
fn the_host_program_ends_a_wait() {
    let plan = Algorithm::OneShot.plan(2, 1).unwrap();
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let begun = Instant::now();
    run_in_threads(2, JOB, |communicator| {
        let count = Arc::clone(&count);
        communicator.interrupt_when(move || {
            let asked = count.fetch_add(1, Ordering::Relaxed);
            (asked == 3).then(|| "the user has had enough".to_owned())
        });
        let options = Options::new(DataType::F32, ReduceOp::Sum, 64);
        let prepared = communicator.prepare(&plan, options, Stage::WhereNeeded)?;
        if communicator.rank() == 0 {
            let error = prepared
                .run_in_place(&mut [0; 64], JOB.timeout)
                .unwrap_err();
            let ExecutorError::Interrupted { cause, .. } = &error else {
                panic!("{error}");
            };
            assert!(matches!(**cause, StopCause::Failure(_)), "{error}");
            assert!(
                error.to_string().contains("the user has had enough"),
                "{error}"
            );
        } else {
            // The job is over for everybody.
            assert!(communicator.barrier().is_err());
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 4);
    assert!(begun.elapsed() < JOB.timeout / 2);
}
