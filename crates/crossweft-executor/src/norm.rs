//! RMS normalisation of tokens on a GPU: behind an all-reduce on the same stream, or, for few tokens, in one kernel with a
//! one-shot plan.
//!
//! The kernel in one piece sends the plan's packets to the plan's places, so a rank whose buffers are not aligned for it can
//! run the plan and normalise in a second launch while others take one.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossweft_channel::Endpoint;
use crossweft_device::DataType;
use crossweft_device::norm::GROUP;
use crossweft_hal::cuda::{Argument, Context, CudaError, Kernel, Shape, Stream};
use crossweft_hal::{Device, HalError, Memory};
use crossweft_kernels::norm::{entries, threads_of};
use crossweft_kernels::{Module, Norm, OneShotNorm, Quantisation, norm_module};
use crossweft_net::LONGEST_TIMEOUT;
use crossweft_plan::Plan;

use crate::ExecutorError;
use crate::cuda::Replays;
use crate::kernels::Entry;
use crate::launch::RawBuffers;
use crate::prepared::{Machine, Options, Prepared};

/// What tokens are, and how they are normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tokens {
    /// Element type: f32, f16 or bf16.
    pub dtype: DataType,
    /// Elements of a token: a multiple of 8, at most 16384.
    pub hidden: u32,
    /// What is added to the mean square.
    pub epsilon: f32,
}

impl Tokens {
    /// Bytes of a token.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.hidden) * self.dtype.size() as u64
    }
}

/// Where a call's tokens are, each place a `P`: an address of the rank's device, or a memory and an offset in it.
/// Aligned to an element at least.
#[derive(Clone, Copy, Debug)]
pub struct NormBuffers<P> {
    /// This rank's part of the sums.
    pub input: P,
    /// The residual stream, the same on every rank; replaced by its sum with the reduction.
    pub residual: Option<P>,
    /// One token's weights.
    pub weight: P,
    /// Where the normalised tokens go: the input's place, or no overlap with it.
    pub output: P,
    /// Where quantised tokens go, one byte an element, and their scales.
    pub quantised: Option<(P, NormScales<P>)>,
}

/// Scales of quantised tokens: see [`crossweft_device::norm`].
#[derive(Clone, Copy, Debug)]
pub enum NormScales<P> {
    /// This one for all.
    Static(f32),
    /// One f32 each token, which is written.
    PerToken(P),
    /// One f32 each group of each token, which is written.
    PerGroup(P),
}

impl<P: Copy> NormBuffers<P> {
    /// The same with each place as `of` has it: of that name, with elements of so many bytes, as many of them.
    fn locate<Q, E>(
        &self,
        tokens: &Tokens,
        count: u64,
        mut of: impl FnMut(&'static str, P, u64, u64) -> Result<Q, E>,
    ) -> Result<NormBuffers<Q>, E> {
        let hidden = u64::from(tokens.hidden);
        let (size, elements) = (tokens.dtype.size() as u64, count * hidden);
        let quantised = match self.quantised {
            None => None,
            Some((values, scales)) => {
                let values = of("quantised output", values, 1, elements)?;
                let scales = match scales {
                    NormScales::Static(scale) => NormScales::Static(scale),
                    NormScales::PerToken(scales) => {
                        NormScales::PerToken(of("scale", scales, 4, count)?)
                    }
                    NormScales::PerGroup(scales) => {
                        let groups = count * hidden.div_ceil(GROUP as u64);
                        NormScales::PerGroup(of("scale", scales, 4, groups)?)
                    }
                };
                Some((values, scales))
            }
        };
        let residual = match self.residual {
            None => None,
            Some(residual) => Some(of("residual", residual, size, elements)?),
        };
        Ok(NormBuffers {
            input: of("input", self.input, size, elements)?,
            residual,
            weight: of("weight", self.weight, size, hidden)?,
            output: of("output", self.output, size, elements)?,
            quantised,
        })
    }
}

/// The all-reduce of calls that are too large for one launch.
#[derive(Clone, Copy, Debug)]
pub struct Behind<'a> {
    /// Its plan.
    pub plan: &'a Prepared,
    /// Bytes that it takes at a time.
    pub piece: u64,
}

