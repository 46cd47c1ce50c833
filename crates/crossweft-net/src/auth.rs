//! The mutual proof that both ends of a connection know the job's secret.
//!
//! Three messages of fixed size; nothing else is read from a connection before they check out, and
//! the handshake never asks for a byte beyond them, so the stream can be handed on afterwards.
//!
//! | message   | from      | bytes                                                               |
//! |-----------|-----------|---------------------------------------------------------------------|
//! | open      | initiator | `CWA1`, purpose u32, its rank u32, expected rank u32, nonce 16 = 32 |
//! | challenge | responder | nonce 16, HMAC(responder, open, nonce) 32 = 48                      |
//! | answer    | initiator | HMAC(initiator, open, nonce) 32                                     |
//!
//! Integers are little-endian. The HMAC (SHA-256, keyed with the secret) starts with a label that
//! differs between the two directions, so no message can be reflected, and covers purpose and ranks,
//! so none can be replayed elsewhere. The responder proves first: a joiner with a wrong secret learns
//! so by itself.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Instant;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::NetError;
use crate::poll;

/// Stands for the rendezvous in place of a rank.
pub const ROOT: u32 = u32::MAX;

const MAGIC: &[u8; 4] = b"CWA1";
const OPEN: usize = 32;
const CHALLENGE: usize = 48;
const ANSWER: usize = 32;
const RESPONDER: &[u8] = b"crossweft responder v1";
const INITIATOR: &[u8] = b"crossweft initiator v1";

/// Proves the secret on a connected stream and checks the other end's proof; returns its rank.
///
/// For a data transport that opens its own connections: one end calls with [`Role::Initiate`], the
/// other with [`Role::Accept`], both with the key of [`Group::key`](crate::Group::key). After an error
/// the stream is of no use; drop it.
pub fn prove(
    stream: &mut TcpStream,
    key: &Key,
    role: Role,
    deadline: Instant,
) -> Result<u32, NetError> {
    let address = match stream.peer_addr() {
        Ok(address) => address.to_string(),
        Err(error) => return Err(NetError::io("asking for the address of a peer", error)),
    };
    drive(stream, key, role, deadline, &address)
}

/// [`prove`] for any kind of stream.
pub(crate) fn drive<S: Read + Write + AsFd>(
    stream: &mut S,
    key: &Key,
    role: Role,
    deadline: Instant,
    address: &str,
) -> Result<u32, NetError> {
    let mut handshake = Handshake::new(key, role)?;
    loop {
        match handshake.step(stream) {
            Step::Proven(rank) => return Ok(rank),
            Step::Pending => {}
            Step::Failed(error) => return Err(error.at(address)),
        }
        if !poll::readable(stream.as_fd(), deadline)? {
            let what = format!("the proof of the secret by {address}");
            return Err(NetError::timeout(what, Vec::new()));
        }
    }
}

/// Which end of a connection this is, and what the connection is for.
///
/// `purpose` keeps proofs of different protocols apart. This crate uses 1 to 15; take a number from
/// [`FIRST_FREE_PURPOSE`] on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The end that was connected to: it knows who it is, and learns who came.
    Accept {
        /// What the connection is for.
        purpose: u32,
        /// The rank that accepts.
        own_rank: u32,
    },
    /// The end that connected.
    Initiate {
        /// What the connection is for.
        purpose: u32,
        /// The rank that connects.
        own_rank: u32,
        /// The rank it wants to reach.
        peer_rank: u32,
    },
}

/// The first purpose that this crate does not use itself.
pub const FIRST_FREE_PURPOSE: u32 = 16;
pub(crate) const RENDEZVOUS: u32 = 1;
pub(crate) const MESH: u32 = 2;
pub(crate) const FDS: u32 = 3;

/// The secret of a job. `Debug` does not show it.
#[derive(Clone)]
pub struct Key([u8; 16]);

impl Key {
    pub(crate) fn new(secret: [u8; 16]) -> Self {
        Self(secret)
    }

