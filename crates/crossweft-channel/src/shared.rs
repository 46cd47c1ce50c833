//! The one module that touches shared memory: private lines, bounded copies, signals.

use std::sync::atomic::AtomicU64;

/// One word on a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Line([AtomicU64; LINE as usize / 8]);

/// Bytes of a cache line: what keeps two counters from disturbing each other.
pub(crate) const LINE: u64 = 64;

/// Zeroed cache lines, private to this rank, that device code reaches by address.
#[derive(Debug)]
pub(crate) struct Lines(Box<[Line]>);

impl Lines {
    pub(crate) fn new(count: usize) -> Self {
        Self((0..count).map(|_| Line::default()).collect())
    }

    /// Address of line `index`. Everything up to the last line can be reached from it.
    pub(crate) fn addr(&self, index: usize) -> u64 {
        self.0.as_ptr().expose_provenance() as u64 + index as u64 * LINE
    }
}
