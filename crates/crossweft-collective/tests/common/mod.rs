//! What tests of whole processes share: ranks that are this same test program, and what they hold.
#![allow(dead_code, reason = "not every test uses everything")]

use std::io::Write;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Says which rank a process is; no other process has it.
pub(crate) const RANK: &str = "CROSSWEFT_TEST_RANK";

/// The rank of this process, in a process that [`Ranks`] has started.
pub(crate) fn rank() -> Option<u32> {
    std::env::var(RANK).ok()?.parse().ok()
}

/// Processes that run the test `name` of this program, one for each rank.
pub(crate) struct Ranks(Vec<(Child, ChildStdin)>);

impl Ranks {
    pub(crate) fn start(name: &str, ranks: u32) -> Self {
        let start = |rank: u32| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args([name, "--exact", "--nocapture", "--test-threads=1"])
                .env(RANK, rank.to_string())
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            let stdin = child.stdin.take().unwrap();
            (child, stdin)
        };
        Self((0..ranks).map(start).collect())
    }

    /// Sends a line to every rank.
    pub(crate) fn tell(&mut self, line: &str) {
        for (_, stdin) in &mut self.0 {
            // One that has failed says so when it is waited for.
            let _ = writeln!(stdin, "{line}");
        }
    }

    /// Waits for one that is to die.
    pub(crate) fn lose(&mut self, rank: usize) {
        let (mut child, _stdin) = self.0.remove(rank);
        assert!(!child.wait().unwrap().success(), "rank {rank} passed");
    }

    /// Waits for all, each of which must have passed.
    pub(crate) fn wait(mut self) {
        for (rank, (mut child, stdin)) in self.0.drain(..).enumerate() {
            drop(stdin);
            assert!(child.wait().unwrap().success(), "rank {rank} failed");
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What one rank has done, for another thread's rank that is to come after it, however long it takes.
#[derive(Default)]
pub(crate) struct Done(AtomicBool);

impl Done {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn wait(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.0.load(Ordering::Acquire) {
            assert!(Instant::now() < end, "the other rank has not come so far");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What this process holds of what can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    pub(crate) mappings: usize,
    /// Mappings of memory that ranks share.
    pub(crate) shared_mappings: usize,
    /// Resident memory of its own, in KiB.
    pub(crate) private_kib: u64,
    /// Resident memory that is shared, in KiB.
    pub(crate) shared_kib: u64,
}

impl Footprint {
    pub(crate) fn now() -> Self {
        let count = |path: &str| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        Self {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            mappings: maps.lines().count(),
            shared_mappings: maps.lines().filter(|l| l.contains("/memfd:")).count(),
            private_kib: kib("RssAnon:"),
            shared_kib: kib("RssShmem:"),
        }
    }

    /// Once threads that were joined have vanished from /proc, which takes a moment.
    pub(crate) fn with_threads(threads: usize) -> Self {
        let start = std::time::Instant::now();
        while Self::now().threads > threads && start.elapsed().as_secs() < 5 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Self::now()
    }

    /// Nothing has leaked since `earlier`: the same number of everything, and as much memory, give or
    /// take what an allocator keeps.
    pub(crate) fn assert_flat(&self, earlier: &Self, slack_kib: u64) {
        let all = format!("{self:?}, earlier {earlier:?}");
        assert_eq!(self.descriptors, earlier.descriptors, "{all}");
        assert_eq!(self.threads, earlier.threads, "{all}");
        assert_eq!(self.shared_mappings, earlier.shared_mappings, "{all}");
        // Of threads' stacks, which are kept for the next thread, and of the allocator.
        assert!(self.mappings <= earlier.mappings + 8, "{all}");
        assert!(self.private_kib <= earlier.private_kib + slack_kib, "{all}");
    }
}
