//! Bulk copies and lines on a GPU (`kernels/src/channel.rs`). Without one, every test says so and passes. Tests
//! whose names begin with `alone` have no kernel that waits for another, for sanitizers, which run one at a time.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

mod common;
#[path = "common/cuda.rs"]
mod cuda;

use common::pattern as bytes_of;
use crossweft_device::channel::MemoryChannel;
use crossweft_device::executor::Counters;
use crossweft_device::gpu::bulk::{ALIGNMENT, BUFFERS};
use crossweft_device::gpu::lines::{PAIR, PAIR_PAYLOAD};
use crossweft_device::packet::flag_of;
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{DataType, ReduceOp};
use crossweft_hal::cuda::DeviceMemory;
use crossweft_kernels::{
    MAX_FUSED, OneShot, bench, bench_module, channel, channel_module, entries, fused_module,
};
use cuda::{Gpu, channels, pattern, words, write_words};

macro_rules! gpu {
    () => {
        match Gpu::new() {
            Some(gpu) => gpu,
            None => return,
        }
    };
}

/// Shared memory of a block that has buffers of so many bytes.
const fn stage(buffer: u64) -> u64 {
    ALIGNMENT + BUFFERS * buffer
}

/// What memory holds where nothing was written.
const JUNK: u8 = 0xa5;

fn read(memory: &DeviceMemory, offset: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    memory.read(offset, &mut data).unwrap();
    data
}

#[test]
fn alone_bulk_copies_of_every_size_and_alignment() {
    let gpu = gpu!();
    let module = gpu.load_committed(channel_module(gpu.sm()));
    let copy = gpu.side(&module, channel::BULK_COPY);
    copy.kernel
        .allow_shared_bytes(stage(24 << 10) as u32)
        .unwrap();
    const MOST: usize = 300_000;
    const ROOM: usize = MOST + 64;
    let (from, to) = (gpu.memory(ROOM as u64), gpu.memory(ROOM as u64));
    let data = bytes_of(3, ROOM);
    from.write(0, &data).unwrap();
    for bytes in [0, 1, 15, 16, 17, 31, 33, 2048, 2049, 16_384, 40_001, MOST] {
        for (src, dst) in [(0, 0), (16, 32), (3, 3), (7, 23), (15, 31), (0, 8), (5, 9)] {
            for (blocks, buffer) in [(1, 128), (1, 2048), (3, 4096), (2, 24 << 10)] {
                to.write(0, &vec![JUNK; ROOM]).unwrap();
                let addresses = [to.address() + dst as u64, from.address() + src as u64];
                let (size, shared) = (bytes as u64, stage(buffer));
                copy.launch_shared(
                    blocks,
                    shared as u32,
                    &[
                        (&addresses[0]).into(),
                        (&addresses[1]).into(),
                        (&size).into(),
                        (&shared).into(),
                    ],
                );
                copy.done();
                let what = format!("{bytes} bytes from {src} to {dst}, {blocks} blocks, {buffer}");
                let all = read(&to, 0, ROOM);
                assert_eq!(all[dst..dst + bytes], data[src..src + bytes], "{what}");
                let mut around = all[..dst].iter().chain(&all[dst + bytes..]);
                assert!(around.all(|&byte| byte == JUNK), "{what}");
            }
        }
    }
}

/// What the copy engine has written is there for whoever has waited for the signal behind it; round
/// after round to the same place, each with another pattern.
#[test]
fn a_signal_covers_what_was_put_in_bulk() {
    let gpu = gpu!();
    let module = gpu.load_committed(channel_module(gpu.sm()));
    let rust = gpu.load_committed(bench_module(gpu.sm()));
    let memory = gpu.memory(4096 + (16 << 20));
    let [sender, receiver] = channels(&memory, 8 << 20);
    let (put, check) = (
        gpu.side(&module, channel::PUT_BULK),
        gpu.side(&rust, bench::PATTERN_CHECK),
    );
    let (blocks, shared, zero) = (5_u32, stage(4096), 0_u64);
    for round in 0_u64..40 {
        let bytes = [64, 4096, 40_000, 3 << 20][round as usize % 4];
        let count = bytes / 8;
        // The source's alignment changes, too.
        let src_offset = 16 * (round % 3) + 8 * (round % 5 / 4);
        write_words(&memory, 4096 + src_offset, &pattern(round, count));
        let (counter, target) = (receiver.semaphore.inbound, u64::from(blocks) * (round + 1));
        let (result, limit) = (memory.address() + 2048, check.limit());
        check.launch(
            2,
            &[
                (&receiver.local).into(),
                (&count).into(),
                (&round).into(),
                (&counter).into(),
                (&target).into(),
                (&result).into(),
                (&limit).into(),
            ],
        );
        put.launch_shared(
            blocks,
            shared as u32,
            &[
                (&sender).into(),
                (&zero).into(),
                (&src_offset).into(),
                (&bytes).into(),
                (&shared).into(),
            ],
        );
        put.done();
        check.done();
        let looked = 2 * (round + 1);
        assert_eq!(
            words(&memory, 2048, 2),
            [0, looked],
            "{bytes} bytes, {round}"
        );
    }
}

