//! Kernels in CUDA C++ (`include/tests/interop.cu`) against kernels in Rust (`kernels/src/bench.rs`)
//! on a GPU: one side sends, the other receives, each way; and the C++ side of every channel.
//!
//! `cargo xtask header` leaves the PTX:
//! `CROSSWEFT_INTEROP_PTX=target/header/interop.ptx cargo test --test interop_cuda -- --nocapture`.
//! Without it, or without a GPU, every test says so and passes.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

mod common;
#[path = "common/cuda.rs"]
mod cuda;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LONG, deadline, pattern as bytes_of, pool, ranks_on, says};
use crossweft_channel::{
    Endpoint, MemoryChannel, ProxyOptions, ProxyService, RegisteredMemory, SwitchChannel,
};
use crossweft_device::channel;
use crossweft_device::fifo::{Fifo, TRIGGER_BYTES, TriggerKind};
use crossweft_device::gpu::{GpuContext, OneShotLaunch};
use crossweft_device::packet::flag_of;
use crossweft_device::program::COUNTER_STRIDE;
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{Raw, Stopped, WaitKind};
use crossweft_hal::Memory;
use crossweft_hal::cuda::{Argument, CudaError, Module, PinnedMemory, Shape};
use crossweft_kernels::{bench, bench_module, channel as kernels, channel_module};
use cuda::{Gpu, LIMIT, Side, channels, pattern, semaphores, words, write_words};

/// A GPU with the kernels of both languages.
struct Both {
    gpu: Gpu,
    /// In CUDA C++.
    cpp: Arc<Module>,
    /// In Rust.
    rust: Arc<Module>,
    /// In Rust: bulk copies and lines.
    channel: Arc<Module>,
}

impl Both {
    /// Device 0 with the modules, or `None` and a line that says why.
    fn new() -> Option<Self> {
        let Some(path) = std::env::var_os("CROSSWEFT_INTEROP_PTX") else {
            println!("skipped: CROSSWEFT_INTEROP_PTX does not name the PTX of interop.cu");
            return None;
        };
        let gpu = Gpu::new()?;
        let sm = gpu.sm();
        let ptx = std::fs::read_to_string(&path).unwrap();
        Some(Self {
            cpp: gpu.load("interop", &ptx),
            rust: gpu.load_committed(bench_module(sm)),
            channel: gpu.load_committed(channel_module(sm)),
            gpu,
        })
    }
}

impl std::ops::Deref for Both {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// Which of the two sides is written in C++.
fn sides<'a>(cpp: u32, in_cpp: &'a Side, in_rust: &'a Side) -> [&'a Side; 2] {
    match cpp {
        0 => [in_cpp, in_rust],
        _ => [in_rust, in_cpp],
    }
}

#[test]
fn signals_go_to_and_fro() {
    let Some(gpu) = Both::new() else { return };
    let rounds = 10_000_u32;
    for cpp in [0, 1] {
        let memory = gpu.memory(4096);
        let (table, out) = (memory.address() + 1024, memory.address() + 2048);
        let ends = semaphores(memory.address());
        for (k, end) in (0..).zip(&ends) {
            let ids = u64::from(end.peer) | u64::from(end.channel) << 32;
            let words = [end.inbound, end.outbound, end.expected, ids];
            write_words(&memory, 1024 + k * size_of::<Semaphore>() as u64, &words);
        }
        let in_cpp = gpu.side(&gpu.cpp, "interop_ping_pong");
        let in_rust = gpu.side(&gpu.rust, bench::PING_PONG);
        let both = sides(cpp, &in_cpp, &in_rust);
        for (side, runs) in (0_u32..).zip(both) {
            let limit = runs.limit();
            runs.launch(
                1,
                &[
                    (&table).into(),
                    (&side).into(),
                    (&rounds).into(),
                    (&out).into(),
                    (&limit).into(),
                ],
            );
        }
        both.into_iter().for_each(Side::done);
        let counter = |line: u64| words(&memory, line * 64, 1)[0];
        assert_eq!([0, 1, 2, 3].map(counter), [u64::from(rounds); 4]);
        let times = words(&memory, 2048, 2);
        assert!(times.iter().all(|&time| time > 0), "{times:?}");
        println!("signals, C++ is side {cpp}: {times:?} ns for {rounds} rounds");
    }
}

