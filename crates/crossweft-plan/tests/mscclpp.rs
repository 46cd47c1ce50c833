//! Execution plans of MSCCL++: every operation, every default, and what is no plan at all.
#![allow(clippy::unwrap_used, reason = "tests")]

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;
use crossweft_plan::mscclpp::{Imported, export, import, is_mscclpp};
use crossweft_plan::{
    Buffer, Builder, ChannelKind, Chunks, Collective, InPlace, Op, Operand, Plan, PlanError, Switch,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A file of two ranks whose first thread block has these operations; rank 1 has none.
fn file(collective: &str, chunks: (u32, u32, u32), ops: Value) -> Value {
    let (input, output, scratch) = chunks;
    let gpu = |id: u32, peer: u32, ops: Value| {
        json!({
            "id": id, "input_chunks": input, "output_chunks": output, "scratch_chunks": scratch,
            "channels": [
                { "channel_type": "memory", "connected_to": [peer, peer] },
                { "channel_type": "port", "connected_to": [peer] },
                { "channel_type": "switch", "buffer_type": "i", "rank_groups": [{ "size": 1, "ranks": [0, 1] }] },
                { "channel_type": "switch", "buffer_type": "s", "rank_groups": [{ "size": 1, "ranks": [0, 1] }] }
            ],
            "remote_buffers": [
                { "rank": peer, "type": "s", "access_channel_types": ["memory", "port"] },
                { "rank": peer, "type": "o", "access_channel_types": ["port", "memory"] }
            ],
            "semaphores": [{ "init_value": 1 }, { "init_value": 0 }],
            "threadblocks": [{
                "id": 0,
                // Numbers of the thread block are not those of the rank.
                "channels": [
                    { "channel_type": "memory", "channel_ids": [1, 0], "buff": "s" },
                    { "channel_type": "port", "channel_ids": [0] },
                    { "channel_type": "switch", "channel_ids": [1, 0] }
                ],
                "remote_buffer_refs": [
                    { "access_channel_type": "memory", "remote_buffer_ids": [1, 0] },
                    { "access_channel_type": "port", "remote_buffer_ids": [0, 1] }
                ],
                "ops": ops
            }]
        })
    };
    json!({
        "name": "own", "collective": collective, "protocol": "LL", "inplace": false,
        "gpus": [gpu(0, 1, ops), gpu(1, 0, json!([]))]
    })
}

fn read(file: &Value) -> Result<Imported, PlanError> {
    import(file.to_string().as_bytes())
}

/// The operations that a test plan of 4 chunks of input and output, and 8 of scratch, gets.
fn ops(ops: Value) -> Vec<Op> {
    let plan = read(&file("test", (4, 4, 8), ops)).unwrap().plan;
    plan.ranks[0].blocks[0].clone()
}

fn refused(file: &Value) -> String {
    let text = read(file).unwrap_err().to_string();
    assert!(!text.contains('\n') && text.len() < 400, "{text}");
    text
}

fn at(rank: u32, buffer: Buffer, index: u32) -> Operand {
    Operand::new(rank, buffer, index)
}

fn input(index: u32) -> Operand {
    at(0, Buffer::Input, index)
}

fn output(index: u32) -> Operand {
    at(0, Buffer::Output, index)
}

const ONE: Chunks = Chunks::new(0, 1);

fn moved(from: Operand, to: &[Operand]) -> Op {
    Op::Move {
        chunks: ONE,
        from,
        to: to.to_vec(),
        switch: None,
    }
}

fn reduced(from: &[Operand], to: &[Operand]) -> Op {
    Op::Reduce {
        chunks: ONE,
        from: from.to_vec(),
        to: to.to_vec(),
        last: false,
        switch: None,
    }
}

fn put(from: Operand, to: Operand, signal: bool, flush: bool) -> Op {
    Op::Put {
        chunks: ONE,
        from,
        to,
        channel: 2,
        signal,
        flush,
    }
}

/// A chunk of this rank.
fn own(letter: &str, index: u32) -> Value {
    json!({ "type": letter, "index": index, "size": 1 })
}

/// A chunk of a peer: buffer 0 is its output over memory channels, its scratch over port channels.
fn peer(id: u32, index: u32) -> Value {
    json!({ "buffer_id": id, "index": index, "size": 1 })
}

fn group(id: u32, index: u32) -> Value {
    json!({ "switch_channel_id": id, "index": index, "size": 1 })
}

#[test]
fn copies_of_every_kind() {
    let scratch = |index| at(0, Buffer::Scratch, index);
    let packets = |index| at(0, Buffer::Packets, index);
    let cases = [
        (
            json!({ "name": "copy", "src_buff": [own("i", 1)], "dst_buff": [own("s", 0)] }),
            vec![moved(input(1), &[scratch(0)])],
        ),
        (
            json!({ "name": "put", "channel_type": "memory", "src_buff": [own("i", 1)], "dst_buff": [peer(0, 2)] }),
            vec![moved(input(1), &[at(1, Buffer::Output, 2)])],
        ),
        // Pairs of different sources, and one source for several destinations.
        (
            json!({ "name": "put", "channel_type": "memory",
                 "src_buff": [own("i", 1), own("s", 0), own("s", 0)], "dst_buff": [peer(0, 2), peer(0, 0), peer(1, 0)] }),
            vec![
                moved(input(1), &[at(1, Buffer::Output, 2)]),
                moved(
                    scratch(0),
                    &[at(1, Buffer::Output, 0), at(1, Buffer::Scratch, 0)],
                ),
            ],
        ),
        (
            json!({ "name": "get", "channel_type": "memory", "channel_ids": [0], "src_buff": [peer(0, 3)], "dst_buff": [own("i", 3)] }),
            vec![moved(at(1, Buffer::Output, 3), &[input(3)])],
        ),
        (
            json!({ "name": "ppkt", "channel_type": "memory", "src_buff": [own("i", 1)], "dst_buff": [peer(1, 0)] }),
            vec![moved(input(1), &[at(1, Buffer::Packets, 0)])],
        ),
        (
            json!({ "name": "rppkt", "channel_type": "memory", "src_buff": [own("s", 0)], "dst_buff": [peer(1, 0), peer(1, 1)] }),
            vec![moved(
                packets(0),
                &[at(1, Buffer::Packets, 0), at(1, Buffer::Packets, 1)],
            )],
        ),
        (
            json!({ "name": "cpkt", "src_buff": [own("o", 1)], "dst_buff": [own("s", 0)] }),
            vec![moved(output(1), &[packets(0)])],
        ),
        // What is unpacked lies in scratch, whatever the file says.
        (
            json!({ "name": "upkt", "src_buff": [own("i", 0)], "dst_buff": [own("o", 2)] }),
            vec![moved(packets(0), &[output(2)])],
        ),
        (
            json!({ "name": "gstore", "channel_type": "switch", "dst_buff": [group(1, 2)],
                 "src_buff": [{ "rank": 0, "type": "s", "index": 0, "size": 1 }] }),
            vec![Op::Move {
                chunks: ONE,
                from: scratch(0),
                to: vec![input(2), at(1, Buffer::Input, 2)],
                switch: Some(0),
            }],
        ),
        // Packets that lie there already are not sent to this rank.
        (
            json!({ "name": "gstorepkt", "channel_type": "switch", "src_buff": [own("s", 0)], "dst_buff": [group(0, 0)] }),
            vec![moved(packets(0), &[at(1, Buffer::Packets, 0)])],
        ),
        (
            json!({ "name": "gstorepkt", "channel_type": "switch", "src_buff": [own("s", 0)], "dst_buff": [group(0, 1)] }),
            vec![Op::Move {
                chunks: ONE,
                from: packets(0),
                to: vec![packets(1), at(1, Buffer::Packets, 1)],
                switch: Some(0),
            }],
        ),
        (
            json!({ "name": "copy", "src_buff": [own("i", 1)], "dst_buff": [own("o", 1)], "tbg_info": { "tb_id": 2, "tbg_size": 3 } }),
            vec![Op::Move {
                chunks: ONE.sliced(2, 3),
                from: input(1),
                to: vec![output(1)],
                switch: None,
            }],
        ),
    ];
    for (file, expected) in cases {
        assert_eq!(ops(json!([file])), expected, "{file}");
    }
}

#[test]
fn reductions_of_every_kind() {
    let packets = |index| at(0, Buffer::Packets, index);
    let far = |buffer, index| at(1, buffer, index);
    let cases = [
        (
            json!({ "name": "re", "reduce_op": "sum", "src_buff": [own("i", 0), own("i", 1), own("o", 2)], "dst_buff": [own("o", 0)] }),
            reduced(&[input(0), input(1), output(2)], &[output(0)]),
        ),
        (
            json!({ "name": "res", "channel_type": "memory", "src_buff": [own("i", 0), own("i", 1)], "dst_buff": [own("o", 0), peer(0, 3)] }),
            reduced(&[input(0), input(1)], &[output(0), far(Buffer::Output, 3)]),
        ),
        (
            json!({ "name": "rre", "channel_type": "memory", "src_buff": [own("i", 0), peer(0, 1)], "dst_buff": [own("i", 0)] }),
            reduced(&[input(0), far(Buffer::Output, 1)], &[input(0)]),
        ),
        (
            json!({ "name": "rres", "channel_type": "memory", "src_buff": [own("i", 0), peer(0, 1)], "dst_buff": [own("i", 0), peer(0, 1)] }),
            reduced(
                &[input(0), far(Buffer::Output, 1)],
                &[input(0), far(Buffer::Output, 1)],
            ),
        ),
        // Packets are summed first, the local accumulator last.
        (
            json!({ "name": "repkt", "src_buff": [own("i", 0), own("s", 0), own("s", 1)], "dst_buff": [own("o", 0)] }),
            reduced(&[packets(0), packets(1), input(0)], &[output(0)]),
        ),
        (
            json!({ "name": "recpkt", "src_buff": [own("i", 0), own("s", 0)], "dst_buff": [own("o", 0), own("s", 1)] }),
            reduced(&[packets(0), input(0)], &[output(0), packets(1)]),
        ),
        (
            json!({ "name": "respkt", "channel_type": "memory", "src_buff": [own("i", 0), own("s", 0)], "dst_buff": [own("o", 0), peer(1, 2)] }),
            reduced(
                &[packets(0), input(0)],
                &[output(0), far(Buffer::Packets, 2)],
            ),
        ),
        (
            json!({ "name": "recspkt", "channel_type": "memory", "src_buff": [own("i", 0), own("s", 0)],
                 "dst_buff": [own("o", 0), own("s", 1), peer(1, 2)] }),
            reduced(
                &[packets(0), input(0)],
                &[output(0), packets(1), far(Buffer::Packets, 2)],
            ),
        ),
        (
            json!({ "name": "glres", "channel_type": "switch", "src_buff": [group(1, 2)], "dst_buff": [group(1, 2)] }),
            Op::Reduce {
                chunks: ONE,
                from: vec![input(2), far(Buffer::Input, 2)],
                to: vec![input(2), far(Buffer::Input, 2)],
                last: false,
                switch: Some(0),
            },
        ),
        (
            json!({ "name": "glre", "channel_type": "switch", "channel_ids": [1], "buffer_type": "i", "buffer_offset": 1, "size": 1,
                 "dst_chunk": { "rank": 0, "type": "o", "index": 0, "size": 1 } }),
            reduced(&[input(1), far(Buffer::Input, 1)], &[output(0)]),
        ),
    ];
    for (file, expected) in cases {
        assert_eq!(ops(json!([file])), [expected], "{file}");
    }
}

#[test]
fn synchronisation_and_ports() {
    let far = |buffer, index| at(1, buffer, index);
    let signals = |plan: Value| {
        // What is signalled must be waited for.
        let mut file = file("test", (4, 4, 8), plan);
        file["gpus"][1]["threadblocks"][0]["ops"] = json!([
            { "name": "wait", "channel_type": "memory", "channel_ids": [0, 1] },
            { "name": "rlxwait", "channel_type": "memory", "channel_ids": [0] },
            { "name": "wait", "channel_type": "port", "channel_ids": [0] },
            { "name": "wait", "channel_type": "port", "channel_ids": [0] },
            { "name": "wait", "channel_type": "port", "channel_ids": [0] }
        ]);
        read(&file).unwrap().plan
    };
    let plan = signals(json!([
        { "name": "nop" },
        { "name": "signal", "channel_type": "memory", "channel_ids": [0, 1] },
        { "name": "rlxsignal", "channel_type": "memory", "channel_ids": [0] },
        { "name": "signal", "channel_type": "port", "channel_ids": [0] },
        { "name": "put", "channel_type": "port", "channel_ids": [0], "src_buff": [own("i", 1)], "dst_buff": [peer(1, 2)] },
        { "name": "pws", "channel_type": "port", "channel_ids": [0], "src_buff": [own("i", 1)], "dst_buff": [peer(1, 2)] },
        { "name": "pwsf", "channel_type": "port", "channel_ids": [0], "src_buff": [own("i", 1)], "dst_buff": [peer(1, 2)] },
        { "name": "ppkt", "channel_type": "port", "channel_ids": [0], "src_buff": [own("s", 0)], "dst_buff": [peer(0, 1)] },
        { "name": "rppkt", "channel_type": "port", "channel_ids": [0], "src_buff": [own("s", 0)], "dst_buff": [peer(0, 1)] },
        { "name": "flush", "channel_type": "port", "channel_ids": [0] },
        { "name": "sem_acquire", "semaphore_ids": [0, 1] },
        { "name": "sem_release", "semaphore_ids": [1] },
        { "name": "barrier", "barrier_id": 3, "num_threadblocks": 1 },
    ]));
    let packets = |rank, index| at(rank, Buffer::Packets, index);
    let expected = [
        Op::Sync,
        // The thread block's channels 0 and 1 are the rank's 1 and 0.
        Op::Signal {
            channels: vec![1, 0],
            relaxed: false,
        },
        Op::Signal {
            channels: vec![1],
            relaxed: true,
        },
        Op::Signal {
            channels: vec![2],
            relaxed: false,
        },
        put(input(1), far(Buffer::Output, 2), false, false),
        put(input(1), far(Buffer::Output, 2), true, false),
        put(input(1), far(Buffer::Output, 2), true, true),
        put(packets(0, 0), packets(1, 1), false, false),
        // The wait for the packets, to spare scratch memory.
        moved(packets(0, 0), &[at(0, Buffer::Scratch, 0)]),
        put(packets(0, 0), packets(1, 1), false, false),
        Op::Flush { channels: vec![2] },
        Op::Acquire {
            semaphores: vec![0, 1],
        },
        Op::Release {
            semaphores: vec![1],
        },
        Op::Barrier { id: 3, blocks: 1 },
    ];
    assert_eq!(plan.ranks[0].blocks[0], expected);
    assert_eq!((plan.scratch_slots, plan.packet_slots), (1, 2));
    assert_eq!(plan.ranks[0].semaphores, [1, 0]);
    let kinds: Vec<_> = plan.ranks[0]
        .channels
        .iter()
        .map(|c| (c.peer, c.kind))
        .collect();
    assert_eq!(
        kinds,
        [
            (1, ChannelKind::Memory),
            (1, ChannelKind::Memory),
            (1, ChannelKind::Port)
        ]
    );
}

#[test]
fn loops() {
    let pipeline = |chunks: u32, unit: u64, inner: Value| json!([{ "name": "pipeline", "iter_context": { "unit_size": unit, "num_chunks": chunks }, "ops": inner }]);
    let copy = json!({ "name": "copy", "src_buff": [own("i", 1)], "dst_buff": [own("o", 1)] });
    assert_eq!(
        ops(pipeline(1, 1024, json!([copy, { "name": "nop" }]))),
        [Op::Loop {
            unit_bytes: 1024,
            chunks: 1,
            ops: vec![moved(input(1), &[output(1)]), Op::Sync]
        }]
    );
    let packets = json!({ "name": "cpkt", "src_buff": [own("i", 1)], "dst_buff": [own("s", 1)] });
    let nested = pipeline(1, 16, json!([]))[0].clone();
    for (ops, reason) in [
        (pipeline(2, 1024, json!([copy])), "more than the 1"),
        (pipeline(1, 1000, json!([copy])), "multiple of 16"),
        (pipeline(1, 16, json!([packets])), "packets"),
        (pipeline(1, 16, json!([nested])), "nest"),
        (json!([{ "name": "pipeline", "ops": [] }]), "iter_context"),
    ] {
        let text = refused(&file("test", (4, 4, 8), ops));
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn a_file_is_one_plan_whoever_reads_it() {
    // Each rank but the first has a channel there, of which the first has no end.
    let ranks = 8;
    let gpu = |id: u32| {
        let channels = match id {
            0 => json!([]),
            _ => json!([{ "channel_type": "memory", "connected_to": [0] }]),
        };
        json!({
            "id": id, "input_chunks": 1, "output_chunks": ranks, "scratch_chunks": 0, "channels": channels,
            "threadblocks": [{ "id": 0, "channels": [], "ops": [] }]
        })
    };
    let gpus: Vec<Value> = (0..ranks).map(gpu).collect();
    let file = json!({
        "name": "ends", "collective": "allgather", "protocol": "Simple", "inplace": false, "gpus": gpus
    });
    let peers = || {
        let plan = read(&file).unwrap().plan;
        let channels = plan.ranks[0].channels.iter();
        channels.map(|channel| channel.peer).collect::<Vec<_>>()
    };
    for _ in 0..10 {
        assert_eq!(peers(), (1..ranks).collect::<Vec<_>>());
    }
}

#[test]
fn operations_are_split_at_blocks() {
    let ops = json!([
        { "name": "copy", "src_buff": [{ "type": "i", "index": 1, "size": 4 }], "dst_buff": [{ "type": "s", "index": 5, "size": 4 }] },
        { "name": "copy", "src_buff": [{ "type": "s", "index": 5, "size": 4 }], "dst_buff": [{ "type": "s", "index": 1, "size": 4 }] }
    ]);
    // Two blocks of three chunks.
    let plan = read(&file("alltoall", (6, 6, 9), ops)).unwrap().plan;
    assert_eq!(
        (plan.chunks, plan.input_blocks, plan.output_blocks),
        (3, 2, 2)
    );
    let at = |buffer, index| at(0, buffer, index);
    let copy = |first, count, from, to| Op::Move {
        chunks: Chunks::new(first, count),
        from,
        to: vec![to],
        switch: None,
    };
    // Scratch is numbered from its first chunk in use, and stands for the chunks that lie there.
    assert_eq!(
        plan.ranks[0].blocks[0],
        [
            copy(1, 2, at(Buffer::Input, 1), at(Buffer::Scratch, 4)),
            copy(0, 2, at(Buffer::Input, 3), at(Buffer::Scratch, 6)),
            copy(1, 2, at(Buffer::Scratch, 4), at(Buffer::Scratch, 0)),
            copy(0, 2, at(Buffer::Scratch, 6), at(Buffer::Scratch, 2)),
        ]
    );
    assert!(!plan.needs_equal_chunks());
    // Slices of a group are split alike, although only one operation crosses blocks.
    let tbg = json!({ "tb_id": 0, "tbg_size": 2 });
    let sliced = json!([
        { "name": "copy", "src_buff": [{ "type": "i", "index": 2, "size": 2 }], "dst_buff": [{ "type": "s", "index": 0, "size": 2 }], "tbg_info": tbg },
        { "name": "copy", "src_buff": [{ "type": "i", "index": 0, "size": 2 }], "dst_buff": [{ "type": "o", "index": 0, "size": 2 }], "tbg_info": tbg }
    ]);
    let plan = read(&file("alltoall", (6, 6, 9), sliced)).unwrap().plan;
    let counts: Vec<_> = plan.ranks[0].blocks[0]
        .iter()
        .map(|op| op.chunks().unwrap().count)
        .collect();
    assert_eq!(counts, [1, 1, 1, 1]);
    // One slot for two chunks of different sizes.
    let reused = json!([
        { "name": "copy", "src_buff": [own("i", 0)], "dst_buff": [own("s", 0)] },
        { "name": "copy", "src_buff": [own("i", 2)], "dst_buff": [own("s", 0)] }
    ]);
    let plan = read(&file("alltoall", (6, 6, 9), reused)).unwrap().plan;
    assert!(plan.equal_chunks && plan.needs_equal_chunks());
    assert_eq!(Plan::from_json(plan.to_json().as_bytes()).unwrap(), plan);
}

#[test]
fn shapes_of_collectives() {
    let cases = [
        ("allreduce", (6, 6), (6, 1, 1), 1),
        ("allgather", (2, 4), (2, 1, 2), 2),
        ("reducescatter", (4, 2), (2, 2, 1), 2),
        ("alltoall", (4, 4), (2, 2, 2), 2),
        ("sendrecv", (3, 3), (3, 1, 1), 1),
        ("test", (3, 5), (1, 3, 5), 3),
        ("test", (0, 0), (1, 0, 0), 1),
        // Left out in old files.
        ("allreduce", (4, 0), (4, 1, 1), 1),
        ("allgather", (0, 4), (2, 1, 2), 2),
        ("reducescatter", (4, 0), (2, 2, 1), 2),
    ];
    for (collective, (i, o), shape, blocks) in cases {
        let mut file = file(collective, (i, o, 0), json!([]));
        file["min_message_size"] = json!(5_000_000_001_u64);
        file["max_message_size"] = json!(6_000_000_001_u64);
        let plan = read(&file).unwrap().plan;
        assert_eq!(
            (plan.chunks, plan.input_blocks, plan.output_blocks),
            shape,
            "{collective}"
        );
        let sizes = (5_000_000_001_u64.div_ceil(blocks), 6_000_000_001 / blocks);
        assert_eq!(plan.message_bytes, sizes, "{collective}");
        assert_eq!(
            (plan.reduce_op, plan.packet),
            (Some(ReduceOp::Sum), PacketType::Ll16)
        );
    }
    for (collective, i, o) in [
        ("allreduce", 4, 2),
        ("allgather", 2, 5),
        ("alltoall", 3, 3),
        ("sendrecv", 0, 0),
    ] {
        refused(&file(collective, (i, o, 0), json!([])));
    }
}

#[test]
fn defaults_and_old_forms() {
    // Nothing that may be left out.
    let bare = json!({
        "name": "bare", "collective": "test", "protocol": "Simple", "inplace": false,
        "gpus": [{ "id": 0 }, { "id": 1 }]
    });
    let Imported { plan, warnings } = read(&bare).unwrap();
    assert_eq!(plan.message_bytes, (0, u64::MAX));
    assert_eq!(plan.in_place, InPlace::Forbidden);
    assert_eq!(
        plan.ranks[1].blocks,
        [Vec::new()],
        "a rank without thread blocks gets one"
    );
    assert_eq!(warnings, Vec::<String>::new());

    // `buff` for `buffer_type`, one end of a channel, unknown fields.
    let mut old = file(
        "allreduce",
        (2, 0, 0),
        json!([
            { "name": "glres", "channel_type": "switch", "src_buff": [group(1, 0)], "dst_buff": [group(1, 0)], "extra": [1] }
        ]),
    );
    old["gpus"][0]["channels"][2] = json!({ "buff": "i", "channel_type": "switch", "rank_groups": [{ "size": 2, "ranks": [0, 1] }] });
    old["inplace"] = json!(true);
    old["gpus"][1]["channels"] = json!([]);
    let Imported { plan, warnings } = read(&old).unwrap();
    assert_eq!(plan.ranks[1].channels.len(), 3);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].contains("3 channel ends are missing"),
        "{warnings:?}"
    );
    old["gpus"][0]["channels"][2]["buff"] = Value::Null;
    assert!(refused(&old).contains("buffer_type"));
}

#[test]
fn in_place_plans_use_the_larger_buffer() {
    let ops = |from: &str, to: &str| json!([{ "name": "copy", "src_buff": [own(from, 1)], "dst_buff": [own(to, 0)] }]);
    let cases = [
        ("allreduce", (2, 2), ops("o", "i"), Buffer::Input, 1, 0),
        ("allgather", (2, 4), ops("i", "o"), Buffer::Output, 3, 0),
        ("reducescatter", (4, 2), ops("o", "i"), Buffer::Input, 3, 0),
    ];
    for (collective, (i, o), ops, buffer, from, to) in cases {
        let mut file = file(collective, (i, o, 0), json!([]));
        file["inplace"] = json!(true);
        file["gpus"][1]["threadblocks"][0]["ops"] = ops;
        let plan = read(&file).unwrap().plan;
        assert_eq!(plan.in_place, InPlace::Required);
        let Op::Move {
            from: source,
            to: destinations,
            ..
        } = &plan.ranks[1].blocks[0][0]
        else {
            panic!("{collective}");
        };
        assert_eq!(*source, at(1, buffer, from), "{collective}");
        assert_eq!(*destinations, [at(1, buffer, to)], "{collective}");
    }
}

/// Their executor ignores what operations say they reduce with.
#[test]
fn reductions_other_than_sums_are_warned_of() {
    let reduce = |op: &str| json!({ "name": "re", "reduce_op": op, "src_buff": [own("i", 0), own("i", 1)], "dst_buff": [own("o", 0)] });
    let looped = json!({
        "name": "pipeline", "iter_context": { "unit_size": 1024, "num_chunks": 1 }, "ops": [reduce("max")],
    });
    for (ops, named) in [
        (json!([reduce("sum")]), None),
        (json!([reduce("sum"), reduce("min")]), Some("`min`")),
        (json!([looped]), Some("`max`")),
    ] {
        let Imported { plan, warnings } = read(&file("test", (2, 1, 0), ops)).unwrap();
        assert_eq!(plan.reduce_op, Some(ReduceOp::Sum));
        match named {
            None => assert_eq!(warnings, Vec::<String>::new()),
            Some(named) => assert!(
                warnings.len() == 1 && warnings[0].contains(named),
                "{warnings:?}"
            ),
        }
    }
}

#[test]
fn limits_of_their_executor_are_warnings_here_and_errors_there() {
    let nops = |count: usize| Value::Array(vec![json!({ "name": "nop" }); count]);
    assert_eq!(
        read(&file("test", (1, 1, 0), nops(64))).unwrap().warnings,
        Vec::<String>::new()
    );
    let Imported { plan, warnings } = read(&file("test", (1, 1, 0), nops(65))).unwrap();
    assert!(
        warnings[0].contains("room for 64 operations"),
        "{warnings:?}"
    );
    let error = export(&plan).unwrap_err().to_string();
    assert!(error.contains("room for 64 operations"), "{error}");

    let cases = [
        (
            json!({ "name": "re", "src_buff": vec![own("i", 0); 11], "dst_buff": [own("o", 0)] }),
            "10 sources",
        ),
        (
            json!({ "name": "barrier", "barrier_id": 16, "num_threadblocks": 1 }),
            "16 barriers",
        ),
    ];
    for (op, cap) in cases {
        let Imported { plan, warnings } = read(&file("test", (1, 1, 0), json!([op]))).unwrap();
        assert!(
            warnings.len() == 1 && warnings[0].contains(cap),
            "{warnings:?}"
        );
        let error = export(&plan).unwrap_err().to_string();
        assert!(error.contains(cap), "{error}");
    }
}

#[test]
fn operations_too_large_for_theirs_are_taken_apart() {
    let ops = json!([
        { "name": "sem_acquire", "semaphore_ids": vec![0; 17] },
        { "name": "flush", "channel_type": "port", "channel_ids": vec![0; 9] },
        {
            "name": "put", "channel_type": "memory",
            "src_buff": [own("i", 0)], "dst_buff": vec![peer(0, 0); 11],
        },
    ]);
    let Imported { plan, warnings } = read(&file("test", (1, 1, 0), ops)).unwrap();
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    let Imported { plan, warnings } = import(export(&plan).unwrap().as_bytes()).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let parts = plan.ranks[0].blocks[0].iter().filter_map(|op| match op {
        Op::Acquire { semaphores } => Some(semaphores.len()),
        Op::Flush { channels } => Some(channels.len()),
        Op::Move { to, .. } => Some(to.len()),
        _ => None,
    });
    assert_eq!(parts.collect::<Vec<_>>(), [16, 1, 8, 1, 10, 1]);
}

#[test]
fn bad_files_are_refused_in_one_line() {
    let good = file(
        "test",
        (4, 4, 8),
        json!([
            { "name": "put", "channel_type": "memory", "src_buff": [own("i", 1)], "dst_buff": [peer(0, 2)] },
            { "name": "flush", "channel_type": "port", "channel_ids": [0] },
            { "name": "gstore", "channel_type": "switch", "src_buff": [own("i", 0)], "dst_buff": [group(1, 0)] },
            { "name": "sem_acquire", "semaphore_ids": [0] }
        ]),
    );
    read(&good).unwrap();
    let op = "/gpus/0/threadblocks/0/ops/0";
    let cases = [
        ("/name", json!(7), "invalid type"),
        ("/collective", json!("all\nreduce"), "no collective"),
        ("/gpus", json!([]), "0 ranks"),
        ("/gpus/1/id", json!(0), "has the id 0"),
        ("/gpus/0/input_chunks", json!(1_u64 << 60), "invalid value"),
        ("/gpus/0/input_chunks", json!(u32::MAX), "input blocks"),
        ("/gpus/0/input_chunks", json!(-1), "invalid value"),
        (
            "/gpus/0/channels/0/connected_to",
            json!([9]),
            "leads to rank 9",
        ),
        (
            "/gpus/0/channels/0/channel_type",
            json!("pigeon"),
            "unknown variant",
        ),
        (
            "/gpus/0/channels/2/rank_groups/0/ranks",
            json!([0, 5]),
            "names rank 5",
        ),
        (
            "/gpus/0/remote_buffers/0/rank",
            json!(u32::MAX),
            "of rank 4294967295",
        ),
        ("/gpus/0/remote_buffers", json!([]), "no remote buffer"),
        (
            "/gpus/0/threadblocks/0/channels",
            json!([]),
            "no Port channel 0",
        ),
        (
            "/gpus/0/threadblocks/0/remote_buffer_refs",
            json!([]),
            "no remote buffer 0",
        ),
        ("/gpus/0/semaphores", json!([]), "no semaphore 0"),
        (&format!("{op}/name"), json!("warp"), "no operation `warp`"),
        (&format!("{op}/channel_type"), Value::Null, "channel_type"),
        (&format!("{op}/channel_type"), json!("switch"), "Switch"),
        (
            &format!("{op}/src_buff/0/type"),
            json!("x"),
            "unknown variant",
        ),
        (&format!("{op}/src_buff/0/index"), json!(4), "which has 4"),
        (
            &format!("{op}/src_buff/0/index"),
            json!(u32::MAX),
            "which has 4",
        ),
        (
            &format!("{op}/src_buff/0/size"),
            json!(2),
            "operands of 2 and of 1",
        ),
        (&format!("{op}/src_buff/0/size"), json!(0), "operands of 0"),
        (&format!("{op}/src_buff"), json!([]), "0 sources"),
        (
            &format!("{op}/dst_buff/0/buffer_id"),
            json!(5),
            "no remote buffer 5",
        ),
        (
            &format!("{op}/tbg_info"),
            json!({ "tb_id": 3, "tbg_size": 3 }),
            "slice 3 of 3",
        ),
    ];
    for (pointer, value, reason) in cases {
        let mut bad = good.clone();
        match bad.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => {
                let (parent, key) = pointer.rsplit_once('/').unwrap();
                bad.pointer_mut(parent).unwrap()[key] = value;
            }
        }
        let text = refused(&bad);
        assert!(text.contains(reason), "{pointer}: {text}");
    }
    let text = good.to_string();
    for length in 0..text.len() {
        assert!(
            import(&text.as_bytes()[..length]).is_err(),
            "{length} bytes"
        );
    }
}

