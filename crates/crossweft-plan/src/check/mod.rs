//! The checker: whether a plan computes what it says, whatever the schedule.
//!
//! [`check`] runs all thread blocks of all ranks on symbols, some executions in a row. Every granule
//! of every buffer holds a multiset of granules of inputs; every thread block, and every proxy, has a
//! vector clock; every access is compared with those before it. Faults come with the operation
//! and advice ([`Diagnostic`]); a plan without any is accepted.
//!
//! # What an accepted plan has
//!
//! For the modelled sizes (below), input and output apart, one, or both ways, as its
//! [`InPlace`] says:
//!
//! * no **race**: any two accesses of one granule, one of them a write, are ordered by signals and
//!   waits, semaphores, barriers, flushes, packets, the order of a block, or the order of executions of
//!   a rank (all blocks of one end before any of the next begins; ranks run ahead freely). The caller
//!   counts: it writes inputs before each execution, and may read or write inputs and outputs
//!   after it;
//! * no **deadlock**, and no signal left over at an execution's end (**pairing**);
//! * no read of memory that **nothing was written** to, outputs of earlier executions included;
//! * the **post-condition**: each granule of each output holds exactly the inputs that the collective
//!   says, of this execution, each once. Where an average may be meant (`reduce_op` is none or avg),
//!   exactly one reduction marked `last` is behind it. [`Collective::Test`](crate::Collective::Test) has none, and of
//!   [`Collective::Custom`](crate::Collective::Custom) averages are not looked at.
//!
//! # Why one schedule is enough
//!
//! Blocks talk through counters that only grow, through packets whose flags are waited for, and
//! through memory. Without races a wait is never undone by others, and what it learns depends on
//! counts, not on who came first; so, as in Kahn's process networks, all schedules reach the same
//! states, and the happens-before order is the same in all. If some schedule has a race, the first
//! one in it is unordered in this schedule too, and vector clocks see it. Where the order of signals
//! or takers *is* left to chance, the checker assumes the worst: from several blocks that signal one
//! counter, a taker learns what is common to all orders; blocks that wait on one channel must be
//! ordered; blocks that acquire one semaphore must be ordered, or find enough for all.
//!
//! # Memory order
//!
//! * Signal and wait, release and acquire, barrier: release and acquire. Of a relaxed signal the taker
//!   knows only that the sender's execution has begun, and what came before that; nothing at all
//!   without [`Options::relaxed_starts`].
//! * A packet orders its own payload only: relaxed stores and loads. Beyond that, a rank that has read
//!   a packet knows in its *next* execution what its sender did *before* the execution that sent it
//!   (both begin with a fence), and that the loads whose values went into the packet are over. The two
//!   halves stand on exactly this. A write to where other packets were comes after theirs if it comes after these were read, since
//!   what was read was there. At an execution's end a rank may clear the half that was used, so that whoever
//!   writes there must know of that end too. A slot is not to be written before its packets were read; two
//!   writes of one slot in one execution must be told apart by other means than the flag.
//! * A put is done by a proxy: after what its block did before, and after those puts on the channel
//!   that the block knows of; it is over for whoever takes a later signal of that channel, or
//!   flushes, and for those who learn from them. Packets are put as they are, and must be there: written
//!   by the block before, or seen by it.
//!
//! # What is not proved
//!
//! * Operations of one block count as one after the other. On a GPU the threads of a block run
//!   side by side; where an operation needs what another one of the block wrote at *other*
//!   positions, a [`Op::Sync`] (or a wait, signal, barrier) belongs between them, which is not
//!   checked. That an operation overlaps itself, shifted, is.
//! * Sizes: a message of whole chunks, of as many granules as all slices divide (at most
//!   256 granules a chunk; beyond, rounded as on the device), and messages so short that chunks have nothing in them, with
//!   packets one for each number of such chunks (up to 16 of them). Other sizes have the same boundaries in the same
//!   order; where operations cut the same data in different ways, messages must be
//!   [multiples](crate::Plan::message_multiple) for that. Of different sizes in a row ([`Options::sizes`]) a message is
//!   tried with the shortest between, before and after, and with one so large that its first slot covers all of the other's (up to 16), but in
//!   plans that are nearly too large to be checked; that two sizes meet in one half of scratch memory only with
//!   [`Sizes::VaryInHalves`].
//! * Loops: pieces of a half or a quarter of a chunk, in proportion where there are several sizes;
//!   other numbers of pieces are not tried.
//! * The number of executions: a fault that needs more than [`Options::executions`] is not seen.
//!   Three see every reuse of both halves.
//! * Multisets are compared by number and the sum of 128-bit hashes, so a plan written to deceive
//!   may; order of reduction (that is: the same bits on all ranks) is not looked at, and reducing an
//!   input twice is a fault for min and max too.
//! * An operation starts when all its packets are there; a plan in which one operation feeds itself
//!   through peers is refused. Device code, proxies and the host are trusted to do what is said here.

