//! The transport to a peer over TCP: a connection a direction, opened by the proxy that sends.
//!
//! The receiving side runs a thread a connection. It reads nothing before the connection has proven
//! the job's secret, and writes nothing outside this rank's registered memory.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossweft_net::auth::{self, Role};
use crossweft_net::{NetError, PeerState};

use crate::frame::{FRAME, Frame, MAX_PUT};
use crate::shared::{self, Place};
use crate::transport::Transport;
use crate::{ChannelError, Endpoint};

/// What the proof is for.
const PURPOSE: u32 = auth::FIRST_FREE_PURPOSE;
/// How long a connection may take to prove the secret.
const PROOF: Duration = Duration::from_secs(2);
/// How often a connection that is lost during the proof is made, and the pause before that.
const ATTEMPTS: u32 = 3;
const AGAIN: Duration = Duration::from_millis(20);
/// Connections that may be open beyond one a rank: strangers, and services that come and go.
const SPARE_CONNECTIONS: usize = 64;
/// How long to wait for the reason when a connection is lost.
const VERDICT: Duration = Duration::from_secs(1);

/// Open sockets, so that another thread can end what blocks on them.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    open: Mutex<BTreeMap<u64, TcpStream>>,
    changed: Condvar,
    next: AtomicU64,
}

/// A socket's entry; removed when dropped.
#[derive(Debug)]
struct Entry {
    sockets: Arc<Sockets>,
    number: u64,
}

