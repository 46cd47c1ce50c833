//! A link, or a rank's memory, that all who use it at a time share evenly.

use std::collections::BTreeSet;

/// Picoseconds: whole numbers, so that times are compared and added exactly.
pub(super) type Time = u64;

/// What is under way: each of `n` flows advances by 1 ps every `n` ps.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared {
    /// What a flow that was there from the beginning would have had by `at`.
    served: Time,
    /// Time since that was last a whole number.
    rest: Time,
    at: Time,
    /// By what `served` is when they are done.
    flows: BTreeSet<(Time, usize)>,
    /// Changes with the flows.
    pub(super) version: u64,
}

impl Shared {
    fn advance(&mut self, now: Time) {
        let flows = self.flows.len() as Time;
        let passed = now - self.at + self.rest;
        if let (Some(whole), Some(rest)) = (passed.checked_div(flows), passed.checked_rem(flows)) {
            self.served += whole;
            self.rest = rest;
        } else {
            self.rest = 0;
        }
        self.at = now;
    }

    /// A flow begins that would take `work` alone.
    pub(super) fn add(&mut self, now: Time, work: Time, flow: usize) {
        self.advance(now);
        self.flows.insert((self.served + work, flow));
        self.version += 1;
    }

    /// When the next one is done, if none is added before.
    pub(super) fn next(&self) -> Option<Time> {
        let (first, _) = self.flows.first()?;
        let left = first.saturating_sub(self.served) * self.flows.len() as Time;
        Some(self.at + left.saturating_sub(self.rest))
    }

    /// Takes out those that are done.
    pub(super) fn done(&mut self, now: Time) -> Vec<usize> {
        self.advance(now);
        let mut done = Vec::new();
        while let Some((_, flow)) = self.flows.first().filter(|(at, _)| *at <= self.served) {
            done.push(*flow);
            self.flows.pop_first();
        }
        self.version += 1;
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_share_evenly() {
        let mut link = Shared::default();
        link.add(100, 30, 0);
        assert_eq!(link.next(), Some(130));
        // After 10 ps there are two: 20 ps are left of the first.
        link.add(110, 5, 1);
        assert_eq!(link.next(), Some(120));
        assert_eq!(link.done(120), [1]);
        // 15 ps are left, alone.
        assert_eq!(link.next(), Some(135));
        assert_eq!(link.done(135), [0]);
        assert_eq!(link.next(), None);
        // Nothing is carried over a pause.
        link.add(1000, 7, 2);
        link.add(1000, 7, 3);
        link.add(1000, 7, 4);
        assert_eq!(link.next(), Some(1021));
        assert!(link.done(1020).is_empty());
        assert_eq!(link.done(1021), [2, 3, 4]);
    }
}
