//! Pre-multiplication, for every data type.

use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};
use crossweft_device::gpu::Scale;
use crossweft_device::gpu::machine::{block_x, blocks_x, thread, threads};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::gpu::scale::scale;

/// # Safety
/// The parameter must be as its fields say.
#[inline(always)]
unsafe fn run<E: GpuElement>(launch: Scale) {
    let Scale {
        dst,
        src,
        bytes,
        scalar,
        value,
    } = launch;
    let of_block = u64::from(threads());
    let number = u64::from(block_x()) * of_block + u64::from(thread());
    let grid = (number, u64::from(blocks_x()) * of_block);
    // SAFETY: the caller's promise; elements are no larger than the word, whose low bytes come first.
    unsafe {
        let factor: E = match scalar {
            0 => core::mem::transmute_copy(&value),
            address => (address as *const E).read(),
        };
        scale(grid, dst, src, bytes, factor);
    }
}

macro_rules! scale {
    ($($element:ty, $entry:ident;)*) => { $(
        /// Any number of thread blocks, of any number of threads.
        ///
        /// # Safety
        /// As for [`scale`].
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: Scale) {
            // SAFETY: the caller's promise.
            unsafe { run::<$element>(launch) }
        }
    )* };
}

scale! {
    i8, crossweft_scale_i8;
    u8, crossweft_scale_u8;
    i16, crossweft_scale_i16;
    u16, crossweft_scale_u16;
    i32, crossweft_scale_i32;
    u32, crossweft_scale_u32;
    i64, crossweft_scale_i64;
    u64, crossweft_scale_u64;
    F16, crossweft_scale_f16;
    Bf16, crossweft_scale_bf16;
    f32, crossweft_scale_f32;
    f64, crossweft_scale_f64;
    F8E4M3, crossweft_scale_f8e4m3;
    F8E5M2, crossweft_scale_f8e5m2;
}
