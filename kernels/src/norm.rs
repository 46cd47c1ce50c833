//! RMS normalisation: of tokens that have been reduced, for every data type that it is for; and in one piece with a one-shot
//! sum, for those of 16 bits.

use core::mem::offset_of;

use crossweft_device::element::{Bf16, F16};
use crossweft_device::gpu::block::GpuBlock;
use crossweft_device::gpu::fused::one_shot_norm::{self, Near};
use crossweft_device::gpu::machine::{block_x, blocks_x};
use crossweft_device::gpu::norm::{At, NormElement, SLOT_BYTES, reduced, token};
use crossweft_device::gpu::{GpuContext, Norm, OneShot, OneShotNorm};
use crossweft_device::{Memory, Raw};

use crate::fused::Parameter;
use crate::shared::{Here, STAGE_BYTES, slots, stop, token as stage};

/// # Safety
/// As for [`token`], of every token.
#[inline(always)]
unsafe fn run<E: NormElement>(norm: &Norm) {
    // SAFETY: the caller's promise. Nobody waits for anything but the block's threads.
    unsafe {
        let block = GpuBlock::<Here>::open(&GpuContext::default(), 0);
        let bytes = u64::from(norm.hidden) * size_of::<E>() as u64;
        let near = if bytes <= STAGE_BYTES as u64 {
            stage()
        } else {
            0
        };
        let mut at = At {
            token: block_x(),
            slots: slots(),
            stage: near,
        };
        while at.token < norm.tokens {
            let of = at.token;
            let done = token::<_, E, false>(&block, norm, at, |place| {
                Ok(reduced::<_, E>(&block, norm, of, place))
            });
            if done.is_err() {
                return;
            }
            at.token += blocks_x();
            // The next token's threads may be there before the last of this one's has read what they share.
            at.slots = slots() + (at.slots == slots()) as u64 * SLOT_BYTES as u64;
        }
    }
}

macro_rules! norm {
    ($($element:ty, $entry:ident;)*) => { $(
        /// Any number of thread blocks, each of [`threads_of`](crossweft_device::gpu::norm::threads_of) threads.
        ///
        /// # Safety
        /// As for [`token`].
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: Norm) {
            // SAFETY: the caller's promise.
            unsafe { run::<$element>(&launch) }
        }
    )* };
}

norm! {
    f32, crossweft_norm_f32;
    F16, crossweft_norm_f16;
    Bf16, crossweft_norm_bf16;
}

macro_rules! one_shot_norm {
    ($($element:ty, $entry:ident;)*) => { $(
        /// As many thread blocks as its counters say, each of
        /// [`threads_of`](crossweft_device::gpu::norm::threads_of) threads.
        ///
        /// # Safety
        /// As for [`one_shot_norm::run`].
        #[unsafe(no_mangle)]
        pub unsafe extern "gpu-kernel" fn $entry(launch: OneShotNorm) {
            // SAFETY: the caller's promise; what is read lies in the parameter, and `run` has a barrier
            // before it waits. The record in the host's memory says what went wrong.
            unsafe {
                let of = offset_of!(OneShotNorm, one_shot);
                let tables = Parameter {
                    word: word_of!($entry, launch),
                    target: of + offset_of!(OneShot, target),
                    source: of + offset_of!(OneShot, source),
                    peer: of + offset_of!(OneShot, peer),
                    origin: 0,
                };
                // On its way while all else is made ready.
                let epoch = Raw.load(launch.one_shot.counters.epoch);
                let block = GpuBlock::<Here>::open(&launch.one_shot.context, launch.one_shot.rank);
                let near = Near {
                    stage: stage(),
                    slots: slots(),
                };
                let at = (block_x(), epoch);
                if one_shot_norm::run::<_, $element>(&block, &launch, &tables, at, near).is_err() {
                    stop(launch.one_shot.counters.epoch);
                }
            }
        }
    )* };
}

one_shot_norm! {
    F16, crossweft_one_shot_norm_f16;
    Bf16, crossweft_one_shot_norm_bf16;
}
