//! What the tests share: ranks that are threads, tokens and routings that every rank can make for itself, and an
//! independent idea of what a dispatch and a combine do.
#![allow(dead_code, reason = "not every test uses everything")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::Endpoint;
use crossweft_hal::Device;
use crossweft_moe::DataType;
use crossweft_net::{Group as Job, JoinOptions, Rendezvous, RendezvousOptions};
use half::{bf16, f16};

/// Runs `rank_main` on a thread for each rank; results in rank order.
pub(crate) fn job<T: Send>(ranks: u32, rank_main: impl Fn(&Arc<Endpoint>) -> T + Sync) -> Vec<T> {
    job_on(&Device::Cpu, ranks, rank_main)
}

/// The same with all ranks on a device.
pub(crate) fn job_on<T: Send>(
    device: &Device,
    ranks: u32,
    rank_main: impl Fn(&Arc<Endpoint>) -> T + Sync,
) -> Vec<T> {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let id = rendezvous.unique_id();
    let one = |rank| {
        let job = Job::join(&id, rank, ranks, &JoinOptions::default()).unwrap();
        let endpoint = Endpoint::on(device.clone(), Arc::new(job), soon()).unwrap();
        rank_main(&endpoint)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || one(rank)))
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect()
    })
}

/// A deadline that is not to expire.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// splitmix64: the same numbers on every run.
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// From -1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// An element's bytes, rounded to nearest even.
pub(crate) fn encode(dtype: DataType, value: f32) -> Vec<u8> {
    match dtype {
        DataType::Bf16 => bf16::from_f32(value).to_ne_bytes().to_vec(),
        DataType::F16 => f16::from_f32(value).to_ne_bytes().to_vec(),
        DataType::F32 => value.to_ne_bytes().to_vec(),
        other => panic!("{other}"),
    }
}

/// The elements that bytes hold.
pub(crate) fn decode(dtype: DataType, bytes: &[u8]) -> Vec<f32> {
    let two = || bytes.chunks_exact(2).map(|x| [x[0], x[1]]);
    match dtype {
        DataType::Bf16 => two().map(|x| bf16::from_ne_bytes(x).to_f32()).collect(),
        DataType::F16 => two().map(|x| f16::from_ne_bytes(x).to_f32()).collect(),
        DataType::F32 => bytes
            .chunks_exact(4)
            .map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]))
            .collect(),
        other => panic!("{other}"),
    }
}

/// Half a unit in the last place of 1.
pub(crate) fn roundoff(dtype: DataType) -> f64 {
    match dtype {
        DataType::Bf16 => 2_f64.powi(-8),
        DataType::F16 => 2_f64.powi(-11),
        DataType::F32 => 2_f64.powi(-24),
        other => panic!("{other}"),
    }
}

/// Where tokens go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Skew {
    /// Anywhere, also several times to one expert, and to none.
    Random,
    /// All to one expert.
    One(u32),
    /// Mostly to few.
    Few,
    /// Nowhere.
    Nowhere,
}

/// A job of one shape, of which every rank can tell what all others do.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: u32,
    pub(crate) experts: u32,
    pub(crate) hidden: u32,
    pub(crate) top_k: u32,
    pub(crate) max_tokens: u32,
    pub(crate) dtype: DataType,
    pub(crate) skew: Skew,
    pub(crate) seed: u64,
    /// Ranks that have no tokens.
    pub(crate) idle: Vec<u32>,
}

/// A rank's tokens and where they go.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) count: usize,
    pub(crate) tokens: Vec<u8>,
    pub(crate) experts: Vec<i32>,
    pub(crate) weights: Vec<f32>,
}

impl Case {
    /// Small and even.
    pub(crate) fn new(ranks: u32) -> Self {
        Self {
            ranks,
            experts: 2 * ranks + 1,
            hidden: 40,
            top_k: 3,
            max_tokens: 9,
            dtype: DataType::Bf16,
            skew: Skew::Random,
            seed: 1,
            idle: Vec::new(),
        }
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden as usize * self.dtype.size()
    }

    /// The rank that has an expert, as documented: equally many, the first ranks one more.
    pub(crate) fn rank_of(&self, expert: i32) -> Option<u32> {
        let mut first = 0;
        for rank in 0..self.ranks {
            let count = self.experts / self.ranks + u32::from(rank < self.experts % self.ranks);
            if (first as i32..(first + count) as i32).contains(&expert) {
                return Some(rank);
            }
            first += count;
        }
        None
    }

    pub(crate) fn first_expert(&self, rank: u32) -> i32 {
        let of_rank = |expert: &i32| self.rank_of(*expert) == Some(rank);
        (0..self.experts as i32).find(of_rank).unwrap_or(0)
    }

