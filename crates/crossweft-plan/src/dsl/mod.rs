//! A language for communication algorithms: programs over all ranks, compiled to checked plans.
//!
//! A [`Program`] is written as if one thread did everything, one instruction after the other: copies, puts,
//! reductions, each with the thread block of the rank that executes it. [`Program::compile`] makes a
//! [`Plan`](crate::Plan) of it that does the same on all ranks at once, and [checks](crate::check) it. An
//! all-gather:
//!
//! ```
//! use crossweft_plan::{Collective, dsl::{Error, Options, Program}};
//!
//! let ranks = 4;
//! let mut program = Program::new(Options::new("all-gather", Collective::AllGather, ranks))?;
//! for rank in 0..ranks {
//!     let input = program.input(rank)?.all();
//!     for peer in (0..ranks).filter(|peer| *peer != rank) {
//!         let output = program.output(peer)?.chunk(rank);
//!         let channel = program.memory_channel(peer, rank)?;
//!         program.put(channel, output, input, peer)?;
//!     }
//!     let output = program.output(rank)?.chunk(rank);
//!     program.copy(output, input, rank)?;
//! }
//! let plan = program.compile()?.plan;
//! assert_eq!(plan.world_size(), ranks);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Constructs
//!
//! * Memory: [`input`](Program::input), [`output`](Program::output), [`scratch`](Program::scratch), each in
//!   chunks. Packets lie in scratch memory.
//! * On one rank: [`copy`](Program::copy), [`copy_packets`](Program::copy_packets),
//!   [`unpack_packets`](Program::unpack_packets), [`reduce`](Program::reduce),
//!   [`reduce_packets`](Program::reduce_packets), [`barrier`](Program::barrier), semaphores.
//! * Over [memory](Program::memory_channel), [port](Program::port_channel) and
//!   [switch](Program::switch_channel) channels: puts, gets, reductions, signals and waits.
//! * Several thread blocks for one instruction ([`Blocks`]), [loops](Program::begin_loop) over pieces of the data,
//!   [instances](Options::instances) of the whole program.
//!
//! # What compiling does
//!
//! 1. Signals and waits are counted.
//! 2. [Instances](Options::instances) are made.
//! 3. Dependencies are found, and [missing synchronisation](Options::auto_sync) is inserted: semaphores across
//!    thread blocks, signals and waits across ranks, also for what the next execution needs. A program may
//!    have all, some or none of it. Where its own synchronisation gives an order, that is the order, even if
//!    it is not that of the instructions.
//! 4. Synchronisation that the checker does not need is [dropped](Options::minimise).
//! 5. Neighbours are [fused](Options::fuse), threads of a block are made to meet where they must.
//! 6. Thread blocks, channels, semaphores and barriers are numbered; of what is not used, nothing is left.
//! 7. The plan is checked. Faults come with the line of the instruction.
//!
//! Every pass finds nothing more to do in what it has made.

mod cells;
mod compile;
mod error;
mod fuse;
mod instances;
mod last;
mod memory;
mod minimise;
mod options;
mod order;
mod pairing;
mod program;
mod resources;
mod sync;
#[cfg(test)]
mod tests;
mod trace;
mod within;

pub use compile::{Compiled, Sources};
pub use error::{Error, Fault, Misuse, Source};
pub use memory::{Chunk, Memory};
pub use options::{MINIMISED_RANKS, Options, Replication};
pub use program::{Blocks, Channel, Program, Semaphore, Switch};
