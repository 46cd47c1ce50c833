//! Dispatch: tokens to the ranks of their experts.
//!
//! [`send`] sends, [`count`] waits for what will come and decides where it goes, [`receive`] lays it out. The waits
//! of each come before anything that others could see, so one that was stopped can be launched again.

use super::rows::Rows;
use super::{
    COMPLETED, Call, Group, HEAD, NONE, Placement, ROWS_FLAG, Routes, SENT, address_of, align,
    barrier, for_each_peer, give_credits, is_masked, next_to_complete, next_to_send, raise_flags,
    refuse, send_head, send_packet, share, wait_for_credits, wait_for_flag, wait_for_head,
    wait_for_packet,
};
use crate::block::Block;
use crate::channel::copy;
use crate::memory::Memory;
use crate::wait::Stopped;

/// What rows hold besides plain elements. The discriminants are part of the device ABI.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Quantise {
    /// Elements, and scales if there are any, are sent as they are.
    #[default]
    No = 0,
    /// To E4M3 with a scale of type f32 for each [`GROUP`](super::GROUP) elements.
    F32 = 1,
    /// The same, with powers of two.
    PowersOfTwo = 2,
    /// The same, and each scale is only its biased exponent, one byte (UE8M0).
    Exponents = 3,
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
const TOKEN: u64 = 0;
const EXPERTS: u64 = 8;

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
        count_own(block, group, routes, tokens, index);
        barrier(block, group)?;
        give_slots(block, group, routes, tokens, index);
        let mut peer = index;
        while peer < group.geometry.ranks {
            if !is_masked(block.memory(), group, peer) {
                announce(block, group, (call, peer), input.call);
            }
            block.wake(peer);
            peer += group.blocks;
        }
        block.sync(Ok(()))?;
        let mut token = tokens.0;
        while token < tokens.1 {
            send_token(block, rows, group, routes, input, (call, token), index)?;
            token += 1;
            block.checkpoint();
        }
        barrier(block, group)?;
        if index == 0 {
            raise_flags(block, group, call, ROWS_FLAG);
            if block.thread() == 0 {
                block.memory().store(group.state + SENT, call + 1);
            }
        }
    }
    Ok(())
}

/// The `k`-th expert of a token, if `rank` has it and no earlier one is the same.
#[inline(always)]
unsafe fn expert_of<M: Memory>(
    memory: &M,
    group: &Group,
    routes: &Routes,
    (token, k): (u32, u32),
    rank: u32,
) -> Option<u32> {
    let geometry = &group.geometry;
    // Negative ones are no rank's.
    let at = |k: u32| {
        let index = u64::from(token) * u64::from(geometry.top_k) + u64::from(k);
        // SAFETY: the caller's promise.
        unsafe { memory.read::<i32>(routes.experts + 4 * index) as u32 }
    };
    let expert = at(k);
    let here = geometry.first_expert(rank) <= expert && expert < geometry.first_expert(rank + 1);
    let mut before = 0;
    while here && before < k {
        if at(before) == expert {
            return None;
        }
        before += 1;
    }
    here.then_some(expert)
}

/// Block: counts its tokens' rows to each rank and expert. A thread counts for a rank: no two touch one counter.
unsafe fn count_own<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    tokens: (u32, u32),
    index: u32,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let of_rank = |rank: u32| {
        group.block_rows + 4 * (u64::from(index) * u64::from(geometry.ranks) + u64::from(rank))
    };
    let of_expert = |expert: u32| {
        group.block_experts
            + 4 * (u64::from(index) * u64::from(geometry.experts) + u64::from(expert))
    };
    let mut rank = block.thread();
    while rank < geometry.ranks {
        // SAFETY: the caller's promise; the block's own counters.
        unsafe {
            let mut expert = geometry.first_expert(rank);
            while expert < geometry.first_expert(rank + 1) {
                memory.write(of_expert(expert), 0_u32);
                expert += 1;
            }
            let (mut token, mut count) = (tokens.0, 0_u32);
            while token < tokens.1 {
                let (mut k, mut is_sent) = (0, false);
                while k < routes.top_k {
                    if let Some(expert) = expert_of(memory, group, routes, (token, k), rank) {
                        let of = of_expert(expert);
                        memory.write(of, memory.read::<u32>(of) + 1);
                        is_sent = true;
                    }
                    k += 1;
                }
                count += u32::from(is_sent);
                token += 1;
            }
            memory.write(of_rank(rank), count);
        }
        rank += block.threads();
    }
}

