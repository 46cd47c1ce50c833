//! Combine: what the experts made of tokens, back to where these came from, summed.
//!
//! A rank sums, for each row that it has received, what its experts made of it, each times its weight, in the order of
//! the token's experts, and sends one row back. The token's rank sums those in rank order. All sums are in f32 and
//! rounded once, so each sum has one place and one order: the same bits in every run.
//!
//! [`send_weights`] is for weights that were not known when tokens were dispatched; then [`send`] waits for them.

use super::rows::{Rows, Term};
use super::{
    COMPLETED, Call, Group, MAX_RANKS, MAX_TOP_K, NONE, ROWS, ROWS_FLAG, Routes, SENT,
    WEIGHTS_FLAG, address_of, barrier, for_each_peer, give_credits, is_masked, next_to_complete,
    next_to_send, packet, raise_flags, refuse, send_head, share, wait_for_credits, wait_for_flag,
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
        let mut peer = 0;
        while peer < geometry.ranks {
            let received: u32 = memory.read(routes.received + 4 * u64::from(peer));
            let (mut slot, end) = share(received, index, group.blocks);
            while slot < end && !is_masked(memory, group, peer) {
                let to = address_of(memory, group, peer) + geometry.row(call, group.rank, slot);
                send_row(block, rows, group, routes, input, (call, peer, slot), to);
                slot += 1;
                block.checkpoint();
            }
            peer += 1;
        }
        barrier(block, group)?;
        if index == 0 {
            raise_flags(block, group, call, ROWS_FLAG);
            if block.thread() == 0 {
                memory.store(group.state + SENT, call + 1);
            }
        }
    }
    Ok(())
}

/// Block: what has become of a row, to `to`.
unsafe fn send_row<B: Block, R: Rows>(
    block: &B,
    rows: &R,
    group: &Group,
    routes: &Routes,
    input: &Input,
    (call, source, slot): (u64, u32, u32),
    to: u64,
) {
    let memory = block.memory();
    let geometry = &group.geometry;
    // SAFETY: the caller's promise.
    unsafe {
        if !routes.placement.is_by_expert() {
            let base: u32 = memory.read(routes.bases + 4 * u64::from(source));
            let from = input.rows + u64::from(base + slot) * input.payload_bytes;
            return copy(block, to, from, input.payload_bytes);
        }
        let first = 4 * Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
        let weights = match input.weighting {
            Weighting::Given => {
                // As many side by side as the call has.
                address_of(memory, group, group.rank) + geometry.weights(call, source, slot)
            }
            _ => routes.received_weights + first,
        };
        let mut terms = [Term::default(); MAX_TOP_K as usize];
        let (mut k, mut count) = (0, 0);
        for term in &mut terms {
            // The next expert that is here.
            let mut position = NONE;
            while k < routes.top_k && position == NONE {
                position = memory.read(routes.positions + first + 4 * u64::from(k));
                k += 1;
            }
            if position == NONE {
                break;
            }
            let weight = match input.weighting {
                Weighting::One => 1.0,
                _ => memory.read(weights + 4 * u64::from(k - 1)),
            };
            let address = input.rows + u64::from(position) * input.payload_bytes;
            *term = Term { address, weight };
            count += 1;
        }
        rows.sum(block, to, terms.get(..count).unwrap_or(&[]), input.hidden);
    }
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
        for_each_peer(block, group, |peer| {
            let rows = wait_for_head(block, group, (call, peer), input.call)?;
            let sent: u32 = memory.read(routes.sent + 4 * u64::from(peer));
            // A rank that had left this one out has nothing to send back.
            if rows != 0 && rows != sent {
                return Err(refuse(block, peer, sent, rows));
            }
            wait_for_flag(block, group, call, peer, ROWS_FLAG)
        })?;
        let area = address_of(memory, group, group.rank);
        let (mut token, end) = share(routes.tokens, index, group.blocks);
        while token < end {
            let mut terms = [Term::default(); MAX_RANKS as usize];
            let (mut rank, mut count) = (0, 0);
            for term in &mut terms {
                let mut slot = NONE;
                while rank < geometry.ranks && slot == NONE {
                    let at = u64::from(token) * u64::from(geometry.ranks) + u64::from(rank);
                    if sends_back(memory, group, call, rank) {
                        slot = memory.read(routes.slots + 4 * at);
                    }
                    rank += 1;
                }
                if slot == NONE {
                    break;
                }
                let address = area + geometry.row(call, rank - 1, slot);
                *term = Term {
                    address,
                    weight: 1.0,
                };
                count += 1;
            }
            let to = output + u64::from(token) * input.payload_bytes;
            rows.sum(block, to, terms.get(..count).unwrap_or(&[]), input.hidden);
            token += 1;
            block.checkpoint();
        }
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

/// Whether a rank whose packets have come sends rows back.
#[inline(always)]
unsafe fn sends_back<M: Memory>(memory: &M, group: &Group, call: u64, rank: u32) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        !is_masked(memory, group, rank) && packet(memory, group, (call, rank), ROWS) as u32 != 0
    }
}
