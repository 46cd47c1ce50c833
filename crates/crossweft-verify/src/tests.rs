//! Naive all-reduces in several orders must pass, and any planted error must be found.

use crate::{
    Mismatch, Mismatches, Pattern, PreMultiplied, RmsNorm, check_all_reduce, check_copies,
    check_reduce_scatter, check_reduction,
    exact::{to_bf16, to_f16},
    fill, fingerprint, reference_all_reduce,
};
use crossweft_device::{DataType, ReduceOp};
use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

const PATTERNS: [Pattern; 2] = [Pattern::Exact, Pattern::Random];

/// An element as its bits, zero-extended.
type Bits = u64;

fn elements(dtype: DataType, bytes: &[u8]) -> Vec<Bits> {
    let widen = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    };
    bytes.chunks(dtype.size()).map(widen).collect()
}

fn bytes(dtype: DataType, elements: &[Bits]) -> Vec<u8> {
    let narrow = |bits: &Bits| bits.to_le_bytes().into_iter().take(dtype.size());
    elements.iter().flat_map(narrow).collect()
}

fn input(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    rank: u32,
    n: u32,
    len: usize,
) -> Vec<u8> {
    let mut out = vec![0xa5; len * dtype.size()];
    fill(pattern, dtype, op, 7, rank, n, &mut out);
    out
}

/// The float of those bits.
fn decode(dtype: DataType, bits: Bits) -> f64 {
    match dtype {
        DataType::F16 => f16::from_bits(bits as u16).to_f64(),
        DataType::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        DataType::F32 => f64::from(f32::from_bits(bits as u32)),
        DataType::F64 => f64::from_bits(bits),
        DataType::F8E4M3 => e4m3(bits as u8),
        DataType::F8E5M2 => e5m2(bits as u8),
        _ => panic!("{dtype} is no float"),
    }
}

/// E4M3 from its definition.
fn e4m3(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => fraction / 8.0 * 2f64.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    };
    if bits & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// E5M2 from its definition.
fn e5m2(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 2 & 31), f64::from(bits & 3));
    let magnitude = match (exponent, bits & 3) {
        (31, 0) => f64::INFINITY,
        (31, _) => f64::NAN,
        (0, _) => fraction / 4.0 * 2f64.powi(-14),
        _ => (1.0 + fraction / 4.0) * 2f64.powi(exponent - 15),
    };
    if bits & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The nearest of the finite values by trying each; the even one of two; the largest beyond it.
fn nearest(x: f64, decode: fn(u8) -> f64) -> u8 {
    let sign = u8::from(x.is_sign_negative()) << 7;
    let mut best = 0u8;
    for bits in 0..=0x7f {
        let distance = |bits| (decode(bits) - x.abs().min(1e6)).abs();
        let closer = distance(bits) < distance(best);
        let even = distance(bits) == distance(best) && bits & 1 == 0;
        if decode(bits).is_finite() && (closer || even) {
            best = bits;
        }
    }
    best | sign
}

/// The bits of a float rounded to the type.
fn encode(dtype: DataType, x: f64) -> Bits {
    match dtype {
        DataType::F16 => f16::from_f32(x as f32).to_bits().into(),
        DataType::Bf16 => bf16::from_f32(x as f32).to_bits().into(),
        DataType::F32 => (x as f32).to_bits().into(),
        DataType::F64 => x.to_bits(),
        DataType::F8E4M3 => nearest(x, e4m3).into(),
        DataType::F8E5M2 => nearest(x, e5m2).into(),
        _ => panic!("{dtype} is no float"),
    }
}

/// One operation of floats in the accumulator's type.
fn float_step(dtype: DataType, op: ReduceOp, a: f64, b: f64) -> f64 {
    let wide = match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        _ => panic!("{op} is new"),
    };
    if dtype == DataType::F64 {
        return wide;
    }
    // The sum or product of two f32 fits f64 well enough that this is the f32 operation.
    f64::from(wide as f32)
}

/// The integer of those bits.
fn integer(dtype: DataType, bits: Bits) -> i128 {
    match dtype {
        DataType::I8 => (bits as i8).into(),
        DataType::I16 => (bits as i16).into(),
        DataType::I32 => (bits as i32).into(),
        DataType::I64 => (bits as i64).into(),
        _ => bits.into(),
    }
}

fn truncate(dtype: DataType, x: i128) -> Bits {
    x as u64 & (u64::MAX >> (64 - 8 * dtype.size()))
}

