//! The file format: one JSON object.
//!
//! ```json
//! {
//!   "format": "crossweft-plan", "version": 1,
//!   "name": "one-shot", "collective": "all_reduce",
//!   "reduce_op": "any",              // or sum, prod, min, max, avg
//!   "packet": "ll16",                // or ll8
//!   "in_place": "any",               // or required, forbidden
//!   "chunks": 1, "input_blocks": 1, "output_blocks": 1,
//!   "equal_chunks": false,           // whether sizes must be multiples of chunks * 16; may be left out
//!   "message_bytes": [0, 65536],     // sizes of one block it is meant for; may be left out
//!   "scratch_slots": 0, "double_scratch": false, "packet_slots": 2,
//!   "ranks": [                       // one entry a rank, in order
//!     { "channels": [ { "peer": 1 } ],
//!       "blocks": [                  // one list a thread block
//!         [ { "op": "move",   "chunks": { "first": 0, "count": 1, "slice": [0, 1] },
//!             "from": { "rank": 0, "buffer": "input", "index": 0 },
//!             "to": [ { "rank": 1, "buffer": "packets", "index": 0 } ] },
//!           { "op": "reduce", "chunks": …, "from": [ … ], "to": [ … ], "last": true },
//!           { "op": "signal", "channels": [0] }, { "op": "wait", "channels": [0] },
//!           { "op": "barrier", "id": 0, "blocks": 2 }, { "op": "sync" },
//!           { "op": "loop", "unit_bytes": 65536, "chunks": 1, "ops": [ … ] } ] ] } ]
//! }
//! ```
//!
//! A collective with a root is `{ "broadcast": { "root": 0 } }`, or so. A `custom` one has `outputs`: for
//! each rank and each block of its output, which blocks of inputs are reduced there, as
//! `{ "rank": 0, "block": 1 }`; none for anything.
//!
//! All operations and their fields are those of [`crate::Op`]; a rank may also have `semaphores` (initial
//! values) and `switches`. A channel's `kind` is `memory` (default) or `port`.
//!
//! Chunks and slots are those of [`crossweft_device::extent`]: sizes are 64-bit, a message may have
//! any number of bytes. Unknown fields and other versions are refused.

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::plan::{Collective, InPlace, InputBlock, Plan, RankProgram};
use crate::validate::PlanError;

const FORMAT: &str = "crossweft-plan";
const VERSION: u32 = 1;
/// Larger files are refused unread.
pub const MAX_BYTES: usize = 64 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: String,
    version: u32,
    name: String,
    collective: Collective,
    reduce_op: String,
    packet: String,
    in_place: InPlace,
    chunks: u32,
    #[serde(default)]
    equal_chunks: bool,
    input_blocks: u32,
    output_blocks: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    outputs: Vec<Vec<Vec<InputBlock>>>,
    #[serde(default = "any_size")]
    message_bytes: (u64, u64),
    scratch_slots: u32,
    double_scratch: bool,
    packet_slots: u32,
    ranks: Vec<RankProgram>,
}

fn any_size() -> (u64, u64) {
    (0, u64::MAX)
}

/// The fields that are read first, to say something better than "unknown field".
#[derive(Deserialize)]
struct Head {
    format: Option<String>,
    version: Option<u32>,
}

const PACKETS: [(&str, PacketType); 2] = [("ll8", PacketType::Ll8), ("ll16", PacketType::Ll16)];

impl Plan {
    /// The plan as a file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let packet = PACKETS.iter().find(|(_, packet)| *packet == self.packet);
        let file = File {
            format: FORMAT.to_owned(),
            version: VERSION,
            name: self.name.clone(),
            collective: self.collective,
            reduce_op: self.reduce_op.map_or("any", ReduceOp::name).to_owned(),
            packet: packet.map_or("ll16", |(name, _)| name).to_owned(),
            in_place: self.in_place,
            chunks: self.chunks,
            equal_chunks: self.equal_chunks,
            input_blocks: self.input_blocks,
            output_blocks: self.output_blocks,
            outputs: self.outputs.clone(),
            message_bytes: self.message_bytes,
            scratch_slots: self.scratch_slots,
            double_scratch: self.double_scratch,
            packet_slots: self.packet_slots,
            ranks: self.ranks.clone(),
        };
        // Only maps with keys that are not strings cannot be written, and there are none.
        serde_json::to_string(&file).unwrap_or_default()
    }

    /// What identifies the plan: the SHA-256 of its file without the name, in hexadecimal digits. Plans that do the
    /// same in the same way have the same one.
    #[must_use]
    pub fn content_hash(&self) -> String {
        let nameless = Self {
            name: String::new(),
            ..self.clone()
        };
        let digest = Sha256::digest(nameless.to_json());
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads a file and checks its structure.
    ///
    /// # Errors
    /// [`PlanError`]: not such a file, another version, or unsound.
    pub fn from_json(text: &[u8]) -> Result<Self, PlanError> {
        let plan = Self::layout_from_json(text)?;
        plan.validate()?;
        Ok(plan)
    }

    /// Reads a file that is to be looked at, not run ([`Plan::validate_layout`]).
    ///
    /// # Errors
    /// [`PlanError`]: not such a file, another version, or it cannot be laid out.
    pub fn layout_from_json(text: &[u8]) -> Result<Self, PlanError> {
        let format = |reason: String| PlanError::Format { reason };
        if text.len() > MAX_BYTES {
            return Err(format(format!(
                "{} bytes; at most {MAX_BYTES} are read",
                text.len()
            )));
        }
        let head: Head = serde_json::from_slice(text).map_err(|e| format(e.to_string()))?;
        if head.format.as_deref() != Some(FORMAT) {
            return Err(format(format!("its `format` is not `{FORMAT}`")));
        }
        if head.version != Some(VERSION) {
            return Err(format(format!(
                "its `version` is {}; this program reads {VERSION}",
                head.version
                    .map_or_else(|| "missing".to_owned(), |v| v.to_string())
            )));
        }
        let file: File = serde_json::from_slice(text).map_err(|e| format(e.to_string()))?;
        let reduce_op = match file.reduce_op.as_str() {
            "any" => None,
            name => Some(
                ReduceOp::from_name(name)
                    .ok_or_else(|| format(format!("there is no reduce operation `{name}`")))?,
            ),
        };
        let (_, packet) = PACKETS
            .into_iter()
            .find(|(name, _)| *name == file.packet)
            .ok_or_else(|| format(format!("there is no packet type `{}`", file.packet)))?;
        let plan = Self {
            name: file.name,
            collective: file.collective,
            reduce_op,
            packet,
            in_place: file.in_place,
            chunks: file.chunks,
            equal_chunks: file.equal_chunks,
            input_blocks: file.input_blocks,
            output_blocks: file.output_blocks,
            outputs: file.outputs,
            message_bytes: file.message_bytes,
            scratch_slots: file.scratch_slots,
            double_scratch: file.double_scratch,
            packet_slots: file.packet_slots,
            ranks: file.ranks,
        };
        plan.validate_layout()?;
        Ok(plan)
    }
}
