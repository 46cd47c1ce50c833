/* Every function of the C interface on host memory: results, error codes, in place, groups, faults.
 *
 * conformance CASE runs one case; conformance without an argument lists them. */
#include "harness.h"

#include <math.h>
#include <sys/mman.h>

/* ---- layouts, as NCCL's header has them on 64 bits ---- */

#define AT(structure, field, offset) \
    _Static_assert(offsetof(structure, field) == (offset), #structure "." #field)
_Static_assert(sizeof(ncclUniqueId) == 128, "ncclUniqueId");
_Static_assert(sizeof(ncclConfig_t) == 120, "ncclConfig_t");
AT(ncclConfig_t, magic, 8);
AT(ncclConfig_t, version, 12);
AT(ncclConfig_t, blocking, 16);
AT(ncclConfig_t, cgaClusterSize, 20);
AT(ncclConfig_t, minCTAs, 24);
AT(ncclConfig_t, maxCTAs, 28);
AT(ncclConfig_t, netName, 32);
AT(ncclConfig_t, splitShare, 40);
AT(ncclConfig_t, trafficClass, 44);
AT(ncclConfig_t, commName, 48);
AT(ncclConfig_t, collnetEnable, 56);
AT(ncclConfig_t, CTAPolicy, 60);
AT(ncclConfig_t, shrinkShare, 64);
AT(ncclConfig_t, nvlsCTAs, 68);
AT(ncclConfig_t, nChannelsPerNetPeer, 72);
AT(ncclConfig_t, nvlinkCentricSched, 76);
AT(ncclConfig_t, graphUsageMode, 80);
AT(ncclConfig_t, numRmaCtx, 84);
AT(ncclConfig_t, maxP2pPeers, 88);
AT(ncclConfig_t, graphStreamOrdering, 92);
AT(ncclConfig_t, launchOrderImplicit, 96);
AT(ncclConfig_t, numRmaSig, 100);
AT(ncclConfig_t, rmaEagerInit, 104);
AT(ncclConfig_t, hostCftMode, 108);
AT(ncclConfig_t, nvlsHostMode, 112);
_Static_assert(sizeof(ncclCollConfig_t) == 72, "ncclCollConfig_t");
AT(ncclCollConfig_t, ext, 16);
AT(ncclCollConfig_t, minCTAs, 24);
AT(ncclCollConfig_t, algSelection, 40);
AT(ncclCollConfig_t, forceAlgSelection, 48);
AT(ncclCollConfig_t, CTAPolicy, 52);
AT(ncclCollConfig_t, userProfilerTag, 56);
AT(ncclCollConfig_t, launchCompletionEvent, 64);
_Static_assert(sizeof(ncclSimInfo_t) == 24, "ncclSimInfo_t");
AT(ncclSimInfo_t, estimatedTime, 16);
_Static_assert(sizeof(ncclWaitSignalDesc_t) == 16, "ncclWaitSignalDesc_t");
_Static_assert(sizeof(ncclTeam_t) == 12, "ncclTeam_t");
_Static_assert(sizeof(ncclCommProperties_t) == 144, "ncclCommProperties_t");
AT(ncclCommProperties_t, deviceApiSupport, 32);
AT(ncclCommProperties_t, ginType, 36);
AT(ncclCommProperties_t, nLsaTeams, 40);
AT(ncclCommProperties_t, hostRmaSupport, 44);
AT(ncclCommProperties_t, railedGinType, 48);
AT(ncclCommProperties_t, commHash, 56);
_Static_assert(NCCL_VERSION_CODE == 23203 && NCCL_VERSION(2, 8, 3) == 2803, "versions");

static int entries(const char* folder) {
    char command[64], line[32];
    snprintf(command, sizeof command, "ls %s/%d/%s | wc -l", "/proc", getpid(), folder);
    FILE* pipe = popen(command, "r");
    CHECK(pipe && fgets(line, sizeof line, pipe));
    pclose(pipe);
    return atoi(line);
}

/* Threads that see connections off may take a moment. */
static void settles(const char* folder, int expected) {
    int found = -1;
    for (double start = now(); found != expected && now() - start < 20; pause_ms(50)) found = entries(folder);
    if (found != expected) FAIL("%s: %d at the beginning, then %d", folder, expected, found);
}

static ncclComm_t join(struct rank* r) {
    ncclComm_t comm = NULL;
    OK(ncclCommInitRank(&comm, r->ranks, r->id, r->rank));
    CHECK(comm != NULL);
    return comm;
}

/* ---- the shortest way through ---- */

static void sum_main(struct rank* r) {
    ncclComm_t comm = join(r);
    int count = 0, rank = -1;
    OK(ncclCommCount(comm, &count));
    OK(ncclCommUserRank(comm, &rank));
    CHECK(count == r->ranks && rank == r->rank);
    static const size_t sizes[] = {1, 5, 1000, 3000000, 7};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t n = sizes[s];
        float* data = malloc(n * sizeof *data);
        float* sum = malloc(n * sizeof *sum);
        for (size_t i = 0; i < n; i++) data[i] = (float)(i % 100 + (size_t)r->rank);
        OK(ncclAllReduce(data, sum, n, ncclFloat32, ncclSum, comm, NULL));
        for (size_t i = 0; i < n; i++) {
            int expected = (int)(i % 100) * r->ranks + r->ranks * (r->ranks - 1) / 2;
            if (sum[i] != (float)expected) FAIL("rank %d of %d, element %zu of %zu: %f, expected %d", r->rank, r->ranks, i, n, sum[i], expected);
        }
        free(data);
        free(sum);
    }
    OK(ncclCommDestroy(comm));
}

static void threads_sum(void) { in_threads(2, sum_main); }
static void processes_sum(void) { in_processes(2, -1, sum_main); }


/* ---- collectives, types and operations ---- */

static const size_t type_size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* A number that every type has exactly, as do all sums and products of the tests' few ranks. */
static void put(void* buffer, size_t i, ncclDataType_t type, int value) {
    switch (type) {
    case ncclInt8: ((int8_t*)buffer)[i] = (int8_t)value; break;
    case ncclUint8: ((uint8_t*)buffer)[i] = (uint8_t)value; break;
    case ncclInt32: ((int32_t*)buffer)[i] = value; break;
    case ncclUint32: ((uint32_t*)buffer)[i] = (uint32_t)value; break;
    case ncclInt64: ((int64_t*)buffer)[i] = value; break;
    case ncclUint64: ((uint64_t*)buffer)[i] = (uint64_t)value; break;
    case ncclFloat32: ((float*)buffer)[i] = (float)value; break;
    case ncclFloat64: ((double*)buffer)[i] = value; break;
    default: {
        /* Small floats: exponent and mantissa of a small whole number. */
        int bits = type == ncclFloat16 ? 10 : type == ncclBfloat16 ? 7 : type == ncclFloat8e4m3 ? 3 : 2;
        int bias = type == ncclFloat16 ? 15 : type == ncclBfloat16 ? 127 : type == ncclFloat8e4m3 ? 7 : 15;
        unsigned word = 0;
        if (value) {
            int exponent = 0;
            while (value >> (exponent + 1)) exponent++;
            unsigned fraction = (unsigned)value - (1u << exponent);
            CHECK(exponent <= bits || fraction % (1u << (exponent - bits)) == 0);
            fraction = exponent <= bits ? fraction << (bits - exponent) : fraction >> (exponent - bits);
            word = (unsigned)(exponent + bias) << bits | fraction;
        }
        if (type_size[type] == 2) ((uint16_t*)buffer)[i] = (uint16_t)word;
        else ((uint8_t*)buffer)[i] = (uint8_t)word;
    }
    }
}

/* What rank `rank` has at `i`: 1 or 2, so that sums of up to 4 ranks fit every type. */
static int input_of(int rank, size_t i) { return 1 + (int)((i + (size_t)rank) % 2); }

static int reduced(ncclRedOp_t op, int ranks, size_t i) {
    int result = input_of(0, i);
    for (int r = 1; r < ranks; r++) {
        int x = input_of(r, i);
        if (op == ncclSum || op == ncclAvg) result += x;
        else if (op == ncclProd) result *= x;
        else if (op == ncclMax) result = x > result ? x : result;
        else result = x < result ? x : result;
    }
    return result;
}

static void expect(const char* what, const void* got, const void* expected, size_t bytes, int rank) {
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t*)got)[i] != ((const uint8_t*)expected)[i])
            FAIL("%s: rank %d, byte %zu of %zu: %02x, expected %02x", what, rank, i, bytes,
                ((const uint8_t*)got)[i], ((const uint8_t*)expected)[i]);
}

/* Room for the largest of the collectives, with a border that nobody may touch. */
struct room {
    uint8_t *send, *recv, *expected;
    size_t bytes;
};

static struct room room(size_t bytes) {
    struct room r = {malloc(bytes + 64), malloc(bytes + 64), malloc(bytes + 64), bytes};
    CHECK(r.send && r.recv && r.expected);
    memset(r.send, 0xa5, bytes + 64);
    memset(r.recv, 0xa5, bytes + 64);
    memset(r.expected, 0xa5, bytes + 64);
    return r;
}

static void leave_room(struct room* r, const char* what, int rank) {
    expect(what, r->recv, r->expected, r->bytes + 64, rank);
    free(r->send);
    free(r->recv);
    free(r->expected);
}

static void all_types_main(struct rank* r) {
    ncclComm_t comm = join(r);
    size_t n = 37;
    for (int t = 0; t < ncclNumTypes; t++)
        for (int op = ncclSum; op <= ncclMin; op++) {
            ncclDataType_t type = (ncclDataType_t)t;
            struct room m = room(n * type_size[t] * (size_t)r->ranks);
            for (size_t i = 0; i < n; i++) {
                put(m.send, i, type, input_of(r->rank, i));
                put(m.expected, i, type, reduced((ncclRedOp_t)op, r->ranks, i));
            }
            OK(ncclAllReduce(m.send, m.recv, n, type, (ncclRedOp_t)op, comm, NULL));
            leave_room(&m, "all-reduce", r->rank);

            m = room(n * type_size[t] * (size_t)r->ranks);
            for (size_t i = 0; i < n * (size_t)r->ranks; i++) put(m.send, i, type, input_of(r->rank, i));
            for (size_t i = 0; i < n; i++)
                put(m.expected, i, type, reduced((ncclRedOp_t)op, r->ranks, i + n * (size_t)r->rank));
            OK(ncclReduceScatter(m.send, m.recv, n, type, (ncclRedOp_t)op, comm, NULL));
            leave_room(&m, "reduce-scatter", r->rank);

            m = room(n * type_size[t]);
            for (size_t i = 0; i < n; i++) {
                put(m.send, i, type, input_of(r->rank, i));
                if (r->rank == 1) put(m.expected, i, type, reduced((ncclRedOp_t)op, r->ranks, i));
            }
            OK(ncclReduce(m.send, r->rank == 1 ? m.recv : NULL, n, type, (ncclRedOp_t)op, 1, comm, NULL));
            leave_room(&m, "reduce", r->rank);
        }
    /* The mean: of integers without the fraction. */
    int32_t whole[2] = {r->rank, -r->rank}, mean[2];
    OK(ncclAllReduce(whole, mean, 2, ncclInt32, ncclAvg, comm, NULL));
    int sum = r->ranks * (r->ranks - 1) / 2;
    CHECK(mean[0] == sum / r->ranks && mean[1] == -sum / r->ranks);
    double real = r->rank, real_mean;
    OK(ncclAllReduce(&real, &real_mean, 1, ncclFloat64, ncclAvg, comm, NULL));
    CHECK(fabs(real_mean - (double)sum / r->ranks) < 1e-15);
    OK(ncclCommDestroy(comm));
}

/* What rank `rank` has at byte `i`, and no other has there. */
static uint8_t byte_of(int rank, size_t i) { return (uint8_t)(i * 7 + i / 251 + (size_t)rank * 61); }

static void fill(uint8_t* at, int rank, size_t from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) at[i] = byte_of(rank, from + i);
}

