//! Joining, and the collective calls of a group, over loopback.
#![allow(clippy::unwrap_used, reason = "a test says best where it failed")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Random, join, rendezvous, soon, with_ranks};
use crossweft_net::auth::{self, Role};
use crossweft_net::{
    Cancel, Failure, Group, JoinOptions, NetError, PeerState, RefuseReason, Rendezvous,
    RendezvousOptions, UniqueId,
};

#[test]
fn ranks_join_and_know_where_they_are() {
    for size in [1, 2, 3, 5, 8, 16] {
        let tags = with_ranks(size, |group| {
            assert_eq!(group.world_size(), size);
            assert_eq!(group.node_count(), 1);
            assert_eq!(
                (group.local_rank(), group.local_size()),
                (group.rank(), size)
            );
            assert!((0..size).all(|rank| group.is_same_host(rank)));
            assert!(!group.is_same_host(size));
            assert!((0..size).all(|rank| group.peer_address(rank).is_loopback()));
            assert!(!group.liveness().stopped());
            group.barrier(soon()).unwrap();
            group.tag()
        });
        assert!(tags.iter().all(|tag| *tag == tags[0]));
    }
}

#[test]
fn payloads_of_any_length_arrive_everywhere() {
    let payload = |rank: u32, round: u64| {
        let mut random = Random(u64::from(rank) * 1000 + round + 1);
        let length = match random.below(6) {
            0 => 0,
            1 => (1 << 20) + random.below(1 << 19),
            2 => random.below(70_000),
            _ => random.below(300),
        };
        (0..length)
            .map(|i| (i * 31 + u64::from(rank)) as u8)
            .collect::<Vec<_>>()
    };
    for size in [1, 2, 3, 5, 8] {
        with_ranks(size, |group| {
            for round in 0..12 {
                let blocks = group
                    .all_gather(&payload(group.rank(), round), soon())
                    .unwrap();
                assert_eq!(blocks.len(), size as usize);
                for (rank, block) in (0..).zip(blocks) {
                    assert!(block == payload(rank, round), "rank {rank}, round {round}");
                }
                if round % 3 == 0 {
                    group.barrier(soon()).unwrap();
                }
            }
        });
    }
}

#[test]
fn a_barrier_waits_for_the_last() {
    let arrived = AtomicBool::new(false);
    with_ranks(5, |group| {
        if group.rank() == 3 {
            std::thread::sleep(Duration::from_millis(100));
            arrived.store(true, Ordering::SeqCst);
        }
        group.barrier(soon()).unwrap();
        assert!(arrived.load(Ordering::SeqCst));
    });
}

#[test]
fn strangers_do_not_keep_a_job_from_forming() {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    let address = id.address();
    // A slow one, a noisy one, a silent one, and one with another job's secret.
    let mut slow = TcpStream::connect(address).unwrap();
    slow.write_all(b"C").unwrap();
    let mut noisy = TcpStream::connect(address).unwrap();
    let noise: Vec<u8> = (0..10_000u32).map(|i| ((i * 7919) >> 3) as u8).collect();
    let _ = noisy.write_all(&noise);
    let _silent = TcpStream::connect(address).unwrap();
    let wrong = UniqueId::generate(address).unwrap();
    let started = Instant::now();
    let error = join(&wrong, 0, 3).unwrap_err();
    assert!(matches!(error, NetError::WrongSecret { .. }), "{error}");

    std::thread::scope(|scope| {
        for rank in 0..3 {
            let id = &id;
            scope.spawn(move || join(id, rank, 3).unwrap().barrier(soon()).unwrap());
        }
    });
    rendezvous.wait().unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    // The noisy one was shown the door.
    noisy
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    assert!(matches!(noisy.read(&mut [0; 100]), Ok(0) | Err(_)));
}

