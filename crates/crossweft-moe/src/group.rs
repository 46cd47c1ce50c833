//! Groups: what all passes share.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crossweft_channel::{Endpoint, RegisteredMemory};
use crossweft_device::moe::rows::HostRows;
use crossweft_device::moe::{Call, Geometry, MAX_RANKS, MAX_TOP_K, Phase, Sizes};
use crossweft_device::{DataType, Stopped};
use crossweft_hal::cpu::{Grid, Interrupted, Schedule, rows};
use crossweft_hal::{Device, HalError};

use crate::MoeError;
use crate::cuda::{Launcher, Unfit};
use crate::handle::{Handle, Routing};
use crate::launch::{GroupTables, PassTables, Step, fits};
use crate::layout::{Format, Layout, OutputShape};
use crate::watch::Watch;

/// The most tokens of a rank in one call.
const MAX_TOKENS: u32 = 1 << 17;
/// The most elements of a token.
const MAX_HIDDEN: u32 = 1 << 20;
/// The most experts.
const MAX_EXPERTS: u32 = 1 << 16;
/// The most thread blocks.
const MAX_BLOCKS: u32 = 256;

/// What a group is made for. Ranks must agree on all of it but blocks, schedule, timeout and masking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupOptions {
    /// Experts of all ranks together. Ranks have equally many, one after the other, the first ranks one more where that
    /// does not go: see [`Group::local_experts`].
    pub experts: u32,
    /// The most tokens of a rank in one call.
    pub max_tokens: u32,
    /// Elements of a token. Its bytes must be a multiple of 16.
    pub hidden: u32,
    /// The most experts of a token: 1 to 32.
    pub top_k: u32,
    /// Type of tokens before a dispatch and after a combine: bf16 (usual), f16 or f32.
    pub dtype: DataType,
    /// Thread blocks of each launch. On the CPU: one for low latency (usual), several for many tokens. On a GPU each takes
    /// a multiprocessor while it runs, and all of them must be there at once.
    pub blocks: u32,
    /// The order in which they run.
    pub schedule: Schedule,
    /// The longest a call may take, waits for peers included.
    pub timeout: Duration,
    /// Whether a rank that is gone, or late by the timeout, is left out from then on, its tokens and experts missing,
    /// instead of failing the call: see [`Group::masked`]. The others, who may have waited for the same rank, have the
    /// timeout once more then. On a GPU each call then waits for its launches, so it cannot be
    /// recorded into a graph.
    pub masking: bool,
    /// Whether rows travel as lines, data and flags in one, between GPUs that keep those whole
    /// ([`Endpoint::keeps_lines`]); to compare, otherwise. Ranks must agree.
    pub lines: bool,
}

impl GroupOptions {
    /// For bf16, in one thread block, with 30 s and without masking.
    #[must_use]
    pub const fn new(experts: u32, max_tokens: u32, hidden: u32, top_k: u32) -> Self {
        Self {
            experts,
            max_tokens,
            hidden,
            top_k,
            dtype: DataType::Bf16,
            blocks: 1,
            schedule: Schedule::RoundRobin,
            timeout: Duration::from_secs(30),
            masking: false,
            lines: true,
        }
    }

    /// What ranks must agree on.
    fn statement(&self) -> String {
        let Self {
            experts,
            max_tokens,
            hidden,
            top_k,
            dtype,
            lines,
            ..
        } = self;
        let rows = if *lines { "" } else { ", without lines" };
        format!(
            "{experts} experts, up to {max_tokens} tokens of {hidden} {dtype} a rank, up to top-{top_k}{rows}"
        )
    }

