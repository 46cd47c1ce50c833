//! What plans that are prepared together share: one registered memory, in which each has its part.

use std::sync::Arc;
use std::time::Instant;

use crossweft_channel::{Endpoint, SemaphorePool};
use crossweft_plan::Plan;

use crate::ExecutorError;
use crate::prepared::{Options, of_channel};
use crate::tables::{Scratch, peers};

/// What a plan's part of a memory is aligned to: a page of the host.
const ALIGNMENT: u64 = 4096;

/// What a plan needs of registered memory, in bytes.
pub(crate) struct Room {
    plain: u64,
    packets: u64,
    /// Of both, the halves that executions use in turn.
    pub(crate) halves: (u64, u64),
}

impl Room {
    pub(crate) fn new(plan: &Plan, options: &Options) -> Result<Self, ExecutorError> {
        let bytes = options.max_bytes;
        let sizes = plan.scratch_bytes(bytes).zip(plan.packet_bytes(bytes));
        let found =
            sizes.filter(|((_, plain), (_, packets))| plain.checked_add(*packets).is_some());
        let ((plain_half, plain), (packets_half, packets)) =
            found.ok_or_else(|| ExecutorError::Scratch {
                plan: plan.name.clone(),
                bytes,
            })?;
        Ok(Self {
            plain,
            packets,
            halves: (plain_half, packets_half),
        })
    }
}

/// What plans that are prepared together share: one registered memory.
pub(crate) struct Common {
    /// Each plan's part, if it needs one.
    pub(crate) scratch: Vec<Option<Scratch>>,
    pub(crate) semaphores: Arc<SemaphorePool>,
    /// Each plan's first semaphore on this rank.
    pub(crate) first: Vec<usize>,
}

impl Common {
    /// Of one plan at least. Collective.
    pub(crate) fn new(
        endpoint: &Arc<Endpoint>,
        plans: &[(&Plan, Options)],
        rooms: &[Room],
        what: &str,
        deadline: Instant,
    ) -> Result<Self, ExecutorError> {
        // The peers of every rank's channels, plan after plan.
        let mut lists = vec![Vec::new(); endpoint.world_size() as usize];
        let mut first = Vec::new();
        for (plan, _) in plans {
            first.push(lists[endpoint.rank() as usize].len());
            for (list, program) in lists.iter_mut().zip(&plan.ranks) {
                list.extend(peers(program));
            }
        }
        let mut end = SemaphorePool::bytes(&lists);
        let mut parts = Vec::new();
        for (room, (plan, options)) in rooms.iter().zip(plans) {
            let part = || {
                let plain = end.checked_next_multiple_of(ALIGNMENT)?;
                let packets = plain.checked_add(room.plain)?;
                Some((plain, packets, packets.checked_add(room.packets)?))
            };
            let part = part().ok_or_else(|| ExecutorError::Scratch {
                plan: plan.name.clone(),
                bytes: options.max_bytes,
            })?;
            end = part.2;
            parts.push((room.plain + room.packets > 0).then_some(part));
        }
        // What concerns all is said of the first.
        let channel = |source| of_channel(plans[0].0, source);
        let memory = endpoint.allocate_registered(end, what, deadline);
        let memory = memory.map_err(channel)?;
        let semaphores = SemaphorePool::within(&memory, 0, &lists, endpoint.rank());
        let scratch = parts.into_iter().map(|part| {
            part.map(|(plain, packets, end)| Scratch {
                memory: Arc::clone(&memory),
                plain,
                packets,
                end,
            })
        });
        Ok(Self {
            scratch: scratch.collect(),
            semaphores: Arc::new(semaphores.map_err(channel)?),
            first,
        })
    }
}
