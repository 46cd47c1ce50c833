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
        ("memory.max", "memory.current", "inactive_file "),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "total_inactive_file ",
        ),
    ];
    let left = groups.iter().filter_map(|(limit, used, cache)| {
        let file = |name: &str| format!("sys/fs/cgroup/{name}");
        let (limit, used) = (number(&file(limit))?, number(&file(used))?);
        // What is only cached is given up for what is needed.
        let version = if cache.starts_with("total") {
            "memory/"
        } else {
            ""
        };
        let stat = fs::read_to_string(root.join(file(&format!("{version}memory.stat"))));
        let cached = stat.ok().and_then(|stat| {
            let line = stat.lines().find_map(|line| line.strip_prefix(cache));
            line?.trim().parse::<u64>().ok()
        });
        Some(limit.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
    });
    Some(left.fold(kib.saturating_mul(1024), u64::min))
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
        let stat = ("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 50000\n");
        assert_eq!(available(&[host, limit, used, stat]), Some(150_000));
        let none = ("sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(available(&[host, none, used]), Some(1_024_000));
        let old = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n"),
        ];
        assert_eq!(available(&[host, old[0], old[1]]), Some(0));
        assert!(available_memory().unwrap() > 0);
    }
}
