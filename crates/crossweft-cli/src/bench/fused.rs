//! An all-reduce with what follows it in a transformer, and what it leaves beside its output.

use std::ops::Range;

use crossweft_collective::{
    AllReduceOptions, AllReduceRmsNorm, CollectiveError, Communicator, DataType, GROUP,
    PreparedCollective, Quantised, ReduceOp, RmsNormCall, RmsNormOptions, Scales,
};
use crossweft_verify::{Mismatches, Pattern, RmsNorm, fill, fingerprint, reference_all_reduce};

use super::options::{Norm, Quantise};

/// The scale of what is quantised with one scale for all.
const STATIC: f32 = 0.5;

/// Ready to be called; input and output lie elsewhere, the residual and what is quantised here.
pub(super) struct Fused {
    call: AllReduceRmsNorm,
    /// What the reference begins with, where sums are rounded.
    sums: PreparedCollective,
    quantise: Quantise,
    dtype: DataType,
    weight: Vec<u8>,
    /// The residual that every call begins with.
    before: Vec<u8>,
    /// For each pair of buffers its own, at the same places.
    residual: Vec<u8>,
    values: Vec<u8>,
    scales: Vec<f32>,
}

/// Data of mixed sign and magnitude, the same on every rank.
fn data(dtype: DataType, seed: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    fill(Pattern::Random, dtype, ReduceOp::Sum, seed, 0, 1, &mut data);
    data
}

impl Fused {
    /// For inputs of up to `most` bytes, in a buffer of `all` bytes.
    pub(super) fn prepare(
        communicator: &Communicator,
        (dtype, norm, seed): (DataType, Norm, u64),
        (most, all): (u64, usize),
    ) -> Result<Self, CollectiveError> {
        let Norm { hidden, quantise } = norm;
        let token = hidden as usize * dtype.size();
        let tokens = most as usize / token;
        let options = RmsNormOptions::new(dtype, hidden as usize, tokens);
        let plain = AllReduceOptions::new(dtype, ReduceOp::Sum, most);
        let elements = all / dtype.size();
        Ok(Self {
            call: communicator.all_reduce_rms_norm(options)?,
            sums: communicator.all_reduce(plain)?,
            quantise,
            dtype,
            weight: data(dtype, seed + 1, token),
            before: data(dtype, seed + 2, most as usize),
            residual: vec![0; all],
            values: match quantise {
                Quantise::None => Vec::new(),
                _ => vec![0; elements],
            },
            scales: match quantise {
                Quantise::None | Quantise::Tensor => Vec::new(),
                Quantise::Token => vec![0.0; tokens],
                Quantise::Group => vec![0.0; tokens * (hidden as usize).div_ceil(GROUP)],
            },
        })
    }

    /// What the sums take.
    pub(super) fn algorithm(&self, bytes: u64) -> String {
        self.call.all_reduce().explain(bytes).algorithm.to_string()
    }

    /// All choices for the sums.
    pub(super) fn chosen(&self) -> String {
        self.call.all_reduce().selector().to_string()
    }

    /// The residual of a pair is what it was: a call adds to it.
    pub(super) fn reset(&mut self, at: Range<usize>) {
        let bytes = at.len();
        self.residual[at].copy_from_slice(&self.before[..bytes]);
    }

    /// One call; the pair's buffers lie at `at`.
    pub(super) fn run(
        &mut self,
        input: &[u8],
        output: &mut [u8],
        at: Range<usize>,
    ) -> Result<(), CollectiveError> {
        let values = self.values_at(&at);
        let scales = self.scales_of(at.len());
        let scales = match self.quantise {
            Quantise::None => None,
            Quantise::Tensor => Some(Scales::Static(STATIC)),
            Quantise::Token => Some(Scales::PerToken(&mut self.scales[scales])),
            Quantise::Group => Some(Scales::PerGroup(&mut self.scales[scales])),
        };
        self.call.run(RmsNormCall {
            input,
            residual: Some(&mut self.residual[at]),
            weight: &self.weight,
            output,
            quantised: scales.map(|scales| Quantised {
                values: &mut self.values[values],
                scales,
            }),
        })
    }

    /// The sums of inputs of that pattern, of which this rank's is `input`. Collective.
    pub(super) fn sums(
        &self,
        (pattern, seed): (Pattern, u64),
        ranks: u32,
        input: &[u8],
    ) -> Result<Vec<u8>, CollectiveError> {
        let mut sums = vec![0; input.len()];
        match pattern {
            // One pattern of bits, whoever adds.
            Pattern::Exact => {
                let (dtype, op) = (self.dtype, ReduceOp::Sum);
                reference_all_reduce(pattern, dtype, op, seed, ranks, 0, &mut sums);
            }
            _ => self.sums.run(input, &mut sums)?,
        }
        Ok(sums)
    }

    /// What is wrong with what the call of a pair has made of `sums`, its output first.
    pub(super) fn check(&self, sums: &[u8], output: &[u8], at: &Range<usize>) -> [Mismatches; 2] {
        let RmsNormOptions {
            hidden, epsilon, ..
        } = *self.call.options();
        let reference = RmsNorm {
            dtype: self.dtype,
            hidden,
            epsilon,
            residual: Some(&self.before[..at.len()]),
            weight: &self.weight,
        };
        let normalised = reference.check(sums, Some(&self.residual[at.clone()]), output);
        let tokens = at.len() / (hidden * self.dtype.size());
        let scales = &self.scales[self.scales_of(at.len())];
        let given = vec![STATIC; tokens * hidden.div_ceil(GROUP)];
        let (group, scale, scales): (_, fn(f32) -> f32, &[f32]) = match self.quantise {
            Quantise::None => return [normalised, Mismatches::default()],
            Quantise::Tensor => (GROUP, |_| STATIC, &given),
            Quantise::Token => (
                hidden,
                |largest| (largest / 448.0).max(1.0 / (448.0 * 512.0)),
                scales,
            ),
            Quantise::Group => (GROUP, |largest| largest.max(1e-10) / 448.0, scales),
        };
        let values = &self.values[self.values_at(at)];
        let quantised = reference.check_quantised(output, group, scale, (values, scales));
        [normalised, quantised]
    }

    /// Of all that the call of a pair has left, but for its output.
    pub(super) fn fingerprint(&self, at: &Range<usize>) -> u64 {
        let values = &self.values[self.values_at(at)];
        let mut all = fingerprint(&self.residual[at.clone()])
            .to_le_bytes()
            .to_vec();
        all.extend(fingerprint(values).to_le_bytes());
        let scales = &self.scales[self.scales_of(at.len())];
        all.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
        fingerprint(&all)
    }

    fn values_at(&self, at: &Range<usize>) -> Range<usize> {
        match self.quantise {
            Quantise::None => 0..0,
            _ => at.start / self.dtype.size()..at.end / self.dtype.size(),
        }
    }

    fn scales_of(&self, bytes: usize) -> Range<usize> {
        let hidden = self.call.options().hidden;
        let tokens = bytes / (hidden * self.dtype.size());
        match self.quantise {
            Quantise::None | Quantise::Tensor => 0..0,
            Quantise::Token => 0..tokens,
            Quantise::Group => 0..tokens * hidden.div_ceil(GROUP),
        }
    }
}
