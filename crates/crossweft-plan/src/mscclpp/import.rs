//! From their JSON to a plan.

use std::collections::{BTreeMap, HashMap};

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;

use super::format::{
    self, ChannelType, Channels, Chunk, File, Gpu, Letter, Name, Op as FileOp, ThreadBlock,
};
use crate::json::MAX_BYTES;
use crate::place::{Data, Kind, Raw, SPARE, in_larger_buffer, place_all};
use crate::plan::{
    Buffer, Channel, ChannelKind, Collective, InPlace, Op, Operand, Plan, RankProgram, Switch,
};
use crate::validate::{PlanError, limits};

/// A plan from a file of MSCCL++.
#[derive(Debug)]
pub struct Imported {
    /// The plan; its structure is sound.
    pub plan: Plan,
    /// What is odd about the file, one line each.
    pub warnings: Vec<String>,
}

/// JSON objects in a file, which bounds what reading it takes.
const MAX_OBJECTS: usize = 1 << 20;
/// Chunks that the operands of all operations name, which bounds the size of the plan.
const MAX_OPERAND_CHUNKS: usize = 1 << 21;
/// Channels of all ranks.
const MAX_CHANNELS: usize = 1 << 20;
/// Characters of a plan's name.
const MAX_NAME: usize = 200;

/// Whether a text looks like one of their files rather than one of ours.
#[must_use]
pub fn is_mscclpp(text: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Head {
        format: Option<serde::de::IgnoredAny>,
        gpus: Option<serde::de::IgnoredAny>,
    }
    text.len() <= MAX_BYTES
        && serde_json::from_slice::<Head>(text)
            .is_ok_and(|head| head.format.is_none() && head.gpus.is_some())
}

/// Reads an execution plan of MSCCL++.
///
/// # Errors
/// [`PlanError`]: no such file, too large, or its operations make no sound plan.
pub fn import(text: &[u8]) -> Result<Imported, PlanError> {
    let imported = import_layout(text)?;
    imported.plan.validate()?;
    Ok(imported)
}

/// Reads an execution plan of MSCCL++ that is to be looked at, not run
/// ([`Plan::validate_layout`]).
///
/// # Errors
/// [`PlanError`]: no such file, too large, or its operations cannot be laid out.
pub fn import_layout(text: &[u8]) -> Result<Imported, PlanError> {
    let file = read(text)?;
    let plan = format::clean(&file.name, MAX_NAME);
    let whole = |reason| PlanError::Plan {
        plan: plan.clone(),
        reason,
    };
    let mut warnings = format::over_caps(&file);
    let shape = Shape::of(&file).map_err(whole)?;
    let mut import = Import {
        file: &file,
        shape,
        programs: Vec::new(),
        raw: Vec::new(),
        operand_chunks: 0,
        glre: false,
        spare_slots: vec![0; file.gpus.len()],
    };
    import.channels(&mut warnings).map_err(whole)?;
    import.ops(&plan)?;
    if import.glre {
        warnings.push("it has a `glre` operation, which MSCCL++ itself refuses to run".to_owned());
    }
    if let Some(op) = other_reduction(&file) {
        let op = format::clean(op, 40);
        warnings.push(format!(
            "it reduces with `{op}`; the plan sums, as MSCCL++ itself does"
        ));
    }
    let plan = import.finish(plan, &mut warnings);
    plan.validate_layout()?;
    Ok(Imported { plan, warnings })
}

/// The first reduce operation in a file that is no sum.
fn other_reduction(file: &File) -> Option<&str> {
    let blocks = file.gpus.iter().flat_map(|gpu| &gpu.threadblocks);
    let ops = blocks.flat_map(|block| &block.ops);
    ops.flat_map(|op| op.ops.iter().chain([op]))
        .filter_map(|op| op.reduce_op.as_deref())
        .find(|op| *op != "sum")
}