/// Memory of two ends of lines: what each sends, what it gets, and its lines.
const LINES: u64 = 4 << 20;
const OUTPUT: u64 = 1 << 20;

/// Sends `bytes` bytes both ways, from one end of `ends` to the other.
fn exchange(gpu: &Gpu, ends: &[DeviceMemory], bytes: u64, blocks: u32, flag: u32) {
    let module = gpu.load_committed(channel_module(gpu.sm()));
    let last = ends.len() - 1;
    let sides: Vec<_> = ends
        .iter()
        .map(|_| gpu.side(&module, channel::EXCHANGE_LINES))
        .collect();
    for (end, rank) in ends.iter().zip(0..) {
        let data = bytes_of(bytes + rank, bytes as usize);
        end.write(8 * (bytes & 1), &data).unwrap();
        end.write(OUTPUT, &vec![JUNK; bytes as usize + 64]).unwrap();
    }
    for (rank, (end, side)) in ends.iter().zip(&sides).enumerate() {
        let (peer, rank) = (&ends[last - rank], rank as u32);
        let channel = MemoryChannel {
            semaphore: Semaphore::default(),
            remote: peer.address() + LINES,
            // Aligned to a piece, or not.
            local: end.address() + 8 * (bytes & 1),
            packets: end.address() + LINES,
        };
        let (output, limit) = (OUTPUT + bytes % 16, side.limit());
        side.launch(
            blocks,
            &[
                (&channel).into(),
                (&output).into(),
                (&bytes).into(),
                (&flag).into(),
                (&rank).into(),
                (&limit).into(),
            ],
        );
    }
    for (rank, (end, side)) in ends.iter().zip(&sides).enumerate() {
        side.done();
        let sent = bytes_of(bytes + (last - rank) as u64, bytes as usize);
        let front = (8 * (bytes & 1) + bytes % 16) as usize;
        let all = read(end, OUTPUT, bytes as usize + 64);
        let what = format!("{bytes} bytes, {blocks} blocks, rank {rank}");
        assert_eq!(all[front..front + bytes as usize], sent, "{what}");
        let mut around = all[..front].iter().chain(&all[front + bytes as usize..]);
        assert!(around.all(|&byte| byte == JUNK), "{what}");
    }
}

const SIZES: [u64; 10] = [0, 1, 15, 16, 113, 240, 241, 4096, 100_001, 700_000];

#[test]
fn lines_go_to_and_fro() {
    let gpu = gpu!();
    let ends = [0, 1].map(|_| gpu.memory(8 << 20));
    for (turn, bytes) in (1..).zip(SIZES.into_iter().chain(SIZES)) {
        exchange(
            &gpu,
            &ends,
            bytes,
            1 + turn % 4,
            flag_of(turn.into(), bytes),
        );
    }
}

/// A rank that sends lines to itself: its warps have what they wait for.
#[test]
fn alone_lines_to_oneself() {
    let gpu = gpu!();
    let end = [gpu.memory(8 << 20)];
    for (turn, bytes) in (1..).zip(SIZES) {
        exchange(&gpu, &end, bytes, 1 + turn % 3, flag_of(turn.into(), bytes));
    }
}

/// The one-shot reductions in lines of every type, each of a rank that has two sources, and sends both itself.
#[test]
fn alone_reductions_in_lines() {
    let gpu = gpu!();
    let (blocks, bytes) = (3_u64, 50_008_u64);
    let step = bytes.div_ceil(PAIR_PAYLOAD).div_ceil(blocks) * PAIR_PAYLOAD;
    let half = bytes.div_ceil(PAIR_PAYLOAD) * PAIR;
    for dtype in DataType::ALL {
        let module = gpu.load_committed(fused_module(dtype, gpu.sm()));
        let side = gpu.side(&module, entries(dtype).unwrap().one_shot_lines);
        let memory = gpu.memory(8 << 20);
        // The largest of a value and itself is the value: any bytes that are no NaN, nor 0 with either sign, will do.
        let data: Vec<u8> = bytes_of(9, bytes as usize)
            .into_iter()
            .map(|byte| byte % 48 + 1)
            .collect();
        memory.write(0, &data).unwrap();
        write_words(&memory, 3 << 20, &[1]);
        let lines = memory.address() + LINES;
        let mut launch = OneShot {
            input: memory.address(),
            output: memory.address() + OUTPUT,
            bytes,
            step,
            counters: Counters {
                epoch: memory.address() + (3 << 20),
                packets: lines,
                packets_half: half,
                blocks,
            },
            context: side.limit(),
            op: ReduceOp::Max,
            divisor: 0,
            targets: 1,
            sources: 2,
            op_index: 0,
            rank: 0,
            target: [0; MAX_FUSED],
            source: [0; MAX_FUSED],
            peer: [0; MAX_FUSED],
        };
        launch.target[0] = lines;
        launch.source[1] = lines;
        for epoch in 1..=2 {
            side.launch(blocks as u32, &[(&launch).into()]);
            side.done();
            assert_eq!(read(&memory, OUTPUT, bytes as usize), data, "{dtype}");
            assert_eq!(words(&memory, 3 << 20, 1), [epoch + 1], "{dtype}");
        }
    }
}
