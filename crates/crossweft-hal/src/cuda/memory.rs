//! Device memory that can be shared: allocation and address range apart (the driver's virtual
//! memory management), handed to other processes as a file descriptor or a fabric handle.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::context::Context;
use super::device::Device;
use super::error::CudaError;
use super::sys::{
    self, AccessDescription, AllocationProperties, CuMemory, DeviceAttribute, Location, Opaque64,
};

/// What names an allocation to another process of the host.
#[derive(Debug)]
#[non_exhaustive]
pub enum ShareHandle {
    /// A file descriptor, to be passed over a Unix socket.
    Fd(OwnedFd),
    /// 64 bytes, valid in one NVLink domain, also on other hosts of it.
    Fabric([u8; 64]),
    /// 64 bytes, valid in other processes of the host; of memory from `cuMemAlloc` (`cudaMalloc`).
    LegacyIpc([u8; 64]),
}

/// What is asked for beside bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryOptions<'a> {
    /// Further devices of this process that reach the memory.
    pub peers: &'a [Device],
    /// Whether it should have a fabric handle beside a file descriptor. If that is not permitted
    /// it has none; [`DeviceMemory::has_fabric_handle`] tells.
    pub fabric: bool,
    /// Whether it is set to zero. Otherwise it holds anything.
    pub zeroed: bool,
}

/// Memory on a device, mapped in this process: its own, or another process's.
///
/// Kernels reach it by [`address`](Self::address). It is unmapped when dropped; the memory itself
/// is freed when all processes have unmapped it. No kernel or copy may be using it then.
#[derive(Debug)]
pub struct DeviceMemory {
    // In the order of dropping: unmapped, then released.
    range: Range,
    allocation: Allocation,
    has_fabric_handle: bool,
}

impl DeviceMemory {
    /// Allocates at least `bytes` bytes on the context's device. Blocks for about 0.1 ms, more to
    /// zero large memory.
    ///
    /// # Errors
    /// [`CudaError::Incapable`] if the device cannot share memory, [`CudaError::OutOfMemory`],
    /// [`CudaError::Call`].
    pub fn allocate(
        context: &Arc<Context>,
        bytes: u64,
        options: &MemoryOptions<'_>,
    ) -> Result<Self, CudaError> {
        let device = context.device();
        if device.attribute(DeviceAttribute::VirtualMemory)? == 0
            || device.attribute(DeviceAttribute::PosixFd)? == 0
        {
            return Err(CudaError::Incapable {
                device: device.ordinal(),
                what: "allocate memory that other processes can map",
                reason: "it lacks virtual memory management or file descriptors for it".to_owned(),
            });
        }
        let wanted = properties(device, options.fabric)?;
        let (allocation, has_fabric_handle) = match Allocation::create(context, bytes, &wanted) {
            Ok(allocation) => (allocation, wanted.handle_types & sys::HANDLE_FABRIC != 0),
            // Without the fabric's service, asking for its handles is forbidden.
            Err(error)
                if wanted.handle_types & sys::HANDLE_FABRIC != 0
                    && (error.is_code(sys::NOT_PERMITTED) || error.is_code(sys::NOT_SUPPORTED)) =>
            {
                tracing::debug!(%error, "memory has no fabric handle");
                let wanted = properties(device, false)?;
                (Allocation::create(context, bytes, &wanted)?, false)
            }
            Err(error) => return Err(error),
        };
        let memory = Self::map(allocation, options.peers, has_fabric_handle)?;
        if options.zeroed {
            // SAFETY: the whole of memory that nobody else knows yet.
            unsafe { context.fill(memory.address(), 0, memory.bytes())? };
        }
        Ok(memory)
    }

    /// Maps memory of another process (or this one's, once more), of which `handle` came from
    /// [`export_fd`](Self::export_fd) or [`export_fabric`](Self::export_fabric) and `bytes` is its
    /// [`bytes`](Self::bytes). The context's device and `peers` reach it.
    ///
    /// # Errors
    /// [`CudaError::NotShareable`] if the handle and `bytes` are not of one such memory;
    /// [`CudaError::Call`].
    pub fn import(
        context: &Arc<Context>,
        handle: ShareHandle,
        bytes: u64,
        peers: &[Device],
    ) -> Result<Self, CudaError> {
        let allocation = Allocation::import(context, handle, bytes)?;
        Self::map(allocation, peers, false)
    }