/// One hop: the result is rounded, or wrapped, to the type.
fn hop(dtype: DataType, op: ReduceOp, a: Bits, b: Bits) -> Bits {
    if dtype.is_float() {
        let result = float_step(dtype, op, decode(dtype, a), decode(dtype, b));
        return encode(dtype, result);
    }
    let (a, b) = (integer(dtype, a), integer(dtype, b));
    let result = match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        _ => panic!("{op} is new"),
    };
    truncate(dtype, result)
}

/// The division of an average.
fn finish(dtype: DataType, op: ReduceOp, total: Bits, n: u32) -> Bits {
    if op != ReduceOp::Avg {
        return total;
    }
    if dtype.is_float() {
        let quotient = decode(dtype, total) / f64::from(n);
        let rounded = if dtype == DataType::F64 {
            quotient
        } else {
            f64::from(quotient as f32)
        };
        return encode(dtype, rounded);
    }
    truncate(dtype, integer(dtype, total) / i128::from(n))
}

#[derive(Clone, Copy, Debug)]
enum Order {
    /// In rank order in the accumulator's type, rounded at the end.
    Direct,
    /// From the last rank to the first, rounded at every hop.
    Reverse,
    /// From a rank that depends on the index, rounded at every hop.
    Ring,
    /// Halves of halves, rounded at every hop.
    Tree,
}

const ORDERS: [Order; 4] = [Order::Direct, Order::Reverse, Order::Ring, Order::Tree];

fn reduce(dtype: DataType, op: ReduceOp, order: Order, index: usize, inputs: &[Bits]) -> Bits {
    let n = inputs.len();
    let chain = |start: usize, step: usize| {
        let rank = |i: usize| inputs[(start + i * step) % n];
        (1..n).fold(rank(0), |total, i| hop(dtype, op, total, rank(i)))
    };
    let total = match order {
        Order::Direct if dtype.is_float() => {
            let floats = inputs.iter().map(|&bits| decode(dtype, bits));
            let total = floats.reduce(|a, b| float_step(dtype, op, a, b)).unwrap();
            if op == ReduceOp::Avg && dtype != DataType::F64 {
                let quotient = total as f32 / n as f32;
                return encode(dtype, quotient.into());
            }
            encode(dtype, total)
        }
        Order::Direct => chain(0, 1),
        Order::Reverse => chain(n - 1, n - 1),
        Order::Ring => chain(index % n, 1),
        Order::Tree => tree(dtype, op, inputs),
    };
    finish(dtype, op, total, n as u32)
}

fn tree(dtype: DataType, op: ReduceOp, inputs: &[Bits]) -> Bits {
    match inputs {
        [] => panic!("no ranks"),
        [one] => *one,
        _ => {
            let (low, high) = inputs.split_at(inputs.len() / 2);
            hop(dtype, op, tree(dtype, op, low), tree(dtype, op, high))
        }
    }
}

/// The all-reduce of that order over inputs of [`fill`].
fn all_reduce(
    pattern: Pattern,
    dtype: DataType,
    op: ReduceOp,
    order: Order,
    n: u32,
    len: usize,
) -> Vec<u8> {
    let ranks: Vec<_> = (0..n)
        .map(|rank| elements(dtype, &input(pattern, dtype, op, rank, n, len)))
        .collect();
    let column = |i: usize| ranks.iter().map(|rank| rank[i]).collect::<Vec<_>>();
    let result: Vec<_> = (0..len)
        .map(|i| reduce(dtype, op, order, i, &column(i)))
        .collect();
    bytes(dtype, &result)
}

fn combinations() -> impl Iterator<Item = (Pattern, DataType, ReduceOp)> {
    PATTERNS.into_iter().flat_map(|pattern| {
        DataType::ALL.into_iter().flat_map(move |dtype| {
            ReduceOp::ALL
                .into_iter()
                .map(move |op| (pattern, dtype, op))
        })
    })
}

#[test]
fn every_order_is_accepted() {
    for (pattern, dtype, op) in combinations() {
        for n in [1, 2, 3, 5, 8, 16] {
            for order in ORDERS {
                let got = all_reduce(pattern, dtype, op, order, n, 301);
                assert_eq!(
                    check_all_reduce(pattern, dtype, op, 7, n, &got),
                    Mismatches::default(),
                    "{pattern:?} {dtype} {op} {order:?} of {n}"
                );
            }
        }
    }
}

