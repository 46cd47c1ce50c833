//! The C interface on a GPU that ranks share, each with a stream of its own. Every test says so and does nothing where
//! there is no GPU. Run with `CUDA_DEVICE_MAX_CONNECTIONS=32`, one test at a time (`--test-threads 1`).
#![allow(clippy::unwrap_used, reason = "tests")]

use std::ffi::{CStr, c_char};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

// What is declared below is defined there.
use crossweft_nccl as _;

use crossweft_collective::{Collective, DataType, ReduceOp};
use crossweft_hal::cuda::{Context, Driver, PrivateMemory, Stream};
use crossweft_verify::{
    Mismatches, Pattern, PreMultiplied, check_all_reduce, check_copies, check_reduce_scatter, fill,
};

const LIMIT: Duration = Duration::from_secs(30);
const SEED: u64 = 0x5eed;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; 128]);

/// Declares functions of the interface: handles, addresses and streams are numbers.
macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        mod interface {
            use super::Id;
            unsafe extern "C" {
                $(pub(super) fn $name($($argument: $type),*) -> i32;)*
            }
        }
        $(
            #[allow(non_snake_case, clippy::too_many_arguments, reason = "they are NCCL's")]
            fn $name($($argument: $type),*) -> i32 {
                // SAFETY: tests pass what the interface asks for, and keep it until streams have come to their ends.
                unsafe { interface::$name($($argument),*) }
            }
        )*
    };
}

functions! {
    fn ncclGetUniqueId(id: &mut Id);
    fn ncclCommInitRank(comm: &mut u64, ranks: i32, id: Id, rank: i32);
    fn ncclCommInitAll(comms: *mut u64, count: i32, devices: *const i32);
    fn ncclCommDestroy(comm: u64);
    fn ncclCommFinalize(comm: u64);
    fn ncclCommAbort(comm: u64);
    fn ncclCommSplit(comm: u64, color: i32, key: i32, made: &mut u64, config: u64);
    fn ncclCommGetAsyncError(comm: u64, error: &mut i32);
    fn ncclCommCuDevice(comm: u64, device: &mut i32);
    fn ncclCommMemStats(comm: u64, stat: i32, value: &mut u64);
    fn ncclCommSuspend(comm: u64, flags: i32);
    fn ncclCommResume(comm: u64);
    fn ncclGroupStart();
    fn ncclGroupEnd();
    fn ncclAllReduce(send: u64, recv: u64, count: usize, dtype: i32, op: i32, comm: u64, stream: u64);
    fn ncclReduceScatter(send: u64, recv: u64, count: usize, dtype: i32, op: i32, comm: u64, stream: u64);
    fn ncclReduce(send: u64, recv: u64, count: usize, dtype: i32, op: i32, root: i32, comm: u64, stream: u64);
    fn ncclAllGather(send: u64, recv: u64, count: usize, dtype: i32, comm: u64, stream: u64);
    fn ncclAlltoAll(send: u64, recv: u64, count: usize, dtype: i32, comm: u64, stream: u64);
    fn ncclBroadcast(send: u64, recv: u64, count: usize, dtype: i32, root: i32, comm: u64, stream: u64);
    fn ncclGather(send: u64, recv: u64, count: usize, dtype: i32, root: i32, comm: u64, stream: u64);
    fn ncclScatter(send: u64, recv: u64, count: usize, dtype: i32, root: i32, comm: u64, stream: u64);
    fn ncclSend(send: u64, count: usize, dtype: i32, peer: i32, comm: u64, stream: u64);
    fn ncclRecv(recv: u64, count: usize, dtype: i32, peer: i32, comm: u64, stream: u64);
    fn ncclPutSignal(local: u64, count: usize, dtype: i32, peer: i32, window: u64, offset: usize, signal: i32, context: i32, flags: u32, comm: u64, stream: u64);
    fn ncclSignal(peer: i32, signal: i32, context: i32, flags: u32, comm: u64, stream: u64);
    fn ncclWaitSignal(count: i32, signals: *const [i32; 4], comm: u64, stream: u64);
    fn ncclRedOpCreatePreMulSum(op: &mut i32, scalar: u64, dtype: i32, residence: i32, comm: u64);
    fn ncclRedOpDestroy(op: i32, comm: u64);
    fn ncclMemAlloc(place: &mut u64, bytes: usize);
    fn ncclMemFree(address: u64);
    fn ncclCommRegister(comm: u64, address: u64, bytes: usize, handle: &mut u64);
    fn ncclCommDeregister(comm: u64, handle: u64);
    fn ncclCommWindowRegister(comm: u64, address: u64, bytes: usize, window: &mut u64, flags: i32);
    fn ncclCommWindowDeregister(comm: u64, window: u64);
}

mod text {
    use super::c_char;
    unsafe extern "C" {
        pub(super) fn ncclGetLastError(comm: u64) -> *const c_char;
    }
}

const REMOTE_ERROR: i32 = 6;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;

fn last_error(comm: u64) -> String {
    // SAFETY: a string that is valid until this thread asks again.
    let text = unsafe { CStr::from_ptr(text::ncclGetLastError(comm)) };
    text.to_string_lossy().into_owned()
}

#[track_caller]
fn ok(code: i32) {
    assert_eq!(code, 0, "{}", last_error(0));
}

