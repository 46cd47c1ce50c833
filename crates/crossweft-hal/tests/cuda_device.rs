//! The CUDA device on a GPU. Without one, every test says so and passes.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossweft_hal::cpu::SharedMemory;
use crossweft_hal::cuda::{
    Argument, Cache, CompileOptions, Context, CudaError, Device, DeviceMemory, Driver, Event,
    ForeignExport, ForeignMemory, Kernel, MemoryOptions, Module, Multicast, PinnedMemory,
    PointerKind, PrivateMemory, Reach, Shape, ShareHandle, Stream, probe_peers,
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Kernels for these tests, by hand, in a PTX that the oldest supported driver reads.
const PTX: &str = r"
.version 7.4
.target sm_80
.address_size 64

// c[i] = a[i] + b[i] for i < n, floats.
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{
    .reg .pred %p;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %d<8>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    ld.param.u32 %r5, [n];
    setp.ge.u32 %p, %r4, %r5;
    @%p ret;
    ld.param.u64 %d1, [a];
    ld.param.u64 %d2, [b];
    ld.param.u64 %d3, [c];
    mul.wide.u32 %d4, %r4, 4;
    add.u64 %d5, %d1, %d4;
    add.u64 %d6, %d2, %d4;
    add.u64 %d7, %d3, %d4;
    ld.f32 %f1, [%d5];
    ld.f32 %f2, [%d6];
    add.f32 %f3, %f1, %f2;
    st.f32 [%d7], %f3;
    ret;
}

// Adds 1 to a word.
.visible .entry bump(.param .u64 word)
{
    .reg .b64 %d<2>;
    ld.param.u64 %d1, [word];
    red.relaxed.gpu.add.u32 [%d1], 1;
    ret;
}

// Waits until a word is not 0, for so many nanoseconds at most.
.visible .entry spin(.param .u64 word, .param .u64 limit)
{
    .reg .pred %p<3>;
    .reg .b32 %r<2>;
    .reg .b64 %d<6>;
    ld.param.u64 %d1, [word];
    ld.param.u64 %d2, [limit];
    mov.u64 %d3, %globaltimer;
again:
    ld.relaxed.sys.u32 %r1, [%d1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 ret;
    mov.u64 %d4, %globaltimer;
    sub.u64 %d5, %d4, %d3;
    setp.lt.u64 %p2, %d5, %d2;
    @%p2 bra again;
    ret;
}

// Every block waits until all have come, 5 s at most; adds 1 to the second word when they had.
.visible .entry meet(.param .u64 words, .param .u32 blocks)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %d<5>;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 ret;
    ld.param.u64 %d1, [words];
    ld.param.u32 %r2, [blocks];
    mov.u64 %d2, %globaltimer;
    red.release.gpu.add.u32 [%d1], 1;
again:
    ld.acquire.gpu.u32 %r3, [%d1];
    setp.ge.u32 %p2, %r3, %r2;
    @%p2 bra met;
    mov.u64 %d3, %globaltimer;
    sub.u64 %d4, %d3, %d2;
    setp.lt.u64 %p3, %d4, 5000000000;
    @%p3 bra again;
    ret;
met:
    red.relaxed.gpu.add.u32 [%d1+4], 1;
    ret;
}

// Copies words of 4 bytes, with one block.
.visible .entry copy_words(.param .u64 to, .param .u64 from, .param .u64 words)
{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .b64 %d<9>;
    ld.param.u64 %d1, [to];
    ld.param.u64 %d2, [from];
    ld.param.u64 %d3, [words];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ntid.x;
    cvt.u64.u32 %d4, %r1;
    cvt.u64.u32 %d5, %r2;
again:
    setp.ge.u64 %p, %d4, %d3;
    @%p ret;
    shl.b64 %d6, %d4, 2;
    add.u64 %d7, %d2, %d6;
    add.u64 %d8, %d1, %d6;
    ld.u32 %r3, [%d7];
    st.u32 [%d8], %r3;
    add.u64 %d4, %d4, %d5;
    bra again;
}

// Writes where nothing is.
.visible .entry fault()
{
    .reg .b32 %r1;
    .reg .b64 %d1;
    mov.u32 %r1, 1;
    mov.u64 %d1, 4096;
    st.global.u32 [%d1], %r1;
    ret;
}
";

/// One test at a time: they measure, fill the device and hold it up.
static TURN: Mutex<()> = Mutex::new(());

struct Gpu {
    context: Arc<Context>,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    /// Device 0, or `None` and a line that says why.
    fn new() -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let context = Driver::open()
            .and_then(|driver| driver.device(0))
            .and_then(|device| Context::retain(&device));
        match context {
            Ok(context) => Some(Self {
                context,
                _turn: turn,
            }),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    fn module(&self) -> Arc<Module> {
        let options = CompileOptions::default();
        Module::load(&self.context, "tests", PTX, &options).unwrap()
    }

    fn kernel(&self, name: &str) -> Kernel {
        self.module().kernel(name).unwrap()
    }

    fn memory(&self, bytes: u64) -> DeviceMemory {
        let options = MemoryOptions {
            zeroed: true,
            ..MemoryOptions::default()
        };
        DeviceMemory::allocate(&self.context, bytes, &options).unwrap()
    }

    fn stream(&self) -> Stream {
        Stream::new(&self.context).unwrap()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let driver = self.context.driver();
        if !driver.multicast().is_allowed() && !std::thread::panicking() {
            let names = driver.lookups();
            assert!(
                !names.keys().any(|name| name.contains("Multicast")),
                "{names:?}"
            );
        }
    }
}

macro_rules! gpu {
    () => {
        match Gpu::new() {
            Some(gpu) => gpu,
            None => return,
        }
    };
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn bytes_of(floats: &[f32]) -> Vec<u8> {
    floats
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let word = |chunk: &[u8]| f32::from_le_bytes(chunk.try_into().unwrap());
    bytes.chunks(4).map(word).collect()
}

/// Bytes that say where they are.
fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    let mix = |index: u64| (index + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    (0..bytes).map(|index| mix(index) as u8).collect()
}

#[test]
fn devices_are_described() {
    let gpu = gpu!();
    let properties = gpu.context.device().properties().unwrap();
    println!("{properties:#?}");
    let driver = gpu.context.driver();
    println!("CUDA {} by driver {:?}", driver.version(), driver.build());
    assert!(properties.compute.0 >= 7);
    assert!(properties.memory_bytes > 1 << 30);
    assert!(properties.multiprocessors > 0 && properties.threads_per_block >= 1024);
    assert!(properties.pci.contains(':'));
    assert_ne!(properties.uuid.0, [0; 16]);
    assert!(
        gpu.context
            .device()
            .peer(gpu.context.device())
            .unwrap()
            .access
    );
}

#[test]
fn kernels_add_and_copies_copy() {
    let gpu = gpu!();
    let kernel = gpu.kernel("add");
    println!("{:?}", kernel.attributes());
    assert_eq!(kernel.attributes().local_bytes, 0);
    if let Some(parameters) = kernel.parameter_bytes().unwrap() {
        assert_eq!(parameters, [8, 8, 8, 4]);
    }
    let count = 100_003_u32;
    let values: Vec<f32> = (0..count).map(|index| index as f32).collect();
    let [a, b, c] = [(); 3].map(|()| gpu.memory(u64::from(count) * 4));
    a.write(0, &bytes_of(&values)).unwrap();
    b.write(0, &bytes_of(&values)).unwrap();
    let stream = gpu.stream();
    let (pa, pb, pc) = (a.address(), b.address(), c.address());
    let arguments: [Argument<'_>; 4] = [(&pa).into(), (&pb).into(), (&pc).into(), (&count).into()];
    let shape = Shape::linear(count.div_ceil(256), 256);
    // SAFETY: the kernel's parameters; the memory is ours, long enough, and outlives the kernel.
    unsafe { kernel.launch(&stream, &shape, &arguments) }.unwrap();
    // SAFETY: both are long enough and ours.
    unsafe { stream.copy(pa, pc, u64::from(count) * 4) }.unwrap();
    stream.synchronize(soon()).unwrap();
    let mut sum = vec![0; count as usize * 4];
    a.read(0, &mut sum).unwrap();
    let expected: Vec<f32> = values.iter().map(|value| value * 2.0).collect();
    assert_eq!(floats_of(&sum), expected);
}

#[test]
fn compile_errors_carry_the_log() {
    let gpu = gpu!();
    let text = ".version 7.4\n.target sm_80\n.address_size 64\n.visible .entry k() { wibble; }\n";
    let options = CompileOptions::default();
    let error = Module::load(&gpu.context, "bad", text, &options).unwrap_err();
    println!("{error}");
    assert!(
        matches!(&error, CudaError::Compile { log, .. } if log.contains("line")),
        "{error}"
    );
    assert!(matches!(
        gpu.module().kernel("absent"),
        Err(CudaError::UnknownKernel { .. })
    ));
}

#[test]
fn what_loading_takes() {
    let gpu = gpu!();
    for turn in ["first", "second"] {
        let start = Instant::now();
        let options = CompileOptions::default();
        let module = Module::load(&gpu.context, "tests", PTX, &options).unwrap();
        module.kernel("add").unwrap();
        println!("load and touch, {turn}: {:?}", start.elapsed());
    }
}

#[test]
fn memory_is_one_by_any_address() {
    let gpu = gpu!();
    let memory = gpu.memory(3 << 20);
    println!(
        "3 MiB became {} bytes, fabric {}",
        memory.bytes(),
        memory.has_fabric_handle()
    );
    let mut seen = vec![1; 1000];
    memory.read(memory.bytes() - 1000, &mut seen).unwrap();
    assert_eq!(seen, [0; 1000], "zeroed");
    let fd = ShareHandle::Fd(memory.export_fd().unwrap());
    let again = DeviceMemory::import(&gpu.context, fd, memory.bytes(), &[]).unwrap();
    assert_ne!(again.address(), memory.address());
    let sent = pattern(3 << 20, 1);
    memory.write(7, &sent).unwrap();
    let mut seen = vec![0; sent.len()];
    again.read(7, &mut seen).unwrap();
    assert_eq!(seen, sent);
    drop(memory);
    again.read(7, &mut seen).unwrap();
    assert_eq!(seen, sent, "a mapping outlives its creator's");

    // More than there is, and something else than memory.
    let error = again.export_fd().unwrap_err();
    assert!(
        error.to_string().contains("only who allocated it"),
        "{error}"
    );
    let third = gpu.memory(1);
    let fd = ShareHandle::Fd(third.export_fd().unwrap());
    assert!(DeviceMemory::import(&gpu.context, fd, third.bytes() * 2, &[]).is_err());
    let fd = ShareHandle::Fd(std::fs::File::open("/dev/null").unwrap().into());
    let error = DeviceMemory::import(&gpu.context, fd, again.bytes(), &[]).unwrap_err();
    println!("{error}");
    let error = DeviceMemory::allocate(&gpu.context, 1 << 40, &MemoryOptions::default());
    println!("{}", error.as_ref().unwrap_err());
    assert!(matches!(error, Err(CudaError::OutOfMemory { .. })));
}

#[test]
fn fabric_handles_where_permitted() {
    let gpu = gpu!();
    let options = MemoryOptions {
        fabric: true,
        ..MemoryOptions::default()
    };
    let memory = DeviceMemory::allocate(&gpu.context, 1, &options).unwrap();
    if !memory.has_fabric_handle() {
        println!("no fabric handle here");
        assert!(matches!(
            memory.export_fabric(),
            Err(CudaError::NotShareable { .. })
        ));
        return;
    }
    let handle = ShareHandle::Fabric(memory.export_fabric().unwrap());
    let again = DeviceMemory::import(&gpu.context, handle, memory.bytes(), &[]).unwrap();
    memory.write(0, b"woven").unwrap();
    let mut seen = [0; 5];
    again.read(0, &mut seen).unwrap();
    assert_eq!(&seen, b"woven");
}

#[test]
fn shared_host_memory_is_mapped_for_the_device() {
    let gpu = gpu!();
    let shared = Arc::new(SharedMemory::create(1 << 20).unwrap());
    let pinned = PinnedMemory::register(&gpu.context, Arc::clone(&shared)).unwrap();
    println!(
        "host {:#x} device {:#x}",
        pinned.host_address(),
        pinned.device_address()
    );
    let count = 1000_u32;
    let values: Vec<f32> = (0..count).map(|index| index as f32).collect();
    shared.write(0, &bytes_of(&values)).unwrap();
    // Another mapping of the same memory, as a peer has it.
    let peer =
        SharedMemory::import(shared.fd().unwrap().try_clone_to_owned().unwrap(), 1 << 20).unwrap();
    let kernel = gpu.kernel("add");
    let stream = gpu.stream();
    let from = pinned.device_address();
    let to = from + 65_536;
    let arguments: [Argument<'_>; 4] = [
        (&from).into(),
        (&from).into(),
        (&to).into(),
        (&count).into(),
    ];
    // SAFETY: the kernel's parameters; the memory stays pinned until the kernel has ended.
    unsafe { kernel.launch(&stream, &Shape::linear(4, 256), &arguments) }.unwrap();
    stream.synchronize(soon()).unwrap();
    let mut seen = vec![0; count as usize * 4];
    peer.read(65_536, &mut seen).unwrap();
    assert_eq!(
        floats_of(&seen),
        values.iter().map(|v| v * 2.0).collect::<Vec<_>>()
    );
    let error = PinnedMemory::register(&gpu.context, Arc::clone(&shared)).unwrap_err();
    assert!(error.to_string().contains("registered already"), "{error}");
    drop(pinned);
    PinnedMemory::register(&gpu.context, shared).unwrap();

    let own = PinnedMemory::allocate(&gpu.context, 4096).unwrap();
    assert_eq!(
        gpu.context.pointer_info(own.host_address()).unwrap().kind,
        PointerKind::Pinned
    );
}

#[test]
fn graphs_are_replayed() {
    let gpu = gpu!();
    let kernel = gpu.kernel("bump");
    let stream = gpu.stream();
    let memory = gpu.memory(1);
    let (counter, flag, copied) = (
        memory.address(),
        memory.address() + 64,
        memory.address() + 128,
    );
    assert!(!stream.is_capturing().unwrap());
    let capture = stream.begin_capture().unwrap();
    assert!(stream.is_capturing().unwrap());
    assert!(matches!(
        stream.synchronize(soon()),
        Err(CudaError::Capturing { .. })
    ));
    // SAFETY: all within our memory, which outlives every launch of the graph.
    unsafe {
        kernel
            .launch(&stream, &Shape::linear(1, 1), &[Argument::from(&counter)])
            .unwrap();
        stream.fill_words(flag, 0x1234_5678, 4).unwrap();
        stream.copy(copied, flag, 16).unwrap();
    }
    let graph = capture.end().unwrap();
    assert!(!stream.is_capturing().unwrap());
    assert_eq!(graph.nodes().unwrap(), 3);
    let exec = graph.instantiate().unwrap();
    drop(graph);
    exec.upload(&stream).unwrap();
    let [start, end] = [(); 2].map(|()| Event::with_timing(&gpu.context).unwrap());
    start.record(&stream).unwrap();
    for _ in 0..100 {
        // SAFETY: as above.
        unsafe { exec.launch(&stream) }.unwrap();
    }
    end.record(&stream).unwrap();
    end.synchronize(soon()).unwrap();
    println!("100 replays of 3 nodes: {:?}", end.since(&start).unwrap());
    let mut words = vec![0; 144];
    memory.read(0, &mut words).unwrap();
    assert_eq!(words[..4], 100_u32.to_le_bytes());
    assert_eq!(words[128..144], [0x78, 0x56, 0x34, 0x12].repeat(4));

    // Dropped unfinished, a capture frees its stream.
    drop(stream.begin_capture().unwrap());
    stream.synchronize(soon()).unwrap();
}

#[test]
fn events_order_streams() {
    let gpu = gpu!();
    let (first, second) = (gpu.stream(), gpu.stream());
    let (spin, bump) = (gpu.kernel("spin"), gpu.kernel("bump"));
    let word = PinnedMemory::allocate(&gpu.context, 4096).unwrap();
    let memory = gpu.memory(1);
    let event = Event::new(&gpu.context).unwrap();
    assert!(event.is_reached().unwrap(), "nothing was recorded");
    let (flag, limit, counter) = (word.device_address(), 5_000_000_000_u64, memory.address());
    // SAFETY: the kernels' parameters; the memory outlives them (synchronised below).
    unsafe {
        spin.launch(
            &first,
            &Shape::linear(1, 1),
            &[(&flag).into(), (&limit).into()],
        )
        .unwrap();
        event.record(&first).unwrap();
        second.wait(&event).unwrap();
        bump.launch(&second, &Shape::linear(1, 1), &[(&counter).into()])
            .unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!event.is_reached().unwrap() && !second.is_idle().unwrap());
    release(&word);
    second.synchronize(soon()).unwrap();
    assert!(event.is_reached().unwrap());
    let mut count = [0; 4];
    memory.read(0, &mut count).unwrap();
    assert_eq!(u32::from_le_bytes(count), 1);
}

/// Ends a spinning kernel.
fn release(word: &PinnedMemory) {
    word.words()[0].store(1, Ordering::Relaxed);
}

#[test]
fn waits_end_at_their_deadline_and_harm_nothing() {
    let gpu = gpu!();
    let (stream, other) = (gpu.stream(), gpu.stream());
    let spin = gpu.kernel("spin");
    let word = PinnedMemory::allocate(&gpu.context, 4096).unwrap();
    let (flag, limit) = (word.device_address(), 5_000_000_000_u64);
    let memory = gpu.memory(1);
    let launch = || {
        let arguments = [Argument::from(&flag), Argument::from(&limit)];
        // SAFETY: the kernel's parameters; the word outlives it (synchronised below).
        unsafe { spin.launch(&stream, &Shape::linear(1, 1), &arguments) }.unwrap();
    };
    launch();
    let start = Instant::now();
    let deadline = start + Duration::from_millis(50);
    let error = stream.synchronize(deadline).unwrap_err();
    println!("{error} (after {:?})", start.elapsed());
    assert!(matches!(error, CudaError::Deadline { .. }));
    assert!(start.elapsed() >= Duration::from_millis(50));
    // The rest of the device goes on meanwhile, blocking copies included.
    other.synchronize(soon()).unwrap();
    memory.write(0, b"meanwhile").unwrap();
    assert!(!stream.is_idle().unwrap());
    release(&word);
    stream.synchronize(soon()).unwrap();
    launch();
    stream.synchronize(soon()).unwrap();
}

#[test]
fn cooperative_grids_are_resident_or_refused() {
    let gpu = gpu!();
    let kernel = gpu.kernel("meet");
    let stream = gpu.stream();
    let memory = gpu.memory(1);
    let blocks = kernel.max_resident_blocks(256, 0).unwrap();
    println!("{blocks} blocks of 256 threads are resident at once");
    let launch = |blocks: u32| {
        let words = memory.address();
        let shape = Shape::linear(blocks, 256);
        let arguments = [Argument::from(&words), Argument::from(&blocks)];
        // SAFETY: the kernel's parameters; the memory outlives it.
        unsafe { kernel.launch_cooperative(&stream, &shape, &arguments) }
    };
    launch(blocks).unwrap();
    stream.synchronize(soon()).unwrap();
    let mut words = [0; 8];
    memory.read(0, &mut words).unwrap();
    assert_eq!(words[..4], blocks.to_le_bytes());
    assert_eq!(words[4..], blocks.to_le_bytes(), "each met all others");
    let error = launch(blocks + 1).unwrap_err();
    assert!(error.to_string().contains("use fewer blocks"), "{error}");
    stream.synchronize(soon()).unwrap();
    kernel.allow_shared_bytes(100 << 10).unwrap();
    assert!(kernel.max_active_blocks(256, 100 << 10).unwrap() < blocks);
    assert!(kernel.allow_shared_bytes(1 << 30).is_err());
}

#[test]
fn foreign_chunks_are_exported_together() {
    let gpu = gpu!();
    let (low, high) = (gpu.memory(1), gpu.memory(3 << 20));
    let piece = |memory: &DeviceMemory| {
        let fd = memory.export_fd().unwrap();
        (ShareHandle::Fd(fd), memory.bytes())
    };
    let bytes = low.bytes() + high.bytes();
    // Two chunks side by side, as an expandable segment has them.
    let pair = ForeignExport {
        pieces: vec![piece(&low), piece(&high)],
        offset: 0,
        bytes,
    };
    let segment = ForeignMemory::import(&gpu.context, pair, &[]).unwrap();
    let info = gpu
        .context
        .pointer_info(segment.address() + low.bytes() + 5)
        .unwrap();
    println!("{info:?}");
    assert!(info.is_mapped && !info.in_pool);
    assert_eq!(
        (info.base, info.bytes),
        (segment.address() + low.bytes(), high.bytes())
    );

    // A buffer across the seam.
    let start = low.bytes() - 1000;
    let sent = pattern(5000, 3);
    // SAFETY: the segment is ours.
    unsafe { gpu.context.write(segment.address() + start, &sent) }.unwrap();
    let mut seen = vec![0; 1000];
    low.read(start, &mut seen).unwrap();
    assert_eq!(seen, sent[..1000]);
    let mut seen = vec![0; 4000];
    high.read(0, &mut seen).unwrap();
    assert_eq!(seen, sent[1000..]);
    // It was imported, and only who allocated memory can export it.
    let error = ForeignExport::new(&gpu.context, segment.address() + start, 5000).unwrap_err();
    assert!(error.to_string().contains("imported"), "{error}");
    // A buffer within a chunk of one's own.
    let export = ForeignExport::new(&gpu.context, low.address() + 10, 20).unwrap();
    assert_eq!(
        (export.pieces.len(), export.offset, export.bytes),
        (1, 10, 20)
    );
    let buffer = ForeignMemory::import(&gpu.context, export, &[]).unwrap();
    // SAFETY: the buffer is ours.
    unsafe { gpu.context.write(buffer.address(), &sent[..20]) }.unwrap();
    let mut seen = vec![0; 20];
    low.read(10, &mut seen).unwrap();
    assert_eq!(seen, sent[..20]);
    let beyond = ForeignExport::new(&gpu.context, high.address(), bytes * 4);
    println!("{}", beyond.as_ref().unwrap_err());

    let error = ForeignExport::new(&gpu.context, 4096, 8).unwrap_err();
    assert!(matches!(error, CudaError::NotShareable { .. }), "{error}");
}

// What the other process does, by the first word it is sent.
const MAP: u64 = 1;
const OPEN: u64 = 2;
const FAULT: u64 = 3;

/// This program again, with one test that plays the other process, and a socket to it.
fn other_process(words: [u64; 3], fd: Option<BorrowedFd<'_>>, tail: &[u8]) -> (UnixStream, Child) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "plays_the_other_process", "--nocapture"])
        .env(PLAYS, "1")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()
        .unwrap();
    let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let message = [&words, tail].concat();
    let fds: Vec<_> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let parts = [IoSlice::new(&message)];
    rustix::net::sendmsg(&ours, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
    (ours, Child(child))
}

const PLAYS: &str = "CROSSWEFT_TEST_PLAYS_OTHER";

/// Ends with its test.
struct Child(std::process::Child);

impl Child {
    fn ends_well(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn plays_the_other_process() {
    if std::env::var_os(PLAYS).is_none() {
        return;
    }
    let gpu = Gpu::new().unwrap();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut socket = UnixStream::from(socket);
    let mut message = [0; 88];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut message)];
    rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let word = |index: usize| {
        let word = &message[index * 8..][..8];
        u64::from_le_bytes(word.try_into().unwrap())
    };
    let (bytes, offset) = (word(1), word(2));
    match word(0) {
        MAP => {
            let handle = ShareHandle::Fd(fd.unwrap());
            let memory = DeviceMemory::import(&gpu.context, handle, bytes, &[]).unwrap();
            let mut seen = vec![0; 5000];
            memory.read(offset, &mut seen).unwrap();
            assert_eq!(seen, pattern(5000, 7), "what the first process wrote");
            memory.write(offset, &pattern(5000, 8)).unwrap();
            socket.write_all(&[1]).unwrap();
        }
        OPEN => {
            let handle = ShareHandle::LegacyIpc(message[24..].try_into().unwrap());
            let export = ForeignExport {
                pieces: vec![(handle, bytes)],
                offset,
                bytes: 5000,
            };
            let memory = ForeignMemory::import(&gpu.context, export, &[]).unwrap();
            let mut seen = vec![0; 5000];
            // SAFETY: 5000 bytes are what was imported; the first process waits.
            unsafe { gpu.context.read(memory.address(), &mut seen) }.unwrap();
            assert_eq!(seen, pattern(5000, 7), "what the first process wrote");
            // SAFETY: as above.
            unsafe { gpu.context.write(memory.address(), &pattern(5000, 8)) }.unwrap();
            drop(memory);
            socket.write_all(&[1]).unwrap();
        }
        FAULT => {
            let (kernel, stream) = (gpu.kernel("fault"), gpu.stream());
            // SAFETY: it is meant to fail.
            unsafe { kernel.launch(&stream, &Shape::linear(1, 1), &[]) }.unwrap();
            let error = stream.synchronize(soon()).unwrap_err();
            println!("{error}");
            assert!(error.is_context_lost(), "{error}");
            let error = PrivateMemory::allocate(&gpu.context, 1).unwrap_err();
            assert!(error.is_context_lost(), "it stays lost: {error}");
            socket.write_all(&[1]).unwrap();
        }
        other => panic!("nothing is called {other}"),
    }
}

#[test]
fn another_process_maps_memory() {
    let gpu = gpu!();
    let memory = gpu.memory(1 << 20);
    memory.write(4097, &pattern(5000, 7)).unwrap();
    let fd = memory.export_fd().unwrap();
    let (mut socket, child) =
        other_process([MAP, memory.bytes(), 4097], Some(fd.as_fd()), &[0; 64]);
    socket.read_exact(&mut [0]).unwrap();
    let mut seen = vec![0; 5000];
    memory.read(4097, &mut seen).unwrap();
    assert_eq!(seen, pattern(5000, 8), "what the other process wrote");
    child.ends_well();
}

#[test]
fn another_process_opens_an_allocation_of_cuda_malloc() {
    let gpu = gpu!();
    let memory = PrivateMemory::allocate(&gpu.context, 3 << 20).unwrap();
    let buffer = memory.address() + 12_345;
    let info = gpu.context.pointer_info(buffer).unwrap();
    println!("{info:?}");
    assert_eq!((info.kind, info.device), (PointerKind::Device, Some(0)));
    assert_eq!((info.base, info.bytes), (memory.address(), memory.bytes()));
    // SAFETY: within the allocation, which is ours.
    unsafe { gpu.context.write(buffer, &pattern(5000, 7)) }.unwrap();
    let export = ForeignExport::new(&gpu.context, buffer, 5000).unwrap();
    assert_eq!((export.offset, export.bytes), (12_345, 5000));
    let [(ShareHandle::LegacyIpc(handle), bytes)] = &export.pieces[..] else {
        panic!("{export:?}")
    };
    let (mut socket, child) = other_process([OPEN, *bytes, export.offset], None, handle);
    socket.read_exact(&mut [0]).unwrap();
    let mut seen = vec![0; 5000];
    // SAFETY: as above.
    unsafe { gpu.context.read(buffer, &mut seen) }.unwrap();
    assert_eq!(seen, pattern(5000, 8), "what the other process wrote");
    child.ends_well();
}

#[test]
fn a_fault_is_a_lost_context() {
    // The kernel driver logs such faults, and machines that are watched raise an alarm.
    if std::env::var_os("CROSSWEFT_TEST_FAULTS").is_none() {
        println!("skipped: CROSSWEFT_TEST_FAULTS is not set");
        return;
    }
    let gpu = gpu!();
    let (mut socket, child) = other_process([FAULT, 0, 0], None, &[0; 64]);
    socket.read_exact(&mut [0]).unwrap();
    child.ends_well();
    // Here, everything goes on.
    gpu.memory(1).write(0, b"on").unwrap();
}

#[test]
fn peers_reach_each_other_or_are_said_not_to() {
    let gpu = gpu!();
    let devices: Vec<Device> = gpu.context.driver().devices().unwrap();
    let contexts: Vec<_> = devices
        .iter()
        .map(|device| Context::retain(device).unwrap())
        .collect();
    let copy = |context: &Arc<Context>| {
        let options = CompileOptions::default();
        Module::load(context, "probe", PTX, &options)?.kernel("copy_words")
    };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let probe = || {
        let start = Instant::now();
        let limit = Duration::from_secs(5);
        let matrix = probe_peers(&contexts, Some(&copy), limit, &cache).unwrap();
        println!(
            "{} devices in {:?}: {matrix:?}",
            devices.len(),
            start.elapsed()
        );
        matrix
    };
    let matrix = probe();
    for (row, own) in matrix.pairs.iter().zip(&devices) {
        for (reach, peer) in row.iter().zip(&devices) {
            let denied = *reach == Reach::Denied;
            assert_eq!(denied, !own.peer(peer).unwrap().access, "{reach:?}");
        }
    }
    assert_eq!(matrix.pairs[0][0], Reach::Works);
    if matrix
        .pairs
        .iter()
        .flatten()
        .all(|reach| !matches!(reach, Reach::Broken { .. }))
    {
        assert!(probe().was_cached);
    }
}

#[test]
fn what_a_launch_costs_the_host() {
    let gpu = gpu!();
    let kernel = gpu.kernel("bump");
    let stream = gpu.stream();
    let memory = gpu.memory(1);
    let word = memory.address();
    let launch = || {
        // SAFETY: the kernel's parameter; the memory outlives it.
        unsafe { kernel.launch(&stream, &Shape::linear(1, 1), &[(&word).into()]) }.unwrap();
    };
    let measure = || {
        let mut times: Vec<_> = (0..200)
            .map(|_| {
                let start = Instant::now();
                launch();
                start.elapsed()
            })
            .collect();
        stream.synchronize(soon()).unwrap();
        times.sort();
        times[times.len() / 2]
    };
    measure();
    let pushed = measure();
    let current = gpu.context.with_current(measure).unwrap();
    println!("median launch: {pushed:?}, with the context current already {current:?}");
}

#[test]
fn detection_agrees() {
    let gpu = gpu!();
    let detection = crossweft_hal::cuda::detect();
    println!("{detection:#?}");
    let driver = detection.driver.as_ref().unwrap();
    assert_eq!(driver.version(), gpu.context.driver().version());
    assert_eq!(
        detection.devices.len() as u32,
        driver.device_count().unwrap()
    );
    let multicast = detection
        .features
        .iter()
        .find(|f| f.name == "NVLink multicast")
        .unwrap();
    if detection.multicast != Multicast::Allowed {
        assert!(!multicast.used);
        assert!(
            !driver
                .lookups()
                .keys()
                .any(|name| name.contains("Multicast"))
        );
    }
}

#[test]
fn a_kernel_of_another_device_reads_what_all_may() {
    let gpu = gpu!();
    let devices = gpu.context.driver().devices().unwrap();
    let own = gpu.context.device();
    let Some(other) = devices
        .iter()
        .find(|peer| peer.ordinal() != own.ordinal() && peer.peer(own).unwrap().access)
    else {
        println!("skipped: no other device can reach the first");
        return;
    };
    let [near, far] = [(); 2].map(|()| gpu.memory(64 * 4));
    let values: Vec<f32> = (0..64).map(|index| index as f32).collect();
    near.write(0, &bytes_of(&values)).unwrap();
    for memory in [&near, &far] {
        memory.allow_all().unwrap();
    }
    let context = Context::retain(other).unwrap();
    let module = Module::load(&context, "tests", PTX, &CompileOptions::default()).unwrap();
    let kernel = module.kernel("add").unwrap();
    let stream = Stream::new(&context).unwrap();
    let (from, to, count) = (near.address(), far.address(), 64_u32);
    let arguments: [Argument<'_>; 4] = [
        (&from).into(),
        (&from).into(),
        (&to).into(),
        (&count).into(),
    ];
    // SAFETY: the kernel's parameters; the memory is ours, long enough, and outlives the kernel.
    unsafe { kernel.launch(&stream, &Shape::linear(1, 64), &arguments) }.unwrap();
    stream.synchronize(soon()).unwrap();
    let mut sum = vec![0; 64 * 4];
    far.read(0, &mut sum).unwrap();
    let expected: Vec<f32> = values.iter().map(|value| value * 2.0).collect();
    assert_eq!(floats_of(&sum), expected);
}