#[test]
fn packets_go_to_and_fro() {
    let Some(gpu) = Both::new() else { return };
    let rounds = 10_000_u32;
    for cpp in [0, 1] {
        let memory = gpu.memory(4096);
        let (packets, out) = (memory.address(), memory.address() + 2048);
        let in_cpp = gpu.side(&gpu.cpp, "interop_packet_echo");
        let in_rust = gpu.side(&gpu.rust, bench::PACKET_ECHO);
        let both = sides(cpp, &in_cpp, &in_rust);
        for (side, runs) in (0_u32..).zip(both) {
            let limit = runs.limit();
            runs.launch(
                1,
                &[
                    (&packets).into(),
                    (&side).into(),
                    (&rounds).into(),
                    (&out).into(),
                    (&limit).into(),
                ],
            );
        }
        both.into_iter().for_each(Side::done);
        let found = words(&memory, 2048, 4);
        // Side 1 gets what side 0 had before it was increased.
        let last = u64::from(rounds);
        assert_eq!([found[1], found[3]], [last, last - 1]);
        // Each inbox has the last round's packet.
        let packet = |number: u64| number | last << 32;
        assert_eq!(words(&memory, 0, 2), [packet(last), packet(last - 1)]);
        println!("packets, C++ is side {cpp}: {found:?}");
    }
}

/// Blocks in both languages push into one small fifo, round and round; the host is the proxy.
#[test]
fn triggers_of_both_arrive_whole_and_in_order() {
    let Some(gpu) = Both::new() else { return };
    let (blocks, count, capacity) = (3_u32, 1000_u32, 16_u32);
    let ring = u64::from(capacity) * TRIGGER_BYTES;
    let pinned = PinnedMemory::allocate(&gpu.context, ring + 64).unwrap();
    let memory = gpu.memory(8192);
    let at = |base: u64, head: u64| Fifo {
        ring: base + 64,
        head,
        tail: base,
        capacity,
        id: 3,
    };
    let fifo = at(pinned.device_address(), memory.address());
    let ids = u64::from(fifo.capacity) | u64::from(fifo.id) << 32;
    write_words(&memory, 64, &[fifo.ring, fifo.head, fifo.tail, ids]);
    let handle = memory.address() + 64;
    let outs = [1024, 2048].map(|offset| memory.address() + offset);
    let in_cpp = gpu.side(&gpu.cpp, "interop_fifo_push");
    let in_rust = gpu.side(&gpu.rust, bench::FIFO_PUSH);
    let (cpp_limit, rust_limit) = (in_cpp.limit(), in_rust.limit());
    in_cpp.launch(
        blocks,
        &[
            (&handle).into(),
            // Behind those of the other side.
            (&blocks).into(),
            (&count).into(),
            (&outs[0]).into(),
            (&cpp_limit).into(),
        ],
    );
    in_rust.launch(
        blocks,
        &[
            (&handle).into(),
            (&count).into(),
            (&outs[1]).into(),
            (&rust_limit).into(),
        ],
    );

    let proxy = at(pinned.host_address(), 0);
    let mut next = vec![0_u64; 2 * blocks as usize];
    let end = Instant::now() + LIMIT;
    let total = u64::from(2 * blocks * count);
    for position in 0..total {
        let trigger = loop {
            // SAFETY: pinned memory of this test; nobody else pops.
            match unsafe { proxy.poll(&Raw, position) } {
                Some(trigger) => break trigger,
                None => assert!(Instant::now() < end, "no trigger at {position}"),
            }
        };
        let pusher = trigger.channel as usize;
        let i = next[pusher];
        next[pusher] += 1;
        assert_eq!(trigger.kind, TriggerKind::PUT.with(TriggerKind::FLUSH));
        assert_eq!((trigger.dst_memory, trigger.src_memory), (1, 2));
        let numbers = (trigger.dst_offset, trigger.src_offset, trigger.size);
        assert_eq!(numbers, (i, i * 3, i * 5), "block {pusher}");
        // SAFETY: as above.
        unsafe { proxy.publish_handled(&Raw, position + 1) };
    }
    in_cpp.done();
    in_rust.done();
    assert_eq!(next, vec![u64::from(count); 2 * blocks as usize]);
    assert_eq!(words(&memory, 0, 1), [total]);
}

