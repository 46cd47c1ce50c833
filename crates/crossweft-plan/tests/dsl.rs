//! The language: what is recorded, refused, and compiled.
#![allow(clippy::unwrap_used)]

use crossweft_plan::check::{self, check};
use crossweft_plan::dsl::{self, Error, Misuse, Options, Program, Replication, Source};
use crossweft_plan::{Collective, Content, InPlace, InputBlock, Op, Plan, mscclpp};

/// All-gather by direct puts, with all synchronisation written out.
fn all_gather(ranks: u32) -> Result<Program, Error> {
    let mut program = Program::new(Options::new("all-gather", Collective::AllGather, ranks))?;
    let mut channels = Vec::new();
    for rank in 0..ranks {
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            channels.push((rank, peer, program.memory_channel(peer, rank)?));
        }
    }
    for &(_, _, channel) in &channels {
        program.relaxed_signal(channel, 0)?;
    }
    for &(_, _, channel) in &channels {
        program.relaxed_wait(channel, 0)?;
    }
    for rank in 0..ranks {
        let (input, output) = (program.input(rank)?, program.output(rank)?);
        program.copy(output.chunk(rank), input.all(), 0)?;
    }
    for &(rank, peer, channel) in &channels {
        let (input, output) = (program.input(rank)?, program.output(peer)?);
        program.put(channel, output.chunk(rank), input.all(), 0)?;
        program.signal(channel, 0)?;
    }
    for &(_, _, channel) in &channels {
        program.wait(channel, 0)?;
    }
    Ok(program)
}

#[test]
fn written_out_all_gather_is_accepted() {
    for ranks in [2, 3, 8] {
        let compiled = all_gather(ranks).unwrap().compile().unwrap();
        assert_eq!(compiled.plan.world_size(), ranks);
        let line = compiled.sources.get(0, 0, 0, None).unwrap();
        assert!(line.file.ends_with("dsl.rs"), "{line}");
    }
}

#[test]
fn misuse_names_the_line_and_the_reason() {
    let mut program = Program::new(Options::new("wrong", Collective::AllReduce, 2)).unwrap();
    let (input, output) = (program.input(0).unwrap(), program.output(0).unwrap());
    let chunk = output.chunk(2);
    let line = line!() + 1;
    let error = program.copy(chunk, input.chunk(0), 0).unwrap_err();
    let Error::Misuse { at, misuse } = &error else {
        panic!("{error}");
    };
    assert_eq!(at.line, line);
    assert!(at.file.ends_with("dsl.rs"));
    assert!(matches!(
        misuse,
        Misuse::OutOfRange {
            first: 2,
            end: 3,
            have: 2,
            ..
        }
    ));

    let theirs = program.output(1).unwrap();
    let error = program
        .at(Source::new("ring.py", 7))
        .copy(theirs.chunk(0), input.chunk(0), 0);
    assert_eq!(
        error.unwrap_err().to_string(),
        "ring.py:7: the source is of rank 0, but must be of rank 1"
    );
    let error = program.at(Source::new("ring.py", 8)).input(2);
    assert_eq!(
        error.unwrap_err().to_string(),
        "ring.py:8: there is no rank 2; there are 2, from 0"
    );
    let error = program
        .copy_packets(output.chunk(0), input.chunk(0), 0)
        .unwrap_err();
    assert!(matches!(
        error,
        Error::Misuse {
            misuse: Misuse::WrongBuffer { .. },
            ..
        }
    ));
    let error = program
        .copy(input.chunk(0), output.chunk(0), 0)
        .unwrap_err();
    assert!(matches!(
        error,
        Error::Misuse {
            misuse: Misuse::WritesInput,
            ..
        }
    ));
    let channel = program.memory_channel(1, 0).unwrap();
    let error = program.flush(channel, 0).unwrap_err();
    assert!(matches!(
        error,
        Error::Misuse {
            misuse: Misuse::ChannelKind { .. },
            ..
        }
    ));
}

