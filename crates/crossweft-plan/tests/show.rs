//! Pages of plans: what is in them, and that nothing else can get in.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use crossweft_device::packet::PacketType;
use crossweft_plan::check::{self, check};
use crossweft_plan::cost::{CostError, Topology, predict};
use crossweft_plan::show::{MAX_PAGE_BYTES, Options, Page, ShowError, page};
use crossweft_plan::{Buffer, Builder, Chunks, Collective, Op, Operand, Plan, mscclpp};
use serde_json::Value;

const ALL: Chunks = Chunks::new(0, 1);

fn at(rank: u32, buffer: Buffer, index: u32) -> Operand {
    Operand::new(rank, buffer, index)
}

/// Everybody sends to everybody through packets and tells the next one.
fn exchange(name: &str, ranks: u32, blocks: u32) -> Plan {
    let mut b = Builder::new(name, Collective::AllReduce, ranks, blocks, 1)
        .packets(ranks, PacketType::Ll16);
    let ends: Vec<_> = (0..ranks)
        .map(|rank| b.connect(rank, (rank + 1) % ranks))
        .collect();
    for rank in 0..ranks {
        let others = || (0..ranks).filter(move |other| *other != rank);
        let before = (rank + ranks - 1) % ranks;
        for block in 0..blocks {
            let part = ALL.sliced(block, blocks);
            let slots = others().map(|other| at(other, Buffer::Packets, rank));
            let mut from: Vec<_> = others().map(|q| at(rank, Buffer::Packets, q)).collect();
            from.push(at(rank, Buffer::Input, 0));
            b.at(rank, block)
                .transfer(part, at(rank, Buffer::Input, 0), slots.collect())
                .reduce_last(part, from, vec![at(rank, Buffer::Output, 0)])
                .sync();
        }
        b.at(rank, 0)
            .signal(&[ends[rank as usize].0])
            .wait(&[ends[before as usize].1]);
    }
    b.finish().unwrap()
}

fn show(plan: &Plan, options: &Options) -> Page {
    let found = check(plan, &check::Options::default());
    let page = page(plan, &found, &Topology::h200(), options).unwrap();
    assert!(page.html.len() <= MAX_PAGE_BYTES);
    closed(&page.html);
    page
}

fn with_bytes(bytes: &[u64]) -> Options {
    let mut options = Options::default();
    options.bytes = bytes.to_vec();
    options
}

/// The text between an element's tags, the last of its name.
fn between<'a>(html: &'a str, open: &str, close: &str) -> &'a str {
    let (_, rest) = html.split_once(open).unwrap();
    rest.split_once(close).unwrap().0
}

fn data(page: &Page) -> Value {
    let open = "<script type=\"application/json\" id=\"data\">";
    serde_json::from_str(between(&page.html, open, "</script>")).unwrap()
}

