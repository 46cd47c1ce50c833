//! Conversions and arithmetic of elements, against independent definitions.

mod common;

use common::{Random, decode_e4m3, decode_e5m2, encode_f8};
use crossweft_device::element::{Bf16, Element, F8E4M3, F8E5M2, F16};
use half::{bf16, f16};

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

#[test]
fn every_f16_and_bf16_decodes() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (F16(bits).load(), f16::from_bits(bits).to_f32());
        assert!(same(ours, theirs), "f16 {bits:#06x}: {ours} or {theirs}");
        let (ours, theirs) = (Bf16(bits).load(), bf16::from_bits(bits).to_f32());
        assert!(same(ours, theirs), "bf16 {bits:#06x}: {ours} or {theirs}");
    }
}

#[test]
fn every_f16_and_bf16_survives_a_round_trip() {
    for bits in 0..=u16::MAX {
        let back = F16::store(F16(bits).load()).0;
        assert!(back == bits || f16::from_bits(bits).is_nan() && f16::from_bits(back).is_nan());
        let back = Bf16::store(Bf16(bits).load()).0;
        assert!(back == bits || bf16::from_bits(bits).is_nan() && bf16::from_bits(back).is_nan());
    }
}

fn check_16_bit(x: f32) {
    let (ours, theirs) = (F16::store(x).0, f16::from_f32(x));
    if x.is_nan() {
        assert!(f16::from_bits(ours).is_nan(), "{x:?} as f16");
    } else {
        assert_eq!(ours, theirs.to_bits(), "{x:e} as f16");
    }
    let (ours, theirs) = (Bf16::store(x).0, bf16::from_f32(x));
    if x.is_nan() {
        assert!(bf16::from_bits(ours).is_nan(), "{x:?} as bf16");
    } else {
        assert_eq!(ours, theirs.to_bits(), "{x:e} as bf16");
    }
}

/// `x` and the numbers next to it, with both signs.
fn around(x: f32) -> impl Iterator<Item = f32> {
    [x.next_down(), x, x.next_up()]
        .into_iter()
        .flat_map(|x| [x, -x])
}

#[test]
fn half_way_cases_round_to_even() {
    for bits in 0..0x7c00 {
        let next = if bits == 0x7bff {
            65536.0
        } else {
            f16::from_bits(bits + 1).to_f32()
        };
        let value = f16::from_bits(bits).to_f32();
        around(value).for_each(check_16_bit);
        around((value + next) / 2.0).for_each(check_16_bit);
    }
    for bits in 0..0x7f80_u32 {
        // Half a step of a bfloat16 is bit 15 of the f32.
        around(f32::from_bits(bits << 16)).for_each(check_16_bit);
        around(f32::from_bits(bits << 16 | 0x8000)).for_each(check_16_bit);
    }
}

/// Numbers at the edges of every type: zeros, subnormals, overflow, infinities, NaNs.
fn edges() -> Vec<f32> {
    let mut all = vec![
        0.0,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        f32::from_bits(0x007f_ffff),
        65504.0,
        65519.996,
        65520.0,
        65536.0,
        1e30,
        f32::MAX,
        f32::INFINITY,
        448.0,
        464.0,
        480.0,
        57344.0,
        61440.0,
    ];
    all.extend((-149..128).map(|e| 2_f64.powi(e) as f32));
    all.extend([0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff, 0x7f80_8000].map(f32::from_bits));
    let negative: Vec<_> = all.iter().map(|x| -x).collect();
    all.extend(negative);
    all
}

#[test]
fn edges_of_16_bit_floats() {
    edges().into_iter().for_each(check_16_bit);
}

#[test]
fn random_bits_to_16_bit_floats() {
    let mut random = Random(1);
    for _ in 0..1_000_000 {
        check_16_bit(f32::from_bits(random.next() as u32));
    }
}

#[test]
fn every_8_bit_float_decodes() {
    for bits in 0..=u8::MAX {
        let (ours, theirs) = (F8E4M3(bits).load(), decode_e4m3(bits) as f32);
        assert!(same(ours, theirs), "e4m3 {bits:#04x}: {ours} or {theirs}");
        assert!(same(ours, float8::F8E4M3::from_bits(bits).to_f32()));
        let (ours, theirs) = (F8E5M2(bits).load(), decode_e5m2(bits) as f32);
        assert!(same(ours, theirs), "e5m2 {bits:#04x}: {ours} or {theirs}");
        assert!(same(ours, float8::F8E5M2::from_bits(bits).to_f32()));
    }
}

fn check_8_bit(x: f32) {
    let (e4m3, e5m2) = (F8E4M3::store(x).0, F8E5M2::store(x).0);
    if x.is_nan() {
        assert!(decode_e4m3(e4m3).is_nan() && decode_e5m2(e5m2).is_nan());
    } else {
        assert_eq!(e4m3, encode_f8(x.into(), decode_e4m3), "{x:e} as e4m3");
        assert_eq!(e5m2, encode_f8(x.into(), decode_e5m2), "{x:e} as e5m2");
    }
}