#[test]
fn in_place_names_the_larger_buffer() {
    let mut options = Options::new("in place", Collective::AllGather, 2);
    options.in_place = InPlace::Required;
    options.auto_sync = false;
    let mut program = Program::new(options).unwrap();
    let (input, output) = (program.input(1).unwrap(), program.output(1).unwrap());
    program.copy(output.chunk(1), input.chunk(0), 0).unwrap();
    let Err(Error::Faults { faults, .. }) = program.compile() else {
        panic!("rank 0's chunk is missing");
    };
    assert!(!faults.is_empty());
}

/// All-gather by direct puts; no synchronisation is written out.
fn plain_all_gather(ranks: u32) -> Result<Program, Error> {
    let mut program = Program::new(Options::new("all-gather", Collective::AllGather, ranks))?;
    for rank in 0..ranks {
        let input = program.input(rank)?.all();
        for peer in 0..ranks {
            let output = program.output(peer)?.chunk(rank);
            if peer == rank {
                program.copy(output, input, 0)?;
            } else {
                let channel = program.memory_channel(peer, rank)?;
                program.put(channel, output, input, peer)?;
            }
        }
    }
    Ok(program)
}

/// All-reduce over nodes of `local` ranks: reduce-scatter inside each node, all-reduce of the pieces among nodes,
/// all-gather inside each node. Everything goes through scratch memory of the ranks that reduce.
fn hierarchical_all_reduce(nodes: u32, local: u32) -> Result<Program, Error> {
    let options = Options::new("hierarchical", Collective::AllReduce, nodes * local);
    hierarchical_all_reduce_with(options, nodes, local)
}

fn hierarchical_all_reduce_with(
    options: Options,
    nodes: u32,
    local: u32,
) -> Result<Program, Error> {
    let ranks = nodes * local;
    let mut program = Program::new(options)?;
    // Each rank of a node reduces a part of the node's data, each node a part of that part.
    let part = |l: u32| l * nodes..(l + 1) * nodes;
    let mut scratch = Vec::new();
    for rank in 0..ranks {
        let inside = program.scratch(rank, nodes * local)?;
        let between = program.scratch(rank, nodes)?;
        scratch.push((inside, between));
    }
    for rank in 0..ranks {
        let (node, l) = (rank / local, rank % local);
        for other in (0..local).filter(|other| *other != l) {
            let peer = node * local + other;
            let channel = program.memory_channel(peer, rank)?;
            let src = program.input(rank)?.chunks(part(other));
            let dst = scratch[peer as usize].0.chunks(part(l));
            program.put(channel, dst, src, other)?;
        }
    }
    for rank in 0..ranks {
        let (node, l) = (rank / local, rank % local);
        for part_of in 0..nodes {
            let at = l * nodes + part_of;
            let src = program.input(rank)?.chunk(at);
            let others: Vec<_> = (0..local)
                .filter(|other| *other != l)
                .map(|other| scratch[rank as usize].0.chunk(other * nodes + part_of))
                .collect();
            let dst = program.output(rank)?.chunk(at);
            program.reduce(dst, src, &others, part_of % local)?;
            if part_of != node {
                let peer = part_of * local + l;
                let channel = program.port_channel(peer, rank)?;
                let there = scratch[peer as usize].1.chunk(node);
                program.put(channel, there, dst, part_of % local)?;
            }
        }
    }
    for rank in 0..ranks {
        let (node, l) = (rank / local, rank % local);
        let own = program.output(rank)?.chunk(l * nodes + node);
        let others: Vec<_> = (0..nodes)
            .filter(|other| *other != node)
            .map(|other| scratch[rank as usize].1.chunk(other))
            .collect();
        program.reduce(own, own, &others, 0)?;
        for other in (0..nodes).filter(|other| *other != node) {
            let peer = other * local + l;
            let channel = program.port_channel(peer, rank)?;
            let there = program.output(peer)?.chunk(l * nodes + node);
            program.put(channel, there, own, other % local)?;
        }
    }
    for rank in 0..ranks {
        let (node, l) = (rank / local, rank % local);
        for other in (0..local).filter(|other| *other != l) {
            let peer = node * local + other;
            let channel = program.memory_channel(peer, rank)?;
            let src = program.output(rank)?.chunks(part(l));
            let dst = program.output(peer)?.chunks(part(l));
            program.put(channel, dst, src, other)?;
        }
    }
    Ok(program)
}

