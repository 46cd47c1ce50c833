//! RMS normalisation on the host.

use crossweft_device::DataType;
use crossweft_device::norm::HostNorm;

use super::isa;

/// Normalises tokens of one data type, with this machine's best instructions.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    leaves: HostNorm,
    element: usize,
}

impl Norm {
    /// Of f32, f16 or bf16; `None` for other types.
    #[must_use]
    pub fn new(dtype: DataType) -> Option<Self> {
        // SAFETY: `isa` has just found these instructions.
        let leaves = unsafe { HostNorm::with_isa(dtype, isa()) }?;
        Some(Self {
            leaves,
            element: dtype.size(),
        })
    }

    /// Adds `residual` to the token `x`, and leaves the sums, rounded to the type, in both; then multiplies each
    /// element of `x` by its weight over the root mean square of `x`, to whose square `epsilon` is added, in f32,
    /// rounded once. Of as many elements as the shortest has.
    pub fn token(&self, x: &mut [u8], residual: Option<&mut [u8]>, weight: &[u8], epsilon: f32) {
        let mut bytes = x.len().min(weight.len());
        if let Some(residual) = &residual {
            bytes = bytes.min(residual.len());
        }
        let n = bytes / self.element;
        let residual = residual.map_or(0, |residual| residual.as_mut_ptr() as u64);
        let (x, weight) = (x.as_mut_ptr() as u64, weight.as_ptr() as u64);
        // SAFETY: each has `n` elements, and they are different borrows, of which those that are written are unique.
        unsafe {
            let squares = self.leaves.add(x, residual, n);
            let factor = 1.0 / (squares / n as f32 + epsilon).sqrt();
            self.leaves.weigh(x, weight, n, factor);
        }
    }

    /// The largest magnitude of elements; NaNs do not count.
    #[must_use]
    pub fn largest(&self, x: &[u8]) -> f32 {
        // SAFETY: it has as many elements.
        unsafe {
            self.leaves
                .largest(x.as_ptr() as u64, x.len() / self.element)
        }
    }

    /// Divides elements by `scale` in f32 and rounds them to [`DataType::F8E4M3`], which saturates. As many as the
    /// shorter has.
    pub fn quantise(&self, x: &[u8], scale: f32, out: &mut [u8]) {
        let n = (x.len() / self.element).min(out.len());
        // SAFETY: both have `n` elements; the borrow of `out` is unique.
        unsafe {
            let (dst, src) = (out.as_mut_ptr() as u64, x.as_ptr() as u64);
            self.leaves.quantise(dst, src, n, scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use crossweft_device::reduce::Isa;

    use super::*;

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let noise = |seed: u64, elements: usize| -> Vec<f32> {
            let mut x = seed;
            (0..elements)
                .map(|_| {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (x >> 40) as f32 / (1 << 22) as f32 - 2.0
                })
                .collect()
        };
        let bytes = |values: &[f32], dtype| -> Vec<u8> {
            let short = |value: &f32| (value.to_bits() >> 16) as u16;
            match dtype {
                DataType::F32 => values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
                _ => values.iter().flat_map(|v| short(v).to_ne_bytes()).collect(),
            }
        };
        for dtype in [DataType::F32, DataType::F16, DataType::Bf16] {
            for n in [8, 24, 1000, 4096] {
                let run = |set| {
                    // SAFETY: no more than the machine has, below.
                    let leaves = unsafe { HostNorm::with_isa(dtype, set) }.unwrap();
                    let element = dtype.size();
                    let norm = Norm { leaves, element };
                    let mut x = bytes(&noise(1, n), dtype);
                    let mut residual = bytes(&noise(2, n), dtype);
                    let weight = bytes(&noise(3, n), dtype);
                    norm.token(&mut x, Some(&mut residual), &weight, 1e-6);
                    let mut quantised = vec![0; n];
                    let largest = norm.largest(&x);
                    norm.quantise(&x, largest / 448.0, &mut quantised);
                    (x, residual, quantised, largest.to_bits())
                };
                let expected = run(Isa::Baseline);
                for set in [Isa::Avx2, Isa::Avx512] {
                    if set <= isa() {
                        assert!(run(set) == expected, "{dtype} {n} {}", set.name());
                    }
                }
            }
        }
        assert!(Norm::new(DataType::F64).is_none());
        assert!(Norm::new(DataType::I32).is_none());
    }
}
