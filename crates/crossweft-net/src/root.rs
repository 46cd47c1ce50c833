//! The rendezvous as a state machine: connections and bytes in, bytes and a verdict out.
//!
//! A client proves the secret, says hello, waits for the table of all ranks, connects to its
//! neighbours, and says that it is ready. Rank 0 decides how large the world is; whoever came before
//! it with another opinion is refused when it comes. A client that is lost before the table may come
//! again at once; one that is lost for longer, or after it, breaks the group, and the others are
//! told.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::auth::{self, Handshake, Key, Role, Step};
use crate::error::{NetError, RankList, TurnedAway, out_of_world};
use crate::frame::{BUILD, Decoder, Kind, VERSION, encode};
use crate::message::{Answer, Hello, MAX_WORLD_SIZE, Member, Missing, from_slice};

/// How long a connection may take to prove the secret and say hello.
const GREETING: Duration = Duration::from_secs(2);
/// Connections that have not proven anything; the oldest go first.
const MAX_STRANGERS: usize = 1024;
/// The longest hello.
const MAX_HELLO: usize = 4096;
/// How long a detached rendezvous waits for the first rank, if not longer for all of them.
const UNUSED: Duration = Duration::from_secs(3600);
/// How long a rank that is lost before the table may take to come again.
const RETURN: Duration = Duration::from_secs(3);
/// Ranks whose refusals are remembered.
const MAX_REFUSED: usize = 16;
/// The longest reason passed on.
pub(crate) const MAX_REASON: usize = 1024;
/// How often joiners are told who is missing.
const TELL: Duration = Duration::from_secs(1);
/// How often the log says who is missing.
const LOG: Duration = Duration::from_secs(5);
/// Strangers that are logged one by one.
const LOGGED_STRANGERS: u64 = 10;

/// Names a connection.
pub(crate) type Client = u64;

#[derive(Debug)]
pub(crate) struct Root {
    key: Key,
    started: Instant,
    /// When the first rank joined.
    first: Option<Instant>,
    timeout: Duration,
    detached: bool,
    connections: BTreeMap<Client, Connection>,
    /// By opinion about the world size, then by rank.
    joined: BTreeMap<(u32, u32), Joined>,
    /// Ranks that had joined and were lost, and when.
    lost: BTreeMap<(u32, u32), Instant>,
    refused: BTreeMap<u32, RefuseReason>,
    stage: Stage,
    tell_at: Instant,
    log_at: Instant,
    strangers: u64,
    outputs: VecDeque<RootOutput>,
}

/// What the driver is to do.
#[derive(Debug)]
pub(crate) enum RootOutput {
    Send {
        client: Client,
        bytes: Vec<u8>,
    },
    /// Close once everything is sent and read.
    Close(Client),
    /// Close at once.
    Drop(Client),
    Finished(Result<(), NetError>),
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Gathering,
    Connecting,
    Finished,
}

struct Connection {
    address: SocketAddr,
    since: Instant,
    phase: Phase,
}

enum Phase {
    Proving(Box<Handshake>),
    Greeting(u32, Decoder),
    Joined {
        world_size: u32,
        rank: u32,
        decoder: Decoder,
    },
}

#[derive(Debug)]
struct Joined {
    client: Client,
    member: Member,
    ready: bool,
}

