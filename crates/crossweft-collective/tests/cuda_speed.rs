//! What a small call costs, in one piece, by the executor and beside a kernel from nvcc, and other figures of one CUDA device: two
//! virtual ranks on it, calls recorded into graphs, some tests on two where there are two. Prints; asserts nothing about time. Run with
//! `CUDA_DEVICE_MAX_CONNECTIONS=32`, `--nocapture` and an optimised build.
#![allow(clippy::unwrap_used, unsafe_code, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_collective::{
    Algorithm, AllReduceOptions, CollectiveError, CommunicatorOptions, DataType, ReduceOp,
    RmsNormOptions, run_in_threads_on,
};
use crossweft_device::Raw;
use crossweft_device::executor::Counters;
use crossweft_device::fifo::{Fifo, TRIGGER_BYTES};
use crossweft_device::gpu::bulk::{ALIGNMENT, BUFFERS};
use crossweft_executor::{
    Behind, Buffers, NormBuffers, NormScales, Options, Prepared, RawBuffers, TokenNorm, Tokens,
};
use crossweft_hal::Device;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, Driver, Event, Kernel, Module, PinnedMemory, Shape, Stream,
};
use crossweft_kernels::{
    GpuContext, MAX_FUSED, OneShot, TwoShot, bench, bench_module, channel, channel_module,
};
use crossweft_verify::{Pattern, fill};

const LIMIT: Duration = Duration::from_secs(20);
const CALLS: u32 = 100;
const REPLAYS: usize = 11;

