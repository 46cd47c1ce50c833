//! Dispatch and combine of a mixture of experts: what travels, where it lies, and how ranks wait for each other.
//!
//! A token goes once to each rank that has one of its experts, as one *row*: its elements, their scales where they
//! are quantised, and which experts it is for with what weights. [`dispatch`] sends rows and lays out those that
//! came; [`combine`] sends one row back for each of them and sums what came back.
//!
//! A row's place, its *slot*, is the number of this rank's tokens before it that go to the same rank: a prefix sum,
//! so nothing depends on who was first. So is its *place* among its source's rows for an expert. Rows of source `s` arrive in memory that only `s` writes:
//!
//! ```text
//! memory of a rank:  u64 [ranks] credits: calls of this rank that each rank has read to the end, a line each
//!                    [2] sources of even and odd calls:  [ranks] of
//! source:            u64 [HEAD + most experts] packets: what comes, value and epoch in one word
//!                    u64 [2] flags, a line: that rows, that weights have come
//!                    f32 [max tokens][top-k] weights that are given when combining
//!                    [max tokens] rows
//! row:               elements, scales | meta
//! meta:              u32 token, u32 unused, i32 [top-k] local experts, u32 [top-k] places, f32 [top-k] weights
//! ```
//!
//! Where the machine keeps lines ([`crate::gpu::lines`]), rows are lines: [`crate::gpu::moe::lines`].
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
/// The packet with the number of rows, which is read together with the hash.
const ROWS: u32 = 1;
/// The packet with the call's [signature](Call::signature).
const SIGNATURE: u32 = 2;

/// Bytes of a credit, and of a source's flags.
const LINE: u64 = 64;
/// The flag that rows have come.
pub(crate) const ROWS_FLAG: u64 = 0;
/// The flag that weights have come.
pub(crate) const WEIGHTS_FLAG: u64 = 8;

/// No slot, row or expert.
pub const NONE: u32 = u32::MAX;
/// The most experts a token may go to.
pub const MAX_TOP_K: u32 = 32;
/// The most ranks of a group.
pub const MAX_RANKS: u32 = 16;
/// Tokens whose marks share a word.
pub const CHUNK: u32 = 64;
/// So many tokens at most are marked by every thread block for itself, rather than by all for each other.
pub const ALONE: u32 = 256;
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
    /// Experts that exist, for nobody's: the caller has named one that does not.
    Choices = 5,
}

/// Sizes that all ranks of a group agree on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
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
    /// Whether rows are lines.
    pub lines: bool,
}

/// Where everything lies in the memory of a group of some [`Sizes`], and whose experts are whose. Computed once, because
/// device code asks again and again.
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
    /// Experts of each rank, of which the first `more` have one more.
    each: u32,
    more: u32,
    /// Whether rows are lines: 0 or 1.
    lines: u32,
    reserved: u32,
    payload_bytes: u64,
    /// Bytes from one row to the next.
    row_bytes: u64,
    /// Bytes of all credits.
    credit_bytes: u64,
    /// Bytes of a source's packets; where its rows begin; bytes that one parity of calls takes of it.
    packet_bytes: u64,
    rows_at: u64,
    source_bytes: u64,
}

#[inline(always)]
pub(crate) const fn align(bytes: u64, to: u64) -> u64 {
    match (bytes + to - 1).checked_div(to) {
        Some(count) => count * to,
        None => bytes,
    }
}

impl Geometry {
    /// For groups of these sizes.
    #[must_use]
    pub const fn new(sizes: Sizes) -> Self {
        let Sizes {
            ranks,
            max_tokens,
            top_k,
            experts,
            payload_bytes,
            lines,
        } = sizes;
        let each = match experts.checked_div(ranks) {
            Some(each) => each,
            None => 0,
        };
        let mut this = Self {
            ranks,
            max_tokens,
            top_k,
            experts,
            each,
            more: experts - each * ranks,
            lines: lines as u32,
            reserved: 0,
            payload_bytes,
            row_bytes: 0,
            credit_bytes: 0,
            packet_bytes: 0,
            rows_at: 0,
            source_bytes: 0,
        };
        let alignment = if lines { crate::gpu::lines::LINE } else { LINE };
        this.row_bytes = match lines {
            true => crate::gpu::moe::lines::row_bytes(payload_bytes, this.meta_bytes()),
            false => align(this.meta() + this.meta_bytes(), LINE),
        };
        this.credit_bytes = align(ranks as u64 * LINE, alignment);
        this.packet_bytes = align(8 * (HEAD + this.most_experts()) as u64, LINE);
        let weight_bytes = align(4 * max_tokens as u64 * top_k as u64, LINE);
        this.rows_at = align(this.packet_bytes + LINE + weight_bytes, alignment);
        this.source_bytes = this.rows_at + max_tokens as u64 * this.row_bytes;
        this
    }

