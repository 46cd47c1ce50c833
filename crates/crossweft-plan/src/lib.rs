//! Communication plans: what every thread block of every rank does, as data.
//!
//! A [`Plan`] is symbolic in the message's size: it names chunks, not bytes, and the same plan runs
//! any size, with tails ([`crossweft_device::extent`]). It says which reduce operation it is for
//! (or that it fits any) and which packets it sends. It is pure data: this crate touches no device.
//!
//! * [`plan`]: the representation.
//! * [`dsl`]: the language that algorithms are written in: programs, compiled to checked plans.
//! * [`builder`]: plans operation by operation, as the built-in algorithms are made.
//! * [`validate`]: structural checks; a plan from [`Builder::finish`] or [`Plan::from_json`] has
//!   passed them.
//! * [`mod@check`]: whether a plan computes what it says, whatever the schedule.
//! * [`cost`]: how long a plan takes, and what it waits for.
//! * [`show`]: a plan as a page.
//! * [`json`]: the file format.
//! * [`mscclpp`]: execution plans of MSCCL++, read and written.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

// So that files that tests of several crates share find it.
#[cfg(test)]
extern crate self as crossweft_plan;

pub mod builder;
pub mod check;
mod collective;
pub mod cost;
mod cuts;
pub mod dsl;
pub mod json;
pub mod mscclpp;
mod numbers;
mod place;
pub mod plan;
pub mod show;
pub mod validate;

pub use builder::Builder;
pub use plan::{
    Buffer, Channel, ChannelKind, Chunks, Collective, Content, InPlace, InputBlock, Op, Operand,
    Plan, RankProgram, Switch,
};
pub use validate::PlanError;
