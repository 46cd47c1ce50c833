//! Any words in the memory that ranks share, before and during a group of messages.
#![no_main]

#[allow(dead_code, reason = "each target has its part")]
#[path = "../../crates/crossweft-cli/tests/faults/hostile.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::message_words(bytes));