#[test]
fn every_order_is_accepted_at_64_ranks() {
    for (pattern, dtype, op) in combinations() {
        for order in ORDERS {
            let got = all_reduce(pattern, dtype, op, order, 64, 100);
            assert_eq!(
                check_all_reduce(pattern, dtype, op, 7, 64, &got),
                Mismatches::default(),
                "{pattern:?} {dtype} {op} {order:?}"
            );
        }
    }
}

#[test]
fn the_reference_passes_its_own_check_and_can_start_anywhere() {
    for (pattern, dtype, op) in combinations() {
        let mut whole = vec![0; 1500 * dtype.size()];
        reference_all_reduce(pattern, dtype, op, 7, 5, 0, &mut whole);
        let result = check_all_reduce(pattern, dtype, op, 7, 5, &whole);
        assert_eq!(result, Mismatches::default(), "{pattern:?} {dtype} {op}");

        let mut part = vec![0; 600 * dtype.size()];
        reference_all_reduce(pattern, dtype, op, 7, 5, 777, &mut part);
        assert_eq!(
            part,
            whole[777 * dtype.size()..][..part.len()],
            "{pattern:?} {dtype} {op}"
        );
    }
}

/// Every single bit, of two elements, where bits are compared.
#[test]
fn one_wrong_bit_is_found() {
    for (pattern, dtype, op) in combinations() {
        let bound = pattern == Pattern::Random
            && dtype.is_float()
            && !matches!(op, ReduceOp::Min | ReduceOp::Max);
        let right = all_reduce(pattern, dtype, op, Order::Tree, 3, 700);
        for index in [0, 699] {
            for bit in 0..8 * dtype.size() {
                // Low bits are within the bound, and so can be the sign of a sum near zero.
                if bound && (bit + 2 != 8 * dtype.size()) {
                    continue;
                }
                let mut got = right.clone();
                got[index * dtype.size() + bit / 8] ^= 1 << (bit % 8);
                let found = check_all_reduce(pattern, dtype, op, 7, 3, &got);
                let what = format!("{pattern:?} {dtype} {op}: bit {bit} of {index}: {found:?}");
                assert_eq!(found.wrong, 1, "{what}");
                assert_eq!(found.first.unwrap().index, index as u64, "{what}");
            }
        }
    }
}

#[test]
fn a_missing_rank_is_found() {
    for (pattern, dtype, op) in combinations() {
        // A product of 8-bit floats is known to 3/8 or worse; the exact pattern covers it.
        if pattern == Pattern::Random && op == ReduceOp::Prod && dtype.size() == 1 {
            continue;
        }
        let got = input(pattern, dtype, op, 0, 2, 1000);
        let found = check_all_reduce(pattern, dtype, op, 7, 2, &got);
        assert!(found.wrong > 300, "{pattern:?} {dtype} {op}: {found:?}");
    }
}

#[test]
fn the_first_error_is_described() {
    let (dtype, op) = (DataType::I16, ReduceOp::Sum);
    let mut got = all_reduce(Pattern::Exact, dtype, op, Order::Direct, 2, 10);
    let right = elements(dtype, &got)[6] as i16;
    got[12..14].copy_from_slice(&(-2i16).to_ne_bytes());
    got[18] ^= 1;
    got.push(0);
    let found = check_all_reduce(Pattern::Exact, dtype, op, 7, 2, &got);
    assert_eq!(found.wrong, 3);
    assert_eq!(
        found.first,
        Some(Mismatch {
            index: 6,
            got: "-2 (0xfffe)".into(),
            expected: format!("{right} (0x{right:04x})"),
        })
    );

    let zeros = [0; 4];
    let found = check_all_reduce(Pattern::Random, DataType::F32, op, 7, 1, &zeros);
    let first = found.first.unwrap();
    assert_eq!(first.got, "0e0 (0x00000000)");
    assert!(first.expected.contains(" within "), "{}", first.expected);

    let found = check_all_reduce(Pattern::Exact, DataType::F32, op, 7, 1, &zeros[..3]);
    assert_eq!((found.wrong, found.first.unwrap().index), (1, 0));
    let found = check_all_reduce(Pattern::Exact, DataType::F32, op, 7, 0, &[]);
    assert_eq!(found, Mismatches::default());
}

