//! The `crossweft` command as a user runs it: processes, threads, launchers, mistakes and losses.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/interrupts.rs"]
mod interrupts;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::text;
use serde_json::Value;

fn crossweft(arguments: &str) -> Command {
    common::crossweft(arguments.split_whitespace())
}

fn run(arguments: &str) -> Output {
    crossweft(arguments).output().unwrap()
}

/// Runs to a good end and returns the JSON report.
fn report(arguments: &str) -> Value {
    report_of("all-reduce", arguments)
}

/// The same of any collective.
fn report_of(collective: &str, arguments: &str) -> Value {
    let output = run(&format!(
        "bench {collective} --format json --iters 3 {arguments}"
    ));
    assert_eq!(
        output.status.code(),
        Some(0),
        "{arguments}: {}",
        text(&output.stderr)
    );
    assert_eq!(text(&output.stderr), "", "{arguments}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Every row right, sizes as expected.
fn assert_right(report: &Value, sizes: &[u64]) {
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<u64> = rows
        .iter()
        .map(|row| row["bytes"].as_u64().unwrap())
        .collect();
    assert_eq!(found, sizes);
    for row in rows {
        assert_eq!(row["wrong"], 0, "{row}");
        for field in ["time_us_p50", "time_us_min", "algbw_gbs", "busbw_gbs"] {
            assert!(row[field].as_f64().unwrap() >= 0.0, "{field} in {row}");
        }
        assert!(
            row["time_us_min"].as_f64() <= row["time_us_p50"].as_f64(),
            "{row}"
        );
    }
}

#[test]
fn the_main_job_prints_a_right_table_for_two_ranks() {
    let output = run("bench all-reduce --max 64K");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("2 ranks (processes"), "{table}");
    assert!(table.contains("# chosen: one-shot up to"), "{table}");
    let header = table.lines().find(|line| line.contains("busbw")).unwrap();
    for column in [
        "size",
        "count",
        "type",
        "redop",
        "time",
        "algbw",
        "busbw",
        "#wrong",
        "algorithm",
        "p50",
    ] {
        assert!(header.contains(column), "{header}");
    }
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 14, "8 B to 64 KiB by factors of 2:\n{table}");
    for row in rows {
        assert_eq!((row[2], row[3], row[7]), ("f32", "sum", "0"), "{row:?}");
    }
}

#[test]
fn processes_and_threads_of_several_numbers() {
    for ranks in [1, 3, 5, 8] {
        for how in ["", "--threads"] {
            let report = report(&format!(
                "--ranks {ranks} {how} --min 6 --max 10K --factor 41"
            ));
            assert_right(&report, &[4, 244, 10_084]);
            assert_eq!(report["ranks"], ranks);
            let started = if how.is_empty() {
                "processes"
            } else {
                "threads"
            };
            // Where there are cores enough, it also says that processes are bound.
            let said = report["started_as"].as_str().unwrap();
            assert!(said.starts_with(started), "{said}");
        }
    }
}

#[test]
fn every_type_and_operation() {
    let dtypes = [
        "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64",
        "f8e4m3", "f8e5m2",
    ];
    for dtype in dtypes {
        for op in ["sum", "prod", "min", "max", "avg", "premul:2"] {
            let report = report(&format!(
                "--ranks 3 --threads --dtype {dtype} --op {op} --min 8008 --max 8008"
            ));
            assert_right(&report, &[8008]);
            assert_eq!(report["rows"][0]["dtype"], dtype);
            let name = op.split(':').next();
            assert_eq!(report["rows"][0]["op"].as_str(), name);
        }
    }
}

#[test]
fn places_and_algorithms() {
    for (arguments, algorithm) in [
        ("--in-place", "two-shot"),
        ("--buffers private", "two-shot-staged"),
        ("--buffers private --in-place", "two-shot-staged"),
        ("--algorithm one-shot", "one-shot"),
        ("--algorithm ring", "ring"),
        ("--algorithm two-shot-staged --in-place", "two-shot-staged"),
    ] {
        let report = report(&format!(
            "--ranks 2 --min 0 --max 200K --factor 50000 {arguments}"
        ));
        assert_right(&report, &[0, 4, 200_000]);
        assert_eq!(report["rows"][2]["algorithm"], algorithm, "{arguments}");
        assert!(report["chosen"].as_str().unwrap().contains(algorithm));
    }
}

