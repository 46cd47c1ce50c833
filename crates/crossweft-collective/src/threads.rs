//! A whole job inside one process: every rank a thread.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crossweft_executor::{Options, Stage};
use crossweft_hal::Device;
use crossweft_net::{Group, Rendezvous, RendezvousOptions};
use crossweft_plan::Plan;

use crate::communicator::{Communicator, CommunicatorOptions, join_options};
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
        let group = Group::join(&id, rank, ranks, &join_options(options, None))?;
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

/// Runs a plan once in a job of its own, each rank a thread on the CPU device: `buffers` has the input and
/// the output of every rank, in rank order. `interrupt` is asked now and then while ranks wait; a reason
/// ends the job.
///
/// # Errors
/// As for [`run_in_threads`]; [`CollectiveError::Usage`] if there are not as many buffers as ranks.
pub fn run_plan_in_threads(
    plan: &Plan,
    options: &Options,
    buffers: Vec<(&[u8], &mut [u8])>,
    job: CommunicatorOptions,
    interrupt: impl Fn() -> Option<String> + Clone + Send + Sync + 'static,
) -> Result<(), CollectiveError> {
    let ranks = plan.world_size();
    if buffers.len() != ranks as usize {
        return Err(CollectiveError::Usage {
            rank: 0,
            reason: format!("buffers of {} ranks, the plan has {ranks}", buffers.len()),
        });
    }
    // Each rank's thread takes its own.
    let buffers: Vec<_> = buffers
        .into_iter()
        .map(|pair| Mutex::new(Some(pair)))
        .collect();
    run_in_threads(ranks, job, |communicator| {
        communicator.interrupt_when(interrupt.clone());
        let prepared = communicator.prepare(plan, options.clone(), Stage::WhereNeeded)?;
        let own = &buffers[communicator.rank() as usize];
        match own.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some((input, output)) => Ok(prepared.run(input, output, job.timeout)?),
            None => Ok(()),
        }
    })?;
    Ok(())
}
