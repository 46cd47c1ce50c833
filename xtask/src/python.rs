//! The Python package: built as a wheel, installed into a fresh environment, tested there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::cuda::write;

/// What tests need beside the package; it needs nothing itself.
const TEST_TOOLS: [&str; 4] = ["pytest>=8,<10", "numpy", "mypy>=1.15,<3", "ruff>=0.12,<1"];
const BUILD_TOOLS: [&str; 1] = ["maturin>=1.9,<2"];
/// For an environment of its own, since the package must do without torch. 5 GB.
const TORCH_TOOLS: [&str; 3] = ["torch==2.15.*", "numpy", "pytest>=8,<10"];
/// The engines whose plugins are tested, as their own Python code: without kernels, which need a GPU, and without what
/// they depend on, of which there are gigabytes. Tests put stand-ins in its place, but for the following. 90 MB to fetch.
const SGLANG: &str = "sglang==0.5.23";
const VLLM: &str = "vllm==0.33.0";
const ENGINES_NEED: [&str; 9] = [
    "cachetools",
    "cloudpickle",
    "msgspec",
    "orjson",
    "psutil",
    "pybase64",
    "pydantic",
    "pyzmq",
    "requests",
];
/// What builds vLLM's source distribution when nothing of it is to be compiled.
const VLLM_TOOLS: [&str; 5] = [
    "packaging",
    "setuptools>=77,<81",
    "setuptools-rust",
    "setuptools-scm",
    "wheel",
];
/// Environments and wheels.
const FOLDER: &str = "target/python";

