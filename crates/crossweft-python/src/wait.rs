//! Waits that leave the interpreter to other threads, and end at a signal.
//!
//! Python handles signals on its main thread only, between its own instructions; so that thread asks now and
//! then while it waits (`Python::check_signals`). What a handler raises, as Ctrl-C does, ends the wait.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

/// How often signals are asked for.
const ASK_EVERY: Duration = Duration::from_millis(50);
/// What the other ranks hear.
const REASON: &str = "a signal interrupted it";

/// Whether this is the thread that handles signals.
fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// What a signal handler has raised during waits of one communicator.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals(Arc<Mutex<Option<PyErr>>>);

impl Signals {
    /// For the communicator to ask while a launch waits: why it should not, if so.
    pub(crate) fn ask(&self) -> Option<String> {
        if !is_main_thread() {
            return None;
        }
        // No interpreter, no signals: it is coming to its end.
        let error = Python::try_attach(|py| py.check_signals())?.err()?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        Some(REASON.to_owned())
    }

    /// What was raised, instead of the error that came of it.
    pub(crate) fn or(&self, error: PyErr) -> PyErr {
        let raised = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or(error)
    }
}

/// Does what may wait for another rank, where an object goes: that rank may be a thread of this process, which needs the
/// interpreter to come.
pub(crate) fn detached(work: impl Fn() + Send + Sync) {
    if Python::try_attach(|py| py.detach(&work)).is_none() {
        work();
    }
}

/// Does `work` without holding the interpreter. If a signal handler raises meanwhile, calls `end`, which must
/// make `work` end soon, and returns what was raised.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send,
    end: impl Fn(&str) + Sync,
) -> PyResult<T> {
    if !is_main_thread() {
        return Ok(py.detach(work));
    }
    std::thread::scope(|scope| {
        let (done, result) = sync_channel(1);
        scope.spawn(move || {
            // The receiver lives until this thread has ended.
            let _ = done.send(work());
        });
        let mut raised = None;
        // Nothing that blocks may hold the interpreter.
        let result = Mutex::new(result);
        loop {
            let next = || {
                let result = result.lock().unwrap_or_else(PoisonError::into_inner);
                result.recv_timeout(ASK_EVERY)
            };
            match py.detach(next) {
                Ok(value) => return raised.map_or(Ok(value), Err),
                Err(RecvTimeoutError::Disconnected) => {
                    let lost =
                        pyo3::exceptions::PyRuntimeError::new_err("a helper thread panicked");
                    return Err(raised.unwrap_or(lost));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if raised.is_none()
                        && let Err(error) = py.check_signals()
                    {
                        end(REASON);
                        raised = Some(error);
                    }
                }
            }
        }
    })
}
