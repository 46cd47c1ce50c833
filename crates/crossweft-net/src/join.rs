//! How a rank joins: to the rendezvous, then to its neighbours.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::auth::{self, AuthError, Handshake, Key, Role, Step};
use crate::bind::Bind;
use crate::error::NetError;
use crate::frame::{Kind, VERSION};
use crate::link::Link;
use crate::mesh;
use crate::message::{Answer, Hello, MAX_MESSAGE, MAX_TABLE, Member, Missing, to_vec};
use crate::poll;
use crate::unique_id::UniqueId;

/// How long a connection to this rank's listener may take to prove the secret.
const PROOF: Duration = Duration::from_secs(2);
/// Connections to this rank's listener that have not proven anything.
const MAX_STRANGERS: usize = 256;

/// How a rank joins a group and watches over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinOptions {
    /// Where this rank's own socket listens for its neighbours; [`Bind::Loopback`] by default.
    pub bind: Bind,
    /// How often to tell neighbours that this rank is alive; every second by default.
    pub heartbeat: Duration,
    /// After how long a neighbour that is not heard is called silent; 30 seconds by default.
    pub silence_after: Duration,
    /// How long joining may take; 30 seconds by default.
    pub timeout: Duration,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self {
            bind: Bind::Loopback,
            heartbeat: Duration::from_secs(1),
            silence_after: Duration::from_secs(30),
            timeout: Duration::from_secs(30),
        }
    }
}

/// This rank's connections, and who is who.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) links: BTreeMap<u32, Link>,
    pub(crate) members: Vec<Member>,
}

/// What a rank needs to know to join.
pub(crate) struct Joiner<'a> {
    pub(crate) id: &'a UniqueId,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
}

