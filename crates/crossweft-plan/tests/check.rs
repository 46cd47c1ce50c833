//! The checker: one small plan for each fault, next to one without it.

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;
use crossweft_plan::check::{Code, Diagnostic, Options, Sizes, check};
use crossweft_plan::{Buffer, Builder, Chunks, Collective, InPlace, Op, Operand, Plan};

const ONE: Chunks = Chunks::new(0, 1);

fn input(rank: u32, index: u32) -> Operand {
    Operand::new(rank, Buffer::Input, index)
}

fn output(rank: u32, index: u32) -> Operand {
    Operand::new(rank, Buffer::Output, index)
}

fn scratch(rank: u32, index: u32) -> Operand {
    Operand::new(rank, Buffer::Scratch, index)
}

fn packets(rank: u32, index: u32) -> Operand {
    Operand::new(rank, Buffer::Packets, index)
}

fn found(builder: Builder) -> Vec<Diagnostic> {
    let plan = builder.finish().expect("the structure is sound");
    check(&plan, &Options::default())
}

fn accepted(builder: Builder) {
    let found = found(builder);
    assert!(found.is_empty(), "{}", found[0]);
}

/// Refused, with a fault of this kind, at this rank and op, saying this.
fn refused(builder: Builder, code: Code, place: (u32, u32), words: &str) {
    let found = found(builder);
    let text: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert!(
        found.iter().any(|d| d.code == code
            && (d.rank, d.op) == (Some(place.0), Some(place.1))
            && d.message.contains(words)),
        "no {} at {place:?} with `{words}` in {text:#?}",
        code.name()
    );
}

/// Refused, with a fault of this kind.
fn refused_for(builder: Builder, code: Code) {
    let found = found(builder);
    assert!(
        found.iter().any(|d| d.code == code),
        "no {} in {found:?}",
        code.name()
    );
}

/// Two ranks and a place for tests that have no result.
fn pair(blocks: u32) -> Builder {
    Builder::new("pair", Collective::Test, 2, blocks, 1)
        .scratch(4, false)
        .packets(2, PacketType::Ll16)
}

/// Rank 0 fills rank 1's scratch memory; `ready` says that it may, `done` that it has.
fn hand_over(ready: bool, done: bool, relaxed: bool) -> Builder {
    let mut b = pair(1);
    let (ours, theirs) = b.connect(0, 1);
    let (mine, yours) = (vec![ours], vec![theirs]);
    let signal = |channels: &Vec<u32>| Op::Signal {
        channels: channels.clone(),
        relaxed,
    };
    let wait = |channels: &Vec<u32>| Op::Wait {
        channels: channels.clone(),
        relaxed: false,
    };
    let mut at = b.at(0, 0);
    if ready {
        at.op(wait(&mine));
    }
    at.transfer(ONE, input(0, 0), vec![scratch(1, 0)]);
    if done {
        at.op(signal(&mine));
    }
    let mut at = b.at(1, 0);
    if ready {
        at.op(signal(&yours));
    }
    if done {
        at.op(wait(&yours));
    }
    at.transfer(ONE, scratch(1, 0), vec![output(1, 0)]);
    b
}

#[test]
fn a_reader_waits_for_the_writer_and_the_writer_for_the_reader() {
    accepted(hand_over(true, true, false));
    let words = "written here and read by rank 1, thread block 0, op 1 (move)";
    refused(hand_over(true, false, false), Code::Race, (0, 1), words);
    // The next execution's write is not kept from this one's read.
    refused_for(hand_over(false, true, false), Code::Race);
    // Order of execution is not order of memory.
    refused_for(hand_over(true, true, true), Code::Race);
}

#[test]
fn the_last_executions_faults_are_seen_too() {
    let mut options = Options::default();
    options.executions = 1;
    let once = |b: Builder| check(&b.finish().unwrap(), &options).len();
    // With one execution only there is no next one to disturb.
    assert_eq!(once(hand_over(false, true, false)), 0);
    assert_ne!(once(hand_over(true, false, false)), 0);
}

#[test]
fn crossed_waits_are_a_deadlock() {
    let mut b = pair(1);
    let (ours, theirs) = b.connect(0, 1);
    b.at(0, 0).wait(&[ours]).signal(&[ours]);
    b.at(1, 0).wait(&[theirs]).signal(&[theirs]);
    let words = "waits for ever for a signal of rank 1 on channel 0; it would come from a block that \
                 is at rank 1, thread block 0, op 0 (wait)";
    refused(b, Code::Deadlock, (0, 0), words);
}