    /// Maps the same memory once more, for an owner of its own. Both can be exported if this one can.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn again(&self) -> Result<Self, CudaError> {
        let allocation = Allocation::at(self.context(), self.address(), self.bytes())?;
        Self::map(allocation, &[], self.has_fabric_handle)
    }

    fn map(
        allocation: Allocation,
        peers: &[Device],
        has_fabric_handle: bool,
    ) -> Result<Self, CudaError> {
        let mut range = Range::reserve(&allocation.context, allocation.bytes)?;
        range.map(&allocation)?;
        range.allow(peers)?;
        Ok(Self {
            range,
            allocation,
            has_fabric_handle,
        })
    }

    /// Address of the first byte, for kernels and copies; a multiple of 2 MiB.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.range.address
    }

    /// Size in bytes: what was asked for, rounded up to the unit of the device (2 MiB).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.bytes
    }

    /// The context that it is mapped for.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.range.context
    }

    /// Whether [`export_fabric`](Self::export_fabric) is possible.
    #[must_use]
    pub fn has_fabric_handle(&self) -> bool {
        self.has_fabric_handle
    }

    /// Lets further devices of this process reach it.
    ///
    /// # Errors
    /// [`CudaError::Call`] if one cannot.
    pub fn allow(&self, peers: &[Device]) -> Result<(), CudaError> {
        self.range.allow(peers)
    }

    /// Lets all devices of this process reach it that the driver says can: then it is also copied while another device is current,
    /// and by another's kernels. Devices that the driver says cannot are left out.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn allow_all(&self) -> Result<(), CudaError> {
        let own = self.context().device();
        let mut peers = Vec::new();
        for peer in own.driver().devices()? {
            if peer.ordinal() != own.ordinal() && peer.peer(own)?.access {
                peers.push(peer);
            }
        }
        match peers.is_empty() {
            true => Ok(()),
            false => self.allow(&peers),
        }
    }

    /// A descriptor that lets its holder map this memory. Close it whenever you like.
    ///
    /// # Errors
    /// [`CudaError::Call`], [`CudaError::Io`].
    pub fn export_fd(&self) -> Result<OwnedFd, CudaError> {
        self.allocation.export_fd()
    }

    /// 64 bytes that let processes of the same NVLink domain map this memory.
    ///
    /// # Errors
    /// [`CudaError::NotShareable`] if it was not allocated with that; [`CudaError::Call`].
    pub fn export_fabric(&self) -> Result<[u8; 64], CudaError> {
        if !self.has_fabric_handle {
            return Err(CudaError::NotShareable {
                address: self.address(),
                what: "exported",
                reason: "it has no fabric handle: allocate it with one, on a device and with a \
                         service (IMEX) that allow it; or pass a file descriptor"
                    .to_owned(),
            });
        }
        self.allocation.export_fabric()
    }

    /// Copies `data` to `offset`, ordered with no stream. Blocks.
    ///
    /// # Errors
    /// [`CudaError::OutOfRange`], and as for [`Context::write`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), CudaError> {
        let to = self.part(offset, data.len() as u64)?;
        // SAFETY: within this memory; whoever else uses it reads or finds torn bytes, not more.
        unsafe { self.context().write(to, data) }
    }

    /// Copies bytes from `offset` into `data`, ordered with no stream. Blocks.
    ///
    /// # Errors
    /// [`CudaError::OutOfRange`], and as for [`Context::read`].
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), CudaError> {
        let from = self.part(offset, data.len() as u64)?;
        // SAFETY: as in `write`.
        unsafe { self.context().read(from, data) }
    }

    /// Sets `bytes` bytes from `offset`, ordered with no stream. Blocks.
    ///
    /// # Errors
    /// [`CudaError::OutOfRange`], and as for [`Context::fill`].
    pub fn fill(&self, offset: u64, value: u8, bytes: u64) -> Result<(), CudaError> {
        let to = self.part(offset, bytes)?;
        // SAFETY: as in `write`.
        unsafe { self.context().fill(to, value, bytes) }
    }

    fn part(&self, offset: u64, bytes: u64) -> Result<u64, CudaError> {
        let size = self.bytes();
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > size) {
            return Err(CudaError::OutOfRange {
                offset,
                bytes,
                size,
            });
        }
        Ok(self.address() + offset)
    }
}

