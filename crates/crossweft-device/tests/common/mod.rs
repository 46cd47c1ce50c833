//! What the tests share: a host block, a random number generator, and an independent idea of what
//! elements are and how they are reduced.
// Each test program uses its part.
#![allow(dead_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossweft_device::{Block, DataType, Raw, ReduceOp, Stopped, Waiting};

/// One thread of a block on the host. Its waits yield, and end after so many looks that only a
/// broken protocol gets there, or when another thread of the test has failed.
#[derive(Clone, Copy)]
pub(crate) struct HostBlock<'a> {
    pub(crate) thread: u32,
    pub(crate) threads: u32,
    pub(crate) patience: u32,
    pub(crate) failed: Option<&'a AtomicBool>,
}

impl HostBlock<'_> {
    /// A block of one thread, on a thread of the host of its own.
    pub(crate) const ALONE: Self = Self {
        thread: 0,
        threads: 1,
        patience: 1 << 24,
        failed: None,
    };

    /// A block of one thread that has nobody to wait for.
    pub(crate) const NO_WAIT: Self = Self {
        patience: 0,
        ..Self::ALONE
    };
}

impl Block for HostBlock<'_> {
    type Memory = Raw;

    fn memory(&self) -> &Raw {
        &Raw
    }

    fn thread(&self) -> u32 {
        self.thread
    }

    fn threads(&self) -> u32 {
        self.threads
    }

    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        mine
    }

    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        if waiting.spins >= self.patience {
            return Err(Stopped::Deadline);
        }
        if self.failed.is_some_and(|f| f.load(Ordering::Relaxed)) {
            return Err(Stopped::Aborted);
        }
        std::thread::yield_now();
        Ok(())
    }

    fn refuse(&self, _waiting: &Waiting) -> Stopped {
        Stopped::Mismatch
    }

    fn wake(&self, _peer: u32) {}
}

/// Tells the other threads of a test if this one panics.
pub(crate) struct TellIfPanicking<'a>(pub(crate) &'a AtomicBool);

impl Drop for TellIfPanicking<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// A barrier of threads that ends when one of them has failed.
pub(crate) struct Meeting {
    pub(crate) parties: u64,
    pub(crate) arrived: AtomicU64,
}

impl Meeting {
    pub(crate) fn wait(&self, failed: &AtomicBool) {
        let before = self.arrived.fetch_add(1, Ordering::AcqRel);
        let target = (before / self.parties + 1) * self.parties;
        while self.arrived.load(Ordering::Acquire) < target {
            assert!(!failed.load(Ordering::Relaxed), "another thread failed");
            std::thread::yield_now();
        }
    }
}

/// splitmix64: the same numbers on every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// The byte that guards are made of.
pub(crate) const GUARD: u8 = 0xa5;
const GUARD_BYTES: usize = 64;

/// Bytes at a chosen alignment, with guards around them.
pub(crate) struct Guarded {
    words: Vec<u64>,
    begin: usize,
    len: usize,
}

impl Guarded {
    /// `len` bytes at an address that is `offset` more than a multiple of 8, all [`GUARD`].
    pub(crate) fn new(len: usize, offset: usize) -> Self {
        let bytes = len + offset + 2 * GUARD_BYTES;
        Self {
            words: vec![u64::from_ne_bytes([GUARD; 8]); bytes.div_ceil(8)],
            begin: GUARD_BYTES + offset,
            len,
        }
    }

    pub(crate) fn holding(content: &[u8], offset: usize) -> Self {
        let mut this = Self::new(content.len(), offset);
        let (begin, end) = (this.begin, this.begin + this.len);
        this.all_mut()[begin..end].copy_from_slice(content);
        this
    }

    fn all(&self) -> &[u8] {
        // SAFETY: initialised memory of this size; a byte needs no alignment.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.words.len() * 8) }
    }

