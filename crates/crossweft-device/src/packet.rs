//! Packets: data and flag in one word, so that a receiver needs no other synchronisation.
//!
//! A packet word is 8 bytes: 4 bytes of payload (low half) and a 4-byte flag (high half). `LL8` is
//! one such word; `LL16` is two side by side, which a GPU stores in one 16-byte access. 8-byte
//! atomicity is all that is needed, and both have the same bytes in memory, so the payload at byte
//! `4 i` lies in word `i`, whichever of the two wrote it.
//!
//! The flag is the call's ([`flag_of`]): never 0, and different from those of the executions
//! before, so memory need not be cleared in between. Two halves used in turn replace a barrier:
//! whoever sends for epoch `e + 2` has everything of `e + 1`, which was sent after `e` was read.
#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves, and a half into bytes"
)]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    allow(
        dead_code,
        reason = "threads of a block share packets out in another way"
    )
)]

use crate::block::Block;
use crate::memory::Memory;
use crate::wait::{Site, Stopped, wait_for};

// Two words in one access, shared out among the threads of a block.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
pub use crate::gpu::packets::{copy_from_packets, copy_to_packets, forward_packets};

/// Payload bytes of a packet word.
pub const PAYLOAD: u64 = 4;
/// Bytes of a packet word.
pub const WORD: u64 = 8;

/// Bytes of two packet words, which are accessed together where they are aligned.
const PAIR: u64 = 2 * WORD;
const PAIR_PAYLOAD: u64 = 2 * PAYLOAD;

/// Bytes of packets whose cache lines a CPU asks for at once: they then cross between cores side by
/// side, and not one after the other as the loop comes to them. A receiver asks when the first
/// packet is there, since a line that is read too early is taken from the sender before it is full.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
const AHEAD: u64 = 16 * 64;

/// The part of `words` packet words that is worth asking for, in bytes.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
#[inline(always)]
const fn ahead(words: u64) -> u64 {
    let bytes = words * WORD;
    if bytes < AHEAD { bytes } else { AHEAD }
}

/// How packets are stored; only the width of an access differs.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PacketType {
    /// 4 bytes of data and a 4-byte flag in 8 bytes.
    Ll8 = 0,
    /// Two LL8 packets in one 16-byte access.
    Ll16 = 1,
}

/// Low bits of a flag that tell epochs apart; the others tell calls of different sizes apart.
const EPOCH_BITS: u32 = 20;
/// Number of epochs told apart: even, so that flag and epoch have the same parity.
const EPOCHS: u64 = (1 << EPOCH_BITS) - 2;

/// The packet flag of an epoch (epochs start at 1) and a message of `bytes` bytes: never 0, of the
/// epoch's parity. Ranks that call with different sizes do not take each other's packets.
#[inline(always)]
#[must_use]
pub const fn flag_of(epoch: u64, bytes: u64) -> u32 {
    // Fibonacci hashing: sizes that are close to each other differ in the high bits.
    let signature = bytes.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (32 + EPOCH_BITS);
    (epoch.wrapping_sub(1) % EPOCHS + 1) as u32 | (signature as u32) << EPOCH_BITS
}

/// Whether a packet that carries `seen` instead of `expected` belongs to the same epoch of a call of
/// another size.
#[inline(always)]
#[must_use]
pub const fn is_of_other_size(expected: u32, seen: u32) -> bool {
    expected != seen && epoch_part(expected) == epoch_part(seen)
}

/// The part of a flag that tells epochs apart: the epoch itself, as long as there were few.
#[inline(always)]
#[must_use]
pub const fn epoch_part(flag: u32) -> u32 {
    flag & ((1 << EPOCH_BITS) - 1)
}

/// Flags repeat after 2^20 - 2 epochs. A word that was not written in all that time would be
/// believed, so each half is cleared twice in 2^19 epochs, by its owner, at the end of this epoch.
#[inline(always)]
#[must_use]
pub const fn is_scrub_epoch(epoch: u64) -> bool {
    epoch & ((1 << (EPOCH_BITS - 2)) - 2) == 0
}

