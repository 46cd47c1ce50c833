//! How a rank joins: to the rendezvous, then to its neighbours.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::auth::{self, AuthError, Handshake, Key, Role, Step};
use crate::bind::Bind;
use crate::cancel::Cancel;
use crate::complaint::{self, Complaint};
use crate::error::{NetError, RankList, TurnedAway};
use crate::frame::{BUILD, FrameError, Kind, VERSION};
use crate::link::{Link, LinkError};
use crate::mesh;
use crate::message::{
    Answer, Control, Hello, MAX_MESSAGE, MAX_TABLE, Member, Message, Missing, to_vec,
};
use crate::poll;
use crate::root::MAX_REASON;
use crate::unique_id::UniqueId;

/// How long a connection to this rank's listener may take to prove the secret.
const PROOF: Duration = Duration::from_secs(2);
/// How often a connection is made, if it is lost during the proof: the other end gives up on one
/// that is slow, such as that of a process that was stopped meanwhile.
const ATTEMPTS: u32 = 3;
/// How long to wait before that.
const AGAIN: Duration = Duration::from_millis(20);
/// Connections to this rank's listener that have not proven anything.
const MAX_STRANGERS: usize = 256;

/// How a rank joins a group and watches over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinOptions {
    /// Where this rank's own socket listens for its neighbours; [`Bind::Loopback`] by default.
    pub bind: Bind,
    /// How often to tell neighbours that this rank is alive; every second by default.
    pub heartbeat: Duration,
    /// After how long a rank that is not heard is called silent, and any wait for others is
    /// reported; 30 seconds by default. Whatever is waited for goes on until its own deadline.
    pub silence_after: Duration,
    /// How long joining may take; 30 seconds by default.
    pub timeout: Duration,
    /// What ends joining from another thread; nothing by default.
    pub cancel: Option<Cancel>,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self {
            bind: Bind::Loopback,
            heartbeat: Duration::from_secs(1),
            silence_after: Duration::from_secs(30),
            timeout: Duration::from_secs(30),
            cancel: None,
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
    /// How long the rendezvous may take to prove the secret.
    pub(crate) patience: Duration,
    pub(crate) silence_after: Duration,
    pub(crate) cancel: Option<&'a Cancel>,
}

