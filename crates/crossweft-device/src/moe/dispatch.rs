//! Dispatch: tokens to the ranks of their experts.
//!
//! [`send`] sends, [`count`] waits for what will come and decides where it goes, [`receive`] lays it out. The waits
//! of each come before anything that others could see, so one that was stopped can be launched again.

use super::rows::Rows;
use super::{
    ALONE, Call, DISPATCHES, GROUP, Group, HEAD, Marked, NONE, Phase, Placement, ROWS_FLAG, Routes,
    Segments, address_of, align, barrier, finish_receiving, finish_sending, for_each_peer,
    is_masked, next_to_complete, next_to_send, refuse, send_head, send_packet, share, site, split,
    turn, wait_for_credits, wait_for_flag, wait_for_head, wait_for_packet,
};
use crate::block::Block;
use crate::memory::Memory;
use crate::wait::{Stopped, WaitKind, Waiting};

/// What rows hold besides plain elements. The discriminants are part of the device ABI.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Quantise {
    /// Elements, and scales if there are any, are sent as they are.
    #[default]
    No = 0,
    /// To E4M3 with a scale of type f32 for each [`GROUP`] elements.
    F32 = 1,
    /// The same, with powers of two.
    PowersOfTwo = 2,
    /// The same, and each scale is only its biased exponent, one byte (UE8M0).
    Exponents = 3,
}

/// Where a pass's tokens go, as the caller has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choices {
    /// Address of the experts, `[tokens][top-k]`, below 0 for none.
    pub experts: u64,
    /// Address of their weights, f32; 0 if all are 1.
    pub weights: u64,
    /// Whether experts are i64, not i32.
    pub wide: u32,
    /// Not used.
    pub reserved: u32,
}

impl Choices {
    /// Choice `index` of all tokens'.
    ///
    /// # Safety
    /// It must be there. So for its weight.
    #[inline(always)]
    pub(crate) unsafe fn expert<M: Memory>(&self, memory: &M, index: u64) -> i64 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.wide {
                0 => memory.read::<i32>(self.experts + 4 * index).into(),
                _ => memory.read::<i64>(self.experts + 8 * index),
            }
        }
    }

    /// # Safety
    /// As for [`expert`](Self::expert).
    #[inline(always)]
    pub(crate) unsafe fn weight<M: Memory>(&self, memory: &M, index: u64) -> f32 {
        match self.weights {
            0 => 1.0,
            // SAFETY: the caller's promise.
            weights => unsafe { memory.read(weights + 4 * index) },
        }
    }
}

/// What a dispatch sends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Input {
    /// Address of the tokens, one after the other.
    pub tokens: u64,
    /// Address of their scales, if they are quantised already.
    pub scales: u64,
    /// Elements of a token.
    pub hidden: u64,
    /// Bytes of a token at `tokens`.
    pub token_bytes: u64,
    /// Bytes of a row's elements.
    pub payload_bytes: u64,
    /// Bytes of a row's scales; 0 if there are none.
    pub scale_bytes: u64,
    /// Whether to quantise.
    pub quantise: Quantise,
    /// What is called.
    pub call: Call,
}

/// Where what was received is laid out; 0 for what is not wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Output {
    /// Address of the rows' elements.
    pub tokens: u64,
    /// Address of the rows' scales.
    pub scales: u64,
    /// Address of the local experts of each row, [`Routes::top_k`] each, -1 for none; of rows that are not grouped by
    /// expert.
    pub experts: u64,
    /// Address of the weights: f32, one of each row that is grouped by expert, otherwise as many as experts.
    pub weights: u64,
    /// Address of `i32` for each row: which of its source's tokens it is.
    pub sources: u64,
    /// Rows that there is room for.
    pub capacity: u64,
    /// Bytes of a row's elements.
    pub payload_bytes: u64,
    /// Bytes of a row's scales.
    pub scale_bytes: u64,
    /// Whether `experts` are i64, not i32.
    pub wide: u32,
}

// Words of what a row says of itself.
pub(crate) const TOKEN: u64 = 0;
pub(crate) const EXPERTS: u64 = 8;

