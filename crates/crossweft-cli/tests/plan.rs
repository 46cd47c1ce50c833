//! `crossweft plan` as a user runs it: checks, runs and conversions of plans of both formats.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::text;
use crossweft_collective::Algorithm;
use crossweft_device::ReduceOp;
use crossweft_device::packet::PacketType;
use crossweft_plan::cost::Topology;
use crossweft_plan::dsl;
use crossweft_plan::mscclpp::{export, import};
use crossweft_plan::{Buffer, Builder, Chunks, Collective, InPlace, Op, Operand, Plan};
use serde_json::Value;
use tempfile::TempDir;

fn command(arguments: &[&str]) -> Command {
    common::crossweft(["plan"].iter().chain(arguments).copied())
}

/// Runs to an end with that exit code.
fn ends(code: i32, arguments: &[&str]) -> Output {
    let output = command(arguments).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(
        output.status.code(),
        Some(code),
        "{arguments:?}\n{out}\n{err}"
    );
    output
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn at(rank: u32, buffer: Buffer, index: u32) -> Operand {
    Operand::new(rank, buffer, index)
}

/// An in-place plan that pushes what each rank has to all others, in blocks of the output.
fn all_gather(ranks: u32) -> Plan {
    let mut b = Builder::new("gather", Collective::AllGather, ranks, 1, 2)
        .reduce_op(ReduceOp::Sum)
        .in_place(InPlace::Required)
        .packets(2 * ranks, PacketType::Ll16);
    let all = Chunks::new(0, 2);
    for rank in 0..ranks {
        let others = (0..ranks).filter(|other| *other != rank);
        let slots = others
            .clone()
            .map(|other| at(other, Buffer::Packets, 2 * rank));
        b.at(rank, 0)
            .transfer(all, at(rank, Buffer::Output, 2 * rank), slots.collect());
        for other in others {
            let block = at(rank, Buffer::Output, 2 * other);
            b.at(rank, 0)
                .transfer(all, at(rank, Buffer::Packets, 2 * other), vec![block]);
        }
    }
    b.finish().unwrap()
}

/// Every rank sends block q to rank q, through packets; its own by a copy.
fn all_to_all(ranks: u32) -> Plan {
    let mut b = Builder::new("exchange", Collective::AllToAll, ranks, 1, 1)
        .in_place(InPlace::Forbidden)
        .packets(ranks, PacketType::Ll8);
    let one = Chunks::new(0, 1);
    for rank in 0..ranks {
        let (input, output) = (
            |q| at(rank, Buffer::Input, q),
            |q| at(rank, Buffer::Output, q),
        );
        b.at(rank, 0).transfer(one, input(rank), vec![output(rank)]);
        for q in (0..ranks).filter(|q| *q != rank) {
            b.at(rank, 0)
                .transfer(one, input(q), vec![at(q, Buffer::Packets, rank)]);
        }
        for q in (0..ranks).filter(|q| *q != rank) {
            b.at(rank, 0)
                .transfer(one, at(rank, Buffer::Packets, q), vec![output(q)]);
        }
    }
    b.finish().unwrap()
}

/// Sends block q to rank q, which sums what it gets.
fn reduce_scatter(ranks: u32) -> Plan {
    let mut b = Builder::new("scatter", Collective::ReduceScatter, ranks, 1, 1)
        .in_place(InPlace::Forbidden)
        .packets(ranks, PacketType::Ll16);
    let one = Chunks::new(0, 1);
    for rank in 0..ranks {
        let others = (0..ranks).filter(|q| *q != rank);
        for q in others.clone() {
            let slot = at(q, Buffer::Packets, rank);
            b.at(rank, 0)
                .transfer(one, at(rank, Buffer::Input, q), vec![slot]);
        }
        let mut from: Vec<_> = others.map(|q| at(rank, Buffer::Packets, q)).collect();
        from.push(at(rank, Buffer::Input, rank));
        b.at(rank, 0)
            .reduce_last(one, from, vec![at(rank, Buffer::Output, 0)]);
    }
    b.finish().unwrap()
}

/// Sends the input to the next rank, which says when it has got it.
fn send_recv(ranks: u32) -> Plan {
    let mut b = Builder::new("ring", Collective::SendRecv, ranks, 1, 1)
        .in_place(InPlace::Forbidden)
        .packets(1, PacketType::Ll16);
    let one = Chunks::new(0, 1);
    let ends: Vec<_> = (0..ranks)
        .map(|rank| b.connect(rank, (rank + 1) % ranks))
        .collect();
    for rank in 0..ranks {
        let next = at((rank + 1) % ranks, Buffer::Packets, 0);
        let before = (rank + ranks - 1) % ranks;
        b.at(rank, 0)
            .transfer(one, at(rank, Buffer::Input, 0), vec![next])
            .transfer(
                one,
                at(rank, Buffer::Packets, 0),
                vec![at(rank, Buffer::Output, 0)],
            )
            .signal(&[ends[before as usize].1])
            .wait(&[ends[rank as usize].0]);
    }
    b.finish().unwrap()
}

/// Collectives with a root, and one of its own: programs without any synchronisation.
fn programs(ranks: u32) -> Vec<Plan> {
    let root = 1;
    let program = |name, collective| {
        let mut options = dsl::Options::new(name, collective, ranks);
        options.shape = (1, 2);
        dsl::Program::new(options).unwrap()
    };
    let mut broadcast = program("broadcast", Collective::Broadcast { root });
    let mut reduce = program("reduce", Collective::Reduce { root });
    let mut gather = program("root-gather", Collective::Gather { root });
    let mut scatter = program("root-scatter", Collective::Scatter { root });
    let mut custom = program("pairs", Collective::Custom);
    for rank in (0..ranks).filter(|rank| *rank != root) {
        let (from, to) = (
            broadcast.input(root).unwrap(),
            broadcast.output(rank).unwrap(),
        );
        let channel = broadcast.memory_channel(rank, root).unwrap();
        broadcast.put(channel, to.all(), from.all(), rank).unwrap();

        let (from, to) = (reduce.input(rank).unwrap(), reduce.output(root).unwrap());
        let channel = reduce.memory_channel(rank, root).unwrap();
        let own = match rank {
            0 => reduce.input(root).unwrap(),
            _ => to,
        };
        let theirs = [from.all()];
        reduce
            .read_reduce(channel, to.all(), own.all(), &theirs, 0)
            .unwrap();

        let (from, to) = (gather.input(rank).unwrap(), gather.output(root).unwrap());
        let channel = gather.port_channel(root, rank).unwrap();
        gather.put(channel, to.chunk(rank), from.all(), 0).unwrap();

        let (from, to) = (scatter.input(root).unwrap(), scatter.output(rank).unwrap());
        let channel = scatter.memory_channel(root, rank).unwrap();
        scatter.get(channel, to.all(), from.chunk(rank), 0).unwrap();
    }
    for (program, chunk) in [(&mut broadcast, 0), (&mut scatter, root)] {
        let (from, to) = (program.input(root).unwrap(), program.output(root).unwrap());
        program.copy(to.chunk(0), from.chunk(chunk), 0).unwrap();
    }
    let (from, to) = (gather.input(root).unwrap(), gather.output(root).unwrap());
    gather.copy(to.chunk(root), from.all(), 0).unwrap();
    for rank in 0..ranks {
        let next = (rank + 1) % ranks;
        let (own, theirs) = (custom.input(rank).unwrap(), custom.input(next).unwrap());
        let output = custom.output(rank).unwrap();
        let channel = custom.memory_channel(next, rank).unwrap();
        let both = [own.chunk(0), theirs.chunk(0)];
        custom
            .read_reduce(channel, output.chunk(1), both[0], &both[1..], 0)
            .unwrap();
        custom.expect(output.chunk(1), &both).unwrap();
    }
    let programs = [broadcast, reduce, gather, scatter, custom];
    programs
        .map(|program| program.compile().unwrap().plan)
        .to_vec()
}

/// Waits for a packet that nobody sends.
fn stuck() -> Plan {
    let mut b = Builder::new("stuck", Collective::Test, 2, 1, 1)
        .blocks_of_message(1, 1)
        .packets(1, PacketType::Ll16);
    let one = Chunks::new(0, 1);
    b.at(1, 0).transfer(
        one,
        at(1, Buffer::Packets, 0),
        vec![at(1, Buffer::Output, 0)],
    );
    b.finish().unwrap()
}

/// A plan whose result is not the collective's: every rank gets its own input.
fn wrong() -> Plan {
    let mut b = Builder::new("wrong", Collective::SendRecv, 2, 1, 1).in_place(InPlace::Forbidden);
    let one = Chunks::new(0, 1);
    for rank in 0..2 {
        let output = at(rank, Buffer::Output, 0);
        b.at(rank, 0)
            .transfer(one, at(rank, Buffer::Input, 0), vec![output]);
    }
    b.finish().unwrap()
}

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.path(name).display().to_string()
    }

    fn plan(&self, plan: &Plan) -> String {
        self.write(plan.name.as_str(), &plan.to_json())
    }
}

