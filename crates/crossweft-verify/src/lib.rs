//! Test patterns and an independent reference for the results of collectives.
//!
//! Tests and benches [`fill`] every rank's input, run a collective, and hand the output to
//! [`check_all_reduce`], [`check_reduce_scatter`], [`check_reduction`] or [`check_copies`]; [`PreMultiplied`] is both
//! for sums of products, [`RmsNorm`] for what may follow a sum. [`fingerprint`] tells cheaply whether two
//! ranks hold the same bits.
//!
//! The crate shares the names of data types and operations with `crossweft-device` and none of its
//! arithmetic: small floats are read and rounded by the crates `half` and `float8`, and results are
//! recomputed in 128-bit integers or pairs of `f64`. A mistake would have to be made twice, in two
//! ways, to pass unseen. Newcomers start with `pattern.rs` (what the inputs are), then `element.rs`
//! (what the right answer is).
//!
//! # Patterns
//!
//! An input is a function of the seed, the rank, the element's index, the world size and the
//! operation; nothing is stored, so the checker draws every rank's input again.
//!
//! [`Pattern::Exact`] draws whole numbers such that every partial result, in any order and grouping,
//! is a whole number that the data type holds exactly. No partial result rounds, wraps or saturates,
//! none is -0, and the result is one bit pattern whatever the algorithm:
//!
//! | operation | inputs |
//! |---|---|
//! | sum, avg | not zero, magnitude up to W/n, where W is the largest number that the type counts up to (127 for `i8`, 2048 for `f16`, 8 for `f8e5m2`). Where n > W, W of the ranks hold ±1 and the others 0; which ones they are moves with the index |
//! | prod | three of the ranks, moving with the index, hold magnitudes up to the cube root of W, the others ±1 |
//! | min, max | any bits that are not NaN, infinite or zero (integers: any bits) |
//!
//! The sum of avg is exact too. Its one division is rounded once, so a correct quotient is one bit
//! pattern as well; multiplying by a rounded 1/n is not the documented operation and may differ.
//!
//! [`Pattern::Random`] draws any bits for integers, so sums and products wrap. Floats have random
//! sign and fraction, and magnitudes spread evenly over binades (powers of two):
//!
//! | operation | inputs |
//! |---|---|
//! | sum, avg | eight binades, up to 16 in magnitude, or lower where n of them could pass half of the type's largest value (or fewer binades, where the type has no more): for `f8e4m3` up to 8 at 16 ranks |
//! | prod | five of the ranks, moving with the index, in [0.5, 2); the others ±1 |
//! | min, max | as in Exact |
//!
//! # What is accepted
//!
//! Integers, everything in Exact, and min and max are compared bit for bit. Integer avg is the
//! wrapping sum in the type, divided by n, truncated towards zero.
//!
//! Sums, averages and products of random floats are accepted within a bound on |got − exact| that
//! holds for every order and grouping, whether partial results are kept in `f32` or rounded to the
//! data type at every hop. With n ranks, inputs xᵢ, unit roundoff u (2⁻¹¹ for `f16`, 2⁻⁴ for
//! `f8e4m3`) and smallest subnormal η of the data type:
//!
//! | operation | bound |
//! |---|---|
//! | sum | E = n·u·Σ\|xᵢ\| + n·η |
//! | avg | E/n + u·(\|Σxᵢ\| + E)/n + η |
//! | prod | (k + 1)·u·\|Πxᵢ\|, with k = min(n, 5) ranks that hold more than ±1 |
//!
//! `FloatTotal::bound` in `element.rs` derives them. They hold up to 4096 ranks.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod element;
mod exact;
mod norm;
mod pattern;
#[cfg(test)]
mod tests;

use crossweft_device::{DataType, ReduceOp};
use element::{Element, F8E4M3, F8E5M2, bf16, f16};
pub use norm::RmsNorm;
use pattern::{Step, Task};

/// How inputs are drawn; the crate documentation has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Every partial result is exact, up to 64 ranks: the result is the same bits in any order.
    Exact,
    /// Floats of mixed sign and magnitude, integers of any bits.
    Random,
}

/// How many elements are wrong, and the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatches {
    /// Number of wrong elements.
    pub wrong: u64,
    /// The wrong element of the lowest index.
    pub first: Option<Mismatch>,
}

/// One wrong element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Index of the element.
    pub index: u64,
    /// What it holds: the value and its bits.
    pub got: String,
    /// What it should hold, with the bound where there is one.
    pub expected: String,
}

