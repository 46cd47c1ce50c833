//! The C interface as C programs see it: `c/conformance.c`, compiled with the system's C compiler against
//! `include/crossweft/nccl.h`, and run case by case.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use crossweft_collective::{
    Algorithm, Collective, CollectiveError, Communicator, CommunicatorOptions, Fingerprint,
    TuningTable, run_in_threads,
};
use crossweft_plan::cost::{Topology, predict};

use common::{NCCL, Program, checked, library};

/// Cases in which ranks wait for seconds and do nothing else.
const PATIENT: [&str; 10] = [
    "refused",
    "refused_prepared",
    "refused_message",
    "refused_signal",
    "early",
    "refused_split",
    "refused_grow",
    "refused_window",
    "prepares",
    "window_or_not",
];

#[test]
fn every_case() {
    let program = Program::compile("conformance.c");
    let list = checked(&mut program.command(None)).stdout;
    let list = String::from_utf8(list).unwrap();
    let only = std::env::var("CONFORMANCE_CASE").ok();
    let (patient, others): (Vec<&str>, Vec<&str>) = list
        .lines()
        .filter(|case| only.as_deref().is_none_or(|only| only == *case))
        .partition(|case| PATIENT.contains(case));
    let failures = std::thread::scope(|scope| {
        let run = |case| program.run(case).err();
        let waiting: Vec<_> = patient
            .into_iter()
            .map(|case| scope.spawn(move || run(case)))
            .collect();
        let mut failures: Vec<String> = others.into_iter().filter_map(run).collect();
        failures.extend(waiting.into_iter().filter_map(|case| case.join().unwrap()));
        failures
    });
    assert!(list.lines().count() > 1);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_simulated_group_takes_what_the_tuning_table_says() {
    const BYTES: u64 = 1 << 16;
    let program = Program::compile("simulate.c");
    let cache = tempfile::tempdir().unwrap();
    let simulated = || {
        let mut command = program.command(None);
        command.arg(BYTES.to_string());
        let output = checked(command.env("CROSSWEFT_CACHE_DIR", cache.path())).stdout;
        let us: f64 = String::from_utf8(output).unwrap().trim().parse().unwrap();
        us
    };

    let options = CommunicatorOptions {
        timeout: Duration::from_secs(60),
    };
    let fingerprint = |communicator: &Communicator| -> Result<Fingerprint, CollectiveError> {
        Ok(communicator.selection().fingerprint().clone())
    };
    let fingerprint = run_in_threads(2, options, fingerprint).unwrap().remove(0);
    let plan = |algorithm: Algorithm| algorithm.plan_of(Collective::AllReduce, 2, 1).unwrap();
    let hash = |algorithm| plan(algorithm).content_hash().to_string();
    let file = cache.path().join(TuningTable::file_name(&fingerprint, 2));
    let mut times = Vec::new();
    for (fast, slow) in [
        (Algorithm::OneShot, Algorithm::Ring),
        (Algorithm::Ring, Algorithm::OneShot),
    ] {
        let measured = |algorithm: Algorithm| {
            serde_json::json!({
                "name": algorithm.to_string(), "blocks": 1, "plan": hash(algorithm)
            })
        };
        let table = serde_json::json!({
            "format": "crossweft-tuning",
            "version": 1,
            "library": env!("CARGO_PKG_VERSION"),
            "world_size": 2,
            "fingerprint": fingerprint,
            "measurements": [{
                "collective": "all-reduce", "place": "private", "dtype": "f32", "op": "sum",
                "candidates": [measured(fast), measured(slow)],
                "rows": [
                    {"bytes": 8, "us": [1.0, 500.0]},
                    {"bytes": 1 << 24, "us": [10.0, 9000.0]},
                ],
            }],
        });
        std::fs::write(&file, table.to_string()).unwrap();
        let predicted = predict(&plan(fast), &Topology::cpu(), BYTES).unwrap();
        let (tuned, expected) = (simulated(), predicted.total_us.unwrap());
        assert!(
            (tuned - expected).abs() < 1e-4 * expected,
            "{tuned} us, but {fast} takes {expected} us"
        );
        times.push(tuned);
    }
    // One of them is not what the shipped rule takes.
    assert!((times[0] - times[1]).abs() > 0.01 * times[0], "{times:?}");
}

#[test]
fn a_process_that_makes_a_communicator_says_so_to_who_asks() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let program = Program::compile("conformance.c");
    let name = format!("crossweft-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let reports = UnixDatagram::bind_addr(&address).unwrap();
    let mut child = program
        .command(Some("unaligned"))
        .env("CROSSWEFT_RUN_REPORT", &name)
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
    let mut text = [0; 16];
    let length = reports.recv(&mut text).unwrap();
    assert_eq!(
        std::str::from_utf8(&text[..length]).unwrap(),
        child.id().to_string()
    );
}

/// What NCCL 2.32.3 exports, without the twins.
const SYMBOLS: &str = include_str!("symbols.txt");

#[test]
fn every_symbol_is_there_twice_and_nothing_else() {
    let library = library(NCCL.0);
    let nm = checked(
        Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(&library),
    )
    .stdout;
    let nm = String::from_utf8(nm).unwrap();
    let exported: BTreeSet<&str> = nm
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .filter(|name| !name.starts_with("rust"))
        .collect();
    let names: Vec<&str> = SYMBOLS.lines().collect();
    assert_eq!(names.len(), 96);
    let twins: Vec<String> = names.iter().map(|name| format!("p{name}")).collect();
    let mut expected: BTreeSet<&str> = names.iter().copied().collect();
    expected.extend(twins.iter().map(String::as_str));
    expected.insert("ncclResetDebugInitInternal");
    assert_eq!(exported, expected);

    let dynamic = checked(Command::new("readelf").arg("-d").arg(&library)).stdout;
    let dynamic = String::from_utf8(dynamic).unwrap();
    assert!(dynamic.contains("soname: [libnccl.so.2]"), "{dynamic}");
    // It loads where there is no CUDA.
    let needed: Vec<&str> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .collect();
    assert!(
        !needed.iter().any(|line| line.contains("cuda")),
        "{needed:?}"
    );
}

#[test]
fn the_header_declares_what_is_exported() {
    let header = include_str!("../../../include/crossweft/nccl.h");
    let declared: BTreeSet<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("CROSSWEFT_NCCL(")?.split(", ").nth(1))
        .map(|name| name.trim_end_matches(','))
        .collect();
    assert_eq!(declared, SYMBOLS.lines().collect());
}
