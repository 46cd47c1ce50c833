//! Processes that are killed or stopped: a child runs this same test program.
#![allow(clippy::unwrap_used, reason = "a test says best where it failed")]

mod common;

use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{rendezvous, soon};
use crossweft_net::{Group, JoinOptions, NetError, PeerState, UniqueId};
use rustix::process::{Pid, Signal, kill_process};

const ID: &str = "CROSSWEFT_TEST_ID";
const RANK: &str = "CROSSWEFT_TEST_RANK";
const SIZE: &str = "CROSSWEFT_TEST_SIZE";
const MODE: &str = "CROSSWEFT_TEST_MODE";

/// Not a test of its own: what the child does.
#[test]
fn child() {
    let Ok(id) = std::env::var(ID) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u32>().unwrap();
    let id: UniqueId = id.parse().unwrap();
    let group = Group::join(&id, number(RANK), number(SIZE), &options()).unwrap();
    match std::env::var(MODE).unwrap().as_str() {
        // One barrier, then idle until killed.
        "idle" => {
            group.barrier(soon()).unwrap();
            std::thread::sleep(Duration::from_secs(60));
        }
        // As above, then one more operation after it was stopped for a while.
        "gather" => {
            group.barrier(soon()).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            group.all_gather(&[7; 3_000_000], soon()).unwrap();
        }
        // Fetches a descriptor of rank 0, many times.
        "fetch" => {
            group.barrier(soon()).unwrap();
            for _ in 0..3000 {
                group.fetch_fd(0, 5, soon()).unwrap();
            }
            group.barrier(soon()).unwrap();
        }
        // Aborts and ends without a goodbye.
        "abort" => {
            group.abort("the child gave up");
            kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        mode => panic!("{mode}"),
    }
}

struct Process(Child);

impl Process {
    fn start(id: &UniqueId, rank: u32, size: u32, mode: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--test-threads=1"])
            .env(ID, id.to_string())
            .env(RANK, rank.to_string())
            .env(SIZE, size.to_string())
            .env(MODE, mode)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn options() -> JoinOptions {
    JoinOptions {
        heartbeat: Duration::from_millis(100),
        silence_after: Duration::from_millis(500),
        ..Default::default()
    }
}

/// The other ranks are threads of this process.
fn with_child<T: Send>(
    size: u32,
    victim: u32,
    mode: &str,
    run: impl Fn(&Group, &Process) -> T + Sync,
) -> Vec<T> {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    let process = Process::start(&id, victim, size, mode);
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .filter(|&rank| rank != victim)
            .map(|rank| {
                let (id, run, process) = (&id, &run, &process);
                scope.spawn(move || {
                    let group = Group::join(id, rank, size, &options()).unwrap();
                    if mode != "abort" {
                        group.barrier(soon()).unwrap();
                    }
                    run(&group, process)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    rendezvous.wait().unwrap();
    results
}

#[test]
fn a_killed_process_is_named_by_every_wait_of_every_rank() {
    for (size, victim) in [(2, 1), (5, 0), (16, 11)] {
        let killer = (victim + 1) % size;
        let times = with_child(size, victim, "idle", |group, process| {
            let started = Instant::now();
            if group.rank() == killer {
                std::thread::sleep(Duration::from_millis(100));
                process.signal(Signal::KILL);
            }
            let error = match (group.rank() % 3, size % 2) {
                (0, _) => group.fetch_fd(victim, 3, soon()).map(drop).unwrap_err(),
                (_, 0) => group.barrier(soon()).unwrap_err(),
                _ => group.all_gather(b"x", soon()).map(drop).unwrap_err(),
            };
            match &error {
                NetError::PeerDied { rank, .. } => assert_eq!(*rank, victim),
                error => panic!("{error}"),
            }
            let elapsed = started.elapsed();
            assert_eq!(group.liveness().peer(victim), PeerState::Dead);
            assert!(group.liveness().stopped());
            let error = group.check_peer(killer, "a test").unwrap_err();
            assert!(matches!(error, NetError::PeerDied { rank, .. } if rank == victim));
            elapsed
        });
        let slowest = times.into_iter().max().unwrap();
        assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    }
}

#[test]
fn a_process_that_dies_while_joining_ends_the_wait_of_the_others() {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    // It joins, then stops before everybody has come; killed, it is missing.
    let process = Process::start(&id, 1, 3, "idle");
    std::thread::sleep(Duration::from_millis(300));
    drop(process);
    let error = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let options = JoinOptions {
                timeout: Duration::from_secs(1),
                ..options()
            };
            Group::join(&id, 0, 3, &options).unwrap_err()
        });
        other.join().unwrap()
    });
    match error {
        NetError::RanksMissing { missing, .. } => assert_eq!(missing, [1, 2]),
        error => panic!("{error}"),
    }
}

#[test]
fn a_stopped_process_is_silent_but_not_dead_and_goes_on() {
    // Longer than TCP_USER_TIMEOUT (4 s), with more bytes on their way than fit into any buffer.
    const STOPPED: Duration = Duration::from_secs(6);
    with_child(2, 1, "gather", |group, process| {
        process.signal(Signal::STOP);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(STOPPED);
                let state = group.liveness().peer(1);
                assert!(
                    matches!(state, PeerState::Silent { since } if since > STOPPED / 2),
                    "{state:?}"
                );
                assert!(
                    !group.liveness().stopped(),
                    "{:?}",
                    group.liveness().failure()
                );
                process.signal(Signal::CONT);
            });
            let blocks = group.all_gather(&vec![9; 5_000_000], soon()).unwrap();
            assert_eq!(blocks[1], [7; 3_000_000]);
        });
        let state = group.liveness().peer(1);
        assert!(
            matches!(state, PeerState::Alive | PeerState::Left),
            "{state:?}"
        );
    });
}

/// Services give up on connections that are slow to say what they want, which must not be taken for
/// the end of the service.
#[test]
fn a_process_that_is_stopped_while_it_fetches_goes_on() {
    with_child(2, 1, "fetch", |group, process| {
        let file = std::fs::File::open("/dev/null").unwrap();
        group.offer_fd(5, file.as_fd()).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        process.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(2500));
        process.signal(Signal::CONT);
        group.barrier(soon()).unwrap();
    });
}

#[test]
fn an_abort_is_heard_even_if_the_process_ends_at_once() {
    with_child(4, 2, "abort", |group, _| {
        match group.barrier(soon()).unwrap_err() {
            NetError::Aborted { by: 2, reason, .. } => assert_eq!(reason, "the child gave up"),
            error => panic!("{error}"),
        }
    });
}

#[test]
fn nothing_is_left_behind() {
    let tags = with_child(2, 1, "idle", |group, process| {
        process.signal(Signal::KILL);
        group.barrier(soon()).unwrap_err();
        group.tag()
    });
    let tag: String = tags[0].iter().map(|byte| format!("{byte:02x}")).collect();
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(!sockets.contains(&tag));
}
