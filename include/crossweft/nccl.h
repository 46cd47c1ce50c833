/* The C interface of NCCL 2.32 as libnccl.so.2 of crossweft has it, for C programs on a machine without CUDA.
 *
 * Programs that were compiled with NCCL's own header run with the same library: names, values and layouts are
 * NCCL's. What is supported, and what pointers may be: docs/nccl.md. Every function is there a second time with a
 * `p` before its name, for profilers. All functions may be called from any thread. */
#ifndef CROSSWEFT_NCCL_H
#define CROSSWEFT_NCCL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_MAJOR 2
#define NCCL_MINOR 32
#define NCCL_PATCH 3
#define NCCL_VERSION(major, minor, patch) \
    ((major) <= 2 && (minor) <= 8 ? (major) * 1000 + (minor) * 100 + (patch) \
                                  : (major) * 10000 + (minor) * 100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)

/* As CUDA's own headers have them; on host memory of no account. */
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;
typedef struct ncclParamHandle* ncclParamHandle_t;
typedef struct ncclEncryptionConfig ncclEncryptionConfig_t;
#define NCCL_COMM_NULL NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclTimeout = 8,
    ncclNumResults = 9
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
} ncclDataType_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
    ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

typedef enum {
    ncclStatGpuMemSuspend = 0,
    ncclStatGpuMemSuspended = 1,
    ncclStatGpuMemPersist = 2,
    ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;

#define NCCL_API_MAGIC 0xcafebeefu
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_UNDEF_FLOAT (-1.0f)
#define NCCL_SPLIT_NOCOLOR (-1)
#define NCCL_SHRINK_DEFAULT 0
#define NCCL_SHRINK_ABORT 1
#define NCCL_REVOKE_DEFAULT 0
#define NCCL_SUSPEND_MEM 1
#define NCCL_WIN_DEFAULT 0
#define NCCL_WIN_COLL_SYMMETRIC 1
#define NCCL_WIN_STRICT_ORDERING 2
#define NCCL_WIN_GIN_ONLY 4
#define NCCL_WIN_CFT_COUNTED 8
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_CTA_POLICY_DEFAULT 0
#define NCCL_CTA_POLICY_EFFICIENCY 1
#define NCCL_CTA_POLICY_ZERO 2

/* Only ever grows at its end; `size` and `version` say what a caller has of it. */
typedef struct ncclConfig {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char* netName;
    int splitShare;
    int trafficClass;
    const char* commName;
    int collnetEnable;
    int CTAPolicy;
    int shrinkShare;
    int nvlsCTAs;
    int nChannelsPerNetPeer;
    int nvlinkCentricSched;
    int graphUsageMode;
    int numRmaCtx;
    int maxP2pPeers;
    int graphStreamOrdering;
    int launchOrderImplicit;
    int numRmaSig;
    int rmaEagerInit;
    int hostCftMode;
    int nvlsHostMode;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER \
    { \
        sizeof(ncclConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, INT_MIN, INT_MIN, INT_MIN, INT_MIN, NULL, \
        INT_MIN, INT_MIN, NULL, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, \
        INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN \
    }

typedef struct ncclConfigExt {
    struct ncclConfigExt* next;
    struct {
        int vendorId;
        int optionId;
    } key;
    union {
        int i;
        const char* s;
        void* raw;
    } val;
} ncclConfigExt_t;

typedef struct ncclCollConfig {
    size_t size;
    unsigned int magic;
    unsigned int version;
    ncclConfigExt_t* ext;
    int minCTAs;
    int maxCTAs;
    int nvlsCTAs;
    int cgaClusterSize;
    const char* algSelection;
    int forceAlgSelection;
    int CTAPolicy;
    uint64_t userProfilerTag;
    cudaEvent_t launchCompletionEvent;
} ncclCollConfig_t;

#define NCCL_COLLCONFIG_INITIALIZER \
    { \
        sizeof(ncclCollConfig_t), NCCL_API_MAGIC, NCCL_VERSION_CODE, NULL, INT_MIN, INT_MIN, INT_MIN, INT_MIN, \
        NULL, 1, INT_MIN, 0, NULL \
    }

typedef struct ncclSimInfo {
    size_t size;
    unsigned int magic;
    unsigned int version;
    float estimatedTime; /* microseconds */
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER {sizeof(ncclSimInfo_t), 0x74685283u, NCCL_VERSION_CODE, NCCL_UNDEF_FLOAT}

typedef struct {
    int opCnt;
    int peer;
    int sigIdx;
    int ctx;
} ncclWaitSignalDesc_t;

/* Of the device interface: what the host is asked. */
typedef struct ncclTeam {
    int nRanks, rank, stride;
} ncclTeam_t;

typedef struct ncclMultimemHandle {
    void* mcBasePtr;
} ncclMultimemHandle_t;

typedef struct ncclDevComm ncclDevComm_t;
typedef struct ncclDevCommRequirements ncclDevCommRequirements_t;
typedef struct ncclDevResourceRequirements ncclDevResourceRequirements_t;
typedef struct ncclLsaBarrierHandle ncclLsaBarrierHandle_t;
typedef struct ncclGinBarrierHandle ncclGinBarrierHandle_t;
typedef struct ncclLLA2AHandle ncclLLA2AHandle_t;
typedef struct ncclGinInboxA2AHandle ncclGinInboxA2AHandle_t;
typedef struct ncclGinOutboxHandle ncclGinOutboxHandle_t;
typedef uint32_t ncclCftLeId;
typedef enum {
    NCCL_CFT_TEAM_FLAT,
    NCCL_CFT_TEAM_HIER_MULTIMEM,
    NCCL_CFT_TEAM_HIER_LSA
} ncclCftTeamMode_t;

typedef struct ncclCommProperties {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int rank;
    int nRanks;
    int cudaDev;
    int nvmlDev;
    uint8_t deviceApiSupport;
    uint8_t multimemSupport;
    int ginType;
    int nLsaTeams;
    uint8_t hostRmaSupport;
    int railedGinType;
    uint64_t commHash;
    int ginMinStride;
    int ginConnectionType;
    uint8_t ginSupport[64];
    size_t devCommRuntimeVersionSize;
} ncclCommProperties_t;

#define NCCL_COMM_PROPERTIES_INITIALIZER \
    { .size = sizeof(ncclCommProperties_t), .magic = NCCL_API_MAGIC, .version = NCCL_VERSION_CODE }

/* A function and its twin. */
#define CROSSWEFT_NCCL(result, name, arguments) \
    result name arguments; \
    result p##name arguments;

/* Version and errors. */
CROSSWEFT_NCCL(ncclResult_t, ncclGetVersion, (int* version))
CROSSWEFT_NCCL(const char*, ncclGetErrorString, (ncclResult_t result))
CROSSWEFT_NCCL(const char*, ncclGetLastError, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* asyncError))
CROSSWEFT_NCCL(void, ncclResetDebugInit, (void))
CROSSWEFT_NCCL(ncclResult_t, ncclSetEncryption, (const ncclEncryptionConfig_t* config))

/* Communicators. */
CROSSWEFT_NCCL(ncclResult_t, ncclGetUniqueId, (ncclUniqueId* uniqueId))
CROSSWEFT_NCCL(ncclResult_t, ncclCommInitRank, (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank))
CROSSWEFT_NCCL(ncclResult_t, ncclCommInitRankConfig,
    (ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclCommInitRankScalable,
    (ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds, ncclConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclCommInitAll, (ncclComm_t* comm, int ndev, const int* devlist))
CROSSWEFT_NCCL(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclResult_t, ncclCommAbort, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int revokeFlags))
CROSSWEFT_NCCL(ncclResult_t, ncclCommSplit,
    (ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclCommShrink,
    (ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, ncclConfig_t* config,
        int shrinkFlags))
CROSSWEFT_NCCL(ncclResult_t, ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId* uniqueId))
CROSSWEFT_NCCL(ncclResult_t, ncclCommGrow,
    (ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank, ncclComm_t* newcomm,
        ncclConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int* count))
CROSSWEFT_NCCL(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int* device))
CROSSWEFT_NCCL(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int* rank))
CROSSWEFT_NCCL(ncclResult_t, ncclCommSuspend, (ncclComm_t comm, int flags))
CROSSWEFT_NCCL(ncclResult_t, ncclCommResume, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclResult_t, ncclCommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value))

/* Memory. */
CROSSWEFT_NCCL(ncclResult_t, ncclMemAlloc, (void** ptr, size_t size))
CROSSWEFT_NCCL(ncclResult_t, ncclMemFree, (void* ptr))
CROSSWEFT_NCCL(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void* buff, size_t size, void** handle))
CROSSWEFT_NCCL(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void* handle))
CROSSWEFT_NCCL(ncclResult_t, ncclCommWindowRegister,
    (ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags))
