//! The buffers under test, and where a call's input and output lie in them.

use std::ops::Range;
use std::sync::Arc;

use crossweft_collective::{CollectiveError, Communicator, SymmetricBuffer};
use crossweft_hal as hal;

use super::options::Bench as Options;
use crate::values::Buffers;

/// Of how many messages input and output are, and how they lie in one buffer.
pub(super) struct Shape {
    pub(super) in_place: bool,
    /// Pairs of input and output, which take turns.
    pub(super) pairs: usize,
    input: u64,
    output: u64,
    /// In place, the message that the input, or the output, begins with.
    first: (u64, u64),
}

/// Where input and output of one call lie, in bytes of the input's buffer and of the output's.
pub(super) struct Spans {
    pub(super) input: Range<usize>,
    pub(super) output: Range<usize>,
    /// In place, all of the larger of both.
    pub(super) whole: Range<usize>,
    /// Where the pair of this turn begins, in the input's buffer and in the output's.
    pub(super) start: (usize, usize),
}

/// Pairs share no cache line, and none that comes along with another.
const APART: usize = 128;

impl Shape {
    pub(super) fn new(options: &Options, rank: u32, world_size: u32) -> Self {
        let (input, output, _) = options.blocks(world_size);
        let in_place = options.common.in_place;
        let own = |is_own| match in_place && is_own {
            true => u64::from(rank),
            false => 0,
        };
        let (own_input, own_output) = options.collective.is_own_block();
        Self {
            in_place,
            pairs: options.common.rotate as usize,
            input,
            output,
            first: (own(own_input), own(own_output)),
        }
    }

    /// For messages of that many bytes, in the turn of one of the pairs.
    pub(super) fn spans(&self, message: u64, turn: usize) -> Spans {
        let bytes = |blocks: u64| (blocks * message) as usize;
        let start = self.strides(message);
        let start = (start.0 * turn, start.1 * turn);
        let range = |start: usize, first: u64, blocks: u64| {
            start + bytes(first)..start + bytes(first + blocks)
        };
        let larger = self.input.max(self.output);
        Spans {
            input: range(start.0, self.first.0, self.input),
            output: range(start.1, self.first.1, self.output),
            whole: range(start.0, 0, larger),
            start,
        }
    }

    /// From one pair to the next, in the input's buffer and in the output's.
    fn strides(&self, message: u64) -> (usize, usize) {
        let apart = |blocks: u64| ((blocks * message) as usize).next_multiple_of(APART);
        match self.in_place {
            true => (
                apart(self.input.max(self.output)),
                apart(self.input.max(self.output)),
            ),
            false => (apart(self.input), apart(self.output)),
        }
    }

    /// Bytes of the buffers that inputs, and outputs, of all pairs lie in.
    pub(super) fn bytes(&self, message: u64) -> (usize, usize) {
        let (input, output) = self.strides(message);
        let last = self.spans(message, 0);
        let others = self.pairs - 1;
        let (first, second) = match self.in_place {
            true => (last.whole.len(), last.whole.len()),
            false => (last.input.len(), last.output.len()),
        };
        (input * others + first, output * others + second)
    }
}

/// Bytes that a rank of so many takes on the host, at least: the buffers, and a call's input and output beside them.
pub(super) fn needed(options: &Options, ranks: u32) -> u64 {
    let largest = options.sizes(ranks).into_iter().max().unwrap_or(0);
    let message = largest / options.blocks(ranks).2;
    let shape = Shape::new(options, 0, ranks);
    let (input, output) = shape.bytes(message);
    let call = shape.spans(message, 0);
    let buffers = match shape.in_place {
        true => input,
        false => input + output,
    };
    (buffers + call.input.len() + call.output.len()) as u64
}

/// The buffers under test.
pub(super) enum Memory {
    Symmetric {
        input: SymmetricBuffer,
        output: SymmetricBuffer,
    },
    Private {
        input: Vec<u8>,
        output: Vec<u8>,
    },
    /// Private, on a GPU; in place both are one.
    Device {
        input: Arc<hal::Memory>,
        output: Option<Arc<hal::Memory>>,
    },
}

impl Memory {
    /// For messages of up to that many bytes.
    pub(super) fn new(
        options: &Options,
        communicator: &Communicator,
        shape: &Shape,
        message: u64,
    ) -> Result<Self, CollectiveError> {
        let in_place = shape.in_place;
        let (input, output) = shape.bytes(message);
        match options.common.buffers {
            Buffers::Symmetric => {
                let input = communicator.allocate(input as u64)?;
                let output = if in_place {
                    input.clone()
                } else {
                    communicator.allocate(output as u64)?
                };
                Ok(Self::Symmetric { input, output })
            }
            Buffers::Private if !matches!(communicator.device(), hal::Device::Cpu) => {
                let allocate = |bytes: usize| {
                    let memory = communicator.device().allocate(bytes as u64);
                    memory.map(Arc::new)
                };
                Ok(Self::Device {
                    input: allocate(input)?,
                    output: match in_place {
                        true => None,
                        false => Some(allocate(output)?),
                    },
                })
            }
            Buffers::Private => {
                let output = if in_place {
                    Vec::new()
                } else {
                    vec![0; output]
                };
                Ok(Self::Private {
                    input: vec![0; input],
                    output,
                })
            }
        }
    }

    /// Writes into the buffer that the input lies in.
    pub(super) fn write_input(
        &mut self,
        offset: usize,
        data: &[u8],
    ) -> Result<(), CollectiveError> {
        match self {
            Self::Symmetric { input, .. } => input.write(offset as u64, data),
            Self::Private { input, .. } => {
                input[offset..offset + data.len()].copy_from_slice(data);
                Ok(())
            }
            Self::Device { input, .. } => Ok(input.write(offset as u64, data)?),
        }
    }

    /// Writes the input, and something else to where the output comes: a result left over from an earlier call must
    /// not pass for a new one.
    pub(super) fn write(
        &mut self,
        data: &[u8],
        spans: &Spans,
        in_place: bool,
    ) -> Result<(), CollectiveError> {
        let place = match in_place {
            true => spans.whole.clone(),
            false => spans.output.clone(),
        };
        let (junk, at) = (vec![0xa5; place.len()], place.start as u64);
        match self {
            _ if in_place => self.write_input(place.start, &junk)?,
            Self::Symmetric { output, .. } => output.write(at, &junk)?,
            Self::Private { output, .. } => output[place].copy_from_slice(&junk),
            Self::Device { output, .. } => output
                .iter()
                .try_for_each(|output| output.write(at, &junk))?,
        }
        self.write_input(spans.input.start, data)
    }

    pub(super) fn read(&self, spans: &Spans, in_place: bool) -> Result<Vec<u8>, CollectiveError> {
        let place = spans.output.clone();
        let mut result = vec![0; place.len()];
        match self {
            Self::Symmetric { output, .. } => output.read(place.start as u64, &mut result)?,
            Self::Private { input, .. } if in_place => result.copy_from_slice(&input[place]),
            Self::Private { output, .. } => result.copy_from_slice(&output[place]),
            Self::Device { input, output } => {
                let memory = output.as_ref().unwrap_or(input);
                memory.read(place.start as u64, &mut result)?;
            }
        }
        Ok(result)
    }
}
