//! CUDA's compilers, from the wheels that NVIDIA publishes: nobody needs the toolkit installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The wheel that has `ptxas`. Its version is that of the oldest driver the project is run with.
pub(crate) const PTXAS: &[&str] = &["nvidia-cuda-nvcc==13.0.88"];
/// The wheel that has `nvdisasm`.
pub(crate) const DISASSEMBLER: &[&str] = &["nvidia-cuda-nvdisasm==13.2.51"];
/// Those that compile CUDA C++, with nvcc (which also needs the system's C++ compiler) and NVRTC.
pub(crate) const COMPILERS: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-nvrtc==13.0.88",
];

/// The repository.
pub(crate) fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// Whether wheels can be installed at all.
pub(crate) fn has_pip() -> bool {
    let asked = Command::new("python3")
        .args(["-c", "import ensurepip, venv"])
        .output();
    asked.is_ok_and(|output| output.status.success())
}

/// The folder that `wheels` make up: `bin`, `include`, `lib`. They are installed below `target/` if
/// one of the files in `needed` is not there yet.
pub(crate) fn toolkit(wheels: &[&str], needed: &[&str]) -> Result<PathBuf, String> {
    let venv = root().join("target/cuda");
    let complete = |folder: &PathBuf| needed.iter().all(|file| folder.join(file).exists());
    if let Some(folder) = below(&venv).filter(complete) {
        return Ok(folder);
    }
    eprintln!("xtask: installing {} below target/", wheels.join(", "));
    let mut make = Command::new("python3");
    run(make.args(["-m", "venv"]).arg(&venv))?;
    // The wheels alone: what else they name is not needed.
    let mut install = Command::new(venv.join("bin/python"));
    run(install
        .args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(wheels))?;
    below(&venv)
        .filter(complete)
        .ok_or_else(|| format!("xtask: {} lack {}", wheels.join(", "), needed.join(", ")))
}

fn below(venv: &Path) -> Option<PathBuf> {
    let mut versions = fs::read_dir(venv.join("lib")).ok()?.flatten();
    versions.find_map(|python| {
        let folder = python.path().join("site-packages/nvidia/cu13");
        folder.exists().then_some(folder)
    })
}

/// Runs a command that must succeed; returns what it printed.
pub(crate) fn run(command: &mut Command) -> Result<Output, String> {
    let program = command.get_program().display().to_string();
    let output = command
        .output()
        .map_err(|e| format!("xtask: cannot run {program}: {e}"))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!(
        "xtask: {program} ended with {}:\n{}",
        output.status,
        printed(&output)
    ))
}

/// Writes a file.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| format!("xtask: {}: {e}", path.display()))
}

/// All that a command printed.
pub(crate) fn printed(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
    [text(&output.stdout), text(&output.stderr)]
        .join("\n")
        .trim()
        .to_owned()
}
