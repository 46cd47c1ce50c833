//! Combine with rows as [lines](super::lines): the order of sums, and the protocol but for rows, are [`crate::moe`]'s.

use super::dispatch::peer_of;
use super::lines::{Held, Mine, Segments, meta_pairs, plain};
use super::{
    Calls, CombineLaunch, GpuRows, Part, Shared, credit_of, give_credits, is_last, least, span,
    speaks_to, steps, tell,
};
use crate::block::Block;
use crate::element::Element;
use crate::gpu::reduce::GpuElement;
use crate::gpu::wide::{PIECE, Piece, store16};
use crate::memory::Memory;
use crate::moe::combine::{Weighting, send_weights};
use crate::moe::rows::Term;
use crate::moe::{
    ALONE, COMPLETED, NONE, Placement, Routes, SENDERS, WEIGHTS_FLAG, address_of, epoch_of,
    finish_receiving, for_each_peer, is_masked, refuse, send_head, split, turn, wait_for_credit,
    wait_for_flag, wait_for_head,
};
use crate::wait::Stopped;

/// The accumulators of a [`Held`].
type Sums<E> = (Two<E>, Two<E>);
type Two<E> = (<E as GpuElement>::Lanes, <E as GpuElement>::Lanes);

/// `sums + weight * held`, or without `sums`, which are none.
#[inline(always)]
fn add<E: GpuElement + Element<Acc = f32>>(
    sums: Sums<E>,
    held: Held,
    (weight, is_first): (f32, bool),
) -> Sums<E> {
    let one = |sum, piece| {
        let product = E::map(E::unpack(piece), |x| weight * x);
        match is_first {
            true => product,
            false => E::zip(sum, product, |sum, x| sum + x),
        }
    };
    let two = |sums: Two<E>, [a, b]: [Piece; 2]| (one(sums.0, a), one(sums.1, b));
    (two(sums.0, held.first), two(sums.1, held.second))
}

/// Of nothing.
#[inline(always)]
fn zero<E: GpuElement + Element<Acc = f32>>() -> Sums<E> {
    let zero = E::map(E::unpack(Piece::default()), |_| 0.0);
    ((zero, zero), (zero, zero))
}

#[inline(always)]
fn pack<E: GpuElement>(sums: Sums<E>) -> Held {
    let two = |sums: Two<E>| [E::pack(sums.0), E::pack(sums.1)];
    Held {
        first: two(sums.0),
        second: two(sums.1),
    }
}

/// Block: reads what nobody has to be waited for: the credit of this thread's peer. Before the block's first barrier.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
pub unsafe fn prepare<B: Block>(block: &B, launch: &CombineLaunch) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { credit_of(block, &launch.group) }
}

