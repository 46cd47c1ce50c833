//! What is there, what of it is used, and why not the rest.

use std::sync::Arc;

use super::cache::Cache;
use super::device::{PeerProperties, Properties};
use super::driver::{Driver, Version};
use super::error::CudaError;
use super::multicast::Multicast;

/// What was found.
#[derive(Debug)]
pub struct Detection {
    /// The driver, or why there is none to use.
    pub driver: Result<Arc<Driver>, CudaError>,
    /// The devices, by their numbers from 0.
    pub devices: Vec<Properties>,
    /// What the driver says about access: a row for each device that reads and writes, a column for
    /// each whose memory it is.
    pub peers: Vec<Vec<PeerProperties>>,
    /// What is used and what is not.
    pub features: Vec<Feature>,
    /// Whether NVLink multicast may be used, and why.
    pub multicast: Multicast,
    /// Where tuning tables, and what was probed, are kept.
    pub cache: Cache,
}

/// Something that a device or driver may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// What it is.
    pub name: &'static str,
    /// Whether it is used.
    pub used: bool,
    /// For what it is used, or why it is not.
    pub why: String,
}

/// Looks at this machine. Initialises the driver, and makes no context: it takes no memory of a
/// device and disturbs nobody. Never fails; what is missing is said in the result.
#[must_use]
pub fn detect() -> Detection {
    detect_with(
        Driver::open(),
        Multicast::from_environment(),
        Cache::from_environment(),
    )
}

/// As [`detect`], with another driver, or reason why there is none, and another environment.
#[must_use]
pub fn detect_with(
    driver: Result<Arc<Driver>, CudaError>,
    multicast: Multicast,
    cache: Cache,
) -> Detection {
    let mut detection = Detection {
        driver,
        devices: Vec::new(),
        peers: Vec::new(),
        features: Vec::new(),
        multicast,
        cache,
    };
    if let Ok(driver) = &detection.driver {
        match look(driver) {
            Ok((devices, peers)) => {
                detection.features = features(driver, &devices, &peers, &detection.cache);
                (detection.devices, detection.peers) = (devices, peers);
            }
            Err(error) => detection.driver = Err(error),
        }
    }
    detection
}

type Found = (Vec<Properties>, Vec<Vec<PeerProperties>>);

fn look(driver: &Arc<Driver>) -> Result<Found, CudaError> {
    let devices = driver.devices()?;
    let properties = devices.iter().map(|device| device.properties());
    let peers = devices
        .iter()
        .map(|own| devices.iter().map(|peer| own.peer(peer)).collect());
    Ok((
        properties.collect::<Result<_, _>>()?,
        peers.collect::<Result<_, _>>()?,
    ))
}

fn features(
    driver: &Driver,
    devices: &[Properties],
    peers: &[Vec<PeerProperties>],
    cache: &Cache,
) -> Vec<Feature> {
    let all = |has: fn(&Properties) -> bool| devices.iter().all(has);
    let feature = |name, used: bool, yes: &str, no: &str| Feature {
        name,
        used,
        why: if used { yes } else { no }.to_owned(),
    };
    let reached = peers.iter().flatten().all(|peer| peer.access);
    let peer_access = match (devices.len(), reached) {
        (1, _) => (false, "there is one device"),
        (_, true) => (true, "between all devices, by the driver's word"),
        (_, false) => (
            false,
            "not between all devices; those pairs go through the host",
        ),
    };
    let loads = driver.version()
        >= Version {
            major: 12,
            minor: 4,
        };
    vec![
        feature(
            "memory by file descriptor",
            all(|d| d.virtual_memory && d.fd_handles),
            "shares memory between the processes of a host",
            "a device lacks virtual memory management: it cannot be used",
        ),
        feature(
            "memory by fabric handle",
            false,
            "",
            if all(|d| d.fabric_handles) {
                "the devices have it; ranks of one host do not need it"
            } else {
                "a device or driver lacks it"
            },
        ),
        feature(
            "memory for network cards",
            all(|d| d.rdma),
            "shared memory is allocated so that network cards can reach it",
            "a device or its host lacks GPUDirect RDMA for shared memory",
        ),
        feature("peer access", peer_access.0, peer_access.1, peer_access.1),
        feature(
            "cooperative launch",
            all(|d| d.cooperative_launch),
            "all ranks of a process in one grid",
            "a device lacks it",
        ),
        feature(
            "loading kernels ahead",
            loads,
            "by cuFuncLoad",
            "the driver is older than CUDA 12.4: by asking for an attribute, which does the same",
        ),
        feature(
            "host-native atomics",
            false,
            "",
            if all(|d| d.host_native_atomics) {
                "the link has them; no protocol needs them"
            } else {
                "the link lacks them; no protocol needs them"
            },
        ),
        Feature {
            name: "NVLink multicast",
            used: false,
            why: match driver.multicast() {
                Multicast::Allowed if all(|d| d.multicast) => {
                    format!("{}, but no plan needs it", Multicast::Allowed)
                }
                Multicast::Allowed => "allowed, but a device lacks it".to_owned(),
                off @ Multicast::Off { .. } => off.to_string(),
            },
        },
        feature(
            "cache",
            cache.directory().is_some(),
            "for tuning tables; compiled kernels are in the driver's own",
            "off: neither a home nor CROSSWEFT_CACHE_DIR is set, or that is empty",
        ),
    ]
}
