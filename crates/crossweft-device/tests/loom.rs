//! The device protocols under loom: every interleaving, and every value that the memory orders
//! allow a load to return, of the very source that kernels run.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom \
//!     cargo test -p crossweft-device --release --test loom
//! ```
//!
//! The models named `broken_*` leave out one thing that a protocol relies on, and must fail: they
//! show that the others could.
//!
//! What loom cannot show: a load never returns a store that comes later in the explored order
//! ("load buffering"), so what a fence does against that is seen through the plain accesses next to
//! it (see [`reuse`]).
#![cfg(loom)]

use std::mem::MaybeUninit;
use std::ops::Range;
use std::rc::Rc;

use crossweft_device::exchange::{
    self, Desk, Direction, Envelope, Exchange, Incoming, Mapped, NO_MEMORY, NONE, Outgoing, State,
    Streams, Transfer, Transfers,
};
use crossweft_device::executor::run_block;
use crossweft_device::fifo::{Fifo, TRIGGER_BYTES, Trigger, TriggerKind};
use crossweft_device::moe;
use crossweft_device::packet::{self, copy_from_packets, copy_to_packets, flag_of};
use crossweft_device::program::{
    BASES_AT, BlockOps, COUNTER_STRIDE, Launch, Op, OpKind, Operand, Program, SPACES, Space, flags,
};
use crossweft_device::reduce::{Location, Reducer, Sources};
use crossweft_device::semaphore::Semaphore;
use crossweft_device::{Block, Memory, Site, Stopped, WaitKind, Waiting};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

/// Address of the first word. Not 0, so that a forgotten address is an error.
const BASE: u64 = 1 << 16;
const OP: u32 = 7;

/// A word of the arena, for one of the two kinds of access, never both: mixing them is an error.
enum Word {
    /// For the word operations.
    Atomic(AtomicU64),
    /// For plain accesses; loom reports those that race.
    Plain(UnsafeCell<u64>),
}

/// An arena: first atomic words, then plain ones.
struct LoomMemory {
    words: Vec<Word>,
    atomics: u64,
    fences: bool,
    /// Release stores here are relaxed.
    relaxed: Range<u64>,
}

impl LoomMemory {
    fn new(atomics: u64, plains: u64) -> Self {
        let atomic = (0..atomics).map(|_| Word::Atomic(AtomicU64::new(0)));
        let plain = (0..plains).map(|_| Word::Plain(UnsafeCell::new(0)));
        Self {
            words: atomic.chain(plain).collect(),
            atomics,
            fences: true,
            relaxed: 0..0,
        }
    }

    /// An arena in any order; `is_atomic` says which words are.
    fn mixed(is_atomic: impl IntoIterator<Item = bool>) -> Self {
        let word = |is_atomic| match is_atomic {
            true => Word::Atomic(AtomicU64::new(0)),
            false => Word::Plain(UnsafeCell::new(0)),
        };
        Self {
            words: is_atomic.into_iter().map(word).collect(),
            ..Self::new(0, 0)
        }
    }

    /// Address of the `i`-th atomic word.
    fn atomic(&self, i: u64) -> u64 {
        assert!(i < self.atomics);
        BASE + i * 8
    }

    /// Address of the `i`-th plain word.
    fn plain(&self, i: u64) -> u64 {
        BASE + (self.atomics + i) * 8
    }

    fn word(&self, addr: u64) -> &Word {
        let offset = addr.checked_sub(BASE).expect("an address below the arena");
        self.words
            .get((offset / 8) as usize)
            .expect("an address above the arena")
    }

    fn at(&self, addr: u64) -> &AtomicU64 {
        assert!(addr.is_multiple_of(8), "unaligned word");
        match self.word(addr) {
            Word::Atomic(word) => word,
            Word::Plain(_) => panic!("word operation on plain memory"),
        }
    }

    fn byte(&self, addr: u64) -> u8 {
        match self.word(addr) {
            Word::Plain(cell) => cell.with(|word| {
                // SAFETY: loom checks the access; the pointer is valid inside the closure.
                let word = unsafe { *word };
                word.to_le_bytes()[addr as usize % 8]
            }),
            Word::Atomic(..) => panic!("plain read of a word that others add to or store"),
        }
    }

    fn set_byte(&self, addr: u64, value: u8) {
        match self.word(addr) {
            Word::Plain(cell) => cell.with_mut(|word| {
                let shift = addr % 8 * 8;
                // SAFETY: loom checks the access; the pointer is valid inside the closure.
                unsafe { *word = *word & !(0xff << shift) | u64::from(value) << shift };
            }),
            Word::Atomic(..) => panic!("plain write of a word that others add to or store"),
        }
    }
}

impl Memory for LoomMemory {
    unsafe fn load(&self, addr: u64) -> u64 {
        self.at(addr).load(Ordering::Relaxed)
    }

    unsafe fn load_acquire(&self, addr: u64) -> u64 {
        self.at(addr).load(Ordering::Acquire)
    }

    unsafe fn store(&self, addr: u64, value: u64) {
        self.at(addr).store(value, Ordering::Relaxed);
    }

    unsafe fn store_release(&self, addr: u64, value: u64) {
        let order = match self.relaxed.contains(&addr) {
            true => Ordering::Relaxed,
            false => Ordering::Release,
        };
        self.at(addr).store(value, order);
    }

    unsafe fn add(&self, addr: u64, value: u64) {
        self.at(addr).fetch_add(value, Ordering::Relaxed);
    }

    unsafe fn add_release(&self, addr: u64, value: u64) {
        self.at(addr).fetch_add(value, Ordering::Release);
    }

    unsafe fn fetch_add(&self, addr: u64, value: u64) -> u64 {
        self.at(addr).fetch_add(value, Ordering::AcqRel)
    }

    unsafe fn raise(&self, addr: u64, value: u64) {
        self.at(addr).fetch_max(value, Ordering::Relaxed);
    }

    fn fence(&self) {
        if self.fences {
            fence(Ordering::AcqRel);
        }
    }

    unsafe fn read<T: Copy>(&self, addr: u64) -> T {
        let mut value = MaybeUninit::<T>::uninit();
        for i in 0..size_of::<T>() {
            let byte = self.byte(addr + i as u64);
            // SAFETY: byte `i` lies in the value.
            unsafe { value.as_mut_ptr().cast::<u8>().add(i).write(byte) };
        }
        // SAFETY: every byte is written; the caller promises that they are a valid `T`.
        unsafe { value.assume_init() }
    }

    unsafe fn write<T: Copy>(&self, addr: u64, value: T) {
        for i in 0..size_of::<T>() {
            // SAFETY: byte `i` lies in the value; the types written here have no padding.
            let byte = unsafe { (&raw const value).cast::<u8>().add(i).read() };
            self.set_byte(addr + i as u64, byte);
        }
    }

    unsafe fn copy(&self, dst: u64, src: u64, bytes: u64) {
        if dst != src {
            for i in 0..bytes {
                self.set_byte(dst + i, self.byte(src + i));
            }
        }
    }
}

/// The one thread of a block. Loom's threads are coroutines of one thread, so they share an `Rc`.
struct LoomBlock {
    memory: Rc<LoomMemory>,
    /// An atomic word that is not 0 once the job is aborted.
    abort: Option<u64>,
    /// Waits end at this many looks.
    patience: u32,
}

