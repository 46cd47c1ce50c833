//! Ranks of one host that find each other by a name, and a rendezvous that is left to itself.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crossweft_net::launch::join_by_name;
use crossweft_net::{Cancel, Group, JoinOptions, NetError, Rendezvous, RendezvousOptions};

const NAME: &str = "CROSSWEFT_TEST_NAME";
const RANK: &str = "CROSSWEFT_TEST_RANK";

fn meet(name: &str, ranks: u32) -> Vec<Vec<Vec<u8>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let (join, meet) = (JoinOptions::default(), RendezvousOptions::default());
                    let group = join_by_name(name, (rank, ranks), &join, &meet).unwrap();
                    let deadline = Instant::now() + Duration::from_secs(30);
                    group.all_gather(&[rank as u8; 3], deadline).unwrap()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

#[test]
fn ranks_meet_by_name_again_and_again() {
    let name = format!("by name {}", std::process::id());
    let expected: Vec<_> = (0..3).map(|rank: u8| vec![rank; 3]).collect();
    for _ in 0..3 {
        assert_eq!(meet(&name, 3), vec![expected.clone(); 3]);
    }
}

#[test]
fn a_rank_whose_leader_never_comes_says_so() {
    let join = JoinOptions {
        timeout: Duration::from_millis(200),
        ..JoinOptions::default()
    };
    let name = format!("nobody {}", std::process::id());
    let error = join_by_name(&name, (1, 2), &join, &RendezvousOptions::default()).unwrap_err();
    assert!(matches!(error, NetError::Timeout { .. }), "{error}");
}

#[test]
fn a_leader_whose_name_is_taken_can_be_cancelled() {
    let name = format!("taken {}", std::process::id());
    let cancels = [Cancel::new().unwrap(), Cancel::new().unwrap()];
    std::thread::scope(|scope| {
        let leaders = cancels.each_ref().map(|cancel| {
            let (name, cancel) = (&name, cancel.clone());
            // One after the other, so that the second finds the name taken.
            std::thread::sleep(Duration::from_millis(100));
            scope.spawn(move || {
                let join = JoinOptions {
                    timeout: Duration::from_secs(30),
                    cancel: Some(cancel),
                    ..JoinOptions::default()
                };
                join_by_name(name, (0, 2), &join, &RendezvousOptions::default()).unwrap_err()
            })
        });
        std::thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        for (cancel, leader) in cancels.iter().zip(leaders).rev() {
            cancel.cancel("no longer needed");
            let error = leader.join().unwrap();
            assert!(matches!(error, NetError::Aborted { .. }), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn a_detached_rendezvous_serves_until_all_have_come() {
    let options = RendezvousOptions {
        timeout: Duration::from_secs(2),
        ..RendezvousOptions::default()
    };
    let rendezvous = Rendezvous::start(&options).unwrap();
    let id = rendezvous.unique_id();
    rendezvous.detach();
    // Whoever made the id may have other things to do first.
    std::thread::sleep(options.timeout * 5 / 4);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let id = &id;
            scope.spawn(move || {
                let group = Group::join(id, rank, 2, &JoinOptions::default()).unwrap();
                group
                    .barrier(Instant::now() + Duration::from_secs(30))
                    .unwrap();
            });
        }
    });
}

/// Not a test of its own: what a rank of another PID namespace does.
#[test]
fn child() {
    let Ok(name) = std::env::var(NAME) else {
        return;
    };
    meet_and_fetch(&name, std::env::var(RANK).unwrap().parse().unwrap());
}

/// Joins two others, and fetches a descriptor of each.
fn meet_and_fetch(name: &str, rank: u32) {
    let (join, meet) = (JoinOptions::default(), RendezvousOptions::default());
    let group = join_by_name(name, (rank, 3), &join, &meet).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let file = std::fs::File::open("/dev/null").unwrap();
    group.offer_fd(7, file.as_fd()).unwrap();
    for peer in (0..3).filter(|&peer| peer != rank) {
        group.fetch_fd(peer, 7, deadline).unwrap();
    }
    group.barrier(deadline).unwrap();
}

/// As containers on one host that share its network: none sees the process ids of another.
#[test]
fn ranks_of_other_pid_namespaces_are_of_the_same_user() {
    let quiet = |options: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(options).stdout(Stdio::null());
        command
    };
    let namespace = [&["-p", "-f"][..], &["-r", "-p", "-f"]];
    let is_permitted = |options: &&&[&str]| {
        let tried = quiet(options).arg("true").stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    let Some(options) = namespace.iter().find(is_permitted) else {
        println!("skipped: no PID namespace can be made here");
        return;
    };
    let name = format!("namespaces {}", std::process::id());
    let mut children = [1, 2].map(|rank| {
        quiet(options)
            .arg(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env(NAME, &name)
            .env(RANK, rank.to_string())
            .spawn()
            .unwrap()
    });
    meet_and_fetch(&name, 0);
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
}
