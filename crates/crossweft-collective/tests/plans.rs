//! Plans that use what all-reduce does not: every operation, other collectives, other shapes.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_collective::{
    Algorithm, CollectiveError, Communicator, CommunicatorOptions, DataType, ReduceOp, Schedule,
    SymmetricBuffer, run_in_threads,
};
use crossweft_executor::{Buffers, ExecutorError, Options, Prepared, fused_form};
use crossweft_plan::{Buffer, Builder, Chunks, Collective, InPlace, Op, Operand, Plan};

const LIMIT: Duration = Duration::from_secs(30);

/// A byte that tells rank, place and turn apart.
fn byte(rank: u32, at: usize, turn: u8) -> u8 {
    (rank as usize * 83 + at * 7 + at / 256) as u8 ^ turn.wrapping_mul(29)
}

fn prepare(
    communicator: &Communicator,
    plan: &Plan,
    memory: Option<(&SymmetricBuffer, &SymmetricBuffer)>,
    schedule: Schedule,
) -> Result<Arc<Prepared>, ExecutorError> {
    let mut options = Options::new(DataType::U8, ReduceOp::Sum, 4096);
    options.schedule = schedule;
    if let Some((input, output)) = memory {
        let (input, output) = (input.registered(), output.registered());
        options.buffers = Buffers::Registered { input, output };
    }
    Prepared::prepare(
        communicator.endpoint(),
        plan,
        options,
        Instant::now() + LIMIT,
    )
}