impl Joiner<'_> {
    /// `member` says everything about this rank but where `listener` listens.
    pub(crate) fn join(&self, bind: &Bind, member: Member) -> Result<Joined, NetError> {
        let mut root = self.connect_to_root()?;
        let mut links = BTreeMap::new();
        let joined = self.meet(&mut root, &mut links, bind, member);
        let members = joined.inspect_err(|error| self.tell(error, root, &mut links))?;
        Ok(Joined { links, members })
    }

    /// So that nobody takes a rank that gave up for one that died.
    fn tell(&self, error: &NetError, mut root: Link, links: &mut BTreeMap<u32, Link>) {
        // What comes first on a connection is what counts, so the reason goes out before it closes;
        // a connection that takes no more is one on which nobody listens.
        let told = match error {
            NetError::Aborted { by, reason, .. } if *by == self.rank => Some(reason.clone()),
            // From the rendezvous itself, or of a rank that may come again.
            NetError::Aborted { .. }
            | NetError::Refused { .. }
            | NetError::RanksMissing { .. }
            | NetError::RootLost { .. } => None,
            error => Some(error.to_string()),
        };
        if let Some(reason) = told {
            // No more than the rendezvous takes.
            let length = reason.floor_char_boundary(MAX_REASON);
            root.send(Kind::Abort, &reason.as_bytes()[..length]);
            let _ = root.flush();
        }
        let (by, reason) = (self.rank, error.to_string());
        let (kind, body) = Message::Control(Control::Aborted { by, reason }).encode();
        for link in links.values_mut() {
            link.send(kind, &body);
            let _ = link.flush();
        }
    }

    fn meet(
        &self,
        root: &mut Link,
        links: &mut BTreeMap<u32, Link>,
        bind: &Bind,
        mut member: Member,
    ) -> Result<Vec<Member>, NetError> {
        let (listener, listen) = bind.listen(0)?;
        member.listen = listen;
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
                build: BUILD.to_owned(),
                rank,
                world_size,
                member,
            }),
        );
        let members = self.wait_for_table(root)?;
        self.connect_to_neighbours(root, &listener, &members, links)?;
        root.send(Kind::Ready, &[]);
        // A rendezvous that is gone by now has nothing more to say.
        let _ = root.flush();
        Ok(members)
    }

    /// Until one of `fds` is ready, or `deadline`; an error if joining was cancelled.
    fn poll<'a>(&'a self, mut fds: Vec<PollFd<'a>>, deadline: Instant) -> Result<(), NetError> {
        fds.extend(self.cancel.map(|cancel| PollFd::new(cancel, PollFlags::IN)));
        poll::until(&mut fds, deadline).map_err(|error| NetError::io("poll", error))?;
        Cancel::check(self.cancel, self.rank)
    }

    /// Connects, or says why that cannot be; an error of its own only if joining was cancelled, or this
    /// process cannot have a socket, which says nothing about the other end.
    fn connect(
        &self,
        address: SocketAddr,
        deadline: Instant,
    ) -> Result<io::Result<TcpStream>, NetError> {
        let socket = new_socket(address).map_err(|error| {
            let what = format!("creating a socket to connect to {address}");
            NetError::io(what, io::Error::new(error.kind(), complaint::words(&error)))
        })?;
        if let Err(error) = begin_to_connect(&socket, address) {
            return Ok(Err(error));
        }
        loop {
            self.poll(vec![PollFd::new(&socket, PollFlags::OUT)], deadline)?;
            match socket.take_error() {
                Ok(None) if socket.peer_addr().is_ok() => return Ok(Ok(socket.into())),
                // Whatever woke it, it was not that.
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) => return Ok(Err(io::ErrorKind::TimedOut.into())),
                Ok(Some(error)) | Err(error) => return Ok(Err(error)),
            }
        }
    }

    fn connect_to_root(&self) -> Result<Link, NetError> {
        let deadline = self
            .deadline
            .min(poll::after(Instant::now(), self.patience));
        let mut attempts = 1;
        loop {
            match self.try_root(deadline) {
                Err(NetError::RootLost { .. })
                    if attempts < ATTEMPTS && Instant::now() < deadline =>
                {
                    attempts += 1;
                    self.poll(Vec::new(), deadline.min(Instant::now() + AGAIN))?;
                }
                result => return result,
            }
        }
    }

    fn try_root(&self, deadline: Instant) -> Result<Link, NetError> {
        let address = self.id.address();
        let lost = |reason: String| NetError::RootLost { address, reason };
        let connected = self.connect(address, deadline)?;
        let mut stream = connected.map_err(|error| lost(error.to_string()))?;
        let role = Role::Initiate {
            purpose: auth::RENDEZVOUS,
            own_rank: self.rank,
            peer_rank: auth::ROOT,
        };
        let mut handshake = Handshake::new(self.id.key(), role)?;
        loop {
            match handshake.step(&mut stream) {
                Step::Proven(_) => return Link::new(stream, MAX_TABLE),
                Step::Pending if Instant::now() >= deadline => {
                    return Err(lost("it did not prove the secret in time".to_owned()));
                }
                Step::Pending => {
                    self.poll(vec![PollFd::new(&stream, PollFlags::IN)], deadline)?;
                }
                // A rendezvous of another secret closes the connection; so does one that is ending.
                Step::Failed(AuthError::Lost(error)) => {
                    return Err(lost(format!(
                        "it closed the connection during the proof ({error})"
                    )));
                }
                Step::Failed(error) => return Err(error.at(&address.to_string())),
            }
        }
    }

    fn wait_for_table(&self, root: &mut Link) -> Result<Vec<Member>, NetError> {
        let address = self.id.address();
        let (mut waiting, mut table) = (None, None);
        let report_at = poll::after(Instant::now(), self.silence_after);
        let mut reported = false;
        loop {
            let mut messages = Vec::new();
            let received = root.flush().and_then(|()| root.receive(&mut messages));
            for (kind, body) in messages {
                match self.answer(kind, &body)? {
                    Answer::Waiting(missing) => waiting = Some(missing),
                    Answer::Table(members) if members.len() == self.world_size as usize => {
                        // What came right behind it is heard first: a rank may be lost by now.
                        table = Some(members);
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
                    Answer::Missing(missing) => return Err(missing.into_error()),
                    Answer::Broken(rank) => return Err(lost_while_joining(rank)),
                    Answer::Aborted { by, reason } => {
                        return Err(aborted_while_joining(by, reason));
                    }
                }
            }
            if let Some(members) = table {
                return Ok(members);
            }
            if let Err(LinkError::Frame(error @ FrameError::Version(_))) = received {
                return Err(NetError::Protocol {
                    address: address.to_string(),
                    reason: error.to_string(),
                });
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
            let until = if reported { self.deadline } else { report_at };
            self.poll(
                vec![PollFd::new(&*root, PollFlags::IN | flags)],
                until.min(self.deadline),
            )?;
            let now = Instant::now();
            if now >= report_at && !reported {
                reported = true;
                let missing = waiting.as_ref().map_or(&[][..], |waiting| &waiting.missing);
                tracing::warn!(
                    "rank {} has waited {:?} for {} to join",
                    self.rank,
                    self.silence_after,
                    RankList(missing)
                );
            }
            if now >= self.deadline {
                let mut missing = waiting.unwrap_or_else(|| Missing {
                    missing: Vec::new(),
                    joined: self.world_size,
                    world_size: self.world_size,
                    after_ms: 0,
                    turned_away: TurnedAway::default(),
                });
                missing.after_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(missing.into_error());
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
        links: &mut BTreeMap<u32, Link>,
    ) -> Result<(), NetError> {
        let neighbours = mesh::neighbours(self.rank, self.world_size);
        let own = &members[self.rank as usize];
        let report_at = poll::after(Instant::now(), self.silence_after);
        let mut reported = false;
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
            let stream = self
                .connect(member.listen, self.deadline)?
                .map_err(|error| died(rank, format!("connecting to it failed: {error}")))?;
            pending.push(Pending::to(rank, self.rank, stream, self.id.key())?);
        }
        let (mut root_speaks, mut complaint) = (true, Complaint::default());
        while links.len() < neighbours.len() {
            self.accept(listener, &mut pending, &mut complaint)?;
            let mut next = Vec::new();
            for mut connection in pending {
                match connection.step()? {
                    Progress::Waiting => next.push(connection),
                    Progress::Dropped => {}
                    Progress::Again { rank, attempts } => {
                        let stream = self.connect(members[rank as usize].listen, self.deadline)?;
                        let stream = stream.map_err(|error| {
                            died(rank, format!("connecting to it again failed: {error}"))
                        })?;
                        let again = Pending::to(rank, self.rank, stream, self.id.key())?;
                        next.push(Pending { attempts, ..again });
                    }
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
            let report = (!reported).then_some(report_at);
            let deadline = deadlines.chain(report).fold(self.deadline, Instant::min);
            self.poll(fds, deadline)?;
            let now = Instant::now();
            let missing = || -> Vec<u32> {
                let missing = neighbours.iter().filter(|rank| !links.contains_key(rank));
                missing.copied().collect()
            };
            if now >= self.deadline {
                let what = "connecting to the neighbours of this rank";
                return Err(NetError::timeout(what, missing()));
            }
            if now >= report_at && !reported {
                reported = true;
                tracing::warn!(
                    "rank {} has waited {:?} to be connected with {}; are they busy, or stopped?",
                    self.rank,
                    self.silence_after,
                    RankList(&missing())
                );
            }
        }
        Ok(())
    }

    /// Hears of ranks that were lost meanwhile; `false` when the rendezvous says no more.
    fn hear_root(&self, root: &mut Link) -> Result<bool, NetError> {
        let mut messages = Vec::new();
        let received = root.receive(&mut messages);
        for (kind, body) in messages {
            match self.answer(kind, &body)? {
                Answer::Broken(rank) => return Err(lost_while_joining(rank)),
                Answer::Aborted { by, reason } => return Err(aborted_while_joining(by, reason)),
                _ => {}
            }
        }
        match received {
            Ok(()) => Ok(true),
            Err(_) => Ok(false),
        }
    }

    fn accept(
        &self,
        listener: &TcpListener,
        pending: &mut Vec<Pending>,
        complaint: &mut Complaint,
    ) -> Result<(), NetError> {
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
                        if let Some(words) = complaint.of(&error, Instant::now()) {
                            tracing::warn!("could not accept a connection: {words}");
                        }
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
    /// How often it has been made, this time included.
    attempts: u32,
}

enum Progress {
    Waiting,
    Dropped,
    /// It is to be made again.
    Again {
        rank: u32,
        attempts: u32,
    },
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
            attempts: 1,
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
            attempts: 1,
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
            Some(rank) if matches!(error, AuthError::Lost(_)) && self.attempts < ATTEMPTS => {
                Ok(Progress::Again {
                    rank,
                    attempts: self.attempts + 1,
                })
            }
            Some(rank) => Err(died(rank, error.to_string())),
            None => {
                tracing::warn!(address = %self.address, %error, "dropped a connection that does not belong to the job");
                Ok(Progress::Dropped)
            }
        }
    }
}

/// A socket with which to connect to `address`.
fn new_socket(address: SocketAddr) -> io::Result<socket2::Socket> {
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The socket can be written once it is connected.
fn begin_to_connect(socket: &socket2::Socket, address: SocketAddr) -> io::Result<()> {
    match socket.connect(&address.into()) {
        Err(error)
            if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
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
        "it was lost before all ranks were connected".to_owned(),
    )
}

fn aborted_while_joining(by: u32, reason: String) -> NetError {
    NetError::Aborted {
        by,
        reason,
        during: "joining".to_owned(),
    }
}

/// The address of a member that is listed before its listener is known.
pub(crate) fn nowhere() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::process::Command;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;
    use crate::frame::encode;
    use crate::host::HostId;
    use crate::id_exchange::{from_socket, socket_name};
    use crate::launch::join_by_name;
    use crate::rendezvous::RendezvousOptions;

    /// Both ends of a connection on loopback.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn wire(answer: &Answer) -> Vec<u8> {
        let (kind, body) = answer.encode();
        encode(kind, &body).flatten().collect()
    }

    /// Calls `act` on rank 1 of 2, which has a while for it.
    fn joining<T>(id: &UniqueId, act: impl FnOnce(Joiner<'_>) -> T) -> T {
        let timeout = Duration::from_secs(20);
        act(Joiner {
            id,
            rank: 1,
            world_size: 2,
            deadline: Instant::now() + timeout,
            timeout,
            patience: timeout,
            silence_after: timeout,
            cancel: None,
        })
    }

    fn member(listen: SocketAddr) -> Member {
        Member {
            listen,
            host: HostId::of_this_process().unwrap(),
            pid: 1,
            fd_socket: [0; 8],
        }
    }

    #[test]
    fn what_comes_right_behind_the_table_is_heard() {
        let table = Answer::Table(vec![member(nowhere()), member(nowhere())]);
        let aborted = Answer::Aborted {
            by: 0,
            reason: "enough".to_owned(),
        };
        for answers in [&[][..], &[Answer::Broken(0)], &[aborted]] {
            let (near, mut far) = pair();
            let mut bytes = wire(&table);
            bytes.extend(answers.iter().flat_map(wire));
            far.write_all(&bytes).unwrap();
            let mut root = Link::new(near, MAX_TABLE).unwrap();
            let id = UniqueId::generate(nowhere()).unwrap();
            let result = joining(&id, |joiner| joiner.wait_for_table(&mut root));
            match (answers.first(), result) {
                (None, Ok(members)) => assert_eq!(members.len(), 2),
                (Some(Answer::Broken(_)), Err(NetError::PeerDied { rank: 0, .. })) => {}
                (Some(Answer::Aborted { .. }), Err(NetError::Aborted { by: 0, .. })) => {}
                (answer, result) => panic!("{answer:?}: {result:?}"),
            }
        }
    }

    const CHILD: &str = "CROSSWEFT_TEST_CHILD";

    /// In a process of its own, which has all the open files that it may.
    #[test]
    fn a_rank_without_a_socket_blames_nobody_and_says_why() {
        if std::env::var(CHILD).is_err() {
            let name = "join::tests::a_rank_without_a_socket_blames_nobody_and_says_why";
            let child = Command::new(std::env::current_exe().unwrap())
                .args([name, "--exact", "--nocapture"])
                .env(CHILD, "")
                .status();
            assert!(child.unwrap().success());
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (near, far) = pair();
        let [mut root, mut far] = [near, far].map(|end| Link::new(end, MAX_TABLE).unwrap());
        // Rank 0 is well: it listens.
        let members = [listener.local_addr().unwrap(), nowhere()].map(member);
        let limit = getrlimit(Resource::Nofile);
        let none = Rlimit {
            current: Some(0),
            ..limit
        };
        let id = UniqueId::generate(nowhere()).unwrap();
        let reason = joining(&id, |joiner| {
            let mut links = BTreeMap::new();
            setrlimit(Resource::Nofile, none).unwrap();
            let result = joiner.connect_to_neighbours(&mut root, &listener, &members, &mut links);
            setrlimit(Resource::Nofile, limit).unwrap();
            let error = result.unwrap_err();
            joiner.tell(&error, root, &mut links);
            assert!(matches!(error, NetError::Io { .. }), "{error}");
            error.to_string()
        });
        for words in ["creating a socket", "ulimit -n"] {
            assert!(reason.contains(words), "{reason}");
        }
        let mut heard = Vec::new();
        while far.receive(&mut heard).is_ok() {}
        assert_eq!(heard, [(Kind::Abort, reason.into_bytes())]);
    }

    /// Rank 1 is connected to rank 0, but never says so.
    #[test]
    fn a_rank_0_that_waits_for_the_others_can_be_cancelled() {
        let name = format!("never ready {}", std::process::id());
        let (cancel, started) = (Cancel::new().unwrap(), Instant::now());
        std::thread::scope(|scope| {
            let rank_0 = scope.spawn(|| {
                let options = JoinOptions {
                    cancel: Some(cancel.clone()),
                    ..JoinOptions::default()
                };
                join_by_name(&name, (0, 2), &options, &RendezvousOptions::default()).unwrap_err()
            });
            let soon = started + Duration::from_secs(20);
            let id = from_socket(&socket_name(&name), 1, None, soon).unwrap();
            let error = joining(&id, |joiner| {
                let (listener, listen) = Bind::Loopback.listen(0).unwrap();
                let mut root = joiner.connect_to_root().unwrap();
                let hello = Hello {
                    version: VERSION,
                    build: BUILD.to_owned(),
                    rank: 1,
                    world_size: 2,
                    member: member(listen),
                };
                root.send(Kind::Hello, &to_vec(&hello));
                let members = joiner.wait_for_table(&mut root).unwrap();
                let mut links = BTreeMap::new();
                joiner
                    .connect_to_neighbours(&mut root, &listener, &members, &mut links)
                    .unwrap();
                std::thread::sleep(Duration::from_millis(200));
                cancel.cancel("enough");
                loop {
                    poll::readable(root.as_fd(), soon).unwrap();
                    match joiner.hear_root(&mut root) {
                        Ok(speaks) => assert!(speaks && Instant::now() < soon),
                        Err(error) => break error,
                    }
                }
            });
            for error in [error, rank_0.join().unwrap()] {
                assert!(
                    matches!(&error, NetError::Aborted { by: 0, reason, .. } if reason == "enough"),
                    "{error}"
                );
            }
        });
        assert!(started.elapsed() < Duration::from_secs(15));
    }
}
