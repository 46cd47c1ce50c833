//! The bodies of the fuzz targets: any frames of a peer's proxy, any triggers of a kernel. `fuzz/`
//! runs them under a fuzzer, the tests below on what a hostile peer might try, and on noise.
//!
//! What else a peer may write, the words of shared memory, is in the fuzz targets `control_words` and `message_words`:
//! it takes a whole launch to read them.
#![allow(missing_docs, reason = "for the fuzzer, not for users")]
#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target says no")]

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossweft_device::fifo::{MAX_ID, Trigger, TriggerKind};
use crossweft_hal::cpu::SharedMemory;
use crossweft_net::{Group, JoinOptions, Rendezvous, RendezvousOptions};

use crate::frame::{FRAME, Frame};
use crate::tcp::{Broken, serve};
use crate::{
    ChannelError, Endpoint, PortChannel, ProxyOptions, ProxyService, RegisteredMemory,
    SemaphorePool,
};

/// Bytes of each registered memory.
const BYTES: u64 = 4096;

/// A job of one rank, with memories that requests can name, and a proxy.
struct Job {
    endpoint: Arc<Endpoint>,
    memories: [Arc<RegisteredMemory>; 2],
    proxy: ProxyService,
    _channel: PortChannel,
}

/// One for all inputs: what they write is bytes in its memories.
fn job() -> &'static Job {
    static JOB: OnceLock<Job> = OnceLock::new();
    JOB.get_or_init(|| {
        let deadline = Instant::now() + Duration::from_secs(30);
        let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
        let options = JoinOptions::default();
        let group = Group::join(&rendezvous.unique_id(), 0, 1, &options).unwrap();
        let endpoint = Endpoint::new(Arc::new(group), deadline).unwrap();
        let register = || {
            let memory = SharedMemory::create(BYTES).unwrap();
            endpoint.register(memory, "fuzzing", deadline).unwrap()
        };
        let memories = [register(), register()];
        let semaphores = Arc::new(SemaphorePool::new(&endpoint, &[0], deadline).unwrap());
        let proxy = ProxyService::new(&endpoint, &ProxyOptions::default(), deadline).unwrap();
        let whole = proxy.add_memory(&memories[0]).unwrap();
        let part = proxy.add_range(&memories[1], 64, 1000).unwrap();
        let channel = proxy.channel(&semaphores, 0, whole, part, deadline);
        Job {
            _channel: channel.unwrap(),
            endpoint: Arc::clone(&endpoint),
            memories,
            proxy,
        }
    })
}

/// What a proxy of a peer sends.
pub fn tcp_frames(bytes: &[u8]) {
    let job = job();
    for bytes in bytes.as_chunks::<FRAME>().0 {
        if let Ok(frame) = Frame::decode(bytes) {
            assert_eq!(frame.encode(), *bytes, "one frame, one spelling");
        }
    }
    // The keys that exist are small numbers, so that random ones are met.
    let mut answer = Vec::new();
    match serve(&job.endpoint, 0, bytes, &mut answer) {
        Ok(()) | Err(Broken::Request(_) | Broken::Lost(_)) => {}
        Err(Broken::Own(ChannelError::Memory { .. })) => {}
        Err(error) => panic!("{error:?}"),
    }
    assert!(answer.len() <= bytes.len(), "an answer a flush at most");
    assert!(job.memories.iter().all(|memory| memory.bytes() == BYTES));
    assert!(!job.endpoint.group().liveness().stopped());
}

/// What a kernel pushes: the words of triggers, as the proxy takes them apart.
pub fn triggers(bytes: &[u8]) {
    let job = job();
    let mut carrier = job.proxy.carrier();
    for words in bytes.as_chunks::<32>().0 {
        let word = |index: usize| {
            let bytes = words.as_chunks::<8>().0[index];
            u64::from_le_bytes(bytes)
        };
        let head = word(0);
        let kinds = [TriggerKind::PUT, TriggerKind::SIGNAL, TriggerKind::FLUSH];
        let asked = kinds.into_iter().enumerate();
        let asked = asked.filter(|(bit, _)| head >> (60 + bit) & 1 == 1);
        let Some(kind) = asked.map(|(_, kind)| kind).reduce(TriggerKind::with) else {
            continue;
        };
        let id = |shift: u32| u32::try_from(head >> shift & u64::from(MAX_ID - 1)).unwrap();
        let trigger = Trigger {
            kind,
            channel: id(40),
            dst_memory: id(20),
            src_memory: id(0),
            dst_offset: word(1),
            src_offset: word(2),
            size: word(3),
        };
        match carrier.carry(&trigger) {
            Ok(()) | Err(ChannelError::UnknownId { .. } | ChannelError::OutOfRange { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(!job.endpoint.group().liveness().stopped());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::MAX_PUT;

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
            let mut input = hostile[random(hostile.len())].clone();
            input.extend(&hostile[random(hostile.len())]);
            if round % 5 == 0 {
                input = (0..random(400)).map(|_| random(256) as u8).collect();
            }
            for _ in 0..random(5) {
                let length = input.len().max(1);
                input.resize(length, 0);
                match random(3) {
                    0 => input[random(length)] = random(256) as u8,
                    1 => input[random(length)] ^= 1 << random(8),
                    _ => input.truncate(random(length)),
                }
            }
            target(&input);
        }
    }

    #[test]
    fn any_frames_are_refused_at_worst() {
        let key = job().memories[0].key(0);
        let put = |offset, length, follow: usize| {
            let frame = Frame::Put {
                key,
                offset,
                length,
            };
            [&frame.encode()[..], &vec![7; follow]].concat()
        };
        let signal = |key, offset| Frame::Signal { key, offset }.encode().to_vec();
        let hostile = [
            put(0, 8, 8),
            put(BYTES - 8, 8, 8),
            put(BYTES - 7, 8, 8),
            put(u64::MAX, 1, 1),
            put(u64::MAX - 7, 8, 8),
            put(0, MAX_PUT as u32, 100),
            put(0, u32::MAX, 100),
            signal(key, 0),
            signal(key, BYTES - 8),
            signal(key, BYTES - 4),
            signal(key, u64::MAX - 7),
            signal(key, 3),
            signal(u64::MAX, 0),
            Frame::Flush { sequence: u64::MAX }.encode().to_vec(),
            Frame::Ack { sequence: 0 }.encode().to_vec(),
            Frame::Goodbye.encode().to_vec(),
        ];
        smoke(tcp_frames, &hostile);
    }

    #[test]
    fn any_triggers_are_refused_at_worst() {
        let trigger = |head: u64, rest: [u64; 3]| -> Vec<u8> {
            let words = [[head].as_slice(), &rest].concat();
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        // Destination 0 has 4096 bytes, source 1 has 1000.
        let put = |rest| trigger(1 << 60 | 1, rest);
        let hostile = [
            put([0, 0, 8]),
            put([4096 - 1000, 0, 1000]),
            put([0, 0, 1001]),
            put([0, u64::MAX, 2]),
            put([u64::MAX, 0, 2]),
            put([0, 0, u64::MAX]),
            put([u64::MAX, u64::MAX, u64::MAX]),
            trigger(7 << 60 | 1 << 20, [0, 0, 64]),
            trigger(2 << 60, [0; 3]),
            trigger(u64::MAX, [0; 3]),
            trigger(3 << 60 | 1 << 40, [0; 3]),
        ];
        smoke(triggers, &hostile);
    }
}