/// Block: takes where its tokens go, or where all do, if they are so few that [`send`] marks all in each block. A thread
/// does it for a choice.
///
/// # Errors
/// [`Stopped`]: an expert does not exist. Its number, and that of the choice, is in what the wait hook is told
/// ([`Phase::Choices`]).
///
/// # Safety
/// As for [`send`], but for experts; `choices` must be valid for the pass's tokens.
pub unsafe fn route<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    choices: &Choices,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let tokens = match routes.tokens <= ALONE {
        true => (0, routes.tokens),
        false => share(routes.tokens, index, group.blocks),
    };
    let (mut pair, mut mine) = (tokens.0 * routes.top_k + block.thread(), Ok(()));
    while pair < tokens.1 * routes.top_k && mine.is_ok() {
        let (token, k) = split(pair, routes.top_k);
        let (from, to) = (
            u64::from(pair),
            u64::from(token) * u64::from(geometry.top_k) + u64::from(k),
        );
        // SAFETY: the caller's promise.
        unsafe {
            let expert = choices.expert(memory, from);
            let weight = choices.weight(memory, from);
            if !(-1..i64::from(geometry.experts)).contains(&expert) {
                mine = Err(refuse_choice(block, group, pair, expert));
            }
            memory.write(routes.experts + 4 * to, expert as i32);
            memory.write(routes.weights + 4 * to, weight);
        }
        pair += block.threads();
    }
    block.sync(mine)
}

/// Ends the launch because choice `index` of all is of an expert that does not exist.
#[cold]
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub(crate) fn refuse_choice<B: Block>(
    block: &B,
    group: &Group,
    index: u32,
    expert: i64,
) -> Stopped {
    block.refuse(&Waiting {
        site: site(WaitKind::Envelope, group.rank, Phase::Choices),
        spins: index,
        expected: group.geometry.experts.into(),
        seen: expert as u64,
    })
}

/// Sends this rank's tokens. Returns when they have left: the input may be changed then.
///
/// # Errors
/// [`Stopped`]: a wait was ended. If it was for a peer, nothing was sent.
///
/// # Safety
/// Everything that the tables point to must be valid, and the group's and the pass's memory nobody else's on this
/// rank. Experts must be below the group's. All thread blocks must call this, with all their threads.
pub unsafe fn send<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    input: &Input,
    index: u32,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise, here and in all functions that are called.
    unsafe {
        let call = next_to_send(block, group);
        wait_for_credits(block, group, call)?;
        let tokens = share(routes.tokens, index, group.blocks);
        // Of few tokens, a block marks all, and waits for no other.
        let is_alone = routes.tokens <= ALONE;
        let marked = Marked::of(block.memory(), group, (index, is_alone));
        if is_alone {
            mark(block, group, routes, marked, (0, routes.tokens));
            block.sync(Ok(()))?;
        } else {
            mark(block, group, routes, marked, tokens);
            barrier(block, group)?;
        }
        let mut peer = index;
        while peer < group.geometry.ranks {
            if !is_masked(block.memory(), group, peer) {
                announce(block, group, routes, marked, (call, peer), input.call);
            }
            block.wake(peer);
            peer += group.blocks;
        }
        give_slots(block, group, routes, (marked, tokens), index);
        block.sync(Ok(()))?;
        send_tokens(
            block,
            rows,
            group,
            routes,
            input,
            (marked, call, tokens),
            index,
        );
        marked.clear_last(block, group, index);
        if finish_sending(block, group, call)? && block.thread() == 0 {
            let memory = block.memory();
            let dispatches = memory.load(group.state + DISPATCHES);
            memory.store(group.state + DISPATCHES, dispatches + 1);
        }
    }
    Ok(())
}

/// Block: marks where tokens go. A thread does it for a choice.
#[inline(always)]
unsafe fn mark<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    marked: Marked,
    tokens: (u32, u32),
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let mut pair = tokens.0 * routes.top_k + block.thread();
    while pair < tokens.1 * routes.top_k {
        let (token, k) = split(pair, routes.top_k);
        // Negative ones are nobody's.
        let at = |k: u32| {
            let index = u64::from(token) * u64::from(geometry.top_k) + u64::from(k);
            // SAFETY: the caller's promise.
            unsafe { memory.read::<i32>(routes.experts + 4 * index) as u32 }
        };
        let expert = at(k);
        if expert < geometry.experts {
            let rank = geometry.rank_of(expert);
            let (first, end) = (geometry.first_expert(rank), geometry.first_expert(rank + 1));
            let (mut is_first, mut is_first_of_rank) = (true, true);
            let mut before = 0;
            while before < k {
                let other = at(before);
                is_first &= other != expert;
                is_first_of_rank &= other < first || other >= end;
                before += 1;
            }
            // SAFETY: the caller's promise.
            unsafe {
                if is_first {
                    marked.of_number(geometry, expert).mark(memory, token);
                }
                if is_first_of_rank {
                    marked
                        .of_number(geometry, geometry.experts + rank)
                        .mark(memory, token);
                }
            }
        }
        pair += block.threads();
    }
}

