//! Ranks that make different calls: each is told what the other does, long before its deadline.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::Done;
use crossweft_collective::{
    Algorithm, AllReduceOptions, Collective, CollectiveError, CollectiveOptions, Communicator,
    CommunicatorOptions, DataType, Memory, ReduceOp, Scalar, run_in_threads,
};
use crossweft_executor::{Options, Prepared};

const RANKS: u32 = 3;

/// What each rank says of calls that differ between ranks. Nobody may wait for the deadline.
fn errors(
    rank_main: impl Fn(&Communicator) -> Result<String, CollectiveError> + Sync,
) -> Vec<String> {
    let started = Instant::now();
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(120),
    };
    let errors = run_in_threads(RANKS, options, staying(rank_main)).unwrap();
    assert!(started.elapsed() < Duration::from_secs(60));
    errors
}

/// Nobody leaves before all have found out: a rank that is late would hear of that instead.
fn staying(
    rank_main: impl Fn(&Communicator) -> Result<String, CollectiveError> + Sync,
) -> impl Fn(&Communicator) -> Result<String, CollectiveError> + Sync {
    move |communicator| {
        let said = rank_main(communicator)?;
        communicator.barrier()?;
        Ok(said)
    }
}

fn assert_words(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "`{text}` does not contain `{word}`");
    }
}

#[test]
fn another_size_is_named_on_both_sides_whatever_the_algorithm() {
    for algorithm in Algorithm::ALL {
        for (odd, usual) in [(8, 16), (4096, 4100), (1 << 20, 64)] {
            let errors = errors(|communicator| {
                let buffer = communicator.allocate(1 << 20)?;
                let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 1 << 20)
                    .symmetric(&buffer, &buffer)
                    .algorithm(algorithm);
                let all_reduce = communicator.all_reduce(options)?;
                // The first call is the same everywhere.
                all_reduce.run_symmetric(0, 0, 256)?;
                let bytes = if communicator.rank() == 1 { odd } else { usual };
                Ok(all_reduce
                    .run_symmetric(0, 0, bytes)
                    .unwrap_err()
                    .to_string())
            });
            let (odd, usual) = (format!("{odd} bytes"), format!("{usual} bytes"));
            let own = |rank| format!("rank {rank}, plan `{algorithm}`");
            // Ranks 0 and 2 agree with each other, so only rank 1 can be blamed.
            assert_words(&errors[1], &[&own(1), "different calls", &odd, &usual]);
            assert_words(&errors[0], &[&own(0), "rank 1 has", &odd, &usual]);
            assert_words(&errors[2], &[&own(2), "rank 1 has", &odd, &usual]);
        }
    }
}

#[test]
fn another_collective_is_named_on_both_sides() {
    let errors = errors(|communicator| {
        let options =
            |dtype, op| AllReduceOptions::new(dtype, op, 64).algorithm(Algorithm::TwoShotStaged);
        let sum = communicator.all_reduce(options(DataType::F32, ReduceOp::Sum))?;
        let max = communicator.all_reduce(options(DataType::Bf16, ReduceOp::Max))?;
        sum.run_in_place(&mut [0; 64])?;
        max.run_in_place(&mut [0; 64])?;
        let call = if communicator.rank() == 1 { max } else { sum };
        Ok(call.run_in_place(&mut [0; 64]).unwrap_err().to_string())
    });
    assert_words(
        &errors[0],
        &[
            "rank 1 is in call 2 of plan 1 (two-shot-staged, bf16 max) with 64 bytes",
            "this rank is in call 2 of plan 0 (two-shot-staged, f32 sum) with 64 bytes",
        ],
    );
    assert_words(
        &errors[1],
        &["is in call 2 of plan 0", "this rank is in call 2 of plan 1"],
    );
    assert_words(&errors[2], &["is in call 2 of plan"]);
}

/// The collectives but all-reduce.
const OTHERS: [Collective; 7] = [
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
    Collective::Broadcast { root: 0 },
    Collective::Reduce { root: 0 },
    Collective::Gather { root: 0 },
    Collective::Scatter { root: 0 },
];

/// What the ranks of a job of two say.
fn errors_of_two(
    rank_main: impl Fn(&Communicator) -> Result<String, CollectiveError> + Sync,
) -> Vec<String> {
    let started = Instant::now();
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(120),
    };
    let errors = run_in_threads(2, options, staying(rank_main)).unwrap();
    assert!(started.elapsed() < Duration::from_secs(60));
    errors
}

