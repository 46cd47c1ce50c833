/* Every function of the C interface on host memory: whole passes in every layout, errors, staging, masks.
 *
 * conformance CASE runs one case; conformance without an argument lists them. */
#include "harness.h"

#include <crossweft/ep.h>

/* ---- layouts, as NCCL EP's header has them on 64 bits ---- */

#define AT(structure, field, offset) _Static_assert(offsetof(structure, field) == (offset), #structure "." #field)
#define BYTES(structure, bytes) _Static_assert(sizeof(structure) == (bytes), #structure)
BYTES(ncclEpTensor_t, 48);
AT(ncclEpTensor_t, ndim, 8);
AT(ncclEpTensor_t, datatype, 12);
AT(ncclEpTensor_t, data, 16);
AT(ncclEpTensor_t, win_hdl, 24);
AT(ncclEpTensor_t, win_offset, 32);
AT(ncclEpTensor_t, sizes, 40);
BYTES(ncclEpTensorAllocConfig_t, 8);
BYTES(ncclEpGroupConfig_t, 112);
AT(ncclEpGroupConfig_t, version, 8);
AT(ncclEpGroupConfig_t, algorithm, 12);
AT(ncclEpGroupConfig_t, num_experts, 16);
AT(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank, 20);
AT(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24);
AT(ncclEpGroupConfig_t, max_token_bytes, 28);
AT(ncclEpGroupConfig_t, rdma_buffer_size, 32);
AT(ncclEpGroupConfig_t, num_qp_per_rank, 40);
AT(ncclEpGroupConfig_t, num_channels, 44);
AT(ncclEpGroupConfig_t, max_num_sms, 48);
AT(ncclEpGroupConfig_t, alloc.alloc_fn, 56);
AT(ncclEpGroupConfig_t, alloc.free_fn, 64);
AT(ncclEpGroupConfig_t, alloc.context, 72);
AT(ncclEpGroupConfig_t, enable_mask, 80);
AT(ncclEpGroupConfig_t, timeout_ns, 88);
AT(ncclEpGroupConfig_t, zero_copy, 96);
AT(ncclEpGroupConfig_t, overflow_policy, 100);
AT(ncclEpGroupConfig_t, num_topk, 104);
AT(ncclEpGroupConfig_t, padding_v2, 108);
BYTES(ncclEpHandleConfig_t, 16);
AT(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, 8);
BYTES(ncclEpLayoutInfo_t, 48);
AT(ncclEpLayoutInfo_t, expert_counters, 8);
AT(ncclEpLayoutInfo_t, src_rank_counters, 16);
AT(ncclEpLayoutInfo_t, expert_offsets, 24);
AT(ncclEpLayoutInfo_t, recv_total_counter, 32);
AT(ncclEpLayoutInfo_t, recv_topk_idx_kind, 40);
BYTES(ncclEpDispatchInputs_t, 32);
AT(ncclEpDispatchInputs_t, tokens, 8);
AT(ncclEpDispatchInputs_t, topk_weights, 16);
AT(ncclEpDispatchInputs_t, scales, 24);
BYTES(ncclEpDispatchOutputs_t, 40);
AT(ncclEpDispatchOutputs_t, tokens, 8);
AT(ncclEpDispatchOutputs_t, topk_weights, 16);
AT(ncclEpDispatchOutputs_t, scales, 24);
AT(ncclEpDispatchOutputs_t, topk_idx, 32);
BYTES(ncclEpCombineInputs_t, 32);
AT(ncclEpCombineInputs_t, scales, 24);
BYTES(ncclEpCombineOutputs_t, 24);
AT(ncclEpCombineOutputs_t, topk_weights, 16);
BYTES(ncclEpDispatchConfig_t, 24);
AT(ncclEpDispatchConfig_t, send_only, 8);
AT(ncclEpDispatchConfig_t, round_scales, 12);
AT(ncclEpDispatchConfig_t, pass_direction, 16);
AT(ncclEpDispatchConfig_t, quantization_recipe, 20);
BYTES(ncclEpCombineConfig_t, 20);
AT(ncclEpCombineConfig_t, pass_direction, 12);
AT(ncclEpCombineConfig_t, quantization_recipe, 16);
BYTES(ncclEpCompleteConfig_t, 8);

/* ---- checks with the words behind errors ---- */

#define EP_IS(expected, call) do { \
    ncclResult_t got_ = (call); \
    if (got_ != (expected)) FAIL("%s: %d, expected %d; %s", #call, got_, (expected), crossweftEpGetLastError()); \
} while (0)
#define EP(call) EP_IS(ncclSuccess, call)
#define EP_SAYS(expected, words, call) do { \
    EP_IS(expected, call); \
    if (!strstr(crossweftEpGetLastError(), (words))) \
        FAIL("%s: no `%s` in: %s", #call, (words), crossweftEpGetLastError()); \
} while (0)

/* ---- a job that every rank can work out ---- */

enum { L = 4, M = 6, K = 3, H = 256, MOST_ROWS = L * MAX_RANKS * M };

static int tokens_of(int rank) { return rank == 1 ? 0 : M - rank % 3; }

/* All different but -1, since there are more than K experts. */
static int expert_of(int ranks, int rank, int token, int k) {
    return (token + k) % 5 == 4 ? -1 : (token * 2 + rank + k) % (L * ranks);
}

static float weight_of(int rank, int token, int k) { return (float)(1 + (rank + token + k) % 2); }
static float element_of(int rank, int token, int i) { return (float)((rank * 5 + token * 3 + i) % 4); }
static float factor_of(int expert) { return (float)(1 + expert % 2); }

static int is_for(int ranks, int source, int token, int first, int last) {
    for (int k = 0; k < K; k++) {
        int expert = expert_of(ranks, source, token, k);
        if (expert >= first && expert < last) return 1;
    }
    return 0;
}

/* Whole numbers up to 256 are exact in every type. */
static size_t bytes_of(ncclDataType_t type) {
    return type == ncclFloat32 || type == ncclInt32 ? 4 : type == ncclInt64 ? 8 : type == ncclFloat8e4m3 || type == ncclUint8 ? 1 : 2;
}

static void put(void* buffer, size_t i, ncclDataType_t type, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == ncclFloat32) ((float*)buffer)[i] = value;
    else if (type == ncclBfloat16) ((uint16_t*)buffer)[i] = (uint16_t)(bits >> 16);
    else ((uint16_t*)buffer)[i] = value == 0 ? 0 : (uint16_t)(((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3ff));
}

