//! All-reduce with residual addition, RMS normalisation and quantisation, against the independent reference: every
//! type, number of ranks and kind of scale, with and without a residual.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use crossweft_collective::{
    CollectiveError, Communicator, CommunicatorOptions, DataType, GROUP, Quantised, ReduceOp,
    RmsNormCall, RmsNormOptions, Scales, run_in_threads,
};
use crossweft_verify::{Mismatches, Pattern, RmsNorm, fill, fingerprint, reference_all_reduce};

const TYPES: [DataType; 3] = [DataType::F32, DataType::F16, DataType::Bf16];

fn job<T: Send>(
    ranks: u32,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    let options = CommunicatorOptions {
        timeout: Duration::from_secs(60),
    };
    run_in_threads(ranks, options, rank_main).unwrap()
}

fn right(what: &str, found: &Mismatches) {
    assert_eq!(found.wrong, 0, "{what}: {:?}", found.first);
}

/// Elements of mixed sign and magnitude.
fn random(dtype: DataType, seed: u64, elements: usize) -> Vec<u8> {
    let mut data = vec![0; elements * dtype.size()];
    fill(Pattern::Random, dtype, ReduceOp::Sum, seed, 0, 1, &mut data);
    data
}

/// The scale of a token, and that of a group.
fn of_token(largest: f32) -> f32 {
    (largest / 448.0).max(1.0 / (448.0 * 512.0))
}

fn of_group(largest: f32) -> f32 {
    largest.max(1e-10) / 448.0
}

/// Calls it in all ways; returns the fingerprint of all that came out.
fn exercise(
    communicator: &Communicator,
    options: RmsNormOptions,
    tokens: usize,
) -> Result<u64, CollectiveError> {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let RmsNormOptions {
        dtype,
        hidden,
        epsilon,
        ..
    } = options;
    let (op, elements) = (ReduceOp::Sum, tokens * hidden);
    let bytes = elements * dtype.size();
    let fused = communicator.all_reduce_rms_norm(options)?;
    let weight = random(dtype, 11, hidden);
    let mut all = Vec::new();
    for pattern in [Pattern::Exact, Pattern::Random] {
        let mut input = vec![0; bytes];
        fill(pattern, dtype, op, 5, rank, ranks, &mut input);
        let mut sums = vec![0; bytes];
        match pattern {
            // One pattern of bits, whoever adds.
            Pattern::Exact => reference_all_reduce(pattern, dtype, op, 5, ranks, 0, &mut sums),
            Pattern::Random => {
                let plain = crossweft_collective::AllReduceOptions::new(dtype, op, bytes as u64);
                communicator.all_reduce(plain)?.run(&input, &mut sums)?;
            }
        }
        for with_residual in [false, true] {
            let before = random(dtype, 12, elements);
            let reference = RmsNorm {
                dtype,
                hidden,
                epsilon,
                residual: with_residual.then_some(&before),
                weight: &weight,
            };
            let groups = tokens * hidden.div_ceil(GROUP);
            for kind in 0..4 {
                let what = format!(
                    "{dtype} {hidden} {tokens} {pattern:?} {with_residual} {kind}, rank {rank} of {ranks}"
                );
                let (mut residual, mut output) = (before.clone(), vec![0xa5; bytes]);
                let mut values = vec![0xa5; elements];
                let mut scales = vec![0.5; if kind == 2 { tokens } else { groups }];
                let kinds = match kind {
                    0 => None,
                    1 => Some(Scales::Static(0.5)),
                    2 => Some(Scales::PerToken(&mut scales)),
                    _ => Some(Scales::PerGroup(&mut scales)),
                };
                fused.run(RmsNormCall {
                    input: &input,
                    residual: with_residual.then_some(&mut residual),
                    weight: &weight,
                    output: &mut output,
                    quantised: kinds.map(|scales| Quantised {
                        values: &mut values,
                        scales,
                    }),
                })?;
                let after = with_residual.then_some(&residual[..]);
                right(&what, &reference.check(&sums, after, &output));
                let (group, scale): (_, fn(f32) -> f32) = match kind {
                    1 => (GROUP, |_| 0.5),
                    2 => (hidden, of_token),
                    _ => (GROUP, of_group),
                };
                if kind == 0 {
                    assert!(values.iter().all(|&value| value == 0xa5), "{what}");
                } else {
                    let quantised = (&values[..], &scales[..]);
                    right(
                        &what,
                        &reference.check_quantised(&output, group, scale, quantised),
                    );
                }
                for part in [&residual, &output, &values] {
                    all.extend(fingerprint(part).to_le_bytes());
                }
                all.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
            }
        }
    }
    Ok(fingerprint(&all))
}