mod clock;
pub(crate) mod compile;
mod run;
mod value;

use std::collections::{BTreeSet, HashMap};

use crossweft_device::extent::GRANULE;

use crate::numbers::{gcd, lcm};
use crate::plan::{Buffer, InPlace, Op, Plan};
use crate::validate::PlanError;
use compile::{Compiled, Geometry, Layout, Slots};
use run::Run;

/// A fault of a plan, and where it shows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Diagnostic {
    /// The rank whose operation it is, if it is one's.
    pub rank: Option<u32>,
    /// The thread block.
    pub thread_block: Option<u32>,
    /// The operation's index in its block; the loop's, if it is inside one.
    pub op: Option<u32>,
    /// Its index in the loop, if it is inside one.
    pub inner: Option<u32>,
    /// The other operation of a race, if it is one's.
    pub other: Option<Place>,
    /// What kind of fault.
    pub code: Code,
    /// What is wrong, and what to do about it.
    pub message: String,
}

/// An operation's place in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Place {
    /// The rank.
    pub rank: u32,
    /// The thread block.
    pub thread_block: u32,
    /// The operation's index in its block; the loop's, if it is inside one.
    pub op: u32,
    /// Its index in the loop, if it is inside one.
    pub inner: Option<u32>,
}

impl std::fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.code.name())?;
        if let Some(rank) = self.rank {
            write!(f, ", rank {rank}")?;
        }
        if let Some(block) = self.thread_block {
            write!(f, ", thread block {block}")?;
        }
        if let Some(op) = self.op {
            write!(f, ", op {op}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// [`Plan::validate`] refuses it.
    Structure,
    /// Memory is read that nothing was written to.
    Uninitialised,
    /// Signals and waits, or releases and acquires, are not as many.
    Pairing,
    /// The outcome depends on who comes first.
    Race,
    /// Nobody can go on.
    Deadlock,
    /// The result is not what the collective says.
    PostCondition,
    /// The plan is too large to be checked.
    TooLarge,
}

impl Code {
    /// The name in messages and on the command line; it does not change.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Structure => "structure",
            Self::Uninitialised => "uninitialised",
            Self::Pairing => "pairing",
            Self::Race => "race",
            Self::Deadlock => "deadlock",
            Self::PostCondition => "post_condition",
            Self::TooLarge => "too_large",
        }
    }
}

/// How to check.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Executions in a row.
    pub executions: u32,
    /// Most faults to report.
    pub max_diagnostics: usize,
    /// Sizes of the messages of consecutive executions.
    pub sizes: Sizes,
    /// Whether a relaxed signal tells at least that its sender's execution has begun, with all that
    /// came before that: executions begin with a fence, relaxed waits end with one where the machine
    /// could read ahead, and plans of MSCCL++ count on it. Without this, relaxed signals order nothing.
    pub relaxed_starts: bool,
}

