//! The bodies of the fuzz targets: any bytes to whatever reads bytes that others send. `fuzz/` runs
//! them under a fuzzer, the tests below run them on what a hostile peer might try, and on noise.
//!
//! A body panics if its subject does, or breaks a promise that is checked here.
#![allow(missing_docs, reason = "for the fuzzer, not for users")]
#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target says no")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::auth::{self, Handshake, Key, Role, Step};
use crate::error::Operation;
use crate::frame::{BUILD, Decoder, Kind, VERSION, encode};
use crate::host::HostId;
use crate::liveness::Failure;
use crate::mesh::Mesh;
use crate::message::{Answer, Hello, Member, Message, from_slice, to_vec};
use crate::root::{Root, RootOutput};
use crate::unique_id::UniqueId;

/// Takes an input apart; zeros once it is used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn below(&mut self, limit: u32) -> u32 {
        u32::from(self.byte()) % limit
    }

    fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let part = self.bytes(8);
        bytes[..part.len()].copy_from_slice(part);
        u64::from_le_bytes(bytes)
    }

    fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (part, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        part
    }

    /// As many bytes as a byte says.
    fn some_bytes(&mut self) -> &'a [u8] {
        let length = self.byte();
        self.bytes(length.into())
    }
}

/// Bytes of a connection, in pieces, as whole messages of every kind.
pub fn frames(bytes: &[u8]) {
    const LIMIT: usize = 40_000;
    let mut input = Input(bytes);
    let mut decoder = Decoder::new(LIMIT);
    while !input.is_empty() {
        decoder.feed(input.some_bytes());
        loop {
            match decoder.next_message() {
                Ok(None) => break,
                Ok(Some((kind, body))) => {
                    assert!(body.len() <= LIMIT);
                    message(kind, &body);
                }
                Err(_) => return,
            }
        }
    }
    // The body of any message alone.
    let (&kind, body) = bytes.split_first().unwrap_or((&0, &[]));
    if let Some(kind) = Kind::from_byte(kind) {
        message(kind, body);
    }
}

/// What can be read is written and read again, and comes back the same.
fn message(kind: Kind, body: &[u8]) {
    if let Ok(message) = Message::decode(kind, body) {
        let (kind, body) = message.encode();
        assert_eq!(Message::decode(kind, &body), Ok(message));
    }
    if let Ok(answer) = Answer::decode(kind, body) {
        let (kind, body) = answer.encode();
        assert_eq!(Answer::decode(kind, &body), Ok(answer));
    }
    if let Ok(hello) = from_slice::<Hello>(body) {
        assert_eq!(from_slice(&to_vec(&hello)), Ok(hello));
    }
}

