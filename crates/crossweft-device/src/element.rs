//! Elements: how each data type is loaded into an accumulator, combined and stored back.
//!
//! Floats accumulate in f32 (f64 in f64), integers in themselves, wrapping. Conversions round to
//! nearest even; the 8-bit floats saturate to their largest finite value, as the GPUs' own
//! conversion instructions do. A NaN is stored as the one positive quiet NaN of its type, because
//! which payload and sign an addition keeps differs between instructions, let alone machines. The
//! code is branch-free where it matters, so that loops vectorise.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "converting between widths is what this module is for; each place masks or shifts first"
)]

/// An element of a message.
pub trait Element: Copy {
    /// What it is accumulated in.
    type Acc: Copy;

    /// To the accumulator's type.
    fn load(self) -> Self::Acc;
    /// From the accumulator's type, rounded.
    fn store(acc: Self::Acc) -> Self;
    /// Sum.
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Product.
    fn mul(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Smaller; a number wins over a NaN.
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Larger; a number wins over a NaN.
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// Quotient by a number of ranks (at least 1).
    fn div(a: Self::Acc, ranks: u32) -> Self::Acc;
}

macro_rules! integer {
    ($($t:ty, $wide:ty);* $(;)?) => { $(
        impl Element for $t {
            type Acc = $t;
            #[inline(always)]
            fn load(self) -> $t { self }
            #[inline(always)]
            fn store(acc: $t) -> $t { acc }
            #[inline(always)]
            fn add(a: $t, b: $t) -> $t { a.wrapping_add(b) }
            #[inline(always)]
            fn mul(a: $t, b: $t) -> $t { a.wrapping_mul(b) }
            #[inline(always)]
            fn min(a: $t, b: $t) -> $t { if b < a { b } else { a } }
            #[inline(always)]
            fn max(a: $t, b: $t) -> $t { if b > a { b } else { a } }
            #[inline(always)]
            fn div(a: $t, ranks: u32) -> $t {
                // The wide type holds any number of ranks; one division by zero check goes with it.
                (a as $wide).checked_div(ranks as $wide).unwrap_or_default() as $t
            }
        }
    )* };
}

integer! { i8, i64; u8, u64; i16, i64; u16, u64; i32, i64; u32, u64; i64, i64; u64, u64 }

macro_rules! float {
    ($($t:ty, $acc:ty, $load:expr, $store:expr);* $(;)?) => { $(
        impl Element for $t {
            type Acc = $acc;
            #[inline(always)]
            fn load(self) -> $acc { $load(self) }
            #[inline(always)]
            fn store(acc: $acc) -> $t { $store(acc) }
            #[inline(always)]
            fn add(a: $acc, b: $acc) -> $acc { a + b }
            #[inline(always)]
            fn mul(a: $acc, b: $acc) -> $acc { a * b }
            #[inline(always)]
            fn min(a: $acc, b: $acc) -> $acc { if b < a || a.is_nan() { b } else { a } }
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc { if b > a || a.is_nan() { b } else { a } }
            #[inline(always)]
            fn div(a: $acc, ranks: u32) -> $acc { a / ranks as $acc }
        }
    )* };
}

/// Bits of an IEEE 754 binary16.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F16(pub u16);
/// Bits of a bfloat16.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bf16(pub u16);
/// Bits of an OCP E4M3.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F8E4M3(pub u8);
/// Bits of an OCP E5M2.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct F8E5M2(pub u8);

float! {
    f32, f32, |x| x, |x: f32| if x.is_nan() { f32::NAN } else { x };
    f64, f64, |x| x, |x: f64| if x.is_nan() { f64::NAN } else { x };
    F16, f32, |x: F16| f16_to_f32(x.0), |x| F16(f32_to_f16(x));
    Bf16, f32, |x: Bf16| f32::from_bits(u32::from(x.0) << 16), |x| Bf16(f32_to_bf16(x));
    F8E4M3, f32, |x: F8E4M3| e4m3_to_f32(x.0), |x| F8E4M3(f32_to_e4m3(x));
    F8E5M2, f32, |x: F8E5M2| f16_to_f32(u16::from(x.0) << 8), |x| F8E5M2(f32_to_e5m2(x));
}

const EXPONENT: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// A power of two as f32, for exponents of normal numbers.
const fn exp2(e: i32) -> f32 {
    f32::from_bits(((e + 127) as u32) << 23)
}

#[cfg(target_arch = "nvptx64")]
use crate::gpu::nvptx::f16_to_f32;

#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    // Read as an f32 with 2^-112 of its value, subnormals included; the product is exact.
    let scaled = (f32::from_bits(magnitude << 13) * exp2(112)).to_bits();
    let special = if magnitude >= 0x7c00 { EXPONENT } else { 0 };
    f32::from_bits(scaled | special | u32::from(bits & 0x8000) << 16)
}

#[inline(always)]
fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // A NaN must not round to infinity.
    (if bits & MAGNITUDE > EXPONENT {
        0x7fc0
    } else {
        rounded
    }) as u16
}

/// Rounds a finite magnitude to a float of `mantissa` mantissa bits and exponent bias `bias`, to
/// nearest even; the exponent may overflow into what comes next.
#[inline(always)]
fn round_magnitude(magnitude: u32, mantissa: u32, bias: u32) -> u32 {
    let shift = 23 - mantissa;
    // Below the smallest normal, adding this power of two leaves the count of subnormal steps in
    // the mantissa, rounded by the addition itself.
    let smallest_normal = (127 - bias + 1) << 23;
    let magic = (127 - bias + 1 + shift) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(magic))
        .to_bits()
        .wrapping_sub(magic);
    let odd = magnitude >> shift & 1;
    let half = (1 << (shift - 1)) - 1;
    let normal = magnitude
        .wrapping_sub((127 - bias) << 23)
        .wrapping_add(half + odd)
        >> shift;
    if magnitude < smallest_normal {
        subnormal
    } else {
        normal
    }
}

#[inline(always)]
fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & MAGNITUDE;
    let finite = round_magnitude(magnitude, 10, 15).min(0x7c00);
    let out = if magnitude >= (127 + 16) << 23 {
        0x7c00
    } else {
        finite
    };
    (if magnitude > EXPONENT {
        0x7e00
    } else {
        out | bits >> 16 & 0x8000
    }) as u16
}

#[inline(always)]
fn e4m3_to_f32(bits: u8) -> f32 {
    let magnitude = u32::from(bits & 0x7f);
    let scaled = (f32::from_bits(magnitude << 20) * exp2(120)).to_bits();
    let nan = if magnitude == 0x7f { 0x7fc0_0000 } else { 0 };
    f32::from_bits(scaled | nan | u32::from(bits & 0x80) << 24)
}

/// The 8-bit encodings: saturating; NaN to the one whose bits but the sign are all set.
#[inline(always)]
fn to_f8(x: f32, mantissa: u32, bias: u32, largest: u32) -> u8 {
    let bits = x.to_bits();
    let magnitude = bits & MAGNITUDE;
    let finite = round_magnitude(magnitude.min(EXPONENT - 1), mantissa, bias).min(largest);
    (if magnitude > EXPONENT {
        0x7f
    } else {
        finite | bits >> 24 & 0x80
    }) as u8
}

#[inline(always)]
fn f32_to_e4m3(x: f32) -> u8 {
    to_f8(x, 3, 7, 0x7e)
}

#[inline(always)]
fn f32_to_e5m2(x: f32) -> u8 {
    to_f8(x, 2, 15, 0x7b)
}
