//! MSCCL++ execution plans: read as [`Plan`](crate::Plan)s, and written from them.
//!
//! * [`import()`]: their JSON to a plan. What their files leave out gets their reader's defaults; what
//!   their executor could not run (its limits) is a warning here.
//! * [`export()`]: a plan to their JSON. What their executor could not run is an error.
//!
//! Their format is one JSON object: chunk counts, channels, remote buffers and thread blocks of every
//! rank; operations name channels and buffers through lists of their thread block.
//!
//! # What an import makes of a file
//!
//! * A message is one block of input or output; where an operation's chunks lie in several blocks, it
//!   is split. Test collectives have blocks of one chunk.
//! * In place, everything refers to the larger buffer (the input where both are of one size).
//! * Scratch chunks that packets lie in are [`Buffer::Packets`](crate::Buffer::Packets), others
//!   [`Buffer::Scratch`](crate::Buffer::Scratch); both are numbered from the first one in use.
//! * The reduce operation is sum (a file that says otherwise gets a warning: their executor always
//!   sums), and no reduction is marked as the last (that matters for averages only). Packets are LL16.
//! * Port channels forward packets after a wait for them, which unpacks them to spare scratch memory.
//! * A store to the members of a switch leaves out the place that it reads from.
//! * Channels with one end get their other one; ranks without thread blocks get an empty one.
//! * Threads per block, buffer alignment and the reuse of resources are not kept.
//!
//! # What an export changes
//!
//! `import(export(plan))` is `plan`, except for what the list above says, and:
//!
//! * Sums are in their order: a local operand first, or last behind packets.
//! * [`Op::Sync`](crate::Op::Sync) appears where an operation of ours implies one.
//! * Destinations of several kinds, and reductions that no operation of theirs does at once, become
//!   several operations.
//! * So do those on more channels, semaphores or destinations than an operation of theirs has room for.
//! * Packets make plain scratch memory double as well.
mod export;
mod format;
mod import;

pub use export::export;
pub use import::{Imported, import, import_layout, is_mscclpp};
