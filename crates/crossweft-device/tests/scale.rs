//! Pre-multiplication: every product of small types against other libraries' conversions, and the GPU's leaves, as
//! the host runs them, against the host's own.
#![allow(clippy::unwrap_used)]

use crossweft_device::DataType;
use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::gpu::scale::scale;
use crossweft_device::scale::{HostScaler, element_bits};

/// Memory at an offset from an aligned address.
struct Bytes {
    words: Vec<u128>,
    offset: usize,
    bytes: usize,
}

impl Bytes {
    fn new(data: &[u8], offset: usize) -> Self {
        let mut words = vec![0_u128; (offset + data.len()).div_ceil(16) + 1];
        let base = words.as_mut_ptr().cast::<u8>();
        // SAFETY: there is room for both.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), base.add(offset), data.len()) };
        Self {
            words,
            offset,
            bytes: data.len(),
        }
    }

    fn addr(&mut self) -> u64 {
        self.words.as_mut_ptr() as u64 + self.offset as u64
    }

    fn get(&self) -> &[u8] {
        let base = self.words.as_ptr().cast::<u8>();
        // SAFETY: these were written in `new`.
        unsafe { std::slice::from_raw_parts(base.add(self.offset), self.bytes) }
    }
}

fn on_host(dtype: DataType, data: &[u8], scalar: u64) -> Vec<u8> {
    let mut out = vec![0xa5; data.len()];
    let (dst, src) = (out.as_mut_ptr() as u64, data.as_ptr() as u64);
    let elements = data.len() / dtype.size();
    // SAFETY: both have as many elements, the scalar is one.
    unsafe {
        HostScaler::new(dtype).scale(dst, src, elements, &raw const scalar as u64);
    }
    out
}

/// Bytes without any order.
fn noise(count: usize) -> Vec<u8> {
    let mut x = 1_u64;
    (0..count)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (x >> 56) as u8
        })
        .collect()
}

#[test]
fn products_of_every_8_bit_float() {
    for a in 0..=u8::MAX {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        let e4m3 = on_host(DataType::F8E4M3, &all, a.into());
        let e5m2 = on_host(DataType::F8E5M2, &all, a.into());
        for b in 0..=u8::MAX {
            use float8::{F8E4M3, F8E5M2};
            let x = F8E4M3::from_bits(a).to_f64() * F8E4M3::from_bits(b).to_f64();
            let want = if x.is_nan() {
                0x7f
            } else {
                F8E4M3::from_f64(x).to_bits()
            };
            assert_eq!(e4m3[usize::from(b)], want, "{a:#x} times {b:#x}");
            let x = F8E5M2::from_bits(a).to_f64() * F8E5M2::from_bits(b).to_f64();
            let want = match x {
                x if x.is_nan() => 0x7f,
                // Saturates, as documented of this type's results.
                x if x.abs() > 57344.0 => 0x7b | u8::from(x < 0.0) << 7,
                x => F8E5M2::from_f64(x).to_bits(),
            };
            assert_eq!(e5m2[usize::from(b)], want, "{a:#x} times {b:#x}");
        }
    }
}

#[test]
fn products_of_halves_are_rounded_once() {
    use half::{bf16, f16};
    let data = noise(2 << 12);
    for scalar in [0x3555_u16, 0xbfff, 0x0001, 0x7bff, 0x3c01] {
        let found = on_host(DataType::F16, &data, scalar.into());
        for (x, got) in data.chunks(2).zip(found.chunks(2)) {
            let x = f16::from_le_bytes(x.try_into().unwrap());
            let want = f16::from_f32(x.to_f32() * f16::from_bits(scalar).to_f32());
            let got = f16::from_le_bytes(got.try_into().unwrap());
            assert!(
                got == want || got.to_bits() == 0x7e00 && want.is_nan(),
                "{x} gives {got}"
            );
        }
        let found = on_host(DataType::Bf16, &data, scalar.into());
        for (x, got) in data.chunks(2).zip(found.chunks(2)) {
            let x = bf16::from_le_bytes(x.try_into().unwrap());
            let want = bf16::from_f32(x.to_f32() * bf16::from_bits(scalar).to_f32());
            let got = bf16::from_le_bytes(got.try_into().unwrap());
            assert!(
                got == want || got.to_bits() == 0x7fc0 && want.is_nan(),
                "{x} gives {got}"
            );
        }
    }
}

#[test]
fn integers_wrap() {
    let found = on_host(DataType::I8, &[100, 0x9c, 1], 0xfd);
    assert_eq!(found, [(-300_i32) as u8, 300_i32 as u8, 0xfd]);
    let x = 0xffff_ffff_ffff_fff0_u64;
    let found = on_host(DataType::U64, &x.to_le_bytes(), x);
    assert_eq!(found, 256_u64.to_le_bytes());
}