impl Root {
    pub(crate) fn new(key: Key, timeout: Duration, now: Instant) -> Self {
        Self {
            key,
            started: now,
            first: None,
            timeout,
            detached: false,
            connections: BTreeMap::new(),
            joined: BTreeMap::new(),
            lost: BTreeMap::new(),
            refused: BTreeMap::new(),
            stage: Stage::Gathering,
            tell_at: now + TELL,
            log_at: now + LOG,
            strangers: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Nobody waits for it but those who join.
    pub(crate) fn detach(&mut self) {
        self.detached = true;
    }

    /// Since when it waits, and for how long.
    fn patience(&self) -> (Instant, Duration) {
        match self.first {
            _ if !self.detached => (self.started, self.timeout),
            Some(first) => (first, self.timeout),
            None => (self.started, self.timeout.max(UNUSED)),
        }
    }

    /// Somebody connected.
    pub(crate) fn connected(
        &mut self,
        client: Client,
        address: SocketAddr,
        now: Instant,
    ) -> Result<(), NetError> {
        let role = Role::Accept {
            purpose: auth::RENDEZVOUS,
            own_rank: auth::ROOT,
        };
        let phase = Phase::Proving(Box::new(Handshake::new(&self.key, role)?));
        self.connections.insert(
            client,
            Connection {
                address,
                since: now,
                phase,
            },
        );
        let mut strangers = self
            .connections
            .iter()
            .filter(|(_, connection)| !matches!(connection.phase, Phase::Joined { .. }));
        if strangers.clone().count() > MAX_STRANGERS
            && let Some((&oldest, _)) = strangers.next()
        {
            self.drop_stranger(oldest, "too many connections prove nothing");
        }
        Ok(())
    }

    /// Bytes came.
    pub(crate) fn received(&mut self, client: Client, mut bytes: &[u8], now: Instant) {
        while !bytes.is_empty() {
            let Some(connection) = self.connections.get_mut(&client) else {
                return;
            };
            match &mut connection.phase {
                Phase::Proving(handshake) => {
                    let (part, rest) = bytes.split_at(handshake.wanted().min(bytes.len()));
                    bytes = rest;
                    let step = handshake.receive(part);
                    let output = handshake.take_output();
                    if !output.is_empty() {
                        self.outputs.push_back(RootOutput::Send {
                            client,
                            bytes: output,
                        });
                    }
                    match step {
                        Step::Pending => {}
                        Step::Proven(rank) => {
                            connection.phase = Phase::Greeting(rank, Decoder::new(MAX_HELLO));
                        }
                        Step::Failed(error) => {
                            return self.drop_stranger(client, &error.to_string());
                        }
                    }
                }
                Phase::Greeting(rank, decoder) => {
                    decoder.feed(std::mem::take(&mut bytes));
                    let rank = *rank;
                    match decoder.next_message() {
                        Ok(None) => {}
                        Ok(Some((Kind::Hello, body))) => {
                            self.hello(client, rank, &body, now);
                            // It may have said more, and nothing else will come.
                            self.hear(client, now);
                        }
                        // It could not even listen.
                        Ok(Some((Kind::Abort, reason))) => self.abort(rank, &reason),
                        // The version is in every frame: a joiner of another one deserves an answer.
                        Err(crate::frame::FrameError::Version(theirs)) => {
                            self.refuse(
                                client,
                                rank,
                                RefuseReason::Version {
                                    theirs,
                                    ours: VERSION,
                                },
                            );
                        }
                        Ok(Some(_)) | Err(_) => self.drop_stranger(client, "it did not say hello"),
                    }
                }
                Phase::Joined { decoder, .. } => {
                    decoder.feed(std::mem::take(&mut bytes));
                    self.hear(client, now);
                }
            }
        }
    }

    /// Takes in what a rank that has joined has said.
    fn hear(&mut self, client: Client, now: Instant) {
        while let Some(connection) = self.connections.get_mut(&client)
            && let Phase::Joined {
                world_size,
                rank,
                decoder,
            } = &mut connection.phase
        {
            let member = (*world_size, *rank);
            match decoder.next_message() {
                Ok(Some((Kind::Ready, _))) => self.ready(member),
                Ok(Some((Kind::Abort, reason))) => self.abort(member.1, &reason),
                Ok(None) => return,
                Ok(Some(_)) | Err(_) => {
                    self.outputs.push_back(RootOutput::Drop(client));
                    self.lost(client, now);
                }
            }
        }
    }

    /// A connection ended.
    pub(crate) fn lost(&mut self, client: Client, now: Instant) {
        let Some(connection) = self.connections.get(&client) else {
            return;
        };
        let (world_size, rank) = match &connection.phase {
            Phase::Joined {
                world_size, rank, ..
            } => (*world_size, *rank),
            // One that sent nothing only looked whether somebody listens.
            Phase::Proving(handshake) if !handshake.has_begun() => {
                self.connections.remove(&client);
                return;
            }
            Phase::Proving(_) | Phase::Greeting(..) => {
                return self.drop_stranger(client, "it hung up; does it have another secret?");
            }
        };
        self.connections.remove(&client);
        match self.stage {
            Stage::Gathering => {
                tracing::warn!(
                    rank,
                    "a rank that had joined was lost while others are missing"
                );
                self.joined.remove(&(world_size, rank));
                self.lost.insert((world_size, rank), now);
            }
            Stage::Connecting => {
                if self
                    .joined
                    .get(&(world_size, rank))
                    .is_some_and(|joined| !joined.ready)
                {
                    self.broken(rank);
                }
            }
            Stage::Finished => {}
        }
    }

    /// Without this rank there is no group.
    fn broken(&mut self, rank: u32) {
        self.answer_all(&Answer::Broken(rank));
        self.finish(Err(NetError::PeerDied {
            rank,
            reason: "its connection to the rendezvous closed".to_owned(),
            during: "joining".to_owned(),
        }));
    }

    /// A joining rank was told to give up, and with it the others.
    pub(crate) fn abort(&mut self, by: u32, reason: &[u8]) {
        if self.stage == Stage::Finished {
            return;
        }
        let reason = String::from_utf8_lossy(&reason[..reason.len().min(MAX_REASON)]).into_owned();
        self.answer_all(&Answer::Aborted {
            by,
            reason: reason.clone(),
        });
        self.finish(Err(NetError::Aborted {
            by,
            reason,
            during: "joining".to_owned(),
        }));
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Instant) {
        let slow: Vec<Client> = self
            .connections
            .iter()
            .filter(|(_, connection)| !matches!(connection.phase, Phase::Joined { .. }))
            .filter(|(_, connection)| now.saturating_duration_since(connection.since) >= GREETING)
            .map(|(&client, _)| client)
            .collect();
        for client in slow {
            self.drop_stranger(client, "it took too long to prove the secret");
        }
        if self.stage == Stage::Finished {
            self.log_at = now + LOG;
            return;
        }
        let (since, limit) = self.patience();
        let waited = now.saturating_duration_since(since);
        if waited >= limit {
            return self.give_up(waited);
        }
        let gone = |(_, at): &(&_, &Instant)| now.saturating_duration_since(**at) >= RETURN;
        if self.stage == Stage::Gathering
            && let Some((&(_, rank), _)) = self.lost.iter().find(gone)
        {
            return self.broken(rank);
        }
        if now >= self.log_at {
            self.log_at = now + LOG;
            self.log_waiting();
        }
        if now >= self.tell_at && self.stage == Stage::Gathering {
            self.tell_at = now + TELL;
            self.answer_all(&Answer::Waiting(self.missing(waited)));
        }
    }

    /// When [`tick`](Self::tick) wants to be called next; what has passed by then is not asked for
    /// again, or the driver would never rest.
    pub(crate) fn next_tick(&self) -> Instant {
        let greetings = self
            .connections
            .values()
            .filter(|connection| !matches!(connection.phase, Phase::Joined { .. }))
            .map(|connection| connection.since + GREETING);
        let gathering = self.stage == Stage::Gathering;
        let returns = self.lost.values().map(|&at| at + RETURN);
        let returns = returns.chain([self.tell_at]).filter(|_| gathering);
        let (since, limit) = self.patience();
        let end = since.checked_add(limit);
        let end = end.filter(|_| self.stage != Stage::Finished);
        greetings
            .chain(returns)
            .chain(end)
            .fold(self.log_at, Instant::min)
    }

    pub(crate) fn pop_output(&mut self) -> Option<RootOutput> {
        self.outputs.pop_front()
    }

    fn hello(&mut self, client: Client, proven: u32, body: &[u8], now: Instant) {
        let Ok(Hello {
            version,
            build,
            rank,
            world_size,
            member,
        }) = from_slice(body)
        else {
            return self.drop_stranger(client, "its hello could not be read");
        };
        let decided = self.world_size();
        let refusal = if version != VERSION {
            Some(RefuseReason::Version {
                theirs: version,
                ours: VERSION,
            })
        } else if build != BUILD {
            Some(RefuseReason::Build {
                theirs: build,
                ours: BUILD.to_owned(),
            })
        } else if proven != rank || rank >= world_size || world_size > MAX_WORLD_SIZE {
            Some(RefuseReason::RankOutOfRange { rank, world_size })
        } else if decided.is_some_and(|decided| decided != world_size) {
            Some(RefuseReason::WorldSize {
                theirs: world_size,
                ours: decided.unwrap_or(0),
            })
        } else if self.stage != Stage::Gathering || self.joined.contains_key(&(world_size, rank)) {
            Some(RefuseReason::DuplicateRank { rank })
        } else {
            None
        };
        if let Some(reason) = refusal {
            return self.refuse(client, proven, reason);
        }
        self.first.get_or_insert(now);
        self.refused.remove(&rank);
        self.lost.retain(|lost, _| lost.1 != rank);

        if let Some(connection) = self.connections.get_mut(&client)
            && let Phase::Greeting(_, decoder) = &mut connection.phase
        {
            let decoder = std::mem::replace(decoder, Decoder::new(0));
            connection.phase = Phase::Joined {
                world_size,
                rank,
                decoder,
            };
        }
        self.joined.insert(
            (world_size, rank),
            Joined {
                client,
                member,
                ready: false,
            },
        );
        if rank == 0 {
            // Of another world, they are missed by nobody.
            self.lost.retain(|lost, _| lost.0 == world_size);
            let wrong: Vec<_> = self
                .joined
                .keys()
                .filter(|key| key.0 != world_size)
                .copied()
                .collect();
            for key in wrong {
                if let Some(joined) = self.joined.remove(&key) {
                    let reason = RefuseReason::WorldSize {
                        theirs: key.0,
                        ours: world_size,
                    };
                    self.refuse(joined.client, key.1, reason);
                }
            }
        }
        // Only with rank 0 is the world size decided, and the group complete.
        if self
            .world_size()
            .is_some_and(|size| self.joined.len() == size as usize)
        {
            let members = self
                .joined
                .values()
                .map(|joined| joined.member.clone())
                .collect();
            self.stage = Stage::Connecting;
            self.answer_all(&Answer::Table(members));
            tracing::debug!(world_size, "all ranks have joined");
        } else {
            // So that a joiner whose own deadline comes first can say who was missing.
            self.tell_at = self.tell_at.min(now + Duration::from_millis(50));
        }
    }

    fn ready(&mut self, member: (u32, u32)) {
        let Some(joined) = self.joined.get_mut(&member) else {
            return;
        };
        joined.ready = true;
        if self.stage == Stage::Connecting && self.joined.values().all(|joined| joined.ready) {
            self.finish(Ok(()));
        }
    }

    fn give_up(&mut self, after: Duration) {
        if self.stage == Stage::Connecting {
            // Which of them keeps the others waiting is theirs to say, at their own deadlines.
            let missing = self.unready();
            let what = "connecting the ranks to each other";
            return self.finish(Err(NetError::timeout(what, missing)));
        }
        if self.joined.is_empty() {
            let turned_away = Box::new(self.turned_away());
            return self.finish(Err(NetError::NobodyJoined { after, turned_away }));
        }
        let missing = self.missing(after);
        self.answer_all(&Answer::Missing(missing.clone()));
        self.finish(Err(missing.into_error()));
    }

    fn finish(&mut self, result: Result<(), NetError>) {
        self.stage = Stage::Finished;
        if self.strangers > 0 {
            tracing::info!(self.strangers, "connections that did not belong to the job");
        }
        for (&client, connection) in &self.connections {
            self.outputs.push_back(match connection.phase {
                Phase::Joined { .. } => RootOutput::Close(client),
                Phase::Proving(_) | Phase::Greeting(..) => RootOutput::Drop(client),
            });
        }
        self.outputs.push_back(RootOutput::Finished(result));
    }

    fn answer_all(&mut self, answer: &Answer) {
        let bytes = wire(answer);
        for joined in self.joined.values() {
            let bytes = bytes.clone();
            self.outputs.push_back(RootOutput::Send {
                client: joined.client,
                bytes,
            });
        }
    }

    fn refuse(&mut self, client: Client, rank: u32, reason: RefuseReason) {
        if let Some(connection) = self.connections.remove(&client) {
            tracing::warn!(address = %connection.address, "refused rank {rank}: {reason}");
        }
        if self.refused.len() < MAX_REFUSED || self.refused.contains_key(&rank) {
            self.refused.insert(rank, reason.clone());
        }
        let bytes = wire(&Answer::Refuse(reason));
        self.outputs.push_back(RootOutput::Send { client, bytes });
        self.outputs.push_back(RootOutput::Close(client));
    }

    fn drop_stranger(&mut self, client: Client, reason: &str) {
        let Some(connection) = self.connections.remove(&client) else {
            return;
        };
        self.strangers += 1;
        if self.strangers <= LOGGED_STRANGERS {
            tracing::warn!(address = %connection.address, reason, "dropped a connection that does not belong to the job");
        }
        self.outputs.push_back(RootOutput::Drop(client));
    }

    fn log_waiting(&self) {
        let missing = match self.stage {
            Stage::Connecting => self.unready(),
            Stage::Gathering | Stage::Finished => self.absent(),
        };
        if self.joined.is_empty() {
            tracing::info!("waiting for ranks, none has joined yet");
        } else {
            tracing::info!("waiting for {}", RankList(&missing));
        }
    }

    /// Ranks that have joined but are not yet connected to their neighbours.
    fn unready(&self) -> Vec<u32> {
        let waiting = self.joined.iter().filter(|(_, joined)| !joined.ready);
        waiting.map(|(key, _)| key.1).collect()
    }

    /// Ranks that have not joined.
    fn absent(&self) -> Vec<u32> {
        let size = self.likely_world_size().unwrap_or(0);
        (0..size)
            .filter(|&rank| !self.joined.contains_key(&(size, rank)))
            .collect()
    }

    /// Who has not joined, and what may be the reason.
    fn missing(&self, after: Duration) -> Missing {
        let missing = self.absent();
        let world_size = self.likely_world_size().unwrap_or(0);
        let absent = u32::try_from(missing.len()).unwrap_or(u32::MAX);
        Missing {
            joined: world_size.saturating_sub(absent),
            missing,
            world_size,
            after_ms: u64::try_from(after.as_millis()).unwrap_or(u64::MAX),
            turned_away: self.turned_away(),
        }
    }

    fn turned_away(&self) -> TurnedAway {
        TurnedAway {
            refused: self.refused.clone().into_iter().collect(),
            strangers: self.strangers,
        }
    }

    /// The size that rank 0 has, once it is here.
    fn world_size(&self) -> Option<u32> {
        self.joined.keys().find(|key| key.1 == 0).map(|key| key.0)
    }

    /// Without rank 0, the size that most ranks have.
    fn likely_world_size(&self) -> Option<u32> {
        let mut votes = BTreeMap::<u32, u32>::new();
        self.joined
            .keys()
            .for_each(|key| *votes.entry(key.0).or_default() += 1);
        let most = votes.into_iter().max_by_key(|&(_, votes)| votes);
        self.world_size().or(most.map(|(size, _)| size))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

fn wire(answer: &Answer) -> Vec<u8> {
    let (kind, body) = answer.encode();
    encode(kind, &body).flatten().collect()
}

/// Why the rendezvous refuses a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RefuseReason {
    /// Somebody else has this rank.
    DuplicateRank {
        /// The rank.
        rank: u32,
    },
    /// There is no such rank.
    RankOutOfRange {
        /// The rank.
        rank: u32,
        /// The world size that it came with.
        world_size: u32,
    },
    /// It is another version of crossweft, which may speak otherwise in the layers above.
    Build {
        /// Its version.
        theirs: String,
        /// The version of the rendezvous.
        ours: String,
    },
    /// It speaks another version of the protocol.
    Version {
        /// Its version.
        theirs: u16,
        /// The version of the rendezvous.
        ours: u16,
    },
    /// It has another idea of how many ranks there are.
    WorldSize {
        /// Its idea.
        theirs: u32,
        /// That of rank 0.
        ours: u32,
    },
}

impl fmt::Display for RefuseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DuplicateRank { rank } => {
                write!(
                    f,
                    "rank {rank} has joined already; give every process its own rank"
                )
            }
            Self::RankOutOfRange { rank, world_size } => {
                write!(f, "{}", out_of_world(*rank, *world_size))
            }
            Self::Build { theirs, ours } => write!(
                f,
                "it is crossweft {theirs} but the rendezvous {ours}; install the same everywhere"
            ),
            Self::Version { theirs, ours } => write!(
                f,
                "it speaks protocol version {theirs} but the rendezvous speaks {ours}; install the same crossweft everywhere"
            ),
            Self::WorldSize { theirs, ours } => write!(
                f,
                "it was started with world size {theirs} but rank 0 with {ours}; start all ranks with the same"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::host::HostId;
    use crate::message::to_vec;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// A root and its clients, without sockets.
    struct Simulator {
        root: Root,
        key: Key,
        now: Instant,
        build: String,
        /// What joiners say right behind their hello.
        after_hello: Vec<u8>,
        clients: BTreeMap<Client, Joiner>,
        closed: Vec<Client>,
        verdict: Option<Result<(), NetError>>,
    }

    struct Joiner {
        handshake: Handshake,
        hello: Vec<u8>,
        decoder: Decoder,
        answers: Vec<Answer>,
    }

    impl Simulator {
        fn new() -> Self {
            let key = Key::new([9; 16]);
            let now = Instant::now();
            let root = Root::new(key.clone(), TIMEOUT, now);
            let (clients, closed) = (BTreeMap::new(), Vec::new());
            Self {
                root,
                key,
                now,
                build: BUILD.to_owned(),
                after_hello: Vec::new(),
                clients,
                closed,
                verdict: None,
            }
        }

        fn connect(&mut self, client: Client) {
            let address = SocketAddr::from(([127, 0, 0, 1], 4242));
            self.root.connected(client, address, self.now).unwrap();
        }

        fn join(&mut self, client: Client, rank: u32, world_size: u32) {
            self.join_as(client, rank, world_size, VERSION, self.key.clone());
        }

        fn join_as(&mut self, client: Client, rank: u32, world_size: u32, version: u16, key: Key) {
            self.connect(client);
            let role = Role::Initiate {
                purpose: auth::RENDEZVOUS,
                own_rank: rank,
                peer_rank: auth::ROOT,
            };
            let member = Member {
                listen: SocketAddr::from(([127, 0, 0, 1], 1000 + rank as u16)),
                host: HostId::invented(1),
                pid: rank,
                fd_socket: [0; 8],
            };
            let mut handshake = Handshake::new(&key, role).unwrap();
            let open = handshake.take_output();
            let hello = to_vec(&Hello {
                version,
                build: self.build.clone(),
                rank,
                world_size,
                member,
            });
            let mut hello: Vec<u8> = encode(Kind::Hello, &hello).flatten().collect();
            hello.extend_from_slice(&self.after_hello);
            let decoder = Decoder::new(1 << 20);
            self.clients.insert(
                client,
                Joiner {
                    handshake,
                    hello,
                    decoder,
                    answers: Vec::new(),
                },
            );
            // In two parts, as TCP might.
            self.root.received(client, &open[..5], self.now);
            self.root.received(client, &open[5..], self.now);
            self.pump();
        }

        fn ready(&mut self, client: Client) {
            let ready: Vec<u8> = encode(Kind::Ready, &[]).flatten().collect();
            self.root.received(client, &ready, self.now);
            self.pump();
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
            self.root.tick(self.now);
            self.pump();
        }

        fn pump(&mut self) {
            while let Some(output) = self.root.pop_output() {
                match output {
                    RootOutput::Close(client) | RootOutput::Drop(client) => {
                        self.closed.push(client);
                    }
                    RootOutput::Finished(verdict) => self.verdict = Some(verdict),
                    RootOutput::Send { client, bytes } => {
                        let Some(joiner) = self.clients.get_mut(&client) else {
                            continue;
                        };
                        let wanted = joiner.handshake.wanted().min(bytes.len());
                        let (proof, rest) = bytes.split_at(wanted);
                        if !proof.is_empty()
                            && let Step::Proven(_) = joiner.handshake.receive(proof)
                        {
                            let mut reply = joiner.handshake.take_output();
                            reply.extend_from_slice(&joiner.hello);
                            self.root.received(client, &reply, self.now);
                        }
                        joiner.decoder.feed(rest);
                        while let Ok(Some((kind, body))) = joiner.decoder.next_message() {
                            joiner.answers.push(Answer::decode(kind, &body).unwrap());
                        }
                    }
                }
            }
        }

        fn last(&self, client: Client) -> Option<&Answer> {
            self.clients[&client].answers.last()
        }
    }

    proptest! {
        #[test]
        fn any_order_forms_the_group(
            order in (1u32..=17).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle()),
            noise in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut sim = Simulator::new();
            let size = order.len() as u32;
            for (client, &rank) in (0..).zip(&order) {
                sim.connect(1000 + client);
                sim.root.received(1000 + client, &noise, sim.now);
                sim.join_as(2000 + client, rank, size, VERSION, Key::new([8; 16]));
                sim.join(client, rank, size);
            }
            for client in 0..u64::from(size) {
                match sim.last(client) {
                    Some(Answer::Table(members)) => {
                        for (rank, member) in (0..).zip(members) {
                            prop_assert_eq!(member.pid, rank);
                        }
                    }
                    answer => prop_assert!(false, "{:?}", answer),
                }
                prop_assert!(sim.verdict.is_none());
                sim.ready(client);
            }
            prop_assert!(matches!(sim.verdict, Some(Ok(()))));
        }
    }

    #[test]
    fn the_missing_are_named_to_all() {
        let mut sim = Simulator::new();
        for rank in [0, 2, 3] {
            sim.join(rank.into(), rank, 5);
        }
        sim.pass(Duration::from_secs(1));
        match sim.last(2) {
            Some(Answer::Waiting(missing)) => assert_eq!(missing.missing, [1, 4]),
            answer => panic!("{answer:?}"),
        }
        sim.pass(TIMEOUT);
        for client in [0, 2, 3] {
            match sim.last(client) {
                Some(Answer::Missing(missing)) => {
                    assert_eq!((&missing.missing[..], missing.joined), (&[1, 4][..], 3));
                }
                answer => panic!("{answer:?}"),
            }
        }
        let error = sim.verdict.unwrap().unwrap_err().to_string();
        assert!(
            error.contains("2 of 5 ranks") && error.contains("[1, 4]"),
            "{error}"
        );
    }

    #[test]
    fn nobody_at_all() {
        let mut sim = Simulator::new();
        sim.pass(TIMEOUT);
        assert!(matches!(
            sim.verdict,
            Some(Err(NetError::NobodyJoined { .. }))
        ));
    }

    #[test]
    fn a_detached_rendezvous_waits_from_the_first_rank_on_or_an_hour_for_it() {
        let mut sim = Simulator::new();
        sim.root.detach();
        sim.pass(UNUSED - Duration::from_secs(1));
        assert!(sim.verdict.is_none());
        sim.join(0, 0, 2);
        sim.pass(TIMEOUT - Duration::from_secs(1));
        assert!(sim.verdict.is_none());
        sim.pass(Duration::from_secs(1));
        match sim.verdict {
            Some(Err(NetError::RanksMissing { after, .. })) => assert_eq!(after, TIMEOUT),
            verdict => panic!("{verdict:?}"),
        }

        let mut sim = Simulator::new();
        sim.root.detach();
        sim.pass(UNUSED);
        assert!(matches!(
            sim.verdict,
            Some(Err(NetError::NobodyJoined { .. }))
        ));
    }

    #[test]
    fn the_offender_is_refused_and_the_rest_goes_on() {
        let mut sim = Simulator::new();
        sim.join(10, 1, 3); // before rank 0, with another world size
        sim.join(0, 0, 2);
        let reason = RefuseReason::WorldSize { theirs: 3, ours: 2 };
        assert_eq!(sim.last(10), Some(&Answer::Refuse(reason.clone())));
        sim.join(11, 1, 3); // and after it
        assert_eq!(sim.last(11), Some(&Answer::Refuse(reason)));
        sim.join(12, 0, 2);
        let reason = RefuseReason::DuplicateRank { rank: 0 };
        assert_eq!(sim.last(12), Some(&Answer::Refuse(reason)));
        sim.join(13, 2, 2);
        let reason = RefuseReason::RankOutOfRange {
            rank: 2,
            world_size: 2,
        };
        assert_eq!(sim.last(13), Some(&Answer::Refuse(reason)));
        sim.join_as(14, 1, 2, VERSION + 1, sim.key.clone());
        let reason = RefuseReason::Version {
            theirs: VERSION + 1,
            ours: VERSION,
        };
        assert_eq!(sim.last(14), Some(&Answer::Refuse(reason)));
        assert_eq!(sim.closed, [10, 11, 12, 13, 14]);
        sim.join(1, 1, 2);
        assert!(matches!(sim.last(0), Some(Answer::Table(_))));
        assert!(matches!(sim.last(1), Some(Answer::Table(_))));
    }

    #[test]
    fn a_rank_that_is_lost_before_the_table_may_come_again_but_not_after() {
        let mut sim = Simulator::new();
        sim.join(0, 0, 2);
        sim.root.lost(0, sim.now);
        sim.join(1, 1, 2);
        assert_eq!(sim.last(1), None);
        sim.join(2, 0, 2);
        assert!(matches!(sim.last(1), Some(Answer::Table(_))));
        sim.ready(1);
        sim.root.lost(1, sim.now);
        assert!(
            sim.verdict.is_none(),
            "rank 1 was ready and may close its connection"
        );
        sim.root.lost(2, sim.now);
        sim.pump();
        let verdict = sim.verdict.unwrap();
        assert!(
            matches!(verdict, Err(NetError::PeerDied { rank: 0, .. })),
            "{verdict:?}"
        );
    }

    #[test]
    fn a_rank_that_is_lost_and_does_not_return_breaks_the_group() {
        let mut sim = Simulator::new();
        sim.join(0, 0, 3);
        sim.join(1, 1, 3);
        sim.root.lost(1, sim.now);
        sim.pass(RETURN - Duration::from_millis(1));
        assert!(sim.verdict.is_none());
        assert_eq!(sim.root.next_tick(), sim.now + Duration::from_millis(1));
        sim.pass(Duration::from_millis(1));
        assert_eq!(sim.last(0), Some(&Answer::Broken(1)));
        assert!(matches!(
            sim.verdict,
            Some(Err(NetError::PeerDied { rank: 1, .. }))
        ));
    }

    #[test]
    fn a_rank_that_gives_up_ends_the_others_waits_with_its_reason() {
        let mut sim = Simulator::new();
        sim.join(0, 0, 3);
        sim.join(1, 1, 3);
        let abort: Vec<u8> = encode(Kind::Abort, "enough".as_bytes()).flatten().collect();
        sim.root.received(1, &abort, sim.now);
        sim.pump();
        let reason = "enough".to_owned();
        assert_eq!(sim.last(0), Some(&Answer::Aborted { by: 1, reason }));
        assert!(matches!(
            sim.verdict,
            Some(Err(NetError::Aborted { by: 1, .. }))
        ));
    }

    /// As from a rank that is cancelled while it joins: both may come at once, and then the end of the connection.
    #[test]
    fn a_reason_that_comes_with_the_hello_counts() {
        let mut sim = Simulator::new();
        sim.join(0, 0, 3);
        sim.after_hello = encode(Kind::Abort, "enough".as_bytes()).flatten().collect();
        sim.join(1, 1, 3);
        sim.root.lost(1, sim.now);
        sim.pump();
        let reason = "enough".to_owned();
        assert_eq!(sim.last(0), Some(&Answer::Aborted { by: 1, reason }));
    }

    #[test]
    fn a_rank_of_another_world_that_is_lost_is_not_missed() {
        let mut sim = Simulator::new();
        sim.join(7, 2, 3);
        sim.root.lost(7, sim.now);
        sim.join(0, 0, 2);
        sim.pass(RETURN);
        assert!(sim.verdict.is_none(), "{:?}", sim.verdict);
        sim.join(1, 1, 2);
        assert!(matches!(sim.last(0), Some(Answer::Table(_))));
    }

    #[test]
    fn who_was_turned_away_is_told_with_who_is_missing() {
        let mut sim = Simulator::new();
        sim.join(0, 0, 4);
        sim.join(1, 1, 5);
        sim.join_as(2, 2, 4, VERSION + 1, sim.key.clone());
        sim.build = "0.0.9".to_owned();
        sim.join(3, 3, 4);
        sim.join_as(4, 3, 4, VERSION, Key::new([8; 16]));
        sim.root.lost(4, sim.now); // it has seen that the secret is another
        sim.pass(TIMEOUT);
        let error = sim.verdict.unwrap().unwrap_err().to_string();
        for words in [
            "3 of 4 ranks did not join",
            "ranks [1, 2, 3] (1 joined)",
            "rank 1 was refused: it was started with world size 5 but rank 0 with 4",
            "rank 2 was refused: it speaks protocol version",
            "rank 3 was refused: it is crossweft 0.0.9 but the rendezvous",
            "1 connection did not prove the secret",
        ] {
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn strangers_are_dropped_in_time_and_their_number_is_limited() {
        let mut sim = Simulator::new();
        sim.connect(1);
        sim.root.received(1, b"C", sim.now);
        sim.pass(GREETING - Duration::from_millis(1));
        assert_eq!(sim.closed, []);
        assert_eq!(sim.root.next_tick(), sim.now + Duration::from_millis(1));
        sim.pass(Duration::from_millis(1));
        assert_eq!(sim.closed, [1]);
        for client in 0..=MAX_STRANGERS as u64 {
            sim.connect(100 + client);
        }
        sim.pump();
        assert_eq!(sim.closed, [1, 100]);
    }
}