#[test]
fn every_collective_runs_and_is_verified() {
    let files = Files::new();
    let one_shot = Algorithm::OneShot.plan(3, 1).unwrap();
    let plans = [
        all_gather(3),
        all_to_all(3),
        reduce_scatter(3),
        send_recv(3),
        one_shot,
    ];
    for plan in plans.iter().chain(&programs(3)) {
        let file = files.plan(plan);
        let report = json(&ends(0, &["check", "--format", "json", &file]));
        assert_eq!(
            (&report["ok"], &report["diagnostics"]),
            (&true.into(), &Value::Array(vec![]))
        );
        for more in [
            &["--threads"][..],
            &["--size", "1004", "--seed", "7"],
            &["--size", "6", "--dtype", "bf16", "--seed", "8"],
            &["--processes", "--size", "4K"],
        ] {
            let mut arguments = vec!["run", &file, "--format", "json", "--timeout", "20"];
            arguments.extend(more);
            let report = json(&ends(0, &arguments));
            assert_eq!(
                (&report["ok"], &report["wrong"]),
                (&true.into(), &0.into()),
                "{report}"
            );
            assert_eq!(report["ranks"], 3);
            let expected = match plan.collective {
                Collective::Custom => "exact copies (custom reductions are not looked at)",
                _ => "exact result",
            };
            assert_eq!(report["post_condition"], expected);
        }
        // In the other format as well.
        if let Ok(exported) = export(plan) {
            let file = files.write("theirs.json", &exported);
            ends(0, &["check", &file]);
            let output = ends(0, &["run", &file, "--size", "960"]);
            assert!(text(&output.stdout).contains(": ok; post-condition: exact result"));
        }
    }
}

