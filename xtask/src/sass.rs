//! The machine code that `ptxas` makes of the kernels, for the architecture that is measured on: what it must not have, and
//! a table of what it has.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use crossweft_kernels::{MIN_SM, MODULES, Module};

use crate::cuda::{self, root};
use crate::kernels;

/// The architecture that is looked at.
const ARCHITECTURE: &str = "sm_90a";
/// Where the table is kept.
const TABLE: &str = "docs/results/sass-sm_90a.md";

/// Entries, as they are named in the table, of which it is said that they have the copy engine move data.
const BULK: [&str; 2] = [
    "crossweft_bulk_copy (from sm_90 on)",
    "crossweft_put_bulk (from sm_90 on)",
];

/// What a kernel has: counts of instructions.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    all: usize,
    /// Loads and stores through generic or global addresses, and those of 16 bytes among them.
    loads: [usize; 2],
    stores: [usize; 2],
    /// Loads and stores of a thread's own memory.
    local: usize,
    calls: usize,
    /// Fences at system scope.
    fences: usize,
    /// Bulk copies (TMA).
    bulk: usize,
}

/// What is wrong with the cubins that were just assembled in `target/kernels`.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for (entry, counts) in all()? {
        problems.extend(
            faults(&entry, &counts)
                .into_iter()
                .map(|problem| format!("{entry}, {ARCHITECTURE}: {problem}")),
        );
    }
    Ok(problems)
}

/// Writes the table.
pub(crate) fn write() -> Result<(), String> {
    let mut text = format!(
        "# The kernels as machine code ({ARCHITECTURE})\n\n\
         Made by `cargo xtask kernels --sass`: instructions of each entry, as `ptxas` and `nvdisasm` of CUDA 13 have them. \
         Loads and stores are those through generic and global addresses; \"of 16 bytes\" are those that move data, the \
         others move flags, tables and the ends of a message. \"Local\" counts accesses of a thread's own memory, spills \
         included, \"bulk copies\" those by TMA. Calls are to the leaves, one copy each, and to what only a wait that lasts \
         needs.\n\n\
         | entry | instructions | loads | of 16 bytes | stores | of 16 bytes | local | calls | fences | bulk copies |\n\
         |---|---|---|---|---|---|---|---|---|---|\n"
    );
    for (entry, counts) in all()? {
        let Counts {
            all,
            loads,
            stores,
            local,
            calls,
            fences,
            bulk,
        } = counts;
        let _ = writeln!(
            text,
            "| {entry} | {all} | {} | {} | {} | {} | {local} | {calls} | {fences} | {bulk} |",
            loads[0], loads[1], stores[0], stores[1]
        );
    }
    cuda::write(&root().join(TABLE), &text)?;
    eprintln!("xtask: {TABLE}");
    Ok(())
}

/// Every entry of every module, in the modules' order.
fn all() -> Result<Vec<(String, Counts)>, String> {
    let nvdisasm = find()?;
    let mut found = Vec::new();
    for module in MODULES {
        let cubin = root()
            .join("target/kernels")
            .join(kernels::cubin(module, ARCHITECTURE));
        let output = Command::new(&nvdisasm)
            .arg("-c")
            .arg(&cubin)
            .output()
            .map_err(|e| format!("xtask: {}: {e}", nvdisasm.display()))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(format!("xtask: {}: {errors}", module.name));
        }
        found.extend(entries(module, &String::from_utf8_lossy(&output.stdout))?);
    }
    Ok(found)
}

fn find() -> Result<PathBuf, String> {
    let folder = cuda::toolkit(cuda::DISASSEMBLER, &["bin/nvdisasm"])?;
    Ok(folder.join("bin/nvdisasm"))
}

fn entries(module: &Module, text: &str) -> Result<Vec<(String, Counts)>, String> {
    let of = |entry: &&str| {
        let counts = counts(text, entry);
        let missing = || format!("xtask: {}: no code of {entry}", module.name);
        let name = match module.sm > MIN_SM {
            true => format!("{entry} (from sm_{} on)", module.sm),
            false => (*entry).to_owned(),
        };
        Ok((name, counts.ok_or_else(missing)?))
    };
    module.entries.iter().map(of).collect()
}

/// Of the section of an entry, or `None` if there is none.
fn counts(text: &str, entry: &str) -> Option<Counts> {
    let label = format!(".text.{entry}:");
    let mut lines = text.lines().skip_while(|line| line.trim() != label);
    lines.next()?;
    let mut counts = Counts::default();
    for line in lines.take_while(|line| !line.starts_with(".text.")) {
        if let Some(opcode) = opcode(line) {
            counts.add(opcode);
        }
    }
    (counts.all > 0).then_some(counts)
}

