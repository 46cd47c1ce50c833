//! Which cores this process may use.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::HalError;

/// The numbers of the cores that the calling thread may run on, ascending; empty if the system does
/// not say.
#[must_use]
pub fn cores() -> Vec<u32> {
    let Ok(set) = sched_getaffinity(None) else {
        return Vec::new();
    };
    (0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .filter_map(|core| u32::try_from(core).ok())
        .collect()
}

/// Binds the calling thread, and threads that it starts later, to core `core`.
///
/// # Errors
/// [`HalError::Resource`] if the thread may not run there.
pub fn bind_to_core(core: u32) -> Result<(), HalError> {
    let refused = |source| HalError::Resource {
        what: format!("core {core}"),
        source,
    };
    let core = core as usize;
    if core >= CpuSet::MAX_CPU {
        return Err(refused(io::ErrorKind::InvalidInput.into()));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|errno| refused(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_thread_sees_its_core_alone_and_others_are_refused() {
        let all = cores();
        let last = *all.last().unwrap();
        std::thread::spawn(move || {
            bind_to_core(last).unwrap();
            assert_eq!(cores(), [last]);
        })
        .join()
        .unwrap();
        assert_eq!(cores(), all);
        assert!(bind_to_core(1023).is_err());
        assert!(bind_to_core(u32::MAX).is_err());
    }
}
