//! What the tests share: groups of threads, and deadlines.
#![allow(dead_code, reason = "not every test uses everything")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_net::{Group, JoinOptions, NetError, Rendezvous, RendezvousOptions, UniqueId};

/// Generous, because the machine may be busy; tests that check promptness measure it.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(crate) fn rendezvous() -> Rendezvous {
    Rendezvous::start(&RendezvousOptions::default()).expect("a rendezvous on loopback")
}

pub(crate) fn join(id: &UniqueId, rank: u32, world_size: u32) -> Result<Group, NetError> {
    Group::join(id, rank, world_size, &JoinOptions::default())
}

/// Runs one closure per rank, each in a thread with its group; returns what they return.
pub(crate) fn with_ranks<T: Send>(size: u32, run: impl Fn(Arc<Group>) -> T + Sync) -> Vec<T> {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (id, run) = (&id, &run);
                scope.spawn(move || run(Arc::new(join(id, rank, size).expect("join"))))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("rank"))
            .collect()
    });
    rendezvous.wait().expect("everybody joined");
    results
}

/// A small random number generator, so that tests can be repeated.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
