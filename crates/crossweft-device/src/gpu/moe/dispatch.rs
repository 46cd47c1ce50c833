//! Dispatch with rows as [lines](super::lines): sent and laid out by warps, each on its own.
//!
//! The protocol is [`crate::moe`]'s, but for rows, which need no flag. Counts and places of few tokens are found by each
//! thread block for itself, in shared memory; those of many by all for each other.

use super::lines::{Held, MetaLines, Mine, Segment, Segments, meta_pairs, plain, store_scales};
use super::{
    Calls, DispatchLaunch, GpuRows, Part, Shared, credit_of, give_credits, is_last, least, span,
    speaks_to, steps, tell,
};
use crate::block::Block;
use crate::element::Element;
use crate::gpu::reduce::GpuElement;
use crate::gpu::wide::{PIECE, or4, prefetch, store16};
use crate::memory::Memory;
use crate::moe::dispatch::{
    EXPERTS, Meta, Output, Quantise, TOKEN, count_experts, count_sources, describe_row, pad,
    place_row, position, refuse_choice,
};
use crate::moe::rows::Rows;
use crate::moe::{
    ALONE, CHUNK, COMPLETED, DISPATCHES, Geometry, Group, HEAD, NONE, Placement, Routes, SENDERS,
    address_of, barrier, epoch_of, finish_receiving, is_masked, refuse, send_head, send_packet,
    share, split, turn, wait_for_credit, wait_for_head, wait_for_packet,
};
use crate::wait::Stopped;

/// Bytes of what a thread asks for ahead: a warp for a segment.
const NEAR: u64 = 64;

/// Which tokens go to which experts and ranks, a bit for each, and the choices that say so.
#[derive(Clone, Copy)]
struct Marks {
    /// Address of `u64 [chunks][columns]`: a column for each expert, then for each rank.
    first: u64,
    columns: u32,
    /// Address of `i32 [tokens][stride]`.
    choices: u64,
    stride: u32,
}

/// Whether each thread block marks all tokens for itself.
#[inline(always)]
const fn is_alone(geometry: &Geometry, routes: &Routes) -> bool {
    let (marks, choices) = (
        mark_bytes(geometry, routes),
        4 * routes.tokens as u64 * routes.top_k as u64,
    );
    routes.tokens <= ALONE && marks + choices <= super::MARKS_BYTES as u64
}

#[inline(always)]
const fn mark_bytes(geometry: &Geometry, routes: &Routes) -> u64 {
    8 * routes.tokens.div_ceil(CHUNK) as u64 * geometry.marked() as u64
}

impl Marks {
    /// Of a thread block that is alone.
    #[inline(always)]
    const fn alone(geometry: &Geometry, routes: &Routes, shared: &Shared) -> Self {
        Self {
            first: shared.marks,
            columns: geometry.marked(),
            choices: shared.marks + mark_bytes(geometry, routes),
            stride: routes.top_k,
        }
    }

    /// Of all of them in dispatch number `turn` of those.
    #[inline(always)]
    const fn together(group: &Group, routes: &Routes, turn: u64) -> Self {
        let half = 8 * group.geometry.mark_words(group.blocks);
        Self {
            first: group.marks + (turn & 1) * half,
            columns: group.geometry.marked(),
            choices: routes.experts,
            stride: group.geometry.top_k,
        }
    }

    /// Address of the choice `k` of a token.
    #[inline(always)]
    const fn choice(&self, token: u32, k: u32) -> u64 {
        self.choices + 4 * (token as u64 * self.stride as u64 + k as u64)
    }

    #[inline(always)]
    const fn word(&self, chunk: u32, column: u32) -> u64 {
        self.first + 8 * (chunk as u64 * self.columns as u64 + column as u64)
    }

    /// Marks a token, which may have been marked before. Half a word, because shared memory does that at once.
    #[inline(always)]
    unsafe fn mark(&self, token: u32, column: u32) {
        let half = u64::from(token / 32 % 2) * 4;
        // SAFETY: the caller's promise.
        unsafe { or4(self.word(token / CHUNK, column) + half, 1 << (token % 32)) }
    }

    #[inline(always)]
    unsafe fn is_marked<M: Memory>(&self, memory: &M, token: u32, column: u32) -> bool {
        // SAFETY: the caller's promise; a barrier has ordered the marks.
        let word: u64 = unsafe { memory.read(self.word(token / CHUNK, column)) };
        word >> (token % CHUNK) & 1 != 0
    }

