//! Passes on a CUDA device, ranks sharing it: the same bits as on the CPU, graphs, faults. Every test says so and does
//! nothing where there is no device. Run with `CUDA_DEVICE_MAX_CONNECTIONS=32`.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{Batch, Case, Skew, fill, job_on, soon};
use crossweft_channel::Endpoint;
use crossweft_hal::cuda::{Context, Driver, Stream};
use crossweft_hal::{Device, Memory};
use crossweft_moe::{
    DataType, DeviceOutput, DeviceRouting, DeviceTokens, DeviceWeights, DispatchOutput, Experts,
    ExpertsMut, Format, Group, GroupOptions, Handle, Layout, MoeError, OutputShape, Routing,
    ScaleType, Tokens, Weights,
};

/// The first device, or a line that says why not.
fn device() -> Option<Device> {
    let found = Driver::open().and_then(|driver| driver.device(0));
    match found.and_then(|device| Context::retain(&device)) {
        Ok(context) => Some(Device::Cuda(context)),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

macro_rules! device {
    () => {
        match device() {
            Some(device) => device,
            None => return,
        }
    };
}

/// How tokens travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Travel {
    Plain,
    /// Quantised on the way, with scales of a type, perhaps powers of two.
    Quantise(ScaleType, bool),
}

impl Travel {
    fn format(self) -> Format {
        match self {
            Self::Plain => Format::Plain,
            Self::Quantise(scale_type, _) => Format::F8E4M3(scale_type),
        }
    }
}

/// How a case is run.
#[derive(Clone, Copy, Debug)]
struct How {
    layout: Layout,
    travel: Travel,
    blocks: u32,
    /// In two halves, with all ranks between them: no kernel waits for one that is not yet there.
    staged: bool,
    wide: bool,
    given: bool,
    /// Whether ranks are left out that are late, by a time that is then short.
    masking: bool,
}

const LOW_LATENCY: How = How {
    layout: Layout::ExpertMajor,
    travel: Travel::Plain,
    blocks: 3,
    staged: false,
    wide: false,
    given: false,
    masking: false,
};

fn group(endpoint: &Arc<Endpoint>, case: &Case, how: &How) -> Arc<Group> {
    let mut options = GroupOptions::new(case.experts, case.max_tokens, case.hidden, case.top_k);
    options.dtype = case.dtype;
    options.blocks = how.blocks;
    options.masking = how.masking;
    options.timeout = Duration::from_secs(if how.masking { 4 } else { 20 });
    Group::new(endpoint, options, soon()).unwrap()
}

/// What a pass leaves on a rank: everything that can be written to, and was something else before.
#[derive(Clone, Debug, PartialEq)]
struct Pass {
    tokens: Vec<u8>,
    scales: Vec<u8>,
    experts: Vec<u8>,
    weights: Vec<u8>,
    sources: Vec<u8>,
    made: Vec<u8>,
    combined: Vec<u8>,
}

const BEFORE: u8 = 0xa5;

impl Pass {
    fn before(case: &Case, how: &How, shape: &OutputShape, batch: &Batch) -> Self {
        let bytes = |count: u64| fill(BEFORE, count);
        let expert = if how.wide { 8 } else { 4 };
        Self {
            tokens: bytes(shape.token_bytes()),
            scales: bytes(shape.scale_bytes()),
            experts: bytes(expert * shape.experts()),
            weights: bytes(4 * shape.weights()),
            sources: bytes(4 * shape.rows),
            made: bytes(shape.rows * case.row_bytes() as u64),
            combined: bytes(batch.tokens.len() as u64),
        }
    }

    /// The first part that differs, and where.
    fn difference(&self, other: &Self) -> Option<(&'static str, usize)> {
        let parts = |pass: &Self| {
            [
                ("tokens", pass.tokens.clone()),
                ("scales", pass.scales.clone()),
                ("experts", pass.experts.clone()),
                ("weights", pass.weights.clone()),
                ("sources", pass.sources.clone()),
                ("made", pass.made.clone()),
                ("combined", pass.combined.clone()),
            ]
        };
        for ((name, ours), (_, theirs)) in parts(self).into_iter().zip(parts(other)) {
            if ours.len() != theirs.len() {
                return Some((name, ours.len().min(theirs.len())));
            }
            if let Some(at) = ours.iter().zip(&theirs).position(|(a, b)| a != b) {
                return Some((name, at));
            }
        }
        None
    }
}

/// What the experts made: of plain tokens what came, of quantised ones something else.
fn make(case: &Case, how: &How, pass: &mut Pass) {
    pass.made = match how.travel {
        Travel::Plain => pass.tokens.clone(),
        Travel::Quantise(..) => {
            let elements = pass.made.len() / case.dtype.size();
            let value = |i: usize| (i % 251) as f32 / 64.0 - 1.5;
            (0..elements)
                .flat_map(|i| common::encode(case.dtype, value(i)))
                .collect()
        }
    };
}

fn words<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}

