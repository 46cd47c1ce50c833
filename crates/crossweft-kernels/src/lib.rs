//! The GPU kernels: PTX that was compiled from `crossweft-device` and committed, and what to pass
//! to it.
//!
//! A module of PTX for each data type holds the plan executor, for every operation, another one plans of the commonest forms in
//! one piece; others hold plans that move blocks and reduce nothing, multiply elements before a sum, normalise tokens, exchange messages, dispatch and combine the tokens of a mixture
//! of experts, and two hold kernels for tests and measurements. The driver compiles them when they are loaded, so nobody
//! needs a CUDA toolkit. They are made by `cargo xtask kernels` from the sources in `kernels/`, and
//! checked by `cargo xtask kernels --check`.
//!
//! # How to launch
//!
//! A plan's kernel ([`Entries::plan`]) has two parameters: a [`PlanLaunch`] by value, and the address
//! of an array of them. For one rank, pass its plan and 0; the grid has one block for each of the
//! program's. For several ranks in one grid, pass the address of their plans in device memory (the
//! first parameter is then not read, but must be there); the grid's second dimension is the rank,
//! its first the largest number of blocks, and such a grid must be launched cooperatively. Blocks
//! are one-dimensional, a multiple of 32 and at most [`MAX_THREADS`] threads ([`Module::threads`]). There is no dynamic
//! shared memory.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod named;
mod part;

use crossweft_device::DataType;
pub use crossweft_device::gpu::{
    ECHO_WARMUP, EchoLaunch, ExchangeLaunch, GpuContext, Hop, MAX_CHAINS, MAX_FUSED, MAX_MESSAGES,
    MAX_MOVES, MAX_OPERANDS, Message, MessagesLaunch, Norm, OneShot, OneShotLaunch, OneShotNorm,
    OneShotScatter, PlanLaunch, Quantisation, Scale, SignalLaunch, StatusRecord, TwoShot,
};

pub use named::{mangled, named};

/// Threads of a block, at most, but where a module says otherwise: what registers are there for, so that nothing is
/// spilled.
pub const MAX_THREADS: u32 = 384;

/// Registers of a thread that a module must be compiled for, at most: the driver compiles functions for
/// any block size, and then finds that they do not fit a kernel of [`MAX_THREADS`].
pub const MAX_REGISTERS: u32 = (1 << 16) / MAX_THREADS / 8 * 8;

/// The oldest compute capability that the kernels run on, as `major * 10 + minor`. Some modules are there once more for
/// newer ones, which have instructions of their own.
pub const MIN_SM: u32 = 80;

/// A module of PTX.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Its name; that of its file is this, the architecture and `.ptx`.
    pub name: &'static str,
    /// What its kernels do: modules of one family differ in the data type.
    pub family: &'static str,
    /// The oldest compute capability it is for, as `major * 10 + minor`.
    pub sm: u32,
    /// The text.
    pub ptx: &'static str,
    /// Every entry point.
    pub entries: &'static [&'static str],
    /// Threads of a block, at most (`.maxntid`).
    pub threads: u32,
}

impl Module {
    /// Registers of a thread that it must be compiled for, at most: see [`MAX_REGISTERS`].
    #[must_use]
    pub const fn registers(&self) -> u32 {
        let most = (1 << 16) / self.threads / 8 * 8;
        // What instructions have bits for.
        if most > 248 { 248 } else { most }
    }

    /// The text with one of its [`entries`](Self::entries) alone, and what that calls, so that a driver compiles nothing
    /// else; `None` if it has no entry of that name.
    #[must_use]
    pub fn part(&self, entry: &str) -> Option<String> {
        part::part(self.ptx, entry)
    }
}

/// Entry points of a data type's plans in one piece.
macro_rules! fused {
    ($name:literal) => {
        [
            concat!("crossweft_one_shot_", $name),
            concat!("crossweft_one_shot_scatter_", $name),
            concat!("crossweft_one_shot_lines_", $name),
            concat!("crossweft_two_shot_", $name),
        ]
    };
}

