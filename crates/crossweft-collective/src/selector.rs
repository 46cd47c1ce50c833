//! Which algorithm a size takes, and why.
//!
//! A choice depends only on what every rank knows alike: the size, the world size, and where
//! buffers were said to be when the collective was prepared. What is here is the shipped rule; [`choose`] has what
//! was measured on this machine, and plans of the user's, take its place.
//!
//! [`choose`]: mod@crate::choose

use std::borrow::Cow;
use std::fmt;

use crossweft_plan::Collective;
use serde::{Deserialize, Serialize};

use crate::Algorithm;
use crate::candidate::{Candidate, SCRATCH_MAX};

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Anywhere in the process.
    Private,
    /// Inputs in one symmetric memory, outputs in another.
    Symmetric,
    /// All in one symmetric memory, so that calls may be in place.
    OneSymmetric,
}

/// An algorithm for a range of sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The algorithm, or the user's plan.
    pub algorithm: Candidate,
    /// Largest size in bytes it is chosen for.
    pub up_to: u64,
    /// Largest part of a message that one launch handles; larger messages take several.
    pub piece: u64,
    /// Thread blocks of each rank; on a CPU more than one only serves tests.
    pub blocks: u32,
    /// Why, for people.
    pub reason: Cow<'static, str>,
}

/// The choices for one prepared collective, by ascending size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    /// The choices by ascending size, then those for sizes in between that a chosen plan does not take.
    choices: Vec<Choice>,
    /// How many of them are of the first kind.
    first: usize,
    /// By the number of binary digits of a size, the first choice that may be for it: looking one up takes no
    /// longer with many choices.
    by_digits: Vec<u16>,
}

/// Where one hop of packets stops paying: a packet carries 4 bytes at a time and each rank receives
/// `n - 1` messages, while two handshakes cost the same for any size. Measured with two ranks on two
/// cores, see `docs/performance.md`: at 512 B 0.22 against 0.23 us where cores are near each other and
/// 0.46 against 0.67 us where they are far; at 1 KiB 0.33 against 0.24 and 0.66 against 0.69 us.
const ONE_SHOT_MAX: u64 = 512;
/// The same on GPUs for all but all-reduce: bytes of what one rank sends to one other, if that is all. Two H200, us, in one
/// hop and otherwise, for messages of 512 KiB and 1 MiB: broadcast 6.9 and 8.0, 11.4 and 10.4; gather 6.7 and 7.8, 11.2 and
/// 10.1; staged all-gather (private buffers) 8.5 and 10.5, 14.5 and 13.4.
const GPU_ONE_SHOT_SENT: u64 = 768 << 10;
/// Of collectives in which ranks both send and receive, in symmetric memory: all-gather of 256 KiB in 4.6 and 7.1 us, of 512 KiB
/// in 8.5 and 7.9; reduce-scatter 8.6 and 8.9, of 1 MiB 14.8 and 11.4.
const GPU_ONE_SHOT_BOTH_WAYS: u64 = 384 << 10;
const GPU_ONE_SHOT_REDUCED: u64 = 512 << 10;
/// And for all-reduce, which has lines. Two H200, one shot in lines against two shots: 2 MiB in 10.9 and 12.8
/// us, 4 MiB in 18.3 and 19.7, 8 MiB in 35 and 31.8, staged 38.
const GPU_ALL_REDUCE_MOST: u64 = 4 << 20;
const GPU_ALL_REDUCE_PRIVATE_MOST: u64 = 8 << 20;
/// Thread blocks that one shot takes, and for messages up to which size: with few, data queues in them; with
/// many, they are waited for.
const GPU_ONE_SHOT: [(u32, u64); 5] = [
    (1, 2 << 10),
    (4, 16 << 10),
    (16, 32 << 10),
    (64, 128 << 10),
    (GPU_MOST_BLOCKS, u64::MAX),
];
/// Of an all-reduce in lines: 256 KiB in 4.1 us with 64, 4.8 with 128.
const GPU_LINES: (u32, u64) = (64, 256 << 10);

