//! Kernels for tests and measurements, on the same primitives as everything else.

use crossweft_device::channel::{self, MemoryChannel};
use crossweft_device::element::Bf16;
use crossweft_device::extent::Extent;
use crossweft_device::fifo::{Fifo, Trigger, TriggerKind};
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::machine::{block_x, block_y, blocks_x, thread, threads, time_ns};
use crossweft_device::gpu::reduce::{Sum, reduce_pair};
use crossweft_device::gpu::wide::PIECE;
use crossweft_device::gpu::{GpuContext, GpuReducer, OneShotLaunch};
use crossweft_device::packet::{self, PAYLOAD, WORD};
use crossweft_device::program::COUNTER_STRIDE;
use crossweft_device::reduce::{Location, Reducer, Sources};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::wait::{reached, wait_for};
use crossweft_device::{Block, Memory, Raw, Site, Stopped, WaitKind};

use crate::shared::{Here, table};

/// The example of docs/custom-kernels.md, which is the same text on the host.
#[path = "../../examples/custom-kernel-rust/src/kernel.rs"]
mod custom;

type ThisBlock = GpuBlock<Here>;

/// This block's part of `bytes` bytes.
#[inline(always)]
fn share(bytes: u64) -> Extent {
    Extent {
        begin: 0,
        end: bytes,
    }
    .slice(block_x(), blocks_x())
}

/// A wait that belongs to no plan.
const fn site(kind: WaitKind, peer: u32) -> Site {
    Site {
        kind,
        peer,
        channel: 0,
        op: Site::NO_OP,
    }
}

/// Copies `bytes` bytes, all blocks together.
///
/// # Safety
/// As for [`channel::copy`].
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_copy(dst: u64, src: u64, bytes: u64) {
    let part = share(bytes);
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&GpuContext::default(), 0);
        channel::copy(&block, dst + part.begin, src + part.begin, part.len());
    }
}

/// Adds two arrays of bfloat16, all blocks together: whole pieces of 16 bytes.
///
/// # Safety
/// As for [`reduce_pair`].
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_add_bf16(dst: u64, a: u64, b: u64, elements: u64) {
    let part = share(elements * size_of::<Bf16>() as u64);
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&GpuContext::default(), 0);
        let (dst, a, b) = (dst + part.begin, a + part.begin, b + part.begin);
        reduce_pair::<_, Bf16, _>(&block, Sum, dst, a, b, part.len() / PIECE, 0);
    }
}

/// All-reduce of bfloat16 in one shot with packets, on the leaves that plans are made of.
/// The second block index is the entry of `launches`.
///
/// # Safety
/// Every launch's addresses must be valid, and all ranks call it as often, with the same size and
/// grid.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_exchange_packets_bf16(launches: *const OneShotLaunch) {
    // SAFETY: the caller's promise.
    unsafe {
        let launch = launches.add(block_y() as usize);
        let (rank, ranks) = ((*launch).rank, (*launch).ranks);
        let (input, output, bytes) = ((*launch).input, (*launch).output, (*launch).bytes);
        let (slot, counters) = ((*launch).slot, (*launch).counters);
        let block = ThisBlock::begin(&(*launch).context, rank);
        let epoch = Raw.load(counters);
        let flag = packet::flag_of(epoch, bytes);
        let half = (epoch & 1) * slot * u64::from(ranks);
        let part = share(bytes);
        let packets = (*launch).packets as *const u64;
        let place = |owner: u32, sender: u32| {
            let base = packets.add(owner as usize).read();
            base + half + slot * u64::from(sender) + part.begin * (WORD / PAYLOAD)
        };
        let mut k = 1;
        while k < ranks {
            let peer = (rank + k) % ranks.max(1);
            let (to, from) = (place(peer, rank), input + part.begin);
            packet::copy_to_packets(&block, to, from, part.len(), flag);
            k += 1;
        }
        let sources = Sources {
            count: ranks,
            at: |k| match k {
                _ if k == rank => Location::raw(input + part.begin),
                _ => Location {
                    addr: place(rank, k),
                    packets: Some(site(WaitKind::Packet, k)),
                },
            },
        };
        let destinations = Sources {
            count: 1,
            at: |_| Location::raw(output + part.begin),
        };
        let elements = part.len() / size_of::<Bf16>() as u64;
        let reducer = GpuReducer::<Bf16, _>::fixed(Sum, false, table());
        let mine = reducer.reduce(&block, &sources, &destinations, elements, 0, flag);
        if block.sync(mine).is_ok() && thread() == 0 {
            let left = counters + COUNTER_STRIDE;
            if Raw.fetch_add(left, 1) + 1 == u64::from(blocks_x()) {
                Raw.store(left, 0);
                Raw.store_release(counters, epoch + 1);
            }
        }
    }
}

