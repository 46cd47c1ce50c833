//! What a tuning table holds for: the hardware that the ranks of a job run on.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crossweft_hal::{Device, HalError, cpu, cuda};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::devices::Devices;

/// The hardware of a job, in words that people can read: what ranks compute on, and how many ranks each such thing
/// has. The order of ranks is of no account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint {
    ranks_on: BTreeMap<String, u32>,
}

impl Fingerprint {
    /// From what each rank computes on.
    pub(crate) fn of_ranks(ranks: impl IntoIterator<Item = String>) -> Self {
        let mut ranks_on = BTreeMap::new();
        for rank in ranks {
            *ranks_on.entry(rank).or_default() += 1;
        }
        Self { ranks_on }
    }

    /// Of hardware of which nothing is known; there is no table of it.
    #[must_use]
    pub fn unknown() -> Self {
        Self::of_ranks([])
    }

    /// Of a job of `ranks` ranks on this host, as they would be started here.
    ///
    /// # Errors
    /// [`HalError::Cuda`] if the driver does not say what a device is.
    pub fn of_this_host(devices: &Devices, ranks: u32) -> Result<Self, HalError> {
        let on_cpu = || of_cpu(Path::new("/"), cpu::cores().len(), ranks);
        let on = |rank: u32| match devices {
            Devices::Cuda(all) if !all.is_empty() => of_gpu(&all[rank as usize % all.len()]),
            _ => Ok(on_cpu()),
        };
        let all: Vec<_> = (0..ranks).map(on).collect::<Result<_, _>>()?;
        Ok(Self::of_ranks(all))
    }

    /// What each of the ranks computes on, and how many do.
    pub fn ranks_on(&self) -> impl Iterator<Item = (&str, u32)> {
        self.ranks_on.iter().map(|(what, count)| (&**what, *count))
    }

    /// A short name for files.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for (what, count) in &self.ranks_on {
            hash.update((what.len() as u64).to_le_bytes());
            hash.update(what);
            hash.update(count.to_le_bytes());
        }
        let digest = hash.finalize();
        digest[..8]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// What one of `ranks` ranks of a host computes on, which may use `cores` cores together.
pub(crate) fn of_rank(device: &Device, cores: usize, ranks: u32) -> Result<String, HalError> {
    match device {
        Device::Cuda(context) => of_gpu(context.device()),
        _ => Ok(of_cpu(Path::new("/"), cores, ranks)),
    }
}

fn of_gpu(device: &cuda::Device) -> Result<String, HalError> {
    let (properties, driver) = (device.properties()?, device.driver());
    Ok(format!(
        "{}, {}, driver {} ({})",
        properties.name,
        properties.uuid,
        driver.version(),
        driver.build()
    ))
}

/// The processor below the file system's `root`, what its cores share, and whether ranks share cores: more cores
/// than ranks change nothing.
fn of_cpu(root: &Path, cores: usize, ranks: u32) -> String {
    let read = |path: &str| {
        let text = fs::read_to_string(root.join(path)).unwrap_or_default();
        text.trim().to_owned()
    };
    let known = |text: String| {
        if text.is_empty() {
            "?".to_owned()
        } else {
            text
        }
    };
    let info = read("proc/cpuinfo");
    let values = |key: &'static str| {
        info.lines().filter_map(move |line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim().to_owned())
        })
    };
    let model = ["model name", "CPU part"]
        .into_iter()
        .find_map(|key| values(key).next());
    let processors = values("processor").count();
    let first = "sys/devices/system/cpu/cpu0";
    let siblings = known(read(&format!("{first}/topology/thread_siblings_list")));
    let cache = |file: &str| known(read(&format!("{first}/cache/index3/{file}")));
    let nodes = known(read("sys/devices/system/node/online"));
    format!(
        "{}, {processors} processors, threads of the first core {siblings}, L3 of {} shared by {}, NUMA \
         nodes {nodes}; {} of its cores for {ranks} ranks, shared memory (memfd)",
        model.unwrap_or_else(|| "unknown processor".to_owned()),
        cache("size"),
        cache("shared_cpu_list"),
        cores.min(ranks as usize),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_processor_is_like_is_in_it_and_more_cores_than_ranks_are_not() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let info =
            "processor\t: 0\nmodel name\t: Some CPU\nprocessor\t: 1\nmodel name\t: Some CPU\n";
        write("proc/cpuinfo", info);
        write(
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
            "0-1\n",
        );
        write("sys/devices/system/cpu/cpu0/cache/index3/size", "32768K\n");
        write(
            "sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list",
            "0-1\n",
        );
        write("sys/devices/system/node/online", "0\n");
        let of = |cores, ranks| of_cpu(root.path(), cores, ranks);
        assert_eq!(
            of(2, 8),
            "Some CPU, 2 processors, threads of the first core 0-1, L3 of 32768K shared by 0-1, NUMA nodes \
             0; 2 of its cores for 8 ranks, shared memory (memfd)"
        );
        assert_eq!(of(2, 2), of(16, 2));
        assert_ne!(of(1, 2), of(2, 2));
        write("sys/devices/system/cpu/cpu0/cache/index3/size", "16384K\n");
        assert_ne!(Fingerprint::of_ranks([of(2, 2)]).digest(), {
            write("sys/devices/system/cpu/cpu0/cache/index3/size", "32768K\n");
            Fingerprint::of_ranks([of(2, 2)]).digest()
        });
        // A machine that says nothing still has one.
        let nothing = tempfile::tempdir().unwrap();
        assert!(of_cpu(nothing.path(), 1, 1).contains("unknown processor"));
    }

    #[test]
    fn the_order_of_ranks_is_of_no_account_but_their_number_is() {
        let of = |ranks: &[&str]| Fingerprint::of_ranks(ranks.iter().map(|r| (*r).to_owned()));
        assert_eq!(of(&["a", "b", "a"]), of(&["b", "a", "a"]));
        assert_eq!(of(&["a", "b"]).digest(), of(&["b", "a"]).digest());
        assert_ne!(of(&["a", "b"]).digest(), of(&["a", "b", "b"]).digest());
        assert_ne!(of(&["ab", "c"]).digest(), of(&["a", "bc"]).digest());
        assert_eq!(
            of(&["a", "b", "a"]).ranks_on().collect::<Vec<_>>(),
            [("a", 2), ("b", 1)]
        );
    }
}