/// The largest message that one shot takes on GPUs.
///
/// Of more than two ranks not measured but reckoned from what two have: each rank sends `n - 1` messages at 380 GB/s in
/// one hop, or twice `(n - 1) / n` of one at 340 GB/s and two handshakes, which cost 5 us more.
pub(crate) fn gpu_one_shot_max(collective: Collective, ranks: u32, place: Place) -> u64 {
    let sent = u64::from(ranks.max(2)) - 1;
    let most = match (collective, place) {
        (Collective::AllReduce, Place::Private) => GPU_ALL_REDUCE_PRIVATE_MOST,
        (Collective::AllReduce, _) => GPU_ALL_REDUCE_MOST,
        (_, Place::Private) => GPU_ONE_SHOT_SENT,
        (Collective::AllGather | Collective::AllToAll, _) => GPU_ONE_SHOT_BOTH_WAYS,
        (Collective::ReduceScatter | Collective::Reduce { .. }, _) => GPU_ONE_SHOT_REDUCED,
        _ => GPU_ONE_SHOT_SENT,
    };
    if collective != Collective::AllReduce {
        return most / sent / 1024 * 1024;
    }
    // Nanoseconds a MiB that one shot takes longer.
    let longer = (2760 * sent).saturating_sub(6170 * sent / (sent + 1));
    let reckoned = (5000_u64 << 20).checked_div(longer).unwrap_or(u64::MAX);
    reckoned.min(most) / 1024 * 1024
}

/// Thread blocks of the other algorithms, and of the larger messages among theirs (two H200, all-gather of 512 KiB: 7.9 us with 32,
/// 8.0 with 64, 8.3 with 128; of 1 MiB: 10.5, 10.1 and 10.5; of 8 MiB 34.5, 31.1 and 31.1; two shots of 16 MiB: 62, 57 and 57).
const GPU_BLOCKS: u32 = 64;
const GPU_MEDIUM_MAX: u64 = 1 << 20;
const GPU_MOST_BLOCKS: u32 = 128;
/// Scratch memory is bounded: staged messages go through it in pieces.
pub(crate) const PIECE: u64 = 4 << 20;
/// On GPUs larger ones are worth their memory.
pub(crate) const GPU_PIECE: u64 = 4 * PIECE;

// Why an algorithm is chosen.
const ALONE: &str = "a rank alone copies its input";
const SMALL: &str = "small: one hop, data and flag in one store";
const ONE_HOP: &str = "one hop: two would take longer to meet than it takes to send more";
const SYMMETRIC: &str = "symmetric memory: each rank reduces its share, nothing is copied";
const PRIVATE: &str = "private buffers: each rank reduces its share through scratch memory";
const DIRECT: &str = "symmetric memory: blocks go straight to where they belong";
const PUSHED: &str = "symmetric memory: blocks are written to where they belong, which links are faster at than reading";
const STAGED: &str = "private buffers: blocks go through scratch memory";
const ONE_MEMORY: &str = "one memory, where blocks change places: they go through scratch memory";
const IN_PARTS: &str = "larger than the scratch memory: blocks go through it in parts";

/// The choices for messages from where one hop of packets stops paying up to `max_bytes`, with one thread block.
/// Scratch memory is about as large as `piece`; of several blocks, those of up to `whole` bytes are staged whole.
fn large(
    collective: Collective,
    world_size: u32,
    place: Place,
    max_bytes: u64,
    (piece, whole): (u64, u64),
) -> Vec<Choice> {
    let reduces_in_shares = matches!(
        collective,
        Collective::AllReduce | Collective::Reduce { .. }
    );
    let (algorithm, reason) = match (reduces_in_shares, place) {
        _ if world_size == 1 && reduces_in_shares => (Algorithm::TwoShotStaged, ALONE),
        _ if world_size == 1 => (Algorithm::Staged, ALONE),
        (true, Place::Private) => (Algorithm::TwoShotStaged, PRIVATE),
        (true, _) => (Algorithm::TwoShot, SYMMETRIC),
        (false, Place::Private) => (Algorithm::Staged, STAGED),
        (false, Place::OneSymmetric) if collective == Collective::AllToAll => {
            (Algorithm::Staged, ONE_MEMORY)
        }
        (false, _) => (Algorithm::Direct, DIRECT),
    };
    let choice = |algorithm: Algorithm, up_to, reason: &'static str| Choice {
        algorithm: algorithm.into(),
        up_to,
        piece: piece_of(algorithm, collective, world_size, up_to, piece),
        blocks: 1,
        reason: reason.into(),
    };
    // Of several blocks, parts do not lie side by side: the plan itself goes through them in parts.
    if algorithm == Algorithm::Staged && blocks_of(collective, world_size) > 1 && max_bytes > whole
    {
        return vec![
            choice(Algorithm::Staged, whole, reason),
            choice(Algorithm::Pipelined, max_bytes, IN_PARTS),
        ];
    }
    vec![choice(algorithm, max_bytes, reason)]
}

