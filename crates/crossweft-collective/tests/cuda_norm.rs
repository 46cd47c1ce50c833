//! All-reduce with residual addition, RMS normalisation and quantisation on a CUDA device that ranks share: the CPU's bits,
//! in one launch and in two, graphs, faults. Every test says so and does nothing where there is no device. Run with
//! `CUDA_DEVICE_MAX_CONNECTIONS=32`.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use crossweft_collective::{
    AllReduceRmsNorm, CollectiveError, Communicator, CommunicatorOptions, DataType, GROUP,
    Quantised, ReduceOp, RmsNormCall, RmsNormOptions, Scales, run_in_threads, run_in_threads_on,
};
use crossweft_executor::{NormBuffers, NormScales};
use crossweft_hal::cuda::{Context, Driver, Stream};
use crossweft_hal::{Device, Memory};
use crossweft_verify::{Pattern, fill, fingerprint};

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

const LIMIT: Duration = Duration::from_secs(20);

fn options(timeout: Duration) -> CommunicatorOptions {
    CommunicatorOptions { timeout }
}

fn on<T: Send>(
    device: &Device,
    ranks: u32,
    rank_main: impl Fn(&Communicator) -> Result<T, CollectiveError> + Sync,
) -> Vec<T> {
    run_in_threads_on(|_| Ok(device.clone()), ranks, options(LIMIT), rank_main).unwrap()
}

/// How a call quantises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    None,
    Static,
    PerToken,
    PerGroup,
}

const SCALE: f32 = 0.037;

/// Kinds of calls, with and without a residual.
const CALLS: [(Kind, bool); 6] = [
    (Kind::None, false),
    (Kind::None, true),
    (Kind::Static, true),
    (Kind::PerToken, false),
    (Kind::PerToken, true),
    (Kind::PerGroup, true),
];

/// What a call begins with.
struct Data {
    input: Vec<u8>,
    residual: Vec<u8>,
    weight: Vec<u8>,
}

impl Data {
    fn of(communicator: &Communicator, dtype: DataType, hidden: usize, tokens: usize) -> Self {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let bytes = tokens * hidden * dtype.size();
        let random = |seed, (rank, ranks), bytes| {
            let mut data = vec![0; bytes];
            let op = ReduceOp::Sum;
            fill(Pattern::Random, dtype, op, seed, rank, ranks, &mut data);
            data
        };
        Self {
            input: random(3, (rank, ranks), bytes),
            residual: random(4, (0, 1), bytes),
            weight: random(5, (0, 1), hidden * dtype.size()),
        }
    }
}

fn scales_of(kind: Kind, hidden: usize, tokens: usize) -> usize {
    match kind {
        Kind::PerToken => tokens,
        _ => tokens * hidden.div_ceil(GROUP),
    }
}

/// Fingerprints of all that calls leave, by what they are: output, residual, quantised values, scales.
type Left = Vec<(String, [u64; 4])>;

fn left(
    what: &str,
    (kind, with_residual): (Kind, bool),
    output: &[u8],
    residual: &[u8],
    values: &[u8],
    scales: &[u8],
) -> (String, [u64; 4]) {
    let of = [output, residual, values, scales].map(fingerprint);
    (format!("{what} {kind:?}, residual {with_residual}"), of)
}

/// Some calls of `fused`, on the host.
fn on_host(
    fused: &AllReduceRmsNorm,
    data: &Data,
    (dtype, hidden, tokens): (DataType, usize, usize),
    repeats: usize,
) -> Result<Left, CollectiveError> {
    let mut all = Vec::new();
    for call in CALLS {
        let (kind, with_residual) = call;
        let mut residual = data.residual.clone();
        let mut output = vec![0xa5; data.input.len()];
        let mut values = vec![0xa5; tokens * hidden];
        let mut scales = vec![0.5; scales_of(kind, hidden, tokens)];
        for _ in 0..repeats {
            let kinds = match kind {
                Kind::None => None,
                Kind::Static => Some(Scales::Static(SCALE)),
                Kind::PerToken => Some(Scales::PerToken(&mut scales)),
                Kind::PerGroup => Some(Scales::PerGroup(&mut scales)),
            };
            fused.run(RmsNormCall {
                input: &data.input,
                residual: with_residual.then_some(&mut residual),
                weight: &data.weight,
                output: &mut output,
                quantised: kinds.map(|scales| Quantised {
                    values: &mut values,
                    scales,
                }),
            })?;
        }
        let scales: Vec<u8> = scales
            .iter()
            .flat_map(|scale| scale.to_le_bytes())
            .collect();
        let what = format!("{dtype} {hidden} x {tokens}");
        all.push(left(&what, call, &output, &residual, &values, &scales));
    }
    Ok(all)
}