    fn check(&self, ranks: u32) -> Result<(), String> {
        let within = |name, value: u32, most: u32| match value {
            0 => Err(format!("no {name}")),
            value if value > most => Err(format!("{value} {name}; it can be {most} at most")),
            _ => Ok(()),
        };
        within("ranks", ranks, MAX_RANKS)?;
        within("experts", self.experts, MAX_EXPERTS)?;
        within("tokens", self.max_tokens, MAX_TOKENS)?;
        within("elements", self.hidden, MAX_HIDDEN)?;
        within("experts of a token", self.top_k, MAX_TOP_K)?;
        within("thread blocks", self.blocks, MAX_BLOCKS)?;
        let dtype = self.dtype;
        if !matches!(dtype, DataType::Bf16 | DataType::F16 | DataType::F32) {
            return Err(format!(
                "tokens of type {dtype}; it can be bf16, f16 or f32"
            ));
        }
        let bytes = Format::Plain.token_bytes(self.hidden, dtype);
        if !bytes.is_multiple_of(16) {
            return Err(format!(
                "tokens of {bytes} bytes; it must be a multiple of 16"
            ));
        }
        Ok(())
    }
}

/// The memory and streams of all ranks for dispatches and combines of one shape. Calls of a group are made one
/// after the other, in the same order on every rank, whatever handles they are of. At most two may be sent and
/// not yet completed, and none when a call is made that is not in two halves.
#[derive(Debug)]
pub struct Group {
    endpoint: Arc<Endpoint>,
    options: GroupOptions,
    tables: GroupTables,
    machine: Machine,
    memory: Arc<RegisteredMemory>,
    desk: Mutex<Desk>,
    /// Whether a handle was dropped whose call had been sent and not completed.
    abandoned: AtomicBool,
}

/// What computes.
#[derive(Debug)]
pub(crate) enum Machine {
    Cpu { grid: Mutex<Grid>, rows: HostRows },
    Cuda(Launcher),
}

/// What a launch needs alone.
#[derive(Debug)]
pub(crate) struct Desk {
    /// Calls sent.
    pub(crate) sent: u64,
    /// Calls completed.
    pub(crate) completed: u64,
    pub(crate) has_failed: bool,
    /// What was launched last, on a GPU.
    pub(crate) signature: u32,
}

impl Group {
    /// Makes a group of all ranks of `endpoint`. Collective; blocks until all ranks have called it, at most until
    /// `deadline`.
    ///
    /// # Errors
    /// [`MoeError`]: options that cannot be, ranks disagree, one died or was late or runs on another host, or there is
    /// no memory.
    pub fn new(
        endpoint: &Arc<Endpoint>,
        options: GroupOptions,
        deadline: Instant,
    ) -> Result<Arc<Self>, MoeError> {
        let what = "making a group for a mixture of experts";
        let (rank, ranks) = (endpoint.rank(), endpoint.world_size());
        let statement = options.statement();
        endpoint.agree(&statement, what, deadline)?;
        let usage = |reason| MoeError::Usage { rank, reason };
        // The same on all ranks, and none on the CPU.
        let lines = options.lines && endpoint.keeps_lines();
        let mine = || {
            options.check(ranks).map_err(usage)?;
            let (dtype, blocks) = (options.dtype, options.blocks);
            match endpoint.device() {
                Device::Cpu => Ok(Machine::Cpu {
                    rows: rows(dtype).ok_or_else(|| usage("no such rows".to_owned()))?,
                    grid: Mutex::new(Grid::new(blocks, options.schedule)?),
                }),
                Device::Cuda(context) => {
                    let kernels = (dtype, lines);
                    let launcher = Launcher::new(context, kernels, (blocks, endpoint.sharers()));
                    launcher.map(Machine::Cuda).map_err(|unfit| match unfit {
                        Unfit::Hal(error) => MoeError::from(HalError::from(error)),
                        Unfit::Usage(reason) => usage(reason),
                    })
                }
                device => Err(usage(format!(
                    "it is on {}; dispatch and combine run on the cpu and on cuda",
                    device.name()
                ))),
            }
        };
        // A rank alone may have asked for blocks that cannot be.
        let machine = endpoint.settle(mine(), what, deadline, MoeError::from)?;
        let geometry = Geometry::new(Sizes {
            ranks,
            max_tokens: options.max_tokens,
            top_k: options.top_k,
            experts: options.experts,
            payload_bytes: Format::Plain.token_bytes(options.hidden, options.dtype),
            lines,
        });
        let memory = endpoint.allocate_registered(geometry.bytes(), what, deadline)?;
        let shared = (options.blocks, salt(&statement));
        let tables = GroupTables::new(endpoint, geometry, &memory, shared);
        // No rank sends to one that cannot receive.
        let tables = endpoint.settle(tables, what, deadline, MoeError::from)?;
        Ok(Arc::new(Self {
            endpoint: Arc::clone(endpoint),
            options,
            tables,
            machine,
            memory,
            desk: Mutex::new(Desk {
                sent: 0,
                completed: 0,
                has_failed: false,
                signature: 0,
            }),
            abandoned: AtomicBool::new(false),
        }))
    }

