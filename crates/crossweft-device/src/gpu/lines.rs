//! Lines: packets of 128 bytes, of which 120 are payload, that a warp writes and reads whole.
//!
//! Fifteen sixteenths of what crosses a link is data, where packets of 8 bytes carry half. Links and memory keep the
//! 128 aligned bytes of one instruction of a warp together, which NVIDIA promises for nothing, but NCCL's protocol
//! LL128 rests on, for NVLink from compute capability 7.0 on; whoever uses lines makes sure of the machines
//! (`crossweft_channel::Endpoint::keeps_lines`).
//!
//! Lines come in pairs, written and read by eight lanes side by side: 256 bytes for 15 pieces of 16. Lane `l` has
//! piece `l` in the first and piece `8 + l` in the second line; the last one has the halves of piece 7, and a
//! line's flag behind each. Flags always lie in these places, so no data is ever taken for one, whatever sizes
//! calls have.

use super::packets::{load_bytes, store_bytes, word};
use super::wide::{PIECE, Piece, load16, store16};
use crate::block::Block;
use crate::memory::Memory;
use crate::wait::{Site, Stopped, WaitKind, Waiting};

/// Bytes of a line.
pub const LINE: u64 = 128;
/// Bytes of two.
pub const PAIR: u64 = 2 * LINE;
/// Of which are payload.
pub const PAIR_PAYLOAD: u64 = PAIR - 16;
/// Threads that write and read a pair of lines.
pub const LANES: u32 = 8;

/// The lane that has the flags.
const LAST: u32 = LANES - 1;
/// Bytes of a piece.
const STEP: u64 = PIECE;
/// Threads of a warp.
const WARP: u32 = 32;

/// Two pieces of a lane, those in the first and in the second line.
pub(super) type Pieces = [Piece; 2];

/// Warp: writes a pair of lines at `to`, if this lane's is `active`.
///
/// # Safety
/// `to` must be valid for a pair of lines and aligned to one; lanes of a pair agree on everything.
#[inline(always)]
pub(super) unsafe fn store<B: Block>(
    block: &B,
    (lane, active): (u32, bool),
    to: u64,
    [a, b]: Pieces,
    flag: u32,
) {
    let (at, memory) = (to + u64::from(lane) * STEP, block.memory());
    let flags = word(flag, !flag);
    // One store by all lanes of a line: the values are chosen, not the instruction.
    let (first, second) = if lane == LAST {
        ([word(a.a, a.b), flags], [word(a.c, a.d), flags])
    } else {
        (words(a), words(b))
    };
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "nvptx64")]
        if active {
            memory.store_pair(at, first);
            memory.store_pair(at + LINE, second);
        }
        // Threads of the host do not write together: the flags follow when all have written.
        #[cfg(not(target_arch = "nvptx64"))]
        {
            if active && lane != LAST {
                memory.store_pair(at, first);
                memory.store_pair(at + LINE, second);
            }
            block.warp_any(false);
            if active && lane == LAST {
                memory.store(at, first[0]);
                memory.store_release(at + 8, flags);
                memory.store(at + LINE, second[0]);
                memory.store_release(at + LINE + 8, flags);
            }
        }
    }
}

/// Starts to read this lane's part of a pair of lines at `from`.
///
/// # Safety
/// As for [`store`], if the lane is active.
#[inline(always)]
pub(super) unsafe fn fetch<B: Block>(block: &B, (lane, active): (u32, bool), from: u64) -> Pieces {
    if !active {
        return [Piece::default(); 2];
    }
    let (at, memory) = (from + u64::from(lane) * STEP, block.memory());
    // SAFETY: the caller's promise.
    unsafe {
        let (first, second) = (memory.load_pair(at), memory.load_pair(at + LINE));
        [piece(first), piece(second)]
    }
}

/// Warp: whether what lanes [fetched](fetch) from `from` has not arrived yet: of this lane, and of any. If it
/// has, it is put in order.
///
/// # Safety
/// As for [`fetch`].
#[inline(always)]
pub(super) unsafe fn late<B: Block>(
    block: &B,
    (lane, active): (u32, bool),
    from: u64,
    fetched: &mut Pieces,
    flag: u32,
) -> (bool, bool) {
    // Threads of the host do not read together: data follows the flags, which the last lane looks at.
    #[cfg(not(target_arch = "nvptx64"))]
    if active && lane == LAST {
        let at = from + u64::from(lane) * STEP + 8;
        // SAFETY: the caller's promise.
        unsafe {
            let (first, second) = (
                block.memory().load_acquire(at),
                block.memory().load_acquire(at + LINE),
            );
            *fetched = [piece([0, first]), piece([0, second])];
        }
    }
    let has_flag = |piece: &Piece| piece.c == flag && piece.d == !flag;
    let mine = active && lane == LAST && !(has_flag(&fetched[0]) && has_flag(&fetched[1]));
    let any = block.warp_any(mine);
    if any {
        return (mine, true);
    }
    #[cfg(not(target_arch = "nvptx64"))]
    // SAFETY: the caller's promise.
    unsafe {
        *fetched = fetch(block, (lane, active), from);
    }
    let _ = from;
    if lane == LAST {
        let [first, second] = *fetched;
        fetched[0] = Piece {
            a: first.a,
            b: first.b,
            c: second.a,
            d: second.b,
        };
    }
    (false, false)
}

