//! Requests as tables of transfers.

use crossweft_device::exchange::{Direction, Lanes, Transfer};
use crossweft_kernels::{MAX_MESSAGES, Message};

use super::{INLINE, Purpose, Request};

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

    /// Lays requests out as messages whose transfers each have a thread block, if there are as many `blocks`. Returns
    /// whether there are, and whether each transfer has a stream for itself.
    pub(super) fn single(
        &self,
        requests: &[Request],
        blocks: u32,
        messages: &mut Vec<Message>,
    ) -> bool {
        messages.clear();
        // What is copied here needs no lanes, and makes do with what the messages leave.
        let is_copy = |request: &&Request| request.direction == Direction::Copy;
        let copies = requests.iter().filter(is_copy).count() as u32;
        let all = requests.iter().filter(|request| !is_copy(request));
        let taken: u32 = all.map(|request| self.lanes.of(request.bytes)).sum();
        let left = blocks.saturating_sub(taken) / copies.max(1);
        let mut first = 0;
        for (op, request) in (0..).zip(requests) {
            let mut lanes = self.lanes.of(request.bytes);
            if is_copy(&request) {
                lanes = lanes.min(left).max(1);
            }
            let is_alone = |other: &Message| {
                (other.direction, other.peer) != (request.direction, request.peer)
            };
            // Reductions take whole slots, not lines, whoever sends.
            if matches!(request.kind.purpose, Purpose::ReduceScatter(_))
                || messages.len() == MAX_MESSAGES
                || first + lanes > blocks
                || !messages.iter().all(is_alone)
            {
                return false;
            }
            messages.push(request.message((first, lanes), op));
            first += lanes;
        }
        true
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
        let lanes = self.lanes.of(request.bytes);
        let transfer = request.message((0, lanes), op).transfer(lane);
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

#[cfg(test)]
mod tests {
    use crossweft_device::exchange::{NO_MEMORY, NONE};
    use crossweft_device::{DataType, ReduceOp};

    use super::super::{Kind, Purpose};
    use super::*;

    fn request(direction: Direction, peer: u32, bytes: u64) -> Request {
        let (dtype, purpose) = (DataType::U8, Purpose::Message);
        Request {
            direction,
            peer,
            kind: Kind { dtype, purpose },
            address: 1 << 20,
            bytes,
            memory: NO_MEMORY,
            place: 1 << 30,
        }
    }

    #[test]
    fn every_byte_lies_on_one_lane_and_chains_keep_their_order() {
        let lanes = Lanes {
            count: 3,
            step: 1000,
        };
        let mut layout = Layout::new(2, lanes);
        let requests = [
            request(Direction::Receive, 1, 999),
            request(Direction::Send, 1, 2500),
            request(Direction::Copy, 0, 1000),
            request(Direction::Send, 1, 0),
            request(Direction::Send, 1, 1 << 20),
            request(Direction::Send, 0, 10),
        ];
        // The second time in the same buffers.
        for _ in 0..2 {
            layout.lay_out(&requests);
            assert!(layout.chains.len() <= layout.most_chains() as usize);
            let is_send = |t: &Transfer| t.direction == Direction::Send;
            // Sends first: three lanes to rank 1, one to itself; then a receive, and a copy on two.
            let first: Vec<_> = layout.chains.iter().map(is_send).collect();
            assert_eq!(first, [true, true, true, true, false, false, false]);
            let mut seen = vec![Vec::new(); requests.len()];
            for chain in &layout.chains {
                let (mut transfer, mut last) = (*chain, 0);
                loop {
                    assert!(transfer.op >= last, "out of order");
                    last = transfer.op;
                    assert_eq!((transfer.lane, transfer.peer), (chain.lane, chain.peer));
                    assert_eq!(transfer.place - transfer.address, (1 << 30) - (1 << 20));
                    let begin = transfer.address - (1 << 20);
                    seen[last as usize].push(begin..begin + transfer.bytes);
                    match transfer.next {
                        NONE => break,
                        next => transfer = layout.followers[next as usize],
                    }
                }
            }
            for (request, mut parts) in requests.iter().zip(seen) {
                parts.sort_by_key(|part| part.start);
                assert_eq!(parts.len() as u32, lanes.of(request.bytes));
                let ends = parts.iter().map(|part| part.end);
                let starts = parts.iter().skip(1).map(|part| part.start);
                assert!(starts.chain([request.bytes]).eq(ends), "{parts:?}");
                assert_eq!(parts[0].start, 0);
                assert!(parts.iter().all(|part| part.start % 16 == 0));
            }
        }
    }

    #[test]
    fn transfers_have_blocks_of_their_own_where_there_are_enough_and_no_two_share_a_stream() {
        let lanes = Lanes {
            count: 4,
            step: 1000,
        };
        let layout = Layout::new(3, lanes);
        let mut messages = Vec::new();
        let [send, receive, copy] = [
            request(Direction::Send, 1, 2500),
            request(Direction::Receive, 1, 1 << 20),
            request(Direction::Copy, 0, 1 << 20),
        ];
        assert!(layout.single(&[send, copy, receive], 9, &mut messages));
        // 3 and 4 lanes, which leave two blocks for the copy.
        let blocks: Vec<_> = messages.iter().map(|m| (m.first, m.lanes, m.op)).collect();
        assert_eq!(blocks, [(0, 3, 0), (3, 2, 1), (5, 4, 2)]);
        for message in &messages {
            let parts = (0..message.lanes).map(|lane| message.transfer(lane));
            let bytes: u64 = parts.map(|part| part.bytes).sum();
            assert_eq!(bytes, message.envelope.bytes);
        }
        // A copy takes one block at least, and there is none left.
        assert!(!layout.single(&[send, copy, receive], 7, &mut messages));
        assert!(!layout.single(&[send, send], 100, &mut messages));
        // Reductions take whole slots: neither they nor what is sent to them may go in lines.
        let purpose = Purpose::ReduceScatter(ReduceOp::Sum);
        for mut reduced in [request(Direction::Reduce, 0, 8), send] {
            reduced.kind.purpose = purpose;
            assert!(!layout.single(&[reduced], 100, &mut messages));
        }
        let many: Vec<_> = (0..=MAX_MESSAGES as u32)
            .map(|peer| request(Direction::Send, peer, 1))
            .collect();
        assert!(!layout.single(&many, 100, &mut messages));
        assert!(layout.single(&many[1..], 100, &mut messages));
    }
}
