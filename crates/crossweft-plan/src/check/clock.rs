//! Vector clocks: what a thread knows of every other.

use std::rc::Rc;

/// A thread's clock, and a copy of it to hand out while it does not change.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    times: Vec<u32>,
    copy: Option<Rc<[u32]>>,
}

impl Clock {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            times: vec![0; threads],
            copy: None,
        }
    }

    pub(super) fn of(&self, thread: usize) -> u32 {
        self.times[thread]
    }

    pub(super) fn tick(&mut self, thread: usize) {
        self.times[thread] += 1;
        self.copy = None;
    }

    pub(super) fn join(&mut self, other: &[u32]) {
        for (mine, theirs) in self.times.iter_mut().zip(other) {
            *mine = (*mine).max(*theirs);
        }
        self.copy = None;
    }

    pub(super) fn share(&mut self) -> Rc<[u32]> {
        let times = &self.times;
        Rc::clone(self.copy.get_or_insert_with(|| times.as_slice().into()))
    }
}

/// An access, or any other event of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Stamp {
    pub(super) thread: u32,
    /// 0: never.
    pub(super) time: u32,
    /// What it was: a site, or [`Stamp::CALLER`].
    pub(super) site: u32,
}

impl Stamp {
    /// The caller's own accesses, before and after an execution.
    pub(super) const CALLER: u32 = u32::MAX;

    /// Whether whoever has this clock comes after it.
    pub(super) fn before(self, clock: &Clock) -> bool {
        clock.of(self.thread as usize) >= self.time
    }
}
