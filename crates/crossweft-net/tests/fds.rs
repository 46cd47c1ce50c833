//! File descriptors from rank to rank.
#![allow(clippy::unwrap_used, reason = "a test says best where it failed")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use common::{soon, with_ranks};
use crossweft_net::NetError;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd};

fn memory(text: &str) -> OwnedFd {
    let mut file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn content(fd: OwnedFd) -> String {
    assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
    // At a position of its own: all duplicates share one offset.
    let mut bytes = [0; 100];
    let length = File::from(fd).read_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes[..length].to_vec()).unwrap()
}

#[test]
fn everybody_fetches_from_everybody_in_any_order() {
    const SIZE: u32 = 5;
    with_ranks(SIZE, |group| {
        let rank = group.rank();
        for key in 0..3 {
            if rank % 2 == 0 {
                // Some offer late: requests wait.
                std::thread::sleep(Duration::from_millis(20));
            }
            group
                .offer_fd(key, memory(&format!("{rank}/{key}")).as_fd())
                .unwrap();
            // In a ring, which would deadlock if a rank served only when it is not asking.
            for step in 0..SIZE {
                let peer = (rank + step) % SIZE;
                let fd = group.fetch_fd(peer, key, soon()).unwrap();
                assert_eq!(content(fd), format!("{peer}/{key}"));
            }
        }
        group.barrier(soon()).unwrap();
    });
}

#[test]
fn keys_are_offered_once_and_can_be_used_again() {
    with_ranks(2, |group| {
        let peer = 1 - group.rank();
        group.offer_fd(1, memory("a").as_fd()).unwrap();
        let error = group.offer_fd(1, memory("b").as_fd()).unwrap_err();
        assert!(matches!(error, NetError::FdKeyInUse { key: 1 }));
        assert_eq!(content(group.fetch_fd(peer, 1, soon()).unwrap()), "a");
        group.barrier(soon()).unwrap();
        group.withdraw_fd(1);
        group.withdraw_fd(1);
        group.barrier(soon()).unwrap();
        let deadline = Instant::now() + Duration::from_millis(100);
        match group.fetch_fd(peer, 1, deadline).unwrap_err() {
            NetError::Timeout { missing, what, .. } => {
                assert_eq!(missing, [peer]);
                assert!(what.contains("file descriptor 1"), "{what}");
            }
            error => panic!("{error}"),
        }
        group.barrier(soon()).unwrap();
        group.offer_fd(1, memory("c").as_fd()).unwrap();
        assert_eq!(content(group.fetch_fd(peer, 1, soon()).unwrap()), "c");
        assert!(matches!(
            group.fetch_fd(2, 1, soon()),
            Err(NetError::InvalidRank { .. })
        ));
        group.barrier(soon()).unwrap();
    });
}

#[test]
fn thousands_of_keys() {
    with_ranks(2, |group| {
        let fd = memory("x");
        for key in 0..2000 {
            group.offer_fd(key, fd.as_fd()).unwrap();
            group.withdraw_fd(key);
        }
        group.offer_fd(u64::MAX, fd.as_fd()).unwrap();
        let peer = 1 - group.rank();
        assert_eq!(
            content(group.fetch_fd(peer, u64::MAX, soon()).unwrap()),
            "x"
        );
        group.barrier(soon()).unwrap();
    });
}

#[test]
fn a_rank_that_leaves_ends_the_wait_for_its_descriptors() {
    with_ranks(3, |group| {
        group.barrier(soon()).unwrap();
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
            group.leave();
            assert!(group.offer_fd(0, memory("x").as_fd()).is_err());
            return;
        }
        let error = group.fetch_fd(1, 9, soon()).unwrap_err();
        assert!(
            matches!(error, NetError::PeerLeft { rank: 1, .. }),
            "{error}"
        );
    });
}

#[test]
fn without_the_secret_there_is_no_descriptor() {
    with_ranks(1, |group| {
        group.offer_fd(0, memory("secret").as_fd()).unwrap();
        let tag: String = group
            .tag()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        let name = sockets
            .lines()
            .filter_map(|line| line.split_once('@').map(|(_, name)| name))
            .find(|name| name.contains(&tag))
            .expect("the fd socket is listed");
        let address = SocketAddr::from_abstract_name(name).unwrap();
        for noise in [
            &[0u8; 8][..],
            &[0x43; 200],
            b"CWA1xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        ] {
            let mut stream = UnixStream::connect_addr(&address).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_secs(5)))
                .unwrap();
            let _ = stream.write_all(noise);
            let read = stream.read(&mut [0; 100]);
            assert!(matches!(read, Ok(0)) || read.is_err(), "{read:?}");
        }
        // One that proves nothing at all is dropped after a while, and meanwhile others are served.
        let mut slow = UnixStream::connect_addr(&address).unwrap();
        slow.write_all(b"C").unwrap();
        assert_eq!(content(group.fetch_fd(0, 0, soon()).unwrap()), "secret");
        slow.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert!(matches!(slow.read(&mut [0; 100]), Ok(0)));
    });
}