impl LoomBlock {
    fn new(memory: &Rc<LoomMemory>) -> Self {
        Self {
            memory: memory.clone(),
            abort: None,
            patience: u32::MAX,
        }
    }
}

impl Block for LoomBlock {
    type Memory = LoomMemory;

    fn memory(&self) -> &LoomMemory {
        &self.memory
    }

    fn thread(&self) -> u32 {
        0
    }

    fn threads(&self) -> u32 {
        1
    }

    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        mine
    }

    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        if waiting.site.kind == WaitKind::Packet {
            // Epochs of these models are small: a greater flag is that of a later epoch.
            assert!(
                (waiting.seen as u32) < waiting.expected as u32,
                "overtaken: a packet was overwritten before it was read"
            );
        }
        if let Some(abort) = self.abort {
            // SAFETY: a word of the arena.
            if unsafe { self.memory.load(abort) } != 0 {
                return Err(Stopped::Aborted);
            }
        }
        if waiting.spins >= self.patience {
            return Err(Stopped::Deadline);
        }
        thread::yield_now();
        Ok(())
    }

    fn refuse(&self, _waiting: &Waiting) -> Stopped {
        Stopped::Mismatch
    }

    fn wake(&self, _peer: u32) {}
}

fn join(thread: thread::JoinHandle<()>) {
    assert!(thread.join().is_ok());
}

/// Explores every execution.
fn model(f: impl Fn() + Send + Sync + 'static) {
    bounded_model(None, f);
}

/// Explores every execution with at most so many preemptions (switches away from a thread that
/// could have gone on; those at a pause are free). Only where the whole space is out of reach.
fn bounded_model(preemptions: Option<usize>, f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 10_000;
    builder.check(f);
}

fn write(memory: &LoomMemory, addr: u64, value: u64) {
    // SAFETY: addresses of these models lie in the arena.
    unsafe { memory.write(addr, value) }
}

fn read(memory: &LoomMemory, addr: u64) -> u64 {
    // SAFETY: addresses of these models lie in the arena, and a `u64` is any bytes.
    unsafe { memory.read(addr) }
}

// ---- semaphores ----

/// Both ends of a pair: counters in words 0 and 1, counts of waits in words 2 and 3.
fn semaphore_pair(memory: &LoomMemory) -> [Semaphore; 2] {
    [0, 1].map(|me| Semaphore {
        inbound: memory.atomic(me),
        outbound: memory.atomic(1 - me),
        expected: memory.atomic(2 + me),
        peer: 1 - me as u32,
        channel: 0,
    })
}

#[test]
fn a_wait_publishes_what_came_before_the_signal_both_ways() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(4, 2));
        let [ping, pong] = semaphore_pair(&memory);
        let there = {
            let memory = memory.clone();
            thread::spawn(move || {
                let block = LoomBlock::new(&memory);
                for round in 0..2 {
                    // SAFETY: the handle's addresses lie in the arena; this thread alone waits.
                    unsafe { pong.wait(&block, OP) }.expect("nothing stops it");
                    assert_eq!(read(&memory, memory.plain(0)), 10 + round);
                    write(&memory, memory.plain(1), 20 + round);
                    // SAFETY: as above.
                    unsafe { pong.signal(&block) };
                }
            })
        };
        let block = LoomBlock::new(&memory);
        for round in 0..2 {
            write(&memory, memory.plain(0), 10 + round);
            // SAFETY: the handle's addresses lie in the arena; this thread alone waits.
            unsafe {
                ping.signal(&block);
                ping.wait(&block, OP).expect("nothing stops it");
            }
            assert_eq!(read(&memory, memory.plain(1)), 20 + round);
        }
        join(there);
    });
}

#[test]
fn a_poll_that_takes_a_signal_publishes_too() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(4, 1));
        let [ping, pong] = semaphore_pair(&memory);
        let there = {
            let memory = memory.clone();
            thread::spawn(move || {
                write(&memory, memory.plain(0), 5);
                // SAFETY: the handle's addresses lie in the arena.
                unsafe { pong.signal(&LoomBlock::new(&memory)) };
            })
        };
        let block = LoomBlock::new(&memory);
        // SAFETY: the handle's addresses lie in the arena; this thread alone polls.
        while !unsafe { ping.poll(&block) } {
            thread::yield_now();
        }
        assert_eq!(read(&memory, memory.plain(0)), 5);
        // SAFETY: as above. There was one signal, and it is taken.
        assert!(!unsafe { ping.poll(&block) });
        join(there);
    });
}

/// One thread writes and signals, the other waits and reads, by the given means.
fn publish(
    signal: impl Fn(&Semaphore, &LoomBlock) + Copy + Send + Sync + 'static,
    wait: impl Fn(&Semaphore, &LoomBlock) + Copy + Send + Sync + 'static,
) {
    model(move || {
        let memory = Rc::new(LoomMemory::new(4, 1));
        let [ping, pong] = semaphore_pair(&memory);
        let there = {
            let memory = memory.clone();
            thread::spawn(move || {
                write(&memory, memory.plain(0), 5);
                signal(&pong, &LoomBlock::new(&memory));
            })
        };
        wait(&ping, &LoomBlock::new(&memory));
        assert_eq!(read(&memory, memory.plain(0)), 5);
        join(there);
    });
}

fn signal(semaphore: &Semaphore, block: &LoomBlock) {
    // SAFETY: the handle's addresses lie in the arena.
    unsafe { semaphore.signal(block) }
}

fn relaxed_signal(semaphore: &Semaphore, block: &LoomBlock) {
    // SAFETY: the handle's addresses lie in the arena.
    unsafe { semaphore.relaxed_signal(block) }
}

fn wait(semaphore: &Semaphore, block: &LoomBlock) {
    // SAFETY: the handle's addresses lie in the arena; one thread waits.
    unsafe { semaphore.wait(block, OP) }.expect("nothing stops it");
}

fn relaxed_wait(semaphore: &Semaphore, block: &LoomBlock) {
    // SAFETY: the handle's addresses lie in the arena; one thread waits.
    unsafe { semaphore.relaxed_wait(block, OP) }.expect("nothing stops it");
}

#[test]
fn a_signal_publishes_to_its_wait() {
    publish(signal, wait);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_a_relaxed_signal_publishes_nothing() {
    publish(relaxed_signal, wait);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_a_relaxed_wait_sees_nothing() {
    publish(signal, relaxed_wait);
}

#[test]
fn two_signallers_are_both_waited_for() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(4, 2));
        let [ping, pong] = semaphore_pair(&memory);
        let signallers = [0, 1].map(|i| {
            let memory = memory.clone();
            thread::spawn(move || {
                write(&memory, memory.plain(i), 5 + i);
                signal(&pong, &LoomBlock::new(&memory));
            })
        });
        let block = LoomBlock::new(&memory);
        wait(&ping, &block);
        wait(&ping, &block);
        assert_eq!(read(&memory, memory.plain(0)), 5);
        assert_eq!(read(&memory, memory.plain(1)), 6);
        for signaller in signallers {
            join(signaller);
        }
        // SAFETY: a word of the arena.
        assert_eq!(unsafe { memory.load(ping.expected) }, 2);
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_one_wait_for_two_signallers() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(4, 2));
        let [ping, pong] = semaphore_pair(&memory);
        let signallers = [0, 1].map(|i| {
            let memory = memory.clone();
            thread::spawn(move || {
                write(&memory, memory.plain(i), 5 + i);
                signal(&pong, &LoomBlock::new(&memory));
            })
        });
        wait(&ping, &LoomBlock::new(&memory));
        assert_eq!(read(&memory, memory.plain(0)), 5);
        assert_eq!(read(&memory, memory.plain(1)), 6);
        for signaller in signallers {
            join(signaller);
        }
    });
}