    fn all_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed alone; any bytes are words.
        unsafe {
            std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * 8)
        }
    }

    /// The address, for device code to write through.
    pub(crate) fn addr(&mut self) -> u64 {
        self.words.as_mut_ptr() as u64 + self.begin as u64
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.all()[self.begin..self.begin + self.len]
    }

    pub(crate) fn word(&self, i: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.bytes()[8 * i..8 * i + 8]);
        u64::from_le_bytes(word)
    }

    /// Whether nothing around the bytes was written.
    pub(crate) fn intact(&self) -> bool {
        let all = self.all();
        let around = all[..self.begin]
            .iter()
            .chain(&all[self.begin + self.len..]);
        around.into_iter().all(|&byte| byte == GUARD)
    }
}

/// An 8-bit float with `mantissa` mantissa bits and exponent bias `bias`, from its definition.
fn decode_f8(bits: u8, mantissa: u32, bias: i32, ieee: bool) -> f64 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits & 0x7f) >> mantissa);
    let fraction = f64::from(bits & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let top = (1 << (7 - mantissa)) - 1;
    if ieee && exponent == top {
        return if fraction == 0.0 {
            sign * f64::INFINITY
        } else {
            f64::NAN
        };
    }
    if !ieee && bits & 0x7f == 0x7f {
        return f64::NAN;
    }
    if exponent == 0 {
        sign * fraction * 2_f64.powi(1 - bias)
    } else {
        sign * (1.0 + fraction) * 2_f64.powi(exponent - bias)
    }
}

pub(crate) fn decode_e4m3(bits: u8) -> f64 {
    decode_f8(bits, 3, 7, false)
}

pub(crate) fn decode_e5m2(bits: u8) -> f64 {
    decode_f8(bits, 2, 15, true)
}

/// The nearest of all finite values, the even one of two; too large ones saturate.
pub(crate) fn encode_f8(x: f64, decode: fn(u8) -> f64) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return 0x7f | sign;
    }
    let (mut best, mut distance) = (0, f64::INFINITY);
    let magnitude = x.abs().min(1e9);
    for code in 0..0x80 {
        let value = decode(code);
        let d = (value - magnitude).abs();
        if value.is_finite() && (d < distance || d == distance && code & 1 == 0) {
            (best, distance) = (code, d);
        }
    }
    best | sign
}

/// An element as a number.
#[derive(Clone, Copy, Debug)]
enum Number {
    Integer(i128),
    Single(f32),
    Double(f64),
}

fn number(dtype: DataType, bytes: &[u8]) -> Number {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    match dtype {
        DataType::I8 => Number::Integer(i128::from(bits as i8)),
        DataType::I16 => Number::Integer(i128::from(bits as i16)),
        DataType::I32 => Number::Integer(i128::from(bits as i32)),
        DataType::I64 => Number::Integer(i128::from(bits as i64)),
        DataType::U8 | DataType::U16 | DataType::U32 | DataType::U64 => {
            Number::Integer(i128::from(bits))
        }
        DataType::F16 => Number::Single(half::f16::from_bits(bits as u16).to_f32()),
        DataType::Bf16 => Number::Single(half::bf16::from_bits(bits as u16).to_f32()),
        DataType::F32 => Number::Single(f32::from_bits(bits as u32)),
        DataType::F64 => Number::Double(f64::from_bits(bits)),
        DataType::F8E4M3 => Number::Single(decode_e4m3(bits as u8) as f32),
        DataType::F8E5M2 => Number::Single(decode_e5m2(bits as u8) as f32),
        _ => panic!("a data type this test does not know"),
    }
}

/// What the integers of `dtype` wrap to.
fn wrap(dtype: DataType, value: i128) -> i128 {
    let bits = value as u64;
    match dtype {
        DataType::I8 => i128::from(bits as i8),
        DataType::I16 => i128::from(bits as i16),
        DataType::I32 => i128::from(bits as i32),
        DataType::I64 => i128::from(bits as i64),
        DataType::U8 => i128::from(bits as u8),
        DataType::U16 => i128::from(bits as u16),
        DataType::U32 => i128::from(bits as u32),
        _ => i128::from(bits),
    }
}