/// Normalisation that is ready to be launched behind all-reduces, or with one-shot ones.
#[derive(Debug)]
pub struct TokenNorm {
    rank: u32,
    tokens: Tokens,
    kernel: Kernel,
    /// Thread blocks that the device holds.
    most_blocks: u32,
    one_shot: Option<OneShotKernel>,
}

/// A one-shot plan, and the kernel that runs it and normalises.
#[derive(Debug)]
struct OneShotKernel {
    plan: Arc<Prepared>,
    kernel: Kernel,
    /// Thread blocks of which the device holds as many for each rank on it.
    most_blocks: u32,
}

/// What a call does.
#[derive(Clone, Copy, Debug)]
enum Way<'a> {
    /// One launch, if buffers are aligned; else the plan's and another.
    OneShot(&'a OneShotKernel),
    /// The all-reduce that the caller has chosen, then another launch.
    Behind(Behind<'a>),
}

impl<'a> Way<'a> {
    /// What sums.
    fn plan(self) -> &'a Prepared {
        match self {
            Self::OneShot(one) => &one.plan,
            Self::Behind(behind) => behind.plan,
        }
    }
}

/// What errors call it, where no plan is concerned.
const NAME: &str = "rms-norm";

/// Whether addresses are aligned, and a given scale is one.
fn check_call(
    tokens: &Tokens,
    plan: &Prepared,
    buffers: &NormBuffers<u64>,
) -> Result<(), ExecutorError> {
    if let Some((_, NormScales::Static(scale))) = buffers.quantised
        && !(scale > 0.0 && scale.is_finite())
    {
        return Err(plan.usage(format!("a scale of {scale}")));
    }
    let all = buffers.locate(tokens, 1, |what, address, size, _| {
        match address.is_multiple_of(size) {
            true => Ok(()),
            false => Err(plan.usage(format!(
                "the {what} lies at {address:#x}, which is not aligned to its elements of {size} bytes"
            ))),
        }
    });
    all.map(drop)
}

impl TokenNorm {
    /// Prepares it for a CUDA device, with a one-shot plan for messages of up to so many bytes, or without one. Collective;
    /// blocks.
    ///
    /// # Errors
    /// As for [`Prepared::prepare`]; [`ExecutorError::Hal`] if the device, or the element type, has no kernel.
    pub fn prepare(
        endpoint: &Arc<Endpoint>,
        tokens: Tokens,
        one_shot: Option<(&Plan, u64)>,
        deadline: Instant,
    ) -> Result<Self, ExecutorError> {
        let one_shot = match one_shot {
            None => None,
            Some((plan, most)) => {
                let mut options = Options::new(tokens.dtype, crossweft_device::ReduceOp::Sum, most);
                options.lines = false;
                Some(Prepared::prepare(endpoint, plan, options, deadline)?)
            }
        };
        let channel = |source| ExecutorError::Channel {
            plan: NAME.to_owned(),
            source,
        };
        let loaded = load(endpoint, &tokens, one_shot.is_some());
        let loaded = loaded.map_err(|source| ExecutorError::Hal {
            plan: NAME.to_owned(),
            source,
        });
        let what = "preparing normalisation";
        let (alone, with) = endpoint.settle(loaded, what, deadline, channel)?;
        let (kernel, most_blocks) = alone;
        Ok(Self {
            rank: endpoint.rank(),
            tokens,
            kernel,
            most_blocks,
            one_shot: one_shot.zip(with).map(|(plan, (kernel, resident))| {
                let most_blocks = resident / endpoint.sharers().max(1);
                let most_blocks = most_blocks.clamp(1, endpoint.waiting_blocks());
                OneShotKernel {
                    plan,
                    kernel,
                    most_blocks,
                }
            }),
        })
    }

