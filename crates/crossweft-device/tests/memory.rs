//! The host's memory.

use crossweft_device::memory::{Memory, Raw};

/// Copies are made in pieces: of every size about where those end, every byte comes along, and none beside them.
#[test]
fn a_copy_of_any_size_is_whole() {
    const PIECE: usize = 512 << 10;
    const ROOM: usize = 9 * PIECE;
    const UNTOUCHED: u8 = 0xee;
    let source: Vec<u8> = (0..ROOM).map(|i| (i % 251) as u8).collect();
    let mut target = vec![UNTOUCHED; ROOM];
    let sizes = [0, 1, PIECE - 3, PIECE, PIECE + 1, 8 * PIECE, 8 * PIECE + 1];
    for size in sizes {
        for at in [0, 5] {
            let from = source[at..].as_ptr() as u64;
            let to = target[1..].as_mut_ptr() as u64;
            // SAFETY: both vectors have room for that many bytes, and nobody else uses them.
            unsafe { Raw.copy(to, from, size as u64) };
            assert_eq!(target[0], UNTOUCHED);
            assert!(
                target[1..=size] == source[at..at + size],
                "{size} bytes from {at}"
            );
            assert!(target[size + 1..].iter().all(|&byte| byte == UNTOUCHED));
            target.fill(UNTOUCHED);
        }
    }
}