#[test]
fn what_is_read_was_written() {
    let mut b = pair(1);
    b.at(0, 0).transfer(ONE, scratch(0, 2), vec![output(0, 0)]);
    refused(
        b,
        Code::Uninitialised,
        (0, 0),
        "scratch slot 2 of rank 0 is read, but nothing",
    );
    // Output is the caller's: what the last execution left there may be gone.
    let mut b = pair(1);
    b.at(0, 0)
        .transfer(ONE, output(0, 0), vec![scratch(0, 0)])
        .transfer(ONE, input(0, 0), vec![output(0, 0)]);
    refused_for(b.in_place(InPlace::Forbidden), Code::Uninitialised);
}

/// Rank 0 sends packets; `answer` makes rank 1 answer them.
fn packets_one_way(answer: bool) -> Builder {
    let mut b = pair(1);
    b.at(0, 0).transfer(ONE, input(0, 0), vec![packets(1, 0)]);
    if answer {
        b.at(1, 0).transfer(ONE, input(1, 0), vec![packets(0, 0)]);
        b.at(0, 0).transfer(ONE, packets(0, 0), vec![output(0, 0)]);
    }
    b.at(1, 0).transfer(ONE, packets(1, 0), vec![output(1, 0)]);
    b
}

#[test]
fn packets_are_not_overwritten_before_they_are_read() {
    accepted(packets_one_way(true));
    refused_for(packets_one_way(false), Code::Race);
    // A second packet of one execution has the same flag as the first.
    let mut b = packets_one_way(true);
    let (ours, theirs) = b.connect(0, 1);
    b.at(1, 0).signal(&[theirs]);
    b.at(0, 0)
        .wait(&[ours])
        .transfer(ONE, input(0, 0), vec![packets(1, 0)]);
    b.at(1, 0).transfer(ONE, packets(1, 0), vec![scratch(1, 0)]);
    refused_for(b, Code::Race);
    let mut b = pair(1);
    b.at(0, 0).transfer(ONE, packets(0, 1), vec![output(0, 0)]);
    refused(
        b,
        Code::Deadlock,
        (0, 0),
        "packet slot 1 of rank 0, which nobody fills",
    );
}

/// How a put's source is kept while it is copied.
#[derive(Clone, Copy, PartialEq)]
enum Keep {
    No,
    Flush,
    FlushOp,
    Answer,
}

fn put_twice(keep: Keep) -> Builder {
    let mut b = pair(1);
    let (ours, theirs) = b.connect_port(0, 1);
    for turn in 0..2 {
        let at = if turn == 0 { 0 } else { 1 };
        b.at(0, 0)
            .transfer(ONE, input(0, 0), vec![scratch(0, 0)])
            .op(Op::Put {
                chunks: ONE,
                from: scratch(0, 0),
                to: scratch(1, at),
                channel: ours,
                signal: true,
                flush: keep == Keep::Flush,
            });
        if keep == Keep::FlushOp {
            b.at(0, 0).op(Op::Flush {
                channels: vec![ours],
            });
        }
        let mut peer = b.at(1, 0);
        peer.wait(&[theirs])
            .transfer(ONE, scratch(1, at), vec![output(1, 0)]);
        if keep == Keep::Answer {
            peer.signal(&[theirs]);
            b.at(0, 0).wait(&[ours]);
        }
    }
    // Nobody may lap the other.
    let (ours, theirs) = b.connect(0, 1);
    b.at(0, 0).wait(&[ours]);
    b.at(1, 0).signal(&[theirs]);
    b
}

#[test]
fn a_puts_source_stays_until_it_has_arrived() {
    accepted(put_twice(Keep::Flush));
    accepted(put_twice(Keep::FlushOp));
    accepted(put_twice(Keep::Answer));
    let words =
        "scratch slot 0 of rank 0 is written here and read by rank 0, thread block 0, op 1 (put)";
    refused(put_twice(Keep::No), Code::Race, (0, 2), words);
}

#[test]
fn a_put_is_seen_through_its_own_channel() {
    let build = |signal: bool, over_memory: bool, flush: bool| {
        let mut b = pair(1);
        let (port, their_port) = b.connect_port(0, 1);
        let (ours, theirs) = b.connect(0, 1);
        b.at(0, 0).wait(&[ours]).op(Op::Put {
            chunks: ONE,
            from: input(0, 0),
            to: output(1, 0),
            channel: port,
            signal,
            flush,
        });
        b.at(1, 0).signal(&[theirs]);
        if over_memory {
            b.at(0, 0).signal(&[ours]);
            b.at(1, 0).wait(&[theirs]);
        } else {
            if !signal {
                b.at(0, 0).signal(&[port]);
            }
            b.at(1, 0).wait(&[their_port]);
        }
        b.at(0, 0).op(Op::Flush {
            channels: vec![port],
        });
        b.in_place(InPlace::Forbidden)
    };
    accepted(build(true, false, false));
    accepted(build(false, false, false));
    accepted(build(false, true, true));
    refused_for(build(false, true, false), Code::Race);
}

