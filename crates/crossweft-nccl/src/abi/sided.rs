//! Point to point, and one-sided.

use std::sync::Arc;

use super::{Stream, calling, calls, unsigned};
use crate::call::{Call, OneSidedCall, bytes_of, data_type};
use crate::comm::Comm;
use crate::pointer::{Address, In, RecvBuffer, SendBuffer};
use crate::status::Error;
use crate::{group, table};

/// A rank of a communicator that calls may be made on.
fn rank_of(comm: &Arc<Comm>, peer: i32) -> Result<u32, Error> {
    let world_size = comm.usable()?.world_size();
    u32::try_from(peer)
        .ok()
        .filter(|&peer| peer < world_size)
        .ok_or_else(|| {
            Error::argument(format!(
                "peer is {peer}, in a communicator of {world_size} ranks"
            ))
        })
}

fn bytes(count: usize, dtype: i32) -> Result<usize, Error> {
    bytes_of(count, data_type(dtype)?)
}

/// What there is one of so far.
fn only_zero(numbers: &[(&str, i32)]) -> Result<(), Error> {
    match numbers.iter().find(|(_, number)| *number != 0) {
        None => Ok(()),
        Some((name, number)) => Err(Error::argument(format!("{name} is {number}; it must be 0"))),
    }
}

calls! {
    fn ncclSend(send: SendBuffer, count: usize, dtype: i32, peer: i32, comm: Address, stream: Stream) {
        calling(comm, |comm| {
            let peer = rank_of(comm, peer)?;
            let data = send.bytes("sendbuff", bytes(count, dtype)?)?;
            group::call(comm, Call::Send(peer, data, stream.number()))
        })
    }

    fn ncclRecv(recv: RecvBuffer, count: usize, dtype: i32, peer: i32, comm: Address, stream: Stream) {
        calling(comm, |comm| {
            let peer = rank_of(comm, peer)?;
            let data = recv.bytes("recvbuff", bytes(count, dtype)?)?;
            group::call(comm, Call::Receive(peer, data, stream.number()))
        })
    }

    fn ncclPutSignal(
        local: SendBuffer, count: usize, dtype: i32, peer: i32, window: Address, offset: usize,
        signal: i32, context: i32, flags: u32, comm: Address, stream: Stream,
    ) {
        calling(comm, |comm| {
            only_zero(&[("sigIdx", signal), ("ctx", context), ("flags", flags.cast_signed())])?;
            let peer = rank_of(comm, peer)?;
            let window = table::window_of(comm, window)?;
            let bytes = bytes(count, dtype)?;
            window.memory()?;
            window.check(offset as u64, bytes as u64)?;
            let data = local.bytes("localbuff", bytes)?;
            let put = OneSidedCall::Put(peer, data, window, offset as u64);
            group::call(comm, Call::OneSided(put, stream.number()))
        })
    }

    fn ncclSignal(peer: i32, signal: i32, context: i32, flags: u32, comm: Address, stream: Stream) {
        calling(comm, |comm| {
            only_zero(&[("sigIdx", signal), ("ctx", context), ("flags", flags.cast_signed())])?;
            let signal = OneSidedCall::Signal(rank_of(comm, peer)?);
            group::call(comm, Call::OneSided(signal, stream.number()))
        })
    }

    fn ncclWaitSignal(count: i32, signals: In<[i32; 4]>, comm: Address, stream: Stream) {
        calling(comm, |comm| {
            comm.usable()?;
            let count = unsigned("nDesc", count)? as usize;
            let mut waits = Vec::new();
            for [number, peer, signal, context] in signals.read("signalDescs", count)? {
                only_zero(&[("sigIdx", signal), ("ctx", context)])?;
                let wait = OneSidedCall::Wait(rank_of(comm, peer)?, unsigned("opCnt", number)?);
                waits.push(Call::OneSided(wait, stream.number()));
            }
            group::calls(comm, waits)
        })
    }
}
