//! `crossweft doctor`: what this machine offers, what would be used of it, and what to do about the
//! rest.
//!
//! [`inspect`] reads files below a root (so that tests bring a machine of their own) and asks the
//! kernel about this process; [`render`] puts it in words. Nothing here fails: a file that is
//! absent, unreadable or garbled is a thing not found.

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create, statvfs},
    io::pwrite,
    process::{Resource, getrlimit},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// What was found. Serialises for programs; [`render`] is for people.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: &'static str,
    cpu: Cpu,
    memory: Memory,
    gpu: Gpu,
    network: Network,
    /// Names of variables that launchers set. Never values: one of them is a secret.
    launcher_variables: BTreeSet<String>,
    used: Used,
    notes: Vec<Note>,
}

#[derive(Debug, Serialize)]
struct Cpu {
    model: Option<String>,
    /// Logical processors of the machine.
    processors: Option<usize>,
    /// How many of them this process may use, by affinity and cgroup quota.
    usable: usize,
    extensions: Vec<&'static str>,
    missing_extensions: Vec<&'static str>,
    /// Level and size in bytes, of one core's second and third level.
    caches: BTreeMap<u8, u64>,
    numa_nodes: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Memory {
    total: Option<u64>,
    available: Option<u64>,
    cgroup_limit: Option<u64>,
    /// `None`: unlimited.
    locked_limit: Option<u64>,
    /// Why memory cannot be shared; `None` if it can.
    memfd_error: Option<String>,
    dev_shm: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    devices: Vec<GpuDevice>,
    /// Version of the NVIDIA kernel driver.
    nvidia_driver: Option<String>,
    /// Entries of `/dev` whose names start with `nvidia`.
    nvidia_files: BTreeSet<String>,
    /// Whether the AMD compute driver is loaded.
    amd_driver: bool,
    /// Where the driver's library is.
    libcuda: Option<String>,
}

#[derive(Debug, Serialize)]
struct GpuDevice {
    maker: Maker,
    model: Option<String>,
    /// PCI address, or the name of the card where that is not known.
    address: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Maker {
    Nvidia,
    Amd,
    Intel,
    Other,
}

#[derive(Debug, Serialize)]
struct Network {
    loopback: bool,
    interfaces: Vec<Interface>,
    rdma_devices: BTreeSet<String>,
}

#[derive(Debug, Serialize)]
struct Interface {
    name: String,
    state: Option<String>,
    /// Megabits a second.
    speed: Option<u64>,
    mtu: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Used {
    device: &'static str,
    ranks: u32,
    transport: &'static str,
    bootstrap: &'static str,
    /// Instructions of the reduction loops, as the CPU device itself finds them.
    reductions: &'static str,
}

/// Something missing or worth knowing, and what to do about it.
#[derive(Debug, Serialize)]
struct Note {
    finding: String,
    action: String,
}

/// What is asked of the kernel about this process, apart from files.
#[derive(Debug)]
struct Process {
    usable: usize,
    locked_limit: Option<u64>,
    memfd_error: Option<String>,
    variables: BTreeSet<String>,
    library_path: Vec<PathBuf>,
}

/// Looks at the machine whose file system is at `root`: `/`, except in tests.
pub(crate) fn inspect(root: &Path) -> Report {
    inspect_as(root, Process::this())
}

/// Ranks that a command starts unless told otherwise: the least that communicates.
pub(crate) const DEFAULT_RANKS: u32 = 2;

/// The processor and how many of its cores are usable, for the record of a measurement.
pub(crate) fn machine_name() -> String {
    let cpu = &inspect(Path::new("/")).cpu;
    let model = cpu.model.as_deref().unwrap_or("unknown processor");
    format!("{model}, {} usable cores", cpu.usable)
}

fn inspect_as(root: &Path, process: Process) -> Report {
    let root = Root(root);
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        used: Used {
            device: "cpu",
            ranks: DEFAULT_RANKS,
            transport: "shared memory (memfd)",
            bootstrap: "loopback",
            reductions: crossweft_hal::cpu::isa().name(),
        },
        gpu: Gpu::inspect(&root, &process),
        network: Network::inspect(&root),
        cpu: Cpu::inspect(&root, process.usable),
        memory: Memory::inspect(&root, process.locked_limit, process.memfd_error),
        launcher_variables: process.variables,
        notes: Vec::new(),
    };
    report.notes = notes(&report);
    report
}

/// The directory that stands for `/`.
struct Root<'a>(&'a Path);

impl Root<'_> {
    /// An absolute path, below this root.
    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file, as far as it is text. At most 4 MiB: no machine has more to say.
    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = self.path(path);
        // A pipe or device in the place of a file would block the read.
        fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        let mut bytes = Vec::new();
        fs::File::open(path)
            .ok()?
            .take(4 << 20)
            .read_to_end(&mut bytes)
            .ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The one value that a file of sysfs holds.
    fn value(&self, path: impl AsRef<Path>) -> Option<String> {
        printable(&self.text(path)?)
    }

