//! A word to people where something takes long, while it does: Python's logger `crossweft`, at the level of warnings, which
//! shows on standard error unless a program says otherwise.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// What takes no longer is not worth a word.
const LONG: Duration = Duration::from_millis(500);
/// How often it is said again.
const AGAIN: Duration = Duration::from_secs(5);

/// Something under way, until this is dropped.
#[derive(Debug)]
pub(crate) struct Slow {
    /// Dropped first, which ends the thread.
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<bool>>,
    what: String,
    begun: Instant,
}

impl Slow {
    pub(crate) fn new(what: String) -> Self {
        let (alive, ended) = channel::<()>();
        let (said, begun) = (what.clone(), Instant::now());
        let watch = move || {
            let (mut wait, mut is_said) = (LONG, false);
            while ended.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                let seconds = begun.elapsed().as_secs_f64();
                tell(&match is_said {
                    false => format!(
                        "{said}: the driver compiles kernels that it has not kept from an earlier start"
                    ),
                    true => format!("{said}: {seconds:.0} s so far"),
                });
                (wait, is_said) = (AGAIN, true);
            }
            is_said
        };
        let thread = std::thread::Builder::new().name("crossweft slow".to_owned());
        Self {
            alive: Some(alive),
            // Without it nothing is said.
            thread: thread.spawn(watch).ok(),
            what,
            begun,
        }
    }
}

impl Slow {
    /// It has been done.
    pub(crate) fn done(mut self) {
        if self.stop() {
            let seconds = self.begun.elapsed().as_secs_f64();
            tell(&format!("{}: done after {seconds:.1} s", self.what));
        }
    }

    /// Ends the thread; whether it has said something.
    fn stop(&mut self) -> bool {
        self.alive = None;
        let Some(thread) = self.thread.take() else {
            return false;
        };
        // It may wait for the interpreter, to speak.
        let said = Python::try_attach(|py| py.detach(|| thread.join().unwrap_or(false)));
        said.unwrap_or(false)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Without an interpreter, or a logger that does, nobody is told.
fn tell(line: &str) {
    let told = Python::try_attach(|py| -> PyResult<()> {
        let logger = py
            .import("logging")?
            .call_method1("getLogger", ("crossweft",))?;
        logger.call_method1("warning", ("%s", line)).map(drop)
    });
    drop(told);
}
