//! What a forked process must leave to its parent: it has copies of objects, and none of the threads that they need.

use std::mem::forget;
use std::ops::Deref;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::error::Exception;

/// Something of the process that made it: only there is it dropped.
#[derive(Debug)]
pub(crate) struct Own<T> {
    it: Arc<T>,
    process: u32,
}

impl<T> Own<T> {
    pub(crate) fn new(it: T) -> Self {
        Self {
            it: Arc::new(it),
            process: std::process::id(),
        }
    }

    /// Whether this is another process, forked from that one.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Refuses to be used by another process.
    pub(crate) fn here(&self) -> PyResult<()> {
        match self.is_forked() {
            true => Err(Exception::usage(format!(
                "process {} has joined the communicator's job, and this one was only forked from it: start it by another way \
                 than fork, or make a communicator in it",
                self.process
            ))),
            false => Ok(()),
        }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.it
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.is_forked() {
            forget(Arc::clone(&self.it));
        }
    }
}