#[test]
fn sizes_are_bounded_before_anything_is_made_of_them() {
    // 2^60 chunk copies, by 2^10 operations.
    let copy = json!({ "name": "copy", "src_buff": [{ "type": "s", "index": 0, "size": 1 << 20 }], "dst_buff": [{ "type": "s", "index": 0, "size": 1 << 20 }] });
    let text = refused(&file("test", (1, 1, 0), Value::Array(vec![copy; 1024])));
    assert!(text.contains("more than 2097152 chunks"), "{text}");
    let error = import("{".repeat(2 << 20).as_bytes())
        .unwrap_err()
        .to_string();
    assert!(error.contains("objects"), "{error}");
    let error = import(&vec![b' '; (64 << 20) + 1]).unwrap_err().to_string();
    assert!(error.contains("at most"), "{error}");
    // Depth is bounded too.
    let deep = "[".repeat(10 << 20);
    assert!(import(deep.as_bytes()).is_err() && !is_mscclpp(deep.as_bytes()));
    let mut many = file("test", (1, 1, 0), json!([]));
    many["gpus"][0]["channels"][0]["connected_to"] = json!(vec![1; (1 << 20) + 1]);
    assert!(refused(&many).contains("channels"));
}

#[test]
fn the_formats_are_told_apart() {
    let theirs = file("test", (1, 1, 0), json!([]));
    assert!(is_mscclpp(theirs.to_string().as_bytes()));
    let ours = read(&theirs).unwrap().plan.to_json();
    assert!(!is_mscclpp(ours.as_bytes()) && !is_mscclpp(b"") && !is_mscclpp(b"[]"));
}

