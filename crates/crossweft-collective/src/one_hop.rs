//! Plans in which every block goes from where it is to where it belongs in one hop.
//!
//! What goes where is read off the collective ([`Collective::content`]), so one plan of each kind does for
//! all-gather, reduce-scatter, all-to-all, broadcast, gather and scatter, and, with packets, for the reductions too.
//! Results are reduced in rank order.
//!
//! Where ranks send to each other, nobody gets far ahead: whoever is in call e + 2 has data of call e + 1 from every
//! rank that it sends to, all of which are done with call e, and memory that is written has two halves. Where data
//! flows one way, as from a root, receivers say that they have begun, and no sender leaves a call before they have:
//! that is the same bound.

use crossweft_device::packet::PacketType;
use crossweft_plan::builder::BlockBuilder;
use crossweft_plan::{Builder, Chunks, Collective, Content, InPlace, Operand, Plan, PlanError};

use crate::algorithm::{everyone, input, output, packets, peers, scratch};

/// How blocks travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As packets.
    Packets,
    /// Straight between inputs and outputs, which must be registered memory.
    Direct,
    /// The same, written by who has them.
    Push,
    /// Through scratch memory of the sender's, in so many parts, one behind the other.
    Staged(u32),
}

/// The plan `name` of `collective`, for `ranks` ranks with `blocks` thread blocks each.
pub(crate) fn plan(
    name: &str,
    collective: Collective,
    way: Way,
    ranks: u32,
    blocks: u32,
) -> Result<Plan, PlanError> {
    let flow = Flow::new(collective, ranks);
    // Thread blocks share out chunks where slots are used again: a shorter chunk's slices lie elsewhere, over
    // those of another thread block.
    let (parts, chunks) = match way {
        Way::Staged(parts) => (parts, parts.saturating_mul(blocks)),
        _ => (1, 1),
    };
    let mut b = Builder::new(name, collective, ranks, blocks, chunks);
    if ranks > 1 {
        b = match way {
            Way::Packets => b.packets(flow.packet_slots(), PacketType::Ll16),
            Way::Staged(_) => b.scratch(flow.staged_blocks() * blocks * parts.min(2), true),
            // Peers read from inputs for as long as outputs are written.
            Way::Direct | Way::Push if collective == Collective::AllToAll => {
                b.in_place(InPlace::Forbidden)
            }
            Way::Direct | Way::Push => b,
        };
    }
    let links = Links::new(&mut b, &flow, way, blocks);
    for rank in 0..ranks {
        for block in 0..blocks {
            let mut ops = Ops {
                flow: &flow,
                rank,
                block: (block, blocks),
                slice: (block, blocks),
                chunk: 0,
                chunks,
                links: &links.0[block as usize][rank as usize],
                ops: b.at(rank, block),
            };
            match way {
                Way::Packets => ops.packets(),
                Way::Direct if flow.pushes() => ops.push(),
                Way::Push => ops.push(),
                Way::Direct => ops.pull(),
                Way::Staged(_) => ops.staged(parts),
            }
        }
    }
    b.finish()
}

/// A block of a rank's input or output, as `(rank, block)`.
type Block = (u32, u32);

/// Which blocks of inputs go to which blocks of outputs.
struct Flow {
    collective: Collective,
    ranks: u32,
    input_blocks: u32,
    output_blocks: u32,
    /// By rank and block of its output, what that is made of, in rank order.
    sources: Vec<Vec<Vec<Block>>>,
    /// By rank and block of its input, where that goes, its own rank first.
    targets: Vec<Vec<Vec<Block>>>,
    /// By sender and receiver.
    sends: Vec<Vec<bool>>,
}

impl Flow {
    fn new(collective: Collective, ranks: u32) -> Self {
        let (input_blocks, output_blocks) = collective.blocks(ranks).unwrap_or((1, 1));
        let n = ranks as usize;
        let mut flow = Self {
            collective,
            ranks,
            input_blocks,
            output_blocks,
            sources: vec![vec![Vec::new(); output_blocks as usize]; n],
            targets: vec![vec![Vec::new(); input_blocks as usize]; n],
            sends: vec![vec![false; n]; n],
        };
        for rank in 0..ranks {
            for block in 0..output_blocks {
                let sources = match collective.content(ranks, rank, block) {
                    Content::Any => Vec::new(),
                    Content::Reduction { block } => (0..ranks).map(|q| (q, block)).collect(),
                    Content::Inputs(inputs) => inputs.iter().map(|i| (i.rank, i.block)).collect(),
                };
                for &(from, its) in &sources {
                    flow.targets[from as usize][its as usize].push((rank, block));
                    flow.sends[from as usize][rank as usize] = true;
                }
                flow.sources[rank as usize][block as usize] = sources;
            }
        }
        for (from, blocks) in (0..).zip(&mut flow.targets) {
            for targets in blocks {
                targets.sort_by_key(|(rank, block)| ((rank + ranks - from) % ranks, *block));
            }
        }
        flow
    }