/// The opcode of a line such as `/*0040*/ @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;`.
fn opcode(line: &str) -> Option<&str> {
    let code = line.trim().strip_prefix("/*")?.split_once("*/")?.1;
    let mut words = code.split_whitespace();
    let first = words.next()?;
    let word = match first.starts_with('@') {
        true => words.next()?,
        false => first,
    };
    let word = word.trim_end_matches(';');
    word.starts_with(|c: char| c.is_ascii_uppercase())
        .then_some(word)
}

impl Counts {
    fn add(&mut self, opcode: &str) {
        let mut parts = opcode.split('.');
        let name = parts.next().unwrap_or_default();
        let is_wide = parts.clone().any(|part| part == "128");
        let is_system = parts.any(|part| part == "SYS");
        self.all += 1;
        let count = |of: &mut [usize; 2]| {
            of[0] += 1;
            of[1] += usize::from(is_wide);
        };
        match name {
            "LD" | "LDG" => count(&mut self.loads),
            "ST" | "STG" => count(&mut self.stores),
            "LDL" | "STL" => self.local += 1,
            "CALL" => self.calls += 1,
            "MEMBAR" if is_system => self.fences += 1,
            "UBLKCP" | "UBLKRED" => self.bulk += 1,
            _ => {}
        }
    }
}

/// Accesses of local memory that an entry may have: none, but for kernels that [may spill](kernels::may_spill).
fn spilled(entry: &str) -> usize {
    if kernels::may_spill(entry) { 16 } else { 0 }
}

/// What must hold of an entry.
fn faults(entry: &str, counts: &Counts) -> Vec<String> {
    let mut faults = Vec::new();
    if counts.local > spilled(entry) {
        faults.push(format!("{} accesses of local memory", counts.local));
    }
    let moves_data = [
        "_plan_",
        "_one_shot_",
        "_two_shot_",
        "_hop_",
        "_scale_",
        "_copy",
        "_add_",
    ]
    .iter()
    .any(|kind| entry.starts_with(&format!("crossweft{kind}")));
    if moves_data && (counts.loads[1] == 0 || counts.stores[1] == 0) {
        faults.push("moves data, but not 16 bytes at a time".to_owned());
    }
    if BULK.contains(&entry) && counts.bulk == 0 {
        faults.push("moves data in bulk, but not by the copy engine".to_owned());
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.text.crossweft_other:
        /*0000*/                   LDL R1, [R2] ;
.text.crossweft_copy:
.L_x_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.STRONG.SYS R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.U8 R4, desc[UR4][R2.64] ;
        /*0030*/                   ST.E.128 desc[UR4][R2.64], R4 ;
        /*0040*/                   MEMBAR.ALL.SYS ;
        /*0050*/                   CALL.REL.NOINC `(crossweft_f1) ;
        /*0060*/                   EXIT ;
.text.crossweft_f1:
        /*0000*/                   RET.REL.NODEC R2 `(crossweft_copy) ;
";

    #[test]
    fn instructions_are_counted_entry_by_entry() {
        let expected = Counts {
            all: 7,
            loads: [2, 1],
            stores: [1, 1],
            local: 0,
            calls: 1,
            fences: 1,
            bulk: 0,
        };
        assert_eq!(counts(TEXT, "crossweft_copy"), Some(expected));
        assert_eq!(counts(TEXT, "crossweft_other").map(|c| c.local), Some(1));
        assert_eq!(counts(TEXT, "crossweft_cop"), None);
    }

    #[test]
    fn local_memory_narrow_accesses_and_no_engine_are_faults() {
        let of = |text: &str| {
            let counts = counts(text, "crossweft_copy").unwrap();
            faults("crossweft_copy", &counts)
        };
        assert_eq!(of(TEXT), Vec::<String>::new());
        let narrow = of(&TEXT.replace("ST.E.128", "ST.E.64"));
        assert!(narrow[0].contains("16 bytes"), "{narrow:?}");
        let bulk = |text: &str| {
            let counts = counts(text, "crossweft_copy").unwrap();
            faults(BULK[1], &counts)
        };
        assert!(bulk(TEXT)[0].contains("copy engine"), "{:?}", bulk(TEXT));
        let engine = TEXT.replace("LDC R1", "UBLKCP.S.G [UR10], [UR6], UR4");
        assert_eq!(bulk(&engine), Vec::<String>::new());
        let local = of(&TEXT.replace("LDC R1", "LDL R1"));
        assert!(local[0].contains("local memory"), "{local:?}");
    }
}