/// A pass on the CPU.
fn on_cpu(
    case: &Case,
    how: &How,
    handle: &mut Option<Handle>,
    group: &Arc<Group>,
    step: u64,
) -> Pass {
    let batch = case.batch(group.rank(), step);
    let wide: Vec<i64> = batch.experts.iter().map(|&expert| expert.into()).collect();
    let routing = Routing {
        experts: match how.wide {
            true => Experts::I64(&wide),
            false => Experts::I32(&batch.experts),
        },
        top_k: case.top_k,
        weights: (!how.given).then_some(&batch.weights),
    };
    let handle = match handle {
        Some(handle) => {
            handle.route(&routing).unwrap();
            handle
        }
        None => handle.insert(group.handle(&routing, how.layout).unwrap()),
    };
    let shape = handle.output_shape(how.travel.format()).unwrap();
    let mut pass = Pass::before(case, how, &shape, &batch);
    let before = i32::from_ne_bytes([BEFORE; 4]);
    let mut experts = fill(before, shape.experts());
    let mut wide = fill(i64::from_ne_bytes([BEFORE; 8]), shape.experts());
    let mut weights = fill(f32::from_ne_bytes([BEFORE; 4]), shape.weights());
    let mut sources = fill(before, shape.rows);
    let output = DispatchOutput {
        tokens: &mut pass.tokens,
        scales: (shape.scale_row_bytes > 0).then_some(&mut pass.scales),
        experts: match (how.layout.is_by_expert(), how.wide) {
            (true, _) => None,
            (false, true) => Some(ExpertsMut::I64(&mut wide)),
            (false, false) => Some(ExpertsMut::I32(&mut experts)),
        },
        weights: Some(&mut weights),
        sources: Some(&mut sources),
    };
    let tokens = match how.travel {
        Travel::Plain => Tokens::Plain(&batch.tokens),
        Travel::Quantise(scale_type, powers_of_two) => Tokens::Quantise {
            elements: &batch.tokens,
            scale_type,
            powers_of_two,
        },
    };
    handle.dispatch(tokens, output).unwrap();
    if !how.layout.is_by_expert() {
        pass.experts = match how.wide {
            true => words(&wide, i64::to_ne_bytes),
            false => words(&experts, i32::to_ne_bytes),
        };
    }
    pass.weights = words(&weights, f32::to_ne_bytes);
    pass.sources = words(&sources, i32::to_ne_bytes);
    make(case, how, &mut pass);
    let weights = match (how.layout.is_by_expert(), how.given) {
        (false, _) => Weights::One,
        (true, false) => Weights::Dispatched,
        (true, true) => Weights::Given(&batch.weights),
    };
    let rows = handle.counts().unwrap().rows() as usize * case.row_bytes();
    handle
        .combine(&pass.made[..rows], weights, &mut pass.combined)
        .unwrap();
    pass
}

/// A rank's buffers on the device, for the largest pass.
struct Buffers {
    experts: Memory,
    weights: Memory,
    tokens: Memory,
    received: Memory,
    scales: Memory,
    local: Memory,
    received_weights: Memory,
    sources: Memory,
    made: Memory,
    combined: Memory,
}

