//! `cargo xtask conformance DIR`: every plan file below a folder, checked and run.
//!
//! Plans that the checker refuses are listed with the reason. Those it accepts are run: as threads,
//! real collectives with several sizes, and as processes where there are few ranks. A surprise is an
//! accepted plan whose run fails, is wrong or does not end, or a command that crashes.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Seconds that a call inside a run may take.
const CALL_SECONDS: u64 = 60;
/// The longest a command may take.
const LIMIT: Duration = Duration::from_secs(2 * CALL_SECONDS);
/// More ranks than this are not run as processes.
const MOST_PROCESSES: u64 = 8;

pub(crate) fn run(folder: &str) -> Result<(), String> {
    let mut files = Vec::new();
    find(Path::new(folder), &mut files)?;
    files.sort();
    if files.is_empty() {
        return Err(format!("xtask: no .json files below {folder}"));
    }
    let build = ["build", "--release", "--package", "crossweft-cli"];
    crate::cargo("build the command", &build, &[])?;
    let program = program()?;
    println!(
        "{:<52} {:<14} {:>5}  {:<8} {:<22} {:>7}  note",
        "file", "collective", "ranks", "check", "run", "seconds"
    );
    let (mut accepted, mut surprises) = (0, Vec::new());
    for file in &files {
        let start = Instant::now();
        let row = one(&program, file);
        let name = file
            .strip_prefix(folder)
            .unwrap_or(file)
            .display()
            .to_string();
        println!(
            "{name:<52} {:<14} {:>5}  {:<8} {:<22} {:>7.1}  {}",
            row.collective,
            row.ranks,
            if row.accepted { "ok" } else { "refused" },
            row.run,
            start.elapsed().as_secs_f64(),
            row.note
        );
        accepted += usize::from(row.accepted);
        if row.surprise {
            surprises.push(format!("{name}: {}", row.note));
        }
    }
    println!(
        "{} plans: {accepted} accepted and run, {} refused, {} surprises",
        files.len(),
        files.len() - accepted,
        surprises.len()
    );
    match surprises.is_empty() {
        true => Ok(()),
        false => Err(format!("xtask: surprises:\n{}", surprises.join("\n"))),
    }
}

fn find(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let failed = |e| format!("xtask: cannot read {}: {e}", folder.display());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            find(&path, files)?;
        } else if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            files.push(path);
        }
    }
    Ok(())
}

/// The command that was just built: cargo says where.
fn program() -> Result<PathBuf, String> {
    let arguments = [
        "metadata",
        "--format-version",
        "1",
        "--no-deps",
        "--offline",
    ];
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(arguments)
        .output()
        .map_err(|e| format!("xtask: cannot ask cargo for the target folder: {e}"))?;
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| format!("xtask: cargo metadata: {e}"))?;
    let target = metadata["target_directory"].as_str().unwrap_or("target");
    Ok(Path::new(target).join("release/crossweft"))
}

struct Row {
    collective: String,
    ranks: u64,
    accepted: bool,
    run: String,
    note: String,
    surprise: bool,
}

fn one(program: &Path, file: &Path) -> Row {
    let mut row = Row {
        collective: String::new(),
        ranks: 0,
        accepted: false,
        run: "-".to_owned(),
        note: String::new(),
        surprise: false,
    };
    let surprise = |mut row: Row, note| {
        (row.note, row.surprise) = (note, true);
        row
    };
    let name = file.display().to_string();
    let checked = match command(program, &["plan", "check", "--format", "json", &name]) {
        Ok(ended) => ended,
        Err(reason) => return surprise(row, reason),
    };
    let report: Value = match serde_json::from_str(&checked.stdout) {
        Ok(report) => report,
        Err(_) => return surprise(row, format!("check ended with {}", checked.describe())),
    };
    let summary = &report["summary"];
    row.collective = summary["collective"].as_str().unwrap_or("?").to_owned();
    row.ranks = summary["ranks"].as_u64().unwrap_or(0);
    match checked.code {
        Some(0) => row.accepted = true,
        Some(1 | 2) => {
            let first = &report["diagnostics"][0];
            row.note = match first["message"].as_str() {
                Some(message) => {
                    let place = first["rank"]
                        .as_u64()
                        .map_or_else(String::new, |rank| format!(", rank {rank}"));
                    format!(
                        "{}{place}: {message}",
                        first["code"].as_str().unwrap_or("?")
                    )
                }
                None => report["error"].as_str().unwrap_or("?").to_owned(),
            };
            return row;
        }
        _ => return surprise(row, format!("check ended with {}", checked.describe())),
    }
    match runs(program, &name, &row.collective, row.ranks) {
        Ok(done) => {
            row.run = done;
            row
        }
        Err(reason) => {
            row.run = "FAILED".to_owned();
            surprise(row, reason)
        }
    }
}

