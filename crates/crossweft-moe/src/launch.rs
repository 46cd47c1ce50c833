//! The tables of groups and passes, and launches of the device code on them.
//!
//! What device code is given addresses of is checked here: [`Sending`], [`Receiving`], [`Summing`] and [`Summed`] can
//! only be made of buffers that are large enough.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use crossweft_channel::{Endpoint, Image, ImageBuilder, RegisteredMemory};
use crossweft_device::gpu::WARP;
use crossweft_device::gpu::moe::STAGING_BYTES;
use crossweft_device::moe::combine::{self, Weighting};
use crossweft_device::moe::dispatch::{self, Quantise};
use crossweft_device::moe::rows::HostRows;
use crossweft_device::moe::{
    Call, Geometry, Group as Program, NONE, Phase, Routes, SENT, STATE_LINES, announced, clear,
    has_done,
};
use crossweft_device::{Memory as _, Raw, Stopped};
use crossweft_hal::Device;
use crossweft_hal::cpu::{Context, Grid, HostBlock, Interrupted};
use crossweft_hal::cuda::CudaError;
use crossweft_kernels::MAX_THREADS;

use crate::MoeError;
use crate::handle::{DispatchOutput, Experts, ExpertsMut, Routing, Tokens, Weights};
use crate::layout::{Format, Layout, OutputShape, ScaleType};

const LINE: usize = 64;

/// Rooms for tables of words, cache line by cache line.
fn lines(bytes: u64) -> usize {
    // Sizes of groups are limited when they are made.
    bytes.div_ceil(LINE as u64) as usize
}

/// This rank's tables and memory, wherever they are.
#[derive(Clone, Debug)]
struct Home(Device);

impl Home {
    /// Copies what is at `address` into `data`.
    ///
    /// # Safety
    /// The address must be valid for as many bytes, whose writers have all ended.
    unsafe fn read(&self, address: u64, data: &mut [u8]) -> Result<(), CudaError> {
        if let Device::Cuda(context) = &self.0 {
            // SAFETY: the caller's promise.
            return unsafe { context.read(address, data) };
        }
        for (at, byte) in (address..).zip(data) {
            // SAFETY: the caller's promise.
            *byte = unsafe { Raw.read(at) };
        }
        Ok(())
    }

    /// A word that others may be writing.
    ///
    /// # Safety
    /// The address must be valid, and aligned.
    unsafe fn load(&self, address: u64) -> Result<u64, CudaError> {
        let mut bytes = [0; 8];
        match &self.0 {
            // SAFETY: the caller's promise. A copy of an aligned word takes it whole.
            Device::Cuda(context) => unsafe { context.read(address, &mut bytes)? },
            // SAFETY: as above.
            _ => return Ok(unsafe { Raw.load(address) }),
        }
        Ok(u64::from_ne_bytes(bytes))
    }

    /// # Safety
    /// As for [`load`](Self::load), of a word that nobody else writes.
    unsafe fn store(&self, address: u64, value: u64) -> Result<(), CudaError> {
        match &self.0 {
            // SAFETY: the caller's promise.
            Device::Cuda(context) => unsafe { context.write(address, &value.to_ne_bytes()) },
            _ => {
                // SAFETY: as above.
                unsafe { Raw.store(address, value) };
                Ok(())
            }
        }
    }
}

/// A group's tables.
#[derive(Debug)]
pub(crate) struct GroupTables {
    program: Program,
    bytes: u64,
    home: Home,
    /// Where this rank's part of the shared memory is.
    own: u64,
    // What the program points to.
    _image: Image,
}

