//! Dispatch and combine of a mixture of experts: what travels, where it lies, and how ranks wait for each other.
//!
//! A token goes once to each rank that has one of its experts, as one *row*: its elements, their scales where they
//! are quantised, and which experts it is for with what weights. [`dispatch`] sends rows and lays out those that
//! came; [`combine`] sends one row back for each of them and sums what came back.
//!
//! A row's place, its *slot*, is the number of this rank's tokens before it that go to the same rank: a prefix sum,
//! so nothing depends on who was first. Rows of source `s` arrive in memory that only `s` writes:
//!
//! ```text
//! memory of a rank:  u64 [ranks] credits: calls of this rank that each rank has read to the end, a line each
//!                    [2] sources of even and odd calls:  [ranks] of
//! source:            u64 [HEAD + most experts] packets: what comes, value and epoch in one word
//!                    u64 [2] flags, a line: that rows, that weights have come
//!                    f32 [max tokens][top-k] weights that are given when combining
//!                    [max tokens] rows
//! row:               elements, scales | u32 token, u32 unused, i32 [top-k] local experts, f32 [top-k] weights
//! ```
//!
//! Calls (a dispatch, a combine) are numbered in order, the same on all ranks. Call `t` writes what is for `t & 1`,
//! once its receiver has said that it has read call `t - 2` to the end, so two may be under way. Every rank tells
//! every other how much comes, be it nothing, with a hash of the call: so ranks that make different calls find out.
//! Nothing is ever cleared, because packets carry the call's [epoch](epoch_of) and flags its number.
//!
//! | what | sender | receiver | why it is enough |
//! |---|---|---|---|
//! | packet | one relaxed store | relaxed loads until the epoch matches | value and epoch are one word |
//! | rows, weights | plain, then flag `store release` | flag `load acquire`, then plain | release/acquire on the flag |
//! | reuse | receiver: credit `store release` | sender: `load acquire`, then anything | release/acquire on the credit |

pub mod combine;
pub mod dispatch;
pub mod rows;

use crate::block::Block;
use crate::memory::Memory;
use crate::wait::{Site, Stopped, WaitKind, Waiting, reached, wait_for};

/// Words of a source's packets before the counts of experts.
pub const HEAD: u32 = 3;
/// The packet with the hash of the call.
const HASH: u32 = 0;
/// The packet with the call's [signature](Call::signature).
const SIGNATURE: u32 = 1;
/// The packet with the number of rows.
const ROWS: u32 = 2;

/// Bytes of a credit, and of a source's flags.
const LINE: u64 = 64;
/// The flag that rows have come.
const ROWS_FLAG: u64 = 0;
/// The flag that weights have come.
const WEIGHTS_FLAG: u64 = 8;

/// No slot, row or expert.
pub const NONE: u32 = u32::MAX;
/// The most experts a token may go to.
pub const MAX_TOP_K: u32 = 32;
/// The most ranks of a group.
pub const MAX_RANKS: u32 = 16;
/// Elements that share a scale.
pub const GROUP: u64 = 128;

/// What a rank waits for; [`Site::channel`] of the wait.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// That the peer has read the call before the last.
    Credit = 0,
    /// What will come from the peer.
    Counts = 1,
    /// The peer's rows.
    Rows = 2,
    /// Weights that the peer gave when combining.
    Weights = 3,
    /// The other thread blocks of this rank.
    Blocks = 4,
}

/// Sizes that all ranks of a group agree on; they determine where everything lies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    /// Number of ranks.
    pub ranks: u32,
    /// The most tokens of a rank in one call.
    pub max_tokens: u32,
    /// The most experts of a token.
    pub top_k: u32,
    /// Experts of all ranks.
    pub experts: u32,
    /// Room for the elements of a row: the most that a dispatch or a combine sends.
    pub payload_bytes: u64,
}

const fn align(bytes: u64, to: u64) -> u64 {
    bytes.div_ceil(to) * to
}

impl Geometry {
    /// The first expert of `rank`, and for `ranks` one past the last: ranks have equally many, the first ones one more
    /// where that does not go.
    #[inline(always)]
    #[must_use]
    pub const fn first_expert(&self, rank: u32) -> u32 {
        let Some(each) = self.experts.checked_div(self.ranks) else {
            return 0;
        };
        let more = self.experts - each * self.ranks;
        rank * each + if rank < more { rank } else { more }
    }

    /// Experts of `rank`.
    #[inline(always)]
    #[must_use]
    pub const fn local_experts(&self, rank: u32) -> u32 {
        self.first_expert(rank + 1) - self.first_expert(rank)
    }