impl Mismatches {
    fn add(&mut self, describe: impl FnOnce() -> Mismatch) {
        self.wrong += 1;
        self.first.get_or_insert_with(describe);
    }
}

/// Elements handled at a time by the reference: its totals stay in the first-level cache.
const BLOCK: usize = 512;

/// Runs a body with `$T` bound to the element type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr, unknown => $unknown:expr) => {
        with_element!(@ $dtype, $T, $body, $unknown,
            I8 i8, U8 u8, I16 i16, U16 u16, I32 i32, U32 u32, I64 i64, U64 u64,
            F16 f16, Bf16 bf16, F32 f32, F64 f64, F8E4M3 F8E4M3, F8E5M2 F8E5M2)
    };
    (@ $dtype:expr, $T:ident, $body:expr, $unknown:expr, $($name:ident $element:ty),*) => {
        match $dtype {
            $(DataType::$name => { type $T = $element; $body })*
            _ => $unknown,
        }
    };
}

/// Fills `out` with the input of `rank`: elements of `dtype` in native byte order, at any alignment.
///
/// The input depends on nothing but the arguments. Bytes after the last whole element are left as
/// they are. A data type or operation newer than this crate gives zeros, which
/// [`check_all_reduce`] then refuses.
pub fn fill(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    seed: u64,
    rank: u32,
    world_size: u32,
    out: &mut [u8],
) {
    let Some(task) = Task::new(pattern, op, seed, world_size) else {
        return out.fill(0);
    };
    with_element!(dtype,
        T => pattern::draw::<T>(&task, rank, 0, T::chunks_mut(out)),
        unknown => out.fill(0));
}

/// Writes what an all-reduce gives for the elements from index `first` on: the exact result, reduced
/// in rank order and rounded once to `dtype`.
///
/// What cannot be computed is left or zeroed as by [`fill`].
pub fn reference_all_reduce(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    seed: u64,
    world_size: u32,
    first: u64,
    out: &mut [u8],
) {
    let Some(task) = Task::new(pattern, op, seed, world_size) else {
        return out.fill(0);
    };
    with_element!(dtype,
        T => {
            let mut totals = Totals::<T>::new(&task);
            let inputs = everyone(&task, first);
            let mut index = 0;
            for block in T::chunks_mut(out).chunks_mut(BLOCK) {
                for (&total, slot) in totals.of(&inputs, index, block.len()).iter().zip(block.iter_mut()) {
                    *slot = T::result(total, &task).to_bytes();
                }
                index += BLOCK as u64;
            }
        },
        unknown => out.fill(0));
}

/// Compares the output of an all-reduce over inputs made by [`fill`] with the reference.
///
/// `got` is one rank's whole output. Bytes after the last whole element count as one wrong element,
/// and so does everything of a data type or operation newer than this crate. A `world_size` of 0 is
/// taken as 1.
#[must_use]
pub fn check_all_reduce(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    seed: u64,
    world_size: u32,
    got: &[u8],
) -> Mismatches {
    let Some(task) = Task::new(pattern, op, seed, world_size) else {
        return unknown(dtype, op, got);
    };
    let inputs = everyone(&task, 0);
    with_element!(dtype, T => check::<T>(&task, &inputs, got), unknown => unknown(dtype, op, got))
}

/// All ranks' inputs from an element on.
fn everyone(task: &Task, first: u64) -> Vec<(u32, u64)> {
    (0..task.world_size).map(|rank| (rank, first)).collect()
}

/// [`check_all_reduce`] for a reduce-scatter: `got` is the output of `rank`, the reduction of that
/// block of every rank's input, which is as many blocks long as there are ranks.
#[must_use]
pub fn check_reduce_scatter(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    seed: u64,
    rank: u32,
    world_size: u32,
    got: &[u8],
) -> Mismatches {
    let Some(task) = Task::new(pattern, op, seed, world_size) else {
        return unknown(dtype, op, got);
    };
    let inputs = everyone(&task, u64::from(rank) * (got.len() / dtype.size()) as u64);
    with_element!(dtype, T => check::<T>(&task, &inputs, got), unknown => unknown(dtype, op, got))
}

/// A sum of inputs that are first multiplied by a scalar for each rank, the products rounded to the data type
/// (those of integers wrap), as NCCL's pre-multiplied sums are.
///
/// Scalars must be numbers that the data type holds: of integer types whole ones. Inputs of [`Pattern::Exact`] are
/// small enough that every partial sum of products is exact (with scalars of many digits, one rank at a time holds
/// ±1 and the others 0), and those of [`Pattern::Random`] that no sum comes near the largest value; products are
/// rounded in the reference as they are documented, so the bounds of sums hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PreMultiplied<'a> {
    /// How inputs are drawn.
    pub pattern: Pattern,
    /// The element type.
    pub dtype: DataType,
    /// The seed.
    pub seed: u64,
    /// Each rank's scalar; there are as many ranks.
    pub scalars: &'a [f64],
}