#[test]
fn all_gather_is_synchronised() {
    for ranks in [1, 2, 8] {
        let compiled = plain_all_gather(ranks).unwrap().compile().unwrap();
        assert_eq!(compiled.plan.world_size(), ranks);
    }
}

#[test]
fn hierarchical_all_reduce_is_synchronised() {
    for (nodes, local) in [(1, 4), (2, 2), (2, 4), (4, 2)] {
        let program = hierarchical_all_reduce(nodes, local).unwrap();
        program.compile().unwrap();
    }
}

/// Moves everything to where it belongs by puts, and reduces by reading.
fn direct(options: Options) -> Result<Program, Error> {
    let (ranks, collective) = (options.ranks, options.collective);
    let mut program = Program::new(options)?;
    for rank in 0..ranks {
        let output = program.output(rank)?;
        let blocks = collective.blocks(ranks).map_or(0, |(_, blocks)| blocks);
        let chunks = output.len() / blocks;
        for block in 0..blocks {
            let to = output.chunks(block * chunks..(block + 1) * chunks);
            let of = |program: &mut Program, from: u32, block: u32| {
                let input = program.input(from)?;
                Ok::<_, Error>(input.chunks(block * chunks..(block + 1) * chunks))
            };
            match collective.content(ranks, rank, block) {
                Content::Any => {}
                Content::Inputs(inputs) => {
                    let InputBlock { rank: from, block } = inputs[0];
                    let src = of(&mut program, from, block)?;
                    if from == rank {
                        program.copy(to, src, 0)?;
                    } else {
                        let channel = program.memory_channel(rank, from)?;
                        program.put(channel, to, src, rank)?;
                    }
                }
                Content::Reduction { block } => {
                    let mut sum = of(&mut program, rank, block)?;
                    for peer in (0..ranks).filter(|peer| *peer != rank) {
                        let theirs = of(&mut program, peer, block)?;
                        let channel = program.memory_channel(peer, rank)?;
                        program.read_reduce(channel, to, sum, &[theirs], 0)?;
                        sum = to;
                    }
                }
            }
        }
    }
    Ok(program)
}

#[test]
fn every_collective_compiles() {
    let root = 1;
    let collectives = [
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast { root },
        Collective::Reduce { root },
        Collective::Gather { root },
        Collective::Scatter { root },
        Collective::AllReduce,
        Collective::AllToAll,
        Collective::SendRecv,
    ];
    for (index, collective) in collectives.into_iter().enumerate() {
        for in_place in [InPlace::Forbidden, InPlace::Any, InPlace::Required] {
            for (ranks, chunk_factor) in [(2, 1), (3, 2)] {
                let mut options = Options::new(collective.name(), collective, ranks);
                (options.in_place, options.chunk_factor) = (in_place, chunk_factor);
                let compiled = direct(options).unwrap().compile();
                // The last ones overwrite what is still to be sent, if they are in place.
                if index < 6 || in_place == InPlace::Forbidden {
                    let plan = compiled
                        .unwrap_or_else(|error| panic!("{in_place:?}: {error}"))
                        .plan;
                    let file = Plan::from_json(plan.to_json().as_bytes()).unwrap();
                    assert_eq!(file, plan);
                } else {
                    let Err(Error::Faults { faults, .. }) = compiled else {
                        panic!("{collective:?} in place overwrites its input");
                    };
                    assert_eq!(faults[0].diagnostic.code, check::Code::PostCondition);
                }
            }
        }
    }
}