macro_rules! modules {
    ($($dtype:ident, $name:literal;)*) => {
        /// All modules: one for each data type, in the order of [`DataType::ALL`], then the one that moves blocks, the
        /// one that multiplies elements of any type, the one that normalises tokens, the one that exchanges messages, those
        /// that also reduce them, and those for tests and measurements.
        pub const MODULES: &[Module] = &[
            $(
                Module {
                    name: $name,
                    family: PLAN,
                    sm: 80,
                    ptx: include_str!(concat!("../../../kernels/ptx/", $name, ".sm_80.ptx")),
                    entries: &[concat!("crossweft_plan_", $name)],
                    threads: MAX_THREADS,
                },
                Module {
                    name: concat!("fused_", $name),
                    family: FUSED,
                    sm: 80,
                    ptx: include_str!(concat!("../../../kernels/ptx/fused_", $name, ".sm_80.ptx")),
                    entries: &fused!($name),
                    threads: MAX_THREADS,
                },
                Module {
                    name: concat!("fused_", $name),
                    family: FUSED,
                    sm: 90,
                    ptx: include_str!(concat!("../../../kernels/ptx/fused_", $name, ".sm_90.ptx")),
                    entries: &fused!($name),
                    threads: MAX_THREADS,
                },
            )*
            Module {
                name: HOP,
                family: FUSED,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/hop.sm_80.ptx"),
                entries: &[HOP_PACKETS, HOP_DIRECT],
                threads: MAX_THREADS,
            },
            Module {
                name: HOP,
                family: FUSED,
                sm: 90,
                ptx: include_str!("../../../kernels/ptx/hop.sm_90.ptx"),
                entries: &[HOP_PACKETS, HOP_DIRECT],
                threads: MAX_THREADS,
            },
            Module {
                name: SCALE,
                family: SCALE,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/scale.sm_80.ptx"),
                entries: &[$(concat!("crossweft_scale_", $name),)*],
                threads: MAX_THREADS,
            },
            Module {
                name: NORM,
                family: NORM,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/norm.sm_80.ptx"),
                entries: &norm::ALL,
                threads: norm::MOST_THREADS,
            },
            Module {
                name: MOE,
                family: MOE,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/moe.sm_80.ptx"),
                entries: &moe::ALL,
                threads: MAX_THREADS,
            },
            Module {
                name: "moe_lines_bf16",
                family: MOE_LINES,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/moe_lines_bf16.sm_80.ptx"),
                entries: &moe::BF16_LINES.all(),
                threads: MAX_THREADS,
            },
            Module {
                name: "moe_lines_f16",
                family: MOE_LINES,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/moe_lines_f16.sm_80.ptx"),
                entries: &moe::F16_LINES.all(),
                threads: MAX_THREADS,
            },
            Module {
                name: "moe_lines_f32",
                family: MOE_LINES,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/moe_lines_f32.sm_80.ptx"),
                entries: &moe::F32_LINES.all(),
                threads: MAX_THREADS,
            },
            Module {
                name: EXCHANGE,
                family: EXCHANGE,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/exchange.sm_80.ptx"),
                entries: &[EXCHANGE_ENTRY, MESSAGES_ENTRY, SIGNAL_ENTRY],
                threads: MAX_THREADS,
            },
            $(Module {
                name: concat!("exchange_", $name),
                family: EXCHANGE,
                sm: 80,
                ptx: include_str!(concat!("../../../kernels/ptx/exchange_", $name, ".sm_80.ptx")),
                entries: &[concat!("crossweft_exchange_", $name)],
                threads: MAX_THREADS,
            },)*
            Module {
                name: BENCH,
                family: BENCH,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/bench.sm_80.ptx"),
                entries: &bench::ALL,
                threads: MAX_THREADS,
            },
            Module {
                name: CHANNEL,
                family: CHANNEL,
                sm: 80,
                ptx: include_str!("../../../kernels/ptx/channel.sm_80.ptx"),
                entries: &channel::ALL,
                threads: MAX_THREADS,
            },
            Module {
                name: CHANNEL,
                family: CHANNEL,
                sm: 90,
                ptx: include_str!("../../../kernels/ptx/channel.sm_90.ptx"),
                entries: &channel::ALL,
                threads: MAX_THREADS,
            },
        ];

        /// The names of a data type's modules for any plan and for those in one piece, and its entry points.
        const fn of(dtype: DataType) -> Option<([&'static str; 2], Entries)> {
            match dtype {
                $(DataType::$dtype => Some((
                    [$name, concat!("fused_", $name)],
                    Entries {
                        plan: concat!("crossweft_plan_", $name),
                        exchange: concat!("crossweft_exchange_", $name),
                        one_shot: concat!("crossweft_one_shot_", $name),
                        one_shot_scatter: concat!("crossweft_one_shot_scatter_", $name),
                        one_shot_lines: concat!("crossweft_one_shot_lines_", $name),
                        two_shot: concat!("crossweft_two_shot_", $name),
                        scale: concat!("crossweft_scale_", $name),
                    },
                )),)*
                // Data types to come.
                _ => None,
            }
        }
    };
}

modules! {
    I8, "i8";
    U8, "u8";
    I16, "i16";
    U16, "u16";
    I32, "i32";
    U32, "u32";
    I64, "i64";
    U64, "u64";
    F16, "f16";
    Bf16, "bf16";
    F32, "f32";
    F64, "f64";
    F8E4M3, "f8e4m3";
    F8E5M2, "f8e5m2";
}

/// Name of the module that moves blocks.
const HOP: &str = "hop";

/// Entry of the [`hop_module`] that sends blocks as packets. Takes a [`Hop`] by value; the grid has one block for each
/// of the plan's, with a thread for each channel at least.
pub const HOP_PACKETS: &str = "crossweft_hop_packets";

/// The same straight between buffers.
pub const HOP_DIRECT: &str = "crossweft_hop_direct";

/// Family of the modules that run plans.
const PLAN: &str = "plan";

/// Family of the modules that run plans in one piece.
const FUSED: &str = "fused";

/// Name of the module that exchanges messages, and family of those that reduce them.
const EXCHANGE: &str = "exchange";

/// Entry point of that module.
const EXCHANGE_ENTRY: &str = "crossweft_exchange";

/// The one whose thread blocks have one transfer each.
const MESSAGES_ENTRY: &str = "crossweft_messages";

/// The one that signals.
const SIGNAL_ENTRY: &str = "crossweft_signal";

/// Name of the module that multiplies elements.
const SCALE: &str = "scale";

/// Name of the module for mixtures of experts.
const MOE: &str = "moe";

/// Family of those whose rows are lines, one for each data type: they are larger.
const MOE_LINES: &str = "moe_lines";

/// Name of the module that normalises tokens.
const NORM: &str = "norm";

/// Name of the module for tests and measurements.
const BENCH: &str = "bench";

/// Name of the module for tests and measurements of channels.
const CHANNEL: &str = "channel";

/// The module that runs plans on `dtype` on a GPU of compute capability `sm` (`major * 10 +
/// minor`); `None` if that is older than [`MIN_SM`].
#[must_use]
pub fn plan_module(dtype: DataType, sm: u32) -> Option<&'static Module> {
    of(dtype).and_then(|([name, _], _)| find(name, sm))
}