#[test]
fn scalars_are_numbers_that_the_type_has() {
    let bits = element_bits;
    assert_eq!(bits(DataType::I8, -128.0), Some(0x80));
    assert_eq!(bits(DataType::I8, 128.0), None);
    assert_eq!(bits(DataType::U8, -1.0), None);
    assert_eq!(bits(DataType::I16, -2.0), Some(0xfffe));
    assert_eq!(bits(DataType::I32, 0.5), None);
    assert_eq!(bits(DataType::I64, 9_223_372_036_854_775_808.0), None);
    assert_eq!(
        bits(DataType::I64, -9_223_372_036_854_775_808.0),
        Some(1 << 63)
    );
    assert_eq!(
        bits(DataType::U64, 9_223_372_036_854_775_808.0),
        Some(1 << 63)
    );
    assert_eq!(bits(DataType::U64, 18_446_744_073_709_551_616.0), None);
    assert_eq!(bits(DataType::U32, 4_294_967_295.0), Some(0xffff_ffff));
    assert_eq!(bits(DataType::U32, f64::NAN), None);
    assert_eq!(bits(DataType::F16, 0.5), Some(0x3800));
    assert_eq!(bits(DataType::Bf16, 1.0 / 3.0), Some(0x3eab));
    assert_eq!(bits(DataType::F32, 0.1), Some(0x3dcc_cccd));
    assert_eq!(bits(DataType::F64, 0.1), Some(0.1_f64.to_bits()));
    assert_eq!(bits(DataType::F8E4M3, 1000.0), Some(0x7e));
    assert_eq!(bits(DataType::F8E5M2, -2.0), Some(0xc0));
}

fn gpu_gives_the_host_s_bits<E: GpuElement>(dtype: DataType) {
    let size = dtype.size();
    for elements in [0, 1, 15, 64, 257] {
        let data = noise(elements * size);
        let places = [
            (0, 0),
            (16, 0),
            (size, 0),
            (0, size),
            (3 * size, 5 * size),
            // No element lies aligned.
            (1, 0),
            (0, 3),
            (1, 1),
        ];
        for (from, to) in places {
            for scalar in [1.0, 3.0, 2.0] {
                let bits = element_bits(dtype, scalar).unwrap();
                let expected = on_host(dtype, &data, bits);
                let (mut src, mut dst) = (Bytes::new(&data, from), Bytes::new(&data, to));
                // SAFETY: the low bytes of the word are an element.
                let factor: E = unsafe { std::mem::transmute_copy(&bits) };
                for thread in 0..7 {
                    let (dst, src) = (dst.addr(), src.addr());
                    // SAFETY: both have `data.len()` bytes.
                    unsafe { scale((thread, 7), dst, src, data.len() as u64, factor) };
                }
                assert_eq!(
                    dst.get(),
                    expected,
                    "{dtype} {elements} {from} {to} {scalar}"
                );
                let mut same = Bytes::new(&data, from);
                let at = same.addr();
                for thread in 0..5 {
                    // SAFETY: as above, in place.
                    unsafe { scale((thread, 5), at, at, data.len() as u64, factor) };
                }
                assert_eq!(same.get(), expected, "{dtype} {elements} {from} in place");
            }
        }
    }
}

#[test]
fn gpus_give_the_same_bits() {
    gpu_gives_the_host_s_bits::<i8>(DataType::I8);
    gpu_gives_the_host_s_bits::<u8>(DataType::U8);
    gpu_gives_the_host_s_bits::<i16>(DataType::I16);
    gpu_gives_the_host_s_bits::<u16>(DataType::U16);
    gpu_gives_the_host_s_bits::<i32>(DataType::I32);
    gpu_gives_the_host_s_bits::<u32>(DataType::U32);
    gpu_gives_the_host_s_bits::<i64>(DataType::I64);
    gpu_gives_the_host_s_bits::<u64>(DataType::U64);
    gpu_gives_the_host_s_bits::<F16>(DataType::F16);
    gpu_gives_the_host_s_bits::<Bf16>(DataType::Bf16);
    gpu_gives_the_host_s_bits::<f32>(DataType::F32);
    gpu_gives_the_host_s_bits::<f64>(DataType::F64);
    gpu_gives_the_host_s_bits::<F8E4M3>(DataType::F8E4M3);
    gpu_gives_the_host_s_bits::<F8E5M2>(DataType::F8E5M2);
}