/// Collectives with the kinds of algorithm that symmetric and private buffers take, where messages are large.
const OTHERS: [(&str, &str, &str); 7] = [
    ("all-gather", "direct", "staged"),
    ("reduce-scatter", "direct", "staged"),
    ("all-to-all", "direct", "staged"),
    ("broadcast --root 1", "direct", "staged"),
    ("reduce --root 1", "two-shot", "two-shot-staged"),
    ("gather --root 1", "direct", "staged"),
    ("scatter --root 1", "direct", "staged"),
];

#[test]
fn every_collective_wherever_buffers_lie() {
    for (collective, direct, staged) in OTHERS {
        let name = collective.split(' ').next().unwrap();
        for (arguments, expected) in [
            ("", direct),
            ("--in-place --threads", direct),
            ("--buffers private --threads", staged),
            ("--buffers private --in-place --threads --blocks 3", staged),
        ] {
            // Blocks of one memory change places in an all-to-all.
            let expected = match (name, arguments.starts_with("--in-place")) {
                ("all-to-all", true) => "staged",
                _ => expected,
            };
            let report = report_of(
                collective,
                &format!("--ranks 3 --min 0 --max 200K --factor 5000 --dtype i16 {arguments}"),
            );
            let several_blocks = !["broadcast", "reduce"].contains(&name);
            let unit = if several_blocks { 6 } else { 2 };
            assert_right(&report, &[0, unit, unit * 5000]);
            let row = &report["rows"][2];
            assert_eq!(row["algorithm"], expected, "{collective} {arguments}");
            assert_eq!(row["count"], 5000);
            assert_eq!(report["collective"], name.replace('-', "_"));
            assert_eq!(report["rows"][1]["algorithm"], "one-shot");
            let reduces = name.starts_with("reduce");
            assert_eq!(row["op"], if reduces { "sum" } else { "none" });
            let rooted = collective.contains("root");
            assert_eq!(report["root"].as_u64(), rooted.then_some(1));
            let ratio = row["busbw_gbs"].as_f64().unwrap() / row["algbw_gbs"].as_f64().unwrap();
            let factor = if several_blocks { 2.0 / 3.0 } else { 1.0 };
            assert!((ratio - factor).abs() < 1e-9, "{collective}: {ratio}");
        }
    }
}

#[test]
fn messages_wherever_buffers_lie() {
    for buffers in ["symmetric", "private"] {
        for (ranks, how) in [(1, ""), (2, "--threads"), (3, "")] {
            let arguments = format!(
                "--device cpu --ranks {ranks} {how} --buffers {buffers} --dtype f16 --min 6 --max 1M \
                 --factor 400"
            );
            let ring = report_of("send-recv", &arguments);
            assert_right(&ring, &[6, 2400, 960_000]);
            assert_eq!(ring["rows"][0]["algorithm"], "messages");
            let all = report_of("all-to-all-v", &arguments);
            let whole = |bytes: u64| bytes / (2 * ranks) * 2 * ranks;
            assert_right(&all, &[6, 2400, 960_000].map(whole));
            assert_eq!(all["collective"], "all_to_all");
            let last = ranks - 1;
            for (command, name, root) in [
                ("all-gather-v".to_owned(), "all_gather", None),
                (format!("gather-v --root {last}"), "gather", Some(last)),
                (format!("scatter-v --root {last}"), "scatter", Some(last)),
            ] {
                let report = report_of(&command, &arguments);
                assert_right(&report, &[6, 2400, 960_000].map(whole));
                assert_eq!(report["collective"], name);
                assert_eq!(report["rows"][1]["algorithm"], "messages");
                assert_eq!(report["root"].as_u64(), root);
            }
        }
    }
    for op in ["sum", "max"] {
        let arguments = format!("--ranks 3 --threads --min 12 --max 100K --factor 1000 --op {op}");
        let report = report_of("reduce-scatter-v", &arguments);
        assert_right(&report, &[12, 12_000]);
        assert_eq!(report["buffers"], "private");
        assert_eq!(report["rows"][0]["op"], op);
    }
}

