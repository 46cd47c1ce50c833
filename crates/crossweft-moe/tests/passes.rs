//! Whole passes: what arrives where, what comes back, and that it is the same bits every time.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{Case, Random, Skew, fill, job, soon};
use crossweft_channel::Endpoint;
use crossweft_moe::{
    DataType, DispatchOutput, Experts, ExpertsMut, Group, GroupOptions, Handle, Layout, MoeError,
    Routing, ScaleType, Schedule, Tokens, Weights,
};
use float8::F8E4M3;
use proptest::prelude::*;

/// How a case is run.
#[derive(Clone, Copy, Debug)]
struct How {
    layout: Layout,
    blocks: u32,
    schedule: Schedule,
    staged: bool,
    wide: bool,
    given: bool,
}

const LOW_LATENCY: How = How {
    layout: Layout::ExpertMajor,
    blocks: 1,
    schedule: Schedule::RoundRobin,
    staged: false,
    wide: false,
    given: false,
};

fn group(endpoint: &Arc<Endpoint>, case: &Case, how: &How) -> Arc<Group> {
    let mut options = GroupOptions::new(case.experts, case.max_tokens, case.hidden, case.top_k);
    options.dtype = case.dtype;
    options.blocks = how.blocks;
    options.schedule = how.schedule;
    options.timeout = std::time::Duration::from_secs(120);
    Group::new(endpoint, options, soon()).unwrap()
}

/// What a pass leaves on a rank.
#[derive(Debug, PartialEq)]
struct Pass {
    received: Vec<u8>,
    combined: Vec<u8>,
}

/// A pass of plain tokens; asserts that everything is as it must be.
fn pass(case: &Case, how: &How, handle: &mut Handle, step: u64) -> Result<Pass, MoeError> {
    let group = Arc::clone(handle.group());
    let rank = group.rank();
    let batch = case.batch(rank, step);
    let tokens = Tokens::Plain(&batch.tokens);
    let shape = handle.output_shape(tokens.format())?;
    // What nothing is written to stays as it is.
    let mut received = fill(0xa5_u8, shape.token_bytes());
    let mut sources = fill(-7_i32, shape.rows);
    let mut weights = fill(f32::NAN, shape.weights());
    let mut experts = fill(-7_i32, shape.experts());
    let mut wide = fill(-7_i64, shape.experts());
    let output = DispatchOutput {
        tokens: &mut received,
        scales: None,
        experts: match (how.layout.is_by_expert(), how.wide) {
            (true, _) => None,
            (false, true) => Some(ExpertsMut::I64(&mut wide)),
            (false, false) => Some(ExpertsMut::I32(&mut experts)),
        },
        weights: Some(&mut weights),
        sources: Some(&mut sources),
    };
    match how.staged {
        true => {
            handle.dispatch_send(tokens)?;
            handle.wait_for_counts()?;
            handle.dispatch_complete(output)?;
        }
        false => handle.dispatch(tokens, output)?,
    }
    if how.wide {
        experts = wide.iter().map(|&expert| expert as i32).collect();
    }
    let seen = Seen {
        received: &received,
        sources: &sources,
        weights: &weights,
        experts: &experts,
    };
    let made = match how.layout.is_by_expert() {
        true => check_by_expert(case, handle, step, &seen),
        false => check_by_source(case, handle, step, &seen),
    };
    let mut combined = vec![0xa5; batch.tokens.len()];
    let given: Vec<f32>;
    let weights = match (how.layout.is_by_expert(), how.given) {
        (false, _) => Weights::One,
        (true, false) => Weights::Dispatched,
        (true, true) => {
            given = batch.weights.clone();
            Weights::Given(&given)
        }
    };
    match how.staged {
        true => {
            handle.combine_send(&made, weights)?;
            handle.combine_complete(&mut combined)?;
        }
        false => handle.combine(&made, weights, &mut combined)?,
    }
    case.assert_combined((rank, step), &combined, &[]);
    Ok(Pass { received, combined })
}

struct Seen<'a> {
    received: &'a [u8],
    sources: &'a [i32],
    weights: &'a [f32],
    experts: &'a [i32],
}

