//! The element types: how their inputs are drawn, and what the right answer is.

use crate::{
    Pattern,
    exact::{Pair, to_bf16, to_f16},
    pattern::{Recipe, Step, Task, Values},
};
pub(crate) use float8::{F8E4M3, F8E5M2};
pub(crate) use half::{bf16, f16};

/// One element type; implemented by the two macros below.
pub(crate) trait Element: Copy {
    /// An element in memory, in native byte order.
    type Bytes: Copy + PartialEq;
    /// The exact result of the ranks so far.
    type Total: Copy;

    /// The whole elements of `bytes`, and what is left after them.
    fn chunks(bytes: &[u8]) -> (&[Self::Bytes], &[u8]);
    /// The whole elements of `bytes`.
    fn chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    /// The element of those bytes.
    fn from_bytes(bytes: Self::Bytes) -> Self;
    /// The bytes of the element.
    fn to_bytes(self) -> Self::Bytes;

    /// How the inputs of `task` are drawn.
    fn recipe(task: &Task) -> Recipe;
    /// A whole number that the type holds exactly. Types without a sign ignore `negative`.
    fn whole(magnitude: u64, negative: bool) -> Self;
    /// The element of those bits, or another if that is NaN, infinite or zero (floats only).
    fn any(bits: u64) -> Self;
    /// A normal float of the low bits of `fraction`. Integers have no binades: any bits.
    fn in_binade(exponent: i32, fraction: u64, negative: bool) -> Self;

    /// The total of the first rank.
    fn start(self) -> Self::Total;
    /// Adds the next rank's element.
    fn add(total: &mut Self::Total, x: Self);
    /// The element times a scalar of the type, rounded once.
    fn times(self, scalar: f64) -> Self;
    /// Multiplies by the next rank's element.
    fn multiply(total: &mut Self::Total, x: Self);
    /// Keeps the smaller.
    fn smaller(total: &mut Self::Total, x: Self);
    /// Keeps the larger.
    fn larger(total: &mut Self::Total, x: Self);

    /// The result of `total`: divided for an average, and rounded once.
    fn result(total: Self::Total, task: &Task) -> Self;
    /// Whether this is an accepted result of `total`.
    fn matches(self, total: Self::Total, task: &Task) -> bool;
    /// The value and its bits, for people.
    fn text(self) -> String;
    /// What is accepted, for people.
    fn expectation(total: Self::Total, task: &Task) -> String;
}

/// What both kinds of types do with bytes; `$bits` is the unsigned integer of the same size.
macro_rules! bytes {
    ($bits:ty, $from:expr, $to:expr) => {
        type Bytes = [u8; size_of::<$bits>()];

        fn chunks(bytes: &[u8]) -> (&[Self::Bytes], &[u8]) {
            bytes.as_chunks()
        }

        fn chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
            bytes.as_chunks_mut().0
        }

        fn from_bytes(bytes: Self::Bytes) -> Self {
            $from(<$bits>::from_ne_bytes(bytes))
        }

        fn to_bytes(self) -> Self::Bytes {
            let bits: $bits = $to(self);
            bits.to_ne_bytes()
        }
    };
}

