//! The fault campaign: every fault in every phase of a job of three processes, each with a bounded
//! time and the words that every rank must end with, and nothing left behind.
//!
//! Rank 1 is the victim. [`cells`] is the table: a line says what strikes and when, and how the
//! others and rank 1 end. Ranks are processes of this very program ([`rank`]); the faults are its
//! own, the library knows nothing of them. `FAULTS_ONLY="Death InJoin"` runs a part of it.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod hostile;
#[path = "../common/interrupts.rs"]
mod interrupts;
mod launcher;
mod rank;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crossweft_net::{Rendezvous, RendezvousOptions, UniqueId};
use rustix::process::{Pid, Signal, kill_process};

/// Ranks of every job.
pub(crate) const WORLD: u32 = 3;
/// The rank that is struck.
pub(crate) const VICTIM: u32 = 1;

/// When a fault strikes. `Before` is on this side of the call, while the others may be in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    BeforeJoin,
    InJoin,
    BeforePrepare,
    InPrepare,
    BeforeExecute,
    InExecute,
    Between,
    BeforeLeave,
}

impl Phase {
    const ALL: [Self; 8] = [
        Self::BeforeJoin,
        Self::InJoin,
        Self::BeforePrepare,
        Self::InPrepare,
        Self::BeforeExecute,
        Self::InExecute,
        Self::Between,
        Self::BeforeLeave,
    ];

    pub(crate) fn from_name(name: &str) -> Self {
        let named = |phase: &Self| format!("{phase:?}") == name;
        Self::ALL.into_iter().find(named).unwrap()
    }
}

/// What strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// SIGKILL.
    Death,
    /// SIGINT to the rank alone.
    Interrupt,
    /// SIGABRT.
    Crash,
    /// SIGSTOP, and SIGCONT in good time.
    Stop,
    /// SIGSTOP until all others have ended.
    StopForever,
    /// The rank comes so many milliseconds late.
    Late(u64),
    /// Another thread of the rank aborts while it waits.
    Abort,
    /// The rank says or asks for something else than the others.
    WorldSize,
    Secret,
    Version,
    Collective,
    DataType,
    Operation,
    Size,
    Algorithm,
}

impl Fault {
    fn name(self) -> String {
        format!("{self:?}")
    }

    pub(crate) fn from_name(name: &str) -> Self {
        if let Some(time) = name.strip_prefix("Late(") {
            return Self::Late(time.trim_end_matches(')').parse().unwrap());
        }
        let all = [
            Self::Death,
            Self::Interrupt,
            Self::Crash,
            Self::Stop,
            Self::StopForever,
            Self::Abort,
            Self::WorldSize,
            Self::Secret,
            Self::Version,
            Self::Collective,
            Self::DataType,
            Self::Operation,
            Self::Size,
            Self::Algorithm,
        ];
        all.into_iter().find(|fault| fault.name() == name).unwrap()
    }
}

/// How a rank ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// With right results.
    Ok,
    /// With an error of the kind "lost a peer, or too late", in these words.
    Lost(&'static [&'static str]),
    /// With an error of the kind "used wrongly", in these words.
    Usage(&'static [&'static str]),
    /// By a signal.
    Signal(i32),
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
struct Cell {
    fault: Fault,
    phase: Phase,
    /// How each rank ends.
    ends: [End; WORLD as usize],
    /// What rank 0 warns of meanwhile.
    warning: &'static [&'static str],
    /// The caller's deadline.
    timeout: Duration,
}

/// Long enough never to pass.
const LONG: Duration = Duration::from_secs(60);
/// Short enough to wait for; longer than the silence that is reported, which is 1 s here, by what a busy machine may take
/// to start three processes and to stop one.
const SHORT: Duration = Duration::from_secs(7);
/// How long a stopped rank stands still.
const STOPPED: Duration = Duration::from_millis(2500);
/// A late rank comes in time, or too late for `SHORT`.
const LATE: u64 = 2000;
const TOO_LATE: u64 = 10_000;
/// A death is an error on all survivors within 5 s. On a machine that is busy with other things it
/// may take longer to be seen, so this only means "at once, not at the deadline".
const PROMPT: Duration = Duration::from_secs(15);