    /// Batch number `step` of a rank.
    pub(crate) fn batch(&self, rank: u32, step: u64) -> Batch {
        let mut random = Random(self.seed ^ step << 20 ^ u64::from(rank) << 40);
        let count = match self.idle.contains(&rank) {
            true => 0,
            // Sometimes as many as can be.
            false => (random.below(u64::from(self.max_tokens) + 3) as u32).min(self.max_tokens),
        } as usize;
        let experts = u64::from(self.experts);
        let choose = |random: &mut Random| match self.skew {
            Skew::Random => random.below(experts + 1) as i32 - 1,
            Skew::One(expert) => expert as i32,
            Skew::Few => (random.below(experts) * random.below(experts) / experts) as i32,
            Skew::Nowhere => -1,
        };
        let elements = count * self.hidden as usize;
        let tokens = (0..elements)
            .flat_map(|_| encode(self.dtype, random.unit()))
            .collect();
        let choices = count * self.top_k as usize;
        Batch {
            count,
            tokens,
            experts: (0..choices).map(|_| choose(&mut random)).collect(),
            weights: (0..choices).map(|_| random.unit()).collect(),
        }
    }

    /// What an expert makes of a token.
    pub(crate) fn expert(&self, expert: i32, token: &[u8]) -> Vec<u8> {
        let factor = 0.5 + (expert % 7) as f32 * 0.25;
        decode(self.dtype, token)
            .into_iter()
            .flat_map(|x| encode(self.dtype, x * factor + 0.125))
            .collect()
    }

    /// The tokens of `source` that are for an expert, once each, with the sum of their weights for it.
    pub(crate) fn for_expert(&self, source: u32, step: u64, expert: i32) -> Vec<(usize, f32)> {
        let batch = self.batch(source, step);
        let each = self.top_k as usize;
        (0..batch.count)
            .filter_map(|token| {
                let choices = token * each..(token + 1) * each;
                let mut weights = choices
                    .filter(|&choice| batch.experts[choice] == expert)
                    .map(|choice| batch.weights[choice]);
                let first = weights.next()?;
                Some((token, weights.fold(first, |sum, weight| sum + weight)))
            })
            .collect()
    }

    /// The tokens of `source` that are for any expert of `rank`.
    pub(crate) fn for_rank(&self, source: u32, step: u64, rank: u32) -> Vec<usize> {
        let batch = self.batch(source, step);
        let each = self.top_k as usize;
        (0..batch.count)
            .filter(|token| {
                let choices = &batch.experts[token * each..(token + 1) * each];
                choices.iter().any(|&e| self.rank_of(e) == Some(rank))
            })
            .collect()
    }

    /// Asserts that `combined` is what all experts, but those of `without`, make of a batch, within what rounding may
    /// change.
    pub(crate) fn assert_combined(
        &self,
        (rank, step): (u32, u64),
        combined: &[u8],
        without: &[u32],
    ) {
        let batch = self.batch(rank, step);
        let combined = decode(self.dtype, combined);
        let (hidden, each) = (self.hidden as usize, self.top_k as usize);
        assert_eq!(combined.len(), batch.count * hidden);
        for token in 0..batch.count {
            let bytes = &batch.tokens[token * self.row_bytes()..][..self.row_bytes()];
            let mut of_ranks = vec![vec![0.0_f64; hidden]; self.ranks as usize];
            let mut magnitude = vec![0.0_f64; hidden];
            for choice in token * each..(token + 1) * each {
                let (expert, weight) = (batch.experts[choice], batch.weights[choice]);
                let Some(owner) = self.rank_of(expert).filter(|r| !without.contains(r)) else {
                    continue;
                };
                let made = decode(self.dtype, &self.expert(expert, bytes));
                for (i, &x) in made.iter().enumerate() {
                    let product = f64::from(weight) * f64::from(x);
                    of_ranks[owner as usize][i] += product;
                    magnitude[i] += product.abs();
                }
            }
            let u = roundoff(self.dtype);
            for i in 0..hidden {
                let exact: f64 = of_ranks.iter().map(|sums| sums[i]).sum();
                let partial: f64 = of_ranks.iter().map(|sums| sums[i].abs()).sum();
                // Each rank's sum and the last are rounded to the type, and every step to f32; f16 has a least step.
                let f32s = (f64::from(self.top_k) + 18.0) * 2_f64.powi(-24) * magnitude[i];
                let bound = u * 1.01 * (partial + exact.abs()) + f32s + 2_f64.powi(-23);
                let found = f64::from(combined[token * hidden + i]);
                assert!(
                    (found - exact).abs() <= bound,
                    "rank {rank} token {token} element {i}: {found}, not {exact} (within {bound}), {self:?}"
                );
            }
        }
    }
}

pub(crate) fn fill<T: Copy>(value: T, count: u64) -> Vec<T> {
    vec![value; usize::try_from(count).unwrap()]
}