#[test]
fn nan_and_infinity_are_never_right() {
    for op in ReduceOp::ALL {
        for (dtype, bits) in [
            (DataType::F32, f64::NAN.to_bits() >> 32 | 0x7fc0_0000),
            (DataType::F32, f32::INFINITY.to_bits().into()),
            (DataType::F64, f64::NAN.to_bits()),
            (DataType::F64, f64::NEG_INFINITY.to_bits()),
            (DataType::F8E4M3, 0x7f),
            (DataType::F8E5M2, 0x7c),
        ] {
            for pattern in PATTERNS {
                let got = bytes(dtype, &[bits]);
                let found = check_all_reduce(pattern, dtype, op, 7, 3, &got);
                assert_eq!(found.wrong, 1, "{pattern:?} {dtype} {op} {bits:x}");
            }
        }
    }
}

/// The largest number that the type counts up to without a gap.
fn counts_to(dtype: DataType) -> i128 {
    match dtype {
        DataType::I8 => i8::MAX.into(),
        DataType::U8 => u8::MAX.into(),
        DataType::I16 => i16::MAX.into(),
        DataType::U16 => u16::MAX.into(),
        DataType::I32 => i32::MAX.into(),
        DataType::U32 => u32::MAX.into(),
        DataType::I64 => i64::MAX.into(),
        DataType::U64 => u64::MAX.into(),
        DataType::F16 => 1 << 11,
        DataType::Bf16 => 1 << 8,
        DataType::F32 => 1 << 24,
        DataType::F64 => 1 << 53,
        DataType::F8E4M3 => 1 << 4,
        DataType::F8E5M2 => 1 << 3,
        _ => panic!("{dtype} is new"),
    }
}

/// Inputs are whole numbers, and no partial sum or product leaves the range where whole numbers are
/// exact: so every partial result is exact whatever the order.
#[test]
fn exact_partial_results_are_representable() {
    for dtype in DataType::ALL {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod] {
            for n in [1, 2, 3, 5, 8, 16, 63, 64, 1000] {
                let ranks: Vec<_> = (0..n)
                    .map(|rank| elements(dtype, &input(Pattern::Exact, dtype, op, rank, n, 200)))
                    .collect();
                for i in 0..200 {
                    let values = ranks.iter().map(|rank| whole(dtype, rank[i]));
                    let largest: i128 = if op == ReduceOp::Prod {
                        values.map(i128::abs).product()
                    } else {
                        values.map(i128::abs).sum()
                    };
                    let limit = counts_to(dtype);
                    assert!(
                        (1..=limit).contains(&largest),
                        "{dtype} {op} of {n}: {largest}"
                    );
                }
            }
        }
    }
}

/// The whole number of those bits, which must not be -0.
fn whole(dtype: DataType, bits: Bits) -> i128 {
    if !dtype.is_float() {
        return integer(dtype, bits);
    }
    let x = decode(dtype, bits);
    assert!(
        x.fract() == 0.0 && (x != 0.0 || x.is_sign_positive()),
        "{dtype} {x}"
    );
    x as i128
}

#[test]
fn random_floats_are_finite_and_sums_far_from_the_largest() {
    let floats = DataType::ALL.into_iter().filter(|dtype| dtype.is_float());
    for (dtype, op) in floats.flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op))) {
        let largest = match dtype {
            DataType::F16 => 65504.0,
            DataType::F8E4M3 => 448.0,
            DataType::F8E5M2 => 57344.0,
            _ => 1e30,
        };
        for n in [1, 2, 16, 64, 4096] {
            let values = elements(dtype, &input(Pattern::Random, dtype, op, 0, n, 5000));
            for x in values.iter().map(|&bits| decode(dtype, bits)) {
                assert!(x.is_finite() && x != 0.0, "{dtype} {op} of {n}: {x}");
                if matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
                    assert!(
                        x.abs() * f64::from(n) <= largest / 2.0,
                        "{dtype} {op} of {n}: {x}"
                    );
                }
            }
            let negative = values
                .iter()
                .filter(|&&bits| decode(dtype, bits) < 0.0)
                .count();
            assert!(
                (2000..3000).contains(&negative),
                "{dtype} {op} of {n}: {negative}"
            );
        }
    }
}

#[test]
fn inputs_depend_on_seed_and_rank_only() {
    for (pattern, dtype, op) in combinations() {
        // Unsigned exact products hold few values other than 1, but do differ.
        let fill_with = |seed, rank, len: usize| {
            let mut out = vec![0; len * dtype.size()];
            fill(pattern, dtype, op, seed, rank, 4, &mut out);
            out
        };
        let base = fill_with(7, 1, 300);
        assert_eq!(base, fill_with(7, 1, 300));
        assert_eq!(base[..100 * dtype.size()], fill_with(7, 1, 100));
        assert_ne!(base, fill_with(8, 1, 300), "{pattern:?} {dtype} {op}");
        assert_ne!(base, fill_with(7, 2, 300), "{pattern:?} {dtype} {op}");
    }
}