/// The words of ends that several cells share.
mod words {
    use super::End::{self, Lost, Signal, Usage};

    pub(crate) const KILLED: End = Signal(9);
    pub(crate) const MISSING: End =
        Lost(&["1 of 3 ranks did not join within", "ranks [1] (2 joined)"]);
    pub(crate) const NO_ROOT: End = Lost(&["lost the rendezvous"]);
    pub(crate) const DIED_JOINING: End = Lost(&["rank 1 died during joining"]);
    pub(crate) const DIED_GATHERING: End = Lost(&[
        "preparing plan `one-shot",
        "rank 1 died during all_gather (operation",
    ]);
    pub(crate) const DIED_PREPARING: End = Lost(&["preparing plan `", "rank 1 died during"]);
    pub(crate) const DIED_IN_PACKET: End = Lost(&[
        "plan `one-shot",
        "thread block 0, op ",
        "a packet from rank 1 (expected ",
        "rank 1 died: its connection",
    ]);
    pub(crate) const DIED: End = Lost(&[
        "plan `",
        "thread block 0, op ",
        "(expected ",
        "rank 1 died: its connection",
    ]);
    pub(crate) const ABORTED: End = Lost(&["rank 1 aborted the job", "out of patience"]);

    pub(crate) const LATE_NEIGHBOUR: End = Lost(&[
        "connecting to the neighbours of this rank did not complete in time",
        "ranks [1]",
    ]);
    pub(crate) const LATE_GATHER: End = Lost(&["did not complete in time; missing: ranks [1]"]);
    pub(crate) const SILENT_GATHER: End =
        Lost(&["did not complete in time; missing: ranks [1] (not heard for long: ranks [1])"]);
    pub(crate) const SILENT_PREPARE: End = Lost(&[
        "did not complete in time; missing: ranks [",
        "not heard for long: ranks [1]",
    ]);
    pub(crate) const LATE_PACKET: End = Lost(&[
        "a packet from rank 1 (expected ",
        "the deadline of 7s passed",
    ]);
    pub(crate) const SILENT_PACKET: End = Lost(&[
        "a packet from rank 1 (expected ",
        "the deadline of 7s passed",
        "ranks [1] not heard",
    ]);
    pub(crate) const SILENT: End = Lost(&["the deadline of 7s passed", "ranks [1] not heard"]);
    /// The late rank learns why the others did not wait for it.
    pub(crate) const LEFT_GATHER: End =
        Lost(&["has left the group (all_gather", "missing: ranks [1]"]);
    pub(crate) const LEFT_PACKET: End =
        Lost(&["has left the job (it had waited for a packet from rank 1"]);

    pub(crate) const OTHER_WORLD: End = Lost(&[
        "ranks [1]",
        "rank 1 was refused",
        "world size 4 but rank 0 with 3",
    ]);
    pub(crate) const WRONG_WORLD: End =
        Usage(&["refused rank 1", "world size 4 but rank 0 with 3"]);
    pub(crate) const OTHER_SECRET: End =
        Lost(&["ranks [1]", "1 connection did not prove the secret"]);
    pub(crate) const WRONG_SECRET: End = Usage(&["did not prove the secret of this unique id"]);
    pub(crate) const OTHER_VERSION: End =
        Lost(&["ranks [1]", "rank 1 was refused", "protocol version 999"]);
    pub(crate) const OTHER_CALL: End = Usage(&[
        "collective operation",
        "called all_gather",
        "rank 1 called barrier",
    ]);
    pub(crate) const OTHER_TYPE: End = Usage(&["rank 1 says", ", f64 sum,", ", f32 sum,"]);
    pub(crate) const OTHER_OPERATION: End = Usage(&["rank 1 says", ", f32 max,", ", f32 sum,"]);
    pub(crate) const OTHER_SIZE: End = Usage(&["rank 1 says", "up to 128 B", "up to 64 B"]);
    pub(crate) const OTHER_PLAN: End = Usage(&["rank 1 says all-reduce", "algorithm ring"]);

