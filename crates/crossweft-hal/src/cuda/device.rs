//! Devices: what they are and can.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::Arc;

use super::driver::Driver;
use super::error::CudaError;
use super::sys::{self, CuDevice, DeviceAttribute, MulticastProperties, PeerAttribute};

/// A device, by the number that the driver gives it in this process.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<Driver>,
    ordinal: u32,
    handle: CuDevice,
}

/// What names a device whatever its number: the same in every process and, if no hardware changes,
/// after a reboot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            let dash = matches!(index, 4 | 6 | 8 | 10);
            write!(f, "{}{byte:02x}", if dash { "-" } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a device is and can.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Properties {
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// What names it whatever its number. A MIG instance has its own.
    pub uuid: Uuid,
    /// Its place on the bus, `0000:18:00.0`.
    pub pci: String,
    /// Compute capability, major and minor: (9, 0) for sm_90.
    pub compute: (u32, u32),
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Threads that one multiprocessor holds at a time.
    pub threads_per_multiprocessor: u32,
    /// Threads in a block at most.
    pub threads_per_block: u32,
    /// Bytes of shared memory that a block may ask for.
    pub shared_bytes_per_block: u32,
    /// Typical clock of the multiprocessors, in kHz; 0 if the driver does not say.
    pub clock_khz: u32,
    /// Peak clock of the memory, in kHz; 0 if the driver does not say.
    pub memory_clock_khz: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Whether a grid may be launched whose blocks are all resident.
    pub cooperative_launch: bool,
    /// Whether memory and address ranges can be managed apart, which sharing builds on.
    pub virtual_memory: bool,
    /// Whether memory can be shared by file descriptor, within the host.
    pub fd_handles: bool,
    /// Whether memory can be shared by fabric handle, across hosts of one NVLink domain. Permission
    /// is another matter: the IMEX service must run and its channel be visible.
    pub fabric_handles: bool,
    /// Whether shared memory can be made readable by network cards.
    pub rdma: bool,
    /// Whether atomics on host memory go over the link as such.
    pub host_native_atomics: bool,
    /// Whether the hardware has NVLink multicast. Whether it may be used: [`Driver::multicast`].
    pub multicast: bool,
}

/// What the driver says about one device's access to another's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerProperties {
    /// Whether loads and stores reach it.
    pub access: bool,
    /// Whether atomics do.
    pub native_atomics: bool,
    /// Relative performance of the link; lower is faster.
    pub performance_rank: u32,
}

impl Driver {
    /// Number of devices that this process sees.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn device_count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: a valid place for the answer.
        unsafe { self.cuDeviceGetCount(&raw mut count)? };
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The device of this number.
    ///
    /// # Errors
    /// [`CudaError::UnknownDevice`], [`CudaError::Call`].
    pub fn device(self: &Arc<Self>, ordinal: u32) -> Result<Device, CudaError> {
        let count = self.device_count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(CudaError::UnknownDevice { ordinal, count })?;
        let mut handle = 0;
        // SAFETY: a valid place for the answer.
        unsafe { self.cuDeviceGet(&raw mut handle, number) }
            .map_err(|error| error.on_device(ordinal))?;
        Ok(Device {
            driver: Arc::clone(self),
            ordinal,
            handle,
        })
    }