static void moves(struct rank* r, ncclComm_t comm, size_t n) {
    size_t all = n * (size_t)r->ranks, own = n * (size_t)r->rank;
    struct room m = room(all);
    fill(m.send, r->rank, 0, n);
    for (int q = 0; q < r->ranks; q++) fill(m.expected + n * (size_t)q, q, 0, n);
    OK(ncclAllGather(m.send, m.recv, n, ncclInt8, comm, NULL));
    leave_room(&m, "all-gather", r->rank);

    m = room(all);
    fill(m.recv + own, r->rank, 0, n);
    for (int q = 0; q < r->ranks; q++) fill(m.expected + n * (size_t)q, q, 0, n);
    OK(ncclAllGather(m.recv + own, m.recv, n, ncclInt8, comm, NULL));
    leave_room(&m, "all-gather in place", r->rank);

    m = room(all);
    fill(m.send, r->rank, 0, all);
    for (int q = 0; q < r->ranks; q++) fill(m.expected + n * (size_t)q, q, own, n);
    OK(ncclAlltoAll(m.send, m.recv, n, ncclUint8, comm, NULL));
    leave_room(&m, "all-to-all", r->rank);

    m = room(all);
    fill(m.recv, r->rank, 0, all);
    for (int q = 0; q < r->ranks; q++) fill(m.expected + n * (size_t)q, q, own, n);
    OK(ncclAlltoAll(m.recv, m.recv, n, ncclUint8, comm, NULL));
    leave_room(&m, "all-to-all in place", r->rank);

    for (int root = 0; root < r->ranks; root++) {
        int is_root = r->rank == root;
        m = room(n);
        fill(m.send, r->rank, 0, n);
        fill(m.expected, root, 0, n);
        OK(ncclBroadcast(is_root ? m.send : NULL, m.recv, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "broadcast", r->rank);

        m = room(n);
        if (is_root) fill(m.recv, root, 0, n);
        fill(m.expected, root, 0, n);
        OK(ncclBcast(m.recv, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "bcast", r->rank);

        m = room(n);
        fill(m.recv, r->rank, 0, n);
        fill(m.expected, root, 0, n);
        OK(ncclBroadcast(m.recv, m.recv, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "broadcast in place", r->rank);

        m = room(all);
        fill(m.send, r->rank, 0, n);
        if (is_root) for (int q = 0; q < r->ranks; q++) fill(m.expected + n * (size_t)q, q, 0, n);
        OK(ncclGather(m.send, is_root ? m.recv : NULL, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "gather", r->rank);

        m = room(all);
        fill(m.recv + own, r->rank, 0, n);
        fill(m.expected + own, r->rank, 0, n);
        if (is_root) for (int q = 0; q < r->ranks; q++) fill(m.expected + n * (size_t)q, q, 0, n);
        OK(ncclGather(m.recv + own, m.recv, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "gather in place", r->rank);

        m = room(n);
        uint8_t* blocks = malloc(all);
        fill(blocks, root, 0, all);
        fill(m.expected, root, own, n);
        OK(ncclScatter(is_root ? blocks : NULL, m.recv, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "scatter", r->rank);
        free(blocks);

        m = room(all);
        fill(m.recv, root, 0, is_root ? all : 0);
        fill(m.expected, root, 0, is_root ? all : 0);
        fill(m.expected + own, root, own, n);
        OK(ncclScatter(m.recv, m.recv + own, n, ncclUint8, root, comm, NULL));
        leave_room(&m, "scatter in place", r->rank);

        m = room(n * 4);
        for (size_t i = 0; i < n; i++) {
            put(m.recv, i, ncclFloat32, input_of(r->rank, i));
            put(m.expected, i, ncclFloat32, is_root ? reduced(ncclSum, r->ranks, i) : input_of(r->rank, i));
        }
        OK(ncclReduce(m.recv, m.recv, n, ncclFloat32, ncclSum, root, comm, NULL));
        leave_room(&m, "reduce in place", r->rank);
    }

    m = room(n * 4);
    for (size_t i = 0; i < n; i++) {
        put(m.recv, i, ncclFloat32, input_of(r->rank, i));
        put(m.expected, i, ncclFloat32, reduced(ncclSum, r->ranks, i));
    }
    OK(ncclAllReduce(m.recv, m.recv, n, ncclFloat32, ncclSum, comm, NULL));
    leave_room(&m, "all-reduce in place", r->rank);

    /* In place, a reduce-scatter may use the rest of its input as it likes. */
    uint8_t* in = malloc(all * 4);
    for (size_t i = 0; i < all; i++) put(in, i, ncclFloat32, input_of(r->rank, i));
    OK(ncclReduceScatter(in, in + own * 4, n, ncclFloat32, ncclSum, comm, NULL));
    uint8_t* expected = malloc(n * 4);
    for (size_t i = 0; i < n; i++) put(expected, i, ncclFloat32, reduced(ncclSum, r->ranks, i + own));
    expect("reduce-scatter in place", in + own * 4, expected, n * 4, r->rank);
    free(in);
    free(expected);
}

static void moves_main(struct rank* r) {
    ncclComm_t comm = join(r);
    static const size_t sizes[] = {1, 13, 512, 4099, 100000, 1500000, 3};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) moves(r, comm, sizes[s]);
    OK(ncclCommDestroy(comm));
}

/* Elements that are not at multiples of their size. */
static void unaligned_main(struct rank* r) {
    ncclComm_t comm = join(r);
    uint8_t in[4 * 100 + 1], out[4 * 100 + 3];
    for (int i = 0; i < 100; i++) {
        float x = (float)(i + r->rank);
        memcpy(in + 1 + 4 * i, &x, 4);
    }
    OK(ncclAllReduce(in + 1, out + 3, 100, ncclFloat32, ncclSum, comm, NULL));
    for (int i = 0; i < 100; i++) {
        float x;
        memcpy(&x, out + 3 + 4 * i, 4);
        CHECK(x == (float)(2 * i + 1));
    }
    OK(ncclCommDestroy(comm));
}

static void config_calls_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.userProfilerTag = 7;
    float x = (float)r->rank + 1, in[8] = {0}, out[8];
    int n = r->ranks;
    for (int i = 0; i < n; i++) in[i] = x * 10 + (float)i;
    OK(ncclAllReduceConfig(&x, out, 1, ncclFloat32, ncclSum, comm, NULL, &config));
    CHECK(out[0] == 3);
    OK(ncclReduceConfig(&x, out, 1, ncclFloat32, ncclMax, 0, comm, NULL, NULL));
    if (r->rank == 0) CHECK(out[0] == 2);
    OK(ncclReduceScatterConfig(in, out, 1, ncclFloat32, ncclSum, comm, NULL, &config));
    CHECK(out[0] == (float)(30 + 2 * r->rank));
    OK(ncclBroadcastConfig(&x, out, 1, ncclFloat32, 1, comm, NULL, &config));
    CHECK(out[0] == 2);
    OK(ncclAllGatherConfig(&x, out, 1, ncclFloat32, comm, NULL, &config));
    CHECK(out[0] == 1 && out[1] == 2);
    OK(ncclAlltoAllConfig(in, out, 1, ncclFloat32, comm, NULL, &config));
    CHECK(out[0] == (float)(10 + r->rank) && out[1] == (float)(20 + r->rank));
    OK(ncclGatherConfig(&x, out, 1, ncclFloat32, 1, comm, NULL, &config));
    if (r->rank == 1) CHECK(out[0] == 1 && out[1] == 2);
    OK(ncclScatterConfig(in, out, 1, ncclFloat32, 1, comm, NULL, &config));
    CHECK(out[0] == (float)(20 + r->rank));
    /* Names of NCCL's algorithms can only be a wish. */
    config.algSelection = "ring";
    SAYS(ncclInvalidUsage, "algSelection", ncclAllReduceConfig(&x, out, 1, ncclFloat32, ncclSum, comm, NULL, &config));
    config.forceAlgSelection = 0;
    OK(ncclAllReduceConfig(&x, out, 1, ncclFloat32, ncclSum, comm, NULL, &config));
    config.magic = 0;
    SAYS(ncclInvalidArgument, "NCCL_COLLCONFIG_INITIALIZER",
        ncclAllReduceConfig(&x, out, 1, ncclFloat32, ncclSum, comm, NULL, &config));
    OK(ncclCommDestroy(comm));
}

/* ---- arguments that cannot be ---- */

static void arguments_main(struct rank* r) {
    ncclComm_t comm = join(r);
    float a[4] = {1, 2, 3, 4}, b[4];
    int number;
    /* Nothing to do is not wrong, whatever the buffers are. */
    OK(ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclAllGather(NULL, NULL, 0, ncclFloat32, comm, NULL));
    OK(ncclReduceScatter(a, b, 0, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclBroadcast(a, b, 0, ncclFloat32, 0, comm, NULL));
    OK(ncclReduce(a, b, 0, ncclFloat32, ncclSum, 0, comm, NULL));
    OK(ncclGather(a, b, 0, ncclFloat32, 0, comm, NULL));
    OK(ncclScatter(a, b, 0, ncclFloat32, 0, comm, NULL));
    OK(ncclAlltoAll(a, b, 0, ncclFloat32, comm, NULL));

    SAYS(ncclInvalidArgument, "comm is NULL", ncclAllReduce(a, b, 4, ncclFloat32, ncclSum, NULL, NULL));
    SAYS(ncclInvalidArgument, "not a communicator", ncclAllReduce(a, b, 4, ncclFloat32, ncclSum, (ncclComm_t)a, NULL));
    SAYS(ncclInvalidArgument, "sendbuff is NULL", ncclAllReduce(NULL, b, 4, ncclFloat32, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "recvbuff is NULL", ncclAllReduce(a, NULL, 4, ncclFloat32, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "datatype is 12", ncclAllReduce(a, b, 4, (ncclDataType_t)12, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "datatype is -1", ncclAllReduce(a, b, 4, (ncclDataType_t)-1, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "op is 5", ncclAllReduce(a, b, 4, ncclFloat32, (ncclRedOp_t)5, comm, NULL));
    SAYS(ncclInvalidArgument, "op is -1", ncclAllReduce(a, b, 4, ncclFloat32, (ncclRedOp_t)-1, comm, NULL));
    SAYS(ncclInvalidArgument, "root is 2", ncclBroadcast(a, b, 4, ncclFloat32, 2, comm, NULL));
    SAYS(ncclInvalidArgument, "root is -1", ncclReduce(a, b, 4, ncclFloat32, ncclSum, -1, comm, NULL));
    SAYS(ncclInvalidArgument, "overlap", ncclAllReduce(a, a + 1, 3, ncclFloat32, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "count is", ncclAllReduce(a, b, SIZE_MAX / 2, ncclFloat32, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "more than can be addressed", ncclAllGather(a, b, SIZE_MAX / 8, ncclFloat32, comm, NULL));
    CHECK(strstr(ncclGetLastError(comm), "more than can be addressed"));

    IS(ncclInvalidArgument, ncclCommCount(comm, NULL));
    IS(ncclInvalidArgument, ncclCommCount(NULL, &number));
    IS(ncclInvalidArgument, ncclCommUserRank(comm, NULL));
    IS(ncclInvalidArgument, ncclCommCuDevice(comm, NULL));
    IS(ncclInvalidArgument, ncclCommGetAsyncError(comm, NULL));
    IS(ncclInvalidArgument, ncclGetVersion(NULL));
    IS(ncclInvalidArgument, ncclGetUniqueId(NULL));
    /* None of that has hurt. */
    ncclResult_t state = ncclInternalError;
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    OK(ncclAllReduce(a, b, 4, ncclFloat32, ncclSum, comm, NULL));
    CHECK(b[0] == 2 && b[3] == 8);

    OK(ncclCommDestroy(comm));
    SAYS(ncclInvalidArgument, "destroyed", ncclCommDestroy(comm));
    SAYS(ncclInvalidArgument, "destroyed", ncclCommAbort(comm));
    IS(ncclInvalidArgument, ncclCommCount(comm, &number));
    IS(ncclInvalidArgument, ncclCommGetAsyncError(comm, &state));
    OK(ncclCommDestroy(NULL));
    OK(ncclCommAbort(NULL));
    OK(ncclCommFinalize(NULL));
}

/* More than any rank can address, also of ranks whose own blocks would begin beyond that. */
static void too_much_main(struct rank* r) {
    ncclComm_t comm = join(r);
    char a[8], b[8];
    size_t count = (size_t)1 << 62;
    SAYS(ncclInvalidArgument, "more than can be addressed", ncclAllGather(a, b, count, ncclInt8, comm, NULL));
    SAYS(ncclInvalidArgument, "more than can be addressed", ncclReduceScatter(a, b, count, ncclInt8, ncclSum, comm, NULL));
    SAYS(ncclInvalidArgument, "more than can be addressed", ncclGather(a, b, count, ncclInt8, 0, comm, NULL));
    int32_t x = 1, y = 0;
    OK(ncclAllReduce(&x, &y, 1, ncclInt32, ncclSum, comm, NULL));
    CHECK(y == r->ranks);
    OK(ncclCommDestroy(comm));
}

static void init_arguments(void) {
    ncclUniqueId id, bad;
    ncclComm_t comm = (ncclComm_t)&id;
    OK(ncclGetUniqueId(&id));
    SAYS(ncclInvalidArgument, "rank 2 of 2", ncclCommInitRank(&comm, 2, id, 2));
    SAYS(ncclInvalidArgument, "nranks is 0", ncclCommInitRank(&comm, 0, id, 0));
    SAYS(ncclInvalidArgument, "rank -1 of 2", ncclCommInitRank(&comm, 2, id, -1));
    SAYS(ncclInvalidArgument, "comm is NULL", ncclCommInitRank(NULL, 1, id, 0));
    memset(&bad, 7, sizeof bad);
    SAYS(ncclInvalidArgument, "unique id", ncclCommInitRank(&comm, 1, bad, 0));

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.magic = 1;
    SAYS(ncclInvalidArgument, "NCCL_CONFIG_INITIALIZER", ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    config = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    config.blocking = 2;
    SAYS(ncclInvalidArgument, "blocking is 2", ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    config.blocking = 1;
    config.minCTAs = 4;
    config.maxCTAs = 2;
    SAYS(ncclInvalidArgument, "minCTAs", ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    /* Whatever is there of an older structure counts, and nothing behind it. */
    config.maxCTAs = 8;
    config.shrinkShare = 77;
    SAYS(ncclInvalidArgument, "shrinkShare is 77", ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    config.size = 56;
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    OK(ncclCommDestroy(comm));
    OK(ncclGetUniqueId(&id));
    config.size = sizeof config;
    config.version = NCCL_VERSION(2, 26, 0);
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    OK(ncclCommDestroy(comm));
    /* And what a newer one has is left alone. */
    struct {
        ncclConfig_t known;
        int more[10];
    } newer = {NCCL_CONFIG_INITIALIZER, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}};
    newer.known.size = sizeof newer;
    newer.known.version = NCCL_VERSION(2, 40, 0);
    newer.known.commName = "newer";
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, &newer.known));
    IS(ncclInvalidArgument, ncclCommCount(comm, NULL));
    CHECK(strstr(ncclGetLastError(comm), "communicator `newer`: count is NULL"));
    OK(ncclCommDestroy(comm));

    /* A structure of any size ends where it says, and is read no further. */
    for (size_t size = 0; size <= sizeof(ncclConfig_t); size += 4) {
        ncclConfig_t* part = malloc(size < sizeof(size_t) ? sizeof(size_t) : size);
        ncclConfig_t whole = NCCL_CONFIG_INITIALIZER;
        memcpy(part, &whole, size < sizeof(size_t) ? sizeof(size_t) : size);
        part->size = size;
        OK(ncclGetUniqueId(&id));
        IS(size < 16 ? ncclInvalidArgument : ncclSuccess, ncclCommInitRankConfig(&comm, 1, id, 0, part));
        CHECK((comm != NULL) == (size >= 16));
        if (comm) OK(ncclCommDestroy(comm));
        free(part);
    }

    /* A rank that nobody else comes to find. */
    setenv("CROSSWEFT_TIMEOUT", "0.5", 1);
    OK(ncclGetUniqueId(&id));
    double start = now();
    SAYS(ncclRemoteError, "did not join", ncclCommInitRank(&comm, 2, id, 0));
    CHECK(comm == NULL && now() - start < 5);
    setenv("CROSSWEFT_TIMEOUT", "soon", 1);
    SAYS(ncclInvalidUsage, "CROSSWEFT_TIMEOUT", ncclCommInitRank(&comm, 1, id, 0));
    setenv("CROSSWEFT_TIMEOUT", "1e19", 1);
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&comm, 1, id, 0));
    OK(ncclCommDestroy(comm));
    unsetenv("CROSSWEFT_TIMEOUT");

    /* Nobody is to mistake a GPU's pointers for the host's; an id has nothing to do with either. */
    void* memory;
    unsetenv("CROSSWEFT_DEVICE");
    OK(ncclGetUniqueId(&id));
    SAYS(ncclInvalidUsage, "CROSSWEFT_DEVICE=cpu", ncclCommInitRank(&comm, 1, id, 0));
    SAYS(ncclInvalidUsage, "CROSSWEFT_DEVICE=cpu", ncclMemAlloc(&memory, 64));
    setenv("CROSSWEFT_DEVICE", "cuda", 1);
    SAYS(ncclInvalidUsage, "no GPU can be used", ncclCommInitRank(&comm, 1, id, 0));
    setenv("CROSSWEFT_DEVICE", "gpu", 1);
    SAYS(ncclInvalidUsage, "it must be cpu, cuda or auto", ncclGetUniqueId(&id));
}

static void versions(void) {
    int version = 0;
    OK(ncclGetVersion(&version));
    CHECK(version == 23007);
    setenv("CROSSWEFT_NCCL_VERSION", "22703", 1);
    OK(pncclGetVersion(&version));
    CHECK(version == 22703);
    setenv("CROSSWEFT_NCCL_VERSION", "new", 1);
    SAYS(ncclInvalidUsage, "CROSSWEFT_NCCL_VERSION", ncclGetVersion(&version));
    for (int result = -1; result <= ncclNumResults; result++) CHECK(strlen(ncclGetErrorString((ncclResult_t)result)) > 4);
    ncclResetDebugInit();
    SAYS(ncclInvalidUsage, "not supported", ncclSetEncryption(NULL));
}

/* What goes wrong is printed where that is asked for. */
static void debug_output(void) {
    int pipes[2], number, own = dup(2);
    char text[4096] = {0};
    CHECK(own >= 0 && pipe(pipes) == 0 && dup2(pipes[1], 2) == 2);
    IS(ncclInvalidArgument, ncclCommCount(NULL, &number));
    setenv("NCCL_DEBUG", "warn", 1);
    IS(ncclInvalidArgument, ncclCommUserRank(NULL, &number));
    CHECK(dup2(own, 2) == 2);
    CHECK(read(pipes[0], text, sizeof text - 1) > 0);
    CHECK(!strcmp(text, "crossweft: NCCL WARN ncclCommUserRank: comm is NULL\n"));
    /* And where nobody can read it, that is no reason to end. */
    signal(SIGPIPE, SIG_IGN);
    CHECK(close(pipes[0]) == 0 && dup2(pipes[1], 2) == 2);
    ncclResult_t result = ncclCommUserRank(NULL, &number);
    ncclParamDumpAll();
    CHECK(dup2(own, 2) == 2 && result == ncclInvalidArgument);
}

/* A thread may still call when it has no variables any more. */
static ncclResult_t last_result;

static void last_call(void* nothing) {
    int number;
    (void)nothing;
    last_result = ncclCommCount(NULL, &number);
    if (!ncclGetLastError(NULL)) last_result = ncclSuccess;
}

static void* ends(void* key) {
    int number;
    IS(ncclInvalidArgument, ncclCommCount(NULL, &number));
    CHECK(strlen(ncclGetLastError(NULL)) > 0);
    CHECK(pthread_setspecific(*(pthread_key_t*)key, key) == 0);
    return NULL;
}

static void thread_ends(void) {
    pthread_key_t key;
    pthread_t thread;
    CHECK(pthread_key_create(&key, last_call) == 0);
    CHECK(pthread_create(&thread, NULL, ends, &key) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(last_result == ncclInvalidArgument);
}

static void versions_differ(void) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    ncclComm_t comm;
    ncclUniqueId id;
    pid_t pid = fork();
    if (pid == 0) {
        setenv("CROSSWEFT_NCCL_VERSION", "22907", 1);
        CHECK(read(pipes[0], &id, sizeof id) == sizeof id);
        SAYS(ncclInvalidUsage, "NCCL version 23007", ncclCommInitRank(&comm, 2, id, 1));
        _exit(0);
    }
    OK(ncclGetUniqueId(&id));
    CHECK(write(pipes[1], &id, sizeof id) == sizeof id);
    SAYS(ncclInvalidUsage, "NCCL version 22907", ncclCommInitRank(&comm, 2, id, 0));
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* ---- one thread, several ranks ---- */

static void init_all(void) {
    enum { N = 4 };
    ncclComm_t comms[N];
    int devices[N] = {3, 1, 1, 0};
    OK(ncclCommInitAll(comms, N, devices));
    int32_t in[N][N], out[N][N];
    for (int r = 0; r < N; r++) {
        int rank, count, device;
        OK(ncclCommUserRank(comms[r], &rank));
        OK(ncclCommCount(comms[r], &count));
        OK(ncclCommCuDevice(comms[r], &device));
        CHECK(rank == r && count == N && device == devices[r]);
        for (int i = 0; i < N; i++) in[r][i] = r * 10 + i;
    }
    /* Two calls of each rank at once. */
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
        OK(ncclAllReduce(in[r], out[r], N, ncclInt32, ncclSum, comms[r], NULL));
        OK(ncclAllReduce(out[r], out[r], N, ncclInt32, ncclMax, comms[r], NULL));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < N; r++)
        for (int i = 0; i < N; i++) CHECK(out[r][i] == 60 + 4 * i);
    /* Groups in groups end with the outermost. */
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
        OK(ncclGroupStart());
        OK(ncclAlltoAll(in[r], out[r], 1, ncclInt32, comms[r], NULL));
        OK(ncclGroupEnd());
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < N; r++)
        for (int i = 0; i < N; i++) CHECK(out[r][i] == i * 10 + r);
    SAYS(ncclInvalidUsage, "without ncclGroupStart", ncclGroupEnd());
    /* A bad call is the group's, of which nothing is run. */
    out[0][0] = -1;
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) OK(ncclAllReduce(in[r], out[r], N, ncclInt32, ncclSum, comms[r], NULL));
    IS(ncclInvalidArgument, ncclAllReduce(in[0], out[0], N, (ncclDataType_t)99, ncclSum, comms[0], NULL));
    SAYS(ncclInvalidArgument, "datatype is 99", ncclGroupEnd());
    CHECK(out[0][0] == -1);
    /* Making communicators and using them are different groups. */
    ncclComm_t parts[N];
    OK(ncclGroupStart());
    OK(ncclAllReduce(in[0], out[0], N, ncclInt32, ncclSum, comms[0], NULL));
    IS(ncclInvalidUsage, ncclCommSplit(comms[0], 0, 0, &parts[0], NULL));
    SAYS(ncclInvalidUsage, "use a group for each", ncclGroupEnd());
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) OK(ncclCommSplit(comms[r], r % 2, -r, &parts[r], NULL));
    OK(ncclGroupEnd());
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
        int rank, count;
        OK(ncclCommUserRank(parts[r], &rank));
        OK(ncclCommCount(parts[r], &count));
        /* Keys turn the order round. */
        CHECK(count == 2 && rank == 1 - r / 2);
        OK(ncclAllGather(in[r], out[r], 1, ncclInt32, parts[r], NULL));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < N; r++) CHECK(out[r][0] == (r % 2 + 2) * 10 && out[r][1] == r % 2 * 10);
    for (int r = 0; r < N; r++) {
        OK(ncclCommFinalize(parts[r]));
        SAYS(ncclInvalidUsage, "finalised", ncclAllGather(in[r], out[r], 1, ncclInt32, parts[r], NULL));
        OK(ncclCommDestroy(parts[r]));
        OK(ncclCommDestroy(comms[r]));
    }
    IS(ncclInvalidArgument, ncclCommInitAll(comms, 0, NULL));
    IS(ncclInvalidArgument, ncclCommInitAll(comms, -3, NULL));
    IS(ncclInvalidArgument, ncclCommInitAll(NULL, 2, NULL));
    int none[2] = {0, -1};
    SAYS(ncclInvalidArgument, "device -1", ncclCommInitAll(comms, 2, none));
    OK(ncclCommInitAll(comms, 1, NULL));
    double x = 3, y = 0;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat64, ncclSum, comms[0], NULL));
    CHECK(y == 3);
    OK(ncclCommDestroy(comms[0]));
}

static void init_in_a_group(void) {
    enum { N = 3 };
    ncclComm_t comms[N];
    ncclUniqueId ids[2];
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    OK(ncclGetUniqueId(&ids[0]));
    OK(ncclGetUniqueId(&ids[1]));
    OK(ncclGroupStart());
    OK(ncclCommInitRank(&comms[0], N, ids[0], 0));
    OK(ncclCommInitRankConfig(&comms[1], N, ids[0], 1, &config));
    OK(ncclCommInitRankScalable(&comms[2], N, 2, 2, ids, &config));
    OK(ncclGroupEnd());
    int64_t in[N], out[N];
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
        in[r] = r + 1;
        OK(ncclAllReduce(&in[r], &out[r], 1, ncclInt64, ncclProd, comms[r], NULL));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < N; r++) CHECK(out[r] == 6);
    ncclComm_t none = comms[0];
    SAYS(ncclInvalidArgument, "nId is 0", ncclCommInitRankScalable(&none, N, 0, 0, ids, &config));
    CHECK(none == NULL);
    for (int r = 0; r < N; r++) OK(ncclCommDestroy(comms[r]));
}

/* What a process was forked from goes on, also when the forked one ends what it has a copy of, as destructors do. */
static void forked(void) {
    ncclComm_t comm;
    float x = 2, y = 0;
    int status;
    OK(ncclCommInitAll(&comm, 1, NULL));
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    pid_t pid = fork();
    if (pid == 0) {
        SAYS(ncclInvalidUsage, "forked", ncclCommFinalize(comm));
        SAYS(ncclInvalidUsage, "forked", ncclCommDestroy(comm));
        SAYS(ncclInvalidUsage, "forked", ncclCommAbort(comm));
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(y == 2);
    OK(ncclCommDestroy(comm));
}

/* The same inside of a group, at whose end they are made, and in the background. */
static void init_all_later(void) {
    ncclComm_t comms[2];
    for (int blocking = 1; blocking >= 0; blocking--) {
        if (blocking) OK(ncclGroupStart());
        else setenv("NCCL_COMM_BLOCKING", "0", 1);
        ncclResult_t made = ncclCommInitAll(comms, 2, NULL);
        CHECK(made == ncclSuccess || (!blocking && made == ncclInProgress));
        if (blocking) OK(ncclGroupEnd());
        for (int r = 0; r < 2; r++) {
            ncclResult_t state;
            do {
                OK(ncclCommGetAsyncError(comms[r], &state));
            } while (state == ncclInProgress);
            CHECK(state == ncclSuccess);
        }
        for (int r = 0; r < 2; r++) OK(ncclCommAbort(comms[r]));
    }
    unsetenv("NCCL_COMM_BLOCKING");
}

/* Nothing is left of communicators that could not all be made. */
static void init_all_fails(void) {
    enum { N = 3 };
    ncclComm_t comms[N];
    OK(ncclCommInitAll(comms, 1, NULL));
    OK(ncclCommDestroy(comms[0]));
    int before = entries("fd");
    for (int i = 0; i < N; i++) comms[i] = (ncclComm_t)&before;
    setenv("CROSSWEFT_TIMEOUT", "0.000001", 1);
    IS(ncclRemoteError, ncclCommInitAll(comms, N, NULL));
    unsetenv("CROSSWEFT_TIMEOUT");
    for (int i = 0; i < N; i++) CHECK(comms[i] == NULL);
    settles("fd", before);
}

/* One rank of a group cannot be made: the others do not wait for it. */
static void init_in_a_group_fails(void) {
    enum { N = 3 };
    ncclComm_t comms[N];
    ncclUniqueId id;
    for (int blocking = 1; blocking >= 0; blocking--) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = blocking;
        OK(ncclGetUniqueId(&id));
        double start = now();
        OK(ncclGroupStart());
        for (int r = 0; r < N; r++) OK(ncclCommInitRankConfig(&comms[r], r == 2 ? 5 : N, id, r, &config));
        if (blocking) SAYS(ncclInvalidUsage, "world size", ncclGroupEnd());
        else IS(ncclInProgress, ncclGroupEnd());
        for (int r = 0; r < N; r++) {
            ncclResult_t state;
            do {
                OK(ncclCommGetAsyncError(comms[r], &state));
            } while (state == ncclInProgress);
            CHECK(state != ncclSuccess);
            if (!strstr(ncclGetLastError(comms[r]), "world size")) FAIL("rank %d: %s", r, ncclGetLastError(comms[r]));
            OK(ncclCommAbort(comms[r]));
        }
        /* Ranks wait for 600 s otherwise. */
        CHECK(now() - start < 100);
    }
}

/* What ends or changes a communicator inside of a group does so with the group. */
static void ends_in_a_group_main(struct rank* r) {
    ncclComm_t comm = join(r);
    uint64_t flag;
    float x = (float)(r->rank + 1), y = 0;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclGroupStart());
    OK(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &flag));
    CHECK(flag == 0);
    OK(ncclGroupEnd());
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &flag));
    CHECK(flag == 1);
    OK(ncclGroupStart());
    OK(ncclCommResume(comm));
    OK(ncclGroupEnd());
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &flag));
    CHECK(flag == 0);
    /* A change that is not possible is the group's error. */
    OK(ncclGroupStart());
    OK(ncclCommResume(comm));
    SAYS(ncclInvalidUsage, "not suspended", ncclGroupEnd());
    /* Ranks of a communicator that is destroyed in the group still meet in what was called before. */
    y = 0;
    OK(ncclGroupStart());
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    if (r->rank == 0) pause_ms(50);
    OK(ncclCommDestroy(comm));
    CHECK(y == 0);
    IS(ncclInvalidArgument, ncclCommCount(comm, &(int){0}));
    OK(ncclGroupEnd());
    CHECK(y == 3);
}

