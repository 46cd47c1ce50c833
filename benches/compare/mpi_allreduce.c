/* All-reduce through MPI, measured as `crossweft bench all-reduce` measures: the input is written anew
 * before each call, the ranks line up, a call takes as long as it takes the slowest rank.
 * usage: mpirun -n N mpi_allreduce MIN MAX FACTOR ITERS (0: by size); prints one JSON object. */
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

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 5) {
        fprintf(stderr, "usage: mpi_allreduce MIN MAX FACTOR ITERS\n");
        MPI_Finalize();
        return 2;
    }
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
        for (int i = 0; i < count; i++) data[i] = (float)((i + rank) % 7);
        for (int i = -warm; i < n; i++) {
            memcpy(in, data, bytes);
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            double time = MPI_Wtime() - start;
            if (i >= 0) times[i] = time * 1e6;
        }
        long wrong = 0;
        for (int i = 0; i < count; i++) {
            float sum = 0;
            for (int r = 0; r < size; r++) sum += (float)((i + r) % 7);
            wrong += out[i] != sum;
        }
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