fn read(text: &[u8]) -> Result<File, PlanError> {
    let refuse = |reason| Err(PlanError::Format { reason });
    if text.len() > MAX_BYTES {
        return refuse(format!(
            "{} bytes; at most {MAX_BYTES} are read",
            text.len()
        ));
    }
    let objects = text.iter().filter(|&&byte| byte == b'{').count();
    if objects > MAX_OBJECTS {
        return refuse(format!("{objects} objects; at most {MAX_OBJECTS} are read"));
    }
    serde_json::from_slice(text).or_else(|error| refuse(error.to_string()))
}

/// How buffers are cut.
#[derive(Clone, Copy, Debug)]
struct Shape {
    collective: Collective,
    in_place: bool,
    chunks: u32,
    input_blocks: u32,
    output_blocks: u32,
    message_bytes: (u64, u64),
}

impl Shape {
    fn of(file: &File) -> Result<Self, String> {
        let collective = match file.collective.to_ascii_lowercase().as_str() {
            "allreduce" => Collective::AllReduce,
            "allgather" => Collective::AllGather,
            "reducescatter" => Collective::ReduceScatter,
            "alltoall" => Collective::AllToAll,
            "sendrecv" => Collective::SendRecv,
            "test" => Collective::Test,
            other => {
                let other = format::clean(other, 40);
                return Err(format!("there is no collective `{other}`"));
            }
        };
        let world = file.gpus.len();
        if world == 0 || world > limits::RANKS {
            return Err(format!(
                "{world} ranks; 1 to {} are supported",
                limits::RANKS
            ));
        }
        let n = world as u32;
        if let Some((rank, gpu)) = (0..).zip(&file.gpus).find(|(rank, gpu)| gpu.id != *rank) {
            return Err(format!("entry {rank} of `gpus` has the id {}", gpu.id));
        }
        let most = |count: fn(&Gpu) -> u32| file.gpus.iter().map(count).max().unwrap_or(0);
        let (input, output) = (most(|gpu| gpu.input_chunks), most(|gpu| gpu.output_chunks));
        let same = |gpu: &&Gpu| (gpu.input_chunks, gpu.output_chunks) != (input, output);
        if let Some(gpu) = file
            .gpus
            .iter()
            .find(same)
            .filter(|_| collective != Collective::Test)
        {
            return Err(format!(
                "rank {} has {} chunks of input and {} of output, others {input} and {output}",
                gpu.id, gpu.input_chunks, gpu.output_chunks
            ));
        }
        let (chunks, (input_blocks, output_blocks)) = match collective.blocks(n) {
            Some((i, o)) => {
                // Old files leave one of them out.
                let chunks = if input > 0 { input / i } else { output / o };
                let whole = |count, blocks| {
                    count == 0 || u64::from(chunks) * u64::from(blocks) == u64::from(count)
                };
                if chunks == 0 || !whole(input, i) || !whole(output, o) {
                    return Err(format!(
                        "{} of {n} ranks cannot have {input} chunks of input and {output} of output",
                        collective.name()
                    ));
                }
                (chunks, (i, o))
            }
            None => (1, (input, output)),
        };
        // Sizes are of the input, for all-gather of the output, in theirs.
        let blocks = match (collective, input_blocks) {
            (Collective::AllGather, _) | (_, 0) => output_blocks,
            _ => input_blocks,
        };
        let blocks = u64::from(blocks.max(1));
        let most = match file.max_message_size {
            u64::MAX => u64::MAX,
            bytes => bytes / blocks,
        };
        Ok(Self {
            collective,
            in_place: file.inplace,
            chunks,
            input_blocks,
            output_blocks,
            message_bytes: (file.min_message_size.div_ceil(blocks), most),
        })
    }

    /// Chunk `index` of `rank`'s buffer; in place, of the larger one.
    fn user(&self, rank: u32, letter: Letter, index: u32, size: u32) -> Result<Operand, String> {
        let (buffer, blocks, name) = match letter {
            Letter::Input => (Buffer::Input, self.input_blocks, "input"),
            _ => (Buffer::Output, self.output_blocks, "output"),
        };
        let have = u64::from(blocks) * u64::from(self.chunks);
        let end = u64::from(index) + u64::from(size);
        if end > have {
            return Err(format!(
                "chunks {index} to {end} of the {name}, which has {have}"
            ));
        }
        let (buffer, index) = if self.in_place {
            in_larger_buffer(self.collective, self.chunks, rank, buffer, index)
        } else {
            (buffer, index)
        };
        Ok(Operand::new(rank, buffer, index))
    }
}