    /// The first expert of `rank`, and for `ranks` one past the last: ranks have equally many, the first ones one more
    /// where that does not go.
    #[inline(always)]
    #[must_use]
    pub const fn first_expert(&self, rank: u32) -> u32 {
        rank * self.each + if rank < self.more { rank } else { self.more }
    }

    /// The rank that has `expert`, which must be one.
    #[inline(always)]
    #[must_use]
    pub const fn rank_of(&self, expert: u32) -> u32 {
        // Ranks below `more` have one more.
        let beyond = self.more * (self.each + 1);
        let (before, rest, each) = match expert < beyond {
            true => (0, expert, self.each + 1),
            false => (self.more, expert - beyond, self.each),
        };
        match rest.checked_div(each) {
            Some(ranks) => before + ranks,
            None => 0,
        }
    }

    /// Experts of `rank`.
    #[inline(always)]
    #[must_use]
    pub const fn local_experts(&self, rank: u32) -> u32 {
        self.each + (rank < self.more) as u32
    }

    /// The most experts of any rank.
    #[inline(always)]
    #[must_use]
    pub const fn most_experts(&self) -> u32 {
        self.local_experts(0)
    }

    /// [`CHUNK`]s of the most tokens.
    #[inline(always)]
    #[must_use]
    pub const fn chunks(&self) -> u32 {
        self.max_tokens.div_ceil(CHUNK)
    }

    /// Words of one of the halves of [`Group::marks`].
    #[inline(always)]
    #[must_use]
    pub const fn mark_words(&self, blocks: u32) -> u64 {
        let together = self.chunks() as u64 * self.marked() as u64;
        // Where rows are lines, blocks that are alone mark in memory of their own.
        let alone = match self.lines {
            0 => blocks as u64 * self.marks_alone(),
            _ => 0,
        };
        if together > alone { together } else { alone }
    }

    /// Words that a thread block has for itself.
    #[inline(always)]
    const fn marks_alone(&self) -> u64 {
        let (all, most) = (self.chunks(), ALONE.div_ceil(CHUNK));
        let chunks = if all < most { all } else { most };
        chunks as u64 * self.marked() as u64
    }

    /// Experts and ranks, for which tokens are marked.
    #[inline(always)]
    pub(crate) const fn marked(&self) -> u32 {
        self.experts + self.ranks
    }

    /// Where a row says what it is.
    #[inline(always)]
    const fn meta(&self) -> u64 {
        align(self.payload_bytes, 16)
    }

    /// Bytes from one row to the next.
    #[inline(always)]
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bytes of what a row says of itself.
    #[inline(always)]
    pub(crate) const fn meta_bytes(&self) -> u64 {
        8 + 12 * self.top_k as u64
    }

