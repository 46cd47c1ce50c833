//! A TCP connection that carries messages: what to send is queued, what came is put together.
//!
//! Between ranks there is a window: at most [`WINDOW`] bytes and one frame are on their way before the
//! other end says that its process (not only its kernel) has read them. They always fit into its
//! kernel's receive buffer, so that a stopped process never closes TCP's own window; there,
//! `TCP_USER_TIMEOUT` would take a live but silent peer for a dead one.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::error::NetError;
use crate::frame::{Decoder, FrameError, Kind, encode};

/// See above; Linux' default receive buffer offers twice this and a frame.
const WINDOW: u64 = 32 << 10;
/// How long what a process has sent before it ended may be on its way.
const ENDED_GRACE: Duration = Duration::from_millis(500);
/// How much is read before other connections have their turn.
const READ_AT_ONCE: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    decoder: Decoder,
    queue: VecDeque<Vec<u8>>,
    offset: usize,
    windowed: bool,
    sent: u64,
    /// How much of `sent` the other end has read.
    read_there: u64,
    /// How much the other end was told that we have read.
    acknowledged: u64,
    process: Option<Process>,
}

/// The process at the other end.
#[derive(Debug)]
struct Process {
    pidfd: OwnedFd,
    /// When it was seen to have ended.
    ended: Option<Instant>,
}

/// Why a link is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("its connection closed")]
    Closed,
    #[error("its connection broke: {0}")]
    Broken(io::Error),
    #[error("its process has ended, and one that was forked from it keeps its connection open")]
    Ended,
    #[error("it broke the protocol: {0}")]
    Frame(#[from] FrameError),
    #[error("it broke the protocol: {0}")]
    Protocol(String),
}

impl Link {
    /// A link to or from the rendezvous.
    pub(crate) fn new(stream: TcpStream, limit: usize) -> Result<Self, NetError> {
        prepare(&stream, None)?;
        Ok(Self {
            stream,
            decoder: Decoder::new(limit),
            queue: VecDeque::new(),
            offset: 0,
            windowed: false,
            sent: 0,
            read_there: 0,
            acknowledged: 0,
            process: None,
        })
    }

    /// A link between two ranks, with a window.
    pub(crate) fn between_ranks(stream: TcpStream, limit: usize) -> Result<Self, NetError> {
        prepare(&stream, Some(Duration::from_secs(4)))?;
        Ok(Self {
            windowed: true,
            ..Self::new(stream, limit)?
        })
    }

    pub(crate) fn send(&mut self, kind: Kind, body: &[u8]) {
        self.queue.extend(encode(kind, body));
    }

    /// Writes what can be written now.
    pub(crate) fn flush(&mut self) -> Result<(), LinkError> {
        loop {
            if self.offset == 0 && self.acknowledgement_is_due() {
                self.acknowledged = self.decoder.consumed();
                let body = self.acknowledged.to_le_bytes();
                encode(Kind::Acknowledge, &body).for_each(|frame| self.queue.push_front(frame));
            }
            if self.is_held_back() {
                return Ok(());
            }
            let Some(frame) = self.queue.front() else {
                return Ok(());
            };
            match self.stream.write(&frame[self.offset..]) {
                Ok(length) => self.offset += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LinkError::Broken(error)),
            }
            if self.offset == frame.len() {
                if !is_acknowledgement(frame) {
                    self.sent += frame.len() as u64;
                }
                self.queue.pop_front();
                self.offset = 0;
            }
        }
    }

    /// Whether to call [`flush`](Self::flush) when the stream can be written.
    pub(crate) fn wants_write(&self) -> bool {
        !self.queue.is_empty() && !self.is_held_back()
    }

    /// Whether everything has been handed to the kernel.
    pub(crate) fn is_flushed(&self) -> bool {
        self.queue.is_empty()
    }

    /// Reads what is there. Messages that came whole are valid also when an error follows them.
    pub(crate) fn receive(&mut self, messages: &mut Vec<(Kind, Vec<u8>)>) -> Result<(), LinkError> {
        let mut buffer = [0; 64 << 10];
        let mut total = 0;
        while total < READ_AT_ONCE {
            let length = match self.stream.read(&mut buffer) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return match self.is_given_up(Instant::now()) {
                        true => Err(LinkError::Ended),
                        false => Ok(()),
                    };
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(LinkError::Broken(error)),
            };
            total += length;
            self.decoder.feed(&buffer[..length]);
            while let Some((kind, body)) = self.decoder.next_message()? {
                if kind == Kind::Acknowledge {
                    let position = <[u8; 8]>::try_from(body).map_err(|_| FrameError::Flags)?;
                    self.read_there = u64::from_le_bytes(position).min(self.sent);
                } else {
                    messages.push((kind, body));
                }
            }
        }
        Ok(())
    }

    /// Is told by `pidfd` when the process at the other end ends. Its connection closes then, too, unless a process that was
    /// forked from it has it as well.
    pub(crate) fn watch(&mut self, pidfd: OwnedFd) {
        let ended = None;
        self.process = Some(Process { pidfd, ended });
    }

    /// What can be read when that process ends, until it has.
    pub(crate) fn process(&self) -> Option<&OwnedFd> {
        let process = self.process.as_ref()?;
        process.ended.is_none().then_some(&process.pidfd)
    }

    /// That process has ended.
    pub(crate) fn process_has_ended(&mut self, now: Instant) {
        if let Some(process) = &mut self.process {
            process.ended.get_or_insert(now);
        }
    }

    /// When nothing more is expected of a process that has ended.
    pub(crate) fn given_up_at(&self) -> Option<Instant> {
        Some(self.process.as_ref()?.ended? + ENDED_GRACE)
    }

    pub(crate) fn is_given_up(&self, now: Instant) -> bool {
        self.given_up_at().is_some_and(|at| now >= at)
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    fn acknowledgement_is_due(&self) -> bool {
        self.windowed && self.decoder.consumed() - self.acknowledged >= WINDOW / 4
    }

    fn is_held_back(&self) -> bool {
        self.windowed
            && self.offset == 0
            && self.sent - self.read_there >= WINDOW
            && self
                .queue
                .front()
                .is_some_and(|frame| !is_acknowledgement(frame))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn is_acknowledgement(frame: &[u8]) -> bool {
    frame.get(6) == Some(&(Kind::Acknowledge as u8))
}

/// Options of every connection: no delay, and a host that is gone is noticed within seconds.
pub(crate) fn prepare(stream: &TcpStream, user_timeout: Option<Duration>) -> Result<(), NetError> {
    let failed = |error: rustix::io::Errno| NetError::io("setting options of a socket", error);
    stream
        .set_nonblocking(true)
        .map_err(|error| NetError::io("making a socket non-blocking", error))?;
    sockopt::set_tcp_nodelay(stream, true).map_err(failed)?;
    sockopt::set_socket_keepalive(stream, true).map_err(failed)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1)).map_err(failed)?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1)).map_err(failed)?;
    sockopt::set_tcp_keepcnt(stream, 3).map_err(failed)?;
    if let Some(timeout) = user_timeout {
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, millis).map_err(failed)?;
    }
    Ok(())
}