impl Buffers {
    fn new(device: &Device, case: &Case, shape: &OutputShape) -> Self {
        let allocate = |bytes: u64| device.allocate(bytes.max(16)).unwrap();
        let choices = u64::from(case.max_tokens) * u64::from(case.top_k);
        let tokens = u64::from(case.max_tokens) * case.row_bytes() as u64;
        Self {
            experts: allocate(8 * choices),
            weights: allocate(4 * choices),
            tokens: allocate(tokens),
            received: allocate(shape.token_bytes()),
            scales: allocate(shape.scale_bytes()),
            local: allocate(8 * shape.experts()),
            received_weights: allocate(4 * shape.weights()),
            sources: allocate(4 * shape.rows),
            made: allocate(shape.rows * case.row_bytes() as u64),
            combined: allocate(tokens),
        }
    }

    /// What a pass begins with.
    fn put(&self, how: &How, batch: &Batch, pass: &Pass) {
        let experts = match how.wide {
            true => words(&batch.experts, |expert| i64::from(expert).to_ne_bytes()),
            false => words(&batch.experts, i32::to_ne_bytes),
        };
        self.experts.write(0, &experts).unwrap();
        let weights = words(&batch.weights, f32::to_ne_bytes);
        self.weights.write(0, &weights).unwrap();
        self.tokens.write(0, &batch.tokens).unwrap();
        self.received.write(0, &pass.tokens).unwrap();
        self.scales.write(0, &pass.scales).unwrap();
        self.local.write(0, &pass.experts).unwrap();
        self.received_weights.write(0, &pass.weights).unwrap();
        self.sources.write(0, &pass.sources).unwrap();
        self.combined.write(0, &pass.combined).unwrap();
    }

    /// What it has left.
    fn get(&self, pass: &mut Pass) {
        self.received.read(0, &mut pass.tokens).unwrap();
        self.scales.read(0, &mut pass.scales).unwrap();
        self.local.read(0, &mut pass.experts).unwrap();
        self.received_weights.read(0, &mut pass.weights).unwrap();
        self.sources.read(0, &mut pass.sources).unwrap();
        self.combined.read(0, &mut pass.combined).unwrap();
    }

    fn routing(&self, case: &Case, how: &How, count: usize) -> DeviceRouting {
        let mut routing = DeviceRouting::new(self.experts.addr(), count as u32, case.top_k);
        routing.wide = how.wide;
        if !how.given {
            routing.weights = self.weights.addr();
        }
        routing
    }

    fn tokens(&self, how: &How) -> DeviceTokens {
        let elements = self.tokens.addr();
        match how.travel {
            Travel::Plain => DeviceTokens::Plain(elements),
            Travel::Quantise(scale_type, powers_of_two) => DeviceTokens::Quantise {
                elements,
                scale_type,
                powers_of_two,
            },
        }
    }

    fn output(&self, how: &How, shape: &OutputShape) -> DeviceOutput {
        let mut output = DeviceOutput::new(self.received.addr(), shape.rows);
        if shape.scale_row_bytes > 0 {
            output.scales = self.scales.addr();
        }
        if !how.layout.is_by_expert() {
            output.experts = self.local.addr();
            output.wide = how.wide;
        }
        output.weights = self.received_weights.addr();
        output.sources = self.sources.addr();
        output
    }

    fn combine_weights(&self, how: &How) -> DeviceWeights {
        match (how.layout.is_by_expert(), how.given) {
            (false, _) => DeviceWeights::One,
            (true, false) => DeviceWeights::Dispatched,
            (true, true) => DeviceWeights::Given(self.weights.addr()),
        }
    }
}

/// A rank that runs passes on a device.
struct Rank<'a> {
    case: &'a Case,
    how: &'a How,
    group: Arc<Group>,
    handle: Handle,
    stream: Stream,
    buffers: Buffers,
    shape: OutputShape,
}

impl<'a> Rank<'a> {
    fn new(endpoint: &Arc<Endpoint>, case: &'a Case, how: &'a How) -> Self {
        let Device::Cuda(context) = endpoint.device() else {
            panic!("a job on a CUDA device");
        };
        let stream = Stream::new(context).unwrap();
        let group = group(endpoint, case, how);
        let handle = group.handle_on_device(how.layout).unwrap();
        let shape = group
            .output_shape(how.layout, how.travel.format(), case.top_k)
            .unwrap();
        let buffers = Buffers::new(endpoint.device(), case, &shape);
        Self {
            case,
            how,
            group,
            handle,
            stream,
            buffers,
            shape,
        }
    }

