//! Kernel entry points. One module of PTX for each data type, and one for tests and measurements:
//! `cargo xtask kernels` compiles this crate once for each, with `--cfg module="..."`.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch)]

#[cfg(module = "bench")]
mod bench;
#[cfg(not(module = "bench"))]
mod fused;
#[cfg(not(module = "bench"))]
mod plan;
mod shared;
