//! The protocol between the ranks of a group, without sockets, threads or clocks.
//!
//! Rank `r` is connected to the ranks `r ± 2^k mod n`. An all-gather runs in `ceil(log2 n)` rounds
//! (Bruck): in round `k`, `r` sends the `min(2^k, n - 2^k)` blocks that start with its own to
//! `r - 2^k` and gets as many from `r + 2^k`. A barrier is an all-gather of empty blocks. A rank
//! has sent all its rounds when its own operation completes, so it may leave at once.
//!
//! Bad news (a death, an abort, a goodbye, silence, two ranks that call different operations) is
//! flooded: whoever hears it first passes it on to all its neighbours. While an operation stalls,
//! ranks also spread which ranks have entered it, so that a timeout names those that have not.
//!
//! A driver passes messages, losses and the time in, and takes [`Output`]s away. Messages between
//! two ranks must arrive in order; different connections may be arbitrarily slow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{NetError, Operation};
use crate::liveness::Failure;
use crate::message::{Control, MAX_PAYLOAD, Message, Round};

/// Operations that may be unfinished at a time, because their callers timed out.
const MAX_PENDING: usize = 16;
/// Blocks that may wait for this rank to enter their operation.
const MAX_BUFFERED: usize = 1 << 30;
/// A round is sent in messages of about this many payload bytes.
const ROUND_MESSAGE: usize = 1 << 20;
/// Shorter intervals would only heat the room.
const MIN_HEARTBEAT: Duration = Duration::from_millis(10);
/// Heartbeats that must be missed before a rank is called silent, at the least.
const BEATS: u32 = 4;
/// Longer ones may not fit into an `Instant`.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// The longest reason passed on.
const MAX_REASON: usize = 1024;
/// An operation that lasts longer makes ranks tell each other who has entered it.
const STALL: Duration = Duration::from_millis(50);
/// The shortest time between two such announcements.
const ANNOUNCE: Duration = Duration::from_millis(10);

/// One rank's part of the protocol.
#[derive(Debug)]
pub(crate) struct Mesh {
    rank: u32,
    size: u32,
    heartbeat: Duration,
    silence_after: Duration,
    neighbours: BTreeMap<u32, Neighbour>,
    operations: BTreeMap<u64, Running>,
    next_sequence: u64,
    buffered: usize,
    failure: Option<Failure>,
    /// Ranks that said goodbye.
    left: BTreeMap<u32, Goodbye>,
    /// What this rank failed at last, in case it leaves because of that.
    gave_up: Option<String>,
    /// How often each rank has fallen silent or been heard again: it is silent while this is odd.
    /// Its neighbours count, and the highest count wins, so all agree whoever noticed first.
    turns: BTreeMap<u32, u32>,
    leaving: bool,
    next_heartbeat: Instant,
    outputs: VecDeque<Output>,
}

#[derive(Debug)]
struct Neighbour {
    connected: bool,
    /// It said so itself, after everything else that it had to say.
    said_goodbye: bool,
    heard: Instant,
    /// Whether this rank has noticed its silence.
    silent: bool,
}

/// What a rank said when it left.
#[derive(Debug, Clone)]
struct Goodbye {
    /// The first operation that it did not complete.
    completed: u64,
    why: Option<String>,
}

/// What the driver is to do.
#[derive(Debug)]
pub(crate) enum Output {
    Send { to: u32, message: Message },
    Failed(Failure),
    Left { rank: u32, why: Option<String> },
    Silent { rank: u32, heard: Instant },
    Heard(u32),
}

/// An operation that somebody has entered.
#[derive(Debug)]
struct Running {
    /// The first rank known to have called it, and what it called.
    claim: Option<(u32, Operation)>,
    /// From this rank on, in rank order; empty until this rank enters.
    blocks: Vec<Arc<[u8]>>,
    round: u32,
    /// Blocks of each round that have come and are not yet used.
    inbox: Vec<Vec<Arc<[u8]>>>,
    seen: Bits,
    announced: Bits,
    announce_at: Instant,
    outcome: Outcome,
    abandoned: bool,
}

#[derive(Debug)]
enum Outcome {
    Running,
    Complete,
    Failed(Broken),
}

/// Why an operation cannot complete; turned into a [`NetError`] for whoever waits.
#[derive(Debug, Clone)]
enum Broken {
    Failure(Failure),
    Left(u32),
    Mismatch {
        first: (u32, Operation),
        second: (u32, Operation),
    },
}

/// The ranks that `rank` is connected to.
pub(crate) fn neighbours(rank: u32, size: u32) -> BTreeSet<u32> {
    let (rank, size) = (u64::from(rank), u64::from(size));
    let steps = (0..rounds(size)).map(|k| 1u64 << k);
    steps
        .flat_map(|step| [(rank + step) % size, (rank + size - step) % size])
        .filter_map(|peer| u32::try_from(peer).ok())
        .filter(|&peer| u64::from(peer) != rank)
        .collect()
}

/// `ceil(log2(size))`
fn rounds(size: u64) -> u32 {
    size.max(1).next_power_of_two().trailing_zeros()
}

