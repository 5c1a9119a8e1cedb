/* SPDX-License-Identifier: GPL-2.0-only OR BSD-3-Clause */
/* Copies: how many bytes which way, and whether the call waits for them. */
#pragma once

#include "stream_state.bpf.h"

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