/// Block: gives its tokens their slots; none to ranks that are masked, which will send nothing back. A thread does it for
/// a token and a rank.
#[inline(always)]
unsafe fn give_slots<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    (marked, tokens): (Marked, (u32, u32)),
    index: u32,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let mut pair = tokens.0 * geometry.ranks + block.thread();
    while pair < tokens.1 * geometry.ranks {
        let (token, rank) = split(pair, geometry.ranks);
        // SAFETY: the caller's promise; a barrier has ordered the marks.
        unsafe {
            let marks = marked.of_number(geometry, geometry.experts + rank);
            let is_sent = marks.is_marked(memory, token) && !is_masked(memory, group, rank);
            let slot = if is_sent {
                marks.before(memory, token)
            } else {
                NONE
            };
            memory.write(routes.slots + 4 * u64::from(pair), slot);
        }
        pair += block.threads();
    }
    let mut rank = block.thread();
    while index == 0 && rank < geometry.ranks {
        // SAFETY: as above.
        unsafe {
            let sent = match is_masked(memory, group, rank) {
                true => 0,
                false => marked
                    .of_number(geometry, geometry.experts + rank)
                    .before(memory, routes.tokens),
            };
            memory.write(routes.sent + 4 * u64::from(rank), sent);
        }
        rank += block.threads();
    }
}

/// Block: tells a rank what will come.
#[inline(always)]
unsafe fn announce<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    marked: Marked,
    (call, peer): (u64, u32),
    what: Call,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise; a barrier has ordered the marks.
    unsafe {
        let mut local = block.thread();
        while local < geometry.local_experts(peer) {
            let expert = geometry.first_expert(peer) + local;
            let count = marked
                .of_number(geometry, expert)
                .before(memory, routes.tokens);
            send_packet(block, group, (call, peer), HEAD + local, count);
            local += block.threads();
        }
        let rows = marked
            .of_number(geometry, geometry.experts + peer)
            .before(memory, routes.tokens);
        send_head(block, group, (call, peer), what, rows);
    }
}

/// Block: sends its tokens to all ranks that they go to. A warp does it for a segment of a token.
#[inline(always)]
unsafe fn send_tokens<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    input: &Input,
    (marked, call, tokens): (Marked, u64, (u32, u32)),
    index: u32,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let segments = Segments::of::<R>(input.token_bytes);
    let mut item = tokens.0 * segments.each + block.warp();
    while item < tokens.1 * segments.each {
        let (token, segment) = split(item, segments.each);
        let (begin, bytes) = segments.at(segment);
        let at = u64::from(token);
        // SAFETY: the caller's promise; slots are below the most tokens, rows are for this rank to write.
        unsafe {
            let row_at = |rank: u32| {
                let slot: u32 = memory
                    .read(routes.slots + 4 * (at * u64::from(geometry.ranks) + u64::from(rank)));
                match slot {
                    NONE => 0,
                    slot => address_of(memory, group, rank) + geometry.row(call, group.rank, slot),
                }
            };
            let below = |offset: u64| {
                move |rank| match row_at(rank) {
                    0 => 0,
                    row => row + offset,
                }
            };
            let from = input.tokens + at * input.token_bytes + begin;
            let scales_at = align(input.payload_bytes, 16);
            if input.quantise == Quantise::No {
                rows.scatter(block, (geometry.ranks, below(begin)), from, bytes);
                if input.scale_bytes > 0 && segment == 0 {
                    let from = input.scales + at * input.scale_bytes;
                    let to = below(scales_at);
                    rows.scatter(block, (geometry.ranks, to), from, input.scale_bytes);
                }
            } else {
                let size = input.token_bytes.checked_div(input.hidden).unwrap_or(1);
                let (first, elements) = (
                    begin.checked_div(size).unwrap_or_default(),
                    bytes.checked_div(size).unwrap_or_default(),
                );
                let each = match input.quantise {
                    Quantise::Exponents => 1,
                    _ => 4,
                };
                let warp = u64::from(index) * u64::from(block.warps()) + u64::from(block.warp());
                let staging = group.staging + warp * group.staging_bytes;
                let scales = staging + align(elements, 16);
                rows.quantise(block, (staging, scales), from, elements, input.quantise);
                rows.scatter(block, (geometry.ranks, below(first)), staging, elements);
                let to = below(scales_at + first / GROUP * each);
                // Whole words; behind the last scale there is 0.
                let bytes = align(elements.div_ceil(GROUP) * each, 4);
                rows.scatter(block, (geometry.ranks, to), scales, bytes);
            }
            let mut rank = 0;
            while rank < geometry.ranks && segment == 0 {
                let row = row_at(rank);
                if row != 0 {
                    describe(
                        block,
                        group,
                        routes,
                        marked,
                        (token, rank),
                        row + geometry.meta(),
                    );
                }
                rank += 1;
            }
        }
        item += block.warps();
        block.checkpoint();
    }
}