/// Asserts what came, and returns what the experts make of it.
fn check_by_expert(case: &Case, handle: &Handle, step: u64, seen: &Seen<'_>) -> Vec<u8> {
    let group = handle.group();
    let rank = group.rank();
    let own = group.local_experts(rank);
    let counts = handle.counts().unwrap();
    let row_bytes = case.row_bytes();
    let mut made = seen.received.to_vec();
    let tokens = case.ranks * case.max_tokens;
    let mut used = vec![false; seen.sources.len()];
    let mut end = 0;
    for (local, expert) in (0..).zip(own.clone()) {
        let begin = match handle.layout() {
            Layout::ExpertMajor => local * tokens,
            _ => end,
        };
        assert_eq!(counts.expert_offsets()[local as usize], begin);
        let mut row = begin;
        for source in 0..case.ranks {
            let expected = case.for_expert(source, step, expert as i32);
            let range = counts.range(local, source).unwrap();
            assert_eq!(range, row..row + expected.len() as u32, "{case:?}");
            let batch = case.batch(source, step);
            for (token, weight) in expected {
                let at = row as usize * row_bytes..(row as usize + 1) * row_bytes;
                let sent = &batch.tokens[token * row_bytes..][..row_bytes];
                assert_eq!(seen.received[at.clone()], *sent, "{case:?}");
                assert_eq!(seen.sources[row as usize], token as i32);
                assert_eq!(seen.weights[row as usize].to_bits(), weight.to_bits());
                made[at].copy_from_slice(&case.expert(expert as i32, sent));
                used[row as usize] = true;
                row += 1;
            }
        }
        assert_eq!(counts.per_expert()[local as usize], row - begin);
        end = match handle.layout() {
            Layout::ExpertPacked { alignment } => begin + (row - begin).next_multiple_of(alignment),
            _ => row,
        };
    }
    if let Layout::ExpertMajor = handle.layout() {
        end = own.len() as u32 * tokens;
    }
    assert_eq!(counts.rows(), u64::from(end));
    for (row, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
        // Padding is zero, what lies behind it untouched.
        let is_padding = (row as u32) < end && handle.layout() != Layout::ExpertMajor;
        let byte = if is_padding { 0 } else { 0xa5 };
        let bytes = &seen.received[row * row_bytes..][..row_bytes];
        assert!(bytes.iter().all(|&b| b == byte), "row {row} of {case:?}");
        let source = if is_padding { -1 } else { -7 };
        assert_eq!(seen.sources[row], source);
    }
    made
}

/// The same for rows that are not grouped by expert; the experts' results are summed here, with weights.
fn check_by_source(case: &Case, handle: &Handle, step: u64, seen: &Seen<'_>) -> Vec<u8> {
    let group = handle.group();
    let rank = group.rank();
    let counts = handle.counts().unwrap();
    let row_bytes = case.row_bytes();
    let each = case.top_k as usize;
    let mut made = seen.received.to_vec();
    let mut used = vec![false; seen.sources.len()];
    let mut row = 0;
    for source in 0..case.ranks {
        if handle.layout() == Layout::RankMajor {
            row = (source * case.max_tokens) as usize;
        }
        let expected = case.for_rank(source, step, rank);
        assert_eq!(
            counts.per_source()[source as usize] as usize,
            expected.len()
        );
        let batch = case.batch(source, step);
        for token in expected {
            let at = row * row_bytes..(row + 1) * row_bytes;
            let sent = &batch.tokens[token * row_bytes..][..row_bytes];
            assert_eq!(seen.received[at.clone()], *sent, "{case:?}");
            assert_eq!(seen.sources[row], token as i32);
            let mut sum = vec![0.0_f32; case.hidden as usize];
            for k in 0..each {
                let (expert, weight) = (
                    batch.experts[token * each + k],
                    batch.weights[token * each + k],
                );
                let (local, found) = (seen.experts[row * each + k], seen.weights[row * each + k]);
                match case.rank_of(expert) == Some(rank) {
                    true => {
                        assert_eq!(local, expert - case.first_expert(rank));
                        assert_eq!(found.to_bits(), weight.to_bits());
                        let y = common::decode(case.dtype, &case.expert(expert, sent));
                        for (sum, y) in sum.iter_mut().zip(y) {
                            *sum += weight * y;
                        }
                    }
                    false => assert_eq!((local, found), (-1, 0.0)),
                }
            }
            let sum: Vec<u8> = sum
                .into_iter()
                .flat_map(|x| common::encode(case.dtype, x))
                .collect();
            made[at].copy_from_slice(&sum);
            used[row] = true;
            row += 1;
        }
    }
    let rows = match handle.layout() {
        Layout::RankMajor => (case.ranks * case.max_tokens) as usize,
        _ => row,
    };
    assert_eq!(counts.rows(), rows as u64);
    for (row, _) in used.iter().enumerate().filter(|(_, used)| !**used) {
        let bytes = &seen.received[row * row_bytes..][..row_bytes];
        assert!(bytes.iter().all(|&b| b == 0xa5), "row {row} of {case:?}");
        let experts = &seen.experts[row * each..][..each];
        assert!(experts.iter().all(|&expert| expert == -1));
    }
    made
}

