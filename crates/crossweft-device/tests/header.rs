//! `include/crossweft/device.cuh` says of the handles what the Rust definitions say: the compilers
//! of CUDA C++ check its assertions, and this checks that they are the right ones.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use common::HostBlock;
use crossweft_device::channel::{MemoryChannel, PortChannel, SwitchChannel};
use crossweft_device::fifo::{Fifo, MAX_ID, TRIGGER_BYTES, Trigger, TriggerKind};
use crossweft_device::gpu::{GpuContext, StatusRecord, lines};
use crossweft_device::packet::{PAYLOAD, WORD, flag_of};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{Site, Stopped, WaitKind, Waiting};

const HEADER: &str = include_str!("../../../include/crossweft/device.cuh");

/// As C++ spells it.
fn camel(snake: &str) -> String {
    let mut words = snake.split('_');
    let first = words.next().unwrap().to_owned();
    words.fold(first, |name, word| {
        name + &word[..1].to_uppercase() + &word[1..]
    })
}

/// The assertions on structures: every field, which the compiler sees to.
macro_rules! layouts {
    ($($name:ident { $($field:ident),* })*) => {{
        let mut lines = Vec::new();
        $(
            let _every_field = |$name { $($field: _),* }: $name| ();
            let (size, align) = (size_of::<$name>(), align_of::<$name>());
            let name = stringify!($name);
            lines.push(format!(
                "static_assert(sizeof({name}) == {size} && alignof({name}) == {align});"
            ));
            $(
                let (field, offset) = (camel(stringify!($field)), offset_of!($name, $field));
                lines.push(format!(
                    "static_assert(CROSSWEFT_OFFSET({name}, {field}) == {offset});"
                ));
            )*
        )*
        lines
    }};
}

fn structures() -> Vec<String> {
    layouts! {
        Site { kind, peer, channel, op }
        Waiting { site, spins, expected, seen }
        GpuContext { limit_ns, abort, status }
        StatusRecord { claims, stopped, rank, block, thread, reserved, waiting }
        Semaphore { inbound, outbound, expected, peer, channel }
        MemoryChannel { semaphore, remote, local, packets }
        Fifo { ring, head, tail, capacity, id }
        PortChannel { semaphore, fifo, channel, dst_memory, src_memory }
        SwitchChannel { members, semaphores, count, index }
    }
}

fn numbers() -> Vec<String> {
    let kinds = [
        WaitKind::Semaphore,
        WaitKind::Packet,
        WaitKind::FifoSpace,
        WaitKind::FifoDone,
        WaitKind::Barrier,
        WaitKind::Acquire,
        WaitKind::Size,
        WaitKind::Message,
        WaitKind::Taken,
        WaitKind::Envelope,
        WaitKind::Failed,
    ];
    let stopped = [Stopped::Aborted, Stopped::Deadline, Stopped::Mismatch];
    let named = stopped
        .map(|stopped| (format!("Status::{stopped:?}"), stopped as u32))
        .into_iter()
        .chain(kinds.map(|kind| (format!("WaitKind::{kind:?}"), kind as u32)));
    let mut asserts: Vec<_> = named
        .map(|(name, number)| format!("static_assert(static_cast<u32>({name}) == {number});"))
        .collect();
    for (name, number) in [
        ("NO_OP", Site::NO_OP.into()),
        ("PACKET_PAYLOAD", PAYLOAD),
        ("PACKET_WORD", WORD),
        ("MAX_ID", MAX_ID.into()),
        ("TRIGGER_BYTES", TRIGGER_BYTES),
        ("LINE", lines::LINE),
        ("LINE_PAIR", lines::PAIR),
        ("LINE_PAIR_PAYLOAD", lines::PAIR_PAYLOAD),
        ("LINE_LANES", lines::LANES.into()),
    ] {
        asserts.push(format!("static_assert({name} == {number});"));
    }
    asserts
}

fn functions() -> Vec<String> {
    let flags = [(1, 0), (1, 8), (7, 4096), ((1 << 20) - 1, 1 << 20)].map(|(epoch, bytes)| {
        let flag = flag_of(epoch, bytes);
        format!("static_assert(flagOf({epoch}, {bytes}) == {flag}u);")
    });
    let all = TriggerKind::PUT
        .with(TriggerKind::SIGNAL)
        .with(TriggerKind::FLUSH);
    let first = (all, 5, 4, 3);
    let second = (TriggerKind::PUT, MAX_ID - 1, 9, 2);
    let triggers = [
        ("7, 5, 4, 3, 0, 0, 0", 1, head_word(first, 0)),
        ("1, 1048575, 9, 2, 0, 0, 0", 2, head_word(second, 1)),
    ]
    .map(|(trigger, lap, word)| {
        format!("static_assert(Trigger{{{trigger}}}.headWord({lap}) == {word}ull);")
    });
    flags.into_iter().chain(triggers).collect()
}

/// What a push leaves in the first word of a slot, in a ring of one slot that was gone round before
/// so many times.
fn head_word((kind, channel, dst, src): (TriggerKind, u32, u32, u32), laps: u64) -> u64 {
    let memory = [0, 0, 0, 0, laps, laps].map(AtomicU64::new);
    let at = |word: usize| memory[word].as_ptr().expose_provenance() as u64;
    let fifo = Fifo {
        ring: at(0),
        head: at(4),
        tail: at(5),
        capacity: 1,
        id: 0,
    };
    let trigger = Trigger {
        kind,
        channel,
        dst_memory: dst,
        src_memory: src,
        dst_offset: 0,
        src_offset: 0,
        size: 0,
    };
    // SAFETY: the addresses are of `memory`, which nobody else uses; its head and tail are equal, so
    // there is room.
    unsafe {
        let position = fifo.push(&HostBlock::NO_WAIT, Site::NO_OP, &trigger);
        assert_eq!(position, Ok(laps));
    }
    memory[0].load(Ordering::Acquire)
}

#[test]
fn the_header_asserts_what_rust_defines() {
    let expected = [structures(), numbers(), functions()].concat();
    let (_, assertions) = HEADER.split_once("#define CROSSWEFT_OFFSET").unwrap();
    let found: Vec<_> = assertions
        .lines()
        .filter(|line| line.starts_with("static_assert("))
        .collect();
    assert_eq!(
        found,
        expected,
        "the header should end with:\n{}\n",
        expected.join("\n")
    );
}

#[test]
fn the_header_needs_no_other() {
    for line in HEADER.lines() {
        let code = line.split("//").next().unwrap().trim();
        assert!(!code.starts_with("#include"), "{line}");
    }
}
