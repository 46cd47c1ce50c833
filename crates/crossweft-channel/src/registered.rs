//! Registered memory: one memory of every rank, mapped by its peers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crossweft_hal::Memory;

use crate::ChannelError;

/// A rank's own memory together with its peers', as mapped here. All have the same size. Peers'
/// memory stays valid for as long as this lives, even when its owner is gone.
#[derive(Debug)]
pub struct RegisteredMemory {
    rank: u32,
    own: Memory,
    /// In rank order; `None` for this rank and for ranks on other hosts.
    peers: Vec<Option<Memory>>,
    /// What each rank calls its own part, in rank order.
    keys: Vec<u64>,
    registry: Arc<Registry>,
}

impl RegisteredMemory {
    /// Also enters it in the registry, where peers' requests find it.
    pub(crate) fn new(
        rank: u32,
        own: Memory,
        keys: Vec<u64>,
        peers: Vec<Option<Memory>>,
        registry: &Arc<Registry>,
    ) -> Arc<Self> {
        let memory = Arc::new(Self {
            rank,
            own,
            peers,
            keys,
            registry: Arc::clone(registry),
        });
        registry
            .lock()
            .insert(memory.key(rank), Arc::downgrade(&memory));
        memory
    }

    /// This rank's memory.
    #[must_use]
    pub fn local(&self) -> &Memory {
        &self.own
    }

    /// Bytes of each rank's memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.own.bytes()
    }

    /// Address of `rank`'s memory in this process.
    ///
    /// # Errors
    /// [`ChannelError::NotOnThisHost`] if it is not mapped.
    pub fn addr(&self, rank: u32) -> Result<u64, ChannelError> {
        self.of(rank).map(Memory::addr)
    }

    /// `rank`'s memory, if it is mapped.
    pub(crate) fn of(&self, rank: u32) -> Result<&Memory, ChannelError> {
        let own_rank = self.rank;
        if rank == own_rank {
            return Ok(&self.own);
        }
        match self.peers.get(rank as usize) {
            Some(Some(memory)) => Ok(memory),
            _ => Err(ChannelError::NotOnThisHost { rank, own_rank }),
        }
    }

    /// What each rank calls its own part, in rank order: the same on every rank, and another for every other memory of
    /// an endpoint.
    #[must_use]
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// What `rank`, which must exist, calls its own part on the wire.
    pub(crate) fn key(&self, rank: u32) -> u64 {
        self.keys[rank as usize]
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.keys[self.rank as usize]);
    }
}

/// A rank's registered memories by key, for requests that come over a network.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<BTreeMap<u64, Weak<RegisteredMemory>>>);

impl Registry {
    /// The memory, unless it was dropped.
    pub(crate) fn get(&self, key: u64) -> Option<Arc<RegisteredMemory>> {
        self.lock().get(&key)?.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<RegisteredMemory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
