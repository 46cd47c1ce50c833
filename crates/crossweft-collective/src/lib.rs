//! Collectives: algorithms as plans, the choice between them, and the calls people make.
//!
//! * [`Communicator`]: a rank's handle on the job; makes memory and prepares collectives.
//! * [`PreparedCollective`]: ready to be called; picks an algorithm for each size and says why.
//! * [`Exchange`]: sends and receives of any pattern, and collectives with blocks of any size.
//! * [`Algorithm`]: the algorithms, each a plan for any number of ranks.
//! * [`Selection`]: what is chosen from: the [`Registry`] with the user's plans, and the [`TuningTable`] of this machine.
//! * [`Explanation`]: what a size takes, and why not something else.
//! * [`tune()`]: measures the candidates, and keeps what it found.
//! * [`run_in_threads`]: a whole job inside one process; [`run_plan_in_threads`]: one plan, once.
//! * [`Heap`]: ranges of symmetric memory, handed out alike on all ranks.
//! * [`Devices`]: which device each rank computes on.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod algorithm;
mod candidate;
mod choose;
mod collective;
mod communicator;
mod devices;
mod error;
mod exchange;
mod explain;
mod fingerprint;
mod heap;
mod one_hop;
mod registry;
mod rms_norm;
mod selection;
mod selector;
mod shipped;
mod switch_algorithms;
mod table;
mod threads;
mod tuner;

pub use algorithm::Algorithm;
pub use candidate::{
    Candidate, Constraints, DeviceKind, Refusal, Request, UserPlan, collective_named, collectives,
};
pub use collective::{AllReduce, AllReduceOptions, CollectiveOptions, Memory, PreparedCollective};
pub use communicator::{Communicator, CommunicatorOptions, SymmetricBuffer};
pub use crossweft_device::{DataType, ReduceOp};
pub use crossweft_executor::{ExchangeError, OneSided, Region, Scalar, Schedule};
pub use crossweft_plan::Collective;
pub use devices::Devices;
pub use error::{CollectiveError, SelectorDifference};
pub use exchange::{Blocks, Calls, Counts, Exchange, ExchangeOptions, Group, Input, Output};
pub use explain::{Explained, Explanation, Verdict};
pub use fingerprint::Fingerprint;
pub use heap::Heap;
pub use registry::{PLANS_VARIABLE, Registry, RegistryError};
pub use rms_norm::{AllReduceRmsNorm, GROUP, Quantised, RmsNormCall, RmsNormOptions, Scales};
pub use selection::{DETERMINISTIC_VARIABLE, Selection, TUNING_VARIABLE};
pub use selector::{Choice, Place, Selector};
pub use table::{Measured, Measurements, Row, TableError, TuningTable};
pub use threads::{run_in_threads, run_in_threads_on, run_plan_in_threads};
pub use tuner::{Progress, TuneOptions, Tuned, tune};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
