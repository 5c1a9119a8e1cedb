// SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause
/* What keeps threads that feed a GPU from doing so: single events into a ring, frequent ones added up per thread.
 *
 * Nothing goes to user space per launch. Threads are watched once they have called libcuda; `watched` (processes that
 * map it, and those whose TLS is looked at) and `control` are filled by user space. Compiled with
 *   STREAM_ON_STACK   byte offset from the stack pointer, at function entry, of the ninth argument
 *   SYSCALL_AT        byte offset in the kernel's pt_regs of the number of the system call
 *   SYSCALL_FUTEX     its number
 *   RING_PAGES, MAX_THREADS, MAX_CALLS, MAX_PROCESSES, MAX_STACKS   bounds of the maps
 */
#include "portable.bpf.h"

#define WHOLE_CONTEXT 0xffffffffffffffffULL
#define UNKNOWN 0xffffffffffffffffULL
#define CONFIG_STREAM 32               /* offsetof(CUlaunchConfig, hStream) */
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

/* CU_STREAM_LEGACY (1) is the null stream; in the _ptsz and _ptds variants null is the per-thread default (2). */
static __always_inline u64 known_as(u64 stream, int per_thread)
{
    if (stream == 1)
        return 0;
    return stream == 0 && per_thread ? 2 : stream;
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

/* Entries */

static __always_inline int seen(u32 call, u64 stream, int slot)
{
    u64 id = bpf_get_current_pid_tgid();
    count(slot);
    struct proc_t *p = process_of(id >> 32);
    if (!p)
        return 0;
    p->active_at = bpf_ktime_get_ns();
    watch(id);
    note(p, id, call, stream);
    return 0;
}

static __always_inline int begin(u32 call, u64 stream, u64 size, u32 waits)
{
    u64 id = bpf_get_current_pid_tgid();
    struct call_t c = {.start = bpf_ktime_get_ns(), .stream = stream, .size = size, .call = call, .waits = waits};
    count(HIT_ALWAYS);
    struct proc_t *p = process_of(id >> 32);
    if (!p)
        return 0;
    if (waits)
        p->active_at = c.start;
    watch(id);
    note(p, id, call, stream);
    if (MAP_UPDATE(calls, &id, &c))
        count(LOST_MAP);
    return 0;
}

static __always_inline int launch_at(u32 call, void *place, int per_thread)
{
    u64 stream = 0;
    if (bpf_probe_read_user(&stream, sizeof(stream), place)) {
        count(LOST_READ);
        stream = UNKNOWN;
    }
    return seen(call, known_as(stream, per_thread), HIT_LAUNCH);
}

static __always_inline u64 stream_of(u64 event)
{
    struct of_stream_t key = {.tgid = bpf_get_current_pid_tgid() >> 32, .stream = event};
    u64 *stream = MAP_LOOKUP(events, &key);
    return stream ? *stream : WHOLE_CONTEXT;
}

static __always_inline int recorded(u64 event, u64 stream)
{
    struct of_stream_t key = {.tgid = bpf_get_current_pid_tgid() >> 32, .stream = event};
    if (MAP_UPDATE(events, &key, &stream))
        count(LOST_MAP);
    return seen(cuEventRecord, stream, HIT_LAUNCH);
}

/* Returns. Each takes the call that its entry left; 0 where it began before the probe was there. */

static __always_inline int finish(u64 id, struct call_t *c)
{
    struct call_t *kept = MAP_LOOKUP(calls, &id);
    count(HIT_ALWAYS);
    if (!kept)
        return 0;
    *c = *kept;
    MAP_DELETE(calls, &id);
    return 1;
}

UPROBE int end_wait(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32;
    s32 code = PT_REGS_RC(ctx);
    struct call_t c;
    if (!finish(id, &c))
        return 0;
    struct proc_t *p = MAP_LOOKUP(procs, &tgid);
    if (p)
        suspect(ctx, p, id, c.call, code, now);
    struct control_t *s = settings();
    if (!s || now - c.start < s->threshold)
        return 0;
    s32 stack = STACK_ID(stacks, ctx, STACK_FLAGS);
    struct event_t *e = reserve(WAIT, now, now - c.start, tgid, id);
    if (!e)
        return 0;
    e->stream = c.stream;
    e->size = c.size;
    e->call = c.call;
    e->code = code;
    e->stack = stack;
    bpf_get_current_comm(&e->comm, sizeof(e->comm));
    submit(e);
    return 0;
}

static __always_inline void in_capture(struct pt_regs *ctx, u64 id, struct call_t *c, s32 code, u64 now)
{
    s32 stack = STACK_ID(stacks, ctx, STACK_FLAGS);
    struct event_t *e = reserve(INIT, now, now - c->start, id >> 32, id);
    if (!e)
        return;
    e->call = c->call;
    e->code = code;
    e->stack = stack;
    bpf_get_current_comm(&e->comm, sizeof(e->comm));
    submit(e);
}

static __always_inline struct slow_t *slow_of(u64 id, u32 call, u32 epoch)
{
    struct slow_key_t key = {.tid = id, .call = call, .epoch = epoch};
    struct slow_t *s = MAP_LOOKUP(slow, &key);
    if (s)
        return s;
    struct slow_t fresh;
    __builtin_memset(&fresh, 0, sizeof(fresh));
    fresh.tgid = id >> 32;
    fresh.stack = -1;
    bpf_get_current_comm(&fresh.comm, sizeof(fresh.comm));
    MAP_INSERT(slow, &key, &fresh);
    s = MAP_LOOKUP(slow, &key);
    if (!s)
        count(LOST_MAP);
    return s;
}

UPROBE int end_slow(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32;
    s32 code = PT_REGS_RC(ctx);
    struct call_t c;
    if (!finish(id, &c))
        return 0;
    struct control_t *set = settings();
    struct proc_t *p = MAP_LOOKUP(procs, &tgid);
    if (!set || !p)
        return 0;
    suspect(ctx, p, id, c.call, code, now);
    if (c.call >= cuModuleLoad && is_capturing(p, now))
        in_capture(ctx, id, &c, code, now);
    struct slow_t *s = slow_of(id, c.call, set->epoch);
    if (!s)
        return 0;
    u64 dur = now - c.start;
    s->n++;
    s->dur += dur;
    s->last = now;
    if (c.size != UNKNOWN)
        s->size += c.size;
    if (code)
        s->failed = (u32)code;
    if (dur >= s->longest) {
        s->longest = dur;
        s->stack = STACK_ID(stacks, ctx, STACK_FLAGS);
    }
    return 0;
}

UPROBE int end_init(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32;
    s32 code = PT_REGS_RC(ctx);
    struct call_t c;
    if (!finish(id, &c))
        return 0;
    struct proc_t *p = MAP_LOOKUP(procs, &tgid);
    if (!p || !is_capturing(p, now))
        return 0;
    suspect(ctx, p, id, c.call, code, now);
    if (c.call == cuCtxCreate || now - c.start >= REAL_INIT_NS || is_of_captures(code))
        in_capture(ctx, id, &c, code, now);
    return 0;
}

/* Captures */

static __always_inline void forget_culprit(struct proc_t *p)
{
    p->by_t = 0;
    p->by_tid = 0;
}

UPROBE int end_begin(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32, tid = id;
    int zero = 0;
    s32 code = PT_REGS_RC(ctx);
    struct call_t c;
    if (!finish(id, &c))
        return 0;
    struct proc_t *p = process_of(tgid);
    if (!p)
        return 0;
    if (code) {
        suspect(ctx, p, id, c.call, code, now);
        s32 stack = STACK_ID(stacks, ctx, STACK_FLAGS);
        struct event_t *e = reserve(CAPTURE, now, now - c.start, tgid, tid);
        if (!e)
            return 0;
        e->stream = c.stream;
        e->call = c.call;
        e->code = code;
        e->stack = stack;
        e->flags = NOT_BEGUN;
        bpf_get_current_comm(&e->comm, sizeof(e->comm));
        submit(e);
        return 0;
    }
    struct of_stream_t key = {.tgid = tgid, .stream = c.stream};
    struct capture_t fresh = {.begun = now, .tid = tid};
    bpf_get_current_comm(&fresh.comm, sizeof(fresh.comm));
    if (!is_capturing(p, now)) {
        p->capturing = 0;
        forget_culprit(p);
    }
    p->begun_at = now;
    if (MAP_INSERT(captures, &key, &fresh)) {
        if (MAP_UPDATE(captures, &key, &fresh))
            count(LOST_MAP);
        if (!p->capturing)
            p->capturing = 1;
    } else {
        __sync_fetch_and_add(&p->capturing, 1);
    }
    struct recent_t *empty = MAP_LOOKUP(blank, &zero);
    if (empty && MAP_UPDATE(recent, &tid, empty))
        count(LOST_MAP);
    return 0;
}

static __always_inline void close_capture(struct proc_t *p, u32 tid, u64 now, s32 code)
{
    if (code) {
        struct recent_t *r = MAP_LOOKUP(recent, &tid);
        if (r && MAP_UPDATE(broken, &now, r))
            count(LOST_MAP);
    }
    if (p->capturing)
        __sync_fetch_and_add(&p->capturing, -1);
}

UPROBE int end_end(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32, tid = id;
    s32 code = PT_REGS_RC(ctx);
    struct call_t c;
    if (!finish(id, &c))
        return 0;
    struct proc_t *p = process_of(tgid);
    if (!p)
        return 0;
    struct of_stream_t key = {.tgid = tgid, .stream = c.stream};
    struct capture_t *open = MAP_LOOKUP(captures, &key);
    struct capture_t was;
    __builtin_memset(&was, 0, sizeof(was));
    if (open)
        was = *open;
    s32 stack = STACK_ID(stacks, ctx, STACK_FLAGS);
    if (open && tid != was.tid) /* ended, rightly or not, by another thread than began it */
        suspect(ctx, p, id, c.call, code, now);
    struct event_t *e = reserve(CAPTURE, now, open ? now - was.begun : UNKNOWN, tgid, open ? was.tid : tid);
    if (e) {
        e->stream = c.stream;
        e->call = c.call;
        e->code = code;
        e->stack = stack;
        e->flags = open ? 0 : NO_BEGIN;
        if (code && open && p->by_t && p->by_t >= was.begun) {
            e->by_tid = p->by_tid;
            e->by_call = p->by_call;
            e->by_code = p->by_code;
            e->stack = p->by_stack;
            __builtin_memcpy(e->by_comm, p->by_comm, 16);
        }
        if (open)
            __builtin_memcpy(e->comm, was.comm, 16);
        else
            bpf_get_current_comm(&e->comm, sizeof(e->comm));
        submit(e);
    }
    if (open) {
        u32 by = was.tid;
        close_capture(p, by, now, code);
        MAP_DELETE(captures, &key);
        MAP_DELETE(recent, &by);
        if (!p->capturing)
            forget_culprit(p);
    }
    return 0;
}

/* Of calls too many to follow, only the result is looked at. */
static __always_inline int result(struct pt_regs *ctx, u32 call, int slot)
{
    s32 code = PT_REGS_RC(ctx);
    count(slot);
    if (!is_of_captures(code))
        return 0;
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32;
    struct proc_t *p = MAP_LOOKUP(procs, &tgid);
    if (p)
        suspect(ctx, p, id, call, code, bpf_ktime_get_ns());
    return 0;
}

/* One program per function and variant: `_pt` for those in which the null stream is the per-thread default */

#define ON(name, action)                   \
    UPROBE int on_##name(struct pt_regs *ctx) \
    {                                      \
        return action;                     \
    }
#define ARG(n) PT_REGS_PARM##n(ctx)

ON(cuStreamSynchronize, begin(cuStreamSynchronize, known_as(ARG(1), 0), UNKNOWN, 1))
ON(cuStreamSynchronize_pt, begin(cuStreamSynchronize, known_as(ARG(1), 1), UNKNOWN, 1))
ON(cuEventSynchronize, begin(cuEventSynchronize, stream_of(ARG(1)), UNKNOWN, 1))
ON(cuCtxSynchronize, begin(cuCtxSynchronize, WHOLE_CONTEXT, UNKNOWN, 1))
ON(cuMemcpyHtoD_v2, begin(cuMemcpyHtoD_v2, 0, ARG(3), 1))
ON(cuMemcpyHtoD_v2_pt, begin(cuMemcpyHtoD_v2, 2, ARG(3), 1))
ON(cuMemcpyDtoH_v2, begin(cuMemcpyDtoH_v2, 0, ARG(3), 1))
ON(cuMemcpyDtoH_v2_pt, begin(cuMemcpyDtoH_v2, 2, ARG(3), 1))
ON(cuMemcpy, begin(cuMemcpy, 0, ARG(3), 1))
ON(cuMemcpy_pt, begin(cuMemcpy, 2, ARG(3), 1))
ON(cuMemcpy2D_v2, begin(cuMemcpy2D_v2, 0, UNKNOWN, 1))
ON(cuMemcpy2D_v2_pt, begin(cuMemcpy2D_v2, 2, UNKNOWN, 1))
ON(cuMemcpy3D_v2, begin(cuMemcpy3D_v2, 0, UNKNOWN, 1))
ON(cuMemcpy3D_v2_pt, begin(cuMemcpy3D_v2, 2, UNKNOWN, 1))

ON(cuMemAlloc_v2, begin(cuMemAlloc_v2, WHOLE_CONTEXT, ARG(2), 0))
ON(cuMemAllocAsync, begin(cuMemAllocAsync, known_as(ARG(3), 0), ARG(2), 0))
ON(cuMemAllocAsync_pt, begin(cuMemAllocAsync, known_as(ARG(3), 1), ARG(2), 0))
ON(cuMemCreate, begin(cuMemCreate, WHOLE_CONTEXT, ARG(2), 0))
ON(cuMemFree_v2, begin(cuMemFree_v2, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoad, begin(cuModuleLoad, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoadData, begin(cuModuleLoadData, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoadDataEx, begin(cuModuleLoadDataEx, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuModuleLoadFatBinary, begin(cuModuleLoadFatBinary, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuLibraryLoadData, begin(cuLibraryLoadData, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuFuncLoad, begin(cuFuncLoad, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuInit, begin(cuInit, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuDevicePrimaryCtxRetain, begin(cuDevicePrimaryCtxRetain, WHOLE_CONTEXT, UNKNOWN, 0))
ON(cuCtxCreate, begin(cuCtxCreate, WHOLE_CONTEXT, UNKNOWN, 0))

/* Begin and end are no calls of the captured sequence. */
static __always_inline int capture(u32 call, u64 stream)
{
    u64 id = bpf_get_current_pid_tgid();
    struct call_t c = {.start = bpf_ktime_get_ns(), .stream = stream, .size = UNKNOWN, .call = call};
    count(HIT_ALWAYS);
    watch(id);
    if (MAP_UPDATE(calls, &id, &c))
        count(LOST_MAP);
    return 0;
}

ON(cuStreamBeginCapture_v2, capture(cuStreamBeginCapture_v2, known_as(ARG(1), 0)))
ON(cuStreamBeginCapture_v2_pt, capture(cuStreamBeginCapture_v2, known_as(ARG(1), 1)))
ON(cuStreamBeginCaptureToGraph, capture(cuStreamBeginCaptureToGraph, known_as(ARG(1), 0)))
ON(cuStreamBeginCaptureToGraph_pt, capture(cuStreamBeginCaptureToGraph, known_as(ARG(1), 1)))
ON(cuStreamEndCapture, capture(cuStreamEndCapture, known_as(ARG(1), 0)))
ON(cuStreamEndCapture_pt, capture(cuStreamEndCapture, known_as(ARG(1), 1)))

ON(cuGraphLaunch, seen(cuGraphLaunch, known_as(ARG(2), 0), HIT_ALWAYS))
ON(cuGraphLaunch_pt, seen(cuGraphLaunch, known_as(ARG(2), 1), HIT_ALWAYS))
ON(cuLaunchKernel, launch_at(cuLaunchKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 0))
ON(cuLaunchKernel_pt, launch_at(cuLaunchKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 1))
ON(cuLaunchKernelEx, launch_at(cuLaunchKernelEx, (void *)(ARG(1) + CONFIG_STREAM), 0))
ON(cuLaunchKernelEx_pt, launch_at(cuLaunchKernelEx, (void *)(ARG(1) + CONFIG_STREAM), 1))
ON(cuLaunchCooperativeKernel, launch_at(cuLaunchCooperativeKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 0))
ON(cuLaunchCooperativeKernel_pt, launch_at(cuLaunchCooperativeKernel, (void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 1))
ON(cuMemcpyHtoDAsync_v2, seen(cuMemcpyHtoDAsync_v2, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyHtoDAsync_v2_pt, seen(cuMemcpyHtoDAsync_v2, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemcpyDtoHAsync_v2, seen(cuMemcpyDtoHAsync_v2, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyDtoHAsync_v2_pt, seen(cuMemcpyDtoHAsync_v2, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemcpyDtoDAsync_v2, seen(cuMemcpyDtoDAsync_v2, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyDtoDAsync_v2_pt, seen(cuMemcpyDtoDAsync_v2, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemcpyAsync, seen(cuMemcpyAsync, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemcpyAsync_pt, seen(cuMemcpyAsync, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemsetD8Async, seen(cuMemsetD8Async, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemsetD8Async_pt, seen(cuMemsetD8Async, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuMemsetD32Async, seen(cuMemsetD32Async, known_as(ARG(4), 0), HIT_LAUNCH))
ON(cuMemsetD32Async_pt, seen(cuMemsetD32Async, known_as(ARG(4), 1), HIT_LAUNCH))
ON(cuEventRecord, recorded(ARG(1), known_as(ARG(2), 0)))
ON(cuEventRecord_pt, recorded(ARG(1), known_as(ARG(2), 1)))
ON(cuStreamWaitEvent, seen(cuStreamWaitEvent, known_as(ARG(1), 0), HIT_LAUNCH))
ON(cuStreamWaitEvent_pt, seen(cuStreamWaitEvent, known_as(ARG(1), 1), HIT_LAUNCH))

ON(cuLaunchKernel_result, result(ctx, cuLaunchKernel, HIT_LAUNCH))
ON(cuLaunchKernelEx_result, result(ctx, cuLaunchKernelEx, HIT_LAUNCH))
ON(cuLaunchCooperativeKernel_result, result(ctx, cuLaunchCooperativeKernel, HIT_LAUNCH))
ON(cuStreamQuery_result, result(ctx, cuStreamQuery, HIT_POLL))
ON(cuEventQuery_result, result(ctx, cuEventQuery, HIT_POLL))

/* The scheduler */

struct switch_t {
    u64 common;
    char prev_comm[16];
    s32 prev_pid, prev_prio;
    s64 prev_state;
    char next_comm[16];
    s32 next_pid, next_prio;
};

struct wakeup_t {
    u64 common;
    char comm[16];
    s32 pid, prio, target_cpu;
};

static __always_inline s32 syscall_now(void)
{
    struct task_struct *task = bpf_get_current_task_btf();
    char *regs = (char *)bpf_task_pt_regs(task);
    s32 number = -1;
    if (bpf_probe_read_kernel(&number, sizeof(number), regs + SYSCALL_AT))
        return -1;
    return number;
}

/* Of all threads of the host: nothing is done for those that are not watched. Not preempted here. */
static __always_inline void count_switch(void)
{
    int slot = HIT_SWITCH;
    u64 *n = MAP_LOOKUP(counts, &slot);
    if (n)
        *n += 1;
}

static __always_inline void leaves(struct switch_t *ctx, int regs)
{
    u32 tid = ctx->prev_pid;
    struct thread_t *t = MAP_LOOKUP(threads, &tid);
    if (!t)
        return;
    u64 now = bpf_ktime_get_ns();
    u32 state = ctx->prev_state;
    t->off_at = now;
    t->state = state;
    t->stack = -1;
    t->syscall = -1;
    t->woken_at = 0;
    if (regs)
        t->syscall = syscall_now();
    if (!(state & 0xff)) {
        t->woken_at = now;
        return;
    }
    if (t->stack_at + STACK_BURST_NS < now)
        t->stack_at = now - STACK_BURST_NS;
    if (t->stack_at + STACK_EVERY_NS > now)
        return;
    t->stack_at += STACK_EVERY_NS;
    t->stack = STACK_ID(stacks, ctx, STACK_FLAGS);
}

static __always_inline void of_thread(struct switch_t *ctx, struct thread_t *t, u32 kind, u64 at, u64 dur, u32 call)
{
    struct event_t *e = reserve(kind, at, dur, t->tgid, ctx->next_pid);
    if (!e)
        return;
    e->call = call;
    e->state = t->state;
    e->stack = t->stack;
    e->syscall = t->syscall;
    __builtin_memcpy(e->comm, ctx->next_comm, 16);
    submit(e);
}

static __always_inline void enters(struct switch_t *ctx)
{
    u32 tid = ctx->next_pid;
    struct thread_t *t = MAP_LOOKUP(threads, &tid);
    if (!t || !t->off_at)
        return;
    struct control_t *s = settings();
    u64 now = bpf_ktime_get_ns();
    if (!s)
        return;
    u64 off = t->off_at, up = t->woken_at > off ? t->woken_at : 0;
    t->off_at = 0;
    if (now - off < s->threshold)
        return;
    u64 id = (u64)t->tgid << 32 | tid;
    struct call_t *c = MAP_LOOKUP(calls, &id);
    u32 call = c ? c->call : 0;
    int runnable = !(t->state & 0xff);
    u64 since = runnable ? off : up ? up : now;
    /* Blocked inside a wait for the GPU: that wait is reported itself, when it ends. */
    if (!runnable && since - off >= s->threshold && !(c && c->waits)) {
        int futex = t->syscall == SYSCALL_FUTEX || t->syscall == SYSCALL_FUTEX_WAITV;
        of_thread(ctx, t, futex ? FUTEX : OFF_CPU, since, since - off, call);
    }
    if (now - since >= s->threshold)
        of_thread(ctx, t, RUN_QUEUE, now, now - since, call);
}

TRACEPOINT int on_switch(struct switch_t *ctx)
{
    count_switch();
    leaves(ctx, 1);
    enters(ctx);
    return 0;
}

/* For kernels without type information: system calls are not told */
TRACEPOINT int on_switch_plain(struct switch_t *ctx)
{
    count_switch();
    leaves(ctx, 0);
    enters(ctx);
    return 0;
}

TRACEPOINT int on_wakeup(struct wakeup_t *ctx)
{
    u32 tid = ctx->pid;
    count_switch();
    struct thread_t *t = MAP_LOOKUP(threads, &tid);
    if (t && t->off_at)
        t->woken_at = bpf_ktime_get_ns();
    return 0;
}

/* Page faults: counted per process that has called libcuda */

struct fault_t {
    u64 common, address, ip, error_code;
};

TRACEPOINT int on_fault(struct fault_t *ctx)
{
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    count(HIT_SWITCH);
    struct proc_t *p = MAP_LOOKUP(procs, &tgid);
    if (p)
        __sync_fetch_and_add(&p->faults, 1);
    return 0;
}

/* Compilers: descendants of watched processes, from exec to exit */

struct newtask_t {
    u64 common;
    s32 pid;
    char comm[16];
    u32 pad;
    u64 clone_flags;
};

struct exec_t {
    u64 common;
    u32 filename;
    s32 pid, old_pid;
};

struct exit_t {
    u64 common;
    char comm[16];
    s32 pid, prio;
};

static __always_inline u32 root_of(u32 tgid)
{
    u32 *root = MAP_LOOKUP(kin, &tgid);
    if (root)
        return *root;
    u32 *flags = MAP_LOOKUP(watched, &tgid);
    if (flags && *flags & OF_CUDA)
        return tgid;
    return MAP_LOOKUP(procs, &tgid) ? tgid : 0;
}

TRACEPOINT int on_newtask(struct newtask_t *ctx)
{
    count(HIT_OTHER);
    if (ctx->clone_flags & CLONE_THREAD)
        return 0;
    u32 child = ctx->pid, root = root_of(bpf_get_current_pid_tgid() >> 32);
    if (root && MAP_UPDATE(kin, &child, &root))
        count(LOST_MAP);
    return 0;
}

TRACEPOINT int on_exec(struct exec_t *ctx)
{
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    count(HIT_OTHER);
    u32 *root = MAP_LOOKUP(kin, &tgid);
    if (!root)
        return 0;
    struct job_t job = {.start = bpf_ktime_get_ns(), .root = *root};
    bpf_get_current_comm(&job.comm, sizeof(job.comm));
    struct name_t name;
    __builtin_memcpy(&name, job.comm, sizeof(name));
    int known = 0;
#pragma unroll
    for (int i = 0; i < COMPILERS; i++) {
        int slot = i;
        struct name_t *one = MAP_LOOKUP(compilers, &slot);
        if (one && one->a == name.a && one->b == name.b)
            known = 1;
    }
    if (!known)
        MAP_DELETE(jobs, &tgid);
    else if (MAP_UPDATE(jobs, &tgid, &job))
        count(LOST_MAP);
    return 0;
}

static __always_inline void job_ends(u32 tgid)
{
    struct job_t *job = MAP_LOOKUP(jobs, &tgid);
    struct control_t *s = settings();
    if (!job || !s)
        return;
    u64 now = bpf_ktime_get_ns();
    s32 code = 0;
    int told = 0;
    if (s->exit_code_at) {
        char *task = (char *)bpf_get_current_task();
        told = !bpf_probe_read_kernel(&code, sizeof(code), task + s->exit_code_at);
    }
    struct event_t *e = reserve(JIT, now, now - job->start, job->root, tgid);
    if (e) {
        e->code = code;
        e->flags = told ? CODE_KNOWN : 0;
        __builtin_memcpy(e->comm, job->comm, 16);
        submit(e);
    }
    MAP_DELETE(jobs, &tgid);
}

TRACEPOINT int on_exit(struct exit_t *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    u32 tid = id, tgid = id >> 32;
    count(HIT_OTHER);
    MAP_DELETE(threads, &tid);
    MAP_DELETE(calls, &id);
    if (tid != tgid)
        return 0;
    job_ends(tgid);
    MAP_DELETE(kin, &tgid);
    MAP_DELETE(procs, &tgid);
    return 0;
}

/* TLS: from the first call of SSL_do_handshake for a connection to success, failure or the end of the connection */

UPROBE int on_handshake(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), ssl = PT_REGS_PARM1(ctx), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32;
    count(HIT_OTHER);
    u32 *flags = MAP_LOOKUP(watched, &tgid);
    if (!flags || !(*flags & OF_TLS))
        return 0;
    struct of_stream_t key = {.tgid = tgid, .stream = ssl};
    struct tls_t fresh;
    __builtin_memset(&fresh, 0, sizeof(fresh));
    fresh.first = fresh.last = now;
    fresh.tid = id;
    bpf_get_current_comm(&fresh.comm, sizeof(fresh.comm));
    MAP_INSERT(handshakes, &key, &fresh);
    if (MAP_UPDATE(shaking, &id, &ssl))
        count(LOST_MAP);
    return 0;
}

static __always_inline void tls_event(u32 tgid, struct tls_t *h, u64 end, s32 code, s32 stack)
{
    struct event_t *e = reserve(TLS, end, end - h->first, tgid, h->tid);
    if (!e)
        return;
    e->call = SSL_do_handshake;
    e->code = code;
    e->stack = stack;
    __builtin_memcpy(e->comm, h->comm, 16);
    submit(e);
}

UPROBE int end_handshake(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tgid = id >> 32;
    s32 code = PT_REGS_RC(ctx);
    count(HIT_OTHER);
    u64 *ssl = MAP_LOOKUP(shaking, &id);
    struct control_t *s = settings();
    if (!ssl || !s)
        return 0;
    struct of_stream_t key = {.tgid = tgid, .stream = *ssl};
    MAP_DELETE(shaking, &id);
    struct tls_t *h = MAP_LOOKUP(handshakes, &key);
    if (!h)
        return 0;
    if (code < 0) { /* either not yet or never: SSL_free tells */
        h->last = now;
        h->code = code;
        h->tries++;
        return 0;
    }
    if (code == 0 || now - h->first >= s->tls_threshold) {
        s32 stack = STACK_ID(stacks, ctx, STACK_FLAGS);
        tls_event(tgid, h, now, code, stack);
    }
    MAP_DELETE(handshakes, &key);
    return 0;
}

UPROBE int on_ssl_free(struct pt_regs *ctx)
{
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    struct of_stream_t key = {.tgid = tgid, .stream = PT_REGS_PARM1(ctx)};
    count(HIT_OTHER);
    struct tls_t *h = MAP_LOOKUP(handshakes, &key);
    if (!h)
        return 0;
    if (h->tries)
        tls_event(tgid, h, h->last, h->code, -1);
    MAP_DELETE(handshakes, &key);
    return 0;
}
