//! Exchanges as a GPU runs them, in blocks of several threads and in several blocks; and what a peer may write
//! into a slot.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::{HostBlock, Meeting, Random, TellIfPanicking};
use crossweft_device::exchange::{
    BOARD, Desk, Direction, Envelope, Exchange, Fault, HEADER, Incoming, LINE, LINES_BYTES, Lanes,
    Mapped, NO_MEMORY, NONE, Outgoing, State, Streams, Transfer, Transfers, abandon, is_abandoned,
    run_block, run_single, withdraw,
};
use crossweft_device::reduce::HostReducer;
use crossweft_device::{Block, DataType, Raw, ReduceOp, Stopped, Waiting};

const SLOTS: u64 = 2;
const SLOT_BYTES: u64 = 2 * LINE;
const RANKS: u32 = 2;

/// One thread of a block of several.
struct TeamBlock<'a> {
    thread: HostBlock<'a>,
    meeting: &'a Meeting,
    stopped: &'a Mutex<Option<Stopped>>,
    votes: &'a AtomicU32,
    failed: &'a AtomicBool,
}

impl Block for TeamBlock<'_> {
    type Memory = Raw;

    fn memory(&self) -> &Raw {
        &Raw
    }

    fn thread(&self) -> u32 {
        self.thread.thread
    }

    fn threads(&self) -> u32 {
        self.thread.threads
    }

    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        if let Err(stopped) = mine {
            *self.stopped.lock().unwrap() = Some(stopped);
        }
        self.meeting.wait(self.failed);
        let outcome = self.stopped.lock().unwrap().map_or(Ok(()), Err);
        // Nobody brings another outcome before all have this one.
        self.meeting.wait(self.failed);
        outcome
    }

    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        self.thread.pause(waiting)
    }

    fn refuse(&self, waiting: &Waiting) -> Stopped {
        self.thread.refuse(waiting)
    }

    fn wake(&self, _peer: u32) {}

    /// The block is one warp.
    fn warp_any(&self, x: bool) -> bool {
        self.votes.fetch_add(x.into(), Ordering::SeqCst);
        self.meeting.wait(self.failed);
        let any = self.votes.load(Ordering::SeqCst) != 0;
        // Nobody votes again before all have read, nor reads again before the next votes are in.
        self.meeting.wait(self.failed);
        if self.thread() == 0 {
            self.votes.store(0, Ordering::SeqCst);
        }
        self.meeting.wait(self.failed);
        any
    }
}

/// Memory as lines need it.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Aligned([u64; 16]);

/// What a rank has, in words: lines and rings that peers write, then tables of its own.
struct Rank {
    shared: Vec<Aligned>,
    /// Of each slot.
    lines: u64,
    /// For each lane and rank.
    streams: Vec<Streams>,
    mapped: [Mapped; RANKS as usize],
    faults: [Fault; 8],
}

impl Rank {
    fn new(lanes: u32, lines: u64) -> Self {
        let pairs = lanes * RANKS;
        let bytes = u64::from(pairs) * (LINE + SLOTS * (SLOT_BYTES + lines));
        Self {
            shared: vec![Aligned([0; 16]); bytes.div_ceil(128) as usize + 1],
            lines,
            streams: vec![Streams::default(); pairs as usize],
            mapped: Default::default(),
            faults: [Fault::default(); 8],
        }
    }

    /// The line of a lane and peer, by its place among all.
    fn line(&mut self, pair: u32) -> u64 {
        self.shared.as_mut_ptr() as u64 + u64::from(pair) * LINE
    }

    fn ring(&mut self, pair: u32) -> u64 {
        let first = self.line(self.streams.len() as u32).next_multiple_of(128);
        first + u64::from(pair) * SLOTS * (SLOT_BYTES + self.lines)
    }

    fn exchange(&mut self, rank: u32) -> Exchange {
        Exchange {
            streams: self.streams.as_mut_ptr() as u64,
            mapped: self.mapped.as_ptr() as u64,
            faults: self.faults.as_mut_ptr() as u64,
            own: self.line(rank),
            slot_bytes: SLOT_BYTES + self.lines,
            lines: self.lines,
            slots: SLOTS as u32,
            rank,
            ranks: RANKS,
            element: 4,
            memories: 1,
        }
    }
}

/// Two ranks whose streams are connected.
fn two_ranks(lanes: u32) -> [Rank; 2] {
    connected([Rank::new(lanes, 0), Rank::new(lanes, 0)], lanes, 0)
}

