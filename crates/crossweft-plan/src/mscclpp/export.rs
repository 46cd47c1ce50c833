//! From a plan to their JSON.

use crossweft_device::ReduceOp;

use super::format::{
    self, ChannelIds, ChannelType, Channels, Chunk, File, Gpu, Iterations, Letter, Name,
    Op as FileOp, RankGroup, RemoteBuffer, RemoteBufferIds, Semaphore, Slice, ThreadBlock, caps,
};
use crate::plan::{
    Buffer, ChannelKind, Chunks, Collective, InPlace, Op, Operand, Plan, RankProgram,
};
use crate::validate::PlanError;

/// Writes a plan as an execution plan of MSCCL++.
///
/// # Errors
/// [`PlanError`]: the plan is unsound, does what theirs cannot express or their executor gets wrong,
/// or passes one of its limits.
pub fn export(plan: &Plan) -> Result<String, PlanError> {
    plan.validate()?;
    let whole = |reason: String| PlanError::Plan {
        plan: plan.name.clone(),
        reason,
    };
    if let Some(op) = plan.reduce_op.filter(|&op| op != ReduceOp::Sum) {
        return Err(whole(format!("MSCCL++ only knows sums, not {}", op.name())));
    }
    let layout = Layout::of(plan).map_err(whole)?;
    let mut gpus = Vec::new();
    for (rank, program) in (0..).zip(&plan.ranks) {
        gpus.push(gpu(plan, layout, rank, program)?);
    }
    let size_blocks = match (plan.collective, plan.input_blocks) {
        (Collective::AllGather, _) | (_, 0) => plan.output_blocks,
        _ => plan.input_blocks,
    };
    let blocks = u64::from(size_blocks.max(1));
    let file = File {
        name: plan.name.clone(),
        collective: match plan.collective {
            Collective::AllReduce => "allreduce",
            Collective::AllGather => "allgather",
            Collective::ReduceScatter => "reducescatter",
            Collective::AllToAll => "alltoall",
            Collective::SendRecv => "sendrecv",
            Collective::Test => "test",
            other => return Err(whole(format!("MSCCL++ has no {}", other.name()))),
        }
        .to_owned(),
        protocol: if plan.packet_slots > 0 {
            "LL"
        } else {
            "Simple"
        }
        .to_owned(),
        inplace: plan.in_place == InPlace::Required,
        reuse_resources: false,
        num_threads_per_block: format::threads(),
        use_double_scratch_buffer: layout.double,
        buffer_alignment: format::alignment(),
        min_message_size: plan.message_bytes.0.saturating_mul(blocks),
        max_message_size: plan.message_bytes.1.saturating_mul(blocks),
        gpus,
    };
    if let Some(first) = format::over_caps(&file).into_iter().next() {
        return Err(whole(first));
    }
    serde_json::to_string(&file).map_err(|e| whole(e.to_string()))
}

/// How plain scratch and packets share their one scratch buffer, where a packet's chunk is twice as
/// long as a plain one: plain chunks first, packets behind them.
#[derive(Clone, Copy)]
struct Layout {
    packets_first: u32,
    chunks: u32,
    double: bool,
}

impl Layout {
    fn of(plan: &Plan) -> Result<Self, String> {
        let packets_first = plan.scratch_slots.div_ceil(2);
        let double = plan.double_scratch || plan.packet_slots > 0;
        let into_scratch = |(rank, op): (u32, &Op)| {
            let inner = op.flatten().iter();
            inner.into_iter().any(|op| {
                let (from, to) = op.operands();
                let mut operands = from.iter().chain(to);
                operands.any(|o| o.buffer == Buffer::Scratch && o.rank != rank)
            })
        };
        if double && plan.scratch_slots > 0 && plan.all_ops().any(into_scratch) {
            return Err(
                "MSCCL++ reads and writes the wrong half of a peer's plain scratch memory where \
                 scratch memory is double, as it is for packets"
                    .to_owned(),
            );
        }
        let chunks = if plan.packet_slots > 0 {
            packets_first.saturating_add(plan.packet_slots)
        } else {
            0
        };
        Ok(Self {
            packets_first,
            chunks: chunks.max(plan.scratch_slots),
            double,
        })
    }

