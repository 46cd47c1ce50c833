//! What each rank is calling, for others to read when they wait in vain.
//!
//! Every plan has a line of each rank's control memory, where the rank notes the calls it makes.
//! Noting is two stores to a line that nobody else touches; it is read only by ranks that wait too
//! long, to tell a peer that is late from one that calls something else.
//!
//! ```text
//! line (64 bytes):  u64 calls begun * 2 + (1 while one runs)   u64 bytes of the last call
//!                   twice, for calls in turn: u64 the call's number   u64, u64 where its buffers lie
//! ```
//!
//! Beside plans there are a few lines of their own, which no plan shares, for what else a rank may be doing while
//! others wait for it.

use std::sync::{Mutex, PoisonError};

use crossweft_hal::cpu::SharedMemory;

use crate::shared::{LINE, Words, words};

/// Lines of a board. Plans beyond share them: a message is then about the wrong one of two plans.
const LINES: u32 = 64;
/// Lines that no plan shares.
const OWN_LINES: u32 = 8;
/// Their first number.
const FIRST_OWN: u32 = 1 << 31;
const CALLS: u64 = 0;
const BYTES: u64 = 1;
/// Of the first of the two calls whose places are noted.
const PLACES: u64 = 2;
const PLACE_WORDS: u64 = 3;

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
    /// What lines of their own are for.
    own: Mutex<Vec<String>>,
}

impl Board {
    /// Bytes of one rank's board.
    pub(crate) const SIZE: u64 = (LINES + OWN_LINES) as u64 * LINE;

    pub(crate) fn new() -> Self {
        let (names, own) = (Mutex::default(), Mutex::default());
        Self { names, own }
    }

    /// The number of a line of its own; `name` says what a rank does that is in a call there. Asked for in the same
    /// order by all, a few times at most: beyond, it is shared as a plan's.
    pub(crate) fn own_number(&self, name: String) -> u32 {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if own.len() == OWN_LINES as usize {
            drop(own);
            return self.number(name);
        }
        own.push(name);
        FIRST_OWN + own.len() as u32 - 1
    }

    /// What a rank does that is in `call`, in words.
    pub(crate) fn describe(&self, call: Call) -> String {
        let Call {
            plan, begun, bytes, ..
        } = call;
        let own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        match plan
            .checked_sub(FIRST_OWN)
            .map(|index| own.get(index as usize))
        {
            Some(Some(name)) => format!("{name} (number {begun}, {bytes} bytes)"),
            _ => {
                let name = self.name(plan);
                format!("is in call {begun} of plan {plan} ({name}) with {bytes} bytes")
            }
        }
    }

    /// The number of a plan that all ranks have agreed on. Asked for in the same order by all.
    pub(crate) fn number(&self, name: String) -> u32 {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.push(name);
        names.len() as u32 - 1
    }

    /// Whether plan `number` has its line with another: what is noted there may be the other's.
    pub(crate) fn is_shared(&self, number: u32) -> bool {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        number < FIRST_OWN && (number >= LINES || ((number + LINES) as usize) < names.len())
    }