/// The same, after so many slots each way.
fn connected(mut ranks: [Rank; 2], lanes: u32, slots: u64) -> [Rank; 2] {
    for me in 0..RANKS {
        for (lane, peer) in (0..lanes).flat_map(|lane| (0..RANKS).map(move |peer| (lane, peer))) {
            let (there, here) = (lane * RANKS + me, lane * RANKS + peer);
            let streams = Streams {
                outgoing: Outgoing {
                    ring: ranks[peer as usize].ring(there),
                    reports: ranks[me as usize].line(here),
                    sent: slots,
                    taken: slots,
                },
                incoming: Incoming {
                    ring: ranks[me as usize].ring(here),
                    reports: ranks[peer as usize].line(there),
                    received: slots,
                    told: slots,
                },
            };
            ranks[me as usize].streams[here as usize] = streams;
        }
    }
    ranks
}

fn transfer(direction: Direction, peer: u32, address: u64, bytes: u64) -> Transfer {
    Transfer {
        address,
        envelope: Envelope { bytes, kind: 1 },
        bytes,
        place: 0,
        done: 0,
        peer,
        direction,
        memory: NO_MEMORY,
        lane: 0,
        next: NONE,
        op: 0,
        state: State::New,
        reserved: 0,
    }
}

/// The parts of a transfer on all the lanes that it takes.
fn spread(whole: Transfer, lanes: Lanes) -> impl Iterator<Item = Transfer> {
    (0..lanes.of(whole.bytes)).map(move |lane| {
        let part = lanes.part(whole.bytes, lane);
        Transfer {
            address: whole.address + part.begin,
            bytes: part.len(),
            place: whole.place + part.begin,
            lane,
            ..whole
        }
    })
}

/// All of `list` as chains of their own, for so many blocks.
fn table(list: &[Transfer], blocks: u32) -> Transfers {
    Transfers {
        chains: list.as_ptr() as u64,
        followers: 0,
        count: list.len() as u32,
        blocks,
        launch: 0,
        reserved: 0,
    }
}

/// How a rank runs its list.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// In so many blocks of so many threads, which share out its chains.
    Chains(u32, u32),
    /// Each of its transfers in a block of its own, of so many threads.
    Single(u32),
}

impl Way {
    /// Its blocks, for a list of that length, and their threads.
    fn shape(self, transfers: usize) -> (u32, u32) {
        match self {
            Self::Chains(blocks, threads) => (blocks, threads),
            Self::Single(threads) => (transfers as u32, threads),
        }
    }
}

/// Runs both ranks, each in its way. What each thread brought back.
fn outcomes(
    ranks: &mut [Rank; 2],
    lists: &[Vec<Transfer>; 2],
    ways: [Way; 2],
) -> Vec<Result<(), Stopped>> {
    let failed = AtomicBool::new(false);
    let results = Mutex::new(Vec::new());
    let reducer = HostReducer::new(DataType::U32, ReduceOp::Sum);
    let exchanges: Vec<_> = (0..)
        .zip(ranks)
        .map(|(me, rank)| rank.exchange(me))
        .collect();
    let teams = (0..2).flat_map(|rank: usize| {
        let (blocks, threads) = ways[rank].shape(lists[rank].len());
        (0..blocks).map(move |index| (rank, index, threads, blocks))
    });
    let teams: Vec<_> = teams.collect();
    // Each block has its own chains, and its board.
    let mut desks: Vec<_> = teams
        .iter()
        .map(|&(rank, index, _, blocks)| {
            let (begin, count) = table(&lists[rank], blocks).share(index);
            let own = lists[rank][begin as usize..][..count as usize].to_vec();
            (own, [0_u64; BOARD as usize / 8])
        })
        .collect();
    let desks: Vec<_> = desks
        .iter_mut()
        .map(|(chains, board)| Desk {
            chains: chains.as_mut_ptr() as u64,
            board: board.as_mut_ptr() as u64,
        })
        .collect();
    let meetings = teams.iter().map(|&(_, _, threads, _)| Meeting {
        parties: threads.into(),
        arrived: 0.into(),
    });
    let meetings: Vec<_> = meetings.collect();
    let stops: Vec<_> = teams
        .iter()
        .map(|_| (Mutex::new(None), AtomicU32::new(0)))
        .collect();
    std::thread::scope(|scope| {
        for (team, &(rank, index, threads, blocks)) in teams.iter().enumerate() {
            for thread in 0..threads {
                let (exchange, table) = (&exchanges[rank], table(&lists[rank], blocks));
                let own = lists[rank][index as usize % lists[rank].len().max(1)..].first();
                let results = &results;
                let (failed, reducer, desk) = (&failed, &reducer, desks[team]);
                let (meeting, (stopped, votes)) = (&meetings[team], &stops[team]);
                scope.spawn(move || {
                    let _tell = TellIfPanicking(failed);
                    let block = TeamBlock {
                        thread: HostBlock {
                            thread,
                            threads,
                            failed: Some(failed),
                            ..HostBlock::ALONE
                        },
                        meeting,
                        stopped,
                        votes,
                        failed,
                    };
                    // SAFETY: tables and buffers live until all have ended, and each rank has its own.
                    let result = unsafe {
                        match (ways[rank], own) {
                            (Way::Single(_), Some(own)) => {
                                run_single(&block, exchange, &table, index, own, desk.board)
                            }
                            _ => run_block(&block, reducer, exchange, &table, index, desk),
                        }
                    };
                    if let (0, Err(stopped)) = (thread, result) {
                        // SAFETY: as above; as a kernel does it.
                        unsafe { abandon(&Raw, exchange, stopped) };
                    }
                    results.lock().unwrap().push(result);
                });
            }
        }
    });
    results.into_inner().unwrap()
}