    /// A handle for a pass whose tokens go where `routing` says. Local; allocates, so
    /// [`Handle::route`] is for the next pass.
    ///
    /// # Errors
    /// [`MoeError::Usage`]: experts that do not exist, or more tokens or experts of a token than the group is for.
    pub fn handle(
        self: &Arc<Self>,
        routing: &Routing<'_>,
        layout: Layout,
    ) -> Result<Handle, MoeError> {
        self.on_cpu()?;
        self.output_shape(layout, Format::Plain, self.options.top_k)?;
        let mut pass = PassTables::new(
            &self.endpoint,
            self.tables.geometry(),
            (layout, self.options.blocks),
        )?;
        pass.route(self.tables.geometry(), routing)
            .map_err(|reason| self.usage(reason))?;
        Ok(Handle::new(Arc::clone(self), layout, pass))
    }

    /// The room that the output of a dispatch on this rank takes, at most, for `top_k` experts of each token.
    ///
    /// # Errors
    /// [`MoeError::Usage`]: a layout that cannot be, or one of 2^32 rows and more.
    pub fn output_shape(
        &self,
        layout: Layout,
        format: Format,
        top_k: u32,
    ) -> Result<OutputShape, MoeError> {
        if layout.alignment() == 0 {
            return Err(self.usage("rows aligned to 0; it must be 1 or more".to_owned()));
        }
        let (hidden, dtype) = (self.options.hidden, self.options.dtype);
        let shape = self.tables.shape((layout, top_k), format, (hidden, dtype));
        match fits(&shape) {
            true => Ok(shape),
            false => Err(self.usage(format!("an output of {} rows is too large", shape.rows))),
        }
    }

    /// What it was made for.
    #[must_use]
    pub fn options(&self) -> &GroupOptions {
        &self.options
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.endpoint.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.endpoint.world_size()
    }

    /// The experts of `rank`; none if there is no such rank.
    #[must_use]
    pub fn local_experts(&self, rank: u32) -> Range<u32> {
        let geometry = self.tables.geometry();
        if rank >= geometry.ranks {
            return 0..0;
        }
        geometry.first_expert(rank)..geometry.first_expert(rank + 1)
    }

