//! RMS normalisation and its quantisation, recomputed in `f64`.

use crate::{
    Mismatch, Mismatches,
    element::{Element, F8E4M3, bf16, f16},
};
use crossweft_device::DataType;

/// What a fused all-reduce does with sums: residual addition and RMS normalisation of tokens.
///
/// The residual that comes out is compared bit for bit. Normalised elements are accepted within a bound: with unit
/// roundoff u of the type, v = 2⁻²⁴ of `f32`, and smallest subnormal η of the type,
/// (u + (hidden/8 + 12)·v)·|exact| + η. The mean of `hidden` squares, in eight lanes or more, is off by (hidden/8 + 5)·v at
/// most, of which the square root leaves half; its own rounding, those of the quotients, the epsilon's and two products are
/// six more; the bound has room for the lanes to be one.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// f32, f16 or bf16.
    pub dtype: DataType,
    /// Elements of a token.
    pub hidden: usize,
    /// What is added to the mean square.
    pub epsilon: f32,
    /// What is added to the sums; none if nothing is.
    pub residual: Option<&'a [u8]>,
    /// One token's weights.
    pub weight: &'a [u8],
}

/// What may be done with a data type here.
trait Real: Element {
    /// Unit roundoff and smallest subnormal.
    const UNITS: (f64, f64);
    fn value(self) -> f64;
    /// Rounded to f32, then to the type.
    fn rounded(value: f64) -> Self;
}

macro_rules! real {
    ($($T:ty, $bits:literal, $tiny:literal, $value:expr, $rounded:expr;)*) => {$(
        impl Real for $T {
            const UNITS: (f64, f64) = (power_of_two(-$bits), power_of_two($tiny));
            fn value(self) -> f64 {
                $value(self)
            }
            fn rounded(value: f64) -> Self {
                $rounded(value as f32)
            }
        }
    )*};
}

const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

real! {
    f32, 24, -149, f64::from, |x: f32| x;
    f16, 11, -24, f16::to_f64, f16::from_f32;
    bf16, 8, -133, bf16::to_f64, bf16::from_f32;
}

