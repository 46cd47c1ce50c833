//! RMS normalisation of one token: what its numbers are, and the leaves of a fused all-reduce on the host. Those of a
//! GPU are in [`crate::gpu::norm`].
//!
//! Accumulators are f32. Squares are summed in one order on every machine, which suits vectors as well as threads:
//! [`LANES`] lanes, lane `i` having elements `i`, `i + 8`, ...; each lane in [`COLUMNS`] columns, column `c` having
//! every 512th of its elements from the `c`-th on, in order; then the columns of each lane in pairs of neighbours, and
//! those sums in pairs, and so on; at last the lanes in the same way. Columns without elements are zero.

/// Sums that are kept side by side.
pub const LANES: usize = 8;

/// Columns of a lane.
pub const COLUMNS: usize = 512;

/// Elements that share a scale where quantisation is by group.
pub const GROUP: usize = 128;

/// The largest number that a quantised element holds.
const LARGEST: f32 = 448.0;

/// The scale of a token whose largest magnitude is `largest`.
#[inline(always)]
#[must_use]
pub fn token_scale(largest: f32) -> f32 {
    (largest / LARGEST).max(1.0 / (LARGEST * 512.0))
}

/// The scale of a group whose largest magnitude is `largest`.
#[inline(always)]
#[must_use]
pub fn group_scale(largest: f32) -> f32 {
    largest.max(1e-10) / LARGEST
}

/// What the elements of a token are multiplied by, of whose `hidden` elements the squares have this sum; `sqrt` rounds
/// correctly.
#[inline(always)]
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "few enough to be exact")]
pub fn factor(squares: f32, hidden: u32, epsilon: f32, sqrt: impl Fn(f32) -> f32) -> f32 {
    1.0 / sqrt(squares / hidden as f32 + epsilon)
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use host::HostNorm;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    use super::{COLUMNS, LANES};
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
            squares::<E>(x, n)
        }
    }

    /// Columns that are summed at a time: as many as registers hold.
    const BESIDE: usize = 16;

    /// # Safety
    /// `x` must be valid for `n` elements.
    #[inline(always)]
    unsafe fn squares<E: Element<Acc = f32>>(x: u64, n: usize) -> f32 {
        let mut all = [[0.0_f32; LANES]; COLUMNS / BESIDE];
        for (which, sum) in all.iter_mut().enumerate() {
            let mut columns = [[0.0_f32; LANES]; BESIDE];
            let mut at = which * BESIDE * LANES;
            while at < n {
                let left = n - at;
                if left >= BESIDE * LANES {
                    for (column, lanes) in columns.iter_mut().enumerate() {
                        for (lane, sum) in lanes.iter_mut().enumerate() {
                            // SAFETY: the caller's promise; the index is below `n`.
                            let value = unsafe { load::<E>(x, at + column * LANES + lane) };
                            *sum += value * value;
                        }
                    }
                } else {
                    let sums = columns.as_flattened_mut().iter_mut().take(left);
                    for (i, sum) in sums.enumerate() {
                        // SAFETY: as above.
                        let value = unsafe { load::<E>(x, at + i) };
                        *sum += value * value;
                    }
                }
                at += COLUMNS * LANES;
            }
            *sum = in_pairs(columns);
        }
        let [a, b, c, d, e, f, g, h] = in_pairs(all);
        ((a + b) + (c + d)) + ((e + f) + (g + h))
    }

    /// The sum of columns, a power of two of them, lane by lane.
    #[inline(always)]
    #[allow(
        clippy::indexing_slicing,
        reason = "on the host, and every index is below N"
    )]
    fn in_pairs<const N: usize>(mut columns: [[f32; LANES]; N]) -> [f32; LANES] {
        let mut left = N;
        while left > 1 {
            left /= 2;
            let mut i = 0;
            while i < left {
                let mut lane = 0;
                while lane < LANES {
                    columns[i][lane] = columns[2 * i][lane] + columns[2 * i + 1][lane];
                    lane += 1;
                }
                i += 1;
            }
        }
        columns[0]
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
