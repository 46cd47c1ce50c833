//! Any bytes to the reader of tuning tables: an error, or a table that can be chosen by.
#![no_main]

use crossweft_collective::TuningTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(table) = TuningTable::from_json(bytes) {
        for measurements in table.measurements() {
            let candidates = measurements.candidates.len();
            assert!(measurements.rows.iter().all(|row| row.us.len() == candidates));
        }
        assert!(!table.to_json().is_empty());
    }
});