/// Memory of the device for calls, and where each buffer is in it.
struct Places {
    memory: Memory,
    bytes: usize,
    elements: usize,
    shift: u64,
    in_place: bool,
}

impl Places {
    /// Bytes from one buffer to the next: with room for the largest, and around it.
    fn apart(&self) -> u64 {
        (self.bytes as u64).next_multiple_of(256) + 1024
    }

    fn new(
        communicator: &Communicator,
        data: &Data,
        (elements, shift, in_place): (usize, u64, bool),
    ) -> Result<Self, CollectiveError> {
        let mut this = Self {
            // Scales of a token are 4 bytes.
            bytes: data.input.len().max(data.weight.len()).max(elements),
            memory: communicator.device().allocate(8)?,
            elements,
            shift,
            in_place,
        };
        this.memory = communicator.device().allocate(6 * this.apart())?;
        Ok(this)
    }

    /// Of the input, the residual, the weight, the output, the values and the scales.
    fn at(&self, buffer: u64, shift: u64) -> u64 {
        buffer * self.apart() + 512 + shift
    }

    fn buffers(&self, (kind, with_residual): (Kind, bool)) -> NormBuffers<(&Memory, u64)> {
        let at = |buffer, shift| (&self.memory, self.at(buffer, shift));
        let scales = match kind {
            Kind::None => None,
            Kind::Static => Some(NormScales::Static(SCALE)),
            Kind::PerToken => Some(NormScales::PerToken(at(5, 0))),
            Kind::PerGroup => Some(NormScales::PerGroup(at(5, 0))),
        };
        NormBuffers {
            input: at(0, self.shift),
            residual: with_residual.then(|| at(1, self.shift)),
            weight: at(2, self.shift),
            output: at(if self.in_place { 0 } else { 3 }, self.shift),
            quantised: scales.map(|scales| (at(4, u64::from(self.shift != 0)), scales)),
        }
    }

    /// Everything as a call finds it.
    fn fill(&self, data: &Data, scales: usize) -> Result<(), CollectiveError> {
        let untouched = vec![0xa5; self.memory.bytes() as usize];
        self.memory.write(0, &untouched)?;
        let buffers = [&data.input, &data.residual, &data.weight];
        for (buffer, data) in (0..).zip(buffers) {
            self.memory.write(self.at(buffer, self.shift), data)?;
        }
        let half = 0.5_f32.to_le_bytes().repeat(scales);
        Ok(self.memory.write(self.at(5, 0), &half)?)
    }

    /// What a call has left, and whether nothing around it was written.
    fn left(
        &self,
        what: &str,
        call: (Kind, bool),
        data: &Data,
        scales: usize,
    ) -> (String, [u64; 4]) {
        let mut all = vec![0; self.memory.bytes() as usize];
        self.memory.read(0, &mut all).unwrap();
        let output = if self.in_place { 0 } else { 3 };
        let quantised = u64::from(self.shift != 0);
        let mut expected_untouched = vec![true; all.len()];
        let mut part = |buffer: u64, shift: u64, bytes: usize| {
            let at = self.at(buffer, shift) as usize;
            expected_untouched[at..at + bytes].fill(false);
            at..at + bytes
        };
        let (bytes, weight) = (data.input.len(), data.weight.len());
        let input = part(0, self.shift, bytes);
        let (residual, weight) = (part(1, self.shift, bytes), part(2, self.shift, weight));
        let output = part(output, self.shift, bytes);
        let (values, scales) = (part(4, quantised, self.elements), part(5, 0, 4 * scales));
        let written = |(byte, free): (&u8, &bool)| *free && *byte != 0xa5;
        let outside = all.iter().zip(&expected_untouched).position(written);
        assert_eq!(outside, None, "{what}: wrote outside");
        assert!(all[weight] == data.weight, "{what}: the weight changed");
        if !self.in_place {
            assert!(all[input] == data.input, "{what}: the input changed");
        }
        let of = |range: std::ops::Range<usize>| &all[range];
        left(what, call, of(output), of(residual), of(values), of(scales))
    }
}

