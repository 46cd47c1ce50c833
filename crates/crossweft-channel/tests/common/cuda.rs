//! A GPU, and kernels that run on it side by side.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossweft_channel::KernelGuard;
use crossweft_device::channel;
use crossweft_device::gpu::GpuContext;
use crossweft_device::semaphore::Semaphore;
use crossweft_hal::Device;
use crossweft_hal::cuda::{
    Argument, CompileOptions, Context, DeviceMemory, Driver, Kernel, MemoryOptions, Module, Shape,
    Stream,
};

/// Of a block of every kernel here.
pub(crate) const THREADS: u32 = 128;
/// What a kernel may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// One test at a time: a kernel that waits must not keep the other side's from the device.
static TURN: Mutex<()> = Mutex::new(());

pub(crate) struct Gpu {
    pub(crate) context: Arc<Context>,
    _turn: MutexGuard<'static, ()>,
}

/// One side of a test: a kernel and the stream that it runs in.
pub(crate) struct Side {
    pub(crate) kernel: Kernel,
    pub(crate) stream: Stream,
    pub(crate) guard: KernelGuard,
}

impl Gpu {
    /// Device 0, or `None` and a line that says why.
    pub(crate) fn new() -> Option<Self> {
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

    /// Its compute capability.
    pub(crate) fn sm(&self) -> u32 {
        let (major, minor) = self.context.device().properties().unwrap().compute;
        major * 10 + minor
    }

    pub(crate) fn load(&self, name: &str, ptx: &str) -> Arc<Module> {
        let options = CompileOptions {
            max_registers: Some(crossweft_kernels::MAX_REGISTERS),
            ..CompileOptions::default()
        };
        Module::load(&self.context, name, ptx, &options).unwrap()
    }

    pub(crate) fn load_committed(&self, module: Option<&crossweft_kernels::Module>) -> Arc<Module> {
        let module = module.unwrap();
        self.load(module.name, module.ptx)
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(Arc::clone(&self.context))
    }

    pub(crate) fn side(&self, module: &Arc<Module>, kernel: &str) -> Side {
        Side {
            kernel: module.kernel(kernel).unwrap(),
            stream: Stream::new(&self.context).unwrap(),
            guard: KernelGuard::new(&self.context).unwrap(),
        }
    }

    pub(crate) fn memory(&self, bytes: u64) -> DeviceMemory {
        let options = MemoryOptions {
            zeroed: true,
            ..MemoryOptions::default()
        };
        DeviceMemory::allocate(&self.context, bytes, &options).unwrap()
    }
}

impl Side {
    pub(crate) fn limit(&self) -> GpuContext {
        self.guard.context(LIMIT)
    }

    pub(crate) fn launch(&self, blocks: u32, arguments: &[Argument<'_>]) {
        self.launch_shared(blocks, 0, arguments);
    }

    /// With so many bytes of shared memory a block.
    pub(crate) fn launch_shared(&self, blocks: u32, shared: u32, arguments: &[Argument<'_>]) {
        let shape = Shape::linear(blocks, THREADS).with_shared_bytes(shared);
        // SAFETY: each test passes what the kernel's source says, of memory that it keeps until
        // `done`.
        unsafe { self.kernel.launch(&self.stream, &shape, arguments) }.unwrap();
    }

    /// Waits until it has ended, as it should.
    #[track_caller]
    pub(crate) fn done(&self) {
        self.guard.wait(&self.stream, LIMIT, || false).unwrap();
        assert_eq!(self.guard.interrupted(), None, "{}", self.kernel.name());
    }
}

pub(crate) fn words(memory: &DeviceMemory, offset: u64, count: usize) -> Vec<u64> {
    let mut bytes = vec![0; count * 8];
    memory.read(offset, &mut bytes).unwrap();
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    bytes.chunks_exact(8).map(word).collect()
}

pub(crate) fn write_words(memory: &DeviceMemory, offset: u64, words: &[u64]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    memory.write(offset, &bytes).unwrap();
}

/// As the kernels' `pattern`.
pub(crate) fn pattern(seed: u64, words: u64) -> Vec<u64> {
    (0..words)
        .map(|i| (seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .collect()
}

/// Both ends of a semaphore pair: their counters from `counters` on, a cache line each.
pub(crate) fn semaphores(counters: u64) -> [Semaphore; 2] {
    let line = |k: u64| counters + k * 64;
    let end = |own: u64| Semaphore {
        inbound: line(own),
        outbound: line(1 - own),
        expected: line(2 + own),
        peer: 1 - own as u32,
        channel: 7,
    };
    [end(0), end(1)]
}

/// A memory channel between two halves of one memory; both ends.
pub(crate) fn channels(memory: &DeviceMemory, bytes: u64) -> [channel::MemoryChannel; 2] {
    let base = |k: u64| memory.address() + 4096 + k * bytes;
    let [first, second] = semaphores(memory.address());
    let end = |semaphore, own: u64| channel::MemoryChannel {
        semaphore,
        remote: base(1 - own),
        local: base(own),
        packets: base(own),
    };
    [end(first, 0), end(second, 1)]
}
