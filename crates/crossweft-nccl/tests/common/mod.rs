//! Programs in C that tests compile and run; those of `crossweft-ep` too.
#![allow(dead_code, reason = "each test uses some of it")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The longest a case may take, on a machine that does other things as well.
const LIMIT: Duration = Duration::from_secs(120);

/// The communicators' library, and the name that the loader asks for.
pub(crate) const NCCL: (&str, &str) = ("libcrossweft_nccl.so", "libnccl.so.2");

/// A library that this test was built with, beside it.
pub(crate) fn library(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let library = own.with_file_name(name);
    assert!(library.exists(), "{} is not there", library.display());
    library
}

pub(crate) fn checked(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}",
        output.status
    );
    output
}

/// A C program, and the folder that it and its libraries lie in.
pub(crate) struct Program {
    folder: TempDir,
    path: PathBuf,
}

impl Program {
    pub(crate) fn compile(source: &str) -> Self {
        Self::linked(source, &[NCCL])
    }

    /// Compiles a program of the crate whose test this is, with these libraries, under the names that the loader asks for.
    pub(crate) fn linked(source: &str, libraries: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, asked_for) in libraries {
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
        // The harness.
        .arg("-I")
        .arg(here.join("../crossweft-nccl/tests/c"))
        .arg(here.join("tests/c").join(source))
        .arg("-L")
        .arg(folder.path())
        .args(
            libraries
                .iter()
                .map(|(_, asked_for)| format!("-l:{asked_for}")),
        )
        .arg("-lm")
        .arg(format!("-Wl,-rpath,{}", folder.path().display()));
        checked(&mut cc);
        Self { folder, path }
    }

    pub(crate) fn command(&self, case: Option<&str>) -> Command {
        let mut command = Command::new(&self.path);
        command.args(case).current_dir(self.folder.path());
        for (name, _) in std::env::vars() {
            if name.starts_with("NCCL_") || name.starts_with("CROSSWEFT_") {
                command.env_remove(name);
            }
        }
        // It would come before the program's own folder.
        command.env_remove("LD_LIBRARY_PATH");
        command.env("CROSSWEFT_DEVICE", "cpu");
        command
    }

    /// Runs a case; what it said if it failed.
    pub(crate) fn run(&self, case: &str) -> Result<(), String> {
        self.run_with(case, &[]).map(drop)
    }

    /// Runs a case with these variables as well; what it said, in either event.
    pub(crate) fn run_with(
        &self,
        case: &str,
        variables: &[(&str, &str)],
    ) -> Result<String, String> {
        let mut child = self
            .command(Some(case))
            .envs(variables.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (into, mut stderr) = (Arc::clone(&heard), child.stderr.take().unwrap());
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut buffer) {
                into.lock().unwrap().extend(&buffer[..count]);
            }
        });
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
        // Ranks that are processes may still hold the other end, so it is not waited for long.
        let end = Instant::now() + Duration::from_secs(2);
        while !reader.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let said = String::from_utf8_lossy(&heard.lock().unwrap()).into_owned();
        match &*status {
            "exit status: 0" => Ok(said),
            _ => Err(format!("{case}: {status}\n{said}")),
        }
    }
}