#[test]
fn other_operations_and_sizes() {
    let files = Files::new();
    let file = files.plan(&reduce_scatter(2));
    for op in ["min", "max", "prod", "avg"] {
        let report = json(&ends(0, &["run", &file, "--op", op, "--format", "json"]));
        assert_eq!(report["op"], op);
    }
    let output = ends(2, &["run", &file, "--size", "1001"]);
    assert!(
        text(&output.stderr).contains("multiples of 4 bytes of f32"),
        "{output:?}"
    );
    // Data that moves inside its block needs equal chunks; a range of sizes is kept to.
    let mut b = Builder::new("moved", Collective::Test, 1, 1, 3)
        .blocks_of_message(1, 1)
        .in_place(InPlace::Forbidden);
    b.at(0, 0).transfer(
        Chunks::new(0, 2),
        at(0, Buffer::Input, 0),
        vec![at(0, Buffer::Output, 1)],
    );
    let mut plan = b.finish().unwrap();
    plan.message_bytes = (90, 100);
    let file = files.plan(&plan);
    let report = json(&ends(0, &["run", &file, "--format", "json"]));
    assert_eq!(
        (&report["bytes"], &report["multiple_of"]),
        (&96.into(), &48.into())
    );
    assert_eq!(report["post_condition"], "none (test plan)");
    ends(2, &["run", &file, "--size", "100"]);
    ends(2, &["run", &file, "--size", "144"]);
}

