//! Plans in one piece: what the executor does with a plan of a known form, with nothing to look up and little
//! code, which is most of what a small message costs.
//!
//! Places, packets, signals, the epoch and the order of reductions are the plan's, so ranks that run these
//! and ranks that run the executor can meet.

#![allow(
    clippy::cast_possible_truncation,
    reason = "words are taken apart into bytes"
)]

pub mod hop;
pub mod one_shot;
pub mod one_shot_lines;
pub mod one_shot_norm;
pub mod two_shot;

use core::hint::cold_path;

use super::packets::{flag_in, word};
use crate::block::Block;
use crate::executor::{Counters, NOT_LAST, STOPPED_EPOCH, advance, arrive, compare, leave, tag};
use crate::memory::Memory;
use crate::packet::{PAYLOAD, WORD, is_scrub_epoch};
use crate::semaphore::Semaphore;
use crate::wait::{Site, Stopped, Waiting};

use super::wide::{PIECE, Piece, load1, load16, store1, store16};

/// The tables of a launch, wherever they are: in a kernel's parameter they cannot be indexed as arrays.
pub trait Tables {
    /// Where the part for target `k` goes.
    fn target(&self, k: u32) -> u64;
    /// Where the part of source `k` is.
    fn source(&self, k: u32) -> u64;
    /// The rank that source `k` is.
    fn peer(&self, k: u32) -> u32;
    /// What goes to target `k`, where each gets something else.
    fn origin(&self, k: u32) -> u64;
}

/// Whether a launch that found this epoch is to do anything.
#[inline(always)]
fn begins(epoch: u64) -> Result<(), Stopped> {
    match epoch {
        STOPPED_EPOCH => Err(Stopped::Aborted),
        _ => Ok(()),
    }
}

/// Counts a block whose threads have all read the epoch and met since; for [`depart`].
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
unsafe fn counted<B: Block>(
    block: &B,
    counters: &Counters,
    epoch: u64,
    mine: Result<(), Stopped>,
) -> u64 {
    // Where packets are cleared, blocks are counted when they have read theirs.
    if mine.is_err() || is_scrub_epoch(epoch) {
        return NOT_LAST;
    }
    // SAFETY: the caller's promise.
    unsafe { arrive(block, counters) }
}

/// Ends block `index`'s part of a launch that has packets.
///
/// # Errors
/// What this thread brings or, where packets are cleared, another.
///
/// # Safety
/// As for [`advance`] and [`leave`].
#[inline(always)]
unsafe fn depart<B: Block>(
    block: &B,
    counters: &Counters,
    (index, epoch): (u32, u64),
    mine: Result<(), Stopped>,
    arrived: u64,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise.
    unsafe {
        if is_scrub_epoch(epoch) {
            cold_path();
            block.sync(mine)?;
            return leave(block, counters, epoch, index);
        }
        mine?;
        advance(block, counters, epoch, arrived);
    }
    Ok(())
}

/// Leaves with the peer what call the next signals are of; see [`hear`].
///
/// # Safety
/// `semaphore` must be valid.
#[inline(always)]
unsafe fn say<B: Block>(block: &B, semaphore: &Semaphore, (epoch, bytes): (u64, u64)) {
    let (tag, word) = tag(epoch, bytes);
    // SAFETY: the caller's promise; tags lie behind the counter.
    unsafe { block.memory().store(semaphore.outbound + word, tag) };
}

/// Waits for the `target`-th signal, and compares what was said with it.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait, or the peer makes a call of another size.
///
/// # Safety
/// As for [`Semaphore::wait_until`].
#[inline(always)]
unsafe fn hear<B: Block>(
    block: &B,
    semaphore: &Semaphore,
    (epoch, bytes): (u64, u64),
    (op, target): (u32, u64),
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (tag, word) = tag(epoch, bytes);
    let mut said = 0;
    // SAFETY: the caller's promise.
    unsafe {
        let look = |addr| {
            // On its way together with the counter. If it is this call's, all is well; otherwise it may be older than the
            // counter.
            said = memory.load(addr + word);
            memory.load_acquire(addr)
        };
        semaphore.wait_until(block, op, target, look)?;
        if said == tag {
            return Ok(());
        }
        compare(block, semaphore, (epoch, bytes), op)
    }
}

/// Sends the piece at `at` of a message to the packet slot `to`.
///
/// # Safety
/// The slot must have room for it.
#[inline(always)]
unsafe fn send_packets<B: Block>(block: &B, to: u64, at: u64, piece: Piece, flag: u32) {
    let Piece { a, b, c, d } = piece;
    let (memory, to) = (block.memory(), to + at * (WORD / PAYLOAD));
    // SAFETY: the caller's promise.
    unsafe {
        memory.store_pair(to, [word(a, flag), word(b, flag)]);
        memory.store_pair(to + 2 * WORD, [word(c, flag), word(d, flag)]);
    }
}

