//! `cargo xtask kernels`: GPU kernels, from Rust to PTX, and what must hold of the result.
//!
//! Compiling takes a compiler that has libcore's source of its own version, and features that are
//! not stable: Debian's `rustc-web` with `rust-web-src`, or a rustup toolchain with `rust-src`. The
//! result is committed, so nobody else needs one; [`check`] compares only where the compiler is the
//! same. Assembling takes `ptxas`, from CUDA or from the wheel `nvidia-cuda-nvcc`.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossweft_kernels::{MODULES, Module};

use crate::amd;
use crate::cuda::{self, root};
use crate::sass;

/// The lowest PTX version that has what a module's kernels use: driver 520 and later read the first, 525 the second.
const fn ptx_version(module: &Module) -> &'static str {
    if module.sm < 90 { "ptx78" } else { "ptx80" }
}

/// What `ptxas` must accept: the oldest and the newest that matter, and the one measured on.
pub(crate) const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// Flags of the last crate. Everything is inlined before LLVM sees it: references to functions'
/// arguments would tell LLVM that tables never change, and it would keep all of them in registers.
/// Loop strength reduction would do the same to addresses.
const FLAGS: [&str; 5] = [
    "-Zinline-mir=yes",
    "-Zinline-mir-threshold=100000",
    "-Zinline-mir-hint-threshold=100000",
    "-Cllvm-args=-disable-lsr",
    "-Ccodegen-units=1",
];

/// More flags for modules whose loops are not [unrolled](unrolls).
const STRAIGHT: [&str; 3] = [
    "-Cllvm-args=-unroll-runtime=false",
    "-Cllvm-args=-unroll-allow-partial=false",
    "-Cllvm-args=-unroll-allow-peeling=false",
];

/// Builds the modules of these names or families, or all if there is none, and writes them.
pub(crate) fn build(names: &[&str]) -> Result<(), String> {
    let is = |module: &Module, name: &str| module.name == name || module.family == name;
    if let Some(name) = names
        .iter()
        .find(|name| !MODULES.iter().any(|module| is(module, name)))
    {
        return Err(format!("xtask: there is no module {name}"));
    }
    let compiler = Compiler::find()?.ok_or(
        "xtask: no compiler for PTX; install one with libcore's source: \
         `apt-get install rustc-web rust-web-src` or `rustup component add rust-src`",
    )?;
    fs::create_dir_all(folder()).map_err(|e| format!("xtask: {}: {e}", folder().display()))?;
    let meant = |module: &&Module| names.is_empty() || names.iter().any(|name| is(module, name));
    for module in in_turn().filter(meant) {
        let text = compiler.compile(module)?;
        fs::write(path(module), &text).map_err(|e| format!("xtask: {}: {e}", module.name))?;
        eprintln!(
            "xtask: {}: {} KB",
            path(module).display(),
            text.len() / 1024
        );
    }
    Ok(())
}

/// Checks the committed modules: the text, what `ptxas` makes of it, and, where the compiler is the
/// one they were made with, that they are what the sources give.
pub(crate) fn check() -> Result<(), String> {
    let mut problems = Vec::new();
    for module in MODULES {
        let names = |problem| format!("{}: {problem}", module.name);
        problems.extend(lint(module.ptx, module.entries).into_iter().map(names));
    }
    let ptxas = find_ptxas()?;
    let assembled = assemble_all(&ptxas)?;
    if assembled.is_empty() {
        problems.extend(sass::check()?);
    }
    problems.extend(assembled);
    match Compiler::find()? {
        None => eprintln!("xtask: no compiler for PTX: not rebuilt"),
        Some(compiler) => {
            for module in in_turn() {
                let header = compiler.header(module);
                let made_by = header.lines().nth(1).unwrap_or_default();
                if !module.ptx.contains(made_by) {
                    let name = &compiler.version;
                    eprintln!(
                        "xtask: {}: not rebuilt: made by another than {name}",
                        module.name
                    );
                } else if compiler.compile(module)? != module.ptx {
                    problems.push(format!(
                        "{}: not what the sources give; run `cargo xtask kernels`",
                        module.name
                    ));
                }
            }
        }
    }
    problems.extend(amd::check()?);
    if problems.is_empty() {
        eprintln!("xtask: {} modules of PTX: ok", MODULES.len());
        Ok(())
    } else {
        Err(format!("xtask: kernels:\n  {}", problems.join("\n  ")))
    }
}

