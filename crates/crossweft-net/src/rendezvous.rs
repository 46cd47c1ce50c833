//! The rendezvous with real sockets: one listener, one thread, any number of connections.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::bind::{self, Bind};
use crate::cancel::Cancel;
use crate::complaint::Complaint;
use crate::error::NetError;
use crate::link;
use crate::poll::{self, Waker};
use crate::root::{Client, Root, RootOutput};
use crate::unique_id::UniqueId;

/// How long connections may take to read what was sent to them in the end.
const LINGER: Duration = Duration::from_secs(2);
/// How long to wait before accepting again after the system ran out of something.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Where ranks find each other: listens until all have joined, or until the timeout.
///
/// It belongs into the process that creates the unique id (a launcher, or rank 0). Dropping it stops
/// it, also when ranks are missing.
#[derive(Debug)]
pub struct Rendezvous {
    id: UniqueId,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), NetError>>>,
}

/// Between a rendezvous and its thread.
#[derive(Debug)]
struct Shared {
    /// The last that its owner says to it.
    order: OnceLock<Order>,
    waker: Waker,
    /// Readable once the thread is done.
    done: Waker,
}

#[derive(Debug)]
enum Order {
    Stop,
    Detach,
    Abort { by: u32, reason: String },
}

/// How a [`Rendezvous`] is found and how long it waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousOptions {
    /// Where it listens. With [`Bind::Loopback`], the default, only ranks of this host can join.
    pub bind: Bind,
    /// The port; 0, the default, takes any free one.
    pub port: u16,
    /// How long it waits for all ranks, from its start on; 30 seconds by default. A rank that comes later finds nobody. Once
    /// [detached](Rendezvous::detach), it counts from when the first rank has joined.
    pub timeout: Duration,
}

impl Default for RendezvousOptions {
    fn default() -> Self {
        Self {
            bind: Bind::Loopback,
            port: 0,
            timeout: Duration::from_secs(30),
        }
    }
}

impl Rendezvous {
    /// Listens, and makes a unique id with a new secret.
    pub fn start(options: &RendezvousOptions) -> Result<Self, NetError> {
        let (listener, address) = options.bind.listen(options.port)?;
        if address.ip().is_unspecified() {
            return Err(NetError::InvalidBind {
                bind: address.ip().to_string(),
                reason: "ranks could not tell where to connect; name one address of this host"
                    .to_owned(),
            });
        }
        Self::run(UniqueId::generate(address)?, listener, options.timeout)
    }

    /// Listens where a given id says.
    pub(crate) fn serve(id: &UniqueId, timeout: Duration) -> Result<Self, NetError> {
        let (listener, _) = bind::listen(id.address())?;
        Self::run(id.clone(), listener, timeout)
    }

    /// What the ranks need to join. It contains the secret.
    pub fn unique_id(&self) -> UniqueId {
        self.id.clone()
    }

    /// Waits until all ranks have joined and are connected to each other, or says who is missing.
    pub fn wait(mut self) -> Result<(), NetError> {
        self.thread.take().map_or(Ok(()), join)
    }

    /// [`wait`](Self::wait) of a rank; once it is cancelled, all ranks are told.
    pub(crate) fn wait_unless(self, cancel: Option<&Cancel>, rank: u32) -> Result<(), NetError> {
        let Some(cancel) = cancel else {
            return self.wait();
        };
        loop {
            let mut fds = [
                PollFd::new(&self.shared.done, PollFlags::IN),
                PollFd::new(cancel, PollFlags::IN),
            ];
            let deadline = Instant::now() + Duration::from_secs(60);
            poll::until(&mut fds, deadline).map_err(|error| NetError::io("poll", error))?;
            if !fds[0].revents().is_empty() {
                return self.wait();
            }
            if let Some(reason) = cancel.reason() {
                let (by, reason) = (rank, reason.to_owned());
                self.shared.order(Order::Abort { by, reason });
                return self.wait();
            }
        }
    }

    /// Lets it go on by itself: it ends when all ranks have joined, or with its timeout, which counts from the first that joins;
    /// for that one it waits an hour at least, because whoever has made an id may do other things before it is used.
    pub fn detach(mut self) {
        self.shared.order(Order::Detach);
        drop(self.thread.take());
    }

