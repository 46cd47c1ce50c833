//! Memory that the threads of a block share.

#[cfg(target_arch = "nvptx64")]
use core::arch::{asm, global_asm};

use crossweft_device::executor::{STOPPED_EPOCH, Start};
use crossweft_device::gpu::block::{BlockState, Shared};
#[cfg(target_arch = "amdgpu")]
use crossweft_device::gpu::machine;
use crossweft_device::gpu::{PlanLaunch, TABLE_BYTES};
use crossweft_device::{Memory, Raw};

/// Areas with names, whose addresses are asked for.
#[cfg(target_arch = "nvptx64")]
macro_rules! areas {
    ($($(#[$doc:meta])* $name:ident, $symbol:literal, $bytes:expr;)*) => { $(
        global_asm!(
            concat!(".shared .align 16 .b8 ", $symbol, "[{bytes}];"),
            bytes = const $bytes,
        );

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

/// One area after the other in the memory that a launch asks for, behind what barriers use.
#[cfg(target_arch = "amdgpu")]
macro_rules! areas {
    ($($(#[$doc:meta])* $name:ident, $symbol:literal, $bytes:expr;)*) => {
        #[repr(C)]
        struct Areas {
            barrier: Area<{ machine::BARRIER_BYTES }>,
            $($name: Area<{ $bytes }>,)*
        }

        /// Bytes of shared memory that a launch must ask for.
        #[unsafe(no_mangle)]
        pub static CROSSWEFT_SHARED_BYTES: u32 = size_of::<Areas>() as u32;

        $(
            $(#[$doc])*
            #[inline(always)]
            pub(crate) fn $name() -> u64 {
                machine::shared() + core::mem::offset_of!(Areas, $name) as u64
            }
        )*
    };
}

#[cfg(target_arch = "amdgpu")]
#[repr(C, align(16))]
struct Area<const BYTES: usize>([u8; BYTES]);

areas! {
    /// A reduction's operands.
    #[cfg_attr(module = "hop", allow(dead_code))]
    table, "crossweft_table", TABLE_BYTES;
    /// A [`PlanLaunch`].
    #[cfg_attr(any(module = "bench", module = "hop"), allow(dead_code))]
    plan, "crossweft_plan", size_of::<PlanLaunch>();
    /// A [`Start`].
    #[cfg_attr(any(module = "bench", module = "hop"), allow(dead_code))]
    start, "crossweft_start", size_of::<Start>();
    /// A block's part of a plan's tables.
    #[cfg_attr(any(module = "bench", module = "hop"), allow(dead_code))]
    stage, "crossweft_stage", STAGE_BYTES;
    /// A [`BlockState`].
    state, "crossweft_state", size_of::<BlockState>();
}

/// Enough for some ten operations between eight ranks.
pub(crate) const STAGE_BYTES: usize = 4096;

/// Ends what is launched behind this kernel, which was stopped; `epoch` is its rank's.
///
/// # Safety
/// The address must be valid.
#[cfg_attr(any(module = "bench", module = "hop"), allow(dead_code))]
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
