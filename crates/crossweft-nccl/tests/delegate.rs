//! Calls that another library does: a small one that counts them, and a copy of this one, which does them right.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{NCCL, Program, checked, library};

const RULES: &str = "CROSSWEFT_NCCL_DELEGATE";
const LIBRARY: &str = "CROSSWEFT_NCCL_LIB";

/// The library of `c/other_nccl.c`.
fn other(folder: &Path) -> PathBuf {
    let path = folder.join("other_nccl.so");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args([
        "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
    ])
    // The name of what is loaded already.
    .args(["-Wl,-soname,libnccl.so.2", "-o"])
    .arg(&path)
    .arg("-I")
    .arg(here.join("../../include"))
    .arg(here.join("tests/c/other_nccl.c"));
    checked(&mut cc);
    path
}

#[test]
fn rules_say_what_another_library_does() {
    let program = Program::compile("delegate.c");
    let folder = tempfile::tempdir().unwrap();
    let other = other(folder.path());
    let other = other.to_str().unwrap();
    let said = program.run_with("sizes", &[(LIBRARY, other), (RULES, "all-reduce:1K-")]);
    let said = said.unwrap();
    for words in [
        &*format!(
            "communicator of 2 ranks: all-reduce:1024- delegated to {other} (NCCL version 22907)"
        ),
        &format!("all-reduce of 1024 bytes goes to {other}, by the rule all-reduce:1024-"),
        &format!("communicator of 2 ranks ends: calls delegated to {other}: all-reduce:1024- 6"),
    ] {
        assert_eq!(said.matches(words).count(), 1, "{words}\n{said}");
    }
    let refused = program.run_with("refused", &[(LIBRARY, other), (RULES, "reduce-scatter")]);
    refused.unwrap();
    let one = [
        (LIBRARY, other),
        (RULES, "all-reduce"),
        ("OTHER_NCCL_REFUSES", "1"),
    ];
    program.run_with("one_refused", &one).unwrap();
    program.run_with("differ", &[(LIBRARY, other)]).unwrap();
}

#[test]
fn what_cannot_be_delegated_is_declined() {
    let program = Program::compile("delegate.c");
    let folder = tempfile::tempdir().unwrap();
    let other = other(folder.path());
    let other = other.to_str().unwrap();
    let link = folder.path().join("libnccl.so.2");
    std::os::unix::fs::symlink(library(NCCL.0), &link).unwrap();
    let link = link.to_str().unwrap();
    for (variables, reason) in [
        (
            &[(RULES, "all-reduce")][..],
            "CROSSWEFT_NCCL_LIB does not name it",
        ),
        (
            &[(RULES, "allreduce"), (LIBRARY, other)],
            "no operation `allreduce`",
        ),
        (
            &[(RULES, "all-reduce"), (LIBRARY, "/no/such/libnccl.so.2")],
            "/no/such/libnccl.so.2",
        ),
        (
            &[(RULES, "all-reduce"), (LIBRARY, "libnccl.so.2")],
            "give an absolute path",
        ),
        (
            &[(RULES, "all-reduce"), (LIBRARY, link)],
            "it is this library itself",
        ),
        (
            &[(RULES, "all-reduce,all-to-all:1M-"), (LIBRARY, other)],
            "has no ncclAlltoAll",
        ),
        (
            &[(RULES, "all-reduce"), (LIBRARY, "/proc/self/exe")],
            "cannot be used",
        ),
    ] {
        let mut variables = variables.to_vec();
        variables.push(("DECLINED_REASON", reason));
        let said = program.run_with("declined", &variables);
        assert!(said.is_ok(), "{variables:?}: {}", said.unwrap_err());
    }
}

#[test]
fn a_copy_does_everything_as_it_should_be() {
    let program = Program::compile("conformance.c");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("libnccl.so.2");
    std::fs::copy(library(NCCL.0), &copy).unwrap();
    let rules = "all-reduce:1-,all-gather,reduce-scatter,all-to-all,broadcast,reduce,gather,scatter,send-recv";
    let variables = [(LIBRARY, copy.to_str().unwrap()), (RULES, rules)];
    for case in [
        "threads_sum",
        "processes_sum",
        "threads_types",
        "threads_moves",
        "processes_moves",
        "alone",
        "unaligned",
        "init_all",
        "several",
        "ring",
        "ring_processes",
        "everybody",
        "turns",
        "operations",
        "one_sided",
        "no_waiting",
        "aborted",
        "killed",
        "shrink",
        "split_again",
        "grow",
        "revoked",
        "over_and_over",
    ] {
        let said = program.run_with(case, &variables);
        assert!(said.is_ok(), "{}", said.unwrap_err());
        let said = said.unwrap();
        assert!(said.contains("delegated to"), "{case}: {said}");
    }
}
