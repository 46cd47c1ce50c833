//! A group that a rank has joined: the calls, and the thread behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Shutdown};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::auth::{self, Key};
use crate::error::{NetError, Operation, RankList};
use crate::fds::{self, FdService, FetchError};
use crate::host::HostId;
use crate::join::{JoinOptions, Joiner, nowhere};
use crate::link::{Link, LinkError};
use crate::liveness::{Failure, Liveness, PeerState};
use crate::mesh::{self, Mesh, Output};
use crate::message::{Control, MAX_WORLD_SIZE, Member, Message};
use crate::poll::{self, Waker};
use crate::unique_id::UniqueId;

/// How long leaving waits for neighbours to have read everything.
const LINGER: Duration = Duration::from_secs(1);
/// How long an abort waits until it is handed to the kernel.
const TELLING: Duration = Duration::from_millis(250);
/// How long to wait for the verdict on a rank whose socket is gone: died, or left?
const VERDICT: Duration = Duration::from_secs(1);
/// How long to look for the process of a neighbour, which is worth no more.
const PROCESS_LIMIT: Duration = Duration::from_secs(1);

/// One rank's membership in a job.
///
/// All ranks must make the same collective calls ([`all_gather`](Self::all_gather),
/// [`barrier`](Self::barrier)) in the same order; calls from several threads of a rank are safe, but
/// only meaningful if something else puts them in the same order everywhere. A call that times out
/// still counts as made.
///
/// When a rank dies or aborts, every call on every rank fails from then on, and
/// [`Liveness::stopped`] turns true. When a rank leaves, only calls that need it fail.
#[derive(Debug)]
pub struct Group {
    rank: u32,
    key: Key,
    tag: [u8; 16],
    members: Vec<Member>,
    nodes: u32,
    silence_after: Duration,
    shared: Arc<Shared>,
    fds: FdService,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Group {
    /// Joins: returns when all ranks have come and this one is connected to its neighbours.
    pub fn join(
        id: &UniqueId,
        rank: u32,
        world_size: u32,
        options: &JoinOptions,
    ) -> Result<Self, NetError> {
        Self::join_if_proven(id, rank, world_size, options, options.timeout)
    }

    /// [`join`](Self::join), if the rendezvous proves the secret within `patience`.
    pub(crate) fn join_if_proven(
        id: &UniqueId,
        rank: u32,
        world_size: u32,
        options: &JoinOptions,
        patience: Duration,
    ) -> Result<Self, NetError> {
        let started = Instant::now();
        if rank >= world_size || world_size > MAX_WORLD_SIZE {
            return Err(NetError::InvalidRank { rank, world_size });
        }
        let fd_socket = auth::random()?;
        let tag = id.tag();
        let fds = FdService::start(&fd_name(&tag, rank, &fd_socket), rank, id.key().clone())?;
        let member = Member {
            listen: nowhere(),
            host: HostId::of_this_process()?,
            pid: std::process::id(),
            fd_socket,
        };
        let joiner = Joiner {
            id,
            rank,
            world_size,
            deadline: poll::after(started, options.timeout),
            timeout: options.timeout,
            patience,
            silence_after: options.silence_after,
            cancel: options.cancel.as_ref(),
        };
        let mut joined = joiner.join(&options.bind, member)?;
        for (&peer, link) in &mut joined.links {
            let (member, own) = (
                &joined.members[peer as usize],
                &joined.members[rank as usize],
            );
            if member.host == own.host {
                let name = fd_name(&tag, peer, &member.fd_socket);
                let process = fds::process_of(&name, Instant::now() + PROCESS_LIMIT);
                process.into_iter().for_each(|pidfd| link.watch(pidfd));
            }
        }

        let waker = Arc::new(Waker::new()?);
        let now = Instant::now();
        let mesh = Mesh::new(
            rank,
            world_size,
            options.heartbeat,
            options.silence_after,
            now,
        );
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                mesh,
                leave_by: None,
                told: false,
                ended: false,
            }),
            changed: Condvar::new(),
            liveness: Arc::new(Liveness::new(world_size, waker.clone())?),
            waker,
        });
        let network = Network {
            rank,
            links: joined.links,
            shared: shared.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("crossweft-net-{rank}"))
            .spawn(move || network.run())
            .map_err(|error| NetError::io("starting the network thread", error))?;
        let hosts: BTreeSet<_> = joined.members.iter().map(|member| &member.host).collect();
        tracing::debug!(rank, world_size, elapsed = ?started.elapsed(), "joined");
        Ok(Self {
            rank,
            key: id.key().clone(),
            tag,
            nodes: u32::try_from(hosts.len()).unwrap_or(world_size),
            members: joined.members,
            silence_after: options.silence_after,
            shared,
            fds,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> u32 {
        u32::try_from(self.members.len()).unwrap_or(MAX_WORLD_SIZE) // checked when joining
    }

    /// Whether a rank runs on this host: the same kernel and network namespace, so that file
    /// descriptors can be handed over. A rank that does not exist does not.
    pub fn is_same_host(&self, rank: u32) -> bool {
        let host = |rank: u32| self.members.get(rank as usize).map(|member| &member.host);
        host(rank).is_some() && host(rank) == host(self.rank)
    }

    /// After how long silence is reported: [`JoinOptions::silence_after`].
    pub fn silence_after(&self) -> Duration {
        self.silence_after
    }

    /// How many hosts the ranks run on.
    pub fn node_count(&self) -> u32 {
        self.nodes
    }

    /// How many ranks of lower number share this host.
    pub fn local_rank(&self) -> u32 {
        let lower = (0..self.rank)
            .filter(|&rank| self.is_same_host(rank))
            .count();
        u32::try_from(lower).unwrap_or(self.rank)
    }

    /// How many ranks share this host, this one included.
    pub fn local_size(&self) -> u32 {
        let all = (0..self.world_size())
            .filter(|&rank| self.is_same_host(rank))
            .count();
        u32::try_from(all).unwrap_or(MAX_WORLD_SIZE)
    }

    /// The address that a rank listens on, which its other sockets had better use too. The
    /// unspecified address for a rank that does not exist.
    pub fn peer_address(&self, rank: u32) -> IpAddr {
        let member = self.members.get(rank as usize);
        member.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |member| {
            member.listen.ip()
        })
    }

    /// Gives every rank the payloads of all, in rank order. They may differ in length.
    pub fn all_gather(&self, payload: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, NetError> {
        let blocks = self.collective(Operation::AllGather, payload.into(), deadline)?;
        Ok(blocks.iter().map(|block| block.to_vec()).collect())
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self, deadline: Instant) -> Result<(), NetError> {
        self.collective(Operation::Barrier, Arc::new([]), deadline)
            .map(drop)
    }

    /// Who is still there.
    pub fn liveness(&self) -> &Arc<Liveness> {
        &self.shared.liveness
    }

    /// Whether `rank` may still do its part in what this rank is `doing`. Does not block.
    ///
    /// # Errors
    /// [`NetError::PeerDied`] and [`NetError::Aborted`]: nobody can go on. [`NetError::PeerLeft`]: that rank has left.
    /// [`NetError::InvalidRank`]: there is no such rank.
    pub fn check_peer(&self, rank: u32, doing: &str) -> Result<(), NetError> {
        let (liveness, world_size) = (self.liveness(), self.world_size());
        if rank >= world_size {
            return Err(NetError::InvalidRank { rank, world_size });
        }
        if let Some(failure) = liveness.failure() {
            return Err(NetError::from_failure(&failure, doing));
        }
        match liveness.peer(rank) {
            PeerState::Left => Err(NetError::PeerLeft {
                rank,
                why: liveness.why_left(rank),
                during: doing.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Stops the job: every wait of every rank fails with [`NetError::Aborted`] and this reason.
    ///
    /// Usually returns when the neighbours' hosts have the news, so that the process may end at once;
    /// waits for that a quarter of a second at most.
    pub fn abort(&self, reason: &str) {
        let failure = Failure::Aborted {
            by: self.rank,
            reason: reason.to_owned(),
        };
        self.shared.liveness.fail(failure.clone());
        let mut state = self.shared.lock();
        state.mesh.fail(failure);
        self.shared.changed.notify_all();
        self.shared.waker.wake();
        let deadline = Instant::now() + TELLING;
        while !state.told && !state.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let wait = self.shared.changed.wait_timeout(state, left);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// This rank failed at something and may leave because of it; then the others are told `why`.
    /// Only the last call counts. A rank that cannot go on, and wants nobody to, calls
    /// [`abort`](Self::abort).
    pub fn give_up(&self, why: &str) {
        self.shared.lock().mesh.give_up(why);
    }

    /// Says goodbye and closes all connections; can be called again. Everything sent before still
    /// arrives, for which this waits up to a second. Dropping the group does the same.
    pub fn leave(&self) {
        {
            let mut state = self.shared.lock();
            if let Some(failure) = self.shared.liveness.failure() {
                // A goodbye is the last message, so the reason goes before it.
                state.mesh.fail(failure);
            }
            state.mesh.leave();
            state
                .leave_by
                .get_or_insert_with(|| Instant::now() + LINGER);
        }
        self.shared.waker.wake();
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(self.rank, "the network thread panicked");
        }
        self.fds.stop();
    }

    /// Lets ranks of this host fetch a duplicate of `fd` under a key, until it is withdrawn.
    pub fn offer_fd(&self, key: u64, fd: BorrowedFd<'_>) -> Result<(), NetError> {
        if self.shared.lock().leave_by.is_some() {
            return Err(NetError::Closed {
                during: "offering a file descriptor".to_owned(),
            });
        }
        self.fds.offer(key, fd)
    }

    /// Ends an offer. Duplicates that were fetched before stay open. An unknown key is no error.
    pub fn withdraw_fd(&self, key: u64) {
        self.fds.withdraw(key);
    }

    /// Fetches what a rank of this host offers under a key; waits until it is offered.
    ///
    /// The duplicate is close-on-exec. Ranks may fetch from each other in any order.
    pub fn fetch_fd(&self, rank: u32, key: u64, deadline: Instant) -> Result<OwnedFd, NetError> {
        let during = || format!("fetching file descriptor {key} of rank {rank}");
        let Some(member) = self.members.get(rank as usize) else {
            return Err(NetError::InvalidRank {
                rank,
                world_size: self.world_size(),
            });
        };
        if !self.is_same_host(rank) {
            return Err(NetError::NotSameHost { rank });
        }
        if self.shared.lock().leave_by.is_some() {
            return Err(NetError::Closed { during: during() });
        }
        let liveness = self.liveness();
        if let Some(failure) = liveness.failure() {
            return Err(NetError::from_failure(&failure, during()));
        }
        let name = fd_name(&self.tag, rank, &member.fd_socket);
        let stop = liveness.stop_event().as_fd();
        match fds::fetch(&name, self.rank, rank, &self.key, key, stop, deadline) {
            Ok(fd) => Ok(fd),
            Err(FetchError::Net(error)) => Err(error),
            Err(FetchError::Deadline) => {
                let error = NetError::Timeout {
                    what: during(),
                    missing: vec![rank],
                    silent: self.silent(&[rank]),
                };
                self.give_up(&error.to_string());
                Err(error)
            }
            Err(FetchError::Lost(error)) => Err(NetError::io(during(), error)),
            Err(FetchError::Gone(reason)) => Err(self.verdict(rank, reason, during(), deadline)),
            Err(FetchError::Stopped) => Err(match liveness.failure() {
                Some(failure) => NetError::from_failure(&failure, during()),
                None => NetError::Closed { during: during() },
            }),
        }
    }

    /// A public name of the job, the same on all ranks: for naming sockets and files.
    pub fn tag(&self) -> [u8; 16] {
        self.tag
    }

    /// The job's secret, for [`auth::prove`] on other connections of the job.
    pub fn key(&self) -> &Key {
        &self.key
    }

    fn collective(
        &self,
        operation: Operation,
        payload: Arc<[u8]>,
        deadline: Instant,
    ) -> Result<Vec<Arc<[u8]>>, NetError> {
        let mut state = self.shared.lock();
        if let Some(failure) = self.shared.liveness.failure() {
            // The network thread may not have told the mesh yet.
            state.mesh.fail(failure);
        }
        let sequence = state.mesh.start(operation, payload, Instant::now())?;
        self.shared.waker.wake();
        let mut report_at = Some(poll::after(Instant::now(), self.silence_after));
        loop {
            if let Some(result) = state.mesh.take(sequence) {
                return result;
            }
            let what = mesh::name(operation, sequence);
            if state.ended {
                return Err(NetError::Closed { during: what });
            }
            let now = Instant::now();
            if now >= deadline {
                let missing = state.mesh.abandon(sequence);
                let silent = self.silent(&missing);
                let error = NetError::Timeout {
                    what,
                    missing,
                    silent,
                };
                state.mesh.give_up(&error.to_string());
                return Err(error);
            }
            if let Some(at) = report_at.filter(|&at| now >= at) {
                // If it is much later, it was this rank that stood still.
                let stood_still = now - at > self.silence_after / 2;
                report_at = stood_still.then(|| poll::after(now, self.silence_after));
                if !stood_still {
                    tracing::warn!(
                        "rank {} has waited {:?} in {what} for {}; are they busy, stopped, or \
                         past it?",
                        self.rank,
                        self.silence_after,
                        RankList(&state.mesh.missing(sequence)),
                    );
                }
            }
            let left = report_at.map_or(deadline, |at| at.min(deadline)) - now;
            let wait = self.shared.changed.wait_timeout(state, left);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Those of `ranks` that have not been heard for a while.
    fn silent(&self, ranks: &[u32]) -> Box<[u32]> {
        let mut silent = self.shared.liveness.silent_ranks();
        silent.retain(|rank| ranks.contains(rank));
        silent.into()
    }

    /// The fd socket of a rank is gone; soon the mesh will know why.
    fn verdict(&self, rank: u32, reason: String, during: String, deadline: Instant) -> NetError {
        let deadline = deadline.min(Instant::now() + VERDICT);
        loop {
            if let Err(error) = self.check_peer(rank, &during) {
                return error;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return NetError::PeerDied {
                    rank,
                    reason,
                    during,
                };
            }
            let state = self.shared.lock();
            // The network thread notifies after every change, also of liveness.
            let slice = left.min(Duration::from_millis(50));
            drop(self.shared.changed.wait_timeout(state, slice));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.leave();
    }
}

fn fd_name(tag: &[u8; 16], rank: u32, nonce: &[u8; 8]) -> String {
    let tag = u128::from_be_bytes(*tag);
    let nonce = u64::from_be_bytes(*nonce);
    format!("crossweft-{tag:032x}-{rank}-{nonce:016x}")
}

/// What callers and the network thread share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    waker: Arc<Waker>,
    liveness: Arc<Liveness>,
}

#[derive(Debug)]
struct State {
    mesh: Mesh,
    /// Set when this rank leaves: the network thread ends by then.
    leave_by: Option<Instant>,
    /// Set when the group has failed and all neighbours have been sent the reason.
    told: bool,
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent between any two messages; a panicked holder is a bug elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that owns the connections.
struct Network {
    rank: u32,
    links: BTreeMap<u32, Link>,
    shared: Arc<Shared>,
}

impl Network {
    fn run(mut self) {
        while let Some(deadline) = self.send() {
            let ready = match self.wait(deadline) {
                Ok(ready) => ready,
                Err(error) => {
                    let reason = error.to_string();
                    self.shared.lock().mesh.fail(Failure::Aborted {
                        by: self.rank,
                        reason,
                    });
                    self.send();
                    break;
                }
            };
            self.receive(&ready);
        }
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }

    /// Lets the mesh do something, and then does what the mesh wants done.
    ///
    /// All under the lock: whoever gets an error from the mesh finds the same in [`Liveness`].
    fn with_mesh<T>(&mut self, act: impl FnOnce(&mut Mesh) -> T) -> T {
        self.with_state(|state| act(&mut state.mesh))
    }

    fn with_state<T>(&mut self, act: impl FnOnce(&mut State) -> T) -> T {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        let result = act(&mut state);
        let mut news = false;
        while let Some(output) = state.mesh.pop_output() {
            news = true;
            self.apply(output);
        }
        drop(state);
        if news {
            shared.changed.notify_all();
        }
        result
    }

    /// Sends what is to be sent; returns when to come back, or `None` at the end.
    fn send(&mut self) -> Option<Instant> {
        loop {
            let failure = self.shared.liveness.failure();
            let (failed, leave_by, next_tick) =
                self.with_state(|State { mesh, leave_by, .. }| {
                    if let Some(failure) = failure {
                        mesh.fail(failure);
                    }
                    mesh.tick(Instant::now());
                    (mesh.has_failed(), *leave_by, mesh.next_tick())
                });
            let mut lost = Vec::new();
            for (&rank, link) in &mut self.links {
                if let Err(error) = link.flush() {
                    lost.push((rank, error));
                }
            }
            if lost.is_empty() {
                return self.next_turn(failed, leave_by, next_tick);
            }
            // What they sent before they broke comes first: see `receive`.
            let broken: Vec<u32> = lost.iter().map(|(rank, _)| *rank).collect();
            self.receive(&broken);
            for (rank, error) in lost {
                self.links.remove(&rank);
                self.with_mesh(|mesh| mesh.lost(rank, &error.to_string()));
            }
        }
    }

    /// The arguments are as of when the mesh's messages were last taken: a failure or goodbye that
    /// came since has not been sent yet.
    fn next_turn(
        &self,
        failed: bool,
        leave_by: Option<Instant>,
        next_tick: Instant,
    ) -> Option<Instant> {
        if failed && self.links.values().all(Link::is_flushed) {
            self.shared.lock().told = true;
            self.shared.changed.notify_all();
        }
        let Some(leave_by) = leave_by else {
            return Some(next_tick);
        };
        for link in self.links.values().filter(|link| link.is_flushed()) {
            let _ = link.stream().shutdown(Shutdown::Write);
        }
        let done = self.links.is_empty() || Instant::now() >= leave_by;
        (!done).then_some(leave_by)
    }

    fn apply(&mut self, output: Output) {
        let liveness = &self.shared.liveness;
        match output {
            Output::Send { to, message } => {
                let Some(link) = self.links.get_mut(&to) else {
                    return;
                };
                let heartbeat = matches!(message, Message::Control(Control::Heartbeat));
                // What is queued says the same as a heartbeat, once the other end reads again.
                if !heartbeat || link.is_flushed() {
                    let (kind, body) = message.encode();
                    link.send(kind, &body);
                }
            }
            Output::Failed(failure) => {
                tracing::error!(self.rank, "{failure}");
                liveness.fail(failure);
            }
            Output::Left { rank, why } => {
                tracing::debug!(self.rank, peer = rank, why, "a rank left");
                liveness.left(rank, why);
            }
            Output::Silent { rank, heard } => {
                tracing::warn!(
                    "rank {} has not heard rank {rank} for {:.1?}, but its host answers; is it \
                     stopped, or busy?",
                    self.rank,
                    heard.elapsed()
                );
                liveness.silent(rank, heard);
            }
            Output::Heard(rank) => {
                tracing::warn!("rank {} hears rank {rank} again", self.rank);
                liveness.heard(rank);
            }
        }
    }

    /// The ranks from which something came, or of which nothing more will.
    fn wait(&mut self, deadline: Instant) -> Result<Vec<u32>, NetError> {
        let given_up = self.links.values().filter_map(Link::given_up_at);
        let deadline = given_up.fold(deadline, Instant::min);
        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        for link in self.links.values() {
            let write = if link.wants_write() {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            };
            fds.push(PollFd::new(link, PollFlags::IN | write));
        }
        let links = fds.len();
        let process = |(&rank, link): (&u32, &Link)| link.process().map(|_| rank);
        let watched: Vec<u32> = self.links.iter().filter_map(process).collect();
        let processes = self.links.values().filter_map(Link::process);
        fds.extend(processes.map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        poll::until(&mut fds, deadline).map_err(|error| NetError::io("poll", error))?;
        self.shared.waker.drain();
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let ready: BTreeSet<u32> = fds[1..links]
            .iter()
            .zip(self.links.keys())
            .filter(|(fd, _)| is_ready(fd))
            .map(|(_, &rank)| rank)
            .collect();
        let ended: Vec<u32> = fds[links..]
            .iter()
            .zip(watched)
            .filter(|(fd, _)| is_ready(fd))
            .map(|(_, rank)| rank)
            .collect();
        let now = Instant::now();
        for rank in ended {
            if let Some(link) = self.links.get_mut(&rank) {
                link.process_has_ended(now);
            }
        }
        let come = |(&rank, link): (&u32, &Link)| {
            (ready.contains(&rank) || link.is_given_up(now)).then_some(rank)
        };
        Ok(self.links.iter().filter_map(come).collect())
    }

    /// Reads all messages before it believes in any loss, so that an operation whose messages have
    /// all come completes even if their sender is gone.
    fn receive(&mut self, ready: &[u32]) {
        let mut heard = Vec::new();
        let mut ends = Vec::new();
        for &rank in ready {
            let Some(link) = self.links.get_mut(&rank) else {
                continue;
            };
            let mut messages = Vec::new();
            if let Err(error) = link.receive(&mut messages) {
                ends.push((rank, error));
            }
            heard.extend(messages.into_iter().map(|message| (rank, message)));
        }
        if heard.is_empty() && ends.is_empty() {
            return;
        }
        let now = Instant::now();
        let left: Vec<u32> = self.links.keys().copied().collect();
        let (lost, left) = self.with_mesh(|mesh| {
            for (rank, (kind, body)) in heard {
                let received = Message::decode(kind, &body)
                    .and_then(|message| mesh.receive(rank, message, now));
                if let Err(reason) = received {
                    ends.push((rank, LinkError::Protocol(reason)));
                }
            }
            for (rank, error) in &ends {
                mesh.lost(*rank, &error.to_string());
            }
            let lost: Vec<u32> = ends.into_iter().map(|(rank, _)| rank).collect();
            (
                lost,
                left.into_iter()
                    .filter(|&rank| mesh.said_goodbye(rank))
                    .collect::<Vec<_>>(),
            )
        });
        for rank in lost.iter().chain(&left) {
            self.links.remove(rank);
        }
        // Operations may have completed, about which the mesh has nothing to say.
        self.shared.changed.notify_all();
    }
}
