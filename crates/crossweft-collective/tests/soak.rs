//! Many all-reduces of random sizes, types and operations between four processes: every element
//! right, and no memory lost.
//!
//! `CROSSWEFT_SOAK_CALLS=1000000 cargo test --release -p crossweft-collective --test soak --
//! --nocapture` is the long one; `CROSSWEFT_SOAK_SEED` repeats a run.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Footprint, Ranks};
use crossweft_collective::{
    Algorithm, AllReduce, AllReduceOptions, Communicator, CommunicatorOptions, DataType, ReduceOp,
    SymmetricBuffer,
};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions, UniqueId};
use crossweft_verify::{Pattern, fill, fingerprint, reference_all_reduce};

const RANKS: u32 = 4;
const MAX_BYTES: usize = 1 << 20;
/// Calls between two comparisons of what the ranks have got.
const COMPARED: u64 = 500;
/// What the allocator may keep.
const SLACK_KIB: u64 = 4096;

const DTYPES: [DataType; 14] = [
    DataType::I8,
    DataType::U8,
    DataType::I16,
    DataType::U16,
    DataType::I32,
    DataType::U32,
    DataType::I64,
    DataType::U64,
    DataType::F16,
    DataType::Bf16,
    DataType::F32,
    DataType::F64,
    DataType::F8E4M3,
    DataType::F8E5M2,
];
const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
];

#[test]
fn random_all_reduces_are_right_and_memory_is_flat() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let calls = number("CROSSWEFT_SOAK_CALLS").unwrap_or(4000);
    let Some(rank) = common::rank() else {
        let seed = number("CROSSWEFT_SOAK_SEED").unwrap_or_else(|| {
            let now = std::time::SystemTime::now();
            now.duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_millis() as u64
        });
        println!("soak: {calls} calls, CROSSWEFT_SOAK_SEED={seed}");
        let mut ranks = Ranks::start("random_all_reduces_are_right_and_memory_is_flat", RANKS);
        let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
        ranks.tell(&rendezvous.unique_id().to_string());
        ranks.tell(&seed.to_string());
        rendezvous.wait().unwrap();
        return ranks.wait();
    };
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let id: UniqueId = lines.next().unwrap().parse().unwrap();
    let seed = lines.next().unwrap().parse().unwrap();
    let group = Group::join(&id, rank, RANKS, &JoinOptions::default()).unwrap();
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(300),
    };
    let communicator = Communicator::new(Arc::new(group), options).unwrap();
    Soak::prepare(&communicator, seed).run(calls);
}

/// An all-reduce that was prepared, and where its buffers lie.
struct Prepared {
    dtype: DataType,
    op: ReduceOp,
    symmetric: bool,
    all_reduce: AllReduce,
}

struct Soak<'a> {
    communicator: &'a Communicator,
    seed: u64,
    random: Random,
    prepared: Vec<Prepared>,
    buffer: SymmetricBuffer,
    input: Vec<u8>,
    output: Vec<u8>,
    expected: Vec<u8>,
    /// Of everything that this rank has got since the last comparison.
    got: u64,
    bytes: u64,
}

