//! RMS normalisation of one token, on the host: the leaves of a fused all-reduce.
//!
//! Accumulators are f32. Squares are summed in [`LANES`] lanes, lane `i` having elements `i`, `i + 8`, ... in
//! order, and the lanes in pairs: the same bits whatever the machine's vectors are.

/// Sums that are kept side by side.
pub const LANES: usize = 8;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use host::HostNorm;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    use super::LANES;
    use crate::dtype::DataType;
    use crate::element::{Bf16, Element, F8E4M3, F16};
    use crate::reduce::Isa;

    /// The leaves of one data type: f32, f16 or bf16.
    #[derive(Clone, Copy, Debug)]
    pub struct HostNorm {
        /// `residual = x = store(load(x) + load(residual))`, if there is a residual; the sum of squares of `x`
        add: unsafe fn(x: u64, residual: u64, n: usize) -> f32,
        /// `x = store(load(x) * factor * load(weight))`
        weigh: unsafe fn(x: u64, weight: u64, n: usize, factor: f32),
        /// The largest magnitude; NaNs do not count.
        largest: unsafe fn(x: u64, n: usize) -> f32,
        /// `dst = e4m3(load(x) / scale)`
        quantise: unsafe fn(dst: u64, x: u64, n: usize, scale: f32),
    }

    impl HostNorm {
        /// The leaves of `dtype` with the instructions of `isa`; `None` if it has none.
        ///
        /// # Safety
        /// The machine must have the instructions.
        #[must_use]
        pub const unsafe fn with_isa(dtype: DataType, isa: Isa) -> Option<Self> {
            match dtype {
                DataType::F32 => Some(Self::of::<f32>(isa)),
                DataType::F16 => Some(Self::of::<F16>(isa)),
                DataType::Bf16 => Some(Self::of::<Bf16>(isa)),
                _ => None,
            }
        }

        const fn of<E: Element<Acc = f32>>(isa: Isa) -> Self {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => Self {
                    add: avx2::add::<E>,
                    weigh: avx2::weigh::<E>,
                    largest: avx2::largest::<E>,
                    quantise: avx2::quantise::<E>,
                },
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => Self {
                    add: avx512::add::<E>,
                    weigh: avx512::weigh::<E>,
                    largest: avx512::largest::<E>,
                    quantise: avx512::quantise::<E>,
                },
                _ => Self {
                    add: add::<E>,
                    weigh: weigh::<E>,
                    largest: largest::<E>,
                    quantise: quantise::<E>,
                },
            }
        }

        /// Adds the residual, unless its address is 0, to the `n` elements at `x`; the sums are rounded to the type
        /// and replace both. Returns the sum of the squares of what is at `x` then.
        ///
        /// # Safety
        /// The addresses must be valid for `n` elements that nobody else accesses, at any alignment; they must not
        /// overlap.
        #[inline]
        pub unsafe fn add(&self, x: u64, residual: u64, n: usize) -> f32 {
            // SAFETY: the caller's promise.
            unsafe { (self.add)(x, residual, n) }
        }

        /// Multiplies the `n` elements at `x` by `factor`, and each product by its weight, in f32; rounds once.
        ///
        /// # Safety
        /// As for [`add`](Self::add), except that the weights may be read by others.
        #[inline]
        pub unsafe fn weigh(&self, x: u64, weight: u64, n: usize, factor: f32) {
            // SAFETY: the caller's promise.
            unsafe { (self.weigh)(x, weight, n, factor) }
        }

        /// The largest magnitude of `n` elements; NaNs do not count.
        ///
        /// # Safety
        /// `x` must be valid for them; nobody may write there meanwhile.
        #[inline]
        #[must_use]
        pub unsafe fn largest(&self, x: u64, n: usize) -> f32 {
            // SAFETY: the caller's promise.
            unsafe { (self.largest)(x, n) }
        }

        /// Divides `n` elements at `x` by `scale` in f32, and rounds to [`DataType::F8E4M3`], which saturates.
        ///
        /// # Safety
        /// `x` must be valid for them and `dst` for `n` bytes, without overlap; nobody else may access `dst`, or write
        /// `x`, meanwhile.
        #[inline]
        pub unsafe fn quantise(&self, dst: u64, x: u64, n: usize, scale: f32) {
            // SAFETY: the caller's promise.
            unsafe { (self.quantise)(dst, x, n, scale) }
        }
    }

    /// Element `i` at `x`.
    ///
    /// # Safety
    /// It must be valid.
    #[inline(always)]
    unsafe fn load<E: Element>(x: u64, i: usize) -> E::Acc {
        // SAFETY: the caller's promise.
        unsafe { (x as *const E).add(i).read_unaligned().load() }
    }

    /// # Safety
    /// As for [`load`].
    #[inline(always)]
    unsafe fn store<E: Element>(x: u64, i: usize, value: E::Acc) {
        // SAFETY: the caller's promise.
        unsafe { (x as *mut E).add(i).write_unaligned(E::store(value)) }
    }

    /// # Safety
    /// As for [`HostNorm::add`].
    #[inline(always)]
    unsafe fn add<E: Element<Acc = f32>>(x: u64, residual: u64, n: usize) -> f32 {
        // SAFETY: the caller's promise; every index is below `n`.
        unsafe {
            if residual != 0 {
                let mut i = 0;
                while i < n {
                    let sum = load::<E>(x, i) + load::<E>(residual, i);
                    store::<E>(x, i, sum);
                    store::<E>(residual, i, sum);
                    i += 1;
                }
            }
            let mut lanes = [0.0_f32; LANES];
            let mut at = 0;
            while at < n {
                for (lane, sum) in lanes.iter_mut().enumerate() {
                    if at + lane < n {
                        let value = load::<E>(x, at + lane);
                        *sum += value * value;
                    }
                }
                at += LANES;
            }
            let [a, b, c, d, e, f, g, h] = lanes;
            ((a + b) + (c + d)) + ((e + f) + (g + h))
        }
    }

    /// # Safety
    /// As for [`HostNorm::weigh`].
    #[inline(always)]
    unsafe fn weigh<E: Element<Acc = f32>>(x: u64, weight: u64, n: usize, factor: f32) {
        let mut i = 0;
        while i < n {
            // SAFETY: the caller's promise.
            unsafe { store::<E>(x, i, load::<E>(x, i) * factor * load::<E>(weight, i)) };
            i += 1;
        }
    }

    /// # Safety
    /// As for [`HostNorm::largest`].
    #[inline(always)]
    unsafe fn largest<E: Element<Acc = f32>>(x: u64, n: usize) -> f32 {
        let (mut most, mut i) = (0.0, 0);
        while i < n {
            // SAFETY: the caller's promise.
            let magnitude = unsafe { load::<E>(x, i) }.abs();
            most = if magnitude > most { magnitude } else { most };
            i += 1;
        }
        most
    }

    /// # Safety
    /// As for [`HostNorm::quantise`].
    #[inline(always)]
    unsafe fn quantise<E: Element<Acc = f32>>(dst: u64, x: u64, n: usize, scale: f32) {
        let mut i = 0;
        while i < n {
            // SAFETY: the caller's promise.
            unsafe { store::<F8E4M3>(dst, i, load::<E>(x, i) / scale) };
            i += 1;
        }
    }

    /// The leaves once more for each instruction set: the same bodies, vectorised anew.
    macro_rules! leaves {
        ($name:ident, $features:literal) => {
            #[cfg(target_arch = "x86_64")]
            mod $name {
                use super::Element;

                /// # Safety
                /// As for the leaf of that name; the machine must have the instructions. So for all of these.
                #[target_feature(enable = $features)]
                pub(super) unsafe fn add<E: Element<Acc = f32>>(
                    x: u64,
                    residual: u64,
                    n: usize,
                ) -> f32 {
                    // SAFETY: the caller's promise.
                    unsafe { super::add::<E>(x, residual, n) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn weigh<E: Element<Acc = f32>>(
                    x: u64,
                    weight: u64,
                    n: usize,
                    factor: f32,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { super::weigh::<E>(x, weight, n, factor) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn largest<E: Element<Acc = f32>>(x: u64, n: usize) -> f32 {
                    // SAFETY: the caller's promise.
                    unsafe { super::largest::<E>(x, n) }
                }

                #[target_feature(enable = $features)]
                pub(super) unsafe fn quantise<E: Element<Acc = f32>>(
                    dst: u64,
                    x: u64,
                    n: usize,
                    scale: f32,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { super::quantise::<E>(dst, x, n, scale) }
                }
            }
        };
    }

    leaves!(avx2, "avx2");
    leaves!(avx512, "avx512f,avx512bw,avx512dq,avx512vl");
}