/* Of a group that fails, too; and finalising comes with the group, once. */
static void finalized_in_a_group(void) {
    enum { N = 2 };
    ncclComm_t comms[N];
    float x[N] = {1, 2}, y[N];
    OK(ncclCommInitAll(comms, N, NULL));
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) OK(ncclCommFinalize(comms[r]));
    OK(ncclGroupEnd());
    for (int r = 0; r < N; r++) {
        SAYS(ncclInvalidArgument, "finalised before", ncclCommFinalize(comms[r]));
        SAYS(ncclInvalidArgument, "finalised", ncclCommRevoke(comms[r], NCCL_REVOKE_DEFAULT));
        SAYS(ncclInvalidUsage, "finalised", ncclAllReduce(&x[r], &y[r], 1, ncclFloat32, ncclSum, comms[r], NULL));
        OK(ncclCommDestroy(comms[r]));
    }
    int before = entries("fd");
    OK(ncclCommInitAll(comms, N, NULL));
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) OK(ncclCommDestroy(comms[r]));
    IS(ncclInvalidArgument, ncclAllReduce(&x[0], &y[0], 1, ncclFloat32, ncclSum, comms[0], NULL));
    IS(ncclInvalidArgument, ncclGroupEnd());
    settles("fd", before);
}

/* Two communicators of the same ranks, used in turn and at once. */
static void several_main(struct rank* r) {
    ncclComm_t comm = join(r), copy, small;
    OK(ncclCommSplit(comm, 0, r->rank, &copy, NULL));
    OK(ncclCommSplit(comm, r->rank == 0 ? NCCL_SPLIT_NOCOLOR : 5, 0, &small, NULL));
    CHECK((small == NULL) == (r->rank == 0));
    for (int round = 0; round < 20; round++) {
        float a = (float)(r->rank + round), b = 1, sum = 0, count = 0;
        OK(ncclGroupStart());
        /* Each rank in an order of its own. */
        if (r->rank % 2) OK(ncclAllReduce(&a, &sum, 1, ncclFloat32, ncclSum, comm, NULL));
        OK(ncclAllReduce(&b, &count, 1, ncclFloat32, ncclSum, copy, NULL));
        if (r->rank % 2 == 0) OK(ncclAllReduce(&a, &sum, 1, ncclFloat32, ncclSum, comm, NULL));
        OK(ncclGroupEnd());
        CHECK(sum == (float)(3 * round + 3) && count == 3);
        if (small) {
            OK(ncclAllReduce(&b, &count, 1, ncclFloat32, ncclSum, small, NULL));
            CHECK(count == 2);
        }
    }
    IS(ncclInvalidArgument, ncclCommSplit(comm, -2, 0, &small, NULL));
    IS(ncclInvalidArgument, ncclCommSplit(comm, 0, 0, NULL, NULL));
    if (small) OK(ncclCommDestroy(small));
    OK(ncclCommDestroy(comm));
    float b = 1, count;
    OK(ncclAllReduce(&b, &count, 1, ncclFloat32, ncclSum, copy, NULL));
    CHECK(count == 3);
    OK(ncclCommDestroy(copy));
}

