//! Calls that are sends and receives: on private buffers those of collectives with blocks of any size, in symmetric memory
//! groups that do the same.

use std::ops::Range;

use crossweft_collective::{
    Blocks, Collective, CollectiveError, DataType, Exchange, Input, Output, ReduceOp,
};

use super::memory::{Memory, Spans};

/// What is exchanged.
pub(super) struct Exchanged {
    pub(super) collective: Collective,
    pub(super) dtype: DataType,
    pub(super) op: ReduceOp,
    pub(super) rank: u32,
    pub(super) ranks: u32,
}

/// A peer, and the block that goes there or comes from there.
type Transfer = (u32, u64);

impl Exchanged {
    /// One call, with blocks of `message` bytes, where `spans` says.
    pub(super) fn run(
        &self,
        exchange: &Exchange,
        memory: &mut Memory,
        spans: Spans,
        message: u64,
    ) -> Result<(), CollectiveError> {
        match memory {
            Memory::Symmetric { input, output } => {
                let (from, to) = (spans.input.start as u64, spans.output.start as u64);
                let block = |start: u64, index: u64| {
                    let start = start + index * message;
                    start..start + message
                };
                let mut group = exchange.group();
                let (sends, receives) = self.transfers();
                for (peer, index) in sends {
                    group.send_symmetric(peer, self.dtype, input, block(from, index));
                }
                for (peer, index) in receives {
                    group.recv_symmetric(peer, self.dtype, output, block(to, index));
                }
                group.run()
            }
            Memory::Private { input, output } => {
                let (input, output) = (&input[spans.input], &mut output[spans.output]);
                if self.collective == Collective::SendRecv {
                    let ([next, before], mut group) = (self.neighbours(), exchange.group());
                    group.send_typed(next, self.dtype, input);
                    return group.recv_typed(before, self.dtype, output).run();
                }
                self.private(exchange, input, output, message)
            }
            Memory::Device { input, output } => {
                let range = |span: Range<usize>| span.start as u64..span.end as u64;
                let to = output.as_deref().unwrap_or(input);
                let (from, to) = ((&**input, range(spans.input)), (to, range(spans.output)));
                if self.collective == Collective::SendRecv {
                    let ([next, before], mut group) = (self.neighbours(), exchange.group());
                    group.send_memory(next, self.dtype, from.0, from.1);
                    return group.recv_memory(before, self.dtype, to.0, to.1).run();
                }
                self.private(exchange, from, to, message)
            }
        }
    }

    /// The ranks after and before this one.
    const fn neighbours(&self) -> [u32; 2] {
        let Self { rank, ranks, .. } = *self;
        [(rank + 1) % ranks, (rank + ranks - 1) % ranks]
    }

    /// To whom this rank sends which block of its input, and from whom it receives which of its output.
    fn transfers(&self) -> (Vec<Transfer>, Vec<Transfer>) {
        let Self { rank, ranks, .. } = *self;
        // So that not all send to the same one first.
        let others = || (1..=ranks).map(|k| (rank + k) % ranks);
        let each = || others().map(|peer| (peer, u64::from(peer))).collect();
        let only_of = |root: u32, all: Vec<_>| if rank == root { all } else { Vec::new() };
        let [next, before] = self.neighbours();
        match self.collective {
            Collective::SendRecv => (vec![(next, 0)], vec![(before, 0)]),
            Collective::AllGather => (others().map(|peer| (peer, 0)).collect(), each()),
            Collective::Gather { root } => (vec![(root, 0)], only_of(root, each())),
            Collective::Scatter { root } => (only_of(root, each()), vec![(root, 0)]),
            _ => (each(), each()),
        }
    }

    fn private<'a>(
        &self,
        exchange: &Exchange,
        input: impl Into<Input<'a>>,
        output: impl Into<Output<'a>>,
        message: u64,
    ) -> Result<(), CollectiveError> {
        let Self {
            collective,
            dtype,
            op,
            ranks,
            ..
        } = *self;
        let counts = vec![message / dtype.size() as u64; ranks as usize];
        let (blocks, calls) = (Blocks::packed(&counts), exchange.calls(None));
        match collective {
            Collective::AllGather => calls.all_gather_v(dtype, input, (output, blocks)),
            Collective::Gather { root } => {
                calls.gather_v(root, dtype, input, Some((output, blocks)))
            }
            Collective::Scatter { root } => {
                calls.scatter_v(root, dtype, Some((input, blocks)), output)
            }
            Collective::ReduceScatter => calls.reduce_scatter_v(dtype, op, (input, blocks), output),
            _ => calls.all_to_all_v(dtype, (input, blocks), (output, blocks)),
        }
    }
}
