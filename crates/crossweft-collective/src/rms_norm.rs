//! An all-reduce with what follows it in a transformer: residual addition, RMS normalisation, quantisation.

use std::time::Instant;

use crossweft_device::{DataType, ReduceOp};
use crossweft_hal::Device;
use crossweft_hal::cpu::Norm;
use crossweft_plan::Collective;

use crate::collective::{CollectiveOptions, PreparedCollective};
use crate::communicator::Communicator;
use crate::error::CollectiveError;

/// Elements that share a scale where quantisation is [by group](Scales::PerGroup).
pub const GROUP: usize = 128;

/// The largest number that a quantised element holds.
const LARGEST: f32 = 448.0;

/// Bytes that are reduced before they are normalised: they stay in the second-level cache.
const PIECE: usize = 256 << 10;

/// What a fused all-reduce is prepared for. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormOptions {
    /// Element type: f32, f16 or bf16.
    pub dtype: DataType,
    /// Elements of a token: a multiple of 8, from 8 to 16384.
    pub hidden: usize,
    /// What is added to the mean square, not negative.
    pub epsilon: f32,
    /// Tokens of a call, at most.
    pub max_tokens: usize,
}

impl RmsNormOptions {
    /// An epsilon of 1e-6.
    #[must_use]
    pub const fn new(dtype: DataType, hidden: usize, max_tokens: usize) -> Self {
        Self {
            dtype,
            hidden,
            epsilon: 1e-6,
            max_tokens,
        }
    }
}

/// The buffers of a call: tokens one behind another, each of `hidden` elements in native byte order, at any
/// alignment.
#[derive(Debug)]
pub struct RmsNormCall<'a> {
    /// This rank's part of the sums.
    pub input: &'a [u8],
    /// The residual stream, the same on every rank; replaced by its sum with the reduction.
    pub residual: Option<&'a mut [u8]>,
    /// One token's weights.
    pub weight: &'a [u8],
    /// The normalised tokens.
    pub output: &'a mut [u8],
    /// The same once more, quantised.
    pub quantised: Option<Quantised<'a>>,
}

/// Where quantised tokens go.
#[derive(Debug)]
pub struct Quantised<'a> {
    /// One byte an element: [`DataType::F8E4M3`].
    pub values: &'a mut [u8],
    /// What the values are to be multiplied by.
    pub scales: Scales<'a>,
}

