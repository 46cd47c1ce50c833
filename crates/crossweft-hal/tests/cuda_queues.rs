//! What kernels that wait for one another stand behind, on a GPU. Without one, every test says so and passes.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_hal::cpu::SharedMemory;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, DeviceMemory, Driver, Event, Kernel, MemoryOptions, Module,
    PinnedMemory, Shape, Stream,
};

/// Every block waits until so many have come in all, `limit` ns at most; adds 1 to the second word when they had.
const PTX: &str = r"
.version 7.4
.target sm_80
.address_size 64

.visible .entry meet(.param .u64 words, .param .u32 come, .param .u64 limit)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %d<6>;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 ret;
    ld.param.u64 %d1, [words];
    ld.param.u32 %r2, [come];
    ld.param.u64 %d5, [limit];
    mov.u64 %d2, %globaltimer;
    red.release.gpu.add.u32 [%d1], 1;
again:
    ld.acquire.gpu.u32 %r3, [%d1];
    setp.ge.u32 %p2, %r3, %r2;
    @%p2 bra met;
    mov.u64 %d3, %globaltimer;
    sub.u64 %d4, %d3, %d2;
    setp.lt.u64 %p3, %d4, %d5;
    @%p3 bra again;
    ret;
met:
    red.relaxed.gpu.add.u32 [%d1+4], 1;
    ret;
}
";

fn gpu() -> Option<Arc<Context>> {
    let context = Driver::open()
        .and_then(|driver| driver.device(0))
        .and_then(|device| Context::retain(&device));
    context.inspect_err(|e| println!("skipped: {e}")).ok()
}

fn meet(context: &Arc<Context>) -> Kernel {
    let module = Module::load(context, "queues", PTX, &CompileOptions::default()).unwrap();
    module.kernel("meet").unwrap()
}

fn zeroed(context: &Arc<Context>, bytes: u64) -> DeviceMemory {
    let options = MemoryOptions {
        zeroed: true,
        ..MemoryOptions::default()
    };
    DeviceMemory::allocate(context, bytes, &options).unwrap()
}

