//! A rank of a group whose neighbours say anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_net::fuzz::mesh(bytes));