#[test]
fn fill_takes_any_alignment_and_leaves_a_partial_element() {
    for dtype in DataType::ALL {
        let (pattern, op) = (Pattern::Random, ReduceOp::Sum);
        let whole = input(pattern, dtype, op, 2, 3, 50);
        for offset in 0..8 {
            let mut out = vec![0xa5; offset + whole.len() + dtype.size() - 1];
            fill(pattern, dtype, op, 7, 2, 3, &mut out[offset..]);
            assert_eq!(out[offset..][..whole.len()], whole);
            assert!(out[offset + whole.len()..].iter().all(|&byte| byte == 0xa5));
        }
    }
}

/// Points where a rounding to a small float can go wrong: every value, the midpoint of every two
/// neighbours, and the next `f64` on each side of both.
fn boundaries(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.filter(|x| x.is_finite() && *x >= 0.0).collect();
    values.sort_by(f64::total_cmp);
    let last = values[values.len() - 1];
    values.extend([last + (last - values[values.len() - 2]), 2.5 * last]);
    let middles: Vec<_> = values
        .windows(2)
        .map(|pair| (pair[0] + pair[1]) / 2.0)
        .collect();
    let points = values.into_iter().chain(middles);
    let around = points.flat_map(|x| [x.next_down(), x, x.next_up()]);
    around
        .chain([f64::MIN_POSITIVE, 1e300])
        .flat_map(|x| [x, -x])
        .collect()
}

#[test]
fn eight_bit_floats_round_as_documented() {
    for bits in 0..=255 {
        for (ours, theirs) in [
            (e4m3(bits), F8E4M3::from_bits(bits).to_f64()),
            (e5m2(bits), F8E5M2::from_bits(bits).to_f64()),
        ] {
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()));
        }
    }
    let halves = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f64());
    let mut points: Vec<_> = halves.filter(|x| !x.is_nan()).collect();
    points.extend(boundaries((0..=255).map(e4m3)));
    points.extend(boundaries((0..=255).map(e5m2)));
    points.extend([f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN]);
    for x in points {
        assert_eq!(
            F8E4M3::from_f64(x).to_bits(),
            nearest(x, e4m3),
            "e4m3 {x:e}"
        );
        assert_eq!(
            F8E5M2::from_f64(x).to_bits(),
            nearest(x, e5m2),
            "e5m2 {x:e}"
        );
    }
    assert_eq!(F8E4M3::from_f64(f64::INFINITY).to_f64(), 448.0);
    assert_eq!(F8E5M2::from_f64(f64::NEG_INFINITY).to_f64(), -57344.0);
    assert!(F8E4M3::from_f64(f64::NAN).is_nan() && F8E5M2::from_f64(f64::NAN).is_nan());
}

#[test]
fn sixteen_bit_floats_are_rounded_once() {
    let f16_bits = |x| to_f16(x).to_bits();
    let bf16_bits = |x| to_bf16(x).to_bits();
    check_rounding(
        |bits| f16::from_bits(bits).to_f64(),
        f16_bits,
        0x7bff,
        65536.0,
    );
    check_rounding(
        |bits| bf16::from_bits(bits).to_f64(),
        bf16_bits,
        0x7f7f,
        2f64.powi(128),
    );
    assert!(to_f16(f64::NAN).is_nan() && to_bf16(f64::NAN).is_nan());
}

fn check_rounding(
    decode: impl Fn(u16) -> f64,
    encode: impl Fn(f64) -> u16,
    largest: u16,
    after: f64,
) {
    for bits in 0..=largest {
        let here = decode(bits);
        let next = if bits == largest {
            after
        } else {
            decode(bits + 1)
        };
        let middle = (here + next) / 2.0;
        assert_eq!(encode(here), bits);
        assert_eq!(encode(-here), bits | 0x8000);
        assert_eq!(encode(middle.next_down()), bits, "{middle:e}");
        assert_eq!(encode(middle), bits + (bits & 1), "{middle:e}");
        assert_eq!(encode(middle.next_up()), bits + 1, "{middle:e}");
        assert_eq!(encode(-middle.next_up()), (bits + 1) | 0x8000, "{middle:e}");
    }
}