#[test]
fn pairs_of_buffers_take_turns() {
    for arguments in [
        "",
        "--in-place",
        "--buffers private",
        "--buffers private --in-place",
    ] {
        let arguments = format!(
            "--ranks 3 --threads --rotate 5 --min 0 --max 300K --factor 1000 --dtype i16 {arguments}"
        );
        let all_reduce = report(&arguments);
        assert_right(&all_reduce, &[0, 2, 2000]);
        assert_eq!(all_reduce["rotate"], 5);
        for (collective, ..) in OTHERS {
            let report = report_of(collective, &arguments);
            assert_eq!(report["rows"].as_array().unwrap().len(), 3);
            assert!(
                report["rows"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|row| row["wrong"] == 0)
            );
        }
    }
    for collective in ["send-recv", "all-to-all-v", "reduce-scatter-v"] {
        let arguments = "--threads --rotate 2 --min 4K --max 4K";
        assert_right(&report_of(collective, arguments), &[4096]);
    }
    assert_eq!(report("--threads --max 8")["rotate"], 1);
    let table = run("bench all-reduce --threads --max 8 --iters 2 --rotate 2 --skew 5");
    let first = text(&table.stdout).lines().next().unwrap().to_owned();
    assert!(
        first.ends_with("out of place, 2 pairs in turn, one rank 5 us late"),
        "{first}"
    );
}

#[test]
fn the_time_of_a_call_begins_when_the_last_rank_comes() {
    const SKEW: u64 = 1_000_000;
    let started = Instant::now();
    // One of them to warm up.
    let report = report(&format!(
        "--ranks 3 --threads --min 64 --max 64 --skew {SKEW}"
    ));
    assert!(started.elapsed() >= Duration::from_micros(4 * SKEW));
    assert_right(&report, &[64]);
    assert_eq!(report["skew_us"], SKEW);
    let time = report["rows"][0]["time_us_p50"].as_f64().unwrap();
    assert!(time < SKEW as f64, "{time}");
}

#[test]
fn tokens_are_normalised_and_quantised() {
    for (dtype, hidden) in [("f32", 8), ("f16", 1000), ("bf16", 4096)] {
        for quantise in ["none", "tensor", "token", "group"] {
            let report = report_of(
                "all-reduce-rms-norm",
                &format!(
                    "--ranks 3 --threads --hidden {hidden} --dtype {dtype} --quantise {quantise} --min 1 \
                     --max 40 --factor 6 --rotate 2"
                ),
            );
            let size = if dtype == "f32" { 4 } else { 2 };
            let sizes = [1, 6, 36].map(|tokens| tokens * hidden * size);
            assert_right(&report, &sizes);
            for (row, tokens) in report["rows"].as_array().unwrap().iter().zip([1, 6, 36]) {
                assert_eq!(row["tokens"], tokens);
                assert_eq!(row["count"], tokens * hidden);
                assert_eq!((&row["dtype"], &row["op"]), (&dtype.into(), &"sum".into()));
            }
            assert_eq!(report["collective"], "all_reduce_rms_norm");
            assert_eq!(report["hidden"], hidden);
            assert_eq!(report["quantise"], quantise);
            assert_eq!(report["buffers"], "private");
            assert_eq!(report["timing"], "eager");
        }
    }
    let table = run("bench all-reduce-rms-norm --hidden 64 --max 4 --iters 3");
    assert_eq!(table.status.code(), Some(0), "{}", text(&table.stderr));
    let table = text(&table.stdout);
    let first = table.lines().next().unwrap();
    assert!(
        first.ends_with("private buffers, out of place, tokens of 64, quantised: none"),
        "{first}"
    );
    assert_eq!(table.lines().filter(|l| !l.starts_with('#')).count(), 3);
}

#[test]
fn a_table_of_each_collective() {
    for (collective, direct, _) in OTHERS {
        let output = run(&format!(
            "bench {collective} --min 1K --max 64K --factor 8 --iters 3"
        ));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let table = text(&output.stdout);
        let root = match collective.split_once(" --root 1") {
            Some((name, _)) => format!(" {name} (root 1): 2 ranks"),
            None => format!(" {collective}: 2 ranks"),
        };
        assert!(table.lines().next().unwrap().contains(&root), "{table}");
        assert!(table.contains(&format!("; {direct} up to")), "{table}");
        assert_eq!(
            table.lines().filter(|line| !line.starts_with('#')).count(),
            3
        );
    }
    let output = run("bench reduce --root 2 --threads --max 8");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--root 2, but there are 2 ranks"));
}

