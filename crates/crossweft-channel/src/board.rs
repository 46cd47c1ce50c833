//! What each rank is calling, for others to read when they wait in vain.
//!
//! Every plan has a line of each rank's control memory, where the rank notes the calls it makes.
//! Noting is two stores to a line that nobody else touches; it is read only by ranks that wait too
//! long, to tell a peer that is late from one that calls something else.
//!
//! ```text
//! line (64 bytes):  u64 calls begun * 2 + (1 while one runs)   u64 bytes of the last call
//! ```

use std::sync::{Mutex, PoisonError};

use crossweft_hal::cpu::SharedMemory;

use crate::shared::{LINE, Words, words};

/// Lines of a board. Plans beyond share them: a message is then about the wrong one of two plans.
const LINES: u32 = 64;
const CALLS: u64 = 0;
const BYTES: u64 = 1;

/// A call that a rank makes, or made last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) plan: u32,
    /// How many calls of this plan the rank has begun.
    pub(crate) begun: u64,
    pub(crate) running: bool,
    pub(crate) bytes: u64,
}

/// The boards of all ranks.
#[derive(Debug)]
pub(crate) struct Board {
    /// What each plan is, in words; the same on every rank, which all prepare in one order.
    names: Mutex<Vec<String>>,
}

impl Board {
    /// Bytes of one rank's board.
    pub(crate) const SIZE: u64 = LINES as u64 * LINE;

    pub(crate) fn new() -> Self {
        let names = Mutex::default();
        Self { names }
    }

    /// The number of a plan that all ranks have agreed on. Asked for in the same order by all.
    pub(crate) fn number(&self, name: String) -> u32 {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.push(name);
        names.len() as u32 - 1
    }

    /// What plan `number` is.
    pub(crate) fn name(&self, number: u32) -> String {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names.get(number as usize);
        name.cloned().unwrap_or_else(|| format!("plan {number}"))
    }

    /// The latest of the plans that share line `line`.
    fn latest(&self, line: u32) -> u32 {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let last = names.len().saturating_sub(1) as u32;
        last.saturating_sub((last + LINES - line) % LINES)
    }

    /// Notes in `own`, this rank's board at `offset` of its control memory, that call number `begun` of
    /// plan `number` begins.
    pub(crate) fn begin(own: &SharedMemory, offset: u64, number: u32, begun: u64, bytes: u64) {
        let line = line(own, offset, number);
        line.store(BYTES, bytes);
        line.store(CALLS, begun << 1 | 1);
    }

    /// Notes that it has ended.
    pub(crate) fn end(own: &SharedMemory, offset: u64, number: u32, begun: u64) {
        line(own, offset, number).store(CALLS, begun << 1);
    }

    /// The call of plan `number` on the board at `offset` of `memory`.
    pub(crate) fn call(memory: &SharedMemory, offset: u64, number: u32) -> Call {
        let line = line(memory, offset, number);
        let calls = line.load(CALLS);
        Call {
            plan: number,
            begun: calls >> 1,
            running: calls & 1 == 1,
            bytes: line.load(BYTES),
        }
    }

    /// The first running call on the board at `offset` of `memory`, but for plan `except`'s.
    pub(crate) fn other(&self, memory: &SharedMemory, offset: u64, except: u32) -> Option<Call> {
        (0..LINES)
            .filter(|&line| line != except % LINES)
            .map(|line| Self::call(memory, offset, line))
            .find(|call| call.running)
            .map(|call| Call {
                plan: self.latest(call.plan),
                ..call
            })
    }
}

/// Plan `number`'s line of the board at `offset` of `memory`.
fn line(memory: &SharedMemory, offset: u64, number: u32) -> Words<'_> {
    words(memory, offset + u64::from(number % LINES) * LINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read_as_they_were_noted() {
        let memory = SharedMemory::create(64 + Board::SIZE).unwrap();
        let board = Board::new();
        for plan in 0..70 {
            assert_eq!(board.number(format!("p{plan}")), plan);
        }
        assert_eq!(board.other(&memory, 64, 5), None);
        Board::begin(&memory, 64, 66, 9, 1024);
        let call = Call {
            plan: 66,
            begun: 9,
            running: true,
            bytes: 1024,
        };
        assert_eq!(Board::call(&memory, 64, 66), call);
        assert_eq!(board.other(&memory, 64, 5), Some(call));
        // Plan 2 has the same line.
        assert_eq!(board.other(&memory, 64, 2), None);
        Board::end(&memory, 64, 66, 9);
        assert!(!Board::call(&memory, 64, 66).running);
        assert_eq!(board.other(&memory, 64, 5), None);
        assert_eq!(board.name(66), "p66");
        assert_eq!(board.name(99), "plan 99");
    }
}
