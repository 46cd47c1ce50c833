//! Tokens and where they go, which every rank can make for itself, and what must come of them.
//!
//! The reference is dense: it goes over all tokens of all ranks and all of their experts, in numbers for which everything
//! but the documented roundings is exact. Elements are multiples of 1/64 and weights of 1/256, and an expert multiplies by a
//! power of two, so sums in f32 are exact in any order. What travels plain is compared bit for bit; what is quantised,
//! within what the quantisation may change.

use crossweft_collective::DataType;
use crossweft_moe::{Counts, Layout, ScaleType};
use float8::F8E4M3;
use half::{bf16, f16};

/// Elements that share a scale.
const GROUP: usize = 128;
/// The largest number of f8e4m3.
const LARGEST: f64 = 448.0;

/// Experts of tokens that were recorded somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recorded {
    top_k: u32,
    experts: Vec<i32>,
}

impl Recorded {
    /// Reads a token a line, its experts separated by spaces or commas; `#` begins a comment.
    pub(crate) fn parse(text: &str, experts: u32) -> Result<Self, String> {
        let mut found = Self {
            top_k: 0,
            experts: Vec::new(),
        };
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let words = line.split(|c: char| c == ',' || c.is_whitespace());
            let mut count = 0;
            for word in words.filter(|word| !word.is_empty()) {
                let expert = word.parse().ok();
                let expert = expert.filter(|e| (-1..i64::from(experts)).contains(e));
                let expert = expert.ok_or_else(|| {
                    format!(
                        "line {number}: {word}; experts are 0 to {}, and -1 for none",
                        experts - 1
                    )
                })?;
                found.experts.push(expert as i32);
                count += 1;
            }
            if found.top_k == 0 {
                found.top_k = count;
            }
            if count != found.top_k || count > 32 {
                return Err(format!(
                    "line {number} has {count} experts; all must have equally many, 32 at most, as the first has {}",
                    found.top_k
                ));
            }
        }
        match found.top_k {
            0 => Err("there are no tokens in it".to_owned()),
            _ => Ok(found),
        }
    }

    /// Experts of each token.
    pub(crate) fn top_k(&self) -> u32 {
        self.top_k
    }

    /// The experts of `count` tokens from number `first` on; after the last comes the first.
    fn tokens(&self, first: usize, count: usize) -> Vec<i32> {
        let each = self.top_k as usize;
        let tokens = self.experts.chunks_exact(each).cycle();
        let first = first % (self.experts.len() / each);
        tokens.skip(first).take(count).flatten().copied().collect()
    }
}

/// What all sizes have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) ranks: u32,
    pub(crate) experts: u32,
    pub(crate) hidden: u32,
    pub(crate) top_k: u32,
    pub(crate) dtype: DataType,
    pub(crate) seed: u64,
}

/// Where tokens go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route<'a> {
    /// Expert e as often as 1/(e+1) to this power says.
    Zipf(f64),
    Recorded(&'a Recorded),
}

/// The tokens of all ranks, equally many each.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) shape: Shape,
    pub(crate) tokens: usize,
    /// For each rank `[tokens, top-k]`.
    experts: Vec<Vec<i32>>,
    weights: Vec<Vec<f32>>,
}

