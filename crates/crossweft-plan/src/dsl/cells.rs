//! Memory as the passes see it: every buffer of every rank, cut into cells so fine that slices of thread block
//! groups begin and end at one.

use std::ops::Range;

use super::program::Program;
use crate::numbers::{gcd, lcm};
use crate::place::{Data, Raw, SPARE, in_larger_buffer};
use crate::plan::{Buffer, Collective, InPlace, Operand, Plan};

/// Most cells of a chunk; with finer slices, what they touch is rounded up.
const FINEST: u64 = 64;
/// Most cells in all: far more than the checker takes.
const MOST: u64 = 1 << 25;

/// Where every cell is.
#[derive(Clone, Debug)]
pub(super) struct Cells {
    per_chunk: u64,
    /// Input and output are one memory for the passes.
    aliased: bool,
    collective: Collective,
    chunks: u32,
    /// Those of them that are never empty.
    filled: u64,
    /// In chunks, of each rank: where the buffers begin, and where they all end.
    output: u64,
    scratch: u64,
    aside: u64,
    packets: u64,
    end: u64,
}

impl Cells {
    /// `None` if there are too many.
    pub(super) fn new(program: &Program) -> Option<Self> {
        let mut per_chunk = 1;
        let (mut scratch, mut aside, mut packets) = (0, 0, 0);
        for instr in &program.trace.instrs {
            let Raw::Data(data) = &instr.raw else {
                continue;
            };
            let (count, of) = (u64::from(data.count), u64::from(data.slice.1));
            per_chunk = lcm(per_chunk, of / gcd(of, count)).min(FINEST);
            for operand in data.from.iter().chain(&data.to) {
                let (size, first) = match operand.buffer {
                    Buffer::Scratch if operand.index >= SPARE => (&mut aside, SPARE),
                    Buffer::Scratch => (&mut scratch, 0),
                    Buffer::Packets => (&mut packets, 0),
                    _ => continue,
                };
                *size = u64::from(operand.index - first + data.count).max(*size);
            }
        }
        let of_blocks = |blocks: u32| u64::from(program.shape.chunks) * u64::from(blocks);
        let (input, output) = program.shape.blocks;
        let (input, output) = (of_blocks(input), of_blocks(output));
        let aliased = program.options.in_place == InPlace::Any;
        let caller = if aliased {
            input.max(output)
        } else {
            input + output
        };
        let end = caller + scratch + aside + packets;
        let all = end.checked_mul(program.options.ranks.into())?;
        if all.checked_mul(per_chunk)? > MOST {
            per_chunk = 1;
        }
        (all <= MOST).then_some(Self {
            per_chunk,
            aliased,
            collective: program.options.collective,
            chunks: program.shape.chunks,
            filled: Plan::fewest_chunks(program.options.message_bytes.0, program.shape.chunks),
            output: if aliased { 0 } else { input },
            scratch: caller,
            aside: caller + scratch,
            packets: caller + scratch + aside,
            end,
        })
    }

    /// Whether input and output are taken for one memory, which they may be or not.
    pub(super) const fn are_aliased(&self) -> bool {
        self.aliased
    }

    /// Cells of all ranks.
    pub(super) fn len(&self, ranks: u32) -> usize {
        (self.end * self.per_chunk) as usize * ranks as usize
    }

    /// What an operand of an instruction touches.
    pub(super) fn of(&self, operand: &Operand, data: &Data) -> Range<usize> {
        let (rank, mut buffer, mut index) = (operand.rank, operand.buffer, operand.index);
        if self.aliased {
            (buffer, index) = in_larger_buffer(self.collective, self.chunks, rank, buffer, index);
        }
        let index = u64::from(index);
        let chunk = match buffer {
            Buffer::Input => index,
            Buffer::Output => self.output + index,
            Buffer::Scratch if index >= u64::from(SPARE) => self.aside + index - u64::from(SPARE),
            Buffer::Scratch => self.scratch + index,
            Buffer::Packets => self.packets + index,
        };
        let cells = u64::from(data.count) * self.per_chunk;
        let (slice, of) = (u64::from(data.slice.0), u64::from(data.slice.1));
        let base = (u64::from(rank) * self.end + chunk) * self.per_chunk;
        let begin = base + cells * slice / of;
        let end = base + (cells * (slice + 1)).div_ceil(of);
        begin as usize..end as usize
    }

    /// The rank that a cell is of, and whether the caller uses it between executions.
    pub(super) fn owner(&self, cell: usize) -> (u32, bool) {
        let chunk = cell as u64 / self.per_chunk;
        ((chunk / self.end) as u32, chunk % self.end < self.scratch)
    }

    /// Whether a cell is of an input, or of memory that is input and output.
    pub(super) fn is_input(&self, cell: usize) -> bool {
        let end = if self.aliased {
            self.scratch
        } else {
            self.output
        };
        cell as u64 / self.per_chunk % self.end < end
    }

    /// Whether a cell of an input or output has something in it, however short the message.
    pub(super) fn is_filled(&self, cell: usize) -> bool {
        let cell = cell as u64;
        let chunk = cell / self.per_chunk % self.end;
        let is_caller = chunk < self.scratch;
        is_caller
            && cell.is_multiple_of(self.per_chunk)
            && chunk % u64::from(self.chunks) < self.filled
    }

    /// Whether there are packets.
    pub(super) const fn has_packets(&self) -> bool {
        self.packets < self.end
    }

    /// Whether a cell holds packets.
    pub(super) fn is_packet(&self, cell: usize) -> bool {
        cell as u64 / self.per_chunk % self.end >= self.packets
    }
}
