//! What `ncclEpHandle_t` stands for: one forward pass, and what is under way.

use std::sync::Arc;

use crossweft_moe::{
    DispatchOutput, Experts, ExpertsMut, Handle, Layout, Routing, ScaleType, Tokens, Weights,
};

use crate::config::{
    Algorithm, CombineConfig, CombineInputs, CombineOutputs, DispatchConfig, DispatchInputs,
    DispatchOutputs, LayoutInfo, Tensor,
};
use crate::group::{Group, Shape};
use crate::pointer::{Buffer, Given, apart};
use crate::status::Error;
use crate::tally::{Tally, payload};
use crate::tensor::{BFLOAT16, Described, FLOAT8E4M3, FLOAT32, Integers, UINT8, token_type};

/// Elements that share a scale.
const GROUP: usize = 128;

/// One forward pass.
#[derive(Debug)]
pub(crate) struct Pass {
    group: Arc<Group>,
    layout: Layout,
    /// Experts of each token, if it was said beforehand.
    top_k: Option<u32>,
    chosen: Option<Chosen>,
    /// What the last dispatch ran on.
    handle: Option<(Shape, Handle)>,
    /// Whether that was of `chosen`, so that there is something to combine.
    has_dispatched: bool,
    /// What is sent and not completed.
    staged: Option<Staged>,
}

/// Where this rank's tokens go.
#[derive(Debug)]
struct Chosen {
    experts: Vec<i32>,
    tokens: usize,
    top_k: u32,
    /// How much comes, with high throughput.
    tally: Option<Tally>,
}

#[derive(Debug)]
enum Staged {
    Dispatch(Received),
    Combine(Buffer<u8>),
}

/// What a dispatch sends.
#[derive(Debug)]
struct Sent {
    tokens: Buffer<u8>,
    scales: Option<(Buffer<u8>, ScaleType)>,
    /// Whether scales are to be made on the way, and rounded.
    quantise: Option<bool>,
    weights: Option<Buffer<f32>>,
    /// What arrives: types of elements and of scales, and scales of a token.
    arrives: (i32, Option<(i32, usize)>),
    shape: Shape,
}

/// Where a dispatch lays out what comes.
#[derive(Debug)]
struct Received {
    tokens: Buffer<u8>,
    scales: Option<Buffer<u8>>,
    weights: Option<Buffer<f32>>,
    experts: Option<Integers>,
    /// Whether experts are numbered as all ranks' are.
    global: bool,
    expert_counters: Option<Integers>,
    rank_counters: Option<Integers>,
}

impl Sent {
    fn tokens(&self) -> Tokens<'_> {
        let elements = self.tokens.as_slice();
        match (&self.scales, self.quantise) {
            (Some((scales, scale_type)), _) => Tokens::Quantised {
                elements,
                scales: scales.as_slice(),
                scale_type: *scale_type,
            },
            (None, Some(powers_of_two)) => Tokens::Quantise {
                elements,
                scale_type: ScaleType::F32,
                powers_of_two,
            },
            (None, None) => Tokens::Plain(elements),
        }
    }
}

