//! Where the ranks come from: threads, a launcher's job, or processes that this one spawns.

use std::ffi::OsString;
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crossweft_collective::{
    CollectiveError, Communicator, CommunicatorOptions, Devices, run_in_threads_on,
};
use crossweft_hal::cpu::{available_memory, bind_to_core, cores};
use crossweft_net::launch::{Job, Launcher};
use crossweft_net::{NetError, Rendezvous, RendezvousOptions};
use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process, setrlimit};

use crate::doctor::{self, DEFAULT_RANKS};
use crate::exit::Exit;

/// Why a job did not come to an end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JobError {
    #[error("{0}")]
    Usage(String),
    /// Of a rank that was started on its own.
    #[error("rank {rank}: {source}")]
    Rank { rank: u32, source: CollectiveError },
    /// Of the job as a whole; the message names the rank.
    #[error("{0}")]
    Job(#[from] CollectiveError),
    #[error("{0}")]
    Launch(#[from] NetError),
    #[error("cannot start rank {rank}: {source}")]
    Spawn { rank: u32, source: io::Error },
    #[error("waiting for the ranks: {0}")]
    Wait(io::Error),
}

impl JobError {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::Launch(_) | Self::Spawn { .. } | Self::Wait(_) => Exit::Usage,
            Self::Rank { source, .. } | Self::Job(source) => source.into(),
        }
    }
}

/// Tells a spawned rank the process id of who started it.
pub(crate) const PARENT: &str = "CROSSWEFT_PARENT";

/// What the ranks of a job are where no launcher has started them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Threads of this process, also under a launcher.
    Threads,
    /// Threads of this process, but the launcher's job if there is one.
    ThreadsOrLauncher,
    /// Processes that this one spawns.
    Processes,
}

/// A job to run.
#[derive(Debug)]
pub(crate) struct JobOptions {
    /// What the ranks are.
    pub(crate) start: Start,
    /// Ranks to start.
    pub(crate) ranks: u32,
    /// Says what is wrong with a launcher's job of another number of ranks, if anything is.
    pub(crate) refuse: fn(ranks: u32, job: &Job) -> Option<String>,
    /// The longest any call may take.
    pub(crate) timeout: Duration,
    /// What they compute on.
    pub(crate) devices: Devices,
    /// Whether spawned ranks are bound to a core each, if there are enough.
    pub(crate) bind: bool,
    /// Bytes of the host's memory that each rank takes, at least, if it computes there.
    pub(crate) memory: u64,
    /// Options of spawned ranks beside those of this process.
    pub(crate) arguments: &'static [&'static str],
}

impl JobOptions {
    /// Processes, or threads of this process; or what a launcher has started, of the same number of ranks if one was
    /// asked for.
    pub(crate) fn new(
        ranks: Option<u32>,
        threads: bool,
        devices: Devices,
        timeout: Duration,
        bind: bool,
    ) -> Self {
        Self {
            start: match threads {
                true => Start::Threads,
                false => Start::Processes,
            },
            ranks: ranks.unwrap_or(DEFAULT_RANKS),
            refuse: match ranks {
                // Whatever number the launcher has.
                None => |_, _| None,
                Some(_) => |ranks, job| {
                    (ranks != job.world_size).then(|| {
                        format!(
                            "--ranks {ranks}, but {} started {}; leave --ranks out",
                            job.launcher, job.world_size
                        )
                    })
                },
            },
            timeout,
            devices,
            bind,
            memory: 0,
            arguments: &[],
        }
    }

    /// Fails if this host has less memory than the ranks are going to take: the kernel would end one of them, or somebody
    /// else.
    fn check_memory(&self) -> Result<(), JobError> {
        let ranks = self.ranks;
        let needed = self.memory.saturating_mul(ranks.into());
        match available_memory().filter(|_| matches!(self.devices, Devices::Cpu)) {
            Some(free) if free < needed => Err(JobError::Usage(format!(
                "{ranks} ranks take {} of memory at least, of which this host has {} left; give smaller sizes, or fewer \
                 ranks",
                doctor::size(needed),
                doctor::size(free)
            ))),
            _ => Ok(()),
        }
    }
}

/// How many ranks a job is going to have, and how many of them on this host: a launcher's, or as many as are asked for.
pub(crate) fn ranks(asked: Option<u32>, threads: bool) -> (u32, u32) {
    let environment = |name: &str| std::env::var(name).ok();
    // What is wrong with its variables is said when its job is joined.
    let launched = Job::detect(&environment).ok().flatten();
    let started = asked.unwrap_or(DEFAULT_RANKS);
    launched
        .filter(|_| !threads)
        .map_or((started, started), |job| (job.world_size, job.local_size))
}

