//! What each rank's input is.

use crate::{Pattern, element::Element};
use crossweft_device::ReduceOp;

/// How two elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Add,
    Multiply,
    Smaller,
    Larger,
}

/// What is drawn and computed, apart from the data type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(crate) pattern: Pattern,
    pub(crate) step: Step,
    /// Whether the total is divided by the world size.
    pub(crate) average: bool,
    pub(crate) seed: u64,
    /// At least 1.
    pub(crate) world_size: u32,
    /// What each rank's input is multiplied by; empty if by nothing.
    pub(crate) scalars: &'a [f64],
}

impl<'a> Task<'a> {
    /// `None` for an operation that this crate does not know.
    pub(crate) fn new(pattern: Pattern, op: ReduceOp, seed: u64, world_size: u32) -> Option<Self> {
        let (step, average) = match op {
            ReduceOp::Sum => (Step::Add, false),
            ReduceOp::Avg => (Step::Add, true),
            ReduceOp::Prod => (Step::Multiply, false),
            ReduceOp::Min => (Step::Smaller, false),
            ReduceOp::Max => (Step::Larger, false),
            _ => return None,
        };
        Some(Self {
            pattern,
            step,
            average,
            seed,
            world_size: world_size.max(1),
            scalars: &[],
        })
    }

    /// The sum of inputs that are multiplied by a scalar for each rank.
    pub(crate) fn pre_multiplied(pattern: Pattern, seed: u64, scalars: &'a [f64]) -> Self {
        Self {
            pattern,
            step: Step::Add,
            average: false,
            seed,
            world_size: u32::try_from(scalars.len()).unwrap_or(u32::MAX).max(1),
            scalars,
        }
    }

    /// The largest magnitude that an input is multiplied by, if that is above 1.
    pub(crate) fn gain(&self) -> f64 {
        self.scalars.iter().fold(1.0, |most, s| s.abs().max(most))
    }

    /// How many units there are in the largest scalar, or in 1, a unit being the largest power of two up to 1 that
    /// all scalars are whole multiples of.
    pub(crate) fn spread(&self) -> u64 {
        let mut unit = 1.0;
        for scalar in self.scalars {
            // Ends at a unit of the scalar's last bit; at 0 where it is no number.
            while unit > 0.0 && (scalar / unit).fract() != 0.0 {
                unit /= 2.0;
            }
        }
        (self.gain() / unit).ceil() as u64
    }
}

/// How a type draws its elements for one task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    pub(crate) values: Values,
    /// How many of the ranks draw from `values` at one index.
    pub(crate) active: u32,
    /// Magnitude that the other ranks hold, with a random sign: 0 or 1, neutral for the operation.
    pub(crate) neutral: u64,
}

/// What is drawn from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values {
    /// Whole numbers of magnitude 1 to `largest`, either sign where the type has one.
    Whole { largest: u64 },
    /// Any bits; for floats those that are finite and not zero.
    Any,
    /// Floats of random sign and fraction, in `count` binades from 2 to the power of `lowest` on.
    Binades { lowest: i32, count: u32 },
}

impl Recipe {
    pub(crate) const ANY: Self = Self {
        values: Values::Any,
        active: u32::MAX,
        neutral: 0,
    };

    /// The exact pattern of a type that holds every whole number up to `limit`.
    ///
    /// A partial sum is at most `active` times `largest` in magnitude, and a partial product at most
    /// `largest` to the power of 3; neither passes `limit`. A `limit` of 0 leaves one rank, whose input nothing is
    /// added to.
    pub(crate) fn exact(step: Step, world_size: u32, limit: u64) -> Self {
        match step {
            Step::Add => Self {
                values: Values::Whole {
                    largest: (limit / u64::from(world_size)).max(1),
                },
                active: u32::try_from(limit.max(1)).unwrap_or(u32::MAX),
                neutral: 0,
            },
            Step::Multiply => Self {
                values: Values::Whole {
                    largest: cube_root(limit),
                },
                active: 3,
                neutral: 1,
            },
            Step::Smaller | Step::Larger => Self::ANY,
        }
    }
}

/// The largest whole number whose cube is at most `limit`.
fn cube_root(limit: u64) -> u64 {
    // The float is off by one at most; 2^64 has no neighbourhood to overflow in u128.
    let near = (limit as f64).cbrt() as u64 + 1;
    let fits = |root: &u64| u128::from(*root).pow(3) <= u128::from(limit);
    (0..=near).rev().find(fits).unwrap_or(0)
}

/// Writes the elements of `rank` from index `first` on.
pub(crate) fn draw<T: Element>(task: &Task, rank: u32, first: u64, out: &mut [T::Bytes]) {
    let recipe = T::recipe(task);
    match recipe.values {
        Values::Whole { largest } => write::<T>(task, rank, first, &recipe, out, |hash| {
            T::whole(1 + scale(hash, largest), negative(hash))
        }),
        Values::Any => write::<T>(task, rank, first, &recipe, out, T::any),
        Values::Binades { lowest, count } => write::<T>(task, rank, first, &recipe, out, |hash| {
            // At most 8 binades: the cast is of a number below 8.
            let exponent = lowest + scale(hash, u64::from(count)) as i32;
            T::in_binade(exponent, hash >> 1, negative(hash))
        }),
    }
}

fn write<T: Element>(
    task: &Task,
    rank: u32,
    first: u64,
    recipe: &Recipe,
    out: &mut [T::Bytes],
    value: impl Fn(u64) -> T,
) {
    // Each rank reads the splitmix64 sequence from a place of its own.
    let start = mix(mix(task.seed) ^ (u64::from(rank) + 1).wrapping_mul(GAMMA));
    let hashes = (first..).map(|index| mix(start.wrapping_add(index.wrapping_mul(GAMMA))));
    if recipe.active >= task.world_size {
        for (slot, hash) in out.iter_mut().zip(hashes) {
            *slot = value(hash).to_bytes();
        }
        return;
    }
    // The active ranks are a window that moves by one with every element.
    let world_size = u64::from(task.world_size);
    let mut place = (u64::from(rank) + first % world_size) % world_size;
    for (slot, hash) in out.iter_mut().zip(hashes) {
        let element = if place < u64::from(recipe.active) {
            value(hash)
        } else {
            T::whole(recipe.neutral, negative(hash))
        };
        *slot = element.to_bytes();
        place = if place + 1 == world_size {
            0
        } else {
            place + 1
        };
    }
}

/// The step of splitmix64: 2^64 divided by the golden ratio.
pub(crate) const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of splitmix64: every input bit reaches every output bit.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A number below `count`, from the high bits of `hash`.
fn scale(hash: u64, count: u64) -> u64 {
    ((u128::from(hash) * u128::from(count)) >> 64) as u64
}

/// A sign, from the lowest bit of `hash`: no other draw hangs on it alone.
fn negative(hash: u64) -> bool {
    hash & 1 == 1
}