macro_rules! float_op {
    ($op:expr, $a:expr, $b:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Avg => $a + $b,
            ReduceOp::Prod => $a * $b,
            ReduceOp::Min if $a.is_nan() || $b < $a => $b,
            ReduceOp::Max if $a.is_nan() || $b > $a => $b,
            _ => $a,
        }
    };
}

fn combine(dtype: DataType, op: ReduceOp, a: Number, b: Number) -> Number {
    match (a, b) {
        (Number::Single(a), Number::Single(b)) => Number::Single(float_op!(op, a, b)),
        (Number::Double(a), Number::Double(b)) => Number::Double(float_op!(op, a, b)),
        (Number::Integer(a), Number::Integer(b)) => Number::Integer(match op {
            ReduceOp::Sum | ReduceOp::Avg => wrap(dtype, a + b),
            // Two 64-bit factors fit into 128 bits, but for the sign: wrapping is what is asked for.
            ReduceOp::Prod => wrap(dtype, a.wrapping_mul(b)),
            ReduceOp::Min => a.min(b),
            _ => a.max(b),
        }),
        _ => panic!("one element is a float, the other is not"),
    }
}

fn divide(value: Number, divisor: u32) -> Number {
    match value {
        Number::Single(x) => Number::Single(x / divisor as f32),
        Number::Double(x) => Number::Double(x / f64::from(divisor)),
        Number::Integer(x) => Number::Integer(x / i128::from(divisor)),
    }
}

fn to_bytes(dtype: DataType, value: Number) -> Vec<u8> {
    let bits = match value {
        Number::Integer(x) => x as u64,
        Number::Double(x) => x.to_bits(),
        Number::Single(x) => match dtype {
            DataType::F16 => u64::from(half::f16::from_f32(x).to_bits()),
            DataType::Bf16 => u64::from(half::bf16::from_f32(x).to_bits()),
            DataType::F8E4M3 => u64::from(encode_f8(x.into(), decode_e4m3)),
            DataType::F8E5M2 => u64::from(encode_f8(x.into(), decode_e5m2)),
            _ => u64::from(x.to_bits()),
        },
    };
    bits.to_le_bytes()[..dtype.size()].to_vec()
}

/// The reduction of `sources`, element by element, in their order.
pub(crate) fn reference(
    dtype: DataType,
    op: ReduceOp,
    divisor: u32,
    sources: &[Vec<u8>],
) -> Vec<u8> {
    let size = dtype.size();
    let mut out = Vec::new();
    for at in (0..sources[0].len()).step_by(size) {
        let values = sources.iter().map(|s| number(dtype, &s[at..at + size]));
        let mut value = values
            .reduce(|a, b| combine(dtype, op, a, b))
            .expect("at least one source");
        if op == ReduceOp::Avg && divisor != 0 {
            value = divide(value, divisor);
        }
        out.extend(to_bytes(dtype, value));
    }
    out
}

/// Whether two elements are the same bits, or both NaN.
fn same(dtype: DataType, a: &[u8], b: &[u8]) -> bool {
    let nan = |bytes| match number(dtype, bytes) {
        Number::Integer(_) => false,
        Number::Single(x) => x.is_nan(),
        Number::Double(x) => x.is_nan(),
    };
    a == b || nan(a) && nan(b)
}

/// Index of the first element in which two arrays differ; NaNs are all alike.
pub(crate) fn difference(dtype: DataType, a: &[u8], b: &[u8]) -> Option<usize> {
    assert_eq!(a.len(), b.len());
    let size = dtype.size();
    a.chunks(size)
        .zip(b.chunks(size))
        .position(|(a, b)| !same(dtype, a, b))
}