    /// Bytes that the group has allocated on this rank.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        self.memory.bytes() + self.tables.bytes()
    }

    /// Which ranks are left out, in rank order: by [`set_masked`](Self::set_masked), or with
    /// [`GroupOptions::masking`] because they were gone or late. Nothing is sent to them, and they are waited for no
    /// longer; a token's experts there are missing in its sum. What each rank leaves out is its own matter: ranks that
    /// must agree compare.
    #[must_use]
    pub fn masked(&self) -> Vec<bool> {
        (0..self.world_size())
            .map(|rank| self.tables.is_masked(rank))
            .collect()
    }

    /// Leaves a rank out from the next call on, or takes it in again. One that is taken in must have made all calls
    /// meanwhile, leaving this rank out. On a GPU all launches must have [come to their end](Self::wait) before, which
    /// nobody checks.
    ///
    /// # Errors
    /// [`MoeError::Usage`] if there is no such rank or it is this one, or calls of this rank are under way.
    pub fn set_masked(&self, rank: u32, masked: bool) -> Result<(), MoeError> {
        let (own, ranks) = (self.rank(), self.world_size());
        if rank >= ranks || rank == own {
            return Err(self.usage(format!(
                "rank {rank} cannot be masked; it can be one of {ranks} but this one"
            )));
        }
        let desk = self.desk()?;
        if desk.sent != desk.completed {
            return Err(self.usage("calls are under way; complete them before masking".to_owned()));
        }
        let stored = self.tables.set_masked(rank, masked);
        stored.map_err(|error| HalError::from(error).into())
    }

    pub(crate) fn usage(&self, reason: String) -> MoeError {
        let rank = self.rank();
        MoeError::Usage { rank, reason }
    }

    #[cold]
    fn not_on(&self, device: &str) -> MoeError {
        let here = self.endpoint.device().name();
        self.usage(format!(
            "the group is on {here}; make its calls as for {here}, not as for {device}"
        ))
    }

    fn on_cpu(&self) -> Result<(), MoeError> {
        match &self.machine {
            Machine::Cpu { .. } => Ok(()),
            Machine::Cuda(_) => Err(self.not_on("cpu")),
        }
    }

    /// What launches, of a group on a CUDA device.
    pub(crate) fn launcher(&self) -> Result<&Launcher, MoeError> {
        match &self.machine {
            Machine::Cuda(launcher) => Ok(launcher),
            Machine::Cpu { .. } => Err(self.not_on("cuda")),
        }
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(crate) fn tables(&self) -> &GroupTables {
        &self.tables
    }

    /// The pass whose call was sent is gone, so it will never be completed.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn watch(&self) -> Watch<'_> {
        Watch::new(&self.endpoint, self.options.timeout, self.options.masking)
    }

    /// What a launch needs, if the group can be used.
    pub(crate) fn desk(&self) -> Result<MutexGuard<'_, Desk>, MoeError> {
        let desk = match self.desk.try_lock() {
            Ok(desk) => desk,
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(TryLockError::WouldBlock) => {
                return Err(self.usage(
                    "another thread is in a call of the group; make its calls one after the other"
                        .to_owned(),
                ));
            }
        };
        let reason = match (desk.has_failed, self.abandoned.load(Ordering::Relaxed)) {
            (true, _) => "an earlier call failed",
            (false, true) => "a handle was dropped before its call was completed",
            (false, false) => return Ok(desk),
        };
        let rank = self.rank();
        Err(MoeError::Poisoned { rank, reason })
    }

    /// Launches a step of call number `number`. False if it was stopped, and ranks were left out because of that: then
    /// it must be launched again.
    pub(crate) fn attempt(
        &self,
        desk: &mut Desk,
        pass: &mut PassTables,
        step: Step<'_>,
        (number, call): (u64, Call),
        watch: &Watch<'_>,
    ) -> Result<bool, MoeError> {
        let Machine::Cpu { grid, rows } = &self.machine else {
            return Err(self.not_on("cpu"));
        };
        let context = self.endpoint.context(watch);
        // Whoever has the desk has it alone.
        let mut grid = grid.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = step.launch(&mut grid, &context, &self.tables, pass, rows);
        let Err(interrupted) = launched else {
            return Ok(true);
        };
        match self.leave_out(&interrupted, number, watch) {
            true => Ok(false),
            false => {
                desk.has_failed = true;
                Err(self.explain(&interrupted, (number, call), watch))
            }
        }
    }

    /// [`attempt`](Self::attempt) until it is done, for what waits for nobody after others could see it.
    pub(crate) fn launch(
        &self,
        desk: &mut Desk,
        pass: &mut PassTables,
        step: Step<'_>,
        call: (u64, Call),
        watch: &Watch<'_>,
    ) -> Result<(), MoeError> {
        while !self.attempt(desk, pass, step, call, watch)? {}
        Ok(())
    }

    /// The ranks from which something is missing.
    fn missing(&self, interrupted: &Interrupted, number: u64) -> Vec<u32> {
        let phase = phase_of(interrupted);
        (0..self.world_size())
            .filter(|&rank| !self.tables.is_masked(rank))
            .filter(|&rank| !self.tables.has_done(phase, number, rank))
            .collect()
    }

    /// Masks the ranks because of which a launch was stopped, if that is what to do; whether to launch again.
    pub(crate) fn leave_out(
        &self,
        interrupted: &Interrupted,
        number: u64,
        watch: &Watch<'_>,
    ) -> bool {
        if interrupted.stopped == Stopped::Mismatch || !watch.may_leave_out() {
            return false;
        }
        let own = self.rank();
        let site = &interrupted.waiting.site;
        let mut missing = self.missing(interrupted, number);
        let is_missing = missing.contains(&site.peer);
        // What was waited for may have come at the last moment.
        let has_come = !is_missing && watch.may_wait_again(site);
        if !is_missing && !has_come {
            missing.push(site.peer);
        }
        missing.retain(|&rank| rank != own && watch.leaves_out(rank));
        for &rank in &missing {
            tracing::warn!(
                "rank {own} leaves rank {rank} out: {} missing in call {number}",
                waited_for(phase_of(interrupted))
            );
            // The host's memory, where nothing can fail.
            let _ = self.tables.set_masked(rank, true);
        }
        if !missing.is_empty() {
            watch.begin_anew();
        }
        has_come || !missing.is_empty()
    }

    #[cold]
    pub(crate) fn explain(
        &self,
        interrupted: &Interrupted,
        (number, call): (u64, Call),
        watch: &Watch<'_>,
    ) -> MoeError {
        let rank = self.rank();
        let Interrupted {
            stopped, waiting, ..
        } = *interrupted;
        let ours = words(number, call.signature);
        if stopped == Stopped::Mismatch {
            let peer = waiting.site.peer;
            let theirs = match self.tables.announced(number, peer) {
                Some(signature) if signature != call.signature => words(number, signature),
                Some(_) => format!("{ours}, with rows that do not match what was announced"),
                None => "another".to_owned(),
            };
            return MoeError::Mismatch {
                rank,
                peer,
                theirs,
                ours,
            };
        }
        let mut peers = self.missing(interrupted, number);
        let peer = waiting.site.peer;
        // It has come since, or was said to have.
        if peers.is_empty() && peer != rank {
            peers.push(peer);
        }
        MoeError::Interrupted {
            rank,
            call: ours,
            waited_for: waited_for(phase_of(interrupted)),
            peers,
            cause: Box::new(watch.cause(stopped, &waiting)),
        }
    }
}

