//! A GPU's leaves on the host: blocks of several threads copy, send and reduce what the host's own
//! leaves do, at every alignment, and must leave the same bytes.

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Guarded, HostBlock, Random, difference, reference};
use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};
use crossweft_device::executor::{Counters, STOPPED_EPOCH};
use crossweft_device::gpu::bulk::{self, ALIGNMENT, BUFFERS, Stage};
use crossweft_device::gpu::fused::one_shot_norm::{self, Near};
use crossweft_device::gpu::fused::{Tables, hop, one_shot, one_shot_lines, two_shot};
use crossweft_device::gpu::lines::{self, PAIR, PAIR_PAYLOAD};
use crossweft_device::gpu::norm::{At, NormElement, SLOT_BYTES, reduced, threads_of, token};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::gpu::wide::Piece;
use crossweft_device::gpu::{
    GpuContext, GpuReducer, Hop, MAX_FUSED, MAX_MOVES, Norm, OneShot, OneShotNorm, Quantisation,
    TABLE_BYTES, TwoShot, copy, packets,
};
use crossweft_device::norm::{GROUP, HostNorm, factor, group_scale, token_scale};
use crossweft_device::packet::{PAYLOAD, WORD, copy_from_packets, copy_to_packets};
use crossweft_device::reduce::{HostReducer, Isa, Location, Reducer, Sources};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{Block, DataType, Memory, Raw, ReduceOp, Site, Stopped, WaitKind, Waiting};

const SITE: Site = Site {
    kind: WaitKind::Packet,
    peer: 1,
    channel: 0,
    op: 0,
};
const FLAG: u32 = 11;

/// Threads that must agree at barriers, each on a thread of the host.
struct Team {
    barrier: Barrier,
    worst: AtomicU32,
    votes: AtomicU32,
    warps: Vec<Exchange>,
    threads: u32,
    patience: u32,
}

/// Where the threads of a warp hand each other words.
struct Exchange {
    barrier: Barrier,
    words: [AtomicU32; 32],
}

impl Exchange {
    fn new(threads: u32) -> Self {
        Self {
            barrier: Barrier::new(threads as usize),
            words: Default::default(),
        }
    }
}

impl Team {
    fn new(threads: u32, patience: u32) -> Self {
        Self {
            barrier: Barrier::new(threads as usize),
            worst: AtomicU32::new(0),
            votes: AtomicU32::new(0),
            warps: (0..threads.div_ceil(32))
                .map(|warp| Exchange::new((threads - 32 * warp).min(32)))
                .collect(),
            threads,
            patience,
        }
    }

    /// Runs `work` on every thread; returns what each brought back.
    fn run<T: Send>(&self, work: impl Fn(&Member<'_>) -> T + Sync) -> Vec<T> {
        let work = &work;
        std::thread::scope(|scope| {
            let members: Vec<_> = (0..self.threads)
                .map(|thread| scope.spawn(move || work(&Member { team: self, thread })))
                .collect();
            members
                .into_iter()
                .map(|member| member.join().expect("a thread of the block panicked"))
                .collect()
        })
    }
}

/// One thread of such a block.
struct Member<'a> {
    team: &'a Team,
    thread: u32,
}

impl Block for Member<'_> {
    type Memory = Raw;

    fn memory(&self) -> &Raw {
        &Raw
    }

    fn thread(&self) -> u32 {
        self.thread
    }

    fn threads(&self) -> u32 {
        self.team.threads
    }

    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        if let Err(stopped) = mine {
            self.team.worst.fetch_max(stopped as u32, Ordering::SeqCst);
        }
        self.team.barrier.wait();
        let worst = self.team.worst.load(Ordering::SeqCst);
        // Nobody brings anything to the next one before all have read.
        self.team.barrier.wait();
        match worst {
            0 => Ok(()),
            _ => Err(Stopped::Deadline),
        }
    }

    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        if waiting.spins >= self.team.patience {
            return Err(Stopped::Deadline);
        }
        std::thread::yield_now();
        Ok(())
    }

    fn refuse(&self, _waiting: &Waiting) -> Stopped {
        Stopped::Mismatch
    }

    /// The team is one warp.
    fn warp_any(&self, x: bool) -> bool {
        assert!(self.team.threads <= 32);
        self.team.votes.fetch_add(x.into(), Ordering::SeqCst);
        self.team.barrier.wait();
        let any = self.team.votes.load(Ordering::SeqCst) != 0;
        // Nobody votes again before all have read, nor reads again before the next votes are in.
        if self.team.barrier.wait().is_leader() {
            self.team.votes.store(0, Ordering::SeqCst);
        }
        self.team.barrier.wait();
        any
    }

    fn warp_exchange(&self, x: u32, mask: u32) -> u32 {
        let warp = &self.team.warps[self.thread as usize / 32];
        let lane = self.thread % 32;
        warp.words[lane as usize].store(x, Ordering::SeqCst);
        warp.barrier.wait();
        let other = warp.words[(lane ^ mask) as usize].load(Ordering::SeqCst);
        // Nobody writes again before all have read.
        warp.barrier.wait();
        other
    }

    fn wake(&self, _peer: u32) {}
}

