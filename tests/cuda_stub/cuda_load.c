/* Drives a libcuda as told on stdin, one command a line, and answers each with the nanoseconds it took.
 *
 *   kernel|kernel_ptsz|coop|ex|ex_ptsz N STREAM    launches
 *   graph|graph_ptsz N STREAM
 *   threads N STREAM THREADS                       cuLaunchKernel, N by each thread at once
 *   paced N STREAM NS                              cuLaunchKernel with NS of work before each
 *   h2d|h2d_ptsz|d2h|d2d|any|peer N BYTES STREAM   asynchronous copies
 *   h2d_sync|d2h_sync|d2h_sync_ptds N BYTES        synchronous copies
 *   box2d N FROM TO WIDTH HEIGHT STREAM            cuMemcpy2DAsync; memory kinds 1 host, 2 device
 *   record EVENT STREAM, wait_event N EVENT NS, wait N STREAM NS, wait_ptsz N STREAM NS, wait_context N NS
 *   poll N STREAM READY_AFTER                      cuStreamQuery; the first READY_AFTER answers are NOT_READY
 *   call NAME A B C CODE NS                        any function; it returns CODE, and takes NS if it blocks
 *   from THREAD NAME A B C CODE NS                 the same in a thread of that name; its id is printed instead
 *   futex NS                                       wait for another thread, which wakes this one
 *   faults N                                       touch N fresh pages
 *   run PATH ARGUMENT                              a child process, to its end
 *   spin NS                                        work
 *   sleep NS, name THREAD_NAME, exec PATH LIBRARY, bad_config
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int (*f1)(u64);
typedef int (*f2)(u64, u64);
typedef int (*f4)(u64, u64, u64, u64);
typedef int (*f6)(u64, u64, u64, u64, u64, u64);
typedef int (*f11)(u64, int, int, int, int, int, int, int, u64, void *, void *);

static void *library;

static void *entry(const char *name)
{
    void *f = dlsym(library, name);
    if (!f) {
        fprintf(stderr, "no %s\n", name);
        exit(3);
    }
    return f;
}

static u64 now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct config {
    unsigned grid[3], block[3], shared;
    u64 stream;
    void *attributes;
    unsigned count;
};

static int is(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

static void many1(const char *name, u64 n, u64 a)
{
    f1 f = (f1)entry(name);
    while (n--)
        f(a);
}

static void many2(const char *name, u64 n, u64 b)
{
    f2 f = (f2)entry(name);
    while (n--)
        f(7, b);
}

static void many4(const char *name, u64 n, u64 bytes, u64 s)
{
    f4 f = (f4)entry(name);
    while (n--)
        f(0, 0, bytes, s);
}

static void kernels(const char *name, u64 n, u64 s)
{
    f11 f = (f11)entry(name);
    while (n--)
        f(1, 1, 1, 1, 32, 1, 1, 0, s, 0, 0);
}

static u64 shared_job[2];

static void *of_thread(void *unused)
{
    (void)unused;
    kernels("cuLaunchKernel", shared_job[0], shared_job[1]);
    return NULL;
}

static void threads(u64 n, u64 s, u64 count)
{
    pthread_t them[16];
    shared_job[0] = n;
    shared_job[1] = s;
    for (u64 i = 0; i < count && i < 16; i++)
        pthread_create(&them[i], NULL, of_thread, NULL);
    for (u64 i = 0; i < count && i < 16; i++)
        pthread_join(them[i], NULL);
}

static void paced(u64 n, u64 s, u64 ns)
{
    f11 f = (f11)entry("cuLaunchKernel");
    while (n--) {
        for (u64 end = now() + ns; now() < end;)
            ;
        f(1, 1, 1, 1, 32, 1, 1, 0, s, 0, 0);
    }
}

static void waits_last(u64 ns)
{
    *(int64_t *)entry("stub_wait_ns") = (int64_t)ns;
}

static int launches(const char *w, const u64 *v)
{
    struct config c = {{1, 1, 1}, {32, 1, 1}, 0, v[1], 0, 0};
    if (is(w, "kernel"))
        kernels("cuLaunchKernel", v[0], v[1]);
    else if (is(w, "kernel_ptsz"))
        kernels("cuLaunchKernel_ptsz", v[0], v[1]);
    else if (is(w, "threads"))
        threads(v[0], v[1], v[2]);
    else if (is(w, "paced"))
        paced(v[0], v[1], v[2]);
    else if (is(w, "coop"))
        kernels("cuLaunchCooperativeKernel", v[0], v[1]);
    else if (is(w, "ex") || is(w, "ex_ptsz")) {
        f4 f = (f4)entry(is(w, "ex") ? "cuLaunchKernelEx" : "cuLaunchKernelEx_ptsz");
        for (u64 i = 0; i < v[0]; i++)
            f((u64)&c, 1, 0, 0);
    } else if (is(w, "bad_config"))
        ((f4)entry("cuLaunchKernelEx"))(0x10, 1, 0, 0);
    else if (is(w, "graph"))
        many2("cuGraphLaunch", v[0], v[1]);
    else if (is(w, "graph_ptsz"))
        many2("cuGraphLaunch_ptsz", v[0], v[1]);
    else
        return 0;
    return 1;
}

static void box2d(const u64 *v)
{
    unsigned char box[128] = {0};
    unsigned from = v[1], to = v[2];
    memcpy(box + 16, &from, 4);
    memcpy(box + 72, &to, 4);
    memcpy(box + 112, &v[3], 8);
    memcpy(box + 120, &v[4], 8);
    f2 f = (f2)entry("cuMemcpy2DAsync_v2");
    for (u64 i = 0; i < v[0]; i++)
        f((u64)box, v[5]);
}

static int copies(const char *w, const u64 *v)
{
    static const char *const names[][2] = {
        {"h2d", "cuMemcpyHtoDAsync_v2"},     {"h2d_ptsz", "cuMemcpyHtoDAsync_v2_ptsz"},
        {"d2h", "cuMemcpyDtoHAsync_v2"},     {"d2d", "cuMemcpyDtoDAsync_v2"},
        {"any", "cuMemcpyAsync"},            {"h2d_sync", "cuMemcpyHtoD_v2"},
        {"d2h_sync", "cuMemcpyDtoH_v2"},     {"d2h_sync_ptds", "cuMemcpyDtoH_v2_ptds"},
    };
    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        if (is(w, names[i][0])) {
            many4(names[i][1], v[0], v[1], v[2]);
            return 1;
        }
    if (is(w, "peer")) {
        f6 f = (f6)entry("cuMemcpyPeerAsync");
        for (u64 i = 0; i < v[0]; i++)
            f(0, 0, 0, 0, v[1], v[2]);
    } else if (is(w, "box2d"))
        box2d(v);
    else
        return 0;
    return 1;
}

static int waits(const char *w, const u64 *v)
{
    if (is(w, "wait") || is(w, "wait_ptsz") || is(w, "wait_event")) {
        waits_last(v[2]);
        many1(is(w, "wait")        ? "cuStreamSynchronize"
              : is(w, "wait_ptsz") ? "cuStreamSynchronize_ptsz"
                                   : "cuEventSynchronize",
              v[0], v[1]);
        waits_last(0);
    } else if (is(w, "wait_context")) {
        waits_last(v[1]);
        many1("cuCtxSynchronize", v[0], 0);
        waits_last(0);
    } else if (is(w, "record"))
        ((f2)entry("cuEventRecord"))(v[0], v[1]);
    else if (is(w, "poll")) {
        *(volatile long *)entry("stub_not_ready") = (long)v[2];
        many1("cuStreamQuery", v[0], v[1]);
    } else
        return 0;
    return 1;
}

struct job {
    char thread[16], name[64];
    u64 a, b, c, code, ns;
    long tid;
};

static void *do_job(void *at)
{
    struct job *j = at;
    void (*code)(int) = (void (*)(int))entry("stub_set_code");
    if (j->thread[0])
        prctl(PR_SET_NAME, j->thread);
    j->tid = syscall(SYS_gettid);
    f4 f = (f4)entry(j->name);
    waits_last(j->ns);
    code((int)j->code);
    f(j->a, j->b, j->c, 0);
    code(0);
    waits_last(0);
    return NULL;
}

static unsigned futex_word;
static u64 wake_after;

static void *waker(void *unused)
{
    struct timespec t = {(time_t)(wake_after / 1000000000), (long)(wake_after % 1000000000)};
    (void)unused;
    nanosleep(&t, NULL);
    __atomic_store_n(&futex_word, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &futex_word, FUTEX_WAKE, 1, NULL, NULL, 0);
    return NULL;
}

static void futex(u64 ns)
{
    pthread_t other;
    wake_after = ns;
    futex_word = 0;
    pthread_create(&other, NULL, waker, NULL);
    while (!__atomic_load_n(&futex_word, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &futex_word, FUTEX_WAIT, 0, NULL, NULL, 0);
    pthread_join(other, NULL);
}

static void faults(u64 pages)
{
    size_t size = pages * 4096;
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return;
    madvise(at, size, MADV_NOHUGEPAGE);
    for (u64 i = 0; i < pages; i++)
        at[i * 4096] = 1;
    munmap(at, size);
}

static void run(char *path, char *argument)
{
    char *words[] = {path, argument, NULL};
    pid_t child = fork();
    if (child == 0) {
        execv(path, words);
        _exit(127);
    }
    waitpid(child, NULL, 0);
}

static int events(const char *w, const char *line, const u64 *v)
{
    struct job j = {0};
    char a[512] = "", b[512] = "";
    if (is(w, "call") &&
        sscanf(line, "%*s %63s %lu %lu %lu %lu %lu", j.name, &j.a, &j.b, &j.c, &j.code, &j.ns) == 6)
        do_job(&j);
    else if (is(w, "from") && sscanf(line, "%*s %15s %63s %lu %lu %lu %lu %lu", j.thread, j.name, &j.a, &j.b, &j.c,
                                     &j.code, &j.ns) == 7) {
        pthread_t other;
        pthread_create(&other, NULL, do_job, &j);
        pthread_join(other, NULL);
        printf("%ld\n", j.tid);
        return 2;
    } else if (is(w, "futex"))
        futex(v[0]);
    else if (is(w, "faults"))
        faults(v[0]);
    else if (is(w, "run") && sscanf(line, "%*s %511s %511s", a, b) == 2)
        run(a, b);
    else if (is(w, "spin"))
        for (u64 end = now() + v[0]; now() < end;)
            ;
    else
        return 0;
    return 1;
}

static int others(const char *w, const char *line, const u64 *v)
{
    char a[512], b[512];
    if (is(w, "sleep")) {
        struct timespec t = {(time_t)(v[0] / 1000000000), (long)(v[0] % 1000000000)};
        nanosleep(&t, NULL);
    } else if (is(w, "name") && sscanf(line, "%*s %15s", a) == 1)
        prctl(PR_SET_NAME, a);
    else if (is(w, "exec") && sscanf(line, "%*s %511s %511s", a, b) == 2)
        execl(a, a, b, (char *)NULL);
    else
        return 0;
    return 1;
}

int main(int argc, char **argv)
{
    char line[1200], word[32];
    u64 v[6];
    setvbuf(stdout, NULL, _IOLBF, 0);
    setvbuf(stdin, NULL, _IONBF, 0);
    library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "which library?");
        return 2;
    }
    printf("ready %d\n", getpid());
    while (fgets(line, sizeof line, stdin)) {
        memset(v, 0, sizeof v);
        if (sscanf(line, "%31s %lu %lu %lu %lu %lu %lu", word, v, v + 1, v + 2, v + 3, v + 4, v + 5) < 1)
            continue;
        u64 start = now();
        int done = launches(word, v) || copies(word, v) || waits(word, v) || others(word, line, v);
        if (!done && !(done = events(word, line, v))) {
            printf("unknown %s\n", word);
            return 3;
        }
        if (done != 2)
            printf("%lu\n", now() - start);
    }
    return 0;
}