/// Blocks of the larger of input and output.
fn blocks_of(collective: Collective, world_size: u32) -> u64 {
    let (input, output) = collective.blocks(world_size).unwrap_or((1, 1));
    u64::from(input.max(output))
}

/// The largest part of a message that one launch handles: all of it where it goes through no scratch memory, or where
/// there are several blocks, whose parts do not lie side by side.
pub(crate) fn piece_of(
    algorithm: Algorithm,
    collective: Collective,
    world_size: u32,
    max_bytes: u64,
    piece: u64,
) -> u64 {
    let several_blocks = collective.blocks(world_size) != Some((1, 1));
    match algorithm.needs_registered() || several_blocks {
        true => max_bytes,
        false => piece.min(max_bytes),
    }
}

impl Selector {
    /// The choices for messages of up to `max_bytes` bytes.
    #[must_use]
    pub fn new(collective: Collective, world_size: u32, place: Place, max_bytes: u64) -> Self {
        let whole = PIECE / blocks_of(collective, world_size);
        let large = large(collective, world_size, place, max_bytes, (PIECE, whole));
        if world_size == 1 {
            return Self::of(large, Vec::new());
        }
        let small = ONE_SHOT_MAX.min(max_bytes);
        let mut choices = vec![Choice {
            algorithm: Algorithm::OneShot.into(),
            up_to: small,
            piece: small,
            blocks: 1,
            reason: SMALL.into(),
        }];
        choices.extend(large.into_iter().filter(|choice| choice.up_to > small));
        Self::of(choices, Vec::new())
    }

    /// The choices for messages of up to `max_bytes` bytes on GPUs. Of collectives other than all-reduce the
    /// limits are not measured.
    #[must_use]
    pub fn for_gpus(collective: Collective, world_size: u32, place: Place, max_bytes: u64) -> Self {
        if world_size == 1 {
            let choices = large(collective, world_size, place, max_bytes, (PIECE, PIECE));
            let mut alone = Self::of(choices, Vec::new());
            alone.with_blocks(GPU_BLOCKS);
            return alone;
        }
        let one_shot_max = gpu_one_shot_max(collective, world_size, place);
        let mut choices = Vec::new();
        // Few steps: each is a plan with memory of its own.
        let mut steps = GPU_ONE_SHOT.to_vec();
        if collective == Collective::AllReduce {
            steps.insert(steps.len() - 1, GPU_LINES);
        }
        for (blocks, up_to) in steps {
            let up_to = up_to.min(one_shot_max).min(max_bytes);
            choices.push(Choice {
                algorithm: Algorithm::OneShot.into(),
                up_to,
                piece: up_to,
                blocks,
                reason: if blocks < GPU_MOST_BLOCKS {
                    SMALL
                } else {
                    ONE_HOP
                }
                .into(),
            });
            if up_to == max_bytes.min(one_shot_max) {
                break;
            }
        }
        let medium = max_bytes.min(GPU_MEDIUM_MAX);
        // What goes to others is there twice. In parts it takes longer: two H200, all-gather of 8 MiB by 16 thread blocks 60 and 179 us.
        let whole = SCRATCH_MAX / 2 / (blocks_of(collective, world_size) - 1).max(1);
        let pieces = (GPU_PIECE, whole);
        let mut large = large(collective, world_size, place, max_bytes, pieces);
        // Two H200, all-to-all of 32 MiB: 68 us when read; all-gather, which is written, 54.
        let pushes = Algorithm::of(collective).contains(&Algorithm::Push);
        for choice in &mut large {
            if pushes && choice.algorithm == Algorithm::Direct {
                choice.algorithm = Algorithm::Push.into();
                choice.reason = PUSHED.into();
            }
        }
        for choice in large.into_iter().filter(|c| c.up_to > one_shot_max) {
            if choices.last().is_none_or(|before| before.up_to < medium) {
                let up_to = choice.up_to.min(medium);
                choices.push(Choice {
                    up_to,
                    piece: choice.piece.min(up_to),
                    blocks: GPU_BLOCKS,
                    ..choice.clone()
                });
            }
            if choice.up_to > medium {
                choices.push(Choice {
                    blocks: GPU_MOST_BLOCKS,
                    ..choice
                });
            }
        }
        Self::of(choices, Vec::new())
    }

