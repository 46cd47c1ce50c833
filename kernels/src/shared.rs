//! Memory that the threads of a block share.

#[cfg(target_arch = "nvptx64")]
use core::arch::{asm, global_asm};

use crossweft_device::exchange::{BOARD, Transfer};
use crossweft_device::executor::{STOPPED_EPOCH, Start};
use crossweft_device::gpu::block::{BlockState, Shared};
#[cfg(target_arch = "amdgpu")]
use crossweft_device::gpu::machine;
use crossweft_device::gpu::moe::{MARKS_BYTES, META_BYTES, TABLES_BYTES, WARP_TABLE_BYTES};
use crossweft_device::gpu::{ExchangeLaunch, MAX_CHAINS, PlanLaunch, TABLE_BYTES};
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

#[cfg(family = "exchange")]
areas! {
    /// A reduction's operands.
    table, "crossweft_table", TABLE_BYTES;
    /// An [`ExchangeLaunch`].
    launch, "crossweft_launch", size_of::<ExchangeLaunch>();
    /// The transfers under way.
    chains, "crossweft_chains", MAX_CHAINS as usize * size_of::<Transfer>();
    /// What thread 0 has found to do.
    board, "crossweft_board", BOARD as usize;
    /// A [`BlockState`].
    state, "crossweft_state", size_of::<BlockState>();
}

#[cfg(family = "moe")]
areas! {
    /// A launch of either kind.
    launch, "crossweft_launch", crate::moe::LAUNCH_BYTES;
    /// Where each rank's memory is, and whether it is masked.
    peers, "crossweft_peers", crate::moe::PEERS_BYTES;
    /// A table for each warp's terms.
    terms, "crossweft_terms", crate::moe::TERMS_BYTES;
    /// A [`BlockState`].
    state, "crossweft_state", size_of::<BlockState>();
}

#[cfg(family = "moe_lines")]
areas! {
    /// A launch of either kind.
    launch, "crossweft_launch", crate::moe_lines::LAUNCH_BYTES;
    /// Where each rank's memory is, and whether it is masked.
    peers, "crossweft_peers", crate::moe_lines::PEERS_BYTES;
    /// A table for each warp's terms.
    terms, "crossweft_terms", crate::moe_lines::WARPS * WARP_TABLE_BYTES;
    /// What a row says of itself, for each warp.
    metas, "crossweft_metas", crate::moe_lines::WARPS * META_BYTES;
    /// Where few tokens go.
    marks, "crossweft_marks", MARKS_BYTES;
    /// What has been counted.
    tables, "crossweft_tables", TABLES_BYTES;
    /// A [`BlockState`].
    state, "crossweft_state", size_of::<BlockState>();
}

#[cfg(not(any(
    family = "exchange",
    family = "moe",
    family = "moe_lines",
    family = "norm"
)))]
areas! {
    /// A reduction's operands.
    table, "crossweft_table", TABLE_BYTES;
    /// A [`PlanLaunch`].
    plan, "crossweft_plan", size_of::<PlanLaunch>();
    /// A [`Start`].
    start, "crossweft_start", size_of::<Start>();
    /// A block's part of a plan's tables.
    stage, "crossweft_stage", STAGE_BYTES;
    /// A [`BlockState`].
    state, "crossweft_state", size_of::<BlockState>();
}

#[cfg(family = "norm")]
areas! {
    /// A token of 16-bit elements.
    token, "crossweft_token", STAGE_BYTES;
    /// What threads tell each other of two tokens.
    slots, "crossweft_slots", 2 * crossweft_device::gpu::norm::SLOT_BYTES;
    /// A [`BlockState`].
    state, "crossweft_state", size_of::<BlockState>();
}

/// Of the longest token.
#[cfg(family = "norm")]
pub(crate) const STAGE_BYTES: usize = 16_384 * 2;

/// Where the shared memory begins that a launch has asked for, beside the above; `None` where all of it is such.
#[cfg(all(module = "channel", target_arch = "nvptx64"))]
#[inline(always)]
pub(crate) fn launched() -> Option<u64> {
    let address;
    // SAFETY: computes an address.
    unsafe {
        asm!(
            "{{",
            ".reg .b64 %shared;",
            "mov.b64 %shared, crossweft_launched;",
            "cvta.shared.u64 {address}, %shared;",
            "}}",
            address = out(reg64) address,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    Some(address)
}

#[cfg(all(module = "channel", target_arch = "nvptx64"))]
global_asm!(".extern .shared .align 128 .b8 crossweft_launched[];");

#[cfg(all(module = "channel", target_arch = "amdgpu"))]
pub(crate) const fn launched() -> Option<u64> {
    None
}

/// Enough for some ten operations between eight ranks.
#[cfg(not(family = "norm"))]
pub(crate) const STAGE_BYTES: usize = 4096;

/// Ends what is launched behind this kernel, which was stopped; `epoch` is its rank's.
///
/// # Safety
/// The address must be valid.
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
