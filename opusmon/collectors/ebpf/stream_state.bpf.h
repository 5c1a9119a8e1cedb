/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* What the programs of streams.bpf.c share: types, maps, and what several of them do with these. */
#pragma once

#include "cuda.bpf.h"

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */

enum { HIT_LAUNCH, HIT_POLL, HIT_ALWAYS, HIT_TIMING, LOST_STREAM, LOST_CALL, LOST_READ, SLOTS };
enum { TO_DEVICE, TO_HOST, ON_DEVICE, UNTOLD };

struct key_t {
    u32 pid, pad;
    u64 stream;
};

/* `longest` is kept for two epochs: while user space reads the one that ended, the kernel fills the other. */
struct longest_t {
    u64 epoch, wait_ns, bubble_ns, call_ns;
};

struct stream_t {
    u64 launches, graph_launches, copies;
    u64 bytes[4];
    u64 waits, wait_ns;
    u64 hist[8];
    u64 bubbles, bubble_ns, not_ready;
    u64 timed, timed_ns;
    u64 last_launch, wait_end, seen;
    struct longest_t longest[2];
    u32 tid, pad;
    char comm[16];
};

struct call_t {
    u64 start, stream;
};

/* A launch call under way, in the burst in which it began. */
struct timed_t {
    u64 start, stream, burst;
};

/* How many launch calls of a process took how long. */
struct bin_key_t {
    u32 pid, bin;
};

struct event_key_t {
    u32 pid, pad;
    u64 event;
};

/* Written by user space. `launches_since` is when the launch probes went on, all ones while they are off. `burst` is
 * the number of the burst in which launch calls are timed, 0 between bursts; `binned` says that their times are to be
 * sorted into bins too. */
struct control_t {
    u64 epoch, launches_since, burst, binned;
};

HASH_MAP(streams, struct key_t, struct stream_t, MAX_STREAMS);
LRU_HASH_MAP(calls, u64, struct call_t, MAX_CALLS);
LRU_HASH_MAP(timed, u64, struct timed_t, MAX_CALLS);
HASH_MAP(call_bins, struct bin_key_t, u64, MAX_BINS);
LRU_HASH_MAP(events, struct event_key_t, u64, MAX_EVENTS);
ARRAY_MAP(control, struct control_t, 1);
ARRAY_MAP(blank, struct stream_t, 1);
PERCPU_ARRAY_MAP(counts, u64, SLOTS);

static __always_inline void count(int slot)
{
    u64 *n = MAP_LOOKUP(counts, &slot);
    if (n)
        __sync_fetch_and_add(n, 1);
}

static __always_inline u32 process(void)
{
    return bpf_get_current_pid_tgid() >> 32;
}

static __always_inline struct stream_t *of_stream(u32 pid, u64 stream, u64 now)
{
    struct key_t key = {.pid = pid, .stream = stream};
    struct stream_t *s = MAP_LOOKUP(streams, &key);
    if (!s) {
        int zero = 0;
        struct stream_t *empty = MAP_LOOKUP(blank, &zero);
        if (!empty)
            return 0;
        MAP_INSERT(streams, &key, empty);
        s = MAP_LOOKUP(streams, &key);
        if (!s) {
            count(LOST_STREAM);
            return 0;
        }
    }
    s->seen = now;
    u32 tid = bpf_get_current_pid_tgid();
    if (s->tid != tid) {
        s->tid = tid;
        bpf_get_current_comm(&s->comm, sizeof(s->comm));
    }
    return s;
}

static __always_inline struct longest_t *longest_of(struct stream_t *s, u64 epoch)
{
    struct longest_t *most = (epoch & 1) ? &s->longest[1] : &s->longest[0];
    if (most->epoch != epoch) {
        most->epoch = epoch;
        most->wait_ns = 0;
        most->bubble_ns = 0;
        most->call_ns = 0;
    }
    return most;
}

/* A bubble is counted once, by the first launch after the wait that ended last. */
static __always_inline void end_bubble(struct stream_t *s, u32 pid, u64 now)
{
    int zero = 0;
    struct control_t *c = MAP_LOOKUP(control, &zero);
    struct key_t whole = {.pid = pid, .stream = WHOLE_CONTEXT};
    struct stream_t *w = MAP_LOOKUP(streams, &whole);
    u64 end = s->wait_end;
    if (w && w->wait_end > end)
        end = w->wait_end;
    if (!c || end < c->launches_since || end <= s->last_launch || end > now)
        return;
    u64 gap = now - end;
    __sync_fetch_and_add(&s->bubbles, 1);
    __sync_fetch_and_add(&s->bubble_ns, gap);
    struct longest_t *most = longest_of(s, c->epoch);
    if (gap > most->bubble_ns)
        most->bubble_ns = gap;
}

static __always_inline int launch(u64 stream, int graph)
{
    u32 pid = process();
    u64 now = bpf_ktime_get_ns();
    struct stream_t *s = of_stream(pid, stream, now);
    if (!s)
        return 0;
    end_bubble(s, pid, now);
    s->last_launch = now;
    if (graph)
        __sync_fetch_and_add(&s->graph_launches, 1);
    else
        __sync_fetch_and_add(&s->launches, 1);
    return 0;
}

static __always_inline int begin_call(u64 stream)
{
    u64 id = bpf_get_current_pid_tgid();
    struct call_t call = {.start = bpf_ktime_get_ns(), .stream = stream};
    if (MAP_UPDATE(calls, &id, &call))
        count(LOST_CALL);
    return 0;
}

static __always_inline int copy(u64 stream, u64 bytes, int direction, int blocks)
{
    struct stream_t *s = of_stream(process(), stream, bpf_ktime_get_ns());
    count(HIT_ALWAYS);
    if (s) {
        __sync_fetch_and_add(&s->copies, 1);
        __sync_fetch_and_add(&s->bytes[direction & 3], bytes);
    }
    return blocks ? begin_call(stream) : 0;
}
