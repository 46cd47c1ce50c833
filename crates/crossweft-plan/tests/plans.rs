//! Structure and file format.
#![allow(clippy::unwrap_used)]

use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;
use crossweft_plan::{
    Buffer, Builder, ChannelKind, Chunks, Collective, InPlace, Op, Operand, Plan, Switch,
};

/// Two ranks, one uses every operation.
fn plan() -> Plan {
    let mut b = Builder::new("sample", Collective::AllReduce, 2, 2, 2)
        .reduce_op(ReduceOp::Max)
        .scratch(3, true)
        .packets(1, PacketType::Ll8);
    let (ours, theirs) = b.connect(0, 1);
    let own = |buffer, index| Operand::new(0, buffer, index);
    b.at(0, 0)
        .transfer(
            Chunks::new(0, 2),
            own(Buffer::Input, 0),
            vec![own(Buffer::Scratch, 1)],
        )
        .signal(&[ours])
        .sync()
        .barrier(0, 2);
    b.at(0, 1).barrier(0, 2).reduce_last(
        Chunks::new(1, 1).sliced(1, 2),
        vec![own(Buffer::Input, 1), own(Buffer::Scratch, 2)],
        vec![own(Buffer::Output, 1), Operand::new(1, Buffer::Packets, 0)],
    );
    b.at(1, 0).wait(&[theirs]).transfer(
        Chunks::new(1, 1),
        Operand::new(1, Buffer::Packets, 0),
        vec![Operand::new(1, Buffer::Output, 1)],
    );
    b.finish().unwrap()
}

#[test]
fn a_file_holds_the_whole_plan() {
    let plan = plan();
    assert_eq!(Plan::from_json(plan.to_json().as_bytes()).unwrap(), plan);
    assert_eq!(plan.reaches_into(), (false, false));
    assert_eq!(plan.packet_sender(1, 0), Some(0));
    assert_eq!(plan.packet_sender(0, 0), None);
    // 100 bytes in 2 chunks of 64 (granules of 16): 3 slots of 64, twice.
    assert_eq!(plan.scratch_bytes(100), Some((192, 384)));
    assert_eq!(plan.packet_bytes(100), Some((128, 256)));
    for chunks in [1, 2] {
        let mut plan = plan.clone();
        plan.chunks = chunks;
        // Absurd sizes are not wrapped.
        assert_eq!(plan.scratch_bytes(u64::MAX), None);
        assert_eq!(plan.packet_bytes(u64::MAX), None);
    }
}

/// Changes the plan, and expects a refusal that contains `words`.
fn refused(change: impl FnOnce(&mut Plan), words: &str) {
    let mut plan = plan();
    change(&mut plan);
    let error = plan.validate().unwrap_err().to_string();
    assert!(
        error.contains(words),
        "`{error}` does not contain `{words}`"
    );
}

fn op(plan: &mut Plan, rank: usize, block: usize, index: usize) -> &mut Op {
    &mut plan.ranks[rank].blocks[block][index]
}

