//! Communicators that come and go leave nothing behind.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Footprint, Ranks};
use crossweft_collective::{
    AllReduceOptions, CollectiveError, Communicator, CommunicatorOptions, DataType, ReduceOp,
    run_in_threads,
};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions, UniqueId};

const COMMUNICATORS: usize = 100;
/// By then everything that is made once has been made.
const WARM: usize = 10;
/// What the allocator may keep of it all.
const SLACK_KIB: u64 = 4096;
const OPTIONS: CommunicatorOptions = CommunicatorOptions {
    timeout: Duration::from_secs(60),
};

/// A little of everything that a communicator holds.
fn use_all(communicator: &Communicator) -> Result<(), CollectiveError> {
    let options = AllReduceOptions::new(DataType::F32, ReduceOp::Sum, 1 << 20);
    let buffer = communicator.allocate(64 << 10)?;
    let symmetric = communicator.all_reduce(options.clone().symmetric(&buffer, &buffer))?;
    buffer.write(0, &1.5_f32.to_le_bytes())?;
    symmetric.run_symmetric(0, 0, 4)?;
    let mut sum = [0; 4];
    buffer.read(0, &mut sum)?;
    let ranks = communicator.world_size() as f32;
    assert_eq!(f32::from_le_bytes(sum), 1.5 * ranks);
    let private = communicator.all_reduce(options)?;
    for count in [1, 10_007] {
        let mut data: Vec<u8> = 2.0_f32.to_le_bytes().repeat(count);
        private.run_in_place(&mut data)?;
        assert_eq!(data, (2.0 * ranks).to_le_bytes().repeat(count));
    }
    Ok(())
}

fn check_flat(mut one: impl FnMut()) {
    let idle = Footprint::now().threads;
    let mut warm = None;
    for done in 1..=COMMUNICATORS {
        one();
        if done == WARM {
            warm = Some(Footprint::with_threads(idle));
        }
    }
    let end = Footprint::with_threads(idle);
    println!("after {WARM}: {warm:?}\nafter {COMMUNICATORS}: {end:?}");
    end.assert_flat(&warm.unwrap(), SLACK_KIB);
    assert_eq!(end.shared_mappings, 0);
}

#[test]
fn a_hundred_communicators_of_processes() {
    let Some(rank) = common::rank() else {
        let mut ranks = Ranks::start("a_hundred_communicators_of_processes", 3);
        for _ in 0..COMMUNICATORS {
            let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
            ranks.tell(&rendezvous.unique_id().to_string());
            rendezvous.wait().unwrap();
        }
        return ranks.wait();
    };
    let mut ids = std::io::stdin().lines();
    check_flat(|| {
        let id: UniqueId = ids.next().unwrap().unwrap().parse().unwrap();
        let group = Group::join(&id, rank, 3, &JoinOptions::default()).unwrap();
        let communicator = Communicator::new(Arc::new(group), OPTIONS).unwrap();
        use_all(&communicator).unwrap();
        // Either way of ending it.
        if rank == 0 {
            communicator.leave();
        }
    });
}

#[test]
fn a_hundred_communicators_of_threads() {
    // In a process of its own: other tests of this one would be counted too.
    if common::rank().is_none() {
        return Ranks::start("a_hundred_communicators_of_threads", 1).wait();
    }
    check_flat(|| {
        run_in_threads(3, OPTIONS, use_all).unwrap();
    });
}

/// A job that fails gives everything back as well.
#[test]
fn a_hundred_communicators_that_fail() {
    if common::rank().is_none() {
        return Ranks::start("a_hundred_communicators_that_fail", 1).wait();
    }
    check_flat(|| {
        let errors = run_in_threads(3, OPTIONS, |communicator| {
            let used = use_all(communicator);
            if communicator.rank() == 1 {
                used?;
                communicator.abort("enough");
            } else if let Err(error) = used {
                // The first to be done does not wait for the others.
                return Ok(error);
            }
            Ok(use_all(communicator).unwrap_err())
        });
        for error in errors.unwrap() {
            assert!(error.to_string().contains("rank 1 aborted"), "{error}");
        }
    });
}
