//! The structures that C passes, and what their fields may be. Fields, their order and sizes are NCCL EP's.
#![allow(unsafe_code, reason = "says of each structure that it is plain")]

use crossweft_moe::Layout;

use crate::pointer::{Given, Structure};
use crate::status::Error;

const MAGIC: u32 = 0xc00f_ffee;

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident = $c:literal, at least $least:literal, $magic:expr, { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(crate) struct $name {
            size: u32,
            magic: u32,
            $(pub(crate) $field: $type,)*
        }

        // SAFETY: all fields are plain numbers, addresses among them, and they fill it without gaps, which is checked.
        unsafe impl Structure for $name {
            const NAME: &'static str = $c;
            const LEAST: usize = $least;
            const MAGIC: u32 = $magic;
        }

        const _: () = assert!(size_of::<$name>() == 8 $(+ size_of::<$type>())*);
    )*};
}

structures! {
    /// Describes memory; `data` or a window, `sizes` is an array.
    Tensor = "ncclEpTensor_t", at least 48, 0xcafe_cafe, {
        ndim: u32, datatype: i32, data: u64, window: u64, window_offset: u64, sizes: u64,
    }
    TensorAllocConfig = "ncclEpTensorAllocConfig_t", at least 8, MAGIC, {}
    GroupConfig = "ncclEpGroupConfig_t", at least 96, MAGIC, {
        version: u32, algorithm: u32, experts: u32, max_dispatch_tokens: u32, max_recv_tokens: u32,
        max_token_bytes: u32, rdma_buffer_size: u64, qps: u32, channels: u32, max_sms: u32, padding: u32,
        allocate: u64, free: u64, context: u64, enable_mask: u32, padding_mask: u32, timeout_ns: u64,
        zero_copy: u32, overflow: u32, top_k: u32, padding_v2: u32,
    }
    HandleConfig = "ncclEpHandleConfig_t", at least 16, MAGIC, { alignment: u64 }
    LayoutInfo = "ncclEpLayoutInfo_t", at least 40, MAGIC, {
        expert_counters: u64, src_rank_counters: u64, expert_offsets: u64, recv_total_counter: u64,
        recv_topk_idx_kind: u32, padding_v2: u32,
    }
    DispatchInputs = "ncclEpDispatchInputs_t", at least 32, MAGIC, {
        tokens: u64, topk_weights: u64, scales: u64,
    }
    DispatchOutputs = "ncclEpDispatchOutputs_t", at least 40, MAGIC, {
        tokens: u64, topk_weights: u64, scales: u64, topk_idx: u64,
    }
    CombineInputs = "ncclEpCombineInputs_t", at least 24, MAGIC, {
        tokens: u64, topk_weights: u64, scales: u64,
    }
    CombineOutputs = "ncclEpCombineOutputs_t", at least 24, MAGIC, { tokens: u64, topk_weights: u64 }
    DispatchConfig = "ncclEpDispatchConfig_t", at least 20, MAGIC, {
        send_only: u32, round_scales: u32, pass_direction: u32, quant_recipe: u32,
    }
    CombineConfig = "ncclEpCombineConfig_t", at least 16, MAGIC, {
        send_only: u32, pass_direction: u32, quant_recipe: u32,
    }
    CompleteConfig = "ncclEpCompleteConfig_t", at least 8, MAGIC, {}
}

impl Tensor {
    /// One for which memory is still to be given.
    pub(crate) fn without_memory(ndim: u32, datatype: i32, sizes: u64) -> Self {
        Self {
            size: size_of::<Self>() as u32,
            magic: Self::MAGIC,
            ndim,
            datatype,
            data: 0,
            window: 0,
            window_offset: 0,
            sizes,
        }
    }
}

/// What a group is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    LowLatency,
    HighThroughput,
}

/// How a pass lays out what it receives: the algorithm's and `ncclEpLayout_t`'s part of it, together.
pub(crate) fn layout(
    algorithm: Algorithm,
    layout: i32,
    config: &Given<HandleConfig>,
) -> Result<Layout, Error> {
    let alignment = config.read()?.map_or(0, |config| config.alignment);
    let high_em = (algorithm, layout) == (Algorithm::HighThroughput, 1);
    if alignment > 1 && !high_em {
        return Err(Error::argument(
            "dispatch_output_per_expert_alignment is for the expert-major layout of high throughput",
        ));
    }
    let alignment = u32::try_from(alignment.max(1)).ok();
    let alignment =
        alignment.filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 20);
    let alignment = alignment.ok_or_else(|| {
        Error::argument("dispatch_output_per_expert_alignment must be a power of two, 2^20 at most")
    })?;
    match (algorithm, layout) {
        (Algorithm::LowLatency, 1) => Ok(Layout::ExpertMajor),
        (Algorithm::LowLatency, 2) => Ok(Layout::RankMajor),
        (Algorithm::HighThroughput, 1) => Ok(Layout::ExpertPacked { alignment }),
        (Algorithm::HighThroughput, 3) => Ok(Layout::Flat),
        (_, 0) => Err(Error::argument("layout is NCCL_EP_LAYOUT_UNSET")),
        (Algorithm::LowLatency, _) => Err(Error::argument(format!(
            "layout {layout}: with low latency it is expert-major or rank-major"
        ))),
        (Algorithm::HighThroughput, _) => Err(Error::argument(format!(
            "layout {layout}: with high throughput it is flat or expert-major"
        ))),
    }
}

/// A number that C has as `int`.
pub(crate) fn signed(name: &str, number: u32) -> Result<i32, Error> {
    i32::try_from(number).map_err(|_| Error::argument(format!("{name} is {number}")))
}
