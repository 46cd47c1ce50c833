//! What a machine with a GPU runs: a bundle of test programs that needs neither Rust nor this tree, and a
//! script that runs them and writes down what happened.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cuda::{printed, root, run, write};

/// Packages and tests that have something to do on a GPU; each is skipped, and says so, without one.
const TESTS: &[(&str, &str)] = &[
    ("crossweft-hal", "cuda_device"),
    ("crossweft-hal", "cuda_queues"),
    ("crossweft-channel", "interop_cuda"),
    ("crossweft-channel", "channels_cuda"),
    ("crossweft-collective", "cuda"),
    ("crossweft-collective", "cuda_norm"),
    ("crossweft-collective", "cuda_exchange"),
    ("crossweft-nccl", "cuda_nccl"),
    ("crossweft-collective", "cuda_speed"),
    ("crossweft-moe", "moe_cuda"),
];
/// Programs that go with them.
const PROGRAMS: &[&str] = &["crossweft-cli", "custom-kernel-cuda", "custom-kernel-rust"];
/// NCCL's library, and what runs PyTorch on it.
const NCCL: [&str; 2] = ["libcrossweft_nccl.so", "torch_cuda.py"];
/// What `cargo xtask header` leaves in `target/header`.
const PTX: &[&str] = &["interop.ptx", "interop.sm_90.ptx", "kernel.ptx"];

/// What compares, with what it reads; it lies in the bundle as it lies in this tree.
const COMPARISON: [&str; 4] = [
    "benches/report.py",
    "benches/gpu/compare.py",
    "benches/gpu/torch_rivals.py",
    "python/tools/deep_ep_tests.py",
];

/// What is bundled, and whether it is run.
pub(crate) struct Bundle {
    here: bool,
    /// Ranks, of the comparison; without, it is the tests.
    compare: Option<u32>,
}

impl Bundle {
    /// `--here`, and `--compare` with `--ranks N`.
    pub(crate) fn parse(options: &[&str]) -> Option<Self> {
        let (mut here, mut compare, mut ranks) = (false, false, None);
        let mut rest = options.iter();
        while let Some(option) = rest.next() {
            match *option {
                "--here" => here = true,
                "--compare" => compare = true,
                "--ranks" => ranks = Some(rest.next()?.parse().ok().filter(|&n: &u32| n > 0)?),
                _ => return None,
            }
        }
        let compare = match (compare, ranks) {
            (true, ranks) => Some(ranks.unwrap_or(2)),
            (false, None) => None,
            (false, Some(_)) => return None,
        };
        Some(Self { here, compare })
    }

    /// Builds `target/gpu-bundle` or `target/gpu-compare`, and runs it on this machine if that was asked for.
    pub(crate) fn build(&self) -> Result<(), String> {
        let (name, script) = match self.compare {
            None => ("gpu-bundle", "run.sh"),
            Some(_) => ("gpu-compare", "compare.sh"),
        };
        let bundle = root().join("target").join(name);
        if bundle.exists() {
            fs::remove_dir_all(&bundle).map_err(failed(&bundle))?;
        }
        fs::create_dir_all(&bundle).map_err(failed(&bundle))?;
        let (text, options) = match self.compare {
            None => (suite(&bundle)?, "[FOLDER OF PLANS]"),
            Some(ranks) => (comparison(&bundle, ranks)?, "[OPTION OF compare.py ...]"),
        };
        write(&bundle.join(script), &text)?;
        eprintln!(
            "xtask: copy {} to a machine with a GPU and run `bash {script} {options}` in it",
            bundle.display()
        );
        if self.here {
            let mut command = Command::new("bash");
            let status = command.arg(script).current_dir(&bundle).status();
            let status = status.map_err(|error| format!("xtask: bash: {error}"))?;
            if !status.success() {
                return Err(format!("xtask: {script} failed; see target/{name}/results"));
            }
        }
        Ok(())
    }
}

/// Fills the bundle of the GPU suite; returns its script.
fn suite(bundle: &Path) -> Result<String, String> {
    // The kernels in CUDA C++; without its compilers their tests say that they are skipped.
    match crate::header::check() {
        Ok(()) => {}
        Err(message) => eprintln!("xtask: without the kernels in CUDA C++: {message}"),
    }
    for ptx in PTX {
        let from = root().join("target/header").join(ptx);
        if from.exists() {
            copy(&from, &bundle.join(ptx))?;
        }
    }
    for &(package, test) in TESTS {
        let program = test_program(package, test)?;
        install(&program, &bundle.join(test))?;
    }
    for package in PROGRAMS {
        program(package, bundle)?;
    }
    library(bundle)?;
    let [_, torch] = NCCL;
    let from = root().join("crates/crossweft-nccl/tests").join(torch);
    copy(&from, &bundle.join(torch))?;
    Ok(SCRIPT.to_owned())
}