/// Builds the wheel, installs it into a fresh environment, checks style and types, and runs pytest; then again in an
/// environment with torch.
pub(crate) fn test() -> Result<(), String> {
    let start = Instant::now();
    let folder = absolute(FOLDER)?;
    let tools = Environment::kept(&folder.join("tools"), &BUILD_TOOLS, "maturin")?;
    let wheels = folder.join("wheels");
    remove(&wheels)?;
    let mut build = tools.program("maturin");
    // Run there, it finds pyproject.toml.
    build.current_dir("python");
    build.args(["build", "--quiet", "--out"]).arg(&wheels);
    run("building the wheel", &mut build)?;
    let wheel = the_wheel(&wheels)?;

    let environment = Environment::fresh(&folder.join("environment"))?;
    // Without an index: it depends on nothing.
    let mut install = environment.pip();
    install.arg("--no-index").arg(&wheel);
    run("installing the wheel", &mut install)?;
    let mut import = environment.program("python");
    // Elsewhere than where the sources are, or they would be what is imported.
    import.current_dir(&folder).args(["-c", IMPORT]);
    run("importing it", &mut import)?;
    let mut install = environment.pip();
    install.args(TEST_TOOLS);
    run("installing what tests need", &mut install)?;

    for check in [&["format", "--check"][..], &["check"]] {
        let mut style = environment.program("python");
        style.current_dir("python").args(["-m", "ruff"]).args(check);
        run("checking style", style.arg("--quiet").arg("."))?;
    }
    let mut types = environment.program("python");
    types.current_dir("python");
    types.args(["-m", "mypy", "--config-file", "pyproject.toml"]);
    run("checking types", &mut types)?;
    // What is written down of the Rust side is what it has. Elsewhere than where the sources are.
    let mut stubs = environment.program("python");
    stubs.current_dir(&folder);
    stubs.args(["-m", "mypy.stubtest", "crossweft._crossweft"]);
    run("comparing stubs with the module", &mut stubs)?;
    let mut tests = environment.program("python");
    tests.current_dir("python/tests");
    tests.args(["-m", "pytest", "--config-file", "../pyproject.toml", "."]);
    run("Python tests", &mut tests)?;
    with_torch(&folder, &wheel)?;
    eprintln!(
        "xtask: Python: ok in {:.0} s",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Installs the wheel beside torch, and runs the tests that need torch.
fn with_torch(folder: &Path, wheel: &Path) -> Result<(), String> {
    let place = folder.join("torch");
    let environment = match Environment::kept(&place, &TORCH_TOOLS, "torchrun") {
        Ok(environment) => environment,
        // A machine without the room, or the way, for torch can still test all else.
        Err(error) => {
            remove(&place)?;
            return not_run("with torch, and in inference engines", &error);
        }
    };
    let mut install = environment.pip();
    install.args(["--no-index", "--no-deps", "--force-reinstall"]);
    run("installing the wheel beside torch", install.arg(wheel))?;
    let mut tests = environment.program("python");
    tests.current_dir("python/tests_torch");
    tests.args(["-m", "pytest", "--config-file", "../pyproject.toml", "."]);
    run("Python tests with torch", &mut tests)?;
    with_engines(&environment)
}

/// Runs the tests of what inference engines use, in an environment with torch to which the engines are added.
fn with_engines(environment: &Environment) -> Result<(), String> {
    let mut version = environment.program("python");
    version.args(["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]);
    if !version.status().is_ok_and(|status| status.success()) {
        eprintln!("xtask: skipped: tests in the engines' code, which needs Python 3.11");
        return Ok(());
    }
    let list = [SGLANG, VLLM, &ENGINES_NEED.join(" ")].join(" ");
    if !environment.has("engines", &list) {
        if let Err(error) = install_engines(environment) {
            return not_run("in inference engines", &error);
        }
        environment.note("engines", &list)?;
    }
    let mut tests = environment.program("python");
    tests.current_dir("python/tests_engines");
    tests.args(["-m", "pytest", "--config-file", "../pyproject.toml", "."]);
    run("Python tests with inference engines", &mut tests)
}

fn install_engines(environment: &Environment) -> Result<(), String> {
    let mut install = environment.pip();
    install.args(ENGINES_NEED).args(VLLM_TOOLS);
    run("installing what the engines need", &mut install)?;
    let mut install = environment.pip();
    install.args(["--no-deps", SGLANG]);
    run("installing SGLang", &mut install)?;
    let mut install = environment.pip();
    // Its wheel has 500 MB of kernels.
    install.args([
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        "vllm",
        VLLM,
    ]);
    let release = VLLM.rsplit('=').next().unwrap_or_default();
    install
        .env("VLLM_TARGET_DEVICE", "empty")
        .env("VLLM_VERSION_OVERRIDE", release);
    run("installing vLLM", &mut install)
}

/// Says that some tests were not run, as what they need could not be installed.
#[expect(
    clippy::unnecessary_wraps,
    reason = "what is left of a run of tests, which goes well"
)]
fn not_run(what: &str, error: &str) -> Result<(), String> {
    eprintln!("{error}\nxtask: NOT RUN, since it cannot be installed here: Python tests {what}");
    Ok(())
}

const IMPORT: &str =
    "import crossweft; print('crossweft', crossweft.__version__, crossweft.__file__)";

/// A virtual environment.
struct Environment(PathBuf);

impl Environment {
    /// One that is made once, with a `program` of its packages.
    fn kept(folder: &Path, packages: &[&str], program: &str) -> Result<Self, String> {
        let environment = Self(folder.to_owned());
        let list = packages.join(" ");
        if environment.has("complete", &list)
            && environment.program(program).arg("--help").output().is_ok()
        {
            return Ok(environment);
        }
        let environment = Self::fresh(folder)?;
        let mut install = environment.pip();
        install.args(packages);
        run(&format!("installing {list}"), &mut install)?;
        environment.note("complete", &list)?;
        Ok(environment)
    }

    /// Whether this was noted.
    fn has(&self, name: &str, list: &str) -> bool {
        fs::read_to_string(self.0.join(name)).is_ok_and(|found| found == list)
    }

    /// Notes what has been installed: last, so that an installation which was interrupted is not taken for one.
    fn note(&self, name: &str, list: &str) -> Result<(), String> {
        write(&self.0.join(name), list)
    }

    fn fresh(folder: &Path) -> Result<Self, String> {
        remove(folder)?;
        let mut make = Command::new("python3");
        make.args(["-m", "venv"]).arg(folder);
        run("making a Python environment", &mut make).map_err(|error| {
            format!("{error}\nthe Python tests need python3 (3.10 or newer) with its venv module and pip")
        })?;
        Ok(Self(folder.to_owned()))
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.0.join("bin").join(name));
        // What the caller's shell has active is not what is tested.
        command
            .env_remove("PYTHONPATH")
            .env_remove("PYTHONHOME")
            .env("VIRTUAL_ENV", &self.0);
        command
    }

    fn pip(&self) -> Command {
        let mut command = self.program("python");
        command.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]);
        command
    }
}

fn the_wheel(folder: &Path) -> Result<PathBuf, String> {
    let entries = fs::read_dir(folder).map_err(|e| format!("xtask: {}: {e}", folder.display()))?;
    entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| format!("xtask: maturin has made no wheel in {}", folder.display()))
}

fn absolute(path: &str) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|e| format!("xtask: {path}: {e}"))
}

fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!(
            "xtask: cannot remove {}: {error}",
            folder.display()
        )),
        _ => Ok(()),
    }
}

fn run(what: &str, command: &mut Command) -> Result<(), String> {
    eprintln!("xtask: {what}");
    let status = command
        .status()
        .map_err(|e| format!("xtask: {what}: cannot run {command:?}: {e}"))?;
    if !status.success() {
        return Err(format!(
            "xtask: {what} failed: {command:?} ended with {status}"
        ));
    }
    Ok(())
}