/// Warp: waits until what was fetched from `from` has arrived.
///
/// # Errors
/// What ends the wait of any of its threads, on all.
///
/// # Safety
/// As for [`fetch`].
#[inline(always)]
pub(super) unsafe fn arrival<B: Block>(
    block: &B,
    this: (u32, bool),
    from: u64,
    seen: &mut Pieces,
    (flag, site): (u32, Site),
) -> Result<(), Stopped> {
    let mut waiting = Waiting {
        site,
        spins: 0,
        expected: flag.into(),
        seen: 0,
    };
    loop {
        // SAFETY: the caller's promise.
        let (mine, any) = unsafe { late(block, this, from, seen, flag) };
        if !any {
            return Ok(());
        }
        let mut outcome = Ok(());
        if mine {
            // The first line that is late.
            waiting.seen = if seen[0].c == flag {
                seen[1].c
            } else {
                seen[0].c
            }
            .into();
            outcome = block.pause(&waiting);
        }
        waiting.spins = waiting.spins.saturating_add(1);
        if block.warp_any(outcome.is_err()) {
            return Err(outcome.err().unwrap_or(Stopped::Aborted));
        }
        // SAFETY: the caller's promise.
        *seen = unsafe { fetch(block, this, from) };
    }
}

/// Where a thread is in a message that a block sends or receives: warps go through pairs of lines round by round.
#[derive(Clone, Copy)]
struct Round {
    /// The first pair of this thread's warp.
    first: u64,
    /// How much further this thread's pair is.
    ahead: u64,
    /// Pairs that the block has in a round.
    step: u64,
    lane: u32,
}

impl Round {
    #[inline(always)]
    fn first<B: Block>(block: &B) -> Self {
        let thread = block.thread();
        Self {
            first: u64::from(thread / WARP * (WARP / LANES)),
            ahead: u64::from(thread % WARP / LANES),
            step: u64::from(block.threads() / LANES),
            lane: thread % LANES,
        }
    }

    #[inline(always)]
    fn next(&mut self) {
        self.first += self.step;
    }

    /// Whether the warp has something of a message of `bytes` bytes in this round.
    #[inline(always)]
    fn is_in(&self, bytes: u64) -> bool {
        self.first * PAIR_PAYLOAD < bytes
    }

    fn pair(&self) -> u64 {
        self.first + self.ahead
    }

    /// Of the lane, whether its pair has something of the message.
    #[inline(always)]
    fn this(&self, bytes: u64) -> (u32, bool) {
        (self.lane, self.pair() * PAIR_PAYLOAD < bytes)
    }

    /// Where the lane's two pieces are in the message, and how much of each there is.
    #[inline(always)]
    fn pieces(&self, bytes: u64) -> [(u64, u64); 2] {
        let at = self.pair() * PAIR_PAYLOAD + u64::from(self.lane) * STEP;
        let part = |at: u64| match bytes.saturating_sub(at) {
            left if left < STEP => left,
            _ => STEP,
        };
        let far = at + u64::from(LANES) * STEP;
        // The last one's place in the second line has the flags.
        let far_part = if self.lane == LAST { 0 } else { part(far) };
        [(at, part(at)), (far, far_part)]
    }
}

/// The first `count` bytes of a piece at any address, the rest zero.
///
/// # Safety
/// `addr` must be valid for them.
#[inline(always)]
unsafe fn load_piece(addr: u64, count: u64) -> Piece {
    let word = |k: u64| {
        let left = count.saturating_sub(k);
        // SAFETY: the caller's promise.
        unsafe { load_bytes(addr + k, left) }
    };
    if count == STEP && addr.is_multiple_of(STEP) {
        // SAFETY: the caller's promise.
        return unsafe { load16(addr) };
    }
    Piece {
        a: word(0),
        b: word(4),
        c: word(8),
        d: word(12),
    }
}

