//! The executor's op loop: hand-built programs, each rank on a thread of its own, in one process.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;

use common::{Guarded, HostBlock, Meeting, Random, TellIfPanicking, difference, reference};
use crossweft_device::executor::run_block;
use crossweft_device::extent::chunk_bytes;
use crossweft_device::packet::flag_of;
use crossweft_device::program::{
    BASES_AT, BlockOps, COUNTER_STRIDE, Launch, Op, OpKind, Operand, Program, SPACES, Space, flags,
};
use crossweft_device::reduce::HostReducer;
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{DataType, Memory, Raw, ReduceOp, Stopped};

const MAX_BYTES: u64 = 1000;

/// One rank's plan, block by block.
#[derive(Default)]
struct Plan {
    blocks: Vec<Vec<Op>>,
    operands: Vec<Operand>,
    links: Vec<u32>,
}

/// What an op moves: chunks, and a slice of them.
#[derive(Clone, Copy)]
struct Part {
    chunk: u32,
    slice: u32,
    slices: u32,
}

impl Plan {
    fn push(&mut self, block: usize, op: Op) {
        self.blocks
            .resize_with(self.blocks.len().max(block + 1), Vec::new);
        self.blocks[block].push(op);
    }

    fn op(kind: OpKind) -> Op {
        Op {
            kind,
            index: 0,
            chunk: 0,
            chunks: 1,
            slice: 0,
            slices: 1,
            operands_at: 0,
            sources: 0,
            destinations: 0,
            links_at: 0,
            links: 0,
            flags: 0,
            unit: 0,
        }
    }

    fn data(&mut self, block: usize, kind: OpKind, part: Part, from: &[Operand], to: &[Operand]) {
        let operands_at = self.operands.len() as u32;
        self.operands.extend(from.iter().chain(to));
        let op = Op {
            chunk: part.chunk,
            slice: part.slice,
            slices: part.slices,
            operands_at,
            sources: from.len() as u32,
            destinations: to.len() as u32,
            flags: flags::LAST,
            ..Self::op(kind)
        };
        self.push(block, op);
    }

    fn linked(&mut self, block: usize, kind: OpKind, links: impl IntoIterator<Item = u32>) {
        let links_at = self.links.len() as u32;
        self.links.extend(links);
        let op = Op {
            links_at,
            links: self.links.len() as u32 - links_at,
            ..Self::op(kind)
        };
        self.push(block, op);
    }
}

fn at(space: Space, rank: u32, index: u32, peer: u32) -> Operand {
    Operand {
        space,
        rank,
        block: 0,
        index,
        peer,
    }
}

/// A rank's memory. Semaphore `b * ranks + peer` is block `b`'s with `peer`.
struct Rank {
    input: Guarded,
    output: Guarded,
    scratch: Guarded,
    packets: Guarded,
    counters: Guarded,
    /// Per semaphore: the counter that is signalled, the count of waits.
    inbound: Guarded,
    expected: Guarded,
}

/// Bytes of a semaphore's counter with its tags.
const LINE: usize = 24;

/// Bytes from the registered base to the buffers.
const OFFSET: u64 = 48;
const SLOTS: u64 = 8;
const HALF: u64 = SLOTS * (MAX_BYTES + 24);

impl Rank {
    fn new(semaphores: usize, epoch: u64) -> Self {
        let zeroed = |bytes: usize| Guarded::holding(&vec![0; bytes], 0);
        let mut this = Self {
            input: Guarded::new((OFFSET + MAX_BYTES) as usize, 0),
            output: Guarded::new((OFFSET + MAX_BYTES) as usize, 0),
            scratch: zeroed(2 * HALF as usize),
            packets: zeroed(4 * HALF as usize),
            counters: zeroed(4 * COUNTER_STRIDE as usize),
            inbound: zeroed(LINE * semaphores),
            expected: zeroed(8 * semaphores),
        };
        // SAFETY: the first word of the counters.
        unsafe { Raw.store(this.counters.addr(), epoch) };
        this
    }

    fn bases(&mut self) -> [u64; SPACES as usize] {
        [
            self.input.addr(),
            self.output.addr(),
            self.scratch.addr(),
            self.packets.addr(),
        ]
    }

    fn intact(&self) -> bool {
        [
            &self.input,
            &self.output,
            &self.scratch,
            &self.packets,
            &self.counters,
            &self.inbound,
            &self.expected,
        ]
        .iter()
        .all(|memory| memory.intact())
    }
}