impl Mesh {
    pub(crate) fn new(
        rank: u32,
        size: u32,
        heartbeat: Duration,
        silence_after: Duration,
        now: Instant,
    ) -> Self {
        let silence_after = silence_after.clamp(MIN_HEARTBEAT * BEATS, MAX_WAIT);
        // However short the silence to report, a rank that is well is heard several times in it.
        let heartbeat = heartbeat.clamp(MIN_HEARTBEAT, silence_after / BEATS);
        let neighbours = neighbours(rank, size)
            .into_iter()
            .map(|peer| {
                (
                    peer,
                    Neighbour {
                        connected: true,
                        said_goodbye: false,
                        heard: now,
                        silent: false,
                    },
                )
            })
            .collect();
        Self {
            rank,
            size,
            heartbeat,
            silence_after,
            neighbours,
            operations: BTreeMap::new(),
            next_sequence: 0,
            buffered: 0,
            failure: None,
            left: BTreeMap::new(),
            gave_up: None,
            turns: BTreeMap::new(),
            leaving: false,
            next_heartbeat: now + heartbeat,
            outputs: VecDeque::new(),
        }
    }

    /// Enters the next operation and returns its number.
    pub(crate) fn start(
        &mut self,
        operation: Operation,
        payload: Arc<[u8]>,
        now: Instant,
    ) -> Result<u64, NetError> {
        let sequence = self.next_sequence;
        let during = || name(operation, sequence);
        if let Some(failure) = &self.failure {
            return Err(NetError::from_failure(failure, during()));
        }
        if self.leaving {
            return Err(NetError::Closed { during: during() });
        }
        if let Some((rank, why)) = self.left_before(sequence) {
            return Err(NetError::PeerLeft {
                rank,
                why,
                during: during(),
            });
        }
        if payload.len() > MAX_PAYLOAD {
            return Err(NetError::PayloadTooLarge {
                length: payload.len(),
                limit: MAX_PAYLOAD,
            });
        }
        let pending = self
            .operations
            .values()
            .filter(|op| op.entered() && op.is_running())
            .count();
        if pending >= MAX_PENDING {
            return Err(NetError::TooManyPending { pending });
        }

        self.next_sequence += 1;
        let own = (self.rank, operation);
        let running = self.running(sequence, now);
        running.blocks.push(payload);
        running.seen.insert(own.0);
        running.announce_at = now + STALL;
        let waiting: usize = running
            .inbox
            .iter()
            .flatten()
            .map(|block| block.len())
            .sum();
        let claim = *running.claim.get_or_insert(own);
        self.buffered = self.buffered.saturating_sub(waiting);
        if claim.1 != operation {
            self.mismatch(sequence, own, claim);
        }
        self.send_round(sequence);
        self.advance(sequence);
        Ok(sequence)
    }

    /// The result of an operation, once there is one; it can be taken once.
    pub(crate) fn take(&mut self, sequence: u64) -> Option<Result<Vec<Arc<[u8]>>, NetError>> {
        if self.operations.get(&sequence)?.is_running() {
            return None;
        }
        let running = self.operations.remove(&sequence)?;
        let during = || match running.claim {
            Some((_, operation)) => name(operation, sequence),
            None => format!("operation {sequence}"),
        };
        Some(match running.outcome {
            Outcome::Failed(Broken::Failure(failure)) => {
                Err(NetError::from_failure(&failure, during()))
            }
            Outcome::Failed(Broken::Left(rank)) => Err(NetError::PeerLeft {
                rank,
                why: self.left.get(&rank).and_then(|left| left.why.clone()),
                during: during(),
            }),
            Outcome::Failed(Broken::Mismatch { first, second }) => Err(NetError::Mismatch {
                sequence,
                rank: first.0,
                operation: first.1,
                other_rank: second.0,
                other_operation: second.1,
            }),
            Outcome::Complete | Outcome::Running => {
                // Whatever it was, it went on.
                self.gave_up = None;
                let mut blocks = running.blocks;
                // Blocks start with this rank's; callers want rank 0's first.
                blocks.rotate_right(self.rank as usize % self.size.max(1) as usize);
                Ok(blocks)
            }
        })
    }

    /// Nobody waits for this operation any longer; it still goes on for the sake of other ranks.
    /// Returns the ranks that, as far as is known here, have not entered it.
    pub(crate) fn abandon(&mut self, sequence: u64) -> Vec<u32> {
        let Some(running) = self.operations.get_mut(&sequence) else {
            return Vec::new();
        };
        running.abandoned = true;
        self.missing(sequence)
    }

    /// The ranks that, as far as is known here, an operation waits for.
    pub(crate) fn missing(&self, sequence: u64) -> Vec<u32> {
        let Some(running) = self.operations.get(&sequence) else {
            return Vec::new();
        };
        let mut missing: Vec<u32> = (0..self.size)
            .filter(|&rank| !running.seen.contains(rank))
            .collect();
        if missing.is_empty() && running.is_running() {
            // All have entered, so it is the sender of the current round that is slow.
            missing.push(self.source(running.round));
        }
        missing
    }

    /// A message from a neighbour. An error means that it broke the protocol.
    pub(crate) fn receive(
        &mut self,
        from: u32,
        message: Message,
        now: Instant,
    ) -> Result<(), String> {
        let Some(neighbour) = self.neighbours.get_mut(&from) else {
            return Err("it is no neighbour".to_owned());
        };
        neighbour.heard = now;
        neighbour.silent = false;
        if self.is_silent(from) {
            self.turn(from, self.turns_of(from).saturating_add(1), now);
        }
        match message {
            Message::Round(round) => self.receive_round(from, round, now),
            Message::Control(control) => self.receive_control(from, control, now),
        }
    }