#[test]
fn fingerprints_differ_where_bytes_do() {
    let bytes: Vec<u8> = (0..100u8).collect();
    let mut seen = std::collections::HashSet::new();
    for len in 0..=100 {
        assert!(seen.insert(fingerprint(&bytes[..len])), "length {len}");
    }
    for bit in 0..800 {
        let mut other = bytes.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(seen.insert(fingerprint(&other)), "bit {bit}");
    }
    for i in 0..99 {
        let mut other = bytes.clone();
        other.swap(i, i + 1);
        assert!(seen.insert(fingerprint(&other)), "swapped at {i}");
    }
    assert!(seen.insert(fingerprint(&[0; 32])) && seen.insert(fingerprint(&[0; 40])));
    assert_eq!(fingerprint(&bytes), fingerprint(&bytes.clone()));
}

/// Elements of a block in the tests below: more than the reference handles at a time.
const BLOCK_LEN: usize = 700;

#[test]
fn blocks_of_a_reduce_scatter_are_those_of_an_all_reduce() {
    let n = 3;
    for (pattern, dtype, op) in combinations() {
        let mut all = vec![0; 3 * BLOCK_LEN * dtype.size()];
        reference_all_reduce(pattern, dtype, op, 7, n, 0, &mut all);
        for (rank, block) in (0..n).zip(all.chunks(BLOCK_LEN * dtype.size())) {
            let check =
                |rank, got: &[u8]| check_reduce_scatter(pattern, dtype, op, 7, rank, n, got);
            assert_eq!(
                check(rank, block),
                Mismatches::default(),
                "{pattern:?} {dtype} {op}"
            );
            let other = check((rank + 1) % n, block);
            assert!(other.wrong > 100, "{pattern:?} {dtype} {op}: {other:?}");
        }
    }
}

#[test]
fn reductions_of_some_blocks_are_compared() {
    let (n, length) = (4, BLOCK_LEN);
    for pattern in PATTERNS {
        let (dtype, op) = (DataType::I32, ReduceOp::Sum);
        let size = length * dtype.size();
        // Blocks of different places of two ranks' inputs.
        let blocks = [(3, 0), (1, 2)];
        let part = |(rank, block): (u32, u32)| {
            let whole = input(pattern, dtype, op, rank, n, 3 * length);
            elements(dtype, &whole[block as usize * size..][..size])
        };
        let (a, b) = (part(blocks[0]), part(blocks[1]));
        let sum = |(a, b): (&Bits, &Bits)| Bits::from((*a as u32).wrapping_add(*b as u32));
        let mut got = bytes(dtype, &a.iter().zip(&b).map(sum).collect::<Vec<_>>());
        let check = |blocks: &[(u32, u32)], got: &[u8]| {
            check_reduction(pattern, dtype, op, 7, n, blocks, got).wrong
        };
        assert_eq!(check(&blocks, &got), 0, "{pattern:?}");
        assert!(check(&[(3, 0), (1, 1)], &got) > 100, "another block");
        assert!(check(&[(3, 0)], &got) > 100, "one is missing");
        got[size - 1] ^= 1;
        assert_eq!(check(&blocks, &got), 1, "{pattern:?}");
        assert_eq!(
            check(&[(3, 0)], &bytes(dtype, &a)),
            0,
            "one alone is a copy"
        );
    }
}

/// Scalars of small whole multiples of a power of two, of every sign; of integers whole ones.
fn scalars(dtype: DataType, n: usize) -> Vec<f64> {
    let all = match dtype.is_float() {
        true => [2.0, -0.5, 1.0, 0.0, 1.5],
        false => [2.0, 1.0, 0.0, 3.0, 1.0],
    };
    all.into_iter().cycle().take(n).collect()
}