#[test]
fn packets_are_put_as_they_are() {
    let build = |written: bool| {
        let mut b = pair(1);
        for (rank, peer) in [(0, 1), (1, 0)] {
            let (port, _) = b.connect_port(rank, peer);
            let mut at = b.at(rank, 0);
            if written {
                at.transfer(ONE, input(rank, 0), vec![packets(rank, 1)]);
            }
            at.op(Op::Put {
                chunks: ONE,
                from: packets(rank, 1),
                to: packets(peer, 0),
                channel: port,
                signal: false,
                flush: true,
            })
            .transfer(ONE, packets(rank, 0), vec![output(rank, 0)]);
        }
        b
    };
    accepted(build(true));
    refused(
        build(false),
        Code::Uninitialised,
        (0, 0),
        "no packets of this execution",
    );
}

fn semaphores(ids: &[u32]) -> Vec<u32> {
    ids.to_vec()
}

#[test]
fn semaphores_order_blocks() {
    let build = |acquire: bool, early: bool| {
        let mut b = pair(2);
        let full = b.semaphore(0, 0);
        let empty = b.semaphore(0, 1);
        let acquire_full = Op::Acquire {
            semaphores: semaphores(&[full]),
        };
        b.at(0, 0)
            .op(Op::Acquire {
                semaphores: semaphores(&[empty]),
            })
            .transfer(ONE, input(0, 0), vec![scratch(0, 0)])
            .op(Op::Release {
                semaphores: semaphores(&[full]),
            });
        let mut at = b.at(0, 1);
        if acquire && early {
            at.op(acquire_full.clone());
        }
        at.transfer(ONE, scratch(0, 0), vec![output(0, 0)]);
        if acquire && !early {
            at.op(acquire_full);
        }
        at.op(Op::Release {
            semaphores: semaphores(&[empty]),
        });
        b
    };
    accepted(build(true, true));
    refused_for(build(true, false), Code::Race);
    refused_for(build(false, false), Code::Pairing);
}

/// What there is at first is a number, not so many signals to be stored.
#[test]
fn a_semaphore_may_have_any_number_at_first() {
    for blocks in [1, 2] {
        let mut b = pair(blocks);
        let many = b.semaphore(0, u32::MAX);
        for block in 0..blocks {
            b.at(0, block)
                .op(Op::Acquire {
                    semaphores: semaphores(&[many]),
                })
                .op(Op::Release {
                    semaphores: semaphores(&[many]),
                });
        }
        accepted(b);
    }
}

#[test]
fn who_acquires_is_not_left_to_chance() {
    // Two consumers, fed at once: both get theirs.
    let build = |at_once: bool| {
        let mut b = pair(3);
        let full = b.semaphore(0, 0);
        let next = b.semaphore(0, 0);
        let acquire = |ids: &[u32]| Op::Acquire {
            semaphores: semaphores(ids),
        };
        let release = |ids: &[u32]| Op::Release {
            semaphores: semaphores(ids),
        };
        b.at(0, 0).transfer(ONE, input(0, 0), vec![scratch(0, 0)]);
        if at_once {
            b.at(0, 0).op(release(&[full, full]));
        } else {
            b.at(0, 0)
                .op(release(&[full]))
                .op(acquire(&[next]))
                .op(release(&[full]));
        }
        b.at(0, 1)
            .op(acquire(&[full]))
            .transfer(ONE, scratch(0, 0), vec![scratch(0, 1)]);
        if !at_once {
            b.at(0, 1).op(release(&[next]));
        }
        b.at(0, 2)
            .op(acquire(&[full]))
            .transfer(ONE, scratch(0, 0), vec![scratch(0, 2)]);
        b
    };
    accepted(build(true));
    // Block 1 must be the first, or block 0 waits for ever.
    refused_for(build(false), Code::Race);
}

#[test]
fn barriers_order_blocks() {
    let build = |first: &[u32], second: &[u32]| {
        let mut b = pair(2);
        b.at(0, 0).transfer(ONE, input(0, 0), vec![scratch(0, 0)]);
        for id in first {
            b.at(0, 0).barrier(*id, 2);
        }
        for id in second {
            b.at(0, 1).barrier(*id, 2);
        }
        b.at(0, 1).transfer(ONE, scratch(0, 0), vec![output(0, 0)]);
        b
    };
    accepted(build(&[0, 1], &[0, 1]));
    refused_for(build(&[], &[]), Code::Race);
    refused_for(build(&[0, 1], &[1, 0]), Code::Deadlock);
}

