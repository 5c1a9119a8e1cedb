/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* TLS: from the first call of SSL_do_handshake for a connection to success, failure or the end of the connection. */
#pragma once

#include "stall_state.bpf.h"

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