#[test]
fn missing_ranks_are_named_everywhere() {
    let timeout = Duration::from_secs(1);
    for (root_timeout, join_timeout) in [(timeout, timeout * 20), (timeout * 20, timeout)] {
        let options = RendezvousOptions {
            timeout: root_timeout,
            ..Default::default()
        };
        let rendezvous = Rendezvous::start(&options).unwrap();
        let id = rendezvous.unique_id();
        let started = Instant::now();
        std::thread::scope(|scope| {
            for rank in [0, 3] {
                let id = &id;
                scope.spawn(move || {
                    let options = JoinOptions {
                        timeout: join_timeout,
                        ..Default::default()
                    };
                    match Group::join(id, rank, 4, &options).unwrap_err() {
                        NetError::RanksMissing {
                            missing,
                            joined: 2,
                            world_size: 4,
                            ..
                        } => {
                            assert_eq!(missing, [1, 2]);
                        }
                        error => panic!("{error}"),
                    }
                });
            }
        });
        if root_timeout == timeout {
            let error = rendezvous.wait().unwrap_err().to_string();
            assert!(
                error.contains("2 of 4 ranks") && error.contains("[1, 2]"),
                "{error}"
            );
        }
        assert!(started.elapsed() < Duration::from_secs(4));
    }
}

#[test]
fn offenders_are_refused_and_the_job_forms() {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    std::thread::scope(|scope| {
        // Of two ranks 0, one is refused; from then on the other one decides the world size.
        let (sender, results) = std::sync::mpsc::channel();
        for sender in [sender.clone(), sender] {
            let id = &id;
            scope.spawn(move || drop(sender.send(join(id, 0, 2))));
        }
        let NetError::Refused { rank: 0, reason } = results.recv().unwrap().unwrap_err() else {
            panic!("it was not refused");
        };
        assert_eq!(reason, RefuseReason::DuplicateRank { rank: 0 });
        let error = join(&id, 1, 3).unwrap_err();
        assert!(
            error.to_string().contains("world size 3 but rank 0 with 2"),
            "{error}"
        );
        assert!(matches!(join(&id, 2, 2), Err(NetError::InvalidRank { .. })));
        let second = join(&id, 1, 2).unwrap();
        let first = results.recv().unwrap().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| first.barrier(soon()).unwrap());
            second.barrier(soon()).unwrap();
        });
    });
    rendezvous.wait().unwrap();
}

#[test]
fn a_lost_rendezvous_is_an_error_at_once() {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    std::thread::scope(|scope| {
        let joiner = scope.spawn(|| join(&id, 1, 2).unwrap_err());
        std::thread::sleep(Duration::from_millis(100));
        drop(rendezvous);
        let error = joiner.join().unwrap();
        assert!(matches!(error, NetError::RootLost { .. }), "{error}");
    });
    let error = join(&id, 1, 2).unwrap_err();
    assert!(matches!(error, NetError::RootLost { .. }), "{error}");
}

#[test]
fn a_timeout_names_those_who_did_not_come_and_they_may_come_later() {
    with_ranks(8, |group| {
        if group.rank() == 5 {
            std::thread::sleep(Duration::from_millis(900));
        } else {
            let deadline = Instant::now() + Duration::from_millis(600);
            match group.barrier(deadline).unwrap_err() {
                NetError::Timeout { missing, what, .. } => {
                    assert_eq!(missing, [5]);
                    assert!(what.contains("barrier"));
                }
                error => panic!("{error}"),
            }
        }
        if group.rank() == 5 {
            group.barrier(soon()).unwrap();
        }
        assert_eq!(group.all_gather(&[1], soon()).unwrap().len(), 8);
        assert!(!group.liveness().stopped());
    });
}