    /// A pass; ranks meet at `meet` before each call, and between the halves of staged ones.
    fn pass(&mut self, step: u64, meet: &Barrier) -> Result<Pass, MoeError> {
        let (case, how, stream) = (self.case, self.how, &self.stream);
        let batch = case.batch(self.group.rank(), step);
        let mut pass = Pass::before(case, how, &self.shape, &batch);
        self.buffers.put(how, &batch, &pass);
        let routing = self.buffers.routing(case, how, batch.count);
        let tokens = self.buffers.tokens(how);
        let output = self.buffers.output(how, &self.shape);
        meet.wait();
        // SAFETY: the buffers are for the largest pass, and nobody else's; this waits for the launches.
        unsafe {
            if how.staged {
                self.handle.dispatch_send_on(stream, &routing, tokens)?;
                self.group.wait(stream)?;
                meet.wait();
                self.handle.wait_for_counts_on(stream)?;
                self.handle.dispatch_complete_on(stream, &output)?;
            } else {
                self.handle.dispatch_on(stream, &routing, tokens, &output)?;
            }
        }
        let rows = self.handle.counts_on(stream)?.rows();
        assert!(rows <= self.shape.rows);
        self.buffers.get(&mut pass);
        make(case, how, &mut pass);
        self.buffers.made.write(0, &pass.made).unwrap();
        let weights = self.buffers.combine_weights(how);
        let (made, combined) = (self.buffers.made.addr(), self.buffers.combined.addr());
        meet.wait();
        // SAFETY: as above.
        unsafe {
            if how.staged {
                self.handle.combine_send_on(stream, made, weights)?;
                self.group.wait(stream)?;
                meet.wait();
                self.handle.combine_complete_on(stream, combined)?;
            } else {
                self.handle.combine_on(stream, made, weights, combined)?;
            }
        }
        self.group.wait(stream)?;
        self.buffers.get(&mut pass);
        Ok(pass)
    }
}

const STEPS: u64 = 3;

/// Asserts that all ranks have the CPU's bits.
fn same_bits(device: &Device, case: &Case, how: &How) {
    let cpu = job_on(&Device::Cpu, case.ranks, |endpoint| {
        let (group, mut handle) = (group(endpoint, case, how), None);
        (0..STEPS)
            .map(|step| on_cpu(case, how, &mut handle, &group, step))
            .collect::<Vec<_>>()
    });
    let meet = Barrier::new(case.ranks as usize);
    let gpu = job_on(device, case.ranks, |endpoint| {
        let mut rank = Rank::new(endpoint, case, how);
        (0..STEPS)
            .map(|step| rank.pass(step, &meet).unwrap())
            .collect::<Vec<_>>()
    });
    for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        for (step, (cpu, gpu)) in cpu.iter().zip(gpu).enumerate() {
            assert_eq!(
                gpu.difference(cpu),
                None,
                "rank {rank} step {step} {case:?} {how:?}"
            );
        }
    }
}

const LAYOUTS: [Layout; 4] = [
    Layout::ExpertMajor,
    Layout::RankMajor,
    Layout::Flat,
    Layout::ExpertPacked { alignment: 4 },
];

/// A case with rows of several pieces for each thread, and of more tokens than share a word of marks.
fn large(ranks: u32) -> Case {
    Case {
        experts: 16,
        hidden: 3592,
        top_k: 8,
        max_tokens: 100,
        ..Case::new(ranks)
    }
}

#[test]
fn two_ranks_in_low_latency_mode_have_the_cpu_s_bits() {
    let device = device!();
    for layout in [Layout::ExpertMajor, Layout::RankMajor] {
        for blocks in [1, 3] {
            let how = How {
                layout,
                blocks,
                ..LOW_LATENCY
            };
            same_bits(&device, &Case::new(2), &how);
        }
        let how = How {
            layout,
            blocks: 16,
            ..LOW_LATENCY
        };
        same_bits(&device, &large(2), &how);
    }
}

