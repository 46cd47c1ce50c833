//! What callers hear when they, or other ranks, do something wrong, and who is left out.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{Case, fill, job, soon};
use crossweft_channel::Endpoint;
use crossweft_moe::{
    DataType, DispatchOutput, Experts, Group, GroupOptions, Handle, Layout, MoeError, Routing,
    ScaleType, Tokens, Weights,
};
use crossweft_net::{Group as Job, JoinOptions, Rendezvous, RendezvousOptions};

/// A deadline that is to expire. Ranks that are not late must meet it.
const SHORT: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(120);

fn options(case: &Case) -> GroupOptions {
    let mut options = GroupOptions::new(case.experts, case.max_tokens, case.hidden, case.top_k);
    options.dtype = case.dtype;
    options.timeout = LONG;
    options
}

fn handle(group: &Arc<Group>, case: &Case, step: u64) -> Handle {
    let batch = case.batch(group.rank(), step);
    let routing = Routing {
        experts: Experts::I32(&batch.experts),
        top_k: case.top_k,
        weights: Some(&batch.weights),
    };
    group.handle(&routing, Layout::ExpertMajor).unwrap()
}

fn room(handle: &Handle, tokens: &Tokens<'_>) -> Vec<u8> {
    let shape = handle.output_shape(tokens.format()).unwrap();
    fill(0, shape.token_bytes())
}

fn dispatch(handle: &mut Handle, case: &Case, step: u64) -> Result<Vec<u8>, MoeError> {
    let batch = case.batch(handle.group().rank(), step);
    let tokens = Tokens::Plain(&batch.tokens);
    let mut received = room(handle, &tokens);
    handle.dispatch(tokens, DispatchOutput::new(&mut received))?;
    Ok(received)
}

/// What the experts make of what was received.
fn compute(handle: &Handle, case: &Case, mut received: Vec<u8>) -> Vec<u8> {
    let own = handle.group().local_experts(handle.group().rank());
    let row = case.row_bytes();
    for (local, expert) in own.enumerate() {
        let begin = handle.counts().unwrap().expert_offsets()[local] as usize;
        let count = handle.counts().unwrap().per_expert()[local] as usize;
        for bytes in received[begin * row..(begin + count) * row].chunks_exact_mut(row) {
            let made = case.expert(expert as i32, bytes);
            bytes.copy_from_slice(&made);
        }
    }
    received
}

fn combine(handle: &mut Handle, case: &Case, rows: &[u8], step: u64) -> Result<Vec<u8>, MoeError> {
    let batch = case.batch(handle.group().rank(), step);
    let mut combined = vec![0; batch.tokens.len()];
    handle.combine(rows, Weights::Dispatched, &mut combined)?;
    Ok(combined)
}

/// A pass whose sum lacks the experts of some ranks.
fn whole(
    group: &Arc<Group>,
    case: &Case,
    step: u64,
    without: impl Fn(&Group) -> Vec<u32>,
) -> Result<(), MoeError> {
    let mut handle = handle(group, case, step);
    let received = dispatch(&mut handle, case, step)?;
    let rows = compute(&handle, case, received);
    let combined = combine(&mut handle, case, &rows, step)?;
    case.assert_combined((group.rank(), step), &combined, &without(group));
    Ok(())
}

fn assert_words(error: &MoeError, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "`{text}` does not contain `{word}`");
    }
}

fn group(endpoint: &Arc<Endpoint>, options: GroupOptions) -> Arc<Group> {
    Group::new(endpoint, options, soon()).unwrap()
}

/// Waits for all ranks, at most until one of them has failed.
fn meet(endpoint: &Endpoint) {
    endpoint.group().barrier(soon()).unwrap();
}