    pub(crate) fn random() -> Result<Self, NetError> {
        Ok(Self(random()?))
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    pub(crate) fn mac(&self, label: &[u8], parts: &[&[u8]]) -> [u8; 32] {
        self.hmac(label, parts).finalize().into_bytes().into()
    }

    /// In constant time.
    fn verify(&self, label: &[u8], parts: &[&[u8]], mac: &[u8]) -> bool {
        self.hmac(label, parts).verify_slice(mac).is_ok()
    }

    fn hmac(&self, label: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC pads a key to the block of the hash; doing so here spares the fallible constructor.
        let mut block = [0; 64];
        block[..16].copy_from_slice(&self.0);
        let mut hmac = Hmac::<Sha256>::new(&block.into());
        hmac.update(label);
        parts.iter().for_each(|part| hmac.update(part));
        hmac
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.0
            .iter()
            .zip(&other.0)
            .fold(0, |different, (a, b)| different | (a ^ b))
            == 0
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(secret)")
    }
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N], NetError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        NetError::io("asking the system for random bytes", io::Error::from(error))
    })?;
    Ok(bytes)
}

/// One end of the proof as a state machine: bytes in, bytes out.
pub(crate) struct Handshake {
    key: Key,
    state: State,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

enum State {
    AwaitChallenge {
        open: [u8; OPEN],
        peer_rank: u32,
    },
    AwaitOpen {
        purpose: u32,
        own_rank: u32,
        nonce: [u8; 16],
    },
    AwaitAnswer {
        open: [u8; OPEN],
        nonce: [u8; 16],
        peer_rank: u32,
    },
    Proven {
        peer_rank: u32,
    },
}

/// How far a handshake got.
pub(crate) enum Step {
    /// The other end has to send more.
    Pending,
    /// The other end is a member of the job, and says it is this rank.
    Proven(u32),
    /// Drop the connection.
    Failed(AuthError),
}

/// Why an end of a connection is not to be talked to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthError {
    #[error("the connection was lost: {0}")]
    Lost(io::Error),
    #[error("it did not start with a proof of membership")]
    NotCrossweft,
    #[error("it wanted to reach another rank or service")]
    WrongPlace,
    #[error("it does not know the secret of this job")]
    WrongSecret,
}

impl AuthError {
    /// The same, of the end at `address`.
    pub(crate) fn at(self, address: &str) -> NetError {
        let address = address.to_owned();
        match self {
            Self::Lost(source) => NetError::io(format!("proving the secret to {address}"), source),
            Self::WrongSecret => NetError::WrongSecret { address },
            Self::NotCrossweft | Self::WrongPlace => NetError::Protocol {
                reason: self.to_string(),
                address,
            },
        }
    }
}

impl Handshake {
    pub(crate) fn new(key: &Key, role: Role) -> Result<Self, NetError> {
        let nonce = random()?;
        Ok(match role {
            Role::Accept { purpose, own_rank } => Self {
                key: key.clone(),
                state: State::AwaitOpen {
                    purpose,
                    own_rank,
                    nonce,
                },
                inbox: Vec::new(),
                outbox: Vec::new(),
            },
            Role::Initiate {
                purpose,
                own_rank,
                peer_rank,
            } => {
                let mut open = [0; OPEN];
                open[..4].copy_from_slice(MAGIC);
                open[4..8].copy_from_slice(&purpose.to_le_bytes());
                open[8..12].copy_from_slice(&own_rank.to_le_bytes());
                open[12..16].copy_from_slice(&peer_rank.to_le_bytes());
                open[16..].copy_from_slice(&nonce);
                Self {
                    key: key.clone(),
                    state: State::AwaitChallenge { open, peer_rank },
                    inbox: Vec::new(),
                    outbox: open.to_vec(),
                }
            }
        })
    }

    /// How many bytes the next step needs; never more than the current message still lacks.
    pub(crate) fn wanted(&self) -> usize {
        let message = match self.state {
            State::AwaitChallenge { .. } => CHALLENGE,
            State::AwaitOpen { .. } => OPEN,
            State::AwaitAnswer { .. } => ANSWER,
            State::Proven { .. } => 0,
        };
        message.saturating_sub(self.inbox.len())
    }

