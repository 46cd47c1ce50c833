//! Taking turns without a locked instruction at the end.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A lock for something that hardly anybody ever waits for, and never without end.
///
/// Releasing it is a plain store. A mutex is released by a locked instruction, which on x86 waits
/// until everything that was stored before has left the core; in a small call that is what was just
/// sent to a peer, and the wait costs as much as the rest.
#[derive(Debug)]
pub(crate) struct Turn<T> {
    taken: AtomicBool,
    inner: UnsafeCell<T>,
}

// SAFETY: `inner` is only reached through a `Taken`, and there is one at a time.
unsafe impl<T: Send> Sync for Turn<T> {}

impl<T> Turn<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self {
            taken: AtomicBool::new(false),
            inner: UnsafeCell::new(inner),
        }
    }

    /// Waits for the turn, at most for `limit`.
    pub(crate) fn take(&self, limit: Duration) -> Option<Taken<'_, T>> {
        if self.taken.swap(true, Ordering::Acquire) {
            self.wait(limit)?;
        }
        Some(Taken(self, PhantomData))
    }

    #[cold]
    fn wait(&self, limit: Duration) -> Option<()> {
        let started = Instant::now();
        while self.taken.swap(true, Ordering::Acquire) {
            if started.elapsed() > limit {
                return None;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Some(())
    }
}

/// The turn; it ends when this is dropped. It may go where a `&mut T` may.
pub(crate) struct Taken<'a, T>(&'a Turn<T>, PhantomData<&'a mut T>);

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: whoever holds the turn is alone.
        unsafe { &*self.0.inner.get() }
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.inner.get() }
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_never_without_end() {
        let turn = Turn::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        *turn.take(Duration::from_secs(60)).unwrap() += 1;
                    }
                });
            }
        });
        let held = turn.take(Duration::ZERO).unwrap();
        assert_eq!(*held, 3000);
        assert!(turn.take(Duration::from_millis(1)).is_none());
        drop(held);
        assert!(turn.take(Duration::ZERO).is_some());
    }
}
