//! Graphics processors, as files tell of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::page::{Page, found, list};
use super::process::Process;
use super::root::{Root, field, numbered, printable};

#[derive(Debug, Serialize)]
pub(super) struct Gpu {
    pub(super) devices: Vec<GpuDevice>,
    /// Version of the NVIDIA kernel driver.
    pub(super) nvidia_driver: Option<String>,
    /// Entries of `/dev` whose names start with `nvidia`.
    pub(super) nvidia_files: BTreeSet<String>,
    /// Whether the AMD compute driver is loaded.
    pub(super) amd_driver: bool,
    /// Where the driver's library is.
    pub(super) libcuda: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct GpuDevice {
    pub(super) maker: Maker,
    pub(super) model: Option<String>,
    /// PCI address, or the name of the card where that is not known.
    pub(super) address: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Maker {
    Nvidia,
    Amd,
    Intel,
    Other,
}

/// Where distributions and container runtimes put the driver's library.
const LIBRARY_DIRECTORIES: [&str; 13] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib64",
    "/lib",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];

impl Gpu {
    pub(super) fn inspect(root: &Root<'_>, process: &Process) -> Self {
        let version = root.text("/proc/driver/nvidia/version");
        let files = root
            .names("/dev")
            .into_iter()
            .filter(|name| name.starts_with("nvidia"));
        let directories = process
            .library_path
            .iter()
            .map(PathBuf::as_path)
            .chain(LIBRARY_DIRECTORIES.iter().map(Path::new));
        let mut libraries = directories.map(|directory| directory.join("libcuda.so.1"));
        Self {
            devices: gpu_devices(root),
            nvidia_driver: version.map(|text| driver_version(&text)),
            nvidia_files: files.collect(),
            amd_driver: root.exists("/sys/class/kfd") || root.exists("/dev/kfd"),
            libcuda: libraries
                .find(|path| root.exists(path))
                .and_then(|path| printable(&path.to_string_lossy())),
        }
    }

    pub(super) fn made_by(&self, maker: Maker) -> usize {
        self.devices
            .iter()
            .filter(|device| device.maker == maker)
            .count()
    }

    /// Its section of the report.
    pub(super) fn render(&self, page: &mut Page) {
        page.section("GPU");
        if self.devices.is_empty() {
            page.row("devices", "not found");
        }
        for device in &self.devices {
            let (maker, model) = (device.maker.name(), device.model.as_deref());
            page.row(
                &device.address,
                model.unwrap_or(&format!("{maker}, model not known")),
            );
        }
        page.row("NVIDIA driver", found(self.nvidia_driver.as_deref()));
        page.row(
            "/dev/nvidia*",
            &list(self.nvidia_files.iter().cloned(), "not found"),
        );
        page.row("libcuda.so.1", found(self.libcuda.as_deref()));
        page.row(
            "AMD driver",
            if self.amd_driver {
                "loaded"
            } else {
                "not found"
            },
        );
    }
}

/// The word of the first line that is a version: `NVRM version: … x86_64  550.54.15  Release …`.
fn driver_version(text: &str) -> String {
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    let line = text.lines().next().unwrap_or_default();
    line.split_whitespace()
        .find(is_version)
        .unwrap_or("of unknown version")
        .to_owned()
}

fn gpu_devices(root: &Root<'_>) -> Vec<GpuDevice> {
    let mut devices = BTreeMap::new();
    let pci = Path::new("/sys/bus/pci/devices");
    for address in root.names(pci) {
        let class = root
            .value(pci.join(&address).join("class"))
            .unwrap_or_default();
        let maker = maker(root.value(pci.join(&address).join("vendor")).as_deref());
        // Displays, and the accelerators (0x12) that AMD's compute cards are.
        let accelerator = class.starts_with("0x12") && maker == Maker::Amd;
        if class.starts_with("0x03") || accelerator {
            devices.insert(
                address.clone(),
                GpuDevice {
                    maker,
                    model: None,
                    address,
                },
            );
        }
    }
    // The driver knows the model, and is all that a container may show.
    let nvidia = Path::new("/proc/driver/nvidia/gpus");
    for address in root.names(nvidia) {
        let information = root
            .text(nvidia.join(&address).join("information"))
            .unwrap_or_default();
        let model = field(&information, "Model");
        devices.insert(
            address.clone(),
            GpuDevice {
                maker: Maker::Nvidia,
                model,
                address,
            },
        );
    }
    if devices.values().all(|device| device.maker != Maker::Amd) {
        let drm = Path::new("/sys/class/drm");
        for card in root
            .names(drm)
            .into_iter()
            .filter(|name| numbered(name, "card"))
        {
            let maker = maker(root.value(drm.join(&card).join("device/vendor")).as_deref());
            if maker == Maker::Amd {
                let address = card.clone();
                devices.insert(
                    card,
                    GpuDevice {
                        maker,
                        model: None,
                        address,
                    },
                );
            }
        }
    }
    devices.into_values().collect()
}

fn maker(vendor: Option<&str>) -> Maker {
    match vendor {
        Some("0x10de") => Maker::Nvidia,
        Some("0x1002") => Maker::Amd,
        Some("0x8086") => Maker::Intel,
        _ => Maker::Other,
    }
}

impl Maker {
    fn name(self) -> &'static str {
        match self {
            Self::Nvidia => "NVIDIA",
            Self::Amd => "AMD",
            Self::Intel => "Intel",
            Self::Other => "display of another maker",
        }
    }
}
