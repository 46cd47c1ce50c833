//! `tune`, `explain`, and what a later start makes of them.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::text;
use crossweft_collective::Algorithm;
use serde_json::Value;

/// `crossweft` with a cache of its own.
fn crossweft(cache: &Path, arguments: &str) -> Command {
    let mut command = common::crossweft(arguments.split_whitespace());
    command.env_remove("CROSSWEFT_TUNING");
    command.env("CROSSWEFT_CACHE_DIR", cache);
    command
}

fn run(cache: &Path, arguments: &str) -> Output {
    crossweft(cache, arguments).output().unwrap()
}

fn json(cache: &Path, arguments: &str) -> Value {
    let output = run(cache, &format!("{arguments} --format json"));
    let complaint = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{arguments}: {complaint}");
    assert_eq!(complaint, "", "{arguments}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn candidate<'a>(explanation: &'a Value, name: &str) -> &'a Value {
    let candidates = explanation["candidates"].as_array().unwrap();
    candidates.iter().find(|one| one["name"] == name).unwrap()
}

/// The only file in a folder, but for the one that writers lock.
fn only_file(folder: &Path) -> PathBuf {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
    let mut files = files.filter(|file| !file.file_name().as_bytes().starts_with(b"."));
    let file = files.next().unwrap().path();
    assert!(files.next().is_none());
    file
}

/// The times of a candidate, at every size, times `factor`, wherever it was measured.
fn scale(file: &Path, name: &str, factor: f64) {
    let mut table: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    for measurements in table["measurements"].as_array_mut().unwrap() {
        let candidates = measurements["candidates"].as_array().unwrap();
        let Some(at) = candidates.iter().position(|one| one["name"] == name) else {
            continue;
        };
        for row in measurements["rows"].as_array_mut().unwrap() {
            let us = &mut row["us"][at];
            *us = us.as_f64().map_or(Value::Null, |us| (us * factor).into());
        }
    }
    fs::write(file, table.to_string()).unwrap();
}

#[test]
fn a_tuned_machine_measures_nothing_and_says_what_it_chooses_by() {
    let cache = tempfile::tempdir().unwrap();
    let cache = cache.path();
    // Before: the shipped rule, with all candidates and why not.
    let before = json(cache, "explain all-reduce --bytes 64K");
    assert_eq!(before["chosen"], "two-shot");
    assert!(
        before["source"]
            .as_str()
            .unwrap()
            .starts_with("the shipped rule (there is no")
    );
    assert_eq!(candidate(&before, "two-shot")["verdict"], "chosen");
    assert_eq!(candidate(&before, "ring")["measured_us"], Value::Null);
    assert!(candidate(&before, "ring")["predicted_us"].as_f64().unwrap() > 0.0);
    let private = json(cache, "explain all-reduce --bytes 64K --buffers private");
    let refused = candidate(&private, "two-shot");
    assert_eq!(refused["verdict"], "refused");
    assert!(
        refused["reason"]
            .as_str()
            .unwrap()
            .contains("needs symmetric memory")
    );

    let tuned = json(cache, "tune all-reduce all-gather --max 64K --budget 20");
    let file = only_file(cache);
    assert_eq!(tuned["path"], file.display().to_string());
    assert_eq!(tuned["tuned"].as_array().unwrap().len(), 4);
    let mode = fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // So that what is chosen does not hang on how fast this machine is.
    scale(&file, "ring", 1e-6);
    let after = json(
        cache,
        "explain all-reduce --bytes 10K --dtype bf16 --op max",
    );
    assert_eq!(
        (&after["chosen"], &after["measured_bytes"]),
        (&"ring".into(), &10_240.into())
    );
    assert_eq!(after["measured_with"], "f32 sum");
    assert!(candidate(&after, "ring")["measured_us"].as_f64().unwrap() > 0.0);
    let table = text(&run(cache, "explain all-reduce --bytes 10K").stdout);
    assert!(table.contains("chosen: ring (measured: "), "{table}");
    assert!(
        table.contains(&format!(
            "choices come from tuning table {}",
            file.display()
        )),
        "{table}"
    );

    // Threads and processes find it; what is beyond it is left to the shipped rule.
    for how in ["--threads", "--no-bind"] {
        let bench = run(
            cache,
            &format!("bench all-reduce --min 64 --max 256K --factor 16 --iters 3 {how}"),
        );
        assert_eq!(bench.status.code(), Some(0), "{}", text(&bench.stderr));
        assert_eq!(text(&bench.stderr), "");
        let bench = text(&bench.stdout);
        assert!(
            bench.contains("# chosen: ring up to 65536 B (measured: "),
            "{bench}"
        );
        assert!(
            bench.contains("; two-shot up to 262144 B (symmetric memory"),
            "{bench}"
        );
        assert!(
            bench.contains(&format!("# chosen by tuning table {}", file.display())),
            "{bench}"
        );
        for row in bench.lines().filter(|line| !line.starts_with('#')) {
            assert_eq!(row.split_whitespace().nth(7), Some("0"), "{row}");
        }
    }
    // A line for each range of sizes, by one rank.
    let logged = crossweft(
        cache,
        "bench all-reduce --min 64 --max 256K --factor 16 --iters 3",
    )
    .env("CROSSWEFT_LOG", "crossweft_collective=info")
    .output()
    .unwrap();
    let logged = text(&logged.stderr);
    let of = "all-reduce of 2 ranks on cpu, f32 sum, symmetric buffers: ";
    for words in [
        format!("algorithms are chosen by tuning table {}", file.display()),
        format!("{of}0 to 65536 B: ring (measured"),
        format!("{of}65537 to 262144 B: two-shot (symmetric"),
    ] {
        let lines = logged.lines().filter(|line| line.contains(&words));
        assert_eq!(lines.count(), 1, "{words}: {logged}");
    }

    // Of another version, it is not used, and that is said once.
    let table = fs::read_to_string(&file).unwrap();
    let version = format!("\"library\":\"{}\"", env!("CARGO_PKG_VERSION"));
    fs::write(&file, table.replace(&version, "\"library\":\"0.0.1\"")).unwrap();
    let stale = run(cache, "bench all-reduce --max 64 --iters 3");
    let warning = text(&stale.stderr);
    assert_eq!(
        warning
            .matches("is not used: it was measured by version 0.0.1")
            .count(),
        1,
        "{warning}"
    );
    assert!(text(&stale.stdout).contains("# chosen: one-shot up to 64 B (small"));
    let explained = text(&run(cache, "explain all-reduce --bytes 64").stderr);
    assert!(
        explained.contains("measured by version 0.0.1"),
        "{explained}"
    );
}

#[test]
fn a_plan_of_ones_own_is_explained_measured_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let (cache, plans) = (folder.path().join("cache"), folder.path().join("plans"));
    fs::create_dir_all(&plans).unwrap();
    let mut plan = Algorithm::Ring.plan(2, 1).unwrap();
    "mine".clone_into(&mut plan.name);
    let file = plans.join("mine.json");
    fs::write(&file, plan.to_json()).unwrap();
    let option = format!("--plan {}", file.display());

    let explained = json(
        &cache,
        &format!("explain all-reduce --bytes 512 --buffers private {option}"),
    );
    assert_eq!(explained["chosen"], "mine");
    assert!(
        explained["reason"]
            .as_str()
            .unwrap()
            .starts_with("not measured; the cost model says")
    );
    assert_eq!(
        candidate(&explained, "mine")["origin"],
        file.display().to_string()
    );
    let four = json(
        &cache,
        &format!("explain all-reduce --bytes 512 --ranks 4 {option}"),
    );
    assert_eq!(candidate(&four, "mine")["reason"], "it is for 2 ranks");

    let tune = format!("tune --threads --max 4K --budget 0.1 --buffers private {option}");
    let tuned = json(&cache, &tune);
    assert_eq!(tuned["tuned"][0]["place"], "private");
    scale(&only_file(&cache), "mine", 1e-6);
    for with_option in [true, false] {
        let arguments = "bench all-reduce --buffers private --max 4K --iters 3 --format json";
        let mut bench = crossweft(&cache, arguments);
        if with_option {
            bench.args(["--plan", file.to_str().unwrap()]);
        } else {
            bench.env("CROSSWEFT_PLANS", &plans);
        }
        let bench = bench.output().unwrap();
        assert_eq!(bench.status.code(), Some(0), "{}", text(&bench.stderr));
        let report: Value = serde_json::from_slice(&bench.stdout).unwrap();
        for row in report["rows"].as_array().unwrap() {
            assert_eq!(
                (&row["algorithm"], &row["wrong"]),
                (&"mine".into(), &0.into()),
                "{row}"
            );
        }
    }
    // Without the plan, its times are as if they were not there.
    let without = json(&cache, "explain all-reduce --bytes 512 --buffers private");
    assert_ne!(without["chosen"], "mine");
}

