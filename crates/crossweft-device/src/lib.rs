//! What runs inside a kernel.
#![no_std]
#![deny(missing_docs)]

pub mod dtype;

pub use dtype::{DataType, ReduceOp};
