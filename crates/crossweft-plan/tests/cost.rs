//! The cost model, against values worked out by hand.
#![allow(clippy::unwrap_used, reason = "tests")]

use crossweft_device::packet::PacketType;
use crossweft_plan::cost::{
    Cache, CostError, Costs, Link, Memory, Nodes, Reason, Timeline, Topology, TopologyError,
    predict,
};
use crossweft_plan::{Buffer, Builder, Chunks, Collective, Op, Operand, Plan};

/// Bytes that a thread block moves in 16 us, a link in 1.6 us.
const BYTES: u64 = 160_000;

/// Round numbers: a GB/s is 1000 bytes a microsecond.
fn machine() -> Topology {
    Topology {
        name: "round".to_owned(),
        nodes: Nodes::Every(8),
        node: Link {
            latency_us: 1.0,
            gbps: 100.0,
        },
        network: Link {
            latency_us: 20.0,
            gbps: 5.0,
        },
        memory: Memory {
            block_gbps: 10.0,
            block_packet_gbps: 5.0,
            packet_bytes: 2.0,
            rank_gbps: 1000.0,
            cache: None,
        },
        costs: Costs {
            launch_us: 10.0,
            op_us: 1.0,
            signal_us: 2.0,
            wait_us: 3.0,
            packet_us: 0.5,
            semaphore_us: 4.0,
            barrier_us: 5.0,
            proxy_us: 6.0,
        },
    }
}

fn builder(ranks: u32, blocks: u32) -> Builder {
    Builder::new("case", Collective::Test, ranks, blocks, 1)
        .blocks_of_message(1, 1)
        .scratch(1, false)
        .packets(1, PacketType::Ll16)
}

const ALL: Chunks = Chunks::new(0, 1);

fn input(rank: u32) -> Operand {
    Operand::new(rank, Buffer::Input, 0)
}

fn output(rank: u32) -> Operand {
    Operand::new(rank, Buffer::Output, 0)
}

fn packets(rank: u32) -> Operand {
    Operand::new(rank, Buffer::Packets, 0)
}

fn run(plan: &Plan) -> Timeline {
    let timeline = predict(plan, &machine(), BYTES).unwrap();
    assert_eq!(timeline, predict(plan, &machine(), BYTES).unwrap());
    sound(&timeline);
    timeline
}

/// What holds for every timeline.
fn sound(timeline: &Timeline) {
    let mut at = 0.0;
    for hop in &timeline.critical_path {
        assert_eq!(hop.from_us, at, "{:#?}", timeline.critical_path);
        assert!(hop.to_us >= hop.from_us);
        at = hop.to_us;
    }
    if let Some(total) = timeline.total_us {
        assert_eq!(at, total);
    }
    for edge in &timeline.edges {
        let (from, to) = (&timeline.steps[edge.from], &timeline.steps[edge.to]);
        assert!(from.start_us <= edge.arrived_us);
        assert!(edge.arrived_us <= to.end_us.unwrap());
    }
    for pair in timeline.steps.windows(2) {
        if (pair[0].rank, pair[0].block) == (pair[1].rank, pair[1].block)
            && let Some(end) = pair[0].end_us
        {
            assert_eq!(pair[1].start_us, end);
        }
    }
}

fn path(timeline: &Timeline) -> Vec<(u32, &'static str, &'static str, f64, f64)> {
    let hop = |hop: &crossweft_plan::cost::Hop| {
        let step = &timeline.steps[hop.step];
        (
            step.rank,
            step.name,
            hop.reason.name(),
            hop.from_us,
            hop.to_us,
        )
    };
    timeline.critical_path.iter().map(hop).collect()
}

#[test]
fn a_copy_takes_launch_overhead_and_its_blocks_time() {
    let mut b = builder(1, 1);
    b.at(0, 0).transfer(ALL, input(0), vec![output(0)]);
    let timeline = run(&b.finish().unwrap());
    // 10 + 1 + 160 000 bytes at 10 GB/s
    assert_eq!(timeline.total_us, Some(27.0));
    assert_eq!(timeline.steps.len(), 1);
    assert_eq!(timeline.steps[0].bytes, BYTES);
    assert_eq!(timeline.steps[0].ready_us, 11.0);
    assert_eq!(path(&timeline), [(0, "move", "launch", 0.0, 27.0)]);
}