/// A program's tables, which it holds the addresses of.
struct Tables {
    program: Program,
    _tables: Vec<u64>,
    _semaphores: Vec<Semaphore>,
}

/// Appends what `entries` are made of; returns where.
fn put<T: Copy>(words: &mut Vec<u64>, entries: &[T]) -> u64 {
    let (at, bytes) = (words.len(), size_of_val(entries));
    words.resize(at + bytes.div_ceil(8), 0);
    // SAFETY: the room was just made.
    unsafe {
        let to = words.as_mut_ptr().add(at).cast::<u8>();
        std::ptr::copy_nonoverlapping(entries.as_ptr().cast(), to, bytes);
    }
    at as u64 * 8
}

/// The tables of one block, `stride` bytes, with all operands and links of its plan.
fn tables_of(plan: &Plan, block: &[Op], bases: &[u64], stride: u64) -> Vec<u64> {
    let mut words = Vec::new();
    let ops_at = BASES_AT + size_of_val(bases) as u64;
    let count = block.len() as u32;
    let ops_at_word = ops_at as u32;
    put(
        &mut words,
        &[BlockOps {
            count,
            ops_at: ops_at_word,
        }],
    );
    words.resize(BASES_AT as usize / 8, 0);
    put(&mut words, bases);
    let operands_at = ops_at + size_of_val(block) as u64;
    let links_at = operands_at + size_of_val(plan.operands.as_slice()) as u64;
    let ops: Vec<_> = block
        .iter()
        .map(|op| Op {
            operands_at: operands_at as u32 + op.operands_at * size_of::<Operand>() as u32,
            links_at: match op.kind {
                OpKind::Barrier => op.links_at,
                _ => links_at as u32 + 4 * op.links_at,
            },
            ..*op
        })
        .collect();
    assert_eq!(put(&mut words, &ops), ops_at);
    assert_eq!(put(&mut words, &plan.operands), operands_at);
    assert_eq!(put(&mut words, &plan.links), links_at);
    assert!(words.len() as u64 * 8 <= stride);
    words.resize(stride as usize / 8, 0);
    words
}

fn tables(plan: &Plan, rank: u32, ranks: &mut [Rank], chunks: u32, element: u32) -> Tables {
    let count = ranks.len() as u32;
    let blocks = &plan.blocks;
    let mut semaphores = Vec::new();
    for block in 0..blocks.len() as u32 {
        for peer in 0..count {
            let word = |with: u32| u64::from(block * count + with) * 8;
            semaphores.push(Semaphore {
                inbound: ranks[rank as usize].inbound.addr() + word(peer) * LINE as u64 / 8,
                outbound: ranks[peer as usize].inbound.addr() + word(rank) * LINE as u64 / 8,
                expected: ranks[rank as usize].expected.addr() + word(peer),
                peer,
                channel: 0,
            });
        }
    }
    let bases: Vec<_> = ranks.iter_mut().flat_map(Rank::bases).collect();
    let stride = 4096;
    let tables: Vec<_> = blocks
        .iter()
        .flat_map(|block| tables_of(plan, block, &bases, stride))
        .collect();
    Tables {
        program: Program {
            tables: tables.as_ptr() as u64,
            stride,
            semaphores: semaphores.as_ptr() as u64,
            ports: 0,
            memories: 0,
            counters: ranks[rank as usize].counters.addr(),
            scratch_half: HALF,
            packets_half: 2 * HALF,
            rank,
            ranks: count,
            block_count: blocks.len() as u32,
            barriers: 0,
            chunks,
            element,
        },
        _tables: tables,
        _semaphores: semaphores,
    }
}

/// What a job runs.
#[derive(Clone, Copy)]
struct Job {
    ranks: u32,
    blocks: u32,
    dtype: DataType,
    op: ReduceOp,
    /// Chunks of the message.
    chunks: u32,
    epoch: u64,
    launches: u64,
    /// Whether the blocks of a rank have threads of their own, or run one after another.
    threaded: bool,
    in_place: bool,
    /// Whether to reduce (else rank 0's input is what everyone gets).
    reduces: bool,
}

impl Job {
    fn elements(&self, launch: u64) -> usize {
        let most = MAX_BYTES / self.dtype.size() as u64;
        1 + (launch * 37 % most) as usize
    }