/// Sizes that are whole words: what the kernels in Rust look at.
const SIZES: [u64; 4] = [8, 4096, 4104, 3 << 20];

#[test]
fn what_cpp_puts_rust_sees() {
    let Some(gpu) = Both::new() else { return };
    for (seed, bytes) in (11..).zip(SIZES) {
        // The source is aligned to the destination in another way each time.
        let (src_offset, blocks) = ((4 << 20) + [0, 8, 4, 1][seed as usize % 4], 5_u32);
        let memory = gpu.memory(4096 + (16 << 20));
        let [sender, receiver] = channels(&memory, 8 << 20);
        let count = bytes / 8;
        write_words(&memory, 4096 + src_offset, &pattern(seed, count));
        let put = gpu.side(&gpu.cpp, "interop_put");
        let check = gpu.side(&gpu.rust, bench::PATTERN_CHECK);
        let (counter, target, zero) = (receiver.semaphore.inbound, u64::from(blocks), 0_u64);
        let (result, limit) = (memory.address() + 2048, check.limit());
        // The receiver first: it has to wait.
        check.launch(
            2,
            &[
                (&receiver.local).into(),
                (&count).into(),
                (&seed).into(),
                (&counter).into(),
                (&target).into(),
                (&result).into(),
                (&limit).into(),
            ],
        );
        put.launch(
            blocks,
            &[
                (&sender).into(),
                (&zero).into(),
                (&src_offset).into(),
                (&bytes).into(),
            ],
        );
        put.done();
        check.done();
        assert_eq!(words(&memory, 2048, 2), [0, 2], "{bytes} bytes");
        assert_eq!(words(&memory, 0, 1), [0], "nobody signalled the sender");
    }
}