    /// The most experts of any rank.
    #[inline(always)]
    #[must_use]
    pub const fn most_experts(&self) -> u32 {
        self.local_experts(0)
    }

    /// Where a row says what it is.
    const fn meta(&self) -> u64 {
        align(self.payload_bytes, 16)
    }

    /// Bytes from one row to the next.
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        align(self.meta() + 8 + 8 * self.top_k as u64, LINE)
    }

    const fn packet_bytes(&self) -> u64 {
        align(8 * (HEAD + self.most_experts()) as u64, LINE)
    }

    const fn weight_bytes(&self) -> u64 {
        4 * self.max_tokens as u64 * self.top_k as u64
    }

    /// Bytes that one parity of calls takes of one source.
    const fn source_bytes(&self) -> u64 {
        self.packet_bytes()
            + LINE
            + align(self.weight_bytes(), LINE)
            + self.max_tokens as u64 * self.row_bytes()
    }

    /// Bytes of each rank's memory.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        let ranks = self.ranks as u64;
        ranks * LINE + 2 * ranks * self.source_bytes()
    }

    /// Where `rank` says how many calls it has read.
    const fn credit(&self, rank: u32) -> u64 {
        rank as u64 * LINE
    }

    const fn source(&self, call: u64, source: u32) -> u64 {
        let ranks = self.ranks as u64;
        ranks * LINE + ((call & 1) * ranks + source as u64) * self.source_bytes()
    }

    const fn packet(&self, call: u64, source: u32, index: u32) -> u64 {
        self.source(call, source) + 8 * index as u64
    }

    const fn flag(&self, call: u64, source: u32, which: u64) -> u64 {
        self.source(call, source) + self.packet_bytes() + which
    }

    const fn weights(&self, call: u64, source: u32, slot: u32) -> u64 {
        self.source(call, source) + self.packet_bytes() + LINE + 4 * slot as u64 * self.top_k as u64
    }

    const fn row(&self, call: u64, source: u32, slot: u32) -> u64 {
        self.source(call, source)
            + self.packet_bytes()
            + LINE
            + align(self.weight_bytes(), LINE)
            + slot as u64 * self.row_bytes()
    }
}

/// One rank's prepared group.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Group {
    /// Sizes.
    pub geometry: Geometry,
    /// Address of a `u64` for each rank: where its memory is mapped here.
    pub memories: u64,
    /// Address of a `u64` for each rank: not 0 if it is left out.
    pub masked: u64,
    /// Address of [`STATE_LINES`] cache lines, zeroed at first: calls sent, calls completed, arrivals of thread blocks.
    pub state: u64,
    /// Address of `u32 [blocks][ranks]`: rows of each thread block's tokens to each rank.
    pub block_rows: u64,
    /// Address of `u32 [blocks][experts]`: the same to each expert.
    pub block_experts: u64,
    /// Address of a row for each thread block, in which it quantises; 64-byte aligned.
    pub staging: u64,
    /// What all calls of this group have in common with those of no other.
    pub salt: u32,
    /// This rank.
    pub rank: u32,
    /// Thread blocks of each launch.
    pub blocks: u32,
}

/// Cache lines of a group's state.
pub const STATE_LINES: usize = 3;
const SENT: u64 = 0;
const COMPLETED: u64 = LINE;
const ARRIVALS: u64 = 2 * LINE;

/// Forgets who has arrived at a barrier, after a launch that was stopped.
///
/// # Safety
/// The group must be prepared, and no launch of it under way on this rank.
pub unsafe fn clear_barrier<M: Memory>(memory: &M, group: &Group) {
    // SAFETY: the word is this rank's.
    unsafe { memory.store(group.state + ARRIVALS, 0) }
}

/// How received rows are laid out. The discriminants are part of the device ABI.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Placement {
    /// A row for each expert that it is for: `[local experts, ranks * max tokens]`.
    #[default]
    ExpertMajor = 0,
    /// The same without gaps, each expert's rows padded to a multiple of an alignment.
    ExpertPacked = 1,
    /// A row once: `[ranks, max tokens]`.
    RankMajor = 2,
    /// The same without gaps.
    Flat = 3,
}

impl Placement {
    /// Whether rows are grouped by expert.
    #[inline(always)]
    #[must_use]
    pub const fn is_by_expert(self) -> bool {
        matches!(self, Self::ExpertMajor | Self::ExpertPacked)
    }
}

