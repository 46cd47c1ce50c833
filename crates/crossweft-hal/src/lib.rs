//! Hardware: memory that can be shared, streams, loading and launching.
//!
//! A hal loads and launches; it knows no executor, no plan and no collective. There are two:
//!
//! * [`cpu`]: memory is memfd, a thread block is a coroutine, a stream runs inline or on a worker
//!   thread. Start reading at [`cpu::Grid`], which runs thread blocks.
//! * [`cuda`]: NVIDIA devices by their driver, loaded at run time. Start reading at
//!   [`cuda::Driver`].
//!
//! Everything here may use `crossweft-device` and nothing else of the project.
#![deny(missing_docs)]
#![warn(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]

pub mod cpu;
pub mod cuda;
mod device;
mod error;

pub use device::{Device, Memory};
pub use error::HalError;