/// The words of the piece at `at` in the packet slot `from`, of a message that has `left` bytes from there.
///
/// # Safety
/// The slot must have room for it.
#[inline(always)]
unsafe fn read_packets<B: Block>(block: &B, from: u64, at: u64, left: u64, flag: u32) -> [u64; 4] {
    let (memory, from) = (block.memory(), from + at * (WORD / PAYLOAD));
    // SAFETY: the caller's promise.
    let ([a, b], [c, d]) = unsafe { (memory.load_pair(from), memory.load_pair(from + 2 * WORD)) };
    if left >= PIECE {
        return [a, b, c, d];
    }
    cold_path();
    // Words that the message does not reach have arrived.
    let (words, none) = (left.div_ceil(PAYLOAD), word(0, flag));
    [
        a,
        if words > 1 { b } else { none },
        if words > 2 { c } else { none },
        if words > 3 { d } else { none },
    ]
}

/// Waits until all words of a piece carry `flag`; returns their data. `words` are the first look at them, `again` looks
/// once more. `site` says what is waited for, should that be needed.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait.
#[inline(always)]
fn await_words<B: Block>(
    block: &B,
    flag: u32,
    mut words: [u64; 4],
    site: impl FnOnce() -> Site,
    mut again: impl FnMut() -> [u64; 4],
) -> Result<Piece, Stopped> {
    if !carry(words, flag) {
        let mut waiting = Waiting {
            site: site(),
            spins: 0,
            expected: u64::from(flag),
            seen: 0,
        };
        loop {
            waiting.seen = late(words, flag).rotate_left(32);
            block.pause(&waiting)?;
            waiting.spins = waiting.spins.saturating_add(1);
            words = again();
            if carry(words, flag) {
                break;
            }
        }
    }
    let [a, b, c, d] = words.map(|word| word as u32);
    Ok(Piece { a, b, c, d })
}

/// Whether all words carry `flag`.
#[inline(always)]
fn carry(words: [u64; 4], flag: u32) -> bool {
    let [a, b, c, d] = words.map(|word| flag_in(word) ^ flag);
    a | b | c | d == 0
}

/// A word that has not arrived, of those of which one has not. Which of them matters to nobody but an error message.
#[inline(always)]
fn late([a, b, c, d]: [u64; 4], flag: u32) -> u64 {
    let late = |word| flag_in(word) != flag;
    match (late(a), late(b), late(c)) {
        (true, ..) => a,
        (_, true, _) => b,
        (_, _, true) => c,
        _ => d,
    }
}

/// The first `left` bytes of a piece, or all of it; the rest is zero.
///
/// # Safety
/// The address must be aligned to a piece and valid for them.
#[inline(always)]
unsafe fn load<B: Block>(addr: u64, left: u64) -> Piece {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= PIECE {
            return load16(addr);
        }
        cold_path();
        Piece::of(load_part::<B>(addr, left))
    }
}

/// The other way round.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn store<B: Block>(addr: u64, piece: Piece, left: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        if left >= PIECE {
            store16(addr, piece);
            return;
        }
        cold_path();
        let Piece { a, b, c, d } = piece;
        store_part::<B>(addr, word(a, b), word(c, d), left);
    }
}

/// Less than a piece, a byte at a time. Functions of their own: fetching instructions is most of what a small
/// message costs, and only the end of a message needs these. Generic, so that they are compiled with the kernel that
/// calls them.
///
/// # Safety
/// As for [`load`].
#[cold]
#[inline(never)]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "compiled with the kernel that calls it"
)]
pub(in crate::gpu) unsafe fn load_part<B>(addr: u64, left: u64) -> u128 {
    let (mut all, mut k) = (0, left);
    while k > 0 {
        k -= 1;
        // SAFETY: the caller's promise.
        all = all << 8 | u128::from(unsafe { load1(addr + k) });
    }
    all
}

/// # Safety
/// As for [`load`].
#[cold]
#[inline(never)]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "compiled with the kernel that calls it"
)]
pub(in crate::gpu) unsafe fn store_part<B>(addr: u64, low: u64, high: u64, left: u64) {
    let (mut all, mut k) = (u128::from(high) << 64 | u128::from(low), 0);
    while k < left {
        // SAFETY: the caller's promise.
        unsafe { store1(addr + k, all as u8) };
        all >>= 8;
        k += 1;
    }
}

const fn min(a: u64, b: u64) -> u64 {
    if a < b { a } else { b }
}
