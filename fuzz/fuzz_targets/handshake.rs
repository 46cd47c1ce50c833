//! Either end of the proof of the secret against somebody who does not know it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| crossweft_net::fuzz::handshake(bytes));