fn fault_of(program: &Program) -> dsl::Fault {
    match program.compile() {
        Err(Error::Faults { faults, .. }) => faults[0].clone(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it is accepted"),
    }
}

#[test]
fn faults_name_their_lines() {
    let options = || Options::new("faulty", Collective::AllReduce, 2);
    // A missing wait.
    let mut program = Program::new(options()).unwrap();
    let channel = program.memory_channel(1, 0).unwrap();
    program
        .at(Source::new("a.py", 3))
        .signal(channel, 0)
        .unwrap();
    let fault = fault_of(&program);
    assert_eq!(fault.at, Some(Source::new("a.py", 3)), "{fault}");
    assert!(
        fault
            .to_string()
            .contains("let rank 1 wait for this signal"),
        "{fault}"
    );

    // A read of scratch memory that nothing was written to.
    let mut program = Program::new(options()).unwrap();
    let (scratch, output) = (program.scratch(0, 2).unwrap(), program.output(0).unwrap());
    program
        .at(Source::new("b.py", 5))
        .copy(output.all(), scratch.all(), 0)
        .unwrap();
    let fault = fault_of(&program);
    assert_eq!(fault.at, Some(Source::new("b.py", 5)), "{fault}");
    assert_eq!(fault.diagnostic.code, check::Code::Uninitialised);

    // A race, without automatic synchronisation: both lines, also inside a loop.
    let mut options = Options::new("racy", Collective::Test, 1);
    options.auto_sync = false;
    let mut program = Program::new(options).unwrap();
    let (input, output) = (program.input(0).unwrap(), program.output(0).unwrap());
    program.begin_loop(64, 1).unwrap();
    program
        .at(Source::new("c.py", 1))
        .copy(output.all(), input.all(), 0)
        .unwrap();
    program
        .at(Source::new("c.py", 2))
        .copy(output.all(), input.all(), 1)
        .unwrap();
    program.end_loop().unwrap();
    let fault = fault_of(&program);
    let mut lines = [fault.at.unwrap().line, fault.other.unwrap().line];
    lines.sort_unstable();
    assert_eq!(lines, [1, 2]);

    // Nobody can go on: each waits before it signals.
    let mut program = Program::new(Options::new("stuck", Collective::Test, 2)).unwrap();
    let ends = [(1, 0), (0, 1)].map(|(to, from)| program.memory_channel(to, from).unwrap());
    for end in ends {
        program.at(Source::new("d.py", 7)).wait(end, 0).unwrap();
        program.signal(end, 0).unwrap();
    }
    let fault = fault_of(&program);
    assert_eq!(fault.diagnostic.code, check::Code::Deadlock);
    assert_eq!(fault.at, Some(Source::new("d.py", 7)));

    // What was stated is not what is computed.
    let mut program = Program::new(Options::new("wrong", Collective::Custom, 1)).unwrap();
    let (input, output) = (program.input(0).unwrap(), program.output(0).unwrap());
    program
        .reduce(output.all(), input.all(), &[input.all()], 0)
        .unwrap();
    program.expect(output.all(), &[input.all()]).unwrap();
    assert_eq!(
        fault_of(&program).diagnostic.code,
        check::Code::PostCondition
    );
}

#[test]
fn a_custom_program_has_no_more_outputs_than_can_be_stated() {
    let mut options = Options::new("large", Collective::Custom, 4096);
    options.shape = (1, 1 << 20);
    let error = Program::new(options).unwrap_err().to_string();
    assert!(
        error.contains("1048576 chunks of output on each of 4096 ranks"),
        "{error}"
    );
}

#[test]
fn the_same_plan_has_the_same_hash() {
    let hash = |program: &Program| program.compile().unwrap().plan.content_hash();
    let (three, four) = (plain_all_gather(3).unwrap(), plain_all_gather(4).unwrap());
    assert_eq!(hash(&three), hash(&three));
    assert_eq!(hash(&three).len(), 64);
    assert_ne!(hash(&three), hash(&four));
    let mut renamed = three.compile().unwrap().plan;
    renamed.name = "other".to_owned();
    assert_eq!(renamed.content_hash(), hash(&three));
    let read = Plan::from_json(renamed.to_json().as_bytes()).unwrap();
    assert_eq!(read.content_hash(), hash(&three));
}

/// An all-reduce of packets: everyone sends everyone everything.
fn packet_all_reduce(options: Options) -> Result<Program, Error> {
    let ranks = options.ranks;
    let mut program = Program::new(options)?;
    let packets = (0..ranks)
        .map(|rank| program.scratch(rank, ranks * ranks))
        .collect::<Result<Vec<_>, _>>()?;
    for rank in 0..ranks {
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            let channel = program.memory_channel(peer, rank)?;
            let slots = packets[peer as usize].chunks(rank * ranks..(rank + 1) * ranks);
            let input = program.input(rank)?.all();
            program.put_packets(channel, slots, input, 0..2)?;
        }
    }
    for rank in 0..ranks {
        let others = (0..ranks).filter(|peer| *peer != rank);
        let others: Vec<_> = others
            .map(|peer| packets[rank as usize].chunks(peer * ranks..(peer + 1) * ranks))
            .collect();
        let (input, output) = (program.input(rank)?, program.output(rank)?);
        program.reduce_packets(output.all(), input.all(), &others, 0..2)?;
    }
    Ok(program)
}

