//! The plan executor, for one data type and every operation.

use crossweft_device::executor::run_block;
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::nvptx::{barrier_max, block_x, block_y, thread, threads};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::gpu::{GpuReducer, PlanLaunch};

use crossweft_device::program::{BlockOps, Op, Operand, Program, SPACES};

use crate::shared::{self, STAGE_BYTES};

/// Words of a [`PlanLaunch`].
const WORDS: u32 = (size_of::<PlanLaunch>() / 8) as u32;

/// Runs this block's part of a plan. `parameter` reads a word of the kernel's own parameter; if
/// `plans` is not 0, it is the address of one for each row of the grid, used instead.
///
/// The threads bring the plan into shared memory first: so both forms are one text, and no thread
/// has it in its registers.
///
/// # Safety
/// As for [`run_block`].
#[inline(always)]
unsafe fn run<E: GpuElement>(plans: *const PlanLaunch, parameter: impl Fn(u32) -> u64) {
    let here = shared::plan() as *mut u64;
    let mut i = thread();
    while i < WORDS {
        // SAFETY: word `i` lies in both; nobody writes the plans meanwhile.
        unsafe {
            let word = if plans.is_null() {
                parameter(i)
            } else {
                plans
                    .add(block_y() as usize)
                    .cast::<u64>()
                    .add(i as usize)
                    .read()
            };
            here.add(i as usize).write(word);
        }
        i += threads();
    }
    let _ = barrier_max::<0>(0);
    // SAFETY: it was written; the rest is the caller's promise.
    unsafe { stage(here.cast::<PlanLaunch>()) };
    // SAFETY: it is only read from now on; the rest is the caller's promise.
    unsafe {
        let plan = &*here.cast::<PlanLaunch>();
        let (program, index) = (&plan.program, block_x());
        // In a grid of several ranks, some have fewer blocks than others.
        if index >= program.block_count {
            return;
        }
        let block = GpuBlock::<shared::Here>::begin(&plan.context, program.rank);
        let reducer = GpuReducer::<E, _>::new(plan.op, shared::table());
        // The record in the host's memory says what went wrong.
        let _ = run_block(&block, &reducer, program, &plan.launch, index);
    }
}

/// Brings this block's operations, with what they use of the other tables, into shared memory, if there
/// is room, and re-aims the program at them. Each table is an access of its own to far memory, and each
/// entry another; here the threads take them all at once.
///
/// # Safety
/// `plan` must lie in shared memory and be whole; all threads of the block call this.
#[inline(always)]
unsafe fn stage(plan: *mut PlanLaunch) {
    // SAFETY: the plan's tables are the caller's promise; the stage is this block's.
    unsafe {
        let program = &raw mut (*plan).program;
        let Program {
            blocks,
            ops,
            operands,
            links,
            bases,
            ranks,
            block_count,
            ..
        } = program.read();
        let index = block_x();
        if index >= block_count {
            return;
        }
        let own = (blocks as *const BlockOps).add(index as usize).read();
        let here = shared::stage();
        let op_words = own.count * (size_of::<Op>() / 8) as u32;
        let operand_words = own.operands * (size_of::<Operand>() / 8) as u32;
        let base_words = ranks * SPACES as u32;
        // Pairs of links, the last of which may be none.
        let link_words = own.links.div_ceil(2);
        let (to_operands, to_bases) = (op_words, op_words + operand_words);
        let to_links = to_bases + base_words;
        if u64::from(to_links + link_words) * 8 > STAGE_BYTES as u64 {
            return;
        }
        let at = |word: u32| here + u64::from(word) * 8;
        let first_op = ops + u64::from(own.first) * size_of::<Op>() as u64;
        let first_operand = operands + u64::from(own.first_operand) * size_of::<Operand>() as u64;
        bring(at(0), first_op, op_words);
        bring(at(to_operands), first_operand, operand_words);
        bring(at(to_bases), bases, base_words);
        let mut i = thread();
        while i < own.links {
            let link = (links as *const u32).add((own.first_link + i) as usize).read();
            (at(to_links) as *mut u32).add(i as usize).write(link);
            i += threads();
        }
        // Where the tables would begin, of which only this part is here.
        let begin = |here: u64, first: u32, size: usize| {
            here.wrapping_sub(u64::from(first) * size as u64)
        };
        let _ = barrier_max::<0>(0);
        if thread() == 0 {
            (&raw mut (*program).ops).write(begin(at(0), own.first, size_of::<Op>()));
            let operands = begin(at(to_operands), own.first_operand, size_of::<Operand>());
            (&raw mut (*program).operands).write(operands);
            (&raw mut (*program).bases).write(at(to_bases));
            (&raw mut (*program).links).write(begin(at(to_links), own.first_link, 4));
        }
        let _ = barrier_max::<0>(0);
    }
}

/// Block: copies `words` words.
///
/// # Safety
/// Both ranges must be valid and 8-byte aligned.
#[inline(always)]
unsafe fn bring(to: u64, from: u64, words: u32) {
    let mut i = thread();
    while i < words {
        // SAFETY: word `i` lies in both.
        unsafe {
            let word = (from as *const u64).add(i as usize).read();
            (to as *mut u64).add(i as usize).write(word);
        }
        i += threads();
    }
}

macro_rules! plan {
    ($($module:literal, $element:ty, $entry:ident;)*) => { $(
        /// One rank's plan by value, with `plans` null and a thread block for each of the plan's;
        /// or those of several ranks by address, the second block index being the rank.
        ///
        /// # Safety
        /// As for [`run_block`], for every row of the grid.
        #[cfg(module = $module)]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $entry(_plan: PlanLaunch, plans: *const PlanLaunch) {
            // SAFETY: the caller's promise; `i` is a word of the parameter.
            unsafe {
                run::<$element>(plans, |i| {
                    let word;
                    // Indexed as it is: the compiler would copy it to local memory for that.
                    core::arch::asm!(
                        "{{",
                        ".reg .b64 %from;",
                        concat!("mov.b64 %from, ", stringify!($entry), "_param_0;"),
                        "add.s64 %from, %from, {offset};",
                        "ld.param.b64 {word}, [%from];",
                        "}}",
                        offset = in(reg64) u64::from(i) * 8,
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