    /// How many tokens before `token` are marked.
    #[inline(always)]
    unsafe fn before<M: Memory>(&self, memory: &M, token: u32, column: u32) -> u32 {
        let (chunk, bit) = (token / CHUNK, token % CHUNK);
        let mut at = self.word(0, column);
        let (mut left, mut count) = (chunk, 0);
        // SAFETY: as above. A token that begins a word may be one too many.
        unsafe {
            while left > 0 {
                count += memory.read::<u64>(at).count_ones();
                at += 8 * u64::from(self.columns);
                left -= 1;
            }
            match (1_u64 << bit) - 1 {
                0 => count,
                below => count + (memory.read::<u64>(at) & below).count_ones(),
            }
        }
    }

    /// The same of many tokens: several loads are under way at a time.
    #[inline(always)]
    unsafe fn before_of_many<M: Memory>(&self, memory: &M, token: u32, column: u32) -> u32 {
        let chunk = token / CHUNK;
        let word = |chunk: u32| -> u64 {
            // SAFETY: as above.
            unsafe { memory.read(self.word(chunk, column)) }
        };
        let (mut at, mut count) = (0, 0);
        while at + 4 <= chunk {
            let (a, b, c, d) = (word(at), word(at + 1), word(at + 2), word(at + 3));
            count += a.count_ones() + b.count_ones() + c.count_ones() + d.count_ones();
            at += 4;
        }
        let rest = Self {
            first: self.word(at, 0),
            ..*self
        };
        // SAFETY: as above.
        count + unsafe { rest.before(memory, token - at * CHUNK, column) }
    }
}

/// The tokens of a thread block: every so many.
#[derive(Clone, Copy)]
struct Own {
    index: u32,
    blocks: u32,
    count: u32,
}

impl Own {
    #[inline(always)]
    const fn of(tokens: u32, index: u32, blocks: u32) -> Self {
        let before = match (tokens + blocks - 1).checked_sub(index) {
            Some(behind) => match behind.checked_div(blocks) {
                Some(count) => count,
                None => 0,
            },
            None => 0,
        };
        Self {
            index,
            blocks,
            count: before,
        }
    }

    #[inline(always)]
    const fn token(&self, n: u32) -> u32 {
        self.index + n * self.blocks
    }
}

/// What a thread has found before it met the others: a choice that cannot be, and the credit of a peer.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    choice: u32,
    expert: i64,
    credit: u64,
}

/// Block: reads what nobody has to be waited for, on its way while all else is made ready. Before the block's first barrier.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
pub unsafe fn prepare<B: Block>(
    block: &B,
    launch: &DispatchLaunch,
    shared: &Shared,
    index: u32,
) -> Before {
    let memory = block.memory();
    let (group, routes) = (&launch.group, &launch.routes);
    let geometry = &group.geometry;
    let mut before = Before {
        choice: NONE,
        expert: 0,
        credit: 0,
    };
    if launch.steps & steps::SEND == 0 {
        return before;
    }
    // SAFETY: the caller's promise; tables have room for the most tokens, shared memory for those of a block alone.
    unsafe {
        before.credit = credit_of(block, group);
        let alone = is_alone(geometry, routes);
        let (tokens, to, stride) = match alone {
            true => {
                let marks = Marks::alone(geometry, routes, shared);
                ((0, routes.tokens), marks.choices, routes.top_k)
            }
            false => (
                share(routes.tokens, index, group.blocks),
                routes.experts,
                geometry.top_k,
            ),
        };
        let (mut pair, end) = (
            tokens.0 * routes.top_k + block.thread(),
            tokens.1 * routes.top_k,
        );
        // The first one is on its way while marks are cleared.
        let load = |pair: u32| match pair < end {
            true => launch.choices.expert(memory, pair.into()),
            false => 0,
        };
        let mut expert = load(pair);
        if alone {
            let words = mark_bytes(geometry, routes) / 8;
            let mut word = u64::from(block.thread());
            while word < words {
                memory.write(shared.marks + 8 * word, 0_u64);
                word += u64::from(block.threads());
            }
        }
        while pair < end {
            let (token, k) = split(pair, routes.top_k);
            if !(-1..i64::from(geometry.experts)).contains(&expert) {
                (before.choice, before.expert) = (pair, expert);
            }
            let at = u64::from(token) * u64::from(stride) + u64::from(k);
            memory.write(to + 4 * at, expert as i32);
            pair += block.threads();
            expert = load(pair);
        }
    }
    before
}