    /// The one number that a file of sysfs holds; -1, which stands for unknown, is none.
    fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.value(path)?.parse().ok()
    }

    /// Names in a directory, in order; empty if there is no such directory.
    fn names(&self, path: impl AsRef<Path>) -> BTreeSet<String> {
        let entries = fs::read_dir(self.path(path))
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| printable(&entry.file_name().to_string_lossy()))
            .collect()
    }

    fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).exists()
    }
}

/// The text without control characters, which a terminal would obey, and of a bearable length.
fn printable(text: &str) -> Option<String> {
    let spaced = text
        .trim()
        .replace(|c: char| c.is_control() || c == '\u{fffd}', " ");
    let text: String = spaced.trim().chars().take(120).collect();
    (!text.is_empty()).then_some(text)
}

/// The value of the first line `key: value`.
fn field(text: &str, key: &str) -> Option<String> {
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| printable(value))
    };
    text.lines().find_map(value)?
}

/// Whether a name is `stem` and a number.
fn numbered(name: &str, stem: &str) -> bool {
    name.strip_prefix(stem)
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

impl Process {
    fn this() -> Self {
        let name = |(name, _): (OsString, OsString)| printable(&name.to_string_lossy());
        Self {
            usable: std::thread::available_parallelism().map_or(1, usize::from),
            locked_limit: getrlimit(Resource::Memlock).current,
            memfd_error: try_memfd().err().map(|error| error.to_string()),
            variables: std::env::vars_os()
                .filter_map(name)
                .filter(|n| is_launcher(n))
                .collect(),
            library_path: std::env::var_os("LD_LIBRARY_PATH")
                .map(|path| {
                    std::env::split_paths(&path)
                        .filter(|dir| dir.is_absolute())
                        .collect()
                })
                .unwrap_or_default(),
        }
    }
}

/// Makes shared memory in the way that crossweft does, and lets it go.
fn try_memfd() -> rustix::io::Result<()> {
    let memory = memfd_create(
        "crossweft-doctor",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    ftruncate(&memory, 4096)?;
    pwrite(&memory, &[1], 4095)?;
    Ok(())
}

const LAUNCHER_PREFIXES: [&str; 4] = ["CROSSWEFT_", "OMPI_COMM_WORLD_", "PMIX_", "SLURM_"];
const LAUNCHER_NAMES: [&str; 8] = [
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMI_RANK",
    "PMI_SIZE",
    "RANK",
    "WORLD_SIZE",
];

fn is_launcher(name: &str) -> bool {
    LAUNCHER_NAMES.contains(&name) || LAUNCHER_PREFIXES.iter().any(|p| name.starts_with(p))
}

impl Cpu {
    fn inspect(root: &Root<'_>, usable: usize) -> Self {
        let info = root.text("/proc/cpuinfo").unwrap_or_default();
        let processors = info
            .lines()
            .filter(|line| line.starts_with("processor"))
            .count();
        let (flags, known): (_, &[_]) = match cpu_flags(&info, "flags") {
            Some(flags) => (flags, &["avx2", "avx512f", "f16c"]),
            None => (
                cpu_flags(&info, "Features").unwrap_or_default(),
                if info.contains("Features") {
                    &["asimd", "asimdhp", "sve"]
                } else {
                    &[]
                },
            ),
        };
        let (extensions, missing_extensions) =
            known.iter().partition(|name| flags.contains(**name));
        let nodes = root.names("/sys/devices/system/node");
        let nodes = nodes.iter().filter(|name| numbered(name, "node")).count();
        Self {
            model: field(&info, "model name"),
            processors: Some(processors).filter(|&count| count > 0),
            usable,
            extensions,
            missing_extensions,
            caches: caches(root),
            numa_nodes: Some(nodes).filter(|&count| count > 0),
        }
    }
}

fn cpu_flags(info: &str, key: &str) -> Option<BTreeSet<String>> {
    // Longer than `field` lets through.
    let line = info
        .lines()
        .find(|line| line.split(':').next().is_some_and(|k| k.trim() == key))?;
    Some(line.split_whitespace().map(str::to_owned).collect())
}

fn caches(root: &Root<'_>) -> BTreeMap<u8, u64> {
    let base = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let cache = |index: String| {
        let level = root.number(base.join(&index).join("level"))?;
        let size = root.value(base.join(&index).join("size"))?;
        let kib: u64 = size.strip_suffix('K')?.parse().ok()?;
        let level = u8::try_from(level)
            .ok()
            .filter(|level| (2..=3).contains(level))?;
        Some((level, kib.checked_mul(1024)?))
    };
    root.names(base).into_iter().filter_map(cache).collect()
}

impl Memory {
    fn inspect(root: &Root<'_>, locked_limit: Option<u64>, memfd_error: Option<String>) -> Self {
        let info = root.text("/proc/meminfo").unwrap_or_default();
        let bytes = |key| {
            let kib: u64 = field(&info, key)?.strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        let shm = statvfs(root.path("/dev/shm")).ok();
        Self {
            total: bytes("MemTotal"),
            available: bytes("MemAvailable"),
            cgroup_limit: root.number("/sys/fs/cgroup/memory.max"),
            locked_limit,
            memfd_error,
            dev_shm: shm.and_then(|shm| shm.f_blocks.checked_mul(shm.f_frsize)),
        }
    }
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
    fn inspect(root: &Root<'_>, process: &Process) -> Self {
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

    fn made_by(&self, maker: Maker) -> usize {
        self.devices
            .iter()
            .filter(|device| device.maker == maker)
            .count()
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

impl Network {
    fn inspect(root: &Root<'_>) -> Self {
        let net = Path::new("/sys/class/net");
        let mut names = root.names(net);
        // A file there configures bonding; only directories are interfaces.
        names.retain(|name| root.path(net.join(name)).is_dir());
        let up =
            |name: &str| root.value(net.join(name).join("operstate")).as_deref() != Some("down");
        let loopback = names.remove("lo") && up("lo");
        let interface = |name: String| Interface {
            state: root.value(net.join(&name).join("operstate")),
            // The kernel reports -1, or 2^32 - 1, for links of no speed.
            speed: root
                .number(net.join(&name).join("speed"))
                .filter(|&speed| speed > 0 && speed < u64::from(u32::MAX)),
            mtu: root.number(net.join(&name).join("mtu")),
            name,
        };
        Self {
            loopback,
            interfaces: names.into_iter().map(interface).collect(),
            rdma_devices: root.names("/sys/class/infiniband"),
        }
    }
}

/// What is missing or surprising, the worst first.
fn notes(report: &Report) -> Vec<Note> {
    let Report {
        cpu,
        memory,
        gpu,
        network,
        ..
    } = report;
    let mut notes = Vec::new();
    let mut note = |finding: String, action: &str| {
        notes.push(Note {
            finding,
            action: action.to_owned(),
        });
    };
    if let Some(error) = &memory.memfd_error {
        note(
            format!(
                "memfd does not work: {error}. Ranks cannot share memory, so nothing will run."
            ),
            "Allow memfd_create in the container's seccomp profile, and raise its memory limit.",
        );
    }
    if !network.loopback {
        note(
            "The loopback interface is not there or down: ranks cannot find each other.".into(),
            "Run `ip link set lo up`, or start the container with a network namespace that has it.",
        );
    }
    let available = memory
        .available
        .into_iter()
        .chain(memory.cgroup_limit)
        .min();
    if let Some(bytes) = available.filter(|&bytes| bytes < 512 << 20) {
        note(
            format!("Only {} of memory are available.", size(bytes)),
            "Use small messages and few ranks, or free memory.",
        );
    }
    if !gpu
        .devices
        .iter()
        .all(|device| matches!(device.maker, Maker::Other | Maker::Intel))
    {
        note(
            "A GPU was found. This version runs on the CPU device and does not use it.".into(),
            "Nothing: results are the same. GPU tensors must be copied to the host.",
        );
    }
    if gpu.made_by(Maker::Nvidia) > 0 {
        nvidia_notes(gpu, &mut note);
    }
    if gpu.made_by(Maker::Amd) > 0 && !gpu.amd_driver {
        note(
            "An AMD GPU was found, but not its compute driver (/dev/kfd).".into(),
            "Not needed by this version. For other software, load the amdgpu module.",
        );
    }
    if cpu.usable == 1 {
        note(
            "Only 1 core is usable: all ranks share it and take turns.".into(),
            "Results are right, times say little. Allow more cores (taskset, --cpus, cpuset).",
        );
    } else if cpu
        .processors
        .is_some_and(|processors| cpu.usable < processors)
    {
        note(
            "Not every core is usable: affinity or a cgroup limits this process.".into(),
            "Nothing if intended; otherwise look at taskset, --cpus and the job's CPU request.",
        );
    }
    if cpu.missing_extensions.contains(&"f16c") {
        note(
            "The CPU has no f16c: f16 is converted in software and slower.".into(),
            "Prefer bf16 or f32 on this machine. In a virtual machine, pass the host's CPU through.",
        );
    }
    if cpu.missing_extensions.contains(&"avx2") {
        note(
            "The CPU has no avx2: reductions use shorter vectors and are slower.".into(),
            "In a virtual machine, pass the host's CPU through.",
        );
    }
    if !network.rdma_devices.is_empty() {
        note(
            "An RDMA device was found. This version does not use it.".into(),
            "Nothing: ranks of one host share memory.",
        );
    }
    if let Some(bytes) = memory.locked_limit.filter(|&bytes| bytes < 64 << 20) {
        note(
            format!(
                "Locked memory is limited to {}. That matters for RDMA only.",
                size(bytes)
            ),
            "Nothing for this version. For RDMA: `ulimit -l unlimited`.",
        );
    }
    notes
}

fn nvidia_notes(gpu: &Gpu, note: &mut impl FnMut(String, &str)) {
    if gpu.nvidia_driver.is_none() {
        note(
            "An NVIDIA GPU was found, but not its kernel driver.".into(),
            "Not needed by this version. For other software, install the NVIDIA driver.",
        );
    } else if !gpu.nvidia_files.iter().any(|name| numbered(name, "nvidia")) {
        note(
            "The NVIDIA driver is loaded, but there is no /dev/nvidia0.".into(),
            "Not needed by this version. For other software, start the container with --gpus all.",
        );
    } else if gpu.libcuda.is_none() {
        note(
            "The NVIDIA driver is loaded, but libcuda.so.1 is in no usual directory.".into(),
            "Not needed by this version. For other software, install the driver's user libraries.",
        );
    }
}

/// The report in plain words, in lines of at most 100 characters.
pub(crate) fn render(report: &Report) -> String {
    let Report {
        cpu,
        memory,
        gpu,
        network,
        used,
        ..
    } = report;
    let mut page = Page(format!(
        "crossweft {}: what this machine offers\n",
        report.version
    ));

    page.section("CPU");
    page.row("model", found(cpu.model.as_deref()));
    let cores = cpu
        .processors
        .map_or("?".to_owned(), |count| count.to_string());
    page.row("cores", &format!("{} usable of {cores}", cpu.usable));
    page.row("vectors", &vectors(cpu));
    let caches = cpu
        .caches
        .iter()
        .map(|(level, &bytes)| format!("L{level} {}", size(bytes)));
    page.row("caches", &list(caches, "not found"));
    page.row("NUMA nodes", &found_number(cpu.numa_nodes));

    page.section("Memory");
    page.row("total", &found_size(memory.total));
    page.row("available", &found_size(memory.available));
    if let Some(limit) = memory.cgroup_limit {
        page.row("cgroup limit", &size(limit));
    }
    page.row(
        "locked limit",
        &memory.locked_limit.map_or("unlimited".to_owned(), size),
    );
    let memfd = memory
        .memfd_error
        .as_ref()
        .map(|error| format!("does not work: {error}"));
    page.row("memfd", memfd.as_deref().unwrap_or("works"));
    let shm = format!("{} (not needed by crossweft)", found_size(memory.dev_shm));
    page.row("/dev/shm", &shm);

    page.section("GPU");
    render_gpu(gpu, &mut page);

    page.section("Network");
    page.row(
        "loopback",
        if network.loopback {
            "up"
        } else {
            "not found or down"
        },
    );
    for interface in &network.interfaces {
        page.row(&interface.name, &describe(interface));
    }
    if network.interfaces.is_empty() {
        page.row("interfaces", "not found");
    }
    page.row(
        "RDMA",
        &list(network.rdma_devices.iter().cloned(), "not found"),
    );

    page.section("Launcher");
    page.row("variables", &variables(&report.launcher_variables));

    page.section("What would be used");
    page.row(
        "device",
        &format!("{} (the only device of this version)", used.device),
    );
    page.row("ranks", &format!("{} unless told otherwise", used.ranks));
    page.row("transport", used.transport);
    page.row("bootstrap", used.bootstrap);
    page.row("reductions", used.reductions);

    page.section("Missing, and notes");
    if report.notes.is_empty() {
        page.row("", "nothing");
    }
    for (index, note) in report.notes.iter().enumerate() {
        page.row(&format!("{}.", index + 1), &note.finding);
        page.row("   to do", &note.action);
    }
    page.0
}

fn render_gpu(gpu: &Gpu, page: &mut Page) {
    if gpu.devices.is_empty() {
        page.row("devices", "not found");
    }
    for device in &gpu.devices {
        let (maker, model) = (device.maker.name(), device.model.as_deref());
        page.row(
            &device.address,
            model.unwrap_or(&format!("{maker}, model not known")),
        );
    }
    page.row("NVIDIA driver", found(gpu.nvidia_driver.as_deref()));
    page.row(
        "/dev/nvidia*",
        &list(gpu.nvidia_files.iter().cloned(), "not found"),
    );
    page.row("libcuda.so.1", found(gpu.libcuda.as_deref()));
    page.row(
        "AMD driver",
        if gpu.amd_driver {
            "loaded"
        } else {
            "not found"
        },
    );
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

fn vectors(cpu: &Cpu) -> String {
    let present = list(cpu.extensions.iter().map(|&name| name.to_owned()), "none");
    match cpu.missing_extensions.as_slice() {
        [] if cpu.extensions.is_empty() => "not found".to_owned(),
        [] => present,
        missing => format!("{present} (without {})", missing.join(", ")),
    }
}

fn describe(interface: &Interface) -> String {
    let speed = match interface.speed {
        Some(speed) if speed >= 1000 => format!("{} Gbit/s", speed as f64 / 1000.0),
        Some(speed) => format!("{speed} Mbit/s"),
        None => "speed not known".to_owned(),
    };
    let state = interface.state.as_deref().unwrap_or("state not known");
    let mtu = interface
        .mtu
        .map_or("not known".to_owned(), |mtu| mtu.to_string());
    format!("{state}, {speed}, mtu {mtu}")
}

/// The names; of a launcher that sets many, only how many.
fn variables(names: &BTreeSet<String>) -> String {
    let prefix = |name: &str| LAUNCHER_PREFIXES.into_iter().find(|p| name.starts_with(p));
    let mut groups = BTreeMap::<_, Vec<_>>::new();
    for name in names {
        groups.entry(prefix(name)).or_default().push(name.clone());
    }
    let described = groups.into_iter().flat_map(|(prefix, names)| match prefix {
        Some(prefix) if names.len() > 4 => vec![format!("{prefix}* ({})", names.len())],
        _ => names,
    });
    list(described, "none: ranks are started by crossweft itself")
}

fn found(value: Option<&str>) -> &str {
    value.unwrap_or("not found")
}

fn found_number(value: Option<usize>) -> String {
    value.map_or("not found".to_owned(), |value| value.to_string())
}

fn found_size(bytes: Option<u64>) -> String {
    bytes.map_or("not found".to_owned(), size)
}

fn list(items: impl Iterator<Item = String>, empty: &str) -> String {
    let items = items.collect::<Vec<_>>().join(", ");
    if items.is_empty() {
        empty.to_owned()
    } else {
        items
    }
}

/// A number of bytes in the largest unit that it fills.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(value.fract() != 0.0);
    format!("{value:.digits$} {}", units[unit])
}

/// Text in two columns: labels, and what is found.
struct Page(String);

/// Characters in a line.
const WIDTH: usize = 100;
/// Where the second column starts; a PCI address fits before it.
const COLUMN: usize = 18;

impl Page {
    fn section(&mut self, title: &str) {
        self.0.push_str(&format!("\n{title}\n"));
    }

    /// A label and its text, which is wrapped within its column.
    fn row(&mut self, label: &str, text: &str) {
        let label: String = label.chars().take(COLUMN - 4).collect();
        let mut line = format!("{:<COLUMN$}", format!("  {label}"));
        let mut used = COLUMN;
        for word in text.split_whitespace() {
            let length = word.chars().count();
            if used > COLUMN && used + 1 + length > WIDTH {
                line.push_str(&format!("\n{:COLUMN$}", ""));
                used = COLUMN;
            }
            if used > COLUMN {
                line.push(' ');
                used += 1;
            }
            // A word that no line can hold is cut.
            line.extend(word.chars().take(WIDTH - COLUMN));
            used += length.min(WIDTH - COLUMN);
        }
        self.0.push_str(line.trim_end());
        self.0.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn process() -> Process {
        Process {
            usable: 4,
            locked_limit: None,
            memfd_error: None,
            variables: BTreeSet::new(),
            library_path: Vec::new(),
        }
    }

    const SERVER: [(&str, &str); 15] = [
        (
            "proc/cpuinfo",
            "processor\t: 0\nmodel name\t: Big CPU 9000\nflags\t\t: fpu avx2 f16c avx512f\n\n\
             processor\t: 1\n\nprocessor\t: 2\n\nprocessor\t: 3\n",
        ),
        (
            "proc/meminfo",
            "MemTotal:       16777216 kB\nMemAvailable:    8912896 kB\n",
        ),
        ("sys/devices/system/cpu/cpu0/cache/index0/level", "1\n"),
        ("sys/devices/system/cpu/cpu0/cache/index0/size", "32K\n"),
        ("sys/devices/system/cpu/cpu0/cache/index2/level", "2\n"),
        ("sys/devices/system/cpu/cpu0/cache/index2/size", "1024K\n"),
        ("sys/devices/system/cpu/cpu0/cache/index3/level", "3\n"),
        ("sys/devices/system/cpu/cpu0/cache/index3/size", "33792K\n"),
        ("sys/devices/system/node/node0/cpulist", "0-1\n"),
        ("sys/devices/system/node/node1/cpulist", "2-3\n"),
        ("sys/class/net/lo/operstate", "unknown\n"),
        ("sys/class/net/eth0/operstate", "up\n"),
        ("sys/class/net/eth0/speed", "25000\n"),
        ("sys/class/net/eth0/mtu", "1500\n"),
        ("sys/class/net/wlan0/speed", "-1\n"),
    ];

    const H200: [(&str, &str); 9] = [
        ("sys/bus/pci/devices/0000:18:00.0/class", "0x030200\n"),
        ("sys/bus/pci/devices/0000:18:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:19:00.0/class", "0x020000\n"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n\
             GCC version:  gcc version 12.3.0\n",
        ),
        (
            "proc/driver/nvidia/gpus/0000:18:00.0/information",
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 150\nGPU UUID: \t GPU-1234\n",
        ),
        ("dev/nvidia0", ""),
        ("dev/nvidiactl", ""),
        ("usr/lib/x86_64-linux-gnu/libcuda.so.1", ""),
        ("sys/class/infiniband/mlx5_0/node_type", "1: CA\n"),
    ];

    /// Asserts that the lines are there, with runs of spaces as one.
    fn assert_lines(text: &str, lines: &[&str]) {
        let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let all: Vec<_> = text.lines().map(squeezed).collect();
        for line in lines {
            assert!(
                all.iter().any(|have| have == line),
                "no line {line:?} in\n{text}"
            );
        }
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "too long: {line}");
            assert_eq!(line, line.trim_end());
        }
    }

    fn actions_match(report: &Report, findings: &[&str]) {
        let have: Vec<_> = report
            .notes
            .iter()
            .map(|note| note.finding.as_str())
            .collect();
        assert_eq!(have.len(), findings.len(), "{have:?}");
        for (have, part) in have.iter().zip(findings) {
            assert!(have.contains(part), "{part:?} is not in {have:?}");
        }
        assert!(report.notes.iter().all(|note| !note.action.is_empty()));
    }

    #[test]
    fn a_server_without_gpu() {
        let root = machine(&SERVER);
        let report = inspect_as(root.path(), process());
        assert_lines(
            &render(&report),
            &[
                "model Big CPU 9000",
                "cores 4 usable of 4",
                "vectors avx2, avx512f, f16c",
                "caches L2 1 MiB, L3 33 MiB",
                "NUMA nodes 2",
                "total 16 GiB",
                "available 8.5 GiB",
                "locked limit unlimited",
                "memfd works",
                "/dev/shm not found (not needed by crossweft)",
                "devices not found",
                "NVIDIA driver not found",
                "libcuda.so.1 not found",
                "loopback up",
                "eth0 up, 25 Gbit/s, mtu 1500",
                "wlan0 state not known, speed not known, mtu not known",
                "RDMA not found",
                "variables none: ranks are started by crossweft itself",
                "device cpu (the only device of this version)",
                "ranks 2 unless told otherwise",
                "transport shared memory (memfd)",
                "bootstrap loopback",
                "nothing",
            ],
        );
        actions_match(&report, &[]);
    }

    #[test]
    fn a_server_with_an_nvidia_gpu() {
        let root = machine(&[&SERVER[..], &H200[..]].concat());
        let report = inspect_as(root.path(), process());
        assert_lines(
            &render(&report),
            &[
                "0000:18:00.0 NVIDIA H200",
                "NVIDIA driver 570.86.15",
                "/dev/nvidia* nvidia0, nvidiactl",
                "libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1",
                "RDMA mlx5_0",
                "1. A GPU was found. This version runs on the CPU device and does not use it.",
                "device cpu (the only device of this version)",
            ],
        );
        actions_match(&report, &["GPU was found", "RDMA device"]);
        assert_eq!(report.gpu.devices.len(), 1, "one GPU, seen twice");
    }

    #[test]
    fn half_installed_gpus() {
        let pci = machine(&H200[..2]);
        let report = inspect_as(pci.path(), process());
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.finding.contains("not its kernel driver"))
        );
        assert_lines(&render(&report), &["0000:18:00.0 NVIDIA, model not known"]);

        let container = machine(&H200[3..5]);
        let report = inspect_as(container.path(), process());
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.action.contains("--gpus all"))
        );
        assert_lines(&render(&report), &["0000:18:00.0 NVIDIA H200"]);

        let no_library = machine(&H200[..6]);
        let report = inspect_as(no_library.path(), process());
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.finding.contains("libcuda.so.1"))
        );
        let elsewhere = machine(&[&H200[..6], &[("opt/cuda/libcuda.so.1", "")]].concat());
        let library_path = vec!["/opt/cuda".into()];
        let report = inspect_as(
            elsewhere.path(),
            Process {
                library_path,
                ..process()
            },
        );
        assert_eq!(report.gpu.libcuda, Some("/opt/cuda/libcuda.so.1".into()));
    }

    #[test]
    fn amd_gpus() {
        let root = machine(&[
            ("sys/bus/pci/devices/0000:05:00.0/class", "0x120000\n"),
            ("sys/bus/pci/devices/0000:05:00.0/vendor", "0x1002\n"),
            ("sys/class/drm/card0/device/vendor", "0x1002\n"),
            ("sys/class/drm/card0-DP-1/status", "connected\n"),
        ]);
        let report = inspect_as(root.path(), process());
        assert_eq!(report.gpu.devices.len(), 1);
        assert_lines(&render(&report), &["0000:05:00.0 AMD, model not known"]);
        assert!(
            report
                .notes
                .iter()
                .any(|note| note.finding.contains("/dev/kfd"))
        );

        let root = machine(&[
            ("sys/class/drm/card1/device/vendor", "0x1002\n"),
            ("sys/class/kfd/kfd/topology/generation_id", "1\n"),
        ]);
        let report = inspect_as(root.path(), process());
        assert_lines(
            &render(&report),
            &["card1 AMD, model not known", "AMD driver loaded"],
        );
    }

    #[test]
    fn an_empty_machine_is_all_not_found() {
        let root = machine(&[]);
        let report = inspect_as(
            &root.path().join("absent"),
            Process {
                usable: 1,
                ..process()
            },
        );
        assert_lines(
            &render(&report),
            &[
                "model not found",
                "cores 1 usable of ?",
                "vectors not found",
                "caches not found",
                "NUMA nodes not found",
                "total not found",
                "interfaces not found",
                "loopback not found or down",
                "ranks 2 unless told otherwise",
            ],
        );
        actions_match(&report, &["loopback", "Only 1 core"]);
    }

    #[test]
    fn garbled_files_do_no_harm() {
        let long = "x".repeat(3000);
        let root = machine(&[
            (
                "proc/cpuinfo",
                "processor\n: : :\nmodel name: \u{1b}[31mred\u{7}\nflags: \u{0}\n",
            ),
            (
                "proc/meminfo",
                "MemTotal: 99999999999999999999 kB\nMemAvailable: -5 kB\n",
            ),
            ("sys/devices/system/cpu/cpu0/cache/index2/level", "999999\n"),
            (
                "sys/devices/system/cpu/cpu0/cache/index2/size",
                "18446744073709551615K",
            ),
            ("sys/devices/system/cpu/cpu0/cache/index3/level", "3"),
            (
                "sys/devices/system/cpu/cpu0/cache/index3/size",
                "18446744073709551615K",
            ),
            ("sys/devices/system/node/nodeX/cpulist", ""),
            ("sys/fs/cgroup/memory.max", "max\n"),
            ("sys/class/net/bonding_masters", ""),
            ("sys/class/net/lo/operstate", "down\n"),
            (
                "sys/class/net/an_interface_of_a_very_long_name/operstate",
                &long,
            ),
            (
                "sys/class/net/an_interface_of_a_very_long_name/speed",
                "4294967295\n",
            ),
            ("sys/bus/pci/devices/junk/class", "0x03"),
            ("proc/driver/nvidia/version", ""),
            (
                "proc/driver/nvidia/gpus/0000:18:00.0/information",
                "no colon at all",
            ),
        ]);
        fs::create_dir_all(root.path().join("proc/driver/nvidia/gpus/odd/information")).unwrap();
        fs::write(root.path().join("sys/fs/cgroup/memory.max"), [0xff, 0xfe]).unwrap();
        let report = inspect_as(root.path(), process());
        let text = render(&report);
        assert_lines(
            &text,
            &[
                "model [31mred",
                "cores 4 usable of 1",
                "total not found",
                "available not found",
                "caches not found",
                "junk display of another maker, model not known",
                "NVIDIA driver of unknown version",
                "loopback not found or down",
            ],
        );
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
        assert_eq!(report.memory.cgroup_limit, None);
    }

    #[test]
    fn limits_are_explained() {
        let root = machine(&SERVER);
        fs::write(root.path().join("sys/class/net/lo/operstate"), "up").unwrap();
        fs::write(
            root.path().join("proc/cpuinfo"),
            "processor: 0\nflags: fpu sse2\n",
        )
        .unwrap();
        let limited = Process {
            usable: 1,
            locked_limit: Some(8 << 20),
            memfd_error: Some("Function not implemented (os error 38)".into()),
            ..process()
        };
        let report = inspect_as(root.path(), limited);
        actions_match(
            &report,
            &["memfd", "Only 1 core", "f16c", "avx2", "limited to 8 MiB"],
        );
        assert_lines(
            &render(&report),
            &[
                "memfd does not work: Function not implemented (os error 38)",
                "vectors none (without avx2, avx512f, f16c)",
                "locked limit 8 MiB",
            ],
        );
    }

    #[test]
    fn launchers_are_named_and_secrets_kept() {
        let slurm = (0..30).map(|i| format!("SLURM_{i}"));
        let names = [
            "RANK",
            "WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "CROSSWEFT_UNIQUE_ID",
        ];
        let variables = names.map(str::to_owned).into_iter().chain(slurm).collect();
        let root = machine(&SERVER);
        let report = inspect_as(
            root.path(),
            Process {
                variables,
                ..process()
            },
        );
        let line = "variables RANK, WORLD_SIZE, CROSSWEFT_UNIQUE_ID, OMPI_COMM_WORLD_RANK, \
                    SLURM_* (30)";
        assert_lines(&render(&report), &[line]);
        assert!(is_launcher("PMIX_RANK") && is_launcher("LOCAL_RANK"));
        assert!(!is_launcher("RANKED") && !is_launcher("HOME"));
    }

    #[test]
    fn this_machine() {
        let report = inspect(Path::new("/"));
        assert!(report.cpu.usable >= 1);
        assert_lines(&render(&report), &[]);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["used"]["device"], "cpu");
    }
}
