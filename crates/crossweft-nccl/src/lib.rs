//! The C interface of NCCL 2.32, on crossweft: `libcrossweft_nccl.so`, whose loader name is
//! `libnccl.so.2`. What it offers and what it does not: `docs/nccl.md`.
//!
//! The modules, from the outside inwards:
//!
//! * `abi`: the exported functions, `nccl*` and `pnccl*`. They turn what C passes into checked values and
//!   errors into result codes; nothing unwinds through them.
//! * `pointer`: what C passes, as types; with `abi`, `lane` and `library`, the only `unsafe` of this crate.
//! * `group`: `ncclGroupStart` to `ncclGroupEnd`, and running what was gathered.
//! * `comm`: a communicator and the states it goes through; `derive` makes one of another.
//! * `engine`: the prepared collectives of a communicator, grown as calls need; `call` has the rules of each; `notes` is
//!   what other ranks can see of it.
//! * `lane`: what a communicator has on a GPU: the order of its launches, and who looks after them; `devices` says which GPU.
//! * `window`: memory of `ncclMemAlloc`, and windows on it.
//! * `delegate`: what another library with the same interface does instead, `library`.
//! * `table`: what handles stand for; `config`, `params`: settings; `status`: result codes.
//!
//! Pointers are a GPU's and calls in the order of its streams, or (`CROSSWEFT_DEVICE=cpu`) pointers are the host's and
//! calls complete when they return.
#![deny(missing_docs, unsafe_code)]

mod abi;
mod call;
mod comm;
mod config;
mod delegate;
mod derive;
mod devices;
mod engine;
mod failure;
mod group;
mod lane;
mod library;
mod notes;
mod params;
mod pointer;
mod settings;
mod simulate;
mod status;
mod table;
mod window;

pub use status::Status;