/* ---- sends and receives ---- */

static void ring_main(struct rank* r) {
    ncclComm_t comm = join(r);
    int next = (r->rank + 1) % r->ranks, last = (r->rank + r->ranks - 1) % r->ranks;
    static const size_t sizes[] = {0, 1, 100, 32768, 32769, 3000001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        struct room m = room(sizes[s]);
        fill(m.send, r->rank, 0, sizes[s]);
        fill(m.expected, last, 0, sizes[s]);
        OK(ncclGroupStart());
        OK(ncclSend(m.send, sizes[s], ncclUint8, next, comm, NULL));
        OK(ncclRecv(m.recv, sizes[s], ncclUint8, last, comm, NULL));
        OK(ncclGroupEnd());
        leave_room(&m, "ring", r->rank);
        /* The same round the other way, the receive first, from where it is sent. */
        m = room(sizes[s]);
        fill(m.recv, r->rank, 0, sizes[s]);
        fill(m.expected, next, 0, sizes[s]);
        OK(ncclGroupStart());
        OK(ncclRecv(m.recv, sizes[s], ncclUint8, next, comm, NULL));
        OK(ncclSend(m.recv, sizes[s], ncclUint8, last, comm, NULL));
        OK(ncclGroupEnd());
        leave_room(&m, "ring in place", r->rank);
    }
    OK(ncclCommDestroy(comm));
}

/* To everybody, this rank too, blocks of sizes that differ for each pair. */
static void everybody_main(struct rank* r) {
    ncclComm_t comm = join(r);
    for (int round = 0; round < 10; round++) {
        int32_t *out[MAX_RANKS], *in[MAX_RANKS], one = 1, count = 0;
        OK(ncclGroupStart());
        /* A collective in the same group, which ranks list in different places. */
        if (r->rank == 0) OK(ncclAllReduce(&one, &count, 1, ncclInt32, ncclSum, comm, NULL));
        for (int q = 0; q < r->ranks; q++) {
            size_t n = (size_t)(1 + r->rank * 1000 + q * (round % 2 ? 20000 : 3));
            size_t m = (size_t)(1 + q * 1000 + r->rank * (round % 2 ? 20000 : 3));
            out[q] = malloc(n * 4);
            in[q] = malloc(m * 4);
            for (size_t i = 0; i < n; i++) out[q][i] = (int32_t)i + 1000000 * r->rank + 10000000 * q;
            OK(ncclSend(out[q], n, ncclInt32, q, comm, NULL));
            OK(ncclRecv(in[q], m, ncclInt32, q, comm, NULL));
        }
        if (r->rank != 0) OK(ncclAllReduce(&one, &count, 1, ncclInt32, ncclSum, comm, NULL));
        OK(ncclGroupEnd());
        CHECK(count == r->ranks);
        for (int q = 0; q < r->ranks; q++) {
            size_t m = (size_t)(1 + q * 1000 + r->rank * (round % 2 ? 20000 : 3));
            for (size_t i = 0; i < m; i++) CHECK(in[q][i] == (int32_t)i + 1000000 * q + 10000000 * r->rank);
            free(out[q]);
            free(in[q]);
        }
    }
    OK(ncclCommDestroy(comm));
}

/* Without a group: one side after the other. */
static void turns_main(struct rank* r) {
    ncclComm_t comm = join(r);
    float x = (float)r->rank, y = -1;
    if (r->rank == 0) {
        OK(ncclSend(&x, 1, ncclFloat32, 1, comm, NULL));
        OK(ncclRecv(&y, 1, ncclFloat32, 1, comm, NULL));
        CHECK(y == 1);
    } else {
        OK(ncclRecv(&y, 1, ncclFloat32, 0, comm, NULL));
        CHECK(y == 0);
        OK(ncclSend(&x, 1, ncclFloat32, 0, comm, NULL));
    }
    SAYS(ncclInvalidArgument, "peer is 2", ncclSend(&x, 1, ncclFloat32, 2, comm, NULL));
    SAYS(ncclInvalidArgument, "peer is -1", ncclRecv(&x, 1, ncclFloat32, -1, comm, NULL));
    SAYS(ncclInvalidArgument, "sendbuff is NULL", ncclSend(NULL, 1, ncclFloat32, 1, comm, NULL));
    SAYS(ncclInvalidArgument, "datatype is 77", ncclRecv(&x, 1, (ncclDataType_t)77, 1, comm, NULL));
    /* Sizes that differ are found out on both sides. */
    float four[4] = {0};
    OK(ncclGroupStart());
    OK(ncclSend(four, (size_t)(2 + r->rank), ncclFloat32, 1 - r->rank, comm, NULL));
    OK(ncclRecv(four, 4, ncclFloat32, 1 - r->rank, comm, NULL));
    ncclResult_t result = ncclGroupEnd();
    CHECK(result == ncclInvalidUsage || result == ncclRemoteError);
    CHECK(strstr(ncclGetLastError(comm), "rank"));
    OK(ncclCommAbort(comm));
}

/* What a rank sends itself it receives in the same group, as many times and as much: anything else is refused at once, and of
   the group nothing is run. */
static void oneself_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclResult_t state;
    double start = now();
    int me = r->rank;
    char from[8] = {1, 2, 3, 4, 5, 6, 7, 8}, to[8] = {0};
    SAYS(ncclInvalidUsage, "receives 1 of them", ncclRecv(to, 4, ncclUint8, me, comm, NULL));
    SAYS(ncclInvalidUsage, "sends itself 1 messages", ncclSend(from, 4, ncclUint8, me, comm, NULL));
    for (int sends = 1; sends <= 3; sends++) {
        OK(ncclGroupStart());
        for (int i = 0; i < sends; i++) OK(ncclSend(from + 2 * i, 2, ncclUint8, me, comm, NULL));
        for (int i = 0; i < 2; i++) OK(ncclRecv(to + 2 * i, 2, ncclUint8, me, comm, NULL));
        if (sends == 2) OK(ncclGroupEnd());
        else SAYS(ncclInvalidUsage, "in one group", ncclGroupEnd());
        CHECK(to[0] == (sends < 2 ? 0 : 1) && to[3] == (sends < 2 ? 0 : 4));
    }
    /* The same bytes, but not the same messages. */
    OK(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        OK(ncclSend(from, (size_t)(2 + i), ncclUint8, me, comm, NULL));
        OK(ncclRecv(to + 4 * i, (size_t)(3 - i), ncclUint8, me, comm, NULL));
    }
    SAYS(ncclInvalidArgument, "2 bytes where it receives 3", ncclGroupEnd());
    CHECK(now() - start < 20);
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    float x = 1, y = 0;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(y == (float)r->ranks);
    OK(ncclCommDestroy(comm));
}

static void oneself(void) { in_threads(1, oneself_main); in_threads(2, oneself_main); }

/* Two receives into the same bytes are a bad argument like any other: of the group nothing is run. */
static void shared_receives(void) {
    ncclComm_t comm;
    ncclResult_t state;
    char data[8] = {1, 2, 0}, copy = 0;
    OK(ncclCommInitAll(&comm, 1, NULL));
    for (int apart = 0; apart < 2; apart++) {
        OK(ncclGroupStart());
        OK(ncclAllGather(data, &copy, 1, ncclUint8, comm, NULL));
        for (int i = 0; i < 2; i++) {
            OK(ncclSend(data, 2, ncclUint8, 0, comm, NULL));
            OK(ncclRecv(data + 4 + i * (1 + apart), 2, ncclUint8, 0, comm, NULL));
        }
        if (apart) OK(ncclGroupEnd());
        else SAYS(ncclInvalidArgument, "share bytes", ncclGroupEnd());
        CHECK(copy == apart && data[4] == apart && data[7] == 2 * apart);
        OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclSuccess);
    }
    OK(ncclCommDestroy(comm));
}

/* One thread, many ranks, and each sends to all. */
static void one_thread_sends(void) {
    enum { N = 4 };
    ncclComm_t comms[N];
    int64_t out[N][N], in[N][N];
    OK(ncclCommInitAll(comms, N, NULL));
    for (int round = 0; round < 3; round++) {
        OK(ncclGroupStart());
        for (int r = 0; r < N; r++)
            for (int q = 0; q < N; q++) {
                out[r][q] = round * 100 + r * 10 + q;
                OK(ncclSend(&out[r][q], 1, ncclInt64, q, comms[r], NULL));
                OK(ncclRecv(&in[r][q], 1, ncclInt64, q, comms[r], NULL));
            }
        OK(ncclGroupEnd());
        for (int r = 0; r < N; r++)
            for (int q = 0; q < N; q++) CHECK(in[r][q] == round * 100 + q * 10 + r);
    }
    for (int r = 0; r < N; r++) OK(ncclCommDestroy(comms[r]));
}

/* ---- operations that programs make ---- */

static void operations_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclRedOp_t by_value, by_place, of_ints;
    float scalar = r->rank ? 2 : 1;
    OK(ncclRedOpCreatePreMulSum(&by_value, &scalar, ncclFloat32, ncclScalarHostImmediate, comm));
    OK(ncclRedOpCreatePreMulSum(&by_place, &scalar, ncclFloat32, ncclScalarDevice, comm));
    int32_t three = 3;
    OK(ncclRedOpCreatePreMulSum(&of_ints, &three, ncclInt32, ncclScalarHostImmediate, comm));
    CHECK(by_value >= ncclNumOps && by_place >= ncclNumOps && by_value != by_place);
    float in[5], out[5], two[2 * 5];
    for (int i = 0; i < 5; i++) in[i] = (float)(i + r->rank);
    OK(ncclAllReduce(in, out, 5, ncclFloat32, by_value, comm, NULL));
    for (int i = 0; i < 5; i++) CHECK(out[i] == (float)(i + 2 * (i + 1)) && in[i] == (float)(i + r->rank));
    scalar = r->rank ? 10 : 0.5f;
    OK(ncclAllReduce(in, out, 5, ncclFloat32, by_value, comm, NULL));
    for (int i = 0; i < 5; i++) CHECK(out[i] == (float)(i + 2 * (i + 1)));
    OK(ncclAllReduce(in, out, 5, ncclFloat32, by_place, comm, NULL));
    for (int i = 0; i < 5; i++) CHECK(out[i] == 0.5f * (float)i + (float)(10 * (i + 1)));
    OK(ncclReduce(in, out, 5, ncclFloat32, by_value, 1, comm, NULL));
    if (r->rank == 1) for (int i = 0; i < 5; i++) CHECK(out[i] == (float)(i + 2 * (i + 1)));
    for (int i = 0; i < 10; i++) two[i] = (float)(i + r->rank);
    OK(ncclReduceScatter(two, out, 5, ncclFloat32, by_value, comm, NULL));
    for (int i = 0; i < 5; i++) {
        int at = i + 5 * r->rank;
        CHECK(out[i] == (float)(at + 2 * (at + 1)));
    }
    int32_t whole = r->rank + 1, product;
    OK(ncclAllReduce(&whole, &product, 1, ncclInt32, of_ints, comm, NULL));
    CHECK(product == 9);
    SAYS(ncclInvalidArgument, "was made for", ncclAllReduce(in, out, 5, ncclFloat32, of_ints, comm, NULL));
    OK(ncclRedOpDestroy(by_value, comm));
    IS(ncclInvalidArgument, ncclRedOpDestroy(by_value, comm));
    IS(ncclInvalidArgument, ncclRedOpDestroy(ncclSum, comm));
    IS(ncclInvalidArgument, ncclAllReduce(in, out, 5, ncclFloat32, by_value, comm, NULL));
    IS(ncclInvalidArgument, ncclRedOpCreatePreMulSum(NULL, &scalar, ncclFloat32, ncclScalarDevice, comm));
    IS(ncclInvalidArgument, ncclRedOpCreatePreMulSum(&by_value, NULL, ncclFloat32, ncclScalarDevice, comm));
    IS(ncclInvalidArgument, ncclRedOpCreatePreMulSum(&by_value, &scalar, (ncclDataType_t)50, ncclScalarDevice, comm));
    IS(ncclInvalidArgument, ncclRedOpCreatePreMulSum(&by_value, &scalar, ncclFloat32, (ncclScalarResidence_t)7, comm));
    OK(ncclCommDestroy(comm));
}

/* ---- one-sided ---- */

