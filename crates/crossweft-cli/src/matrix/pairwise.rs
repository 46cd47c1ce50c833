//! Few cases that hold every pair of levels of any two dimensions that any case holds.
//!
//! Most faults hang on one or two circumstances (Kuhn, Wallace and Gallo, "Software fault interactions and implications
//! for software testing", IEEE TSE 30(6), 2004), so this finds most of what the whole matrix finds.

/// Dimensions of a case.
pub(crate) const DIMENSIONS: usize = 8;

/// Most levels of a dimension.
const LEVELS: usize = 16;

/// A case's level in each dimension, each below [`LEVELS`].
pub(crate) type Levels = [u8; DIMENSIONS];

/// A set of pairs of levels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pairs(Vec<bool>);

impl Pairs {
    fn new() -> Self {
        Self(vec![false; DIMENSIONS * DIMENSIONS * LEVELS * LEVELS])
    }

    /// Those of all these cases.
    pub(crate) fn of<'a>(cases: impl IntoIterator<Item = &'a Levels>) -> Self {
        let mut pairs = Self::new();
        for case in cases {
            for pair in pairs_of(case) {
                pairs.0[pair] = true;
            }
        }
        pairs
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.0.iter().filter(|&&held| held).count()
    }
}

/// The numbers of a case's pairs.
fn pairs_of(case: &Levels) -> impl Iterator<Item = usize> + '_ {
    (0..DIMENSIONS).flat_map(move |a| {
        (a + 1..DIMENSIONS).map(move |b| {
            let levels = usize::from(case[a]) * LEVELS + usize::from(case[b]);
            (a * DIMENSIONS + b) * LEVELS * LEVELS + levels
        })
    })
}

/// How many cases with a missing pair are looked at before the best of them is taken.
const TRIES: usize = 64;

/// A step through all cases that hardly ever meets neighbours: a prime, so that it reaches all.
const STRIDE: usize = 7_368_787;

/// Indices of cases that together hold every pair that any case holds, in ascending order. Greedy: the next one is the
/// best of some that have the first pair that is missing.
pub(crate) fn covering(cases: &[Levels]) -> Vec<usize> {
    let count = cases.len();
    let step = match count % STRIDE {
        0 => 1,
        _ => STRIDE,
    };
    let mut missing = Pairs::of(cases);
    let mut chosen = Vec::new();
    let mut last = 0;
    while let Some(pair) = missing.0.iter().position(|&is_missing| is_missing) {
        let best = (1..=count)
            .map(|k| (last + k * step) % count)
            .filter(|&i| pairs_of(&cases[i]).any(|p| p == pair))
            .take(TRIES)
            .max_by_key(|&i| pairs_of(&cases[i]).filter(|&p| missing.0[p]).count());
        // There is one: the pair is some case's.
        let Some(best) = best else { break };
        for p in pairs_of(&cases[best]) {
            missing.0[p] = false;
        }
        chosen.push(best);
        last = best;
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::case::all;

    #[test]
    fn every_pair_is_covered_by_few() {
        let all: Vec<Levels> = all().into_iter().map(|case| case.levels).collect();
        let chosen = covering(&all);
        let pairs = Pairs::of(&all);
        assert_eq!(Pairs::of(chosen.iter().map(|&i| &all[i])), pairs);
        assert!(chosen.len() < 400, "{} cases", chosen.len());
        // Said once more, the slow way: every two levels that occur together in any case.
        for a in 0..DIMENSIONS {
            for b in 0..a {
                let levels = |case: &Levels| (case[a], case[b]);
                let set = |cases: &mut dyn Iterator<Item = &Levels>| {
                    cases.map(levels).collect::<std::collections::BTreeSet<_>>()
                };
                let found = set(&mut chosen.iter().map(|&i| &all[i]));
                assert_eq!(found, set(&mut all.iter()), "dimensions {a} and {b}");
            }
        }
        assert!(pairs.count() > 1000);
    }

    #[test]
    fn a_few_cases_are_all_taken_if_each_has_a_pair_of_its_own() {
        let cases = [[0; DIMENSIONS], [1; DIMENSIONS], [2; DIMENSIONS]];
        assert_eq!(covering(&cases), [0, 1, 2]);
        assert_eq!(covering(&[[3; DIMENSIONS]; 5]).len(), 1);
        assert_eq!(covering(&[]), [0; 0]);
    }
}
