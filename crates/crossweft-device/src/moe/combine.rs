//! Combine: what the experts made of tokens, back to where these came from, summed.
//!
//! A rank sums, for each row that it has received, what its experts made of it, each times its weight, in the order of
//! the token's experts, and sends one row back. The token's rank sums those in rank order. All sums are in f32 and
//! rounded once, so each sum has one place and one order: the same bits in every run.
//!
//! [`send_weights`] is for weights that were not known when tokens were dispatched; then [`send`] waits for them.

use super::rows::{Rows, Term};
use super::{
    Call, Group, NONE, ROWS_FLAG, Routes, Segments, WEIGHTS_FLAG, address_of, barrier,
    finish_receiving, finish_sending, for_each_peer, is_masked, next_to_complete, next_to_send,
    raise_flags, refuse, send_head, share, split, turn, wait_for_credits, wait_for_flag,
    wait_for_head,
};
use crate::block::Block;
use crate::channel::copy;
use crate::memory::Memory;
use crate::wait::Stopped;

/// Which weights a sum has. The discriminants are part of the device ABI.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Weighting {
    /// None: what the experts made is summed as it is. The only one for rows that are not grouped by expert, which
    /// have been summed already.
    #[default]
    One = 0,
    /// Those that came with the tokens.
    Dispatched = 1,
    /// Those that the token's rank has now, at [`Input::weights`].
    Given = 2,
}

/// What a combine sends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Input {
    /// Address of the rows, laid out as they were received.
    pub rows: u64,
    /// For [`Weighting::Given`]: address of `f32 [tokens][Routes::top_k]`, for this rank's tokens.
    pub weights: u64,
    /// Elements of a row.
    pub hidden: u64,
    /// Bytes of a row.
    pub payload_bytes: u64,
    /// Which weights to take.
    pub weighting: Weighting,
    /// What is called.
    pub call: Call,
}

/// Sends the weights of this rank's tokens to the ranks that those went to; before [`send`], of the same call.
///
/// # Errors
/// [`Stopped`]: a wait was ended.
///
/// # Safety
/// As for [`send`].
pub unsafe fn send_weights<B: Block>(
    block: &B,
    group: &Group,
    routes: &Routes,
    input: &Input,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    let top_k = u64::from(routes.top_k);
    // SAFETY: the caller's promise, here and in all functions that are called.
    unsafe {
        let call = next_to_send(block, group);
        wait_for_credits(block, group, call)?;
        let (mut token, end) = share(routes.tokens, index, group.blocks);
        while token < end {
            let mut rank = 0;
            while rank < geometry.ranks {
                let at = u64::from(token) * u64::from(geometry.ranks) + u64::from(rank);
                let slot: u32 = memory.read(routes.slots + 4 * at);
                if slot != NONE && !is_masked(memory, group, rank) {
                    let to =
                        address_of(memory, group, rank) + geometry.weights(call, group.rank, slot);
                    let from = input.weights + 4 * u64::from(token) * top_k;
                    copy(block, to, from, 4 * top_k);
                }
                rank += 1;
            }
            token += 1;
        }
        barrier(block, group)?;
        if index == 0 {
            raise_flags(block, group, call, WEIGHTS_FLAG);
        }
    }
    Ok(())
}

/// Sums what this rank's experts made of each row that it has received, and sends it back. Returns when it has left:
/// the input may be changed then.
///
/// # Errors
/// [`Stopped`]: a wait was ended. If it was for a peer, nothing was sent.
///
/// # Safety
/// As for [`dispatch::send`](super::dispatch::send); the pass must have been dispatched, and rows be valid for what
/// was received then.
pub unsafe fn send<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    input: &Input,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise, here and in all functions that are called.
    unsafe {
        let call = next_to_send(block, group);
        wait_for_credits(block, group, call)?;
        let mut peer = index;
        while peer < geometry.ranks {
            if !is_masked(memory, group, peer) {
                let count = memory.read(routes.received + 4 * u64::from(peer));
                send_head(block, group, (call, peer), input.call, count);
            }
            block.wake(peer);
            peer += group.blocks;
        }
        if input.weighting == Weighting::Given {
            for_each_peer(block, group, |peer| {
                // Who makes another call gives none.
                wait_for_head(block, group, (call, peer), input.call)?;
                wait_for_flag(block, group, call, peer, WEIGHTS_FLAG)
            })?;
        }
        let (mut peer, mut before) = (0, 0);
        while peer < geometry.ranks {
            let received: u32 = memory.read(routes.received + 4 * u64::from(peer));
            if !is_masked(memory, group, peer) {
                let what = (call, peer, share(received, index, group.blocks));
                before += send_rows(block, rows, group, routes, input, what, before);
            }
            peer += 1;
        }
        finish_sending(block, group, call).map(drop)
    }
}

