//! Packet leaves for a block of many threads: two words (`LL16`) at a time where the packets are
//! 16-byte aligned. The same bytes in memory as [`crate::packet`]'s own.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a packet word is taken apart into its halves, and a half into bytes"
)]

use super::wide::{load1, load4, load8, store1, store4, store8};
use crate::block::Block;
use crate::memory::Memory;
use crate::packet::{PAYLOAD, WORD};
use crate::wait::{Site, Stopped, WaitKind, wait_for};

/// Payload bytes of two words.
const PAIR: u64 = 2 * PAYLOAD;
/// Bytes of two words.
const WORDS: u64 = 2 * WORD;

/// A packet word.
#[inline(always)]
pub(super) const fn word(data: u32, flag: u32) -> u64 {
    data as u64 | (flag as u64) << 32
}

/// The flag of a packet word.
#[inline(always)]
pub(super) const fn flag_in(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Two words, in one access if they may be.
///
/// # Safety
/// `addr` must be valid for both and 8-byte aligned.
#[inline(always)]
pub(super) unsafe fn load_pair<M: Memory>(memory: &M, addr: u64) -> [u64; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        if addr.is_multiple_of(WORDS) {
            memory.load_pair(addr)
        } else {
            [memory.load(addr), memory.load(addr + WORD)]
        }
    }
}

/// Two words, in one access if they may be.
///
/// # Safety
/// As for [`load_pair`].
#[inline(always)]
pub(super) unsafe fn store_pair<M: Memory>(memory: &M, addr: u64, words: [u64; 2]) {
    let [a, b] = words;
    // SAFETY: the caller's promise.
    unsafe {
        if addr.is_multiple_of(WORDS) {
            memory.store_pair(addr, words);
        } else {
            memory.store(addr, a);
            memory.store(addr + WORD, b);
        }
    }
}

/// Waits for both words; returns their payload.
///
/// # Safety
/// As for [`load_pair`].
#[inline(always)]
unsafe fn read_pair<B: Block>(
    block: &B,
    site: Site,
    addr: u64,
    flag: u32,
) -> Result<(u32, u32), Stopped> {
    let (mut a, mut b) = (0, 0);
    wait_for(
        block,
        site,
        u64::from(flag),
        || {
            // SAFETY: the caller's promise.
            [a, b] = unsafe { load_pair(block.memory(), addr) };
            let late = if flag_in(a) == flag { b } else { a };
            late.rotate_left(32)
        },
        |seen| seen as u32 == flag,
    )?;
    Ok((a as u32, b as u32))
}

/// Eight payload bytes, by the widest access that `addr` allows.
///
/// # Safety
/// `addr` must be valid for them.
#[inline(always)]
unsafe fn load_payload(addr: u64) -> (u32, u32) {
    // SAFETY: the caller's promise; every access is aligned.
    unsafe {
        if addr.is_multiple_of(8) {
            let both = load8(addr);
            (both as u32, (both >> 32) as u32)
        } else if addr.is_multiple_of(4) {
            (load4(addr), load4(addr + 4))
        } else {
            (load_bytes(addr, PAYLOAD), load_bytes(addr + 4, PAYLOAD))
        }
    }
}

/// # Safety
/// As for [`load_payload`].
#[inline(always)]
unsafe fn store_payload(addr: u64, data: (u32, u32)) {
    // SAFETY: the caller's promise; every access is aligned.
    unsafe {
        if addr.is_multiple_of(8) {
            store8(addr, word(data.0, data.1));
        } else if addr.is_multiple_of(4) {
            store4(addr, data.0);
            store4(addr + 4, data.1);
        } else {
            store_bytes(addr, data.0, PAYLOAD);
            store_bytes(addr + 4, data.1, PAYLOAD);
        }
    }
}

/// Up to four bytes, the rest of the word zero.
///
/// # Safety
/// `addr` must be valid for `count`.
#[inline(always)]
pub(super) unsafe fn load_bytes(addr: u64, count: u64) -> u32 {
    let byte = |k: u64| {
        if k < count {
            // SAFETY: the caller's promise.
            u32::from(unsafe { load1(addr + k) })
        } else {
            0
        }
    };
    // All four on their way before the first is looked at.
    let (a, b, c, d) = (byte(0), byte(1), byte(2), byte(3));
    a | b << 8 | c << 16 | d << 24
}

/// The first `count`, up to four, bytes of `data`.
///
/// # Safety
/// `addr` must be valid for them.
#[inline(always)]
pub(super) unsafe fn store_bytes(addr: u64, data: u32, count: u64) {
    let byte = |k: u64| {
        if k < count {
            // SAFETY: the caller's promise.
            unsafe { store1(addr + k, (data >> (8 * k)) as u8) }
        }
    };
    byte(0);
    byte(1);
    byte(2);
    byte(3);
}

