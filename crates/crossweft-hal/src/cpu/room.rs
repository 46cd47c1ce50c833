//! How much memory is left.

use std::fs;
use std::path::Path;

/// Bytes of memory that new work on this host can have, if that can be told: what the kernel takes to be available, and what
/// the control group of a container allows.
#[must_use]
pub fn available_memory() -> Option<u64> {
    available_below(Path::new("/"))
}

fn available_below(root: &Path) -> Option<u64> {
    let number = |path: &str| {
        let text = fs::read_to_string(root.join(path)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let info = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    // Of control groups, version 2 and version 1; each says "max", or something beyond all memory, where there is no limit.
    let groups = [
        ("memory.max", "memory.current", "memory.stat"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
        ),
    ];
    let left = groups.iter().filter_map(|(limit, used, stat)| {
        let file = |name: &str| format!("sys/fs/cgroup/{name}");
        let (limit, used) = (number(&file(limit))?, number(&file(used))?);
        let stat = fs::read_to_string(root.join(file(stat))).unwrap_or_default();
        Some(limit.saturating_sub(used.saturating_sub(given_up(&stat))))
    });
    Some(left.fold(kib.saturating_mul(1024), u64::min))
}

/// Bytes that a control group has in use, as its `memory.stat` says, but gives up for what is needed.
fn given_up(stat: &str) -> u64 {
    let names = ["inactive_file", "active_file", "slab_reclaimable"];
    // Version 1 has them twice: of the group alone, and with those below it.
    let prefix = match stat.contains("total_inactive_file") {
        true => "total_",
        false => "",
    };
    let lines = stat.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| {
            name.strip_prefix(prefix)
                .is_some_and(|name| names.contains(&name))
        })
        .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_what_host_and_container_have_is_left() {
        let available = |files: &[(&str, &str)]| {
            let root = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let path = root.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            available_below(root.path())
        };
        let host = (
            "proc/meminfo",
            "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n",
        );
        assert_eq!(available(&[]), None);
        assert_eq!(available(&[host]), Some(1_024_000));
        let used = ("sys/fs/cgroup/memory.current", "600000\n");
        let limit = ("sys/fs/cgroup/memory.max", "700000\n");
        assert_eq!(available(&[host, limit, used]), Some(100_000));
        let stat = (
            "sys/fs/cgroup/memory.stat",
            "anon 1\ninactive_file 20000\nactive_file 25000\nslab_reclaimable 5000\n",
        );
        assert_eq!(available(&[host, limit, used, stat]), Some(150_000));
        let none = ("sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(available(&[host, none, used]), Some(1_024_000));
        let old = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n"),
        ];
        assert_eq!(available(&[host, old[0], old[1]]), Some(0));
        let stat = (
            "sys/fs/cgroup/memory/memory.stat",
            "inactive_file 1\ntotal_inactive_file 150000\ntotal_active_file 10000\n",
        );
        assert_eq!(available(&[host, old[0], old[1], stat]), Some(60_000));
        assert!(available_memory().unwrap() > 0);
    }
}