/// Block: what has become of some rows of `source`, back to it. A warp does it for a segment of a row; `before` were there
/// before. Returns how many these are.
#[inline(always)]
unsafe fn send_rows<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    input: &Input,
    (call, source, slots): (u64, u32, (u32, u32)),
    before: u32,
) -> u32 {
    let memory = block.memory();
    let geometry = &group.geometry;
    let segments = Segments::of::<R>(input.payload_bytes);
    let size = input.payload_bytes.checked_div(input.hidden).unwrap_or(1);
    let mut item = slots.0 * segments.each + turn(block.warp(), block.warps(), before);
    while item < slots.1 * segments.each {
        let (slot, segment) = split(item, segments.each);
        let (begin, bytes) = segments.at(segment);
        // SAFETY: the caller's promise.
        unsafe {
            let to = address_of(memory, group, source) + geometry.row(call, group.rank, slot);
            if routes.placement.is_by_expert() {
                let first = 4 * Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
                let weights = match input.weighting {
                    Weighting::Given => {
                        // As many side by side as the call has.
                        let own = address_of(memory, group, group.rank);
                        own + geometry.weights(call, source, slot)
                    }
                    _ => routes.received_weights + first,
                };
                // Addresses of what is not here are 0.
                let term = |k: u32| {
                    let position: u32 = memory.read(routes.positions + first + 4 * u64::from(k));
                    if position == NONE {
                        return Term::default();
                    }
                    let weight = match input.weighting {
                        Weighting::One => 1.0,
                        _ => memory.read(weights + 4 * u64::from(k)),
                    };
                    let address = input.rows + u64::from(position) * input.payload_bytes + begin;
                    Term { address, weight }
                };
                let elements = bytes.checked_div(size).unwrap_or_default();
                rows.sum(block, to + begin, (routes.top_k, term), elements);
            } else {
                let base: u32 = memory.read(routes.bases + 4 * u64::from(source));
                let from = input.rows + u64::from(base + slot) * input.payload_bytes + begin;
                rows.scatter(block, (1, |_| to + begin), from, bytes);
            }
        }
        item += block.warps();
        block.checkpoint();
    }
    (slots.1 - slots.0) * segments.each
}

/// Waits for all rows of this rank's tokens and sums them into `output`, a row of `payload_bytes` for each token; one
/// that went nowhere is zero. Completes the call.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a rank makes another call.
///
/// # Safety
/// As for [`send`]; `output` must be valid for all tokens, and nobody else's.
pub unsafe fn receive<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    output: u64,
    input: &Input,
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise, here and in all functions that are called.
    unsafe {
        let call = next_to_complete(block, group);
        let ranks = u64::from(geometry.ranks);
        let returns = group.returns + 4 * u64::from(index) * ranks;
        for_each_peer(block, group, |peer| {
            let rows = wait_for_head(block, group, (call, peer), input.call)?;
            let sent: u32 = memory.read(routes.sent + 4 * u64::from(peer));
            // A rank that had left this one out has nothing to send back.
            if rows != 0 && rows != sent {
                return Err(refuse(block, peer, sent, rows));
            }
            let at = returns + 4 * u64::from(peer);
            memory.write(at, u32::from(rows != 0));
            wait_for_flag(block, group, call, peer, ROWS_FLAG)
        })?;
        let area = address_of(memory, group, group.rank);
        let tokens = share(routes.tokens, index, group.blocks);
        let segments = Segments::of::<R>(input.payload_bytes);
        let size = input.payload_bytes.checked_div(input.hidden).unwrap_or(1);
        // A warp for each segment of a token.
        let mut item = tokens.0 * segments.each + block.warp();
        while item < tokens.1 * segments.each {
            let (token, segment) = split(item, segments.each);
            let (begin, bytes) = segments.at(segment);
            let term = |rank: u32| {
                let returned = !is_masked(memory, group, rank)
                    && memory.read::<u32>(returns + 4 * u64::from(rank)) != 0;
                let at = u64::from(token) * ranks + u64::from(rank);
                match memory.read(routes.slots + 4 * at) {
                    slot if returned && slot != NONE => Term {
                        address: area + geometry.row(call, rank, slot) + begin,
                        weight: 1.0,
                    },
                    _ => Term::default(),
                }
            };
            let to = output + u64::from(token) * input.payload_bytes + begin;
            let elements = bytes.checked_div(size).unwrap_or_default();
            rows.sum(block, to, (geometry.ranks, term), elements);
            item += block.warps();
            block.checkpoint();
        }
        finish_receiving(block, group, call)
    }
}