/// Assembles the committed modules, and writes what the machine code of each kernel has.
pub(crate) fn table() -> Result<(), String> {
    let problems = assemble_all(&find_ptxas()?)?;
    match problems.is_empty() {
        true => sass::write(),
        false => Err(format!("xtask: kernels:\n  {}", problems.join("\n  "))),
    }
}

/// All modules, those of one architecture after those of another: for each in turn, the core library is compiled anew.
fn in_turn() -> impl Iterator<Item = &'static Module> {
    let mut modules: Vec<_> = MODULES.iter().collect();
    modules.sort_by_key(|module| module.sm);
    modules.into_iter()
}

fn folder() -> PathBuf {
    root().join("kernels/ptx")
}

fn path(module: &Module) -> PathBuf {
    folder().join(format!("{}.sm_{}.ptx", module.name, module.sm))
}

/// A compiler that can make PTX.
pub(crate) struct Compiler {
    pub(crate) rustc: PathBuf,
    version: String,
    /// The major version of its LLVM.
    pub(crate) llvm: String,
}

impl Compiler {
    /// `$CROSSWEFT_PTX_RUSTC`, the one in `PATH`, or the system's: the first that has libcore's
    /// source.
    pub(crate) fn find() -> Result<Option<Self>, String> {
        let chosen = env::var_os("CROSSWEFT_PTX_RUSTC").map(PathBuf::from);
        let candidates = match &chosen {
            Some(rustc) => vec![rustc.clone()],
            None => vec![PathBuf::from("rustc"), PathBuf::from("/usr/bin/rustc")],
        };
        for rustc in candidates {
            let ask = |arguments: &[&str]| {
                let output = Command::new(&rustc).args(arguments).output().ok()?;
                let text = String::from_utf8(output.stdout).ok()?;
                output.status.success().then_some(text)
            };
            let Some(sysroot) = ask(&["--print", "sysroot"]) else {
                continue;
            };
            let core = "lib/rustlib/src/rust/library/core/src/lib.rs";
            if !Path::new(sysroot.trim()).join(core).exists() {
                continue;
            }
            let verbose = ask(&["-vV"]).unwrap_or_default();
            let line = |key: &str| {
                let mut lines = verbose.lines();
                let found = lines.find_map(|line| line.strip_prefix(key));
                found.unwrap_or("unknown").trim().to_owned()
            };
            let (release, commit) = (line("release:"), line("commit-hash:"));
            let llvm = line("LLVM version:");
            let version = format!("rustc {release} ({commit}), LLVM {llvm}");
            let llvm = llvm.split('.').next().unwrap_or_default().to_owned();
            return Ok(Some(Self {
                rustc,
                version,
                llvm,
            }));
        }
        match chosen {
            Some(rustc) => Err(format!(
                "xtask: CROSSWEFT_PTX_RUSTC: {} does not run or has no libcore source",
                rustc.display()
            )),
            None => Ok(None),
        }
    }

    fn header(&self, module: &Module) -> String {
        format!(
            "// Made by `cargo xtask kernels` from kernels/ and crates/crossweft-device. Do not edit.\n\
             // {}\n\
             // module {}, {}, {}\n",
            self.version,
            module.name,
            ptx_version(module),
            FLAGS.join(" ")
        )
    }

    fn compile(&self, module: &Module) -> Result<String, String> {
        let target = Target {
            triple: "nvptx64-nvidia-cuda",
            flags: format!(
                "-Ctarget-cpu=sm_{} -Ctarget-feature=+{}",
                module.sm,
                ptx_version(module)
            ),
            emit: "asm",
        };
        let text = self.emit(module, &target)?;
        panics(&text).map_err(|problem| format!("xtask: {}: {problem}", module.name))?;
        Ok(self.header(module) + &finish(&text, module.threads, unrolls(module)))
    }