#[test]
fn bad_arguments_are_refused_and_change_nothing() {
    let case = Case::new(2);
    job(2, |endpoint| {
        let group = group(endpoint, options(&case));
        let refused = |result: Result<(), MoeError>, word: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, MoeError::Usage { .. }), "{error}");
            assert_words(&error, &[word, &format!("rank {}", group.rank())]);
        };
        let route = |experts: &[i32], top_k, weights| {
            let routing = Routing {
                experts: Experts::I32(experts),
                top_k,
                weights,
            };
            group.handle(&routing, Layout::ExpertMajor).map(drop)
        };
        refused(route(&[0, 5, -1], 3, None), "expert 5 (token 0, choice 1)");
        refused(route(&[0, -2], 2, None), "expert -2");
        refused(route(&[0; 4], 3, None), "no whole number");
        refused(route(&[0; 4], 4, None), "top-4");
        refused(route(&[], 0, None), "top-0");
        refused(route(&[0; 10], 1, None), "10 tokens");
        refused(route(&[0, 1], 1, Some(&[1.0])), "1 weights for 2 experts");
        let wide = Routing {
            experts: Experts::I64(&[1 << 32]),
            top_k: 1,
            weights: None,
        };
        refused(
            group.handle(&wide, Layout::Flat).map(drop),
            "expert 4294967296",
        );
        let layout = Layout::ExpertPacked { alignment: 0 };
        refused(group.handle(&wide, layout).map(drop), "aligned to 0");
        refused(group.set_masked(group.rank(), true), "cannot be masked");
        refused(group.set_masked(7, true), "rank 7");

        let mut handle = handle(&group, &case, 0);
        let batch = case.batch(group.rank(), 0);
        let tokens = Tokens::Plain(&batch.tokens);
        let mut received = room(&handle, &tokens);
        refused(
            handle.dispatch(Tokens::Plain(&[0; 5]), DispatchOutput::new(&mut received)),
            "5 bytes of tokens",
        );
        let scales = DispatchOutput {
            scales: Some(&mut []),
            ..DispatchOutput::new(&mut received)
        };
        refused(handle.dispatch(tokens, scales), "not quantised");
        let quantise = Tokens::Quantise {
            elements: &batch.tokens,
            scale_type: ScaleType::F32,
            powers_of_two: false,
        };
        refused(
            handle.dispatch(quantise, DispatchOutput::new(&mut received)),
            "no room for the scales",
        );
        let mut scales = vec![0; received.len()];
        let output = DispatchOutput {
            scales: Some(&mut scales),
            ..DispatchOutput::new(&mut received)
        };
        refused(handle.dispatch(quantise, output), "multiple of 16");
        refused(handle.counts().map(drop), "no counts");
        refused(handle.combine(&[], Weights::One, &mut []), "dispatch");
        refused(handle.combine_complete(&mut []), "no combine was sent");
        refused(
            handle.dispatch_complete(DispatchOutput::new(&mut received)),
            "no dispatch was sent",
        );
        // And all is as good as new.
        whole(&group, &case, 1, |_| vec![]).unwrap();
        let received = dispatch(&mut handle, &case, 0).unwrap();
        let mut combined = vec![0; batch.tokens.len()];
        refused(
            handle.combine(&received[1..], Weights::One, &mut combined),
            "rows",
        );
        let given = vec![0.0; batch.weights.len() + 1];
        refused(
            handle.combine(&received, Weights::Given(&given), &mut combined),
            "weights; there must be",
        );
        combine(&mut handle, &case, &received, 0).unwrap();
    });
}

#[test]
fn ranks_that_make_different_groups_hear_of_it() {
    let case = Case::new(3);
    let errors = job(3, |endpoint| {
        let mut options = options(&case);
        if endpoint.rank() == 1 {
            options.hidden += 8;
        }
        Group::new(endpoint, options, soon()).unwrap_err()
    });
    for error in errors {
        assert_words(&error, &["40 bf16", "48 bf16", "rank 1"]);
    }
    let errors = job(2, |endpoint| {
        let mut options = options(&case);
        options.dtype = DataType::F8E4M3;
        Group::new(endpoint, options, soon()).unwrap_err()
    });
    for error in errors {
        assert_words(&error, &["f8e4m3", "bf16, f16 or f32"]);
    }
}

