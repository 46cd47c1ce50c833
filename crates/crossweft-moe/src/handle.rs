//! Handles: one forward pass each.

use std::ops::Range;
use std::sync::Arc;

use crossweft_hal::HalError;

use crate::MoeError;
use crate::group::{Desk, Group, combine_call, dispatch_call};
use crate::launch::{PassTables, Receiving, Sending, Step, Summed, Summing};
use crate::layout::{Format, Layout, OutputShape, ScaleType};
use crate::watch::Watch;

/// Experts of tokens: `[tokens, top-k]`, -1 for none. A token may name an expert several times.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Experts<'a> {
    /// As i32.
    I32(&'a [i32]),
    /// As i64.
    I64(&'a [i64]),
}

impl Experts<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::I32(experts) => experts.len(),
            Self::I64(experts) => experts.len(),
        }
    }
}

/// Room for local experts of received tokens.
#[derive(Debug)]
#[non_exhaustive]
pub enum ExpertsMut<'a> {
    /// As i32.
    I32(&'a mut [i32]),
    /// As i64.
    I64(&'a mut [i64]),
}

/// Where a rank's tokens go.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// The experts of each token, of all ranks' experts: `[tokens, top-k]`. There may be no tokens.
    pub experts: Experts<'a>,
    /// Experts of each token, at most the group's. All ranks must have the same.
    pub top_k: u32,
    /// What the experts' results are multiplied by: `[tokens, top-k]`. 1 if there are none, or if they are given when
    /// combining.
    pub weights: Option<&'a [f32]>,
}

/// The tokens of a dispatch, one after the other. All ranks must send the same [`Format`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Tokens<'a> {
    /// In the group's type.
    Plain(&'a [u8]),
    /// In [`DataType::F8E4M3`](crate::DataType::F8E4M3); the hidden size must be a multiple of 16.
    Quantised {
        /// `[tokens, hidden]`.
        elements: &'a [u8],
        /// `[tokens, scales]`, see [`Format::scale_bytes`].
        scales: &'a [u8],
        /// What they are.
        scale_type: ScaleType,
    },
    /// In the group's type, to be quantised on the way: each 128 elements are divided by their largest magnitude, but
    /// at least 1e-4, over 448.
    Quantise {
        /// `[tokens, hidden]`.
        elements: &'a [u8],
        /// What scales arrive.
        scale_type: ScaleType,
        /// Whether scales are rounded up to powers of two; [`ScaleType::Ue8m0`] always are.
        powers_of_two: bool,
    },
}

impl Tokens<'_> {
    /// How they travel.
    #[must_use]
    pub const fn format(&self) -> Format {
        match self {
            Self::Plain(_) => Format::Plain,
            Self::Quantised { scale_type, .. } | Self::Quantise { scale_type, .. } => {
                Format::F8E4M3(*scale_type)
            }
        }
    }
}

/// Where a dispatch lays out what is received; [`Group::output_shape`] says how much room is needed.
#[derive(Debug)]
pub struct DispatchOutput<'a> {
    /// `[rows, hidden]`, in the type that travels.
    pub tokens: &'a mut [u8],
    /// `[rows, scales]`, of quantised tokens.
    pub scales: Option<&'a mut [u8]>,
    /// `[rows, top-k]`: the local experts of each row, -1 for none; only where rows are not grouped by expert. Rows
    /// that nothing was received for have none.
    pub experts: Option<ExpertsMut<'a>>,
    /// Weights: `[rows, top-k]`, 0 where there is no expert; `[rows]` where rows are grouped by expert, the sum if a
    /// token names the expert several times.
    pub weights: Option<&'a mut [f32]>,
    /// `[rows]`: which of its source's tokens a row is.
    pub sources: Option<&'a mut [i32]>,
}

impl<'a> DispatchOutput<'a> {
    /// Only tokens are wanted.
    #[must_use]
    pub fn new(tokens: &'a mut [u8]) -> Self {
        Self {
            tokens,
            scales: None,
            experts: None,
            weights: None,
            sources: None,
        }
    }
}