/// Some passes on every rank.
fn run(case: &Case, how: &How) -> Vec<Vec<Pass>> {
    job(case.ranks, |endpoint| {
        let group = group(endpoint, case, how);
        let batch = case.batch(group.rank(), 0);
        let wide: Vec<i64> = batch.experts.iter().map(|&e| e.into()).collect();
        let routing = |experts| Routing {
            experts,
            top_k: case.top_k,
            weights: Some(&batch.weights),
        };
        let experts = match how.wide {
            true => Experts::I64(&wide),
            false => Experts::I32(&batch.experts),
        };
        let mut handle = group.handle(&routing(experts), how.layout).unwrap();
        let mut passes = vec![pass(case, how, &mut handle, 0).unwrap()];
        for step in 1..4 {
            let batch = case.batch(group.rank(), step);
            let routing = Routing {
                experts: Experts::I32(&batch.experts),
                top_k: case.top_k,
                weights: Some(&batch.weights),
            };
            handle.route(&routing).unwrap();
            passes.push(pass(case, how, &mut handle, step).unwrap());
        }
        passes
    })
}

#[test]
fn a_pass_in_low_latency_mode() {
    for ranks in [1, 2, 3, 4, 8] {
        run(&Case::new(ranks), &LOW_LATENCY);
    }
}

const LAYOUTS: [Layout; 5] = [
    Layout::ExpertMajor,
    Layout::ExpertPacked { alignment: 1 },
    Layout::ExpertPacked { alignment: 8 },
    Layout::RankMajor,
    Layout::Flat,
];

#[test]
fn every_layout_and_number_of_blocks() {
    for (layout, blocks) in LAYOUTS.into_iter().flat_map(|l| [(l, 1), (l, 3)]) {
        let how = How {
            layout,
            blocks,
            staged: blocks == 3,
            ..LOW_LATENCY
        };
        run(&Case::new(3), &how);
    }
}

#[test]
fn every_type_and_weights_given_late() {
    for dtype in [DataType::Bf16, DataType::F16, DataType::F32] {
        let how = How {
            given: true,
            wide: true,
            ..LOW_LATENCY
        };
        let case = Case {
            dtype,
            ..Case::new(4)
        };
        run(&case, &how);
    }
}

#[test]
fn skewed_tokens_and_ranks_without_any() {
    for skew in [Skew::One(0), Skew::One(8), Skew::Few, Skew::Nowhere] {
        for idle in [vec![], vec![0, 2], vec![0, 1, 2, 3]] {
            let case = Case {
                skew,
                idle,
                ..Case::new(4)
            };
            run(&case, &LOW_LATENCY);
        }
    }
}

#[test]
fn the_same_bits_in_every_run() {
    let case = Case {
        top_k: 8,
        max_tokens: 20,
        ..Case::new(4)
    };
    let first = run(&case, &LOW_LATENCY);
    for blocks in [1, 2, 5] {
        let how = How {
            blocks,
            schedule: Schedule::Seeded(blocks.into()),
            ..LOW_LATENCY
        };
        assert!(run(&case, &how) == first, "{blocks} blocks");
    }
}

#[test]
fn a_routing_is_dispatched_and_combined_again() {
    let case = Case::new(3);
    job(3, |endpoint| {
        let group = group(endpoint, &case, &LOW_LATENCY);
        let rank = group.rank();
        let batch = case.batch(rank, 0);
        let routing = Routing {
            experts: Experts::I32(&batch.experts),
            top_k: case.top_k,
            weights: Some(&batch.weights),
        };
        let mut handle = group.handle(&routing, Layout::ExpertMajor).unwrap();
        let first = pass(&case, &LOW_LATENCY, &mut handle, 0).unwrap();
        // Two dispatches in a row, then combines of which each is what it was.
        assert!(pass(&case, &LOW_LATENCY, &mut handle, 0).unwrap() == first);
        let tokens = Tokens::Plain(&batch.tokens);
        let mut received = vec![0; first.received.len()];
        for _ in 0..2 {
            handle
                .dispatch(tokens, DispatchOutput::new(&mut received))
                .unwrap();
        }
        let mut sums = [(); 2].map(|()| vec![0; batch.tokens.len()]);
        for sum in &mut sums {
            handle.combine(&received, Weights::One, sum).unwrap();
        }
        assert!(sums[0] == sums[1]);
        // All tokens are doubled, tripled, ..: by as many choices as are experts.
        for (token, sum) in sums[0].chunks_exact(case.row_bytes()).enumerate() {
            let each = case.top_k as usize;
            let choices = &batch.experts[token * each..][..each];
            let count = choices.iter().filter(|&&expert| expert >= 0).count() as f32;
            let sent = &batch.tokens[token * case.row_bytes()..][..case.row_bytes()];
            let (sum, sent) = (
                common::decode(case.dtype, sum),
                common::decode(case.dtype, sent),
            );
            for (sum, sent) in sum.into_iter().zip(sent) {
                assert!(
                    (sum - count * sent).abs() <= 0.02 * count,
                    "{sum} {sent} {count}"
                );
            }
        }
    });
}

