//! Exchanges as a GPU runs them, in blocks of several threads and in several blocks; and what a peer may write
//! into a slot.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::{HostBlock, Meeting, Random, TellIfPanicking};
use crossweft_device::exchange::{
    BOARD, Direction, Envelope, Exchange, Fault, HEADER, Incoming, LINE, Mapped, NO_MEMORY, NONE,
    Outgoing, State, Streams, Transfer, Transfers, run_block, withdraw,
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
}

/// What a rank has, in words: lines and rings that peers write, then tables of its own.
struct Rank {
    shared: Vec<u64>,
    streams: [Streams; RANKS as usize],
    mapped: [Mapped; RANKS as usize],
    fault: Fault,
    boards: Vec<u64>,
}

const RING: u64 = SLOTS * SLOT_BYTES;

impl Rank {
    fn new(blocks: u32) -> Self {
        let words = u64::from(RANKS) * (LINE + RING) / 8;
        Self {
            shared: vec![0; words as usize],
            streams: Default::default(),
            mapped: Default::default(),
            fault: Fault::default(),
            boards: vec![0; (u64::from(blocks) * BOARD / 8) as usize],
        }
    }

    fn line(&mut self, peer: u32) -> u64 {
        self.shared.as_mut_ptr() as u64 + u64::from(peer) * LINE
    }

    fn ring(&mut self, peer: u32) -> u64 {
        self.line(RANKS) + u64::from(peer) * RING
    }

    fn exchange(&mut self, rank: u32) -> Exchange {
        Exchange {
            streams: self.streams.as_mut_ptr() as u64,
            mapped: self.mapped.as_ptr() as u64,
            fault: &raw mut self.fault as u64,
            boards: self.boards.as_mut_ptr() as u64,
            slot_bytes: SLOT_BYTES,
            slots: SLOTS as u32,
            rank,
            ranks: RANKS,
            element: 4,
            memories: 1,
        }
    }
}

/// Two ranks whose streams are connected.
fn two_ranks(blocks: u32) -> [Rank; 2] {
    let mut ranks = [Rank::new(blocks), Rank::new(blocks)];
    for me in 0..RANKS {
        for peer in 0..RANKS {
            let streams = Streams {
                outgoing: Outgoing {
                    ring: ranks[peer as usize].ring(me),
                    reports: ranks[me as usize].line(peer),
                    ..Outgoing::default()
                },
                incoming: Incoming {
                    ring: ranks[me as usize].ring(peer),
                    reports: ranks[peer as usize].line(me),
                    ..Incoming::default()
                },
            };
            ranks[me as usize].streams[peer as usize] = streams;
        }
    }
    ranks
}

fn transfer(direction: Direction, peer: u32, address: u64, bytes: u64) -> Transfer {
    Transfer {
        address,
        envelope: Envelope { bytes, kind: 1 },
        place: 0,
        done: 0,
        peer,
        direction,
        memory: NO_MEMORY,
        next: NONE,
        op: 0,
        state: State::New,
    }
}

/// Runs both ranks, each in blocks of threads that share out their chains.
fn run(ranks: &mut [Rank; 2], lists: &mut [Vec<Transfer>; 2], (blocks, threads): (u32, u32)) {
    let failed = AtomicBool::new(false);
    let reducer = HostReducer::new(DataType::U32, ReduceOp::Sum);
    let exchanges: Vec<_> = (0..)
        .zip(ranks)
        .map(|(me, rank)| rank.exchange(me))
        .collect();
    let mut chains: Vec<Vec<u32>> = lists
        .iter()
        .map(|list| (0..list.len() as u32).collect())
        .collect();
    let tables: Vec<_> = lists
        .iter_mut()
        .zip(&mut chains)
        .map(|(list, chains)| Transfers {
            transfers: list.as_mut_ptr() as u64,
            chains: chains.as_mut_ptr() as u64,
            count: chains.len() as u32,
            blocks,
        })
        .collect();
    let done = AtomicU32::new(0);
    let meetings: Vec<_> = (0..2 * blocks)
        .map(|_| Meeting {
            parties: threads.into(),
            arrived: 0.into(),
        })
        .collect();
    let outcomes: Vec<_> = (0..2 * blocks).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for team in 0..2 * blocks {
            for thread in 0..threads {
                let (rank, index) = ((team / blocks) as usize, team % blocks);
                let (exchange, table) = (&exchanges[rank], &tables[rank]);
                let (failed, reducer, done) = (&failed, &reducer, &done);
                let meeting = &meetings[team as usize];
                let stopped = &outcomes[team as usize];
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
                        failed,
                    };
                    // SAFETY: tables and buffers live until all have ended, and each rank has its own.
                    let result = unsafe { run_block(&block, reducer, exchange, table, index) };
                    assert_eq!(result, Ok(()));
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
        }
    });
    assert_eq!(done.into_inner(), 2 * blocks * threads);
}