#[test]
fn refusals_have_exit_code_1_and_say_why() {
    let files = Files::new();
    let (good, stuck, wrong) = (
        files.plan(&send_recv(2)),
        files.plan(&stuck()),
        files.plan(&wrong()),
    );
    let output = ends(1, &["check", &good, &stuck, &wrong, "--format", "json"]);
    let lines: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [first, second, third] = &lines[..] else {
        panic!("{output:?}");
    };
    assert_eq!(first["ok"], true);
    assert_eq!(second["ok"], false);
    let fault = &second["diagnostics"][0];
    assert_eq!(
        (&fault["code"], &fault["rank"]),
        (&"deadlock".into(), &1.into()),
        "{fault}"
    );
    assert_eq!(third["diagnostics"][0]["code"], "post_condition");
    let output = ends(1, &["run", &stuck]);
    let error = text(&output.stderr);
    assert!(
        error.contains("is refused: deadlock") && error.lines().count() == 1,
        "{error}"
    );
    assert_eq!(text(&output.stdout), "");
    // Unchecked, what is stuck ends at its deadline, and what is wrong is found.
    let start = Instant::now();
    ends(3, &["run", &stuck, "--unchecked", "--timeout", "1"]);
    assert!(start.elapsed() < Duration::from_secs(10));
    let output = ends(1, &["run", &wrong, "--unchecked", "--format", "json"]);
    assert_eq!(json(&output)["ok"], false);
    assert!(text(&output.stderr).contains("wrong, first at element 0"));
    // A structure that does not hold is a refusal too.
    let broken = send_recv(2)
        .to_json()
        .replace("\"slice\":[0,1]", "\"slice\":[1,1]");
    let file = files.write("broken", &broken);
    let report = json(&ends(1, &["check", &file, "--format", "json"]));
    assert_eq!(report["diagnostics"][0]["code"], "structure");
}

#[test]
fn bad_input_has_exit_code_2_and_one_line() {
    let files = Files::new();
    let good = send_recv(2).to_json();
    let half = files.write("half", &good[..good.len() / 2]);
    let noise = files.write("noise", "\u{0}\u{1}nothing");
    let missing = files.path("missing").display().to_string();
    let theirs = files.write(
        "theirs",
        r#"{"name":"x","collective":"test","protocol":"LL","inplace":false,
            "gpus":[{"id":0,"threadblocks":[{"id":0,"ops":[{"name":"warp"}]}]}]}"#,
    );
    for file in [&half, &noise, &missing, &theirs, &"/".to_owned()] {
        for arguments in [
            &["check", file][..],
            &["run", file],
            &["convert", file, "-"],
        ] {
            let output = ends(2, arguments);
            let error = text(&output.stderr);
            assert!(
                error.starts_with("error: ") && error.lines().count() == 1,
                "{error}"
            );
            assert!(error.contains(file.as_str()), "{error}");
        }
    }
    assert!(text(&ends(2, &["check", &theirs]).stderr).contains("no operation `warp`"));
    // The good ones are still judged.
    let good = files.write("good", &good);
    let output = ends(2, &["check", &half, &good]);
    assert!(text(&output.stdout).contains("good: ok"), "{output:?}");
    ends(2, &["run", &good, "--threads", "--processes"]);
    ends(2, &["run", "-", "--processes"]);
    ends(2, &["run", &good, "--device", "tpu"]);
    ends(2, &["check"]);
    // Packets for more than any host has.
    let mut greedy = send_recv(2);
    greedy.packet_slots = 1 << 20;
    let greedy = files.write("greedy", &greedy.to_json());
    let output = ends(2, &["run", &greedy, "--threads", "--size", "1G"]);
    assert!(
        text(&output.stderr).contains("of memory at least"),
        "{output:?}"
    );
}

