//! Memory that other processes can map: memfd, sealed against resizing.
//!
//! There is no name in any file system, so no size limit of /dev/shm applies and nothing is left
//! behind by a crash. Only raw copies touch it here; references to it are never made, because other
//! processes may write at any time.
#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes fit an address, which has 64 bits (checked in crossweft-device)"
)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::available_memory;
use crate::HalError;

/// A mapped range of shared memory. Zeroed when created; unmapped when dropped, while other
/// mappings of it live on.
#[derive(Debug)]
pub struct SharedMemory {
    /// Until it is closed.
    fd: Option<OwnedFd>,
    base: NonNull<u8>,
    bytes: u64,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only touched by raw copies.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

/// From how many bytes on it is asked whether they are there, which takes some tens of microseconds.
const LARGE: u64 = 16 << 20;

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

impl SharedMemory {
    /// Allocates at least `bytes` bytes of zeroed memory, present in RAM when this returns. What is more than there is [left](
    /// crate::cpu::available_memory) is refused: the kernel would end this process, or another one.
    ///
    /// # Errors
    /// [`HalError::Allocate`].
    pub fn create(bytes: u64) -> Result<Self, HalError> {
        let failed = |call| {
            move |source: rustix::io::Errno| HalError::Allocate {
                bytes,
                call,
                source: source.into(),
            }
        };
        let page = rustix::param::page_size() as u64;
        let rounded = bytes.max(1).checked_next_multiple_of(page);
        let bytes = rounded
            .ok_or(rustix::io::Errno::NOMEM)
            .map_err(failed("mmap"))?;
        if bytes >= LARGE
            && let Some(left) = available_memory().filter(|left| *left < bytes)
        {
            let reason = format!("{left} bytes are left");
            return Err(HalError::Allocate {
                bytes,
                call: "memfd_create",
                source: io::Error::new(io::ErrorKind::OutOfMemory, reason),
            });
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("crossweft", flags).map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Self::map(fd, bytes).map_err(failed("mmap"))
    }

    /// Maps memory that another process created with [`create`](Self::create).
    ///
    /// # Errors
    /// [`HalError::Import`] if it is smaller than `bytes`, or could shrink while mapped.
    pub fn import(fd: OwnedFd, bytes: u64) -> Result<Self, HalError> {
        let import = |reason: String| HalError::Import { reason };
        let stat = rustix::fs::fstat(&fd).map_err(|e| import(format!("fstat: {e}")))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if bytes == 0 || size < bytes {
            return Err(import(format!(
                "{bytes} bytes were announced, it has {size}"
            )));
        }
        // A peer that shrinks mapped memory would make this process die of SIGBUS.
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| import(format!("not a sealed memfd: {e}")))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(import("it is not sealed against shrinking".to_owned()));
        }
        // What was announced, however large the peer has made the file.
        Self::map(fd, bytes).map_err(|e| import(format!("mmap: {e}")))
    }

    fn map(fd: OwnedFd, bytes: u64) -> Result<Self, rustix::io::Errno> {
        let length = usize::try_from(bytes).map_err(|_| rustix::io::Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice; nothing existing changes.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                &fd,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        let fd = Some(fd);
        Ok(Self { fd, base, bytes })
    }

    /// Address of the first byte, page-aligned, in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Size in bytes, a multiple of the page size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The descriptor to hand to other processes; none once it is closed.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(OwnedFd::as_fd)
    }

    /// Closes the descriptor, of which a process may have only so many. Mappings stay.
    pub fn close_descriptor(&mut self) {
        self.fd = None;
    }

    fn range(&self, offset: u64, bytes: usize) -> Result<*mut u8, HalError> {
        let end = offset.checked_add(bytes as u64);
        if end.is_none_or(|end| end > self.bytes) {
            return Err(HalError::OutOfRange {
                offset,
                bytes: bytes as u64,
                size: self.bytes,
            });
        }
        Ok(self.base.as_ptr().wrapping_add(offset as usize))
    }

    /// Copies `data` to `offset`. The bytes are meaningful to others after a signal or barrier.
    ///
    /// # Errors
    /// [`HalError::OutOfRange`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), HalError> {
        let to = self.range(offset, data.len())?;
        // SAFETY: the range was checked; `data` is a borrowed slice and cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    /// Copies bytes from `offset` into `data`.
    ///
    /// # Errors
    /// [`HalError::OutOfRange`].
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), HalError> {
        let from = self.range(offset, data.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    /// Writes one word, relaxed. For control words, which are only ever accessed as words.
    ///
    /// # Errors
    /// [`HalError::OutOfRange`], also for an `offset` that is not a multiple of 8.
    pub fn store_word(&self, offset: u64, value: u64) -> Result<(), HalError> {
        let to = self.range(offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(HalError::OutOfRange {
                offset,
                bytes: 8,
                size: self.bytes,
            });
        }
        // SAFETY: in range and aligned (the base is page-aligned).
        unsafe { std::sync::atomic::AtomicU64::from_ptr(to.cast()) }
            .store(value, std::sync::atomic::Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and ends here; addresses derived from it are not used after
        // their owner is gone (owners hold this value). An error leaves it mapped, no more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_are_one_memory() {
        let a = SharedMemory::create(10_000).unwrap();
        let b =
            SharedMemory::import(a.fd().unwrap().try_clone_to_owned().unwrap(), 10_000).unwrap();
        assert_eq!(a.bytes(), 12_288);
        a.write(9_000, b"hello").unwrap();
        let mut seen = [0; 5];
        b.read(9_000, &mut seen).unwrap();
        assert_eq!(&seen, b"hello");
        drop(a);
        b.read(9_000, &mut seen).unwrap();
        assert_eq!(&seen, b"hello", "a mapping outlives its creator's");
    }

    #[test]
    fn ranges_are_checked() {
        let a = SharedMemory::create(4096).unwrap();
        assert!(matches!(
            a.write(4095, &[0; 2]),
            Err(HalError::OutOfRange { .. })
        ));
        assert!(matches!(
            a.read(u64::MAX, &mut [0; 2]),
            Err(HalError::OutOfRange { .. })
        ));
        assert!(a.store_word(12, 1).is_err());
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let error = SharedMemory::import(fd, 4096).unwrap_err();
        assert!(error.to_string().contains("sealed"), "{error}");
        let a = SharedMemory::create(4096).unwrap();
        let fd = a.fd().unwrap().try_clone_to_owned().unwrap();
        assert!(SharedMemory::import(fd, 1 << 40).is_err());
    }

    #[test]
    fn more_than_there_can_be_is_refused() {
        // The last is no more than an address can have.
        for bytes in [u64::MAX, u64::MAX - 4095, 1 << 63, 1 << 46] {
            let error = SharedMemory::create(bytes).unwrap_err();
            assert!(matches!(error, HalError::Allocate { .. }), "{error}");
            assert!(error.to_string().contains(&bytes.to_string()), "{error}");
        }
    }
}