/// Integers: totals are `i128` and wrap, which is right in all the bits that the type keeps.
macro_rules! integer {
    ($($T:ty: $bits:ty),*) => {$(
        impl Element for $T {
            type Total = i128;

            bytes!($bits, |bits| bits as $T, |x| x as $bits);

            fn recipe(task: &Task) -> Recipe {
                match task.pattern {
                    Pattern::Exact => {
                        Recipe::exact(task.step, task.world_size, <$T>::MAX as u64 / task.spread())
                    }
                    Pattern::Random => Recipe::ANY,
                }
            }

            fn whole(magnitude: u64, negative: bool) -> Self {
                let signed = <$T>::MIN != 0;
                let x = magnitude as $T;
                if signed && negative { x.wrapping_neg() } else { x }
            }

            fn any(bits: u64) -> Self {
                bits as $T
            }

            fn in_binade(_exponent: i32, fraction: u64, _negative: bool) -> Self {
                Self::any(fraction)
            }

            fn start(self) -> i128 {
                i128::from(self)
            }

            fn add(total: &mut i128, x: Self) {
                *total = total.wrapping_add(i128::from(x));
            }

            fn times(self, scalar: f64) -> Self {
                // In the low bits, a product of wrapped factors is the wrapped product.
                i128::from(self).wrapping_mul(scalar as i128) as $T
            }

            fn multiply(total: &mut i128, x: Self) {
                *total = total.wrapping_mul(i128::from(x));
            }

            fn smaller(total: &mut i128, x: Self) {
                *total = i128::from(x).min(*total);
            }

            fn larger(total: &mut i128, x: Self) {
                *total = i128::from(x).max(*total);
            }

            fn result(total: i128, task: &Task) -> Self {
                let wrapped = total as $T;
                if task.average {
                    // Through i128, as the world size may not fit the type.
                    (i128::from(wrapped) / i128::from(task.world_size)) as $T
                } else {
                    wrapped
                }
            }

            fn matches(self, total: i128, task: &Task) -> bool {
                self == Self::result(total, task)
            }

            fn text(self) -> String {
                format!("{self} (0x{:0width$x})", self as $bits, width = 2 * size_of::<$T>())
            }

            fn expectation(total: i128, task: &Task) -> String {
                Self::result(total, task).text()
            }
        }
    )*};
}

integer!(i8: u8, u8: u8, i16: u16, u16: u16, i32: u32, u32: u32, i64: u64, u64: u64);

/// The numbers that tell one binary float from another.
struct Format {
    /// Stored bits of the fraction.
    fraction: u32,
    /// What is added to the exponent of a stored float.
    bias: i32,
}

impl Format {
    /// Largest relative error of one rounding.
    fn unit_roundoff(&self) -> f64 {
        power_of_two(-(self.fraction as i32) - 1)
    }

    /// The smallest number above zero.
    fn smallest_subnormal(&self) -> f64 {
        // That of f64 is below the normal powers of two; the next one up serves a bound as well.
        power_of_two((1 - self.bias - self.fraction as i32).max(-1022))
    }

    /// The random pattern; `largest` is the largest finite value.
    fn random(&self, task: &Task, largest: f64) -> Recipe {
        match task.step {
            Step::Add => {
                // The sum of all ranks' magnitudes stays within half the range. (Where 8-bit floats
                // saturate a partial result that roundings took further, they move it closer.)
                let reach = exponent_of(largest / (2.0 * task.gain() * f64::from(task.world_size)));
                let lowest_normal = 1 - self.bias;
                let highest = (reach - 1).min(3).max(lowest_normal);
                let lowest = (highest - 7).max(lowest_normal);
                Recipe {
                    values: Values::Binades {
                        lowest,
                        count: (highest - lowest + 1) as u32,
                    },
                    active: u32::MAX,
                    neutral: 0,
                }
            }
            // Partial products of [0.5, 2) stay in [2^-5, 2^5], rounded or not, as these two are
            // representable and rounding is monotone: they are normal numbers of every type.
            Step::Multiply => Recipe {
                values: Values::Binades {
                    lowest: -1,
                    count: 2,
                },
                active: FACTORS,
                neutral: 1,
            },
            Step::Smaller | Step::Larger => Recipe::ANY,
        }
    }
}

/// Ranks that hold more than ±1 in a random product.
const FACTORS: u32 = 5;

/// 2 to the power of a normal exponent.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The exponent of a normal number above zero.
fn exponent_of(x: f64) -> i32 {
    (x.to_bits() >> 52) as i32 - 1023
}

/// The exact result of float inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatTotal {
    value: Pair,
    /// Sum of the magnitudes, which bounds the error of a sum.
    magnitudes: f64,
}

