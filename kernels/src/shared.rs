//! Memory that the threads of a block share.

use core::arch::{asm, global_asm};

use crossweft_device::executor::{STOPPED_EPOCH, Start};
use crossweft_device::gpu::block::{BlockState, Shared};
use crossweft_device::gpu::{PlanLaunch, TABLE_BYTES};
use crossweft_device::{Memory, Raw};

global_asm!(
    ".shared .align 16 .b8 crossweft_table[{table}];",
    ".shared .align 16 .b8 crossweft_plan[{plan}];",
    ".shared .align 16 .b8 crossweft_start[{start}];",
    ".shared .align 16 .b8 crossweft_stage[{stage}];",
    ".shared .align 16 .b8 crossweft_state[{state}];",
    table = const TABLE_BYTES,
    state = const size_of::<BlockState>(),
    plan = const size_of::<PlanLaunch>(),
    start = const size_of::<Start>(),
    stage = const STAGE_BYTES,
);

macro_rules! addresses {
    ($($(#[$doc:meta])* $name:ident, $symbol:literal;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name() -> u64 {
            let address;
            // SAFETY: computes an address.
            unsafe {
                asm!(
                    "{{",
                    ".reg .b64 %shared;",
                    concat!("mov.b64 %shared, ", $symbol, ";"),
                    "cvta.shared.u64 {address}, %shared;",
                    "}}",
                    address = out(reg64) address,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            address
        }
    )* };
}

addresses! {
    /// A reduction's operands: [`TABLE_BYTES`] bytes.
    table, "crossweft_table";
    /// A [`PlanLaunch`].
    #[cfg_attr(module = "bench", allow(dead_code))]
    plan, "crossweft_plan";
    /// A [`Start`].
    #[cfg_attr(module = "bench", allow(dead_code))]
    start, "crossweft_start";
    /// A block's part of a plan's tables: [`STAGE_BYTES`] bytes.
    #[cfg_attr(module = "bench", allow(dead_code))]
    stage, "crossweft_stage";
    /// A [`BlockState`].
    state, "crossweft_state";
}

/// Enough for some ten operations between eight ranks.
pub(crate) const STAGE_BYTES: usize = 4096;

/// Ends what is launched behind this kernel, which was stopped; `epoch` is its rank's.
///
/// # Safety
/// The address must be valid.
#[cfg_attr(module = "bench", allow(dead_code))]
#[inline(always)]
pub(crate) unsafe fn stop(epoch: u64) {
    // SAFETY: the caller's promise. Every thread that is stopped writes the same.
    unsafe { Raw.store(epoch, STOPPED_EPOCH) };
}

/// This crate's shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Here;

impl Shared for Here {
    #[inline(always)]
    fn state() -> *mut BlockState {
        state() as *mut BlockState
    }
}