/// Runs thread block `index` of a launch, for its steps, behind the barrier that follows [`prepare`]; the launch's tables
/// are [the block's](Shared::moved), and the last block copies them to `home`. Threads return as they are done; any of
/// them may bring the error.
///
/// # Errors
/// [`Stopped`]: a wait was ended, a rank makes another call, or a choice is of an expert that does not exist.
///
/// # Safety
/// As for [`crate::moe::dispatch::send`] and [`crate::moe::dispatch::receive`]; rows must be lines, and `shared` the
/// block's.
#[inline(always)]
pub unsafe fn run<B: Block, E: GpuElement + Element<Acc = f32>>(
    block: &B,
    launch: &DispatchLaunch,
    shared: &Shared,
    (calls, before): (Calls, Before),
    (index, home): (u32, u64),
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, routes) = (&launch.group, &launch.routes);
    let does = |step| launch.steps & step != 0;
    let (sends, receives) = (does(steps::SEND), does(steps::RECEIVE));
    let way = Way::of(block, launch, index);
    // SAFETY: the caller's promise.
    unsafe {
        give_credits(block, group, calls, index);
        let rows = GpuRows::<E>::new(shared.terms);
        let (sender, receiver) = Part::of(block, way.splits);
        let mut so_far = 0;
        let mut marks = Marks::alone(&group.geometry, routes, shared);
        if sends {
            let mut turn = 0;
            if !way.alone {
                turn = memory.load(group.state + DISPATCHES);
                marks = Marks::together(group, routes, turn);
            }
            // Counted now, so that the answer is there when it is needed.
            if block.thread() == 0 {
                so_far = memory.fetch_add_local(group.state + SENDERS, 1);
            }
            let at = (calls.sent, index);
            let mine = mark(block, group, routes, marks, (before, way.alone), at);
            block.sync(mine)?;
            if !way.alone {
                barrier(block, group)?;
            }
            let what = (calls.sent, launch.input.call);
            announce_all(block, group, routes, marks, what, index);
            if !way.alone {
                give_places(block, group, routes, marks, index);
                block.sync(Ok(()))?;
                clear(
                    block,
                    Marks::together(group, routes, turn + 1),
                    group,
                    index,
                );
                if is_last(group, calls, so_far) {
                    memory.store(group.state + DISPATCHES, turn + 1);
                }
            }
        }
        if way.splits && !way.by_warps {
            count(block, launch, way, home, calls.completed, index)?;
        }
        if sends && sender.takes_part {
            send_tokens(
                block,
                &rows,
                launch,
                (marks, way),
                shared,
                (calls.sent, index),
                sender,
            );
        }
        if sends {
            tell(block, group, calls, so_far);
        }
        if does(steps::COUNT) && !way.splits {
            count(block, launch, way, home, calls.completed, index)?;
        }
        if !receives {
            return Ok(());
        }
        let mut mine = Ok(());
        if receiver.takes_part {
            mine = receive(
                block,
                &rows,
                launch,
                way,
                shared,
                (calls.completed, index),
                receiver,
            );
        }
        if sends {
            // Nothing is sent into what this call read before all ranks know that it did, and they are told by the next
            // launch.
            if is_last(group, calls, so_far) {
                memory.store(group.state + COMPLETED, calls.completed + 1);
            }
            return mine;
        }
        block.sync(mine)?;
        finish_receiving(block, group, calls.completed)
    }
}

/// How a block goes about a launch.
#[derive(Clone, Copy)]
struct Way {
    /// It marks all tokens for itself.
    alone: bool,
    /// Some of its warps lay out what comes while others send.
    splits: bool,
    /// Then each of those finds for itself what comes, and meets no other.
    by_warps: bool,
    /// Rows to this rank are laid out by who would send them.
    straight: bool,
    /// Segments that a warp does one after the other.
    span: u32,
}

impl Way {
    #[inline(always)]
    fn of<B: Block>(block: &B, launch: &DispatchLaunch, index: u32) -> Self {
        let (group, routes) = (&launch.group, &launch.routes);
        let both = steps::SEND | steps::RECEIVE;
        let is_whole = launch.steps & both == both;
        let alone = is_alone(&group.geometry, routes);
        // The last block counts everything, for the host and for combines.
        let by_warps =
            alone && routes.placement != Placement::ExpertPacked && index + 1 != group.blocks;
        Self {
            alone,
            splits: is_whole && block.warps() > 1 && (by_warps || !alone),
            by_warps: is_whole && block.warps() > 1 && by_warps,
            // Where they go is known: at once, or because it has been counted.
            straight: is_whole
                && match routes.placement {
                    Placement::RankMajor => true,
                    Placement::Flat => !alone && block.warps() > 1,
                    _ => false,
                },
            span: span(alone),
        }
    }
}