/// Runs a plan in all ways, and says which.
fn runs(program: &Path, file: &str, collective: &str, ranks: u64) -> Result<String, String> {
    let first = once(program, file, &["--threads"])?;
    let number = |field: &Value| field.as_u64().unwrap_or(0);
    let multiple = number(&first["multiple_of"]).max(1);
    let (least, most) = (
        number(&first["message_bytes"][0]),
        number(&first["message_bytes"][1]),
    );
    let mut sizes = vec![number(&first["bytes"])];
    if collective != "test" {
        // The smallest, one that is odd if it can be, and a few more.
        let odd = if multiple < 16 { 1004 } else { 3 * multiple };
        for size in [
            multiple,
            odd,
            20 * multiple,
            100_000 * multiple.min(4),
            16 * multiple,
        ] {
            let size = size.max(least.next_multiple_of(multiple)).min(most) / multiple * multiple;
            if !sizes.contains(&size) && sizes.len() < 4 {
                sizes.push(size);
            }
        }
    }
    for (seed, size) in sizes.iter().enumerate().skip(1) {
        let (seed, size) = (seed.to_string(), size.to_string());
        once(
            program,
            file,
            &["--threads", "--size", &size, "--seed", &seed],
        )?;
    }
    let mut done = format!("threads x{}", sizes.len());
    if ranks <= MOST_PROCESSES {
        once(program, file, &["--processes"])?;
        done += ", processes";
    }
    Ok(done)
}

fn once(program: &Path, file: &str, how: &[&str]) -> Result<Value, String> {
    let seconds = CALL_SECONDS.to_string();
    let mut arguments = vec![
        "plan",
        "run",
        file,
        "--format",
        "json",
        "--timeout",
        &seconds,
    ];
    arguments.extend(how);
    let ended = command(program, &arguments)?;
    let failed = || format!("run {} ended with {}", how.join(" "), ended.describe());
    if ended.code != Some(0) {
        return Err(failed());
    }
    let report: Value = serde_json::from_str(&ended.stdout).map_err(|_| failed())?;
    match report["ok"].as_bool() {
        Some(true) => Ok(report),
        _ => Err(failed()),
    }
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    fn describe(&self) -> String {
        let code = self
            .code
            .map_or_else(|| "a signal".to_owned(), |code| format!("code {code}"));
        let last = self.stderr.lines().last().or(self.stdout.lines().last());
        format!("{code}: {}", last.unwrap_or("it said nothing"))
    }
}

/// Runs a command to its end, or kills it at the time limit.
fn command(program: &Path, arguments: &[&str]) -> Result<Ended, String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot run {}: {e}", program.display()))?;
    let reader = |stream: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(mut stream) = stream {
                // What could be read is all there is to say.
                let _ = stream.read_to_end(&mut text);
            }
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let stdout = reader(child.stdout.take().map(|s| Box::new(s) as _));
    let stderr = reader(child.stderr.take().map(|s| Box::new(s) as _));
    let start = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if start.elapsed() > LIMIT => {
                // It may just have ended.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no end after {LIMIT:?}: {}", arguments.join(" ")));
            }
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(e) => return Err(format!("cannot wait for {}: {e}", program.display())),
        }
    };
    Ok(Ended {
        code: status.code(),
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    })
}