    /// What rank 0 warns of while it waits.
    pub(crate) const NOT_HEARD: &str = "rank 0 has not heard rank 1 for 1";
    pub(crate) const TO_JOIN: &str = "has waited 1s for ranks [1] to join";
    pub(crate) const TO_CONNECT: &str = "to be connected with ranks [1]";
    pub(crate) const IN_GATHER: &str = "rank 0 has waited 1s in all_gather";
    pub(crate) const FOR_PACKET: &str = "rank 0 has waited 1 s for a packet from rank 1 (expected ";
    pub(crate) const IS_SILENT: &str = "; that rank is silent for 1";
    pub(crate) const IS_ALIVE: &str = "; that rank is alive";
}

/// One line a cell.
#[rustfmt::skip]
fn cells() -> Vec<Cell> {
    use End::{Ok, Signal};
    use Fault::{
        Abort, Algorithm, Collective, Crash, DataType, Death, Interrupt, Late, Operation, Secret,
        Size, Stop, StopForever, Version, WorldSize,
    };
    use Phase::{
        BeforeExecute, BeforeJoin, BeforeLeave, BeforePrepare, Between, InExecute, InJoin,
        InPrepare,
    };
    use words::*;

    let cell = |fault, phase, [zero, one, two]: [End; 3]| Cell {
        fault, phase, ends: [zero, one, two], warning: &[], timeout: LONG,
    };
    // Ranks 0 and 2 end alike.
    let both = |fault, phase, others, victim| cell(fault, phase, [others, victim, others]);
    let short = |cell: Cell| Cell { timeout: SHORT, ..cell };
    let warns = |warning, cell: Cell| Cell { warning, ..cell };

    vec![
        // Death: the survivors are told who died and what they were doing.
        short(both(Death, BeforeJoin, MISSING, KILLED)),
        both(Death, InJoin, DIED_JOINING, KILLED),
        both(Death, BeforePrepare, DIED_GATHERING, KILLED),
        both(Death, InPrepare, DIED_PREPARING, KILLED),
        both(Death, BeforeExecute, DIED_IN_PACKET, KILLED),
        both(Death, InExecute, DIED, KILLED),
        both(Death, Between, DIED, KILLED),
        both(Death, BeforeLeave, Ok, KILLED),
        both(Crash, InExecute, DIED, Signal(6)),
        both(Interrupt, InExecute, DIED, Signal(2)),
        both(Interrupt, InPrepare, DIED_PREPARING, Signal(2)),

        // Silence that ends in time: it is reported, and all is well.
        warns(&[TO_JOIN], both(Stop, BeforeJoin, Ok, Ok)),
        warns(&[TO_CONNECT], both(Stop, InJoin, Ok, Ok)),
        warns(&[NOT_HEARD, IN_GATHER, "ranks [1]"], both(Stop, BeforePrepare, Ok, Ok)),
        warns(&[NOT_HEARD], both(Stop, InPrepare, Ok, Ok)),
        warns(&[NOT_HEARD, FOR_PACKET, IS_SILENT], both(Stop, BeforeExecute, Ok, Ok)),
        warns(&[NOT_HEARD, IS_SILENT], both(Stop, InExecute, Ok, Ok)),
        warns(&[NOT_HEARD], both(Stop, Between, Ok, Ok)),
        both(Stop, BeforeLeave, Ok, Ok),

        // Silence that does not: the caller's deadline holds, and names who it was.
        short(both(StopForever, BeforeJoin, MISSING, KILLED)),
        short(both(StopForever, InJoin, LATE_NEIGHBOUR, KILLED)),
        short(both(StopForever, BeforePrepare, SILENT_GATHER, KILLED)),
        short(both(StopForever, InPrepare, SILENT_PREPARE, KILLED)),
        short(both(StopForever, BeforeExecute, SILENT_PACKET, KILLED)),
        short(both(StopForever, InExecute, SILENT, KILLED)),
        short(both(StopForever, Between, SILENT_PACKET, KILLED)),
        short(both(StopForever, BeforeLeave, Ok, KILLED)),

        // Late, but alive.
        warns(&[TO_JOIN], both(Late(LATE), BeforeJoin, Ok, Ok)),
        warns(&[IN_GATHER, "ranks [1]"], both(Late(LATE), BeforePrepare, Ok, Ok)),
        warns(&[FOR_PACKET, IS_ALIVE], both(Late(LATE), BeforeExecute, Ok, Ok)),
        short(both(Late(TOO_LATE), BeforeJoin, MISSING, NO_ROOT)),
        short(both(Late(TOO_LATE), BeforePrepare, LATE_GATHER, LEFT_GATHER)),
        short(both(Late(TOO_LATE), BeforeExecute, LATE_PACKET, LEFT_PACKET)),
        short(both(Late(TOO_LATE), BeforeLeave, Ok, Ok)),

        // Another thread of rank 1 aborts while ranks 0 and 1 wait for rank 2.
        cell(Abort, BeforeJoin, [ABORTED, ABORTED, NO_ROOT]),
        cell(Abort, InJoin, [ABORTED, ABORTED, NO_ROOT]),
        both(Abort, BeforePrepare, ABORTED, ABORTED),
        both(Abort, InPrepare, ABORTED, ABORTED),
        both(Abort, BeforeExecute, ABORTED, ABORTED),
        both(Abort, InExecute, ABORTED, ABORTED),
        both(Abort, Between, ABORTED, ABORTED),
        both(Abort, BeforeLeave, Ok, Ok),

        // Ranks that do not fit together: both sides are told what does not.
        short(both(WorldSize, BeforeJoin, OTHER_WORLD, WRONG_WORLD)),
        short(both(Secret, BeforeJoin, OTHER_SECRET, WRONG_SECRET)),
        // Rank 1 itself sees that it is refused, and is content.
        short(both(Version, BeforeJoin, OTHER_VERSION, Ok)),
        both(Collective, BeforePrepare, OTHER_CALL, OTHER_CALL),
        both(DataType, BeforePrepare, OTHER_TYPE, OTHER_TYPE),
        both(Operation, BeforePrepare, OTHER_OPERATION, OTHER_OPERATION),
        both(Size, BeforePrepare, OTHER_SIZE, OTHER_SIZE),
        both(Algorithm, BeforePrepare, OTHER_PLAN, OTHER_PLAN),
    ]
}