    /// The buffer and index in theirs.
    fn at(self, operand: &Operand) -> (Letter, u32) {
        let letter = letter(operand.buffer);
        match operand.buffer {
            Buffer::Packets => (letter, self.packets_first + operand.index),
            _ => (letter, operand.index),
        }
    }
}

fn letter(buffer: Buffer) -> Letter {
    match buffer {
        Buffer::Input => Letter::Input,
        Buffer::Output => Letter::Output,
        Buffer::Scratch | Buffer::Packets => Letter::Scratch,
    }
}

fn gpu(plan: &Plan, layout: Layout, rank: u32, program: &RankProgram) -> Result<Gpu, PlanError> {
    let mut remote_buffers = Vec::new();
    let mut threadblocks = Vec::new();
    for (block, ops) in (0..).zip(&program.blocks) {
        let mut writer = Writer {
            layout,
            rank,
            program,
            remote_buffers: &mut remote_buffers,
            channels: Vec::new(),
            remote: Vec::new(),
            ops: Vec::new(),
            sync: false,
            in_loop: false,
        };
        for (index, op) in (0..).zip(ops) {
            writer.op(op).map_err(|reason| PlanError::Op {
                plan: plan.name.clone(),
                rank,
                block,
                op: index,
                name: op.name(),
                reason,
            })?;
        }
        threadblocks.push(writer.finish(block));
    }
    Ok(Gpu {
        id: rank,
        input_chunks: plan.chunks.saturating_mul(plan.input_blocks),
        output_chunks: plan.chunks.saturating_mul(plan.output_blocks),
        scratch_chunks: layout.chunks,
        threadblocks,
        channels: channels(program),
        remote_buffers,
        semaphores: program
            .semaphores
            .iter()
            .map(|&init_value| Semaphore { init_value })
            .collect(),
    })
}

/// The rank's channels: neighbours of a kind in one entry, then the switches.
fn channels(program: &RankProgram) -> Vec<Channels> {
    let mut entries: Vec<Channels> = Vec::new();
    let entry = |channel_type| Channels {
        channel_type,
        connected_to: Vec::new(),
        buffer_type: None,
        buff: None,
        rank_groups: Vec::new(),
    };
    for channel in &program.channels {
        let kind = channel_type(channel.kind);
        if entries.last().is_none_or(|last| last.channel_type != kind) {
            entries.push(entry(kind));
        }
        if let Some(last) = entries.last_mut() {
            last.connected_to.push(channel.peer);
        }
    }
    for switch in &program.switches {
        entries.push(Channels {
            buffer_type: Some(letter(switch.buffer)),
            rank_groups: vec![RankGroup {
                size: 1,
                ranks: switch.ranks.clone(),
            }],
            ..entry(ChannelType::Switch)
        });
    }
    entries
}

fn channel_type(kind: ChannelKind) -> ChannelType {
    match kind {
        ChannelKind::Memory => ChannelType::Memory,
        ChannelKind::Port => ChannelType::Port,
    }
}

/// Writes one thread block.
struct Writer<'a> {
    layout: Layout,
    rank: u32,
    program: &'a RankProgram,
    remote_buffers: &'a mut Vec<RemoteBuffer>,
    /// What operations have named so far, in their order.
    channels: Vec<(ChannelType, Vec<u32>)>,
    remote: Vec<(ChannelType, Vec<u32>)>,
    ops: Vec<FileOp>,
    /// Whether the last operation implies that the threads of the block meet.
    sync: bool,
    in_loop: bool,
}

/// The number of `item` in the list of `kind`, at whose end it is put if it is not there.
fn numbered(lists: &mut Vec<(ChannelType, Vec<u32>)>, kind: ChannelType, item: u32) -> u32 {
    let at = match lists.iter().position(|(other, _)| *other == kind) {
        Some(at) => at,
        None => {
            lists.push((kind, Vec::new()));
            lists.len() - 1
        }
    };
    let list = &mut lists[at].1;
    let number = list
        .iter()
        .position(|&other| other == item)
        .unwrap_or_else(|| {
            list.push(item);
            list.len() - 1
        });
    number as u32
}

type Data<'a> = (Chunks, &'a [Operand], &'a [Operand]);

