//! What each rank says of its calls, one after another, so that a difference between two ranks is found by the one that
//! comes to the call last.
//!
//! ```text
//! entry (32 bytes, one of a ring):  u64 the call's number, 0 while it is being written   u64, u64 what is said of it
//! ```

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use crossweft_hal::Memory;

use crate::shared::{Words, words};
use crate::{ChannelError, Endpoint};

/// Calls that a rank may be ahead of another before what it says of them is forgotten.
const ENTRIES: u64 = 1024;
/// Words of an entry.
const WORDS: u64 = 4;

/// One rank's notes of its calls, and all others' on its host.
#[derive(Debug)]
pub struct Ledger {
    rank: usize,
    /// In rank order; `None` for those on other hosts.
    all: Vec<Option<Memory>>,
    /// Calls so far.
    calls: AtomicU64,
}

/// What another rank says of the same call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The other rank.
    pub rank: u32,
    /// What it says.
    pub theirs: (u64, u64),
}

impl Ledger {
    /// Collective; blocks.
    ///
    /// # Errors
    /// [`ChannelError`]: a peer died or was late, or there is no memory.
    pub fn new(endpoint: &Endpoint, deadline: Instant) -> Result<Self, ChannelError> {
        let what = "making a ledger of calls";
        Ok(Self {
            rank: endpoint.rank() as usize,
            all: endpoint.share_on_host(ENTRIES * WORDS * 8, what, deadline)?,
            calls: AtomicU64::new(0),
        })
    }

    /// Says something of this rank's next call, and compares it with what others have said of theirs. Of two ranks that
    /// say different things, the later one hears of it, or both, unless one is a thousand calls ahead. Local; does not block.
    #[must_use]
    pub fn note(&self, ours: (u64, u64)) -> Option<Difference> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let at = number % ENTRIES * WORDS;
        let own = self.words(self.rank)?;
        own.store(at, 0);
        own.store(at + 1, ours.0);
        own.store(at + 2, ours.1);
        own.store(at, number);
        // Of two that write and then read, one at least reads what the other has written.
        fence(Ordering::SeqCst);
        let said = |words: Words<'_>| {
            let is_whole = || words.load(at) == number;
            let theirs = is_whole().then(|| (words.load(at + 1), words.load(at + 2)))?;
            // Not while it was being written anew.
            is_whole().then_some(theirs)
        };
        (0..).zip(0..self.all.len()).find_map(|(rank, index)| {
            let theirs = said(self.words(index)?)?;
            (theirs != ours).then_some(Difference { rank, theirs })
        })
    }

    fn words(&self, index: usize) -> Option<Words<'_>> {
        match self.all.get(index)? {
            Some(Memory::Cpu(memory)) => Some(words(memory, 0)),
            _ => None,
        }
    }
}