impl GroupTables {
    pub(crate) fn new(
        endpoint: &Endpoint,
        geometry: Geometry,
        memory: &RegisteredMemory,
        (blocks, salt): (u32, u32),
    ) -> Result<Self, MoeError> {
        let ranks = geometry.ranks;
        let memories: Vec<u64> = (0..ranks)
            .map(|rank| memory.addr(rank))
            .collect::<Result<_, _>>()?;
        let mut image = ImageBuilder::default();
        let memories = image.put(&memories);
        let mut zeros = |bytes: u64| image.zeros(lines(bytes));
        let masked = zeros(8 * u64::from(ranks));
        let state = zeros((STATE_LINES * LINE) as u64);
        let marks = zeros(2 * 8 * geometry.mark_words(blocks));
        let returns = zeros(4 * u64::from(blocks) * u64::from(ranks));
        // A thread block has so many warps at most, each with so much of a row.
        let (warps, staging_bytes) = match endpoint.device() {
            Device::Cpu => (1, geometry.row_bytes()),
            _ => (
                MAX_THREADS / WARP,
                STAGING_BYTES.next_multiple_of(LINE as u64),
            ),
        };
        let staging = zeros(u64::from(blocks) * u64::from(warps) * staging_bytes);
        let bytes = zeros(0);
        let image = image.finish(endpoint.device(), "preparing a mixture of experts")?;
        let program = Program {
            geometry,
            memories: image.addr(memories),
            own: memory.local().addr(),
            masked: image.addr(masked),
            state: image.addr(state),
            marks: image.addr(marks),
            returns: image.addr(returns),
            staging: image.addr(staging),
            staging_bytes,
            salt,
            rank: endpoint.rank(),
            blocks,
        };
        Ok(Self {
            program,
            bytes,
            home: Home(endpoint.device().clone()),
            own: memory.local().addr(),
            _image: image,
        })
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What device code is given.
    pub(crate) fn program(&self) -> &Program {
        &self.program
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.program.geometry
    }

    fn mask(&self, rank: u32) -> u64 {
        assert!(rank < self.geometry().ranks, "no such rank");
        self.program.masked + 8 * u64::from(rank)
    }

    /// Whether a rank is left out; if the device is lost, nobody is.
    pub(crate) fn is_masked(&self, rank: u32) -> bool {
        // SAFETY: one of the image's words, which are written whole.
        unsafe { self.home.load(self.mask(rank)) }.unwrap_or_default() != 0
    }

    pub(crate) fn set_masked(&self, rank: u32, masked: bool) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.home.store(self.mask(rank), masked.into()) }
    }

    /// The word at `offset` of this rank's part of the shared memory; 0 if the device is lost.
    fn word(&self, offset: u64) -> u64 {
        // SAFETY: device code names only words of that memory, which are written whole.
        unsafe { self.home.load(self.own + offset) }.unwrap_or_default()
    }

    /// The word at `offset` of the state, which only this rank's launches change; 0 if the device is lost.
    pub(crate) fn state(&self, offset: u64) -> u64 {
        // SAFETY: the callers name words of the state.
        unsafe { self.home.load(self.program.state + offset) }.unwrap_or_default()
    }

    /// Forgets what a launch on a device that was stopped has left, before which `sent` calls had been sent; none may be under
    /// way.
    pub(crate) fn clear_on_device(&self, sent: u64) -> Result<(), CudaError> {
        let Device::Cuda(context) = &self.home.0 else {
            return Ok(());
        };
        // What launches change lies side by side in the image. It is cleared in a copy, by what clears it on the host.
        let Program { state, staging, .. } = self.program;
        let mut bytes = vec![0; (staging - state) as usize];
        // SAFETY: tables of the image; no launch is under way.
        unsafe { context.read(state, &mut bytes)? };
        let mut words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()))
            .collect();
        let here = words.as_mut_ptr() as u64;
        let moved = |address: u64| here + (address - state);
        let copy = Program {
            state: here,
            marks: moved(self.program.marks),
            returns: moved(self.program.returns),
            ..self.program
        };
        // SAFETY: the copy's tables are as large as the program's, and nobody else's.
        unsafe { clear(&Raw, &copy, sent) };
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        // SAFETY: as above.
        unsafe { context.write(state, &bytes) }
    }

    /// Whether `rank` has done its part of a phase of a call.
    pub(crate) fn has_done(&self, phase: Phase, call: u64, rank: u32) -> bool {
        assert!(rank < self.geometry().ranks, "no such rank");
        has_done(
            self.geometry(),
            |offset| self.word(offset),
            phase,
            call,
            rank,
        )
    }

    /// The signature of what `rank` calls as number `call`, if it has said so.
    pub(crate) fn announced(&self, call: u64, rank: u32) -> Option<u32> {
        assert!(rank < self.geometry().ranks, "no such rank");
        announced(self.geometry(), |offset| self.word(offset), call, rank)
            .map(|said| said.call.signature)
    }

    fn own_experts(&self) -> u32 {
        self.geometry().local_experts(self.program.rank)
    }
}

/// The tables of a pass.
#[derive(Debug)]
pub(crate) struct PassTables {
    routes: Routes,
    bytes: u64,
    home: Home,
    // What the routes point to.
    _image: Image,
}

