//! Dispatch and combine of a mixture of experts, for each type that tokens have.

use crossweft_device::element::{Bf16, Element, F16};
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::machine::{block_x, thread};
use crossweft_device::gpu::moe::{CombineLaunch, DispatchLaunch, GpuRows, WARP_TABLE_BYTES, steps};
use crossweft_device::gpu::reduce::GpuElement;
use crossweft_device::moe::{Group, MAX_RANKS, combine, dispatch, is_stopped, stop};
use crossweft_device::{Block, Memory, Raw, Stopped};

use crate::shared::{self, Here};

/// Bytes of shared memory for the launch.
pub(crate) const LAUNCH_BYTES: usize = if size_of::<DispatchLaunch>() > size_of::<CombineLaunch>() {
    size_of::<DispatchLaunch>()
} else {
    size_of::<CombineLaunch>()
};

/// Warps of a block, at most.
const WARPS: usize = 12;

/// Bytes of shared memory for terms.
pub(crate) const TERMS_BYTES: usize = WARPS * WARP_TABLE_BYTES;

/// Bytes of shared memory for what is known of each rank: where its memory is, and whether it is masked.
pub(crate) const PEERS_BYTES: usize = 2 * MASKED_AT as usize;
const MASKED_AT: u64 = 8 * MAX_RANKS as u64;

/// Brings what is known of each rank, which is looked up again and again, into shared memory.
///
/// # Safety
/// The group must be prepared; the block must meet at a barrier before it uses it.
#[inline(always)]
unsafe fn bring(group: &Group) {
    let rank = thread();
    if rank < group.geometry.ranks {
        let at = 8 * u64::from(rank);
        // SAFETY: the caller's promise; there are no more ranks than there is room for.
        unsafe {
            let memory: u64 = Raw.read(group.memories + at);
            let masked: u64 = Raw.read(group.masked + at);
            Raw.write(shared::peers() + at, memory);
            Raw.write(shared::peers() + MASKED_AT + at, masked);
        }
    }
}

/// # Safety
/// As for [`dispatch::send`].
#[inline(always)]
unsafe fn run_dispatch<E: GpuElement + Element<Acc = f32>>(
    block: GpuBlock<Here>,
    here: &DispatchLaunch,
) -> Result<(), Stopped> {
    let (index, group, routes) = (block_x(), &here.group, &here.routes);
    let does = |step| here.steps & step != 0;
    // SAFETY: the caller's promise; the area is for this. No step needs what other thread blocks have done in the one
    // before it.
    unsafe {
        let rows = GpuRows::<E>::new(shared::terms());
        if does(steps::ROUTE) {
            dispatch::route(&block, group, routes, &here.choices, index)?;
        }
        if does(steps::SEND) {
            dispatch::send(&block, &rows, group, routes, &here.input, index)?;
        }
        if does(steps::COUNT) {
            dispatch::count(&block, group, routes, here.input.call)?;
        }
        if does(steps::RECEIVE) {
            dispatch::receive(&block, &rows, group, routes, &here.output, index)?;
        }
    }
    Ok(())
}

/// # Safety
/// As for [`combine::send`].
#[inline(always)]
unsafe fn run_combine<E: GpuElement + Element<Acc = f32>>(
    block: GpuBlock<Here>,
    here: &CombineLaunch,
) -> Result<(), Stopped> {
    let (index, group, routes) = (block_x(), &here.group, &here.routes);
    let does = |step| here.steps & step != 0;
    // SAFETY: as for a dispatch.
    unsafe {
        let rows = GpuRows::<E>::new(shared::terms());
        let (input, output) = (&here.input, here.output);
        if does(steps::WEIGHTS) {
            combine::send_weights(&block, group, routes, input, index)?;
        }
        if does(steps::SEND) {
            combine::send(&block, &rows, group, routes, input, index)?;
        }
        if does(steps::RECEIVE) {
            combine::receive(&block, &rows, group, routes, output, input, index)?;
        }
    }
    Ok(())
}

macro_rules! entry {
    ($entry:ident, $launch:ident, $run:path) => {
        /// A thread block for each of the group's, all resident at once.
        ///
        /// # Safety
        #[doc = concat!("As for [`", stringify!($run), "`], for the steps of the launch.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: $launch) {
            let here = shared::launch() as *mut $launch;
            // SAFETY: the caller's promise; the area is for this, and beginning has a barrier. The record in the host's
            // memory says what went wrong.
            unsafe {
                bring(&launch.group);
                if thread() == 0 {
                    here.write(launch);
                    (&raw mut (*here).routes).write(launch.routes.of_block(block_x()));
                    (&raw mut (*here).group.memories).write(shared::peers());
                    (&raw mut (*here).group.masked).write(shared::peers() + MASKED_AT);
                }
                // On its way while all else is made ready. Whatever each thread has read, the next barrier agrees.
                let is_stopped = is_stopped(&Raw, &launch.group);
                let block = GpuBlock::<Here>::begin(&launch.context, launch.group.rank);
                let outcome = match is_stopped {
                    true => Err(Stopped::Aborted),
                    false => Ok(()),
                };
                if block.sync(outcome).is_ok() && $run(block, &*here).is_err() {
                    stop(&Raw, &(*here).group);
                }
            }
        }
    };
}

macro_rules! moe {
    ($($element:ty, $dispatch:ident, $combine:ident;)*) => { $(
        entry!($dispatch, DispatchLaunch, run_dispatch::<$element>);
        entry!($combine, CombineLaunch, run_combine::<$element>);
    )* };
}

moe! {
    Bf16, crossweft_moe_dispatch_bf16, crossweft_moe_combine_bf16;
    F16, crossweft_moe_dispatch_f16, crossweft_moe_combine_f16;
    f32, crossweft_moe_dispatch_f32, crossweft_moe_combine_f32;
}
