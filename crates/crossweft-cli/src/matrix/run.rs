//! One rank's part of trying cases.

use crossweft_collective::{
    Collective, CollectiveError, CollectiveOptions, Communicator, DataType, PreparedCollective,
    ReduceOp, Scalar, Schedule, SymmetricBuffer,
};
use crossweft_hal::{Device, Memory};
use crossweft_verify::{Pattern, fingerprint};

use super::case::{Case, Config, Operation};
use crate::verdict::TestData;

/// What outputs hold before, and what may not be touched.
const JUNK: u8 = 0xa5;

/// Bytes that vectors are aligned to.
const ALIGNED: usize = 64;

/// One rank, and memory for its cases.
pub(crate) struct Runner<'a> {
    communicator: &'a Communicator,
    /// Bytes of the larger of input and output of a large message.
    large: u64,
    /// Whether plans that have a kernel of their own are run by the executor, too.
    executor: bool,
    input: SymmetricBuffer,
    output: SymmetricBuffer,
    /// Private memory of a GPU, for inputs and for outputs; there is none on the CPU, where private memory is any.
    private: Option<[Memory; 2]>,
}

/// What became of a case, on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// Wrong elements, bytes that were touched though they belong to nobody, and ranks with bits of their own.
    pub(crate) wrong: u64,
}

/// A message's size in bytes, and where it lies.
struct Shape {
    /// Bytes of a message.
    message: usize,
    /// Bytes before it.
    shift: usize,
    /// Bytes of input and output.
    input: usize,
    output: usize,
    /// In place, where the input and the output begin.
    own: (usize, usize),
}

impl Shape {
    fn larger(&self) -> usize {
        self.input.max(self.output)
    }
}

impl<'a> Runner<'a> {
    /// Collective.
    pub(crate) fn new(
        communicator: &'a Communicator,
        large: u64,
        executor: bool,
    ) -> Result<Self, CollectiveError> {
        // The largest message is of 1027 elements or of `large` bytes, with an element more in each block.
        let blocks = u64::from(communicator.world_size());
        let room = (large + 16 * blocks).max(1028 * 8 * blocks) + 2 * ALIGNED as u64;
        let device = communicator.device();
        Ok(Self {
            communicator,
            large,
            executor,
            input: communicator.allocate(room)?,
            output: communicator.allocate(room)?,
            private: match device {
                Device::Cpu => None,
                _ => Some([device.allocate(room)?, device.allocate(room)?]),
            },
        })
    }

    /// Tries cases that have one configuration. Collective; the outcome is known to all ranks.
    pub(crate) fn run(&self, cases: &[Case]) -> Result<Vec<Outcome>, CollectiveError> {
        let Some(first) = cases.first() else {
            return Ok(Vec::new());
        };
        let config = &first.config;
        let shapes: Vec<Shape> = cases.iter().map(|case| self.shape(case)).collect();
        let most = shapes.iter().map(|shape| shape.message).max();
        let scalars = scalars(config);
        let call = self.prepare(config, &scalars, first.number, most.unwrap_or(0) as u64)?;
        let mut mine = Vec::new();
        for (case, shape) in cases.iter().zip(&shapes) {
            let found = self.try_one(&call, case, shape, &scalars)?;
            mine.extend(found.into_iter().flat_map(u64::to_le_bytes));
        }
        let all = self.communicator.all_gather_bytes(&mine)?;
        let is_everywhere = matches!(
            config.collective,
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast { .. }
        );
        let outcome = |index: usize| {
            let of_rank = |bytes: &Vec<u8>| {
                let mut words = bytes.as_chunks::<8>().0.iter().skip(2 * index);
                let mut next = || words.next().map_or(0, |word| u64::from_le_bytes(*word));
                (next(), next())
            };
            let of_all: Vec<(u64, u64)> = all.iter().map(of_rank).collect();
            let wrong: u64 = of_all.iter().map(|(wrong, _)| wrong).sum();
            let differ = of_all.iter().filter(|(_, bits)| *bits != of_all[0].1);
            let differ = if is_everywhere { differ.count() } else { 0 };
            Outcome {
                wrong: wrong + differ as u64,
            }
        };
        Ok((0..cases.len()).map(outcome).collect())
    }