#[test]
fn a_reduction_reads_all_its_sources() {
    let mut b = builder(1, 1);
    let from = vec![input(0), Operand::new(0, Buffer::Scratch, 0)];
    b.at(0, 0).reduce(ALL, from, vec![output(0)]);
    assert_eq!(run(&b.finish().unwrap()).total_us, Some(10.0 + 1.0 + 32.0));
}

#[test]
fn a_wait_ends_after_the_signal_has_crossed_the_link() {
    let mut b = builder(2, 1);
    let (there, back) = b.connect(0, 1);
    b.at(0, 0).signal(&[there]);
    b.at(1, 0).wait(&[back]);
    let timeline = run(&b.finish().unwrap());
    // Sent at 10 + 1 + 2, there at 14, seen at 17.
    assert_eq!(timeline.total_us, Some(17.0));
    assert_eq!(timeline.steps[1].ready_us, 14.0);
    assert_eq!(
        path(&timeline),
        [
            (0, "signal", "launch", 0.0, 13.0),
            (1, "wait", "signal", 13.0, 17.0)
        ]
    );
    assert_eq!(timeline.edges.len(), 1);
    let edge = &timeline.edges[0];
    assert_eq!((edge.from, edge.to, edge.kind), (0, 1, Reason::Signal));
    assert_eq!(edge.arrived_us, 14.0);
}

#[test]
fn packets_are_read_while_they_arrive() {
    let mut b = builder(2, 1);
    b.at(0, 0).transfer(ALL, input(0), vec![packets(1)]);
    b.at(1, 0).transfer(ALL, packets(1), vec![output(1)]);
    let timeline = run(&b.finish().unwrap());
    // Written from 11 to 43 at 5 GB/s; the first is there at 12, the last at 44, and is seen at 44.5.
    assert_eq!(timeline.steps[0].end_us, Some(43.0));
    assert_eq!(timeline.steps[1].ready_us, 12.0);
    assert_eq!(timeline.total_us, Some(44.5));
    assert_eq!(
        path(&timeline),
        [
            (0, "move", "launch", 0.0, 43.0),
            (1, "move", "packets", 43.0, 44.5)
        ]
    );
}

#[test]
fn what_is_read_from_a_peer_costs_the_latency_both_ways() {
    let mut b = builder(2, 1);
    b.at(1, 0).transfer(ALL, input(0), vec![output(1)]);
    assert_eq!(run(&b.finish().unwrap()).total_us, Some(27.0 + 2.0));
    let mut b = builder(2, 1);
    b.at(1, 0).transfer(ALL, input(1), vec![output(0)]);
    assert_eq!(run(&b.finish().unwrap()).total_us, Some(27.0));
}

#[test]
fn blocks_share_their_ranks_link() {
    let mut b = builder(2, 20);
    for block in 0..20 {
        let part = ALL.sliced(block, 20);
        b.at(0, block).transfer(part, input(0), vec![output(1)]);
    }
    let plan = b.finish().unwrap();
    // Each block has 80 000 bytes, 8 us; the link 1.6 MB, 16 us.
    let timeline = predict(&plan, &machine(), 10 * BYTES).unwrap();
    sound(&timeline);
    assert_eq!(timeline.total_us, Some(27.0));
    for step in &timeline.steps {
        assert_eq!((step.end_us, step.link_bound), (Some(27.0), true));
    }
    // One that comes later has its share from then on.
    let mut b = builder(2, 2);
    let semaphore = b.semaphore(0, 1);
    let half = |block| ALL.sliced(block, 2);
    b.at(0, 0).transfer(half(0), input(0), vec![output(1)]);
    b.at(0, 1).op(Op::Acquire {
        semaphores: vec![semaphore],
    });
    b.at(0, 1)
        .transfer(half(1), input(0), vec![output(1)])
        .op(Op::Release {
            semaphores: vec![semaphore],
        });
    let mut narrow = machine();
    narrow.node.gbps = 10.0;
    let timeline = predict(&b.finish().unwrap(), &narrow, BYTES).unwrap();
    sound(&timeline);
    // 8 us of work each on the link: alone from 11 to 12, then both until 26, then the second alone.
    let ends: Vec<_> = timeline.steps.iter().map(|step| step.end_us).collect();
    assert_eq!(ends[0], Some(26.0));
    assert_eq!(ends[2], Some(27.0));
    // Two ranks that send to each other do not disturb each other.
    let mut b = builder(2, 1);
    b.at(0, 0).transfer(ALL, input(0), vec![output(1)]);
    b.at(1, 0).transfer(ALL, input(1), vec![output(0)]);
    let mut fast = machine();
    (fast.memory.block_gbps, fast.memory.rank_gbps) = (100.0, 1e6);
    let timeline = predict(&b.finish().unwrap(), &fast, BYTES).unwrap();
    assert!((timeline.total_us.unwrap() - 12.6).abs() < 1e-3);
}