    /// The largest message that takes one launch, in bytes; 0 if none does.
    #[must_use]
    pub fn one_launch_most(&self) -> u64 {
        let one_shot = self.one_shot.as_ref();
        one_shot.map_or(0, |one_shot| one_shot.plan.max_bytes())
    }

    /// Whether every launch that has ended, ended well, of those that took one launch. Ask after the stream has come to
    /// its end.
    ///
    /// # Errors
    /// As for [`Prepared::check`].
    pub fn check(&self) -> Result<(), ExecutorError> {
        let one_shot = self.one_shot.as_ref();
        one_shot.map_or(Ok(()), |one_shot| one_shot.plan.check())
    }

    /// Ends the waits of all launches that take one launch, as [`Prepared::end_waits`] does.
    pub fn end_waits(&self) {
        if let Some(one_shot) = &self.one_shot {
            one_shot.plan.end_waits();
        }
    }

    /// Sums, adds, normalises and quantises `count` tokens, in the order of a CUDA stream, which may be recording a graph;
    /// returns at once. `behind` is the all-reduce for messages that are too large for one launch, if there may be such.
    /// What goes wrong on the device shows up in its, or this one's, [`check`](Self::check). Waits there
    /// end `limit` after a kernel began.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if an address is not aligned to its elements, or a scale not above 0; as for
    /// [`Prepared::launch_on_cuda`].
    ///
    /// # Safety
    /// All must be memory of the device, of as many elements as the tokens have, which nobody else uses until the launch
    /// has ended; what is written overlaps nothing else, but the output may be the input. Weights may be read by others.
    /// This and `behind` must be kept until the launch, and any graph that it was recorded into, is done with, and launches
    /// must follow one another.
    pub unsafe fn launch_on_cuda(
        &self,
        stream: &Stream,
        behind: Option<Behind<'_>>,
        buffers: &NormBuffers<u64>,
        count: u32,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let bytes = self.tokens.bytes() * u64::from(count);
        if bytes == 0 {
            return Ok(());
        }
        let way = self.way(bytes, behind)?;
        check_call(&self.tokens, way.plan(), buffers)?;
        let norm = self.norm(buffers, count);
        // SAFETY: the caller's promise.
        unsafe {
            match way {
                Way::OneShot(one) => {
                    one.plan.check_bytes(bytes)?;
                    let raw = raw(buffers, 0, bytes);
                    let launched = one.plan.with_cuda(stream, limit, |launcher| {
                        let launch = raw.launch();
                        let one_shot = launcher.one_shot(&one.plan.program, &launch, limit);
                        match one_shot.filter(|_| norm.aligned != 0) {
                            None => Ok(false),
                            Some(one_shot) => {
                                one.launch(stream, OneShotNorm { one_shot, norm })?;
                                Ok(true)
                            }
                        }
                    })?;
                    if launched {
                        return Ok(());
                    }
                    one.plan.launch_on_cuda(stream, &raw, limit)?;
                }
                Way::Behind(Behind { plan, piece }) => {
                    let mut done = 0;
                    while done < bytes {
                        let part = (bytes - done).min(piece.max(1));
                        plan.launch_on_cuda(stream, &raw(buffers, done, part), limit)?;
                        done += part;
                    }
                }
            }
            self.launch(stream, &norm)
                .map_err(|error| way.plan().device(error))
        }
    }