/// Warp: writes what a row to `rank` is.
#[inline(always)]
unsafe fn describe<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    marked: Marked,
    (token, rank): (u32, u32),
    meta: u64,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise.
    unsafe {
        if block.lane() == 0 {
            memory.write(meta + TOKEN, token);
        }
        let places = meta + EXPERTS + 4 * u64::from(geometry.top_k);
        let weights = places + 4 * u64::from(geometry.top_k);
        let mut k = block.lane();
        while k < routes.top_k {
            let from = 4 * (u64::from(token) * u64::from(geometry.top_k) + u64::from(k));
            let expert: i32 = memory.read(routes.experts + from);
            let local = (expert as u32).wrapping_sub(geometry.first_expert(rank));
            let is_there = expert >= 0 && local < geometry.local_experts(rank);
            let at = 4 * u64::from(k);
            memory.write(
                meta + EXPERTS + at,
                if is_there { local as i32 } else { -1 },
            );
            if is_there {
                let place = marked
                    .of_number(geometry, expert as u32)
                    .before(memory, token);
                memory.write(places + at, place);
            }
            memory.write(weights + at, memory.read::<f32>(routes.weights + from));
            k += block.lanes();
        }
    }
}

/// Waits until all ranks have said what will come, and decides where it goes: fills [`Routes::received`],
/// [`Routes::counts`], [`Routes::begins`], [`Routes::bases`] and [`Routes::offsets`], which each thread block does for
/// itself.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a rank makes another call.
///
/// # Safety
/// As for [`send`].
pub unsafe fn count<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    what: Call,
) -> Result<(), Stopped> {
    // SAFETY: the caller's promise.
    unsafe {
        let call = next_to_complete(block, group);
        count_sources(block, group, routes, what, call)?;
        count_experts(block, group, routes, call)
    }
}

/// The first part of [`count`]: how many rows come from each source, which all threads know then. `call` is the
/// call's number.
#[inline(always)]
pub(crate) unsafe fn count_sources<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    what: Call,
    call: u64,
) -> Result<(), Stopped> {
    let memory = block.memory();
    // SAFETY: the caller's promise.
    unsafe {
        let mut source = block.thread();
        while source < group.geometry.ranks {
            if is_masked(memory, group, source) {
                memory.write(routes.received + 4 * u64::from(source), 0_u32);
            }
            source += block.threads();
        }
        for_each_peer(block, group, |source| {
            let rows = wait_for_head(block, group, (call, source), what)?;
            memory.write(routes.received + 4 * u64::from(source), rows);
            Ok(())
        })
    }
}

/// The rest: how many come for each expert, and where they go.
#[inline(always)]
pub(crate) unsafe fn count_experts<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    call: u64,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let own = geometry.local_experts(group.rank);
    // SAFETY: the caller's promise.
    unsafe {
        // A thread waits for a source and an expert.
        let mut mine = Ok(());
        let mut pair = block.thread();
        while pair < geometry.ranks * own && mine.is_ok() {
            let (source, local) = split(pair, own);
            let rows: u32 = memory.read(routes.received + 4 * u64::from(source));
            let count = match is_masked(memory, group, source) {
                true => Ok(0),
                false => wait_for_packet(block, group, (call, source), HEAD + local),
            };
            // None has more for an expert than rows.
            let count = count.and_then(|count| match count <= rows {
                true => Ok(count),
                false => Err(refuse(block, source, rows, count)),
            });
            let at =
                4 * (u64::from(source) * u64::from(geometry.most_experts()) + u64::from(local));
            match count {
                Ok(count) => memory.write(routes.counts + at, count),
                Err(stopped) => mine = Err(stopped),
            }
            pair += block.threads();
        }
        block.sync(mine)?;
        place(block, group, routes, own)
    }
}