static void one_sided_main(struct rank* r) {
    ncclComm_t comm = join(r);
    size_t bytes = 1 << 20;
    void *memory, *other;
    ncclWindow_t window;
    OK(ncclMemAlloc(&memory, bytes));
    OK(ncclMemAlloc(&other, 4096));
    OK(ncclCommWindowRegister(comm, (char*)memory + 4096, bytes - 4096, &window, NCCL_WIN_DEFAULT));
    int next = (r->rank + 1) % r->ranks, last = (r->rank + r->ranks - 1) % r->ranks;
    int32_t* here = (int32_t*)((char*)memory + 4096);
    ncclWaitSignalDesc_t from_last = {1, last, 0, 0}, to_self = {1, r->rank, 0, 0}, none = {0, last, 0, 0};
    for (int32_t round = 1; round <= 50; round++) {
        int32_t data[300];
        for (int i = 0; i < 300; i++) data[i] = round * 1000 + r->rank * 300 + i;
        OK(ncclPutSignal(data, 300, ncclInt32, next, window, 400, 0, 0, 0, comm, NULL));
        OK(ncclWaitSignal(1, &from_last, comm, NULL));
        for (int i = 0; i < 300; i++) CHECK(here[100 + i] == round * 1000 + last * 300 + i);
        /* The next round's data may only come when this was read. */
        OK(ncclSignal(last, 0, 0, 0, comm, NULL));
        ncclWaitSignalDesc_t from_next = {1, next, 0, 0};
        OK(ncclWaitSignal(1, &from_next, comm, NULL));
    }
    /* Several at once, from several, in a group; and to oneself. */
    OK(ncclGroupStart());
    for (int q = 0; q < r->ranks; q++) {
        int32_t* mine = (int32_t*)other + q;
        *mine = 7 + q;
        OK(ncclPutSignal(mine, 1, ncclInt32, q, window, 4 * (size_t)r->rank, 0, 0, 0, comm, NULL));
        OK(ncclPutSignal(NULL, 0, ncclInt32, q, window, 0, 0, 0, 0, comm, NULL));
    }
    OK(ncclGroupEnd());
    ncclWaitSignalDesc_t all[MAX_RANKS];
    for (int q = 0; q < r->ranks; q++) all[q] = (ncclWaitSignalDesc_t){2, q, 0, 0};
    OK(ncclWaitSignal(r->ranks, all, comm, NULL));
    for (int q = 0; q < r->ranks; q++) CHECK(here[q] == 7 + r->rank);
    OK(ncclSignal(r->rank, 0, 0, 0, comm, NULL));
    OK(ncclWaitSignal(1, &to_self, comm, NULL));
    OK(ncclWaitSignal(1, &none, comm, NULL));
    OK(ncclWaitSignal(0, &none, comm, NULL));
    int x = 0;
    SAYS(ncclInvalidArgument, "of a window of", ncclPutSignal(&x, 1, ncclInt32, next, window, bytes - 4096, 0, 0, 0, comm, NULL));
    SAYS(ncclInvalidArgument, "win is not", ncclPutSignal(&x, 1, ncclInt32, next, NULL, 0, 0, 0, 0, comm, NULL));
    SAYS(ncclInvalidArgument, "sigIdx is 1", ncclPutSignal(&x, 1, ncclInt32, next, window, 0, 1, 0, 0, comm, NULL));
    SAYS(ncclInvalidArgument, "ctx is 2", ncclSignal(next, 0, 2, 0, comm, NULL));
    SAYS(ncclInvalidArgument, "flags is 3", ncclSignal(next, 0, 0, 3, comm, NULL));
    SAYS(ncclInvalidArgument, "peer is 99", ncclSignal(99, 0, 0, 0, comm, NULL));
    SAYS(ncclInvalidArgument, "localbuff is NULL", ncclPutSignal(NULL, 1, ncclInt32, next, window, 0, 0, 0, 0, comm, NULL));
    from_last.opCnt = -1;
    SAYS(ncclInvalidArgument, "opCnt is -1", ncclWaitSignal(1, &from_last, comm, NULL));
    SAYS(ncclInvalidArgument, "signalDescs is NULL", ncclWaitSignal(1, NULL, comm, NULL));
    OK(ncclCommWindowDeregister(comm, window));
    OK(ncclMemFree(memory));
    OK(ncclMemFree(other));
    OK(ncclCommDestroy(comm));
}

/* A rank that waits for a signal hears of it when the other one dies. */
static void one_sided_killed_main(struct rank* r) {
    ncclComm_t comm = join(r);
    if (r->rank == 1) {
        pause_ms(100);
        kill(getpid(), SIGKILL);
    }
    ncclWaitSignalDesc_t wait = {1, 1, 0, 0};
    SAYS(ncclRemoteError, "rank 1 died", ncclWaitSignal(1, &wait, comm, NULL));
    OK(ncclCommAbort(comm));
}

static void receive_killed_main(struct rank* r) {
    ncclComm_t comm = join(r);
    if (r->rank == 1) {
        pause_ms(100);
        kill(getpid(), SIGKILL);
    }
    int x;
    SAYS(ncclRemoteError, "rank 1 died", ncclRecv(&x, 1, ncclInt32, 1, comm, NULL));
    OK(ncclCommAbort(comm));
}

/* Its end is told at once also while a process that it has forked has its connections open. */
static void forked_killed_main(struct rank* r) {
    ncclComm_t comm = join(r);
    double start = now();
    if (r->rank == 1) {
        pause_ms(100);
        if (fork() == 0) {
            for (int fd = 0; fd < 3; fd++) close(fd);
            pause_ms(60000);
            _exit(0);
        }
        kill(getpid(), SIGKILL);
    }
    int x;
    SAYS(ncclRemoteError, "rank 1 died", ncclRecv(&x, 1, ncclInt32, 1, comm, NULL));
    CHECK(now() - start < 25);
    OK(ncclCommAbort(comm));
}

/* ---- communicators that do not block ---- */

static ncclResult_t settled(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    for (double start = now(); state == ncclInProgress && now() - start < 100; pause_ms(1))
        OK(ncclCommGetAsyncError(comm, &state));
    return state;
}

static ncclResult_t settled_badly(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    for (double start = now(); state == ncclSuccess && now() - start < 100; pause_ms(1))
        OK(ncclCommGetAsyncError(comm, &state));
    return state;
}

static void no_waiting_main(struct rank* r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm, part;
    IS(ncclInProgress, ncclCommInitRankConfig(&comm, r->ranks, r->id, r->rank, &config));
    CHECK(comm != NULL);
    IS(ncclSuccess, settled(comm));
    static float in[1000000], out[2][1000000];
    for (int i = 0; i < 1000000; i++) in[i] = 1;
    float* mine = out[r->rank];
    IS(ncclInProgress, ncclAllReduce(in, mine, 1000000, ncclFloat32, ncclSum, comm, NULL));
    IS(ncclSuccess, settled(comm));
    CHECK(mine[0] == 2 && mine[999999] == 2);
    OK(ncclGroupStart());
    OK(ncclAllReduce(mine, mine, 10, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclAllReduce(mine, mine, 10, ncclFloat32, ncclSum, comm, NULL));
    IS(ncclInProgress, ncclGroupEnd());
    IS(ncclSuccess, settled(comm));
    CHECK(mine[0] == 8 && mine[10] == 2);
    IS(ncclInProgress, ncclCommSplit(comm, 1, r->rank, &part, NULL));
    IS(ncclSuccess, settled(comm));
    IS(ncclSuccess, settled(part));
    IS(ncclInProgress, ncclAllReduce(mine, mine, 1, ncclFloat32, ncclMax, part, NULL));
    IS(ncclSuccess, settled(part));
    /* A call that the other rank does not make can be given up. */
    ncclComm_t lone;
    IS(ncclInProgress, ncclCommSplit(comm, 0, 0, &lone, NULL));
    IS(ncclSuccess, settled(comm));
    IS(ncclSuccess, settled(lone));
    if (r->rank == 0) {
        IS(ncclInProgress, ncclAllReduce(mine, mine, 1000, ncclFloat32, ncclMax, lone, NULL));
        pause_ms(50);
        double start = now();
        OK(ncclCommAbort(lone));
        CHECK(now() - start < 1);
    } else {
        IS(ncclRemoteError, settled_badly(lone));
        OK(ncclCommDestroy(lone));
    }
    IS(ncclInProgress, ncclCommFinalize(comm));
    IS(ncclSuccess, settled(comm));
    SAYS(ncclInvalidUsage, "finalised", ncclAllReduce(mine, mine, 1, ncclFloat32, ncclMax, comm, NULL));
    OK(ncclCommDestroy(comm));
    /* One that is revoked stays so, whatever is made of it. */
    OK(ncclCommRevoke(part, NCCL_REVOKE_DEFAULT));
    IS(ncclInProgress, ncclCommSplit(part, 0, 0, &lone, NULL));
    IS(ncclSuccess, settled(part));
    IS(ncclSuccess, settled(lone));
    SAYS(ncclInvalidUsage, "revoked", ncclAllReduce(mine, mine, 1, ncclFloat32, ncclMax, part, NULL));
    /* What makes no communicator fails with the one it was called on. */
    ncclWindow_t window;
    static char anywhere[2][8192] __attribute__((aligned(4096)));
    IS(ncclInProgress, ncclCommWindowRegister(lone, anywhere[r->rank], 4096, &window, 0));
    IS(ncclInvalidUsage, settled(lone));
    CHECK(strstr(ncclGetLastError(lone), "ncclMemAlloc"));
    OK(ncclCommDestroy(part));
    OK(ncclCommAbort(lone));
}

static void no_waiting(void) {
    in_threads(2, no_waiting_main);
    /* One rank that comes, and one that does not: it can be given up. */
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclUniqueId id;
    ncclComm_t comm;
    int count;
    ncclResult_t state;
    OK(ncclGetUniqueId(&id));
    IS(ncclInProgress, ncclCommInitRankConfig(&comm, 2, id, 0, &config));
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclInProgress);
    SAYS(ncclInvalidArgument, "ncclCommGetAsyncError", ncclCommCount(comm, &count));
    SAYS(ncclInvalidArgument, "ncclCommGetAsyncError", ncclAllReduce(&count, &count, 1, ncclInt32, ncclSum, comm, NULL));
    double start = now();
    OK(ncclCommAbort(comm));
    CHECK(now() - start < 1);
    /* The environment's word is the last. */
    setenv("NCCL_COMM_BLOCKING", "1", 1);
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
    OK(ncclCommDestroy(comm));
}

/* One that is being made is aborted at any time. */
static int abort_after_ms;

static void abort_init_main(struct rank* r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    IS(ncclInProgress, ncclCommInitRankConfig(&comm, r->ranks, r->id, r->rank, &config));
    if (r->rank == 0) {
        pause_ms(abort_after_ms);
    } else {
        /* Of one that was aborted before it came nobody hears; whoever waits for it can be aborted too. */
        ncclResult_t state = ncclInProgress;
        for (double start = now(); state == ncclInProgress && now() - start < 1; pause_ms(1))
            OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclSuccess || state == ncclRemoteError || state == ncclInProgress);
        if (state == ncclSuccess) CHECK(settled_badly(comm) == ncclRemoteError);
    }
    double start = now();
    OK(ncclCommAbort(comm));
    CHECK(now() - start < 1);
}

static void abort_init(void) {
    for (int round = 0; round < 20; round++) {
        abort_after_ms = round % 10;
        in_threads(2, abort_init_main);
    }
}

/* ---- faults ---- */

static double aborted_at;
static ncclComm_t to_abort;

static void* aborts(void* nothing) {
    pause_ms(300);
    aborted_at = now();
    OK(ncclCommAbort(to_abort));
    CHECK(now() - aborted_at < 1);
    return nothing;
}

/* Rank 0 waits, in one way or another, for one that never calls, and is aborted by a thread beside it. */
static int how_it_waits;

static void abort_main(struct rank* r) {
    ncclComm_t comm = join(r), other;
    float x = 1, y;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    if (r->rank == 0) {
        pthread_t thread;
        to_abort = comm;
        CHECK(pthread_create(&thread, NULL, aborts, NULL) == 0);
        ncclWaitSignalDesc_t signal = {1, 1, 0, 0};
        switch (how_it_waits) {
        case 0: SAYS(ncclRemoteError, "ncclCommAbort", ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL)); break;
        case 1: SAYS(ncclRemoteError, "ncclCommAbort", ncclRecv(&y, 1, ncclFloat32, 1, comm, NULL)); break;
        case 2: SAYS(ncclRemoteError, "ncclCommAbort", ncclWaitSignal(1, &signal, comm, NULL)); break;
        /* One that is still to be prepared. */
        case 3: SAYS(ncclRemoteError, "ncclCommAbort", ncclAllReduce(&x, &y, 1, ncclInt8, ncclMax, comm, NULL)); break;
        /* One that is to be made of it. */
        case 4: SAYS(ncclRemoteError, "ncclCommAbort", ncclCommSplit(comm, 0, 0, &other, NULL)); break;
        /* And one that new ranks do not join. */
        case 5:
            OK(ncclCommGetUniqueId(comm, &r->id));
            SAYS(ncclRemoteError, "ncclCommAbort", ncclCommGrow(comm, 3, &r->id, -1, &other, NULL));
            break;
        }
        CHECK(now() - aborted_at < 1);
        CHECK(pthread_join(thread, NULL) == 0);
        IS(ncclInvalidArgument, ncclCommDestroy(comm));
    } else {
        ncclResult_t state = ncclSuccess;
        if (how_it_waits == 5) IS(ncclRemoteError, ncclCommGrow(comm, 3, NULL, -1, &other, NULL));
        for (double start = now(); state == ncclSuccess && now() - start < 30; pause_ms(1))
            OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclRemoteError);
        CHECK(strstr(ncclGetLastError(comm), "rank 0") && strstr(ncclGetLastError(comm), "ncclCommAbort"));
        OK(ncclCommAbort(comm));
    }
}

/* Rank 1 dies; the others hear of it whether they wait for it or not. */
static void killed_main(struct rank* r) {
    ncclComm_t comm = join(r);
    float x = 1, y;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    if (r->rank == 1) {
        pause_ms(100);
        kill(getpid(), SIGKILL);
    }
    if (r->rank == 0) {
        SAYS(ncclRemoteError, "rank 1 died", ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
        SAYS(ncclRemoteError, "rank 1 died", ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    }
    ncclResult_t state = ncclSuccess;
    double start = now();
    for (; state == ncclSuccess && now() - start < 30; pause_ms(1)) OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclRemoteError);
    if (!strstr(ncclGetLastError(comm), "rank 1")) FAIL("who? %s", ncclGetLastError(comm));
    /* Those that are left go on without it. */
    ncclComm_t rest;
    int gone[] = {1}, rank, count;
    OK(ncclCommShrink(comm, gone, 1, &rest, NULL, NCCL_SHRINK_ABORT));
    OK(ncclCommUserRank(rest, &rank));
    OK(ncclCommCount(rest, &count));
    CHECK(count == 2 && rank == (r->rank == 0 ? 0 : 1));
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, rest, NULL));
    CHECK(y == 2);
    OK(ncclCommDestroy(rest));
    OK(ncclCommAbort(comm));
}