/// The weights of a combine.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Weights<'a> {
    /// All 1: what the rows hold is summed, where they are grouped by expert once for each time that the token names the
    /// expert. The only ones for rows that are not grouped by expert.
    One,
    /// The [`Routing::weights`] of the dispatch.
    Dispatched,
    /// These, of this rank's tokens: `[tokens, top-k]`. All ranks must give some. Costs one more trip than
    /// [`Dispatched`](Self::Dispatched).
    Given(&'a [f32]),
}

/// How many rows came, and where they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    rows: u64,
    per_expert: Vec<u32>,
    per_source: Vec<u32>,
    offsets: Vec<u32>,
    /// For each expert and source.
    ranges: Vec<(u32, u32)>,
}

impl Counts {
    /// Rows that the layout takes up, gaps and padding included: what a combine's input must have.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Tokens for each local expert, without padding.
    #[must_use]
    pub fn per_expert(&self) -> &[u32] {
        &self.per_expert
    }

    /// Tokens from each rank, in rank order; each once, however many experts here it is for.
    #[must_use]
    pub fn per_source(&self) -> &[u32] {
        &self.per_source
    }

    /// The first row of each local expert, where rows are grouped by expert.
    #[must_use]
    pub fn expert_offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The rows of local expert `expert` that are tokens of rank `source`, where rows are grouped by expert; `None` if
    /// there is no such expert or rank.
    #[must_use]
    pub fn range(&self, expert: u32, source: u32) -> Option<Range<u32>> {
        let sources = self.per_source.len();
        let index = (expert as usize).checked_mul(sources)? + source as usize;
        let &(begin, count) = self
            .ranges
            .get(index)
            .filter(|_| (source as usize) < sources)?;
        Some(begin..begin + count)
    }
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Routed,
    DispatchSent { number: u64, format: Format },
    Dispatched,
    CombineSent { number: u64, gives_weights: bool },
}

/// One forward pass. A dispatch is followed by any number of combines; another dispatch of the same routing may follow.
///
/// Each call blocks at most for the group's timeout. Staged calls ([`dispatch_send`](Self::dispatch_send), then
/// [`dispatch_complete`](Self::dispatch_complete)) leave time for other work in between; they are completed in the
/// order in which they were sent, whatever handles they are of.
#[derive(Debug)]
pub struct Handle {
    pub(crate) group: Arc<Group>,
    layout: Layout,
    pub(crate) pass: PassTables,
    pub(crate) state: State,
    /// Of the last dispatch, if they are known.
    counts: Counts,
    pub(crate) is_counted: bool,
    /// Rows that the last dispatch on a device had room for.
    pub(crate) capacity: u64,
}

impl Handle {
    pub(crate) fn new(group: Arc<Group>, layout: Layout, pass: PassTables) -> Self {
        let ranks = group.world_size() as usize;
        let own = group.local_experts(group.rank()).len();
        Self {
            group,
            layout,
            pass,
            state: State::Routed,
            counts: Counts {
                rows: 0,
                per_expert: vec![0; own],
                per_source: vec![0; ranks],
                offsets: vec![0; own],
                ranges: vec![(0, 0); own * ranks],
            },
            is_counted: false,
            capacity: 0,
        }
    }

    /// Takes the routing of another pass; allocates nothing.
    ///
    /// # Errors
    /// [`MoeError::Usage`] as for [`Group::handle`], or if a call was sent and not completed.
    pub fn route(&mut self, routing: &Routing<'_>) -> Result<(), MoeError> {
        if let State::DispatchSent { .. } | State::CombineSent { .. } = self.state {
            return Err(self.out_of_order("a call was sent; complete it before the next pass"));
        }
        let geometry = self.group.tables().geometry();
        let routed = self.pass.route(geometry, routing);
        routed.map_err(|reason| self.group.usage(reason))?;
        self.state = State::Routed;
        self.is_counted = false;
        Ok(())
    }

