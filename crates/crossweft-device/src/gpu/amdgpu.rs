//! AMD (gfx942): memory at system scope and a wave's registers, by the compiler's own atomics and intrinsics.
//!
//! Nobody has run this. It is compiled, and what the compiler makes of it is looked at (`cargo xtask kernels`), so that the
//! one source stays one. What differs from NVIDIA: atomics of the compiler are at system scope here and keep their
//! order, so they need not be written out; a warp has 64 threads, and threads that have come apart do not meet anywhere;
//! there is no inline assembly, so shared memory has no names: a launch asks for it, and a kernel finds it by address.

use core::arch::amdgpu;
use core::intrinsics::gpu::amdgpu_dispatch_ptr;
use core::sync::atomic::{Ordering, compiler_fence, fence};

use crate::memory::atomics::{word, words_by_atomics};
use crate::memory::{Memory, Raw};

unsafe extern "unadjusted" {
    #[link_name = "llvm.amdgcn.s.getreg"]
    fn getreg(register: i32) -> u32;
    #[link_name = "llvm.amdgcn.ds.bpermute"]
    fn bpermute(address: i32, value: i32) -> i32;
    #[link_name = "llvm.amdgcn.s.waitcnt"]
    fn waitcnt(counts: i32);
}

impl Memory for Raw {
    words_by_atomics!();

    /// Without a fence, as on NVIDIA.
    #[inline(always)]
    unsafe fn fetch_add_local(&self, addr: u64, value: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { word(addr) }.fetch_add(value, Ordering::Relaxed)
    }

    #[inline(always)]
    fn fence_launch(&self) {}

    /// Caches here may hold what was there before.
    #[inline(always)]
    fn fence_relaxed_wait(&self) {
        fence(Ordering::Acquire);
    }

    #[inline(always)]
    unsafe fn read<T: Copy>(&self, addr: u64) -> T {
        // SAFETY: the caller's promise.
        unsafe { (addr as *const T).read() }
    }

    #[inline(always)]
    unsafe fn write<T: Copy>(&self, addr: u64, value: T) {
        // SAFETY: the caller's promise.
        unsafe { (addr as *mut T).write(value) }
    }

    #[inline(always)]
    unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe { super::copy::copy_part(0_u32, 1, dst, src, bytes) }
    }
}

/// 1 on all threads of a wave if `mine` is not 0 on any, else 0.
#[inline(always)]
#[must_use]
pub fn vote_any(mine: u32) -> u32 {
    // What the wave's threads wrote before is behind them all.
    compiler_fence(Ordering::AcqRel);
    let any = amdgpu::ballot(mine != 0);
    compiler_fence(Ordering::AcqRel);
    (any != 0).into()
}

/// What `x` is on the thread of the warp, half a wave, whose index differs in the bits of `mask`.
#[inline(always)]
#[must_use]
#[allow(clippy::cast_possible_wrap, clippy::cast_sign_loss, reason = "bits")]
pub fn exchange(x: u32, mask: u32) -> u32 {
    // SAFETY: moves registers.
    unsafe { bpermute(((thread() ^ mask) * 4) as i32, x as i32) as u32 }
}

/// Brings the threads of a wave together, which they are; what they wrote before is behind them all.
#[inline(always)]
pub fn warp_sync() {
    compiler_fence(Ordering::AcqRel);
}

/// Writes `mine` to a word that the threads of a block share, if it is 0; returns what it was.
///
/// # Safety
/// The address must be valid and 8-byte aligned, and nobody may access it otherwise meanwhile.
#[inline(always)]
pub unsafe fn claim(addr: u64, mine: u64) -> u64 {
    // SAFETY: the caller's promise.
    let word = unsafe { word(addr) };
    match word.compare_exchange(0, mine, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(before) | Err(before) => before,
    }
}

/// `x`. A barrier in two copies is one barrier here: it counts waves.
#[inline(always)]
#[must_use]
pub fn opaque(x: u32) -> u32 {
    x
}

/// This thread's index in its block.
#[inline(always)]
#[must_use]
pub fn thread() -> u32 {
    amdgpu::workitem_id_x()
}

/// Threads of a block.
#[inline(always)]
#[must_use]
pub fn threads() -> u32 {
    // SAFETY: of the packet that this kernel was dispatched by, which holds it (HSA's
    // `hsa_kernel_dispatch_packet_t::workgroup_size_x`).
    u32::from(unsafe { amdgpu_dispatch_ptr().cast::<u16>().add(2).read() })
}

/// This block's index in the grid.
#[inline(always)]
#[must_use]
pub fn block_x() -> u32 {
    amdgpu::workgroup_id_x()
}

/// The second index.
#[inline(always)]
#[must_use]
pub fn block_y() -> u32 {
    amdgpu::workgroup_id_y()
}

/// Blocks of the grid.
#[inline(always)]
#[must_use]
pub fn blocks_x() -> u32 {
    // SAFETY: as in [`threads`]: `grid_size_x`, which counts threads.
    let all = unsafe { amdgpu_dispatch_ptr().cast::<u32>().add(3).read() };
    all / threads().max(1)
}

/// Nanoseconds since some moment: a counter of 100 MHz.
#[inline(always)]
#[must_use]
pub fn time_ns() -> u64 {
    amdgpu::s_memrealtime().wrapping_mul(10)
}

/// Bytes at the beginning of a block's shared memory that [`barrier_max`] uses.
pub const BARRIER_BYTES: usize = 16;

/// Where the shared memory lies that a launch has asked for. There is no other: nothing in a kernel is placed there by
/// name, nor by the compiler, which is told not to.
#[inline(always)]
#[must_use]
pub fn shared() -> u64 {
    /// The upper half of the register `SH_MEM_BASES` (15), which holds the upper 16 bits of addresses of shared memory:
    /// its number, the first bit, and the number of bits less one.
    const SHARED_BASE: i32 = 15 | 16 << 6 | 15 << 11;
    // SAFETY: reads a register.
    u64::from(unsafe { getreg(SHARED_BASE) }) << 48
}

/// Kernels begin when what came before has ended, here.
#[inline(always)]
pub fn follow() {}

/// As for [`follow`].
#[inline(always)]
pub fn precede() {}

/// Makes [`barrier_max`] ready. One thread of a block calls it, before the first, at which all bring 0.
///
/// # Safety
/// The launch must have asked for [`BARRIER_BYTES`] bytes of shared memory at least.
#[inline(always)]
pub unsafe fn ready() {
    // SAFETY: the caller's promise.
    unsafe { Raw.store(shared(), 0) };
}

/// Block barrier that agrees on the largest of four numbers: of all that were brought to any barrier of this launch,
/// which is the same, since who brings another than 0 has been stopped, and stays so.
#[inline(always)]
#[must_use]
pub fn barrier_max<const ID: u32>(mine: u32) -> u32 {
    // SAFETY: [`ready`] was promised the word.
    let agreed = unsafe { word(shared()) };
    if mine != 0 {
        agreed.fetch_max(mine.into(), Ordering::Relaxed);
    }
    barrier();
    let all = agreed.load(Ordering::Relaxed);
    // Nobody may bring a number to the next before all know this one's.
    barrier();
    all as u32
}

/// All waves of a block meet, and see what each wrote before. What they wrote is on its way when a wave comes here, and
/// in the cache that all share when the counts of outstanding accesses are 0.
#[inline(always)]
fn barrier() {
    compiler_fence(Ordering::Release);
    // SAFETY: waits for this wave's own accesses.
    unsafe { waitcnt(0) };
    amdgpu::s_barrier();
    compiler_fence(Ordering::Acquire);
}
