//! Bulk copies: one thread asks for kilobytes at a time, which the multiprocessor's own copy engine (TMA, from compute
//! capability 9.0 on) brings into shared memory and takes out again, while the block's other threads and registers have
//! nothing to do with it.
//!
//! # Memory order
//!
//! The engine reaches memory by another way than loads and stores, the *async proxy*, and what went one way is seen
//! the other way only behind a fence between the two (PTX ISA, "Async proxy"):
//!
//! * Before: whatever a thread of the block wrote, or saw by an acquire, is read by the engine because every thread
//!   fences (`fence.proxy.async`) before the barrier behind which the copy is asked for.
//! * After: the thread that asked waits until its copies are complete, not only read out of shared memory
//!   (`cp.async.bulk.wait_group`, without `.read`), and fences; then what it signals with release, or another thread of
//!   the block behind a barrier, covers the copy as if it had been stores.
//!
//! On machines without the engine, and between addresses that are not alike to 16 bytes, it is [`super::copy::copy`].

use crate::block::Block;

/// Shared memory of a block that bulk copies go through.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// A generic address, aligned to [`ALIGNMENT`].
    addr: u64,
    bytes: u64,
}

/// Buffers that a stage is divided into. One thread keeps them all busy.
pub const BUFFERS: u64 = 8;
/// What a stage must be aligned to. So are its buffers.
pub const ALIGNMENT: u64 = 128;

/// Copies into shared memory that are under way at a time, while the rest of the buffers is being emptied.
const AHEAD: u64 = BUFFERS - KEPT;
/// Buffers that are being emptied at a time.
const KEPT: u64 = 2;
/// Bytes in front of the buffers: where each says that it is full, and the turns that they are in.
const FRONT: u64 = ALIGNMENT;
/// Parts of a copy that is too small for whole buffers are no smaller than this.
const LEAST: u64 = 2048;
/// Sizes and addresses that the engine takes are multiples of this.
const GRANULE: u64 = 16;

impl Stage {
    /// No memory: copies do without the engine.
    pub const NONE: Self = Self { addr: 0, bytes: 0 };

    /// Of `bytes` bytes at a generic address, of which [`ALIGNMENT`] are for the stage's own use; it takes some tens of
    /// KiB to keep memory busy.
    ///
    /// # Safety
    /// The address must be of the block's shared memory and aligned to [`ALIGNMENT`]. The memory must be
    /// [prepared](Self::prepare) before the first copy, and nobody may use it otherwise from then on.
    #[must_use]
    pub const unsafe fn new(addr: u64, bytes: u64) -> Self {
        Self { addr, bytes }
    }

    /// The first thread of a block, once in a launch, before the first copy: makes the memory ready.
    ///
    /// # Safety
    /// As for [`new`](Self::new); nobody may use the memory meanwhile.
    #[inline(always)]
    pub unsafe fn prepare(self) {
        #[cfg(any(
            not(any(target_arch = "nvptx64", target_arch = "amdgpu")),
            all(target_arch = "nvptx64", target_feature = "sm_90")
        ))]
        if self.buffer_bytes() != 0 {
            // SAFETY: the caller's promise; all of it lies in front of the buffers.
            unsafe { engine::prepare(self) };
        }
    }

    /// Where the turns are kept that the buffers are in, a bit each: barriers last for a launch, copy after copy.
    #[inline(always)]
    const fn turns(self) -> u64 {
        self.barrier(BUFFERS)
    }

    /// Where buffer `k` says that it is full.
    #[inline(always)]
    const fn barrier(self, k: u64) -> u64 {
        self.addr + k * 8
    }

    /// Bytes of a buffer.
    #[inline(always)]
    const fn buffer_bytes(self) -> u64 {
        self.bytes.saturating_sub(FRONT) / BUFFERS / ALIGNMENT * ALIGNMENT
    }
}

/// Whether a bulk copy would be one here, rather than loads and stores.
#[must_use]
pub const fn is_supported() -> bool {
    cfg!(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))
        || cfg!(all(target_arch = "nvptx64", target_feature = "sm_90"))
}