impl<'a> Soak<'a> {
    /// Every type with two operations in private memory and one in symmetric, and every algorithm.
    fn prepare(communicator: &'a Communicator, seed: u64) -> Self {
        // Offsets of up to 64 bytes into it.
        let buffer = communicator.allocate(MAX_BYTES as u64 + 64).unwrap();
        let mut prepared = Vec::new();
        let mut add = |dtype, op, algorithm: Option<Algorithm>, symmetric| {
            let mut options = AllReduceOptions::new(dtype, op, MAX_BYTES as u64);
            options.algorithm = algorithm;
            if symmetric {
                options = options.symmetric(&buffer, &buffer);
            }
            let all_reduce = communicator.all_reduce(options).unwrap();
            prepared.push(Prepared {
                dtype,
                op,
                symmetric,
                all_reduce,
            });
        };
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            add(dtype, OPS[i % 5], None, false);
            add(dtype, OPS[(i + 2) % 5], None, false);
            add(dtype, OPS[(i + 1) % 5], None, true);
        }
        for algorithm in Algorithm::ALL {
            let symmetric = algorithm.needs_registered();
            add(DataType::F32, ReduceOp::Sum, Some(algorithm), symmetric);
        }
        Self {
            communicator,
            seed,
            random: Random(seed | 1),
            prepared,
            buffer,
            input: vec![0; MAX_BYTES + 64],
            output: vec![0; MAX_BYTES + 64],
            expected: vec![0; MAX_BYTES],
            got: 0,
            bytes: 0,
        }
    }

    fn run(mut self, calls: u64) {
        let rank = self.communicator.rank();
        let started = Instant::now();
        let (mut warm, mut reported) = (None, started);
        for call in 0..calls {
            if call == calls / 5 {
                warm = Some(Footprint::now());
            }
            self.call(call);
            if (call + 1) % COMPARED == 0 || call + 1 == calls {
                self.compare(call);
            }
            if rank == 0 && reported.elapsed() > Duration::from_secs(5) {
                reported = Instant::now();
                println!(
                    "soak: {} of {calls} calls, {} MiB, {:.0} s",
                    call + 1,
                    self.bytes >> 20,
                    started.elapsed().as_secs_f64()
                );
            }
        }
        let end = Footprint::now();
        end.assert_flat(&warm.unwrap(), SLACK_KIB);
        if rank == 0 {
            let seconds = started.elapsed().as_secs_f64();
            let mib = self.bytes >> 20;
            println!("soak: {calls} calls, {mib} MiB, {seconds:.1} s, 0 wrong");
            println!(
                "soak: after a fifth {:?}\nsoak: at the end   {end:?}",
                warm.unwrap()
            );
        }
    }

    /// One all-reduce that all ranks draw alike.
    fn call(&mut self, call: u64) {
        let which = self.random.below(self.prepared.len() as u64) as usize;
        let bytes = self.random.size();
        let (shift, in_place) = (self.random.below(8), self.random.below(2) == 0);
        let Prepared {
            dtype,
            op,
            symmetric,
            all_reduce,
        } = &self.prepared[which];
        let size = dtype.size();
        let (bytes, shift) = (bytes / size * size, shift as usize * size);
        let (rank, seed) = (self.communicator.rank(), self.seed.wrapping_add(call));
        let input = &mut self.input[shift..shift + bytes];
        fill(Pattern::Exact, *dtype, *op, seed, rank, RANKS, input);
        // What the last call left must not be taken for a result.
        let output = &mut self.output[shift..shift + bytes];
        output.fill(0xa5);
        if *symmetric {
            self.buffer.write(shift as u64, input).unwrap();
            let result = all_reduce.run_symmetric(shift as u64, shift as u64, bytes as u64);
            result.unwrap();
            self.buffer.read(shift as u64, output).unwrap();
        } else if in_place {
            output.copy_from_slice(input);
            all_reduce.run_in_place(output).unwrap();
        } else {
            all_reduce.run(input, output).unwrap();
        }

        // Each rank checks its share; that the rest is the same everywhere is seen in `compare`.
        let count = bytes / size;
        let share = |rank: u32| count * rank as usize / RANKS as usize;
        let (first, end) = (share(rank), share(rank + 1));
        let expected = &mut self.expected[..(end - first) * size];
        reference_all_reduce(
            Pattern::Exact,
            *dtype,
            *op,
            seed,
            RANKS,
            first as u64,
            expected,
        );
        let right = output[first * size..end * size] == *expected;
        let name = &all_reduce.explain(bytes as u64).algorithm;
        assert!(
            right,
            "rank {rank}, call {call} of seed {}: {dtype} {op} of {bytes} bytes by {name} is wrong",
            self.seed
        );
        self.got = self.got.rotate_left(1) ^ fingerprint(output);
        self.bytes += bytes as u64;
    }

    /// All ranks have the same bits.
    fn compare(&mut self, call: u64) {
        let all = self.communicator.all_gather_bytes(&self.got.to_le_bytes());
        let all = all.unwrap();
        let same = all.iter().all(|got| *got == all[0]);
        assert!(
            same,
            "up to call {call} of seed {}: ranks have different bits",
            self.seed
        );
        self.got = 0;
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Mostly small, sometimes large, seldom round.
    fn size(&mut self) -> usize {
        let limit = match self.below(200) {
            0..=119 => 300,
            120..=179 => 5_000,
            180..=197 => 70_000,
            _ => MAX_BYTES as u64,
        };
        self.below(limit + 1) as usize
    }
}