    /// The same on memory, each with an offset; blocks until it is done. Memories may be the same where ranges do not
    /// overlap.
    ///
    /// # Errors
    /// [`ExecutorError::Usage`] if a range does not lie in its memory, or memory is not of the rank's device; otherwise as
    /// for [`Prepared::run_at`], after which everything written is undefined.
    pub fn run_at(
        &self,
        behind: Option<Behind<'_>>,
        buffers: &NormBuffers<(&Memory, u64)>,
        count: u32,
        limit: Duration,
    ) -> Result<(), ExecutorError> {
        let bytes = self.tokens.bytes() * u64::from(count);
        let way = self.way(bytes, behind)?;
        let addresses = self.addresses(way.plan(), buffers, count)?;
        if bytes == 0 {
            return Ok(());
        }
        check_call(&self.tokens, way.plan(), &addresses)?;
        let norm = self.norm(&addresses, count);
        let Behind { plan, piece } = match way {
            Way::Behind(behind) => behind,
            Way::OneShot(one) => {
                let plan = &one.plan;
                let launch = raw(&addresses, 0, bytes).launch();
                return plan.in_turn(bytes, limit, |machine, guard| {
                    let Machine::Cuda(launcher) = machine else {
                        return Err(plan.usage("it was prepared for the CPU device".to_owned()));
                    };
                    plan.launch_and_wait(launcher, limit, guard, |stream| {
                        let one_shot = launcher.one_shot(&plan.program, &launch, limit);
                        match one_shot.filter(|_| norm.aligned != 0) {
                            // SAFETY: the ranges lie in memories of the device, which the caller keeps until this
                            // returns.
                            Some(one_shot) => unsafe {
                                one.launch(stream, OneShotNorm { one_shot, norm })
                            },
                            // SAFETY: as above.
                            None => unsafe {
                                plan.enqueue(launcher, stream, &launch, limit)?;
                                self.launch(stream, &norm)
                            },
                        }
                    })
                });
            }
        };
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(piece.max(1));
            let at = |(memory, offset): (_, u64)| (memory, offset + done);
            plan.run_at(at(buffers.input), at(buffers.output), part, limit)?;
            done += part;
        }
        let device = |error| plan.device(error);
        let stream = Stream::new(self.kernel.context()).map_err(device)?;
        // SAFETY: as above.
        unsafe { self.launch(&stream, &norm) }.map_err(device)?;
        let deadline = Instant::now() + limit.min(LONGEST_TIMEOUT);
        stream.synchronize(deadline).map_err(device)
    }

    /// Records `calls` calls of [`run_at`](Self::run_at) into a CUDA graph.
    ///
    /// # Errors
    /// As for [`run_at`](Self::run_at).
    pub fn record_at<'a>(
        &'a self,
        behind: Option<Behind<'a>>,
        buffers: &NormBuffers<(&'a Memory, u64)>,
        (count, calls): (u32, u32),
        limit: Duration,
    ) -> Result<RecordedNorm<'a>, ExecutorError> {
        let way = self.way(self.tokens.bytes() * u64::from(count), behind)?;
        let addresses = self.addresses(way.plan(), buffers, count)?;
        let replays = Replays::record(self.kernel.context(), (calls, limit), |stream, _| {
            // SAFETY: the ranges lie in memories of the device, which the caller keeps as long as what is returned.
            unsafe { self.launch_on_cuda(stream, behind, &addresses, count, limit) }
                .map_err(Recording::Launch)
        });
        let replays = replays.map_err(|error| match error {
            Recording::Launch(error) => error,
            Recording::Driver(error) => way.plan().device(error),
        })?;
        Ok(RecordedNorm {
            norm: self,
            plan: way.plan(),
            launches: self.launches(behind, count),
            limit,
            replays,
        })
    }

    /// Launches of a call, at most.
    fn launches(&self, behind: Option<Behind<'_>>, count: u32) -> u32 {
        let piece = behind.map_or(u64::MAX, |behind| behind.piece.max(1));
        let bytes = self.tokens.bytes() * u64::from(count);
        bytes.div_ceil(piece).max(1) as u32 + 1
    }

    /// Where memories and offsets are, if ranges lie in them.
    fn addresses(
        &self,
        plan: &Prepared,
        buffers: &NormBuffers<(&Memory, u64)>,
        count: u32,
    ) -> Result<NormBuffers<u64>, ExecutorError> {
        buffers.locate(
            &self.tokens,
            count.into(),
            |what, (memory, offset), size, elements| {
                plan.check_device(what, memory)?;
                plan.check_range(what, memory.bytes(), offset, 1, size * elements)?;
                Ok(memory.addr() + offset)
            },
        )
    }

    /// The same on every rank.
    fn way<'a>(&'a self, bytes: u64, behind: Option<Behind<'a>>) -> Result<Way<'a>, ExecutorError> {
        match (&self.one_shot, behind) {
            (Some(one_shot), _) if bytes <= one_shot.plan.max_bytes() => Ok(Way::OneShot(one_shot)),
            (_, Some(behind)) => Ok(Way::Behind(behind)),
            (_, None) => Err(ExecutorError::Usage {
                plan: NAME.to_owned(),
                rank: self.rank,
                reason: format!(
                    "{bytes} bytes; one launch takes up to {}, and there is no all-reduce for more",
                    self.one_launch_most()
                ),
            }),
        }
    }

    fn norm(&self, buffers: &NormBuffers<u64>, count: u32) -> Norm {
        let NormBuffers {
            residual,
            weight,
            output,
            quantised,
            ..
        } = *buffers;
        let residual = residual.unwrap_or(0);
        let (values, quantisation, scales, scale) = match quantised {
            None => (0, Quantisation::None, 0, 0.0),
            Some((values, NormScales::Static(scale))) => (values, Quantisation::Static, 0, scale),
            Some((values, NormScales::PerToken(to))) => (values, Quantisation::PerToken, to, 0.0),
            Some((values, NormScales::PerGroup(to))) => (values, Quantisation::PerGroup, to, 0.0),
        };
        let aligned = (output | residual | weight).is_multiple_of(16) && values.is_multiple_of(8);
        Norm {
            output,
            residual,
            weight,
            values,
            scales,
            tokens: count,
            hidden: self.tokens.hidden,
            epsilon: self.tokens.epsilon,
            scale,
            quantisation,
            aligned: aligned.into(),
        }
    }

    /// Launches what normalises tokens that have been summed.
    ///
    /// # Safety
    /// As for [`launch_on_cuda`](Self::launch_on_cuda).
    unsafe fn launch(&self, stream: &Stream, norm: &Norm) -> Result<(), CudaError> {
        let blocks = norm.tokens.min(self.most_blocks);
        let shape = Shape::linear(blocks, threads_of(norm.hidden));
        // SAFETY: this is the kernel's parameter; the rest is the caller's promise.
        unsafe { self.kernel.launch(stream, &shape, &[Argument::from(norm)]) }
    }
}