impl FloatTotal {
    /// The result before rounding to the type.
    fn exact(self, task: &Task) -> f64 {
        // Rounding a quotient to f64 and then to a type of at most 24 bits is one rounding in
        // effect: the sum has few bits, so a quotient by n is on a midpoint of the type or at least
        // 1/n of a unit away, far more than f64 rounds off. For f64 there is no second rounding.
        // What is not divided is exact in f64 for these types wherever bits are compared.
        if task.average {
            self.value.high / f64::from(task.world_size)
        } else {
            self.value.high
        }
    }

    /// Largest accepted difference from the exact result: `None` where bits are compared.
    ///
    /// Sum: n values in any order and grouping take n - 1 additions. With every result rounded to
    /// nearest, the error is at most (n-1)·u·Σ|xᵢ| (Jeannerod and Rump, 2013; no terms of higher
    /// order are dropped). An addition that is rounded to f32 first and to the type after adds 2⁻²⁴
    /// relative to it, n-1 times at most, which the remaining u·Σ|xᵢ| covers for 4096 ranks and 11
    /// bits or fewer. Sums do not round among subnormals (they are whole multiples of η), so n·η is
    /// only there for flush-to-zero hardware.
    ///
    /// Average: the error of the sum divided by n, and one rounding of the quotient: u relative
    /// to a sum that is itself off by E, or η if it is subnormal.
    ///
    /// Product: multiplying by ±1 is exact, so k factors take k - 1 roundings whatever the grouping,
    /// each by 1 + δ with |δ| ≤ u/(1+u). For k ≤ 5 and u ≤ 1/8, (1 + u/(1+u))^(k-1) - 1 is at most
    /// k·u; the other u covers roundings to f32 on the way and the reference's own.
    fn bound(self, task: &Task, format: &Format) -> Option<f64> {
        if task.pattern == Pattern::Exact {
            return None;
        }
        let ranks = f64::from(task.world_size);
        let (unit, tiny) = (format.unit_roundoff(), format.smallest_subnormal());
        let sum = ranks * unit * self.magnitudes + ranks * tiny;
        match task.step {
            Step::Add if task.average => {
                Some(sum / ranks + unit * (self.value.high.abs() + sum) / ranks + tiny)
            }
            Step::Add => Some(sum),
            Step::Multiply => {
                let factors = f64::from(task.world_size.min(FACTORS));
                Some((factors + 1.0) * unit * self.value.high.abs())
            }
            Step::Smaller | Step::Larger => None,
        }
    }

    /// Distance of `x` from the exact result.
    fn distance(self, x: f64, task: &Task) -> f64 {
        if task.average {
            // In units of the sum, which is exact where the quotient is not.
            let ranks = f64::from(task.world_size);
            Pair::new(x).times(ranks).minus(self.value).abs() / ranks
        } else {
            Pair::new(x).minus(self.value).abs()
        }
    }
}