    /// All devices that this process sees, in the driver's order.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn devices(self: &Arc<Self>) -> Result<Vec<Device>, CudaError> {
        (0..self.device_count()?)
            .map(|ordinal| self.device(ordinal))
            .collect()
    }

    /// The device that is current on the calling thread; `None` if none is.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn current_device(self: &Arc<Self>) -> Result<Option<Device>, CudaError> {
        let mut handle = 0;
        // SAFETY: a valid place for the answer.
        match unsafe { self.cuCtxGetDevice(&raw mut handle) } {
            Ok(()) => {}
            Err(error) if error.is_code(sys::INVALID_CONTEXT) => return Ok(None),
            Err(error) => return Err(error),
        }
        // Handles have no number of their own to ask for.
        for device in self.devices()? {
            if device.handle == handle {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// The unit in which memory can be bound to a multicast object of so many devices, in bytes.
    ///
    /// # Errors
    /// [`CudaError::MulticastOff`] unless multicast is allowed, in which case no symbol of it is
    /// looked up; [`CudaError::Unsupported`], [`CudaError::Call`].
    pub fn multicast_granularity(&self, devices: u32, bytes: u64) -> Result<u64, CudaError> {
        let properties = MulticastProperties {
            devices,
            bytes: bytes as usize,
            handle_types: u64::from(super::sys::HANDLE_FD.unsigned_abs()),
            flags: 0,
        };
        let mut granularity = 0;
        // SAFETY: valid places for question and answer.
        unsafe {
            self.cuMulticastGetGranularity(
                &raw mut granularity,
                &raw const properties,
                super::sys::GRANULARITY_RECOMMENDED,
            )?;
        }
        Ok(granularity as u64)
    }
}

impl Device {
    /// The driver that it belongs to.
    #[must_use]
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Its number in this process, from 0.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(super) fn handle(&self) -> CuDevice {
        self.handle
    }

    /// Number of its multiprocessors.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn multiprocessors(&self) -> Result<u32, CudaError> {
        self.attribute(DeviceAttribute::Multiprocessors)
    }

    /// Its compute capability as one number, 90 of 9.0.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn sm(&self) -> Result<u32, CudaError> {
        let number = |attribute| self.attribute(attribute);
        let (major, minor) = (
            number(DeviceAttribute::ComputeMajor)?,
            number(DeviceAttribute::ComputeMinor)?,
        );
        Ok(major * 10 + minor)
    }

    /// What it is and can. Asks the driver each time, which has to ask the device for clocks: some milliseconds. Needs no
    /// context.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn properties(&self) -> Result<Properties, CudaError> {
        use DeviceAttribute as A;
        let number = |attribute| self.attribute(attribute);
        let flag = |attribute| Ok::<_, CudaError>(self.attribute_or_zero(attribute)? != 0);
        Ok(Properties {
            name: self.text(256, |text, length| {
                // SAFETY: a buffer of that length.
                unsafe { self.driver.cuDeviceGetName(text, length, self.handle) }
            })?,
            uuid: self.uuid()?,
            pci: self.text(32, |text, length| {
                // SAFETY: a buffer of that length.
                unsafe { self.driver.cuDeviceGetPCIBusId(text, length, self.handle) }
            })?,
            compute: (number(A::ComputeMajor)?, number(A::ComputeMinor)?),
            memory_bytes: self.memory_bytes()?,
            multiprocessors: number(A::Multiprocessors)?,
            threads_per_multiprocessor: number(A::MaxThreadsPerMultiprocessor)?,
            threads_per_block: number(A::MaxThreadsPerBlock)?,
            shared_bytes_per_block: number(A::MaxSharedBytesPerBlock)?,
            clock_khz: self.attribute_or_zero(A::ClockRate)?,
            memory_clock_khz: self.attribute_or_zero(A::MemoryClockRate)?,
            copy_engines: number(A::AsyncEngines)?,
            cooperative_launch: flag(A::CooperativeLaunch)?,
            virtual_memory: flag(A::VirtualMemory)?,
            fd_handles: flag(A::PosixFd)?,
            fabric_handles: flag(A::Fabric)?,
            rdma: flag(A::RdmaWithVirtualMemory)?,
            host_native_atomics: flag(A::HostNativeAtomics)?,
            multicast: flag(A::Multicast)?,
        })
    }

    /// What names it whatever its number.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn uuid(&self) -> Result<Uuid, CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: a valid place for the answer.
        let asked = unsafe { self.driver.cuDeviceGetUuid_v2(&raw mut uuid, self.handle) };
        asked.map_err(|error| self.named(error))?;
        Ok(Uuid(uuid))
    }

    /// What the driver says about this device's access to `peer`'s memory; whether that is true,
    /// [`probe_peers`](super::probe_peers) finds out. A device has access to itself.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn peer(&self, peer: &Self) -> Result<PeerProperties, CudaError> {
        if self.handle == peer.handle {
            return Ok(PeerProperties {
                access: true,
                native_atomics: true,
                performance_rank: 0,
            });
        }
        let mut can = 0;
        // SAFETY: a valid place for the answer.
        let asked = unsafe {
            let (own, other) = (self.handle, peer.handle);
            self.driver.cuDeviceCanAccessPeer(&raw mut can, own, other)
        };
        asked.map_err(|error| self.named(error))?;
        let attribute = |attribute| {
            let mut value = 0;
            let (own, other) = (self.handle, peer.handle);
            // SAFETY: a valid place for the answer.
            let asked = unsafe {
                self.driver
                    .cuDeviceGetP2PAttribute(&raw mut value, attribute, own, other)
            };
            asked.map_err(|error| self.named(error))?;
            Ok::<_, CudaError>(u32::try_from(value).unwrap_or(0))
        };
        Ok(PeerProperties {
            access: can != 0 && attribute(PeerAttribute::Access)? != 0,
            native_atomics: attribute(PeerAttribute::NativeAtomics)? != 0,
            performance_rank: attribute(PeerAttribute::PerformanceRank)?,
        })
    }

    fn memory_bytes(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: a valid place for the answer.
        let asked = unsafe { self.driver.cuDeviceTotalMem_v2(&raw mut bytes, self.handle) };
        asked.map_err(|error| self.named(error))?;
        Ok(bytes as u64)
    }

    pub(super) fn attribute(&self, attribute: DeviceAttribute) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: a valid place for the answer.
        let asked = unsafe {
            self.driver
                .cuDeviceGetAttribute(&raw mut value, attribute, self.handle)
        };
        asked.map_err(|error| self.named(error))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Older drivers do not know newer attributes, and newer ones may drop a clock: both are 0.
    pub(super) fn attribute_or_zero(&self, attribute: DeviceAttribute) -> Result<u32, CudaError> {
        match self.attribute(attribute) {
            Err(error)
                if error.is_code(super::sys::INVALID_VALUE)
                    || error.is_code(super::sys::NOT_SUPPORTED) =>
            {
                Ok(0)
            }
            other => other,
        }
    }

    fn text(
        &self,
        bytes: u16,
        ask: impl FnOnce(*mut c_char, c_int) -> Result<(), CudaError>,
    ) -> Result<String, CudaError> {
        let mut text = vec![0_u8; usize::from(bytes)];
        ask(text.as_mut_ptr().cast(), c_int::from(bytes)).map_err(|error| self.named(error))?;
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    pub(super) fn named(&self, error: CudaError) -> CudaError {
        error.on_device(self.ordinal)
    }
}
