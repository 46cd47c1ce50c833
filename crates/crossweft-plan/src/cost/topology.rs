//! What a machine's links, memory and operations cost.

use serde::{Deserialize, Serialize};

/// A machine: which ranks share a node, and what everything costs there.
///
/// As a file it is one JSON object with these fields; unknown ones are refused. Times are microseconds,
/// bandwidths GB/s (10^9 bytes a second). Where each constant of the built-in ones comes from is said in
/// `docs/plan-pages.md`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Name for people.
    pub name: String,
    /// Which ranks share a node.
    pub nodes: Nodes,
    /// Between ranks of one node.
    pub node: Link,
    /// Between nodes.
    pub network: Link,
    /// How fast data moves where it is.
    pub memory: Memory,
    /// What operations cost beside moving data.
    pub costs: Costs,
}

/// Which ranks share a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Nodes {
    /// Each node has this many ranks, in order.
    Every(u32),
    /// The node of each rank.
    List(Vec<u32>),
}

/// A kind of link. Each rank has one of a kind, shared by all that cross it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// From a store at one rank until it can be seen at another.
    pub latency_us: f64,
    /// What a rank can send, and as much again that it can receive at the same time.
    pub gbps: f64,
}

/// How fast data moves where it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// What one thread block reads, and writes at the same time.
    pub block_gbps: f64,
    /// The same for the payload of packets.
    pub block_packet_gbps: f64,
    /// Bytes that cross a link, or are written to memory, for each byte that packets carry: 2, unless a machine has
    /// packets of another form.
    #[serde(default = "two", skip_serializing_if = "is_two")]
    pub packet_bytes: f64,
    /// What all thread blocks of a rank read and write together in its own memory.
    pub rank_gbps: f64,
    /// Where a cache makes a difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
}

fn two() -> f64 {
    2.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "what serde asks with")]
fn is_two(factor: &f64) -> bool {
    (factor - 2.0).abs() < f64::EPSILON
}

/// A cache that all ranks of a node share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Bytes of inputs, outputs and slots of a node that fit.
    pub bytes: u64,
    /// [`Memory::block_gbps`] where they do not.
    pub block_gbps: f64,
}

/// What operations cost beside moving data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// A call beside its operations; all of it is counted before the first of them.
    pub launch_us: f64,
    /// Of every operation: the executor's own work.
    pub op_us: f64,
    /// Making a block's writes visible and storing the signal.
    pub signal_us: f64,
    /// Seeing a signal that has arrived.
    pub wait_us: f64,
    /// Seeing a packet that has arrived.
    pub packet_us: f64,
    /// From a release until another thread block of the rank sees it.
    pub semaphore_us: f64,
    /// From the last thread block's arrival at a barrier until all go on.
    pub barrier_us: f64,
    /// A proxy's work for one request, during which it does no other.
    pub proxy_us: f64,
}

/// Why a topology is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// It is not such a JSON object.
    #[error("not a topology: {reason}")]
    Format {
        /// What is wrong with it.
        reason: String,
    },
    /// A value makes no sense.
    #[error("topology `{topology}`: {field} is {value}; {wanted}")]
    Value {
        /// The topology's name.
        topology: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
        /// What fits.
        wanted: &'static str,
    },
    /// A rank has no node.
    #[error("topology `{topology}` names the nodes of {named} ranks; the plan has {ranks}")]
    Ranks {
        /// The topology's name.
        topology: String,
        /// Ranks it names.
        named: usize,
        /// Ranks of the plan.
        ranks: u32,
    },
}