    /// From choices by ascending size, at least one, and others of the same kind for sizes that those do not take.
    pub(crate) fn of(mut choices: Vec<Choice>, otherwise: Vec<Choice>) -> Self {
        let first = choices.len();
        let by_digits = (0..=u64::BITS)
            .map(|digits| {
                let least = if digits == 0 { 0 } else { 1 << (digits - 1) };
                let found = choices.iter().position(|choice| least <= choice.up_to);
                found.unwrap_or(first.saturating_sub(1)) as u16
            })
            .collect();
        choices.extend(otherwise);
        Self {
            choices,
            first,
            by_digits,
        }
    }

    /// The same choices with no more thread blocks than that.
    pub(crate) fn with_most_blocks(mut self, most: u32) -> Self {
        for choice in &mut self.choices {
            choice.blocks = choice.blocks.min(most);
        }
        self
    }

    /// The same choices with another number of thread blocks.
    pub(crate) fn with_blocks(&mut self, blocks: u32) {
        // A plan of the user's has its own.
        let ours = |choice: &&mut Choice| choice.algorithm.built_in().is_some();
        for choice in self.choices.iter_mut().filter(ours) {
            choice.blocks = blocks;
        }
    }

    /// One algorithm for every size, because the caller said so.
    #[must_use]
    pub fn forced(
        algorithm: Algorithm,
        collective: Collective,
        world_size: u32,
        max_bytes: u64,
    ) -> Self {
        let piece = piece_of(algorithm, collective, world_size, max_bytes, PIECE);
        let only = Choice {
            algorithm: algorithm.into(),
            up_to: max_bytes,
            piece,
            blocks: 1,
            reason: "asked for".into(),
        };
        Self::of(vec![only], Vec::new())
    }

    /// The choices by ascending size.
    #[must_use]
    pub fn choices(&self) -> &[Choice] {
        &self.choices[..self.first]
    }

    /// Those, and the ones for sizes that a chosen plan does not take.
    #[must_use]
    pub fn all(&self) -> &[Choice] {
        &self.choices
    }