/// The module that runs plans in one piece. From compute capability 9.0 on, another one: its launches may begin while what
/// came before is ending.
#[must_use]
pub fn fused_module(dtype: DataType, sm: u32) -> Option<&'static Module> {
    of(dtype).and_then(|([_, name], _)| find(name, sm))
}

/// Entry points of a [`plan_module`] and a [`fused_module`]. The operation is in the parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries {
    /// Runs any plan.
    pub plan: &'static str,
    /// In the [`exchange_module`] of the data type: does transfers with reductions. Takes an [`ExchangeLaunch`] by value;
    /// the grid has one block for each of the table's.
    pub exchange: &'static str,
    /// In the [`fused_module`]: runs a one-shot plan in one piece. Takes a [`OneShot`] by value; the grid has one block for each of the
    /// plan's.
    pub one_shot: &'static str,
    /// The same where each rank gets a block of every input: takes a [`OneShotScatter`] by value.
    pub one_shot_scatter: &'static str,
    /// As `one_shot`, with lines instead of packets: on all ranks or none, where the machine keeps them whole
    /// ([`crossweft_device::gpu::lines`]). Blocks have whole warps, and shares are multiples of its `PAIR_PAYLOAD`.
    pub one_shot_lines: &'static str,
    /// Runs a two-shot plan in one piece: takes a [`TwoShot`] by value; the grid has one block for each of the
    /// plan's, with a thread for each other rank at least.
    pub two_shot: &'static str,
    /// In the [`scale_module`]: multiplies elements by a scalar. Takes a [`Scale`] by value; the grid may have any
    /// shape.
    pub scale: &'static str,
}

/// The entry points of [`plan_module`]; `None` for a data type that has no kernels.
#[must_use]
pub const fn entries(dtype: DataType) -> Option<Entries> {
    match of(dtype) {
        Some((_, entries)) => Some(entries),
        None => None,
    }
}

