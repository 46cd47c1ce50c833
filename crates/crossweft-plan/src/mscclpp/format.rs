//! Their JSON, field by field, and the limits of their executor.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

/// The file.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct File {
    pub(super) name: String,
    pub(super) collective: String,
    pub(super) protocol: String,
    pub(super) inplace: bool,
    #[serde(default)]
    pub(super) reuse_resources: bool,
    #[serde(default = "threads")]
    pub(super) num_threads_per_block: u32,
    #[serde(default)]
    pub(super) use_double_scratch_buffer: bool,
    #[serde(default = "alignment")]
    pub(super) buffer_alignment: u64,
    #[serde(default)]
    pub(super) min_message_size: u64,
    #[serde(default = "no_limit")]
    pub(super) max_message_size: u64,
    pub(super) gpus: Vec<Gpu>,
}

pub(super) fn threads() -> u32 {
    1024
}

pub(super) fn alignment() -> u64 {
    16
}

fn no_limit() -> u64 {
    u64::MAX
}

/// A rank.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Gpu {
    pub(super) id: u32,
    #[serde(default)]
    pub(super) input_chunks: u32,
    #[serde(default)]
    pub(super) output_chunks: u32,
    #[serde(default)]
    pub(super) scratch_chunks: u32,
    #[serde(default)]
    pub(super) threadblocks: Vec<ThreadBlock>,
    #[serde(default)]
    pub(super) channels: Vec<Channels>,
    #[serde(default)]
    pub(super) remote_buffers: Vec<RemoteBuffer>,
    #[serde(default)]
    pub(super) semaphores: Vec<Semaphore>,
}

/// Channels of one type: one for each element of `connected_to`, or of `rank_groups`.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Channels {
    pub(super) channel_type: ChannelType,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) connected_to: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) buffer_type: Option<Letter>,
    /// What old files call `buffer_type`.
    #[serde(default, skip_serializing)]
    pub(super) buff: Option<Letter>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) rank_groups: Vec<RankGroup>,
}

/// Ranks of a switch channel.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RankGroup {
    /// Chunks; nobody reads it.
    #[serde(default)]
    pub(super) size: u32,
    pub(super) ranks: Vec<u32>,
}

/// Memory of a peer.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RemoteBuffer {
    pub(super) rank: u32,
    #[serde(rename = "type")]
    pub(super) letter: Letter,
    #[serde(default)]
    pub(super) access_channel_types: Vec<ChannelType>,
}

/// A semaphore among the thread blocks of a rank.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Semaphore {
    pub(super) init_value: u32,
}

/// A thread block.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ThreadBlock {
    pub(super) id: u32,
    #[serde(default)]
    pub(super) ops: Vec<Op>,
    #[serde(default)]
    pub(super) channels: Vec<ChannelIds>,
    #[serde(default)]
    pub(super) remote_buffer_refs: Vec<RemoteBufferIds>,
}

/// Which of the rank's channels of a type the thread block uses. Old files also have a `buff` here,
/// which nobody reads.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct ChannelIds {
    pub(super) channel_type: ChannelType,
    #[serde(default)]
    pub(super) channel_ids: Vec<u32>,
}

/// Which of the rank's remote buffers the thread block uses over channels of a type.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RemoteBufferIds {
    pub(super) access_channel_type: ChannelType,
    #[serde(default)]
    pub(super) remote_buffer_ids: Vec<u32>,
}

/// An operation: the fields of all of them.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Op {
    pub(super) name: Name,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) src_buff: Vec<Chunk>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) dst_buff: Vec<Chunk>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) channel_ids: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) channel_type: Option<ChannelType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reduce_op: Option<Box<str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tbg_info: Option<Slice>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) semaphore_ids: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) barrier_id: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) num_threadblocks: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) iter_context: Option<Iterations>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ops: Vec<Op>,
    // What `glre` alone has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) buffer_offset: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) size: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) dst_chunk: Option<Chunk>,
}

/// An operand: of this rank, of a peer, or of the members of a switch channel.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Chunk {
    /// The rank, where the DSL writes it; their reader ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<u32>,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub(super) letter: Option<Letter>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) buffer_id: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) switch_channel_id: Option<u32>,
    pub(super) index: u32,
    pub(super) size: u32,
}

/// Slice `tb_id` of `tbg_size`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Slice {
    pub(super) tb_id: u32,
    pub(super) tbg_size: u32,
}

/// How often a pipeline runs.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Iterations {
    pub(super) unit_size: u64,
    pub(super) num_chunks: u32,
}

/// A buffer type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub(super) enum Letter {
    #[serde(rename = "i")]
    Input,
    #[serde(rename = "o")]
    Output,
    #[serde(rename = "s")]
    Scratch,
}

/// A channel type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ChannelType {
    None,
    Memory,
    Port,
    Switch,
}