/// Each thread in turn, for leaves that wait for nobody.
fn in_turn(threads: u32, mut work: impl FnMut(&HostBlock<'_>)) {
    for thread in 0..threads {
        work(&HostBlock {
            thread,
            threads,
            ..HostBlock::NO_WAIT
        });
    }
}

/// Sizes around every width and unrolling, for blocks of few threads.
const SIZES: [usize; 17] = [
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100, 255, 1029,
];

#[test]
fn copies_at_every_alignment() {
    let mut random = Random(1);
    for bytes in SIZES {
        let data = random.bytes(bytes);
        for (src, dst) in (0..16).flat_map(|src| (0..16).map(move |dst| (src, dst))) {
            for threads in [1, 3, 8] {
                let mut from = Guarded::holding(&data, src);
                let mut to = Guarded::new(bytes, dst);
                let (a, b) = (to.addr(), from.addr());
                // SAFETY: the ranges have this size.
                in_turn(threads, |block| unsafe {
                    copy::copy(block, a, b, bytes as u64)
                });
                assert_eq!(to.bytes(), data, "{bytes} bytes from {src} to {dst}");
                assert!(to.intact(), "{bytes} bytes from {src} to {dst}");
            }
        }
    }
}

/// Memory as a block shares it, of so many bytes.
#[repr(C, align(128))]
#[derive(Clone)]
struct SharedLine([u8; ALIGNMENT as usize]);

#[test]
fn bulk_copies_at_every_alignment_through_buffers_of_any_size() {
    let mut random = Random(11);
    // None, none that is whole, the least, and larger ones.
    let stages = [0, 8, 9, 17, 200].map(|lines| lines * ALIGNMENT);
    for bytes in SIZES.into_iter().chain([4096, 40_001, 100_000]) {
        let data = random.bytes(bytes);
        let many = bytes > 2000;
        for (src, dst) in (0..16).flat_map(|src| (0..16).map(move |dst| (src, dst))) {
            if many && src % 5 != 0 {
                continue;
            }
            for size in stages {
                let mut shared = vec![SharedLine([0xee; 128]); 1 + (size / ALIGNMENT) as usize];
                let mut from = Guarded::holding(&data, src);
                let mut to = Guarded::new(bytes, dst);
                let (a, b) = (to.addr(), from.addr());
                // SAFETY: the ranges, and the stage, have this size.
                unsafe {
                    let stage = Stage::new(shared.as_mut_ptr().expose_provenance() as u64, size);
                    stage.prepare();
                    // Twice: a second copy goes on with what the first one has left.
                    in_turn(3, |block| bulk::copy(block, stage, a, b, bytes as u64 / 3));
                    in_turn(3, |block| bulk::copy(block, stage, a, b, bytes as u64));
                }
                let what = format!("{bytes} bytes from {src} to {dst} through {size}");
                assert_eq!(to.bytes(), data, "{what}");
                assert!(to.intact(), "{what}");
                assert_eq!(shared[shared.len() - 1].0, [0xee; 128], "{what}");
                // Where the first buffer is.
                let used = shared.len() > 2 && shared[1].0 != [0xee; 128];
                let whole = bytes.saturating_sub((16 - dst) % 16) >= 16;
                let fits = size >= (BUFFERS + 1) * ALIGNMENT;
                assert_eq!(used, fits && whole && src == dst, "{what}");
            }
        }
    }
}

#[test]
fn lines_carry_any_bytes_to_and_from_any_alignment() {
    let mut random = Random(12);
    let pair = PAIR_PAYLOAD as usize;
    for bytes in [
        0,
        1,
        15,
        16,
        17,
        112,
        113,
        127,
        239,
        pair,
        pair + 1,
        1029,
        5000,
    ] {
        let data = random.bytes(bytes);
        for (src, dst) in [(0, 0), (1, 0), (0, 3), (4, 8), (7, 7)] {
            for threads in [8, 16, 32] {
                let mut from = Guarded::holding(&data, src);
                let mut to = Guarded::new(bytes, dst);
                let mut sent = vec![SharedLine([0; 128]); 2 * bytes.div_ceil(pair) + 1];
                let (a, b) = (from.addr(), to.addr());
                let at = sent.as_mut_ptr().expose_provenance() as u64;
                let team = Team::new(threads, 1 << 20);
                let outcomes = team.run(|member| {
                    // SAFETY: the ranges have this size; all threads are one warp.
                    unsafe {
                        lines::copy_to_lines(member, at, a, bytes as u64, FLAG);
                        lines::copy_from_lines(member, SITE, b, at, bytes as u64, FLAG)
                    }
                });
                let what = format!("{bytes} bytes from {src} to {dst}, {threads} threads");
                assert!(outcomes.iter().all(Result::is_ok), "{what}");
                assert_eq!(to.bytes(), data, "{what}");
                assert!(to.intact(), "{what}");
                assert_eq!(sent[sent.len() - 1].0, [0; 128], "{what}");
                // What has another flag has not arrived.
                if bytes > 0 {
                    let team = Team::new(threads, 3);
                    let late = team.run(|member| {
                        // SAFETY: as above.
                        unsafe {
                            lines::copy_from_lines(member, SITE, b, at, bytes as u64, FLAG + 1)
                        }
                    });
                    assert!(late.iter().all(Result::is_err), "{what}");
                }
            }
        }
    }
}

#[test]
fn packets_hold_the_same_bytes_as_the_hosts() {
    let mut random = Random(2);
    for bytes in SIZES {
        let data = random.bytes(bytes);
        let room = bytes.div_ceil(PAYLOAD as usize) * WORD as usize;
        for (plain, shift) in (0..8).flat_map(|plain| [(plain, 0), (plain, 8)]) {
            let mut from = Guarded::holding(&data, plain);
            let mut expected = Guarded::new(room, 0);
            let mut sent = Guarded::new(room, shift);
            let mut forwarded = Guarded::new(room, 8 - shift);
            let mut back = Guarded::new(bytes, plain);
            let size = bytes as u64;
            // SAFETY: the ranges have these sizes; all packets have been sent before they are
            // waited for.
            unsafe {
                let (a, b) = (from.addr(), expected.addr());
                copy_to_packets(&HostBlock::NO_WAIT, b, a, size, FLAG);
                let b = sent.addr();
                in_turn(5, |block| packets::copy_to_packets(block, b, a, size, FLAG));
                let c = forwarded.addr();
                in_turn(3, |block| {
                    let done = packets::forward_packets(block, SITE, c, b, size, FLAG);
                    assert_eq!(done, Ok(()));
                });
                let d = back.addr();
                in_turn(4, |block| {
                    let done = packets::copy_from_packets(block, SITE, d, c, size, FLAG);
                    assert_eq!(done, Ok(()));
                });
            }
            assert_eq!(sent.bytes(), expected.bytes(), "{bytes} bytes");
            assert_eq!(
                forwarded.bytes(),
                expected.bytes(),
                "{bytes} bytes forwarded"
            );
            assert_eq!(back.bytes(), data, "{bytes} bytes unpacked");
            assert!(sent.intact() && forwarded.intact() && back.intact());
        }
    }
}

#[test]
fn a_packet_that_does_not_come_ends_the_wait() {
    // Every word in turn is the one that is missing, the last being half full.
    for missing in 0..5 {
        let mut memory = Guarded::new(5 * 8, 0);
        let mut plain = Guarded::new(18, 0);
        let (words, to) = (memory.addr(), plain.addr());
        // SAFETY: the ranges have these sizes.
        unsafe {
            let zeros = [0_u8; 18];
            copy_to_packets(&HostBlock::NO_WAIT, words, zeros.as_ptr() as u64, 18, FLAG);
            (words as *mut u64).add(missing).write(0);
            let mut ends = Vec::new();
            in_turn(3, |block| {
                ends.push(packets::copy_from_packets(block, SITE, to, words, 18, FLAG));
            });
            assert_eq!(ends[missing / 2], Err(Stopped::Deadline), "word {missing}");
            assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 2, "{ends:?}");
        }
    }
}

/// A reduction's operands: whether each is packets, and its offset from alignment.
#[derive(Clone, Debug)]
struct Case {
    elements: usize,
    sources: Vec<(bool, usize)>,
    destinations: Vec<(bool, usize)>,
    in_place: bool,
    divisor: u32,
}

fn room(packets: bool, bytes: usize) -> usize {
    if packets {
        bytes.div_ceil(PAYLOAD as usize) * WORD as usize
    } else {
        bytes
    }
}

fn location(packets: bool, addr: u64) -> Location {
    Location {
        addr,
        packets: packets.then_some(SITE),
    }
}

/// Everything that a reduction leaves: every destination's bytes, and whether what lies around is
/// whole.
fn reduce(
    case: &Case,
    dtype: DataType,
    data: &[Vec<u8>],
    work: impl FnOnce(&[Location], &[Location]),
) -> Vec<Vec<u8>> {
    let bytes = case.elements * dtype.size();
    let mut sources: Vec<_> = case
        .sources
        .iter()
        .zip(data)
        .map(|(&(packets, offset), data)| {
            let mut memory = Guarded::new(room(packets, bytes), offset);
            let mut plain = Guarded::holding(data, 0);
            let (a, b, n) = (memory.addr(), plain.addr(), bytes as u64);
            // SAFETY: the ranges have these sizes.
            unsafe {
                if packets {
                    copy_to_packets(&HostBlock::NO_WAIT, a, b, n, FLAG);
                } else {
                    copy::copy(&HostBlock::NO_WAIT, a, b, n);
                }
            }
            memory
        })
        .collect();
    let mut destinations: Vec<_> = case
        .destinations
        .iter()
        .map(|&(packets, offset)| Guarded::new(room(packets, bytes), offset))
        .collect();
    let from: Vec<_> = sources
        .iter_mut()
        .zip(&case.sources)
        .map(|(memory, &(packets, _))| location(packets, memory.addr()))
        .collect();
    let mut to: Vec<_> = destinations
        .iter_mut()
        .zip(&case.destinations)
        .map(|(memory, &(packets, _))| location(packets, memory.addr()))
        .collect();
    if case.in_place {
        to[0] = from[0];
    }
    work(&from, &to);
    let all = sources.iter().chain(&destinations);
    all.map(|memory| {
        assert!(memory.intact(), "{case:?}");
        memory.bytes().to_vec()
    })
    .collect()
}

fn on_gpu<E: GpuElement>(
    case: &Case,
    op: ReduceOp,
    threads: u32,
    from: &[Location],
    to: &[Location],
) {
    let mut table = vec![0_u64; TABLE_BYTES / 8];
    let address = table.as_mut_ptr() as u64;
    let ends = Team::new(threads, 0).run(|block| {
        // SAFETY: the table has that size and is used for nothing else; the locations have room.
        unsafe {
            GpuReducer::<E, _>::new(op, address).reduce(
                block,
                &Sources {
                    count: from.len() as u32,
                    at: |i| from[i as usize],
                },
                &Sources {
                    count: to.len() as u32,
                    at: |i| to[i as usize],
                },
                case.elements as u64,
                case.divisor,
                FLAG,
            )
        }
    });
    assert!(ends.iter().all(Result::is_ok), "{case:?}: {ends:?}");
}

/// The GPU's reduction of `dtype`.
fn gpu(dtype: DataType) -> fn(&Case, ReduceOp, u32, &[Location], &[Location]) {
    match dtype {
        DataType::I8 => on_gpu::<i8>,
        DataType::U8 => on_gpu::<u8>,
        DataType::I16 => on_gpu::<i16>,
        DataType::U16 => on_gpu::<u16>,
        DataType::I32 => on_gpu::<i32>,
        DataType::U32 => on_gpu::<u32>,
        DataType::I64 => on_gpu::<i64>,
        DataType::U64 => on_gpu::<u64>,
        DataType::F16 => on_gpu::<F16>,
        DataType::Bf16 => on_gpu::<Bf16>,
        DataType::F32 => on_gpu::<f32>,
        DataType::F64 => on_gpu::<f64>,
        DataType::F8E4M3 => on_gpu::<F8E4M3>,
        DataType::F8E5M2 => on_gpu::<F8E5M2>,
        _ => panic!("a data type this test does not know"),
    }
}