#[test]
fn eight_bit_floats_round_to_nearest_even_and_saturate() {
    edges().into_iter().for_each(check_8_bit);
    for (decode, largest) in [(decode_e4m3 as fn(u8) -> f64, 0x7e), (decode_e5m2, 0x7b)] {
        for code in 0..=largest {
            let value = decode(code) as f32;
            around(value).for_each(check_8_bit);
            if code < largest {
                around((value + decode(code + 1) as f32) / 2.0).for_each(check_8_bit);
            }
        }
    }
    let mut random = Random(2);
    for _ in 0..50_000 {
        let bits = random.next();
        check_8_bit(f32::from_bits(bits as u32));
        // Exponents near those of the 8-bit types.
        let exponent = 100 + random.below(50) as u32;
        let sign_and_mantissa = (bits >> 32) as u32 & 0x807f_ffff;
        check_8_bit(f32::from_bits(sign_and_mantissa | exponent << 23));
    }
    assert_eq!(F8E4M3::store(f32::INFINITY).0, 0x7e);
    assert_eq!(F8E4M3::store(f32::NEG_INFINITY).0, 0xfe);
    assert_eq!(F8E5M2::store(f32::INFINITY).0, 0x7b);
    assert_eq!(F8E5M2::store(f32::NEG_INFINITY).0, 0xfb);
}

macro_rules! integers {
    ($($name:ident: $t:ty;)*) => { $(
        #[test]
        fn $name() {
            let (min, max) = (<$t>::MIN, <$t>::MAX);
            let mut random = Random(3);
            let mut values: Vec<$t> = vec![min, min.wrapping_add(1), 0, 1, 2, 7, max - 1, max];
            values.extend((0..50).map(|_| random.next() as $t));
            for &a in &values {
                assert_eq!(<$t>::store(a.load()), a);
                for &b in &values {
                    assert_eq!(<$t as Element>::add(a, b), a.wrapping_add(b));
                    assert_eq!(<$t as Element>::mul(a, b), a.wrapping_mul(b));
                    assert_eq!(<$t as Element>::min(a, b), Ord::min(a, b));
                    assert_eq!(<$t as Element>::max(a, b), Ord::max(a, b));
                }
                for ranks in [1, 2, 3, 127, 128, 255, 256, 65535, 65536, u32::MAX] {
                    let wide = i128::from(a) / i128::from(ranks);
                    assert_eq!(i128::from(<$t as Element>::div(a, ranks)), wide, "{a} / {ranks}");
                }
            }
        }
    )* };
}

integers! {
    arithmetic_of_i8: i8;
    arithmetic_of_u8: u8;
    arithmetic_of_i16: i16;
    arithmetic_of_u16: u16;
    arithmetic_of_i32: i32;
    arithmetic_of_u32: u32;
    arithmetic_of_i64: i64;
    arithmetic_of_u64: u64;
}

#[test]
fn integer_averages_truncate_towards_zero() {
    assert_eq!(i32::div(-7, 2), -3);
    assert_eq!(i32::div(7, 2), 3);
    assert_eq!(i8::div(-128, 200), 0);
    assert_eq!(u8::div(255, 256), 0);
}

macro_rules! floats {
    ($($name:ident: $t:ty, $acc:ty;)*) => { $(
        #[test]
        fn $name() {
            let nan = <$acc>::NAN;
            for x in [0.0, -1.5, 1.5, <$acc>::MAX, <$acc>::INFINITY, <$acc>::NEG_INFINITY] {
                for (a, b) in [(x, nan), (nan, x)] {
                    assert_eq!(<$t as Element>::min(a, b), x);
                    assert_eq!(<$t as Element>::max(a, b), x);
                    assert!(<$t as Element>::add(a, b).is_nan());
                    assert!(<$t as Element>::mul(a, b).is_nan());
                }
            }
            assert!(<$t as Element>::min(nan, nan).is_nan());
            assert!(<$t as Element>::max(nan, nan).is_nan());
            assert_eq!(<$t as Element>::min(-1.0, 2.0), -1.0);
            assert_eq!(<$t as Element>::max(-1.0, 2.0), 2.0);
            assert_eq!(<$t as Element>::min(2.0, -1.0), -1.0);
            assert_eq!(<$t as Element>::max(2.0, -1.0), 2.0);
            assert_eq!(<$t as Element>::div(7.0, 2), 3.5);
            assert_eq!(<$t as Element>::div(1.0, 3), 1.0 / 3.0);
        }
    )* };
}

floats! {
    arithmetic_of_f16: F16, f32;
    arithmetic_of_bf16: Bf16, f32;
    arithmetic_of_f32: f32, f32;
    arithmetic_of_f64: f64, f64;
    arithmetic_of_f8e4m3: F8E4M3, f32;
    arithmetic_of_f8e5m2: F8E5M2, f32;
}