    /// The index among [`all`](Self::all) of the choice for `bytes` bytes; the last one for its kind of size if it is larger than prepared for.
    #[must_use]
    pub fn select(&self, bytes: u64) -> usize {
        let digits = (u64::BITS - bytes.leading_zeros()) as usize;
        let mut index = usize::from(self.by_digits[digits]);
        while index + 1 < self.first && bytes > self.choices[index].up_to {
            index += 1;
        }
        if self.choices[index].algorithm.takes(bytes) || self.first == self.choices.len() {
            return index;
        }
        let otherwise = &self.choices[self.first..];
        let fits = otherwise.iter().position(|choice| bytes <= choice.up_to);
        self.first + fits.unwrap_or(otherwise.len() - 1)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, choice) in self.choices().iter().enumerate() {
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

    fn names<'a>(selector: &'a Selector, sizes: &[u64]) -> Vec<&'a str> {
        sizes
            .iter()
            .map(|&s| selector.choices()[selector.select(s)].algorithm.name())
            .collect()
    }

    #[test]
    fn small_messages_take_packets_and_large_ones_what_the_buffers_allow() {
        let sizes = [0, 8, ONE_SHOT_MAX, ONE_SHOT_MAX + 1, 1 << 30];
        let symmetric = Selector::new(Collective::AllReduce, 2, Place::Symmetric, 1 << 30);
        let expected = ["one-shot", "one-shot", "one-shot", "two-shot", "two-shot"];
        assert_eq!(names(&symmetric, &sizes), expected);
        let private = Selector::new(Collective::AllReduce, 8, Place::Private, 1 << 30);
        assert_eq!(
            names(&private, &sizes)[3..],
            ["two-shot-staged", "two-shot-staged"]
        );
        assert_eq!(private.choices()[1].piece, PIECE);
        assert_eq!(
            Selector::new(Collective::AllReduce, 4, Place::Symmetric, 100)
                .choices()
                .len(),
            1
        );
    }

    #[test]
    fn other_collectives_take_what_the_buffers_allow() {
        let last = |collective, place| {
            let selector = Selector::new(collective, 4, place, 1 << 30);
            assert_eq!(selector.choices()[0].algorithm, Algorithm::OneShot);
            let choice = selector.choices()[1].clone();
            (choice.algorithm.built_in().unwrap(), choice.piece)
        };
        let (private, symmetric, one) = (Place::Private, Place::Symmetric, Place::OneSymmetric);
        let gather = Collective::AllGather;
        assert_eq!(last(gather, symmetric), (Algorithm::Direct, 1 << 30));
        assert_eq!(last(gather, one), (Algorithm::Direct, 1 << 30));
        // Parts of several blocks do not lie side by side.
        assert_eq!(last(gather, private), (Algorithm::Staged, PIECE / 4));
        for selector in [
            Selector::new(gather, 4, private, 1 << 30),
            Selector::for_gpus(gather, 4, private, 1 << 30),
        ] {
            let choices = selector.choices();
            assert!(choices.is_sorted_by(|a, b| a.up_to < b.up_to));
            let last = choices.last().unwrap();
            assert_eq!(last.algorithm, Algorithm::Pipelined);
            assert_eq!((last.up_to, last.piece), (1 << 30, 1 << 30));
        }
        let alone = Selector::new(gather, 1, private, 0);
        assert_eq!(alone.choices().len(), 1);
        let broadcast = Collective::Broadcast { root: 1 };
        assert_eq!(last(broadcast, private), (Algorithm::Staged, PIECE));
        let reduce = Collective::Reduce { root: 1 };
        assert_eq!(last(reduce, symmetric), (Algorithm::TwoShot, 1 << 30));
        assert_eq!(last(reduce, private), (Algorithm::TwoShotStaged, PIECE));
        let all_to_all = Collective::AllToAll;
        assert_eq!(last(all_to_all, symmetric), (Algorithm::Direct, 1 << 30));
        assert_eq!(last(all_to_all, one), (Algorithm::Staged, PIECE / 4));
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
            let selector = Selector::for_gpus(Collective::AllReduce, ranks, Place::Symmetric, max);
            let choices = selector.choices();
            assert!(choices.is_sorted_by(|a, b| a.up_to < b.up_to));
            let small = choices.iter().filter(|c| c.algorithm == Algorithm::OneShot);
            assert!(small.is_sorted_by_key(|c| c.blocks));
            assert_eq!(choices.last().unwrap().up_to, max);
            assert!(choices.iter().all(|c| c.piece <= max && c.blocks >= 1));
        }
        let two = Selector::for_gpus(Collective::AllReduce, 2, Place::Symmetric, 1 << 30);
        assert_eq!(
            names(&two, &[8, 4 << 20, 5 << 20]),
            ["one-shot", "one-shot", "two-shot"]
        );
        let eight = Selector::for_gpus(Collective::AllReduce, 8, Place::Private, 1 << 30);
        assert_eq!(
            names(&eight, &[350 << 10, 400 << 10]),
            ["one-shot", "two-shot-staged"]
        );
        let all_to_all = Selector::for_gpus(Collective::AllToAll, 2, Place::Symmetric, 1 << 30);
        assert_eq!(names(&all_to_all, &[8, 5 << 20]), ["one-shot", "push"]);
        // More ranks, more that each sends.
        let most: Vec<_> = (2..=16)
            .map(|n| gpu_one_shot_max(Collective::AllReduce, n, Place::Symmetric))
            .collect();
        assert!(most.is_sorted_by(|a, b| a >= b), "{most:?}");
        assert_eq!(
            gpu_one_shot_max(Collective::AllGather, 4, Place::Private),
            256 << 10
        );
    }

    #[test]
    fn a_choice_is_found_as_by_looking_at_all_of_them() {
        let choice = |(index, &up_to): (usize, &u64)| Choice {
            algorithm: Algorithm::OneShot.into(),
            up_to,
            piece: up_to,
            blocks: index as u32,
            reason: "".into(),
        };
        for limits in [
            &[0][..],
            &[0, 1, 2, 3, 4, 5],
            &[8, 10, 14, 16, 20, 28, 1 << 20, (1 << 20) + 1],
            &[3, u64::MAX],
        ] {
            let choices: Vec<Choice> = limits.iter().enumerate().map(choice).collect();
            let selector = Selector::of(choices, Vec::new());
            let near = |size: u64| [size.saturating_sub(1), size, size.saturating_add(1)];
            for bytes in limits.iter().copied().chain([7, 1 << 40]).flat_map(near) {
                let all = limits.iter().position(|limit| bytes <= *limit);
                let expected = all.unwrap_or(limits.len() - 1);
                assert_eq!(selector.select(bytes), expected, "{bytes} among {limits:?}");
            }
        }
    }

    #[test]
    fn it_says_what_and_why() {
        let text = Selector::new(Collective::AllReduce, 2, Place::Symmetric, 1 << 20).to_string();
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