impl Topology {
    /// Names of the built-in topologies.
    pub const BUILT_IN: [&'static str; 3] = ["h200", "h200-executor", "cpu"];

    /// The built-in topology of that name.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        match name {
            "h200" => Some(Self::h200()),
            "h200-executor" => Some(Self::h200_executor()),
            "cpu" => Some(Self::cpu()),
            _ => None,
        }
    }

    /// Nodes of eight H200 with NVLink, network between them, calls in a CUDA graph; of plans that have kernels of
    /// their own, as those of the built-in algorithms that are usually chosen.
    #[must_use]
    pub fn h200() -> Self {
        Self {
            name: "h200".to_owned(),
            nodes: Nodes::Every(8),
            node: Link {
                latency_us: 0.41,
                gbps: 340.0,
            },
            network: Link {
                latency_us: 3.76,
                gbps: 45.0,
            },
            memory: Memory {
                block_gbps: 40.0,
                block_packet_gbps: 10.0,
                packet_bytes: 2.0,
                rank_gbps: 3470.0,
                cache: None,
            },
            costs: Costs {
                launch_us: 1.55,
                op_us: 0.15,
                signal_us: 0.9,
                wait_us: 0.4,
                packet_us: 0.41,
                semaphore_us: 0.83,
                barrier_us: 1.1,
                proxy_us: 6.0,
            },
        }
    }

    /// The same machines, of plans that the executor runs, operation by operation.
    #[must_use]
    pub fn h200_executor() -> Self {
        let own = Self::h200();
        Self {
            name: "h200-executor".to_owned(),
            costs: Costs {
                launch_us: 4.0,
                op_us: 0.6,
                ..own.costs
            },
            ..own
        }
    }

    /// The same machines, where lines stand for packets: 120 bytes of data in 128.
    #[must_use]
    pub fn with_lines(mut self) -> Self {
        self.memory.packet_bytes = 128.0 / 120.0;
        self
    }

    /// Processes of one host, over shared memory; a slow network between hosts.
    #[must_use]
    pub fn cpu() -> Self {
        Self {
            name: "cpu".to_owned(),
            nodes: Nodes::Every(64),
            node: Link {
                latency_us: 0.045,
                gbps: 45.0,
            },
            network: Link {
                latency_us: 25.0,
                gbps: 1.2,
            },
            memory: Memory {
                block_gbps: 40.0,
                block_packet_gbps: 4.8,
                packet_bytes: 2.0,
                rank_gbps: 114.0,
                cache: Some(Cache {
                    bytes: 24 << 20,
                    block_gbps: 11.3,
                }),
            },
            costs: Costs {
                launch_us: 0.06,
                op_us: 0.01,
                signal_us: 0.005,
                wait_us: 0.005,
                packet_us: 0.005,
                semaphore_us: 0.05,
                barrier_us: 0.1,
                proxy_us: 0.3,
            },
        }
    }

    /// Reads a file and checks it.
    ///
    /// # Errors
    /// [`TopologyError`]: not a topology, or a value that makes no sense.
    pub fn from_json(text: &[u8]) -> Result<Self, TopologyError> {
        let topology: Self = serde_json::from_slice(text).map_err(|e| TopologyError::Format {
            reason: e.to_string(),
        })?;
        topology.validate()?;
        Ok(topology)
    }

    /// The topology as a file.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Only maps with keys that are not strings cannot be written, and there are none.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Checks the values.
    ///
    /// # Errors
    /// [`TopologyError::Value`] with the first that makes no sense.
    pub fn validate(&self) -> Result<(), TopologyError> {
        const LARGEST: f64 = 1e6;
        let value = |field, value, wanted| TopologyError::Value {
            topology: self.name.clone(),
            field,
            value,
            wanted,
        };
        let costs = &self.costs;
        let times = [
            ("node.latency_us", self.node.latency_us),
            ("network.latency_us", self.network.latency_us),
            ("costs.launch_us", costs.launch_us),
            ("costs.op_us", costs.op_us),
            ("costs.signal_us", costs.signal_us),
            ("costs.wait_us", costs.wait_us),
            ("costs.packet_us", costs.packet_us),
            ("costs.semaphore_us", costs.semaphore_us),
            ("costs.barrier_us", costs.barrier_us),
            ("costs.proxy_us", costs.proxy_us),
        ];
        for (field, time) in times {
            if !(0.0..=LARGEST).contains(&time) {
                return Err(value(field, time, "0 to 1000000 microseconds fit"));
            }
        }
        let cache = self.memory.cache.map(|cache| cache.block_gbps);
        let rates = [
            ("node.gbps", self.node.gbps),
            ("network.gbps", self.network.gbps),
            ("memory.block_gbps", self.memory.block_gbps),
            ("memory.block_packet_gbps", self.memory.block_packet_gbps),
            ("memory.rank_gbps", self.memory.rank_gbps),
            ("memory.cache.block_gbps", cache.unwrap_or(1.0)),
        ];
        for (field, rate) in rates {
            if !(1e-3..=LARGEST).contains(&rate) {
                return Err(value(field, rate, "0.001 to 1000000 GB/s fit"));
            }
        }
        if !(1.0..=16.0).contains(&self.memory.packet_bytes) {
            let bytes = self.memory.packet_bytes;
            return Err(value("memory.packet_bytes", bytes, "1 to 16 bytes fit"));
        }
        if self.nodes == Nodes::Every(0) {
            return Err(value("nodes.every", 0.0, "a node has at least one rank"));
        }
        Ok(())
    }

    /// The node of each of `ranks` ranks.
    ///
    /// # Errors
    /// [`TopologyError::Ranks`] if a list names fewer.
    pub fn nodes_of(&self, ranks: u32) -> Result<Vec<u32>, TopologyError> {
        match &self.nodes {
            Nodes::Every(size) => Ok((0..ranks).map(|rank| rank / (*size).max(1)).collect()),
            Nodes::List(nodes) if nodes.len() >= ranks as usize => {
                Ok(nodes[..ranks as usize].to_vec())
            }
            Nodes::List(nodes) => Err(TopologyError::Ranks {
                topology: self.name.clone(),
                named: nodes.len(),
                ranks,
            }),
        }
    }
}