/// The first device's context, or a line that says why not.
fn context() -> Option<Arc<Context>> {
    let found = Driver::open().and_then(|driver| driver.device(0));
    match found.and_then(|device| Context::retain(&device)) {
        Ok(context) => Some(context),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

macro_rules! context {
    () => {
        match context() {
            Some(context) => context,
            None => return,
        }
    };
}

/// Device memory.
struct Buffer {
    memory: PrivateMemory,
    context: Arc<Context>,
}

impl Buffer {
    fn new(context: &Arc<Context>, bytes: usize) -> Self {
        Self {
            memory: PrivateMemory::allocate(context, bytes as u64).unwrap(),
            context: Arc::clone(context),
        }
    }

    fn of(context: &Arc<Context>, data: &[u8]) -> Self {
        let new = Self::new(context, data.len());
        new.write(0, data);
        new
    }

    fn at(&self) -> u64 {
        self.memory.address()
    }

    fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.memory.bytes() as usize);
        // SAFETY: inside, and no launch uses it now.
        unsafe { self.context.write(self.at() + offset as u64, data) }.unwrap();
    }

    fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.memory.bytes() as usize);
        let mut data = vec![0; bytes];
        // SAFETY: as above.
        unsafe { self.context.read(self.at() + offset as u64, &mut data) }.unwrap();
        data
    }
}

/// One rank of a job: a thread.
struct Rank {
    rank: u32,
    ranks: u32,
    comm: u64,
    context: Arc<Context>,
    stream: Stream,
    meeting: Arc<Barrier>,
}

impl Rank {
    /// Waits for the other ranks' threads. What allocates waits for kernels of the process, and so must not stand between
    /// launches that wait for each other.
    fn meet(&self) {
        self.meeting.wait();
    }

    fn settle(&self) {
        self.stream.synchronize(Instant::now() + LIMIT).unwrap();
        let mut error = -1;
        ok(ncclCommGetAsyncError(self.comm, &mut error));
        assert_eq!(error, 0, "{}", last_error(self.comm));
    }

    fn buffer(&self, data: &[u8]) -> Buffer {
        Buffer::of(&self.context, data)
    }

    /// Copies on the stream.
    fn copy(&self, to: u64, from: u64, bytes: usize) {
        // SAFETY: device memory of the test, which outlives the stream's work.
        unsafe { self.stream.copy(to, from, bytes as u64) }.unwrap();
    }

    fn all_reduce(&self, at: u64, count: usize) -> i32 {
        let stream = self.stream.raw();
        ncclAllReduce(at, at, count, 7, 0, self.comm, stream)
    }

    /// Room for `count` f32 of this value.
    fn floats(&self, count: usize, value: f32) -> Buffer {
        self.buffer(&value.to_ne_bytes().repeat(count))
    }
}

/// The one value that all `count` f32 have.
#[track_caller]
fn value(buffer: &Buffer, count: usize) -> f32 {
    let data = buffer.read(0, 4 * count);
    let values: Vec<f32> = data
        .chunks_exact(4)
        .map(|word| f32::from_ne_bytes(word.try_into().unwrap()))
        .collect();
    let first = values[0];
    let other = values.iter().position(|&value| value != first);
    assert_eq!(other, None, "{first}, then {:?}", other.map(|i| values[i]));
    first
}