fn compare(case: &Case, dtype: DataType, op: ReduceOp, threads: u32, random: &mut Random) {
    let bytes = case.elements * dtype.size();
    let data: Vec<_> = case.sources.iter().map(|_| random.bytes(bytes)).collect();
    let host = reduce(case, dtype, &data, |from, to| {
        // SAFETY: the locations have room for the elements; nobody else uses them.
        let end = unsafe {
            HostReducer::new(dtype, op).reduce(
                &HostBlock::NO_WAIT,
                &Sources {
                    count: from.len() as u32,
                    at: |i| from[i as usize],
                },
                &Sources {
                    count: to.len() as u32,
                    at: |i| to[i as usize],
                },
                case.elements as u64,
                case.divisor,
                FLAG,
            )
        };
        assert_eq!(end, Ok(()));
    });
    let device = reduce(case, dtype, &data, |from, to| {
        gpu(dtype)(case, op, threads, from, to);
    });
    for (i, (host, device)) in host.iter().zip(&device).enumerate() {
        let at = host.iter().zip(device).position(|(a, b)| a != b);
        assert_eq!(
            at, None,
            "{dtype} {op}: byte of operand {i}, {threads} threads: {case:?}"
        );
    }
}

/// Shapes that take every path: two aligned sources, many, packets, unaligned ones.
fn shapes(size: usize) -> Vec<Case> {
    let aligned = |n: usize| vec![(false, 0); n];
    let mut cases = Vec::new();
    // Enough for four pieces a thread and a rest that is no whole piece.
    for elements in [1, 3, 16 / size, 64 / size + 1, 700 / size + 3] {
        let base = Case {
            elements,
            sources: aligned(2),
            destinations: aligned(1),
            in_place: false,
            divisor: 3,
        };
        let with = |sources: Vec<_>, destinations: Vec<_>, in_place, divisor| Case {
            sources,
            destinations,
            in_place,
            divisor,
            ..base.clone()
        };
        cases.extend([
            with(aligned(2), aligned(1), false, 3),
            with(aligned(2), aligned(1), true, 0),
            with(aligned(1), aligned(2), false, 2),
            with(aligned(5), aligned(2), true, 8),
            with(vec![(false, size), (false, 0)], aligned(1), false, 3),
            with(vec![(false, 1), (false, 3)], vec![(false, 5)], false, 3),
            with(aligned(2), vec![(false, size)], false, 1),
            with(
                vec![
                    (false, 0),
                    (true, 0),
                    (true, 8),
                    (true, 0),
                    (true, 8),
                    (true, 0),
                ],
                vec![(false, 0), (true, 8), (true, 0)],
                true,
                6,
            ),
            with(
                vec![(true, 0), (false, 2 * size)],
                vec![(true, 0)],
                false,
                0,
            ),
        ]);
    }
    cases
}

#[test]
fn reductions_leave_the_hosts_bits() {
    let mut random = Random(3);
    for dtype in DataType::ALL {
        for op in ReduceOp::ALL {
            for (i, case) in shapes(dtype.size()).iter().enumerate() {
                compare(case, dtype, op, [1, 3, 4][i % 3], &mut random);
            }
        }
    }
}

#[test]
fn halves_are_converted_as_on_the_host() {
    // Every value of the small types, against every kind of other.
    for dtype in [
        DataType::F16,
        DataType::Bf16,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ] {
        let mut random = Random(4);
        let case = Case {
            elements: 1 << 16,
            sources: vec![(false, 0); 2],
            destinations: vec![(false, 0)],
            in_place: false,
            divisor: 7,
        };
        for op in ReduceOp::ALL {
            compare(&case, dtype, op, 2, &mut random);
        }
    }
}

#[test]
fn a_source_that_does_not_come_ends_the_reduction() {
    // On the wide path (the first four bytes of a whole piece) and on the one for parts.
    for (elements, missing) in [(16, 1_usize), (16, 3), (5, 0), (5, 1)] {
        let mut table = vec![0_u64; TABLE_BYTES / 8];
        let mut sent = Guarded::new(16 * 8, 0);
        let mut plain = Guarded::new(64, 0);
        let mut out = Guarded::new(64, 0);
        let address = table.as_mut_ptr() as u64;
        let (words, raw, to) = (sent.addr(), plain.addr(), out.addr());
        // SAFETY: the ranges have these sizes.
        unsafe {
            copy_to_packets(&HostBlock::NO_WAIT, words, raw, 64, FLAG);
            (words as *mut u64).add(missing).write(0);
        }
        let from = [location(false, raw), location(true, words)];
        let ends = Team::new(2, 3).run(|block| {
            // SAFETY: the locations have room for the elements.
            let mine = unsafe {
                GpuReducer::<f32, _>::new(ReduceOp::Sum, address).reduce(
                    block,
                    &Sources {
                        count: 2,
                        at: |i| from[i as usize],
                    },
                    &Sources {
                        count: 1,
                        at: |_| Location::raw(to),
                    },
                    elements,
                    0,
                    FLAG,
                )
            };
            block.sync(mine)
        });
        assert_eq!(ends, [Err(Stopped::Deadline); 2], "word {missing}");
    }
}

#[test]
fn packets_of_a_gpu_are_read_by_the_host() {
    let mut random = Random(5);
    let data = random.bytes(99);
    let mut from = Guarded::holding(&data, 3);
    let mut memory = Guarded::new(25 * 8, 0);
    let mut back = Guarded::new(99, 1);
    let (a, b, c) = (from.addr(), memory.addr(), back.addr());
    // SAFETY: the ranges have these sizes.
    unsafe {
        in_turn(7, |block| packets::copy_to_packets(block, b, a, 99, FLAG));
        let done = copy_from_packets(&HostBlock::NO_WAIT, SITE, c, b, 99, FLAG);
        assert_eq!(done, Ok(()));
    }
    assert_eq!(back.bytes(), data);
}

/// A launch's own tables.
struct Own<const ROOM: usize = MAX_FUSED> {
    target: [u64; ROOM],
    source: [u64; ROOM],
    peer: [u32; ROOM],
    origin: [u64; MAX_FUSED],
}

impl<const ROOM: usize> Tables for Own<ROOM> {
    fn target(&self, k: u32) -> u64 {
        self.target[k as usize]
    }

    fn source(&self, k: u32) -> u64 {
        self.source[k as usize]
    }

    fn peer(&self, k: u32) -> u32 {
        self.peer[k as usize]
    }

    fn origin(&self, k: u32) -> u64 {
        self.origin[k as usize]
    }
}

fn own(launch: &OneShot) -> Own {
    let OneShot {
        target,
        source,
        peer,
        ..
    } = *launch;
    Own {
        target,
        source,
        peer,
        origin: [0; MAX_FUSED],
    }
}

/// Ranks of [`one_shot::run`], with room for messages of 64 pieces.
struct FusedRanks {
    inputs: Vec<Guarded>,
    outputs: Vec<Guarded>,
    packets: Vec<Guarded>,
    counters: Vec<Guarded>,
}

const FUSED_RANKS: u32 = 3;
const FUSED_MOST: u64 = 64 * 128;
const FUSED_HALF: u64 = FUSED_RANKS as u64 * FUSED_MOST * 2;

impl FusedRanks {
    fn new(epoch: u64) -> Self {
        let memories = |bytes: u64| -> Vec<Guarded> {
            let zeros = vec![0; bytes as usize];
            (0..FUSED_RANKS)
                .map(|_| Guarded::holding(&zeros, 0))
                .collect()
        };
        let mut this = Self {
            inputs: memories(FUSED_MOST),
            outputs: memories(FUSED_MOST),
            packets: memories(2 * FUSED_HALF),
            counters: memories(128),
        };
        for counters in &mut this.counters {
            // SAFETY: the epoch's word.
            unsafe { Raw.store(counters.addr(), epoch) };
        }
        this
    }

    /// Writes random inputs of `bytes` bytes; returns them.
    fn fill(&mut self, seed: u64, bytes: u64) -> Vec<Vec<u8>> {
        let mut random = Random(seed);
        let data: Vec<_> = (0..FUSED_RANKS)
            .map(|_| random.bytes(bytes as usize))
            .collect();
        for (input, data) in self.inputs.iter_mut().zip(&data) {
            // SAFETY: it has room for the largest message.
            unsafe { Raw.copy(input.addr(), data.as_ptr() as u64, bytes) };
        }
        data
    }

