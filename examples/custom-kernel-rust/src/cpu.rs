//! Launching on the CPU device: each block is a coroutine.

use crossweft_channel::{ChannelError, Guard};
use crossweft_collective::CollectiveError;
use crossweft_hal::cpu::{Grid, Schedule};

use crate::kernel::exchange_add;
use crate::{BLOCKS, ROUNDS, Rank};

pub(crate) fn run(prepared: &Rank<'_>) -> Result<(), CollectiveError> {
    let (endpoint, limit) = (
        prepared.communicator.endpoint(),
        prepared.communicator.timeout(),
    );
    let mut grid = Grid::new(BLOCKS, Schedule::RoundRobin)?;
    // Execute: local. It allocates nothing and exchanges nothing.
    for round in 0..ROUNDS {
        let launch = prepared.launch(round);
        let guard = Guard::new(endpoint, limit);
        grid.launch(&endpoint.context(&guard), &|block, index| {
            let channel = &prepared.channels[index as usize];
            // SAFETY: the vectors are this rank's own; channels and memory live until the launch
            // has ended; the halves are used in turn.
            unsafe { exchange_add(block, channel, &launch, index, BLOCKS) }
        })
        .map_err(|interrupted| ChannelError::Stopped {
            rank: endpoint.rank(),
            what: Guard::describe(&interrupted.waiting),
            cause: guard.cause(interrupted.stopped, &interrupted.waiting),
        })?;
    }
    Ok(())
}