/// What an operation does, what it reads, and what it writes.
type DataOp = (Kind, Vec<Operand>, Vec<Operand>);

const REDUCE: Kind = Kind::Reduce {
    switch: None,
    last: false,
};

struct Import<'a> {
    file: &'a File,
    shape: Shape,
    programs: Vec<Numbered>,
    /// Ranks, thread blocks, operations.
    raw: Vec<Vec<Vec<Raw>>>,
    operand_chunks: usize,
    glre: bool,
    /// For each rank, the scratch slots that the file does not know of.
    spare_slots: Vec<u32>,
}

/// A rank's program without its operations, and where the file's numbers lead.
#[derive(Default)]
struct Numbered {
    program: RankProgram,
    memory: Vec<u32>,
    port: Vec<u32>,
    /// Members and buffer of each switch channel.
    groups: Vec<(Vec<u32>, Letter)>,
    /// Switches of the program by group and buffer.
    switches: HashMap<(usize, Buffer), u32>,
}

impl Import<'_> {
    fn channels(&mut self, warnings: &mut Vec<String>) -> Result<(), String> {
        let world = self.file.gpus.len();
        let mut total = 0;
        // Ends by (rank, peer, whether port), in an order that is the same for every reader: so must the plan be.
        let mut ends: BTreeMap<(u32, u32, ChannelKind), u32> = BTreeMap::new();
        for (rank, gpu) in (0..).zip(&self.file.gpus) {
            let mut numbered = Numbered::default();
            let semaphores = gpu.semaphores.iter().map(|s| s.init_value);
            numbered.program.semaphores = semaphores.collect();
            for entry in &gpu.channels {
                total += entry.connected_to.len();
                total += entry
                    .rank_groups
                    .iter()
                    .map(|g| g.ranks.len())
                    .sum::<usize>();
                if total > MAX_CHANNELS {
                    return Err(format!("more than {MAX_CHANNELS} channels"));
                }
                numbered.add(rank, entry)?;
            }
            for (index, channel) in numbered.program.channels.iter().enumerate() {
                if channel.peer as usize >= world || channel.peer == rank {
                    let peer = channel.peer;
                    return Err(format!(
                        "channel {index} of rank {rank} leads to rank {peer}"
                    ));
                }
                *ends.entry((rank, channel.peer, channel.kind)).or_default() += 1;
            }
            let buffers = gpu.remote_buffers.iter();
            if let Some(buffer) = buffers.into_iter().find(|b| b.rank as usize >= world) {
                let peer = buffer.rank;
                return Err(format!("a remote buffer of rank {rank} is of rank {peer}"));
            }
            let mut members = numbered.groups.iter().flat_map(|(ranks, _)| ranks);
            if let Some(member) = members.find(|&&member| member as usize >= world) {
                return Err(format!(
                    "a switch channel of rank {rank} names rank {member}"
                ));
            }
            self.programs.push(numbered);
        }
        // Signals may go one way only, so the file need not give the other end.
        let mut added = Vec::new();
        for (&(rank, peer, kind), &here) in &ends {
            let there = ends.get(&(peer, rank, kind)).copied().unwrap_or(0);
            if here > there {
                added.push((peer, rank, kind.name(), here - there));
                let channels = &mut self.programs[peer as usize].program.channels;
                channels.extend((there..here).map(|_| Channel { peer: rank, kind }));
            }
        }
        added.sort_unstable();
        if let Some((rank, peer, kind, _)) = added.first() {
            let count: u32 = added.iter().map(|(.., count)| count).sum();
            warnings.push(format!(
                "{count} channel ends are missing and were added, the first on rank {rank}: a \
                 {kind} channel to rank {peer}"
            ));
        }
        Ok(())
    }

    fn ops(&mut self, plan: &str) -> Result<(), PlanError> {
        let file = self.file;
        for (rank, gpu) in (0..).zip(&file.gpus) {
            let mut blocks = Vec::new();
            for (block, entry) in (0..).zip(&gpu.threadblocks) {
                let place = Place {
                    rank,
                    gpu,
                    block: entry,
                };
                let mut raw = Vec::new();
                for (index, op) in (0..).zip(&entry.ops) {
                    self.op(&place, op, &mut raw)
                        .map_err(|reason| PlanError::Op {
                            plan: plan.to_owned(),
                            rank,
                            block,
                            op: index,
                            name: op.name.text(),
                            reason,
                        })?;
                }
                blocks.push(raw);
            }
            if blocks.is_empty() {
                blocks.push(Vec::new());
            }
            self.raw.push(blocks);
        }
        Ok(())
    }

    fn op(&mut self, place: &Place<'_>, op: &FileOp, out: &mut Vec<Raw>) -> Result<(), String> {
        let numbered = &self.programs[place.rank as usize];
        match op.name {
            Name::Nop => out.push(Raw::Other(Op::Sync)),
            Name::Barrier => out.push(Raw::Other(Op::Barrier {
                id: needed("barrier_id", op.barrier_id)?,
                blocks: needed("num_threadblocks", op.num_threadblocks)?,
            })),
            Name::Signal | Name::RelaxedSignal => out.push(Raw::Other(Op::Signal {
                channels: place.channels(numbered, op)?,
                relaxed: op.name == Name::RelaxedSignal,
            })),
            Name::Wait | Name::RelaxedWait => out.push(Raw::Other(Op::Wait {
                channels: place.channels(numbered, op)?,
                relaxed: op.name == Name::RelaxedWait,
            })),
            Name::Flush => out.push(Raw::Other(Op::Flush {
                channels: place.channels(numbered, op)?,
            })),
            Name::Acquire => out.push(Raw::Other(Op::Acquire {
                semaphores: op.semaphore_ids.clone(),
            })),
            Name::Release => out.push(Raw::Other(Op::Release {
                semaphores: op.semaphore_ids.clone(),
            })),
            Name::Pipeline => {
                let context = needed("iter_context", op.iter_context)?;
                if context.num_chunks > self.shape.chunks {
                    return Err(format!(
                        "it runs over {} chunks, more than the {} of a block of the message",
                        context.num_chunks, self.shape.chunks
                    ));
                }
                let mut ops = Vec::new();
                for inner in &op.ops {
                    if inner.name == Name::Pipeline {
                        return Err("pipelines do not nest".to_owned());
                    }
                    self.op(place, inner, &mut ops)
                        .map_err(|reason| format!("in its {}: {reason}", inner.name.text()))?;
                }
                out.push(Raw::Loop {
                    unit_bytes: context.unit_size,
                    chunks: context.num_chunks,
                    ops,
                });
            }
            _ => {
                let before = out.len();
                self.data(place, op, out)?;
                for raw in &out[before..] {
                    let Raw::Data(data) = raw else { continue };
                    let operands = data.from.len() + data.to.len();
                    let chunks = operands.saturating_mul(data.count as usize);
                    self.operand_chunks = self.operand_chunks.saturating_add(chunks);
                }
                if self.operand_chunks > MAX_OPERAND_CHUNKS {
                    return Err(format!(
                        "up to here, operations name more than {MAX_OPERAND_CHUNKS} chunks"
                    ));
                }
            }
        }
        Ok(())
    }

    fn data(&mut self, place: &Place<'_>, op: &FileOp, out: &mut Vec<Raw>) -> Result<(), String> {
        let count = count(op)?;
        let slice = op.tbg_info.map_or((0, 1), |tbg| (tbg.tb_id, tbg.tbg_size));
        let mut push = |kind, from, to| {
            out.push(Raw::Data(Data {
                kind,
                from,
                to,
                count,
                slice,
            }));
        };
        let port = op.channel_type == Some(ChannelType::Port);
        let plain = |chunk: &Chunk| place.operand(&self.shape, op, chunk, Role::Plain);
        let packets = |chunk: &Chunk| place.operand(&self.shape, op, chunk, Role::Packets);
        let received = |chunk: &Chunk| place.operand(&self.shape, op, chunk, Role::Received);
        let rank = place.rank as usize;
        match op.name {
            Name::Put if !port => {
                for (from, to) in fan_outs(op, plain, plain)? {
                    push(Kind::Move { switch: None }, vec![from], to);
                }
            }
            Name::Get | Name::Copy => {
                for (from, to) in fan_outs(op, plain, plain)? {
                    push(Kind::Move { switch: None }, vec![from], to);
                }
            }
            Name::PutPackets if !port => {
                for (from, to) in fan_outs(op, plain, packets)? {
                    push(Kind::Move { switch: None }, vec![from], to);
                }
            }
            Name::CopyPackets => {
                for (from, to) in fan_outs(op, plain, packets)? {
                    push(Kind::Move { switch: None }, vec![from], to);
                }
            }
            Name::ReadPutPackets if !port => {
                for (from, to) in fan_outs(op, received, packets)? {
                    push(Kind::Move { switch: None }, vec![from], to);
                }
            }
            Name::UnpackPackets => {
                for (from, to) in fan_outs(op, received, plain)? {
                    push(Kind::Move { switch: None }, vec![from], to);
                }
            }
            Name::Put
            | Name::PutPackets
            | Name::ReadPutPackets
            | Name::PutWithSignal
            | Name::PutWithSignalAndFlush => {
                let channels = place.channels(&self.programs[rank], op)?;
                let pairs = match op.name {
                    Name::PutPackets | Name::ReadPutPackets => pairs(op, received, packets)?,
                    _ => pairs(op, plain, plain)?,
                };
                if channels.len() != pairs.len() {
                    let (channels, pairs) = (channels.len(), pairs.len());
                    return Err(format!("{channels} channels for {pairs} destinations"));
                }
                let mut awaited = Vec::new();
                for (&channel, (from, to)) in channels.iter().zip(pairs) {
                    if op.name == Name::ReadPutPackets && !awaited.contains(&from) {
                        // The proxy does not wait for packets.
                        awaited.push(from);
                        let spare = Operand::new(place.rank, Buffer::Scratch, SPARE);
                        let used = &mut self.spare_slots[rank];
                        let spare = Operand {
                            index: spare.index + *used,
                            ..spare
                        };
                        *used = used.saturating_add(count).min(limits::CHUNKS);
                        push(Kind::Move { switch: None }, vec![from], vec![spare]);
                    }
                    let kind = Kind::Put {
                        channel,
                        signal: matches!(
                            op.name,
                            Name::PutWithSignal | Name::PutWithSignalAndFlush
                        ),
                        flush: op.name == Name::PutWithSignalAndFlush,
                    };
                    push(kind, vec![from], vec![to]);
                }
            }
            Name::Reduce | Name::ReduceSend | Name::ReadReduce | Name::ReadReduceSend => {
                let from = all(&op.src_buff, plain)?;
                let to = all(&op.dst_buff, plain)?;
                push(REDUCE, from, to);
            }
            Name::ReducePackets
            | Name::ReduceCopyPackets
            | Name::ReduceSendPackets
            | Name::ReduceCopySendPackets => {
                let (own, others) = op.src_buff.split_first().ok_or("it has no source")?;
                let mut from = all(others, received)?;
                from.push(plain(own)?);
                let (result, copies) = op.dst_buff.split_first().ok_or("it has no destination")?;
                let mut to = vec![plain(result)?];
                to.extend(all(copies, packets)?);
                push(REDUCE, from, to);
            }
            Name::SwitchReduceStore
            | Name::SwitchStore
            | Name::SwitchStorePackets
            | Name::SwitchReduce => {
                let data = self.switch_data(place, op)?;
                for (kind, from, to) in data {
                    push(kind, from, to);
                }
            }
            // Handled by the caller.
            _ => {}
        }
        Ok(())
    }

    fn switch_data(&mut self, place: &Place<'_>, op: &FileOp) -> Result<Vec<DataOp>, String> {
        let shape = self.shape;
        let numbered = &mut self.programs[place.rank as usize];
        let local = |chunk: &Chunk, role| place.operand(&shape, op, chunk, role);
        if op.name == Name::SwitchReduce {
            self.glre = true;
            let index = needed("buffer_offset", op.buffer_offset)?;
            let chunk = needed("dst_chunk", op.dst_chunk)?;
            if chunk.rank.is_some_and(|rank| rank != place.rank) {
                return Err("its `dst_chunk` is of another rank".to_owned());
            }
            let id = match op.channel_ids[..] {
                [id] => id,
                _ => return Err("it needs one switch channel".to_owned()),
            };
            let size = chunk.size;
            let (from, _) = place.members(&shape, numbered, id, index, size, Role::Plain)?;
            let to = vec![local(&chunk, Role::Plain)?];
            return Ok(vec![(REDUCE, from, to)]);
        }
        if op.src_buff.len() != op.dst_buff.len() {
            let (from, to) = (op.src_buff.len(), op.dst_buff.len());
            return Err(format!("{from} sources for {to} destinations"));
        }
        let mut data = Vec::new();
        for (src, dst) in op.src_buff.iter().zip(&op.dst_buff) {
            let id = |chunk: &Chunk| needed("switch_channel_id", chunk.switch_channel_id);
            let role = match op.name {
                Name::SwitchStorePackets => Role::Packets,
                _ => Role::Plain,
            };
            let (to, hint) =
                place.members(&shape, numbered, id(dst)?, dst.index, dst.size, role)?;
            if op.name == Name::SwitchReduceStore {
                let (from, source_hint) =
                    place.members(&shape, numbered, id(src)?, src.index, src.size, role)?;
                let switch = Some(hint).filter(|_| hint == source_hint);
                data.push((
                    Kind::Reduce {
                        switch,
                        last: false,
                    },
                    from,
                    to,
                ));
                continue;
            }
            let from = match role {
                Role::Packets => local(src, Role::Received)?,
                _ => local(src, role)?,
            };
            // What is there already need not be stored again.
            let rest: Vec<Operand> = to.iter().copied().filter(|to| *to != from).collect();
            let switch = Some(hint).filter(|_| rest.len() == to.len());
            if !rest.is_empty() {
                data.push((Kind::Move { switch }, vec![from], rest));
            }
        }
        Ok(data)
    }

    /// Places everything in the message.
    fn finish(self, name: String, warnings: &mut Vec<String>) -> Plan {
        let placed = place_all(self.raw, &self.spare_slots, self.shape.chunks);
        let ranks = self
            .programs
            .into_iter()
            .zip(placed.blocks)
            .map(|(numbered, blocks)| RankProgram {
                blocks,
                ..numbered.program
            })
            .collect();
        if placed.packet_slots > 0 && self.file.protocol != "LL" {
            warnings.push(format!(
                "it sends packets although its protocol is `{}`",
                format::clean(&self.file.protocol, 40)
            ));
        }
        let Shape {
            collective,
            chunks,
            in_place,
            input_blocks,
            output_blocks,
            message_bytes,
            ..
        } = self.shape;
        let may_be_empty = Plan::fewest_chunks(message_bytes.0, chunks) < u64::from(chunks);
        Plan {
            name,
            collective,
            reduce_op: Some(ReduceOp::Sum),
            packet: PacketType::Ll16,
            in_place: if in_place {
                InPlace::Required
            } else {
                InPlace::Forbidden
            },
            chunks,
            // Their executor takes no others, and programs may count on packets of all chunks.
            equal_chunks: placed.equal_chunks || placed.packet_slots > 0 && may_be_empty,
            input_blocks,
            output_blocks,
            outputs: Vec::new(),
            message_bytes,
            scratch_slots: placed.scratch_slots,
            double_scratch: self.file.use_double_scratch_buffer && placed.scratch_slots > 0,
            packet_slots: placed.packet_slots,
            ranks,
        }
    }
}