    /// What is in a rank's output, or in its input, after a launch.
    fn result(&mut self, rank: usize, in_place: bool, bytes: u64) -> Vec<u8> {
        let memory = match in_place {
            true => &mut self.inputs[rank],
            false => &mut self.outputs[rank],
        };
        let mut got = vec![0; bytes as usize];
        // SAFETY: the launch is over.
        unsafe { Raw.copy(got.as_mut_ptr() as u64, memory.addr(), bytes) };
        got
    }

    fn launch(&mut self, rank: u32, op: ReduceOp, bytes: u64, blocks: u64) -> OneShot {
        self.launch_in(
            bytes.next_multiple_of(16) * 2,
            16,
            (rank, op, bytes, blocks),
        )
    }

    /// With slots and shares for lines.
    fn launch_lines(&mut self, rank: u32, op: ReduceOp, bytes: u64, blocks: u64) -> OneShot {
        let slot = bytes.div_ceil(PAIR_PAYLOAD) * PAIR;
        self.launch_in(slot, PAIR_PAYLOAD, (rank, op, bytes, blocks))
    }

    fn launch_in(
        &mut self,
        slot_bytes: u64,
        granule: u64,
        (rank, op, bytes, blocks): (u32, ReduceOp, u64, u64),
    ) -> OneShot {
        let r = rank as usize;
        let mut launch = OneShot {
            input: self.inputs[r].addr(),
            output: self.outputs[r].addr(),
            bytes,
            step: bytes.div_ceil(granule).div_ceil(blocks) * granule,
            counters: Counters {
                epoch: self.counters[r].addr(),
                packets: self.packets[r].addr(),
                packets_half: FUSED_HALF,
                blocks,
            },
            context: GpuContext::default(),
            op,
            divisor: if op == ReduceOp::Avg { FUSED_RANKS } else { 0 },
            targets: FUSED_RANKS - 1,
            sources: FUSED_RANKS,
            op_index: 1,
            rank,
            target: [0; MAX_FUSED],
            source: [0; MAX_FUSED],
            peer: [0; MAX_FUSED],
        };
        // Slot `sender` of the receiver.
        let mut slot = |at: u32, sender: u32| {
            self.packets[at as usize].addr() + u64::from(sender) * slot_bytes
        };
        for k in 1..FUSED_RANKS {
            let peer = (rank + k) % FUSED_RANKS;
            launch.target[k as usize - 1] = slot(peer, rank);
        }
        for k in 0..FUSED_RANKS {
            launch.peer[k as usize] = k;
            if k != rank {
                launch.source[k as usize] = slot(rank, k);
            }
        }
        launch
    }
}

/// Launches of all ranks, blocks and threads at once, across an epoch that ends with clearing.
fn fused_reduces<E: GpuElement>(dtype: DataType, op: ReduceOp, lines: bool) {
    let blocks = 2;
    // Lines need half a warp.
    let threads = if lines { 16 } else { 3 };
    let first = (1 << 18) - 1;
    let mut ranks = FusedRanks::new(first);
    let size = dtype.size() as u64;
    for (epoch, elements) in (first..).zip([1, FUSED_MOST / size, 81 / size, 7, 530 / size, 13]) {
        let bytes = elements * size;
        let data = ranks.fill(epoch * 31 + elements, bytes);
        let launches: Vec<_> = (0..FUSED_RANKS)
            .map(|rank| match lines {
                true => ranks.launch_lines(rank, op, bytes, blocks),
                false => ranks.launch(rank, op, bytes, blocks),
            })
            .collect();
        std::thread::scope(|scope| {
            for launch in &launches {
                for index in 0..blocks as u32 {
                    scope.spawn(move || {
                        let outcomes = Team::new(threads, 1 << 20).run(|member| {
                            let (at, tables) = ((index, epoch), own(launch));
                            // SAFETY: the launch is laid out for these buffers.
                            unsafe {
                                match lines {
                                    true => {
                                        one_shot_lines::run::<_, E>(member, launch, &tables, at)
                                    }
                                    false => {
                                        one_shot::run::<_, E, false>(member, launch, &tables, at)
                                    }
                                }
                            }
                        });
                        let all_well = outcomes.iter().all(Result::is_ok);
                        assert!(all_well, "epoch {epoch}: {outcomes:?}");
                    });
                }
            }
        });
        let expected = reference(dtype, op, FUSED_RANKS, &data);
        for rank in 0..FUSED_RANKS as usize {
            let wrong = difference(dtype, &ranks.result(rank, false, bytes), &expected);
            assert_eq!(wrong, None, "{dtype} {op}, rank {rank}, epoch {epoch}");
            assert_eq!(ranks.counters[rank].word(0), epoch + 1);
            assert!(ranks.outputs[rank].intact() && ranks.packets[rank].intact());
            if crossweft_device::packet::is_scrub_epoch(epoch) {
                let half = (epoch % 2 * FUSED_HALF) as usize / 8;
                let cleared = half..half + FUSED_HALF as usize / 8;
                assert!(
                    cleared
                        .into_iter()
                        .all(|w| ranks.packets[rank].word(w) == 0)
                );
            }
        }
    }
}

#[test]
fn one_shots_in_one_piece_are_the_references() {
    for op in ReduceOp::ALL {
        fused_reduces::<f32>(DataType::F32, op, false);
        fused_reduces::<Bf16>(DataType::Bf16, op, false);
        fused_reduces::<F16>(DataType::F16, op, false);
        fused_reduces::<F8E4M3>(DataType::F8E4M3, op, false);
        fused_reduces::<i8>(DataType::I8, op, false);
        fused_reduces::<u64>(DataType::U64, op, false);
    }
}

#[test]
fn one_shots_in_lines_are_the_references() {
    for op in ReduceOp::ALL {
        fused_reduces::<Bf16>(DataType::Bf16, op, true);
        fused_reduces::<i8>(DataType::I8, op, true);
    }
    fused_reduces::<f32>(DataType::F32, ReduceOp::Avg, true);
    fused_reduces::<u64>(DataType::U64, ReduceOp::Sum, true);
}

/// The buffers are where no whole piece is, one of them; the peers send nothing the second time.
#[test]
fn lines_reduce_unaligned_buffers_and_end_their_wait() {
    let mut ranks = FusedRanks::new(5);
    let bytes = 1003;
    let data = ranks.fill(7, bytes + 3);
    let launches: Vec<_> = (0..FUSED_RANKS)
        .map(|rank| {
            let mut launch = ranks.launch_lines(rank, ReduceOp::Sum, bytes, 1);
            launch.input += u64::from(rank);
            launch.output += 2;
            launch
        })
        .collect();
    std::thread::scope(|scope| {
        for launch in &launches {
            scope.spawn(move || {
                let outcomes = Team::new(8, 1 << 20).run(|member| {
                    let tables = own(launch);
                    // SAFETY: the launch is laid out for these buffers.
                    unsafe { one_shot_lines::run::<_, u8>(member, launch, &tables, (0, 5)) }
                });
                assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
            });
        }
    });
    let shifted: Vec<_> = (0..)
        .zip(&data)
        .map(|(rank, data): (usize, _)| data[rank..rank + bytes as usize].to_vec())
        .collect();
    let expected = reference(DataType::U8, ReduceOp::Sum, FUSED_RANKS, &shifted);
    for rank in 0..FUSED_RANKS as usize {
        let got = ranks.result(rank, false, bytes + 2);
        assert_eq!(
            difference(DataType::U8, &got[2..], &expected),
            None,
            "rank {rank}"
        );
        assert!(ranks.outputs[rank].intact() && ranks.packets[rank].intact());
    }
    let outcomes = Team::new(8, 5).run(|member| {
        let tables = own(&launches[0]);
        // SAFETY: as above.
        unsafe { one_shot_lines::run::<_, u8>(member, &launches[0], &tables, (0, 6)) }
    });
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    assert_eq!(ranks.counters[0].word(0), 6);
}

#[test]
fn a_one_shot_in_one_piece_ends_its_wait() {
    let mut ranks = FusedRanks::new(9);
    let launch = ranks.launch(0, ReduceOp::Sum, 48, 1);
    let outcomes = Team::new(2, 5).run(|member| {
        // SAFETY: the launch is laid out for these buffers.
        unsafe { one_shot::run::<_, i32, false>(member, &launch, &own(&launch), (0, 9)) }
    });
    assert_eq!(outcomes, [Err(Stopped::Deadline); 2]);
    assert_eq!(ranks.counters[0].word(0), 9);
}