    /// Whether the other end has sent anything.
    pub(crate) fn has_begun(&self) -> bool {
        !self.inbox.is_empty() || !matches!(self.state, State::AwaitOpen { .. })
    }

    /// What to send now.
    pub(crate) fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outbox)
    }

    /// Takes at most [`wanted`](Self::wanted) bytes.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Step {
        self.inbox.extend_from_slice(bytes);
        if self.wanted() > 0 {
            // Tell strangers apart at their first bytes instead of waiting for the rest.
            let magic = self.inbox.len().min(MAGIC.len());
            if matches!(self.state, State::AwaitOpen { .. })
                && self.inbox[..magic] != MAGIC[..magic]
            {
                return Step::Failed(AuthError::NotCrossweft);
            }
            return Step::Pending;
        }
        let inbox = std::mem::take(&mut self.inbox);
        match &self.state {
            State::AwaitOpen {
                purpose,
                own_rank,
                nonce,
            } => {
                if &inbox[..4] != MAGIC {
                    return Step::Failed(AuthError::NotCrossweft);
                }
                if inbox[4..8] != purpose.to_le_bytes() || inbox[12..16] != own_rank.to_le_bytes() {
                    return Step::Failed(AuthError::WrongPlace);
                }
                let peer_rank = u32::from_le_bytes([inbox[8], inbox[9], inbox[10], inbox[11]]);
                let mut open = [0; OPEN];
                open.copy_from_slice(&inbox);
                let nonce = *nonce;
                self.outbox.extend_from_slice(&nonce);
                self.outbox
                    .extend_from_slice(&self.key.mac(RESPONDER, &[&open, &nonce]));
                self.state = State::AwaitAnswer {
                    open,
                    nonce,
                    peer_rank,
                };
                Step::Pending
            }
            State::AwaitChallenge { open, peer_rank } => {
                let (nonce, mac) = inbox.split_at(16);
                if !self.key.verify(RESPONDER, &[open, nonce], mac) {
                    return Step::Failed(AuthError::WrongSecret);
                }
                self.outbox
                    .extend_from_slice(&self.key.mac(INITIATOR, &[open, nonce]));
                let peer_rank = *peer_rank;
                self.state = State::Proven { peer_rank };
                Step::Proven(peer_rank)
            }
            State::AwaitAnswer {
                open,
                nonce,
                peer_rank,
            } => {
                if !self.key.verify(INITIATOR, &[open, nonce], &inbox) {
                    return Step::Failed(AuthError::WrongSecret);
                }
                let peer_rank = *peer_rank;
                self.state = State::Proven { peer_rank };
                Step::Proven(peer_rank)
            }
            State::Proven { peer_rank } => Step::Proven(*peer_rank),
        }
    }

    /// Sends and reads what can be sent and read; the stream may block or not, as long as there is
    /// something to read or this is the first call.
    pub(crate) fn step<S: Read + Write + AsFd>(&mut self, stream: &mut S) -> Step {
        let mut buffer = [0; CHALLENGE];
        loop {
            let output = self.take_output();
            // A few dozen bytes always fit into a new connection's buffer: no partial writes.
            if !output.is_empty()
                && let Err(error) = stream.write_all(&output)
            {
                return Step::Failed(AuthError::Lost(error));
            }
            if let State::Proven { peer_rank } = self.state {
                return Step::Proven(peer_rank);
            }
            match poll::readable_now(stream.as_fd()) {
                Ok(true) => {}
                Ok(false) => return Step::Pending,
                Err(error) => return Step::Failed(AuthError::Lost(error)),
            }
            let wanted = self.wanted().min(buffer.len());
            match stream.read(&mut buffer[..wanted]) {
                Ok(0) => return Step::Failed(AuthError::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => {
                    if let Step::Failed(error) = self.receive(&buffer[..length]) {
                        return Step::Failed(error);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Step::Pending,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Step::Failed(AuthError::Lost(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ACCEPT: Role = Role::Accept {
        purpose: MESH,
        own_rank: 1,
    };
    const INITIATE: Role = Role::Initiate {
        purpose: MESH,
        own_rank: 4,
        peer_rank: 1,
    };

    /// Runs both ends, byte by byte, and returns what each concluded.
    fn run(
        key_i: [u8; 16],
        key_r: [u8; 16],
        initiate: Role,
        accept: Role,
        mut tamper: impl FnMut(usize, &mut u8),
    ) -> (Result<u32, String>, Result<u32, String>) {
        let mut ends = [
            Handshake::new(&Key::new(key_i), initiate).unwrap(),
            Handshake::new(&Key::new(key_r), accept).unwrap(),
        ];
        let mut results = [Err("pending".to_owned()), Err("pending".to_owned())];
        let mut count = 0;
        for turn in 0..4 {
            let (from, to) = (turn % 2, 1 - turn % 2);
            for mut byte in ends[from].take_output() {
                tamper(count, &mut byte);
                count += 1;
                if ends[to].wanted() == 0 || matches!(&results[to], Err(e) if e != "pending") {
                    break;
                }
                match ends[to].receive(&[byte]) {
                    Step::Pending => {}
                    Step::Proven(rank) => results[to] = Ok(rank),
                    Step::Failed(error) => results[to] = Err(error.to_string()),
                }
            }
        }
        let [initiator, responder] = results;
        (initiator, responder)
    }

    #[test]
    fn both_ends_prove_and_learn_ranks() {
        assert_eq!(
            run([7; 16], [7; 16], INITIATE, ACCEPT, |_, _| {}),
            (Ok(1), Ok(4))
        );
    }

    #[test]
    fn a_wrong_secret_or_place_is_noticed() {
        let (initiator, responder) = run([7; 16], [8; 16], INITIATE, ACCEPT, |_, _| {});
        assert!(initiator.unwrap_err().contains("secret"));
        assert_eq!(responder.unwrap_err(), "pending");
        for accept in [
            Role::Accept {
                purpose: FDS,
                own_rank: 1,
            },
            Role::Accept {
                purpose: MESH,
                own_rank: 2,
            },
        ] {
            let (_, responder) = run([7; 16], [7; 16], INITIATE, accept, |_, _| {});
            assert!(responder.unwrap_err().contains("another rank or service"));
        }
    }

    #[test]
    fn a_reflected_challenge_does_not_pass() {
        // Somebody without the secret answers our challenge with a challenge of ours.
        let key = Key::new([1; 16]);
        let mut victim = Handshake::new(&key, ACCEPT).unwrap();
        let mut open = Handshake::new(&Key::new([2; 16]), INITIATE)
            .unwrap()
            .take_output();
        victim.receive(&open);
        let challenge = victim.take_output();
        open[16..].copy_from_slice(&challenge[..16]);
        let mut oracle = Handshake::new(&key, ACCEPT).unwrap();
        oracle.receive(&open);
        let step = victim.receive(&oracle.take_output()[16..]);
        assert!(matches!(step, Step::Failed(AuthError::WrongSecret)));
    }

    proptest! {
        #[test]
        fn any_changed_byte_fails(index in 0usize..(OPEN + CHALLENGE + ANSWER), change in 1u8..) {
            let (initiator, responder) = run([7; 16], [7; 16], INITIATE, ACCEPT, |count, byte| {
                if count == index {
                    *byte ^= change;
                }
            });
            prop_assert!(initiator.is_err() || responder.is_err());
            prop_assert!(responder.is_err(), "the responder must never be fooled");
        }

        #[test]
        fn noise_never_passes(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut handshake = Handshake::new(&Key::new([3; 16]), ACCEPT).unwrap();
            let mut rest = &noise[..];
            while !rest.is_empty() && handshake.wanted() > 0 {
                let (now, later) = rest.split_at(handshake.wanted().min(rest.len()));
                rest = later;
                match handshake.receive(now) {
                    Step::Pending => {}
                    Step::Proven(_) => prop_assert!(false),
                    Step::Failed(_) => break,
                }
            }
        }
    }
}