/// Starts a rank of a job of two by hand.
fn rank(rank: u32, id: &Path, cache: &Path, variable: Option<(&str, &str)>) -> Child {
    let mut command = crossweft(cache, "bench all-reduce --max 4K --iters 3");
    command
        .env("CROSSWEFT_RANK", rank.to_string())
        .env("CROSSWEFT_WORLD_SIZE", "2")
        .env("CROSSWEFT_ID_FILE", id)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.envs(variable);
    command.spawn().unwrap()
}

#[test]
fn all_ranks_choose_by_the_table_that_rank_0_reads() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let tuned = run(&at("one"), "tune --max 4K --budget 0.1 --buffers symmetric");
    assert_eq!(tuned.status.code(), Some(0), "{}", text(&tuned.stderr));
    let file = only_file(&at("one"));
    scale(&file, "ring", 1e-6);
    fs::create_dir(at("other")).unwrap();
    let copy = at("other").join(file.file_name().unwrap());
    fs::copy(&file, &copy).unwrap();
    scale(&copy, "ring", 1e6);
    scale(&copy, "two-shot", 1e-6);
    let off = ("CROSSWEFT_TUNING", "off");
    let missing = ("CROSSWEFT_PLANS", "/there/is/none.json");
    let from = |file: &Path, name: &str| {
        let source = format!("# chosen by tuning table {}", file.display());
        [source, format!("# chosen: {name} up to 4096 B (")]
    };
    let shipped = [
        "# chosen by the shipped rule (CROSSWEFT_TUNING=off)",
        "# chosen: one-shot up to 512 B (small",
    ]
    .map(str::to_owned);
    // Also when the file was replaced between two ranks' starts, which is as if each had one of its own.
    let cases = [
        [("one", None), ("one", None)],
        [("one", None), ("other", None)],
        [("other", None), ("one", None)],
        [("one", None), ("one", Some(off))],
        [("one", None), ("nothing", None)],
        [("one", Some(off)), ("one", None)],
    ];
    let expected = [
        from(&file, "ring"),
        from(&file, "ring"),
        from(&copy, "two-shot"),
        from(&file, "ring"),
        from(&file, "ring"),
        shipped,
    ];
    let job = |index: &str, ranks: [(&str, Option<(&str, &str)>); 2]| {
        let id = at(&format!("id{index}"));
        let both = [0, 1].map(|me| {
            let (cache, variable) = ranks[me as usize];
            rank(me, &id, &at(cache), variable)
        });
        both.map(|child| child.wait_with_output().unwrap())
    };
    for (index, (ranks, expected)) in cases.into_iter().zip(expected).enumerate() {
        let outputs = job(&index.to_string(), ranks);
        for output in &outputs {
            let complaint = text(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{ranks:?}: {complaint}");
        }
        let said = text(&outputs[0].stdout);
        for words in expected {
            assert!(said.contains(&words), "{ranks:?}: {said}");
        }
    }
    // Plans are each rank's own to name.
    for output in job("missing", [("one", None), ("one", Some(missing))]) {
        let complaint = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(
            complaint.contains("/there/is/none.json: No such file"),
            "{complaint}"
        );
    }
}