/// The same, of what must go well.
fn run(ranks: &mut [Rank; 2], lists: &[Vec<Transfer>; 2], ways: [Way; 2]) {
    let results = outcomes(ranks, lists, ways);
    assert!(results.iter().all(Result::is_ok), "{ways:?}: {results:?}");
}

/// Both ranks in the same way, and, where transfers each have a stream of their own, one or both in the other.
fn ways(blocks: u32, threads: u32) -> [[Way; 2]; 4] {
    let (chains, single) = (Way::Chains(blocks, threads), Way::Single(threads));
    [
        [chains, chains],
        [single, single],
        [single, chains],
        [chains, single],
    ]
}

#[test]
fn threads_blocks_and_lanes_share_the_work() {
    for (blocks, threads, lanes) in [
        (1, 1, 1),
        (1, 4, 1),
        (2, 1, 1),
        (2, 3, 2),
        (4, 2, 1),
        (4, 1, 3),
        (1, 2, 3),
    ] {
        let mut ranks = two_ranks(lanes);
        let lanes = Lanes {
            count: lanes,
            step: 100,
        };
        let mut random = Random(7);
        // To oneself and to the other, both ways, of sizes around a slot's and those of a lane's part.
        for sizes in [[0, 1], [95, 96], [99, 200], [97, 1000], [5000, 3]] {
            let sent: Vec<_> = (0..4).map(|k| random.bytes(sizes[k % 2])).collect();
            let mut got = sent.clone();
            let mut lists = [Vec::new(), Vec::new()];
            for (k, (sent, got)) in (0..).zip(sent.iter().zip(&mut got)) {
                got.fill(0);
                let (from, to) = (k / 2, k % 2);
                let bytes = sent.len() as u64;
                let send = transfer(Direction::Send, to, sent.as_ptr() as u64, bytes);
                let receive = transfer(Direction::Receive, from, got.as_mut_ptr() as u64, bytes);
                lists[from as usize].extend(spread(send, lanes));
                lists[to as usize].extend(spread(receive, lanes));
            }
            for ways in ways(blocks, threads) {
                got.iter_mut().for_each(|got| got.fill(0));
                run(&mut ranks, &lists, ways);
                assert!(got == sent, "{ways:?}, {lanes:?}");
            }
        }
    }
}