static void killed(void) { in_processes(3, 1, killed_main); }

/* Ranks that call different things, and notice. None aborts before all have: the abort could come first. */
static pthread_barrier_t all_have_noticed;

static void mismatch_main(struct rank* r) {
    ncclComm_t comm = join(r);
    static float in[3][8], out[3][8];
    SAYS(ncclInvalidUsage, "rank", ncclAllReduce(in[r->rank], out[r->rank], r->rank == 0 ? 4 : 8, ncclFloat32, ncclSum, comm, NULL));
    ncclResult_t state;
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state != ncclSuccess);
    pthread_barrier_wait(&all_have_noticed);
    OK(ncclCommAbort(comm));
}

/* One rank refuses a call that the other is in, before or after it was prepared: the other does not wait for the
   deadline of 600 s. */
static int was_prepared;

static void refused_main(struct rank* r) {
    ncclComm_t comm = join(r);
    float x = 1, y = 0;
    if (was_prepared) OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    double start = now();
    if (r->rank == 0) {
        SAYS(was_prepared ? ncclInvalidUsage : ncclRemoteError, "rank 1 has refused a call",
            ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    } else {
        SAYS(ncclInvalidArgument, "sendbuff is NULL", ncclAllReduce(NULL, &y, 1, ncclFloat32, ncclSum, comm, NULL));
        ncclResult_t state;
        do {
            pause_ms(5);
            OK(ncclCommGetAsyncError(comm, &state));
        } while (state == ncclSuccess && now() - start < 100);
        CHECK(state == ncclRemoteError);
    }
    CHECK(now() - start < 100);
    OK(ncclCommAbort(comm));
}

/* The same of a message, and of a signal. */
static int is_signal;

static void refused_message_main(struct rank* r) {
    ncclComm_t comm = join(r);
    float x = 1;
    double start = now();
    ncclWaitSignalDesc_t signal = {1, 1, 0, 0};
    if (r->rank == 0) {
        ncclResult_t result = is_signal ? ncclWaitSignal(1, &signal, comm, NULL) : ncclRecv(&x, 1, ncclFloat32, 1, comm, NULL);
        CHECK(result == ncclRemoteError && strstr(ncclGetLastError(comm), "rank 1 has refused a call"));
    } else {
        if (is_signal) IS(ncclInvalidArgument, ncclSignal(0, 7, 0, 0, comm, NULL));
        else IS(ncclInvalidArgument, ncclSend(NULL, 1, ncclFloat32, 0, comm, NULL));
        ncclResult_t state;
        do {
            pause_ms(5);
            OK(ncclCommGetAsyncError(comm, &state));
        } while (state == ncclSuccess && now() - start < 100);
        CHECK(state == ncclRemoteError);
    }
    CHECK(now() - start < 100);
    OK(ncclCommAbort(comm));
}

/* One that came too early for this communicator is none: it is made once more, and whoever waits for it waits on. */
static void early_main(struct rank* r) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm;
    IS(ncclInProgress, ncclCommInitRankConfig(&comm, r->ranks, r->id, r->rank, &config));
    IS(ncclSuccess, settled(comm));
    float x = (float)r->rank;
    if (r->rank == 0) {
        IS(ncclInProgress, ncclRecv(&x, 1, ncclFloat32, 1, comm, NULL));
    } else if (r->rank == 1) {
        IS(ncclInProgress, ncclRecv(&x, 1, ncclFloat32, 2, comm, NULL));
        SAYS(ncclInvalidArgument, "ncclCommGetAsyncError", ncclSend(&x, 1, ncclFloat32, 0, comm, NULL));
        OK(ncclGroupStart());
        IS(ncclInvalidArgument, ncclSend(&x, 1, ncclFloat32, 0, comm, NULL));
        IS(ncclInvalidArgument, ncclGroupEnd());
        IS(ncclSuccess, settled(comm));
        IS(ncclInProgress, ncclSend(&x, 1, ncclFloat32, 0, comm, NULL));
    } else {
        /* Longer than a refusal is waited for. */
        pause_ms(8000);
        IS(ncclInProgress, ncclSend(&x, 1, ncclFloat32, 1, comm, NULL));
    }
    IS(ncclSuccess, settled(comm));
    CHECK(x == 2);
    OK(ncclCommDestroy(comm));
}

/* The same of what all ranks do beside calls: making communicators of another, after which the other is as before, and
   registering windows. */
static volatile int has_been_told;

static void refused_split_main(struct rank* r) {
    ncclComm_t comm = join(r), part;
    float x = 1, y = 0;
    double start = now();
    if (r->rank == 1) {
        SAYS(ncclInvalidArgument, "color is -5", ncclCommSplit(comm, -5, 0, &part, NULL));
        while (!has_been_told) pause_ms(1);
    } else {
        SAYS(ncclRemoteError, "rank 1 has refused a call", ncclCommSplit(comm, 0, 0, &part, NULL));
        has_been_told = 1;
    }
    CHECK(part == NULL && now() - start < 100);
    OK(ncclCommSplit(comm, 0, 0, &part, NULL));
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, part, NULL));
    CHECK(y == 2);
    OK(ncclCommDestroy(part));
    OK(ncclCommDestroy(comm));
}

static void refused_grow_main(struct rank* r) {
    ncclComm_t comm = join(r), all;
    ncclUniqueId id;
    float x = 1, y = 0;
    double start = now();
    if (r->rank == 1) {
        SAYS(ncclInvalidArgument, "nRanks is 2", ncclCommGrow(comm, 2, NULL, -1, &all, NULL));
        while (!has_been_told) pause_ms(1);
    } else {
        OK(ncclCommGetUniqueId(comm, &id));
        SAYS(ncclRemoteError, "rank 1 has refused a call", ncclCommGrow(comm, 3, &id, -1, &all, NULL));
        has_been_told = 1;
    }
    CHECK(all == NULL && now() - start < 100);
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(y == 2);
    OK(ncclCommDestroy(comm));
}

static void refused_window_main(struct rank* r) {
    ncclComm_t comm = join(r);
    ncclWindow_t window;
    void* memory;
    double start = now();
    OK(ncclMemAlloc(&memory, 4096));
    if (r->rank == 1) {
        ncclResult_t state;
        SAYS(ncclInvalidArgument, "unknown flags", ncclCommWindowRegister(comm, memory, 4096, &window, 1 << 20));
        do {
            pause_ms(5);
            OK(ncclCommGetAsyncError(comm, &state));
        } while (state == ncclSuccess && now() - start < 100);
        CHECK(state == ncclRemoteError);
    } else {
        SAYS(ncclRemoteError, "rank 1 has refused a call", ncclCommWindowRegister(comm, memory, 4096, &window, 0));
    }
    CHECK(now() - start < 100);
    OK(ncclCommAbort(comm));
    OK(ncclMemFree(memory));
}

/* A call that is refused and then made as it should be is a call like any other. */
static void refused_once_main(struct rank* r) {
    ncclComm_t comm = join(r);
    for (int round = 0; round < 3; round++) {
        float x = 1, y = 0;
        int root = r->rank == 1 ? -1 : 0;
        if (r->rank == 1) {
            OK(ncclGroupStart());
            OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
            IS(ncclInvalidArgument, ncclBroadcast(&x, &y, 1, ncclFloat32, root, comm, NULL));
            IS(ncclInvalidArgument, ncclGroupEnd());
            IS(ncclInvalidArgument, ncclBroadcast(&x, &y, 1, ncclFloat32, root, comm, NULL));
            pause_ms(300);
        }
        OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
        CHECK(y == 2);
    }
    OK(ncclCommDestroy(comm));
}

/* Sizes so different that one rank prepares its call, which the other had prepared before. */
static void prepares_main(struct rank* r) {
    ncclComm_t comm = join(r);
    static float large[2][1 << 20];
    float* mine = large[r->rank];
    OK(ncclAllReduce(mine, mine, 4, ncclFloat32, ncclSum, comm, NULL));
    double start = now();
    if (r->rank == 0) {
        SAYS(ncclInvalidUsage, "rank 1 prepares a call", ncclAllReduce(mine, mine, 4, ncclFloat32, ncclSum, comm, NULL));
    } else {
        SAYS(ncclRemoteError, "prepares a call", ncclAllReduce(mine, mine, 1 << 20, ncclFloat32, ncclSum, comm, NULL));
    }
    CHECK(now() - start < 100);
    OK(ncclCommAbort(comm));
}

/* Ranks with other offsets in their windows than the others. */
static void offsets_main(struct rank* r) {
    enum { BYTES = 1 << 20 };
    ncclComm_t all = join(r);
    char *send, *recv;
    OK(ncclMemAlloc((void**)&send, BYTES));
    OK(ncclMemAlloc((void**)&recv, BYTES));
    for (int where = 0; where < 3; where++) {
        /* A communicator for each, which ends with the call. */
        ncclComm_t comm;
        ncclWindow_t in, out;
        OK(ncclCommSplit(all, 0, 0, &comm, NULL));
        OK(ncclCommWindowRegister(comm, send, BYTES, &in, NCCL_WIN_COLL_SYMMETRIC));
        OK(ncclCommWindowRegister(comm, recv, BYTES, &out, NCCL_WIN_COLL_SYMMETRIC));
        for (int i = 0; i < 50; i++) OK(ncclAllReduce(send + 64 * i, recv, 256, ncclFloat32, ncclSum, comm, NULL));
        size_t from = where != 1 && r->rank == 1 ? 4096 : 0, to = where != 0 && r->rank == 1 ? 8192 : 0;
        SAYS(ncclInvalidUsage, r->rank == 0 ? "rank 1 has its message" : "rank 0 has its message",
            ncclAllReduce(send + from, recv + to, 256, ncclFloat32, ncclSum, comm, NULL));
        SAYS(ncclInvalidUsage, "of the symmetric windows",
            ncclAllReduce(send, recv, 256, ncclFloat32, ncclSum, comm, NULL));
        OK(ncclCommDestroy(comm));
    }
    OK(ncclCommDestroy(all));
    OK(ncclMemFree(send));
    OK(ncclMemFree(recv));
}

/* One rank's buffers lie in a window, the other's do not, and both have called so before. */
static void window_or_not_main(struct rank* r) {
    enum { BYTES = 1 << 16 };
    ncclComm_t comm = join(r);
    ncclWindow_t window;
    char* inside;
    static char outside[2][BYTES];
    OK(ncclMemAlloc((void**)&inside, BYTES));
    OK(ncclCommWindowRegister(comm, inside, BYTES, &window, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclAllReduce(inside, inside, 64, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclAllReduce(outside[r->rank], outside[r->rank], 64, ncclFloat32, ncclSum, comm, NULL));
    double start = now();
    char* mine = r->rank == 0 ? inside : outside[1];
    ncclResult_t result = ncclAllReduce(mine, mine, 64, ncclFloat32, ncclSum, comm, NULL);
    /* Who finds it first tells the other. */
    CHECK(result == ncclInvalidUsage || result == ncclRemoteError);
    if (!strstr(ncclGetLastError(comm), "ranks make different calls")) FAIL("%s", ncclGetLastError(comm));
    CHECK(now() - start < 100);
    OK(ncclCommDestroy(comm));
    OK(ncclMemFree(inside));
}

/* ---- deriving communicators ---- */

static void shrink_main(struct rank* r) {
    ncclComm_t comm = join(r), rest, last;
    int gone[] = {0, 2, 0}, one[] = {1}, bad[] = {9}, rank, count;
    SAYS(ncclInvalidArgument, "excludeRanksList has 9", ncclCommShrink(comm, bad, 1, &rest, NULL, 0));
    SAYS(ncclInvalidArgument, "excludeRanksCount is 0", ncclCommShrink(comm, bad, 0, &rest, NULL, 0));
    SAYS(ncclInvalidArgument, "shrinkFlags is 8", ncclCommShrink(comm, one, 1, &rest, NULL, 8));
    bad[0] = r->rank;
    SAYS(ncclInvalidArgument, "only ranks that stay", ncclCommShrink(comm, bad, 1, &rest, NULL, 0));
    if (r->rank % 2) {
        OK(ncclCommShrink(comm, gone, 3, &rest, NULL, NCCL_SHRINK_DEFAULT));
        OK(ncclCommUserRank(rest, &rank));
        OK(ncclCommCount(rest, &count));
        CHECK(count == 2 && rank == r->rank / 2);
        float x = 1, y;
        OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, rest, NULL));
        CHECK(y == 2);
        if (rank == 0) {
            OK(ncclCommShrink(rest, one, 1, &last, NULL, NCCL_SHRINK_DEFAULT));
            OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, last, NULL));
            CHECK(y == 1);
            OK(ncclCommDestroy(last));
        }
        OK(ncclCommDestroy(rest));
    }
    /* The parent is whole. */
    float x = 1, y;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(y == 4);
    OK(ncclCommDestroy(comm));
}

/* One rank tries before the others come, in vain; then all do. */
static volatile int has_given_up;

static void split_again_main(struct rank* r) {
    ncclComm_t comm = join(r), part;
    if (r->rank == 0) {
        setenv("CROSSWEFT_TIMEOUT", "0.3", 1);
        SAYS(ncclRemoteError, "join", ncclCommSplit(comm, 0, 0, &part, NULL));
        setenv("CROSSWEFT_TIMEOUT", "20", 1);
        has_given_up = 1;
    }
    while (!has_given_up) pause_ms(1);
    OK(ncclCommSplit(comm, 0, 0, &part, NULL));
    float x = 1, y;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, part, NULL));
    CHECK(y == (float)r->ranks);
    OK(ncclCommDestroy(part));
    OK(ncclCommDestroy(comm));
}

static void split_again(void) { in_threads(3, split_again_main); }

/* Of ranks that will not come nobody waits for the deadline of 600 s. */
static void split_killed_main(struct rank* r) {
    ncclComm_t comm = join(r), part;
    if (r->rank == 1) {
        pause_ms(200);
        kill(getpid(), SIGKILL);
    }
    double start = now();
    SAYS(ncclRemoteError, "rank 1 died", ncclCommSplit(comm, 0, 0, &part, NULL));
    CHECK(part == NULL && now() - start < 100);
    OK(ncclCommAbort(comm));
}

static pthread_barrier_t all_have_split;
static int leaves;