/// Block: [`crate::packet::copy_to_packets`].
///
/// # Safety
/// As there.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub unsafe fn copy_to_packets<B: Block>(block: &B, packets: u64, src: u64, bytes: u64, flag: u32) {
    let memory = block.memory();
    let (pairs, rest) = (bytes / PAIR, bytes % PAIR);
    let stride = u64::from(block.threads());
    let mut i = u64::from(block.thread());
    // SAFETY: pair `i` lies in both ranges.
    let load = |i: u64| unsafe { load_payload(src + i * PAIR) };
    let store = |i: u64, (a, b): (u32, u32)| {
        // SAFETY: as above.
        unsafe { store_pair(memory, packets + i * WORDS, [word(a, flag), word(b, flag)]) }
    };
    while i + stride < pairs {
        let (a, b) = (load(i), load(i + stride));
        store(i, a);
        store(i + stride, b);
        i += 2 * stride;
    }
    if i < pairs {
        store(i, load(i));
        i += stride;
    }
    // The thread whose turn it is takes what is less than a pair.
    if i == pairs && rest != 0 {
        let (at, to) = (src + pairs * PAIR, packets + pairs * WORDS);
        // SAFETY: the words that hold the rest lie in the packets.
        unsafe {
            memory.store(to, word(load_bytes(at, rest), flag));
            if rest > PAYLOAD {
                let second = load_bytes(at + PAYLOAD, rest - PAYLOAD);
                memory.store(to + WORD, word(second, flag));
            }
        }
    }
}

/// Block: [`crate::packet::copy_from_packets`].
///
/// # Errors
/// As there.
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn copy_from_packets<B: Block>(
    block: &B,
    site: Site,
    dst: u64,
    packets: u64,
    bytes: u64,
    flag: u32,
) -> Result<(), Stopped> {
    let Site {
        kind: _,
        peer,
        channel,
        op,
    } = site;
    // SAFETY: the caller's promise.
    unsafe { unpack(block, (peer, channel), op, dst, packets, (bytes, flag)) }
}

/// Block: [`crate::packet::forward_packets`].
///
/// # Errors
/// As there.
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn forward_packets<B: Block>(
    block: &B,
    site: Site,
    dst: u64,
    src: u64,
    bytes: u64,
    flag: u32,
) -> Result<(), Stopped> {
    let Site {
        kind: _,
        peer,
        channel,
        op,
    } = site;
    // SAFETY: the caller's promise.
    unsafe { forward(block, (peer, channel), op, dst, src, (bytes, flag)) }
}

const fn site((peer, channel): (u32, u32), op: u32) -> Site {
    Site {
        kind: WaitKind::Packet,
        peer,
        channel,
        op,
    }
}

/// [`copy_from_packets`] as a function of numbers: a site passed on would lie in local memory.
///
/// # Safety
/// As there.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
unsafe fn unpack<B: Block>(
    block: &B,
    from: (u32, u32),
    op: u32,
    dst: u64,
    packets: u64,
    (bytes, flag): (u64, u32),
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise; pairs and words lie in both ranges.
    unsafe {
        receive(
            block,
            site(from, op),
            packets,
            bytes,
            flag,
            |at, data, count| {
                if count == PAIR {
                    store_payload(dst + at, data);
                } else {
                    store_bytes(dst + at, data.0, count);
                    store_bytes(dst + at + PAYLOAD, data.1, count.saturating_sub(PAYLOAD));
                }
            },
        )
    }
}

/// [`forward_packets`] as a function of numbers.
///
/// # Safety
/// As there.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
unsafe fn forward<B: Block>(
    block: &B,
    from: (u32, u32),
    op: u32,
    dst: u64,
    src: u64,
    (bytes, flag): (u64, u32),
) -> Result<(), Stopped> {
    let memory = block.memory();
    // SAFETY: the caller's promise; pairs and words lie in both ranges.
    unsafe {
        receive(
            block,
            site(from, op),
            src,
            bytes,
            flag,
            |at, (a, b), count| {
                let to = dst + at * (WORD / PAYLOAD);
                if count > PAYLOAD {
                    store_pair(memory, to, [word(a, flag), word(b, flag)]);
                } else {
                    memory.store(to, word(a, flag));
                }
            },
        )
    }
}

/// Waits for the packets of `bytes` bytes, this thread's share of them, and hands on where in the
/// payload they stand, their data, and how many of the eight bytes are meant.
///
/// # Safety
/// `packets` must be valid for the packets of `bytes` and 8-byte aligned.
#[inline(always)]
unsafe fn receive<B: Block>(
    block: &B,
    site: Site,
    packets: u64,
    bytes: u64,
    flag: u32,
    mut take: impl FnMut(u64, (u32, u32), u64),
) -> Result<(), Stopped> {
    let stride = u64::from(block.threads()) * PAIR;
    let mut at = u64::from(block.thread()) * PAIR;
    while at < bytes {
        let count = if bytes - at < PAIR { bytes - at } else { PAIR };
        let from = packets + at * (WORD / PAYLOAD);
        // SAFETY: the words of `count` bytes lie in the packets.
        let data = unsafe {
            if count > PAYLOAD {
                read_pair(block, site, from, flag)?
            } else {
                (crate::packet::read_packet(block, site, from, flag)?, 0)
            }
        };
        take(at, data, count);
        at += stride;
    }
    Ok(())
}