/// splitmix64.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Batch {
    pub(crate) fn new(shape: Shape, route: Route<'_>, tokens: u32) -> Self {
        let tokens = tokens as usize;
        let each = shape.top_k as usize;
        let experts = (0..shape.ranks as usize).map(|rank| match route {
            Route::Recorded(recorded) => recorded.tokens(rank * tokens, tokens),
            Route::Zipf(exponent) => shape.zipf(exponent, rank, tokens),
        });
        let weights = (0..u64::from(shape.ranks)).map(|rank| {
            let seed = mix(shape.seed ^ mix(rank) ^ 1);
            let weight = |k| (mix(seed ^ k) % 255 + 1) as f32 / 256.0;
            (0..(tokens * each) as u64).map(weight).collect()
        });
        Self {
            shape,
            tokens,
            experts: experts.collect(),
            weights: weights.collect(),
        }
    }

    /// Tokens that there is room for: a group is for one at least.
    pub(crate) fn room(&self) -> usize {
        self.tokens.max(1)
    }

    pub(crate) fn experts(&self, rank: u32) -> &[i32] {
        &self.experts[rank as usize]
    }

    pub(crate) fn weights(&self, rank: u32) -> &[f32] {
        &self.weights[rank as usize]
    }

    /// A rank's tokens, as they are sent.
    pub(crate) fn sent(&self, rank: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.tokens * self.shape.row_bytes());
        for token in 0..self.tokens {
            self.shape.encode(&self.token(rank, token), &mut bytes);
        }
        bytes
    }

    fn token(&self, rank: u32, token: usize) -> Vec<f32> {
        let seed = mix(self.shape.seed ^ mix(u64::from(rank) << 32 ^ token as u64));
        let element = |i: usize| {
            // Eight numbers of each word.
            let word = mix(seed ^ (i / 8) as u64);
            f32::from((word >> (8 * (i % 8))) as u8 as i8) / 64.0
        };
        (0..self.shape.hidden as usize).map(element).collect()
    }

    /// Each choice of a token: its expert, unless it is none, and its weight.
    fn choices(&self, rank: u32, token: usize) -> impl Iterator<Item = (Option<u32>, f32)> {
        let each = self.shape.top_k as usize;
        let those = token * each..(token + 1) * each;
        let weights = &self.weights(rank)[those.clone()];
        let experts = &self.experts(rank)[those];
        experts
            .iter()
            .map(|&expert| u32::try_from(expert).ok())
            .zip(weights.iter().copied())
    }

    /// The tokens of `source` that are for any expert for which `is` holds.
    fn tokens_for(&self, source: u32, is: impl Fn(u32) -> bool) -> Vec<usize> {
        let any = |token: &usize| {
            self.choices(source, *token)
                .any(|(e, _)| e.is_some_and(&is))
        };
        (0..self.tokens).filter(any).collect()
    }

    /// The tokens of each rank that are for `rank`: as many rows cross.
    pub(crate) fn rows_to(&self, rank: u32) -> usize {
        let is = |expert| self.shape.rank_of(expert) == rank;
        let sources = 0..self.shape.ranks;
        sources.map(|s| self.tokens_for(s, is).len()).sum()
    }

    /// Checks what has arrived on `rank`, and lets its experts compute: what is wrong, and what they made.
    pub(crate) fn arrived(
        &self,
        rank: u32,
        layout: Layout,
        got: &Arrived<'_>,
    ) -> (Wrong, Computed) {
        let shape = &self.shape;
        let own = shape.first_expert(rank)..shape.first_expert(rank + 1);
        let tokens = shape.ranks as usize * self.room();
        let mut made = Made::new(self, rank, got);
        let mut row = 0;
        if layout.is_by_expert() {
            for (local, expert) in own.enumerate() {
                if layout == Layout::ExpertMajor {
                    row = local * tokens;
                }
                let begin = row;
                for source in 0..shape.ranks {
                    for token in self.tokens_for(source, |e| e == expert) {
                        made.row(row, (source, token), |e| e == expert);
                        row += 1;
                    }
                }
                made.wrong.unless(
                    got.counts.per_expert().get(local) == Some(&((row - begin) as u32)),
                    || format!("the count of local expert {local}"),
                );
            }
        } else {
            for source in 0..shape.ranks {
                if layout == Layout::RankMajor {
                    row = source as usize * self.room();
                }
                let for_us = self.tokens_for(source, |e| shape.rank_of(e) == rank);
                made.wrong.unless(
                    got.counts.per_source().get(source as usize) == Some(&(for_us.len() as u32)),
                    || format!("the count of rank {source}"),
                );
                for token in for_us {
                    made.row(row, (source, token), |e| shape.rank_of(e) == rank);
                    row += 1;
                }
            }
        }
        let rows = match layout {
            Layout::ExpertMajor => {
                (shape.first_expert(rank + 1) - shape.first_expert(rank)) as usize * tokens
            }
            Layout::RankMajor => tokens,
            _ => row,
        };
        let found = got.counts.rows();
        made.wrong.unless(found == rows as u64, || {
            format!("{found} rows instead of {rows}")
        });
        (made.wrong, made.computed)
    }

    /// Checks what came back to `rank`.
    pub(crate) fn combined(&self, rank: u32, scales: Option<ScaleType>, got: &[u8]) -> Wrong {
        let shape = &self.shape;
        let mut wrong = Wrong::default();
        let u = shape.roundoff();
        for (token, got) in (0..self.tokens).zip(got.chunks_exact(shape.row_bytes())) {
            let x = self.token(rank, token);
            // Of each rank, what its experts multiply by, all in all.
            let mut factors = vec![0.0_f32; shape.ranks as usize];
            let mut magnitude = 0.0;
            for (expert, weight) in self.choices(rank, token) {
                let Some(expert) = expert else { continue };
                factors[shape.rank_of(expert) as usize] += weight * factor(expert);
                magnitude += f64::from((weight * factor(expert)).abs());
            }
            let expected = |x: f32| {
                let of_ranks = factors.iter().map(|factor| shape.round(factor * x));
                shape.round(of_ranks.sum())
            };
            let got = shape.decode(got);
            let groups = x.chunks(GROUP).zip(got.chunks(GROUP));
            for (group, (x, got)) in groups.enumerate() {
                let step = scales.map(|scales| Quantised::new(x, scales));
                for (i, (&x, &got)) in x.iter().zip(got).enumerate() {
                    let expected = expected(x);
                    let is_right = match step {
                        None => {
                            expected.to_bits() == got.to_bits() || expected == 0.0 && got == 0.0
                        }
                        Some(step) => {
                            let error = step.error(x);
                            let rounded = 3.0 * u * (f64::from(x).abs() + error);
                            let bound = 1.01 * magnitude * (error + rounded);
                            (f64::from(got) - f64::from(expected)).abs() <= bound
                        }
                    };
                    wrong.unless(is_right, || {
                        let i = group * GROUP + i;
                        format!("token {token}, element {i} combined: {got} instead of {expected}")
                    });
                }
            }
        }
        wrong
    }
}

