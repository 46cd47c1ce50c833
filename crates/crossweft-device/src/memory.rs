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

    /// Acquire-release fence.
    fn fence(&self);

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

    /// Zeroes `bytes` bytes.
    ///
    /// # Safety
    /// As for [`write`](Self::write), over the whole range.
    unsafe fn zero(&self, addr: u64, bytes: u64);
}

/// The host's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod host {
    use core::sync::atomic::{AtomicU64, Ordering, fence};

    use super::{Memory, Raw};

    /// # Safety
    /// `addr` must be valid and 8-byte aligned for as long as the reference is used.
    unsafe fn word<'a>(addr: u64) -> &'a AtomicU64 {
        debug_assert!(addr.is_multiple_of(8), "unaligned word");
        // SAFETY: the caller's promise; every access to such words is atomic.
        unsafe { AtomicU64::from_ptr(addr as *mut u64) }
    }

    impl Memory for Raw {
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
        fn fence(&self) {
            fence(Ordering::AcqRel);
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
            // SAFETY: the caller's promise; the ranges do not overlap.
            unsafe {
                core::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, bytes as usize);
            }
        }

        #[inline(always)]
        unsafe fn zero(&self, addr: u64, bytes: u64) {
            // SAFETY: the caller's promise.
            unsafe { core::ptr::write_bytes(addr as *mut u8, 0, bytes as usize) }
        }
    }
}
