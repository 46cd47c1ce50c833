//! Any triggers to a proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_channel::fuzz::triggers(bytes));