static float get(const void* buffer, size_t i, ncclDataType_t type) {
    uint32_t bits;
    float value;
    if (type == ncclFloat32) return ((const float*)buffer)[i];
    if (type == ncclFloat8e4m3) {
        /* No subnormals or negative numbers are used. */
        uint8_t byte = ((const uint8_t*)buffer)[i];
        if (byte == 0) return 0;
        bits = (uint32_t)((byte >> 3) + 120) << 23 | (uint32_t)(byte & 7) << 20;
    } else {
        uint16_t word = ((const uint16_t*)buffer)[i];
        if (type == ncclBfloat16) bits = (uint32_t)word << 16;
        else bits = word == 0 ? 0 : (uint32_t)((word >> 10) + 112) << 23 | (uint32_t)(word & 0x3ff) << 13;
    }
    memcpy(&value, &bits, 4);
    return value;
}

/* A tensor with its sizes. */
struct tensor {
    ncclEpTensor_t tensor;
    size_t sizes[3];
};

static ncclEpTensor_t* describe(struct tensor* t, ncclDataType_t type, void* data, int ndim, size_t a, size_t b, size_t c) {
    t->tensor = NCCL_EP_TENSOR_INIT;
    t->sizes[0] = a, t->sizes[1] = b, t->sizes[2] = c;
    t->tensor.ndim = (unsigned)ndim;
    t->tensor.datatype = type;
    t->tensor.data = data;
    t->tensor.sizes = t->sizes;
    return &t->tensor;
}

static ncclComm_t join(struct rank* r) {
    ncclComm_t comm = NULL;
    OK(ncclCommInitRank(&comm, r->ranks, r->id, r->rank));
    return comm;
}

static ncclEpGroupConfig_t config_of(struct rank* r, ncclEpAlgorithm_t algorithm) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = algorithm;
    config.num_experts = (unsigned)(L * r->ranks);
    config.max_dispatch_tokens_per_rank = M;
    config.max_token_bytes = H * 4;
    config.timeout_ns = 60000000000ull;
    return config;
}

static ncclEpGroup_t group_of(struct rank* r, ncclComm_t comm, ncclEpAlgorithm_t algorithm) {
    ncclEpGroupConfig_t config = config_of(r, algorithm);
    ncclEpGroup_t group = NULL;
    EP(ncclEpCreateGroup(&group, comm, &config));
    CHECK(group != NULL);
    return group;
}

/* How a pass is run. */
struct how {
    ncclEpAlgorithm_t algorithm;
    ncclEpLayout_t layout;
    ncclDataType_t type, index;
    int staged, global;
    size_t alignment;
    ncclEpDispatchQuantizationRecipe_t recipe;
    ncclDataType_t scale; /* that the caller forwards */
};

static long integer(const void* buffer, size_t i, ncclDataType_t type) {
    return type == ncclInt64 ? (long)((const int64_t*)buffer)[i] : ((const int32_t*)buffer)[i];
}

static void integer_set(void* buffer, size_t i, ncclDataType_t type, long value) {
    if (type == ncclInt64) ((int64_t*)buffer)[i] = value;
    else ((int32_t*)buffer)[i] = (int32_t)value;
}

