//! Port channels over mapped memory and over TCP.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use common::{LONG, deadline, launch, pattern, pool, ranks, read, register, says, write};
use crossweft_channel::{
    ChannelError, Endpoint, Flow, Guard, PortChannel, ProxyOptions, ProxyService, RegisteredMemory,
    TransportChoice,
};
use crossweft_device::Site;
use crossweft_device::fifo::{Trigger, TriggerKind};
use crossweft_hal::cpu::{Grid, Schedule};

const BOTH: [TransportChoice; 2] = [TransportChoice::Auto, TransportChoice::Tcp];

fn options(transport: TransportChoice) -> ProxyOptions {
    ProxyOptions {
        transport,
        ..ProxyOptions::default()
    }
}

/// A service with one memory of `bytes` bytes and a channel to `peer`.
fn connect(
    endpoint: &Arc<Endpoint>,
    options: &ProxyOptions,
    peer: u32,
    bytes: u64,
) -> (ProxyService, Arc<RegisteredMemory>, PortChannel) {
    let service = ProxyService::new(endpoint, options, deadline()).unwrap();
    let memory = register(endpoint, bytes);
    let id = service.add_memory(&memory).unwrap();
    let semaphores = pool(endpoint, &[peer]);
    let channel = service.channel(&semaphores, 0, id, id, deadline()).unwrap();
    // Nobody goes before all are connected.
    endpoint.group().barrier(deadline()).unwrap();
    (service, memory, channel)
}

#[test]
fn put_signal_and_flush_in_all_combinations() {
    const BYTES: usize = 700_001; // several frames, the last one odd
    for transport in BOTH {
        ranks(2, |endpoint| {
            let peer = 1 - endpoint.rank();
            let (_service, memory, channel) =
                connect(&endpoint, &options(transport), peer, 4 << 20);
            let handle = channel.handle();
            let sent = |rank: u32, round: u32| pattern(u64::from(rank * 100 + round), BYTES);
            for round in 0..8 {
                write(&memory, 5, &sent(endpoint.rank(), round));
                launch(&endpoint, LONG, |block| {
                    // SAFETY: the channel lives; signals order the accesses.
                    unsafe {
                        let (dst, src, bytes) = (1_000_003, 5, BYTES as u64);
                        match round % 4 {
                            0 => {
                                handle.put(block, dst, src, bytes)?;
                                handle.signal(block)?;
                                handle.flush(block)?;
                            }
                            1 => {
                                handle.put(block, dst, src, bytes)?;
                                handle.flush(block)?;
                                handle.signal(block)?;
                            }
                            2 => {
                                handle.put_with_signal(block, dst, src, bytes)?;
                                handle.flush(block)?;
                                handle.flush(block)?; // with nothing outstanding
                            }
                            _ => handle.put_with_signal_and_flush(block, dst, src, bytes)?,
                        }
                        while !handle.poll(block) {
                            std::thread::yield_now();
                        }
                    }
                    Ok(())
                })
                .unwrap();
                assert!(
                    read(&memory, 1_000_003, BYTES) == sent(peer, round),
                    "round {round}"
                );
                endpoint.group().barrier(deadline()).unwrap();
            }
        });
    }
}

#[test]
fn ping_pong_and_idle_proxies() {
    for transport in BOTH {
        ranks(2, |endpoint| {
            let peer = 1 - endpoint.rank();
            let (_service, memory, channel) = connect(&endpoint, &options(transport), peer, 4096);
            let handle = channel.handle();
            let words = memory.local();
            launch(&endpoint, LONG, |block| {
                for n in 1..=300u64 {
                    // SAFETY: the channel lives; signals order the accesses.
                    unsafe {
                        if peer == 1 {
                            words.write(0, &n.to_ne_bytes()).unwrap();
                            handle.put_with_signal(block, 8, 0, 8)?;
                            handle.wait(block)?;
                        } else {
                            handle.wait(block)?;
                            let mut seen = [0; 8];
                            words.read(8, &mut seen).unwrap();
                            assert_eq!(u64::from_ne_bytes(seen), n);
                            handle.signal(block)?;
                        }
                    }
                    if n % 100 == 0 {
                        std::thread::sleep(Duration::from_millis(30));
                    }
                }
                Ok(())
            })
            .unwrap();
        });
    }
}

