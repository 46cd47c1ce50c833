//! A whole job inside one process: every rank a thread.

use std::sync::Arc;
use std::thread;

use crossweft_hal::Device;
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};

use crate::communicator::{Communicator, CommunicatorOptions};
use crate::error::CollectiveError;

/// Runs `rank_main` once for each of `ranks` ranks, each on a thread of its own with its own
/// communicator, and returns the results in rank order. Blocks until all have ended.
///
/// # Errors
/// The first error in rank order: of a rank, or of setting the job up.
pub fn run_in_threads<T: Send>(
    ranks: u32,
    options: CommunicatorOptions,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Result<Vec<T>, CollectiveError> {
    run_in_threads_on(|_| Ok(Device::Cpu), ranks, options, rank_main)
}

/// [`run_in_threads`], each rank on the device that `device` gives it. On GPUs this makes virtual ranks:
/// several on one device, each with a stream of its own.
///
/// # Errors
/// As for [`run_in_threads`], and those of `device`.
pub fn run_in_threads_on<T: Send>(
    device: impl Fn(u32) -> Result<Device, CollectiveError> + Sync,
    ranks: u32,
    options: CommunicatorOptions,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Result<Vec<T>, CollectiveError> {
    let rendezvous = Rendezvous::start(&RendezvousOptions {
        timeout: options.timeout,
        ..RendezvousOptions::default()
    })?;
    let id = rendezvous.unique_id();
    let one_rank = |rank| {
        let join = JoinOptions {
            timeout: options.timeout,
            ..JoinOptions::default()
        };
        let group = Group::join(&id, rank, ranks, &join)?;
        let communicator = Communicator::on(device(rank)?, Arc::new(group), options)?;
        rank_main(&communicator)
    };
    thread::scope(|scope| {
        let one_rank = &one_rank;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || one_rank(rank)))
            .collect();
        (0..)
            .zip(threads)
            .map(|(rank, thread)| {
                thread
                    .join()
                    .unwrap_or(Err(CollectiveError::Panicked { rank }))
            })
            .collect::<Vec<_>>()
            .into_iter()
            .collect()
    })
}