    fn data(&self, launch: u64, rank: u32) -> Vec<u8> {
        let bytes = self.elements(launch) * self.dtype.size();
        Random(launch << 8 | u64::from(rank)).bytes(bytes)
    }

    fn expected(&self, launch: u64) -> Vec<u8> {
        let inputs: Vec<_> = (0..self.ranks).map(|r| self.data(launch, r)).collect();
        if self.reduces {
            reference(self.dtype, self.op, self.ranks, &inputs)
        } else {
            inputs[0].clone()
        }
    }

    /// All launches of one block of a rank, or of all of its blocks. `first` fills the input before
    /// a launch and looks at the output after it.
    fn work(
        &self,
        program: &Program,
        at: Launch,
        mine: &[u32],
        everyone: &Meeting,
        failed: &AtomicBool,
    ) {
        let _tell = TellIfPanicking(failed);
        let block = HostBlock {
            failed: Some(failed),
            ..HostBlock::ALONE
        };
        let reducer = HostReducer::new(self.dtype, self.op);
        let first = mine[0] == 0;
        for number in 0..self.launches {
            let bytes = self.elements(number) * self.dtype.size();
            let launch = Launch {
                bytes: bytes as u64,
                ..at
            };
            if first {
                let data = self.data(number, program.rank);
                // SAFETY: the input has room for the largest message; peers read it only between
                // this rank's signals.
                unsafe { Raw.copy(launch.input, data.as_ptr() as u64, bytes as u64) };
            }
            everyone.wait(failed);
            for &index in mine {
                // SAFETY: the tables are laid out for these buffers; launches follow one another.
                let outcome = unsafe { run_block(&block, &reducer, program, &launch, index) };
                assert_eq!(outcome, Ok(()), "launch {number}, rank {}", program.rank);
            }
            everyone.wait(failed);
            if first {
                let mut got = vec![0; bytes];
                // SAFETY: as above; this launch is over.
                unsafe { Raw.copy(got.as_mut_ptr() as u64, launch.output, bytes as u64) };
                let wrong = difference(self.dtype, &got, &self.expected(number));
                assert_eq!(wrong, None, "launch {number}, rank {}", program.rank);
            }
        }
    }

    fn run(&self, plan: impl Fn(&Job, u32) -> Plan) -> Vec<Rank> {
        let semaphores = (self.blocks * self.ranks) as usize;
        let mut ranks: Vec<_> = (0..self.ranks)
            .map(|_| Rank::new(semaphores, self.epoch))
            .collect();
        let element = self.dtype.size() as u32;
        let tables: Vec<_> = (0..self.ranks)
            .map(|r| tables(&plan(self, r), r, &mut ranks, self.chunks, element))
            .collect();
        let launches: Vec<_> = ranks
            .iter_mut()
            .map(|rank| {
                let (input, output) = (rank.input.addr() + OFFSET, rank.output.addr() + OFFSET);
                Launch {
                    input,
                    output: if self.in_place { input } else { output },
                    input_offset: OFFSET,
                    output_offset: OFFSET,
                    bytes: 0,
                }
            })
            .collect();
        let all: Vec<u32> = (0..self.blocks).collect();
        let share = if self.threaded { 1 } else { all.len() };
        let failed = &AtomicBool::new(false);
        let meetings: Vec<_> = (0..self.ranks)
            .map(|_| Meeting {
                parties: (all.len() / share) as u64,
                arrived: AtomicU64::new(0),
            })
            .collect();
        thread::scope(|scope| {
            for ((tables, at), everyone) in tables.iter().zip(&launches).zip(&meetings) {
                for mine in all.chunks(share) {
                    scope.spawn(move || self.work(&tables.program, *at, mine, everyone, failed));
                }
            }
        });
        for rank in &ranks {
            assert!(rank.intact());
            assert_eq!(rank.counters.word(0), self.epoch + self.launches);
            // Nobody is left behind in the count of blocks that left.
            assert_eq!(rank.counters.word(COUNTER_STRIDE as usize / 8), 0);
        }
        ranks
    }
}

const BASIC: Job = Job {
    ranks: 2,
    blocks: 1,
    dtype: DataType::I32,
    op: ReduceOp::Sum,
    chunks: 1,
    epoch: 1,
    launches: 100,
    threaded: true,
    in_place: false,
    reduces: true,
};

