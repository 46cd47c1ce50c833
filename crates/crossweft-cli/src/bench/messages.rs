//! Calls that are sends and receives: on private buffers those of collectives with blocks of any size, in symmetric memory
//! groups that do the same.

use crossweft_collective::{Blocks, Collective, CollectiveError, DataType, Exchange, ReduceOp};

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
                self.private(exchange, input, output, message)
            }
            // An exchange is made on CPUs only.
            Memory::Device { .. } => Ok(()),
        }
    }

    /// To whom this rank sends which block of its input, and from whom it receives which of its output.
    fn transfers(&self) -> (Vec<Transfer>, Vec<Transfer>) {
        let Self { rank, ranks, .. } = *self;
        // So that not all send to the same one first.
        let others = || (1..=ranks).map(|k| (rank + k) % ranks);
        let each = || others().map(|peer| (peer, u64::from(peer))).collect();
        let only_of = |root: u32, all: Vec<_>| if rank == root { all } else { Vec::new() };
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        match self.collective {
            Collective::SendRecv => (vec![(next, 0)], vec![(before, 0)]),
            Collective::AllGather => (others().map(|peer| (peer, 0)).collect(), each()),
            Collective::Gather { root } => (vec![(root, 0)], only_of(root, each())),
            Collective::Scatter { root } => (only_of(root, each()), vec![(root, 0)]),
            _ => (each(), each()),
        }
    }

    fn private(
        &self,
        exchange: &Exchange,
        input: &[u8],
        output: &mut [u8],
        message: u64,
    ) -> Result<(), CollectiveError> {
        let Self {
            collective,
            dtype,
            op,
            rank,
            ranks,
        } = *self;
        let counts = vec![message / dtype.size() as u64; ranks as usize];
        let blocks = Blocks::packed(&counts);
        match collective {
            Collective::SendRecv => {
                let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                let mut group = exchange.group();
                group.send_typed(next, dtype, input);
                group.recv_typed(before, dtype, output).run()
            }
            Collective::AllGather => exchange.all_gather_v(dtype, input, (output, blocks)),
            Collective::Gather { root } => {
                exchange.gather_v(root, dtype, input, Some((output, blocks)))
            }
            Collective::Scatter { root } => {
                exchange.scatter_v(root, dtype, Some((input, blocks)), output)
            }
            Collective::ReduceScatter => {
                exchange.reduce_scatter_v(dtype, op, (input, blocks), output)
            }
            _ => exchange.all_to_all_v(dtype, (input, blocks), (output, blocks)),
        }
    }
}
