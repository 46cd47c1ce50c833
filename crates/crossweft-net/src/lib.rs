//! The network of one job: how its ranks find each other, prove that they belong together, exchange
//! small data, hand file descriptors to neighbours on the same host, and notice when one is gone.
//!
//! What a job does with it, in order:
//!
//! 1. somebody starts a [`Rendezvous`] and passes its [`UniqueId`] (which holds a secret) to all ranks;
//!    [`launch::Job`] does so for the usual launchers;
//! 2. every rank calls [`Group::join`], proves the secret, and is connected to about `2 log2 n` others;
//! 3. [`Group::all_gather`], [`Group::barrier`] and [`Group::fetch_fd`] exchange what set-up needs;
//! 4. [`Liveness`] is asked by every spinning wait, so that a dead rank ends the waits of all others.
//!
//! The protocol is written without sockets, threads or clocks: [`auth`] (the proof), `frame` (the
//! bytes), `root` (who joined), `mesh` (the collective operations, and the spreading of bad news).
//! `rendezvous`, `join`, `group` and `fds` drive those machines with real sockets; a newcomer starts
//! reading at `mesh`. Bytes are drawn in `frame` and [`auth`]. This crate uses no other crossweft crate.
//!
//! Everything is bounded: every wait has a deadline, every frame and queue a limit. Nothing listens
//! beyond loopback unless a [`Bind`] says so. The proof keeps strangers out; the traffic itself is
//! neither encrypted nor signed, so the network between the hosts of a job must be trusted.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod auth;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod launch;

mod bind;
mod cancel;
mod complaint;
mod error;
mod fds;
mod frame;
mod group;
mod host;
mod id_exchange;
mod join;
mod link;
mod liveness;
mod mesh;
mod message;
mod poll;
mod rendezvous;
mod root;
mod unique_id;

pub use bind::Bind;
pub use cancel::Cancel;
pub use error::{NetError, Operation, RankList, TurnedAway};
pub use group::Group;
pub use join::JoinOptions;
pub use liveness::{Failure, Liveness, PeerState};
pub use rendezvous::{Rendezvous, RendezvousOptions};
pub use root::RefuseReason;
pub use unique_id::UniqueId;

/// The longest timeout, a hundred years: what is longer may not fit into an [`Instant`](std::time::Instant).
pub const LONGEST_TIMEOUT: std::time::Duration =
    std::time::Duration::from_secs(100 * 365 * 24 * 3600);