/// What is launched behind a launch that was stopped waits for nobody and sends nothing.
#[test]
fn launches_behind_one_that_was_stopped_end_at_once() {
    let mut ranks = FusedRanks::new(STOPPED_EPOCH);
    let launch = ranks.launch(0, ReduceOp::Sum, 48, 1);
    let outcomes = Team::new(2, 0).run(|member| {
        // SAFETY: the launch is laid out for these buffers.
        unsafe {
            one_shot::run::<_, i32, false>(member, &launch, &own(&launch), (0, STOPPED_EPOCH))
        }
    });
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    for packets in &ranks.packets {
        assert!((0..2 * FUSED_HALF as usize / 8).all(|word| packets.word(word) == 0));
    }
    // No semaphore is looked at: there is none.
    let launch = TwoShot {
        begin: 0,
        end: 16,
        step: 16,
        bytes: 48,
        counters: launch.counters,
        context: launch.context,
        semaphores: 0,
        op: ReduceOp::Sum,
        divisor: 0,
        sources: FUSED_RANKS,
        targets: FUSED_RANKS,
        peers: 0,
        rank: 0,
        first_wait: 1,
        second_wait: 4,
        target: [0; MAX_FUSED],
        source: [0; MAX_FUSED],
    };
    let tables = Own {
        target: launch.target,
        source: launch.source,
        peer: [0; MAX_FUSED],
        origin: [0; MAX_FUSED],
    };
    let outcomes = Team::new(2, 0).run(|member| {
        // SAFETY: nothing of it is accessed.
        unsafe { two_shot::run::<_, i32>(member, &launch, &tables, (0, STOPPED_EPOCH)) }
    });
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
}

/// Semaphores between ranks, as plans number them: a rank's peers in order, block after block.
struct Meetings {
    /// Of each rank, block and peer: a counter with its tags, and the count of waits.
    inbound: Vec<Guarded>,
    expected: Vec<Guarded>,
    semaphores: Vec<Vec<Semaphore>>,
}

impl Meetings {
    /// Of those that `meet`.
    fn new(blocks: u32, meet: impl Fn(u32, u32) -> bool) -> Self {
        let count = (blocks * FUSED_RANKS) as usize;
        let words = |bytes: usize| -> Vec<Guarded> {
            let zeros = vec![0; bytes * count];
            (0..FUSED_RANKS)
                .map(|_| Guarded::holding(&zeros, 0))
                .collect()
        };
        let (mut inbound, mut expected) = (words(24), words(8));
        let mut semaphores = Vec::new();
        for rank in 0..FUSED_RANKS {
            let mut all = Vec::new();
            for block in 0..blocks {
                for peer in (0..FUSED_RANKS).filter(|&peer| peer != rank && meet(rank, peer)) {
                    let at = |with: u32| u64::from(block * FUSED_RANKS + with);
                    all.push(Semaphore {
                        inbound: inbound[rank as usize].addr() + 24 * at(peer),
                        outbound: inbound[peer as usize].addr() + 24 * at(rank),
                        expected: expected[rank as usize].addr() + 8 * at(peer),
                        peer,
                        channel: block,
                    });
                }
            }
            semaphores.push(all);
        }
        Self {
            inbound,
            expected,
            semaphores,
        }
    }

    fn of(&self, rank: u32) -> u64 {
        self.semaphores[rank as usize].as_ptr() as u64
    }

    fn intact(&self) -> bool {
        self.inbound
            .iter()
            .chain(&self.expected)
            .all(Guarded::intact)
    }
}

/// Launches of all ranks, blocks and threads at once; `in_place` or not.
fn two_shots_reduce<E: GpuElement>(dtype: DataType, op: ReduceOp, in_place: bool) {
    let (blocks, peers, first) = (2, FUSED_RANKS - 1, 7);
    let mut ranks = FusedRanks::new(first);
    let meetings = Meetings::new(blocks, |_, _| true);
    let size = dtype.size() as u64;
    for (epoch, elements) in (first..).zip([FUSED_MOST / size, 1, 530 / size, 13]) {
        let bytes = elements * size;
        let data = ranks.fill(epoch * 31 + elements, bytes);
        let chunk = bytes.div_ceil(16).div_ceil(FUSED_RANKS.into()) * 16;
        let mut target = [0; MAX_FUSED];
        let mut source = [0; MAX_FUSED];
        for k in 0..FUSED_RANKS as usize {
            source[k] = ranks.inputs[k].addr();
            target[k] = match in_place {
                true => source[k],
                false => ranks.outputs[k].addr(),
            };
        }
        let launches: Vec<_> = (0..FUSED_RANKS)
            .map(|rank| {
                let begin = (chunk * u64::from(rank)).min(bytes);
                let end = (begin + chunk).min(bytes);
                TwoShot {
                    begin,
                    end,
                    step: (end - begin).div_ceil(16).div_ceil(blocks.into()) * 16,
                    bytes,
                    counters: ranks.launch(rank, op, bytes, blocks.into()).counters,
                    context: GpuContext::default(),
                    semaphores: meetings.of(rank),
                    op,
                    divisor: if op == ReduceOp::Avg { FUSED_RANKS } else { 0 },
                    sources: FUSED_RANKS,
                    targets: FUSED_RANKS,
                    peers,
                    rank,
                    first_wait: 1,
                    second_wait: 4,
                    target,
                    source,
                }
            })
            .collect();
        let tables = &Own {
            target,
            source,
            peer: [0; MAX_FUSED],
            origin: [0; MAX_FUSED],
        };
        std::thread::scope(|scope| {
            for launch in &launches {
                for index in 0..blocks {
                    scope.spawn(move || {
                        let outcomes = Team::new(2, 1 << 20).run(|member| {
                            // SAFETY: the launch is laid out for these buffers.
                            unsafe { two_shot::run::<_, E>(member, launch, tables, (index, epoch)) }
                        });
                        assert_eq!(outcomes, [Ok(()); 2], "epoch {epoch}");
                    });
                }
            }
        });
        let wanted = reference(dtype, op, FUSED_RANKS, &data);
        for rank in 0..FUSED_RANKS as usize {
            let wrong = difference(dtype, &ranks.result(rank, in_place, bytes), &wanted);
            assert_eq!(wrong, None, "{dtype} {op}, rank {rank}, epoch {epoch}");
            assert_eq!(ranks.counters[rank].word(0), epoch + 1);
            assert!(ranks.outputs[rank].intact() && ranks.inputs[rank].intact());
        }
    }
    assert!(meetings.intact());
}

#[test]
fn two_shots_in_one_piece_are_the_references() {
    for op in ReduceOp::ALL {
        for in_place in [false, true] {
            two_shots_reduce::<f32>(DataType::F32, op, in_place);
            two_shots_reduce::<Bf16>(DataType::Bf16, op, in_place);
            two_shots_reduce::<F8E5M2>(DataType::F8E5M2, op, in_place);
            two_shots_reduce::<i8>(DataType::I8, op, in_place);
            two_shots_reduce::<i64>(DataType::I64, op, in_place);
        }
    }
}

/// Everybody gets another block of every input, reduced.
fn scatters_reduce<E: GpuElement>(dtype: DataType, op: ReduceOp, in_place: bool) {
    let (blocks, first) = (2, (1 << 18) - 1);
    let mut ranks = FusedRanks::new(first);
    for (epoch, pieces) in (first..).zip([1, 33, 7, 2]) {
        let bytes = pieces * 16;
        let data = ranks.fill(epoch + 5, bytes * u64::from(FUSED_RANKS));
        let launches: Vec<_> = (0..FUSED_RANKS)
            .map(|rank| {
                let mut launch = ranks.launch(rank, op, bytes, blocks);
                let input = launch.input;
                launch.input += bytes * u64::from(rank);
                if in_place {
                    launch.output = launch.input;
                }
                let mut tables = own(&launch);
                for k in 1..FUSED_RANKS {
                    let peer = (rank + k) % FUSED_RANKS;
                    tables.origin[k as usize - 1] = input + bytes * u64::from(peer);
                }
                (launch, tables)
            })
            .collect();
        std::thread::scope(|scope| {
            for (launch, tables) in &launches {
                for index in 0..blocks as u32 {
                    scope.spawn(move || {
                        let outcomes = Team::new(3, 1 << 20).run(|member| {
                            let at = (index, epoch);
                            // SAFETY: the launch is laid out for these buffers.
                            unsafe { one_shot::run::<_, E, true>(member, launch, tables, at) }
                        });
                        assert_eq!(outcomes, [Ok(()); 3], "epoch {epoch}");
                    });
                }
            }
        });
        for rank in 0..FUSED_RANKS as usize {
            let of_rank = rank * bytes as usize..(rank + 1) * bytes as usize;
            let parts: Vec<_> = data
                .iter()
                .map(|all| all[of_rank.clone()].to_vec())
                .collect();
            let expected = reference(dtype, op, FUSED_RANKS, &parts);
            let got = match in_place {
                true => ranks.result(rank, true, of_rank.end as u64)[of_rank.start..].to_vec(),
                false => ranks.result(rank, false, bytes),
            };
            let wrong = difference(dtype, &got, &expected);
            assert_eq!(wrong, None, "{dtype} {op}, rank {rank}, epoch {epoch}");
            assert!(ranks.outputs[rank].intact() && ranks.inputs[rank].intact());
            if !in_place {
                assert_eq!(
                    ranks.result(rank, true, data[rank].len() as u64),
                    data[rank]
                );
            }
        }
    }
}

