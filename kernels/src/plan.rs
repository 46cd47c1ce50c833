//! The plan executor, for one data type and every operation.

use crossweft_device::Memory;
use crossweft_device::Raw;
use crossweft_device::executor::{Execution, STOPPED_EPOCH, Start};
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::machine::{barrier_max, block_x, block_y, thread, threads};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::gpu::{GpuReducer, PlanLaunch};
use crossweft_device::program::Program;

use crate::shared::{self, Here, STAGE_BYTES};

/// Runs this block's part of a plan: `own`, or, if `plans` is not 0, what lies there for this row of the
/// grid.
///
/// Everything that the block needs to begin is far away, and is asked for at once: the epoch, the block's
/// tables, and the parameter, which goes into shared memory too, so that both forms are one text and no
/// thread has it in its registers.
///
/// # Safety
/// As for [`run_block`](crossweft_device::executor::run_block).
#[inline(always)]
unsafe fn run<E: GpuElement>(own: PlanLaunch, plans: *const PlanLaunch) {
    let index = block_x();
    // SAFETY: the caller's promise; nobody writes plans or tables meanwhile.
    unsafe {
        let row = plans.add(block_y() as usize);
        let of = |program: &Program| {
            let Program {
                counters,
                tables,
                stride,
                block_count,
                ..
            } = *program;
            (counters, tables, stride, block_count)
        };
        let (counters, tables, stride, block_count) = if plans.is_null() {
            of(&own.program)
        } else {
            of(&(*row).program)
        };
        // In a grid of several ranks, some have fewer blocks than others.
        if index >= block_count {
            return;
        }
        let epoch = Raw.load(counters);
        let far = tables + u64::from(index) * stride;
        let (near, pairs) = (shared::stage(), (stride / PAIR) as u32);
        let fits = stride <= STAGE_BYTES as u64;
        let at = |i: u32| u64::from(i) * PAIR;
        let mut i = thread();
        let mut pair = [0, 0];
        if fits && i < pairs {
            pair = ((far + at(i)) as *const [u64; 2]).read();
        }
        let here = shared::plan() as *mut PlanLaunch;
        if thread() == 0 {
            if plans.is_null() {
                here.write(own);
            } else {
                here.write(row.read());
            }
        }
        let block = GpuBlock::<Here>::open(&(*here).context, (*here).program.rank);
        if fits {
            while i < pairs {
                ((near + at(i)) as *mut [u64; 2]).write(pair);
                i += threads();
                if i < pairs {
                    pair = ((far + at(i)) as *const [u64; 2]).read();
                }
            }
        }
        let start = shared::start() as *mut Start;
        if thread() == 0 {
            start.write(Start {
                tables: if fits { near } else { far },
                epoch,
                chunk: (*here).chunk,
            });
        }
        let _ = barrier_max::<0>(0);
        // One answer for all threads of the block, whatever each of them has read.
        if (*start).epoch == STOPPED_EPOCH {
            return;
        }
        let plan = &*here;
        let execution = Execution {
            block: &block,
            program: &plan.program,
            launch: &plan.launch,
            start: &*start,
        };
        let reducer = GpuReducer::<E, _>::new(plan.op, shared::table());
        // The record in the host's memory says what went wrong.
        if execution.run(&reducer, index).is_err() {
            shared::stop(plan.program.counters);
        }
    }
}

/// Bytes that a thread brings at a time.
const PAIR: u64 = 16;

macro_rules! plan {
    ($($module:literal, $element:ty, $entry:ident;)*) => { $(
        /// One rank's plan by value, with `plans` null and a thread block for each of the plan's;
        /// or those of several ranks by address, the second block index being the rank.
        ///
        /// # Safety
        /// As for [`run_block`](crossweft_device::executor::run_block), for every row of the grid.
        #[cfg(module = $module)]
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(plan: PlanLaunch, plans: *const PlanLaunch) {
            // SAFETY: the caller's promise.
            unsafe { run::<$element>(plan, plans) }
        }
    )* };
}

#[allow(unused_imports)]
use crossweft_device::element::{Bf16, F8E4M3, F8E5M2, F16};

plan! {
    "i8", i8, crossweft_plan_i8;
    "u8", u8, crossweft_plan_u8;
    "i16", i16, crossweft_plan_i16;
    "u16", u16, crossweft_plan_u16;
    "i32", i32, crossweft_plan_i32;
    "u32", u32, crossweft_plan_u32;
    "i64", i64, crossweft_plan_i64;
    "u64", u64, crossweft_plan_u64;
    "f16", F16, crossweft_plan_f16;
    "bf16", Bf16, crossweft_plan_bf16;
    "f32", f32, crossweft_plan_f32;
    "f64", f64, crossweft_plan_f64;
    "f8e4m3", F8E4M3, crossweft_plan_f8e4m3;
    "f8e5m2", F8E5M2, crossweft_plan_f8e5m2;
}