/// A plan as it is after its synchronisation inside thread blocks is taken out.
fn without_syncs(mut plan: Plan) -> Plan {
    for block in plan.ranks.iter_mut().flat_map(|rank| &mut rank.blocks) {
        block.retain(|op| *op != Op::Sync);
        for op in block {
            if let Op::Loop { ops, .. } = op {
                ops.retain(|op| *op != Op::Sync);
            }
        }
    }
    plan
}

/// A plan comes back as it was; what theirs cannot tell is set to what an import makes of it.
fn round_trip(plan: &Plan) {
    let text = export(plan).unwrap();
    let Imported {
        plan: back,
        warnings,
    } = import(text.as_bytes()).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let mut plan = plan.clone();
    plan.equal_chunks |= plan.packet_slots > 0 && plan.chunks > 1;
    assert_eq!(without_syncs(back.clone()), without_syncs(plan), "{text}");
    // With its synchronisation, it stays as it is from then on.
    assert_eq!(export(&back).unwrap(), text);
}

fn builder(name: &str, collective: Collective, ranks: u32, blocks: u32, chunks: u32) -> Builder {
    Builder::new(name, collective, ranks, blocks, chunks)
        .reduce_op(ReduceOp::Sum)
        .in_place(InPlace::Forbidden)
}