/// A reduce-scatter in place: pieces come as packets, which several thread blocks reduce, one after the other.
fn packets_in_place(ranks: u32) -> Result<Program, Error> {
    let mut options = Options::new("packets in place", Collective::ReduceScatter, ranks);
    (options.in_place, options.chunk_factor) = (InPlace::Required, 2);
    let mut program = Program::new(options)?;
    let packets = (0..ranks)
        .map(|rank| program.scratch(rank, 2 * ranks))
        .collect::<Result<Vec<_>, _>>()?;
    for rank in 0..ranks {
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            let channel = program.memory_channel(peer, rank)?;
            let src = program.input(rank)?.chunks(2 * peer..2 * peer + 2);
            let dst = packets[peer as usize].chunks(2 * rank..2 * rank + 2);
            program.put_packets(channel, dst, src, vec![2 * peer, 2 * peer + 1])?;
        }
    }
    for rank in 0..ranks {
        let own = program.output(rank)?.all();
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            let others = [packets[rank as usize].chunks(2 * peer..2 * peer + 2)];
            program.reduce_packets(own, own, &others, vec![2 * peer, 2 * peer + 1])?;
        }
        // Sent on to the next rank, over what that has sent before.
        let next = (rank + 1) % ranks;
        let channel = program.memory_channel(next, rank)?;
        let dst = program.input(next)?.chunks(2 * rank..2 * rank + 2);
        program.put(channel, dst, own, 0)?;
    }
    Ok(program)
}

