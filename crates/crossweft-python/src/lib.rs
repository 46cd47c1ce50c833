//! The Python module `crossweft._crossweft`: a thin, typed face over the crates below.
//!
//! Nothing is decided here. Each module turns Python's objects into the crates' own and back:
//!
//! * `plan`: plans, reports of the checker;
//! * `language`: programs, recorded with the line of the caller;
//! * `communicator`: communicators, unique ids, prepared plans;
//! * `rms_norm`: all-reduces with what follows them in a transformer;
//! * `exchange`: messages between pairs of ranks, collectives with blocks of any size;
//! * `moe`: mixtures of experts;
//! * `own`: what a forked process leaves to its parent;
//! * `pool`: symmetric memory for torch's allocator;
//! * `tensor`: memory of other libraries (`dlpack`, `buffer`);
//! * `error`: exceptions, whose classes are `crossweft.errors`;
//! * `slow`: a word where something takes long;
//! * `wait`: waits that leave the interpreter to others and end at a signal;
//! * `watch`: kernels that wait are ended when the job has failed.
//!
//! Types that people see are documented in the package's own `.pyi` files.
#![deny(missing_docs)]

use pyo3::prelude::*;

mod buffer;
mod communicator;
mod dlpack;
mod error;
mod exchange;
mod language;
mod moe;
mod moe_cuda;
mod own;
mod plan;
mod pool;
mod rms_norm;
mod slow;
mod tensor;
mod wait;
mod watch;

/// The module.
#[pymodule]
mod _crossweft {
    #[pymodule_export]
    use super::communicator::{Communicator, PreparedPlan, UniqueId};
    #[pymodule_export]
    use super::exchange::MessageGroup;
    #[pymodule_export]
    use super::language::{Channel, Chunk, Memory, Program, Semaphore, Switch, caller_of_package};
    #[pymodule_export]
    use super::moe::{MoeCounts, MoeGroup, MoeHandle};
    #[pymodule_export]
    use super::plan::{Diagnostic, Plan, Report};
    #[pymodule_export]
    use super::tensor::describe;

    #[pymodule_init]
    fn init(module: &super::Bound<'_, super::PyModule>) -> super::PyResult<()> {
        use pyo3::types::PyModuleMethods;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