CROSSWEFT_NCCL(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t win))
CROSSWEFT_NCCL(ncclResult_t, ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t win, void** outUserPtr))

/* Operations of one's own. */
CROSSWEFT_NCCL(ncclResult_t, ncclRedOpCreatePreMulSum,
    (ncclRedOp_t* op, void* scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm))
CROSSWEFT_NCCL(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))

/* Collectives. */
CROSSWEFT_NCCL(ncclResult_t, ncclAllReduce,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
        cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclReduce,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root,
        ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclReduceScatter,
    (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op,
        ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclBcast,
    (void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclBroadcast,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
        cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclAllGather,
    (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm,
        cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclAlltoAll,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
        cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclGather,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
        cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclScatter,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
        cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclAllReduceConfig,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
        cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclReduceConfig,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root,
        ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclReduceScatterConfig,
    (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op,
        ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclBroadcastConfig,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
        cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclAllGatherConfig,
    (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm,
        cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclAlltoAllConfig,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
        cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclGatherConfig,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
        cudaStream_t stream, const ncclCollConfig_t* config))
CROSSWEFT_NCCL(ncclResult_t, ncclScatterConfig,
    (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
        cudaStream_t stream, const ncclCollConfig_t* config))

/* Point to point, and one-sided. */
CROSSWEFT_NCCL(ncclResult_t, ncclSend,
    (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclRecv,
    (void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclPutSignal,
    (const void* localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin,
        size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclSignal,
    (int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream))
CROSSWEFT_NCCL(ncclResult_t, ncclWaitSignal,
    (int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm, cudaStream_t stream))

/* Groups. */
CROSSWEFT_NCCL(ncclResult_t, ncclGroupStart, (void))
CROSSWEFT_NCCL(ncclResult_t, ncclGroupEnd, (void))
CROSSWEFT_NCCL(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t* simInfo))

/* Parameters. */
CROSSWEFT_NCCL(ncclResult_t, ncclParamBind, (ncclParamHandle_t* out, const char* key))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetI8, (ncclParamHandle_t handle, int8_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetI16, (ncclParamHandle_t handle, int16_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetI32, (ncclParamHandle_t handle, int32_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetI64, (ncclParamHandle_t handle, int64_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetU8, (ncclParamHandle_t handle, uint8_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetU16, (ncclParamHandle_t handle, uint16_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetU32, (ncclParamHandle_t handle, uint32_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetU64, (ncclParamHandle_t handle, uint64_t* out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetStr, (ncclParamHandle_t handle, const char** out))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGet, (ncclParamHandle_t handle, void* out, int maxLen, int* len))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetParameter, (const char* key, const char** value, int* valueLen))
CROSSWEFT_NCCL(ncclResult_t, ncclParamGetAllParameterKeys, (const char*** table, int* tableLen))
CROSSWEFT_NCCL(void, ncclParamDumpAll, (void))

/* Of the device interface. */
CROSSWEFT_NCCL(ncclResult_t, ncclCommQueryProperties, (ncclComm_t comm, ncclCommProperties_t* props))
CROSSWEFT_NCCL(ncclResult_t, ncclDevCommCreate,
    (ncclComm_t comm, const ncclDevCommRequirements_t* reqs, ncclDevComm_t* outDevComm))
CROSSWEFT_NCCL(ncclResult_t, ncclDevCommDestroy, (ncclComm_t comm, const ncclDevComm_t* devComm))
CROSSWEFT_NCCL(ncclResult_t, ncclGetLsaDevicePointer,
    (ncclWindow_t window, size_t offset, int lsaRank, void** outPtr))
CROSSWEFT_NCCL(ncclResult_t, ncclGetPeerDevicePointer,
    (ncclWindow_t window, size_t offset, int peer, void** outPtr))
CROSSWEFT_NCCL(ncclResult_t, ncclGetLsaMultimemDevicePointer, (ncclWindow_t window, size_t offset, void** outPtr))
CROSSWEFT_NCCL(ncclResult_t, ncclGetMultimemDevicePointer,
    (ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem, void** outPtr))
CROSSWEFT_NCCL(ncclResult_t, ncclGetMultimemDeviceLeInfo,
    (ncclWindow_t window, size_t offset, ncclCftLeId* leId, size_t* leOffset))
CROSSWEFT_NCCL(ncclResult_t, ncclGetCftDeviceLeInfo,
    (ncclWindow_t window, size_t offset, int peerCft, ncclTeam_t cftTeam, ncclCftLeId* leId, size_t* leOffset))
CROSSWEFT_NCCL(ncclResult_t, ncclGetPeerDeviceLeInfo,
    (ncclWindow_t window, size_t offset, int peerWorld, ncclCftLeId* leId, size_t* leOffset))
CROSSWEFT_NCCL(ncclTeam_t, ncclTeamWorld, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclTeam_t, ncclTeamLsa, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclTeam_t, ncclTeamRail, (ncclComm_t comm))
CROSSWEFT_NCCL(ncclTeam_t, ncclTeamCft, (ncclComm_t comm, ncclCftTeamMode_t mode))
CROSSWEFT_NCCL(ncclTeam_t, ncclTeamCftMultimem, (ncclComm_t comm))
CROSSWEFT_NCCL(int, ncclTeamRankToWorld, (ncclComm_t comm, ncclTeam_t team, int rank))
CROSSWEFT_NCCL(int, ncclTeamRankToLsa, (ncclComm_t comm, ncclTeam_t team, int rank))
CROSSWEFT_NCCL(ncclResult_t, ncclLsaBarrierCreateRequirement,
    (ncclTeam_t team, int nBarriers, ncclLsaBarrierHandle_t* outHandle, ncclDevResourceRequirements_t* outReq))
CROSSWEFT_NCCL(ncclResult_t, ncclGinBarrierCreateRequirement,
    (ncclComm_t comm, ncclTeam_t team, int nBarriers, ncclGinBarrierHandle_t* outHandle,
        ncclDevResourceRequirements_t* outReq))
CROSSWEFT_NCCL(int, ncclLLA2ACalcSlots, (int maxElts, int maxEltSize))
CROSSWEFT_NCCL(ncclResult_t, ncclLLA2ACreateRequirement,
    (int nBlocks, int nSlots, ncclLLA2AHandle_t* outHandle, ncclDevResourceRequirements_t* outReq))
CROSSWEFT_NCCL(ncclResult_t, ncclGinInboxA2ACreateRequirement,
    (ncclTeam_t peers, int nBlocks, int size_log2, ncclGinInboxA2AHandle_t* outHandle,
        ncclDevResourceRequirements_t* outReq))
CROSSWEFT_NCCL(ncclResult_t, ncclGinOutboxCreateRequirement,
    (int nBlocks, int size_log2, ncclGinOutboxHandle_t* outHandle, ncclDevResourceRequirements_t* outReq))

#undef CROSSWEFT_NCCL

#ifdef __cplusplus
}
#endif

#endif