#[test]
fn packet_plans_come_back() {
    // Two-shot: each rank reduces a chunk, and sends the result.
    let mut b = builder("pkt", Collective::AllReduce, 2, 1, 2).packets(4, PacketType::Ll16);
    for rank in 0..2 {
        let peer = 1 - rank;
        b.connect(0, 1);
        let own = Chunks::new(rank, 1);
        let other = Chunks::new(peer, 1);
        let i = |index| at(rank, Buffer::Input, index);
        let o = |index| at(rank, Buffer::Output, index);
        b.at(rank, 0)
            .transfer(other, i(peer), vec![at(peer, Buffer::Packets, peer)])
            .reduce(
                own,
                vec![at(rank, Buffer::Packets, rank), i(rank)],
                vec![o(rank), at(peer, Buffer::Packets, 2 + rank)],
            )
            .transfer(other, at(rank, Buffer::Packets, 2 + peer), vec![o(peer)])
            // Every other packet operation, on the plan's own slots.
            .transfer(own, i(rank), vec![at(rank, Buffer::Packets, rank)])
            .transfer(
                own,
                at(rank, Buffer::Packets, rank),
                vec![at(peer, Buffer::Packets, 2 + rank)],
            )
            .reduce(
                own,
                vec![at(rank, Buffer::Packets, rank), i(rank)],
                vec![o(rank)],
            )
            .reduce(
                own,
                vec![at(rank, Buffer::Packets, rank), i(rank)],
                vec![o(rank), at(rank, Buffer::Packets, 2 + rank)],
            )
            .reduce(
                own,
                vec![at(rank, Buffer::Packets, rank), i(rank)],
                vec![
                    o(rank),
                    at(rank, Buffer::Packets, 2 + rank),
                    at(peer, Buffer::Packets, 2 + rank),
                ],
            );
    }
    round_trip(&b.finish().unwrap());
}