/// Fills the bundle of the comparison; returns its script.
fn comparison(bundle: &Path, ranks: u32) -> Result<String, String> {
    program("crossweft-cli", bundle)?;
    library(bundle)?;
    for file in COMPARISON {
        let to = bundle.join(file);
        let folder = to.parent().unwrap_or(bundle);
        fs::create_dir_all(folder).map_err(failed(folder))?;
        copy(&root().join(file), &to)?;
    }
    let [library, _] = NCCL;
    Ok(format!(
        r#"#!/usr/bin/env bash
# Compares with what else is on a machine with {ranks} GPUs, and writes results/{ranks}xGPU.json, .md and pictures.
# usage: bash compare.sh [OPTION OF compare.py ...]
here=$(cd "$(dirname "$0")" && pwd) || exit 2
exec python3 "$here/benches/gpu/compare.py" --crossweft "$here/crossweft" --own-library "$here/{library}" \
    --ranks {ranks} --out "$here/results/{ranks}xGPU" "$@"
"#
    ))
}

fn failed(what: &Path) -> impl FnOnce(std::io::Error) -> String {
    let what = what.display().to_string();
    move |error| format!("xtask: {what}: {error}")
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::copy(from, to).map(drop).map_err(failed(from))
}

/// Builds a package's program into the bundle.
fn program(package: &str, bundle: &Path) -> Result<(), String> {
    let mut build = cargo();
    run(build.args(["build", "--release", "--package", package]))?;
    let name = if package == "crossweft-cli" {
        "crossweft"
    } else {
        package
    };
    install(&built().join(name), &bundle.join(name))
}

/// Builds NCCL's library into the bundle.
fn library(bundle: &Path) -> Result<(), String> {
    let mut build = cargo();
    run(build.args(["build", "--release", "--package", "crossweft-nccl"]))?;
    let [library, _] = NCCL;
    install(&built().join(library), &bundle.join(library))
}

/// Where cargo leaves programs.
fn built() -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    root()
        .join(chosen.unwrap_or_else(|| "target".into()))
        .join("release")
}

fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root());
    cargo
}

/// Builds a test and says where its program is.
fn test_program(package: &str, test: &str) -> Result<PathBuf, String> {
    let mut build = cargo();
    build.args(["test", "--release", "--no-run", "--message-format=json"]);
    let output = run(build.args(["--package", package, "--test", test]))?;
    // One JSON object a line; the one of this test names its program.
    let of_test = |line: &&str| line.contains(&format!("\"name\":\"{test}\""));
    let text = printed(&output);
    let program = text
        .lines()
        .filter(of_test)
        .filter_map(|line| line.split("\"executable\":\"").nth(1))
        .filter_map(|rest| rest.split('"').next())
        .next_back();
    program
        .map(PathBuf::from)
        .ok_or_else(|| format!("xtask: cargo did not say where the test {test} is"))
}

/// Copies a program without what only debuggers read, if there is `strip`.
fn install(from: &Path, to: &Path) -> Result<(), String> {
    copy(from, to)?;
    // Without it the bundle is larger, no more.
    let _ = Command::new("strip").arg(to).status();
    Ok(())
}