/// Every element is closed, in order, and nothing is loaded from anywhere.
fn closed(html: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut scripts = 0;
    let mut rest = html.strip_prefix("<!doctype html>").unwrap();
    while let Some((_, after)) = rest.split_once('<') {
        let (tag, after) = after.split_once('>').unwrap();
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
            continue;
        }
        let name = tag.split_whitespace().next().unwrap();
        for word in [" src", " href", " on"] {
            assert!(!tag.contains(word), "<{tag}>");
        }
        if name == "script" || name == "style" {
            scripts += 1;
            let close = format!("</{name}>");
            let (text, after) = rest.split_once(&close).unwrap();
            assert!(!text.contains("@import") && !text.contains("url("));
            rest = after;
        } else if !["meta", "input", "br"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    assert_eq!(scripts, 3);
    // The policy forbids what this test might not know of.
    assert!(html.contains("content=\"default-src 'none'; style-src 'unsafe-inline'; script-src"));
}

#[test]
fn every_operation_is_there_with_its_operands() {
    let plan = exchange("all of them", 4, 3);
    let page = show(&plan, &with_bytes(&[4096]));
    let data = data(&page);
    assert_eq!(data["faults"], Value::Array(Vec::new()));
    assert_eq!(data["ranks"], 4);
    let ops = data["ops"].as_array().unwrap();
    let all: Vec<_> = plan.all_ops().collect();
    assert_eq!(ops.len(), all.len());
    for (shown, (_, op)) in ops.iter().zip(&all) {
        assert_eq!(shown["n"], op.name());
        let (from, to) = op.operands();
        for (places, operands) in [(&shown["f"], from), (&shown["t"], to)] {
            let empty = Vec::new();
            let places = places.as_array().unwrap_or(&empty);
            assert_eq!(places.len(), operands.len());
            for (place, operand) in places.iter().zip(operands) {
                let buffer = match operand.buffer {
                    Buffer::Input => 0,
                    Buffer::Output => 1,
                    Buffer::Scratch => 2,
                    _ => 3,
                };
                assert_eq!(
                    *place,
                    serde_json::json!([operand.rank, buffer, operand.index])
                );
            }
        }
    }
    let lanes = data["lanes"].as_array().unwrap();
    assert_eq!(lanes.len(), 12);
    let counted: u64 = lanes.iter().map(|lane| lane[2].as_u64().unwrap()).sum();
    assert_eq!(counted as usize, ops.len());
}

#[test]
fn the_timeline_is_the_models() {
    let plan = exchange("times", 3, 2);
    let page = show(&plan, &with_bytes(&[65_536, 1024]));
    let data = data(&page);
    let sizes: Vec<_> = page.predicted.iter().map(|(bytes, _)| *bytes).collect();
    assert_eq!(sizes, [1024, 65_536]);
    let launch = data["launch"].as_i64().unwrap();
    let lane_of: Vec<usize> = (data["lanes"].as_array().unwrap().iter().enumerate())
        .flat_map(|(index, lane)| vec![index; lane[2].as_u64().unwrap() as usize])
        .collect();
    let mut ops = Value::Null;
    for (drawn, (bytes, total)) in data["timelines"]
        .as_array()
        .unwrap()
        .iter()
        .zip(&page.predicted)
    {
        let expected = predict(&plan, &Topology::h200(), *bytes).unwrap();
        assert_eq!(*total, expected.total_us);
        assert_eq!(drawn["total"].as_f64().unwrap() / 1000.0, {
            (expected.total_us.unwrap() * 1000.0).round() / 1000.0
        });
        // The second size has the same operations: they are not written again.
        assert_eq!(drawn["ops"].is_null(), !ops.is_null());
        if ops.is_null() {
            ops = drawn["ops"].clone();
        }
        let spans = drawn["spans"].as_array().unwrap();
        assert_eq!(spans.len(), 2 * expected.steps.len());
        let mut now: BTreeMap<usize, i64> = BTreeMap::new();
        for (index, step) in expected.steps.iter().enumerate() {
            let lane = lane_of[ops[index].as_u64().unwrap() as usize];
            let now = now.entry(lane).or_insert(launch);
            let span = |i: usize| spans[2 * index + i].as_i64().unwrap();
            let (start, ready) = (*now, *now + span(0));
            *now = ready + span(1);
            for (shown, us) in [
                (start, step.start_us),
                (ready, step.ready_us),
                (*now, step.end_us.unwrap()),
            ] {
                assert_eq!(shown, (us * 1000.0).round() as i64);
            }
        }
        let bound = drawn["bound"].as_array().unwrap();
        let limited = expected.steps.iter().filter(|step| step.link_bound);
        assert_eq!(bound.len(), limited.count());
        let path = drawn["path"].as_array().unwrap();
        assert_eq!(path.len(), 4 * expected.critical_path.len());
        assert_eq!(drawn["edges"].is_null(), drawn["ops"].is_null());
    }
    let sweep = data["sweep"].as_array().unwrap();
    assert_eq!(sweep[0][0], 8);
    assert_eq!(sweep[sweep.len() - 1][0], 64 << 20);
    assert!(sweep.iter().any(|point| point[0] == 1024));
    assert!(sweep.iter().all(|point| point[1].as_u64().unwrap() > 0));
}

#[test]
fn hostile_texts_stay_texts() {
    let hostile =
        "</script><script>alert(1)</script><img src=x onerror=alert(2)> $data $script ]]>";
    let plan = exchange(hostile, 2, 1);
    let mut options = with_bytes(&[16]);
    options.sources.insert((1, 0, 0), format!("{hostile}.py:7"));
    let mut found = check(&plan, &check::Options::default());
    assert!(found.is_empty());
    // Diagnostics quote the plan.
    let mut broken = plan.clone();
    broken.ranks[0].blocks.clear();
    found.extend(check(&broken, &check::Options::default()));
    assert!(found[0].message.contains(hostile));
    let mut topology = Topology::cpu();
    hostile.clone_into(&mut topology.name);
    let page = page(&plan, &found, &topology, &options).unwrap();
    closed(&page.html);
    assert_eq!(
        page.html.matches("alert(1)").count(),
        page.html
            .matches("\\u003c/script>\\u003cscript>alert(1)")
            .count()
            + 1
    );
    let title = between(&page.html, "<title>", "</title>");
    assert!(title.starts_with("&lt;/script&gt;"), "{title}");
    let data = data(&page);
    assert_eq!(data["name"], hostile);
    assert_eq!(data["sources"][0], format!("{hostile}.py:7"));
    assert_eq!(data["ops"][5]["s"], 0);
    assert_eq!(data["machine"], hostile);
    assert!(
        data["faults"][0]["message"]
            .as_str()
            .unwrap()
            .contains(hostile)
    );
}

#[test]
fn refused_plans_are_drawn_with_their_faults() {
    let mut b = Builder::new("stuck", Collective::Test, 2, 1, 1)
        .blocks_of_message(1, 1)
        .packets(1, PacketType::Ll16);
    let to = vec![at(0, Buffer::Output, 0)];
    b.at(0, 0).transfer(ALL, at(0, Buffer::Input, 0), to);
    let to = vec![at(1, Buffer::Output, 0)];
    b.at(1, 0).transfer(ALL, at(1, Buffer::Packets, 0), to);
    let page = show(&b.finish().unwrap(), &Options::default());
    assert!(page.predicted.iter().all(|(_, us)| us.is_none()));
    let data = data(&page);
    assert_eq!(data["faults"][0]["code"], "deadlock");
    assert_eq!(data["faults"][0]["rank"], 1);
    assert_eq!(data["faults"][0]["op"], 0);
    let drawn = &data["timelines"][0];
    assert!(drawn["total"].is_null());
    assert_eq!(drawn["spans"][2], -1);
    assert!(drawn["end"].as_u64() > data["launch"].as_u64());
}

#[test]
fn plans_with_a_wait_missing_are_drawn_too() {
    let mut plan = exchange("unpaired", 2, 1);
    let wait = plan.ranks[0].blocks[0].pop().unwrap();
    let text = plan.to_json();
    assert!(Plan::from_json(text.as_bytes()).is_err());
    let plan = Plan::layout_from_json(text.as_bytes()).unwrap();
    let page = show(&plan, &with_bytes(&[16]));
    assert!(page.predicted[0].1.is_some());
    let fault = &data(&page)["faults"][0];
    assert_eq!(fault["code"], "structure");
    let message = fault["message"].as_str().unwrap();
    assert!(message.contains("nobody waits for"), "{message}");

    let mut plan = exchange("unpaired", 2, 1);
    plan.ranks[0].blocks[0].push(wait);
    let page = show(&plan, &with_bytes(&[16]));
    assert_eq!(page.predicted, [(16, None)]);
    let message = &data(&page)["faults"][0]["message"];
    assert!(message.as_str().unwrap().contains("waits too many"));
    // What names a channel that does not exist has no layout.
    plan.ranks[0].channels.clear();
    assert!(Plan::layout_from_json(plan.to_json().as_bytes()).is_err());
    assert!(page_of(&plan, &[16]).is_err());
}

#[test]
fn sizes_are_those_that_the_plan_takes() {
    let mut plan = exchange("small", 2, 1);
    plan.message_bytes = (100, 70_000);
    let page = show(&plan, &Options::default());
    let sizes: Vec<_> = page.predicted.iter().map(|(bytes, _)| *bytes).collect();
    assert_eq!(sizes, [1024, 65_536, 70_000]);
    let sweep = data(&page)["sweep"].clone();
    assert_eq!(sweep[0][0], 100);

    plan.equal_chunks = true;
    plan.message_bytes = (90, 100);
    assert_eq!(show(&plan, &Options::default()).predicted[0].0, 96);
    plan.message_bytes = (0, u64::MAX);
    let sizes = show(&plan, &Options::default()).predicted;
    assert!(sizes.iter().all(|(bytes, _)| bytes % 16 == 0));
    let refused = |plan: &Plan, bytes: &[u64]| page_of(plan, bytes).unwrap_err();
    assert!(matches!(
        refused(&plan, &[17]),
        ShowError::Cost(CostError::Size { bytes: 17, .. })
    ));
    assert!(matches!(
        refused(&plan, &[16; 9]),
        ShowError::Sizes { sizes: 9 }
    ));
    plan.ranks.clear();
    assert!(matches!(
        refused(&plan, &[16]),
        ShowError::Cost(CostError::Plan(_))
    ));
}

fn page_of(plan: &Plan, bytes: &[u64]) -> Result<Page, ShowError> {
    page(plan, &[], &Topology::cpu(), &with_bytes(bytes))
}

#[test]
fn pages_have_a_largest_size() {
    let copy = Op::Move {
        chunks: ALL,
        from: at(0, Buffer::Input, 0),
        to: vec![at(0, Buffer::Output, 0)],
        switch: None,
    };
    // 160 000 steps fit once.
    let mut b = Builder::new("loop", Collective::Test, 1, 1, 1).blocks_of_message(1, 1);
    b.at(0, 0).op(Op::Loop {
        unit_bytes: 16,
        chunks: 1,
        ops: vec![copy.clone()],
    });
    let plan = b.finish().unwrap();
    let page = page_of(&plan, &[2_560_000, 2_560_016]).unwrap();
    assert!(page.html.len() <= MAX_PAGE_BYTES);
    assert_eq!(page.predicted.len(), 1);
    assert_eq!(data(&page)["dropped"], 1);

    let mut b = Builder::new("long", Collective::Test, 1, 1, 1).blocks_of_message(1, 1);
    for _ in 0..120_000 {
        b.at(0, 0).op(copy.clone());
    }
    let error = page_of(&b.finish().unwrap(), &[16]).unwrap_err();
    assert!(
        matches!(error, ShowError::TooLarge { ops: 120_000, .. }),
        "{error}"
    );
}

#[test]
fn a_plan_of_64_ranks_has_a_page() {
    let plan = exchange("many", 64, 8);
    let page = page_of(&plan, &[1024, 1 << 20]).unwrap();
    closed(&page.html);
    assert!(page.html.len() < 5 << 20, "{}", page.html.len());
    assert_eq!(data(&page)["lanes"].as_array().unwrap().len(), 512);
}

/// Plans of MSCCL++, if `CROSSWEFT_MSCCLPP_PLANS` names a directory of them.
#[test]
fn plans_of_others_have_pages() {
    let Some(directory) = std::env::var_os("CROSSWEFT_MSCCLPP_PLANS") else {
        println!("skipped: CROSSWEFT_MSCCLPP_PLANS names no directory");
        return;
    };
    let mut drawn = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let Ok(imported) = mscclpp::import_layout(&std::fs::read(&path).unwrap()) else {
            println!("{}: it has no layout", path.display());
            continue;
        };
        let page = show(&imported.plan, &Options::default());
        let ops = data(&page)["ops"].as_array().unwrap().len();
        assert_eq!(ops, imported.plan.all_ops().count());
        println!(
            "{}: {} bytes, {:?}",
            path.display(),
            page.html.len(),
            page.predicted
        );
        drawn += 1;
    }
    assert!(drawn > 0);
}