/// Runs `plan` on registered buffers for several sizes and turns, and compares each rank's output
/// with `expected(turn, rank, message bytes, place in the output)`.
fn check(plan: &Plan, sizes: &[u64], expected: impl Fn(u8, u32, usize, usize) -> u8 + Sync) {
    let options = CommunicatorOptions { timeout: LIMIT };
    run_in_threads(plan.world_size(), options, |communicator| {
        let rank = communicator.rank();
        let max = *sizes.iter().max().unwrap_or(&0);
        let input = communicator.allocate(max * u64::from(plan.input_blocks))?;
        let output = communicator.allocate(max * u64::from(plan.output_blocks))?;
        for schedule in [Schedule::RoundRobin, Schedule::Seeded(5 + u64::from(rank))] {
            let prepared = prepare(communicator, plan, Some((&input, &output)), schedule)?;
            for (turn, &bytes) in (0..).zip(sizes) {
                let length = bytes as usize * plan.input_blocks as usize;
                let data: Vec<u8> = (0..length).map(|at| byte(rank, at, turn)).collect();
                input.write(0, &data)?;
                communicator.barrier()?;
                prepared.run_registered(0, 0, bytes, LIMIT)?;
                communicator.barrier()?;
                let mut result = vec![0; bytes as usize * plan.output_blocks as usize];
                output.read(0, &mut result)?;
                for (at, &got) in result.iter().enumerate() {
                    let want = expected(turn, rank, bytes as usize, at);
                    assert_eq!(
                        got, want,
                        "rank {rank}, {bytes} bytes, turn {turn}, byte {at}"
                    );
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

const SIZES: [u64; 7] = [1, 4096, 16, 100, 1000, 0, 333];

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

fn all_channels(b: &mut Builder, ranks: u32) -> Vec<Vec<u32>> {
    let mut channels = vec![Vec::new(); ranks as usize];
    for a in 0..ranks {
        for c in a + 1..ranks {
            let (x, y) = b.connect(a, c);
            channels[a as usize].push(x);
            channels[c as usize].push(y);
        }
    }
    channels
}

fn gathered(turn: u8, _: u32, bytes: usize, at: usize) -> u8 {
    byte((at / bytes) as u32, at % bytes, turn)
}

#[test]
fn all_gather_over_port_channels() {
    let ranks = 3;
    let mut b = Builder::new("port all-gather", Collective::AllGather, ranks, 1, 2);
    // Ordinals of each kind are counted apart: memory channels stand between the port channels.
    let mut ports = vec![Vec::new(); ranks as usize];
    let mut memory = vec![Vec::new(); ranks as usize];
    for a in 0..ranks {
        for c in a + 1..ranks {
            let (x, y) = b.connect(c, a);
            memory[c as usize].push(x);
            memory[a as usize].push(y);
            let (x, y) = b.connect_port(a, c);
            ports[a as usize].push((x, c));
            ports[c as usize].push((y, a));
        }
    }
    for rank in 0..ranks {
        let own: Vec<u32> = ports[rank as usize].iter().map(|(id, _)| *id).collect();
        let mut ops = b.at(rank, 0);
        // Outputs are free.
        ops.signal(&memory[rank as usize])
            .wait(&memory[rank as usize]);
        ops.transfer(
            Chunks::new(0, 2),
            input(rank, 0),
            vec![output(rank, rank * 2)],
        );
        for (nth, &(channel, peer)) in ports[rank as usize].iter().enumerate() {
            let put = |chunk, signal, flush| Op::Put {
                chunks: Chunks::new(chunk, 1),
                from: input(rank, chunk),
                to: output(peer, rank * 2 + chunk),
                channel,
                signal,
                flush,
            };
            // Signalled with the put, or by itself.
            ops.op(put(0, false, false)).op(put(1, nth == 0, nth == 0));
            if nth > 0 {
                ops.signal(&[channel]);
            }
        }
        ops.op(Op::Flush {
            channels: own.clone(),
        })
        .wait(&own);
    }
    check(&b.finish().unwrap(), &SIZES, gathered);
}

#[test]
fn packets_over_port_channels() {
    let mut b = Builder::new("port packets", Collective::SendRecv, 2, 1, 1)
        .packets(2, crossweft_device_packet());
    let (x, y) = b.connect_port(0, 1);
    for (rank, channel) in [(0, x), (1, y)] {
        let peer = 1 - rank;
        let whole = Chunks::new(0, 1);
        b.at(rank, 0)
            .transfer(whole, input(rank, 0), vec![packets(rank, 0)])
            .op(Op::Put {
                chunks: whole,
                from: packets(rank, 0),
                to: packets(peer, 1),
                channel,
                signal: false,
                flush: false,
            })
            .transfer(whole, packets(rank, 1), vec![output(rank, 0)])
            .op(Op::Flush {
                channels: vec![channel],
            });
    }
    check(&b.finish().unwrap(), &SIZES, |turn, rank, _, at| {
        byte(1 - rank, at, turn)
    });
}

fn crossweft_device_packet() -> crossweft_device::packet::PacketType {
    crossweft_device::packet::PacketType::Ll8
}

#[test]
fn a_pipeline_of_two_blocks_through_a_bounded_buffer() {
    // Block 0 copies pieces to scratch memory, block 1 from there; two semaphores keep them in step,
    // and at most one piece apart.
    let mut b = Builder::new("pipeline", Collective::SendRecv, 2, 2, 3).scratch(3, false);
    let channels = all_channels(&mut b, 2);
    for rank in 0..2 {
        let (full, empty) = (b.semaphore(rank, 0), b.semaphore(rank, 1));
        let peer = 1 - rank;
        let all = Chunks::new(0, 3);
        let step = |ops: Vec<Op>| Op::Loop {
            unit_bytes: 48,
            chunks: 3,
            ops,
        };
        let transfer = |from, to| Op::Move {
            chunks: all,
            from,
            to: vec![to],
            switch: None,
        };
        b.at(rank, 0).op(step(vec![
            Op::Acquire {
                semaphores: vec![empty],
            },
            transfer(input(rank, 0), scratch(rank, 0)),
            Op::Release {
                semaphores: vec![full],
            },
        ]));
        b.at(rank, 1)
            .signal(&channels[rank as usize])
            .wait(&channels[rank as usize])
            .op(step(vec![
                Op::Acquire {
                    semaphores: vec![full],
                },
                transfer(scratch(rank, 0), output(peer, 0)),
                Op::Release {
                    semaphores: vec![empty],
                },
            ]))
            .signal(&channels[rank as usize])
            .wait(&channels[rank as usize]);
    }
    check(&b.finish().unwrap(), &SIZES, |turn, rank, _, at| {
        byte(1 - rank, at, turn)
    });
}

#[test]
fn reduce_scatter_from_peers_inputs() {
    let ranks = 4;
    let mut b = Builder::new("reduce-scatter", Collective::ReduceScatter, ranks, 2, 3);
    let channels = all_channels(&mut b, ranks);
    for rank in 0..ranks {
        let all = &channels[rank as usize];
        // Only block 0 talks to peers; the barrier passes it on.
        b.at(rank, 0).signal(all).wait(all).barrier(0, 2);
        b.at(rank, 1).barrier(0, 2);
        for block in 0..2 {
            let part = Chunks::new(0, 3).sliced(block, 2);
            let from = (0..ranks).map(|peer| input(peer, rank * 3)).collect();
            b.at(rank, block)
                .reduce_last(part, from, vec![output(rank, 0)])
                .barrier(1, 2);
        }
        b.at(rank, 0).signal(all).wait(all);
    }
    let sum = |turn, rank: u32, bytes: usize, at: usize| {
        (0..ranks).fold(0_u8, |sum, peer| {
            sum.wrapping_add(byte(peer, rank as usize * bytes + at, turn))
        })
    };
    check(&b.finish().unwrap(), &SIZES, sum);
}

#[test]
fn all_to_all_with_relaxed_handshakes() {
    let ranks = 3;
    let mut b = Builder::new("all-to-all", Collective::AllToAll, ranks, 1, 1);
    let channels = all_channels(&mut b, ranks);
    for rank in 0..ranks {
        let all = channels[rank as usize].clone();
        let mut ops = b.at(rank, 0);
        ops.op(Op::Signal {
            channels: all.clone(),
            relaxed: true,
        })
        .op(Op::Wait {
            channels: all.clone(),
            relaxed: true,
        });
        for peer in 0..ranks {
            ops.transfer(
                Chunks::new(0, 1),
                input(rank, peer),
                vec![output(peer, rank)],
            );
        }
        ops.signal(&all).wait(&all);
    }
    let expected = |turn, rank: u32, bytes: usize, at: usize| {
        byte(
            (at / bytes) as u32,
            rank as usize * bytes + at % bytes,
            turn,
        )
    };
    check(&b.finish().unwrap(), &SIZES, expected);
}

/// Each rank writes its own block everywhere.
fn direct_all_gather(in_place: InPlace) -> Plan {
    let ranks = 3;
    let mut b = Builder::new("all-gather", Collective::AllGather, ranks, 1, 1).in_place(in_place);
    let channels = all_channels(&mut b, ranks);
    for rank in 0..ranks {
        let all = &channels[rank as usize];
        let from = match in_place {
            InPlace::Required => output(rank, rank),
            _ => input(rank, 0),
        };
        let everywhere = (0..ranks).filter(|&peer| in_place != InPlace::Required || peer != rank);
        let to = everywhere.map(|peer| output(peer, rank)).collect();
        b.at(rank, 0)
            .signal(all)
            .wait(all)
            .transfer(Chunks::new(0, 1), from, to)
            .signal(all)
            .wait(all);
    }
    b.finish().unwrap()
}

#[test]
fn in_place_is_what_the_plan_says() {
    check(&direct_all_gather(InPlace::Forbidden), &SIZES, gathered);
    run_in_threads(3, CommunicatorOptions { timeout: LIMIT }, |communicator| {
        let rank = communicator.rank();
        let (a, b) = (
            communicator.allocate(3 * 100)?,
            communicator.allocate(3 * 100)?,
        );
        let refused = |result: Result<(), ExecutorError>, words: &str| {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        };
        let once = Schedule::RoundRobin;
        let required = direct_all_gather(InPlace::Required);
        let apart = prepare(communicator, &required, Some((&a, &b)), once)?;
        refused(
            apart.run_registered(0, 0, 100, LIMIT),
            "only works in place",
        );
        let together = prepare(communicator, &required, Some((&a, &a)), once)?;
        let own: Vec<u8> = (0..100).map(|at| byte(rank, at, 1)).collect();
        a.write(u64::from(rank) * 100, &own)?;
        communicator.barrier()?;
        together.run_registered(0, 0, 100, LIMIT)?;
        let mut result = vec![0; 300];
        a.read(0, &mut result)?;
        for (at, got) in result.into_iter().enumerate() {
            assert_eq!(got, gathered(1, rank, 100, at));
        }
        refused(
            together.run_registered(0, 0, 2000, LIMIT),
            "outside its memory",
        );
        let forbidden = direct_all_gather(InPlace::Forbidden);
        let together = prepare(communicator, &forbidden, Some((&a, &a)), once)?;
        refused(
            together.run_registered(0, 0, 100, LIMIT),
            "cannot work in place",
        );
        let private = prepare(communicator, &forbidden, None, once).unwrap_err();
        assert!(
            private.to_string().contains("each other's output"),
            "{private}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn chunks_that_move_about_need_whole_multiples() {
    let mut b = Builder::new("shuffle", Collective::Test, 1, 1, 4);
    b.at(0, 0)
        .transfer(Chunks::new(0, 1), input(0, 0), vec![output(0, 3)]);
    let plan = b.finish().unwrap();
    run_in_threads(1, CommunicatorOptions { timeout: LIMIT }, |communicator| {
        let prepared = prepare(communicator, &plan, None, Schedule::RoundRobin)?;
        let mut result = [0; 64];
        prepared.run(&[7; 64], &mut result, LIMIT)?;
        assert_eq!((result[47], result[48], result[63]), (0, 7, 7));
        let odd = prepared
            .run(&[7; 60], &mut [0; 60], LIMIT)
            .unwrap_err()
            .to_string();
        assert!(odd.contains("takes multiples of 64"), "{odd}");
        Ok(())
    })
    .map_err(|e: CollectiveError| e)
    .unwrap();
}

/// The fast kernels of GPUs go by the form of a plan: whoever changes these plans must see to that.
#[test]
fn the_all_reduces_of_small_and_large_messages_run_in_one_piece_on_gpus() {
    for ranks in [2, 3, 8, 16] {
        for blocks in [1, 4, 128] {
            for (algorithm, form) in [
                (Algorithm::OneShot, Some("one-shot")),
                (Algorithm::TwoShot, Some("two-shot")),
                (Algorithm::Ring, None),
            ] {
                let plan = algorithm.plan(ranks, blocks).unwrap();
                for rank in 0..ranks {
                    assert_eq!(fused_form(&plan, rank), form, "{algorithm}, {ranks} ranks");
                }
            }
        }
    }
    // More ranks than the kernels have room for.
    let many = Algorithm::OneShot.plan(18, 1).unwrap();
    assert_eq!(fused_form(&many, 0), None);
}

/// The same of all other collectives.
#[test]
fn one_hops_of_all_collectives_run_in_one_piece_on_gpus() {
    let rooted = |root| {
        [
            Collective::Broadcast { root },
            Collective::Gather { root },
            Collective::Scatter { root },
        ]
    };
    let all = [
        Collective::AllGather,
        Collective::AllToAll,
        Collective::ReduceScatter,
    ];
    for ranks in [2, 3, 8, 16] {
        for collective in all.into_iter().chain(rooted(0)).chain(rooted(ranks - 1)) {
            for (algorithm, of_packets) in [
                (Algorithm::OneShot, true),
                (Algorithm::Direct, false),
                (Algorithm::Push, false),
            ] {
                if !Algorithm::of(collective).contains(&algorithm) {
                    continue;
                }
                let form = match (collective, of_packets) {
                    (Collective::ReduceScatter, true) => "one-shot",
                    (Collective::ReduceScatter, false) => "two-shot",
                    _ => "one-hop",
                };
                for blocks in [1, 4, 32] {
                    let plan = algorithm.plan_of(collective, ranks, blocks).unwrap();
                    for rank in 0..ranks {
                        let found = fused_form(&plan, rank);
                        assert_eq!(
                            found,
                            Some(form),
                            "{algorithm} {collective:?}, {rank} of {ranks}"
                        );
                    }
                }
            }
            let staged = Algorithm::Staged.plan_of(collective, ranks, 2).unwrap();
            assert_eq!(fused_form(&staged, 0), None);
        }
    }
    let many = Algorithm::Direct
        .plan_of(Collective::AllToAll, 18, 1)
        .unwrap();
    assert_eq!(fused_form(&many, 0), None);
}
