/* Rate at which 1..N threads read memory: each sums its own part of one buffer with vector loads.
 *
 *     cc -O3 -march=native -pthread read_bandwidth.c -o read_bandwidth
 *     ./read_bandwidth MIB RUNS THREADS...          the best of RUNS
 *
 * Prints one line for each thread count: `THREADS GB/s`, 1 GB = 1e9 bytes. Eight independent sums of 64 bytes hide the
 * add's latency; the sum is printed to stderr so that the loads cannot be dropped.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t lanes __attribute__((vector_size(64)));
enum { SUMS = 8 };

struct part {
    const lanes *from;
    size_t count;
    uint64_t sum;
    pthread_barrier_t *start;
};

static void *read_part(void *given) {
    struct part *part = given;
    lanes sums[SUMS];
    memset(sums, 0, sizeof sums);
    pthread_barrier_wait(part->start);
    for (size_t i = 0; i + SUMS <= part->count; i += SUMS)
        for (int s = 0; s < SUMS; s++)
            sums[s] += part->from[i + s];
    for (int s = 0; s < SUMS; s++)
        for (int lane = 0; lane < 8; lane++)
            part->sum += sums[s][lane];
    return NULL;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s MIB RUNS THREADS...\n", argv[0]);
        return 2;
    }
    size_t bytes = strtoull(argv[1], NULL, 10) << 20;
    int runs = atoi(argv[2]);
    lanes *buffer = aligned_alloc(1 << 21, bytes);
    if (!buffer) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        return 4;
    }
    memset(buffer, 1, bytes);
    uint64_t check = 0;
    for (int at = 3; at < argc; at++) {
        int threads = atoi(argv[at]);
        if (threads < 1 || threads > 256) {
            fprintf(stderr, "%s threads: give 1 to 256\n", argv[at]);
            return 2;
        }
        double best = 0;
        for (int run = 0; run < runs; run++) {
            pthread_t ids[256];
            struct part parts[256];
            pthread_barrier_t start;
            pthread_barrier_init(&start, NULL, threads + 1);
            size_t each = bytes / sizeof(lanes) / threads;
            for (int t = 0; t < threads; t++) {
                parts[t] = (struct part){buffer + t * each, each, 0, &start};
                pthread_create(&ids[t], NULL, read_part, &parts[t]);
            }
            /* The clock starts before the gate opens: this thread may be scheduled only after the readers began. */
            double began = now();
            pthread_barrier_wait(&start);
            for (int t = 0; t < threads; t++) {
                pthread_join(ids[t], NULL);
                check += parts[t].sum;
            }
            double rate = (double)(each * threads * sizeof(lanes)) / (now() - began) / 1e9;
            if (rate > best)
                best = rate;
            pthread_barrier_destroy(&start);
        }
        printf("%d %.3f\n", threads, best);
    }
    fprintf(stderr, "sum %llu\n", (unsigned long long)check);
    free(buffer);
    return 0;
}