#[test]
fn unsound_plans_are_refused_with_the_place() {
    refused(|p| p.ranks.clear(), "0 ranks");
    refused(|p| p.chunks = 0, "0 chunks");
    refused(
        |p| p.message_bytes = (100, 10),
        "messages of 100 to 10 bytes",
    );
    refused(
        |p| p.output_blocks = 4,
        "has 1 blocks of input and 1 of output, not 1 and 4",
    );
    refused(|p| p.name.clear(), "its name has 0 bytes");
    refused(|p| p.name = "n".repeat(257), "its name has 257 bytes");
    // A terminal would show what follows in the place of the refusal.
    for control in ["\r", "\u{1b}[2K", "\n", "\u{202e}"] {
        refused(
            |p| p.name = format!("x: ok{control}y"),
            &format!(
                "the control character {}",
                control.chars().next().unwrap().escape_unicode()
            ),
        );
    }
    refused(|p| p.scratch_slots = u32::MAX, "scratch slots");
    refused(
        |p| p.scratch_slots = 2,
        "rank 0, thread block 0, op 0 (move)",
    );
    refused(
        |p| p.ranks[0].channels[0].peer = 0,
        "channel 0 of rank 0 leads to rank 0",
    );
    refused(|p| p.ranks[0].channels[0].peer = 7, "leads to rank 7");
    refused(|p| p.ranks[0].blocks.clear(), "rank 0 has 0 thread blocks");
    refused(
        |p| drop(p.ranks[1].blocks[0].remove(0)),
        "1 signals that nobody waits for",
    );
    refused(|p| drop(p.ranks[0].blocks[0].remove(1)), "1 waits too many");
    refused(
        |p| drop(p.ranks[0].blocks[1].remove(0)),
        "barrier 0 is of 2 blocks",
    );
    refused(
        |p| p.ranks[1].channels.extend_from_within(..),
        "rank 0 has 1 memory channels to rank 1, which has 2 back",
    );
    let signal = |channels: Vec<u32>| Op::Signal {
        channels,
        relaxed: false,
    };
    refused(|p| *op(p, 0, 0, 1) = signal(vec![4]), "no channel 4");
    refused(|p| *op(p, 0, 0, 1) = signal(vec![]), "names no channel");
    let transfer = |chunks, from, to| Op::Move {
        chunks,
        from,
        to: vec![to],
        switch: None,
    };
    let (input, output) = (
        Operand::new(0, Buffer::Input, 0),
        Operand::new(0, Buffer::Output, 0),
    );
    let set = |new: Op| move |p: &mut Plan| *op(p, 0, 0, 0) = new;
    refused(
        set(transfer(Chunks::new(1, 2), input, output)),
        "2 chunks from 1",
    );
    refused(
        set(transfer(Chunks::new(u32::MAX, 2), input, output)),
        "chunks from",
    );
    refused(
        set(transfer(Chunks::new(0, 0), input, output)),
        "0 chunks from 0",
    );
    refused(
        set(transfer(Chunks::new(0, 1).sliced(2, 2), input, output)),
        "slice 2 of 2",
    );
    refused(
        set(transfer(Chunks::new(0, 1).sliced(0, 0), input, output)),
        "slice 0 of 0",
    );
    let away = Operand::new(9, Buffer::Output, 0);
    refused(set(transfer(Chunks::new(0, 1), input, away)), "no rank 9");
    let foreign = Operand::new(1, Buffer::Packets, 0);
    refused(
        set(transfer(Chunks::new(0, 1), foreign, output)),
        "only be read by the rank",
    );
    let peer_input = Operand::new(1, Buffer::Input, 0);
    refused(
        set(transfer(Chunks::new(0, 1), input, peer_input)),
        "not to be written",
    );
    let nothing = Op::Move {
        chunks: Chunks::new(0, 1),
        from: input,
        to: vec![],
        switch: None,
    };
    refused(set(nothing), "a source and a destination");
}

#[test]
fn other_files_are_refused_in_plain_words() {
    let good = plan().to_json();
    let cases = [
        ("", "EOF"),
        ("[1]", "not a readable plan"),
        ("{}", "`format` is not `crossweft-plan`"),
        (&good[..good.len() / 2], "EOF"),
        (
            &good.replace("\"version\":1", "\"version\":2"),
            "`version` is 2; this program reads 1",
        ),
        (
            &good.replace("\"reduce_op\":\"max\"", "\"reduce_op\":\"xor\""),
            "operation `xor`",
        ),
        (
            &good.replace("\"packet\":\"ll8\"", "\"packet\":\"ll7\""),
            "packet type `ll7`",
        ),
        (
            &good.replace("\"chunks\":2", "\"chunks\":2,\"extra\":1"),
            "unknown field `extra`",
        ),
        (
            &good.replace("\"op\":\"sync\"", "\"op\":\"sink\""),
            "unknown variant `sink`",
        ),
        (
            &good.replace("\"chunks\":2", "\"chunks\":-2"),
            "invalid value",
        ),
        (
            &good.replace("\"chunks\":2", "\"chunks\":1152921504606846976"),
            "invalid value",
        ),
    ];
    for (text, words) in cases {
        let error = Plan::from_json(text.as_bytes()).unwrap_err().to_string();
        assert!(
            error.contains(words),
            "`{error}` does not contain `{words}`"
        );
    }
}