impl Joiner<'_> {
    /// `member` says everything about this rank but where `listener` listens.
    pub(crate) fn join(&self, bind: &Bind, mut member: Member) -> Result<Joined, NetError> {
        let (listener, listen) = bind.listen(0)?;
        member.listen = listen;
        let mut root = self.connect_to_root()?;
        if listen.ip().is_unspecified() {
            // Listening everywhere: others find this rank where the rendezvous sees it.
            let own = root
                .stream()
                .local_addr()
                .map_err(|error| NetError::io("asking for the address of a socket", error))?;
            member.listen.set_ip(own.ip());
        }
        let Self {
            rank, world_size, ..
        } = *self;
        root.send(
            Kind::Hello,
            &to_vec(&Hello {
                version: VERSION,
                rank,
                world_size,
                member,
            }),
        );
        let members = self.wait_for_table(&mut root)?;
        let links = self.connect_to_neighbours(&mut root, &listener, &members)?;
        root.send(Kind::Ready, &[]);
        // A rendezvous that is gone by now has nothing more to say.
        let _ = root.flush();
        Ok(Joined { links, members })
    }

    fn connect_to_root(&self) -> Result<Link, NetError> {
        let address = self.id.address();
        let lost = |reason: String| NetError::RootLost { address, reason };
        let mut stream =
            connect(address, self.deadline).map_err(|error| lost(error.to_string()))?;
        let role = Role::Initiate {
            purpose: auth::RENDEZVOUS,
            own_rank: self.rank,
            peer_rank: auth::ROOT,
        };
        let proven = auth::drive(
            &mut stream,
            self.id.key(),
            role,
            self.deadline,
            &address.to_string(),
        );
        match proven {
            Ok(_) => Link::new(stream, MAX_TABLE),
            // A rendezvous of another secret closes the connection; so does one that is ending.
            Err(NetError::Io { source, .. }) => Err(lost(format!(
                "it closed the connection during the proof ({source})"
            ))),
            Err(error) => Err(error),
        }
    }

    fn wait_for_table(&self, root: &mut Link) -> Result<Vec<Member>, NetError> {
        let address = self.id.address();
        let mut missing = Vec::new();
        loop {
            let mut messages = Vec::new();
            let received = root.flush().and_then(|()| root.receive(&mut messages));
            for (kind, body) in messages {
                match self.answer(kind, &body)? {
                    Answer::Waiting(ranks) => missing = ranks,
                    Answer::Table(members) if members.len() == self.world_size as usize => {
                        return Ok(members);
                    }
                    Answer::Table(_) => {
                        let reason = "its table has the wrong size".to_owned();
                        return Err(NetError::Protocol {
                            address: address.to_string(),
                            reason,
                        });
                    }
                    Answer::Refuse(reason) => {
                        return Err(NetError::Refused {
                            rank: self.rank,
                            reason,
                        });
                    }
                    Answer::Missing(Missing {
                        missing,
                        joined,
                        world_size,
                        after_ms,
                    }) => {
                        let after = Duration::from_millis(after_ms);
                        return Err(NetError::RanksMissing {
                            missing,
                            joined,
                            world_size,
                            after,
                        });
                    }
                    Answer::Broken(rank) => return Err(lost_while_joining(rank)),
                }
            }
            if let Err(error) = received {
                let reason = format!("{error}, before all ranks had joined");
                return Err(NetError::RootLost { address, reason });
            }
            let flags = if root.wants_write() {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            };
            let mut fds = [PollFd::new(root, PollFlags::IN | flags)];
            let ready = poll::until(&mut fds, self.deadline);
            if ready.map_err(|error| NetError::io("poll", error))? == 0
                && Instant::now() >= self.deadline
            {
                let count = u32::try_from(missing.len()).unwrap_or(u32::MAX);
                return Err(NetError::RanksMissing {
                    joined: self.world_size.saturating_sub(count),
                    world_size: self.world_size,
                    after: self.timeout,
                    missing,
                });
            }
        }
    }

    fn answer(&self, kind: Kind, body: &[u8]) -> Result<Answer, NetError> {
        let address = self.id.address().to_string();
        Answer::decode(kind, body).map_err(|reason| NetError::Protocol { address, reason })
    }

    /// Connects to the neighbours of lower rank, and waits for those of higher rank.
    fn connect_to_neighbours(
        &self,
        root: &mut Link,
        listener: &TcpListener,
        members: &[Member],
    ) -> Result<BTreeMap<u32, Link>, NetError> {
        let neighbours = mesh::neighbours(self.rank, self.world_size);
        let own = &members[self.rank as usize];
        let mut links = BTreeMap::new();
        let mut pending = Vec::new();
        // The kernel of a neighbour completes a connection by itself, so no order can deadlock.
        for &rank in neighbours.range(..self.rank) {
            let member = &members[rank as usize];
            if member.listen.ip().is_loopback() && member.host != own.host {
                return Err(NetError::Unreachable {
                    rank,
                    address: member.listen.ip(),
                });
            }
            let stream = connect(member.listen, self.deadline)
                .map_err(|error| died(rank, format!("connecting to it failed: {error}")))?;
            pending.push(Pending::to(rank, self.rank, stream, self.id.key())?);
        }
        let mut root_speaks = true;
        while links.len() < neighbours.len() {
            self.accept(listener, &mut pending)?;
            let mut next = Vec::new();
            for mut connection in pending {
                match connection.step()? {
                    Progress::Waiting => next.push(connection),
                    Progress::Dropped => {}
                    Progress::Linked(rank) => {
                        let expected = connection.to == Some(rank)
                            || (connection.to.is_none()
                                && rank > self.rank
                                && neighbours.contains(&rank));
                        if expected && !links.contains_key(&rank) {
                            links
                                .insert(rank, Link::between_ranks(connection.stream, MAX_MESSAGE)?);
                        } else {
                            tracing::warn!(rank, "dropped an unexpected connection of a rank");
                        }
                    }
                }
            }
            pending = next;
            if links.len() == neighbours.len() {
                break;
            }
            if root_speaks {
                root_speaks = self.hear_root(root)?;
            }

            let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
            if root_speaks {
                fds.push(PollFd::new(&*root, PollFlags::IN));
            }
            fds.extend(
                pending
                    .iter()
                    .map(|p| PollFd::new(&p.stream, PollFlags::IN)),
            );
            let deadlines = pending.iter().filter_map(|p| p.deadline);
            let deadline = deadlines.fold(self.deadline, Instant::min);
            poll::until(&mut fds, deadline).map_err(|error| NetError::io("poll", error))?;
            if Instant::now() >= self.deadline {
                let missing = neighbours.iter().filter(|rank| !links.contains_key(rank));
                return Err(NetError::Timeout {
                    what: "connecting to the neighbours of this rank".to_owned(),
                    missing: missing.copied().collect(),
                });
            }
        }
        Ok(links)
    }

    /// Hears of ranks that were lost meanwhile; `false` when the rendezvous says no more.
    fn hear_root(&self, root: &mut Link) -> Result<bool, NetError> {
        let mut messages = Vec::new();
        let received = root.receive(&mut messages);
        for (kind, body) in messages {
            if let Answer::Broken(rank) = self.answer(kind, &body)? {
                return Err(lost_while_joining(rank));
            }
        }
        match received {
            Ok(()) => Ok(true),
            Err(_) => Ok(false),
        }
    }

    fn accept(&self, listener: &TcpListener, pending: &mut Vec<Pending>) -> Result<(), NetError> {
        while pending.len() < MAX_STRANGERS {
            match listener.accept() {
                Ok((stream, address)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        pending.push(Pending::from(address, self.rank, stream, self.id.key())?);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!(%error, "could not accept a connection");
                        // Out of descriptors: do not spin until some are free again.
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    break;
                }
            }
        }
        Ok(())
    }
}

