//! File descriptors from rank to rank of one host, over abstract Unix sockets.
//!
//! Every rank has a listener and a thread that serves it, so ranks may ask each other in any order.
//! A client must have the same user id and prove the secret; then it sends the key (u64,
//! little-endian) and gets one byte, with the descriptor attached if the byte is [`GRANTED`]. The
//! names are abstract: nothing is left in the file system, whatever happens to the processes.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use crate::auth::{self, AuthError, Handshake, Key, Role, Step};
use crate::complaint::Complaint;
use crate::error::NetError;
use crate::poll::{self, Waker};

const GRANTED: u8 = 1;
const BUSY: u8 = 2;
/// Requests that may wait for their key to be offered, and connections in general.
const MAX_REQUESTS: usize = 1024;
/// How long a connection may take to prove the secret and say what it wants.
const PROOF: Duration = Duration::from_secs(2);

/// The descriptors that this rank offers, and the thread that hands them out.
#[derive(Debug)]
pub(crate) struct FdService {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    offered: Mutex<BTreeMap<u64, OwnedFd>>,
    waker: Waker,
    stop: AtomicBool,
}

impl FdService {
    pub(crate) fn start(name: &str, rank: u32, key: Key) -> Result<Self, NetError> {
        let listener = listen(name)?;
        let shared = Arc::new(Shared {
            offered: Mutex::default(),
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
        });
        let server = Server {
            rank,
            key,
            listener,
            shared: shared.clone(),
            clients: Vec::new(),
            complaint: Complaint::default(),
            foreign: Complaint::default(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("crossweft-fds-{rank}"))
            .spawn(move || server.run())
            .map_err(|error| NetError::io("starting the file-descriptor thread", error))?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(crate) fn offer(&self, key: u64, fd: BorrowedFd<'_>) -> Result<(), NetError> {
        let own = fd
            .try_clone_to_owned()
            .map_err(|error| NetError::io("duplicating a file descriptor", error))?;
        let mut offered = self.shared.offered();
        if offered.contains_key(&key) {
            return Err(NetError::FdKeyInUse { key });
        }
        offered.insert(key, own);
        self.shared.waker.wake();
        Ok(())
    }

    pub(crate) fn withdraw(&self, key: u64) {
        self.shared.offered().remove(&key);
    }

    /// Ends the thread and everything that waits for it; can be called again.
    pub(crate) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.waker.wake();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the file-descriptor thread panicked");
        }
        self.shared.offered().clear();
    }
}

