//! A rendezvous with members and strangers that say anything at any time.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_net::fuzz::rendezvous(bytes));