/// Block: marks where tokens go, a thread for a choice, and waits for credits.
///
/// # Safety
/// As for [`run`]. So for all of these.
#[inline(always)]
unsafe fn mark<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    marks: Marks,
    (before, alone): (Before, bool),
    (call, index): (u64, u32),
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    if before.choice != NONE {
        return Err(refuse_choice(block, group, before.choice, before.expert));
    }
    let tokens = match alone {
        true => (0, routes.tokens),
        false => share(routes.tokens, index, group.blocks),
    };
    // SAFETY: the caller's promise.
    unsafe {
        let mut pair = tokens.0 * routes.top_k + block.thread();
        while pair < tokens.1 * routes.top_k {
            let (token, k) = split(pair, routes.top_k);
            // Negative ones are nobody's.
            let expert = memory.read::<i32>(marks.choice(token, k)) as u32;
            if expert < geometry.experts {
                marks.mark(token, expert);
                marks.mark(token, geometry.experts + geometry.rank_of(expert));
            }
            pair += block.threads();
        }
        let mut peer = block.thread();
        while peer < geometry.ranks {
            if !is_masked(memory, group, peer) {
                wait_for_credit(block, group, (call, peer), before.credit)?;
            }
            peer += block.threads();
        }
    }
    Ok(())
}

/// Block: its share of telling ranks what will come.
#[inline(always)]
unsafe fn announce_all<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    marks: Marks,
    (call, what): (u64, crate::moe::Call),
    index: u32,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise; a barrier has ordered the marks.
    unsafe {
        let mut peer = speaks_to(index, group.blocks);
        while peer < geometry.ranks {
            if !is_masked(memory, group, peer) {
                let mut local = block.thread();
                while local < geometry.local_experts(peer) {
                    let expert = geometry.first_expert(peer) + local;
                    let count = marks.before(memory, routes.tokens, expert);
                    send_packet(block, group, (call, peer), HEAD + local, count);
                    local += block.threads();
                }
                let rows = marks.before(memory, routes.tokens, geometry.experts + peer);
                send_head(block, group, (call, peer), what, rows);
            }
            peer += group.blocks;
        }
        let mut rank = block.thread();
        while index + 1 == group.blocks && rank < geometry.ranks {
            let sent = match is_masked(memory, group, rank) {
                true => 0,
                false => marks.before(memory, routes.tokens, geometry.experts + rank),
            };
            memory.write(routes.sent + 4 * u64::from(rank), sent);
            rank += block.threads();
        }
    }
}

/// The slot of a token at a rank; none at ranks that are masked, which will send nothing back.
#[inline(always)]
unsafe fn slot_of<M: Memory>(
    memory: &M,
    group: &Group,
    (marks, few): (Marks, bool),
    (token, rank): (u32, u32),
) -> u32 {
    let column = group.geometry.experts + rank;
    // SAFETY: the caller's promise; a barrier has ordered the marks.
    unsafe {
        match marks.is_marked(memory, token, column) && !is_masked(memory, group, rank) {
            true if few => marks.before(memory, token, column),
            true => marks.before_of_many(memory, token, column),
            false => NONE,
        }
    }
}

/// Where the place of a token's choice is kept, of many tokens: what a pass has for weights is not needed for those.
#[inline(always)]
const fn place_at(group: &Group, routes: &Routes, (token, k): (u32, u32)) -> u64 {
    routes.weights + 4 * (token as u64 * group.geometry.top_k as u64 + k as u64)
}

/// Block: finds slots and places of its tokens, a thread for each.
#[inline(always)]
unsafe fn give_places<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    marks: Marks,
    index: u32,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let own = Own::of(routes.tokens, index, group.blocks);
    let each = geometry.ranks + routes.top_k;
    let mut item = block.thread();
    while item < own.count * each {
        let (n, what) = split(item, each);
        let token = own.token(n);
        // SAFETY: the caller's promise; a barrier has ordered the marks.
        unsafe {
            match what.checked_sub(geometry.ranks) {
                None => {
                    let slot = slot_of(memory, group, (marks, false), (token, what));
                    let at = u64::from(token) * u64::from(geometry.ranks) + u64::from(what);
                    memory.write(routes.slots + 4 * at, slot);
                }
                Some(k) => {
                    let expert = memory.read::<i32>(marks.choice(token, k));
                    let place = match expert < 0 {
                        true => 0,
                        false => marks.before_of_many(memory, token, expert as u32),
                    };
                    memory.write(place_at(group, routes, (token, k)), place);
                }
            }
        }
        item += block.threads();
    }
}

/// Block: clears its share of marks.
#[inline(always)]
unsafe fn clear<B: Block>(block: &B, marks: Marks, group: &Group, index: u32) {
    let words = group.geometry.mark_words(group.blocks);
    let threads = u64::from(block.threads());
    let mut word = u64::from(index) * threads + u64::from(block.thread());
    while word < words {
        // SAFETY: the caller's promise.
        unsafe { block.memory().write(marks.first + 8 * word, 0_u64) };
        word += u64::from(group.blocks) * threads;
    }
}

