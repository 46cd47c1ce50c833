//! Semaphores and memory channels between ranks of one host, and how waits end.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{LONG, deadline, launch, pattern, pool, ranks, read, register, says, write};
use crossweft_channel::{ChannelError, MemoryChannel, SemaphorePool};
use crossweft_device::{Block, Site};

const OP: u32 = Site::NO_OP;

#[test]
fn ranks_in_different_calls_hear_so_in_words() {
    ranks(2, |endpoint| {
        // As when two threads of a rank prepare at once.
        let error = match endpoint.rank() {
            0 => endpoint
                .exchange(&7_u8, "setting up a port", deadline())
                .map(drop),
            _ => endpoint
                .exchange(&vec![(7_u64, 300_u64)], "making semaphores", deadline())
                .map(drop),
        };
        // Bytes of the one may make sense to the other.
        if endpoint.rank() == 1 {
            says(
                error,
                &[
                    "making semaphores",
                    "another call or step",
                    "one thread at a time",
                ],
            );
        }
    });
}

#[test]
fn ping_pong() {
    ranks(2, |endpoint| {
        let rank = endpoint.rank();
        let semaphore = pool(&endpoint, &[1 - rank]);
        let handle = semaphore.handle(0);
        launch(&endpoint, LONG, |block| {
            for _ in 0..10_000 {
                // SAFETY: the pool lives, and this block alone uses the handle.
                unsafe {
                    if rank == 0 {
                        handle.signal(block);
                        handle.wait(block, OP)?;
                    } else {
                        handle.wait(block, OP)?;
                        handle.signal(block);
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn poll_takes_each_signal_once() {
    ranks(2, |endpoint| {
        let peer = 1 - endpoint.rank();
        let semaphores = pool(&endpoint, &[peer, peer]);
        let (data, done) = (semaphores.handle(0), semaphores.handle(1));
        launch(&endpoint, LONG, |block| {
            // SAFETY: the pool lives, and this block alone uses the handles.
            unsafe {
                if peer == 1 {
                    assert!(!data.poll(block), "nothing was sent");
                    data.relaxed_signal(block);
                    data.signal(block);
                    done.signal(block);
                    done.wait(block, OP)
                } else {
                    done.wait(block, OP)?;
                    assert!(data.poll(block) && data.poll(block), "two were sent");
                    assert!(!data.poll(block), "not three");
                    done.signal(block);
                    Ok(())
                }
            }
        })
        .unwrap();
    });
}

/// FR-01: every rank lists its channels in the order in which MSCCL++ deadlocked.
#[test]
fn a_ring_of_channels_does_not_deadlock() {
    ranks(4, |endpoint| {
        let rank = endpoint.rank();
        let (next, previous) = ((rank + 1) % 4, (rank + 3) % 4);
        for peers in [
            vec![next, previous],
            vec![previous, next],
            vec![next, next, previous, previous],
        ] {
            let semaphores = pool(&endpoint, &peers);
            assert_eq!(semaphores.len(), peers.len());
            launch(&endpoint, LONG, |block| {
                for k in 0..peers.len() {
                    // SAFETY: the pool lives, and this block alone uses the handles.
                    unsafe { semaphores.handle(k).signal(block) };
                }
                for k in (0..peers.len()).rev() {
                    // SAFETY: as above.
                    unsafe { semaphores.handle(k).wait(block, OP)? };
                }
                Ok(())
            })
            .unwrap();
        }
    });
}

/// The k-th channel of a pair carries the k-th's signals, whatever stands between them.
#[test]
fn channels_are_not_crossed() {
    let lists = [vec![1, 2, 1, 0], vec![0, 2, 0], vec![1, 0]];
    ranks(3, |endpoint| {
        let list = &lists[endpoint.rank() as usize];
        let semaphores = pool(&endpoint, list);
        let words = register(&endpoint, 4096);
        let channels: Vec<_> = (0..list.len())
            .map(|k| MemoryChannel::new(&semaphores, k, &words, &words).unwrap())
            .collect();
        launch(&endpoint, LONG, |block| {
            for (k, channel) in channels.iter().enumerate() {
                let ordinal = list[..k].iter().filter(|&&p| p == list[k]).count() as u64;
                let slot = u64::from(endpoint.rank()) * 8 + ordinal;
                // SAFETY: in range, and each slot has one writer.
                unsafe {
                    channel.handle().write(block, slot, slot + 1);
                    channel.handle().semaphore.signal(block);
                }
            }
            for (k, channel) in channels.iter().enumerate() {
                let ordinal = list[..k].iter().filter(|&&p| p == list[k]).count() as u64;
                let slot = u64::from(list[k]) * 8 + ordinal;
                // SAFETY: the pool lives; the slot was written before the signal.
                unsafe {
                    channel.handle().semaphore.wait(block, OP)?;
                    let own = channel.handle().local + slot * 8;
                    assert_eq!(
                        crossweft_device::Memory::load(block.memory(), own),
                        slot + 1
                    );
                }
            }
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn counts_that_differ_are_named_on_both_ranks() {
    ranks(3, |endpoint| {
        let rank = endpoint.rank();
        let lists: [&[u32]; 3] = [&[1, 1, 2], &[0], &[0]];
        let result = SemaphorePool::new(&endpoint, lists[rank as usize], deadline());
        assert!(matches!(result, Err(ChannelError::Mismatch { .. })));
        let result = result.map(drop);
        match rank {
            0 => says(result, &["rank 1 says 1 channels", "rank 0 says 2"]),
            _ => says(result, &["rank 0 says 2 channels", "rank 1 says 1"]),
        }
        // Nobody is left behind: the next collective call works.
        assert!(pool(&endpoint, &[]).is_empty());
        let result = SemaphorePool::new(&endpoint, &[rank, 9], deadline());
        says(result, &["rank 0 lists", "rank 9"]);
    });
}

#[test]
fn put_get_read_write() {
    const BYTES: usize = 100_000;
    ranks(2, |endpoint| {
        let rank = endpoint.rank();
        let (remote, local) = (register(&endpoint, 1 << 20), register(&endpoint, 1 << 20));
        let channels =
            MemoryChannel::connect(&endpoint, &[1 - rank], &remote, &local, deadline()).unwrap();
        let channel = channels[0].handle();
        write(&local, 8, &pattern(rank.into(), BYTES));
        launch(&endpoint, LONG, |block| {
            // SAFETY: the ranges are in the memories, and signals order the accesses.
            unsafe {
                channel.put(block, 24, 8, BYTES as u64);
                channel.write::<_, u32>(block, 100_000, 77 + rank);
                channel.semaphore.signal(block);
                channel.semaphore.wait(block, OP)?;
                // What the peer was given, got back.
                channel.get(block, 500_000, 24, BYTES as u64);
                assert_eq!(channel.read::<_, u32>(block, 100_000), 77 + rank);
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(
            read(&remote, 24, BYTES),
            pattern(u64::from(1 - rank), BYTES)
        );
        assert_eq!(read(&local, 500_000, BYTES), pattern(rank.into(), BYTES));
        endpoint.group().barrier(deadline()).unwrap();
    });
}

#[test]
fn packets_of_several_epochs() {
    const HALF: u64 = 8192;
    ranks(2, |endpoint| {
        let peer = 1 - endpoint.rank();
        let packets = register(&endpoint, 4 * HALF);
        let local = register(&endpoint, 4 * HALF);
        let channel =
            MemoryChannel::connect(&endpoint, &[peer], &packets, &local, deadline()).unwrap();
        let channel = channel[0].handle();
        for epoch in 1..=40u32 {
            let bytes = 1 + (epoch as usize * 211) % HALF as usize;
            let half = u64::from(epoch % 2) * HALF;
            let sent = |rank: u32| pattern(u64::from(rank * 1000 + epoch), bytes);
            write(&local, 3, &sent(endpoint.rank()));
            launch(&endpoint, LONG, |block| {
                // SAFETY: in range; the halves take turns.
                unsafe {
                    channel.put_packets(block, half, 3, bytes as u64, epoch);
                    channel.unpack_packets(block, 2 * HALF, half, bytes as u64, epoch)
                }
            })
            .unwrap();
            assert_eq!(read(&local, 2 * HALF, bytes), sent(peer), "epoch {epoch}");
        }
    });
}

#[test]
fn a_wait_ends_at_its_deadline_in_words() {
    ranks(2, |endpoint| {
        let peer = 1 - endpoint.rank();
        let semaphores = pool(&endpoint, &[endpoint.rank(), peer]);
        let handle = semaphores.handle(1);
        if endpoint.rank() == 0 {
            let result = launch(&endpoint, Duration::from_millis(50), |block| {
                // SAFETY: the pool lives.
                unsafe { handle.wait(block, OP) }
            });
            let words = [
                "rank 0 waited for a signal from rank 1 on channel 1",
                "(expected 1, seen 0)",
                "deadline of 50ms",
            ];
            says(result, &words);
        }
        endpoint.group().barrier(deadline()).unwrap();
    });
}

#[test]
fn a_rank_that_leaves_ends_the_wait_for_it() {
    let words = ["rank 0 waited for a signal from rank 1", "rank 1 has left"];
    ranks(2, |endpoint| {
        let semaphores = pool(&endpoint, &[1 - endpoint.rank()]);
        if endpoint.rank() == 1 {
            endpoint.group().leave();
            return;
        }
        let handle = semaphores.handle(0);
        // SAFETY: the pool lives.
        let result = launch(&endpoint, LONG, |block| unsafe { handle.wait(block, OP) });
        says(result, &words);
    });
    // By dropping everything instead.
    ranks(2, |endpoint| {
        let semaphores = pool(&endpoint, &[1 - endpoint.rank()]);
        if endpoint.rank() == 0 {
            let handle = semaphores.handle(0);
            // SAFETY: the pool lives.
            let result = launch(&endpoint, LONG, |block| unsafe { handle.wait(block, OP) });
            says(result, &words);
        }
    });
}

#[test]
fn an_abort_ends_waits_everywhere() {
    ranks(3, |endpoint| {
        let rank = endpoint.rank();
        let peers = [(rank + 1) % 3, (rank + 2) % 3];
        let semaphores = pool(&endpoint, &peers);
        let all_wait = AtomicBool::new(false);
        let result = std::thread::scope(|scope| {
            if rank == 2 {
                scope.spawn(|| {
                    while !all_wait.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    endpoint.group().abort("the cat sat on the keyboard");
                });
            }
            launch(&endpoint, LONG, |block| {
                // SAFETY: the pool lives.
                unsafe {
                    if rank == 2 {
                        semaphores.handle(0).wait(block, OP)?;
                        semaphores.handle(1).wait(block, OP)?;
                        all_wait.store(true, Ordering::Release);
                    } else {
                        semaphores
                            .handle(peers.iter().position(|&p| p == 2).unwrap())
                            .signal(block);
                    }
                    semaphores.handle(0).wait(block, OP)
                }
            })
        });
        says(result, &["rank 2 aborted", "the cat sat on the keyboard"]);
    });
}

/// FR-10: memory may be dropped as soon as it is registered, in any order.
#[test]
fn teardown_in_any_order() {
    ranks(3, |endpoint| {
        for round in 0..50 {
            let memory = register(&endpoint, 4096);
            if round % 3 == endpoint.rank() {
                drop(memory);
                continue;
            }
            std::thread::yield_now();
        }
        let memory = register(&endpoint, 4096);
        write(&memory, 0, &[7; 8]);
        endpoint.group().barrier(deadline()).unwrap();
        if endpoint.rank() == 0 {
            // The other owners may be gone by now.
            std::thread::sleep(Duration::from_millis(20));
            let peer = memory.addr(1).unwrap();
            launch(&endpoint, LONG, |block| {
                // SAFETY: the mapping lives on, and nobody writes it.
                let seen = unsafe { crossweft_device::Memory::load(block.memory(), peer) };
                assert_eq!(seen, u64::from_ne_bytes([7; 8]));
                Ok(())
            })
            .unwrap();
        }
    });
}
