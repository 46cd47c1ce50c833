//! Small helpers around `poll(2)`, deadlines and the eventfd that wakes a thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::io::Errno;

use crate::error::NetError;

/// A deadline `wait` from `now`; waits too long for the clock become a year.
pub(crate) fn after(now: Instant, wait: Duration) -> Instant {
    now.checked_add(wait)
        .unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600))
}

/// Polls until something is ready or `deadline`; an interrupted call counts as nothing ready.
pub(crate) fn until(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<usize> {
    let left = deadline.saturating_duration_since(Instant::now());
    // An hour at a time: no deadline overflows the kernel's timespec, and callers loop anyway.
    let left = left.min(Duration::from_secs(3600));
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(3600),
        tv_nsec: left.subsec_nanos().into(),
    };
    match rustix::event::poll(fds, Some(&timeout)) {
        Ok(count) => Ok(count),
        Err(Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Whether a read will not block; also true at the end of the stream and after an error.
pub(crate) fn readable_now(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    Ok(until(&mut fds, Instant::now())? > 0)
}

/// Waits until a read will not block; `false` if the deadline passed first.
pub(crate) fn readable(fd: BorrowedFd<'_>, deadline: Instant) -> Result<bool, NetError> {
    loop {
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match until(&mut fds, deadline) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(NetError::io("poll", error)),
        }
    }
}

/// An eventfd: makes a `poll` in another thread return.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> Result<Self, NetError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|error| NetError::io("creating an eventfd", error))
    }

    /// Only fails when the counter is full, and then the other end is awake already.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets the calls of [`wake`](Self::wake) so far.
    pub(crate) fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