impl Numbered {
    fn add(&mut self, rank: u32, entry: &Channels) -> Result<(), String> {
        let kind = match entry.channel_type {
            ChannelType::None => return Ok(()),
            ChannelType::Memory => ChannelKind::Memory,
            ChannelType::Port => ChannelKind::Port,
            ChannelType::Switch => {
                let Some(letter) = entry.buffer_type.or(entry.buff) else {
                    return Err(format!(
                        "a switch channel of rank {rank} has no `buffer_type`"
                    ));
                };
                let groups = entry.rank_groups.iter();
                self.groups
                    .extend(groups.map(|group| (group.ranks.clone(), letter)));
                return Ok(());
            }
        };
        for &peer in &entry.connected_to {
            let number = self.program.channels.len() as u32;
            self.program.channels.push(Channel { peer, kind });
            match kind {
                ChannelKind::Memory => self.memory.push(number),
                ChannelKind::Port => self.port.push(number),
            }
        }
        Ok(())
    }
}

/// What an operand holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Bytes.
    Plain,
    /// Packets that are written.
    Packets,
    /// Packets that are read: always in local scratch, whatever the file says.
    Received,
}

/// A thread block in the file.
struct Place<'a> {
    rank: u32,
    gpu: &'a Gpu,
    block: &'a ThreadBlock,
}