/// Block: decides where what comes goes.
unsafe fn place<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    own: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let tokens = geometry.ranks * geometry.max_tokens;
    let (most, is_by_expert) = (
        u64::from(geometry.most_experts()),
        routes.placement.is_by_expert(),
    );
    // SAFETY: the caller's promise.
    unsafe {
        if block.thread() == 0 {
            let (mut source, mut base) = (0, 0);
            while source < geometry.ranks {
                if routes.placement != Placement::Flat {
                    base = source * geometry.max_tokens;
                }
                memory.write(routes.bases + 4 * u64::from(source), base);
                if routes.placement == Placement::Flat {
                    base += memory.read::<u32>(routes.received + 4 * u64::from(source));
                }
                source += 1;
            }
            let rows = match routes.placement {
                Placement::Flat => base,
                _ => tokens,
            };
            if !is_by_expert {
                memory.write(routes.offsets + 4 * u64::from(own), rows);
            }
        }
        // How many rows each expert takes up, then where they begin. A thread has some experts side by side.
        let experts = share(own, block.thread(), block.threads());
        let mut local = experts.0;
        while local < experts.1 {
            let (mut source, mut total) = (0, 0);
            while source < geometry.ranks {
                let at = u64::from(source) * most + u64::from(local);
                total += memory.read::<u32>(routes.counts + 4 * at);
                source += 1;
            }
            let total = match routes.placement {
                Placement::ExpertMajor => tokens,
                // What cannot be is more than any room, and [`receive`] refuses it.
                Placement::ExpertPacked => {
                    let total = align(total.into(), routes.alignment.into());
                    if total < NONE.into() {
                        total as u32
                    } else {
                        NONE
                    }
                }
                _ => 0,
            };
            memory.write(routes.totals + 4 * u64::from(local), total);
            local += 1;
        }
        block.sync(Ok(()))?;
        let (mut local, mut begin) = (0, 0);
        while local < experts.0 && routes.placement == Placement::ExpertPacked {
            let total: u32 = memory.read(routes.totals + 4 * u64::from(local));
            begin = total.saturating_add(begin);
            local += 1;
        }
        if routes.placement == Placement::ExpertMajor {
            begin = experts.0 * tokens;
        }
        local = experts.0;
        while local < experts.1 {
            if is_by_expert {
                memory.write(routes.offsets + 4 * u64::from(local), begin);
            }
            let (mut source, mut next) = (0, begin);
            while source < geometry.ranks {
                let at = u64::from(source) * most + u64::from(local);
                memory.write(routes.begins + 4 * at, next);
                next = memory
                    .read::<u32>(routes.counts + 4 * at)
                    .saturating_add(next);
                source += 1;
            }
            let total: u32 = memory.read(routes.totals + 4 * u64::from(local));
            begin = total.saturating_add(begin);
            local += 1;
        }
        // Whoever has the last expert; of a rank without any, everybody.
        if is_by_expert && experts.1 == own {
            memory.write(routes.offsets + 4 * u64::from(own), begin);
        }
    }
    block.sync(Ok(()))
}