#[test]
fn one_shots_that_scatter_are_the_references() {
    for in_place in [false, true] {
        scatters_reduce::<Bf16>(DataType::Bf16, ReduceOp::Sum, in_place);
        scatters_reduce::<f32>(DataType::F32, ReduceOp::Avg, in_place);
        scatters_reduce::<i8>(DataType::I8, ReduceOp::Max, in_place);
    }
}

/// A rank's part of a hop: what is moved, from where to where and whose, and how ranks meet.
struct Part {
    meets: u32,
    channels: u32,
    first: Vec<(u64, u64, u32)>,
    second: Vec<(u64, u64, u32)>,
}

/// Launches of all ranks, blocks and threads at once, of blocks of `sizes`, across an epoch that ends with clearing. `part`
/// gets a rank, where each rank's input, output and slot `i` of packets are, and the size; `expected` says what
/// outputs hold, of all inputs.
fn hops(
    packets: bool,
    meet: impl Fn(u32, u32) -> bool,
    sizes: &[u64],
    part: impl Fn(u32, &dyn Fn(u32) -> u64, &dyn Fn(u32) -> u64, &dyn Fn(u32, u32) -> u64, u64) -> Part,
    expected: impl Fn(u32, &[Vec<u8>], usize) -> Vec<u8>,
) {
    let (blocks, threads, first) = (2, 3, (1 << 18) - 1);
    let mut ranks = FusedRanks::new(first);
    let meetings = Meetings::new(blocks, meet);
    let base =
        |memory: &mut Vec<Guarded>| -> Vec<u64> { memory.iter_mut().map(Guarded::addr).collect() };
    let (inputs, outputs, slots) = (
        base(&mut ranks.inputs),
        base(&mut ranks.outputs),
        base(&mut ranks.packets),
    );
    for (epoch, &bytes) in (first..).zip(sizes) {
        let data = ranks.fill(epoch + bytes, FUSED_MOST);
        let slot = |rank: u32, i: u32| {
            slots[rank as usize] + u64::from(i) * bytes.next_multiple_of(16) * 2
        };
        let (input, output) = (|r: u32| inputs[r as usize], |r: u32| outputs[r as usize]);
        let launches: Vec<_> = (0..FUSED_RANKS)
            .map(|rank| {
                let part = part(rank, &input, &output, &slot, bytes);
                let mut tables = Own::<MAX_MOVES> {
                    target: [0; MAX_MOVES],
                    source: [0; MAX_MOVES],
                    peer: [0; MAX_MOVES],
                    origin: [0; MAX_FUSED],
                };
                for (k, (source, target, peer)) in part.first.iter().chain(&part.second).enumerate()
                {
                    tables.source[k] = *source;
                    tables.target[k] = *target;
                    tables.peer[k] = *peer;
                }
                let launch = Hop {
                    bytes,
                    step: bytes.div_ceil(16).div_ceil(blocks.into()) * 16,
                    counters: ranks
                        .launch(rank, ReduceOp::Sum, bytes, blocks.into())
                        .counters,
                    context: GpuContext::default(),
                    semaphores: meetings.of(rank),
                    channels: part.channels,
                    meets: part.meets,
                    first: part.first.len() as u32,
                    second: part.second.len() as u32,
                    first_wait: 1,
                    second_wait: 2,
                    op_index: 3,
                    rank,
                    target: tables.target,
                    source: tables.source,
                    peer: tables.peer,
                };
                (launch, tables)
            })
            .collect();
        std::thread::scope(|scope| {
            for (launch, tables) in &launches {
                for index in 0..blocks {
                    scope.spawn(move || {
                        let outcomes = Team::new(threads, 1 << 20).run(|member| {
                            let at = (index, epoch);
                            // SAFETY: the launch is laid out for these buffers.
                            unsafe {
                                match packets {
                                    true => hop::packets(member, launch, tables, at),
                                    false => hop::direct(member, launch, tables, at),
                                }
                            }
                        });
                        assert_eq!(outcomes, [Ok(()); 3], "epoch {epoch}");
                    });
                }
            }
        });
        for rank in 0..FUSED_RANKS {
            let wanted = expected(rank, &data, bytes as usize);
            let got = ranks.result(rank as usize, false, wanted.len() as u64);
            assert_eq!(got, wanted, "rank {rank}, {bytes} bytes, epoch {epoch}");
            assert_eq!(ranks.counters[rank as usize].word(0), epoch + 1);
        }
        let all = ranks
            .inputs
            .iter()
            .chain(&ranks.outputs)
            .chain(&ranks.packets);
        assert!({ all }.all(Guarded::intact));
    }
    assert!(meetings.intact());
}

/// Sizes of blocks that lie side by side.
const BLOCKS: [u64; 5] = [16, 48, 512, 1600, 32];

#[test]
fn blocks_change_places_in_packets() {
    let part = |rank: u32,
                input: &dyn Fn(u32) -> u64,
                output: &dyn Fn(u32) -> u64,
                slot: &dyn Fn(u32, u32) -> u64,
                bytes: u64| {
        let of = |block: u32| bytes * u64::from(block);
        let peers = (1..FUSED_RANKS).map(|k| (rank + k) % FUSED_RANKS);
        let sends = peers
            .clone()
            .map(|q| (input(rank) + of(q), slot(q, rank), rank));
        let own = (input(rank) + of(rank), output(rank) + of(rank), rank);
        let takes = peers.map(|q| (slot(rank, q), output(rank) + of(q), q));
        Part {
            meets: 0,
            channels: 0,
            first: sends.collect(),
            second: std::iter::once(own).chain(takes).collect(),
        }
    };
    hops(
        true,
        |_, _| true,
        &BLOCKS,
        part,
        |rank, data, bytes| {
            let of_rank = rank as usize * bytes..(rank as usize + 1) * bytes;
            data.iter()
                .flat_map(|all| all[of_rank.clone()].to_vec())
                .collect()
        },
    );
}

#[test]
fn a_root_sends_in_packets_and_hears_that_all_have_begun() {
    let part = |rank: u32,
                input: &dyn Fn(u32) -> u64,
                output: &dyn Fn(u32) -> u64,
                slot: &dyn Fn(u32, u32) -> u64,
                _: u64| match rank {
        0 => Part {
            meets: hop::HEARS_END,
            channels: 2,
            first: vec![(input(0), slot(1, 0), 0), (input(0), slot(2, 0), 0)],
            second: vec![(input(0), output(0), 0)],
        },
        _ => Part {
            meets: hop::TELLS,
            channels: 1,
            first: vec![],
            second: vec![(slot(rank, 0), output(rank), 0)],
        },
    };
    let meet = |a, b| a == 0 || b == 0;
    let sizes = [1, 16, 13, 700, 8192, 5, 33];
    hops(true, meet, &sizes, part, |_, data, bytes| {
        data[0][..bytes].to_vec()
    });
}

