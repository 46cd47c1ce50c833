//! `crossweft bench moe` as a user runs it.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::process::{Command, Output};

use common::text;
use serde_json::Value;

fn crossweft(arguments: &str) -> Command {
    common::crossweft(arguments.split_whitespace())
}

fn run(arguments: &str) -> Output {
    crossweft(&format!("bench moe {arguments}"))
        .output()
        .unwrap()
}

/// Runs to a good end and returns the JSON report.
fn report(arguments: &str) -> Value {
    let output = run(&format!("--format json --iters 2 {arguments}"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments}: {said}");
    assert_eq!(said, "", "{arguments}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Every row right, and which there are: `phase layout tokens`.
fn rows(report: &Value) -> Vec<String> {
    let rows = report["rows"].as_array().unwrap();
    let name = |row: &Value| {
        assert_eq!(row["wrong"], 0, "{row}");
        let least = row["time_us_min"].as_f64().unwrap();
        assert!(
            least > 0.0 && least <= row["time_us_p50"].as_f64().unwrap(),
            "{row}"
        );
        let word = |field: &str| row[field].as_str().unwrap().to_owned();
        format!("{} {} {}", word("phase"), word("layout"), row["tokens"])
    };
    rows.iter().map(name).collect()
}

const SMALL: &str = "--hidden 256 --experts 8 --top-k 3";
const LAYOUTS: &str = "ll-expert-major,ll-rank-major,ht-flat,ht-expert-major";

#[test]
fn the_usual_run_prints_a_right_table() {
    let output = run(&format!("{SMALL} --tokens 1-4 --iters 2"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("2 ranks (processes"), "{table}");
    assert!(
        table.contains("8 experts, top-3, tokens of 256 bf16"),
        "{table}"
    );
    let lines: Vec<&str> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert_eq!(lines.len(), 9, "{table}");
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words.len(), 11, "{line}");
        assert_eq!(words[10], "0", "{line}");
    }
}

#[test]
fn every_layout_type_and_phase_is_right() {
    for (dtype, travel) in [
        ("bf16", "plain"),
        ("f16", "fp8"),
        ("f32", "plain"),
        ("bf16", "fp8-ue8m0"),
    ] {
        let report = report(&format!(
            "--threads --ranks 3 {SMALL} --layout {LAYOUTS} --dtype {dtype} --travel {travel} --tokens 5 --phase both"
        ));
        let expected: Vec<String> = LAYOUTS
            .split(',')
            .map(|name| format!("both {name} 5"))
            .collect();
        assert_eq!(rows(&report), expected);
        assert_eq!(
            (&report["dtype"], &report["travel"]),
            (&dtype.into(), &travel.into())
        );
    }
}

#[test]
fn what_moves_is_counted_once_for_each_rank() {
    // Every token is for one expert of every rank: all tokens cross to each rank.
    let report = report("--threads --ranks 2 --hidden 256 --experts 2 --top-k 2 --tokens 0,6");
    let rows = rows(&report);
    assert_eq!(
        rows[3..],
        [
            "dispatch ll-expert-major 6",
            "combine ll-expert-major 6",
            "both ll-expert-major 6"
        ]
    );
    let bytes: Vec<&Value> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["bytes"])
        .collect();
    assert_eq!(bytes, [0, 0, 0, 6144, 6144, 12288]);
}

#[test]
fn skew_and_recorded_routing_move_what_they_say() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("experts");
    // All for experts of rank 1, but one token that is for nobody.
    fs::write(&file, "# layer 3\n2 3\n3,2\n-1 -1\n2 2\n").unwrap();
    let common = "--threads --ranks 2 --hidden 256 --experts 4 --tokens 4 --phase dispatch";
    let recorded = report(&format!(
        "{common} --routing file:{} --layout ht-flat",
        file.display()
    ));
    assert_eq!(recorded["top_k"], 2);
    assert_eq!(rows(&recorded), ["dispatch ht-flat 4"]);
    assert_eq!(recorded["rows"][0]["bytes"], 2 * 3 * 512);
    let skewed = report(&format!(
        "{common} --top-k 1 --routing zipf:50 --layout ht-expert-major"
    ));
    assert_eq!(rows(&skewed), ["dispatch ht-expert-major 4"]);
    assert_eq!(skewed["rows"][0]["bytes"], 2 * 4 * 512);
    assert_eq!(skewed["routing"], "zipf:50");
}

#[test]
fn a_picture_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("moe.svg");
    let arguments = format!(
        "--threads --ranks 2 {SMALL} --tokens 1-8 --iters 2 --layout ll-rank-major,ht-flat --plot {}",
        picture.display()
    );
    let output = run(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let drawn = fs::read_to_string(&picture).unwrap();
    for words in [
        "combine, ht-flat",
        "dispatch, ll-rank-major",
        "a copy of the bytes",
        "tokens of each rank",
    ] {
        assert!(drawn.contains(words), "{words}");
    }
}

#[test]
fn mistakes_are_exit_code_2_and_one_clear_message() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("experts");
    fs::write(&file, "0 1\n2\n").unwrap();
    let ragged = format!("--routing file:{}", file.display());
    for (arguments, words) in [
        ("--dtype i32", "tokens are bf16, f16 or f32"),
        (
            "--hidden 7",
            "a token of 14 bytes; it must be a multiple of 16",
        ),
        (
            "--hidden 8 --travel fp8",
            "quantised, it must be a multiple of 16",
        ),
        ("--hidden 0", "0 is not in 1.."),
        (
            "--experts 4 --top-k 5",
            "--top-k 5, but there are 4 experts",
        ),
        ("--top-k 33", "33 is not in 1..=32"),
        ("--tokens 8-1", "a range begins with 1 or more"),
        ("--tokens many", "a list such as 1,8,100"),
        ("--layout flat", "possible values: ll-expert-major"),
        (
            "--phase sideways",
            "possible values: dispatch, combine, both",
        ),
        (
            "--routing zipf:-2",
            "the exponent is a number from 0 to 100",
        ),
        ("--routing skewed", "uniform, zipf:EXPONENT or file:PATH"),
        ("--routing file:/nowhere/at/all", "No such file"),
        ("--routing file:/dev/zero", "it has more than 128 MiB"),
        (ragged.as_str(), "line 2 has 1 experts"),
        ("--ranks 17", "17 is not in 1..=16"),
        (
            "--threads --experts 1 --hidden 64 --tokens 1 --plot nowhere/at/all.svg",
            "no such folder",
        ),
    ] {
        let output = run(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {message}");
        assert!(message.contains(words), "{arguments}: {message}");
        assert!(message.starts_with("error: "), "{arguments}: {message}");
        assert_eq!(text(&output.stdout), "", "{arguments}");
    }
}
