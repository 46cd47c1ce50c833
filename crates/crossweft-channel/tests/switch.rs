//! Switch channels: reduce, broadcast and barrier over a group.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{LONG, deadline, launch, ranks, read, register, says, write};
use crossweft_channel::SwitchChannel;
use crossweft_device::reduce::HostReducer;
use crossweft_device::{DataType, ReduceOp};

const N: usize = 1000;
const OUT: u64 = 8192;

/// An all-reduce: every member reduces its share and broadcasts it.
fn all_reduce(
    world_size: u32,
    dtype: DataType,
    op: ReduceOp,
    value: fn(u32, usize) -> [u8; 4],
) -> Vec<Vec<u8>> {
    ranks(world_size, |endpoint| {
        let rank = endpoint.rank();
        let memory = register(&endpoint, 2 * OUT);
        let members: Vec<u32> = (0..world_size).collect();
        let channel = SwitchChannel::new(&endpoint, &memory, &members, deadline()).unwrap();
        let handle = channel.handle();
        let reducer = HostReducer::new(dtype, op);
        let input: Vec<u8> = (0..N).flat_map(|i| value(rank, i)).collect();
        let share = N.div_ceil(world_size as usize);
        let (begin, end) = (rank as usize * share, N.min((rank as usize + 1) * share));
        let (at, count) = (begin as u64 * 4, end.saturating_sub(begin) as u64);
        for _ in 0..3 {
            write(&memory, 0, &input);
            launch(&endpoint, LONG, |block| {
                let own = memory.local().addr() + at;
                // SAFETY: in range; barriers order the accesses.
                unsafe {
                    handle.barrier(block)?;
                    handle.reduce(block, &reducer, own + OUT, at, count)?;
                    handle.broadcast(block, OUT + at, own + OUT, count * 4);
                    handle.barrier(block)
                }
            })
            .unwrap();
        }
        read(&memory, OUT, N * 4)
    })
}

#[test]
fn sum_of_floats() {
    for world_size in [2, 3, 5] {
        let value = |rank: u32, i: usize| (rank as f32 + i as f32 * 0.5).to_le_bytes();
        let expected: Vec<u8> = (0..N)
            .flat_map(|i| {
                let sum: f32 = (0..world_size).map(|r| r as f32 + i as f32 * 0.5).sum();
                sum.to_le_bytes()
            })
            .collect();
        for result in all_reduce(world_size, DataType::F32, ReduceOp::Sum, value) {
            assert_eq!(result, expected, "{world_size} ranks");
        }
    }
}

#[test]
fn maximum_of_integers() {
    for world_size in [2, 3, 5] {
        let value = |rank: u32, i: usize| ((rank as i32 + 1) * (i as i32 - 500)).to_le_bytes();
        let expected: Vec<u8> = (0..N)
            .flat_map(|i| {
                let all = (0..world_size).map(|r| (r as i32 + 1) * (i as i32 - 500));
                all.max().unwrap().to_le_bytes()
            })
            .collect();
        for result in all_reduce(world_size, DataType::I32, ReduceOp::Max, value) {
            assert_eq!(result, expected, "{world_size} ranks");
        }
    }
}

#[test]
fn several_groups_at_once() {
    ranks(5, |endpoint| {
        let rank = endpoint.rank();
        let memory = register(&endpoint, 4096);
        let members: &[u32] = match rank {
            0 | 3 => &[0, 3],
            2 => &[2],
            _ => &[1, 4],
        };
        let channel = SwitchChannel::new(&endpoint, &memory, members, deadline()).unwrap();
        write(
            &memory,
            8 * u64::from(rank),
            &(u64::from(rank) + 1).to_ne_bytes(),
        );
        let src = memory.local().addr() + 8 * u64::from(rank);
        launch(&endpoint, LONG, |block| {
            // SAFETY: in range; each word has one writer until the barrier.
            unsafe {
                channel
                    .handle()
                    .broadcast(block, 8 * u64::from(rank), src, 8);
                channel.handle().barrier(block)
            }
        })
        .unwrap();
        for other in 0..5 {
            let word = read(&memory, 8 * u64::from(other), 8);
            let expected = u64::from(members.contains(&other)) * (u64::from(other) + 1);
            assert_eq!(word, expected.to_ne_bytes());
        }
        endpoint.group().barrier(deadline()).unwrap();
    });
}

#[test]
fn groups_that_do_not_fit_are_refused_everywhere() {
    ranks(3, |endpoint| {
        let memory = register(&endpoint, 4096);
        let members: &[u32] = match endpoint.rank() {
            0 => &[0, 1, 2],
            1 => &[0, 1],
            _ => &[0, 2],
        };
        let result = SwitchChannel::new(&endpoint, &memory, members, deadline());
        says(result, &["members are [0, 1]", "members are [0, 1, 2]"]);
        let result = SwitchChannel::new(&endpoint, &memory, &[1, 0, 2], deadline());
        says(result, &["list of members is [1, 0, 2] on rank 0"]);
        endpoint.group().barrier(deadline()).unwrap();
    });
}