static void split_gone_main(struct rank* r) {
    ncclComm_t comm = join(r), part;
    if (r->rank == 1) {
        pause_ms(200);
        if (leaves) OK(ncclCommDestroy(comm));
        else OK(ncclCommAbort(comm));
    } else {
        int gone[] = {1};
        double start = now();
        SAYS(ncclRemoteError, "rank 1", ncclCommSplit(comm, 0, 0, &part, NULL));
        CHECK(part == NULL && now() - start < 100);
        /* Those that are left can still do without it. */
        OK(ncclCommShrink(comm, gone, 1, &part, NULL, NCCL_SHRINK_DEFAULT));
        float x = 1, y;
        OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, part, NULL));
        CHECK(y == 2);
        OK(ncclCommDestroy(part));
        OK(ncclCommDestroy(comm));
    }
    pthread_barrier_wait(&all_have_split);
}

static void split_gone(void) {
    CHECK(pthread_barrier_init(&all_have_split, NULL, 3) == 0);
    for (leaves = 0; leaves < 2; leaves++) in_threads(3, split_gone_main);
}

static ncclUniqueId grow_id;

static void grow_main(struct rank* r) {
    ncclComm_t comm = NULL, all;
    if (r->rank < 2) {
        /* The first two have found each other by another id. */
        OK(ncclCommInitRank(&comm, 2, r->id, r->rank));
        if (r->rank == 1) OK(ncclCommGetUniqueId(comm, &grow_id));
        float x = 1, y;
        OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
        SAYS(ncclInvalidArgument, "nRanks is 2", ncclCommGrow(comm, 2, NULL, -1, &all, NULL));
        SAYS(ncclInvalidArgument, "rank is 0", ncclCommGrow(comm, 4, NULL, 0, &all, NULL));
        SAYS(ncclInvalidUsage, "exactly one rank", ncclCommGrow(comm, 4, NULL, -1, &all, NULL));
        OK(ncclCommGrow(comm, 4, r->rank == 1 ? &grow_id : NULL, -1, &all, NULL));
    } else {
        SAYS(ncclInvalidArgument, "uniqueId is NULL", ncclCommGrow(NULL, 4, NULL, r->rank, &all, NULL));
        while (!*(volatile char*)&grow_id) pause_ms(1);
        pause_ms(100);
        OK(ncclCommGrow(NULL, 4, &grow_id, r->rank, &all, NULL));
    }
    int rank, count;
    OK(ncclCommUserRank(all, &rank));
    OK(ncclCommCount(all, &count));
    CHECK(rank == r->rank && count == 4);
    int32_t x = 1 << r->rank, y;
    OK(ncclAllReduce(&x, &y, 1, ncclInt32, ncclSum, all, NULL));
    CHECK(y == 15);
    OK(ncclCommDestroy(all));
    if (comm) OK(ncclCommDestroy(comm));
}

/* All give the communicator up while one waits in it, and make others of it. */
static void revoke_main(struct rank* r) {
    ncclComm_t comm = join(r), part, rest;
    float x = 1, y;
    ncclWaitSignalDesc_t nothing = {0, 0, 0, 0};
    IS(ncclInvalidArgument, ncclCommRevoke(comm, 1));
    if (r->rank == 0) SAYS(ncclRemoteError, "ncclCommRevoke", ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    else pause_ms(200);
    OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    ncclResult_t state;
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    SAYS(ncclInvalidUsage, "revoked", ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    SAYS(ncclInvalidUsage, "revoked", ncclCommFinalize(comm));
    SAYS(ncclInvalidUsage, "revoked", ncclWaitSignal(0, &nothing, comm, NULL));
    OK(ncclCommSplit(comm, 0, -r->rank, &part, NULL));
    int rank, gone[] = {2};
    OK(ncclCommUserRank(part, &rank));
    CHECK(rank == 2 - r->rank);
    if (r->rank != 2) {
        OK(ncclCommShrink(comm, gone, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
        OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, rest, NULL));
        CHECK(y == 2);
        OK(ncclCommDestroy(rest));
    }
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, part, NULL));
    CHECK(y == 3);
    OK(ncclCommDestroy(part));
    OK(ncclCommDestroy(comm));
}

static void suspend_main(struct rank* r) {
    ncclComm_t comm = join(r);
    uint64_t before, active, suspended, flag;
    static float data[2][1 << 16];
    float* mine = data[r->rank];
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspend, &before));
    OK(ncclAllReduce(mine, mine, 1 << 16, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspend, &active));
    CHECK(active >= before + (1 << 16));
    IS(ncclInvalidArgument, ncclCommSuspend(comm, 0));
    IS(ncclInvalidUsage, ncclCommResume(comm));
    OK(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspend, &suspended));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &flag));
    CHECK(suspended == before && flag == 1);
    uint64_t lasting, total;
    OK(ncclCommMemStats(comm, ncclStatGpuMemPersist, &lasting));
    OK(ncclCommMemStats(comm, ncclStatGpuMemTotal, &total));
    CHECK(lasting > 0 && total == lasting + suspended);
    SAYS(ncclInvalidUsage, "ncclCommResume", ncclAllReduce(mine, mine, 1, ncclFloat32, ncclSum, comm, NULL));
    OK(ncclCommResume(comm));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &flag));
    CHECK(flag == 0);
    float x = 1, y;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(y == 2);
    IS(ncclInvalidArgument, ncclCommMemStats(comm, (ncclCommMemStat_t)9, &flag));
    IS(ncclInvalidArgument, ncclCommMemStats(comm, ncclStatGpuMemTotal, NULL));
    OK(ncclCommDestroy(comm));
}

/* ---- memory ---- */

static void windows_main(struct rank* r) {
    ncclComm_t comm = join(r);
    size_t bytes = 1 << 20;
    void *send, *recv, *handle = NULL;
    ncclWindow_t in, out, wrong;
    OK(ncclMemAlloc(&send, bytes));
    OK(ncclMemAlloc(&recv, bytes));
    OK(ncclCommRegister(comm, send, bytes, &handle));
    CHECK(handle != NULL);
    OK(ncclCommDeregister(comm, handle));
    IS(ncclInvalidArgument, ncclCommDeregister(comm, handle));
    IS(ncclInvalidArgument, ncclCommRegister(comm, NULL, bytes, &handle));

    OK(ncclCommWindowRegister(comm, send, bytes, &in, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclCommWindowRegister(comm, recv, bytes, &out, NCCL_WIN_COLL_SYMMETRIC));
    void* user;
    OK(ncclWinGetUserPtr(comm, in, &user));
    CHECK(user == send);
    /* Peers' memory is there to be read. */
    ((int*)send)[100] = 1000 + r->rank;
    float x = 1, y;
    OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, NULL));
    for (int peer = 0; peer < r->ranks; peer++) {
        int* there;
        OK(ncclGetPeerDevicePointer(in, 400, peer, (void**)&there));
        CHECK(*there == 1000 + peer);
        OK(ncclGetLsaDevicePointer(in, 400, peer, (void**)&there));
        CHECK(*there == 1000 + peer);
    }
    void* place;
    IS(ncclInvalidArgument, ncclGetPeerDevicePointer(in, bytes, 0, &place));
    SAYS(ncclInvalidArgument, "no rank 99", ncclGetPeerDevicePointer(in, 0, 99, &place));
    IS(ncclInvalidArgument, ncclGetPeerDevicePointer(in, 0, -1, &place));

    /* Collectives within windows, at offsets that all ranks share. */
    for (int round = 0; round < 3; round++)
        for (size_t n = 1; n <= 65536; n *= 16) {
            size_t at = round == 0 ? 0 : 4096;
            float *a = (float*)send + at, *b = (float*)recv + at;
            for (size_t i = 0; i < n; i++) a[i] = (float)(r->rank + (int)(i % 1000)), b[i] = -1;
            OK(ncclAllReduce(a, b, n, ncclFloat32, ncclSum, comm, NULL));
            for (size_t i = 0; i < n; i++) CHECK(b[i] == (float)(2 * (int)(i % 1000) + 1));
            OK(ncclAllReduce(a, a, n, ncclFloat32, ncclMax, comm, NULL));
            for (size_t i = 0; i < n; i++) CHECK(a[i] == (float)(1 + (int)(i % 1000)));
            for (size_t i = 0; i < n; i++) a[i] = (float)(r->rank * 10);
            OK(ncclAllGather(a, b, n, ncclFloat32, comm, NULL));
            CHECK(b[0] == 0 && b[n - 1] == 0 && b[n] == 10 && b[2 * n - 1] == 10);
            b[n * (size_t)r->rank] = (float)(r->rank + 5);
            OK(ncclAllGather(b + n * (size_t)r->rank, b, n, ncclFloat32, comm, NULL));
            CHECK(b[0] == 5 && b[n] == 6);
            for (size_t i = 0; i < 2 * n; i++) a[i] = (float)(r->rank + (i < n ? 1 : 2));
            OK(ncclReduceScatter(a, b, n, ncclFloat32, ncclSum, comm, NULL));
            CHECK(b[0] == (float)(3 + 2 * r->rank) && b[n - 1] == b[0]);
            OK(ncclAlltoAll(a, b, n, ncclFloat32, comm, NULL));
            CHECK(b[0] == (float)(1 + r->rank) && b[n] == (float)(2 + r->rank));
        }

    /* Nothing is staged there: the scratch memory of a larger call is no larger. */
    uint64_t without, with;
    size_t large = bytes / sizeof(float);
    OK(ncclAllReduce(send, recv, large / 2, ncclFloat32, ncclProd, comm, NULL));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspend, &without));
    OK(ncclAllReduce(send, recv, large, ncclFloat32, ncclProd, comm, NULL));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspend, &with));
    CHECK(with == without);
    float* anywhere = calloc(large, sizeof(float));
    OK(ncclAllReduce(anywhere, anywhere, large, ncclFloat32, ncclProd, comm, NULL));
    OK(ncclCommMemStats(comm, ncclStatGpuMemSuspend, &with));
    CHECK(with >= without + bytes / 2);
    free(anywhere);

    /* What is no memory of ncclMemAlloc, or not the same everywhere, is refused everywhere. */
    void* plain = NULL;
    CHECK(posix_memalign(&plain, 4096, bytes) == 0);
    SAYS(r->rank == 0 ? ncclInvalidUsage : ncclRemoteError, "ncclMemAlloc",
        ncclCommWindowRegister(comm, r->rank == 0 ? plain : send, bytes, &wrong, 0));
    CHECK(wrong == NULL);
    SAYS(ncclInvalidUsage, "rank 1", ncclCommWindowRegister(comm, send, bytes - 4096 * (size_t)r->rank, &wrong, 0));
    IS(ncclInvalidArgument, ncclCommWindowRegister(comm, (char*)send + 1, 4096, &wrong, 0));
    IS(ncclInvalidArgument, ncclCommWindowRegister(comm, send, 0, &wrong, 0));
    IS(ncclInvalidArgument, ncclCommWindowRegister(comm, send, 4096, &wrong, 1 << 20));
    free(plain);

    OK(ncclCommWindowDeregister(comm, in));
    IS(ncclInvalidArgument, ncclCommWindowDeregister(comm, in));
    IS(ncclInvalidArgument, ncclWinGetUserPtr(comm, in, &user));
    /* Buffers that are no window any more are buffers like any others. */
    ((float*)send)[0] = 2;
    OK(ncclAllReduce(send, recv, 1, ncclFloat32, ncclSum, comm, NULL));
    CHECK(((float*)recv)[0] == 4);
    /* Nor is what comes to lie where one was that was freed. */
    OK(ncclCommWindowRegister(comm, send, bytes, &in, NCCL_WIN_COLL_SYMMETRIC));
    OK(ncclMemFree(send));
    OK(ncclMemAlloc(&send, bytes));
    for (size_t i = 0; i < large; i++) ((float*)send)[i] = 3;
    OK(ncclAllReduce(send, recv, large, ncclFloat32, ncclSum, comm, NULL));
    CHECK(((float*)recv)[0] == 6 && ((float*)recv)[large - 1] == 6);
    OK(ncclMemFree(send));
    OK(ncclCommDestroy(comm));
    IS(ncclInvalidArgument, ncclWinGetUserPtr(comm, out, &user));
    IS(ncclInvalidArgument, ncclGetPeerDevicePointer(out, 0, 0, &place));
    OK(ncclMemFree(recv));
    SAYS(ncclInvalidArgument, "ncclMemAlloc", ncclMemFree(recv));
}

static void memory(void) {
    void* p = (void*)1;
    OK(ncclMemAlloc(&p, 0));
    CHECK(p == NULL);
    OK(ncclMemFree(NULL));
    IS(ncclInvalidArgument, ncclMemAlloc(NULL, 5));
    IS(ncclInvalidArgument, ncclMemFree(&p));
    OK(ncclMemAlloc(&p, 1000));
    CHECK((uintptr_t)p % 4096 == 0);
    for (int i = 0; i < 1000; i++) CHECK(((char*)p)[i] == 0);
    memset(p, 1, 1000);
    OK(ncclMemFree(p));
    IS(ncclSystemError, ncclMemAlloc(&p, (size_t)1 << 60));
}

/* ---- what is asked, and what is declined ---- */