/// Runs thread block `index` of a launch, for its steps, behind the barrier that follows [`prepare`]. Threads return as
/// they are done; any of them may bring the error.
///
/// # Errors
/// [`Stopped`]: a wait was ended, or a rank makes another call.
///
/// # Safety
/// As for [`crate::moe::combine::send`] and [`crate::moe::combine::receive`]; rows must be lines, and `shared` the
/// block's.
#[inline(always)]
pub unsafe fn run<B: Block, E: GpuElement + Element<Acc = f32>>(
    block: &B,
    launch: &CombineLaunch,
    shared: &Shared,
    (calls, credit): (Calls, u64),
    index: u32,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, routes) = (&launch.group, &launch.routes);
    let geometry = &group.geometry;
    let does = |step| launch.steps & step != 0;
    let (sends, receives) = (does(steps::SEND), does(steps::RECEIVE));
    // SAFETY: the caller's promise.
    unsafe {
        give_credits(block, group, calls, index);
        if does(steps::WEIGHTS) {
            send_weights(block, group, routes, &launch.input, index)?;
        }
        let rows = GpuRows::<E>::new(shared.terms);
        // Some warps sum what comes while others send.
        let (sender, receiver) = Part::of(block, sends && receives && block.warps() > 1);
        let mut so_far = 0;
        if sends {
            // Counted now, so that the answer is there when it is needed.
            if block.thread() == 0 {
                so_far = memory.fetch_add_local(group.state + SENDERS, 1);
            }
            let mut mine = Ok(());
            let peer = block.thread();
            if peer < geometry.ranks && !is_masked(memory, group, peer) {
                mine = wait_for_credit(block, group, (calls.sent, peer), credit);
            }
            block.sync(mine)?;
            let mut peer = speaks_to(index, group.blocks);
            while peer < geometry.ranks {
                if !is_masked(memory, group, peer) {
                    let count = memory.read(routes.received + 4 * u64::from(peer));
                    send_head(block, group, (calls.sent, peer), launch.input.call, count);
                }
                peer += group.blocks;
            }
            if launch.input.weighting == Weighting::Given {
                for_each_peer(block, group, |peer| {
                    // Who makes another call gives none.
                    wait_for_head(block, group, (calls.sent, peer), launch.input.call)?;
                    wait_for_flag(block, group, calls.sent, peer, WEIGHTS_FLAG)
                })?;
            }
        }
        // What this rank has for its own tokens need not be sent.
        let way = Way {
            straight: sends && receives && !routes.placement.is_by_expert(),
            span: span(routes.tokens <= ALONE),
        };
        if sends && sender.takes_part {
            send_rows(block, &rows, launch, way, (calls.sent, index), sender);
        }
        if sends {
            tell(block, group, calls, so_far);
        }
        if !receives {
            return Ok(());
        }
        let mut mine = Ok(());
        if receiver.takes_part {
            let at = (calls.completed, index);
            mine = receive(block, &rows, launch, way, shared, at, receiver);
        }
        if sends {
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
    /// Rows from this rank are summed where they are.
    straight: bool,
    /// Segments that a warp does one after the other.
    span: u32,
}

/// Warp: waits until all ranks have said that they make this call, and keeps which of them send rows back at `table`.
///
/// # Safety
/// As for [`run`]. So for all of these.
#[inline(always)]
unsafe fn hear<B: Block>(
    block: &B,
    launch: &CombineLaunch,
    table: u64,
    call: u64,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, routes, rank) = (&launch.group, &launch.routes, block.lane());
    let (mut returned, mut outcome) = (0, Ok(()));
    // SAFETY: the caller's promise; there is room for all ranks.
    unsafe {
        if rank < group.geometry.ranks {
            if !is_masked(memory, group, rank) {
                let sent: u32 = memory.read(routes.sent + 4 * u64::from(rank));
                match wait_for_head(block, group, (call, rank), launch.input.call) {
                    // A rank that had left this one out has nothing to send back.
                    Ok(0) => {}
                    Ok(rows) if rows == sent => returned = 1,
                    Ok(rows) => outcome = Err(refuse(block, rank, sent, rows)),
                    Err(stopped) => outcome = Err(stopped),
                }
            }
            memory.write(table + 4 * u64::from(rank), returned);
        }
        if block.warp_any(outcome.is_err()) {
            return Err(outcome.err().unwrap_or(Stopped::Aborted));
        }
        block.warp_sync();
    }
    Ok(())
}

/// The first row of those of `source`, where they are not grouped by expert.
#[inline(always)]
unsafe fn base_of<M: Memory>(memory: &M, launch: &CombineLaunch, source: u32) -> u32 {
    let routes = &launch.routes;
    match routes.placement {
        Placement::RankMajor => source * launch.group.geometry.max_tokens,
        // SAFETY: the caller's promise.
        _ => unsafe { memory.read(routes.bases + 4 * u64::from(source)) },
    }
}