/// Scales of quantised tokens.
#[derive(Debug)]
pub enum Scales<'a> {
    /// This one for all; above 0.
    Static(f32),
    /// One each token, which is written: `max(largest / 448, 1 / (448 * 512))`, with the token's largest magnitude.
    PerToken(&'a mut [f32]),
    /// One for each [`GROUP`] elements of a token, the last ones perhaps fewer, token by token, which is written:
    /// `max(largest, 1e-10) / 448`, with the group's largest magnitude.
    PerGroup(&'a mut [f32]),
}

/// A fused all-reduce that is ready to be called ([`Communicator::all_reduce_rms_norm`]).
#[derive(Debug)]
pub struct AllReduceRmsNorm {
    communicator: Communicator,
    options: RmsNormOptions,
    norm: Norm,
    all_reduce: PreparedCollective,
    /// Tokens that are reduced at a time.
    piece: usize,
}

impl AllReduceRmsNorm {
    pub(crate) fn prepare(
        communicator: &Communicator,
        options: RmsNormOptions,
    ) -> Result<Self, CollectiveError> {
        let usage = |reason| CollectiveError::Usage {
            rank: communicator.rank(),
            reason: format!("all-reduce with normalisation: {reason}"),
        };
        let RmsNormOptions {
            dtype,
            hidden,
            epsilon,
            max_tokens,
        } = options;
        let what = "preparing an all-reduce with normalisation";
        let statement =
            format!("tokens of {hidden} {dtype}, epsilon {epsilon:e}, up to {max_tokens}");
        let deadline = Instant::now() + communicator.timeout();
        communicator.endpoint().agree(&statement, what, deadline)?;
        let norm = Norm::new(dtype).ok_or_else(|| {
            usage(format!(
                "tokens of {dtype}; they may be of f32, f16 or bf16"
            ))
        })?;
        if !hidden.is_multiple_of(8) || !(8..=16_384).contains(&hidden) {
            let reason = format!("tokens of {hidden} elements; a multiple of 8 from 8 to 16384");
            return Err(usage(reason));
        }
        if !(epsilon >= 0.0 && epsilon.is_finite()) {
            return Err(usage(format!("an epsilon of {epsilon}")));
        }
        if !matches!(communicator.device(), Device::Cpu) {
            return Err(usage("it is for the CPU device only".to_owned()));
        }
        let token = hidden * dtype.size();
        let piece = (PIECE / token).clamp(1, max_tokens.max(1));
        let max_bytes = (piece * token) as u64;
        let all_reduce = CollectiveOptions::new(dtype, ReduceOp::Sum, max_bytes);
        Ok(Self {
            communicator: communicator.clone(),
            options,
            norm,
            all_reduce: communicator.collective(Collective::AllReduce, all_reduce)?,
            piece,
        })
    }

    /// What it was prepared for.
    #[must_use]
    pub fn options(&self) -> &RmsNormOptions {
        &self.options
    }

    /// The all-reduce that it begins with, of some tokens at a time.
    #[must_use]
    pub fn all_reduce(&self) -> &PreparedCollective {
        &self.all_reduce
    }

    /// Reduces, adds, normalises and quantises. All ranks must call it with as many tokens, and get the same bits if
    /// residuals, weights and scales are the same. Blocks until the output is complete.
    ///
    /// # Errors
    /// [`CollectiveError::Usage`] if buffers do not fit, with nothing done; otherwise as
    /// [`PreparedCollective::run`], after which everything written is undefined.
    pub fn run(&self, call: RmsNormCall<'_>) -> Result<(), CollectiveError> {
        let token = self.check(&call)?;
        let RmsNormCall {
            input,
            mut residual,
            weight,
            output,
            mut quantised,
        } = call;
        let piece = self.piece * token;
        let pieces = input.chunks(piece).zip(output.chunks_mut(piece));
        for (number, (input, output)) in pieces.enumerate() {
            self.all_reduce.run(input, output)?;
            let first = number * self.piece;
            for (index, x) in (first..).zip(output.chunks_exact_mut(token)) {
                let residual = residual.as_deref_mut();
                let residual = residual.map(|all| &mut all[index * token..][..token]);
                self.norm.token(x, residual, weight, self.options.epsilon);
                if let Some(quantised) = &mut quantised {
                    self.quantise(index, x, quantised);
                }
            }
        }
        Ok(())
    }

    /// Quantises token `index`.
    fn quantise(&self, index: usize, x: &[u8], to: &mut Quantised<'_>) {
        let hidden = self.options.hidden;
        let values = &mut to.values[index * hidden..][..hidden];
        match &mut to.scales {
            Scales::Static(scale) => self.norm.quantise(x, *scale, values),
            Scales::PerToken(scales) => {
                let scale = (self.norm.largest(x) / LARGEST).max(1.0 / (LARGEST * 512.0));
                scales[index] = scale;
                self.norm.quantise(x, scale, values);
            }
            Scales::PerGroup(scales) => {
                let of_token = hidden.div_ceil(GROUP);
                let scales = &mut scales[index * of_token..][..of_token];
                let groups = x.chunks(GROUP * self.options.dtype.size());
                for ((x, values), scale) in groups.zip(values.chunks_mut(GROUP)).zip(scales) {
                    *scale = self.norm.largest(x).max(1e-10) / LARGEST;
                    self.norm.quantise(x, *scale, values);
                }
            }
        }
    }

    /// Whether the buffers fit together; returns the bytes of a token.
    fn check(&self, call: &RmsNormCall<'_>) -> Result<usize, CollectiveError> {
        let RmsNormOptions {
            dtype,
            hidden,
            max_tokens,
            ..
        } = self.options;
        let token = hidden * dtype.size();
        let bytes = call.input.len();
        let tokens = bytes / token;
        let expect = |what: &str, found: usize, expected: usize| match found == expected {
            true => Ok(()),
            false => Err(self.usage(format!(
                "{what} has {found}, not {expected}, for {tokens} tokens of {hidden} {dtype}"
            ))),
        };
        expect("the input in bytes", bytes, tokens * token)?;
        expect("the output in bytes", call.output.len(), bytes)?;
        expect("the weight in bytes", call.weight.len(), token)?;
        if let Some(residual) = &call.residual {
            expect("the residual in bytes", residual.len(), bytes)?;
        }
        if let Some(Quantised { values, scales }) = &call.quantised {
            expect("the quantised output", values.len(), tokens * hidden)?;
            match scales {
                Scales::Static(scale) if !(*scale > 0.0 && scale.is_finite()) => {
                    return Err(self.usage(format!("a scale of {scale}")));
                }
                Scales::Static(_) => {}
                Scales::PerToken(scales) => expect("the scales", scales.len(), tokens)?,
                Scales::PerGroup(scales) => {
                    expect("the scales", scales.len(), tokens * hidden.div_ceil(GROUP))?;
                }
            }
        }
        match tokens > max_tokens {
            true => Err(self.usage(format!(
                "{tokens} tokens; it was prepared for up to {max_tokens}"
            ))),
            false => Ok(token),
        }
    }

    fn usage(&self, reason: String) -> CollectiveError {
        CollectiveError::Usage {
            rank: self.communicator.rank(),
            reason: format!("all-reduce with normalisation: {reason}"),
        }
    }
}
