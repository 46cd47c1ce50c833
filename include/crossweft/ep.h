/* The C interface of NCCL EP (API 2, version 0.2.0) as libnccl_ep.so.0 of crossweft has it, for C programs on a machine
 * without CUDA: dispatch and combine of a mixture of experts.
 *
 * Programs that were compiled with NCCL EP's own header run with the same library: names, values and layouts are NCCL
 * EP's. What is supported, and what pointers may be: docs/moe.md. Functions may be called from any thread, of one handle
 * by one thread at a time. Streams are of no account: a call is complete when it returns. */
#ifndef CROSSWEFT_EP_H
#define CROSSWEFT_EP_H

/* Or NCCL's own header, if it was included before. */
#ifndef NCCL_MAJOR
#include <crossweft/nccl.h>
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 2
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE (NCCL_EP_MAJOR * 10000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH)
#define NCCL_EP_API_VERSION 2

/* The second member of every structure; the first is its size. Structures only ever grow at their end, and fields that a
 * caller's version lacks are 0. */
#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu
#define NCCL_EP_AUTO 0

/* In C++ these want designated initialisers (C++20, or an extension). */
#define CROSSWEFT_EP_INIT(type, magic_) ((type){.size = (unsigned int)sizeof(type), .magic = (magic_)})

typedef enum { NCCL_EP_ALGO_LOW_LATENCY = 0, NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 } ncclEpAlgorithm_t;

/* R ranks, M max_dispatch_tokens_per_rank, L experts of this rank, H elements of a token, K experts of a token, N rows. */
typedef enum {
    NCCL_EP_LAYOUT_UNSET = 0,
    NCCL_EP_LAYOUT_EXPERT_MAJOR = 1, /* low latency: [L, R * M, H]; high throughput: [N, H], grouped by expert */
    NCCL_EP_LAYOUT_RANK_MAJOR = 2,   /* low latency: [R, M, H] */
    NCCL_EP_LAYOUT_FLAT = 3          /* high throughput: [N, H] */
} ncclEpLayout_t;

typedef enum { NCCL_EP_FWD_PASS = 0, NCCL_EP_BWD_PASS = 1 } ncclEpPassDir_t;
/* Too little room is an error of the call; DROP is refused. */
typedef enum { NCCL_EP_OVERFLOW_AUTO = 0, NCCL_EP_OVERFLOW_TRAP = 1, NCCL_EP_OVERFLOW_DROP = 2 } ncclEpOverflowPolicy_t;
typedef enum { NCCL_EP_ZERO_COPY_AUTO = 0, NCCL_EP_ZERO_COPY_OFF = 1, NCCL_EP_ZERO_COPY_ON = 2 } ncclEpZeroCopyMode_t;
typedef enum {
    NCCL_EP_EXPERT_ID_AUTO = 0, /* local */
    NCCL_EP_EXPERT_ID_LOCAL = 1,
    NCCL_EP_EXPERT_ID_GLOBAL = 2
} ncclEpExpertIdKind_t;
typedef enum {
    NCCL_EP_DISPATCH_QUANT_NONE = 0,
    NCCL_EP_DISPATCH_QUANT_SCALES_FORWARD = 1, /* the caller's f8e4m3 tokens and scales */
    NCCL_EP_DISPATCH_QUANT_DS_FP8E3M4 = 2      /* bf16 becomes f8e4m3 with an f32 scale for each 128 elements */
} ncclEpDispatchQuantizationRecipe_t;
typedef enum { NCCL_EP_COMBINE_QUANT_NONE = 0 } ncclEpCombineQuantizationRecipe_t;

typedef struct ncclEpTensor {
    unsigned int size;
    unsigned int magic;
    unsigned int ndim;
    ncclDataType_t datatype;
    void* data;           /* or NULL, and a window */
    ncclWindow_t win_hdl;
    uint64_t win_offset;  /* bytes */
    size_t* sizes;        /* [ndim], the caller's; rows follow one another without gaps */
} ncclEpTensor_t;
#define NCCL_EP_TENSOR_INIT_INLINE .size = (unsigned int)sizeof(ncclEpTensor_t), .magic = NCCL_EP_TENSOR_MAGIC
#define NCCL_EP_TENSOR_INIT CROSSWEFT_EP_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
} ncclEpTensorAllocConfig_t;
#define NCCL_EP_TENSOR_ALLOC_CONFIG_INIT CROSSWEFT_EP_INIT(ncclEpTensorAllocConfig_t, NCCL_EP_MAGIC)