#[test]
fn reductions_take_every_operation() {
    for collective in ["reduce-scatter", "reduce --root 2"] {
        for (op, dtype) in [
            ("prod", "f8e4m3"),
            ("max", "u64"),
            ("avg", "bf16"),
            ("min", "f64"),
        ] {
            let arguments =
                format!("--ranks 4 --threads --op {op} --dtype {dtype} --min 4096 --max 4096");
            let report = report_of(collective, &arguments);
            assert_right(&report, &[4096]);
            assert_eq!(report["rows"][0]["op"], op);
        }
    }
}

#[test]
fn mistakes_are_exit_code_2_and_one_clear_message() {
    for (arguments, words) in [
        ("bench all-reduce --dtype f31", "the types are i8, u8"),
        (
            "bench all-reduce --op xor",
            "the operations are sum, prod, min, max, avg, premul:SCALAR",
        ),
        (
            "bench all-reduce --op premul:two",
            "give a number, as in premul:0.5",
        ),
        (
            "bench reduce --op premul:0.5 --dtype i32",
            "--op premul:0.5: i32 has no such number",
        ),
        (
            "bench all-reduce --algorithm tree",
            "of all-reduce the algorithms are one-shot, two-shot, two-shot-staged, ring",
        ),
        (
            "bench all-reduce --min 1M --max 1K",
            "--min 1048576 is larger than --max 1024",
        ),
        ("bench all-reduce --max 64X", "such as 8, 64K or 16M"),
        ("bench all-reduce --max 64G", "the largest size is 16G"),
        ("bench all-reduce --factor 1", "1 is not in 2.."),
        ("bench all-reduce --ranks 0", "0 is not in 1..=64"),
        ("bench all-reduce --device cuda", "use --device cpu"),
        (
            "bench all-reduce --device tpu",
            "possible values: auto, cpu, cuda",
        ),
        (
            "bench all-reduce --algorithm two-shot --buffers private",
            "needs --buffers symmetric",
        ),
        (
            "bench all-gather --algorithm ring",
            "of all-gather the algorithms are one-shot, direct, staged",
        ),
        (
            "bench all-to-all --in-place --algorithm direct",
            "blocks would overwrite each other",
        ),
        (
            "bench scatter --ranks 3 --root 3",
            "--root 3, but there are 3 ranks",
        ),
        (
            "bench broadcast --root 2",
            "--root 2, but there are 2 ranks",
        ),
        ("bench broadcast --op sum", "unexpected argument '--op'"),
        ("bench all-gather --root 1", "unexpected argument '--root'"),
        (
            "bench send-recv --in-place",
            "--in-place is for plans; these are sends and receives",
        ),
        (
            "bench all-to-all-v --algorithm direct",
            "--algorithm is for plans",
        ),
        (
            "bench gather-v --root 2 --ranks 2",
            "--root 2, but there are 2 ranks",
        ),
        (
            "bench reduce-scatter-v --buffers symmetric",
            "reduced from private buffers",
        ),
        (
            "bench reduce-scatter-v --op premul:2",
            "--op premul is for plans",
        ),
        (
            "bench all-reduce-rms-norm --hidden 4",
            "4 is not in 8..=16384",
        ),
        (
            "bench all-reduce-rms-norm --threads --hidden 12",
            "a multiple of 8 from 8 to 16384",
        ),
        (
            "bench all-reduce-rms-norm --threads --dtype i32",
            "they may be of f32, f16 or bf16",
        ),
        (
            "bench all-reduce-rms-norm --quantise row",
            "possible values: none, tensor, token, group",
        ),
        (
            "bench all-reduce-rms-norm --buffers symmetric",
            "tokens are normalised in private buffers",
        ),
        (
            "bench all-reduce-rms-norm --algorithm ring",
            "--algorithm is for plans alone",
        ),
        ("bench all-reduce --rotate 0", "0 is not in 1..=1024"),
        ("bench all-reduce --skew 2000000", "is not in 0..=1000000"),
        (
            "bench all-reduce --eager",
            "--eager is for GPUs: on the cpu there are no graphs",
        ),
        ("bench all-reduce --graph", "--graph is for GPUs"),
        (
            "bench all-reduce --device-time",
            "--device-time is for GPUs",
        ),
        ("bench all-reduce --graph --eager", "cannot be used with"),
        (
            "bench all-gather --executor",
            "--executor is for GPUs: on the cpu every plan is run by it",
        ),
        (
            "bench send-recv --executor",
            "--executor is for plans; these are sends and receives",
        ),
        (
            "bench send-recv --graph",
            "messages are timed one by one, not in graphs",
        ),
        (
            "bench all-reduce --graph --skew 1",
            "--skew is for calls one by one",
        ),
        (
            "bench all-reduce --plan /none.json",
            "'/none.json' for '--plan <FILE>': No such file",
        ),
        ("bench all-reduce --plan /usr", "it is a folder"),
        (
            "bench all-reduce --plot /usr",
            "--plot /usr: it is a folder; name a file",
        ),
        (
            "bench all-reduce --plot /none/plot.svg",
            "there is no such folder",
        ),
        (
            "bench all-reduce --rotate 1024 --min 16G --max 16G",
            "give smaller sizes, or fewer ranks",
        ),
        (
            "bench all-reduce-rms-norm --threads --max 16G",
            "give smaller sizes, or fewer ranks",
        ),
        ("bench all-broadcast", "unrecognized subcommand"),
        ("frobnicate", "unrecognized subcommand"),
    ] {
        // As on a machine without GPUs.
        let output = crossweft(arguments)
            .env("CUDA_VISIBLE_DEVICES", "")
            .output()
            .unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {message}");
        assert!(message.contains(words), "{arguments}: {message}");
        assert!(message.starts_with("error: "), "{arguments}: {message}");
        assert_eq!(text(&output.stdout), "", "{arguments}");
    }
    let output = crossweft("bench all-reduce")
        .env("RANK", "0")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("WORLD_SIZE"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn help_and_doctor() {
    let help = run("bench all-reduce --help");
    assert_eq!(help.status.code(), Some(0));
    for option in [
        "--in-place",
        "--rotate",
        "--skew",
        "--eager",
        "--graph",
        "--device-time",
        "--executor",
    ] {
        assert!(text(&help.stdout).contains(option), "{option}");
    }
    let help = text(&run("bench all-reduce-rms-norm --help").stdout).to_owned();
    for words in [
        "--hidden <ELEMENTS>",
        "--max <TOKENS>",
        "[default: 1K]",
        "[default: private]",
    ] {
        assert!(help.contains(words), "{words}: {help}");
    }
    let help = text(&run("--help").stdout);
    let first = "Communication between the GPUs, or the processes, of one job";
    assert!(help.starts_with(first), "{help}");
    let help = text(&run("bench --help").stdout);
    for (collective, _, _) in OTHERS {
        assert!(
            help.contains(collective.split(' ').next().unwrap()),
            "{help}"
        );
    }
    let doctor = run("doctor");
    assert_eq!(doctor.status.code(), Some(0));
    assert!(
        text(&doctor.stdout).contains("memfd"),
        "{}",
        text(&doctor.stdout)
    );
    let json: Value = serde_json::from_slice(&run("doctor --format json").stdout).unwrap();
    assert_eq!(json["used"]["device"], "cpu");
}

/// Starts one process a rank, as a launcher would.
fn launch(
    ranks: u32,
    environment: impl Fn(u32) -> Vec<(&'static str, String)>,
    arguments: impl Fn(u32) -> String,
) -> Vec<Output> {
    let children: Vec<Child> = (0..ranks)
        .map(|rank| {
            crossweft(&arguments(rank))
                .envs(environment(rank))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap())
        .collect()
}

/// A name that no other test or run uses.
fn unique(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

fn torchrun(job: &str, world_size: u32) -> impl Fn(u32) -> Vec<(&'static str, String)> {
    let job = unique(job);
    move |rank| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", world_size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", "29500".to_owned()),
            ("TORCHELASTIC_RUN_ID", job.clone()),
        ]
    }
}

fn open_mpi(rank: u32) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", "4".to_owned()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4".to_owned()),
        ("PMIX_NAMESPACE", unique("prterun@1")),
        ("PMIX_RANK", rank.to_string()),
    ]
}

