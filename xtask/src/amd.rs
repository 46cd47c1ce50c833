//! The GPU kernels for AMD's gfx942: compiled, linked into code objects, and looked at. Nothing loads them yet, so they are not
//! committed; what is kept true is that the sources have no second text for another maker's machine.
//!
//! The compiler writes LLVM's representation, which gets what Rust has no words for, the launch bounds; `llc` of the
//! same LLVM makes assembly of it, and `rust-lld`, which comes with every Rust, a code object.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crossweft_kernels::{MIN_SM, MODULES, Module};

use crate::cuda::{root, write};
use crate::kernels::{Compiler, Target, may_spill, side_by_side};

const TRIPLE: &str = "amdgcn-amd-amdhsa";
const PROCESSOR: &str = "gfx942";

/// Bytes of memory of a thread's own that a kernel takes, at most: why a wait ended, which functions pass by address.
const PRIVATE: u64 = 32;
/// The executor's has a loop over operations of all kinds, and keeps there what only some of those need.
const EXECUTOR_PRIVATE: u64 = 256;

/// Builds all modules and returns what is wrong with them; nothing if what builds them is not here.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let Some(compiler) = Compiler::find()? else {
        eprintln!("xtask: no compiler for {PROCESSOR}: not built");
        return Ok(Vec::new());
    };
    let tools = match Tools::find(&compiler) {
        Ok(tools) => tools,
        Err(missing) => {
            eprintln!("xtask: no {missing} for {PROCESSOR}: not built");
            return Ok(Vec::new());
        }
    };
    let folder = root().join("target/kernels");
    let target = Target {
        triple: TRIPLE,
        flags: format!("-Ctarget-cpu={PROCESSOR}"),
        emit: "llvm-ir",
    };
    let mut sources = Vec::new();
    // Those for newer machines of NVIDIA's are the same sources once more.
    for module in MODULES.iter().filter(|module| module.sm == MIN_SM) {
        let text = bounded(&compiler.emit(module, &target)?, module.threads);
        let source = folder.join(format!("{}.{PROCESSOR}.ll", module.name));
        write(&source, &text)?;
        sources.push((module, source));
    }
    let reports = side_by_side(&sources, |(module, source)| {
        let problems = tools.build(module, source).unwrap_or_else(|e| vec![e]);
        let named = problems
            .into_iter()
            .map(|problem| format!("{}, {PROCESSOR}: {problem}", module.name));
        named.collect()
    });
    if reports.is_empty() {
        eprintln!("xtask: {} code objects for {PROCESSOR}: ok", sources.len());
    }
    Ok(reports)
}

/// What makes code objects.
struct Tools {
    llc: PathBuf,
    mc: PathBuf,
    lld: PathBuf,
}

impl Tools {
    /// Those of the compiler's own LLVM, which alone is sure to read what it writes; or the name of what is missing.
    fn find(compiler: &Compiler) -> Result<Self, String> {
        let folder = match env::var_os("CROSSWEFT_LLVM_BIN") {
            Some(folder) => PathBuf::from(folder),
            None => PathBuf::from(format!("/usr/lib/llvm-{}/bin", compiler.llvm)),
        };
        let tool = |name: &str| {
            let path = folder.join(name);
            let missing = || format!("{name} of LLVM {}", compiler.llvm);
            if runs(&path) {
                Ok(path)
            } else {
                Err(missing())
            }
        };
        let (llc, mc) = (tool("llc")?, tool("llvm-mc")?);
        let lld = linkers(compiler)
            .into_iter()
            .find(|path| runs_as_linker(path));
        Ok(Self {
            llc,
            mc,
            lld: lld.ok_or("rust-lld")?,
        })
    }

    fn build(&self, module: &Module, source: &Path) -> Result<Vec<String>, String> {
        let (assembly, object, code) = (
            source.with_extension("s"),
            source.with_extension("o"),
            source.with_extension("hsaco"),
        );
        // As for PTX: loop strength reduction keeps addresses in registers until there are none left. What lies in shared
        // memory is for the kernels to say, see `crossweft_device::gpu::amdgpu::shared`.
        run(Command::new(&self.llc)
            .args([
                "-O3",
                "-disable-lsr",
                "-disable-promote-alloca-to-lds",
                "-filetype=asm",
            ])
            .arg(format!("-mcpu={PROCESSOR}"))
            .arg(source)
            .arg("-o")
            .arg(&assembly))?;
        let text = fs::read_to_string(&assembly)
            .map_err(|e| format!("xtask: {}: {e}", assembly.display()))?;
        // A trap would end the process's queue, not only the kernel.
        let text = text.replace("s_trap 2", "s_endpgm");
        write(&assembly, &text)?;
        run(Command::new(&self.mc)
            .args([
                &format!("-triple={TRIPLE}"),
                &format!("-mcpu={PROCESSOR}"),
                "-filetype=obj",
            ])
            .arg(&assembly)
            .arg("-o")
            .arg(&object))?;
        // Refers to nothing outside.
        run(Command::new(&self.lld)
            .args(["-flavor", "gnu", "-shared", "--no-undefined"])
            .arg(&object)
            .arg("-o")
            .arg(code))?;
        Ok(lint(&text, module.entries, module.threads))
    }
}

