//! Structure and file format.

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
    assert_eq!(
        plan.scratch_bytes(u64::MAX),
        None,
        "absurd sizes are not wrapped"
    );
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