    /// Bytes of each rank's memory.
    #[inline(always)]
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.credit_bytes + 2 * self.ranks as u64 * self.source_bytes
    }

    /// Where `rank` says how many calls it has read.
    #[inline(always)]
    pub(crate) const fn credit(&self, rank: u32) -> u64 {
        rank as u64 * LINE
    }

    #[inline(always)]
    const fn source(&self, call: u64, source: u32) -> u64 {
        let ranks = self.ranks as u64;
        self.credit_bytes + ((call & 1) * ranks + source as u64) * self.source_bytes
    }

    #[inline(always)]
    const fn packet(&self, call: u64, source: u32, index: u32) -> u64 {
        self.source(call, source) + 8 * index as u64
    }

    #[inline(always)]
    pub(crate) const fn flag(&self, call: u64, source: u32, which: u64) -> u64 {
        self.source(call, source) + self.packet_bytes + which
    }

    #[inline(always)]
    pub(crate) const fn weights(&self, call: u64, source: u32, slot: u32) -> u64 {
        self.source(call, source) + self.packet_bytes + LINE + 4 * slot as u64 * self.top_k as u64
    }

    #[inline(always)]
    pub(crate) const fn row(&self, call: u64, source: u32, slot: u32) -> u64 {
        self.source(call, source) + self.rows_at + slot as u64 * self.row_bytes
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
    /// Where this rank's memory is.
    pub own: u64,
    /// Address of a `u64` for each rank: not 0 if it is left out.
    pub masked: u64,
    /// Address of [`STATE_LINES`] cache lines, zeroed at first: calls sent, calls completed, arrivals of thread
    /// blocks at barriers, whether a launch was stopped, thread blocks that have sent and received, dispatches.
    pub state: u64,
    /// Address of two halves of [`Geometry::mark_words`], of dispatches by turns; zero at first. `u64 [chunks][experts +
    /// ranks]`, one for all or one for each thread block: a bit for each of a [`CHUNK`] of this rank's tokens that goes
    /// to an expert, to a rank. Sums of bits are counts and places, whoever was first.
    pub marks: u64,
    /// Address of `u32 [blocks][ranks]`: whether each rank sends sums back, as a thread block has found.
    pub returns: u64,
    /// Address of [`staging_bytes`](Self::staging_bytes) for each warp of each thread block, in which it quantises;
    /// 64-byte aligned.
    pub staging: u64,
    /// Room for as much of a row as a warp has at a time, quantised, with its scales.
    pub staging_bytes: u64,
    /// What all calls of this group have in common with those of no other.
    pub salt: u32,
    /// This rank.
    pub rank: u32,
    /// Thread blocks of each launch.
    pub blocks: u32,
}

/// Cache lines of a group's state.
pub const STATE_LINES: usize = 7;
/// Where in it the number of the next call to send is.
pub const SENT: u64 = 0;
/// Where the number of the next call to complete is.
pub const COMPLETED: u64 = LINE;
const ARRIVALS: u64 = 2 * LINE;
const STOPPED: u64 = 3 * LINE;
/// Thread blocks that have sent, that have received.
pub(crate) const SENDERS: u64 = 4 * LINE;
pub(crate) const RECEIVERS: u64 = 5 * LINE;
/// Dispatches sent.
pub(crate) const DISPATCHES: u64 = 6 * LINE;

/// Whether a launch was [`stop`]ped. For launches that follow one another without the host.
///
/// # Safety
/// The group must be prepared. So for [`stop`].
#[inline(always)]
pub unsafe fn is_stopped<M: Memory>(memory: &M, group: &Group) -> bool {
    // SAFETY: the word is this rank's.
    unsafe { memory.load(group.state + STOPPED) != 0 }
}

/// Ends the launches that follow.
///
/// # Safety
/// As for [`is_stopped`].
#[inline(always)]
pub unsafe fn stop<M: Memory>(memory: &M, group: &Group) {
    // SAFETY: the word is this rank's. Every thread that is stopped writes the same.
    unsafe { memory.store(group.state + STOPPED, 1) }
}

