//! Whatever a peer writes into the memory that ranks share, a launch ends by itself: with a result,
//! or with an error at its deadline. Also the bodies of the fuzz targets `control_words` and `message_words`.
//!
//! The peer is rank 1 of a job in this process. All shared memory of the job (scratch, packets,
//! semaphores, bells, boards, rings and lines of streams) is found in /proc/self/maps, and the words of an input are written
//! into it, before rank 0 launches and while it runs.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossweft_channel::Endpoint;
use crossweft_collective::{Algorithm, DataType, ReduceOp};
use crossweft_executor::{
    Destination, Exchange, ExchangeError, ExchangeOptions, ExecutorError, Kind, Options, Prepared,
    Purpose, Source,
};
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};

/// The longest message of a launch.
const BYTES: u64 = 4096;
/// What a launch may take; whatever it does, it ends then.
const LIMIT: Duration = Duration::from_millis(2);

/// The two ends of a job. One at a time uses it.
static JOB: OnceLock<Mutex<[Arc<Endpoint>; 2]>> = OnceLock::new();

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn start() -> Mutex<[Arc<Endpoint>; 2]> {
    let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
    let id = rendezvous.unique_id();
    Mutex::new(both(|rank| {
        let group = Group::join(&id, rank, 2, &JoinOptions::default()).unwrap();
        Endpoint::new(Arc::new(group), soon()).unwrap()
    }))
}

/// Runs something on both ranks.
fn both<T: Send>(run: impl Fn(u32) -> T + Sync) -> [T; 2] {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        [run(0), other.join().unwrap()]
    })
}

/// Memory that other processes might write.
fn shared_memory() -> Vec<(u64, u64)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let parse = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(from)?, number(to)? - number(from)?))
    };
    let shared = maps
        .lines()
        .filter(|line| line.contains("/memfd:crossweft"));
    shared.filter_map(parse).collect()
}

