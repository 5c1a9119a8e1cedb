/* A libcuda.so.1 without a GPU: the exported names and calling conventions of the driver, for probes to hit.
 *
 * Compiled so that each function begins with push %rbp; mov %rsp,%rbp, as the driver's do. Waits, taking memory,
 * loading code and setting up last stub_wait_ns; polls answer NOT_READY while stub_not_ready counts down; all calls
 * return stub_code of their thread. With SMALL there are two functions only.
 */
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef int result;
typedef void *stream;
typedef unsigned int u32;

#define API __attribute__((visibility("default")))

API int64_t stub_wait_ns = 0;
API volatile long stub_not_ready = 0;
API __thread result stub_code = 0;

API void stub_set_code(result code)
{
    stub_code = code;
}

static volatile uint64_t touched;

static result done(uint64_t value)
{
    touched = value;
    return stub_code;
}

static result block(void)
{
    struct timespec left = {stub_wait_ns / 1000000000, stub_wait_ns % 1000000000};
    if (stub_wait_ns > 0)
        nanosleep(&left, NULL);
    return done(1);
}

#ifndef SMALL
static result answer(void)
{
    if (stub_not_ready > 0) {
        stub_not_ready--;
        return 600;
    }
    return stub_code;
}
#endif

struct config {
    u32 grid[3], block[3], shared;
    stream s;
    void *attributes;
    u32 count;
};

#define LAUNCH(name)                                                                                              \
    API result name(void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, stream s, void **params, \
                    void **extra)                                                                                 \
    {                                                                                                             \
        return done((uint64_t)s + gx + shared);                                                                   \
    }
LAUNCH(cuLaunchKernel)
#ifndef SMALL
LAUNCH(cuLaunchKernel_ptsz)

API result cuLaunchCooperativeKernel(void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, stream s,
                                     void **params)
{
    return done((uint64_t)s + gx + shared + 1);
}

API result cuLaunchKernelEx(const struct config *c, void *f, void **params, void **extra)
{
    return done((uint64_t)c);
}
API result cuLaunchKernelEx_ptsz(const struct config *c, void *f, void **params, void **extra)
{
    return done((uint64_t)c + 1);
}

#endif

#define HANDLE(name, act)    \
    API result name(void *a) \
    {                        \
        return act;          \
    }
HANDLE(cuStreamSynchronize, block())
#ifndef SMALL

#define HANDLES(name, act)           \
    API result name(void *a, void *b) \
    {                                \
        return act;                  \
    }
HANDLES(cuGraphLaunch, done(2))
HANDLES(cuGraphLaunch_ptsz, done(3))
HANDLES(cuEventRecord, done(4))
HANDLES(cuEventRecord_ptsz, done(5))
HANDLES(cuMemcpy2DAsync_v2, done(6))
HANDLES(cuMemcpy3DAsync_v2, done(7))

HANDLE(cuStreamSynchronize_ptsz, block())
HANDLE(cuEventSynchronize, block())
HANDLE(cuMemcpy2D_v2, block())
HANDLE(cuStreamQuery, answer())
HANDLE(cuStreamQuery_ptsz, answer())
HANDLE(cuEventQuery, answer())

API result cuCtxSynchronize(void)
{
    return block();
}

#define COPY(name, act)                                             \
    API result name(uint64_t to, uint64_t from, size_t n, stream s) \
    {                                                               \
        return act;                                                 \
    }
COPY(cuMemcpyHtoDAsync_v2, done(n))
COPY(cuMemcpyHtoDAsync_v2_ptsz, done(n + 1))
COPY(cuMemcpyDtoHAsync_v2, done(n + 2))
COPY(cuMemcpyDtoDAsync_v2, done(n + 3))
COPY(cuMemcpyAsync, done(n + 4))

#define WAITING_COPY(name)                                \
    API result name(uint64_t to, uint64_t from, size_t n) \
    {                                                     \
        return block();                                   \
    }
WAITING_COPY(cuMemcpyHtoD_v2)
WAITING_COPY(cuMemcpyDtoH_v2)
WAITING_COPY(cuMemcpyDtoH_v2_ptds)

API result cuMemcpyPeerAsync(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t n, stream s)
{
    return done(n);
}

#define SLOW(name)                                                          \
    API result name(uint64_t a, uint64_t b, uint64_t c, uint64_t d)         \
    {                                                                       \
        return block();                                                     \
    }
SLOW(cuMemAlloc_v2)
SLOW(cuMemFree_v2)
SLOW(cuMemAllocAsync)
SLOW(cuMemAllocAsync_ptsz)
SLOW(cuMemCreate)
SLOW(cuModuleLoad)
SLOW(cuModuleLoadData)
SLOW(cuModuleLoadDataEx)
SLOW(cuModuleLoadFatBinary)
SLOW(cuLibraryLoadData)
SLOW(cuFuncLoad)
SLOW(cuInit)
SLOW(cuDevicePrimaryCtxRetain)
SLOW(cuCtxCreate_v2)
SLOW(cuCtxCreate_v4)

HANDLES(cuStreamBeginCapture_v2, done(8))
HANDLES(cuStreamBeginCapture_v2_ptsz, done(9))
HANDLES(cuStreamBeginCaptureToGraph, done(10))
HANDLES(cuStreamEndCapture, done(11))
HANDLES(cuStreamEndCapture_ptsz, done(12))
HANDLES(cuStreamWaitEvent, done(13))

API result cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, stream s)
{
    return done(n + 5);
}
#endif