/// Sends what has become of the rows of all ranks back to them. A warp does it for some segments of a row.
#[inline(always)]
unsafe fn send_rows<B: Block, E: GpuElement + Element<Acc = f32>>(
    block: &B,
    rows: &GpuRows<E>,
    launch: &CombineLaunch,
    way: Way,
    (call, index): (u64, u32),
    part: Part,
) {
    let memory = block.memory();
    let (group, routes, input) = (&launch.group, &launch.routes, &launch.input);
    let geometry = &group.geometry;
    let segments = Segments::of(input.payload_bytes, 0);
    let spans = segments.each.div_ceil(way.span);
    let meta_pairs = meta_pairs(geometry.meta_bytes());
    let is_by_expert = routes.placement.is_by_expert();
    let (lane, flag) = (block.lane(), epoch_of(call));
    let (own, all) = part.spread(true, index, group.blocks);
    let (mut peer, mut before) = (0, 0);
    let others = geometry.ranks - u32::from(way.straight);
    while peer < others {
        let source = peer_of(group, peer);
        peer += 1;
        // SAFETY: the caller's promise, here and below.
        let received = unsafe {
            match is_masked(memory, group, source) {
                true => 0,
                false => memory.read::<u32>(routes.received + 4 * u64::from(source)),
            }
        };
        let count = received * spans;
        let mut item = turn(own, all, before);
        before += count;
        while item < count {
            let (slot, which) = split(item, spans);
            let mut number = which * way.span;
            let end = least(number + way.span, segments.each);
            // SAFETY: as above.
            unsafe {
                let row = address_of(memory, group, source) + geometry.row(call, group.rank, slot);
                let (mut from, mut terms) = (0, core::ptr::null());
                if is_by_expert {
                    let found = match lane < routes.top_k {
                        true => term_of(memory, launch, (call, source, slot), lane),
                        false => Term::default(),
                    };
                    terms = rows.share(block, found);
                } else {
                    let position = base_of(memory, launch, source) + slot;
                    from = input.rows + u64::from(position) * input.payload_bytes;
                }
                let load = |number: u32| {
                    let segment = segments.segment(number);
                    let mine = Mine::of(block, segment.pieces());
                    match is_by_expert {
                        true => sum::<E>((terms, routes.top_k), |address| {
                            plain(mine, address + segment.at)
                        }),
                        false => plain(mine, from + segment.at),
                    }
                };
                let mut held = Held::default();
                let first = number;
                while number <= end {
                    // On its way while the one before is sent.
                    let next = match number < end {
                        true => load(number),
                        false => Held::default(),
                    };
                    if number > first {
                        let mine = Mine::of(block, segments.segment(number - 1).pieces());
                        let to = row + Segments::place(meta_pairs, number - 1);
                        mine.store(block, to, held, flag);
                    }
                    held = next;
                    number += 1;
                }
            }
            item += all;
            block.checkpoint();
        }
    }
}

/// The row that choice `k` of a token became, with its weight; without an address, if that was not here.
#[inline(always)]
unsafe fn term_of<M: Memory>(
    memory: &M,
    launch: &CombineLaunch,
    (call, source, slot): (u64, u32, u32),
    k: u32,
) -> Term {
    let (group, routes, input) = (&launch.group, &launch.routes, &launch.input);
    let geometry = &group.geometry;
    let first = 4 * Routes::row(geometry, source, slot) * u64::from(geometry.top_k);
    // SAFETY: the caller's promise.
    unsafe {
        let position: u32 = memory.read(routes.positions + first + 4 * u64::from(k));
        if position == NONE {
            return Term::default();
        }
        let weights = match input.weighting {
            // As many side by side as the call has.
            Weighting::Given => group.own + geometry.weights(call, source, slot),
            _ => routes.received_weights + first,
        };
        let weight = match input.weighting {
            Weighting::One => 1.0,
            _ => memory.read(weights + 4 * u64::from(k)),
        };
        let address = input.rows + u64::from(position) * input.payload_bytes;
        Term { address, weight }
    }
}

/// The sum of so many terms, in order, rounded once; the next one is on its way while one is added.
#[inline(always)]
unsafe fn sum<E: GpuElement + Element<Acc = f32>>(
    (terms, count): (*const Term, u32),
    load: impl Fn(u64) -> Held,
) -> Held {
    // The first from `k` on that counts, and its number.
    let find = |mut k: u32| {
        let mut term = Term::default();
        while k < count {
            // SAFETY: the caller's promise.
            term = unsafe { terms.add(k as usize).read() };
            if term.address != 0 {
                break;
            }
            k += 1;
        }
        (k, term)
    };
    let fetch = |(k, term): (u32, Term)| match k < count {
        true => load(term.address),
        false => Held::default(),
    };
    let mut sums = zero::<E>();
    let mut is_first = true;
    let mut at = find(0);
    let mut next = fetch(at);
    while at.0 < count {
        let (held, weight) = (next, at.1.weight);
        at = find(at.0 + 1);
        next = fetch(at);
        sums = add::<E>(sums, held, (weight, is_first));
        is_first = false;
    }
    pack::<E>(sums)
}