/// Each measures something else, and knows nothing of what the other writes meanwhile.
#[test]
fn two_at_once_keep_what_both_have_measured() {
    let cache = tempfile::tempdir().unwrap();
    let tune = |what: &str| {
        let arguments = format!("tune {what} --threads --max 1K --budget 0.1");
        crossweft(cache.path(), &arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    // A table that both begin with.
    assert!(tune("broadcast").wait().unwrap().success());
    let both = [tune("all-gather"), tune("all-reduce")];
    for mut one in both {
        assert!(one.wait().unwrap().success());
    }
    let table: Value = serde_json::from_slice(&fs::read(only_file(cache.path())).unwrap()).unwrap();
    let measurements = table["measurements"].as_array().unwrap();
    let mut collectives: Vec<_> = measurements
        .iter()
        .filter_map(|m| m["collective"].as_str())
        .collect();
    collectives.sort_unstable();
    collectives.dedup();
    assert_eq!(collectives, ["all-gather", "all-reduce", "broadcast"]);
}

#[test]
fn mistakes_are_told() {
    let cache = tempfile::tempdir().unwrap();
    for (arguments, words) in [
        ("explain all-reduce", "--bytes <BYTES>"),
        (
            "explain all-redoce --bytes 8",
            "possible values: all-reduce, all-gather",
        ),
        (
            "explain scatter --bytes 8 --root 2",
            "--root 2, but there are 2 ranks",
        ),
        (
            "explain all-reduce --bytes 8 --plan /none.json",
            "'/none.json' for '--plan <FILE>': No such file",
        ),
        ("tune --budget -1", "unexpected argument"),
        ("tune --budget 1e9", "give 0 to 3600 seconds"),
        ("tune all-redoce", "possible values: all-reduce"),
        // Before the kernel ends one of them.
        (
            "tune all-to-all --threads --ranks 16 --max 16G",
            "of memory at least, of which this host has",
        ),
        (
            "tune --threads --plan /none.json",
            "'/none.json' for '--plan <FILE>': No such file",
        ),
    ] {
        let output = run(cache.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments}");
        assert!(
            text(&output.stderr).contains(words),
            "{arguments}: {}",
            text(&output.stderr)
        );
    }
    // GPUs that are not there can be asked about.
    let output = crossweft(
        cache.path(),
        "explain all-reduce --bytes 8K --device cuda --ranks 8",
    )
    .env("CUDA_VISIBLE_DEVICES", "")
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).starts_with("note: --device cuda"));
    assert!(
        text(&output.stdout).contains("chosen: one-shot (small"),
        "{}",
        text(&output.stdout)
    );
    assert!(text(&output.stdout).contains("of 8 ranks on cuda"));
    // And so can plans be that the environment names.
    let output = crossweft(
        cache.path(),
        "explain all-reduce --bytes 8K --device cuda --ranks 8",
    )
    .env("CUDA_VISIBLE_DEVICES", "")
    .env("CROSSWEFT_PLANS", "/none.json")
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("/none.json: No such file"));
}