#[test]
fn sums_of_products_are_those_of_inputs_multiplied_by_hand() {
    for dtype in DataType::ALL {
        for pattern in PATTERNS {
            for n in [1_usize, 2, 5, 8] {
                let scalars = scalars(dtype, n);
                let sums = PreMultiplied {
                    pattern,
                    dtype,
                    seed: 7,
                    scalars: &scalars,
                };
                let products: Vec<Vec<Bits>> = (0..n)
                    .map(|rank| {
                        let mut input = vec![0; 300 * dtype.size()];
                        sums.fill(rank as u32, &mut input);
                        let times = |x: Bits| match dtype.is_float() {
                            true => encode(dtype, decode(dtype, x) * scalars[rank]),
                            false => truncate(dtype, integer(dtype, x) * scalars[rank] as i128),
                        };
                        elements(dtype, &input).into_iter().map(times).collect()
                    })
                    .collect();
                for order in ORDERS {
                    let sum = |i: usize| {
                        let column: Vec<_> = products.iter().map(|rank| rank[i]).collect();
                        reduce(dtype, ReduceOp::Sum, order, i, &column)
                    };
                    let result: Vec<_> = (0..300).map(sum).collect();
                    let mut got = bytes(dtype, &result);
                    let what = format!("{pattern:?} {dtype} {order:?} of {n}");
                    assert_eq!(sums.check(0, &got), Mismatches::default(), "{what}");
                    // Blocks lie one after another.
                    let (before, block) = got.split_at(150 * dtype.size());
                    assert_eq!(sums.check(0, before).wrong, 0, "{what}");
                    assert_eq!(sums.check(1, block).wrong, 0, "{what}");
                    if n > 2 {
                        // The bounds of short floats are too wide for what follows.
                        continue;
                    }
                    got[7 * dtype.size() - 1] ^= 0x40;
                    assert_eq!(sums.check(0, &got).wrong, 1, "{what}");
                }
            }
        }
    }
}

/// Sums of their multiples are exact in no order: one rank at a time holds more than zero.
#[test]
fn exact_sums_of_products_tell_zeros_from_results_whatever_the_scalars() {
    // Longer integers hold sums of multiples of any small number.
    let short = |dtype: &DataType| dtype.is_float() || dtype.size() == 1;
    for dtype in DataType::ALL.into_iter().filter(short) {
        let scalars = match dtype.is_float() {
            true => [0.1, -0.7, 3.0].map(|scalar| decode(dtype, encode(dtype, scalar))),
            false => [113.0, 120.0, 127.0],
        };
        let sums = PreMultiplied {
            pattern: Pattern::Exact,
            dtype,
            seed: 7,
            scalars: &scalars,
        };
        let mut totals = vec![0.0; 300];
        for (rank, scalar) in (0..).zip(scalars) {
            let mut input = vec![0; 300 * dtype.size()];
            sums.fill(rank, &mut input);
            for (total, x) in totals.iter_mut().zip(elements(dtype, &input)) {
                *total += scalar
                    * match dtype.is_float() {
                        true => decode(dtype, x),
                        false => integer(dtype, x) as f64,
                    };
            }
        }
        let result: Vec<Bits> = totals
            .into_iter()
            .map(|total| match dtype.is_float() {
                true => encode(dtype, total),
                false => truncate(dtype, total as i128),
            })
            .collect();
        let mut got = bytes(dtype, &result);
        assert_eq!(sums.check(0, &got), Mismatches::default(), "{dtype}");
        got.fill(0);
        assert_eq!(sums.check(0, &got).wrong, 300, "{dtype}");
    }
}

/// A scalar that is no number has no last bit.
#[test]
fn scalars_that_are_no_numbers_are_drawn_for_too() {
    for scalar in [f64::NAN, f64::INFINITY, f64::MIN_POSITIVE / 3.0] {
        let sums = PreMultiplied {
            pattern: Pattern::Exact,
            dtype: DataType::F64,
            seed: 7,
            scalars: &[1.0, scalar],
        };
        let mut input = [0; 64];
        sums.fill(0, &mut input);
        assert_ne!(input, [0; 64], "{scalar}");
    }
}

/// What tells a rounded product from one that goes into the sum as it is.
#[test]
fn products_are_rounded_to_the_type() {
    use crate::element::Element;
    // (1 + 2^-7) * (1 + 2^-6) = 1 + 3 * 2^-7 + 2^-13.
    let x = bf16::from_f32(1.0 + 1.0 / 128.0);
    let product = x.times(1.0 + 1.0 / 64.0);
    assert_eq!(product.to_f64(), 1.0 + 3.0 / 128.0);
    assert_eq!(100_i8.times(3.0), 44);
    assert_eq!((-1_i64).times(5.0), -5);
}

