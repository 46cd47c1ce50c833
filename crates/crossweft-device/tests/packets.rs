//! Packets on the host: sizes, alignments, guards, flags.

mod common;

use common::{GUARD, Guarded, HostBlock, Random};
use crossweft_device::packet::{
    WORD, copy_from_packets, copy_to_packets, flag_of, forward_packets, is_of_other_size,
    is_scrub_epoch, read_packet, read_packet_once, write_packet,
};
use crossweft_device::{Raw, Site, Stopped, WaitKind};
use proptest::prelude::*;

const SITE: Site = Site {
    kind: WaitKind::Packet,
    peer: 1,
    channel: 2,
    op: 3,
};

/// The threads of a block, one after another: none waits for another.
fn threads(threads: u32) -> impl Iterator<Item = HostBlock<'static>> {
    (0..threads).map(move |thread| HostBlock {
        thread,
        threads,
        ..HostBlock::NO_WAIT
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        rng_seed: prop::test_runner::RngSeed::Fixed(7),
        ..ProptestConfig::default()
    })]

    #[test]
    fn packets_carry_any_bytes_from_anywhere_to_anywhere(
        bytes in 0_usize..300,
        from in 0_usize..8,
        to in 0_usize..8,
        flag in 1_u32..,
        seed: u64,
        senders in 1_u32..5,
        receivers in 1_u32..5,
    ) {
        let data = Random(seed).bytes(bytes);
        let words = bytes.div_ceil(4);
        let mut src = Guarded::holding(&data, from);
        let mut packets = Guarded::new(8 * words, 0);
        let mut onward = Guarded::new(8 * words, 0);
        let mut dst = Guarded::new(bytes, to);
        let (s, p, o, d) = (src.addr(), packets.addr(), onward.addr(), dst.addr());
        let n = bytes as u64;
        for block in threads(senders) {
            // SAFETY: the ranges have these sizes; the packets are aligned.
            unsafe { copy_to_packets(&block, p, s, n, flag) };
        }
        for block in threads(receivers) {
            // SAFETY: as above.
            unsafe { forward_packets(&block, SITE, o, p, n, flag) }.unwrap();
        }
        for block in threads(receivers) {
            // SAFETY: as above.
            unsafe { copy_from_packets(&block, SITE, d, o, n, flag) }.unwrap();
        }
        prop_assert_eq!(dst.bytes(), &data);
        prop_assert_eq!(src.bytes(), &data);
        prop_assert_eq!(packets.bytes(), onward.bytes());
        for guarded in [&src, &packets, &onward, &dst] {
            prop_assert!(guarded.intact());
        }
        // The documented layout: payload byte 4 i in the low half of word i, the flag above it.
        for i in 0..words {
            let mut payload = [0; 4];
            let part = &data[4 * i..bytes.min(4 * i + 4)];
            payload[..part.len()].copy_from_slice(part);
            let word = u64::from(u32::from_le_bytes(payload)) | u64::from(flag) << 32;
            prop_assert_eq!(packets.word(i), word);
        }
    }

    #[test]
    fn flags_are_never_zero_and_change_from_epoch_to_epoch(
        epoch in prop_oneof![1_u64..10, (1_u64 << 20) - 10..(1 << 20) + 10, 1..u64::MAX - 2],
        bytes: u64,
        earlier: u64,
    ) {
        let flag = flag_of(epoch, bytes);
        prop_assert_ne!(flag, 0);
        prop_assert_eq!(u64::from(flag) & 1, epoch & 1);
        prop_assert_ne!(flag, flag_of(epoch + 1, earlier));
        prop_assert_ne!(flag, flag_of(epoch + 2, earlier));
        // Another size is told from another epoch.
        let other = flag_of(epoch, earlier);
        prop_assert_eq!(is_of_other_size(flag, other), flag != other);
        prop_assert!(!is_of_other_size(flag, flag_of(epoch + 1, earlier)));
        prop_assert!(!is_of_other_size(flag, 0));
    }
}

#[test]
fn sizes_that_differ_a_little_have_different_flags() {
    let mut same = 0;
    for bytes in 0..4096_u64 {
        for other in [bytes + 1, bytes + 2, bytes + 4, bytes + 8, bytes * 2 + 4] {
            same += u32::from(flag_of(7, bytes) == flag_of(7, other));
        }
    }
    // 12 bits: one in 4096 by chance.
    assert!(same <= 20, "{same} of 20480");
}

#[test]
fn a_packet_is_read_only_with_its_flag() {
    let mut memory = Guarded::new(8, 0);
    let addr = memory.addr();
    // SAFETY: a valid, aligned word.
    unsafe {
        write_packet(&Raw, addr, 0xdead_beef, 9);
        assert_eq!(read_packet_once(&Raw, addr, 8), None);
        assert_eq!(read_packet_once(&Raw, addr, 9), Some(0xdead_beef));
        let block = &HostBlock::NO_WAIT;
        assert_eq!(read_packet(block, SITE, addr, 9), Ok(0xdead_beef));
        assert_eq!(read_packet(block, SITE, addr, 10), Err(Stopped::Deadline));
    }
    assert!(memory.intact());
}

#[test]
fn a_missing_packet_ends_the_copy_where_it_is_missing() {
    let mut packets = Guarded::new(4 * WORD as usize, 0);
    let mut dst = Guarded::new(16, 1);
    let (p, d) = (packets.addr(), dst.addr());
    // SAFETY: the ranges have these sizes; the packets are aligned.
    let outcome = unsafe {
        for i in [0, 1, 3] {
            write_packet(&Raw, p + i * WORD, i as u32, 5);
        }
        copy_from_packets(&HostBlock::NO_WAIT, SITE, d, p, 16, 5)
    };
    assert_eq!(outcome, Err(Stopped::Deadline));
    assert_eq!(dst.bytes()[..8], [0, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(dst.bytes()[8..], [GUARD; 8]);
    assert!(dst.intact());
}

#[test]
fn flags_wrap_over_zero() {
    let top = (1_u64 << 20) - 2;
    assert_eq!(flag_of(1, 0), 1);
    assert_eq!(flag_of(top, 0), (1 << 20) - 2);
    assert_eq!(flag_of(top + 1, 0), 1);
    assert_eq!(flag_of(top + 2, 0), 2);
}

#[test]
fn each_half_is_scrubbed_twice_between_two_uses_of_a_flag() {
    // Flags repeat after nearly 2^20 epochs.
    for half in 0..2 {
        let scrubs: Vec<u64> = (0..1 << 20)
            .filter(|&epoch| epoch & 1 == half && is_scrub_epoch(epoch))
            .collect();
        let expected: Vec<_> = (0..4).map(|k| (k << 18) + half).collect();
        assert_eq!(scrubs, expected);
    }
    let mut random = Random(4);
    for _ in 0..100_000 {
        let epoch = random.next();
        assert_eq!(is_scrub_epoch(epoch), epoch % (1 << 18) < 2);
    }
}