fn same_everywhere(ranks: u32, options: &[(RmsNormOptions, usize)]) {
    let results = job(ranks, |communicator| {
        let each = options.iter();
        each.map(|&(options, tokens)| exercise(communicator, options, tokens))
            .collect::<Result<Vec<_>, _>>()
    });
    assert!(
        results.iter().all(|result| *result == results[0]),
        "ranks have different bits"
    );
}

#[test]
fn every_type_at_every_number_of_ranks() {
    for ranks in 1..=8 {
        let mut all = Vec::new();
        for dtype in TYPES {
            for (hidden, tokens) in [(8, 1), (136, 5), (1024, 0), (1000, 3)] {
                all.push((RmsNormOptions::new(dtype, hidden, 8), tokens));
            }
        }
        same_everywhere(ranks, &all);
    }
}

#[test]
fn the_largest_tokens_in_several_pieces() {
    let mut options = RmsNormOptions::new(DataType::Bf16, 16_384, 40);
    options.epsilon = 1e-5;
    let wide = RmsNormOptions::new(DataType::F32, 16_384, 9);
    same_everywhere(2, &[(options, 19), (wide, 9)]);
}

#[test]
fn tokens_of_zeros_stay_so() {
    job(2, |communicator| {
        let options = RmsNormOptions::new(DataType::F16, 256, 2);
        let fused = communicator.all_reduce_rms_norm(options)?;
        let (input, weight) = (vec![0; 2 * 512], random(DataType::F16, 1, 256));
        let (mut output, mut values) = (vec![1; 2 * 512], vec![1; 512]);
        let mut scales = [0.0; 4];
        fused.run(RmsNormCall {
            input: &input,
            residual: None,
            weight: &weight,
            output: &mut output,
            quantised: Some(Quantised {
                values: &mut values,
                scales: Scales::PerGroup(&mut scales),
            }),
        })?;
        // Zero, of the weight's sign.
        assert!(output.chunks(2).all(|x| x[0] == 0 && x[1] & 0x7f == 0));
        assert!(values.iter().all(|value| value & 0x7f == 0));
        assert_eq!(scales, [of_group(0.0); 4]);
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_said() {
    job(2, |communicator| {
        let options = RmsNormOptions::new;
        let mut negative = options(DataType::F32, 8, 1);
        negative.epsilon = -1.0;
        for (options, words) in [
            (
                options(DataType::F64, 8, 1),
                "tokens of f64; they may be of f32, f16 or bf16",
            ),
            (
                options(DataType::F32, 12, 1),
                "a multiple of 8 from 8 to 16384",
            ),
            (
                options(DataType::F32, 0, 1),
                "a multiple of 8 from 8 to 16384",
            ),
            (
                options(DataType::F32, 16_392, 1),
                "a multiple of 8 from 8 to 16384",
            ),
            (negative, "an epsilon of -1"),
            (options(DataType::F32, 8, 1 << 32), "fewer than 2^32 fit"),
        ] {
            let error = communicator.all_reduce_rms_norm(options).unwrap_err();
            assert!(matches!(error, CollectiveError::Usage { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        let fused = communicator.all_reduce_rms_norm(options(DataType::F32, 8, 2))?;
        let weight = random(DataType::F32, 1, 8);
        let run = |input: usize, residual: usize, weight: &[u8], scales: Scales<'_>| {
            let (mut residual, mut output) = (vec![0; residual], vec![0; input / 32 * 32]);
            let mut values = vec![0; input / 4];
            let error = fused.run(RmsNormCall {
                input: &vec![0; input],
                residual: Some(&mut residual),
                weight,
                output: &mut output,
                quantised: Some(Quantised {
                    values: &mut values,
                    scales,
                }),
            });
            error.unwrap_err().to_string()
        };
        let scales = || Scales::Static(1.0);
        for (error, words) in [
            (
                run(33, 33, &weight, scales()),
                "the input in bytes has 33, not 32",
            ),
            (
                run(32, 64, &weight, scales()),
                "the residual in bytes has 64, not 32",
            ),
            (
                run(32, 32, &weight[1..], scales()),
                "the weight in bytes has 31, not 32",
            ),
            (
                run(96, 96, &weight, scales()),
                "3 tokens; it was prepared for up to 2",
            ),
            (run(64, 64, &weight, Scales::Static(0.0)), "a scale of 0"),
            (
                run(64, 64, &weight, Scales::PerToken(&mut [0.0; 3])),
                "the scales has 3, not 2",
            ),
        ] {
            assert!(error.contains(words), "{error}");
        }
        Ok(())
    });
    let errors = job(2, |communicator| {
        let hidden = 8 << communicator.rank();
        let options = RmsNormOptions::new(DataType::F32, hidden, 1);
        Ok(communicator
            .all_reduce_rms_norm(options)
            .unwrap_err()
            .to_string())
    });
    assert!(errors[0].contains("tokens of 16 f32"), "{}", errors[0]);
}
