//! Ranks as threads of one process.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::{ChannelError, Endpoint, Guard, RegisteredMemory, SemaphorePool};
use crossweft_device::Stopped;
use crossweft_hal::Device;
use crossweft_hal::cpu::{Grid, HostBlock, Schedule, SharedMemory};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};

/// Nothing here takes nearly as long, unless it hangs.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn deadline() -> Instant {
    Instant::now() + LONG
}

/// Runs `body` on `world_size` ranks and returns what they return, in rank order.
pub(crate) fn ranks<T: Send>(world_size: u32, body: impl Fn(Arc<Endpoint>) -> T + Sync) -> Vec<T> {
    ranks_on(&Device::Cpu, world_size, body)
}

/// The same, all on one device.
pub(crate) fn ranks_on<T: Send>(
    device: &Device,
    world_size: u32,
    body: impl Fn(Arc<Endpoint>) -> T + Sync,
) -> Vec<T> {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let id = rendezvous.unique_id();
    std::thread::scope(|scope| {
        let (id, body) = (&id, &body);
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                scope.spawn(move || {
                    let options = JoinOptions::default();
                    let group = Group::join(id, rank, world_size, &options).unwrap();
                    let device = device.clone();
                    body(Endpoint::on(device, Arc::new(group), deadline()).unwrap())
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Runs device code on a grid of one block, with the error that a user would see.
pub(crate) fn launch(
    endpoint: &Endpoint,
    limit: Duration,
    body: impl Fn(&HostBlock<'_>) -> Result<(), Stopped>,
) -> Result<(), ChannelError> {
    let guard = Guard::new(endpoint, limit);
    let mut grid = Grid::new(1, Schedule::RoundRobin).unwrap();
    grid.launch(&endpoint.context(&guard), &|block, _| body(block))
        .map_err(|interrupted| ChannelError::Stopped {
            rank: endpoint.rank(),
            what: Guard::describe(&interrupted.waiting),
            cause: guard.cause(interrupted.stopped, &interrupted.waiting),
        })
}

pub(crate) fn register(endpoint: &Endpoint, bytes: u64) -> Arc<RegisteredMemory> {
    let memory = SharedMemory::create(bytes).unwrap();
    endpoint.register(memory, "testing", deadline()).unwrap()
}

pub(crate) fn pool(endpoint: &Arc<Endpoint>, peers: &[u32]) -> Arc<SemaphorePool> {
    Arc::new(SemaphorePool::new(endpoint, peers, deadline()).unwrap())
}

/// `bytes` bytes that depend on every position and on `seed`.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

pub(crate) fn read(memory: &RegisteredMemory, offset: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    memory.local().read(offset, &mut data).unwrap();
    data
}

pub(crate) fn write(memory: &RegisteredMemory, offset: u64, data: &[u8]) {
    memory.local().write(offset, data).unwrap();
}

/// Asserts that an error's words contain each of `parts`.
#[track_caller]
pub(crate) fn says<T: std::fmt::Debug>(result: Result<T, ChannelError>, parts: &[&str]) {
    let words = result.unwrap_err().to_string();
    for part in parts {
        assert!(words.contains(part), "{part:?} is not in {words:?}");
    }
}