#[inline(always)]
const fn word(data: u32, flag: u32) -> u64 {
    data as u64 | (flag as u64) << 32
}

/// Sends one packet word.
///
/// # Safety
/// `addr` must be valid and 8-byte aligned.
#[inline(always)]
pub unsafe fn write_packet<M: Memory>(memory: &M, addr: u64, data: u32, flag: u32) {
    // SAFETY: the caller's promise.
    unsafe { memory.store(addr, word(data, flag)) };
}

/// The payload of the packet word at `addr` if it carries `flag`.
///
/// # Safety
/// `addr` must be valid and 8-byte aligned.
#[inline(always)]
pub unsafe fn read_packet_once<M: Memory>(memory: &M, addr: u64, flag: u32) -> Option<u32> {
    // SAFETY: the caller's promise.
    let word = unsafe { memory.load(addr) };
    ((word >> 32) as u32 == flag).then_some(word as u32)
}

/// Waits for the packet word at `addr` to carry `flag`.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait.
///
/// # Safety
/// `addr` must be valid and 8-byte aligned.
#[inline(always)]
pub unsafe fn read_packet<B: Block>(
    block: &B,
    site: Site,
    addr: u64,
    flag: u32,
) -> Result<u32, Stopped> {
    let memory = block.memory();
    let word = wait_for(
        block,
        site,
        u64::from(flag),
        // SAFETY: the caller's promise.
        || unsafe { memory.load(addr) }.rotate_left(32),
        |seen| seen as u32 == flag,
    )?;
    Ok((word >> 32) as u32)
}

/// Waits for the two packet words at `addr` to carry `flag`; returns both payloads.
///
/// # Errors
/// [`Stopped`] when the wait hook ends the wait.
///
/// # Safety
/// `addr` must be valid for 16 bytes and 16-byte aligned.
#[inline(always)]
unsafe fn read_pair<B: Block>(block: &B, site: Site, addr: u64, flag: u32) -> Result<u64, Stopped> {
    // SAFETY: the caller's promise.
    let [mut a, mut b] = unsafe { block.memory().load_pair(addr) };
    // Which of the two was not there yet matters to nobody but an error message.
    if (a >> 32) as u32 != flag || (b >> 32) as u32 != flag {
        // SAFETY: as above.
        unsafe {
            a = read_packet(block, site, addr, flag)?.into();
            b = read_packet(block, site, addr + WORD, flag)?.into();
        }
    }
    Ok(u64::from(a as u32) | b << 32)
}

/// How many of `words` packet words are accessed in pairs: all that have a partner, if `packets` is
/// aligned for it.
#[inline(always)]
const fn pairs(packets: u64, words: u64) -> u64 {
    if packets.is_multiple_of(PAIR) {
        words / 2
    } else {
        0
    }
}