/* They return cudaError_t, which is an int to C. Never called here: memory that ranks share cannot come from them. */
typedef int (*ncclEpAllocFn_t)(void** ptr, size_t size, void* context);
typedef int (*ncclEpFreeFn_t)(void* ptr, void* context);
typedef struct {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
    void* context;
} ncclEpAllocConfig_t;

typedef struct {
    unsigned int size;
    unsigned int magic;
    unsigned int version;
    ncclEpAlgorithm_t algorithm;
    unsigned int num_experts;                  /* a multiple of the ranks */
    unsigned int max_dispatch_tokens_per_rank;
    unsigned int max_recv_tokens_per_rank;     /* high throughput: 0, or as many at least as a rank sends */
    unsigned int max_token_bytes;
    unsigned long int rdma_buffer_size;        /* of no account, as the next three */
    unsigned int num_qp_per_rank;
    unsigned int num_channels;
    unsigned int max_num_sms;
    ncclEpAllocConfig_t alloc;
    unsigned int enable_mask;                  /* low latency */
    uint64_t timeout_ns;                       /* of a call; 0 is 100 s */
    ncclEpZeroCopyMode_t zero_copy;
    ncclEpOverflowPolicy_t overflow_policy;
    unsigned int num_topk;                     /* the most experts of a token; 0 is 32 */
    unsigned char padding_v2[4];
} ncclEpGroupConfig_t;
#define NCCL_EP_GROUP_CONFIG_INIT \
    ((ncclEpGroupConfig_t){ \
        .size = (unsigned int)sizeof(ncclEpGroupConfig_t), .magic = NCCL_EP_MAGIC, .version = NCCL_EP_API_VERSION})

typedef struct {
    unsigned int size;
    unsigned int magic;
    size_t dispatch_output_per_expert_alignment; /* high throughput, expert-major: a power of two */
} ncclEpHandleConfig_t;
#define NCCL_EP_HANDLE_CONFIG_INIT CROSSWEFT_EP_INIT(ncclEpHandleConfig_t, NCCL_EP_MAGIC)

/* Where counts are wanted, in int32 or int64. */
typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* expert_counters;    /* [L]; low latency: required, at dispatch; high throughput: at update */
    ncclEpTensor_t* src_rank_counters;  /* [R]; low latency, rank-major: at dispatch */
    ncclEpTensor_t* expert_offsets;     /* [L]; high throughput, expert-major: at update */
    ncclEpTensor_t* recv_total_counter; /* [1]; high throughput: at update */
    ncclEpExpertIdKind_t recv_topk_idx_kind;
    unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;