impl Writer<'_> {
    fn finish(self, id: u32) -> ThreadBlock {
        let channels = self.channels.into_iter();
        let remote = self.remote.into_iter();
        ThreadBlock {
            id,
            ops: self.ops,
            channels: channels
                .map(|(channel_type, channel_ids)| ChannelIds {
                    channel_type,
                    channel_ids,
                })
                .collect(),
            remote_buffer_refs: remote
                .map(|(access_channel_type, remote_buffer_ids)| RemoteBufferIds {
                    access_channel_type,
                    remote_buffer_ids,
                })
                .collect(),
        }
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Move {
                chunks,
                from,
                to,
                switch,
            } => self.transfer(*chunks, from, to, *switch),
            Op::Reduce {
                chunks,
                from,
                to,
                switch,
                ..
            } => self.reduce((*chunks, from, to), *switch),
            Op::Put {
                chunks,
                from,
                to,
                channel,
                signal,
                flush,
            } => self.put(
                (
                    *chunks,
                    std::slice::from_ref(from),
                    std::slice::from_ref(to),
                ),
                *channel,
                *signal,
                *flush,
            ),
            Op::Signal { channels, relaxed } => {
                let name = if *relaxed {
                    Name::RelaxedSignal
                } else {
                    Name::Signal
                };
                self.meet();
                self.on_channels(name, channels);
                Ok(())
            }
            Op::Wait { channels, relaxed } => {
                let name = if *relaxed {
                    Name::RelaxedWait
                } else {
                    Name::Wait
                };
                self.on_channels(name, channels);
                self.sync = true;
                Ok(())
            }
            Op::Flush { channels } => {
                self.meet();
                self.on_channels(Name::Flush, channels);
                self.sync = true;
                Ok(())
            }
            Op::Acquire { semaphores } => {
                self.semaphores(Name::Acquire, semaphores);
                self.sync = true;
                Ok(())
            }
            Op::Release { semaphores } => {
                self.meet();
                self.semaphores(Name::Release, semaphores);
                Ok(())
            }
            Op::Barrier { id, blocks } => {
                // The threads of the block meet in it.
                self.sync = false;
                self.push(FileOp {
                    name: Name::Barrier,
                    barrier_id: Some(*id),
                    num_threadblocks: Some(*blocks),
                    ..FileOp::default()
                });
                Ok(())
            }
            Op::Sync => {
                self.sync = false;
                self.push(FileOp::default());
                Ok(())
            }
            Op::Loop {
                unit_bytes,
                chunks,
                ops,
            } => self.pipeline(*unit_bytes, *chunks, ops),
        }
    }

    fn pipeline(&mut self, unit_bytes: u64, chunks: u32, ops: &[Op]) -> Result<(), String> {
        self.settle();
        let outside = std::mem::take(&mut self.ops);
        self.in_loop = true;
        for op in ops {
            let sliced = op.chunks().is_some_and(|chunks| chunks.slice.1 > 1);
            if sliced {
                return Err(
                    "MSCCL++ computes sizes wrongly where thread blocks share an operation in a loop"
                        .to_owned(),
                );
            }
            self.op(op)?;
        }
        self.settle();
        self.in_loop = false;
        let inside = std::mem::replace(&mut self.ops, outside);
        self.push(FileOp {
            name: Name::Pipeline,
            iter_context: Some(Iterations {
                unit_size: unit_bytes,
                num_chunks: chunks,
            }),
            ops: inside,
            ..FileOp::default()
        });
        Ok(())
    }

    /// Makes the threads of the block meet if the last operation implies it.
    fn settle(&mut self) {
        if std::mem::take(&mut self.sync) {
            self.ops.push(FileOp::default());
        }
    }

    /// Makes the threads of the block meet, unless they just have, or the block begins.
    fn meet(&mut self) {
        self.settle();
        let met = self
            .ops
            .last()
            .map_or(!self.in_loop, |last| last.name == Name::Nop);
        if !met {
            self.ops.push(FileOp::default());
        }
    }

    fn push(&mut self, op: FileOp) {
        self.settle();
        self.ops.push(op);
    }

    fn on_channels(&mut self, name: Name, channels: &[u32]) {
        // One operation is on channels of one type.
        for kind in [ChannelKind::Memory, ChannelKind::Port] {
            let of_kind = |id: &&u32| self.program.channels[**id as usize].kind == kind;
            let ids: Vec<u32> = channels.iter().filter(of_kind).copied().collect();
            for ids in ids.chunks(caps::OP_CHANNELS) {
                let channel_ids = ids.iter().map(|&id| self.channel(id)).collect();
                self.push(FileOp {
                    name,
                    channel_ids,
                    channel_type: Some(channel_type(kind)),
                    ..FileOp::default()
                });
            }
        }
    }

    fn semaphores(&mut self, name: Name, semaphores: &[u32]) {
        for semaphores in semaphores.chunks(caps::OP_SEMAPHORES) {
            self.push(FileOp {
                name,
                semaphore_ids: semaphores.to_vec(),
                ..FileOp::default()
            });
        }
    }

    /// The thread block's number of a channel of the rank.
    fn channel(&mut self, id: u32) -> u32 {
        let kind = self.program.channels[id as usize].kind;
        let before = &self.program.channels[..id as usize];
        let flat = before.iter().filter(|channel| channel.kind == kind).count();
        numbered(&mut self.channels, channel_type(kind), flat as u32)
    }

    /// A chunk in their words; a peer's over channels of type `kind`.
    fn chunk(&mut self, chunks: Chunks, operand: &Operand, kind: ChannelType) -> Chunk {
        let (letter, index) = self.layout.at(operand);
        let own = operand.rank == self.rank;
        Chunk {
            rank: None,
            letter: own.then_some(letter),
            buffer_id: (!own).then(|| self.remote(operand.rank, letter, kind)),
            switch_channel_id: None,
            index,
            size: chunks.count,
        }
    }

    /// The thread block's number of a peer's buffer.
    fn remote(&mut self, rank: u32, letter: Letter, kind: ChannelType) -> u32 {
        let buffers = &mut *self.remote_buffers;
        let known = |buffer: &RemoteBuffer| (buffer.rank, buffer.letter) == (rank, letter);
        let at = buffers.iter().position(known).unwrap_or_else(|| {
            buffers.push(RemoteBuffer {
                rank,
                letter,
                access_channel_types: Vec::new(),
            });
            buffers.len() - 1
        });
        let kinds = &mut buffers[at].access_channel_types;
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
        numbered(&mut self.remote, kind, at as u32)
    }

    fn data(&mut self, name: Name, (chunks, from, to): Data<'_>, kind: ChannelType) {
        self.settle();
        let src_buff: Vec<Chunk> = from.iter().map(|o| self.chunk(chunks, o, kind)).collect();
        let dst_buff: Vec<Chunk> = to.iter().map(|o| self.chunk(chunks, o, kind)).collect();
        let reaches = src_buff
            .iter()
            .chain(&dst_buff)
            .any(|chunk| chunk.buffer_id.is_some());
        let (tb_id, tbg_size) = chunks.slice;
        let reduces = !matches!(
            name,
            Name::Put
                | Name::PutPackets
                | Name::ReadPutPackets
                | Name::PutWithSignal
                | Name::PutWithSignalAndFlush
                | Name::Get
                | Name::Copy
                | Name::CopyPackets
                | Name::UnpackPackets
        );
        self.ops.push(FileOp {
            name,
            src_buff,
            dst_buff,
            channel_type: reaches.then_some(kind),
            reduce_op: reduces.then(|| "sum".into()),
            tbg_info: (tbg_size > 1).then_some(Slice { tb_id, tbg_size }),
            ..FileOp::default()
        });
    }

    fn put(
        &mut self,
        data: Data<'_>,
        channel: u32,
        signal: bool,
        flush: bool,
    ) -> Result<(), String> {
        let packets = data.1[0].buffer == Buffer::Packets;
        let name = match (packets, signal, flush) {
            (true, ..) => Name::PutPackets,
            (false, true, true) => Name::PutWithSignalAndFlush,
            (false, true, false) => Name::PutWithSignal,
            (false, false, _) => Name::Put,
        };
        self.meet();
        self.data(name, data, ChannelType::Port);
        let number = self.channel(channel);
        if let Some(op) = self.ops.last_mut() {
            op.channel_ids = vec![number];
        }
        if packets && signal {
            self.on_channels(Name::Signal, &[channel]);
        }
        if flush && name != Name::PutWithSignalAndFlush {
            self.on_channels(Name::Flush, &[channel]);
        }
        self.sync = true;
        Ok(())
    }

    /// Destinations here and at peers, raw and packets.
    fn sort(&self, to: &[Operand]) -> Sorted {
        let of = |own: bool, packets: bool| {
            let is = |o: &&Operand| {
                (o.rank == self.rank) == own && (o.buffer == Buffer::Packets) == packets
            };
            to.iter().filter(is).copied().collect()
        };
        Sorted {
            own: of(true, false),
            peers: of(false, false),
            own_packets: of(true, true),
            peers_packets: of(false, true),
        }
    }

    fn transfer(
        &mut self,
        chunks: Chunks,
        from: &Operand,
        to: &[Operand],
        switch: Option<u32>,
    ) -> Result<(), String> {
        let packets = from.buffer == Buffer::Packets;
        if let Some(id) = switch.filter(|&id| from.rank == self.rank && self.is_switch(id, to)) {
            let name = match (packets, to[0].buffer == Buffer::Packets) {
                (true, true) => Some(Name::SwitchStorePackets),
                (false, false) => Some(Name::SwitchStore),
                _ => None,
            };
            if let Some(name) = name {
                let source = Chunk {
                    rank: Some(self.rank),
                    ..self.chunk(chunks, from, ChannelType::Switch)
                };
                self.on_switch(name, chunks, source, id, &to[0]);
                self.sync = packets;
                return Ok(());
            }
        }
        let Sorted {
            own,
            peers,
            own_packets,
            peers_packets,
        } = self.sort(to);
        let from = [*from];
        let memory = ChannelType::Memory;
        let refuse = |reason: &str| Err(reason.to_owned());
        if from[0].rank != self.rank {
            if !peers.is_empty() || !own_packets.is_empty() || !peers_packets.is_empty() {
                return refuse("MSCCL++ copies a peer's data to this rank's plain memory only");
            }
            for to in own {
                if self.layout.at(&to).1 != self.layout.at(&from[0]).1 {
                    return refuse(
                        "MSCCL++ exchanges the places of a `get` with each other, so they must be \
                         the same chunk of either buffer",
                    );
                }
                self.data(Name::Get, (chunks, &from, &[to]), memory);
            }
            return Ok(());
        }
        if packets {
            if !peers.is_empty() || !own_packets.is_empty() {
                return refuse(
                    "MSCCL++ unpacks packets to this rank's memory, or forwards them to peers' \
                     packets, and nothing else",
                );
            }
            for to in own {
                self.data(Name::UnpackPackets, (chunks, &from, &[to]), memory);
            }
            for to in peers_packets.chunks(caps::OP_BUFFERS) {
                self.data(Name::ReadPutPackets, (chunks, &from, to), memory);
            }
            self.sync = true;
            return Ok(());
        }
        for to in own {
            self.data(Name::Copy, (chunks, &from, &[to]), memory);
        }
        for to in own_packets {
            self.data(Name::CopyPackets, (chunks, &from, &[to]), memory);
        }
        // Pair by pair.
        for (name, to) in [(Name::Put, peers), (Name::PutPackets, peers_packets)] {
            for to in to.chunks(caps::OP_BUFFERS) {
                let sources = vec![from[0]; to.len()];
                self.data(name, (chunks, &sources, to), memory);
            }
        }
        Ok(())
    }

    fn reduce(&mut self, data: Data<'_>, switch: Option<u32>) -> Result<(), String> {
        let (chunks, from, to) = data;
        let hint = switch.filter(|&id| {
            self.is_switch(id, from)
                && self.is_switch(id, to)
                && from[0].buffer != Buffer::Packets
                && to[0].buffer != Buffer::Packets
        });
        if let Some(id) = hint {
            let (_, index) = self.layout.at(&from[0]);
            let number = numbered(&mut self.channels, ChannelType::Switch, id);
            let source = switch_chunk(number, index, chunks.count);
            self.on_switch(Name::SwitchReduceStore, chunks, source, id, &to[0]);
            self.sync = true;
            return Ok(());
        }
        let sources = self.sort(from);
        let destinations = self.sort(to);
        let Some((result, copies)) = destinations.own.split_first() else {
            return Err("MSCCL++ needs a destination in this rank's plain memory".to_owned());
        };
        let Some(&first) = sources.own.first() else {
            return Err("MSCCL++ needs a source in this rank's plain memory".to_owned());
        };
        let received = &sources.own_packets;
        if !received.is_empty() && !sources.peers.is_empty() {
            return Err("MSCCL++ reduces packets or peers' memory, not both at once".to_owned());
        }
        let memory = ChannelType::Memory;
        let mut own = sources.own.clone();
        // The accumulator is one operand; for peers' memory, also where the result goes.
        let accumulates = !received.is_empty() || !sources.peers.is_empty();
        let misplaced = !sources.peers.is_empty() && letter(first.buffer) != letter(result.buffer);
        if accumulates && (own.len() > 1 || misplaced) {
            let name = if own.len() > 1 {
                Name::Reduce
            } else {
                Name::Copy
            };
            self.data(name, (chunks, &own, &[*result]), memory);
            self.sync = true;
            own = vec![*result];
        }
        let mut operands = own;
        operands.extend(received);
        operands.extend(&sources.peers);
        let mut to = vec![*result];
        let mut left = copies.to_vec();
        let packets = !received.is_empty();
        let name = if packets {
            // One local packet destination, then those of peers.
            let (one, more) = destinations
                .own_packets
                .split_at(destinations.own_packets.len().min(1));
            to.extend(one);
            to.extend(&destinations.peers_packets);
            left.extend(more);
            left.extend(&destinations.peers);
            match (one.is_empty(), destinations.peers_packets.is_empty()) {
                (true, true) => Name::ReducePackets,
                (true, false) => Name::ReduceSendPackets,
                (false, true) => Name::ReduceCopyPackets,
                (false, false) => Name::ReduceCopySendPackets,
            }
        } else {
            to.extend(&destinations.peers);
            left.extend(&destinations.own_packets);
            left.extend(&destinations.peers_packets);
            match (sources.peers.is_empty(), destinations.peers.is_empty()) {
                (true, true) => Name::Reduce,
                (true, false) => Name::ReduceSend,
                (false, true) => Name::ReadReduce,
                (false, false) => Name::ReadReduceSend,
            }
        };
        self.data(name, (chunks, &operands, &to), memory);
        self.sync = true;
        if !left.is_empty() {
            self.transfer(chunks, result, &left, None)?;
        }
        Ok(())
    }

    /// Whether the operands are one chunk of the switch's buffer on each of its members.
    fn is_switch(&self, id: u32, operands: &[Operand]) -> bool {
        let switch = &self.program.switches[id as usize];
        let same = |o: &Operand| {
            letter(o.buffer) == letter(switch.buffer)
                && (o.buffer, o.index) == (operands[0].buffer, operands[0].index)
        };
        operands.iter().all(same)
            && operands
                .iter()
                .map(|o| o.rank)
                .eq(switch.ranks.iter().copied())
    }

    fn on_switch(&mut self, name: Name, chunks: Chunks, source: Chunk, id: u32, to: &Operand) {
        let number = numbered(&mut self.channels, ChannelType::Switch, id);
        let (_, index) = self.layout.at(to);
        let (tb_id, tbg_size) = chunks.slice;
        self.push(FileOp {
            name,
            src_buff: vec![source],
            dst_buff: vec![switch_chunk(number, index, chunks.count)],
            channel_type: Some(ChannelType::Switch),
            reduce_op: (name == Name::SwitchReduceStore).then(|| "sum".into()),
            tbg_info: (tbg_size > 1).then_some(Slice { tb_id, tbg_size }),
            ..FileOp::default()
        });
    }
}

fn switch_chunk(number: u32, index: u32, size: u32) -> Chunk {
    Chunk {
        rank: None,
        letter: None,
        buffer_id: None,
        switch_channel_id: Some(number),
        index,
        size,
    }
}

/// Operands by place and kind.
struct Sorted {
    own: Vec<Operand>,
    peers: Vec<Operand>,
    own_packets: Vec<Operand>,
    peers_packets: Vec<Operand>,
}
