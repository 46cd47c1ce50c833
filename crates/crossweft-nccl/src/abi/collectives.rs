//! Collectives, and operations that programs make.

use crossweft_collective::{Collective, ReduceOp};

use super::{Stream, calling, calls, on, success, unsigned};
use crate::call::{Call, Reduction, Request, data_type};
use crate::pointer::{Address, Out, RecvBuffer, ScalarPointer, SendBuffer, Versioned};
use crate::status::{Error, Status};
use crate::{config, group, table};

/// One that reduces, or moves (`reduction` is `None`).
#[derive(Clone, Copy)]
struct What {
    collective: Collective,
    dtype: i32,
    reduction: Option<i32>,
}

fn call(
    what: What,
    (send, recv, count): (SendBuffer, RecvBuffer, usize),
    (comm, stream): (Address, Stream),
) -> Result<Status, Error> {
    calling(comm, |comm| {
        let communicator = comm.usable()?;
        let dtype = data_type(what.dtype)?;
        let reduction = match what.reduction {
            Some(number) => comm.reduction(number, dtype)?,
            None => Reduction::Plain(ReduceOp::Sum),
        };
        let request = Request {
            collective: what.collective,
            send,
            recv,
            count,
            dtype,
            reduction,
            stream: stream.number(),
        };
        match request.on(communicator.rank(), communicator.world_size())? {
            Some(mut call) => {
                call.locate(|range| table::place_of(comm, range));
                group::call(comm, Call::Collective(call))
            }
            None => Ok(Status::Success),
        }
    })
}

fn reducing(collective: Collective, dtype: i32, op: i32) -> What {
    let reduction = Some(op);
    What {
        collective,
        dtype,
        reduction,
    }
}

fn moving(collective: Collective, dtype: i32) -> What {
    let reduction = None;
    What {
        collective,
        dtype,
        reduction,
    }
}

fn with(
    settings: &Versioned,
    comm: Address,
    act: impl FnOnce() -> Result<Status, Error>,
) -> Result<Status, Error> {
    calling(comm, |_| config::check_collective(settings))?;
    act()
}

fn rooted(root: i32, comm: Address) -> Result<u32, Error> {
    calling(comm, |_| unsigned("root", root))
}

calls! {
    fn ncclAllReduce(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, op: i32, comm: Address, stream: Stream,
    ) {
        call(reducing(Collective::AllReduce, dtype, op), (send, recv, count), (comm, stream))
    }

    fn ncclAllReduceConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, op: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        with(&settings, comm, || call(reducing(Collective::AllReduce, dtype, op), (send, recv, count), (comm, stream)))
    }

    fn ncclReduce(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, op: i32, root: i32, comm: Address,
        stream: Stream,
    ) {
        let root = rooted(root, comm)?;
        call(reducing(Collective::Reduce { root }, dtype, op), (send, recv, count), (comm, stream))
    }

    fn ncclReduceConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, op: i32, root: i32, comm: Address,
        stream: Stream, settings: Versioned,
    ) {
        let root = rooted(root, comm)?;
        with(&settings, comm, || {
            call(reducing(Collective::Reduce { root }, dtype, op), (send, recv, count), (comm, stream))
        })
    }

    fn ncclReduceScatter(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, op: i32, comm: Address, stream: Stream,
    ) {
        call(reducing(Collective::ReduceScatter, dtype, op), (send, recv, count), (comm, stream))
    }

    fn ncclReduceScatterConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, op: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        with(&settings, comm, || call(reducing(Collective::ReduceScatter, dtype, op), (send, recv, count), (comm, stream)))
    }

    fn ncclBcast(
        buffer: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
    ) {
        let root = rooted(root, comm)?;
        call(moving(Collective::Broadcast { root }, dtype), (buffer.as_send(), buffer, count), (comm, stream))
    }

    fn ncclBroadcast(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
    ) {
        let root = rooted(root, comm)?;
        call(moving(Collective::Broadcast { root }, dtype), (send, recv, count), (comm, stream))
    }

    fn ncclBroadcastConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        let root = rooted(root, comm)?;
        with(&settings, comm, || call(moving(Collective::Broadcast { root }, dtype), (send, recv, count), (comm, stream)))
    }

    fn ncclAllGather(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, comm: Address, stream: Stream,
    ) {
        call(moving(Collective::AllGather, dtype), (send, recv, count), (comm, stream))
    }

    fn ncclAllGatherConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        with(&settings, comm, || call(moving(Collective::AllGather, dtype), (send, recv, count), (comm, stream)))
    }

    fn ncclAlltoAll(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, comm: Address, stream: Stream,
    ) {
        call(moving(Collective::AllToAll, dtype), (send, recv, count), (comm, stream))
    }

    fn ncclAlltoAllConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        with(&settings, comm, || call(moving(Collective::AllToAll, dtype), (send, recv, count), (comm, stream)))
    }

    fn ncclGather(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
    ) {
        let root = rooted(root, comm)?;
        call(moving(Collective::Gather { root }, dtype), (send, recv, count), (comm, stream))
    }

    fn ncclGatherConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        let root = rooted(root, comm)?;
        with(&settings, comm, || call(moving(Collective::Gather { root }, dtype), (send, recv, count), (comm, stream)))
    }

    fn ncclScatter(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
    ) {
        let root = rooted(root, comm)?;
        call(moving(Collective::Scatter { root }, dtype), (send, recv, count), (comm, stream))
    }

    fn ncclScatterConfig(
        send: SendBuffer, recv: RecvBuffer, count: usize, dtype: i32, root: i32, comm: Address, stream: Stream,
        settings: Versioned,
    ) {
        let root = rooted(root, comm)?;
        with(&settings, comm, || call(moving(Collective::Scatter { root }, dtype), (send, recv, count), (comm, stream)))
    }

    fn ncclRedOpCreatePreMulSum(
        op: Out<i32>, scalar: ScalarPointer, dtype: i32, residence: i32, comm: Address,
    ) {
        on(comm, |comm| {
            op.check("op")?;
            comm.usable()?;
            let dtype = data_type(dtype)?;
            let later = match residence {
                // On host memory the device's is the host's too.
                0 => true,
                1 => false,
                _ => {
                    return Err(Error::argument(format!(
                        "residence is {residence}; it must be ncclScalarDevice or ncclScalarHostImmediate"
                    )));
                }
            };
            let factor = scalar.factor(dtype.size(), later)?;
            op.set("op", comm.make_operation(dtype, factor)?)
        })
        .map(success)
    }

    fn ncclRedOpDestroy(op: i32, comm: Address) {
        on(comm, |comm| comm.forget_operation(op)).map(success)
    }
}
