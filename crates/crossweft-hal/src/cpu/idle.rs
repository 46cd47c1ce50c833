//! What a waiting rank does with its core: spin, then yield, then sleep on a futex.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use crossweft_device::{Stopped, Waiting};
use rustix::thread::futex;
use rustix::time::Timespec;

/// Decides whether waiting may go on. Asked from wait loops, so it must be cheap.
pub trait Supervisor: Sync {
    /// Asked about every few microseconds while block `block` waits.
    ///
    /// # Errors
    /// [`Stopped`] to end the wait.
    fn check(&self, waiting: &Waiting, block: u32) -> Result<(), Stopped>;
}

/// A doorbell in shared memory: 64 bytes, zeroed. Its owner sleeps on it, others ring it.
#[derive(Clone, Copy, Debug)]
pub struct Bell {
    addr: u64,
}

impl Bell {
    /// Bytes of a bell.
    pub const BYTES: u64 = 64;

    /// The bell at `addr`.
    ///
    /// # Safety
    /// `addr` must be 8-byte aligned and [`Bell::BYTES`] bytes of it stay valid for as long as the
    /// bell, or a copy of it, is used; nothing but bells may use those bytes.
    #[must_use]
    pub const unsafe fn at(addr: u64) -> Self {
        Self { addr }
    }

    fn words(&self) -> (&AtomicU32, &AtomicU32) {
        (self.word(0), self.word(1))
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        let words = self.addr as *mut u32;
        // SAFETY: promised at construction; a bell has room for 16 words.
        unsafe { AtomicU32::from_ptr(words.add(index)) }
    }

    /// Notes the core that the owner runs on.
    fn note_core(&self, core: u32) {
        self.word(2).store(core.wrapping_add(1), Ordering::Relaxed);
    }

    /// Whether the owner was on `core` when it last looked.
    fn was_on(&self, core: u32) -> bool {
        self.word(2).load(Ordering::Relaxed) == core.wrapping_add(1)
    }

    /// Wakes the owner if it sleeps. One load of a shared line if it does not. There is no fence,
    /// so a sleeper that is just lying down can be missed: sleeps are short for that reason.
    pub(super) fn ring(&self) {
        let (rings, sleepers) = self.words();
        if sleepers.load(Ordering::Relaxed) != 0 {
            rings.fetch_add(1, Ordering::Release);
            // A failing wake-up is made good by the sleeper's own time limit.
            let _ = futex::wake(rings, futex::Flags::empty(), u32::MAX);
        }
    }

    fn sleep(&self, nanoseconds: i64) {
        let (rings, sleepers) = self.words();
        let before = rings.load(Ordering::Acquire);
        sleepers.fetch_add(1, Ordering::SeqCst);
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: nanoseconds,
        };
        // Every way to return means "look again".
        let _ = futex::wait(rings, futex::Flags::empty(), before, Some(&limit));
        sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a launch needs to know about the world around it.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Ends waits.
    pub supervisor: &'a dyn Supervisor,
    /// This rank's own bell.
    pub bell: Option<Bell>,
    /// The bells of all ranks, in rank order; may be shorter.
    pub peers: &'a [Bell],
    /// Whether every rank of this host has a core to spin on.
    pub spin: bool,
}

impl std::fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("spin", &self.spin)
            .finish_non_exhaustive()
    }
}

/// Looks in vain before the supervisor is asked again.
const CHECK_EVERY: u32 = 256;
/// Looks in vain before giving the core away, where there are cores to spare: some 20 us. Longer
/// would cost dearly when a core turns out to be shared after all, with whatever else is running.
const SPINS: u32 = 1024;
/// The same where ranks share cores: the peer can only act once this rank lets it.
const SPINS_SHARED: u32 = 16;
/// Times the core is given away before sleeping.
const YIELDS: u32 = 256;
/// Longest sleep: the price of a missed ring.
const SLEEP_NANOSECONDS: i64 = 500_000;

/// Looks in vain after which a rank asks itself whether it keeps the core from the very peer it
/// waits for: some microseconds, longer than most waits.
const LOOK_AROUND: u32 = 128;

impl Context<'_> {
    /// Whether `peer` waits on this very core too, as far as it is known. The scheduler leaves two
    /// ranks that only ever yield where they are, each using up its spins while the other is due;
    /// a rank that sleeps is woken on a free core.
    #[cold]
    fn shares_core(&self, peer: u32) -> bool {
        let (Some(own), Some(peer)) = (self.bell, self.peers.get(peer as usize)) else {
            return false;
        };
        let Ok(core) = u32::try_from(rustix::thread::sched_getcpu()) else {
            return false;
        };
        own.note_core(core);
        peer.addr != own.addr && peer.was_on(core)
    }
}

/// The state of one idle period.
#[derive(Debug, Default)]
pub(super) struct Idle {
    rounds: Cell<u32>,
}

impl Idle {
    pub(super) fn reset(&self) {
        self.rounds.set(0);
    }

    /// One look in vain; returns when it is time for the next.
    pub(super) fn pause(
        &self,
        context: &Context<'_>,
        waiting: &Waiting,
        block: u32,
    ) -> Result<(), Stopped> {
        let rounds = self.rounds.get();
        self.rounds.set(rounds.saturating_add(1));
        let spins = if context.spin { SPINS } else { SPINS_SHARED };
        if rounds < spins {
            if rounds == LOOK_AROUND && context.shares_core(waiting.site.peer) {
                self.rounds.set(spins + YIELDS);
            }
            if rounds % CHECK_EVERY == CHECK_EVERY - 1 {
                context.supervisor.check(waiting, block)?;
            }
            std::hint::spin_loop();
            return Ok(());
        }
        context.supervisor.check(waiting, block)?;
        match context.bell {
            Some(bell) if rounds >= spins + YIELDS => bell.sleep(SLEEP_NANOSECONDS),
            _ => rustix::thread::sched_yield(),
        }
        Ok(())
    }
}