    /// What plan `number` is.
    fn name(&self, number: u32) -> String {
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

    /// Notes where the buffers of call number `begun` lie, until the call after the next.
    pub(crate) fn place(own: &SharedMemory, offset: u64, number: u32, begun: u64, at: (u64, u64)) {
        let (line, first) = (line(own, offset, number), places(begun));
        line.store(first + 1, at.0);
        line.store(first + 2, at.1);
        line.store(first, begun);
    }

    /// Where they lie on the board at `offset` of `memory`, if that is still noted there.
    pub(crate) fn placed(
        memory: &SharedMemory,
        offset: u64,
        number: u32,
        begun: u64,
    ) -> Option<(u64, u64)> {
        let (line, first) = (line(memory, offset, number), places(begun));
        let noted = line.load(first) == begun;
        noted.then(|| (line.load(first + 1), line.load(first + 2)))
    }

    /// Notes that it has ended.
    pub(crate) fn end(own: &SharedMemory, offset: u64, number: u32, begun: u64) {
        line(own, offset, number).store(CALLS, begun << 1);
    }

    /// The call of plan `number` on the board at `offset` of `memory`.
    pub(crate) fn call(memory: &SharedMemory, offset: u64, number: u32) -> Call {
        let line = line(memory, offset, number);
        let (calls, bytes) = (line.load(CALLS), line.load(BYTES));
        // The rank may be on its way to its next call, whose size is noted first.
        let is_same = line.load(CALLS) == calls;
        Call {
            plan: number,
            begun: calls >> 1,
            running: calls & 1 == 1 && is_same,
            bytes,
        }
    }

    /// The running calls on the board at `offset` of `memory`, but for plan `except`'s.
    pub(crate) fn others(
        &self,
        memory: &SharedMemory,
        offset: u64,
        except: u32,
    ) -> impl Iterator<Item = Call> {
        let own = (FIRST_OWN..FIRST_OWN + OWN_LINES).filter(move |&number| number != except);
        let own = own.map(move |number| Self::call(memory, offset, number));
        let of_plans = (0..LINES)
            .filter(move |&line| except >= FIRST_OWN || line != except % LINES)
            .map(move |line| Self::call(memory, offset, line))
            .map(|call| Call {
                plan: self.latest(call.plan),
                ..call
            });
        own.chain(of_plans).filter(|call| call.running)
    }
}

/// The first word of where the buffers of call number `begun` lie.
fn places(begun: u64) -> u64 {
    PLACES + begun % 2 * PLACE_WORDS
}

/// Plan `number`'s line of the board at `offset` of `memory`.
fn line(memory: &SharedMemory, offset: u64, number: u32) -> Words<'_> {
    let index = match number.checked_sub(FIRST_OWN) {
        Some(own) => LINES + own % OWN_LINES,
        None => number % LINES,
    };
    words(memory, offset + u64::from(index) * LINE)
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
        assert_eq!(board.others(&memory, 64, 5).next(), None);
        Board::begin(&memory, 64, 66, 9, 1024);
        let call = Call {
            plan: 66,
            begun: 9,
            running: true,
            bytes: 1024,
        };
        assert_eq!(Board::call(&memory, 64, 66), call);
        assert_eq!(board.others(&memory, 64, 5).next(), Some(call));
        // Plan 2 has the same line.
        assert_eq!(board.others(&memory, 64, 2).next(), None);
        Board::end(&memory, 64, 66, 9);
        assert!(!Board::call(&memory, 64, 66).running);
        assert_eq!(board.others(&memory, 64, 5).next(), None);
        assert_eq!(board.name(66), "p66");
        assert_eq!(board.name(99), "plan 99");
    }

    #[test]
    fn lines_of_two_plans_are_known_to_be() {
        let board = Board::new();
        let own = board.own_number(String::new());
        for _ in 0..LINES {
            board.number(String::new());
        }
        assert!((0..LINES).all(|plan| !board.is_shared(plan)));
        // The next one has the first one's.
        let next = board.number(String::new());
        assert!(board.is_shared(0) && board.is_shared(next));
        assert!(!board.is_shared(1) && !board.is_shared(own));
    }

    #[test]
    fn lines_of_their_own_are_shared_with_no_plan() {
        let memory = SharedMemory::create(64 + Board::SIZE).unwrap();
        let board = Board::new();
        let own: Vec<u32> = (0..OWN_LINES)
            .map(|i| board.own_number(format!("does {i}")))
            .collect();
        for &number in &own {
            Board::begin(&memory, 64, number, 7, 16);
        }
        for plan in 0..2 * LINES {
            assert_eq!(board.number(String::new()), plan);
            assert!(!Board::call(&memory, 64, plan).running);
        }
        let others = |except| board.others(&memory, 64, except).collect::<Vec<_>>();
        assert_eq!(board.describe(others(5)[0]), "does 0 (number 7, 16 bytes)");
        assert_eq!(others(5).len(), own.len());
        assert_eq!(others(own[0])[0].plan, own[1]);
        Board::begin(&memory, 64, 9, 1, 8);
        assert_eq!(others(5).last().map(|call| call.plan), Some(LINES + 9));
        // Then there are none left.
        assert_eq!(board.own_number("does more".to_owned()), 2 * LINES);
    }

    #[test]
    fn places_are_kept_for_two_calls() {
        let memory = SharedMemory::create(64 + Board::SIZE).unwrap();
        let number = Board::new().own_number(String::new());
        for begun in 1..5 {
            Board::place(&memory, 64, number, begun, (begun * 10, begun * 100));
            let placed = |begun| Board::placed(&memory, 64, number, begun);
            assert_eq!(placed(begun), Some((begun * 10, begun * 100)));
            let before = (begun > 1).then(|| ((begun - 1) * 10, (begun - 1) * 100));
            assert_eq!(placed(begun - 1).filter(|_| begun > 1), before);
            assert_eq!(placed(begun + 1), None);
        }
    }
}