/// The sum of a counter over the first `blocks` thread blocks.
#[inline(always)]
unsafe fn sum_of<M: Memory>(memory: &M, first: u64, stride: u32, blocks: u32) -> u32 {
    let (mut sum, mut block) = (0, 0);
    while block < blocks {
        // SAFETY: the caller's promise.
        sum += unsafe { memory.read::<u32>(first + 4 * u64::from(block) * u64::from(stride)) };
        block += 1;
    }
    sum
}

/// Block: gives its tokens their slots, after those of the blocks before it; none to ranks that are masked, which will
/// send nothing back. A thread does it for a rank.
unsafe fn give_slots<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    tokens: (u32, u32),
    index: u32,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    let mut rank = block.thread();
    while rank < geometry.ranks {
        // SAFETY: the caller's promise; the block's own tokens, and counters that a barrier has ordered.
        unsafe {
            let counter = group.block_rows + 4 * u64::from(rank);
            let mut slot = sum_of(memory, counter, geometry.ranks, index);
            let is_masked = is_masked(memory, group, rank);
            let mut token = tokens.0;
            while token < tokens.1 {
                let (mut k, mut is_sent) = (0, false);
                while k < routes.top_k && !is_sent && !is_masked {
                    is_sent = expert_of(memory, group, routes, (token, k), rank).is_some();
                    k += 1;
                }
                let at = u64::from(token) * u64::from(geometry.ranks) + u64::from(rank);
                memory.write(routes.slots + 4 * at, if is_sent { slot } else { NONE });
                slot += u32::from(is_sent);
                token += 1;
            }
            if index + 1 == group.blocks {
                memory.write(routes.sent + 4 * u64::from(rank), slot);
            }
        }
        rank += block.threads();
    }
}

/// Block: tells a rank what will come.
unsafe fn announce<B: Block>(block: &B, group: &Group, (call, peer): (u64, u32), what: Call) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise; a barrier has ordered the counters.
    unsafe {
        let mut local = block.thread();
        while local < geometry.local_experts(peer) {
            let expert = geometry.first_expert(peer) + local;
            let counter = group.block_experts + 4 * u64::from(expert);
            let count = sum_of(memory, counter, geometry.experts, group.blocks);
            send_packet(block, group, (call, peer), HEAD + local, count);
            local += block.threads();
        }
        let counter = group.block_rows + 4 * u64::from(peer);
        let rows = sum_of(memory, counter, geometry.ranks, group.blocks);
        send_head(block, group, (call, peer), what, rows);
    }
}

/// Block: sends a token to all ranks that it goes to.
unsafe fn send_token<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    input: &Input,
    (call, token): (u64, u32),
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let at = u64::from(token);
    let mut elements = input.tokens + at * input.token_bytes;
    let mut scales = input.scales + at * input.scale_bytes;
    // SAFETY: the caller's promise; slots are below the most tokens, rows are for this rank to write.
    unsafe {
        if input.quantise != Quantise::No {
            let staging = group.staging + u64::from(index) * geometry.row_bytes();
            let to = staging + align(input.payload_bytes, 16);
            rows.quantise(block, (staging, to), elements, input.hidden, input.quantise);
            block.sync(Ok(()))?;
            (elements, scales) = (staging, to);
        }
        let mut rank = 0;
        while rank < geometry.ranks {
            let slot: u32 =
                memory.read(routes.slots + 4 * (at * u64::from(geometry.ranks) + u64::from(rank)));
            if slot != NONE {
                let row = address_of(memory, group, rank) + geometry.row(call, group.rank, slot);
                copy(block, row, elements, input.payload_bytes);
                if input.scale_bytes > 0 {
                    let to = row + align(input.payload_bytes, 16);
                    copy(block, to, scales, input.scale_bytes);
                }
                describe(block, group, routes, (token, rank), row + geometry.meta());
            }
            rank += 1;
        }
        // The staging is used again.
        match input.quantise {
            Quantise::No => Ok(()),
            _ => block.sync(Ok(())),
        }
    }
}