/// Block 0 fills scratch memory piece by piece, block 1 follows.
fn pipeline(units: (u64, u64), acquire_first: bool) -> Builder {
    let mut b = Builder::new("loop", Collective::AllReduce, 1, 2, 2).scratch(2, false);
    let filled = b.semaphore(0, 0);
    let all = Chunks::new(0, 2);
    let copy = |from, to| Op::Move {
        chunks: all,
        from,
        to: vec![to],
        switch: None,
    };
    let acquire = Op::Acquire {
        semaphores: semaphores(&[filled]),
    };
    let mut second = vec![acquire, copy(scratch(0, 0), output(0, 0))];
    if !acquire_first {
        second.reverse();
    }
    b.at(0, 0).op(Op::Loop {
        unit_bytes: units.0,
        chunks: 2,
        ops: vec![
            copy(input(0, 0), scratch(0, 0)),
            Op::Release {
                semaphores: semaphores(&[filled]),
            },
        ],
    });
    b.at(0, 1).op(Op::Loop {
        unit_bytes: units.1,
        chunks: 2,
        ops: second,
    });
    b
}

#[test]
fn loops_follow_one_another() {
    accepted(pipeline((4096, 4096), true));
    refused(
        pipeline((4096, 4096), false),
        Code::Race,
        (0, 0),
        "in its op 0 (move): scratch slot 0",
    );
    // Pieces of other sizes are not as many.
    refused_for(pipeline((4096, 8192), true), Code::Pairing);
}

/// Channels between all pairs.
fn connect_all(b: &mut Builder, ranks: u32) -> Vec<Vec<u32>> {
    let mut all = vec![Vec::new(); ranks as usize];
    for low in 0..ranks {
        for high in low + 1..ranks {
            let (ours, theirs) = b.connect(low, high);
            all[low as usize].push(ours);
            all[high as usize].push(theirs);
        }
    }
    all
}

/// A direct algorithm: signal, wait, what `work` does on each rank, signal, wait.
fn direct(
    collective: Collective,
    chunks: u32,
    trailing: bool,
    work: impl Fn(&mut Builder, u32),
) -> Builder {
    let ranks = 3;
    let mut b = Builder::new("direct", collective, ranks, 1, chunks);
    let channels = connect_all(&mut b, ranks);
    for rank in 0..ranks {
        let mine = &channels[rank as usize];
        b.at(rank, 0).signal(mine).wait(mine);
        work(&mut b, rank);
        if trailing {
            b.at(rank, 0).signal(mine).wait(mine);
        }
    }
    b
}

#[test]
fn all_gather() {
    let build = |by: u32| {
        direct(Collective::AllGather, 1, true, |b, rank| {
            let to = (0..3).map(|q| output(q, (rank + by) % 3)).collect();
            b.at(rank, 0).transfer(ONE, input(rank, 0), to);
        })
    };
    accepted(build(0));
    let words = "it holds chunk 0 of rank 2's input of execution 0";
    refused(
        build(1).in_place(InPlace::Forbidden),
        Code::PostCondition,
        (2, 2),
        words,
    );
}

#[test]
fn reduce_scatter() {
    let build = |last: bool, ranks: u32| {
        direct(Collective::ReduceScatter, 1, true, |b, rank| {
            let from = (0..ranks).map(|q| input(q, rank)).collect();
            let mut at = b.at(rank, 0);
            if last {
                at.reduce_last(ONE, from, vec![output(rank, 0)]);
            } else {
                at.reduce(ONE, from, vec![output(rank, 0)]);
            }
        })
    };
    accepted(build(true, 3));
    refused(
        build(true, 2),
        Code::PostCondition,
        (0, 2),
        "rank 2's input is missing",
    );
    refused(
        build(false, 3),
        Code::PostCondition,
        (0, 2),
        "went through 0 reductions marked `last`",
    );
    // It only matters to an average.
    accepted(build(false, 3).reduce_op(ReduceOp::Max));
    refused_for(
        build(false, 3).reduce_op(ReduceOp::Avg),
        Code::PostCondition,
    );
}

#[test]
fn all_to_all_and_places() {
    let build = |by: u32| {
        direct(Collective::AllToAll, 2, true, |b, rank| {
            for q in 0..3 {
                b.at(rank, 0).transfer(
                    Chunks::new(0, 2),
                    input(rank, 2 * ((q + by) % 3)),
                    vec![output(q, 2 * rank)],
                );
            }
        })
    };
    accepted(build(0).in_place(InPlace::Forbidden));
    refused_for(build(1).in_place(InPlace::Forbidden), Code::PostCondition);
    // In place, what is received destroys what is still to be sent.
    refused_for(build(0), Code::Race);
    refused_for(build(0).in_place(InPlace::Required), Code::Race);
}

#[test]
fn send_recv() {
    let build = |by: u32| {
        direct(Collective::SendRecv, 1, true, |b, rank| {
            b.at(rank, 0)
                .transfer(ONE, input(rank, 0), vec![output((rank + by) % 3, 0)]);
        })
        .in_place(InPlace::Forbidden)
    };
    accepted(build(1));
    refused_for(build(2), Code::PostCondition);
}