/// Calls in a CUDA graph, as [`Recorded`](crate::Recorded) has them of plans.
#[derive(Debug)]
pub struct RecordedNorm<'a> {
    norm: &'a TokenNorm,
    /// What sums.
    plan: &'a Prepared,
    /// Launches of a call, at most.
    launches: u32,
    /// How long each may take.
    limit: Duration,
    replays: Replays,
}

/// A replay of those that has been started. To drop it is to wait for its end: it uses what is freed next.
#[derive(Debug)]
pub struct ReplayNorm<'a> {
    recorded: &'a RecordedNorm<'a>,
    /// None when it has been waited for.
    stream: Option<Stream>,
}

/// What goes wrong while calls are recorded.
enum Recording {
    Driver(CudaError),
    Launch(ExecutorError),
}

impl From<CudaError> for Recording {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}

impl RecordedNorm<'_> {
    /// Starts a replay: one call that lines the ranks up, then those that are timed. Returns at once.
    ///
    /// # Errors
    /// [`ExecutorError::Poisoned`], [`ExecutorError::Device`].
    pub fn start(&self) -> Result<ReplayNorm<'_>, ExecutorError> {
        self.plan.check_whole()?;
        // SAFETY: memories and plans are borrowed for as long as this lives; launches follow one another.
        let started = unsafe { self.replays.start() };
        Ok(ReplayNorm {
            recorded: self,
            stream: Some(started.map_err(|error| self.plan.device(error))?),
        })
    }
}