fn properties(device: &Device, fabric: bool) -> Result<AllocationProperties, CudaError> {
    let has = |attribute| Ok::<_, CudaError>(device.attribute_or_zero(attribute)? != 0);
    let fabric = fabric && has(DeviceAttribute::Fabric)?;
    Ok(AllocationProperties {
        kind: sys::ALLOCATION_PINNED,
        handle_types: sys::HANDLE_FD | if fabric { sys::HANDLE_FABRIC } else { 0 },
        location: location(device),
        win32: std::ptr::null_mut(),
        compression: 0,
        rdma: u8::from(has(DeviceAttribute::RdmaWithVirtualMemory)?),
        usage: 0,
        reserved: [0; 4],
    })
}

fn location(device: &Device) -> Location {
    Location {
        kind: sys::LOCATION_DEVICE,
        id: device.handle(),
    }
}

/// A reference to physical memory.
#[derive(Debug)]
pub(super) struct Allocation {
    context: Arc<Context>,
    raw: CuMemory,
    pub(super) bytes: u64,
}

impl Allocation {
    fn create(
        context: &Arc<Context>,
        bytes: u64,
        properties: &AllocationProperties,
    ) -> Result<Self, CudaError> {
        let mut raw = 0;
        let bytes = context.run(|driver| {
            let mut unit = 0;
            let option = sys::GRANULARITY_RECOMMENDED;
            // SAFETY: valid places for question and answer.
            unsafe { driver.cuMemGetAllocationGranularity(&raw mut unit, properties, option)? };
            let rounded = bytes.max(1).checked_next_multiple_of(unit.max(1) as u64);
            let rounded = rounded.ok_or(CudaError::OutOfMemory {
                call: "cuMemCreate",
                device: None,
                bytes: Some(bytes),
            })?;
            // SAFETY: as above.
            unsafe { driver.cuMemCreate(&raw mut raw, rounded as usize, properties, 0) }
                .map_err(|error| error.asking_for(rounded))?;
            Ok(rounded)
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            bytes,
        })
    }

    pub(super) fn import(
        context: &Arc<Context>,
        handle: ShareHandle,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let mut raw = 0;
        context.run(|driver| match &handle {
            ShareHandle::Fd(fd) => {
                // A descriptor is passed as if it were a pointer. It is never negative.
                let number = fd.as_raw_fd().cast_unsigned() as usize;
                let number = std::ptr::without_provenance_mut(number);
                // SAFETY: a valid place for the answer; the descriptor is open.
                unsafe {
                    driver.cuMemImportFromShareableHandle(&raw mut raw, number, sys::HANDLE_FD)
                }
            }
            ShareHandle::Fabric(bytes) => {
                let mut bytes = Opaque64(*bytes);
                let place = (&raw mut bytes).cast();
                // SAFETY: valid places for handle and answer.
                unsafe {
                    driver.cuMemImportFromShareableHandle(&raw mut raw, place, sys::HANDLE_FABRIC)
                }
            }
            ShareHandle::LegacyIpc(_) => Err(CudaError::NotShareable {
                address: 0,
                what: "imported",
                reason: "a legacy IPC handle is of somebody else's memory: use ForeignMemory"
                    .to_owned(),
            }),
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            bytes,
        })
    }

    /// The memory that is mapped at `address`, whoever mapped it.
    pub(super) fn at(context: &Arc<Context>, address: u64, bytes: u64) -> Result<Self, CudaError> {
        let mut raw = 0;
        context.run(|driver| {
            let address = std::ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: a valid place for the answer; the driver knows whether the address is one.
            unsafe { driver.cuMemRetainAllocationHandle(&raw mut raw, address) }
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            bytes,
        })
    }

    /// The kinds of handles that it was allocated with.
    pub(super) fn handle_types(&self) -> Result<c_int, CudaError> {
        let mut properties = properties(self.context.device(), false)?;
        self.context.run(|driver| {
            let place = &raw mut properties;
            // SAFETY: a valid place for the answer; the allocation lives.
            unsafe { driver.cuMemGetAllocationPropertiesFromHandle(place, self.raw) }
        })?;
        Ok(properties.handle_types)
    }