    /// The connection to a neighbour broke.
    pub(crate) fn lost(&mut self, from: u32, reason: &str) {
        let Some(neighbour) = self.neighbours.get_mut(&from) else {
            return;
        };
        if std::mem::take(&mut neighbour.connected) {
            self.fail(Failure::PeerDied {
                rank: from,
                reason: reason.to_owned(),
            });
        }
    }

    /// Stops everything and tells everybody. The first failure wins.
    pub(crate) fn fail(&mut self, failure: Failure) {
        if self.failure.is_some() {
            return;
        }
        let control = match &failure {
            // A goodbye is a goodbye, even if somebody saw the connection break before hearing it.
            Failure::PeerDied { rank, .. } if self.left.contains_key(rank) => return,
            Failure::PeerDied { rank, reason } => Control::Died {
                rank: *rank,
                reason: shorten(reason),
            },
            Failure::Aborted { by, reason } => Control::Aborted {
                by: *by,
                reason: shorten(reason),
            },
        };
        self.failure = Some(failure.clone());
        self.flood(&control);
        for sequence in self.sequences() {
            self.break_operation(sequence, Broken::Failure(failure.clone()));
        }
        self.outputs.push_back(Output::Failed(failure));
    }

    /// This rank failed at something; if it leaves now, others are told that this is why.
    pub(crate) fn give_up(&mut self, why: &str) {
        self.gave_up = Some(shorten(why));
    }