/// Sums what comes back. A warp does it for some segments of a token.
#[inline(always)]
unsafe fn receive<B: Block, E: GpuElement + Element<Acc = f32>>(
    block: &B,
    rows: &GpuRows<E>,
    launch: &CombineLaunch,
    way: Way,
    shared: &Shared,
    (call, index): (u64, u32),
    part: Part,
) -> Result<(), Stopped> {
    let memory = block.memory();
    let (group, routes, input) = (&launch.group, &launch.routes, &launch.input);
    let geometry = &group.geometry;
    let segments = Segments::of(input.payload_bytes, 0);
    let spans = segments.each.div_ceil(way.span);
    let meta_pairs = meta_pairs(geometry.meta_bytes());
    let (lane, flag) = (block.lane(), epoch_of(call));
    let table = shared.received(block);
    // SAFETY: the caller's promise.
    unsafe { hear(block, launch, table, call)? };
    let (mut item, all) = part.spread(true, index, group.blocks);
    while item < routes.tokens * spans {
        let (token, which) = split(item, spans);
        let mut number = which * way.span;
        let end = least(number + way.span, segments.each);
        // SAFETY: the caller's promise.
        unsafe {
            let mut from = 0;
            if lane < geometry.ranks && !is_masked(memory, group, lane) {
                let returned: u32 = memory.read(table + 4 * u64::from(lane));
                let at = u64::from(token) * u64::from(geometry.ranks) + u64::from(lane);
                let slot: u32 = memory.read(routes.slots + 4 * at);
                from = match slot {
                    NONE => 0,
                    _ if returned == 0 => 0,
                    slot if way.straight && lane == group.rank => {
                        let position = base_of(memory, launch, lane) + slot;
                        input.rows + u64::from(position) * input.payload_bytes
                    }
                    slot => group.own + geometry.row(call, lane, slot),
                };
            }
            let sources = rows.share(block, from);
            // Where a segment of a rank's row is, if there is one, and whether as it is.
            let source = |rank: u32, number: u32| {
                let row = sources.add(rank as usize).read();
                match (row, way.straight && rank == group.rank) {
                    (0, is_plain) => (0, is_plain),
                    (row, true) => (row + segments.segment(number).at, true),
                    (row, false) => (row + Segments::place(meta_pairs, number), false),
                }
            };
            let fetch = |rank: u32, number: u32| {
                let mine = Mine::of(block, segments.segment(number).pieces());
                match source(rank, number) {
                    (0, _) => Held::default(),
                    (from, true) => plain(mine, from),
                    (from, false) => mine.fetch(block, from),
                }
            };
            // One rank's part of a segment after the other; the next one is on its way while one is waited for and added.
            let mut sums = zero::<E>();
            let (mut held, mut is_first) = (Held::default(), true);
            // The rank that `held` is from, if there is one.
            let (mut rank, mut last) = (0, geometry.ranks);
            loop {
                let is_there = number < end;
                let next = match is_there {
                    true => fetch(rank, number),
                    false => Held::default(),
                };
                if last < geometry.ranks {
                    let number = if rank == 0 { number - 1 } else { number };
                    let segment = segments.segment(number);
                    let mine = Mine::of(block, segment.pieces());
                    let (from, is_plain) = source(last, number);
                    if from != 0 {
                        if !is_plain {
                            mine.arrival(block, (from, last), &mut held, flag)?;
                        }
                        sums = add::<E>(sums, held, (1.0, is_first));
                        is_first = false;
                    }
                    if rank == 0 {
                        let to =
                            launch.output + u64::from(token) * input.payload_bytes + segment.at;
                        mine.each(pack::<E>(sums), |piece, sum| {
                            store16(to + u64::from(piece) * PIECE, sum);
                        });
                        sums = zero::<E>();
                        is_first = true;
                    }
                }
                if !is_there {
                    break;
                }
                held = next;
                last = rank;
                rank += 1;
                if rank == geometry.ranks {
                    rank = 0;
                    number += 1;
                }
            }
        }
        item += all;
        block.checkpoint();
    }
    Ok(())
}
