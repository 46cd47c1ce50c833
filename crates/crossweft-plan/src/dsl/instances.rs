//! Instances: the whole program several times, side by side.

use super::options::Replication;
use super::program::Program;
use super::trace::{End, Instr, Trace};
use crate::place::{Data, Kind, Raw, SPARE};
use crate::plan::{Op, Operand};

/// The program with all its instances, which is of one instance itself. Thread block, channel, semaphore and
/// barrier `v` become `v * instances` to `v * instances + instances - 1`.
pub(super) fn replicate(program: &Program) -> Program {
    let (instances, replication) = (program.options.instances, program.options.replication);
    let mut program = program.clone();
    if instances == 1 {
        return program;
    }
    program.options.instances = 1;
    if replication == Replication::Interleaved {
        program.shape.chunks *= instances;
        for used in program.scratch.iter_mut().chain(&mut program.spare) {
            *used *= instances;
        }
    }
    for ordinals in program.ordinals.values_mut() {
        *ordinals *= instances;
    }
    let trace = std::mem::take(&mut program.trace);
    let instrs = trace.instrs.iter().flat_map(|instr| {
        (0..instances).map(move |instance| Instr {
            block: instr.block * instances + instance,
            raw: instance_of(&instr.raw, instance, instances, replication),
            ..instr.clone()
        })
    });
    let ends = trace.ends.iter().flat_map(|end| {
        (0..instances).map(move |instance| End {
            ordinal: end.ordinal * instances + instance,
            ..*end
        })
    });
    let semaphores = trace.semaphores.iter();
    program.trace = Trace {
        instrs: instrs.collect(),
        ends: ends.collect(),
        semaphores: semaphores
            .flat_map(|one| vec![*one; instances as usize])
            .collect(),
        groups: trace.groups,
        // A loop goes over as many chunks as before, of an instance's size.
        loops: trace.loops,
        barriers: trace.barriers * instances,
    };
    program
}

/// Of an instruction's `count` chunks from `index`, cut into `instances` each, those of one instance.
fn interleave(index: u32, count: u32, instance: u32, instances: u32) -> u32 {
    let aside = if index >= SPARE { SPARE } else { 0 };
    aside + (index - aside) * instances + instance * count
}

fn instance_of(raw: &Raw, instance: u32, instances: u32, replication: Replication) -> Raw {
    let id = |id: &u32| id * instances + instance;
    let ids = |ids: &[u32]| ids.iter().map(id).collect();
    Raw::Other(match raw {
        Raw::Data(data) => {
            let mut data = match replication {
                Replication::Interleaved => {
                    let shift = |operand: &Operand| Operand {
                        index: interleave(operand.index, data.count, instance, instances),
                        ..*operand
                    };
                    Data {
                        from: data.from.iter().map(shift).collect(),
                        to: data.to.iter().map(shift).collect(),
                        ..data.clone()
                    }
                }
                Replication::None => {
                    let (slice, of) = data.slice;
                    Data {
                        slice: (slice * instances + instance, of * instances),
                        ..data.clone()
                    }
                }
            };
            if let Kind::Put { channel, .. } = &mut data.kind {
                *channel = id(channel);
            }
            return Raw::Data(data);
        }
        Raw::Other(Op::Signal { channels, relaxed }) => Op::Signal {
            channels: ids(channels),
            relaxed: *relaxed,
        },
        Raw::Other(Op::Wait { channels, relaxed }) => Op::Wait {
            channels: ids(channels),
            relaxed: *relaxed,
        },
        Raw::Other(Op::Flush { channels }) => Op::Flush {
            channels: ids(channels),
        },
        Raw::Other(Op::Acquire { semaphores }) => Op::Acquire {
            semaphores: ids(semaphores),
        },
        Raw::Other(Op::Release { semaphores }) => Op::Release {
            semaphores: ids(semaphores),
        },
        Raw::Other(Op::Barrier { id: number, blocks }) => Op::Barrier {
            id: id(number),
            blocks: *blocks,
        },
        other => return other.clone(),
    })
}
