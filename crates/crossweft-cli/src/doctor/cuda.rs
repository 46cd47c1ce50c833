//! CUDA devices, as their driver tells of them.

use std::collections::BTreeMap;

use crossweft_hal::cuda::{self, Detection, Driver};
use serde::Serialize;

use super::page::{Page, size};
use super::root::{printable, printable_within};

#[derive(Debug, Serialize)]
pub(super) struct Cuda {
    /// Why no CUDA device can be used; `None` if one can.
    problem: Option<String>,
    /// The version of CUDA that the driver supports.
    version: Option<String>,
    kernel_driver: Option<String>,
    devices: Vec<Device>,
    /// Whether the device of the row reads and writes the memory of that of the column, by the
    /// driver's word.
    peer_access: Vec<Vec<bool>>,
    /// What is used, and for what.
    used: BTreeMap<&'static str, String>,
    /// What is not, and why.
    not_used: BTreeMap<&'static str, String>,
    multicast: Multicast,
    /// Where tuning tables are kept.
    cache: Option<String>,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    uuid: String,
    pci: String,
    /// `sm_90` and the like.
    architecture: String,
    multiprocessors: u32,
    memory: u64,
    fd_handles: bool,
    fabric_handles: bool,
    multicast: bool,
}

#[derive(Debug, Serialize)]
struct Multicast {
    allowed: bool,
    why: String,
}

impl Cuda {
    /// Number of devices that ranks can compute on.
    pub(super) fn usable(&self) -> usize {
        self.devices.len()
    }

    /// Asks the driver of this machine, if there is one.
    pub(super) fn inspect() -> Self {
        Self::of(&cuda::detect())
    }

    /// A machine without a driver.
    #[cfg(test)]
    pub(super) fn nothing() -> Self {
        let multicast = cuda::Multicast::decide(|_| None);
        let absent = cuda::CudaError::NoDriver {
            library: Driver::LIBRARY.to_owned(),
            reason: "libcuda.so.1: no such file".to_owned(),
        };
        Self::of(&cuda::detect_with(
            Err(absent),
            multicast,
            cuda::Cache::none(),
        ))
    }

    fn of(detection: &Detection) -> Self {
        let driver = detection.driver.as_deref();
        // Sentences are longer than names.
        let text = |text: &str| printable_within(text, 500).unwrap_or_default();
        let features = |used| {
            let features = detection.features.iter();
            let features = features.filter(move |feature| feature.used == used);
            features.map(|feature| (feature.name, feature.why.clone()))
        };
        Self {
            problem: driver.as_ref().err().map(|error| text(&error.to_string())),
            version: driver.as_ref().ok().map(|d| d.version().to_string()),
            kernel_driver: driver.ok().map(Driver::build).and_then(printable),
            devices: detection
                .devices
                .iter()
                .map(|device| Device {
                    name: text(&device.name),
                    uuid: device.uuid.to_string(),
                    pci: text(&device.pci),
                    architecture: format!("sm_{}{}", device.compute.0, device.compute.1),
                    multiprocessors: device.multiprocessors,
                    memory: device.memory_bytes,
                    fd_handles: device.fd_handles,
                    fabric_handles: device.fabric_handles,
                    multicast: device.multicast,
                })
                .collect(),
            peer_access: detection
                .peers
                .iter()
                .map(|row| row.iter().map(|peer| peer.access).collect())
                .collect(),
            used: features(true).collect(),
            not_used: features(false).collect(),
            multicast: Multicast {
                allowed: detection.multicast.is_allowed(),
                why: text(&detection.multicast.to_string()),
            },
            cache: detection
                .cache
                .directory()
                .and_then(|path| printable(&path.to_string_lossy())),
        }
    }

    /// Its section of the report.
    pub(super) fn render(&self, page: &mut Page) {
        page.section("CUDA");
        if let Some(problem) = &self.problem {
            page.row("driver", problem);
            return;
        }
        let version = self.version.as_deref().unwrap_or("of unknown version");
        let driver = match &self.kernel_driver {
            Some(kernel) => format!("CUDA {version}, kernel driver {kernel}"),
            None => format!("CUDA {version}"),
        };
        page.row("driver", &driver);
        for (ordinal, device) in self.devices.iter().enumerate() {
            page.row(&format!("device {ordinal}"), &device.describe());
        }
        for (ordinal, row) in self.peer_access.iter().enumerate() {
            page.row(&format!("peers of {ordinal}"), &peers(ordinal, row));
        }
        for (name, why) in &self.used {
            page.row("used", &format!("{name}: {why}"));
        }
        for (name, why) in &self.not_used {
            page.row("not used", &format!("{name}: {why}"));
        }
        page.row("multicast", &self.multicast.why);
        page.row("cache", self.cache.as_deref().unwrap_or("none"));
    }
}

