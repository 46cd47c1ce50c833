//! Machines made of files, and what the report says of them.

use std::collections::BTreeSet;
use std::fs;

use super::page::WIDTH;
use super::process::is_launcher;
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
        cuda: Cuda::nothing(),
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
            "device cpu (there is no CUDA device to use)",
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
            "device cpu (there is no CUDA device to use)",
        ],
    );
    actions_match(&report, &["RDMA device"]);
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
