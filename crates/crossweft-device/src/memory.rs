//! Memory that several ranks touch, at system scope.
//!
//! Addresses are plain `u64`s, valid in the caller's address space. Every function is unsafe for
//! the same reason: the address must be valid for the access (mapped, in bounds, and aligned to 8
//! bytes for the word operations). Data races on the plain accesses (`read`, `write`, `copy`) are
//! excluded by the protocols on top, not here.

/// System-scope accesses of one machine: [`Raw`] on the host, a model checker's memory in tests,
/// inline PTX on NVIDIA GPUs (where the compiler's own read-modify-write atomics lose order and
/// scope, rust-lang/rust#136480).
pub trait Memory {
    /// Relaxed load of a word.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn load(&self, addr: u64) -> u64;

    /// Relaxed load of two words side by side, in one access where the machine has it. Each word is
    /// whole; the two need not belong together.
    ///
    /// # Safety
    /// `addr` must be valid for 16 bytes and 16-byte aligned.
    unsafe fn load_pair(&self, addr: u64) -> [u64; 2] {
        // SAFETY: the caller's promise.
        unsafe { [self.load(addr), self.load(addr + 8)] }
    }

    /// Relaxed store of two words side by side, as for [`load_pair`](Self::load_pair).
    ///
    /// # Safety
    /// As for [`load_pair`](Self::load_pair).
    unsafe fn store_pair(&self, addr: u64, words: [u64; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            self.store(addr, words[0]);
            self.store(addr + 8, words[1]);
        }
    }

    /// Hints that the `bytes` bytes at `addr` are about to be read, or written if `write`; does
    /// nothing where the machine has no such hint. Any address may be given.
    #[inline(always)]
    fn prefetch(&self, addr: u64, bytes: u64, write: bool) {
        let _ = (addr, bytes, write);
    }

    /// Acquire load of a word.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn load_acquire(&self, addr: u64) -> u64;

    /// Relaxed store of a word.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn store(&self, addr: u64, value: u64);

    /// Release store of a word.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn store_release(&self, addr: u64, value: u64);

    /// Relaxed addition to a word.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn add(&self, addr: u64, value: u64);

    /// Release addition to a word.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn add_release(&self, addr: u64, value: u64);

    /// Acquire-release addition to a word; returns the value before.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn fetch_add(&self, addr: u64, value: u64) -> u64;

    /// Relaxed addition to a word that only this rank's thread blocks touch; returns the value before.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn fetch_add_local(&self, addr: u64, value: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { self.fetch_add(addr, value) }
    }

    /// Raises a word to at least `value`, relaxed.
    ///
    /// # Safety
    /// `addr` must be valid and 8-byte aligned.
    unsafe fn raise(&self, addr: u64, value: u64);

    /// Acquire-release fence.
    fn fence(&self);

    /// Orders a launch after those before it. Nothing on GPUs, where streams do that.
    fn fence_launch(&self) {
        self.fence();
    }

    /// Orders what follows a relaxed wait behind it. An acquire fence where the machine may read ahead
    /// of a branch; nothing on GPUs, which do not, and whose caches hold nothing older than the launch.
    fn fence_relaxed_wait(&self) {}

    /// Plain load of a value, at any alignment.
    ///
    /// # Safety
    /// `addr` must be valid for `T`, hold a valid `T`, and nobody may write it at the same time.
    unsafe fn read<T: Copy>(&self, addr: u64) -> T;

    /// Plain store of a value, at any alignment.
    ///
    /// # Safety
    /// `addr` must be valid for `T`, and nobody may access it at the same time.
    unsafe fn write<T: Copy>(&self, addr: u64, value: T);

    /// Plain copy of `bytes` bytes between ranges that do not overlap, or are the same.
    ///
    /// # Safety
    /// Both ranges must be valid; nobody may write the source or access the destination meanwhile.
    unsafe fn copy(&self, dst: u64, src: u64, bytes: u64);

    /// [`copy`](Self::copy) of data that will not be looked at soon: may go past the caches. Later
    /// releases cover it only after [`fence_streaming`](Self::fence_streaming).
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn copy_streaming(&self, dst: u64, src: u64, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.copy(dst, src, bytes) }
    }

    /// Orders streaming copies before what comes later.
    fn fence_streaming(&self) {}
}

/// The host's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw;