/// Not a test of its own: what the ranks of the campaign run.
#[test]
fn rank_process() {
    if let Some(script) = rank::Script::from_environment() {
        rank::main(&script);
    }
}

#[test]
fn every_fault_in_every_phase() {
    let only = std::env::var("FAULTS_ONLY").unwrap_or_default();
    let mut cells = cells();
    cells.retain(|cell| format!("{:?} {:?}", cell.fault, cell.phase).contains(&only));
    if interrupts::are_ignored() {
        cells.retain(|cell| cell.fault != Fault::Interrupt);
    }
    let files = shared_memory_files();
    let started = Instant::now();
    // Most of a cell is waiting, so several run at a time.
    let queue = Mutex::new(cells.iter().enumerate());
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap().next();
                    let Some((index, cell)) = next else { break };
                    let result = run(cell);
                    results.lock().unwrap().push((index, *cell, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(index, ..)| *index);
    println!("{:16} {:14} {:>8}  verdict", "fault", "phase", "seconds");
    for (_, cell, result) in &results {
        let fault = cell.fault.name();
        let phase = format!("{:?}", cell.phase);
        let seconds = result.took.as_secs_f64();
        let verdict = match result.wrong.is_empty() {
            true => "ok",
            false => "WRONG",
        };
        println!("{fault:16} {phase:14} {seconds:8.2}  {verdict}");
    }
    println!("{} cells in {:.1?}", results.len(), started.elapsed());
    let wrong: Vec<_> = results
        .iter()
        .filter(|(_, _, result)| !result.wrong.is_empty())
        .map(|(_, cell, result)| format!("{:?} {:?}:\n{}", cell.fault, cell.phase, result.wrong))
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    let left: Vec<_> = shared_memory_files().difference(&files).cloned().collect();
    assert!(
        !left.iter().any(|name| name.contains("crossweft")),
        "{left:?}"
    );
}

fn shared_memory_files() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// What became of a cell.
struct Outcome {
    /// From the fault until the last survivor had ended.
    took: Duration,
    /// What was not as it should be; empty if all was.
    wrong: String,
}

/// A rank, as the driver sees it.
struct Rank {
    child: Child,
    /// When it struck, or was struck.
    struck: Option<Instant>,
    /// How it ended, in its own words, and when.
    end: Option<(Instant, String)>,
    /// What it left behind in its process.
    left: Option<String>,
    tag: Option<String>,
    stderr: String,
    /// Its output has ended.
    closed: u32,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of a rank's output, or its end.
enum Heard {
    Said(u32, String),
    Warned(u32, String),
    Closed(u32),
}

fn start(cell: &Cell, id: &UniqueId, rank: u32, heard: &Sender<Heard>) -> Rank {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["rank_process", "--exact", "--nocapture", "--test-threads=1"])
        .env("FAULTS_ID", id.to_string())
        .env("FAULTS_RANK", rank.to_string())
        .env("FAULTS_FAULT", cell.fault.name())
        .env("FAULTS_PHASE", format!("{:?}", cell.phase))
        .env("FAULTS_TIMEOUT", cell.timeout.as_millis().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    listen(out, heard.clone(), rank, Heard::Said);
    listen(err, heard.clone(), rank, Heard::Warned);
    Rank {
        child,
        struck: None,
        end: None,
        left: None,
        tag: None,
        stderr: String::new(),
        closed: 0,
    }
}

fn listen(
    from: impl Read + Send + 'static,
    to: Sender<Heard>,
    rank: u32,
    wrap: fn(u32, String) -> Heard,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let _ = to.send(wrap(rank, line));
        }
        let _ = to.send(Heard::Closed(rank));
    });
}

