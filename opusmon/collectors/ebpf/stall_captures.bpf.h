/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* Captures of graphs: from begin to end, and who breaks one. */
#pragma once

#include "stall_calls.bpf.h"

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
