//! What a communicator computes on: the CUDA device that is current on the thread that makes it, as NCCL has it, or the
//! host's processors where the program has said that its pointers are the host's.

use crossweft_hal::Device;
use crossweft_hal::cuda::{self, CudaError, Driver, PointerKind};

use crate::settings::{self, Processor};
use crate::status::Error;
use crate::table;

/// What a communicator computes on.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) device: Device,
    /// The number that the program knows it by, if it gave one.
    pub(crate) number: Option<i32>,
}

impl Place {
    /// The calling thread's; on the host there is but one.
    pub(crate) fn current() -> Result<Self, Error> {
        Self::of(None)
    }

    /// The program's `number`-th; on the host that is only a name.
    pub(crate) fn numbered(number: i32) -> Result<Self, Error> {
        Self::of(Some(number))
    }

    fn of(number: Option<i32>) -> Result<Self, Error> {
        let processor = settings::processor()?;
        let device = match processor {
            Processor::Cpu => Device::Cpu,
            Processor::Cuda | Processor::Auto => match cuda(number) {
                Ok(device) => device,
                Err(
                    CudaError::NoDriver { .. }
                    | CudaError::NoDevice { .. }
                    | CudaError::TooOld { .. },
                ) if processor == Processor::Auto => Device::Cpu,
                Err(error) => return Err(unusable(&error)),
            },
        };
        Ok(Self { device, number })
    }

    /// The same device, for a communicator that is made of another.
    pub(crate) fn inherited(&self) -> Self {
        Self {
            device: self.device.clone(),
            number: None,
        }
    }
}

/// Refuses a buffer that a GPU does not reach. What is pinned, managed, or another device's, it does, as far as the
/// driver lets it.
pub(crate) fn check_buffer(device: &Device, range: &std::ops::Range<u64>) -> Result<(), Error> {
    let Device::Cuda(context) = device else {
        return Ok(());
    };
    if range.is_empty() || context.pointer_info(range.start)?.kind != PointerKind::Unknown {
        return Ok(());
    }
    Err(Error::argument(format!(
        "the buffer at {:#x} is no memory that device {} knows: pass device memory, or set CROSSWEFT_DEVICE=cpu if all \
         pointers are the host's",
        range.start,
        context.ordinal()
    )))
}

fn unusable(error: &CudaError) -> Error {
    let text = format!(
        "no GPU can be used: {error}; set CROSSWEFT_DEVICE=cpu if the program's pointers are the host's"
    );
    match error {
        CudaError::NoDriver { .. } | CudaError::NoDevice { .. } | CudaError::TooOld { .. } => {
            Error::usage(text)
        }
        CudaError::UnknownDevice { .. } => Error::argument(text),
        _ => Error::cuda(text),
    }
}

/// The device of a number, or the one that is current on this thread; the first if none is, as CUDA's runtime has it.
fn cuda(number: Option<i32>) -> Result<Device, CudaError> {
    let driver = Driver::open()?;
    let device = match number {
        // No device has a number so large.
        Some(number) => driver.device(u32::try_from(number).unwrap_or(u32::MAX))?,
        None => match driver.current_device()? {
            Some(device) => device,
            None => driver.device(0)?,
        },
    };
    table::context(&device, || cuda::Context::retain(&device)).map(Device::Cuda)
}
