/* What the C tests share: ranks as threads or processes, and checks that say where they failed. */
#ifndef HARNESS_H
#define HARNESS_H

#define _GNU_SOURCE
#include <crossweft/nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FAIL(...) (fprintf(stderr, "%s:%d: ", __FILE__, __LINE__), fprintf(stderr, __VA_ARGS__), \
    fprintf(stderr, "\n"), _exit(1))
#define CHECK(condition) do { if (!(condition)) FAIL("failed: %s", #condition); } while (0)
/* The call returns this. */
#define IS(expected, call) do { \
    ncclResult_t got_ = (call); \
    if (got_ != (expected)) FAIL("%s: %d (%s), expected %d; %s", #call, got_, ncclGetErrorString(got_), (expected), \
        ncclGetLastError(NULL)); \
} while (0)
#define OK(call) IS(ncclSuccess, call)
/* The call returns this, and the words behind the error have these in them. */
#define SAYS(expected, words, call) do { \
    IS(expected, call); \
    if (!strstr(ncclGetLastError(NULL), (words))) FAIL("%s: no `%s` in: %s", #call, (words), ncclGetLastError(NULL)); \
} while (0)

#define MAX_RANKS 8

/* One rank of a case. */
struct rank {
    int rank, ranks;
    ncclUniqueId id;
    void (*main)(struct rank*);
};

static inline double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static inline void pause_ms(int ms) {
    struct timespec time = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&time, NULL);
}

static void* rank_thread(void* rank) {
    ((struct rank*)rank)->main(rank);
    return NULL;
}

/* Ranks that are threads of this process. */
static inline void in_threads(int ranks, void (*rank_main)(struct rank*)) {
    struct rank all[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    for (int i = 0; i < ranks; i++) {
        all[i] = (struct rank){i, ranks, id, rank_main};
        CHECK(pthread_create(&threads[i], NULL, rank_thread, &all[i]) == 0);
    }
    for (int i = 0; i < ranks; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Ranks that are processes; `dies` is a rank that kills itself, or -1. */
static inline void in_processes(int ranks, int dies, void (*rank_main)(struct rank*)) {
    int pipes[MAX_RANKS][2];
    pid_t pids[MAX_RANKS];
    for (int i = 0; i < ranks; i++) CHECK(pipe(pipes[i]) == 0);
    for (int i = 0; i < ranks; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] > 0) continue;
        struct rank rank = {i, ranks, {{0}}, rank_main};
        if (i == 0) {
            OK(ncclGetUniqueId(&rank.id));
            for (int j = 1; j < ranks; j++) CHECK(write(pipes[j][1], &rank.id, sizeof rank.id) == sizeof rank.id);
        } else {
            CHECK(read(pipes[i][0], &rank.id, sizeof rank.id) == sizeof rank.id);
        }
        rank_main(&rank);
        _exit(0);
    }
    for (int i = 0; i < ranks; i++) {
        int status;
        CHECK(waitpid(pids[i], &status, 0) == pids[i]);
        if (i == dies) CHECK(WIFSIGNALED(status));
        else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) FAIL("rank %d ended with status %x", i, status);
    }
}

#endif