/// Nothing takes longer: whatever does, hangs.
const HANGS: Duration = Duration::from_secs(90);

fn run(cell: &Cell) -> Outcome {
    let rendezvous = Rendezvous::start(&RendezvousOptions {
        timeout: cell.timeout.mul_f64(0.9),
        ..RendezvousOptions::default()
    })
    .unwrap();
    let id = rendezvous.unique_id();
    let started = Instant::now();
    let (sender, heard) = channel();
    let mut ranks: Vec<Rank> = (0..WORLD)
        .map(|rank| start(cell, &id, rank, &sender))
        .collect();
    drop(sender);
    let hung = watch(cell, &mut ranks, &heard, started);
    let mut wrong = String::new();
    if hung {
        wrong += "it hangs\n";
    }
    let struck = ranks[VICTIM as usize].struck.unwrap_or(started);
    let mut took = Duration::ZERO;
    for (rank, state) in (0..).zip(&mut ranks) {
        judge(cell, rank, state, &mut wrong);
        if let Some((at, _)) = state.end.as_ref().filter(|_| rank != VICTIM) {
            took = took.max(at.saturating_duration_since(struck));
        }
    }
    let prompt = cell.timeout == LONG;
    if prompt && took > PROMPT {
        wrong += &format!("the survivors took {took:?}\n");
    }
    drop(rendezvous);
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    if ranks
        .iter()
        .filter_map(|rank| rank.tag.as_ref())
        .any(|tag| sockets.contains(tag))
    {
        wrong += "a socket was left behind\n";
    }
    if !wrong.is_empty() {
        for (rank, state) in ranks.iter().enumerate() {
            wrong += &format!(
                "  rank {rank} ended with {:?}\n",
                state.end.as_ref().map(|e| &e.1)
            );
            for line in state.stderr.lines() {
                wrong += &format!("    {line}\n");
            }
        }
    }
    Outcome { took, wrong }
}