#[test]
fn a_root_gathers_packets_and_those_who_send_take_nothing() {
    let part = |rank: u32,
                input: &dyn Fn(u32) -> u64,
                output: &dyn Fn(u32) -> u64,
                slot: &dyn Fn(u32, u32) -> u64,
                bytes: u64| {
        let to = |q: u32| output(0) + bytes * u64::from(q);
        match rank {
            0 => Part {
                meets: hop::TELLS,
                channels: 2,
                first: vec![],
                second: vec![
                    (input(0), to(0), 0),
                    (slot(0, 1), to(1), 1),
                    (slot(0, 2), to(2), 2),
                ],
            },
            _ => Part {
                meets: hop::HEARS_END,
                channels: 1,
                first: vec![(input(rank), slot(0, rank), rank)],
                second: vec![],
            },
        }
    };
    let meet = |a, b| a == 0 || b == 0;
    hops(true, meet, &BLOCKS, part, |rank, data, bytes| match rank {
        0 => data.iter().flat_map(|all| all[..bytes].to_vec()).collect(),
        _ => vec![],
    });
}

#[test]
fn blocks_are_pushed_to_everybody() {
    let part = |rank: u32,
                input: &dyn Fn(u32) -> u64,
                output: &dyn Fn(u32) -> u64,
                _: &dyn Fn(u32, u32) -> u64,
                bytes: u64| {
        let to = |q: u32| (input(rank), output(q) + bytes * u64::from(rank), rank);
        Part {
            meets: hop::TELLS | hop::HEARS | hop::TELLS_END | hop::HEARS_END,
            channels: FUSED_RANKS - 1,
            first: (0..FUSED_RANKS).map(to).collect(),
            second: vec![],
        }
    };
    hops(
        false,
        |_, _| true,
        &BLOCKS,
        part,
        |_, data, bytes| data.iter().flat_map(|all| all[..bytes].to_vec()).collect(),
    );
}

#[test]
fn a_root_is_read_and_copies_its_own_last() {
    let part = |rank: u32,
                input: &dyn Fn(u32) -> u64,
                output: &dyn Fn(u32) -> u64,
                _: &dyn Fn(u32, u32) -> u64,
                _: u64| match rank {
        0 => Part {
            meets: hop::TELLS | hop::HEARS_END,
            channels: 2,
            first: vec![],
            second: vec![(input(0), output(0), 0)],
        },
        _ => Part {
            meets: hop::HEARS | hop::TELLS_END,
            channels: 1,
            first: vec![(input(0), output(rank), 0)],
            second: vec![],
        },
    };
    let meet = |a, b| a == 0 || b == 0;
    let sizes = [1, 16, 13, 700, 8192, 5, 33];
    hops(false, meet, &sizes, part, |_, data, bytes| {
        data[0][..bytes].to_vec()
    });
}

#[test]
fn a_hop_whose_peer_does_not_come_ends_its_wait() {
    let mut ranks = FusedRanks::new(9);
    let meetings = Meetings::new(1, |_, _| true);
    let OneShot {
        input,
        output,
        counters,
        context,
        source,
        ..
    } = ranks.launch(0, ReduceOp::Sum, 48, 1);
    let tables = Own::<MAX_MOVES> {
        target: [output; MAX_MOVES],
        source: [source[1]; MAX_MOVES],
        peer: [1; MAX_MOVES],
        origin: [0; MAX_FUSED],
    };
    let mut launch = Hop {
        bytes: 48,
        step: 48,
        counters,
        context,
        semaphores: meetings.of(0),
        channels: 2,
        meets: 0,
        first: 0,
        second: 1,
        first_wait: 0,
        second_wait: 0,
        op_index: 0,
        rank: 0,
        target: tables.target,
        source: tables.source,
        peer: tables.peer,
    };
    let run = |launch: &Hop| {
        Team::new(2, 5).run(|member| {
            // SAFETY: the launch is laid out for these buffers.
            unsafe { hop::packets(member, launch, &tables, (0, 9)) }
        })
    };
    assert_eq!(run(&launch), [Err(Stopped::Deadline); 2]);
    assert_eq!(ranks.counters[0].word(0), 9);
    launch.meets = hop::TELLS | hop::HEARS;
    launch.first = 1;
    let own = Own::<MAX_MOVES> {
        source: [input; MAX_MOVES],
        ..tables
    };
    let outcomes = Team::new(2, 5).run(|member| {
        // SAFETY: as above.
        unsafe { hop::direct(member, &launch, &own, (0, 9)) }
    });
    assert_eq!(outcomes, [Err(Stopped::Deadline); 2]);
    assert_eq!(ranks.counters[0].word(0), 9);
}

const QUANTISATIONS: [Quantisation; 4] = [
    Quantisation::None,
    Quantisation::Static,
    Quantisation::PerToken,
    Quantisation::PerGroup,
];

/// Tokens, and what becomes of them: by the host's leaves, and by a GPU's.
struct NormCase {
    dtype: DataType,
    hidden: usize,
    tokens: usize,
    residual: Option<Guarded>,
    weight: Guarded,
    output: Guarded,
    values: Guarded,
    scales: Guarded,
}

const EPSILON: f32 = 1e-5;
const SCALE: f32 = 0.03;

/// Elements of moderate size.
fn moderate(random: &mut Random, dtype: DataType, elements: usize) -> Vec<u8> {
    let number = |random: &mut Random| (random.below(1 << 16) as f32 - 32768.0) / 4096.0;
    (0..elements)
        .flat_map(|_| {
            let x = number(random);
            match dtype {
                DataType::F32 => x.to_le_bytes().to_vec(),
                DataType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                _ => half::bf16::from_f32(x).to_le_bytes().to_vec(),
            }
        })
        .collect()
}

impl NormCase {
    fn new(
        random: &mut Random,
        (dtype, hidden, tokens): (DataType, usize, usize),
        with_residual: bool,
        shift: usize,
    ) -> Self {
        let elements = hidden * tokens;
        let mut holding = |elements| Guarded::holding(&moderate(random, dtype, elements), shift);
        Self {
            dtype,
            hidden,
            tokens,
            residual: with_residual.then(|| holding(elements)),
            weight: holding(hidden),
            output: holding(elements),
            values: Guarded::new(elements, shift),
            scales: Guarded::new(4 * tokens * hidden.div_ceil(GROUP), 0),
        }
    }

    fn norm(&mut self, quantisation: Quantisation) -> Norm {
        let residual = self.residual.as_mut().map_or(0, Guarded::addr);
        let (weight, output) = (self.weight.addr(), self.output.addr());
        let values = self.values.addr();
        let aligned = (residual | weight | output).is_multiple_of(16) && values.is_multiple_of(8);
        Norm {
            output,
            residual,
            weight,
            values,
            scales: self.scales.addr(),
            tokens: self.tokens as u32,
            hidden: self.hidden as u32,
            epsilon: EPSILON,
            scale: SCALE,
            quantisation,
            aligned: aligned.into(),
        }
    }

    /// What the host's leaves make of tokens that have been summed: the output, the residual, the values and the scales.
    fn expected(&self, sums: &[u8], quantisation: Quantisation) -> [Vec<u8>; 4] {
        // SAFETY: every machine has these instructions.
        let leaves = unsafe { HostNorm::with_isa(self.dtype, Isa::Baseline) };
        let leaves = leaves.expect("a type of tokens");
        let mut output = sums.to_vec();
        let mut residual = self.residual.as_ref().map(|r| r.bytes().to_vec());
        let mut values = self.values.bytes().to_vec();
        let mut scales = self.scales.bytes().to_vec();
        let (hidden, size) = (self.hidden, self.dtype.size());
        let weight = self.weight.bytes().as_ptr() as u64;
        let groups = hidden.div_ceil(GROUP);
        for (token, x) in output.chunks_mut(hidden * size).enumerate() {
            let x = x.as_mut_ptr() as u64;
            let before = residual.as_mut().map_or(0, |residual| {
                residual[token * hidden * size..].as_mut_ptr() as u64
            });
            let values = values[token * hidden..].as_mut_ptr() as u64;
            // SAFETY: all have a token's elements.
            unsafe {
                let squares = leaves.add(x, before, hidden);
                assert_eq!(squares.to_bits(), self.by_definition(x).to_bits());
                let factor = factor(squares, hidden as u32, EPSILON, f32::sqrt);
                leaves.weigh(x, weight, hidden, factor);
                let mut scale = |index: usize, scale: f32| {
                    scales[4 * index..4 * index + 4].copy_from_slice(&scale.to_le_bytes());
                    scale
                };
                match quantisation {
                    Quantisation::None => {}
                    Quantisation::Static => leaves.quantise(values, x, hidden, SCALE),
                    Quantisation::PerToken => {
                        let scale = scale(token, token_scale(leaves.largest(x, hidden)));
                        leaves.quantise(values, x, hidden, scale);
                    }
                    Quantisation::PerGroup => {
                        for group in 0..groups {
                            let at = group * GROUP;
                            let n = (hidden - at).min(GROUP);
                            let x = x + (at * size) as u64;
                            let scale = group_scale(leaves.largest(x, n));
                            leaves.quantise(values + at as u64, x, n, scale);
                            scales[4 * (token * groups + group)..][..4]
                                .copy_from_slice(&scale.to_le_bytes());
                        }
                    }
                }
            }
        }
        [output, residual.unwrap_or_default(), values, scales]
    }

