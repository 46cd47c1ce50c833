//! Errors of the crates as exceptions of `crossweft.errors`.

use crossweft_channel::{ChannelError, StopCause};
use crossweft_collective::{CollectiveError, Communicator, ExchangeError};
use crossweft_executor::ExecutorError;
use crossweft_moe::MoeError;
use crossweft_net::{Failure, NetError};
use crossweft_plan::PlanError;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

/// An exception in the making: its class in `crossweft.errors`, and its fields.
pub(crate) struct Exception {
    class: &'static str,
    message: String,
    fields: Vec<(&'static str, Field)>,
}

/// A field's value.
enum Field {
    Number(u32),
    Numbers(Vec<u32>),
    Text(String),
}

impl Exception {
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        Self {
            class,
            message: message.into(),
            fields: Vec::new(),
        }
    }

    pub(crate) fn number(mut self, name: &'static str, value: u32) -> Self {
        self.fields.push((name, Field::Number(value)));
        self
    }

    fn numbers(mut self, name: &'static str, value: &[u32]) -> Self {
        self.fields.push((name, Field::Numbers(value.to_vec())));
        self
    }

    pub(crate) fn text(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, Field::Text(value.into())));
        self
    }

    /// A tensor that cannot be used.
    pub(crate) fn tensor(message: impl Into<String>) -> PyErr {
        Self::new("TensorError", message).into()
    }

    /// A call that makes no sense.
    pub(crate) fn usage(message: impl Into<String>) -> PyErr {
        Self::new("UsageError", message).into()
    }
}

/// The class of that name.
pub(crate) fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || {
        PyModule::import(py, "crossweft.errors").map(Bound::unbind)
    })?;
    module.bind(py).getattr(name)
}

impl From<Exception> for PyErr {
    fn from(exception: Exception) -> Self {
        Python::attach(|py| {
            let make = || -> PyResult<Self> {
                let fields = PyDict::new(py);
                for (name, value) in exception.fields {
                    let value = match value {
                        Field::Number(number) => number.into_py_any(py)?,
                        Field::Numbers(numbers) => numbers.into_py_any(py)?,
                        Field::Text(text) => text.into_py_any(py)?,
                    };
                    fields.set_item(name, value)?;
                }
                let error =
                    class(py, exception.class)?.call((exception.message,), Some(&fields))?;
                Ok(Self::from_value(error))
            };
            // What went wrong with telling is what there is to tell.
            make().unwrap_or_else(|error| error)
        })
    }
}

/// The exception for an error of a communicator's call.
pub(crate) fn of_call(error: &CollectiveError, communicator: Option<&Communicator>) -> PyErr {
    let failure = communicator.and_then(|c| c.endpoint().group().liveness().failure());
    collective(error, failure.as_ref()).into()
}

fn collective(error: &CollectiveError, failure: Option<&Failure>) -> Exception {
    let message = error.to_string();
    match error {
        CollectiveError::Net(source) => net(source),
        CollectiveError::Channel(source) => channel(source, message, failure),
        CollectiveError::Executor(source) => executor(source, message, failure),
        CollectiveError::Exchange(source) => exchange(source, message, failure),
        CollectiveError::Plan(source) => plan(source),
        CollectiveError::Hal(_) => Exception::new("DeviceError", message),
        CollectiveError::Usage { rank, .. } => {
            Exception::new("UsageError", message).number("rank", *rank)
        }
        CollectiveError::NeedsSymmetric { .. } => Exception::new("UsageError", message),
        CollectiveError::Registry(_) => Exception::new("PlanError", message),
        CollectiveError::SelectorsDiffer(difference) => {
            Exception::new("Mismatch", message).number("peer", difference.rank)
        }
        CollectiveError::PlansDiffer { has, .. } => {
            Exception::new("Mismatch", message).number("peer", *has)
        }
        CollectiveError::DeterminismDiffers { rank, .. } => {
            Exception::new("Mismatch", message).number("peer", *rank)
        }
        CollectiveError::Panicked { rank } => {
            Exception::new("Error", message).number("rank", *rank)
        }
        _ => Exception::new("Error", message),
    }
}

/// The exception for an unsound plan.
pub(crate) fn plan(error: &PlanError) -> Exception {
    let exception = Exception::new("PlanError", error.to_string());
    match error {
        PlanError::Plan { plan, .. } => exception.text("plan", plan),
        PlanError::Op {
            plan,
            rank,
            block,
            op,
            ..
        } => exception
            .text("plan", plan)
            .number("rank", *rank)
            .number("thread_block", *block)
            .number("op", *op),
        _ => exception,
    }
}

/// The exception for a failed bootstrap.
pub(crate) fn net(error: &NetError) -> Exception {
    let of = |class| Exception::new(class, error.to_string());
    match error {
        NetError::Aborted { by, .. } => of("Aborted").number("peer", *by),
        NetError::PeerDied { rank, .. } | NetError::PeerLeft { rank, .. } => {
            of("PeerLost").number("peer", *rank)
        }
        NetError::RootLost { .. } => of("PeerLost"),
        NetError::Timeout { missing, .. } | NetError::RanksMissing { missing, .. } => {
            of("Timeout").numbers("missing", missing)
        }
        NetError::NobodyJoined { .. } => of("Timeout"),
        NetError::Mismatch { rank, .. } => of("Mismatch").number("peer", *rank),
        NetError::Launch { .. } | NetError::NoUniqueId { .. } | NetError::IdFile { .. } => {
            of("LaunchError")
        }
        NetError::InvalidBind { .. }
        | NetError::InvalidRank { .. }
        | NetError::InvalidUniqueId { .. }
        | NetError::Closed { .. }
        | NetError::PayloadTooLarge { .. } => of("UsageError"),
        _ => of("Error"),
    }
}