impl ReplayNorm<'_> {
    /// Waits for the replay to end, `limit` for each launch; returns the device's time for one of its calls.
    ///
    /// # Errors
    /// [`ExecutorError::Interrupted`] if a wait on the device was ended; [`ExecutorError::Device`].
    pub fn finish(mut self, limit: Duration) -> Result<Duration, ExecutorError> {
        self.end(limit)?;
        let RecordedNorm {
            norm,
            plan,
            replays,
            ..
        } = self.recorded;
        norm.check()?;
        plan.check()?;
        replays.time().map_err(|error| plan.device(error))
    }

    fn end(&mut self, limit: Duration) -> Result<(), ExecutorError> {
        let Some(stream) = self.stream.take() else {
            return Ok(());
        };
        let RecordedNorm {
            plan,
            replays,
            launches,
            ..
        } = self.recorded;
        plan.wait_for(stream, replays.limit(limit, *launches))
    }
}

impl Drop for ReplayNorm<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end(self.recorded.limit) {
            tracing::warn!(%error, "a replay was dropped that does not end");
        }
    }
}

impl OneShotKernel {
    /// # Safety
    /// As for [`TokenNorm::launch_on_cuda`].
    unsafe fn launch(&self, stream: &Stream, mut parameter: OneShotNorm) -> Result<(), CudaError> {
        let norm = &parameter.norm;
        let blocks = norm.tokens.min(self.most_blocks);
        let shape = Shape::linear(blocks, threads_of(norm.hidden));
        parameter.one_shot.counters.blocks = blocks.into();
        // SAFETY: this is the kernel's parameter; as many blocks are resident; the rest is the caller's promise.
        unsafe {
            self.kernel
                .launch(stream, &shape, &[Argument::from(&parameter)])
        }
    }
}

/// The reduction's part of a call, from `at` on.
fn raw(buffers: &NormBuffers<u64>, at: u64, bytes: u64) -> RawBuffers {
    RawBuffers {
        input: buffers.input + at,
        output: buffers.output + at,
        input_offset: 0,
        output_offset: 0,
        bytes,
    }
}

/// A kernel, and how many of its thread blocks the device holds.
type Loaded = (Kernel, u32);

/// The kernel that normalises, and the one that does it with a one-shot plan, if the type has one and it is wanted.
fn load(
    endpoint: &Endpoint,
    tokens: &Tokens,
    with_one_shot: bool,
) -> Result<(Loaded, Option<Loaded>), HalError> {
    let Device::Cuda(context) = endpoint.device() else {
        return Err(CudaError::Capturing {
            what: "loading kernels of a rank that is not on a CUDA device",
        }
        .into());
    };
    let module = module(context, tokens.dtype)?;
    let threads = threads_of(tokens.hidden);
    let load = |name: &'static str| -> Result<Loaded, CudaError> {
        let kernel = Entry::new(module, name).load(context)?;
        // Asking loads it, too, which could wait for kernels that wait for this rank later.
        let blocks = kernel.max_resident_blocks(threads, 0)?;
        Ok((kernel, blocks.max(1)))
    };
    let names = entries(tokens.dtype);
    let name = names.map(|names| names.norm).unwrap_or_default();
    let one_shot = names.and_then(|names| names.one_shot);
    let one_shot = one_shot.filter(|_| with_one_shot).map(load).transpose()?;
    Ok((load(name)?, one_shot))
}

fn module(context: &Context, dtype: DataType) -> Result<&'static Module, CudaError> {
    let sm = context.device().sm()?;
    let (Some(module), Some(_)) = (norm_module(sm), entries(dtype)) else {
        return Err(CudaError::Incapable {
            device: context.ordinal(),
            what: "normalise tokens",
            reason: format!("there is no kernel for {dtype} and compute capability {sm}"),
        });
    };
    Ok(module)
}