/* A whole pass: everything that arrives is compared, the experts multiply, and what comes back is compared. */
static void pass(struct rank* r, ncclEpGroup_t group, struct how how) {
    int ranks = r->ranks, own = tokens_of(r->rank), first = r->rank * L;
    int low = how.algorithm == NCCL_EP_ALGO_LOW_LATENCY, by_expert = how.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    ncclDataType_t arriving = how.recipe ? ncclFloat8e4m3 : how.type;
    /* What the caller forwards is quantised already, as 2^(byte - 127) times 0 to 3, and combined in bf16. */
    int forwards = how.recipe == NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD;
    ncclDataType_t sending = forwards ? ncclFloat8e4m3 : how.type, scale = forwards ? how.scale : ncclFloat32;
    size_t scales_each = scale == ncclUint8 ? 4 : H / 128;

    char index[M * K * 8];
    float weights[M * K];
    char* tokens = calloc(M * H, 4);
    char* given_scales = calloc(M, 16);
    for (int t = 0; t < own; t++) {
        for (int k = 0; k < K; k++) {
            integer_set(index, (size_t)(t * K + k), how.index, expert_of(ranks, r->rank, t, k));
            weights[t * K + k] = weight_of(r->rank, t, k);
        }
        for (int i = 0; i < H; i++) {
            float x = element_of(r->rank, t, i);
            static const uint8_t small[] = {0, 0x38, 0x40, 0x44};
            if (forwards) ((uint8_t*)tokens)[t * H + i] = small[(int)x];
            else put(tokens, (size_t)(t * H + i), how.type, x);
        }
        for (size_t s = 0; s < scales_each; s++) {
            if (scale == ncclUint8) ((uint8_t*)given_scales)[(size_t)t * scales_each + s] = 127;
            else ((float*)given_scales)[(size_t)t * scales_each + s] = 1;
        }
    }

    /* What must come, in its order. */
    int counts[L] = {0}, from[MAX_RANKS] = {0}, total = 0, padded[L], rows = 0;
    for (int s = 0; s < ranks; s++)
        for (int t = 0; t < tokens_of(s); t++) {
            from[s] += is_for(ranks, s, t, first, first + L);
            for (int l = 0; l < L; l++) counts[l] += is_for(ranks, s, t, first + l, first + l + 1);
        }
    for (int s = 0; s < ranks; s++) total += from[s];
    for (int l = 0; l < L; l++) {
        int a = how.alignment ? (int)how.alignment : 1;
        padded[l] = (counts[l] + a - 1) / a * a;
        rows += padded[l];
    }
    if (!by_expert) rows = total;

    struct tensor ti, tc, to, tn;
    char counters[L * 8], offsets[L * 8], sum[8], of_ranks[MAX_RANKS * 8];
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    ncclEpHandleConfig_t handle_config = NCCL_EP_HANDLE_CONFIG_INIT;
    handle_config.dispatch_output_per_expert_alignment = how.alignment;
    ncclEpHandle_t handle = NULL;
    ncclEpTensor_t* where = describe(&ti, how.index, index, 2, (size_t)own, K, 0);
    if (low) {
        size_t bytes = 0;
        EP(ncclEpHandleMemSize(group, how.layout, NULL, &bytes, K));
        CHECK(bytes > 0);
        EP(ncclEpInitHandle(&handle, group, how.layout, NULL, K, NULL));
        EP(ncclEpUpdateHandle(handle, where, NULL, NULL));
    } else {
        info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
        if (by_expert) info.expert_offsets = describe(&to, ncclInt64, offsets, 1, L, 0, 0);
        info.recv_total_counter = describe(&tn, ncclInt64, sum, 1, 1, 0, 0);
        EP(ncclEpCreateHandle(&handle, group, how.layout, where, &info, &handle_config, NULL));
        for (int l = 0, begin = 0; l < L; l++) {
            CHECK(integer(counters, (size_t)l, ncclInt32) == (by_expert ? padded[l] : counts[l]));
            if (by_expert) CHECK(integer(offsets, (size_t)l, ncclInt64) == begin);
            begin += padded[l];
        }
        CHECK(integer(sum, 0, ncclInt64) == rows);
        info = (ncclEpLayoutInfo_t)NCCL_EP_LAYOUT_INFO_INIT;
    }
    /* It was copied. */
    memset(index, 0x77, sizeof index);

    size_t dims[2] = {(size_t)rows, 0};
    int pads = 0;
    if (low) dims[0] = (size_t)(by_expert ? L : ranks), dims[1] = (size_t)(by_expert ? ranks * M : M), pads = 1;
    size_t room = dims[0] * (pads ? dims[1] : 1);
    CHECK(room <= MOST_ROWS);
    char* received = malloc((MOST_ROWS + 1) * H * 4);
    char* scales = malloc(MOST_ROWS * 16);
    char* made = calloc(MOST_ROWS * H, 4);
    float* got_weights = malloc(MOST_ROWS * K * sizeof(float));
    char* got_index = malloc(MOST_ROWS * K * 8);
    memset(received, 0xa5, (MOST_ROWS + 1) * H * 4);

    struct tensor in[3], out[4], tr, tb, th;
#define ROWS(t, type, data, last) (pads ? describe(t, type, data, 3, dims[0], dims[1], last) : describe(t, type, data, 2, dims[0], last, 0))
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    inputs.tokens = describe(&in[0], sending, tokens, 2, (size_t)own, H, 0);
    if (!(low && by_expert)) inputs.topk_weights = describe(&in[1], ncclFloat32, weights, 2, (size_t)own, K, 0);
    if (forwards) inputs.scales = describe(&in[2], scale, given_scales, 2, (size_t)own, scales_each, 0);
    outputs.tokens = ROWS(&out[0], arriving, received, H);
    if (how.recipe) outputs.scales = ROWS(&out[1], scale, scales, scales_each);
    if (!by_expert) {
        outputs.topk_weights = ROWS(&out[2], ncclFloat32, got_weights, K);
        outputs.topk_idx = ROWS(&out[3], how.index, got_index, K);
    } else if (!low) {
        outputs.topk_weights = describe(&out[2], ncclFloat32, got_weights, 1, dims[0], 0, 0);
    }
    if (low && by_expert) info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
    if (low && !by_expert) info.src_rank_counters = describe(&tr, ncclInt32, of_ranks, 1, (size_t)ranks, 0, 0);
    info.recv_topk_idx_kind = how.global ? NCCL_EP_EXPERT_ID_GLOBAL : NCCL_EP_EXPERT_ID_AUTO;
    config.send_only = (unsigned)how.staged;
    config.quantization_recipe = how.recipe;
    EP(ncclEpDispatch(handle, &inputs, &outputs, &info, &config, NULL));
    if (how.staged) {
        EP_SAYS(ncclInvalidUsage, "ncclEpComplete", ncclEpDispatch(handle, &inputs, &outputs, &info, &config, NULL));
        EP(ncclEpComplete(handle, NULL, NULL));
        EP_SAYS(ncclInvalidUsage, "no call with send_only", ncclEpComplete(handle, NULL, NULL));
    }

    /* In the order of experts, sources, tokens; or of sources, tokens. */
    ncclDataType_t combining = forwards ? ncclBfloat16 : how.type;
    int row = 0;
    for (int l = 0; l < (by_expert ? L : 1); l++) {
        if (low && by_expert) row = l * ranks * M;
        int low_expert = by_expert ? first + l : first, high_expert = by_expert ? first + l + 1 : first + L, begin = row;
        for (int s = 0; s < ranks; s++) {
            if (low && !by_expert) row = s * M;
            for (int t = 0; t < tokens_of(s); t++) {
                if (!is_for(ranks, s, t, low_expert, high_expert)) continue;
                float all = 0;
                for (int k = 0; k < K; k++) {
                    int expert = expert_of(ranks, s, t, k), here = expert >= low_expert && expert < high_expert;
                    float weight = weight_of(s, t, k);
                    if (here) all += factor_of(expert) * (low && by_expert ? 1 : weight);
                    if (by_expert && !low && here) CHECK(got_weights[row] == weight);
                    if (by_expert) continue;
                    CHECK(got_weights[row * K + k] == (here ? weight : 0));
                    long expected = here ? how.global ? expert : expert - first : -1;
                    CHECK(integer(got_index, (size_t)(row * K + k), how.index) == expected);
                }
                for (int i = 0; i < H; i++) {
                    size_t at = (size_t)row * H + (size_t)i;
                    float x = get(received, at, arriving), sent = element_of(s, t, i);
                    if (how.recipe) {
                        size_t place = (size_t)row * scales_each + (size_t)(i / 128);
                        if (scale == ncclUint8) CHECK(((uint8_t*)scales)[place] == 127);
                        else x *= ((float*)scales)[place];
                    }
                    /* 0 to 3 of 3 at most: quantised within a sixteenth, then as it was to go on with. */
                    float error = x - sent;
                    if (how.recipe == NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4) CHECK(error <= sent / 15 && error >= -sent / 15);
                    else CHECK(x == sent);
                    put(made, at, combining, sent * all);
                }
                row++;
            }
            if (low && !by_expert) CHECK(integer(of_ranks, (size_t)s, ncclInt32) == from[s]);
        }
        if (low && by_expert) CHECK(integer(counters, (size_t)l, ncclInt32) == counts[l]);
        if (!low && by_expert)
            for (; row < begin + padded[l]; row++)
                for (int i = 0; i < H; i++) CHECK(get(received, (size_t)(row * H + i), arriving) == 0);
    }
    CHECK((unsigned char)received[room * H * bytes_of(arriving)] == 0xa5);

    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpCombineConfig_t combine = NCCL_EP_COMBINE_CONFIG_INIT;
    combine.send_only = (unsigned)how.staged;
    char* combined = malloc(M * H * 4);
    back.tokens = ROWS(&tb, combining, made, H);
    home.tokens = describe(&th, combining, combined, 2, (size_t)own, H, 0);
    if (low && by_expert) home.topk_weights = describe(&in[1], ncclFloat32, weights, 2, (size_t)own, K, 0);
    EP(ncclEpCombine(handle, &back, &home, &combine, NULL));
    if (how.staged) EP(ncclEpComplete(handle, NULL, NULL));
    for (int t = 0; t < own; t++) {
        float all = 0;
        for (int k = 0; k < K; k++) {
            int expert = expert_of(ranks, r->rank, t, k);
            if (expert >= 0) all += weight_of(r->rank, t, k) * factor_of(expert);
        }
        for (int i = 0; i < H; i++) {
            float got = get(combined, (size_t)(t * H + i), combining), expected = all * element_of(r->rank, t, i);
            if (got != expected) FAIL("rank %d token %d element %d: %f, expected %f", r->rank, t, i, (double)got, (double)expected);
        }
    }

    if (!low) {
        /* Gradients go the same way, without weights; the sums of the same rows are the same bits. */
        char* before = malloc(M * H * 4);
        memcpy(before, combined, M * H * 4);
        config.pass_direction = NCCL_EP_BWD_PASS;
        inputs.topk_weights = NULL;
        outputs.topk_weights = outputs.topk_idx = NULL;
        outputs.tokens = ROWS(&out[0], arriving, received, H);
        inputs.tokens = describe(&in[0], sending, tokens, 2, (size_t)own, H, 0);
        EP(ncclEpDispatch(handle, &inputs, &outputs, NULL, &config, NULL));
        memset(combined, 0xa5, M * H * 4);
        EP(ncclEpCombine(handle, &back, &home, NULL, NULL));
        for (int i = 0; i < own * H; i++) CHECK(get(combined, (size_t)i, combining) == get(before, (size_t)i, combining));
        combine.pass_direction = NCCL_EP_BWD_PASS;
        EP_SAYS(ncclInvalidUsage, "gradients of weights", ncclEpCombine(handle, &back, &home, &combine, NULL));
        free(before);
    }
    EP(ncclEpHandleDestroy(handle));
    EP_SAYS(ncclInvalidArgument, "destroyed", ncclEpHandleDestroy(handle));
    free(tokens), free(given_scales), free(received), free(scales), free(made), free(got_weights), free(got_index), free(combined);
}

