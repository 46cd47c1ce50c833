//! Any bytes and any text as a unique id.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_net::fuzz::unique_id(bytes));
