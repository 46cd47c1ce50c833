//! The cost model against what was measured on two H200: docs/results/2xH200-*.json.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;

use crossweft_collective::{
    Collective, DataType, DeviceKind, Explanation, Fingerprint, Place, ReduceOp, Request, Selection,
};
use serde_json::Value;

/// How far off a prediction may be.
const FACTOR: f64 = 1.5;

fn results(name: &str) -> Value {
    let path = format!("{}/../../docs/results/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// What is said of calls whose larger buffer has `bytes` bytes, in symmetric memory.
fn explained(collective: Collective, bytes: u64) -> Explanation {
    let (input, output) = collective.blocks(2).unwrap();
    let message = bytes / u64::from(input.max(output));
    let request = Request {
        collective,
        world_size: 2,
        dtype: DataType::Bf16,
        op: ReduceOp::Sum,
        place: Place::Symmetric,
        in_place: Some(false),
        device: DeviceKind::Cuda,
        max_bytes: message,
        most_blocks: u32::MAX,
        deterministic: false,
    };
    let selection = Selection::shipped(Fingerprint::unknown(), 2);
    Explanation::new(&request, message, &selection)
}

/// Compares a prediction with a measurement; says how it is off, if it is.
fn compare(what: &str, bytes: u64, predicted: f64, measured: f64) -> Option<String> {
    let ratio = predicted / measured;
    let line = format!("{what}, {bytes} B: {predicted:.2} us, measured {measured:.2} ({ratio:.2})");
    println!("{line}");
    (!(1.0 / FACTOR..=FACTOR).contains(&ratio)).then_some(line)
}

fn sizes(of: &Value) -> impl Iterator<Item = (u64, &Value)> {
    let of = of.as_object().unwrap().iter();
    of.filter_map(|(bytes, value)| Some((bytes.parse().ok()?, value)))
}

#[test]
fn what_is_chosen_takes_as_long_as_predicted() {
    let mut off = Vec::new();
    let recorded = results("2xH200-2026-11-30-nccl.json");
    let rounds = recorded["all-reduce"]["rounds"].as_array().unwrap();
    for (bytes, us) in sizes(&rounds[0]["crossweft"]) {
        let chosen = explained(Collective::AllReduce, bytes);
        let predicted = chosen.chosen().unwrap().predicted_us.unwrap();
        off.extend(compare(
            "all-reduce",
            bytes,
            predicted,
            us.as_f64().unwrap(),
        ));
    }
    for (name, of) in recorded["collectives"].as_object().unwrap() {
        let collective = match name.as_str() {
            "all-gather" => Collective::AllGather,
            "reduce-scatter" => Collective::ReduceScatter,
            "all-to-all" => Collective::AllToAll,
            "broadcast" => Collective::Broadcast { root: 0 },
            _ => continue,
        };
        for (bytes, us) in sizes(&of["crossweft"]) {
            let Some(us) = us.as_f64() else { continue };
            let explained = explained(collective, bytes);
            // What was chosen then, by the same number of thread blocks if it still is, else by the most.
            let algorithm = of["algorithm"][bytes.to_string()].as_str().unwrap();
            let chosen = explained.chosen().filter(|one| one.name == algorithm);
            let others = explained
                .candidates
                .iter()
                .filter(|one| one.name == algorithm);
            let found = chosen.or_else(|| others.max_by_key(|one| one.thread_blocks));
            let predicted = found.unwrap().predicted_us.unwrap();
            off.extend(compare(name, bytes, predicted, us));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}

#[test]
fn numbers_of_thread_blocks_make_the_difference_that_is_predicted() {
    let mut off = Vec::new();
    let recorded = results("2xH200-2026-11-30.json");
    let forced = &recorded["forced"];
    let all = [
        ("packets, 16 blocks", "one-shot", 16),
        ("packets, 64 blocks", "one-shot", 64),
        ("lines, 64 blocks", "one-shot", 64),
        ("two-shot, 128 blocks", "two-shot", 128),
    ];
    for (name, algorithm, blocks) in all {
        for (bytes, us) in sizes(&forced[name]) {
            let explained = explained(Collective::AllReduce, bytes);
            let mut candidates = explained.candidates.iter();
            let found = candidates.find(|one| one.name == algorithm && one.thread_blocks == blocks);
            let predicted = found.unwrap().predicted_us.unwrap();
            off.extend(compare(name, bytes, predicted, us.as_f64().unwrap()));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}