/* ---- passes ---- */

static const struct how USUAL = {
    NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_LAYOUT_EXPERT_MAJOR, ncclBfloat16, ncclInt64, 0, 0, 0, NCCL_EP_DISPATCH_QUANT_NONE, ncclFloat32,
};

static void low_latency(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    ncclDataType_t types[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    for (int i = 0; i < 12; i++) {
        struct how how = USUAL;
        how.layout = i % 2 ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR;
        how.type = types[i / 2 % 3];
        how.index = i % 3 ? ncclInt32 : ncclInt64;
        how.staged = i / 4 % 2;
        how.global = i / 2 % 2;
        pass(r, group, how);
    }
    for (int i = 0; i < 4; i++) {
        struct how how = USUAL;
        how.layout = i % 2 ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_EXPERT_MAJOR;
        how.recipe = i / 2 ? NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4 : NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD;
        pass(r, group, how);
        if (i / 2) continue;
        how.scale = ncclUint8;
        pass(r, group, how);
    }
    EP(ncclEpGroupDestroy(group));
    EP_SAYS(ncclInvalidArgument, "destroyed", ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
}

static void high_throughput(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    for (int i = 0; i < 6; i++) {
        struct how how = USUAL;
        how.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
        how.layout = i % 2 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
        how.alignment = i == 3 ? 4 : 0;
        how.type = i < 4 ? ncclBfloat16 : ncclFloat32;
        how.index = i < 2 ? ncclInt64 : ncclInt32;
        how.global = i == 2;
        pass(r, group, how);
    }
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
}

static void low_latency_in_threads(void) { in_threads(3, low_latency); }
static void low_latency_in_processes(void) { in_processes(2, -1, low_latency); }
static void high_throughput_in_threads(void) { in_threads(3, high_throughput); }
static void high_throughput_in_processes(void) { in_processes(2, -1, high_throughput); }
static void alone(void) { in_threads(1, low_latency), in_threads(1, high_throughput); }

static void several_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t low = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY), high = group_of(r, comm, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    struct how how = USUAL;
    pass(r, low, how);
    how.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    pass(r, high, how);
    /* The communicator is as it was, and may go before the groups. */
    float sum = 1;
    OK(ncclAllReduce(&sum, &sum, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(sum == (float)r->ranks);
    OK(ncclCommDestroy(comm));
    pass(r, low, USUAL);
    EP(ncclEpGroupDestroy(low));
    EP(ncclEpGroupDestroy(high));
}

static void several_groups(void) { in_threads(2, several_main); }

/* What a process was forked from goes on, also when the forked one ends what it has a copy of, as destructors do. */
static void forked_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    pass(r, group, USUAL);
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        EP_SAYS(ncclInvalidUsage, "forked", ncclEpGroupDestroy(group));
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    pass(r, group, USUAL);
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
}

static void forked(void) { in_processes(2, -1, forked_main); }

static void not_blocking_main(struct rank* r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = NULL;
    ncclResult_t state = ncclCommInitRankConfig(&comm, r->ranks, r->id, r->rank, &config);
    CHECK(state == ncclSuccess || state == ncclInProgress);
    do OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    CHECK(state == ncclSuccess);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    pass(r, group, USUAL);
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
}

static void a_communicator_that_does_not_block(void) { in_threads(2, not_blocking_main); }

static void windows_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    size_t bytes = (size_t)L * r->ranks * M * H * 4;
    char* memory = NULL;
    ncclWindow_t window = NULL;
    OK(ncclMemAlloc((void**)&memory, bytes + 4096));
    OK(ncclCommWindowRegister(comm, memory, bytes + 4096, &window, NCCL_WIN_DEFAULT));
    int32_t index[K] = {r->rank, -1, -1};
    float tokens[H], weights[K] = {2, 1, 1}, combined[H];
    int32_t counters[L];
    for (int i = 0; i < H; i++) tokens[i] = (float)(i + r->rank);
    struct tensor ti, tx, ty, tw, tc, to;
    ncclEpHandle_t handle;
    EP(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, describe(&ti, ncclInt32, index, 2, 1, K, 0), NULL, NULL, NULL));
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    inputs.tokens = describe(&tx, ncclFloat32, tokens, 2, 1, H, 0);
    outputs.tokens = describe(&ty, ncclFloat32, NULL, 3, L, (size_t)r->ranks * M, H);
    info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
    EP_SAYS(ncclInvalidArgument, "outputs->tokens has no memory", ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL));
    ty.tensor.win_hdl = window;
    ty.tensor.win_offset = 4096;
    EP(ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL));
    /* All tokens are for rank 0's experts 0 and 1. */
    if (r->rank == 0) {
        CHECK(counters[0] == 1 && counters[1] == 1);
        const float* rows = (const float*)(memory + 4096);
        for (int i = 0; i < H; i++) CHECK(rows[i] == (float)i && rows[r->ranks * M * H + i] == (float)(i + 1));
    } else {
        CHECK(counters[0] == 0 && counters[1] == 0);
    }
    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
    back.tokens = &ty.tensor;
    home.tokens = describe(&to, ncclFloat32, combined, 2, 1, H, 0);
    home.topk_weights = describe(&tw, ncclFloat32, weights, 2, 1, K, 0);
    EP(ncclEpCombine(handle, &back, &home, NULL, NULL));
    for (int i = 0; i < H; i++) CHECK(combined[i] == 2 * tokens[i]);
    EP(ncclEpHandleDestroy(handle));
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
    OK(ncclMemFree(memory));
}

