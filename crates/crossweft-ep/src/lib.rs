//! The C interface of NCCL EP (API 2, version 0.2.0), on crossweft: `libcrossweft_ep.so`, whose loader name is
//! `libnccl_ep.so.0`. What it offers and what it does not: `docs/moe.md`.
//!
//! The modules, from the outside inwards:
//!
//! * `abi`: the exported functions. They turn what C passes into checked values and errors into result codes; nothing
//!   unwinds through them.
//! * `pointer`: what C passes, as types; with `abi` and `nccl`, the only `unsafe` of this crate.
//! * `config`: the structures that C passes, and what their fields may be; `tensor`: those that describe memory.
//! * `group`, `pass`: what `ncclEpGroup_t` and `ncclEpHandle_t` stand for; `tally`: how much will come, before tokens do.
//! * `nccl`: the communicator, through the library that made it: a group only asks it who is there, and tells all ranks
//!   by it where to meet.
//! * `table`: what handles stand for; `status`: result codes and the words behind them; `settings`: the environment.
//!
//! All memory is the host's so far: a program says so with `CROSSWEFT_DEVICE=cpu`.
#![deny(missing_docs, unsafe_code)]

mod abi;
mod config;
mod group;
mod nccl;
mod pass;
mod pointer;
mod settings;
mod status;
mod table;
mod tally;
mod tensor;