/// Rank 1 does something else than all others; every rank must name it, or be named by it.
fn differs(other: impl Fn(&mut Handle, &Case) -> Result<(), MoeError> + Sync, words: &[&str]) {
    let case = Case {
        hidden: 48,
        ..Case::new(3)
    };
    job(3, |endpoint| {
        let group = group(endpoint, options(&case));
        let mut handle = handle(&group, &case, 0);
        let received = dispatch(&mut handle, &case, 0).unwrap();
        let error = match group.rank() {
            1 => other(&mut handle, &case).unwrap_err(),
            _ => combine(&mut handle, &case, &received, 0).unwrap_err(),
        };
        let MoeError::Mismatch { peer, .. } = error else {
            panic!("{error}");
        };
        assert!(group.rank() == 1 || peer == 1, "{error}");
        assert_words(&error, words);
        // The group is of no use any more, and says so.
        let error = dispatch(&mut self::handle(&group, &case, 0), &case, 0).unwrap_err();
        assert!(matches!(error, MoeError::Poisoned { .. }), "{error}");
        meet(endpoint);
    });
}

#[test]
fn ranks_in_different_calls_name_each_other() {
    let combine = "call 1, a combine, top-3";
    differs(
        |handle, case| dispatch(handle, case, 0).map(drop),
        &[combine, "call 1, a dispatch of plain tokens, top-3"],
    );
    differs(
        |handle, case| {
            let batch = case.batch(handle.group().rank(), 0);
            let rows = vec![0; handle.counts()?.rows() as usize * case.row_bytes()];
            let mut output = vec![0; batch.tokens.len()];
            handle.combine(&rows, Weights::Given(&batch.weights), &mut output)
        },
        &[combine, "call 1, a combine with weights, top-3"],
    );
    differs(
        |handle, case| {
            let batch = case.batch(handle.group().rank(), 0);
            handle.dispatch_send(Tokens::Quantise {
                elements: &batch.tokens,
                scale_type: ScaleType::Ue8m0,
                powers_of_two: true,
            })?;
            handle.wait_for_counts().map(drop)
        },
        &[
            combine,
            "call 1, a dispatch of f8e4m3 tokens with ue8m0 scales",
        ],
    );
    differs(
        |handle, case| {
            let routing = Routing {
                experts: Experts::I32(&[0, 1]),
                top_k: 2,
                weights: None,
            };
            let mut other = handle.group().handle(&routing, Layout::Flat)?;
            let tokens = vec![0; case.row_bytes()];
            let mut output = room(&other, &Tokens::Plain(&tokens));
            other.dispatch(Tokens::Plain(&tokens), DispatchOutput::new(&mut output))
        },
        &[combine, "call 1, a dispatch of plain tokens, top-2"],
    );
}

#[test]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    let case = Case::new(3);
    job(3, |endpoint| {
        let mut options = options(&case);
        options.timeout = Duration::from_secs(2);
        let group = group(endpoint, options);
        if group.rank() != 2 {
            let mut handle = handle(&group, &case, 0);
            let error = dispatch(&mut handle, &case, 0).unwrap_err();
            let MoeError::Interrupted { peers, .. } = &error else {
                panic!("{error}");
            };
            assert!(peers.contains(&2), "{error}");
            let what = "call 0, a dispatch of plain tokens, top-3";
            assert_words(
                &error,
                &[what, "waiting for the counts of", "deadline of 2s"],
            );
        }
        meet(endpoint);
    });
}

#[test]
fn a_rank_that_has_left_is_named() {
    let case = Case::new(3);
    job(3, |endpoint| {
        let group = group(endpoint, options(&case));
        whole(&group, &case, 0, |_| vec![]).unwrap();
        if group.rank() != 2 {
            let error = whole(&group, &case, 1, |_| vec![]).unwrap_err();
            assert_words(&error, &["rank 2 has left"]);
        }
    });
}

#[test]
fn with_masking_a_rank_that_never_calls_is_left_out_at_the_deadline() {
    let case = Case::new(4);
    job(4, |endpoint| {
        let mut options = options(&case);
        options.masking = true;
        options.timeout = SHORT;
        let group = group(endpoint, options);
        meet(endpoint);
        if group.rank() != 2 {
            for step in 0..3 {
                whole(&group, &case, step, |_| vec![2]).unwrap();
                assert_eq!(group.masked(), [false, false, true, false]);
            }
        }
        meet(endpoint);
    });
}