impl PassTables {
    pub(crate) fn new(
        endpoint: &Endpoint,
        geometry: &Geometry,
        (layout, blocks): (Layout, u32),
    ) -> Result<Self, MoeError> {
        let (ranks, tokens) = (u64::from(geometry.ranks), u64::from(geometry.max_tokens));
        let (top_k, experts) = (
            u64::from(geometry.top_k),
            u64::from(geometry.most_experts()),
        );
        let mut image = ImageBuilder::default();
        let mut words = |count: u64| image.zeros(lines(4 * count));
        let places = [
            words(tokens * top_k),
            words(tokens * top_k),
            words(tokens * ranks),
            words(ranks),
            words(ranks * tokens * top_k),
            words(ranks * tokens * top_k),
            // A thread block's own.
            words(ranks),
            words(ranks * experts),
            words(ranks * experts),
            words(experts),
            words(ranks),
            words(experts + 1),
        ];
        let stride = words(0) - places[6];
        for _ in 1..blocks {
            words(stride / 4);
        }
        let bytes = words(0);
        let image = image.finish(endpoint.device(), "preparing a pass")?;
        let [
            experts,
            weights,
            slots,
            sent,
            positions,
            received_weights,
            received,
            counts,
            begins,
            totals,
            bases,
            offsets,
        ] = places.map(|place| image.addr(place));
        let routes = Routes {
            experts,
            weights,
            slots,
            sent,
            received,
            counts,
            begins,
            totals,
            bases,
            offsets,
            positions,
            received_weights,
            stride,
            tokens: 0,
            top_k: 0,
            placement: layout.placement(),
            alignment: layout.alignment(),
        };
        Ok(Self {
            routes,
            bytes,
            home: Home(endpoint.device().clone()),
            _image: image,
        })
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What device code is given.
    pub(crate) fn routes(&self) -> &Routes {
        &self.routes
    }

    pub(crate) fn tokens(&self) -> u32 {
        self.routes.tokens
    }

    pub(crate) fn top_k(&self) -> u32 {
        self.routes.top_k
    }

    /// Takes where tokens go. Changes nothing if that cannot be, and says why.
    pub(crate) fn route(
        &mut self,
        geometry: &Geometry,
        routing: &Routing<'_>,
    ) -> Result<(), String> {
        let Routing {
            experts,
            top_k,
            weights,
        } = routing;
        let count = experts.len();
        let each = (*top_k).max(1) as usize;
        if !count.is_multiple_of(each) {
            return Err(format!("{count} experts are no whole number of top-{each}"));
        }
        let tokens = u32::try_from(count / each).unwrap_or(u32::MAX);
        check_size(geometry, tokens, *top_k)?;
        if let Some(weights) = weights.filter(|weights| weights.len() != count) {
            let weights = weights.len();
            return Err(format!("{weights} weights for {count} experts"));
        }
        let most = i64::from(geometry.experts);
        if let Some((index, expert)) = (0..count)
            .map(|index| (index, experts.at(index)))
            .find(|&(_, expert)| expert < -1 || expert >= most)
        {
            let (token, k) = (index / each, index % each);
            return Err(format!(
                "expert {expert} (token {token}, choice {k}); there are {most}, and -1 is for none"
            ));
        }
        for index in 0..count {
            let at = index / each * geometry.top_k as usize + index % each;
            let at = 4 * at as u64;
            // In range: checked above.
            let expert = experts.at(index) as i32;
            let weight = weights.and_then(|weights| weights.get(index).copied());
            // SAFETY: the image's tables have room for the most tokens and top-k, and `self` is borrowed alone.
            unsafe {
                Raw.write(self.routes.experts + at, expert);
                Raw.write(self.routes.weights + at, weight.unwrap_or(1.0));
            }
        }
        self.routes.tokens = tokens;
        self.routes.top_k = *top_k;
        Ok(())
    }

    /// Takes how many tokens go somewhere; where, device code is told. Changes nothing if that cannot be, and says why.
    pub(crate) fn resize(
        &mut self,
        geometry: &Geometry,
        (tokens, top_k): (u32, u32),
    ) -> Result<(), String> {
        check_size(geometry, tokens, top_k)?;
        self.routes.tokens = tokens;
        self.routes.top_k = top_k;
        Ok(())
    }

    /// What the last count has left. On a GPU it is copied, once the launch has ended.
    pub(crate) fn counted(&self, geometry: &Geometry) -> Result<Counted<'_>, CudaError> {
        let copy = match &self.home.0 {
            Device::Cpu => None,
            _ => {
                let end = self.routes.offsets + 4 * (u64::from(geometry.most_experts()) + 1);
                let mut bytes = vec![0; (end - self.routes.received) as usize];
                // SAFETY: tables of the image, one behind another; the launch has ended.
                unsafe { self.home.read(self.routes.received, &mut bytes)? };
                Some(bytes)
            }
        };
        Ok(Counted { pass: self, copy })
    }
}