#[test]
fn different_calls_are_an_error_on_every_rank() {
    with_ranks(5, |group| {
        let error = match group.rank() {
            2 => group.all_gather(b"x", soon()).unwrap_err(),
            _ => group.barrier(soon()).unwrap_err(),
        };
        match &error {
            NetError::Mismatch {
                rank, other_rank, ..
            } => {
                assert!(*rank == 2 || *other_rank == 2);
            }
            error => panic!("{error}"),
        }
        let text = error.to_string();
        assert!(
            text.contains("all_gather") && text.contains("barrier"),
            "{text}"
        );
        group.barrier(soon()).unwrap();
    });
}

#[test]
fn an_abort_reaches_every_wait() {
    with_ranks(8, |group| {
        if group.rank() == 6 {
            std::thread::sleep(Duration::from_millis(50));
            group.abort("out of memory");
        }
        let error = match group.rank() % 2 {
            0 => group.barrier(soon()).unwrap_err(),
            _ => group.fetch_fd(0, 7, soon()).map(drop).unwrap_err(),
        };
        match error {
            NetError::Aborted { by: 6, reason, .. } => assert_eq!(reason, "out of memory"),
            error => panic!("{error}"),
        }
        assert!(group.liveness().stopped());
        assert!(matches!(
            group.liveness().failure(),
            Some(Failure::Aborted { by: 6, .. })
        ));
    });
}

#[test]
fn a_failure_found_elsewhere_is_told_to_all() {
    with_ranks(4, |group| {
        if group.rank() == 1 {
            let failure = Failure::PeerDied {
                rank: 3,
                reason: "its queue pair broke".to_owned(),
            };
            group.liveness().fail_local(failure);
        }
        let error = group.barrier(soon()).unwrap_err();
        assert!(error.to_string().contains("rank 3") && error.to_string().contains("queue pair"));
    });
}

#[test]
fn a_failure_found_by_a_rank_that_leaves_at_once_is_told_to_all() {
    for _ in 0..20 {
        with_ranks(4, |group| {
            if group.rank() == 1 {
                let failure = Failure::PeerDied {
                    rank: 3,
                    reason: "its queue pair broke".to_owned(),
                };
                group.liveness().fail_local(failure);
                return group.leave();
            }
            let error = group.barrier(soon()).unwrap_err().to_string();
            assert!(
                error.contains("rank 3 died") && error.contains("queue pair"),
                "{error}"
            );
        });
    }
}

#[test]
fn a_rank_that_was_too_late_and_left_says_so() {
    with_ranks(3, |group| {
        match group.rank() {
            0 => {
                let deadline = Instant::now() + Duration::from_millis(300);
                group.barrier(deadline).unwrap_err();
                group.leave();
            }
            1 => {
                let error = group.barrier(soon()).unwrap_err().to_string();
                assert!(
                    error.contains("rank 0 has left the group (barrier (operation 0 of the group)")
                        && error.contains("missing: ranks [2]"),
                    "{error}"
                );
            }
            // Never comes, but is there for as long as the others need it.
            _ => std::thread::sleep(Duration::from_secs(1)),
        }
    });
}

#[test]
fn joining_can_be_cancelled_from_another_thread() {
    let rendezvous = rendezvous();
    let id = rendezvous.unique_id();
    let cancel = Cancel::new().unwrap();
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            let options = JoinOptions {
                cancel: (rank == 1).then(|| cancel.clone()),
                ..Default::default()
            };
            let id = &id;
            scope.spawn(move || {
                let error = Group::join(id, rank, 3, &options).unwrap_err();
                assert!(
                    matches!(&error, NetError::Aborted { by: 1, reason, .. } if reason.starts_with("enough")),
                    "{error}"
                );
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        // However much there is to say.
        cancel.cancel(&"enough ".repeat(1000));
    });
    assert!(matches!(
        rendezvous.wait(),
        Err(NetError::Aborted { by: 1, .. })
    ));
    // Once cancelled, always cancelled; also where nobody answers.
    let options = JoinOptions {
        cancel: Some(cancel),
        ..Default::default()
    };
    let nowhere = UniqueId::generate("192.0.2.1:9".parse().unwrap()).unwrap();
    let error = Group::join(&nowhere, 0, 2, &options).unwrap_err();
    assert!(matches!(
        error,
        NetError::Aborted { by: 0, .. } | NetError::RootLost { .. }
    ));
}