/// Runs the whole job, or this process's part of it. Each rank runs `rank_main` with what the ranks
/// are, in words; it returns the number of wrong elements, the same on every rank.
pub(crate) fn run(
    options: &JobOptions,
    rank_main: impl Fn(&Communicator, &str) -> Result<u64, CollectiveError> + Sync,
) -> Result<Exit, JobError> {
    if options.start == Start::Threads {
        return threads(options, rank_main);
    }
    let environment = |name: &str| std::env::var(name).ok();
    match Job::detect(&environment)? {
        Some(job) => {
            if let Some(parent) = environment(PARENT).filter(|_| is_spawned(&job)) {
                die_with(&parent, Signal::KILL)?;
            }
            one_rank(options, &job, rank_main)
        }
        None if options.start == Start::Processes => spawn(options),
        None => threads(options, rank_main),
    }
}

/// Whether a process like this one has started the rank.
fn is_spawned(job: &Job) -> bool {
    job.launcher == Launcher::Crossweft
}

fn communicator_options(options: &JobOptions) -> CommunicatorOptions {
    CommunicatorOptions {
        timeout: options.timeout,
    }
}

fn verdict(wrong: u64) -> Exit {
    if wrong == 0 { Exit::Ok } else { Exit::Wrong }
}

fn threads(
    options: &JobOptions,
    rank_main: impl Fn(&Communicator, &str) -> Result<u64, CollectiveError> + Sync,
) -> Result<Exit, JobError> {
    // Streams share the hardware's queues, 8 unless told otherwise: a rank's kernel would wait behind
    // another's that waits for it.
    let queues = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    let queues = queues.and_then(|n| n.parse().ok()).unwrap_or(8);
    if matches!(options.devices, Devices::Cuda(_)) && options.ranks > queues {
        return Err(JobError::Usage(format!(
            "{} ranks in one process on CUDA, but its streams share {queues} queues: set \
             CUDA_DEVICE_MAX_CONNECTIONS=32 (the most there are), or use processes",
            options.ranks
        )));
    }
    options.check_memory()?;
    raise_file_limit();
    let wrong = run_in_threads_on(
        |rank| Ok(options.devices.of(rank)?),
        options.ranks,
        communicator_options(options),
        |communicator| rank_main(communicator, "threads"),
    )?;
    // Every rank counted the wrong elements of all.
    Ok(verdict(wrong.into_iter().max().unwrap_or(0)))
}

/// Lets this process open as many files as it may: each rank of one process has some for each other rank, and 16 ranks
/// take more than the 1024 that are usual.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where it stays as it is, what is missing then says so.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// This process is one rank of a job that somebody else has started.
fn one_rank(
    options: &JobOptions,
    job: &Job,
    rank_main: impl Fn(&Communicator, &str) -> Result<u64, CollectiveError>,
) -> Result<Exit, JobError> {
    let rank = job.rank;
    if let Some(reason) = (options.refuse)(options.ranks, job) {
        return Err(JobError::Usage(reason));
    }
    // Before any thread is started.
    let bound = options.bind && is_spawned(job) && bind(job);
    let run = || {
        let communicator =
            Communicator::from_job(job, &options.devices, communicator_options(options), None)?;
        let started_as = if is_spawned(job) {
            match bound {
                true => "processes, bound to a core each".to_owned(),
                false => "processes".to_owned(),
            }
        } else {
            format!("processes of {}", job.launcher)
        };
        rank_main(&communicator, &started_as)
    };
    run().map(verdict).map_err(|source| match source {
        // It names the rank itself.
        source @ CollectiveError::Usage { .. } => JobError::Job(source),
        source => JobError::Rank { rank, source },
    })
}

/// Binds this rank to a core of its own, if there is one for every rank; says whether it did. Left
/// alone, the scheduler now and then keeps two spinning ranks on one core for seconds.
fn bind(job: &Job) -> bool {
    let cores = cores();
    (job.world_size as usize <= cores.len())
        .then(|| cores.get(job.rank as usize))
        .flatten()
        .is_some_and(|&core| bind_to_core(core).is_ok())
}

/// Makes the kernel send this process a signal when the one that spawned it is gone, however it went. That holds for a
/// program that takes this one's place, too.
pub(crate) fn die_with(parent: &str, signal: Signal) -> Result<(), JobError> {
    let failed =
        |e: rustix::io::Errno| JobError::Usage(format!("cannot watch the parent process: {e}"));
    rustix::process::set_parent_process_death_signal(Some(signal)).map_err(failed)?;
    // It may have gone before the kernel was asked.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if now.as_deref() != Some(parent) {
        return Err(JobError::Usage(
            "the process that started this rank is gone".to_owned(),
        ));
    }
    Ok(())
}

