/* A library with some of NCCL's functions, which counts what it is called for. Its all-reduce fills the output with 77, its
   reduce-scatter is refused, and its other functions are not there. */
#include <crossweft/nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ncclComm {
    int rank, polls;
};

atomic_int other_all_reduces, other_destroyed, other_aborted;
static struct ncclComm comms[64];
static atomic_int made;
static char last[128];

static ncclResult_t refuse(const char* why) {
    snprintf(last, sizeof last, "%s", why);
    return ncclInvalidArgument;
}

ncclResult_t ncclGetVersion(int* version) {
    *version = 22907;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "fine" : "not fine";
}

const char* ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return last;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0x5a, sizeof *id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int count, ncclUniqueId id, int rank, ncclConfig_t* config) {
    ncclUniqueId expected;
    memset(&expected, 0x5a, sizeof expected);
    if (memcmp(&id, &expected, sizeof id) || count != 2 || rank < 0 || rank > 1) return refuse("wrong id or ranks");
    if (config->magic != NCCL_API_MAGIC || config->blocking != 0) return refuse("wrong configuration");
    if (strcmp(config->commName, "delegated by crossweft")) return refuse("wrong name");
    const char* refused = getenv("OTHER_NCCL_REFUSES");
    if (refused && atoi(refused) == rank) return refuse("no such device");
    *comm = &comms[made++ % 64];
    /* The others wait for one that is refused. */
    **comm = (struct ncclComm){rank, refused ? 1 << 30 : 3};
    return ncclInProgress;
}

/* What is asked for is ready at the fourth look. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    *state = comm->polls-- > 0 ? ncclInProgress : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    (void)comm;
    other_destroyed++;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    (void)comm;
    other_aborted++;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    if (!send || type != ncclFloat32 || op != ncclMax || (size_t)stream != 0x5717) return refuse("wrong all-reduce");
    for (size_t i = 0; i < count; i++) ((float*)recv)[i] = 77;
    other_all_reduces++;
    comm->polls = 3;
    return ncclInProgress;
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    (void)send, (void)recv, (void)count, (void)type, (void)op, (void)comm, (void)stream;
    return refuse("no scattering here");
}