/// Block: writes what a row to `rank` is.
unsafe fn describe<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    (token, rank): (u32, u32),
    meta: u64,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise.
    unsafe {
        if block.thread() == 0 {
            memory.write(meta + TOKEN, token);
        }
        let weights = meta + EXPERTS + 4 * u64::from(geometry.top_k);
        let mut k = block.thread();
        while k < routes.top_k {
            let from = 4 * (u64::from(token) * u64::from(geometry.top_k) + u64::from(k));
            let expert: i32 = memory.read(routes.experts + from);
            let local = (expert as u32).wrapping_sub(geometry.first_expert(rank));
            let is_there = expert >= 0 && local < geometry.local_experts(rank);
            let local = if is_there { local as i32 } else { -1 };
            memory.write(meta + EXPERTS + 4 * u64::from(k), local);
            memory.write(
                weights + 4 * u64::from(k),
                memory.read::<f32>(routes.weights + from),
            );
            k += block.threads();
        }
    }
}

/// Waits until all ranks have said what will come, and decides where it goes: fills [`Routes::received`],
/// [`Routes::counts`], [`Routes::begins`], [`Routes::bases`] and [`Routes::offsets`].
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
    index: u32,
) -> Result<(), Stopped> {
    if index != 0 {
        return Ok(());
    }
    let memory = block.memory();
    let geometry = &group.geometry;
    let own = geometry.local_experts(group.rank);
    // SAFETY: the caller's promise.
    unsafe {
        let call = next_to_complete(block, group);
        for_each_peer(block, group, |source| {
            let rows = wait_for_head(block, group, (call, source), what)?;
            memory.write(routes.received + 4 * u64::from(source), rows);
            Ok(())
        })?;
        let mut mine = Ok(());
        let mut source = 0;
        while source < geometry.ranks {
            let is_masked = is_masked(memory, group, source);
            if is_masked && block.thread() == 0 {
                memory.write(routes.received + 4 * u64::from(source), 0_u32);
            }
            let mut local = block.thread();
            while local < own && mine.is_ok() {
                let count = match is_masked {
                    true => Ok(0),
                    false => wait_for_packet(block, group, (call, source), HEAD + local),
                };
                let at =
                    4 * (u64::from(source) * u64::from(geometry.most_experts()) + u64::from(local));
                match count {
                    Ok(count) => memory.write(routes.counts + at, count),
                    Err(stopped) => mine = Err(stopped),
                }
                local += block.threads();
            }
            source += 1;
        }
        block.sync(mine)?;
        let mine = match block.thread() {
            0 => check(block, group, routes, own),
            _ => Ok(()),
        };
        block.sync(mine)?;
        if block.thread() == 0 {
            place(memory, group, routes, own);
        }
    }
    block.sync(Ok(()))
}

/// Whether what was announced can be: no source has more for an expert than rows, or more in all than its rows can be
/// for. What is laid out by counts stays where it belongs then, whatever peers say. One thread.
unsafe fn check<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    own: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let mut source = 0;
    while source < geometry.ranks {
        // SAFETY: the caller's promise.
        let rows: u32 = unsafe { memory.read(routes.received + 4 * u64::from(source)) };
        let first = u64::from(source) * u64::from(geometry.most_experts());
        let (mut local, mut sum) = (0, 0);
        while local < own {
            // SAFETY: as above.
            let count: u32 = unsafe { memory.read(routes.counts + 4 * (first + u64::from(local))) };
            sum += u64::from(count);
            if count > rows || sum > u64::from(rows) * u64::from(routes.top_k) {
                return Err(refuse(block, source, rows, count));
            }
            local += 1;
        }
        source += 1;
    }
    Ok(())
}