#[test]
fn a_fifo_of_two_takes_a_thousand_puts() {
    for transport in BOTH {
        ranks(3, |endpoint| {
            let peer = (endpoint.rank() + 1) % 3;
            let options = ProxyOptions {
                fifo_capacity: 2,
                transport,
            };
            let service = ProxyService::new(&endpoint, &options, deadline()).unwrap();
            let memory = register(&endpoint, 1 << 16);
            let id = service.add_memory(&memory).unwrap();
            let previous = (endpoint.rank() + 2) % 3;
            let semaphores = pool(&endpoint, &[peer, previous]);
            let to = service.channel(&semaphores, 0, id, id, deadline()).unwrap();
            let from = service.channel(&semaphores, 1, id, id, deadline()).unwrap();
            let data: Vec<u8> = (0..1000u64)
                .flat_map(|n| (n * 3 + u64::from(endpoint.rank())).to_ne_bytes())
                .collect();
            write(&memory, 0, &data);
            launch(&endpoint, LONG, |block| {
                // SAFETY: the channels live; each word has one writer.
                unsafe {
                    for n in 0..1000 {
                        to.handle().put(block, 32768 + n * 8, n * 8, 8)?;
                    }
                    to.handle().signal(block)?;
                    from.handle().wait(block)
                }
            })
            .unwrap();
            let seen = read(&memory, 32768, 8000);
            for (n, word) in seen.chunks(8).enumerate() {
                let expected = n as u64 * 3 + u64::from(previous);
                assert_eq!(word, expected.to_ne_bytes());
            }
            // What peers still read from is theirs until all are here.
            endpoint.group().barrier(deadline()).unwrap();
        });
    }
}

/// FR-08: ids beyond 512, each its own memory, freed and used again.
#[test]
fn thousands_of_memories() {
    for transport in BOTH {
        ranks(2, |endpoint| {
            let service = ProxyService::new(&endpoint, &options(transport), deadline()).unwrap();
            let peer = 1 - endpoint.rank();
            let semaphores = pool(&endpoint, &[peer]);
            // 600 memories of their own, then 5000 parts of one; each time every id is used.
            for round in 0..3u64 {
                let (one, many);
                let parts: Vec<(&Arc<RegisteredMemory>, u64)> = if round == 0 {
                    many = (0..600)
                        .map(|_| register(&endpoint, 4096))
                        .collect::<Vec<_>>();
                    many.iter().map(|memory| (memory, 0)).collect()
                } else {
                    one = register(&endpoint, 5000 * 64);
                    (0..5000).map(|n| (&one, n * 64)).collect()
                };
                let ids: Vec<u32> = parts
                    .iter()
                    .map(|&(memory, at)| service.add_range(memory, at, 64).unwrap())
                    .collect();
                assert_eq!(
                    ids.iter().max(),
                    Some(&(ids.len() as u32 - 1)),
                    "ids are reused"
                );
                let value =
                    |rank: u32, n: usize| (round << 40) + (u64::from(rank) << 32) + n as u64;
                let channels: Vec<_> = ids
                    .iter()
                    .map(|&id| service.channel(&semaphores, 0, id, id, deadline()).unwrap())
                    .collect();
                for (n, &(memory, at)) in parts.iter().enumerate() {
                    write(memory, at, &value(endpoint.rank(), n).to_ne_bytes());
                }
                launch(&endpoint, LONG, |block| {
                    // SAFETY: the channels live; each word has one writer.
                    unsafe {
                        for channel in &channels {
                            channel.handle().put(block, 32, 0, 8)?;
                        }
                        channels[0].handle().signal(block)?;
                        channels[0].handle().flush(block)?;
                        channels[0].handle().wait(block)
                    }
                })
                .unwrap();
                for (n, &(memory, at)) in parts.iter().enumerate() {
                    assert_eq!(read(memory, at + 32, 8), value(peer, n).to_ne_bytes());
                }
                drop(channels);
                for &id in ids.iter().rev() {
                    service.remove_memory(id).unwrap();
                }
                endpoint.group().barrier(deadline()).unwrap();
            }
            let memory = register(&endpoint, 4096);
            for _ in 0..10_000 {
                let id = service.add_memory(&memory).unwrap();
                service.remove_memory(id).unwrap();
                says(
                    service.remove_memory(id),
                    &[&format!("memory id {id} is unknown")],
                );
            }
            endpoint.group().barrier(deadline()).unwrap();
        });
    }
}

