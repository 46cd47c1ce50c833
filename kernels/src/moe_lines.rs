//! Dispatch and combine of a mixture of experts with rows as lines, for each type that tokens have.

use core::mem::offset_of;

use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::machine::{block_x, thread, threads};
use crossweft_device::gpu::moe::{Calls, CombineLaunch, DispatchLaunch, Shared, combine, dispatch};
use crossweft_device::moe::{BLOCK_TABLES, Group, MAX_RANKS, is_stopped, stop};
use crossweft_device::{Block, Memory, Raw, Stopped};

use crate::shared::{self, Here};

/// Bytes of shared memory for the launch.
pub(crate) const LAUNCH_BYTES: usize = if size_of::<DispatchLaunch>() > size_of::<CombineLaunch>() {
    size_of::<DispatchLaunch>()
} else {
    size_of::<CombineLaunch>()
};

/// Warps of a block, at most.
pub(crate) const WARPS: usize = 12;

/// Bytes of shared memory for what is known of each rank: where its memory is, and whether it is masked.
pub(crate) const PEERS_BYTES: usize = 2 * MASKED_AT as usize;
const MASKED_AT: u64 = 8 * MAX_RANKS as u64;

/// What is known of this thread's rank, if it has one: where its memory is, and whether it is masked. It is looked up again
/// and again, in shared memory.
///
/// # Safety
/// The group must be prepared.
#[inline(always)]
unsafe fn look_up(group: &Group) -> (u64, u64) {
    let at = 8 * u64::from(thread());
    match thread() < group.geometry.ranks {
        // SAFETY: the caller's promise.
        true => unsafe { (Raw.read(group.memories + at), Raw.read(group.masked + at)) },
        false => (0, 0),
    }
}

/// Puts it there.
///
/// # Safety
/// The group must be prepared; the block must meet at a barrier before it uses it.
#[inline(always)]
unsafe fn bring(group: &Group, (memory, masked): (u64, u64)) {
    if thread() < group.geometry.ranks {
        let at = shared::peers() + 8 * u64::from(thread());
        // SAFETY: the caller's promise; there are no more ranks than there is room for.
        unsafe {
            Raw.write(at, memory);
            Raw.write(at + MASKED_AT, masked);
        }
    }
}

macro_rules! entry {
    (
        $module:literal, $entry:ident, $launch:ident, |$block:ident, $own:ident, $areas:ident| $prepare:expr,
        $moved:expr, $index:expr, $run:path
    ) => {
        /// A thread block for each of the group's, all resident at once.
        ///
        /// # Safety
        #[doc = concat!("As for [`", stringify!($run), "`], for the steps of the launch.")]
        #[cfg(module = $module)]
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: $launch) {
            let $areas = Shared {
                terms: shared::terms(),
                metas: shared::metas(),
                marks: shared::marks(),
                tables: shared::tables(),
            };
            // Where in the launch those words are.
            const GROUP: usize = offset_of!($launch, group);
            const MEMORIES: usize = GROUP + offset_of!(Group, memories);
            const MASKED: usize = GROUP + offset_of!(Group, masked);
            const TABLES: usize = offset_of!($launch, routes) + BLOCK_TABLES.0;
            const TABLES_END: usize = offset_of!($launch, routes) + BLOCK_TABLES.1;
            // SAFETY: the caller's promise; the areas are for this, and there is a barrier before they are used. The
            // record in the host's memory says what went wrong.
            unsafe {
                // On their way while all else is made ready. Whatever each thread has read, the next barrier agrees.
                let calls = Calls::read(&Raw, &launch.group);
                let is_stopped = is_stopped(&Raw, &launch.group);
                let peer = look_up(&launch.group);
                let $block = &GpuBlock::<Here>::open(&launch.context, launch.group.rank);
                let $own = &launch;
                let before = $prepare;
                // By all threads: one after the other is a long way. What is another for this block is put in on the way.
                let (word, here) = (word_of!($entry, launch), shared::launch());
                let mut at = 8 * u64::from(thread());
                while at < size_of::<$launch>() as u64 {
                    let value = match at as usize {
                        MEMORIES => shared::peers(),
                        MASKED => shared::peers() + MASKED_AT,
                        TABLES..TABLES_END => word(at).wrapping_add($moved),
                        _ => word(at),
                    };
                    Raw.write(here + at, value);
                    at += 8 * u64::from(threads());
                }
                let here = here as *const $launch;
                bring(&launch.group, peer);
                let outcome = match is_stopped {
                    true => Err(Stopped::Aborted),
                    false => Ok(()),
                };
                if $block.sync(outcome).is_err() {
                    return;
                }
                let at = (calls, before);
                if $run($block, &*here, &$areas, at, $index).is_err() {
                    stop(&Raw, &(*here).group);
                }
            }
        }
    };
}

macro_rules! moe {
    ($($module:literal, $element:ty, $dispatch:ident, $combine:ident;)*) => { $(
        entry!(
            $module,
            $dispatch,
            DispatchLaunch,
            |block, own, areas| dispatch::prepare(block, own, &areas, block_x()),
            areas.moved(&own.routes, block_x(), own.group.blocks),
            (block_x(), own.routes.received),
            dispatch::run::<_, $element>
        );
        entry!(
            $module,
            $combine,
            CombineLaunch,
            |block, own, areas| combine::prepare(block, own),
            0,
            block_x(),
            combine::run::<_, $element>
        );
    )* };
}

#[allow(unused_imports)]
use crossweft_device::element::{Bf16, F16};

moe! {
    "moe_lines_bf16", Bf16, crossweft_moe_lines_dispatch_bf16, crossweft_moe_lines_combine_bf16;
    "moe_lines_f16", F16, crossweft_moe_lines_dispatch_f16, crossweft_moe_lines_combine_f16;
    "moe_lines_f32", f32, crossweft_moe_lines_dispatch_f32, crossweft_moe_lines_combine_f32;
}