    /// What the compiler makes of a module for another machine.
    pub(crate) fn emit(&self, module: &Module, for_: &Target) -> Result<String, String> {
        let target = root().join("target/kernels");
        let raw = target.join(format!("{}.{}.{}", module.name, for_.triple, for_.emit));
        let flags = [
            for_.flags.clone(),
            "-Zunstable-options".to_owned(),
            "-Cpanic=immediate-abort".to_owned(),
            // What is read by name from the sources of another folder is the same text.
            format!("--remap-path-prefix={}=.", root().display()),
        ];
        fs::create_dir_all(&target).map_err(|e| format!("xtask: {}: {e}", target.display()))?;
        let output = Command::new("cargo")
            .current_dir(root().join("kernels"))
            .args([
                "rustc",
                "--release",
                "--quiet",
                "--locked",
                "-Zbuild-std=core",
            ])
            .args(["--target", for_.triple, "--"])
            .args(["--cfg", &format!("module=\"{}\"", module.name)])
            .args(["--cfg", &format!("family=\"{}\"", module.family)])
            .arg(format!("--emit={}={}", for_.emit, raw.display()))
            .args(FLAGS)
            .args(if unrolls(module) { &[][..] } else { &STRAIGHT })
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", flags.join(" "))
            .env("CARGO_TARGET_DIR", &target)
            // Those of the cargo that runs this are for another compiler.
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .output()
            .map_err(|e| format!("xtask: cannot run cargo: {e}"))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(format!("xtask: {}: {errors}", module.name));
        }
        fs::read_to_string(&raw).map_err(|e| format!("xtask: {}: {e}", raw.display()))
    }
}

/// Another machine.
pub(crate) struct Target {
    pub(crate) triple: &'static str,
    /// Which of its kind.
    pub(crate) flags: String,
    /// What to write, as for `--emit`.
    pub(crate) emit: &'static str,
}

/// Places that end a kernel when a number of a prepared program is 0 and is divided by: the size of
/// an element, the blocks at a barrier, the capacity of a fifo, each where it was inlined. None is.
const DIVISIONS: usize = 8;

/// Whether the text has only the panics that are known. A new one is most likely a checked index.
fn panics(ptx: &str) -> Result<(), String> {
    let found = ptx.matches("trap;").count();
    if found > DIVISIONS {
        return Err(format!(
            "{found} places that panic, not {DIVISIONS}: device code must neither index nor unwrap"
        ));
    }
    Ok(())
}

/// Whether loops may be unrolled: not where most of what a small call costs is fetching instructions.
fn unrolls(module: &Module) -> bool {
    module.family != "moe_lines"
}

/// The same for one entry: lines, which many threads have several of, are worth it.
fn entry_unrolls(entry: &str) -> bool {
    let is = |form: &str| entry.starts_with(&format!("crossweft_{form}"));
    let straight = is("one_shot") && !is("one_shot_lines") && !is("one_shot_norm");
    !(straight || is("two_shot"))
}

/// What the compiler leaves to be done: launch bounds, names that do not depend on where the
/// sources lie, and no text that means nothing.
fn finish(ptx: &str, threads: u32, unrolls: bool) -> String {
    let names = functions(ptx);
    let mut out = String::new();
    let mut listed: Vec<_> = names.values().collect();
    listed.sort();
    for (short, words) in listed {
        let _ = writeln!(out, "// {short}: {words}");
    }
    let mut in_entry = false;
    let mut straight = false;
    for line in ptx.lines() {
        let line = line.split("//").next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        // A trap would end the process's context, not only the kernel. See [`panics`].
        let line = line.replace("trap; exit;", "exit;");
        let line = rename(&line, &names);
        if let Some((_, entry)) = line.split_once(".entry ") {
            in_entry = true;
            straight = !entry_unrolls(entry);
        }
        let _ = writeln!(out, "{line}");
        if line.starts_with(".address_size") && !unrolls {
            let _ = writeln!(out, ".pragma \"nounroll\";");
        }
        if in_entry && line.ends_with(')') {
            // One block on a multiprocessor: left to itself, `ptxas` spills for a second one.
            let _ = writeln!(out, ".maxntid {threads}, 1, 1\n.minnctapersm 1");
            if straight && unrolls {
                let _ = writeln!(out, ".pragma \"nounroll\";");
            }
            in_entry = false;
        }
    }
    out
}

/// A function's symbol, a short name for it, and the words it is made of.
type Names = BTreeMap<String, (String, String)>;

/// All functions that are not entries, in the order of their words, which do not depend on the
/// build.
fn functions(ptx: &str) -> Names {
    let mut symbols: Vec<(String, String)> = identifiers(ptx)
        .filter(|word| word.starts_with("_R") && !word.contains("_param_"))
        .map(|symbol| (words(symbol), symbol.to_owned()))
        .collect();
    symbols.sort();
    symbols.dedup();
    let numbered = symbols.into_iter().enumerate();
    numbered
        .map(|(i, (words, symbol))| (symbol, (format!("crossweft_f{i}"), words)))
        .collect()
}

fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_identifier(c))
        .filter(|word| !word.is_empty())
}