    /// Says goodbye to everybody.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.leaving, true) {
            return;
        }
        let unfinished = |(&sequence, op): (&u64, &Running)| {
            (op.entered() && op.is_running()).then_some(sequence)
        };
        let completed = self
            .operations
            .iter()
            .find_map(unfinished)
            .unwrap_or(self.next_sequence);
        let (rank, why) = (self.rank, self.gave_up.take());
        self.flood(&Control::Left {
            rank,
            completed,
            why,
        });
        // A goodbye is the last message; from here on nobody is told anything.
        self.neighbours
            .values_mut()
            .for_each(|neighbour| neighbour.connected = false);
    }

    /// Lets time pass: heartbeats, silence, stalled operations.
    pub(crate) fn tick(&mut self, now: Instant) {
        if now >= self.next_heartbeat {
            if now.saturating_duration_since(self.next_heartbeat) >= self.silence_after / 2 {
                // It was this rank that stood still; what the others said meanwhile is yet unread.
                for neighbour in self.neighbours.values_mut() {
                    neighbour.heard = now;
                }
            }
            self.next_heartbeat = now + self.heartbeat;
            self.flood(&Control::Heartbeat);
        }
        let mut silent = Vec::new();
        for (&rank, neighbour) in &mut self.neighbours {
            let quiet = now.saturating_duration_since(neighbour.heard) >= self.silence_after;
            if quiet && neighbour.connected && !neighbour.silent {
                neighbour.silent = true;
                silent.push((rank, neighbour.heard));
            }
        }
        for (rank, heard) in silent {
            if !self.is_silent(rank) {
                self.turn(rank, self.turns_of(rank).saturating_add(1), heard);
            }
        }
        let mut news = Vec::new();
        for (&sequence, running) in &mut self.operations {
            if running.announces() && now >= running.announce_at {
                running.announced = running.seen.clone();
                running.announce_at = now + ANNOUNCE;
                news.push(Control::Progress {
                    sequence,
                    seen: running.seen.0.clone(),
                });
            }
        }
        news.iter().for_each(|control| self.flood(control));
    }

    /// When [`tick`](Self::tick) wants to be called next.
    pub(crate) fn next_tick(&self) -> Instant {
        let silence = self
            .neighbours
            .values()
            .filter(|neighbour| neighbour.connected && !neighbour.silent)
            .map(|neighbour| neighbour.heard + self.silence_after);
        let stalls = self
            .operations
            .values()
            .filter(|op| op.announces())
            .map(|op| op.announce_at);
        silence
            .chain(stalls)
            .fold(self.next_heartbeat, Instant::min)
    }

    pub(crate) fn pop_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Whether a neighbour itself said goodbye, so that nothing more comes on its connection. That
    /// others say it has left is not enough: its own messages may still be on their way.
    pub(crate) fn said_goodbye(&self, rank: u32) -> bool {
        self.neighbours
            .get(&rank)
            .is_some_and(|neighbour| neighbour.said_goodbye)
    }

    fn receive_round(&mut self, from: u32, message: Round, now: Instant) -> Result<(), String> {
        let Round {
            sequence,
            operation,
            round,
            blocks,
        } = message;
        if round >= rounds(self.size.into()) || from != self.source(round) {
            return Err(format!("it sent round {round}, which is not its to send"));
        }
        if sequence >= self.next_sequence.saturating_add(MAX_PENDING as u64) {
            return Err(format!("it runs too far ahead, in operation {sequence}"));
        }
        if sequence < self.next_sequence && !self.operations.contains_key(&sequence) {
            return Ok(()); // the rest of an operation that failed here
        }
        let expected = self.block_count(round);
        let size = self.size;
        let running = self.running(sequence, now);
        if !running.is_running() {
            return Ok(());
        }
        let claim = *running.claim.get_or_insert((from, operation));
        if claim.1 != operation {
            self.mismatch(sequence, claim, (from, operation));
            return Ok(());
        }
        let first = running.inbox[round as usize].len();
        if first + blocks.len() > expected || (running.entered() && round < running.round) {
            return Err(format!("it sent more than its part of round {round}"));
        }
        for index in first..first + blocks.len() {
            let rank = (u64::from(from) + index as u64) % u64::from(size);
            running.seen.insert(u32::try_from(rank).unwrap_or(0)); // below size, which is a u32
        }
        let bytes: usize = blocks.iter().map(|block| block.len()).sum();
        running.inbox[round as usize].extend(blocks);
        if !running.entered() {
            self.buffered += bytes;
            if self.buffered > MAX_BUFFERED {
                return Err(
                    "it sent too much for operations that this rank has not entered".into(),
                );
            }
        }
        self.advance(sequence);
        Ok(())
    }

    fn receive_control(&mut self, from: u32, control: Control, now: Instant) -> Result<(), String> {
        if let Some(rank) = control.subject().filter(|&rank| rank >= self.size) {
            return Err(format!("it spoke of rank {rank}, which does not exist"));
        }
        match control {
            Control::Heartbeat => {}
            Control::Silence { rank, turn } => {
                if turn > self.turns_of(rank) {
                    // Who noticed has waited so long; more is not known here.
                    self.turn(
                        rank,
                        turn,
                        now.checked_sub(self.silence_after).unwrap_or(now),
                    );
                }
            }
            Control::Progress { sequence, seen } => {
                let known = self.operations.contains_key(&sequence);
                let ahead = self.next_sequence..self.next_sequence + MAX_PENDING as u64;
                if known || ahead.contains(&sequence) {
                    let running = self.running(sequence, now);
                    if !running.seen.merge(&seen) {
                        return Err("it sent a set of ranks of the wrong size".to_owned());
                    }
                }
            }
            Control::Mismatch {
                sequence,
                first,
                second,
            } => {
                let ahead = self.next_sequence.saturating_add(MAX_PENDING as u64);
                if sequence < ahead
                    && (sequence >= self.next_sequence || self.operations.contains_key(&sequence))
                {
                    self.running(sequence, now);
                    self.mismatch(sequence, first, second);
                }
            }
            Control::Died { rank, reason } => {
                self.fail(Failure::PeerDied {
                    rank,
                    reason: shorten(&reason),
                });
            }
            Control::Aborted { by, reason } => {
                self.fail(Failure::Aborted {
                    by,
                    reason: shorten(&reason),
                });
            }
            Control::Left {
                rank,
                completed,
                why,
            } => {
                if rank == from
                    && let Some(neighbour) = self.neighbours.get_mut(&from)
                {
                    neighbour.connected = false;
                    neighbour.said_goodbye = true;
                }
                if rank != self.rank && !self.left.contains_key(&rank) {
                    let why = why.as_deref().map(shorten);
                    let goodbye = Goodbye {
                        completed,
                        why: why.clone(),
                    };
                    self.left.insert(rank, goodbye);
                    self.flood(&Control::Left {
                        rank,
                        completed,
                        why: why.clone(),
                    });
                    for sequence in self.sequences() {
                        if sequence >= completed {
                            self.break_operation(sequence, Broken::Left(rank));
                        }
                    }
                    self.outputs.push_back(Output::Left { rank, why });
                }
            }
        }
        Ok(())
    }

    /// Uses the rounds that have come, in order, and sends the ones that this makes possible.
    fn advance(&mut self, sequence: u64) {
        loop {
            let size = self.size as usize;
            let Some(running) = self.operations.get_mut(&sequence) else {
                return;
            };
            if !running.entered() || !running.is_running() {
                return;
            }
            if running.blocks.len() == size {
                running.outcome = Outcome::Complete;
                if running.abandoned {
                    self.operations.remove(&sequence);
                }
                return;
            }
            let round = running.round;
            let expected = block_count(self.size, round);
            let Some(blocks) = running.inbox.get_mut(round as usize) else {
                return;
            };
            if blocks.len() < expected {
                return;
            }
            let blocks = std::mem::take(blocks);
            running.blocks.extend(blocks);
            running.round += 1;
            if running.blocks.len() < size {
                self.send_round(sequence);
            }
        }
    }

    /// Sends the current round of an operation.
    fn send_round(&mut self, sequence: u64) {
        let Some(running) = self.operations.get(&sequence) else {
            return;
        };
        let Some((_, operation)) = running.claim else {
            return;
        };
        if self.size == 1 || self.leaving || !running.is_running() {
            return;
        }
        let round = running.round;
        let to = self.destination(round);
        let mut rest = &running.blocks[..self.block_count(round).min(running.blocks.len())];
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |block: &&Arc<[u8]>| {
                bytes += block.len();
                bytes <= ROUND_MESSAGE
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            rest = later;
            let round = Round {
                sequence,
                operation,
                round,
                blocks: now.to_vec(),
            };
            self.outputs.push_back(Output::Send {
                to,
                message: Message::Round(round),
            });
        }
    }

    /// Two ranks disagree about what an operation is: it fails everywhere.
    fn mismatch(&mut self, sequence: u64, first: (u32, Operation), second: (u32, Operation)) {
        if self.break_operation(sequence, Broken::Mismatch { first, second }) {
            self.flood(&Control::Mismatch {
                sequence,
                first,
                second,
            });
        }
    }

    /// Whether this was the news that broke it.
    fn break_operation(&mut self, sequence: u64, broken: Broken) -> bool {
        let Some(running) = self.operations.get_mut(&sequence) else {
            return false;
        };
        if !running.is_running() {
            return false;
        }
        running.outcome = Outcome::Failed(broken);
        if running.abandoned {
            self.operations.remove(&sequence);
        }
        true
    }

    fn turns_of(&self, rank: u32) -> u32 {
        self.turns.get(&rank).copied().unwrap_or(0)
    }

    fn is_silent(&self, rank: u32) -> bool {
        self.turns_of(rank) % 2 == 1
    }

    /// A rank has fallen silent, since `heard`, or is heard again.
    fn turn(&mut self, rank: u32, turn: u32, heard: Instant) {
        let was_silent = self.is_silent(rank);
        self.turns.insert(rank, turn);
        self.flood(&Control::Silence { rank, turn });
        let is_silent = self.is_silent(rank);
        if rank != self.rank && !self.left.contains_key(&rank) && is_silent != was_silent {
            self.outputs.push_back(match is_silent {
                true => Output::Silent { rank, heard },
                false => Output::Heard(rank),
            });
        }
    }

    fn flood(&mut self, control: &Control) {
        for (&to, neighbour) in &self.neighbours {
            if neighbour.connected {
                let message = Message::Control(control.clone());
                self.outputs.push_back(Output::Send { to, message });
            }
        }
    }

    fn running(&mut self, sequence: u64, now: Instant) -> &mut Running {
        let size = self.size;
        self.operations.entry(sequence).or_insert_with(|| Running {
            claim: None,
            blocks: Vec::new(),
            round: 0,
            inbox: vec![Vec::new(); rounds(size.into()) as usize],
            seen: Bits::new(size),
            announced: Bits::new(size),
            announce_at: now + STALL,
            outcome: Outcome::Running,
            abandoned: false,
        })
    }

    fn left_before(&self, sequence: u64) -> Option<(u32, Option<String>)> {
        self.left
            .iter()
            .find(|(_, left)| left.completed <= sequence)
            .map(|(&rank, left)| (rank, left.why.clone()))
    }

    fn sequences(&self) -> Vec<u64> {
        self.operations.keys().copied().collect()
    }

    /// Who sends this rank the blocks of a round.
    fn source(&self, round: u32) -> u32 {
        self.shifted(1 << round)
    }

    /// To whom this rank sends the blocks of a round.
    fn destination(&self, round: u32) -> u32 {
        self.shifted(u64::from(self.size) - (1 << round))
    }

    fn shifted(&self, by: u64) -> u32 {
        let rank = (u64::from(self.rank) + by) % u64::from(self.size);
        u32::try_from(rank).unwrap_or(0) // below size, which is a u32
    }

    fn block_count(&self, round: u32) -> usize {
        block_count(self.size, round)
    }
}