impl Received {
    fn output(&mut self) -> DispatchOutput<'_> {
        let mut output = DispatchOutput::new(self.tokens.as_slice_mut());
        output.scales = self.scales.as_mut().map(Buffer::as_slice_mut);
        output.weights = self.weights.as_mut().map(Buffer::as_slice_mut);
        output.experts = self.experts.as_mut().map(|experts| match experts {
            Integers::I32(experts) => ExpertsMut::I32(experts.as_slice_mut()),
            Integers::I64(experts) => ExpertsMut::I64(experts.as_slice_mut()),
        });
        output
    }

    /// When all has come: counts, and experts as they are to be numbered.
    fn finish(&mut self, handle: &Handle) -> Result<(), Error> {
        let counts = handle.counts()?;
        if let Some(counters) = &mut self.expert_counters {
            counters.set(counts.per_expert().iter().copied());
        }
        if let Some(counters) = &mut self.rank_counters {
            counters.set(counts.per_source().iter().copied());
        }
        if let (Some(experts), true) = (&mut self.experts, self.global) {
            let group = handle.group();
            experts.shift(group.local_experts(group.rank()).start);
        }
        Ok(())
    }

    /// Everything that is written.
    fn written(&self) -> Vec<(&'static str, std::ops::Range<u64>)> {
        let mut all = vec![("outputs->tokens", self.tokens.range())];
        all.extend(self.scales.iter().map(|b| ("outputs->scales", b.range())));
        all.extend(
            self.weights
                .iter()
                .map(|b| ("outputs->topk_weights", b.range())),
        );
        all.extend(
            self.experts
                .iter()
                .map(|b| ("outputs->topk_idx", b.range())),
        );
        all.extend(
            self.expert_counters
                .iter()
                .map(|b| ("expert_counters", b.range())),
        );
        all.extend(
            self.rank_counters
                .iter()
                .map(|b| ("src_rank_counters", b.range())),
        );
        all
    }
}

fn undispatched() -> Error {
    Error::usage("nothing was dispatched since the handle was updated: call ncclEpDispatch first")
}

fn unrouted() -> Error {
    Error::usage("the handle does not know where tokens go: call ncclEpUpdateHandle first")
}

impl Pass {
    pub(crate) fn new(group: &Arc<Group>, layout: Layout, top_k: i32) -> Result<Self, Error> {
        let top_k = match (group.algorithm, top_k) {
            (Algorithm::HighThroughput, ..=0) => None,
            (Algorithm::LowLatency, ..=0) => {
                return Err(Error::argument(format!(
                    "num_topk is {top_k}; with low latency it must be given"
                )));
            }
            (_, top_k) => Some(group.check_top_k(top_k.unsigned_abs() as usize)?),
        };
        Ok(Self {
            group: Arc::clone(group),
            layout,
            top_k,
            chosen: None,
            handle: None,
            has_dispatched: false,
            staged: None,
        })
    }

    /// One that knows where tokens go, of what was `made`. With high throughput collective; blocks until all ranks of
    /// `group` have called it, also those that could make none.
    pub(crate) fn create(
        group: &Group,
        made: Result<Self, Error>,
        topk_idx: &Given<Tensor>,
        info: &Given<LayoutInfo>,
    ) -> Result<Self, Error> {
        match made {
            Ok(mut pass) => pass.update(topk_idx, info).map(|()| pass),
            Err(error) => {
                if group.algorithm == Algorithm::HighThroughput {
                    // Its own error says more than what became of this.
                    let _ = group.all_gather(&[]);
                }
                Err(error)
            }
        }
    }

    pub(crate) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    fn is_low_latency(&self) -> bool {
        self.group.algorithm == Algorithm::LowLatency
    }

    fn check_idle(&self) -> Result<(), Error> {
        match self.staged {
            None => Ok(()),
            Some(_) => Err(Error::usage(
                "a call with send_only is under way; end it with ncclEpComplete first",
            )),
        }
    }