/// Everyone sends everything to everyone as packets, and reduces in rank order.
fn one_shot(job: &Job, me: u32) -> Plan {
    let mut plan = Plan::default();
    for block in 0..job.blocks {
        let part = Part {
            chunk: 0,
            slice: block,
            slices: job.blocks,
        };
        let peers = (0..job.ranks).filter(|&r| r != me);
        let input = at(Space::Input, me, 0, me);
        let sent: Vec<_> = peers.map(|r| at(Space::Packets, r, me, r)).collect();
        plan.data(block as usize, OpKind::Move, part, &[input], &sent);
        let from: Vec<_> = (0..job.ranks)
            .map(|r| match r == me {
                true => input,
                false => at(Space::Packets, me, r, r),
            })
            .collect();
        let output = at(Space::Output, me, 0, me);
        plan.data(block as usize, OpKind::Reduce, part, &from, &[output]);
    }
    plan
}

/// Each rank reduces one chunk from everyone's input into everyone's output; signals around it.
fn two_shot(job: &Job, me: u32) -> Plan {
    let mut plan = Plan::default();
    for block in 0..job.blocks {
        let part = Part {
            chunk: me,
            slice: block,
            slices: job.blocks,
        };
        let links = || {
            let peers = (0..job.ranks).filter(move |&r| r != me);
            peers.map(move |r| block * job.ranks + r)
        };
        let of_all = |space| -> Vec<_> { (0..job.ranks).map(|r| at(space, r, me, r)).collect() };
        let (from, to) = (of_all(Space::Input), of_all(Space::Output));
        let block = block as usize;
        plan.linked(block, OpKind::Signal, links());
        plan.linked(block, OpKind::Wait, links());
        plan.data(block, OpKind::Reduce, part, &from, &to);
        plan.linked(block, OpKind::Signal, links());
        plan.linked(block, OpKind::Wait, links());
    }
    plan
}

/// The same through scratch memory in two halves: inputs and outputs need not be mapped by peers.
fn two_shot_staged(job: &Job, me: u32) -> Plan {
    let mut plan = Plan::default();
    let ranks = job.ranks;
    for block in 0..job.blocks {
        let part = |chunk| Part {
            chunk,
            slice: block,
            slices: job.blocks,
        };
        let peers = || (0..ranks).filter(move |&r| r != me);
        let links = || peers().map(move |r| block * ranks + r);
        let b = block as usize;
        // Each peer's chunk into slot `me` of its scratch.
        for r in peers() {
            let from = at(Space::Input, me, r, me);
            plan.data(
                b,
                OpKind::Move,
                part(r),
                &[from],
                &[at(Space::Scratch, r, me, r)],
            );
        }
        plan.linked(b, OpKind::Signal, links());
        plan.linked(b, OpKind::Wait, links());
        let from: Vec<_> = (0..ranks)
            .map(|r| match r == me {
                true => at(Space::Input, me, me, me),
                false => at(Space::Scratch, me, r, r),
            })
            .collect();
        // The result into my output and slot `ranks + me` of everyone else's scratch.
        let mut to = vec![at(Space::Output, me, me, me)];
        to.extend(peers().map(|r| at(Space::Scratch, r, ranks + me, r)));
        plan.data(b, OpKind::Reduce, part(me), &from, &to);
        plan.linked(b, OpKind::Signal, links());
        plan.linked(b, OpKind::Wait, links());
        for r in peers() {
            let from = at(Space::Scratch, me, ranks + r, r);
            plan.data(
                b,
                OpKind::Move,
                part(r),
                &[from],
                &[at(Space::Output, me, r, me)],
            );
        }
        plan.push(b, Plan::op(OpKind::Sync));
    }
    plan
}

/// Rank 0's input goes round as packets until it is back at rank 0.
fn round(job: &Job, me: u32) -> Plan {
    let mut plan = Plan::default();
    let (before, after) = ((me + job.ranks - 1) % job.ranks, (me + 1) % job.ranks);
    let whole = Part {
        chunk: 0,
        slice: 0,
        slices: 1,
    };
    let arrives = at(Space::Packets, me, 3, before);
    let leaves = at(Space::Packets, after, 3, after);
    let from = if me == 0 {
        at(Space::Input, 0, 0, 0)
    } else {
        arrives
    };
    plan.data(0, OpKind::Move, whole, &[from], &[leaves]);
    plan.data(
        0,
        OpKind::Move,
        whole,
        &[arrives],
        &[at(Space::Output, me, 0, me)],
    );
    plan
}

