//! The processor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use super::page::{Page, found, found_number, list, size};
use super::root::{Root, field, numbered};

#[derive(Debug, Serialize)]
pub(super) struct Cpu {
    pub(super) model: Option<String>,
    /// Logical processors of the machine.
    pub(super) processors: Option<usize>,
    /// How many of them this process may use, by affinity and cgroup quota.
    pub(super) usable: usize,
    pub(super) extensions: Vec<&'static str>,
    pub(super) missing_extensions: Vec<&'static str>,
    /// Level and size in bytes, of one core's second and third level.
    pub(super) caches: BTreeMap<u8, u64>,
    pub(super) numa_nodes: Option<usize>,
}

impl Cpu {
    pub(super) fn inspect(root: &Root<'_>, usable: usize) -> Self {
        let info = root.text("/proc/cpuinfo").unwrap_or_default();
        let processors = info
            .lines()
            .filter(|line| line.starts_with("processor"))
            .count();
        let (flags, known): (_, &[_]) = match cpu_flags(&info, "flags") {
            Some(flags) => (flags, &["avx2", "avx512f", "f16c"]),
            None => (
                cpu_flags(&info, "Features").unwrap_or_default(),
                if info.contains("Features") {
                    &["asimd", "asimdhp", "sve"]
                } else {
                    &[]
                },
            ),
        };
        let (extensions, missing_extensions) =
            known.iter().partition(|name| flags.contains(**name));
        let nodes = root.names("/sys/devices/system/node");
        let nodes = nodes.iter().filter(|name| numbered(name, "node")).count();
        Self {
            model: field(&info, "model name"),
            processors: Some(processors).filter(|&count| count > 0),
            usable,
            extensions,
            missing_extensions,
            caches: caches(root),
            numa_nodes: Some(nodes).filter(|&count| count > 0),
        }
    }

    /// Its section of the report.
    pub(super) fn render(&self, page: &mut Page) {
        page.section("CPU");
        page.row("model", found(self.model.as_deref()));
        let cores = self
            .processors
            .map_or("?".to_owned(), |count| count.to_string());
        page.row("cores", &format!("{} usable of {cores}", self.usable));
        page.row("vectors", &vectors(self));
        let caches = self
            .caches
            .iter()
            .map(|(level, &bytes)| format!("L{level} {}", size(bytes)));
        page.row("caches", &list(caches, "not found"));
        page.row("NUMA nodes", &found_number(self.numa_nodes));
    }
}

fn cpu_flags(info: &str, key: &str) -> Option<BTreeSet<String>> {
    // Longer than `field` lets through.
    let line = info
        .lines()
        .find(|line| line.split(':').next().is_some_and(|k| k.trim() == key))?;
    Some(line.split_whitespace().map(str::to_owned).collect())
}

fn caches(root: &Root<'_>) -> BTreeMap<u8, u64> {
    let base = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let cache = |index: String| {
        let level = root.number(base.join(&index).join("level"))?;
        let size = root.value(base.join(&index).join("size"))?;
        let kib: u64 = size.strip_suffix('K')?.parse().ok()?;
        let level = u8::try_from(level)
            .ok()
            .filter(|level| (2..=3).contains(level))?;
        Some((level, kib.checked_mul(1024)?))
    };
    root.names(base).into_iter().filter_map(cache).collect()
}

fn vectors(cpu: &Cpu) -> String {
    let present = list(cpu.extensions.iter().map(|&name| name.to_owned()), "none");
    match cpu.missing_extensions.as_slice() {
        [] if cpu.extensions.is_empty() => "not found".to_owned(),
        [] => present,
        missing => format!("{present} (without {})", missing.join(", ")),
    }
}