/// Block: copies `bytes` bytes from `src` to `dst` through `stage`, which every thread gives alike. Like
/// [`super::copy::copy`], it ends at no barrier: what it wrote is there for others behind the next one.
///
/// # Safety
/// As for [`Memory::copy`](crate::memory::Memory::copy), and the stage must be the block's.
#[cfg_attr(target_arch = "nvptx64", inline(never))]
pub unsafe fn copy<B: Block>(block: &B, stage: Stage, dst: u64, src: u64, bytes: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(any(
            not(any(target_arch = "nvptx64", target_arch = "amdgpu")),
            all(target_arch = "nvptx64", target_feature = "sm_90")
        ))]
        if engine::copy(block, stage, dst, src, bytes) {
            return;
        }
        let _ = stage;
        super::copy::copy_part(block.thread(), block.threads(), dst, src, bytes);
    }
}

#[cfg(any(
    not(any(target_arch = "nvptx64", target_arch = "amdgpu")),
    all(target_arch = "nvptx64", target_feature = "sm_90")
))]
mod engine {
    use super::machine::{fence, fence_stored, full, init, keep, load, store, stored};
    use super::{AHEAD, ALIGNMENT, BUFFERS, FRONT, GRANULE, KEPT, LEAST, Stage};
    use crate::block::Block;
    use crate::gpu::wide::{load1, store1};
    use crate::memory::{Memory, Raw};

    /// Whether it has made the copy.
    ///
    /// # Safety
    /// As for [`super::copy`].
    #[inline(always)]
    pub(super) unsafe fn copy<B: Block>(
        block: &B,
        stage: Stage,
        dst: u64,
        src: u64,
        bytes: u64,
    ) -> bool {
        let head = min(dst.wrapping_neg() & (GRANULE - 1), bytes);
        let whole = (bytes - head) / GRANULE * GRANULE;
        if whole == 0 || stage.buffer_bytes() == 0 || (dst ^ src) & (GRANULE - 1) != 0 {
            return false;
        }
        if dst == src {
            return true;
        }
        fence();
        // Nobody brings an error, and who was stopped before does not come here.
        let _ = block.sync(Ok(()));
        // SAFETY: the three parts cover the caller's ranges once.
        unsafe {
            let (mut i, threads) = (u64::from(block.thread()), u64::from(block.threads()));
            while i < bytes - whole {
                let at = if i < head { i } else { i + whole };
                store1(dst + at, load1(src + at));
                i += threads;
            }
            if block.thread() == 0 {
                pump(stage, dst + head, src + head, whole);
            }
        }
        true
    }

    /// One thread: see [`Stage::prepare`].
    ///
    /// # Safety
    /// As there, and there must be buffers.
    #[inline(always)]
    pub(super) unsafe fn prepare(stage: Stage) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut k = 0;
            while k < BUFFERS {
                init(stage.barrier(k));
                k += 1;
            }
            Raw.write(stage.turns(), 0_u64);
        }
    }

    /// One thread: copies through all buffers, round and round.
    ///
    /// # Safety
    /// Both addresses and the size must be multiples of [`GRANULE`]; the rest is as for [`super::copy`].
    #[inline(always)]
    unsafe fn pump(stage: Stage, dst: u64, src: u64, bytes: u64) {
        // All buffers have something to do.
        let even = bytes.div_ceil(BUFFERS).next_multiple_of(ALIGNMENT);
        let size = min(stage.buffer_bytes(), max(even, LEAST));
        let barrier = |k: u64| stage.barrier(k);
        let buffer = |k: u64| stage.addr + FRONT + k * size;
        // SAFETY: barriers lie in front of the buffers, in the stage; a buffer is filled when what was in it has been read,
        // and read when it is full.
        unsafe {
            // Where what is asked for next begins, and its buffer.
            let (mut from, mut next) = (0, 0);
            let mut ask = || {
                let part = min(size, bytes - from);
                load(buffer(next), src + from, part, barrier(next));
                from += part;
                next = if next + 1 == BUFFERS { 0 } else { next + 1 };
                from < bytes
            };
            let (mut k, mut more) = (0, true);
            while k < AHEAD && more {
                more = ask();
                k += 1;
            }
            let mut turns: u64 = Raw.read(stage.turns());
            let (mut to, mut this) = (0, 0);
            while to < bytes {
                while !full(barrier(this), (turns >> this) as u32 & 1) {}
                turns ^= 1 << this;
                let part = min(size, bytes - to);
                store(dst + to, buffer(this), part);
                to += part;
                this = if this + 1 == BUFFERS { 0 } else { this + 1 };
                if more {
                    keep::<{ KEPT as u32 }>();
                    more = ask();
                }
            }
            Raw.write(stage.turns(), turns);
            stored();
            fence_stored();
        }
    }

    const fn min(a: u64, b: u64) -> u64 {
        if a < b { a } else { b }
    }

    const fn max(a: u64, b: u64) -> u64 {
        if a > b { a } else { b }
    }
}