#[test]
fn a_result_is_reduced_for_the_last_time_once() {
    let build = |first_last: bool| {
        let mut b = Builder::new("twice", Collective::AllReduce, 1, 1, 1).scratch(1, false);
        b.at(0, 0)
            .op(Op::Reduce {
                chunks: ONE,
                from: vec![input(0, 0)],
                to: vec![scratch(0, 0)],
                last: first_last,
                switch: None,
            })
            .reduce_last(ONE, vec![scratch(0, 0)], vec![output(0, 0)]);
        b
    };
    accepted(build(false));
    refused(build(true), Code::PostCondition, (0, 1), "marked `last`");
}

#[test]
fn a_missing_handshake_shows_in_the_next_execution() {
    let build = |trailing: bool| {
        direct(Collective::AllReduce, 3, trailing, |b, rank| {
            let part = Chunks::new(rank, 1);
            let from = (0..3).map(|q| input(q, rank)).collect();
            let to = (0..3).map(|q| output(q, rank)).collect();
            b.at(rank, 0).reduce_last(part, from, to);
        })
    };
    accepted(build(true));
    refused_for(build(false), Code::Race);
}

#[test]
fn several_blocks_may_signal_one_channel() {
    let build = |waits: usize| {
        let mut b = pair(2);
        let (ours, theirs) = b.connect(0, 1);
        let (back, there) = b.connect(0, 1);
        for block in 0..2 {
            b.at(0, block).barrier(0, 2);
            b.at(0, block)
                .transfer(ONE, input(0, 0), vec![scratch(1, block)])
                .signal(&[ours]);
        }
        let mut at = b.at(1, 0);
        for _ in 0..waits {
            at.wait(&[theirs]);
        }
        at.transfer(ONE, scratch(1, 1), vec![output(1, 0)]);
        for _ in waits..2 {
            at.wait(&[theirs]);
        }
        at.signal(&[there]);
        // At its end: nobody laps rank 1.
        b.at(0, 0).wait(&[back]);
        b
    };
    accepted(build(2));
    // The first signal may be block 0's.
    refused_for(build(1), Code::Race);
}

#[test]
fn one_block_at_a_time_waits_on_a_channel() {
    let build = |ordered: bool| {
        let mut b = pair(2);
        let (ours, theirs) = b.connect(0, 1);
        b.at(0, 0).signal(&[ours, ours]);
        b.at(1, 0).wait(&[theirs]);
        if ordered {
            b.at(1, 0).barrier(0, 2);
            b.at(1, 1).barrier(0, 2);
        }
        b.at(1, 1).wait(&[theirs]);
        b
    };
    accepted(build(true));
    refused(
        build(false),
        Code::Race,
        (1, 0),
        "which of them takes which signal",
    );
    let mut b = pair(1);
    let (ours, theirs) = b.connect(0, 1);
    b.at(0, 0).signal(&[ours, ours]);
    b.at(1, 0).wait(&[theirs, theirs]);
    refused(b, Code::Race, (1, 0), "twice on one channel");
}

#[test]
fn an_op_does_not_overlap_itself_shifted() {
    let build = |to: u32| {
        let mut b = Builder::new("shift", Collective::Test, 1, 1, 2).scratch(4, false);
        b.at(0, 0)
            .transfer(Chunks::new(0, 2), input(0, 0), vec![scratch(0, 0)])
            .transfer(Chunks::new(0, 2), scratch(0, 0), vec![scratch(0, to)]);
        b
    };
    accepted(build(2));
    accepted(build(0));
    refused(build(1), Code::Race, (0, 1), "shifted");
}

#[test]
fn slices_of_different_numbers_do_not_match() {
    let build = |readers: u32, barrier: bool| {
        let mut b = Builder::new("slices", Collective::AllReduce, 1, 6, 1).scratch(1, false);
        for block in 0..6 {
            if block < 2 {
                b.at(0, block)
                    .transfer(ONE.sliced(block, 2), input(0, 0), vec![scratch(0, 0)]);
            }
            if barrier {
                b.at(0, block).barrier(0, 6);
            }
            if block < readers {
                b.at(0, block).transfer(
                    ONE.sliced(block, readers),
                    scratch(0, 0),
                    vec![output(0, 0)],
                );
            }
        }
        b
    };
    accepted(build(2, false));
    accepted(build(3, true));
    accepted(build(6, true));
    refused_for(build(3, false), Code::Race);
}