/// How many rows came in a pass, and where they lie.
pub(crate) struct Counted<'a> {
    pass: &'a PassTables,
    /// A copy of the tables from [`Routes::received`] on, where they are not the host's.
    copy: Option<Vec<u8>>,
}

impl Counted<'_> {
    /// Rows from each source.
    pub(crate) fn received(&self, source: u32) -> u32 {
        self.word(self.pass.routes.received, source.into())
    }

    /// Rows from a source for a local expert, and the first of them.
    pub(crate) fn of_expert(&self, geometry: &Geometry, source: u32, local: u32) -> (u32, u32) {
        let at = u64::from(source) * u64::from(geometry.most_experts()) + u64::from(local);
        (
            self.word(self.pass.routes.counts, at),
            self.word(self.pass.routes.begins, at),
        )
    }

    /// The first row of each local expert; for their number, rows in all.
    pub(crate) fn offset(&self, local: u32) -> u32 {
        self.word(self.pass.routes.offsets, local.into())
    }

    fn word(&self, table: u64, index: u64) -> u32 {
        let address = table + 4 * index;
        let Some(copy) = &self.copy else {
            // SAFETY: the caller's indices are below the group's sizes, and launches borrow the pass alone.
            return unsafe { Raw.read(address) };
        };
        let at = (address - self.pass.routes.received) as usize;
        let word = copy.get(at..at + 4).and_then(|word| word.try_into().ok());
        word.map_or(0, u32::from_ne_bytes)
    }
}

/// Whether a group is for so many tokens and experts of each.
fn check_size(geometry: &Geometry, tokens: u32, top_k: u32) -> Result<(), String> {
    if top_k == 0 || top_k > geometry.top_k {
        let most = geometry.top_k;
        return Err(format!("top-{top_k}; the group is for 1 to {most}"));
    }
    if tokens > geometry.max_tokens {
        let most = geometry.max_tokens;
        return Err(format!("{tokens} tokens; the group is for at most {most}"));
    }
    Ok(())
}

fn address(slice: &[u8]) -> u64 {
    slice.as_ptr().expose_provenance() as u64
}

/// There must be `expected` of what `name` says.
fn expect(name: &str, found: usize, expected: u64) -> Result<(), String> {
    match found as u64 == expected {
        true => Ok(()),
        false => Err(format!("{found} {name}; there must be {expected}")),
    }
}

/// What a dispatch sends.
#[derive(Debug)]
pub(crate) struct Sending<'a>(dispatch::Input, PhantomData<&'a [u8]>);

impl<'a> Sending<'a> {
    /// Of `pass`, whose tokens they must be; says what is wrong.
    pub(crate) fn new(
        pass: &PassTables,
        tokens: Tokens<'a>,
        (hidden, dtype): (u32, crate::DataType),
        call: Call,
    ) -> Result<Self, String> {
        let count = u64::from(pass.tokens());
        let format = tokens.format();
        let (elements, scales, quantise) = match tokens {
            Tokens::Plain(elements) => (elements, None, Quantise::No),
            Tokens::Quantised {
                elements, scales, ..
            } => (elements, Some(scales), Quantise::No),
            Tokens::Quantise {
                elements,
                scale_type: ScaleType::Ue8m0,
                ..
            } => (elements, None, Quantise::Exponents),
            Tokens::Quantise {
                elements,
                powers_of_two,
                ..
            } => match powers_of_two {
                true => (elements, None, Quantise::PowersOfTwo),
                false => (elements, None, Quantise::F32),
            },
        };
        if format != Format::Plain && !hidden.is_multiple_of(16) {
            return Err(format!(
                "a hidden size of {hidden} in f8e4m3; it must be a multiple of 16"
            ));
        }
        let payload_bytes = format.token_bytes(hidden, dtype);
        let token_bytes = match quantise {
            Quantise::No => payload_bytes,
            _ => Format::Plain.token_bytes(hidden, dtype),
        };
        let scale_bytes = format.scale_bytes(hidden);
        expect("bytes of tokens", elements.len(), count * token_bytes)?;
        if let Some(scales) = scales {
            expect("bytes of scales", scales.len(), count * scale_bytes)?;
        }
        let input = dispatch::Input {
            tokens: address(elements),
            scales: scales.map_or(0, address),
            hidden: hidden.into(),
            token_bytes,
            payload_bytes,
            scale_bytes,
            quantise,
            call,
        };
        Ok(Self(input, PhantomData))
    }
}

