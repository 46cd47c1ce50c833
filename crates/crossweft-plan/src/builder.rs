//! How algorithms are written: a program over all ranks at once.

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;

use crate::plan::{
    Channel, ChannelKind, Chunks, Collective, InPlace, Op, Operand, Plan, RankProgram, Switch,
};
use crate::validate::{PlanError, blocks_fit, ranks_fit};

/// Builds a plan operation by operation.
#[derive(Clone, Debug)]
pub struct Builder {
    plan: Plan,
}

impl Builder {
    /// Fails if no plan can have so many ranks and thread blocks, without taking memory for them.
    ///
    /// # Errors
    /// As [`finish`](Self::finish) would, of a plan of that name.
    pub fn check_numbers(name: &str, ranks: u32, blocks: u32) -> Result<(), PlanError> {
        let fit = ranks_fit(ranks as usize).and_then(|()| blocks_fit(0, blocks as usize));
        fit.map_err(|reason| PlanError::Plan {
            plan: name.to_owned(),
            reason,
        })
    }

    /// A plan for `ranks` ranks with `blocks` thread blocks each and messages in `chunks` chunks.
    #[must_use]
    pub fn new(name: &str, collective: Collective, ranks: u32, blocks: u32, chunks: u32) -> Self {
        let program = RankProgram {
            blocks: vec![Vec::new(); blocks as usize],
            ..RankProgram::default()
        };
        let blocks_of_message = collective.blocks(ranks).unwrap_or((1, 1));
        Self {
            plan: Plan {
                name: name.to_owned(),
                collective,
                reduce_op: None,
                packet: PacketType::Ll16,
                in_place: InPlace::Any,
                chunks,
                equal_chunks: false,
                input_blocks: blocks_of_message.0,
                output_blocks: blocks_of_message.1,
                outputs: Vec::new(),
                message_bytes: (0, u64::MAX),
                scratch_slots: 0,
                double_scratch: false,
                packet_slots: 0,
                ranks: vec![program; ranks as usize],
            },
        }
    }

    /// Fixes the reduce operation; without this the caller chooses.
    #[must_use]
    pub fn reduce_op(mut self, op: ReduceOp) -> Self {
        self.plan.reduce_op = Some(op);
        self
    }

    /// Asks for slots of plain scratch memory, `double` for two halves in turn.
    #[must_use]
    pub fn scratch(mut self, slots: u32, double: bool) -> Self {
        (self.plan.scratch_slots, self.plan.double_scratch) = (slots, double);
        self
    }

    /// Asks for slots of packet memory.
    #[must_use]
    pub fn packets(mut self, slots: u32, packet: PacketType) -> Self {
        (self.plan.packet_slots, self.plan.packet) = (slots, packet);
        self
    }

    /// Makes a memory channel between ranks `a` and `b`; returns its number on each.
    ///
    /// # Panics
    /// If a rank is not below the world size; ranks are the algorithm's own loop variables.
    pub fn connect(&mut self, a: u32, b: u32) -> (u32, u32) {
        self.connect_by(ChannelKind::Memory, a, b)
    }

    /// Makes a port channel between ranks `a` and `b`; returns its number on each.
    ///
    /// # Panics
    /// As for [`connect`](Self::connect).
    pub fn connect_port(&mut self, a: u32, b: u32) -> (u32, u32) {
        self.connect_by(ChannelKind::Port, a, b)
    }

    fn connect_by(&mut self, kind: ChannelKind, a: u32, b: u32) -> (u32, u32) {
        let mut end = |rank: u32, peer: u32| {
            let channels = &mut self.plan.ranks[rank as usize].channels;
            channels.push(Channel { peer, kind });
            channels.len() as u32 - 1
        };
        (end(a, b), end(b, a))
    }

    /// Says how input and output may lie; [`InPlace::Any`] without this.
    #[must_use]
    pub fn in_place(mut self, in_place: InPlace) -> Self {
        self.plan.in_place = in_place;
        self
    }

    /// Sets the number of blocks of input and output, for [`Collective::Test`].
    #[must_use]
    pub fn blocks_of_message(mut self, input: u32, output: u32) -> Self {
        (self.plan.input_blocks, self.plan.output_blocks) = (input, output);
        self
    }

    /// Adds a semaphore to `rank` and returns its number.
    ///
    /// # Panics
    /// As for [`connect`](Self::connect).
    pub fn semaphore(&mut self, rank: u32, initial: u32) -> u32 {
        let semaphores = &mut self.plan.ranks[rank as usize].semaphores;
        semaphores.push(initial);
        semaphores.len() as u32 - 1
    }

    /// Adds a switch to `rank` and returns its number.
    ///
    /// # Panics
    /// As for [`connect`](Self::connect).
    pub fn switch(&mut self, rank: u32, switch: Switch) -> u32 {
        let switches = &mut self.plan.ranks[rank as usize].switches;
        switches.push(switch);
        switches.len() as u32 - 1
    }

    /// Appends to thread block `block` of `rank`.
    ///
    /// # Panics
    /// If there is no such block; as for [`connect`](Self::connect).
    pub fn at(&mut self, rank: u32, block: u32) -> BlockBuilder<'_> {
        BlockBuilder {
            ops: &mut self.plan.ranks[rank as usize].blocks[block as usize],
        }
    }

    /// The plan, if its structure is sound.
    ///
    /// # Errors
    /// [`PlanError`] with the operation at fault.
    pub fn finish(self) -> Result<Plan, PlanError> {
        self.plan.validate()?;
        Ok(self.plan)
    }
}

/// Appends operations to one thread block.
#[derive(Debug)]
pub struct BlockBuilder<'a> {
    ops: &'a mut Vec<Op>,
}

impl BlockBuilder<'_> {
    /// Copies `chunks`.
    pub fn transfer(&mut self, chunks: Chunks, from: Operand, to: Vec<Operand>) -> &mut Self {
        self.ops.push(Op::Move {
            chunks,
            from,
            to,
            switch: None,
        });
        self
    }

    /// Reduces `chunks` to a partial result.
    pub fn reduce(&mut self, chunks: Chunks, from: Vec<Operand>, to: Vec<Operand>) -> &mut Self {
        self.ops.push(Op::Reduce {
            chunks,
            from,
            to,
            last: false,
            switch: None,
        });
        self
    }

    /// Reduces `chunks` to the final result.
    pub fn reduce_last(
        &mut self,
        chunks: Chunks,
        from: Vec<Operand>,
        to: Vec<Operand>,
    ) -> &mut Self {
        self.ops.push(Op::Reduce {
            chunks,
            from,
            to,
            last: true,
            switch: None,
        });
        self
    }

    /// Signals peers.
    pub fn signal(&mut self, channels: &[u32]) -> &mut Self {
        self.ops.push(Op::Signal {
            channels: channels.to_vec(),
            relaxed: false,
        });
        self
    }

    /// Waits for peers.
    pub fn wait(&mut self, channels: &[u32]) -> &mut Self {
        self.ops.push(Op::Wait {
            channels: channels.to_vec(),
            relaxed: false,
        });
        self
    }

    /// Any operation, as it is.
    pub fn op(&mut self, op: Op) -> &mut Self {
        self.ops.push(op);
        self
    }

    /// Meets other blocks of the rank.
    pub fn barrier(&mut self, id: u32, blocks: u32) -> &mut Self {
        self.ops.push(Op::Barrier { id, blocks });
        self
    }

    /// Meets the other threads of the block.
    pub fn sync(&mut self) -> &mut Self {
        self.ops.push(Op::Sync);
        self
    }
}
