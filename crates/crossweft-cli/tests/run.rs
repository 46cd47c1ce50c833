//! `crossweft run`, with a library that says what NCCL's would.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{crossweft, text};

/// A library that reports each process it is loaded into, as crossweft's does at its first communicator.
const REPORTS: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

__attribute__((constructor)) static void report(void) {
    const char* name = getenv("CROSSWEFT_RUN_REPORT");
    struct sockaddr_un to = {AF_UNIX, {0}};
    char pid[16];
    if (!name) return;
    size_t length = strlen(name);
    memcpy(to.sun_path + 1, name, length);
    int socket_ = socket(AF_UNIX, SOCK_DGRAM, 0);
    int count = snprintf(pid, sizeof pid, "%d", getpid());
    sendto(socket_, pid, (size_t)count, 0, (void*)&to, offsetof(struct sockaddr_un, sun_path) + 1 + length);
    close(socket_);
}
"#;

fn library(folder: &Path, source: &str) -> PathBuf {
    let (c, library) = (folder.join("library.c"), folder.join("library.so"));
    std::fs::write(&c, source).unwrap();
    let mut cc = Command::new("cc");
    let status = cc
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&c)
        .status();
    assert!(status.unwrap().success());
    library
}

#[test]
fn ranks_are_told_who_they_are_and_users_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), REPORTS);
    let library = library.to_str().unwrap();
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $CROSSWEFT_DEVICE, ${MASTER_PORT:+port}";
    let arguments = [
        "run",
        "-n",
        "3",
        "--library",
        library,
        "--",
        "sh",
        "-c",
        script,
    ];
    let output = crossweft(arguments).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    let device = match crossweft_collective::Devices::cuda() {
        Ok(_) => "cuda",
        Err(_) => "cpu",
    };
    assert_eq!(
        lines,
        [
            format!("0 of 3, 0 of 3, {device}, port"),
            format!("1 of 3, 1 of 3, {device}, port"),
            format!("2 of 3, 2 of 3, {device}, port")
        ]
    );
    assert!(
        err.contains("3 processes have made communicators with"),
        "{err}"
    );
}

#[test]
fn ranks_are_told_in_the_variables_of_a_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "int nothing;");
    let library = library.to_str().unwrap();
    let mpirun = "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, $OMPI_COMM_WORLD_LOCAL_RANK of \
                  $OMPI_COMM_WORLD_LOCAL_SIZE, ${MASTER_ADDR}${RANK+not as torchrun}";
    let srun = "echo $SLURM_PROCID of $SLURM_NTASKS, $SLURM_LOCALID on $SLURM_NODEID of $SLURM_NNODES, ${MASTER_ADDR}";
    for (launcher, script, expected) in [
        ("mpirun", mpirun, "1 of 2, 1 of 2, 127.0.0.1"),
        ("srun", srun, "1 of 2, 1 on 0 of 1, 127.0.0.1"),
    ] {
        let mut command = crossweft(["run", "-n", "2", "--library", library, "--as", launcher]);
        command.env_remove("RANK").args(["--", "sh", "-c", script]);
        let output = command.output().unwrap();
        let out = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(out.lines().any(|line| line == expected), "{out}");
    }
}

#[test]
fn a_program_that_does_not_use_it_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "int nothing;");
    let library = library.to_str().unwrap();
    let output = crossweft([
        "run",
        "--library",
        library,
        "sh",
        "-c",
        "exit $((7 + ${RANK:-0}))",
    ]);
    let output = { output }.output().unwrap();
    let err = text(&output.stderr);
    // The program's own code.
    assert_eq!(output.status.code(), Some(7), "{err}");
    assert!(err.contains("no process has made a communicator"), "{err}");
}

#[test]
fn a_library_that_the_loader_would_not_find_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["with space", "with:colon"] {
        let inner = folder.path().join(name);
        std::fs::create_dir(&inner).unwrap();
        let library = library(&inner, "int nothing;");
        let arguments = ["run", "--library", library.to_str().unwrap(), "true"];
        let output = crossweft(arguments).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains("spaces and colons"), "{err}");
    }
}