impl Sockets {
    fn add(self: &Arc<Self>, stream: &TcpStream) -> io::Result<Entry> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, stream.try_clone()?);
        Ok(Entry {
            sockets: Arc::clone(self),
            number,
        })
    }

    /// Waits until all are closed, at most until `deadline`.
    fn wait(&self, deadline: Instant) {
        let mut open = self.lock();
        while !open.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let wait = self.changed.wait_timeout(open, left);
            open = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends what blocks on them.
    pub(crate) fn shut_down(&self) {
        for stream in self.lock().values() {
            // It may be gone already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, TcpStream>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.sockets.lock().remove(&self.number);
        self.sockets.changed.notify_all();
    }
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct TcpLink {
    endpoint: Arc<Endpoint>,
    peer: u32,
    stream: TcpStream,
    /// A frame and its bytes, to be sent with one call.
    buffer: Vec<u8>,
    /// Puts since the last flush.
    unflushed: u64,
    /// Flushes asked for and answered.
    asked: u64,
    answered: u64,
    closed: bool,
    _entry: Entry,
}

impl TcpLink {
    /// Connects to the service of `peer` that listens at `address`.
    ///
    /// The service gives up on connections that are slow to prove the secret, such as those of a
    /// process that was stopped meanwhile; so one that is lost is made again.
    pub(crate) fn connect(
        endpoint: &Arc<Endpoint>,
        peer: u32,
        address: SocketAddr,
        sockets: &Arc<Sockets>,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let connect = || Self::connect_once(endpoint, peer, address, sockets, deadline);
        let is_lost = |error: &ChannelError| match error {
            ChannelError::Bootstrap { source, .. } => matches!(source, NetError::Io { .. }),
            _ => false,
        };
        let mut result = connect();
        for _ in 1..ATTEMPTS {
            if !result.as_ref().is_err_and(is_lost) {
                break;
            }
            std::thread::sleep(AGAIN);
            result = connect();
        }
        result
    }

    fn connect_once(
        endpoint: &Arc<Endpoint>,
        peer: u32,
        address: SocketAddr,
        sockets: &Arc<Sockets>,
        deadline: Instant,
    ) -> Result<Self, ChannelError> {
        let what = format!("connecting to the proxy service of rank {peer} at {address}");
        let system = ChannelError::system(&what);
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let mut stream = TcpStream::connect_timeout(&address, left).map_err(&system)?;
        stream.set_nodelay(true).map_err(&system)?;
        let role = Role::Initiate {
            purpose: PURPOSE,
            own_rank: endpoint.rank(),
            peer_rank: peer,
        };
        let entry = sockets.add(&stream).map_err(&system)?;
        auth::prove(&mut stream, endpoint.group().key(), role, deadline)
            .map_err(ChannelError::bootstrap(&what))?;
        Ok(Self {
            _entry: entry,
            closed: false,
            endpoint: Arc::clone(endpoint),
            peer,
            stream,
            buffer: Vec::with_capacity(FRAME + MAX_PUT),
            unflushed: 0,
            asked: 0,
            answered: 0,
        })
    }

    fn send(&mut self, frame: Frame) -> Result<(), ChannelError> {
        let sent = self.stream.write_all(&frame.encode());
        sent.map_err(|error| self.lost(&error))
    }

    fn lost(&self, error: &io::Error) -> ChannelError {
        let during = match self.unflushed {
            0 => error.to_string(),
            puts => format!("{error}, with {puts} puts not known to have arrived"),
        };
        let reason = match verdict(&self.endpoint, self.peer) {
            Some(verdict) => verdict,
            None => during,
        };
        ChannelError::Disconnected {
            rank: self.endpoint.rank(),
            peer: self.peer,
            reason,
        }
    }
}

impl Transport for TcpLink {
    fn put(&mut self, dst: Place<'_>, src: Place<'_>, bytes: u64) -> Result<(), ChannelError> {
        let mut done = 0;
        while done < bytes {
            let length = (bytes - done).min(MAX_PUT as u64);
            let frame = Frame::Put {
                key: dst.memory.key(self.peer),
                offset: dst.offset + done,
                length: u32::try_from(length).unwrap_or(u32::MAX), // at most MAX_PUT
            };
            self.buffer.clear();
            self.buffer.extend_from_slice(&frame.encode());
            self.buffer.resize(FRAME + length as usize, 0);
            src.memory
                .local()
                .read(src.offset + done, &mut self.buffer[FRAME..])
                .map_err(ChannelError::memory("reading what is to be sent"))?;
            let sent = self.stream.write_all(&self.buffer);
            sent.map_err(|error| self.lost(&error))?;
            done += length;
        }
        self.unflushed += 1;
        Ok(())
    }

    fn signal(&mut self, counter: Place<'_>) -> Result<(), ChannelError> {
        self.send(Frame::Signal {
            key: counter.memory.key(self.peer),
            offset: counter.offset,
        })
    }

    fn start_flush(&mut self) -> Result<(), ChannelError> {
        if self.unflushed == 0 {
            return Ok(());
        }
        self.asked += 1;
        self.send(Frame::Flush {
            sequence: self.asked,
        })
    }

    fn finish_flush(&mut self) -> Result<(), ChannelError> {
        while self.answered < self.asked {
            let mut bytes = [0; FRAME];
            let read = self.stream.read_exact(&mut bytes);
            read.map_err(|error| self.lost(&error))?;
            self.answered += 1;
            let expected = Frame::Ack {
                sequence: self.answered,
            };
            let frame = Frame::decode(&bytes);
            if frame.as_ref() != Ok(&expected) {
                return Err(ChannelError::BadRequest {
                    rank: self.endpoint.rank(),
                    peer: self.peer,
                    request: format!("{frame:?} in answer to a flush instead of {expected:?}"),
                });
            }
        }
        self.unflushed = 0;
        Ok(())
    }

    fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) {
            // If the connection is gone, the peer knows.
            let _ = self.stream.write_all(&Frame::Goodbye.encode());
        }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// Why the connection with `peer` may have been lost, if the bootstrap knows; waits a moment for it.
fn verdict(endpoint: &Endpoint, peer: u32) -> Option<String> {
    let liveness = endpoint.group().liveness();
    let deadline = Instant::now() + VERDICT;
    loop {
        if let Some(failure) = liveness.failure() {
            return Some(failure.to_string());
        }
        if liveness.peer(peer) == PeerState::Left {
            return Some(format!("rank {peer} has left the job"));
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Stops the job because of `error`, and says so in this rank's log. Returns when the other ranks
/// have been told, or a moment later.
pub(crate) fn fail_job(endpoint: &Endpoint, error: &ChannelError) {
    // Whoever failed first has told.
    if !endpoint.group().liveness().stopped() {
        tracing::error!("rank {}: {error}", endpoint.rank());
        endpoint.group().abort(&error.to_string());
    }
}

/// The receiving end: a listener, and a thread for each connection.
#[derive(Debug)]
pub(crate) struct Receiver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    endpoint: Arc<Endpoint>,
    listener: TcpListener,
    sockets: Arc<Sockets>,
    closing: AtomicBool,
}

impl Receiver {
    /// Listens where this rank's bootstrap does. Returns the port too.
    pub(crate) fn start(endpoint: &Arc<Endpoint>) -> Result<(Self, u16), ChannelError> {
        let address = endpoint.group().peer_address(endpoint.rank());
        let what = format!("listening for proxies on {address}");
        let system = ChannelError::system(&what);
        let listener = TcpListener::bind((address, 0)).map_err(&system)?;
        let port = listener.local_addr().map_err(&system)?.port();
        let shared = Arc::new(Shared {
            endpoint: Arc::clone(endpoint),
            listener,
            sockets: Arc::default(),
            closing: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new()
            .name(format!("crossweft-accept-{}", endpoint.rank()))
            .spawn({
                let shared = Arc::clone(&shared);
                move || accept(&shared)
            })
            .map_err(&system)?;
        Ok((
            Self {
                shared,
                thread: Some(thread),
            },
            port,
        ))
    }

    /// Lets the peers finish until `deadline`, and ends.
    pub(crate) fn close(&mut self, deadline: Instant) {
        self.shared.sockets.wait(deadline);
        self.shared.closing.store(true, Ordering::Release);
        self.shared.sockets.shut_down();
        // On Linux this ends an `accept` in another thread.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic was already reported.
            let _ = thread.join();
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

fn accept(shared: &Arc<Shared>) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    while !shared.closing.load(Ordering::Acquire) {
        let Ok((stream, address)) = shared.listener.accept() else {
            // Closing, or out of descriptors for the moment.
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        threads.retain(|thread| !thread.is_finished());
        let limit = shared.endpoint.world_size() as usize + SPARE_CONNECTIONS;
        if threads.len() >= limit {
            tracing::warn!("dropped a connection from {address}: {limit} are open");
            continue;
        }
        let spawned = shared.sockets.add(&stream).and_then(|entry| {
            let shared = Arc::clone(shared);
            std::thread::Builder::new()
                .name(format!("crossweft-receive-{}", shared.endpoint.rank()))
                .spawn(move || {
                    receive(&shared, stream);
                    drop(entry);
                })
        });
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::warn!("dropped a connection from {address}: {error}"),
        }
    }
    shared.sockets.shut_down();
    for thread in threads {
        // A panic was already reported.
        let _ = thread.join();
    }
}

/// Serves one connection until it ends.
fn receive(shared: &Shared, mut stream: TcpStream) {
    let endpoint = &*shared.endpoint;
    let rank = endpoint.rank();
    let role = Role::Accept {
        purpose: PURPOSE,
        own_rank: rank,
    };
    let proven = auth::prove(
        &mut stream,
        endpoint.group().key(),
        role,
        Instant::now() + PROOF,
    );
    let peer = match proven {
        Ok(peer) => peer,
        Err(error) => {
            tracing::warn!("rank {rank} dropped a connection: {error}");
            return;
        }
    };
    let served = stream
        .set_nodelay(true)
        .map_err(Broken::Lost)
        .and_then(|()| {
            let reader = BufReader::with_capacity(64 * 1024, &stream);
            serve(endpoint, peer, reader, &stream)
        });
    let error = match served {
        Ok(()) => return,
        Err(Broken::Request(request)) => ChannelError::BadRequest {
            rank,
            peer,
            request,
        },
        Err(Broken::Own(error)) => error,
        Err(Broken::Lost(error)) => {
            // What this service closed itself is not lost; nor is a rank that left, or an ended job.
            if shared.closing.load(Ordering::Acquire) || verdict(endpoint, peer).is_some() {
                return;
            }
            ChannelError::Disconnected {
                rank,
                peer,
                reason: error.to_string(),
            }
        }
    };
    fail_job(endpoint, &error);
}

/// How serving a connection can end badly.
#[derive(Debug)]
pub(crate) enum Broken {
    Lost(io::Error),
    Request(String),
    Own(ChannelError),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Does what a peer's proxy asks for until it says goodbye.
pub(crate) fn serve(
    endpoint: &Endpoint,
    peer: u32,
    mut reader: impl Read,
    mut writer: impl Write,
) -> Result<(), Broken> {
    let mut header = [0; FRAME];
    let mut bytes = Vec::new();
    let find = |key| {
        endpoint.registry().get(key).ok_or_else(|| {
            Broken::Request(format!(
                "a request for its memory {key}, which was dropped or never registered"
            ))
        })
    };
    loop {
        reader.read_exact(&mut header)?;
        match Frame::decode(&header).map_err(Broken::Request)? {
            Frame::Put {
                key,
                offset,
                length,
            } => {
                let memory = find(key)?;
                bytes.resize(length as usize, 0);
                reader.read_exact(&mut bytes)?;
                memory
                    .local()
                    .write(offset, &bytes)
                    .map_err(|error| Broken::Request(format!("a put out of range: {error}")))?;
            }
            Frame::Signal { key, offset } => {
                let memory = find(key)?;
                let counter = Place {
                    memory: &memory,
                    rank: endpoint.rank(),
                    offset,
                };
                shared::signal(endpoint, counter).map_err(Broken::Own)?;
            }
            Frame::Flush { sequence } => writer.write_all(&Frame::Ack { sequence }.encode())?,
            frame @ Frame::Ack { .. } => {
                return Err(Broken::Request(format!("an unexpected {frame:?}")));
            }
            Frame::Goodbye => {
                tracing::debug!("rank {peer}'s proxy said goodbye");
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossweft_hal::cpu::SharedMemory;
    use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};

    use crate::RegisteredMemory;

    /// A job of one rank that listens, with a memory of one page.
    struct Alone {
        endpoint: Arc<Endpoint>,
        memory: Arc<RegisteredMemory>,
        receiver: Receiver,
        address: SocketAddr,
    }

    impl Alone {
        fn new() -> Self {
            let deadline = Instant::now() + Duration::from_secs(30);
            let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
            let options = JoinOptions::default();
            let group = Group::join(&rendezvous.unique_id(), 0, 1, &options).unwrap();
            let endpoint = Endpoint::new(Arc::new(group), deadline).unwrap();
            let memory = SharedMemory::create(4096).unwrap();
            let memory = endpoint.register(memory, "testing", deadline).unwrap();
            let (receiver, port) = Receiver::start(&endpoint).unwrap();
            let address = SocketAddr::new(endpoint.group().peer_address(0), port);
            Self {
                endpoint,
                memory,
                receiver,
                address,
            }
        }

        fn connect(&self) -> TcpStream {
            let stream = TcpStream::connect(self.address).unwrap();
            let limit = Some(Duration::from_secs(30));
            stream.set_read_timeout(limit).unwrap();
            stream
        }

        /// A member's connection.
        fn prove(&self) -> TcpStream {
            let mut stream = self.connect();
            let role = Role::Initiate {
                purpose: PURPOSE,
                own_rank: 0,
                peer_rank: 0,
            };
            let deadline = Instant::now() + Duration::from_secs(30);
            auth::prove(&mut stream, self.endpoint.group().key(), role, deadline).unwrap();
            stream
        }

        fn word(&self, offset: u64) -> u64 {
            let mut bytes = [0; 8];
            self.memory.local().read(offset, &mut bytes).unwrap();
            u64::from_ne_bytes(bytes)
        }

        fn failure(&self) -> Option<String> {
            let failure = self.endpoint.group().liveness().failure();
            failure.map(|failure| failure.to_string())
        }

        /// Returns what is read until the receiver closes the connection.
        fn until_closed(mut stream: TcpStream) -> usize {
            let mut answer = Vec::new();
            if let Err(error) = stream.read_to_end(&mut answer) {
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            }
            answer.len()
        }
    }

    impl Drop for Alone {
        fn drop(&mut self) {
            self.receiver.close(Instant::now());
        }
    }

    #[test]
    fn strangers_are_dropped_and_disturb_nobody() {
        let alone = Alone::new();
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], b"CWA1", b""] {
            let mut stream = alone.connect();
            stream.write_all(bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            assert!(
                Alone::until_closed(stream) <= 48,
                "no more than a challenge"
            );
        }
        let mut stream = alone.prove();
        let key = alone.memory.key(0);
        let frames = [
            Frame::Put {
                key,
                offset: 8,
                length: 8,
            },
            Frame::Signal { key, offset: 64 },
            Frame::Signal { key, offset: 64 },
            Frame::Flush { sequence: 5 },
        ];
        for frame in frames {
            stream.write_all(&frame.encode()).unwrap();
            if matches!(frame, Frame::Put { .. }) {
                stream.write_all(&77u64.to_ne_bytes()).unwrap();
            }
        }
        let mut answer = [0; FRAME];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(Frame::decode(&answer), Ok(Frame::Ack { sequence: 5 }));
        assert_eq!((alone.word(8), alone.word(64)), (77, 2));
        stream.write_all(&Frame::Goodbye.encode()).unwrap();
        assert_eq!(Alone::until_closed(stream), 0);
        assert_eq!(alone.failure(), None);
    }

    #[test]
    fn a_member_that_asks_for_nonsense_fails_the_job() {
        let put = |key, offset, length| Frame::Put {
            key,
            offset,
            length,
        };
        let cases: [(&dyn Fn(u64) -> Frame, &str); 7] = [
            (&|key| put(key, 4090, 8), "a put out of range"),
            (&|key| put(key, u64::MAX - 3, 8), "a put out of range"),
            (&|_| put(999, 0, 8), "memory 999"),
            (&|key| put(key, 0, u32::MAX), "4294967295 bytes (limit"),
            (&|key| Frame::Signal { key, offset: 4096 }, "lie outside"),
            (&|key| Frame::Signal { key, offset: 4 }, "lie outside"),
            (&|_| Frame::Ack { sequence: 1 }, "an unexpected Ack"),
        ];
        for (frame, words) in cases {
            let alone = Alone::new();
            let mut stream = alone.prove();
            let frame = frame(alone.memory.key(0));
            stream.write_all(&frame.encode()).unwrap();
            stream.write_all(&[1; 64]).unwrap();
            Alone::until_closed(stream);
            let failure = alone.failure().unwrap();
            assert!(failure.contains(words), "{failure}");
            assert!(
                (0..512).all(|n| alone.word(n * 8) == 0),
                "nothing was written"
            );
        }
        let alone = Alone::new();
        let mut stream = alone.prove();
        stream.write_all(&[0xee; FRAME]).unwrap();
        Alone::until_closed(stream);
        assert!(alone.failure().unwrap().contains("unknown kind"));
    }

    #[test]
    fn a_connection_that_breaks_off_fails_the_job() {
        let alone = Alone::new();
        let mut stream = alone.prove();
        stream.write_all(&[1; 10]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(Alone::until_closed(stream), 0);
        let failure = alone.failure().unwrap();
        assert!(
            failure.contains("no data connection with rank 0"),
            "{failure}"
        );
    }
}