/// Two sides, one block each, signal each other `rounds` times; each leaves the nanoseconds it took
/// in its word of `out`. `semaphores` has both sides' ends.
///
/// # Safety
/// All addresses must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_ping_pong(
    semaphores: *const Semaphore,
    first_side: u32,
    rounds: u32,
    out: *mut u64,
    context: GpuContext,
) {
    let side = first_side + block_x();
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&context, side);
        if thread() != 0 {
            return;
        }
        let semaphore = semaphores.add(side as usize).read();
        let start = time_ns();
        let mut round = 0;
        while round < rounds {
            if side == 0 {
                semaphore.signal(&block);
            }
            if semaphore.wait(&block, round).is_err() {
                return;
            }
            if side != 0 {
                semaphore.signal(&block);
            }
            round += 1;
        }
        out.add(side as usize).write(time_ns() - start);
    }
}

/// Two sides, one block each, send a packet to and fro: side 0 sends a number, side 1 sends it
/// back, one more. Word `side` of `packets` is what that side receives. Each leaves the nanoseconds
/// it took, then the last number it got, in `out[2 * side]` and after.
///
/// # Safety
/// All addresses must be valid, and the packets zero.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_packet_echo(
    packets: u64,
    first_side: u32,
    rounds: u32,
    out: *mut u64,
    context: GpuContext,
) {
    let side = first_side + block_x();
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&context, side);
        if thread() != 0 {
            return;
        }
        let inbox = packets + u64::from(side) * WORD;
        let outbox = packets + u64::from(side ^ 1) * WORD;
        let (start, mut number, mut round) = (time_ns(), 0, 1);
        while round <= rounds {
            if side == 0 {
                packet::write_packet(&Raw, outbox, number, round);
            }
            let from = site(WaitKind::Packet, side ^ 1);
            match packet::read_packet(&block, from, inbox, round) {
                Ok(got) => number = got,
                Err(_) => return,
            }
            if side != 0 {
                packet::write_packet(&Raw, outbox, number + 1, round);
            }
            round += 1;
        }
        out.add(2 * side as usize).write(time_ns() - start);
        out.add(2 * side as usize + 1).write(u64::from(number));
    }
}

/// One thread of every block pushes `count` triggers, numbered by `dst_offset`, and waits until the
/// last has been handled. Each block leaves the nanoseconds it took to push them, and until then,
/// in `out[2 * block]` and after.
///
/// # Safety
/// All addresses must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_fifo_push(
    fifo: *const Fifo,
    count: u32,
    out: *mut u64,
    context: GpuContext,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&context, 0);
        if thread() != 0 {
            return;
        }
        let fifo = fifo.read();
        let start = time_ns();
        let mut last = 0;
        let mut i = 0;
        while i < count {
            let trigger = Trigger {
                kind: TriggerKind::PUT.with(TriggerKind::FLUSH),
                channel: block_x(),
                dst_memory: 1,
                src_memory: 2,
                dst_offset: u64::from(i),
                src_offset: u64::from(i) * 3,
                size: u64::from(i) * 5,
            };
            match fifo.push(&block, i, &trigger) {
                Ok(position) => last = position,
                Err(_) => return,
            }
            i += 1;
        }
        let pushed = time_ns();
        if count > 0 && fifo.wait_handled(&block, count, last).is_err() {
            return;
        }
        let block_out = out.add(2 * block_x() as usize);
        block_out.write(pushed - start);
        block_out.add(1).write(time_ns() - start);
    }
}