/// What an expert multiplies by: a power of two, so that it rounds nothing.
fn factor(expert: u32) -> f32 {
    [1.0, -2.0, 0.5, -1.0, 4.0, -0.25, 2.0][expert as usize % 7]
}

impl Shape {
    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden as usize * self.dtype.size()
    }

    /// Experts are spread evenly, the first ranks have one more where that does not go.
    fn first_expert(&self, rank: u32) -> u32 {
        let (each, more) = (self.experts / self.ranks, self.experts % self.ranks);
        rank * each + rank.min(more)
    }

    fn rank_of(&self, expert: u32) -> u32 {
        let after = |rank: &u32| self.first_expert(rank + 1) > expert;
        (0..self.ranks).find(after).unwrap_or(0)
    }

    /// Different experts for each token: the first of an exponential race in which expert e runs at 1/(e+1)^exponent.
    fn zipf(&self, exponent: f64, rank: usize, tokens: usize) -> Vec<i32> {
        let paces: Vec<f64> = (1..=self.experts)
            .map(|e| f64::from(e).powf(exponent))
            .collect();
        let mut chosen = Vec::with_capacity(tokens * self.top_k as usize);
        let mut arrivals = Vec::with_capacity(paces.len());
        for token in 0..tokens {
            let seed = mix(self.seed ^ mix((rank as u64) << 32 ^ token as u64) ^ 2);
            arrivals.clear();
            arrivals.extend(paces.iter().zip(0_i32..).map(|(pace, expert)| {
                let uniform =
                    ((mix(seed ^ expert as u64) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
                (-uniform.ln() * pace, expert)
            }));
            arrivals.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            chosen.extend(arrivals.iter().take(self.top_k as usize).map(|(_, e)| e));
        }
        chosen
    }

    /// Half a unit in the last place of 1.
    fn roundoff(&self) -> f64 {
        match self.dtype {
            DataType::Bf16 => 2_f64.powi(-8),
            DataType::F16 => 2_f64.powi(-11),
            _ => 2_f64.powi(-24),
        }
    }

    fn round(&self, x: f32) -> f32 {
        match self.dtype {
            DataType::Bf16 => bf16::from_f32(x).to_f32(),
            DataType::F16 => f16::from_f32(x).to_f32(),
            _ => x,
        }
    }

    fn encode(&self, row: &[f32], bytes: &mut Vec<u8>) {
        match self.dtype {
            DataType::Bf16 => {
                bytes.extend(row.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()))
            }
            DataType::F16 => bytes.extend(row.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes())),
            _ => bytes.extend(row.iter().flat_map(|x| x.to_ne_bytes())),
        }
    }

    fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        let two = || bytes.chunks_exact(2).map(|x| [x[0], x[1]]);
        match self.dtype {
            DataType::Bf16 => two().map(|x| bf16::from_ne_bytes(x).to_f32()).collect(),
            DataType::F16 => two().map(|x| f16::from_ne_bytes(x).to_f32()).collect(),
            _ => floats(bytes),
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]))
        .collect()
}

/// How coarse the quantisation of some elements may be.
#[derive(Clone, Copy, Debug)]
struct Quantised {
    scale: f64,
}