/// Where a dispatch lays out what comes.
#[derive(Debug)]
pub(crate) struct Receiving<'a>(dispatch::Output, PhantomData<&'a mut [u8]>);

impl<'a> Receiving<'a> {
    /// Room for the rows that `output`'s tokens have room for, at most as `shape` says; says what is wrong.
    pub(crate) fn new(shape: &OutputShape, output: DispatchOutput<'a>) -> Result<Self, String> {
        let DispatchOutput {
            tokens,
            scales,
            experts,
            weights,
            sources,
        } = output;
        let rows = (tokens.len() as u64).checked_div(shape.row_bytes);
        // More than can come is as good as that.
        let shape = shape.with_rows(rows.unwrap_or_default().min(shape.rows));
        let at_least = |name: &str, found: usize, expected: u64| match found as u64 >= expected {
            true => Ok(()),
            false => Err(format!(
                "{name} of {} rows have room for {found}; it must be {expected}",
                shape.rows
            )),
        };
        let scales = match scales {
            Some(_) if shape.scale_row_bytes == 0 => {
                return Err(
                    "room for scales, which tokens that are not quantised do not have".into(),
                );
            }
            Some(scales) => {
                at_least("scales", scales.len(), shape.scale_bytes())?;
                address(scales)
            }
            None if shape.scale_row_bytes > 0 => {
                return Err("no room for the scales of quantised tokens".into());
            }
            None => 0,
        };
        let (experts, wide) = match experts {
            Some(_) if shape.experts_per_row == 0 => {
                return Err(
                    "room for experts, which are known of rows that are grouped by them".into(),
                );
            }
            Some(ExpertsMut::I32(experts)) => {
                at_least("experts", experts.len(), shape.experts())?;
                (experts.as_mut_ptr().expose_provenance() as u64, 0)
            }
            Some(ExpertsMut::I64(experts)) => {
                at_least("experts", experts.len(), shape.experts())?;
                (experts.as_mut_ptr().expose_provenance() as u64, 1)
            }
            None => (0, 0),
        };
        let weights = match weights {
            Some(weights) => {
                at_least("weights", weights.len(), shape.weights())?;
                weights.as_mut_ptr().expose_provenance() as u64
            }
            None => 0,
        };
        let sources = match sources {
            Some(sources) => {
                at_least("sources", sources.len(), shape.rows)?;
                sources.as_mut_ptr().expose_provenance() as u64
            }
            None => 0,
        };
        let output = dispatch::Output {
            tokens: tokens.as_mut_ptr().expose_provenance() as u64,
            scales,
            experts,
            weights,
            sources,
            capacity: shape.rows,
            payload_bytes: shape.row_bytes,
            scale_bytes: shape.scale_row_bytes,
            wide,
        };
        Ok(Self(output, PhantomData))
    }

    /// Rows that there is room for.
    pub(crate) fn rows(&self) -> u64 {
        self.0.capacity
    }
}

/// What a combine sums and sends.
#[derive(Debug)]
pub(crate) struct Summing<'a>(combine::Input, PhantomData<&'a [u8]>);

impl<'a> Summing<'a> {
    /// `rows` of the experts of a dispatched pass, of which there must be `most`; says what is wrong.
    pub(crate) fn new(
        pass: &PassTables,
        (rows, most): (&'a [u8], u64),
        weights: Weights<'a>,
        (hidden, dtype): (u32, crate::DataType),
        call: Call,
    ) -> Result<Self, String> {
        let payload_bytes = Format::Plain.token_bytes(hidden, dtype);
        if (rows.len() as u64) < most * payload_bytes {
            let found = rows.len();
            return Err(format!(
                "the experts' rows are {found} bytes; {most} rows of {payload_bytes} bytes were dispatched"
            ));
        }
        let (weighting, weights) = match weights {
            Weights::One => (Weighting::One, 0),
            _ if !pass.routes.placement.is_by_expert() => {
                return Err(
                    "weights for rows that are not grouped by expert; apply them before, and take none here"
                        .into(),
                );
            }
            Weights::Dispatched => (Weighting::Dispatched, 0),
            Weights::Given(weights) => {
                let count = u64::from(pass.tokens()) * u64::from(pass.top_k());
                expect("weights", weights.len(), count)?;
                let address = weights.as_ptr().expose_provenance() as u64;
                (Weighting::Given, address)
            }
        };
        let input = combine::Input {
            rows: address(rows),
            weights,
            hidden: hidden.into(),
            payload_bytes,
            weighting,
            call,
        };
        Ok(Self(input, PhantomData))
    }

    /// Whether weights are sent first.
    pub(crate) fn gives_weights(&self) -> bool {
        self.0.weighting == Weighting::Given
    }
}

/// Where a combine sums what comes back.
#[derive(Debug)]
pub(crate) struct Summed<'a>(u64, combine::Input, PhantomData<&'a mut [u8]>);