fn linkers(compiler: &Compiler) -> Vec<PathBuf> {
    let of = |rustc: &Path| {
        let ask = Command::new(rustc)
            .args(["--print", "target-libdir"])
            .output()
            .ok()?;
        let folder = PathBuf::from(String::from_utf8(ask.stdout).ok()?.trim());
        Some(folder.parent()?.join("bin/rust-lld"))
    };
    let rustc = env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from);
    let found = [of(&rustc), of(&compiler.rustc)].into_iter().flatten();
    found.chain([PathBuf::from("rust-lld")]).collect()
}

fn runs(program: &Path) -> bool {
    let asked = Command::new(program).arg("--version").output();
    asked.is_ok_and(|output| output.status.success())
}

fn runs_as_linker(program: &Path) -> bool {
    let asked = Command::new(program)
        .args(["-flavor", "gnu", "--version"])
        .output();
    asked.is_ok_and(|output| output.status.success())
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|e| format!("cannot run {}: {e}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(());
    }
    let (program, errors) = (command.get_program(), &output.stderr);
    Err(format!(
        "{}: {}",
        program.display(),
        String::from_utf8_lossy(errors)
    ))
}

/// Gives all functions the launch bounds that PTX gets by `.maxntid`: left to itself, the compiler shares out registers
/// among the 1024 threads of the largest block there is.
fn bounded(text: &str, threads: u32) -> String {
    let processor = format!("\"target-cpu\"=\"{PROCESSOR}\"");
    let bounds = format!("{processor} \"amdgpu-flat-work-group-size\"=\"1,{threads}\"");
    text.replace(&processor, &bounds)
}

/// What must hold of a module's assembly; every problem in a line.
fn lint(assembly: &str, entries: &[&str], threads: u32) -> Vec<String> {
    let mut problems = Vec::new();
    for (number, line) in assembly.lines().enumerate() {
        let code = line.split(';').next().unwrap_or_default().trim();
        if let Some(problem) = forbidden(code) {
            problems.push(format!("line {}: {problem}: {code}", number + 1));
        }
    }
    let kernels = kernels(assembly);
    for entry in entries {
        let Some(kernel) = kernels.get(*entry) else {
            problems.push(format!("entry {entry} is missing"));
            continue;
        };
        let number = |key: &str| kernel.get(key).and_then(|value| value.parse::<u64>().ok());
        let is = |what: &str| entry.starts_with(what);
        let (private, spills) = match () {
            () if is("crossweft_plan_") => (EXECUTOR_PRIVATE, u64::MAX),
            () if may_spill(entry) => (2 * PRIVATE, 32),
            () => (PRIVATE, 0),
        };
        for (key, allowed) in [
            (".private_segment_fixed_size", private),
            (".vgpr_spill_count", spills),
            // Shared memory is asked for at the launch, and all its addresses are counted from its beginning.
            (".group_segment_fixed_size", 0),
        ] {
            match number(key) {
                Some(found) if found <= allowed => {}
                found => problems.push(format!("{entry}: {key}: {found:?}, at most {allowed}")),
            }
        }
        if number(".max_flat_workgroup_size") != Some(threads.into()) {
            problems.push(format!("{entry} has no launch bounds"));
        }
    }
    for entry in kernels.keys() {
        if !entries.contains(&entry.as_str()) {
            problems.push(format!("entry {entry} is in no list"));
        }
    }
    problems
}