    pub(super) fn export_fd(&self) -> Result<OwnedFd, CudaError> {
        let mut fd: c_int = -1;
        self.export(sys::HANDLE_FD, (&raw mut fd).cast())?;
        if fd < 0 {
            return Err(CudaError::Io {
                doing: "exporting memory as a file descriptor",
                source: io::ErrorKind::InvalidData.into(),
            });
        }
        // SAFETY: the driver opened it for us alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Programs that this process starts must not hold the memory.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|error| {
            CudaError::Io {
                doing: "setting a descriptor to close on exec",
                source: error.into(),
            }
        })?;
        Ok(fd)
    }

    pub(super) fn export_fabric(&self) -> Result<[u8; 64], CudaError> {
        let mut handle = Opaque64([0; 64]);
        self.export(sys::HANDLE_FABRIC, (&raw mut handle).cast())?;
        Ok(handle.0)
    }

    fn export(&self, kind: c_int, place: *mut std::ffi::c_void) -> Result<(), CudaError> {
        let exported = self.context.run(|driver| {
            // SAFETY: the place is as large as this kind of handle; the allocation lives.
            unsafe { driver.cuMemExportToShareableHandle(place, self.raw, kind, 0) }
        });
        exported.map_err(|error| match error {
            // All that the driver says of memory that came from somebody else.
            error if error.is_code(sys::INVALID_VALUE) => CudaError::NotShareable {
                address: 0,
                what: "exported",
                reason: format!("only who allocated it can do that ({error})"),
            },
            error => error,
        })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.release("memory", |driver| {
            // SAFETY: a reference of ours; mappings have references of their own.
            unsafe { driver.cuMemRelease(self.raw) }
        });
    }
}

/// A range of addresses and what is mapped into it, from its start without gaps.
#[derive(Debug)]
pub(super) struct Range {
    context: Arc<Context>,
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Sizes of what is mapped so far.
    mapped: Vec<u64>,
}

impl Range {
    pub(super) fn reserve(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let mut address = 0;
        context
            .run(|driver| {
                // SAFETY: a valid place for the answer; no address is asked for.
                unsafe { driver.cuMemAddressReserve(&raw mut address, bytes as usize, 0, 0, 0) }
            })
            .map_err(|error| error.asking_for(bytes))?;
        Ok(Self {
            context: Arc::clone(context),
            address,
            bytes,
            mapped: Vec::new(),
        })
    }

    fn used(&self) -> u64 {
        self.mapped.iter().sum()
    }

    /// Maps an allocation behind what is mapped already. There must be room for it.
    pub(super) fn map(&mut self, allocation: &Allocation) -> Result<(), CudaError> {
        let address = self.address + self.used();
        let bytes = allocation.bytes;
        let mapped = self.context.run(|driver| {
            // SAFETY: addresses that are reserved and free; the driver checks the allocation's
            // size.
            unsafe { driver.cuMemMap(address, bytes as usize, 0, allocation.raw, 0) }
        });
        mapped.map_err(|error| match error {
            error if error.is_code(sys::INVALID_VALUE) => CudaError::NotShareable {
                address,
                what: "imported",
                reason: format!("it has not the {bytes} bytes that were announced ({error})"),
            },
            error => error,
        })?;
        self.mapped.push(bytes);
        Ok(())
    }

    /// Lets the own device and `peers` reach what is mapped.
    pub(super) fn allow(&self, peers: &[Device]) -> Result<(), CudaError> {
        let devices = std::iter::once(self.context.device()).chain(peers);
        let access: Vec<_> = devices
            .map(|device| AccessDescription {
                location: location(device),
                flags: sys::READ_WRITE,
            })
            .collect();
        let bytes = self.used() as usize;
        self.context.run(|driver| {
            // SAFETY: the mapped part of our own range, and as many descriptions as are counted.
            unsafe { driver.cuMemSetAccess(self.address, bytes, access.as_ptr(), access.len()) }
        })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        self.context.release("an address range", |driver| {
            let mut address = self.address;
            for &bytes in &self.mapped {
                // SAFETY: exactly what was mapped; owners see to it that nobody uses it.
                unsafe { driver.cuMemUnmap(address, bytes as usize)? };
                address += bytes;
            }
            // SAFETY: ours, and nothing is mapped there any more.
            unsafe { driver.cuMemAddressFree(self.address, self.bytes as usize) }
        });
    }
}
