//! What an interrupt does here.

/// Its number, as bits of a process's status have it.
const SIGINT: u32 = 2;

/// Whether these tests were started with SIGINT ignored, as shells do in the background: then so
/// were the commands, and an interrupt rightly does nothing.
pub(crate) fn are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    let is_ignored = mask >> (SIGINT - 1) & 1 == 1;
    if is_ignored {
        eprintln!("skipped: SIGINT is ignored here");
    }
    is_ignored
}
