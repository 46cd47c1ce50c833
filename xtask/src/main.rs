//! Project chores that cargo lacks: `cargo xtask test`, `cargo xtask lint`, `cargo xtask ci`.
#![forbid(unsafe_code)]

mod amd;
mod conformance;
mod cuda;
mod gpu;
mod header;
mod kernels;
mod python;
mod sass;

use std::env;
use std::process::{Command, ExitCode};
use std::time::Instant;

const USAGE: &str = "usage: cargo xtask COMMAND

  test    every test: unit, property, integration, documentation, the loom models, and Python
  loom    only the loom models of the device protocols
  python  only the Python package: its wheel, in a fresh environment, and pytest
  lint    formatting, clippy, documentation, licences, sources and duplicates of dependencies
  ci      test, then lint
  matrix [OPTIONS]
          try every collective with every algorithm, type, operation, size, place and world size up to 8;
          the options are those of `crossweft matrix`
  conformance DIR
          check and run every plan file below DIR
  kernels [MODULE... | --check | --sass]
          compile the GPU kernels to PTX, all or some modules or families of them (plan, exchange...); or check the PTX that is committed, and what the sources
          give for AMD's gfx942; or count the instructions of their machine code, for docs/results
  gpu [--here] [--compare [--ranks N]]
          bundle the GPU suite for a machine without Rust, in target/gpu-bundle, or the comparison with NCCL and others between N
          GPUs (2), in target/gpu-compare; or run it here too
  header  compile the CUDA C++ header with its tests and examples, by nvcc and NVRTC
";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["test"] => test(),
        ["loom"] => loom(),
        ["python"] => python::test(),
        ["lint"] => lint(),
        ["kernels", "--check"] => kernels::check(),
        ["kernels", "--sass"] => kernels::table(),
        ["kernels", ref names @ ..] => kernels::build(names),
        ["gpu", ref options @ ..] => match gpu::Bundle::parse(options) {
            Some(bundle) => bundle.build(),
            None => Err(USAGE.to_owned()),
        },
        ["header"] => header::check(),
        ["matrix", ref options @ ..] => matrix(options),
        ["conformance", folder] => conformance::run(folder),
        ["ci"] => test().and_then(|()| lint()),
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn test() -> Result<(), String> {
    // The command-line tests run the program.
    cargo(
        "build everything",
        &["build", "--workspace", "--all-targets"],
        &[],
    )?;
    // What is chosen must not depend on what this machine was tuned to.
    let untuned = [("CROSSWEFT_TUNING", "off")];
    cargo("tests", &["test", "--workspace"], &untuned)?;
    loom()?;
    python::test()
}

/// The whole matrix, or what the options leave of it. Optimised: there are some hundred thousand cases.
fn matrix(options: &[&str]) -> Result<(), String> {
    let run = [
        "run",
        "--release",
        "--package",
        "crossweft-cli",
        "--",
        "matrix",
    ];
    cargo("matrix", &[&run, options].concat(), &[])
}

/// Every interleaving of the device protocols. Its own target folder, because the flag would
/// otherwise rebuild the world back and forth.
fn loom() -> Result<(), String> {
    let flags = [
        ("RUSTFLAGS", "--cfg loom"),
        ("CARGO_TARGET_DIR", "target-loom"),
    ];
    let arguments = [
        "test",
        "--release",
        "--package",
        "crossweft-device",
        "--test",
        "loom",
    ];
    cargo("loom models", &arguments, &flags)
}

fn lint() -> Result<(), String> {
    cargo("formatting", &["fmt", "--all", "--check"], &[])?;
    let clippy = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ];
    cargo("clippy", &clippy, &[])?;
    let doc = [
        "doc",
        "--workspace",
        "--no-deps",
        "--document-private-items",
    ];
    cargo(
        "documentation",
        &doc,
        &[("RUSTDOCFLAGS", "--deny warnings")],
    )?;
    deny()
}

/// Licences, sources and duplicates of dependencies. `cargo-deny` is installed if it is missing.
/// Advisories need a database from a host that not every network reaches, so they are apart:
/// `cargo deny check advisories`.
fn deny() -> Result<(), String> {
    let installed = Command::new("cargo").args(["deny", "--version"]).output();
    if !installed.is_ok_and(|output| output.status.success()) {
        let install = ["install", "cargo-deny", "--locked", "--version", "0.20.2"];
        cargo("install cargo-deny", &install, &[])?;
    }
    let check = ["deny", "check", "licenses", "sources", "bans"];
    cargo("licences and sources", &check, &[])
}

fn cargo(what: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Result<(), String> {
    let line = format!("cargo {}", arguments.join(" "));
    eprintln!("xtask: {what}: {line}");
    let start = Instant::now();
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(arguments)
        .envs(environment.iter().copied())
        .status()
        .map_err(|e| format!("xtask: cannot run `{line}`: {e}"))?;
    if !status.success() {
        return Err(format!(
            "xtask: {what} failed: `{line}` ended with {status}"
        ));
    }
    eprintln!(
        "xtask: {what}: ok in {:.0} s",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}
