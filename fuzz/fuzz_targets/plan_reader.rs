//! Any bytes to both plan readers: an error or a sound plan, never a panic. A plan that is read is
//! written and read again, and comes back the same.
#![no_main]

use crossweft_plan::{Plan, mscclpp};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(plan) = Plan::from_json(bytes) {
        assert_eq!(Plan::from_json(plan.to_json().as_bytes()).ok(), Some(plan));
    }
    if let Ok(imported) = mscclpp::import(bytes) {
        imported.plan.validate().expect("an imported plan is sound");
    }
});