    fn shape(&self, case: &Case) -> Shape {
        let Config {
            ranks,
            collective,
            dtype,
            ..
        } = case.config;
        let (input, output) = collective.blocks(ranks).unwrap_or((1, 1));
        let elements = case
            .size
            .elements(dtype, u64::from(input.max(output)), self.large);
        let message = elements as usize * dtype.size();
        let (own_input, own_output) = collective.is_own_block();
        let own = |is_own: bool| match is_own && case.config.in_place {
            true => self.communicator.rank() as usize * message,
            false => 0,
        };
        Shape {
            message,
            shift: case.size.shift() as usize * dtype.size(),
            input: message * input as usize,
            output: message * output as usize,
            own: (own(own_input), own(own_output)),
        }
    }

    fn prepare(
        &self,
        config: &Config,
        scalars: &[f64],
        number: usize,
        max_bytes: u64,
    ) -> Result<PreparedCollective, CollectiveError> {
        let mut options = CollectiveOptions::new(config.dtype, op(config), max_bytes);
        if config.algorithm.is_some() {
            // Another number of blocks, in another order, from configuration to configuration.
            let seed = (number / 5) as u32;
            options = options.blocks(1 + seed % 3, Schedule::Seeded(seed.into()));
        }
        options.algorithm = config.algorithm;
        options.fused = !self.executor;
        if let Some(scalar) = scalars.get(self.communicator.rank() as usize) {
            options.pre_multiply = Scalar::new(config.dtype, *scalar);
        }
        if config.symmetric {
            let output = if config.in_place {
                &self.input
            } else {
                &self.output
            };
            options = options.symmetric(&self.input, output);
        }
        self.communicator.collective(config.collective, options)
    }

    /// Calls it; returns what is wrong on this rank, and the fingerprint of the result.
    fn try_one(
        &self,
        call: &PreparedCollective,
        case: &Case,
        shape: &Shape,
        scalars: &[f64],
    ) -> Result<[u64; 2], CollectiveError> {
        let (rank, ranks) = (self.communicator.rank(), self.communicator.world_size());
        let config = &case.config;
        let data = TestData {
            pattern: match case.number % 2 {
                0 => Pattern::Exact,
                _ => Pattern::Random,
            },
            dtype: config.dtype,
            op: op(config),
            scalars,
            seed: case.number as u64,
            ranks,
        };
        let input = data.input(rank, shape.input);
        let (before, after) = match config.in_place {
            true => {
                let mut whole = vec![JUNK; shape.larger()];
                whole[shape.own.0..][..shape.input].copy_from_slice(&input);
                let after = self.in_place(call, config, shape, &whole)?;
                (whole, after)
            }
            false => {
                let whole = vec![JUNK; shape.output];
                let after = self.out_of_place(call, config, shape, &input)?;
                (whole, after)
            }
        };
        // Beside the result nothing changes, in front and behind neither.
        let Image {
            data: mut got,
            touched,
        } = after;
        let result = got[shape.own.1..][..shape.output].to_vec();
        let content = |block| config.collective.content(ranks, rank, block);
        let is_result = content(0) != crossweft_plan::Content::Any;
        let mut wrong = touched;
        if is_result {
            wrong += data.check(rank, shape.message as u64, content, &result);
            got[shape.own.1..][..shape.output]
                .copy_from_slice(&before[shape.own.1..][..shape.output]);
        }
        wrong += differing(&got, &before);
        if wrong > 0 {
            crate::complain(&format!("{case}: rank {rank}: {wrong} wrong"));
        }
        Ok([wrong, fingerprint(&result)])
    }

    /// What inputs and outputs lie in, if it is not memory of the host.
    fn buffers(&self, config: &Config) -> Option<[Buffer<'_>; 2]> {
        match (&self.private, config.symmetric) {
            (_, true) => Some([&self.input, &self.output].map(Buffer::Symmetric)),
            (Some(private), false) => Some(private.each_ref().map(Buffer::Private)),
            (None, false) => None,
        }
    }

    fn out_of_place(
        &self,
        call: &PreparedCollective,
        config: &Config,
        shape: &Shape,
        data: &[u8],
    ) -> Result<Image, CollectiveError> {
        if let Some([input, output]) = self.buffers(config) {
            let (shift, message) = (shape.shift as u64, shape.message as u64);
            input.write(shift, data)?;
            let mut padded = vec![JUNK; shape.output + 2 * ALIGNED];
            output.write(0, &padded)?;
            // Nobody may write an output, or read an input, before it is ready, nor after.
            self.communicator.barrier()?;
            input.run(call, &output, shift, message)?;
            output.read(0, &mut padded)?;
            let mut unchanged = vec![0; data.len()];
            input.read(shift, &mut unchanged)?;
            self.communicator.barrier()?;
            let mut image = Image::of(&padded, shape.shift, shape.output);
            image.touched += differing(&unchanged, data);
            return Ok(image);
        }
        let (input, output) = (Room::new(data, shape), Room::junk(shape.output, shape));
        let (mut input, mut output) = (input, output);
        call.run(input.get(), output.get())?;
        let mut image = output.image();
        image.touched += differing(input.get(), data);
        Ok(image)
    }