/// Block: sends its tokens to all ranks that they go to. A warp does it for some segments of a token.
#[inline(always)]
unsafe fn send_tokens<B: Block, E: GpuElement + Element<Acc = f32>>(
    block: &B,
    rows: &GpuRows<E>,
    launch: &DispatchLaunch,
    (marks, way): (Marks, Way),
    shared: &Shared,
    (call, index): (u64, u32),
    part: Part,
) {
    let memory = block.memory();
    let (group, routes) = (&launch.group, &launch.routes);
    let (input, output) = (&launch.input, &launch.output);
    let geometry = &group.geometry;
    let segments = Segments::of(input.payload_bytes, input.scale_bytes);
    // Each token's first item is what its rows say of themselves.
    let items = 1 + segments.each.div_ceil(way.span);
    // Where a block knows all places, warps of all blocks share all tokens.
    let own = match way.alone {
        true => Own::of(routes.tokens, 0, 1),
        false => Own::of(routes.tokens, index, group.blocks),
    };
    let (mut item, step) = part.spread(way.alone, index, group.blocks);
    let meta_pairs = meta_pairs(geometry.meta_bytes());
    let (lane, flag) = (block.lane(), epoch_of(call));
    let meta = Meta {
        address: shared.meta(block),
        own: geometry.local_experts(group.rank),
        top_k: geometry.top_k,
    };
    let lines = MetaLines::of(block, meta.address, geometry.meta_bytes());
    let targets = shared.targets(block);
    while item < own.count * items {
        let (n, which) = split(item, items);
        let token = own.token(n);
        let at = u64::from(token);
        let (mut number, end) = match which {
            0 => (0, 0),
            _ => {
                let first = (which - 1) * way.span;
                (first, least(first + way.span, segments.each))
            }
        };
        // SAFETY: the caller's promise; slots are below the most tokens, rows are for this rank to write.
        unsafe {
            let load = |number: u32| {
                let segment = segments.segment(number);
                let (elements, scales) = match input.quantise {
                    Quantise::No => (
                        input.tokens + at * input.payload_bytes + segment.at,
                        input.scales + at * input.scale_bytes + segment.scales_at,
                    ),
                    how => {
                        let size = size_of::<E>() as u64;
                        let warp = u64::from(index * block.warps() + block.warp());
                        let staging = group.staging + warp * group.staging_bytes;
                        let to = (staging, staging + segment.bytes);
                        let from = input.tokens + at * input.token_bytes + segment.at * size;
                        rows.quantise(block, to, from, segment.bytes, how);
                        to
                    }
                };
                let mine = Mine::of(block, segment.pieces());
                match segment.scale_bytes {
                    0 => plain(mine, elements),
                    _ => mine.load(|piece| segment.load::<B>(elements, scales, piece)),
                }
            };
            // Brought near while places are looked up.
            prefetch(
                input.tokens
                    + at * input.token_bytes
                    + segments.segment(number).at
                    + u64::from(lane) * NEAR,
            );
            let mut to = 0;
            if lane < geometry.ranks {
                let slots = routes.slots + 4 * (at * u64::from(geometry.ranks) + u64::from(lane));
                let slot = match way.alone {
                    true => slot_of(memory, group, (marks, true), (token, lane)),
                    false => memory.read(slots),
                };
                if way.alone && which == 0 {
                    memory.write(slots, slot);
                }
                to = match slot {
                    NONE => 0,
                    // So that none is 0.
                    slot if way.straight && lane == group.rank => {
                        u64::from(base_of(memory, launch, lane) + slot) + 1
                    }
                    slot => address_of(memory, group, lane) + geometry.row(call, group.rank, slot),
                };
            }
            block.warp_sync();
            if lane < geometry.ranks {
                memory.write(targets + 8 * u64::from(lane), to);
            }
            block.warp_sync();
            let to = |rank: u32| match memory.read::<u64>(targets + 8 * u64::from(rank)) {
                place if way.straight && rank == group.rank => (place, 0),
                row => (0, row),
            };
            if which == 0 {
                let said = say(memory, launch, (marks, way.alone), token, lane);
                let mut turn = 0;
                while turn < geometry.ranks {
                    let rank = peer_of(group, turn);
                    turn += 1;
                    let (place, row) = to(rank);
                    if place | row == 0 {
                        continue;
                    }
                    block.warp_sync();
                    said.write(
                        memory,
                        geometry,
                        (token, rank),
                        meta.address,
                        (lane, routes.top_k),
                    );
                    block.warp_sync();
                    if row != 0 {
                        lines.send(block, row, flag);
                    } else if lane < routes.top_k {
                        let at = ((place - 1) as u32, lane);
                        describe_row(memory, routes, output, at, &meta);
                    }
                }
            }
            let mut held = Held::default();
            let first = number;
            while number <= end {
                // On its way while the one before is sent.
                let next = match number < end {
                    true => load(number),
                    false => Held::default(),
                };
                if number > first {
                    let segment = segments.segment(number - 1);
                    let mine = Mine::of(block, segment.pieces());
                    let offset = Segments::place(meta_pairs, number - 1);
                    let mut turn = 0;
                    while turn < geometry.ranks {
                        let (place, row) = to(peer_of(group, turn));
                        if row != 0 {
                            mine.store(block, row + offset, held, flag);
                        } else if place != 0 {
                            lay::<B>(output, mine, held, &segment, (place - 1) as u32);
                        }
                        turn += 1;
                    }
                }
                held = next;
                number += 1;
            }
        }
        item += step;
        block.checkpoint();
    }
}

