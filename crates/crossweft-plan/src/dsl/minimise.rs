//! Dropping what the checker can do without.

use super::order::{Edge, Missing};

/// Drops edges that may not be needed, as long as `accepts` what is left: of those that it leaves, it refuses to go
/// without any one. Whole groups are tried first, as mostly all of a kind are needed, or none.
pub(super) fn minimise(mut missing: Missing, accepts: impl Fn(&Missing) -> bool) -> Missing {
    let candidates: Vec<Edge> = missing
        .edges
        .iter()
        .copied()
        .filter(|edge| edge.choice)
        .collect();
    let mut groups = vec![candidates];
    while let Some(group) = groups.pop() {
        if group.is_empty() {
            continue;
        }
        let without = Missing {
            edges: missing
                .edges
                .iter()
                .copied()
                .filter(|edge| !group.contains(edge))
                .collect(),
            flushes: missing.flushes.clone(),
        };
        if accepts(&without) {
            missing = without;
        } else if group.len() > 1 {
            let (first, second) = group.split_at(group.len() / 2);
            groups.extend([first.to_vec(), second.to_vec()]);
        }
    }
    missing
}