static void windows(void) { in_threads(2, windows_main); }

/* ---- mistakes ---- */

static void tensors(void) {
    int version = 0;
    EP(ncclEpGetVersion(&version));
    CHECK(version == 200 && version == NCCL_EP_VERSION_CODE);
    EP_SAYS(ncclInvalidArgument, "version is NULL", ncclEpGetVersion(NULL));
    size_t sizes[] = {3, 4};
    ncclEpTensor_t* tensor = NULL;
    EP(ncclEpTensorAlloc(&tensor, 2, ncclBfloat16, sizes, NULL));
    sizes[0] = sizes[1] = 9;
    CHECK(tensor->size == 48 && tensor->magic == NCCL_EP_TENSOR_MAGIC && tensor->ndim == 2 && tensor->datatype == ncclBfloat16);
    CHECK(tensor->data == NULL && tensor->win_hdl == NULL && tensor->sizes[0] == 3 && tensor->sizes[1] == 4);
    tensor->sizes[1] = 5;
    tensor->data = sizes;
    EP(ncclEpTensorDestroy(tensor));
    EP_SAYS(ncclInvalidArgument, "not from ncclEpTensorAlloc", ncclEpTensorDestroy((ncclEpTensor_t*)sizes));
    EP(ncclEpTensorDestroy(NULL));
    EP_SAYS(ncclInvalidArgument, "0 dimensions", ncclEpTensorAlloc(&tensor, 0, ncclBfloat16, sizes, NULL));
    EP_SAYS(ncclInvalidArgument, "type 12", ncclEpTensorAlloc(&tensor, 1, (ncclDataType_t)12, sizes, NULL));
    EP_SAYS(ncclInvalidArgument, "sizes is NULL", ncclEpTensorAlloc(&tensor, 1, ncclBfloat16, NULL, NULL));
    ncclEpTensorAllocConfig_t config = {8, 1};
    EP_SAYS(ncclInvalidArgument, "_INIT macro", ncclEpTensorAlloc(&tensor, 1, ncclBfloat16, sizes, &config));
}

static void mistakes_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = NULL;
    ncclEpGroupConfig_t config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    EP_SAYS(ncclInvalidArgument, "ep_group is NULL", ncclEpCreateGroup(NULL, comm, &config));
    EP_SAYS(ncclInvalidArgument, "comm is NULL", ncclEpCreateGroup(&group, NULL, &config));
    EP_SAYS(ncclInvalidArgument, "ncclEpGroupConfig_t is NULL", ncclEpCreateGroup(&group, comm, NULL));
    EP_SAYS(ncclInvalidArgument, "not a communicator", ncclEpCreateGroup(&group, (ncclComm_t)0x10, &config));
    config.magic = 7;
    EP_SAYS(ncclInvalidArgument, "magic 0x7", ncclEpCreateGroup(&group, comm, &config));
    config.magic = NCCL_EP_MAGIC, config.size = 95;
    EP_SAYS(ncclInvalidArgument, "95 bytes", ncclEpCreateGroup(&group, comm, &config));
    /* What is found out together. */
    config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY), config.num_experts = 3;
    EP_SAYS(ncclInvalidArgument, "a multiple of the 2 ranks", ncclEpCreateGroup(&group, comm, &config));
    config = config_of(r, NCCL_EP_ALGO_HIGH_THROUGHPUT), config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    EP_SAYS(ncclInvalidArgument, "recv_total_counter", ncclEpCreateGroup(&group, comm, &config));
    config = config_of(r, NCCL_EP_ALGO_HIGH_THROUGHPUT), config.max_recv_tokens_per_rank = M - 1;
    EP_SAYS(ncclInvalidArgument, "max_recv_tokens_per_rank is 5", ncclEpCreateGroup(&group, comm, &config));
    config = config_of(r, NCCL_EP_ALGO_HIGH_THROUGHPUT), config.enable_mask = 1;
    EP_SAYS(ncclInvalidArgument, "enable_mask is for low latency", ncclEpCreateGroup(&group, comm, &config));
    config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY), config.max_dispatch_tokens_per_rank = M + (unsigned)r->rank;
    EP_SAYS(ncclInvalidUsage, "ranks disagree", ncclEpCreateGroup(&group, comm, &config));
    config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY), config.zero_copy = r->rank == 1 ? NCCL_EP_ZERO_COPY_ON : NCCL_EP_ZERO_COPY_OFF;
    EP_IS(r->rank == 1 ? ncclInvalidArgument : ncclRemoteError, ncclEpCreateGroup(&group, comm, &config));
    CHECK(group == NULL && strstr(crossweftEpGetLastError(), "zero_copy"));
    config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    EP_IS(r->rank == 1 ? ncclInvalidArgument : ncclRemoteError, ncclEpCreateGroup(&group, comm, r->rank == 1 ? NULL : &config));
    CHECK(group == NULL && strstr(crossweftEpGetLastError(), "ncclEpGroupConfig_t is NULL"));
    config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    OK(ncclGroupStart());
    EP_SAYS(ncclInvalidUsage, "outside ncclGroupStart", ncclEpCreateGroup(&group, comm, &config));
    /* What was gathered would run now: it must still have its memory. */
    OK(ncclGroupEnd());
    group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    pass(r, group, USUAL);
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
}

