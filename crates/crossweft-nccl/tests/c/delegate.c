/* Calls of which CROSSWEFT_NCCL_DELEGATE gives some to other_nccl.c. */
#include "harness.h"

#include <dlfcn.h>

#define STREAM ((cudaStream_t)0x5717)

static ncclComm_t join(struct rank* r) {
    ncclComm_t comm = NULL;
    OK(ncclCommInitRank(&comm, r->ranks, r->id, r->rank));
    return comm;
}

static int count_of(const char* name) {
    void* other = dlopen(getenv("CROSSWEFT_NCCL_LIB"), RTLD_NOW | RTLD_NOLOAD);
    CHECK(other);
    int* count = dlsym(other, name);
    CHECK(count);
    return *count;
}

static uint64_t delegated(void) {
    ncclParamHandle_t handle;
    uint64_t count;
    OK(ncclParamBind(&handle, "CROSSWEFT_NCCL_DELEGATED"));
    OK(ncclParamGetU64(handle, &count));
    return count;
}

/* Rules: all-reduce:1K- */
static pthread_barrier_t both;

static void sizes_main(struct rank* r) {
    ncclComm_t comm = join(r);
    static float in[2][1024], out[2][1024];
    float *from = in[r->rank], *to = out[r->rank];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 1024; i++) from[i] = (float)(r->rank + round), to[i] = -1;
        OK(ncclAllReduce(from, to, 255, ncclFloat32, ncclMax, comm, STREAM));
        CHECK(to[0] == (float)(1 + round) && to[254] == (float)(1 + round) && to[255] == -1);
        OK(ncclAllReduce(from, to, 256, ncclFloat32, ncclMax, comm, STREAM));
        CHECK(to[0] == 77 && to[255] == 77 && to[256] == -1);
        OK(ncclAllReduce(to, to, 1024, ncclFloat32, ncclMax, comm, STREAM));
        CHECK(to[1023] == 77);
        OK(ncclAllGather(from, to, 512, ncclFloat32, comm, STREAM));
        CHECK(to[0] == (float)round && to[512] == (float)(round + 1));
    }
    /* How long the other library takes is not known. */
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    for (int n = 255; n <= 256; n++) {
        OK(ncclGroupStart());
        OK(ncclAllReduce(from, to, (size_t)n, ncclFloat32, ncclMax, comm, STREAM));
        if (n == 255) OK(ncclGroupSimulateEnd(&info));
        else SAYS(ncclInvalidUsage, "delegated", ncclGroupSimulateEnd(&info));
    }
    pthread_barrier_wait(&both);
    CHECK(delegated() == 12);
    CHECK(count_of("other_all_reduces") == 12);
    pthread_barrier_wait(&both);
    OK(ncclCommDestroy(comm));
}

static void sizes(void) {
    pthread_barrier_init(&both, NULL, 2);
    in_threads(2, sizes_main);
    CHECK(delegated() == 0);
    CHECK(count_of("other_destroyed") == 2 && count_of("other_aborted") == 0);
}

/* Rules: reduce-scatter */
static void refused_main(struct rank* r) {
    ncclComm_t comm = join(r);
    float from[2] = {1, 2}, to;
    ncclResult_t result = ncclReduceScatter(from, &to, 1, ncclFloat32, ncclSum, comm, STREAM);
    if (result == ncclInvalidArgument) CHECK(strstr(ncclGetLastError(comm), "ncclReduceScatter of"));
    /* The other rank may have been told first. */
    else CHECK(result == ncclRemoteError);
    CHECK(strstr(ncclGetLastError(comm), "no scattering here"));
    CHECK(ncclAllReduce(from, &to, 1, ncclFloat32, ncclSum, comm, STREAM) != ncclSuccess);
    OK(ncclCommDestroy(comm));
}

static void refused(void) {
    in_threads(2, refused_main);
    CHECK(count_of("other_destroyed") == 0 && count_of("other_aborted") == 2);
}

/* A communicator cannot be made, for the reason in the first argument. */
static ncclResult_t expected;
static const char* reason;

static void declined_main(struct rank* r) {
    ncclComm_t comm;
    SAYS(expected, reason, ncclCommInitRank(&comm, r->ranks, r->id, r->rank));
    CHECK(comm == NULL);
}

static void declined(void) {
    expected = ncclInvalidUsage;
    reason = getenv("DECLINED_REASON");
    in_threads(2, declined_main);
}

/* The other library takes one rank and not the other. */
static void one_refused_main(struct rank* r) {
    ncclComm_t comm;
    double start = now();
    SAYS(r->rank == 1 ? ncclInvalidArgument : ncclRemoteError, "no such device",
        ncclCommInitRank(&comm, r->ranks, r->id, r->rank));
    /* Ranks wait for 600 s otherwise. */
    CHECK(comm == NULL && now() - start < 100);
}

static void one_refused(void) { in_threads(2, one_refused_main); }

/* Ranks with other rules. */
static void differ_main(struct rank* r) {
    ncclComm_t comm;
    setenv("CROSSWEFT_NCCL_DELEGATE", r->rank ? "all-reduce:1M-" : "all-reduce", 1);
    SAYS(ncclInvalidUsage, r->rank ? "rank 0 says NCCL version 23007, all-reduce delegated" : "all-reduce:1048576- delegated",
        ncclCommInitRank(&comm, r->ranks, r->id, r->rank));
}

static void differ(void) { in_processes(2, -1, differ_main); }

int main(int argc, char** argv) {
    CHECK(argc == 2);
    if (!strcmp(argv[1], "sizes")) sizes();
    else if (!strcmp(argv[1], "refused")) refused();
    else if (!strcmp(argv[1], "declined")) declined();
    else if (!strcmp(argv[1], "one_refused")) one_refused();
    else if (!strcmp(argv[1], "differ")) differ();
    else return 2;
    return 0;
}
