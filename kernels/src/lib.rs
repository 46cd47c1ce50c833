//! Kernel entry points. One module of PTX for each data type, one for moves, one for pre-multiplication, and one for tests and measurements:
//! `cargo xtask kernels` compiles this crate once for each, with `--cfg module="..."`.
#![no_std]
#![feature(abi_gpu_kernel)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![allow(
    improper_gpu_kernel_arg,
    reason = "structures by value, whose layout the host's side knows"
)]

#[cfg(module = "bench")]
mod bench;
#[cfg(not(any(module = "bench", module = "scale")))]
mod fused;
#[cfg(not(any(module = "bench", module = "hop", module = "scale")))]
mod plan;
#[cfg(module = "scale")]
mod scale;
#[cfg(not(module = "scale"))]
mod shared;