/// Lays out what was received, after a [`count`]; what the output has no room for must not come. Completes the call.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a rank has sent what it had not said.
///
/// # Safety
/// As for [`send`]; the output must be valid for its capacity, and nobody else's.
pub unsafe fn receive<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    output: &Output,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise, here and in all functions that are called.
    unsafe {
        let call = next_to_complete(block, group);
        // All waits come first: if one is ended, nothing has changed.
        for_each_peer(block, group, |source| {
            wait_for_flag(block, group, call, source, ROWS_FLAG)
        })?;
        let own = geometry.local_experts(group.rank);
        let needed: u32 = memory.read(routes.offsets + 4 * u64::from(own));
        let (mut mine, mut source, mut before) = (Ok(()), 0, 0);
        if u64::from(needed) > output.capacity {
            // Nobody can have so many, but a peer may say so.
            mine = Err(refuse(block, group.rank, output.capacity as u32, needed));
        }
        while source < geometry.ranks && mine.is_ok() {
            let received: u32 = memory.read(routes.received + 4 * u64::from(source));
            let slots = share(received, index, group.blocks);
            mine = describe_received(block, group, routes, output, (call, source, slots), before);
            before += (slots.1 - slots.0) * routes.top_k;
            source += 1;
        }
        block.sync(mine)?;
        let (mut source, mut before) = (0, 0);
        while source < geometry.ranks {
            let received: u32 = memory.read(routes.received + 4 * u64::from(source));
            let slots = share(received, index, group.blocks);
            before += lay_out(
                block,
                rows,
                group,
                routes,
                output,
                (call, source, slots),
                before,
            );
            source += 1;
        }
        pad(block, group, routes, output, (index, group.blocks));
        finish_receiving(block, group, call)
    }
}

/// What a row that has come says of itself.
#[derive(Clone, Copy)]
pub(crate) struct Meta {
    pub(crate) address: u64,
    /// Experts here.
    pub(crate) own: u32,
    /// The group's.
    pub(crate) top_k: u32,
}

impl Meta {
    #[inline(always)]
    unsafe fn of<M: Memory>(
        memory: &M,
        group: &Group,
        (call, source, slot): (u64, u32, u32),
    ) -> Self {
        let geometry = &group.geometry;
        // SAFETY: the caller's promise.
        let area = unsafe { address_of(memory, group, group.rank) };
        Self {
            address: area + geometry.row(call, source, slot) + geometry.meta(),
            own: geometry.local_experts(group.rank),
            top_k: geometry.top_k,
        }
    }

    #[inline(always)]
    unsafe fn token<M: Memory>(&self, memory: &M) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { memory.read(self.address + TOKEN) }
    }

    /// Choice `k`, if it is an expert here; below the number of those, whatever peers say.
    #[inline(always)]
    pub(crate) unsafe fn expert<M: Memory>(&self, memory: &M, k: u32) -> Option<u32> {
        // SAFETY: the caller's promise. What is negative is no expert.
        let local = unsafe { memory.read::<i32>(self.address + EXPERTS + 4 * u64::from(k)) } as u32;
        (local < self.own).then_some(local)
    }

    /// Where the row is among its source's for that expert.
    #[inline(always)]
    pub(crate) unsafe fn place<M: Memory>(&self, memory: &M, k: u32) -> u32 {
        let at = u64::from(self.top_k) + u64::from(k);
        // SAFETY: the caller's promise.
        unsafe { memory.read(self.address + EXPERTS + 4 * at) }
    }

    #[inline(always)]
    unsafe fn weight<M: Memory>(&self, memory: &M, k: u32) -> f32 {
        let at = 2 * u64::from(self.top_k) + u64::from(k);
        // SAFETY: the caller's promise.
        unsafe { memory.read(self.address + EXPERTS + 4 * at) }
    }
}

/// Block: says of some rows of `source` whose they are, for which experts and with what weights; of rows that are grouped
/// by expert, finds where they go and keeps their weights. A thread does it for a choice; `before` were there before.
#[inline(always)]
unsafe fn describe_received<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    output: &Output,
    (call, source, slots): (u64, u32, (u32, u32)),
    before: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let mut pair = slots.0 * routes.top_k + turn(block.thread(), block.threads(), before);
    while pair < slots.1 * routes.top_k {
        let (slot, k) = split(pair, routes.top_k);
        // SAFETY: the caller's promise; experts are compared with how many there are, and so are places.
        unsafe {
            let meta = Meta::of(memory, group, (call, source, slot));
            if routes.placement.is_by_expert() {
                let position = position(block, group, routes, (source, k), &meta)?;
                let at = (source, slot, k);
                place_row(memory, group, routes, output, at, (position, &meta));
            } else {
                let base: u32 = memory.read(routes.bases + 4 * u64::from(source));
                describe_row(memory, routes, output, (base + slot, k), &meta);
            }
        }
        pair += block.threads();
    }
    Ok(())
}

