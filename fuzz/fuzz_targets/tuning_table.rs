//! Any bytes to the reader of tuning tables: an error, or a table that can be chosen by.
#![no_main]

use crossweft_collective::{
    DataType, DeviceKind, Explanation, Place, ReduceOp, Request, Selection, TuningTable,
    collectives,
};
use libfuzzer_sys::fuzz_target;

/// A plan of more ranks takes too long to lay out for a fuzzer.
const MOST_RANKS: u32 = 4;

fuzz_target!(|bytes: &[u8]| {
    let Ok(table) = TuningTable::from_json(bytes) else {
        return;
    };
    for measurements in table.measurements() {
        let candidates = measurements.candidates.len();
        assert!(
            measurements
                .rows
                .iter()
                .all(|row| row.us.len() == candidates)
        );
    }
    assert!(!table.to_json().is_empty());
    // A communicator only takes the table of its own number of ranks.
    if (1..=MOST_RANKS).contains(&table.world_size()) {
        choose(table);
    }
});

/// Has the table choose, for its own sizes and some between and beyond.
fn choose(table: TuningTable) {
    let rows = table.measurements().iter().flat_map(|m| &m.rows);
    let sizes = rows.flat_map(|row| [row.bytes, row.bytes.saturating_add(1)]);
    let mut sizes: Vec<u64> = sizes.take(8).collect();
    sizes.extend([0, 513, 1 << 33]);
    let (world_size, selection) = (table.world_size(), Selection::of_table(table.clone()));
    for collective in collectives(0) {
        let mut measured = table.measurements().iter().map(|m| &*m.collective);
        if !measured.any(|name| name == collective.name()) {
            continue;
        }
        for place in [Place::Private, Place::Symmetric, Place::OneSymmetric] {
            for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
                let request = |max_bytes| Request {
                    collective,
                    world_size,
                    dtype: DataType::F32,
                    op: ReduceOp::Sum,
                    place,
                    in_place: None,
                    device,
                    max_bytes,
                };
                let whole = selection.select(&request(1 << 40));
                assert!(whole.choices().is_sorted_by(|a, b| a.up_to < b.up_to));
                for &bytes in sizes.iter().filter(|bytes| **bytes <= 1 << 40) {
                    let small = selection.select(&request(bytes));
                    let choice = &small.all()[small.select(bytes)];
                    assert_eq!(choice.up_to, bytes);
                    assert!(choice.piece <= bytes);
                    let same = &whole.all()[whole.select(bytes)];
                    assert_eq!(
                        (&choice.algorithm, choice.blocks),
                        (&same.algorithm, same.blocks)
                    );
                }
            }
        }
        // One is enough: it asks the cost model for every candidate.
        let request = Request {
            collective,
            world_size,
            dtype: DataType::F32,
            op: ReduceOp::Sum,
            place: Place::Symmetric,
            in_place: None,
            device: DeviceKind::Cpu,
            max_bytes: sizes[0],
        };
        assert!(
            Explanation::new(&request, sizes[0], &selection)
                .chosen()
                .is_some()
        );
    }
}
