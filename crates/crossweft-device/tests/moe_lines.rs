//! Dispatch and combine with rows as lines, on the host: blocks of several warps, each thread one of the host's, against
//! what tokens and choices say.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes of tests"
)]

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{HostBlock, Random};
use crossweft_device::element::{Bf16, Element};
use crossweft_device::gpu::moe::{
    self as gpu, Calls, CombineLaunch, DispatchLaunch, MARKS_BYTES, META_BYTES, STAGING_BYTES,
    Shared, TABLES_BYTES, WARP_TABLE_BYTES, steps,
};
use crossweft_device::gpu::{GpuContext, WARP};
use crossweft_device::moe::combine::{self, Weighting};
use crossweft_device::moe::dispatch::{Choices, Input, Output, Quantise};
use crossweft_device::moe::rows::{HostRows, Rows};
use crossweft_device::moe::{
    Call, GROUP, Geometry, Group, Placement, Routes, SENT, STATE_LINES, Sizes, clear, is_stopped,
    stop,
};
use crossweft_device::reduce::Isa;
use crossweft_device::{Block, DataType, Memory, Raw, Stopped, Waiting};

const WARPS: u32 = 2;
const BLOCKS: u32 = 2;
/// Looks until a wait is given up, which only a broken protocol takes.
const PATIENCE: u32 = 1 << 22;

/// Where threads of a warp, or of a block, meet and vote.
struct Meeting {
    barrier: Barrier,
    worst: AtomicU32,
}

impl Meeting {
    fn new(threads: u32) -> Self {
        Self {
            barrier: Barrier::new(threads as usize),
            worst: AtomicU32::new(0),
        }
    }

    /// The largest number that any brings.
    fn most(&self, mine: u32) -> u32 {
        self.worst.fetch_max(mine, Ordering::SeqCst);
        self.barrier.wait();
        let most = self.worst.load(Ordering::SeqCst);
        // Nobody brings anything again before all have read.
        if self.barrier.wait().is_leader() {
            self.worst.store(0, Ordering::SeqCst);
        }
        self.barrier.wait();
        most
    }
}

struct Team {
    block: Meeting,
    warps: [Meeting; WARPS as usize],
}

struct Member<'a> {
    team: &'a Team,
    thread: u32,
}

impl Block for Member<'_> {
    type Memory = Raw;

    fn memory(&self) -> &Raw {
        &Raw
    }

    fn thread(&self) -> u32 {
        self.thread
    }

    fn threads(&self) -> u32 {
        WARPS * WARP
    }

    fn sync(&self, mine: Result<(), Stopped>) -> Result<(), Stopped> {
        match self
            .team
            .block
            .most(mine.map_or_else(|stopped| stopped as u32, |()| 0))
        {
            0 => Ok(()),
            2 => Err(Stopped::Deadline),
            3 => Err(Stopped::Mismatch),
            _ => Err(Stopped::Aborted),
        }
    }

    fn pause(&self, waiting: &Waiting) -> Result<(), Stopped> {
        if waiting.spins >= PATIENCE {
            return Err(Stopped::Deadline);
        }
        std::thread::yield_now();
        Ok(())
    }

    fn refuse(&self, _waiting: &Waiting) -> Stopped {
        Stopped::Mismatch
    }

    fn wake(&self, _peer: u32) {}

    fn warp(&self) -> u32 {
        self.thread / WARP
    }

    fn warps(&self) -> u32 {
        WARPS
    }

    fn lane(&self) -> u32 {
        self.thread % WARP
    }

    fn lanes(&self) -> u32 {
        WARP
    }

    fn warp_sync(&self) {
        self.team.warps[self.warp() as usize].barrier.wait();
    }

    fn warp_any(&self, x: bool) -> bool {
        self.team.warps[self.warp() as usize].most(x.into()) != 0
    }

    fn any(&self, x: bool) -> bool {
        self.team.block.most(x.into()) != 0
    }
}

/// Zeros at a multiple of a line.
struct Zeros(Vec<u64>);

impl Zeros {
    fn new(bytes: u64) -> Self {
        Self(vec![0; bytes as usize / 8 + 32])
    }

    fn filled(bytes: &[u8]) -> Self {
        let mut this = Self::new(bytes.len() as u64);
        this.bytes_mut(bytes.len()).copy_from_slice(bytes);
        this
    }

