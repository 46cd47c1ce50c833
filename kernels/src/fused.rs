//! One-shot reductions in one piece, for one data type and every operation.

use core::mem::offset_of;

use crossweft_device::gpu::FusedLaunch;
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::fused::{self, FusedTables};
use crossweft_device::gpu::nvptx::block_x;
use crossweft_device::gpu::reduce::GpuElement;

use crate::shared::Here;

/// The tables in the kernel's parameter, by a function that reads its word at a byte offset.
struct Parameter<F>(F);

impl<F: Fn(u64) -> u64> FusedTables for Parameter<F> {
    #[inline(always)]
    fn target(&self, k: u32) -> u64 {
        (self.0)(offset_of!(FusedLaunch, target) as u64 + u64::from(k) * 8)
    }

    #[inline(always)]
    fn source(&self, k: u32) -> u64 {
        (self.0)(offset_of!(FusedLaunch, source) as u64 + u64::from(k) * 8)
    }

    #[inline(always)]
    fn peer(&self, k: u32) -> u32 {
        let pair = (self.0)(offset_of!(FusedLaunch, peer) as u64 + u64::from(k / 2) * 8);
        (pair >> (32 * (k % 2))) as u32
    }
}

/// # Safety
/// As for [`fused::run`].
#[inline(always)]
unsafe fn run<E: GpuElement>(launch: &FusedLaunch, parameter: impl Fn(u64) -> u64) {
    // SAFETY: the caller's promise; `run` has a barrier before it waits.
    unsafe {
        let block = GpuBlock::<Here>::open(&launch.context, launch.rank);
        // The record in the host's memory says what went wrong.
        let _ = fused::run::<_, E>(&block, launch, &Parameter(parameter), block_x());
    }
}

macro_rules! fused {
    ($($module:literal, $element:ty, $entry:ident;)*) => { $(
        /// A thread block for each of the plan's.
        ///
        /// # Safety
        /// As for [`fused::run`].
        #[cfg(module = $module)]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $entry(launch: FusedLaunch) {
            // SAFETY: the caller's promise; what is read lies in the parameter.
            unsafe {
                run::<$element>(&launch, |offset| {
                    let word;
                    // Indexed as it is: the compiler would copy it to local memory for that.
                    core::arch::asm!(
                        "{{",
                        ".reg .b64 %from;",
                        concat!("mov.b64 %from, ", stringify!($entry), "_param_0;"),
                        "add.s64 %from, %from, {offset};",
                        "ld.param.b64 {word}, [%from];",
                        "}}",
                        offset = in(reg64) offset,
                        word = out(reg64) word,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                    word
                })
            }
        }
    )* };
}

#[allow(unused_imports)]
use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};

fused! {
    "i8", i8, crossweft_fused_i8;
    "u8", u8, crossweft_fused_u8;
    "i16", i16, crossweft_fused_i16;
    "u16", u16, crossweft_fused_u16;
    "i32", i32, crossweft_fused_i32;
    "u32", u32, crossweft_fused_u32;
    "i64", i64, crossweft_fused_i64;
    "u64", u64, crossweft_fused_u64;
    "f16", F16, crossweft_fused_f16;
    "bf16", Bf16, crossweft_fused_bf16;
    "f32", f32, crossweft_fused_f32;
    "f64", f64, crossweft_fused_f64;
    "f8e4m3", F8E4M3, crossweft_fused_f8e4m3;
    "f8e5m2", F8E5M2, crossweft_fused_f8e5m2;
}