/// Follows the ranks until all have ended. Whether that took too long.
fn watch(cell: &Cell, ranks: &mut [Rank], heard: &Receiver<Heard>, started: Instant) -> bool {
    let mut wake_at = None;
    loop {
        let survivors = (0..).zip(&*ranks).filter(|&(rank, _)| rank != VICTIM);
        if cell.fault == Fault::StopForever && survivors.clone().all(|(_, r)| r.closed == 2) {
            let _ = ranks[VICTIM as usize].child.kill();
        }
        if wake_at.is_some_and(|at| Instant::now() >= at) {
            wake_at = None;
            let victim = Pid::from_child(&ranks[VICTIM as usize].child);
            let _ = kill_process(victim, Signal::CONT);
        }
        match heard.recv_timeout(Duration::from_millis(20)) {
            Ok(Heard::Closed(rank)) => ranks[rank as usize].closed += 1,
            Ok(Heard::Warned(rank, line)) => {
                ranks[rank as usize].stderr += &line;
                ranks[rank as usize].stderr.push('\n');
            }
            Ok(Heard::Said(rank, line)) => {
                // The test harness may have begun the line.
                let Some((_, said)) = line.split_once('@') else {
                    continue;
                };
                let state = &mut ranks[rank as usize];
                match said.split_once(' ').unwrap_or((said, "")) {
                    ("struck", _) => {
                        state.struck = Some(Instant::now());
                        if cell.fault == Fault::Stop {
                            wake_at = Some(Instant::now() + STOPPED);
                        }
                    }
                    ("tag", tag) => state.tag = Some(tag.to_owned()),
                    ("end", end) => state.end = Some((Instant::now(), end.to_owned())),
                    ("left", what) => state.left = Some(what.to_owned()),
                    _ => {}
                }
            }
            Err(RecvTimeoutError::Timeout) if started.elapsed() > HANGS => return true,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

/// Adds what is wrong with how a rank ended.
fn judge(cell: &Cell, rank: u32, state: &mut Rank, wrong: &mut String) {
    use std::os::unix::process::ExitStatusExt;

    let status = state.child.try_wait().unwrap();
    let (class, words): (_, &[_]) = match cell.ends[rank as usize] {
        End::Ok => ("ok", &[]),
        End::Lost(words) => ("lost: ", words),
        End::Usage(words) => ("usage: ", words),
        End::Signal(signal) => {
            // Its pipes are closed, so it ends now if it has not yet.
            let status = status.unwrap_or_else(|| state.child.wait().unwrap());
            if status.signal() != Some(signal) {
                *wrong += &format!("rank {rank} was not ended by signal {signal}: {status}\n");
            }
            return;
        }
    };
    let end = state.end.as_ref().map_or("", |(_, end)| end);
    if !end.starts_with(class) {
        *wrong += &format!("rank {rank} did not end with {class:?}\n");
    }
    for word in words.iter().filter(|word| !end.contains(**word)) {
        *wrong += &format!("rank {rank} does not say {word:?}\n");
    }
    if state.left.as_deref() != Some("nothing") {
        *wrong += &format!("rank {rank} left behind {:?}\n", state.left);
    }
    for word in cell.warning.iter().filter(|_| rank == 0) {
        if !state.stderr.contains(word) {
            *wrong += &format!("rank {rank} does not warn of {word:?}\n");
        }
    }
}
