//! Structural checks: everything an executor relies on to stay inside its tables and buffers.
//!
//! Whether a plan computes what it says, without races or deadlocks, is the checker's business and
//! not decided here.

use std::collections::{BTreeMap, HashMap};

use crate::plan::{Buffer, Op, Plan, RankProgram};

/// Largest numbers a plan may contain; beyond them it is refused before anything is allocated.
pub mod limits {
    /// Ranks.
    pub const RANKS: usize = 4096;
    /// Chunks, scratch slots and packet slots.
    pub const CHUNKS: u32 = 1 << 20;
    /// Thread blocks of a rank.
    pub const BLOCKS: usize = 4096;
    /// Slices of an operation.
    pub const SLICES: u32 = 4096;
    /// Barriers of a rank.
    pub const BARRIERS: u32 = 4096;
}

/// Why a plan is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Not a plan file, or one of another version.
    #[error("not a readable plan: {reason}")]
    Format {
        /// What is wrong with it.
        reason: String,
    },
    /// The plan as a whole is unsound.
    #[error("plan `{plan}`: {reason}")]
    Plan {
        /// The plan's name.
        plan: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An operation is unsound.
    #[error("plan `{plan}`, rank {rank}, thread block {block}, op {op} ({name}): {reason}")]
    Op {
        /// The plan's name.
        plan: String,
        /// The rank.
        rank: u32,
        /// The thread block.
        block: u32,
        /// The operation's index in it.
        op: u32,
        /// The operation's name.
        name: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

impl Plan {
    /// Checks the structure.
    ///
    /// # Errors
    /// [`PlanError`] with the first fault found.
    pub fn validate(&self) -> Result<(), PlanError> {
        self.validate_whole().map_err(|reason| PlanError::Plan {
            plan: self.name.clone(),
            reason,
        })?;
        for (rank, program) in (0..).zip(&self.ranks) {
            for (block, ops) in (0..).zip(&program.blocks) {
                for (index, op) in (0..).zip(ops) {
                    self.validate_op(rank, program, op)
                        .map_err(|reason| PlanError::Op {
                            plan: self.name.clone(),
                            rank,
                            block,
                            op: index,
                            name: op.name(),
                            reason,
                        })?;
                }
            }
        }
        self.validate_pairs().map_err(|reason| PlanError::Plan {
            plan: self.name.clone(),
            reason,
        })
    }

    fn validate_whole(&self) -> Result<(), String> {
        let world = self.ranks.len();
        if world == 0 || world > limits::RANKS {
            return Err(format!(
                "{world} ranks; 1 to {} are supported",
                limits::RANKS
            ));
        }
        let sizes = [
            ("chunks", self.chunks, 1),
            ("scratch slots", self.scratch_slots, 0),
            ("packet slots", self.packet_slots, 0),
        ];
        for (what, number, least) in sizes {
            if number < least || number > limits::CHUNKS {
                return Err(format!(
                    "{number} {what}; {least} to {} fit",
                    limits::CHUNKS
                ));
            }
        }
        for (rank, program) in self.ranks.iter().enumerate() {
            let blocks = program.blocks.len();
            if blocks == 0 || blocks > limits::BLOCKS {
                return Err(format!(
                    "rank {rank} has {blocks} thread blocks; 1 to {} fit",
                    limits::BLOCKS
                ));
            }
            for (index, channel) in program.channels.iter().enumerate() {
                if channel.peer as usize >= world || channel.peer as usize == rank {
                    return Err(format!(
                        "channel {index} of rank {rank} leads to rank {}",
                        channel.peer
                    ));
                }
            }
            validate_barriers(program).map_err(|e| format!("rank {rank}: {e}"))?;
        }
        Ok(())
    }

    fn validate_op(&self, rank: u32, program: &RankProgram, op: &Op) -> Result<(), String> {
        let (from, to) = op.operands();
        if let Some(chunks) = op.chunks() {
            let end = chunks.first.checked_add(chunks.count);
            if chunks.count == 0 || end.is_none_or(|end| end > self.chunks) {
                return Err(format!(
                    "{} chunks from {}, of {} in all",
                    chunks.count, chunks.first, self.chunks
                ));
            }
            let (slice, of) = chunks.slice;
            if of == 0 || of > limits::SLICES || slice >= of {
                return Err(format!("slice {slice} of {of}"));
            }
            if from.is_empty() || to.is_empty() {
                return Err("it needs a source and a destination".to_owned());
            }
            for operand in from.iter().chain(to) {
                let size = match operand.buffer {
                    Buffer::Input | Buffer::Output => self.chunks,
                    Buffer::Scratch => self.scratch_slots,
                    Buffer::Packets => self.packet_slots,
                };
                let end = operand.index.checked_add(chunks.count);
                if end.is_none_or(|end| end > size) {
                    return Err(format!(
                        "{} of {:?} from {}, of {size} in all",
                        chunks.count, operand.buffer, operand.index
                    ));
                }
                if operand.rank as usize >= self.ranks.len() {
                    return Err(format!("there is no rank {}", operand.rank));
                }
            }
            if from
                .iter()
                .any(|o| o.buffer == Buffer::Packets && o.rank != rank)
            {
                return Err("packets can only be read by the rank that receives them".to_owned());
            }
            if to
                .iter()
                .any(|o| o.buffer == Buffer::Input && o.rank != rank)
            {
                return Err("a peer's input is not to be written".to_owned());
            }
        }
        if let Op::Signal { channels } | Op::Wait { channels } = op {
            if channels.is_empty() {
                return Err("it names no channel".to_owned());
            }
            if let Some(id) = channels
                .iter()
                .find(|&&id| id as usize >= program.channels.len())
            {
                return Err(format!(
                    "there is no channel {id}; the rank has {}",
                    program.channels.len()
                ));
            }
        }
        Ok(())
    }

    /// Channels have two ends, and as many signals go in as are waited for.
    fn validate_pairs(&self) -> Result<(), String> {
        // Signals minus waits, by (from, to, which of their channels).
        let mut balance: BTreeMap<(u32, u32, u32), i64> = BTreeMap::new();
        for (rank, program) in (0..).zip(&self.ranks) {
            let ordinals = ordinals(program);
            for (channel, &ordinal) in program.channels.iter().zip(&ordinals) {
                balance.entry((rank, channel.peer, ordinal)).or_default();
                balance.entry((channel.peer, rank, ordinal)).or_default();
            }
            let channel_ends = |peer: u32, other: u32| {
                self.ranks[peer as usize]
                    .channels
                    .iter()
                    .filter(|c| c.peer == other)
                    .count()
            };
            for channel in &program.channels {
                let (here, there) = (
                    channel_ends(rank, channel.peer),
                    channel_ends(channel.peer, rank),
                );
                if here != there {
                    return Err(format!(
                        "rank {rank} has {here} channels to rank {}, which has {there} back",
                        channel.peer
                    ));
                }
            }
            for op in program.blocks.iter().flatten() {
                let (channels, signal) = match op {
                    Op::Signal { channels } => (channels, true),
                    Op::Wait { channels } => (channels, false),
                    _ => continue,
                };
                for &id in channels {
                    let peer = program.channels[id as usize].peer;
                    let ordinal = ordinals[id as usize];
                    if signal {
                        *balance.entry((rank, peer, ordinal)).or_default() += 1;
                    } else {
                        *balance.entry((peer, rank, ordinal)).or_default() -= 1;
                    }
                }
            }
        }
        match balance.iter().find(|(_, count)| **count != 0) {
            None => Ok(()),
            Some((&(from, to, ordinal), count)) => Err(format!(
                "on channel {ordinal} from rank {from} to rank {to} there are {} {}",
                count.abs(),
                if *count > 0 {
                    "signals that nobody waits for"
                } else {
                    "waits too many"
                }
            )),
        }
    }
}

/// For each channel of a rank, which of its channels to that peer it is.
#[must_use]
pub fn ordinals(program: &RankProgram) -> Vec<u32> {
    let mut next: HashMap<u32, u32> = HashMap::new();
    program
        .channels
        .iter()
        .map(|channel| {
            let ordinal = next.entry(channel.peer).or_default();
            *ordinal += 1;
            *ordinal - 1
        })
        .collect()
}

/// Every barrier is met by as many blocks as it says, equally often.
fn validate_barriers(program: &RankProgram) -> Result<(), String> {
    let mut barriers: BTreeMap<u32, (u32, BTreeMap<usize, u32>)> = BTreeMap::new();
    for (block, ops) in program.blocks.iter().enumerate() {
        for op in ops {
            if let Op::Barrier { id, blocks } = op {
                if *id >= limits::BARRIERS {
                    return Err(format!("barrier {id}; {} fit", limits::BARRIERS));
                }
                let entry = barriers.entry(*id).or_insert((*blocks, BTreeMap::new()));
                if entry.0 != *blocks {
                    return Err(format!(
                        "barrier {id} is of {} and of {blocks} blocks",
                        entry.0
                    ));
                }
                *entry.1.entry(block).or_default() += 1;
            }
        }
    }
    for (id, (blocks, met)) in barriers {
        let mut counts = met.values();
        let first = counts.next();
        if met.len() != blocks as usize || counts.any(|count| Some(count) != first) {
            return Err(format!(
                "barrier {id} is of {blocks} blocks, but blocks {:?} meet there {:?} times",
                met.keys(),
                met.values()
            ));
        }
    }
    Ok(())
}

impl RankProgram {
    /// Number of barriers, by the highest id in use.
    #[must_use]
    pub fn barriers(&self) -> u32 {
        let ids = self.blocks.iter().flatten().filter_map(|op| match op {
            Op::Barrier { id, .. } => Some(id + 1),
            _ => None,
        });
        ids.max().unwrap_or(0)
    }
}
