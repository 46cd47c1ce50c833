//! A peer that stands still while a proxy needs it: the wait for the proxy names the peer, and goes
//! on if the peer does. The peer is a process that runs this same test program.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{deadline, launch, pool, register, says};
use crossweft_channel::{Endpoint, PortChannel, ProxyOptions, ProxyService, TransportChoice};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions, UniqueId};
use rustix::process::{Pid, Signal, kill_process};

const ID: &str = "CROSSWEFT_TEST_ID";
/// More than the buffers of a connection hold.
const BYTES: u64 = 64 << 20;

/// A rank with a channel to the other one, over TCP.
struct Rank {
    endpoint: Arc<Endpoint>,
    channel: PortChannel,
    _service: ProxyService,
}

impl Rank {
    fn join(id: &UniqueId, rank: u32) -> Self {
        let options = JoinOptions {
            silence_after: Duration::from_secs(1),
            ..JoinOptions::default()
        };
        let group = Group::join(id, rank, 2, &options).unwrap();
        let endpoint = Endpoint::new(Arc::new(group), deadline()).unwrap();
        let options = ProxyOptions {
            transport: TransportChoice::Tcp,
            ..ProxyOptions::default()
        };
        let service = ProxyService::new(&endpoint, &options, deadline()).unwrap();
        let memory = service.add_memory(&register(&endpoint, BYTES)).unwrap();
        let semaphores = pool(&endpoint, &[1 - rank]);
        let channel = service.channel(&semaphores, 0, memory, memory, deadline());
        endpoint.group().barrier(deadline()).unwrap();
        Self {
            endpoint,
            channel: channel.unwrap(),
            _service: service,
        }
    }
}

/// Not a test of its own: what the peer does.
#[test]
fn peer() {
    if let Ok(id) = std::env::var(ID) {
        let rank = Rank::join(&id.parse().unwrap(), 1);
        rank.endpoint.group().barrier(deadline()).unwrap();
    }
}

struct Peer(Child);

impl Peer {
    fn start(id: &UniqueId) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["peer", "--exact", "--test-threads=1"])
            .env(ID, id.to_string())
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_flush_to_a_stopped_peer_names_it_at_the_deadline() {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let peer = Peer::start(&rendezvous.unique_id());
    let rank = Rank::join(&rendezvous.unique_id(), 0);
    peer.signal(Signal::STOP);
    let handle = rank.channel.handle();
    let limit = Duration::from_secs(3);
    let result = launch(&rank.endpoint, limit, |block| {
        // SAFETY: the channel lives, and nobody else uses the memory.
        unsafe {
            handle.put(block, 0, 0, BYTES)?;
            handle.flush(block)
        }
    });
    says(
        result,
        &[
            "rank 0 waited for the proxy (fifo ",
            "the deadline of 3s passed; the proxy is busy with rank 1, which is silent for ",
            "ranks [1] not heard for 1s or longer",
        ],
    );
}

#[test]
fn a_flush_to_a_peer_that_was_stopped_for_a_while_succeeds() {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let peer = Peer::start(&rendezvous.unique_id());
    let rank = Rank::join(&rendezvous.unique_id(), 0);
    peer.signal(Signal::STOP);
    let handle = rank.channel.handle();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(2500));
            peer.signal(Signal::CONT);
        });
        let result = launch(&rank.endpoint, common::LONG, |block| {
            // SAFETY: the channel lives, and nobody else uses the memory.
            unsafe {
                handle.put(block, 0, 0, BYTES)?;
                handle.flush(block)
            }
        });
        result.unwrap();
    });
    rank.endpoint.group().barrier(deadline()).unwrap();
}