/// The first row of those of `source`, where they are not grouped by expert.
#[inline(always)]
unsafe fn base_of<M: Memory>(memory: &M, launch: &DispatchLaunch, source: u32) -> u32 {
    let routes = &launch.routes;
    match routes.placement {
        Placement::RankMajor => source * launch.group.geometry.max_tokens,
        // SAFETY: the caller's promise.
        _ => unsafe { memory.read(routes.bases + 4 * u64::from(source)) },
    }
}

/// What this thread says of one of a token's choices.
#[derive(Clone, Copy)]
struct Said {
    expert: u32,
    place: u32,
    weight: f32,
}

/// Of choice `k` of a token, if there is one.
#[inline(always)]
unsafe fn say<M: Memory>(
    memory: &M,
    launch: &DispatchLaunch,
    (marks, alone): (Marks, bool),
    token: u32,
    k: u32,
) -> Said {
    let (group, routes) = (&launch.group, &launch.routes);
    let mut said = Said {
        expert: NONE,
        place: 0,
        weight: 0.0,
    };
    if k < routes.top_k {
        // SAFETY: the caller's promise; a barrier has ordered the marks.
        unsafe {
            said.expert = memory.read::<i32>(marks.choice(token, k)) as u32;
            let choice = u64::from(token) * u64::from(routes.top_k) + u64::from(k);
            said.weight = launch.choices.weight(memory, choice);
            said.place = match alone {
                _ if said.expert >= group.geometry.experts => 0,
                true => marks.before(memory, token, said.expert),
                false => memory.read(place_at(group, routes, (token, k))),
            };
        }
    }
    said
}

impl Said {
    /// Warp: writes what a row to `rank` is; this thread choice `k` of so many.
    #[inline(always)]
    unsafe fn write<M: Memory>(
        self,
        memory: &M,
        geometry: &Geometry,
        (token, rank): (u32, u32),
        table: u64,
        (k, top_k): (u32, u32),
    ) {
        // SAFETY: the caller's promise: there is room.
        unsafe {
            if k == 0 {
                memory.write(table + TOKEN, token);
            }
            if k < top_k {
                let local = self.expert.wrapping_sub(geometry.first_expert(rank));
                let is_there = self.expert != NONE && local < geometry.local_experts(rank);
                let (at, row) = (
                    table + EXPERTS + 4 * u64::from(k),
                    4 * u64::from(geometry.top_k),
                );
                memory.write(at, if is_there { local as i32 } else { -1 });
                memory.write(at + row, if is_there { self.place } else { 0 });
                memory.write(at + 2 * row, self.weight);
            }
        }
    }
}

/// Ranks in the order of this one's turns: the next one first, itself last, whose memory is nearest.
#[inline(always)]
pub(super) const fn peer_of(group: &Group, turn: u32) -> u32 {
    let peer = group.rank + 1 + turn;
    match peer.checked_sub(group.geometry.ranks) {
        None => peer,
        Some(peer) => peer,
    }
}

/// Block: waits for what will come, and decides where it goes; the last block leaves that where the host finds it.
#[inline(always)]
unsafe fn count<B: Block>(
    block: &B,
    launch: &DispatchLaunch,
    way: Way,
    home: u64,
    call: u64,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, counted) = (&launch.group, &launch.routes);
    let is_last = index + 1 == group.blocks;
    // SAFETY: the caller's promise.
    unsafe {
        count_sources(block, group, counted, launch.input.call, call)?;
        count_experts(block, group, counted, call)?;
        if is_last && counted.received != home {
            let mut word = 4 * u64::from(block.thread());
            while word < counted.stride {
                let value: u32 = memory.read(counted.received + word);
                memory.write(home + word, value);
                word += 4 * u64::from(block.threads());
            }
        }
        if launch.steps & steps::RECEIVE != 0 {
            let own = group.geometry.local_experts(group.rank);
            let needed: u32 = memory.read(counted.offsets + 4 * u64::from(own));
            fits(block, launch, needed)?;
            // Where other blocks do not count, this one does it for all.
            let share = match way.alone && counted.placement != Placement::ExpertPacked {
                true if is_last => Some((0, 1)),
                true if launch.steps & steps::SEND != 0 && block.warps() > 1 => None,
                _ => Some((index, group.blocks)),
            };
            if let Some(share) = share {
                pad(block, group, counted, &launch.output, share);
            }
        }
    }
    Ok(())
}

