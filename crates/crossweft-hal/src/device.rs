//! A device and its memory, whichever hal it is of, for layers that serve all of them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::HalError;
use crate::cpu::SharedMemory;
use crate::cuda::{Context, DeviceMemory, MemoryOptions, ShareHandle};

/// Where a rank computes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Device {
    /// The host's processors.
    #[default]
    Cpu,
    /// A CUDA device, in its primary context.
    Cuda(Arc<Context>),
}

impl Device {
    /// The word for it on command lines and in messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) => "cuda",
        }
    }

    /// Allocates at least `bytes` bytes of zeroed memory that other ranks of the host can map.
    ///
    /// # Errors
    /// [`HalError::Allocate`], [`HalError::Cuda`].
    pub fn allocate(&self, bytes: u64) -> Result<Memory, HalError> {
        match self {
            Self::Cpu => SharedMemory::create(bytes).map(Memory::Cpu),
            Self::Cuda(context) => {
                let options = MemoryOptions {
                    zeroed: true,
                    ..MemoryOptions::default()
                };
                let memory = DeviceMemory::allocate(context, bytes, &options)?;
                Ok(Memory::Cuda(memory))
            }
        }
    }

    /// Maps memory of `bytes` bytes that another rank, on a device of the same kind, exported.
    ///
    /// # Errors
    /// [`HalError::Import`], [`HalError::Cuda`].
    pub fn import(&self, fd: OwnedFd, bytes: u64) -> Result<Memory, HalError> {
        match self {
            Self::Cpu => SharedMemory::import(fd, bytes).map(Memory::Cpu),
            Self::Cuda(context) => {
                let memory = DeviceMemory::import(context, ShareHandle::Fd(fd), bytes, &[])?;
                Ok(Memory::Cuda(memory))
            }
        }
    }
}

/// Memory on a device, mapped for this rank.
#[derive(Debug)]
#[non_exhaustive]
pub enum Memory {
    /// Host memory.
    Cpu(SharedMemory),
    /// Memory of a CUDA device.
    Cuda(DeviceMemory),
}

impl Memory {
    /// Address of the first byte, for device code.
    #[must_use]
    pub fn addr(&self) -> u64 {
        match self {
            Self::Cpu(memory) => memory.addr(),
            Self::Cuda(memory) => memory.address(),
        }
    }

    /// Size in bytes: what was asked for, rounded up to the device's unit.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Cpu(memory) => memory.bytes(),
            Self::Cuda(memory) => memory.bytes(),
        }
    }

    /// A descriptor by which other ranks of the host can [import](Device::import) it.
    ///
    /// # Errors
    /// [`HalError::Resource`], [`HalError::Cuda`].
    pub fn export(&self) -> Result<OwnedFd, HalError> {
        match self {
            Self::Cpu(memory) => {
                let closed = || io::Error::other("it has been closed");
                let fd = memory.fd().ok_or_else(closed);
                fd.and_then(|fd| fd.try_clone_to_owned())
                    .map_err(|source| HalError::Resource {
                        what: "a descriptor of shared memory".to_owned(),
                        source,
                    })
            }
            Self::Cuda(memory) => Ok(memory.export_fd()?),
        }
    }

    /// Closes what it can be exported by, if that is a descriptor: a process may have only so many.
    pub fn close_descriptor(&mut self) {
        match self {
            Self::Cpu(memory) => memory.close_descriptor(),
            Self::Cuda(_) => {}
        }
    }

    /// Copies `data` to `offset`. Blocks until it is there. The bytes are meaningful to others after
    /// a signal or barrier.
    ///
    /// # Errors
    /// [`HalError::OutOfRange`], [`HalError::Cuda`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), HalError> {
        match self {
            Self::Cpu(memory) => memory.write(offset, data),
            Self::Cuda(memory) => Ok(memory.write(offset, data)?),
        }
    }

    /// Copies bytes from `offset` into `data`. Blocks until they are there.
    ///
    /// # Errors
    /// [`HalError::OutOfRange`], [`HalError::Cuda`].
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), HalError> {
        match self {
            Self::Cpu(memory) => memory.read(offset, data),
            Self::Cuda(memory) => Ok(memory.read(offset, data)?),
        }
    }
}

impl From<SharedMemory> for Memory {
    fn from(memory: SharedMemory) -> Self {
        Self::Cpu(memory)
    }
}

impl From<DeviceMemory> for Memory {
    fn from(memory: DeviceMemory) -> Self {
        Self::Cuda(memory)
    }
}