/// One launch of rank 0 against the words of an input.
pub(crate) fn control_words(bytes: &[u8]) {
    let endpoints = JOB.get_or_init(start).lock();
    let endpoints = endpoints.unwrap_or_else(PoisonError::into_inner);
    let mut bytes = bytes.iter().copied();
    let mut byte = || bytes.next().unwrap_or(0);
    let private: Vec<_> = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| !algorithm.needs_registered())
        .collect();
    let algorithm = private[byte() as usize % private.len()];
    let blocks = 1 + u32::from(byte() % 2);
    let plan = algorithm.plan(2, blocks).unwrap();
    let prepared = both(|rank| {
        let options = Options::new(DataType::F32, ReduceOp::Sum, BYTES);
        Prepared::prepare(&endpoints[rank as usize], &plan, options, soon()).unwrap()
    });
    let length = 4 * (1 + usize::from(byte()) * usize::from(byte()) % (BYTES as usize / 4));
    let mode = byte();
    if mode & 1 == 1 {
        // The counters and epochs of a job that has worked before.
        both(|rank| {
            let result =
                prepared[rank as usize].run(&vec![0; length], &mut vec![0; length], LIMIT * 10_000);
            result.unwrap();
        });
    }
    let result = under_attack(&mut byte, mode & 2 == 2, || {
        prepared[0].run(&vec![0; length], &mut vec![0; length], LIMIT)
    });
    match result {
        Ok(()) | Err(ExecutorError::Interrupted { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    assert_alive(&endpoints);
}

/// One group of messages of rank 0 against the words of an input.
pub(crate) fn message_words(bytes: &[u8]) {
    let endpoints = JOB.get_or_init(start).lock();
    let endpoints = endpoints.unwrap_or_else(PoisonError::into_inner);
    let mut bytes = bytes.iter().copied();
    let mut byte = || bytes.next().unwrap_or(0);
    let exchanges = both(|rank| {
        let endpoint = &endpoints[rank as usize];
        let memory = endpoint.allocate(BYTES, "a test").unwrap();
        let memory = endpoint.register(memory, "a test", soon()).unwrap();
        let mut options = ExchangeOptions::new(LIMIT);
        (options.slots, options.slot_bytes) = (2, 256);
        options.memories.push(memory);
        Exchange::prepare(endpoint, options, soon()).unwrap()
    });
    let kind = Kind {
        dtype: DataType::U8,
        purpose: Purpose::Message,
    };
    let length = 1 + usize::from(byte()) * usize::from(byte()) % BYTES as usize;
    let mode = byte();
    let (sent, mut own, mut got) = (vec![1; length], vec![0; length], vec![0; length]);
    let result = under_attack(&mut byte, mode & 2 == 2, || {
        let mut messages = exchanges[0].messages();
        for peer in 0..2 {
            messages.send(peer, kind, Source::Slice(&sent));
        }
        messages.receive(0, kind, Destination::Slice(&mut own));
        messages.receive(1, kind, Destination::Slice(&mut got));
        messages.run()
    });
    match result {
        Ok(())
        | Err(
            ExchangeError::Interrupted { .. }
            | ExchangeError::Mismatch { .. }
            | ExchangeError::PeerFailed { .. },
        ) => {}
        Err(error) => panic!("{error}"),
    }
    assert_alive(&endpoints);
}

/// Launches while the words of an input are written into the memory that ranks share: before, and again and
/// again if `on`.
fn under_attack<T>(byte: &mut impl FnMut() -> u8, on: bool, launch: impl FnOnce() -> T) -> T {
    let memory = shared_memory();
    let mut words = Vec::new();
    loop {
        let (which, at) = (
            usize::from(byte()),
            u64::from(byte()) << 8 | u64::from(byte()),
        );
        let word = match byte() {
            0 => break,
            // Values around those that are waited for, and around every edge.
            kind @ 1..=40 => u64::from(kind) << (byte() % 64),
            kind @ 41..=80 => (u64::from(kind) << 32 | 1).wrapping_sub(byte().into()),
            kind @ 81..=120 => u64::MAX - u64::from(kind),
            _ => u64::from_le_bytes(std::array::from_fn(|_| byte())),
        };
        let (base, size) = memory[which % memory.len()];
        words.push((base + at * 8 % size, word));
    }
    let process = File::options().write(true).open("/proc/self/mem").unwrap();
    let write = || {
        for (addr, word) in &words {
            process.write_all_at(&word.to_ne_bytes(), *addr).unwrap();
        }
    };
    write();
    let started = Instant::now();
    let ended = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        if on {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    write();
                }
            });
        }
        let result = launch();
        ended.store(true, Ordering::Relaxed);
        result
    });
    // Time enough for any machine; a loop without end takes longer.
    let took = started.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
    result
}

/// Nobody was taken for dead.
fn assert_alive(endpoints: &[Arc<Endpoint>; 2]) {
    assert_eq!(endpoints[0].group().liveness().failure(), None);
}

#[cfg(test)]
mod tests {
    use super::{control_words, message_words};

    /// Rounds of random words in shared memory.
    fn rounds(seed: u64, rounds: u32, attack: fn(&[u8])) {
        let mut state = seed;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        for round in 0..rounds {
            let mut input: Vec<u8> = (0..5).map(|_| random(256) as u8).collect();
            for _ in 0..random(40) {
                // Mostly at the beginning of a memory, where counters and flags are.
                let at = [random(16), random(4096)][usize::from(round % 2 == 0)];
                input.extend([random(256) as u8, (at >> 8) as u8, at as u8]);
                input.extend((0..9).map(|_| random(256) as u8 | 1));
            }
            attack(&input);
        }
    }

    #[test]
    fn any_words_in_shared_memory_end_in_a_result_or_at_the_deadline() {
        rounds(0x9e37_79b9_7f4a_7c15, 400, control_words);
    }

    #[test]
    fn any_words_in_streams_end_in_a_result_or_an_error() {
        rounds(0x9e37_79b9_7f4a_7c15, 300, message_words);
    }
}