    fn addr(&mut self) -> u64 {
        (self.0.as_mut_ptr().expose_provenance() as u64).next_multiple_of(128)
    }

    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        let at = self.addr();
        // SAFETY: there is room for what was asked for behind the first multiple of a line.
        unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) }
    }

    fn at<T: Copy>(&mut self, index: u64) -> T {
        // SAFETY: tests ask for what is there.
        unsafe { (self.addr() as *const T).add(index as usize).read() }
    }
}

/// What a pass is like.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: u32,
    max_tokens: u32,
    top_k: u32,
    experts: u32,
    hidden: u64,
    placement: Placement,
    /// Whether calls are made in halves.
    staged: bool,
    /// Whether tokens are quantised, which only go there then.
    quantise: Quantise,
    /// Whether before dispatches and combines it is as if a launch had been stopped.
    stopped: bool,
    /// A rank that the others leave out, and that does nothing.
    masked: Option<u32>,
}

impl Case {
    fn geometry(&self) -> Geometry {
        Geometry::new(Sizes {
            ranks: self.ranks,
            max_tokens: self.max_tokens,
            top_k: self.top_k,
            experts: self.experts,
            payload_bytes: 2 * self.hidden,
            lines: true,
        })
    }

    /// Bytes of elements and of scales that a token arrives with.
    fn arriving(&self) -> (u64, u64) {
        let groups = self.hidden.div_ceil(GROUP);
        match self.quantise {
            Quantise::No => (2 * self.hidden, 0),
            // Whole words, as the host has them.
            Quantise::Exponents => (self.hidden, groups.next_multiple_of(4)),
            _ => (self.hidden, 4 * groups),
        }
    }

    /// What a token arrives as.
    fn arrived(&self, token: &[u8]) -> (Vec<u8>, Vec<u8>) {
        if self.quantise == Quantise::No {
            return (token.to_vec(), Vec::new());
        }
        let (bytes, scale_bytes) = self.arriving();
        let (mut elements, mut scales) = (Zeros::new(bytes), Zeros::new(scale_bytes));
        let mut from = Zeros::filled(token);
        let to = (elements.addr(), scales.addr());
        // SAFETY: every machine has these instructions; there is room.
        unsafe {
            let rows = HostRows::with_isa(DataType::Bf16, Isa::Baseline).unwrap();
            rows.quantise(
                &HostBlock::NO_WAIT,
                to,
                from.addr(),
                self.hidden,
                self.quantise,
            );
        }
        let bytes = elements.bytes_mut(bytes as usize).to_vec();
        (bytes, scales.bytes_mut(scale_bytes as usize).to_vec())
    }

    /// Rows that there is room for.
    fn rows(&self) -> u64 {
        let sources = u64::from(self.ranks * self.max_tokens);
        match self.placement {
            Placement::ExpertMajor => sources * u64::from(self.geometry().most_experts()),
            _ => sources,
        }
    }
}

/// A rank's memory.
struct Rank {
    // What addresses in the others point to.
    _kept: Vec<Zeros>,
    state: Zeros,
    group: Group,
    routes: Routes,
    received: Zeros,
    scales: Zeros,
    experts: Zeros,
    weights: Zeros,
    sources: Zeros,
    sums: Zeros,
}