#[test]
fn a_semaphore_may_have_any_number_at_first() {
    let mut b = builder(1, 1);
    let semaphore = b.semaphore(0, u32::MAX);
    let semaphores = vec![semaphore];
    b.at(0, 0)
        .op(Op::Acquire {
            semaphores: semaphores.clone(),
        })
        .op(Op::Release { semaphores });
    // 10, then 1 each.
    assert_eq!(run(&b.finish().unwrap()).total_us, Some(12.0));
}

/// Times are whole numbers of picoseconds, of which there are not enough for everything that a topology may say.
#[test]
fn what_takes_too_long_is_an_error() {
    let mut slow = machine();
    (slow.memory.block_gbps, slow.node.gbps) = (1e-3, 1e-3);
    let mut b = builder(2, 1);
    let from = vec![input(1); 64];
    b.at(0, 0).reduce(ALL, from, vec![output(0)]);
    let plan = b.finish().unwrap();
    let error = predict(&plan, &slow, 1 << 40).unwrap_err();
    assert!(matches!(error, CostError::TooLong { .. }), "{error}");
    assert!(predict(&plan, &slow, 1 << 20).unwrap().total_us.is_some());
    assert!(
        predict(&plan, &machine(), 1 << 40)
            .unwrap()
            .total_us
            .is_some()
    );
}

#[test]
fn a_put_passes_through_the_proxy() {
    let mut b = builder(2, 1);
    let (there, back) = b.connect_port(0, 1);
    b.at(0, 0).op(Op::Put {
        chunks: ALL,
        from: input(0),
        to: output(1),
        channel: there,
        signal: true,
        flush: false,
    });
    b.at(0, 0).op(Op::Flush {
        channels: vec![there],
    });
    b.at(1, 0).wait(&[back]);
    let timeline = run(&b.finish().unwrap());
    // Asked for at 11, begun at 17, sent at 18.6, there at 19.6, seen at 22.6; known back at 20.6.
    assert_eq!(timeline.steps[0].end_us, Some(11.0));
    assert_eq!(timeline.steps[1].end_us, Some(23.6));
    assert_eq!(timeline.steps[2].ready_us, 19.6);
    assert_eq!(timeline.steps[2].end_us, Some(22.6));
    assert_eq!(
        path(&timeline),
        [
            (0, "put", "launch", 0.0, 11.0),
            (0, "flush", "put", 11.0, 23.6)
        ]
    );
    assert_eq!(timeline.edges[0].kind, Reason::Put);
}

#[test]
fn a_proxy_does_one_request_after_the_other() {
    let mut b = builder(2, 2);
    let (there, back) = b.connect_port(0, 1);
    for block in 0..2 {
        b.at(0, block).signal(&[there]);
    }
    b.at(1, 0).wait(&[back]).wait(&[back]);
    let timeline = run(&b.finish().unwrap());
    // Requests at 11, done at 17 and 23, there at 18 and 24.
    assert_eq!(timeline.steps[2].end_us, Some(21.0));
    assert_eq!(timeline.total_us, Some(27.0));
}