#[test]
fn sizes_may_vary() {
    // Rank 0 pulls through two slots; the second is read late.
    let build = || {
        let mut b = Builder::new("sizes", Collective::Test, 2, 1, 1).scratch(2, false);
        let (ours, theirs) = b.connect(0, 1);
        b.at(0, 0)
            .transfer(ONE, input(0, 0), vec![scratch(1, 0)])
            .signal(&[ours])
            .wait(&[ours])
            .transfer(ONE, input(0, 0), vec![scratch(1, 1)])
            .signal(&[ours]);
        b.at(1, 0)
            .wait(&[theirs])
            .transfer(ONE, scratch(1, 0), vec![output(1, 0)])
            .signal(&[theirs])
            .wait(&[theirs])
            .transfer(ONE, scratch(1, 1), vec![output(1, 0)]);
        b
    };
    let with = |sizes| {
        let mut options = Options::default();
        options.sizes = sizes;
        check(&build().finish().unwrap(), &options)
    };
    assert_eq!(with(Sizes::Same), []);
    assert_eq!(with(Sizes::Vary), []);
    // A larger message's first slot lies over the smaller one's second, but in the other half.
    assert_eq!(with(Sizes::VaryPacked), []);
}

#[test]
fn slots_of_another_size_in_the_same_half_are_others() {
    // Rank 0 reads slot 0 of rank 2 late; rank 1 writes slot 1, of which it hears that rank 2 has begun, no more.
    let plan = Builder::new("halves", Collective::Test, 3, 1, 1).scratch(2, true);
    let mut b = plan.in_place(InPlace::Forbidden);
    let ((to_2, of_0), (of_1_to_2, of_1)) = (b.connect(0, 2), b.connect(1, 2));
    b.at(0, 0)
        .signal(&[to_2])
        .wait(&[to_2])
        .transfer(ONE, scratch(2, 0), vec![output(0, 0)]);
    b.at(1, 0)
        .transfer(ONE, input(1, 0), vec![scratch(2, 1)])
        .signal(&[of_1_to_2])
        .wait(&[of_1_to_2]);
    b.at(2, 0)
        .signal(&[of_1])
        .wait(&[of_0])
        .transfer(ONE, input(2, 0), vec![scratch(2, 0)])
        .signal(&[of_0])
        .wait(&[of_1])
        .transfer(ONE, scratch(2, 1), vec![output(2, 0)]);
    let plan = b.finish().unwrap();
    let with = |sizes| {
        let mut options = Options::default();
        options.sizes = sizes;
        check(&plan, &options)
    };
    assert_eq!(with(Sizes::Same), []);
    assert_eq!(with(Sizes::VaryInHalves)[0].code, Code::Race);
}

/// An all-gather of two ranks that copies its input to scratch memory in `of` slices, and from there on in `by` slices.
fn staged_gather(of: u32, by: u32) -> Plan {
    let mut b = Builder::new("cuts", Collective::AllGather, 2, of + by, 1)
        .scratch(1, false)
        .in_place(InPlace::Forbidden);
    let links: Vec<_> = (0..by).map(|_| b.connect(0, 1)).collect();
    for rank in 0..2_u32 {
        for block in 0..of {
            b.at(rank, block)
                .transfer(
                    ONE.sliced(block, of),
                    input(rank, 0),
                    vec![scratch(rank, 0)],
                )
                .barrier(0, of + by);
        }
        for (slice, &(first, second)) in (0..by).zip(&links) {
            let channel = [if rank == 0 { first } else { second }];
            let to = vec![output(1 - rank, rank), output(rank, rank)];
            b.at(rank, of + slice)
                .barrier(0, of + by)
                .signal(&channel)
                .wait(&channel)
                .transfer(ONE.sliced(slice, by), scratch(rank, 0), to)
                .signal(&channel)
                .wait(&channel);
        }
    }
    b.finish().expect("the structure is sound")
}

