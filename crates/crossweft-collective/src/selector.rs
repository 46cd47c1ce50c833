//! Which algorithm a size takes, and why.
//!
//! A choice depends only on what every rank knows alike: the size, the world size, and where
//! buffers were said to be when the collective was prepared.

use std::fmt;

use crate::Algorithm;

/// An algorithm for a range of sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Largest size in bytes it is chosen for.
    pub up_to: u64,
    /// Largest part of a message that one launch handles; larger messages take several.
    pub piece: u64,
    /// Thread blocks of each rank; on a CPU more than one only serves tests.
    pub blocks: u32,
    /// Why, for people.
    pub reason: &'static str,
}

/// The choices for one prepared collective, by ascending size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    choices: Vec<Choice>,
}

/// Where one hop of packets stops paying: a packet carries 4 bytes at a time and each rank receives
/// `n - 1` messages, while two handshakes cost the same for any size. Measured with two ranks on two
/// cores, see `docs/performance.md`: at 512 B 0.22 against 0.23 us where cores are near each other and
/// 0.46 against 0.67 us where they are far; at 1 KiB 0.33 against 0.24 and 0.66 against 0.69 us.
const ONE_SHOT_MAX: u64 = 512;
/// The same on GPUs: bytes that one rank sends. On two H200 one shot takes 6.4 us for 512 KiB and 11.6 for 1 MiB,
/// two shots 8.9 and 10.5.
const GPU_ONE_SHOT_SENT: u64 = 768 << 10;
/// Thread blocks that one shot takes, and for messages up to which size: with few, data queues in them; with
/// many, they are waited for.
const GPU_ONE_SHOT: [(u32, u64); 5] = [
    (1, 4 << 10),
    (4, 16 << 10),
    (16, 32 << 10),
    (64, 128 << 10),
    (GPU_MOST_BLOCKS, u64::MAX),
];
/// Thread blocks of the other algorithms, and of the larger messages among theirs (two H200, two shots of 1 MiB:
/// 12.4 us with 16, 10.9 with 32, 10.5 with 128; of 16 MiB: 77, 60 and 58).
const GPU_BLOCKS: u32 = 32;
const GPU_MEDIUM_MAX: u64 = 2 << 20;
const GPU_MOST_BLOCKS: u32 = 128;
/// Scratch memory is bounded: staged messages go through it in pieces.
const PIECE: u64 = 4 << 20;

// Why an algorithm is chosen.
const ALONE: &str = "a rank alone copies its input";
const SMALL: &str = "small: one hop, data and flag in one store";
const SYMMETRIC: &str = "symmetric memory: each rank reduces its share, nothing is copied";
const PRIVATE: &str = "private buffers: each rank reduces its share through scratch memory";

impl Selector {
    /// The choices for messages of up to `max_bytes` bytes.
    #[must_use]
    pub fn new(world_size: u32, symmetric: bool, max_bytes: u64) -> Self {
        let piece = |limit: u64| limit.min(max_bytes);
        if world_size == 1 {
            return Self::only(Algorithm::TwoShotStaged, max_bytes, piece(PIECE), ALONE);
        }
        let mut choices = vec![Choice {
            algorithm: Algorithm::OneShot,
            up_to: piece(ONE_SHOT_MAX),
            piece: piece(ONE_SHOT_MAX),
            blocks: 1,
            reason: SMALL,
        }];
        if max_bytes > ONE_SHOT_MAX {
            choices.push(if symmetric {
                Choice {
                    algorithm: Algorithm::TwoShot,
                    up_to: max_bytes,
                    piece: max_bytes,
                    blocks: 1,
                    reason: SYMMETRIC,
                }
            } else {
                Choice {
                    algorithm: Algorithm::TwoShotStaged,
                    up_to: max_bytes,
                    piece: piece(PIECE),
                    blocks: 1,
                    reason: PRIVATE,
                }
            });
        }
        Self { choices }
    }