/// What a kernel of rank 0 sees when it pushes `trigger` and flushes, and rank 1 when it waits.
fn rejected(transport: TransportChoice, spoil: impl Fn(&mut Trigger) + Sync, words: &[&str]) {
    ranks(2, |endpoint| {
        let peer = 1 - endpoint.rank();
        let (_service, _memory, channel) = connect(&endpoint, &options(transport), peer, 4096);
        let handle = channel.handle();
        let mut trigger = Trigger {
            kind: TriggerKind::PUT.with(TriggerKind::FLUSH),
            channel: handle.channel,
            dst_memory: handle.dst_memory,
            src_memory: handle.src_memory,
            dst_offset: 0,
            src_offset: 0,
            size: 64,
        };
        spoil(&mut trigger);
        let result = launch(&endpoint, LONG, |block| {
            // SAFETY: the channel lives.
            unsafe {
                if peer == 0 {
                    return handle.wait(block);
                }
                let position = handle.fifo.push(block, Site::NO_OP, &trigger)?;
                handle.fifo.wait_handled(block, Site::NO_OP, position)
            }
        });
        let by = ["rank 0 aborted the job"];
        says(result, &[&by[..], words].concat());
    });
}

#[test]
fn what_a_proxy_cannot_do_fails_the_job_in_words() {
    for transport in BOTH {
        rejected(
            transport,
            |t| t.dst_memory = 700,
            &["memory id 700 is unknown"],
        );
        rejected(
            transport,
            |t| t.src_memory = 1 << 19,
            &["memory id 524288 is unknown"],
        );
        rejected(transport, |t| t.channel = 3, &["channel id 3 is unknown"]);
        rejected(
            transport,
            |t| t.dst_offset = 4090,
            &[
                "channel 0",
                "destination",
                "4090..4090+64",
                "memory id 0",
                "4096 bytes",
            ],
        );
        rejected(
            transport,
            |t| t.src_offset = u64::MAX - 10,
            &[
                "channel 0",
                "source",
                "18446744073709551605..18446744073709551605+64",
            ],
        );
        rejected(
            transport,
            |t| t.size = u64::MAX,
            &["0..0+18446744073709551615"],
        );
    }
}