fn channel(error: &ChannelError, message: String, failure: Option<&Failure>) -> Exception {
    match error {
        ChannelError::Bootstrap { source, .. } => Exception {
            message,
            ..net(source)
        },
        ChannelError::Mismatch { rank, .. } => {
            Exception::new("Mismatch", message).number("peer", *rank)
        }
        ChannelError::PeerFailed { rank, .. } => {
            Exception::new("Error", message).number("peer", *rank)
        }
        ChannelError::Memory { .. } => Exception::new("DeviceError", message),
        ChannelError::Stopped { rank, cause, .. } => {
            stopped(cause, message, failure).number("rank", *rank)
        }
        ChannelError::Disconnected { rank, peer, .. } => Exception::new("PeerLost", message)
            .number("rank", *rank)
            .number("peer", *peer),
        _ => Exception::new("Error", message),
    }
}

fn executor(error: &ExecutorError, message: String, failure: Option<&Failure>) -> Exception {
    match error {
        ExecutorError::Channel { source, plan } => {
            channel(source, message, failure).text("plan", plan)
        }
        ExecutorError::Hal { plan, .. } | ExecutorError::Residency { plan, .. } => {
            Exception::new("DeviceError", message).text("plan", plan)
        }
        ExecutorError::Device { plan, rank, .. } => Exception::new("DeviceError", message)
            .text("plan", plan)
            .number("rank", *rank),
        ExecutorError::Usage { plan, rank, .. } => Exception::new("UsageError", message)
            .text("plan", plan)
            .number("rank", *rank),
        ExecutorError::WorldSize { plan, .. }
        | ExecutorError::ReduceOp { plan, .. }
        | ExecutorError::NeedsRegistered { plan, .. }
        | ExecutorError::Operands { plan, .. }
        | ExecutorError::Scratch { plan, .. } => {
            Exception::new("UsageError", message).text("plan", plan)
        }
        ExecutorError::Poisoned { plan, rank } => Exception::new("Poisoned", message)
            .text("plan", plan)
            .number("rank", *rank),
        ExecutorError::Interrupted {
            plan,
            rank,
            block,
            op,
            cause,
            ..
        } => stopped(cause, message, failure)
            .text("plan", plan)
            .number("rank", *rank)
            .number("thread_block", *block)
            .text("op", op),
        _ => Exception::new("Error", message),
    }
}

fn exchange(error: &ExchangeError, message: String, failure: Option<&Failure>) -> Exception {
    match error {
        ExchangeError::Channel { source } => channel(source, message, failure),
        ExchangeError::Hal { .. } => Exception::new("DeviceError", message),
        ExchangeError::Usage { rank, .. } => {
            Exception::new("UsageError", message).number("rank", *rank)
        }
        ExchangeError::Mismatch { rank, peer, .. }
        | ExchangeError::PeerFailed { rank, peer, .. } => Exception::new("Mismatch", message)
            .number("rank", *rank)
            .number("peer", *peer),
        ExchangeError::PeerGaveUp { rank, peer, .. } => Exception::new("PeerLost", message)
            .number("rank", *rank)
            .number("peer", *peer),
        ExchangeError::Poisoned { rank } => {
            Exception::new("Poisoned", message).number("rank", *rank)
        }
        ExchangeError::Interrupted { rank, cause, .. } => {
            stopped(cause, message, failure).number("rank", *rank)
        }
        _ => Exception::new("Error", message),
    }
}

/// The exception for an error of a mixture of experts.
pub(crate) fn of_moe(error: &MoeError, communicator: &Communicator) -> PyErr {
    let failure = communicator.endpoint().group().liveness().failure();
    let message = error.to_string();
    let exception = match error {
        MoeError::Channel { source } => channel(source, message, failure.as_ref()),
        MoeError::Hal { .. } => Exception::new("DeviceError", message),
        MoeError::Usage { rank, .. } => Exception::new("UsageError", message).number("rank", *rank),
        MoeError::Capacity { rank, .. } => {
            Exception::new("CapacityError", message).number("rank", *rank)
        }
        MoeError::Mismatch { rank, peer, .. } => Exception::new("Mismatch", message)
            .number("rank", *rank)
            .number("peer", *peer),
        MoeError::Interrupted {
            rank, peers, cause, ..
        } => stopped(cause, message, failure.as_ref())
            .number("rank", *rank)
            .numbers("missing", peers),
        MoeError::Poisoned { rank, .. } => {
            Exception::new("Poisoned", message).number("rank", *rank)
        }
        _ => Exception::new("Error", message),
    };
    exception.into()
}

fn stopped(cause: &StopCause, message: String, failure: Option<&Failure>) -> Exception {
    match cause {
        StopCause::Deadline { .. } => Exception::new("Timeout", message),
        StopCause::PeerLeft { rank, .. } => {
            Exception::new("PeerLost", message).number("peer", *rank)
        }
        StopCause::Mismatch { rank, .. } => {
            Exception::new("Mismatch", message).number("peer", *rank)
        }
        StopCause::Poisoned => Exception::new("Poisoned", message),
        StopCause::Failure(_) => match failure {
            Some(Failure::Aborted { by, .. }) => {
                Exception::new("Aborted", message).number("peer", *by)
            }
            Some(Failure::PeerDied { rank, .. }) => {
                Exception::new("PeerLost", message).number("peer", *rank)
            }
            _ => Exception::new("PeerLost", message),
        },
        _ => Exception::new("Error", message),
    }
}