/// What a rank knows of one forward pass: where its tokens go, and where those that came lie. Tables have the group's
/// most tokens, top-k and experts as strides.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Routes {
    /// Address of `i32 [max tokens][top-k]`: the experts of this rank's tokens, below 0 for none.
    pub experts: u64,
    /// Address of `f32 [max tokens][top-k]`: their weights.
    pub weights: u64,
    /// Address of `u32 [max tokens][ranks]`: slots of this rank's tokens.
    pub slots: u64,
    /// Address of `u32 [ranks]`: rows to each rank.
    pub sent: u64,
    /// Address of `u32 [ranks]`: rows from each source.
    pub received: u64,
    /// Address of `u32 [ranks][most experts]`: rows from each source for each local expert.
    pub counts: u64,
    /// Address of `u32 [ranks][most experts]`: the first of those among the rows that are laid out.
    pub begins: u64,
    /// Address of `u32 [ranks][most experts]`, in which a dispatch counts.
    pub cursors: u64,
    /// Address of `u32 [ranks]`: the first row of each source, where rows are not grouped by expert.
    pub bases: u64,
    /// Address of `u32 [most experts + 1]`: the first row of each expert where rows are, and how many rows there are
    /// in all.
    pub offsets: u64,
    /// Address of `u32 [ranks][max tokens][top-k]`: where each row lies for each of its experts; [`NONE`] if that is
    /// not here.
    pub positions: u64,
    /// Address of `f32 [ranks][max tokens][top-k]`: the weights that came with rows.
    pub received_weights: u64,
    /// Tokens of this rank.
    pub tokens: u32,
    /// Experts of each token of this pass.
    pub top_k: u32,
    /// How rows are laid out.
    pub placement: Placement,
    /// For [`Placement::ExpertPacked`]: what each expert's rows are padded to a multiple of; at least 1.
    pub alignment: u32,
}

impl Routes {
    #[inline(always)]
    const fn row(geometry: &Geometry, source: u32, slot: u32) -> u64 {
        source as u64 * geometry.max_tokens as u64 + slot as u64
    }
}

/// What ranks must call alike.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The call's parameters, as the host numbers them.
    pub signature: u32,
}

impl Call {
    /// The hash of call number `call` of a group.
    #[inline(always)]
    const fn hash(self, salt: u32, call: u64) -> u32 {
        let x = (salt as u64) << 32 | self.signature as u64;
        let x = x.wrapping_add(call.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 32) as u32
    }
}

/// What the packets of call number `call` are flagged with: never 0, and the same again after 2^32 - 1 calls.
#[inline(always)]
#[must_use]
pub const fn epoch_of(call: u64) -> u32 {
    (call % u32::MAX as u64) as u32 + 1
}

/// What a peer's packets say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// The hash of its call.
    pub hash: u32,
    /// Its call.
    pub call: Call,
}

/// What `source` has announced for call number `call`, if it has. For the host, which looks who is missing.
///
/// # Safety
/// The group must be prepared.
pub unsafe fn announced<M: Memory>(
    memory: &M,
    group: &Group,
    call: u64,
    source: u32,
) -> Option<Announced> {
    let word = |index| {
        // SAFETY: the caller's promise.
        let word = unsafe { packet(memory, group, (call, source), index) };
        ((word >> 32) as u32 == epoch_of(call)).then_some(word as u32)
    };
    Some(Announced {
        hash: word(HASH)?,
        call: Call {
            signature: word(SIGNATURE)?,
        },
    })
}

/// Whether `peer` has done its part of `phase` of call number `call`. For the host, which looks who is missing.
///
/// # Safety
/// The group must be prepared.
pub unsafe fn has_done<M: Memory>(
    memory: &M,
    group: &Group,
    phase: Phase,
    call: u64,
    peer: u32,
) -> bool {
    let geometry = &group.geometry;
    // SAFETY: words of this rank's own memory.
    unsafe {
        let own = address_of(memory, group, group.rank);
        let flag = |which| {
            reached(
                memory.load(own + geometry.flag(call, peer, which)),
                call + 1,
            )
        };
        match phase {
            Phase::Credit => {
                let read = memory.load(own + geometry.credit(peer));
                reached(read, call.saturating_sub(1))
            }
            Phase::Counts => announced(memory, group, call, peer).is_some(),
            Phase::Rows => flag(ROWS_FLAG),
            Phase::Weights => flag(WEIGHTS_FLAG),
            Phase::Blocks => true,
        }
    }
}