/// Runs `rank_main` on a thread for each rank, with a communicator, which it ends.
fn job<T: Send>(
    context: &Arc<Context>,
    ranks: u32,
    rank_main: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    let mut id = Id([0; 128]);
    ok(ncclGetUniqueId(&mut id));
    let meeting = Arc::new(Barrier::new(ranks as usize));
    std::thread::scope(|scope| {
        let (rank_main, meeting) = (&rank_main, &meeting);
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let mut comm = 0;
                    ok(ncclCommInitRank(&mut comm, ranks as i32, id, rank as i32));
                    let this = Rank {
                        rank,
                        ranks,
                        comm,
                        context: Arc::clone(context),
                        stream: Stream::new(context).unwrap(),
                        meeting: Arc::clone(meeting),
                    };
                    this.meet();
                    rank_main(&this)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// `ncclDataType_t`.
const TYPES: [DataType; 12] = [
    DataType::I8,
    DataType::U8,
    DataType::I32,
    DataType::U32,
    DataType::I64,
    DataType::U64,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::Bf16,
    DataType::F8E4M3,
    DataType::F8E5M2,
];
/// `ncclRedOp_t`.
const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];

/// How a call reduces.
#[derive(Clone, Copy, Debug)]
enum Reduction {
    Plain(ReduceOp),
    /// Every rank's input times its number and 2; the factor is in device memory, or was read before.
    PreMultiplied {
        on_device: bool,
    },
}

fn number(dtype: DataType) -> i32 {
    TYPES.iter().position(|&other| other == dtype).unwrap() as i32
}

/// Calls a collective.
fn call(
    rank: &Rank,
    collective: Collective,
    (send, recv): (u64, u64),
    count: usize,
    (dtype, op): (i32, i32),
) -> i32 {
    let (comm, stream) = (rank.comm, rank.stream.raw());
    match collective {
        Collective::AllReduce => ncclAllReduce(send, recv, count, dtype, op, comm, stream),
        Collective::ReduceScatter => ncclReduceScatter(send, recv, count, dtype, op, comm, stream),
        Collective::Reduce { root } => {
            ncclReduce(send, recv, count, dtype, op, root as i32, comm, stream)
        }
        Collective::AllGather => ncclAllGather(send, recv, count, dtype, comm, stream),
        Collective::AllToAll => ncclAlltoAll(send, recv, count, dtype, comm, stream),
        Collective::Broadcast { root } => {
            ncclBroadcast(send, recv, count, dtype, root as i32, comm, stream)
        }
        Collective::Gather { root } => {
            ncclGather(send, recv, count, dtype, root as i32, comm, stream)
        }
        Collective::Scatter { root } => {
            ncclScatter(send, recv, count, dtype, root as i32, comm, stream)
        }
        other => panic!("{other:?}"),
    }
}

/// What is wrong with a rank's output; `None` where it has none.
fn verdict(
    rank: &Rank,
    collective: Collective,
    (dtype, reduction): (DataType, Reduction),
    got: &[u8],
) -> Option<Mismatches> {
    let (own, ranks, pattern) = (rank.rank, rank.ranks, Pattern::Exact);
    let op = match reduction {
        Reduction::Plain(op) => op,
        Reduction::PreMultiplied { .. } => ReduceOp::Sum,
    };
    let copies =
        |blocks: &[(u32, u32)]| Some(check_copies(pattern, dtype, op, SEED, ranks, blocks, got));
    let each = |block: u32| (0..ranks).map(|q| (q, block)).collect::<Vec<_>>();
    let multiplied = |block: u32| {
        let scalars = scalars(ranks);
        let product = PreMultiplied {
            pattern,
            dtype,
            seed: SEED,
            scalars: &scalars,
        };
        Some(product.check(block, got))
    };
    match (collective, reduction) {
        (Collective::AllGather, _) => copies(&each(0)),
        (Collective::Gather { root }, _) if root == own => copies(&each(0)),
        (Collective::AllToAll, _) => copies(&each(own)),
        (Collective::Broadcast { root }, _) => copies(&[(root, 0)]),
        (Collective::Scatter { root }, _) => copies(&[(root, own)]),
        (Collective::ReduceScatter, Reduction::PreMultiplied { .. }) => multiplied(own),
        (Collective::ReduceScatter, _) => Some(check_reduce_scatter(
            pattern, dtype, op, SEED, own, ranks, got,
        )),
        (Collective::Reduce { root }, _) if root != own => None,
        (Collective::AllReduce | Collective::Reduce { .. }, Reduction::PreMultiplied { .. }) => {
            multiplied(0)
        }
        (Collective::AllReduce | Collective::Reduce { .. }, _) => {
            Some(check_all_reduce(pattern, dtype, op, SEED, ranks, got))
        }
        _ => None,
    }
}

fn scalars(ranks: u32) -> Vec<f64> {
    (0..ranks).map(|rank| f64::from(rank % 2 + 1)).collect()
}

/// An operation's number, and what it reads later.
fn operation(rank: &Rank, dtype: DataType, reduction: Reduction) -> (i32, Option<Buffer>) {
    match reduction {
        Reduction::Plain(op) => (
            OPS.iter().position(|&other| other == op).unwrap() as i32,
            None,
        ),
        Reduction::PreMultiplied { on_device } => {
            let value = scalars(rank.ranks)[rank.rank as usize];
            let bits = element_bits(dtype, value).to_le_bytes();
            let mut op = -1;
            if on_device {
                let there = rank.buffer(&bits);
                ok(ncclRedOpCreatePreMulSum(
                    &mut op,
                    there.at(),
                    number(dtype),
                    0,
                    rank.comm,
                ));
                return (op, Some(there));
            }
            let here = bits.as_ptr().expose_provenance() as u64;
            ok(ncclRedOpCreatePreMulSum(
                &mut op,
                here,
                number(dtype),
                1,
                rank.comm,
            ));
            (op, None)
        }
    }
}

/// The bits of 1 or 2.
fn element_bits(dtype: DataType, value: f64) -> u64 {
    let two = value > 1.5;
    match dtype {
        DataType::F16 => {
            if two {
                0x4000
            } else {
                0x3c00
            }
        }
        DataType::Bf16 => {
            if two {
                0x4000
            } else {
                0x3f80
            }
        }
        DataType::F8E4M3 => {
            if two {
                0x40
            } else {
                0x38
            }
        }
        DataType::F8E5M2 => {
            if two {
                0x40
            } else {
                0x3c
            }
        }
        DataType::F32 => (value as f32).to_bits().into(),
        DataType::F64 => value.to_bits(),
        _ => value as u64,
    }
}

/// One collective of one type and reduction, for several sizes without a pause, out of place and in place. Copies are not on the
/// streams: ranks of one process share the device's queues for copies, where one would stand behind another's launch.
fn exercise(rank: &Rank, collective: Collective, dtype: DataType, reduction: Reduction) {
    const COUNTS: [usize; 4] = [1, 37, 4099, 70_001];
    let size = dtype.size();
    let (own, ranks) = (rank.rank, rank.ranks);
    let (i, o) = collective.blocks(ranks).unwrap();
    let (i, o) = (i as usize, o as usize);
    let larger = i.max(o);
    let (op, scalar) = operation(rank, dtype, reduction);
    let plain = match reduction {
        Reduction::Plain(op) => op,
        Reduction::PreMultiplied { .. } => ReduceOp::Sum,
    };
    let draw = |data: &mut [u8]| match reduction {
        Reduction::Plain(_) => fill(Pattern::Exact, dtype, plain, SEED, own, ranks, data),
        Reduction::PreMultiplied { .. } => {
            let scalars = scalars(ranks);
            let product = PreMultiplied {
                pattern: Pattern::Exact,
                dtype,
                seed: SEED,
                scalars: &scalars,
            };
            product.fill(own, data);
        }
    };
    // Only what is this rank's block of the larger buffer.
    let own_at =
        |blocks: usize, bytes: usize| size + own as usize * bytes * usize::from(blocks < larger);
    // For each size an input, an output, and both in one, aligned to an element and no more.
    let kept: Vec<_> = COUNTS
        .iter()
        .map(|&count| {
            let bytes = count * size;
            let mut data = vec![0; i * bytes];
            draw(&mut data);
            let of = |blocks: usize| Buffer::new(&rank.context, blocks * bytes + size);
            let (input, output, both) = (of(i), of(o), of(larger));
            input.write(size, &data);
            both.write(own_at(i, bytes), &data);
            (input, output, both, bytes)
        })
        .collect();
    rank.meet();
    for ((input, output, both, bytes), &count) in kept.iter().zip(&COUNTS) {
        let (one, what) = (size as u64, (number(dtype), op));
        let apart = (input.at() + one, output.at() + one);
        ok(call(rank, collective, apart, count, what));
        let at = |blocks| both.at() + own_at(blocks, *bytes) as u64;
        ok(call(rank, collective, (at(i), at(o)), count, what));
    }
    rank.settle();
    for (_, output, both, bytes) in &kept {
        let results = [
            ("apart", output.read(size, o * bytes)),
            ("in place", both.read(own_at(o, *bytes), o * bytes)),
        ];
        for (way, got) in results {
            if let Some(found) = verdict(rank, collective, (dtype, reduction), &got) {
                assert_eq!(
                    found.wrong, 0,
                    "{collective:?} of {dtype} {reduction:?} {way}, rank {own} of {ranks}, {bytes} B: {found:?}"
                );
            }
        }
    }
    if let Reduction::PreMultiplied { .. } = reduction {
        ok(ncclRedOpDestroy(op, rank.comm));
    }
    rank.meet();
    drop((kept, scalar));
    rank.meet();
}

fn reducing(ranks: u32) -> [Collective; 3] {
    let root = ranks - 1;
    [
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::Reduce { root },
    ]
}

#[test]
fn collectives_that_move() {
    let context = context!();
    for ranks in [1, 2, 4] {
        job(&context, ranks, |rank| {
            let root = ranks / 2;
            for collective in [
                Collective::AllGather,
                Collective::AllToAll,
                Collective::Broadcast { root },
                Collective::Gather { root },
                Collective::Scatter { root },
            ] {
                for dtype in [DataType::U8, DataType::Bf16, DataType::F64] {
                    exercise(rank, collective, dtype, Reduction::Plain(ReduceOp::Sum));
                }
            }
            ok(ncclCommDestroy(rank.comm));
        });
    }
}

/// All reductions of a type.
fn reductions(dtype: DataType, ranks: u32) {
    let context = context!();
    job(&context, ranks, |rank| {
        for collective in reducing(ranks) {
            for op in OPS {
                exercise(rank, collective, dtype, Reduction::Plain(op));
            }
            // The first call of a type prepares, for which the host must not look where the factor lies.
            for on_device in [true, false] {
                exercise(
                    rank,
                    collective,
                    dtype,
                    Reduction::PreMultiplied { on_device },
                );
            }
        }
        ok(ncclCommDestroy(rank.comm));
    });
}

/// A test for each type, so that their kernels can be compiled at the same time.
macro_rules! reductions {
    ($($name:ident $dtype:ident $ranks:literal)*) => {$(
        #[test]
        fn $name() {
            reductions(DataType::$dtype, $ranks);
        }
    )*};
}

reductions! {
    reductions_of_i8 I8 2
    reductions_of_u8 U8 2
    reductions_of_i32 I32 2
    reductions_of_u32 U32 2
    reductions_of_i64 I64 2
    reductions_of_u64 U64 2
    reductions_of_f16 F16 2
    reductions_of_f32 F32 2
    reductions_of_f64 F64 2
    reductions_of_bf16 Bf16 2
    reductions_of_f8e4m3 F8E4M3 2
    reductions_of_f8e5m2 F8E5M2 2
    reductions_of_three_ranks F32 3
}

#[test]
fn calls_return_at_once_and_run_in_the_stream_s_order() {
    let context = context!();
    const COUNT: usize = 1 << 16;
    let (sender, receiver) = channel::<()>();
    let receiver = std::sync::Mutex::new(receiver);
    job(&context, 2, |rank| {
        let data = rank.floats(COUNT, 1.0);
        // Prepares.
        ok(rank.all_reduce(data.at(), COUNT));
        rank.settle();
        if rank.rank == 0 {
            for _ in 0..3 {
                ok(rank.all_reduce(data.at(), COUNT));
            }
            // The other has called nothing yet.
            assert!(!rank.stream.is_idle().unwrap());
            sender.send(()).unwrap();
        } else {
            receiver.lock().unwrap().recv_timeout(LIMIT).unwrap();
            for _ in 0..3 {
                ok(rank.all_reduce(data.at(), COUNT));
            }
        }
        rank.settle();
        assert_eq!(value(&data, COUNT), 16.0);
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn calls_on_two_streams_follow_one_another() {
    let context = context!();
    const COUNT: usize = 1 << 20;
    job(&context, 2, |rank| {
        let (data, other) = (rank.floats(COUNT, 1.0), Stream::new(&rank.context).unwrap());
        ok(rank.all_reduce(data.at(), COUNT));
        for round in 0..20 {
            let stream = [&rank.stream, &other][round % 2].raw();
            ok(ncclAllReduce(
                data.at(),
                data.at(),
                COUNT,
                7,
                0,
                rank.comm,
                stream,
            ));
        }
        rank.settle();
        other.synchronize(Instant::now() + LIMIT).unwrap();
        assert_eq!(value(&data, COUNT), (1 << 21) as f32);
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn larger_calls_are_prepared_while_smaller_ones_run() {
    let context = context!();
    job(&context, 2, |rank| {
        let most = 1 << 20;
        let data = rank.floats(most, 1.0);
        for shift in 8..=20 {
            ok(rank.all_reduce(data.at(), 1 << shift));
        }
        rank.settle();
        let words = data.read(0, 4 * most);
        let at = |index: usize| f32::from_ne_bytes(words[4 * index..][..4].try_into().unwrap());
        assert_eq!(
            (at(0), at(255), at(256), at(most - 1)),
            (8192.0, 8192.0, 4096.0, 2.0)
        );
        let mut bytes = 0;
        ok(ncclCommMemStats(rank.comm, 3, &mut bytes));
        assert!(bytes > 0);
        ok(ncclCommSuspend(rank.comm, 1));
        ok(ncclCommMemStats(rank.comm, 0, &mut bytes));
        assert_eq!(bytes, 0);
        ok(ncclCommResume(rank.comm));
        ok(rank.all_reduce(data.at(), 1 << 8));
        // Finalising waits for it.
        ok(ncclCommFinalize(rank.comm));
        assert!(rank.stream.is_idle().unwrap());
        assert_eq!(value(&data, 1 << 8), 16384.0);
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn one_thread_drives_several_ranks() {
    let context = context!();
    const COUNT: usize = 5000;
    let mut comms = [0; 3];
    ok(ncclCommInitAll(comms.as_mut_ptr(), 3, [0, 0, 0].as_ptr()));
    let ranks: Vec<Rank> = (0..)
        .zip(comms)
        .map(|(rank, comm)| Rank {
            rank,
            ranks: 3,
            comm,
            context: Arc::clone(&context),
            stream: Stream::new(&context).unwrap(),
            meeting: Arc::new(Barrier::new(1)),
        })
        .collect();
    for rank in &ranks {
        let mut device = -1;
        ok(ncclCommCuDevice(rank.comm, &mut device));
        assert_eq!(device, 0);
    }
    let data: Vec<Buffer> = ranks.iter().map(|rank| rank.floats(COUNT, 1.0)).collect();
    for _ in 0..5 {
        ok(ncclGroupStart());
        for (rank, data) in ranks.iter().zip(&data) {
            ok(rank.all_reduce(data.at(), COUNT));
        }
        ok(ncclGroupEnd());
    }
    for (rank, data) in ranks.iter().zip(&data) {
        rank.settle();
        assert_eq!(value(data, COUNT), 243.0);
    }
    // On one stream they would wait for each other.
    ok(ncclGroupStart());
    for (rank, data) in ranks.iter().zip(&data) {
        let stream = ranks[0].stream.raw();
        ok(ncclAllReduce(
            data.at(),
            data.at(),
            COUNT,
            7,
            0,
            rank.comm,
            stream,
        ));
    }
    assert_eq!(ncclGroupEnd(), INVALID_USAGE);
    assert!(
        last_error(0).contains("a stream of its own"),
        "{}",
        last_error(0)
    );
    // They are as before.
    ok(ncclGroupStart());
    for (rank, data) in ranks.iter().zip(&data) {
        ok(rank.all_reduce(data.at(), COUNT));
    }
    ok(ncclGroupEnd());
    for (rank, data) in ranks.iter().zip(&data) {
        rank.settle();
        assert_eq!(value(data, COUNT), 729.0);
        ok(ncclCommDestroy(rank.comm));
    }
}

#[test]
fn graphs_record_calls_also_the_first_ones() {
    let context = context!();
    const COUNT: usize = 3000;
    job(&context, 2, |rank| {
        let (data, gathered) = (rank.floats(COUNT, 1.0), rank.floats(2 * COUNT, 0.0));
        let capture = rank.stream.begin_capture().unwrap();
        // Neither is prepared yet.
        ok(rank.all_reduce(data.at(), COUNT));
        ok(rank.all_reduce(data.at(), COUNT));
        let stream = rank.stream.raw();
        ok(ncclAllGather(
            data.at(),
            gathered.at(),
            COUNT,
            7,
            rank.comm,
            stream,
        ));
        let graph = capture.end().unwrap().instantiate().unwrap();
        assert_eq!(value(&data, COUNT), 1.0);
        for _ in 0..5 {
            // SAFETY: all of it lives until the stream has come to its end.
            unsafe { graph.launch(&rank.stream) }.unwrap();
        }
        rank.settle();
        assert_eq!(value(&data, COUNT), 1024.0);
        assert_eq!(value(&gathered, 2 * COUNT), 1024.0);
        // What the graph has stays when something larger replaces it.
        let large = rank.floats(1 << 20, 1.0);
        ok(rank.all_reduce(large.at(), 1 << 20));
        // SAFETY: as above.
        unsafe { graph.launch(&rank.stream) }.unwrap();
        rank.settle();
        assert_eq!(value(&data, COUNT), 4096.0);
        assert_eq!(value(&large, 1 << 20), 2.0);
        drop(graph);
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn an_abort_ends_what_waits_on_the_device() {
    let context = context!();
    const COUNT: usize = 1000;
    let (sender, receiver) = channel::<()>();
    let receiver = std::sync::Mutex::new(receiver);
    job(&context, 2, |rank| {
        let data = rank.floats(COUNT, 1.0);
        ok(rank.all_reduce(data.at(), COUNT));
        rank.settle();
        if rank.rank == 0 {
            ok(rank.all_reduce(data.at(), COUNT));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!rank.stream.is_idle().unwrap());
            sender.send(()).unwrap();
            let start = Instant::now();
            let mut error = 0;
            while error == 0 && start.elapsed() < LIMIT {
                ok(ncclCommGetAsyncError(rank.comm, &mut error));
            }
            assert_eq!(error, REMOTE_ERROR, "{}", last_error(rank.comm));
            assert!(
                last_error(rank.comm).contains("ncclCommAbort"),
                "{}",
                last_error(rank.comm)
            );
            rank.stream.synchronize(Instant::now() + LIMIT).unwrap();
            assert_ne!(rank.all_reduce(data.at(), COUNT), 0);
            ok(ncclCommAbort(rank.comm));
        } else {
            receiver.lock().unwrap().recv_timeout(LIMIT).unwrap();
            ok(ncclCommAbort(rank.comm));
        }
    });
}

#[test]
fn an_abort_of_one_s_own_returns_soon() {
    let context = context!();
    const COUNT: usize = 1000;
    job(&context, 2, |rank| {
        let data = rank.floats(COUNT, 1.0);
        ok(rank.all_reduce(data.at(), COUNT));
        rank.settle();
        if rank.rank == 0 {
            ok(rank.all_reduce(data.at(), COUNT));
            std::thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            ok(ncclCommAbort(rank.comm));
            // It waits for the launch, which uses what it frees.
            assert!(rank.stream.is_idle().unwrap());
            assert!(start.elapsed() < LIMIT / 3);
        } else {
            std::thread::sleep(Duration::from_millis(500));
            ok(ncclCommAbort(rank.comm));
        }
    });
}

impl Rank {
    /// The error of a launch that waits in vain, and its words, and how long it took to be known.
    fn fails(&self) -> (i32, String, Duration) {
        let start = Instant::now();
        let mut error = 0;
        while error == 0 && start.elapsed() < LIMIT {
            ok(ncclCommGetAsyncError(self.comm, &mut error));
            std::thread::sleep(Duration::from_millis(1));
        }
        (error, last_error(self.comm), start.elapsed())
    }
}

/// Rank 1 leaves, or refuses a call, instead of meeting rank 0, which `call`s.
fn waits_in_vain(leaves: bool, call: impl Fn(&Rank, u64) -> i32 + Sync) -> Option<String> {
    let context = context()?;
    let told = job(&context, 2, |rank| {
        let data = rank.floats(100, 1.0);
        ok(rank.all_reduce(data.at(), 100));
        rank.settle();
        if rank.rank == 0 {
            ok(call(rank, data.at()));
            let (error, text, after) = rank.fails();
            assert_eq!(error, REMOTE_ERROR, "{text}");
            assert!(after < LIMIT / 2, "{after:?}");
            rank.stream.synchronize(Instant::now() + LIMIT).unwrap();
            rank.meet();
            ok(ncclCommAbort(rank.comm));
            return Some(text);
        }
        if leaves {
            ok(ncclCommDestroy(rank.comm));
        } else {
            let stream = rank.stream.raw();
            let refused = ncclAllReduce(data.at(), data.at(), 100, 99, 0, rank.comm, stream);
            assert_eq!(refused, INVALID_ARGUMENT);
        }
        rank.meet();
        if !leaves {
            ok(ncclCommAbort(rank.comm));
        }
        None
    });
    told.into_iter().flatten().next()
}

fn receives(rank: &Rank, at: u64) -> i32 {
    ncclRecv(at, 100, 7, 1, rank.comm, rank.stream.raw())
}

#[test]
fn a_rank_that_has_left_is_not_waited_for() {
    for call in [|rank: &Rank, at| rank.all_reduce(at, 100), receives] {
        if let Some(text) = waits_in_vain(true, call) {
            assert!(text.contains("rank 1 has left"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_has_refused_a_call_is_not_waited_for_long() {
    for call in [|rank: &Rank, at| rank.all_reduce(at, 100), receives] {
        if let Some(text) = waits_in_vain(false, call) {
            assert!(text.contains("rank 1 has refused a call"), "{text}");
        }
    }
}

#[test]
fn what_a_rank_has_sent_before_it_left_arrives() {
    let context = context!();
    job(&context, 3, |rank| {
        let data = rank.floats(100, rank.rank as f32);
        let stream = rank.stream.raw();
        match rank.rank {
            0 => {
                rank.meet();
                // For longer than ranks that have left are waited for.
                std::thread::sleep(Duration::from_secs(2));
                ok(ncclRecv(data.at(), 100, 7, 1, rank.comm, stream));
                rank.settle();
                assert_eq!(value(&data, 100), 1.0);
                // The others are waited for as before.
                ok(ncclRecv(data.at(), 100, 7, 2, rank.comm, stream));
                rank.settle();
                assert_eq!(value(&data, 100), 2.0);
            }
            1 => {
                ok(ncclSend(data.at(), 100, 7, 0, rank.comm, stream));
                rank.settle();
                rank.meet();
            }
            _ => {
                rank.meet();
                std::thread::sleep(Duration::from_secs(4));
                ok(ncclSend(data.at(), 100, 7, 0, rank.comm, stream));
                rank.settle();
            }
        }
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn what_was_sent_by_the_only_other_rank_before_it_left_arrives() {
    const COUNT: usize = 1 << 18;
    let context = context!();
    job(&context, 2, |rank| {
        let data = rank.floats(COUNT, rank.rank as f32);
        let stream = rank.stream.raw();
        rank.meet();
        if rank.rank == 0 {
            std::thread::sleep(Duration::from_secs(2));
            ok(ncclRecv(data.at(), COUNT, 7, 1, rank.comm, stream));
            rank.settle();
            assert_eq!(value(&data, COUNT), 1.0);
        } else {
            ok(ncclSend(data.at(), COUNT, 7, 0, rank.comm, stream));
            rank.settle();
        }
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn sizes_that_differ_are_found_on_the_device() {
    let context = context!();
    // The same plan takes the first two, as is seen in a kernel; the others take two. A call follows, or none does.
    for (counts, goes_on) in [
        ([500, 510], false),
        ([100, 2000], false),
        ([100, 2000], true),
    ] {
        let errors = job(&context, 2, |rank| {
            let data = rank.floats(2000, 1.0);
            ok(rank.all_reduce(data.at(), 2000));
            rank.settle();
            ok(rank.all_reduce(data.at(), counts[rank.rank as usize]));
            if goes_on {
                ok(rank.all_reduce(data.at(), 2000));
            }
            let start = Instant::now();
            let mut error = 0;
            while error == 0 && start.elapsed() < LIMIT {
                ok(ncclCommGetAsyncError(rank.comm, &mut error));
            }
            let text = last_error(rank.comm);
            rank.meet();
            // First, for nothing else ends what still waits.
            ok(ncclCommAbort(rank.comm));
            println!("rank {}: {error}, {text}", rank.rank);
            assert!([INVALID_USAGE, REMOTE_ERROR].contains(&error), "{text}");
            assert!(text.contains("bytes"), "{text}");
            error
        });
        // Who finds it first tells the other.
        assert!(
            errors.contains(&INVALID_USAGE),
            "{counts:?}, {goes_on}: {errors:?}"
        );
    }
}

#[test]
fn windows_of_device_memory() {
    const SYMMETRIC: i32 = 1;
    const COUNT: usize = 1 << 18;
    let context = context!();
    job(&context, 2, |rank| {
        let bytes = 16 * COUNT;
        let (mut address, mut window) = (0, 0);
        ok(ncclMemAlloc(&mut address, bytes));
        ok(ncclCommWindowRegister(
            rank.comm,
            address,
            bytes,
            &mut window,
            SYMMETRIC,
        ));
        assert_ne!(window, 0);
        // Of memory that others do not reach, one is only a name.
        let elsewhere = rank.floats(COUNT, 1.0);
        let mut staged = 0;
        // `cuMemAlloc` aligns to less than windows do, but large ones to more.
        let registered =
            ncclCommWindowRegister(rank.comm, elsewhere.at(), 4 * COUNT, &mut staged, SYMMETRIC);
        ok(registered);
        let stream = rank.stream.raw();
        let (given, result) = (rank.floats(COUNT, 1.0), rank.floats(COUNT, 0.0));
        rank.meet();
        for (send, recv) in [
            (address, address),
            (address, address + 8 * COUNT as u64),
            (elsewhere.at(), elsewhere.at()),
        ] {
            rank.copy(send, given.at(), 4 * COUNT);
            rank.settle();
            rank.meet();
            for _ in 0..2 {
                ok(ncclAllReduce(send, recv, COUNT, 7, 0, rank.comm, stream));
            }
            rank.settle();
            rank.copy(result.at(), recv, 4 * COUNT);
            rank.settle();
            assert_eq!(value(&result, COUNT), if send == recv { 4.0 } else { 2.0 });
        }
        let mut handle = 0;
        ok(ncclCommRegister(
            rank.comm,
            elsewhere.at(),
            4 * COUNT,
            &mut handle,
        ));
        ok(ncclCommDeregister(rank.comm, handle));
        ok(ncclCommWindowDeregister(rank.comm, staged));
        ok(ncclCommWindowDeregister(rank.comm, window));
        ok(ncclMemFree(address));
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn messages_go_round_and_to_oneself() {
    let context = context!();
    for ranks in [1, 2, 4] {
        job(&context, ranks, |rank| {
            const MOST: usize = 300_000;
            let (own, stream) = (rank.rank as i32, rank.stream.raw());
            let (next, before) = (
                (own + 1) % ranks as i32,
                (own + ranks as i32 - 1) % ranks as i32,
            );
            let given = rank.floats(MOST, own as f32);
            let (got, mine) = (rank.floats(MOST, -1.0), rank.floats(MOST, -1.0));
            let other = Stream::new(&rank.context).unwrap();
            rank.meet();
            for count in [0, 1, 1001, MOST] {
                ok(ncclGroupStart());
                // One of them on another stream.
                ok(ncclRecv(got.at(), count, 7, before, rank.comm, stream));
                ok(ncclSend(given.at(), count, 7, next, rank.comm, other.raw()));
                ok(ncclSend(given.at(), count, 7, own, rank.comm, stream));
                ok(ncclRecv(mine.at(), count, 7, own, rank.comm, stream));
                ok(ncclGroupEnd());
            }
            rank.settle();
            other.synchronize(Instant::now() + LIMIT).unwrap();
            assert_eq!(value(&got, MOST), before as f32);
            assert_eq!(value(&mine, MOST), own as f32);
            rank.meet();
            ok(ncclCommDestroy(rank.comm));
        });
    }
}

#[test]
fn messages_are_recorded_and_mixed_with_collectives() {
    let context = context!();
    job(&context, 2, |rank| {
        const COUNT: usize = 2000;
        let (peer, stream) = (1 - rank.rank as i32, rank.stream.raw());
        let (data, got) = (
            rank.floats(COUNT, 1.0 + rank.rank as f32),
            rank.floats(COUNT, 0.0),
        );
        rank.meet();
        let capture = rank.stream.begin_capture().unwrap();
        ok(ncclGroupStart());
        ok(ncclSend(data.at(), COUNT, 7, peer, rank.comm, stream));
        ok(ncclRecv(got.at(), COUNT, 7, peer, rank.comm, stream));
        ok(ncclGroupEnd());
        ok(ncclAllReduce(
            got.at(),
            data.at(),
            COUNT,
            7,
            0,
            rank.comm,
            stream,
        ));
        let graph = capture.end().unwrap().instantiate().unwrap();
        for _ in 0..3 {
            // SAFETY: all of it lives until the stream has come to its end.
            unsafe { graph.launch(&rank.stream) }.unwrap();
        }
        rank.settle();
        // 1 and 2 make 3, then doubled.
        assert_eq!((value(&data, COUNT), value(&got, COUNT)), (12.0, 6.0));
        rank.meet();
        drop(graph);
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn messages_change_places() {
    let context = context!();
    job(&context, 2, |rank| {
        const COUNT: usize = 70_000;
        let (peer, stream) = (1 - rank.rank as i32, rank.stream.raw());
        let data = rank.floats(COUNT, rank.rank as f32);
        let capture = rank.stream.begin_capture().unwrap();
        ok(ncclGroupStart());
        ok(ncclSend(data.at(), COUNT, 7, peer, rank.comm, stream));
        ok(ncclRecv(data.at(), COUNT, 7, peer, rank.comm, stream));
        ok(ncclGroupEnd());
        let graph = capture.end().unwrap().instantiate().unwrap();
        rank.meet();
        let mut expected = rank.rank;
        for _ in 0..3 {
            // SAFETY: all of it lives until the stream has come to its end.
            unsafe { graph.launch(&rank.stream) }.unwrap();
            rank.settle();
            expected = 1 - expected;
            assert_eq!(value(&data, COUNT), expected as f32);
            rank.meet();
        }
        drop(graph);
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn puts_and_signals_on_streams() {
    let context = context!();
    job(&context, 2, |rank| {
        const COUNT: usize = 50_000;
        let (own, peer, stream) = (rank.rank as i32, 1 - rank.rank as i32, rank.stream.raw());
        let (mut address, mut window) = (0, 0);
        ok(ncclMemAlloc(&mut address, 8 * COUNT));
        ok(ncclCommWindowRegister(
            rank.comm,
            address,
            8 * COUNT,
            &mut window,
            0,
        ));
        let (given, got) = (
            rank.floats(COUNT, 7.0 + own as f32),
            rank.floats(COUNT, 0.0),
        );
        rank.meet();
        for _ in 0..3 {
            let (at, comm) = (4 * COUNT, rank.comm);
            ok(ncclPutSignal(
                given.at(),
                COUNT,
                7,
                peer,
                window,
                at,
                0,
                0,
                0,
                comm,
                stream,
            ));
            ok(ncclWaitSignal(1, &[1, peer, 0, 0], rank.comm, stream));
            rank.settle();
            rank.copy(got.at(), address + 4 * COUNT as u64, 4 * COUNT);
            rank.settle();
            // Read: the other may put again.
            ok(ncclSignal(peer, 0, 0, 0, rank.comm, stream));
            ok(ncclWaitSignal(1, &[1, peer, 0, 0], rank.comm, stream));
            rank.settle();
        }
        rank.settle();
        assert_eq!(value(&got, COUNT), 7.0 + peer as f32);
        rank.meet();
        ok(ncclCommWindowDeregister(rank.comm, window));
        ok(ncclMemFree(address));
        ok(ncclCommDestroy(rank.comm));
    });
}

#[test]
fn a_message_of_another_size_is_refused_by_both() {
    let context = context!();
    job(&context, 2, |rank| {
        let data = rank.floats(100, 1.0);
        let stream = rank.stream.raw();
        rank.meet();
        match rank.rank {
            0 => ok(ncclSend(data.at(), 100, 7, 1, rank.comm, stream)),
            _ => ok(ncclRecv(data.at(), 90, 7, 0, rank.comm, stream)),
        }
        let start = Instant::now();
        let mut error = 0;
        while error == 0 && start.elapsed() < LIMIT {
            ok(ncclCommGetAsyncError(rank.comm, &mut error));
        }
        assert_ne!(error, 0);
        println!("rank {}: {error}, {}", rank.rank, last_error(rank.comm));
        ok(ncclCommAbort(rank.comm));
    });
}

#[test]
fn buffers_are_looked_at_where_that_is_asked_for() {
    let context = context!();
    // SAFETY: tests that use a GPU run one at a time, and no thread of this one has begun.
    unsafe { std::env::set_var("NCCL_CHECK_POINTERS", "1") };
    job(&context, 2, |rank| {
        let data = rank.floats(100, 1.0);
        let host = vec![0_u8; 400];
        let address = host.as_ptr().expose_provenance() as u64;
        assert_eq!(rank.all_reduce(address, 100), INVALID_ARGUMENT);
        assert!(last_error(rank.comm).contains("no memory that device"));
        // Both have refused it.
        ok(rank.all_reduce(data.at(), 100));
        rank.settle();
        assert_eq!(value(&data, 100), 2.0);
        ok(ncclCommDestroy(rank.comm));
    });
    // SAFETY: as above; they have ended.
    unsafe { std::env::remove_var("NCCL_CHECK_POINTERS") };
}

#[test]
fn a_split_has_the_same_device() {
    let context = context!();
    job(&context, 4, |rank| {
        let (color, mut half) = ((rank.rank % 2) as i32, 0);
        ok(ncclCommSplit(rank.comm, color, 0, &mut half, 0));
        let data = rank.floats(100, 1.0 + rank.rank as f32);
        let stream = rank.stream.raw();
        ok(ncclAllReduce(data.at(), data.at(), 100, 7, 0, half, stream));
        rank.settle();
        assert_eq!(value(&data, 100), [4.0, 6.0][rank.rank as usize % 2]);
        ok(ncclCommDestroy(half));
        ok(ncclCommDestroy(rank.comm));
    });
}