/// Whether there is room for so many rows. Nobody can have more, but a peer may say so.
#[inline(always)]
fn fits<B: Block>(block: &B, launch: &DispatchLaunch, needed: u32) -> Result<(), Stopped> {
    let room = launch.output.capacity;
    match u64::from(needed) > room {
        true => Err(refuse(block, launch.group.rank, room as u32, needed)),
        false => Ok(()),
    }
}

/// Warp: waits for how many rows come from each rank, and keeps it at `table`.
#[inline(always)]
unsafe fn count_by_warp<B: Block>(
    block: &B,
    launch: &DispatchLaunch,
    table: u64,
    call: u64,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, routes, rank) = (&launch.group, &launch.routes, block.lane());
    let geometry = &group.geometry;
    let (mut rows, mut outcome) = (0, Ok(()));
    // SAFETY: the caller's promise.
    unsafe {
        if rank < geometry.ranks {
            if !is_masked(memory, group, rank) {
                match wait_for_head(block, group, (call, rank), launch.input.call) {
                    Ok(found) => rows = found,
                    Err(stopped) => outcome = Err(stopped),
                }
            }
            memory.write(table + 4 * u64::from(rank), rows);
        }
        if block.warp_any(outcome.is_err()) {
            return Err(outcome.err().unwrap_or(Stopped::Aborted));
        }
        block.warp_sync();
        let sources = geometry.ranks * geometry.max_tokens;
        let needed = match routes.placement {
            Placement::RankMajor => sources,
            Placement::Flat => received_before(memory, table, geometry.ranks),
            _ => sources * geometry.local_experts(group.rank),
        };
        fits(block, launch, needed)
    }
}

/// How many rows come from ranks before `rank`.
#[inline(always)]
unsafe fn received_before<M: Memory>(memory: &M, table: u64, rank: u32) -> u32 {
    let (mut source, mut rows) = (0, 0);
    while source < rank {
        // SAFETY: the caller's promise.
        rows += unsafe { memory.read::<u32>(table + 4 * u64::from(source)) };
        source += 1;
    }
    rows
}

/// [`position`] by what ranks have said, without tables, where each expert has room for all.
#[inline(always)]
unsafe fn position_said<B: Block>(
    block: &B,
    group: &Group,
    (call, source, k): (u64, u32, u32),
    meta: &Meta,
) -> Result<u32, Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise.
    unsafe {
        let Some(local) = meta.expert(memory, k) else {
            return Ok(NONE);
        };
        let count = |rank: u32| match is_masked(memory, group, rank) {
            true => Ok(0),
            false => wait_for_packet(block, group, (call, rank), HEAD + local),
        };
        let mut begin = local * geometry.ranks * geometry.max_tokens;
        let mut rank = 0;
        while rank < source {
            // Nobody can have more, but a peer may say so.
            begin += least(count(rank)?, geometry.max_tokens);
            rank += 1;
        }
        let (count, place) = (
            least(count(source)?, geometry.max_tokens),
            meta.place(memory, k),
        );
        // More than were announced would lie over others.
        match place < count {
            true => Ok(begin + place),
            false => Err(refuse(block, source, count, place.saturating_add(1))),
        }
    }
}