impl PreMultiplied<'_> {
    fn task(&self) -> Task<'_> {
        Task::pre_multiplied(self.pattern, self.seed, self.scalars)
    }

    /// [`fill`], before the multiplication.
    pub fn fill(&self, rank: u32, out: &mut [u8]) {
        with_element!(self.dtype,
            T => pattern::draw::<T>(&self.task(), rank, 0, T::chunks_mut(out)),
            unknown => out.fill(0));
    }

    /// Compares with the sum of block `block` of every rank's products: [`check_all_reduce`] if it is the
    /// only one, [`check_reduce_scatter`] if there are as many as ranks.
    #[must_use]
    pub fn check(&self, block: u32, got: &[u8]) -> Mismatches {
        let first = u64::from(block) * (got.len() / self.dtype.size()) as u64;
        let inputs = everyone(&self.task(), first);
        with_element!(self.dtype,
            T => check::<T>(&self.task(), &inputs, got),
            unknown => unknown(self.dtype, ReduceOp::Sum, got))
    }
}

/// Compares a block of an output with the reduction of `inputs`, each a block `b` of the input of rank `r` as
/// `(r, b)`; one of them alone is a copy. All blocks are as long as `got`.
///
/// Averages, which divide by the world size, are of all ranks: see [`check_reduce_scatter`]. Of them, and in general
/// of more inputs than there are ranks, the bounds and exactness of the crate's documentation do not hold; products
/// neither, unless each rank's input is there at most once.
#[must_use]
pub fn check_reduction(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    seed: u64,
    world_size: u32,
    inputs: &[(u32, u32)],
    got: &[u8],
) -> Mismatches {
    if let [one] = inputs {
        return check_copies(pattern, dtype, op, seed, world_size, &[*one], got);
    }
    let Some(task) = Task::new(pattern, op, seed, world_size) else {
        return unknown(dtype, op, got);
    };
    let elements = (got.len() / dtype.size()) as u64;
    let inputs: Vec<(u32, u64)> = inputs
        .iter()
        .map(|&(rank, block)| (rank, u64::from(block) * elements))
        .collect();
    with_element!(dtype, T => check::<T>(&task, &inputs, got), unknown => unknown(dtype, op, got))
}

/// Compares an output that is made of other ranks' inputs with what [`fill`] gives those: block `q`
/// of `got` must be block `b` of the input of rank `r`, where `(r, b)` is entry `q` of `blocks`.
///
/// All blocks are of one length. For an all-gather, entry `q` is `(q, 0)`; for an all-to-all on rank
/// `r` it is `(q, r)`; for a ring of send and receive, the only one is the rank before and 0.
#[must_use]
pub fn check_copies(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    seed: u64,
    world_size: u32,
    blocks: &[(u32, u32)],
    got: &[u8],
) -> Mismatches {
    let Some(task) = Task::new(pattern, op, seed, world_size) else {
        return unknown(dtype, op, got);
    };
    with_element!(dtype,
        T => copies::<T>(&task, blocks, got),
        unknown => unknown(dtype, op, got))
}

fn copies<T: Element>(task: &Task, blocks: &[(u32, u32)], got: &[u8]) -> Mismatches {
    let (elements, rest) = T::chunks(got);
    let length = elements.len() / blocks.len().max(1);
    let mut mismatches = Mismatches::default();
    let mut wanted = Vec::with_capacity(BLOCK);
    for (q, &(rank, block)) in blocks.iter().enumerate() {
        let mut done = 0;
        for part in elements[q * length..][..length].chunks(BLOCK) {
            wanted.resize(part.len(), T::whole(0, false).to_bytes());
            let first = (block as usize * length + done) as u64;
            pattern::draw::<T>(task, rank, first, &mut wanted);
            let index = (q * length + done) as u64;
            for ((index, got), wanted) in (index..).zip(part).zip(&wanted) {
                if got != wanted {
                    mismatches.add(|| Mismatch {
                        index,
                        got: T::from_bytes(*got).text(),
                        expected: T::from_bytes(*wanted).text(),
                    });
                }
            }
            done += part.len();
        }
    }
    let rest = rest.len() + (elements.len() - blocks.len() * length) * size_of::<T::Bytes>();
    trailing(&mut mismatches, rest, (blocks.len() * length) as u64);
    mismatches
}

