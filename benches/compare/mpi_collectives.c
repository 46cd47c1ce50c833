/* Collectives through MPI, measured as `crossweft bench` measures: the input is written anew before each
 * call, the ranks line up, a call takes as long as it takes the slowest rank. Sizes are of the larger of
 * input and output. COLLECTIVE as in `crossweft bench`.
 * usage: mpirun -n N mpi_collectives COLLECTIVE MIN MAX FACTOR ITERS (0: by size); prints one JSON object. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int iterations(long bytes) {
    if (bytes <= 65536) return 200;
    if (bytes <= 1048576) return 50;
    if (bytes <= 8388608) return 20;
    return 8;
}

enum collective { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, UNKNOWN };

static enum collective named(const char *name) {
    const char *names[] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"};
    for (int k = 0; k < UNKNOWN; k++)
        if (!strcmp(name, names[k])) return k;
    return UNKNOWN;
}

/* Element `i` of rank `r`'s input. */
static float value(long i, int r) { return (float)((i + r) % 7); }

/* Element `i` of `rank`'s output, where a block has `part` elements. */
static float expected(enum collective what, long i, int rank, int size, long part) {
    float sum = 0;
    switch (what) {
        case ALL_GATHER: return value(i % part, (int)(i / part));
        case ALL_TO_ALL: return value(rank * part + i % part, (int)(i / part));
        case BROADCAST: return value(i, 0);
        case REDUCE_SCATTER: i += rank * part; break;
        default: break;
    }
    for (int r = 0; r < size; r++) sum += value(i, r);
    return sum;
}

static void call(enum collective what, float *in, float *out, int count, int part) {
    MPI_Comm all = MPI_COMM_WORLD;
    switch (what) {
        case ALL_REDUCE: MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, all); break;
        case ALL_GATHER: MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, all); break;
        case REDUCE_SCATTER: MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, all); break;
        case ALL_TO_ALL: MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, all); break;
        /* Its one buffer is the root's input and the others' output. */
        default: MPI_Bcast(in, count, MPI_FLOAT, 0, all); break;
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    enum collective what = argc == 6 ? named(argv[1]) : UNKNOWN;
    if (what == UNKNOWN) {
        fprintf(stderr, "usage: mpi_collectives COLLECTIVE MIN MAX FACTOR ITERS\n");
        MPI_Finalize();
        return 2;
    }
    argv++;
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    long min = atol(argv[1]), max = atol(argv[2]), factor = atol(argv[3]);
    int asked = atoi(argv[4]);
    float *data = aligned_alloc(4096, (size_t)max + 4096), *in = aligned_alloc(4096, (size_t)max + 4096),
          *out = aligned_alloc(4096, (size_t)max + 4096);
    if (!data || !in || !out) MPI_Abort(MPI_COMM_WORLD, 2);
    memset(out, 0, max);
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    for (char *c = version; *c; c++)
        if (*c == '"' || *c == '\\' || *c < ' ') { *c = 0; break; }
    if (rank == 0) printf("{\"version\": \"%s\", \"rows\": [", version);
    const char *separator = "";
    for (long bytes = min; bytes <= max; bytes *= factor) {
        int count = (int)(bytes / 4), n = asked ? asked : iterations(bytes), warm = n / 10 < 1 ? 1 : n / 10;
        double *times = malloc(n * sizeof *times), *slowest = malloc(n * sizeof *slowest);
        int part = count / size;
        long inputs = what == ALL_GATHER ? part : count, outputs = what == REDUCE_SCATTER ? part : count;
        for (long i = 0; i < inputs; i++) data[i] = value(i, rank);
        for (int i = -warm; i < n; i++) {
            memcpy(in, data, (size_t)inputs * 4);
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            call(what, in, out, count, part);
            double time = MPI_Wtime() - start;
            if (i >= 0) times[i] = time * 1e6;
        }
        long wrong = 0;
        float *result = what == BROADCAST ? in : out;
        for (long i = 0; i < outputs; i++) wrong += result[i] != expected(what, i, rank, size, part);
        MPI_Reduce(times, slowest, n, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            qsort(slowest, n, sizeof *slowest, by_value);
            printf("%s{\"bytes\": %ld, \"time_us_p50\": %f, \"time_us_min\": %f, \"wrong\": %ld}", separator,
                   bytes, slowest[n / 2], slowest[0], wrong);
            separator = ", ";
        }
        free(times);
        free(slowest);
    }
    if (rank == 0) printf("]}\n");
    MPI_Finalize();
    return 0;
}