    fn run(id: UniqueId, listener: TcpListener, timeout: Duration) -> Result<Self, NetError> {
        let shared = Arc::new(Shared {
            order: OnceLock::new(),
            waker: Waker::new()?,
            done: Waker::new()?,
        });
        let service = Service {
            root: Root::new(id.key().clone(), timeout, Instant::now()),
            listener,
            streams: BTreeMap::new(),
            next_client: 0,
            accept_again: Instant::now(),
            complaint: Complaint::default(),
            shared: shared.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("crossweft-rendezvous".to_owned())
            .spawn(move || service.run())
            .map_err(|error| NetError::io("starting the rendezvous thread", error))?;
        Ok(Self {
            id,
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.shared.order(Order::Stop);
        if let Err(error) = join(thread) {
            tracing::debug!(%error, "the rendezvous ended");
        }
    }
}

impl Shared {
    fn order(&self, order: Order) {
        // Who gives one has no other to give.
        let _ = self.order.set(order);
        self.waker.wake();
    }
}

fn join(thread: JoinHandle<Result<(), NetError>>) -> Result<(), NetError> {
    thread.join().unwrap_or_else(|_| {
        Err(NetError::io(
            "running the rendezvous",
            io::Error::other("panic"),
        ))
    })
}

struct Service {
    root: Root,
    listener: TcpListener,
    streams: BTreeMap<Client, Stream>,
    next_client: Client,
    accept_again: Instant,
    complaint: Complaint,
    shared: Arc<Shared>,
}

struct Stream {
    stream: TcpStream,
    output: Vec<u8>,
    /// Set when the root is done with it: it goes when all is sent and read, or at this time.
    closing: Option<Instant>,
}

impl Service {
    fn run(mut self) -> Result<(), NetError> {
        let shared = self.shared.clone();
        let mut result = None;
        loop {
            let now = Instant::now();
            let order = shared.order.get();
            match order {
                Some(Order::Abort { by, reason }) => self.root.abort(*by, reason.as_bytes()),
                Some(Order::Detach) => self.root.detach(),
                Some(Order::Stop) | None => {}
            }
            self.root.tick(now);
            while let Some(output) = self.root.pop_output() {
                match output {
                    RootOutput::Send { client, bytes } => {
                        if let Some(stream) = self.streams.get_mut(&client) {
                            stream.output.extend_from_slice(&bytes);
                        }
                    }
                    RootOutput::Close(client) => {
                        if let Some(stream) = self.streams.get_mut(&client) {
                            stream.closing = Some(now + LINGER);
                        }
                    }
                    RootOutput::Drop(client) => drop(self.streams.remove(&client)),
                    RootOutput::Finished(verdict) => result = Some(verdict),
                }
            }
            self.write_and_close(now);
            match result {
                Some(result) if self.streams.is_empty() => return result,
                None if matches!(order, Some(Order::Stop)) => {
                    return Err(NetError::Closed {
                        during: "the rendezvous".to_owned(),
                    });
                }
                _ => {}
            }
            let ready = self.wait(result.is_none())?;
            if result.is_none() {
                self.accept()?;
            }
            self.read(&ready);
        }
    }

    /// The connections on which something happened.
    fn wait(&self, accepting: bool) -> Result<Vec<Client>, NetError> {
        let now = Instant::now();
        let paused = now < self.accept_again;
        let mut deadline = self.root.next_tick();
        if paused {
            deadline = deadline.min(self.accept_again);
        }
        let closing = self.streams.values().filter_map(|stream| stream.closing);
        // Right after the verdict the root has no more ticks that matter.
        let deadline = closing.fold(
            if accepting { deadline } else { now + LINGER },
            Instant::min,
        );

        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        if accepting && !paused {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let others = fds.len();
        for stream in self.streams.values() {
            let output = if stream.output.is_empty() {
                PollFlags::empty()
            } else {
                PollFlags::OUT
            };
            fds.push(PollFd::new(&stream.stream, PollFlags::IN | output));
        }
        poll::until(&mut fds, deadline).map_err(|error| NetError::io("poll", error))?;
        self.shared.waker.drain();
        let ready = fds[others..].iter().zip(self.streams.keys());
        Ok(ready
            .filter(|(fd, _)| !fd.revents().is_empty())
            .map(|(_, &client)| client)
            .collect())
    }

    fn accept(&mut self) -> Result<(), NetError> {
        while Instant::now() >= self.accept_again {
            match self.listener.accept() {
                Ok((stream, address)) => {
                    if link::prepare(&stream, None).is_err() {
                        continue;
                    }
                    let client = self.next_client;
                    self.next_client += 1;
                    self.streams.insert(
                        client,
                        Stream {
                            stream,
                            output: Vec::new(),
                            closing: None,
                        },
                    );
                    self.root.connected(client, address, Instant::now())?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Out of file descriptors, or a connection that is gone already: not our end.
                Err(error) => {
                    let now = Instant::now();
                    if let Some(words) = self.complaint.of(&error, now) {
                        tracing::warn!("the rendezvous could not accept a connection: {words}");
                    }
                    self.accept_again = now + ACCEPT_PAUSE;
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, ready: &[Client]) {
        let mut buffer = [0; 4096];
        let mut lost = Vec::new();
        for &client in ready {
            let Some(stream) = self.streams.get_mut(&client) else {
                continue;
            };
            match stream.stream.read(&mut buffer) {
                Ok(0) => lost.push(client),
                Ok(length) if stream.closing.is_none() => {
                    self.root
                        .received(client, &buffer[..length], Instant::now());
                }
                Err(error)
                    if !matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) =>
                {
                    lost.push(client);
                }
                Ok(_) | Err(_) => {}
            }
        }
        for client in lost {
            self.streams.remove(&client);
            self.root.lost(client, Instant::now());
        }
    }

    fn write_and_close(&mut self, now: Instant) {
        let mut lost = Vec::new();
        self.streams.retain(|&client, stream| {
            if !stream.output.is_empty() {
                match stream.stream.write(&stream.output) {
                    Ok(length) => drop(stream.output.drain(..length)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => {
                        lost.push(client);
                        return false;
                    }
                }
            }
            if stream.closing.is_some() && stream.output.is_empty() {
                // The other end reads everything, then closes, and only then do we: a close with
                // unread bytes would reset the connection and lose what it has not read yet.
                let _ = stream.stream.shutdown(Shutdown::Write);
            }
            stream.closing.is_none_or(|deadline| now < deadline)
        });
        lost.into_iter()
            .for_each(|client| self.root.lost(client, now));
    }
}

impl Drop for Service {
    /// However it ends.
    fn drop(&mut self) {
        self.shared.done.wake();
    }
}