#[test]
fn threads_and_blocks_share_the_work() {
    for (blocks, threads) in [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2)] {
        let mut ranks = two_ranks(blocks);
        let mut random = Random(7);
        // To oneself and to the other, both ways, of sizes around a slot's.
        for sizes in [[0, 1], [95, 96], [97, 1000], [5000, 3]] {
            let sent: Vec<_> = (0..4).map(|k| random.bytes(sizes[k % 2])).collect();
            let mut got = sent.clone();
            let mut lists = [Vec::new(), Vec::new()];
            for (k, (sent, got)) in (0..).zip(sent.iter().zip(&mut got)) {
                got.fill(0);
                let (from, to) = (k / 2, k % 2);
                let bytes = sent.len() as u64;
                let send = transfer(Direction::Send, to, sent.as_ptr() as u64, bytes);
                let receive = transfer(Direction::Receive, from, got.as_mut_ptr() as u64, bytes);
                lists[from as usize].push(send);
                lists[to as usize].push(receive);
            }
            run(&mut ranks, &mut lists, (blocks, threads));
            assert!(got == sent, "{blocks} blocks of {threads} threads");
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
        let mut lists: [Vec<_>; 2] = [0, 1].map(|me: u32| {
            let at = |rank: u32| inputs[me as usize].as_ptr() as u64 + u64::from(rank) * 800;
            let bytes = |rank: u32| 800 + u64::from(rank) * 400;
            let output = output[me as usize].as_mut_ptr() as u64;
            let peer = 1 - me;
            let send = transfer(Direction::Send, peer, at(peer), bytes(peer));
            let mut reduce = transfer(Direction::Reduce, 0, output, bytes(me));
            reduce.place = at(me);
            vec![send, reduce]
        });
        run(&mut ranks, &mut lists, (1, threads));
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
        run(&mut ranks, &mut [vec![offer], vec![receive]], (1, threads));
        assert!(got == data[8..], "{threads} threads");
    }
}

/// What rank 0 receives of an offer by rank 1 of 48 bytes at `place` of a memory, which holds `data`.
fn take_offer(
    ranks: &mut [Rank; 2],
    data: &[u8],
    number: u32,
    place: u64,
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
    let mut chains = [0_u32];
    let exchange = ranks[0].exchange(0);
    let table = Transfers {
        transfers: list.as_mut_ptr() as u64,
        chains: chains.as_mut_ptr() as u64,
        count: 1,
        blocks: 1,
    };
    let reducer = HostReducer::new(DataType::U8, ReduceOp::Sum);
    // SAFETY: tables and buffers live here, and nobody else uses them.
    let result = unsafe { run_block(&HostBlock::NO_WAIT, &reducer, &exchange, &table, 0) };
    (result, got)
}

#[test]
fn an_offer_that_was_withdrawn_is_not_taken() {
    let mut ranks = two_ranks(1);
    let exchange = ranks[1].exchange(1);
    // SAFETY: nothing is under way.
    unsafe { withdraw(&Raw, &exchange) };
    let (result, _) = take_offer(&mut ranks, &[7; 64], 1, 0);
    assert_eq!(result, Err(Stopped::Mismatch));
    // The slot is not returned: the sender hears of nothing that was received.
    // SAFETY: the first word of the line on which rank 0 reports.
    assert_eq!(unsafe { (ranks[1].line(0) as *const u64).read() }, 0);
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
        let mut ranks = two_ranks(1);
        let (result, got) = take_offer(&mut ranks, &data, number, place);
        if is_right {
            assert_eq!((result, got), (Ok(()), [7; 48]));
        } else {
            assert_eq!((result, got), (Err(Stopped::Mismatch), [0; 48]));
            let fault = ranks[0].fault;
            assert_eq!((fault.sender, fault.receiver), (1, 0));
        }
    }
}
