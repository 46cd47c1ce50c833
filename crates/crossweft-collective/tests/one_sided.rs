//! Puts and signals from the host.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::Done;
use crossweft_collective::{CommunicatorOptions, run_in_threads};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn what_was_put_before_a_signal_is_there_after_it() {
    let options = CommunicatorOptions { timeout: LIMIT };
    run_in_threads(3, options, |communicator| {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let memory = communicator.allocate(8192)?;
        let one_sided = communicator.one_sided()?;
        for round in 0..200_u32 {
            let data: Vec<u8> = (0..5000).map(|i| (i + round + 7 * rank) as u8).collect();
            one_sided.put(&memory.registered(), next, 100, &data)?;
            one_sided.signal(next)?;
            one_sided.wait(last, 1)?;
            let mut found = vec![0; 5000];
            memory.read(100, &mut found)?;
            let expected: Vec<u8> = (0..5000).map(|i| (i + round + 7 * last) as u8).collect();
            assert!(found == expected, "rank {rank}, round {round}");
            // Now the next round's may come.
            one_sided.signal(last)?;
            one_sided.wait(next, 1)?;
        }
        // To itself, and several at once.
        for _ in 0..3 {
            one_sided.put(&memory.registered(), rank, 0, &[9])?;
            one_sided.signal(rank)?;
        }
        one_sided.wait(rank, 3)?;
        let mut one = [0];
        memory.read(0, &mut one)?;
        assert_eq!(one, [9]);
        for (peer, offset) in [(0, 8192), (0, u64::MAX)] {
            let error = one_sided
                .put(&memory.registered(), peer, offset, &[1])
                .unwrap_err();
            assert!(error.to_string().contains("lie outside"), "{error}");
        }
        assert!(one_sided.signal(3).is_err());
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_wait_for_a_rank_that_is_late_ends_and_names_it() {
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(2),
    };
    let has_failed = Done::default();
    run_in_threads(2, options, |communicator| {
        let one_sided = communicator.one_sided()?;
        let start = Instant::now();
        if communicator.rank() == 0 {
            let error = one_sided.wait(1, 1);
            has_failed.set();
            let error = error.unwrap_err().to_string();
            assert!(error.contains("a signal from rank 1"), "{error}");
            assert!(error.contains("deadline"), "{error}");
            assert!(start.elapsed() < Duration::from_secs(20));
        } else {
            has_failed.wait();
        }
        Ok(())
    })
    .unwrap();
}