    fn in_place(
        &self,
        call: &PreparedCollective,
        config: &Config,
        shape: &Shape,
        data: &[u8],
    ) -> Result<Image, CollectiveError> {
        if let Some([both, _]) = self.buffers(config) {
            let (shift, message) = (shape.shift as u64, shape.message as u64);
            let mut padded = vec![JUNK; data.len() + 2 * ALIGNED];
            padded[shape.shift..][..data.len()].copy_from_slice(data);
            both.write(0, &padded)?;
            self.communicator.barrier()?;
            both.run(call, &both, shift, message)?;
            both.read(0, &mut padded)?;
            self.communicator.barrier()?;
            return Ok(Image::of(&padded, shape.shift, data.len()));
        }
        let mut both = Room::new(data, shape);
        call.run_in_place(both.get())?;
        Ok(both.image())
    }
}

/// Memory that its device writes and reads.
enum Buffer<'a> {
    Symmetric(&'a SymmetricBuffer),
    Private(&'a Memory),
}

impl Buffer<'_> {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), CollectiveError> {
        match self {
            Self::Symmetric(buffer) => buffer.write(offset, data),
            Self::Private(memory) => Ok(memory.write(offset, data)?),
        }
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), CollectiveError> {
        match self {
            Self::Symmetric(buffer) => buffer.read(offset, data),
            Self::Private(memory) => Ok(memory.read(offset, data)?),
        }
    }

    /// Runs a call from here to `output`, on messages of `message` bytes from `shift` on in both.
    fn run(
        &self,
        call: &PreparedCollective,
        output: &Self,
        shift: u64,
        message: u64,
    ) -> Result<(), CollectiveError> {
        match (self, output) {
            (Self::Private(input), Self::Private(output)) => {
                call.run_at((input, shift), (output, shift), message)
            }
            _ => call.run_symmetric(shift, shift, message),
        }
    }
}

/// Private memory with junk around it, that begins where the shape says.
struct Room {
    bytes: Vec<u8>,
    begin: usize,
    length: usize,
}

impl Room {
    fn junk(length: usize, shape: &Shape) -> Self {
        let bytes = vec![JUNK; length + 4 * ALIGNED];
        let aligned = bytes.as_ptr().align_offset(ALIGNED);
        Self {
            bytes,
            begin: ALIGNED + aligned % ALIGNED + shape.shift,
            length,
        }
    }

    fn new(data: &[u8], shape: &Shape) -> Self {
        let mut room = Self::junk(data.len(), shape);
        room.get().copy_from_slice(data);
        room
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..][..self.length]
    }

    fn image(self) -> Image {
        Image::of(&self.bytes, self.begin, self.length)
    }
}

/// A buffer after a call.
struct Image {
    data: Vec<u8>,
    /// Bytes around it that are no junk any more.
    touched: u64,
}

impl Image {
    fn of(padded: &[u8], begin: usize, length: usize) -> Self {
        let (front, rest) = padded.split_at(begin);
        let (data, behind) = rest.split_at(length);
        let around = front.iter().chain(behind);
        Self {
            data: data.to_vec(),
            touched: around.filter(|&&byte| byte != JUNK).count() as u64,
        }
    }
}

fn differing(a: &[u8], b: &[u8]) -> u64 {
    if a == b {
        return 0;
    }
    a.iter().zip(b).filter(|(a, b)| a != b).count() as u64
}

fn op(config: &Config) -> ReduceOp {
    match config.operation {
        Operation::Plain(op) => op,
        Operation::None | Operation::PreMultiplied => ReduceOp::Sum,
    }
}

/// Each rank's scalar, if inputs are multiplied: whole numbers for integers, halves for floats.
fn scalars(config: &Config) -> Vec<f64> {
    if config.operation != Operation::PreMultiplied {
        return Vec::new();
    }
    let all = match (config.dtype.is_float(), is_signed(config.dtype)) {
        (true, _) => [1.0, -2.0, 0.5],
        (false, true) => [1.0, -2.0, 3.0],
        (false, false) => [1.0, 2.0, 3.0],
    };
    all.into_iter()
        .cycle()
        .take(config.ranks as usize)
        .collect()
}

fn is_signed(dtype: DataType) -> bool {
    matches!(
        dtype,
        DataType::I8 | DataType::I16 | DataType::I32 | DataType::I64
    )
}
