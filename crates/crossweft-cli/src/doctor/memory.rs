//! Memory, and whether it can be shared.

use serde::Serialize;

use rustix::fs::statvfs;

use super::page::{Page, found_size, size};
use super::root::{Root, field};

#[derive(Debug, Serialize)]
pub(super) struct Memory {
    pub(super) total: Option<u64>,
    pub(super) available: Option<u64>,
    pub(super) cgroup_limit: Option<u64>,
    /// `None`: unlimited.
    pub(super) locked_limit: Option<u64>,
    /// Why memory cannot be shared; `None` if it can.
    pub(super) memfd_error: Option<String>,
    pub(super) dev_shm: Option<u64>,
}

impl Memory {
    pub(super) fn inspect(
        root: &Root<'_>,
        locked_limit: Option<u64>,
        memfd_error: Option<String>,
    ) -> Self {
        let info = root.text("/proc/meminfo").unwrap_or_default();
        let bytes = |key| {
            let kib: u64 = field(&info, key)?.strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        let shm = statvfs(root.path("/dev/shm")).ok();
        Self {
            total: bytes("MemTotal"),
            available: bytes("MemAvailable"),
            cgroup_limit: root.number("/sys/fs/cgroup/memory.max"),
            locked_limit,
            memfd_error,
            dev_shm: shm.and_then(|shm| shm.f_blocks.checked_mul(shm.f_frsize)),
        }
    }

    /// Its section of the report.
    pub(super) fn render(&self, page: &mut Page) {
        page.section("Memory");
        page.row("total", &found_size(self.total));
        page.row("available", &found_size(self.available));
        if let Some(limit) = self.cgroup_limit {
            page.row("cgroup limit", &size(limit));
        }
        page.row(
            "locked limit",
            &self.locked_limit.map_or("unlimited".to_owned(), size),
        );
        let memfd = self
            .memfd_error
            .as_ref()
            .map(|error| format!("does not work: {error}"));
        page.row("memfd", memfd.as_deref().unwrap_or("works"));
        let shm = format!("{} (not needed by crossweft)", found_size(self.dev_shm));
        page.row("/dev/shm", &shm);
    }
}
