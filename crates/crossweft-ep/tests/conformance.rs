//! The C interface as C programs see it: `c/conformance.c`, compiled with the system's C compiler against
//! `include/crossweft/ep.h`, linked with this library and the one that makes communicators, and run case by case.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../crossweft-nccl/tests/common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::process::Command;

use common::{NCCL, Program, checked, library};

/// This library, and the name that the loader asks for.
const EP: (&str, &str) = ("libcrossweft_ep.so", "libnccl_ep.so.0");

#[test]
fn every_case() {
    let program = Program::linked("conformance.c", &[EP, NCCL]);
    let list = checked(&mut program.command(None)).stdout;
    let list = String::from_utf8(list).unwrap();
    let only = std::env::var("CONFORMANCE_CASE").ok();
    let chosen = list
        .lines()
        .filter(|case| only.as_deref().is_none_or(|only| only == *case));
    let failures: Vec<String> = chosen.filter_map(|case| program.run(case).err()).collect();
    assert!(list.lines().count() > 1);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// What NCCL EP 0.2.0 exports.
const SYMBOLS: &str = include_str!("symbols.txt");
/// What it has not, and its words need.
const OWN: &str = "crossweftEpGetLastError";

#[test]
fn every_symbol_is_there_and_nothing_else() {
    let library = library("libcrossweft_ep.so");
    let nm = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(&library)
        .output()
        .unwrap();
    let nm = String::from_utf8(nm.stdout).unwrap();
    let exported: BTreeSet<&str> = nm
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .filter(|name| !name.starts_with("rust"))
        .collect();
    let mut expected: BTreeSet<&str> = SYMBOLS.lines().collect();
    assert_eq!(expected.len(), 18);
    expected.insert(OWN);
    assert_eq!(exported, expected);

    let dynamic = checked(Command::new("readelf").arg("-d").arg(&library)).stdout;
    let dynamic = String::from_utf8(dynamic).unwrap();
    assert!(dynamic.contains("soname: [libnccl_ep.so.0]"), "{dynamic}");
    // It loads where there is no CUDA, and takes the communicators' library as it finds it.
    let needed: Vec<&str> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .collect();
    let unwanted = |line: &&&str| line.contains("cuda") || line.contains("nccl");
    assert!(!needed.iter().any(|line| unwanted(&line)), "{needed:?}");
}

#[test]
fn the_header_declares_what_is_exported() {
    let header = include_str!("../../../include/crossweft/ep.h");
    let declared: BTreeSet<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("ncclResult_t ")?.split('(').next())
        .collect();
    assert_eq!(declared, SYMBOLS.lines().collect());
    assert!(header.contains(&format!("const char* {OWN}(void);")));
}
