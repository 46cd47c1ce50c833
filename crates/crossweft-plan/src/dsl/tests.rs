//! Properties of the passes.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::order::{Missing, missing};
use super::sync::insert;
use super::*;
use crate::check::{self, check};
use crate::place::Raw;
use crate::plan::{Buffer, Collective, InPlace, Op};
use cells::Cells;
use random::{Draw, random};

#[path = "../../tests/common/random.rs"]
mod random;

fn draws() -> impl Strategy<Value = Vec<Draw>> {
    let draw = (
        0..9u8,
        0..4u32,
        0..4u32,
        0..4u32,
        (0..2u8, 0..4u32),
        (0..3u8, 0..4u32),
        0..4u32,
    );
    let draw = draw.prop_map(|(what, rank, peer, block, dst, src, other)| Draw {
        what,
        rank,
        peer,
        block,
        dst,
        src,
        other,
    });
    prop::collection::vec(draw, 1..24)
}

fn faults(program: &Program, missing: &Missing, sizes: check::Sizes) -> Vec<check::Diagnostic> {
    let mut program = program.clone();
    insert(&mut program, missing);
    let options = check::Options {
        sizes,
        ..Default::default()
    };
    check(&program.lower().plan, &options)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn synchronisation_is_enough_and_none_is_too_much(
        draws in draws(),
        ranks in 2..=4u32,
        in_place in prop_oneof![Just(InPlace::Forbidden), Just(InPlace::Any)],
        double in any::<bool>(),
    ) {
        let program = random(ranks, &draws, in_place, double);
        let lacking = program.lacking();
        let found = faults(&program, &lacking, check::Sizes::default());
        prop_assert!(found.is_empty(), "{lacking:?}\n{found:#?}");
        for index in 0..lacking.edges.len() {
            let mut fewer = lacking.clone();
            let edge = fewer.edges.remove(index);
            // Some are for messages of two sizes in one half of scratch memory.
            let found = faults(&program, &fewer, check::Sizes::VaryInHalves);
            prop_assert!(!found.is_empty(), "{edge:?} is not needed of {lacking:?}");
        }
        let compiled = program.compile();
        prop_assert!(compiled.is_ok(), "{}", compiled.unwrap_err());
        // With a part of it written by the user, the rest is inserted.
        let mut partly = program.clone();
        let edges = lacking.edges.iter().step_by(2).copied().collect();
        insert(&mut partly, &Missing { edges, flushes: lacking.flushes.clone() });
        let compiled = partly.compile();
        prop_assert!(compiled.is_ok(), "{}", compiled.unwrap_err());
        let mut synchronised = program.clone();
        insert(&mut synchronised, &lacking);
        let cells = Cells::new(&synchronised).unwrap();
        prop_assert_eq!(missing(&synchronised, &cells).edges.iter().filter(|edge| !edge.choice).count(), 0);
    }
}

/// A program of two ranks with four chunks of everything.
fn two_ranks() -> (Program, [[Memory; 3]; 2]) {
    let mut options = Options::new("fusion", Collective::Test, 2);
    options.shape = (4, 4);
    let mut program = Program::new(options).unwrap();
    let memory = [0, 1].map(|rank| {
        [
            program.input(rank).unwrap(),
            program.output(rank).unwrap(),
            program.scratch(rank, 4).unwrap(),
        ]
    });
    (program, memory)
}

/// What one thread block of rank 0 does after fusion: each operation's name, sources and destinations.
fn fused(program: &Program) -> Vec<(&'static str, usize, usize)> {
    let mut program = program.clone();
    fuse::fuse(&mut program);
    let before = format!("{:?}", program.trace.instrs);
    fuse::fuse(&mut program);
    assert_eq!(
        before,
        format!("{:?}", program.trace.instrs),
        "once is enough"
    );
    let plan = program.lower().plan;
    let ops = plan.ranks[0].blocks[0].iter().map(|op| {
        let (from, to) = op.operands();
        (op.name(), from.len(), to.len())
    });
    ops.collect()
}