/// The engine. Addresses of shared memory are generic; sizes are below 2^20.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
mod machine {
    use core::arch::asm;

    /// An address in the shared window.
    #[inline(always)]
    fn shared(addr: u64) -> u32 {
        let short: u64;
        // SAFETY: computes an address.
        unsafe {
            asm!("cvta.to.shared.u64 {s}, {a};", s = out(reg64) short, a = in(reg64) addr,
                options(pure, nomem, nostack, preserves_flags));
        }
        short as u32
    }

    /// Orders what this thread reached by loads and stores, or saw by an acquire, and what the engine reaches.
    #[inline(always)]
    pub(super) fn fence() {
        // SAFETY: a fence touches no memory.
        unsafe { asm!("fence.proxy.async;", options(nostack, preserves_flags)) };
    }

    /// Orders what the engine has stored and what this thread does next.
    #[inline(always)]
    pub(super) fn fence_stored() {
        // SAFETY: as above.
        unsafe {
            asm!(
                "fence.proxy.async.global;",
                options(nostack, preserves_flags)
            )
        };
    }

    /// Makes a barrier for one copy at a time.
    #[inline(always)]
    pub(super) unsafe fn init(barrier: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("mbarrier.init.shared::cta.b64 [{b}], 1;", b = in(reg32) shared(barrier),
                options(nostack, preserves_flags));
        }
    }

    /// Asks for `bytes` bytes from `src` to the buffer at `to`; `barrier` says when they are there.
    #[inline(always)]
    pub(super) unsafe fn load(to: u64, src: u64, bytes: u64, barrier: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};",
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{src}], {n}, [{b}];",
                b = in(reg32) shared(barrier),
                n = in(reg32) bytes as u32,
                to = in(reg32) shared(to),
                src = in(reg64) src,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Whether what was asked for in turn `turn`, 0 or 1, is there; waits for some time itself. It comes from memory,
    /// and from nobody who might not bring it: this is a load that takes its time, no wait for a peer.
    #[inline(always)]
    pub(super) unsafe fn full(barrier: u64, turn: u32) -> bool {
        let done: u32;
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "{{",
                ".reg .pred %done;",
                "mbarrier.try_wait.parity.shared::cta.b64 %done, [{b}], {turn};",
                "selp.u32 {done}, 1, 0, %done;",
                "}}",
                b = in(reg32) shared(barrier),
                turn = in(reg32) turn,
                done = out(reg32) done,
                options(nostack),
            );
        }
        done != 0
    }

    /// Asks for `bytes` bytes of the buffer at `from` to go to `dst`.
    #[inline(always)]
    pub(super) unsafe fn store(dst: u64, from: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "cp.async.bulk.global.shared::cta.bulk_group [{dst}], [{from}], {n};",
                "cp.async.bulk.commit_group;",
                dst = in(reg64) dst,
                from = in(reg32) shared(from),
                n = in(reg32) bytes as u32,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Waits until all buffers but the last `COUNT` that were to be stored have been read.
    #[inline(always)]
    pub(super) fn keep<const COUNT: u32>() {
        // SAFETY: waits for this thread's own copies.
        unsafe {
            asm!("cp.async.bulk.wait_group.read {n};", n = const COUNT, options(nostack, preserves_flags));
        }
    }

    /// Waits until all that was to be stored is where it belongs.
    #[inline(always)]
    pub(super) fn stored() {
        // SAFETY: as above.
        unsafe {
            asm!(
                "cp.async.bulk.wait_group 0;",
                options(nostack, preserves_flags)
            )
        };
    }
}

/// The same on the host, at once. A barrier counts what has come.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod machine {
    use crate::memory::{Memory, Raw};

    pub(super) const fn fence() {}

    pub(super) const fn fence_stored() {}

    pub(super) unsafe fn init(barrier: u64) {
        // SAFETY: the caller's promise.
        unsafe { Raw.store(barrier, 0) };
    }

    pub(super) unsafe fn load(to: u64, src: u64, bytes: u64, barrier: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            Raw.copy(to, src, bytes);
            Raw.add(barrier, 1);
        }
    }

    pub(super) unsafe fn full(barrier: u64, turn: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { Raw.load(barrier) & 1 != u64::from(turn) }
    }

    pub(super) unsafe fn store(dst: u64, from: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe { Raw.copy(dst, from, bytes) };
    }

    pub(super) const fn keep<const COUNT: u32>() {}

    pub(super) const fn stored() {}
}
