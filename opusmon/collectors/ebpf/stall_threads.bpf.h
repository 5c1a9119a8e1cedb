/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* Tracepoints: the scheduler, page faults, and processes that compile. */
#pragma once

#include "stall_state.bpf.h"

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