    fn sources(&self, (rank, block): Block) -> &[Block] {
        &self.sources[rank as usize][block as usize]
    }

    fn targets(&self, (rank, block): Block) -> &[Block] {
        &self.targets[rank as usize][block as usize]
    }

    fn sends(&self, from: u32, to: u32) -> bool {
        self.sends[from as usize][to as usize]
    }

    /// Whether data goes from one to the other, and none back.
    fn one_way(&self, from: u32, to: u32) -> bool {
        self.sends(from, to) && !self.sends(to, from)
    }

    /// The packet slot of a block of output's rank for what comes from rank `from`.
    fn packet_slot(&self, target: Block, from: u32) -> u32 {
        match self.collective.reduces() {
            true => from,
            false => target.1,
        }
    }

    fn packet_slots(&self) -> u32 {
        match self.collective.reduces() {
            true => self.ranks,
            false => self.output_blocks,
        }
    }

    /// Blocks of an input that may go to other ranks: all but a rank's own, where that goes nowhere.
    fn staged_blocks(&self) -> u32 {
        let of = |rank: u32| {
            let goes = |block: &u32| self.targets((rank, *block)).iter().any(|to| to.0 != rank);
            (0..self.input_blocks).filter(goes).count() as u32
        };
        (0..self.ranks).map(of).max().unwrap_or(0)
    }

    /// Which of those a rank's block is.
    fn staged_as(&self, rank: u32, block: u32) -> u32 {
        let goes = |block: &u32| self.targets((rank, *block)).iter().any(|to| to.0 != rank);
        (0..block).filter(goes).count() as u32
    }

    /// Whether senders write, rather than receivers read. In place peers can only reach the larger buffer,
    /// which has the smaller one in it; where either would do, reading spreads a root's work over the ranks.
    fn pushes(&self) -> bool {
        self.collective.is_own_block().0
    }
}

/// By thread block, rank and peer, the channel there.
struct Links(Vec<Vec<Vec<Option<u32>>>>);

impl Links {
    fn new(b: &mut Builder, flow: &Flow, way: Way, blocks: u32) -> Self {
        let ranks = flow.ranks as usize;
        let mut links = vec![vec![vec![None; ranks]; ranks]; blocks as usize];
        // Packets are all the synchronisation that there is, where they come back.
        let talk = |from, to| match way {
            Way::Packets => flow.one_way(from, to),
            _ => flow.sends(from, to),
        };
        // Block after block, as kernels that run such plans in one piece find them.
        for of_block in &mut links {
            for low in 0..flow.ranks {
                for high in low + 1..flow.ranks {
                    if talk(low, high) || talk(high, low) {
                        let (of_low, of_high) = b.connect(low, high);
                        of_block[low as usize][high as usize] = Some(of_low);
                        of_block[high as usize][low as usize] = Some(of_high);
                    }
                }
            }
        }
        Self(links)
    }
}

/// One thread block's operations.
struct Ops<'a> {
    flow: &'a Flow,
    rank: u32,
    /// Which thread block, of how many.
    block: (u32, u32),
    /// Its slice of the current chunk, of so many, of every block of input and output.
    slice: (u32, u32),
    chunk: u32,
    chunks: u32,
    links: &'a [Option<u32>],
    ops: BlockBuilder<'a>,
}