#[test]
fn with_masking_ranks_that_wait_for_the_same_one_do_not_leave_each_other_out() {
    let case = Case::new(3);
    job(3, |endpoint| {
        let mut options = options(&case);
        options.masking = true;
        options.timeout = SHORT;
        let group = group(endpoint, options);
        let rank = group.rank();
        let mut handle = handle(&group, &case, 0);
        let received = dispatch(&mut handle, &case, 0).unwrap();
        meet(endpoint);
        if rank != 2 {
            // Its sums leave rank 1 when that has given up rank 2, which is later than rank 0 does.
            std::thread::sleep(Duration::from_secs(u64::from(rank)));
            let batch = case.batch(rank, 0);
            let rows = compute(&handle, &case, received);
            let mut combined = vec![0; batch.tokens.len()];
            handle
                .combine(&rows, Weights::Given(&batch.weights), &mut combined)
                .unwrap();
            assert_eq!(group.masked(), [false, false, true]);
            case.assert_combined((rank, 0), &combined, &[2]);
            whole(&group, &case, 1, |_| vec![2]).unwrap();
            assert_eq!(group.masked(), [false, false, true]);
        }
        meet(endpoint);
    });
}

#[test]
fn with_masking_a_rank_that_leaves_in_the_middle_is_left_out() {
    let case = Case {
        skew: common::Skew::Few,
        ..Case::new(4)
    };
    job(4, |endpoint| {
        let mut options = options(&case);
        options.masking = true;
        let group = group(endpoint, options);
        whole(&group, &case, 0, |_| vec![]).unwrap();
        let mut handle = handle(&group, &case, 1);
        let received = dispatch(&mut handle, &case, 1).unwrap();
        if group.rank() == 1 {
            // It takes tokens with it.
            return;
        }
        let rows = compute(&handle, &case, received);
        let combined = combine(&mut handle, &case, &rows, 1).unwrap();
        case.assert_combined((group.rank(), 1), &combined, &[1]);
        for step in 2..5 {
            whole(&group, &case, step, |_| vec![1]).unwrap();
        }
    });
}

#[test]
fn a_rank_that_was_masked_by_hand_can_come_back() {
    let case = Case::new(4);
    job(4, |endpoint| {
        let group = group(endpoint, options(&case));
        let rank = group.rank();
        // Ranks 1 and the others leave each other out, and all go on calling.
        let others: Vec<u32> = match rank {
            1 => vec![0, 2, 3],
            _ => vec![1],
        };
        whole(&group, &case, 0, |_| vec![]).unwrap();
        for round in 0..3 {
            for masked in [true, false] {
                meet(endpoint);
                for &other in &others {
                    group.set_masked(other, masked).unwrap();
                }
                let without = if masked { others.clone() } else { vec![] };
                for step in 0..3 {
                    whole(&group, &case, 3 * round + step, |_| without.clone()).unwrap();
                }
            }
        }
    });
}

#[test]
fn a_rank_that_comes_back_in_the_middle_of_a_pass_is_missing_in_its_sum() {
    let case = Case::new(4);
    job(4, |endpoint| {
        let group = group(endpoint, options(&case));
        let rank = group.rank();
        let others: &[u32] = match rank {
            1 => &[0, 2, 3],
            _ => &[1],
        };
        let mask = |masked| {
            meet(endpoint);
            for &other in others {
                group.set_masked(other, masked).unwrap();
            }
        };
        // Something in every slot that a wrong sum could take.
        for step in 0..2 {
            whole(&group, &case, step, |_| vec![]).unwrap();
        }
        mask(true);
        let mut handle = handle(&group, &case, 2);
        let received = dispatch(&mut handle, &case, 2).unwrap();
        mask(false);
        let rows = compute(&handle, &case, received);
        let combined = combine(&mut handle, &case, &rows, 2).unwrap();
        case.assert_combined((rank, 2), &combined, others);
        whole(&group, &case, 3, |_| vec![]).unwrap();
    });
}

