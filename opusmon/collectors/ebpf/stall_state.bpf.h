/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* What the programs of stalls.bpf.c share: types, maps, and what several of them do with these. */
#pragma once

#include "cuda.bpf.h"

#define UNKNOWN 0xffffffffffffffffULL
#define CAPTURE_LIMIT_NS 600000000000ULL /* a capture that never ended (its stream was destroyed) counts no longer */
#define REAL_INIT_NS 1000000ULL        /* cuInit and retaining a context that is there take microseconds */
#define STACK_EVERY_NS 1000000ULL      /* of a thread that blocks more often, not every stack is taken: */
#define STACK_BURST_NS 50000000ULL     /* 50 at once, then one a millisecond */
#define SYSCALL_FUTEX_WAITV 449
#define CLONE_THREAD 0x10000
#define COMPILERS 16
#define RUNS 16
#define STACK_FLAGS (BPF_F_USER_STACK | BPF_F_REUSE_STACKID)

enum { HIT_LAUNCH, HIT_POLL, HIT_ALWAYS, HIT_SWITCH, HIT_OTHER, LOST_RING, LOST_MAP, LOST_READ, SLOTS };
enum { WAIT = 1, OFF_CPU, RUN_QUEUE, FUTEX, JIT, CAPTURE, INIT, TLS };
enum { OF_CUDA = 1, OF_TLS = 2 };
enum { NOT_BEGUN = 1, NO_BEGIN = 2, CODE_KNOWN = 4 };

/* The order is that of CALLS in symbols.py. */
enum {
    cuStreamSynchronize = 1,
    cuEventSynchronize,
    cuCtxSynchronize,
    cuMemcpyHtoD_v2,
    cuMemcpyDtoH_v2,
    cuMemcpy,
    cuMemcpy2D_v2,
    cuMemcpy3D_v2,
    cuMemAlloc_v2,
    cuMemAllocAsync,
    cuMemCreate,
    cuMemFree_v2,
    cuModuleLoad,
    cuModuleLoadData,
    cuModuleLoadDataEx,
    cuModuleLoadFatBinary,
    cuLibraryLoadData,
    cuFuncLoad,
    cuInit,
    cuDevicePrimaryCtxRetain,
    cuCtxCreate,
    cuStreamBeginCapture_v2,
    cuStreamBeginCaptureToGraph,
    cuStreamEndCapture,
    cuGraphLaunch,
    cuLaunchKernel,
    cuLaunchKernelEx,
    cuLaunchCooperativeKernel,
    cuMemcpyHtoDAsync_v2,
    cuMemcpyDtoHAsync_v2,
    cuMemcpyDtoDAsync_v2,
    cuMemcpyAsync,
    cuMemsetD8Async,
    cuMemsetD32Async,
    cuEventRecord,
    cuStreamWaitEvent,
    cuStreamQuery,
    cuEventQuery,
    SSL_do_handshake,
};

struct event_t {
    u64 t, dur, stream, size;
    u32 kind, call, tgid, tid;
    s32 code, stack;
    u32 state;
    s32 syscall;
    u32 by_tid, by_call;
    s32 by_code;
    u32 flags;
    char comm[16], by_comm[16];
};

struct thread_t {
    u64 off_at, woken_at, stack_at;
    u32 tgid, state;
    s32 stack, syscall;
};

struct call_t {
    u64 start, stream, size;
    u32 call, waits;
};

/* by_*: the first call that failed with a code of captures while one was open */
struct proc_t {
    u64 faults, active_at, begun_at, by_t;
    u32 capturing, by_tid, by_call;
    s32 by_code, by_stack;
    u32 pad;
    char by_comm[16];
};

struct of_stream_t {
    u32 tgid, pad;
    u64 stream;
};

struct capture_t {
    u64 begun;
    u32 tid, pad;
    char comm[16];
};

struct run_t {
    u32 call, times;
    u64 stream;
};

struct recent_t {
    u64 n;
    struct run_t runs[RUNS];
};

struct slow_key_t {
    u32 tid, call, epoch, pad;
};

struct slow_t {
    u64 n, dur, longest, size, last, failed;
    u32 tgid;
    s32 stack;
    char comm[16];
};

struct job_t {
    u64 start;
    u32 root, pad;
    char comm[16];
};

struct tls_t {
    u64 first, last;
    u32 tid, tries;
    s32 code;
    u32 pad;
    char comm[16];
};

struct name_t {
    u64 a, b;
};

struct control_t {
    u64 epoch, threshold, tls_threshold, exit_code_at;
};