    /// The choices for messages of up to `max_bytes` bytes on GPUs.
    #[must_use]
    pub fn for_gpus(world_size: u32, symmetric: bool, max_bytes: u64) -> Self {
        if world_size == 1 {
            let piece = PIECE.min(max_bytes);
            let mut alone = Self::only(Algorithm::TwoShotStaged, max_bytes, piece, ALONE);
            alone.with_blocks(GPU_BLOCKS);
            return alone;
        }
        let one_shot_max = GPU_ONE_SHOT_SENT / u64::from(world_size - 1) / 1024 * 1024;
        let mut choices = Vec::new();
        // Few steps: each is a plan with memory of its own.
        for (blocks, up_to) in GPU_ONE_SHOT {
            let up_to = up_to.min(one_shot_max).min(max_bytes);
            choices.push(Choice {
                algorithm: Algorithm::OneShot,
                up_to,
                piece: up_to,
                blocks,
                reason: SMALL,
            });
            if up_to == max_bytes.min(one_shot_max) {
                break;
            }
        }
        if max_bytes > one_shot_max {
            let (algorithm, piece, reason) = match symmetric {
                true => (Algorithm::TwoShot, max_bytes, SYMMETRIC),
                false => (Algorithm::TwoShotStaged, max_bytes.min(4 * PIECE), PRIVATE),
            };
            let medium = max_bytes.min(GPU_MEDIUM_MAX);
            choices.push(Choice {
                algorithm,
                up_to: medium,
                piece: piece.min(medium),
                blocks: GPU_BLOCKS,
                reason,
            });
            if max_bytes > medium {
                choices.push(Choice {
                    algorithm,
                    up_to: max_bytes,
                    piece,
                    blocks: GPU_MOST_BLOCKS,
                    reason,
                });
            }
        }
        Self { choices }
    }

    /// The same choices with another number of thread blocks.
    pub(crate) fn with_blocks(&mut self, blocks: u32) {
        for choice in &mut self.choices {
            choice.blocks = blocks;
        }
    }

    /// One algorithm for every size, because the caller said so.
    #[must_use]
    pub fn forced(algorithm: Algorithm, max_bytes: u64) -> Self {
        let piece = if algorithm == Algorithm::TwoShot {
            max_bytes
        } else {
            PIECE.min(max_bytes)
        };
        Self::only(algorithm, max_bytes, piece, "asked for")
    }

    fn only(algorithm: Algorithm, up_to: u64, piece: u64, reason: &'static str) -> Self {
        Self {
            choices: vec![Choice {
                algorithm,
                up_to,
                piece,
                blocks: 1,
                reason,
            }],
        }
    }

    /// All choices, by ascending size.
    #[must_use]
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// The index of the choice for `bytes` bytes; the last one if it is larger than prepared for.
    #[must_use]
    pub fn select(&self, bytes: u64) -> usize {
        let fits = self.choices.iter().position(|choice| bytes <= choice.up_to);
        fits.unwrap_or(self.choices.len() - 1)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, choice) in self.choices.iter().enumerate() {
            let Choice {
                algorithm,
                up_to,
                reason,
                ..
            } = choice;
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{algorithm} up to {up_to} B ({reason})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(selector: &Selector, sizes: &[u64]) -> Vec<&'static str> {
        sizes
            .iter()
            .map(|&s| selector.choices()[selector.select(s)].algorithm.name())
            .collect()
    }

    #[test]
    fn small_messages_take_packets_and_large_ones_what_the_buffers_allow() {
        let sizes = [0, 8, ONE_SHOT_MAX, ONE_SHOT_MAX + 1, 1 << 30];
        let symmetric = Selector::new(2, true, 1 << 30);
        let expected = ["one-shot", "one-shot", "one-shot", "two-shot", "two-shot"];
        assert_eq!(names(&symmetric, &sizes), expected);
        let private = Selector::new(8, false, 1 << 30);
        assert_eq!(
            names(&private, &sizes)[3..],
            ["two-shot-staged", "two-shot-staged"]
        );
        assert_eq!(private.choices()[1].piece, PIECE);
        assert_eq!(Selector::new(4, true, 100).choices().len(), 1);
    }

    #[test]
    fn gpus_get_more_blocks_for_larger_messages() {
        for (ranks, max) in [
            (2, 1 << 30),
            (8, 1 << 30),
            (2, 100),
            (4, 20 << 10),
            (8, 64 << 10),
        ] {
            let selector = Selector::for_gpus(ranks, true, max);
            let choices = selector.choices();
            assert!(choices.is_sorted_by(|a, b| a.up_to < b.up_to));
            let small = choices.iter().filter(|c| c.algorithm == Algorithm::OneShot);
            assert!(small.is_sorted_by_key(|c| c.blocks));
            assert_eq!(choices.last().unwrap().up_to, max);
            assert!(choices.iter().all(|c| c.piece <= max && c.blocks >= 1));
        }
        let two = Selector::for_gpus(2, true, 1 << 30);
        assert_eq!(
            names(&two, &[8, 768 << 10, 769 << 10]),
            ["one-shot", "one-shot", "two-shot"]
        );
        let eight = Selector::for_gpus(8, false, 1 << 30);
        assert_eq!(
            names(&eight, &[109 << 10, 110 << 10]),
            ["one-shot", "two-shot-staged"]
        );
    }

    #[test]
    fn it_says_what_and_why() {
        let text = Selector::new(2, true, 1 << 20).to_string();
        assert!(
            text.starts_with("one-shot up to 512 B (small: one hop"),
            "{text}"
        );
        assert!(
            text.contains("; two-shot up to 1048576 B (symmetric memory"),
            "{text}"
        );
    }
}
