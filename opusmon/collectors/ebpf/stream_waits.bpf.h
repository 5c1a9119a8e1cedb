/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* Waits and polls, for a stream, an event or all. */
#pragma once

#include "stream_state.bpf.h"

/* Waits */

UPROBE int wait_stream(struct pt_regs *ctx)
{
    count(HIT_ALWAYS);
    return begin_call(known_as(PT_REGS_PARM1(ctx), 0));
}

UPROBE int wait_stream_pt(struct pt_regs *ctx)
{
    count(HIT_ALWAYS);
    return begin_call(known_as(PT_REGS_PARM1(ctx), 1));
}

UPROBE int wait_context(struct pt_regs *ctx)
{
    count(HIT_ALWAYS);
    return begin_call(WHOLE_CONTEXT);
}

static __always_inline u64 stream_of_event(u64 event)
{
    struct event_key_t key = {.pid = process(), .event = event};
    u64 *stream = MAP_LOOKUP(events, &key);
    return stream ? *stream : WHOLE_CONTEXT;
}

UPROBE int wait_event(struct pt_regs *ctx)
{
    count(HIT_ALWAYS);
    return begin_call(stream_of_event(PT_REGS_PARM1(ctx)));
}

static __always_inline int bin_of(u64 ns)
{
    if (ns < 1000000ULL)
        return ns < 10000ULL ? 0 : ns < 100000ULL ? 1 : 2;
    if (ns < 100000000ULL)
        return ns < 10000000ULL ? 3 : 4;
    return ns < 1000000000ULL ? 5 : 6;
}

UPROBE int wait_end(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    struct call_t *call = MAP_LOOKUP(calls, &id);
    count(HIT_ALWAYS);
    if (!call)
        return 0; /* it began before the probe was there */
    u64 now = bpf_ktime_get_ns(), ns = now - call->start, stream = call->stream;
    MAP_DELETE(calls, &id);
    struct stream_t *s = of_stream(id >> 32, stream, now);
    int zero = 0;
    struct control_t *c = MAP_LOOKUP(control, &zero);
    if (!s || !c)
        return 0;
    __sync_fetch_and_add(&s->waits, 1);
    __sync_fetch_and_add(&s->wait_ns, ns);
    __sync_fetch_and_add(&s->hist[bin_of(ns) & 7], 1);
    s->wait_end = now;
    struct longest_t *most = longest_of(s, c->epoch);
    if (ns > most->wait_ns)
        most->wait_ns = ns;
    return 0;
}

/* An event stands for the stream it was recorded on last */

static __always_inline int recorded(u64 event, u64 stream)
{
    struct event_key_t key = {.pid = process(), .event = event};
    count(HIT_ALWAYS);
    if (MAP_UPDATE(events, &key, &stream))
        count(LOST_CALL);
    return 0;
}

UPROBE int event_record(struct pt_regs *ctx)
{
    return recorded(PT_REGS_PARM1(ctx), known_as(PT_REGS_PARM2(ctx), 0));
}

UPROBE int event_record_pt(struct pt_regs *ctx)
{
    return recorded(PT_REGS_PARM1(ctx), known_as(PT_REGS_PARM2(ctx), 1));
}

/* Polls */

UPROBE int poll_stream(struct pt_regs *ctx)
{
    count(HIT_POLL);
    return begin_call(known_as(PT_REGS_PARM1(ctx), 0));
}

UPROBE int poll_stream_pt(struct pt_regs *ctx)
{
    count(HIT_POLL);
    return begin_call(known_as(PT_REGS_PARM1(ctx), 1));
}

UPROBE int poll_event(struct pt_regs *ctx)
{
    count(HIT_POLL);
    return begin_call(stream_of_event(PT_REGS_PARM1(ctx)));
}

UPROBE int poll_end(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    struct call_t *call = MAP_LOOKUP(calls, &id);
    count(HIT_POLL);
    if (!call)
        return 0;
    u64 stream = call->stream;
    MAP_DELETE(calls, &id);
    if ((u32)PT_REGS_RC(ctx) != NOT_READY)
        return 0;
    struct stream_t *s = of_stream(id >> 32, stream, bpf_ktime_get_ns());
    if (s)
        __sync_fetch_and_add(&s->not_ready, 1);
    return 0;
}