fn slurm(rank: u32) -> Vec<(&'static str, String)> {
    vec![
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_NTASKS", "4".to_owned()),
        ("SLURM_LOCALID", rank.to_string()),
        ("SLURM_NNODES", "1".to_owned()),
        ("SLURM_JOB_ID", std::process::id().to_string()),
        ("SLURM_STEP_ID", "0".to_owned()),
    ]
}

#[test]
fn ranks_of_other_launchers_find_each_other() {
    let arguments = |_| "bench all-reduce --format json --iters 3 --max 4K --factor 32".to_owned();
    for (outputs, name) in [
        (launch(4, torchrun("torch", 4), arguments), "torchrun"),
        (launch(4, open_mpi, arguments), "Open MPI"),
        (launch(4, slurm, arguments), "Slurm"),
    ] {
        for output in &outputs {
            assert_eq!(
                output.status.code(),
                Some(0),
                "{name}: {}",
                text(&output.stderr)
            );
        }
        let report: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
        assert_right(&report, &[8, 256]);
        assert_eq!(report["ranks"], 4);
        assert!(
            report["started_as"].as_str().unwrap().contains(name),
            "{report}"
        );
        assert!(
            outputs[1..].iter().all(|output| output.stdout.is_empty()),
            "only rank 0 prints"
        );
    }
    let outputs = launch(1, torchrun("ranks", 4), |_| {
        "bench all-reduce --ranks 3".to_owned()
    });
    assert_eq!(outputs[0].status.code(), Some(2));
    assert!(text(&outputs[0].stderr).contains("--ranks 3, but torchrun started 4"));
}

