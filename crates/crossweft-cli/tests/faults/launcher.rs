//! The command as a launcher of its own ranks: Ctrl-C, a signal to one rank, and one that stands
//! still.

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::common::{crossweft, text};
use crate::interrupts;

/// `crossweft bench` in the middle of its work, which would take minutes, and its ranks' processes.
fn running(arguments: &str) -> (Child, Vec<Pid>) {
    let arguments = format!("bench all-reduce --ranks 3 --max 64K --iters 300000 {arguments}");
    let mut child = crossweft(arguments.split_whitespace())
        // As a shell does: Ctrl-C goes to the group.
        .process_group(0)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The header is printed when everything is prepared and the first size begins.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with('#'));
    std::thread::sleep(Duration::from_millis(300));
    let ranks = ranks_of(child.id());
    assert_eq!(ranks.len(), 3);
    (child, ranks)
}

/// The processes that `parent` has started, in rank order.
fn ranks_of(parent: u32) -> Vec<Pid> {
    let mut ranks = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else {
            continue;
        };
        let environment = text(&environment);
        let value = |name: &str| {
            let mut variables = environment.split('\0');
            variables.find_map(|v| v.strip_prefix(name)?.parse::<u32>().ok())
        };
        if value("CROSSWEFT_PARENT=") == Some(parent)
            && let Some(rank) = value("CROSSWEFT_RANK=")
        {
            ranks.push((rank, Pid::from_raw(pid).unwrap()));
        }
    }
    ranks.sort_unstable_by_key(|&(rank, _)| rank);
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

/// Whether there is such a process, be it a zombie.
fn exists(pid: Pid) -> bool {
    std::path::Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
}

fn assert_gone(ranks: &[Pid]) {
    let start = Instant::now();
    while ranks.iter().any(|&pid| exists(pid)) {
        assert!(start.elapsed() < Duration::from_secs(15), "a rank is left");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ctrl_c_ends_the_command_and_all_ranks() {
    if interrupts::are_ignored() {
        return;
    }
    let (child, ranks) = running("");
    kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    // Shells turn this into 130.
    assert_eq!(output.status.signal(), Some(2), "{}", text(&output.stderr));
    assert_gone(&ranks);
}

#[test]
fn an_interrupted_command_takes_its_ranks_with_it() {
    if interrupts::are_ignored() {
        return;
    }
    let (child, ranks) = running("");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(2), "{}", text(&output.stderr));
    assert_gone(&ranks);
}

#[test]
fn an_interrupted_rank_is_named_by_the_command_and_the_survivors() {
    if interrupts::are_ignored() {
        return;
    }
    let (child, ranks) = running("");
    kill_process(ranks[1], Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert!(
        message.contains("rank 1 was killed by signal 2"),
        "{message}"
    );
    for survivor in [0, 2] {
        let own = format!("error: rank {survivor}: ");
        let line = message.lines().find(|line| line.starts_with(&own));
        let line = line.unwrap_or_else(|| panic!("rank {survivor} says nothing: {message}"));
        assert!(line.contains("rank 1 died"), "{line}");
    }
    assert!(
        !message.contains("ending the ranks that are left"),
        "{message}"
    );
    assert_gone(&ranks);
}

#[test]
fn a_rank_that_stands_still_is_named_at_the_deadline_and_ended() {
    let (child, ranks) = running("--timeout 3");
    kill_process(ranks[1], Signal::STOP).unwrap();
    let output = child.wait_with_output().unwrap();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{message}");
    for survivor in [0, 2] {
        let own = format!("error: rank {survivor}: ");
        let line = message.lines().find(|line| line.starts_with(&own));
        let line = line.unwrap_or_else(|| panic!("rank {survivor} says nothing: {message}"));
        assert!(line.contains("rank 1"), "{line}");
        assert!(line.contains("the deadline of 3s passed"), "{line}");
    }
    assert!(
        message.contains("ending the ranks that are left"),
        "{message}"
    );
    assert_gone(&ranks);
}