/// Words, where the compiler's own atomics keep order and scope.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! words_by_atomics {
    () => {
        #[inline(always)]
        unsafe fn load(&self, addr: u64) -> u64 {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.load(Ordering::Relaxed)
        }

        #[inline(always)]
        unsafe fn load_acquire(&self, addr: u64) -> u64 {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.load(Ordering::Acquire)
        }

        #[inline(always)]
        unsafe fn store(&self, addr: u64, value: u64) {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.store(value, Ordering::Relaxed);
        }

        #[inline(always)]
        unsafe fn store_release(&self, addr: u64, value: u64) {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.store(value, Ordering::Release);
        }

        #[inline(always)]
        unsafe fn add(&self, addr: u64, value: u64) {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.fetch_add(value, Ordering::Relaxed);
        }

        #[inline(always)]
        unsafe fn add_release(&self, addr: u64, value: u64) {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.fetch_add(value, Ordering::Release);
        }

        #[inline(always)]
        unsafe fn fetch_add(&self, addr: u64, value: u64) -> u64 {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.fetch_add(value, Ordering::AcqRel)
        }

        #[inline(always)]
        unsafe fn raise(&self, addr: u64, value: u64) {
            // SAFETY: the caller's promise.
            unsafe { word(addr) }.fetch_max(value, Ordering::Relaxed);
        }

        #[inline(always)]
        fn fence(&self) {
            fence(Ordering::AcqRel);
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
pub(crate) mod atomics {
    use core::sync::atomic::AtomicU64;

    #[cfg(target_arch = "amdgpu")]
    pub(crate) use words_by_atomics;

    /// # Safety
    /// `addr` must be valid and 8-byte aligned for as long as the reference is used.
    #[inline(always)]
    pub(crate) unsafe fn word<'a>(addr: u64) -> &'a AtomicU64 {
        debug_assert!(addr.is_multiple_of(8), "unaligned word");
        // SAFETY: the caller's promise; every access to such words is atomic.
        unsafe { AtomicU64::from_ptr(addr as *mut u64) }
    }
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    use core::sync::atomic::{Ordering, fence};

    use super::atomics::word;
    use super::{Memory, Raw};

    /// Copies of a MiB and more go past the caches on some processors (`rep movsb`, to which the C library's copy comes
    /// down; Zen 4), which takes up to three times as long where the data fits into them, and half as long where it
    /// does not: so the former are made of pieces. Figures in `docs/performance.md`.
    const PIECE: u64 = 512 << 10;
    const CACHED_MAX: u64 = 4 << 20;

    impl Memory for Raw {
        words_by_atomics!();

        #[inline(always)]
        fn fence_relaxed_wait(&self) {
            fence(Ordering::Acquire);
        }

        #[inline(always)]
        unsafe fn read<T: Copy>(&self, addr: u64) -> T {
            // SAFETY: the caller's promise.
            unsafe { (addr as *const T).read_unaligned() }
        }

        #[inline(always)]
        unsafe fn write<T: Copy>(&self, addr: u64, value: T) {
            // SAFETY: the caller's promise.
            unsafe { (addr as *mut T).write_unaligned(value) }
        }

        #[inline(always)]
        unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) {
            if dst == src {
                return;
            }
            let piece = if bytes > CACHED_MAX { bytes } else { PIECE };
            let mut done = 0;
            while done < bytes {
                let part = piece.min(bytes - done);
                // SAFETY: the caller's promise; the ranges do not overlap.
                unsafe {
                    let (from, to) = ((src + done) as *const u8, (dst + done) as *mut u8);
                    core::ptr::copy_nonoverlapping(from, to, part as usize);
                }
                done += part;
            }
        }

        // Aligned 8-byte parts of a vector access are single-copy atomic on every x86-64 machine, and
        // relaxed is what every x86 access at least is. Volatile, so that each stays one access.
        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn load_pair(&self, addr: u64) -> [u64; 2] {
            use core::arch::x86_64::__m128i;
            debug_assert!(addr.is_multiple_of(16), "unaligned pair");
            // SAFETY: the caller's promise; both are 16 bytes of plain data.
            unsafe { core::mem::transmute((addr as *const __m128i).read_volatile()) }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn store_pair(&self, addr: u64, words: [u64; 2]) {
            use core::arch::x86_64::__m128i;
            debug_assert!(addr.is_multiple_of(16), "unaligned pair");
            // SAFETY: as above.
            unsafe {
                (addr as *mut __m128i)
                    .write_volatile(core::mem::transmute::<[u64; 2], __m128i>(words));
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        fn prefetch(&self, addr: u64, bytes: u64, write: bool) {
            use core::arch::asm;
            const LINE: u64 = 64;
            let mut line = addr & !(LINE - 1);
            while line < addr + bytes {
                // SAFETY: a prefetch is a hint: it accesses no memory that the program could see
                // and never faults. `prefetchw` has no intrinsic in stable Rust; machines that do not
                // know it take it as a no-op in 64-bit mode.
                unsafe {
                    if write {
                        asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags));
                    } else {
                        asm!("prefetcht0 [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                }
                line += LINE;
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline]
        unsafe fn copy_streaming(&self, dst: u64, src: u64, bytes: u64) {
            use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            const WIDTH: u64 = size_of::<__m128i>() as u64;
            let head = dst.wrapping_neg() % WIDTH;
            let head = if head < bytes { head } else { bytes };
            let mut done = head;
            // SAFETY: the caller's promise; each store is aligned, because `dst + head` is, and the
            // unaligned ends are copied plainly.
            unsafe {
                self.copy(dst, src, head);
                while done + WIDTH <= bytes {
                    let value = _mm_loadu_si128((src + done) as *const __m128i);
                    _mm_stream_si128((dst + done) as *mut __m128i, value);
                    done += WIDTH;
                }
                self.copy(dst + done, src + done, bytes - done);
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline]
        fn fence_streaming(&self) {
            // SAFETY: every x86-64 machine has SSE.
            unsafe { core::arch::x86_64::_mm_sfence() };
        }
    }
}