#[test]
fn another_collective_or_root_is_named_when_it_is_prepared() {
    let options = || CollectiveOptions::copies(DataType::F32, 1 << 10);
    for collective in OTHERS {
        let errors = errors_of_two(|communicator| {
            let mine = match communicator.rank() {
                0 => collective,
                _ => Collective::AllReduce,
            };
            Ok(communicator
                .collective(mine, options())
                .unwrap_err()
                .to_string())
        });
        for error in errors {
            let words = ["ranks disagree", "all-reduce of 2 ranks", collective.name()];
            assert_words(&error, &words);
        }
    }
    let errors = errors_of_two(|communicator| {
        let prepared = communicator.broadcast(communicator.rank(), options());
        Ok(prepared.unwrap_err().to_string())
    });
    for error in errors {
        assert_words(&error, &["ranks disagree", "root 0", "root 1"]);
    }
}

/// Whatever ranks ask for differently when a collective is prepared, each hears of, with both sides' words, and the job goes
/// on.
#[test]
fn any_difference_between_requests_is_named_on_all_ranks() {
    type Change = fn(&mut CollectiveOptions);
    let usual = "up to 512 B";
    let cases: [(Change, &str, &str); 9] = [
        (|o| o.dtype = DataType::Bf16, "bf16 sum", "f32 sum"),
        (|o| o.op = ReduceOp::Max, "f32 max", "f32 sum"),
        // The first plan of both is the same; one has more of them.
        (|o| o.max_bytes = 1 << 20, "up to 1048576 B", usual),
        (
            |o| o.memory = Memory::Private,
            "private buffers",
            "one symmetric buffer",
        ),
        (|o| o.in_place = Some(true), ", in place", usual),
        (
            |o| o.algorithm = Some(Algorithm::Ring),
            ", algorithm ring",
            usual,
        ),
        // It cannot be prepared at all, which only one rank could have known.
        (
            |o| (o.memory, o.algorithm) = (Memory::Private, Some(Algorithm::TwoShot)),
            "private buffers, up to 512 B, algorithm two-shot",
            "one symmetric buffer",
        ),
        (|o| o.blocks = Some(2), ", 2 thread blocks", usual),
        (
            |o| o.pre_multiply = Scalar::new(DataType::F32, 2.0),
            ", pre-multiplied",
            usual,
        ),
    ];
    for odd in [0, 2] {
        errors(|communicator| {
            let rank = communicator.rank();
            let buffer = communicator.allocate(1 << 20)?;
            let usual = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 512)
                .symmetric(&buffer, &buffer);
            for (change, theirs, ours) in cases {
                let mut options = usual.clone();
                if rank == odd {
                    change(&mut options);
                }
                let error = communicator.all_reduce(options).unwrap_err().to_string();
                let odd = format!("rank {odd} says all-reduce of 3 ranks");
                assert_words(&error, &["ranks disagree", theirs, ours, &odd]);
            }
            // Scalars where nothing is summed, on one rank alone.
            let mut options = usual.clone();
            if rank == odd {
                options.pre_multiply = Scalar::new(DataType::F32, 2.0);
            }
            let error = communicator.all_gather(options).unwrap_err().to_string();
            assert_words(&error, &["ranks disagree", ", pre-multiplied"]);
            let all_reduce = communicator.all_reduce(usual)?;
            buffer.write(0, &1.0_f32.to_ne_bytes())?;
            communicator.barrier()?;
            all_reduce.run_symmetric(0, 0, 4)?;
            let mut sum = [0; 4];
            buffer.read(0, &mut sum)?;
            assert_eq!(f32::from_ne_bytes(sum), RANKS as f32);
            Ok(String::new())
        });
    }
}

#[test]
fn another_size_of_any_collective_is_named_on_both_sides() {
    std::thread::scope(|scope| {
        for collective in OTHERS {
            for algorithm in Algorithm::of(collective) {
                scope.spawn(move || another_size(collective, *algorithm));
            }
        }
    });
}

fn another_size(collective: Collective, algorithm: Algorithm) {
    for (odd, usual) in [(8, 16), (4096, 64)] {
        let errors = errors_of_two(|communicator| {
            let buffer = communicator.allocate(1 << 14)?;
            let other = communicator.allocate(1 << 14)?;
            let options = CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 1 << 12)
                .symmetric(&buffer, &other)
                .algorithm(algorithm);
            let call = communicator.collective(collective, options)?;
            // The first call is the same everywhere.
            call.run_symmetric(0, 0, 256)?;
            let bytes = if communicator.rank() == 1 { odd } else { usual };
            let error = call.run_symmetric(0, 0, bytes).unwrap_err();
            Ok(error.to_string())
        });
        let (odd, usual) = (format!("{odd} bytes"), format!("{usual} bytes"));
        for (rank, error) in (0..).zip(&errors) {
            let own = format!("rank {rank}, plan `{} {algorithm}`", collective.name());
            assert_words(error, &[&own, &odd, &usual]);
        }
    }
}