impl Device {
    fn describe(&self) -> String {
        let has = |has: bool, name: &'static str| has.then_some(name);
        let sharing = [
            has(self.fd_handles, "file descriptor"),
            has(self.fabric_handles, "fabric handle"),
        ];
        let sharing: Vec<_> = sharing.into_iter().flatten().collect();
        let shared = if sharing.is_empty() {
            "cannot share memory".to_owned()
        } else {
            format!("shares memory by {}", sharing.join(", "))
        };
        let (name, architecture, memory) = (&self.name, &self.architecture, size(self.memory));
        let (count, pci, uuid) = (self.multiprocessors, &self.pci, &self.uuid);
        format!(
            "{name}, {architecture}, {count} multiprocessors, {memory}, {shared}, at {pci}, {uuid}"
        )
    }
}

/// Which of all devices one reaches.
fn peers(own: usize, row: &[bool]) -> String {
    let cell = |(peer, access): (usize, &bool)| match access {
        _ if peer == own => format!("{peer} itself"),
        true => format!("{peer} yes"),
        false => format!("{peer} no"),
    };
    let cells: Vec<_> = row.iter().enumerate().map(cell).collect();
    cells.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_devices() -> Cuda {
        let device = |ordinal: u8| Device {
            name: "NVIDIA H200".to_owned(),
            uuid: format!("GPU-{ordinal}"),
            pci: format!("0000:1{ordinal}:00.0"),
            architecture: "sm_90".to_owned(),
            multiprocessors: 132,
            memory: 140 << 30,
            fd_handles: true,
            fabric_handles: false,
            multicast: true,
        };
        Cuda {
            problem: None,
            version: Some("13.0".to_owned()),
            kernel_driver: Some("580.95.05".to_owned()),
            devices: vec![device(0), device(1)],
            peer_access: vec![vec![true, true], vec![false, true]],
            used: BTreeMap::from([("cooperative launch", "one grid".to_owned())]),
            not_used: BTreeMap::from([("host-native atomics", "not needed".to_owned())]),
            multicast: Multicast {
                allowed: false,
                why: "off: it is opt-in".to_owned(),
            },
            cache: Some("/home/a/.cache/crossweft".to_owned()),
        }
    }

    fn lines(cuda: &Cuda) -> Vec<String> {
        let mut page = Page(String::new());
        cuda.render(&mut page);
        page.0.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_machine_with_two_devices() {
        assert_eq!(
            lines(&two_devices()),
            [
                "",
                "CUDA",
                "  driver          CUDA 13.0, kernel driver 580.95.05",
                "  device 0        NVIDIA H200, sm_90, 132 multiprocessors, 140 GiB, shares memory \
                 by file",
                "                  descriptor, at 0000:10:00.0, GPU-0",
                "  device 1        NVIDIA H200, sm_90, 132 multiprocessors, 140 GiB, shares memory \
                 by file",
                "                  descriptor, at 0000:11:00.0, GPU-1",
                "  peers of 0      0 itself, 1 yes",
                "  peers of 1      0 no, 1 itself",
                "  used            cooperative launch: one grid",
                "  not used        host-native atomics: not needed",
                "  multicast       off: it is opt-in",
                "  cache           /home/a/.cache/crossweft",
            ]
        );
    }

    #[test]
    fn a_machine_without_a_driver_is_one_plain_sentence() {
        let expected = [
            "",
            "CUDA",
            "  driver          no CUDA driver: libcuda.so.1: no such file; install the NVIDIA driver, \
             or start",
            "                  the container with --gpus all; the CPU device works without",
        ];
        assert_eq!(lines(&Cuda::nothing()), expected);
        let json = serde_json::to_value(Cuda::nothing()).unwrap();
        assert_eq!(json["version"], serde_json::Value::Null);
        assert_eq!(json["multicast"]["allowed"], false);
    }
}
