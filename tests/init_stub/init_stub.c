/* The driver's and the runtime's calls that `opusmon check init` makes, without a GPU.
 *
 * Memory is the host's and a kernel is a store, so that a replay that does not happen is seen. Calls that a capture
 * forbids answer 900 and invalidate it, by its mode. Told by its environment it also does what a driver should not:
 * STUB_FAIL=NAME=CODE, STUB_HANG=NAME, STUB_CRASH=NAME, STUB_EMPTY=1 (captures nothing), STUB_LOSE=1 (replays nothing).
 * It stands in a file of another name than libcuda.so, which others look for in the processes of the host.
 */
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
typedef unsigned int u32;

struct node {
    uint32_t *place;
    uint32_t value;
};
struct graph {
    size_t count;
    struct node nodes[64];
};
struct stream {
    int capturing, mode, invalid;
    struct graph *graph;
    struct stream *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams;
static volatile int initialised;
static __thread int current;
static __thread struct stream *own;

static result told(const char *name)
{
    const char *fail = getenv("STUB_FAIL"), *hang = getenv("STUB_HANG"), *crash = getenv("STUB_CRASH");
    size_t n = strlen(name);
    if (hang && !strcmp(hang, name))
        pause();
    if (crash && !strcmp(crash, name))
        raise(SIGSEGV);
    return fail && !strncmp(fail, name, n) && fail[n] == '=' ? atoi(fail + n + 1) : 0;
}

#define ENTER(name)                       \
    do {                                  \
        result code = told(name);         \
        if (code)                         \
            return code;                  \
    } while (0)
#define NEED_CONTEXT()     \
    do {                   \
        if (!initialised)  \
            return 3;      \
        if (!current)      \
            return 201;    \
    } while (0)

static struct stream *new_stream(void)
{
    struct stream *s = calloc(1, sizeof *s);
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    return s;
}

static struct stream *real(void *s)
{
    if ((uintptr_t)s != 2)
        return s;
    if (!own)
        own = new_stream();
    return own;
}

static __thread struct stream *mine; /* the stream that this thread captures */

/* A call that a global capture of any thread, or a thread-local one of this thread, forbids. */
static result unsafe(void)
{
    result code = 0;
    if (mine && mine->mode == 2)
        return 0;
    pthread_mutex_lock(&lock);
    for (struct stream *s = streams; s; s = s->next)
        if (s->capturing && (s->mode == 0 || (s == mine && s->mode == 1))) {
            s->invalid = 1;
            code = 900;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

result cuInit(u32 flags)
{
    ENTER("cuInit");
    initialised = 1;
    return 0;
}
result cuDriverGetVersion(int *v)
{
    *v = 13000;
    return 0;
}
result cuDeviceGetCount(int *n)
{
    *n = 1;
    return 0;
}
result cuDeviceGet(int *d, int number)
{
    ENTER("cuDeviceGet");
    *d = number;
    return initialised ? 0 : 3;
}
result cuDeviceGetName(char *name, int size, int device)
{
    snprintf(name, size, "Stub GPU");
    return 0;
}
result cuDeviceGetAttribute(int *out, int attribute, int device)
{
    *out = 0;
    return 0;
}
result cuDevicePrimaryCtxRetain(void **out, int device)
{
    ENTER("cuDevicePrimaryCtxRetain");
    *out = (void *)&initialised;
    return initialised ? 0 : 3;
}
result cuCtxSetCurrent(void *context)
{
    current = context != NULL;
    return 0;
}
result cuModuleGetLoadingMode(int *mode)
{
    const char *word = getenv("CUDA_MODULE_LOADING");
    *mode = word && !strcmp(word, "EAGER") ? 1 : 2;
    return 0;
}
result cuModuleLoadData(void **out, const char *image)
{
    ENTER("cuModuleLoadData");
    *out = (void *)image;
    return unsafe();
}
result cuModuleGetFunction(void **out, void *module, const char *name)
{
    *out = module;
    return 0;
}
#ifndef OLD
result cuLibraryLoadData(void **out, const char *image, void *a, void *b, u32 n, void *c, void *d, u32 m)
{
    ENTER("cuLibraryLoadData");
    *out = (void *)image;
    return 0;
}
result cuLibraryGetKernel(void **out, void *library, const char *name)
{
    ENTER("cuLibraryGetKernel");
    *out = library;
    return 0;
}
#endif
result cuLinkCreate_v2(u32 n, void *a, void *b, void **state)
{
    ENTER("cuLinkCreate_v2");
    *state = calloc(1, 16);
    return 0;
}
result cuLinkAddData_v2(void *state, int type, char *data, size_t size, const char *name, u32 n, void *a, void *b)
{
    *(char **)state = strdup(data);
    return type == 1 && size == strlen(data) + 1 ? 0 : 1;
}
result cuLinkComplete(void *state, void **out, size_t *size)
{
    *out = *(char **)state;
    *size = strlen(*out);
    return 0;
}
result cuStreamCreate(void **out, u32 flags)
{
    NEED_CONTEXT();
    *out = new_stream();
    return 0;
}
result cuStreamSynchronize(void *stream)
{
    ENTER("cuStreamSynchronize");
    return real(stream)->capturing ? 900 : 0;
}
static result begin(void *stream, int mode)
{
    struct stream *s = real(stream);
    s->graph = calloc(1, sizeof *s->graph);
    s->mode = mode;
    s->invalid = 0;
    pthread_mutex_lock(&lock);
    s->capturing = 1;
    pthread_mutex_unlock(&lock);
    mine = s;
    return 0;
}
static result end(void *stream, void **graph)
{
    struct stream *s = real(stream);
    if (!s->capturing)
        return 1;
    pthread_mutex_lock(&lock);
    s->capturing = 0;
    pthread_mutex_unlock(&lock);
    mine = NULL;
    *graph = s->graph;
    return s->invalid ? 901 : 0;
}
result cuStreamBeginCapture_v2(void *stream, int mode)
{
    ENTER("cuStreamBeginCapture_v2");
    NEED_CONTEXT();
    return begin(stream, mode);
}
result cuStreamEndCapture(void *stream, void **graph)
{
    ENTER("cuStreamEndCapture");
    return end(stream, graph);
}
result cuMemAlloc_v2(uint64_t *out, size_t size)
{
    ENTER("cuMemAlloc_v2");
    NEED_CONTEXT();
    *out = (uint64_t)calloc(1, size);
    return unsafe();
}
result cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    memcpy(to, (void *)from, size);
    return unsafe();
}
static result stored(void *stream, uint32_t *place, uint32_t value)
{
    struct stream *s = real(stream);
    if (!s->capturing)
        *place = value;
    else if (s->invalid)
        return 901;
    else if (!getenv("STUB_EMPTY"))
        s->graph->nodes[s->graph->count++] = (struct node){place, value};
    return 0;
}
result cuLaunchKernel(void *f, u32 a, u32 b, u32 c, u32 d, u32 e, u32 g, u32 shared, void *stream, void **params,
                      void **extra)
{
    ENTER("cuLaunchKernel");
    NEED_CONTEXT();
    return stored(stream, *(uint32_t **)params[0], *(uint32_t *)params[1]);
}
static result nodes(struct graph *graph, size_t *count)
{
    *count = graph->count;
    return 0;
}
static result replay(struct graph *graph)
{
    for (size_t i = 0; i < graph->count && !getenv("STUB_LOSE"); i++)
        *graph->nodes[i].place = graph->nodes[i].value;
    return 0;
}
result cuGraphGetNodes(void *graph, void *out, size_t *count)
{
    return nodes(graph, count);
}
#ifndef OLD
result cuGraphInstantiateWithFlags(void **out, void *graph, uint64_t flags)
{
    ENTER("cuGraphInstantiateWithFlags");
    *out = graph;
    return 0;
}
#endif
result cuGraphInstantiate_v2(void **out, void *graph, void *node, char *log, size_t size)
{
    ENTER("cuGraphInstantiate_v2");
    *out = graph;
    return log == NULL && size == 0 ? 0 : 1;
}
result cuGraphLaunch(void *graph, void *stream)
{
    ENTER("cuGraphLaunch");
    return replay(graph);
}

static result awake(void)
{
    initialised = current = 1;
    return 0;
}
result cudaFree(void *place)
{
    ENTER("cudaFree");
    return awake();
}
result cudaSetDevice(int device)
{
    return awake();
}
result cudaMalloc(void **out, size_t size)
{
    ENTER("cudaMalloc");
    awake();
    *out = calloc(1, size);
    return unsafe();
}
result cudaMemset(void *place, int value, size_t size)
{
    memset(place, value, size);
    return 0;
}
result cudaDeviceSynchronize(void)
{
    return unsafe();
}
result cudaStreamSynchronize(void *stream)
{
    return real(stream)->capturing ? 900 : 0;
}
result cudaStreamBeginCapture(void *stream, int mode)
{
    ENTER("cudaStreamBeginCapture");
    awake();
    return begin(stream, mode);
}
result cudaStreamEndCapture(void *stream, void **graph)
{
    return end(stream, graph);
}
result cudaMallocAsync(void **out, size_t size, void *stream)
{
    *out = calloc(1, size);
    return stored(stream, *out, 0);
}
result cudaMemsetAsync(void *place, int value, size_t size, void *stream)
{
    return stored(stream, place, value);
}
result cudaFreeAsync(void *place, void *stream)
{
    return 0;
}
result cudaGraphGetNodes(void *graph, void *out, size_t *count)
{
    return nodes(graph, count);
}
result cudaGraphInstantiateWithFlags(void **out, void *graph, uint64_t flags)
{
    *out = graph;
    return 0;
}
result cudaGraphLaunch(void *graph, void *stream)
{
    return replay(graph);
}