/// [`hierarchical_all_reduce`] by packets, for messages of `least` bytes and more.
fn packet_hierarchy(nodes: u32, local: u32, least: u64) -> Result<Program, Error> {
    let ranks = nodes * local;
    let mut options = Options::new("hierarchical packets", Collective::AllReduce, ranks);
    options.message_bytes.0 = least;
    let mut program = Program::new(options)?;
    let part = |l: u32| l * nodes..(l + 1) * nodes;
    let mut slots = Vec::new();
    for rank in 0..ranks {
        let inside = program.scratch(rank, local * nodes)?;
        let between = program.scratch(rank, nodes * nodes)?;
        slots.push((inside, between, program.scratch(rank, ranks)?));
    }
    let place = |rank: u32| (rank / local, rank % local);
    for rank in 0..ranks {
        let (node, l) = place(rank);
        for other in (0..local).filter(|other| *other != l) {
            let peer = node * local + other;
            let channel = program.memory_channel(peer, rank)?;
            let src = program.input(rank)?.chunks(part(other));
            program.put_packets(channel, slots[peer as usize].0.chunks(part(l)), src, other)?;
        }
    }
    for rank in 0..ranks {
        let (node, l) = place(rank);
        let (input, output) = (program.input(rank)?, program.output(rank)?);
        let received = (0..local).filter(|other| *other != l);
        let received: Vec<_> = received
            .map(|other| slots[rank as usize].0.chunks(part(other)))
            .collect();
        let (own, sum) = (input.chunks(part(l)), output.chunks(part(l)));
        program.reduce_packets(sum, own, &received, 0)?;
        for other in (0..nodes).filter(|other| *other != node) {
            let peer = other * local + l;
            let channel = program.memory_channel(peer, rank)?;
            let there = slots[peer as usize]
                .1
                .chunks(node * nodes..(node + 1) * nodes);
            program.put_packets(channel, there, sum, 0)?;
        }
    }
    for rank in 0..ranks {
        let (node, l) = place(rank);
        let sum = program.output(rank)?.chunks(part(l));
        let received = (0..nodes).filter(|other| *other != node);
        let received: Vec<_> = received
            .map(|other| {
                slots[rank as usize]
                    .1
                    .chunks(other * nodes..(other + 1) * nodes)
            })
            .collect();
        program.reduce_packets(sum, sum, &received, 0)?;
        for other in (0..local).filter(|other| *other != l) {
            let peer = node * local + other;
            let channel = program.memory_channel(peer, rank)?;
            let there = slots[peer as usize].2.chunks(part(l));
            program.put_packets(channel, there, sum, 0)?;
        }
    }
    for rank in 0..ranks {
        let (_, l) = place(rank);
        for other in (0..local).filter(|other| *other != l) {
            let dst = program.output(rank)?.chunks(part(other));
            let src = slots[rank as usize].2.chunks(part(other));
            program.unpack_packets(dst, src, other)?;
        }
    }
    Ok(program)
}

#[test]
fn packets_need_no_other_synchronisation() {
    let synchronises = |least| {
        let plan = packet_hierarchy(2, 2, least)
            .unwrap()
            .compile()
            .unwrap()
            .plan;
        let is_sync = |(_, op): &(u32, &Op)| matches!(op, Op::Signal { .. } | Op::Wait { .. });
        plan.all_ops().filter(is_sync).count() > 0
    };
    // 13 granules in 4 chunks fill all of them; 9 only three, as a single one does one.
    assert!(!synchronises(16 * 13));
    // Of a single granule nobody but the first chunk's ranks hear.
    assert!(synchronises(0));
}

#[test]
fn packets_in_place_are_synchronised() {
    for ranks in [2, 3, 8] {
        packets_in_place(ranks).unwrap().compile().unwrap();
    }
}

#[test]
fn a_plan_for_any_operation_marks_its_last_reductions() {
    let mut options = Options::new("any", Collective::AllReduce, 3);
    options.reduce_op = None;
    packet_all_reduce(options).unwrap().compile().unwrap();
    let mut options = Options::new("any", Collective::AllReduce, 4);
    options.reduce_op = None;
    let mut program = hierarchical_all_reduce_with(options, 2, 2).unwrap();
    program.compile().unwrap();
    // Adding something to the result: nothing can be the last.
    let output = program.output(0).unwrap().chunk(0);
    program.reduce(output, output, &[output], 0).unwrap();
    program.compile().unwrap_err();
}