pub(crate) fn phase_of(interrupted: &Interrupted) -> Phase {
    let phases = [
        Phase::Credit,
        Phase::Counts,
        Phase::Rows,
        Phase::Weights,
        Phase::Choices,
    ];
    let channel = interrupted.waiting.site.channel;
    let found = phases.into_iter().find(|&phase| phase as u32 == channel);
    found.unwrap_or(Phase::Blocks)
}

const fn waited_for(phase: Phase) -> &'static str {
    match phase {
        Phase::Credit => "the call before the last to be completed",
        Phase::Counts => "the counts",
        Phase::Rows => "the rows",
        Phase::Weights => "the weights",
        _ => "the thread blocks",
    }
}

const DISPATCH: u32 = 1;
const COMBINE: u32 = 2;
/// Where a signature has the format of tokens, or whether weights are given.
const DETAIL: u32 = 4;
/// Where it has top-k.
const TOP_K: u32 = 16;

pub(crate) const fn dispatch_call(format: Format, top_k: u32) -> Call {
    Call {
        signature: DISPATCH | format.number() << DETAIL | top_k << TOP_K,
    }
}

pub(crate) const fn combine_call(gives_weights: bool, top_k: u32) -> Call {
    Call {
        signature: COMBINE | (gives_weights as u32) << DETAIL | top_k << TOP_K,
    }
}

/// A call in words: `call 3, a dispatch of plain tokens, top-8`.
fn words(number: u64, signature: u32) -> String {
    let detail = signature >> DETAIL & 0xf;
    let top_k = signature >> TOP_K;
    let kind = signature & 0xf;
    let what = match (kind, Format::of_number(detail), detail) {
        (DISPATCH, Some(format), _) => format!("a dispatch of {format}"),
        (COMBINE, _, 0) => "a combine".to_owned(),
        (COMBINE, _, 1) => "a combine with weights".to_owned(),
        _ => format!("something unknown ({signature:#x})"),
    };
    format!("call {number}, {what}, top-{top_k}")
}