/// Two ranks that use every operation there is, but the ones in `plan`.
fn rich_plan() -> Plan {
    let mut b = Builder::new("rich", Collective::AllGather, 2, 1, 2)
        .in_place(InPlace::Forbidden)
        .scratch(2, false);
    let (memory, back) = b.connect(0, 1);
    let (port, port_back) = b.connect_port(0, 1);
    let semaphore = b.semaphore(0, 1);
    let switch = b.switch(
        0,
        Switch {
            ranks: vec![0, 1],
            buffer: Buffer::Output,
        },
    );
    let whole = Chunks::new(0, 2);
    let input = Operand::new(0, Buffer::Input, 0);
    let output = |rank| Operand::new(rank, Buffer::Output, 0);
    b.at(0, 0)
        .op(Op::Move {
            chunks: whole,
            from: input,
            to: vec![output(0), output(1)],
            switch: Some(switch),
        })
        .op(Op::Put {
            chunks: whole,
            from: input,
            to: output(1),
            channel: port,
            signal: true,
            flush: true,
        })
        .op(Op::Flush {
            channels: vec![port],
        })
        .op(Op::Signal {
            channels: vec![memory],
            relaxed: true,
        })
        .op(Op::Loop {
            unit_bytes: 64,
            chunks: 2,
            ops: vec![
                Op::Acquire {
                    semaphores: vec![semaphore],
                },
                Op::Move {
                    chunks: whole,
                    from: input,
                    to: vec![Operand::new(0, Buffer::Scratch, 0)],
                    switch: None,
                },
                Op::Release {
                    semaphores: vec![semaphore],
                },
            ],
        });
    b.at(1, 0)
        .op(Op::Wait {
            channels: vec![back],
            relaxed: true,
        })
        .wait(&[port_back]);
    b.finish().unwrap()
}

#[test]
fn every_operation_is_written_and_read() {
    let plan = rich_plan();
    assert_eq!(Plan::from_json(plan.to_json().as_bytes()).unwrap(), plan);
    assert_eq!(
        plan.reaches_into(),
        (true, true),
        "a proxy reaches into the input"
    );
    assert!(plan.has_ports());
    assert!(!plan.needs_equal_chunks());
    assert_eq!(plan.all_ops().count(), 4 + 3 + 2);
}

