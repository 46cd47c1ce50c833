//! Requests as tables of transfers.

use crossweft_device::exchange::{Direction, Lanes, NONE, State, Transfer};

use super::{INLINE, Request};

/// The transfers of a launch, in buffers that are used again.
#[derive(Debug)]
pub(super) struct Layout {
    ranks: u32,
    lanes: Lanes,
    /// The first transfer of each chain.
    pub(super) chains: Vec<Transfer>,
    /// All others.
    pub(super) followers: Vec<Transfer>,
    /// For each lane, direction and peer the last transfer of its chain.
    last: Vec<Last>,
}

#[derive(Clone, Copy, Debug)]
enum Last {
    None,
    First(usize),
    Follower(usize),
}

impl Layout {
    pub(super) fn new(ranks: u32, lanes: Lanes) -> Self {
        // Sends to, and receives from, every rank, and copies.
        let most = (2 * ranks + 1) * lanes.count;
        Self {
            ranks,
            lanes,
            chains: Vec::with_capacity(INLINE),
            followers: Vec::with_capacity(INLINE),
            last: vec![Last::None; most as usize],
        }
    }

    /// The most chains that there can be.
    pub(super) fn most_chains(&self) -> u32 {
        self.last.len() as u32
    }

    /// Lays requests out as transfers, spread over lanes and chained by lane, direction and peer: sends first, for peers
    /// wait for them.
    pub(super) fn lay_out(&mut self, requests: &[Request]) {
        self.chains.clear();
        self.followers.clear();
        for is_send in [true, false] {
            let of_turn = |r: &Request| (r.direction == Direction::Send) == is_send;
            for (op, request) in (0..).zip(requests).filter(|(_, request)| of_turn(request)) {
                for lane in 0..self.lanes.of(request.bytes) {
                    self.push(request, op, lane);
                }
            }
        }
        for request in requests {
            for lane in 0..self.lanes.of(request.bytes) {
                let chain = self.chain_of(request, lane);
                self.last[chain] = Last::None;
            }
        }
    }

    fn push(&mut self, request: &Request, op: u32, lane: u32) {
        let part = self.lanes.part(request.bytes, lane);
        let transfer = Transfer {
            address: request.address + part.begin,
            envelope: request.envelope(),
            bytes: part.len(),
            place: request.place + part.begin,
            done: 0,
            peer: request.peer,
            direction: request.direction,
            memory: request.memory,
            lane,
            next: NONE,
            op,
            state: State::New,
            reserved: 0,
        };
        let chain = self.chain_of(request, lane);
        let next = self.followers.len();
        match self.last[chain] {
            Last::None => {
                self.last[chain] = Last::First(self.chains.len());
                self.chains.push(transfer);
                return;
            }
            Last::First(before) => self.chains[before].next = next as u32,
            Last::Follower(before) => self.followers[before].next = next as u32,
        }
        self.followers.push(transfer);
        self.last[chain] = Last::Follower(next);
    }

    fn chain_of(&self, request: &Request, lane: u32) -> usize {
        let kind = match request.direction {
            Direction::Send => request.peer,
            Direction::Copy => 2 * self.ranks,
            _ => self.ranks + request.peer,
        };
        (lane * (2 * self.ranks + 1) + kind) as usize
    }
}