RING_MAP(ring, RING_PAGES);
STACK_MAP(stacks, MAX_STACKS);
ARRAY_MAP(control, struct control_t, 1);
ARRAY_MAP(compilers, struct name_t, COMPILERS);
ARRAY_MAP(blank, struct recent_t, 1);
PERCPU_ARRAY_MAP(counts, u64, SLOTS);
HASH_MAP(watched, u32, u32, MAX_PROCESSES);
HASH_MAP(procs, u32, struct proc_t, MAX_PROCESSES);
LRU_HASH_MAP(threads, u32, struct thread_t, MAX_THREADS);
LRU_HASH_MAP(calls, u64, struct call_t, MAX_CALLS);
LRU_HASH_MAP(events, struct of_stream_t, u64, MAX_CALLS);
LRU_HASH_MAP(captures, struct of_stream_t, struct capture_t, 1024);
LRU_HASH_MAP(recent, u32, struct recent_t, 1024);
LRU_HASH_MAP(broken, u64, struct recent_t, 256);
HASH_MAP(slow, struct slow_key_t, struct slow_t, MAX_CALLS);
LRU_HASH_MAP(kin, u32, u32, MAX_CALLS);
LRU_HASH_MAP(jobs, u32, struct job_t, 1024);
LRU_HASH_MAP(handshakes, struct of_stream_t, struct tls_t, MAX_CALLS);
LRU_HASH_MAP(shaking, u64, u64, MAX_CALLS);

static __always_inline void count(int slot)
{
    u64 *n = MAP_LOOKUP(counts, &slot);
    if (n)
        __sync_fetch_and_add(n, 1);
}

static __always_inline struct control_t *settings(void)
{
    int zero = 0;
    return MAP_LOOKUP(control, &zero);
}

static __always_inline struct event_t *reserve(u32 kind, u64 t, u64 dur, u32 tgid, u32 tid)
{
    struct event_t *e = RING_RESERVE(ring, struct event_t);
    if (!e) {
        count(LOST_RING);
        return 0;
    }
    __builtin_memset(e, 0, sizeof(*e));
    e->t = t;
    e->dur = dur;
    e->stream = WHOLE_CONTEXT;
    e->size = UNKNOWN;
    e->kind = kind;
    e->tgid = tgid;
    e->tid = tid;
    e->stack = -1;
    e->syscall = -1;
    return e;
}

static __always_inline void submit(struct event_t *e)
{
    RING_SUBMIT(ring, e, BPF_RB_NO_WAKEUP);
}

static __always_inline struct proc_t *process_of(u32 tgid)
{
    struct proc_t *p = MAP_LOOKUP(procs, &tgid);
    if (p)
        return p;
    struct proc_t fresh;
    __builtin_memset(&fresh, 0, sizeof(fresh));
    MAP_INSERT(procs, &tgid, &fresh);
    p = MAP_LOOKUP(procs, &tgid);
    if (!p)
        count(LOST_MAP);
    return p;
}

static __always_inline void watch(u64 id)
{
    u32 tid = id;
    struct thread_t *t = MAP_LOOKUP(threads, &tid);
    if (t)
        return;
    struct thread_t fresh;
    __builtin_memset(&fresh, 0, sizeof(fresh));
    fresh.tgid = id >> 32;
    if (MAP_UPDATE(threads, &tid, &fresh))
        count(LOST_MAP);
}

static __always_inline int is_capturing(struct proc_t *p, u64 now)
{
    return p->capturing && now - p->begun_at < CAPTURE_LIMIT_NS;
}

/* The calls of a thread that captures, until one of any thread has broken it */
static __always_inline void note(struct proc_t *p, u32 tid, u32 call, u64 stream)
{
    if (!p->capturing || p->by_t)
        return;
    struct recent_t *r = MAP_LOOKUP(recent, &tid);
    if (!r)
        return;
    struct run_t *last = &r->runs[(r->n - 1) & (RUNS - 1)];
    if (r->n && last->call == call && last->stream == stream) {
        last->times++;
        return;
    }
    struct run_t *next = &r->runs[r->n & (RUNS - 1)];
    next->call = call;
    next->times = 1;
    next->stream = stream;
    r->n++;
}

static __always_inline int is_of_captures(s32 code)
{
    return code >= 900 && code <= 908;
}

static __always_inline void suspect(struct pt_regs *ctx, struct proc_t *p, u64 id, u32 call, s32 code, u64 now)
{
    if (!is_of_captures(code) || p->by_t || !is_capturing(p, now))
        return;
    p->by_t = now;
    p->by_tid = id;
    p->by_call = call;
    p->by_code = code;
    p->by_stack = STACK_ID(stacks, ctx, STACK_FLAGS);
    bpf_get_current_comm(&p->by_comm, sizeof(p->by_comm));
}