#[test]
fn channels_and_semaphores_are_fused() {
    let (mut program, _) = two_ranks();
    let channels = [0, 1].map(|_| program.memory_channel(1, 0).unwrap());
    let port = program.port_channel(1, 0).unwrap();
    let semaphores = [0, 1].map(|_| program.semaphore(0, 0).unwrap());
    for channel in channels {
        program.signal(channel, 0).unwrap();
    }
    // Another kind of channel, and another kind of signal.
    program.signal(port, 0).unwrap();
    program.relaxed_signal(channels[0], 0).unwrap();
    for channel in channels {
        program.wait(channel, 0).unwrap();
    }
    // Twice on one channel are two waits.
    program.wait(channels[1], 0).unwrap();
    // Whoever waits ends with the threads meeting.
    program.barrier(0, 0).unwrap();
    for semaphore in semaphores {
        program.release(semaphore, 0).unwrap();
    }
    for semaphore in semaphores {
        program.acquire(semaphore, 0).unwrap();
    }
    let names: Vec<_> = fused(&program).into_iter().map(|(name, ..)| name).collect();
    let expected = [
        "signal", "signal", "signal", "wait", "wait", "release", "acquire",
    ];
    assert_eq!(names, expected);
}

#[test]
fn puts_over_ports_take_their_signal_and_flush() {
    let (mut program, [[input, ..], [_, output, _]]) = two_ranks();
    let (port, other) = (
        program.port_channel(1, 0).unwrap(),
        program.port_channel(1, 0).unwrap(),
    );
    program
        .put(port, output.chunk(0), input.chunk(0), 0)
        .unwrap();
    program.signal(port, 0).unwrap();
    program.flush(port, 0).unwrap();
    program
        .put(port, output.chunk(1), input.chunk(1), 0)
        .unwrap();
    program.flush(other, 0).unwrap();
    assert_eq!(
        fused(&program),
        [("put", 1, 1), ("put", 1, 1), ("flush", 0, 0)]
    );
}

#[test]
fn moves_are_fused() {
    let (mut program, [[input, output, scratch], [_, theirs, packets]]) = two_ranks();
    let channel = program.memory_channel(1, 0).unwrap();
    // One source, three destinations of different kinds.
    program.copy(output.chunk(0), input.chunk(0), 0).unwrap();
    program
        .put(channel, theirs.chunk(0), input.chunk(0), 0)
        .unwrap();
    program
        .put_packets(channel, packets.chunk(0), input.chunk(0), 0)
        .unwrap();
    // Chunks that follow one another; of another buffer, they do not.
    program
        .put(channel, theirs.chunk(2), input.chunk(2), 0)
        .unwrap();
    program
        .put(channel, theirs.chunk(3), input.chunk(3), 0)
        .unwrap();
    program
        .put(channel, theirs.chunk(1), scratch.chunk(0), 0)
        .unwrap();
    // Over what was just written.
    program.copy(output.chunk(1), output.chunk(0), 0).unwrap();
    program.copy(output.chunk(2), output.chunk(1), 0).unwrap();
    let moved = |to| ("move", 1, to);
    // The two neighbours are placed in blocks of one chunk each.
    assert_eq!(fused(&program), [3, 1, 1, 1, 1, 1].map(moved));
    assert_eq!(program.trace.instrs.len(), 8);
}

#[test]
fn reductions_are_fused() {
    let (mut program, [[input, output, scratch], [remote, theirs, packets]]) = two_ranks();
    let channel = program.memory_channel(1, 0).unwrap();
    let result = output.chunk(0);
    // Sources from here and there; the result to here, there and as packets.
    program
        .reduce(result, input.chunk(0), &[scratch.chunk(1)], 0)
        .unwrap();
    program
        .read_reduce(channel, result, result, &[remote.chunk(0)], 0)
        .unwrap();
    program
        .reduce_packets(result, result, &[scratch.chunk(0)], 0)
        .unwrap();
    program.put(channel, theirs.chunk(0), result, 0).unwrap();
    program
        .put_packets(channel, packets.chunk(0), result, 0)
        .unwrap();
    program.copy_packets(scratch.chunk(2), result, 0).unwrap();
    // Forwards the packets that it has just made.
    program
        .read_put_packets(channel, packets.chunk(1), scratch.chunk(2), 0)
        .unwrap();
    // Packets may come in answer to those: no more of them can be waited for at once.
    program
        .reduce_packets(result, result, &[scratch.chunk(3)], 0)
        .unwrap();
    assert_eq!(fused(&program), [("reduce", 4, 5), ("reduce", 2, 1)]);
}

