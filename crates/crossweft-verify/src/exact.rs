//! Arithmetic that is more exact than any element type, and roundings done once.

use half::{bf16, f16};

/// An unevaluated sum of two `f64`, the second at most half a unit of the first: 106 bits.
///
/// Sums of the patterns need at most 53 + 8 + 13 bits and are exact; products of five factors are
/// exact for types of up to 24 bits and within 2⁻¹⁰⁰ for `f64`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    /// The value, rounded to nearest.
    pub(crate) high: f64,
    low: f64,
}

impl Pair {
    pub(crate) fn new(value: f64) -> Self {
        Self {
            high: value,
            low: 0.0,
        }
    }

    pub(crate) fn plus(self, x: f64) -> Self {
        // Knuth's two-sum: `sum + error` is `high + x` exactly.
        let sum = self.high + x;
        let part = sum - self.high;
        let error = (self.high - (sum - part)) + (x - part);
        Self::renormalise(sum, self.low + error)
    }

    pub(crate) fn times(self, x: f64) -> Self {
        let product = self.high * x;
        let error = self.high.mul_add(x, -product);
        Self::renormalise(product, self.low.mul_add(x, error))
    }

    /// The difference, rounded: its error is nothing beside a unit of either.
    pub(crate) fn minus(self, other: Self) -> f64 {
        self.plus(-other.high).plus(-other.low).high
    }

    /// The pair of `high + low`, `low` being the smaller one.
    fn renormalise(high: f64, low: f64) -> Self {
        let sum = high + low;
        Self {
            high: sum,
            low: low - (sum - high),
        }
    }
}

/// Rounds once to nearest even. (`f16::from_f64` may round twice, by way of `f32`.)
pub(crate) fn to_f16(x: f64) -> f16 {
    f16::from_f32(to_odd_f32(x))
}

/// Rounds once to nearest even. (`bf16::from_f64` does not look at the lowest bits.)
pub(crate) fn to_bf16(x: f64) -> bf16 {
    bf16::from_f32(to_odd_f32(x))
}

/// Truncates, and makes the last bit odd if anything was lost. That bit stands for all the lost ones
/// in a rounding to a type that is shorter by two bits or more, which is thereby the only one.
fn to_odd_f32(x: f64) -> f32 {
    let near = x as f32;
    let past = u32::from(f64::from(near).abs() > x.abs());
    let lost = u32::from(f64::from(near) != x);
    f32::from_bits((near.to_bits() - past) | lost)
}