#[test]
fn a_wrong_result_of_copies_is_seen_too() {
    let outputs = launch(2, torchrun("wrong-gather", 2), |rank| {
        format!("bench gather --max 16 --iters 3 --format json --seed {rank}")
    });
    // Only the root has a result to look at, and says so to all.
    for output in &outputs {
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    }
    assert!(text(&outputs[0].stderr).contains("instead of"));
    assert!(outputs[1].stderr.is_empty());
}

#[test]
fn a_wrong_result_is_exit_code_1_on_every_rank() {
    // Rank 1 brings other data than rank 0 was told to expect, and the other way round.
    for (job, command) in [
        ("wrong", "all-reduce --max 8"),
        ("wrong-tokens", "all-reduce-rms-norm --hidden 8 --max 1"),
        ("wrong-messages", "reduce-scatter-v --max 16"),
    ] {
        let outputs = launch(2, torchrun(job, 2), |rank| {
            format!("bench {command} --iters 3 --format json --seed {rank}")
        });
        for output in &outputs {
            assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
            assert!(
                text(&output.stderr).contains("instead of"),
                "{}",
                text(&output.stderr)
            );
        }
        let report: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
        assert!(
            report["rows"][0]["wrong"].as_u64().unwrap() >= 2,
            "{report}"
        );
    }
}

#[test]
fn ranks_that_never_come_are_named() {
    let start = Instant::now();
    let outputs = launch(2, torchrun("missing", 4), |_| {
        "bench all-reduce --timeout 10".to_owned()
    });
    assert!(start.elapsed() < Duration::from_secs(60));
    for output in outputs {
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert!(message.contains("2 of 4 ranks did not join"), "{message}");
        assert!(message.contains("ranks [2, 3]"), "{message}");
    }
}

/// The processes that `parent` has started, with their ranks.
fn ranks_of(parent: u32) -> Vec<(u32, u32)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(environment) = fs::read(entry.path().join("environ")) else {
            continue;
        };
        let environment = text(&environment);
        let value = |name: &str| {
            environment
                .split('\0')
                .find_map(|v| v.strip_prefix(name)?.parse::<u32>().ok())
        };
        if value("CROSSWEFT_PARENT=") == Some(parent)
            && let Some(rank) = value("CROSSWEFT_RANK=")
        {
            found.push((rank, pid));
        }
    }
    found.sort_unstable();
    found
}

fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < limit,
            "{what} did not happen within {limit:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A job that would run for minutes, in the middle of its work.
fn endless(ranks: u32) -> (Child, Vec<(u32, u32)>) {
    let arguments = format!("bench all-reduce --ranks {ranks} --max 64K --iters 1000000");
    let mut child = crossweft(&arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The header is printed when everything is prepared and the first size begins.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("# crossweft"));
    std::thread::sleep(Duration::from_millis(500));
    let processes = ranks_of(child.id());
    assert_eq!(processes.len(), ranks as usize);
    (child, processes)
}

fn kill(pid: u32, signal: &str) {
    let status = Command::new("kill")
        .args([signal, &pid.to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

fn alive(pid: u32) -> bool {
    // A zombie that nobody has reaped yet is gone for all that matters.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .trim_start()
            .starts_with('Z')
    })
}

fn shared_memory_files() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn a_killed_rank_ends_the_others_with_exit_code_3_and_its_name() {
    let files = shared_memory_files();
    for victim in [0, 2] {
        let (child, processes) = endless(3);
        let start = Instant::now();
        kill(processes[victim].1, "-KILL");
        let output = child.wait_with_output().unwrap();
        let took = start.elapsed();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert!(took < Duration::from_secs(30), "{took:?}: {message}");
        assert!(
            message.contains(&format!("rank {victim} was killed by signal 9")),
            "{message}"
        );
        for survivor in (0..3).filter(|rank| *rank != victim) {
            // Each says what it waited for, and who died.
            let own = format!("error: rank {survivor}: ");
            let line = message
                .lines()
                .find(|line| line.starts_with(&own))
                .unwrap_or_else(|| panic!("rank {survivor} says nothing: {message}"));
            assert!(line.contains(&format!("rank {victim} died")), "{line}");
        }
        assert!(
            !message.contains("ending the ranks that are left"),
            "{message}"
        );
        assert!(
            processes.iter().all(|(_, pid)| !alive(*pid)),
            "a process stayed behind"
        );
    }
    let left: Vec<_> = shared_memory_files().difference(&files).cloned().collect();
    assert!(
        !left.iter().any(|name| name.contains("crossweft")),
        "left behind: {left:?}"
    );
}

#[test]
fn no_rank_outlives_the_command() {
    for signal in ["-KILL", "-TERM", "-INT"] {
        if signal == "-INT" && interrupts::are_ignored() {
            continue;
        }
        let (mut child, processes) = endless(2);
        kill(child.id(), signal);
        child.wait().unwrap();
        wait_until("end of all ranks", Duration::from_secs(30), || {
            processes.iter().all(|(_, pid)| !alive(*pid))
        });
    }
}

#[test]
fn a_reader_that_closes_early_is_no_error() {
    let mut child = crossweft("bench all-reduce --max 1K --iters 3")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn what_cannot_be_printed_is_an_error() {
    for arguments in [
        "doctor",
        "doctor --format json",
        "explain all-reduce --bytes 8 --device cpu",
        "bench all-reduce --device cpu --max 64 --iters 3",
        "bench all-reduce --device cpu --max 64 --iters 3 --threads --format json",
        "bench moe --device cpu --tokens 1 --hidden 64 --iters 3",
        "bench moe --device cpu --tokens 1 --hidden 64 --iters 3 --threads --format json",
        "matrix --ranks 1 --limit 1",
    ] {
        let full = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let output = crossweft(arguments).stdout(full).output().unwrap();
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {message}");
        let words = "cannot write to standard output: No space left";
        assert!(message.contains(words), "{arguments}: {message}");
    }
}

#[test]
fn sizes_of_nothing_are_not_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg").display().to_string();
    let bench = "bench all-reduce --device cpu --iters 3 --min 0";
    let output = run(&format!("{bench} --max 0 --plot {plot}"));
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(message.contains("no time above 0"), "{message}");
    let output = run(&format!("{bench} --max 16 --plot {plot}"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let drawn = fs::read_to_string(plot).unwrap();
    assert!(drawn.contains("<svg") && !drawn.contains("inf") && !drawn.contains("NaN"));
}

#[test]
fn nobody_need_hear_what_is_said_beside_results() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg").display().to_string();
    let mut child = crossweft(&format!(
        "bench all-reduce --max 1K --iters 3 --plot {plot}"
    ))
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(fs::read_to_string(plot).unwrap().contains("<svg"));
}

#[test]
fn ranks_of_one_process_may_open_more_files_than_is_usual() {
    let mut command = Command::new("sh");
    let given = crossweft("bench all-reduce --device cpu --threads --ranks 8 --max 64 --iters 3");
    command
        .args(["-c", "ulimit -S -n 100 && exec \"$0\" \"$@\""])
        .arg(given.get_program())
        .args(given.get_args())
        .env("CROSSWEFT_TUNING", "off");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn what_is_to_be_logged_must_make_sense() {
    let mut command = crossweft("bench all-reduce --device cpu --max 64 --iters 3");
    let output = command.env("CROSSWEFT_LOG", "a=b=c").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let message = text(&output.stderr);
    assert!(
        message.starts_with("warning: CROSSWEFT_LOG=a=b=c: ") && message.lines().count() == 1,
        "{message}"
    );
    // Nothing is as if it were not there.
    let output = command.env("CROSSWEFT_LOG", "").output().unwrap();
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn any_seed_will_do() {
    let seed = u64::MAX;
    for what in [
        "all-reduce",
        "all-reduce-rms-norm --max 2",
        "moe --tokens 1",
    ] {
        let arguments = format!("bench {what} --device cpu --threads --iters 1 --seed {seed}");
        let output = match what {
            "all-reduce" => run(&format!("{arguments} --max 64")),
            _ => run(&arguments),
        };
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
}

#[test]
fn all_algorithms_are_measured_in_turn_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("all.svg");
    let arguments = format!(
        "bench all-reduce --threads --ranks 3 --min 1K --max 64K --factor 8 --iters 2 --format json --algorithm all --plot {}",
        picture.display()
    );
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("drawn: "));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let names = |bytes: u64| -> Vec<&str> {
        let of_size = rows.iter().filter(|row| row["bytes"] == bytes);
        of_size
            .map(|row| row["algorithm"].as_str().unwrap())
            .collect()
    };
    let all = ["one-shot", "two-shot", "two-shot-staged", "ring", "switch"];
    for bytes in [1 << 10, 8 << 10, 64 << 10] {
        assert_eq!(names(bytes), all, "{rows:?}");
    }
    assert!(rows.iter().all(|row| row["wrong"] == 0));
    let drawn = fs::read_to_string(&picture).unwrap();
    for name in all {
        assert!(drawn.contains(name), "{name}");
    }
    // Private buffers leave out what reaches into peers'.
    let private = report_of(
        "all-reduce",
        "--threads --ranks 2 --max 8 --buffers private --algorithm all",
    );
    let rows = private["rows"].as_array().unwrap();
    let found: Vec<_> = rows
        .iter()
        .map(|row| row["algorithm"].as_str().unwrap())
        .collect();
    assert_eq!(found, ["one-shot", "two-shot-staged", "ring"]);
    // A mistake is found before anything is measured.
    let output = run("bench all-reduce --threads --ranks 2 --max 8 --plot nowhere/at/all.svg");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no such folder"));
}

#[test]
fn primitives_are_measured_on_gpus_and_nowhere_else() {
    let on_cpu = run("bench primitives --device cpu");
    assert_eq!(on_cpu.status.code(), Some(2));
    let said = text(&on_cpu.stderr);
    assert!(said.contains("use --device cuda"), "{said}");

    let output = run("bench primitives --quick --rounds 20 --format json");
    if output.status.code() == Some(2) {
        let said = text(&output.stderr);
        assert!(said.contains("primitives are measured on GPUs: "), "{said}");
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let placement = report["placement"].as_str().unwrap();
    assert!(
        placement.starts_with("two GPUs") || placement.starts_with("ONE GPU"),
        "{placement}"
    );
    let rows = report["rows"].as_array().unwrap();
    for what in ["flag one way, relaxed", "get", "put by threads"] {
        let of = |row: &&Value| row["what"] == what;
        let row = rows.iter().find(of).unwrap();
        assert!(row["value"].as_f64().unwrap() > 0.0, "{row}");
    }
}
