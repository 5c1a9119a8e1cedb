/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* Launches of kernels and graphs: how many, and in bursts how long the call takes. */
#pragma once

#include "stream_state.bpf.h"

/* Kernel launches */

static __always_inline int launch_at(void *place, int per_thread)
{
    u64 stream = 0;
    count(HIT_LAUNCH);
    if (bpf_probe_read_user(&stream, sizeof(stream), place)) {
        count(LOST_READ);
        return 0;
    }
    return launch(known_as(stream, per_thread), 0);
}

UPROBE int launch_stack(struct pt_regs *ctx)
{
    return launch_at((void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 0);
}

UPROBE int launch_stack_pt(struct pt_regs *ctx)
{
    return launch_at((void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 1);
}

UPROBE int launch_config(struct pt_regs *ctx)
{
    return launch_at((void *)(PT_REGS_PARM1(ctx) + CONFIG_STREAM), 0);
}

UPROBE int launch_config_pt(struct pt_regs *ctx)
{
    return launch_at((void *)(PT_REGS_PARM1(ctx) + CONFIG_STREAM), 1);
}

/* Graph launches */

UPROBE int launch_graph(struct pt_regs *ctx)
{
    count(HIT_ALWAYS);
    return launch(known_as(PT_REGS_PARM2(ctx), 0), 1);
}

UPROBE int launch_graph_pt(struct pt_regs *ctx)
{
    count(HIT_ALWAYS);
    return launch(known_as(PT_REGS_PARM2(ctx), 1), 1);
}

/* The time of launch calls, from entry to return. Only one that began and ended within the same burst is counted: the
 * entry kept from an earlier burst, whose return was not seen, has that one's number. */

#define FIRST_OCTAVE 8  /* bin 0 is under 2^8 ns */
#define LAST_OCTAVE 35  /* the last bin begins at 2^36 ns */
#define OCTAVE_BITS 4   /* 16 bins of equal width in each octave */

static __always_inline int begin_timing(u64 stream)
{
    int zero = 0;
    u64 id = bpf_get_current_pid_tgid();
    struct control_t *c = MAP_LOOKUP(control, &zero);
    if (!c || !c->burst)
        return 0;
    struct timed_t call = {.stream = stream, .burst = c->burst};
    call.start = bpf_ktime_get_ns();
    if (MAP_UPDATE(timed, &id, &call))
        count(LOST_CALL);
    return 0;
}

static __always_inline int begin_timing_at(void *place, int per_thread)
{
    u64 stream = 0;
    count(HIT_TIMING);
    if (bpf_probe_read_user(&stream, sizeof(stream), place))
        return 0; /* the launch probe counts it as lost */
    return begin_timing(known_as(stream, per_thread));
}

UPROBE int time_stack(struct pt_regs *ctx)
{
    return begin_timing_at((void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 0);
}

UPROBE int time_stack_pt(struct pt_regs *ctx)
{
    return begin_timing_at((void *)(PT_REGS_SP(ctx) + STREAM_ON_STACK), 1);
}

UPROBE int time_config(struct pt_regs *ctx)
{
    return begin_timing_at((void *)(PT_REGS_PARM1(ctx) + CONFIG_STREAM), 0);
}

UPROBE int time_config_pt(struct pt_regs *ctx)
{
    return begin_timing_at((void *)(PT_REGS_PARM1(ctx) + CONFIG_STREAM), 1);
}

UPROBE int time_graph(struct pt_regs *ctx)
{
    count(HIT_TIMING);
    return begin_timing(known_as(PT_REGS_PARM2(ctx), 0));
}

UPROBE int time_graph_pt(struct pt_regs *ctx)
{
    count(HIT_TIMING);
    return begin_timing(known_as(PT_REGS_PARM2(ctx), 1));
}

static __always_inline u32 octave_of(u64 ns)
{
    u32 octave = 0;
    if (ns >> 32) {
        octave += 32;
        ns >>= 32;
    }
    if (ns >> 16) {
        octave += 16;
        ns >>= 16;
    }
    if (ns >> 8) {
        octave += 8;
        ns >>= 8;
    }
    if (ns >> 4) {
        octave += 4;
        ns >>= 4;
    }
    if (ns >> 2) {
        octave += 2;
        ns >>= 2;
    }
    return octave + (ns >> 1 ? 1 : 0);
}

static __always_inline u32 call_bin_of(u64 ns)
{
    if (ns < (1ULL << FIRST_OCTAVE))
        return 0;
    u32 octave = octave_of(ns);
    if (octave > LAST_OCTAVE)
        return 1 + ((LAST_OCTAVE - FIRST_OCTAVE + 1) << OCTAVE_BITS);
    u32 part = (ns >> (octave - OCTAVE_BITS)) & ((1 << OCTAVE_BITS) - 1);
    return 1 + ((octave - FIRST_OCTAVE) << OCTAVE_BITS) + part;
}

static __always_inline void count_in_bin(u32 pid, u64 ns)
{
    struct bin_key_t key = {.pid = pid, .bin = call_bin_of(ns)};
    u64 none = 0, *n = MAP_LOOKUP(call_bins, &key);
    if (!n) {
        MAP_INSERT(call_bins, &key, &none);
        n = MAP_LOOKUP(call_bins, &key);
    }
    if (n)
        __sync_fetch_and_add(n, 1);
    else
        count(LOST_CALL);
}

UPROBE int time_end(struct pt_regs *ctx)
{
    u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
    struct timed_t *call = MAP_LOOKUP(timed, &id);
    count(HIT_TIMING);
    if (!call)
        return 0;
    u64 ns = now - call->start, stream = call->stream, burst = call->burst;
    MAP_DELETE(timed, &id);
    int zero = 0;
    struct control_t *c = MAP_LOOKUP(control, &zero);
    if (!c || burst != c->burst)
        return 0;
    struct stream_t *s = of_stream(id >> 32, stream, now);
    if (!s)
        return 0;
    __sync_fetch_and_add(&s->timed, 1);
    __sync_fetch_and_add(&s->timed_ns, ns);
    struct longest_t *most = longest_of(s, c->epoch);
    if (ns > most->call_ns)
        most->call_ns = ns;
    if (c->binned)
        count_in_bin(id >> 32, ns);
    return 0;
}