/// Compares with the reduction of inputs, each a rank's from an element on.
fn check<T: Element>(task: &Task, inputs: &[(u32, u64)], got: &[u8]) -> Mismatches {
    let (elements, rest) = T::chunks(got);
    let mut totals = Totals::<T>::new(task);
    let mut mismatches = Mismatches::default();
    let mut first = 0;
    for block in elements.chunks(BLOCK) {
        let wanted = totals.of(inputs, first, block.len());
        for ((index, &bytes), &total) in (first..).zip(block).zip(wanted) {
            let element = T::from_bytes(bytes);
            if !element.matches(total, task) {
                mismatches.add(|| Mismatch {
                    index,
                    got: element.text(),
                    expected: T::expectation(total, task),
                });
            }
        }
        first += block.len() as u64;
    }
    trailing(&mut mismatches, rest.len(), first);
    mismatches
}

fn trailing(mismatches: &mut Mismatches, bytes: usize, index: u64) {
    if bytes > 0 {
        mismatches.add(|| Mismatch {
            index,
            got: format!("{bytes} trailing bytes"),
            expected: "whole elements".into(),
        });
    }
}

fn unknown(dtype: DataType, op: ReduceOp, got: &[u8]) -> Mismatches {
    let elements = got.len().div_ceil(dtype.size()) as u64;
    Mismatches {
        wrong: elements,
        first: (elements > 0).then(|| Mismatch {
            index: 0,
            got: format!("{elements} elements"),
            expected: format!("nothing: crossweft-verify has no reference for {op} of {dtype}"),
        }),
    }
}

/// The reference results of one block of elements, with the buffers they are computed in.
struct Totals<'a, T: Element> {
    task: &'a Task<'a>,
    inputs: Vec<T::Bytes>,
    totals: Vec<T::Total>,
}

impl<'a, T: Element> Totals<'a, T> {
    fn new(task: &'a Task<'a>) -> Self {
        Self {
            task,
            inputs: Vec::with_capacity(BLOCK),
            totals: Vec::with_capacity(BLOCK),
        }
    }

    /// The results of `count` elements from index `first` of these inputs on, reduced in their order.
    fn of(&mut self, inputs: &[(u32, u64)], first: u64, count: usize) -> &[T::Total] {
        self.totals.clear();
        self.inputs.resize(count, T::whole(0, false).to_bytes());
        for &(rank, offset) in inputs {
            pattern::draw::<T>(self.task, rank, offset + first, &mut self.inputs);
            let scalar = self.task.scalars.get(rank as usize);
            let inputs = self.inputs.iter().map(|&bytes| match scalar {
                None => T::from_bytes(bytes),
                Some(&scalar) => T::from_bytes(bytes).times(scalar),
            });
            if self.totals.is_empty() {
                self.totals.extend(inputs.map(T::start));
                continue;
            }
            let pairs = self.totals.iter_mut().zip(inputs);
            match self.task.step {
                Step::Add => pairs.for_each(|(total, x)| T::add(total, x)),
                Step::Multiply => pairs.for_each(|(total, x)| T::multiply(total, x)),
                Step::Smaller => pairs.for_each(|(total, x)| T::smaller(total, x)),
                Step::Larger => pairs.for_each(|(total, x)| T::larger(total, x)),
            }
        }
        &self.totals
    }
}

/// A 64-bit fingerprint of `bytes`: equal for equal bytes, and different with near certainty if they
/// differ by accident. It is not cryptographic: whoever wants a collision can make one.
#[must_use]
pub fn fingerprint(bytes: &[u8]) -> u64 {
    // Four lanes, so that one word's multiplication does not wait for the word before.
    let (blocks, rest) = bytes.as_chunks::<32>();
    let mut lanes = [1, 2, 3, 4];
    for block in blocks {
        for (lane, &word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = absorb(*lane, u64::from_le_bytes(word));
        }
    }
    // The tail cannot be taken for zeros that were there: the length goes in as well.
    let mut hash = bytes.len() as u64;
    for chunk in rest.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = absorb(hash, u64::from_le_bytes(word));
    }
    pattern::mix(lanes.into_iter().fold(hash, absorb))
}

/// One step of the hash; for either argument fixed, it is a bijection of the other.
fn absorb(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(pattern::GAMMA);
    // Multiplication carries upwards only; this brings the high bits back down.
    product ^ (product >> 32)
}
