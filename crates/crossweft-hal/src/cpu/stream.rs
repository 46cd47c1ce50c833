//! Streams: launches in order, inline on the caller's thread or on a worker.

use std::error::Error;
use std::fmt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::HalError;

/// Plain parameters of a launch.
pub type Arguments = [u64; 8];

/// An error of a launch, shared by all who ask the stream for it.
pub type KernelError = Arc<dyn Error + Send + Sync>;

/// Something that can be launched on a stream.
pub trait Kernel: Send + Sync {
    /// Runs it to its end.
    ///
    /// # Errors
    /// Whatever the kernel reports; a stream keeps the first and skips what follows.
    ///
    /// # Safety
    /// The arguments must be what the kernel takes; addresses among them must be valid until it
    /// has ended.
    unsafe fn launch(&self, arguments: &Arguments) -> Result<(), KernelError>;
}

/// An ordered queue of launches.
pub struct Stream {
    worker: Option<Worker>,
}

struct Worker {
    queue: Option<SyncSender<(Arc<dyn Kernel>, Arguments)>>,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    progress: Mutex<Progress>,
    done: Condvar,
}

#[derive(Default)]
struct Progress {
    submitted: u64,
    finished: u64,
    ended: bool,
    error: Option<KernelError>,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.worker.is_some() {
            "worker"
        } else {
            "inline"
        };
        f.debug_tuple("Stream").field(&kind).finish()
    }
}

/// Launches that may wait in a stream; further ones wait for space.
const QUEUE: usize = 1024;

impl Stream {
    /// A stream whose launches run on the calling thread and have ended when `launch` returns.
    #[must_use]
    pub const fn inline() -> Self {
        Self { worker: None }
    }

    /// A stream with a thread of its own; `launch` returns at once.
    ///
    /// # Errors
    /// [`HalError::Resource`] if no thread could be made.
    pub fn worker() -> Result<Self, HalError> {
        let (queue, launches) = sync_channel(QUEUE);
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let thread = std::thread::Builder::new()
            .name("crossweft-stream".to_owned())
            .spawn(move || run(&launches, &shared))
            .map_err(|source| HalError::Resource {
                what: "a stream's worker thread".to_owned(),
                source,
            })?;
        let worker = Worker {
            queue: Some(queue),
            state,
            thread: Some(thread),
        };
        Ok(Self {
            worker: Some(worker),
        })
    }

    /// Launches `kernel` after everything launched before. An inline stream blocks until it has
    /// ended; a worker stream only while its queue is full.
    ///
    /// # Errors
    /// The kernel's own error if inline; otherwise the first error of earlier launches, if there
    /// is one by now (this one is then not launched).
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    pub unsafe fn launch(
        &self,
        kernel: &Arc<impl Kernel + 'static>,
        arguments: &Arguments,
    ) -> Result<(), KernelError> {
        let Some(worker) = &self.worker else {
            // SAFETY: the caller's promise.
            return unsafe { kernel.launch(arguments) };
        };
        {
            let mut progress = worker.state.lock();
            if let Some(error) = &progress.error {
                return Err(Arc::clone(error));
            }
            progress.submitted += 1;
        }
        let launch = (Arc::clone(kernel) as Arc<dyn Kernel>, *arguments);
        match &worker.queue {
            Some(queue) => queue.send(launch).map_err(|_| ended()),
            None => Err(ended()),
        }
    }

    /// Blocks until everything launched so far has ended. Launches end by their own deadlines.
    ///
    /// # Errors
    /// The first error of any launch on this stream.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        let Some(worker) = &self.worker else {
            return Ok(());
        };
        let mut progress = worker.state.lock();
        while progress.finished < progress.submitted && !progress.ended {
            progress = worker
                .state
                .done
                .wait(progress)
                .unwrap_or_else(PoisonError::into_inner);
        }
        match &progress.error {
            Some(error) => Err(Arc::clone(error)),
            None if progress.finished < progress.submitted => Err(ended()),
            None => Ok(()),
        }
    }
}

fn ended() -> KernelError {
    Arc::new(HalError::StreamEnded)
}

fn run(launches: &Receiver<(Arc<dyn Kernel>, Arguments)>, state: &State) {
    /// Tells waiters when the thread ends, also by a panic.
    struct End<'a>(&'a State);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.lock().ended = true;
            self.0.done.notify_all();
        }
    }
    let _end = End(state);
    while let Ok((kernel, arguments)) = launches.recv() {
        let failed = state.lock().error.is_some();
        let result = if failed {
            Ok(())
        } else {
            // SAFETY: whoever put it into the queue promised.
            unsafe { kernel.launch(&arguments) }
        };
        let mut progress = state.lock();
        progress.finished += 1;
        if let Err(error) = result {
            progress.error.get_or_insert(error);
        }
        state.done.notify_all();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported to whoever launched or synchronised.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Log(Mutex<Vec<u64>>);

    impl Kernel for Log {
        unsafe fn launch(&self, arguments: &Arguments) -> Result<(), KernelError> {
            assert_ne!(arguments[0], 99, "on purpose");
            if arguments[0] == 7 {
                return Err(Arc::new(HalError::Import {
                    reason: "seven".to_owned(),
                }));
            }
            self.0.lock().unwrap().push(arguments[0]);
            Ok(())
        }
    }

    fn args(n: u64) -> Arguments {
        [n, 0, 0, 0, 0, 0, 0, 0]
    }

    #[test]
    fn launches_run_in_order_and_the_first_error_stays() {
        for stream in [Stream::inline(), Stream::worker().unwrap()] {
            let log = Arc::new(Log(Mutex::default()));
            for n in 0..5 {
                // SAFETY: `Log` takes any numbers.
                unsafe { stream.launch(&log, &args(n)) }.unwrap();
            }
            stream.synchronize().unwrap();
            assert_eq!(*log.0.lock().unwrap(), [0, 1, 2, 3, 4]);
            // SAFETY: as above.
            let launched = unsafe { stream.launch(&log, &args(7)) };
            let failed = launched.and_then(|()| stream.synchronize());
            assert!(failed.unwrap_err().to_string().contains("seven"));
        }
    }

    #[test]
    fn a_panic_on_the_worker_is_an_error_not_a_hang() {
        let stream = Stream::worker().unwrap();
        let log = Arc::new(Log(Mutex::default()));
        // SAFETY: `Log` takes any numbers.
        unsafe { stream.launch(&log, &args(99)) }.unwrap();
        assert!(stream.synchronize().is_err());
    }
}