/// Declares the operations once, by name.
macro_rules! names {
    ($($name:ident $text:literal),* $(,)?) => {
        /// What an operation is.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(super) enum Name {
            #[default]
            $($name),*
        }

        impl Name {
            /// The name in their files.
            pub(super) const fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text),*
                }
            }

            fn from_text(text: &str) -> Option<Self> {
                match text {
                    $($text => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

names! {
    Nop "nop", Barrier "barrier", Put "put", PutPackets "ppkt", ReadPutPackets "rppkt",
    PutWithSignal "pws", PutWithSignalAndFlush "pwsf", Get "get", Copy "copy", CopyPackets "cpkt",
    UnpackPackets "upkt", Signal "signal", Wait "wait", Flush "flush", Reduce "re",
    ReducePackets "repkt", ReduceCopyPackets "recpkt", ReduceSend "res",
    ReduceSendPackets "respkt", ReduceCopySendPackets "recspkt", ReadReduce "rre",
    ReadReduceSend "rres", SwitchReduceStore "glres", RelaxedSignal "rlxsignal",
    RelaxedWait "rlxwait", Pipeline "pipeline", Release "sem_release", Acquire "sem_acquire",
    SwitchStore "gstore", SwitchStorePackets "gstorepkt", SwitchReduce "glre",
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an operation")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Name, E> {
                Name::from_text(text).ok_or_else(|| {
                    E::custom(format_args!("there is no operation `{}`", clean(text, 40)))
                })
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.text())
    }
}

/// At most `longest` characters of a text from a file, on one line.
pub(super) fn clean(text: &str, longest: usize) -> String {
    let printable = |c: char| if c.is_control() { '?' } else { c };
    let mut short: String = text.chars().take(longest).map(printable).collect();
    if short.len() < text.len() && text.chars().nth(longest).is_some() {
        short.push_str("...");
    }
    short
}

/// What the executor of MSCCL++ has room for.
pub(super) mod caps {
    pub(in crate::mscclpp) const OPS: usize = 64;
    pub(in crate::mscclpp) const CHANNELS: usize = 16;
    pub(in crate::mscclpp) const REMOTE_BUFFERS: usize = 16;
    pub(in crate::mscclpp) const OP_CHANNELS: usize = 8;
    pub(in crate::mscclpp) const OP_BUFFERS: usize = 10;
    pub(in crate::mscclpp) const BARRIERS: usize = 16;
    pub(in crate::mscclpp) const OP_SEMAPHORES: usize = 16;
}

/// Where a file passes the limits of their executor: one line a limit, the first place named.
pub(super) fn over_caps(file: &File) -> Vec<String> {
    let mut over = OverCaps::default();
    for gpu in &file.gpus {
        for block in &gpu.threadblocks {
            over.place = (gpu.id, block.id);
            let ops = block.ops.iter().map(|op| 1 + op.ops.len()).sum();
            over.check(0, "operations in a thread block", ops, caps::OPS);
            for kind in [ChannelType::Memory, ChannelType::Port, ChannelType::Switch] {
                let of_kind = block.channels.iter().filter(|c| c.channel_type == kind);
                let channels = of_kind.map(|c| c.channel_ids.len()).sum();
                let what = "channels of a type in a thread block";
                over.check(1, what, channels, caps::CHANNELS);
                let refs = &block.remote_buffer_refs;
                let of_kind = refs.iter().filter(|r| r.access_channel_type == kind);
                let buffers = of_kind.map(|r| r.remote_buffer_ids.len()).sum();
                let what = "remote buffers of a channel type in a thread block";
                over.check(2, what, buffers, caps::REMOTE_BUFFERS);
            }
            for op in block.ops.iter().flat_map(|op| op.ops.iter().chain([op])) {
                over.op(op);
            }
        }
    }
    over.lines()
}

#[derive(Default)]
struct OverCaps {
    place: (u32, u32),
    /// For each limit: the first violation in words, and how many more there are.
    found: [Option<(String, usize)>; 7],
}

impl OverCaps {
    fn op(&mut self, op: &Op) {
        self.check(
            3,
            "channels in an operation",
            op.channel_ids.len(),
            caps::OP_CHANNELS,
        );
        let buffers = op.src_buff.len().max(op.dst_buff.len());
        let what = "sources or destinations in an operation";
        self.check(4, what, buffers, caps::OP_BUFFERS);
        if let Some(id) = op.barrier_id {
            self.check(
                5,
                "barriers",
                (id as usize).saturating_add(1),
                caps::BARRIERS,
            );
        }
        let semaphores = op.semaphore_ids.len();
        self.check(
            6,
            "semaphores in an operation",
            semaphores,
            caps::OP_SEMAPHORES,
        );
    }

    fn check(&mut self, cap: usize, what: &str, number: usize, limit: usize) {
        if number <= limit {
            return;
        }
        let (rank, block) = self.place;
        match &mut self.found[cap] {
            Some((_, more)) => *more += 1,
            none => {
                let text = format!(
                    "MSCCL++ has room for {limit} {what}; rank {rank}, thread block {block} needs \
                     {number}"
                );
                *none = Some((text, 0));
            }
        }
    }

    fn lines(self) -> Vec<String> {
        let with_more = |(text, more)| match more {
            0 => text,
            _ => format!("{text} (and {more} more like this)"),
        };
        self.found.into_iter().flatten().map(with_more).collect()
    }
}