fn ranks(case: &Case) -> Vec<Rank> {
    let geometry = case.geometry();
    let mut memories: Vec<_> = (0..case.ranks)
        .map(|_| Zeros::new(geometry.bytes()))
        .collect();
    let addresses: Vec<u64> = memories.iter_mut().map(Zeros::addr).collect();
    (0..case.ranks)
        .zip(memories)
        .map(|(rank, memory)| {
            let (r, m, k) = (
                u64::from(case.ranks),
                u64::from(case.max_tokens),
                u64::from(case.top_k),
            );
            let most = u64::from(geometry.most_experts());
            let mut kept = vec![memory];
            let mut words = |count: u64| {
                let mut zeros = Zeros::new(4 * count);
                let addr = zeros.addr();
                kept.push(zeros);
                addr
            };
            let mut table = Zeros::new(8 * r);
            for (at, address) in table
                .bytes_mut(8 * r as usize)
                .chunks_exact_mut(8)
                .zip(&addresses)
            {
                at.copy_from_slice(&address.to_ne_bytes());
            }
            let memories = table.addr();
            let mut state = Zeros::new(64 * STATE_LINES as u64);
            let warps = u64::from(BLOCKS * WARPS);
            let group = Group {
                geometry,
                memories,
                own: addresses[rank as usize],
                masked: words(2 * r),
                state: state.addr(),
                marks: words(2 * 2 * geometry.mark_words(BLOCKS)),
                returns: words(r),
                staging: words(warps * STAGING_BYTES.next_multiple_of(64) / 4),
                staging_bytes: STAGING_BYTES.next_multiple_of(64),
                salt: 9,
                rank,
                blocks: BLOCKS,
            };
            // One behind another, as the host has them.
            let counts = words(2 * r + 2 * r * most + 2 * most + 1);
            let begins = counts + 4 * (r + r * most);
            let routes = Routes {
                experts: words(m * k),
                weights: words(m * k),
                slots: words(m * r),
                sent: words(r),
                received: counts,
                counts: counts + 4 * r,
                begins,
                totals: begins + 4 * r * most,
                bases: begins + 4 * (r * most + most),
                offsets: begins + 4 * (r * most + most + r),
                positions: words(r * m * k),
                received_weights: words(r * m * k),
                stride: 4 * (2 * r + 2 * r * most + 2 * most + 1),
                tokens: 0,
                top_k: case.top_k,
                placement: case.placement,
                alignment: 1,
            };
            kept.push(table);
            let room = case.rows();
            Rank {
                _kept: kept,
                state,
                group,
                routes,
                received: Zeros::new(room * 2 * case.hidden),
                scales: Zeros::new(room * case.arriving().1),
                experts: Zeros::new(room * 4 * k),
                weights: Zeros::new(room * 4 * k),
                sources: Zeros::new(room * 4),
                sums: Zeros::new(m * 2 * case.hidden),
            }
        })
        .collect()
}