/// A connection on which the secret is being proven.
struct Pending {
    stream: TcpStream,
    handshake: Handshake,
    address: SocketAddr,
    /// The rank that this one connected to; `None` for a connection that was accepted.
    to: Option<u32>,
    deadline: Option<Instant>,
}

enum Progress {
    Waiting,
    Dropped,
    Linked(u32),
}

impl Pending {
    fn to(rank: u32, own_rank: u32, stream: TcpStream, key: &Key) -> Result<Self, NetError> {
        let role = Role::Initiate {
            purpose: auth::MESH,
            own_rank,
            peer_rank: rank,
        };
        let address = stream
            .peer_addr()
            .unwrap_or(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        let handshake = Handshake::new(key, role)?;
        Ok(Self {
            stream,
            handshake,
            address,
            to: Some(rank),
            deadline: None,
        })
    }

    fn from(
        address: SocketAddr,
        own_rank: u32,
        stream: TcpStream,
        key: &Key,
    ) -> Result<Self, NetError> {
        let role = Role::Accept {
            purpose: auth::MESH,
            own_rank,
        };
        let handshake = Handshake::new(key, role)?;
        let deadline = Some(Instant::now() + PROOF);
        Ok(Self {
            stream,
            handshake,
            address,
            to: None,
            deadline,
        })
    }

    fn step(&mut self) -> Result<Progress, NetError> {
        let error = match self.handshake.step(&mut self.stream) {
            Step::Proven(rank) => return Ok(Progress::Linked(rank)),
            Step::Pending if self.deadline.is_some_and(|at| Instant::now() >= at) => {
                AuthError::Lost(io::ErrorKind::TimedOut.into())
            }
            Step::Pending => return Ok(Progress::Waiting),
            Step::Failed(error) => error,
        };
        match self.to {
            Some(rank) => Err(died(rank, error.to_string())),
            None => {
                tracing::warn!(address = %self.address, %error, "dropped a connection that does not belong to the job");
                Ok(Progress::Dropped)
            }
        }
    }
}

fn connect(address: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    TcpStream::connect_timeout(&address, left)
}

fn died(rank: u32, reason: String) -> NetError {
    NetError::PeerDied {
        rank,
        reason,
        during: "joining".to_owned(),
    }
}

fn lost_while_joining(rank: u32) -> NetError {
    died(
        rank,
        "it was lost before it was connected to its neighbours".to_owned(),
    )
}

/// The address of a member that is listed before its listener is known.
pub(crate) fn nowhere() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)
}