#[test]
fn a_call_of_another_collective_is_named_on_both_sides() {
    std::thread::scope(|scope| {
        for collective in OTHERS {
            scope.spawn(move || another_call(collective));
        }
    });
}

fn another_call(collective: Collective) {
    let errors = errors_of_two(|communicator| {
        let buffer = communicator.allocate(1 << 12)?;
        let options = || {
            CollectiveOptions::new(DataType::F32, ReduceOp::Sum, 256).symmetric(&buffer, &buffer)
        };
        let call = communicator.collective(collective, options())?;
        let all_reduce = communicator.all_reduce(options())?;
        call.run_symmetric(0, 0, 64)?;
        all_reduce.run_symmetric(0, 0, 64)?;
        let mine = if communicator.rank() == 1 {
            all_reduce
        } else {
            call
        };
        Ok(mine.run_symmetric(0, 0, 64).unwrap_err().to_string())
    });
    let other = format!("({} one-shot, f32 sum) with 64 bytes", collective.name());
    let words = [&*other, "(one-shot, f32 sum) with 64 bytes"];
    assert_words(&errors[0], &words);
    assert_words(&errors[1], &words);
}

/// Ranks that are in one call beside the plans', the same on all, and in different plans for it.
#[test]
fn another_plan_for_the_same_call_is_found() {
    let errors = errors_of_two(|communicator| {
        let around = communicator
            .endpoint()
            .own_call_line("is in a call of another kind");
        let options = |op| AllReduceOptions::new(DataType::F32, op, 64);
        let sum = communicator.all_reduce(options(ReduceOp::Sum))?;
        let max = communicator.all_reduce(options(ReduceOp::Max))?;
        around.begin(communicator.endpoint(), 64);
        let call = if communicator.rank() == 1 { max } else { sum };
        Ok(call.run_in_place(&mut [0; 64]).unwrap_err().to_string())
    });
    assert_words(&errors[0], &["rank 1 is in call 1 of plan 1"]);
    assert_words(&errors[1], &["rank 0 is in call 1 of plan 0"]);
}

#[test]
fn at_the_deadline_it_is_said_what_the_peer_was_doing() {
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(2),
    };
    let has_failed = Done::default();
    let errors = run_in_threads(2, options, |communicator| {
        let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 64);
        let all_reduce = communicator.all_reduce(options)?;
        all_reduce.run_in_place(&mut [0; 64])?;
        if communicator.rank() == 1 {
            has_failed.wait();
            return Ok(String::new());
        }
        let error = all_reduce.run_in_place(&mut [0; 64]);
        has_failed.set();
        Ok(error.unwrap_err().to_string())
    })
    .unwrap();
    assert_words(
        &errors[0],
        &["rank 1 has not begun this call: it made 1 of its kind, this is number 2"],
    );
}

/// Peers write into the output: one rank's must not be another's input.
#[test]
fn memories_in_another_order_are_found_when_a_collective_is_prepared() {
    let errors = errors(|communicator| {
        let (a, b) = (communicator.allocate(4096)?, communicator.allocate(4096)?);
        let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 4096);
        let options = match communicator.rank() {
            1 => options.symmetric(&b, &a),
            _ => options.symmetric(&a, &b),
        };
        let options = options.algorithm(Algorithm::TwoShot);
        Ok(communicator.all_reduce(options).unwrap_err().to_string())
    });
    assert_words(&errors[0], &["rank 1", "memory"]);
    assert_words(&errors[1], &["rank 0", "memory"]);
    assert_words(&errors[2], &["rank 1", "memory"]);
}

/// All of what one rank prepares is what the others prepare first.
#[test]
fn ranks_that_prepare_more_plans_than_others_are_told_as_those_are() {
    let errors = errors(|communicator| {
        let plans = [Algorithm::OneShot, Algorithm::Ring].map(|one| one.plan(RANKS, 1).unwrap());
        let options = Options::new(DataType::F32, ReduceOp::Sum, 64);
        let mut all: Vec<_> = plans.iter().map(|plan| (plan, options.clone())).collect();
        all.truncate(if communicator.rank() == 1 { 1 } else { 2 });
        let deadline = Instant::now() + communicator.timeout();
        let prepared = Prepared::prepare_all(communicator.endpoint(), &all, deadline);
        Ok(prepared.unwrap_err().to_string())
    });
    for rank in [0, 2] {
        let words = [
            "preparing plan `ring`",
            "rank 1 says nothing",
            "plan `ring`",
        ];
        assert_words(&errors[rank], &words);
    }
    assert_words(
        &errors[1],
        &["rank 0 says plan `ring`", "rank 1 says nothing"],
    );
}