#[test]
fn simple_plans_come_back() {
    let mut b = builder("simple", Collective::ReduceScatter, 2, 2, 2).scratch(4, false);
    for rank in 0..2 {
        let peer = 1 - rank;
        let (memory, port) = (b.connect(0, 1).0, b.connect_port(0, 1).0);
        let semaphore = b.semaphore(rank, 1);
        let i = |index| at(rank, Buffer::Input, index);
        let s = |index| at(rank, Buffer::Scratch, index);
        let all = Chunks::new(0, 2);
        let slice = all.sliced(rank, 2);
        let put = |signal, flush| Op::Put {
            chunks: all,
            from: i(0),
            to: at(peer, Buffer::Scratch, 2),
            channel: 1 + 2 * rank,
            signal,
            flush,
        };
        let _ = (memory, port);
        b.at(rank, 0)
            .transfer(slice, i(2 * peer), vec![at(peer, Buffer::Scratch, 0)])
            .signal(&[0])
            .wait(&[0])
            .reduce(
                slice,
                vec![i(2 * rank), s(0)],
                vec![at(rank, Buffer::Output, 0)],
            )
            .transfer(all, at(peer, Buffer::Scratch, 0), vec![s(0)])
            .reduce(all, vec![s(0), at(peer, Buffer::Scratch, 0)], vec![s(2)])
            .reduce(
                all,
                vec![s(0), at(peer, Buffer::Scratch, 0)],
                vec![s(2), at(peer, Buffer::Scratch, 2)],
            )
            .reduce(
                all,
                vec![s(0), s(2)],
                vec![s(2), at(peer, Buffer::Scratch, 2)],
            )
            .op(Op::Signal {
                channels: vec![2],
                relaxed: true,
            })
            .op(Op::Wait {
                channels: vec![2],
                relaxed: true,
            })
            .barrier(0, 2);
        b.at(rank, 1)
            .barrier(0, 2)
            .op(put(false, false))
            .op(put(true, false))
            .op(put(true, true))
            .op(Op::Flush { channels: vec![1] })
            .op(Op::Wait {
                channels: vec![1 + 2 * rank, 1 + 2 * rank],
                relaxed: false,
            })
            .op(Op::Acquire {
                semaphores: vec![semaphore],
            })
            .op(Op::Loop {
                unit_bytes: 4096,
                chunks: 2,
                ops: vec![
                    Op::Move {
                        chunks: all,
                        from: i(0),
                        to: vec![s(0)],
                        switch: None,
                    },
                    Op::Sync,
                    Op::Release {
                        semaphores: vec![semaphore],
                    },
                ],
            });
    }
    round_trip(&b.finish().unwrap());
}