#[test]
fn blocks_meet_at_semaphores_and_barriers() {
    let mut b = builder(1, 2);
    let semaphore = b.semaphore(0, 0);
    b.at(0, 0).op(Op::Release {
        semaphores: vec![semaphore],
    });
    b.at(0, 0).barrier(0, 2);
    b.at(0, 1).op(Op::Acquire {
        semaphores: vec![semaphore],
    });
    b.at(0, 1).barrier(0, 2);
    let timeline = run(&b.finish().unwrap());
    // Released at 11, acquired at 15, both at the barrier at 16, gone at 21.
    assert_eq!(timeline.total_us, Some(21.0));
    let kinds: Vec<_> = timeline.edges.iter().map(|edge| edge.kind).collect();
    assert_eq!(kinds, [Reason::Semaphore, Reason::Barrier]);
    assert_eq!(
        path(&timeline),
        [
            (0, "release", "launch", 0.0, 11.0),
            (0, "acquire", "semaphore", 11.0, 15.0),
            (0, "barrier", "order", 15.0, 16.0),
            (0, "barrier", "barrier", 16.0, 21.0)
        ]
    );
}

#[test]
fn loops_are_unrolled_for_the_size() {
    let mut b = builder(1, 1);
    b.at(0, 0).op(Op::Loop {
        unit_bytes: 16_000,
        chunks: 1,
        ops: vec![Op::Move {
            chunks: ALL,
            from: input(0),
            to: vec![output(0)],
            switch: None,
        }],
    });
    let plan = b.finish().unwrap();
    let timeline = run(&plan);
    // Ten pieces of 1 + 1.6 us.
    assert_eq!(timeline.steps.len(), 10);
    assert_eq!(timeline.total_us, Some(10.0 + 26.0));
    assert!(timeline.steps.iter().all(|step| step.inner == Some(0)));
    let error = predict(&plan, &machine(), 1 << 40).unwrap_err();
    assert!(matches!(error, CostError::TooLarge { .. }), "{error}");
}

#[test]
fn what_waits_for_ever_has_no_end() {
    let mut b = builder(2, 1);
    let (there, back) = b.connect(0, 1);
    b.at(0, 0).wait(&[there]).signal(&[there]);
    b.at(1, 0).wait(&[back]).signal(&[back]);
    let timeline = run(&b.finish().unwrap());
    assert_eq!(timeline.total_us, None);
    assert!(timeline.steps.iter().all(|step| step.end_us.is_none()));
    assert_eq!(timeline.steps[0].start_us, 10.0);
    assert!(timeline.critical_path.is_empty());
}

#[test]
fn other_nodes_are_reached_over_the_network() {
    let mut b = builder(2, 1);
    b.at(0, 0).transfer(ALL, input(0), vec![output(1)]);
    let plan = b.finish().unwrap();
    let mut apart = machine();
    apart.nodes = Nodes::List(vec![0, 1]);
    // 160 000 bytes at 5 GB/s.
    let timeline = predict(&plan, &apart, BYTES).unwrap();
    assert_eq!(timeline.total_us, Some(11.0 + 32.0));
    apart.nodes = Nodes::List(vec![0]);
    let error = predict(&plan, &apart, BYTES).unwrap_err();
    assert!(
        matches!(
            error,
            CostError::Topology(TopologyError::Ranks {
                named: 1,
                ranks: 2,
                ..
            })
        ),
        "{error}"
    );
}

#[test]
fn beyond_the_cache_blocks_are_slower() {
    let mut b = builder(1, 1);
    b.at(0, 0).transfer(ALL, input(0), vec![output(0)]);
    let plan = b.finish().unwrap();
    let mut machine = machine();
    // Input, output, a scratch slot and a packet slot: five messages.
    for (bytes, time) in [(5 * BYTES, 27.0), (5 * BYTES - 1, 91.0)] {
        machine.memory.cache = Some(Cache {
            bytes,
            block_gbps: 2.0,
        });
        let timeline = predict(&plan, &machine, BYTES).unwrap();
        assert_eq!(timeline.total_us, Some(time));
    }
}