#[test]
fn data_that_is_cut_in_different_ways_needs_messages_whose_slices_are_exact() {
    for (of, by, multiple) in [
        (1, 1, 1),
        (4, 4, 1),
        (1, 4, 1),
        (3, 1, 1),
        (4, 2, 64),
        (2, 3, 96),
    ] {
        let plan = staged_gather(of, by);
        assert_eq!(plan.message_multiple(), multiple, "{of} and {by}");
        assert_eq!(check(&plan, &Options::default()), [], "{of} and {by}");
    }
    // Of nothing else that is cut, and as far as numbers go.
    let beside = |others: &[u32], mixed: bool| {
        let mut b = Builder::new("beside", Collective::Test, 1, 1, 2).scratch(2, false);
        for &of in others {
            let place = if mixed { 0 } else { of % 2 };
            let chunk = Chunks::new(place, 1).sliced(0, of);
            b.at(0, 0)
                .transfer(chunk, input(0, place), vec![scratch(0, place)]);
        }
        b.finish().map(|plan| plan.message_multiple())
    };
    assert_eq!(beside(&[4, 4093], false).unwrap(), 1);
    assert_eq!(beside(&[4, 2], true).unwrap(), 2 * 4 * 16);
    let primes = [4093, 4091, 4079, 4073, 4057, 4051];
    assert_eq!(beside(&primes, true).unwrap(), u64::MAX);
    // Slices of two chunks together, and one chunk alone.
    let together = |alone: u32| {
        let b = Builder::new("two", Collective::Test, 1, 1, 2).scratch(4, false);
        let mut b = b.in_place(InPlace::Forbidden);
        let both = Chunks::new(0, 2).sliced(0, 2);
        b.at(0, 0)
            .transfer(both, input(0, 0), vec![scratch(0, 0)])
            .transfer(
                Chunks::new(alone, 1),
                scratch(0, 2 * alone),
                vec![output(0, alone)],
            );
        b.finish().unwrap().message_multiple()
    };
    // Input and output may be one memory.
    let aliased = |in_place| {
        let mut b = Builder::new("aliased", Collective::Test, 1, 1, 1).scratch(1, false);
        b = b.in_place(in_place);
        b.at(0, 0)
            .transfer(ONE.sliced(0, 3), scratch(0, 0), vec![output(0, 0)])
            .transfer(ONE.sliced(0, 2), input(0, 0), vec![output(0, 1)]);
        b.blocks_of_message(1, 2)
    };
    for (in_place, multiple) in [(InPlace::Forbidden, 1), (InPlace::Any, 6 * 16)] {
        let plan = aliased(in_place).finish().unwrap();
        assert_eq!(plan.message_multiple(), multiple);
    }
    assert_eq!(together(0), 2 * 16);
    assert_eq!(together(1), 1);
}

#[test]
fn what_would_take_hours_is_refused() {
    let text = |plan: &Plan| check(plan, &Options::default())[0].to_string();
    let mut b = Builder::new("orders", Collective::Test, 1, 3, 1);
    let semaphores = vec![b.semaphore(0, 0)];
    let (release, acquire) = (
        Op::Release {
            semaphores: semaphores.clone(),
        },
        Op::Acquire { semaphores },
    );
    for block in 0..2 {
        for _ in 0..500 {
            b.at(0, block).op(release.clone());
        }
    }
    for _ in 0..1000 {
        b.at(0, 2).op(acquire.clone());
    }
    let found = text(&b.finish().unwrap());
    assert!(
        found.contains("2 thread blocks signal semaphore 0 of rank 0 3000 times in 3 executions"),
        "{found}"
    );
    let chunks = 1 << 20;
    let mut b = Builder::new("accesses", Collective::Test, 1, 1, chunks);
    for _ in 0..300 {
        let all = Chunks::new(0, chunks);
        b.at(0, 0).transfer(all, input(0, 0), vec![output(0, 0)]);
    }
    let found = text(&b.finish().unwrap());
    assert!(found.contains("629145600 accesses to granules"), "{found}");
}

#[test]
fn a_plan_is_for_some_message() {
    let fits = |least, most| {
        let mut plan = staged_gather(4, 2);
        plan.message_bytes = (least, most);
        plan.validate().map_err(|error| error.to_string())
    };
    assert_eq!(fits(65, 128), Ok(()));
    let error = fits(65, 127).unwrap_err();
    assert!(
        error.contains("no message of 65 to 127 bytes is a multiple of 64"),
        "{error}"
    );
    assert!(fits(0, 63).is_err());
}

#[test]
fn unsound_structure_is_reported_with_its_place() {
    let mut plan: Plan = hand_over(true, true, false).finish().unwrap();
    plan.ranks[1].blocks[0].push(Op::Wait {
        channels: vec![9],
        relaxed: false,
    });
    let found = check(&plan, &Options::default());
    assert_eq!(found.len(), 1);
    let found = &found[0];
    assert_eq!(
        (found.rank, found.thread_block, found.op, found.code.name()),
        (Some(1), Some(0), Some(3), "structure")
    );
    let mut options = Options::default();
    options.max_diagnostics = 1;
    let found = check(&hand_over(true, false, false).finish().unwrap(), &options);
    assert_eq!(found.len(), 1);
}