    /// Its group.
    #[must_use]
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// How received tokens are laid out.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Bytes that the handle has allocated.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        self.pass.bytes()
    }

    /// The room that the output of a dispatch takes, at most.
    ///
    /// # Errors
    /// None that [`Group::handle`] has not had.
    pub fn output_shape(&self, format: Format) -> Result<OutputShape, MoeError> {
        self.group
            .output_shape(self.layout, format, self.pass.top_k())
    }

    /// How many rows came with the last dispatch, and where they lie.
    ///
    /// # Errors
    /// [`MoeError::Usage`] if nothing was dispatched yet.
    pub fn counts(&self) -> Result<&Counts, MoeError> {
        match self.is_counted {
            true => Ok(&self.counts),
            false => Err(self.out_of_order("no counts have come; dispatch, or wait for them")),
        }
    }

    /// Sends this rank's tokens and lays out what is received. All ranks must call it. Blocks.
    ///
    /// # Errors
    /// [`MoeError`]; after [`MoeError::Capacity`] the call can be [completed](Self::dispatch_complete), with more room.
    pub fn dispatch(
        &mut self,
        tokens: Tokens<'_>,
        output: DispatchOutput<'_>,
    ) -> Result<(), MoeError> {
        self.can_dispatch()?;
        let receiving = self.receiving(tokens.format(), output)?;
        let group = Arc::clone(&self.group);
        let watch = group.watch();
        self.send_tokens(tokens, true, &watch)?;
        self.receive_tokens(&receiving, &watch)
    }

    /// Sends this rank's tokens. They may be changed when it returns. Waits only if the call before the last
    /// has not been completed by all ranks.
    ///
    /// # Errors
    /// [`MoeError`].
    pub fn dispatch_send(&mut self, tokens: Tokens<'_>) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        self.send_tokens(tokens, false, &group.watch())
    }

    /// Waits until it is known how many rows the dispatch that was sent will bring, so that exactly as much room can
    /// be made. Blocks.
    ///
    /// # Errors
    /// [`MoeError`].
    pub fn wait_for_counts(&mut self) -> Result<&Counts, MoeError> {
        let group = Arc::clone(&self.group);
        let (number, format) = self.sent_dispatch()?;
        let mut desk = group.desk()?;
        self.next_to_complete(&desk, number)?;
        self.count(&mut desk, (number, format), &group.watch())?;
        Ok(&self.counts)
    }

    /// Lays out what the dispatch that was sent brings. Blocks.
    ///
    /// # Errors
    /// [`MoeError`]; after [`MoeError::Capacity`] it can be called again.
    pub fn dispatch_complete(&mut self, output: DispatchOutput<'_>) -> Result<(), MoeError> {
        let (_, format) = self.sent_dispatch()?;
        let receiving = self.receiving(format, output)?;
        let group = Arc::clone(&self.group);
        self.receive_tokens(&receiving, &group.watch())
    }

    /// Sums what the experts made of the tokens, which `rows` has as they were laid out, in the group's type, and
    /// brings the sums back: `output` has this rank's tokens, `[tokens, hidden]`. What experts of one rank made of a
    /// token is summed there and rounded once to the group's type, then the ranks' sums are, all in f32 and in a
    /// fixed order. A token without experts becomes 0. All ranks must call it. Blocks.
    ///
    /// # Errors
    /// [`MoeError`].
    pub fn combine(
        &mut self,
        rows: &[u8],
        weights: Weights<'_>,
        output: &mut [u8],
    ) -> Result<(), MoeError> {
        self.can_combine()?;
        let gives_weights = matches!(weights, Weights::Given(_));
        let summed = self.summed(gives_weights, output)?;
        let group = Arc::clone(&self.group);
        let watch = group.watch();
        self.send_sums((rows, weights), true, &watch)?;
        self.receive_sums(&summed, &watch)
    }

    /// Sums what the experts made of the tokens and sends the sums back. `rows` may be changed when it returns. Waits
    /// only if the call before the last has not been completed by all ranks, and for other ranks' weights if
    /// these are [given](Weights::Given).
    ///
    /// # Errors
    /// [`MoeError`].
    pub fn combine_send(&mut self, rows: &[u8], weights: Weights<'_>) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        self.send_sums((rows, weights), false, &group.watch())
    }

    /// Brings what the combine that was sent brings. Blocks.
    ///
    /// # Errors
    /// [`MoeError`].
    pub fn combine_complete(&mut self, output: &mut [u8]) -> Result<(), MoeError> {
        let (_, gives_weights) = self.sent_combine()?;
        let summed = self.summed(gives_weights, output)?;
        let group = Arc::clone(&self.group);
        self.receive_sums(&summed, &group.watch())
    }

    pub(crate) fn sizes(&self) -> (u32, crate::DataType) {
        let options = self.group.options();
        (options.hidden, options.dtype)
    }

    #[cold]
    pub(crate) fn out_of_order(&self, reason: &str) -> MoeError {
        self.group.usage(reason.to_owned())
    }

    pub(crate) fn can_dispatch(&self) -> Result<(), MoeError> {
        match self.state {
            State::Routed | State::Dispatched => Ok(()),
            _ => Err(self.out_of_order("a call was sent; complete it before the next dispatch")),
        }
    }

    pub(crate) fn can_combine(&self) -> Result<(), MoeError> {
        match self.state {
            State::Dispatched => Ok(()),
            _ => Err(self.out_of_order("nothing to combine; dispatch, and complete that, before")),
        }
    }

    pub(crate) fn sent_dispatch(&self) -> Result<(u64, Format), MoeError> {
        match self.state {
            State::DispatchSent { number, format } => Ok((number, format)),
            _ => Err(self.out_of_order("no dispatch was sent; send one before completing it")),
        }
    }

    pub(crate) fn sent_combine(&self) -> Result<(u64, bool), MoeError> {
        match self.state {
            State::CombineSent {
                number,
                gives_weights,
            } => Ok((number, gives_weights)),
            _ => Err(self.out_of_order("no combine was sent; send one before completing it")),
        }
    }

    /// The number of a call that is to be sent, and completed as well if `both`: then no other may be under way, which
    /// would have to be completed before.
    pub(crate) fn next_to_send(&self, desk: &Desk, both: bool) -> Result<u64, MoeError> {
        match desk.sent - desk.completed {
            0 => Ok(desk.sent),
            1 if !both => Ok(desk.sent),
            1 => Err(self.out_of_order(
                "a call is under way; complete it before a call that is not in two halves",
            )),
            _ => Err(self.out_of_order("two calls are under way; complete one before the next")),
        }
    }

    pub(crate) fn next_to_complete(&self, desk: &Desk, number: u64) -> Result<(), MoeError> {
        match desk.completed == number {
            true => Ok(()),
            false => Err(self.out_of_order(
                "another call was sent before this one; complete them in the order in which they were sent",
            )),
        }
    }

    fn receiving<'a>(
        &self,
        format: Format,
        output: DispatchOutput<'a>,
    ) -> Result<Receiving<'a>, MoeError> {
        let shape = self.output_shape(format)?;
        Receiving::new(&shape, output).map_err(|reason| self.group.usage(reason))
    }

    fn summed<'a>(
        &self,
        gives_weights: bool,
        output: &'a mut [u8],
    ) -> Result<Summed<'a>, MoeError> {
        let call = combine_call(gives_weights, self.pass.top_k());
        let summed = Summed::new(&self.pass, output, self.sizes(), call);
        summed.map_err(|reason| self.group.usage(reason))
    }

    fn send_tokens(
        &mut self,
        tokens: Tokens<'_>,
        both: bool,
        watch: &Watch<'_>,
    ) -> Result<(), MoeError> {
        self.can_dispatch()?;
        let format = tokens.format();
        let call = dispatch_call(format, self.pass.top_k());
        let sending = Sending::new(&self.pass, tokens, self.sizes(), call);
        let sending = sending.map_err(|reason| self.group.usage(reason))?;
        let group = Arc::clone(&self.group);
        let mut desk = group.desk()?;
        let number = self.next_to_send(&desk, both)?;
        let step = Step::SendTokens(&sending);
        group.launch(&mut desk, &mut self.pass, step, (number, call), watch)?;
        desk.sent += 1;
        self.state = State::DispatchSent { number, format };
        self.is_counted = false;
        Ok(())
    }

    fn receive_tokens(
        &mut self,
        receiving: &Receiving<'_>,
        watch: &Watch<'_>,
    ) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        let (number, format) = self.sent_dispatch()?;
        let call = dispatch_call(format, self.pass.top_k());
        let mut desk = group.desk()?;
        self.next_to_complete(&desk, number)?;
        loop {
            self.count(&mut desk, (number, format), watch)?;
            let (rows, room) = (self.counts.rows, receiving.rows());
            if rows > room {
                let rank = group.rank();
                return Err(MoeError::Capacity { rank, rows, room });
            }
            let step = Step::ReceiveTokens(receiving);
            // A rank that is left out has sent nothing, so it must be counted again.
            if group.attempt(&mut desk, &mut self.pass, step, (number, call), watch)? {
                break;
            }
        }
        desk.completed += 1;
        self.state = State::Dispatched;
        Ok(())
    }

    fn count(
        &mut self,
        desk: &mut Desk,
        (number, format): (u64, Format),
        watch: &Watch<'_>,
    ) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        let call = dispatch_call(format, self.pass.top_k());
        let step = Step::Count(call);
        group.launch(desk, &mut self.pass, step, (number, call), watch)?;
        self.take_counts()
    }

    /// Copies what the last count has left.
    pub(crate) fn take_counts(&mut self) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        let geometry = group.tables().geometry();
        let counted = self.pass.counted(geometry).map_err(HalError::from)?;
        let (counts, pass) = (&mut self.counts, counted);
        let own = counts.per_expert.len() as u32;
        for (source, received) in (0..).zip(&mut counts.per_source) {
            *received = pass.received(source);
        }
        let mut ranges = counts.ranges.iter_mut();
        for (local, of_expert) in (0..).zip(&mut counts.per_expert) {
            *of_expert = 0;
            for source in 0..geometry.ranks {
                let (count, begin) = pass.of_expert(geometry, source, local);
                *of_expert += count;
                if let Some(range) = ranges.next() {
                    *range = (begin, count);
                }
            }
        }
        for (local, offset) in (0..).zip(&mut counts.offsets) {
            *offset = match self.layout.is_by_expert() {
                true => pass.offset(local),
                false => 0,
            };
        }
        counts.rows = pass.offset(own).into();
        self.is_counted = true;
        Ok(())
    }

    fn send_sums(
        &mut self,
        (rows, weights): (&[u8], Weights<'_>),
        both: bool,
        watch: &Watch<'_>,
    ) -> Result<(), MoeError> {
        self.can_combine()?;
        let gives_weights = matches!(weights, Weights::Given(_));
        let call = combine_call(gives_weights, self.pass.top_k());
        let rows = (rows, self.counts.rows);
        let summing = Summing::new(&self.pass, rows, weights, self.sizes(), call);
        let summing = summing.map_err(|reason| self.group.usage(reason))?;
        let group = Arc::clone(&self.group);
        let mut desk = group.desk()?;
        let number = self.next_to_send(&desk, both)?;
        if summing.gives_weights() {
            let step = Step::SendWeights(&summing);
            group.launch(&mut desk, &mut self.pass, step, (number, call), watch)?;
        }
        let step = Step::SendSums(&summing);
        group.launch(&mut desk, &mut self.pass, step, (number, call), watch)?;
        desk.sent += 1;
        self.state = State::CombineSent {
            number,
            gives_weights,
        };
        Ok(())
    }

    fn receive_sums(&mut self, summed: &Summed<'_>, watch: &Watch<'_>) -> Result<(), MoeError> {
        let group = Arc::clone(&self.group);
        let (number, gives_weights) = self.sent_combine()?;
        let call = combine_call(gives_weights, self.pass.top_k());
        let mut desk = group.desk()?;
        self.next_to_complete(&desk, number)?;
        let step = Step::ReceiveSums(summed);
        group.launch(&mut desk, &mut self.pass, step, (number, call), watch)?;
        desk.completed += 1;
        self.state = State::Dispatched;
        Ok(())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let State::DispatchSent { .. } | State::CombineSent { .. } = self.state {
            self.group.abandon();
        }
    }
}