/// FNV-1a: the same for the same words, in every build.
fn salt(statement: &str) -> u32 {
    statement.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_handles_go_from_thread_to_thread() {
        fn goes<T: Send + Sync>() {}
        goes::<Group>();
        goes::<Handle>();
    }

    #[test]
    fn a_rank_that_is_late_is_left_out_though_it_has_said_that_all_was_sent() {
        use crossweft_device::{Site, WaitKind, Waiting};
        use crossweft_net::{Group as Job, JoinOptions, Rendezvous, RendezvousOptions};

        let soon = || Instant::now() + Duration::from_secs(120);
        let rendezvous = Rendezvous::start(&RendezvousOptions::default()).unwrap();
        let id = rendezvous.unique_id();
        let rank_main = |rank: u32| {
            let job = Job::join(&id, rank, 2, &JoinOptions::default()).unwrap();
            let endpoint = Endpoint::new(Arc::new(job), soon()).unwrap();
            let mut options = GroupOptions::new(2, 1, 8, 1);
            options.masking = true;
            options.timeout = Duration::from_secs(60);
            let group = Group::new(&endpoint, options, soon()).unwrap();
            let routing = Routing {
                experts: crate::Experts::I32(&[]),
                top_k: 1,
                weights: None,
            };
            let mut handle = group.handle(&routing, Layout::Flat).unwrap();
            let output = crate::DispatchOutput::new(&mut []);
            handle.dispatch(crate::Tokens::Plain(&[]), output).unwrap();
            // Rank 1 has said that its rows of call 0 were sent. They are waited for all the same, and too long.
            let interrupted = Interrupted {
                stopped: Stopped::Deadline,
                waiting: Waiting {
                    site: Site {
                        kind: WaitKind::Message,
                        peer: 1 - rank,
                        channel: Phase::Rows as u32,
                        op: Site::NO_OP,
                    },
                    ..Waiting::default()
                },
                block: 0,
            };
            let watch = Watch::new(&endpoint, Duration::ZERO, true);
            watch.begin_anew();
            std::thread::sleep(Duration::from_millis(1));
            assert!(group.tables.has_done(Phase::Rows, 0, 1 - rank));
            let call = (0, dispatch_call(Format::Plain, 1));
            let error = group.explain(&interrupted, call, &watch);
            let MoeError::Interrupted { peers, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(peers, [1 - rank]);
            assert!(group.leave_out(&interrupted, 0, &watch));
            assert_eq!(
                group.masked(),
                [false; 2],
                "it may have come at the last moment"
            );
            assert!(group.leave_out(&interrupted, 0, &watch));
            assert!(group.tables.is_masked(1 - rank));
            endpoint.group().barrier(soon()).unwrap();
        };
        std::thread::scope(|scope| {
            let rank_main = &rank_main;
            for rank in 0..2 {
                scope.spawn(move || rank_main(rank));
            }
        });
    }

    #[test]
    fn calls_have_words() {
        let format = Format::F8E4M3(crate::ScaleType::F32);
        assert_eq!(
            words(3, dispatch_call(format, 8).signature),
            "call 3, a dispatch of f8e4m3 tokens with f32 scales, top-8"
        );
        assert_eq!(
            words(0, combine_call(true, 32).signature),
            "call 0, a combine with weights, top-32"
        );
        assert_eq!(
            words(1, 0xf),
            "call 1, something unknown (0xf), top-0",
            "what a peer says may be anything"
        );
    }

    #[test]
    fn what_cannot_be_is_said() {
        let good = GroupOptions::new(256, 128, 7168, 8);
        assert_eq!(good.check(16), Ok(()));
        let bad = |change: &dyn Fn(&mut GroupOptions), ranks, word: &str| {
            let mut options = good;
            change(&mut options);
            let reason = options.check(ranks).unwrap_err();
            assert!(reason.contains(word), "{reason}");
        };
        bad(&|_| {}, 17, "17 ranks; it can be 16");
        bad(&|o| o.experts = 0, 8, "no experts");
        bad(&|o| o.top_k = 33, 8, "33 experts of a token");
        bad(&|o| o.max_tokens = 0, 8, "no tokens");
        bad(&|o| o.max_tokens = u32::MAX, 8, "tokens; it can be");
        bad(
            &|o| o.hidden = 7169,
            8,
            "14338 bytes; it must be a multiple of 16",
        );
        bad(&|o| o.blocks = 0, 8, "no thread blocks");
        bad(&|o| o.dtype = DataType::I32, 8, "type i32");
    }
}
