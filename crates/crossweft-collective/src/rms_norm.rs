//! An all-reduce with what follows it in a transformer: residual addition, RMS normalisation, quantisation.

use std::time::Instant;

use crossweft_device::norm::{group_scale, token_scale};
use crossweft_device::{DataType, ReduceOp};
use crossweft_executor::{Behind, NormBuffers, RecordedNorm, TokenNorm, Tokens};
use crossweft_hal::cpu::Norm;
use crossweft_hal::{Device, Memory};
use crossweft_plan::Collective;

use crate::algorithm::Algorithm;
use crate::collective::{CollectiveOptions, PreparedCollective};
use crate::communicator::Communicator;
use crate::error::CollectiveError;
use crate::selector::{Place, gpu_one_shot_max};

/// Elements that share a scale where quantisation is [by group](Scales::PerGroup).
pub use crossweft_device::norm::GROUP;

/// Bytes that are reduced before they are normalised: they stay in the second-level cache.
const PIECE: usize = 256 << 10;

/// Bytes that a GPU sums and normalises in one launch, at most: each rank sends them to every other in packets, which are
/// twice as large. Two H200, tokens of 4096, in one launch and in two: 16 in 6.5 and 6.8 us, 32 in 8.1 and 8.0, 64 in 10.3 and
/// 8.2; of 8192: 8 in 7.6 and 7.7, 16 in 9.1 and 8.7.
const ONE_LAUNCH_MOST: u64 = 128 << 10;

/// What a fused all-reduce is prepared for. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormOptions {
    /// Element type: f32, f16 or bf16.
    pub dtype: DataType,
    /// Elements of a token: a multiple of 8, from 8 to 16384.
    pub hidden: usize,
    /// What is added to the mean square, not negative.
    pub epsilon: f32,
    /// Tokens of a call, at most: fewer than 2^32.
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
    machine: Machine,
    /// None where every call is one launch.
    all_reduce: Option<PreparedCollective>,
}

