//! The executor: prepares a plan for a job and launches it.
//!
//! [`Prepared::prepare`] is collective: it agrees with the other ranks on what is prepared,
//! allocates and exchanges scratch memory and semaphores, and lays the plan out as the flat tables
//! that device code reads ([`crossweft_device::program`]). Launching is local: it allocates nothing
//! and talks to nobody but through channels.
//!
//! [`Staged`] takes buffers anywhere, through registered memory where the plan asks for it.
//!
//! [`Exchange`] is for messages between pairs of ranks that no plan knows beforehand; [`OneSided`] for what needs
//! no call of the peer; [`Primitives`] for measuring
//! what all of them rest on.
//!
//! [`compile`] has what a GPU runs compiled beforehand.
//!
//! `unsafe` is confined to the modules `launch` and `exchange`, which hand tables to the device code, `cuda` and
//! `staged` and `norm`, which do so on a GPU, `one_sided`, `pre_multiply`,
//! `primitives`, and `turn`.
#![deny(missing_docs, unsafe_code)]

mod common;
mod cuda;
mod error;
mod exchange;
mod fused;
mod kernels;
mod launch;
mod norm;
mod one_sided;
mod pre_multiply;
mod prepared;
mod primitives;
mod staged;
mod tables;
mod turn;

pub use crossweft_hal::cpu::{Schedule, Stream};
pub use cuda::{Recorded, Replay, Together};
pub use error::ExecutorError;
pub use exchange::{
    Destination, Exchange, ExchangeError, ExchangeOptions, Kind, Messages, Purpose, Region, Source,
};
pub use fused::{LINES_FROM, fused_form, has_lines};
pub use kernels::compile;
pub use launch::RawBuffers;
pub use norm::{Behind, NormBuffers, NormScales, RecordedNorm, ReplayNorm, TokenNorm, Tokens};
pub use one_sided::OneSided;
pub use pre_multiply::Scalar;
pub use prepared::{Buffers, Options, Prepared};
pub use primitives::{Echo, MOST, MOST_PACKETS, Mover, Primitives};
pub use staged::{Stage, Staged};