/// Forgets what a launch that was stopped has left: that it was, who has arrived at a barrier, and marks. `sent` is how many
/// calls had been sent before it, which is launched again: some of its thread blocks may have come to their end, and have
/// counted it.
///
/// # Safety
/// The group must be prepared, and no launch of it under way on this rank.
pub unsafe fn clear<M: Memory>(memory: &M, group: &Group, sent: u64) {
    let geometry = &group.geometry;
    let zero = |at: u64, words: u64| {
        let mut word = 0;
        while word < words {
            // SAFETY: the words are this rank's.
            unsafe { memory.store(at + 8 * word, 0) };
            word += 1;
        }
    };
    zero(group.state + ARRIVALS, 1);
    zero(group.state + STOPPED, 1);
    zero(group.state + RECEIVERS, 1);
    zero(group.marks, 2 * geometry.mark_words(group.blocks));
    // SAFETY: as above. Where rows are lines, senders are counted from the first call on.
    unsafe {
        memory.store(group.state + SENT, sent);
        memory.store(group.state + SENDERS, sent * u64::from(group.blocks));
    }
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
/// most tokens, top-k and experts as strides. Those from `received` to `offsets` are a thread block's own.
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
    /// Address of `u32 [most experts]`, in which a dispatch adds up.
    pub totals: u64,
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
    /// Bytes from the tables of a thread block to those of the next.
    pub stride: u64,
    /// Tokens of this rank.
    pub tokens: u32,
    /// Experts of each token of this pass.
    pub top_k: u32,
    /// How rows are laid out.
    pub placement: Placement,
    /// For [`Placement::ExpertPacked`]: what each expert's rows are padded to a multiple of; at least 1.
    pub alignment: u32,
}

/// Where in [`Routes`] the addresses of a thread block's own tables begin and end.
pub const BLOCK_TABLES: (usize, usize) = (
    core::mem::offset_of!(Routes, received),
    core::mem::offset_of!(Routes, positions),
);

impl Routes {
    /// With the tables of thread block `index`; `self` has those of the first.
    #[inline(always)]
    #[must_use]
    pub const fn of_block(self, index: u32) -> Self {
        self.moved(index as u64 * self.stride)
    }

    /// With a block's own tables moved by so many bytes, modulo 2^64.
    #[inline(always)]
    #[must_use]
    pub const fn moved(self, by: u64) -> Self {
        Self {
            received: self.received.wrapping_add(by),
            counts: self.counts.wrapping_add(by),
            begins: self.begins.wrapping_add(by),
            totals: self.totals.wrapping_add(by),
            bases: self.bases.wrapping_add(by),
            offsets: self.offsets.wrapping_add(by),
            ..self
        }
    }