/// The module that runs plans of any data type that move blocks and reduce nothing ([`HOP_PACKETS`], [`HOP_DIRECT`]).
#[must_use]
pub fn hop_module(sm: u32) -> Option<&'static Module> {
    find(HOP, sm)
}

/// The module that multiplies elements of any data type by a scalar ([`Entries::scale`]).
#[must_use]
pub fn scale_module(sm: u32) -> Option<&'static Module> {
    find(SCALE, sm)
}

/// The module that does the transfers of an exchange, and its entry point, which takes an [`ExchangeLaunch`] by value; the
/// grid has one block for each of the table's. With a data type that which also reduces elements of it.
#[must_use]
pub fn exchange_module(
    dtype: Option<DataType>,
    sm: u32,
) -> Option<(&'static Module, &'static str)> {
    let entry = match dtype {
        None => EXCHANGE_ENTRY,
        Some(dtype) => entries(dtype)?.exchange,
    };
    let module = MODULES
        .iter()
        .filter(|module| module.entries.contains(&entry) && module.sm <= sm)
        .max_by_key(|module| module.sm)?;
    Some((module, entry))
}

/// The module whose entry point gives every transfer of an exchange a thread block, and that entry point: it takes a
/// [`MessagesLaunch`] by value; the grid has a block for each lane of each message.
#[must_use]
pub fn messages_module(sm: u32) -> Option<(&'static Module, &'static str)> {
    Some((find(EXCHANGE, sm)?, MESSAGES_ENTRY))
}

/// The module whose entry point waits for signals of a peer and signals it, and that entry point: it takes a
/// [`SignalLaunch`] by value; the grid has one block.
#[must_use]
pub fn signal_module(sm: u32) -> Option<(&'static Module, &'static str)> {
    Some((find(EXCHANGE, sm)?, SIGNAL_ENTRY))
}

/// The module that dispatches and combines tokens of type `dtype` of a mixture of experts, and its entry points; with rows
/// as lines, or not: the same on all ranks, and lines only where the machine keeps them whole
/// ([`crossweft_device::gpu::lines`]). `None` if there are none for the type, or the compute capability `sm` is older than
/// [`MIN_SM`].
#[must_use]
pub fn moe_module(
    dtype: DataType,
    lines: bool,
    sm: u32,
) -> Option<(&'static Module, moe::Entries)> {
    let entries = moe::entries(dtype, lines)?;
    let is = |module: &&Module| module.entries.contains(&entries.dispatch) && module.sm <= sm;
    Some((MODULES.iter().find(is)?, entries))
}

/// The module that normalises tokens, whose entry points are in [`mod@norm`].
#[must_use]
pub fn norm_module(sm: u32) -> Option<&'static Module> {
    find(NORM, sm)
}

/// The module for tests and measurements, whose entry points are in [`mod@bench`].
#[must_use]
pub fn bench_module(sm: u32) -> Option<&'static Module> {
    find(BENCH, sm)
}

/// The module for tests and measurements of what channels can do that plans do not, whose entry points are in
/// [`mod@channel`]. From compute capability 9.0 on, another one: bulk copies are what they are called.
#[must_use]
pub fn channel_module(sm: u32) -> Option<&'static Module> {
    find(CHANNEL, sm)
}

fn find(name: &str, sm: u32) -> Option<&'static Module> {
    MODULES
        .iter()
        .filter(|module| module.name == name && module.sm <= sm)
        .max_by_key(|module| module.sm)
}

/// Entry points of [`moe_module`]. Each takes its launch by value; the grid has one block for each of the group's, which
/// wait for each other.
pub mod moe {
    use crossweft_device::DataType;
    pub use crossweft_device::gpu::moe::{CombineLaunch, DispatchLaunch, steps};