#define NCCL_EP_LAYOUT_INFO_INIT CROSSWEFT_EP_INIT(ncclEpLayoutInfo_t, NCCL_EP_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;       /* [tokens, H] */
    ncclEpTensor_t* topk_weights; /* [tokens, K] f32; not with low latency, expert-major */
    ncclEpTensor_t* scales;
} ncclEpDispatchInputs_t;
#define NCCL_EP_DISPATCH_INPUTS_INIT CROSSWEFT_EP_INIT(ncclEpDispatchInputs_t, NCCL_EP_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;
    ncclEpTensor_t* topk_weights; /* f32 [R, M, K], [N, K]; [N] grouped by expert; not with low latency, expert-major */
    ncclEpTensor_t* scales;
    ncclEpTensor_t* topk_idx;     /* int32 or int64 [R, M, K], [N, K]; -1 where the expert is elsewhere */
} ncclEpDispatchOutputs_t;
#define NCCL_EP_DISPATCH_OUTPUTS_INIT CROSSWEFT_EP_INIT(ncclEpDispatchOutputs_t, NCCL_EP_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;       /* as dispatched, with what the experts made of it */
    ncclEpTensor_t* topk_weights; /* NULL */
    ncclEpTensor_t* scales;       /* NULL */
} ncclEpCombineInputs_t;
#define NCCL_EP_COMBINE_INPUTS_INIT CROSSWEFT_EP_INIT(ncclEpCombineInputs_t, NCCL_EP_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
    ncclEpTensor_t* tokens;       /* [tokens, H] */
    ncclEpTensor_t* topk_weights; /* low latency, expert-major: [tokens, K] f32, which is read; otherwise NULL */
} ncclEpCombineOutputs_t;
#define NCCL_EP_COMBINE_OUTPUTS_INIT CROSSWEFT_EP_INIT(ncclEpCombineOutputs_t, NCCL_EP_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
    unsigned int send_only;       /* low latency: ncclEpComplete follows */
    unsigned int round_scales;
    ncclEpPassDir_t pass_direction;
    ncclEpDispatchQuantizationRecipe_t quantization_recipe;
} ncclEpDispatchConfig_t;
#define NCCL_EP_DISPATCH_CONFIG_INIT CROSSWEFT_EP_INIT(ncclEpDispatchConfig_t, NCCL_EP_MAGIC)

typedef struct {
    unsigned int size;
    unsigned int magic;
    unsigned int send_only;
    ncclEpPassDir_t pass_direction;
    ncclEpCombineQuantizationRecipe_t quantization_recipe;
} ncclEpCombineConfig_t;
#define NCCL_EP_COMBINE_CONFIG_INIT CROSSWEFT_EP_INIT(ncclEpCombineConfig_t, NCCL_EP_MAGIC)

typedef struct ncclEpCompleteConfig {
    unsigned int size;
    unsigned int magic;
} ncclEpCompleteConfig_t;
#define NCCL_EP_COMPLETE_CONFIG_INIT CROSSWEFT_EP_INIT(ncclEpCompleteConfig_t, NCCL_EP_MAGIC)

typedef struct ncclEpGroup* ncclEpGroup_t;
typedef struct ncclEpHandle* ncclEpHandle_t;

/* The words behind this thread's last call that failed; valid until its next one that does. NCCL EP has no such. */
const char* crossweftEpGetLastError(void);

ncclResult_t ncclEpGetVersion(int* version);

/* A descriptor with sizes of its own, and no memory. */
ncclResult_t ncclEpTensorAlloc(
    ncclEpTensor_t** tensor, unsigned int ndim, ncclDataType_t datatype, const size_t* sizes,
    const ncclEpTensorAllocConfig_t* config);
ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t* tensor);

/* All ranks call it, outside groups of NCCL's; each on a thread of its own where one process has several. */
ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* ep_group, ncclComm_t comm, const ncclEpGroupConfig_t* config);
/* After its handles were destroyed. */
ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group);

ncclResult_t ncclEpHandleMemSize(
    ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config, size_t* size_out,
    int num_topk);
ncclResult_t ncclEpInitHandle(
    ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
    int num_topk, const ncclEpTensor_t* handle_mem);
/* topk_idx: [tokens, K], int32 or int64; it is copied. With high throughput all ranks call it. */
ncclResult_t ncclEpUpdateHandle(
    ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream);
ncclResult_t ncclEpCreateHandle(
    ncclEpHandle_t* handle, ncclEpGroup_t ep_group, ncclEpLayout_t layout, const ncclEpTensor_t* topk_idx,
    const ncclEpLayoutInfo_t* layout_info, const ncclEpHandleConfig_t* config, cudaStream_t stream);
ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle);

/* All ranks call these, in the same order. */
ncclResult_t ncclEpDispatch(
    ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
    const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* config, cudaStream_t stream);
ncclResult_t ncclEpCombine(
    ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
    const ncclEpCombineConfig_t* config, cudaStream_t stream);
ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, cudaStream_t stream);

/* With enable_mask; 1 is active, 0 is masked. */
ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int* mask_status, cudaStream_t stream);
ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int* mask, cudaStream_t stream);
ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream);
ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int* error_out);
ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group);

#ifdef __cplusplus
}
#endif

#endif
