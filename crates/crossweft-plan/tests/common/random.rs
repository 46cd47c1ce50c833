//! Random programs in the language, for the tests of this crate and of others.

use std::collections::HashMap;

use crossweft_plan::dsl::{Blocks, Chunk, Memory, Options, Program};
use crossweft_plan::{Buffer, Collective, InPlace};

/// One random instruction, by numbers that are taken modulo whatever there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    pub(crate) what: u8,
    pub(crate) rank: u32,
    pub(crate) peer: u32,
    pub(crate) block: u32,
    pub(crate) dst: (u8, u32),
    pub(crate) src: (u8, u32),
    pub(crate) other: u32,
}

const CHUNKS: u32 = 3;

/// What chunks hold when instructions run one after the other: inputs, each as often as it was added.
#[derive(Default)]
struct Contents(HashMap<Chunk, Vec<Chunk>>);

impl Contents {
    fn of(&self, chunk: Chunk) -> Vec<Chunk> {
        match chunk.memory().buffer() {
            Buffer::Input => vec![chunk],
            _ => self.0.get(&chunk).cloned().unwrap_or_default(),
        }
    }

    /// A chunk that can be read: nothing is read that was not written before.
    fn readable(&self, wanted: Chunk, instead: Chunk) -> Chunk {
        if self.of(wanted).is_empty() {
            instead
        } else {
            wanted
        }
    }
}

/// A program of random copies, puts, gets and reductions, with and without packets and proxies, without any
/// synchronisation. Out of place, it states what it computes.
pub(crate) fn random(ranks: u32, draws: &[Draw], in_place: InPlace, double: bool) -> Program {
    let collective = match in_place {
        InPlace::Forbidden => Collective::Custom,
        _ => Collective::Test,
    };
    let mut options = Options::new("random", collective, ranks);
    options.shape = (CHUNKS, CHUNKS);
    options.in_place = in_place;
    options.double_scratch = double;
    let mut program = Program::new(options).unwrap();
    let mut all = |make: &mut dyn FnMut(&mut Program, u32) -> Memory| -> Vec<Memory> {
        (0..ranks).map(|rank| make(&mut program, rank)).collect()
    };
    let inputs = all(&mut |program, rank| program.input(rank).unwrap());
    let outputs = all(&mut |program, rank| program.output(rank).unwrap());
    let scratch = all(&mut |program, rank| program.scratch(rank, CHUNKS).unwrap());
    let packets = all(&mut |program, rank| program.scratch(rank, CHUNKS).unwrap());
    let mut contents = Contents::default();
    for draw in draws {
        let rank = draw.rank % ranks;
        let peer = (rank + 1 + draw.peer % (ranks - 1)) % ranks;
        let at = |of: u32, (buffer, index): (u8, u32)| {
            let memory = match buffer {
                0 => &outputs,
                1 => &scratch,
                _ => &inputs,
            };
            memory[of as usize].chunk(index % CHUNKS)
        };
        let readable =
            |of: u32, wanted: (u8, u32)| contents.readable(at(of, wanted), at(of, (2, wanted.1)));
        let blocks: Blocks = match draw.block {
            3 => (0..2).into(),
            block => block.into(),
        };
        let (src, other) = (readable(rank, draw.src), readable(rank, (1, draw.other)));
        let theirs = readable(peer, draw.src);
        let sent = packets[peer as usize].chunk(draw.dst.1 % CHUNKS);
        let received = packets[rank as usize].chunk(draw.other % CHUNKS);
        let is_there = !contents.of(received).is_empty();
        let (here, there) = (at(rank, draw.dst), at(peer, draw.dst));
        let mut channel = || program.memory_channel(peer, rank).unwrap();
        let (dst, from) = match draw.what {
            1 => {
                let channel = channel();
                program.put(channel, there, src, blocks).unwrap();
                (there, vec![src])
            }
            2 => {
                let channel = channel();
                program.get(channel, here, theirs, blocks).unwrap();
                (here, vec![theirs])
            }
            3 if draw.peer % 2 == 0 => {
                program.reduce(here, src, &[other], blocks).unwrap();
                (here, vec![src, other])
            }
            3 => {
                let channel = channel();
                program
                    .read_reduce(channel, here, src, &[theirs], blocks)
                    .unwrap();
                (here, vec![src, theirs])
            }
            4 => {
                let channel = channel();
                program.put_packets(channel, sent, src, blocks).unwrap();
                (sent, vec![src])
            }
            5 if is_there => {
                program.unpack_packets(here, received, blocks).unwrap();
                (here, vec![received])
            }
            6 if is_there => {
                program
                    .reduce_packets(here, src, &[received], blocks)
                    .unwrap();
                (here, vec![src, received])
            }
            8 if is_there => {
                // By a proxy, or not.
                let channel = match draw.block {
                    0 => program.port_channel(peer, rank).unwrap(),
                    _ => channel(),
                };
                program
                    .read_put_packets(channel, sent, received, blocks)
                    .unwrap();
                (sent, vec![received])
            }
            7 => {
                let channel = program.port_channel(peer, rank).unwrap();
                program.put(channel, there, src, draw.block).unwrap();
                (there, vec![src])
            }
            _ => {
                program.copy(here, src, blocks).unwrap();
                (here, vec![src])
            }
        };
        let held = from
            .into_iter()
            .flat_map(|from| contents.of(from))
            .collect();
        contents.0.insert(dst, held);
    }
    if collective == Collective::Custom {
        for output in outputs
            .iter()
            .flat_map(|output| (0..CHUNKS).map(|k| output.chunk(k)))
        {
            let inputs = contents.of(output);
            if !inputs.is_empty() {
                program.expect(output, &inputs).unwrap();
            }
        }
    }
    program
}
