//! Any bytes from a peer's proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_channel::fuzz::tcp_frames(bytes));
