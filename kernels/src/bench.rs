//! Kernels for tests and measurements, on the same primitives as everything else.

use crossweft_device::channel::{self, MemoryChannel};
use crossweft_device::element::Bf16;
use crossweft_device::extent::Extent;
use crossweft_device::fifo::{Fifo, Trigger, TriggerKind};
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::machine::{block_x, block_y, blocks_x, thread, threads, time_ns};
use crossweft_device::gpu::reduce::{Sum, reduce_pair};
use crossweft_device::gpu::wide::PIECE;
use crossweft_device::gpu::{
    ECHO_WARMUP, EchoLaunch, GpuContext, GpuReducer, OneShotLaunch, lines,
};
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

/// Sends something to and fro, and leaves the nanoseconds it took. All threads of the block call it.
///
/// # Safety
/// The launch must be valid for what `send` and `receive` do with it.
#[inline(always)]
unsafe fn echo(
    block: &ThisBlock,
    launch: &EchoLaunch,
    send: impl Fn(u32) -> Result<(), Stopped>,
    receive: impl Fn(u32) -> Result<(), Stopped>,
) {
    let mut start = time_ns();
    let mut round = 0;
    while round < launch.rounds + ECHO_WARMUP {
        if round == ECHO_WARMUP {
            start = time_ns();
        }
        let flag = launch.flag.wrapping_add(round);
        let mine = match launch.side {
            0 => send(flag).and_then(|()| receive(flag)),
            _ => receive(flag).and_then(|()| send(flag)),
        };
        // What went wrong is in the host's record.
        if mine.is_err() {
            return;
        }
        round += 1;
    }
    let took = time_ns() - start;
    if thread() == 0 {
        // SAFETY: the caller's promise.
        unsafe { Raw.write(launch.out, took) };
    }
}

macro_rules! echoes {
    ($($(#[$doc:meta])* $entry:ident: |$block:ident, $launch:ident, $flag:ident| $send:expr, $receive:expr;)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// The parameter must be as its fields say, and both sides be launched alike.
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: EchoLaunch) {
            // SAFETY: the caller's promise.
            unsafe {
                let $block = &ThisBlock::begin(&launch.context, launch.side);
                let $launch = &launch;
                echo($block, $launch, |$flag| $send, |$flag| $receive);
            }
        }
    )* };
}

/// One thread stores a word.
#[inline(always)]
fn once(act: impl FnOnce()) -> Result<(), Stopped> {
    if thread() == 0 {
        act();
    }
    Ok(())
}

/// Does something so many times.
#[inline(always)]
fn times(count: u32, act: impl Fn() -> Result<(), Stopped>) -> Result<(), Stopped> {
    let mut done = 0;
    while done < count {
        act()?;
        done += 1;
    }
    Ok(())
}

/// Block: what one thread waits for.
#[inline(always)]
fn together(block: &ThisBlock, wait: impl FnOnce() -> Result<(), Stopped>) -> Result<(), Stopped> {
    let mine = match thread() {
        0 => wait(),
        _ => Ok(()),
    };
    block.sync(mine)
}

/// Waits until `load` gives `flag`.
#[inline(always)]
fn wait_flag(
    block: &ThisBlock,
    launch: &EchoLaunch,
    flag: u32,
    load: impl FnMut() -> u64,
) -> Result<(), Stopped> {
    let at = site(WaitKind::Semaphore, launch.side ^ 1);
    let flag = u64::from(flag);
    wait_for(block, at, flag, load, |seen| seen == flag).map(drop)
}

echoes! {
    /// A word without order.
    crossweft_echo_relaxed: |block, launch, flag|
        once(|| Raw.store(launch.channel.remote, flag.into())),
        together(block, || wait_flag(block, launch, flag, || Raw.load(launch.channel.local)));
    /// A word with release and acquire.
    crossweft_echo_acquire: |block, launch, flag|
        once(|| Raw.store_release(launch.channel.remote, flag.into())),
        together(block, || wait_flag(block, launch, flag, || Raw.load_acquire(launch.channel.local)));
    /// Data, then a signal.
    crossweft_echo_put: |block, launch, _flag|
        {
            launch.channel.put(block, launch.landing, launch.data, launch.bytes);
            block.sync(Ok(())).and_then(|()| once(|| launch.channel.semaphore.signal(block)))
        },
        together(block, || launch.channel.semaphore.wait(block, Site::NO_OP));
    /// Packets of 8 bytes.
    crossweft_echo_packets8: |block, launch, flag|
        {
            let (packets, data) = (launch.channel.remote + launch.data, launch.channel.local + launch.landing);
            let mut i = u64::from(thread());
            while i < launch.bytes / PAYLOAD {
                packet::write_packet(&Raw, packets + i * WORD, Raw.read(data + i * PAYLOAD), flag);
                i += u64::from(threads());
            }
            Ok(())
        },
        {
            let (packets, data) = (launch.channel.local + launch.data, launch.channel.local + launch.landing);
            let mut mine = Ok(());
            let mut i = u64::from(thread());
            while i < launch.bytes / PAYLOAD && mine.is_ok() {
                let at = site(WaitKind::Packet, launch.side ^ 1);
                mine = packet::read_packet(block, at, packets + i * WORD, flag)
                    .map(|word| Raw.write(data + i * PAYLOAD, word));
                i += u64::from(threads());
            }
            block.sync(mine)
        };
    /// Packets in pairs.
    crossweft_echo_packets16: |block, launch, flag|
        {
            let (packets, data) = (launch.channel.remote + launch.data, launch.channel.local + launch.landing);
            packet::copy_to_packets(block, packets, data, launch.bytes, flag);
            Ok(())
        },
        {
            let (packets, data) = (launch.channel.local + launch.data, launch.channel.local + launch.landing);
            let at = site(WaitKind::Packet, launch.side ^ 1);
            block.sync(packet::copy_from_packets(block, at, data, packets, launch.bytes, flag))
        };
    /// Lines.
    crossweft_echo_lines: |block, launch, flag|
        {
            let (lines, data) = (launch.channel.remote + launch.data, launch.channel.local + launch.landing);
            lines::copy_to_lines(block, lines, data, launch.bytes, flag);
            Ok(())
        },
        {
            let (lines, data) = (launch.channel.local + launch.data, launch.channel.local + launch.landing);
            let at = site(WaitKind::Packet, launch.side ^ 1);
            block.sync(lines::copy_from_lines(block, at, data, lines, launch.bytes, flag))
        };
    /// Data that is there for the other side to get: nobody is told.
    crossweft_echo_get: |block, launch, flag|
        {
            let turn = u64::from(flag.wrapping_sub(launch.flag) % launch.burst.max(1));
            let from = launch.data + turn * launch.bytes.next_multiple_of(lines::LINE);
            launch.channel.get(block, launch.landing, from, launch.bytes);
            block.sync(Ok(()))
        },
        Ok(());
    /// Data with a signal, by a proxy.
    crossweft_echo_port: |block, launch, _flag|
        match thread() {
            0 => times(launch.burst, || {
                launch.port.put_with_signal(block, launch.landing, launch.data, launch.bytes)
            }),
            _ => Ok(()),
        },
        together(block, || times(launch.burst, || launch.port.semaphore.wait(block, Site::NO_OP)));
}
