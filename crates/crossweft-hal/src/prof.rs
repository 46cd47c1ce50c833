//! hack
#![allow(unsafe_code, missing_docs, clippy::all)]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
static SUM: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];
static COUNT: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];
static LAST: AtomicU64 = AtomicU64::new(0);
#[inline(never)]
pub fn mark(i: usize) {
    let t = unsafe { core::arch::x86_64::_rdtsc() };
    let last = LAST.load(Relaxed);
    if i > 0 { SUM[i].store(SUM[i].load(Relaxed) + (t - last), Relaxed); COUNT[i].store(COUNT[i].load(Relaxed) + 1, Relaxed); }
    LAST.store(unsafe { core::arch::x86_64::_rdtsc() }, Relaxed);
}
pub fn print() {
    let t0 = std::time::Instant::now(); let a = unsafe { core::arch::x86_64::_rdtsc() };
    while t0.elapsed().as_millis() < 20 {}
    let per_ns = (unsafe { core::arch::x86_64::_rdtsc() } - a) as f64 / t0.elapsed().as_nanos() as f64;
    let names = ["", "table+on", "usable", "request", "locate+open", "step+lock", "hash", "raw", "capture", "id", "select", "buffers+turn", "enqueue", "parameter", "cuLaunch", "after", "record", "end"];
    let mut s = String::new();
    for i in 1..18 { let c = COUNT[i].load(Relaxed); if c > 0 { s += &format!("{} {:.0}ns, ", names[i], SUM[i].load(Relaxed) as f64 / c as f64 / per_ns); } }
    eprintln!("prof {} calls, {per_ns:.2} GHz: {s}", COUNT[14].load(Relaxed));
}
