//! The C interface as C programs see it: `c/conformance.c`, compiled with the system's C compiler against
//! `include/crossweft/nccl.h`, and run case by case.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The longest a case may take, on a machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(60);

/// The library that this test was built with, beside it.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let library = own.with_file_name("libcrossweft_nccl.so");
    assert!(library.exists(), "{} is not there", library.display());
    library
}

fn checked(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}",
        output.status
    );
    output
}

/// A C program, and the folder that it and the library lie in.
struct Program {
    folder: TempDir,
    path: PathBuf,
}

impl Program {
    fn compile(source: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Under the name that the loader asks for.
        std::os::unix::fs::symlink(library(), folder.path().join("libnccl.so.2")).unwrap();
        let path = folder.path().join("program");
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut cc = Command::new("cc");
        cc.args([
            "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o",
        ])
        .arg(&path)
        .arg("-I")
        .arg(here.join("../../include"))
        .arg(here.join("tests/c").join(source))
        .arg("-L")
        .arg(folder.path())
        .args(["-l:libnccl.so.2", "-lm"])
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
        let mut child = self
            .command(Some(case))
            .stderr(Stdio::piped())
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
        if status == "exit status: 0" {
            return Ok(());
        }
        let mut said = String::new();
        // Ranks that are processes may still hold the other end, so no more than is there.
        if let Some(mut stderr) = child.stderr.take() {
            use std::io::Read;
            let mut buffer = vec![0; 1 << 16];
            let count = stderr.read(&mut buffer).unwrap();
            said.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
        Err(format!("{case}: {status}\n{said}"))
    }
}

#[test]
fn every_case() {
    let program = Program::compile("conformance.c");
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
    let library = library();
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
