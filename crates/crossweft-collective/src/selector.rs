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
/// cores, see `docs/performance.md`: 0.24 against 0.29 us at 128 B, 0.42 against 0.31 us at 512 B.
const ONE_SHOT_MAX: u64 = 256;
/// Scratch memory is bounded: staged messages go through it in pieces.
const PIECE: u64 = 4 << 20;

impl Selector {
    /// The choices for messages of up to `max_bytes` bytes.
    #[must_use]
    pub fn new(world_size: u32, symmetric: bool, max_bytes: u64) -> Self {
        let piece = |limit: u64| limit.min(max_bytes);
        if world_size == 1 {
            let reason = "a rank alone copies its input";
            return Self::only(Algorithm::TwoShotStaged, max_bytes, piece(PIECE), reason);
        }
        let mut choices = vec![Choice {
            algorithm: Algorithm::OneShot,
            up_to: piece(ONE_SHOT_MAX),
            piece: piece(ONE_SHOT_MAX),
            reason: "small: one hop, data and flag in one store",
        }];
        if max_bytes > ONE_SHOT_MAX {
            choices.push(if symmetric {
                Choice {
                    algorithm: Algorithm::TwoShot,
                    up_to: max_bytes,
                    piece: max_bytes,
                    reason: "symmetric memory: each rank reduces its share, nothing is copied",
                }
            } else {
                Choice {
                    algorithm: Algorithm::TwoShotStaged,
                    up_to: max_bytes,
                    piece: piece(PIECE),
                    reason: "private buffers: each rank reduces its share through scratch memory",
                }
            });
        }
        Self { choices }
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
    fn it_says_what_and_why() {
        let text = Selector::new(2, true, 1 << 20).to_string();
        assert!(
            text.starts_with("one-shot up to 256 B (small: one hop"),
            "{text}"
        );
        assert!(
            text.contains("; two-shot up to 1048576 B (symmetric memory"),
            "{text}"
        );
    }
}