/// How many blocks go in a round.
fn block_count(size: u32, round: u32) -> usize {
    let have = 1usize << round;
    have.min((size as usize).saturating_sub(have))
}

impl Running {
    fn entered(&self) -> bool {
        !self.blocks.is_empty()
    }

    fn is_running(&self) -> bool {
        matches!(self.outcome, Outcome::Running)
    }

    /// Whether there is something about this operation that neighbours have not been told.
    fn announces(&self) -> bool {
        self.is_running() && self.seen != self.announced
    }
}

/// A set of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Bits(Vec<u8>);

impl Bits {
    fn new(size: u32) -> Self {
        Self(vec![0; size.div_ceil(8) as usize])
    }

    fn insert(&mut self, rank: u32) {
        if let Some(byte) = self.0.get_mut(rank as usize / 8) {
            *byte |= 1 << (rank % 8);
        }
    }

    fn contains(&self, rank: u32) -> bool {
        self.0
            .get(rank as usize / 8)
            .is_some_and(|byte| byte & (1 << (rank % 8)) != 0)
    }

    /// `false` if the other set is of another size.
    fn merge(&mut self, other: &[u8]) -> bool {
        if other.len() != self.0.len() {
            return false;
        }
        self.0
            .iter_mut()
            .zip(other)
            .for_each(|(own, other)| *own |= other);
        true
    }
}

/// How an operation is called in messages.
pub(crate) fn name(operation: Operation, sequence: u64) -> String {
    format!("{operation} (operation {sequence} of the group)")
}

