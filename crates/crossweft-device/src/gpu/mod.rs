//! A GPU's side of the device traits: many threads a block, sixteen bytes a thread.
//!
//! Protocols are the same code as everywhere ([`crate::executor`], [`crate::semaphore`], ...). What
//! differs is here: how the threads of a block share a copy, packets and a reduction ([`copy`],
//! [`bulk`], [`packets`], [`lines`], [`reduce`], [`norm`](mod@norm), [`fused`]), how memory is reached, and how a wait spins and ends. All of it but
//! the last leaves, which are inline PTX, compiles for the host too and is tested there.

pub mod bulk;
pub mod copy;
pub mod fused;
mod launch;
pub mod lines;
pub mod moe;
pub mod norm;
pub mod packets;
pub mod reduce;
pub mod scale;
pub mod wide;

#[cfg(target_arch = "amdgpu")]
pub mod amdgpu;
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
pub mod block;
#[cfg(target_arch = "nvptx64")]
pub mod nvptx;

#[cfg(target_arch = "amdgpu")]
pub use amdgpu as machine;
#[cfg(target_arch = "nvptx64")]
pub use nvptx as machine;

/// Threads side by side that share a table; where a machine's warps are larger, there are several in one.
pub const WARP: u32 = 32;

pub use launch::{
    ECHO_WARMUP, EchoLaunch, ExchangeLaunch, GpuContext, Hop, MAX_CHAINS, MAX_FUSED, MAX_MESSAGES,
    MAX_MOVES, Message, MessagesLaunch, Norm, OneShot, OneShotLaunch, OneShotNorm, OneShotScatter,
    PlanLaunch, Quantisation, Scale, SignalLaunch, StatusRecord, TwoShot,
};
pub use reduce::{GpuReducer, MAX_OPERANDS, TABLE_BYTES};