#[test]
fn one_shot_with_packets() {
    for ranks in 2..=4 {
        for (dtype, op) in [
            (DataType::F32, ReduceOp::Sum),
            (DataType::U8, ReduceOp::Avg),
            (DataType::Bf16, ReduceOp::Max),
        ] {
            let job = Job {
                ranks,
                dtype,
                op,
                ..BASIC
            };
            job.run(one_shot);
        }
    }
}

#[test]
fn one_shot_across_the_wrap_of_flags_and_scrubs() {
    for epoch in [(1 << 32) - 4, (1 << 30) - 2, (1 << 31) - 1] {
        for ranks in 2..=4 {
            let job = Job {
                ranks,
                epoch,
                in_place: ranks == 3,
                ..BASIC
            };
            job.run(one_shot);
        }
    }
}

#[test]
fn one_shot_in_slices_one_block_after_another() {
    for blocks in 2..=3 {
        let job = Job {
            ranks: 3,
            blocks,
            dtype: DataType::I16,
            threaded: false,
            epoch: (1 << 30) - 2,
            ..BASIC
        };
        job.run(one_shot);
    }
}

#[test]
fn one_shot_in_slices_at_the_same_time() {
    let job = Job {
        ranks: 2,
        blocks: 3,
        dtype: DataType::U8,
        epoch: (1 << 32) - 4,
        ..BASIC
    };
    job.run(one_shot);
}

#[test]
fn two_shot_with_signals() {
    for ranks in 2..=4 {
        for blocks in 1..=2 {
            let job = Job {
                ranks,
                blocks,
                chunks: ranks,
                dtype: DataType::F16,
                op: ReduceOp::Avg,
                threaded: blocks == 2 && ranks == 2,
                epoch: (1 << 32) - 4,
                ..BASIC
            };
            job.run(two_shot);
        }
    }
}

#[test]
fn two_shot_staged_with_signals() {
    for ranks in 2..=4 {
        let job = Job {
            ranks,
            blocks: 2,
            chunks: ranks,
            dtype: DataType::F8E5M2,
            threaded: false,
            in_place: ranks == 3,
            ..BASIC
        };
        job.run(two_shot_staged);
    }
}

#[test]
fn packets_are_forwarded() {
    for ranks in 2..=4 {
        let job = Job {
            ranks,
            dtype: DataType::U8,
            reduces: false,
            epoch: (1 << 32) - 4,
            ..BASIC
        };
        job.run(round);
    }
}

#[test]
fn blocks_of_a_rank_meet_at_barriers() {
    // Each block writes its slice of the scratch memory, then reads that of the next block.
    let plan = |job: &Job, me: u32| {
        let mut plan = Plan::default();
        for block in 0..job.blocks {
            let part = |slice| Part {
                chunk: 0,
                slice,
                slices: job.blocks,
            };
            let b = block as usize;
            let (input, output) = (at(Space::Input, me, 0, me), at(Space::Output, me, 0, me));
            let scratch = at(Space::Scratch, me, 0, me);
            plan.data(b, OpKind::Move, part(block), &[input], &[scratch]);
            for barrier in 0..2 {
                let op = Op {
                    links_at: barrier,
                    links: job.blocks,
                    ..Plan::op(OpKind::Barrier)
                };
                plan.push(b, op);
            }
            let next = (block + 1) % job.blocks;
            plan.data(b, OpKind::Move, part(next), &[scratch], &[output]);
        }
        plan
    };
    let job = Job {
        ranks: 1,
        blocks: 3,
        dtype: DataType::U8,
        reduces: false,
        ..BASIC
    };
    let ranks = job.run(plan);
    // Barriers count on from launch to launch.
    for barrier in 0..2 {
        let word = (2 + barrier) * COUNTER_STRIDE as usize / 8;
        assert_eq!(ranks[0].counters.word(word), 300);
    }
}

