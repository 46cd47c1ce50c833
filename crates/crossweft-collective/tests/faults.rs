//! What callers hear when they, or their peers, do something wrong.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::Done;
use crossweft_collective::{
    Algorithm, AllReduceOptions, CollectiveError, Communicator, CommunicatorOptions, DataType,
    ReduceOp, run_in_threads,
};

fn job<T: Send>(
    ranks: u32,
    seconds: u64,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Result<Vec<T>, CollectiveError> {
    run_in_threads(
        ranks,
        CommunicatorOptions {
            timeout: Duration::from_secs(seconds),
        },
        rank_main,
    )
}

fn options() -> AllReduceOptions {
    AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 1 << 20)
}

fn assert_words(error: &CollectiveError, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{text}` does not contain `{word}`");
    }
}

#[test]
fn bad_calls_are_refused_and_change_nothing() {
    job(2, 30, |communicator| {
        let all_reduce = communicator.all_reduce(options())?;
        let refused = |result: Result<(), CollectiveError>, word: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, CollectiveError::Usage { .. }), "{error}");
            assert_words(&error, &[word, &format!("rank {}", communicator.rank())]);
        };
        refused(
            all_reduce.run(&[0; 8], &mut [0; 4]),
            "input has 8 bytes, output 4",
        );
        refused(
            all_reduce.run_in_place(&mut [0; 6]),
            "6 bytes are no whole number of f32",
        );
        refused(
            all_reduce.run_in_place(&mut vec![0; (1 << 20) + 4]),
            "prepared for up to 1048576",
        );
        let buffer = communicator.allocate(64)?;
        assert!(
            all_reduce.run_symmetric(0, 0, 8).is_err(),
            "it is for private buffers"
        );
        let symmetric = communicator.all_reduce(options().symmetric(&buffer, &buffer))?;
        assert!(
            symmetric.run_in_place(&mut [0; 8]).is_err(),
            "it is for symmetric buffers"
        );
        let outside = symmetric.run_symmetric(8192, 8192, 8).unwrap_err();
        assert_words(&outside, &["lies outside its memory"]);
        let overlap = symmetric.run_symmetric(0, 4, 8).unwrap_err();
        assert_words(&overlap, &["overlap"]);
        let private = crossweft_hal::Device::Cpu.allocate(64).unwrap();
        let overlap = all_reduce.run_at((&private, 0), (&private, 4), 8);
        assert_words(&overlap.unwrap_err(), &["overlap"]);
        let needs = communicator
            .all_reduce(options().algorithm(Algorithm::TwoShot))
            .unwrap_err();
        assert_words(&needs, &["`two-shot` needs symmetric memory"]);
        assert!(buffer.write(60, &[0; 8192]).is_err());
        // And all is as good as new.
        let mut data = 1.5_f32.to_le_bytes();
        all_reduce.run_in_place(&mut data)?;
        assert_eq!(f32::from_le_bytes(data), 3.0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_prepare_different_things_are_told() {
    let errors = job(3, 30, |communicator| {
        let mut options = options();
        if communicator.rank() == 1 {
            options.dtype = DataType::F64;
        }
        Ok(communicator.all_reduce(options).unwrap_err())
    })
    .unwrap();
    assert_words(&errors[0], &["rank 1 says", "f64", "rank 0 says", "f32"]);
    assert_words(&errors[1], &["rank 0 says", "rank 1 says"]);
    assert_words(&errors[2], &["rank 1 says", "rank 2 says"]);
    assert!(!errors[0].is_lost_peer_or_timeout());
}

#[test]
fn a_rank_that_does_not_call_is_named_at_the_deadline() {
    let start = Instant::now();
    let has_failed = Done::default();
    let errors = job(2, 2, |communicator| {
        let all_reduce = communicator.all_reduce(options().algorithm(Algorithm::OneShot))?;
        if communicator.rank() == 1 {
            has_failed.wait();
            return Ok(None);
        }
        let error = all_reduce.run_in_place(&mut [0; 64]);
        has_failed.set();
        let error = error.unwrap_err();
        let again = all_reduce.run_in_place(&mut [0; 64]).unwrap_err();
        assert_words(&again, &["earlier launch failed"]);
        Ok(Some(error))
    })
    .unwrap();
    let error = errors[0].as_ref().unwrap();
    assert_words(
        error,
        &[
            "rank 0",
            "one-shot",
            "op 1 (reduce)",
            "a packet from rank 1",
            "expected 1, seen 0",
            "2s",
        ],
    );
    assert!(error.is_lost_peer_or_timeout());
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn an_abort_ends_waits_on_every_rank() {
    let errors = job(3, 60, |communicator| {
        let all_reduce = communicator.all_reduce(options())?;
        if communicator.rank() == 2 {
            std::thread::sleep(Duration::from_millis(300));
            communicator.abort("out of patience");
            return Ok(None);
        }
        Ok(Some(
            all_reduce.run_in_place(&mut vec![0; 1 << 20]).unwrap_err(),
        ))
    })
    .unwrap();
    for (rank, error) in errors[..2].iter().enumerate() {
        let own = format!("rank {rank}");
        assert_words(
            error.as_ref().unwrap(),
            &[&own, "rank 2 aborted", "out of patience"],
        );
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let errors = job(2, 60, |communicator| {
        let all_reduce = communicator.all_reduce(options())?;
        // What it sent before it left still counts.
        let mut data = 2.0_f32.to_le_bytes();
        all_reduce.run_in_place(&mut data)?;
        assert_eq!(f32::from_le_bytes(data), 4.0);
        if communicator.rank() == 1 {
            communicator.leave();
            return Ok(None);
        }
        Ok(Some(
            all_reduce.run_in_place(&mut vec![0; 1 << 20]).unwrap_err(),
        ))
    })
    .unwrap();
    assert_words(
        errors[0].as_ref().unwrap(),
        &["a signal from rank 1", "rank 1 has left"],
    );
}