#[test]
fn a_custom_handler_sees_triggers_and_can_stop() {
    for transport in BOTH {
        ranks(2, |endpoint| {
            let (seen, log) = channel();
            let service = ProxyService::with_handler(&endpoint, &options(transport), deadline(), {
                move |trigger, carrier| {
                    seen.send(*trigger).unwrap();
                    if trigger.kind == TriggerKind::SIGNAL && trigger.size == 99 {
                        return Ok(Flow::Stop);
                    }
                    carrier.carry(trigger).map(|()| Flow::Continue)
                }
            })
            .unwrap();
            let memory = register(&endpoint, 4096);
            let id = service.add_memory(&memory).unwrap();
            let peer = 1 - endpoint.rank();
            let semaphores = pool(&endpoint, &[peer]);
            let port = service.channel(&semaphores, 0, id, id, deadline()).unwrap();
            let handle = port.handle();
            write(&memory, 0, &[endpoint.rank() as u8 + 1; 100]);
            let nothing = Trigger {
                kind: TriggerKind::SIGNAL,
                channel: 0,
                dst_memory: 0,
                src_memory: 0,
                dst_offset: 0,
                src_offset: 0,
                size: 99,
            };
            launch(&endpoint, LONG, |block| {
                // SAFETY: the channel lives.
                unsafe {
                    handle.put_with_signal_and_flush(block, 200, 0, 100)?;
                    handle.wait(block)?;
                    let position = service.fifo().push(block, Site::NO_OP, &nothing)?;
                    service.fifo().wait_handled(block, Site::NO_OP, position)
                }
            })
            .unwrap();
            assert_eq!(read(&memory, 200, 100), [peer as u8 + 1; 100]);
            // The handler is dropped with its thread: the log ends.
            let log: Vec<Trigger> = log.iter().collect();
            assert_eq!(log.len(), 2);
            assert_eq!((log[0].dst_offset, log[0].size), (200, 100));
            assert_eq!(log[1], nothing);
            // Nobody handles what comes now, and the kernel is told.
            let result = launch(&endpoint, Duration::from_millis(50), |block| {
                // SAFETY: the channel lives.
                unsafe { handle.flush(block) }
            });
            says(result, &["waited for the proxy", "deadline of 50ms"]);
            endpoint.group().barrier(deadline()).unwrap();
        });
    }
}

#[test]
fn a_handler_that_fails_or_panics_fails_the_job() {
    for panic in [false, true] {
        let words = if panic { "panicked" } else { "no more coffee" };
        ranks(2, |endpoint| {
            let handler = move |_: &Trigger, _: &mut _| {
                assert!(!panic, "on purpose");
                Err(ChannelError::Handler {
                    reason: "no more coffee".to_owned(),
                })
            };
            let options = ProxyOptions::default();
            let service =
                ProxyService::with_handler(&endpoint, &options, deadline(), handler).unwrap();
            let memory = register(&endpoint, 4096);
            let id = service.add_memory(&memory).unwrap();
            let semaphores = pool(&endpoint, &[1 - endpoint.rank()]);
            let port = service.channel(&semaphores, 0, id, id, deadline()).unwrap();
            let result = launch(&endpoint, LONG, |block| {
                // SAFETY: the channel lives.
                unsafe {
                    match endpoint.rank() {
                        0 => port.handle().flush(block),
                        _ => port.handle().wait(block),
                    }
                }
            });
            says(result, &["rank 0 aborted", "handler failed", words]);
        });
    }
}

#[test]
fn options_are_checked_on_every_rank() {
    ranks(2, |endpoint| {
        let bad = |rank, capacity| ProxyOptions {
            fifo_capacity: if endpoint.rank() == rank { capacity } else { 8 },
            ..ProxyOptions::default()
        };
        for capacity in [0, 3, 1 << 21] {
            let result = ProxyService::new(&endpoint, &bad(1, capacity), deadline());
            says(result, &["rank 1", "fifo_capacity", &capacity.to_string()]);
        }
        let transport = BOTH[endpoint.rank() as usize];
        let result = ProxyService::new(&endpoint, &options(transport), deadline());
        says(result, &["Tcp", "Auto"]);
    });
}