/// Runs a launch of every rank, with all blocks and threads at once.
fn launch_all<L: Sync>(
    launches: &[L],
    work: impl Fn(&Member<'_>, &L, &Shared, u32) -> Result<(), Stopped> + Sync,
) {
    let work = &work;
    let shared: Vec<_> = (0..launches.len() as u32 * BLOCKS)
        .map(|_| {
            let mut areas = [
                WARPS as usize * WARP_TABLE_BYTES,
                WARPS as usize * META_BYTES,
                MARKS_BYTES,
                TABLES_BYTES,
            ]
            .map(|bytes| Zeros::new(bytes as u64));
            for area in &mut areas {
                area.0.fill(0xa5a5_a5a5_a5a5_a5a5);
            }
            let [terms, metas, marks, tables] = areas.each_mut().map(|area| area.addr());
            let shared = Shared {
                terms,
                metas,
                marks,
                tables,
            };
            let team = Team {
                block: Meeting::new(WARPS * WARP),
                warps: [Meeting::new(WARP), Meeting::new(WARP)],
            };
            (shared, team, areas)
        })
        .collect();
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, (shared, team, _)) in shared.iter().enumerate() {
            let launch = &launches[index / BLOCKS as usize];
            for thread in 0..WARPS * WARP {
                let member = Member { team, thread };
                let index = index as u32 % BLOCKS;
                threads.push(scope.spawn(move || work(&member, launch, shared, index)));
            }
        }
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

const CONTEXT: GpuContext = GpuContext {
    abort: 0,
    status: 0,
    limit_ns: 0,
};

fn dispatch(launches: &[DispatchLaunch]) {
    launch_all(launches, |member, launch, shared, index| {
        // SAFETY: the tables were made for this.
        unsafe {
            let mut own = *launch;
            let calls = Calls::read(&Raw, &launch.group);
            let before = gpu::dispatch::prepare(member, launch, shared, index);
            let by = shared.moved(&launch.routes, index, launch.group.blocks);
            own.routes = launch.routes.moved(by);
            member.sync(Ok(()))?;
            let home = launch.routes.received;
            gpu::dispatch::run::<_, Bf16>(member, &own, shared, (calls, before), (index, home))
        }
    });
}

fn combine(launches: &[CombineLaunch]) {
    launch_all(launches, |member, launch, shared, index| {
        // SAFETY: as above.
        unsafe {
            let calls = Calls::read(&Raw, &launch.group);
            let before = gpu::combine::prepare(member, launch);
            member.sync(Ok(()))?;
            gpu::combine::run::<_, Bf16>(member, launch, shared, (calls, before), index)
        }
    });
}

/// As if a launch had been stopped whose last thread block had told of a call, and as if that were forgotten.
fn stop_one(rank: &mut Rank) {
    let sent = rank.state.at::<u64>(SENT / 8);
    // SAFETY: nothing runs; the word is the state's.
    unsafe {
        Raw.store(rank.group.state + SENT, sent + 1);
        stop(&Raw, &rank.group);
        clear(&Raw, &rank.group, sent);
        assert!(!is_stopped(&Raw, &rank.group));
    }
}

/// Does some passes, whose tokens are told apart by what they hold, and looks at everything.
fn passes(case: Case, tokens: &[&[u32]]) {
    let geometry = case.geometry();
    let mut random = Random(u64::from(case.experts) + case.hidden);
    let mut ranks = ranks(&case);
    let is_out = |rank: u32| case.masked == Some(rank);
    if let Some(other) = case.masked {
        for rank in &ranks {
            // SAFETY: there is a word for each rank.
            unsafe { ((rank.group.masked + 8 * u64::from(other)) as *mut u64).write(1) };
        }
    }
    let (k, hidden) = (case.top_k as usize, case.hidden as usize);
    let row = 2 * hidden;
    for counts in tokens {
        if case.stopped {
            ranks.iter_mut().for_each(stop_one);
        }
        let choices: Vec<Vec<i32>> = counts
            .iter()
            .map(|&count| {
                (0..count as usize * k)
                    .map(|_| random.below(u64::from(case.experts) + 1) as i32 - 1)
                    .collect()
            })
            .collect();
        let weights: Vec<Vec<f32>> = choices
            .iter()
            .map(|choices| {
                choices
                    .iter()
                    .map(|_| random.below(9) as f32 / 4.0 - 1.0)
                    .collect()
            })
            .collect();
        // Small whole numbers, so that sums are exact.
        let data: Vec<Vec<u8>> = counts
            .iter()
            .map(|&count| {
                (0..count as usize * hidden)
                    .flat_map(|_| Bf16::store(random.below(15) as f32 - 7.0).0.to_ne_bytes())
                    .collect()
            })
            .collect();
        let mut inputs: Vec<_> = (0..counts.len())
            .map(|rank| {
                let bytes = |words: Vec<[u8; 4]>| Zeros::filled(&words.concat());
                (
                    Zeros::filled(&data[rank]),
                    bytes(choices[rank].iter().map(|x| x.to_ne_bytes()).collect()),
                    bytes(weights[rank].iter().map(|x| x.to_ne_bytes()).collect()),
                )
            })
            .collect();
        let launches: Vec<_> = ranks
            .iter_mut()
            .zip(&mut inputs)
            .zip(*counts)
            .map(|((rank, (data, choices, weights)), &count)| {
                rank.routes.tokens = count;
                rank.experts.0.fill(0x7777_7777_7777_7777);
                rank.received.0.fill(0x7777_7777_7777_7777);
                rank.scales.0.fill(0x7777_7777_7777_7777);
                DispatchLaunch {
                    group: rank.group,
                    routes: rank.routes,
                    choices: Choices {
                        experts: choices.addr(),
                        weights: weights.addr(),
                        wide: 0,
                        reserved: 0,
                    },
                    input: Input {
                        tokens: data.addr(),
                        scales: 0,
                        hidden: case.hidden,
                        token_bytes: 2 * case.hidden,
                        payload_bytes: case.arriving().0,
                        scale_bytes: case.arriving().1,
                        quantise: case.quantise,
                        call: Call { signature: 3 },
                    },
                    output: Output {
                        tokens: rank.received.addr(),
                        scales: match case.quantise {
                            Quantise::No => 0,
                            _ => rank.scales.addr(),
                        },
                        experts: rank.experts.addr(),
                        weights: rank.weights.addr(),
                        sources: rank.sources.addr(),
                        capacity: case.rows(),
                        payload_bytes: case.arriving().0,
                        scale_bytes: case.arriving().1,
                        wide: 0,
                    },
                    context: CONTEXT,
                    steps: 0,
                    reserved: 0,
                }
            })
            .collect();
        let with = |steps: u32| -> Vec<DispatchLaunch> {
            launches
                .iter()
                .filter(|launch| !is_out(launch.group.rank))
                .map(|launch| DispatchLaunch { steps, ..*launch })
                .collect()
        };
        match case.staged {
            true => {
                dispatch(&with(steps::SEND));
                dispatch(&with(steps::COUNT | steps::RECEIVE));
            }
            false => dispatch(&with(steps::SEND | steps::COUNT | steps::RECEIVE)),
        }
        // Rows as they must lie, by source and token; of each expert, so many.
        for (me, rank) in (0..).zip(&mut ranks).filter(|(me, _)| !is_out(*me)) {
            let own = geometry.first_expert(me)..geometry.first_expert(me + 1);
            let is_here = |e: i32| e >= 0 && own.contains(&(e as u32));
            let mut of_expert = vec![0_u64; own.len()];
            let mut flat = 0;
            for (source, count) in (0_u32..).zip(*counts) {
                let mut slot = 0;
                let count = if is_out(source) { 0 } else { *count };
                for token in 0..count as usize {
                    let chosen = &choices[source as usize][token * k..][..k];
                    if !chosen.iter().any(|&e| is_here(e)) {
                        continue;
                    }
                    let sent = case.arrived(&data[source as usize][token * row..][..row]);
                    let what = format!("{case:?} rank {me} source {source} token {token}");
                    let look = |rank: &mut Rank, at: u64| {
                        let (row, scales) = (sent.0.len(), sent.1.len());
                        let at = at as usize;
                        let found = &rank.received.bytes_mut((at + 1) * row)[at * row..];
                        assert_eq!(found, sent.0, "{what}");
                        let found = &rank.scales.bytes_mut((at + 1) * scales)[at * scales..];
                        assert_eq!(found, sent.1, "{what}");
                        assert_eq!(rank.sources.at::<u32>(at as u64), token as u32, "{what}");
                    };
                    if case.placement == Placement::ExpertMajor {
                        for (e, count) in own.clone().zip(&mut of_expert) {
                            if chosen.contains(&(e as i32)) {
                                let first = u64::from(e - own.start)
                                    * u64::from(case.ranks * case.max_tokens);
                                let at = first + *count;
                                look(rank, at);
                                *count += 1;
                            }
                        }
                    } else {
                        let at = match case.placement {
                            Placement::RankMajor => u64::from(source * case.max_tokens) + slot,
                            _ => flat,
                        };
                        look(rank, at);
                        for (i, &e) in chosen.iter().enumerate() {
                            let local = if is_here(e) { e - own.start as i32 } else { -1 };
                            assert_eq!(rank.experts.at::<i32>(at * k as u64 + i as u64), local);
                        }
                    }
                    slot += 1;
                    flat += 1;
                }
                let routes = rank.routes;
                // SAFETY: the tables are there.
                let received: u32 = unsafe {
                    crossweft_device::Memory::read(&Raw, routes.received + 4 * u64::from(source))
                };
                assert_eq!(
                    u64::from(received),
                    slot,
                    "{case:?} rank {me} source {source}"
                );
            }
        }
        if case.stopped {
            ranks.iter_mut().for_each(stop_one);
        }
        if case.quantise != Quantise::No {
            continue;
        }
        // What came goes back as it is.
        let launches: Vec<_> = ranks
            .iter_mut()
            .map(|rank| CombineLaunch {
                group: rank.group,
                routes: rank.routes,
                input: combine::Input {
                    rows: rank.received.addr(),
                    weights: 0,
                    hidden: case.hidden,
                    payload_bytes: 2 * case.hidden,
                    weighting: match case.placement {
                        Placement::ExpertMajor => Weighting::Dispatched,
                        _ => Weighting::One,
                    },
                    call: Call { signature: 4 },
                },
                output: rank.sums.addr(),
                context: CONTEXT,
                steps: 0,
                reserved: 0,
            })
            .collect();
        let with = |steps: u32| -> Vec<CombineLaunch> {
            launches
                .iter()
                .filter(|launch| !is_out(launch.group.rank))
                .map(|launch| CombineLaunch { steps, ..*launch })
                .collect()
        };
        match case.staged {
            true => {
                combine(&with(steps::SEND));
                combine(&with(steps::RECEIVE));
            }
            false => combine(&with(steps::SEND | steps::RECEIVE)),
        }
        for (me, rank) in ranks.iter_mut().enumerate() {
            if is_out(me as u32) {
                continue;
            }
            let is_in = |e: i32| e >= 0 && !is_out(geometry.rank_of(e as u32));
            let sums = rank.sums.bytes_mut(counts[me] as usize * row).to_vec();
            for token in 0..counts[me] as usize {
                let chosen = &choices[me][token * k..][..k];
                let weights = &weights[me][token * k..][..k];
                for i in 0..hidden {
                    let x = |bytes: &[u8]| {
                        let at = (token * hidden + i) * 2;
                        Bf16(u16::from_ne_bytes([bytes[at], bytes[at + 1]])).load()
                    };
                    let factor: f32 = match case.placement {
                        Placement::ExpertMajor => {
                            let there = chosen.iter().zip(weights).filter(|(e, _)| is_in(**e));
                            there.map(|(_, weight)| weight).sum()
                        }
                        _ => {
                            let mut to: Vec<u32> = chosen
                                .iter()
                                .filter(|&&e| is_in(e))
                                .map(|&e| geometry.rank_of(e as u32))
                                .collect();
                            to.sort_unstable();
                            to.dedup();
                            to.len() as f32
                        }
                    };
                    let expected = factor * x(&data[me]);
                    assert_eq!(
                        x(&sums),
                        expected,
                        "{case:?} rank {me} token {token} element {i}"
                    );
                }
            }
        }
    }
    for rank in ranks.iter_mut().filter(|rank| !is_out(rank.group.rank)) {
        let calls = match case.quantise {
            Quantise::No => 2 * tokens.len() as u64,
            _ => tokens.len() as u64,
        };
        assert_eq!(
            [rank.state.at::<u64>(0), rank.state.at::<u64>(8)],
            [calls; 2]
        );
    }
}

const CASE: Case = Case {
    ranks: 2,
    max_tokens: 9,
    top_k: 3,
    experts: 5,
    hidden: 1000,
    placement: Placement::RankMajor,
    staged: false,
    quantise: Quantise::No,
    stopped: false,
    masked: None,
};

#[test]
fn few_tokens_arrive_and_come_back() {
    let tokens: [&[u32]; 4] = [&[9, 4], &[0, 1], &[5, 9], &[1, 1]];
    passes(CASE, &tokens);
    passes(
        Case {
            placement: Placement::ExpertMajor,
            hidden: 8,
            ..CASE
        },
        &tokens,
    );
}

#[test]
fn in_halves_and_flat() {
    let tokens: [&[u32]; 3] = [&[9, 4], &[3, 0], &[5, 9]];
    passes(
        Case {
            placement: Placement::Flat,
            staged: true,
            hidden: 968,
            ..CASE
        },
        &tokens,
    );
}

#[test]
fn calls_go_on_after_launches_that_were_stopped() {
    let few: [&[u32]; 4] = [&[9, 4], &[0, 1], &[5, 9], &[1, 1]];
    let case = Case {
        staged: true,
        stopped: true,
        ..CASE
    };
    passes(case, &few);
    let case = Case {
        placement: Placement::Flat,
        max_tokens: 300,
        hidden: 8,
        ..case
    };
    passes(case, &[&[300, 270], &[3, 290], &[299, 300]]);
}

#[test]
fn a_rank_is_left_out() {
    for (placement, max_tokens, staged) in [
        (Placement::ExpertMajor, 9, false),
        (Placement::Flat, 9, true),
        (Placement::RankMajor, 300, false),
    ] {
        let case = Case {
            ranks: 3,
            max_tokens,
            hidden: 8,
            placement,
            staged,
            masked: Some(1),
            ..CASE
        };
        let most = max_tokens;
        passes(case, &[&[most, 4, most - 1], &[3, 0, 0], &[5, 9, most]]);
    }
}

#[test]
fn many_tokens_are_sent_and_laid_out_at_the_same_time() {
    let case = Case {
        placement: Placement::Flat,
        max_tokens: 300,
        hidden: 8,
        ..CASE
    };
    passes(case, &[&[300, 270], &[3, 290], &[299, 300]]);
}

#[test]
fn tokens_are_quantised_on_the_way() {
    let tokens: [&[u32]; 2] = [&[5, 9], &[9, 0]];
    for (quantise, placement, hidden) in [
        (Quantise::F32, Placement::RankMajor, 2048),
        (Quantise::Exponents, Placement::ExpertMajor, 144),
        // In two segments of 14 groups at most: 15 groups, 22 and 28, and zeros behind them up to a word.
        (Quantise::Exponents, Placement::RankMajor, 1904),
        (Quantise::Exponents, Placement::Flat, 2752),
        (Quantise::Exponents, Placement::ExpertMajor, 3584),
        (Quantise::PowersOfTwo, Placement::Flat, 1808),
    ] {
        let case = Case {
            quantise,
            placement,
            hidden,
            ..CASE
        };
        passes(case, &tokens);
    }
}