    /// Takes where this rank's tokens go. With high throughput collective; blocks.
    pub(crate) fn update(
        &mut self,
        topk_idx: &Given<Tensor>,
        info: &Given<LayoutInfo>,
    ) -> Result<(), Error> {
        self.check_idle()?;
        let given = || -> Result<_, Error> {
            let tensor = Described::read("topk_idx", topk_idx, self.group.comm())?;
            let tensor = tensor.ok_or_else(|| Error::argument("topk_idx is NULL"))?;
            Ok((tensor, info.read()?))
        };
        if self.is_low_latency() {
            let (topk_idx, info) = given()?;
            if info.is_some() {
                return Err(Error::argument(
                    "layout_info must be NULL here: with low latency counts come with a dispatch",
                ));
            }
            self.chosen = Some(self.choose(&topk_idx)?);
            self.has_dispatched = false;
            return Ok(());
        }
        let sizes = (self.group.ranks(), self.group.experts);
        let mine = given()
            .and_then(|(topk_idx, info)| Ok((self.choose(&topk_idx)?, self.counters(info)?)));
        // A rank that cannot say so tells the others that, as in `create`.
        let told = mine.as_ref().map_or_else(
            |_| Vec::new(),
            |(chosen, _)| payload(&chosen.experts, chosen.top_k as usize, sizes),
        );
        let all = self.group.all_gather(&told);
        let (mut chosen, mut counters) = mine?;
        let tally = Tally::new(&all?, self.group.rank(), sizes)?;
        self.tell(&tally, &mut counters)?;
        chosen.tally = Some(tally);
        self.chosen = Some(chosen);
        self.has_dispatched = false;
        Ok(())
    }

    fn choose(&self, topk_idx: &Described) -> Result<Chosen, Error> {
        let (tokens, top_k) = topk_idx.matrix()?;
        let top_k = self.group.check_top_k(top_k)?;
        if let Some(expected) = self.top_k.filter(|expected| *expected != top_k) {
            return Err(Error::argument(format!(
                "topk_idx has top-{top_k}, but the handle was made for top-{expected}"
            )));
        }
        if tokens > self.group.max_tokens as usize {
            return Err(Error::argument(format!(
                "topk_idx has {tokens} tokens; the group's max_dispatch_tokens_per_rank is {}",
                self.group.max_tokens
            )));
        }
        let most = i64::from(self.group.experts);
        let experts = topk_idx.integers()?.to_vec().into_iter();
        let experts = experts.map(|expert| match expert {
            -1 => Ok(-1),
            0.. if expert < most => Ok(expert as i32),
            _ => Err(Error::argument(format!(
                "topk_idx has expert {expert}; there are {most}, and -1 is for none"
            ))),
        });
        Ok(Chosen {
            experts: experts.collect::<Result<_, _>>()?,
            tokens,
            top_k,
            tally: None,
        })
    }

    /// Where counts are wanted, before tokens come.
    fn counters(&self, info: Option<LayoutInfo>) -> Result<[Option<Integers>; 3], Error> {
        let Some(info) = info else {
            return Ok([None, None, None]);
        };
        let comm = self.group.comm();
        let own = self.group.local_experts() as usize;
        let reason = "ranks are counted by the rank-major layout of low latency";
        Described::absent("src_rank_counters", info.src_rank_counters, reason)?;
        if !self.layout.is_by_expert() {
            let reason = "rows are not grouped by expert in the flat layout";
            Described::absent("expert_offsets", info.expert_offsets, reason)?;
        }
        let read = |name, address, count: usize| {
            let Some(tensor) = Described::field(name, address, comm)? else {
                return Ok(None);
            };
            tensor.expect(&[count])?;
            tensor.integers().map(Some)
        };
        let all = [
            read("expert_counters", info.expert_counters, own)?,
            read("expert_offsets", info.expert_offsets, own)?,
            read("recv_total_counter", info.recv_total_counter, 1)?,
        ];
        let names = ["expert_counters", "expert_offsets", "recv_total_counter"];
        let ranges = names.into_iter().zip(&all);
        let ranges = ranges.filter_map(|(name, tensor)| Some((name, tensor.as_ref()?.range())));
        apart(&ranges.collect::<Vec<_>>(), &[])?;
        Ok(all)
    }

    /// Rows that will come, with padding.
    fn rows(&self, tally: &Tally) -> Result<(Vec<u32>, u32), Error> {
        match self.layout {
            Layout::ExpertPacked { alignment } => tally.padded(alignment),
            _ => Ok((tally.per_expert.clone(), tally.tokens)),
        }
    }