fn shorten(reason: &str) -> String {
    let end = reason.floor_char_boundary(MAX_REASON);
    reason[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEARTBEAT: Duration = Duration::from_secs(1);
    const SILENCE: Duration = Duration::from_secs(30);

    /// Ranks, the messages between them, and a random order of delivery.
    struct Simulator {
        ranks: Vec<Mesh>,
        links: BTreeMap<(u32, u32), VecDeque<Message>>,
        dead: BTreeSet<u32>,
        now: Instant,
        random: u64,
        rounds_sent: BTreeMap<(u32, u64), BTreeSet<u32>>,
        states: Vec<Vec<Output>>,
    }

    impl Simulator {
        fn new(size: u32, seed: u64) -> Self {
            let now = Instant::now();
            Self {
                ranks: (0..size)
                    .map(|r| Mesh::new(r, size, HEARTBEAT, SILENCE, now))
                    .collect(),
                links: BTreeMap::new(),
                dead: BTreeSet::new(),
                now,
                random: seed | 1,
                rounds_sent: BTreeMap::new(),
                states: (0..size).map(|_| Vec::new()).collect(),
            }
        }

        fn random(&mut self, below: usize) -> usize {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            (self.random % below as u64) as usize
        }

        fn collect(&mut self) {
            for (from, mesh) in (0..).zip(&mut self.ranks) {
                while let Some(output) = mesh.pop_output() {
                    match output {
                        Output::Send { to, message } => {
                            if let Message::Round(round) = &message {
                                let key = (from, round.sequence);
                                self.rounds_sent.entry(key).or_default().insert(round.round);
                            }
                            if !self.dead.contains(&from) {
                                self.links.entry((from, to)).or_default().push_back(message);
                            }
                        }
                        other => self.states[from as usize].push(other),
                    }
                }
            }
        }

        /// Delivers one message of a random connection.
        fn step(&mut self) -> bool {
            self.collect();
            self.links
                .retain(|(_, to), queue| !queue.is_empty() && !self.dead.contains(to));
            if self.links.is_empty() {
                return false;
            }
            let pick = self.random(self.links.len());
            let (&(from, to), queue) = self.links.iter_mut().nth(pick).unwrap();
            let message = queue.pop_front().unwrap();
            self.ranks[to as usize]
                .receive(from, message, self.now)
                .unwrap();
            true
        }

        fn run(&mut self) {
            while self.step() {}
        }

        /// Lets time pass, with all that it causes.
        fn pass(&mut self, time: Duration) {
            let end = self.now + time;
            while self.now < end {
                self.now += Duration::from_millis(10);
                let now = self.now;
                for mesh in &mut self.ranks {
                    mesh.tick(now);
                }
                self.run();
            }
        }

        /// A process dies: what it sent still arrives, then its connections close.
        fn kill(&mut self, rank: u32) {
            self.collect();
            self.dead.insert(rank);
            self.run();
            for peer in neighbours(rank, self.ranks.len() as u32) {
                self.ranks[peer as usize].lost(rank, "its connection closed");
            }
        }

        fn start(&mut self, rank: u32, operation: Operation, payload: &[u8]) -> u64 {
            let now = self.now;
            self.ranks[rank as usize]
                .start(operation, payload.into(), now)
                .unwrap()
        }

        fn take(&mut self, rank: u32, sequence: u64) -> Option<Result<Vec<Arc<[u8]>>, NetError>> {
            self.ranks[rank as usize].take(sequence)
        }

        fn alive(&self) -> Vec<u32> {
            (0..self.ranks.len() as u32)
                .filter(|rank| !self.dead.contains(rank))
                .collect()
        }
    }

    fn sizes() -> impl Strategy<Value = u32> {
        prop_oneof![8 => 1u32..=17, 1 => Just(64u32)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn operations_in_a_row_with_ranks_running_ahead(
            size in sizes(), seed: u64, kinds in proptest::collection::vec(any::<bool>(), 1..6),
        ) {
            let mut sim = Simulator::new(size, seed);
            let payload = |rank: u32, index: usize| vec![rank as u8; (rank as usize * 31 + index) % 90];
            let mut next = vec![0usize; size as usize];
            let mut running = vec![None; size as usize];
            while next.iter().any(|&done| done < kinds.len()) {
                let rank = sim.random(size as usize);
                if let Some(sequence) = running[rank] {
                    if let Some(result) = sim.take(rank as u32, sequence) {
                        let blocks = result.unwrap();
                        prop_assert_eq!(blocks.len(), size as usize);
                        for (peer, block) in (0..).zip(&blocks) {
                            let expected = match kinds[next[rank]] {
                                true => payload(peer, next[rank]),
                                false => Vec::new(),
                            };
                            prop_assert_eq!(&block[..], &expected[..]);
                        }
                        running[rank] = None;
                        next[rank] += 1;
                    }
                } else if next[rank] < kinds.len() {
                    let index = next[rank];
                    running[rank] = Some(match kinds[index] {
                        true => sim.start(rank as u32, Operation::AllGather, &payload(rank as u32, index)),
                        false => sim.start(rank as u32, Operation::Barrier, &[]),
                    });
                }
                for _ in 0..sim.random(4) {
                    sim.step();
                }
            }
            // Every rank sends exactly ceil(log2 n) rounds for each operation.
            let rounds = (0..).find(|&k| 1u64 << k >= u64::from(size)).unwrap();
            for rank in 0..size {
                for sequence in 0..kinds.len() as u64 {
                    let sent = sim.rounds_sent.get(&(rank, sequence)).map_or(0, BTreeSet::len);
                    prop_assert_eq!(sent, rounds);
                }
            }
        }

        #[test]
        fn a_death_reaches_everybody(size in 2u32..=17, seed: u64, entered in 0usize..18) {
            let mut sim = Simulator::new(size, seed);
            let victim = sim.random(size as usize) as u32;
            let mut sequences = BTreeMap::new();
            for rank in (0..size).filter(|&rank| rank != victim).take(entered) {
                sequences.insert(rank, sim.start(rank, Operation::AllGather, b"x"));
            }
            sim.run();
            sim.kill(victim);
            sim.run();
            for rank in sim.alive() {
                let now = sim.now;
                let error = match sequences.get(&rank) {
                    Some(&sequence) => sim.take(rank, sequence).unwrap().unwrap_err(),
                    None => {
                        let mesh = &mut sim.ranks[rank as usize];
                        mesh.start(Operation::Barrier, Arc::new([]), now).unwrap_err()
                    }
                };
                prop_assert!(matches!(error, NetError::PeerDied { rank, .. } if rank == victim), "{}", error);
            }
        }

        #[test]
        fn an_abort_reaches_everybody(size in 1u32..=17, seed: u64) {
            let mut sim = Simulator::new(size, seed);
            let by = sim.random(size as usize) as u32;
            let waiting: Vec<u32> = (0..size).filter(|&rank| rank != by).collect();
            let sequences: Vec<u64> =
                waiting.iter().map(|&rank| sim.start(rank, Operation::Barrier, &[])).collect();
            sim.ranks[by as usize].fail(Failure::Aborted { by, reason: "enough".to_owned() });
            sim.run();
            for (&rank, &sequence) in waiting.iter().zip(&sequences) {
                let error = sim.take(rank, sequence).unwrap().unwrap_err();
                prop_assert!(matches!(error, NetError::Aborted { by: b, .. } if b == by), "{}", error);
            }
        }

        #[test]
        fn a_rank_that_leaves_after_its_operation_does_not_disturb_it(size in 2u32..=17, seed: u64) {
            let mut sim = Simulator::new(size, seed);
            let payload = |rank: u32| vec![rank as u8; 5];
            let mut waiting: BTreeMap<u32, u64> = (0..size)
                .map(|rank| (rank, sim.start(rank, Operation::AllGather, &payload(rank))))
                .collect();
            while !waiting.is_empty() {
                prop_assert!(sim.step(), "stuck with {:?}", waiting);
                waiting = waiting
                    .into_iter()
                    .filter(|&(rank, sequence)| match sim.take(rank, sequence) {
                        Some(result) => {
                            assert_eq!(result.unwrap().len(), size as usize);
                            let mesh = &mut sim.ranks[rank as usize];
                            mesh.leave();
                            // Everybody's own state machine must survive this too.
                            mesh.lost((rank + 1) % size, "its connection closed");
                            false
                        }
                        None => true,
                    })
                    .collect();
            }
        }

        #[test]
        fn an_operation_without_a_rank_that_left_fails_at_once(size in 2u32..=17, seed: u64) {
            let mut sim = Simulator::new(size, seed);
            let leaver = sim.random(size as usize) as u32;
            let others: Vec<u32> = (0..size).filter(|&rank| rank != leaver).collect();
            let (early, late) = others.split_at(others.len() / 2);
            let mut sequences = Vec::new();
            for &rank in early {
                sequences.push((rank, sim.start(rank, Operation::Barrier, &[])));
            }
            sim.ranks[leaver as usize].leave();
            sim.run();
            let now = sim.now;
            for (rank, sequence) in sequences {
                let error = sim.take(rank, sequence).unwrap().unwrap_err();
                prop_assert!(matches!(error, NetError::PeerLeft { rank, .. } if rank == leaver), "{}", error);
            }
            for &rank in late {
                let mesh = &mut sim.ranks[rank as usize];
                let error = mesh.start(Operation::Barrier, Arc::new([]), now).unwrap_err();
                prop_assert!(matches!(error, NetError::PeerLeft { rank, .. } if rank == leaver), "{}", error);
            }
        }

        #[test]
        fn different_operations_are_an_error_on_every_rank(size in 2u32..=17, seed: u64) {
            let mut sim = Simulator::new(size, seed);
            let odd = sim.random(size as usize) as u32;
            let sequences: Vec<u64> = (0..size)
                .map(|rank| {
                    for _ in 0..sim.random(3) {
                        sim.step();
                    }
                    let operation =
                        if rank == odd { Operation::AllGather } else { Operation::Barrier };
                    sim.start(rank, operation, &[])
                })
                .collect();
            sim.run();
            for (rank, sequence) in (0..size).zip(sequences) {
                match sim.take(rank, sequence).unwrap().unwrap_err() {
                    NetError::Mismatch { rank: a, operation, other_rank: b, other_operation, .. } => {
                        prop_assert!(a == odd || b == odd);
                        prop_assert!(operation != other_operation);
                    }
                    error => prop_assert!(false, "{}", error),
                }
            }
            // And the next one works again.
            let sequences: Vec<u64> =
                (0..size).map(|rank| sim.start(rank, Operation::Barrier, &[])).collect();
            sim.run();
            for (rank, sequence) in (0..size).zip(sequences) {
                prop_assert!(sim.take(rank, sequence).unwrap().is_ok());
            }
        }

        #[test]
        fn a_timeout_names_exactly_who_has_not_come(
            size in sizes(), seed: u64, absent in proptest::collection::btree_set(0u32..64, 1..3),
        ) {
            let absent: Vec<u32> = absent.into_iter().filter(|&rank| rank < size).collect();
            prop_assume!(!absent.is_empty());
            let mut sim = Simulator::new(size, seed);
            let present: Vec<u32> = (0..size).filter(|rank| !absent.contains(rank)).collect();
            let sequences: Vec<u64> =
                present.iter().map(|&rank| sim.start(rank, Operation::AllGather, b"x")).collect();
            sim.pass(Duration::from_millis(500));
            for (&rank, &sequence) in present.iter().zip(&sequences) {
                prop_assert_eq!(&sim.ranks[rank as usize].abandon(sequence), &absent);
            }
            // When they come after all, their operation completes, and so does a retry.
            for &rank in &absent {
                sim.start(rank, Operation::AllGather, b"x");
            }
            sim.run();
            for &rank in &absent {
                prop_assert!(sim.take(rank, 0).unwrap().is_ok());
            }
            for rank in 0..size {
                sim.start(rank, Operation::Barrier, &[]);
            }
            sim.run();
            for rank in 0..size {
                prop_assert!(sim.take(rank, 1).unwrap().is_ok());
            }
        }

        #[test]
        fn any_message_is_an_error_at_worst(
            size in 2u32..=9, round: u32, sequence in prop_oneof![0u64..40, any::<u64>()],
            count in 0usize..9, rank: u32, completed: u64,
            seen in proptest::collection::vec(any::<u8>(), 0..4), which in 0..7,
        ) {
            let now = Instant::now();
            let mut mesh = Mesh::new(0, size, HEARTBEAT, SILENCE, now);
            mesh.start(Operation::Barrier, Arc::new([]), now).unwrap();
            let pair = (rank, Operation::Barrier);
            let message = match which {
                0 => Message::Control(Control::Progress { sequence, seen }),
                1 => Message::Control(Control::Mismatch { sequence, first: pair, second: pair }),
                2 => Message::Control(Control::Died { rank, reason: "é".repeat(2000) }),
                3 => Message::Control(Control::Aborted { by: rank, reason: String::new() }),
                4 => Message::Control(Control::Left { rank, completed, why: None }),
                _ => {
                    let round = if which == 5 { round } else { round % 4 };
                    let blocks = vec![Arc::from([]); count];
                    let operation = Operation::Barrier;
                    Message::Round(Round { sequence, operation, round, blocks })
                }
            };
            for from in 0..size {
                let _ = mesh.receive(from, message.clone(), now);
            }
            mesh.tick(now + Duration::from_secs(100));
            mesh.leave();
        }
    }

    #[test]
    fn silence_is_reported_once_and_ends_with_a_message() {
        let mut sim = Simulator::new(3, 1);
        sim.dead.insert(2); // stopped: its connections stay open
        sim.pass(SILENCE + Duration::from_secs(2));
        sim.collect();
        for rank in [0, 1] {
            let states = &sim.states[rank];
            assert!(
                matches!(states[..], [Output::Silent { rank: 2, .. }]),
                "{states:?}"
            );
        }
        sim.dead.clear();
        sim.pass(HEARTBEAT * 2);
        sim.collect();
        assert!(matches!(sim.states[0][1], Output::Heard(2)));
    }

    #[test]
    fn silence_is_known_to_all_ranks_and_so_is_its_end() {
        for size in [2, 6, 8, 17] {
            let mut sim = Simulator::new(size, 5);
            let victim = 3 % size;
            sim.dead.insert(victim); // stopped: its connections stay open
            sim.pass(SILENCE + Duration::from_secs(2));
            sim.dead.clear();
            sim.pass(HEARTBEAT * 2);
            sim.collect();
            for rank in (0..size).filter(|&rank| rank != victim) {
                let states = &sim.states[rank as usize];
                assert!(
                    matches!(states[..], [Output::Silent { rank: a, .. }, Output::Heard(b)]
                        if a == victim && b == victim),
                    "rank {rank} of {size}: {states:?}"
                );
            }
        }
    }

    #[test]
    fn a_rank_that_stood_still_itself_takes_nobody_for_silent() {
        let now = Instant::now();
        let mut mesh = Mesh::new(0, 3, HEARTBEAT, SILENCE, now);
        mesh.tick(now + SILENCE * 4);
        while let Some(output) = mesh.pop_output() {
            assert!(matches!(output, Output::Send { .. }), "{output:?}");
        }
    }

    #[test]
    fn a_rank_that_failed_and_leaves_says_why() {
        let mut sim = Simulator::new(5, 7);
        let waiting = sim.start(1, Operation::Barrier, &[]);
        sim.ranks[0].give_up("it was late");
        sim.ranks[0].leave();
        sim.run();
        let error = sim.take(1, waiting).unwrap().unwrap_err().to_string();
        assert!(
            error.contains("rank 0 has left the group (it was late)"),
            "{error}"
        );
        let later = sim.ranks[4].start(Operation::Barrier, Arc::new([]), sim.now);
        assert!(later.unwrap_err().to_string().contains("(it was late)"));
    }

    #[test]
    fn callers_that_retry_for_ever_are_stopped() {
        let now = Instant::now();
        let mut mesh = Mesh::new(0, 2, HEARTBEAT, SILENCE, now);
        for _ in 0..MAX_PENDING {
            let sequence = mesh.start(Operation::Barrier, Arc::new([]), now).unwrap();
            mesh.abandon(sequence);
        }
        let error = mesh
            .start(Operation::Barrier, Arc::new([]), now)
            .unwrap_err();
        assert!(matches!(
            error,
            NetError::TooManyPending {
                pending: MAX_PENDING
            }
        ));
    }

    #[test]
    fn long_blocks_go_in_several_messages_and_too_long_ones_not_at_all() {
        let now = Instant::now();
        let mut sim = Simulator::new(5, 3);
        let payload = vec![7; ROUND_MESSAGE];
        for rank in 0..5 {
            sim.start(rank, Operation::AllGather, &payload);
        }
        sim.run();
        for rank in 0..5 {
            let blocks = sim.take(rank, 0).unwrap().unwrap();
            assert!(blocks.iter().all(|block| block[..] == payload[..]));
        }
        let error = sim.ranks[0].start(Operation::AllGather, vec![0; MAX_PAYLOAD + 1].into(), now);
        assert!(matches!(error, Err(NetError::PayloadTooLarge { .. })));
    }
}