fn launch(kernel: &Kernel, stream: &Stream, words: u64, come: u32, limit: u64, shape: &Shape) {
    let arguments: [Argument<'_>; 3] = [(&words).into(), (&come).into(), (&limit).into()];
    // SAFETY: the kernel's parameters; the memory outlives it.
    unsafe { kernel.launch(stream, shape, &arguments) }.unwrap();
}

fn words(memory: &DeviceMemory) -> [u32; 2] {
    let mut bytes = [0; 8];
    memory.read(0, &mut bytes).unwrap();
    [0, 4].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
}

/// Kernels in streams of their own run at once, as many as the device was asked to have queues.
#[test]
fn streams_run_at_once() {
    let Some(context) = gpu() else { return };
    let kernel = meet(&context);
    let queues = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    let queues = queues.and_then(|n| n.parse().ok()).unwrap_or(8);
    for count in [8, 16, 24, 32].into_iter().filter(|count| *count <= queues) {
        let streams: Vec<_> = (0..count).map(|_| Stream::new(&context).unwrap()).collect();
        let memory = zeroed(&context, 8);
        for stream in &streams {
            launch(
                &kernel,
                stream,
                memory.address(),
                count,
                WHILE,
                &Shape::linear(1, 32),
            );
        }
        for stream in &streams {
            stream
                .synchronize(Instant::now() + Duration::from_secs(20))
                .unwrap();
        }
        assert_eq!(words(&memory), [count, count], "{count} streams: came, met");
    }
}

/// A stream that is given back while it works is nobody's until that has ended, and then used again.
#[test]
fn a_stream_given_back_at_work_is_used_again() {
    let Some(context) = gpu() else { return };
    let kernel = meet(&context);
    let memory = zeroed(&context, 8);
    let wait = |stream: &Stream| {
        let shape = Shape::linear(1, 32);
        launch(&kernel, stream, memory.address(), 2, WHILE, &shape);
    };
    let first = Stream::new(&context).unwrap();
    let raw = first.raw();
    wait(&first);
    drop(first);
    let second = Stream::new(&context).unwrap();
    assert_ne!(second.raw(), raw);
    wait(&second);
    let deadline = Instant::now() + Duration::from_secs(20);
    second.synchronize(deadline).unwrap();
    assert_eq!(words(&memory)[0], 2, "one of them came alone");
    drop(second);
    loop {
        let both = [(); 2].map(|()| Stream::new(&context).unwrap());
        if both.iter().any(|stream| stream.raw() == raw) {
            break;
        }
        assert!(Instant::now() < deadline, "it was not used again");
    }
}

/// How long kernels wait for others, in ns, that must come.
const WHILE: u64 = 5_000_000_000;
/// And for those that do not, as is known.
const MOMENT: u64 = 100_000_000;

/// What waits for running kernels, by driver 580: it may be done only when all ranks prepare.
const WAITS: [&str; 2] = ["module", "register"];

/// Ranks that meet in kernels while one of them does something else, which must not wait for the others' kernels.
#[test]
fn what_holds_up_others() {
    type Act<'a> = Box<dyn Fn(&Stream) + Sync + 'a>;
    let Some(context) = gpu() else { return };
    let kernel = meet(&context);
    let ranks = 8_u32;
    let other = zeroed(&context, 4096);
    let pin = |bytes| PinnedMemory::allocate(&context, bytes).unwrap();
    // What all ranks together have at once, and give back.
    drop((0..ranks).map(|_| pin(1 << 16)).collect::<Vec<_>>());
    let acts: Vec<(&str, Act<'_>)> = vec![
        ("nothing", Box::new(|_| ())),
        ("pinned memory again", Box::new(|_| drop(pin(1 << 16)))),
        ("module", Box::new(|_| drop(meet(&context)))),
        (
            "register",
            Box::new(|_| {
                let shared = Arc::new(SharedMemory::create(1 << 16).unwrap());
                drop(PinnedMemory::register(&context, shared).unwrap());
            }),
        ),
        (
            "context",
            Box::new(|_| drop(Context::retain(context.device()).unwrap())),
        ),
        ("read", Box::new(|_| other.read(0, &mut [0; 4]).unwrap())),
        ("write", Box::new(|_| other.write(0, &[1; 4]).unwrap())),
        ("fill", Box::new(|_| other.fill(0, 3, 4096).unwrap())),
        (
            "allocate 2 MiB",
            Box::new(|_| drop(zeroed(&context, 2 << 20))),
        ),
        (
            "allocate 64 MiB",
            Box::new(|_| drop(zeroed(&context, 64 << 20))),
        ),
        (
            "event",
            Box::new(|s| Event::new(&context).unwrap().record(s).unwrap()),
        ),
        ("stream", Box::new(|_| drop(Stream::new(&context).unwrap()))),
        (
            "copy stream",
            Box::new(|_| drop(Stream::for_copies(&context).unwrap())),
        ),
    ];
    let rounds = 9_u32;
    // Two on each multiprocessor.
    let many = context.device().multiprocessors().unwrap() * 2 / ranks;
    for blocks in [1, many] {
        for (name, act) in &acts {
            let waits = WAITS.contains(name);
            let limit = if waits { MOMENT } else { WHILE };
            let memory = zeroed(&context, 8);
            let start = Instant::now();
            let longest = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..ranks)
                    .map(|rank| {
                        let (kernel, memory, context) = (&kernel, &memory, &context);
                        scope.spawn(move || {
                            let stream = Stream::new(context).unwrap();
                            let mut longest = Duration::ZERO;
                            for round in 0..rounds {
                                if round % ranks == rank || round % 7 == rank % 7 {
                                    let begin = Instant::now();
                                    act(&stream);
                                    longest = longest.max(begin.elapsed());
                                }
                                let shape = Shape::linear(blocks, 512);
                                launch(
                                    kernel,
                                    &stream,
                                    memory.address(),
                                    (round + 1) * ranks * blocks,
                                    limit,
                                    &shape,
                                );
                                stream
                                    .synchronize(Instant::now() + Duration::from_secs(20))
                                    .unwrap();
                            }
                            longest
                        })
                    })
                    .collect();
                threads
                    .into_iter()
                    .map(|t| t.join().unwrap())
                    .max()
                    .unwrap()
            });
            let [came, met] = words(&memory);
            println!(
                "{blocks} blocks, {name}: {} of {came} waited in vain, act {longest:?} at most, {:?}",
                came - met,
                start.elapsed()
            );
            assert!(waits || came == met, "{name} waited for kernels");
        }
    }
}