#[test]
fn instances_share_the_data() {
    let instances = |replication, instances| {
        let mut options = Options::new("instances", Collective::AllReduce, 4);
        (options.instances, options.replication) = (instances, replication);
        options
    };
    for replication in [Replication::Interleaved, Replication::None] {
        for count in [2, 3] {
            let options = instances(replication, count);
            let program = hierarchical_all_reduce_with(options.clone(), 2, 2).unwrap();
            let plan = program.compile().unwrap().plan;
            let chunks = if replication == Replication::None {
                4
            } else {
                4 * count
            };
            assert_eq!(plan.chunks, chunks);
            assert_eq!(plan.ranks[0].blocks.len() as u32, 2 * count);
            let plan = packet_all_reduce(options).unwrap().compile().unwrap().plan;
            assert_eq!(plan.ranks[0].blocks.len() as u32, 2 * count);
            // Once, not squared.
            let theirs = mscclpp::import(mscclpp::export(&plan).unwrap().as_bytes()).unwrap();
            assert_eq!(theirs.plan.chunks, chunks);
        }
    }
}

#[test]
fn a_pipeline_keeps_step() {
    // One block copies pieces to scratch memory, the other one reduces them with what a peer holds.
    for auto_sync in [true, false] {
        let mut options = Options::new("pipeline", Collective::AllReduce, 2);
        options.auto_sync = auto_sync;
        let mut program = Program::new(options).unwrap();
        let scratch = [0, 1].map(|rank| program.scratch(rank, 2).unwrap());
        let channels = [(1, 0), (0, 1)]
            .map(|(to, from)| [0, 1].map(|_| program.memory_channel(to, from).unwrap()));
        if !auto_sync {
            for [start, _] in channels {
                program.relaxed_signal(start, 0).unwrap();
            }
            for [start, _] in channels {
                program.relaxed_wait(start, 0).unwrap();
            }
        }
        program.begin_loop(1 << 10, 1).unwrap();
        for rank in [0, 1] {
            let peer = 1 - rank;
            let [_, channel] = channels[rank as usize];
            for k in [0, 1] {
                let src = program.input(rank).unwrap().chunk(k);
                let dst = scratch[peer as usize].chunk(k);
                program.put(channel, dst, src, 0).unwrap();
            }
            if !auto_sync {
                program.signal(channel, 0).unwrap();
            }
        }
        if auto_sync {
            // Another loop over the same pieces keeps step with the first one.
            program.end_loop().unwrap();
            program.begin_loop(1 << 10, 1).unwrap();
        }
        for rank in [0, 1] {
            let [_, channel] = channels[rank as usize];
            if !auto_sync {
                program.wait(channel, 1).unwrap();
            }
            let (dst, src) = (program.output(rank).unwrap(), program.input(rank).unwrap());
            for k in [0, 1] {
                let others = [scratch[rank as usize].chunk(k)];
                program
                    .reduce(dst.chunk(k), src.chunk(k), &others, 1)
                    .unwrap();
            }
        }
        program.end_loop().unwrap();
        let plan = program.compile().unwrap().plan;
        // Two moves, and what tells of them; two reductions, and what waits for them.
        let is_loop = |op: &Op| matches!(op, Op::Loop { ops, .. } if ops.len() >= 3);
        assert_eq!(
            plan.ranks[0].blocks[1]
                .iter()
                .filter(|op| is_loop(op))
                .count(),
            1
        );
    }
}

/// Compile times, for whoever asks: `cargo test --release -p crossweft-plan --test dsl -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn compile_times() {
    let programs = [
        ("8 ranks, all-gather", plain_all_gather(8)),
        ("8 ranks, hierarchical", hierarchical_all_reduce(2, 4)),
        ("8 ranks, packets in place", packets_in_place(8)),
        ("16 ranks, packets in place", packets_in_place(16)),
        ("64 ranks, hierarchical", hierarchical_all_reduce(8, 8)),
        ("64 ranks, packets", packet_hierarchy(8, 8, 0)),
    ];
    for (what, program) in programs {
        let program = program.unwrap();
        let begin = std::time::Instant::now();
        let compiled = program.compile().unwrap();
        let ops = compiled.plan.all_ops().count();
        let all = begin.elapsed();
        let begin = std::time::Instant::now();
        assert!(check(&compiled.plan, &check::Options::default()).is_empty());
        let checking = begin.elapsed();
        println!("{what}: {ops} operations in {all:?}, of which the checker takes {checking:?}");
    }
}
