//! What runs inside a kernel: packets, semaphores, channels, the fifo, the reduction leaves and the
//! plan executor's op loop.
//!
//! One source, several machines. The same functions are compiled for the host (the CPU device, loom
//! and property tests) and for GPUs. They see their thread block through [`Block`], memory that
//! other ranks also touch through [`Memory`], and they never wait except through
//! [`wait::wait_for`], so that every wait ends by success, by abort or at its deadline.
//!
//! Rules, kept because a GPU compiler is the other reader of this text (see `ARCHITECTURE.md`):
//! no allocation; no panics, hence no slice indexing; read-modify-write operations only inside a
//! [`Memory`] implementation; no `&T` on memory that a peer writes; addresses are `u64`, because a
//! handle written by the host must mean the same to every machine.
//!
//! Start reading at [`executor`] (what a launch does), then [`semaphore`] and [`packet`] (the two
//! ways ranks synchronise).
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![cfg_attr(
    target_arch = "amdgpu",
    feature(
        abi_unadjusted,
        core_intrinsics,
        gpu_intrinsics,
        link_llvm_intrinsics,
        stdarch_amdgpu
    )
)]
#![cfg_attr(
    target_arch = "amdgpu",
    allow(
        internal_features,
        reason = "there is no other way to a wave's registers"
    )
)]
#![deny(missing_docs)]
#![warn(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

// Handles carry addresses as `u64`.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

pub mod block;
pub mod channel;
pub mod dtype;
pub mod element;
pub mod exchange;
pub mod executor;
pub mod extent;
pub mod fifo;
pub mod gpu;
pub mod memory;
pub mod moe;
pub mod norm;
pub mod packet;
pub mod program;
pub mod reduce;
pub mod scale;
pub mod semaphore;
pub mod wait;

pub use block::Block;
pub use dtype::{DataType, ReduceOp};
pub use memory::{Memory, Raw};
pub use wait::{Site, Stopped, WaitKind, Waiting};