#[test]
fn every_layout_staged_and_wide_has_the_cpu_s_bits() {
    let device = device!();
    for layout in LAYOUTS {
        for (staged, wide) in [(false, true), (true, false)] {
            let how = How {
                layout,
                staged,
                wide,
                blocks: 2,
                ..LOW_LATENCY
            };
            for ranks in [1, 2, 4, 8] {
                same_bits(&device, &Case::new(ranks), &how);
            }
            same_bits(&device, &large(3), &how);
        }
    }
}

#[test]
fn every_type_and_weights_given_late_have_the_cpu_s_bits() {
    let device = device!();
    for dtype in [DataType::Bf16, DataType::F16, DataType::F32] {
        for (layout, given) in [
            (Layout::ExpertMajor, true),
            (Layout::ExpertPacked { alignment: 3 }, false),
            (Layout::Flat, false),
        ] {
            let case = Case {
                dtype,
                hidden: 1000,
                max_tokens: 70,
                seed: 3,
                ..Case::new(2)
            };
            let how = How {
                layout,
                given,
                ..LOW_LATENCY
            };
            same_bits(&device, &case, &how);
        }
    }
}

#[test]
fn quantised_tokens_have_the_cpu_s_bits() {
    let device = device!();
    let travels = [
        Travel::Quantise(ScaleType::F32, false),
        Travel::Quantise(ScaleType::F32, true),
        Travel::Quantise(ScaleType::Ue8m0, true),
    ];
    for (dtype, hidden) in [
        (DataType::Bf16, 7168),
        (DataType::F16, 144),
        (DataType::F32, 1040),
    ] {
        for travel in travels {
            for layout in [Layout::ExpertMajor, Layout::Flat] {
                let case = Case {
                    dtype,
                    hidden,
                    ..Case::new(2)
                };
                let how = How {
                    layout,
                    travel,
                    ..LOW_LATENCY
                };
                same_bits(&device, &case, &how);
            }
        }
    }
}

#[test]
fn skewed_tokens_and_ranks_without_any_have_the_cpu_s_bits() {
    let device = device!();
    for skew in [Skew::One(3), Skew::Few, Skew::Nowhere] {
        for layout in LAYOUTS {
            let case = Case {
                skew,
                idle: vec![1],
                top_k: 5,
                max_tokens: 130,
                ..Case::new(4)
            };
            let how = How {
                layout,
                ..LOW_LATENCY
            };
            same_bits(&device, &case, &how);
        }
    }
}

/// Small shapes without kernels that wait for one another, for sanitizers.
#[test]
fn small_shapes_one_after_another() {
    let device = device!();
    for layout in LAYOUTS {
        let how = How {
            layout,
            staged: true,
            blocks: 2,
            ..LOW_LATENCY
        };
        same_bits(&device, &Case::new(1), &how);
        same_bits(&device, &Case::new(2), &how);
    }
    let how = How {
        travel: Travel::Quantise(ScaleType::F32, false),
        staged: true,
        ..LOW_LATENCY
    };
    let case = Case {
        hidden: 144,
        ..Case::new(2)
    };
    same_bits(&device, &case, &how);
}