/// Decides where what comes goes. One thread.
unsafe fn place<M: Memory>(memory: &M, group: &Group, routes: &Routes, own: u32) {
    let geometry = &group.geometry;
    let is_flat = routes.placement == Placement::Flat;
    // SAFETY: the caller's promise.
    unsafe {
        let (mut source, mut base) = (0, 0);
        while source < geometry.ranks {
            if !is_flat {
                base = source * geometry.max_tokens;
            }
            memory.write(routes.bases + 4 * u64::from(source), base);
            if is_flat {
                base += memory.read::<u32>(routes.received + 4 * u64::from(source));
            }
            source += 1;
        }
        let mut end = match routes.placement {
            Placement::Flat => base,
            Placement::RankMajor => geometry.ranks * geometry.max_tokens,
            _ => 0,
        };
        let mut local = 0;
        while local < own {
            if routes.placement.is_by_expert() {
                memory.write(routes.offsets + 4 * u64::from(local), end);
            }
            let (mut source, mut next) = (0, end);
            while source < geometry.ranks {
                let at = u64::from(source) * u64::from(geometry.most_experts()) + u64::from(local);
                memory.write(routes.begins + 4 * at, next);
                next += memory.read::<u32>(routes.counts + 4 * at);
                source += 1;
            }
            match routes.placement {
                Placement::ExpertMajor => end += geometry.ranks * geometry.max_tokens,
                Placement::ExpertPacked => {
                    end += align(u64::from(next - end), u64::from(routes.alignment)) as u32;
                }
                _ => {}
            }
            local += 1;
        }
        memory.write(routes.offsets + 4 * u64::from(own), end);
    }
}

/// Lays out what was received, after a [`count`]; what the output has no room for must not come. Completes the call.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a rank has sent what it had not said.
///
/// # Safety
/// As for [`send`]; the output must be valid for its capacity, and nobody else's.
pub unsafe fn receive<B: Block>(
    block: &B,
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
        // A thread does it for a source.
        let mut mine = Ok(());
        let mut source = index + block.thread() * group.blocks;
        while routes.placement.is_by_expert() && source < geometry.ranks && mine.is_ok() {
            mine = find_positions(block, group, routes, (call, source));
            source += group.blocks * block.threads();
        }
        block.sync(mine)?;
        barrier(block, group)?;
        let mut source = 0;
        while source < geometry.ranks {
            let received: u32 = memory.read(routes.received + 4 * u64::from(source));
            let (mut slot, end) = share(received, index, group.blocks);
            while slot < end {
                lay_out(block, group, routes, output, (call, source, slot));
                slot += 1;
                block.checkpoint();
            }
            source += 1;
        }
        pad(block, group, routes, output, index);
        barrier(block, group)?;
        if index == 0 {
            give_credits(block, group, call);
            if block.thread() == 0 {
                memory.store(group.state + COMPLETED, call + 1);
            }
        }
    }
    Ok(())
}

/// Finds where the rows of a source go that are grouped by expert, and keeps their weights. One thread.
unsafe fn find_positions<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    (call, source): (u64, u32),
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let own = geometry.local_experts(group.rank);
    let first = u64::from(source) * u64::from(geometry.most_experts());
    // SAFETY: the caller's promise; experts are compared with how many there are.
    unsafe {
        let mut local = 0;
        while local < own {
            let at = 4 * (first + u64::from(local));
            memory.write(routes.cursors + at, memory.read::<u32>(routes.begins + at));
            local += 1;
        }
        let received: u32 = memory.read(routes.received + 4 * u64::from(source));
        let area = address_of(memory, group, group.rank);
        let mut slot = 0;
        while slot < received {
            let meta = area + geometry.row(call, source, slot) + geometry.meta();
            let weights = meta + EXPERTS + 4 * u64::from(geometry.top_k);
            let row = Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
            let mut k = 0;
            while k < routes.top_k {
                let local: i32 = memory.read(meta + EXPERTS + 4 * u64::from(k));
                let mut position = NONE;
                if local >= 0 && (local as u32) < own {
                    position = match earlier(memory, meta, (local, k)) {
                        // The same expert again, whose row has its place already.
                        Some(same) => memory.read(routes.positions + 4 * (row + u64::from(same))),
                        None => {
                            let at = 4 * (first + u64::from(local as u32));
                            let next: u32 = memory.read(routes.cursors + at);
                            let begin: u32 = memory.read(routes.begins + at);
                            let count: u32 = memory.read(routes.counts + at);
                            // More than were announced would lie over others.
                            if next - begin >= count {
                                return Err(refuse(block, source, count, next - begin + 1));
                            }
                            memory.write(routes.cursors + at, next + 1);
                            next
                        }
                    };
                }
                let at = 4 * (row + u64::from(k));
                memory.write(routes.positions + at, position);
                let weight: f32 = memory.read(weights + 4 * u64::from(k));
                memory.write(routes.received_weights + at, weight);
                k += 1;
            }
            slot += 1;
        }
    }
    Ok(())
}