/// A token of four numbers, worked out by hand: their mean square is 4.
#[test]
fn a_normalised_token_is_what_it_should_be_and_errors_are_found() {
    let bytes =
        |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_ne_bytes()).collect() };
    let (sums, residual) = (bytes(&[1.0, -3.0, 2.0, 0.5]), bytes(&[1.0, 1.0, 0.0, 1.5]));
    let after = bytes(&[2.0, -2.0, 2.0, 2.0]);
    let weight = bytes(&[1.0, 2.0, 0.5, -448.0]);
    let got = bytes(&[1.0, -2.0, 0.5, -448.0]);
    let norm = RmsNorm {
        dtype: DataType::F32,
        hidden: 4,
        epsilon: 0.0,
        residual: Some(&residual),
        weight: &weight,
    };
    assert_eq!(norm.check(&sums, Some(&after), &got), Mismatches::default());
    for index in 0..4 {
        let mut wrong = after.clone();
        wrong[4 * index] ^= 1;
        let found = norm.check(&sums, Some(&wrong), &got);
        assert_eq!(found.first.unwrap().index, index as u64);
        let mut wrong = got.clone();
        // Some two thousand units in the last place.
        wrong[4 * index + 1] ^= 0x0f;
        let found = norm.check(&sums, Some(&after), &wrong);
        assert_eq!((found.wrong, found.first.unwrap().index), (1, index as u64));
    }
    assert_eq!(norm.check(&sums, None, &got).wrong, 1);
    assert_eq!(norm.check(&sums, Some(&after), &got[4..]).wrong, 1);

    let scale = |largest: f32| largest / 448.0;
    // 2 and 448 are the largest of two groups; 1 over its scale is 224, -2 is -448, and 0.5 is half a unit.
    let scales = [2.0 / 448.0, 1.0];
    let values = [0x76, 0xfe, 0x30, 0xfe];
    let check = |values: &[u8], scales: &[f32]| {
        norm.check_quantised(&got, 2, scale, (values, scales)).wrong
    };
    assert_eq!(check(&values, &scales), 0);
    for index in 0..4 {
        let mut wrong = values;
        wrong[index] ^= 1;
        assert_eq!(check(&wrong, &scales), 1);
    }
    assert_eq!(check(&values, &[scales[0], 1.5]), 1);
    assert_eq!(check(&values, &scales[1..]), 1);
}

#[test]
fn copies_are_compared_block_by_block() {
    let n = 3;
    let blocks = [(2, 0), (0, 1), (1, 2)];
    for (pattern, dtype, op) in combinations() {
        let size = BLOCK_LEN * dtype.size();
        let mut got = Vec::new();
        for (rank, block) in blocks {
            let whole = input(pattern, dtype, op, rank, n, 3 * BLOCK_LEN);
            got.extend_from_slice(&whole[block as usize * size..][..size]);
        }
        let check = |got: &[u8]| check_copies(pattern, dtype, op, 7, n, &blocks, got);
        assert_eq!(
            check(&got),
            Mismatches::default(),
            "{pattern:?} {dtype} {op}"
        );
        let at = size + 600 * dtype.size();
        got[at] ^= 1;
        let found = check(&got);
        let first = found.first.map(|first| first.index);
        assert_eq!(
            (found.wrong, first),
            (1, Some(1300)),
            "{pattern:?} {dtype} {op}"
        );
        got[at] ^= 1;
        got.extend_from_slice(&[0; 1]);
        assert_eq!(check(&got).wrong, 1, "a trailing byte");
    }
}

/// Run by hand: `cargo test --release -p crossweft-verify -- --ignored --nocapture`.
#[test]
#[ignore = "measures, asserts nothing"]
fn rates() {
    const LEN: usize = 64 << 20;
    let mut out = vec![0u8; LEN];
    let rate = |start: std::time::Instant| LEN as f64 / start.elapsed().as_secs_f64() / 1e9;
    for (pattern, dtype, op) in combinations() {
        if matches!(op, ReduceOp::Max) {
            continue;
        }
        let start = std::time::Instant::now();
        fill(pattern, dtype, op, 7, 1, 2, &mut out);
        let fill_rate = rate(start);
        reference_all_reduce(pattern, dtype, op, 7, 2, 0, &mut out);
        let start = std::time::Instant::now();
        let found = check_all_reduce(pattern, dtype, op, 7, 2, &out);
        let check_s = start.elapsed().as_secs_f64();
        println!("{pattern:?} {dtype} {op}: fill {fill_rate:.2} GB/s, check of 2 {check_s:.3} s");
        assert_eq!(found.wrong, 0);
    }
    let start = std::time::Instant::now();
    std::hint::black_box(fingerprint(&out));
    println!("fingerprint {:.2} GB/s", rate(start));
}
