//! `cargo xtask header`: the CUDA C++ header, its tests and examples, by nvcc and by NVRTC, without a
//! warning, without spills, and with machine code that keeps to the kernels' rules; and its functions
//! run on the host.
//!
//! Leaves the PTX in `target/header/`, for the example and the tests that need a GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::cuda::{self, printed, root, run};
use crate::kernels::{ARCHITECTURES, forbidden};

/// Kernels that include the header.
const SOURCES: [&str; 3] = [
    "include/tests/api.cu",
    "include/tests/interop.cu",
    "examples/custom-kernel-cuda/kernel.cu",
];

/// What the wheels must have.
const NEEDED: [&str; 6] = [
    "bin/nvcc",
    "bin/ptxas",
    "nvvm/bin/cicc",
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "lib/libnvrtc.so.13",
];

const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-Werror=all-warnings",
    "-Wmissing-launch-bounds",
    "-Wreorder",
    "-Xcompiler=-Wall,-Wextra,-Werror",
    "-Xptxas=-warn-spills,-warn-lmem-usage",
    "-Xptxas=-Werror",
    "-Xcudafe=--display_error_number",
];

pub(crate) fn check() -> Result<(), String> {
    let start = Instant::now();
    let out = root().join("target/header");
    fs::create_dir_all(&out).map_err(|e| format!("xtask: {}: {e}", out.display()))?;
    host(&out)?;
    if !cuda::has_pip() {
        eprintln!("xtask: header: run on the host only: there is no pip to install nvcc with");
        return Ok(());
    }
    let toolkit = cuda::toolkit(cuda::COMPILERS, &NEEDED)?;
    let mut problems = Vec::new();
    for source in SOURCES {
        problems.extend(nvcc(&toolkit, source, &out)?);
    }
    problems.extend(nvrtc(&toolkit, &out)?);
    if problems.is_empty() {
        let seconds = start.elapsed().as_secs_f64();
        eprintln!(
            "xtask: header: {} sources by nvcc and NVRTC for {}: ok in {seconds:.0} s",
            SOURCES.len(),
            ARCHITECTURES.join(", ")
        );
        Ok(())
    } else {
        Err(format!("xtask: header:\n  {}", problems.join("\n  ")))
    }
}

/// A C++ compiler that tolerates no warning.
fn cpp() -> Command {
    let mut command = Command::new("c++");
    command
        .current_dir(root())
        .args(["-Wall", "-Wextra", "-Werror"]);
    command
}

/// The header's functions on the host, with many threads; ends by itself, with an error if one is
/// wrong.
fn host(out: &Path) -> Result<(), String> {
    let program = out.join("host");
    let sanitizers = "-fsanitize=address,undefined";
    run(cpp()
        .args(["-std=c++20", "-O1", "-g", sanitizers, "-pthread"])
        .args(["-Iinclude", "include/tests/host.cpp", "-o"])
        .arg(&program))?;
    run(&mut Command::new(program)).map(drop)
}

/// The architecture that PTX of `sm` is for.
fn virtual_of(sm: &str) -> String {
    sm.replace("sm_", "compute_")
}

/// Machine code for every architecture, and PTX for the oldest and for the first that has a copy engine; returns the
/// problems.
fn nvcc(toolkit: &Path, source: &str, out: &Path) -> Result<Vec<String>, String> {
    let stem = Path::new(source).file_stem().unwrap_or_default();
    let command = || {
        let mut command = Command::new(toolkit.join("bin/nvcc"));
        command.current_dir(root()).args(FLAGS).arg("-Iinclude");
        command
    };
    let mut problems = Vec::new();
    let mut compile = |command: &mut Command| -> Result<(), String> {
        let said = printed(&run(command)?);
        if !said.is_empty() {
            problems.push(format!("{source}: nvcc says:\n{said}"));
        }
        Ok(())
    };
    let mut every = command();
    for sm in ARCHITECTURES {
        every.arg(format!("-gencode=arch={},code={sm}", virtual_of(sm)));
    }
    let fatbin = out.join(stem).with_extension("fatbin");
    compile(every.args(["-fatbin", source, "-o"]).arg(fatbin))?;

    let mut texts = String::new();
    for (sm, extension) in [(ARCHITECTURES[0], "ptx"), ("sm_90", "sm_90.ptx")] {
        let ptx = out.join(stem).with_extension(extension);
        let arch = format!("-arch={}", virtual_of(sm));
        compile(command().args([&arch, "-ptx", source, "-o"]).arg(&ptx))?;
        texts += &fs::read_to_string(&ptx).map_err(|e| format!("xtask: {}: {e}", ptx.display()))?;
    }
    for line in texts.lines() {
        let code = line.split("//").next().unwrap_or_default();
        for statement in code.split(';').map(str::trim) {
            if let Some(problem) = forbidden(statement) {
                problems.push(format!("{source}: {problem}: {statement}"));
            }
        }
    }
    Ok(problems)
}

/// Every source for every architecture by NVRTC, which is a library: `nvrtc.cpp` calls it.
fn nvrtc(toolkit: &Path, out: &Path) -> Result<Vec<String>, String> {
    let program: PathBuf = out.join("nvrtc");
    let lib = toolkit.join("lib");
    run(cpp()
        .args(["-std=c++17", "xtask/src/nvrtc.cpp"])
        .arg(format!("-I{}", toolkit.join("include").display()))
        .arg(format!("-L{}", lib.display()))
        .args(["-l:libnvrtc.so.13", "-o"])
        .arg(&program))?;
    let mut problems = Vec::new();
    for sm in ARCHITECTURES {
        let said = printed(&run(Command::new(&program)
            .current_dir(root())
            // It loads a library of its own from there.
            .env("LD_LIBRARY_PATH", &lib)
            .args([sm, "include"])
            .args(SOURCES))?);
        if !said.is_empty() {
            problems.push(format!("NVRTC says for {sm}:\n{said}"));
        }
    }
    Ok(problems)
}
