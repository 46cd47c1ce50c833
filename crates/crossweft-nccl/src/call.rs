//! What a communicator is asked to do, and the rules of collectives: how long buffers are, and when a call is in
//! place.

use std::ops::Range;
use std::sync::Arc;

use crossweft_collective::{Collective, DataType, ReduceOp};

use crate::pointer::{Destination, Factor, RecvBuffer, SendBuffer, Source};
use crate::status::Error;
use crate::window::{Window, Zone};

/// `ncclDataType_t`.
pub(crate) fn data_type(number: i32) -> Result<DataType, Error> {
    Ok(match number {
        0 => DataType::I8,
        1 => DataType::U8,
        2 => DataType::I32,
        3 => DataType::U32,
        4 => DataType::I64,
        5 => DataType::U64,
        6 => DataType::F16,
        7 => DataType::F32,
        8 => DataType::F64,
        9 => DataType::Bf16,
        10 => DataType::F8E4M3,
        11 => DataType::F8E5M2,
        _ => {
            return Err(Error::argument(format!(
                "datatype is {number}, which is none; types are 0 to 11"
            )));
        }
    })
}

/// How elements are combined.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reduction {
    /// With an operation that is built in.
    Plain(ReduceOp),
    /// Added up, this rank's times a factor.
    PreMultiplied(Factor),
}

/// `ncclRedOp_t`, of the operations that are built in.
pub(crate) fn reduce_op(number: i32) -> Option<ReduceOp> {
    Some(match number {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Prod,
        2 => ReduceOp::Max,
        3 => ReduceOp::Min,
        4 => ReduceOp::Avg,
        _ => return None,
    })
}

/// Bytes of `count` elements.
pub(crate) fn bytes_of(count: usize, dtype: DataType) -> Result<usize, Error> {
    count.checked_mul(dtype.size()).ok_or_else(|| {
        Error::argument(format!(
            "count is {count}, more elements than can be addressed"
        ))
    })
}

/// The buffers of a collective call on this rank.
#[derive(Debug)]
pub(crate) enum Buffers {
    /// Two that do not overlap. One that the rank has no use for is empty.
    Apart(Source, Destination),
    /// One: the larger of the two, in which the smaller is this rank's block.
    InPlace(Destination),
}

/// One call on one rank.
#[derive(Debug)]
pub(crate) enum Call {
    /// Of all ranks.
    Collective(CollectiveCall),
    /// To another rank, or this one; on a stream.
    Send(u32, Source, u64),
    /// From another rank, or this one; on a stream.
    Receive(u32, Destination, u64),
    /// Without a call of the other rank's; on a stream.
    OneSided(OneSidedCall, u64),
}

/// One call that needs no other rank's.
#[derive(Debug)]
pub(crate) enum OneSidedCall {
    /// Into a window of another rank, or this one, at an offset; then a signal to it.
    Put(u32, Source, Arc<Window>, u64),
    /// To another rank, or this one.
    Signal(u32),
    /// For so many signals of another rank, or this one.
    Wait(u32, u32),
}

impl Call {
    /// The buffers that it reads and writes, those of no bytes too.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let two = match self {
            Self::Collective(call) => match &call.buffers {
                Buffers::Apart(from, to) => [Some(from.range()), Some(to.range())],
                Buffers::InPlace(data) => [Some(data.range()), None],
            },
            Self::Send(_, data, _) | Self::OneSided(OneSidedCall::Put(_, data, ..), _) => {
                [Some(data.range()), None]
            }
            Self::Receive(_, data, _) => [Some(data.range()), None],
            Self::OneSided(OneSidedCall::Signal(_) | OneSidedCall::Wait(..), _) => [None, None],
        };
        two.into_iter().flatten()
    }

    /// The stream that it was called on.
    pub(crate) fn stream(&self) -> u64 {
        match self {
            Self::Collective(call) => call.stream,
            Self::Send(_, _, stream) | Self::Receive(_, _, stream) | Self::OneSided(_, stream) => {
                *stream
            }
        }
    }
}

/// One collective call on one rank.
#[derive(Debug)]
pub(crate) struct CollectiveCall {
    pub(crate) collective: Collective,
    pub(crate) dtype: DataType,
    pub(crate) reduction: Reduction,
    /// Bytes of a message: one block of input or output.
    pub(crate) bytes: u64,
    pub(crate) buffers: Buffers,
    /// The windows that both buffers lie in, if they do: then nothing need be copied.
    pub(crate) zone: Option<Zone>,
    /// Of account on a GPU, and to another library.
    pub(crate) stream: u64,
}

/// Refuses what is received in two places at once, which would be neither.
pub(crate) fn are_apart(calls: &[Call]) -> Result<(), Error> {
    let received = calls.iter().filter_map(|call| match call {
        Call::Receive(_, data, _) => Some(data.range()),
        _ => None,
    });
    let mut ranges: Vec<_> = received.filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    match ranges.is_sorted_by(|before, after| before.end <= after.start) {
        true => Ok(()),
        false => Err(Error::argument(
            "two receives of a group share bytes: give each a buffer of its own",
        )),
    }
}