/// Why a line must not be there.
fn forbidden(code: &str) -> Option<&'static str> {
    let opcode = code.split_whitespace().next().unwrap_or_default();
    let is_atomic = opcode.starts_with("flat_atomic") || opcode.starts_with("global_atomic");
    if is_atomic && !code.split_whitespace().any(|word| word == "sc1") {
        Some("an atomic operation that is not at system scope")
    } else if matches!(opcode, "s_trap" | "s_sethalt") {
        Some("would end the process's queue")
    } else if let Some(mode) = code.strip_prefix(".amdhsa_float_denorm_mode") {
        let keeps = mode.split_whitespace().last() == Some("3");
        (!keeps).then_some("flushes subnormal numbers")
    } else {
        None
    }
}

/// What the assembly's metadata say of each kernel.
fn kernels(assembly: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let metadata = assembly.split("amdhsa.kernels:").nth(1).unwrap_or_default();
    let mut kernels = BTreeMap::new();
    let mut kernel = BTreeMap::new();
    for line in metadata.lines() {
        let is_first = line.starts_with("  - ");
        // Deeper ones are of arguments.
        let is_of_kernel = is_first || (line.starts_with("    .") && !line.starts_with("     "));
        let ends = !line.is_empty() && !line.starts_with(' ');
        if (is_first || ends) && !kernel.is_empty() {
            close(&mut kernels, std::mem::take(&mut kernel));
        }
        if let Some((key, value)) = line.trim_start_matches([' ', '-']).split_once(':')
            && is_of_kernel
        {
            kernel.insert(key.to_owned(), value.trim().to_owned());
        }
        if ends {
            break;
        }
    }
    close(&mut kernels, kernel);
    kernels
}

fn close(
    kernels: &mut BTreeMap<String, BTreeMap<String, String>>,
    kernel: BTreeMap<String, String>,
) {
    if let Some(name) = kernel.get(".name") {
        kernels.insert(name.clone(), kernel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
\tflat_atomic_add_x2 v[0:1], v[2:3] sc1
\tflat_load_dwordx2 v[0:1], v[2:3]
\ts_endpgm
\t\t.amdhsa_float_denorm_mode_32 3
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           40
    .group_segment_fixed_size: 0
    .max_flat_workgroup_size: 384
    .name:           k
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 7
    .vgpr_spill_count: 0
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
...
";

    #[test]
    fn what_may_be_there() {
        assert_eq!(lint(GOOD, &["k"], 384), Vec::<String>::new());
    }

    #[test]
    fn what_must_not_be_there() {
        for (from, to, problem) in [
            ("v[2:3] sc1", "v[2:3] sc0", "system scope"),
            ("s_endpgm", "s_trap 2", "queue"),
            ("mode_32 3", "mode_32 0", "subnormal"),
            (
                "private_segment_fixed_size: 0",
                "private_segment_fixed_size: 40",
                "private",
            ),
            ("vgpr_spill_count: 0", "vgpr_spill_count: 2", "spill"),
            (
                "group_segment_fixed_size: 0",
                "group_segment_fixed_size: 4",
                "group",
            ),
            (
                "workgroup_size: 384",
                "workgroup_size: 1024",
                "launch bounds",
            ),
        ] {
            let problems = lint(&GOOD.replace(from, to), &["k"], 384);
            assert_eq!(problems.len(), 1, "{to}: {problems:?}");
            assert!(problems[0].contains(problem), "{to}: {problems:?}");
        }
    }

    #[test]
    fn entries_are_those_of_the_list() {
        assert_eq!(lint(GOOD, &["k", "l"], 384), ["entry l is missing"]);
        assert_eq!(lint(GOOD, &[], 384), ["entry k is in no list"]);
        assert_eq!(lint("", &["k"], 384), ["entry k is missing"]);
    }

    #[test]
    fn the_executor_may_have_memory_of_its_own() {
        let text = GOOD.replace("           k", "           crossweft_plan_f32");
        let some = text.replace(
            "private_segment_fixed_size: 0",
            "private_segment_fixed_size: 140",
        );
        assert_eq!(
            lint(&some, &["crossweft_plan_f32"], 384),
            Vec::<String>::new()
        );
        let more = text.replace(
            "private_segment_fixed_size: 0",
            "private_segment_fixed_size: 372",
        );
        assert_eq!(lint(&more, &["crossweft_plan_f32"], 384).len(), 1);
    }

    #[test]
    fn all_functions_get_launch_bounds() {
        let text = "attributes #0 = { \"target-cpu\"=\"gfx942\" }";
        assert_eq!(
            bounded(text, 384),
            "attributes #0 = { \"target-cpu\"=\"gfx942\" \"amdgpu-flat-work-group-size\"=\"1,384\" }"
        );
    }
}
