//! The C interface as C programs see it: `c/conformance.c`, compiled with the system's C compiler against
//! `include/crossweft/ep.h`, linked with this library and the one that makes communicators, and run case by case.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The longest a case may take, on a machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(120);

/// A library that this test was built with, beside it.
fn library(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let library = own.with_file_name(name);
    assert!(library.exists(), "{} is not there", library.display());
    library
}

fn checked(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let status = output.status;
    assert!(status.success(), "{command:?}: {status}\n{text}");
    output
}

/// The C program, and the folder that it and the libraries lie in, under the names that the loader asks for.
struct Program {
    folder: TempDir,
    path: PathBuf,
}

impl Program {
    fn compile() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, asked_for) in [
            ("libcrossweft_nccl.so", "libnccl.so.2"),
            ("libcrossweft_ep.so", "libnccl_ep.so.0"),
        ] {
            std::os::unix::fs::symlink(library(name), folder.path().join(asked_for)).unwrap();
        }
        let path = folder.path().join("program");
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut cc = Command::new("cc");
        cc.args([
            "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o",
        ])
        .arg(&path)
        .arg("-I")
        .arg(here.join("../../include"))
        // The harness is that of the communicators' tests.
        .arg("-I")
        .arg(here.join("../crossweft-nccl/tests/c"))
        .arg(here.join("tests/c/conformance.c"))
        .arg("-L")
        .arg(folder.path())
        .args(["-l:libnccl_ep.so.0", "-l:libnccl.so.2"])
        .arg(format!("-Wl,-rpath,{}", folder.path().display()));
        checked(&mut cc);
        Self { folder, path }
    }

    fn command(&self, case: Option<&str>) -> Command {
        let mut command = Command::new(&self.path);
        command.args(case).current_dir(self.folder.path());
        for (name, _) in std::env::vars() {
            if name.starts_with("NCCL_") || name.starts_with("CROSSWEFT_") {
                command.env_remove(name);
            }
        }
        command.env("CROSSWEFT_DEVICE", "cpu");
        command
    }

    /// Runs a case; what it said if it failed.
    fn run(&self, case: &str) -> Result<(), String> {
        let said = self.folder.path().join(case);
        let mut child = self
            .command(Some(case))
            .stderr(Stdio::from(std::fs::File::create(&said).unwrap()))
            .spawn()
            .unwrap();
        let start = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status.to_string(),
                None if start.elapsed() > LIMIT => {
                    child.kill().unwrap();
                    break format!("still running after {LIMIT:?}");
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        eprintln!(
            "{case}: {status} after {:.2} s",
            start.elapsed().as_secs_f64()
        );
        match status == "exit status: 0" {
            true => Ok(()),
            false => {
                let said = std::fs::read_to_string(said).unwrap();
                Err(format!("{case}: {status}\n{said}"))
            }
        }
    }
}

#[test]
fn every_case() {
    let program = Program::compile();
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