impl<'a> Summed<'a> {
    /// A row for each token of the pass; says what is wrong.
    pub(crate) fn new(
        pass: &PassTables,
        output: &'a mut [u8],
        (hidden, dtype): (u32, crate::DataType),
        call: Call,
    ) -> Result<Self, String> {
        let payload_bytes = Format::Plain.token_bytes(hidden, dtype);
        let expected = u64::from(pass.tokens()) * payload_bytes;
        expect("bytes of combined tokens", output.len(), expected)?;
        let input = combine::Input {
            hidden: hidden.into(),
            payload_bytes,
            call,
            ..combine::Input::default()
        };
        let output = output.as_mut_ptr().expose_provenance() as u64;
        Ok(Self(output, input, PhantomData))
    }
}

/// A launch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step<'a> {
    SendTokens(&'a Sending<'a>),
    Count(Call),
    ReceiveTokens(&'a Receiving<'a>),
    SendWeights(&'a Summing<'a>),
    SendSums(&'a Summing<'a>),
    ReceiveSums(&'a Summed<'a>),
}

impl Step<'_> {
    /// Runs it on the CPU. The grid must have the group's blocks, and whoever has it be alone with the group on this
    /// rank. The pass must be in the state that its handle says.
    pub(crate) fn launch(
        self,
        grid: &mut Grid,
        context: &Context<'_>,
        group: &GroupTables,
        pass: &mut PassTables,
        rows: &HostRows,
    ) -> Result<(), Interrupted> {
        assert_eq!(grid.blocks(), group.program.blocks, "the group's grid");
        let program = &group.program;
        let body = |block: &HostBlock<'_>, index: u32| -> Result<(), Stopped> {
            let routes = &pass.routes.of_block(index);
            // SAFETY: the tables were made for this process and live in `group` and `pass`, of which one is borrowed
            // alone, and whoever has the grid is alone with the other. Buffers were checked when `self` was made, and
            // its borrows vouch for them; blocks of a grid run on one thread.
            unsafe {
                match self {
                    Self::SendTokens(sending) => {
                        dispatch::send(block, rows, program, routes, &sending.0, index)
                    }
                    Self::Count(call) => dispatch::count(block, program, routes, call),
                    Self::ReceiveTokens(receiving) => {
                        dispatch::receive(block, rows, program, routes, &receiving.0, index)
                    }
                    Self::SendWeights(summing) => {
                        combine::send_weights(block, program, routes, &summing.0, index)
                    }
                    Self::SendSums(summing) => {
                        combine::send(block, rows, program, routes, &summing.0, index)
                    }
                    Self::ReceiveSums(Summed(output, input, _)) => {
                        combine::receive(block, rows, program, routes, *output, input, index)
                    }
                }
            }
        };
        grid.launch(context, &body).inspect_err(|_| {
            // SAFETY: the launch has ended. Blocks of the CPU count a call as sent when all have sent it.
            unsafe { clear(&Raw, program, group.state(SENT)) };
        })
    }
}

/// The experts of the group's tables and what is laid out by them must fit the indices of device code.
pub(crate) fn fits(shape: &OutputShape) -> bool {
    shape.rows < u64::from(NONE)
}

impl Experts<'_> {
    pub(crate) fn at(&self, index: usize) -> i64 {
        match self {
            Self::I32(experts) => experts[index].into(),
            Self::I64(experts) => experts[index],
        }
    }
}

impl GroupTables {
    /// The room for `format` in `layout`.
    pub(crate) fn shape(
        &self,
        (layout, top_k): (Layout, u32),
        format: Format,
        (hidden, dtype): (u32, crate::DataType),
    ) -> OutputShape {
        let row = (
            format.token_bytes(hidden, dtype),
            format.scale_bytes(hidden),
        );
        OutputShape::new(self.geometry(), self.own_experts(), (layout, top_k), row)
    }
}
