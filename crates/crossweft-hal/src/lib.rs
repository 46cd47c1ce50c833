//! Hardware: memory that can be shared, streams, loading and launching.
//!
//! A hal loads and launches; it knows no executor, no plan and no collective. There is one so far,
//! the CPU device ([`cpu`]): memory is memfd, a thread block is a coroutine, a stream runs inline or
//! on a worker thread. Everything here may use `crossweft-device` and nothing else of the project.
//!
//! Start reading at [`cpu::Grid`], which runs thread blocks.
#![deny(missing_docs)]
#![warn(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]

pub mod cpu;
mod error;

pub use error::HalError;