/// Sizes of the messages of consecutive executions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sizes {
    /// All of one size.
    Same,
    /// One size or different ones; a slot lies at the same place for all of them, apart from others.
    Vary,
    /// One size or different ones; slot `i` lies at `i` chunks of the current message, so that it
    /// overlaps other slots of another one. Where there are different ones, scratch memory has two halves, used in turn, as
    /// executors have it ([`Plan::scratch_bytes`]).
    #[default]
    VaryPacked,
    /// The same, and messages of two sizes meet in one half. Plans of MSCCL++ in which proxies put packets on are refused
    /// then: what tells that a put is over tells it of the same slot.
    VaryInHalves,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            executions: 3,
            max_diagnostics: 16,
            sizes: Sizes::default(),
            relaxed_starts: true,
        }
    }
}

/// Checks a plan: the faults that were found, none if it is accepted. After the first way of running it
/// (in place or not, a size) that shows any, no other is tried.
#[must_use]
pub fn check(plan: &Plan, options: &Options) -> Vec<Diagnostic> {
    if let Err(error) = plan.validate() {
        return vec![structure(error)];
    }
    let aliased: &[bool] = match plan.in_place {
        InPlace::Any => &[false, true],
        InPlace::Required => &[true],
        InPlace::Forbidden => &[false],
    };
    for &aliased in aliased {
        for (geometry, what) in geometries(plan, options, aliased) {
            let place = if aliased { "in place" } else { "out of place" };
            let note = format!(" ({place}, {what})");
            let refused = |message| Diagnostic {
                rank: None,
                thread_block: None,
                op: None,
                inner: None,
                other: None,
                code: Code::TooLarge,
                message,
            };
            if let Some(message) = too_large(plan, &geometry) {
                return vec![refused(message)];
            }
            let compiled = Compiled::new(plan, &geometry);
            let mut found = static_faults(&compiled);
            let executions = geometry.messages.len() as u64;
            found.extend(too_many_orders(&compiled, executions).map(refused));
            if found.is_empty() {
                let run = Run::new(plan, &compiled, &geometry, options, &note);
                found = run.run();
            }
            if !found.is_empty() {
                found.truncate(options.max_diagnostics);
                return found;
            }
        }
    }
    Vec::new()
}

fn structure(error: PlanError) -> Diagnostic {
    let message = error.to_string();
    let (rank, thread_block, op) = match error {
        PlanError::Op {
            rank, block, op, ..
        } => (Some(rank), Some(block), Some(op)),
        _ => (None, None, None),
    };
    Diagnostic {
        rank,
        thread_block,
        op,
        inner: None,
        other: None,
        code: Code::Structure,
        message,
    }
}

/// Most granules of a chunk, but where data is cut in different ways: with more, slices are modelled with rounded boundaries.
const GRANULES: u64 = 256;