// ---- abort ----

#[test]
fn an_aborted_wait_takes_no_signal() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(5, 1));
        let [ping, pong] = semaphore_pair(&memory);
        let abort = memory.atomic(4);
        let aborter = {
            let memory = memory.clone();
            thread::spawn(move || {
                // SAFETY: a word of the arena.
                unsafe { memory.store(abort, 1) };
            })
        };
        let signaller = {
            let memory = memory.clone();
            thread::spawn(move || {
                write(&memory, memory.plain(0), 5);
                signal(&pong, &LoomBlock::new(&memory));
            })
        };
        let mut block = LoomBlock::new(&memory);
        block.abort = Some(abort);
        // SAFETY: the handle's addresses lie in the arena; this thread alone waits.
        let outcome = unsafe { ping.wait(&block, OP) };
        // SAFETY: a word of the arena.
        let taken = unsafe { memory.load(ping.expected) };
        match outcome {
            Ok(()) => assert_eq!(taken, 1),
            Err(stopped) => {
                assert_eq!((stopped, taken), (Stopped::Aborted, 0));
                // The signal is still there to be taken.
                wait(&ping, &LoomBlock::new(&memory));
            }
        }
        assert_eq!(read(&memory, memory.plain(0)), 5);
        join(aborter);
        join(signaller);
    });
}

#[test]
fn an_aborted_wait_without_a_signal_ends() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(5, 0));
        let [ping, _] = semaphore_pair(&memory);
        let abort = memory.atomic(4);
        let aborter = {
            let memory = memory.clone();
            thread::spawn(move || {
                // SAFETY: a word of the arena.
                unsafe { memory.store(abort, 1) };
            })
        };
        let mut block = LoomBlock::new(&memory);
        block.abort = Some(abort);
        // SAFETY: the handle's addresses lie in the arena; this thread alone waits.
        assert_eq!(unsafe { ping.wait(&block, OP) }, Err(Stopped::Aborted));
        // SAFETY: as above.
        let outcome = unsafe { ping.relaxed_wait(&block, OP) };
        assert_eq!(outcome, Err(Stopped::Aborted));
        // SAFETY: a word of the arena.
        assert_eq!(unsafe { memory.load(ping.expected) }, 0);
        join(aborter);
    });
}

// ---- packets ----

/// Two ranks, both sending `bytes` bytes to the other in every epoch, as [`run_block`] does.
/// Rank `r` has `halves` times the packets from word `4 r` on, its source at plain word `4 r` and
/// its destination two words later.
fn exchange(memory: &Rc<LoomMemory>, me: u64, bytes: u64, epochs: u64, halves: u64) {
    let block = LoomBlock::new(memory);
    let words = bytes.div_ceil(packet::PAYLOAD);
    let value = |epoch, rank| 0x0706_0504_0302_0100 + epoch * 0x1010_1010_1010_1010 + rank * 8;
    let low = u64::MAX >> (64 - 8 * bytes);
    let (src, dst) = (memory.plain(4 * me), memory.plain(4 * me + 2));
    let site = Site {
        kind: WaitKind::Packet,
        ..Site::default()
    };
    for epoch in 1..=epochs {
        memory.fence();
        let half = epoch % halves * words;
        write(memory, src, value(epoch, me));
        let to = memory.atomic(4 * (1 - me) + half);
        let from = memory.atomic(4 * me + half);
        // SAFETY: all ranges lie in the arena.
        unsafe {
            copy_to_packets(&block, to, src, bytes, flag_of(epoch, 4));
            copy_from_packets(&block, site, dst, from, bytes, flag_of(epoch, 4))
                .expect("nothing stops it");
        }
        assert_eq!(read(memory, dst) & low, value(epoch, 1 - me) & low);
    }
}

fn exchange_between_two(bytes: u64, epochs: u64, halves: u64) {
    model(move || {
        let memory = Rc::new(LoomMemory::new(8, 8));
        let there = {
            let memory = memory.clone();
            thread::spawn(move || exchange(&memory, 1, bytes, epochs, halves))
        };
        exchange(&memory, 0, bytes, epochs, halves);
        join(there);
    });
}

#[test]
fn packets_in_two_halves_need_no_barrier() {
    exchange_between_two(4, 3, 2);
}

#[test]
fn packets_in_pairs() {
    exchange_between_two(8, 1, 2);
}

#[test]
fn packets_of_two_words_with_a_tail() {
    exchange_between_two(6, 2, 2);
}

#[test]
#[should_panic(expected = "overtaken")]
fn broken_packets_in_one_half() {
    exchange_between_two(4, 3, 1);
}

/// What makes a packet's words reusable: all that a rank did in an execution is over before the
/// other rank's execution after the next begins, through relaxed packets and a fence at the start of
/// each. Here rank 0 writes a plain word in execution 1, and rank 1 in execution 3.
fn reuse(fences: bool) {
    model(move || {
        let memory = Rc::new({
            let mut memory = LoomMemory::new(4, 1);
            memory.fences = fences;
            memory
        });
        let rank = |memory: Rc<LoomMemory>, me: u64| {
            move || {
                let block = LoomBlock::new(&memory);
                let site = Site {
                    kind: WaitKind::Packet,
                    ..Site::default()
                };
                for epoch in 1..=3 {
                    let at = |rank: u64| memory.atomic(2 * rank + epoch % 2);
                    let flag = flag_of(epoch, 4);
                    memory.fence();
                    if me == 1 && epoch == 3 {
                        write(&memory, memory.plain(0), 2);
                    }
                    // SAFETY: words of the arena.
                    unsafe {
                        packet::write_packet(&*memory, at(1 - me), 1, flag);
                        packet::read_packet(&block, site, at(me), flag).expect("nothing stops it");
                    }
                    if me == 0 && epoch == 1 {
                        write(&memory, memory.plain(0), 1);
                    }
                }
            }
        };
        let there = thread::spawn(rank(memory.clone(), 1));
        rank(memory.clone(), 0)();
        join(there);
        assert_eq!(read(&memory, memory.plain(0)), 2);
    });
}