/// # Safety
/// The group must be prepared, and `rank` one of its ranks. So for all functions below.
#[inline(always)]
unsafe fn address_of<M: Memory>(memory: &M, group: &Group, rank: u32) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { memory.read(group.memories + 8 * u64::from(rank)) }
}

#[inline(always)]
unsafe fn is_masked<M: Memory>(memory: &M, group: &Group, rank: u32) -> bool {
    // SAFETY: the caller's promise.
    unsafe { memory.load(group.masked + 8 * u64::from(rank)) != 0 }
}

/// The number of the next call to send.
#[inline(always)]
unsafe fn next_to_send<B: Block>(block: &B, group: &Group) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { block.memory().load(group.state + SENT) }
}

/// The number of the next call to complete.
#[inline(always)]
unsafe fn next_to_complete<B: Block>(block: &B, group: &Group) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { block.memory().load(group.state + COMPLETED) }
}

const fn site(kind: WaitKind, peer: u32, phase: Phase) -> Site {
    Site {
        kind,
        peer,
        channel: phase as u32,
        op: Site::NO_OP,
    }
}

/// Block: waits on thread 0 for something of every rank that is not masked.
#[inline(always)]
unsafe fn for_each_peer<B: Block>(
    block: &B,
    group: &Group,
    mut wait: impl FnMut(u32) -> Result<(), Stopped>,
) -> Result<(), Stopped> {
    let mut mine = Ok(());
    let mut peer = 0;
    while block.thread() == 0 && peer < group.geometry.ranks && mine.is_ok() {
        // SAFETY: the caller's promise.
        if unsafe { !is_masked(block.memory(), group, peer) } {
            mine = wait(peer);
        }
        peer += 1;
    }
    block.sync(mine)
}

/// Block: waits until this call's place in every rank's memory is free.
#[inline(always)]
unsafe fn wait_for_credits<B: Block>(block: &B, group: &Group, call: u64) -> Result<(), Stopped> {
    let memory = block.memory();
    // All calls but the last one must have been read; nothing at first.
    let target = call.saturating_sub(1);
    // SAFETY: the caller's promise; credits are words of this rank's memory.
    unsafe {
        let own = address_of(memory, group, group.rank);
        for_each_peer(block, group, |peer| {
            let at = own + group.geometry.credit(peer);
            let site = site(WaitKind::Taken, peer, Phase::Credit);
            let load = || memory.load_acquire(at);
            wait_for(block, site, target, load, |seen| reached(seen, target)).map(drop)
        })
    }
}

/// Block: tells every rank, even those masked, who would otherwise never be able to come back, that this call was read.
/// After a barrier of blocks; one block does it.
#[inline(always)]
unsafe fn give_credits<B: Block>(block: &B, group: &Group, call: u64) {
    let memory = block.memory();
    let mut peer = block.thread();
    while peer < group.geometry.ranks {
        // SAFETY: the caller's promise; the word is for this rank to write.
        unsafe {
            let at = address_of(memory, group, peer) + group.geometry.credit(group.rank);
            memory.store_release(at, call + 1);
        }
        block.wake(peer);
        peer += block.threads();
    }
}

/// Block: raises a flag of this call at every rank that is not masked, after a barrier of blocks; one block does it.
#[inline(always)]
unsafe fn raise_flags<B: Block>(block: &B, group: &Group, call: u64, which: u64) {
    let memory = block.memory();
    let mut peer = block.thread();
    while peer < group.geometry.ranks {
        // SAFETY: the caller's promise; the word is for this rank to write.
        unsafe {
            if !is_masked(memory, group, peer) {
                let at = group.geometry.flag(call, group.rank, which);
                memory.store_release(address_of(memory, group, peer) + at, call + 1);
            }
        }
        block.wake(peer);
        peer += block.threads();
    }
}

/// Waits until `source` has raised a flag of this call. One thread.
#[inline(always)]
unsafe fn wait_for_flag<B: Block>(
    block: &B,
    group: &Group,
    call: u64,
    source: u32,
    which: u64,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let phase = match which {
        ROWS_FLAG => Phase::Rows,
        _ => Phase::Weights,
    };
    // SAFETY: the caller's promise; flags are words of this rank's memory.
    let at =
        unsafe { address_of(memory, group, group.rank) } + group.geometry.flag(call, source, which);
    let site = site(WaitKind::Message, source, phase);
    let target = call + 1;
    // SAFETY: as above.
    let load = || unsafe { memory.load_acquire(at) };
    wait_for(block, site, target, load, |seen| reached(seen, target)).map(drop)
}

