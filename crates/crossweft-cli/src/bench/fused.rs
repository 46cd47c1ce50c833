//! An all-reduce with what follows it in a transformer, and what it leaves beside its output.

use std::ops::Range;

use crossweft_collective::{
    AllReduceOptions, AllReduceRmsNorm, CollectiveError, Communicator, DataType, GROUP,
    PreparedCollective, Quantised, ReduceOp, RmsNormCall, RmsNormOptions, Scales,
};
use crossweft_executor::{NormBuffers, NormScales, RecordedNorm};
use crossweft_hal::{Device, Memory};
use crossweft_verify::{Mismatches, Pattern, RmsNorm, fill, fingerprint, reference_all_reduce};

use super::options::{Norm, Quantise};

/// The scale of what is quantised with one scale for all.
const STATIC: f32 = 0.5;

/// What has no all-reduce of its own.
const ONE_LAUNCH: &str = "one-launch";

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
    /// The same on a GPU, where calls are; what is above is then what they have left.
    on_device: Option<Box<OnDevice>>,
}

/// The buffers of calls on a GPU.
struct OnDevice {
    weight: Memory,
    residual: Memory,
    values: Memory,
    scales: Memory,
    /// Of a message that is reduced for the reference.
    sums: Memory,
}

impl OnDevice {
    fn new(
        device: &Device,
        weight: &[u8],
        (most, all): (u64, usize),
    ) -> Result<Self, CollectiveError> {
        // Memory of no bytes cannot be had; scales are fewer than elements, of four bytes.
        let allocate = |bytes: u64| device.allocate(bytes.max(16));
        let this = Self {
            weight: allocate(weight.len() as u64)?,
            residual: allocate(all as u64)?,
            values: allocate(all as u64)?,
            scales: allocate(4 * most)?,
            sums: allocate(most)?,
        };
        this.weight.write(0, weight)?;
        Ok(this)
    }
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
        let weight = data(dtype, seed.wrapping_add(1), token);
        let on_device = match communicator.device() {
            Device::Cpu => None,
            device => Some(Box::new(OnDevice::new(device, &weight, (most, all))?)),
        };
        Ok(Self {
            call: communicator.all_reduce_rms_norm(options)?,
            sums: communicator.all_reduce(plain)?,
            on_device,
            quantise,
            dtype,
            weight,
            before: data(dtype, seed.wrapping_add(2), most as usize),
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
        let tokens = bytes as usize / self.weight.len().max(1);
        let all_reduce = self.call.all_reduce();
        match all_reduce.filter(|_| !self.call.is_one_launch(tokens)) {
            None => ONE_LAUNCH.to_owned(),
            Some(call) => call.explain(bytes).algorithm.to_string(),
        }
    }

    /// All choices for the sums.
    pub(super) fn chosen(&self) -> String {
        let all_reduce = self.call.all_reduce();
        all_reduce.map_or(ONE_LAUNCH.to_owned(), |call| call.selector().to_string())
    }

    /// The residual of a pair is what it was: a call adds to it.
    pub(super) fn reset(&mut self, at: Range<usize>) -> Result<(), CollectiveError> {
        let before = &self.before[..at.len()];
        match &self.on_device {
            None => self.residual[at].copy_from_slice(before),
            Some(device) => device.residual.write(at.start as u64, before)?,
        }
        Ok(())
    }

    /// One call on a GPU, on the buffers of a pair, of which the output lies at `at`, as the input does.
    pub(super) fn run_at(
        &mut self,
        input: &Memory,
        output: &Memory,
        at: Range<usize>,
    ) -> Result<(), CollectiveError> {
        let Some(device) = &self.on_device else {
            return Ok(());
        };
        let buffers = self.buffers(device, (input, output), &at);
        self.call.run_at(&buffers, at.len() / self.weight.len())
    }

    /// So many of those calls in a graph; none where they are not on a GPU.
    pub(super) fn record<'a>(
        &'a self,
        input: &'a Memory,
        output: &'a Memory,
        at: Range<usize>,
        calls: u32,
    ) -> Result<Option<RecordedNorm<'a>>, CollectiveError> {
        let Some(device) = &self.on_device else {
            return Ok(None);
        };
        let buffers = self.buffers(device, (input, output), &at);
        let tokens = at.len() / self.weight.len();
        Ok(Some(self.call.record_at(&buffers, tokens, calls)?))
    }

    fn buffers<'a>(
        &self,
        device: &'a OnDevice,
        (input, output): (&'a Memory, &'a Memory),
        at: &Range<usize>,
    ) -> NormBuffers<(&'a Memory, u64)> {
        let start = at.start as u64;
        let values = (&device.values, self.values_at(at).start as u64);
        let scales = (&device.scales, 0);
        let scales = match self.quantise {
            Quantise::None => None,
            Quantise::Tensor => Some(NormScales::Static(STATIC)),
            Quantise::Token => Some(NormScales::PerToken(scales)),
            Quantise::Group => Some(NormScales::PerGroup(scales)),
        };
        NormBuffers {
            input: (input, start),
            residual: Some((&device.residual, start)),
            weight: (&device.weight, 0),
            output: (output, start),
            quantised: scales.map(|scales| (values, scales)),
        }
    }

    /// Brings what a call on a GPU has left beside its output, which lies at `at`.
    pub(super) fn fetch(&mut self, at: &Range<usize>) -> Result<(), CollectiveError> {
        let (values, scales) = (self.values_at(at), self.scales_of(at.len()));
        let Some(device) = &self.on_device else {
            return Ok(());
        };
        device
            .residual
            .read(at.start as u64, &mut self.residual[at.clone()])?;
        device
            .values
            .read(values.start as u64, &mut self.values[values])?;
        let mut bytes = vec![0; 4 * scales.len()];
        device.scales.read(0, &mut bytes)?;
        for (scale, bytes) in self.scales[scales].iter_mut().zip(bytes.chunks_exact(4)) {
            *scale = bytes.try_into().map_or(f32::NAN, f32::from_le_bytes);
        }
        Ok(())
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
            _ => match &self.on_device {
                None => self.sums.run(input, &mut sums)?,
                Some(device) => {
                    device.sums.write(0, input)?;
                    let (at, bytes) = ((&device.sums, 0), input.len() as u64);
                    self.sums.run_at(at, at, bytes)?;
                    device.sums.read(0, &mut sums)?;
                }
            },
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