/// Refuses messages of `rank` to itself that do not belong together: nobody else sends or receives those, so one without the
/// other would wait for ever.
pub(crate) fn own_messages_match(calls: &[Call], rank: u32) -> Result<(), Error> {
    let sent = calls.iter().filter_map(|call| match call {
        Call::Send(peer, data, _) if *peer == rank => Some(data.len()),
        _ => None,
    });
    let received = calls.iter().filter_map(|call| match call {
        Call::Receive(peer, data, _) if *peer == rank => Some(data.len()),
        _ => None,
    });
    let (sends, receives) = (sent.clone().count(), received.clone().count());
    if sends != receives {
        return Err(Error::usage(format!(
            "rank {rank} sends itself {sends} messages and receives {receives} of them: nobody else can, so call ncclSend \
             and ncclRecv in one group"
        )));
    }
    match sent.zip(received).find(|(sent, received)| sent != received) {
        None => Ok(()),
        Some((sent, received)) => Err(Error::argument(format!(
            "rank {rank} sends itself {sent} bytes where it receives {received}: give both the same count, in the same \
             order"
        ))),
    }
}

impl CollectiveCall {
    /// Finds the windows of a communicator that the buffers lie in, where that helps. Ranks use the same offsets of
    /// symmetric windows, so all find the same.
    pub(crate) fn locate(&mut self, find: impl Fn(&Range<u64>) -> Option<(Arc<Window>, u64)>) {
        let in_place = matches!(self.buffers, Buffers::InPlace(_));
        let direct = match self.collective {
            Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter => true,
            Collective::AllToAll => !in_place,
            _ => false,
        };
        if !direct {
            return;
        }
        let places = match &self.buffers {
            Buffers::InPlace(data) => find(&data.range()).map(|place| (place.clone(), place)),
            Buffers::Apart(from, to) => find(&from.range()).zip(find(&to.range())),
        };
        self.zone = places.map(|((input, from), (output, to))| Zone {
            input,
            output,
            offsets: (from, to),
        });
    }
}

/// A call as C makes it: blocks of `count` elements from `send` to `recv`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) collective: Collective,
    pub(crate) send: SendBuffer,
    pub(crate) recv: RecvBuffer,
    pub(crate) count: usize,
    pub(crate) dtype: DataType,
    /// Of no account where nothing is reduced.
    pub(crate) reduction: Reduction,
    pub(crate) stream: u64,
}

impl Request {
    /// What it means on `rank` of `world_size`; `None` if there is nothing to do, which all ranks find alike.
    pub(crate) fn on(self, rank: u32, world_size: u32) -> Result<Option<CollectiveCall>, Error> {
        let Self {
            collective,
            send,
            recv,
            count,
            dtype,
            reduction,
            stream,
        } = self;
        if let Some(root) = root(collective).filter(|&root| root >= world_size) {
            return Err(Error::argument(format!(
                "root is {root}, in a communicator of {world_size} ranks"
            )));
        }
        let block = bytes_of(count, dtype)?;
        if block == 0 {
            return Ok(None);
        }
        let whole = |blocks: u32| {
            block.checked_mul(blocks as usize).ok_or_else(|| {
                Error::argument(format!(
                    "{world_size} times {count} elements are more than can be addressed"
                ))
            })
        };
        let (inputs, outputs) = collective.blocks(world_size).unwrap_or((1, 1));
        let (whole_input, whole_output) = (whole(inputs)?, whole(outputs)?);
        let (reads, writes) = uses(collective, rank);
        let source = |bytes: usize| send.bytes("sendbuff", bytes);
        let destination = |bytes: usize| recv.bytes("recvbuff", bytes);
        let bytes = block as u64;
        // Where the smaller buffer lies in the larger one.
        let own = |blocks: u32| bytes * u64::from(if blocks > 1 { rank } else { 0 });
        let (input_at, output_at) = match inputs.cmp(&outputs) {
            std::cmp::Ordering::Less => (own(outputs), 0),
            std::cmp::Ordering::Greater => (0, own(inputs)),
            std::cmp::Ordering::Equal => (0, 0),
        };
        let bases = (
            send.address().wrapping_sub(input_at),
            recv.address().wrapping_sub(output_at),
        );
        let buffers = if reads && writes && bases.0 == bases.1 && send.address() != 0 {
            let larger = if outputs >= inputs {
                destination(whole_output)?
            } else {
                send.as_recv().bytes("sendbuff", whole_input)?
            };
            Buffers::InPlace(larger)
        } else {
            let input = match reads {
                true => source(whole_input)?,
                false => Source::empty(),
            };
            let output = match writes {
                true => destination(whole_output)?,
                false => Destination::empty(),
            };
            if output.overlaps(&input) {
                return Err(Error::argument(format!(
                    "sendbuff and recvbuff overlap, but not as a call in place: {}",
                    in_place_rule(collective)
                )));
            }
            Buffers::Apart(input, output)
        };
        Ok(Some(CollectiveCall {
            collective,
            // What is only moved is the same whatever its type.
            dtype: if reduces(collective) {
                dtype
            } else {
                DataType::U8
            },
            reduction,
            bytes,
            buffers,
            zone: None,
            stream,
        }))
    }
}

fn root(collective: Collective) -> Option<u32> {
    match collective {
        Collective::Broadcast { root }
        | Collective::Reduce { root }
        | Collective::Gather { root }
        | Collective::Scatter { root } => Some(root),
        _ => None,
    }
}

/// Whether `rank` has an input and an output.
fn uses(collective: Collective, rank: u32) -> (bool, bool) {
    match collective {
        Collective::Broadcast { root } | Collective::Scatter { root } => (rank == root, true),
        Collective::Reduce { root } | Collective::Gather { root } => (true, rank == root),
        _ => (true, true),
    }
}

fn reduces(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce { .. }
    )
}

fn in_place_rule(collective: Collective) -> &'static str {
    match collective {
        Collective::AllGather | Collective::Gather { .. } => {
            "then sendbuff is recvbuff + rank * sendcount"
        }
        Collective::ReduceScatter | Collective::Scatter { .. } => {
            "then recvbuff is sendbuff + rank * recvcount"
        }
        _ => "then they are the same",
    }
}