/// Stores the packet that tells `peer` a value of this call.
#[inline(always)]
unsafe fn send_packet<B: Block>(
    block: &B,
    group: &Group,
    (call, peer): (u64, u32),
    index: u32,
    value: u32,
) {
    let memory = block.memory();
    let word = u64::from(value) | u64::from(epoch_of(call)) << 32;
    // SAFETY: the caller's promise; the word is for this rank to write.
    unsafe {
        let at = group.geometry.packet(call, group.rank, index);
        memory.store(address_of(memory, group, peer) + at, word);
    }
}

/// Block: sends the packets that every call has.
#[inline(always)]
unsafe fn send_head<B: Block>(
    block: &B,
    group: &Group,
    (call, peer): (u64, u32),
    what: Call,
    rows: u32,
) {
    if block.thread() == 0 {
        // SAFETY: the caller's promise.
        unsafe {
            send_packet(block, group, (call, peer), SIGNATURE, what.signature);
            send_packet(block, group, (call, peer), ROWS, rows);
            send_packet(
                block,
                group,
                (call, peer),
                HASH,
                what.hash(group.salt, call),
            );
        }
    }
}

/// The packet in which `source` tells a value of this call, as it is now: value and epoch.
#[inline(always)]
unsafe fn packet<M: Memory>(
    memory: &M,
    group: &Group,
    (call, source): (u64, u32),
    index: u32,
) -> u64 {
    // SAFETY: the caller's promise; packets are words of this rank's memory.
    unsafe {
        let own = address_of(memory, group, group.rank);
        memory.load(own + group.geometry.packet(call, source, index))
    }
}

/// Waits for the packet in which `source` tells a value of this call.
#[inline(always)]
unsafe fn wait_for_packet<B: Block>(
    block: &B,
    group: &Group,
    (call, source): (u64, u32),
    index: u32,
) -> Result<u32, Stopped> {
    let epoch = u64::from(epoch_of(call));
    let site = site(WaitKind::Message, source, Phase::Counts);
    let mut word = 0;
    let load = || {
        // SAFETY: the caller's promise.
        word = unsafe { packet(block.memory(), group, (call, source), index) };
        word >> 32
    };
    wait_for(block, site, epoch, load, |seen| seen == epoch)?;
    Ok(word as u32)
}

/// Waits for the packets that every call has; returns the number of rows. One thread.
#[inline(always)]
unsafe fn wait_for_head<B: Block>(
    block: &B,
    group: &Group,
    (call, source): (u64, u32),
    what: Call,
) -> Result<u32, Stopped> {
    // SAFETY: the caller's promise.
    let (hash, rows) = unsafe {
        let hash = wait_for_packet(block, group, (call, source), HASH)?;
        (hash, wait_for_packet(block, group, (call, source), ROWS)?)
    };
    let expected = what.hash(group.salt, call);
    if hash != expected || rows > group.geometry.max_tokens {
        return Err(refuse(block, source, expected, hash));
    }
    Ok(rows)
}

/// Ends the launch because `source` makes another call.
#[cold]
fn refuse<B: Block>(block: &B, source: u32, expected: u32, seen: u32) -> Stopped {
    block.refuse(&Waiting {
        site: site(WaitKind::Envelope, source, Phase::Counts),
        spins: 0,
        expected: expected.into(),
        seen: seen.into(),
    })
}

/// Block: returns when all thread blocks are here, and orders what they did before.
#[inline(always)]
unsafe fn barrier<B: Block>(block: &B, group: &Group) -> Result<(), Stopped> {
    block.sync(Ok(()))?;
    let blocks = u64::from(group.blocks);
    let mut mine = Ok(());
    if block.thread() == 0 && blocks > 1 {
        let memory = block.memory();
        let counter = group.state + ARRIVALS;
        let site = site(WaitKind::Barrier, group.rank, Phase::Blocks);
        // SAFETY: the caller's promise; the word is this rank's.
        unsafe {
            let before = memory.fetch_add(counter, 1);
            // Every block arrives once a round, so rounds are whole multiples.
            let target = (before / blocks + 1) * blocks;
            let load = || memory.load_acquire(counter);
            mine = wait_for(block, site, target, load, |seen| reached(seen, target)).map(drop);
        }
    }
    block.sync(mine)
}

/// The part `index` of `of` of a number of things.
#[inline(always)]
const fn share(count: u32, index: u32, of: u32) -> (u32, u32) {
    const fn at(count: u32, index: u32, of: u32) -> u32 {
        (count as u64 * index as u64 / of as u64) as u32
    }
    (at(count, index, of), at(count, index + 1, of))
}