/// All blocks meet `rounds` times at a counter that is zero at first; each leaves the nanoseconds
/// it took in its word of `out`. A grid that cannot be on the device all at once ends at its
/// deadline.
///
/// # Safety
/// All addresses must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_grid_barrier(
    counter: u64,
    rounds: u32,
    out: *mut u64,
    context: GpuContext,
) {
    let blocks = u64::from(blocks_x());
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&context, 0);
        let start = time_ns();
        let mut round = 0;
        while round < rounds {
            if block.sync(Ok(())).is_err() {
                return;
            }
            let mut mine = Ok(());
            if thread() == 0 {
                Raw.fetch_add(counter, 1);
                let target = (u64::from(round) + 1) * blocks;
                let load = || Raw.load_acquire(counter);
                let at = site(WaitKind::Barrier, 0);
                mine = wait_for(&block, at, target, load, |seen| reached(seen, target)).map(drop);
            }
            if block.sync(mine).is_err() {
                return;
            }
            round += 1;
        }
        if thread() == 0 {
            out.add(block_x() as usize).write(time_ns() - start);
        }
    }
}

/// What word `i` of a pattern holds.
const fn pattern(seed: u64, i: u64) -> u64 {
    (seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Writes a pattern of `words` words, plainly, then adds one to `counter`, with release: once for
/// each block.
///
/// # Safety
/// All addresses must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_pattern_write(
    memory: u64,
    words: u64,
    seed: u64,
    counter: u64,
) {
    let part = share(words);
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&GpuContext::default(), 0);
        let mut i = part.begin + u64::from(thread());
        while i < part.end {
            Raw.write(memory + i * 8, pattern(seed, i));
            i += u64::from(threads());
        }
        let _ = block.sync(Ok(()));
        if thread() == 0 {
            Raw.add_release(counter, 1);
        }
    }
}

/// Waits, with acquire, until `counter` has reached `target`; then reads the pattern, plainly, and
/// adds the number of words that are wrong to `result[0]`, and that of blocks that have looked to
/// `result[1]`.
///
/// # Safety
/// All addresses must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_pattern_check(
    memory: u64,
    words: u64,
    seed: u64,
    counter: u64,
    target: u64,
    result: u64,
    context: GpuContext,
) {
    let part = share(words);
    // SAFETY: the caller's promise.
    unsafe {
        let block = ThisBlock::begin(&context, 0);
        let mut mine: Result<(), Stopped> = Ok(());
        if thread() == 0 {
            let load = || Raw.load_acquire(counter);
            let at = site(WaitKind::Semaphore, 0);
            mine = wait_for(&block, at, target, load, |seen| reached(seen, target)).map(drop);
        }
        if block.sync(mine).is_err() {
            return;
        }
        let mut i = part.begin + u64::from(thread());
        while i < part.end {
            if Raw.read::<u64>(memory + i * 8) != pattern(seed, i) {
                Raw.add(result, 1);
            }
            i += u64::from(threads());
        }
        let _ = block.sync(Ok(()));
        if thread() == 0 {
            Raw.add_release(result + 8, 1);
        }
    }
}

/// The example's kernel, with a channel of `channels` for each block.
///
/// # Safety
/// As for [`custom::exchange_add`].
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn crossweft_exchange_add(
    channels: *const MemoryChannel,
    launch: custom::ExchangeAdd,
    rank: u32,
    context: GpuContext,
) {
    // SAFETY: the caller's promise. What went wrong is in the host's record.
    unsafe {
        let block = ThisBlock::begin(&context, rank);
        let channel = channels.add(block_x() as usize).read();
        let _ = custom::exchange_add(&block, &channel, &launch, block_x(), blocks_x());
    }
}