    fn tell(
        &self,
        tally: &Tally,
        [experts, offsets, total]: &mut [Option<Integers>; 3],
    ) -> Result<(), Error> {
        let (per_expert, rows) = self.rows(tally)?;
        if let Some(offsets) = offsets {
            offsets.set(per_expert.iter().scan(0, |begin, count| {
                let own = *begin;
                *begin += count;
                Some(own)
            }));
        }
        if let Some(experts) = experts {
            experts.set(per_expert);
        }
        if let Some(total) = total {
            total.set([rows]);
        }
        Ok(())
    }

    /// `ncclEpDispatch`. Collective; blocks, but for peers' tokens if only sent.
    pub(crate) fn dispatch(
        &mut self,
        inputs: &DispatchInputs,
        outputs: &DispatchOutputs,
        info: Option<LayoutInfo>,
        config: Option<DispatchConfig>,
    ) -> Result<(), Error> {
        self.check_idle()?;
        let send_only = config.is_some_and(|config| config.send_only != 0);
        self.check_staging(send_only)?;
        let backward = self.is_backward(config.map_or(0, |config| config.pass_direction))?;
        let sent = self.sent(inputs, config, backward)?;
        let mut received = self.received(outputs, info, &sent, backward)?;
        let mut read = vec![("inputs->tokens", sent.tokens.range())];
        read.extend(
            sent.scales
                .iter()
                .map(|(b, _)| ("inputs->scales", b.range())),
        );
        read.extend(
            sent.weights
                .iter()
                .map(|b| ("inputs->topk_weights", b.range())),
        );
        apart(&received.written(), &read)?;

        let chosen = self.chosen.as_ref().ok_or_else(unrouted)?;
        let routing = Routing {
            experts: Experts::I32(&chosen.experts),
            top_k: chosen.top_k,
            weights: sent.weights.as_ref().map(Buffer::as_slice),
        };
        let moe = self.group.of_shape(sent.shape)?;
        match &mut self.handle {
            Some((shape, handle)) if *shape == sent.shape => handle.route(&routing)?,
            other => *other = Some((sent.shape, moe.handle(&routing, self.layout)?)),
        }
        self.has_dispatched = false;
        let handle = self.handle()?;
        if send_only {
            handle.dispatch_send(sent.tokens())?;
            self.staged = Some(Staged::Dispatch(received));
            return Ok(());
        }
        handle.dispatch(sent.tokens(), received.output())?;
        received.finish(handle)?;
        self.has_dispatched = true;
        self.group.look();
        Ok(())
    }

    fn chosen(&self) -> Result<&Chosen, Error> {
        self.chosen.as_ref().ok_or_else(unrouted)
    }

    fn handle(&mut self) -> Result<&mut Handle, Error> {
        let handle = self.handle.as_mut().map(|(_, handle)| handle);
        handle.ok_or_else(undispatched)
    }

    fn check_staging(&self, send_only: bool) -> Result<(), Error> {
        match send_only && !self.is_low_latency() {
            true => Err(Error::usage("send_only is for low latency")),
            false => Ok(()),
        }
    }