/// What was pushed before a service or channel is dropped still arrives.
#[test]
fn dropping_carries_out_what_was_pushed() {
    for (transport, channel_first) in BOTH.into_iter().flat_map(|t| [(t, false), (t, true)]) {
        ranks(2, |endpoint| {
            let peer = 1 - endpoint.rank();
            let service = ProxyService::new(&endpoint, &options(transport), deadline()).unwrap();
            let memory = register(&endpoint, 1 << 20);
            let id = service.add_memory(&memory).unwrap();
            let semaphores = pool(&endpoint, &[peer]);
            let channel = service.channel(&semaphores, 0, id, id, deadline()).unwrap();
            write(&memory, 0, &[endpoint.rank() as u8 + 1; 100_000]);
            launch(&endpoint, LONG, |block| {
                // SAFETY: the channel lives.
                unsafe { channel.handle().put_with_signal(block, 500_000, 0, 100_000) }
            })
            .unwrap();
            let semaphore = semaphores.handle(0);
            let (mut service, mut channel) = (Some(service), Some(channel));
            if channel_first {
                drop(channel.take());
            } else {
                drop(service.take());
            }
            launch(&endpoint, LONG, |block| {
                // SAFETY: the pool lives.
                unsafe { semaphore.wait(block, Site::NO_OP) }
            })
            .unwrap();
            assert_eq!(read(&memory, 500_000, 100_000), [peer as u8 + 1; 100_000]);
            endpoint.group().barrier(deadline()).unwrap();
            drop((service, channel));
        });
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for transport in BOTH {
        ranks(2, |endpoint| {
            let peer = 1 - endpoint.rank();
            let (service, _memory, channel) = connect(&endpoint, &options(transport), peer, 4096);
            if endpoint.rank() == 1 {
                endpoint.group().leave();
                drop(service);
                return;
            }
            let result = launch(&endpoint, LONG, |block| {
                // SAFETY: the channel lives.
                unsafe { channel.handle().wait(block) }
            });
            says(
                result,
                &["rank 0 waited for a signal from rank 1", "rank 1 has left"],
            );
        });
    }
}

/// A peer whose service is gone cannot be put to over TCP; the kernel hears of it.
#[test]
fn a_service_that_is_gone_is_an_error() {
    ranks(2, |endpoint| {
        let peer = 1 - endpoint.rank();
        let (service, _memory, channel) =
            connect(&endpoint, &options(TransportChoice::Tcp), peer, 4096);
        if endpoint.rank() == 1 {
            drop(service); // waits for rank 0's goodbye a second, in vain
            let result = endpoint.group().barrier(deadline());
            if result.is_ok() {
                // Rank 0's news can come after its barrier.
                return;
            }
            assert!(result.unwrap_err().to_string().contains("rank 0 aborted"));
            return;
        }
        let result = launch(&endpoint, LONG, |block| {
            // SAFETY: the channel lives.
            unsafe {
                loop {
                    channel
                        .handle()
                        .put_with_signal_and_flush(block, 0, 64, 8)?;
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        });
        says(
            result,
            &["rank 0 aborted", "no data connection with rank 1"],
        );
    });
}

/// FR-21: put, signal and flush in a loop from several thread blocks through one fifo.
#[test]
fn several_blocks_share_a_fifo() {
    const BLOCKS: u32 = 6;
    for transport in BOTH {
        ranks(2, |endpoint| {
            let peer = 1 - endpoint.rank();
            let options = ProxyOptions {
                fifo_capacity: 4,
                transport,
            };
            let service = ProxyService::new(&endpoint, &options, deadline()).unwrap();
            let memory = register(&endpoint, 1 << 16);
            let id = service.add_memory(&memory).unwrap();
            let semaphores = pool(&endpoint, &[peer; BLOCKS as usize]);
            let channels: Vec<_> = (0..BLOCKS as usize)
                .map(|k| service.channel(&semaphores, k, id, id, deadline()).unwrap())
                .collect();
            for seed in 0..4 {
                let guard = Guard::new(&endpoint, LONG);
                let mut grid = Grid::new(BLOCKS, Schedule::Seeded(seed)).unwrap();
                let local = memory.local();
                grid.launch(&endpoint.context(&guard), &|block, index| {
                    let handle = channels[index as usize].handle();
                    let (src, dst) = (u64::from(index) * 8, 4096 + u64::from(index) * 8);
                    for n in 0..50u64 {
                        local.write(src, &(n + src).to_ne_bytes()).unwrap();
                        // SAFETY: the channels live; signals order the accesses.
                        unsafe {
                            handle.put_with_signal_and_flush(block, dst, src, 8)?;
                            handle.wait(block)?;
                            let mut seen = [0; 8];
                            local.read(dst, &mut seen).unwrap();
                            assert_eq!(u64::from_ne_bytes(seen), n + src);
                            // Read, so the next may come.
                            handle.signal(block)?;
                            handle.wait(block)?;
                        }
                    }
                    Ok(())
                })
                .unwrap();
            }
        });
    }
}