fn context() -> Option<Arc<Context>> {
    match Driver::open().and_then(|driver| driver.device(0)) {
        Ok(device) => Some(Context::retain(&device).unwrap()),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// Of two GPUs, or of the only one, or none.
fn contexts() -> Vec<Arc<Context>> {
    let Some(first) = context() else {
        return Vec::new();
    };
    let second = Driver::open().and_then(|driver| driver.device(1));
    let second = second.map(|device| Context::retain(&device).unwrap());
    [first].into_iter().chain(second.ok()).collect()
}

fn kernel(context: &Arc<Context>, entry: &str) -> Kernel {
    if let Ok(path) = std::env::var("CROSSWEFT_BENCH_CUBIN") {
        let cubin = std::fs::read(path).unwrap();
        // SAFETY: whoever names it vouches for it.
        let module = unsafe { Module::load_cubin(context, "bench", &cubin) }.unwrap();
        return module.kernel(entry).unwrap();
    }
    let module = bench_module(90).unwrap();
    let options = CompileOptions {
        max_registers: Some(crossweft_kernels::MAX_REGISTERS),
        ..CompileOptions::default()
    };
    let module = Module::load(context, module.name, module.ptx, &options).unwrap();
    module.kernel(entry).unwrap()
}

fn median(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

/// Median and least time of a launch in microseconds, in a graph of many.
fn in_graph(
    stream: &Stream,
    mut launch: impl FnMut(&Stream),
    mut line_up: impl FnMut(),
) -> (f64, f64) {
    let context = stream.context();
    let capture = stream.begin_capture().unwrap();
    for _ in 0..CALLS {
        launch(stream);
    }
    let graph = capture.end().unwrap().instantiate().unwrap();
    let (start, end) = (
        Event::with_timing(context).unwrap(),
        Event::with_timing(context).unwrap(),
    );
    let mut times = Vec::new();
    for replay in 0..=REPLAYS {
        line_up();
        launch(stream);
        start.record(stream).unwrap();
        // SAFETY: what was captured is kept by the caller.
        unsafe { graph.launch(stream) }.unwrap();
        end.record(stream).unwrap();
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        if replay > 0 {
            times.push(end.since(&start).unwrap().as_secs_f64() * 1e6 / f64::from(CALLS));
        }
    }
    median(times)
}

/// Median time of a launch in microseconds, of `calls` at a time.
fn back_to_back(stream: &Stream, calls: u32, launch: impl Fn(&Stream)) -> f64 {
    let context = stream.context();
    let (start, end) = (
        Event::with_timing(context).unwrap(),
        Event::with_timing(context).unwrap(),
    );
    let mut times = Vec::new();
    for replay in 0..6 {
        launch(stream);
        start.record(stream).unwrap();
        for _ in 0..calls {
            launch(stream);
        }
        end.record(stream).unwrap();
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        if replay > 0 {
            times.push(end.since(&start).unwrap().as_secs_f64() * 1e6 / f64::from(calls));
        }
    }
    median(times).0
}

/// Copies inside one GPU by few and by many blocks: through registers, and in bulk through shared memory of several sizes.
#[test]
fn bulk_copies_beside_vectors() {
    let Some(context) = context() else { return };
    let stream = Stream::new(&context).unwrap();
    let device = Device::Cuda(context.clone());
    let most = 256_u64 << 20;
    let (a, b) = (
        device.allocate(most).unwrap(),
        device.allocate(most).unwrap(),
    );
    let (to, from) = (a.addr(), b.addr());
    let vectors = kernel(&context, bench::COPY);
    let module = channel_module(90).unwrap();
    let options = CompileOptions {
        max_registers: Some(crossweft_kernels::MAX_REGISTERS),
        ..CompileOptions::default()
    };
    let module = Module::load(&context, module.name, module.ptx, &options).unwrap();
    let bulk = module.kernel(channel::BULK_COPY).unwrap();
    let stages = [4, 8, 16, 26].map(|kib| ALIGNMENT + BUFFERS * (kib << 10));
    bulk.allow_shared_bytes(stages[3] as u32).unwrap();
    println!("GB/s by vectors, then in bulk through 8 buffers of 4, 8, 16 and 26 KiB");
    for bytes in [1_u64 << 20, 4 << 20, 16 << 20, 64 << 20, most] {
        for blocks in [1, 2, 4, 8, 16, 32, 64, 132] {
            // Some 8 GB/s for each block and turn, and some milliseconds.
            let calls = ((u64::from(blocks) * (256 << 20)) / bytes).clamp(1, 50) as u32;
            let by_vectors = back_to_back(&stream, calls, |stream| {
                let arguments = [(&to).into(), (&from).into(), (&bytes).into()];
                // SAFETY: what the kernel takes; the memory is kept.
                unsafe { vectors.launch(stream, &Shape::linear(blocks, 384), &arguments) }.unwrap();
            });
            let in_bulk = stages.map(|shared| {
                back_to_back(&stream, calls, |stream| {
                    let arguments = [
                        (&to).into(),
                        (&from).into(),
                        (&bytes).into(),
                        (&shared).into(),
                    ];
                    let shape = Shape::linear(blocks, 128).with_shared_bytes(shared as u32);
                    // SAFETY: as above.
                    unsafe { bulk.launch(stream, &shape, &arguments) }.unwrap();
                })
            });
            let speed = |us: f64| format!("{:7.1}", bytes as f64 / us / 1e3);
            println!(
                "{:>3} MiB, {blocks:>3} blocks: {} | {}",
                bytes >> 20,
                speed(by_vectors),
                in_bulk.map(speed).join(" ")
            );
        }
    }
}

/// What a trigger takes from a kernel to a handler on the host and, handled, back to the kernel.
fn fifo(context: &Arc<Context>, stream: &Stream) {
    let capacity = 16;
    let pinned = PinnedMemory::allocate(context, u64::from(capacity) * TRIGGER_BYTES + 64).unwrap();
    let memory = Device::Cuda(context.clone()).allocate(4096).unwrap();
    let at = |base: u64, head: u64| Fifo {
        ring: base + 64,
        head,
        tail: base,
        capacity,
        id: 0,
    };
    let fifo = at(pinned.device_address(), memory.addr());
    let (handle, out) = (memory.addr() + 64, memory.addr() + 1024);
    let words = [fifo.ring, fifo.head, fifo.tail, u64::from(capacity)];
    memory.write(0, &[0; 8]).unwrap();
    memory
        .write(64, &words.map(u64::to_le_bytes).concat())
        .unwrap();
    let status = PinnedMemory::allocate(context, 4096).unwrap();
    let limit = GpuContext {
        limit_ns: 10_000_000_000,
        abort: status.device_address(),
        status: status.device_address() + 64,
    };
    let push = kernel(context, bench::FIFO_PUSH);
    let proxy = at(pinned.host_address(), 0);
    let count = 1_u32;
    let (mut there_and_back, mut pushing) = (Vec::new(), Vec::new());
    for position in 0..200 {
        let arguments = [
            Argument::from(&handle),
            Argument::from(&count),
            Argument::from(&out),
            Argument::from(&limit),
        ];
        // SAFETY: what the kernel takes; all memory is kept until it has ended.
        unsafe { push.launch(stream, &Shape::linear(1, 32), &arguments) }.unwrap();
        let end = Instant::now() + LIMIT;
        // SAFETY: pinned memory of this function; nobody else pops.
        while unsafe { proxy.poll(&Raw, position) }.is_none() {
            assert!(Instant::now() < end, "no trigger at {position}");
        }
        // SAFETY: as above.
        unsafe { proxy.publish_handled(&Raw, position + 1) };
        stream.synchronize(Instant::now() + LIMIT).unwrap();
        let mut times = [0; 16];
        memory.read(1024, &mut times).unwrap();
        let time = |k: usize| {
            let ns: [u8; 8] = times[8 * k..8 * k + 8].try_into().unwrap();
            u64::from_le_bytes(ns) as f64 / 1e3
        };
        pushing.push(time(0));
        there_and_back.push(time(1));
    }
    let (push, push_min) = median(pushing);
    let (p50, min) = median(there_and_back);
    println!(
        "a trigger, pushed in {push:.2} (min {push_min:.2}) us, handled and seen to be in {p50:.2} (min {min:.2})"
    );
}

/// Calls of a plan in a graph: median and least time in microseconds.
fn recorded(
    plan: &Arc<Prepared>,
    bytes: u64,
    line_up: impl Fn(),
) -> Result<(f64, f64), CollectiveError> {
    plan.run_registered(0, 0, bytes, LIMIT)?;
    let recorded = plan.record_registered(&[(0, 0)], (bytes, bytes), CALLS, LIMIT)?;
    let mut times = Vec::new();
    for replay in 0..=REPLAYS {
        line_up();
        let time = recorded.start()?.finish(LIMIT)?;
        if replay > 0 {
            times.push(time.as_secs_f64() * 1e6);
        }
    }
    Ok(median(times))
}

/// The module that nvcc made of benches/gpu/rivals.cu, if somebody has compiled it.
fn rivals(context: &Arc<Context>) -> Option<Arc<Module>> {
    let path = std::env::var("CROSSWEFT_RIVALS_PTX").ok()?;
    let ptx = std::fs::read_to_string(path).unwrap();
    let options = CompileOptions {
        max_registers: Some(crossweft_kernels::MAX_REGISTERS),
        ..CompileOptions::default()
    };
    Some(Module::load(context, "rivals", &ptx, &options).unwrap())
}

/// Median and least time on one rank: of a call as it is made, of the executor, of kernels from nvcc.
type Row = [(f64, f64); 4];

/// Of a time that nobody took.
const UNKNOWN: (f64, f64) = (f64::NAN, f64::NAN);

/// The slowest rank's times, in words, and the ratio of the first to each of the others.
fn beside<const N: usize>(rows: &[[(f64, f64); N]], names: [&str; N]) -> String {
    let most = |of: usize| {
        let of =
            |pick: fn(&(f64, f64)) -> f64| rows.iter().map(|r| pick(&r[of])).fold(0.0, f64::max);
        (of(|row| row.0), of(|row| row.1))
    };
    let words = names.iter().enumerate().map(|(of, name)| {
        let (p50, min) = most(of);
        format!("{name} {p50:.2} (min {min:.2}; {:.3})", most(0).0 / p50)
    });
    words.collect::<Vec<_>>().join(", ")
}

#[test]
fn a_one_shot_beside_the_executor_and_nvcc() {
    let Some(context) = context() else { return };
    let rivals = rivals(&context);
    for bytes in [1 << 10, 16 << 10, 64 << 10, 256 << 10] {
        for blocks in [1, 4, 16, 64] {
            let rows: Vec<Row> = run_in_threads_on(
                |_| Ok(Device::Cuda(context.clone())),
                2,
                CommunicatorOptions { timeout: LIMIT },
                |communicator| {
                    let rank = communicator.rank();
                    let stream = Stream::new(&context).unwrap();
                    let line_up = || communicator.barrier().unwrap();
                    let buffer = communicator.allocate(bytes)?;
                    let output = communicator.allocate(bytes)?;

                    let plan = Algorithm::OneShot.plan(2, blocks)?;
                    let by = |fused| {
                        let mut options = Options::new(DataType::Bf16, ReduceOp::Sum, bytes);
                        options.fused = fused;
                        options.buffers = Buffers::Registered {
                            input: buffer.registered(),
                            output: output.registered(),
                        };
                        let deadline = Instant::now() + LIMIT;
                        let endpoint = communicator.endpoint();
                        let plan = Prepared::prepare(endpoint, &plan, options, deadline)?;
                        recorded(&plan, bytes, line_up)
                    };
                    let (call, executor) = (by(true)?, by(false)?);
                    let Some(rivals) = &rivals else {
                        return Ok([call, executor, UNKNOWN, UNKNOWN]);
                    };

                    let packets = communicator.allocate(8 * bytes)?;
                    let memory = packets.registered();
                    let at = |rank: u32, sender: u32| {
                        memory.addr(rank).unwrap() + u64::from(sender) * 2 * bytes
                    };
                    let table = communicator.device().allocate(4096)?;
                    table.write(0, &1_u64.to_le_bytes())?;
                    let status = PinnedMemory::allocate(&context, 4096).unwrap();
                    let peer = 1 - rank;
                    let mut launch = OneShot {
                        input: buffer.registered().local().addr(),
                        output: output.registered().local().addr(),
                        bytes,
                        step: (bytes / 16).div_ceil(blocks.into()) * 16,
                        counters: Counters {
                            epoch: table.addr(),
                            packets: at(rank, 0),
                            packets_half: 4 * bytes,
                            blocks: blocks.into(),
                        },
                        context: GpuContext {
                            limit_ns: 10_000_000_000,
                            abort: status.device_address(),
                            status: status.device_address() + 64,
                        },
                        op: ReduceOp::Sum,
                        divisor: 0,
                        targets: 1,
                        sources: 2,
                        op_index: 1,
                        rank,
                        target: [0; MAX_FUSED],
                        source: [0; MAX_FUSED],
                        peer: [peer; MAX_FUSED],
                    };
                    launch.target[0] = at(peer, rank);
                    launch.source[peer as usize] = at(rank, peer);
                    let threads = (launch.step / 16).next_multiple_of(32).clamp(32, 384);
                    let shape = Shape::linear(blocks, threads as u32);
                    let rival = |name: &str| {
                        let one_shot = rivals.kernel(name).unwrap();
                        in_graph(
                            &stream,
                            |stream| {
                                // SAFETY: what the kernel takes; all memory is kept until the end.
                                unsafe {
                                    one_shot.launch(stream, &shape, &[Argument::from(&launch)])
                                }
                                .unwrap();
                            },
                            line_up,
                        )
                    };
                    let (bare, whole) = (rival("rival_one_shot"), rival("rival_one_shot_bounded"));
                    communicator.barrier()?;
                    Ok([call, executor, whole, bare])
                },
            )
            .unwrap();
            let names = [
                "in one piece",
                "executor",
                "nvcc",
                "nvcc without ends of waits",
            ];
            println!(
                "{bytes:>6} B, {blocks:>2} blocks, us: {}",
                beside(&rows, names)
            );
        }
    }
}

#[test]
fn a_two_shot_beside_the_executor_and_nvcc() {
    let Some(context) = context() else { return };
    let rivals = rivals(&context);
    for (bytes, blocks) in [
        (64 << 10, 32),
        (1 << 20, 32),
        (16 << 20, 32),
        (16 << 20, 128),
    ] {
        let rows: Vec<[(f64, f64); 3]> = run_in_threads_on(
            |_| Ok(Device::Cuda(context.clone())),
            2,
            CommunicatorOptions { timeout: LIMIT },
            |communicator| {
                let rank = communicator.rank();
                let stream = Stream::new(&context).unwrap();
                let line_up = || communicator.barrier().unwrap();
                let buffer = communicator.allocate(bytes)?;
                let output = communicator.allocate(bytes)?;
                let plan = Algorithm::TwoShot.plan(2, blocks)?;
                let by = |fused| {
                    let mut options = Options::new(DataType::Bf16, ReduceOp::Sum, bytes);
                    options.fused = fused;
                    options.buffers = Buffers::Registered {
                        input: buffer.registered(),
                        output: output.registered(),
                    };
                    let (endpoint, deadline) = (communicator.endpoint(), Instant::now() + LIMIT);
                    let plan = Prepared::prepare(endpoint, &plan, options, deadline)?;
                    recorded(&plan, bytes, line_up)
                };
                let (call, executor) = (by(true)?, by(false)?);
                let Some(rivals) = &rivals else {
                    return Ok([call, executor, UNKNOWN]);
                };
                let (ranks, flags) = (
                    [rank, 1 - rank],
                    communicator.allocate(64 * u64::from(blocks))?,
                );
                let table = communicator.device().allocate(64 << 10)?;
                table.write(0, &vec![0; 64 << 10])?;
                table.write(0, &1_u64.to_le_bytes())?;
                let (expected, semaphores) = (table.addr() + 4096, table.addr() + (32 << 10));
                let at = |of: &crossweft_collective::SymmetricBuffer, rank: u32| {
                    of.registered().addr(rank).unwrap()
                };
                for block in 0..u64::from(blocks) {
                    let [mine, theirs] = ranks.map(|rank| at(&flags, rank) + 64 * block);
                    let words = [mine, theirs, expected + 64 * block, u64::from(ranks[1])];
                    table.write(
                        (32 << 10) + 32 * block,
                        &words.map(u64::to_le_bytes).concat(),
                    )?;
                }
                communicator.barrier()?;
                let status = PinnedMemory::allocate(&context, 4096).unwrap();
                let half = bytes / 2;
                let mut launch = TwoShot {
                    begin: half * u64::from(rank),
                    end: half * u64::from(rank + 1),
                    step: (half / 16).div_ceil(blocks.into()) * 16,
                    bytes,
                    counters: Counters {
                        epoch: table.addr(),
                        packets: 0,
                        packets_half: 0,
                        blocks: blocks.into(),
                    },
                    context: GpuContext {
                        limit_ns: 10_000_000_000,
                        abort: status.device_address(),
                        status: status.device_address() + 64,
                    },
                    semaphores,
                    op: ReduceOp::Sum,
                    divisor: 0,
                    sources: 2,
                    targets: 2,
                    peers: 1,
                    rank,
                    first_wait: 0,
                    second_wait: 1,
                    target: [0; MAX_FUSED],
                    source: [0; MAX_FUSED],
                };
                for rank in 0..2 {
                    launch.source[rank as usize] = at(&buffer, rank);
                    launch.target[rank as usize] = at(&output, rank);
                }
                let two_shot = rivals.kernel("rival_two_shot").unwrap();
                let rival = in_graph(
                    &stream,
                    |stream| {
                        let shape = Shape::linear(blocks, 384);
                        // SAFETY: what the kernel takes; all memory is kept until the end.
                        unsafe { two_shot.launch(stream, &shape, &[Argument::from(&launch)]) }
                            .unwrap();
                    },
                    line_up,
                );
                communicator.barrier()?;
                Ok([call, executor, rival])
            },
        )
        .unwrap();
        let names = ["in one piece", "executor", "nvcc"];
        println!(
            "two shots, {bytes:>8} B, {blocks:>3} blocks, us: {}",
            beside(&rows, names)
        );
    }
}

/// What a machine itself takes, by kernels from nvcc: loads, flags, kernels that do nothing, copies by threads and by the
/// copy engine. Between two GPUs where there are two.
#[test]
fn what_the_machine_takes() {
    let contexts = contexts();
    let Some(first) = contexts.first() else {
        return;
    };
    if rivals(first).is_none() {
        println!("skipped: CROSSWEFT_RIVALS_PTX names no kernels");
        return;
    }
    let of = |rank: u32| contexts[rank as usize % contexts.len()].clone();
    let lines = run_in_threads_on(
        |rank| Ok(Device::Cuda(of(rank))),
        2,
        CommunicatorOptions { timeout: LIMIT },
        |communicator| {
            let rank = communicator.rank();
            let context = of(rank);
            let (stream, rivals) = (Stream::new(&context).unwrap(), rivals(&context).unwrap());
            let most = 256_u64 << 20;
            let (buffer, flags) = (communicator.allocate(most)?, communicator.allocate(4096)?);
            let own = communicator.device().allocate(most)?;
            let at = |of: &crossweft_collective::SymmetricBuffer, rank: u32| {
                of.registered().addr(rank).unwrap()
            };
            let (near, far) = (at(&flags, rank), at(&flags, 1 - rank));
            let out = own.addr();
            let read_ns = || -> Result<f64, CollectiveError> {
                stream.synchronize(Instant::now() + LIMIT).unwrap();
                let mut ns = [0; 8];
                own.read(0, &mut ns)?;
                Ok(u64::from_le_bytes(ns) as f64)
            };
            let mut lines = Vec::new();
            let steps = 4096_u32;
            for (name, offset, place) in [("own memory", 2048, near), ("the peer's", 1024, far)] {
                let place = place + offset;
                // Each rank has words of its own in both memories; a pointer to itself, as this rank sees it.
                let pointer = communicator.device().allocate(8)?;
                pointer.write(0, &place.to_le_bytes())?;
                // SAFETY: memory of this size, kept; mapped here.
                unsafe { stream.copy(place, pointer.addr(), 8) }.unwrap();
                let loads = rivals.kernel("probe_loads").unwrap();
                for _ in 0..2 {
                    let arguments = [(&place).into(), (&steps).into(), (&out).into()];
                    // SAFETY: what the kernel takes; the memory is kept.
                    unsafe { loads.launch(&stream, &Shape::linear(1, 1), &arguments) }.unwrap();
                }
                let ns = read_ns()? / f64::from(steps);
                lines.push(format!("a load from {name}, one after another: {ns:.0} ns"));
                communicator.barrier()?;
            }
            let flag = rivals.kernel("probe_flags").unwrap();
            for (releases, name) in [(0_u32, "relaxed"), (1, "release and acquire")] {
                let (mine, theirs) = (
                    near + u64::from(releases) * 128,
                    far + u64::from(releases) * 128,
                );
                let is_first = u32::from(rank == 0);
                let arguments = [
                    (&mine).into(),
                    (&theirs).into(),
                    (&steps).into(),
                    (&is_first).into(),
                    (&releases).into(),
                    (&out).into(),
                ];
                communicator.barrier()?;
                // SAFETY: as above.
                unsafe { flag.launch(&stream, &Shape::linear(1, 1), &arguments) }.unwrap();
                let ns = read_ns()? / f64::from(2 * (steps - 1));
                lines.push(format!("a flag one way, {name}: {ns:.0} ns"));
            }
            let nothing = rivals.kernel("probe_nothing").unwrap();
            let (p50, min) = in_graph(
                &stream,
                // SAFETY: it takes nothing.
                |stream| unsafe { nothing.launch(stream, &Shape::linear(1, 32), &[]) }.unwrap(),
                || {},
            );
            lines.push(format!(
                "a kernel that does nothing, in a graph: {p50:.2} (min {min:.2}) us"
            ));
            let copy = rivals.kernel("rival_copy").unwrap();
            let (mine, theirs) = (at(&buffer, rank), at(&buffer, 1 - rank));
            let private = own.addr();
            for (bytes, calls) in [(64_u64 << 10, 20), (1 << 20, 20), (16 << 20, 10), (most, 3)] {
                for both in [false, true] {
                    communicator.barrier()?;
                    if both || rank == 0 {
                        let us = back_to_back(&stream, calls, |stream| {
                            // SAFETY: memory of this size, kept.
                            unsafe { stream.copy(theirs, private, bytes) }.unwrap();
                        });
                        let way = if both { "both ways" } else { "one way" };
                        lines.push(format!(
                            "copy engine, {way}, {bytes} B: {us:.2} us, {:.1} GB/s",
                            bytes as f64 / us / 1e3
                        ));
                    }
                }
            }
            for (way, to, from) in [
                ("push", theirs, private),
                ("pull", private, theirs),
                ("local", private, mine),
            ] {
                for blocks in [1, 2, 4, 8, 16, 32, 64, 132] {
                    for both in [false, true] {
                        communicator.barrier()?;
                        if !both && rank == 1 || both && way == "local" {
                            continue;
                        }
                        let bytes = u64::from(blocks).min(16) * (4 << 20);
                        let us = back_to_back(&stream, 3, |stream| {
                            let arguments = [(&to).into(), (&from).into(), (&bytes).into()];
                            // SAFETY: what the kernel takes; the memory is kept.
                            unsafe { copy.launch(stream, &Shape::linear(blocks, 384), &arguments) }
                                .unwrap();
                        });
                        let ways = if both { "both ways" } else { "one way" };
                        lines.push(format!(
                            "threads, {way}, {ways}, {blocks:>3} blocks: {:.1} GB/s",
                            bytes as f64 / us / 1e3
                        ));
                    }
                }
            }
            communicator.barrier()?;
            Ok(lines)
        },
    )
    .unwrap();
    for line in &lines[0] {
        println!("{line}");
    }
}

/// The all-reduce of tokens with what follows it: in one launch, in two, and the sums alone; plain, and with quantisation by
/// group. All with a residual.
#[test]
fn tokens_with_normalisation() {
    let contexts = contexts();
    if contexts.is_empty() {
        return;
    }
    let of = |rank: u32| contexts[rank as usize % contexts.len()].clone();
    let sizes = [1, 4, 8, 16, 32, 64].into_iter();
    for (count, hidden) in sizes.flat_map(|n| [(n, 4096), (n, 8192)]) {
        let rows: Vec<[(f64, f64); 5]> = run_in_threads_on(
            |rank| Ok(Device::Cuda(of(rank))),
            2,
            CommunicatorOptions { timeout: LIMIT },
            |communicator| {
                let stream = Stream::new(&of(communicator.rank())).unwrap();
                let options = RmsNormOptions::new(DataType::Bf16, hidden, count);
                let fused = communicator.all_reduce_rms_norm(options)?;
                let (together, behind) = fused.on_cuda(count)?;
                let tokens = Tokens {
                    dtype: DataType::Bf16,
                    hidden: hidden as u32,
                    epsilon: options.epsilon,
                };
                let (endpoint, deadline) = (communicator.endpoint(), Instant::now() + LIMIT);
                let apart = TokenNorm::prepare(endpoint, tokens, None, deadline)?;
                let bytes = (count * hidden * 2) as u64;
                let plain = AllReduceOptions::new(DataType::Bf16, ReduceOp::Sum, bytes);
                let all_reduce = communicator.all_reduce(plain)?;
                let (sums, piece) = all_reduce.select(bytes)?;
                let (plan, piece) = (&**sums, piece as u64);
                let apart_behind = Some(Behind { plan, piece });
                let memory = communicator.device().allocate(6 * bytes)?;
                let at = |k: u64| memory.addr() + k * bytes;
                // Zeros take other ways through divisions than most numbers.
                let mut numbers = vec![0; bytes as usize];
                for (k, seed) in [(0, 1), (1, 2), (2, 3)] {
                    let (dtype, op) = (DataType::Bf16, ReduceOp::Sum);
                    fill(Pattern::Random, dtype, op, seed, 0, 1, &mut numbers);
                    memory.write(k * bytes, &numbers)?;
                }
                let plain = NormBuffers {
                    input: at(0),
                    residual: Some(at(1)),
                    weight: at(2),
                    output: at(3),
                    quantised: None,
                };
                let quantised = NormBuffers {
                    quantised: Some((at(4), NormScales::PerGroup(at(5)))),
                    ..plain
                };
                let line_up = || communicator.barrier().unwrap();
                let time = |norm: &TokenNorm, behind, buffers: &NormBuffers<u64>| {
                    let launch = |stream: &Stream| {
                        // SAFETY: the memory is kept until the end, and so is what is prepared.
                        let launched = unsafe {
                            norm.launch_on_cuda(stream, behind, buffers, count as u32, LIMIT)
                        };
                        launched.unwrap();
                    };
                    in_graph(&stream, launch, line_up)
                };
                let alone = in_graph(
                    &stream,
                    |stream| {
                        let buffers = RawBuffers {
                            input: at(0),
                            output: at(3),
                            input_offset: 0,
                            output_offset: 0,
                            bytes,
                        };
                        // SAFETY: as above.
                        unsafe { sums.launch_on_cuda(stream, &buffers, LIMIT) }.unwrap();
                    },
                    line_up,
                );
                let row = [
                    time(together, behind, &plain),
                    time(&apart, apart_behind, &plain),
                    time(together, behind, &quantised),
                    time(&apart, apart_behind, &quantised),
                    alone,
                ];
                fused.check()?;
                communicator.barrier()?;
                Ok(row)
            },
        )
        .unwrap();
        let most = |of: usize| {
            let p50 = rows.iter().map(|r| r[of].0).fold(0.0, f64::max);
            let min = rows.iter().map(|r| r[of].1).fold(0.0, f64::max);
            format!("{p50:.2} (min {min:.2})")
        };
        println!(
            "{count:>2} tokens of {hidden}: one launch {} us, two {}; quantised by group {}, {}; sums alone {}",
            most(0),
            most(1),
            most(2),
            most(3),
            most(4),
        );
    }
}

#[test]
fn launches_copies_and_loading() {
    let Some(context) = context() else { return };
    let stream = Stream::new(&context).unwrap();
    let device = Device::Cuda(context.clone());
    let (a, b) = (
        device.allocate(256 << 20).unwrap(),
        device.allocate(256 << 20).unwrap(),
    );
    let rivals = rivals(&context);
    let mut kernels = vec![
        (bench::COPY, kernel(&context, bench::COPY)),
        (bench::ADD_BF16, kernel(&context, bench::ADD_BF16)),
    ];
    for entry in [
        "rival_copy",
        "rival_sliced_copy",
        "rival_add_bf16",
        "rival_sliced_add_bf16",
    ] {
        if let Some(module) = &rivals {
            kernels.push((entry, module.kernel(entry).unwrap()));
        }
    }
    for (entry, run) in kernels {
        for bytes in [1_u64 << 20, 16 << 20, 256 << 20] {
            let (to, from) = (a.addr(), b.addr());
            let elements = bytes / 2;
            let (p50, min) = in_graph(
                &stream,
                |stream| {
                    let copy = [
                        Argument::from(&to),
                        Argument::from(&from),
                        Argument::from(&bytes),
                    ];
                    let add = [
                        Argument::from(&to),
                        Argument::from(&from),
                        Argument::from(&from),
                        Argument::from(&elements),
                    ];
                    let arguments = if entry.ends_with("copy") {
                        &copy[..]
                    } else {
                        &add[..]
                    };
                    // SAFETY: what the kernels take; the memory is kept.
                    unsafe { run.launch(stream, &Shape::linear(264, 384), arguments) }.unwrap();
                },
                || {},
            );
            println!("{entry} {bytes} B: {p50:.2} (min {min:.2}) us");
        }
    }
    // The copy engine, as a proxy uses it.
    for bytes in [64_u64 << 10, 1 << 20, 256 << 20] {
        let (p50, min) = in_graph(
            &stream,
            // SAFETY: memory of this size, kept.
            |stream| unsafe { stream.copy(a.addr(), b.addr(), bytes) }.unwrap(),
            || {},
        );
        println!("copy engine {bytes} B: {p50:.2} (min {min:.2}) us");
    }
    fifo(&context, &stream);
    // What an eager call costs the host.
    run_in_threads_on(
        |_| Ok(device.clone()),
        1,
        CommunicatorOptions { timeout: LIMIT },
        |communicator| {
            let buffer = communicator.allocate(4096)?;
            let mut options = Options::new(DataType::F32, ReduceOp::Sum, 4096);
            options.buffers = Buffers::Registered {
                input: buffer.registered(),
                output: buffer.registered(),
            };
            let plan = Algorithm::OneShot.plan(1, 1)?;
            let deadline = Instant::now() + LIMIT;
            let prepared = Prepared::prepare(communicator.endpoint(), &plan, options, deadline)?;
            let address = buffer.registered().local().addr();
            let buffers = RawBuffers {
                input: address,
                output: address,
                input_offset: 0,
                output_offset: 0,
                bytes: 4096,
            };
            let mut times = Vec::new();
            for _ in 0..50 {
                let started = Instant::now();
                for _ in 0..20 {
                    // SAFETY: the buffer is kept; launches follow one another on the stream.
                    unsafe { prepared.launch_on_cuda(&stream, &buffers, LIMIT) }.unwrap();
                }
                times.push(started.elapsed().as_secs_f64() * 1e6 / 20.0);
                stream.synchronize(Instant::now() + LIMIT).unwrap();
            }
            prepared.check()?;
            let (p50, min) = median(times);
            println!("an eager call costs the host {p50:.2} (min {min:.2}) us");
            let (p50, min) = in_graph(
                &stream,
                |stream| {
                    // SAFETY: as above.
                    unsafe { prepared.launch_on_cuda(stream, &buffers, LIMIT) }.unwrap();
                },
                || {},
            );
            println!("one rank, 4 KiB copy by the executor in a graph: {p50:.2} (min {min:.2}) us");
            Ok(())
        },
    )
    .unwrap();
    // Loading a plan's kernels; the driver keeps what it compiled.
    let module = crossweft_kernels::fused_module(DataType::Bf16, 90).unwrap();
    for turn in ["first", "again"] {
        let options = CompileOptions {
            max_registers: Some(crossweft_kernels::MAX_REGISTERS),
            ..CompileOptions::default()
        };
        let started = Instant::now();
        let loaded = Module::load(&context, module.name, module.ptx, &options).unwrap();
        loaded.kernel(module.entries[0]).unwrap();
        println!("loading bf16 kernels, {turn}: {:?}", started.elapsed());
    }
}