impl Drop for FdService {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn offered(&self) -> MutexGuard<'_, BTreeMap<u64, OwnedFd>> {
        self.offered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a descriptor did not come; the group knows what that means.
#[derive(Debug)]
pub(crate) enum FetchError {
    Deadline,
    /// The connection closed, which need not mean anything: see [`fetch`].
    Lost(io::Error),
    /// The rank is gone, or at least its service.
    Gone(String),
    Net(NetError),
    /// `stop` became readable.
    Stopped,
}

/// How long to wait before asking again.
const AGAIN: Duration = Duration::from_millis(20);

/// Asks the service of another rank for a descriptor, and waits until it is offered.
///
/// A service gives up on connections that are slow to say what they want, such as those of a
/// process that was stopped meanwhile. So a connection that is lost is made again; only where
/// nobody listens any more, the rank is gone.
pub(crate) fn fetch(
    name: &str,
    own_rank: u32,
    rank: u32,
    auth_key: &Key,
    key: u64,
    stop: BorrowedFd<'_>,
    deadline: Instant,
) -> Result<OwnedFd, FetchError> {
    loop {
        match fetch_once(name, own_rank, rank, auth_key, key, stop, deadline) {
            Err(FetchError::Lost(error)) => {
                tracing::debug!(rank, %error, "lost a connection to an fd socket");
                let again = Instant::now() + AGAIN;
                match wait(stop, stop, again.min(deadline)) {
                    Err(FetchError::Deadline) if Instant::now() < deadline => {}
                    Ok(()) => return Err(FetchError::Stopped),
                    Err(error) => return Err(error),
                }
            }
            result => return result,
        }
    }
}

fn fetch_once(
    name: &str,
    own_rank: u32,
    rank: u32,
    auth_key: &Key,
    key: u64,
    stop: BorrowedFd<'_>,
    deadline: Instant,
) -> Result<OwnedFd, FetchError> {
    let mut stream = connect(name, deadline)?;
    if !is_own_user(stream.as_fd()) {
        return Err(FetchError::Gone(
            "its fd socket belongs to another user".to_owned(),
        ));
    }
    let role = Role::Initiate {
        purpose: auth::FDS,
        own_rank,
        peer_rank: rank,
    };
    let mut handshake = Handshake::new(auth_key, role).map_err(FetchError::Net)?;
    loop {
        match handshake.step(&mut stream) {
            Step::Proven(_) => break,
            Step::Pending => wait(stream.as_fd(), stop, deadline)?,
            Step::Failed(AuthError::Lost(error)) => return Err(FetchError::Lost(error)),
            Step::Failed(AuthError::WrongSecret) => {
                return Err(FetchError::Net(NetError::WrongSecret {
                    address: name.to_owned(),
                }));
            }
            Step::Failed(error) => return Err(FetchError::Gone(error.to_string())),
        }
    }
    stream
        .write_all(&key.to_le_bytes())
        .map_err(FetchError::Lost)?;
    wait(stream.as_fd(), stop, deadline)?;

    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(
        &stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        flags,
    );
    let received = received.map_err(|error| FetchError::Lost(error.into()))?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    match (received.bytes, byte[0], fd) {
        (1, GRANTED, Some(fd)) => Ok(fd),
        (1, BUSY, _) => Err(FetchError::Net(NetError::io(
            format!("asking rank {rank} for a file descriptor"),
            io::Error::new(io::ErrorKind::ResourceBusy, "too many requests wait there"),
        ))),
        (0, ..) => Err(FetchError::Lost(io::ErrorKind::UnexpectedEof.into())),
        _ => Err(FetchError::Net(NetError::io(
            format!("receiving a file descriptor of rank {rank}"),
            io::Error::other("none arrived; is this process at its limit (ulimit -n)?"),
        ))),
    }
}

/// The process that has this fd socket, which tells when it ends; `None` if it cannot be found, as from another container,
/// or is this one.
pub(crate) fn process_of(name: &str, deadline: Instant) -> Option<OwnedFd> {
    let stream = connect(name, deadline).ok()?;
    // 0 is a process that this PID namespace does not see.
    let pid = Pid::from_raw(getsockopt(&stream, PeerCredentials).ok()?.pid())?;
    if pid == getpid() {
        return None;
    }
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Whether the other end of a Unix socket runs as the same user, in whichever PID namespace.
pub(crate) fn is_own_user(socket: BorrowedFd<'_>) -> bool {
    getsockopt(&socket, PeerCredentials)
        .is_ok_and(|credentials| credentials.uid() == rustix::process::geteuid().as_raw())
}

/// A listener with an abstract name.
pub(crate) fn listen(name: &str) -> Result<UnixListener, NetError> {
    SocketAddr::from_abstract_name(name)
        .and_then(|address| UnixListener::bind_addr(&address))
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|error| NetError::io(format!("listening on the abstract socket {name}"), error))
}

/// A blocking stream to an abstract name.
pub(crate) fn connect(name: &str, deadline: Instant) -> Result<UnixStream, FetchError> {
    let failed = |error: rustix::io::Errno| {
        FetchError::Net(NetError::io("connecting to an abstract socket", error))
    };
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    // A full backlog makes connect wait; this bounds it. Zero would mean for ever.
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left)).map_err(failed)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(UnixStream::from(socket)),
        Err(rustix::io::Errno::AGAIN) => Err(FetchError::Deadline),
        Err(rustix::io::Errno::CONNREFUSED) => {
            Err(FetchError::Gone("its fd socket is closed".to_owned()))
        }
        Err(error) => Err(failed(error)),
    }
}

/// Until `fd` can be read; what can be read counts more than a stop.
fn wait(fd: BorrowedFd<'_>, stop: BorrowedFd<'_>, deadline: Instant) -> Result<(), FetchError> {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(fd, PollFlags::IN),
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
        ];
        let ready = poll::until(&mut fds, deadline);
        ready.map_err(|error| FetchError::Net(NetError::io("poll", error)))?;
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        if !fds[1].revents().is_empty() {
            return Err(FetchError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(FetchError::Deadline);
        }
    }
}

struct Server {
    rank: u32,
    key: Key,
    listener: UnixListener,
    shared: Arc<Shared>,
    clients: Vec<Client>,
    complaint: Complaint,
    /// Of other users.
    foreign: Complaint,
}

