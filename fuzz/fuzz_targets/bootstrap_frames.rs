//! Any bytes as a connection of the bootstrap, and as any of its messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_net::fuzz::frames(bytes));