#[test]
fn switch_plans_come_back() {
    let mut b = builder("switch", Collective::AllReduce, 2, 1, 2).in_place(InPlace::Required);
    for rank in 0..2 {
        let switch = b.switch(
            rank,
            Switch {
                ranks: vec![0, 1],
                buffer: Buffer::Input,
            },
        );
        let all: Vec<_> = (0..2).map(|r| at(r, Buffer::Input, rank)).collect();
        b.at(rank, 0).op(Op::Reduce {
            chunks: Chunks::new(rank, 1),
            from: all.clone(),
            to: all.clone(),
            last: false,
            switch: Some(switch),
        });
        b.at(rank, 0).op(Op::Move {
            chunks: Chunks::new(1 - rank, 1),
            from: at(rank, Buffer::Input, 1 - rank),
            to: all,
            switch: Some(switch),
        });
    }
    let plan = b.finish().unwrap();
    round_trip(&plan);
    assert!(export(&plan).unwrap().contains("glres"));
}

#[test]
fn exports_keep_packets_and_plain_scratch_apart() {
    let mut b = builder("both", Collective::AllReduce, 1, 1, 1)
        .scratch(3, true)
        .packets(2, PacketType::Ll16);
    let o = |buffer, index| at(0, buffer, index);
    b.at(0, 0)
        .transfer(ONE, o(Buffer::Input, 0), vec![o(Buffer::Scratch, 2)])
        .transfer(ONE, o(Buffer::Input, 0), vec![o(Buffer::Scratch, 0)])
        .transfer(ONE, o(Buffer::Input, 0), vec![o(Buffer::Packets, 1)])
        .transfer(ONE, o(Buffer::Input, 0), vec![o(Buffer::Packets, 0)]);
    let plan = b.finish().unwrap();
    let text = export(&plan).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    // Bytes in chunks: plain 0..3, packets from 4 on, twice as long.
    assert_eq!(file["gpus"][0]["scratch_chunks"], 4);
    assert_eq!(file["protocol"], "LL");
    assert_eq!(file["use_double_scratch_buffer"], true);
    round_trip(&plan);
}

