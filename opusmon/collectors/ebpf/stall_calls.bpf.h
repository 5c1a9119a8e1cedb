/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* Calls of libcuda that are followed from entry to return, and those that are only seen. */
#pragma once

#include "stall_state.bpf.h"

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
