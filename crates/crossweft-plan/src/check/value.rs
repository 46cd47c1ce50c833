//! Symbolic values: which inputs went into one, and how often.

/// What a cell holds: a multiset of granules of inputs, kept as the sum of their 128-bit hashes and
/// their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Value {
    sum: u128,
    /// 0: nothing was ever written.
    count: u32,
    /// Reductions that were the last.
    finished: u32,
}

impl Value {
    /// Never written, or not to be relied on.
    pub(super) const NONE: Self = Self {
        sum: 0,
        count: 0,
        finished: 0,
    };

    /// Granule `at` of `rank`'s input in one execution.
    pub(super) fn input(execution: u32, rank: u32, at: u64) -> Self {
        let key = at | u64::from(rank) << 40 | u64::from(execution) << 56;
        let low = mix(key);
        let high = mix(low ^ key.rotate_left(17));
        Self {
            sum: u128::from(low) | u128::from(high) << 64,
            count: 1,
            finished: 0,
        }
    }

    pub(super) const fn is_none(self) -> bool {
        self.count == 0
    }

    pub(super) const fn finished(self) -> u32 {
        self.finished
    }

    /// Whether the same inputs are in both.
    pub(super) const fn same_inputs(self, other: Self) -> bool {
        self.sum == other.sum && self.count == other.count
    }

    pub(super) const fn count(self) -> u32 {
        self.count
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            sum: self.sum.wrapping_add(other.sum),
            count: self.count.saturating_add(other.count),
            finished: self.finished.saturating_add(other.finished),
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            sum: self.sum.wrapping_sub(other.sum),
            count: self.count.saturating_sub(other.count),
            finished: self.finished,
        }
    }

    pub(super) fn finish(mut self) -> Self {
        self.finished = self.finished.saturating_add(1);
        self
    }
}

/// `splitmix64`.
fn mix(key: u64) -> u64 {
    let z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