    /// Entry points for tokens of one type.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Entries {
        /// Takes a [`DispatchLaunch`].
        pub dispatch: &'static str,
        /// Takes a [`CombineLaunch`].
        pub combine: &'static str,
    }

    const BF16: Entries = Entries {
        dispatch: "crossweft_moe_dispatch_bf16",
        combine: "crossweft_moe_combine_bf16",
    };
    const F16: Entries = Entries {
        dispatch: "crossweft_moe_dispatch_f16",
        combine: "crossweft_moe_combine_f16",
    };
    const F32: Entries = Entries {
        dispatch: "crossweft_moe_dispatch_f32",
        combine: "crossweft_moe_combine_f32",
    };
    pub(crate) const BF16_LINES: Entries = Entries {
        dispatch: "crossweft_moe_lines_dispatch_bf16",
        combine: "crossweft_moe_lines_combine_bf16",
    };
    pub(crate) const F16_LINES: Entries = Entries {
        dispatch: "crossweft_moe_lines_dispatch_f16",
        combine: "crossweft_moe_lines_combine_f16",
    };
    pub(crate) const F32_LINES: Entries = Entries {
        dispatch: "crossweft_moe_lines_dispatch_f32",
        combine: "crossweft_moe_lines_combine_f32",
    };

    impl Entries {
        pub(crate) const fn all(self) -> [&'static str; 2] {
            [self.dispatch, self.combine]
        }
    }

    /// Those for tokens of `dtype`, with rows as lines or not; `None` if there are none.
    pub(crate) const fn entries(dtype: DataType, lines: bool) -> Option<Entries> {
        match (dtype, lines) {
            (DataType::Bf16, false) => Some(BF16),
            (DataType::F16, false) => Some(F16),
            (DataType::F32, false) => Some(F32),
            (DataType::Bf16, true) => Some(BF16_LINES),
            (DataType::F16, true) => Some(F16_LINES),
            (DataType::F32, true) => Some(F32_LINES),
            _ => None,
        }
    }

    /// Every one of the module without lines.
    pub(crate) const ALL: [&str; 6] = [
        BF16.dispatch,
        BF16.combine,
        F16.dispatch,
        F16.combine,
        F32.dispatch,
        F32.combine,
    ];
}

/// Entry points of [`norm_module`]. Thread blocks have [`threads_of`](norm::threads_of) threads.
pub mod norm {
    use crossweft_device::DataType;
    pub use crossweft_device::gpu::norm::{MOST_THREADS, threads_of};

    /// Entry points of a data type.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Entries {
        /// Normalises tokens that have been reduced: takes a [`Norm`](crate::Norm) by value; any number of thread
        /// blocks.
        pub norm: &'static str,
        /// Runs a one-shot plan and normalises, in one piece: takes a [`OneShotNorm`](crate::OneShotNorm) by value; as
        /// many thread blocks as its counters say. Of 16-bit types only.
        pub one_shot: Option<&'static str>,
    }

    /// Those of f32, f16 and bf16; `None` for other types.
    #[must_use]
    pub const fn entries(dtype: DataType) -> Option<Entries> {
        match dtype {
            DataType::F32 => Some(Entries {
                norm: "crossweft_norm_f32",
                one_shot: None,
            }),
            DataType::F16 => Some(Entries {
                norm: "crossweft_norm_f16",
                one_shot: Some("crossweft_one_shot_norm_f16"),
            }),
            DataType::Bf16 => Some(Entries {
                norm: "crossweft_norm_bf16",
                one_shot: Some("crossweft_one_shot_norm_bf16"),
            }),
            _ => None,
        }
    }

    /// Every one of them.
    pub(crate) const ALL: [&str; 5] = [
        "crossweft_norm_f32",
        "crossweft_norm_f16",
        "crossweft_norm_bf16",
        "crossweft_one_shot_norm_f16",
        "crossweft_one_shot_norm_bf16",
    ];
}

/// Entry points of [`bench_module`]. Parameters are 64 bits wide, in this order, but where it says
/// otherwise; `limit` stands for a [`GpuContext`] by value. `kernels/src/bench.rs` says what they
/// do.
pub mod bench {
    /// `dst, src, bytes`.
    pub const COPY: &str = "crossweft_copy";
    /// `dst, a, b, elements`.
    pub const ADD_BF16: &str = "crossweft_add_bf16";
    /// The address of [`OneShotLaunch`](crate::OneShotLaunch)es, one for each row of the grid.
    pub const EXCHANGE_PACKETS_BF16: &str = "crossweft_exchange_packets_bf16";
    /// `semaphores, first side: u32, rounds: u32, out, limit`.
    pub const PING_PONG: &str = "crossweft_ping_pong";
    /// `packets, first side: u32, rounds: u32, out, limit`.
    pub const PACKET_ECHO: &str = "crossweft_packet_echo";
    /// `fifo, count: u32, out, limit`.
    pub const FIFO_PUSH: &str = "crossweft_fifo_push";
    /// `counter, rounds: u32, out, limit`.
    pub const GRID_BARRIER: &str = "crossweft_grid_barrier";
    /// `memory, words, seed, counter`.
    pub const PATTERN_WRITE: &str = "crossweft_pattern_write";
    /// `memory, words, seed, counter, target, result, limit`.
    pub const PATTERN_CHECK: &str = "crossweft_pattern_check";

