// SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause
/* Host evidence of CUDA stream use, added up in the kernel per process and stream.
 *
 * Nothing goes to user space per call: user space reads the whole of `streams` once per interval. Its counters
 * only grow (user space subtracts), so that reading loses nothing. Launches that a capture records into a graph are
 * counted and timed as launches, for the process calls the same function. No kernel structure is dereferenced: any
 * version's headers do. In the words of portable.bpf.h; compiled with
 *   STREAM_ON_STACK   byte offset from the stack pointer, at function entry, of the ninth argument
 *   MAX_STREAMS, MAX_CALLS, MAX_EVENTS, MAX_BINS   bounds of the maps
 */
#include "portable.bpf.h"

#define WHOLE_CONTEXT 0xffffffffffffffffULL /* waits for all streams, or for an event of an unknown one */
#define NOT_READY 600                       /* CUDA_ERROR_NOT_READY */
#define CONFIG_STREAM 32                    /* offsetof(CUlaunchConfig, hStream) */

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

/* CU_STREAM_LEGACY (1) is the null stream; in the _ptsz and _ptds variants null is the per-thread default (2). */
static __always_inline u64 known_as(u64 stream, int per_thread)
{
    if (stream == 1)
        return 0;
    return stream == 0 && per_thread ? 2 : stream;
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

/* Asynchronous copies: destination, source, bytes, stream */

UPROBE int copy_h2d_async(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 0), PT_REGS_PARM3(ctx), TO_DEVICE, 0);
}

UPROBE int copy_h2d_async_pt(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 1), PT_REGS_PARM3(ctx), TO_DEVICE, 0);
}

UPROBE int copy_d2h_async(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 0), PT_REGS_PARM3(ctx), TO_HOST, 0);
}

UPROBE int copy_d2h_async_pt(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 1), PT_REGS_PARM3(ctx), TO_HOST, 0);
}

UPROBE int copy_d2d_async(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 0), PT_REGS_PARM3(ctx), ON_DEVICE, 0);
}

UPROBE int copy_d2d_async_pt(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 1), PT_REGS_PARM3(ctx), ON_DEVICE, 0);
}

UPROBE int copy_any_async(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 0), PT_REGS_PARM3(ctx), UNTOLD, 0);
}

UPROBE int copy_any_async_pt(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM4(ctx), 1), PT_REGS_PARM3(ctx), UNTOLD, 0);
}

/* Between peers: destination and its context, source and its context, bytes, stream */

UPROBE int copy_peer_async(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM6(ctx), 0), PT_REGS_PARM5(ctx), ON_DEVICE, 0);
}

UPROBE int copy_peer_async_pt(struct pt_regs *ctx)
{
    return copy(known_as(PT_REGS_PARM6(ctx), 1), PT_REGS_PARM5(ctx), ON_DEVICE, 0);
}

UPROBE int copy_peer(struct pt_regs *ctx)
{
    return copy(0, PT_REGS_PARM5(ctx), ON_DEVICE, 0);
}

UPROBE int copy_peer_pt(struct pt_regs *ctx)
{
    return copy(2, PT_REGS_PARM5(ctx), ON_DEVICE, 0);
}

/* Synchronous copies: destination, source, bytes. Those on the device do not wait for it. */

UPROBE int copy_h2d(struct pt_regs *ctx)
{
    return copy(0, PT_REGS_PARM3(ctx), TO_DEVICE, 1);
}

UPROBE int copy_h2d_pt(struct pt_regs *ctx)
{
    return copy(2, PT_REGS_PARM3(ctx), TO_DEVICE, 1);
}

UPROBE int copy_d2h(struct pt_regs *ctx)
{
    return copy(0, PT_REGS_PARM3(ctx), TO_HOST, 1);
}

UPROBE int copy_d2h_pt(struct pt_regs *ctx)
{
    return copy(2, PT_REGS_PARM3(ctx), TO_HOST, 1);
}

UPROBE int copy_d2d(struct pt_regs *ctx)
{
    return copy(0, PT_REGS_PARM3(ctx), ON_DEVICE, 0);
}

UPROBE int copy_d2d_pt(struct pt_regs *ctx)
{
    return copy(2, PT_REGS_PARM3(ctx), ON_DEVICE, 0);
}

UPROBE int copy_any(struct pt_regs *ctx)
{
    return copy(0, PT_REGS_PARM3(ctx), UNTOLD, 1);
}

UPROBE int copy_any_pt(struct pt_regs *ctx)
{
    return copy(2, PT_REGS_PARM3(ctx), UNTOLD, 1);
}

/* Copies described by a structure: memory kinds and extents lie at fixed places in CUDA_MEMCPY2D and 3D */

struct box_t {
    u32 from, to;
    u64 width, height, depth;
};

static __always_inline int direction_of(u32 from, u32 to)
{
    if (from == 1 && (to == 2 || to == 3))
        return TO_DEVICE;
    if ((from == 2 || from == 3) && to == 1)
        return TO_HOST;
    if ((from == 2 || from == 3) && (to == 2 || to == 3))
        return ON_DEVICE;
    return UNTOLD;
}

static __always_inline int copy_box(void *at, u64 stream, int solid, int blocks)
{
    struct box_t b = {};
    b.depth = 1;
    long bad = bpf_probe_read_user(&b.from, 4, at + (solid ? 32 : 16));
    bad |= bpf_probe_read_user(&b.to, 4, at + (solid ? 120 : 72));
    bad |= bpf_probe_read_user(&b.width, 8, at + (solid ? 176 : 112));
    bad |= bpf_probe_read_user(&b.height, 8, at + (solid ? 184 : 120));
    if (solid)
        bad |= bpf_probe_read_user(&b.depth, 8, at + 192);
    if (bad) {
        count(HIT_ALWAYS);
        count(LOST_READ);
        return blocks ? begin_call(stream) : 0;
    }
    return copy(stream, b.width * b.height * b.depth, direction_of(b.from, b.to), blocks);
}

UPROBE int copy_2d_async(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), known_as(PT_REGS_PARM2(ctx), 0), 0, 0);
}

UPROBE int copy_2d_async_pt(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), known_as(PT_REGS_PARM2(ctx), 1), 0, 0);
}

UPROBE int copy_3d_async(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), known_as(PT_REGS_PARM2(ctx), 0), 1, 0);
}

UPROBE int copy_3d_async_pt(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), known_as(PT_REGS_PARM2(ctx), 1), 1, 0);
}

UPROBE int copy_2d(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), 0, 0, 1);
}

UPROBE int copy_2d_pt(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), 2, 0, 1);
}

UPROBE int copy_3d(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), 0, 1, 1);
}

UPROBE int copy_3d_pt(struct pt_regs *ctx)
{
    return copy_box((void *)PT_REGS_PARM1(ctx), 2, 1, 1);
}

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