#[test]
fn two_handles_are_under_way_and_no_third() {
    let case = Case::new(4);
    job(4, |endpoint| {
        let group = group(endpoint, options(&case));
        let rank = group.rank();
        let mut handles: Vec<_> = (0..3).map(|step| handle(&group, &case, step)).collect();
        let mut third = handles.pop().unwrap();
        for round in 0..4 {
            for (step, handle) in (0..).zip(&mut handles) {
                let batch = case.batch(rank, step);
                handle.dispatch_send(Tokens::Plain(&batch.tokens)).unwrap();
            }
            let batch = case.batch(rank, 2);
            let error = third.dispatch_send(Tokens::Plain(&batch.tokens));
            assert_words(&error.unwrap_err(), &["two calls are under way"]);
            let tokens = Tokens::Plain(&[]);
            let mut rooms: Vec<_> = handles.iter().map(|h| room(h, &tokens)).collect();
            let early = handles[1].dispatch_complete(DispatchOutput::new(&mut rooms[1]));
            assert_words(&early.unwrap_err(), &["in the order"]);
            let early = handles[1].wait_for_counts().map(drop);
            assert_words(&early.unwrap_err(), &["in the order"]);
            for (handle, room) in handles.iter_mut().zip(&mut rooms) {
                handle.dispatch_complete(DispatchOutput::new(room)).unwrap();
            }
            let rows: Vec<_> = handles
                .iter()
                .zip(rooms)
                .map(|(handle, room)| compute(handle, &case, room))
                .collect();
            // In another order than they were dispatched in, sometimes; all ranks alike.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for at in order {
                handles[at]
                    .combine_send(&rows[at], Weights::Dispatched)
                    .unwrap();
            }
            for at in order {
                let step = at as u64;
                let mut combined = vec![0; case.batch(rank, step).tokens.len()];
                handles[at].combine_complete(&mut combined).unwrap();
                case.assert_combined((rank, step), &combined, &[]);
            }
        }
    });
}

#[test]
fn a_whole_call_is_refused_while_another_one_is_under_way() {
    let case = Case::new(3);
    job(3, |endpoint| {
        let group = group(endpoint, options(&case));
        let rank = group.rank();
        let mut handles = [0, 1].map(|step| handle(&group, &case, step));
        let [first, second] = &mut handles;
        let batch = case.batch(rank, 0);
        first.dispatch_send(Tokens::Plain(&batch.tokens)).unwrap();
        let error = dispatch(second, &case, 1).unwrap_err();
        assert!(matches!(error, MoeError::Usage { .. }), "{error}");
        assert_words(&error, &["a call is under way"]);
        // Nothing was sent.
        let mut received = room(first, &Tokens::Plain(&[]));
        first
            .dispatch_complete(DispatchOutput::new(&mut received))
            .unwrap();
        let rows = compute(first, &case, received);
        let others = dispatch(second, &case, 1).unwrap();
        let others = compute(second, &case, others);
        first.combine_send(&rows, Weights::Dispatched).unwrap();
        let error = combine(second, &case, &others, 1).unwrap_err();
        assert_words(&error, &["a call is under way"]);
        let mut combined = vec![0; batch.tokens.len()];
        first.combine_complete(&mut combined).unwrap();
        case.assert_combined((rank, 0), &combined, &[]);
        let combined = combine(second, &case, &others, 1).unwrap();
        case.assert_combined((rank, 1), &combined, &[]);
    });
}

#[test]
fn a_handle_dropped_in_the_middle_ends_its_group() {
    let case = Case::new(1);
    job(1, |endpoint| {
        let group = group(endpoint, options(&case));
        let mut handle = handle(&group, &case, 0);
        let batch = case.batch(0, 0);
        handle.dispatch_send(Tokens::Plain(&batch.tokens)).unwrap();
        drop(handle);
        let error = whole(&group, &case, 0, |_| vec![]).unwrap_err();
        assert_words(&error, &["dropped", "make a new"]);
    });
}