#[test]
fn unsound_uses_of_every_operation_are_refused() {
    let refused = |change: &dyn Fn(&mut Plan), words: &str| {
        let mut plan = rich_plan();
        change(&mut plan);
        let error = plan.validate().unwrap_err().to_string();
        assert!(
            error.contains(words),
            "`{error}` does not contain `{words}`"
        );
    };
    let set = |index: usize, new: Op| move |plan: &mut Plan| *op(plan, 0, 0, index) = new.clone();
    let (input, output) = (
        Operand::new(0, Buffer::Input, 0),
        Operand::new(1, Buffer::Output, 0),
    );
    let put = |from, to, channel| Op::Put {
        chunks: Chunks::new(0, 2),
        from,
        to,
        channel,
        signal: true,
        flush: false,
    };
    refused(
        &set(1, put(input, output, 0)),
        "channel 0 is no port channel",
    );
    refused(&set(1, put(input, output, 9)), "no channel 9");
    let own = Operand::new(0, Buffer::Output, 0);
    refused(
        &set(1, put(input, own, 1)),
        "leads from rank 0 to rank 1, not from 0 to 0",
    );
    refused(
        &set(2, Op::Flush { channels: vec![0] }),
        "channel 0 is no port channel",
    );
    let relaxed = Op::Signal {
        channels: vec![1],
        relaxed: true,
    };
    refused(&set(3, relaxed), "a port channel has no relaxed signals");
    refused(
        &set(
            3,
            Op::Acquire {
                semaphores: vec![1],
            },
        ),
        "no semaphore 1; the rank has 1",
    );
    let step = |unit_bytes, chunks, ops| Op::Loop {
        unit_bytes,
        chunks,
        ops,
    };
    refused(&set(4, step(0, 1, vec![])), "pieces of 0 bytes");
    refused(&set(4, step(24, 1, vec![])), "a multiple of 16 fits");
    refused(&set(4, step(16, 3, vec![])), "3 chunks, of 2 in all");
    refused(
        &set(4, step(16, 1, vec![step(16, 1, vec![])])),
        "loops do not nest",
    );
    let release = Op::Release {
        semaphores: vec![7],
    };
    refused(
        &set(4, step(16, 1, vec![release])),
        "in its release: there is no semaphore 7",
    );
    let to_input = Op::Move {
        chunks: Chunks::new(0, 2),
        from: Operand::new(0, Buffer::Scratch, 0),
        to: vec![input],
        switch: None,
    };
    refused(&set(0, to_input), "input is not to be written");
    let across = Op::Move {
        chunks: Chunks::new(0, 2),
        from: input,
        to: vec![Operand::new(1, Buffer::Output, 1)],
        switch: None,
    };
    refused(&set(0, across), "lie in more than one block");
    let not_members = Op::Move {
        chunks: Chunks::new(0, 2),
        from: input,
        to: vec![output],
        switch: Some(0),
    };
    refused(&set(0, not_members), "not the members of switch 0");
    refused(
        &|p| p.ranks[0].switches[0].ranks[1] = 5,
        "a switch of rank 0 names rank 5",
    );
    refused(&|p| p.input_blocks = 2, "all-gather of 2 ranks has");
    refused(
        &|p| p.ranks[1].channels[1].kind = ChannelKind::Memory,
        "rank 0 has 1 memory channels to rank 1, which has 2 back",
    );
    // The numbers of signals and waits are not compared where a loop repeats some of them.
    let mut plan = rich_plan();
    plan.ranks[1].blocks[0].remove(1);
    plan.validate().unwrap();
    plan.ranks[0].blocks[0].pop();
    assert!(
        plan.validate()
            .unwrap_err()
            .to_string()
            .contains("signals that nobody waits for")
    );
}

#[test]
fn a_reduction_over_a_switch_goes_to_its_members_or_stays() {
    let reduce = |to: Vec<Operand>, members: Vec<u32>| {
        let mut b = Builder::new("switch", Collective::AllReduce, 3, 1, 1);
        let buffer = Buffer::Input;
        let ranks = members;
        let switch = Some(b.switch(0, Switch { ranks, buffer }));
        let from = (0..3).map(|q| Operand::new(q, buffer, 0)).collect();
        b.at(0, 0).op(Op::Reduce {
            chunks: Chunks::new(0, 1),
            from,
            to,
            last: true,
            switch,
        });
        b.finish().map(drop).map_err(|error| error.to_string())
    };
    let output = |rank| Operand::new(rank, Buffer::Output, 0);
    assert_eq!(reduce(vec![output(0)], vec![0, 1, 2]), Ok(()));
    let all: Vec<Operand> = (0..3).map(output).collect();
    assert_eq!(reduce(all.clone(), vec![2, 1, 0]), Ok(()));
    for (to, members) in [
        (vec![output(1)], vec![0, 1, 2]),
        (all[..2].to_vec(), vec![0, 1, 2]),
        (vec![output(0)], vec![0, 1]),
    ] {
        let error = reduce(to, members).unwrap_err();
        assert!(error.contains("are not the members of switch 0"), "{error}");
    }
}