/// What normalises.
#[derive(Debug)]
enum Machine {
    Cpu {
        norm: Norm,
        /// Tokens that are reduced at a time.
        piece: usize,
    },
    Cuda(TokenNorm),
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
        if u32::try_from(max_tokens).is_err() {
            return Err(usage(format!(
                "{max_tokens} tokens in a call; fewer than 2^32 fit"
            )));
        }
        let token = hidden * dtype.size();
        let (machine, at_once) = match communicator.device() {
            Device::Cpu => {
                let piece = (PIECE / token).clamp(1, max_tokens.max(1));
                (Machine::Cpu { norm, piece }, piece)
            }
            _ => {
                let norm = on_gpu(communicator, &options, deadline)?;
                (Machine::Cuda(norm), max_tokens.max(1))
            }
        };
        let max_bytes = (at_once as u64).saturating_mul(token as u64);
        let is_needed = match &machine {
            Machine::Cpu { .. } => true,
            Machine::Cuda(norm) => max_bytes > norm.one_launch_most(),
        };
        let all_reduce = CollectiveOptions::new(dtype, ReduceOp::Sum, max_bytes).deterministic();
        let all_reduce =
            is_needed.then(|| communicator.collective(Collective::AllReduce, all_reduce));
        Ok(Self {
            communicator: communicator.clone(),
            options,
            machine,
            all_reduce: all_reduce.transpose()?,
        })
    }

    /// What it was prepared for.
    #[must_use]
    pub fn options(&self) -> &RmsNormOptions {
        &self.options
    }

    /// The all-reduce that calls begin with, of some tokens at a time, but where they are
    /// [one launch](Self::is_one_launch); none if all are.
    #[must_use]
    pub fn all_reduce(&self) -> Option<&PreparedCollective> {
        self.all_reduce.as_ref()
    }

    /// Whether a call of `tokens` tokens is one launch on a GPU, if its buffers are aligned to 16 bytes, and the quantised
    /// ones to 8: a sum by one hop of packets, and what follows it, in one kernel.
    #[must_use]
    pub fn is_one_launch(&self, tokens: usize) -> bool {
        let bytes = tokens as u64 * self.token_bytes();
        matches!(&self.machine, Machine::Cuda(norm) if bytes <= norm.one_launch_most())
    }

    /// How a call of `tokens` tokens is done, for people.
    #[must_use]
    pub fn explain(&self, tokens: usize) -> String {
        let bytes = tokens as u64 * self.token_bytes();
        let choice = self.all_reduce.as_ref().map(|one| one.explain(bytes));
        let Some(choice) = choice.filter(|_| !self.is_one_launch(tokens)) else {
            return "one-shot with normalisation, one launch (two where buffers are not aligned to 16 B)"
                .to_owned();
        };
        let then = match &self.machine {
            Machine::Cpu { .. } => "token by token",
            Machine::Cuda(_) => "in a launch behind it",
        };
        format!(
            "{} ({}), then normalisation {then}",
            choice.algorithm, choice.reason
        )
    }

    fn token_bytes(&self) -> u64 {
        (self.options.hidden * self.options.dtype.size()) as u64
    }

    /// What launches calls of `tokens` tokens on a CUDA device
    /// ([`TokenNorm::launch_on_cuda`](crossweft_executor::TokenNorm::launch_on_cuda)), with the all-reduce that it may need.
    /// For callers who have a stream of their own.
    ///
    /// # Errors
    /// [`CollectiveError::Usage`] if it is not on a CUDA device, or for fewer tokens.
    pub fn on_cuda(
        &self,
        tokens: usize,
    ) -> Result<(&TokenNorm, Option<Behind<'_>>), CollectiveError> {
        let Machine::Cuda(norm) = &self.machine else {
            let reason = "it is on the CPU device; call `run` with host memory";
            return Err(self.usage(reason.to_owned()));
        };
        self.check_tokens(tokens)?;
        let bytes = tokens as u64 * self.token_bytes();
        let selected = self.all_reduce.as_ref().map(|one| one.select(bytes));
        let behind = selected.transpose()?;
        let behind = behind.map(|(plan, piece)| Behind {
            plan,
            piece: piece as u64,
        });
        Ok((norm, behind))
    }

    /// [`run`](Self::run) on memory of this rank's CUDA device, each with an offset, of `tokens` tokens. Blocks until the
    /// output is complete.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_at(
        &self,
        buffers: &NormBuffers<(&Memory, u64)>,
        tokens: usize,
    ) -> Result<(), CollectiveError> {
        let (norm, behind) = self.on_cuda(tokens)?;
        let limit = self.communicator.timeout();
        Ok(norm.run_at(behind, buffers, tokens as u32, limit)?)
    }

    /// Records `calls` calls of [`run_at`](Self::run_at) into a CUDA graph.
    ///
    /// # Errors
    /// As for [`run_at`](Self::run_at).
    pub fn record_at<'a>(
        &'a self,
        buffers: &NormBuffers<(&'a Memory, u64)>,
        tokens: usize,
        calls: u32,
    ) -> Result<RecordedNorm<'a>, CollectiveError> {
        let (norm, behind) = self.on_cuda(tokens)?;
        let limit = self.communicator.timeout();
        Ok(norm.record_at(behind, buffers, (tokens as u32, calls), limit)?)
    }

    /// Whether every launch on a CUDA stream that has ended, ended well. Ask after the stream has come to its end.
    ///
    /// # Errors
    /// [`CollectiveError::Executor`] with the first wait that was ended on the device.
    pub fn check(&self) -> Result<(), CollectiveError> {
        if let Machine::Cuda(norm) = &self.machine {
            norm.check()?;
        }
        self.all_reduce
            .as_ref()
            .map_or(Ok(()), PreparedCollective::check)
    }

    /// Ends the waits of all launches on a CUDA device, as `Prepared::end_waits` does.
    pub fn end_waits(&self) {
        if let Machine::Cuda(norm) = &self.machine {
            norm.end_waits();
        }
        if let Some(all_reduce) = &self.all_reduce {
            all_reduce.end_waits();
        }
    }

    /// Reduces, adds, normalises and quantises host memory, on the CPU device. All ranks must call it with as many tokens, and get the same bits if
    /// residuals, weights and scales are the same. Blocks until the output is complete.
    ///
    /// # Errors
    /// [`CollectiveError::Usage`] if buffers do not fit, with nothing done; otherwise as
    /// [`PreparedCollective::run`], after which everything written is undefined.
    pub fn run(&self, call: RmsNormCall<'_>) -> Result<(), CollectiveError> {
        let (
            Machine::Cpu {
                norm,
                piece: tokens,
            },
            Some(all_reduce),
        ) = (&self.machine, &self.all_reduce)
        else {
            let reason = "the buffers are host memory, it is on a CUDA device; give memory of that";
            return Err(self.usage(reason.to_owned()));
        };
        let token = self.check_call(&call)?;
        let RmsNormCall {
            input,
            mut residual,
            weight,
            output,
            mut quantised,
        } = call;
        let piece = tokens * token;
        let pieces = input.chunks(piece).zip(output.chunks_mut(piece));
        for (number, (input, output)) in pieces.enumerate() {
            all_reduce.run(input, output)?;
            let first = number * tokens;
            for (index, x) in (first..).zip(output.chunks_exact_mut(token)) {
                let residual = residual.as_deref_mut();
                let residual = residual.map(|all| &mut all[index * token..][..token]);
                norm.token(x, residual, weight, self.options.epsilon);
                if let Some(quantised) = &mut quantised {
                    self.quantise(norm, (index, x), quantised);
                }
            }
        }
        Ok(())
    }

    /// Quantises token `index`.
    fn quantise(&self, norm: &Norm, (index, x): (usize, &[u8]), to: &mut Quantised<'_>) {
        let hidden = self.options.hidden;
        let values = &mut to.values[index * hidden..][..hidden];
        match &mut to.scales {
            Scales::Static(scale) => norm.quantise(x, *scale, values),
            Scales::PerToken(scales) => {
                let scale = token_scale(norm.largest(x));
                scales[index] = scale;
                norm.quantise(x, scale, values);
            }
            Scales::PerGroup(scales) => {
                let of_token = hidden.div_ceil(GROUP);
                let scales = &mut scales[index * of_token..][..of_token];
                let groups = x.chunks(GROUP * self.options.dtype.size());
                for ((x, values), scale) in groups.zip(values.chunks_mut(GROUP)).zip(scales) {
                    *scale = group_scale(norm.largest(x));
                    norm.quantise(x, *scale, values);
                }
            }
        }
    }

    /// Whether the buffers fit together; returns the bytes of a token.
    fn check_call(&self, call: &RmsNormCall<'_>) -> Result<usize, CollectiveError> {
        let RmsNormOptions { dtype, hidden, .. } = self.options;
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
        self.check_tokens(tokens)?;
        Ok(token)
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), CollectiveError> {
        let max_tokens = self.options.max_tokens;
        match tokens > max_tokens {
            true => Err(self.usage(format!(
                "{tokens} tokens; it was prepared for up to {max_tokens}"
            ))),
            false => Ok(()),
        }
    }

    fn usage(&self, reason: String) -> CollectiveError {
        CollectiveError::Usage {
            rank: self.communicator.rank(),
            reason: format!("all-reduce with normalisation: {reason}"),
        }
    }
}

/// What normalises on a GPU, with a one-shot plan where calls may be small enough for one. Collective.
fn on_gpu(
    communicator: &Communicator,
    options: &RmsNormOptions,
    deadline: Instant,
) -> Result<TokenNorm, CollectiveError> {
    let RmsNormOptions {
        dtype,
        hidden,
        epsilon,
        max_tokens,
    } = *options;
    let tokens = Tokens {
        dtype,
        hidden: hidden as u32,
        epsilon,
    };
    let ranks = communicator.world_size();
    let most = gpu_one_shot_max(Collective::AllReduce, ranks, Place::Private).min(ONE_LAUNCH_MOST);
    let most = (most / tokens.bytes()).min(max_tokens as u64) * tokens.bytes();
    // Elements of 32 bits have no kernel for both.
    let is_for = most > 0 && ranks > 1 && dtype.size() == 2;
    let plan = match is_for {
        true => Some(Algorithm::OneShot.plan(ranks, 1)?),
        false => None,
    };
    let one_shot = plan.as_ref().map(|plan| (plan, most));
    let endpoint = communicator.endpoint();
    Ok(TokenNorm::prepare(endpoint, tokens, one_shot, deadline)?)
}