#[test]
fn a_recorded_pass_is_replayed_with_other_tokens() {
    let device = device!();
    for layout in LAYOUTS {
        let case = &Case {
            hidden: 512,
            max_tokens: 100,
            // As many tokens each time: a graph keeps their number.
            skew: Skew::Random,
            ..Case::new(2)
        };
        let how = &How {
            layout,
            ..LOW_LATENCY
        };
        let whole = |rank: u32, step: u64| {
            let steps = (0..).filter(|&step| case.batch(rank, step).count == 100);
            steps.take(1 + step as usize).last().unwrap()
        };
        let cpu = job_on(&Device::Cpu, 2, |endpoint| {
            let (group, mut handle) = (group(endpoint, case, how), None);
            (0..STEPS)
                .map(|step| {
                    let step = whole(group.rank(), step);
                    on_cpu(case, how, &mut handle, &group, step)
                })
                .collect::<Vec<_>>()
        });
        let meet = Barrier::new(2);
        let gpu = job_on(&device, 2, |endpoint| {
            let mut rank = Rank::new(endpoint, case, how);
            let stream = &rank.stream;
            let capture = stream.begin_capture().unwrap();
            let (buffers, shape) = (&rank.buffers, &rank.shape);
            let routing = buffers.routing(case, how, 100);
            let (made, combined) = (buffers.received.addr(), buffers.combined.addr());
            // SAFETY: the buffers are nobody else's, and live until the graph is done with.
            unsafe {
                let (tokens, output) = (buffers.tokens(how), buffers.output(how, shape));
                let handle = &mut rank.handle;
                handle
                    .dispatch_on(stream, &routing, tokens, &output)
                    .unwrap();
                let weights = buffers.combine_weights(how);
                handle.combine_on(stream, made, weights, combined).unwrap();
            }
            let graph = capture.end().unwrap().instantiate().unwrap();
            let mut passes = Vec::new();
            for step in 0..STEPS {
                let step = whole(rank.group.rank(), step);
                let batch = case.batch(rank.group.rank(), step);
                let mut pass = Pass::before(case, how, shape, &batch);
                buffers.put(how, &batch, &pass);
                meet.wait();
                for _ in 0..10 {
                    // SAFETY: as above.
                    unsafe { graph.launch(stream).unwrap() };
                }
                rank.group.wait(stream).unwrap();
                buffers.get(&mut pass);
                pass.made.clone_from(&pass.tokens);
                passes.push(pass);
                meet.wait();
            }
            passes
        });
        for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
            for (step, (cpu, gpu)) in cpu.iter().zip(gpu).enumerate() {
                assert_eq!(gpu.difference(cpu), None, "rank {rank} step {step} {how:?}");
            }
        }
    }
}

#[test]
fn ranks_in_different_calls_name_each_other() {
    let device = device!();
    let case = &Case::new(2);
    let errors = job_on(&device, 2, |endpoint| {
        let mut rank = Rank::new(endpoint, case, &LOW_LATENCY);
        let batch = case.batch(0, 0);
        let (stream, buffers) = (&rank.stream, &rank.buffers);
        let pass = Pass::before(case, &LOW_LATENCY, &rank.shape, &batch);
        buffers.put(&LOW_LATENCY, &batch, &pass);
        let mut routing = buffers.routing(case, &LOW_LATENCY, 1);
        routing.top_k = 2 + rank.group.rank();
        let output = buffers.output(&LOW_LATENCY, &rank.shape);
        let tokens = buffers.tokens(&LOW_LATENCY);
        // SAFETY: the buffers are for the largest pass, and nobody else's; this waits for the launch.
        unsafe {
            let handle = &mut rank.handle;
            handle
                .dispatch_on(stream, &routing, tokens, &output)
                .unwrap();
        }
        let started = Instant::now();
        let error = rank.group.wait(stream).unwrap_err();
        assert!(
            started.elapsed() < Duration::from_secs(15),
            "not only at the deadline"
        );
        assert!(matches!(error, MoeError::Mismatch { .. }), "{error}");
        // SAFETY: nothing is launched.
        let again = unsafe {
            let handle = &mut rank.handle;
            handle.dispatch_complete_on(stream, &output)
        };
        // The call is over, as far as this rank is concerned.
        assert!(matches!(again, Err(MoeError::Usage { .. })), "{again:?}");
        // SAFETY: as above.
        let again = unsafe {
            let handle = &mut rank.handle;
            handle
                .dispatch_on(stream, &routing, tokens, &output)
                .unwrap_err()
        };
        assert!(matches!(again, MoeError::Poisoned { .. }), "{again}");
        error.to_string()
    });
    for (rank, error) in errors.iter().enumerate() {
        for words in [
            format!("rank {} is in call 0", 1 - rank),
            "top-2".to_owned(),
            "top-3".to_owned(),
        ] {
            assert!(error.contains(&words), "{error}");
        }
    }
}