fn geometries(plan: &Plan, options: &Options, aliased: bool) -> Vec<(Geometry, String)> {
    // Where data is cut in different ways, rounded boundaries would come in another order.
    let most = plan.slice_granules().unwrap_or(1).clamp(GRANULES, CELLS);
    let mut chunk = 1;
    let mut units = BTreeSet::new();
    let mut packets = false;
    let mut add = |op: &Op| {
        if let Some(chunks) = op.chunks() {
            let (count, of) = (u64::from(chunks.count), u64::from(chunks.slice.1));
            let needed = lcm(chunk, of / gcd(of, count));
            chunk = if needed > most { most } else { needed };
        }
        let (_, to) = op.operands();
        packets |= to.iter().any(|o| o.buffer == Buffer::Packets);
    };
    for op in plan
        .ranks
        .iter()
        .flat_map(|rank| rank.blocks.iter().flatten())
    {
        op.flatten().iter().for_each(&mut add);
        if let Op::Loop { unit_bytes, .. } = op {
            units.insert(*unit_bytes);
        }
    }
    let mut pieces = HashMap::new();
    if let Some(&smallest) = units.first() {
        // Several pieces a chunk, so that one can follow the other.
        let per_chunk = if plan.chunks > 8 { 2 } else { 4 };
        chunk = lcm(chunk, per_chunk);
        for unit in units {
            let piece = u128::from(chunk / per_chunk) * u128::from(unit) / u128::from(smallest);
            pieces.insert(unit, piece.min(1 << 40) as u64);
        }
    }
    let whole = u64::from(plan.chunks) * chunk;
    let executions = options.executions.max(1) as usize;
    let same = |message: u64| Geometry {
        messages: vec![message; executions],
        pieces: pieces.clone(),
        aliased,
        slots: Slots::Packed,
    };
    let mut all = vec![(same(whole), format!("{chunk} granules a chunk"))];
    let short = short_messages(plan, whole, packets);
    for &message in &short {
        all.push((same(message), format!("a message of {message} granules")));
    }
    let slots = match options.sizes {
        Sizes::Same => return all,
        Sizes::Vary => Slots::Fixed,
        Sizes::VaryPacked | Sizes::VaryInHalves => Slots::Halves,
    };
    let in_turn = |turn: &[u64]| Geometry {
        messages: turn.iter().copied().cycle().take(executions).collect(),
        slots,
        ..same(0)
    };
    // So that the larger one's first slot lies over all slots of the smaller one.
    let most = match slots {
        Slots::Halves => u64::from(plan.scratch_slots.max(plan.packet_slots)).clamp(2, 16),
        _ => 2,
    };
    let few = |factor: &u64| {
        let larger = in_turn(&[whole, whole * factor]);
        let cells = Layout::new(plan, &larger).cells(plan.ranks.len());
        *factor == 2 || cells <= VARYING_CELLS
    };
    let factor = (2..=most).rev().find(few);
    let mut others: Vec<u64> = factor.iter().map(|factor| whole * factor).collect();
    others.extend(short.first());
    for other in others {
        for (one, other) in [(whole, other), (other, whole)] {
            let note = format!("messages of {one} and {other} granules");
            all.push((in_turn(&[one, other]), note.clone()));
            // Memory of a half is used by every second one.
            if options.sizes == Sizes::VaryInHalves {
                all.push((in_turn(&[one, other, other, one]), note));
            }
        }
    }
    // A plan that is so large is checked for messages of one size.
    all.retain(|(geometry, _)| {
        geometry.slots == Slots::Packed || too_large(plan, geometry).is_none()
    });
    all
}

/// Most cells of messages of different sizes, if there is a choice.
const VARYING_CELLS: u64 = 1 << 19;

/// Messages that are shorter than `whole`, in granules, one for each number of chunks that have something in them, or for some
/// of those: where an operation has nothing to do, it synchronises nobody either, if that is what packets are for.
fn short_messages(plan: &Plan, whole: u64, packets: bool) -> Vec<u64> {
    let (chunks, multiple) = (u64::from(plan.chunks), plan.message_multiple() / GRANULE);
    if multiple > 1 {
        return [multiple].into_iter().filter(|m| *m < whole).collect();
    }
    let fewest = Plan::fewest_chunks(plan.message_bytes.0, plan.chunks);
    let numbers = fewest..=chunks;
    let step = match packets {
        true => (chunks - fewest).div_ceil(SHORT_MESSAGES).max(1),
        false => chunks,
    };
    numbers
        .step_by(step as usize)
        .filter(|message| *message < whole)
        .collect()
}

/// How many of them are tried, about.
const SHORT_MESSAGES: u64 = 16;

/// Most granules of memory: more would take gigabytes.
const CELLS: u64 = 1 << 23;