#[test]
fn what_cannot_be_run_is_said() {
    for (arguments, words) in [
        (
            &["run", "--library", "/no/such/library.so", "true"][..],
            "/no/such/library.so",
        ),
        (
            &["run", "--library", "/proc/self/exe", "/no/such/program"][..],
            "cannot start /no/such/program",
        ),
        (&["run", "-n", "0", "true"][..], "0"),
        (&["run"][..], "PROGRAM"),
    ] {
        let output = crossweft(arguments.iter().copied()).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {err}");
        assert!(err.contains(words), "{arguments:?}: {err}");
    }
}

#[test]
fn ranks_do_not_outlive_one_that_fails() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "int nothing;");
    let library = library.to_str().unwrap();
    let script = "if [ $RANK = 1 ]; then exit 9; fi; exec sleep 600";
    let arguments = [
        "run",
        "-n",
        "2",
        "--library",
        library,
        "--",
        "sh",
        "-c",
        script,
    ];
    let output = crossweft(arguments).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(9), "{err}");
    assert!(err.contains("ending the ranks that are left"), "{err}");
}

#[test]
fn what_keeps_all_ranks_from_starting_is_said_once() {
    let arguments = "run -n 3 --library /proc/self/exe -- /no/such/program";
    let output = crossweft(arguments.split(' ')).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert_eq!(
        err.matches("cannot start /no/such/program").count(),
        1,
        "{err}"
    );
    // The program has made no mistake.
    assert!(!err.contains("does the program use NCCL"), "{err}");
}

#[test]
fn what_a_rank_has_started_is_ended_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "int nothing;");
    let pids = folder.path().join("pids");
    // A shell of its own, whose child is in yet another session.
    let script = format!(
        "if [ $RANK = 1 ]; then while [ $(wc -l < {0}) != 3 ]; do sleep 0.01; done; exit 9; fi; echo $$ >> {0}; \
         sh -c 'echo $$ >> {0}; setsid sh -c \"echo \\$\\$ >> {0}; exec sleep 600\" & wait' & wait",
        pids.display()
    );
    std::fs::write(&pids, "").unwrap();
    let arguments = ["run", "-n", "2", "--library", library.to_str().unwrap()];
    // To nowhere, since whoever is left would keep a pipe open.
    let mut command = crossweft(arguments);
    command.args(["--", "sh", "-c", &script]);
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    assert_eq!(status.unwrap().code(), Some(9));
    let pids = std::fs::read_to_string(&pids).unwrap();
    assert_eq!(pids.lines().count(), 3, "{pids}");
    let start = Instant::now();
    while pids.lines().any(runs) {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "one of {pids} is left"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is there, and not only left for its parent to look at.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn ranks_do_not_outlive_the_command_however_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), "int nothing;");
    let library = library.to_str().unwrap();
    // A launcher may end what it has started itself. A shell's child that is yet to become another program has the shell's
    // trap, and would lose the signal.
    let launcher =
        "trap 'kill $rank; exit 3' TERM; sh -c 'echo $$; exec sleep 600' & rank=$!; echo $$; wait";
    let rank = "echo $$; exec sleep 600";
    for (ranks, script) in [(&["-n", "2"][..], rank), (&[][..], launcher)] {
        for signal in ["TERM", "KILL"] {
            let mut command = crossweft(["run", "--library", library]);
            command.args(ranks).args(["--", "sh", "-c", script]);
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let pids: Vec<String> = lines.take(2).map(Result::unwrap).collect();
            assert!(pids.iter().all(|pid| runs(pid)), "{pids:?}");
            let killed = Command::new("kill")
                .args(["-s", signal, &child.id().to_string()])
                .status();
            assert!(killed.unwrap().success());
            assert!(!child.wait().unwrap().success());
            let start = Instant::now();
            while pids.iter().any(|pid| runs(pid)) {
                assert!(
                    start.elapsed() < Duration::from_secs(30),
                    "{pids:?} outlive SIG{signal}"
                );
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}