static void mistakes_of_groups(void) { in_processes(2, -1, mistakes_main); }

static void calls_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY), high = group_of(r, comm, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    ncclEpHandle_t handle = NULL;
    size_t bytes;
    EP_SAYS(ncclInvalidArgument, "ep_group is none", ncclEpInitHandle(&handle, (ncclEpGroup_t)comm, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, NULL));
    EP_SAYS(ncclInvalidArgument, "LAYOUT_UNSET", ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_UNSET, NULL, K, NULL));
    EP_SAYS(ncclInvalidArgument, "expert-major or rank-major", ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_FLAT, NULL, K, NULL));
    EP_SAYS(ncclInvalidArgument, "flat or expert-major", ncclEpHandleMemSize(high, NCCL_EP_LAYOUT_RANK_MAJOR, NULL, &bytes, K));
    EP_SAYS(ncclInvalidArgument, "it must be given", ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, -1, NULL));
    EP_SAYS(ncclInvalidArgument, "top-33", ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, 33, NULL));
    ncclEpHandleConfig_t odd = NCCL_EP_HANDLE_CONFIG_INIT;
    odd.dispatch_output_per_expert_alignment = 3;
    EP_SAYS(ncclInvalidArgument, "power of two", ncclEpInitHandle(&handle, high, NCCL_EP_LAYOUT_EXPERT_MAJOR, &odd, -1, NULL));
    struct tensor memory;
    char few[8];
    EP_SAYS(ncclInvalidArgument, "handle_mem has sizes",
        ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, describe(&memory, ncclUint8, few, 1, 8, 0, 0)));
    CHECK(handle == NULL);
    EP(ncclEpInitHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, NULL, K, NULL));
    EP_SAYS(ncclInvalidUsage, "destroy its handles first", ncclEpGroupDestroy(group));

    int32_t index[K] = {0, 1, L}, counters[L];
    float token[H] = {0}, weights[K] = {1, 1, 1}, sum[H];
    static float rows[L * 2 * M * H];
    struct tensor ti, tx, ty, tc, tw, to;
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    inputs.tokens = describe(&tx, ncclFloat32, token, 2, 1, H, 0);
    outputs.tokens = describe(&ty, ncclFloat32, rows, 3, L, 2 * M, H);
    info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
    back.tokens = &ty.tensor;
    home.tokens = describe(&to, ncclFloat32, sum, 2, 1, H, 0);
    home.topk_weights = describe(&tw, ncclFloat32, weights, 2, 1, K, 0);