static void queries(void) {
    enum { N = 3 };
    ncclComm_t comms[N];
    OK(ncclCommInitAll(comms, N, NULL));
    for (int r = 0; r < N; r++) {
        ncclCommProperties_t props = NCCL_COMM_PROPERTIES_INITIALIZER;
        OK(ncclCommQueryProperties(comms[r], &props));
        CHECK(props.size == sizeof props && props.rank == r && props.nRanks == N && props.cudaDev == r);
        CHECK(!props.deviceApiSupport && !props.multimemSupport && props.nLsaTeams == 1 && props.hostRmaSupport == 1 && props.commHash != 0);
        /* Shorter, as callers of older versions have it. */
        ncclCommProperties_t old = NCCL_COMM_PROPERTIES_INITIALIZER;
        old.size = offsetof(ncclCommProperties_t, commHash);
        old.commHash = 77;
        OK(ncclCommQueryProperties(comms[r], &old));
        CHECK(old.nRanks == N && old.commHash == 77);
        old.magic = 0;
        IS(ncclInvalidArgument, ncclCommQueryProperties(comms[r], &old));
        ncclTeam_t world = ncclTeamWorld(comms[r]), lsa = ncclTeamLsa(comms[r]), rail = ncclTeamRail(comms[r]);
        CHECK(world.nRanks == N && world.rank == r && world.stride == 1);
        CHECK(lsa.nRanks == N && lsa.rank == r && lsa.stride == 1);
        CHECK(rail.nRanks == 1 && rail.rank == 0 && rail.stride == N);
        CHECK(ncclTeamRankToWorld(comms[r], world, 2) == 2 && ncclTeamRankToLsa(comms[r], lsa, 1) == 1);
        CHECK(ncclTeamRankToWorld(comms[r], rail, 0) == r);
        CHECK(ncclTeamCft(comms[r], NCCL_CFT_TEAM_FLAT).nRanks == 0);
        CHECK(strstr(ncclGetLastError(NULL), "not supported"));
        CHECK(ncclTeamCftMultimem(comms[r]).nRanks == 0);
    }
    CHECK(ncclTeamWorld(NULL).nRanks == 0);
    CHECK(ncclLLA2ACalcSlots(10, 8) == 10 && ncclLLA2ACalcSlots(3, 9) == 6);
    IS(ncclInvalidArgument, ncclCommQueryProperties(comms[0], NULL));

    char place[256];
    void* pointer;
    ncclTeam_t team = ncclTeamWorld(comms[0]);
    ncclMultimemHandle_t handle = {NULL};
    ncclCftLeId le;
    size_t offset;
#define DECLINED(call) SAYS(ncclInvalidUsage, "not supported", call)
    DECLINED(ncclDevCommCreate(comms[0], (void*)place, (void*)place));
    DECLINED(ncclDevCommDestroy(comms[0], (void*)place));
    DECLINED(ncclGetLsaMultimemDevicePointer((void*)place, 0, &pointer));
    DECLINED(ncclGetMultimemDevicePointer((void*)place, 0, handle, &pointer));
    DECLINED(ncclGetMultimemDeviceLeInfo((void*)place, 0, &le, &offset));
    DECLINED(ncclGetCftDeviceLeInfo((void*)place, 0, 0, team, &le, &offset));
    DECLINED(ncclGetPeerDeviceLeInfo((void*)place, 0, 0, &le, &offset));
    DECLINED(ncclLsaBarrierCreateRequirement(team, 1, (void*)place, (void*)place));
    DECLINED(ncclGinBarrierCreateRequirement(comms[0], team, 1, (void*)place, (void*)place));
    DECLINED(ncclLLA2ACreateRequirement(1, 1, (void*)place, (void*)place));
    DECLINED(ncclGinInboxA2ACreateRequirement(team, 1, 4, (void*)place, (void*)place));
    DECLINED(ncclGinOutboxCreateRequirement(1, 4, (void*)place, (void*)place));
    for (int r = 0; r < N; r++) OK(ncclCommDestroy(comms[r]));
}

static void simulate(void) {
    enum { N = 2 };
    ncclComm_t comms[N];
    static float data[N][100000];
    OK(ncclCommInitAll(comms, N, NULL));
    float times[3];
    for (int calls = 0; calls < 3; calls++) {
        ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
        data[0][0] = 42;
        OK(ncclGroupStart());
        for (int i = 0; i < calls; i++)
            for (int r = 0; r < N; r++) OK(ncclAllReduce(data[r], data[r], 100000, ncclFloat32, ncclSum, comms[r], NULL));
        OK(ncclGroupSimulateEnd(&info));
        times[calls] = info.estimatedTime;
        CHECK(data[0][0] == 42);
    }
    CHECK(times[0] == 0 && times[1] > 1 && times[1] < 1e5f && fabsf(times[2] - 2 * times[1]) < 1e-3f * times[2]);
    /* Nobody looks at a factor before a call runs that multiplies by it: it may lie where only the device can look. */
    void* nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ncclSimInfo_t product = NCCL_SIM_INFO_INITIALIZER;
    CHECK(nowhere != MAP_FAILED);
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
        ncclRedOp_t op;
        OK(ncclRedOpCreatePreMulSum(&op, nowhere, ncclFloat32, ncclScalarDevice, comms[r]));
        OK(ncclAllReduce(data[r], data[r], 100000, ncclFloat32, op, comms[r], NULL));
    }
    OK(ncclGroupSimulateEnd(&product));
    CHECK(product.estimatedTime > 1);
    /* Nothing is made in a group that is not run, and nobody is told that it was. */
    ncclComm_t parts[N];
    ncclSimInfo_t bad = NCCL_SIM_INFO_INITIALIZER;
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) OK(ncclCommSplit(comms[r], 0, 0, &parts[r], NULL));
    SAYS(ncclInvalidUsage, "making or changing", ncclGroupSimulateEnd(&bad));
    for (int r = 0; r < N; r++) {
        ncclResult_t state;
        OK(ncclCommGetAsyncError(parts[r], &state));
        CHECK(state == ncclInvalidUsage);
        OK(ncclCommAbort(parts[r]));
    }
    bad.magic = 0;
    OK(ncclGroupStart());
    IS(ncclInvalidArgument, ncclGroupSimulateEnd(&bad));
    IS(ncclInvalidUsage, ncclGroupSimulateEnd(NULL));
    for (int r = 0; r < N; r++) OK(ncclCommDestroy(comms[r]));
}

static void* keys_of_a_thread(void* keys) {
    int length;
    OK(ncclParamGetAllParameterKeys((const char***)keys, &length));
    return NULL;
}

static void parameters(void) {
    ncclParamHandle_t handle = NULL;
    IS(ncclInvalidArgument, ncclParamBind(&handle, "NCCL_NO_SUCH_THING"));
    IS(ncclInvalidArgument, ncclParamBind(&handle, NULL));
    IS(ncclInvalidArgument, ncclParamBind(NULL, "NCCL_DEBUG"));
    CHECK(handle == NULL);
    OK(ncclParamBind(&handle, "NCCL_NTHREADS"));
    int8_t i8;
    int16_t i16;
    int32_t i32;
    int64_t i64;
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
    const char* text;
    int length;
    SAYS(ncclInvalidArgument, "not set", ncclParamGetI32(handle, &i32));
    OK(ncclParamGetStr(handle, &text));
    CHECK(!*text);
    setenv("NCCL_NTHREADS", "200", 1);
    IS(ncclInvalidArgument, ncclParamGetI8(handle, &i8));
    OK(ncclParamGetI16(handle, &i16));
    OK(ncclParamGetI32(handle, &i32));
    OK(ncclParamGetI64(handle, &i64));
    OK(ncclParamGetU8(handle, &u8));
    OK(ncclParamGetU16(handle, &u16));
    OK(ncclParamGetU32(handle, &u32));
    OK(ncclParamGetU64(handle, &u64));
    CHECK(i16 == 200 && i32 == 200 && i64 == 200 && u8 == 200 && u16 == 200 && u32 == 200 && u64 == 200);
    setenv("NCCL_NTHREADS", "-0x3", 1);
    IS(ncclInvalidArgument, ncclParamGetI8(handle, &i8));
    setenv("NCCL_NTHREADS", "-3", 1);
    OK(ncclParamGetI8(handle, &i8));
    CHECK(i8 == -3);
    IS(ncclInvalidArgument, ncclParamGetU8(handle, &u8));
    OK(ncclParamGetStr(handle, &text));
    CHECK(!strcmp(text, "-3"));
    char room[4] = "zzz";
    IS(ncclInvalidArgument, ncclParamGet(handle, room, 1, &length));
    CHECK(length == 2);
    OK(ncclParamGet(handle, room, 4, &length));
    CHECK(length == 2 && !memcmp(room, "-3z", 3));
    OK(ncclParamGetParameter("NCCL_NTHREADS", &text, &length));
    CHECK(length == 2 && !strcmp(text, "-3"));
    IS(ncclInvalidArgument, ncclParamGetParameter("x", &text, &length));
    IS(ncclInvalidArgument, ncclParamGetI32(NULL, &i32));
    IS(ncclInvalidArgument, ncclParamGetI32(handle, NULL));
    const char** keys;
    int found = 0;
    OK(ncclParamGetAllParameterKeys(&keys, &length));
    for (int i = 0; i < length; i++) found += !strcmp(keys[i], "NCCL_NTHREADS") + !strcmp(keys[i], "CROSSWEFT_DEVICE");
    CHECK(found == 2);
    /* They stay when the thread that has asked for them is gone. */
    const char** others;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, keys_of_a_thread, &others) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(others == keys);
    ncclParamDumpAll();
}

/* ---- over and over ---- */

static long resident(void) {
    long pages = 0;
    FILE* file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
    fclose(file);
    return pages * 4;
}

static void over_and_over(void) {
    long before = 0;
    int files = entries("fd"), threads = entries("task");
    for (int round = 0; round < 100; round++) {
        ncclComm_t comms[2], parts[2];
        OK(ncclCommInitAll(comms, 2, NULL));
        float in[2] = {1, 2}, out[2];
        OK(ncclGroupStart());
        for (int r = 0; r < 2; r++) OK(ncclAllReduce(&in[r], &out[r], 1, ncclFloat32, ncclSum, comms[r], NULL));
        OK(ncclGroupEnd());
        CHECK(out[0] == 3 && out[1] == 3);
        if (round % 10 == 0) {
            OK(ncclGroupStart());
            for (int r = 0; r < 2; r++) OK(ncclCommSplit(comms[r], 0, 0, &parts[r], NULL));
            OK(ncclGroupEnd());
            OK(ncclCommDestroy(parts[0]));
            OK(ncclCommAbort(parts[1]));
        }
        OK(ncclCommDestroy(comms[0]));
        OK(ncclCommDestroy(comms[1]));
        if (round == 20) {
            settles("task", threads);
            before = resident();
        }
    }
    settles("fd", files);
    settles("task", threads);
    long after = resident();
    fprintf(stderr, "resident %ld KiB after 20 rounds, %ld after 100\n", before, after);
    /* Under valgrind or a sanitizer much of it is theirs. */
    if (after > before + 2048 && !getenv("CONFORMANCE_INSTRUMENTED")) FAIL("memory grew from %ld to %ld KiB", before, after);
}

static void threads_types(void) { in_threads(2, all_types_main); in_threads(3, all_types_main); }
static void threads_moves(void) { in_threads(3, moves_main); }
static void processes_moves(void) { in_processes(2, -1, moves_main); }
static void alone(void) { in_threads(1, moves_main); }
static void unaligned(void) { in_threads(2, unaligned_main); }
static void config_calls(void) { in_threads(2, config_calls_main); }
static void arguments(void) { in_threads(2, arguments_main); in_threads(5, too_much_main); }
static void ends_in_a_group(void) { in_threads(2, ends_in_a_group_main); }
static void several(void) { in_threads(3, several_main); }
static void aborted(void) { for (how_it_waits = 0; how_it_waits < 6; how_it_waits++) in_threads(2, abort_main); }
static void refused(void) { in_threads(2, refused_main); }
static void refused_prepared(void) { was_prepared = 1; in_threads(2, refused_main); }
static void refused_message(void) { in_threads(2, refused_message_main); }
static void refused_signal(void) { is_signal = 1; in_threads(2, refused_message_main); }
static void early(void) { in_threads(3, early_main); }
static void refused_split(void) { in_threads(2, refused_split_main); }
static void refused_grow(void) { in_threads(2, refused_grow_main); }
static void refused_window(void) { in_threads(2, refused_window_main); }
static void refused_once(void) { in_threads(2, refused_once_main); }
static void prepares(void) { in_threads(2, prepares_main); }
static void window_or_not(void) { in_threads(2, window_or_not_main); }
static void offsets(void) { in_threads(2, offsets_main); }
static void offsets_processes(void) { in_processes(2, -1, offsets_main); }
static void mismatch(void) {
    pthread_barrier_init(&all_have_noticed, NULL, 3);
    in_threads(3, mismatch_main);
}
static void split_killed(void) { in_processes(3, 1, split_killed_main); }
static void shrink(void) { in_threads(4, shrink_main); }
static void shrink_processes(void) { in_processes(4, -1, shrink_main); }
static void grow(void) { in_threads(4, grow_main); }
static void revoked(void) { in_threads(3, revoke_main); }
static void suspend(void) { in_threads(2, suspend_main); }
static void windows(void) { in_threads(2, windows_main); }
static void windows_processes(void) { in_processes(2, -1, windows_main); }

static void ring(void) { in_threads(3, ring_main); in_threads(1, ring_main); }
static void ring_processes(void) { in_processes(2, -1, ring_main); }
static void everybody(void) { in_threads(4, everybody_main); }
static void turns(void) { in_threads(2, turns_main); }
static void operations(void) { in_threads(2, operations_main); }
static void one_sided(void) { in_threads(3, one_sided_main); in_threads(1, one_sided_main); }
static void one_sided_processes(void) { in_processes(2, -1, one_sided_main); }
static void one_sided_killed(void) { in_processes(2, 1, one_sided_killed_main); }
static void forked_killed(void) { in_processes(2, 1, forked_killed_main); }
static void receive_killed(void) { in_processes(2, 1, receive_killed_main); }

#define CASE(name) {#name, name}

static const struct {
    const char* name;
    void (*run)(void);
} cases[] = {
    CASE(threads_sum),
    CASE(processes_sum),
    CASE(threads_types),
    CASE(threads_moves),
    CASE(processes_moves),
    CASE(alone),
    CASE(unaligned),
    CASE(config_calls),
    CASE(arguments),
    CASE(init_arguments),
    CASE(versions),
    CASE(debug_output),
    CASE(thread_ends),
    CASE(versions_differ),
    CASE(init_all),
    CASE(init_all_later),
    CASE(init_in_a_group),
    CASE(forked),
    CASE(init_all_fails),
    CASE(init_in_a_group_fails),
    CASE(ends_in_a_group),
    CASE(finalized_in_a_group),
    CASE(several),
    CASE(ring),
    CASE(ring_processes),
    CASE(everybody),
    CASE(turns),
    CASE(shared_receives),
    CASE(oneself),
    CASE(one_thread_sends),
    CASE(operations),
    CASE(one_sided),
    CASE(one_sided_processes),
    CASE(one_sided_killed),
    CASE(receive_killed),
    CASE(forked_killed),
    CASE(no_waiting),
    CASE(abort_init),
    CASE(aborted),
    CASE(killed),
    CASE(mismatch),
    CASE(refused),
    CASE(refused_prepared),
    CASE(refused_message),
    CASE(refused_signal),
    CASE(early),
    CASE(refused_split),
    CASE(refused_grow),
    CASE(refused_window),
    CASE(refused_once),
    CASE(prepares),
    CASE(window_or_not),
    CASE(offsets),
    CASE(offsets_processes),
    CASE(shrink),
    CASE(shrink_processes),
    CASE(split_again),
    CASE(split_killed),
    CASE(split_gone),
    CASE(grow),
    CASE(revoked),
    CASE(suspend),
    CASE(windows),
    CASE(windows_processes),
    CASE(memory),
    CASE(queries),
    CASE(simulate),
    CASE(parameters),
    CASE(over_and_over),
};

int main(int argc, char** argv) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (argc < 2) {
            puts(cases[i].name);
        } else if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            return 0;
        }
    }
    return argc < 2 ? 0 : 2;
}