/// The identifiers in a mangled name (Rust RFC 2603), which are the same wherever it was compiled;
/// hashes of crates and references to earlier parts of the name are not.
fn words(symbol: &str) -> String {
    let mut found = Vec::new();
    let mut rest = symbol;
    while let Some(tag) = rest.chars().next() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (count, after) = rest.split_at(digits);
        let after = after.strip_prefix('_').unwrap_or(after);
        if let Some(word) = count
            .parse()
            .ok()
            .and_then(|count: usize| after.get(..count))
        {
            found.push(word);
            rest = &after[word.len()..];
        } else if matches!(tag, 's' | 'B') {
            rest = rest.split_once('_').map_or("", |(_, rest)| rest);
        } else {
            rest = &rest[tag.len_utf8()..];
        }
    }
    found.join(" ")
}

fn rename(line: &str, names: &Names) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("_R") {
        let (before, symbol) = rest.split_at(at);
        let end = symbol.find(|c| !is_identifier(c)).unwrap_or(symbol.len());
        let (symbol, after) = symbol.split_at(end);
        let (stem, parameter) = match symbol.find("_param_") {
            Some(at) => symbol.split_at(at),
            None => (symbol, ""),
        };
        out += before;
        out += names.get(stem).map_or(stem, |(short, _)| short);
        out += parameter;
        rest = after;
    }
    out + rest
}

/// What must hold of a module's text; every problem in a line.
fn lint(ptx: &str, entries: &[&str]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut found = Vec::new();
    for (number, line) in ptx.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default().trim();
        if let Some(at) = code.find(".entry ") {
            found.extend(identifiers(&code[at + ".entry ".len()..]).next());
        }
        for statement in code.split(';').map(str::trim) {
            if let Some(problem) = forbidden(statement) {
                problems.push(format!("line {}: {problem}: {code}", number + 1));
            }
        }
    }
    for entry in entries {
        if !found.contains(entry) {
            problems.push(format!("entry {entry} is missing"));
        }
    }
    for entry in found {
        if !entries.contains(&entry) {
            problems.push(format!("entry {entry} is in no list"));
        }
    }
    if ptx.matches(".entry ").count() != ptx.matches(".maxntid ").count() {
        problems.push("an entry has no launch bounds".to_owned());
    }
    problems
}

/// Why a statement must not be there.
pub(crate) fn forbidden(statement: &str) -> Option<&'static str> {
    // A guard, as in `@%p1 bra ...`.
    let instruction = match statement.strip_prefix('@') {
        Some(guarded) => guarded
            .split_once(char::is_whitespace)
            .map_or("", |(_, rest)| rest.trim()),
        None => statement,
    };
    let opcode = instruction.split_whitespace().next().unwrap_or_default();
    let has = |part: &str| opcode.split('.').skip(1).any(|modifier| modifier == part);
    let is = |name: &str| opcode.split('.').next() == Some(name);
    // What a launch asks for has no size in the module.
    if statement.starts_with(".extern") && !statement.starts_with(".extern .shared ") {
        Some("a function or variable that is not in the module")
    } else if statement.contains("__local_depot") || has("local") || statement.starts_with(".local")
    {
        Some("local memory")
    } else if (is("atom") || is("red")) && !has("sys") && !has("shared") {
        Some("an atomic operation that is not at system scope")
    } else if has("nc") || is("ldu") {
        Some("a load that does not see what others write")
    } else if is("trap") || is("brkpt") {
        Some("would end the process's context")
    } else if has("ftz") {
        Some("flushes subnormal numbers")
    } else if has("approx") || has("full") {
        Some("is not rounded correctly")
    } else if is("fma") || (is("mad") && (has("f32") || has("f64"))) {
        Some("rounds once where the host rounds twice")
    } else {
        None
    }
}