impl Place<'_> {
    /// The thread block's channel `id` of a type, as the rank numbers it.
    fn channel(&self, kind: ChannelType, id: u32) -> Result<usize, String> {
        let entries = self.block.channels.iter();
        let mut ids = entries
            .filter(|entry| entry.channel_type == kind)
            .flat_map(|entry| &entry.channel_ids);
        match ids.nth(id as usize) {
            Some(&id) => Ok(id as usize),
            None => Err(format!("the thread block has no {kind:?} channel {id}")),
        }
    }

    /// The channels that an operation names, as the plan numbers them.
    fn channels(&self, numbered: &Numbered, op: &FileOp) -> Result<Vec<u32>, String> {
        let kind = needed("channel_type", op.channel_type)?;
        let numbers = match kind {
            ChannelType::Memory => &numbered.memory,
            ChannelType::Port => &numbered.port,
            _ => return Err(format!("a channel of type {kind:?} cannot do this")),
        };
        let lead = |&id: &u32| {
            let id = self.channel(kind, id)?;
            let number = numbers.get(id).copied();
            number.ok_or_else(|| format!("the rank has no {kind:?} channel {id}"))
        };
        op.channel_ids.iter().map(lead).collect()
    }

    fn operand(
        &self,
        shape: &Shape,
        op: &FileOp,
        chunk: &Chunk,
        role: Role,
    ) -> Result<Operand, String> {
        let (rank, letter) = match (chunk.buffer_id, chunk.letter) {
            (Some(id), _) => self.remote(op, id)?,
            (None, Some(letter)) => (self.rank, letter),
            (None, None) => return Err("an operand has neither `type` nor `buffer_id`".to_owned()),
        };
        operand(shape, rank, letter, chunk.index, chunk.size, role)
    }

    fn remote(&self, op: &FileOp, id: u32) -> Result<(u32, Letter), String> {
        let kind = match needed("channel_type", op.channel_type)? {
            kind @ (ChannelType::Memory | ChannelType::Port) => kind,
            kind => return Err(format!("no remote buffers over a channel of type {kind:?}")),
        };
        let refs = self.block.remote_buffer_refs.iter();
        let mut ids = refs
            .filter(|entry| entry.access_channel_type == kind)
            .flat_map(|entry| &entry.remote_buffer_ids);
        let Some(&number) = ids.nth(id as usize) else {
            return Err(format!(
                "the thread block has no remote buffer {id} over {kind:?} channels"
            ));
        };
        match self.gpu.remote_buffers.get(number as usize) {
            Some(buffer) => Ok((buffer.rank, buffer.letter)),
            None => Err(format!("the rank has no remote buffer {number}")),
        }
    }

    /// Chunk `index` of every member of a switch channel, and the plan's switch for it.
    fn members(
        &self,
        shape: &Shape,
        numbered: &mut Numbered,
        id: u32,
        index: u32,
        size: u32,
        role: Role,
    ) -> Result<(Vec<Operand>, u32), String> {
        let id = self.channel(ChannelType::Switch, id)?;
        let Some((ranks, letter)) = numbered.groups.get(id) else {
            return Err(format!("the rank has no Switch channel {id}"));
        };
        let operands: Vec<Operand> = ranks
            .iter()
            .map(|&rank| operand(shape, rank, *letter, index, size, role))
            .collect::<Result<_, _>>()?;
        let buffer = operands
            .first()
            .ok_or("the switch channel has no ranks")?
            .buffer;
        let switches = &mut numbered.program.switches;
        let switch = *numbered.switches.entry((id, buffer)).or_insert_with(|| {
            switches.push(Switch {
                ranks: ranks.clone(),
                buffer,
            });
            switches.len() as u32 - 1
        });
        Ok((operands, switch))
    }
}

