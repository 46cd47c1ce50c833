//! This process, as the kernel and its environment know it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use rustix::process::{Resource, getrlimit};

use super::cuda::Cuda;
use super::page::list;
use super::root::printable;

/// What is asked of the kernel about this process, apart from files, and of its drivers.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) usable: usize,
    pub(super) locked_limit: Option<u64>,
    pub(super) memfd_error: Option<String>,
    pub(super) variables: BTreeSet<String>,
    pub(super) library_path: Vec<PathBuf>,
    pub(super) cuda: Cuda,
}

impl Process {
    pub(super) fn this() -> Self {
        let name = |(name, _): (OsString, OsString)| printable(&name.to_string_lossy());
        Self {
            usable: usable_cores(),
            locked_limit: getrlimit(Resource::Memlock).current,
            memfd_error: try_memfd().err().map(|error| error.to_string()),
            variables: std::env::vars_os()
                .filter_map(name)
                .filter(|n| is_launcher(n))
                .collect(),
            library_path: std::env::var_os("LD_LIBRARY_PATH")
                .map(|path| {
                    std::env::split_paths(&path)
                        .filter(|dir| dir.is_absolute())
                        .collect()
                })
                .unwrap_or_default(),
            cuda: Cuda::inspect(),
        }
    }
}

/// Cores that this process may use, by affinity and cgroup quota.
pub(super) fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Makes shared memory in the way that crossweft does, and lets it go.
fn try_memfd() -> rustix::io::Result<()> {
    let memory = memfd_create(
        "crossweft-doctor",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    ftruncate(&memory, 4096)?;
    pwrite(&memory, &[1], 4095)?;
    Ok(())
}

const LAUNCHER_PREFIXES: [&str; 4] = ["CROSSWEFT_", "OMPI_COMM_WORLD_", "PMIX_", "SLURM_"];
const LAUNCHER_NAMES: [&str; 8] = [
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMI_RANK",
    "PMI_SIZE",
    "RANK",
    "WORLD_SIZE",
];

pub(super) fn is_launcher(name: &str) -> bool {
    LAUNCHER_NAMES.contains(&name) || LAUNCHER_PREFIXES.iter().any(|p| name.starts_with(p))
}

/// The names; of a launcher that sets many, only how many.
pub(super) fn variables(names: &BTreeSet<String>) -> String {
    let prefix = |name: &str| LAUNCHER_PREFIXES.into_iter().find(|p| name.starts_with(p));
    let mut groups = BTreeMap::<_, Vec<_>>::new();
    for name in names {
        groups.entry(prefix(name)).or_default().push(name.clone());
    }
    let described = groups.into_iter().flat_map(|(prefix, names)| match prefix {
        Some(prefix) if names.len() > 4 => vec![format!("{prefix}* ({})", names.len())],
        _ => names,
    });
    list(described, "none: ranks are started by crossweft itself")
}
