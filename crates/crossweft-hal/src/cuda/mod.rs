//! CUDA devices, with nothing but the driver.
//!
//! `libcuda.so.1` is loaded at run time ([`Driver::open`]); a machine without it gets an error that
//! says so, and a driver that lacks a function is used for the rest. From the driver come
//! [`Device`]s, from a device its primary [`Context`], and from that everything else: [`Stream`]s,
//! [`Event`]s and [`Graph`]s, [`Module`]s and [`Kernel`]s, memory that other processes can map
//! ([`DeviceMemory`]), pinned host memory ([`PinnedMemory`]) and other people's memory
//! ([`ForeignMemory`]). What holds something keeps it alive, and dropping the last holder frees it.
//!
//! Calls may be made from any thread and leave its current context as it was. Every wait has a
//! deadline. Addresses and raw stream handles are `u64`; no type of the driver is public.
//!
//! **prepare, then execute**: loading modules and kernels, allocating, pinning and sharing belong to
//! preparing. Launches, copies on a stream, events and graph launches do none of that and can be
//! captured.
#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes and addresses have 64 bits here and in the driver (asserted in `sys`)"
)]

mod cache;
mod context;
mod copy;
mod detect;
mod device;
mod driver;
mod error;
mod foreign;
mod graph;
mod library;
mod memory;
mod module;
mod multicast;
mod pinned;
mod probe;
mod stream;
mod sys;

pub use cache::Cache;
pub use context::Context;
pub use detect::{Detection, Feature, detect, detect_with};
pub use device::{Device, PeerProperties, Properties, Uuid};
pub use driver::{Driver, Version};
pub use error::CudaError;
pub use foreign::{ForeignExport, ForeignMemory, PointerInfo, PointerKind, PrivateMemory};
pub use graph::{Capture, Graph, GraphExec};
pub use memory::{DeviceMemory, MemoryOptions, ShareHandle};
pub use module::{Argument, Attributes, CompileOptions, Kernel, Module, Shape};
pub use multicast::Multicast;
pub use pinned::PinnedMemory;
pub use probe::{CopyKernel, PeerMatrix, Reach, probe_peers};
pub use stream::{Event, Stream};