#[test]
fn a_scrub_clears_the_half_of_its_epoch_and_nothing_else() {
    // One launch at a time, so that what is left can be looked at.
    for (epoch, scrubbed) in [
        ((1 << 18) - 1, None),
        (1 << 18, Some(0)),
        ((1 << 18) + 1, Some(1)),
        ((1 << 18) + 2, None),
    ] {
        let job = Job {
            epoch,
            launches: 1,
            ..BASIC
        };
        let ranks = job.run(one_shot);
        let half_words = 2 * HALF as usize / 8;
        for (me, rank) in ranks.iter().enumerate() {
            let half = (epoch & 1) as usize;
            let slot = chunk_bytes(job.elements(0) as u64 * 4, 1) as usize * 2 / 8;
            let word = rank.packets.word(half * half_words + (1 - me) * slot);
            match scrubbed {
                Some(cleared) => {
                    assert_eq!(cleared, half);
                    assert!((0..half_words).all(|i| rank.packets.word(half * half_words + i) == 0));
                }
                None => assert_eq!(
                    word >> 32,
                    u64::from(flag_of(epoch, job.elements(0) as u64 * 4))
                ),
            }
        }
    }
}

/// One launch of one rank whose peer never comes, with packets of `stale` epochs lying around.
fn alone(plan: impl Fn(&Job, u32) -> Plan, stale: &[u64]) -> Vec<Rank> {
    let job = BASIC;
    let mut ranks: Vec<_> = (0..2).map(|_| Rank::new(2, 9)).collect();
    let tables = tables(&plan(&job, 0), 0, &mut ranks, 2, 4);
    let packets = ranks[0].packets.addr();
    for &epoch in stale {
        for word in 0..4 * HALF / 8 {
            if (word < 2 * HALF / 8) == (epoch % 2 == 0) {
                // SAFETY: a word of the packet memory.
                unsafe { Raw.store(packets + word * 8, u64::from(flag_of(epoch, 64)) << 32) };
            }
        }
    }
    let launch = Launch {
        input: ranks[0].input.addr(),
        output: ranks[0].output.addr(),
        input_offset: 0,
        output_offset: 0,
        bytes: 64,
    };
    let block = HostBlock {
        patience: 3,
        ..HostBlock::ALONE
    };
    let reducer = HostReducer::new(DataType::I32, ReduceOp::Sum);
    // SAFETY: the tables are laid out for these buffers.
    let outcome = unsafe { run_block(&block, &reducer, &tables.program, &launch, 0) };
    assert_eq!(outcome, Err(Stopped::Deadline));
    ranks
}

#[test]
fn an_execution_that_was_stopped_does_not_count() {
    for ranks in [
        alone(one_shot, &[]),
        alone(one_shot, &[7, 8]),
        alone(two_shot, &[]),
    ] {
        assert_eq!(ranks[0].counters.word(0), 9);
        assert_eq!(ranks[0].counters.word(COUNTER_STRIDE as usize / 8), 0);
        // No signal was taken.
        assert_eq!(
            (ranks[0].expected.word(0), ranks[0].expected.word(1)),
            (0, 0)
        );
        assert!(ranks.iter().all(Rank::intact));
    }
}

#[test]
fn signals_tell_a_call_of_another_size_on_both_sides() {
    let job = BASIC;
    for plan in [two_shot, two_shot_staged] {
        // Epochs whose low bits are 0 are no exception.
        for epoch in [1, 2, 1 << 16] {
            let mut ranks: Vec<_> = (0..2).map(|_| Rank::new(2, epoch)).collect();
            let tables: Vec<_> = (0..2)
                .map(|r| tables(&plan(&job, r), r, &mut ranks, 2, 4))
                .collect();
            let launches: Vec<_> = ranks
                .iter_mut()
                .zip([64, 32])
                .map(|(rank, bytes)| Launch {
                    input: rank.input.addr(),
                    output: rank.output.addr(),
                    input_offset: 0,
                    output_offset: 0,
                    bytes,
                })
                .collect();
            std::thread::scope(|scope| {
                for (table, launch) in tables.iter().zip(&launches) {
                    let program = table.program;
                    scope.spawn(move || {
                        let reducer = HostReducer::new(DataType::I32, ReduceOp::Sum);
                        let block = HostBlock::ALONE;
                        // SAFETY: the tables are laid out for these buffers.
                        let outcome = unsafe { run_block(&block, &reducer, &program, launch, 0) };
                        assert_eq!(outcome, Err(Stopped::Mismatch));
                    });
                }
            });
        }
    }
}