/// A unique id, as bytes and as text.
pub fn unique_id(bytes: &[u8]) {
    let mut array = [0; 128];
    let length = bytes.len().min(128);
    array[..length].copy_from_slice(&bytes[..length]);
    if let Ok(id) = UniqueId::from_bytes(&array) {
        // One id, one spelling.
        assert_eq!(id.to_bytes(), array);
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(id) = text.parse::<UniqueId>()
    {
        assert_eq!(id.to_string(), text.trim().to_lowercase());
    }
}

/// Either end of the proof of the secret against bytes from somebody who does not know it.
pub fn handshake(bytes: &[u8]) {
    let mut input = Input(bytes);
    let key = Key::new([7; 16]);
    let accept = Role::Accept {
        purpose: auth::MESH,
        own_rank: 1,
    };
    let initiate = Role::Initiate {
        purpose: auth::MESH,
        own_rank: 2,
        peer_rank: 1,
    };
    let role = if input.byte() % 2 == 0 {
        accept
    } else {
        initiate
    };
    let mut subject = Handshake::new(&key, role).unwrap();
    // Somebody who repeats what was said to another connection, with changes.
    let mut other = Handshake::new(&key, if role == accept { initiate } else { accept }).unwrap();
    while !input.is_empty() {
        let mut said = subject.take_output();
        let part = match input.byte() % 4 {
            0 => {
                let wanted = other.wanted().min(said.len());
                if let Some(byte) = said.first_mut() {
                    *byte ^= 1;
                }
                other.receive(&said[..wanted]);
                let mut reply = other.take_output();
                let at = input.byte() as usize;
                if let Some(byte) = reply.get_mut(at) {
                    *byte ^= input.byte() | 1;
                }
                reply
            }
            _ => input.some_bytes().to_vec(),
        };
        let wanted = subject.wanted().min(part.len());
        match subject.receive(&part[..wanted]) {
            Step::Pending => {}
            Step::Failed(_) => return,
            Step::Proven(rank) => panic!("rank {rank} proved a secret that it does not know"),
        }
    }
}

/// A rendezvous with members and strangers that say anything at any time.
pub fn rendezvous(bytes: &[u8]) {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let mut input = Input(bytes);
    let key = Key::new([9; 16]);
    let mut now = Instant::now();
    let mut root = Root::new(key.clone(), TIMEOUT, now);
    let mut clients: BTreeMap<u64, Handshake> = BTreeMap::new();
    let mut finished = 0;
    let mut turn = |root: &mut Root, clients: &mut BTreeMap<u64, Handshake>, now: Instant| {
        while let Some(output) = root.pop_output() {
            match output {
                RootOutput::Send { client, bytes } => {
                    if let Some(handshake) = clients.get_mut(&client) {
                        let wanted = handshake.wanted().min(bytes.len());
                        if wanted > 0 {
                            handshake.receive(&bytes[..wanted]);
                            root.received(client, &handshake.take_output(), now);
                        }
                    }
                }
                RootOutput::Close(client) | RootOutput::Drop(client) => {
                    clients.remove(&client);
                }
                RootOutput::Finished(_) => finished += 1,
            }
        }
        finished
    };
    while !input.is_empty() {
        let client = u64::from(input.below(6));
        match input.below(8) {
            0 => {
                clients.remove(&client);
                root.lost(client, now);
                root.connected(client, SocketAddr::from(([127, 0, 0, 1], 1)), now)
                    .unwrap();
            }
            // A member, of any rank.
            1 | 2 => {
                let role = Role::Initiate {
                    purpose: auth::RENDEZVOUS,
                    own_rank: input.below(4),
                    peer_rank: auth::ROOT,
                };
                let mut handshake = Handshake::new(&key, role).unwrap();
                let open = handshake.take_output();
                clients.insert(client, handshake);
                root.lost(client, now);
                root.connected(client, SocketAddr::from(([127, 0, 0, 1], 1)), now)
                    .unwrap();
                root.received(client, &open, now);
            }
            3 | 4 => {
                let member = Member {
                    listen: SocketAddr::from(([127, 0, 0, 1], 2)),
                    host: HostId::invented(input.byte()),
                    pid: 1,
                    fd_socket: [0; 8],
                };
                let hello = Hello {
                    version: VERSION,
                    build: BUILD.to_owned(),
                    rank: input.below(4),
                    world_size: input.below(5),
                    member,
                };
                let hello: Vec<u8> = encode(Kind::Hello, &to_vec(&hello)).flatten().collect();
                root.received(client, &hello, now);
            }
            5 => {
                let kind = Kind::from_byte(input.byte() % 20).unwrap_or(Kind::Ready);
                let frame: Vec<u8> = encode(kind, input.some_bytes()).flatten().collect();
                root.received(client, &frame, now);
            }
            6 => root.received(client, input.some_bytes(), now),
            _ => {
                now += Duration::from_millis(u64::from(input.byte()) * 20);
                root.tick(now);
                assert!(root.next_tick() > now || turn(&mut root, &mut clients, now) > 0);
            }
        }
        turn(&mut root, &mut clients, now);
    }
    root.tick(now + TIMEOUT);
    assert_eq!(
        turn(&mut root, &mut clients, now),
        1,
        "one verdict, in time"
    );
}

/// A rank's part of the protocol, with neighbours that say anything.
pub fn mesh(bytes: &[u8]) {
    let mut input = Input(bytes);
    let size = 1 + input.below(9);
    let rank = input.below(size);
    let mut now = Instant::now();
    let (heartbeat, silence) = (Duration::from_secs(1), Duration::from_secs(30));
    let mut mesh = Mesh::new(rank, size, heartbeat, silence, now);
    let mut started = Vec::new();
    while !input.is_empty() {
        let peer = input.below(size + 1);
        match input.below(10) {
            0..=2 => {
                let kind = if input.byte() % 2 == 0 {
                    Kind::Control
                } else {
                    Kind::Round
                };
                if let Ok(message) = Message::decode(kind, input.some_bytes()) {
                    let _ = mesh.receive(peer, message, now);
                }
            }
            3 => {
                let operation = match input.byte() % 2 {
                    0 => Operation::AllGather,
                    _ => Operation::Barrier,
                };
                if let Ok(sequence) = mesh.start(operation, Arc::from(input.some_bytes()), now) {
                    started.push(sequence);
                }
            }
            4 => {
                if let Some(sequence) = started.pop() {
                    match mesh.take(sequence) {
                        Some(Ok(blocks)) => assert_eq!(blocks.len(), size as usize),
                        Some(Err(_)) => {}
                        None => drop(mesh.abandon(sequence)),
                    }
                }
            }
            5 => mesh.lost(peer, "it broke"),
            6 => mesh.give_up("late"),
            7 => mesh.fail(Failure::Aborted {
                by: rank,
                reason: String::from_utf8_lossy(input.some_bytes()).into_owned(),
            }),
            8 if input.byte() % 4 == 0 => mesh.leave(),
            _ => {
                now += Duration::from_millis(input.number() % 40_000);
                mesh.tick(now);
            }
        }
        let mut outputs = 0;
        while mesh.pop_output().is_some() {
            outputs += 1;
        }
        // What one event causes is bounded by neighbours and operations.
        assert!(outputs < 2000, "{outputs} outputs");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Control;

    /// Runs `target` on `hostile` inputs, on mixtures of them, and on noise.
    fn smoke(target: fn(&[u8]), hostile: &[Vec<u8>]) {
        hostile.iter().for_each(|input| target(input));
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        for round in 0..10_000 {
            let mut input = match hostile.len() {
                0 => Vec::new(),
                count => hostile[random(count)].clone(),
            };
            if round % 3 == 0 || input.is_empty() {
                input = (0..random(400)).map(|_| random(256) as u8).collect();
            }
            for _ in 0..random(6) {
                match (random(4), input.len()) {
                    (_, 0) => input.push(random(256) as u8),
                    (0, length) => input[random(length)] = random(256) as u8,
                    (1, length) => input[random(length)] ^= 1 << random(8),
                    (2, length) => input.truncate(random(length)),
                    (_, length) => {
                        let at = random(length);
                        input.insert(at, [0, 1, 0x7f, 0x80, 0xff][random(5)]);
                    }
                }
            }
            target(&input);
        }
    }

    fn in_pieces(bytes: &[u8]) -> Vec<u8> {
        let with_length = |part: &[u8]| [&[part.len() as u8], part].concat();
        bytes.chunks(200).flat_map(with_length).collect()
    }

    fn controls() -> Vec<Control> {
        let pair = (u32::MAX, Operation::AllGather);
        let reason = "é".repeat(90);
        vec![
            Control::Heartbeat,
            Control::Progress {
                sequence: u64::MAX,
                seen: vec![0xff; 40],
            },
            Control::Progress {
                sequence: 0,
                seen: vec![0xff; 1],
            },
            Control::Mismatch {
                sequence: 3,
                first: pair,
                second: (0, Operation::Barrier),
            },
            Control::Died {
                rank: u32::MAX,
                reason: reason.clone(),
            },
            Control::Died {
                rank: 0,
                reason: reason.clone(),
            },
            Control::Aborted { by: 1, reason },
            Control::Left {
                rank: 1,
                completed: u64::MAX,
                why: Some(String::new()),
            },
            Control::Silence {
                rank: 1,
                turn: u32::MAX,
            },
            Control::Silence { rank: 0, turn: 1 },
        ]
    }

    #[test]
    fn any_frames_are_an_error_at_worst() {
        let mut hostile = Vec::new();
        for control in controls() {
            let (kind, body) = Message::Control(control).encode();
            let wire: Vec<u8> = encode(kind, &body).flatten().collect();
            hostile.push(in_pieces(&wire));
            hostile.push([&[kind as u8], &body[..]].concat());
        }
        let long: Vec<u8> = encode(Kind::Round, &[0x80; 33_000]).flatten().collect();
        hostile.push(in_pieces(&long));
        // A round of as many empty blocks as fit, and one with a length that overflows.
        hostile.push(
            [
                &[Kind::Round as u8, 0, 0, 0, 0xff, 0xff, 0x7f][..],
                &[0; 300],
            ]
            .concat(),
        );
        hostile.push(vec![
            Kind::Round as u8,
            0,
            0,
            0,
            1,
            0xff,
            0xff,
            0xff,
            0xff,
            0x0f,
        ]);
        for (version, kind, more, length) in [
            (VERSION, 17, 1, 0),
            (VERSION, 17, 2, 0),
            (VERSION, 0, 0, 0),
            (VERSION, 17, 0, u32::MAX),
            (VERSION, 8, 1, 0),
            (999, 1, 0, 0),
        ] {
            let mut frame = b"CWFT".to_vec();
            frame.extend(version.to_le_bytes());
            frame.extend([kind, more]);
            frame.extend(length.to_le_bytes());
            hostile.push(in_pieces(&frame.repeat(20)));
        }
        smoke(frames, &hostile);
    }

    #[test]
    fn any_unique_id_is_an_error_at_worst() {
        let id = UniqueId::generate("[::1]:9".parse().unwrap()).unwrap();
        let text = id.to_string();
        let hostile = [
            id.to_bytes().to_vec(),
            text.clone().into_bytes(),
            text.to_uppercase().into_bytes(),
            format!("\n {text}\t").into_bytes(),
            "é".repeat(128).into_bytes(),
            "0".repeat(256).into_bytes(),
            b"CROSSWFT".to_vec(),
        ];
        smoke(unique_id, &hostile);
    }

    #[test]
    fn nobody_proves_a_secret_that_he_does_not_know() {
        let hostile = [
            vec![0, 0, 200, 0, 0, 200, 0, 0, 200, 0],
            vec![1, 0, 40, 1, 0, 40, 1],
            [&[0, 1, 32][..], b"CWA1", &[0; 28]].concat(),
            [&[1, 1, 48][..], &[0; 48]].concat(),
        ];
        smoke(handshake, &hostile);
    }

    #[test]
    fn a_rendezvous_always_comes_to_one_verdict() {
        let hostile = [
            vec![0, 1, 0, 0, 3, 0, 0, 1, 1, 1, 1, 1, 3, 0, 1, 2],
            vec![0, 1, 0, 0, 4, 1, 0, 2, 0, 5, 6, 0, 0, 7, 255, 0, 7, 255],
            vec![1, 1, 3, 1, 4, 9, 3, 4, 0, 0, 1, 0, 7, 255],
            vec![0, 1, 0, 0, 5, 9, 4, b'b', b'y', b'e', b'!'],
        ];
        smoke(rendezvous, &hostile);
    }

    #[test]
    fn any_neighbours_are_an_error_at_worst() {
        let mut hostile = Vec::new();
        for size in [1, 2, 3, 8] {
            let mut input = vec![size, 0, 0, 3, 0, 3, 1, 2, 3];
            for control in controls() {
                let (_, body) = Message::Control(control).encode();
                input.extend([1, 0, 0, body.len() as u8]);
                input.extend(body);
                hostile.push(input.clone());
            }
        }
        smoke(mesh, &hostile);
    }
}