/// Runs everything on a machine with a GPU, one after another. Results: `results/suite.json` and what each
/// printed.
const SCRIPT: &str = r#"#!/usr/bin/env bash
# Runs the GPU suite and writes results/suite.json: what ran, on what, how it ended, in how many seconds.
# usage: bash run.sh [FOLDER OF PLAN FILES]
set -u
plans=""
if [ $# -gt 0 ]; then plans=$(cd "$1" && pwd) || exit 2; fi
cd "$(dirname "$0")"
# Ranks share the GPU: each needs a hardware queue of its own. NVLink multicast is left alone.
export CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1
unset CROSSWEFT_MULTICAST
[ -e interop.ptx ] && export CROSSWEFT_INTEROP_PTX=$PWD/interop.ptx
mkdir -p results
failures=0
rows=""
step() { # name, seconds it may take, command
    local name=$1 limit=$2 begin end outcome
    shift 2
    begin=$(date +%s)
    timeout "$limit" "$@" > "results/$name.txt" 2>&1
    local code=$?
    outcome="exit $code"
    if [ $code = 0 ]; then
        outcome=ok
    elif [ $code = 2 ] && grep -q '^error: .* ranks in one process on CUDA' "results/$name.txt"; then
        # More ranks than a process has queues for; nothing was launched.
        outcome=refused
    else
        failures=$((failures + 1))
    fi
    if [ "$outcome" = ok ] && grep -q 'skipped: ' "results/$name.txt"; then outcome=skipped; fi
    end=$(date +%s)
    printf '%-24s %-10s %4d s\n' "$name" "$outcome" $((end - begin))
    rows="$rows${rows:+,}
    {\"name\": \"$name\", \"outcome\": \"$outcome\", \"seconds\": $((end - begin))}"
}
step doctor 60 ./crossweft doctor
for test in cuda_device cuda_queues channels_cuda interop_cuda cuda cuda_norm cuda_exchange moe_cuda cuda_nccl; do
    step "$test" 600 "./$test" --nocapture --test-threads 1
done
# Once more with what newer GPUs have; older ones cannot load it.
if [ -e interop.sm_90.ptx ] && grep -Eq 'sm_(9|1[0-9])' results/doctor.txt; then
    step interop_cuda_sm_90 600 env CROSSWEFT_INTEROP_PTX="$PWD/interop.sm_90.ptx" ./interop_cuda --nocapture --test-threads 1
fi
step cuda_speed 300 ./cuda_speed --nocapture --test-threads 1
if ./crossweft bench all-reduce --device cuda --threads --max 8 > /dev/null 2>&1; then
    for ranks in 2 4 8; do
        step "bench_$ranks" 120 ./crossweft bench all-reduce --device cuda --threads --ranks $ranks --max 4M --dtype bf16 \
            --timeout 10
    done
    for ranks in 2 4 8; do
        for by in "" --executor; do
            step "matrix_$ranks$by" 300 ./crossweft matrix --device cuda --pairwise --ranks $ranks --large 256K --timeout 20 $by
        done
    done
    for call in send-recv all-to-all-v all-gather-v reduce-scatter-v; do
        step "bench_$call" 120 ./crossweft bench $call --device cuda --threads --ranks 4 --max 4M --buffers private \
            --timeout 10
    done
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null; then
        step torch_nccl 300 python3 torch_cuda.py libcrossweft_nccl.so
    fi
    step custom-kernel-rust 60 ./custom-kernel-rust cuda
    [ -e kernel.ptx ] && step custom-kernel-cuda 60 ./custom-kernel-cuda kernel.ptx
    if [ -n "$plans" ]; then
        for plan in $(find "$plans" -name '*.json' | sort); do
            # Those that the checker refuses are not for running.
            ./crossweft plan check "$plan" > /dev/null 2>&1 || continue
            for dtype in f32 f16 bf16 i32; do
                step "plan_$(basename "$plan" .json)_$dtype" 120 \
                    ./crossweft plan run "$plan" --threads --device cuda --dtype $dtype --timeout 60
            done
        done
    fi
    if command -v compute-sanitizer > /dev/null; then
        for tool in memcheck synccheck racecheck; do
            # Of one rank: a sanitizer runs one kernel at a time.
            step "sanitizer_${tool}_exchange" 120 compute-sanitizer --error-exitcode 9 --tool $tool \
                ./cuda_exchange itself --test-threads 1
            step "sanitizer_$tool" 300 compute-sanitizer --error-exitcode 9 --tool $tool ./cuda together --test-threads 1
            # Bulk copies and lines: kernels that wait for nobody.
            step "sanitizer_${tool}_channels" 300 compute-sanitizer --error-exitcode 9 --tool $tool ./channels_cuda alone \
                --test-threads 1
            # Plans in one piece: a kernel a rank, which a sanitizer runs one at a time, so each in a process. In no graphs: two
            # processes that share a GPU take turns on it, milliseconds each, and a graph has a hundred calls.
            step "sanitizer_${tool}_fused" 120 compute-sanitizer --error-exitcode 9 --tool $tool --target-processes all \
                ./crossweft bench all-reduce --device cuda --ranks 2 --min 1000 --max 2M --factor 40 --iters 3 --eager --timeout 60
            step "sanitizer_${tool}_moe" 240 compute-sanitizer --error-exitcode 9 --tool $tool --target-processes all \
                ./crossweft bench moe --device cuda --ranks 2 --tokens 5,40 --hidden 512 --experts 6 --top-k 2 --iters 2 \
                --layout ll-expert-major,ll-rank-major,ht-flat,ht-expert-major --phase both --timeout 30
        done
    fi
else
    echo "no usable CUDA device: the rest is left out"
fi
gpu=$(sed -n 's/^ *device 0 *//p' results/doctor.txt | head -1)
driver=$(sed -n 's/^ *driver *\(CUDA.*\)/\1/p' results/doctor.txt | head -1)
printf '{"date": "%s", "device": "%s", "driver": "%s", "failures": %d, "steps": [%s\n]}\n' \
    "$(date -u +%F)" "${gpu%,*}" "$driver" "$failures" "$rows" > results/suite.json
echo "$failures failed; results/suite.json"
[ "$failures" = 0 ]
"#;

#[cfg(test)]
mod tests {
    use super::{Bundle, COMPARISON};

    #[test]
    fn options_are_what_they_say() {
        let parse = |options: &[&str]| Bundle::parse(options).map(|b| (b.here, b.compare));
        assert_eq!(parse(&[]), Some((false, None)));
        assert_eq!(parse(&["--here"]), Some((true, None)));
        assert_eq!(parse(&["--compare"]), Some((false, Some(2))));
        assert_eq!(
            parse(&["--ranks", "4", "--compare", "--here"]),
            Some((true, Some(4)))
        );
        for wrong in [
            &["--ranks", "2"][..],
            &["--compare", "--ranks"],
            &["--compare", "--ranks", "two"],
            &["--compare", "--ranks", "0"],
            &["--plans"],
        ] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn what_compares_is_there() {
        for file in COMPARISON {
            assert!(crate::cuda::root().join(file).is_file(), "{file}");
        }
    }
}