impl RmsNorm<'_> {
    /// Compares with what becomes of `sums`: the residual that came out, if there is one, and normalised tokens. All are
    /// tokens of elements; another length, or a data type that is none of the three, is one wrong element.
    #[must_use]
    pub fn check(&self, sums: &[u8], residual: Option<&[u8]>, got: &[u8]) -> Mismatches {
        match self.dtype {
            DataType::F32 => self.check_type::<f32>(sums, residual, got),
            DataType::F16 => self.check_type::<f16>(sums, residual, got),
            DataType::Bf16 => self.check_type::<bf16>(sums, residual, got),
            _ => unfit(),
        }
    }

    fn check_type<T: Real>(&self, sums: &[u8], residual: Option<&[u8]>, got: &[u8]) -> Mismatches {
        let fits = |buffer: Option<&[u8]>| buffer.is_none_or(|b| b.len() == sums.len());
        let fit = fits(self.residual)
            && fits(residual)
            && fits(Some(got))
            && self.residual.is_some() == residual.is_some();
        let all = |bytes: &[u8]| -> Vec<T> {
            T::chunks(bytes)
                .0
                .iter()
                .map(|&b| T::from_bytes(b))
                .collect()
        };
        let weight = all(self.weight);
        if !fit || weight.len() != self.hidden || self.hidden == 0 {
            return unfit();
        }
        let mut x = all(sums);
        let mut mismatches = Mismatches::default();
        let add = |mismatches: &mut Mismatches, index: usize, got: T, expected: String| {
            mismatches.add(|| Mismatch {
                index: index as u64,
                got: got.text(),
                expected,
            });
        };
        if let (Some(before), Some(after)) = (self.residual, residual) {
            let pairs = all(before).into_iter().zip(all(after));
            for (index, (x, (before, after))) in x.iter_mut().zip(pairs).enumerate() {
                // The sum of two f32 in f64, rounded to f32, is their sum in f32.
                *x = T::rounded(x.value() + before.value());
                if x.to_bytes() != after.to_bytes() {
                    add(&mut mismatches, index, after, x.text());
                }
            }
        }
        let (unit, tiny) = T::UNITS;
        let relative = unit + (self.hidden as f64 / 8.0 + 12.0) * power_of_two(-24);
        let got = all(got);
        let tokens = x.chunks(self.hidden).zip(got.chunks(self.hidden));
        for (token, (x, got)) in tokens.enumerate() {
            let squares: f64 = x.iter().map(|x| x.value() * x.value()).sum();
            let mean = squares / self.hidden as f64;
            let factor = 1.0 / (mean + f64::from(self.epsilon)).sqrt();
            for (index, ((x, weight), &got)) in x.iter().zip(&weight).zip(got).enumerate() {
                let exact = x.value() * factor * weight.value();
                let bound = relative * exact.abs() + tiny;
                // Written so that NaN, which is never near, is refused.
                let near = (got.value() - exact).abs() <= bound;
                if !near {
                    let expected = format!("{exact:e} within {bound:.3e}");
                    add(&mut mismatches, token * self.hidden + index, got, expected);
                }
            }
        }
        mismatches
    }

    /// Compares quantised tokens with the normalised ones, bit for bit, where `group` elements share a scale: each must
    /// be `max(largest, least) / 448` as `scale` gives it for the group's largest magnitude.
    #[must_use]
    pub fn check_quantised(
        &self,
        normalised: &[u8],
        group: usize,
        scale: impl Fn(f32) -> f32,
        (values, scales): (&[u8], &[f32]),
    ) -> Mismatches {
        match self.dtype {
            DataType::F32 => self.quantised::<f32>(normalised, group, scale, values, scales),
            DataType::F16 => self.quantised::<f16>(normalised, group, scale, values, scales),
            DataType::Bf16 => self.quantised::<bf16>(normalised, group, scale, values, scales),
            _ => unfit(),
        }
    }

    fn quantised<T: Real>(
        &self,
        normalised: &[u8],
        group: usize,
        scale: impl Fn(f32) -> f32,
        values: &[u8],
        scales: &[f32],
    ) -> Mismatches {
        let x: Vec<f64> = T::chunks(normalised)
            .0
            .iter()
            .map(|&bytes| T::from_bytes(bytes).value())
            .collect();
        let groups = x
            .chunks(self.hidden.max(1))
            .flat_map(|token| token.chunks(group.max(1)));
        if values.len() != x.len() || groups.clone().count() != scales.len() {
            return unfit();
        }
        let mut mismatches = Mismatches::default();
        let mut index = 0;
        for (x, &found) in groups.zip(scales) {
            let largest = x.iter().fold(0.0_f64, |most, x| x.abs().max(most));
            let expected = scale(largest as f32);
            if found.to_bits() != expected.to_bits() {
                mismatches.add(|| Mismatch {
                    index: index as u64,
                    got: format!("a scale of {found:e}"),
                    expected: format!("{expected:e}"),
                });
            }
            for &x in x {
                // A quotient of two f32 in f64, rounded to f32, is their quotient in f32.
                let quotient = (x / f64::from(expected)) as f32;
                let wanted = F8E4M3::from_f64(quotient.into());
                let got = F8E4M3::from_bits(values[index]);
                if got.to_bits() != wanted.to_bits() {
                    mismatches.add(|| Mismatch {
                        index: index as u64,
                        got: got.text(),
                        expected: wanted.text(),
                    });
                }
                index += 1;
            }
        }
        mismatches
    }
}

fn unfit() -> Mismatches {
    let mut mismatches = Mismatches::default();
    mismatches.add(|| Mismatch {
        index: 0,
        got: "buffers of other lengths or types".to_owned(),
        expected: "tokens of f32, f16 or bf16".to_owned(),
    });
    mismatches
}