#[test]
fn a_switch_reduces_and_broadcasts_at_once() {
    let (mut program, [[_, output, scratch], _]) = two_ranks();
    let switch = program.switch_channel(&[0, 1], Buffer::Input).unwrap();
    let store = program.switch_channel(&[0, 1], Buffer::Output).unwrap();
    program
        .switch_reduce(switch, 0, 0, scratch.chunk(0), 0)
        .unwrap();
    program
        .switch_broadcast(store, 0, 0, scratch.chunk(0), 0)
        .unwrap();
    // The result's own place is one of the members'.
    program
        .switch_reduce(store, 0, 1, output.chunk(1), 0)
        .unwrap();
    program
        .switch_broadcast(store, 0, 1, output.chunk(1), 0)
        .unwrap();
    assert_eq!(fused(&program), [("reduce", 2, 2), ("reduce", 2, 2)]);
    let mut program = program.clone();
    fuse::fuse(&mut program);
    let plan = program.lower().plan;
    let hints: Vec<bool> = plan.ranks[0].blocks[0]
        .iter()
        .map(|op| {
            matches!(
                op,
                Op::Reduce {
                    switch: Some(_),
                    ..
                }
            )
        })
        .collect();
    // Only one switch reads from and writes to the same members' buffer.
    assert_eq!(hints, [false, true]);
}

#[test]
fn threads_meet_between_instructions_that_depend() {
    let (mut program, [[input, output, scratch], _]) = two_ranks();
    program.copy(scratch.chunk(0), input.chunk(0), 0).unwrap();
    program.copy(scratch.chunk(2), input.chunk(2), 0).unwrap();
    // Reads what is written; then writes what is read.
    program.copy(output.chunk(1), scratch.chunk(0), 0).unwrap();
    program.copy(scratch.chunk(0), input.chunk(3), 0).unwrap();
    // Slices of a group do not touch one another's.
    program
        .copy(output.chunk(2), input.chunk(2), vec![1, 2])
        .unwrap();
    program
        .copy(scratch.chunk(3), output.chunk(2), vec![1, 2])
        .unwrap();
    let cells = Cells::new(&program).unwrap();
    within::insert(&mut program, &cells);
    let of_block = |program: &Program, block: u32| -> Vec<bool> {
        let instrs = program
            .trace
            .instrs
            .iter()
            .filter(|instr| instr.block == block);
        instrs
            .map(|instr| matches!(instr.raw, Raw::Other(Op::Sync)))
            .collect()
    };
    assert_eq!(
        of_block(&program, 0),
        [false, false, true, false, true, false]
    );
    assert_eq!(of_block(&program, 1), [false, true, false]);
    let before = program.trace.instrs.len();
    within::insert(&mut program, &cells);
    assert_eq!(program.trace.instrs.len(), before, "once is enough");
}

#[test]
fn synchronisation_follows_what_the_data_needs() {
    let (mut program, [[input, output, scratch], [_, theirs, _]]) = two_ranks();
    let channel = program.memory_channel(1, 0).unwrap();
    // Across thread blocks of a rank: one semaphore, for the one chunk that is shared.
    program
        .copy(scratch.chunks(0..2), input.chunks(0..2), 0)
        .unwrap();
    program.copy(output.chunk(0), scratch.chunk(0), 0).unwrap();
    program.copy(output.chunk(1), scratch.chunk(1), 1).unwrap();
    let lacking = program.lacking();
    assert_eq!(lacking.edges.len(), 1);
    // To a peer: it must have begun, and know when this is over.
    program
        .put(channel, theirs.chunk(0), input.chunk(3), 2)
        .unwrap();
    let lacking = program.lacking();
    assert_eq!(lacking.edges.len(), 3);
    let edges: Vec<_> = lacking
        .edges
        .iter()
        .map(|edge| (edge.from, edge.to))
        .collect();
    assert_eq!(edges[0], (order::From::After(0), order::To::Before(2)));
    assert_eq!(
        edges[1],
        (
            order::From::Begin { rank: 1, block: 0 },
            order::To::Before(3)
        )
    );
    let end = order::To::End {
        rank: 1,
        block: 0,
        because: 3,
    };
    assert_eq!(edges[2], (order::From::After(3), end));
    // With it in place, nothing is missing.
    insert(&mut program, &lacking);
    assert_eq!(program.lacking(), Missing::default());
}