/// The other way round.
///
/// # Safety
/// As for [`load_piece`].
#[inline(always)]
unsafe fn store_piece(addr: u64, piece: Piece, count: u64) {
    let word = |k: u64, data: u32| {
        // SAFETY: the caller's promise.
        unsafe { store_bytes(addr + k, data, count.saturating_sub(k)) };
    };
    if count == STEP && addr.is_multiple_of(STEP) {
        // SAFETY: the caller's promise.
        unsafe { store16(addr, piece) };
        return;
    }
    word(0, piece.a);
    word(4, piece.b);
    word(8, piece.c);
    word(12, piece.d);
}

/// Block: sends `bytes` bytes from `src`, of any alignment, as lines to `to`.
///
/// # Safety
/// The block must have whole warps; `to` must be valid for as many pairs of lines as the bytes take, and aligned to
/// a line, `src` valid for the bytes. Only lines may ever be looked for there.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub unsafe fn copy_to_lines<B: Block>(block: &B, to: u64, src: u64, bytes: u64, flag: u32) {
    let mut round = Round::first(block);
    while round.is_in(bytes) {
        let [near, far] = round.pieces(bytes);
        // SAFETY: the caller's promise.
        unsafe {
            let pieces = [
                load_piece(src + near.0, near.1),
                load_piece(src + far.0, far.1),
            ];
            let at = to + round.pair() * PAIR;
            store(block, round.this(bytes), at, pieces, flag);
        }
        round.next();
    }
}

/// Block: waits for the lines of `bytes` bytes at `from`, and copies them to `dst`, of any alignment. Threads return as
/// they are done, each with what its warp has to say: agree on it ([`Block::sync`]) before others' data is used.
///
/// # Errors
/// [`Stopped`] when the wait hook ends a wait.
///
/// # Safety
/// As for [`copy_to_lines`], the other way round.
#[inline(always)]
pub unsafe fn copy_from_lines<B: Block>(
    block: &B,
    site: Site,
    dst: u64,
    from: u64,
    bytes: u64,
    flag: u32,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise.
    unsafe {
        receive(
            block,
            (site.peer, site.channel),
            site.op,
            dst,
            from,
            (bytes, flag),
        )
    }
}

/// Block: [`copy_from_lines`] of what its threads have in one round, if it is there. Whether this thread's warp is done.
///
/// # Safety
/// As there.
#[inline(always)]
pub(crate) unsafe fn copy_if_there<B: Block>(
    block: &B,
    dst: u64,
    from: u64,
    bytes: u64,
    flag: u32,
) -> bool {
    let round = Round::first(block);
    if !round.is_in(bytes) {
        return true;
    }
    // What takes more rounds is waited for.
    if round.step * PAIR_PAYLOAD < bytes {
        return false;
    }
    let (this, at) = (round.this(bytes), from + round.pair() * PAIR);
    let [near, far] = round.pieces(bytes);
    // SAFETY: the caller's promise.
    unsafe {
        let mut seen = fetch(block, this, at);
        if late(block, this, at, &mut seen, flag).1 {
            return false;
        }
        store_piece(dst + near.0, seen[0], near.1);
        store_piece(dst + far.0, seen[1], far.1);
    }
    true
}

/// [`copy_from_lines`] as a function of numbers: a site passed on would lie in local memory.
///
/// # Safety
/// As there.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
unsafe fn receive<B: Block>(
    block: &B,
    (peer, channel): (u32, u32),
    op: u32,
    dst: u64,
    from: u64,
    (bytes, flag): (u64, u32),
) -> Result<(), Stopped> {
    let site = Site {
        kind: WaitKind::Packet,
        peer,
        channel,
        op,
    };
    let mut round = Round::first(block);
    while round.is_in(bytes) {
        let (this, at) = (round.this(bytes), from + round.pair() * PAIR);
        let [near, far] = round.pieces(bytes);
        // SAFETY: the caller's promise.
        unsafe {
            let mut seen = fetch(block, this, at);
            arrival(block, this, at, &mut seen, (flag, site))?;
            store_piece(dst + near.0, seen[0], near.1);
            store_piece(dst + far.0, seen[1], far.1);
        }
        round.next();
    }
    Ok(())
}

#[inline(always)]
const fn words(piece: Piece) -> [u64; 2] {
    [word(piece.a, piece.b), word(piece.c, piece.d)]
}

#[inline(always)]
#[allow(
    clippy::cast_possible_truncation,
    reason = "words are taken apart into their halves"
)]
const fn piece([low, high]: [u64; 2]) -> Piece {
    Piece {
        a: low as u32,
        b: (low >> 32) as u32,
        c: high as u32,
        d: (high >> 32) as u32,
    }
}
