//! Structural checks: everything an executor relies on to stay inside its tables and buffers.
//!
//! Whether a plan computes what it says, without races or deadlocks, is the checker's business and
//! not decided here.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crossweft_device::extent::GRANULE;

use crate::plan::{
    Buffer, ChannelKind, Chunks, Collective, InPlace, InputBlock, Op, Operand, Plan, RankProgram,
};

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
    /// Semaphores of a rank.
    pub const SEMAPHORES: usize = 4096;
    /// Bytes of a plan's name.
    pub const NAME: usize = 256;
}

/// Whether a name can stand in a message: what a terminal obeys could say something else in its place.
fn name_is_plain(name: &str) -> Result<(), String> {
    let directs =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if name.is_empty() || name.len() > limits::NAME {
        let (length, most) = (name.len(), limits::NAME);
        return Err(format!("its name has {length} bytes; 1 to {most} fit"));
    }
    match name.chars().find(|c| directs(*c)) {
        Some(c) => Err(format!(
            "its name has the control character {}",
            c.escape_unicode()
        )),
        None => Ok(()),
    }
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

/// Fails if no plan has so many ranks.
pub(crate) fn ranks_fit(ranks: usize) -> Result<(), String> {
    match (1..=limits::RANKS).contains(&ranks) {
        true => Ok(()),
        false => Err(format!(
            "{ranks} ranks; 1 to {} are supported",
            limits::RANKS
        )),
    }
}

/// Fails if no rank has so many thread blocks.
pub(crate) fn blocks_fit(rank: usize, blocks: usize) -> Result<(), String> {
    match (1..=limits::BLOCKS).contains(&blocks) {
        true => Ok(()),
        false => Err(format!(
            "rank {rank} has {blocks} thread blocks; 1 to {} fit",
            limits::BLOCKS
        )),
    }
}

impl Plan {
    /// Checks the structure.
    ///
    /// # Errors
    /// [`PlanError`] with the first fault found.
    pub fn validate(&self) -> Result<(), PlanError> {
        self.validate_layout()?;
        self.validate_balance().map_err(|reason| self.whole(reason))
    }

    fn whole(&self, reason: String) -> PlanError {
        PlanError::Plan {
            plan: self.name.clone(),
            reason,
        }
    }

    /// Checks what is needed to lay the plan out, if not to run it: all of the structure but whether there are as
    /// many signals as waits.
    ///
    /// # Errors
    /// [`PlanError`] with the first fault found.
    pub fn validate_layout(&self) -> Result<(), PlanError> {
        // Not with the name in it.
        name_is_plain(&self.name).map_err(|reason| PlanError::Format { reason })?;
        let whole = |reason| self.whole(reason);
        self.validate_whole().map_err(whole)?;
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
        self.validate_ends().map_err(whole)?;
        self.validate_sizes().map_err(whole)
    }

    /// Whether some message fits. The shortest one of any type has an element of 8 bytes, at most.
    fn validate_sizes(&self) -> Result<(), String> {
        let (least, most) = self.message_bytes;
        let multiple = self.message_multiple();
        let largest = most / multiple * multiple;
        match largest >= least.max(1) {
            true => Ok(()),
            false => Err(format!(
                "no message of {least} to {most} bytes is a multiple of {multiple}, which it needs"
            )),
        }
    }

    fn validate_whole(&self) -> Result<(), String> {
        let world = self.ranks.len();
        ranks_fit(world)?;
        let (input, output) = (self.input_blocks, self.output_blocks);
        if let Some((of_input, of_output)) = self.collective.blocks(world as u32)
            && (of_input, of_output) != (input, output)
        {
            return Err(format!(
                "{} of {world} ranks has {of_input} blocks of input and {of_output} of output, not {input} and {output}",
                self.collective.name()
            ));
        }
        let (least, most) = self.message_bytes;
        if least > most {
            return Err(format!(
                "it is for messages of {least} to {most} bytes, which none has: give the smaller number first"
            ));
        }
        if let Some(root) = self
            .collective
            .root()
            .filter(|root| *root as usize >= world)
        {
            return Err(format!("its root is rank {root}, of {world} ranks"));
        }
        self.validate_outputs()?;
        let sizes = [
            ("input blocks", self.input_blocks, 0),
            ("output blocks", self.output_blocks, 0),
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
            blocks_fit(rank, blocks)?;
            for (index, channel) in program.channels.iter().enumerate() {
                if channel.peer as usize >= world || channel.peer as usize == rank {
                    return Err(format!(
                        "channel {index} of rank {rank} leads to rank {}",
                        channel.peer
                    ));
                }
            }
            if program.semaphores.len() > limits::SEMAPHORES {
                return Err(format!(
                    "rank {rank} has more than {} semaphores",
                    limits::SEMAPHORES
                ));
            }
            let members = program.switches.iter().flat_map(|switch| &switch.ranks);
            if let Some(member) = members
                .into_iter()
                .find(|&&member| member as usize >= world)
            {
                return Err(format!("a switch of rank {rank} names rank {member}"));
            }
            validate_barriers(program).map_err(|e| format!("rank {rank}: {e}"))?;
        }
        Ok(())
    }

    /// What a custom collective computes is said for every block of output, and nothing of others.
    fn validate_outputs(&self) -> Result<(), String> {
        if self.collective != Collective::Custom {
            return match self.outputs[..] {
                [] => Ok(()),
                _ => Err("only a custom collective says what its outputs are".to_owned()),
            };
        }
        let blocks = self.output_blocks as usize;
        let is_short = |of_rank: &Vec<_>| of_rank.len() != blocks;
        if self.outputs.len() != self.ranks.len() || self.outputs.iter().any(is_short) {
            return Err(format!(
                "a custom collective must say what each of {blocks} blocks of output of each rank holds"
            ));
        }
        let mut inputs = self.outputs.iter().flatten().flatten();
        let wrong = inputs.find(|input| {
            input.rank as usize >= self.ranks.len() || input.block >= self.input_blocks
        });
        match wrong {
            Some(InputBlock { rank, block }) => Err(format!(
                "an output is to hold block {block} of rank {rank}'s input, which does not exist"
            )),
            None => Ok(()),
        }
    }

    fn validate_op(&self, rank: u32, program: &RankProgram, op: &Op) -> Result<(), String> {
        if let Op::Loop {
            unit_bytes,
            chunks,
            ops,
        } = op
        {
            if *unit_bytes == 0 || !unit_bytes.is_multiple_of(GRANULE) {
                return Err(format!(
                    "pieces of {unit_bytes} bytes; a multiple of {GRANULE} fits"
                ));
            }
            if *chunks == 0 || *chunks > self.chunks {
                return Err(format!("{chunks} chunks, of {} in all", self.chunks));
            }
            for op in ops {
                let (from, to) = op.operands();
                if from.iter().chain(to).any(|o| o.buffer == Buffer::Packets) {
                    return Err("a loop cannot handle packets".to_owned());
                }
                if matches!(op, Op::Loop { .. }) {
                    return Err("loops do not nest".to_owned());
                }
                self.validate_op(rank, program, op)
                    .map_err(|reason| format!("in its {}: {reason}", op.name()))?;
            }
            return Ok(());
        }
        if let Some(chunks) = op.chunks() {
            self.validate_data(rank, op, chunks)?;
        }
        let channels = program.channels.len();
        match op {
            Op::Signal {
                channels: ids,
                relaxed,
            }
            | Op::Wait {
                channels: ids,
                relaxed,
            } => {
                known("channel", ids, channels)?;
                let port = |id: &u32| program.channels[*id as usize].kind == ChannelKind::Port;
                if *relaxed && ids.iter().any(port) {
                    return Err("a port channel has no relaxed signals".to_owned());
                }
            }
            Op::Flush { channels: ids } => {
                known("channel", ids, channels)?;
                for id in ids {
                    is_port(program, *id)?;
                }
            }
            Op::Put {
                from, to, channel, ..
            } => {
                known("channel", &[*channel], channels)?;
                is_port(program, *channel)?;
                let peer = program.channels[*channel as usize].peer;
                if from.rank != rank || to.rank != peer {
                    return Err(format!(
                        "channel {channel} leads from rank {rank} to rank {peer}, not from {} to {}",
                        from.rank, to.rank
                    ));
                }
                if (from.buffer == Buffer::Packets) != (to.buffer == Buffer::Packets) {
                    return Err("a proxy copies packets to packets only".to_owned());
                }
            }
            Op::Acquire { semaphores: ids } | Op::Release { semaphores: ids } => {
                known("semaphore", ids, program.semaphores.len())?;
            }
            Op::Move {
                to,
                switch: Some(id),
                ..
            } => is_switch(program, *id, to)?,
            Op::Reduce {
                from,
                to,
                switch: Some(id),
                ..
            } => {
                is_switch(program, *id, from)?;
                if to.iter().any(|operand| operand.rank != rank) {
                    is_switch(program, *id, to)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn validate_data(&self, rank: u32, op: &Op, chunks: Chunks) -> Result<(), String> {
        let (from, to) = op.operands();
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
                Buffer::Input => self.input_blocks.saturating_mul(self.chunks),
                Buffer::Output => self.output_blocks.saturating_mul(self.chunks),
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
            let in_blocks = matches!(operand.buffer, Buffer::Input | Buffer::Output);
            if in_blocks && operand.index % self.chunks + chunks.count > self.chunks {
                return Err(format!(
                    "chunks {} to {} of {:?} lie in more than one block",
                    operand.index,
                    operand.index + chunks.count - 1,
                    operand.buffer
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
        let writable = self.in_place == InPlace::Required || self.collective == Collective::Test;
        if !writable && to.iter().any(|o| o.buffer == Buffer::Input) {
            return Err("input is not to be written, unless the plan is in place".to_owned());
        }
        Ok(())
    }

    /// Channels have two ends.
    fn validate_ends(&self) -> Result<(), String> {
        let mut ends: HashMap<(u32, u32, ChannelKind), usize> = HashMap::new();
        for (rank, program) in (0..).zip(&self.ranks) {
            for channel in &program.channels {
                *ends.entry((rank, channel.peer, channel.kind)).or_default() += 1;
            }
        }
        for (rank, program) in (0..).zip(&self.ranks) {
            for channel in &program.channels {
                let count = |of, to| ends.get(&(of, to, channel.kind)).copied().unwrap_or(0);
                let (here, there) = (count(rank, channel.peer), count(channel.peer, rank));
                if here != there {
                    return Err(format!(
                        "rank {rank} has {here} {} channels to rank {}, which has {there} back",
                        channel.kind.name(),
                        channel.peer
                    ));
                }
            }
        }
        Ok(())
    }

    /// As many signals go into a channel as are waited for.
    fn validate_balance(&self) -> Result<(), String> {
        // Signals minus waits, by (kind, from, to, which of their channels). Loops are left out: how
        // often they run depends on the size.
        let mut balance: BTreeMap<(bool, u32, u32, u32), i64> = BTreeMap::new();
        for (rank, program) in (0..).zip(&self.ranks) {
            let ordinals = ordinals(program);
            let mut count = |id: u32, waits: bool, by: i64| {
                let channel = program.channels[id as usize];
                let port = channel.kind == ChannelKind::Port;
                let (from, to) = if waits {
                    (channel.peer, rank)
                } else {
                    (rank, channel.peer)
                };
                *balance
                    .entry((port, from, to, ordinals[id as usize]))
                    .or_default() += by;
            };
            for op in program.blocks.iter().flatten() {
                match op {
                    Op::Signal { channels, .. } => {
                        channels.iter().for_each(|id| count(*id, false, 1));
                    }
                    Op::Wait { channels, .. } => {
                        channels.iter().for_each(|id| count(*id, true, -1));
                    }
                    Op::Put {
                        channel,
                        signal: true,
                        ..
                    } => count(*channel, false, 1),
                    _ => {}
                }
            }
        }
        let has_loops = self.ranks.iter().any(|program| {
            program
                .blocks
                .iter()
                .flatten()
                .any(|op| matches!(op, Op::Loop { .. }))
        });
        match balance.iter().find(|(_, count)| **count != 0) {
            Some((&(_, from, to, ordinal), count)) if !has_loops => Err(format!(
                "on channel {ordinal} from rank {from} to rank {to} there are {} {}",
                count.abs(),
                if *count > 0 {
                    "signals that nobody waits for"
                } else {
                    "waits too many"
                }
            )),
            _ => Ok(()),
        }
    }
}

/// Ids name something, and at least one thing.
fn known(what: &str, ids: &[u32], count: usize) -> Result<(), String> {
    if ids.is_empty() {
        return Err(format!("it names no {what}"));
    }
    match ids.iter().find(|&&id| id as usize >= count) {
        Some(id) => Err(format!("there is no {what} {id}; the rank has {count}")),
        None => Ok(()),
    }
}

fn is_port(program: &RankProgram, id: u32) -> Result<(), String> {
    match program.channels[id as usize].kind {
        ChannelKind::Port => Ok(()),
        ChannelKind::Memory => Err(format!("channel {id} is no port channel")),
    }
}

fn is_switch(program: &RankProgram, id: u32, operands: &[Operand]) -> Result<(), String> {
    let Some(switch) = program.switches.get(id as usize) else {
        return Err(format!(
            "there is no switch {id}; the rank has {}",
            program.switches.len()
        ));
    };
    let ranks: BTreeSet<u32> = operands.iter().map(|o| o.rank).collect();
    if ranks.len() != operands.len()
        || !ranks
            .iter()
            .eq(&switch.ranks.iter().copied().collect::<BTreeSet<_>>())
    {
        return Err(format!("its operands are not the members of switch {id}"));
    }
    Ok(())
}

/// For each channel of a rank, which of its channels of that kind to that peer it is.
#[must_use]
pub fn ordinals(program: &RankProgram) -> Vec<u32> {
    let mut next: HashMap<(u32, ChannelKind), u32> = HashMap::new();
    program
        .channels
        .iter()
        .map(|channel| {
            let ordinal = next.entry((channel.peer, channel.kind)).or_default();
            *ordinal += 1;
            *ordinal - 1
        })
        .collect()
}

/// Every barrier is met by as many blocks as it says, equally often.
fn validate_barriers(program: &RankProgram) -> Result<(), String> {
    let mut barriers: BTreeMap<u32, (u32, BTreeMap<usize, u32>)> = BTreeMap::new();
    for (block, ops) in program.blocks.iter().enumerate() {
        for op in ops.iter().flat_map(Op::flatten) {
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
        let ids = self
            .blocks
            .iter()
            .flatten()
            .flat_map(Op::flatten)
            .filter_map(|op| match op {
                Op::Barrier { id, .. } => Some(id + 1),
                _ => None,
            });
        ids.max().unwrap_or(0)
    }
}