    /// The kernel of `examples/custom-kernel-rust`: `channels, launch, rank: u32, limit`.
    pub const EXCHANGE_ADD: &str = "crossweft_exchange_add";

    /// These take an [`EchoLaunch`](crate::EchoLaunch) by value, in a grid of one block. A word, stored and looked at without
    /// order.
    pub const ECHO_RELAXED: &str = "crossweft_echo_relaxed";
    /// A word, stored with release and looked at with acquire.
    pub const ECHO_ACQUIRE: &str = "crossweft_echo_acquire";
    /// Data, put by the block, then a signal, which is waited for.
    pub const ECHO_PUT: &str = "crossweft_echo_put";
    /// Packets of 8 bytes, a store each.
    pub const ECHO_PACKETS8: &str = "crossweft_echo_packets8";
    /// Packets in pairs, 16 bytes a store.
    pub const ECHO_PACKETS16: &str = "crossweft_echo_packets16";
    /// Lines: 128 bytes a store of a warp.
    pub const ECHO_LINES: &str = "crossweft_echo_lines";
    /// Data that the block gets from the other side, without its help: side 0 alone.
    pub const ECHO_GET: &str = "crossweft_echo_get";
    /// Data with a signal, by a proxy.
    pub const ECHO_PORT: &str = "crossweft_echo_port";

    /// Every one of them.
    pub(crate) const ALL: [&str; 18] = [
        ECHO_RELAXED,
        ECHO_ACQUIRE,
        ECHO_PUT,
        ECHO_PACKETS8,
        ECHO_PACKETS16,
        ECHO_LINES,
        ECHO_GET,
        ECHO_PORT,
        COPY,
        ADD_BF16,
        EXCHANGE_PACKETS_BF16,
        PING_PONG,
        PACKET_ECHO,
        FIFO_PUSH,
        GRID_BARRIER,
        PATTERN_WRITE,
        PATTERN_CHECK,
        EXCHANGE_ADD,
    ];
}

/// Entry points of [`channel_module`]. Parameters are 64 bits wide, in this order, but where it says otherwise; `channel`
/// is a [`MemoryChannel`](crossweft_device::channel::MemoryChannel) by value, `limit` a [`GpuContext`]; `shared` is the
/// shared memory of a block that the launch asks for, in bytes. `kernels/src/channel.rs` says what they do.
pub mod channel {
    /// `dst, src, bytes, shared`.
    pub const BULK_COPY: &str = "crossweft_bulk_copy";
    /// `channel, dst_offset, src_offset, bytes, shared`.
    pub const PUT_BULK: &str = "crossweft_put_bulk";
    /// `channel, dst_offset, bytes, flag: u32, rank: u32, limit`.
    pub const EXCHANGE_LINES: &str = "crossweft_exchange_lines";

    /// Every one of them.
    pub(crate) const ALL: [&str; 3] = [BULK_COPY, PUT_BULK, EXCHANGE_LINES];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_data_type_has_its_module() {
        for dtype in DataType::ALL {
            let module = plan_module(dtype, 90).expect("a module");
            let of = entries(dtype).expect("entries");
            assert_eq!(module.name, dtype.name());
            assert_eq!(module.entries, [of.plan]);
            let forms = [
                of.one_shot,
                of.one_shot_scatter,
                of.one_shot_lines,
                of.two_shot,
            ];
            for sm in [80, 90] {
                let fused = fused_module(dtype, sm).expect("a module");
                assert_eq!((fused.entries, fused.sm), (&forms[..], sm));
            }
            assert!(
                module
                    .ptx
                    .contains(&format!("crossweft_plan[{}]", size_of::<PlanLaunch>()))
            );
            let scales = scale_module(90).expect("a module");
            assert!(scales.entries.contains(&of.scale));
            let parameter = format!("{}_param_0[{}]", of.scale, size_of::<Scale>());
            assert!(scales.ptx.contains(&parameter), "{parameter}");
            let (exchanges, entry) = exchange_module(Some(dtype), 90).expect("a module");
            let parameter = format!("{entry}_param_0[{}]", size_of::<ExchangeLaunch>());
            assert!(exchanges.ptx.contains(&parameter), "{parameter}");
            assert!(plan_module(dtype, MIN_SM).is_some());
            assert!(plan_module(dtype, MIN_SM - 1).is_none());
        }
        assert_eq!(MODULES.len(), 4 * DataType::ALL.len() + 12);
    }