/// Elements of a group that has a scale.
const GROUP: usize = 128;

/// The scales of one row, as numbers.
fn scales_of(scale_type: ScaleType, bytes: &[u8]) -> Vec<f32> {
    match scale_type {
        ScaleType::Ue8m0 => bytes
            .iter()
            .map(|&exponent| f32::from_bits(u32::from(exponent) << 23))
            .collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]]))
            .collect(),
    }
}

/// Dispatches quantised tokens; calls `check` with the bytes and scales of each row, and the token that it is of.
fn quantised(
    case: &Case,
    layout: Layout,
    tokens: impl Fn(&[u8], &dyn Fn(Tokens<'_>)) + Sync,
    check: impl Fn(&[u8], &[u8], (u32, usize)) + Sync,
) {
    job(case.ranks, |endpoint| {
        let how = How {
            layout,
            ..LOW_LATENCY
        };
        let group = group(endpoint, case, &how);
        let rank = group.rank();
        let batch = case.batch(rank, 0);
        let routing = Routing {
            experts: Experts::I32(&batch.experts),
            top_k: case.top_k,
            weights: Some(&batch.weights),
        };
        // Something everywhere, in both halves of the memory.
        let mut plain = group.handle(&routing, layout).unwrap();
        for _ in 0..2 {
            let dirt = vec![0xa5; batch.tokens.len()];
            let shape = plain.output_shape(Tokens::Plain(&dirt).format()).unwrap();
            let mut received = fill(0, shape.token_bytes());
            let output = DispatchOutput::new(&mut received);
            plain.dispatch(Tokens::Plain(&dirt), output).unwrap();
        }
        tokens(&batch.tokens, &|tokens| {
            let mut handle = group.handle(&routing, layout).unwrap();
            let shape = handle.output_shape(tokens.format()).unwrap();
            let mut received = fill(0, shape.token_bytes());
            let mut scales = fill(0, shape.scale_bytes());
            let mut output = DispatchOutput::new(&mut received);
            output.scales = Some(&mut scales);
            handle.dispatch(tokens, output).unwrap();
            let (row, of_scales) = (shape.row_bytes as usize, shape.scale_row_bytes as usize);
            let mut rows = 0;
            let mut check_row = |at: usize, source, token| {
                let bytes = &received[at * row..][..row];
                let scales = &scales[at * of_scales..][..of_scales];
                check(bytes, scales, (source, token));
                rows += 1;
            };
            let mut base = 0;
            for source in 0..case.ranks {
                if layout == Layout::Flat {
                    for token in case.for_rank(source, 0, rank) {
                        check_row(base, source, token);
                        base += 1;
                    }
                    continue;
                }
                for (local, expert) in (0..).zip(group.local_experts(rank)) {
                    let range = handle.counts().unwrap().range(local, source).unwrap();
                    let expected = case.for_expert(source, 0, expert as i32);
                    for (at, (token, _)) in range.zip(expected) {
                        check_row(at as usize, source, token);
                    }
                }
            }
            let total: u32 = match layout {
                Layout::Flat => handle.counts().unwrap().per_source().iter().sum(),
                _ => handle.counts().unwrap().per_expert().iter().sum(),
            };
            assert_eq!(rows, total);
            // What the experts make is in the group's type again.
            let plain = handle.counts().unwrap().rows() as usize * case.row_bytes();
            let mut combined = vec![1; batch.tokens.len()];
            handle
                .combine(&vec![0; plain], Weights::One, &mut combined)
                .unwrap();
            assert!(combined.iter().all(|&byte| byte == 0));
        });
    });
}

#[test]
fn tokens_are_quantised_on_the_way() {
    // The last group of a token is not whole; exponents are padded.
    for (dtype, hidden, layout) in [
        (DataType::Bf16, 16, Layout::Flat),
        (DataType::Bf16, 304, Layout::ExpertMajor),
        (DataType::F16, 128, Layout::ExpertPacked { alignment: 4 }),
        (DataType::F32, 688, Layout::Flat),
    ] {
        let case = Case {
            dtype,
            hidden,
            ..Case::new(3)
        };
        for (scale_type, powers_of_two) in [
            (ScaleType::F32, false),
            (ScaleType::F32, true),
            (ScaleType::Ue8m0, true),
        ] {
            let tokens = |elements: &[u8], send: &dyn Fn(Tokens<'_>)| {
                send(Tokens::Quantise {
                    elements,
                    scale_type,
                    powers_of_two,
                });
            };
            quantised(&case, layout, tokens, |bytes, scales, (source, token)| {
                let batch = case.batch(source, 0);
                let sent = &batch.tokens[token * case.row_bytes()..][..case.row_bytes()];
                let sent = common::decode(dtype, sent);
                let groups = sent.len().div_ceil(GROUP);
                let scales = scales_of(scale_type, scales);
                assert!(scales[groups..].iter().all(|&behind| behind == 0.0));
                for (group, elements) in sent.chunks(GROUP).enumerate() {
                    let scale = scales[group];
                    let most = elements.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                    let exact = most / 448.0;
                    match powers_of_two {
                        true => {
                            assert_eq!(scale.to_bits() & 0x7f_ffff, 0);
                            assert!((exact..2.0 * exact).contains(&scale), "{scale} for {exact}");
                        }
                        false => assert_eq!(scale, exact),
                    }
                    for (i, &x) in elements.iter().enumerate() {
                        let found = F8E4M3::from_bits(bytes[group * GROUP + i]).to_f32() * scale;
                        // Half a step of three bits, or of the least numbers.
                        let bound = (x.abs() / 16.0).max(scale / 1024.0) * 1.001;
                        assert!((found - x).abs() <= bound, "{found} for {x}");
                    }
                }
            });
        }
    }
}

#[test]
fn tokens_that_are_quantised_already_pass_as_they_are() {
    let case = Case {
        hidden: 272,
        ..Case::new(3)
    };
    for (scale_type, of_scales) in [(ScaleType::F32, 12), (ScaleType::Ue8m0, 4)] {
        let bytes_of = |source: u32, token: usize, count: usize, salt: u64| -> Vec<u8> {
            let mut random = Random(u64::from(source) << 32 ^ token as u64 ^ salt << 48);
            (0..count).map(|_| random.next() as u8).collect()
        };
        let tokens = |elements: &[u8], send: &dyn Fn(Tokens<'_>)| {
            // Whose they are, by their bytes.
            let source = (0..case.ranks).find(|&r| case.batch(r, 0).tokens == elements);
            let (source, count) = (source.unwrap(), elements.len() / case.row_bytes());
            let all = |bytes, salt| -> Vec<u8> {
                (0..count)
                    .flat_map(|token| bytes_of(source, token, bytes, salt))
                    .collect()
            };
            send(Tokens::Quantised {
                elements: &all(272, 1),
                scales: &all(of_scales, 2),
                scale_type,
            });
        };
        quantised(
            &case,
            Layout::ExpertMajor,
            tokens,
            |bytes, scales, (source, token)| {
                assert_eq!(bytes, bytes_of(source, token, 272, 1));
                assert_eq!(scales, bytes_of(source, token, of_scales, 2));
            },
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(
        ranks in prop::sample::select(vec![1_u32, 2, 3, 4, 8, 16]),
        (experts, top_k) in (1_u32..40, 1_u32..=32),
        (hidden, dtype) in (1_u32..40, prop::sample::select(vec![DataType::Bf16, DataType::F16, DataType::F32])),
        max_tokens in 1_u32..24,
        skew in prop_oneof![
            Just(Skew::Random),
            Just(Skew::Few),
            Just(Skew::Nowhere),
            (0_u32..1000).prop_map(Skew::One),
        ],
        idle in prop::collection::vec(0_u32..16, 0..3),
        layout in prop_oneof![
            Just(Layout::ExpertMajor),
            Just(Layout::RankMajor),
            Just(Layout::Flat),
            (1_u32..20).prop_map(|alignment| Layout::ExpertPacked { alignment }),
        ],
        (blocks, seed) in (1_u32..5, any::<u64>()),
        (staged, wide, given) in any::<(bool, bool, bool)>(),
    ) {
        let case = Case {
            ranks,
            experts,
            hidden: hidden * 16 / dtype.size() as u32,
            top_k,
            max_tokens,
            dtype,
            skew: match skew {
                Skew::One(expert) => Skew::One(expert % experts),
                skew => skew,
            },
            seed,
            idle,
        };
        let schedule = match seed % 2 {
            0 => Schedule::RoundRobin,
            _ => Schedule::Seeded(seed),
        };
        run(&case, &How { layout, blocks, schedule, staged, wide, given });
    }
}
