//! Random programs in the language, compiled and run on the CPU: whatever order thread blocks run in, the results
//! are those of the instructions one after the other.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use crossweft_collective::{CommunicatorOptions, DataType, ReduceOp, Schedule, run_in_threads};
use crossweft_executor::{Buffers, Options, Prepared};
use crossweft_plan::{Content, InPlace, Plan};
use random::{Draw, random};

#[path = "../../crossweft-plan/tests/common/random.rs"]
mod random;

const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of a message: a chunk of a program.
const BYTES: u64 = 100;

/// `xorshift64*`
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) % u64::from(n)) as u32
    }

    fn draw(&mut self) -> Draw {
        Draw {
            what: self.below(9) as u8,
            rank: self.below(4),
            peer: self.below(4),
            block: self.below(4),
            dst: (self.below(2) as u8, self.below(4)),
            src: (self.below(3) as u8, self.below(4)),
            other: self.below(4),
        }
    }
}

/// Byte `at` of a rank's input.
fn byte(rank: u32, at: usize, turn: u32) -> u8 {
    (rank * 31 + turn * 17 + at as u32 * 7) as u8
}

/// What a rank's output holds in the end, where the plan says anything.
fn expected(plan: &Plan, rank: u32, turn: u32) -> Vec<Option<u8>> {
    let mut bytes = Vec::new();
    for block in 0..plan.output_blocks {
        let content = plan.content(rank, block);
        bytes.extend((0..BYTES as usize).map(|at| match &content {
            Content::Inputs(inputs) => {
                let input = inputs.iter().map(|input| {
                    byte(input.rank, input.block as usize * BYTES as usize + at, turn)
                });
                Some(input.fold(0, u8::wrapping_add))
            }
            _ => None,
        }));
    }
    bytes
}

/// Runs each of the plans under each of the schedules, several times in a row.
fn run(ranks: u32, plans: &[Plan], seeds: u64) {
    let options = CommunicatorOptions { timeout: LIMIT };
    run_in_threads(ranks, options, |communicator| {
        let rank = communicator.rank();
        let blocks = u64::from(plans[0].input_blocks);
        let input = communicator.allocate(BYTES * blocks)?;
        let output = communicator.allocate(BYTES * blocks)?;
        for (number, plan) in plans.iter().enumerate() {
            for seed in 0..seeds {
                let mut options = Options::new(DataType::U8, ReduceOp::Sum, BYTES);
                options.schedule = Schedule::Seeded(seed * u64::from(ranks) + u64::from(rank));
                options.buffers = Buffers::Registered {
                    input: input.registered(),
                    output: output.registered(),
                };
                let deadline = Instant::now() + LIMIT;
                let prepared = Prepared::prepare(communicator.endpoint(), plan, options, deadline)?;
                for turn in 0..3 {
                    let length = (BYTES * blocks) as usize;
                    let data: Vec<u8> = (0..length).map(|at| byte(rank, at, turn)).collect();
                    input.write(0, &data)?;
                    // The last one's result must not pass for this one's.
                    output.write(0, &vec![0xa5; length])?;
                    // Nothing but the plan's own synchronisation orders what follows.
                    prepared
                        .run_registered(0, 0, BYTES, LIMIT)
                        .unwrap_or_else(|error| {
                            panic!(
                                "program {number}, seed {seed}, turn {turn}, rank {rank}: {error}"
                            )
                        });
                    let mut got = vec![0; length];
                    output.read(0, &mut got)?;
                    for (at, want) in expected(plan, rank, turn).into_iter().enumerate() {
                        assert!(
                            want.is_none_or(|want| want == got[at]),
                            "program {number}, seed {seed}, turn {turn}, rank {rank}, byte {at}"
                        );
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

fn plans(ranks: u32, count: u64) -> Vec<Plan> {
    let plan = |number: u64| {
        let mut random_numbers = Random(number << 8 | u64::from(ranks) | 1 << 40);
        let length = 1 + random_numbers.below(24);
        let draws: Vec<Draw> = (0..length).map(|_| random_numbers.draw()).collect();
        let double = number.is_multiple_of(2);
        let program = random(ranks, &draws, InPlace::Forbidden, double);
        program.compile().unwrap().plan
    };
    (0..count).map(plan).collect()
}

#[test]
fn random_programs_of_two_ranks() {
    run(2, &plans(2, 70), 50);
}

#[test]
fn random_programs_of_three_ranks() {
    run(3, &plans(3, 70), 50);
}

#[test]
fn random_programs_of_four_ranks() {
    run(4, &plans(4, 60), 50);
}