/// The first of a row's experts before the `k`-th that is the same.
#[inline(always)]
unsafe fn earlier<M: Memory>(memory: &M, meta: u64, (local, k): (i32, u32)) -> Option<u32> {
    let mut before = 0;
    while before < k {
        // SAFETY: the caller's promise.
        if unsafe { memory.read::<i32>(meta + EXPERTS + 4 * u64::from(before)) } == local {
            return Some(before);
        }
        before += 1;
    }
    None
}

/// Block: copies a row to where it goes.
unsafe fn lay_out<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    output: &Output,
    (call, source, slot): (u64, u32, u32),
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise.
    unsafe {
        let row = address_of(memory, group, group.rank) + geometry.row(call, source, slot);
        let meta = row + geometry.meta();
        if !routes.placement.is_by_expert() {
            let base: u32 = memory.read(routes.bases + 4 * u64::from(source));
            let position = base + slot;
            copy_row(block, output, (row, meta), position);
            let weights = meta + EXPERTS + 4 * u64::from(geometry.top_k);
            let mut k = block.thread();
            while k < routes.top_k {
                let at = u64::from(position) * u64::from(routes.top_k) + u64::from(k);
                let local: i32 = memory.read(meta + EXPERTS + 4 * u64::from(k));
                write_expert(memory, output, at, local);
                if output.weights != 0 {
                    // Those of other ranks' experts are no business of this one.
                    let weight: f32 = memory.read(weights + 4 * u64::from(k));
                    let weight = if local < 0 { 0.0 } else { weight };
                    memory.write(output.weights + 4 * at, weight);
                }
                k += block.threads();
            }
            return;
        }
        let first = 4 * Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
        let position_of = |k: u32| memory.read::<u32>(routes.positions + first + 4 * u64::from(k));
        let mut k = 0;
        while k < routes.top_k {
            let position = position_of(k);
            let (mut before, mut is_new) = (0, position != NONE);
            while before < k && is_new {
                is_new = position_of(before) != position;
                before += 1;
            }
            if is_new {
                copy_row(block, output, (row, meta), position);
                if output.weights != 0 && block.thread() == 0 {
                    let (mut sum, mut other) = (0.0, k);
                    while other < routes.top_k {
                        if position_of(other) == position {
                            let at = first + 4 * u64::from(other);
                            sum += memory.read::<f32>(routes.received_weights + at);
                        }
                        other += 1;
                    }
                    memory.write(output.weights + 4 * u64::from(position), sum);
                }
            }
            k += 1;
        }
    }
}

/// Block: copies a row's elements and scales, and says whose it is.
#[inline(always)]
unsafe fn copy_row<B: Block>(block: &B, output: &Output, (row, meta): (u64, u64), position: u32) {
    let at = u64::from(position);
    // SAFETY: the caller's promise; there is room for what was counted.
    unsafe {
        let to = output.tokens + at * output.payload_bytes;
        copy(block, to, row, output.payload_bytes);
        if output.scales != 0 {
            let to = output.scales + at * output.scale_bytes;
            let from = row + align(output.payload_bytes, 16);
            copy(block, to, from, output.scale_bytes);
        }
        if output.sources != 0 && block.thread() == 0 {
            let token: u32 = block.memory().read(meta + TOKEN);
            block.memory().write(output.sources + 4 * at, token);
        }
    }
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

/// Block: its share of what says that the rest of the output is nothing: no expert for rows without a token, zeros
/// between experts.
unsafe fn pad<B: Block>(block: &B, group: &Group, routes: &Routes, output: &Output, index: u32) {
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
                    source += group.blocks;
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
                    local += group.blocks;
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
        let fill = |to: u64, bytes: u64| {
            let at = to + u64::from(begin) * bytes;
            let (mut byte, end) = (u64::from(block.thread()), u64::from(end - begin) * bytes);
            while to != 0 && byte < end {
                memory.write(at + byte, 0_u8);
                byte += u64::from(block.threads());
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