#[test]
fn small_messages_go_in_lines_to_either_kind_of_receiver() {
    let mut random = Random(5);
    // At the beginning, and where the lines of each slot are cleared.
    for slots in [0, (1 << 18) - 4] {
        let ranks = [Rank::new(1, LINES_BYTES), Rank::new(1, LINES_BYTES)];
        let mut ranks = connected(ranks, 1, slots);
        let (single, chains) = (Way::Single(8), Way::Chains(1, 8));
        // Who sends in chains sends in slots; 7681 bytes are too many for lines.
        for ways in [[single; 2], [single, chains], [chains, single]] {
            for bytes in [1, 0, 17, 239, 240, 241, 4001, 7680, 7681] {
                let sent = random.bytes(bytes);
                let mut got = vec![0; bytes];
                let bytes = bytes as u64;
                let lists = [
                    vec![transfer(Direction::Send, 1, sent.as_ptr() as u64, bytes)],
                    vec![transfer(
                        Direction::Receive,
                        0,
                        got.as_mut_ptr() as u64,
                        bytes,
                    )],
                ];
                run(&mut ranks, &lists, ways);
                assert!(got == sent, "{ways:?}, {bytes} bytes after {slots}");
            }
        }
        // One of another size is told, whichever way it was to come.
        for wanted in [10, 1000, 100_000] {
            let ranks = [Rank::new(1, LINES_BYTES), Rank::new(1, LINES_BYTES)];
            let mut ranks = connected(ranks, 1, slots);
            let (sent, mut got) = (random.bytes(999), vec![0; wanted]);
            let lists = [
                vec![transfer(Direction::Send, 1, sent.as_ptr() as u64, 999)],
                vec![transfer(
                    Direction::Receive,
                    0,
                    got.as_mut_ptr() as u64,
                    wanted as u64,
                )],
            ];
            let results = outcomes(&mut ranks, &lists, [single; 2]);
            assert!(results.contains(&Err(Stopped::Mismatch)), "{results:?}");
            let fault = ranks[1].faults[0];
            assert_eq!((fault.sent.bytes, fault.wanted.bytes), (999, wanted as u64));
        }
    }
}

#[test]
fn what_lies_here_is_copied_beside_messages() {
    for threads in [1, 3] {
        let mut ranks = two_ranks(1);
        let data = Random(9).bytes((2 << 20) + 77);
        let mut got = vec![0; data.len()];
        let mut copy = transfer(
            Direction::Copy,
            0,
            got.as_mut_ptr() as u64,
            data.len() as u64,
        );
        copy.place = data.as_ptr() as u64;
        for way in [Way::Chains(1, threads), Way::Single(threads)] {
            got.fill(0);
            run(&mut ranks, &[vec![copy], vec![]], [way; 2]);
            assert!(got == data);
        }
    }
}

#[test]
fn messages_that_differ_end_all_blocks_of_both_ranks() {
    let lanes = Lanes {
        count: 4,
        step: 100,
    };
    // Whatever lanes they take, and whichever block finds it.
    for (sent, wanted) in [(1000, 10), (10, 1000), (1000, 200), (399, 400)] {
        for ways in ways(1, 2).into_iter().chain(ways(2, 1)).chain(ways(4, 2)) {
            let mut ranks = two_ranks(lanes.count);
            let data = Random(2).bytes(sent);
            let mut got = vec![0; wanted];
            let send = transfer(Direction::Send, 1, data.as_ptr() as u64, sent as u64);
            let (to, bytes) = (got.as_mut_ptr() as u64, wanted as u64);
            let receive = transfer(Direction::Receive, 0, to, bytes);
            // A second message, so that the sender waits for the first to be taken.
            let more = transfer(Direction::Receive, 1, to, 0);
            let lists = [
                spread(send, lanes).chain([more]).collect(),
                spread(receive, lanes).collect(),
            ];
            let results = outcomes(&mut ranks, &lists, ways);
            assert!(
                results.contains(&Err(Stopped::Mismatch)),
                "{sent} and {wanted}, {ways:?}: {results:?}"
            );
            let envelopes: Vec<_> = ranks
                .iter()
                .map(|rank| {
                    let said = rank
                        .faults
                        .iter()
                        .find(|f| f.receiver == 1 && f.sender == 0);
                    said.map(|fault| (fault.sent.bytes, fault.wanted.bytes))
                })
                .collect();
            let expected = Some((sent as u64, wanted as u64));
            assert_eq!(envelopes, [expected, expected], "{ways:?}");
            for (me, rank) in (0..).zip(&mut ranks) {
                let exchange = rank.exchange(me);
                // SAFETY: all has ended.
                assert!(unsafe { is_abandoned(&Raw, &exchange) });
            }
        }
    }
}

