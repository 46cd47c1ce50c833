//! Ends kernels that wait for ranks that are gone: nobody waits for a launch on a stream, so nobody else would look.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossweft_channel::Endpoint;

/// How often the job is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Something that launches on streams.
pub(crate) trait Launches: std::fmt::Debug + Send + Sync {
    /// Ends the waits of all launches.
    fn end_waits(&self);
}

/// Watches over the launches of one communicator until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    launches: Arc<Mutex<Vec<Weak<dyn Launches>>>>,
    /// Dropped first, which ends the thread.
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// # Errors
    /// There are no more threads to be had.
    pub(crate) fn start(endpoint: &Arc<Endpoint>) -> std::io::Result<Self> {
        let launches = Arc::<Mutex<Vec<Weak<dyn Launches>>>>::default();
        let (alive, ended) = channel::<()>();
        let (watched, endpoint) = (Arc::clone(&launches), Arc::clone(endpoint));
        let look = move || {
            while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                if !endpoint.group().liveness().stopped() {
                    continue;
                }
                // What is prepared later, of that nothing more can be.
                let all = watched.lock().unwrap_or_else(PoisonError::into_inner);
                all.iter()
                    .filter_map(Weak::upgrade)
                    .for_each(|one| one.end_waits());
                return;
            }
        };
        let named = thread::Builder::new().name("crossweft watch".to_owned());
        Ok(Self {
            launches,
            alive: Some(alive),
            thread: Some(named.spawn(look)?),
        })
    }

    pub(crate) fn add(&self, one: Weak<dyn Launches>) {
        let mut launches = self.launches.lock().unwrap_or_else(PoisonError::into_inner);
        launches.retain(|other| other.strong_count() > 0);
        launches.push(one);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take() {
            // It has nothing to say.
            let _ = thread.join();
        }
    }
}