#define DISPATCH ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL)
    EP_SAYS(ncclInvalidUsage, "ncclEpUpdateHandle first", DISPATCH);
    EP_SAYS(ncclInvalidUsage, "nothing was dispatched", ncclEpCombine(handle, &back, &home, NULL, NULL));
    EP_SAYS(ncclInvalidUsage, "no call with send_only", ncclEpComplete(handle, NULL, NULL));
    describe(&ti, ncclInt32, index, 2, 1, K, 0);
    EP_SAYS(ncclInvalidArgument, "topk_idx is NULL", ncclEpUpdateHandle(handle, NULL, NULL, NULL));
    EP_SAYS(ncclInvalidArgument, "layout_info must be NULL", ncclEpUpdateHandle(handle, &ti.tensor, &info, NULL));
    index[1] = 8;
    EP_SAYS(ncclInvalidArgument, "has expert 8; there are 8", ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));
    index[1] = -2;
    EP_SAYS(ncclInvalidArgument, "has expert -2", ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));
    index[1] = 1;
    ti.tensor.datatype = ncclFloat32;
    EP_SAYS(ncclInvalidArgument, "ncclInt32 or ncclInt64", ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));
    ti.tensor.datatype = ncclInt32, ti.sizes[1] = 2;
    EP_SAYS(ncclInvalidArgument, "made for top-3", ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));
    ti.sizes[1] = K, ti.sizes[0] = M + 1;
    EP_SAYS(ncclInvalidArgument, "7 tokens", ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));
    ti.sizes[0] = 1;
    EP(ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));

    EP_SAYS(ncclInvalidArgument, "ncclEpDispatchInputs_t is NULL", ncclEpDispatch(handle, NULL, &outputs, &info, NULL, NULL));
    EP_SAYS(ncclInvalidArgument, "expert_counters is required", ncclEpDispatch(handle, &inputs, &outputs, NULL, NULL, NULL));
    inputs.topk_weights = &tw.tensor;
    EP_SAYS(ncclInvalidArgument, "weights are given when combining", DISPATCH);
    inputs.topk_weights = NULL, tx.sizes[0] = 2;
    EP_SAYS(ncclInvalidArgument, "inputs->tokens has sizes [2, 256]", DISPATCH);
    tx.sizes[0] = 1, tx.tensor.datatype = ncclInt32;
    EP_SAYS(ncclInvalidArgument, "bf16, f16 or f32", DISPATCH);
    tx.tensor.datatype = ncclFloat32, ty.sizes[1] = M;
    EP_SAYS(ncclInvalidArgument, "outputs->tokens has sizes", DISPATCH);
    ty.sizes[1] = 2 * M, ty.tensor.datatype = ncclBfloat16;
    EP_SAYS(ncclInvalidArgument, "outputs->tokens has type 9", DISPATCH);
    ty.tensor.datatype = ncclFloat32, tx.tensor.data = rows + 4;
    EP_SAYS(ncclInvalidArgument, "share memory", DISPATCH);
    tx.tensor.data = token, tc.tensor.data = (char*)counters + 1;
    EP_SAYS(ncclInvalidArgument, "a multiple of 4", DISPATCH);
    tc.tensor.data = counters;
    ncclEpDispatchConfig_t config = NCCL_EP_DISPATCH_CONFIG_INIT;
    config.quantization_recipe = (ncclEpDispatchQuantizationRecipe_t)9;
    EP_SAYS(ncclInvalidArgument, "recipe is 9", ncclEpDispatch(handle, &inputs, &outputs, &info, &config, NULL));
    /* Nothing of this has counted. */
    EP(DISPATCH);
    home.topk_weights = NULL;
    EP_SAYS(ncclInvalidArgument, "outputs->topk_weights is NULL", ncclEpCombine(handle, &back, &home, NULL, NULL));
    home.topk_weights = &tw.tensor, to.tensor.data = rows;
    EP_SAYS(ncclInvalidArgument, "share memory", ncclEpCombine(handle, &back, &home, NULL, NULL));
    to.tensor.data = sum;
    back.scales = &tw.tensor;
    EP_SAYS(ncclInvalidArgument, "combine does not quantise", ncclEpCombine(handle, &back, &home, NULL, NULL));
    back.scales = NULL;
    /* A caller of API 1 has shorter structures. */
    back.size = 24;
    EP(ncclEpCombine(handle, &back, &home, NULL, NULL));
    EP(ncclEpUpdateHandle(handle, &ti.tensor, NULL, NULL));
    EP_SAYS(ncclInvalidUsage, "nothing was dispatched", ncclEpCombine(handle, &back, &home, NULL, NULL));
    EP(ncclEpHandleDestroy(handle));

    int mask[2] = {1, 1};
    EP_SAYS(ncclInvalidUsage, "without enable_mask", ncclEpMaskQuery(group, mask, NULL));
    EP_SAYS(ncclInvalidUsage, "without enable_mask", ncclEpMaskUpdate(group, mask, NULL));
    EP_SAYS(ncclInvalidUsage, "without enable_mask", ncclEpMaskClean(group, NULL));
    EP_SAYS(ncclInvalidUsage, "without enable_mask", ncclEpGetAsyncError(group, mask));
    EP_SAYS(ncclInvalidUsage, "without enable_mask", ncclEpErrorClear(group));

    /* Too little room, which is known before anything is sent. */
    ncclEpHandle_t flat = NULL;
    EP(ncclEpCreateHandle(&flat, high, NCCL_EP_LAYOUT_FLAT, &ti.tensor, NULL, NULL, NULL));
    inputs.topk_weights = &tw.tensor;
    describe(&ty, ncclFloat32, rows, 2, 1, H, 0);
    EP_SAYS(ncclInvalidArgument, "1 rows, but 2 come", ncclEpDispatch(flat, &inputs, &outputs, NULL, NULL, NULL));
    ty.sizes[0] = 2;
    EP_SAYS(ncclInvalidArgument, "counts are told when the handle is updated", ncclEpDispatch(flat, &inputs, &outputs, &info, NULL, NULL));
    config = (ncclEpDispatchConfig_t)NCCL_EP_DISPATCH_CONFIG_INIT, config.send_only = 1;
    EP_SAYS(ncclInvalidUsage, "send_only is for low latency", ncclEpDispatch(flat, &inputs, &outputs, NULL, &config, NULL));
    EP(ncclEpDispatch(flat, &inputs, &outputs, NULL, NULL, NULL));
    /* A mistake of one rank is told to the others. */
    index[0] = r->rank == 1 ? 99 : 0;
    EP_SAYS(r->rank == 1 ? ncclInvalidArgument : ncclRemoteError, r->rank == 1 ? "expert 99" : "rank 1 could not say",
        ncclEpUpdateHandle(flat, &ti.tensor, NULL, NULL));
    EP_SAYS(r->rank == 1 ? ncclInvalidArgument : ncclRemoteError, r->rank == 1 ? "topk_idx is NULL" : "rank 1 could not say",
        ncclEpUpdateHandle(flat, r->rank == 1 ? NULL : &ti.tensor, NULL, NULL));
    EP(ncclEpHandleDestroy(flat));
    /* Also when there is no handle yet. */
    index[0] = 0;
#define CREATE(out, layout, what, how) \
    EP_SAYS(r->rank == 1 ? ncclInvalidArgument : ncclRemoteError, r->rank == 1 ? what : "rank 1 could not say", \
        ncclEpCreateHandle(out, high, layout, &ti.tensor, NULL, how, NULL))
    CREATE(&flat, r->rank == 1 ? NCCL_EP_LAYOUT_UNSET : NCCL_EP_LAYOUT_FLAT, "LAYOUT_UNSET", NULL);
    CHECK(flat == NULL);
    CREATE(&flat, NCCL_EP_LAYOUT_EXPERT_MAJOR, "power of two", r->rank == 1 ? &odd : NULL);
    CREATE(r->rank == 1 ? NULL : &flat, NCCL_EP_LAYOUT_FLAT, "handle is NULL", NULL);
    ti.sizes[1] = r->rank == 1 ? 33 : K;
    CREATE(&flat, NCCL_EP_LAYOUT_FLAT, "top-33", NULL);
    ti.sizes[1] = K;
    EP(ncclEpCreateHandle(&flat, high, NCCL_EP_LAYOUT_FLAT, &ti.tensor, NULL, NULL, NULL));
    EP(ncclEpHandleDestroy(flat));
    EP(ncclEpGroupDestroy(group));
    EP(ncclEpGroupDestroy(high));
    OK(ncclCommDestroy(comm));
}

static void mistakes_of_calls(void) { in_threads(2, calls_main); }

static void differ_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    pass(r, group, USUAL);
    struct how how = USUAL;
    int32_t index[1] = {0}, counters[L];
    static float rows[2][L * 2 * M * H];
    float token[H] = {0};
    struct tensor ti, tx, ty, tc;
    size_t hidden = r->rank == 1 ? H / 2 : H;
    ncclEpHandle_t handle;
    EP(ncclEpCreateHandle(&handle, group, how.layout, describe(&ti, ncclInt32, index, 2, 1, 1, 0), NULL, NULL, NULL));
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    inputs.tokens = describe(&tx, ncclFloat32, token, 2, 1, hidden, 0);
    outputs.tokens = describe(&ty, ncclFloat32, rows[r->rank], 3, L, 2 * M, hidden);
    info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
    EP_SAYS(ncclInvalidUsage, "ranks disagree", ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL));
    EP(ncclEpHandleDestroy(handle));
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommDestroy(comm));
}

static void ranks_that_differ(void) { in_threads(2, differ_main); }