    /// The sum of a token's squares, in the order of its definition.
    fn by_definition(&self, x: u64) -> f32 {
        let mut columns = vec![[0.0_f32; 8]; 512];
        for i in 0..self.hidden {
            // SAFETY: a token's elements.
            let x = unsafe {
                match self.dtype {
                    DataType::F32 => (x as *const f32).add(i).read_unaligned(),
                    DataType::F16 => (x as *const half::f16).add(i).read_unaligned().to_f32(),
                    _ => (x as *const half::bf16).add(i).read_unaligned().to_f32(),
                }
            };
            columns[i / 8 % 512][i % 8] += x * x;
        }
        while columns.len() > 1 {
            let pairs = columns.chunks(2);
            columns = pairs
                .map(|pair| std::array::from_fn(|lane| pair[0][lane] + pair[1][lane]))
                .collect();
        }
        let mut lanes = columns[0].to_vec();
        while lanes.len() > 1 {
            lanes = lanes.chunks(2).map(|pair| pair[0] + pair[1]).collect();
        }
        lanes[0]
    }

    fn check(&self, expected: &[Vec<u8>; 4], what: &str) {
        let residual = self.residual.as_ref();
        let residual = residual.map_or(&[][..], |residual| residual.bytes());
        let found = [
            self.output.bytes(),
            residual,
            self.values.bytes(),
            self.scales.bytes(),
        ];
        let names = ["output", "residual", "values", "scales"];
        for ((found, expected), name) in found.iter().zip(expected).zip(names) {
            let differ = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(differ, None, "{what}: {name}");
        }
        let mut all = vec![&self.output, &self.weight, &self.values, &self.scales];
        all.extend(&self.residual);
        assert!(all.iter().all(|memory| memory.intact()), "{what}");
    }
}

/// Tokens that have been summed, by two thread blocks, as the kernel that only normalises does it.
fn norms_tokens<E: NormElement>(dtype: DataType, hidden: usize, tokens: usize, shift: usize) {
    let mut random = Random(hidden as u64);
    for quantisation in QUANTISATIONS {
        for with_residual in [false, true] {
            let shape = (dtype, hidden, tokens);
            let mut case = NormCase::new(&mut random, shape, with_residual, shift);
            let expected = case.expected(case.output.bytes(), quantisation);
            let norm = case.norm(quantisation);
            for block in 0..2 {
                let mut slots = vec![0_u32; 2 * SLOT_BYTES / 4];
                let slots = slots.as_mut_ptr() as u64;
                let outcomes = Team::new(threads_of(hidden as u32), 0).run(|member| {
                    let mut turn = 0;
                    for of in (block..tokens as u32).step_by(2) {
                        let at = At {
                            token: of,
                            slots: slots + turn * SLOT_BYTES as u64,
                            stage: 0,
                        };
                        turn ^= 1;
                        // SAFETY: the launch is laid out for these buffers.
                        unsafe {
                            token::<_, E, false>(member, &norm, at, |place| {
                                Ok(reduced::<_, E>(member, &norm, of, place))
                            })?;
                        }
                    }
                    Ok::<_, Stopped>(())
                });
                assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
            }
            let what = format!("{dtype} {hidden} {quantisation:?} {with_residual} {shift}");
            case.check(&expected, &what);
        }
    }
}

#[test]
fn normalised_tokens_have_the_hosts_bits() {
    norms_tokens::<f32>(DataType::F32, 136, 3, 0);
    norms_tokens::<f32>(DataType::F32, 264, 2, 4);
    norms_tokens::<Bf16>(DataType::Bf16, 520, 3, 0);
    norms_tokens::<Bf16>(DataType::Bf16, 8, 4, 2);
    norms_tokens::<F16>(DataType::F16, 256, 2, 6);
    norms_tokens::<F16>(DataType::F16, 4360, 1, 0);
    norms_tokens::<Bf16>(DataType::Bf16, 12_296, 1, 0);
}

/// Launches of all ranks, blocks and threads at once, across an epoch that ends with clearing.
fn one_shot_norms<E: NormElement<Packed = Piece> + GpuElement>(
    dtype: DataType,
    (hidden, tokens, blocks): (usize, usize, u64),
) {
    let mut random = Random(17);
    let first = (1 << 18) - 2;
    let mut ranks = FusedRanks::new(first);
    let bytes = (hidden * tokens * dtype.size()) as u64;
    let calls = QUANTISATIONS
        .into_iter()
        .flat_map(|q| [(q, false), (q, true)]);
    for (epoch, (quantisation, with_residual)) in (first..).zip(calls) {
        let shape = (dtype, hidden, tokens);
        let data: Vec<_> = (0..FUSED_RANKS)
            .map(|_| moderate(&mut random, dtype, hidden * tokens))
            .collect();
        for (input, data) in ranks.inputs.iter_mut().zip(&data) {
            // SAFETY: it has room for the largest message.
            unsafe { Raw.copy(input.addr(), data.as_ptr() as u64, bytes) };
        }
        let sums = reference(dtype, ReduceOp::Sum, FUSED_RANKS, &data);
        let seed = random.next();
        // The same on every rank.
        let mut cases: Vec<_> = (0..FUSED_RANKS)
            .map(|_| NormCase::new(&mut Random(seed), shape, with_residual, 0))
            .collect();
        let expected = cases[0].expected(&sums, quantisation);
        let launches: Vec<_> = (0..FUSED_RANKS)
            .zip(&mut cases)
            .map(|(rank, case)| OneShotNorm {
                one_shot: ranks.launch(rank, ReduceOp::Sum, bytes, blocks),
                norm: case.norm(quantisation),
            })
            .collect();
        assert!(launches.iter().all(|launch| launch.norm.aligned != 0));
        std::thread::scope(|scope| {
            for launch in &launches {
                for index in 0..blocks as u32 {
                    scope.spawn(move || {
                        let mut slots = vec![0_u32; 2 * SLOT_BYTES / 4];
                        let mut stage = vec![0_u128; hidden * dtype.size() / 16];
                        let near = Near {
                            stage: stage.as_mut_ptr() as u64,
                            slots: slots.as_mut_ptr() as u64,
                        };
                        let team = Team::new(threads_of(hidden as u32), 1 << 20);
                        let outcomes = team.run(|member| {
                            let (at, tables) = ((index, epoch), own(&launch.one_shot));
                            // SAFETY: the launch is laid out for these buffers.
                            unsafe { one_shot_norm::run::<_, E>(member, launch, &tables, at, near) }
                        });
                        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
                    });
                }
            }
        });
        for (rank, case) in cases.iter().enumerate() {
            let what = format!("{dtype} {hidden} {quantisation:?} {with_residual}, rank {rank}");
            case.check(&expected, &what);
            assert_eq!(ranks.counters[rank].word(0), epoch + 1);
            assert!(ranks.packets[rank].intact());
        }
    }
}

#[test]
fn one_shots_that_normalise_have_the_hosts_bits() {
    one_shot_norms::<Bf16>(DataType::Bf16, (264, 5, 2));
    one_shot_norms::<F16>(DataType::F16, (136, 3, 3));
}

/// Two of three ranks have not come; the third one's thread blocks are two warps.
#[test]
fn a_one_shot_that_normalises_ends_its_wait() {
    let mut ranks = FusedRanks::new(9);
    let mut case = NormCase::new(&mut Random(1), (DataType::Bf16, 264, 1), true, 0);
    let launch = OneShotNorm {
        one_shot: ranks.launch(0, ReduceOp::Sum, 528, 1),
        norm: case.norm(Quantisation::PerToken),
    };
    let mut slots = vec![0_u32; 2 * SLOT_BYTES / 4];
    let mut stage = vec![0_u128; 33];
    let near = Near {
        stage: stage.as_mut_ptr() as u64,
        slots: slots.as_mut_ptr() as u64,
    };
    let outcomes = Team::new(64, 5).run(|member| {
        let tables = own(&launch.one_shot);
        // SAFETY: the launch is laid out for these buffers.
        unsafe { one_shot_norm::run::<_, Bf16>(member, &launch, &tables, (0, 9), near) }
    });
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    assert_eq!(ranks.counters[0].word(0), 9);
}