#[test]
fn reductions_that_theirs_cannot_do_at_once_are_taken_apart() {
    let mut b = builder("apart", Collective::AllReduce, 2, 1, 1).packets(2, PacketType::Ll16);
    for rank in 0..2 {
        b.at(rank, 0)
            // Another buffer for the result than for the local operand, which stands last.
            .reduce(
                ONE,
                vec![at(1 - rank, Buffer::Input, 0), at(rank, Buffer::Input, 0)],
                vec![at(rank, Buffer::Output, 0)],
            )
            // The local operand first, and raw and packet destinations.
            .reduce(
                ONE,
                vec![at(rank, Buffer::Input, 0), at(rank, Buffer::Packets, 0)],
                vec![at(rank, Buffer::Output, 0), at(1 - rank, Buffer::Output, 0)],
            );
    }
    let text = export(&b.finish().unwrap()).unwrap();
    let plan = without_syncs(import(text.as_bytes()).unwrap().plan);
    let (i, o) = (input(0), output(0));
    assert_eq!(
        plan.ranks[0].blocks[0],
        [
            moved(i, &[o]),
            reduced(&[o, at(1, Buffer::Input, 0)], &[o]),
            reduced(&[at(0, Buffer::Packets, 0), i], &[o]),
            moved(o, &[at(1, Buffer::Output, 0)]),
        ]
    );
}