/// `$CROSSWEFT_PTXAS`, the one in `PATH`, or that of a wheel, which is installed below `target/` if
/// it is not there yet.
fn find_ptxas() -> Result<PathBuf, String> {
    let runs = |ptxas: &Path| {
        let output = Command::new(ptxas).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    if let Some(ptxas) = env::var_os("CROSSWEFT_PTXAS").map(PathBuf::from) {
        return if runs(&ptxas) {
            Ok(ptxas)
        } else {
            Err(format!(
                "xtask: CROSSWEFT_PTXAS: {} does not run",
                ptxas.display()
            ))
        };
    }
    let in_path = PathBuf::from("ptxas");
    if runs(&in_path) {
        return Ok(in_path);
    }
    let ptxas = cuda::toolkit(cuda::PTXAS, &["bin/ptxas"])?.join("bin/ptxas");
    match runs(&ptxas) {
        true => Ok(ptxas),
        false => Err(format!("xtask: {} does not run", ptxas.display())),
    }
}

/// Assembles every module for every architecture; returns the problems.
fn assemble_all(ptxas: &Path) -> Result<Vec<String>, String> {
    let out = root().join("target/kernels");
    fs::create_dir_all(&out).map_err(|e| format!("xtask: {}: {e}", out.display()))?;
    let jobs: Vec<(&Module, &str)> = MODULES
        .iter()
        .flat_map(|module| ARCHITECTURES.map(|architecture| (module, architecture)))
        .filter(|(module, architecture)| module.sm <= number_of(architecture))
        .collect();
    Ok(side_by_side(&jobs, |&(module, architecture)| {
        let cubin = out.join(cubin(module, architecture));
        let output = Command::new(ptxas)
            .arg(format!("-arch={architecture}"))
            .arg("-v")
            .arg(path(module))
            .arg("-o")
            .arg(cubin)
            .output();
        let report = match output {
            Err(e) => vec![format!("cannot run ptxas: {e}")],
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr).into_owned()
                    + &String::from_utf8_lossy(&output.stdout);
                if output.status.success() {
                    resources(&text, spilled(module))
                } else {
                    vec![text]
                }
            }
        };
        let named = report
            .into_iter()
            .map(|problem| format!("{}, {architecture}: {problem}", module.name));
        named.collect()
    }))
}

/// The compute capability of an architecture's name.
fn number_of(architecture: &str) -> u32 {
    let digits = architecture.trim_start_matches("sm_").trim_end_matches('a');
    digits.parse().unwrap_or(0)
}

/// The name of a module's machine code.
pub(crate) fn cubin(module: &Module, architecture: &str) -> String {
    format!("{}.sm_{}.{architecture}.cubin", module.name, module.sm)
}

/// Does all jobs, as many at a time as there are processors; returns the problems of all, sorted.
pub(crate) fn side_by_side<J: Sync>(
    jobs: &[J],
    job: impl Fn(&J) -> Vec<String> + Sync,
) -> Vec<String> {
    let (next, reports) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(one) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = job(one);
                    reports
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .extend(report);
                }
            });
        }
    });
    let mut reports = reports
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    reports.sort();
    reports
}

/// Bytes of a thread's own memory that a module may take: none, but for kernels whose blocks need all their warps, which leaves
/// them some registers too few.
fn spilled(module: &Module) -> u64 {
    if module.entries.iter().all(|entry| may_spill(entry)) {
        64
    } else {
        0
    }
}

/// Whether an entry is of such a kernel.
pub(crate) fn may_spill(entry: &str) -> bool {
    entry.starts_with("crossweft_moe_lines_")
}