#[test]
fn an_expert_that_does_not_exist_and_a_rank_that_never_calls_are_named() {
    let device = device!();
    let case = &Case::new(2);
    let mut options = GroupOptions::new(case.experts, case.max_tokens, case.hidden, case.top_k);
    options.timeout = Duration::from_secs(2);
    let meet = Barrier::new(2);
    job_on(&device, 2, |endpoint| {
        let group = Group::new(endpoint, options, soon()).unwrap();
        let Device::Cuda(context) = endpoint.device() else {
            panic!("a job on a CUDA device");
        };
        let stream = Stream::new(context).unwrap();
        let how = &LOW_LATENCY;
        let shape = group
            .output_shape(how.layout, Format::Plain, case.top_k)
            .unwrap();
        let buffers = Buffers::new(endpoint.device(), case, &shape);
        let mut batch = case.batch(0, 0);
        // Of one token; there are five.
        batch.experts = vec![0, 5, -1];
        let pass = Pass::before(case, how, &shape, &batch);
        buffers.put(how, &batch, &pass);
        let mut handle = group.handle_on_device(how.layout).unwrap();
        let mut call = || -> Result<(), MoeError> {
            let routing = buffers.routing(case, how, 1);
            let output = buffers.output(how, &shape);
            // SAFETY: the buffers are nobody else's; this waits for the launch.
            unsafe {
                handle.dispatch_on(&stream, &routing, buffers.tokens(how), &output)?;
            }
            group.wait(&stream)
        };
        match group.rank() {
            0 => {
                let error = call().unwrap_err();
                assert!(error.to_string().contains("expert 5 (choice 1"), "{error}");
                meet.wait();
            }
            _ => {
                batch.experts[1] = 0;
                buffers.put(how, &batch, &pass);
                let error = call().unwrap_err();
                let MoeError::Interrupted { peers, .. } = &error else {
                    panic!("{error}");
                };
                assert_eq!(peers, &[0], "{error}");
                assert!(error.to_string().contains("the counts"), "{error}");
                meet.wait();
            }
        }
    });
}

#[test]
fn masked_ranks_are_left_out_as_on_the_cpu() {
    let device = device!();
    for layout in LAYOUTS {
        left_out(
            &device,
            &How {
                layout,
                ..LOW_LATENCY
            },
        );
    }
}

#[test]
fn with_masking_a_rank_that_never_calls_is_left_out() {
    let device = device!();
    for (layout, staged, given) in [
        (Layout::ExpertMajor, false, true),
        (Layout::Flat, true, false),
    ] {
        left_out(
            &device,
            &How {
                layout,
                staged,
                given,
                masking: true,
                ..LOW_LATENCY
            },
        );
    }
}

/// Ranks 0 and 1 leave rank 2 out, which calls nothing: because they are told to, or because it is late.
fn left_out(device: &Device, how: &How) {
    let case = &Case::new(3);
    let mask = |group: &Group| group.set_masked(2, true).unwrap();
    let told = &How {
        masking: false,
        ..*how
    };
    let cpu = job_on(&Device::Cpu, 3, |endpoint| {
        let group = group(endpoint, case, told);
        let passes = (group.rank() < 2).then(|| {
            mask(&group);
            let mut handle = None;
            let steps = (0..STEPS).map(|step| on_cpu(case, how, &mut handle, &group, step));
            steps.collect::<Vec<_>>()
        });
        endpoint.agree("done", "meeting", soon()).unwrap();
        passes
    });
    let meet = Barrier::new(2);
    let gpu = job_on(device, 3, |endpoint| {
        let mut rank = Rank::new(endpoint, case, how);
        let passes = (rank.group.rank() < 2).then(|| {
            if !how.masking {
                mask(&rank.group);
                assert_eq!(rank.group.masked(), [false, false, true]);
            }
            // Also after launches that were stopped and made again.
            let steps = (0..STEPS).map(|step| rank.pass(step, &meet).unwrap());
            let passes: Vec<_> = steps.collect();
            assert_eq!(rank.group.masked(), [false, false, true]);
            passes
        });
        endpoint.agree("done", "meeting", soon()).unwrap();
        passes
    });
    for (rank, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        let (Some(cpu), Some(gpu)) = (cpu, gpu) else {
            continue;
        };
        for (step, (cpu, gpu)) in cpu.iter().zip(gpu).enumerate() {
            assert_eq!(gpu.difference(cpu), None, "rank {rank} step {step} {how:?}");
        }
    }
}