#[test]
fn an_output_that_is_too_small_can_be_replaced() {
    let case = Case::new(3);
    job(3, |endpoint| {
        let group = group(endpoint, options(&case));
        let batch = case.batch(group.rank(), 0);
        let routing = Routing {
            experts: Experts::I32(&batch.experts),
            top_k: case.top_k,
            weights: Some(&batch.weights),
        };
        for layout in [Layout::Flat, Layout::ExpertPacked { alignment: 4 }] {
            let mut handle = group.handle(&routing, layout).unwrap();
            let tokens = Tokens::Plain(&batch.tokens);
            let mut small = fill(0, case.row_bytes() as u64);
            let error = handle.dispatch(tokens, DispatchOutput::new(&mut small));
            let MoeError::Capacity { rows, room, .. } = error.unwrap_err() else {
                panic!("it is too small");
            };
            assert_eq!(room, 1);
            // Exactly as much as is needed.
            assert_eq!(handle.wait_for_counts().unwrap().rows(), rows);
            let shape = handle.output_shape(tokens.format()).unwrap();
            assert!(rows < shape.rows);
            let mut exact = fill(0, shape.with_rows(rows).token_bytes());
            handle
                .dispatch_complete(DispatchOutput::new(&mut exact))
                .unwrap();
        }
    });
}

#[test]
fn what_a_group_allocates_is_what_tokens_need() {
    // As served: 8 ranks, 128 tokens of 7168 bf16, 256 experts, top-8.
    let allocated = job(8, |endpoint| {
        let mut options = GroupOptions::new(256, 128, 7168, 8);
        options.timeout = LONG;
        let group = group(endpoint, options);
        let routing = Routing {
            experts: Experts::I32(&[]),
            top_k: 8,
            weights: None,
        };
        let handles = [0, 1].map(|_| group.handle(&routing, Layout::ExpertMajor).unwrap());
        let handles: u64 = handles.iter().map(Handle::allocated_bytes).sum();
        (group.allocated_bytes(), handles)
    });
    for (group, handles) in allocated {
        // Twice a row for each token of each rank, and little else.
        let rows = 2 * 8 * 128 * 7168 * 2;
        assert!((rows..rows + (1 << 20)).contains(&group), "{group}");
        assert!(group + handles <= 40_000_000, "{group} and {handles}");
    }
}

/// Says which rank a process is; no other process has it.
const RANK: &str = "CROSSWEFT_TEST_RANK";
/// Says what a process does differently, as a number.
const VARIANT: &str = "CROSSWEFT_TEST_VARIANT";

/// Processes that run a test of this program, one for each rank, of which `lost` must fail and the others pass.
/// It is given to `meanwhile`, as soon as all have met.
fn processes(name: &str, (ranks, lost): (u32, u32), variant: u64, meanwhile: impl Fn(&mut Child)) {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let start = |rank: u32| -> (Child, ChildStdin) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(VARIANT, variant.to_string())
            .stdin(Stdio::piped())
            .stdout(if rank == lost {
                Stdio::piped()
            } else {
                Stdio::inherit()
            })
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{}", rendezvous.unique_id()).unwrap();
        (child, stdin)
    };
    let mut all: Vec<_> = (0..ranks).map(start).collect();
    rendezvous.wait().unwrap();
    meanwhile(&mut all[lost as usize].0);
    for (rank, (mut child, _stdin)) in (0..).zip(all) {
        let passed = child.wait().unwrap().success();
        assert_eq!(passed, rank != lost, "rank {rank}");
    }
}

/// The endpoint of a process that [`processes`] has started, and its variant; `None` in the one that starts them.
fn endpoint(ranks: u32) -> Option<(Arc<Endpoint>, u64)> {
    let number = |name| std::env::var(name).ok()?.parse().ok();
    let (rank, variant): (u64, u64) = (number(RANK)?, number(VARIANT)?);
    let id = std::io::stdin().lock().lines().next().unwrap().unwrap();
    let (id, rank) = (id.parse().unwrap(), rank as u32);
    let job = Job::join(&id, rank, ranks, &JoinOptions::default()).unwrap();
    Some((Endpoint::new(Arc::new(job), soon()).unwrap(), variant))
}

