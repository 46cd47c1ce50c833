//! Puts into peers' registered memory and signals to peers, from the host: what needs no call of the peer.
//!
//! A put is written before a signal that follows it is counted, so whoever has waited for the signal
//! sees the data ([`crossweft_device::semaphore`]).
#![allow(unsafe_code)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "addresses have 64 bits (checked in crossweft-device)"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, Guard, RegisteredMemory, SemaphorePool};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{Site, Stopped};
use crossweft_hal::cpu::{Grid, HostBlock, Schedule};
use crossweft_hal::{Device, Memory};

use crate::exchange::ExchangeError;
use crate::turn::Turn;

/// One semaphore between every two ranks, and of each rank with itself.
#[derive(Debug)]
pub struct OneSided {
    endpoint: Arc<Endpoint>,
    semaphores: SemaphorePool,
    grid: Turn<Grid>,
    limit: Duration,
}

impl OneSided {
    /// Makes the semaphores. Collective; blocks until all ranks have called it, at most until `deadline`. Later
    /// waits may take `limit`.
    ///
    /// # Errors
    /// [`ExchangeError`]: one died or was late or runs on another host, ranks are on GPUs, or there is no memory.
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        limit: Duration,
        deadline: Instant,
    ) -> Result<Self, ExchangeError> {
        let peers: Vec<u32> = (0..endpoint.world_size()).collect();
        let semaphores = SemaphorePool::new(endpoint, &peers, deadline)?;
        let reason = match endpoint.device() {
            Device::Cpu => peers
                .iter()
                .find(|&&peer| !endpoint.is_mappable(peer))
                .map(|peer| format!("rank {peer} runs on another host")),
            device => Some(format!(
                "it is on {}; signals of the host are for the cpu",
                device.name()
            )),
        };
        let rank = endpoint.rank();
        match reason {
            Some(reason) => Err(ExchangeError::Usage { rank, reason }),
            None => Ok(Self {
                endpoint: Arc::clone(endpoint),
                semaphores,
                grid: Turn::new(Grid::new(1, Schedule::default())?),
                limit,
            }),
        }
    }

    /// Copies `data` to byte `offset` of `peer`'s part of `memory`. Local. It is there for `peer` when it has waited
    /// for a signal that follows.
    ///
    /// # Errors
    /// [`ExchangeError::Usage`] if it does not fit; [`ExchangeError::Channel`] if the memory is not mapped.
    pub fn put(
        &self,
        memory: &RegisteredMemory,
        peer: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), ExchangeError> {
        let to = memory.addr(peer)?;
        let end = offset.checked_add(data.len() as u64);
        let on_host = matches!(memory.local(), Memory::Cpu(_));
        if !on_host || end.is_none_or(|end| end > memory.bytes()) {
            return Err(self.usage(format!(
                "{} bytes at {offset} lie outside a memory of {} bytes",
                data.len(),
                memory.bytes()
            )));
        }
        let to = std::ptr::with_exposed_provenance_mut::<u8>((to + offset) as usize);
        // SAFETY: the range lies in the mapping, which `memory` keeps, and is only touched by raw copies; `data` is
        // a borrowed slice, but may be the same memory under its own or another address, which `copy` allows for.
        unsafe { std::ptr::copy(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    /// Signals `peer`, which may be this rank. Local.
    ///
    /// # Errors
    /// [`ExchangeError::Usage`] if there is no such rank.
    pub fn signal(&self, peer: u32) -> Result<(), ExchangeError> {
        self.launch(peer, |semaphore, block| {
            // SAFETY: the pool keeps the semaphore's memory; a block of the host is one thread.
            unsafe { semaphore.signal(block) };
            Ok(())
        })
    }

    /// Waits for `count` signals of `peer`, and for what it has put before each.
    ///
    /// # Errors
    /// [`ExchangeError::Interrupted`]: the peer died or left, the job was aborted, or it took too long.
    pub fn wait(&self, peer: u32, count: u32) -> Result<(), ExchangeError> {
        self.launch(peer, |semaphore, block| {
            for _ in 0..count {
                // SAFETY: as in `signal`; launches take turns, so one thread waits at a time.
                unsafe { semaphore.wait(block, Site::NO_OP) }?;
            }
            Ok(())
        })
    }

    fn launch(
        &self,
        peer: u32,
        act: impl Fn(&Semaphore, &HostBlock<'_>) -> Result<(), Stopped>,
    ) -> Result<(), ExchangeError> {
        let world_size = self.endpoint.world_size();
        if peer >= world_size {
            return Err(self.usage(format!(
                "there is no rank {peer} in a world of {world_size}"
            )));
        }
        let semaphore = self.semaphores.handle(peer as usize);
        let guard = Guard::new(&self.endpoint, self.limit);
        let Some(mut grid) = self.grid.take(self.limit) else {
            return Err(self.usage(format!("another wait still runs after {:?}", self.limit)));
        };
        let context = self.endpoint.context(&guard);
        let result = grid.launch(&context, &|block, _| act(&semaphore, block));
        result.map_err(|interrupted| ExchangeError::Interrupted {
            rank: self.endpoint.rank(),
            call: format!("waiting for signals of rank {peer}"),
            waited_for: Guard::describe(&interrupted.waiting),
            cause: Box::new(guard.cause(interrupted.stopped, &interrupted.waiting)),
        })
    }

    fn usage(&self, reason: String) -> ExchangeError {
        let rank = self.endpoint.rank();
        ExchangeError::Usage { rank, reason }
    }
}