    #[test]
    fn newer_machines_have_modules_of_their_own() {
        let sm_of = |sm: u32| channel_module(sm).map(|module| module.sm);
        assert_eq!(
            [75, 80, 89, 90, 100].map(sm_of),
            [None, Some(80), Some(80), Some(90), Some(90)]
        );
        let [older, newer] = [80, 90].map(|sm| channel_module(sm).expect("a module").ptx);
        assert!(newer.contains("cp.async.bulk.") && !older.contains("cp.async.bulk."));
        let [older, newer] = [89, 90].map(|sm| hop_module(sm).expect("a module").ptx);
        assert!(newer.contains("griddepcontrol.wait") && !older.contains("griddepcontrol"));
    }

    #[test]
    fn parameters_are_as_large_as_kernels_say() {
        let module = fused_module(DataType::F32, 80).expect("a module");
        let entries = entries(DataType::F32).expect("entries");
        for (entry, bytes) in [
            (entries.one_shot, size_of::<OneShot>()),
            (entries.one_shot_scatter, size_of::<OneShotScatter>()),
            (entries.one_shot_lines, size_of::<OneShot>()),
            (entries.two_shot, size_of::<TwoShot>()),
        ] {
            let parameter = format!("{entry}_param_0[{bytes}]");
            assert!(module.ptx.contains(&parameter), "{parameter}");
        }
        let hops = hop_module(80).expect("a module");
        for entry in hops.entries {
            let parameter = format!("{entry}_param_0[{}]", size_of::<Hop>());
            assert!(hops.ptx.contains(&parameter), "{parameter}");
        }
        let (exchange, signal) = (exchange_module(None, 80), signal_module(80));
        let messages = messages_module(80);
        for (found, bytes) in [
            (exchange, size_of::<ExchangeLaunch>()),
            (messages, size_of::<MessagesLaunch>()),
            (signal, size_of::<SignalLaunch>()),
        ] {
            let (module, entry) = found.expect("a module");
            let parameter = format!("{entry}_param_0[{bytes}]");
            assert!(module.ptx.contains(&parameter), "{parameter}");
        }
    }

    #[test]
    fn norms_are_of_the_types_that_say_so() {
        let module = norm_module(90).expect("a module");
        let mut all = Vec::new();
        for of in DataType::ALL.into_iter().filter_map(norm::entries) {
            all.push((of.norm, size_of::<Norm>()));
            all.extend(of.one_shot.map(|entry| (entry, size_of::<OneShotNorm>())));
        }
        assert_eq!(all.len(), norm::ALL.len());
        for (entry, bytes) in all {
            assert!(module.entries.contains(&entry), "{entry}");
            let parameter = format!("{entry}_param_0[{bytes}]");
            assert!(module.ptx.contains(&parameter), "{parameter}");
        }
    }

    #[test]
    fn launches_are_as_large_as_kernels_say() {
        let types = [DataType::Bf16, DataType::F16, DataType::F32];
        for (dtype, lines) in types
            .into_iter()
            .flat_map(|dtype| [(dtype, false), (dtype, true)])
        {
            let (module, entries) = moe_module(dtype, lines, 90).expect("a module");
            for (entry, bytes) in [
                (entries.dispatch, size_of::<moe::DispatchLaunch>()),
                (entries.combine, size_of::<moe::CombineLaunch>()),
            ] {
                let parameter = format!("{entry}_param_0[{bytes}]");
                assert!(module.ptx.contains(&parameter), "{parameter}");
            }
        }
    }

    #[test]
    fn text_is_for_the_architecture_it_is_filed_under() {
        for module in MODULES {
            assert!(
                module.ptx.contains(&format!(".target sm_{}\n", module.sm)),
                "{}",
                module.name
            );
            for entry in module.entries {
                assert!(module.ptx.contains(&format!(".entry {entry}(")), "{entry}");
            }
        }
    }
}