/// Floats: totals are pairs of `f64`.
macro_rules! float {
    ($($T:ty: $bits:ty, $fraction:literal, $bias:literal, $largest:literal,
       $decode:expr, $round:expr, $product:expr;)*) => {$(
        impl Element for $T {
            type Total = FloatTotal;

            bytes!($bits, <$T>::from_bits, |x: $T| x.to_bits());

            fn recipe(task: &Task) -> Recipe {
                let format = Format { fraction: $fraction, bias: $bias };
                match task.pattern {
                    Pattern::Exact => {
                        Recipe::exact(task.step, task.world_size, (2 << $fraction) / task.spread())
                    }
                    Pattern::Random => format.random(task, $decode(<$T>::from_bits($largest))),
                }
            }

            fn whole(magnitude: u64, negative: bool) -> Self {
                if magnitude == 0 {
                    // Whatever the sign: -0 would be a second pattern of bits for one number.
                    return <$T>::from_bits(0);
                }
                // By its bits, which takes a fraction of the time of a conversion.
                let below_leading = (magnitude << magnitude.leading_zeros()) << 1;
                let exponent = magnitude.ilog2() as i32;
                Self::in_binade(exponent, below_leading >> (64 - $fraction), negative)
            }

            fn any(bits: u64) -> Self {
                let bits = bits as $bits;
                let magnitude = bits & (<$bits>::MAX >> 1);
                if magnitude == 0 || magnitude > $largest {
                    let one: $bits = $bias << $fraction;
                    <$T>::from_bits(bits ^ magnitude | one)
                } else {
                    <$T>::from_bits(bits)
                }
            }

            fn in_binade(exponent: i32, fraction: u64, negative: bool) -> Self {
                let field = ((exponent + $bias) as $bits) << $fraction;
                let sign = <$bits>::from(negative) << (<$bits>::BITS - 1);
                <$T>::from_bits(sign | field | (fraction as $bits & ((1 << $fraction) - 1)))
            }

            fn start(self) -> FloatTotal {
                let x = $decode(self);
                FloatTotal { value: Pair::new(x), magnitudes: x.abs() }
            }

            fn add(total: &mut FloatTotal, x: Self) {
                let x = $decode(x);
                total.value = total.value.plus(x);
                total.magnitudes += x.abs();
            }

            fn times(self, scalar: f64) -> Self {
                let product = $decode(self) * $decode($round(scalar));
                $round($product(product))
            }

            fn multiply(total: &mut FloatTotal, x: Self) {
                total.value = total.value.times($decode(x));
            }

            fn smaller(total: &mut FloatTotal, x: Self) {
                total.value = Pair::new(total.value.high.min($decode(x)));
            }

            fn larger(total: &mut FloatTotal, x: Self) {
                total.value = Pair::new(total.value.high.max($decode(x)));
            }

            fn result(total: FloatTotal, task: &Task) -> Self {
                $round(total.exact(task))
            }

            fn matches(self, total: FloatTotal, task: &Task) -> bool {
                match total.bound(task, &Format { fraction: $fraction, bias: $bias }) {
                    // Written so that NaN, which is never near, is refused.
                    Some(bound) => total.distance($decode(self), task) <= bound,
                    None => self.to_bits() == Self::result(total, task).to_bits(),
                }
            }

            fn text(self) -> String {
                let (value, bits) = ($decode(self), self.to_bits());
                format!("{value:e} (0x{bits:0width$x})", width = 2 * size_of::<$bits>())
            }

            fn expectation(total: FloatTotal, task: &Task) -> String {
                match total.bound(task, &Format { fraction: $fraction, bias: $bias }) {
                    Some(bound) => format!("{:e} within {bound:.3e}", total.exact(task)),
                    None => Self::result(total, task).text(),
                }
            }
        }
    )*};
}

float! {
    f16: u16, 10, 15, 0x7bff, f16::to_f64, to_f16, in_f32;
    bf16: u16, 7, 127, 0x7f7f, bf16::to_f64, to_bf16, in_f32;
    f32: u32, 23, 127, 0x7f7f_ffff, f64::from, |x: f64| x as f32, in_f32;
    f64: u64, 52, 1023, 0x7fef_ffff_ffff_ffff, |x: f64| x, |x: f64| x, |x: f64| x;
    // float8 rounds a f64 once, to nearest even, and saturates; the tests try it on every boundary.
    F8E4M3: u8, 3, 7, 0x7e, |x: F8E4M3| E4M3[usize::from(x.to_bits())], F8E4M3::from_f64, in_f32;
    F8E5M2: u8, 2, 15, 0x7b, |x: F8E5M2| E5M2[usize::from(x.to_bits())], F8E5M2::from_f64, in_f32;
}

/// A product as f32 has it. Of elements of up to 24 bits it is exact in f64, so this is one rounding; it matters
/// beside the type's own only where `bf16` is subnormal.
fn in_f32(product: f64) -> f64 {
    f64::from(product as f32)
}

/// The values of every bit pattern, as float8 decodes them.
macro_rules! table {
    ($name:ident, $T:ident) => {
        static $name: [f64; 256] = {
            let mut values = [0.0; 256];
            let mut bits = 0;
            while bits < 256 {
                values[bits] = $T::from_bits(bits as u8).to_f64();
                bits += 1;
            }
            values
        };
    };
}

table!(E4M3, F8E4M3);
table!(E5M2, F8E5M2);
