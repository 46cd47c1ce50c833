//! Calls on a GPU: checked one by one, timed in graphs of many, by the device's clock.
//!
//! The calls of a graph follow one another without the host, and ranks wait for each other in each of them; a graph is
//! replayed some times. Caches hold whatever the call before has left there.

use crossweft_collective::{CollectiveError, Communicator};
use crossweft_moe::{DevicePass, Experts, MoeError, Recorded, Routing};

use super::super::measure::gather;
use super::batch::{Arrived, Batch, Computed, Wrong};
use super::measure::{group, lift, phase_bytes, say};
use super::options::{Moe, Name, Phase};
use super::report::Row;

/// Calls of a graph that move so many bytes: many small ones, because beginning a graph takes some microseconds. No more than
/// are to be timed.
fn calls(bytes: u64, timed: usize) -> u32 {
    let usual = if bytes < 1 << 24 { 100 } else { 10 };
    usual.min(timed).max(1) as u32
}

/// Replays before those that count.
const WARM_UP: usize = 2;

/// Measures one number of tokens in one layout: a row for each phase.
pub(super) fn size(
    options: &Moe,
    communicator: &Communicator,
    batch: &Batch,
    name: Name,
) -> Result<Vec<Row>, CollectiveError> {
    let rank = communicator.rank();
    let lift = |error| lift(rank, error);
    let group = group(options, communicator, batch).map_err(lift)?;
    let prepare = || -> Result<_, MoeError> {
        let scale_type = options.travel.scale_type();
        let mut pass = DevicePass::new(&group, name.layout(), scale_type)?;
        let routing = Routing {
            experts: Experts::I32(batch.experts(rank)),
            top_k: batch.shape.top_k,
            weights: Some(batch.weights(rank)),
        };
        pass.load(&routing, &batch.sent(rank))?;
        Ok(pass)
    };
    let mut pass = prepare().map_err(lift)?;
    communicator.barrier()?;
    let wrong = check(options, batch, name, &mut pass).map_err(lift)?;
    say(rank, batch, name, &wrong);
    let (_, wrong) = gather(communicator, &[], wrong.count)?;
    let mut rows = Vec::new();
    for &phase in &options.phase {
        let bytes = phase_bytes(batch, pass.shape(), phase);
        let what = match phase {
            Phase::Dispatch => Recorded::Dispatch,
            Phase::Combine => Recorded::Combine,
            Phase::Both => Recorded::Both,
        };
        let timed = options.iterations(bytes);
        let calls = calls(bytes, timed);
        let recorded = pass.record(what, calls).map_err(lift)?;
        let replays = timed.div_ceil(calls as usize).max(5);
        let mut times = Vec::with_capacity(replays);
        for replay in 0..WARM_UP + replays {
            communicator.barrier()?;
            let time = recorded.start().and_then(|()| recorded.finish());
            // What goes wrong first has the reason, also while warming up.
            let time = time.map_err(lift)?;
            if replay >= WARM_UP {
                times.push(time.as_secs_f64() * 1e6);
            }
        }
        pass = recorded.into_pass();
        let mut copies = Vec::with_capacity(replays);
        for _ in 0..replays {
            communicator.barrier()?;
            let time = pass.time_copy(bytes, calls).map_err(lift)?;
            copies.push(time.as_secs_f64() * 1e6);
        }
        let (times, _) = gather(communicator, &times, 0)?;
        let (copies, _) = gather(communicator, &copies, 0)?;
        let allocated = group.allocated_bytes() + pass.handle().allocated_bytes();
        let what = (phase, name, batch.tokens as u32);
        rows.push(Row::new(what, bytes, (times, copies), (allocated, wrong)));
    }
    Ok(rows)
}

/// A whole pass, in which everything is looked at.
fn check(
    options: &Moe,
    batch: &Batch,
    name: Name,
    pass: &mut DevicePass,
) -> Result<Wrong, MoeError> {
    let (rank, layout) = (pass.handle().group().rank(), name.layout());
    let scale_type = options.travel.scale_type();
    pass.dispatch()?;
    let received = pass.received()?;
    let arrived = Arrived {
        counts: pass.handle().counts()?,
        tokens: &received.tokens,
        scales: &received.scales,
        scale_type,
        experts: &received.experts,
        weights: &received.weights,
        sources: &received.sources,
    };
    let (mut wrong, Computed { rows, .. }) = batch.arrived(rank, layout, &arrived);
    pass.load_made(&rows)?;
    pass.combine()?;
    wrong.add_all(batch.combined(rank, scale_type, &pass.combined()?));
    Ok(wrong)
}
