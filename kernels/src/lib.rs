//! Kernel entry points: one module of PTX for each data type, one more of exchanges for each, some for what all types have in
//! common, and two for tests and measurements. `cargo xtask kernels` compiles this crate once for each,
//! with `--cfg module="..."` and, for what several modules have, `--cfg family="..."`.
#![no_std]
#![feature(abi_gpu_kernel)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![allow(
    improper_gpu_kernel_arg,
    reason = "structures by value, whose layout the host's side knows"
)]

#[cfg(any(
    family = "exchange",
    family = "fused",
    family = "moe_lines",
    family = "norm"
))]
#[macro_use]
#[allow(unused_macros, reason = "some modules of a family have no use for it")]
mod parameter;

#[cfg(family = "bench")]
mod bench;
#[cfg(family = "channel")]
mod channel;
#[cfg(family = "exchange")]
mod exchange;
#[cfg(any(family = "fused", family = "norm"))]
#[macro_use]
mod fused;
#[cfg(family = "moe")]
mod moe;
#[cfg(family = "moe_lines")]
mod moe_lines;
#[cfg(family = "norm")]
mod norm;
#[cfg(family = "plan")]
mod plan;
#[cfg(family = "scale")]
mod scale;
#[cfg(not(family = "scale"))]
#[allow(
    dead_code,
    unused_imports,
    reason = "each module of PTX uses some of it"
)]
mod shared;