impl Ops<'_> {
    fn packets(&mut self) {
        let (flow, rank) = (self.flow, self.rank);
        self.begin();
        for block in everyone(rank, flow.input_blocks) {
            let to = self
                .peers_that_take(block)
                .map(|target| packets(target.0, flow.packet_slot(target, rank)));
            self.send(block, to.collect());
        }
        self.receive(|target, (from, _)| packets(rank, flow.packet_slot(target, from)));
        self.end();
    }

    /// Two slots of a block and thread block are used in turn, as halves are: whoever writes part p + 2 has heard
    /// that part p was read.
    fn staged(&mut self, parts: u32) {
        let (flow, rank, (own, blocks)) = (self.flow, self.rank, self.block);
        self.slice = (0, 1);
        let in_turn = parts.min(2);
        for part in 0..parts {
            self.chunk = part * blocks + own;
            let slot = |from: u32, block: u32| {
                (flow.staged_as(from, block) * blocks + own) * in_turn + part % in_turn
            };
            self.begin();
            self.stage(|block| slot(rank, block));
            self.signal(|peer| flow.sends(rank, peer));
            // What stays here is copied while others use the links: by half of the thread blocks before, by half after.
            let stays_first = own % 2 == 0;
            if stays_first {
                self.keep();
            }
            self.wait(|peer| flow.sends(peer, rank));
            self.fetch(slot);
            if !stays_first {
                self.keep();
            }
            self.end();
        }
    }

    /// Copies what others get to slots of this rank's.
    fn stage(&mut self, slot: impl Fn(u32) -> u32) {
        let rank = self.rank;
        for block in everyone(rank, self.flow.input_blocks) {
            if self.peers_that_take(block).next().is_some() {
                self.send(block, vec![scratch(rank, slot(block))]);
            }
        }
    }

    /// Makes what peers have a part in, from their slots.
    fn fetch(&mut self, slot: impl Fn(u32, u32) -> u32) {
        let (flow, rank) = (self.flow, self.rank);
        let stays = |target| matches!(flow.sources(target), [(from, _)] if *from == rank);
        self.receive_if(
            |target| !stays(target),
            |_, (from, block)| scratch(from, slot(from, block)),
        );
    }

    /// Copies what stays on this rank.
    fn keep(&mut self) {
        let (flow, rank) = (self.flow, self.rank);
        let stays = |target| matches!(flow.sources(target), [(from, _)] if *from == rank);
        self.receive_if(stays, |_, (from, block)| input(from, block));
    }

    /// Inputs are ready; then they were read. What stays on this rank is copied last: in place that is a write of
    /// what peers read.
    fn pull(&mut self) {
        let (flow, rank) = (self.flow, self.rank);
        self.signal(|peer| flow.sends(rank, peer));
        self.wait(|peer| flow.sends(peer, rank));
        let stays = |target| matches!(flow.sources(target), [(from, _)] if *from == rank);
        self.receive_if(
            |target| !stays(target),
            |_, (from, block)| input(from, block),
        );
        self.signal(|peer| flow.sends(peer, rank));
        self.wait(|peer| flow.sends(rank, peer));
        self.receive_if(stays, |_, (from, block)| input(from, block));
    }

    /// Outputs are free; then they are complete.
    fn push(&mut self) {
        let (flow, rank) = (self.flow, self.rank);
        self.signal(|peer| flow.sends(peer, rank));
        self.wait(|peer| flow.sends(rank, peer));
        for block in everyone(rank, flow.input_blocks) {
            let to = flow.targets((rank, block)).iter();
            self.send(block, to.map(|&(q, block)| output(q, block)).collect());
        }
        self.signal(|peer| flow.sends(rank, peer));
        self.wait(|peer| flow.sends(peer, rank));
    }

    /// Tells those who get nothing back that this rank has begun, and so has ended every call before.
    fn begin(&mut self) {
        let (flow, rank) = (self.flow, self.rank);
        self.signal(|peer| flow.one_way(peer, rank));
    }

    /// Waits for that.
    fn end(&mut self) {
        let (flow, rank) = (self.flow, self.rank);
        self.wait(|peer| flow.one_way(rank, peer));
    }

    /// Where a block of input goes on other ranks.
    fn peers_that_take(&self, block: u32) -> impl Iterator<Item = Block> {
        let rank = self.rank;
        let targets = self.flow.targets((rank, block)).iter().copied();
        targets.filter(move |target| target.0 != rank)
    }

    fn send(&mut self, block: u32, to: Vec<Operand>) {
        if !to.is_empty() {
            let from = input(self.rank, self.place(block));
            self.ops.transfer(self.part(), from, to);
        }
    }

    /// Where the current chunk of a block lies.
    fn place(&self, block: u32) -> u32 {
        block * self.chunks + self.chunk
    }

    fn part(&self) -> Chunks {
        Chunks::new(self.chunk, 1).sliced(self.slice.0, self.slice.1)
    }

    /// Makes each block of output; `place` says where a peer's block is, as far as it goes to a given one.
    fn receive(&mut self, place: impl Fn(Block, Block) -> Operand) {
        self.receive_if(|_| true, place);
    }

    /// [`receive`](Self::receive) for some blocks.
    fn receive_if(
        &mut self,
        is_one: impl Fn(Block) -> bool,
        place: impl Fn(Block, Block) -> Operand,
    ) {
        for block in everyone(self.rank, self.flow.output_blocks) {
            let target = (self.rank, block);
            if !is_one(target) {
                continue;
            }
            let sources = self.flow.sources(target).iter();
            let from: Vec<_> = sources
                .map(|&source| match source.0 == self.rank {
                    true => input(self.rank, self.place(source.1)),
                    false => place(target, source),
                })
                .collect();
            let (part, to) = (self.part(), vec![output(self.rank, self.place(block))]);
            match from[..] {
                [] => &mut self.ops,
                [one] => self.ops.transfer(part, one, to),
                _ => self.ops.reduce_last(part, from, to),
            };
        }
    }

    fn signal(&mut self, whom: impl Fn(u32) -> bool) {
        let channels = self.channels(whom);
        if !channels.is_empty() {
            self.ops.signal(&channels);
        }
    }

    fn wait(&mut self, whom: impl Fn(u32) -> bool) {
        let channels = self.channels(whom);
        if !channels.is_empty() {
            self.ops.wait(&channels);
        }
    }

    fn channels(&self, whom: impl Fn(u32) -> bool) -> Vec<u32> {
        peers(self.rank, self.flow.ranks)
            .filter(|peer| whom(*peer))
            .filter_map(|peer| self.links[peer as usize])
            .collect()
    }
}