/// What is wrong in the report of `ptxas -v`: more memory of a thread's own than `most` bytes, and fewer registers used
/// than said, because no report at all is no good news.
fn resources(report: &str, most: u64) -> Vec<String> {
    let mut problems = Vec::new();
    let mut used = false;
    for line in report.lines() {
        used |= line.contains("Used ");
        for what in [
            "bytes stack frame",
            "bytes spill stores",
            "bytes spill loads",
        ] {
            let before = line.split_once(what).map(|(before, _)| before);
            let number = before.and_then(|text| text.split_whitespace().last());
            let number = number.and_then(|number| number.parse::<u64>().ok());
            if number.is_some_and(|number| number > most) {
                problems.push(line.trim().to_owned());
                break;
            }
        }
    }
    if !used {
        problems.push("no report of registers".to_owned());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
.visible .entry k(
.param .b64 k_param_0
)
.maxntid 384, 1, 1
{
red.release.sys.global.add.u64 [%rd1], %rd2;
@%p1 atom.acq_rel.sys.global.add.u64 %rd3, [%rd1], %rd2;
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
add.rn.f32 %r1, %r2, %r3;
div.rn.f32 %r1, %r2, %r3;
.extern .shared .align 128 .b8 launched[];
mad.lo.s64 %rd1, %rd2, %rd3, %rd4;
exit;
}
";

    #[test]
    fn what_may_be_there() {
        assert_eq!(lint(GOOD, &["k"]), Vec::<String>::new());
    }

    #[test]
    fn what_must_not_be_there() {
        for (bad, problem) in [
            ("atom.global.add.u64 %rd3, [%rd1], %rd2;", "system scope"),
            (
                "red.release.gpu.global.add.u64 [%rd1], %rd2;",
                "system scope",
            ),
            ("@!%p3 atom.add.u64 %rd3, [%rd1], %rd2;", "system scope"),
            ("ld.global.nc.b64 %rd1, [%rd2];", "others write"),
            (
                "ld.global.nc.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];",
                "others write",
            ),
            ("ldu.global.b32 %r1, [%rd1];", "others write"),
            ("trap;", "context"),
            ("trap; exit;", "context"),
            ("@%p1 trap;", "context"),
            ("brkpt;", "context"),
            (".local .align 8 .b8 __local_depot0[40];", "local memory"),
            ("st.local.b32 [%rd2], %r1;", "local memory"),
            ("mov.b64 %SPL, __local_depot0;", "local memory"),
            ("cvta.local.u64 %SP, %SPL;", "local memory"),
            (".extern .func (.param .b32 r) f", "not in the module"),
            (".extern .global .b32 x;", "not in the module"),
            ("add.rn.ftz.f32 %r1, %r2, %r3;", "subnormal"),
            ("div.approx.f32 %r1, %r2, %r3;", "rounded"),
            ("div.full.f32 %r1, %r2, %r3;", "rounded"),
            ("fma.rn.f32 %r1, %r2, %r3, %r4;", "rounds once"),
            ("fma.rn.f64 %rd1, %rd2, %rd3, %rd4;", "rounds once"),
            ("mad.rn.f32 %r1, %r2, %r3, %r4;", "rounds once"),
            ("mad.rn.f64 %rd1, %rd2, %rd3, %rd4;", "rounds once"),
        ] {
            let problems = lint(&GOOD.replace("exit;\n", &format!("{bad}\n")), &["k"]);
            assert_eq!(problems.len(), 1, "{bad}: {problems:?}");
            assert!(problems[0].contains(problem), "{bad}: {problems:?}");
        }
    }

    #[test]
    fn entries_are_those_of_the_list() {
        assert_eq!(lint(GOOD, &["k", "l"]), ["entry l is missing"]);
        assert_eq!(lint(GOOD, &[]), ["entry k is in no list"]);
        let unbounded = GOOD.replace(".maxntid 384, 1, 1\n", "");
        assert_eq!(lint(&unbounded, &["k"]), ["an entry has no launch bounds"]);
    }

    #[test]
    fn spills_and_silence_are_problems() {
        let clean = "ptxas info : Used 40 registers\n    0 bytes stack frame, 0 bytes spill stores, 0 \
                     bytes spill loads\n";
        assert_eq!(resources(clean, 0), Vec::<String>::new());
        for (from, to) in [
            ("0 bytes stack", "16 bytes stack"),
            ("0 bytes spill stores", "4 bytes spill stores"),
            ("0 bytes spill loads", "10 bytes spill loads"),
        ] {
            assert_eq!(resources(&clean.replace(from, to), 0).len(), 1, "{to}");
        }
        assert_eq!(resources("", 0).len(), 1);
    }

    #[test]
    fn names_do_not_depend_on_the_build() {
        let one = "_RNvMNtCsl67vnkIzi1e_16crossweft_device3gpu4look";
        let other = "_RNvMNtCsiozZTnKc7cY_16crossweft_device3gpu4look";
        let text =
            |name: &str| format!("\t// begin inline asm\n.func {name}(\n\t{name}_param_0\n)\n");
        assert_eq!(words(one), words(other));
        assert_eq!(
            finish(&text(one), 384, true),
            finish(&text(other), 384, true)
        );
        assert!(finish(&text(one), 384, true).contains("crossweft_f0_param_0"));
        assert!(finish(&text(one), 384, true).contains("crossweft_device gpu look"));
    }

    #[test]
    fn a_new_panic_is_found() {
        assert_eq!(panics(&"trap; exit;\n".repeat(DIVISIONS)), Ok(()));
        assert!(panics(&"trap; exit;\n".repeat(DIVISIONS + 1)).is_err());
    }

    #[test]
    fn entries_get_launch_bounds() {
        let text = ".visible .entry k(\n\t.param .b64 k_param_0\n)\n{\n\ttrap; exit;\n}\n";
        let done = finish(text, 384, true);
        assert!(
            done.contains(")\n.maxntid 384, 1, 1\n.minnctapersm 1\n{\nexit;\n}\n"),
            "{done}"
        );
        assert_eq!(lint(&done, &["k"]), Vec::<String>::new());
    }
}