    #[inline(always)]
    pub(crate) const fn row(geometry: &Geometry, source: u32, slot: u32) -> u64 {
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

/// What `source` has announced for call number `call`, if it has. For the host, which looks who is missing; `word` reads
/// a word at an offset of this rank's memory.
pub fn announced(
    geometry: &Geometry,
    word: impl Fn(u64) -> u64,
    call: u64,
    source: u32,
) -> Option<Announced> {
    let value = |index| {
        let packet = word(geometry.packet(call, source, index));
        ((packet >> 32) as u32 == epoch_of(call)).then_some(packet as u32)
    };
    Some(Announced {
        hash: value(HASH)?,
        call: Call {
            signature: value(SIGNATURE)?,
        },
    })
}

/// Whether `peer` has done its part of `phase` of call number `call`. For the host, as [`announced`].
pub fn has_done(
    geometry: &Geometry,
    word: impl Fn(u64) -> u64,
    phase: Phase,
    call: u64,
    peer: u32,
) -> bool {
    let flag = |which| reached(word(geometry.flag(call, peer, which)), call + 1);
    match phase {
        Phase::Credit => reached(word(geometry.credit(peer)), call.saturating_sub(1)),
        Phase::Counts => announced(geometry, word, call, peer).is_some(),
        Phase::Rows => flag(ROWS_FLAG),
        Phase::Weights => flag(WEIGHTS_FLAG),
        Phase::Blocks | Phase::Choices => true,
    }
}

/// # Safety
/// The group must be prepared, and `rank` one of its ranks. So for all functions below.
#[inline(always)]
pub(crate) unsafe fn address_of<M: Memory>(memory: &M, group: &Group, rank: u32) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { memory.read(group.memories + 8 * u64::from(rank)) }
}

#[inline(always)]
pub(crate) unsafe fn is_masked<M: Memory>(memory: &M, group: &Group, rank: u32) -> bool {
    // SAFETY: the caller's promise.
    unsafe { memory.read::<u64>(group.masked + 8 * u64::from(rank)) != 0 }
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

pub(crate) const fn site(kind: WaitKind, peer: u32, phase: Phase) -> Site {
    Site {
        kind,
        peer,
        channel: phase as u32,
        op: Site::NO_OP,
    }
}

/// Block: waits for something of every rank that is not masked; a thread waits for a rank.
#[inline(always)]
pub(crate) unsafe fn for_each_peer<B: Block>(
    block: &B,
    group: &Group,
    mut wait: impl FnMut(u32) -> Result<(), Stopped>,
) -> Result<(), Stopped> {
    let mut mine = Ok(());
    let mut peer = block.thread();
    while peer < group.geometry.ranks && mine.is_ok() {
        // SAFETY: the caller's promise.
        if unsafe { !is_masked(block.memory(), group, peer) } {
            mine = wait(peer);
        }
        peer += block.threads();
    }
    block.sync(mine)
}

/// Block: waits until this call's place in every rank's memory is free.
#[inline(always)]
pub(crate) unsafe fn wait_for_credits<B: Block>(
    block: &B,
    group: &Group,
    call: u64,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise.
    unsafe {
        for_each_peer(block, group, |peer| {
            let seen = credit(block.memory(), group, peer);
            wait_for_credit(block, group, (call, peer), seen)
        })
    }
}

/// How many calls of this rank `peer` says that it has read to the end.
#[inline(always)]
unsafe fn credit<M: Memory>(memory: &M, group: &Group, peer: u32) -> u64 {
    // SAFETY: the caller's promise; credits are words of this rank's memory.
    unsafe { memory.load_acquire(group.own + group.geometry.credit(peer)) }
}

/// Waits until this call's place in the memory of `peer` is free, of which `seen` was said before. One thread.
#[inline(always)]
pub(crate) unsafe fn wait_for_credit<B: Block>(
    block: &B,
    group: &Group,
    (call, peer): (u64, u32),
    seen: u64,
) -> Result<(), Stopped> {
    // All calls but the last one must have been read; nothing at first.
    let target = call.saturating_sub(1);
    let mut seen = Some(seen);
    let load = || match seen.take() {
        Some(seen) => seen,
        // SAFETY: the caller's promise.
        None => unsafe { credit(block.memory(), group, peer) },
    };
    let site = site(WaitKind::Taken, peer, Phase::Credit);
    wait_for(block, site, target, load, |seen| reached(seen, target)).map(drop)
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
pub(crate) unsafe fn raise_flags<B: Block>(block: &B, group: &Group, call: u64, which: u64) {
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
pub(crate) unsafe fn wait_for_flag<B: Block>(
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
pub(crate) unsafe fn send_packet<B: Block>(
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
pub(crate) unsafe fn send_head<B: Block>(
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
pub(crate) unsafe fn wait_for_packet<B: Block>(
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
pub(crate) unsafe fn wait_for_head<B: Block>(
    block: &B,
    group: &Group,
    (call, source): (u64, u32),
    what: Call,
) -> Result<u32, Stopped> {
    let epoch = u64::from(epoch_of(call));
    let site = site(WaitKind::Message, source, Phase::Counts);
    // SAFETY: the caller's promise; both packets are words of this rank's memory, side by side.
    let at = unsafe { address_of(block.memory(), group, group.rank) };
    let at = at + group.geometry.packet(call, source, HASH);
    let (mut hash, mut rows) = (0, 0);
    let load = || {
        // SAFETY: as above.
        [hash, rows] = unsafe { block.memory().load_pair(at) };
        match hash >> 32 == epoch {
            true => rows >> 32,
            false => hash >> 32,
        }
    };
    wait_for(block, site, epoch, load, |seen| seen == epoch)?;
    let (hash, rows) = (hash as u32, rows as u32);
    let expected = what.hash(group.salt, call);
    if hash != expected || rows > group.geometry.max_tokens {
        return Err(refuse(block, source, expected, hash));
    }
    Ok(rows)
}

/// Ends the launch because `source` makes another call. Of numbers alone, and out of the way.
#[cold]
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub(crate) fn refuse<B: Block>(block: &B, source: u32, expected: u32, seen: u32) -> Stopped {
    block.refuse(&Waiting {
        site: site(WaitKind::Envelope, source, Phase::Counts),
        spins: 0,
        expected: expected.into(),
        seen: seen.into(),
    })
}

/// Block: returns when all thread blocks are here, and orders what they did before.
///
/// # Errors
/// [`Stopped`]: the wait was ended.
///
/// # Safety
/// The group must be prepared, and all its thread blocks call this.
#[inline(always)]
pub unsafe fn barrier<B: Block>(block: &B, group: &Group) -> Result<(), Stopped> {
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
            let rounds = before.checked_div(blocks).unwrap_or_default();
            let target = (rounds + 1) * blocks;
            let load = || memory.load_acquire(counter);
            mine = wait_for(block, site, target, load, |seen| reached(seen, target)).map(drop);
        }
    }
    block.sync(mine)
}

/// Block: whether it is the last of all to come to one of the places where blocks are counted; then it is behind what
/// all of them did before.
#[inline(always)]
unsafe fn is_last<B: Block>(block: &B, group: &Group, place: u64) -> Result<bool, Stopped> {
    block.sync(Ok(()))?;
    let mut is_last = group.blocks == 1;
    if block.thread() == 0 && group.blocks > 1 {
        // SAFETY: the caller's promise; the word is this rank's.
        let before = unsafe { block.memory().fetch_add(group.state + place, 1) };
        // Every block comes once a launch.
        is_last = (before + 1).checked_rem(group.blocks.into()) == Some(0);
    }
    Ok(block.any(is_last))
}

/// Block: the last thread block tells every rank that this rank has sent, and counts the call.
#[inline(always)]
unsafe fn finish_sending<B: Block>(block: &B, group: &Group, call: u64) -> Result<bool, Stopped> {
    // SAFETY: the caller's promise.
    unsafe {
        let is_last = is_last(block, group, SENDERS)?;
        if is_last {
            raise_flags(block, group, call, ROWS_FLAG);
            if block.thread() == 0 {
                block.memory().store(group.state + SENT, call + 1);
            }
        }
        Ok(is_last)
    }
}

/// Block: the last thread block tells every rank that this rank has read, and counts the call.
#[inline(always)]
pub(crate) unsafe fn finish_receiving<B: Block>(
    block: &B,
    group: &Group,
    call: u64,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise.
    unsafe {
        if is_last(block, group, RECEIVERS)? {
            give_credits(block, group, call);
            if block.thread() == 0 {
                block.memory().store(group.state + COMPLETED, call + 1);
            }
        }
    }
    Ok(())
}

/// The part `index` of `of` of a number of things: tokens or rows, of which there are few enough for 32 bits.
#[inline(always)]
pub(crate) const fn share(count: u32, index: u32, of: u32) -> (u32, u32) {
    const fn at(count: u32, index: u32, of: u32) -> u32 {
        match (count * index).checked_div(of) {
            Some(at) => at,
            None => 0,
        }
    }
    (at(count, index, of), at(count, index + 1, of))
}

/// Number `pair` of pairs of something and one of `each` that it has.
#[inline(always)]
pub(crate) const fn split(pair: u32, each: u32) -> (u32, u32) {
    match pair.checked_div(each) {
        Some(whole) => (whole, pair - whole * each),
        None => (0, 0),
    }
}

/// Where `mine` of `all` begins among things of which `before` came first, so that all have a part of few things of several
/// kinds.
#[inline(always)]
pub(crate) const fn turn(mine: u32, all: u32, before: u32) -> u32 {
    let behind = match before.checked_rem(all) {
        Some(behind) => behind,
        None => 0,
    };
    if mine >= behind {
        mine - behind
    } else {
        mine + all - behind
    }
}

/// Rows in segments, of each of which a warp moves one.
#[derive(Clone, Copy)]
struct Segments {
    /// Bytes of a segment but the last.
    bytes: u64,
    /// Bytes of a row.
    row: u64,
    /// Segments of a row.
    each: u32,
}

impl Segments {
    #[inline(always)]
    const fn of<R: rows::Rows>(row: u64) -> Self {
        Self {
            bytes: R::SEGMENT,
            row,
            each: if row <= R::SEGMENT {
                1
            } else {
                // Rows are not that long.
                row.div_ceil(R::SEGMENT) as u32
            },
        }
    }

    /// Where a segment begins, and its bytes.
    #[inline(always)]
    const fn at(&self, segment: u32) -> (u64, u64) {
        let begin = segment as u64 * self.bytes;
        let rest = self.row - begin;
        (begin, if rest < self.bytes { rest } else { self.bytes })
    }
}

/// One of the columns of a table of marks, a word for each [`CHUNK`] of tokens.
#[derive(Clone, Copy)]
struct Marks {
    /// Address of the first word.
    first: u64,
    /// Bytes from one word to the next.
    stride: u64,
}

/// Where a dispatch marks this rank's tokens. Two words, which go from function to function in registers.
#[derive(Clone, Copy)]
struct Marked {
    first: u64,
    /// Where the last dispatch did.
    last: u64,
}

impl Marked {
    /// Of thread block `index`; all have the same if they mark for each other.
    #[inline(always)]
    unsafe fn of<M: Memory>(memory: &M, group: &Group, (index, is_alone): (u32, bool)) -> Self {
        let geometry = &group.geometry;
        let half = 8 * geometry.mark_words(group.blocks);
        // SAFETY: the caller's promise.
        let turn = unsafe { memory.load(group.state + DISPATCHES) } & 1;
        let own = match is_alone {
            true => 8 * index as u64 * geometry.marks_alone(),
            false => 0,
        };
        Self {
            first: group.marks + turn * half + own,
            last: group.marks + (1 - turn) * half,
        }
    }

    /// For what has number `index`: an expert, or behind those a rank.
    #[inline(always)]
    const fn of_number(self, geometry: &Geometry, index: u32) -> Marks {
        Marks {
            first: self.first + 8 * index as u64,
            stride: 8 * geometry.marked() as u64,
        }
    }

    /// Block: clears its share of what the last dispatch has marked, for the next one.
    #[inline(always)]
    unsafe fn clear_last<B: Block>(self, block: &B, group: &Group, index: u32) {
        let words = group.geometry.mark_words(group.blocks);
        let threads = u64::from(block.threads());
        let mut word = u64::from(index) * threads + u64::from(block.thread());
        while word < words {
            // SAFETY: the caller's promise.
            unsafe { block.memory().store(self.last + 8 * word, 0) };
            word += u64::from(group.blocks) * threads;
        }
    }
}

impl Marks {
    #[inline(always)]
    const fn word(&self, token: u32) -> u64 {
        self.first + (token / CHUNK) as u64 * self.stride
    }

    #[inline(always)]
    const fn bit(token: u32) -> u64 {
        1 << (token % CHUNK)
    }

    /// Marks a token, which nobody else does.
    ///
    /// # Safety
    /// It must be below the most tokens. So for all of these.
    #[inline(always)]
    unsafe fn mark<M: Memory>(&self, memory: &M, token: u32) {
        // SAFETY: the caller's promise. No bit is added twice.
        unsafe { memory.add(self.word(token), Self::bit(token)) }
    }

    #[inline(always)]
    unsafe fn is_marked<M: Memory>(&self, memory: &M, token: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { memory.load(self.word(token)) & Self::bit(token) != 0 }
    }

    /// How many tokens before `token` are marked.
    #[inline(always)]
    unsafe fn before<M: Memory>(&self, memory: &M, token: u32) -> u32 {
        let last = self.word(token);
        let (mut at, mut count) = (self.first, 0);
        // Several loads are under way at a time.
        let (two, four) = (2 * self.stride, 4 * self.stride);
        // SAFETY: the caller's promise. A token that begins a word may be one too many.
        unsafe {
            while last - at >= four {
                let a = memory.load(at);
                let b = memory.load(at + self.stride);
                let c = memory.load(at + two);
                let d = memory.load(at + two + self.stride);
                count += a.count_ones() + b.count_ones() + c.count_ones() + d.count_ones();
                at += four;
            }
            while at != last {
                count += memory.load(at).count_ones();
                at += self.stride;
            }
            match Self::bit(token) - 1 {
                0 => count,
                below => count + (memory.load(last) & below).count_ones(),
            }
        }
    }
}
