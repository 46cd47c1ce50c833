//! Communication plans: what every thread block of every rank does, as data.
//!
//! A [`Plan`] is symbolic in the message's size: it names chunks, not bytes, and the same plan runs
//! any size, with tails ([`crossweft_device::extent`]). It says which reduce operation it is for
//! (or that it fits any) and which packets it sends. It is pure data: this crate touches no device.
//!
//! * [`plan`]: the representation.
//! * [`builder`]: how algorithms are written.
//! * [`validate`]: structural checks; a plan from [`Builder::finish`] or [`Plan::from_json`] has
//!   passed them.
//! * [`mod@check`]: whether a plan computes what it says, whatever the schedule.
//! * [`cost`]: how long a plan takes, and what it waits for.
//! * [`show`]: a plan as a page.
//! * [`json`]: the file format.
//! * [`mscclpp`]: execution plans of MSCCL++, read and written.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod builder;
pub mod check;
pub mod cost;
pub mod json;
pub mod mscclpp;
pub mod plan;
pub mod show;
pub mod validate;

pub use builder::Builder;
pub use plan::{
    Buffer, Channel, ChannelKind, Chunks, Collective, InPlace, Op, Operand, Plan, RankProgram,
    Switch,
};
pub use validate::PlanError;