#[test]
fn what_theirs_cannot_express_is_refused() {
    let refuse = |change: &dyn Fn(&mut Builder), reason: &str| {
        let mut b = builder("own", Collective::Test, 2, 1, 4)
            .blocks_of_message(1, 1)
            .scratch(4, false)
            .packets(4, PacketType::Ll16);
        change(&mut b);
        let error = export(&b.finish().unwrap()).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    };
    let far = |buffer, index| at(1, buffer, index);
    let s = at(0, Buffer::Scratch, 0);
    let p = at(0, Buffer::Packets, 0);
    refuse(
        &|b| *b = b.clone().reduce_op(ReduceOp::Avg),
        "only knows sums",
    );
    refuse(
        &|b| {
            b.at(0, 0).transfer(ONE, far(Buffer::Input, 1), vec![s]);
        },
        "exchanges the places",
    );
    refuse(
        &|b| {
            b.at(0, 0)
                .transfer(ONE, far(Buffer::Input, 0), vec![far(Buffer::Output, 0)]);
        },
        "this rank's plain memory only",
    );
    refuse(
        &|b| {
            b.at(0, 0).transfer(ONE, p, vec![at(0, Buffer::Packets, 1)]);
        },
        "nothing else",
    );
    refuse(
        &|b| {
            b.at(0, 0).transfer(ONE, s, vec![far(Buffer::Scratch, 0)]);
        },
        "wrong half",
    );
    refuse(
        &|b| {
            b.at(0, 0).reduce(ONE, vec![p], vec![s]);
        },
        "needs a source",
    );
    refuse(
        &|b| {
            b.at(0, 0)
                .reduce(ONE, vec![s, p], vec![far(Buffer::Output, 0)]);
        },
        "needs a destination",
    );
    refuse(
        &|b| {
            b.at(0, 0)
                .reduce(ONE, vec![s, p, far(Buffer::Input, 0)], vec![s]);
        },
        "not both at once",
    );
    refuse(
        &|b| {
            let ops = vec![Op::Move {
                chunks: ONE.sliced(0, 2),
                from: s,
                to: vec![output(0)],
                switch: None,
            }];
            b.at(0, 0).op(Op::Loop {
                unit_bytes: 16,
                chunks: 1,
                ops,
            });
        },
        "computes sizes wrongly",
    );
}

/// Values that are nearly right.
fn nearly() -> impl Strategy<Value = Value> {
    prop_oneof![
        (0_u64..6).prop_map(|n| json!(n)),
        any::<u64>().prop_map(|n| json!(n)),
        prop::sample::select(vec![
            "i",
            "o",
            "s",
            "memory",
            "port",
            "switch",
            "none",
            "put",
            "glres",
            "upkt",
            "allgather",
            ""
        ])
        .prop_map(|text| json!(text)),
        Just(json!(null)),
        Just(json!([])),
        Just(json!({})),
        Just(json!(true)),
    ]
}

/// Every place in a value.
fn places(value: &Value, here: &str, all: &mut Vec<String>) {
    all.push(here.to_owned());
    match value {
        Value::Object(map) => map
            .iter()
            .for_each(|(key, value)| places(value, &format!("{here}/{key}"), all)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(i, value)| places(value, &format!("{here}/{i}"), all)),
        _ => {}
    }
}

proptest! {
    #[test]
    fn noise_is_refused(text in prop::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(import(&text).is_err());
    }

    /// Files with wrong values in some places are refused, or are plans that can be written again.
    #[test]
    fn damaged_files_do_no_harm(damage in prop::collection::vec((any::<prop::sample::Index>(), nearly()), 1..4)) {
        let mut file = file("alltoall", (4, 4, 8), json!([
            { "name": "put", "channel_type": "memory", "src_buff": [own("i", 1)], "dst_buff": [peer(0, 2)] },
            { "name": "rppkt", "channel_type": "port", "channel_ids": [0], "src_buff": [own("s", 1)], "dst_buff": [peer(0, 2)] },
            { "name": "glres", "channel_type": "switch", "src_buff": [group(0, 0)], "dst_buff": [group(0, 0)] },
            { "name": "recspkt", "channel_type": "memory", "src_buff": [own("i", 0), own("s", 0)], "dst_buff": [own("o", 0), own("s", 1), peer(1, 2)] },
            { "name": "pipeline", "iter_context": { "unit_size": 64, "num_chunks": 1 }, "ops": [
                { "name": "re", "src_buff": [own("i", 0), own("i", 1)], "dst_buff": [own("o", 0)], "tbg_info": { "tb_id": 0, "tbg_size": 2 } }
            ] },
            { "name": "barrier", "barrier_id": 0, "num_threadblocks": 1 }
        ]));
        for (place, value) in damage {
            let mut all = Vec::new();
            places(&file, "", &mut all);
            let place = &all[place.index(all.len())];
            *file.pointer_mut(place).unwrap() = value;
        }
        if let Ok(Imported { plan, .. }) = read(&file) {
            let again = Plan::from_json(plan.to_json().as_bytes()).unwrap();
            prop_assert_eq!(&again, &plan);
            if let Ok(text) = export(&plan) {
                prop_assert!(import(text.as_bytes()).is_ok());
            }
        }
    }
}
