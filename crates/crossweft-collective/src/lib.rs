//! Collectives: algorithms as plans, the choice between them, and the calls people make.
//!
//! * [`Communicator`]: a rank's handle on the job; makes memory and prepares collectives.
//! * [`PreparedCollective`]: ready to be called; picks an algorithm for each size and says why.
//! * [`Exchange`]: sends and receives of any pattern, and collectives with blocks of any size.
//! * [`Algorithm`]: the algorithms, each a plan for any number of ranks.
//! * [`run_in_threads`]: a whole job inside one process; [`run_plan_in_threads`]: one plan, once.
//! * [`Devices`]: which device each rank computes on.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod algorithm;
mod collective;
mod communicator;
mod devices;
mod error;
mod exchange;
mod one_hop;
mod rms_norm;
mod selector;
mod switch_algorithms;
mod threads;

pub use algorithm::Algorithm;
pub use collective::{AllReduce, AllReduceOptions, CollectiveOptions, Memory, PreparedCollective};
pub use communicator::{Communicator, CommunicatorOptions, SymmetricBuffer};
pub use crossweft_device::{DataType, ReduceOp};
pub use crossweft_executor::{ExchangeError, Scalar, Schedule};
pub use crossweft_plan::Collective;
pub use devices::Devices;
pub use error::CollectiveError;
pub use exchange::{Blocks, Exchange, ExchangeOptions, Group};
pub use rms_norm::{AllReduceRmsNorm, GROUP, Quantised, RmsNormCall, RmsNormOptions, Scales};
pub use selector::{Choice, Place, Selector};
pub use threads::{run_in_threads, run_in_threads_on, run_plan_in_threads};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