/// Copies `bytes` bytes into packets, the whole block together. `packets` is the address of the
/// first word, `src` may have any alignment.
///
/// # Safety
/// `src` must be valid for `bytes`, `packets` for twice that, rounded up to whole words, and 8-byte
/// aligned; nobody may write the source meanwhile.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
#[inline(always)]
pub unsafe fn copy_to_packets<B: Block>(block: &B, packets: u64, src: u64, bytes: u64, flag: u32) {
    let memory = block.memory();
    let whole = bytes / PAYLOAD;
    let pairs = pairs(packets, whole);
    memory.prefetch(packets, ahead(whole), true);
    let mut i = u64::from(block.thread());
    while i < pairs {
        // SAFETY: words `2 i` and `2 i + 1` lie in both ranges.
        unsafe {
            let data = memory.read::<u64>(src + i * PAIR_PAYLOAD);
            let words = [word(data as u32, flag), word((data >> 32) as u32, flag)];
            memory.store_pair(packets + i * PAIR, words);
        }
        i += u64::from(block.threads());
    }
    i = 2 * pairs + u64::from(block.thread());
    while i < whole {
        // SAFETY: word `i` lies in both ranges.
        unsafe {
            let data = memory.read::<u32>(src + i * PAYLOAD);
            memory.store(packets + i * WORD, word(data, flag));
        }
        i += u64::from(block.threads());
    }
    let rest = bytes % PAYLOAD;
    if rest != 0 && block.thread() == 0 {
        let mut data = 0;
        let mut k = 0;
        while k < rest {
            // SAFETY: byte `k` of the tail lies in the source.
            let byte = unsafe { memory.read::<u8>(src + whole * PAYLOAD + k) };
            data |= u32::from(byte) << (8 * k);
            k += 1;
        }
        // SAFETY: the tail's word lies in the packets.
        unsafe { memory.store(packets + whole * WORD, word(data, flag)) };
    }
}

/// Waits for the packets of `bytes` bytes and copies them out, the whole block together. `dst` may
/// have any alignment.
///
/// # Errors
/// [`Stopped`] when the wait hook ends a wait; `dst` is then partly written.
///
/// # Safety
/// `dst` must be valid for `bytes`, `packets` for twice that, rounded up to whole words, and 8-byte
/// aligned; nobody may access the destination meanwhile.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
#[inline(always)]
pub unsafe fn copy_from_packets<B: Block>(
    block: &B,
    site: Site,
    dst: u64,
    packets: u64,
    bytes: u64,
    flag: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let whole = bytes / PAYLOAD;
    let pairs = pairs(packets, whole);
    let mut i = u64::from(block.thread());
    while i < pairs {
        // SAFETY: words `2 i` and `2 i + 1` lie in both ranges.
        unsafe {
            let data = read_pair(block, site, packets + i * PAIR, flag)?;
            if i == 0 {
                memory.prefetch(packets, ahead(whole), false);
            }
            memory.write::<u64>(dst + i * PAIR_PAYLOAD, data);
        }
        i += u64::from(block.threads());
    }
    i = 2 * pairs + u64::from(block.thread());
    while i < whole {
        // SAFETY: word `i` lies in both ranges.
        unsafe {
            let data = read_packet(block, site, packets + i * WORD, flag)?;
            memory.write::<u32>(dst + i * PAYLOAD, data);
        }
        i += u64::from(block.threads());
    }
    let rest = bytes % PAYLOAD;
    if rest != 0 && block.thread() == 0 {
        // SAFETY: the tail's word lies in the packets.
        let data = unsafe { read_packet(block, site, packets + whole * WORD, flag)? };
        let mut k = 0;
        while k < rest {
            // SAFETY: byte `k` of the tail lies in the destination.
            unsafe { memory.write::<u8>(dst + whole * PAYLOAD + k, (data >> (8 * k)) as u8) };
            k += 1;
        }
    }
    Ok(())
}

/// Waits for the packets of `bytes` bytes and sends them on, the whole block together.
///
/// # Errors
/// [`Stopped`] when the wait hook ends a wait; part may have been sent.
///
/// # Safety
/// Both addresses must be valid for twice `bytes`, rounded up to whole words, and 8-byte aligned.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
#[inline(always)]
pub unsafe fn forward_packets<B: Block>(
    block: &B,
    site: Site,
    dst: u64,
    src: u64,
    bytes: u64,
    flag: u32,
) -> Result<(), Stopped> {
    let words = bytes.div_ceil(PAYLOAD);
    let mut i = u64::from(block.thread());
    while i < words {
        // SAFETY: word `i` lies in both ranges.
        unsafe {
            let data = read_packet(block, site, src + i * WORD, flag)?;
            write_packet(block.memory(), dst + i * WORD, data, flag);
        }
        i += u64::from(block.threads());
    }
    Ok(())
}