#[test]
fn standard_input_is_read_to_a_bound() {
    let mut child = command(&["check", "-", "--format", "json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let plan = send_recv(2).to_json();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(plan.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(json(&output)["file"], "-");
    // A pipe that does not end.
    let zeros = fs::File::open("/dev/zero").unwrap();
    let output = command(&["check", "-"]).stdin(zeros).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("at most 67108864 are read"),
        "{output:?}"
    );
}

#[test]
fn conversions_go_both_ways() {
    let files = Files::new();
    let plan = all_gather(2);
    let ours = files.plan(&plan);
    let theirs = files.path("theirs.json").display().to_string();
    let back = files.path("back.json").display().to_string();
    ends(0, &["convert", &ours, &theirs]);
    let file: Value = serde_json::from_slice(&fs::read(&theirs).unwrap()).unwrap();
    assert_eq!(
        (&file["collective"], &file["gpus"][1]["id"]),
        (&"allgather".into(), &1.into())
    );
    ends(0, &["convert", &theirs, &back]);
    let back = Plan::from_json(&fs::read(back).unwrap()).unwrap();
    assert_eq!(back.ranks[0].channels, plan.ranks[0].channels);
    assert_eq!(back.packet_slots, plan.packet_slots);
    let output = ends(0, &["convert", &ours, "-", "--to", "crossweft"]);
    assert_eq!(Plan::from_json(&output.stdout).unwrap(), plan);
    // What cannot be said in theirs.
    let mut average = all_gather(2);
    average.reduce_op = Some(ReduceOp::Avg);
    let file = files.plan(&average);
    let output = ends(2, &["convert", &file, "-"]);
    assert!(
        text(&output.stderr).contains("only knows sums"),
        "{output:?}"
    );
    ends(2, &["convert", &ours, "/nowhere/plan"]);
}

#[test]
fn pages_are_made_of_both_formats() {
    let files = Files::new();
    let plan = Algorithm::OneShot.plan(2, 2).unwrap();
    let page = files.path("page.html").display().to_string();
    let theirs = files.write("theirs.json", &export(&plan).unwrap());
    for file in [files.plan(&plan), theirs] {
        let output = ends(0, &["show", &file, "-o", &page]);
        let line = text(&output.stdout);
        assert_eq!(line.lines().count(), 1, "{line}");
        for part in ["all-reduce of 2 ranks, accepted", "on h200: 1 KiB takes "] {
            assert!(line.contains(part), "{line}");
        }
        let html = fs::read_to_string(&page).unwrap();
        assert!(html.starts_with("<!doctype html>"));
        assert!(html.trim_end().ends_with("</html>"));
    }
    // Another machine, other sizes, to standard output.
    let file = files.plan(&plan);
    let slow = Topology::cpu().to_json();
    let slow = slow.replace("\"launch_us\": 0.06", "\"launch_us\": 1000.0");
    let slow = files.write("slow.json", &slow.replace("\"cpu\"", "\"slow\""));
    let bytes = ["--bytes", "64", "4K"];
    let mut arguments = vec!["show", &file, "-o", "-", "--topology", &slow];
    arguments.extend(bytes);
    let output = ends(0, &arguments);
    assert!(text(&output.stdout).starts_with("<!doctype html>"));
    let line = text(&output.stderr);
    assert!(line.contains("on slow: 64 B takes 1000."), "{line}");
    assert!(line.contains(", 4 KiB takes 100"), "{line}");
    // What is refused can be looked at.
    let output = ends(0, &["show", &files.plan(&stuck()), "-o", &page]);
    let line = text(&output.stdout);
    assert!(line.contains("refused with 1 fault"), "{line}");
    assert!(line.contains("never ends"), "{line}");
    assert!(
        fs::read_to_string(&page)
            .unwrap()
            .contains("\"code\":\"deadlock\"")
    );
}

#[test]
fn pages_that_cannot_be_made_have_exit_code_2_and_one_line() {
    let files = Files::new();
    let file = files.plan(&Algorithm::OneShot.plan(2, 1).unwrap());
    let page = files.path("page.html").display().to_string();
    let unknown = Topology::h200()
        .to_json()
        .replace("\"network\"", "\"netwerk\"");
    let unknown = files.write("unknown.json", &unknown);
    let few = Topology::h200().to_json();
    let few = files.write("few.json", &few.replace("\"every\": 8", "\"list\": [0]"));
    let none = files.path("none").display().to_string();
    let text_file = files.write("text", "hello");
    let nowhere = files.path("no/page.html").display().to_string();
    let cases: [(&[&str], &str); 8] = [
        (&[&none, "-o", &page], "none: "),
        (&[&text_file, "-o", &page], "not a readable plan"),
        (&[&file, "-o", &nowhere], "no/page.html: "),
        (&[&file, "-o", &page, "--topology", &none], "none: "),
        (&[&file, "-o", &page, "--topology", &unknown], "netwerk"),
        (&[&file, "-o", &page, "--topology", &few], "the plan has 2"),
        (&[&file, "-o", &page, "--bytes", "0"], "messages of 0 bytes"),
        (
            &[
                &file, "-o", &page, "--bytes", "1", "2", "3", "4", "5", "6", "7", "8", "9",
            ],
            "9 message sizes; at most 8",
        ),
    ];
    for (arguments, reason) in cases {
        let output = ends(2, &[&["show"][..], arguments].concat());
        let error = text(&output.stderr);
        assert!(error.contains(reason), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(output.stdout.is_empty());
    }
    assert!(!files.path("page.html").exists());
}

#[test]
fn ranks_that_are_processes_find_a_file_behind_the_options() {
    let files = Files::new();
    let file = files.plan(&send_recv(2));
    let output = ends(0, &["run", "--processes", "--format", "json", "--", &file]);
    assert_eq!(json(&output)["ok"], true);
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn what_goes_to_standard_output_arrives_or_nobody_reads_it() {
    let files = Files::new();
    let file = files.plan(&Algorithm::OneShot.plan(2, 1).unwrap());
    for arguments in [
        &["show", &file, "-o", "-"][..],
        &["convert", &file, "-"],
        &["check", &file],
        &["run", &file],
    ] {
        let full = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let output = command(arguments).stdout(full).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        let words = "cannot write to standard output: No space left";
        assert!(error.contains(words), "{arguments:?}: {error}");
        let mut child = command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {error}");
        assert!(!error.contains("error"), "{error}");
    }
}

#[test]
fn a_launcher_must_start_as_many_ranks_as_the_plan_has() {
    let files = Files::new();
    let file = files.plan(&send_recv(2));
    let mut command = command(&["run", &file]);
    for (name, value) in [
        ("RANK", "0"),
        ("WORLD_SIZE", "3"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ] {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(
        error.contains("for 2 ranks, but torchrun started 3"),
        "{error}"
    );
}

/// Without its synchronisation inside thread blocks, which an export adds, and what theirs cannot
/// tell.
fn comparable(mut plan: Plan) -> Plan {
    for block in plan.ranks.iter_mut().flat_map(|rank| &mut rank.blocks) {
        block.retain(|op| *op != Op::Sync);
        for op in block {
            if let Op::Reduce { from, last, .. } = op {
                // Theirs sums in an order of its own.
                from.sort_by_key(|o| (o.buffer as u32, o.rank, o.index));
                *last = false;
            }
        }
    }
    plan.in_place = InPlace::Forbidden;
    plan.reduce_op = Some(ReduceOp::Sum);
    plan
}

#[test]
fn algorithms_of_ours_can_be_exported_or_say_why_not() {
    let mut exported = 0;
    for algorithm in Algorithm::ALL {
        for ranks in [2, 4, 8] {
            let plan = algorithm.plan(ranks, 1).unwrap();
            match export(&plan) {
                Ok(text) => {
                    exported += 1;
                    let back = import(text.as_bytes()).unwrap();
                    assert_eq!(back.warnings, Vec::<String>::new(), "{algorithm}");
                    // Reductions from peers' memory into another buffer are taken apart.
                    if plan.packet_slots > 0 {
                        let (back, plan) = (comparable(back.plan), comparable(plan));
                        assert_eq!(back, plan, "{algorithm} of {ranks}");
                    }
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("MSCCL++"), "{algorithm} of {ranks}: {text}");
                }
            }
        }
    }
    assert!(exported > 0);
}