static void without_the_device(void) {
    unsetenv("CROSSWEFT_DEVICE");
    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    EP_SAYS(ncclInvalidUsage, "CROSSWEFT_DEVICE=cpu", ncclEpCreateGroup(&group, (ncclComm_t)8, &config));
}

/* ---- masks ---- */

/* A pass in which rank `gone` takes no part; one token for each expert. */
static void pass_without(struct rank* r, ncclEpHandle_t handle, int gone) {
    int ranks = r->ranks;
    float* rows = malloc((size_t)L * ranks * M * H * 4);
    float token[H], sum[H], weights[2] = {1, 3};
    int32_t counters[L];
    for (int i = 0; i < H; i++) token[i] = (float)(i + 1 + r->rank);
    struct tensor tx, ty, tc, tw, to;
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    inputs.tokens = describe(&tx, ncclFloat32, token, 2, 1, H, 0);
    outputs.tokens = describe(&ty, ncclFloat32, rows, 3, L, (size_t)ranks * M, H);
    info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
    EP(ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL));
    ncclEpCombineInputs_t back = NCCL_EP_COMBINE_INPUTS_INIT;
    ncclEpCombineOutputs_t home = NCCL_EP_COMBINE_OUTPUTS_INIT;
    back.tokens = &ty.tensor;
    home.tokens = describe(&to, ncclFloat32, sum, 2, 1, H, 0);
    home.topk_weights = describe(&tw, ncclFloat32, weights, 2, 1, 2, 0);
    EP(ncclEpCombine(handle, &back, &home, NULL, NULL));
    /* Experts are of rank 0 and of the last. */
    float all = 1 + (gone == ranks - 1 ? 0 : 3);
    for (int i = 0; i < H; i++) CHECK(sum[i] == all * token[i]);
    int senders = gone < 0 ? ranks : ranks - 1;
    if (r->rank == 0) CHECK(counters[0] == senders && counters[1] == 0);
    free(rows);
}

static void masks_main(struct rank* r) {
    int ranks = r->ranks, gone = ranks - 1, error = 9, mask[MAX_RANKS];
    ncclComm_t comm = join(r);
    ncclEpGroupConfig_t config = config_of(r, NCCL_EP_ALGO_LOW_LATENCY);
    config.enable_mask = 1;
    ncclEpGroup_t group;
    EP(ncclEpCreateGroup(&group, comm, &config));
    ncclEpHandle_t handle;
    struct tensor ti;
    int32_t index[2] = {0, gone * L};
    EP(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, describe(&ti, ncclInt32, index, 2, 1, 2, 0), NULL, NULL, NULL));
    pass_without(r, handle, -1);
    EP(ncclEpMaskQuery(group, mask, NULL));
    for (int i = 0; i < ranks; i++) CHECK(mask[i] == 1);
    EP(ncclEpGetAsyncError(group, &error));
    CHECK(error == 0);
    if (r->rank == gone) raise(SIGKILL);
    pass_without(r, handle, gone);
    EP(ncclEpMaskQuery(group, mask, NULL));
    for (int i = 0; i < ranks; i++) CHECK(mask[i] == (i != gone));
    EP(ncclEpGetAsyncError(group, &error));
    CHECK(error == 1);
    EP(ncclEpErrorClear(group));
    EP(ncclEpGetAsyncError(group, &error));
    CHECK(error == 0);
    pass_without(r, handle, gone);
    EP(ncclEpGetAsyncError(group, &error));
    CHECK(error == 0);
    mask[r->rank] = 0;
    EP_SAYS(ncclInvalidArgument, "cannot mask itself", ncclEpMaskUpdate(group, mask, NULL));
    mask[r->rank] = 2;
    EP_SAYS(ncclInvalidArgument, "mask has 2", ncclEpMaskUpdate(group, mask, NULL));
    EP(ncclEpMaskClean(group, NULL));
    EP(ncclEpMaskQuery(group, mask, NULL));
    for (int i = 0; i < ranks; i++) CHECK(mask[i] == 1);
    /* It is found out anew. */
    pass_without(r, handle, gone);
    EP(ncclEpMaskQuery(group, mask, NULL));
    CHECK(mask[gone] == 0);
    EP(ncclEpHandleDestroy(handle));
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommAbort(comm));
}

static void masks(void) { in_processes(3, 2, masks_main); }

static void lost_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclEpGroup_t group = group_of(r, comm, NCCL_EP_ALGO_LOW_LATENCY);
    pass(r, group, USUAL);
    if (r->rank == 1) raise(SIGKILL);
    int32_t index[1] = {0}, counters[L];
    static float rows[L * 2 * M * H];
    float token[H] = {0};
    struct tensor ti, tx, ty, tc;
    ncclEpHandle_t handle;
    EP(ncclEpCreateHandle(&handle, group, NCCL_EP_LAYOUT_EXPERT_MAJOR, describe(&ti, ncclInt32, index, 2, 1, 1, 0), NULL, NULL, NULL));
    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    inputs.tokens = describe(&tx, ncclFloat32, token, 2, 1, H, 0);
    outputs.tokens = describe(&ty, ncclFloat32, rows, 3, L, 2 * M, H);
    info.expert_counters = describe(&tc, ncclInt32, counters, 1, L, 0, 0);
    EP_SAYS(ncclRemoteError, "rank 1", ncclEpDispatch(handle, &inputs, &outputs, &info, NULL, NULL));
    EP(ncclEpHandleDestroy(handle));
    EP(ncclEpGroupDestroy(group));
    OK(ncclCommAbort(comm));
}

static void a_lost_rank(void) { in_processes(2, 1, lost_main); }

/* ---- which there are ---- */

static const struct {
    const char* name;
    void (*run)(void);
} cases[] = {
#define CASE(name) {#name, name}
    CASE(tensors), CASE(alone), CASE(low_latency_in_threads), CASE(low_latency_in_processes),
    CASE(high_throughput_in_threads), CASE(high_throughput_in_processes), CASE(several_groups), CASE(forked),
    CASE(a_communicator_that_does_not_block), CASE(windows), CASE(mistakes_of_groups), CASE(mistakes_of_calls),
    CASE(ranks_that_differ), CASE(without_the_device), CASE(masks), CASE(a_lost_rank),
};

int main(int count, char** arguments) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (count < 2) printf("%s\n", cases[i].name);
        else if (strcmp(arguments[1], cases[i].name) == 0) return cases[i].run(), 0;
    }
    return count < 2 ? 0 : 2;
}
