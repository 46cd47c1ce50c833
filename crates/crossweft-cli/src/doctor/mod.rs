//! `crossweft doctor`: what this machine offers, what would be used of it, and what to do about the
//! rest.
//!
//! [`inspect`] reads files below a root (so that tests bring a machine of their own), asks the
//! kernel about this process and the driver about its devices; [`render`] puts it in words. Nothing
//! here fails: a file that is absent, unreadable or garbled is a thing not found. Each part of the
//! report is a module of its own: what it holds, how it is found and how it is told.

mod cpu;
mod cuda;
mod gpu;
mod memory;
mod network;
mod notes;
mod page;
mod process;
mod root;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;

use cpu::Cpu;
use cuda::Cuda;
use gpu::Gpu;
use memory::Memory;
use network::Network;
use notes::{Note, notes};
pub(crate) use page::size;

use page::Page;
use process::{Process, variables};
use root::Root;

/// What was found. Serialises for programs; [`render`] is for people.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: &'static str,
    cpu: Cpu,
    memory: Memory,
    gpu: Gpu,
    cuda: Cuda,
    network: Network,
    /// Names of variables that launchers set. Never values: one of them is a secret.
    launcher_variables: BTreeSet<String>,
    used: Used,
    notes: Vec<Note>,
}

#[derive(Debug, Serialize)]
struct Used {
    device: &'static str,
    ranks: u32,
    transport: &'static str,
    bootstrap: &'static str,
    /// Instructions of the reduction loops, as the CPU device itself finds them.
    reductions: &'static str,
}

/// Looks at the machine whose file system is at `root`: `/`, except in tests.
pub(crate) fn inspect(root: &Path) -> Report {
    inspect_as(root, Process::this())
}

/// Ranks that a command starts unless told otherwise: the least that communicates.
pub(crate) const DEFAULT_RANKS: u32 = 2;

/// The processor and how many of its cores are usable, for the record of a measurement.
pub(crate) fn machine_name() -> String {
    let cpu = Cpu::inspect(&Root(Path::new("/")), process::usable_cores());
    let model = cpu.model.as_deref().unwrap_or("unknown processor");
    format!("{model}, {} usable cores", cpu.usable)
}

fn inspect_as(root: &Path, process: Process) -> Report {
    let root = Root(root);
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        used: Used {
            device: match process.cuda.usable() {
                n if n >= DEFAULT_RANKS as usize => "cuda",
                _ => "cpu",
            },
            ranks: DEFAULT_RANKS,
            transport: "shared memory (memfd)",
            bootstrap: "loopback",
            reductions: crossweft_hal::cpu::isa().name(),
        },
        gpu: Gpu::inspect(&root, &process),
        network: Network::inspect(&root),
        cpu: Cpu::inspect(&root, process.usable),
        memory: Memory::inspect(&root, process.locked_limit, process.memfd_error),
        cuda: process.cuda,
        launcher_variables: process.variables,
        notes: Vec::new(),
    };
    report.notes = notes(&report);
    report
}

/// The report in plain words, in lines of at most 100 characters.
pub(crate) fn render(report: &Report) -> String {
    let mut page = Page(format!(
        "crossweft {}: what this machine offers\n",
        report.version
    ));
    report.cpu.render(&mut page);
    report.memory.render(&mut page);
    report.gpu.render(&mut page);
    report.cuda.render(&mut page);
    report.network.render(&mut page);

    page.section("Launcher");
    page.row("variables", &variables(&report.launcher_variables));

    let used = &report.used;
    page.section("What would be used");
    page.row(
        "device",
        &format!(
            "{} ({})",
            used.device,
            match report.cuda.usable() {
                0 => "there is no CUDA device to use".to_owned(),
                1 => "one GPU for two ranks: they share it with --device cuda".to_owned(),
                n => format!("{n} GPUs, one for each rank"),
            }
        ),
    );
    page.row("ranks", &format!("{} unless told otherwise", used.ranks));
    page.row("transport", used.transport);
    page.row("bootstrap", used.bootstrap);
    page.row("reductions", used.reductions);

    page.section("Missing, and notes");
    if report.notes.is_empty() {
        page.row("", "nothing");
    }
    for (index, note) in report.notes.iter().enumerate() {
        page.row(&format!("{}.", index + 1), &note.finding);
        page.row("   to do", &note.action);
    }
    page.0
}