    fn is_backward(&self, direction: u32) -> Result<bool, Error> {
        match direction {
            _ if self.is_low_latency() => Ok(false),
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Error::argument(format!("pass_direction is {other}"))),
        }
    }

    fn sent(
        &self,
        inputs: &DispatchInputs,
        config: Option<DispatchConfig>,
        backward: bool,
    ) -> Result<Sent, Error> {
        let comm = self.group.comm();
        let chosen = self.chosen()?;
        let tokens = Described::required("inputs->tokens", inputs.tokens, comm)?;
        let (count, hidden) = tokens.matrix()?;
        tokens.expect(&[chosen.tokens, hidden])?;
        let weights = match (self.layout, backward) {
            (Layout::ExpertMajor, _) => Err("with low latency weights are given when combining"),
            (_, true) => Err("there are none in the backward pass"),
            (_, false) => Ok(()),
        };
        let weights = match weights {
            Err(reason) => {
                Described::absent("inputs->topk_weights", inputs.topk_weights, reason)?;
                None
            }
            Ok(()) => {
                let name = "inputs->topk_weights";
                let weights = Described::required(name, inputs.topk_weights, comm)?;
                weights.expect(&[count, chosen.top_k as usize])?;
                Some(weights.floats()?)
            }
        };
        let code = tokens.datatype;
        let groups = hidden.div_ceil(GROUP);
        let (recipe, round) = config.map_or((0, 0), |c| (c.quant_recipe, c.round_scales));
        if recipe != 2 && round != 0 {
            return Err(Error::argument(
                "round_scales is for NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4",
            ));
        }
        let (scales, quantise, datatype, arrives) = match recipe {
            0 if token_type(code).is_some() => (None, None, code, (code, None)),
            0 => {
                return Err(Error::argument(format!(
                    "inputs->tokens has type {code}; it must be bf16, f16 or f32, or quantised"
                )));
            }
            1 => {
                tokens.expect_type(FLOAT8E4M3)?;
                let scales = Described::required("inputs->scales", inputs.scales, comm)?;
                let (scale_type, each) = match scales.datatype {
                    FLOAT32 => (ScaleType::F32, groups),
                    UINT8 => (ScaleType::Ue8m0, groups.next_multiple_of(4)),
                    other => {
                        return Err(Error::argument(format!(
                            "inputs->scales has type {other}; it must be ncclFloat32, or ncclUint8 for exponents"
                        )));
                    }
                };
                scales.expect(&[count, each])?;
                let arrives = (code, Some((scales.datatype, each)));
                (Some((scales.bytes()?, scale_type)), None, BFLOAT16, arrives)
            }
            2 => {
                if !self.is_low_latency() {
                    return Err(Error::argument(
                        "NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4 is for low latency",
                    ));
                }
                tokens.expect_type(BFLOAT16)?;
                (
                    None,
                    Some(round != 0),
                    code,
                    (FLOAT8E4M3, Some((FLOAT32, groups))),
                )
            }
            other => {
                return Err(Error::argument(format!(
                    "the quantisation recipe is {other}"
                )));
            }
        };
        if scales.is_none() {
            let reason = "only NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD takes scales";
            Described::absent("inputs->scales", inputs.scales, reason)?;
        }
        let hidden = u32::try_from(hidden)
            .map_err(|_| Error::argument(format!("tokens have {hidden} elements")))?;
        Ok(Sent {
            tokens: tokens.bytes()?,
            scales,
            quantise,
            weights,
            arrives,
            shape: Shape {
                hidden,
                datatype,
                top_k: chosen.top_k,
            },
        })
    }

    /// Sizes of what a dispatch lays out, without the last; `found` has those of a caller's tensor.
    fn room(&self, found: &Described) -> Result<Vec<usize>, Error> {
        let (ranks, tokens) = (self.group.ranks() as usize, self.group.max_tokens as usize);
        match self.layout {
            Layout::ExpertMajor => Ok(vec![self.group.local_experts() as usize, ranks * tokens]),
            Layout::RankMajor => Ok(vec![ranks, tokens]),
            _ => {
                let (rows, _) = found.matrix()?;
                let tally = self.chosen()?.tally.as_ref();
                let coming = match tally {
                    Some(tally) => self.rows(tally)?.1,
                    None => 0,
                };
                match rows >= coming as usize {
                    true => Ok(vec![rows]),
                    false => Err(Error::argument(format!(
                        "{rows} rows, but {coming} come: make as much room as recv_total_counter says"
                    ))),
                }
            }
        }
    }

    fn received(
        &self,
        outputs: &DispatchOutputs,
        info: Option<LayoutInfo>,
        sent: &Sent,
        backward: bool,
    ) -> Result<Received, Error> {
        let comm = self.group.comm();
        let tokens = Described::required("outputs->tokens", outputs.tokens, comm)?;
        let room = self.room(&tokens)?;
        let with = |last: &[usize]| [&room[..], last].concat();
        let (code, scales_code) = sent.arrives;
        tokens.expect(&with(&[sent.shape.hidden as usize]))?;
        tokens.expect_type(code)?;
        let scales = match scales_code {
            None => {
                let reason = "tokens that are not quantised have none";
                Described::absent("outputs->scales", outputs.scales, reason)?;
                None
            }
            Some((code, each)) => {
                let scales = Described::required("outputs->scales", outputs.scales, comm)?;
                scales.expect(&with(&[each]))?;
                scales.expect_type(code)?;
                Some(scales.bytes()?)
            }
        };
        let each = self.chosen()?.top_k as usize;
        let reason = match (self.layout, backward) {
            (Layout::ExpertMajor, _) => Some("with low latency weights are given when combining"),
            (_, true) => Some("there are none in the backward pass"),
            _ => None,
        };
        let weights = match reason {
            Some(reason) => {
                Described::absent("outputs->topk_weights", outputs.topk_weights, reason)?;
                None
            }
            None => {
                let name = "outputs->topk_weights";
                let weights = Described::field(name, outputs.topk_weights, comm)?;
                let sizes = match self.layout.is_by_expert() {
                    true => room.clone(),
                    false => with(&[each]),
                };
                weights
                    .map(|w| w.expect(&sizes).and_then(|()| w.floats()))
                    .transpose()?
            }
        };
        let experts = if self.layout.is_by_expert() || backward {
            let reason = "a row's place says its expert, and so did the forward pass";
            Described::absent("outputs->topk_idx", outputs.topk_idx, reason)?;
            None
        } else {
            let experts = Described::field("outputs->topk_idx", outputs.topk_idx, comm)?;
            let sizes = with(&[each]);
            experts
                .map(|e| e.expect(&sizes).and_then(|()| e.integers()))
                .transpose()?
        };
        let global = match info.map_or(0, |info| info.recv_topk_idx_kind) {
            0 | 1 => false,
            2 => true,
            other => return Err(Error::argument(format!("recv_topk_idx_kind is {other}"))),
        };
        let [expert_counters, rank_counters] = self.counters_of_dispatch(info)?;
        Ok(Received {
            tokens: tokens.bytes()?,
            scales,
            weights,
            experts,
            global,
            expert_counters,
            rank_counters,
        })
    }

    /// Where counts are wanted that come with tokens.
    fn counters_of_dispatch(
        &self,
        info: Option<LayoutInfo>,
    ) -> Result<[Option<Integers>; 2], Error> {
        let comm = self.group.comm();
        let (experts, ranks) = info.map_or((0, 0), |i| (i.expert_counters, i.src_rank_counters));
        let others = info.map_or(0, |info| info.expert_offsets | info.recv_total_counter);
        let early = "with high throughput counts are told when the handle is updated";
        Described::absent("expert_offsets and recv_total_counter", others, early)?;
        let (of_experts, of_ranks) = match self.layout {
            Layout::ExpertMajor => (Ok(()), Err("rows are not grouped by rank")),
            Layout::RankMajor => (Err("rows are not grouped by expert"), Ok(())),
            _ => (Err(early), Err(early)),
        };
        let read = |name, address, allowed: Result<(), &str>, count: usize| {
            if let Err(reason) = allowed {
                Described::absent(name, address, reason)?;
            }
            let Some(tensor) = Described::field(name, address, comm)? else {
                return Ok(None);
            };
            tensor.expect(&[count])?;
            tensor.integers().map(Some)
        };
        let own = self.group.local_experts() as usize;
        let expert_counters = read("expert_counters", experts, of_experts, own)?;
        if self.layout == Layout::ExpertMajor && expert_counters.is_none() {
            return Err(Error::argument(
                "layout_info->expert_counters is required: nothing else says how many rows each expert has",
            ));
        }
        let ranks = read(
            "src_rank_counters",
            ranks,
            of_ranks,
            self.group.ranks() as usize,
        )?;
        Ok([expert_counters, ranks])
    }

    /// `ncclEpCombine`. Collective; blocks, but for peers' sums if only sent.
    pub(crate) fn combine(
        &mut self,
        inputs: &CombineInputs,
        outputs: &CombineOutputs,
        config: Option<CombineConfig>,
    ) -> Result<(), Error> {
        self.check_idle()?;
        let send_only = config.is_some_and(|config| config.send_only != 0);
        self.check_staging(send_only)?;
        if self.is_backward(config.map_or(0, |config| config.pass_direction))? {
            return Err(Error::usage(
                "combining the gradients of weights is not supported; combine tokens with NCCL_EP_FWD_PASS",
            ));
        }
        let recipe = config.map_or(0, |config| config.quant_recipe);
        if recipe != 0 {
            return Err(Error::usage(format!(
                "combine does not quantise; its recipe is {recipe}, it must be NONE"
            )));
        }
        let group = Arc::clone(&self.group);
        let comm = group.comm();
        let forward = "it is for the backward pass";
        Described::absent("inputs->topk_weights", inputs.topk_weights, forward)?;
        Described::absent("inputs->scales", inputs.scales, "combine does not quantise")?;
        let shape = match self.handle {
            Some((shape, _)) if self.has_dispatched => shape,
            _ => return Err(undispatched()),
        };
        let hidden = shape.hidden as usize;
        let (count, each) = {
            let chosen = self.chosen()?;
            (chosen.tokens, chosen.top_k as usize)
        };
        let rows = Described::required("inputs->tokens", inputs.tokens, comm)?;
        rows.expect(&[&self.room(&rows)?[..], &[hidden]].concat())?;
        rows.expect_type(shape.datatype)?;
        let output = Described::required("outputs->tokens", outputs.tokens, comm)?;
        output.expect(&[count, hidden])?;
        output.expect_type(shape.datatype)?;
        let weights = match self.layout {
            Layout::ExpertMajor => {
                let name = "outputs->topk_weights";
                let weights = Described::required(name, outputs.topk_weights, comm)?;
                weights.expect(&[count, each])?;
                Some(weights.floats()?)
            }
            _ => {
                let reason = "here the caller applies weights before";
                Described::absent("outputs->topk_weights", outputs.topk_weights, reason)?;
                None
            }
        };
        let (rows, mut output) = (rows.bytes()?, output.bytes()?);
        let mut read = vec![("inputs->tokens", rows.range())];
        read.extend(weights.iter().map(|b| ("outputs->topk_weights", b.range())));
        apart(&[("outputs->tokens", output.range())], &read)?;
        let weights = weights
            .as_ref()
            .map_or(Weights::One, |weights| Weights::Given(weights.as_slice()));
        let handle = self.handle()?;
        if send_only {
            handle.combine_send(rows.as_slice(), weights)?;
            self.staged = Some(Staged::Combine(output));
            return Ok(());
        }
        handle.combine(rows.as_slice(), weights, output.as_slice_mut())?;
        group.look();
        Ok(())
    }

    /// `ncclEpComplete`. Blocks.
    pub(crate) fn complete(&mut self) -> Result<(), Error> {
        let Some((_, handle)) = &mut self.handle else {
            return Err(Error::usage("no call with send_only is under way"));
        };
        match &mut self.staged {
            None => return Err(Error::usage("no call with send_only is under way")),
            Some(Staged::Dispatch(received)) => {
                handle.dispatch_complete(received.output())?;
                received.finish(handle)?;
                self.has_dispatched = true;
            }
            Some(Staged::Combine(output)) => handle.combine_complete(output.as_slice_mut())?,
        }
        self.staged = None;
        self.group.look();
        Ok(())
    }
}