/// Rank 0 tells relaxed that its execution has begun; rank 1 then reads its input.
#[test]
fn a_relaxed_signal_may_tell_of_the_beginning() {
    let build = |own: bool| {
        let mut b = pair(1);
        let (ours, theirs) = b.connect(0, 1);
        let relaxed = true;
        if own {
            b.at(0, 0).transfer(ONE, input(0, 0), vec![scratch(0, 0)]);
        }
        b.at(0, 0).op(Op::Signal {
            channels: vec![ours],
            relaxed,
        });
        let from = if own { scratch(0, 0) } else { input(0, 0) };
        b.at(1, 0)
            .op(Op::Wait {
                channels: vec![theirs],
                relaxed,
            })
            .transfer(ONE, from, vec![output(1, 0)])
            .signal(&[theirs]);
        b.at(0, 0).wait(&[ours]);
        b.finish().unwrap()
    };
    let mut options = Options::default();
    assert_eq!(check(&build(false), &options), []);
    // What the sender did in this execution is another matter.
    assert_eq!(check(&build(true), &options)[0].code, Code::Race);
    options.relaxed_starts = false;
    assert_eq!(check(&build(false), &options)[0].code, Code::Race);
}

/// Rank 0's second block puts on the packets that its first one has made; it must have seen them.
#[test]
fn a_proxy_may_put_packets_that_its_block_has_seen() {
    let build = |sees: bool| {
        let mut b = Builder::new("forward", Collective::Test, 2, 2, 1)
            .packets(1, PacketType::Ll16)
            .scratch(1, false);
        let (port, _) = b.connect_port(0, 1);
        b.at(0, 0).transfer(ONE, input(0, 0), vec![packets(0, 0)]);
        if sees {
            b.at(0, 1).transfer(ONE, packets(0, 0), vec![scratch(0, 0)]);
        }
        b.at(0, 1).op(Op::Put {
            chunks: ONE,
            from: packets(0, 0),
            to: packets(1, 0),
            channel: port,
            signal: false,
            flush: true,
        });
        // The answer says that the slots are free.
        let (ours, theirs) = b.connect(0, 1);
        b.at(1, 0)
            .transfer(ONE, packets(1, 0), vec![output(1, 0)])
            .signal(&[theirs]);
        b.at(0, 1).wait(&[ours]);
        b.finish().unwrap()
    };
    assert_eq!(check(&build(true), &Options::default()), []);
    let found = check(&build(false), &Options::default());
    assert!(
        found
            .iter()
            .any(|d| d.code == Code::Race || d.code == Code::Uninitialised),
        "{found:?}"
    );
}

/// In place: one block sends an input as packets, another overwrites it with what comes back.
#[test]
fn a_packet_tells_that_the_loads_behind_it_are_over() {
    let build = |dependent: bool| {
        let mut b = Builder::new("echo", Collective::AllReduce, 2, 2, 1)
            .packets(2, PacketType::Ll16)
            .in_place(InPlace::Required);
        // Rank 1 answers with the sum, or with its own input.
        b.at(0, 0).transfer(ONE, input(0, 0), vec![packets(1, 0)]);
        b.at(1, 0).reduce_last(
            ONE,
            vec![packets(1, 0), input(1, 0)],
            vec![packets(0, 0), output(1, 0)],
        );
        if !dependent {
            b.at(1, 1).transfer(ONE, packets(1, 0), vec![packets(0, 1)]);
            b.at(0, 0).transfer(ONE, packets(0, 1), vec![packets(1, 1)]);
            b.at(0, 1).transfer(ONE, input(0, 0), vec![packets(0, 1)]);
        }
        b.at(0, 1).transfer(ONE, packets(0, 0), vec![output(0, 0)]);
        b
    };
    accepted(build(true));
    refused_for(build(false), Code::Race);
}

/// A rank may clear the half of an execution at its end: knowing that it has read a packet is not enough to write
/// there again.
#[test]
fn a_slot_is_written_again_only_after_the_execution_has_ended() {
    // Three ranks: the reader tells a third one, which tells the writer, all in one execution.
    let mut b = Builder::new("relay", Collective::Test, 3, 2, 1).packets(1, PacketType::Ll16);
    let (a, c) = (b.connect(1, 2), b.connect(2, 0));
    b.at(0, 0).transfer(ONE, input(0, 0), vec![packets(1, 0)]);
    b.at(1, 0)
        .transfer(ONE, packets(1, 0), vec![output(1, 0)])
        .signal(&[a.0]);
    b.at(2, 0).signal(&[c.0]).wait(&[a.1]);
    b.at(0, 0).wait(&[c.1]);
    let found = check(&b.clone().finish().unwrap(), &Options::default());
    assert_eq!(found[0].code, Code::Race, "{found:?}");
    assert!(
        found[0].message.contains("may clear"),
        "{}",
        found[0].message
    );
    // With an answer of the reader itself, the writer knows that it has begun again.
    let (answer, heard) = b.connect(1, 0);
    b.at(1, 1).signal(&[answer]);
    b.at(0, 1).wait(&[heard]);
    accepted(b);
}

#[test]
fn absurd_plans_are_not_begun() {
    let mut b = Builder::new("large", Collective::Test, 16, 1, 1 << 20);
    b.at(0, 0).sync();
    refused_for(b, Code::TooLarge);
}
