//! Which ranks share a host: the same running kernel and the same network namespace, because
//! abstract Unix sockets reach exactly that far.

use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

use crate::error::NetError;

/// Equal for ranks that can hand each other file descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct HostId {
    boot_id: [u8; 16],
    network_namespace: (u64, u64),
}

impl HostId {
    pub(crate) fn of_this_process() -> Result<Self, NetError> {
        const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
        const NAMESPACE: &str = "/proc/self/ns/net";
        let text = std::fs::read_to_string(BOOT_ID)
            .map_err(|error| NetError::io(format!("reading {BOOT_ID}"), error))?;
        let mut boot_id = [0; 16];
        let digits = text
            .bytes()
            .filter_map(|byte| char::from(byte).to_digit(16));
        for (index, digit) in digits.take(32).enumerate() {
            boot_id[index / 2] = boot_id[index / 2] << 4 | digit.to_le_bytes()[0];
        }
        let namespace = std::fs::metadata(NAMESPACE)
            .map_err(|error| NetError::io(format!("reading {NAMESPACE}"), error))?;
        Ok(Self {
            boot_id,
            network_namespace: (namespace.dev(), namespace.ino()),
        })
    }

    /// A host that no test runs on.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn invented(number: u8) -> Self {
        Self {
            boot_id: [number; 16],
            network_namespace: (0, 0),
        }
    }
}