impl Quantised {
    fn new(elements: &[f32], scales: ScaleType) -> Self {
        let largest = elements.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let scale = f64::from(largest).max(1e-4) / LARGEST;
        Self {
            scale: match scales {
                ScaleType::Ue8m0 => scale.log2().ceil().exp2(),
                _ => scale,
            },
        }
    }

    /// The most that an element may change: half a step, which is 1/16 of it, or of the least normal number, 1/64; and
    /// a little, for the scale is rounded too.
    fn error(self, x: f32) -> f64 {
        let x = f64::from(x).abs();
        1.001 * (x / 16.0).max(self.scale / 1024.0) + x * 2_f64.powi(-20)
    }
}

/// What a dispatch has laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived<'a> {
    pub(crate) counts: &'a Counts,
    pub(crate) tokens: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) scale_type: Option<ScaleType>,
    /// `[rows, top-k]`, where rows are not grouped by expert.
    pub(crate) experts: &'a [i32],
    pub(crate) weights: &'a [f32],
    pub(crate) sources: &'a [i32],
}

impl Arrived<'_> {
    /// A row's elements, as numbers.
    fn row(&self, shape: &Shape, row: usize) -> Vec<f32> {
        let hidden = shape.hidden as usize;
        let Some(scale_type) = self.scale_type else {
            return shape.decode(&self.tokens[row * shape.row_bytes()..][..shape.row_bytes()]);
        };
        let groups = hidden.div_ceil(GROUP);
        let scales: Vec<f32> = match scale_type {
            ScaleType::Ue8m0 => {
                let each = groups.next_multiple_of(4);
                let bytes = &self.scales[row * each..][..groups];
                bytes
                    .iter()
                    .map(|&b| (f32::from(b) - 127.0).exp2())
                    .collect()
            }
            _ => floats(&self.scales[row * groups * 4..][..groups * 4]),
        };
        let elements = &self.tokens[row * hidden..][..hidden];
        elements
            .iter()
            .enumerate()
            .map(|(i, &x)| F8E4M3::from_bits(x).to_f32() * scales[i / GROUP])
            .collect()
    }
}

/// What experts have made, as it was laid out.
#[derive(Debug, Default)]
pub(crate) struct Computed {
    pub(crate) rows: Vec<u8>,
    /// Which rows there are: elsewhere are gaps, whose memory nobody touches.
    pub(crate) used: Vec<usize>,
}

/// The same of the rows checked so far.
struct Made<'a> {
    batch: &'a Batch,
    rank: u32,
    got: &'a Arrived<'a>,
    computed: Computed,
    wrong: Wrong,
}

impl<'a> Made<'a> {
    fn new(batch: &'a Batch, rank: u32, got: &'a Arrived<'a>) -> Self {
        let rows = got.counts.rows() as usize;
        Self {
            batch,
            rank,
            got,
            computed: Computed {
                rows: vec![0; rows * batch.shape.row_bytes()],
                used: Vec::new(),
            },
            wrong: Wrong::default(),
        }
    }

    /// `row` must be this token, for the experts for which `is` holds.
    fn row(&mut self, row: usize, (source, token): (u32, usize), is: impl Fn(u32) -> bool) {
        let (shape, got) = (&self.batch.shape, self.got);
        let place = row * shape.row_bytes()..(row + 1) * shape.row_bytes();
        if got.sources.get(row) != Some(&(token as i32)) || self.computed.rows.len() < place.end {
            self.wrong
                .add(|| format!("row {row} is not token {token} of rank {source}"));
            return;
        }
        let sent = self.batch.token(source, token);
        let x = got.row(shape, row);
        for (group, (sent, x)) in sent.chunks(GROUP).zip(x.chunks(GROUP)).enumerate() {
            let step = got.scale_type.map(|scales| Quantised::new(sent, scales));
            for (i, (&sent, &x)) in sent.iter().zip(x).enumerate() {
                let is_right = match step {
                    None => sent.to_bits() == x.to_bits(),
                    Some(step) => f64::from((x - sent).abs()) <= step.error(sent),
                };
                self.wrong.unless(is_right, || {
                    let i = group * GROUP + i;
                    format!("token {token} of rank {source}, element {i}: {x} instead of {sent}")
                });
            }
        }
        let each = shape.top_k as usize;
        let (mut all, mut weights) = (0.0_f32, 0.0_f32);
        for (k, (expert, weight)) in self.batch.choices(source, token).enumerate() {
            let ours = expert.filter(|e| is(*e));
            if let Some(expert) = ours {
                all += weight * factor(expert);
                weights += weight;
            }
            if got.experts.is_empty() {
                continue;
            }
            let first = shape.first_expert(self.rank) as i32;
            let expected = ours.map_or((-1, 0.0), |expert| (expert as i32 - first, weight));
            let at = row * each + k;
            let found = (got.experts[at], got.weights[at]);
            self.wrong.unless(found == expected, || {
                format!("choice {k} of row {row}: {found:?} instead of {expected:?}")
            });
        }
        if got.experts.is_empty() {
            let found = got.weights[row];
            self.wrong.unless(found.to_bits() == weights.to_bits(), || {
                format!("weight of row {row}: {found} instead of {weights}")
            });
            // The combine multiplies by weights.
            all = self
                .batch
                .choices(source, token)
                .find_map(|(e, _)| e.filter(|e| is(*e)))
                .map_or(0.0, factor);
        }
        let made: Vec<f32> = x.into_iter().map(|x| x * all).collect();
        let mut bytes = Vec::with_capacity(place.len());
        shape.encode(&made, &mut bytes);
        self.computed.rows[place].copy_from_slice(&bytes);
        self.computed.used.push(row);
    }
}