/// How long ranks may take to end by themselves once one of them has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Starts the ranks as processes and waits for them.
fn spawn(options: &JobOptions) -> Result<Exit, JobError> {
    options.check_memory()?;
    let (ranks, timeout) = (options.ranks, options.timeout);
    let mut rendezvous = Some(Rendezvous::start(&RendezvousOptions {
        timeout,
        ..RendezvousOptions::default()
    })?);
    let id = rendezvous
        .as_ref()
        .map(|r| r.unique_id().to_string())
        .unwrap_or_default();
    let program = std::env::current_exe().map_err(|source| JobError::Spawn { rank: 0, source })?;
    let given: Vec<OsString> = std::env::args_os().skip(1).collect();
    // What follows is no option.
    let end = given.iter().position(|argument| argument == "--");
    let end = end.unwrap_or(given.len());
    let mut job = Processes::default();
    for rank in 0..ranks {
        let child = Command::new(&program)
            .args(&given[..end])
            .args(options.arguments)
            .args(&given[end..])
            .env("CROSSWEFT_RANK", rank.to_string())
            .env("CROSSWEFT_WORLD_SIZE", ranks.to_string())
            .env("CROSSWEFT_UNIQUE_ID", &id)
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|source| JobError::Spawn { rank, source })?;
        job.add(rank, child);
    }
    let mut exit = Exit::Ok;
    job.wait(
        || {},
        |rank, status| {
            let ended = judge(rank, status);
            exit = exit.worse(ended);
            if ended != Exit::Ok {
                // Whoever is still joining learns that the job will not come together.
                rendezvous = None;
            }
        },
    )
    .map_err(JobError::Wait)?;
    drop(rendezvous);
    Ok(exit)
}

/// What a rank's end means; says so if nobody else can.
fn judge(rank: u32, status: ExitStatus) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::from_code(code),
        (None, Some(signal)) => {
            crate::complain(&format!("error: rank {rank} was killed by signal {signal}"));
            Exit::Lost
        }
        (None, None) => Exit::Lost,
    }
}

/// Spawned ranks; none outlives this.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    children: Vec<(u32, Child, Option<ExitStatus>)>,
}

impl Processes {
    pub(crate) fn add(&mut self, rank: u32, child: Child) {
        self.children.push((rank, child, None));
    }

    /// Waits for all, while `meanwhile` is called now and then, and `ended` for each rank that ends; once one has failed,
    /// the others have [`GRACE`] to end by themselves.
    pub(crate) fn wait(
        mut self,
        mut meanwhile: impl FnMut(),
        mut ended: impl FnMut(u32, ExitStatus),
    ) -> io::Result<()> {
        let mut failed: Option<Instant> = None;
        while self.children.iter().any(|(_, _, status)| status.is_none()) {
            for (rank, child, status) in &mut self.children {
                if status.is_none()
                    && let Some(end) = child.try_wait()?
                {
                    *status = Some(end);
                    ended(*rank, end);
                    if !end.success() {
                        failed.get_or_insert_with(Instant::now);
                    }
                }
            }
            if failed.is_some_and(|at| at.elapsed() > GRACE) {
                crate::complain(&format!(
                    "error: ending the ranks that are left, {GRACE:?} after one has failed"
                ));
                break;
            }
            meanwhile();
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let left = self.children.iter_mut();
        let mut left: Vec<&mut Child> = left
            .filter(|(_, _, status)| status.is_none())
            .map(|(_, child, _)| child)
            .collect();
        if left.is_empty() {
            return;
        }
        let ranks = left.iter().map(|child| Pid::from_child(child)).collect();
        for pid in stop_with_descendants(ranks) {
            // It can only fail if it is gone already, as can the next.
            let _ = kill_process(pid, Signal::KILL);
        }
        for child in &mut left {
            let _ = child.wait();
        }
    }
}

/// Stops processes and whatever they have started, so that nothing more is started, and says which all those are. They are
/// in no groups of their own, which a terminal's Ctrl-C, and its input, would not reach.
fn stop_with_descendants(processes: Vec<Pid>) -> Vec<Pid> {
    let (mut found, mut new) = (Vec::new(), processes);
    while !new.is_empty() {
        for &pid in &new {
            let _ = kill_process(pid, Signal::STOP);
        }
        found.append(&mut new);
        new = children_of(&found);
        new.retain(|pid| !found.contains(pid));
    }
    found
}

/// The processes that one of these has started, and nobody has waited for.
fn children_of(parents: &[Pid]) -> Vec<Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Pid::from_raw)
        .filter(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
            let parent = stat.ok().and_then(|stat| {
                // Behind the name, which may have anything in it, and the state.
                let fields = stat.rsplit_once(')')?.1;
                fields.split_whitespace().nth(1)?.parse().ok()
            });
            parent
                .and_then(Pid::from_raw)
                .is_some_and(|parent| parents.contains(&parent))
        })
        .collect()
}