#[test]
fn sizes_and_topologies_that_do_not_fit_are_refused() {
    let mut b = builder(1, 1);
    b.at(0, 0).transfer(ALL, input(0), vec![output(0)]);
    let plan = b.finish().unwrap();
    for bytes in [0, u64::MAX] {
        let error = predict(&plan, &machine(), bytes).unwrap_err();
        assert!(matches!(error, CostError::Size { .. }), "{error}");
    }
    let mut b = Builder::new("case", Collective::Test, 1, 1, 2).blocks_of_message(1, 1);
    b.at(0, 0).transfer(
        ALL,
        Operand::new(0, Buffer::Input, 0),
        vec![Operand::new(0, Buffer::Output, 1)],
    );
    let moved = b.finish().unwrap();
    let error = predict(&moved, &machine(), 48).unwrap_err();
    assert!(
        error.to_string().contains("multiples of 32 bytes"),
        "{error}"
    );
    assert!(predict(&moved, &machine(), 64).is_ok());

    let mut broken = plan.clone();
    broken.ranks[0].blocks.clear();
    let error = predict(&broken, &machine(), 16).unwrap_err();
    assert!(matches!(error, CostError::Plan(_)), "{error}");

    for wrong in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        let mut machine = machine();
        machine.node.gbps = wrong;
        let error = predict(&plan, &machine, 16).unwrap_err();
        assert!(error.to_string().contains("node.gbps"), "{error}");
    }
}

#[test]
fn topologies_are_files() {
    for name in Topology::BUILT_IN {
        let topology = Topology::built_in(name).unwrap();
        assert_eq!(topology.name, name);
        let text = topology.to_json();
        assert_eq!(Topology::from_json(text.as_bytes()).unwrap(), topology);
        let unknown = text.replacen("\"name\"", "\"colour\": 1, \"name\"", 1);
        let error = Topology::from_json(unknown.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("colour"), "{error}");
    }
    assert_eq!(Topology::built_in("abacus"), None);
    // The guide shows one in full.
    let guide = include_str!("../../../docs/plan-pages.md");
    let shown = guide.split("```json\n").nth(1).unwrap();
    let shown = shown.split("```").next().unwrap();
    assert_eq!(
        Topology::from_json(shown.as_bytes()).unwrap(),
        Topology::h200()
    );
    let text = machine()
        .to_json()
        .replace("\"op_us\": 1.0", "\"op_us\": -1.0");
    let error = Topology::from_json(text.as_bytes()).unwrap_err();
    assert!(error.to_string().contains("costs.op_us is -1"), "{error}");
}

#[test]
fn rings_over_nodes_are_sound_at_every_size() {
    let ranks = 8;
    let mut b = Builder::new("ring", Collective::Test, ranks, 3, ranks)
        .blocks_of_message(1, 1)
        .scratch(ranks, true);
    let ends: Vec<_> = (0..3 * ranks)
        .map(|index| b.connect(index % ranks, (index + 1) % ranks))
        .collect();
    for rank in 0..ranks {
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        for block in 0..3 {
            let end = |rank: u32| ends[(block * ranks + rank) as usize];
            for step in 0..ranks {
                let chunk = (rank + ranks - step) % ranks;
                let part = Chunks::new(chunk, 1).sliced(block, 3);
                let from = match step {
                    0 => Operand::new(rank, Buffer::Input, chunk),
                    _ => Operand::new(rank, Buffer::Scratch, chunk),
                };
                let to = Operand::new(next, Buffer::Scratch, chunk);
                b.at(rank, block)
                    .transfer(part, from, vec![to])
                    .signal(&[end(rank).0])
                    .wait(&[end(before).1]);
            }
        }
    }
    let plan = b.finish().unwrap();
    let mut machine = machine();
    machine.nodes = Nodes::List(vec![0, 0, 0, 1, 1, 1, 2, 2]);
    let mut before = 0.0;
    for bytes in [1, 100, 4096, 100_000, 1 << 20, (1 << 24) + 3] {
        let timeline = predict(&plan, &machine, bytes).unwrap();
        sound(&timeline);
        let total = timeline.total_us.unwrap();
        assert!(total >= before, "{bytes}: {total} after {before}");
        // All that crosses the link between two nodes.
        let least = bytes as f64 / machine.network.gbps / 1000.0;
        assert!(total > least, "{bytes}: {total}, {least}");
        before = total;
    }
}
