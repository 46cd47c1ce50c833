//! Where the ranks come from: threads, a launcher's job, or processes that this one spawns.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_collective::{CollectiveError, Communicator, CommunicatorOptions, run_in_threads};
use crossweft_net::launch::{Job, Launcher};
use crossweft_net::{JoinOptions, NetError, Rendezvous, RendezvousOptions};

use super::measure;
use super::options::AllReduce;
use crate::exit::Exit;

/// Why a benchmark did not come to an end.
#[derive(Debug, thiserror::Error)]
pub(super) enum BenchError {
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
}

impl BenchError {
    pub(super) fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::Launch(_) | Self::Spawn { .. } => Exit::Usage,
            Self::Rank { source, .. } | Self::Job(source) => source.into(),
        }
    }
}

/// Tells a spawned rank the process id of who started it.
const PARENT: &str = "CROSSWEFT_PARENT";

/// Runs the whole job, or this process's part of it.
pub(super) fn run(options: &AllReduce) -> Result<Exit, BenchError> {
    options.check().map_err(BenchError::Usage)?;
    if options.threads {
        return threads(options);
    }
    let environment = |name: &str| std::env::var(name).ok();
    match Job::detect(&environment)? {
        Some(job) => {
            if let Some(parent) = environment(PARENT).filter(|_| is_spawned(&job)) {
                die_with(&parent)?;
            }
            one_rank(options, &job)
        }
        None => spawn(options),
    }
}

/// Whether a process like this one has started the rank.
fn is_spawned(job: &Job) -> bool {
    job.launcher == Launcher::Crossweft
}

fn communicator_options(options: &AllReduce) -> CommunicatorOptions {
    CommunicatorOptions {
        timeout: options.time_limit(),
    }
}

fn verdict(wrong: u64) -> Exit {
    if wrong == 0 { Exit::Ok } else { Exit::Wrong }
}

fn threads(options: &AllReduce) -> Result<Exit, BenchError> {
    let ranks = options.ranks_to_start();
    let wrong = run_in_threads(ranks, communicator_options(options), |communicator| {
        measure::run(options, communicator, "threads")
    })?;
    // Every rank counted the wrong elements of all.
    Ok(verdict(wrong.into_iter().max().unwrap_or(0)))
}

/// This process is one rank of a job that somebody else has started.
fn one_rank(options: &AllReduce, job: &Job) -> Result<Exit, BenchError> {
    let Job {
        rank, world_size, ..
    } = *job;
    if let Some(ranks) = options.ranks.filter(|&ranks| ranks != world_size) {
        return Err(BenchError::Usage(format!(
            "--ranks {ranks}, but {} started {world_size}; leave --ranks out",
            job.launcher
        )));
    }
    let timeout = options.time_limit();
    let join = JoinOptions {
        timeout,
        ..JoinOptions::default()
    };
    let rendezvous = RendezvousOptions {
        timeout,
        ..RendezvousOptions::default()
    };
    let run = || {
        let group = job.join(&join, &rendezvous)?;
        let communicator = Communicator::new(Arc::new(group), communicator_options(options))?;
        let started_as = if is_spawned(job) {
            "processes".to_owned()
        } else {
            format!("processes of {}", job.launcher)
        };
        measure::run(options, &communicator, &started_as)
    };
    run()
        .map(verdict)
        .map_err(|source| BenchError::Rank { rank, source })
}

/// Makes the kernel end this process when the one that spawned it is gone, however it went.
fn die_with(parent: &str) -> Result<(), BenchError> {
    let failed =
        |e: rustix::io::Errno| BenchError::Usage(format!("cannot watch the parent process: {e}"));
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(failed)?;
    // It may have gone before the kernel was asked.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    if now.as_deref() != Some(parent) {
        return Err(BenchError::Usage(
            "the process that started this rank is gone".to_owned(),
        ));
    }
    Ok(())
}

/// How long ranks may take to end by themselves once one of them has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Starts the ranks as processes and waits for them.
fn spawn(options: &AllReduce) -> Result<Exit, BenchError> {
    let ranks = options.ranks_to_start();
    let timeout = options.time_limit();
    let mut rendezvous = Some(Rendezvous::start(&RendezvousOptions {
        timeout,
        ..RendezvousOptions::default()
    })?);
    let id = rendezvous
        .as_ref()
        .map(|r| r.unique_id().to_string())
        .unwrap_or_default();
    let program =
        std::env::current_exe().map_err(|source| BenchError::Spawn { rank: 0, source })?;
    let mut job = Processes {
        children: Vec::new(),
    };
    for rank in 0..ranks {
        let child = Command::new(&program)
            .args(std::env::args_os().skip(1))
            .env("CROSSWEFT_RANK", rank.to_string())
            .env("CROSSWEFT_WORLD_SIZE", ranks.to_string())
            .env("CROSSWEFT_UNIQUE_ID", &id)
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|source| BenchError::Spawn { rank, source })?;
        job.children.push((rank, child, None));
    }
    let mut exit = Exit::Ok;
    let mut failed: Option<Instant> = None;
    while job.children.iter().any(|(_, _, status)| status.is_none()) {
        for (rank, child, status) in &mut job.children {
            if status.is_some() {
                continue;
            }
            *status = child.try_wait().map_err(|source| BenchError::Spawn {
                rank: *rank,
                source,
            })?;
            if let Some(status) = status {
                let ended = judge(*rank, *status);
                exit = exit.worse(ended);
                if ended != Exit::Ok && failed.is_none() {
                    failed = Some(Instant::now());
                    // Whoever is still joining learns that the job will not come together.
                    rendezvous = None;
                }
            }
        }
        if failed.is_some_and(|at| at.elapsed() > GRACE) {
            eprintln!("error: ending the ranks that are left, {GRACE:?} after one has failed");
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(rendezvous);
    Ok(exit)
}

/// What a rank's end means; says so if nobody else can.
fn judge(rank: u32, status: ExitStatus) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::from_code(code),
        (None, Some(signal)) => {
            eprintln!("error: rank {rank} was killed by signal {signal}");
            Exit::Lost
        }
        (None, None) => Exit::Lost,
    }
}

/// Spawned ranks; none outlives this.
struct Processes {
    children: Vec<(u32, Child, Option<ExitStatus>)>,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (_, child, status) in &mut self.children {
            if status.is_none() {
                // Both can only fail if it is gone already.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