fn operand(
    shape: &Shape,
    rank: u32,
    letter: Letter,
    index: u32,
    size: u32,
    role: Role,
) -> Result<Operand, String> {
    let slot = |buffer| {
        if u64::from(index) + u64::from(size) > u64::from(limits::CHUNKS) {
            return Err(format!("scratch chunk {index}; {} fit", limits::CHUNKS));
        }
        Ok(Operand::new(rank, buffer, index))
    };
    match (role, letter) {
        (Role::Received, _) | (Role::Packets, Letter::Scratch) => slot(Buffer::Packets),
        (Role::Packets, _) => Err("packets can only be written to scratch".to_owned()),
        (Role::Plain, Letter::Scratch) => slot(Buffer::Scratch),
        (Role::Plain, letter) => shape.user(rank, letter, index, size),
    }
}

fn needed<T>(field: &str, value: Option<T>) -> Result<T, String> {
    value.ok_or_else(|| format!("it has no `{field}`"))
}

/// The chunks that all operands have.
fn count(op: &FileOp) -> Result<u32, String> {
    let mut sizes = op
        .src_buff
        .iter()
        .chain(&op.dst_buff)
        .chain(&op.dst_chunk)
        .map(|c| c.size);
    let size = match op.size {
        Some(size) => size,
        None => sizes.next().ok_or("it has no operands")?,
    };
    if let Some(other) = sizes.find(|&other| other != size) {
        return Err(format!("operands of {size} and of {other} chunks"));
    }
    if size == 0 || size > limits::CHUNKS {
        return Err(format!(
            "operands of {size} chunks; 1 to {} fit",
            limits::CHUNKS
        ));
    }
    Ok(size)
}

