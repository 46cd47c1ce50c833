//! Pre-multiplication: every element of a rank's input times a scalar, before a sum.
//!
//! The scalar is an element itself. Products are computed in the accumulator's type and rounded to the
//! element's ([`Element::mul`], [`Element::store`]); of integers they wrap. So what is summed is the same
//! wherever it was multiplied: on the host by the leaves here, on a GPU by those of [`crate::gpu::scale`].

use crate::dtype::DataType;
use crate::element::{Bf16, Element, F8E4M3, F8E5M2, F16};

/// The element of `dtype` nearest to `value`, in the low bytes: of floats rounded to f32 (except f64) and then to
/// the type, of integers only if it is one that the type has.
#[must_use]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "whether an integer is the value is what is asked"
)]
pub fn element_bits(dtype: DataType, value: f64) -> Option<u64> {
    macro_rules! integer {
        ($t:ty) => {{
            let near = value as $t;
            // 2^63 and 2^64 are floats, and no such integers: the cast, which saturates, is then off by one.
            let limit = (<$t>::MAX as f64) == value && <$t>::BITS == 64;
            (near as f64 == value && !limit).then_some(near as u64)
        }};
    }
    match dtype {
        DataType::I8 => integer!(i8).map(|bits| bits & 0xff),
        DataType::U8 => integer!(u8),
        DataType::I16 => integer!(i16).map(|bits| bits & 0xffff),
        DataType::U16 => integer!(u16),
        DataType::I32 => integer!(i32).map(|bits| bits & 0xffff_ffff),
        DataType::U32 => integer!(u32),
        DataType::I64 => integer!(i64),
        DataType::U64 => integer!(u64),
        DataType::F16 => Some(F16::store(value as f32).0.into()),
        DataType::Bf16 => Some(Bf16::store(value as f32).0.into()),
        DataType::F32 => Some(f32::store(value as f32).to_bits().into()),
        DataType::F64 => Some(f64::store(value).to_bits()),
        DataType::F8E4M3 => Some(F8E4M3::store(value as f32).0.into()),
        DataType::F8E5M2 => Some(F8E5M2::store(value as f32).0.into()),
    }
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use host::HostScaler;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    use super::{Bf16, DataType, Element, F8E4M3, F8E5M2, F16};
    use crate::reduce::Isa;

    /// Multiplies elements of one data type on the host.
    #[derive(Clone, Copy, Debug)]
    pub struct HostScaler {
        /// `dst = store(load(src) * load(scalar))`
        leaf: unsafe fn(dst: u64, src: u64, elements: usize, scalar: u64),
    }

    impl HostScaler {
        /// The leaf of `dtype`, for any machine of the target.
        #[must_use]
        pub const fn new(dtype: DataType) -> Self {
            Self::of_type(dtype, Isa::Baseline)
        }

        /// The leaf of `dtype`, with the instructions of `isa`.
        ///
        /// # Safety
        /// The machine must have them.
        #[must_use]
        pub const unsafe fn with_isa(dtype: DataType, isa: Isa) -> Self {
            Self::of_type(dtype, isa)
        }

        const fn of_type(dtype: DataType, isa: Isa) -> Self {
            match dtype {
                DataType::I8 => Self::of::<i8>(isa),
                DataType::U8 => Self::of::<u8>(isa),
                DataType::I16 => Self::of::<i16>(isa),
                DataType::U16 => Self::of::<u16>(isa),
                DataType::I32 => Self::of::<i32>(isa),
                DataType::U32 => Self::of::<u32>(isa),
                DataType::I64 => Self::of::<i64>(isa),
                DataType::U64 => Self::of::<u64>(isa),
                DataType::F16 => Self::of::<F16>(isa),
                DataType::Bf16 => Self::of::<Bf16>(isa),
                DataType::F32 => Self::of::<f32>(isa),
                DataType::F64 => Self::of::<f64>(isa),
                DataType::F8E4M3 => Self::of::<F8E4M3>(isa),
                DataType::F8E5M2 => Self::of::<F8E5M2>(isa),
            }
        }

        const fn of<E: Element>(isa: Isa) -> Self {
            let leaf: unsafe fn(u64, u64, usize, u64) = match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::<E>,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::<E>,
                _ => scale::<E>,
            };
            Self { leaf }
        }

        /// Multiplies `elements` elements at `src` by the one at `scalar`, to `dst`. Any alignment will do.
        ///
        /// # Safety
        /// The addresses must be valid for them; `dst` may be `src`, or must not overlap it. Nobody may write
        /// `src` or `scalar`, or access `dst`, meanwhile.
        #[inline]
        pub unsafe fn scale(&self, dst: u64, src: u64, elements: usize, scalar: u64) {
            // SAFETY: the caller's promise.
            unsafe { (self.leaf)(dst, src, elements, scalar) }
        }
    }

    /// # Safety
    /// As for [`HostScaler::scale`].
    #[inline(always)]
    unsafe fn scale<E: Element>(dst: u64, src: u64, elements: usize, scalar: u64) {
        let (dst, src) = (dst as *mut E, src as *const E);
        // SAFETY: the caller's promise.
        unsafe {
            let factor = (scalar as *const E).read_unaligned().load();
            let mut i = 0;
            while i < elements {
                let product = E::mul(src.add(i).read_unaligned().load(), factor);
                dst.add(i).write_unaligned(E::store(product));
                i += 1;
            }
        }
    }

    /// The leaf once more for each instruction set: the same body, vectorised anew.
    macro_rules! leaves {
        ($($name:ident, $features:literal;)*) => { $(
            /// # Safety
            /// As for [`HostScaler::scale`]; the machine must have the instructions.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = $features)]
            unsafe fn $name<E: Element>(dst: u64, src: u64, elements: usize, scalar: u64) {
                // SAFETY: the caller's promise.
                unsafe { scale::<E>(dst, src, elements, scalar) }
            }
        )* };
    }

    leaves! { avx2, "avx2"; avx512, "avx512f,avx512bw,avx512dq,avx512vl"; }
}
