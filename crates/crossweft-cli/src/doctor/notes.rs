//! What is missing or surprising, and what to do about it.

use serde::Serialize;

use super::Report;
use super::gpu::{Gpu, Maker};
use super::page::size;
use super::root::numbered;

/// Something missing or worth knowing, and what to do about it.
#[derive(Debug, Serialize)]
pub(super) struct Note {
    pub(super) finding: String,
    pub(super) action: String,
}

/// What is missing or surprising, the worst first.
pub(super) fn notes(report: &Report) -> Vec<Note> {
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
