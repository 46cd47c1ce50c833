//! Tuning tables that come with the library: what was measured on machines of a kind, for those that have not been tuned.

use crate::fingerprint::Fingerprint;
use crate::table::TuningTable;

/// A kind of machine: ranks with a GPU of that name each, to all of which the others' are joined alike.
struct Shipped {
    gpu: &'static str,
    ranks: u32,
    table: &'static str,
}

const ALL: [Shipped; 1] = [Shipped {
    // With that name they have NVLink to each other.
    gpu: "NVIDIA H200",
    ranks: 2,
    table: include_str!("../tables/2xH200.json"),
}];

/// The table for hardware of that kind, if there is one.
pub(crate) fn table(fingerprint: &Fingerprint) -> Option<TuningTable> {
    let is_it = |shipped: &&Shipped| {
        let mut ranks = fingerprint.ranks_on();
        let alone =
            |(on, count): (&str, u32)| count == 1 && on.split(',').next() == Some(shipped.gpu);
        fingerprint.ranks_on().count() == shipped.ranks as usize && ranks.all(alone)
    };
    let shipped = ALL.iter().find(is_it)?;
    let table = TuningTable::from_json(shipped.table.as_bytes());
    let mut table = table.inspect_err(|error| tracing::warn!("the shipped tuning table: {error}"));
    if let Ok(table) = &mut table {
        table.forget_changed();
    }
    table.ok()
}

/// What choices come from where such a table alone answers.
pub(crate) fn source(fingerprint: &Fingerprint) -> String {
    let gpu = fingerprint.ranks_on().next().map_or("", |(on, _)| on);
    let gpu = gpu.split(',').next().unwrap_or_default();
    format!(
        "the tuning table for {} {gpu} that comes with crossweft",
        fingerprint.ranks_on().count()
    )
}

#[cfg(test)]
mod tests {
    use crossweft_plan::Collective;

    use super::*;
    use crate::candidate::{DeviceKind, collectives};
    use crate::choose::choose;
    use crate::registry::Registry;
    use crate::selector::Place;
    use crate::table::request;

    fn of(ranks: &[&str]) -> Fingerprint {
        Fingerprint::of_ranks(ranks.iter().map(|rank| (*rank).to_owned()))
    }

    #[test]
    fn tables_are_for_a_gpu_each_of_their_name() {
        let (a, b) = (
            "NVIDIA H200, GPU-1, driver 580",
            "NVIDIA H200, GPU-2, driver 590",
        );
        assert!(table(&of(&[a, b])).is_some());
        assert!(source(&of(&[a, b])).contains("2 NVIDIA H200"));
        for other in [
            &[a, a][..],
            &[a],
            &[a, b, b],
            &["NVIDIA H200 NVL, GPU-1", b],
            &["some CPU"; 2],
        ] {
            assert!(table(&of(other)).is_none(), "{other:?}");
        }
    }

    /// Tune once more, or take the entry out, when this fails.
    #[test]
    fn tables_are_of_this_version_and_of_plans_as_they_are() {
        for shipped in &ALL {
            let mut table = TuningTable::from_json(shipped.table.as_bytes()).unwrap();
            assert_eq!(table.world_size(), shipped.ranks);
            assert!(table.forget_changed().is_empty());
            // Of all collectives but all-reduce, which the rule knows as well, in both kinds of memory, and it makes the choices.
            let those = collectives(0).into_iter();
            for collective in those.filter(|one| *one != Collective::AllReduce) {
                for place in [Place::Private, Place::Symmetric] {
                    let names = (collective.name(), "bf16", "sum");
                    let request = request(names, place, shipped.ranks, DeviceKind::Cuda).unwrap();
                    let selector = choose(&request, &Registry::new(), Some(&table));
                    let chosen = &selector.choices()[selector.select(64 << 10)];
                    assert!(chosen.reason.starts_with("measured"), "{selector}");
                }
            }
        }
    }
}