/// The same calls on the device.
fn on_device(
    communicator: &Communicator,
    fused: &AllReduceRmsNorm,
    data: &Data,
    (dtype, hidden, tokens): (DataType, usize, usize),
    (shift, in_place): (u64, bool),
) -> Result<Left, CollectiveError> {
    let elements = tokens * hidden;
    let places = Places::new(communicator, data, (elements, shift, in_place))?;
    let mut all = Vec::new();
    for call in CALLS {
        let scales = scales_of(call.0, hidden, tokens);
        places.fill(data, scales)?;
        fused.run_at(&places.buffers(call), tokens)?;
        let what = format!("{dtype} {hidden} x {tokens}");
        all.push(places.left(&what, call, data, scales));
    }
    Ok(all)
}

const HIDDEN: [usize; 5] = [1024, 1032, 4096, 7168, 16_384];
const TOKENS: [usize; 3] = [1, 3, 64];

fn same_bits(ranks: u32, dtypes: &[DataType], hidden: &[usize], shifts: &[(u64, bool)]) {
    let device = device!();
    let started = Instant::now();
    for (&dtype, &hidden) in dtypes
        .iter()
        .flat_map(|d| hidden.iter().map(move |h| (d, h)))
    {
        let prepare = RmsNormOptions::new(dtype, hidden, 64);
        let rank_main = |communicator: &Communicator| {
            let fused = communicator.all_reduce_rms_norm(prepare)?;
            let mut all = Vec::new();
            for tokens in TOKENS {
                let data = Data::of(communicator, dtype, hidden, tokens);
                let case = (dtype, hidden, tokens);
                if matches!(communicator.device(), Device::Cpu) {
                    let left = on_host(&fused, &data, case, 1)?;
                    all.extend(shifts.iter().flat_map(|_| left.clone()));
                    continue;
                }
                for &place in shifts {
                    all.extend(on_device(communicator, &fused, &data, case, place)?);
                }
                let (bytes, said) = (tokens * hidden * dtype.size(), fused.explain(tokens));
                let is_one = ranks > 1 && dtype.size() == 2 && bytes <= 128 << 10;
                assert!(fused.is_one_launch(tokens) || !is_one, "{case:?}");
                assert_eq!(
                    said.contains("one launch"),
                    fused.is_one_launch(tokens),
                    "{said}"
                );
            }
            communicator.barrier()?;
            Ok(all)
        };
        let cpu = run_in_threads(ranks, options(LIMIT), rank_main).unwrap();
        assert!(cpu.iter().all(|left| *left == cpu[0]));
        for (rank, gpu) in on(&device, ranks, rank_main).iter().enumerate() {
            assert_eq!(cpu[0].len(), gpu.len());
            for (index, (cpu, gpu)) in cpu[0].iter().zip(gpu).enumerate() {
                let shift = shifts[index / CALLS.len() % shifts.len()];
                assert_eq!(cpu, gpu, "rank {rank} of {ranks}, at {shift:?}");
            }
        }
        let seconds = started.elapsed().as_secs_f32();
        println!("{ranks} ranks, tokens of {hidden} {dtype}: the same bits, at {seconds:.1} s");
    }
}

const HALVES: [DataType; 2] = [DataType::F16, DataType::Bf16];

/// Nobody waits for anybody: what sanitizers run.
#[test]
fn one_rank_has_the_cpu_s_bits() {
    same_bits(
        1,
        &[DataType::F16, DataType::F32],
        &[1032, 2048],
        &[(0, false), (4, true)],
    );
}

#[test]
fn two_ranks_have_the_cpu_s_bits() {
    same_bits(2, &HALVES, &HIDDEN, &[(0, false)]);
}

#[test]
fn four_ranks_have_the_cpu_s_bits() {
    same_bits(4, &HALVES, &HIDDEN, &[(0, false)]);
}

#[test]
fn eight_ranks_have_the_cpu_s_bits() {
    same_bits(8, &HALVES, &HIDDEN, &[(0, false)]);
}

#[test]
fn short_tokens_and_odd_numbers_of_ranks() {
    same_bits(3, &HALVES, &[8, 136, 520, 2040], &[(0, false), (0, true)]);
}

