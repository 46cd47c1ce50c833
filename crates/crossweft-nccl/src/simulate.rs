//! `ncclGroupSimulateEnd`: how long the calls of a group would take, by the cost model.

use crossweft_collective::Selector;
use crossweft_plan::cost::{Topology, predict};

use crate::call::{Call, CollectiveCall};
use crate::group;
use crate::pointer::Versioned;
use crate::status::Error;

/// What a structure made with `NCCL_SIM_INFO_INITIALIZER` has in its second field.
const MAGIC: u32 = 0x7468_5283;

/// Ends the group without running it, and writes the time that its calls are predicted to take, in
/// microseconds. Communicators run at the same time, calls of one communicator one after the other.
pub(crate) fn end(info: &Versioned) -> Result<(), Error> {
    let mut fields = [0; 24];
    let size = match info.is_null() {
        true => 0,
        false => info.read("simInfo", &mut fields)?,
    };
    let work = group::end_without_running()?;
    if info.is_null() {
        return Ok(());
    }
    if size < 20 || fields[8..12] != MAGIC.to_ne_bytes() {
        return Err(Error::argument(
            "ncclSimInfo_t was not initialised with NCCL_SIM_INFO_INITIALIZER",
        ));
    }
    let mut longest = 0.0_f64;
    for (comm, calls) in work {
        let world_size = comm.world_size()?;
        let topology = match comm.is_on_gpu() {
            true => Topology::h200(),
            false => Topology::cpu(),
        };
        let mut total = 0.0;
        for call in &calls {
            total += match call {
                Call::Collective(call) => {
                    let selector = comm.with_engine(|engine| engine.selector(call))??;
                    one(&topology, call, world_size, &selector)?
                }
                _ => {
                    return Err(Error::unsupported(
                        "the time of sends, receives and puts",
                        "put collectives only into the group",
                    ));
                }
            };
        }
        longest = longest.max(total);
    }
    #[allow(
        clippy::cast_possible_truncation,
        reason = "microseconds, of which C has a float"
    )]
    let estimate = longest as f32;
    info.write(size, 16, &estimate.to_ne_bytes());
    Ok(())
}

/// Microseconds of one call.
fn one(
    topology: &Topology,
    call: &CollectiveCall,
    world_size: u32,
    selector: &Selector,
) -> Result<f64, Error> {
    let CollectiveCall {
        collective, bytes, ..
    } = *call;
    let choice = &selector.all()[selector.select(bytes)];
    let plan = choice
        .algorithm
        .plan(collective, world_size, choice.blocks)?;
    let time = |bytes: u64| {
        let timeline = predict(&plan, topology, bytes);
        let timeline = timeline.map_err(|error| Error::usage(format!("no prediction: {error}")))?;
        timeline
            .total_us
            .ok_or_else(|| Error::internal("the plan is predicted to wait for ever"))
    };
    // Larger messages take several launches.
    let piece = choice.piece.max(1);
    let (whole, rest) = (bytes / piece, bytes % piece);
    #[allow(clippy::cast_precision_loss, reason = "a number of launches")]
    let pieces = if whole > 0 {
        whole as f64 * time(piece)?
    } else {
        0.0
    };
    Ok(pieces + if rest > 0 { time(rest)? } else { 0.0 })
}