#[test]
fn a_rank_that_cannot_join_says_why() {
    let rendezvous = rendezvous();
    let options = JoinOptions {
        bind: "no-such-if0".parse().unwrap(),
        ..Default::default()
    };
    let error = Group::join(&rendezvous.unique_id(), 1, 2, &options).unwrap_err();
    assert!(matches!(error, NetError::InvalidBind { .. }), "{error}");
    match rendezvous.wait().unwrap_err() {
        NetError::Aborted { by: 1, reason, .. } => assert_eq!(reason, error.to_string()),
        error => panic!("{error}"),
    }
}

#[test]
fn leaving_is_no_failure_but_is_noticed() {
    with_ranks(5, |group| {
        let blocks = group.all_gather(&vec![1; 200_000], soon()).unwrap();
        assert_eq!(blocks.len(), 5);
        if group.rank() == 2 {
            group.leave();
            group.leave();
            assert!(matches!(
                group.barrier(soon()),
                Err(NetError::Closed { .. })
            ));
            return;
        }
        let error = group.barrier(soon()).unwrap_err();
        assert!(
            matches!(error, NetError::PeerLeft { rank: 2, .. }),
            "{error}"
        );
        assert_eq!(group.liveness().peer(2), PeerState::Left);
        group.check_peer(3, "a test").unwrap();
        assert!(matches!(
            group.check_peer(2, "a test"),
            Err(NetError::PeerLeft { rank: 2, during, .. }) if during == "a test"
        ));
        assert!(matches!(
            group.check_peer(5, "a test"),
            Err(NetError::InvalidRank { rank: 5, .. })
        ));
        assert!(
            !group.liveness().stopped(),
            "{:?}",
            group.liveness().failure()
        );
        // Nobody leaves before all have seen that.
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(100) {
            assert!(!group.liveness().stopped());
        }
    });
}

#[test]
fn many_groups_come_and_go_without_failures() {
    let mut random = Random(42);
    for _ in 0..30 {
        let size = 1 + random.below(6) as u32;
        with_ranks(size, |group| {
            group.barrier(soon()).unwrap();
            group.all_gather(&vec![7; 100_000], soon()).unwrap();
            // Dropped at once, while others may still be in it.
        });
    }
}

#[test]
fn a_data_transport_can_use_the_same_proof() {
    let purpose = auth::FIRST_FREE_PURPOSE;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    with_ranks(2, |group| {
        if group.rank() == 0 {
            let (mut stream, _) = listener.accept().unwrap();
            let role = Role::Accept {
                purpose,
                own_rank: 0,
            };
            assert_eq!(
                auth::prove(&mut stream, group.key(), role, soon()).unwrap(),
                1
            );
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [42]);
        } else {
            let mut stream = TcpStream::connect(address).unwrap();
            let role = Role::Initiate {
                purpose,
                own_rank: 1,
                peer_rank: 0,
            };
            assert_eq!(
                auth::prove(&mut stream, group.key(), role, soon()).unwrap(),
                0
            );
            stream.write_all(&[42]).unwrap();
        }
        group.barrier(soon()).unwrap();
    });
    // Nobody answers: the deadline holds.
    let mut stream = TcpStream::connect(address).unwrap();
    let role = Role::Initiate {
        purpose,
        own_rank: 1,
        peer_rank: 0,
    };
    let key_of_a_group = with_ranks(1, |group| group.key().clone()).remove(0);
    let deadline = Instant::now() + Duration::from_millis(100);
    let error = auth::prove(&mut stream, &key_of_a_group, role, deadline).unwrap_err();
    assert!(matches!(error, NetError::Timeout { .. }), "{error}");
}
