//! What there is to try: every combination of these dimensions that makes sense.

use std::fmt;

use crossweft_collective::{Algorithm, Collective, DataType, ReduceOp, collectives};

use super::pairwise::{DIMENSIONS, Levels};

/// World sizes.
pub(crate) const RANKS: u32 = 8;

/// How inputs are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Not at all.
    None,
    Plain(ReduceOp),
    /// A sum of inputs that each rank multiplies by a scalar of its own.
    PreMultiplied,
}

impl Operation {
    pub(super) const ALL: [Self; 7] = [
        Self::None,
        Self::Plain(ReduceOp::Sum),
        Self::Plain(ReduceOp::Prod),
        Self::Plain(ReduceOp::Min),
        Self::Plain(ReduceOp::Max),
        Self::Plain(ReduceOp::Avg),
        Self::PreMultiplied,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Plain(op) => op.name(),
            Self::PreMultiplied => "premul",
        }
    }
}

/// How large messages are, and where they begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// No elements.
    Nothing,
    One,
    /// An odd number of elements, beginning where vectors do.
    Odd,
    /// The same, beginning where an element may and nothing larger does.
    Shifted,
    /// Many tiles and packets, and an odd number.
    Large,
}

impl Size {
    pub(crate) const ALL: [Self; 5] = [
        Self::Nothing,
        Self::One,
        Self::Odd,
        Self::Shifted,
        Self::Large,
    ];

    /// Elements of a message, of which the larger of input and output has `blocks`.
    pub(crate) fn elements(self, dtype: DataType, blocks: u64, large: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::One => 1,
            Self::Odd => 333,
            Self::Shifted => 1027,
            Self::Large => (large / blocks / dtype.size() as u64) | 1,
        }
    }

    /// Elements before the message in its buffer, which is aligned to vectors.
    pub(crate) fn shift(self) -> u64 {
        u64::from(self == Self::Shifted)
    }
}

/// One thing to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// Its place among all.
    pub(crate) number: usize,
    pub(crate) levels: Levels,
    pub(crate) config: Config,
    pub(crate) size: Size,
}

/// What is prepared for all sizes of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) ranks: u32,
    pub(crate) collective: Collective,
    /// `None` for what the selector chooses.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) dtype: DataType,
    pub(crate) operation: Operation,
    pub(crate) symmetric: bool,
    pub(crate) in_place: bool,
}

/// The algorithms of all collectives; `None` is the selector's choice.
pub(crate) fn algorithms() -> Vec<Option<Algorithm>> {
    let mut all = vec![None];
    for collective in collectives(0) {
        for &algorithm in Algorithm::of(collective) {
            if !all.contains(&Some(algorithm)) {
                all.push(Some(algorithm));
            }
        }
    }
    all
}

pub(crate) fn algorithm_name(algorithm: Option<Algorithm>) -> &'static str {
    algorithm.map_or("auto", Algorithm::name)
}

impl Config {
    /// Whether it makes sense.
    fn is_valid(&self) -> bool {
        let Self {
            collective,
            algorithm,
            operation,
            symmetric,
            in_place,
            ..
        } = *self;
        let Some(algorithm) = algorithm else {
            return collective.reduces() == (operation != Operation::None);
        };
        let overwrites = in_place && algorithm.overwrites(collective);
        Algorithm::of(collective).contains(&algorithm)
            && collective.reduces() == (operation != Operation::None)
            && (symmetric || !algorithm.needs_registered())
            && !overwrites
    }
}

/// Every case that makes sense, by world size; those of one configuration follow one another.
pub(crate) fn all() -> Vec<Case> {
    let algorithms = algorithms();
    let mut cases = Vec::new();
    for ranks in 1..=RANKS {
        for collective in 0..collectives(0).len() {
            for (a, &algorithm) in algorithms.iter().enumerate() {
                for (d, dtype) in DataType::ALL.into_iter().enumerate() {
                    for (o, operation) in Operation::ALL.into_iter().enumerate() {
                        for (m, p) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                            let config = Config {
                                ranks,
                                // Every rank has its turn.
                                collective: collectives((a + d) as u32 % ranks)[collective],
                                algorithm,
                                dtype,
                                operation,
                                symmetric: m == 1,
                                in_place: p == 1,
                            };
                            if !config.is_valid() {
                                continue;
                            }
                            for (s, size) in Size::ALL.into_iter().enumerate() {
                                let levels: [usize; DIMENSIONS] =
                                    [ranks as usize, collective, a, d, o, m, p, s];
                                cases.push(Case {
                                    number: cases.len(),
                                    levels: levels.map(|level| level as u8),
                                    config,
                                    size,
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    cases
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config {
            ranks,
            collective,
            algorithm,
            dtype,
            operation,
            symmetric,
            in_place,
        } = self.config;
        let (name, algorithm) = (collective.name(), algorithm_name(algorithm));
        let root = collective.root();
        let root = root.map_or_else(String::new, |root| format!(" (root {root})"));
        let place = if in_place { "in place" } else { "out of place" };
        let memory = if symmetric { "symmetric" } else { "private" };
        write!(
            f,
            "case {}: {name}{root} {algorithm} {dtype} {}, {ranks} ranks, {place}, {memory}, {:?}",
            self.number,
            operation.name(),
            self.size
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_there() {
        let cases = all();
        let count =
            |what: &dyn Fn(&Config) -> bool| cases.iter().filter(|case| what(&case.config)).count();
        // Types, operations, sizes, world sizes; two places in each of two memories.
        let each = 14 * 6 * 5 * 8;
        let ring = |c: &Config| c.algorithm == Some(Algorithm::Ring);
        assert_eq!(count(&ring), 4 * each);
        let two_shot = |c: &Config| {
            (c.collective, c.algorithm) == (Collective::AllReduce, Some(Algorithm::TwoShot))
        };
        assert_eq!(count(&two_shot), 2 * each);
        let in_place = |c: &Config| c.algorithm.is_some_and(|a| a.overwrites(c.collective));
        assert_eq!(count(&in_place), 2 * 14 * 5 * 8);
        assert!(cases.iter().enumerate().all(|(i, case)| case.number == i));
        for collective in collectives(7) {
            let root = |c: &Config| c.collective == collective && c.ranks == 8;
            assert!(count(&root) > 0, "{collective:?}");
        }
    }

    #[test]
    fn sizes_are_what_they_are_called() {
        for dtype in DataType::ALL {
            let elements = |size: Size| size.elements(dtype, 8, 1 << 18);
            assert_eq!(elements(Size::Nothing), 0);
            assert_eq!(elements(Size::One), 1);
            assert!(elements(Size::Large) * dtype.size() as u64 * 8 >= 1 << 18);
            for size in [Size::Odd, Size::Shifted, Size::Large] {
                assert!(elements(size) % 2 == 1);
            }
        }
    }
}