#[test]
fn threads_reduce_and_pull_together() {
    for threads in [1, 3] {
        let mut ranks = two_ranks(1);
        let input = |rank: u32| -> Vec<u32> { (0..500).map(|i| i + 1000 * rank).collect() };
        let inputs = [input(0), input(1)];
        let mut output = [vec![0_u32; 200], vec![0_u32; 300]];
        // Rank 0 gets the first 200 elements, rank 1 the rest.
        let lists: [Vec<_>; 2] = [0, 1].map(|me: u32| {
            let at = |rank: u32| inputs[me as usize].as_ptr() as u64 + u64::from(rank) * 800;
            let bytes = |rank: u32| 800 + u64::from(rank) * 400;
            let output = output[me as usize].as_mut_ptr() as u64;
            let peer = 1 - me;
            let send = transfer(Direction::Send, peer, at(peer), bytes(peer));
            let mut reduce = transfer(Direction::Reduce, 0, output, bytes(me));
            reduce.place = at(me);
            vec![send, reduce]
        });
        run(&mut ranks, &lists, [Way::Chains(1, threads); 2]);
        let sums: Vec<u32> = (0..500).map(|i| 2 * i + 1000).collect();
        assert!(output.concat() == sums, "{threads} threads");

        // Rank 0's memory is one that rank 1 can reach.
        let data = Random(3).bytes(3 << 20);
        let mut got = vec![0; data.len() - 8];
        let bytes = got.len() as u64;
        ranks[1].mapped[0] = Mapped {
            address: data.as_ptr() as u64,
            bytes: data.len() as u64,
        };
        let mut offer = transfer(Direction::Send, 1, data.as_ptr() as u64 + 8, bytes);
        (offer.memory, offer.place) = (0, 8);
        let receive = transfer(Direction::Receive, 0, got.as_mut_ptr() as u64, bytes);
        for ways in ways(1, threads) {
            got.fill(0);
            run(&mut ranks, &[vec![offer], vec![receive]], ways);
            assert!(got == data[8..], "{ways:?}");
        }
    }
}

/// What rank 0 receives of an offer by rank 1 of 48 bytes at `place` of a memory, which holds `data`.
fn take_offer(
    ranks: &mut [Rank; 2],
    data: &[u8],
    (number, place): (u32, u64),
    is_single: bool,
) -> (Result<(), Stopped>, [u8; 48]) {
    ranks[0].mapped[1] = Mapped {
        address: data.as_ptr() as u64,
        bytes: data.len() as u64,
    };
    let slot = ranks[0].ring(1);
    let header = [1, 48, 1 | u64::from(number) << 32, place];
    assert_eq!(size_of_val(&header) as u64, HEADER);
    // SAFETY: a slot of the ring, of which nobody else knows yet.
    unsafe { (slot as *mut [u64; 4]).write(header) };
    let mut got = [0_u8; 48];
    let mut list = [transfer(Direction::Receive, 1, got.as_mut_ptr() as u64, 48)];
    let exchange = ranks[0].exchange(0);
    let desk = Desk {
        chains: list.as_mut_ptr() as u64,
        board: 0,
    };
    let (table, mut board) = (table(&list, 1), [0_u64; 2]);
    let reducer = HostReducer::new(DataType::U8, ReduceOp::Sum);
    // SAFETY: tables and buffers live here, and nobody else uses them.
    let result = unsafe {
        let block = HostBlock::NO_WAIT;
        match is_single {
            true => run_single(
                &block,
                &exchange,
                &table,
                0,
                &list[0],
                board.as_mut_ptr() as u64,
            ),
            false => run_block(&block, &reducer, &exchange, &table, 0, desk),
        }
    };
    (result, got)
}

#[test]
fn an_offer_that_was_withdrawn_is_not_taken() {
    for is_single in [false, true] {
        let mut ranks = two_ranks(1);
        let exchange = ranks[1].exchange(1);
        // SAFETY: nothing is under way.
        unsafe { withdraw(&Raw, &exchange) };
        let (result, _) = take_offer(&mut ranks, &[7; 64], (1, 0), is_single);
        assert_eq!(result, Err(Stopped::Mismatch));
        // The slot is not returned: the sender hears of nothing that was received.
        // SAFETY: the first word of the line on which rank 0 reports.
        assert_eq!(unsafe { (ranks[1].line(0) as *const u64).read() }, 0);
    }
}

#[test]
fn an_offer_of_memory_that_is_not_there_is_refused() {
    let data = [7_u8; 64];
    // What a peer may write: the number of the memory and one, and the place in it.
    for (number, place, is_right) in [
        (1, 0, true),
        (1, 16, true),
        (1, 17, false),
        (1, u64::MAX, false),
        (1, u64::MAX - 47, false),
        (2, 0, false),
        (u32::MAX, 0, false),
    ] {
        for is_single in [false, true] {
            let mut ranks = two_ranks(1);
            let (result, got) = take_offer(&mut ranks, &data, (number, place), is_single);
            if is_right {
                assert_eq!((result, got), (Ok(()), [7; 48]));
            } else {
                assert_eq!((result, got), (Err(Stopped::Mismatch), [0; 48]));
                let fault = ranks[0].faults[0];
                assert_eq!((fault.sender, fault.receiver), (1, 0));
            }
        }
    }
}