/// Says of choice `k` of the row that is laid out at `position` whose it is, and with what weight.
#[inline(always)]
pub(crate) unsafe fn describe_row<M: Memory>(
    memory: &M,
    routes: &Routes,
    output: &Output,
    (position, k): (u32, u32),
    meta: &Meta,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let at = u64::from(position) * u64::from(routes.top_k) + u64::from(k);
        let local = meta.expert(memory, k);
        write_expert(memory, output, at, local.map_or(-1, |local| local as i32));
        if output.weights != 0 {
            // Those of other ranks' experts are no business of this one.
            let weight = match local {
                Some(_) => meta.weight(memory, k),
                None => 0.0,
            };
            memory.write(output.weights + 4 * at, weight);
        }
        if output.sources != 0 && k == 0 {
            let at = output.sources + 4 * u64::from(position);
            memory.write(at, meta.token(memory));
        }
    }
}

/// Where a row goes for one of its choices, [`NONE`] if that is not here; the same expert again has the same place.
#[inline(always)]
pub(crate) unsafe fn position<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    (source, k): (u32, u32),
    meta: &Meta,
) -> Result<u32, Stopped> {
    let memory = block.memory();
    // SAFETY: the caller's promise.
    unsafe {
        let Some(local) = meta.expert(memory, k) else {
            return Ok(NONE);
        };
        let most = u64::from(group.geometry.most_experts());
        let of_expert = 4 * (u64::from(source) * most + u64::from(local));
        let count: u32 = memory.read(routes.counts + of_expert);
        let place = meta.place(memory, k);
        // More than were announced would lie over others.
        match place < count {
            true => Ok(memory.read::<u32>(routes.begins + of_expert) + place),
            false => Err(refuse(block, source, count, place.saturating_add(1))),
        }
    }
}

/// Keeps where a row goes for one of its choices, as [`position`] says, and the weight.
#[inline(always)]
pub(crate) unsafe fn place_row<M: Memory>(
    memory: &M,
    group: &Group,
    routes: &Routes,
    output: &Output,
    (source, slot, k): (u32, u32, u32),
    (position, meta): (u32, &Meta),
) {
    let geometry = &group.geometry;
    // SAFETY: the caller's promise.
    unsafe {
        let row = Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
        let at = 4 * (row + u64::from(k));
        memory.write(routes.positions + at, position);
        let Some(local) = meta.expert(memory, k) else {
            return;
        };
        memory.write(routes.received_weights + at, meta.weight(memory, k));
        // The first of a row's choices of an expert speaks for all.
        let (mut before, mut is_first) = (0, true);
        while before < k {
            is_first &= meta.expert(memory, before) != Some(local);
            before += 1;
        }
        if is_first && output.weights != 0 {
            let (mut sum, mut other) = (0.0, k);
            while other < routes.top_k {
                if meta.expert(memory, other) == Some(local) {
                    sum += meta.weight(memory, other);
                }
                other += 1;
            }
            memory.write(output.weights + 4 * u64::from(position), sum);
        }
        if is_first && output.sources != 0 {
            memory.write(output.sources + 4 * u64::from(position), meta.token(memory));
        }
    }
}

/// Block: copies some rows of `source` to where they go. A warp does it for a segment of a row; `before` were there
/// before. Returns how many these are.
#[inline(always)]
unsafe fn lay_out<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    output: &Output,
    (call, source, slots): (u64, u32, (u32, u32)),
    before: u32,
) -> u32 {
    let memory = block.memory();
    let geometry = &group.geometry;
    let is_by_expert = routes.placement.is_by_expert();
    let targets = if is_by_expert { routes.top_k } else { 1 };
    let segments = Segments::of::<R>(output.payload_bytes);
    let mut item = slots.0 * segments.each + turn(block.warp(), block.warps(), before);
    while item < slots.1 * segments.each {
        let (slot, segment) = split(item, segments.each);
        let (begin, bytes) = segments.at(segment);
        // SAFETY: the caller's promise; there is room for what was counted.
        unsafe {
            let row = address_of(memory, group, group.rank) + geometry.row(call, source, slot);
            let first = 4 * Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
            let position = |k: u32| -> u32 {
                if !is_by_expert {
                    return memory.read::<u32>(routes.bases + 4 * u64::from(source)) + slot;
                }
                let at = |k: u32| memory.read::<u32>(routes.positions + first + 4 * u64::from(k));
                let (position, mut before) = (at(k), 0);
                // The same expert again has its row already.
                while before < k {
                    if at(before) == position {
                        return NONE;
                    }
                    before += 1;
                }
                position
            };
            let to = |address: u64, bytes: u64, begin: u64| {
                move |k: u32| match position(k) {
                    NONE => 0,
                    position => address + u64::from(position) * bytes + begin,
                }
            };
            let to_tokens = to(output.tokens, output.payload_bytes, begin);
            rows.scatter(block, (targets, to_tokens), row + begin, bytes);
            if output.scales != 0 && segment == 0 {
                let from = row + align(output.payload_bytes, 16);
                let to_scales = to(output.scales, output.scale_bytes, 0);
                rows.scatter(block, (targets, to_scales), from, output.scale_bytes);
            }
        }
        item += block.warps();
        block.checkpoint();
    }
    (slots.1 - slots.0) * segments.each
}