/// The same through the copy engine, and what Rust puts so, C++ sees.
#[test]
fn what_either_puts_in_bulk_the_other_sees() {
    let Some(gpu) = Both::new() else { return };
    for (seed, bytes) in (31..).zip(SIZES) {
        for cpp in [true, false] {
            let (src_offset, blocks) = ((4 << 20) + [0, 8, 16, 32][seed as usize % 4], 5_u32);
            let memory = gpu.memory(4096 + (16 << 20));
            let [sender, receiver] = channels(&memory, 8 << 20);
            let count = bytes / 8;
            write_words(&memory, 4096 + src_offset, &pattern(seed, count));
            let (signals, zero) = (u64::from(blocks), 0_u64);
            let result = memory.address() + 2048;
            if cpp {
                let put = gpu.side(&gpu.cpp, "interop_put_bulk");
                let check = gpu.side(&gpu.rust, bench::PATTERN_CHECK);
                let (counter, limit) = (receiver.semaphore.inbound, check.limit());
                check.launch(
                    2,
                    &[
                        (&receiver.local).into(),
                        (&count).into(),
                        (&seed).into(),
                        (&counter).into(),
                        (&signals).into(),
                        (&result).into(),
                        (&limit).into(),
                    ],
                );
                put.launch(
                    blocks,
                    &[
                        (&sender).into(),
                        (&zero).into(),
                        (&src_offset).into(),
                        (&bytes).into(),
                    ],
                );
                put.done();
                check.done();
                assert_eq!(words(&memory, 2048, 2), [0, 2], "{bytes} bytes");
            } else {
                let put = gpu.side(&gpu.channel, kernels::PUT_BULK);
                let check = gpu.side(&gpu.cpp, "interop_check");
                let (shared, limit) = (16_512_u64, check.limit());
                check.launch(
                    1,
                    &[
                        (&receiver).into(),
                        (&count).into(),
                        (&seed).into(),
                        (&signals).into(),
                        (&result).into(),
                        (&zero).into(),
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
                assert_eq!(words(&memory, 2048, 2), [0, 1], "{bytes} bytes");
            }
        }
    }
}

/// Rank 0 in Rust and rank 1 in C++ send each other lines.
#[test]
fn lines_both_ways() {
    const LINES: u64 = 4 << 20;
    const OUTPUT: u64 = 1 << 20;
    let Some(gpu) = Both::new() else { return };
    let ends = [0, 1].map(|_| gpu.memory(8 << 20));
    for (epoch, bytes) in (1_u64..).zip([1, 16, 113, 240, 241, 4099, 100_002, 480_000]) {
        let data = [0, 1].map(|rank| bytes_of(epoch + 50 * rank, bytes as usize));
        // Aligned to a piece, or not.
        let (shift, flag) = (epoch % 4 * 4, flag_of(epoch, bytes));
        let in_rust = gpu.side(&gpu.channel, kernels::EXCHANGE_LINES);
        let in_cpp = gpu.side(&gpu.cpp, "interop_lines");
        for (end, data) in ends.iter().zip(&data) {
            end.write(shift, data).unwrap();
        }
        for (rank, side) in [&in_rust, &in_cpp].into_iter().enumerate() {
            let (own, peer) = (&ends[rank], &ends[1 - rank]);
            let channel = channel::MemoryChannel {
                semaphore: Semaphore::default(),
                remote: peer.address() + LINES,
                local: own.address() + shift,
                packets: own.address() + LINES,
            };
            let (number, limit) = (rank as u32, side.limit());
            side.launch(
                1,
                &[
                    (&channel).into(),
                    (&OUTPUT).into(),
                    (&bytes).into(),
                    (&flag).into(),
                    (&number).into(),
                    (&limit).into(),
                ],
            );
        }
        in_rust.done();
        in_cpp.done();
        for (rank, end) in ends.iter().enumerate() {
            let mut got = vec![0; bytes as usize];
            end.read(OUTPUT + shift, &mut got).unwrap();
            assert_eq!(got, data[1 - rank], "{bytes} bytes, rank {rank}");
        }
    }
}

#[test]
fn what_rust_writes_cpp_sees() {
    let Some(gpu) = Both::new() else { return };
    for (seed, bytes) in (21..).zip(SIZES) {
        for get in [0_u64, 1] {
            let (blocks, count) = (5_u32, bytes / 8);
            let memory = gpu.memory(4096 + (16 << 20));
            let [sender, receiver] = channels(&memory, 8 << 20);
            let write = gpu.side(&gpu.rust, bench::PATTERN_WRITE);
            let check = gpu.side(&gpu.cpp, "interop_check");
            // Into the receiver's memory, or for it to get from the sender's.
            let at = if get == 0 {
                sender.remote
            } else {
                sender.local
            };
            let (counter, signals) = (sender.semaphore.outbound, u64::from(blocks));
            let (result, limit) = (memory.address() + 2048, check.limit());
            check.launch(
                1,
                &[
                    (&receiver).into(),
                    (&count).into(),
                    (&seed).into(),
                    (&signals).into(),
                    (&result).into(),
                    (&get).into(),
                    (&limit).into(),
                ],
            );
            write.launch(
                blocks,
                &[
                    (&at).into(),
                    (&count).into(),
                    (&seed).into(),
                    (&counter).into(),
                ],
            );
            write.done();
            check.done();
            assert_eq!(words(&memory, 2048, 2), [0, 1], "{bytes} bytes, get {get}");
            // Inbound, and waits done, of the receiver.
            assert_eq!(words(&memory, 64, 1), [signals]);
            assert_eq!(words(&memory, 3 * 64, 1), [signals]);
        }
    }
}

/// As the kernel reads it.
fn words_of(launch: &OneShotLaunch) -> [u64; size_of::<OneShotLaunch>() / 8] {
    let OneShotLaunch {
        input,
        output,
        bytes,
        packets,
        slot,
        counters,
        rank,
        ranks,
        context,
    } = *launch;
    let ranks = u64::from(rank) | u64::from(ranks) << 32;
    let GpuContext {
        limit_ns,
        abort,
        status,
    } = context;
    [
        input, output, bytes, packets, slot, counters, ranks, limit_ns, abort, status,
    ]
}

/// Rank 0 runs the one-shot all-reduce in Rust; rank 1 sends it packets from C++, and unpacks those
/// that it is sent.
#[test]
fn many_packets_at_once() {
    const SLOT: u64 = 1 << 20;
    const COUNTERS: u64 = 256;
    const LAUNCH: u64 = COUNTERS + 2 * COUNTER_STRIDE;
    const INPUT: u64 = 64 << 10;
    const OUTPUT: u64 = 512 << 10;
    let Some(gpu) = Both::new() else { return };
    // Numbers of up to eight bits, so that sums of two are exact in bfloat16 as well.
    let bf16 = |value: u16| ((f32::from(value)).to_bits() >> 16) as u16;
    let data = |seed: u64, elements: usize| -> Vec<u16> {
        let bytes = bytes_of(seed, elements);
        bytes.iter().map(|&byte| u16::from(byte >> 1)).collect()
    };
    let raw = |values: &[u16]| -> Vec<u8> {
        let bits = values.iter().map(|&value| bf16(value));
        bits.flat_map(u16::to_le_bytes).collect()
    };
    for small in [0_u32, 1] {
        for (epoch, bytes) in (1_u64..).zip([2, 6, 8, 16, 34, 4096, 100_002]) {
            // Two halves of a slot a rank, for each rank.
            let packets_memory = gpu.memory(8 * SLOT);
            let packets = [0, 4].map(|slot| packets_memory.address() + slot * SLOT);
            let elements = bytes as usize / 2;
            let (mine, theirs) = (data(epoch, elements), data(epoch + 100, elements));
            // Rank 1's input and output.
            let second = gpu.memory(SLOT);
            second.write(0, &raw(&theirs)).unwrap();
            // Rank 0's, with the tables that its kernel reads.
            let first = gpu.memory(SLOT);
            let base = first.address();
            first.write(INPUT, &raw(&mine)).unwrap();
            write_words(&first, 0, &packets);
            write_words(&first, COUNTERS, &[epoch]);
            let in_rust = gpu.side(&gpu.rust, bench::EXCHANGE_PACKETS_BF16);
            let in_cpp = gpu.side(&gpu.cpp, "interop_packets");
            let launch = OneShotLaunch {
                input: base + INPUT,
                output: base + OUTPUT,
                bytes,
                packets: base,
                slot: SLOT,
                counters: base + COUNTERS,
                rank: 0,
                ranks: 2,
                context: in_rust.limit(),
            };
            write_words(&first, LAUNCH, &words_of(&launch));

            let half = (epoch & 1) * SLOT * 2;
            let channel = channel::MemoryChannel {
                semaphore: Semaphore::default(),
                // Rank 1's slot at rank 0, and rank 0's at rank 1.
                remote: packets[0] + half + SLOT,
                local: second.address(),
                packets: packets[1] + half,
            };
            let (dst_offset, flag) = (OUTPUT, flag_of(epoch, bytes));
            let (launches, cpp_limit) = (base + LAUNCH, in_cpp.limit());
            in_rust.launch(3, &[(&launches).into()]);
            in_cpp.launch(
                1,
                &[
                    (&channel).into(),
                    (&dst_offset).into(),
                    (&bytes).into(),
                    (&flag).into(),
                    (&small).into(),
                    (&cpp_limit).into(),
                ],
            );
            in_rust.done();
            in_cpp.done();
            let mut sums = vec![0; bytes as usize];
            first.read(OUTPUT, &mut sums).unwrap();
            let expected: Vec<_> = mine.iter().zip(&theirs).map(|(a, b)| a + b).collect();
            assert_eq!(sums, raw(&expected), "{bytes} bytes, rank 0 in Rust");
            let mut got = vec![0; bytes as usize];
            second.read(OUTPUT, &mut got).unwrap();
            assert_eq!(got, raw(&mine), "{bytes} bytes, rank 1 in C++");
        }
    }
}

fn register(endpoint: &Endpoint, bytes: u64) -> Arc<RegisteredMemory> {
    let memory = endpoint.allocate(bytes, "testing").unwrap();
    endpoint.register(memory, "testing", deadline()).unwrap()
}

fn read(memory: &Memory, offset: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    memory.read(offset, &mut data).unwrap();
    data
}

/// Two ranks send each other pieces through their proxies.
#[test]
fn ports_from_cpp() {
    let Some(gpu) = Both::new() else { return };
    let (piece, count) = (1000_u64, 20_u32);
    let size = piece * u64::from(count);
    ranks_on(&gpu.device(), 2, |endpoint| {
        let rank = endpoint.rank();
        let peer = 1 - rank;
        let memory = register(&endpoint, 1 << 20);
        let semaphores = pool(&endpoint, &[peer]);
        let options = ProxyOptions {
            // Smaller than what is pushed.
            fifo_capacity: 4,
            ..ProxyOptions::default()
        };
        let service = ProxyService::new(&endpoint, &options, deadline()).unwrap();
        let id = service.add_memory(&memory).unwrap();
        let port = service.channel(&semaphores, 0, id, id, deadline()).unwrap();
        let data = bytes_of(u64::from(rank) + 1, size as usize);
        memory.local().write(0, &data).unwrap();
        let side = gpu.side(&gpu.cpp, "interop_port");
        endpoint.group().barrier(deadline()).unwrap();
        let (handle, dst, src, limit) = (port.handle(), 512_u64 << 10, 0_u64, side.limit());
        let shape = Shape::linear(1, 32);
        let arguments: [Argument<'_>; 7] = [
            (&handle).into(),
            (&dst).into(),
            (&src).into(),
            (&piece).into(),
            (&count).into(),
            (&rank).into(),
            (&limit).into(),
        ];
        // SAFETY: these are the kernel's parameters; all is kept until it has ended.
        unsafe { side.kernel.launch(&side.stream, &shape, &arguments) }.unwrap();
        side.guard.finish(&endpoint, &side.stream, LIMIT).unwrap();
        let expected = bytes_of(u64::from(peer) + 1, size as usize);
        assert_eq!(read(memory.local(), dst, size as usize), expected);
        endpoint.group().barrier(deadline()).unwrap();
    });
}

#[test]
fn switches_from_cpp() {
    let Some(gpu) = Both::new() else { return };
    let (world_size, count) = (3_u32, 1001_usize);
    let value = |rank: u32, i: usize| (rank as i32 + 1) * (i as i32 - 500);
    ranks_on(&gpu.device(), world_size, |endpoint| {
        let rank = endpoint.rank();
        let memory = register(&endpoint, 1 << 16);
        let members: Vec<u32> = (0..world_size).collect();
        let switch = SwitchChannel::new(&endpoint, &memory, &members, deadline()).unwrap();
        let input: Vec<u8> = (0..count)
            .flat_map(|i| value(rank, i).to_le_bytes())
            .collect();
        memory.local().write(0, &input).unwrap();
        let side = gpu.side(&gpu.cpp, "interop_switch");
        endpoint.group().barrier(deadline()).unwrap();
        let (from, to, elements) = (0_u64, 4096_u64, count as u64);
        let (handle, limit) = (switch.handle(), side.limit());
        for _ in 0..3 {
            side.launch(
                1,
                &[
                    (&handle).into(),
                    (&from).into(),
                    (&to).into(),
                    (&elements).into(),
                    (&rank).into(),
                    (&limit).into(),
                ],
            );
        }
        side.guard.finish(&endpoint, &side.stream, LIMIT).unwrap();
        let expected: Vec<u8> = (0..count)
            .flat_map(|i| {
                (0..world_size)
                    .map(|r| value(r, i))
                    .sum::<i32>()
                    .to_le_bytes()
            })
            .collect();
        assert_eq!(read(memory.local(), to * 4, count * 4), expected);
        endpoint.group().barrier(deadline()).unwrap();
    });
}

/// A wait for nobody ends, says what it was, takes no signal, and harms nothing.
#[test]
fn waits_in_cpp_end() {
    let Some(gpu) = Both::new() else { return };
    for aborted in [false, true] {
        let memory = gpu.memory(4096 + (16 << 20));
        let [sender, receiver] = channels(&memory, 8 << 20);
        let side = gpu.side(&gpu.cpp, "interop_check");
        let (count, seed, result, get) = (16_u64, 5_u64, memory.address() + 2048, 0_u64);
        let check = |side: &Side, signals: u64, limit: GpuContext| {
            side.launch(
                1,
                &[
                    (&receiver).into(),
                    (&count).into(),
                    (&seed).into(),
                    (&signals).into(),
                    (&result).into(),
                    (&get).into(),
                    (&limit).into(),
                ],
            );
        };
        let (limit, stopped) = match aborted {
            false => (Duration::from_millis(50), Stopped::Deadline),
            true => (LONG, Stopped::Aborted),
        };
        // Ready before the other runs.
        let write = gpu.side(&gpu.rust, bench::PATTERN_WRITE);
        let again = gpu.side(&gpu.cpp, "interop_check");
        let start = Instant::now();
        check(&side, 1, side.guard.context(limit));
        if aborted {
            let soon = Instant::now() + Duration::from_millis(50);
            let still = side.stream.synchronize(soon);
            assert!(
                matches!(still, Err(CudaError::Deadline { .. })),
                "{still:?}"
            );
            side.guard.abort();
        }
        side.guard.wait(&side.stream, limit, || false).unwrap();
        assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
        let interrupted = side.guard.interrupted().unwrap();
        let waiting = interrupted.waiting;
        assert_eq!((interrupted.stopped, interrupted.block), (stopped, 0));
        assert_eq!(waiting.site.kind, WaitKind::Semaphore);
        // The first wait of the receiver, for the peer on the channel of `semaphores`.
        let site = (waiting.site.peer, waiting.site.channel, waiting.site.op);
        assert_eq!(site, (0, 7, 0));
        assert_eq!((waiting.expected, waiting.seen), (1, 0));
        assert_eq!(words(&memory, 2048, 2), [0, 0], "it went on");

        // The signal that comes late is there for the next.
        let (at, counter) = (sender.remote, sender.semaphore.outbound);
        write.launch(
            1,
            &[
                (&at).into(),
                (&count).into(),
                (&seed).into(),
                (&counter).into(),
            ],
        );
        write.done();
        check(&again, 1, again.limit());
        again.done();
        assert_eq!(words(&memory, 2048, 2), [0, 1]);
    }
}

/// The error that a user sees when a peer does not launch.
#[test]
fn a_peer_that_does_not_launch_is_named() {
    let Some(gpu) = Both::new() else { return };
    ranks_on(&gpu.device(), 2, |endpoint| {
        let rank = endpoint.rank();
        let memory = register(&endpoint, 1 << 16);
        let channels =
            MemoryChannel::connect(&endpoint, &[1 - rank], &memory, &memory, deadline()).unwrap();
        let side = gpu.side(&gpu.cpp, "interop_check");
        endpoint.group().barrier(deadline()).unwrap();
        if rank == 1 {
            let (handle, count, seed, signals) = (channels[0].handle(), 0_u64, 0_u64, 3_u64);
            let (result, get) = (memory.local().addr() + 4096, 0_u64);
            let short = Duration::from_millis(100);
            let limit = side.guard.context(short);
            side.launch(
                1,
                &[
                    (&handle).into(),
                    (&count).into(),
                    (&seed).into(),
                    (&signals).into(),
                    (&result).into(),
                    (&get).into(),
                    (&limit).into(),
                ],
            );
            let ended = side.guard.finish(&endpoint, &side.stream, short);
            says(ended, &["rank 1", "from rank 0", "channel 0", "100ms"]);
        }
        endpoint.group().barrier(deadline()).unwrap();
    });
}
