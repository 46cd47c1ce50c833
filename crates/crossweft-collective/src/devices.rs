//! Which device each rank of a host computes on.

use crossweft_hal::cuda::{self, CudaError};
use crossweft_hal::{Device, HalError};

/// The devices that the ranks of this host compute on.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Devices {
    /// Each on the host's processors.
    Cpu,
    /// In turn on these.
    Cuda(Vec<cuda::Device>),
}

impl Devices {
    /// All CUDA devices of the host; ranks beyond their number share them.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver, or no device.
    pub fn cuda() -> Result<Self, CudaError> {
        let driver = cuda::Driver::open()?;
        match driver.devices()? {
            none if none.is_empty() => Err(CudaError::NoDevice {
                driver: driver.version(),
            }),
            devices => Ok(Self::Cuda(devices)),
        }
    }

    /// One CUDA device, by its number, for every rank that asks: groups of ranks need not begin at the first device.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver, or no such device.
    pub fn cuda_device(ordinal: u32) -> Result<Self, CudaError> {
        Ok(Self::Cuda(vec![cuda::Driver::open()?.device(ordinal)?]))
    }

    /// CUDA devices if there is one for each of `ranks` ranks of this host, else its processors.
    #[must_use]
    pub fn best(ranks: u32) -> Self {
        // Ranks of one process have their streams on hardware queues of their own: with fewer queues
        // than ranks, one kernel would wait behind another that waits for it.
        match Self::cuda() {
            Ok(Self::Cuda(devices)) if devices.len() >= ranks as usize => Self::Cuda(devices),
            _ => Self::Cpu,
        }
    }

    /// The device of the rank that is the `local`-th of this host.
    ///
    /// # Errors
    /// [`HalError::Cuda`] if its context cannot be had.
    pub fn of(&self, local: u32) -> Result<Device, HalError> {
        match self {
            Self::Cuda(devices) if !devices.is_empty() => {
                let device = &devices[local as usize % devices.len()];
                Ok(Device::Cuda(cuda::Context::retain(device)?))
            }
            _ => Ok(Device::Cpu),
        }
    }
}