/// What would take gigabytes is not begun.
fn too_large(plan: &Plan, geometry: &Geometry) -> Option<String> {
    const STEPS: u64 = 1 << 23;
    const CLOCKS: u64 = 1 << 28;
    const ACCESSES: u64 = 1 << 27;
    let cells = Layout::new(plan, geometry).cells(plan.ranks.len());
    let largest = geometry.messages.iter().max().copied().unwrap_or(1);
    let ops = || {
        plan.ranks
            .iter()
            .flat_map(|rank| rank.blocks.iter().flatten())
    };
    let steps = |op: &Op| match op {
        Op::Loop {
            unit_bytes,
            chunks,
            ops,
        } => {
            let piece = geometry.pieces.get(unit_bytes).copied().unwrap_or(1);
            let total = compile::chunk_of(plan, largest) * u64::from(*chunks);
            total.div_ceil(piece) * ops.len() as u64
        }
        _ => 1,
    };
    let steps = ops().map(steps).fold(0, u64::saturating_add);
    let chunk = compile::chunk_of(plan, largest);
    let accesses = |op: &Op| {
        let (from, to) = op.operands();
        let chunks = op.chunks().map_or(0, |chunks| {
            u64::from(chunks.count).div_ceil(chunks.slice.1.into())
        });
        (from.len() + to.len()) as u64 * chunks * chunk
    };
    let accesses = ops().flat_map(Op::flatten).map(accesses);
    let accesses = accesses.fold(0, u64::saturating_add);
    let blocks: usize = plan.ranks.iter().map(|rank| rank.blocks.len()).sum();
    let threads = blocks as u64;
    let limits = [
        ("granules of memory", cells, CELLS),
        ("steps", steps, STEPS),
        ("accesses to granules", accesses, ACCESSES),
        ("pairs of thread blocks", threads * threads, CLOCKS),
    ];
    limits
        .into_iter()
        .find(|(_, number, limit)| number > limit)
        .map(|(what, number, limit)| {
            format!(
                "it has {number} {what}; {limit} can be checked: use fewer chunks, slots or blocks"
            )
        })
}

/// Where several thread blocks signal one counter, every order in which their signals may come is thought of.
fn too_many_orders(compiled: &Compiled, executions: u64) -> Option<String> {
    const COMPARED: u64 = 1 << 32;
    let sum = |counts: &[(usize, u64)]| counts.iter().map(|(_, count)| count * executions).sum();
    compiled.counters.iter().find_map(|info| {
        let (signals, waits): (u64, u64) = (sum(&info.signals), sum(&info.waits));
        let compared = signals.saturating_mul(signals).saturating_mul(waits);
        (info.signals.len() > 1 && compared > COMPARED).then(|| {
            let what = if info.semaphore { "semaphore" } else { "channel" };
            format!(
                "{} thread blocks signal {what} {} of rank {} {signals} times in {executions} executions, more than can be \
                 checked: use several of them, or fewer signals",
                info.signals.len(),
                info.id,
                info.rank
            )
        })
    })
}

/// Counts that do not match.
fn static_faults(compiled: &Compiled) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for info in &compiled.counters {
        let sum = |counts: &[(usize, u64)]| counts.iter().map(|(_, count)| count).sum::<u64>();
        let (signals, waits) = (sum(&info.signals), sum(&info.waits));
        if signals != waits {
            let message = if info.semaphore {
                format!(
                    "semaphore {} is released {signals} times and acquired {waits} times an \
                     execution; the difference adds up from one to the next",
                    info.id
                )
            } else {
                format!(
                    "on channel {} rank {} signals {signals} times and this rank waits {waits} times \
                     an execution; the rest would be taken for a signal of the next one",
                    info.id, info.from
                )
            };
            found.push(Diagnostic {
                rank: Some(info.rank),
                thread_block: None,
                op: None,
                inner: None,
                other: None,
                code: Code::Pairing,
                message,
            });
        }
    }
    found.extend(compiled.twice());
    found
}