/// Writes which expert entry `at` is for.
#[inline(always)]
unsafe fn write_expert<M: Memory>(memory: &M, output: &Output, at: u64, local: i32) {
    // SAFETY: the caller's promise.
    unsafe {
        match (output.experts, output.wide) {
            (0, _) => {}
            (to, 0) => memory.write(to + 4 * at, local),
            (to, _) => memory.write(to + 8 * at, i64::from(local)),
        }
    }
}

/// Block: its share, of so many, of what says that the rest of the output is nothing: no expert for rows without a token, zeros
/// between experts.
pub(crate) unsafe fn pad<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    output: &Output,
    (index, blocks): (u32, u32),
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let own = geometry.local_experts(group.rank);
    // SAFETY: the caller's promise.
    unsafe {
        match routes.placement {
            Placement::ExpertMajor => {}
            Placement::RankMajor => {
                let mut source = index;
                while source < geometry.ranks {
                    let received: u32 = memory.read(routes.received + 4 * u64::from(source));
                    let base = u64::from(source) * u64::from(geometry.max_tokens);
                    let end = base + u64::from(geometry.max_tokens);
                    no_experts(block, routes, output, (base + u64::from(received), end));
                    source += blocks;
                }
            }
            Placement::Flat if index == 0 => {
                let end: u32 = memory.read(routes.offsets + 4 * u64::from(own));
                no_experts(block, routes, output, (end.into(), output.capacity));
            }
            Placement::Flat => {}
            Placement::ExpertPacked => {
                let mut local = index;
                while local < own {
                    let last = geometry.ranks - 1;
                    let last = u64::from(last) * u64::from(geometry.most_experts());
                    let at = 4 * (last + u64::from(local));
                    let end: u32 = memory.read(routes.offsets + 4 * u64::from(local + 1));
                    let begin: u32 = memory.read(routes.begins + at);
                    let filled = begin + memory.read::<u32>(routes.counts + at);
                    zero_rows(block, output, (filled, end));
                    local += blocks;
                }
            }
        }
    }
}

/// Block: rows of a range are for no expert.
unsafe fn no_experts<B: Block>(block: &B, routes: &Routes, output: &Output, range: (u64, u64)) {
    let top_k = u64::from(routes.top_k);
    let mut at = range.0 * top_k + u64::from(block.thread());
    while at < range.1 * top_k {
        // SAFETY: the caller's promise.
        unsafe {
            write_expert(block.memory(), output, at, -1);
            if output.weights != 0 {
                block.memory().write(output.weights + 4 * at, 0.0_f32);
            }
        }
        at += u64::from(block.threads());
    }
}

/// Block: rows of a range are zero, and nobody's.
unsafe fn zero_rows<B: Block>(block: &B, output: &Output, (begin, end): (u32, u32)) {
    let memory = block.memory();
    // SAFETY: the caller's promise.
    unsafe {
        // All sizes are multiples of a word.
        let fill = |to: u64, bytes: u64| {
            let at = to + u64::from(begin) * bytes;
            let (mut word, end) = (
                u64::from(block.thread()),
                u64::from(end - begin) * bytes / 4,
            );
            while to != 0 && word < end {
                memory.write(at + 4 * word, 0_u32);
                word += u64::from(block.threads());
            }
        };
        fill(output.tokens, output.payload_bytes);
        fill(output.scales, output.scale_bytes);
        fill(output.weights, 4);
        let mut row = begin + block.thread();
        while output.sources != 0 && row < end {
            memory.write(output.sources + 4 * u64::from(row), -1_i32);
            row += block.threads();
        }
    }
}