/// Addresses that are aligned to an element and no more take two launches; ranks need not have the same.
#[test]
fn any_alignment_and_in_place() {
    same_bits(
        2,
        &[DataType::Bf16],
        &[1032, 7168],
        &[(2, false), (0, true), (6, true)],
    );
    let device = device!();
    let shape = (DataType::F16, 1024, 3);
    let rank_main = |communicator: &Communicator| {
        let prepare = RmsNormOptions::new(shape.0, shape.1, shape.2);
        let fused = communicator.all_reduce_rms_norm(prepare)?;
        let data = Data::of(communicator, shape.0, shape.1, shape.2);
        let shift = 2 * u64::from(communicator.rank() % 2);
        match communicator.device() {
            Device::Cpu => on_host(&fused, &data, shape, 1),
            _ => on_device(communicator, &fused, &data, shape, (shift, false)),
        }
    };
    let cpu = run_in_threads(3, options(LIMIT), rank_main).unwrap();
    for gpu in on(&device, 3, rank_main) {
        assert_eq!(gpu, cpu[0]);
    }
}

#[test]
fn f32_takes_two_launches() {
    same_bits(
        2,
        &[DataType::F32],
        &[1024, 1032, 16_384],
        &[(0, false), (4, true)],
    );
}

/// Each replay adds to the residual that the one before has left.
#[test]
fn a_thousand_replays() {
    let device = device!();
    for (dtype, one_launch) in [(DataType::Bf16, true), (DataType::F32, false)] {
        let (hidden, tokens, repeats) = (2048, 3, 1000);
        let shape = (dtype, hidden, tokens);
        let cpu = run_in_threads(2, options(3 * LIMIT), |communicator| {
            let fused =
                communicator.all_reduce_rms_norm(RmsNormOptions::new(dtype, hidden, tokens))?;
            let data = Data::of(communicator, dtype, hidden, tokens);
            on_host(&fused, &data, shape, repeats)
        })
        .unwrap();
        let gpu = on(&device, 2, |communicator| {
            let fused =
                communicator.all_reduce_rms_norm(RmsNormOptions::new(dtype, hidden, tokens))?;
            assert_eq!(fused.is_one_launch(tokens), one_launch);
            let data = Data::of(communicator, dtype, hidden, tokens);
            let places = Places::new(communicator, &data, (hidden * tokens, 0, false))?;
            let Device::Cuda(context) = communicator.device() else {
                panic!("another device");
            };
            let stream = Stream::new(context).unwrap();
            let mut all = Vec::new();
            for call in CALLS {
                let scales = scales_of(call.0, hidden, tokens);
                places.fill(&data, scales)?;
                let address = |(memory, offset): (&Memory, u64)| memory.addr() + offset;
                let buffers = places.buffers(call);
                let buffers = NormBuffers {
                    input: address(buffers.input),
                    residual: buffers.residual.map(address),
                    weight: address(buffers.weight),
                    output: address(buffers.output),
                    quantised: buffers.quantised.map(|(values, scales)| {
                        let scales = match scales {
                            NormScales::Static(scale) => NormScales::Static(scale),
                            NormScales::PerToken(at) => NormScales::PerToken(address(at)),
                            NormScales::PerGroup(at) => NormScales::PerGroup(address(at)),
                        };
                        (address(values), scales)
                    }),
                };
                let (norm, behind) = fused.on_cuda(tokens)?;
                let capture = stream.begin_capture().unwrap();
                for _ in 0..10 {
                    // SAFETY: the memory is kept until the graph is done with, and so is what is prepared.
                    unsafe {
                        norm.launch_on_cuda(&stream, behind, &buffers, tokens as u32, LIMIT)?
                    };
                }
                let graph = capture.end().unwrap();
                assert_eq!(graph.nodes().unwrap(), if one_launch { 10 } else { 20 });
                let graph = graph.instantiate().unwrap();
                communicator.barrier()?;
                for _ in 0..repeats / 10 {
                    // SAFETY: as above.
                    unsafe { graph.launch(&stream).unwrap() };
                }
                stream.synchronize(Instant::now() + LIMIT).unwrap();
                fused.check()?;
                let what = format!("{dtype} {hidden} x {tokens}");
                all.push(places.left(&what, call, &data, scales));
                communicator.barrier()?;
            }
            Ok(all)
        });
        for gpu in gpu {
            assert_eq!(gpu, cpu[0]);
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let device = device!();
    // Kernels are compiled where nothing waits for that.
    same_bits(3, &[DataType::Bf16], &[1024], &[(0, false)]);
    let errors = run_in_threads_on(
        |_| Ok(device.clone()),
        3,
        options(Duration::from_secs(5)),
        |communicator| {
            let (dtype, hidden, tokens) = (DataType::Bf16, 4096, 2);
            let options = RmsNormOptions::new(dtype, hidden, tokens);
            let fused = communicator.all_reduce_rms_norm(options)?;
            let data = Data::of(communicator, dtype, hidden, tokens);
            let places = Places::new(communicator, &data, (hidden * tokens, 0, false))?;
            places.fill(&data, 0)?;
            let buffers = places.buffers((Kind::None, true));
            communicator.barrier()?;
            fused.run_at(&buffers, tokens)?;
            if communicator.rank() == 1 {
                std::thread::sleep(Duration::from_secs(9));
                return Ok(String::new());
            }
            let error = fused.run_at(&buffers, tokens).unwrap_err();
            assert!(error.is_lost_peer_or_timeout(), "{error}");
            let again = fused.run_at(&buffers, tokens).unwrap_err().to_string();
            assert!(again.contains("earlier launch failed"), "{again}");
            Ok(error.to_string())
        },
    )
    .unwrap();
    println!("{}", errors[0]);
    for rank in [0, 2] {
        for words in [
            &format!("rank {rank}, plan `one-shot`"),
            "op 1 (reduce)",
            "a packet",
            "deadline of 5s",
        ] {
            assert!(
                errors[rank].contains(words),
                "`{}` lacks `{words}`",
                errors[rank]
            );
        }
    }
    assert!(errors[0].contains("rank 1"), "{}", errors[0]);
    // The same process, the same device.
    same_bits(2, &[DataType::F16], &[1024], &[(0, false)]);
}

#[test]
fn other_numbers_of_tokens_end_kernels_with_their_cause() {
    let device = device!();
    let errors = on(&device, 2, |communicator| {
        let (dtype, hidden) = (DataType::F16, 1024);
        let fused = communicator.all_reduce_rms_norm(RmsNormOptions::new(dtype, hidden, 4))?;
        let data = Data::of(communicator, dtype, hidden, 4);
        let places = Places::new(communicator, &data, (hidden * 4, 0, false))?;
        places.fill(&data, 0)?;
        let tokens = 1 + communicator.rank() as usize;
        let error = fused.run_at(&places.buffers((Kind::None, false)), tokens);
        Ok(error.unwrap_err().to_string())
    });
    println!("{}", errors[0]);
    for text in errors {
        assert!(text.contains("different calls"), "{text}");
        assert!(
            text.contains("2048 bytes") && text.contains("4096 bytes"),
            "{text}"
        );
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let device = device!();
    on(&device, 2, |communicator| {
        let (dtype, hidden) = (DataType::F16, 1024);
        let fused = communicator.all_reduce_rms_norm(RmsNormOptions::new(dtype, hidden, 2))?;
        let data = Data::of(communicator, dtype, hidden, 2);
        let places = Places::new(communicator, &data, (hidden * 2, 0, false))?;
        let buffers = places.buffers((Kind::Static, true));
        let error = fused.run_at(&buffers, 3).unwrap_err().to_string();
        assert!(
            error.contains("3 tokens; it was prepared for up to 2"),
            "{error}"
        );
        for (change, words) in [
            (1_u64, "not aligned to its elements of 2 bytes"),
            (places.memory.bytes(), "lies outside its memory"),
        ] {
            let mut buffers = buffers;
            buffers.weight.1 += change;
            let error = fused.run_at(&buffers, 2).unwrap_err().to_string();
            assert!(
                error.contains("the weight") || error.contains("weight of"),
                "{error}"
            );
            assert!(error.contains(words), "{error}");
        }
        let mut nothing = buffers;
        nothing.quantised = nothing
            .quantised
            .map(|(at, _)| (at, NormScales::Static(0.0)));
        let error = fused.run_at(&nothing, 2).unwrap_err().to_string();
        assert!(error.contains("a scale of 0"), "{error}");
        let error = fused.run(RmsNormCall {
            input: &[],
            residual: None,
            weight: &[],
            output: &mut [],
            quantised: None,
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("host memory"), "{error}");
        Ok(())
    });
}