/// Lays out what comes. A warp does it for some segments of a row.
#[inline(always)]
unsafe fn receive<B: Block, E: GpuElement + Element<Acc = f32>>(
    block: &B,
    rows: &GpuRows<E>,
    launch: &DispatchLaunch,
    way: Way,
    shared: &Shared,
    (call, index): (u64, u32),
    part: Part,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, routes, output) = (&launch.group, &launch.routes, &launch.output);
    let geometry = &group.geometry;
    let segments = Segments::of(output.payload_bytes, output.scale_bytes);
    let is_by_expert = routes.placement.is_by_expert();
    // What a row says of itself is an item of its own, if nothing else depends on it.
    let extra = u32::from(!is_by_expert);
    let items = extra + segments.each.div_ceil(way.span);
    let meta_pairs = meta_pairs(geometry.meta_bytes());
    let (lane, flag) = (block.lane(), epoch_of(call));
    let lines = MetaLines::of(block, shared.meta(block), geometry.meta_bytes());
    let meta = Meta {
        address: shared.meta(block),
        own: geometry.local_experts(group.rank),
        top_k: geometry.top_k,
    };
    let table = match way.by_warps {
        true => shared.received(block),
        false => routes.received,
    };
    if way.by_warps {
        // SAFETY: the caller's promise.
        unsafe { count_by_warp(block, launch, table, call)? };
    }
    let (own, all) = part.spread(true, index, group.blocks);
    let (mut peer, mut before) = (0, 0);
    let others = geometry.ranks - u32::from(way.straight);
    while peer < others {
        let source = peer_of(group, peer);
        // SAFETY: the caller's promise.
        let (received, base) = unsafe {
            let base = match routes.placement {
                Placement::Flat if way.by_warps => received_before(memory, table, source),
                Placement::Flat | Placement::RankMajor => base_of(memory, launch, source),
                _ => 0,
            };
            (memory.read::<u32>(table + 4 * u64::from(source)), base)
        };
        let count = received * items;
        let mut item = turn(own, all, before);
        while item < count {
            let (slot, which) = split(item, items);
            let (mut number, end) = match which.checked_sub(extra) {
                None => (0, 0),
                Some(which) => {
                    let first = which * way.span;
                    (first, least(first + way.span, segments.each))
                }
            };
            // SAFETY: the caller's promise; there is room for what was counted.
            unsafe {
                let row = group.own + geometry.row(call, source, slot);
                let fetch = |number: u32| {
                    let mine = Mine::of(block, segments.segment(number).pieces());
                    mine.fetch(block, row + Segments::place(meta_pairs, number))
                };
                if is_by_expert || which == 0 {
                    lines.take(block, (row, source), flag)?;
                }
                let (mut targets, mut place) = (1, base + slot);
                if is_by_expert {
                    targets = routes.top_k;
                    let (mut found, mut is_first) = (Ok(NONE), true);
                    if lane < routes.top_k {
                        found = match way.by_warps {
                            true => position_said(block, group, (call, source, lane), &meta),
                            false => position(block, group, routes, (source, lane), &meta),
                        };
                        if let (Ok(place), 0) = (found, which) {
                            let at = (source, slot, lane);
                            place_row(memory, group, routes, output, at, (place, &meta));
                        }
                        // The same expert again has its row already.
                        let (mut other, mine) = (0, meta.expert(memory, lane));
                        while other < lane {
                            is_first &= meta.expert(memory, other) != mine;
                            other += 1;
                        }
                    }
                    if block.warp_any(found.is_err()) {
                        return Err(found.err().unwrap_or(Stopped::Aborted));
                    }
                    place = match found {
                        Ok(place) if is_first => place,
                        _ => NONE,
                    };
                } else if which == 0 && lane < routes.top_k {
                    describe_row(memory, routes, output, (place, lane), &meta);
                }
                let places = rows.share(block, place);
                let mut held = Held::default();
                let first = number;
                while number <= end {
                    // On its way while the one before is laid out.
                    let next = match number < end {
                        true => fetch(number),
                        false => Held::default(),
                    };
                    if number > first {
                        let segment = segments.segment(number - 1);
                        let mine = Mine::of(block, segment.pieces());
                        let from = row + Segments::place(meta_pairs, number - 1);
                        mine.arrival(block, (from, source), &mut held, flag)?;
                        let mut k = 0;
                        while k < targets {
                            let place: u32 = places.add(k as usize).read();
                            if place != NONE {
                                lay::<B>(output, mine, held, &segment, place);
                            }
                            k += 1;
                        }
                    }
                    held = next;
                    number += 1;
                }
            }
            item += all;
            block.checkpoint();
        }
        before += count;
        peer += 1;
    }
    Ok(())
}

/// Puts this thread's pieces of a segment into the row at `place`.
#[inline(always)]
unsafe fn lay<B: Block>(output: &Output, mine: Mine, held: Held, segment: &Segment, place: u32) {
    let place = u64::from(place);
    let tokens = output.tokens + place * output.payload_bytes + segment.at;
    let scales = output.scales + place * output.scale_bytes + segment.scales_at;
    if segment.scale_bytes == 0 {
        mine.each(held, |index, piece| {
            // SAFETY: the caller's promise: there is room, and elements are whole pieces.
            unsafe { store16(tokens + u64::from(index) * PIECE, piece) };
        });
        return;
    }
    let elements = segment.element_pieces();
    mine.each(held, |index, piece| {
        // SAFETY: as above.
        unsafe {
            if index < elements {
                store16(tokens + u64::from(index) * PIECE, piece);
            } else if output.scales != 0 {
                let at = u64::from(index - elements) * PIECE;
                store_scales::<B>(scales + at, piece, segment.scale_bytes - at);
            }
        }
    });
}