/// What is not as it must be.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wrong {
    pub(crate) count: u64,
    /// The first, in words.
    pub(crate) first: Option<String>,
}

impl Wrong {
    fn add(&mut self, words: impl FnOnce() -> String) {
        self.count += 1;
        self.first.get_or_insert_with(words);
    }

    pub(crate) fn add_all(&mut self, other: Self) {
        self.count += other.count;
        self.first = self.first.take().or(other.first);
    }

    fn unless(&mut self, is_right: bool, words: impl FnOnce() -> String) {
        if !is_right {
            self.add(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        ranks: 3,
        experts: 16,
        hidden: 16,
        top_k: 4,
        dtype: DataType::Bf16,
        seed: 7,
    };

    #[test]
    fn a_token_has_different_experts_and_skew_prefers_the_first() {
        let share = |exponent| {
            let batch = Batch::new(SHAPE, Route::Zipf(exponent), 500);
            let chosen = batch.experts(1);
            assert_eq!(chosen.len(), 2000);
            for token in chosen.chunks_exact(4) {
                let mut token = token.to_vec();
                token.sort_unstable();
                token.dedup();
                assert_eq!(token.len(), 4);
                assert!(token.iter().all(|e| (0..16).contains(e)));
            }
            chosen.iter().filter(|e| **e == 0).count()
        };
        // A quarter of the tokens, within six standard deviations, and nearly all of them.
        assert!((67..183).contains(&share(0.0)), "{}", share(0.0));
        assert!(share(3.0) > 480, "{}", share(3.0));
    }

    #[test]
    fn recorded_tokens_go_round() {
        let recorded = Recorded::parse("0 1 # first\n\n2,-1\n3, 3\n", 4).unwrap();
        assert_eq!(recorded.top_k(), 2);
        assert_eq!(recorded.tokens(4, 3), [2, -1, 3, 3, 0, 1]);
        for (text, words) in [
            ("", "no tokens"),
            ("# nothing", "no tokens"),
            ("0 1\n0", "line 2 has 1"),
            ("0 4", "line 1: 4"),
            ("0 -2", "line 1: -2"),
            ("0 x", "line 1: x"),
        ] {
            let error = Recorded::parse(text, 4).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn a_wrong_sum_is_found() {
        for dtype in [DataType::Bf16, DataType::F16, DataType::F32] {
            let batch = Batch::new(Shape { dtype, ..SHAPE }, Route::Zipf(0.0), 3);
            let shape = &batch.shape;
            let mut right = Vec::new();
            for token in 0..3 {
                // The other way round: for each expert, not for each rank.
                let mut sums = vec![vec![0.0_f64; 16]; 3];
                for (expert, weight) in batch.choices(2, token) {
                    let expert = expert.unwrap();
                    for (sum, x) in sums[shape.rank_of(expert) as usize]
                        .iter_mut()
                        .zip(batch.token(2, token))
                    {
                        *sum += f64::from(weight) * f64::from(factor(expert)) * f64::from(x);
                    }
                }
                let sum = |i: usize| {
                    sums.iter()
                        .map(|of_rank| shape.round(of_rank[i] as f32))
                        .sum()
                };
                let row: Vec<f32> = (0..16).map(sum).collect();
                shape.encode(&row, &mut right);
            }
            assert_eq!(batch.combined(2, None, &right).count, 0);
            right[0] ^= 1;
            let wrong = batch.combined(2, None, &right);
            assert_eq!(wrong.count, 1);
            assert!(wrong.first.unwrap().starts_with("token 0, element 0"));
        }
    }
}