#[test]
fn an_execution_is_over_before_the_peer_begins_the_one_after_the_next() {
    reuse(true);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_executions_without_a_fence() {
    reuse(false);
}

// ---- fifo ----

/// Head in word 0, tail in word 1, the ring from word 4 on.
fn fifo(memory: &LoomMemory, capacity: u32) -> Fifo {
    Fifo {
        ring: memory.atomic(4),
        head: memory.atomic(0),
        tail: memory.atomic(1),
        capacity,
        id: 3,
    }
}

fn fifo_words(capacity: u32) -> u64 {
    4 + u64::from(capacity) * TRIGGER_BYTES / 8
}

/// A trigger whose every field tells who pushed it, as which one.
fn trigger(producer: u64, index: u64) -> Trigger {
    let id = producer * 4 + index + 1;
    Trigger {
        kind: if index == 0 {
            TriggerKind::PUT
        } else {
            TriggerKind::SIGNAL.with(TriggerKind::FLUSH)
        },
        channel: id as u32 | 0xf_0000,
        dst_memory: id as u32 | 0x8_0000,
        src_memory: id as u32,
        dst_offset: id << 40,
        src_offset: u64::MAX - id,
        size: id,
    }
}

/// Takes in order the triggers that the producers push, `pushes[p]` of producer `p`; for each the
/// payload that was written before its push must be there.
fn consume(memory: &LoomMemory, fifo: &Fifo, pushes: &[u64]) {
    let all = pushes.iter().sum();
    let mut next = vec![0; pushes.len()];
    for position in 0..all {
        let taken = loop {
            // SAFETY: the handle's addresses lie in the arena; this thread alone pops.
            match unsafe { fifo.poll(memory, position) } {
                Some(taken) => break taken,
                None => thread::yield_now(),
            }
        };
        // It is the next one of one of the producers, whole.
        let producer = (0..pushes.len())
            .find(|&p| next[p] < pushes[p] && trigger(p as u64, next[p]) == taken)
            .expect("a trigger that nobody pushed, twice, or out of order");
        let index = next[producer];
        next[producer] += 1;
        let number = producer as u64 * 4 + index;
        assert_eq!(read(memory, memory.plain(number)), 100 + index);
        // The answer to whoever waits for this trigger.
        write(memory, memory.plain(8 + number), 200 + index);
        // SAFETY: as above.
        unsafe { fifo.publish_handled(memory, position + 1) };
    }
    // SAFETY: as above.
    assert_eq!(unsafe { fifo.poll(memory, all) }, None);
}

/// Pushes, each after a plain write of its payload; then waits for the last of them if asked to.
fn produce(memory: &Rc<LoomMemory>, fifo: &Fifo, producer: u64, pushes: u64, flush: bool) {
    let block = LoomBlock::new(memory);
    for index in 0..pushes {
        let number = producer * 4 + index;
        write(memory, memory.plain(number), 100 + index);
        // SAFETY: the handle's addresses lie in the arena.
        let position =
            unsafe { fifo.push(&block, OP, &trigger(producer, index)) }.expect("nothing stops it");
        if flush && index + 1 == pushes {
            // SAFETY: as above.
            unsafe { fifo.wait_handled(&block, OP, position) }.expect("nothing stops it");
            assert_eq!(read(memory, memory.plain(8 + number)), 200 + index);
        }
    }
}

/// One consumer, and so many pushes of one or more producers.
fn share_a_fifo<const P: usize>(
    preemptions: Option<usize>,
    capacity: u32,
    pushes: [u64; P],
    flush: bool,
) {
    bounded_model(preemptions, move || {
        let memory = Rc::new(LoomMemory::new(fifo_words(capacity), 16));
        let fifo = fifo(&memory, capacity);
        let mut producer = 0;
        let producers = pushes.map(|pushes| {
            let (memory, me) = (memory.clone(), producer);
            producer += 1;
            thread::spawn(move || produce(&memory, &fifo, me, pushes, flush))
        });
        consume(&memory, &fifo, &pushes);
        for producer in producers {
            join(producer);
        }
    });
}

#[test]
fn a_fifo_wraps_and_answers() {
    share_a_fifo(None, 2, [3], true);
}

#[test]
fn two_producers_of_one_trigger_each() {
    share_a_fifo(None, 1, [1, 1], false);
}

// Three threads with a dozen atomic operations and a spinning loop each: everything is out of reach,
// so these have few preemptions; the models above have no bound. With one more, the first of them
// runs into a schedule that is not fair (two spinning threads yield to each other for ever, and the
// one that they wait for, which itself waits for nothing, never runs), which loom takes for an error.

#[test]
fn two_producers_of_two_triggers_each() {
    share_a_fifo(Some(1), 2, [2, 2], false);
}

#[test]
fn two_producers_of_two_triggers_and_one() {
    share_a_fifo(Some(3), 2, [2, 1], false);
}

#[test]
fn a_full_fifo_blocks() {
    model(|| {
        let memory = Rc::new(LoomMemory::new(fifo_words(2), 8));
        let fifo = fifo(&memory, 2);
        produce(&memory, &fifo, 0, 2, false);
        let mut block = LoomBlock::new(&memory);
        block.patience = 2;
        // SAFETY: the handle's addresses lie in the arena.
        let full = unsafe { fifo.push(&block, OP, &trigger(1, 0)) };
        assert_eq!(full, Err(Stopped::Deadline));
        // Nothing was written over.
        for position in 0..2 {
            // SAFETY: as above.
            let kept = unsafe { fifo.poll(&*memory, position) };
            assert_eq!(kept, Some(trigger(0, position)));
        }
        // SAFETY: as above.
        assert_eq!(unsafe { fifo.poll(&*memory, 2) }, None);
        // SAFETY: as above.
        let handled = unsafe { fifo.wait_handled(&block, OP, 0) };
        assert_eq!(handled, Err(Stopped::Deadline));
    });
}

// ---- the executor ----

/// A sum of `u32`s through [`LoomMemory`].
struct LoomReducer;

impl Reducer for LoomReducer {
    unsafe fn reduce<B: Block, S: Fn(u32) -> Location, D: Fn(u32) -> Location>(
        &self,
        block: &B,
        sources: &Sources<S>,
        destinations: &Sources<D>,
        elements: u64,
        _divisor: u32,
        flag: u32,
    ) -> Result<(), Stopped> {
        let memory = block.memory();
        for i in 0..elements {
            let mut sum = 0_u32;
            for k in 0..sources.count {
                let from = (sources.at)(k);
                // SAFETY: the caller promises the sources.
                let value = unsafe {
                    match from.packets {
                        Some(site) => {
                            packet::read_packet(block, site, from.addr + i * packet::WORD, flag)?
                        }
                        None => memory.read::<u32>(from.addr + i * 4),
                    }
                };
                sum = sum.wrapping_add(value);
            }
            for k in 0..destinations.count {
                let to = (destinations.at)(k);
                assert!(to.packets.is_none());
                // SAFETY: the caller promises the destinations.
                unsafe { memory.write(to.addr + i * 4, sum) };
            }
        }
        Ok(())
    }
}

/// Plain words of a rank's tables and buffers.
const RANK_WORDS: u64 = 64;
/// Atomic words of a rank: three counters a line each, then two halves of two packet slots.
const RANK_ATOMICS: u64 = 2 * COUNTER_STRIDE / 8 + 16;

/// Words of a thread block's tables in the model of a barrier.
const BLOCK_WORDS: u64 = 46;

/// Where a rank's input lies, and then its output.
fn buffer(memory: &LoomMemory, rank: u64) -> u64 {
    memory.plain(rank * RANK_WORDS + 56)
}

/// Bytes of an operation and of an operand in their tables.
const OP_BYTES: u64 = size_of::<Op>() as u64;
const OPERAND_BYTES: u64 = size_of::<Operand>() as u64;

/// Lays out a one-shot packet all-reduce of two ranks for one of them: every slot is one chunk of
/// 16 bytes.
fn one_shot(memory: &LoomMemory, rank: u32, epoch: u64) -> Program {
    let tables = memory.plain(u64::from(rank) * RANK_WORDS);
    let counters = |rank: u32| memory.atomic(u64::from(rank) * RANK_ATOMICS);
    let packets = |rank: u32| counters(rank) + 2 * COUNTER_STRIDE;
    let program = Program {
        tables,
        stride: RANK_WORDS * 8,
        semaphores: 0,
        ports: 0,
        memories: 0,
        counters: counters(rank),
        scratch_half: 0,
        packets_half: 64,
        rank,
        ranks: 2,
        block_count: 1,
        barriers: 0,
        chunks: 1,
        element: 4,
    };
    let peer = 1 - rank;
    let operand = |space, rank, index| Operand {
        space,
        rank,
        block: 0,
        index,
        peer,
    };
    let bases = tables + BASES_AT;
    let ops_at = BASES_AT + 2 * SPACES * 8;
    let operands_at = ops_at + 2 * OP_BYTES;
    let op = |kind, first_operand: u64, sources| Op {
        kind,
        index: 0,
        chunk: 0,
        chunks: 1,
        slice: 0,
        slices: 1,
        operands_at: (operands_at + first_operand * OPERAND_BYTES) as u32,
        sources,
        destinations: 1,
        links_at: 0,
        links: 0,
        flags: flags::LAST,
        unit: 0,
    };
    let input = operand(Space::Input, rank, 0);
    let operands = [
        input,
        operand(Space::Packets, peer, rank),
        input,
        operand(Space::Packets, rank, peer),
        operand(Space::Output, rank, 0),
    ];
    let ops = [op(OpKind::Move, 0, 1), op(OpKind::Reduce, 2, 2)];
    // SAFETY: the tables lie in this rank's part of the arena.
    unsafe {
        let ops_at_word = ops_at as u32;
        memory.write(
            tables,
            BlockOps {
                count: 2,
                ops_at: ops_at_word,
            },
        );
        for (i, op) in ops.into_iter().enumerate() {
            memory.write(tables + ops_at + i as u64 * OP_BYTES, op);
        }
        for (i, operand) in operands.into_iter().enumerate() {
            memory.write(tables + operands_at + i as u64 * OPERAND_BYTES, operand);
        }
        for r in 0..2 {
            let entry = bases + (u64::from(r) * SPACES + Space::Packets as u64) * 8;
            memory.write(entry, packets(r));
        }
        memory.store(program.counters, epoch);
    }
    program
}

/// `executions` in a row of one rank; what it contributes and gets changes from one to the next.
fn launches(memory: &Rc<LoomMemory>, program: &Program, executions: u64) {
    let block = LoomBlock::new(memory);
    let rank = u64::from(program.rank);
    let value = |execution: u64, rank: u64| (execution * 16 + rank * 3 + 1) as u32;
    let launch = Launch {
        input: buffer(memory, rank),
        output: buffer(memory, rank) + 8,
        input_offset: 0,
        output_offset: 0,
        bytes: 4,
    };
    for execution in 0..executions {
        // SAFETY: the buffers lie in this rank's part of the arena, and the program is laid out.
        unsafe {
            memory.write(launch.input, value(execution, rank));
            run_block(&block, &LoomReducer, program, &launch, 0).expect("nothing stops it");
            let sum: u32 = memory.read(launch.output);
            assert_eq!(sum, value(execution, 0) + value(execution, 1));
        }
    }
    // SAFETY: the counters lie in the arena.
    let left = unsafe { memory.load(program.counters + COUNTER_STRIDE) };
    assert_eq!(left, 0);
}

fn execute(epoch: u64, executions: u64) {
    model(move || {
        let memory = Rc::new(LoomMemory::new(2 * RANK_ATOMICS, 2 * RANK_WORDS));
        let [zero, one] = [0, 1].map(|rank| one_shot(&memory, rank, epoch));
        let there = {
            let memory = memory.clone();
            thread::spawn(move || launches(&memory, &one, executions))
        };
        launches(&memory, &zero, executions);
        join(there);
        // SAFETY: the counters lie in the arena.
        let ends = [zero, one].map(|program| unsafe { memory.load(program.counters) });
        assert_eq!(ends, [epoch + executions; 2]);
    });
}

#[test]
fn a_program_runs_twice_in_a_row() {
    execute(1, 2);
}

#[test]
fn a_program_runs_across_a_scrub() {
    // The first execution is one that ends with clearing its half; the third uses it again.
    execute(1 << 18, 3);
}

#[test]
fn blocks_of_a_rank_meet_at_a_barrier_and_one_of_them_ends_the_execution() {
    model(|| {
        // Two blocks of one rank: each writes its word, meets the other, reads the other's word.
        let memory = Rc::new(LoomMemory::new(3 * COUNTER_STRIDE / 8, 2 * RANK_WORDS));
        let tables = memory.plain(0);
        let program = Program {
            tables,
            stride: BLOCK_WORDS * 8,
            semaphores: 0,
            ports: 0,
            memories: 0,
            counters: memory.atomic(0),
            scratch_half: 0,
            packets_half: 0,
            rank: 0,
            ranks: 1,
            block_count: 2,
            barriers: 1,
            chunks: 1,
            element: 4,
        };
        let [input, output, scratch] = [92, 96, 100].map(|i| memory.plain(i));
        // SAFETY: the tables lie in the arena.
        unsafe {
            for block in 0..2 {
                let tables = tables + u64::from(block) * BLOCK_WORDS * 8;
                let ops_at = BASES_AT + SPACES * 8;
                let operands_at = ops_at + 3 * OP_BYTES;
                memory.write(
                    tables,
                    BlockOps {
                        count: 3,
                        ops_at: ops_at as u32,
                    },
                );
                let op = |kind, slice, first_operand: u64, links| Op {
                    kind,
                    index: 0,
                    chunk: 0,
                    chunks: 1,
                    slice,
                    slices: 2,
                    operands_at: (operands_at + first_operand * OPERAND_BYTES) as u32,
                    sources: 1,
                    destinations: 1,
                    links_at: 0,
                    links,
                    flags: 0,
                    unit: 0,
                };
                let ops = [
                    op(OpKind::Move, block, 0, 0),
                    op(OpKind::Barrier, 0, 0, 2),
                    op(OpKind::Move, 1 - block, 2, 0),
                ];
                for (i, op) in ops.into_iter().enumerate() {
                    memory.write(tables + ops_at + i as u64 * OP_BYTES, op);
                }
                let operand = |space| Operand {
                    space,
                    rank: 0,
                    block: 0,
                    index: 0,
                    peer: 0,
                };
                let operands = [Space::Input, Space::Scratch, Space::Scratch, Space::Output];
                for (i, space) in operands.into_iter().enumerate() {
                    let entry = tables + operands_at + i as u64 * OPERAND_BYTES;
                    memory.write(entry, operand(space));
                }
                memory.write(tables + BASES_AT + Space::Scratch as u64 * 8, scratch);
            }
            memory.store(program.counters, 1);
            for i in 0..4 {
                memory.write(input + i * 8, 10 + i);
            }
        }
        let launch = Launch {
            input,
            output,
            input_offset: 0,
            output_offset: 0,
            bytes: 32,
        };
        let run = move |memory: Rc<LoomMemory>, index| {
            let block = LoomBlock::new(&memory);
            // SAFETY: the program is laid out; the buffers lie in the arena.
            unsafe { run_block(&block, &LoomReducer, &program, &launch, index) }
                .expect("nothing stops it");
        };
        let there = {
            let memory = memory.clone();
            thread::spawn(move || run(memory, 1))
        };
        run(memory.clone(), 0);
        join(there);
        // SAFETY: the counters lie in the arena.
        let (epoch, left) = unsafe {
            (
                memory.load(program.counters),
                memory.load(program.counters + COUNTER_STRIDE),
            )
        };
        assert_eq!((epoch, left), (2, 0));
        for i in 0..4 {
            assert_eq!(read(&memory, output + i * 8), 10 + i);
        }
    });
}

// ---- streams ----

/// Words of a slot: four of header and one of payload.
const SLOT_WORDS: u64 = 5;
/// Words of a line, all of which are stored and loaded.
const LINE_WORDS: u64 = 8;

/// What two ranks exchange, and in what. Words of the arena: for each rank the line that its peer reports on and
/// the ring that it receives in, and then what is its own: streams, the fault, a registered memory's places,
/// transfers, chains and buffers.
#[derive(Clone, Copy)]
struct Pair {
    slots: u64,
    /// Words of each message from rank 0 to rank 1, and of each the other way.
    messages: [&'static [u64]; 2],
    offered: bool,
    /// Whether each rank has one message, of which a block of its own takes care.
    single: bool,
}

/// Words of a transfer.
const TRANSFER_WORDS: u64 = size_of::<Transfer>() as u64 / 8;

/// Words of a rank's own: two streams, a fault, two places, transfers, the first of each chain.
const STREAMS: u64 = 0;
const FAULT: u64 = STREAMS + 16;
const MAPPED: u64 = FAULT + 5;
const TRANSFERS: u64 = MAPPED + 4;
const CHAINS: u64 = TRANSFERS + 6 * TRANSFER_WORDS;
const BUFFERS: u64 = CHAINS + 2 * TRANSFER_WORDS;
const OWN_WORDS: u64 = BUFFERS + 12;

impl Pair {
    fn shared_words(&self) -> u64 {
        LINE_WORDS + self.slots * SLOT_WORDS
    }

    fn memory(&self) -> LoomMemory {
        let line = (0..LINE_WORDS).map(|_| true);
        let ring = (0..self.slots).flat_map(|_| (0..SLOT_WORDS).map(|word| word == 0));
        let own = (0..OWN_WORDS).map(|_| false);
        let rank: Vec<_> = line.chain(ring).chain(own).collect();
        LoomMemory::mixed([rank.clone(), rank].concat())
    }

    fn line(&self, rank: u64) -> u64 {
        BASE + rank * (self.shared_words() + OWN_WORDS) * 8
    }

    fn ring(&self, rank: u64) -> u64 {
        self.line(rank) + LINE_WORDS * 8
    }

    fn own(&self, rank: u64, word: u64) -> u64 {
        self.line(rank) + (self.shared_words() + word) * 8
    }

    fn value(from: u64, message: u64, word: u64) -> u64 {
        from << 32 | message << 16 | (word + 1)
    }

    /// One launch of rank `me`; its messages must arrive.
    fn run(&self, memory: &Rc<LoomMemory>, me: u64) -> Result<(), Stopped> {
        let peer = 1 - me;
        let own = |word| self.own(me, word);
        let streams = Streams {
            outgoing: Outgoing {
                ring: self.ring(peer),
                reports: self.line(me),
                ..Outgoing::default()
            },
            incoming: Incoming {
                ring: self.ring(me),
                reports: self.line(peer),
                ..Incoming::default()
            },
        };
        let mapped = Mapped {
            address: self.own(peer, BUFFERS),
            bytes: 12 * 8,
        };
        // SAFETY: of both, here and below: the arena has room for them.
        unsafe {
            memory.write(own(STREAMS + peer * 8), streams);
            memory.write(own(MAPPED + peer * 2), mapped);
        }
        let (mut count, mut chains, mut used) = (0, 0, 0);
        let mut received = Vec::new();
        for (direction, from) in [(Direction::Send, me), (Direction::Receive, peer)] {
            let messages = self.messages[from as usize];
            for (index, &words) in (0..).zip(messages) {
                let address = own(BUFFERS + used);
                if direction == Direction::Send {
                    for word in 0..words {
                        write(memory, address + word * 8, Self::value(from, index, word));
                    }
                } else {
                    received.push((address, index, words));
                }
                let transfer = Transfer {
                    address,
                    envelope: Envelope {
                        bytes: words * 8,
                        kind: 1,
                    },
                    bytes: words * 8,
                    place: used * 8,
                    done: 0,
                    peer: peer as u32,
                    lane: 0,
                    direction,
                    memory: if self.offered { 0 } else { NO_MEMORY },
                    next: match index + 1 < messages.len() as u64 {
                        true => count + 1,
                        false => NONE,
                    },
                    op: 0,
                    state: State::New,
                    reserved: 0,
                };
                // SAFETY: as above.
                unsafe {
                    let at = own(TRANSFERS + u64::from(count) * TRANSFER_WORDS);
                    memory.write(at, transfer);
                    if index == 0 {
                        memory.write(own(CHAINS + chains * TRANSFER_WORDS), transfer);
                        chains += 1;
                    }
                }
                count += 1;
                used += words;
            }
        }
        let exchange = Exchange {
            streams: own(STREAMS),
            mapped: own(MAPPED),
            faults: own(FAULT),
            own: self.line(me),
            slot_bytes: SLOT_WORDS * 8,
            lines: 0,
            slots: self.slots as u32,
            rank: me as u32,
            ranks: 2,
            element: 8,
            memories: 1,
        };
        let transfers = Transfers {
            chains: own(CHAINS),
            followers: own(TRANSFERS),
            count: chains as u32,
            blocks: 1,
            launch: 0,
            reserved: 0,
        };
        let desk = Desk {
            chains: own(CHAINS),
            board: 0,
        };
        let block = LoomBlock::new(memory);
        // SAFETY: as above; each rank has its own tables and buffers.
        unsafe {
            if self.single {
                let (transfer, board) = (memory.read(own(TRANSFERS)), own(CHAINS));
                exchange::run_single(&block, &exchange, &transfers, 0, &transfer, board)?;
            } else {
                exchange::run_block(&block, &LoomReducer, &exchange, &transfers, 0, desk)?;
            }
        }
        for (address, index, words) in received {
            for word in 0..words {
                let value = Self::value(peer, index, word);
                assert_eq!(read(memory, address + word * 8), value);
            }
        }
        // The buffers of sends may be changed now.
        for word in 0..self.messages[me as usize].iter().sum() {
            write(memory, own(BUFFERS + word), 0);
        }
        Ok(())
    }

    /// Both ranks, with release stores relaxed where `relaxed` says.
    fn model(self, preemptions: Option<usize>, relaxed: fn(&Self) -> Range<u64>) {
        bounded_model(preemptions, move || {
            let memory = Rc::new({
                let mut memory = self.memory();
                memory.relaxed = relaxed(&self);
                memory
            });
            let there = {
                let memory = memory.clone();
                thread::spawn(move || self.run(&memory, 1).expect("nothing stops it"))
            };
            self.run(&memory, 0).expect("nothing stops it");
            join(there);
        });
    }
}

fn nowhere(_: &Pair) -> Range<u64> {
    0..0
}

#[test]
fn messages_go_round_a_ring_of_slots() {
    let messages: [&[u64]; 2] = [&[1, 0, 1], &[]];
    Pair {
        slots: 2,
        messages,
        offered: false,
        single: false,
    }
    .model(None, nowhere);
}

#[test]
fn messages_larger_than_the_ring_both_ways() {
    let messages: [&[u64]; 2] = [&[2], &[2]];
    Pair {
        slots: 1,
        messages,
        offered: false,
        single: false,
    }
    .model(Some(2), nowhere);
}

#[test]
fn an_offered_message_is_read_before_its_buffer_changes() {
    let messages: [&[u64]; 2] = [&[2, 1], &[]];
    Pair {
        slots: 2,
        messages,
        offered: true,
        single: false,
    }
    .model(None, nowhere);
}

#[test]
fn a_message_with_a_block_of_its_own_goes_through_slots_or_is_offered() {
    for (slots, offered) in [(1, false), (2, false), (1, true)] {
        let messages: [&[u64]; 2] = [&[2], &[]];
        Pair {
            slots,
            messages,
            offered,
            single: true,
        }
        .model(None, nowhere);
    }
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_a_block_of_its_own_publishes_nothing_by_a_relaxed_flag() {
    let messages: [&[u64]; 2] = [&[1], &[]];
    Pair {
        slots: 1,
        messages,
        offered: false,
        single: true,
    }
    .model(None, |pair| pair.ring(1)..pair.ring(1) + 8);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_a_block_of_its_own_gives_a_slot_back_without_order() {
    let messages: [&[u64]; 2] = [&[2], &[]];
    Pair {
        slots: 1,
        messages,
        offered: false,
        single: true,
    }
    .model(None, |pair| pair.line(0)..pair.line(0) + 8);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_a_relaxed_flag_publishes_no_message() {
    let messages: [&[u64]; 2] = [&[1], &[]];
    Pair {
        slots: 1,
        messages,
        offered: false,
        single: false,
    }
    .model(None, |pair| pair.ring(1)..pair.ring(1) + 8);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_a_slot_given_back_without_order() {
    let messages: [&[u64]; 2] = [&[2], &[]];
    Pair {
        slots: 1,
        messages,
        offered: false,
        single: false,
    }
    .model(None, |pair| pair.line(0)..pair.line(0) + 8);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_an_offer_given_back_without_order() {
    let messages: [&[u64]; 2] = [&[2], &[]];
    Pair {
        slots: 1,
        messages,
        offered: true,
        single: false,
    }
    .model(None, |pair| pair.line(0)..pair.line(0) + 8);
}

#[test]
fn a_refusal_is_heard_by_the_sender_with_both_sizes() {
    model(|| {
        // Rank 0 sends two words, rank 1 asks for one.
        let pair = |words: &'static [u64]| Pair {
            slots: 1,
            messages: [words, &[]],
            offered: false,
            single: false,
        };
        let memory = Rc::new(pair(&[2]).memory());
        let there = {
            let memory = memory.clone();
            thread::spawn(move || {
                assert_eq!(pair(&[1]).run(&memory, 1), Err(Stopped::Mismatch));
            })
        };
        let sender = pair(&[2]);
        assert_eq!(sender.run(&memory, 0), Err(Stopped::Mismatch));
        // SAFETY: the record lies in the arena.
        let fault: exchange::Fault = unsafe { memory.read(sender.own(0, FAULT)) };
        assert_eq!((fault.sender, fault.receiver), (0, 1));
        assert_eq!((fault.sent.bytes, fault.wanted.bytes), (16, 8));
        join(there);
    });
}

// ---- dispatch and combine ----

/// Sums of words.
struct LoomRows;

impl moe::rows::Rows for LoomRows {
    const SEGMENT: u64 = u64::MAX;

    unsafe fn scatter<B: Block>(
        &self,
        block: &B,
        (most, to): (u32, impl Fn(u32) -> u64),
        from: u64,
        bytes: u64,
    ) {
        for to in (0..most).map(to).filter(|&to| to != 0) {
            // SAFETY: the caller's promise.
            unsafe { block.memory().copy(to, from, bytes) };
        }
    }

    unsafe fn sum<B: Block>(
        &self,
        block: &B,
        to: u64,
        (most, term): (u32, impl Fn(u32) -> moe::rows::Term),
        elements: u64,
    ) {
        for at in (0..elements).map(|i| 8 * i) {
            // SAFETY: the caller's promise.
            unsafe {
                let words = (0..most)
                    .map(&term)
                    .filter(|term| term.address != 0)
                    .map(|term| block.memory().read::<u64>(term.address + at));
                let sum: u64 = words.sum();
                block.memory().write(to + at, sum);
            }
        }
    }

    unsafe fn quantise<B: Block>(
        &self,
        _: &B,
        _: (u64, u64),
        _: u64,
        _: u64,
        _: moe::dispatch::Quantise,
    ) {
        unreachable!("nothing is quantised here");
    }
}

/// What two ranks with an expert each do, of which each has one token of one word for each expert. The arena has the
/// memory that ranks reach, then each rank's tables.
#[derive(Clone, Copy)]
enum Moe {
    /// So many dispatches, of which two are under way at a time.
    Dispatches(u64),
    /// A dispatch, and a combine with weights.
    Pass,
}

/// Words of a rank's tables, and where they are.
const MOE_TABLES: u64 = 61;
const MEMORIES: u64 = 0;
const MASKED: u64 = 2;
/// The state's words are a line apart; what else is small lies between.
const STATE: u64 = 4;
const RETURNS: u64 = 5;
const TOTALS: u64 = 6;
const EXPERTS: u64 = 7;
const WEIGHTS: u64 = 8;
const SLOTS: u64 = 9;
const SENT_ROWS: u64 = 10;
const RECEIVED: u64 = 11;
const COUNTS: u64 = 13;
const BEGINS: u64 = 14;
const MOE_BASES: u64 = 16;
const OFFSETS: u64 = 17;
const TOKEN: u64 = 18;
const SUM: u64 = 19;
const POSITIONS: u64 = 21;
const RECEIVED_WEIGHTS: u64 = 23;
const ROWS: u64 = 25;
/// Behind the last line of the state.
const MARKS: u64 = 53;

impl Moe {
    const GEOMETRY: moe::Geometry = moe::Geometry::new(moe::Sizes {
        ranks: 2,
        max_tokens: 1,
        top_k: 2,
        experts: 2,
        payload_bytes: 8,
        lines: false,
    });

    /// Words of the memory that ranks reach, of each rank: a credit for each, then for both parities and sources
    /// packets, flags, weights and a row, a line each.
    const MEMORY: u64 = Self::GEOMETRY.bytes() / 8;

    fn memory() -> LoomMemory {
        assert_eq!(Self::MEMORY, 8 * (2 + 2 * 2 * (1 + 1 + 1 + 1)));
        assert_eq!(STATE + 8 * (moe::STATE_LINES as u64 - 1) + 1, MARKS);
        assert_eq!(MARKS + 2 * Self::GEOMETRY.mark_words(1), MOE_TABLES);
        let shared = (0..Self::MEMORY).map(|word| match (word / 8).checked_sub(2) {
            None => true,
            Some(line) => matches!(line % 4, 0 | 1),
        });
        let is_atomic =
            |word: u64| word >= MARKS || word >= STATE && (word - STATE).is_multiple_of(8);
        let tables = (0..MOE_TABLES).map(is_atomic);
        LoomMemory::mixed(
            shared
                .clone()
                .chain(shared)
                .chain(tables.clone())
                .chain(tables),
        )
    }

    /// Where rank `rank` raises the flag for rows of call number `call` at the other.
    fn flag(rank: u64, call: u64) -> u64 {
        let line = 2 + ((call & 1) * 2 + rank) * 4 + 1;
        BASE + 8 * ((1 - rank) * Self::MEMORY + 8 * line)
    }

    /// Where rank `rank` says to the other what it has read.
    fn credit(rank: u64) -> u64 {
        BASE + 8 * ((1 - rank) * Self::MEMORY + 8 * rank)
    }

    fn run(self, memory: &Rc<LoomMemory>, me: u64) {
        let table = |word: u64| BASE + 8 * (2 * Self::MEMORY + me * MOE_TABLES + word);
        for rank in 0..2 {
            write(
                memory,
                table(MEMORIES + rank),
                BASE + 8 * rank * Self::MEMORY,
            );
        }
        write(memory, table(EXPERTS), 1 << 32);
        let group = moe::Group {
            geometry: Self::GEOMETRY,
            memories: table(MEMORIES),
            own: BASE + 8 * me * Self::MEMORY,
            masked: table(MASKED),
            state: table(STATE),
            marks: table(MARKS),
            returns: table(RETURNS),
            staging: 0,
            staging_bytes: 0,
            salt: 7,
            rank: me as u32,
            blocks: 1,
        };
        let routes = moe::Routes {
            experts: table(EXPERTS),
            weights: table(WEIGHTS),
            slots: table(SLOTS),
            sent: table(SENT_ROWS),
            received: table(RECEIVED),
            counts: table(COUNTS),
            begins: table(BEGINS),
            totals: table(TOTALS),
            bases: table(MOE_BASES),
            offsets: table(OFFSETS),
            positions: table(POSITIONS),
            received_weights: table(RECEIVED_WEIGHTS),
            stride: 0,
            tokens: 1,
            top_k: 2,
            placement: moe::Placement::ExpertMajor,
            alignment: 1,
        };
        let rank = Rank {
            block: LoomBlock::new(memory),
            me,
            table: table(0),
            group,
            routes,
        };
        // SAFETY: the tables lie in the arena, and each rank has its own.
        unsafe {
            match self {
                Self::Dispatches(count) => {
                    for call in 0..count {
                        rank.send(call);
                        if call > 0 {
                            rank.receive(call - 1);
                        }
                    }
                    rank.receive(count - 1);
                }
                Self::Pass => {
                    rank.send(0);
                    rank.receive(0);
                    rank.combine();
                }
            }
        }
    }

    /// Both ranks, with release stores at `relaxed` relaxed.
    fn model(self, preemptions: usize, relaxed: Range<u64>) {
        bounded_model(Some(preemptions), move || {
            let memory = Rc::new({
                let mut memory = Self::memory();
                memory.relaxed = relaxed.clone();
                memory
            });
            let there = {
                let memory = memory.clone();
                thread::spawn(move || self.run(&memory, 1))
            };
            self.run(&memory, 0);
            join(there);
        });
    }
}

/// A rank of a [`Moe`].
struct Rank {
    block: LoomBlock,
    me: u64,
    table: u64,
    group: moe::Group,
    routes: moe::Routes,
}

/// # Safety
/// of all methods: the tables must lie in the arena.
impl Rank {
    const DISPATCH: moe::Call = moe::Call { signature: 1 };

    fn table(&self, word: u64) -> u64 {
        self.table + 8 * word
    }

    /// The token of a rank.
    fn value(rank: u64, call: u64) -> u64 {
        100 * call + 10 * rank + 1
    }

    unsafe fn send(&self, call: u64) {
        let memory = self.block.memory();
        write(memory, self.table(TOKEN), Self::value(self.me, call));
        let input = moe::dispatch::Input {
            tokens: self.table(TOKEN),
            hidden: 1,
            token_bytes: 8,
            payload_bytes: 8,
            call: Self::DISPATCH,
            ..moe::dispatch::Input::default()
        };
        let (group, routes) = (&self.group, &self.routes);
        // SAFETY: the caller's promise.
        unsafe { moe::dispatch::send(&self.block, &LoomRows, group, routes, &input, 0) }.unwrap();
        // It has left.
        write(memory, self.table(TOKEN), 0);
    }

    unsafe fn receive(&self, call: u64) {
        let (block, group, routes) = (&self.block, &self.group, &self.routes);
        let output = moe::dispatch::Output {
            tokens: self.table(ROWS),
            capacity: 2,
            payload_bytes: 8,
            ..moe::dispatch::Output::default()
        };
        // SAFETY: the caller's promise.
        unsafe {
            moe::dispatch::count(block, group, routes, Self::DISPATCH).unwrap();
            moe::dispatch::receive(block, &LoomRows, group, routes, &output, 0).unwrap();
        }
        for rank in 0..2 {
            let found = read(block.memory(), self.table(ROWS + rank));
            assert_eq!(found, Self::value(rank, call));
        }
    }

    /// The expert of rank 1 adds 1000.
    unsafe fn combine(&self) {
        let (block, group, routes) = (&self.block, &self.group, &self.routes);
        for rank in 0..2 {
            let made = Self::value(rank, 0) + 1000 * self.me;
            write(block.memory(), self.table(ROWS + rank), made);
        }
        let input = moe::combine::Input {
            rows: self.table(ROWS),
            weights: self.table(WEIGHTS),
            hidden: 1,
            payload_bytes: 8,
            weighting: moe::combine::Weighting::Given,
            call: moe::Call { signature: 2 },
        };
        let (rows, sum) = (&LoomRows, self.table(SUM));
        // SAFETY: the caller's promise.
        unsafe {
            moe::combine::send_weights(block, group, routes, &input, 0).unwrap();
            moe::combine::send(block, rows, group, routes, &input, 0).unwrap();
            moe::combine::receive(block, rows, group, routes, sum, &input, 0).unwrap();
        }
        assert_eq!(
            read(block.memory(), sum),
            2 * Self::value(self.me, 0) + 1000
        );
    }
}

#[test]
fn tokens_of_two_calls_are_under_way_and_their_places_are_used_again() {
    Moe::Dispatches(3).model(2, 0..0);
}

#[test]
fn tokens_go_to_experts_and_back_with_weights_given_late() {
    Moe::Pass.model(1, 0..0);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_rows_whose_flag_publishes_nothing() {
    let flag = Moe::flag(1, 0);
    Moe::Pass.model(2, flag..flag + 8);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn broken_places_given_back_without_order() {
    let credit = Moe::credit(1);
    Moe::Dispatches(3).model(2, credit..credit + 8);
}