#[test]
fn a_process_that_dies_in_a_dispatch_is_named() {
    let Some((endpoint, _)) = endpoint(3) else {
        let name = "a_process_that_dies_in_a_dispatch_is_named";
        return processes(name, (3, 1), 0, |_| {});
    };
    let case = Case::new(3);
    let group = group(&endpoint, options(&case));
    whole(&group, &case, 0, |_| vec![]).unwrap();
    if group.rank() == 1 {
        // Its tokens of the next call were sent, it will never read the others'.
        let mut handle = handle(&group, &case, 1);
        let batch = case.batch(1, 1);
        handle.dispatch_send(Tokens::Plain(&batch.tokens)).unwrap();
        std::process::abort();
    }
    let mut handle = handle(&group, &case, 1);
    // Depending on when that is noticed.
    let error = match dispatch(&mut handle, &case, 1) {
        Ok(received) => combine(&mut handle, &case, &received, 1).unwrap_err(),
        Err(error) => error,
    };
    assert_words(&error, &["rank 1 died"]);
}

#[test]
fn with_masking_the_others_go_on_when_a_process_dies() {
    let Some((endpoint, _)) = endpoint(4) else {
        let name = "with_masking_the_others_go_on_when_a_process_dies";
        return processes(name, (4, 2), 0, |_| {});
    };
    let case = Case::new(4);
    let mut options = options(&case);
    options.masking = true;
    let group = group(&endpoint, options);
    whole(&group, &case, 0, |_| vec![]).unwrap();
    let mut handle = handle(&group, &case, 1);
    let received = dispatch(&mut handle, &case, 1).unwrap();
    if group.rank() == 2 {
        std::process::abort();
    }
    let rows = compute(&handle, &case, received);
    let combined = combine(&mut handle, &case, &rows, 1).unwrap();
    case.assert_combined((group.rank(), 1), &combined, &[2]);
    for step in 2..6 {
        whole(&group, &case, step, |_| vec![2]).unwrap();
    }
    assert_eq!(group.masked(), [false, false, true, false]);
}

#[test]
fn a_process_that_is_killed_at_any_moment_is_left_out_or_named() {
    const RANKS: u32 = 3;
    let Some((endpoint, variant)) = endpoint(RANKS) else {
        for variant in 0..6 {
            let name = "a_process_that_is_killed_at_any_moment_is_left_out_or_named";
            processes(name, (RANKS, 1), variant, |child| {
                // It says when it has begun.
                let lines = BufReader::new(child.stdout.take().unwrap()).lines();
                let begun = lines
                    .map_while(Result::ok)
                    .any(|line| line.contains("begun"));
                assert!(begun);
                std::thread::sleep(Duration::from_micros(700 * variant));
                child.kill().unwrap();
            });
        }
        return;
    };
    // Tokens that take a while to send, in several thread blocks.
    let case = Case {
        hidden: 2048,
        max_tokens: 30,
        seed: variant,
        ..Case::new(RANKS)
    };
    let mut options = options(&case);
    options.masking = variant % 2 == 0;
    options.blocks = 1 + (variant % 3) as u32;
    let group = group(&endpoint, options);
    let masked = |group: &Group| {
        let masked = (0..).zip(group.masked());
        masked.filter(|&(_, m)| m).map(|(rank, _)| rank).collect()
    };
    let mut left = 20;
    for step in 0.. {
        let done = whole(&group, &case, step, masked);
        if group.rank() == 1 {
            // Until it is killed.
            done.unwrap();
            if step == 3 {
                println!("begun");
            }
            continue;
        }
        match done {
            Ok(()) if !group.masked()[1] => {}
            Ok(()) if left > 0 => {
                assert!(group.options().masking);
                left -= 1;
            }
            Ok(()) => break,
            Err(error) => {
                assert!(!group.options().masking, "{error}");
                assert_words(&error, &["rank 1 died"]);
                break;
            }
        }
    }
}