fn all(
    chunks: &[Chunk],
    operand: impl Fn(&Chunk) -> Result<Operand, String>,
) -> Result<Vec<Operand>, String> {
    chunks.iter().map(operand).collect()
}

/// Sources with their destinations; one source can serve all.
fn pairs(
    op: &FileOp,
    source: impl Fn(&Chunk) -> Result<Operand, String>,
    destination: impl Fn(&Chunk) -> Result<Operand, String>,
) -> Result<Vec<(Operand, Operand)>, String> {
    let mut from = all(&op.src_buff, source)?;
    let to = all(&op.dst_buff, destination)?;
    if let [one] = from[..] {
        from = vec![one; to.len()];
    }
    if from.len() != to.len() || to.is_empty() {
        let (from, to) = (from.len(), to.len());
        return Err(format!("{from} sources for {to} destinations"));
    }
    Ok(from.into_iter().zip(to).collect())
}

/// [`pairs`], with neighbours of one source taken together.
fn fan_outs(
    op: &FileOp,
    source: impl Fn(&Chunk) -> Result<Operand, String>,
    destination: impl Fn(&Chunk) -> Result<Operand, String>,
) -> Result<Vec<(Operand, Vec<Operand>)>, String> {
    let mut moves: Vec<(Operand, Vec<Operand>)> = Vec::new();
    for (from, to) in pairs(op, source, destination)? {
        match moves.last_mut() {
            Some((same, all)) if *same == from => all.push(to),
            _ => moves.push((from, vec![to])),
        }
    }
    Ok(moves)
}
