//! Plans in one piece: reductions, for one data type and every operation, and moves, for all.

use core::mem::offset_of;

use crossweft_device::gpu::block::GpuBlock;
#[allow(unused_imports)]
use crossweft_device::gpu::fused::{Tables, hop, one_shot, one_shot_lines, two_shot};
use crossweft_device::gpu::machine::{block_x, follow, precede};
#[allow(unused_imports)]
use crossweft_device::gpu::{Hop, OneShot, OneShotScatter, TwoShot};
use crossweft_device::{Memory, Raw};

use crate::shared::{Here, stop};

/// The tables in a kernel's parameter, at byte offsets, by a function that reads its word there.
pub(crate) struct Parameter<F> {
    pub(crate) word: F,
    pub(crate) target: usize,
    pub(crate) source: usize,
    pub(crate) peer: usize,
    pub(crate) origin: usize,
}

impl<F: Fn(u64) -> u64> Tables for Parameter<F> {
    #[inline(always)]
    fn target(&self, k: u32) -> u64 {
        (self.word)(self.target as u64 + u64::from(k) * 8)
    }

    #[inline(always)]
    fn source(&self, k: u32) -> u64 {
        (self.word)(self.source as u64 + u64::from(k) * 8)
    }

    #[inline(always)]
    fn peer(&self, k: u32) -> u32 {
        let pair = (self.word)(self.peer as u64 + u64::from(k / 2) * 8);
        (pair >> (32 * (k % 2))) as u32
    }

    #[inline(always)]
    fn origin(&self, k: u32) -> u64 {
        (self.word)(self.origin as u64 + u64::from(k) * 8)
    }
}

/// An entry: a thread block for each of the plan's, whose parameter is a `$launch`, or has one in its field `$inner`, and
/// has the ranks of its sources at `$peer`, what goes to each target at `$origin`.
macro_rules! entry {
    ($module:literal, $entry:ident, $launch:ident $(. $inner:ident)?, $peer:expr, $origin:expr, $run:path) => {
        /// A thread block for each of the plan's.
        ///
        /// # Safety
        #[doc = concat!("As for [`", stringify!($run), "`].")]
        #[cfg(module = $module)]
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: $launch) {
            // SAFETY: the caller's promise; what is read lies in the parameter, and `run` has a barrier
            // before it waits. The record in the host's memory says what went wrong.
            unsafe {
                let tables = Parameter {
                    word: word_of!($entry, launch),
                    target: offset_of!($launch, $($inner.)? target),
                    source: offset_of!($launch, $($inner.)? source),
                    peer: $peer,
                    origin: $origin,
                };
                let own = &launch $(. $inner)?;
                // What came before may still be ending; only one launch is ahead of it.
                follow();
                precede();
                let epoch = Raw.load(own.counters.epoch);
                // While that is on its way.
                let block = GpuBlock::<Here>::open(&own.context, own.rank);
                if $run(&block, own, &tables, (block_x(), epoch)).is_err() {
                    stop(own.counters.epoch);
                }
            }
        }
    };
}

macro_rules! fused {
    ($($module:literal, $element:ty, $one_shot:ident, $scatter:ident, $lines:ident, $two_shot:ident;)*) => { $(
        entry!($module, $one_shot, OneShot, offset_of!(OneShot, peer), 0, one_shot::run::<_, $element, false>);
        entry!(
            $module, $scatter, OneShotScatter.launch, offset_of!(OneShotScatter, launch.peer),
            offset_of!(OneShotScatter, origin), one_shot::run::<_, $element, true>
        );
        entry!($module, $lines, OneShot, offset_of!(OneShot, peer), 0, one_shot_lines::run::<_, $element>);
        // Semaphores know whom they wait for.
        entry!($module, $two_shot, TwoShot, 0, 0, two_shot::run::<_, $element>);
    )* };
}

#[allow(unused_imports)]
use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};

fused! {
    "fused_i8", i8, crossweft_one_shot_i8, crossweft_one_shot_scatter_i8,
        crossweft_one_shot_lines_i8, crossweft_two_shot_i8;
    "fused_u8", u8, crossweft_one_shot_u8, crossweft_one_shot_scatter_u8,
        crossweft_one_shot_lines_u8, crossweft_two_shot_u8;
    "fused_i16", i16, crossweft_one_shot_i16, crossweft_one_shot_scatter_i16,
        crossweft_one_shot_lines_i16, crossweft_two_shot_i16;
    "fused_u16", u16, crossweft_one_shot_u16, crossweft_one_shot_scatter_u16,
        crossweft_one_shot_lines_u16, crossweft_two_shot_u16;
    "fused_i32", i32, crossweft_one_shot_i32, crossweft_one_shot_scatter_i32,
        crossweft_one_shot_lines_i32, crossweft_two_shot_i32;
    "fused_u32", u32, crossweft_one_shot_u32, crossweft_one_shot_scatter_u32,
        crossweft_one_shot_lines_u32, crossweft_two_shot_u32;
    "fused_i64", i64, crossweft_one_shot_i64, crossweft_one_shot_scatter_i64,
        crossweft_one_shot_lines_i64, crossweft_two_shot_i64;
    "fused_u64", u64, crossweft_one_shot_u64, crossweft_one_shot_scatter_u64,
        crossweft_one_shot_lines_u64, crossweft_two_shot_u64;
    "fused_f16", F16, crossweft_one_shot_f16, crossweft_one_shot_scatter_f16,
        crossweft_one_shot_lines_f16, crossweft_two_shot_f16;
    "fused_bf16", Bf16, crossweft_one_shot_bf16, crossweft_one_shot_scatter_bf16,
        crossweft_one_shot_lines_bf16, crossweft_two_shot_bf16;
    "fused_f32", f32, crossweft_one_shot_f32, crossweft_one_shot_scatter_f32,
        crossweft_one_shot_lines_f32, crossweft_two_shot_f32;
    "fused_f64", f64, crossweft_one_shot_f64, crossweft_one_shot_scatter_f64,
        crossweft_one_shot_lines_f64, crossweft_two_shot_f64;
    "fused_f8e4m3", F8E4M3, crossweft_one_shot_f8e4m3, crossweft_one_shot_scatter_f8e4m3,
        crossweft_one_shot_lines_f8e4m3, crossweft_two_shot_f8e4m3;
    "fused_f8e5m2", F8E5M2, crossweft_one_shot_f8e5m2, crossweft_one_shot_scatter_f8e5m2,
        crossweft_one_shot_lines_f8e5m2, crossweft_two_shot_f8e5m2;
}

entry!(
    "hop",
    crossweft_hop_packets,
    Hop,
    offset_of!(Hop, peer),
    0,
    hop::packets
);
entry!(
    "hop",
    crossweft_hop_direct,
    Hop,
    offset_of!(Hop, peer),
    0,
    hop::direct
);