struct Client {
    stream: UnixStream,
    since: Instant,
    phase: Phase,
}

enum Phase {
    Proving(Box<Handshake>),
    Asking(Vec<u8>),
    Waiting(u64),
}

impl Server {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            if let Err(error) = self.turn() {
                tracing::error!(%error, "the file-descriptor service stopped");
                return;
            }
        }
    }

    fn turn(&mut self) -> Result<(), NetError> {
        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        if self.clients.len() < MAX_REQUESTS {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        fds.extend(
            self.clients
                .iter()
                .map(|client| PollFd::new(&client.stream, PollFlags::IN)),
        );
        let deadline = self.clients.iter().filter_map(Client::deadline).min();
        let deadline = deadline.unwrap_or_else(|| Instant::now() + Duration::from_secs(60));
        poll::until(&mut fds, deadline).map_err(|error| NetError::io("poll", error))?;
        self.shared.waker.drain();

        self.accept()?;
        let (rank, shared) = (self.rank, &self.shared);
        let waiting = self
            .clients
            .iter()
            .filter(|client| matches!(client.phase, Phase::Waiting(_)))
            .count();
        // One place stays free for connections, or nobody could be told that it is too busy.
        let full = waiting + 1 >= MAX_REQUESTS;
        self.clients
            .retain_mut(|client| client.step(rank, shared, full));
        Ok(())
    }

    fn accept(&mut self) -> Result<(), NetError> {
        while self.clients.len() < MAX_REQUESTS {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    if let Some(words) = self.complaint.of(&error, Instant::now()) {
                        tracing::warn!("the file-descriptor service could not accept: {words}");
                    }
                    std::thread::sleep(Duration::from_millis(20));
                    break;
                }
            };
            if !is_own_user(stream.as_fd()) {
                if self.foreign.is_due(Instant::now()) {
                    tracing::warn!("another user asked for a file descriptor and was turned away");
                }
                continue;
            }
            if stream.set_nonblocking(true).is_ok() {
                let role = Role::Accept {
                    purpose: auth::FDS,
                    own_rank: self.rank,
                };
                let phase = Phase::Proving(Box::new(Handshake::new(&self.key, role)?));
                self.clients.push(Client {
                    stream,
                    since: Instant::now(),
                    phase,
                });
            }
        }
        Ok(())
    }
}

impl Client {
    fn deadline(&self) -> Option<Instant> {
        (!matches!(self.phase, Phase::Waiting(_))).then(|| self.since + PROOF)
    }

    /// `false` when the connection is done with.
    fn step(&mut self, rank: u32, shared: &Shared, full: bool) -> bool {
        if let Phase::Proving(handshake) = &mut self.phase {
            match handshake.step(&mut self.stream) {
                Step::Proven(_) => self.phase = Phase::Asking(Vec::new()),
                Step::Pending => {}
                // Who only wanted to know which process this is, or gave up.
                Step::Failed(AuthError::Lost(_)) => return false,
                Step::Failed(error) => {
                    tracing::warn!(rank, %error, "refused a file descriptor to a stranger");
                    return false;
                }
            }
        }
        if let Phase::Asking(bytes) = &mut self.phase {
            let mut buffer = [0; 8];
            match self.stream.read(&mut buffer[bytes.len()..]) {
                Ok(0) => return false,
                Ok(length) => bytes.extend_from_slice(&buffer[bytes.len()..][..length]),
                Err(error) if is_transient(&error) => {}
                Err(_) => return false,
            }
            if let Ok(key) = <[u8; 8]>::try_from(&bytes[..]) {
                if full {
                    let _ = self.stream.write(&[BUSY]);
                    return false;
                }
                self.phase = Phase::Waiting(u64::from_le_bytes(key));
            }
        }
        if let Phase::Waiting(key) = self.phase {
            if let Some(fd) = shared.offered().get(&key) {
                if let Err(error) = self.grant(fd.as_fd()) {
                    tracing::debug!(%error, "a file descriptor could not be handed over");
                }
                return false;
            }
            // Nothing more may come; an end of the stream means that the client gave up.
            return match self.stream.read(&mut [0]) {
                Ok(_) => false,
                Err(error) => is_transient(&error),
            };
        }
        self.deadline()
            .is_none_or(|deadline| Instant::now() < deadline)
    }

    fn grant(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<usize> {
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        rustix::net::sendmsg(
            &self.stream,
            &[IoSlice::new(&[GRANTED])],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
